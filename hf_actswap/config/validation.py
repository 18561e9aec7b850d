"""Checks values with pydantic, and says what it rejects as `Problem`s: where, expected, found, what to do.

Types state their conditions as pydantic does; `Expected` adds the words for people. `Findings` collects the
problems of one document.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AllowInfNan, Field, GetCoreSchemaHandler, Strict, TypeAdapter, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from ..errors import Problem, nearest

Path = tuple[str | int, ...]
"""Keys and list indices from the top of the document to a value."""

SHOWN_CHARACTERS = 60
_SHOWN_ITEMS = 8
_SHOWN_DEPTH = 4
_LARGEST_INT = 2**63 - 1
_MAX_KEY_HINTS = 50

NOTHING = object()
"""Stands for a value that is missing."""

Fault = tuple[Path, str, str, str]
"""Path in a value, what was expected there, what was found, and a hint."""


def rejected(value: object, *faults: Fault, again: ValidationError | None = None) -> ValidationError:
    """Return an error for a validator to raise, with the faults of parts (``again``) that pydantic found."""
    lines = [
        InitErrorDetails(type=_fault("fault", expected, found, hint), loc=path, input=value)
        for path, expected, found, hint in faults
    ]
    return _error([*(lines_of(again) if again is not None else ()), *lines])


def _fault(kind: str, expected: str, found: str, hint: str) -> PydanticCustomError:
    facts = {"expected": expected, "found": found, "hint": hint}
    # Halves of surrogate pairs cannot cross into pydantic.
    plain = {name: text.encode("utf-8", "backslashreplace").decode() for name, text in facts.items()}
    return PydanticCustomError(kind, "{expected}", plain)


def _error(lines: list[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data("document", lines)


def lines_of(error: ValidationError, tags: int = 0) -> list[InitErrorDetails]:
    """Return the faults of parts of a value, and those that a validator named, to be raised again.

    ``tags``: how many steps at the head of each path are not the value's own.
    """
    return [
        InitErrorDetails(
            type=PydanticCustomError(line["type"], "{expected}", line["ctx"]),
            loc=line["loc"][tags:],
            input=line["input"],
        )
        for line in error.errors(include_url=False)
        if line["type"] == "fault" or (line["type"] == "expected" and line["loc"][tags:])
    ]


def _found(value: object) -> str:
    empty = isinstance(value, str | list | tuple) and not value
    return f"an empty {'text' if isinstance(value, str) else 'list'}" if empty else show(value)


@dataclass(frozen=True)
class Expected:
    """What a value must be, in words: the message for whatever its type rejects.

    What is wrong with an item of a list, and what a validator said by `rejected`, keeps its own words.
    ``hint`` takes the rejected value, and returns what to do about it; may be empty.
    """

    text: str
    hint: Callable[[Any], str] = lambda _value: ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        branches = [item for item in get_args(source) if item is not NoneType]
        # In a path pydantic names the branch of a union first.
        tags = 1 if get_origin(source) in (Union, UnionType) and len(branches) > 1 else 0

        def check(value: Any, of_type: Callable[[Any], Any]) -> Any:
            try:
                return of_type(value)
            except ValidationError as error:
                lines = lines_of(error, tags)
            own = _fault("expected", self.text, _found(value), self.hint(value))
            raise _error(lines or [InitErrorDetails(type=own, loc=(), input=value)]) from None

        return core_schema.no_info_wrap_validator_function(check, handler(source))


def _unquote_hint(value: object) -> str:
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return f"Write it without quotes: {'true' if value.lower() in ('true', 'yes', 'on') else 'false'}."
    return ""


def one_of(*words: str) -> Expected:
    """Return the words for a choice; only a near word is worth a hint, because all are listed."""

    def hint(value: Any) -> str:
        near = nearest(value, words) if isinstance(value, str) else ""
        return near if near.startswith("Did") else ""

    return Expected(f"{', '.join(words[:-1])} or {words[-1]}", hint)


AnyInt = Annotated[int, Strict(), Field(ge=-_LARGEST_INT, le=_LARGEST_INT)]
"""A number without a fraction that fits in 64 bits; a bool is not one."""

AnyFloat = Annotated[float, Strict(), AllowInfNan(False)]
Flag = Annotated[bool, Strict(), Expected("true or false", _unquote_hint)]
Whole = Annotated[AnyInt, Expected("a whole number")]
AtLeast1 = Annotated[AnyInt, Field(ge=1), Expected("a whole number, at least 1")]


def unknown_key_hint(
    name: str, valid: Sequence[str], also: Sequence[str], homes: Mapping[str, Collection[str]]
) -> str:
    """Return a hint for an unknown key: its section in ``homes``, else the nearest valid name, else all.

    ``also``: further names that are accepted there.
    """
    home = next((section for section, keys in homes.items() if name in keys), None)
    if home is not None:
        return f"It is a key of `{home}`: write it below that line."
    hint = nearest(name, [*valid, *also])
    return hint if hint.startswith("Did you mean") else nearest(name, valid)


_TUPLE = re.compile(r"\s*\(([^(),]*,[^()]*)\)\s*")
_NO_OFF = "This key cannot be off; leave it out for its default."


class Findings:
    """Problems and notes about one document, given back in the order of the document.

    ``homes``: section -> keys that it may hold, for hints about keys that stand elsewhere.
    """

    def __init__(
        self, document: Mapping[Any, Any], homes: Mapping[str, Collection[str]] | None = None
    ) -> None:
        self.document = document
        self._homes = homes or {}
        self._problems: list[tuple[Path, Problem]] = []
        self._notes: list[tuple[Path, str]] = []
        self._places: dict[int, dict[Any, int]] = {}
        self._key_hints = 0
        self._above: Path = ()

    def problem(self, path: Path, expected: str, found: str, hint: str = "") -> None:
        path = (*self._above, *path)
        self._problems.append((path, Problem(where(path), expected, found, hint)))

    def note(self, path: Path, line: str) -> None:
        self._notes.append(((*self._above, *path), line))

    def inside(self, path: Path, document: Mapping[Any, Any]) -> Findings:
        """Return the findings about a document within this one; what is found there is found here too."""
        inner = Findings(document, self._homes)
        inner._problems, inner._notes, inner._above = self._problems, self._notes, (*self._above, *path)
        return inner

    def read(self, adapter: TypeAdapter[Any], path: Path, value: Any, context: Any = None) -> Any:
        """Return a value as its type; ``None`` after its problems have been noted.

        A word for off (`is_off_word`) is the type's own: false, no value, ``off`` or ``keep``.
        """
        off = is_off_word(value)
        if off:
            value = self._off(adapter, value, context)
        try:
            return adapter.validate_python(value, context=context)
        except ValidationError as error:
            for at, expected, found, hint in faults_of(error):
                self.problem((*path, *at), expected, found, hint or (_NO_OFF if off else ""))
            return None

    def mapping(self, path: Path, value: object) -> Mapping[Any, Any]:
        """Return a mapping; an empty one if the value is null or, with a problem, anything else."""
        if isinstance(value, Mapping):
            return value
        if value is not None and not is_off_word(value):
            self.problem(path, "a mapping", show(value))
        return {}

    def keys(
        self,
        path: Path,
        value: object,
        types: Mapping[str, TypeAdapter[Any]],
        context: Any = None,
        *,
        null: Collection[str] = (),
        also: Sequence[str] = (),
        ignored: Collection[str] = (),
    ) -> dict[str, Any]:
        """Read a mapping (or ``None``) key by key; what is returned lacks the keys that could not be read.

        Args:
            path: path of the mapping.
            value: the mapping, or ``None``.
            types: the type of each key.
            context: context for the validators.
            null: keys that count as not written where they are null.
            also: further valid keys, which the caller reads.
            ignored: other keys that are no problem.
        """
        mapping, found, valid = self.mapping(path, value), {}, [*types, *also]
        for key, item in mapping.items():
            if key in types and not (item is None and key in null):
                made = self.read(types[key], (*path, key), item, context)
                if made is not None:
                    found[key] = made
            elif key not in valid and key not in ignored:
                self.unknown_key(path, key, f"a key of `{where(path)}`", valid, sorted(ignored))
        return found

    @staticmethod
    def _off(adapter: TypeAdapter[Any], value: object, context: Any) -> object:
        """Return the word by which a type says off; ``value``, if it has none."""
        for word in (False, None, "off", "keep"):
            try:
                read = adapter.validate_python(word, context=context)
            except ValidationError:
                continue
            if word in (False, None) or read == word:  # else any text is a name there
                return word
        return value

    def unknown_key(
        self, path: Path, key: object, expected: str, valid: Sequence[str], also: Sequence[str] = ()
    ) -> None:
        """Note a key that is not valid; the first have hints, because thousands of searches take seconds."""
        self._key_hints += 1
        named = self._key_hints <= _MAX_KEY_HINTS
        hint = unknown_key_hint(str(key), valid, also, self._homes) if named else ""
        if isinstance(key, str | int):
            self.problem((*path, key), expected, "an unknown key", hint)
        else:
            self.problem(path, expected if not path else "keys that are text", f"the key {show(key)}", hint)

    def problems(self) -> tuple[Problem, ...]:
        return self._in_order(self._problems)

    def notes(self) -> tuple[str, ...]:
        return self._in_order(self._notes)

    def _in_order(self, found: Sequence[tuple[Path, Any]]) -> tuple[Any, ...]:
        return tuple(item for _, item in sorted(found, key=lambda item: self.position(item[0])))

    def any_below(self, *sections: str) -> bool:
        return any(path[:1] == (section,) for path, _ in self._problems for section in sections)

    def position(self, path: Path) -> tuple[float, ...]:
        """Return where ``path`` is in the document, as a sort key; a missing key comes after all others."""
        position: list[float] = []
        value: Any = self.document
        for step in path:
            if isinstance(value, Mapping) and step in value:
                position.append(self._place(value, step))
                value = value[step]
            elif isinstance(value, list | tuple) and isinstance(step, int) and step < len(value):
                position.append(step)
                value = value[step]
            else:
                position.append(math.inf)
                break
        return tuple(position)

    def _place(self, mapping: Mapping[Any, Any], key: str | int) -> int:
        places = self._places.get(id(mapping))
        if places is None:
            places = {name: place for place, name in enumerate(mapping)}
            self._places[id(mapping)] = places
        return places[key]


def faults_of(error: ValidationError) -> Iterator[tuple[Path, str, str, str]]:
    """Yield path, what was expected, what was found and a hint, for everything that pydantic rejected."""
    for line in error.errors(include_url=False):
        facts = line.get("ctx", {})
        expected = facts.get("expected", line["msg"])
        hint = tuple_hint(line["input"]) or facts.get("hint", "")
        yield line["loc"], expected, facts.get("found", show(line["input"])), hint


def tuple_hint(value: object) -> str:
    """Return a hint for a tuple of Python, which YAML reads as a text; empty for all else."""
    inside = _TUPLE.fullmatch(value) if isinstance(value, str) else None
    items = [] if inside is None else [item.strip() for item in inside[1].split(",")]
    return "" if inside is None else f"Write a list: [{', '.join(filter(None, items))}]."


def is_off_word(value: object) -> bool:
    """Whether a value says that something is off: ``false``, or one of the texts off, none, no and false."""
    return value is False or (isinstance(value, str) and value.lower() in ("off", "none", "no", "false"))


def where(path: Path) -> str:
    """Write a path as users do: ``swap_config.op_swap[1].layers``; ``document`` for the whole of it."""
    text = ""
    for step in path:
        if isinstance(step, str) and step.isidentifier():
            text += f".{step}" if text else step
        else:
            text += f"[{show(step)}]"
    return text or "document"


def show(value: object, depth: int = 0) -> str:
    """Write a value as the user would recognise it: one line, YAML's words, at most 60 characters."""
    text = _show_whole(value, depth)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _show_whole(value: object, depth: int) -> str:
    if value is NOTHING:
        return "nothing"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return "a number beyond 64 bits" if abs(value) > _LARGEST_INT else str(value)
    if isinstance(value, str):
        head = value[:SHOWN_CHARACTERS]
        return f"'{head}'" if head.isprintable() else repr(head)
    if isinstance(value, list | tuple | Mapping) and depth >= _SHOWN_DEPTH:
        return "..."
    if isinstance(value, list | tuple):
        items = [show(item, depth + 1) for item in value[:_SHOWN_ITEMS]]
        more = ["..."] if len(value) > _SHOWN_ITEMS else []
        return f"[{', '.join(items + more)}]"
    if isinstance(value, Mapping):
        pairs = [
            f"{show(key, depth + 1)}: {show(value[key], depth + 1)}" for key in list(value)[:_SHOWN_ITEMS]
        ]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, float):
        return repr(value)
    return " ".join(f"{type(value).__name__} {value!r}".split())
