"""Deliberate faults of streams and lifetimes: one statement of the library is replaced by another."""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hf_actswap.engine import host_pool, moving_block, swapped_storages, transfer


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Args:
        name: what is wrong.
        owner: the class whose method it is.
        method: name of the method.
        old: text in its source, exactly once.
        new: what stands there instead.
        training: name of the piece of training that finds it.
    """

    name: str
    owner: type
    method: str
    old: str
    new: str
    training: str

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Run the block with the fault."""
        original = inspect.getattr_static(self.owner, self.method)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, f"{self.name}: the source has changed"
        names: dict[str, Any] = {}
        flags = __future__.annotations.compiler_flag
        code = compile(source.replace(self.old, self.new), f"<{self.name}>", "exec", flags, True)
        exec(code, original.__globals__, names)
        setattr(self.owner, self.method, names[self.method])
        try:
            yield
        finally:
            setattr(self.owner, self.method, original)


_Copies, _Copy = transfer.StreamTransfer, transfer._StreamCopy
_Block = moving_block.MovingBlock
_TRAININGS = {
    "saved tensors": "swapped",
    "passes": "passes",
    "sequence": "sequence",
    "weights": "frozen weights",
    "states": "optimizer states",
}
"""A piece of training that finds a fault of blocks, by their owner."""
_AFTER_COMPUTE = "wait_event(self._asked)"
_BEFORE_OUT, _BEFORE_IN = f"self._out.{_AFTER_COMPUTE}", f"self._in.{_AFTER_COMPUTE}"
_OUT, _IN, _SETTLE = "self._out.wait()", "self._in.wait()", "self.settle()"

MUTATIONS = (
    Mutation("a copy out does not wait for compute", _Copies, "offload", _BEFORE_OUT, "pass", "swapped"),
    Mutation(
        "a copy out does not wait for the block's last reader",
        _Copies,
        "offload",
        "self._out.wait_event(host.last_use.event)",
        "pass",
        "host block used again",
    ),
    Mutation(
        "a copy out is done when it begins",
        _Copies,
        "offload",
        "self._events.recorded_on(self._out)",
        "self._events.recorded_on(compute)",
        "swapped",
    ),
    Mutation("a copy in does not wait for compute", _Copies, "reload", _BEFORE_IN, "pass", "swapped"),
    Mutation(
        "a copy in does not wait for the copy out",
        _Copies,
        "reload",
        "self._in.wait_event(after.done.event)",
        "pass",
        "sequence",
    ),
    Mutation(
        "a copy in leaves no mark on its block",
        _Copies,
        "reload",
        "host.last_use = done = ",
        "done = ",
        "host block used again",
    ),
    Mutation(
        "a copy in is done when it begins",
        _Copies,
        "reload",
        "self._events.recorded_on(self._in)",
        "self._events.recorded_on(compute)",
        "swapped",
    ),
    Mutation(
        "the current stream does not wait for a copy",
        _Copy,
        "wait",
        "compute.wait_event(done)\n    return _TimedWait",
        "return _TimedWait",
        "fetched on use",
    ),
    Mutation(
        "only the current stream waits for a copy",
        _Copy,
        "wait",
        "stream.wait_event(done)",
        "pass",
        "asked on another stream",
    ),
    Mutation(
        "a foreign reader is not recorded on the block",
        _Copy,
        "wait",
        "block.record_stream(compute)",
        "pass",
        "reader on another stream",
    ),
    Mutation(
        "an event is used again without being recorded",
        transfer._Events,
        "recorded_on",
        "event.record(stream)",
        "len(self._free) or event.record(stream)",
        "swapped",
    ),
    *(
        Mutation(
            f"{owner}: a release does not wait for the copy out", _Block, "release", _OUT, "None", training
        )
        for owner, training in _TRAININGS.items()
        if owner != "weights"  # they are on the host already
    ),
    Mutation(
        "a release gives the host block back",
        _Block,
        "release",
        "self.source = None",
        "self.source = self._pool.give_back(self.host)",
        "swapped",
    ),
    *(
        Mutation(
            f"{owner}: a reader does not wait for the copy in",
            _Block,
            "settle" if owner == "weights" else "take",  # the last reader takes the block
            _IN,
            "None",
            training,
        )
        for owner, training in _TRAININGS.items()
    ),
    Mutation("a graph dies before its copies in are done", _Block, "end", _IN, "pass", "swapped"),
    Mutation("a graph dies before its copies out are done", _Block, "end", _OUT, "pass", "dropped in flight"),
    Mutation("a sequence is dropped while it comes", _Block, "end", _IN, "pass", "sequence"),
    Mutation(
        "a sequence is brought before it has left",
        _Block,
        "reload",
        "self.transfer.reload(host, self._out)",
        "self.transfer.reload(host, None)",
        "sequence",
    ),
    Mutation(
        "weights are dropped while they come", _Block, "drop", _SETTLE, "pass", "frozen weights dropped"
    ),
    Mutation("states are turned back in flight", _Block, "drop", _SETTLE, "pass", "optimizer states"),
    Mutation("states are changed while they leave", _Block, "stay", _OUT, "None", "optimizer states"),
    Mutation(
        "host memory is cut up while it is read",
        host_pool.Blocks,
        "_join_kept",
        "buffer.last_use.synchronize()",
        "pass",
        "host memory cut up",
    ),
    Mutation(
        "an eviction writes host memory that is read",
        swapped_storages.EvictableTensors,
        "evict",
        "torch.accelerator.synchronize(alive[0].device)",
        "pass",
        "evicted",
    ),
)
