"""Records a training step: what it saves, how long its ops take, how much memory they need.

The model trains as without this: the same numbers, the same random numbers. While the step runs there are
hooks on modules, saved-tensor hooks and a function mode in the model's forward, and a dispatch mode around
the step; after it all are gone. One forward is recorded, and the backward through it; if a stage of a
pipeline has several chunks, one forward of each. Compute time is measured by the device's events, or is a sum
over ops on fake tensors.

Op events are recorded row by row. A row ends when execution gets to another call *and* something has run
since the row began. Ops that compute nothing (views, casts to the type that a tensor has) make no row of
their own: their nodes and uses belong to the row after them. So rows follow each other without gaps in time,
in nodes and in uses. At the end of each row there is one time stamp and one query of the meter, and none per
aten op.

Autograd runs the nodes of a graph in descending order of their numbers, so backward visits each row once, in
reverse. Nodes that no row made belong to the row in which backward is: gradients that accumulate, layers that
run again, a later forward, and a backward that a node runs inside, as tiles do (`engine.tiled_calls`). A
backward that runs inside the forward belongs to the forward (`engine.tiled_logits`).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, Self

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from ...engine.autograd_state import (
    function_mode_is_innermost,
    next_node_number,
    packing_node_number,
    pop_leaked_hooks,
    running_backward,
    running_node_number,
)
from ...engine.frozen_weights import FrozenWeights, weights_of
from ...engine.hook_wrappers import entries, wrap_call, wrap_outermost_calls
from ...engine.link import Link
from ...engine.owners import inner_tensors
from ...engine.tickets import Ticket, keep, restore
from ...engine.tiled_calls import is_tiled
from ...engine.transfer import Stamp, Transfer
from ...interrupts import uninterrupted
from ...plan.forward_recorder import ForwardRecorder
from ...plan.model_structure import ModelStructure, unwrapped
from ...plan.op_facts import (
    READS_DEVICE,
    computes,
    is_collective,
    is_communication,
    reads_values,
)
from ...plan.saved_bytes import OpCall, SavedBytes
from ...plan.wrappers import is_compiled
from ..meter import Meter, StartedMode, runs_its_own_dispatch
from ..profile import OpEvent, Places, Profile, lifetimes, saved_on_device

logger = logging.getLogger(__name__)


class Clock(Protocol):
    """Makes time stamps in compute's order of work; their times are read when the step is over."""

    def stamp(self) -> Stamp:
        """Return a stamp of the present place in compute's order of work."""

    def ran(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note that an aten op ran; a clock that computes times adds the op's."""

    def synchronize(self) -> None:
        """Wait until compute has passed all stamps."""


class DeviceClock:
    """A clock that reads the device's own time, by stamps of ``transfer``, less that of its pauses."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._pauses: list[tuple[Stamp, Stamp]] = []
        self._paused = False

    def stamp(self) -> Stamp:
        return _WorkStamp(self._transfer.stamp(), self._pauses, len(self._pauses))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the time of what runs meanwhile; a pause within a pause changes nothing."""
        if self._paused:
            yield
            return
        self._paused, start = True, self._transfer.stamp()
        try:
            yield
        finally:
            self._pauses.append((start, self._transfer.stamp()))
            self._paused = False

    def ran(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Do nothing: the device measures the op's time itself."""

    def synchronize(self) -> None:
        self._transfer.synchronize()


@dataclass(frozen=True, slots=True)
class _WorkStamp:
    """A stamp of a `DeviceClock`; ``passed`` of the ``pauses`` have ended before it."""

    stamp: Stamp
    pauses: Sequence[tuple[Stamp, Stamp]]
    passed: int

    def ms_since(self, earlier: _WorkStamp) -> float:
        between = self.pauses[earlier.passed : self.passed]
        paused_ms = sum(end.ms_since(start) for start, end in between)
        return self.stamp.ms_since(earlier.stamp) - paused_ms


@dataclass(slots=True)
class _Visit:
    """A visit of backward to a row; ``peak_bytes`` ``None``: nothing ran in it."""

    place: int
    start: Stamp
    end: Stamp
    peak_bytes: int | None
    gradient_bytes: int


@dataclass(slots=True)
class _Row:
    call: OpCall
    first_order: int
    last_order: int
    first_node: int
    first_op: int
    num_ops: int
    start: Stamp
    end: Stamp
    peak_bytes: int
    communicates: bool
    reads_values: bool
    visits: list[_Visit] = field(default_factory=list)
    backward_place: int = -1


class OpEventLog:
    """Writes the rows of one forward and its backward.

    Args:
        meter: measures device memory; ``None``: it is not measured.
        order: returns the order of the use that was recorded last.
        sees_ops: whether `ran` is called for every op. If not, a row ends wherever nodes were made.
        nodes: number of operators that a call counts as, however many nodes it makes: compiled layers.
        away_bytes: returns the bytes that are on the host for lack of room; they count as on the device.
        gradient_bytes: returns the bytes of weights' gradients that are complete by now.
        chunks: number of forwards that are recorded as one; their backwards come in reverse order.
    """

    def __init__(
        self,
        meter: Meter | None,
        clock: Clock,
        order: Callable[[], int],
        sees_ops: bool,
        nodes: Mapping[OpCall, int],
        away_bytes: Callable[[], int] = lambda: 0,
        gradient_bytes: Callable[[], int] = lambda: 0,
        chunks: int = 1,
    ) -> None:
        self._away_bytes, self._gradient_bytes = away_bytes, gradient_bytes
        self._meter, self._clock, self._order, self._sees_ops = meter, clock, order, sees_ops
        self._nodes, self._backwards_left = nodes, chunks
        self._rows: list[_Row] = []
        self._first_nodes: list[int] = []
        self._packs: list[tuple[int, int]] = []
        self._call: OpCall = (None, "", None)
        self._busy = self._communicates = self._reads = self._ended = False
        self._first_node = self._first_op = self._visits = self._gradients_before = 0
        self._earlier_nodes = 0
        self._since: Stamp | None = None
        self._visited: _Row | None = None
        self._backward: int | None = -1
        self.in_forward = False
        """Whether the model's own forward runs."""
        self.turned = False
        """Whether backward has begun."""
        self.peak_bytes = 0
        """The most device memory in use, in forward and backward."""
        self.outside_ms_of: tuple[Stamp, Stamp] | None = None
        self.outside_peak_bytes = 0
        self.gradients_below: tuple[int, ...] = ()
        """`Profile.gradient_bytes`, once `op_events` has been called."""

    def start(self) -> None:
        """Begin to record a forward, or that of the next chunk."""
        self._first_node, self.in_forward = next_node_number(), True
        self._busy = self._communicates = self._reads = False
        self._look()
        self._since = self._clock.stamp()

    def other_forward_ends(self) -> None:
        """Note that a forward has ended that is not recorded.

        If it ran ahead of the recorded one, the same backward may run through both.
        """
        if self._since is None:
            self._earlier_nodes = next_node_number()

    def pause(self) -> None:
        """End a chunk's forward; what runs until the next chunk's `start` is not recorded."""
        self._finish_forward(next_node_number())

    def enters(self, call: OpCall) -> None:
        """Note that execution has got to another call: a new row begins if anything has run."""
        if self._since is None or self.turned:
            return
        if self._busy if self._sees_ops else next_node_number() != self._first_node:
            self._close(next_node_number())
        self._call = call

    def ran(self, communicates: bool = False, reads_values: bool = False) -> None:
        """Note that an op has run that computes, and what else it does, as in `OpEvent`."""
        self._busy = True
        row = self._visited
        if row is None:
            self._communicates |= communicates
            self._reads |= reads_values
        else:
            row.communicates |= communicates

    def packs(self) -> None:
        """Note that autograd saves a tensor."""
        if self._since is not None and not self.turned:
            self._packs.append((self._order(), packing_node_number()))

    def reached(self, node: int) -> None:
        """Note that backward runs the node of this number."""
        if self._since is None or self._ended or self.in_forward:
            return
        if not self.turned:
            self._backward_begins(node)
        elif self._backward is None:
            self._backward = running_backward()
            self._look()
            self._since = self._clock.stamp()
            self._end_with_backward()
        if running_backward() != self._backward:
            return
        if node < self._earlier_nodes:
            self._leave_row()
            self._visited = None
            return
        at = bisect_right(self._first_nodes, node) - 1
        if at >= 0 and node < self._first_node and self._rows[at] is not self._visited:
            self._leave_row()
            self._visit(self._rows[at])

    def end_backward(self) -> None:
        """Note that a backward has ended: that of the forward, or of one chunk."""
        if self.turned and not self._ended and self._backward is not None:
            if self._visited is None:  # the end of a backward that is not recorded
                self._look()
                self._since = self._clock.stamp()
            self._leave_row()
            self._visited, self._busy = None, False
            self._backwards_left -= 1
            if self._backwards_left:
                self._backward = None
            self._ended = not self._backwards_left

    def end(self) -> None:
        """End recording with the step, whether backward has run or not."""
        if self._since is None:
            return
        if not self.turned and not self._ended:
            self._ended = True
            self._finish_forward(next_node_number())
        self._backwards_left = 1
        self.end_backward()
        since, self._since = self._since, self._clock.stamp()
        self.outside_ms_of = since, self._since
        self.outside_peak_bytes = self._look()
        self._since = None

    def op_events(self, saved: SavedBytes) -> tuple[OpEvent, ...]:
        """Return the rows as op events. Compute must have passed all stamps (`Clock.synchronize`)."""
        start_op = self._rows[0].first_op if self._rows else 0
        op_events = [
            OpEvent(
                call=row.call,
                first_order=row.first_order,
                last_order=row.last_order,
                first_op=row.first_op - start_op,
                num_ops=row.num_ops,
                forward_ms=max(0.0, row.end.ms_since(row.start)),
                backward_ms=sum(max(0.0, visit.end.ms_since(visit.start)) for visit in row.visits),
                forward_base_bytes=row.peak_bytes,
                backward_base_bytes=0,
                backward_place=row.backward_place,
                communicates=row.communicates,
                reads_values=row.reads_values,
            )
            for row in self._rows
        ]
        places = Places(op_events)
        forward, backward = saved_on_device(lifetimes(saved, op_events, places), places)
        below: dict[int, tuple[int, int]] = {}  # a visit in which nothing ran has the one before's
        visits = [(visit, number) for number, row in enumerate(self._rows) for visit in row.visits]
        base_bytes = 0
        for visit, number in sorted(visits, key=lambda item: item[0].place):
            if visit.peak_bytes is not None:
                base_bytes = max(0, visit.peak_bytes - backward[number])
            below[number] = max(below.get(number, (0, 0)), (base_bytes, visit.gradient_bytes))
        bases = [below.get(number, (0, 0)) for number in range(len(op_events))]
        self.gradients_below = (*(gradient_bytes for _, gradient_bytes in bases), self._gradient_bytes())
        return tuple(
            replace(
                op_event,
                forward_base_bytes=max(0, op_event.forward_base_bytes - saved_bytes),
                backward_base_bytes=backward_base_bytes,
            )
            for op_event, saved_bytes, (backward_base_bytes, _) in zip(op_events, forward, bases, strict=True)
        )

    def hooks(self) -> tuple[tuple[int, int], ...]:
        """Return `Profile.hooks`. Tensors that a compiled layer saves belong to its last operator."""
        found = []
        for order, node in self._packs:
            row = self._rows[max(bisect_right(self._first_nodes, node) - 1, 0)]
            last = max(row.num_ops - 1, 0)
            behind = last if self._nodes.get(row.call) else min(max(node - row.first_node, 0), last)
            found.append((order, row.first_op + behind - self._rows[0].first_op))
        return tuple(dict.fromkeys(found))

    def _look(self) -> int:
        """Return the most device memory in use since the last call."""
        if self._meter is None:
            return 0
        peak_bytes = self._meter.peak_bytes() + self._away_bytes()
        self._meter.reset_peak()
        return peak_bytes

    def _close(self, end_node: int) -> None:
        """End the current row and record it; the next one starts here."""
        assert self._since is not None
        now, made = self._clock.stamp(), end_node - self._first_node
        num_ops = (self._nodes.get(self._call) or made) if made else 0
        row = _Row(
            call=self._call,
            first_order=self._rows[-1].last_order + 1 if self._rows else 1,
            last_order=self._order(),
            first_node=self._first_node,
            first_op=self._first_op,
            num_ops=num_ops,
            start=self._since,
            end=now,
            peak_bytes=self._look(),
            communicates=self._communicates or is_communication(self._call[1]),
            reads_values=self._reads,
        )
        self._rows.append(row)
        self._first_nodes.append(self._first_node)
        self.peak_bytes = max(self.peak_bytes, row.peak_bytes)
        self._first_node, self._first_op, self._since = end_node, self._first_op + num_ops, now
        self._busy = self._communicates = self._reads = False

    def _finish_forward(self, end_node: int) -> None:
        """Record forward's last row; if nothing ran in it, add its nodes and uses to the one before."""
        end_node = max(end_node, self._first_node)
        if not self._rows or self._busy or (not self._sees_ops and end_node > self._first_node):
            self._close(end_node)
            return
        last = self._rows[-1]
        last.num_ops += end_node - self._first_node
        last.last_order = self._order()
        self._first_node = end_node
        self._since = self._clock.stamp()

    def _backward_begins(self, node: int) -> None:
        """End forward at ``node``, built last and run first: backward's thread has its own node counter."""
        self.turned, self._backward = True, running_backward()
        self._finish_forward(node + 1)
        self._end_with_backward()
        self._visit(self._rows[-1])

    def _end_with_backward(self) -> None:
        # Only while a node runs; what comes after backward (clipping, the optimizer) is not charged to it.
        torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def _visit(self, row: _Row) -> None:
        if row.backward_place < 0:
            row.backward_place = self._visits
        self._visited, self._busy = row, False
        self._gradients_before = self._gradient_bytes()
        self._visits += 1

    def _leave_row(self) -> None:
        row, since = self._visited, self._since
        if row is None or since is None:
            return
        now, peak_bytes = since, None
        if self._busy or not self._sees_ops:
            now, peak_bytes = self._clock.stamp(), self._look()
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
        row.visits.append(_Visit(self._visits - 1, since, now, peak_bytes, self._gradients_before))
        self._since = now


class StepRecorder:
    """Records one forward and backward of a model without a plan.

    A compiled layer is one op event. If there are any, aten ops are not watched, because a dispatch mode
    would keep layers from being compiled.

    Args:
        model: the model as it trains, wrapped or not.
        structure: structure of the model. Only the decoder's layers are distinguished.
        meter: measures device memory, and has been started. ``None``: memory is not measured.
        hold: makes the ticket that takes a saved tensor's place, in forwards that are not recorded too;
            `engine.tickets.restore` gets it back.
        compiles: whether compiled modules run compiled (on fake tensors they do not).
        device: the device on which the model computes; ``None``: that of its first parameter.
        forwards_before: number of forwards with gradients (micro-batches) before the one that is recorded.
        away_bytes: returns the bytes that ``hold`` has moved to the host for lack of room.
        gradient_bytes: returns the bytes of complete gradients of weights; ``None``: they are not counted.
        reads_groups: as of `reads_values`; ``None``: as the device does.
        chunks: number of forwards that are recorded as one, on a pipeline's stage with several chunks.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: ModelStructure,
        meter: Meter | None,
        clock: Clock,
        hold: Callable[[torch.Tensor], Ticket] = keep,
        compiles: bool = True,
        device: torch.device | None = None,
        forwards_before: int = 0,
        away_bytes: Callable[[], int] = lambda: 0,
        gradient_bytes: Callable[[], int] | None = None,
        chunks: int = 1,
        reads_groups: bool | None = None,
    ) -> None:
        self._root, self._structure = unwrapped(model), structure
        self._meter, self._clock = meter, clock
        self._hold, self._compiles, self._forwards_before = hold, compiles, forwards_before
        self._whole = compiles and structure.compiled
        self._entries = entries(model, structure) if compiles else [self._root]
        opaque = compiles and any(is_compiled(module) for module in model.modules())
        if device is None:
            device = next((item.device for item in self._root.parameters()), torch.device("cpu"))
        self._log = OpEventLog(
            meter,
            clock,
            lambda: self._uses.order,
            not opaque,
            self._compiled_nodes(),
            away_bytes,
            gradient_bytes or (lambda: 0),
            chunks,
        )
        scopes, attention = self._structure.scopes, self._structure.attention
        self._uses = ForwardRecorder(
            scopes, attention, device, self._log.enters, compiles, inner_tensors, is_tiled
        )
        self._counts_gradients = gradient_bytes is not None
        reads = _reads_groups(device) if reads_groups is None else reads_groups
        self._watch = None if opaque else OpWatch(self._log, clock, reads, weights_of(self._root))
        self._undo: list[Callable[[], None]] = []
        self._inside: ExitStack | None = None
        self._saving: Any = None
        self._started, self._chunks_left = False, chunks
        self._batch_shape: tuple[int, ...] = ()
        self._saved: SavedBytes | None = None
        self._reserved_bytes = 0

    @property
    def compiled_layers(self) -> frozenset[int]:
        """The layers that run compiled, as one op each."""
        if not self._compiles:
            return frozenset()
        layers = enumerate(self._structure.layers)
        return frozenset(index for index, layer in layers if layer.compiled or self._whole)

    @property
    def complete(self) -> bool:
        """Whether a forward has been recorded, and a backward through it has begun."""
        return not self._chunks_left and self._log.turned

    def start(self) -> None:
        """Watch the next forward."""
        if self._started:
            return
        self._started = True
        self._undo = wrap_outermost_calls(self._entries, self._forward_starts, self._leave_forward)
        if self._watch is not None:
            self._watch.__enter__()

    def stop(self) -> None:
        """Remove all hooks and modes, also in mid-step after an exception. Safe to call again."""
        if not self._started:
            return
        self._started = False
        self._leave_forward()
        for step in reversed(self._undo):
            step()
        self._undo = []
        if self._watch is not None:
            if _get_current_dispatch_mode_stack()[-1:] == [self._watch]:
                self._watch.__exit__(None, None, None)
            else:
                logger.warning("A dispatch mode that was entered in the recorded step has not been left.")
        self._log.end()
        if self._meter is not None:
            self._reserved_bytes = max(0, self._meter.reserved_peak_bytes() - self._log.peak_bytes)
        self._saved = SavedBytes(self._uses.used(), self._structure.modules)
        self._uses.forget()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def profile(
        self,
        *,
        device: str,
        device_bytes: int | None = None,
        link: Link | None = None,
        optimizer_state_bytes: int = 0,
        outside_ms: float | None = None,
        weight_bytes: int = 0,
        source: Literal["measured", "shapes"] = "measured",
    ) -> Profile:
        """Return what was recorded, as a profile. Waits for the device.

        Args:
            device_bytes: memory that a process can use on it; ``None``: what the meter reports.
            link: measured rates of the link; ``None``: copies do not overlap compute.
            optimizer_state_bytes: bytes of this rank's optimizer states on the device.
            outside_ms: time outside forward and backward; ``None``: from the end of backward to `stop`.
            weight_bytes: bytes of this rank's weights on the device; 0: not known.

        Raises:
            RuntimeError: `stop` has not been called, or there was no forward with gradients.
        """
        if self._started or self._saved is None or self._chunks_left:
            raise RuntimeError("no step was recorded: call start, run forward and backward, call stop")
        self._clock.synchronize()
        if outside_ms is None:
            between = self._log.outside_ms_of
            outside_ms = max(0.0, between[1].ms_since(between[0])) if between is not None else 0.0
        if device_bytes is None:
            device_bytes = self._meter.limit_bytes() if self._meter is not None else 0
        op_events = self._log.op_events(self._saved)
        return Profile(
            saved=self._saved,
            op_events=op_events,
            weight_bytes=weight_bytes,
            gradient_bytes=self._log.gradients_below if self._counts_gradients else (),
            hooks=self._log.hooks(),
            num_layers=len(self._structure.layers),
            family=self._structure.family,
            compiled_layers=self.compiled_layers,
            link=link,
            device=device,
            device_bytes=device_bytes,
            outside_ms=outside_ms,
            outside_base_bytes=self._log.outside_peak_bytes,
            optimizer_state_bytes=optimizer_state_bytes,
            reserved_bytes=self._reserved_bytes,
            batch_shape=self._batch_shape,
            source=source,
        )

    def _compiled_nodes(self) -> dict[OpCall, int]:
        if self._whole:
            return {(0, "", None): sum(layer.nodes for layer in self._structure.layers)}
        layers = [layer for layer in self._structure.layers if layer.compiled and self._compiles]
        return {(layer.index, "", None): layer.nodes for layer in layers}

    @uninterrupted()
    def _forward_starts(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if not self._chunks_left or self._forwards_before > 0:
            self._forwards_before = max(self._forwards_before - 1, 0)
            self._saving = torch.autograd.graph.saved_tensors_hooks(self._held, restore)
            self._saving.__enter__()
            return
        self._chunks_left -= 1
        self._batch_shape = batch_shape(args, kwargs)
        self._uses.own_weights(self._root.modules())
        self._uses.own(tree_leaves((args, kwargs)), None)
        self._inside = ExitStack()
        self._log.start()
        if self._whole:
            self._inside.enter_context(self._uses.compiled_whole((args, kwargs)))
        else:
            self._inside.enter_context(self._uses.installed(self._root, wrap_call))
        self._saving = self._uses.saving(self._pack, self._unpack)
        self._saving.__enter__()
        if not self._whole:
            self._uses.__enter__()

    @uninterrupted()
    def _leave_forward(self, *_: Any) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            self._log.in_forward = False
            if function_mode_is_innermost(self._uses):
                self._uses.__exit__(None, None, None)
        saving, self._saving = self._saving, None
        if saving is not None:
            pop_leaked_hooks(saving.pack_hook)
        if inside is None:
            if saving is not None:
                self._log.other_forward_ends()
            return
        inside.close()
        if self._chunks_left:
            self._log.pause()

    def _pack(self, tensor: torch.Tensor) -> Ticket:
        self._log.packs()
        return self._held(tensor)

    def _held(self, tensor: torch.Tensor) -> Ticket:
        """Return the ticket of the detached tensor: else an output keeps its node alive, a view its base."""
        return self._hold(tensor.detach())

    def _unpack(self, ticket: Ticket) -> torch.Tensor:
        node = running_node_number()
        if node is not None and self._started:
            self._log.reached(node)
        return restore(ticket)


def batch_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return (batch, sequence) of a call: of its ids, else of the first tensor with at least two dims."""
    for leaf in tree_leaves((kwargs.get("input_ids"), args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2:
            return tuple(leaf.shape[:2])
    return ()


_WITH_KERNEL_OF_GROUPS = (9, 10)
"""Major compute capabilities for which PyTorch has a kernel of ``grouped_mm`` (``GroupedBlas.cpp``)."""


def _reads_groups(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    major, _ = torch.cuda.get_device_capability(device)
    return major not in _WITH_KERNEL_OF_GROUPS


class OpWatch(StartedMode):
    """A dispatch mode that reports each aten op that computes, in forward and in backward.

    The log is told of the node that runs it too. Copies of the model's frozen weights are no ops of the step.
    """

    def __init__(
        self, log: OpEventLog, clock: Clock, reads_groups: bool, weights: FrozenWeights | None = None
    ) -> None:
        super().__init__()
        self._log, self._clock, self._weights = log, clock, weights
        self._reads_groups = reads_groups

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if runs_its_own_dispatch(types):
            return NotImplemented  # the ops into which the subclass turns it are seen instead
        if func is READS_DEVICE:
            return args[0].device  # the modes below would be asked in turn
        if not computes(func) or (self._weights is not None and self._weights.moving):
            return func(*args, **kwargs)
        node = running_node_number()
        if node is not None:
            self._log.reached(node)
        result = func(*args, **kwargs)
        if any(leaf.device.type == "meta" for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            return result  # it only computed shapes (`engine.tiled_logits`)
        reads = reads_values(func, self._reads_groups)
        self._log.ran(is_collective(func), reads)
        self._clock.ran(func, args, kwargs, result)
        return result
