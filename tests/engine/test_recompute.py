"""Regions that are run again: random and autocast state, faults, partial backwards, bytes saved."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_actswap import MemoryPlan, model_structure
from hf_actswap.engine.catcher import RecomputeError
from hf_actswap.plan import PlanRow
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    assert_bitwise_equal,
    batch,
    gradients,
    gradients_of_step,
    on,
    one_step,
    plan_of,
    recompute_rows,
    swap_everything,
    tiny_llama,
    tiny_neox,
)
from tests.quick_cases import each_value_once, quick_first

LAYERS = range(NUM_LAYERS)
CHAIN = ("mlp.gate_proj.linear", "mlp.act_fn.silu", "mlp.up_proj.linear", "mlp.mul")
PLANS: dict[str, MemoryPlan | str] = {
    "function chain": plan_of(*recompute_rows(CHAIN, LAYERS)),
    "module with tensors in keywords": plan_of(*recompute_rows(["self_attn"], LAYERS)),
    "modules": plan_of(*recompute_rows(["input_layernorm", "self_attn", "mlp"], LAYERS)),
    "layers": CASES["full_recompute"],
    "layers but some ops": CASES["exclude_inside_full"],
}


def forward(model: nn.Module) -> torch.Tensor:
    ids = batch(0)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@pytest.mark.parametrize("name", PLANS)
def test_a_second_backward_over_the_same_graph(name: str) -> None:
    bare = gradients_of_step(tiny_llama())
    model = tiny_llama()
    on(model, PLANS[name])
    loss = forward(model)
    for _ in range(3):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert_bitwise_equal(gradients(model), bare)


@each_value_once
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    "part", ["model.layers.2.mlp.gate_proj.weight", "model.layers.1.self_attn.q_proj.weight"]
)
def test_a_partial_backward_and_then_the_whole(name: str, part: str) -> None:
    bare = gradients_of_step(tiny_llama())
    model = tiny_llama()
    on(model, PLANS[name])
    loss = forward(model)
    (grad,) = torch.autograd.grad(loss, model.get_parameter(part), retain_graph=True)
    assert torch.equal(grad, bare[part])
    loss.backward()
    assert_bitwise_equal(gradients(model), bare)


@pytest.mark.parametrize(
    "plan",
    quick_first([plan_of(*recompute_rows(["self_attn.flash_attention"], LAYERS)), *PLANS.values()], 4),
)
def test_the_random_state_goes_on_as_if_nothing_was_recomputed(plan: MemoryPlan | str) -> None:
    def state_after(plan: MemoryPlan | str | None) -> torch.Tensor:
        model = tiny_llama(attention_dropout=0.5, attn_implementation="eager")
        applied = on(model, plan)
        torch.manual_seed(3)
        one_step(model)
        assert applied is None or applied.stats().recomputes > 0 or plan == CASES["full_recompute"]
        return torch.get_rng_state()

    assert torch.equal(state_after(plan), state_after(None))


@pytest.mark.parametrize("rows", [["mlp"], ["mlp.dense_4h_to_h", "attention.dense"], ["attention"]])
def test_dropout_draws_the_same_mask_again(rows: list[str]) -> None:
    grads = []
    for plan in (None, plan_of(*recompute_rows(rows, LAYERS))):
        model = tiny_neox(attn_implementation="eager")
        on(model, plan)
        torch.manual_seed(5)
        grads.append(gradients_of_step(model))
    assert_bitwise_equal(grads[1], grads[0])


@pytest.mark.parametrize("name", ["modules", "layers but some ops"])
def test_autocast_is_as_it_was_in_forward(name: str) -> None:
    model = tiny_llama()
    on(model, PLANS[name])
    seen: list[tuple[bool, torch.dtype]] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda *_: seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
    )
    with torch.autocast("cpu", dtype=torch.float16):
        loss = forward(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    assert seen == [(True, torch.float16)] * 2


class _Fickle(nn.Module):
    """A feed-forward that does something else when it is run again."""

    def __init__(self, mlp: nn.Module, how: str) -> None:
        super().__init__()
        self.mlp, self.how, self.ran = mlp, how, False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.ran:
            self.ran = not isinstance(hidden, torch._subclasses.FakeTensor)
            result: torch.Tensor = self.mlp(hidden)
            return result
        if self.how == "less":
            return hidden * 2
        result = self.mlp(torch.cat([hidden, hidden], dim=1))
        return result


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "less",
            r"1\.mlp: run again, it saved \d+ tensors and not number \d+; it must do the same work each time "
            r"\(data-dependent control flow\? a changed module\?\)",
        ),
        (
            "wider",
            r"1\.mlp: run again, saved tensor \d is \[2, 32, 48\] torch\.float32; in forward it was "
            r"\[2, 16, 48\] torch\.float32",
        ),
    ],
)
def test_a_region_that_does_other_work_is_an_error(how: str, message: str) -> None:
    model = tiny_llama()
    layer = model.model.layers[1]
    plain, layer.mlp = layer.mlp, _Fickle(layer.mlp, how)
    applied = on(model, plan_of(*recompute_rows(["mlp"], [1])))
    assert applied is not None
    loss = forward(model)
    with pytest.raises(RecomputeError) as caught:
        loss.backward()
    assert re.fullmatch(message, str(caught.value))
    del loss, caught
    applied.remove()
    layer.mlp = plain
    assert_bitwise_equal(gradients_of_step(model), gradients_of_step(tiny_llama()))


def test_each_region_runs_once_per_backward() -> None:
    model = tiny_llama()
    applied = on(model, PLANS["modules"])
    assert applied is not None
    for step in range(1, 4):
        one_step(model)
        assert applied.stats().recomputes == 3 * NUM_LAYERS * step


class HeldBytes(TorchDispatchMode):
    """Sees every storage that is made; ``total`` counts those still alive, but for host memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._outside = {
            tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())
        }
        self._bytes: list[StorageWeakRef] = []
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if leaf.dtype == torch.uint8 and func is torch.ops.aten.empty.memory_format:
                    self._bytes.append(StorageWeakRef(storage))  # so that its address stays its own
                    self._outside.add(storage._cdata)
                if storage._cdata in self._outside:
                    continue
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def total(self) -> int:
        return sum(size for reference, size in self._storages.values() if not reference.expired())


