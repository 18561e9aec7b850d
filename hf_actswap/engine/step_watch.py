"""Watches a step of an applied plan: its times (`TimeWatch`), or in another step its memory (`MemoryWatch`).

These are two steps, because reading the memory in use at every saved tensor takes host time, which would show
in the times. A watch returns plain data: times in ms since the step began, in compute's own order of work;
sizes in bytes of one rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..plan.actions import Scope
from ..plan.model_structure import unwrapped
from ..plan.record import storage_key
from .autograd_state import running_node_number
from .hook_wrappers import Undo, entries, wrap_call, wrap_outermost_calls
from .install import AppliedPlan
from .owners import inner_tensors
from .stats import PendingTime
from .tickets import Ticket, keep
from .transfer import Direction, Stamp, StepLog, WatchedCopy

Phase = Literal["forward", "backward", "outside", "waiting"]


@dataclass(frozen=True, slots=True)
class ComputePart:
    """Compute in one layer, or outside the layers.

    Args:
        phase: ``outside``: the optimizer's step, and everything else between backward and forward.
            ``waiting``: a pipeline stage waits for other stages.
        layer: its index; ``None``: outside the layers.
        start_ms, end_ms: since the step began, with waits for copies.
    """

    phase: Phase
    layer: int | None
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class MeasuredCopy:
    """One copy, of a tensor that the plan's row of ``scope`` and ``op_path`` swaps.

    Args:
        asked_ms: where compute was when the copy was asked for.
        start_ms, end_ms: it starts when it has been asked for, the copy before it has ended, and (for a copy
            back) its bytes are out.
    """

    direction: Direction
    scope: Scope | None
    op_path: str
    size_bytes: int
    asked_ms: float
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait of compute for a copy."""

    direction: Direction
    scope: Scope | None
    op_path: str
    start_ms: float
    length_ms: float


