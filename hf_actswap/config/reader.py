"""Reads single values of a document, and collects every problem found on the way.

A reader takes a `Findings`, the path of a value and the value; it returns the value in the form of the
schema, or ``None`` after it has noted a problem. ``None`` is never a valid result of a reader.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..errors import Problem, nearest
from .keys import unknown_key_hint

Path = tuple[str | int, ...]
"""Keys and list indices from the top of the document to a value."""

SHOWN_CHARACTERS = 60
_SHOWN_ITEMS = 8
_SHOWN_DEPTH = 4
_LARGEST_INT = 2**63 - 1
_MAX_KEY_HINTS = 50

EXPECTED_BOOL = "true or false"


class Findings:
    """Problems and notes about one document, given back in the order of the document.

    Args:
        document: the mapping that is read; it is never changed.
    """

    def __init__(self, document: Mapping[Any, Any]) -> None:
        self.document = document
        self._problems: list[tuple[Path, Problem]] = []
        self._notes: list[tuple[Path, str]] = []
        self._places: dict[int, dict[Any, int]] = {}
        self._key_hints = 0
        self._above: Path = ()

    def problem(self, path: Path, expected: str, found: str, hint: str = "") -> None:
        """Note a fault of the value at ``path``."""
        path = (*self._above, *path)
        self._problems.append((path, Problem(where(path), expected, found, hint)))

    def inside(self, path: Path, document: Mapping[Any, Any]) -> Findings:
        """Return the findings about a document within this one; what is found there is found here too."""
        inner = Findings(document)
        inner._problems, inner._notes, inner._above = self._problems, self._notes, (*self._above, *path)
        return inner

    def key_hint(self, key: object, ours: Sequence[str], also: Sequence[str] = ()) -> str:
        """Return `unknown_key_hint` for the first keys, then ``""``: thousands of searches take seconds."""
        self._key_hints += 1
        return unknown_key_hint(key, ours, also) if self._key_hints <= _MAX_KEY_HINTS else ""

    def note(self, path: Path, line: str) -> None:
        """Note one line about a value that was accepted."""
        self._notes.append(((*self._above, *path), line))

    def problems(self) -> tuple[Problem, ...]:
        """Return all problems, in the order of the document."""
        return tuple(
            problem for _, problem in sorted(self._problems, key=lambda item: self.position(item[0]))
        )

    def notes(self) -> tuple[str, ...]:
        """Return all notes, in the order of the document."""
        return tuple(line for _, line in sorted(self._notes, key=lambda item: self.position(item[0])))

    def any_below(self, *sections: str) -> bool:
        """Whether there is a problem in one of these sections."""
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


def is_int(value: object) -> bool:
    """Whether a value is a number without a fraction that fits in 64 bits; a bool is not one."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST_INT


def read_section(
    findings: Findings, name: str, valid: Sequence[str], ignored: Collection[str] = ()
) -> Mapping[Any, Any]:
    """Return one of our sections; empty if it is absent, null or no mapping. Unknown keys are problems."""
    value = read_mapping(findings, (name,), findings.document.get(name))
    check_keys(findings, (name,), value, valid, ignored)
    return value


def read_mapping(findings: Findings, path: Path, value: object) -> Mapping[Any, Any]:
    """Read a mapping; empty if the value is null, or, with a problem, anything else."""
    if isinstance(value, Mapping):
        return value
    if value is not None:
        findings.problem(path, "a mapping", show(value))
    return {}


def check_keys(
    findings: Findings,
    path: Path,
    mapping: Mapping[Any, Any],
    valid: Sequence[str],
    ignored: Collection[str] = (),
) -> None:
    """Note a problem for every key of ``mapping`` that is in neither ``valid`` nor ``ignored``."""
    for key in mapping:
        if key not in valid and key not in ignored:
            hint = findings.key_hint(key, valid, sorted(ignored))
            if isinstance(key, str | int):
                findings.problem((*path, key), f"a key of `{where(path)}`", "an unknown key", hint)
            else:
                findings.problem(path, "keys that are text", f"the key {show(key)}", hint)


def read_bool(findings: Findings, path: Path, value: object) -> bool | None:
    """Read a bool; a text or a number that looks like one is a problem."""
    if isinstance(value, bool):
        return value
    findings.problem(path, EXPECTED_BOOL, show(value), _unquote_hint(value))
    return None


def read_int(findings: Findings, path: Path, value: object, *, minimum: int | None = None) -> int | None:
    """Read a number without a fraction, at least ``minimum``."""
    if isinstance(value, int) and is_int(value) and (minimum is None or value >= minimum):
        return value
    expected = "a whole number" if minimum is None else f"a whole number, at least {minimum}"
    findings.problem(path, expected, show(value))
    return None


def read_positive(findings: Findings, path: Path, value: object, hint: str = "") -> float | None:
    """Read a finite number above 0; ``hint`` says what to write in place of anything else."""
    if (is_int(value) or isinstance(value, float)) and isinstance(value, int | float):
        number = float(value)
        if math.isfinite(number) and number > 0:
            return number
    findings.problem(path, "a number above 0", show(value), hint)
    return None


def read_not_negative(findings: Findings, path: Path, value: object) -> float | None:
    """Read a finite number, at least 0."""
    if (is_int(value) or isinstance(value, float)) and isinstance(value, int | float):
        number = float(value)
        if math.isfinite(number) and number >= 0:
            return abs(number)  # no minus before a zero
    findings.problem(path, "a number, at least 0", show(value))
    return None


def read_choice(findings: Findings, path: Path, value: object, choices: Sequence[str]) -> str | None:
    """Read one of a few words."""
    if isinstance(value, str) and value in choices:
        return value
    hint = nearest(value, choices) if isinstance(value, str) else ""
    # The words are listed as expected already: only a near one is worth a second mention.
    expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
    findings.problem(path, expected, show(value), hint if hint.startswith("Did") else "")
    return None


def read_text(findings: Findings, path: Path, value: object) -> str | None:
    """Read a text that is not empty."""
    if isinstance(value, str) and value:
        return value
    findings.problem(path, "a text", "an empty text" if isinstance(value, str) else show(value))
    return None


def read_items(
    findings: Findings,
    path: Path,
    items: Sequence[object],
    read_item: Callable[[Findings, Path, object], Any],
) -> tuple[Any, ...] | None:
    """Read every item of a list, so that each bad one is named; ``None`` if one is."""
    read = [read_item(findings, (*path, index), item) for index, item in enumerate(items)]
    return None if any(item is None for item in read) else tuple(read)


def _unquote_hint(value: object) -> str:
    if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
        return f"Write it without quotes: {'true' if value.lower() in ('true', 'yes', 'on') else 'false'}."
    return ""
