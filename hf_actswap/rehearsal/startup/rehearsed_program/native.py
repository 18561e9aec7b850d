"""The functions of the device's libraries that are called from inside a program."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

MOST_RACES = 5


class Native:
    """The runtime's and the arithmetic's functions, with Python's types."""

    def __init__(self, arithmetic: ctypes.CDLL) -> None:
        self.arithmetic, self.runtime = arithmetic, ctypes.CDLL(None)
        self.runtime.rehearsal_stub.restype = ctypes.c_long
        self.runtime.rehearsal_races.restype = ctypes.c_size_t
        self.runtime.rehearsal_host_stands.restype = ctypes.c_void_p
        self.runtime.rehearsal_count.restype = ctypes.c_longlong
        self.runtime.rehearsal_device_peak.restype = ctypes.c_longlong
        for name in ("rehearsal_left_out", "rehearsal_ledger", "rehearsal_ledger_now"):
            getattr(arithmetic, name).restype = ctypes.c_size_t

    @contextmanager
    def host_stands(self) -> Iterator[None]:
        """Within the block the host's time does not pass: it is the rehearsal's own work."""
        stands = ctypes.c_void_p(self.runtime.rehearsal_host_stands())
        try:
            yield
        finally:
            self.runtime.rehearsal_host_goes_on(stands)

    def install_ops_of(self, owner: str) -> None:
        """Let the ops that a library has registered have values and take time, as PyTorch's own do."""
        self.arithmetic.rehearsal_install_ops_of(owner.encode())

    def kernel_moved(self, device: int, moved_bytes: int) -> None:
        """Tell the clock what a kernel moved that no op launched, on the stream that is current."""
        self.arithmetic.rehearsal_kernel_moved(ctypes.c_int(device), ctypes.c_double(moved_bytes))

    def stubs(self) -> dict[str, int]:
        """Return the functions of CUDA that were called and do nothing -> calls."""
        found, number, name = {}, 0, ctypes.c_char_p()
        while (calls := self.runtime.rehearsal_stub(ctypes.c_long(number), ctypes.byref(name))) >= 0:
            if calls and name.value:
                found[name.value.decode()] = int(calls)
            number += 1
        return found

    def left_out(self) -> dict[str, int]:
        """Return the ops whose values were not computed for want of arithmetic -> calls."""
        lines = [line.split(" ", 1) for line in self._text(self.arithmetic.rehearsal_left_out).splitlines()]
        return {name: int(calls) for calls, name in lines}

    def races(self) -> list[str]:
        """Return the first accesses that nothing orders."""
        text, found = ctypes.create_string_buffer(1024), []
        for number in range(min(self.runtime.rehearsal_races(), MOST_RACES)):
            self.runtime.rehearsal_race(ctypes.c_size_t(number), text, ctypes.c_size_t(len(text)))
            found.append(text.value.decode())
        return found

    def host_peak(self) -> int:
        """Return the most host memory that was page-locked at once."""
        return int(self.runtime.rehearsal_count(b"host_peak"))

    def device_peak(self, device: int) -> int:
        """Return the most memory that this process had of a device."""
        return int(self.runtime.rehearsal_device_peak(device))

    def stream_ms(self, stream: int) -> tuple[float, float]:
        """Return when all work of a stream is done, and how long its kernels took until now."""
        done_at, worked = ctypes.c_double(), ctypes.c_double()
        self.runtime.rehearsal_stream_ms(ctypes.c_void_p(stream), ctypes.byref(done_at), ctypes.byref(worked))
        return done_at.value, worked.value

    def begin_ledger(self) -> None:
        """Keep books of what device memory holds, from now on."""
        self.arithmetic.rehearsal_ledger_begin()

    def set_step(self, steps: int) -> None:
        """Say how many optimizer steps are done."""
        self.arithmetic.rehearsal_ledger_step(steps)

    def set_optimizer(self, runs: bool) -> None:
        """Say whether an optimizer's step runs."""
        self.arithmetic.rehearsal_ledger_optimizer(int(runs))

    def mark(self, addresses: Iterable[int], kind: str) -> None:
        """Say what the memory at these addresses holds."""
        known = list(addresses)
        array = (ctypes.c_uint64 * len(known))(*known)
        self.arithmetic.rehearsal_ledger_mark(array, ctypes.c_size_t(len(known)), kind.encode())

    def running(self) -> tuple[str, str]:
        """Return the part of a step and the op that run on this thread."""
        phase, _, op = self._text(self.arithmetic.rehearsal_ledger_now).partition("\t")
        return phase, op

    def memory(self, device: int, at_peak: bool) -> dict[str, Any] | None:
        """Return what a device's memory held at the peak, or holds now; ``None``: never anything."""
        lines = self._text(self.arithmetic.rehearsal_ledger, device, int(at_peak)).splitlines()
        if not lines:
            return None
        peak, step, phase, op, reserved_peak, allocated, reserved = lines[0].split("\t")
        groups = [line.split("\t") for line in lines[1:]]
        return {
            "peak_bytes": int(peak),
            "steps_before": int(step),
            "phase": phase,
            "op": op,
            "reserved_peak_bytes": int(reserved_peak),
            "allocated_bytes": int(allocated),
            "reserved_bytes": int(reserved),
            "held": [
                {"bytes": int(size), "count": int(count), "kind": kind, "phase": part, "op": name}
                for size, count, kind, part, name in groups
            ],
        }

    @staticmethod
    def _text(function: Any, *arguments: int) -> str:
        length = 1 << 16
        while True:
            text = ctypes.create_string_buffer(length)
            needed = function(*arguments, text, ctypes.c_size_t(length))
            if needed < length:
                return text.value.decode()
            length = 2 * needed
