"""Out of memory: a training that needs all of what it is given, with 0.6 of that, and with 0.3.

    python benchmarks/planner_oom.py                    on a GPU, about three minutes
    OMP_NUM_THREADS=1 python benchmarks/planner_oom.py --device cpu     tiny, on a device that is counted

A Llama trains with fused AdamW: *plain* with as much memory as there is, whose peak is what it needs;
*without the planner* and *planned* with a share of that (``set_per_process_memory_fraction``). Planned, at
the larger share, every step must succeed, the first one included, and the losses must be plain's bit for bit;
at the smaller share, where nothing can help, it must say how much would do. Kernels are the deterministic
ones. Exit status 1: something else happened.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.exactness import deterministic
from benchmarks.records import accelerator_name, commit, hardware, versions
from hf_actswap import apply
from hf_actswap.planner import BudgetError, CountingMeter, Planner

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
SHARES = (0.6, 0.3)
"""Of the memory that plain needs: where the planner must help, and where nothing can."""


@dataclass
class Training:
    """What became of one training.

    Args:
        case: ``plain``, ``without the planner``, or ``planned``.
        share: of plain's peak, that it may use.
        limit_bytes: the same in bytes; ``None``: no limit.
        losses: of each step.
        step_ms: of each step.
        phases: the planner's, in which each step ran.
        peak_bytes: the most that the allocator held in any step, but for warm-up, where the planner itself
            reads and resets the counter.
        stable_peak_bytes: the same of stable steps.
        error: how it ended, where it did not end well.
    """

    case: str
    share: float = 1.0
    limit_bytes: int | None = None
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    stable_peak_bytes: int = 0
    error: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    commit: str | None = None
    environment: dict[str, Any] = field(default_factory=dict)


class _Counted(CountingMeter):
    """A device that is always on: who starts and stops its meter changes nothing."""

    def on(self) -> None:
        super().start()

    def off(self) -> None:
        super().stop()

    def start(self) -> None:
        """It counts already."""

    def stop(self) -> None:
        """It goes on counting."""


@contextmanager
def _limited(device: torch.device, limit_bytes: int | None) -> Iterator[_Counted | None]:
    """Give a training so much memory, on an accelerator by the allocator, on the CPU by a count."""
    if device.type == "cpu":
        counted = _Counted(limit_bytes)
        counted.on()
        try:
            yield counted
        finally:
            counted.off()
        return
    _, total_bytes = torch.accelerator.get_memory_info(device)
    torch.cuda.set_per_process_memory_fraction(
        1.0 if limit_bytes is None else limit_bytes / total_bytes, device
    )
    try:
        yield None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _model(options: argparse.Namespace, device: torch.device) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 128),
        num_key_value_heads=max(1, options.hidden // 128),
        max_position_embeddings=options.tokens,
        use_cache=False,
        dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).to(config.dtype).train()


def train(case: str, share: float, needed_bytes: int | None, options: argparse.Namespace) -> Training:
    """Train once.

    Args:
        case: of `Training`.
        share: of ``needed_bytes``, that may be used.
        needed_bytes: plain's peak; ``None``: no limit.
        options: of the command.
    """
    device = torch.device(options.device)
    limit = None if needed_bytes is None else int(share * needed_bytes)
    done = Training(case, share, limit)
    with deterministic(fill=False), _limited(device, limit) as counted:
        try:
            _train(done, options, device, counted)
        except (BudgetError, torch.OutOfMemoryError) as error:
            done.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    return done


def _train(
    done: Training, options: argparse.Namespace, device: torch.device, counted: _Counted | None
) -> None:
    model = _model(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    planner: Any = None
    if done.case == "planned":
        planner = apply(model, {"memory": {"mode": "adaptive"}}, optimizer=optimizer, meter=counted)
    try:
        for number in range(options.steps):
            _step(done, number, model, optimizer, planner, counted)
    finally:
        if planner is not None:
            planner.remove()


def _step(
    done: Training,
    number: int,
    model: Any,
    optimizer: torch.optim.Optimizer,
    planner: Planner | None,
    counted: _Counted | None,
) -> None:
    phase = planner.phase if planner is not None else ""
    device = next(model.parameters()).device
    shape = (1, model.config.max_position_embeddings)
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
    _reset(device, counted)
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    done.losses.append(loss.item())
    peak = _peak(device, counted)
    optimizer.step()
    optimizer.zero_grad()
    peak = max(peak, _peak(device, counted))
    done.step_ms.append((time.perf_counter() - start) * 1e3)
    done.phases.append(phase)
    if phase != "warm-up":
        done.peak_bytes = max(done.peak_bytes, peak)
    if phase == "stable":
        done.stable_peak_bytes = max(done.stable_peak_bytes, peak)


def _reset(device: torch.device, counted: _Counted | None) -> None:
    if counted is not None:
        counted.reset_peak()
    else:
        torch.accelerator.reset_peak_memory_stats(device)


def _peak(device: torch.device, counted: _Counted | None) -> int:
    if counted is not None:
        return counted.peak_bytes()
    return int(torch.accelerator.max_memory_reserved(device))


def problems(trainings: Sequence[Training]) -> list[str]:
    """Return what is not as it must be."""
    plain, without, planned, hopeless = trainings
    found = []
    if not without.error:
        found.append("without the planner it fits: the share is too large to show anything")
    if planned.error:
        found.append(f"planned, at {planned.share:g}: {planned.error}")
    elif planned.losses != plain.losses:
        found.append("planned, the losses differ")
    elif planned.phases[-1:] != ["stable"]:
        found.append(f"planned, it is not stable after {len(planned.phases)} steps")
    if planned.limit_bytes is not None and planned.peak_bytes > planned.limit_bytes:
        found.append("planned, the limit was exceeded")
    if "at least" not in hopeless.error.lower():
        found.append(f"at {hopeless.share:g}: no word of the least budget: {hopeless.error or 'no error'}")
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--device", default=f"{found.type}:0" if found else "cpu")
    parser.add_argument("--out", type=Path, help="where to write; by default into results/")
    sizes = {
        "steps": (12, 14),
        "layers": (4, 6),
        "hidden": (64, 4096),
        "tokens": (512, 32768),
        "vocabulary": (64, 4096),
    }
    for name in sizes:
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args(argv)
    for name, (on_cpu, elsewhere) in sizes.items():
        if getattr(options, name) is None:
            setattr(options, name, on_cpu if options.device == "cpu" else elsewhere)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Train four times, say what happened, write it; return 1 if it is not as it must be."""
    options = parse(argv)
    device = torch.device(options.device)
    plain = train("plain", 1.0, None, options)
    enough, little = SHARES
    trainings = [
        plain,
        train("without the planner", enough, plain.peak_bytes, options),
        train("planned", enough, plain.peak_bytes, options),
        train("planned", little, plain.peak_bytes, options),
    ]
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    origin = {"versions": versions(), "hardware": hardware(device)}
    for item in trainings:
        item.settings, item.commit, item.environment = settings, commit(REPOSITORY)["id"], origin
        tail = f", {item.step_ms[-1]:.1f} ms in the last" if item.step_ms else ""
        sys.stdout.write(
            f"{item.case} at {item.share:g}: {len(item.losses)} steps{tail}, "
            f"{item.peak_bytes:,} bytes at the peak; {item.error or 'all went well'}\n"
        )
    found = problems(trainings)
    for problem in found:
        sys.stdout.write(f"NOT AS IT MUST BE: {problem}\n")
    name = "cpu" if device.type == "cpu" else accelerator_name(device).lower().replace(" ", "-")
    path = options.out or RESULTS / f"out_of_memory_{name}_{datetime.now():%Y%m%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(item) for item in trainings], indent=1) + "\n", encoding="utf-8")
    return 1 if found else 0


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    sys.exit(main())
