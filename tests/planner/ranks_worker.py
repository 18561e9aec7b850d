"""What each process of the planner's tests on several ranks runs; it is started afresh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_actswap import apply
from hf_actswap.config import ParallelConfig
from hf_actswap.parallel import patch_model, tensor_parallel_group
from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients
from hf_actswap.planner import BudgetError, Planner
from hf_actswap.planner.phases import stable
from tests.engine.tiny_models import VOCABULARY, tiny_llama, tiny_neox
from tests.parallel.collective_calls import noted
from tests.planner.simulated_device import make_device_known, on_device
from tests.processes import run_cases

GIB = 2**30
BATCH, LENGTH = 4, 128
QUICK_CHECK_STEPS = 3

BAD_STEP = 5
FULL = "CUDA out of memory. Tried to allocate 20.00 KiB. (a test)"

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
        guarded: whether the guard was on behind each step's backward.
        weights: at the end, summed in double precision; empty where they are sharded.
    """

    losses: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    collectives: list[Counter[tuple[str, str]]] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)
    problem: str | None = None
    evicted_bytes: int = 0
    left_over: list[str] = field(default_factory=list)
    guarded: list[bool] = field(default_factory=list)
    weights: dict[str, float] = field(default_factory=dict)

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
    build: Callable[[], Any] = lambda: tiny_llama(use_cache=False),
    before_step: Callable[[int, nn.Module], None] = lambda _step, _model: None,
    dropout_seed: int | None = None,
    within: bool = False,
) -> Run:
    """Train with AdamW; ``memory`` ``None``: without the planner; ``within``: in `Planner.micro_batch`."""
    run = Run()
    model = build()
    if dropout_seed is not None:
        torch.manual_seed(dropout_seed)
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
                before_step(step, model)
                ids = torch.randint(0, VOCABULARY, shape(step), generator=generator)

                def micro_batch(ids: torch.Tensor = ids) -> float:
                    with noted(_noting(run)) as begin:
                        loss = called(input_ids=ids, labels=ids).loss
                        begin("backward")
                        loss.backward()
                    return loss.item()

                run.losses.append(planner.micro_batch(micro_batch) if within else micro_batch())
                run.peaks.append(device.peak_bytes())
                run.guarded.append(planner is not None and planner._run.guarded)
                if group is not None:
                    allreduce_sequence_parallel_gradients(model, group)
                optimizer.step()
                optimizer.zero_grad()
        except (BudgetError, torch.OutOfMemoryError) as error:
            run.problem = str(error)
        finally:
            if planner is not None:
                run.evicted_bytes = planner._run.idle.evicted_bytes
                planner.remove()
    if not any(isinstance(weight, DTensor) for weight in model.parameters()):
        run.weights = {name: weight.double().sum().item() for name, weight in model.named_parameters()}
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


def longer_batches_ahead_of_a_step(steps: int = 6) -> Results:
    """On a device that is known; the last rank's second batch is longer than any that was planned for."""
    last = dist.get_rank() == dist.get_world_size() - 1

    def shape(step: int) -> tuple[int, int]:
        return BATCH, LENGTH if last and step else LENGTH // 2

    plain = train(ddp, None, steps, shape=shape)
    memory = {"mode": "adaptive", "budget_gib": 0.75 * max(peaks_of_all(plain)) / GIB}
    with pytest.MonkeyPatch.context() as patch:
        make_device_known(patch)
        return {"plain": plain, "planned": train(ddp, memory, steps, shape=shape)}


