"""Two processes: what each communication key does to a stack of parallel layers, in calls and in bytes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hf_actswap import AppliedPlan, apply
from hf_actswap.parallel import tensor_parallel_group
from hf_actswap.planner import CountingMeter
from tests.engine.tiny_models import (
    NUM_LAYERS,
    VOCABULARY,
    assert_bitwise_equal,
    gradients,
    snapshot,
    tiny_llama,
)
from tests.parallel.collective_calls import noted
from tests.parallel.parallel_llama import parallel_llama
from tests.processes import launched, result, run_cases
from tests.quick_cases import slow_among

WORLD_SIZE = 2
LENGTH = 16
_LOOKS, _LOOK_S = 20, 0.01


@dataclass(frozen=True)
class Case:
    """One model and configuration.

    Args:
        recompute: ``recompute_config``; ``None``: no plan at all.
        swap: ``swap_config``.
        sequence_parallel: else the ranks hold the hidden states alike.
        batch: sequences per step.
    """

    recompute: dict[str, Any] | None = None
    swap: dict[str, Any] | None = None
    sequence_parallel: bool = True
    batch: int = 2

    @property
    def document(self) -> dict[str, Any]:
        size = {"tensor_parallel_size": WORLD_SIZE, "sequence_parallel_enabled": self.sequence_parallel}
        document = {"parallel_config": size, "recompute_config": self.recompute}
        return document if self.swap is None else {**document, "swap_config": self.swap}


ATTENTION_NORM, FFN_NORM = r"attention_norm\.norm", r"ffn_norm\.norm"
CASES: dict[str, Case] = {
    "nothing": Case(),
    "select_comm": Case({"select_comm_recompute": True}),
    "select_comm_some_layers": Case({"select_comm_recompute": [1, 3]}, {"swap": True, "op_swap": []}),
    "select_comm_one_norm": Case({"select_comm_recompute": [ATTENTION_NORM]}),
    "select_comm_excluded": Case(
        {"select_comm_recompute": [r".*_norm\.norm"], "select_comm_recompute_exclude": [FFN_NORM]}
    ),
    "select_comm_reduce": Case({"select_comm_recompute": [r"attention\.wo\.matmul"]}),
    "select_norms_and_comm": Case({"select_recompute": ["attention_norm"], "select_comm_recompute": True}),
    "select_norm_and_its_comm_kept": Case({"select_recompute": ["attention_norm"]}),
    "select_comm_and_layer_swap": Case(
        {"select_comm_recompute": [0, 1, 2, 3]},
        {"swap": True, "layer_swap": [{"backward_prefetch": 4, "layers": [0, 1, 2, 3]}]},
    ),
    "select_comm_and_swap": Case({"select_comm_recompute": True}, {"swap": True, "default_prefetch": 4}),
    "recompute": Case({"recompute": True}),
    "recompute_kept": Case({"recompute": True, "mp_comm_recompute": False}),
    "recompute_kept_two_layers": Case(
        {"recompute": [1, 2], "mp_comm_recompute": False}, {"swap": True, "op_swap": []}
    ),
    "recompute_excluded": Case({"recompute": True, "select_comm_recompute_exclude": [FFN_NORM]}),
    "select_mlp": Case({"select_recompute": ["feed_forward", "ffn_norm"]}),
    "select_attention": Case({"select_recompute": ["attention"]}),
    "replicated": Case(sequence_parallel=False),
    "replicated_recompute": Case({"recompute": True}, sequence_parallel=False),
    "replicated_kept": Case({"recompute": True, "mp_comm_recompute": False}, sequence_parallel=False),
    "slices": Case({"recompute": True, "recompute_slice_activation": True}, sequence_parallel=False),
    "slices_kept": Case(
        {"recompute": True, "recompute_slice_activation": True, "mp_comm_recompute": False},
        sequence_parallel=False,
    ),
    "replicated_odd_batch": Case(sequence_parallel=False, batch=3),
    "slices_odd_batch": Case(
        {"recompute": True, "recompute_slice_activation": True}, sequence_parallel=False, batch=3
    ),
    "slices_of_parts": Case({"recompute": True, "recompute_slice_activation": True}),
}
SLOW = (
    *("select_comm_one_norm", "select_comm_excluded", "select_comm_and_swap", "recompute_kept_two_layers"),
    *("select_mlp", "replicated_kept", "slices_kept", "select_comm_reduce", "select_attention"),
    *("select_comm_some_layers", "select_norm_and_its_comm_kept", "recompute_excluded"),
)
"""Cases that differ little from another."""


@dataclass
class Result:
    """What one rank saw of one case: a step with a plan, and one after it was removed.

    Args:
        calls: (forward or backward, kind) -> number of collectives; ``moved_bytes``: bytes on the large side.
        held_bytes: storages made in forward that live until backward.
        left_over: what `AppliedPlan.remove` did not restore, by name.
    """

    losses: list[float] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    moved_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    held_bytes: int = 0
    adjustments: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    calls_after: Counter[tuple[str, str]] = field(default_factory=Counter)
    grads_after: dict[str, torch.Tensor] = field(default_factory=dict)
    left_over: list[str] = field(default_factory=list)


def settled_bytes(meter: CountingMeter) -> int:
    """Bytes that live; gloo's threads free what they moved a moment later."""
    totals = []
    for _ in range(_LOOKS):
        totals.append(meter.allocated_bytes())
        sleep(_LOOK_S)
    return min(totals)


