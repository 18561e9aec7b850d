"""What each process of the planner's tests on several ranks runs; it is started afresh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_actswap import apply
from hf_actswap.config.schema import ParallelConfig
from hf_actswap.parallel import patch_model, tensor_parallel_group
from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients
from hf_actswap.planner import BudgetError, Planner, stable
from tests.engine.tiny_models import VOCABULARY, tiny_llama
from tests.parallel.collective_calls import noted
from tests.parallel.rank_processes import run_cases
from tests.planner.simulated_device import on_device

GIB = 2**30
BATCH, LENGTH = 4, 128
QUICK_CHECK_STEPS = 3

Shape = Callable[[int], tuple[int, int]]


@dataclass
class Run:
    """One training of one rank.

    Args:
        losses: as floats, exactly.
        phases: in which each step ran.
        peaks: bytes in use at most in forward and backward of each step.
        collectives: by step, how many in forward and backward.
        plans: JSON of the plan that was on, by step.
        problem: text of the error that ended it.
        evicted_bytes: by the guard.
        left_over: dispatch modes and hooks that were there after it.
    """

    losses: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    collectives: list[Counter[tuple[str, str]]] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    problem: str | None = None
    evicted_bytes: int = 0
    left_over: list[str] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        return max(self.peaks)


Results = dict[str, Run]
"""A case's trainings: ``plain``, and others."""


def train(
    wrap: Callable[[nn.Module], nn.Module],
    memory: Mapping[str, Any] | None,
    steps: int,
    limit_bytes: int | None = None,
    shape: Shape = lambda _: (BATCH, LENGTH),
    group: dist.ProcessGroup | None = None,
    seed_per_rank: bool = True,
) -> Run:
    """Train with AdamW; ``memory`` ``None``: without the planner."""
    run = Run()
    model = tiny_llama(use_cache=False)
    called = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank() if seed_per_rank else 0)
    planner: Any = None
    with on_device(model, limit_bytes) as device:
        try:
            if memory is not None:
                config = {"memory": {"search_steps": 2, **memory}}
                with nullcontext() if group is None else tensor_parallel_group(group):
                    planner = apply(called, config, optimizer=optimizer, meter=device)
                assert isinstance(planner, Planner)
            for step in range(steps):
                run.phases.append("" if planner is None else planner.phase)
                run.plans.append("" if planner is None else planner.plan.to_json())
                device.reset_peak()
                ids = torch.randint(0, VOCABULARY, shape(step), generator=generator)
                with noted(_noting(run)) as begin:
                    loss = called(input_ids=ids, labels=ids).loss
                    begin("backward")
                    loss.backward()
                run.peaks.append(device.peak_bytes())
                run.losses.append(loss.item())
                del loss
                if group is not None:
                    allreduce_sequence_parallel_gradients(model, group)
                optimizer.step()
                optimizer.zero_grad()
        except BudgetError as error:
            run.problem = str(error)
        finally:
            if planner is not None:
                run.evicted_bytes = planner._run.idle.evicted_bytes
                planner.remove()
    run.left_over = [repr(mode) for mode in _get_current_dispatch_mode_stack()]
    return run


def _noting(run: Run) -> Callable[[str, str, tuple[Any, ...]], None]:
    calls: Counter[tuple[str, str]] = Counter()
    run.collectives.append(calls)

    def note(part: str, kind: str, _arguments: tuple[Any, ...]) -> None:
        calls[part, kind] += 1

    return note


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def peaks_of_all(run: Run) -> list[int]:
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, run.peak_bytes)
    return peaks


def devices_of_different_size(steps: int = 8) -> Results:
    """Rank 0 runs out of memory in warm-up, the others do not."""
    plain = train(ddp, None, steps)
    peak = max(peaks_of_all(plain))
    limit = int((0.6 if dist.get_rank() == 0 else 1.5) * peak)
    return {"plain": plain, "planned": train(ddp, {"mode": "adaptive"}, steps, limit)}


def batches_of_different_length(steps: int = 8) -> Results:
    """The last rank's batches are twice as long; its peak counts on all ranks."""
    last = dist.get_rank() == dist.get_world_size() - 1

    def shape(_step: int) -> tuple[int, int]:
        return BATCH, LENGTH if last else LENGTH // 2

    plain = train(ddp, None, steps, shape=shape)
    budget = 0.7 * max(peaks_of_all(plain))
    memory = {"mode": "smart_swap", "budget_gib": budget / GIB}
    return {"plain": plain, "planned": train(ddp, memory, steps, shape=shape)}


