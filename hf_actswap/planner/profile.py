"""What the planner knows of one training step: plain data, times in ms, sizes in bytes of one rank.

A profile is recorded in warm-up, or computed from shapes. It describes the step *without a policy*:
everything is kept. Time and memory under a policy (a plan) are predicted from it (`cost.simulate`).

Three numberings meet here:

* **order**: `Use.order` of `plan.saved_bytes`, rising through the forward. An op event covers the orders from
  ``first_order`` to ``last_order``, so that every use belongs to one op event.
* **operators**: autograd nodes in order of creation, from 0 at the start of the forward; the unit of windows.
* **backward place**: number of the op event in the order in which backward reaches them, from 0.

A storage is made in the op event of its first use. Forward needs it until the op event of its last use; an
argument of a module until the module's end, because its caller holds it. Backward frees it after the last
place that reads it, or at the end of backward if that never visits the op event that saved it. What is not
saved (a result that only the next op reads) is part of an op event's base bytes: the recorder subtracts the
bytes on the device by this rule from the measured peaks, and the simulator adds them again.

As JSON, so that a plan can be made on another machine, a profile is compact: calls of ops are in one table
and named by number, and uses and op events are rows of values in a fixed order.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge
from pydantic import AfterValidator, GetCoreSchemaHandler, GetPydanticSchema, PlainValidator
from pydantic_core import CoreSchema, core_schema

from ..config.documents import Bytes, Count, JsonDocument, Ms, Share, form_of
from ..config.validation import Expected, rejected, show
from ..engine.link import Link
from ..errors import PlanError
from ..plan.actions import LayerCount, Scope, scope_type
from ..plan.saved_bytes import OpCall, SavedBytes, SavedStorage, Use, UseKind


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One call of an op in forward, with its nodes' part of backward. There are no gaps between op events.

    Args:
        call: (scope, op path, ordinal) as plan rows name them; scope ``None``: outside all scopes. What runs
            between functions (custom autograd functions, indexing) is an op event of its module.
        first_order, last_order: orders of its first and last use; ``last_order < first_order``: it has none.
        first_op: operator number of the first autograd node that it creates, or would create.
        num_ops: how many autograd nodes it creates.
        forward_ms, backward_ms: compute time.
        forward_base_bytes, backward_base_bytes: the most device memory in use while it runs, less the
            storages of `Profile.saved` that are alive then; weights, gradients and optimizer states included.
        backward_place: -1 where backward does not visit it.
        communicates: whether it runs a collective.
        reads_values: whether the host waits in its forward for values from the device.
    """

    call: OpCall
    first_order: Count
    last_order: Count
    first_op: Count
    num_ops: Count
    forward_ms: Ms
    backward_ms: Ms
    forward_base_bytes: Bytes
    backward_base_bytes: Bytes
    backward_place: Annotated[int, Ge(-1), Expected("a number, or -1")]
    communicates: bool = False
    reads_values: bool = False


CompileVariant = tuple[float, tuple[str, ...], tuple[str, ...]]
"""Share, recomputed paths and kept paths with which a layer is compiled (see `FrontierPoint`)."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One way to compile a layer so that it saves less than by default, and what that saves and costs.

    Memory and time are ratios, because layers may differ in size. "All bytes" are those that a layer saves
    by default, without its input and its output.

    Args:
        share: share of its activation memory that the layer may save (`COMPILE_BUDGET`); 1: no limit.
        recomputed: op paths that the compiler is asked to run again.
        kept: op paths inside ``recomputed`` that it is asked to save.
        saved: bytes that the layer saves, divided by all bytes.
        again: time that is added to its backward, divided by the time of its forward.
        passing: temporary bytes added while it runs, divided by all bytes.
        measured: whether a step has shown these values; else they are guessed.
    """

    share: Share = 1.0
    recomputed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    saved: Share = 1.0
    again: Ms = 0.0
    passing: float = 0.0
    measured: bool = False

    @property
    def variant(self) -> CompileVariant:
        """The settings that the compiler is given; layers with equal settings share one graph."""
        return self.share, self.recomputed, self.kept


