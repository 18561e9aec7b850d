"""What each process of the communication tests runs; a module of its own, because it is started afresh."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hf_actswap import AppliedPlan, apply
from hf_actswap.parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    tensor_parallel_group,
)
from hf_actswap.planner import CountingMeter
from tests.engine.tiny_models import VOCABULARY, gradients, snapshot, tiny_llama
from tests.parallel.collective_calls import noted
from tests.parallel.parallel_llama import parallel_llama
from tests.processes import run_cases

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
    *("select_mlp", "replicated_kept", "slices_kept"),
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
    cases |= {f"weights_{name}": lambda _, again=again: run_sharded(again) for name, again in WEIGHTS.items()}
    cases["mappings"] = lambda _: run_mappings(rank, world())
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
                applied = apply(model, case.document)
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


WEIGHTS = {"as_sharded": None, "again": True, "held": False}
"""``parallel_optimizer_comm_recompute``, on a model that FSDP2 keeps gathered after forward."""


def run_sharded(again: bool | None) -> Result:
    """Run a step of a model sharded by FSDP2, whose weights stay gathered after forward."""
    result, model = Result(), tiny_llama(use_cache=False)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
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


def run_mappings(rank: int, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Values and gradients of each mapping; the input on a rank is its number plus 1 in every place."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str, mapping: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> None:
        value = torch.full(shape, rank + 1.0)
        given = value.clone().requires_grad_()
        output = mapping(given)
        weights = torch.arange(output.numel(), dtype=output.dtype).view(output.shape) + rank
        (output * weights).sum().backward()
        assert given.grad is not None
        found[name], found[f"{name} gradient"] = output.detach(), given.grad
        assert torch.equal(given.detach(), value), f"{name} wrote into its argument"

    with tensor_parallel_group(group):
        note("copy", copy_to_tensor_model_parallel_region, 4)
        note("reduce", reduce_from_tensor_model_parallel_region, 4)
        for dim in (0, 1):
            note(f"scatter {dim}", lambda x, dim=dim: scatter_to_sequence_parallel_region(x, dim), 4, 2)
            note(f"gather {dim}", lambda x, dim=dim: gather_from_sequence_parallel_region(x, dim), 2, 2)
            note(
                f"gather alike {dim}",
                lambda x, dim=dim: gather_from_sequence_parallel_region(x, dim, False),
                2,
                2,
            )
            note(
                f"reduce-scatter {dim}",
                lambda x, dim=dim: reduce_scatter_to_sequence_parallel_region(x, dim),
                4,
                2,
            )
        for name, alike in (("boundary", False), ("boundary mistaken", True)):
            x = torch.arange(8.0).view(4, 2).requires_grad_()
            output = gather_from_sequence_parallel_region(scatter_to_sequence_parallel_region(x), 0, alike)
            output.square().sum().backward()
            assert x.grad is not None
            found[name] = x.grad
    return found
