"""What a run leaves behind, and what is read from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_actswap import apply
from hf_actswap.engine.step_watch import StepMemory, StepTimeline
from hf_actswap.engine.transfer import HostStamp
from hf_actswap.integrations.run_record import TIMED_STEP, RunRecord
from hf_actswap.report.run_files import ReportError, RunFiles, read_run
from tests.engine.tiny_models import NUM_LAYERS, one_step, plan_of, swap_rows, tiny_llama

from .recorded_runs import made_up_memory, made_up_timeline, train_recorded

GIB = 2**30
SWAP = plan_of(*swap_rows(["self_attn.flash_attention"], range(NUM_LAYERS)))


def test_a_run_is_recorded(tmp_path: Path) -> None:
    steps = train_recorded(tmp_path, SWAP, logged_every=2)
    run = read_run(tmp_path)
    assert run.about["layers"] == NUM_LAYERS
    assert run.about["versions"]["torch"] == torch.__version__
    assert run.plan == SWAP
    assert [line["step"] for line in run.steps] == [2, 4, 6]
    assert [line["loss"] for line in run.steps] == [steps[number - 1]["loss"] for number in (2, 4, 6)]
    of_two = asdict(steps[3]["stats"] - steps[1]["stats"])
    assert run.steps[1]["stats"] == json.loads(json.dumps(of_two))
    assert run.steps[1]["steps"] == 2
    assert run.planner is None
    assert run.profile is None


def test_the_two_watched_steps_are_those_of_the_statistics(tmp_path: Path) -> None:
    steps = train_recorded(tmp_path, SWAP)
    run = read_run(tmp_path / "actswap")
    assert run.timeline is not None
    assert run.memory is not None
    moved = steps[TIMED_STEP]["stats"] - steps[TIMED_STEP - 1]["stats"]
    for direction, size_bytes in (("out", moved.offloaded_bytes), ("in", moved.prefetched_bytes)):
        assert (
            sum(copy.size_bytes for copy in run.timeline.copies if copy.direction == direction) == size_bytes
        )
    assert max(sample.kept_bytes for sample in run.memory.samples) > 0
    model = tiny_llama()
    assert run.memory.start_bytes == sum(item.nbytes for item in (*model.parameters(), *model.buffers()))
    assert not _get_current_dispatch_mode_stack()


def test_recording_changes_no_number(tmp_path: Path) -> None:
    recorded = [step["loss"] for step in train_recorded(tmp_path, SWAP)]
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    with apply(model, SWAP):
        for step in range(1, len(recorded) + 1):
            found.append(one_step(model, step).item())
            optimizer.step()
            optimizer.zero_grad()
    assert found == recorded


def test_the_planners_part_is_recorded(tmp_path: Path) -> None:
    memory = {"mode": "adaptive", "warmup_steps": 2, "search_steps": 4, "reduce_by_gib": 20_000 / GIB}
    train_recorded(tmp_path, {"memory": memory}, count=14)
    run = read_run(tmp_path)
    assert run.planner is not None
    assert run.profile is not None
    assert run.profile.num_layers == NUM_LAYERS
    assert [trial["chosen"] for trial in run.planner["trials"]].count(True) == 1
    assert run.planner["budget_bytes"] > 0
    assert [line["phase"] for line in run.steps][:2] == ["warm-up", "search"]
    assert run.steps[-1]["phase"] == "stable"
    assert run.timeline is not None


@pytest.mark.parametrize("at", [TIMED_STEP, TIMED_STEP + 1])
def test_a_step_that_fails_under_watch_leaves_nothing(tmp_path: Path, at: int) -> None:
    model = tiny_llama()
    with apply(model, SWAP) as applied:
        record = RunRecord(tmp_path, model, applied)
        for _ in range(at - 1):
            record.step_starts()
            one_step(model)
            record.step_ends()
        record.step_starts()
        with pytest.raises(KeyboardInterrupt), model.model.layers[2].register_forward_hook(_interrupts):
            one_step(model)
        record.close()
        one_step(model)
        assert not applied.runtime.evictable
    assert not _get_current_dispatch_mode_stack()
    run = read_run(tmp_path)
    assert (run.timeline is None) == (at == TIMED_STEP)
    assert run.memory is None


def _interrupts(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("make", [made_up_timeline, made_up_memory])
def test_measured_steps_round_trip(tmp_path: Path, make: Callable[[int], StepTimeline | StepMemory]) -> None:
    files = RunFiles(tmp_path)
    files.write("run.json", {})
    files.write_measured(make(3))
    run = read_run(tmp_path)
    assert make(3) in (run.timeline, run.memory)


def test_a_later_run_replaces_the_record(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write("run.json", {})
    files.add_step({"step": 1})
    files.write_measured(made_up_timeline(2))
    RunFiles(tmp_path).write("run.json", {"model": "another"})
    run = read_run(tmp_path)
    assert (run.about, run.steps, run.timeline) == ({"model": "another"}, [], None)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.write("run.json", {})
    stats = {"offloaded_bytes": 0, "stall_ms": 0.0, "host_peak_bytes": 0, "rejected": {}}
    line = {"step": 1, "step_ms": 2.5, "stats": stats, "loss": 3.5}
    files.add_step(line)
    with open(files.folder / "steps.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    assert read_run(tmp_path).steps == [line]


def test_what_is_no_record_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"expected actswap/run\.json, which a training leaves there"):
        read_run(tmp_path)
    files = RunFiles(tmp_path)
    files.write("run.json", {})
    files.write("timeline.json", {"compute": []})
    with pytest.raises(ReportError, match=r"timeline\.step_ms: expected a number, found nothing"):
        read_run(tmp_path)
    (files.folder / "timeline.json").write_text("{")
    with pytest.raises(ReportError, match=r"timeline: expected a JSON document, found no JSON: "):
        read_run(tmp_path)


@pytest.mark.parametrize("logged_at", [(1, 4, 6), (4,), (6,)])
def test_a_step_takes_what_steps_after_the_first_take(
    logged_at: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one also page-locks host memory, and a short training logs once."""
    now = 0.0
    monkeypatch.setattr(HostStamp, "now", classmethod(lambda cls: cls(now)))
    model = tiny_llama()
    with apply(model, SWAP) as applied:
        record = RunRecord(None, model, applied)
        for step in range(1, 7):
            record.step_starts()
            one_step(model, step)
            now += 30.0 if step == 1 else 2.0
            record.step_ends()
            if step in logged_at:
                record.logged({"step": step})
        assert record.saving().step_ms == pytest.approx(2000)
