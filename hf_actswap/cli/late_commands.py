"""Commands that are listed before they are imported: torch takes seconds to import, and help needs none."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True)
class CommandPlace:
    """Where a command is: the function of its name in the module of its name.

    Args:
        name: of the command, of the function and of the module beside this one.
        summary: what ``--help`` says of it before it is imported; the first line of the function's docstring.
    """

    name: str
    summary: str

    def load(self) -> Any:
        """Import the command and return what runs it."""
        function = getattr(import_module(f".{self.name}", __package__), self.name)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(self.name)(function)
        return typer.main.get_command(alone)


class LateCommand(TyperCommand):
    """Stands in the place of a command until that is run, or asked for help of its own.

    Args:
        place: of the command.
    """

    def __init__(self, place: CommandPlace) -> None:
        super().__init__(place.name, help=place.summary)
        self._place = place

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Parse the command line of the command itself; the context is its, and so it is what runs."""
        return self._place.load().make_context(info_name, args, parent=parent, **extra)


class LateCommands(TyperGroup):
    """A group of `LateCommand`; make one by a subclass that says which.

    Attributes:
        places: of the commands, in the order of ``--help``.
    """

    places: tuple[CommandPlace, ...] = ()

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for place in self.places:
            self.add_command(LateCommand(place))
