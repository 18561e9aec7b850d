"""Lists the commands by name; each is imported only when it runs, because importing torch takes seconds.

Exit codes: 0 no errors; 1 errors in what the user wrote (configuration, model, plan, budget), all of which
are named; 2 an error in the command line itself.
"""

from __future__ import annotations

import gc
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..version import __version__

SUMMARIES = {
    "check": "List every error of a configuration for a model, and every request that is changed or ignored.",
    "explain": "Say why an op of a layer is kept, swapped or recomputed, and what would change it.",
    "plan": "Find what to keep, swap and recompute within a budget, and predict the step.",
    "profile": "Measure a step op by op, or compute it from shapes, for `plan --profile`.",
    "report": "Show a run: memory by fate, timeline, bytes by layer and op, predicted against measured.",
    "run": "Run a training script that you do not own with a plan: its trainings get what HF_ACTSWAP says.",
    "env": "Show versions, devices, host memory and, if asked, the speed of the link between them.",
    "rehearse": "Run a training script without its GPU: whether it fits, what memory holds, what to change.",
    "convert": "Write a configuration from flags of Megatron, MindSpeed-LLM, DeepSpeed, TRL or Axolotl.",
    "push": "Publish a configuration, and a plan beside it, on the Hub. Files with errors are not published.",
}
"""The commands and their help, in the order of ``--help``."""


def command(name: str) -> Any:
    """Import a command's function and return it as a click command."""
    function: Any
    match name:
        case "check":
            from .check import check as function
        case "explain":
            from .explain import explain as function
        case "plan":
            from .plan import plan as function
        case "profile":
            from .profile import profile as function
        case "report":
            from .report import report as function
        case "run":
            from .run import run as function
        case "env":
            from .env import env as function
        case "rehearse":
            from .rehearse import rehearse as function
        case "convert":
            from .convert import convert as function
        case _:
            from .push import push as function
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    # Words after the script are the script's own, also those that begin with `-`.
    words = {"allow_interspersed_args": name != "run"}
    alone.command(name, help=SUMMARIES[name], context_settings=words)(function)
    return typer.main.get_command(alone)


class Commands(TyperGroup):
    """Lists all commands; one is imported when it runs or its help is shown."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, summary in SUMMARIES.items():
            self.add_command(TyperCommand(name, help=summary))

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, command(str(name)), rest


app = typer.Typer(
    name="hf-actswap",
    cls=Commands,
    help=(
        "Check configurations and predict memory and time before you train a Hugging Face model with swapped "
        "and recomputed activations; show the report of a run. No command needs weights or a GPU."
    ),
    epilog=(
        "Exit codes: 0 no errors, 1 errors in the configuration, model, plan or budget, 2 an error in the "
        "command line. With --json a command writes one JSON document to stdout and nothing else."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


_MANY_OBJECTS = 100_000


def main() -> None:
    """Run a command, and look for cyclic garbage seldom.

    A command lives for seconds and makes millions of objects; looking for garbage after every 700 of them (by
    default) is a fifth of its time, and once more at the end another seventh.
    """
    gc.set_threshold(_MANY_OBJECTS, 20, 100)
    try:
        app(prog_name="hf-actswap")
    finally:
        gc.freeze()  # else all that is still there is looked at when the interpreter ends
