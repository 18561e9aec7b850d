"""Trainings of two stages under ActSwapTrainer, bitwise those of one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_actswap.releases import loss_is_scaled_by_data_ranks
from hf_actswap.report.write_report import write_report
from tests.pipeline.trainer_worker import (
    CASES,
    DIVIDED,
    DIVIDED_MORE,
    DIVIDED_SLOW,
    ONE_AGAIN,
    SCHEDULES,
    SLOW,
    TWO,
    Run,
    lose_a_stage,
)
from tests.processes import launch, launch_trainers, result
from tests.quick_cases import runs_slow_cases, slow_among

pytestmark = [
    pytest.mark.essential,
    pytest.mark.dist,
    pytest.mark.skipif(not loss_is_scaled_by_data_ranks(), reason="it needs transformers 5.16"),
]

WORKER = "tests.pipeline.trainer_worker"
LIMIT_S = 200


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, two stages, and one process again, in one folder of checkpoints."""
    folder = tmp_path_factory.mktemp("trainings")
    some = "" if runs_slow_cases(request) else "_QUICK"
    for cases, world_size in ((f"ONE{some}", 1), (f"TWO{some}", 2), ("ONE_AGAIN", 1)):
        launch_trainers(f"{WORKER}:{cases}", folder, world_size, LIMIT_S)
    return folder


def alike(found: Run, expected: Run) -> None:
    """Every number of the log is the same."""
    assert found.losses == expected.losses
    assert found.norms == expected.norms
    assert found.evaluations == expected.evaluations


def assert_same_weights(file: Path, folder: Path) -> None:
    """A file has the same tensors as the one of its name in the folder."""
    found, expected = load_file(file), load_file(folder / file.name)
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in found)


APART = ("checkpoint", "dropout", "opened", "planned", "predicted", "rejections")
COMPARED = [name for name in TWO if not name.startswith(APART)]


@pytest.mark.parametrize("name", slow_among(COMPARED, SLOW))
def test_the_log_is_that_of_one_process(name: str, runs: Path) -> None:
    case = name.rpartition(" ")[0]
    expected: Run = result(runs, "saving one" if case.startswith("resumed") else f"{case} one")
    for rank in range(2):
        found: Run = result(runs, name, rank)
        if case == "tied":  # its gradients have another order of sums, so later losses have other weights
            assert found.losses[0] == expected.losses[0]
            assert found.losses == pytest.approx(expected.losses, rel=1e-5)
            assert found.norms == pytest.approx(expected.norms, rel=1e-5)
        else:
            alike(found, expected)


def test_predictions_are_those_of_one_process(runs: Path) -> None:
    expected = result(runs, "predicted one")
    assert [one[1] is None for one in expected] == [False, True]
    for rank in range(2):
        for one, other in zip(result(runs, "predicted two", rank), expected, strict=True):
            assert np.array_equal(one[0], other[0])
            assert np.array_equal(one[1], other[1])
            assert one[2] == other[2]


@pytest.mark.parametrize("name", ONE_AGAIN)
def test_one_process_goes_on_from_two_stages(name: str, runs: Path) -> None:
    alike(result(runs, name), result(runs, "saving one"))


OPENED = {
    "opened llama": ("plain 1f1b", "plain 1f1b 2"),
    "opened tied": ("tied 1f1b", "tied 1f1b 2"),
    "opened lora": ("opened whole lora", "opened whole lora 1f1b 2"),
}


@pytest.mark.parametrize("name", slow_among(OPENED, SLOW))
def test_a_model_opened_by_stage_trains_as_one_opened_whole(name: str, runs: Path) -> None:
    expected, folder = OPENED[name]
    for rank in range(2):
        alike(result(runs, name, rank), result(runs, expected, rank))
    (file,) = (runs / f"{name} 1f1b 2" / "last").glob("*.safetensors")
    assert_same_weights(file, runs / folder / "last")


