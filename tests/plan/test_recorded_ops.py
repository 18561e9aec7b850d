"""What the model structure records on fake tensors is what the engine meets in a real forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaModel

from hf_actswap import (
    MemoryPlan,
    PlanError,
    adapt_mem_func_wrapper,
    apply,
    load_config,
    model_structure,
    resolve_plan,
)
from hf_actswap.plan import ModelStructure, PlanRow
from hf_actswap.plan.opnames import OpStack
from tests.engine.tiny_models import NUM_LAYERS, one_step, snapshot, tiny_llama, tiny_neox

MakeModel = Callable[..., nn.Module]
Gradients = Callable[[nn.Module], dict[str, torch.Tensor]]


def functions_met(
    model: nn.Module, shape: ModelStructure, monkeypatch: pytest.MonkeyPatch, sequences: int = 2
) -> list[str]:
    """Op paths in the order in which the engine meets them in a real forward."""
    met: list[str] = []
    count = OpStack.count

    def counted(stack: OpStack, path: str) -> None:
        met.append(path)
        count(stack, path)

    # A keep row inside each layer makes the engine name every op and changes nothing.
    rows = tuple(PlanRow(layer.index, "mlp", "keep") for layer in shape.layers)
    with apply(model, MemoryPlan(rows, num_layers=len(shape.layers))), monkeypatch.context() as patch:
        patch.setattr(OpStack, "count", counted)
        model(input_ids=torch.full((sequences, 12), 5))
    return met


@pytest.mark.parametrize(("sequences", "eager"), [(2, False), (1, True), (1, False)])
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "phi3"]
)
def test_dense_families_run_what_was_recorded(
    family: str, sequences: int, eager: bool, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    if eager:
        model.set_attn_implementation("eager")
    shape = model_structure(model)
    recorded = [call.key[0] for layer in shape.layers for call in layer.calls]
    assert functions_met(model, shape, monkeypatch, sequences) == recorded


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_expert_families_run_what_was_recorded(
    family: str, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the routed experts only the gated activation is recorded: the rest depends on data."""
    model = tiny_model(family)
    shape = model_structure(model)
    recorded = [call.key[0] for layer in shape.layers for call in layer.calls]
    met = functions_met(model, shape, monkeypatch)

    def outside(paths: list[str]) -> list[str]:
        return [path for path in paths if not path.startswith("mlp.experts")]

    assert outside(met) == outside(recorded)
    assert {"mlp.experts", "mlp.experts.act_fn.silu", "mlp.experts.mul"} == {
        path for path in recorded if path.startswith("mlp.experts")
    }
    assert {"mlp.experts.act_fn.silu", "mlp.experts.mul"} <= set(met)


# Ops whose saved tensors a recomputation must rebuild; the others may have nothing to rebuild.
REBUILT = {
    "llama": {
        "mlp.mul",
        "mlp.act_fn.silu",
        "mlp.gate_proj.linear",
        "self_attn.flash_attention",
        "self_attn",
        "mlp",
    },
    "gpt_neox": {"mlp.act.gelu", "mlp.dense_h_to_4h.linear", "attention.flash_attention", "attention", "mlp"},
}


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_neox", marks=pytest.mark.slow)])
def test_recomputing_any_op_leaves_gradients_bitwise_equal(
    family: str, tiny_model: MakeModel, gradients: Gradients
) -> None:
    model = tiny_model(family)
    expected = gradients(model)
    rebuilt = set()
    for path in ["", *(op.path for op in model_structure(model).layers[1].ops)]:
        rows = tuple(PlanRow(layer, path, "recompute") for layer in (0, 1))
        with apply(model, MemoryPlan(rows, num_layers=2)) as applied:
            found = gradients(model)
            if applied.stats().recomputes:
                rebuilt.add(path)
        assert found.keys() == expected.keys(), path
        assert [name for name in found if not torch.equal(found[name], expected[name])] == [], path
    assert rebuilt >= REBUILT[family]


class GatedLayer(nn.Module):
    """A decoder layer of no known family; ``hostile`` code asks for a value that fake tensors do not have."""

    def __init__(self, width: int, hostile: bool) -> None:
        super().__init__()
        self.self_attn = PlainAttention(width)
        self.wide, self.gate, self.narrow = (nn.Linear(width, width) for _ in range(3))
        self.hostile = hostile

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(hidden)
        if self.hostile and hidden.abs().max().item() > 1e9:
            hidden = hidden / 2
        gated = torch.sigmoid(self.gate(hidden)) * self.wide(hidden)
        return hidden + self.narrow(gated)


class PlainAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        weights = torch.softmax(query @ key.transpose(-1, -2), dim=-1)
        mixed: torch.Tensor = self.out(weights @ value)
        return mixed


