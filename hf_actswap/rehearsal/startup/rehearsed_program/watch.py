"""Watches a training for the report of ``hf-actswap rehearse``: memory by what it holds, steps, the model.

Each process writes one JSON file, at its end, when memory runs out and when a step has reached a new peak: a
process that is killed has left one too.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .native import Native
from .subject import Subject
from .triton_kernels import launched

REPORTS = "HF_ACTSWAP_REHEARSAL_REPORTS"
"""Variable of the environment with the folder for reports; without it nothing is watched."""
_LAST_STEPS = 10


class Watch:
    """What one process does on the device."""

    def __init__(self, torch: ModuleType, native: Native, devices: int, clock: bool, folder: Path) -> None:
        self._torch, self._native, self._devices, self._clock = torch, native, devices, clock
        self._path = folder / f"{os.getpid()}.json"
        self._pid = os.getpid()
        self._subject = Subject(torch)
        self._steps: dict[int, int] = {}
        self._times: list[tuple[float, float]] = []
        self._written_peaks: list[int] = []
        self._out_of_memory: list[dict[str, Any]] = []
        self._writing = threading.Lock()

    def begin(self) -> None:
        """Watch from now on, until the process ends."""
        self._native.begin_ledger()
        optimizers = sys.modules["torch.optim.optimizer"]
        optimizers.register_optimizer_step_pre_hook(self._before_step)
        optimizers.register_optimizer_step_post_hook(self._after_step)
        self._torch.cuda._lazy_call(
            lambda: self._torch._C._cuda_attach_out_of_memory_observer(self._on_out_of_memory)
        )
        self._subject.watch_calls(self._first_batch)
        atexit.register(self._end)

    def _first_batch(self) -> None:
        with self._native.host_stands():
            self._mark_all()

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        with self._native.host_stands():
            if not self._steps:
                self._mark_all()
            self._subject.note_optimizer(optimizer)
            self._mark_of_optimizer(optimizer)
        self._native.set_optimizer(True)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._native.set_optimizer(False)
        with self._native.host_stands():
            self._mark_of_optimizer(optimizer)
            self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
            steps = max(self._steps.values())
            self._native.set_step(steps)
            if self._clock and self._steps[id(optimizer)] == steps:
                self._times.append(self._native.stream_ms(self._torch.cuda.current_stream().cuda_stream))
            peaks = [self._native.device_peak(device) for device in range(self._devices)]
            if peaks != self._written_peaks:
                self._written_peaks = peaks
                self._write()

    def _mark_of_optimizer(self, optimizer: Any) -> None:
        parameters = [found for group in optimizer.param_groups for found in group["params"]]
        # The method of dict: a mapping of its own may bring what waits on the host when it is read.
        kept = dict.values(optimizer.state) if isinstance(optimizer.state, dict) else optimizer.state.values()
        states = [value for state in kept if isinstance(state, dict) for value in state.values()]
        self._native.mark(self._addresses(parameters), "weights")
        self._native.mark(self._addresses(found.grad for found in parameters), "gradients")
        self._native.mark(self._addresses(states), "optimizer states")

    def _mark_all(self) -> None:
        """Mark what all modules and optimizers of the process hold."""
        module, optimizer = self._torch.nn.Module, self._torch.optim.Optimizer
        optimizers = []
        for found in gc.get_objects():
            if issubclass(type(found), module):
                own = [*found.__dict__.get("_parameters", {}).values()]
                buffers = found.__dict__.get("_buffers", {}).values()
                self._native.mark(self._addresses([*own, *buffers]), "weights")
                gradients = (weight.grad for weight in own if weight is not None and weight.is_leaf)
                self._native.mark(self._addresses(gradients), "gradients")
                self._subject.note_module(found)
            elif issubclass(type(found), optimizer) and "param_groups" in found.__dict__:
                optimizers.append(found)
        for found in optimizers:
            self._subject.note_optimizer(found)
            self._mark_of_optimizer(found)

    def _addresses(self, tensors: Iterable[Any]) -> Iterator[int]:
        for tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if isinstance(local, self._torch.Tensor) and local.is_cuda:
                try:
                    yield local.untyped_storage().data_ptr()
                except (RuntimeError, NotImplementedError):  # a tensor made of others has no storage
                    continue

    def _on_out_of_memory(self, device: int, asked: int, total: int, free: int) -> None:
        """Note the last time of each step: a guard that evicts runs out of memory at many ops of it."""
        with self._native.host_stands():
            phase, op = self._native.running()
            found = {
                "device": device,
                "asked_bytes": asked,
                "phase": phase,
                "op": op,
                "steps_before": max(self._steps.values(), default=0),
            }
            before = self._out_of_memory[-1] if self._out_of_memory else {}
            times = 1
            if all(before.get(key) == found[key] for key in ("device", "steps_before")):
                self._out_of_memory.pop()
                times += before["times"]
            if times == 1 or before["phase"] != phase:
                self._mark_all()
            memory = self._native.memory(device, at_peak=False)
            self._out_of_memory.append({**found, "times": times, "memory": memory})
            if times == 1:
                sys.stderr.write(
                    f"rehearsal: out of memory: {asked / 2**30:.2f} GiB asked for by {op or 'an op'} "
                    f"({phase}), after {found['steps_before']} steps of an optimizer\n"
                )
            self._write()

    def _end(self) -> None:
        if os.getpid() == self._pid:  # not in a fork that inherited this function
            self._write()

    def _write(self) -> None:
        with self._writing:
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self._document()), encoding="utf-8")
            part.replace(self._path)

    def _document(self) -> dict[str, Any]:
        native = self._native
        devices = {number: native.memory(number, at_peak=True) for number in range(self._devices)}
        return {
            "program": sys.argv[:1],
            "rank": int(os.environ.get("RANK", "0")),
            "ranks": int(os.environ.get("WORLD_SIZE", "1")),
            "steps": max(self._steps.values(), default=0),
            "devices": {
                number: {**found, "process_peak_bytes": native.device_peak(number)}
                for number, found in devices.items()
                if found is not None
            },
            "host_bytes": native.host_peak(),
            "step_times": self._times[-_LAST_STEPS - 1 :],
            "out_of_memory": self._out_of_memory,
            "stubs": native.stubs(),
            "triton": launched(),
            "left_out": native.left_out(),
            "races": native.races(),
            "subject": self._subject.document(),
            "planned": "hf_actswap.engine" in sys.modules,
        }
