"""Communication and memory of a rank beside transformers' own tensor parallelism.

    OMP_NUM_THREADS=1 python benchmarks/parallel_peer.py
    OMP_NUM_THREADS=1 python benchmarks/parallel_peer.py --dtypes float32 --rounds 20 --out mine.json

The same Llama, with the same weights and ids, in one launch of two gloo processes: divided by transformers
(``from_pretrained`` with its ``tp_plan``) and by `patch_model`, with and without sequence parallelism. A row
counts a step of one rank (`parallel_counts` says how) and holds the median of its time, steps of different
rows alternating. Loss and gradient norm must agree before anything is compared.

Two claims are judged, for rows that sum over the ranks in the dtype in which transformers does: ours saves
fewer bytes for backward, and sends at most as many, re-gathers apart. If one fails the exit status is 1. Time
is recorded, not judged: on a CPU, processes of one machine communicate through its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.parallel_peer_cases import BFLOAT16_REDUCTION, PEER, RANKS, Shape, run_on_rank
from benchmarks.records import commit, hardware, versions

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative, of loss and gradient norm."""
MIB = 2**20

Rows = Sequence[Mapping[str, Any]]


def measure(
    shape: Shape, dtypes: Sequence[str], rounds: int, warmup: int, limit_s: float
) -> list[dict[str, Any]]:
    """Run all cases on two processes; return the rows of rank 0, then those of rank 1.

    Raises:
        TimeoutError: the processes did not finish in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = (folder, asdict(shape), tuple(dtypes), rounds, warmup)
        context = torch.multiprocessing.spawn(run_on_rank, told, nprocs=RANKS, join=False)
        end = monotonic() + limit_s
        while not context.join(timeout=1):
            if monotonic() > end:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{RANKS} processes did not finish in {limit_s} s")
        return [row for rank in range(RANKS) for row in torch.load(Path(folder, f"rows.{rank}.pt"))]


def failures(rows: Rows) -> list[str]:
    """Return in words what does not agree or is not as claimed; nothing, it is to be hoped."""
    found = []
    for peer in (row for row in rows if row["case"] == PEER):
        for row in rows:
            if row is peer or (row["dtype"], row["rank"]) != (peer["dtype"], peer["rank"]):
                continue
            where = f"{row['case']}, {row['dtype']}, rank {row['rank']}"
            for key in ("loss", "grad_norm"):
                if abs(row[key] - peer[key]) > TOLERANCE[row["dtype"]] * abs(peer[key]):
                    found.append(f"{where}: {key} {row[key]}, transformers' {peer[key]}")
            if row["saved_bytes"] >= peer["saved_bytes"]:
                found.append(f"{where}: saves {row['saved_bytes']} bytes, transformers {peer['saved_bytes']}")
            comparable = row["dtype"] == "float32" or row["case"].endswith(BFLOAT16_REDUCTION)
            if comparable and row["sent_bytes"] > peer["sent_bytes"]:
                found.append(f"{where}: sends {row['sent_bytes']} bytes, transformers {peer['sent_bytes']}")
    return found


def table(rows: Rows) -> str:
    """Return rank 0's rows as text."""
    lines = [
        f"{'MiB per rank and step':38}{'saved':>8}{'peak':>8}{'logits':>8}{'grads':>8}{'calls':>7}{'sent':>8}"
        f"{'again':>8}{'ms':>8}{'ratio':>7}"
    ]
    for row in (row for row in rows if row["rank"] == 0):
        sizes = [row[f"{key}_bytes"] / MIB for key in ("saved", "peak", "peak_logits", "gradient")]
        sent = [row[f"{key}_bytes"] / MIB for key in ("sent", "regathered")]
        lines.append(
            f"{row['dtype'] + ' ' + row['case']:38}"
            + "".join(f"{size:>8.1f}" for size in sizes)
            + f"{sum(row['calls'].values()):>7}"
            + "".join(f"{size:>8.2f}" for size in sent)
            + f"{row['ms']:>8.0f}{row['ms_ratio']:>7.2f}"
        )
    return "\n".join(lines)


def kinds_table(rows: Rows) -> str:
    """Return rank 0's collectives by phase and kind: calls, and MiB on the larger side."""
    lines = []
    for row in (row for row in rows if row["rank"] == 0):
        parts = [
            f"{key} {calls} ({row['whole_bytes'][key] / MIB:.2f})" for key, calls in row["calls"].items()
        ]
        lines.append(f"{row['dtype']} {row['case']}: {'; '.join(parts)}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the results; return the exit status."""
    parser = argparse.ArgumentParser(description="A rank's bytes beside transformers' own tp_plan.")
    parser.add_argument("--dtypes", nargs="+", choices=list(TOLERANCE), default=list(TOLERANCE))
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each row")
    parser.add_argument("--warmup", type=int, default=2, help="steps before")
    parser.add_argument("--limit_s", type=float, default=900)
    for field in fields(Shape):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--out", type=Path, help="where to write; by default into results/")
    options = parser.parse_args(argv)
    shape = replace(Shape(), **{field.name: getattr(options, field.name) for field in fields(Shape)})
    rows = measure(shape, options.dtypes, options.rounds, options.warmup, options.limit_s)
    wrong = failures(rows)
    document = {
        "commit": commit(REPOSITORY),
        "versions": versions(),
        "hardware": {**hardware(torch.device("cpu")), "threads": 1},
        "load": os.getloadavg()[0],
        "ranks": RANKS,
        "shape": asdict(shape),
        "failures": wrong,
        "rows": rows,
    }
    path = options.out or RESULTS / f"parallel_peer_cpu_{datetime.now():%Y%m%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{table(rows)}\n\n{kinds_table(rows)}\n")
    sys.stdout.write("".join(f"failed: {text}\n" for text in wrong) or "both claims hold\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
