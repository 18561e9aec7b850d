"""Frozen weights on the host: bits as on the device, few layers there at once, copies as computed."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actswap import ConfigError, MemoryPlan, PlanError, apply, load_config
from hf_actswap.engine import (
    AppliedPlan,
    Copy,
    FrozenWeights,
    HostBuffer,
    Link,
    PageableSlabs,
    StaleTensorError,
    host_budget,
)
from hf_actswap.engine.frozen_weights import LAYERS_AHEAD, LayerWeights
from hf_actswap.plan import Tile, model_structure
from hf_actswap.plan.model_structure import unwrapped
from tests.engine.disorderly_transfer import DisorderlyTransfer, Machine
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.simulated_transfer import Clock, SimulatedTransfer
from tests.engine.spies import WatchingTransfer
from tests.engine.test_with_quantised import quantised_llama
from tests.engine.tiny_models import (
    NUM_LAYERS,
    PLANS,
    assert_bitwise_equal,
    batch,
    forward,
    gradients,
    gradients_of_step,
    one_step,
    plan_of,
    recompute_rows,
    snapshot,
    swap_everything,
    tiny,
    tiny_llama,
    tiny_neox,
)

HOST = plan_of(weights="host")
IN_WINDOW = LAYERS_AHEAD + 1


def lora(model: nn.Module, **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    asked: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**(asked | settings))).train()


def lora_llama(**settings: Any) -> nn.Module:
    return lora(tiny_llama(), **settings)


def prompted_llama() -> nn.Module:
    """Every layer is frozen, and backward goes through all of them to the prompt."""
    torch.manual_seed(1)
    return get_peft_model(tiny_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def half_frozen_llama() -> nn.Module:
    """The lower half of the layers has no backward."""
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2" in name or "layers.3.mlp" in name)
    return model


def applied_to(model: nn.Module, plan: MemoryPlan = HOST, transfer: Any = None) -> AppliedPlan:
    applied = apply(model, replace(plan, weights="host"), transfer=transfer)
    assert isinstance(applied, AppliedPlan)
    return applied


def weights_of(applied: AppliedPlan) -> FrozenWeights:
    assert applied.weights is not None
    return applied.weights


def assert_same_steps(make: Callable[[], nn.Module], plan: MemoryPlan, transfer: Any = None) -> AppliedPlan:
    """Two accumulated steps with an optimizer, on the host and without; return what was applied."""
    model, bare = make(), make()
    before, state = snapshot(model), copy.deepcopy(model.state_dict())
    with torch.random.fork_rng():
        applied = applied_to(model, plan, transfer)
        found = [_steps(one) for one in (bare, model)]
    for expected, got in zip(*found, strict=True):
        assert_bitwise_equal(got, expected)
    applied.remove()
    assert snapshot(model) == before
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert_bitwise_equal(
        {name: value for name, value in model.state_dict().items() if name not in trained},
        {name: value for name, value in state.items() if name not in trained},
    )
    return applied


def _steps(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    found = []
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            one_step(model, 2 * step + part)
        found.append(gradients(model))
        optimizer.step()
    return found


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lora_llama,
    "neox with dropout": lambda: lora(tiny_neox()),
    "qwen3": lambda: lora(tiny("Qwen3")),
    "gemma2": lambda: lora(tiny("Gemma2")),
    "mistral": lambda: lora(tiny("Mistral")),
    "prompt": prompted_llama,
    "half frozen": half_frozen_llama,
    "packed in 4 bits": lambda: quantised_llama("custom function"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_bitwise_equal(family: str) -> None:
    assert_same_steps(FAMILIES[family], HOST, RecordingTransfer())


TILED = plan_of(tiles=tuple(Tile(layer, "mlp", tokens=10) for layer in range(NUM_LAYERS)))
BESIDE = {
    **PLANS,
    "ops recomputed": plan_of(*recompute_rows(["mlp.act_fn", "mlp.mul", "self_attn.q_proj"], range(4))),
    "functions of weights recomputed": plan_of(
        *recompute_rows(
            ["input_layernorm.mul", "post_attention_layernorm.mul", "mlp.up_proj.linear"], range(4)
        )
    ),
    "tiles": TILED,
    "tiles in recomputed layers": replace(TILED, rows=recompute_rows([""], range(4))),
}


@pytest.mark.parametrize("name", BESIDE)
def test_beside_swap_recompute_and_tiles(name: str) -> None:
    """Against the same plan with the weights on the device: tiles have another order of sums."""
    plan = BESIDE[name]
    model, other = lora_llama(), lora_llama()
    applied, kept = applied_to(model, plan, RecordingTransfer()), apply(other, plan)
    for step in range(3):
        assert_bitwise_equal(gradients_of_step(model, step), gradients_of_step(other, step))
    weights = weights_of(applied)
    # The first forward finds nothing on the device.
    expected = 3 * weights.step_bytes + sum(layer.size_bytes for layer in weights.layers[:IN_WINDOW])
    assert weights.stats().prefetched_bytes == expected
    applied.remove()
    kept.remove()


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_transformers_own_checkpointing(reentrant: bool) -> None:
    def make() -> nn.Module:
        model = lora_llama()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    assert_same_steps(make, HOST, RecordingTransfer())


def test_bytes_over_the_link_are_the_formula() -> None:
    """Each layer twice a micro-batch, without those that stay at the two turns."""
    model = lora_llama()
    with applied_to(model) as applied:
        weights = weights_of(applied)
        sizes = [layer.size_bytes for layer in weights.layers]
        frozen = [
            sum(-(-one.nbytes // 512) * 512 for one in layer.parameters() if not one.requires_grad)
            for layer in model.base_model.model.model.layers
        ]
        assert sizes == frozen, "each weight at a multiple of 512"
        totals = [0]
        for step in range(4):
            one_step(model, step)
            totals.append(weights.stats().prefetched_bytes)
        steps = [now - before for before, now in pairwise(totals)]
        stay = sum(sizes[:IN_WINDOW]) + sum(sizes[-IN_WINDOW:])
        assert steps[1:] == [2 * sum(sizes) - stay] * 3 == [weights.step_bytes] * 3
        assert steps[0] == 2 * sum(sizes) - sum(sizes[-IN_WINDOW:])
        assert weights.stats().late_prefetches == 1, "the first layer of the first forward"


def test_layers_below_the_lowest_trained_one_are_not_copied_in_backward() -> None:
    model = half_frozen_llama()
    with applied_to(model) as applied:
        weights = weights_of(applied)
        one_step(model)
        before = weights.stats().prefetched_bytes
        one_step(model, 1)
        # Layers 2 and 3 stay for backward, which needs no others: the next forward begins with 0 and 1.
        sizes = {layer.scope: layer.size_bytes for layer in weights.layers}
        assert set(sizes) == {0, 1, 3}, "layer 2 is trained whole"
        assert weights.stats().prefetched_bytes - before == sizes[0] + sizes[1] + sizes[3] - sizes[1]


class CountingTransfer(WatchingTransfer):
    """Notes how many blocks, of layers of one size, are alive whenever another is made."""

    most_blocks = 0

    @property
    def alive_blocks(self) -> int:
        return sum(not block.expired() for block in self.blocks)

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        block_and_copy = super().reload(host, after)
        assert host.size_bytes == 31744
        self.most_blocks = max(self.most_blocks, self.alive_blocks)
        return block_and_copy


@pytest.mark.parametrize("plan", ["nothing", "layers recomputed", "mlp recomputed", "everything swapped"])
def test_no_more_than_the_window_is_on_the_device(plan: str) -> None:
    """Neither autograd nor a recomputation holds a layer's block once the layer is through."""
    model, transfer = lora_llama(), CountingTransfer()
    applied = applied_to(model, HOST, transfer)
    rows = () if plan == "nothing" else PLANS[plan].rows
    recomputing = apply(model, plan_of(*[row for row in rows if row.fate == "recompute"])) if rows else None
    for step in range(2):
        loss = forward(model, step)
        assert transfer.alive_blocks <= IN_WINDOW
        loss.backward()
    assert transfer.most_blocks == IN_WINDOW
    assert weights_of(applied).window_bytes == IN_WINDOW * 31744
    del recomputing
    applied.remove()
    assert transfer.alive_blocks == 0