@pytest.mark.parametrize(
    "name", slow_among(["saving", *(name for name in CASES if name not in ("lora", "tied"))], SLOW)
)
def test_the_saved_model_is_that_of_one_process(name: str, runs: Path) -> None:
    file = runs / f"{name} 1f1b 2" / "last" / "model.safetensors"
    assert_same_weights(file, runs / f"{name} one 1" / "last")


def test_saved_adapters_and_tied_models_are_whole(runs: Path) -> None:
    adapters = runs / "lora 1f1b 2" / "last" / "adapter_model.safetensors"
    assert_same_weights(adapters, runs / "lora one 1" / "last")
    tied: Any = AutoModelForCausalLM.from_pretrained(runs / "tied 1f1b 2" / "last")
    alone = AutoModelForCausalLM.from_pretrained(runs / "tied one 1" / "last").state_dict()
    for key, value in tied.state_dict().items():
        torch.testing.assert_close(value, alone[key], rtol=1e-4, atol=1e-5)


def test_the_optimizer_of_all_stages_is_saved_as_in_one_process(runs: Path) -> None:
    files = [runs / f"saving {kind}" / "checkpoint-4" / "optimizer.pt" for kind in ("1f1b 2", "one 1")]
    found, expected = (torch.load(file, weights_only=True) for file in files)
    assert [g["params"] for g in found["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    for number, entries in expected["state"].items():
        assert all(torch.equal(found["state"][number][key], value) for key, value in entries.items())


def test_each_rank_trains_and_logs_its_own_layers(runs: Path) -> None:
    trained = [result(runs, "saving 1f1b", rank).trained for rank in range(2)]
    assert sum(trained) == result(runs, "saving one").trained
    lines = [result(runs, "table 1f1b", rank).log.splitlines() for rank in range(2)]
    full = [[line for line in of_rank if "Set full recompute" in line] for of_rank in lines]
    assert full[0] == ["-INFO - Set full recompute at layer 0"]
    assert full[1] == [f"-INFO - Set full recompute at layer {layer}" for layer in (2, 3)]
    assert all("-INFO - Formative layer_recompute: [[1, 2]]" in of_rank for of_rank in lines)


@pytest.mark.parametrize("schedule", slow_among(SCHEDULES, SLOW, "reported "))
def test_windows_know_the_schedule(schedule: str, runs: Path) -> None:
    knows = schedule != "zero_bubble"
    assert [result(runs, f"reported {schedule}", rank).crosses for rank in range(2)] == [knows] * 2
    assert not result(runs, "saving 1f1b").crosses  # nothing is swapped


def test_the_report_shows_the_stages_side_by_side(runs: Path, tmp_path: Path) -> None:
    written = write_report(runs / "reported 1f1b 2", tmp_path / "report.html")
    found = written.facts.stages
    assert [stage.layers for stage in found] == [(0, 1), (2, 3)]
    assert [stage.in_flight for stage in found] == [2, 1]
    assert all(stage.offloaded_bytes and stage.peak_bytes and stage.step_ms for stage in found)
    whole = sum(t.nbytes for t in load_file(runs / "reported one 1/last/model.safetensors").values())
    weights = [stage.weight_bytes or 0 for stage in found]
    assert sum(weights) == whole
    assert all(stage.waiting_share and 0 < stage.waiting_share < 1 for stage in found)
    assert all((stage.peak_bytes or 0) > weight for stage, weight in zip(found, weights, strict=True))
    page = written.page.read_text(encoding="utf-8")
    assert "1f1b, 4 micro-batches a step: by the formula equal stages wait 20.0%" in page
    assert "<td>0</td><td>0-1</td>" in page
    assert "<td>1</td><td>2-3</td>" in page
    shutil.copytree(runs / "reported 1f1b 2" / "actswap", tmp_path / "actswap")
    shutil.rmtree(tmp_path / "actswap" / "stage_1")
    assert write_report(tmp_path).facts.stages[1].peak_bytes is None
    assert write_report(runs / "reported one 1", tmp_path / "one.html").facts.stages == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "budget_bytes"),
    [("planned", "1f1b", 461_709), ("planned interleaved", "interleaved_1f1b", 480_000)],
)
def test_each_stage_is_planned_within_one_budget(
    name: str, schedule: str, budget_bytes: int, runs: Path
) -> None:
    """The first stage holds one micro-batch more, and moves more. Peaks are those of the plan's steps."""
    moved = []
    for rank, folder in enumerate(("actswap", "actswap/stage_1")):
        found: Run = result(runs, name, rank)
        alike(found, result(runs, "reported one"))
        facts = json.loads((runs / f"{name} {schedule} 2" / folder / "planner.json").read_text())
        (trial,) = [trial for trial in facts["trials"] if trial["chosen"]]
        assert facts["budget_bytes"] == budget_bytes
        assert all(step["reserved_peak_bytes"] <= budget_bytes for step in trial["steps"])
        assert not any(step["evicted_bytes"] for step in trial["steps"])
        moved.append(trial["steps"][-1]["offloaded_bytes"])
    assert moved[0] > moved[1]


