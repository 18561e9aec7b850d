"""What each of two processes runs on its own rehearsed device; their group is NCCL's.

``python -m tests.rehearsal.rank_cases RANK FOLDER`` writes what is wrong with each case as JSON, and the
errors of each fault as text. Faults come first, each in a process of its own: a device on which a rank was
lost is of no more use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_actswap.rehearsal import RehearsedDevice
from hf_actswap.rehearsal.launch import SETTINGS

SIZE, FAULT_LIMIT_S, STEPS = 2, 60, 2
TOLERANCE = 1e-5
"""Of gradients and losses, relative to the largest element: sums of two ranks are rounded otherwise."""
ORDERS = (("lazy", 0), ("eager", 0), ("random", 1), ("random", 2))


def join(rank: int, folder: Path, name: str, device: int) -> None:
    torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / f"{name}.store"), SIZE)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=SIZE, timeout=timedelta(minutes=5))


# Faults: each function runs on both ranks


def disagree(rank: int, _: Path) -> None:
    dist.all_reduce(torch.ones(4 + rank, device="cuda"))
    torch.cuda.synchronize()


def never_launched(rank: int, folder: Path) -> None:
    values = torch.ones(4, device="cuda")
    dist.all_reduce(values)
    torch.cuda.synchronize()
    if rank == 0:
        dist.all_reduce(values)
        torch.cuda.synchronize()
    while not (folder / "never_launched.0.over").exists():
        time.sleep(0.05)


def ended(rank: int, _: Path) -> None:
    values = torch.ones(4, device="cuda")
    dist.all_reduce(values)
    torch.cuda.synchronize()
    if rank == 1:
        os._exit(0)
    dist.all_reduce(values)
    values.add_(1)


def never_joins(rank: int, folder: Path) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(4, device="cuda"))
    while not (folder / "never_joins.0.over").exists():
        time.sleep(0.05)


def one_device(rank: int, folder: Path) -> None:
    dist.all_reduce(torch.ones(4, device="cuda"))


FAULTS: dict[str, Callable[[int, Path], None]] = {
    "disagree": disagree,
    "never_launched": never_launched,
    "ended": ended,
    "never_joins": never_joins,
    "one_device": one_device,
}


def run_fault(name: str, rank: int, folder: Path) -> None:
    """Run a fault in a process of its own; ``<name>.<rank>.err`` has its errors, ``.over`` is its end."""
    command = [sys.executable, "-m", "tests.rehearsal.rank_cases", str(rank), str(folder), name]
    settings = {**os.environ, SETTINGS: f"{os.environ[SETTINGS]};ranks_limit_s=4"}
    with (folder / f"{name}.{rank}.err").open("wb") as errors, suppress(subprocess.TimeoutExpired):
        subprocess.run(command, env=settings, stderr=errors, timeout=FAULT_LIMIT_S, check=False)
    (folder / f"{name}.{rank}.over").touch()


def fault(name: str, rank: int, folder: Path) -> None:
    """Be the process of one fault on one rank; begins when the other rank's is there."""
    (folder / f"{name}.{rank}.there").touch()
    while not (folder / f"{name}.{1 - rank}.there").exists():
        time.sleep(0.05)
    try:
        join(rank, folder, name, 0 if name == "one_device" else rank)
        FAULTS[name](rank, folder)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    (folder / f"{name}.{rank}.over").touch()
    os._exit(0)


# Cases: each returns what is wrong


