"""Measures one row after another on one decoder stack and compares them with eager.

For each row, in this order: warm-up steps, timed steps, one step under the memory meter, one step whose
gradients are compared. The comparison comes last on purpose: by then host blocks are being reused, which is
where a swap that runs ahead of itself would show.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from benchmarks.frontier_memory import memory_meter
from benchmarks.frontier_rows import EAGER, Row
from benchmarks.frontier_stack import DecoderStack
from hf_actswap import AppliedPlan
from hf_actswap.engine import SwapStats

logger = logging.getLogger(__name__)

_PER_STEP = ("offloaded_bytes", "prefetched_bytes", "stalls", "stall_ms", "recomputes")

Status = Literal["measured", "skipped", "out of memory", "failed"]


@dataclass
class Measurement:
    """One row's numbers; ``None`` where there is none.

    Args:
        row: its name.
        config: what was put on the model.
        status, reason: whether it was measured, and why not.
        must_be_exact: of the row.
        exact: output and gradients equal eager's bit for bit; ``None``: not judged.
        differing: the gradients that do not.
        step_ms: of each timed step, forward and backward, device-synchronised; ``median_ms`` of them.
        held_bytes: alive at the end of forward, above the resting state; the stack's output included.
        peak_bytes: most alive at once during the step, above the resting state.
        swap: the engine's counters of one step, and its host memory.
        ratios: against eager in the same run.
    """

    row: str
    config: Any = None
    status: Status = "measured"
    reason: str = ""
    must_be_exact: bool = False
    exact: bool | None = None
    differing: list[str] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    median_ms: float | None = None
    held_bytes: int | None = None
    peak_bytes: int | None = None
    swap: dict[str, float] | None = None
    ratios: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether the run must not be trusted, or the row is broken."""
        return self.status == "failed" or (
            self.must_be_exact and self.status == "measured" and not self.exact
        )


Reference = dict[str, torch.Tensor]
"""Eager's output and gradients, in host memory."""


def measure(
    stack: DecoderStack,
    rows: Sequence[Row],
    compiling: bool,
    done: Callable[[Measurement], None] = lambda _: None,
) -> list[Measurement]:
    """Measure rows on a stack.

    Args:
        stack: left as it was.
        rows: eager is measured first, whether or not it is among them.
        compiling: whether rows that compile are measured.
        done: is called with each measurement when it is complete.

    Returns:
        One measurement per row, eager first.

    Raises:
        RuntimeError: eager itself cannot be measured, or two eager steps differ (then nothing can be judged).
    """
    results: list[Measurement] = []
    reference: Reference = {}
    for row in (EAGER, *(row for row in rows if row.name != EAGER.name)):
        result = _measure_row(stack, row, compiling, reference)
        results.append(result)
        if row is EAGER and (result.status != "measured" or not result.exact):
            raise RuntimeError(_why_no_reference(result))
        _fill_ratios(result, results[0])
        done(result)
    return results


def _why_no_reference(eager: Measurement) -> str:
    if eager.status != "measured":
        return f"eager cannot be measured ({eager.status}): {eager.reason or 'take fewer layers or tokens'}"
    return f"two eager steps differ, so that exactness cannot be judged: {', '.join(eager.differing[:5])}"


def _measure_row(stack: DecoderStack, row: Row, compiling: bool, reference: Reference) -> Measurement:
    """Measure one row; what goes wrong becomes its status, so that the others are still measured."""
    result = Measurement(row.name, row.config, must_be_exact=row.must_be_exact)
    result.reason = row.obstacle(stack.device, stack.model)
    if row.compiles and not compiling:
        result.reason = "compiling is slow on the CPU; ask for it with --compile"
    if result.reason:
        result.status = "skipped"
        return result
    try:
        with row.setup(stack.model, row.config) as applied:
            _fill(result, stack, row, applied, reference)
    except torch.OutOfMemoryError as error:
        result.status, result.reason = "out of memory", str(error).splitlines()[0]
    except Exception as error:
        logger.exception("row %s failed", row.name)
        result.status, result.reason = "failed", f"{type(error).__name__}: {error}"
    gc.collect()
    if stack.device.type != "cpu":
        torch.accelerator.empty_cache()
    return result


