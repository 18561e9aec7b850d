"""The commands by name.

Exit codes: 0 all is well; 1 there are problems in what the user wrote (configuration, model, plan, budget),
and all are named; 2 the command line itself is not understood.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ..version import __version__
from .late_commands import CommandPlace, LateCommands
from .output import write_line


class Commands(LateCommands):
    """All of them."""

    places = (
        CommandPlace(
            "check", "Name every problem of a configuration for a model, and every wish that gives way."
        ),
        CommandPlace(
            "explain", "Say why an op of a layer is kept, swapped or recomputed, and what would change it."
        ),
        CommandPlace("plan", "Find what to keep, swap and recompute within a budget, and predict the step."),
        CommandPlace(
            "profile",
            "Measure a step op by op, or compute it from shapes, for `plan --profile`.",
        ),
        CommandPlace(
            "report",
            "Show a run: memory by fate, timeline, bytes by layer and op, predicted against measured.",
        ),
        CommandPlace(
            "env", "Show versions, devices, host memory and, if asked, the speed of the link between them."
        ),
        CommandPlace(
            "push",
            "Publish a configuration, and a plan beside it, on the Hub. Nothing malformed is published.",
        ),
    )


app = typer.Typer(
    name="hf-actswap",
    cls=Commands,
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