@dataclass(frozen=True)
class Profile:
    """A step of one micro-batch on one rank.

    Args:
        saved: what autograd saves, each storage with its uses.
        op_events: calls of ops, in the order of forward.
        num_layers: number of decoder layers; ``saved.modules`` names those of other stacks too.
        family: ``model_type``.
        compiled_layers: layers that the compiler runs as one op; their inside is not seen.
        link: rates between host and device; ``None``: copies do not overlap compute.
        device: name of the device.
        device_bytes: the most memory that a process can use on it.
        outside_ms: the time of a step outside forward and backward (optimizer, gradient reduction).
        outside_base_bytes: the most device memory in use outside forward and backward.
        optimizer_state_bytes: part of every ``base_bytes``, which ``preference: memory_saving`` moves away.
        reserved_bytes: what the allocator held beyond what was in use, at the peak (fragments).
        batch_shape: shape of the input ids.
        source: ``measured`` in a step, or computed from ``shapes``.
        frontier: other ways to compile the compiled layers; limits on their memory alone need not be listed
            (`compiled_shares`).
        weight_bytes: part of every ``base_bytes``, buffers included; 0: not known.
        gradient_bytes: part of ``backward_base_bytes``, by op event: gradients of weights that are complete
            when it begins; and last, all of them when backward has ended. Empty: not known.
        hooks: the moments at which autograd saved any tensor, also one that ``saved`` leaves out (weights,
            tables that layers share), and so the engine gets control: (order of the last use so far,
            operator). Empty: not known, and assumed to be where ``saved`` has a saved tensor.
    """

    saved: SavedBytes
    op_events: tuple[OpEvent, ...]
    num_layers: LayerCount
    family: str
    compiled_layers: frozenset[Count]
    link: Link | None
    device: str
    device_bytes: Bytes
    outside_ms: Ms
    outside_base_bytes: Bytes
    optimizer_state_bytes: Bytes
    reserved_bytes: Bytes
    batch_shape: tuple[Count, ...]
    source: Literal["measured", "shapes"]
    frontier: tuple[FrontierPoint, ...] = ()
    hooks: tuple[tuple[Count, Count], ...] = ()
    weight_bytes: Bytes = 0
    gradient_bytes: tuple[Bytes, ...] = ()

    @cached_property
    def layers(self) -> tuple[Scope, ...]:
        """The layers of all stacks, in the order in which forward first runs them.

        Of a model with several stacks those that ran: a tower waits for images that a batch may not have.
        """
        known = self.saved.modules
        if len(known) == self.num_layers:
            return tuple(known)
        calls = (op_event.call[0] for op_event in self.op_events)
        return tuple(dict.fromkeys(scope for scope in calls if scope is not None and scope in known))

    @property
    def compute_ms(self) -> float:
        """The time of forward and backward without any policy."""
        return sum(op_event.forward_ms + op_event.backward_ms for op_event in self.op_events)

    def scope_ms(self) -> tuple[Mapping[Scope | None, float], Mapping[Scope | None, float]]:
        """Return the times of each scope in forward, and in backward; 0 for one that is not there."""
        forward_ms: defaultdict[Scope | None, float] = defaultdict(float)
        backward_ms: defaultdict[Scope | None, float] = defaultdict(float)
        for op_event in self.op_events:
            forward_ms[op_event.call[0]] += op_event.forward_ms
            backward_ms[op_event.call[0]] += op_event.backward_ms
        return forward_ms, backward_ms

    def slower(self, factor: float) -> Profile:
        """Return the profile of a device on which all but copies takes ``factor`` times as long."""
        op_events = tuple(
            replace(item, forward_ms=item.forward_ms * factor, backward_ms=item.backward_ms * factor)
            for item in self.op_events
        )
        return replace(self, op_events=op_events, outside_ms=self.outside_ms * factor)


