"""Stress that needs a process of its own: other settings of the allocator, or a process group.

    python -m tests.engine.gpu_stress_worker pressure|reserved|fsdp2|unwaited [cpu]

On the CPU the same code runs where it can, so that it is not first run on an accelerator.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.exactness import deterministic
from hf_actswap import MemoryPlan, load_config, model_structure, resolve_plan
from hf_actswap.engine import Resources, StreamTransfer, Transfer, install
from tests.engine.disorderly_transfer import DisorderlyTransfer, Machine
from tests.engine.gpu_stress import LIVES_OF_SHARDED, PLANS, Stress, small_llama
from tests.engine.graph_lives import GRAPH_LIVES
from tests.engine.stressed_transfer import Direction, StressedTransfer
from tests.engine.tiny_models import on, swap_everything
from tests.rehearsed import on_gpu

PRESSED_STEPS = on_gpu(100, 7)
SHORT = 2 * len(GRAPH_LIVES)
RESERVED_BOUND = 1.08
_PLAN = swap_everything(20)


def main(arguments: list[str]) -> None:
    """Run one task; an assertion ends the process with status 1."""
    torch.set_num_threads(1)
    accelerator = torch.accelerator.current_accelerator()
    on_cpu = "cpu" in arguments or accelerator is None
    device = torch.device("cpu") if on_cpu else torch.device(accelerator.type, 0)  # type: ignore[union-attr]
    with deterministic():
        sys.stdout.write(TASKS[arguments[0]](device) + "\n")


def stressed(device: torch.device) -> Transfer:
    """Return the transfer that delays copies there."""
    if device.type == "cpu":
        return DisorderlyTransfer(Machine([1]), [0, 3, 40], [7, 0, 25])
    return StressedTransfer(device)


def pressure(device: torch.device) -> str:
    """Find the least memory in which a step still runs, and run the stress in little more."""
    if device.type == "cpu":
        stress = Stress(small_llama(device, hidden=32), (2, 16))
        stress.learn()
        assert stress.wrong_under(_PLAN, stressed(device), SHORT) == 0
        return "right, without pressure: the CPU has no such allocator"
    stress = Stress(small_llama(device, hidden=1024), (4, 1024))
    stress.learn()
    total_bytes = torch.accelerator.get_memory_info(device)[1]
    step_bytes = _peak_of_steps(stress, device)
    for factor in (0.9, 1.0, 1.1, 1.2, 1.35, 1.5):
        torch.accelerator.empty_cache()
        limit_bytes = torch.accelerator.memory_reserved(device) + factor * step_bytes
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, device)
        retries = torch.cuda.memory_stats(device)["num_alloc_retries"]
        try:
            wrong = stress.wrong_under(_PLAN, stressed(device), PRESSED_STEPS)
        except torch.OutOfMemoryError:
            continue
        retries = torch.cuda.memory_stats(device)["num_alloc_retries"] - retries
        assert wrong == 0, f"{wrong} gradients differ with {factor} of the peak"
        return f"right under pressure: {factor} of the peak, {retries} times the cache was emptied"
    raise AssertionError("no limit above the peak was enough: memory is lost between blocks")


def _peak_of_steps(stress: Stress, device: torch.device) -> int:
    """The most bytes that steps with the plan allocate above what stays, after a warm-up."""
    stress.wrong_under(_PLAN, stressed(device), SHORT)
    stress.model.zero_grad()
    torch.accelerator.synchronize(device)
    baseline_bytes = int(torch.accelerator.memory_allocated(device))
    torch.accelerator.reset_peak_memory_stats(device)
    stress.wrong_under(_PLAN, stressed(device), SHORT)
    torch.accelerator.synchronize(device)
    return int(torch.accelerator.max_memory_allocated(device)) - baseline_bytes


def reserved(device: torch.device) -> str:
    """Compare the peaks of reserved and allocated memory in steady steps, copies as fast as they come."""
    if device.type == "cpu":
        return "the CPU reserves nothing"
    for name in ("windows 20", "auto"):
        model = small_llama(device, hidden=2048)
        stress = Stress(model, (4, 2048))
        applied = on(model, PLANS[name], StreamTransfer(device))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for step in range(5):
            stress.forward(step).backward()
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        for step in range(on_gpu(10, 3)):
            stress.forward(step).backward()
        torch.accelerator.synchronize(device)
        allocated = torch.accelerator.max_memory_allocated(device)
        ratio = torch.accelerator.max_memory_reserved(device) / allocated
        assert ratio <= RESERVED_BOUND, f"{name}: {ratio:.3f} of {allocated} bytes are reserved"
        applied.remove()
        del model, stress, applied
        torch.accelerator.empty_cache()
    return f"reserved at most {RESERVED_BOUND} of allocated"


def unwaited(device: torch.device) -> str:
    """An engine that does not wait must be found out. In a process of its own: what it reads is anything."""
    on_cpu = device.type == "cpu"
    stress = Stress(
        small_llama(device, hidden=32 if on_cpu else on_gpu(256, 64)),
        (2, 16) if on_cpu else on_gpu((4, 512), (2, 48)),
    )
    stress.learn()
    ways: tuple[Direction, ...] = ("out", "in")
    for never_waits in ways:
        plan, transfer = swap_everything(1), _never_waiting(device, never_waits)
        assert stress.wrong_under(plan, transfer, SHORT) > 0, f"not noticed: no wait for copies {never_waits}"
    return "found out"


def _never_waiting(device: torch.device, direction: Direction) -> Transfer:
    if device.type == "cpu":
        return DisorderlyTransfer(Machine([1]), [40], [40], direction)
    return StressedTransfer(device, spins_cycles=[2_000_000], never_waits=direction)


def fsdp2(device: torch.device) -> str:
    """Shard over one rank: gathering, resharding and reducing run as they do over many."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)
        backend = "gloo" if device.type == "cpu" else "nccl"
        limit = timedelta(seconds=120)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
        try:
            for name in ("windows 20", "auto", "case_4"):
                _stress_sharded(PLANS[name], device)
        finally:
            dist.destroy_process_group()
    return "right under FSDP2"


def _stress_sharded(plan: MemoryPlan | str, device: torch.device) -> None:
    on_cpu = device.type == "cpu"
    model: nn.Module = small_llama(device, hidden=32 if on_cpu else on_gpu(256, 64))
    shape = model_structure(model)
    fitting = plan if isinstance(plan, MemoryPlan) else resolve_plan(load_config(plan), shape)
    mesh = init_device_mesh(device.type, (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    stress = Stress(model, (2, 16) if on_cpu else on_gpu((4, 512), (2, 48)), LIVES_OF_SHARDED)
    stress.learn()
    assert stress.wrong_bits(SHORT) == 0, "FSDP2 alone does not repeat its gradients"
    with install(model, fitting, shape, Resources(stressed(device))):
        wrong = stress.wrong_bits(SHORT)
    assert wrong == 0, f"{wrong} gradients differ"


TASKS: dict[str, Callable[[torch.device], str]] = {
    "pressure": pressure,
    "reserved": reserved,
    "fsdp2": fsdp2,
    "unwaited": unwaited,
}

if __name__ == "__main__":
    main(sys.argv[1:])
