"""Predicts the tickets that the engine makes for each storage under a plan, for nodes and for regions.

Which tensors get a ticket, and with which fate, follows the engine (`engine/forward_pass.py`,
`engine/hooks.py`, `engine/naming_mode.py`), as `plan.saved_bytes` states it. Added here is *who reads a
ticket*: the node that saved the tensor, or a region that needs it in order to run again; and *who rebuilds*
what was dropped.

A **region** is a call that runs again. Its key is (layer, module path) for a recomputed module or a layer
recomputed whole, and the number of the op event for a recomputed function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...plan.actions import MemoryPlan, Scope, Windows
from ...plan.model_structure import is_below
from ...plan.op_facts import is_repeatable
from ...plan.recomputed_modules import RUN_AGAIN, RecomputedModules
from ...plan.saved_bytes import HostTicketUse, OpCall, Use, swap_tickets
from .step_order import StepOrder

RegionKey = tuple[Scope, str] | int


class HeldTicket(NamedTuple):
    """One ticket of a storage.

    Args:
        kind: whether the tensor stays, is on the host, or is built again.
        order: order of the use at which the ticket was made.
        op_event: number of the op event of that use.
        holder: key of the region that has it as an input; ``None``: the nodes of ``op_event`` read it.
        source: key of the region that builds the tensor again.
        copy: number of the host copy among those of the storage; -1: none.
    """

    kind: Literal["keep", "swap", "built"]
    order: int
    op_event: int
    holder: RegionKey | None = None
    source: RegionKey | None = None
    copy: int = -1


@dataclass(frozen=True, slots=True)
class CopyOut:
    """One copy of (a part of) a storage to the host.

    Args:
        number: its number among the copies of the storage.
        call: the call that produced the storage.
        size_bytes: bytes that are copied.
        order, op_event, op: order, op event and operator of the use at which it starts.
        at_end: whether the op event has run by then.
        windows: release and prefetch; ``None``: to be chosen by measurement.
    """

    number: int
    call: OpCall
    size_bytes: int
    order: int
    op_event: int
    op: int
    at_end: bool
    windows: Windows | None


class TicketRules:
    """Says which tickets and copies one plan gives the storages of one profile.

    Args:
        order: the profile in the order of its step.
        plan: the plan.
        held: number of a storage -> the use at which a recomputed module holds it (`held_results`).
    """

    def __init__(self, order: StepOrder, plan: MemoryPlan, held: Mapping[int, Use]) -> None:
        self._order, self._held = order, held
        self.recomputed = RecomputedModules(plan, order.profile.saved.modules)
        self._functions: dict[int, bool] = {}
        fates = {row.fate for row in plan.rows}
        self._swaps, self._recomputes = "swap" in fates, not fates.isdisjoint(RUN_AGAIN)

    def of_storage(self, number: int) -> tuple[list[HeldTicket], list[CopyOut]]:
        """Return the tickets of a storage, and its copies out, in order."""
        storage, lifetime = self._order.profile.saved.storages[number], self._order.lifetimes[number]
        held = self._held.get(number)
        asked = swap_tickets(storage, self.recomputed, held) if self._swaps else ()
        swaps = {item.use.order: item for item in asked}
        tickets: list[HeldTicket] = []
        copies: list[CopyOut] = []
        kept: OpCall | None = None
        made: tuple[OpCall, int] | None = None
        for use, op_event in zip(storage.uses, lifetime.op_events, strict=True):
            swap = swaps.get(use.order)
            if swap is not None and swap.is_new:
                copies.append(self._copy_out(swap, op_event, lifetime.made_in))
            if use.kind == "returned":
                kept = use.producer if self.recomputed.is_root(*use.at[:2]) else kept
                if use.at[2] is not None and use.at == use.producer:
                    made = (use.producer, op_event) if self.is_function_region(op_event) else None
            if use.kind == "saved" and use.at[0] in self.recomputed.whole_layers:
                tickets.append(self._in_checkpoint(use, op_event, lifetime.made_in, copies))
                continue
            holder = self._holder(use, op_event, held) if self._recomputes and use.kind != "saved" else None
            if holder is None and use.kind != "saved":
                continue
            if swap is not None:
                tickets.append(HeldTicket("swap", use.order, op_event, holder, copy=swap.copy))
                continue
            source = None
            if self._recomputes and use.producer != kept:
                source = self._source(use, op_event, lifetime.made_in, made)
            kind: Literal["keep", "built"] = "keep" if source is None else "built"
            tickets.append(HeldTicket(kind, use.order, op_event, holder, source))
        return tickets, copies

    def is_function_region(self, op_event: int) -> bool:
        """Return whether an op event is the call of a function that runs again on its own."""
        known = self._functions.get(op_event)
        if known is None:
            known = self._functions[op_event] = self._is_function_region(op_event)
        return known

    def scope_of(self, region: RegionKey) -> Scope | None:
        """Return the scope in which a region lies."""
        return self._order.op_events[region].call[0] if isinstance(region, int) else region[0]

    def runs_again(self, scope: Scope, root: str, op_event: int) -> bool:
        """Return whether an op event runs again with its recomputed module; kept ops inside do not."""
        path, ordinal = self._order.op_events[op_event].call[1:]
        recomputed = self.recomputed
        if not recomputed.keeps_inside(scope, root):
            return True
        while path and path != root:
            if recomputed.is_held((scope, path, ordinal)) or recomputed.is_kept_module(scope, path):
                return False
            path, ordinal = path.rpartition(".")[0], None
        return True

    def _is_function_region(self, op_event: int) -> bool:
        call = self._order.op_events[op_event].call
        if op_event not in self._order.functions or not isinstance(call[0], int):
            return False
        return is_repeatable(call[1]) and self.recomputed.rebuilt_by(call) == call

    def _copy_out(self, swap: HostTicketUse, op_event: int, made_in: int) -> CopyOut:
        use = swap.use
        return CopyOut(
            number=swap.copy,
            call=use.producer,
            size_bytes=swap.size_bytes,
            order=use.order,
            op_event=op_event,
            op=self._order.use_op(use, op_event),
            at_end=use.kind == "returned" or (use.kind == "saved" and made_in == op_event),
            windows=swap.row.windows,
        )

    def _in_checkpoint(self, use: Use, op_event: int, made_in: int, copies: list[CopyOut]) -> HeldTicket:
        """Return the ticket of a tensor saved in a layer that runs again whole: built, except its inputs."""
        scope = use.at[0]
        if scope is None or (made_in >= 0 and self._order.op_events[made_in].call[0] == scope):
            return HeldTicket("built", use.order, op_event, source=(scope if scope is not None else 0, ""))
        if copies:
            return HeldTicket("swap", use.order, op_event, copy=copies[-1].number)
        return HeldTicket("keep", use.order, op_event)

    def _holder(self, use: Use, op_event: int, held: Use | None) -> RegionKey | None:
        scope, path, _ = use.at
        if use is held and scope is not None:
            root = self.recomputed.root(scope, path)
            return None if root is None else (scope, root)
        if not isinstance(scope, int):
            return None
        if use.kind == "module":
            return (scope, path) if self.recomputed.rebuilt_by(use.at) == use.at else None
        own_call = use.kind == "function" and use.at == self._order.op_events[op_event].call
        return op_event if own_call and self.is_function_region(op_event) else None

    def _source(
        self, use: Use, op_event: int, made_in: int, made: tuple[OpCall, int] | None
    ) -> RegionKey | None:
        """Return the key of the region that builds the tensor of this use again; ``None``: there is none."""
        scope, path, _ = use.producer
        row = self.recomputed.row(use.producer)
        if row is None or scope is None or row.fate not in RUN_AGAIN:
            return None
        if made is not None and made[0] == use.producer:
            return made[1]
        if use.kind != "saved":
            return None
        at = self._order.op_events[op_event].call
        root = self.recomputed.root(scope, path)
        if root is not None:
            return (scope, root) if at[0] == scope and is_below(at[1], root) else None
        return op_event if made_in == op_event and self.is_function_region(op_event) else None