@dataclass(frozen=True)
class Limits:
    """What a plan must keep within.

    Args:
        device_bytes: the most device memory in use at any time of the step, on any rank.
        host_bytes: the most host memory of one rank; ``None``: no cap.
        min_tensor_bytes: smaller tensors are never swapped.
        swap_bucket_bytes: the most that is swapped in each stage (``swap_bucket_size``); ``None``: no cap.
        layers_per_stage: decoder layers of a stage (``num_attn_layers_per_stage``).
        frees_optimizer_states: whether the optimizer's states are on the host during forward and backward
            (``memory_saving``).
        waiting: how many other micro-batches hold their kept tensors while one runs: of a pipeline, or
            where a step runs several forwards ahead of its backward.
        resident: how much swapped memory of other micro-batches is on the device meanwhile, as a share of
            what one micro-batch swaps.
    """

    device_bytes: int
    host_bytes: int | None = None
    min_tensor_bytes: int = 2**20
    swap_bucket_bytes: int | None = None
    layers_per_stage: int = 1
    frees_optimizer_states: bool = False
    waiting: float = 0.0
    resident: float = 0.0

    def beside_states(self, profile: Profile) -> Limits:
        """Return the limits with the host memory that the optimizer's states leave, if they are there."""
        if self.host_bytes is None or not self.frees_optimizer_states:
            return self
        return replace(self, host_bytes=max(self.host_bytes - profile.optimizer_state_bytes, 0))

    def shared_by(self, in_flight: float, resident: float) -> Limits:
        """Return the limits of one of the micro-batches in flight, which share the host's memory equally.

        What the others keep is on the device. Of what they swap, at most ``resident`` of one micro-batch's
        share is there, on its way out or back (`engine.schedule`).
        """
        if in_flight <= 1:
            return self
        host = None if self.host_bytes is None else int(self.host_bytes / in_flight)
        return replace(self, host_bytes=host, waiting=in_flight - 1.0, resident=resident)

    def with_others(self, one: Prediction) -> Prediction:
        """Return ``one`` with the memory of the other micro-batches in flight added to its peak."""
        others_bytes = int(self.waiting * one.kept_bytes + self.resident * one.swapped_bytes)
        return replace(one, peak_bytes=one.peak_bytes + others_bytes)


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """One swapped storage in a predicted step; times in ms since the step began.

    Args:
        storage: its number in `Profile.saved`.
        call: the call that produced it.
        size_bytes: the bytes that are copied.
        release_ms: when its device memory is free.
        read_ms: when backward first reads it.
    """

    storage: int
    call: OpCall
    size_bytes: int
    out_start_ms: float
    out_end_ms: float
    release_ms: float
    in_start_ms: float
    in_end_ms: float
    read_ms: float


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Device memory from ``ms`` (since the step began) on, until the next point.

    Args:
        base_bytes: weights, gradients, optimizer states, what ops use while they run.
        kept_bytes: saved storages that are never released before backward reads them.
        swapped_bytes: swapped storages while they are on the device.
        rebuilt_bytes: storages that recomputation has rebuilt, or will drop once forward has read them.
    """

    ms: float
    base_bytes: int
    kept_bytes: int
    swapped_bytes: int
    rebuilt_bytes: int

    @property
    def total_bytes(self) -> int:
        """All device memory in use."""
        return self.base_bytes + self.kept_bytes + self.swapped_bytes + self.rebuilt_bytes


@dataclass(frozen=True)
class Prediction:
    """A predicted step under a plan.

    Args:
        step_ms: time of forward, backward and what is outside them.
        compute_ms: time of forward and backward without a policy.
        recompute_ms: time of what runs again.
        forward_stall_ms, backward_stall_ms: time for which compute waits for copies.
        forward_end_ms: when forward ends.
        peak_bytes: the most device memory in use.
        peak_at: the call that ran then.
        memory: device memory over time; may be empty.
        copies: the swapped storages, in the order of the copies out.
        kept_bytes, swapped_bytes, recomputed_bytes: what autograd saves without a policy, by its fate; kept
            includes what recomputation holds in addition.
        host_bytes: the most host memory in use.
        peak_gradient_bytes: part of the peak: gradients of weights (`Profile.gradient_bytes`).
    """

    step_ms: float
    compute_ms: float
    recompute_ms: float
    forward_stall_ms: float
    backward_stall_ms: float
    forward_end_ms: float
    peak_bytes: int
    peak_at: OpCall
    memory: tuple[MemoryPoint, ...]
    copies: tuple[CopyTimes, ...]
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    host_bytes: int
    peak_gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StorageLifetime:
    """When one storage of a profile is made, used and freed; op events are given by number.

    Args:
        birth: op event of its first use.
        made_in: op event that makes it; -1: none of those that use it.
        forward_end: last op event of forward that needs it.
        op_events: the op event of each of its uses, in their order.
        last_place: last place of backward that reads it without a policy; -1: nothing saves it, and it is
            part of the base bytes.
    """

    size_bytes: int
    birth: int
    made_in: int
    forward_end: int
    op_events: tuple[int, ...]
    last_place: int


class Places:
    """The op events in the order of backward; the number of one in this order is its place."""

    def __init__(self, op_events: Sequence[OpEvent]) -> None:
        reached = [number for number, op_event in enumerate(op_events) if op_event.backward_place >= 0]
        self.order = sorted(reached, key=lambda number: op_events[number].backward_place)
        self.of_event = [-1] * len(op_events)
        for place, number in enumerate(self.order):
            self.of_event[number] = place
        self.last = len(self.order) - 1

    def of_reader(self, op_event: int) -> int:
        """Return the place that reads what ``op_event`` saved; the last one if backward never visits it."""
        place = self.of_event[op_event]
        return self.last if place < 0 else place


def events_of_uses(saved: SavedBytes, op_events: Sequence[OpEvent]) -> list[tuple[int, ...]]:
    """Return for each storage the numbers of the op events to which its uses belong, in their order."""
    last_orders = list(accumulate((op_event.last_order for op_event in op_events), max))
    last = len(last_orders) - 1
    return [
        tuple(min(bisect_left(last_orders, use.order), last) for use in storage.uses)
        for storage in saved.storages
    ]


def lifetimes(saved: SavedBytes, op_events: Sequence[OpEvent], places: Places) -> tuple[StorageLifetime, ...]:
    """Return the lifetime of each storage."""
    module_ends: dict[tuple[object, str], int] = {}
    for number, op_event in enumerate(op_events):
        scope, path, _ = op_event.call
        module_ends[scope, path] = module_ends[scope, ""] = number
        while path := path.rpartition(".")[0]:
            module_ends[scope, path] = number
    found = []
    for storage, at in zip(saved.storages, events_of_uses(saved, op_events), strict=True):
        last, end = -1, max(at)
        for use, event_number in zip(storage.uses, at, strict=True):
            scope, path, _ = use.at
            if use.kind == "saved":
                last = max(last, places.of_reader(event_number))
            elif use.kind == "module" and scope is not None:
                end = max(end, module_ends.get((scope, path), 0))
        made_in = min(at) if storage.uses[0].kind in ("returned", "saved") else -1
        found.append(StorageLifetime(storage.size_bytes, min(at), made_in, end, at, last))
    return tuple(found)


def saved_on_device(known: Sequence[StorageLifetime], places: Places) -> tuple[list[int], list[int]]:
    """Return the bytes of saved storages on the device while each op event runs: in forward, and in backward.

    The second number of an op event that backward does not visit is 0.
    """
    born, gone_after = [0] * len(places.of_event), [0] * (places.last + 2)
    for lifetime in known:
        if lifetime.last_place >= 0:
            born[lifetime.birth] += lifetime.size_bytes
            gone_after[lifetime.last_place] += lifetime.size_bytes
    there = list(accumulate(reversed(gone_after)))[::-1]  # the last item is 0; place -1 reads it
    return list(accumulate(born)), [there[place] for place in places.of_event]


FORMAT = "hf_actswap.profile"
FORMAT_VERSION = 4

_KINDS = get_args(UseKind)
_OP_EVENT = tuple(field.name for field in fields(OpEvent))
_USE = tuple(field.name for field in fields(Use))
_POINT = tuple(field.name for field in fields(FrontierPoint))
_PLAIN = (
    *("num_layers", "family", "device", "device_bytes", "outside_ms", "outside_base_bytes"),
    *("optimizer_state_bytes", "reserved_bytes", "source", "batch_shape"),
)
"""Fields of `Profile` that stand in the document as they are."""


_OF_STACKS = "modules_of_stacks"
"""Key of (layer, modules) of the layers beside the decoder's; it is left out where there are none."""