def test_an_op_that_runs_again_holds_no_weights_until_then() -> None:
    """It holds its inputs itself, past the hooks by which autograd gives back those of other ops."""
    model, transfer = lora_llama(), CountingTransfer()
    applied = applied_to(model, BESIDE["functions of weights recomputed"], transfer)
    for step in range(2):
        loss = forward(model, step)
        assert transfer.alive_blocks <= IN_WINDOW
        loss.backward()
    assert transfer.most_blocks == IN_WINDOW
    assert applied.stats().recomputes
    applied.remove()


def test_several_forwards_before_a_backward_and_a_retained_graph() -> None:
    def run(model: nn.Module) -> list[dict[str, torch.Tensor]]:
        first, second, unused = forward(model, 0), forward(model, 1), forward(model, 2)
        found = []
        for loss, retain in ((second, True), (first, False), (second, False)):
            model.zero_grad()
            loss.backward(retain_graph=retain)
            found.append(gradients(model))
        del unused
        return found

    model = lora_llama()
    with applied_to(model, transfer=RecordingTransfer()):
        for got, expected in zip(run(model), run(lora_llama()), strict=True):
            assert_bitwise_equal(got, expected)


def test_evaluation_and_generate_are_as_on_the_device() -> None:
    model, bare = lora_llama(), lora_llama()
    with applied_to(model, transfer=RecordingTransfer()):
        for one in (model, bare):
            one.eval()
        with torch.no_grad():
            assert torch.equal(model(input_ids=batch(0)).logits, bare(input_ids=batch(0)).logits)
        with torch.inference_mode():
            assert torch.equal(model(input_ids=batch(1)).logits, bare(input_ids=batch(1)).logits)
        asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(
            model.generate(input_ids=batch(0), **asked), bare.generate(input_ids=batch(0), **asked)
        )
        for one in (model, bare):  # what inference mode has left in the window serves training
            one.train()
        assert_bitwise_equal(gradients_of_step(model), gradients_of_step(bare))


