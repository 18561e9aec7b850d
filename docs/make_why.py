"""Predicts what the first table and the pictures of README.md show.

    python docs/make_why.py        # a minute; needs matplotlib

Full fine-tuning in bf16 of whole models, one sequence, AdamW's states on the device. Peak and time of a step
come from shapes and from the device's rates, as ``hf-actswap plan`` has them. Plans are found for two
budgets: the peak of gradient checkpointing, and half of the activations that are kept without any plan.

The peaks in the table are those that PyTorch's CUDA allocator allocated in rehearsal, in the last of three
steps (``benchmarks/rehearsal_peaks.py``). One that is not within 1 % of the prediction is an error.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "README.md"
PICTURE = ROOT / "docs" / "pictures" / "why.svg"
OVER_A_STEP = ROOT / "docs" / "pictures" / "memory.svg"
sys.path.insert(0, str(ROOT))

from benchmarks.workloads import PRESETS, Workload, llama_config  # noqa: E402 - neither need be installed
from hf_actswap import load_config, model_structure, resolve_plan  # noqa: E402
from hf_actswap.plan import MemoryPlan  # noqa: E402
from hf_actswap.planner import Limits, Prediction, Profile  # noqa: E402
from hf_actswap.planner.cost.simulate import predict  # noqa: E402
from hf_actswap.planner.devices import device_rates  # noqa: E402
from hf_actswap.planner.record.shapes import profile_from_shapes  # noqa: E402
from hf_actswap.planner.search.find_plan import find_plan, least_peak_bytes  # noqa: E402

REHEARSED = ROOT / "benchmarks" / "results" / "rehearsal_peaks_20261123.json"
DEVICE = "H200"
DEVICE_BYTES = device_rates(DEVICE).memory_bytes
WORKLOADS = tuple(
    replace(PRESETS[name], layers=32, tokens=tokens, head=True)
    for name in ("7b-8k", "8b-8k")
    for tokens in (8192, 32768)
)
NAMES = {"Llama-2-7B": "7b", "Llama-3-8B": "8b"}
MOST_OFF = 0.01
DRAWN = WORKLOADS[2]
CURVE = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95)
"""Budgets of the picture, from the least that is possible to the peak without a plan."""

GIB = 2**30
OURS, THEIRS, TEXT = "#1755a8", "#8b949e", "#57606a"
_TABLE = re.compile(r"(<!-- by docs/make_why.py -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Point:
    """A predicted step.

    Args:
        peak_bytes: of device memory.
        step_ms: forward, backward and optimizer.
    """

    peak_bytes: int
    step_ms: float

    def __str__(self) -> str:
        note = "" if self.peak_bytes <= DEVICE_BYTES else " †"
        return f"{self.peak_bytes / GIB:.0f} GiB{note}, {self.step_ms / 1e3:.2f} s"


def allocated(workload: Workload, method: str, predicted: Point) -> Point:
    """Return the step with the peak that a rehearsal of it allocated.

    Args:
        workload: a whole model.
        method: as ``benchmarks/rehearsal_peaks.py`` names it.
        predicted: the step.
    """
    name = f"{NAMES[workload.model]}-{workload.tokens // 1024}k full adamw {method} expandable"
    rows = json.loads(REHEARSED.read_text("utf-8"))
    (run,) = next(row["runs"] for row in rows if row["name"] == name and row["share"] is None)
    peak_bytes = max(run["steps"][-1][part] for part in ("passes", "outside"))
    if abs(peak_bytes - predicted.peak_bytes) > MOST_OFF * predicted.peak_bytes:
        sys.exit(f"{name}: {peak_bytes:,} bytes were allocated, {predicted.peak_bytes:,} predicted")
    return replace(predicted, peak_bytes=peak_bytes)


class Paper:
    """Steps of one workload.

    Args:
        workload: a whole model.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        with torch.device("meta"):
            model = LlamaForCausalLM(llama_config(workload)).to(workload.torch_dtype).train()
            ids = torch.empty(1, workload.tokens, dtype=torch.long)
        structure = model_structure(model)
        self._profile: Profile = profile_from_shapes(
            model,
            structure,
            {"input_ids": ids, "labels": ids, "use_cache": False},
            DEVICE,
            optimizer_state_bytes=2 * sum(item.nbytes for item in model.parameters()),
        )
        self._empty = MemoryPlan((), workload.layers, self._profile.family)
        self.nothing = self._predicted(self._empty)
        everything = load_config({"recompute_config": {"recompute": True}})
        self._checkpointed = resolve_plan(everything, structure)
        self.checkpointing = self._predicted(self._checkpointed)

    def over_a_step(self) -> dict[str, Prediction]:
        """Return the steps of the picture of memory over time, each by its name."""
        plans = {
            "plain training": self._empty,
            "gradient checkpointing": self._checkpointed,
            "hf_actswap": self._plan_within(self.checkpointing.peak_bytes),
        }
        return {name: predict(self._profile, plan) for name, plan in plans.items()}

    @property
    def kept_bytes(self) -> int:
        """Activations that are kept for backward without a plan."""
        return predict(self._profile, self._empty).kept_bytes

    @property
    def least_bytes(self) -> int:
        """The least peak that a plan reaches."""
        return least_peak_bytes(self._profile, self._empty, Limits(2**62))

    def planned(self, budget_bytes: int) -> Point:
        """Return the step of the fastest plan within a budget."""
        return self._predicted(self._plan_within(budget_bytes))

    def _plan_within(self, budget_bytes: int) -> MemoryPlan:
        return find_plan(self._profile, self._empty, Limits(budget_bytes)).plan

    def _predicted(self, plan: MemoryPlan) -> Point:
        found = predict(self._profile, plan)
        return Point(found.peak_bytes, found.step_ms)


