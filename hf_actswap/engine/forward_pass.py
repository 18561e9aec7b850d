"""One forward of the model: which op produced each tensor, and what is done when autograd saves it.

A `ForwardPass` exists from the start of the model's forward to its end. It keeps an **owner** for each
storage that it has seen: the op that produced it, and what the plan does with it. A storage is identified by
the address of its storage object, which cannot be reused while the owner holds a `StorageWeakRef` on it; the
owners are dropped when the forward ends. After that only the tickets remain, and the `Backward` whose method
autograd calls with them: it has the order in which backward prefetches.

If no visible op produced a storage: while a function runs, the function owns it (its statistics, its own
output packed before it returns). An argument of the layer or of the model is unowned. Otherwise the
innermost module owns it (a custom ``autograd.Function``, which no function mode sees).

**Cached traces.** Following a layer's ops costs more than many a small op itself: a function mode names them,
hooks on its modules follow the path, every storage gets an owner. But a layer does the same work at every
step. So each call is recorded, one `Step` for each tensor that autograd saves: how many operators into the
call, of which dtype, and what the plan does with it. After two equal records later calls are only compared
with the record, which says what to do with each saved tensor.

A call that does not match its cached trace (other inputs took another branch) never gives wrong results,
since swapping and keeping give the same numbers. The rest of that one layer is kept or swapped by the layer's
rule. All later layers are followed again, and so is everything until two calls are equal once more. After
``MOST_MISMATCHES`` the model is taken to change at every call, and cached traces are no longer used.

Layers that swap, keep or are recomputed whole have cached traces. Recomputing ops needs the op itself, not
only its outcome; of a layer recomputed whole autograd saves its input alone. What runs between the layers
(rotary embedding, loss) is a segment of its own; if it does not match, the layers' traces are still used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..plan.actions import SCOPES, Scope, Windows
from ..plan.model_structure import OUTPUT
from ..plan.opnames import OpStack
from ..plan.record import is_cast_of_parameter, storage_key
from .autograd_state import made_by_packing_node, next_node_number
from .fates import KEEP, Action
from .frozen_weights import ticket_of_weight
from .owners import Owner, Owners, ScopeModules
from .recompute import Region
from .schedule import Backward, PrefetchOrder
from .swapped_storages import TOO_SMALL, Checkpoint, CheckpointInputs, ForwardContext, SwappedStorages
from .tickets import Place, SwapGroup, SwapTicket, Ticket, keep
from .verify import Derivations

logger = logging.getLogger(__name__)

MOST_MISMATCHES = 3
BETWEEN: Literal["between"] = "between"

Segment = Scope | Literal["between"]
"""A scope; or ``between``: everything that runs outside of all scopes, in order."""


@dataclass(frozen=True, slots=True)
class SavedStep:
    """One saved tensor that is swapped, or that is an output of the node that saves it.

    Args:
        offset_ops: operators since the segment began, or since it went on after a scope.
        windows: windows of its swap; ``None``: it is an output of its node, and is kept, detached.
        place: its place on its storage if it was swapped, else ``None``.
        asked: the plan's action for it, even if something else was done.
    """

    offset_ops: int
    dtype: torch.dtype
    windows: Windows | None
    place: Place | None
    asked: Action


@dataclass(frozen=True, slots=True)
class SmallStep:
    """One saved tensor that the plan swaps, but that was too small.

    Args:
        own_output: whether it is an output of the node that saves it, so that it must be held detached.
        otherwise: the step for a tensor of another size in its place, which may be swapped.
    """

    offset_ops: int
    size_bytes: int
    own_output: bool
    otherwise: SavedStep


Step = int | SmallStep | SavedStep
"""One saved tensor. An int, its ``offset_ops``, stands for one that is kept as it is; most are such."""

CachedTrace = Sequence[Step]


class CachedTraces:
    """The cached traces of one applied plan, and the records from which they are made.

    ``scopes`` may have one, and what runs ``between`` them.
    """

    def __init__(self, scopes: frozenset[Scope], between: bool) -> None:
        self.segments: frozenset[Segment] = scopes | {BETWEEN} if between else scopes
        self._last: dict[Segment, list[Step]] = {}
        self._known: dict[Segment, CachedTrace] = {}
        self._mismatches = self._mismatches_between = 0

    def __getitem__(self, segment: Segment) -> CachedTrace | None:
        """Return the cached trace of a segment; ``None``: its ops must be followed."""
        return self._known.get(segment)

    def knows(self, segments: frozenset[Scope]) -> bool:
        return self._known.keys() >= segments

    def watched(self, segment: Segment, steps: list[Step]) -> None:
        """Take the record of a whole call of ``segment``; if it equals the last one, it is the trace."""
        mismatches = self._mismatches_between if segment == BETWEEN else self._mismatches
        if mismatches >= MOST_MISMATCHES or segment not in self.segments:
            return
        if self._last.get(segment) == steps:
            self._known[segment] = steps
        else:
            self._last[segment] = steps

    def mismatched(self, segment: Segment) -> None:
        """Forget the trace of ``segment``, which a call did not match; for a scope, forget all traces."""
        if segment == BETWEEN:
            self._mismatches_between += 1
            self._known.pop(BETWEEN, None)
            self._last.pop(BETWEEN, None)
            return
        self._mismatches += 1
        then = "from now on each op is followed" if self._mismatches >= MOST_MISMATCHES else "learning anew"
        logger.info("%s ran other operators than before; %s", segment, then)
        self._known.clear()
        self._last.clear()


class ForwardPass:
    """Decides for each tensor that autograd saves in one forward what becomes of it, by its producer.

    Args:
        outside: modules whose parameters and buffers are never touched: those around the scopes.
        call: arguments of the model, which are unowned.
        derivations: which results of functions that run again need not be compared; ``None``: none are.
    """

    def __init__(
        self,
        context: ForwardContext,
        outside: Iterable[nn.Module],
        traces: CachedTraces,
        call: Any = (),
        derivations: Derivations | None = None,
    ) -> None:
        # 30 attributes at most: with more, Python takes a tenth longer to find any of them, in `pack` too.
        self._context, self._traces = context, traces
        self._fates = context.fates
        self._keep = context.pack_handler or keep
        self.owners = Owners(outside, call)
        self.backward = Backward()
        self._hooks: list[int] = []
        self._clock = self.backward.clock
        self._inputs = CheckpointInputs(self._clock, self._hooks)
        self._swapped = SwappedStorages(context, self._inputs)
        self._releases, self._small_bytes = self._swapped.releases, 0
        self._auto = context.auto.forward_starts(self.backward) if context.auto is not None else None
        self._settled = self._auto is None or self._auto.settled
        self._autocast = False
        self._ended = False
        self._call: tuple[ScopeModules, tuple[Any, ...], dict[str, Any]] | None = None
        trace = traces[BETWEEN] if self._settled else None
        watches = self._settled and trace is None and BETWEEN in traces.segments
        self._between = None if trace is None else iter(trace)
        self._between_watched: list[Step] | None = [] if watches else None
        self._steps: Iterator[Step] | None = self._between
        self._watched: list[Step] | None = self._between_watched
        self._first_op = self._clock.now()
        self._from_number = -1
        self.mismatched = False
        self.scope: Scope | None = None
        self.stack: OpStack | None = None
        self.running: Action | None = None
        self.region: Region | None = None
        self._derivations = derivations
        self.packing = False

    def track(self, tensor: torch.Tensor) -> int | None:
        """Make sure that the storage of ``tensor`` has an owner, and return its identity."""
        key = storage_key(tensor)
        if key is not None and self.owners.by_key(key) is None:
            cast = self._autocast and is_cast_of_parameter(tensor)
            self.owners.own(tensor, KEEP if cast else self._action_of_untracked())
        return key

    def start_scope(
        self,
        place: ScopeModules,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compiled_nodes: int | None,
        checkpoint: Checkpoint | None = None,
    ) -> bool:
        """Start a layer, or a module around the layers; return whether its ops must be followed.

        Args:
            compiled_nodes: autograd nodes of its eager call, if it is compiled (0: not known).
            checkpoint: the part of it that ``torch.utils.checkpoint`` runs again; ``None``: none.
        """
        self.scope, self._call = place.scope, (place, args, kwargs)
        if compiled_nodes is not None:
            self._clock.enter_compiled(compiled_nodes)
        self._from_number = self._clock.shift - 1
        self._inputs.start(checkpoint)
        self._first_op = self._clock.now()
        if self._settled and not self.mismatched:
            trace = self._traces[place.scope]
            if trace is not None:
                self._steps, self._watched = iter(trace), None
                return False
        self._steps = None
        self._watched = [] if self._settled and place.scope in self._traces.segments else None
        self._follow()
        return True

    def end_scope(self, output: Any) -> None:
        """End the present scope; it becomes the owner of its output (a layer, also if an op inside was)."""
        scope, self.scope = self.scope, None
        steps, watched = self._steps, self._watched
        self._call = None
        self._inputs.end(self._auto)
        self._clock.leave_compiled()
        self._from_number = self._clock.shift - 1
        if steps is None or self.owners.hold_regions:
            self.owners.enter(())
        hidden = output[0] if isinstance(output, tuple) and output else output
        if scope is not None and isinstance(hidden, torch.Tensor):
            self.owners.own_later(hidden, self._fates[scope, OUTPUT, None], scope in SCOPES)
            if steps is not None and next(steps, None) is not None:
                self._mismatch(scope)
            if watched is not None and not self.mismatched:
                self._traces.watched(scope, watched)
        self._steps, self._watched = self._between, self._between_watched
        self._first_op = self._clock.now()

    def pack(self, tensor: torch.Tensor) -> Ticket:
        """Autograd saves ``tensor``: return the ticket that it keeps instead.

        A ticket holds a tensor that its own node saves (``exp``, softmax) detached: else it would keep that
        node alive, a reference cycle that stays if backward never runs. Inputs may be held as they are,
        because autograd itself holds them so.
        """
        op = next_node_number() + self._from_number  # `OperatorClock.now`, without its calls
        self._hooks.append(op)
        if op >= self._releases.next_at:
            self._swapped.release_due(op)
        if self._steps is not None:
            step, offset_ops = next(self._steps, None), op - self._first_op
            if type(step) is int:
                if step == offset_ops:
                    return tensor, tensor._version
            elif type(step) is SmallStep and offset_ops == step.offset_ops:
                if tensor.nbytes == step.size_bytes:
                    self._small_bytes += step.size_bytes
                    if step.own_output:
                        tensor = tensor.detach()
                    return tensor, tensor._version
                step = step.otherwise
            if type(step) is SavedStep and offset_ops == step.offset_ops and tensor.dtype is step.dtype:
                tensor = tensor.detach()
                if step.windows is None:
                    return tensor, tensor._version
                swapped = self._swapped.ticket_at(tensor, step.place, step.windows, op, step.asked)
                return swapped or keep(tensor)
            self._mismatch(self.scope)
        if self._auto is not None and self._auto.observation is not None:
            self._auto.observation.in_forward(op)
        self.packing = True
        try:
            return self._ticket_of_saved(tensor, op)
        finally:
            self.packing = False

    def ticket_of_input(self, tensor: torch.Tensor) -> Ticket:
        """Make the ticket of a tensor that a region reads, by the fate of the op that produced it."""
        return self._ticket_of_input(self._clock.now(), tensor)

    def tickets_of_inputs(self) -> Callable[[torch.Tensor], Ticket]:
        """Return what makes such tickets later, as if it had been called now."""
        return partial(self._ticket_of_input, self._clock.now())

    def _ticket_of_input(self, op: int, tensor: torch.Tensor) -> Ticket:
        if (weight := ticket_of_weight(tensor)) is not None:
            return weight
        owner = self.owners.owner(tensor)
        tensor = tensor.detach()
        return self._keep(tensor) if owner is None else self._ticket(tensor, owner, op, follows=True)

    def end(self) -> None:
        """End the model's forward: release what is left, and schedule the copies back."""
        if self._between is not None and next(self._between, None) is not None:
            self._mismatch(None)
        elif self._between_watched is not None:
            self._traces.watched(BETWEEN, self._between_watched)
        self._ended, self._call, self.region, self._steps, self._watched = True, None, None, None, None
        if self._auto is not None and self._context.auto is not None:
            self._context.auto.forward_ended(self._auto)
        self._inputs.clear()
        if self._small_bytes:
            self._context.counters.rejected[TOO_SMALL] += self._small_bytes
        wants = self._swapped.end(self.backward)
        if wants:
            self.backward.schedule(PrefetchOrder(self._hooks, wants))
        self.owners.clear()

    def _follow(self) -> None:
        if self._call is None:
            return
        place, args, kwargs = self._call
        if place.scope not in SCOPES:
            hidden = args[0] if args else kwargs.get("hidden_states")
            in_decoder = isinstance(place.scope, int)
            if in_decoder and isinstance(hidden, torch.Tensor) and self.owners.owner(hidden) is None:
                self.owners.own(hidden, self._fates["embedding", OUTPUT, None])
            for leaf in tree_leaves((args, kwargs)):  # the rest comes from outside the layers
                if isinstance(leaf, torch.Tensor) and self.owners.owner(leaf) is None:
                    self.owners.own(leaf, KEEP)
        self._autocast = torch.is_autocast_enabled(self._context.device.type)  # in a pack hook it is off
        self.owners.enter(place.modules)

    def _mismatch(self, scope: Scope | None) -> None:
        """Go on after a call that differs from its segment's cached trace; ``None``: between the scopes."""
        self._steps = None
        if scope is None:
            self._between = None
            self._traces.mismatched(BETWEEN)
            return
        self.mismatched = True
        self._traces.mismatched(scope)
        self._follow()

    def _ticket_of_saved(self, tensor: torch.Tensor, op: int) -> Ticket:
        if self._ended:  # hooks that an interrupt left behind
            return keep(tensor.detach())
        region = self.region
        if region is not None:
            region.packs += 1  # also of tensors without a storage: the recomputation counts them too
            for group in region.input_groups:
                group.last_use = op
        key = self.track(tensor)
        owner = None if key is None else self.owners.by_key(key)
        saved, follows = tensor, self._derivations is not None and self._derivations.follows(tensor)
        if owner is None or not (owner.is_external and tensor.is_leaf):  # a weight may get other data (EMA)
            tensor = tensor.detach()
        inside = region is not None and owner is not None and _is_inside(owner)
        if region is not None and region.compared is not None:
            region.compared.saves(saved, region.packs - 1, inside)
        if owner is None:
            ticket: Ticket = self._keep(tensor)
        elif region is not None and inside:
            ticket = region.saved(tensor, follows)
        else:
            ticket = self._ticket(tensor, owner, op, follows)
        if self._watched is not None:
            self._watched.append(self._step_of(saved, owner, ticket, op - self._first_op))
        return ticket

    def _step_of(self, saved: torch.Tensor, owner: Owner | None, ticket: Ticket, offset_ops: int) -> Step:
        """Return the record of a saved tensor, in its pack hook."""
        asked = KEEP if owner is None else owner.action
        action = owner.chosen[0] if owner and owner.chosen else asked
        own_output = made_by_packing_node(saved)
        if action.kind != "swap":
            return SavedStep(offset_ops, saved.dtype, None, None, asked) if own_output else offset_ops
        place = Place.of(saved) if isinstance(ticket, SwapGroup | SwapTicket) else None
        step = SavedStep(offset_ops, saved.dtype, action.windows, place, asked)
        too_small = self._swapped.rejection(saved) == TOO_SMALL
        return SmallStep(offset_ops, saved.nbytes, own_output, step) if too_small else step

    def _action_of_untracked(self) -> Action:
        if self.running is not None:
            return self.running
        if self.scope is None:
            return KEEP
        if self.stack is not None:
            return self._fates[self.scope, *self.stack.unseen()]
        return self._fates[self.scope, "", None]

    def _ticket(self, tensor: torch.Tensor, owner: Owner, op: int, follows: bool) -> Ticket:
        if owner.region is not None:
            return owner.region.output(owner.position, tensor, follows) or self._keep(tensor)
        if owner.action.ticket is not None:
            return owner.action.ticket(tensor) or self._keep(tensor)
        if owner.action.kind == "swap":
            return self._swap(tensor, owner, op) or self._keep(tensor)
        return self._keep(tensor)

    def _swap(self, tensor: torch.Tensor, owner: Owner, op: int) -> Ticket | None:
        if self._swapped.rejects(tensor):
            return None
        place = Place.of(tensor)
        windows = self._chosen(place, owner, op).windows
        if windows is None:
            return None
        ticket = self._swapped.ticket(tensor, place, windows, op, owner.action)
        if ticket is not None and self.region is not None and ticket.group not in self.region.input_groups:
            self.region.input_groups.append(ticket.group)
        return ticket

    def _chosen(self, place: Place, owner: Owner, op: int) -> Action:
        """Return the action for a tensor. ``auto`` is asked once per storage, however many nodes save it."""
        if self._auto is None:
            return owner.action
        if owner.chosen is None:
            start, stop = place.range_bytes
            owner.chosen = self._auto.action(owner.action, self.scope, stop - start, op)
        else:
            self._auto.used(owner.chosen[1], op)
        if self._inputs.listening:
            self._inputs.chosen(owner.chosen[1], op)
        return owner.chosen[0]


def _is_inside(owner: Owner) -> bool:
    """Whether the running region rebuilds a tensor; also a sliced input, so that it is gathered only once."""
    return owner.action.kind in ("recompute_inside", "slice") or (
        owner.action.kind == "recompute_function" and owner.region is None
    )
