"""``hf-actswap plan``: what the planner would do, on a machine without a GPU and without weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import RenderableType
from rich.table import Table

from ..config import load_config
from ..errors import ActSwapError
from . import options
from .communication import communication_document, communication_note, communication_of, fabric_of
from .numbers_text import size_text, step_ms_text
from .options import OptimizerName
from .output import answer, folded_by_layer, heading, listed, problems_document
from .planned import NOTHING, PLANNED, Planned, memory_in_force, planned, poor_deal
from .profile_file import AskedStep, ProfileFile, read_profile
from .step import StepShape, device_name, prediction_document
from .subject import subject, with_tp
from .tables import fate_table, step_table, summary_table

_ALONE = "Times are computed from shapes and the device's rates; communication between ranks is not in them."
_SEQ = 4096
_PREDICTED = "predicted"


@dataclass(frozen=True)
class PlanAnswer:
    """One plan. See `output.Answer`."""

    found: Planned
    saved_to: str | None
    windows: bool = False
    recorded: ProfileFile | None = None
    ok: bool = True

    def document(self) -> Mapping[str, Any]:
        """See `output.Answer`."""
        found = self.found
        return {
            "model": found.subject.document(),
            "step": found.step.document(),
            "mode": found.memory.mode,
            "budget_bytes": found.budget_bytes,
            "profile": None if self.recorded is None else self.recorded.path,
            "predicted": {name: prediction_document(step) for name, step in found.steps.items()},
            "saved_to": self.saved_to,
            "plan": json.loads(found.plan.to_json()),
        }

    def shown(self) -> Iterable[RenderableType]:
        """See `output.Answer`."""
        found = self.found
        yield f"Model:  {found.subject.described()}"
        yield f"Step:   {found.step.described()}"
        yield f"Budget: {size_text(found.budget_bytes)}, {found.memory.mode}"
        yield heading("Plan")
        if self.windows:
            yield fate_table(found.plan, found.profile)
        else:
            yield summary_table(found.plan, found.profile)
        yield heading("Predicted")
        yield step_table(found.steps, found.budget_bytes)
        if any(step.peak_bytes > found.budget_bytes for step in found.steps.values()):
            yield "! above the budget."
        yield from poor_deal(found.steps)
        yield _ALONE if self.recorded is None else self.recorded.described()
        if self.saved_to is not None:
            yield f"Written to {self.saved_to}."


@dataclass(frozen=True)
class Compared:
    """Plans for several numbers of ranks; a plan, or why there is none. See `output.Answer`."""

    by_tp: Mapping[int, Planned | ActSwapError]

    @property
    def ok(self) -> bool:
        """Whether there is a plan for any of them."""
        return any(isinstance(found, Planned) for found in self.by_tp.values())

    def document(self) -> Mapping[str, Any]:
        """See `output.Answer`."""
        return {"compare": [self._entry(tp, found) for tp, found in self.by_tp.items()]}

    def shown(self) -> Iterable[RenderableType]:
        """See `output.Answer`."""
        known = [found for found in self.by_tp.values() if isinstance(found, Planned)]
        if known:
            yield f"Step:   {known[0].step.described()}"
            yield f"Budget: {size_text(known[0].budget_bytes)} a rank, {known[0].memory.mode}"
        yield ""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in ("tp", "Peak, nothing", "Peak", "Step", "Comm.", "Swapped", "Recomputed"):
            table.add_column(name, justify="right", no_wrap=True)
        for tp, found in self.by_tp.items():
            if isinstance(found, Planned):
                step, told = found.prediction, communication_of(found)
                added_ms = 0.0 if told is None else told.added_ms
                table.add_row(
                    str(tp),
                    size_text(found.steps[NOTHING].peak_bytes),
                    size_text(step.peak_bytes),
                    step_ms_text(step.step_ms + added_ms),
                    "?" if told is None else step_ms_text(added_ms),
                    size_text(step.swapped_bytes),
                    size_text(step.recomputed_bytes),
                )
            else:
                table.add_row(str(tp), "", "no plan", "", "", "", "")
        yield table
        for tp, found in self.by_tp.items():
            if isinstance(found, ActSwapError):
                yield heading(f"tp={tp}")
                yield from listed(folded_by_layer(map(str, found.problems)))
        yield f"\n{communication_note(fabric_of(known[0]) if known else None)}"

    @staticmethod
    def _entry(tp: int, found: Planned | ActSwapError) -> dict[str, Any]:
        if isinstance(found, ActSwapError):
            return {"tp": tp, "problems": problems_document(found.problems)}
        told = communication_document(communication_of(found))
        return {"tp": tp, **PlanAnswer(found, None).document(), "communication": told}


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A folder of a model, its config.json, or a Hub id.", show_default=False
        ),
    ],
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="Fates written by hand stay; its `memory` section holds.",
            show_default=False,
        ),
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            "--seq", min=1, metavar="N", help="Tokens of a sequence; else 4096.", show_default=False
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            min=1,
            metavar="N",
            help="Sequences of a micro-batch; else 1.",
            show_default=False,
        ),
    ] = None,
    device: options.Device = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="Plan from the times that hf-actswap profile or a training has written; the step is its.",
            show_default=False,
        ),
    ] = None,
    budget_gib: Annotated[
        float | None,
        typer.Option(
            "--budget-gib",
            min=0.001,
            metavar="X",
            help="The most device memory of a step, per rank. Else the configuration's, else the device's "
            "less 3 %.",
            show_default=False,
        ),
    ] = None,
    dtype: options.Dtype = None,
    autocast: options.Autocast = None,
    optimizer: Annotated[
        OptimizerName | None,
        typer.Option(
            "--optimizer",
            help="Whose states are on the device, 2 values a weight; else adamw.",
            show_default=False,
        ),
    ] = None,
    tp: options.Tp = None,
    windows: Annotated[
        bool, typer.Option("--windows", help="A line for each op, with its prefetch and release.")
    ] = False,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare", metavar="tp=1,2,4", help="Plan for several numbers of ranks.", show_default=False
        ),
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Write the plan, to train with: actswap=FILE, or memory.plan_file.",
            show_default=False,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Find what to keep, swap and recompute within a budget, and predict the step."""
    sizes = _sizes(compare) if compare is not None else ()
    if save is not None:
        _refuse_to_overwrite(save)
    if sizes and (save is not None or tp is not None):
        raise typer.BadParameter("--compare goes with neither --save nor --tp")
    if sizes and profile is not None:
        raise typer.BadParameter("--profile is of one number of ranks: it does not go with --compare")
    asked = AskedStep(batch, seq, device, autocast, optimizer)

    def of(size: int | None, recorded: ProfileFile | None = None) -> Planned:
        wanted = with_tp(load_config(config), size)
        memory = memory_in_force(wanted, budget_gib)
        step = _step_on_paper(asked) if recorded is None else recorded.step(asked)
        with subject(model, dtype, wanted) as found:
            if recorded is None:
                return planned(found, step, wanted, memory)
            recorded.check(found)
            return planned(found, step, wanted, memory, recorded.profile)

    def ask() -> PlanAnswer | Compared:
        if sizes:
            return Compared({size: _or_why_not(of, size) for size in sizes})
        recorded = None if profile is None else read_profile(profile)
        found = of(tp, recorded)
        if save is not None:
            _write(save, found)
        return PlanAnswer(found, save, windows, recorded)

    answer("plan", as_json, ask)