def counted(result: Result) -> AbstractContextManager[Callable[[str], None]]:
    """Count the collectives; yields what sets the name of the present part of the step."""

    def note(part: str, kind: str, arguments: tuple[Any, ...]) -> None:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        result.calls[part, kind] += 1
        result.moved_bytes[part, kind] += max(tensor.nbytes for tensor in tensors)

    return noted(note)


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run_on_rank(slow_too: bool, rank: int, folder: str) -> None:
    """Run each case, or each that is not slow; see `run_cases`."""

    def world() -> dist.ProcessGroup:
        group = dist.group.WORLD
        return group

    cases: dict[str, Callable[[dist.ProcessGroup | None], object]] = {
        name: lambda _, case=case: run_case(case, world())
        for name, case in CASES.items()
        if slow_too or name not in SLOW
    }
    cases |= {f"weights_{name}": lambda _, how=how: run_sharded(*how) for name, how in WEIGHTS.items()}
    run_cases(rank, folder, WORLD_SIZE, cases)


def run_case(case: Case, group: dist.ProcessGroup) -> Result:
    """Run a step with the plan and one after it was removed."""
    result, seen = Result(), _Warnings()
    model = parallel_llama(group, case.sequence_parallel)
    before = snapshot(model)
    logging.getLogger("hf_actswap.engine").addHandler(seen)
    try:
        if case.recompute is not None:
            with tensor_parallel_group(group):
                # Without checksums, which are bytes and ops of a first step.
                applied = apply(model, {"memory": {"verify": "off"}, **case.document})
            result.adjustments = [str(adjustment) for adjustment in applied.plan.adjustments]
            _step(model, case, result)
            applied.remove()
        else:
            _step(model, case, result)
    finally:
        logging.getLogger("hf_actswap.engine").removeHandler(seen)
    result.warnings = seen.lines
    result.left_over = _differences(before, snapshot(model))
    after = Result()
    _step(model, case, after, holds=False)
    result.calls_after, result.grads_after = after.calls, after.grads
    return result


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def _step(model: nn.Module, case: Case, result: Result, holds: bool = True) -> None:
    model.zero_grad()
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, VOCABULARY, (case.batch, LENGTH), generator=generator)
    with counted(result) as begin:
        with CountingMeter() if holds else nullcontext() as held:
            loss = model(input_ids=ids, labels=ids).loss
        if held is not None:
            result.held_bytes = settled_bytes(held)
        begin("backward")
        loss.backward()
    result.losses.append(loss.item())
    result.grads = gradients(model)


WEIGHTS = {
    "as_sharded": (None, False),
    "again": (True, False),
    "held": (False, False),
    "freed": (False, True),
    "only_root": (False, None),
}
"""``parallel_optimizer_comm_recompute``; ``reshard_after_forward`` of the layers (``None``: not sharded)."""


def run_sharded(again: bool | None, freed: bool | None) -> Result:
    """Run a step of a model sharded by FSDP2, the weights of whose layers are freed after forward, or not."""
    result, model = Result(), tiny_llama(use_cache=False)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.model.layers if freed is not None else ():
        fully_shard(layer, mesh=mesh, reshard_after_forward=freed)
    fully_shard(model, mesh=mesh)
    applied: AppliedPlan | None = None
    if again is not None:
        applied = apply(model, {"recompute_config": {"parallel_optimizer_comm_recompute": again}})
        result.adjustments = [str(adjustment) for adjustment in applied.plan.adjustments]
    _gathers_of_weights(model, result)
    if applied is not None:
        applied.remove()
    after = Result()
    _gathers_of_weights(model, after)
    result.calls_after, result.grads_after = after.calls, after.grads
    return result


def _gathers_of_weights(model: nn.Module, result: Result) -> None:
    model.zero_grad()
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(dist.get_rank()))
    with counted(result) as begin:
        loss = model(input_ids=ids, labels=ids).loss
        begin("backward")
        loss.backward()
    result.losses.append(loss.item())
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    result.grads = {
        name: (grad.to_local() if isinstance(grad, DTensor) else grad).clone() for name, grad in found.items()
    }


