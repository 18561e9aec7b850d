"""Predicts what others have measured on their GPUs: for each row published, predicted and their ratio.

Usage:
    python benchmarks/published/compare.py                    # no GPU
    python benchmarks/published/compare.py --only fms --out results.json

``rows.yaml`` has the measurements with their sources, ``models.yaml`` the models' sizes. Each row is asked of
``hf-actswap plan --json`` with its options (``plan``); the prediction is that of a step without a plan
(``activations: nothing``) or with each layer checkpointed (``recompute all``). Memory is compared with the
bytes in use (`torch.cuda.max_memory_allocated`), also where a row counts what the allocator has reserved. The
time is that of an optimizer's step, or follows from tokens per second and GPU.

``loss: copied`` takes the loss of transformers before 4.50, which copied the logits in fp32 to shift them;
today's does not. ``loss: tiles`` computes it for some tokens at a time, as Liger's fused loss does. ``other``
says what the measured training did otherwise than these options can say: such a number is shown, and does not
count in median and worst.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml

_COPIED = "--with-copied-logits"
FOLDER = Path(__file__).resolve().parent
GIB = 2**30
MEASURES = "memory", "time"
_HEAD = (
    "| training | GiB: published / predicted | ratio | ms: published / predicted | ratio |",
    "|---|---:|---:|---:|---:|",
)


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Args:
        id: a name for ``--only``.
        source: where it stands, by title and number.
        quote: the sentence or line that has the numbers.
        model: a name in ``models.yaml``.
        plan: options of ``hf-actswap plan``.
        activations: the prediction that it is compared with.
        loss: ``copied``: that of earlier releases; ``tiles``: for some tokens at a time.
        published: ``peak_bytes`` and what it ``counts``; ``step_ms`` or ``tokens_per_s`` of a GPU.
        inferred: what the source does not say, and how it was found.
        other: by measure, what the measured training did that the options cannot say.
    """

    id: str
    source: str
    quote: str
    model: str
    plan: Mapping[str, str | int | bool]
    activations: str
    published: Mapping[str, Any]
    loss: str = ""
    inferred: str = ""
    other: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The training in words."""
        plan = self.plan
        method = f"QLoRA {plan['quantize']}" if "quantize" in plan else "LoRA" if "lora" in plan else "full"
        ranks = f" x {str(plan['shard']).split('=')[1]}" if "shard" in plan else ""
        how = {"nothing": "all kept", "recompute all": "checkpointed"}[self.activations]
        size = f"{plan['batch']} x {plan['seq']}"
        return f"{self.model}, {method}, {size}, {plan['device']}{ranks}, {how}"

    def measured(self) -> dict[str, float]:
        """Return the published bytes and milliseconds, by measure."""
        found = {"memory": self.published.get("peak_bytes"), "time": self.published.get("step_ms")}
        if rate := self.published.get("tokens_per_s"):
            tokens = int(self.plan["seq"]) * int(self.plan["batch"]) * int(self.plan.get("micro-batches", 1))
            found["time"] = 1000 * tokens / rate
        return {measure: float(value) for measure, value in found.items() if value is not None}


@dataclass(frozen=True)
class Compared:
    """What was measured and what is predicted, by measure; ``problem``: why nothing is predicted."""

    row: Row
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    problem: str = ""

    def ratio(self, measure: str) -> float | None:
        """Return predicted to measured, if both are known."""
        if measure not in self.measured or measure not in self.predicted:
            return None
        return self.predicted[measure] / self.measured[measure]


def read_rows() -> list[Row]:
    """Return the rows of ``rows.yaml``."""
    return [Row(**row) for row in yaml.safe_load((FOLDER / "rows.yaml").read_text(encoding="utf-8"))]


def compared(row: Row) -> Compared:
    """Ask ``hf-actswap plan`` about a row."""
    models = yaml.safe_load((FOLDER / "models.yaml").read_text(encoding="utf-8"))
    entry = [__file__, _COPIED] if row.loss == "copied" else ["-m", "hf_actswap.cli"]
    command = [sys.executable, *entry, "plan"]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(json.dumps(models[row.model]), encoding="utf-8")
        command.append(name)
        if row.loss == "tiles":
            command.append(str(Path(name) / "tiles.yaml"))
            Path(command[-1]).write_text("tile_config: {loss: auto}\n", encoding="utf-8")
        options = [f"--{key}" if value is True else f"--{key}={value}" for key, value in row.plan.items()]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        ran = subprocess.run(
            [*command, *options, "--json"], capture_output=True, text=True, check=False, env=env
        )
    found = json.loads(ran.stdout) if ran.stdout else {"problems": ran.stderr[-300:]}
    if "predicted" not in found:
        return Compared(row, row.measured(), {}, json.dumps(found["problems"]))
    step = found["predicted"][row.activations]
    return Compared(row, row.measured(), {"memory": step["peak_bytes"], "time": step["step_ms"]})


def run_with_copied_logits() -> None:
    """Run the command line with the loss function of transformers 4.49 (``loss_utils.py``)."""
    from torch.nn.functional import cross_entropy
    from transformers.loss import loss_utils

    from hf_actswap.cli.app import main as command_line

    def loss(logits: Any, labels: Any, vocab_size: int, **_: Any) -> Any:
        logits = logits.float()  # which stays until the loss is known
        shifted = logits[..., :-1, :].contiguous()
        return cross_entropy(shifted.view(-1, vocab_size), labels[..., 1:].contiguous().view(-1))

    loss_utils.LOSS_MAPPING["ForCausalLM"] = loss
    sys.argv = ["hf-actswap", *sys.argv[2:]]
    command_line()


def line(one: Compared) -> str:
    """Return a row of a table."""
    cells = [one.row.title]
    for measure, scale, digits in (("memory", GIB, 2), ("time", 1, 0)):
        if (ratio := one.ratio(measure)) is None:
            cells += ["", ""]
        else:
            both = (values[measure] / scale for values in (one.measured, one.predicted))
            mark = "\\*" if measure in one.row.other else ""
            cells += [" / ".join(f"{value:,.{digits}f}" for value in both), f"{ratio:.3f}{mark}"]
    return f"| {' | '.join(cells)} |"


def tables(found: Sequence[Compared]) -> tuple[list[str], list[str]]:
    """Return the lines of two tables: what the options describe wholly; the rest, by what was otherwise."""
    groups: dict[str, list[Compared]] = {"": []}
    for one in found:
        why = one.problem or "; ".join(dict.fromkeys(one.row.other.values()))
        groups.setdefault(why, []).append(one)
    described = [*_HEAD, *map(line, groups.pop(""))]
    rest = [*_HEAD]
    for why, members in groups.items():
        rest += [f"| **{why[0].upper()}{why[1:]}** | | | | |", *map(line, members)]
    return described, rest


def errors(found: Sequence[Compared]) -> Iterator[tuple[str, int, float, float, str]]:
    """Yield, for each measure, how far the predictions are off where the options say everything.

    The number of rows, the median and the largest share, and the name of the row that has that.
    """
    for measure in MEASURES:
        counted = [one for one in found if measure not in one.row.other and one.ratio(measure) is not None]
        off = sorted((abs((one.ratio(measure) or 0) - 1), one.row.id) for one in counted)
        if off:
            yield measure, len(off), median(share for share, _ in off), *off[-1]


def summary(found: Sequence[Compared]) -> Iterator[str]:
    """Yield a line for each measure: its `errors`."""
    for measure, count, middle, worst, name in errors(found):
        yield f"{measure}: {count} rows, median {middle:.1%}, worst {worst:.1%} ({name})"


def main() -> None:
    """Compare the rows, print them, and write them."""
    if sys.argv[1:2] == [_COPIED]:
        run_with_copied_logits()
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of rows' names, one of which is in it")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    given = parser.parse_args()
    rows = [row for row in read_rows() if not given.only or any(part in row.id for part in given.only)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(compared, rows))
    described, rest = tables(found)
    print("\n".join((*described, "", *rest, "", *summary(found))))
    if given.out:
        given.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
