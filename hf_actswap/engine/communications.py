"""What a region does about the communications inside it when it runs again: the kept results come back.

A recomputed layer that keeps the result of a communication still runs its other ops again; at the place of
the communication the kept result is handed out, and no rank waits for another. What needs no more than that:
the results, in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ..plan.opnames import COMMUNICATIONS, function_name
from .tickets import Ticket, restore


class _Result(NamedTuple):
    """Of one communication; ``packs``: how many tensors the region had saved before it."""

    ticket: Ticket
    requires_grad: bool
    packs: int


class KeptCommunications:
    """The communications of one region."""

    def __init__(self) -> None:
        self._results: list[_Result | None] = []

    def communicates_again(self) -> None:
        """The next communication of the region communicates again."""
        self._results.append(None)

    def keep(self, ticket: Ticket, requires_grad: bool, packs: int) -> None:
        """The next communication of the region returned this, after ``packs`` saved tensors."""
        self._results.append(_Result(ticket, requires_grad, packs))

    def close(self, last_needed: int) -> None:
        """Forget results that come after saved tensor number ``last_needed``: a new run ends before them."""
        self._results = [
            result if result is not None and result.packs <= last_needed else None for result in self._results
        ]

    def replayed(self) -> AbstractContextManager[Any]:
        """While the region runs again, hand out what was kept in place of communicating."""
        return _Replay(self._results) if any(self._results) else nullcontext()


class _Replay(TorchFunctionMode):
    def __init__(self, results: Sequence[_Result | None]) -> None:
        super().__init__()
        self._results = iter(results)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function_name(func) in COMMUNICATIONS:
            result = next(self._results, None)
            if result is not None:
                kept: torch.Tensor = restore(result.ticket)
                return kept.detach().requires_grad_(result.requires_grad)
        return func(*args, **(kwargs or {}))
