"""`MovingBlock`: bytes that move between device and host memory, the one form of all that is swapped.

Where the bytes are, which copy runs and who waits for it is kept here. *When* they move, their owner says::

                leave              release               fetch
    device  ----------> leaving -----------> host -----------------> returning
      ^                  |  |                 ^                       ^  |  |
      |      stay        |  |                 +------- drop, take ----|--+  |
      +------------------+  +------------- reload --------------------+     |
      +--------------------------------- take("device") --------------------+

==============  =======================================  =============================================
place           what is held                             where the bytes can be read
==============  =======================================  =============================================
``device``      nothing: the tensors are the owner's     on the device
``leaving``     ``source``, which the copy out reads     on the device
``host``        nothing                                  on the host
``returning``   ``target``, which the copy in writes     on the host; on the device when it has settled
==============  =======================================  =============================================

Copies and events are those of `transfer`, whose docstring argues the order of streams. Three rules are left:
a source is held until compute waits for the copy out (`release`, `stay`); each reader of a target waits for
the copy in (`settle`); and a target that may have had no reader is dropped after the same wait (`drop`).

==================================  ==================================================================
owner                               when its blocks move
==================================  ==================================================================
`tickets.SwapGroup`                 leaves when autograd saves, comes back before backward reads it
`frozen_weights.LayerWeights`       always on the host; a window of layers is fetched ahead of their use
`swapped_storages.EvictableStorage` leaves when memory runs out, comes back when backward reads it
`stream.HostSequence`               leaves behind a chunk of a sequence, comes back for other chunks
`planner.states.StateStorage`       leaves after the optimizer has used it, comes back before the next step
==================================  ==================================================================
"""

from __future__ import annotations

from typing import Literal

import torch

from .host_pool import HostBuffer
from .stats import Counters
from .transfer import COMPLETE, Copy, Transfer

Whereabouts = Literal["device", "leaving", "host", "returning"]


class MovingBlock:
    """Bytes that have a host buffer, and at most one copy out and one copy in that run.

    Args:
        host: has room for them; whoever has taken it from a pool gives it back after `end`.
        transfer: copies them.
        counters: to which copies, their bytes and waits are added.
        place: where they are at first: on the device, or in ``host`` already.

    Attributes:
        source: what leaves, and whatever else its owner needs until then.
        target: what comes back, in the shape and dtype that ``host`` holds.
        version, stale_version: of the source, when it left; and when it was released, if somebody wrote it.
        target_version: of the target when it came back; its readers do not write it.
        fetches: how often it came back.
    """

    __slots__ = (
        "_in",
        "_out",
        "counters",
        "fetches",
        "host",
        "place",
        "source",
        "stale_version",
        "target",
        "target_version",
        "transfer",
        "version",
    )

    def __init__(
        self, host: HostBuffer, transfer: Transfer, counters: Counters, place: Whereabouts = "device"
    ) -> None:
        self.host, self.transfer, self.counters, self.place = host, transfer, counters, place
        self.source: torch.Tensor | None = None
        self.target: torch.Tensor | None = None
        self.version = self.target_version = self.fetches = 0
        self.stale_version: int | None = None
        self._out: Copy = COMPLETE
        self._in: Copy = COMPLETE

    def leave(self, source: torch.Tensor, part: torch.Tensor | None = None) -> None:
        """Start the copy out of ``source``, which nobody may write now, or of a contiguous ``part`` of it."""
        if part is None:
            part = source
        host, counters = self.host, self.counters
        host.hold(part.dtype, part.shape)
        self._out = self.transfer.offload(part, host)
        self.source, self.version, self.place = source, source._version, "leaving"
        counters.offloads += 1
        counters.offloaded_bytes += host.size_bytes

    def release(self) -> None:
        """Let compute wait for the copy out, and let go of the source; nothing if it has gone."""
        source = self.source
        if source is None:
            return
        waited = self._out.wait()
        if waited is not None:
            self.counters.stalled(waited)
        if source._version != self.version:
            self.stale_version = source._version
        self.source = None
        if self.place == "leaving":
            self.place = "host"

    def stay(self) -> None:
        """Be on the device after all, because the source will be written; call it at ``leaving``."""
        self.counters.stalled(self._out.wait())
        self.source, self.place = None, "device"

    def fetch(self) -> None:
        """Start the copy in; nothing unless at ``host``, nor if somebody wrote what left."""
        if self.place == "host" and self.stale_version is None:
            self.reload()

    def reload(self) -> torch.Tensor:
        """Start the copy in, behind the copy out; call it at ``host`` or ``leaving``. Returns the target.

        Raises:
            torch.OutOfMemoryError: the device has no room; nothing has changed.
        """
        host, counters = self.host, self.counters
        target, copy = self.transfer.reload(host, self._out)
        self.target, self._in, self.place = target, copy, "returning"
        self.target_version = target._version
        self.fetches += 1
        counters.prefetches += 1
        counters.prefetched_bytes += host.size_bytes
        return target

    def settle(self) -> None:
        """Make compute wait for the copy in; before each read, because readers may be on several streams."""
        waited = self._in.wait()
        if waited is not None:
            self.counters.stalled(waited)

    def take(self, place: Whereabouts = "host") -> torch.Tensor:
        """Make compute wait for the copy in, and let go of the target; who has it, holds it. Returns it.

        ``place``: ``device`` if it is the bytes from now on, ``host`` if it was a copy of them.
        """
        target = self.target
        assert target is not None
        waited = self._in.wait()  # `settle`, without its call for each tensor
        if waited is not None:
            self.counters.stalled(waited)
        self.target, self._in, self.place = None, COMPLETE, place
        return target

    def drop(self) -> None:
        """Let go of a target that nobody may have read; nothing if there is none, or not any more.

        The garbage collector may drop it too, in the middle of anything.
        """
        if self.target is not None:
            self.settle()  # else compute would use the memory while the copy still writes it
            self.target, self._in, self.place = None, COMPLETE, "host"

    def end(self) -> None:
        """Wait for the copies that run. The host buffer is not read again, so it can be given back."""
        if self.target is not None:
            self._in.wait()
        if self.source is not None:
            self._out.wait()
        self.source = self.target = None
        self.transfer.host_reader_done(self.host)