@pytest.mark.slow
def test_each_stage_has_a_plan_file_of_its_own(runs: Path) -> None:
    for rank, folder in enumerate(("actswap", "actswap/stage_1")):
        for found in result(runs, "planned twice", rank):
            alike(found, result(runs, "reported one"))
        trials = [
            json.loads((runs / f"planned {time} 1f1b 2" / folder / "planner.json").read_text())["trials"]
            for time in ("first", "again")
        ]
        assert trials[0]
        assert not trials[1]
        plan = json.loads((runs / f"plan.stage_{rank}.json").read_text())
        assert f"stage {rank} with layers {2 * rank}-{2 * rank + 1}, {2 - rank} passes in flight" in str(plan)
        assert {row["scope"] for row in plan["rows"]} <= {2 * rank, 2 * rank + 1, "embedding", "head"}
    assert not (runs / "plan.json").exists()


@pytest.mark.parametrize(
    ("name", "stages", "files"),
    [
        ("stages", 2, {"actswap_plan.stage_0.json", "actswap_plan.stage_1.json"}),
        pytest.param("parts", 1, {"actswap_plan.json"}, marks=pytest.mark.slow),
    ],
)
def test_a_training_that_goes_on_uses_the_plan_of_its_checkpoint(
    name: str, stages: int, files: set[str], runs: Path
) -> None:
    checkpoint = runs / f"{name} kept 1f1b {stages}" / "checkpoint-6"
    assert {path.name for path in checkpoint.glob("actswap_plan*")} == files
    for rank in range(2):
        kept, resumed = result(runs, f"checkpoint {name}", rank)
        assert isinstance(kept, Run)
        assert resumed.losses[:6] == kept.losses
        assert len(resumed.losses) == 8
    for folder in ("actswap", "actswap/stage_1")[:stages]:
        searched = {
            case: bool(
                json.loads((runs / f"{name} {case} 1f1b {stages}" / folder / "planner.json").read_text())[
                    "trials"
                ]
            )
            for case in ("kept", "resumed")
        }
        assert searched == {"kept": True, "resumed": False}


@pytest.mark.slow
def test_a_budget_that_one_stage_cannot_keep_is_said_on_all_ranks(runs: Path) -> None:
    """The last stage has less to give away."""
    for rank in range(2):
        said = result(runs, "planned too small", rank)
        assert "memory.reduce_by_gib: expected at most" in said
        assert "This is stage 1 of the pipeline" in said
    assert "rank 1: expected no error on any rank" in result(runs, "planned too small", 0)


@pytest.mark.slow
def test_dropout_goes_on_as_if_never_interrupted(runs: Path) -> None:
    alike(result(runs, "dropout resumed"), result(runs, "dropout 1f1b"))
    assert result(runs, "dropout 1f1b").losses != result(runs, "saving 1f1b").losses


