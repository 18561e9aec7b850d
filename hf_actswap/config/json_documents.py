"""Reads the JSON documents that this library writes, by the types that its dataclasses declare.

Rules beyond the type are written with the type, ``Annotated[int, Rule(...)]``. All errors of a document are
raised at once: the place, what was expected, what was found. No text can make the reader hang, or raise an
exception of another class.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path as FilePath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from ..errors import ActSwapError, Problem
from .reader import EXPECTED_BOOL, Path, is_int, show, where
from .yaml_text import MAX_LEVELS

MAX_PROBLEMS = 50
"""The most problems that are named, if every row of a document is wrong."""

_READ_DIGITS = 30
"""Number of digits of a whole number that are read: with as many it is beyond 64 bits, whatever follows."""

_NOTHING = object()
"""Stands for a value that is missing."""

Read = Callable[[Path, Any], Any]
"""Takes the path of a value and the value; returns the value as its type, or notes a fault."""


@dataclass(frozen=True)
class Rule:
    """A condition on a value.

    Args:
        expected: what the value must be, in words.
        holds: tells whether a value is that; with an annotated type, called only for values of the type.
    """

    expected: str
    holds: Callable[[Any], bool]


Count = Annotated[int, Rule("a whole number from 0 on", lambda value: value >= 0)]
Bytes = Annotated[int, Rule("a number of bytes", lambda value: value >= 0)]
Ms = Annotated[float, Rule("a time in ms", lambda value: value >= 0)]


def read_text(path: str, max_bytes: int, error: type[ActSwapError], source: str = "") -> str:
    """Read a file in UTF-8.

    Args:
        path: path of the file.
        max_bytes: the largest size that is accepted.
        error: class of the exception for a file that is longer, or no text.
        source: name of the file in that exception; by default its path.

    Raises:
        OSError: it cannot be read.
        ActSwapError: of the class ``error``: it is longer than ``max_bytes``, or not UTF-8.
    """
    with open(path, "rb") as file:
        raw = file.read(max_bytes + 1)
    if len(raw) > max_bytes:
        raise error([Problem("document", f"at most {max_bytes} bytes", "more")], source or path)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        problem = Problem("document", "text in UTF-8", f"byte {fault.start} that is not")
        raise error([problem], source or path) from None


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file, whole or not at all: the old content stays until the new text is on the disk.

    Raises:
        OSError: it cannot be written; nothing is left of the attempt.
    """
    target = FilePath(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


class JsonReader:
    """Reads one document, and collects what is wrong with it until `finish`.

    In a document a dataclass is a mapping of its fields, and fields with a default may be missing; if it was
    passed to `read_as_list`, it is a list of its fields' values in order. A ``TypedDict`` may hold keys that
    it does not declare, and is returned as it is.

    Args:
        text: the document as JSON.
        name: name of the document; the places in messages begin with it.
        error: class of the exception that is raised.
        source: where the text is from, for messages.

    Raises:
        ActSwapError: of the class ``error``: the text is no JSON, no mapping, or too deeply nested.
    """

    def __init__(self, text: str, name: str, error: type[ActSwapError], source: str = "") -> None:
        self._name, self._error, self._source = name, error, source
        self._problems: list[Problem] = []
        self._faults = 0
        self._reads: dict[Any, Read] = {}
        self._rows: tuple[Any, ...] = ()
        try:
            document = json.loads(text, parse_int=lambda digits: int(digits[:_READ_DIGITS]))
        except json.JSONDecodeError as fault:
            raise error([Problem(name, "a JSON document", f"no JSON: {fault}")], source) from None
        except RecursionError:
            raise error([Problem(name, f"at most {MAX_LEVELS} levels", "more")], source) from None
        if not isinstance(document, dict):
            self.fault((name,), "a mapping", document)
            self.finish()
        self.document: dict[str, Any] = document

    def check_format(self, name: str, version: int) -> None:
        """Check the document's ``format`` and ``format_version``; raise at once if they are others."""
        for key, kind in (("format", Literal[name]), ("format_version", Literal[version])):
            self.value(kind, key)
            self.finish()

    def read_as_list(self, *kinds: Any) -> None:
        """Read these dataclasses as lists of their fields' values."""
        self._rows += kinds

    def read_type_with(self, kind: Any, read: Read | Rule) -> None:
        """Read values that are declared as ``kind`` by a function of the caller, or by a rule alone."""
        self._reads[kind] = self._checked(read) if isinstance(read, Rule) else read

    def value(self, kind: Any, key: str) -> Any:
        """Read the value of a key of the document."""
        return self.read(kind, (self._name, key), self.document.get(key, _NOTHING))

    def fields(self, kind: Any, without: Collection[str] = ()) -> dict[str, Any]:
        """Read the fields of a dataclass from the document itself, which may hold more than these."""
        return self._members(kind, without)((self._name,), self.document)

    def read(self, kind: Any, path: Path, value: Any) -> Any:
        """Read a value; what comes back is of the type if `finish` does not raise."""
        return self._read_of(kind)(path, value)

    def fault(self, path: Path, expected: str, value: Any, hint: str = "") -> Any:
        """Note that something else was expected; returns ``None`` in the value's place."""
        self._faults += 1
        if len(self._problems) < MAX_PROBLEMS:
            found = "nothing" if value is _NOTHING else show(value)
            self._problems.append(Problem(where(path), expected, found, hint))

    def finish(self) -> None:
        """Raise if any problem was noted.

        Raises:
            ActSwapError: of the class that the reader was given, with all problems (at most `MAX_PROBLEMS`).
        """
        if self._faults:
            raise self._error(self._problems, self._source)

    def _read_of(self, kind: Any) -> Read:
        if kind not in self._reads:
            self._reads[kind] = self._made(kind)
        return self._reads[kind]

    def _made(self, kind: Any) -> Read:
        rule = _rule_of(kind)
        if rule is not None:
            return self._checked(rule)
        origin, arguments = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            (inner,) = (item for item in arguments if item is not NoneType)
            of_inner = self._read_of(inner)
            return lambda path, value: None if value is None else of_inner(path, value)
        return self._list(origin, arguments) if origin in (tuple, frozenset) else self._instance(kind)

    def _checked(self, rule: Rule) -> Read:
        def read(path: Path, value: Any) -> Any:
            if not rule.holds(value):
                self.fault(path, rule.expected, value)
            return value

        return read

    def _list(self, made: Any, kinds: tuple[Any, ...]) -> Read:
        repeats = len(kinds) == 1 or kinds[-1] is ...
        reads = [self._read_of(kind) for kind in kinds if kind is not ...]
        expected = "a list" if repeats else f"a list of {len(kinds)} values"

        def read(path: Path, value: Any) -> Any:
            if not isinstance(value, list) or not (repeats or len(value) == len(reads)):
                return self.fault(path, expected, value)
            before, each = self._faults, reads * len(value) if repeats else reads
            items = [each[at]((*path, at), item) for at, item in enumerate(value)]
            return made(items) if self._faults == before else None

        return read

    def _members(self, kind: Any, without: Collection[str] = ()) -> Callable[[Path, dict[str, Any]], Any]:
        hints = get_type_hints(kind, include_extras=True)
        reads = {name: self._read_of(item) for name, item in hints.items() if name not in without}
        needed = kind.__required_keys__ if is_typeddict(kind) else _without_default(kind)

        def members(path: Path, value: dict[str, Any]) -> dict[str, Any]:
            return {
                name: read((*path, name), value.get(name, _NOTHING))
                for name, read in reads.items()
                if name in value or name in needed
            }

        return members

    def _instance(self, kind: Any) -> Read:
        members, names, is_row = self._members(kind), list(get_type_hints(kind)), kind in self._rows
        expected = f"a {'list of the values' if is_row else 'mapping'} of {', '.join(names)}"

        def read(path: Path, value: Any) -> Any:
            if is_row and isinstance(value, list) and len(value) == len(names):
                found = dict(zip(names, value, strict=True))
            elif not is_row and isinstance(value, dict):
                found = value
            else:
                return self.fault(path, expected, value)
            before, made = self._faults, members(path, found)
            if is_typeddict(kind):
                return value
            for key in (key for key in found if key not in names):
                self.fault((*path, key), f"one of {', '.join(names)}", key)
            try:
                return kind(**made) if self._faults == before else None
            except ValueError as error:  # what the class itself rejects
                return self.fault(path, f"what makes a {kind.__name__}", value, str(error))

        return read


def _without_default(kind: Any) -> set[str]:
    return {item.name for item in fields(kind) if item.default is item.default_factory is MISSING}


def _rule_of(kind: Any) -> Rule | None:
    """Return the rule for values of a type; ``None``: they have parts, which are read one by one."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        expected = " or ".join(filter(None, [", ".join(map(str, arguments[:-1])), str(arguments[-1])]))
        return Rule(
            expected, lambda value: any(type(value) is type(item) and value == item for item in arguments)
        )
    if origin not in (Annotated, Union, UnionType, Mapping):
        return _PLAIN.get(kind)
    rules = [_rule_of(item) for item in arguments if not isinstance(item, Rule)]
    parts = [rule for rule in rules if rule is not None]
    if len(parts) < len(rules):
        return None
    if origin is Mapping:
        key, item = parts
        of_mapping = "a mapping" if item is _PLAIN[Any] else f"a mapping to values that are {item.expected}"
        return Rule(of_mapping, lambda value: isinstance(value, dict) and _all_hold(key, item, value))
    if origin is Annotated:
        (of_type,), asked = parts, arguments[1]
        return Rule(asked.expected, lambda value: of_type.holds(value) and asked.holds(value))
    expected = " or ".join(rule.expected for rule in parts)
    return Rule(expected, lambda value: any(rule.holds(value) for rule in parts))


def _all_hold(key: Rule, item: Rule, mapping: dict[str, Any]) -> bool:
    return all(map(key.holds, mapping)) and all(map(item.holds, mapping.values()))


def _is_number(value: Any) -> bool:
    return is_int(value) or (isinstance(value, float) and abs(value) <= 2.0**63)  # and so no NaN


def is_share(value: Any) -> bool:
    """Whether a value is a number from 0 to 1."""
    return _is_number(value) and 0 <= value <= 1


Share = Annotated[float, Rule("a number from 0 to 1", is_share)]


def _is_text(value: Any) -> bool:
    """Whether a value is a text that can be written: without halves of surrogate pairs."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value))


def _is_plain(value: Any, levels: int = MAX_LEVELS) -> bool:
    if isinstance(value, dict | list):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return levels > 0 and all(_is_plain(item, levels - 1) for item in items)
    return value is None or isinstance(value, bool) or _is_number(value) or _is_text(value)


_PLAIN: Mapping[Any, Rule] = {
    bool: Rule(EXPECTED_BOOL, lambda value: isinstance(value, bool)),
    int: Rule("a whole number", is_int),
    float: Rule("a number", _is_number),
    str: Rule("a text", _is_text),
    NoneType: Rule("null", lambda value: value is None),
    Any: Rule(f"a value of at most {MAX_LEVELS} levels", _is_plain),
}