def test_saving_needs_no_device(tmp_path: Any) -> None:
    model = lora_llama()
    expected = copy.deepcopy(model.state_dict())
    with applied_to(model, transfer=RecordingTransfer()):
        one_step(model)
        state = model.state_dict()
        assert list(state) == list(expected)
        assert_bitwise_equal(state, expected)
        model.save_pretrained(tmp_path)  # the adapters
        model.base_model.model.save_pretrained(tmp_path / "whole")
        assert (tmp_path / "adapter_model.safetensors").exists()
        assert (tmp_path / "whole" / "model.safetensors").exists()


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def _load_other_tensors(model: nn.Module) -> None:
    state = {name: value * 1.5 for name, value in model.state_dict().items() if "up_proj" in name}
    model.load_state_dict(state, strict=False, assign=True)


def _write_data(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data.mul_(1.5)


def _replace_data(model: nn.Module) -> None:
    for name, weight in model.named_parameters():
        if "down_proj" in name:
            weight.data = weight.data * 1.5


def _merge(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()
    model.merge_adapter(safe_merge=True)
    model.unmerge_adapter()


WRITES = {
    "load_state_dict": _load,
    "load_state_dict(assign=True)": _load_other_tensors,
    "weight.data.mul_": _write_data,
    "weight.data = ...": _replace_data,
    "PEFT merges": _merge,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
@pytest.mark.parametrize("then", ["train", "evaluate"])
def test_weights_that_are_written_meanwhile_are_used(write: Callable[[nn.Module], None], then: str) -> None:
    model, bare = lora_llama(), lora_llama()
    with applied_to(model, transfer=RecordingTransfer()):
        for one in (model, bare):
            one_step(one)
            write(one)
        for step in range(2 if then == "train" else 0):
            assert_bitwise_equal(gradients_of_step(model, step), gradients_of_step(bare, step))
        with torch.no_grad():
            assert torch.equal(model(input_ids=batch(5)).logits, bare(input_ids=batch(5)).logits)
    for found, expected in zip(model.state_dict().values(), bare.state_dict().values(), strict=True):
        assert torch.equal(found, expected)


def test_merged_weights_are_used_at_once() -> None:
    model, bare = lora_llama(), lora_llama()
    with applied_to(model, transfer=RecordingTransfer()), torch.no_grad():
        for one in (model, bare):
            with torch.enable_grad():
                one_step(one)
        merged, expected = model.merge_and_unload(), bare.merge_and_unload()
        assert torch.equal(merged(input_ids=batch(0)).logits, expected(input_ids=batch(0)).logits)


def test_weights_of_another_dtype_are_rejected() -> None:
    model = lora_llama()
    with applied_to(model):
        one_step(model)
        weight = model.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight
        before = weight.data
        weight.data = before.half()
        with pytest.raises(PlanError, match=r"up_proj.base_layer.weight: expected torch.float32, .*float16"):
            forward(model)
        weight.data = before


def test_a_write_between_forward_and_backward_is_an_error() -> None:
    model = lora_llama()
    with applied_to(model):
        loss = forward(model)
        with torch.no_grad():
            model.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight.mul_(2)
        with pytest.raises(StaleTensorError, match="modified by an inplace operation"):
            loss.backward()


def test_a_layer_that_writes_its_weights_is_an_error() -> None:
    model = lora_llama()
    layer = model.base_model.model.model.layers[1]

    def writes(module: nn.Module, _args: Any) -> None:
        with torch.no_grad():
            module.up_proj.base_layer.weight.mul_(2)

    layer.mlp.register_forward_pre_hook(writes)
    written = r"layers\.1: .*writes mlp\.up_proj\.base_layer\.weight in place"
    with applied_to(model), pytest.raises(PlanError, match=written):
        forward(model)


def test_after_an_exception_in_mid_step_training_goes_on() -> None:
    model, bare = lora_llama(), lora_llama()
    with applied_to(model, transfer=RecordingTransfer()):
        raising = model.base_model.model.model.layers[2].register_forward_pre_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            forward(model)
        raising.remove()
        for step in range(2):
            assert_bitwise_equal(gradients_of_step(model, step), gradients_of_step(bare, step))


def _raise(*_: object) -> None:
    raise ZeroDivisionError


def test_a_graph_outlives_the_removal() -> None:
    model, bare = lora_llama(), lora_llama()
    applied = applied_to(model)
    loss = forward(model)
    applied.remove()
    loss.backward()
    assert_bitwise_equal(gradients(model), gradients_of_step(bare))


def test_a_call_in_a_second_thread_is_rejected() -> None:
    model = lora_llama()
    with applied_to(model):
        found: list[BaseException] = []

        def call() -> None:
            try:
                with torch.no_grad():
                    model(input_ids=batch(0))
            except PlanError as error:
                found.append(error)

        def meanwhile(*_: object) -> None:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()

        handle = model.base_model.model.model.layers[1].mlp.register_forward_pre_hook(meanwhile)
        forward(model)
        handle.remove()
        assert "one call at a time where weights wait on the host" in str(found[0])


def test_moving_the_model_leaves_the_weights_of_layers() -> None:
    model = lora_llama()
    applied = applied_to(model)
    names = weights_of(applied).names_in(model)
    assert len(names) == NUM_LAYERS * 9, "seven projections and two norms"
    model.to("meta")
    for name, parameter in model.named_parameters():
        assert parameter.is_meta == (name not in names), name
    with pytest.raises(PlanError, match=r"expected .* in torch\.float32, .* a change to torch\.bfloat16"):
        model.to(torch.bfloat16)
    assert model._ddp_params_and_buffers_to_ignore == names
    applied.remove()
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert all(parameter.is_meta for parameter in model.to("meta").parameters())


def test_what_the_user_lets_ddp_ignore_comes_back() -> None:
    model = lora_llama()
    model._ddp_params_and_buffers_to_ignore = own = ["of the user"]
    with applied_to(model) as applied:
        assert model._ddp_params_and_buffers_to_ignore == [*own, *weights_of(applied).names_in(model)]
    assert model._ddp_params_and_buffers_to_ignore == ["of the user"]


def test_tied_and_trained_weights_stay() -> None:
    model = tiny_llama()
    model.requires_grad_(False)
    layers = model.model.layers
    layers[0].mlp.up_proj.weight = layers[1].mlp.up_proj.weight  # of two layers
    layers[3].input_layernorm.weight = model.model.norm.weight  # of a layer and of the model
    layers[2].post_attention_layernorm.weight.requires_grad_(True)
    with applied_to(model) as applied:
        names = weights_of(applied).names_in(model)
        assert not {
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.1.mlp.up_proj.weight",
            "model.norm.weight",
            "model.layers.3.input_layernorm.weight",
            "model.layers.2.post_attention_layernorm.weight",
            "model.embed_tokens.weight",
        } & set(names)
        assert len(names) == NUM_LAYERS * 9 - 4


def test_a_copy_of_the_model_is_an_ordinary_model() -> None:
    model = lora_llama()
    with applied_to(model):
        one_step(model)
        copied = copy.deepcopy(model)
        assert_bitwise_equal(gradients_of_step(copied, 1), gradients_of_step(lora_llama(), 1))
        copied.to(torch.bfloat16)


def _compiled() -> nn.Module:
    model = lora_llama()
    model.base_model.model.model.layers[1].compile(backend="eager")
    return model


def _in_fsdp2() -> nn.Module:
    model = lora_llama()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    return model


def _with_tensor_parallel_weight() -> nn.Module:
    model = lora_llama()
    layer = model.base_model.model.model.layers[1].mlp.up_proj.base_layer
    layer.weight = nn.Parameter(distribute_tensor(layer.weight, init_device_mesh("cpu", (1,))), False)
    return model


def _under_zero_3() -> nn.Module:
    """DeepSpeed gives each parameter a number, and takes its data away."""
    model = lora_llama()
    for number, weight in enumerate(model.parameters()):
        weight.ds_id = number  # type: ignore[attr-defined]
    return model


class Params4bit(nn.Parameter):
    """As bitsandbytes', whose product's node holds the weight itself until backward."""


def _quantised() -> nn.Module:
    model = lora_llama()
    for layer in model.base_model.model.model.layers:
        linear = layer.mlp.up_proj.base_layer
        linear.weight = Params4bit(torch.zeros(64, 1, dtype=torch.uint8), requires_grad=False)
    return model


def _dispatched() -> nn.Module:
    return dispatch_model(lora_llama(), {"": "cpu"}, force_hooks=True)


def _with_target_parameters() -> nn.Module:
    return lora_llama(target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"])


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return lora(tiny_llama())


def _with_weights_on_the_host() -> nn.Module:
    model = lora_llama()
    weights_of(applied_to(model))
    return model


NOT_SERVED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "nothing frozen": (tiny_llama, "none: all parameters of the layers are trained", "freeze it"),
    "compiled": (_compiled, "torch.compile", "Compile no"),
    "FSDP2": (_in_fsdp2, "FSDP2 (fully_shard)", "do not shard"),
    "tensor parallelism": (_with_tensor_parallel_weight, "weights of class DTensor (weight)", "undivided"),
    "ZeRO-3": (_under_zero_3, "ZeRO-3", "do not shard"),
    "quantised": (_quantised, "weights of class Params4bit (weight)", "unquantised"),
    "device_map": (_dispatched, "hooks of accelerate (device_map)", "Load without device_map"),
    "target_parameters": (_with_target_parameters, "LoraConfig(target_parameters=...)", "name modules"),
    "meta": (_on_meta, "weights on meta (weight)", "Load the weights to the CPU"),
    "twice": (_with_weights_on_the_host, "weights that are on the host already", "Call remove()"),
}
"""What has the weights -> a model, what the error says of it, and what to do."""


@pytest.mark.parametrize("case", NOT_SERVED)
def test_what_owns_the_weights_is_named_before_any_step(case: str, world_of_one: None) -> None:
    make, found, hint = NOT_SERVED[case]
    model = make()
    before = {name: weight.data_ptr() for name, weight in model.named_parameters() if not weight.is_meta}
    with pytest.raises(PlanError) as raised:
        FrozenWeights(unwrapped(model), model_structure(model))
    problem = next(one for one in raised.value.problems if one.found == found or found in one.found)
    assert problem.where == "memory.weights"
    assert problem.expected
    assert hint in problem.hint
    assert before == {name: one.data_ptr() for name, one in model.named_parameters() if not one.is_meta}
    if case != "twice":
        with pytest.raises(PlanError):
            applied_to(model)


def test_casts_that_autograd_keeps_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def said(dtype: torch.dtype, training: bool = True) -> list[str]:
        caplog.clear()
        model = lora(tiny_llama(dtype))
        with applied_to(model), torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
            for step in range(2):
                forward(model, step)
        return [one.getMessage() for one in caplog.records if "autocast" in one.getMessage()]

    (text,) = said(torch.float32)
    assert "layers.0.self_attn.q_proj.base_layer.weight and 6 more weights of each layer are in" in text
    assert "torch.float32, and autocast computes in torch.bfloat16" in text
    assert said(torch.bfloat16) == []
    assert said(torch.float32, training=False) == []


class Casts(TorchDispatchMode):
    """Counts the casts to bfloat16 of tensors of some shapes that are alive."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self._shapes = shapes
        self.made = self.alive = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        cast = func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        if cast and result.shape in self._shapes:
            self.made, self.alive = self.made + 1, self.alive + 1
            weakref.finalize(result.untyped_storage(), self._gone)
        return result

    def _gone(self) -> None:
        self.alive -= 1


@pytest.mark.parametrize("recomputed", [True, False])
def test_autocast_keeps_casts_of_frozen_weights_only_where_autograd_does(recomputed: bool) -> None:
    """Its cache would hold them until the block ends, but is for weights that need gradients."""
    model = lora_llama()
    weights = {name: one for name, one in model.named_parameters() if "base_layer" in name}
    rows = recompute_rows([""], range(4)) if recomputed else ()
    with applied_to(model, plan_of(*rows)), torch.autocast("cpu", torch.bfloat16):
        with Casts({one.shape for one in weights.values()}) as casts:
            loss = forward(model)
        assert casts.made >= len(weights)
        # The first layer's input needs no gradient, for which queries, keys and values would be saved.
        assert casts.alive == (0 if recomputed else len(weights) - 3)
        loss.backward()


def test_what_is_swapped_has_what_the_weights_leave_of_the_host_memory() -> None:
    def taken_bytes(cap_bytes: int | None) -> tuple[int, int]:
        """Bytes of host memory that a step takes at most, and that the weights take of it."""
        model = lora_llama()
        applied = applied_to(model, replace(swap_everything(3), host_memory_bytes=cap_bytes))
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
        model(input_ids=ids, labels=ids).loss.backward()
        return applied.stats().host_peak_bytes, weights_of(applied).host_bytes

    whole_bytes, weights_bytes = taken_bytes(None)
    cap_bytes = weights_bytes + (whole_bytes - weights_bytes) // 2
    found_bytes, _ = taken_bytes(cap_bytes)
    assert weights_bytes < found_bytes <= cap_bytes < whole_bytes


def test_too_little_host_memory_is_an_error_before_the_first_layer() -> None:
    model = lora_llama()
    applied = applied_to(model, replace(HOST, host_memory_bytes=100_000))
    with pytest.raises(PlanError, match=r"host memory for the frozen weights of .*layers\.3"):
        forward(model)
    applied.remove()
    assert_bitwise_equal(gradients_of_step(model), gradients_of_step(lora_llama()))


BESIDE_HOST = {
    "tensor parallelism": "memory: {weights: host}\nparallel_config: {tensor_parallel_size: 2}",
    "a pipeline": "memory: {weights: host}\nparallel_config: {pipeline_stage: 2, schedule: 1f1b}",
    "the planner of a streamed": "memory: {mode: adaptive, weights: host}\nstream_config: {tokens: 16}",
}


@pytest.mark.parametrize("name", BESIDE_HOST)
def test_what_does_not_work_beside_it_is_rejected_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(BESIDE_HOST[name])
    (problem,) = raised.value.problems
    assert problem.where == "memory.weights"
    assert problem.expected.startswith(f"keep beside {name}")
    assert problem.found == "host"
    assert "Leave one out" in problem.hint


@pytest.mark.parametrize(("copy_ms", "hidden"), [(25.0, True), (60.0, False)])
def test_copies_are_hidden_where_they_take_no_longer_than_a_layer(
    copy_ms: float, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 31 leaf modules of a layer take 1 ms each in forward, 2 ms in backward."""
    clock = Clock()
    model = lora_llama()
    rate = 31744 / copy_ms
    clock.drive(model)
    link = Link(rate, rate, rate, rate, latency_ms=0.0)
    monkeypatch.setattr(host_budget, "PinnedSlabs", lambda *_: PageableSlabs())
    with applied_to(model, transfer=SimulatedTransfer(clock, link)) as applied:
        weights = weights_of(applied)
        one_step(model)
        first = weights.stats()
        for step in range(3):
            one_step(model, step)
        later = weights.stats() - first
        assert later.late_prefetches == 0
        assert (later.stalls == 0) == hidden
        assert later.prefetched_bytes == 3 * weights.step_bytes


@pytest.mark.parametrize(("never_waits", "wrong"), [(None, False), ("in", True)])
def test_every_wait_is_needed_and_no_block_is_dropped_while_a_copy_writes_it(
    never_waits: Any, wrong: bool
) -> None:
    machine = Machine([1])
    model, bare = lora_llama(), lora_llama()
    for module in model.modules():
        module.register_forward_hook(machine.beat)
    applied = applied_to(model, transfer=DisorderlyTransfer(machine, [1], [7, 0, 40], never_waits))
    got = [gradients_of_step(model, step) for step in range(2)]
    expected = [gradients_of_step(bare, step) for step in range(2)]
    same = all(
        torch.equal(one[name], other[name]) for one, other in zip(got, expected, strict=True) for name in one
    )
    assert (not same) == wrong
    forward(model)  # and its backward never runs
    applied.remove()
    machine.finish()
    assert bool(machine.violations) == wrong


def test_a_block_dropped_without_its_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the test above looks for: copies ahead whose layer is never called."""

    def drop(layer: LayerWeights) -> None:
        layer._copy, layer._block, layer._views = None, None, ()

    def violations() -> list[str]:
        machine = Machine([1])
        model = lora_llama()
        applied = applied_to(model, transfer=DisorderlyTransfer(machine, [1], [50]))
        handle = model.base_model.model.model.layers[1].register_forward_pre_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            forward(model)
        handle.remove()
        applied.remove()
        machine.finish()
        return machine.violations

    assert violations() == []
    monkeypatch.setattr(LayerWeights, "drop", drop)
    assert violations() == ["block dropped before its copy in was complete"]