@dataclass(frozen=True)
class StepTimeline:
    """When compute (without gaps), copies and waits for them (``stalls``) of one step ran, each in order.

    ``overlaps`` says whether copies run beside compute.
    """

    step_ms: float
    compute: tuple[ComputePart, ...]
    copies: tuple[MeasuredCopy, ...]
    stalls: tuple[Stall, ...]
    overlaps: bool

    @property
    def waiting_ms(self) -> float:
        """How long a pipeline stage waited for other stages."""
        return sum(part.end_ms - part.start_ms for part in self.compute if part.phase == "waiting")


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Device memory at one moment of a step.

    Args:
        kept_bytes: saved for backward, and neither swapped nor recomputed.
        swapped_bytes: swapped, and on the device at this time.
    """

    ms: float
    total_bytes: int
    kept_bytes: int
    swapped_bytes: int


@dataclass(frozen=True)
class StepMemory:
    """Device memory over one step, which takes longer than without the watch.

    Args:
        start_bytes: memory in use before the step: weights, gradients, optimizer states.
        samples: in order of time.
        parts: what compute did meanwhile.
    """

    step_ms: float
    start_bytes: int
    samples: tuple[MemorySample, ...]
    parts: tuple[ComputePart, ...]


class _StepWatch:
    """Records when compute enters and leaves each layer, from now until it is closed.

    In backward a layer begins when the gradient of its output is there: a tensor hook on the output, which is
    freed with the graph, records that. A model compiled as a whole shows no layers.

    On a pipeline stage a backward begins with the gradient of the stage's output, or of the loss, and ends
    when autograd does. Between passes the stage waits.
    """

    def __init__(self, model: nn.Module, applied: AppliedPlan) -> None:
        self._applied, self._transfer, self._on = applied, applied.transfer, True
        self._parts: StepLog[tuple[Phase, int | None]] = StepLog(self._transfer)
        self._is_stage, self._in_backward = applied.runtime.passes is not None, False
        root, structure = unwrapped(model), applied.structure
        self._undo: list[Undo] = wrap_outermost_calls(
            entries(model, structure), self._forward_starts, self._forward_ends
        )
        for index, layer in enumerate(() if structure.compiled else structure.layers):
            before, after = partial(self._enters, index), partial(self._leaves, index)
            self._undo += wrap_call(root.get_submodule(layer.module_path), before, after)
        applied.runtime.listener = self
        if self._is_stage:
            self._parts.note(("waiting", None))

    def copied(self, copy: WatchedCopy, on_device: torch.Tensor) -> None:
        """Receive a copy that is asked for; ``on_device`` is its source or its target."""

    def waited(self, copy: WatchedCopy, start: Stamp, length: PendingTime) -> None:
        """Receive a wait of compute for a copy, from ``start`` on."""

    def optimizer_starts(self) -> None:
        """Note that backward is over and the optimizer's step begins."""
        self._mark("outside", None)

    def close(self) -> None:
        """Stop watching, and remove the hooks from the model. Safe to call again."""
        if self._on:
            self._on = False
            for step in reversed(self._undo):
                step()
            self._applied.runtime.listener = None

    def _end(self) -> tuple[ComputePart, ...]:
        """End the step, wait for the device, and return what compute did."""
        self._mark("outside", None)
        self.close()
        self._transfer.synchronize()
        times: list[tuple[tuple[Phase, int | None], float]] = [(("outside", None), 0.0)]
        times += self._parts.times()
        return tuple(
            ComputePart(phase, layer, start, end)
            for ((phase, layer), start), (_, end) in pairwise(times)
            if end > start
        )

    def _mark(self, phase: Phase, layer: int | None) -> None:
        self._parts.note((phase, layer))

    def _forward_starts(self, *_: Any) -> None:
        if _in_forward():
            self._mark("forward", None)

    def _forward_ends(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if not _in_forward():
            return
        self._mark("waiting" if self._is_stage else "backward", None)
        for leaf in tree_leaves(output) if self._is_stage else ():
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._gradient_of, None))

    def _enters(self, index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _in_forward():
            return
        self._mark("forward", index)
        hidden = args[0] if args else kwargs.get("hidden_states")
        if index == 0 and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(partial(self._gradient_of, None))

    def _leaves(self, index: int, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if not _in_forward():
            return
        self._mark("forward", None)
        hidden = output[0] if isinstance(output, tuple) and output else output
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(partial(self._gradient_of, index))

    def _gradient_of(self, index: int | None, _gradient: torch.Tensor) -> None:
        if not self._on:
            return
        self._mark("backward", index)
        if self._is_stage and not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._in_backward = False
        if self._on:
            self._mark("waiting", None)


class TimeWatch(_StepWatch):
    """Records the times of layers, copies and waits in the coming step of a model under a plan."""

    def __init__(self, model: nn.Module, applied: AppliedPlan) -> None:
        self._copies: list[WatchedCopy] = []
        self._waits: list[tuple[WatchedCopy, Stamp, PendingTime]] = []
        super().__init__(model, applied)

    def copied(self, copy: WatchedCopy, on_device: torch.Tensor) -> None:
        self._copies.append(copy)

    def waited(self, copy: WatchedCopy, start: Stamp, length: PendingTime) -> None:
        self._waits.append((copy, start, length))

    def timeline(self) -> StepTimeline:
        """End the step and return its timeline; waits for the device."""
        parts = self._end()
        copies = self._measured_copies()
        stalls = [self._stall(copy, start, length) for copy, start, length in self._waits]
        self._copies, self._waits = [], []
        step_ms = parts[-1].end_ms if parts else 0.0
        waited = tuple(stall for stall in stalls if stall.length_ms > 0)
        return StepTimeline(step_ms, parts, tuple(copies), waited, self._transfer.overlaps)

    def _measured_copies(self) -> list[MeasuredCopy]:
        free_ms = {"out": 0.0, "in": 0.0}
        ended: dict[WatchedCopy, float] = {}
        found = []
        for copy in self._copies:
            asked_ms, end_ms = (self._parts.ms(stamp) for stamp in (copy.asked, copy.done))
            start_ms = asked_ms
            if self._transfer.overlaps:
                before_ms = 0.0 if copy.first is None else ended.get(copy.first, 0.0)
                start_ms = min(max(asked_ms, free_ms[copy.direction], before_ms), end_ms)
            free_ms[copy.direction] = ended[copy] = end_ms
            found.append(
                MeasuredCopy(copy.direction, *copy.name, copy.size_bytes, asked_ms, start_ms, end_ms)
            )
        return found

    def _stall(self, copy: WatchedCopy, start: Stamp, length: PendingTime) -> Stall:
        begun = start if self._transfer.overlaps else copy.asked
        return Stall(copy.direction, *copy.name, self._parts.ms(begun), length.elapsed_ms() or 0.0)


class MemoryWatch(_StepWatch):
    """Records device memory in the coming step, and follows each saved storage until it is freed.

    Args:
        model: the model that the plan is on.
        applied: the plan, without a pack handler, because this object installs its own.
        allocated_bytes: returns the device memory in use.
        peak_bytes: returns the most memory in use since its last call; ``None``: memory that is in use only
            between two saved tensors is not seen.
    """

    def __init__(
        self,
        model: nn.Module,
        applied: AppliedPlan,
        allocated_bytes: Callable[[], int],
        peak_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._allocated_bytes, self._peak_bytes = allocated_bytes, peak_bytes
        self._bytes = {"kept": 0, "swapped": 0}
        self._alive: dict[int, str] = {}
        held = [*unwrapped(model).parameters(), *unwrapped(model).buffers()]
        self._own = {storage_key(part) for tensor in held for part in inner_tensors(tensor)}
        self._samples: list[tuple[Stamp, int, int, int]] = []
        self._start_bytes = allocated_bytes()
        super().__init__(model, applied)
        applied.set_pack_handler(self._keep)
        self._sample()

    def copied(self, copy: WatchedCopy, on_device: torch.Tensor) -> None:
        self._follow(on_device, "swapped")

    def close(self) -> None:
        """Stop watching, and remove the hooks from the model. Safe to call again."""
        if self._on:
            self._applied.set_pack_handler(None)
        super().close()

    def memory(self) -> StepMemory:
        """End the step and return its use of memory; waits for the device."""
        parts = self._end()
        samples = [
            MemorySample(self._parts.ms(stamp), total, kept, swapped)
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
        """Stop counting a storage that is about to be freed, from the next sample on."""
        if self._on:
            self._sample()
        self._bytes[self._alive.pop(key)] -= size_bytes

    def _mark(self, phase: Phase, layer: int | None) -> None:
        super()._mark(phase, layer)
        self._sample()

    def _sample(self) -> None:
        if self._peak_bytes is not None:
            peak = self._peak_bytes()
            if self._samples:
                stamp, total, kept, swapped = self._samples[-1]
                self._samples[-1] = stamp, max(peak, total), kept, swapped  # in use between then and now
        found = self._allocated_bytes(), self._bytes["kept"], self._bytes["swapped"]
        self._samples.append((self._transfer.stamp(), *found))


def _in_forward() -> bool:
    # Recomputations run inside a backward.
    return torch.is_grad_enabled() and running_node_number() is None
