"""``hf-actswap run``: runs a training program with a plan, without a change to the program.

The program runs as ever, in a process of its own. A start-up file on its ``PYTHONPATH`` lets every Trainer
that it makes, and every loop with Accelerate, act on ``HF_ACTSWAP``, also in processes that it starts
(torchrun, accelerate, a tool's launcher).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ..config.loader import AUTO
from ..config.sizes import gib_text
from ..config.validation import is_off_word
from ..errors import ActSwapError
from ..run_environment import FOLDER, OFF, VARIABLE, EndedTraining, ended_trainings
from ..startup import python_path
from .program import run_program

_STARTUP = str(Path(__file__).parents[1] / "integrations" / "startup")

_NONE = (
    "no training had a plan: in this program, or in a process that it started, no transformers Trainer was "
    "trained to its end, nor a model and its optimizer that Accelerate prepared. (Other loops take "
    "hf_actswap.apply. Python's options -E, -I and -S keep the plan out.)"
)


def run(
    program: Annotated[
        str,
        typer.Argument(
            metavar="PROGRAM", help="A Python file, or a command (swift, torchrun, ...); with -m a module."
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the program.")
    ] = None,
    actswap: Annotated[
        str | None,
        typer.Option(
            "--actswap",
            envvar=VARIABLE,
            metavar="WHAT",
            help="auto (the default), off, a file of YAML or of a plan, a folder, a Hub id, or inline JSON.",
        ),
    ] = None,
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is the name of a module.")] = False,
) -> None:
    if actswap is None:  # typer takes an empty variable for an absent one
        actswap = OFF if VARIABLE in os.environ else AUTO
    if is_off_word(actswap):
        actswap = OFF
    if actswap not in (OFF, AUTO):
        _check(actswap)
    command = [*_program(program, module), *(arguments or [])]
    if actswap == OFF:
        raise typer.Exit(run_program(command, {**os.environ, VARIABLE: OFF}))
    with tempfile.TemporaryDirectory(prefix="actswap-run-") as folder:
        path = python_path(_STARTUP, os.environ.get("PYTHONPATH", ""))
        ours = {VARIABLE: _found_anywhere(actswap), FOLDER: folder, "PYTHONPATH": path}
        code = run_program(command, {**os.environ, **ours})
        ended = ended_trainings(Path(folder))
    for training in ended:
        if training.rank == 0:
            _say(_in_words(training))
    if not ended and not code:
        _say(_NONE)
    raise typer.Exit(code if ended else code or 1)


def _check(actswap: str) -> None:
    """Exit with what is wrong in a configuration or a plan, before the program starts."""
    from ..plan import load_config_or_plan  # it imports torch, which takes seconds

    try:
        load_config_or_plan(actswap)
    except ActSwapError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _program(name: str, module: bool) -> list[str]:
    """Return the command of a module, of a file that this Python runs, or of a program on the path."""
    if module:
        return [sys.executable, "-m", name]
    is_file = Path(name).is_file()
    if is_file and (name.endswith(".py") or not os.access(name, os.X_OK)):
        return [sys.executable, name]
    if (found := shutil.which(name)) is not None:
        return [found]
    raise typer.BadParameter(f"there is no file {name}, and no such command", param_hint="PROGRAM")


def _found_anywhere(actswap: str) -> str:
    """Return a file's name so that it is found from other folders: tools change theirs."""
    return os.path.abspath(actswap) if os.path.exists(actswap) else actswap


def _in_words(training: EndedTraining) -> str:
    processes = f"{training.processes} processes" if training.processes > 1 else "1 process"
    moved, again = gib_text(training.moved_bytes), gib_text(training.again_bytes)
    what = f"a step moved {moved} to host memory and computed {again} again"
    does = what if training.acts else "it keeps everything"
    return f"{training.output_dir} ({training.steps} steps, {processes}) was trained with a plan: {does}."


def _say(text: str) -> None:
    typer.echo(f"hf-actswap run: {text}", err=True)
