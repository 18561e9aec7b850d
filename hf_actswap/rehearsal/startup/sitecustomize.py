"""Runs when Python starts in a rehearsal: PyTorch gets its arithmetic once it is imported.

Nothing of the library is imported here, and no PyTorch: programs that need neither start as fast as ever.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def _settings() -> dict[str, str]:
    text = os.environ.get("HF_ACTSWAP_REHEARSAL", "")
    return dict(pair.split("=", 1) for pair in text.split(";") if "=" in pair)


def _start_up() -> Any:
    """Load what the start-up files of this package share, by its path: it may not be importable here."""
    path = Path(__file__).parents[2] / "startup.py"
    spec: Any = importlib.util.spec_from_file_location("hf_actswap_startup", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _install(torch: ModuleType) -> None:
    settings = _settings()
    if torch.version.cuda is None:
        return
    ctypes.CDLL(None).rehearsal_kernels_are_for(_newest_kernels(torch, settings))
    arithmetic = ctypes.CDLL(settings["arithmetic"], mode=ctypes.RTLD_GLOBAL)
    native = importlib.import_module("rehearsed_program.native").Native(arithmetic)
    if settings["level"] != "0" or settings["races"] != "0" or "clock" in settings:
        arithmetic.rehearsal_install(int(settings["level"]), ctypes.c_uint64(int(settings["small_bytes"])))
        rehearse = _of_program("bitsandbytes_kernels", "rehearse_kernels")
        _startup.after_imports({"bitsandbytes": lambda library: rehearse(library, native)})
    else:  # nobody asks what ops do: they are PyTorch's own, and take the host as long as on a device
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda._lazy_call(arithmetic.rehearsal_watch_allocations)
    refused = importlib.import_module("rehearsed_program.refused")
    refused.refuse_compilation(torch)
    folder = os.environ.get("HF_ACTSWAP_REHEARSAL_REPORTS")
    if not folder:
        atexit.register(_name_what_is_missing, native)
        return
    watch = importlib.import_module("rehearsed_program.watch")
    watch.Watch(torch, native, int(settings["devices"]), "clock" in settings, Path(folder)).begin()


def _newest_kernels(torch: ModuleType, settings: dict[str, str]) -> int:
    """Return the newest architecture of PyTorch's kernels that the device runs, as 86 for sm_86.

    CUB's algorithms (sort, cumsum) fail if they are told of one that they were not compiled for. PyTorch has
    no kernels for an RTX 4090's own 8.9. After `torch.cuda.get_arch_list` PyTorch would refuse the
    device to forked processes.
    """
    own = 10 * int(settings["major"]) + int(settings["minor"])
    known = map(int, re.findall(r"code=sm_(\d+)", torch.__config__.show()))
    return max((found for found in known if found <= own), default=own)


def _name_what_is_missing(native: Any) -> None:
    """Say at the end which functions did nothing, which ops had no values, and what nothing orders."""
    for what, found in (
        (
            "functions of CUDA that do nothing were called",
            [f"{name} ({n})" for name, n in native.stubs().items()],
        ),
        ("ops whose values are missing", list(native.left_out())),
        ("memory is used in no order", native.races()),
    ):
        if found:
            sys.stderr.write(f"rehearsal: {what}: {', '.join(found)}\n")


def _of_program(module: str, function: str) -> Callable[..., None]:
    """Return a function of the package beside this file, which is imported when it is called."""
    return lambda *given: getattr(importlib.import_module(f"rehearsed_program.{module}"), function)(*given)


def _after_imports() -> dict[str, Callable[[ModuleType], None]]:
    found: dict[str, Callable[[ModuleType], None]] = {
        "torch": _install,
        "hf_actswap.engine.host_memory": _of_program("host_pages", "limit"),
        "hf_actswap.engine.host_pool": _of_program("host_pages", "touch_nothing"),
        "triton.runtime.jit": _of_program("triton_kernels", "launch_nothing"),
        "triton.runtime.autotuner": _of_program("triton_kernels", "tune_nothing"),
    }
    if _settings().get("level") != "2":
        found["hf_actswap.stream.two_passes"] = _of_program("values", "compare_nothing")
        found["hf_actswap.engine.verify"] = _of_program("values", "find_no_difference")
    if _settings().get("no_weights"):
        found["transformers.modeling_utils"] = _of_program("loading", "load_no_weights")
        found["hf_actswap.engine.frozen_weights"] = _of_program("loading", "copy_no_weights")
    return found


def _shift_clocks() -> None:
    """Let Python's clocks show the host's time: what the host would have waited has passed on them.

    ``time.monotonic`` stays as it is: locks compare deadlines with the machine's own clock.
    """
    library = ctypes.CDLL(None)
    shift_ms, sleep = library.rehearsal_host_shift_ms, time.sleep
    shift_ms.restype = ctypes.c_double

    def slept(seconds: Any) -> None:
        sleep(seconds)
        library.rehearsal_host_waits(ctypes.c_double(1e3 * seconds))

    def shifted(seconds: Any) -> Any:
        return lambda: seconds() + shift_ms() / 1e3

    def shifted_ns(nanoseconds: Any) -> Any:
        return lambda: nanoseconds() + int(shift_ms() * 1e6)

    time.time, time.perf_counter = shifted(time.time), shifted(time.perf_counter)
    time.sleep = slept
    time.time_ns, time.perf_counter_ns = shifted_ns(time.time_ns), shifted_ns(time.perf_counter_ns)


_startup = _start_up()
if _settings():
    _startup.after_imports(_after_imports())
    if _settings().get("clock"):
        _shift_clocks()
_startup.run_the_next(__file__)
