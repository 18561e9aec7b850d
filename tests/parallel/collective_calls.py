"""Standing before ``torch.distributed``'s collectives, to note their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

KINDS = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_reduce": "all_reduce",
}
"""Name in ``torch.distributed`` (of 2.13 and before) -> kind."""

Collective = Callable[..., Any]


@contextmanager
def wrapped(wrap: Callable[[str, Collective], Collective], names: Iterable[str] = KINDS) -> Iterator[None]:
    """Put ``wrap(kind, collective)`` in the place of each collective that this version has."""
    own = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    try:
        for name, collective in own.items():
            setattr(dist, name, wrap(KINDS.get(name, name), collective))
        yield
    finally:
        for name, collective in own.items():
            setattr(dist, name, collective)


@contextmanager
def noted(note: Callable[[str, str, tuple[Any, ...]], None]) -> Iterator[Callable[[str], None]]:
    """Call ``note(part of the step, kind, arguments)`` for each; yields what names the present part."""
    part = ["forward"]

    def noting(kind: str, collective: Collective) -> Collective:
        def call(*args: Any, **kwargs: Any) -> Any:
            note(part[0], kind, (args, kwargs))
            return collective(*args, **kwargs)

        return call

    with wrapped(noting):
        yield lambda name: part.__setitem__(0, name)
