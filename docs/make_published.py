"""Writes the tables of published.md: predictions beside what others have measured, as recorded.

    python benchmarks/published/compare.py --out benchmarks/results/published_20261130.json
    python docs/make_published.py

What lies between two markers of the page is replaced.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "published.md"
sys.path.insert(0, str(ROOT))

from benchmarks.published.compare import Compared, errors, read_rows, tables  # noqa: E402 - not installed

RESULTS = ROOT / "benchmarks" / "results" / "published_20261130.json"
_BLOCK = re.compile(r"(<!-- by docs/make_published.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_MEASURES = {"memory": "peak memory", "time": "time of a step"}


def recorded() -> list[Compared]:
    """Return the recorded comparisons, with the rows as they are now."""
    rows = {row.id: row for row in read_rows()}
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    return [
        Compared(rows[one["row"]["id"]], one["measured"], one["predicted"], one["problem"]) for one in found
    ]


def blocks(found: list[Compared]) -> Mapping[str, str]:
    """Return the text of each block: how far off all are, rows that count, and rows that do not."""
    described, rest = tables(found)
    texts = {"summary": _summary(found), "described": described, "rest": rest}
    return {name: "\n".join(lines) for name, lines in texts.items()}


def page(text: str, found: list[Compared]) -> str:
    """Return the page with its blocks written anew."""
    new = blocks(found)
    return _BLOCK.sub(lambda match: f"{match[1]}{new[match[2]]}\n{match[3]}", text)


def _summary(found: list[Compared]) -> Iterator[str]:
    yield "| | rows that the options describe | median error | worst |"
    yield "|---|---:|---:|---:|"
    for measure, count, middle, worst, _ in errors(found):
        yield f"| {_MEASURES[measure]} | {count} | {middle:.1%} | {worst:.1%} |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), recorded()), encoding="utf-8")
