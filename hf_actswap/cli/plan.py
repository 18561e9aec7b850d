"""``hf-actswap plan``: its options, which are checked before anything large is imported."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .options import OptimizerName
from .output import Answer, answer
from .plan_request import PREDICTED, AskedStep, PlanRequest


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
            "--seq",
            parser=options.tokens,
            metavar="N",
            help="Tokens of a sequence: 8192, 8k; else 4096.",
            show_default=False,
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
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget",
            "--budget-gib",
            parser=options.size,
            metavar="SIZE",
            help="The most device memory of a step, per rank: 40GB, 24GiB, or a number of GiB. Else the "
            "configuration's, else the device's less 3 %.",
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
    full: Annotated[
        bool, typer.Option("--full", help="The plan layer by layer, and the least budget.")
    ] = False,
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
    compared = _sizes(compare) if compare is not None else ()
    if save is not None:
        _refuse_to_overwrite(save)
    if compared and (save is not None or tp is not None):
        raise typer.BadParameter("--compare goes with neither --save nor --tp")
    if compared and profile is not None:
        raise typer.BadParameter("--profile is of one number of ranks: it does not go with --compare")
    asked = PlanRequest(
        model=model,
        config=config,
        step=AskedStep(batch, seq, device, autocast, optimizer),
        dtype=dtype,
        profile=profile,
        budget_bytes=budget,
        tp=tp,
        compared=compared,
        save=save,
        windows=windows,
        full=full,
    )

    def ask() -> Answer:
        found: Answer = import_module(".plan_answer", __package__).answer_plan(asked)
        return found

    answer("plan", as_json, ask)


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
    if not isinstance(document, dict) or PREDICTED not in document:
        text = f"{path} exists and was not written by --save: it stays as it is"
        raise typer.BadParameter(text, param_hint="--save")