LIMIT_S = 150
HIDDEN, SIZE_BYTES = 32, 4
WHOLE_BYTES = 2 * LENGTH * HIDDEN * SIZE_BYTES
"""A hidden state of the whole sequence, batch 2."""
PART_BYTES = WHOLE_BYTES // WORLD_SIZE

pytestmark = pytest.mark.dist


results = launched(run_on_rank, WORLD_SIZE, LIMIT_S, told_of_slow=True)


def bare_of(name: str) -> str:
    """The case of the same model without a plan."""
    case = CASES[name]
    return (
        "nothing" if case.sequence_parallel else "replicated" if case.batch == 2 else "replicated_odd_batch"
    )


PLANNED = [name for name, case in CASES.items() if case.recompute is not None]


@pytest.mark.parametrize("name", slow_among(PLANNED, SLOW))
def test_gradients_are_those_without_recomputation(name: str, results: Path) -> None:
    for rank in range(WORLD_SIZE):
        found, bare = result(results, name, rank), result(results, bare_of(name), rank)
        assert found.losses == bare.losses
        assert_bitwise_equal(found.grads, bare.grads)


@pytest.mark.parametrize("name", slow_among(PLANNED, SLOW))
def test_removed_without_trace(name: str, results: Path) -> None:
    for rank in range(WORLD_SIZE):
        found, bare = result(results, name, rank), result(results, bare_of(name), rank)
        assert found.left_over == []
        assert found.calls_after == bare.calls
        assert_bitwise_equal(found.grads_after, bare.grads)


def test_collectives_of_the_layers_themselves(results: Path) -> None:
    """Per layer two gathers and two reduce-scatters each way; one gather each way at the model's boundary."""
    for rank in range(WORLD_SIZE):
        found = result(results, "nothing", rank)
        each_way = {"all_gather": 2 * NUM_LAYERS + 1, "reduce_scatter": 2 * NUM_LAYERS}
        expected = {(part, kind): n for part in ("forward", "backward") for kind, n in each_way.items()}
        assert found.calls == expected
        assert found.moved_bytes == {key: n * WHOLE_BYTES for key, n in expected.items()}
        found = result(results, "replicated", rank)
        assert found.calls == {(part, "all_reduce"): 2 * NUM_LAYERS for part in ("forward", "backward")}


MORE_CALLS: dict[str, dict[str, int]] = {
    "select_comm": {"all_gather": 2 * NUM_LAYERS},
    "select_comm_some_layers": {"all_gather": 4},
    "select_comm_one_norm": {"all_gather": NUM_LAYERS},
    "select_comm_excluded": {},
    "select_comm_reduce": {},
    "select_norms_and_comm": {"all_gather": 2 * NUM_LAYERS},
    "select_comm_and_swap": {"all_gather": 2 * NUM_LAYERS},
    "select_comm_and_layer_swap": {"all_gather": 2 * NUM_LAYERS},
    "select_norm_and_its_comm_kept": {},
    "recompute": {"all_gather": 2 * NUM_LAYERS, "reduce_scatter": NUM_LAYERS},
    "recompute_kept": {},
    "recompute_kept_two_layers": {},
    "recompute_excluded": {"all_gather": NUM_LAYERS, "reduce_scatter": NUM_LAYERS},
    "replicated_recompute": {"all_reduce": NUM_LAYERS},
    "replicated_kept": {},
    "slices": {"all_reduce": NUM_LAYERS, "all_gather": NUM_LAYERS},
    "slices_kept": {"all_gather": NUM_LAYERS},
    "slices_odd_batch": {"all_reduce": NUM_LAYERS},
    "slices_of_parts": {"all_gather": 2 * NUM_LAYERS, "reduce_scatter": NUM_LAYERS},
}
"""Collectives that backward does in addition. The last reduction of a recomputed layer is not needed."""


@pytest.mark.parametrize("name", slow_among(MORE_CALLS, SLOW))
def test_collectives_done_again_in_backward(name: str, results: Path) -> None:
    for rank in range(WORLD_SIZE):
        found, bare = result(results, name, rank), result(results, bare_of(name), rank)
        more = Counter({("backward", kind): calls for kind, calls in MORE_CALLS[name].items()})
        assert found.calls == bare.calls + more
        whole_bytes = WHOLE_BYTES // 2 * CASES[name].batch
        assert found.moved_bytes - bare.moved_bytes == {key: n * whole_bytes for key, n in more.items()}


