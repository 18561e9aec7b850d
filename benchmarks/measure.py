"""Measures one method after another on one workload and compares them with eager.

For each row, in this order: warm-up steps, timed steps (whose memory peak is read), on the CPU one step under
the memory meter, one step whose gradients are compared. The comparison comes last on purpose: by then host
blocks are being reused, which is where a swap that runs ahead of itself would show.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import calculate_time_spent

from benchmarks.exactness import Fingerprint, deterministic, differing, fingerprints, useless
from benchmarks.meters import CopyMeter, give_back_cached_memory, pinned_bytes
from benchmarks.methods import Planned
from benchmarks.records import Result
from benchmarks.rows import EAGER, REPEATED, ROWS, Row
from benchmarks.workloads import TrainingStep, Workload, timed_step_ms, training_step
from hf_actswap import AppliedPlan
from hf_actswap.engine import SwapStats
from hf_actswap.planner import AllocatorMeter, BudgetError, CountingMeter

logger = logging.getLogger(__name__)

_OVERRIDES_SHOWN = 20
_LEFT_OVER_BYTES = 2**29
"""Bytes that may be allocated beyond the model, its gradients and input: workspaces, frozen weights."""


@dataclass
class Reference:
    """Eager's output and gradients as fingerprints.

    Args:
        expected: fingerprints by name.
        fault: why nothing can be compared with them; ``""``: they can be used.
    """

    expected: dict[str, Fingerprint] = field(default_factory=dict)
    fault: str = ""

    @classmethod
    def of(cls, step: TrainingStep) -> Reference:
        """Run two eager steps, whose bits must be the same. An error becomes ``fault`` and is not raised."""
        try:
            found, again = (_outcome(empty_result(EAGER, step.workload), step, EAGER) for _ in range(2))
            bad = useless(_gradients(step))
        except Exception as error:
            return cls(fault=f"eager, with deterministic kernels: {type(error).__name__}: {error}")
        finally:
            _clean_up(step)
        if bad:
            return cls(found, f"eager gives zeros or no finite numbers: {', '.join(bad[:5])}")
        changed = differing(again, found)
        return cls(found, f"two eager steps differ: {', '.join(changed[:5])}" if changed else "")


class Bench:
    """Measures rows one after another, and keeps the model of the workload that was asked for last."""

    def __init__(self, device: torch.device, rows: Sequence[Row] = ROWS) -> None:
        self.device = device
        self._rows = {row.name: row for row in (EAGER, *REPEATED, *rows)}
        self._step: TrainingStep | None = None
        self._reference: Reference | None = None

    def measure(self, workload: Workload, name: str, config: Any = None, compared: bool = True) -> Result:
        """Measure one row; an error becomes its status; see `measure_row`."""
        row = self._rows[name]
        if self._step is None or self._step.workload != workload:
            self.clear()
            try:
                self._step = training_step(workload, self.device)
            except torch.OutOfMemoryError as error:
                result = empty_result(row, workload)
                _note_failure(result, error)
                return result
        if compared and self._reference is None:
            self._reference = Reference.of(self._step)
        return measure_row(self._step, row, self._reference if compared else None, config)

    def clear(self) -> None:
        """Free the model."""
        self._step = self._reference = None
        give_back_cached_memory(self.device)

    def is_sound(self) -> bool:
        """Whether another row can be measured here: the device answers, and no row left memory behind."""
        if self.device.type == "cpu":
            return True
        try:
            torch.accelerator.synchronize(self.device)
            left_bytes = torch.accelerator.memory_allocated(self.device)
        except RuntimeError as error:  # a CUDA context in which a kernel failed answers nothing any more
            logger.warning("the device does not answer: %s", error)
            return False
        baseline_bytes = 0 if self._step is None else self._step.baseline_bytes()
        return left_bytes <= baseline_bytes + _LEFT_OVER_BYTES


def empty_result(row: Row, workload: Workload) -> Result:
    return Result(
        method=row.name,
        compiled=row.compiles,
        model=workload.model,
        layers=workload.layers,
        seq=workload.tokens,
        batch=1,
        head=workload.head,
        workload=workload.name,
        dtype=workload.dtype,
        config=row.config_for(workload.layers),
        warmup_steps=workload.warmup_steps,
        must_be_exact=row.must_be_exact,
    )


def measure_row(
    step: TrainingStep, row: Row, reference: Reference | None = None, config: Any = None
) -> Result:
    """Measure one row; an error becomes its status, so that the others are still measured.

    Args:
        step: model and input; left as it was.
        row: the method to put on the model.
        reference: eager's bits, with which rows that do not compile are compared; ``None``: no comparison.
        config: the row's configuration, if it depends on earlier results; ``None``: as the row says.
    """
    result = empty_result(row, step.workload)
    if config is not None:
        result.config = config
    result.reason = row.obstacle(step)
    if result.reason:
        result.status = "skipped"
        return result
    _clean_up(step)
    pinned_before = pinned_bytes(step.device)
    is_cpu = step.device.type == "cpu"
    result.baseline_bytes = (
        step.baseline_bytes() if is_cpu else torch.accelerator.memory_allocated(step.device)
    )
    try:
        with row.setup(step, result.config) as applied:
            if isinstance(applied, Planned):
                applied.fill(result)
            _fill_times(result, step, applied)
            _fill_host_bytes(result, step, applied, pinned_before)
            _fill_cpu_bytes(result, step)
            found = _outcome(result, step, row)
            if reference is not None and not row.compiles:
                _fill_exactness(result, found, reference)
    except Exception as error:
        _note_failure(result, error)
    _clean_up(step)
    return result


def _clean_up(step: TrainingStep) -> None:
    try:
        step.zero_gradients()
        give_back_cached_memory(step.device)
    except RuntimeError as error:  # after a fault on the device nothing runs there any more
        logger.warning("the device does not answer: %s", error)


def _note_failure(result: Result, error: Exception) -> None:
    """Record an error as text. The exception itself is not kept: its frames hold the memory of the step."""
    text = str(error).strip()
    # Page-locked memory that runs out is reported as a plain RuntimeError.
    if isinstance(error, BudgetError):
        result.status, result.reason = "out of memory", " ".join(text.split())
    elif isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        result.status, result.reason = "out of memory", text.splitlines()[0]
    else:
        logger.exception("row %s failed", result.method)
        result.status, result.reason = "failed", f"{type(error).__name__}: {text}"
        result.traceback = traceback.format_exc()


def _fill_times(result: Result, step: TrainingStep, applied: AppliedPlan | Planned | None) -> None:
    """Run warm-up and timed steps; the peaks and the engine's counters are those of the timed ones.

    The peaks are read after each step: the planner resets them at the start of the next.
    """
    pinned_ms = applied.stats().pinning_ms if applied else 0.0
    compiled_s = _compile_s()
    result.step_ms = [timed_step_ms(step)]
    result.first_step_ms = result.step_ms[0]
    result.first_step_compile_ms = (_compile_s() - compiled_s) * 1e3
    if applied:
        result.first_step_pinning_ms = applied.stats().pinning_ms - pinned_ms
    if isinstance(applied, Planned):
        result.warmup_steps = min(result.warmup_steps, 2)  # the planner has trained already
    result.step_ms += [timed_step_ms(step) for _ in range(result.warmup_steps - 1)]
    before = applied.stats() if applied else None
    allocator = AllocatorMeter(step.device) if step.device.type != "cpu" else None
    if allocator:
        allocator.reset_peak()
    peaks = []
    for _ in range(step.workload.steps):
        result.step_ms.append(timed_step_ms(step))
        if allocator:
            peaks.append((allocator.peak_bytes(), allocator.reserved_peak_bytes()))
    result.ms = statistics.median(result.step_ms[-step.workload.steps :])
    if peaks and result.baseline_bytes is not None:
        result.peak_allocated_bytes, result.peak_reserved_bytes = map(max, zip(*peaks, strict=True))
        result.activation_bytes = result.peak_allocated_bytes - result.baseline_bytes
    if applied and before:
        _fill_swap_numbers(result, applied.stats() - before, step.workload.steps)
        changes = (*applied.plan.warnings, *applied.plan.adjustments)
        result.adjustments = [str(change) for change in changes[:_OVERRIDES_SHOWN]]


def _compile_s() -> float:
    """Return the time of all compilations in this process: of forwards, and of backwards later."""
    return float(calculate_time_spent()["total_wall_time"])


def _fill_swap_numbers(result: Result, total: SwapStats, steps: int) -> None:
    def per_step(value: float) -> float:  # a fraction of a byte: the steps were not alike
        return value // steps if isinstance(value, int) and value % steps == 0 else value / steps

    result.swapped_bytes = per_step(total.offloaded_bytes)
    for name in ("prefetched_bytes", "stalls", "stall_ms", "recomputes"):
        setattr(result, name, per_step(getattr(total, name)))
    result.rejected_bytes = per_step(sum(total.rejected.values()))
    result.pinning_ms = total.pinning_ms


def _fill_host_bytes(
    result: Result, step: TrainingStep, applied: AppliedPlan | Planned | None, pinned_before: int | None
) -> None:
    if applied:
        result.host_bytes = applied.stats().host_pool_bytes
    elif step.device.type == "cpu":
        result.host_bytes = 0
    else:
        now = pinned_bytes(step.device)
        result.host_bytes = None if now is None or pinned_before is None else now - pinned_before


def _fill_cpu_bytes(result: Result, step: TrainingStep) -> None:
    """Fill in bytes on the CPU from a step under a dispatch mode; not for compiled rows, as it stops them.

    The mode would switch compilation off. It does not see scratch memory inside a kernel, nor host copies
    that the engine allocated in earlier steps.
    """
    if step.device.type != "cpu" or result.compiled or result.baseline_bytes is None:
        return
    step.zero_gradients()
    gc.collect()
    with CountingMeter() as meter, step.context():
        output = step.forward()
        result.held_bytes = meter.allocated_bytes()
        step.backward(output)
        del output
    result.activation_bytes = meter.peak_bytes()
    result.peak_allocated_bytes = result.baseline_bytes + meter.peak_bytes()


def _fill_exactness(result: Result, found: dict[str, Fingerprint], reference: Reference) -> None:
    if reference.fault:
        result.reason = f"exactness cannot be judged: {reference.fault}"
    else:
        result.differing = differing(found, reference.expected)
        result.exact = not result.differing


def _outcome(result: Result, step: TrainingStep, row: Row) -> dict[str, Fingerprint]:
    """Run one step, fill in its loss and norm, and return fingerprints of its output and gradients.

    A compiled row uses the kernels with which it was timed, as others would have to be compiled, and returns
    none.
    """
    step.zero_gradients()
    copies = CopyMeter() if row.counts_copies else nullcontext()
    with nullcontext() if row.compiles else deterministic(), step.context():
        with copies:
            output = step.forward()
        if step.device.type != "cpu" and result.baseline_bytes is not None:
            result.held_bytes = torch.accelerator.memory_allocated(step.device) - result.baseline_bytes
        result.loss = step.loss(output)
        step.backward(output)
        step.synchronize()
    if isinstance(copies, CopyMeter):
        result.swapped_bytes = copies.copied_bytes
    elif result.swapped_bytes is None:
        result.swapped_bytes = 0
    result.grad_norm = _norm(step)
    return {} if row.compiles else fingerprints({"output": output, **_gradients(step)})


def _gradients(step: TrainingStep) -> dict[str, torch.Tensor]:
    return {name: leaf.grad for name, leaf in step.leaves().items() if leaf.grad is not None}


def _norm(step: TrainingStep) -> float:
    gradients = [weight.grad for weight in step.weights().values() if weight.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return math.hypot(*torch.stack(norms).tolist())
