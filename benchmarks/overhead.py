"""Measures the host's time for pack and unpack of a saved tensor, compared with hooks that do nothing.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py
    OMP_NUM_THREADS=1 python benchmarks/overhead.py --workload chain --rounds 20 --out mine.json
    OMP_NUM_THREADS=1 python benchmarks/overhead.py --rehearse            # PyTorch's CUDA build, no GPU

The workloads are so small that nearly all of the time is the host's: a *chain* of cheap ops in decoder
layers, where each op saves one tensor with a storage of its own, the same with three times as many ops, and a
tiny *Llama*, where tensors are shared and many of them are parameters. The time of hooks on layers and the
model is divided among the tensors too. The two chains have the same layers, so the time of the *further*
tensors of the long one is that of pack and unpack alone.

Each case has a model of its own with its hooks on. A round runs one step of each case, in an order that
changes; the numbers are medians over the rounds of the difference to the step without any hooks in the same
round. The garbage collector is off within a step, as in `timeit`.

On the CPU copies are those of the tests' recording transfer, which are complete when compute waits for
them; in the case ``swap, bare copies`` they do nothing at all, so that only the engine's time is left.
With ``--rehearse`` they are real calls of CUDA, on a rehearsed device whose kernels do nothing. The workload
*7b* is then four layers of Llama-2-7B on 8,192 tokens, whose tensors are copied in several pieces.

Times are the processor's, of all threads, so that other programs lengthen them less. Compare numbers of one
run only, and ratios rather than microseconds: a busy machine makes all of them longer.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaForCausalLM

from benchmarks.records import REPOSITORY, RESULTS, commit, hardware, print_table, versions, write_json
from benchmarks.workloads import PRESETS, Workload, in_turns, llama_config
from hf_actswap.engine import AppliedPlan, Resources, install
from hf_actswap.engine.host_pool import HostBuffer
from hf_actswap.engine.transfer import Copy
from hf_actswap.plan import MemoryPlan, PlanRow, Windows
from hf_actswap.plan.model_structure import model_structure
from hf_actswap.rehearsal import Options, build, environment
from tests.engine.recording_transfer import RecordingTransfer

LAYERS = 4
OPS_PER_MODULE = 100
NOTHING, IDENTITY = "nothing installed", "identity hooks"
REFERENCE_IDENTITY_US = 0.9
"""Time of identity hooks on the machine on which the bounds were set; ratios are scaled to it."""


@dataclass(frozen=True)
class Case:
    """A plan of these ``rows``, or hooks that do nothing, on a model.

    ``bare_copies``: copies do nothing (CPU). ``bound_us``: the most time of a saved tensor, on a machine with
    `REFERENCE_IDENTITY_US`.
    """

    name: str
    rows: tuple[PlanRow, ...] | None = None
    min_tensor_bytes: int = 0
    bare_copies: bool = False
    bound_us: float | None = None


def _swap(path: str) -> tuple[PlanRow, ...]:
    windows = Windows.of_prefetch(10)
    return tuple(PlanRow(layer, path, "swap", windows=windows) for layer in range(LAYERS))


# With a row that matches nothing the hooks are installed, but every tensor is kept.
_ELSEWHERE = (PlanRow("head", "", "swap", windows=Windows.of_prefetch(10)),)
_HUGE_BYTES = 2**40

CASES = (
    Case(NOTHING),
    Case(IDENTITY),
    Case("keep, layer rules", _ELSEWHERE, _HUGE_BYTES, bound_us=2.0),
    Case("keep, layer rules, too small to swap", _swap(""), _HUGE_BYTES, bound_us=2.0),
    Case("keep, op rules", _swap("unmatched"), bound_us=5.0),
    Case("swap, layer rules", _swap(""), bound_us=20.0),
    Case("swap, op rules", (*_swap(""), *_swap("self_attn")), bound_us=20.0),
    Case("swap, bare copies", _swap(""), bare_copies=True, bound_us=20.0),
)


class _Ops(nn.Module):
    """A chain of cheap ops, each of which saves its input and nothing else."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            hidden = hidden.sin()
        return hidden


class Chain(nn.Module):
    """Layers of cheap ops, ``ops`` in each of their two modules, on a tensor of shape (8, 8)."""

    def __init__(self, ops: int = OPS_PER_MODULE) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.layers = nn.ModuleList(
            nn.Sequential(OrderedDict(self_attn=_Ops(ops), mlp=_Ops(ops))) for _ in range(LAYERS)
        )

    def forward(self) -> torch.Tensor:
        hidden = self.weight + 0
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum()


class Llama(nn.Module):
    """A Llama with its loss on ``ids``; on another device than the CPU weights have no values."""

    def __init__(self, workload: Workload, ids: torch.Tensor, device: str) -> None:
        super().__init__()
        with torch.device("cpu" if device == "cpu" else "meta"):
            model = LlamaForCausalLM(llama_config(workload)).to(workload.torch_dtype)
        self.model = model if device == "cpu" else model.to_empty(device=device)
        self.register_buffer("ids", ids)

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        return loss