def row(paper: Paper) -> str:
    """Return a workload's line of the table."""
    same = paper.planned(paper.checkpointing.peak_bytes)
    half = paper.planned(paper.nothing.peak_bytes - paper.kept_bytes // 2)
    name = f"{paper.workload.model}, {paper.workload.tokens // 1024}k tokens"
    gain = paper.checkpointing.step_ms / same.step_ms
    steps = {"plain": paper.nothing, "checkpointing": paper.checkpointing, "planned": same, "half": half}
    plain, checkpointing, same, half = (allocated(paper.workload, *step) for step in steps.items())
    return f"| {name} | {plain} | {checkpointing} | **{same}** ({gain:.2f} x) | {half} |"


def table(papers: Sequence[Paper]) -> str:
    """Return the table."""
    head = "| one H200 (141 GB), rehearsed | plain training | gradient checkpointing |"
    ours = " `hf_actswap`, same peak | `hf_actswap`, half of the activations |"
    lines = [f"{head}{ours}", "|---|---:|---:|---:|---:|", *map(row, papers)]
    return "\n".join(lines) + "\n"


@contextmanager
def figure_of(paper: Paper, picture: Path, x: str, y: str) -> Iterator[Any]:
    """Give the axes of a figure about a workload, which is written to ``picture``."""
    from matplotlib import pyplot, rcParams  # here, because matplotlib is an extra

    rcParams.update({"svg.hashsalt": "why", "font.size": 10, "svg.fonttype": "none"})
    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    yield axes
    title = f"{paper.workload.model}, {paper.workload.tokens:,} tokens, one H200 (predicted)"
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.savefig(picture, metadata={"Date": None})
    pyplot.close(figure)


def draw_over_a_step(paper: Paper) -> None:
    """Draw memory over a step: forward, backward, and the step's end."""
    with figure_of(paper, OVER_A_STEP, "s since the step began", "device memory, GiB") as axes:
        colours = (THEIRS, TEXT, OURS)
        for (name, step), colour in zip(paper.over_a_step().items(), colours, strict=True):
            times = [point.ms / 1e3 for point in step.memory]
            gib = [point.total_bytes / GIB for point in step.memory]
            axes.plot([*times, step.step_ms / 1e3], [*gib, gib[-1]], color=colour, label=name)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, loc="lower center", ncols=3)


def draw(paper: Paper) -> None:
    """Draw time against memory."""
    least, most = paper.least_bytes, paper.nothing.peak_bytes
    budgets = [round(least + share * (most - least)) for share in CURVE]
    curve = [*map(paper.planned, (least, paper.checkpointing.peak_bytes, *budgets)), paper.nothing]
    curve.sort(key=lambda point: point.peak_bytes)
    gib, seconds = [p.peak_bytes / GIB for p in curve], [p.step_ms / 1e3 for p in curve]
    with figure_of(paper, PICTURE, "peak memory, GiB", "s per step") as axes:
        axes.plot(gib, seconds, "o-", color=OURS)
        marked = {"gradient checkpointing": paper.checkpointing, "plain training": paper.nothing}
        for name, point in marked.items():
            at = point.peak_bytes / GIB, point.step_ms / 1e3
            axes.plot(*at, "s", color=THEIRS, markersize=8)
            right = point is paper.checkpointing
            shift, anchor = ((9, -3), "left") if right else ((0, 9), "center")
            axes.annotate(name, at, shift, textcoords="offset points", ha=anchor, color=TEXT)
        middle = gib[len(gib) // 2], seconds[len(gib) // 2]
        axes.annotate("hf_actswap", middle, (0, 9), textcoords="offset points", ha="center", color=OURS)
        axes.margins(0.1, 0.2)


def main() -> None:
    papers = [Paper(workload) for workload in WORKLOADS]
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_TABLE.sub(lambda match: f"{match[1]}{table(papers)}{match[2]}", text), encoding="utf-8")
    drawn = papers[WORKLOADS.index(DRAWN)]
    draw(drawn)
    draw_over_a_step(drawn)


if __name__ == "__main__":
    main()
