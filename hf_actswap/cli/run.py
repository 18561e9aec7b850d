"""``hf-actswap run``: runs a training script with a plan, without a change to the script."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ActSwapError
from ..integrations.trainer import OFF, VARIABLE, act_on_environment
from ..plan import load_config_or_plan


def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python file; with -m the name of a module.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")
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
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
) -> None:
    if actswap is None:  # typer takes an empty variable for an absent one
        actswap = OFF if VARIABLE in os.environ else "auto"
    try:
        if actswap != OFF:
            load_config_or_plan(actswap)
    except ActSwapError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if not module and not Path(script).is_file():
        raise typer.BadParameter(f"there is no file {script}", param_hint="SCRIPT")
    os.environ[VARIABLE] = actswap  # processes that the script starts by `hf-actswap run` see it too
    act_on_environment()
    sys.argv = [script, *(arguments or [])]
    if module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")
