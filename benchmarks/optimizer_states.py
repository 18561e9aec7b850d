"""What it costs to keep AdamW's states in host memory during forward and backward.

    python benchmarks/optimizer_states.py
    python benchmarks/optimizer_states.py --micro-batches 4 --layers 16 --out mine.json
    OMP_NUM_THREADS=1 python benchmarks/optimizer_states.py --device cpu      # that it runs, no more

A Llama is trained with fused AdamW. Each case has a model of its own, and all see the same data: *plain* has
the states on the device, *synchronous* moves them to page-locked memory behind each step and back before the
next, one copy after another while nothing else runs, and the others are `OptimizerStates` with more or less
of the states on the device at once. Ratios are to *plain* of the same run, which is measured first and last.
``bound`` is the least that any step can take: plain's, or the time of the copies where that is longer, both
ways at once.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.exactness import deterministic
from benchmarks.records import commit, hardware, versions
from hf_actswap.engine import Transfer
from hf_actswap.engine.host_pool import HostPool
from hf_actswap.engine.link import Link
from hf_actswap.engine.slabs import PageableSlabs, PinnedSlabs
from hf_actswap.engine.transfer_streams import transfer_of
from hf_actswap.planner.states.optimizer_states import OptimizerStates

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PLAIN, SYNCHRONOUS = "plain", "synchronous"
SHARES = {"ours, a tenth resident": 0.1, "ours, a third resident": 1 / 3, "ours, all resident": 1.0}
CASES = (PLAIN, SYNCHRONOUS, *SHARES, PLAIN)
WARMUP_STEPS = 3


@dataclass
class Row:
    """One case; times are medians over the measured steps.

    Args:
        case: what.
        step_ms: forwards, backwards and the optimizer's step.
        optimizer_ms: of that, the optimizer's step alone, as the device sees it.
        ratio: of ``step_ms`` to the mean of plain's.
        bound_ratio: the least that it can be; ``None`` where the link is not known.
        state_bytes: of the optimizer's states.
        freed_share: of these, what is not on the device when forward ends.
        forward_peak_bytes, step_peak_bytes: most device memory in use until backward ends, and in the step.
        moved_bytes: copied in one step, both ways together.
        stall_ms: in one step, compute waits for copies.
        fingerprint: of the parameters after the last step; the same for all cases.
    """

    case: str
    step_ms: float = 0.0
    optimizer_ms: float = 0.0
    ratio: float = 0.0
    bound_ratio: float | None = None
    state_bytes: int = 0
    freed_share: float = 0.0
    forward_peak_bytes: int | None = None
    step_peak_bytes: int | None = None
    moved_bytes: int = 0
    stall_ms: float = 0.0
    fingerprint: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    commit: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)


class SynchronousStates:
    """States go to page-locked memory behind a step, and come back before the next, while all else waits.

    Args:
        optimizer: whose states; moved as they are, tensor by tensor.
        device: where the step wants them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._device, self._pinned = device, device.type != "cpu"
        self._host: dict[torch.Tensor, torch.Tensor] = {}
        optimizer.register_step_pre_hook(self._back)
        optimizer.register_step_post_hook(self._away)

    def _away(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for state in moving(optimizer):
            if state not in self._host:
                self._host[state] = torch.empty_like(state, device="cpu", pin_memory=self._pinned)
            self._host[state].copy_(state)
            state.data = self._host[state]

    def _back(self, *_: object) -> None:
        for state in self._host:
            state.data = state.data.to(self._device, copy=True)


def moving(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the states that are worth moving."""
    return [
        state
        for entries in optimizer.state.values()
        for state in entries.values()
        if isinstance(state, torch.Tensor) and state.numel() > 1
    ]


class Subject:
    """A model in training, under one case.

    Args:
        case: one of `CASES`.
        options: of the command.
        device: where.
    """

    def __init__(self, case: str, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        self.case, self.options, self.device = case, options, device
        with torch.device(device):
            config = LlamaConfig(
                vocab_size=options.vocabulary,
                hidden_size=options.hidden,
                intermediate_size=options.hidden * 11 // 4,
                num_hidden_layers=options.layers,
                num_attention_heads=max(1, options.hidden // 128),
                num_key_value_heads=max(1, options.hidden // 128),
                use_cache=False,
            )
            self.model: nn.Module = LlamaForCausalLM(config).to(torch.bfloat16).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.states: OptimizerStates | None = None
        self.transfer: Transfer | None = None
        self._pool: HostPool | None = None
        self.freed: list[float] = []
        self.step_ms: list[float] = []
        self.optimizer_ms: list[float] = []
        self.forward_peaks: list[int] = []
        self.step_peaks: list[int] = []
        if case == SYNCHRONOUS:
            SynchronousStates(self.optimizer, device)
        elif case in SHARES:
            self._keep_on_host(SHARES[case])

    def _keep_on_host(self, share: float) -> None:
        streams = self.device.type != "cpu"
        self.transfer = transfer_of(self.device)
        self._pool = HostPool(PinnedSlabs(self.device, frozenset())) if streams else HostPool(PageableSlabs())
        total = 2 * sum(item.nbytes for item in self.model.parameters())
        decoder: Any = self.model.get_submodule("model")
        self.states = OptimizerStates(
            self.optimizer,
            self.transfer,
            self._pool,
            model=self.model,
            layers=list(decoder.layers),
            resident_bytes=int(share * total),
            min_tensor_bytes=self.options.min_tensor_bytes,
        )
        self.states.attach()

    def step(self, number: int) -> None:
        """Train one step on the data of ``number``."""
        generator = torch.Generator().manual_seed(number)
        shape = (self.options.micro_batches, 1, self.options.tokens)
        batches = torch.randint(0, self.options.vocabulary, shape, generator=generator).to(self.device)
        self._forget_peak()
        start = self._now()
        for ids in batches:
            loss = self.model(input_ids=ids, labels=ids).loss
            self._note_freed()
            loss.backward()
            del loss
        between = self._now()
        forward_peak = self._peak()
        self._forget_peak()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = self._now()
        if number >= WARMUP_STEPS:
            self.step_ms.append((end - start) * 1e3)
            self.optimizer_ms.append((end - between) * 1e3)
            if forward_peak is not None:
                self.forward_peaks.append(forward_peak)
                self.step_peaks.append(self._peak() or 0)

    def _note_freed(self) -> None:
        states = moving(self.optimizer) if self.states is None else []
        total = sum(item.nbytes for item in states)
        if self.states is not None:
            if self.states.state_bytes:
                self.freed.append(1 - self.states.device_bytes / self.states.state_bytes)
        elif total:
            away = self.case == SYNCHRONOUS
            self.freed.append(1.0 if away else 0.0)

    def _now(self) -> float:
        """Wait for the device first. Copies out of the step before may still run: they are ours to hide."""
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()
        return time.perf_counter()

    def _peak(self) -> int | None:
        return None if self.device.type == "cpu" else int(torch.accelerator.max_memory_allocated(self.device))

    def _forget_peak(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)

    def finish(self) -> None:
        """Take everything off and free the host memory."""
        if self.states is not None:
            self.states.remove()
        if self._pool is not None:
            self._pool.close()


def fingerprint(model: nn.Module) -> str:
    """Return a digest of the parameters' bits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def measure(case: str, options: argparse.Namespace, device: torch.device) -> Row:
    """Train under one case."""
    subject = Subject(case, options, device)
    before = None
    with deterministic(fill=False):
        for number in range(WARMUP_STEPS + options.steps):
            if number == WARMUP_STEPS and subject.states is not None:
                before = subject.states.stats()
            subject.step(number)
    row = Row(case, statistics.median(subject.step_ms), statistics.median(subject.optimizer_ms))
    row.freed_share = min(subject.freed)
    if subject.states is not None and before is not None:
        change = subject.states.stats() - before
        row.moved_bytes = (change.offloaded_bytes + change.prefetched_bytes) // options.steps
        row.stall_ms = change.stall_ms / options.steps
    if subject.forward_peaks:
        row.forward_peak_bytes, row.step_peak_bytes = max(subject.forward_peaks), max(subject.step_peaks)
    subject.finish()
    row.state_bytes = sum(item.nbytes for item in moving(subject.optimizer))
    row.fingerprint = fingerprint(subject.model)
    return row


def compare(rows: Sequence[Row], link: Link | None) -> None:
    """Set the ratios to plain's step, and their bound."""
    plain_ms = statistics.mean(row.step_ms for row in rows if row.case == PLAIN)
    for row in rows:
        row.ratio = row.step_ms / plain_ms
        if link is not None and row.case in SHARES:
            bytes_per_ms = min(link.out_beside_in_bytes_per_ms, link.in_beside_out_bytes_per_ms)
            row.bound_ratio = max(1.0, row.state_bytes / bytes_per_ms / plain_ms)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    columns: tuple[tuple[str, Callable[[Row], str]], ...] = (
        ("step ms", lambda row: f"{row.step_ms:.1f}"),
        ("optimizer ms", lambda row: f"{row.optimizer_ms:.1f}"),
        ("ratio", lambda row: f"{row.ratio:.3f}"),
        ("bound", lambda row: "" if row.bound_ratio is None else f"{row.bound_ratio:.3f}"),
        ("freed %", lambda row: f"{100 * row.freed_share:.1f}"),
        ("peak GiB", lambda row: _gib(row.forward_peak_bytes)),
        ("in step", lambda row: _gib(row.step_peak_bytes)),
        ("stall ms", lambda row: f"{row.stall_ms:.1f}"),
    )
    head = f"{'case':26}" + "".join(f"{name:>14}" for name, _ in columns)
    return "\n".join(
        [head, *(f"{row.case:26}" + "".join(f"{show(row):>14}" for _, show in columns) for row in rows)]
    )


def _gib(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 2**30:.2f}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; sizes that are not given suit the device."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="by default the accelerator, if there is one")
    parser.add_argument("--steps", type=int, help="measured steps of each case")
    parser.add_argument("--micro-batches", type=int, default=1, help="forwards and backwards of a step")
    for name in ("layers", "hidden", "tokens", "vocabulary"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--min-tensor-bytes", type=int)
    parser.add_argument("--out", type=Path, help="where to write; by default into results/")
    options = parser.parse_args(argv)
    found = torch.accelerator.current_accelerator(check_available=True)
    options.device = options.device or ("cpu" if found is None else f"{found.type}:0")
    small = options.device == "cpu"
    sizes = {
        "steps": (3, 10),
        "layers": (2, 8),
        "hidden": (64, 4096),
        "tokens": (32, 8192),
        "vocabulary": (256, 32000),
        "min_tensor_bytes": (1024, 2**20),
    }
    for name, (on_cpu, elsewhere) in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, on_cpu if small else elsewhere)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the results; return 1 if the cases did not train to the same bits."""
    options = parse(argv)
    device = torch.device(options.device)
    rows = []
    for case in CASES:
        rows.append(measure(case, options, device))
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
    compare(rows, transfer_of(device).link())
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    origin = {"versions": versions(), "hardware": hardware(device)}
    for row in rows:
        row.settings, row.commit, row.environment = settings, commit(REPOSITORY)["id"], origin
    sys.stdout.write(table(rows) + "\n")
    path = options.out or RESULTS / f"optimizer_states_{device.type}_{datetime.now():%Y%m%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    same = len({row.fingerprint for row in rows}) == 1
    if not same:
        sys.stdout.write("The cases trained to different bits.\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
