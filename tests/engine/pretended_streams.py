"""Streams and events for a machine that has none, and a happens-before detector around them.

Everything runs at once, in the order of the calls; what is checked is the order that streams and events
would enforce. Each stream has a vector clock: how far its own work has come, and how much of each other
stream's work it has waited for. An event carries the clock of the stream that it was recorded on.
`StreamOrder.watching` sees every operator that touches memory, on the stream that is current, and so the
engine's copies as well:

* two operators on different streams that touch the same bytes, one of them writing, must be ordered;
* memory that dies goes to the pool of the stream that allocated it, whose next work may overwrite it: that
  stream must be ordered behind every other stream's use of it, unless the other was named to the allocator
  (``record_stream``).

The garbage collector runs at random copies, so that graphs in reference cycles die while a copy stream is
current.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_actswap.engine import Link, PageableSlabs, StreamTransfer, host_budget, transfer

Clock = dict[str, int]
"""How many operators of each stream are done."""

CPU = torch.device("cpu")
_TOUCH_NO_MEMORY = frozenset({"aten::set_", "aten::detach", "aten::detach_", "aten::resize_"})
_READ_NO_MEMORY = frozenset({"aten::empty_like"})
"""Operators that ask their arguments for shape and type."""


def _join(clock: Clock, other: Clock) -> None:
    for name, tick in other.items():
        if tick > clock.get(name, 0):
            clock[name] = tick


@dataclass(eq=False)
class _Memory:
    """One storage: who may be given its memory next, and who has used it.

    Args:
        storage: not kept alive.
        owner: the stream whose pool it comes from; ``None``: host memory, which the host itself gives back.
        uses: (stream, writes, first byte, end) -> the last tick.
        recorded: streams named to the allocator.
    """

    storage: StorageWeakRef
    owner: PretendedStream | None
    uses: dict[tuple[str, bool, int, int], int] = field(default_factory=dict)
    recorded: set[str] = field(default_factory=set)


def _name_and_clock(stream: PretendedStream) -> tuple[str, Clock]:
    return stream.name, stream.clock


class PretendedStream:
    """See `StreamOrder`. As PyTorch's, it keeps the streams to go back to on itself."""

    device = CPU

    def __init__(self, order: StreamOrder, name: str) -> None:
        self.name, self.clock = name, Clock()
        self._order = order
        self._before: list[PretendedStream] = []

    def wait_event(self, event: PretendedEvent) -> None:
        assert event.stream is not None, "a stream waits for an event that nobody recorded"
        self._order.notice_deaths()
        if (self.name, event.stream.name) not in self._order.unwaited:
            _join(self.clock, event.clock)

    def __enter__(self) -> PretendedStream:
        self._before.append(self._order.current())
        self._order.set_current(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._order.set_current(self._before.pop())


class PretendedEvent:
    """Is complete or not as chance has it; 0.1 ms pass between one that is recorded and the next."""

    _times_ms = count(0.0, 0.1)

    def __init__(self, order: StreamOrder, enable_timing: bool) -> None:
        self.stream: PretendedStream | None = None
        self.clock = Clock()
        self._order, self.timing = order, enable_timing
        self._at_ms = 0.0

    def record(self, stream: PretendedStream) -> None:
        self._order.notice_deaths()
        self.stream, self.clock, self._at_ms = stream, dict(stream.clock), next(self._times_ms)

    def query(self) -> bool:
        done = self._order.chance.random() < 0.5
        if done:
            self.synchronize()
        return done

    def synchronize(self) -> None:
        assert self.stream is not None
        _join(self._order.host, self.clock)

    def elapsed_time(self, other: PretendedEvent) -> float:
        assert self.timing
        assert other.timing
        return other._at_ms - self._at_ms


class StreamOrder:
    """Streams, events, the current stream of each thread, and who may touch which memory when.

    Args:
        seed: of what chance decides.
        collections: share of copies at which the garbage collector runs.
        unwaited: (who waits, for whom): waits that are left out, by the names of streams, in the order in
            which they were made: ``compute``, ``out``, ``in``. A correct engine cannot survive that.

    Attributes:
        violations: in words.
        operators: that touched memory, so far.
        timing_events: made so far.
    """

    def __init__(
        self, seed: int = 0, collections: float = 0.0, unwaited: tuple[tuple[str, str], ...] = ()
    ) -> None:
        self.chance, self.unwaited = random.Random(seed), unwaited
        self.host, self.violations = Clock(), list[str]()
        self.operators = self.timing_events = 0
        self._collections = collections
        self._names = iter(["out", "in"])
        self.compute = PretendedStream(self, "compute")
        self._streams = [self.compute]
        self._threads = threading.local()
        self._memories: dict[int, _Memory] = {}
        self._shared: dict[_Memory, None] = {}  # used by others than the owner

    def new_stream(self, *_: object, name: str = "") -> PretendedStream:
        self._streams.append(PretendedStream(self, name or next(self._names)))
        return self._streams[-1]

    def new_event(self, *_: object, enable_timing: bool = False) -> PretendedEvent:
        self.timing_events += enable_timing
        return PretendedEvent(self, enable_timing)

    def current(self, *_: object) -> PretendedStream:
        return getattr(self._threads, "stream", self.compute)

    def set_current(self, stream: PretendedStream) -> None:
        self._threads.stream = stream

    def synchronize(self, *_: object) -> None:
        """The host waits for everything."""
        for stream in self._streams:
            _join(self.host, stream.clock)

    def own_by_host(self, slab: torch.Tensor) -> None:
        """Host memory has no stream's pool."""
        storage = slab.untyped_storage()
        self._memories[storage._cdata] = _Memory(StorageWeakRef(storage), None)

    def record_stream(self, tensor: torch.Tensor, stream: PretendedStream) -> None:
        self._memory(tensor).recorded.add(stream.name)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at every operator of this thread, and let the garbage collector run only by chance."""
        collects = gc.isenabled()
        gc.disable()
        gc.freeze()  # what is there already is not looked through each time
        try:
            with self.operators_of_thread():
                yield
        finally:
            gc.unfreeze()
            if collects:
                gc.enable()
        self.notice_deaths()

    def operators_of_thread(self) -> TorchDispatchMode:
        """Look at every operator of one more thread."""
        return _Operators(self)

    def perhaps_collect(self) -> None:
        """The garbage collector runs when it likes: also while a copy stream is current."""
        if self.current().name in ("out", "in") and self.chance.random() < self._collections:
            gc.collect()

    def touched(self, what: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """An operator was given to the current stream."""
        self.notice_deaths()
        stream = self.current()
        _join(stream.clock, self.host)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        self.operators += 1
        for tensors, writes in ((read, False), (written, True)):
            for tensor in tensors:
                self._use(what, stream, tensor, writes)

    def notice_deaths(self) -> None:
        """What has died since the last look was given back before whatever comes now."""
        for memory in [memory for memory in self._shared if memory.storage.expired()]:
            del self._shared[memory]
            owner, clock = ("host", self.host) if memory.owner is None else _name_and_clock(memory.owner)
            for (name, _, _, _), tick in memory.uses.items():
                if name not in (owner, *memory.recorded) and clock.get(name, 0) < tick:
                    copied = "copied " if {"out", "in"} & {use[0] for use in memory.uses} else ""
                    self.violations.append(
                        f"{copied}memory of {owner} was given back while {name} may use it"
                    )
                    break

    def _use(self, what: str, stream: PretendedStream, tensor: torch.Tensor, writes: bool) -> None:
        if not tensor.numel():
            return
        memory = self._memory(tensor)
        if stream is not memory.owner:
            self._shared[memory] = None
        extent = sum((size - 1) * abs(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        first = tensor.storage_offset() * tensor.element_size()
        stop = first + (extent + 1) * tensor.element_size()
        for (name, wrote, from_byte, to_byte), tick in memory.uses.items():
            conflict = name != stream.name and (writes or wrote) and from_byte < stop and first < to_byte
            if conflict and stream.clock.get(name, 0) < tick:
                verb = "writes" if writes else "reads"
                self.violations.append(
                    f"{stream.name} {verb} ({what}) what {name} may still {'write' if wrote else 'read'}"
                )
        memory.uses[stream.name, writes, first, stop] = stream.clock[stream.name]

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._memories.get(key)
        if memory is None or memory.storage.expired():
            memory = self._memories[key] = _Memory(StorageWeakRef(storage), self.current())
        return memory


class _Operators(TorchDispatchMode):
    """Tells a `StreamOrder` what each operator reads and writes."""

    def __init__(self, order: StreamOrder) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._order.perhaps_collect()
        result = func(*args, **kwargs)
        schema = func._schema
        if func.is_view or schema.name in _TOUCH_NO_MEMORY:
            return result
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
        given |= kwargs
        changed = {item.name for item in schema.arguments if item.alias_info and item.alias_info.is_write}
        read = [leaf for name, value in given.items() if name not in changed for leaf in _tensors(value)]
        read = [] if schema.name in _READ_NO_MEMORY else read
        written = [leaf for name in changed for leaf in _tensors(given.get(name))]
        keys = {leaf.untyped_storage()._cdata for leaf in (*read, *written)}
        written += [leaf for leaf in _tensors(result) if leaf.untyped_storage()._cdata not in keys]
        self._order.touched(schema.name, read, written)
        return result


class _Slabs(PageableSlabs):
    """Host memory that is given back as `PinnedSlabs` does: when the device has nothing more to do."""

    def __init__(self, order: StreamOrder) -> None:
        self._order = order

    def allocate(self, size_bytes: int) -> torch.Tensor:
        slab = super().allocate(size_bytes)
        self._order.own_by_host(slab)
        return slab

    def free(self, slab: torch.Tensor) -> None:
        self._order.synchronize()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def pretend(patch: pytest.MonkeyPatch, order: StreamOrder | None = None) -> list[int]:
    """Replace what an accelerator would bring; return the list that spins are written to.

    Args:
        patch: undoes it.
        order: whose streams and events are used; looks at nothing unless it is `StreamOrder.watching`.
    """
    spins: list[int] = []
    order = order or StreamOrder()
    record_stream: Callable[..., None] = lambda tensor, stream: order.record_stream(tensor, stream)  # noqa: E731
    patch.setattr(torch, "Stream", order.new_stream)
    patch.setattr(torch, "Event", order.new_event)
    patch.setattr(torch.Tensor, "record_stream", record_stream)
    patch.setattr(torch.accelerator, "current_stream", order.current)
    patch.setattr(torch.cuda, "_sleep", spins.append)
    patch.setattr(host_budget, "PinnedSlabs", lambda *_: _Slabs(order))
    patch.setattr(transfer, "measure_link", lambda _device: Link(1e9, 1e9, 1e9, 1e9, latency_ms=0.0))
    patch.setattr(StreamTransfer, "synchronize", order.synchronize)
    patch.setattr(StreamTransfer, "free_bytes", lambda _self: 2**30)
    patch.setattr(StreamTransfer, "empty_cache", lambda _self: None)
    return spins
