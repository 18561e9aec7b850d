"""Keeps what an out-of-memory error says, for use after its handler has been left.

An exception's traceback holds the frames that it came through, and these hold tensors (pytorch#18853). So
nothing is evicted or run again inside an ``except`` block, and only the text of the exception is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_WANTED = re.compile(r"(?:[Tt]ried to allocate|asks for) ([\d,]+(?:\.\d+)?) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_LIBRARY_ERRORS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
"""Texts of errors of libraries that ask the driver for memory themselves; raised as ``RuntimeError``."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What an out-of-memory error says.

    Args:
        kind: class of the error.
        text: the first line of its text.
        wanted_bytes: bytes that were asked for; ``None``: the error does not say.
    """

    kind: type[RuntimeError]
    text: str
    wanted_bytes: int | None


def attempt(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Failure | None]:
    """Call ``function``; return (result, None) or, if memory ran out, (None, failure). Raise other errors."""
    try:
        return function(*args, **kwargs), None
    except RuntimeError as error:
        failure = failure_of(error)
        if failure is None:
            raise
    return None, failure


def failure_of(error: BaseException) -> Failure | None:
    """Return what an out-of-memory error says; ``None`` for any other error."""
    if not isinstance(error, RuntimeError):
        return None
    text = next(iter(str(error).splitlines()), "")
    if not isinstance(error, torch.OutOfMemoryError) and not any(sign in text for sign in _LIBRARY_ERRORS):
        return None
    wanted = _WANTED.search(text)
    if wanted is None:
        return Failure(type(error), text, None)
    return Failure(type(error), text, int(float(wanted[1].replace(",", "")) * _UNITS[wanted[2]]))
