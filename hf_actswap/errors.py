"""Errors that name every fault of a document at once, before any training step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Problem:
    """One fault of what the user wrote.

    Args:
        where: path of the value in the document, e.g. ``swap_config.op_swap[1].backward_prefetch``.
        expected: what would have been accepted there.
        found: the value there, as the user would recognise it.
        hint: what to do about it; usually the nearest valid name. May be empty.
    """

    where: str
    expected: str
    found: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: expected {self.expected}, found {self.found}."
        return f"{text} {self.hint}" if self.hint else text


class ActSwapError(ValueError):
    """Base of the errors that list problems; never raised itself.

    Attributes:
        problems: every problem found, in the order of the document.
        source: what was read: a file name, or a short description.
    """

    subject = "input"

    def __init__(self, problems: Sequence[Problem], source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        count = len(self.problems)
        head = f"{count} problem{'' if count == 1 else 's'} in the {self.subject}"
        if source:
            head += f" ({source})"
        super().__init__("\n".join([f"{head}:", *(f"  - {problem}" for problem in self.problems)]))

    def __reduce__(self) -> tuple[type[ActSwapError], tuple[tuple[Problem, ...], str]]:
        return type(self), (self.problems, self.source)


class ConfigError(ActSwapError):
    """The document is malformed: raised by ``load_config`` with all of its problems.

    Attributes:
        readable: an `ActSwapConfig` of the valid rest of the document, to be checked against a model for
            further problems; ``None``: there is no such configuration.
    """

    subject = "configuration"
    readable: Any = None


class PlanError(ActSwapError):
    """The document does not fit the model, or requests something that cannot be applied to it."""

    subject = "plan"


def short_traceback(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let an `ActSwapError` leave a public function with only the user's frames in its traceback.

    The message says what is wrong with what the user wrote; the frames of this package and of `_LIBRARIES`,
    which found it, are removed. Only an error of the running step (out of memory) keeps what it came from.
    """

    @functools.wraps(call)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return call(*args, **kwargs)
        except ActSwapError as error:
            cause = error.__cause__ if isinstance(error, RuntimeError) else None
            raise error.with_traceback(_frames_of_user(error.__traceback__)) from cause

    return called


_LIBRARIES = frozenset({"accelerate", "contextlib", "torch", "transformers", "trl"})


def _frames_of_user(traceback: TracebackType | None) -> TracebackType | None:
    if traceback is None:
        return None
    rest, frame = _frames_of_user(traceback.tb_next), traceback.tb_frame
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    if package in _LIBRARIES or package == __package__:
        return rest
    return TracebackType(rest, frame, traceback.tb_lasti, traceback.tb_lineno)


def nearest(name: str, valid: Sequence[str]) -> str:
    """Return a "Did you mean ...?" hint for ``name``, or the valid names if none is near."""
    close = get_close_matches(name, valid, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Valid: {', '.join(valid)}." if valid else ""