def _step_on_paper(asked: AskedStep) -> StepShape:
    return StepShape(
        asked.sequences or 1,
        asked.tokens or _SEQ,
        device_name(asked.device),
        asked.autocast,
        asked.optimizer or "adamw",
    )


def _or_why_not(of: Any, size: int) -> Planned | ActSwapError:
    try:
        found: Planned = of(size)
    except ActSwapError as error:
        return error
    return found


def _sizes(text: str) -> tuple[int, ...]:
    name, _, numbers = text.partition("=")
    parts = numbers.split(",")
    if name != "tp" or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not of the form tp=1,2,4", param_hint="--compare")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _refuse_to_overwrite(path: str) -> None:
    """A file of that name must be one that this command has written."""
    if not Path(path).exists():
        return
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or _PREDICTED not in document:
        text = f"{path} exists and was not written by --save: it stays as it is"
        raise typer.BadParameter(text, param_hint="--save")


def _write(path: str, found: Planned) -> None:
    document = json.loads(found.plan.to_json())
    document[_PREDICTED] = {
        "model": found.subject.document(),
        "step": found.step.document(),
        "budget_bytes": found.budget_bytes,
        **prediction_document(found.steps[PLANNED]),
        "without_plan_peak_bytes": found.steps[NOTHING].peak_bytes,
        "without_plan_step_ms": found.steps[NOTHING].step_ms,
    }
    try:
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--save") from error
