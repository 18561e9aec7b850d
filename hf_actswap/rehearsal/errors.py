"""The error of a rehearsal that cannot begin."""

from __future__ import annotations

from ..errors import ActSwapError, Problem


class RehearsalError(ActSwapError):
    """The device cannot be built, or what was asked of it makes no sense; raised before the script starts."""

    subject = "rehearsal"


def one_problem(where: str, expected: str, found: str, hint: str = "") -> RehearsalError:
    """Return the error of a single problem."""
    return RehearsalError([Problem(where, expected, found, hint)])
