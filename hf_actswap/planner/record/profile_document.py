"""Writes and reads profiles as JSON, so that a plan can be made on another machine.

A profile of a large model has thousands of uses and op events, so the document is compact: calls of ops are
in one table, and everything else names them by number; uses and op events are rows of values in a fixed
order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, GetCoreSchemaHandler, GetPydanticSchema, PlainValidator
from pydantic_core import CoreSchema, core_schema

from ...config.documents import Bytes, JsonDocument, form_of
from ...config.validation import Expected, rejected, show
from ...errors import PlanError
from ...plan.actions import LayerCount, Scope, scope_type
from ...plan.saved_bytes import OpCall, SavedBytes, SavedStorage, Use, UseKind
from ..profile import FrontierPoint, OpEvent, Profile

FORMAT = "hf_actswap.profile"
FORMAT_VERSION = 2

_KINDS = get_args(UseKind)
_OP_EVENT = tuple(field.name for field in fields(OpEvent))
_USE = tuple(field.name for field in fields(Use))
_POINT = tuple(field.name for field in fields(FrontierPoint))
_PLAIN = (
    *("num_layers", "family", "device", "device_bytes", "outside_ms", "outside_base_bytes"),
    *("optimizer_state_bytes", "reserved_bytes", "signature", "source"),
)
"""Fields of `Profile` that stand in the document as they are."""


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
        row.update(
            call=number(op_event.call), communicates=int(op_event.communicates), random=int(op_event.random)
        )
        return list(row.values())

    document: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
    document.update({name: getattr(profile, name) for name in _PLAIN})
    document["batch_shape"] = list(profile.batch_shape)
    document["compiled_layers"] = sorted(profile.compiled_layers)
    document["link"] = None if profile.link is None else asdict(profile.link)
    document["op_event_columns"], document["use_columns"] = list(_OP_EVENT), list(_USE)
    if profile.frontier:
        document["frontier"] = [[getattr(point, name) for name in _POINT] for point in profile.frontier]
    if profile.weight_bytes:
        document["weight_bytes"] = profile.weight_bytes
    if profile.gradient_bytes:
        document["gradient_bytes"] = list(profile.gradient_bytes)
    if profile.hooks:
        document["hooks"] = [list(hook) for hook in profile.hooks]
    document["modules"] = [sorted(paths) for paths in profile.saved.modules.values()]
    document["op_events"] = [event_row(op_event) for op_event in profile.op_events]
    document["storages"] = [
        [storage.size_bytes, *map(use_row, storage.uses)] for storage in profile.saved.storages
    ]
    document["calls"] = [list(call) for call in calls]
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
    scope = {Scope | None: scope_type(num_layers, optional=True)}
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
    values = document.fields(Profile, without=["saved"], types=types, rows=rows)
    document.finish()
    _check_order(document, values["op_events"])
    profile = Profile(SavedBytes(storages, dict(enumerate(modules))), **values)
    if len(profile.saved.modules) != num_layers:
        document.fault(("modules",), f"{num_layers} lists, one a layer", document.content["modules"])
    document.finish()
    return profile


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
    if isinstance(value, list) and value and isinstance(value[0], list):
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