class OwnDecoder(nn.Module):
    """A decoder that is no Hugging Face class."""

    def __init__(self, hostile: bool = False, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(GatedLayer(width, hostile) for _ in range(2))
        self.last_norm = nn.LayerNorm(width)
        self.to_logits = nn.Linear(width, 64)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        hidden = self.tokens(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.to_logits(self.last_norm(hidden))
        return logits


def own_gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(input_ids=torch.arange(24).reshape(2, 12)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_unknown_family_is_recorded() -> None:
    shape = model_structure(OwnDecoder())
    assert (shape.family, shape.functions_known) == ("", True)
    assert (shape.embedding, shape.final_norm, shape.head) == (None, "last_norm", None)
    assert [layer.module_path for layer in shape.layers] == ["blocks.0", "blocks.1"]
    functions = [op.path for op in shape.layers[0].ops if op.kind == "function"]
    assert functions == [
        "self_attn.qkv.linear",
        "self_attn.flash_attention",
        "self_attn.out.linear",
        "add",
        "gate.linear",
        "sigmoid",
        "wide.linear",
        "mul",
        "narrow.linear",
    ]
    assert shape.layers[0].inputs_of("mul") == (("sigmoid", 0), ("wide.linear", 0))
    assert shape.layers[0].output_of == ("add", 1)


def test_unknown_family_trains_under_a_plan() -> None:
    torch.manual_seed(0)
    model = OwnDecoder()
    expected = own_gradients(model)
    document = {
        "swap_config": {
            "swap": True,
            "op_swap": [{"op_name": "self_attn.flash_attention", "backward_prefetch": 3, "layers": True}],
        },
        "recompute_config": {"select_recompute": {"mul": True, "sigmoid": [1]}},
        "memory": {"min_tensor_mib": 1e-6},
    }
    with apply(model, document) as applied:
        found = own_gradients(model)
        assert applied.stats().recomputes > 0
        assert applied.stats().offloaded_bytes > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_hostile_code_leaves_module_paths() -> None:
    model = OwnDecoder(hostile=True).to("meta")  # where a small forward cannot be run
    shape = model_structure(model)
    assert not shape.functions_known
    assert shape.why_not.startswith("DataDependentOutputException: ")
    assert [op.path for op in shape.layers[0].ops if op.kind == "function"] == ["self_attn.flash_attention"]
    document = {"recompute_config": {"select_recompute": {"mul": True, "gate": True, "self_attn": [1]}}}
    with pytest.raises(PlanError) as caught:
        resolve_plan(load_config(document), shape)
    assert [str(problem) for problem in caught.value.problems] == [
        "recompute_config.select_recompute: expected a path that names an op of GatedLayer, found 'mul'. "
        "Some that exist: self_attn, self_attn.qkv, self_attn.out, self_attn.flash_attention, wide, gate, "
        "narrow, attention, attention.flash_attention, attention.flash_attention.flash_attention, "
        "attention.wq, attention.wk. "
        f"Only module paths are known of this model ({shape.why_not}). If an operator there has no fake "
        "implementation, give it one (torch.library.register_fake)."
    ]


class Foreign(torch.autograd.Function):
    """Stands for an extension that reads memory and has no fake implementation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class ForeignNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return adapt_mem_func_wrapper(Foreign, x + torch.rand(()))


def test_a_model_is_recorded_as_it_trains() -> None:
    """transformers loads models in evaluation mode, and a trainer changes it later."""
    model = tiny_neox().eval()
    assert "post_attention_dropout.dropout" in {op.path for op in model_structure(model).layers[0].ops}
    assert not any(module.training for module in model.modules())


def test_what_fakes_cannot_run_is_recorded_in_a_small_forward(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = tiny_llama(), tiny_llama()
    model.model.layers[1].mlp.act_fn = ForeignNorm()
    before, random_numbers = snapshot(model), torch.get_rng_state()
    with caplog.at_level("INFO"):
        found = model_structure(model)
    assert found.functions_known
    assert found.layers[0].calls == model_structure(plain).layers[0].calls
    assert "(in model.layers.1.mlp.act_fn" in caplog.text
    assert "register_fake" in caplog.text
    assert snapshot(model) == before
    assert model.model.layers[1].mlp.act_fn.calls == 0
    assert torch.equal(torch.get_rng_state(), random_numbers)
    with apply(model, {"recompute_config": {"select_recompute": True}}) as applied:
        one_step(model)
        assert applied.stats().recomputes >= 2 * (NUM_LAYERS - 1)


class OtherNames(LlamaModel):
    def forward(self, tokens: torch.Tensor) -> Any:
        return super().forward(input_ids=tokens, use_cache=False)


class WithoutUseCache(LlamaModel):
    def forward(self, input_ids: torch.Tensor) -> Any:
        return super().forward(input_ids=input_ids, use_cache=False)


@pytest.mark.parametrize("kind", [OtherNames, WithoutUseCache])
def test_a_forward_without_the_usual_arguments(kind: type[LlamaModel]) -> None:
    config = tiny_llama().config
    found, expected = model_structure(kind(config)), model_structure(LlamaModel(config))
    assert found.functions_known
    assert found.layers == expected.layers


def test_hostile_code_trains_under_module_paths() -> None:
    torch.manual_seed(0)
    model = OwnDecoder(hostile=True)
    expected = own_gradients(model)
    document = {"recompute_config": {"recompute": [1], "select_recompute": {"gate": True, "self_attn": True}}}
    with apply(model, document) as applied:
        found = own_gradients(model)
        assert applied.stats().recomputes > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_no_decoder() -> None:
    with pytest.raises(PlanError) as caught:
        model_structure(nn.Sequential(nn.Linear(2, 2)))
    assert [str(problem) for problem in caught.value.problems] == [
        "model: expected a transformers model: a list of layers that hold attention, or can be checkpointed, "
        "found Sequential. Pass the model itself."
    ]
