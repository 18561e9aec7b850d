"""Every method of PEFT under every kind of plan, bitwise as without a plan."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM

from hf_actswap import MemoryPlan, PlanError, apply
from hf_actswap.engine import StaleTensorError
from hf_actswap.plan import PlanRow
from tests.engine.tiny_models import batch, tiny_llama
from tests.quick_cases import quick_named

OWN: dict[str, dict[str, Any]] = {
    "LORA": {"r": 2},
    "ADALORA": {"r": 2, "total_step": 10},
    "ADAMSS": {"r": 4},
    "ADAPTION_PROMPT": {"target_modules": None, "adapter_len": 4, "adapter_layers": 2},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 16},
    "CARTRIDGE": {"num_virtual_tokens": 3},
    "CPT": {"cpt_token_ids": [1, 2, 3, 4], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]},
    "FOURIERFT": {"n_frequency": 8},
    "GRALORA": {"r": 4, "gralora_k": 2},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LILY": {"r": 2, "stride_A": 1, "num_B": 2},
    "LN_TUNING": {"target_modules": None},
    "MISS": {"r": 4},
    "OFT": {"r": 0, "oft_block_size": 4},
    "OSF": {"effective_rank": 4},
    "PEANUT": {"r": 2},
    "POLY": {"r": 2},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "PSOFT": {"r": 4},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 3, "num_tasks": 2, "num_ranks": 1},
    "P_TUNING": {"num_virtual_tokens": 3},
    "ROAD": {"group_size": 4},
    "SHADOW": {"target_modules": None},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"target_modules": None, "token_indices": [1, 2, 3]},
    "VBLORA": {"r": 2, "num_vectors": 4, "vector_length": 16},
    "WAVEFT": {"n_frequency": 8},
}
"""Where a method needs or takes other arguments than the modules that it adapts."""

PLANS: dict[str, dict[str, Any]] = {
    "swap": {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 5, "layers": True}]}},
    "mix": {
        "swap_config": {
            "swap": True,
            "op_swap": [{"op_name": "self_attn", "backward_prefetch": 5, "layers": [0, 1, 2]}],
        },
        "recompute_config": {"recompute": [3], "select_recompute": {"mlp": [0, 1], "input_layernorm": True}},
    },
    "recompute": {"recompute_config": {"recompute": True}},
    "tiles": {"tile_config": {"loss": 3, "tile": [{"op_name": "mlp", "tokens": 8}]}},
}


def adapted(method: str, folder: Path) -> nn.Module:
    """Return a tiny Llama in training mode, with a method of PEFT on it, always the same."""
    kind: Any = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(method)]
    known = inspect.signature(kind).parameters
    common = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    settings = {name: value for name, value in common.items() if name in known} | OWN.get(method, {})
    model: Any = tiny_llama()
    if method == "XLORA":
        settings["adapters"] = {name: str(_saved_lora(folder / name)) for name in ("0", "1")}
        settings.pop("target_modules", None)
        settings["hidden_size"] = model.config.hidden_size
        model.config.use_cache = False
    torch.manual_seed(5)
    made: Any = peft.get_peft_model(model, kind(**settings))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():  # many start as zeros, whose gradients are zero
        for weight in made.parameters():
            if weight.requires_grad and weight.is_floating_point():
                weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return made.train()


def _saved_lora(folder: Path) -> Path:
    torch.manual_seed(int(folder.name))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(tiny_llama(), config).save_pretrained(folder)
    return folder


def step(model: nn.Module, method: str) -> dict[str, torch.Tensor]:
    """Return loss and gradients of two steps; between them the weights change a little."""
    found: dict[str, torch.Tensor] = {}
    for number in range(2):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(number)
        ids = batch(number)
        tasks = {"task_ids": torch.tensor([0, 0])} if method in ("POLY", "MULTITASK_PROMPT_TUNING") else {}
        loss = model(input_ids=ids, labels=ids, **tasks).loss
        loss.backward()
        found[f"loss {number}"] = loss.detach()
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                found[f"{name} {number}"] = weight.grad.clone()
                with torch.no_grad():
                    weight -= 0.1 * weight.grad
    return found


PAIRS = {
    f"{method.value} {plan}": (method.value, plan) for method in PEFT_TYPE_TO_CONFIG_MAPPING for plan in PLANS
}
QUICK = [
    *("PREFIX_TUNING recompute", "PREFIX_TUNING mix", "PROMPT_TUNING tiles", "CPT swap", "VERA tiles"),
    *("VBLORA swap", "RANDLORA mix", "POLY recompute"),
]
NOT_TILED = {
    **dict.fromkeys(("C3A", "LILY"), "mixes tokens|not known to treat tokens one by one"),
    **dict.fromkeys(("CPT", "FROD", "LOHA", "LOKR", "VBLORA"), "no run on fake tensors"),
    **dict.fromkeys(("MULTITASK_PROMPT_TUNING", "POLY"), "task_ids"),
    **dict.fromkeys(("PROMPT_TUNING", "P_TUNING"), "not called with hidden states first"),
    "PVERA": "",
}
"""Methods whose MLP is not tiled, and what the error says. PVeRA draws random numbers, in tiles others."""


@pytest.mark.parametrize("pair", quick_named(PAIRS, QUICK))
def test_a_method_under_a_plan(
    pair: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    method, plan = pair
    if method == "ADAMSS":
        pytest.importorskip("sklearn")
    expected, model = step(adapted(method, tmp_path), method), adapted(method, tmp_path)
    places = [(name, id(item)) for name, item in model.named_parameters(remove_duplicate=False)]
    document = PLANS[plan]
    if method == "SHADOW" and plan == "mix":  # it puts a module around each layer
        document = yaml.safe_load(
            re.sub("self_attn|mlp|input_layernorm", r"base_layer.\g<0>", yaml.safe_dump(document))
        )
    if plan == "tiles" and method in NOT_TILED:
        if NOT_TILED[method]:
            with pytest.raises(PlanError, match=NOT_TILED[method]):
                apply(model, document)
        return
    applied = apply(model, document)
    found = step(model, method)
    applied.remove()
    if plan == "tiles":  # its sums have another order
        torch.testing.assert_close(found, expected)
    else:
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert "plan swaps nothing" not in caplog.text
    assert "plan recomputes nothing" not in caplog.text
    assert [(name, id(item)) for name, item in model.named_parameters(remove_duplicate=False)] == places


def adapted_experts() -> nn.Module:
    """Return a tiny mixture of experts whose weights have LoRA: PEFT parametrizes them in each call."""
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 4}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(5)
    model = GptOssForCausalLM(GptOssConfig(vocab_size=128, num_local_experts=4, use_cache=False, **shape))
    experts = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    settings = peft.LoraConfig(r=2, target_parameters=experts, init_lora_weights=False, task_type="CAUSAL_LM")
    made: Any = peft.get_peft_model(model, settings)
    return made.train()


@pytest.mark.parametrize("plan", ["swap", "mix", "recompute"])
def test_lora_on_the_weights_of_experts_under_a_plan(plan: str) -> None:
    expected = step(adapted_experts(), "LORA")
    model = adapted_experts()
    with apply(model, PLANS[plan]):
        found = step(model, "LORA")
    assert any("lora" in name for name in found)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("written", ["self_attn.o_proj.weight", "mlp.router.weight", "lora_B.default.weight"])
def test_other_weights_beside_such_experts_are_still_watched(written: str) -> None:
    model = adapted_experts()
    weight = next(weight for name, weight in model.named_parameters() if name.endswith(written))
    ids = batch(0)
    with apply(model, PLANS["recompute"]):
        loss = model(input_ids=ids, labels=ids).loss
        with torch.no_grad():
            weight += 1
        with pytest.raises(StaleTensorError, match=re.escape(written)):
            loss.backward()


def test_weights_of_experts_that_are_trained_too_are_still_watched() -> None:
    model = adapted_experts()
    for name, weight in model.named_parameters():
        if name.endswith("base_layer.down_proj"):
            weight.requires_grad_(True)
    ids = batch(0)
    with apply(model, PLANS["recompute"]), pytest.raises(StaleTensorError, match=r"base_layer\.down_proj"):
        model(input_ids=ids, labels=ids).loss.backward()


def test_a_cast_to_the_type_that_a_tensor_has_is_no_reader() -> None:
    """PEFT casts what an adapted layer returns. Recomputed, that cast would hold a copy that nobody reads."""
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["gate_proj", "up_proj"]))
    layers = range(model.config.num_hidden_layers)
    fates = {"mlp.gate_proj.add": "swap", "mlp.gate_proj.to": "recompute", "mlp.act_fn.silu": "recompute"}
    rows = tuple(PlanRow(layer, path, fate) for layer in layers for path, fate in fates.items())
    applied = apply(model, MemoryPlan(rows, len(layers), "llama", min_tensor_bytes=1))
    ids = batch(0)
    loss = model(input_ids=ids, labels=ids).loss
    stats = applied.stats()
    assert stats.offloads == stats.live_swaps > 0  # each copy is one that backward needs
    loss.backward()
    assert applied.stats().offloads == applied.stats().prefetches
    applied.remove()