MORE_BYTES: dict[str, tuple[str, int]] = {
    # In place of the whole sequence its part is held.
    "select_comm": ("nothing", -2 * NUM_LAYERS * (WHOLE_BYTES - PART_BYTES)),
    "select_comm_some_layers": ("nothing", -4 * (WHOLE_BYTES - PART_BYTES)),
    "select_comm_one_norm": ("nothing", -NUM_LAYERS * (WHOLE_BYTES - PART_BYTES)),
    "select_comm_excluded": ("nothing", 0),
    "select_comm_reduce": ("nothing", 0),
    # Nor what the norm's own backward reads: the normed part, and a number for each of its tokens.
    "select_norms_and_comm": ("select_comm", -NUM_LAYERS * (PART_BYTES + PART_BYTES // HIDDEN)),
    # Both gathered sequences and what o_proj's reduction left; of down_proj's nothing is needed again.
    "recompute_kept": ("recompute", NUM_LAYERS * (2 * WHOLE_BYTES + PART_BYTES)),
    "recompute_excluded": ("recompute", NUM_LAYERS * WHOLE_BYTES),
    "replicated_kept": ("replicated_recompute", NUM_LAYERS * WHOLE_BYTES),
    "slices": ("replicated_recompute", -NUM_LAYERS * (WHOLE_BYTES - PART_BYTES)),
    "slices_kept": ("replicated_kept", -NUM_LAYERS * (WHOLE_BYTES - PART_BYTES)),
    "slices_of_parts": ("recompute", 0),
}
"""Bytes held from forward to backward, compared with another case."""


@pytest.mark.parametrize("name", slow_among(MORE_BYTES, SLOW))
def test_bytes_held(name: str, results: Path) -> None:
    other, more_bytes = MORE_BYTES[name]
    for rank in range(WORLD_SIZE):
        held_bytes = result(results, name, rank).held_bytes
        assert held_bytes - result(results, other, rank).held_bytes == more_bytes


OVERRIDES = {
    "select_comm": [],
    "select_comm_reduce": [
        "recompute_config.select_comm_recompute self_attn.o_proj.reduce_scatter, layers 0-3: "
        "asked recompute communication, got keep: what it reduces would have to be kept, and is at least as "
        "large as its result, unless that is recomputed too"
    ],
    "select_comm_and_layer_swap": [
        "recompute_config.select_comm_recompute input_layernorm.all_gather, layers 0-3: asked swap, "
        "got re-gather: recomputation takes effect and swap does not where both are enabled "
        "(MindFormers, coupling rule 1)",
        "recompute_config.select_comm_recompute post_attention_layernorm.all_gather, layers 0-3: asked swap, "
        "got re-gather: recomputation takes effect and swap does not where both are enabled "
        "(MindFormers, coupling rule 1)",
    ],
    "recompute_kept": [],
    "recompute_excluded": [
        "recompute_config.select_comm_recompute_exclude post_attention_layernorm.all_gather, layers 0-3: "
        "asked recompute communication, got keep: exclude keys have the highest priority "
        "(MindFormers 1.5, LayerSetting)"
    ],
    "slices": [],
    "slices_of_parts": [
        "recompute_config.recompute_slice_activation: asked slices, got no effect: "
        "with sequence parallelism each rank holds its own part of the input already"
    ],
}


@pytest.mark.parametrize("name", slow_among(OVERRIDES, SLOW))
def test_what_gives_way(name: str, results: Path) -> None:
    assert result(results, name).adjustments == OVERRIDES[name]


def test_a_batch_that_does_not_divide_is_kept_whole_and_said_once(results: Path) -> None:
    assert result(results, "slices_odd_batch").warnings == [
        "recompute_slice_activation: dim 0 of an input [3, 16, 32] does not divide by 2 tensor-parallel "
        "ranks; it is kept whole."
    ]
    assert result(results, "slices").warnings == []


def test_weights_are_gathered_again(results: Path) -> None:
    """FSDP2 told to hold its weights gathered; the key overrules it until it is removed, root included."""
    for rank in range(WORLD_SIZE):
        bare, again, held = (
            result(results, f"weights_{name}", rank) for name in ("as_sharded", "again", "held")
        )
        assert bare.calls["backward", "all_gather"] == held.calls["backward", "all_gather"] == 0
        assert bare.calls["forward", "all_gather"] == again.calls["forward", "all_gather"] == NUM_LAYERS + 1
        assert again.calls["backward", "all_gather"] == NUM_LAYERS + 1
        assert again.calls_after == bare.calls_after == bare.calls
        only_root = result(results, "weights_only_root", rank)
        assert again.adjustments == held.adjustments == only_root.adjustments == []
        assert_bitwise_equal(again.grads, bare.grads)
        assert_bitwise_equal(again.grads_after, bare.grads_after)
        freed = result(results, "weights_freed", rank)
        assert freed.calls["backward", "all_gather"] == NUM_LAYERS
        (said,) = freed.adjustments
        assert "parallel_optimizer_comm_recompute: asked false, got no effect: FSDP2 gathers again" in said
