"""Writes and reads profiles as JSON, so that a plan can be made on another machine.

A profile of a large model has thousands of uses and op events, so the document is compact: calls of ops are
in one table, and everything else names them by number; uses and op events are rows of values in a fixed
order.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, get_args

from ...config.json_documents import Bytes, JsonReader, Read, Rule
from ...config.reader import Path
from ...errors import PlanError
from ...plan.actions import LayerCount, Scope, scope_rule
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
    return profile_from_document(JsonReader(text, "profile", PlanError, source))


def profile_from_document(reader: JsonReader) -> Profile:
    """Return the profile in a document that may hold other sections too; raise one error for all faults."""
    reader.check_format(FORMAT, FORMAT_VERSION)
    for name, columns in (("op_event_columns", _OP_EVENT), ("use_columns", _USE)):
        found = reader.document.get(name)
        if found != list(columns):
            reader.fault(("profile", name), f"the columns {', '.join(columns)}", found)
    num_layers = reader.value(LayerCount, "num_layers")
    reader.finish()
    scope = scope_rule(num_layers)
    is_scope = Rule(f"{scope.expected}, or null", lambda value: value is None or scope.holds(value))
    reader.read_type_with(Scope | None, is_scope)
    calls = reader.value(tuple[OpCall, ...], "calls")
    reader.finish()
    reader.read_as_list(OpEvent, Use, FrontierPoint)
    reader.read_type_with(OpCall, _numbered(reader, calls, "a number of a call"))
    reader.read_type_with(UseKind, _numbered(reader, _KINDS, f"a number of {', '.join(_KINDS)}"))
    reader.read_type_with(bool, _numbered(reader, (False, True), "0 or 1"))
    reader.read_type_with(SavedStorage, functools.partial(_storage, reader))
    storages = reader.value(tuple[SavedStorage, ...], "storages")
    modules = reader.value(tuple[frozenset[str], ...], "modules")
    values = reader.fields(Profile, without=["saved"])
    reader.finish()
    _check_order(reader, values["op_events"])
    profile = Profile(SavedBytes(storages, dict(enumerate(modules))), **values)
    if len(profile.saved.modules) != num_layers:
        reader.fault(("profile", "modules"), f"{num_layers} lists, one a layer", reader.document["modules"])
    reader.finish()
    return profile


def _numbered(reader: JsonReader, table: Sequence[Any], expected: str) -> Read:
    """Return a reader of values that the document gives by their number in ``table``."""

    def read(path: Path, value: Any) -> Any:
        if isinstance(value, int) and 0 <= value < len(table):
            return table[value]
        return reader.fault(path, expected, value)

    return read


def _storage(reader: JsonReader, path: Path, value: Any) -> SavedStorage | None:
    """Read the size of a storage and its uses, which stand in one row."""
    if not isinstance(value, list) or not value:
        return reader.fault(path, "a number of bytes, and uses", value)
    size_bytes, *uses = (
        reader.read(Use if at else Bytes, (*path, at), item) for at, item in enumerate(value)
    )
    return SavedStorage(size_bytes, tuple(uses))


def _text(value: Any) -> str:
    """Return ``value`` as JSON; a table has each row on its own line."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in value) + "\n]"
    return json.dumps(value, separators=(",", ":"))


def _check_order(reader: JsonReader, op_events: Sequence[OpEvent]) -> None:
    """Report op events that do not follow each other without gaps, in uses and in operators."""
    order, op = 1, 0
    for index, op_event in enumerate(op_events):
        for name, expected in (("first_order", order), ("first_op", op)):
            found = getattr(op_event, name)
            if found != expected:
                reader.fault(("profile", "op_events", index, name), str(expected), found)
        order, op = max(op_event.first_order, op_event.last_order + 1), op_event.first_op + op_event.num_ops
