"""Writes the tables of docs/migration/flags.md from `hf_actswap.config.flags`.

    PYTHONPATH=. python docs/make_flags.py        # from the repository's root

A test compares the page with what this writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_actswap.config.flags import COUNTERPARTS, Counterpart

PAGE = Path(__file__).resolve().with_name("migration") / "flags.md"
_COMMAND_LINE = "Megatron-LM and MindSpeed-LLM"
_TABLES = re.compile(r"(?<=<!-- tables -->\n).*?(?=<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """Return the page with the tables as they are now."""
    return _TABLES.sub(lambda _: "".join(_sections()), page)


def _sections() -> Iterator[str]:
    for program, rows in COUNTERPARTS.items():
        yield f"\n## {program}\n\n| flag | here |\n|---|---|\n"
        yield "".join(f"| {_name(row, program)} | {_here(row)} |\n" for row in rows if not row.read_with)
    yield "\n"


def _name(row: Counterpart, program: str) -> str:
    flag = f"--{row.flag.replace('_', '-')}" if program == _COMMAND_LINE else row.flag
    value = "" if row.value in ("", "a section") else f" {row.value}"
    beside, wanted = row.beside
    with_it = ""
    if beside and not beside.startswith("!"):
        other = f"--{beside.replace('_', '-')}" if program == _COMMAND_LINE else beside
        with_it = f" with `{' '.join(filter(None, (other, wanted)))}`"
    return f"`{flag}{value}`{with_it}"


def _here(row: Counterpart) -> str:
    if not row.sets:
        return f"no counterpart: {row.words}"
    return f"{row.words} ({', '.join(f'`{key}`' for key in _keys(row.sets))})"


def _keys(sets: Iterable[str]) -> Iterator[str]:
    yield from dict.fromkeys(sets)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