def held_bytes(plan: MemoryPlan | str | None, model: nn.Module | None = None) -> tuple[int, int]:
    """Bytes that live between forward and backward, and those that were copied out."""
    model = model if model is not None else tiny_llama()
    applied = on(model, plan)
    with HeldBytes(model) as held:
        loss = forward(model)
    total = held.total()
    loss.backward()
    return total, applied.stats().offloaded_bytes if applied is not None else 0


TOKENS, HIDDEN, INNER, SIZE = 32, 32, 48, 4
_ROW, _WIDE, _RSQRT, _LOGSUMEXP = (
    TOKENS * HIDDEN * SIZE,
    TOKENS * INNER * SIZE,
    TOKENS * SIZE,
    TOKENS * 4 * SIZE,
)
LAYER_INSIDE = 2 * (_RSQRT + 2 * _ROW) + 3 * _ROW + _LOGSUMEXP + _ROW + 4 * _WIDE
"""What a layer saves beside its input, fp32: norms, q with k and v (half as wide), core, residual, MLP."""
POSITIONS = 16 * 8
"""``position_ids``, int64: an argument of layers and attention, so their regions hold it; once for all."""


@pytest.mark.parametrize(
    ("plan", "saved_bytes"),
    [
        (CASES["full_recompute"], NUM_LAYERS * LAYER_INSIDE - POSITIONS),
        (plan_of(*recompute_rows([""], [1, 2])), 2 * LAYER_INSIDE - POSITIONS),
        (CASES["select_recompute"], NUM_LAYERS * 2 * _WIDE),
        (plan_of(*recompute_rows(["mlp"], [0, 3])), 2 * 4 * _WIDE),
        (plan_of(*recompute_rows(["self_attn"], [2])), 3 * _ROW + _LOGSUMEXP - POSITIONS),
        (plan_of(*recompute_rows(["mlp.mul"], LAYERS)), NUM_LAYERS * _WIDE),
        (
            plan_of(*recompute_rows([""], [1]), PlanRow(1, "mlp", "keep")),
            LAYER_INSIDE - 4 * _WIDE - POSITIONS,
        ),
    ],
    ids=["full", "two layers", "select", "mlp", "attention", "mul", "layer but mlp"],
)
def test_recomputation_frees_the_bytes_of_the_shapes(plan: MemoryPlan | str, saved_bytes: int) -> None:
    bare, _ = held_bytes(None)
    held, _ = held_bytes(plan)
    assert bare - held == saved_bytes


@pytest.mark.parametrize(
    "plan", [swap_everything(), *(CASES[name] for name in ("default_swap", "case_2", "case_3"))]
)
def test_swap_frees_exactly_what_was_copied_out(plan: MemoryPlan | str) -> None:
    bare, _ = held_bytes(None)
    held, offloaded = held_bytes(plan)
    assert bare - held == offloaded > 0


def test_every_functional_op_of_a_layer_can_be_dropped_at_once() -> None:
    functions = [op.path for op in model_structure(tiny_llama()).layers[0].ops if op.kind == "function"]
    bare, _ = held_bytes(None)
    held, _ = held_bytes(plan_of(*recompute_rows(functions, LAYERS)))
    assert bare - held > NUM_LAYERS * LAYER_INSIDE * 0.5


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


@pytest.mark.parametrize("name", quick_first([*PLANS, *CASES], 4))
def test_no_tensor_outlives_its_step(name: str) -> None:
    """What a recomputation catches must not hold the graph that it ran in: 60 MB a step, once."""
    model = tiny_llama()
    on(model, PLANS.get(name) or CASES[name])
    alive = []
    for step in range(6):
        one_step(model, step)
        model.zero_grad()
        alive.append(tensors_alive())
    assert alive[2:] == [alive[1]] * 4
