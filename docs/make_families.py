"""Writes docs/families.md: what was found of each family of transformers, in one process and divided.

    PYTHONPATH=. python docs/make_families.py        # from the repository's root; half an hour on two cores

The slow test of ``tests/parallel/test_families.py`` finds the same and compares.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap

PAGE = Path(__file__).resolve().with_name("families.md")
COLUMNS = ("swap", "recompute", "tiles", "loss", "stream", "tp2", "tp2 sp", "tp4", "tp4 sp")
_DIVIDED = "tp2"
"""The column whose finding says how much of the layers is divided."""

RIGHT_IN_ALL = "### Right in all columns"
RIGHT_BUT_STREAM = "### Right in all columns but `stream`, where they are rejected"
NOT_RIGHT_IN_ALL = "### The others"
WIDTH = 120

Findings = Mapping[str, Mapping[str, tuple[str, str]]]

_ITS_CLASS = re.compile(r"\w+(?:ForCausalLM|LMHeadModel), whose class|(?<=none) in \w+$")
"""A model's own class in a reason that families share."""

_HEAD = """\
# Families of transformers

For which models swap, recompute, tiles, streams and tensor parallelism are right. Search for your model's
`model_type` (in its `config.json`). `docs/make_families.py` writes this page, and
`tests/parallel/test_families.py` checks it; transformers {version}.

A tiny model of each family of causal language models (random weights, float32, just enough layers to have
one of each kind) takes one training step on two sequences, one of them with padding.

| column | what runs | *right* |
| --- | --- | --- |
| swap, recompute | whole layers are swapped, or recomputed | bitwise as without a plan |
| tiles | modules that treat tokens one by one: 17 tokens in tiles of 5 (`tile_config.tile`) | (1) |
| loss | head and loss in tiles (`tile_config.loss`) | (1) |
| stream | 17 tokens in chunks of 5 (`stream_config`), without padding and balancing losses | (1) |
| tp2, tp4 | `tensor_parallel_size` 2, 4 (4 query heads, mostly 2 key-value heads) | (2) |
| sp | with `sequence_parallel_enabled`, {length} tokens: a number that the ranks do not divide | (2) |

1. The loss is within 1e-5 of the step without it, and each gradient within 1e-4 (relative, in norm).
2. The loss is within 1e-5, and each gradient within 1e-4 of its largest element (or of a thousandth of the
   model's largest). Replicas are bitwise equal on all ranks. A state dict that is saved whole, loaded into a
   divided model with other weights and saved again is bitwise the same.

*Rejected*: an error before the first step says why ([reasons](#rejections)). *Whole* (`loss`): right, but
the logits are not in tiles, and the log says why. The percentage is the share of the layers' parameters that
the ranks divide. Every rank has the rest whole: norms, routers, low-rank projections before the divided
ones, and blocks that all ranks compute alike (state-space mixers).
"""


def page_of(found: Findings, not_tested: Mapping[str, str], **facts: object) -> str:
    """Return the page.

    Args:
        found: family -> column -> what was found ("right", "rejected", "whole", "wrong") and why.
        not_tested: family -> why nothing was found of it.
        facts: ``version`` of transformers, ``length`` of an odd sequence.
    """
    counts = {column: Counter(ways[column][0] for ways in found.values()) for column in COLUMNS}
    statuses = sorted({status for count in counts.values() for status in count}, reverse=True)
    lines = [
        _HEAD.format(**facts),
        f"## {len(found)} families",
        "",
        _row("", *COLUMNS),
        _row("---", *["---:"] * len(COLUMNS)),
    ]
    lines += [_row(status, *(str(counts[column][status]) for column in COLUMNS)) for status in statuses]
    others = dict(found)
    for heading, but in ((RIGHT_IN_ALL, ""), (RIGHT_BUT_STREAM, "stream")):
        expected = {column: "rejected" if column == but else "right" for column in COLUMNS}
        alike = {
            family: ways
            for family, ways in others.items()
            if {column: ways[column][0] for column in COLUMNS} == expected
        }
        others = {family: ways for family, ways in others.items() if family not in alike}
        names = [f"`{family}` {_share(ways)}" for family, ways in sorted(alike.items())]
        lines += ["", f"{heading}: {len(alike)}", "", *wrap(", ".join(names), WIDTH, break_on_hyphens=False)]
    lines += ["", f"{NOT_RIGHT_IN_ALL}: {len(others)}", ""]
    lines += [_row("family", *COLUMNS, "divided"), _row("---", *["---"] * len(COLUMNS), "---:")]
    for family, ways in sorted(others.items()):
        lines.append(_row(f"`{family}`", *(ways[column][0] for column in COLUMNS), _share(ways)))
    lines += ["", "## Rejections", "", "What is expected of a model, and after the colon what was found:", ""]
    reasons: dict[str, dict[str, list[str]]] = {}
    for family, ways in sorted(found.items()):
        for column in COLUMNS:
            status, why = ways[column]
            if status != "right":
                shared = _ITS_CLASS.sub(lambda named: "its class" if "whose" in named[0] else "", why)
                reasons.setdefault(shared, {}).setdefault(family, []).append(column)
    for why, families in sorted(reasons.items()):
        columns = {", ".join(columns) for columns in families.values()}
        if len(columns) == 1:
            of = f"{', '.join(f'`{family}`' for family in families)} ({columns.pop()})"
        else:
            of = "; ".join(f"`{family}` ({', '.join(columns)})" for family, columns in families.items())
        lines += wrap(f"- {why}: {of}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    lines += ["", "## Not tested", ""]
    untested: dict[str, list[str]] = {}
    for family, why in sorted(not_tested.items()):
        untested.setdefault(why, []).append(f"`{family}`")
    lines += [f"- {', '.join(families)}: {why}" for why, families in untested.items()]
    return "\n".join(lines) + "\n"


def cells_of(page: str) -> dict[str, dict[str, str]]:
    """Return family -> column -> what the page shows."""
    shown: dict[str, dict[str, str]] = {}
    for heading, stream in ((RIGHT_IN_ALL, "right"), (RIGHT_BUT_STREAM, "rejected")):
        names = page.partition(heading)[2].strip().split("\n\n")[1]
        alike = {**dict.fromkeys(COLUMNS, "right"), "stream": stream}
        shown |= {family: dict(alike) for family in re.findall(r"`([^`]+)`", names)}
    table = page.partition(NOT_RIGHT_IN_ALL)[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    shown |= {
        row[0].strip("`"): dict(zip(COLUMNS, row[1:], strict=False)) for row in rows if row[0].startswith("`")
    }
    return shown


def _share(ways: Mapping[str, tuple[str, str]]) -> str:
    """What the ranks divide, without a space: one word of a list."""
    status, share = ways[_DIVIDED]
    return share.replace(" ", "") if status == "right" else ""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    from tests.parallel.family_worker import everything, page

    with tempfile.TemporaryDirectory() as temporary:
        PAGE.write_text(page(everything(Path(temporary), limit_s=3000)), encoding="utf-8")