def _fill(
    result: Measurement, stack: DecoderStack, row: Row, applied: AppliedPlan | None, reference: Reference
) -> None:
    for _ in range(stack.workload.warmup_steps):
        _timed_step_ms(stack)
    before = applied.stats() if applied else None
    result.step_ms = [_timed_step_ms(stack) for _ in range(stack.workload.steps)]
    result.median_ms = statistics.median(result.step_ms)
    if applied and before:
        total = applied.stats() - before
        result.swap = _swap_numbers(total, stack.workload.steps)
    if stack.device.type != "cpu" or not row.compiles:  # a dispatch mode would switch compilation off
        result.held_bytes, result.peak_bytes = _step_bytes(stack)
    if row.compiles:
        return
    if not reference:
        reference.update(_outcome(stack))
        _check_reference(reference)
    result.differing = _differing(stack, reference)
    result.exact = not result.differing


def _swap_numbers(total: SwapStats, steps: int) -> dict[str, float]:
    """The counters per step; a fraction among the bytes means that the steps were not alike."""
    totals: dict[str, float] = {name: getattr(total, name) for name in _PER_STEP}
    totals["refused_bytes"] = sum(total.refused.values())
    numbers = {
        name: value // steps if isinstance(value, int) and value % steps == 0 else value / steps
        for name, value in totals.items()
    }
    return {**numbers, "host_peak_bytes": total.host_peak_bytes}


def _timed_step_ms(stack: DecoderStack) -> float:
    stack.zero_gradients()
    stack.synchronize()
    start = time.perf_counter()
    stack.backward(stack.forward())
    stack.synchronize()
    return (time.perf_counter() - start) * 1e3


def _step_bytes(stack: DecoderStack) -> tuple[int, int]:
    """Bytes above the resting state: at the end of forward, and at most."""
    stack.zero_gradients()
    gc.collect()
    with memory_meter(stack.device) as meter:
        output = stack.forward()
        held = meter.held_bytes()
        stack.backward(output)
        del output
        return held, meter.peak_bytes()


@contextmanager
def _deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time; uninitialised memory reads as NaN meanwhile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one for each kernel that has no such variant
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def _step_results(stack: DecoderStack) -> Iterator[tuple[str, torch.Tensor]]:
    """Run one step; give its output and each gradient, moved to host memory one at a time."""
    stack.zero_gradients()
    with _deterministic():
        output = stack.forward()
        stack.backward(output)
        stack.synchronize()
    yield "output", output.detach().to("cpu", copy=True)
    for name, leaf in stack.leaves().items():
        if leaf.grad is not None:
            yield name, leaf.grad.to("cpu", copy=True)


def _outcome(stack: DecoderStack) -> Reference:
    return dict(_step_results(stack))


def _check_reference(reference: Reference) -> None:
    """A comparison with zeros or NaN would prove nothing."""
    useless = [name for name, value in reference.items() if not value.isfinite().all() or not value.any()]
    if useless:
        raise RuntimeError(f"eager gives zeros or no finite numbers: {', '.join(useless[:5])}")


def _differing(stack: DecoderStack, reference: Reference) -> list[str]:
    seen = set()
    differing = []
    for name, value in _step_results(stack):
        seen.add(name)
        expected = reference.get(name)
        if expected is None or not torch.equal(_bits(value), _bits(expected)):
            differing.append(name)
    return differing + sorted(set(reference) - seen)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as bytes: NaN equals itself, and zero differs from minus zero."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _fill_ratios(result: Measurement, eager: Measurement) -> None:
    for name, value, base in (
        ("time", result.median_ms, eager.median_ms),
        ("held", result.held_bytes, eager.held_bytes),
        ("peak", result.peak_bytes, eager.peak_bytes),
    ):
        if value is not None and base:
            result.ratios[name] = value / base
