"""Reads the JSON documents that this library writes (plans, profiles, records of runs) by their dataclasses.

pydantic checks the values, by the types that the fields declare; conditions and words stand there too
(``Annotated[int, Ge(0), Expected("a number of bytes")]``). All errors of a document are raised at once: the
place, what was expected, what was found. No text can make the reader hang, or raise another exception.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path as FilePath
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from annotated_types import Ge, Le, Predicate
from pydantic import TypeAdapter, ValidationError, WrapValidator
from typing_extensions import TypedDict

from ..errors import ActSwapError, Problem
from .validation import NOTHING, AnyFloat, Expected, Flag, Path, Whole, faults_of, rejected, show, where
from .yaml_text import MAX_LEVELS

MAX_PROBLEMS = 50
"""The most problems that are named, if every row of a document is wrong."""

_READ_DIGITS = 30
"""Number of digits of a whole number that are read: with as many it is beyond 64 bits, whatever follows."""

Types = Mapping[Any, Any]
"""Declared type -> type as which it is read, where a document has another form for it."""


def _is_plain(value: Any, levels: int = MAX_LEVELS) -> bool:
    if isinstance(value, dict | list):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return levels > 0 and all(_is_plain(item, levels - 1) for item in items)
    if isinstance(value, str):  # without halves of surrogate pairs
        return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
    return value is None or isinstance(value, bool) or abs(value) <= 2**63  # and so no NaN


Count = Annotated[int, Ge(0), Expected("a whole number from 0 on")]
Bytes = Annotated[int, Ge(0), Expected("a number of bytes")]
Ms = Annotated[float, Ge(0), Expected("a time in ms")]
Share = Annotated[float, Ge(0), Le(1), Expected("a number from 0 to 1")]

_PLAIN: Types = {
    bool: Flag,
    int: Whole,
    # A number without a fraction stays one, so that a document is written as it was.
    float: Annotated[Whole | Annotated[AnyFloat, Ge(-(2.0**63)), Le(2.0**63)], Expected("a number")],
    str: Annotated[str, Expected("a text")],
    Any: Annotated[Any, Predicate(_is_plain), Expected(f"a value of at most {MAX_LEVELS} levels")],
}


def is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


def read_text(path: str, max_bytes: int, error: type[ActSwapError], source: str = "") -> str:
    """Read a file in UTF-8 of at most ``max_bytes``.

    Raises:
        OSError: it cannot be read.
        ActSwapError: of the class ``error``: it is longer, or not UTF-8. It names ``source``, or the path.
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
    """Write a file, whole or not at all: the old content stays until the new text is on the disk."""
    target = FilePath(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


class JsonDocument:
    """One document; what is wrong with it is collected until `finish`.

    In a document a dataclass is a mapping of its fields, and fields with a default may be missing; if it is
    one of ``rows``, it is a list of its fields' values in order. A ``TypedDict`` may hold keys that it does
    not declare, and is returned as it is.

    Args:
        text: the document as JSON.
        name: name of the document; the places in messages begin with it.
        error: class of the exception that is raised, also at once: the text is no JSON or no mapping.
        source: where the text is from, for messages.
    """

    def __init__(self, text: str, name: str, error: type[ActSwapError], source: str = "") -> None:
        self._name, self._error, self._source = name, error, source
        self._problems: list[Problem] = []
        try:
            document = json.loads(text, parse_int=lambda digits: int(digits[:_READ_DIGITS]))
        except json.JSONDecodeError as fault:
            raise error([Problem(name, "a JSON document", f"no JSON: {fault}")], source) from None
        except RecursionError:
            raise error([Problem(name, f"at most {MAX_LEVELS} levels", "more")], source) from None
        if not isinstance(document, dict):
            raise error([Problem(name, "a mapping", show(document))], source)
        self.content: dict[str, Any] = document

    def check_format(self, name: str, version: int) -> None:
        """Check the document's ``format`` and ``format_version``; raise at once if they are others."""
        for key, wanted in (("format", name), ("format_version", version)):
            found = self.content.get(key, NOTHING)
            if type(found) is not type(wanted) or found != wanted:
                self.fault((key,), str(wanted), found)
                self.finish()

    def read(self, kind: Any, key: str | None = None, types: Types = _PLAIN, rows: Any = ()) -> Any:
        """Return the value of a key (``None``: the document itself) as a type; `finish` raises if it is not.

        ``types``: declared types that are read as others. ``rows``: dataclasses that are lists of fields'
        values.
        """
        value = self.content if key is None else self.content.get(key, NOTHING)
        return self._read(form_of(kind, types, rows), () if key is None else (key,), value)

    def fields(self, kind: Any, without: Collection[str] = (), types: Types = _PLAIN, rows: Any = ()) -> Any:
        """Return the fields of a dataclass, by name, from the document itself, which may hold more."""
        needed, found = needed_keys(kind), {}
        for name, hint in get_type_hints(kind, include_extras=True).items():
            if name not in without and (name in needed or name in self.content):
                found[name] = self._read(form_of(hint, types, rows), (name,), self.content.get(name, NOTHING))
        return found

    def fault(self, path: Path, expected: str, value: Any) -> None:
        self._note(path, expected, show(value))

    def finish(self) -> None:
        """Raise the document's error if any problem was noted, with at most `MAX_PROBLEMS`."""
        if self._problems:
            raise self._error(self._problems, self._source)

    def _read(self, form: Any, path: Path, value: Any) -> Any:
        try:
            return TypeAdapter(form).validate_python(value)
        except ValidationError as error:
            for at, *words in faults_of(error):
                self._note((*path, *at), *words)
            return None

    def _note(self, path: Path, expected: str, found: str, hint: str = "") -> None:
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(Problem(where((self._name, *path)), expected, found, hint))


def form_of(kind: Any, types: Types = _PLAIN, rows: Collection[Any] = ()) -> Any:
    """Return the type as which pydantic reads values of a declared type (as in `JsonDocument.read`)."""
    types = {**_PLAIN, **types}
    if kind in types:
        return types[kind]
    origin, parts = get_origin(kind), get_args(kind)
    of = partial(form_of, types=types, rows=rows)
    if origin is Annotated:
        return Annotated[(form_of(parts[0]), *parts[1:])]
    if origin is Literal:
        *others, last = map(str, parts)
        return Annotated[kind, Expected(f"{', '.join(others)} or {last}" if others else last)]
    if origin in (Union, UnionType):
        branches = [NoneType if part is NoneType else of(part) for part in parts]
        words = [_words(branch) for branch in branches]
        joined: Any = Union[tuple(branches)]  # noqa: UP007 - of a tuple
        return Annotated[joined, Expected(" or ".join(words))] if all(words) else joined
    if origin in (tuple, frozenset):
        any_length = origin is frozenset or parts[-1] is ...
        expected = "a list" if any_length else f"a list of {len(parts)} values"
        inner = tuple(part if part is ... else of(part) for part in parts)
        return Annotated[origin[inner], Expected(expected)]
    if origin is Mapping:
        items: Any = dict.__class_getitem__((of(parts[0]), of(parts[1])))
        return Annotated[items, Expected("a mapping")]
    return _form_of_members(kind, of, kind in rows)


def _form_of_members(kind: Any, of: Callable[[Any], Any], is_row: bool) -> Any:
    hints, needed = get_type_hints(kind, include_extras=True), needed_keys(kind)
    members = {name: of(hint) if name in needed else NotRequired[of(hint)] for name, hint in hints.items()}
    form: Any = TypedDict("form", members)  # type: ignore[misc]
    expected = f"a {'list of the values' if is_row else 'mapping'} of {', '.join(hints)}"

    def check(value: Any, of_members: Callable[[Any], Any]) -> Any:
        if is_row and isinstance(value, list) and len(value) == len(hints):
            found = dict(zip(hints, value, strict=True))
        elif not is_row and isinstance(value, dict):
            found = {name: value.get(name, NOTHING) for name in hints if name in needed or name in value}
        else:
            raise rejected(value, ((), expected, show(value), ""))
        strange = [] if is_row or is_typeddict(kind) else [key for key in value if key not in hints]
        faults = [((key,), f"one of {', '.join(hints)}", show(key), "") for key in strange]
        try:
            made = of_members(found)
        except ValidationError as error:
            raise rejected(value, *faults, again=error) from None
        if faults:
            raise rejected(value, *faults)
        try:
            return value if is_typeddict(kind) else kind(**made)
        except ValueError as error:  # what the class itself rejects
            fault = (), f"what makes a {kind.__name__}", show(value), str(error)
            raise rejected(value, fault) from None

    return Annotated[form, WrapValidator(check)]


def needed_keys(kind: Any) -> set[str]:
    """Return the fields or keys of a class that a document must hold."""
    if is_typeddict(kind):
        return set(kind.__required_keys__)
    return {item.name for item in fields(kind) if item.default is item.default_factory is MISSING}


def _words(form: Any) -> str:
    """Return what a value of a type must be, in words; empty: its parts have their own."""
    if form is NoneType:
        return "null"
    asked = [item for item in get_args(form)[1:] if isinstance(item, Expected)]
    return asked[-1].text if get_origin(form) is Annotated and asked else ""
