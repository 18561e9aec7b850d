"""Profiles as JSON: recorded on one machine, read by a person, planned from on another.

A profile of a large model has thousands of uses and spans, so the document is compact: calls of ops stand in
one table, everything else names them by number; uses and spans are rows of values in a fixed order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from ...engine.link import Link
from ...errors import PlanError, Problem
from ...plan.actions import SCOPES
from ...plan.saved_bytes import OpCall, SavedBytes, SavedStorage, Use
from ..profile import FrontierPoint, Profile, Span

FORMAT = "hf_actswap.profile"
FORMAT_VERSION = 1

_KINDS = ("saved", "module", "function", "returned")
_SPAN = tuple(field.name for field in fields(Span))
_USE = tuple(field.name for field in fields(Use))
_POINT = tuple(field.name for field in fields(FrontierPoint))
_MOST_PROBLEMS = 50
"""A document whose every row is wrong says so with the first of them."""

Check = tuple[str, Callable[[Any], bool]]
"""What is expected, in words, and whether a value is that."""


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_ms(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")


_COUNT: Check = ("a whole number that is not negative", _is_count)
_INT: Check = ("a whole number", _is_int)
_MS: Check = ("a time in ms", _is_ms)
_TEXT: Check = ("a string", lambda value: isinstance(value, str))
_FLAG: Check = ("0 or 1", lambda value: value in (0, 1))

_PLAIN: Mapping[str, Check] = {
    "num_layers": _COUNT,
    "family": _TEXT,
    "device": _TEXT,
    "device_bytes": _COUNT,
    "outside_ms": _MS,
    "outside_base_bytes": _COUNT,
    "optimizer_state_bytes": _COUNT,
    "reserved_bytes": _COUNT,
    "signature": _TEXT,
    "source": ("'measured' or 'shapes'", lambda value: value in ("measured", "shapes")),
}
_SPAN_CHECKS: Mapping[str, Check] = {
    "first_order": _COUNT,
    "last_order": _COUNT,
    "first_op": _COUNT,
    "num_ops": _COUNT,
    "forward_ms": _MS,
    "backward_ms": _MS,
    "forward_base_bytes": _COUNT,
    "backward_base_bytes": _COUNT,
    "backward_place": ("a turn, or -1", lambda value: _is_int(value) and value >= -1),
    "communicates": _FLAG,
    "random": _FLAG,
}
_PATHS: Check = (
    "op paths",
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
_RATIO: Check = ("a number", lambda value: type(value) in (int, float) and abs(value) < float("inf"))
_POINT_CHECKS: Mapping[str, Check] = {
    "share": ("0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "recomputed": _PATHS,
    "kept": _PATHS,
    "saved": ("0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "again": _MS,
    "passing": _RATIO,
    "measured": ("true or false", lambda value: type(value) is bool),
}
_USE_CHECKS: Mapping[str, Check] = {
    "kind": (f"a number of {', '.join(_KINDS)}", lambda value: _is_count(value) and value < len(_KINDS)),
    "start_bytes": _COUNT,
    "stop_bytes": _COUNT,
    "size_bytes": _COUNT,
    "version": _INT,
    "order": _COUNT,
}


def profile_to_json(profile: Profile) -> str:
    """Return the profile as JSON; `profile_from_json` reads it back, equal."""
    calls: dict[OpCall, int] = {}

    def number(call: OpCall) -> int:
        return calls.setdefault(call, len(calls))

    def use_row(use: Use) -> list[Any]:
        row = {name: getattr(use, name) for name in _USE}
        row.update(kind=_KINDS.index(use.kind), at=number(use.at), producer=number(use.producer))
        return list(row.values())

    def span_row(span: Span) -> list[Any]:
        row = {name: getattr(span, name) for name in _SPAN}
        row.update(call=number(span.call), communicates=int(span.communicates), random=int(span.random))
        return list(row.values())

    document: dict[str, Any] = {"format": FORMAT, "format_version": FORMAT_VERSION}
    document.update({name: getattr(profile, name) for name in _PLAIN})
    document["batch_shape"] = list(profile.batch_shape)
    document["compiled_layers"] = sorted(profile.compiled_layers)
    document["link"] = None if profile.link is None else asdict(profile.link)
    document["span_columns"], document["use_columns"] = list(_SPAN), list(_USE)
    if profile.frontier:
        document["frontier"] = [[getattr(point, name) for name in _POINT] for point in profile.frontier]
    if profile.hooks:
        document["hooks"] = [list(hook) for hook in profile.hooks]
    document["modules"] = [sorted(paths) for paths in profile.saved.modules.values()]
    document["spans"] = [span_row(span) for span in profile.spans]
    document["storages"] = [
        [storage.size_bytes, *map(use_row, storage.uses)] for storage in profile.saved.storages
    ]
    document["calls"] = [list(call) for call in calls]
    lines = [f"{json.dumps(key)}:{_text(value)}" for key, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def profile_from_json(text: str) -> Profile:
    """Read a profile back.

    Raises:
        PlanError: not a profile, written by another format, or malformed; names every fault (of long lists
            the first ones).
    """
    return _Reader(text).profile()


def _text(value: Any) -> str:
    """A table has a row on each line."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in value) + "\n]"
    return json.dumps(value, separators=(",", ":"))