_LLAMA = Workload("llama", "tiny", LAYERS, 16, 32, 48, 4, 2, 64, head=True, dtype="float32")
_7B = replace(PRESETS["7b-8k"], layers=LAYERS, head=True)
WORKLOADS: dict[str, Callable[[], nn.Module]] = {
    "chain": Chain,
    "long chain": partial(Chain, 3 * OPS_PER_MODULE),
    "llama": partial(Llama, _LLAMA, torch.arange(32).view(2, 16), "cpu"),
    "7b": partial(Llama, _7B, torch.zeros(1, _7B.tokens, dtype=torch.long), "cuda"),
}


class _Never:
    def wait(self) -> None:
        return None


class BareTransfer(RecordingTransfer):
    """A transfer that copies nothing, so that gradients are wrong."""

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        return _Never()

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        return torch.empty(host.size_bytes, dtype=torch.uint8), _Never()

    def host_reader_done(self, host: HostBuffer) -> None:
        pass  # no copy is in flight


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself: a hook that does nothing."""
    return tensor


def saved_tensors(model: nn.Module) -> int:
    """Return how many tensors one forward saves."""
    saved: list[None] = []
    with saved_tensors_hooks(lambda _tensor: saved.append(None), same):
        model()
    return len(saved)


WARMUP_ROUNDS = 5
_COLUMNS = {
    "us": "us",
    "pack": "pack_us",
    "unpack": "unpack_us",
    "lowest": "us_lowest",
    "ratio": "ratio_to_identity",
    "at 0.9": "us_at_reference",
    "further": "further_us",
    "bound": "bound_us",
    "no_grad": "no_grad_us",
    "step": "step_ratio",
}
"""Headings of the table, and the fields of `Row` in it."""


@dataclass
class Row:
    """One case on one workload; times in microseconds per saved tensor, less those without hooks.

    Args:
        saved_tensors: calls of pack in one step.
        offloads: storages copied out in one step.
        step_ms: median time of forward and backward, hooks included.
        step_ratio: time of the fastest step, divided by that without hooks.
        us: median of forward and backward; ``pack_us``: of forward, ``unpack_us``: of backward.
        us_lowest: the fastest step, less the fastest without hooks.
        ratio_to_identity: ``us_lowest`` divided by that of identity hooks.
        us_at_reference: ``ratio_to_identity`` times `REFERENCE_IDENTITY_US`.
        further_us: ``us_at_reference`` of those tensors that the long chain has more than the chain.
        bound_us: the most that pack and unpack may take together.
        no_grad_us: time of a forward without gradients, in evaluation, per op that would save a tensor.
        passes_in_no_grad: forwards that the engine followed and copies that it made in such a forward.
    """

    workload: str
    case: str
    saved_tensors: int
    offloads: int = 0
    step_ms: float = 0.0
    step_ratio: float = 0.0
    us: float = 0.0
    pack_us: float = 0.0
    unpack_us: float = 0.0
    us_lowest: float = 0.0
    ratio_to_identity: float | None = None
    us_at_reference: float | None = None
    further_us: float | None = None
    bound_us: float | None = None
    no_grad_us: float = 0.0
    passes_in_no_grad: int = 0
    device: str = ""
    commit: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)


class Subject:
    """A model, made by ``build``, with one case's hooks on."""

    def __init__(self, case: Case, build: Callable[[], nn.Module], device: torch.device) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        self.model = build().to(device).train()
        self.times_s: list[tuple[float, float, float]] = []
        """Of forward, of backward, and of a forward without gradients, in each step."""
        self._recording: RecordingTransfer | None = None
        self.applied: AppliedPlan | None = None
        if case.rows is None:
            return
        if device.type == "cpu":
            self._recording = BareTransfer() if case.bare_copies else RecordingTransfer(poison=False)
        plan = MemoryPlan(rows=case.rows, num_layers=LAYERS, min_tensor_bytes=case.min_tensor_bytes)
        self.applied = install(self.model, plan, model_structure(self.model), Resources(self._recording))

    def step(self) -> None:
        """Time one step, and one forward without gradients."""
        for parameter in self.model.parameters():
            parameter.grad = None
        if self._recording is not None:
            self._recording.log.clear()
        self._synchronize()
        start = time.process_time()
        with self._hooks():
            loss = self.model()
        between = time.process_time()
        loss.backward()
        self._synchronize()
        end = time.process_time()
        del loss
        self.model.eval()
        begin = time.process_time()
        with torch.no_grad(), self._hooks():
            self.model()
            self._synchronize()
        self.times_s.append((between - start, end - between, time.process_time() - begin))
        self.model.train()

    def _hooks(self) -> AbstractContextManager[Any]:
        identity = self.case.name == IDENTITY
        return saved_tensors_hooks(same, same) if identity else nullcontext()

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def measure(workload: str, rounds: int, device: torch.device, cases: Sequence[Case] = CASES) -> list[Row]:
    """Measure all cases on one workload; `NOTHING` and `IDENTITY` must be among them."""
    build = WORKLOADS[workload]
    subjects = [Subject(case, build, device) for case in cases]
    saved = saved_tensors(build().to(device).train())
    gc.collect()
    gc.disable()
    try:
        for number, subject in in_turns(subjects, WARMUP_ROUNDS + rounds):
            if number == WARMUP_ROUNDS:
                subject.times_s.clear()
            subject.step()
            if number % 10 == 0 and subject is subjects[0]:
                gc.collect()
    finally:
        gc.enable()
    bare_s = next(np.array(subject.times_s) for subject in subjects if subject.case.name == NOTHING)
    rows = [_row(workload, subject, bare_s, saved) for subject in subjects]
    # The fastest steps, because medians of small differences vary by more than the effect.
    identity_us = next(row.us_lowest for row in rows if row.case == IDENTITY)
    for row in rows:
        if row.case != NOTHING and identity_us > 0:
            row.ratio_to_identity = row.us_lowest / identity_us
            row.us_at_reference = row.ratio_to_identity * REFERENCE_IDENTITY_US
    for subject in subjects:
        if subject.applied is not None:
            subject.applied.remove()
    return rows


