"""``hf-actswap rehearse``: runs a training script on a CUDA device that is not there, and reports on it."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..rehearsal import DEVICES, Options, RehearsalError, build, environment
from ..rehearsal.errors import one_problem
from ..rehearsal.launch import REPORTS
from .output import busy, print_parts, shown_problems
from .program import run_program
from .rehearsal_report import read_reports, rehearsed

_CANNOT_START = 2

Device = Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(d.kind for d in DEVICES)}.")]
Devices = Annotated[int, typer.Option(metavar="N", help="How many of them.")]
Memory = Annotated[
    str, typer.Option(metavar="SIZE", help="Memory of each, such as 40GiB. Default: what the device has.")
]
HostMemory = Annotated[
    str, typer.Option(metavar="SIZE", help="Host memory to swap into. Default: what is free here.")
]
Clock = Annotated[
    bool, typer.Option("--clock", help="Work takes the time that it would on the device: predicts the step.")
]
NoWeights = Annotated[
    bool,
    typer.Option(
        "--no-weights",
        help="from_pretrained reads a model's config alone: a folder with config.json is enough.",
    ),
]
Advice = Annotated[
    bool,
    typer.Option("--advice/--no-advice", help="If memory runs out or is short, ask the planner what fits."),
]
Report = Annotated[
    str | None, typer.Option(metavar="FILE", help="Also write what was seen as a JSON document.")
]
Program = Annotated[
    list[str],
    typer.Argument(metavar="-- PROGRAM [ARGUMENTS]...", help="python train.py --lr 1, accelerate launch ..."),
]


def rehearse(
    program: Program,
    device: Device,
    devices: Devices = 1,
    memory: Memory = "",
    host_memory: HostMemory = "",
    clock: Clock = False,
    no_weights: NoWeights = False,
    advice: Advice = True,
    report: Report = None,
) -> None:
    try:
        asked = Options(device, devices, memory, clock=clock, no_weights=no_weights, host_memory=host_memory)
        command = _command(program)
        with busy("building the device"):
            built = build()
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
            code = run_program(command, {**environment(asked, built), REPORTS: folder})
            processes = read_reports(Path(folder))
    except RehearsalError as error:
        print_parts(shown_problems(error.problems, error.subject), stderr=True)
        raise typer.Exit(_CANNOT_START) from None
    found = rehearsed(asked, processes, code, advice)
    print_parts(found.shown, stderr=True)
    if report is not None:
        Path(report).write_text(json.dumps(found.document, indent=1), encoding="utf-8")
    raise typer.Exit(code)


def _command(program: Sequence[str]) -> list[str]:
    """Return the command to run; the name of a Python file alone is run by this Python."""
    script = program[0].endswith(".py")
    if not (Path(program[0]).is_file() if script else shutil.which(program[0])):
        hint = "The program comes after --, as in: -- python train.py"
        raise one_problem("command", "a program that can be run", repr(program[0]), hint)
    return [sys.executable, *program] if script else list(program)
