"""Lists the commands by name; each is imported only when it runs, because importing torch takes seconds.

Exit codes: 0 no errors; 1 errors in what the user wrote (configuration, model, plan, budget), all of which
are named; 2 an error in the command line itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..version import __version__
from .output import write_line


@dataclass(frozen=True)
class CommandPlace:
    """Where a command is implemented: a function in a module of this package, both with the command's name.

    Args:
        name: name of the command, the function and the module.
        summary: text of the command in ``hf-actswap --help``; the first line of the function's docstring.
        passes_on: whether all words after the first argument are passed on, also those that begin with ``-``.
    """

    name: str
    summary: str
    passes_on: bool = False

    def load(self) -> Any:
        """Import the command's function and return it as a click command."""
        function = getattr(import_module(f".{self.name}", __package__), self.name)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        settings = {"allow_interspersed_args": False} if self.passes_on else {}
        alone.command(self.name, context_settings=settings)(function)
        return typer.main.get_command(alone)


class LateCommand(TyperCommand):
    """A placeholder for a command, which is imported when it runs or its own help is shown.

    Args:
        place: where the command is implemented.
    """

    def __init__(self, place: CommandPlace) -> None:
        super().__init__(place.name, help=place.summary)
        self._place = place

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Import the real command and return its context, so that the real command runs."""
        return self._place.load().make_context(info_name, args, parent=parent, **extra)


class LateCommands(TyperGroup):
    """A group of `LateCommand`; a subclass sets ``places``.

    Attributes:
        places: where the commands are implemented, in the order of ``--help``.
    """

    places: tuple[CommandPlace, ...] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for place in self.places:
            self.add_command(LateCommand(place))


class Commands(LateCommands):
    """All commands of ``hf-actswap``."""

    places = (
        CommandPlace(
            "check",
            "List every error of a configuration for a model, and every request that is changed or ignored.",
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
            "run",
            "Run a training script that you do not own with a plan: its Trainers get what HF_ACTSWAP says.",
            passes_on=True,
        ),
        CommandPlace(
            "env", "Show versions, devices, host memory and, if asked, the speed of the link between them."
        ),
        CommandPlace(
            "rehearse",
            "Run a training script without its GPU: whether it fits, what memory holds, what to change.",
        ),
        CommandPlace(
            "push",
            "Publish a configuration, and a plan beside it, on the Hub. Files with errors are not published.",
        ),
    )


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
        write_line(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""