def no_budget_is_enough() -> Results:
    """Only on the largest rank it is not; it is an error on all of them, and another training begins."""

    def shape(_step: int) -> tuple[int, int]:
        return BATCH, LENGTH if dist.get_rank() == 0 else LENGTH // 4

    plain = train(ddp, None, 2, shape=shape)
    memory = {"mode": "smart_swap", "budget_gib": 0.25 * max(peaks_of_all(plain)) / GIB}
    return {"plain": plain, "planned": train(ddp, memory, 8, shape=shape), "after": train(ddp, None, 2)}


def a_plan_file(folder: str) -> Results:
    """Only rank 0's path leads anywhere."""
    plain = train(ddp, None, 8)
    where = Path(folder, "plan.json") if dist.get_rank() == 0 else Path(folder, "elsewhere", "plan.json")
    budget = 0.7 * max(peaks_of_all(plain))
    memory = {"mode": "adaptive", "budget_gib": budget / GIB, "plan_file": str(where)}
    first = train(ddp, memory, 8)
    dist.barrier()
    again = train(ddp, memory, 3)
    other = train(ddp, {**memory, "budget_gib": 0.8 * max(peaks_of_all(plain)) / GIB}, 3)
    return {"plain": plain, "first": first, "again": again, "other": other}


def a_batch_that_grows_on_one_rank() -> Results:
    """From step 9 on rank 1's is longer: survived there alone, and planned for at the next common look."""

    def shape(step: int) -> tuple[int, int]:
        return BATCH, LENGTH if step >= 9 and dist.get_rank() == 1 else LENGTH // 2

    plain = train(ddp, None, 18, shape=shape)
    limit = int(0.75 * max(peaks_of_all(plain)))
    before, stable.CHECK_STEPS = stable.CHECK_STEPS, QUICK_CHECK_STEPS
    try:
        return {"plain": plain, "planned": train(ddp, {"mode": "adaptive"}, 18, limit, shape)}
    finally:
        stable.CHECK_STEPS = before


def states_on_the_host(steps: int = 8) -> Results:
    """``memory_saving`` in DDP."""
    plain = train(ddp, None, steps)
    budget = 0.7 * max(peaks_of_all(plain))
    memory = {
        "mode": "smart_swap",
        "budget_gib": budget / GIB,
        "preference": "memory_saving",
        "min_tensor_mib": 0.001,
    }
    return {"plain": plain, "planned": train(ddp, memory, steps)}


def sharded_weights(steps: int = 8) -> Results:
    """FSDP2, out of memory in warm-up."""
    plain = train(fsdp2, None, steps)
    limit = int(0.75 * max(peaks_of_all(plain)))
    return {"plain": plain, "planned": train(fsdp2, {"mode": "adaptive"}, steps, limit)}


def divided_model(group: dist.ProcessGroup | None, sequence_parallel: bool) -> Results:
    """Tensor parallelism."""
    assert group is not None
    config = ParallelConfig(tensor_parallel_size=group.size(), sequence_parallel_enabled=sequence_parallel)

    def divided(model: nn.Module) -> nn.Module:
        patch_model(model, config, group)
        return model

    def run(memory: Mapping[str, Any] | None) -> Run:
        return train(divided, memory, 8, group=group, seed_per_rank=False)

    plain = run(None)
    memory = {"mode": "adaptive", "budget_gib": 0.7 * max(peaks_of_all(plain)) / GIB}
    return {"plain": plain, "planned": run(memory)}


def run_two(rank: int, folder: str) -> None:
    """Some cases of two ranks."""
    cases = {
        "devices": lambda _: devices_of_different_size(),
        "impossible": lambda _: no_budget_is_enough(),
        "tensor_parallel": lambda group: divided_model(group, False),
    }
    run_cases(rank, folder, 2, cases, {"devices": [], "impossible": [], "tensor_parallel": [[0, 1]]})


def run_two_more(rank: int, folder: str) -> None:
    """The others."""
    cases = {
        "lengths": lambda _: batches_of_different_length(),
        "plan_file": lambda _: a_plan_file(folder),
        "states": lambda _: states_on_the_host(),
        "fsdp2": lambda _: sharded_weights(),
        "sequence_parallel": lambda group: divided_model(group, True),
        "grows": lambda _: a_batch_that_grows_on_one_rank(),
    }
    groups = {name: [[0, 1]] if name == "sequence_parallel" else [] for name in cases}
    run_cases(rank, folder, 2, cases, groups)


def run_four(rank: int, folder: str) -> None:
    """The cases of four ranks."""
    cases = {
        "devices": lambda _: devices_of_different_size(6),
        "lengths": lambda _: batches_of_different_length(6),
        "impossible": lambda _: no_budget_is_enough(),
    }
    run_cases(rank, folder, 4, cases, {name: [] for name in cases})