def profile_to_json(profile: Profile) -> str:
    """Return the profile as JSON; `profile_from_json` reads it back, equal."""
    calls: dict[OpCall, int] = {}

    def number(call: OpCall) -> int:
        return calls.setdefault(call, len(calls))

    def use_row(use: Use) -> list[Any]:
        row = {name: getattr(use, name) for name in _USE}
        row.update(kind=_KINDS.index(use.kind), at=number(use.at), producer=number(use.producer))
        return list(row.values())

    def event_row(op_event: OpEvent) -> list[Any]:
        row = {name: getattr(op_event, name) for name in _OP_EVENT}
        row.update({name: int(value) for name, value in row.items() if isinstance(value, bool)})
        row.update(call=number(op_event.call))
        return list(row.values())

    document: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
    document.update({name: getattr(profile, name) for name in _PLAIN})
    document["compiled_layers"] = sorted(profile.compiled_layers)
    document["link"] = None if profile.link is None else asdict(profile.link)
    document["op_event_columns"], document["use_columns"] = list(_OP_EVENT), list(_USE)
    if profile.frontier:
        document["frontier"] = [[getattr(point, name) for name in _POINT] for point in profile.frontier]
    for name in ("weight_bytes", "gradient_bytes", "hooks"):
        if value := getattr(profile, name):
            document[name] = value
    modules = {scope: sorted(paths) for scope, paths in profile.saved.modules.items()}
    document["modules"] = [paths for scope, paths in modules.items() if isinstance(scope, int)]
    if stacks := [(scope, paths) for scope, paths in modules.items() if isinstance(scope, str)]:
        document[_OF_STACKS] = stacks
    document["op_events"] = [event_row(op_event) for op_event in profile.op_events]
    document["storages"] = [
        [storage.size_bytes, *map(use_row, storage.uses)] for storage in profile.saved.storages
    ]
    document["calls"] = list(calls)
    lines = [f"{json.dumps(key)}:{_text(value)}" for key, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def profile_from_json(text: str, source: str = "") -> Profile:
    """Read a profile back.

    Args:
        text: text of the document.
        source: name of its file, for error messages.

    Raises:
        PlanError: the text is no profile, has another format, or is malformed; the error names every fault
            (if there are very many, the first ones).
    """
    return profile_from_document(JsonDocument(text, "profile", PlanError, source))


def profile_from_document(document: JsonDocument) -> Profile:
    """Return the profile in a document that may hold other sections too; raise one error for all faults."""
    document.check_format(FORMAT, FORMAT_VERSION)
    for name, columns in (("op_event_columns", _OP_EVENT), ("use_columns", _USE)):
        found = document.content.get(name)
        if found != list(columns):
            document.fault((name,), f"the columns {', '.join(columns)}", found)
    num_layers = document.read(LayerCount, "num_layers")
    document.finish()
    scope = {Scope | None: scope_type(num_layers, stacks=True, optional=True)}
    calls = document.read(tuple[OpCall, ...], "calls", scope)
    document.finish()
    types = {
        **scope,
        OpCall: _numbered(calls, "a number of a call"),
        UseKind: _numbered(_KINDS, f"a number of {', '.join(_KINDS)}"),
        bool: _numbered((False, True), "0 or 1"),
    }
    rows = (OpEvent, Use, FrontierPoint)
    types[SavedStorage] = _storage(form_of(Bytes), form_of(Use, types, rows))
    storages = document.read(tuple[SavedStorage, ...], "storages", types)
    modules = document.read(tuple[frozenset[str], ...], "modules")
    others: Any = ()
    if _OF_STACKS in document.content:
        others = document.read(tuple[tuple[str, frozenset[str]], ...], _OF_STACKS)
    values = document.fields(Profile, without=["saved"], types=types, rows=rows)
    document.finish()
    _check_order(document, values["op_events"])
    if len(modules) != num_layers:
        document.fault(("modules",), f"{num_layers} lists, one a layer", document.content["modules"])
    document.finish()
    return Profile(SavedBytes(storages, {**dict(enumerate(modules)), **dict(others)}), **values)


def _numbered(table: Sequence[Any], expected: str) -> Any:
    """Return the type of values that the document gives by their number in ``table``."""

    def item(value: Any) -> Any:
        if isinstance(value, int) and 0 <= value < len(table):
            return table[value]
        raise rejected(value, ((), expected, show(value), ""))

    return Annotated[Any, PlainValidator(item)]


def _storage(size_bytes: Any, use: Any) -> Any:
    """Return the type of a storage: its size and its uses stand in one list."""

    def row(source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        items = [handler.generate_schema(size_bytes), handler.generate_schema(use)]
        return core_schema.tuple_schema(items, variadic_item_index=1)

    made = AfterValidator(lambda items: SavedStorage(items[0], items[1:]))
    return Annotated[Any, GetPydanticSchema(row), Expected("a number of bytes, and uses"), made]


def _text(value: Any) -> str:
    """Return ``value`` as JSON; a table has each row on its own line."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (list, tuple)):
        return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in value) + "\n]"
    return json.dumps(value, separators=(",", ":"))


def _check_order(document: JsonDocument, op_events: Sequence[OpEvent]) -> None:
    """Report op events that do not follow each other without gaps, in uses and in operators."""
    order, op = 1, 0
    for index, op_event in enumerate(op_events):
        for name, expected in (("first_order", order), ("first_op", op)):
            found = getattr(op_event, name)
            if found != expected:
                document.fault(("op_events", index, name), str(expected), found)
        order, op = max(op_event.first_order, op_event.last_order + 1), op_event.first_op + op_event.num_ops
