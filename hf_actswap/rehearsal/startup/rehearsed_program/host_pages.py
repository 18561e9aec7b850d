"""Page-locked memory takes none of the machine's: the pages of a slab are not touched when it is made.

There may be more of it than the machine has.

On a device that touch is most of what page-locking takes, which the clock counts with it. In a rehearsal only
what is written needs pages, and where large tensors carry no values, nobody writes them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

_NO_RESERVE = 0x4000
"""MAP_NORESERVE of mmap(2): more may be mapped than the machine has. Python has no name for it."""


def touch_nothing(slabs: Any) -> None:
    """Let new slabs of host memory stay untouched.

    Args:
        slabs: ``hf_actswap.engine.host_pool``.
    """

    def untouched(self: Any, slab: Any, start: int) -> None:
        return None

    slabs.PinnedSlabs._touch = untouched
    slabs.MAPPING |= _NO_RESERVE


def limit(host_memory: Any) -> None:
    """Let a program count on the host memory that the rehearsal was asked for, less what it has locked.

    Args:
        host_memory: ``hf_actswap.engine.host_memory``.
    """
    text = os.environ.get("HF_ACTSWAP_REHEARSAL", "")
    asked = dict(pair.split("=", 1) for pair in text.split(";") if "=" in pair).get("host_bytes")
    if asked is None:
        return
    runtime = ctypes.CDLL(None)
    runtime.rehearsal_count.restype = ctypes.c_longlong

    def of_rehearsal(*_: Any) -> Iterator[int]:
        yield int(asked) - int(runtime.rehearsal_count(b"host"))

    def none(*_: Any) -> Iterator[int]:
        yield from ()

    host_memory._machine_limit, host_memory._cgroup_limits = of_rehearsal, none