def test_random_states_are_found_by_a_single_process(runs: Path) -> None:
    layout = json.loads((runs / "saving 1f1b 2" / "checkpoint-2" / "parallel_layout.json").read_text())
    assert layout == {"processes": 2, "tensor_parallel_size": 1, "pipeline_stage": 2}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pipelines of two stages, and one process with their batches as one."""
    folder = tmp_path_factory.mktemp("wide")
    for cases, world_size in (("ONE_WIDE", 1), ("FOUR", 4)):
        launch_trainers(f"{WORKER}:{cases}", folder, world_size, LIMIT_S)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "one"), [("llama", "wide one"), ("tied", "wide tied one"), ("resumed", "wide one")]
)
def test_two_pipelines_train_as_one_process(name: str, one: str, wide: Path) -> None:
    expected: Run = result(wide, one)
    for rank in range(4):
        found: Run = result(wide, f"wide {name}", rank)
        assert found.losses == pytest.approx(expected.losses, rel=1e-6)
        assert found.norms == pytest.approx(expected.norms, rel=1e-5)
        assert found.evaluations == pytest.approx(expected.evaluations, rel=1e-6)
        of_first_stage = "Set full recompute at layer 1" in found.log
        assert of_first_stage == (rank < 2 and name != "resumed")


@pytest.mark.slow
def test_a_stage_that_has_ended_is_named(tmp_path: Path) -> None:
    said, took_s = torch.load(launch(lose_a_stage, tmp_path, 2, 120) / "lost.pt", weights_only=False)
    assert said.startswith("LostRankError: rank 0: a collective of ranks [0, 1] failed")
    assert "of: rank 1." in said
    assert took_s < 60


@pytest.fixture(scope="module")
def divided(request: pytest.FixtureRequest, runs: Path) -> Path:
    """Two stages of two ranks each, and one process again, beside the trainings of one process."""
    if runs_slow_cases(request):
        launch_trainers(f"{WORKER}:FOUR_DIVIDED", runs, 4, LIMIT_S)
        launch_trainers(f"{WORKER}:ONE_AFTER", runs, 1, LIMIT_S)
    else:
        launch_trainers(f"{WORKER}:FOUR_DIVIDED_QUICK", runs, 4, LIMIT_S)
    return runs


def close(found: Run, expected: Run) -> None:
    """Every number of the log is the same but for the order of sums over the ranks.

    Evaluations, after every second step, are losses first; then sums of logits, most of which cancel.
    """
    count = len(expected.losses) // 2
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.evaluations[:count] == pytest.approx(expected.evaluations[:count], rel=1e-6)
    assert found.evaluations[count:] == pytest.approx(expected.evaluations[count:], rel=1e-5)


@pytest.mark.parametrize("name", slow_among(DIVIDED, DIVIDED_SLOW))
def test_divided_stages_train_as_one_process(name: str, divided: Path) -> None:
    expected = result(divided, "saving one" if name.startswith("resumed") else f"{name} one")
    found = [result(divided, f"divided {name}", rank) for rank in range(4)]
    for of_rank in found:
        alike(of_rank, found[0])
        close(of_rank, expected)
    assert sum(of_rank.trained for of_rank in found[::2]) < 0.6 * expected.trained


@pytest.mark.slow
def test_a_stage_opened_by_several_ranks_is_divided_among_them(divided: Path) -> None:
    for rank in range(4):
        alike(result(divided, "opened divided", rank), result(divided, "divided plain", rank))


@pytest.mark.slow
def test_one_process_goes_on_from_divided_stages(divided: Path) -> None:
    close(result(divided, "resumed from four"), result(divided, "saving one"))


@pytest.mark.parametrize("name", slow_among(["plain", "saving", "tied"], DIVIDED_SLOW))
def test_divided_stages_save_the_model_of_one_process(name: str, divided: Path) -> None:
    schedule = DIVIDED[name].get("schedule", "1f1b")
    found = load_file(divided / f"divided {name} {schedule} 2" / "last" / "model.safetensors")
    expected = load_file(divided / f"{name} one 1" / "last" / "model.safetensors")
    assert list(found) == list(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-6, msg=key)


@pytest.mark.slow
def test_the_optimizer_of_divided_stages_is_saved_whole(divided: Path) -> None:
    files = [
        divided / f"{kind}" / "checkpoint-4" / "optimizer.pt"
        for kind in ("divided saving 1f1b 2", "saving one 1")
    ]
    found, expected = (torch.load(file, weights_only=True)["state"] for file in files)
    assert list(found) == list(expected)
    for number, entries in expected.items():
        for key, value in entries.items():
            torch.testing.assert_close(found[number][key], value, rtol=2e-3, atol=1e-6)


def test_ranks_of_a_divided_stage_log_its_layers(divided: Path) -> None:
    for rank in range(4):
        lines = result(divided, "divided table", rank).log.splitlines()
        own = {line for line in lines if "Set full recompute" in line}
        layers = [0] if rank < 2 else [1, 3]
        assert own == {f"-INFO - Set full recompute at layer {layer}" for layer in layers}


def test_a_schedule_that_takes_divided_layers_apart_is_rejected(divided: Path) -> None:
    for rank in range(4):
        assert "tensor_parallel_size divides make them together" in result(divided, "divided rejected", rank)


@pytest.fixture(scope="module")
def divided_more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More families in divided stages, and two such pipelines, beside one process."""
    folder = tmp_path_factory.mktemp("divided")
    for cases, world_size in (("ONE_MORE", 1), ("FOUR_MORE", 4), ("EIGHT", 8)):
        launch_trainers(f"{WORKER}:{cases}", folder, world_size, LIMIT_S)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DIVIDED_MORE, "wide"])