class _Reader:
    """Reads a profile document and collects what is wrong with it."""

    def __init__(self, text: str) -> None:
        self.problems: list[Problem] = []
        self.calls: list[OpCall] = []
        try:
            self.document: Any = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise PlanError([Problem("profile", "a JSON document", f"no JSON: {error}")]) from None

    def profile(self) -> Profile:
        document = self.document
        found = document.get("format") if isinstance(document, dict) else document
        if found != FORMAT:
            raise PlanError([Problem("profile.format", repr(FORMAT), _shown(found))])
        version = document.get("format_version")
        if version != FORMAT_VERSION or type(version) is not int:
            raise PlanError([Problem("profile.format_version", str(FORMAT_VERSION), _shown(version))])
        for name, check in _PLAIN.items():
            self._checked(f"profile.{name}", document.get(name), check)
        for name, columns in (("span_columns", _SPAN), ("use_columns", _USE)):
            if document.get(name) != list(columns):
                expected = f"the columns {', '.join(columns)}"
                self.problems.append(Problem(f"profile.{name}", expected, _shown(document.get(name))))
        if self.problems:
            raise PlanError(self.problems)
        self.calls = [self._call(where, item) for where, item in self._items("calls")]
        spans = [span for where, item in self._items("spans") if (span := self._span(where, item))]
        storages = [self._storage(where, item) for where, item in self._items("storages")]
        modules = [self._paths(where, item) for where, item in self._items("modules")]
        shape = [self._checked(where, item, _COUNT) for where, item in self._items("batch_shape")]
        compiled = [self._checked(where, item, _COUNT) for where, item in self._items("compiled_layers")]
        points = (self._point(*item) for item in self._items("frontier", optional=True))
        frontier = [point for point in points if point is not None]
        hooks = [self._hook(where, item) for where, item in self._items("hooks", optional=True)]
        link = self._link(document.get("link"))
        if not self.problems:
            self._check_order(spans)
        if self.problems:
            raise PlanError(self.problems[:_MOST_PROBLEMS])
        return Profile(
            saved=SavedBytes(tuple(filter(None, storages)), dict(enumerate(modules))),
            spans=tuple(spans),
            compiled_layers=frozenset(compiled),
            link=link,
            batch_shape=tuple(shape),
            frontier=tuple(frontier),
            hooks=tuple(hooks),
            **{name: document[name] for name in _PLAIN},
        )

    def _checked(self, where: str, value: Any, check: Check) -> Any:
        expected, is_right = check
        if not is_right(value):
            self.problems.append(Problem(where, expected, _shown(value)))
        return value

    def _items(self, key: str, optional: bool = False) -> list[tuple[str, Any]]:
        """The items of a list, each with its place."""
        value = self.document.get(key, [] if optional else None)
        if not isinstance(value, list):
            self.problems.append(Problem(f"profile.{key}", "a list", _shown(value)))
            return []
        return [(f"profile.{key}[{index}]", item) for index, item in enumerate(value)]

    def _point(self, where: str, item: Any) -> FrontierPoint | None:
        if not isinstance(item, list) or len(item) != len(_POINT):
            self.problems.append(Problem(where, f"the values of {', '.join(_POINT)}", _shown(item)))
            return None
        values: dict[str, Any] = dict(zip(_POINT, item, strict=True))
        before = len(self.problems)
        for name, check in _POINT_CHECKS.items():
            self._checked(f"{where}.{name}", values[name], check)
        if len(self.problems) > before:
            return None
        values.update(recomputed=tuple(values["recomputed"]), kept=tuple(values["kept"]))
        return FrontierPoint(**values)

    def _call(self, where: str, item: Any) -> OpCall:
        if isinstance(item, list) and len(item) == 3:
            scope, path, ordinal = item
            known = scope is None or scope in SCOPES or (_is_count(scope) and scope < self._num_layers())
            if known and isinstance(path, str) and (ordinal is None or _is_count(ordinal)):
                return (scope, path, ordinal)
        expected = f"a scope (a layer, {', '.join(SCOPES)} or null), an op path, an ordinal or null"
        self.problems.append(Problem(where, expected, _shown(item)))
        return (None, "", None)

    def _num_layers(self) -> int:
        return int(self.document["num_layers"])

    def _row(
        self, where: str, item: Any, names: tuple[str, ...], checks: Mapping[str, Check]
    ) -> dict[str, Any]:
        """The values of a row by name, those that are no calls checked; empty if it has another length."""
        if not isinstance(item, list) or len(item) != len(names):
            self.problems.append(Problem(where, f"{len(names)} values", _shown(item)))
            return {}
        row = dict(zip(names, item, strict=True))
        for name, value in row.items():
            if name in checks:
                self._checked(f"{where}.{name}", value, checks[name])
            elif _is_count(value) and value < len(self.calls):
                row[name] = self.calls[value]
            else:
                self.problems.append(Problem(f"{where}.{name}", "a number of a call", _shown(value)))
        return row

    def _span(self, where: str, item: Any) -> Span | None:
        row = self._row(where, item, _SPAN, _SPAN_CHECKS)
        if not row:
            return None
        return Span(**{**row, "communicates": bool(row["communicates"]), "random": bool(row["random"])})

    def _storage(self, where: str, item: Any) -> SavedStorage | None:
        if not isinstance(item, list) or not item or not _is_count(item[0]):
            self.problems.append(Problem(where, "a number of bytes, and uses", _shown(item)))
            return None
        uses = (self._use(f"{where}[{number}]", use) for number, use in enumerate(item[1:], 1))
        return SavedStorage(item[0], tuple(use for use in uses if use is not None))

    def _use(self, where: str, item: Any) -> Use | None:
        before = len(self.problems)
        row = self._row(where, item, _USE, _USE_CHECKS)
        return Use(**{**row, "kind": _KINDS[row["kind"]]}) if len(self.problems) == before else None

    def _hook(self, where: str, item: Any) -> tuple[int, int]:
        if isinstance(item, list) and len(item) == 2 and all(map(_is_count, item)):
            return (item[0], item[1])
        self.problems.append(Problem(where, "a number of a use, and an operator", _shown(item)))
        return (0, 0)

    def _paths(self, where: str, item: Any) -> frozenset[str]:
        if isinstance(item, list) and all(isinstance(path, str) for path in item):
            return frozenset(item)
        self.problems.append(Problem(where, "a list of module paths", _shown(item)))
        return frozenset()

    def _link(self, value: Any) -> Link | None:
        if value is None:
            return None
        names = [field.name for field in fields(Link)]
        try:
            if all(_is_ms(value[name]) for name in names):
                return Link(**{name: value[name] for name in names})
        except (TypeError, KeyError, ValueError):
            pass
        self.problems.append(Problem("profile.link", f"null, or rates: {', '.join(names)}", _shown(value)))
        return None

    def _check_order(self, spans: list[Span]) -> None:
        """Spans must follow each other without gaps, in uses and in operators."""
        order, op = 1, 0
        for index, span in enumerate(spans):
            where = f"profile.spans[{index}]"
            if span.first_order != order:
                self.problems.append(Problem(f"{where}.first_order", str(order), str(span.first_order)))
            if span.first_op != op:
                self.problems.append(Problem(f"{where}.first_op", str(op), str(span.first_op)))
            order, op = max(span.first_order, span.last_order + 1), span.first_op + span.num_ops


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
