"""Watches one step of an applied plan: times in one (`TimeWatch`), memory by fate in another (`MemoryWatch`).

Two steps, because following every saved tensor and asking for memory after each takes host time, which would
show in the times.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import nn

from ..plan.outline import unwrapped
from ..plan.record import storage_key
from .install import AppliedPlan
from .layer_marks import LayerMarks, Phase
from .parameters import inner_tensors
from .stats import PendingTime
from .step_record import ComputePart, MeasuredCopy, MemorySample, Stall, StepMemory, StepTimeline
from .tickets import Ticket, keep
from .transfer import Stamp, Transfer
from .watched_copies import WatchedCopy


class _Marks:
    """The parts of compute, as stamps."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self.start = transfer.stamp()
        self._marks: list[tuple[Phase, int | None, Stamp]] = [("outside", None, self.start)]

    def mark(self, phase: Phase, layer: int | None) -> None:
        self._marks.append((phase, layer, self._transfer.stamp()))

    def parts(self) -> tuple[ComputePart, ...]:
        """Between the marks; the device must be idle."""
        at = [stamp.ms_since(self.start) for _, _, stamp in self._marks]
        parts = [
            ComputePart(phase, layer, start, end)
            for (phase, layer, _), start, end in zip(self._marks, at, at[1:], strict=False)
        ]
        return tuple(part for part in parts if part.end_ms > part.start_ms)


class TimeWatch:
    """Marks layers, copies and waits of the step that comes.

    Args:
        model: that the plan is on.
        applied: the plan.
    """

    def __init__(self, model: nn.Module, applied: AppliedPlan) -> None:
        self._applied, self._transfer = applied, applied.transfer
        self._copies: list[WatchedCopy] = []
        self._waits: list[tuple[WatchedCopy, Stamp, PendingTime]] = []
        self._marks = _Marks(self._transfer)
        self._layers = LayerMarks(model, applied.outline, self._marks.mark)
        self._layers.attach()
        applied.listen(self)

    def copied(self, copy: WatchedCopy, on_device: torch.Tensor) -> None:
        """See `CopyListener`."""
        self._copies.append(copy)

    def waited(self, copy: WatchedCopy, start: Stamp, length: PendingTime) -> None:
        """See `CopyListener`."""
        self._waits.append((copy, start, length))

    def optimizer_starts(self) -> None:
        """Backward is over."""
        self._marks.mark("outside", None)

    def close(self) -> None:
        """Watch no more; what is on the model goes. Safe to call again."""
        self._layers.detach()
        self._applied.listen(None)

    def timeline(self) -> StepTimeline:
        """End the step, and return what was seen; waits for the device."""
        self.close()
        self._marks.mark("outside", None)
        self._transfer.synchronize()
        parts = self._marks.parts()
        copies = self._measured_copies()
        stalls = [self._stall(copy, start, length) for copy, start, length in self._waits]
        self._copies, self._waits = [], []
        return StepTimeline(
            step_ms=parts[-1].end_ms if parts else 0.0,
            compute=parts,
            copies=tuple(copies),
            stalls=tuple(stall for stall in stalls if stall.length_ms > 0),
            overlaps=self._transfer.overlaps,
        )

    def _measured_copies(self) -> list[MeasuredCopy]:
        free_ms = {"out": 0.0, "in": 0.0}
        ended: dict[WatchedCopy, float] = {}
        found = []
        for copy in self._copies:
            asked_ms, end_ms = (stamp.ms_since(self._marks.start) for stamp in (copy.asked, copy.done))
            start_ms = asked_ms
            if self._transfer.overlaps:
                before_ms = 0.0 if copy.first is None else ended.get(copy.first, 0.0)
                start_ms = min(max(asked_ms, free_ms[copy.way], before_ms), end_ms)
            free_ms[copy.way] = ended[copy] = end_ms
            scope, op_path = copy.name
            found.append(MeasuredCopy(copy.way, scope, op_path, copy.size_bytes, asked_ms, start_ms, end_ms))
        return found

    def _stall(self, copy: WatchedCopy, start: Stamp, length: PendingTime) -> Stall:
        """Without overlap compute stood still while the copy was made, not where it is waited for."""
        begun = start if self._transfer.overlaps else copy.asked
        scope, op_path = copy.name
        begun_ms = begun.ms_since(self._marks.start)
        return Stall(copy.way, scope, op_path, begun_ms, length.elapsed_ms() or 0.0)


