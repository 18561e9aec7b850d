"""Writes docs/families.md: what was found of each family of transformers, in one process and divided.

    PYTHONPATH=. python docs/make_families.py        # from the repository's root; half an hour on two cores

The slow test of ``tests/parallel/test_families.py`` finds the same and compares.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().with_name("families.md")
COLUMNS = ("swap", "recompute", "tiles", "loss", "stream", "tp2", "tp2 sp", "tp4", "tp4 sp")
_DIVIDED = "tp2"
"""The column whose finding says how much of the layers is divided."""

Findings = Mapping[str, Mapping[str, tuple[str, str]]]

_HEAD = """\
# Families of transformers

This page says for which model families swap, recompute, tiles, streams and tensor parallelism are right.
Look for the `model_type` in your model's `config.json`. The page is written by `docs/make_families.py` and
checked by `tests/parallel/test_families.py`; transformers {version}. The test takes a tiny model of each
family of causal language models in transformers (random weights, float32, just enough layers to have one of
each kind) and runs one training step on two sequences, one of them with padding:

- **swap**, **recompute**: one process; whole layers are swapped, or recomputed. *Right*: the loss and each
  gradient are bitwise those without a plan.
- **tiles**: one process, two sequences of 17 tokens. All modules of layers that treat tokens one by one run
  in tiles of 5 tokens (`tile_config.tile`); **loss**: head and loss do (`tile_config.loss`). *Right*: the
  loss is within 1e-5 and each gradient within 1e-4 of those without tiles (relative, in norm). *Whole*:
  right, but the logits are not in tiles, and a line in the log says why.
- **stream**: one process, 17 tokens in chunks of 5 (`stream_config`), without padding and balancing losses.
  *Right*: the same tolerances, against the whole sequence.
- **tp2**, **tp4**: `tensor_parallel_size` 2 and 4 (4 query heads, mostly 2 key-value heads); **sp**:
  `sequence_parallel_enabled`, on {length} tokens, a number that the ranks do not divide. *Right*:
  the loss is within 1e-5, and each gradient within 1e-4 of its largest element (or of a thousandth of the
  model's largest); replicas are bitwise equal on all ranks; a state dict that is saved whole, loaded into a
  divided model with other weights and saved again is bitwise the same.
- **divided**: the share of the layers' parameters that the ranks divide. Every rank has the rest whole:
  norms, routers, low-rank projections before the divided ones, and blocks that all ranks compute alike
  (state-space mixers).

*Rejected*: an error before the first step says why; the reasons are below the table.
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
    lines += ["", _row("family", *COLUMNS, "divided"), _row("---", *["---"] * len(COLUMNS), "---:")]
    for family, ways in sorted(found.items()):
        divided = ways[_DIVIDED][1] if ways[_DIVIDED][0] == "right" else ""
        lines.append(_row(f"`{family}`", *(ways[column][0] for column in COLUMNS), divided))
    lines += ["", "## Rejections", "", "What is expected of a model, and after the colon what was found:", ""]
    reasons: dict[str, dict[str, list[str]]] = {}
    for family, ways in sorted(found.items()):
        for column in COLUMNS:
            status, why = ways[column]
            if status != "right":
                reasons.setdefault(why, {}).setdefault(family, []).append(column)
    for why, families in sorted(reasons.items()):
        of = "; ".join(f"`{family}` ({', '.join(columns)})" for family, columns in families.items())
        lines.append(f"- {of}: {why}")
    lines += ["", "## Not tested", ""]
    untested: dict[str, list[str]] = {}
    for family, why in sorted(not_tested.items()):
        untested.setdefault(why, []).append(f"`{family}`")
    lines += [f"- {', '.join(families)}: {why}" for why, families in untested.items()]
    return "\n".join(lines) + "\n"


def cells_of(page: str) -> dict[str, dict[str, str]]:
    """Return family -> column -> what the page shows."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    return {
        row[0].strip("`"): dict(zip(COLUMNS, row[1:], strict=False)) for row in rows if row[0].startswith("`")
    }


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    from tests.parallel.family_worker import everything, page

    with tempfile.TemporaryDirectory() as temporary:
        PAGE.write_text(page(everything(Path(temporary), limit_s=3000)), encoding="utf-8")