def _row(workload: str, subject: Subject, bare_s: Any, saved: int) -> Row:
    """Return a row, from the times of its subject and of the one without hooks, as `Subject.times_s`."""
    times_s = np.array(subject.times_s)
    step_s, bare_step_s = (found[:, :2].sum(axis=1) for found in (times_s, bare_s))
    row = Row(workload, subject.case.name, saved, bound_us=subject.case.bound_us)
    row.step_ms = np.median(step_s) * 1e3
    row.step_ratio = step_s.min() / bare_step_s.min()
    row.us_lowest = (step_s.min() - bare_step_s.min()) / saved * 1e6
    row.us = np.median(step_s - bare_step_s) / saved * 1e6
    row.pack_us, row.unpack_us, row.no_grad_us = np.median(times_s - bare_s, axis=0) / saved * 1e6
    if subject.applied is not None:
        before = subject.applied.stats()
        subject.step()
        row.offloads = (subject.applied.stats() - before).offloads
        before = subject.applied.stats()
        with torch.no_grad():
            subject.model()
        change = subject.applied.stats() - before
        row.passes_in_no_grad = change.forwards + change.offloads
    return row


def compare_chains(rows: Sequence[Row]) -> None:
    """Fill in ``further_us``, if both chains are among ``rows``."""
    short = {row.case: row for row in rows if row.workload == "chain"}
    further = {
        row.case: row.us_lowest * row.saved_tensors
        - short[row.case].us_lowest * short[row.case].saved_tensors
        for row in rows
        if row.workload == "long chain" and row.case in short
    }
    for row in rows:
        if row.workload == "long chain" and further.get(IDENTITY, 0.0) > 0:
            row.further_us = further[row.case] / further[IDENTITY] * REFERENCE_IDENTITY_US


def print_rows(rows: Sequence[Row]) -> None:
    """Print the rows, a table for each workload."""
    for workload in dict.fromkeys(row.workload for row in rows):
        found = [row for row in rows if row.workload == workload]
        cells = [
            {"case": row.case, **{heading: getattr(row, name) for heading, name in _COLUMNS.items()}}
            for row in found
        ]
        print_table(cells, f"{workload}: {found[0].saved_tensors} saved tensors, us for each")


def rehearse(arguments: Sequence[str]) -> int:
    """Run this script with these arguments on a rehearsal's device; return its exit status."""
    # Nothing but PyTorch's own work is done on the host then: no values, no order of copies, no races.
    options = Options("H200", arithmetic="none", order="eager", races=False)
    rest = [word for word in arguments if word != "--rehearse"]
    command = [sys.executable, __file__, *rest, "--device", "cuda"]
    return subprocess.run(command, env=environment(options, build()), check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the results; return the exit status."""
    parser = argparse.ArgumentParser(description="What pack and unpack cost the host per saved tensor.")
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--case", nargs="+", help="parts of cases' names; the two without a plan always run")
    parser.add_argument("--rounds", type=int, default=60, help="steps of each case")
    parser.add_argument("--device", default="cpu", help="on an accelerator copies are real")
    parser.add_argument("--out", type=Path, help="where to write; by default into results/")
    parser.add_argument("--rehearse", action="store_true", help="on a CUDA device that is not there")
    given = list(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(given)
    if options.rehearse:
        return rehearse(given)
    device = torch.device(options.device)
    torch.set_num_threads(1)
    workloads = options.workload or [name for name in WORKLOADS if name != "7b" or device.type == "cuda"]
    cases = [
        case
        for case in CASES
        if case.rows is None or not options.case or any(part in case.name for part in options.case)
    ]
    rows = [row for name in workloads for row in measure(name, options.rounds, device, cases)]
    compare_chains(rows)
    origin = {"versions": versions(), "hardware": hardware(device), "load": os.getloadavg()[0]}
    for row in rows:
        row.device, row.commit, row.environment = device.type, commit(REPOSITORY)["id"], origin
    print_rows(rows)
    path = options.out or RESULTS / f"overhead_{device.type}_{datetime.now():%Y%m%d}.json"
    write_json(path, [asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