def collectives(rank: int) -> list[str]:
    """Every collective, each in place of its stream."""
    wrong: list[str] = []

    def expect(name: str, found: torch.Tensor, expected: list[float]) -> None:
        if found.tolist() != expected:
            wrong.append(f"{name}: {found.tolist()}, not {expected}")

    def of_rank(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([value + rank for value in values], dtype=dtype).to("cuda")

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8):
        one = of_rank(1, 5, dtype=dtype)
        dist.all_reduce(one)
        expect(f"sum of {dtype}", one, [3, 11])
    for how, expected in (("MAX", [2, 6]), ("MIN", [1, 5]), ("PRODUCT", [2, 30]), ("AVG", [1.5, 5.5])):
        one = of_rank(1, 5)
        dist.all_reduce(one, op=getattr(dist.ReduceOp, how))
        expect(how, one, expected)
    one = of_rank(1, 5)
    dist.all_reduce(one, op=dist._make_nccl_premul_sum(0.25))
    expect("scaled sum", one, [0.75, 2.75])
    one = of_rank(1)
    dist.broadcast(one, 1)
    expect("broadcast", one, [2])
    one = of_rank(1)
    dist.reduce(one, 1)
    if rank == 1:
        expect("reduce", one, [3])
    both = [torch.empty(2, device="cuda") for _ in range(SIZE)]
    dist.all_gather(both, of_rank(1, 5))
    expect("all_gather", torch.cat(both), [1, 5, 2, 6])
    part = torch.empty(1, device="cuda")
    dist.reduce_scatter_tensor(part, of_rank(1, 5))
    expect("reduce_scatter", part, [3 if rank == 0 else 11])
    there = torch.empty(2, device="cuda")
    dist.all_to_all_single(there, of_rank(1, 5))
    expect("all_to_all", there, [1, 2] if rank == 0 else [5, 6])
    back = torch.empty(1, device="cuda")
    pair = [dist.P2POp(dist.isend, of_rank(7), 1 - rank), dist.P2POp(dist.irecv, back, 1 - rank)]
    for work in dist.batch_isend_irecv(pair if rank else pair[::-1]):
        work.wait()
    expect("pair", back, [8 if rank == 0 else 7])
    told: list[Any] = [None] * SIZE
    dist.all_gather_object(told, {"rank": rank})
    if told != [{"rank": 0}, {"rank": 1}]:
        wrong.append(f"objects: {told}")
    late = dist.new_group([0, 1])
    one = of_rank(1)
    work = dist.all_reduce(one, group=late, async_op=True)
    dist.barrier()
    assert work is not None
    work.wait()
    expect("another group", one, [3])
    dist.destroy_process_group(late)
    return wrong


def large(rank: int) -> list[str]:
    """More than a socket holds, both ways at once, while other streams work."""
    values = torch.arange(3_000_000, dtype=torch.float32).add(rank).to("cuda")
    work = dist.all_reduce(values, async_op=True)
    other = torch.full_like(values, 2.0).mul_(3)
    assert work is not None
    work.wait()
    expected = 2 * torch.arange(3_000_000, dtype=torch.float32) + 1
    equal = torch.equal(values.cpu(), expected) and bool((other == 6).all())
    return [] if equal else ["wrong values"]


def model_and_batch() -> tuple[nn.Module, torch.Tensor]:
    from tests.pipeline.staged_worker import VOCABULARY, tiny_model

    ids = torch.randint(0, VOCABULARY, (2 * SIZE, 12), generator=torch.Generator().manual_seed(3))
    return tiny_model("llama", 2), ids