def lengths_that_take_turns(steps: int = 16) -> Results:
    """Once the plan is found, ranks have long and short batches in different steps."""

    def shape(step: int) -> tuple[int, int]:
        short = step >= 6 and (step // 2 + dist.get_rank()) % 2 == 0
        return BATCH, LENGTH // 3 if short else LENGTH

    found: Results = {}
    for wrap in (ddp, fsdp2):
        plain = found[f"plain {wrap.__name__}"] = train(wrap, None, steps, shape=shape)
        memory = {"mode": "adaptive", "budget_gib": 0.6 * max(peaks_of_all(plain)) / GIB}
        found[f"planned {wrap.__name__}"] = train(wrap, memory, steps, shape=shape)
    return found


def no_budget_is_enough() -> Results:
    """Only on the largest rank it is not; it is an error on all of them, and another training begins."""

    def shape(_step: int) -> tuple[int, int]:
        return BATCH, LENGTH if dist.get_rank() == 0 else LENGTH // 4

    plain = train(ddp, None, 2, shape=shape)
    memory = {"mode": "smart_swap", "budget_gib": 0.25 * max(peaks_of_all(plain)) / GIB}
    return {"plain": plain, "planned": train(ddp, memory, 8, shape=shape), "after": train(ddp, None, 2)}


def tiles_on_all() -> Results:
    """Nothing fits but with head and loss in tiles."""

    def build() -> nn.Module:
        return tiny_llama(use_cache=False, vocab_size=1024, num_hidden_layers=1)

    def shape(_step: int) -> tuple[int, int]:
        return (1, 2048 + 512 * dist.get_rank())

    plain = train(ddp, None, 7, shape=shape, build=build)
    least_bytes = 0.7 * max(peaks_of_all(plain))
    memory = {"mode": "adaptive", "budget_gib": least_bytes / GIB}
    limit_bytes = int(least_bytes) if dist.get_rank() else None
    return {
        "plain": plain,
        "planned": train(ddp, memory, 7, shape=shape, build=build),
        "no room": train(ddp, {"mode": "adaptive"}, 5, limit_bytes, shape, build=build),
    }


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


def frozen_weights_on_the_host(steps: int = 8) -> Results:
    """Adapters in DDP, the base on the host: as written, and as the planner of both ranks chooses."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        asked: Any = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
        return get_peft_model(tiny_llama(use_cache=False), LoraConfig(**asked)).train()

    beside: Any = {"build": build, "shape": lambda _: (1, 32)}  # a base larger than the activations

    def memory(weights: str, share: float) -> dict[str, Any]:
        return {"mode": "adaptive", "weights": weights, "budget_gib": share * peak / GIB}

    plain = train(ddp, None, steps, **beside)
    peak = max(peaks_of_all(plain))
    return {
        "plain": plain,
        "planned": train(ddp, memory("host", 0.75), steps, **beside),
        # The least is 0.63 of the peak with the weights on the host, and above 0.67 with them kept.
        "chosen": train(ddp, memory("auto", 0.67), steps, **beside),
    }


def sharded_weights(steps: int = 8) -> Results:
    """FSDP2, out of memory in warm-up."""
    plain = train(fsdp2, None, steps)
    limit = int(0.75 * max(peaks_of_all(plain)))
    return {"plain": plain, "planned": train(fsdp2, {"mode": "adaptive"}, steps, limit)}


def divided_model(group: dist.ProcessGroup, sequence_parallel: bool) -> Results:
    """Tensor parallelism."""
    config = ParallelConfig(tensor_parallel_size=group.size(), sequence_parallel_enabled=sequence_parallel)

    def divided(model: nn.Module) -> nn.Module:
        patch_model(model, config, group)
        return model

    def run(memory: Mapping[str, Any] | None) -> Run:
        return train(divided, memory, 8, group=group, seed_per_rank=False)

    plain = run(None)
    memory = {"mode": "adaptive", "budget_gib": 0.7 * max(peaks_of_all(plain)) / GIB}
    return {"plain": plain, "planned": run(memory)}


class FillsUp:
    """In `BAD_STEP` a module of the model raises once what a full device raises.

    Args:
        ranks: on which.
        path: of the module.
        backward: in the backward behind it, not in its forward.
    """

    def __init__(self, ranks: tuple[int, ...], path: str, backward: bool = False) -> None:
        self._ranks, self._path, self._backward = ranks, path, backward

    def __call__(self, step: int, model: nn.Module) -> None:
        if step == BAD_STEP and dist.get_rank() in self._ranks:
            self._handle = model.get_submodule(self._path).register_forward_hook(self._forward)

    def _forward(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        self._handle.remove()
        if not self._backward:
            raise torch.OutOfMemoryError(FULL)
        output.register_hook(self._raise)

    def _raise(self, _gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError(FULL)


NEOX_MIDDLE = "gpt_neox.layers.2.mlp.dense_h_to_4h"
LLAMA_MIDDLE = "model.layers.2.mlp.up_proj"
SHORT = {"mode": "adaptive", "search_steps": 2}


def memory_runs_out_on_one_rank(steps: int = 8) -> Results:
    """In the forward of a stable step of rank 1, with dropout."""
    seed = dist.get_rank()
    plain = train(ddp, None, steps, build=tiny_neox, dropout_seed=seed)
    memory = {**SHORT, "budget_gib": 0.9 * max(peaks_of_all(plain)) / GIB}
    disturbed = FillsUp((1,), NEOX_MIDDLE)
    return {
        "plain": plain,
        "planned": train(ddp, memory, steps, build=tiny_neox, dropout_seed=seed, before_step=disturbed),
    }


def no_retry() -> Results:
    """Where ranks communicate inside what runs out, it stays an error. On both: else the other one waits."""
    plain = train(ddp, None, 2)
    memory = {**SHORT, "budget_gib": 0.9 * max(peaks_of_all(plain)) / GIB}
    both = (0, 1)
    found = {
        "backward": train(ddp, memory, 8, within=True, before_step=FillsUp(both, LLAMA_MIDDLE, True)),
        "fsdp2": train(fsdp2, memory, 8, before_step=FillsUp(both, LLAMA_MIDDLE)),
        "synchronised": train(
            ddp, memory, 8, build=lambda: averaging_llama(0), before_step=FillsUp(both, LLAMA_MIDDLE)
        ),
        "later": train(
            ddp, memory, 8, build=lambda: averaging_llama(4), before_step=FillsUp(both, LLAMA_MIDDLE)
        ),
    }
    return {"plain": plain, **found}


def averaging_llama(first: int) -> nn.Module:
    """A model that averages over the ranks from its forward number ``first`` on, by a hook of its user."""
    model, calls = tiny_llama(use_cache=False), count()

    def average(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if next(calls) >= first:
            mean = output.detach().mean()
            dist.all_reduce(mean)

    model.get_submodule("model.layers.0.mlp").register_forward_hook(average)
    return model


def run_two(rank: int, folder: str) -> None:
    """Some cases of two ranks."""
    cases = {
        "impossible": lambda _: no_budget_is_enough(),
        "tensor_parallel": lambda group: divided_model(group, False),
        "retry": lambda _: memory_runs_out_on_one_rank(),
    }
    groups = {name: [[0, 1]] if name == "tensor_parallel" else [] for name in cases}
    run_cases(rank, folder, 2, cases, groups)


def run_two_more(rank: int, folder: str) -> None:
    """The others."""
    cases = {
        "devices": lambda _: devices_of_different_size(),
        "lengths": lambda _: batches_of_different_length(),
        "longer": lambda _: longer_batches_ahead_of_a_step(),
        "turns": lambda _: lengths_that_take_turns(),
        "plan_file": lambda _: a_plan_file(folder),
        "tiles": lambda _: tiles_on_all(),
        "states": lambda _: states_on_the_host(),
        "frozen": lambda _: frozen_weights_on_the_host(),
        "fsdp2": lambda _: sharded_weights(),
        "sequence_parallel": lambda group: divided_model(group, True),
        "grows": lambda _: a_batch_that_grows_on_one_rank(),
        "no_retry": lambda _: no_retry(),
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
    run_cases(rank, folder, 4, cases)
