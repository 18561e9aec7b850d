"""Records of runs for the report's tests: one of a real training, and ones that are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hf_actswap import MemoryPlan, apply
from hf_actswap.engine.step_watch import (
    ComputePart,
    MeasuredCopy,
    MemorySample,
    Stall,
    StepMemory,
    StepTimeline,
)
from hf_actswap.integrations.run_record import TIMED_STEP, RunRecord
from tests.engine.tiny_models import batch, tiny_llama


def train_recorded(
    folder: Path, requested: Any, count: int = TIMED_STEP + 3, logged_every: int = 1
) -> list[dict[str, Any]]:
    """Train a tiny model with a record; return for each step its loss and totals."""
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applied = apply(model, requested, optimizer=optimizer)
    record = RunRecord(folder, model, applied, optimizer=optimizer)
    found = []
    for step in range(1, count + 1):
        record.step_starts()
        ids = batch(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        record.optimizer_starts()
        optimizer.step()
        record.step_ends()
        optimizer.zero_grad()
        found.append({"loss": loss.item(), "stats": applied.stats()})
        if step % logged_every == 0:
            record.logged({"step": step, "loss": loss.item()})
    record.close()
    applied.remove()
    return found


def made_up_timeline(layers: int) -> StepTimeline:
    """A step of ``layers`` layers, 1 ms forward and 2 ms backward each, one copy each way."""
    turn = float(layers)
    end = turn + 2 * layers
    parts = [ComputePart("forward", layer, layer, layer + 1) for layer in range(layers)]
    parts += [
        ComputePart("backward", layer, turn + 2 * number, turn + 2 * number + 2)
        for number, layer in enumerate(reversed(range(layers)))
    ]
    parts.append(ComputePart("outside", None, end, end + 1))
    outs = [
        MeasuredCopy("out", layer, "mlp.mul", 2**20, layer, layer, layer + 0.5) for layer in range(layers)
    ]
    ins = [
        MeasuredCopy(
            "in", layer, "mlp.mul", 2**20, turn + 2 * number, turn + 2 * number, turn + 2 * number + 1
        )
        for number, layer in enumerate(reversed(range(layers)))
    ]
    stalls = (Stall("in", layers - 1, "mlp.mul", turn, 0.5),)
    return StepTimeline(end + 1, tuple(parts), (*outs, *ins), stalls, True)


def made_up_memory(layers: int) -> StepMemory:
    """Memory that rises by 3 MiB a layer, of which 1 is swapped, and falls again."""
    samples = [MemorySample(float(n), (100 + 3 * n) << 20, (2 * n) << 20, n << 20) for n in range(layers)]
    samples += [
        MemorySample(2.0 * layers - n, (100 + 3 * n) << 20, (2 * n) << 20, n << 20)
        for n in reversed(range(layers))
    ]
    timeline = made_up_timeline(layers)
    return StepMemory(timeline.step_ms, 100 << 20, tuple(samples), timeline.compute)


def write_lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Write a record that consists of its lines."""
    target = folder / "actswap"
    target.mkdir(parents=True)
    (target / "run.json").write_text(json.dumps({"model": "Made up", "layers": 2}))
    (target / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (target / "plan.json").write_text(MemoryPlan((), 2).to_json())
