"""The commands by name.

Exit codes: 0 all is well; 1 there are problems in what the user wrote (configuration, model, plan, budget),
and all are named; 2 the command line itself is not understood.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ..version import __version__
from .check import check
from .env import env
from .explain import explain
from .output import write_line
from .plan import plan
from .push import push
from .report import report

app = typer.Typer(
    name="hf-actswap",
    help=(
        "Swap and recompute activations of Hugging Face models: look before you train. No command needs "
        "weights or a GPU."
    ),
    epilog=(
        "Exit codes: 0 all is well, 1 problems in what was written, 2 wrong usage. With --json a command "
        "writes one JSON document to stdout and nothing else."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        write_line(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


for command in (check, explain, plan, report, env, push):
    app.command()(command)