def differences(name: str, found: torch.Tensor, expected: torch.Tensor) -> list[str]:
    error = float((found.cpu() - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    return [] if error <= TOLERANCE else [f"{name}: {error:.1e} of the largest"]


def train(rank: int, wrap: Callable[[nn.Module], nn.Module], swaps: bool) -> list[str]:
    """Steps of a model on both ranks beside one process on the CPU with both batches."""
    from hf_actswap import apply
    from tests.pipeline.staged_worker import SWAP

    reference, ids = model_and_batch()
    model = model_and_batch()[0].to("cuda")
    applied: AbstractContextManager[Any] = apply(model, SWAP) if swaps else nullcontext()
    wrong = []
    with applied:
        wrapped = wrap(model)
        own, alone = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (wrapped, reference))
        for step in range(STEPS):
            rows = ids[2 * rank : 2 * rank + 2].to("cuda")
            loss, expected = (
                wrapped(input_ids=rows, labels=rows).loss,
                reference(input_ids=ids, labels=ids).loss,
            )
            loss.backward()
            expected.backward()
            dist.all_reduce(loss := loss.detach(), op=dist.ReduceOp.AVG)
            wrong += differences(f"loss {step}", loss, expected.detach())
            parameters = dict(reference.named_parameters())
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                assert grad is not None
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                found = parameters[name].grad
                assert found is not None
                wrong += differences(f"{name}, step {step}", whole, found)
            for optimizer in (own, alone):
                optimizer.step()
                optimizer.zero_grad()
    return wrong


def of_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(
        model, device_ids=[torch.cuda.current_device()], bucket_cap_mb=0.02
    )  # many buckets


def of_fsdp(model: nn.Module) -> nn.Module:
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    return model


def pipeline(rank: int) -> list[str]:
    """1F1B, every layer swapped: bitwise as in one process on the same device."""
    from tests.pipeline.staged_worker import TWO, run_case

    found = run_case(TWO["1f1b swap"], dist.group.WORLD, torch.device("cuda", rank))
    wrong = [f"{name}: {error}" for name, error in found.differing.items()]
    wrong += ["losses"] * (not all(found.losses)) + ["norms"] * (not all(found.norms))
    wrong += ["evaluation"] * (not found.evaluation) + ["nothing was swapped"] * (not found.offloads)
    return wrong + ["state"] * (found.state is False)


def tensor_parallel(rank: int) -> list[str]:
    """Tensor and sequence parallelism, every layer swapped, beside one process on the CPU."""
    from hf_actswap.apply import apply
    from hf_actswap.parallel.collectives import tensor_parallel_group
    from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients
    from hf_actswap.parallel.patch_model import patch_model
    from tests.parallel.patch_worker import config, full_gradients
    from tests.pipeline.staged_worker import SWAP

    group = dist.group.WORLD
    assert group is not None
    reference, ids = model_and_batch()
    model = model_and_batch()[0].to("cuda")
    patched = patch_model(model, config(group, True), group)
    expected = reference(input_ids=ids, labels=ids).loss
    expected.backward()
    with tensor_parallel_group(group), apply(model, SWAP):
        loss = model(input_ids=ids.to("cuda"), labels=ids.to("cuda")).loss
        loss.backward()
    allreduce_sequence_parallel_gradients(model, group)
    found, wrong = full_gradients(patched), differences("loss", loss.detach(), expected.detach())
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        wrong += differences(name, found[name], parameter.grad)
    return wrong


def missing_wait(_: int) -> list[str]:
    """A result that is read before the collective is waited for."""
    values = torch.ones(100, device="cuda")
    work = dist.all_reduce(values, async_op=True)
    early = values * 1
    assert work is not None
    work.wait()
    found = RehearsedDevice.found()
    assert found is not None
    races = [race for race in found.races() if "all_reduce" in race]
    return [f"values {early[0].item()}"] * (early[0].item() != 2) + races[:1]


CASES: dict[str, Callable[[int], list[str]]] = {
    "collectives": collectives,
    "large": large,
    "ddp": lambda rank: train(rank, of_ddp, False),
    "ddp_swapped": lambda rank: train(rank, of_ddp, True),
    "fsdp": lambda rank: train(rank, of_fsdp, False),
    "fsdp_swapped": lambda rank: train(rank, of_fsdp, True),
    "pipeline": pipeline,
    "tensor_parallel": tensor_parallel,
}


def run_cases(rank: int) -> dict[str, list[str]]:
    """Run all cases in all orders; a case's accesses that nothing orders are wrong too."""
    device = RehearsedDevice.found()
    assert device is not None
    found: dict[str, list[str]] = {}
    for name, case in CASES.items():
        for order, seed in ORDERS:
            device.choose_order(order, seed)  # type: ignore[arg-type]
            try:
                wrong = case(rank)
            except Exception:
                wrong = [traceback.format_exc()]
            torch.cuda.synchronize()
            found[f"{name} {order} {seed}"] = wrong + device.races()
            device.clear_races()
    device.choose_order("lazy")
    found["missing_wait"] = missing_wait(rank)
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for name in FAULTS:
        run_fault(name, rank, folder)
    join(rank, folder, "cases", rank)
    (folder / f"cases.{rank}.json").write_text(json.dumps(run_cases(rank)))
    dist.destroy_process_group()


if __name__ == "__main__":
    of_rank, in_folder, *of_fault = sys.argv[1:]
    if of_fault:
        fault(of_fault[0], int(of_rank), Path(in_folder))
    main(int(of_rank), Path(in_folder))
