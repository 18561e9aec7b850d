"""Writes a run's record in ``<output_dir>/actswap/`` (`report.run_files`), which ``hf-actswap report`` shows.

An ordinary step is written as one line, only when the training logs anyway. After the plan has become final,
two steps are measured: the times of one, and the memory of the next. Other steps cost a comparison of
numbers.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import torch
import transformers
from torch import nn

from ..config import ActSwapConfig
from ..config.sizes import gib
from ..engine import AppliedPlan, SwapStats
from ..engine.agreement import world_size
from ..engine.step_watch import MemoryWatch, TimeWatch
from ..engine.transfer import HostStamp
from ..plan import MemoryPlan
from ..plan.model_structure import unwrapped
from ..planner import CountingMeter, Planner
from ..planner.meter import baseline_tensors, device_name
from ..report.run_files import PLANNER, RUN, SAVING, RecordedStages, RunFiles, Saving, saving_of
from ..version import __version__

logger = logging.getLogger(__name__)

TIMED_STEP = 4
"""The step under a plan whose times are measured, counted from 1. The first steps load kernels and page-lock
memory, and ``auto`` chooses windows in the third."""


class RunRecord:
    """Writes the record of one training on one rank. In a training loop of your own::

        applied = hf_actswap.apply(model, config, optimizer=optimizer)
        record = RunRecord("out", model, applied, optimizer=optimizer)
        for step, batch in enumerate(batches):
            record.step_starts()
            ...  # forward, backward
            record.optimizer_starts()
            optimizer.step()
            record.step_ends()
            record.logged({"step": step, "loss": loss.item()})
        record.close()

    Args:
        output_dir: folder in which ``actswap/`` is made; files of an earlier run there are replaced.
            ``None``: nothing is written.
        model: the model in training.
        applied: the plan on it, or the planner that changes the plan.
        optimizer: the model's optimizer; its states are counted on the CPU, which has no allocator to ask.
        config: the configuration, for the report.
        stage: index of the pipeline stage that this rank holds.
        stages: the division into pipeline stages; ``None``: there is no pipeline.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str] | None,
        model: nn.Module,
        applied: AppliedPlan | Planner,
        *,
        optimizer: Any = None,
        config: ActSwapConfig | None = None,
        stage: int = 0,
        stages: RecordedStages | None = None,
    ) -> None:
        self._files = RunFiles(output_dir, stage)
        self._model, self._applied, self._optimizer = model, applied, optimizer
        self._writes = output_dir is not None
        self._device = next((item.device for item in unwrapped(model).parameters()), torch.device("cpu"))
        self._watch: TimeWatch | MemoryWatch | None = None
        self._meter: CountingMeter | None = None
        self._watched: AppliedPlan | None = None
        self._steps = self._steps_since_line = 0
        self._since, self._first_ended = HostStamp.now(), HostStamp.now()
        self._before = SwapStats()
        self._plan: MemoryPlan | None = None
        self._settled = False
        self._step_ms: list[float] = []
        self._stall_ms = 0.0
        self._watched_peak_bytes: int | None = None
        self._peak_before_bytes = self._device_memory().get("peak_bytes", 0)
        self._files.write(RUN, {**_about(model, applied, self._device, config), "stages": stages})

    def step_starts(self) -> None:
        """To be called before the first forward of a step."""
        if self._steps > TIMED_STEP or not self._measures:
            return
        applied = self._applied.final_plan if isinstance(self._applied, Planner) else self._applied
        if applied is None:
            return
        if applied is not self._watched:
            self._watched, self._steps = applied, 0
        self._steps += 1
        if self._steps == TIMED_STEP:
            self._watch = TimeWatch(self._model, applied)
        elif self._steps == TIMED_STEP + 1 and not applied.runtime.evictable:
            self._watch = self._memory_watch(applied)

    @property
    def _measures(self) -> bool:
        """Whether a step's times and memory are measured, which takes time: for the files, or on the CPU,
        whose peak nobody else knows.
        """
        return self._writes or self._device.type == "cpu"

    def optimizer_starts(self) -> None:
        """To be called between backward and the optimizer's step. May be left out."""
        if self._watch is not None:
            self._watch.optimizer_starts()

    def step_ends(self) -> None:
        """To be called after the optimizer's step, and before `Planner.step_ended`."""
        self._steps_since_line += 1
        if not self._step_ms and self._steps_since_line == 1:
            self._first_ended = HostStamp.now()
        watch, self._watch = self._watch, None
        if isinstance(watch, TimeWatch):
            self._files.write_measured(watch.timeline())
        elif isinstance(watch, MemoryWatch):
            measured = watch.memory()
            self._watched_peak_bytes = max(sample.total_bytes for sample in measured.samples)
            self._stop_meter()
            self._files.write_measured(measured)

    def logged(self, line: Mapping[str, Any]) -> None:
        """Write a line for a step that the training logs: these values, with the number ``step``."""
        now, stats = HostStamp.now(), self._applied.stats()
        steps = max(self._steps_since_line, 1)
        planner = self._applied if isinstance(self._applied, Planner) else None
        found = {
            **line,
            "phase": "" if planner is None else planner.phase,
            "steps": self._steps_since_line,
            "step_ms": (step_ms := now.ms_since(self._since) / steps),
            **self._device_memory(),
            "stats": asdict(stats - self._before),
        }
        before, self._since, self._before, self._steps_since_line = self._before, now, stats, 0
        if not self._step_ms and steps > 1:  # without the preparations of a training, and its first step
            step_ms = now.ms_since(self._first_ended) / (steps - 1)
        self._step_ms.append(step_ms)
        self._stall_ms = (stats - before).stall_ms / steps
        self._files.add_step(found)
        self._write_decisions(planner)

    def saving(self) -> Saving:
        """Return what is known of the memory that the plan saves in a step, and of the step's time."""
        found = self._saving()
        if found.step_ms is not None or not self._step_ms:
            return found
        # The first steps of a training are slower than the others.
        return replace(found, step_ms=median(self._step_ms[1:] or self._step_ms))

    def _saving(self) -> Saving:  # without the median: each line of the log can afford it
        return saving_of(self._applied, self._peak_bytes(), self._stall_ms)

    def as_log(self, full: bool = True) -> dict[str, float]:
        """Return numbers for a training log: peak and saving; with ``full`` the allocator's peak too."""
        found = self._saving().as_log()
        if full and (held_bytes := self._device_memory().get("reserved_peak_bytes")):
            found["actswap_device_peak_gib"] = gib(held_bytes)
        return found

    def _peak_bytes(self) -> int | None:
        peak_bytes = self._device_memory().get("peak_bytes", 0)
        # The allocator's peak counts only if it has risen above that of earlier work in this process.
        return peak_bytes if peak_bytes > self._peak_before_bytes else self._watched_peak_bytes

    def close(self) -> None:
        """Write the final files and stop measuring; the training ended or failed. Safe to call again."""
        self._files.write(SAVING, asdict(self.saving()))
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
        self._stop_meter()
        self._write_decisions(self._applied if isinstance(self._applied, Planner) else None)

    def _write_decisions(self, planner: Planner | None) -> None:
        plan = self._applied.plan
        if planner is not None:
            if planner.phase != "stable":
                self._settled = False
                return
            if not self._settled:
                self._settled = True
                self._write_planner(planner)
        if plan is not self._plan:
            self._plan = plan
            self._files.write_plan(plan)

    def _write_planner(self, planner: Planner) -> None:
        task = planner.task
        trials = [
            {
                "steps": [asdict(step) for step in trial.steps],
                "predicted_peak_bytes": trial.prediction.peak_bytes,
                "predicted_step_ms": trial.prediction.step_ms,
                "chosen": trial.plan.rows == planner.plan.rows,
            }
            for trial in planner.trials
        ]
        budget = None if task is None else task.budget_bytes
        self._files.write(PLANNER, {"budget_bytes": budget, "trials": trials})
        if task is not None:
            self._files.write_profile(task.profile)

    def _memory_watch(self, applied: AppliedPlan) -> MemoryWatch:
        device = self._device
        if device.type != "cpu":  # without resetting the allocator's peak, which people read afterwards
            return MemoryWatch(self._model, applied, lambda: int(torch.accelerator.memory_allocated(device)))
        meter = self._meter = CountingMeter()
        meter.own(baseline_tensors(self._model, self._optimizer))
        meter.start()

        def peak_bytes() -> int:
            found = meter.peak_bytes()
            meter.reset_peak()
            return found

        return MemoryWatch(self._model, applied, meter.allocated_bytes, peak_bytes)

    def _stop_meter(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.stop()

    def _device_memory(self) -> dict[str, int]:
        if self._device.type == "cpu":
            return {}
        return {
            "allocated_bytes": int(torch.accelerator.memory_allocated(self._device)),
            "peak_bytes": int(torch.accelerator.max_memory_allocated(self._device)),
            "reserved_bytes": int(torch.accelerator.memory_reserved(self._device)),
            "reserved_peak_bytes": int(torch.accelerator.max_memory_reserved(self._device)),
        }


def _about(
    model: nn.Module, applied: AppliedPlan | Planner, device: torch.device, config: ActSwapConfig | None
) -> dict[str, Any]:
    root, shape = unwrapped(model), applied.structure
    cuda = device.type == "cuda"
    return {
        "format": "hf_actswap.run",
        "format_version": 1,
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "versions": {
            "hf_actswap": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": device_name(device),
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else None,
        "world_size": world_size(),
        "model": type(root).__name__,
        "family": shape.family,
        "layers": len(shape.layers),
        "parameters": sum(item.numel() for item in root.parameters()),
        "weight_bytes": sum(item.nbytes for item in root.parameters()),
        "planner": applied.memory_mode if isinstance(applied, Planner) else "off",
        "config": None if config is None else config.to_yaml(),
    }
