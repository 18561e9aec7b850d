"""Observed copies: named for a profiler that is on, and reported to a listener.

`WatchedTransfer` wraps another transfer for one forward and its backward (`PlanRuntime.watched`). Without a
profiler or a listener it is not used.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch.autograd.profiler import record_function

from ..plan.actions import Scope
from .blocks import HostBuffer
from .link import Link
from .stats import PendingTime
from .transfer import Copy, Stamp, Transfer

Direction = Literal["out", "in"]
OpName = tuple[Scope | None, str]
"""Scope and op path of the plan row that swaps; ``(None, "")`` if none is known."""

_NO_OP: OpName = (None, "")


@dataclass(eq=False, slots=True)
class WatchedCopy:
    """One copy, as it was asked for.

    Args:
        direction: out to the host, or in to the device.
        name: the plan row that swaps the tensor.
        size_bytes: bytes that are copied.
        asked: where compute was when the copy was asked for.
        done: end of the copy, in the order of work of the copying stream.
        inner: the copy itself.
        first: for a copy in: the copy out of the same host block.
    """

    direction: Direction
    name: OpName
    size_bytes: int
    asked: Stamp
    done: Stamp
    inner: Copy
    first: WatchedCopy | None
    _listener: CopyListener | None
    _clock: Transfer

    def wait(self) -> PendingTime | None:
        """Make compute wait for the copy; return what measures the wait, ``None`` if there was none."""
        if self._listener is None:
            return self.inner.wait()
        start = self._clock.stamp()
        waited = self.inner.wait()
        if waited is not None:
            self._listener.waited(self, start, waited)
        return waited


@runtime_checkable
class StampsCopies(Protocol):
    """A transfer whose copies run in an order of their own beside compute's (`StreamTransfer`)."""

    def copy_stamp(self, direction: Direction) -> Stamp:
        """Mark the present place in the order of the copies out, or in."""


class CopyListener(Protocol):
    """Is told of each copy and of each wait for one."""

    def copied(self, copy: WatchedCopy, on_device: torch.Tensor) -> None:
        """Receive a copy when it is asked for; ``on_device`` is its source or its target."""

    def waited(self, copy: WatchedCopy, start: Stamp, length: PendingTime) -> None:
        """Receive a wait of compute for a copy, from ``start`` on."""


class WatchedTransfer:
    """A `Transfer` around another, which names each copy for a profiler and reports it to a listener.

    Args:
        inner: the transfer that moves the bytes.
        listener: receives the copies; ``None``: none.
        profiled: whether a profiler is on.
    """

    def __init__(self, inner: Transfer, listener: CopyListener | None, profiled: bool) -> None:
        self._inner, self._listener, self._profiled = inner, listener, profiled
        self.overlaps = inner.overlaps
        self._next = _NO_OP

    def name(self, name: OpName) -> None:
        """Set the name of the next copy out."""
        self._next = name

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        """Copy ``source`` (contiguous, on the device) to ``host``, after `HostBuffer.hold` on it."""
        name, self._next = self._next, _NO_OP
        asked = self._inner.stamp()
        with self._range("offload", name):
            inner = self._inner.offload(source, host)
        return self._told("out", name, host, asked, inner, None, source)

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        """Copy ``host`` to a new contiguous tensor on the device, once ``after`` is complete."""
        first = after if isinstance(after, WatchedCopy) else None
        name = _NO_OP if first is None else first.name
        asked = self._inner.stamp()
        with self._range("prefetch", name):
            block, inner = self._inner.reload(host, after if first is None else first.inner)
        return block, self._told("in", name, host, asked, inner, first, block)

    def host_reader_done(self, host: HostBuffer) -> None:
        """Note that the present content of ``host`` will not be reloaded again."""
        self._inner.host_reader_done(host)

    def stamp(self) -> Stamp:
        """Mark the present place in compute's order of work."""
        return self._inner.stamp()

    def synchronize(self) -> None:
        """Wait until compute has done all that it was given."""
        self._inner.synchronize()

    def link(self) -> Link | None:
        """Measure the link; ``None`` if copies do not overlap compute. Between steps only."""
        return self._inner.link()

    def free_bytes(self) -> int | None:
        """Device memory that this process can still use; ``None``: the same as the host's."""
        return self._inner.free_bytes()

    def empty_cache(self) -> None:
        """Give cached device memory back to the device. Between steps only."""
        self._inner.empty_cache()

    def _range(self, what: str, name: OpName) -> AbstractContextManager[object]:
        if not self._profiled:
            return nullcontext()
        return profiler_range(what, " ".join(str(part) for part in name if part not in (None, "")))

    def _told(
        self,
        direction: Direction,
        name: OpName,
        host: HostBuffer,
        asked: Stamp,
        inner: Copy,
        first: WatchedCopy | None,
        on_device: torch.Tensor,
    ) -> WatchedCopy:
        transfer = self._inner
        done = transfer.copy_stamp(direction) if isinstance(transfer, StampsCopies) else transfer.stamp()
        copy = WatchedCopy(
            direction, name, host.size_bytes, asked, done, inner, first, self._listener, transfer
        )
        if self._listener is not None:
            self._listener.copied(copy, on_device)
        return copy


def profiler_is_on() -> bool:
    """Whether ``torch.profiler`` records at present; it only reads an attribute, so it is cheap."""
    return torch.autograd.profiler._is_profiler_enabled


def profiler_range(what: str, place: str) -> record_function:
    """Return a range ``hf_actswap.<what> <layer> <op path>`` for the profiler's trace."""
    return record_function(f"hf_actswap.{what} {place}".rstrip())