def test_more_divided_stages(name: str, divided_more: Path) -> None:
    found = [result(divided_more, f"divided {name}", rank) for rank in range(8 if name == "wide" else 4)]
    for of_rank in found:
        alike(of_rank, found[0])
        if name != "dropout":
            close(of_rank, result(divided_more, f"{name} one"))


@pytest.mark.slow
def test_ranks_that_hold_a_stage_plan_it_together(divided_more: Path) -> None:
    expected = result(divided_more, "reported one")
    for rank in range(4):
        close(result(divided_more, "divided planned", rank), expected)
    place = divided_more / "divided planned 1f1b 2" / "actswap"
    for folder in (place, place / "stage_1"):
        assert json.loads((folder / "planner.json").read_text())["trials"]
        assert json.loads((folder / "plan.json").read_text())["rows"]


REJECTED = {
    "Trainer": "Trainer: expected hf_actswap.ActSwapTrainer",
    "own loss": "_OwnLoss.compute_loss: expected the compute_loss of transformers.Trainer",
    "own loss below": "_StockOwnLoss.compute_loss: expected the compute_loss of transformers.Trainer",
    "torch_compile": "torch_compile: expected a setting that goes with a pipeline",
    "planner": "parallel_config.schedule: expected a setting that goes with planning by stage",
    "tensor parallel": "expected 4 processes, 2 (tensor_parallel_size) per stage, or a multiple",
    "embeds": "batch: expected input_ids",
    "rounds": "interleaved_1f1b runs 2 rounds of equally many micro-batches, and 5 are not divisible",
    "1f1b": "write interleaved_1f1b",
    "chunks": "parallel_config.pipeline_stage: expected at most 4, the layers of the model, found 8 chunks",
    "three stages": "expected 3 processes, one per stage, or a multiple",
    "other weights": "model: expected the weights of stage ",
}


@pytest.mark.parametrize("name", REJECTED)
def test_what_is_not_built_is_rejected_by_name(name: str, runs: Path) -> None:
    for rank in range(2):
        assert REJECTED[name] in result(runs, "rejections", rank)[name]