class MemoryWatch:
    """Follows the storages that the step saves, from their making to their end.

    Args:
        model: that the plan is on.
        applied: the plan; not evictable, for this makes the tickets of what stays.
        allocated_bytes: device memory in use now.
        peak_bytes: the most in use since it was asked last; ``None``: nobody can say, and what is in use
            between two saved tensors only is not seen.
    """

    def __init__(
        self,
        model: nn.Module,
        applied: AppliedPlan,
        allocated_bytes: Callable[[], int],
        peak_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._applied, self._transfer = applied, applied.transfer
        self._allocated_bytes, self._peak_bytes = allocated_bytes, peak_bytes
        self._bytes = {"kept": 0, "swapped": 0}
        self._alive: dict[int, str] = {}
        self._own = _storages_of(model)
        self._marks = _Marks(self._transfer)
        self._samples: list[tuple[Stamp, int, int, int]] = []
        self._start_bytes = allocated_bytes()
        self._on = True
        self._layers = LayerMarks(model, applied.outline, self._mark)
        self._layers.attach()
        applied.listen(self)
        applied.keep_by(self._keep)
        self._sample()

    def copied(self, copy: WatchedCopy, on_device: torch.Tensor) -> None:
        """See `CopyListener`."""
        self._follow(on_device, "swapped")

    def waited(self, copy: WatchedCopy, start: Stamp, length: PendingTime) -> None:
        """See `CopyListener`."""

    def optimizer_starts(self) -> None:
        """Backward is over."""
        self._mark("outside", None)

    def close(self) -> None:
        """Watch no more. Safe to call again."""
        if self._on:
            self._on = False
            self._layers.detach()
            self._applied.listen(None)
            self._applied.keep_by(None)

    def memory(self) -> StepMemory:
        """End the step, and return what was seen; waits for the device."""
        self._mark("outside", None)
        self.close()
        self._transfer.synchronize()
        parts = self._marks.parts()
        samples = [
            MemorySample(stamp.ms_since(self._marks.start), total, kept, swapped)
            for stamp, total, kept, swapped in self._samples
        ]
        self._samples = []
        step_ms = parts[-1].end_ms if parts else 0.0
        return StepMemory(step_ms, self._start_bytes, tuple(samples), parts)

    def _keep(self, tensor: torch.Tensor) -> Ticket:
        if self._on:
            self._follow(tensor, "kept")
        return keep(tensor)

    def _follow(self, tensor: torch.Tensor, fate: str) -> None:
        key = storage_key(tensor)
        if key is None or key in self._own:
            return
        if key not in self._alive:
            storage = tensor.untyped_storage()
            self._alive[key] = fate
            self._bytes[fate] += storage.nbytes()
            weakref.finalize(storage, self._gone, key, storage.nbytes()).atexit = False
        self._sample()

    def _gone(self, key: int, size_bytes: int) -> None:
        """It is about to be freed, which the next sample shows."""
        if self._on:
            self._sample()
        self._bytes[self._alive.pop(key)] -= size_bytes

    def _mark(self, phase: Phase, layer: int | None) -> None:
        self._marks.mark(phase, layer)
        self._sample()

    def _sample(self) -> None:
        if self._peak_bytes is not None:
            peak = self._peak_bytes()
            if self._samples:
                stamp, total, kept, swapped = self._samples[-1]
                self._samples[-1] = stamp, max(peak, total), kept, swapped  # in use between then and now
        found = self._allocated_bytes(), self._bytes["kept"], self._bytes["swapped"]
        self._samples.append((self._transfer.stamp(), *found))


def _storages_of(model: nn.Module) -> set[int]:
    """What is there in every step: weights and buffers."""
    held = [*unwrapped(model).parameters(), *unwrapped(model).buffers()]
    keys = (storage_key(part) for tensor in held for part in inner_tensors(tensor))
    return {key for key in keys if key is not None}
