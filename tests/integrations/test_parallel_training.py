"""Trainings of a model that several ranks hold, against one process; one launch per number of processes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer

from hf_actswap import ActSwapTrainer
from tests.integrations import parallel_training_worker as worker
from tests.integrations.parallel_runs import STEPS, Rows, Run
from tests.processes import launch_trainers, result
from tests.quick_cases import runs_slow_cases, slow_among

WORKER = "tests.integrations.parallel_training_worker"
CLOSE = {"rel": 1e-5}
TRAINED = ["plain", "accumulation", "small norm", "no clip"]
PUBLISHED = {
    **{f"Training in progress, step {step}": f"checkpoint-{step}" for step in (2, 4)},
    **{"Model save": "last", "Asked for": "last"},
}
NAMED = "hf_actswap.ActSwapTrainer in place of Trainer"

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training in this process, without interruption, with checkpoints."""
    folder = tmp_path_factory.mktemp("parallel")
    torch.save(worker.saving(folder, 1, "one"), folder / "one.0.pt")
    return folder


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, one: Path) -> Path:
    return launch_trainers(f"{WORKER}:{'TWO' if runs_slow_cases(request) else 'TWO_QUICK'}", one, 2, 280)


@pytest.fixture(scope="module")
def four(two: Path) -> Path:
    launch_trainers(f"{WORKER}:STOCK", two, 2, 120)
    return launch_trainers(f"{WORKER}:FOUR", two, 4, 280)


@functools.cache
def alone(name: str, **more: Any) -> Run:
    return worker.trained(name, Path("runs"), 1, **more)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_same(found: Run, expected: Run, steps: int = STEPS, evaluates: bool = True) -> None:
    assert len(found.losses) == len(found.norms) == steps
    assert found.losses == pytest.approx(expected.losses, **CLOSE)
    assert found.norms == pytest.approx(expected.norms, **CLOSE)
    if evaluates:
        assert found.evaluations
        assert found.evaluations == pytest.approx(expected.evaluations, **CLOSE)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-4, atol=2e-6, msg=name)
    assert found.drift == 0.0


@pytest.mark.parametrize("name", slow_among([*TRAINED, "weight decay, one epoch"], worker.SLOW, "two "))
def test_two_ranks_train_as_one(name: str, two: Path) -> None:
    for rank in (0, 1):
        assert_same(result(two, f"two {name}", rank), alone(name))


def test_head_and_loss_in_tiles_train_as_one(two: Path) -> None:
    assert_same(result(two, "tiled accumulation"), alone("accumulation"))


@pytest.mark.slow
def test_label_smoothing_in_tiles_trains_as_one(two: Path) -> None:
    smoothed = alone("plain", **worker.SMOOTHING)
    assert smoothed.losses != alone("plain").losses
    assert_same(result(two, "tiled smoothing"), smoothed)


def test_autocast_is_not_lost(two: Path) -> None:
    found = result(two, "bf16")
    plain = result(two, "two plain")
    assert found.losses == pytest.approx(plain.losses, rel=5e-3)
    assert found.losses != plain.losses


def test_swap_and_recompute_change_no_digit(two: Path) -> None:
    found = result(two, "swapped")
    for name in ("losses", "norms"):
        ours, plain = found[name]
        assert len(ours) == STEPS
        assert ours == plain
    assert found["weights"] == []


def test_streamed_in_chunks(two: Path) -> None:
    assert_same(result(two, "in chunks"), alone("plain"))


def test_an_optimizer_of_the_whole_model_is_given_its_parts(two: Path) -> None:
    assert_same(result(two, "given optimizer"), worker.given_optimizer(Path("given"), 1), evaluates=False)


@pytest.mark.parametrize("name", slow_among(["metrics", "metrics in tiles"], worker.SLOW))
def test_evaluation_and_prediction_see_each_sample_once(name: str, two: Path) -> None:
    found, expected = result(two, name), worker.metrics(Path("metrics"), 1)
    assert found["shape"] == expected["shape"]
    assert found["loss"] == pytest.approx(expected["loss"], **CLOSE)
    assert (found["labels"] == expected["labels"]).all()


def test_supervised_fine_tuning_with_adapters(two: Path) -> None:
    pytest.importorskip("trl", reason="TRL's Trainer is tested where it is installed")
    found, expected = result(two, "supervised"), worker.supervised(Path("supervised"), 1)
    assert_same(found["run"], expected["run"], steps=3)
    assert found["log"].keys() == expected["log"].keys()
    for name, values in expected["log"].items():
        assert values, name
        assert found["log"][name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.parametrize("clips", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_loop_of_accelerates(clips: bool, two: Path) -> None:
    expected = worker.own_loop(Path(), 1, clips)
    found = result(two, "own loop" if clips else "own loop without clip")
    assert found["losses"] == pytest.approx(expected["losses"], **CLOSE)
    assert found["norms"] == pytest.approx(expected["norms"], **CLOSE)
    assert len(found["norms"]) == (4 if clips else 0)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=2e-6)
    for index, entries in expected["state"]["state"].items():
        assert found["state"]["state"][index]["exp_avg"].shape == entries["exp_avg"].shape
    assert "Use save_pretrained, optimizer_state_dict and load_optimizer_state_dict" in found["rejected"]


# --- checkpoints -----------------------------------------------------------------------------------------


def logits(folder: Path) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=Rows(3, seed=5).ids).logits
    return found


@pytest.mark.parametrize("name", ["checkpoint-2", "checkpoint-4", "last"])
def test_what_two_ranks_save_is_loaded_by_one(name: str, two: Path) -> None:
    found = logits(two / "two" / name)
    torch.testing.assert_close(found, logits(two / "one" / name), rtol=1e-3, atol=1e-4)
    names = {path.name for path in (two / "two" / name).iterdir()}
    assert names - {"parallel_layout.json", "rng_state_0.pth", "rng_state_1.pth"} == {
        path.name for path in (two / "one" / name).iterdir()
    } - {"parallel_layout.json", "rng_state.pth"}


def test_the_best_model_is_the_one_that_is_left(two: Path) -> None:
    evaluations = result(two, "saving").evaluations
    assert max(evaluations) == evaluations[0]  # after step 2
    assert torch.equal(logits(two / "two" / "last"), logits(two / "two" / "checkpoint-2"))


def test_the_optimizer_is_saved_whole(two: Path) -> None:
    of_two, of_one = (
        torch.load(two / name / "checkpoint-2" / "optimizer.pt", weights_only=True) for name in ("two", "one")
    )
    assert of_two["state"].keys() == of_one["state"].keys()
    for index, entries in of_one["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(of_two["state"][index][key], value, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("message", PUBLISHED)
def test_what_two_ranks_publish_is_loaded_by_one(message: str, two: Path) -> None:
    found = logits(two / "published" / message)
    torch.testing.assert_close(found, logits(two / "one" / PUBLISHED[message]), rtol=1e-3, atol=1e-4)


def test_one_rank_publishes(two: Path) -> None:
    found = result(two, "published")
    steps = [f"Training in progress, step {step}" for step in (2, 4, 5)]
    assert found["messages"] == [*steps, "Model save", "Asked for", "Asked for alone"]
    assert_same(found["run"], alone("plain"), evaluates=False)
    weights = load_file(two / "published" / "Asked for alone" / "model.safetensors")
    assert weights.keys() == alone("plain").weights.keys() - {"lm_head.weight"}  # tied
    for name, value in weights.items():
        torch.testing.assert_close(value, found["run"].weights[name], rtol=0, atol=0)
    other = result(two, "published", rank=1)
    assert (other["messages"], other["requests"]) == ([], 0)


def test_resuming_one_on_two(two: Path) -> None:
    assert_same(result(two, "resumed 1 to 2"), result(two, "one"))


@pytest.mark.parametrize("kind", [ActSwapTrainer, Trainer])
def test_resuming_two_on_one(kind: type[Trainer], two: Path) -> None:
    found = worker.saving(two, 1, f"two to one {kind.__name__}", "two/checkpoint-2", kind)
    assert_same(found, result(two, "one"))


def test_the_saved_groups_name_their_parameters(two: Path) -> None:
    state = torch.load(two / "two" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    names = [group["param_names"] for group in state["param_groups"]]
    assert names[1] == [name for name, value in result(two, "one").weights.items() if value.dim() == 1]
    assert len(names[0]) + len(names[1]) == len(state["state"])


# --- what is rejected ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stock", f"Trainer: expected hf_actswap.ActSwapTrainer, found Trainer. A callback cannot save or "
         f"load a model that several ranks hold: use {NAMED}"),
        ("stock", "torch_compile: expected a setting that works with tensor_parallel_size"),
        ("torch_compile", "torch_compile: expected a setting that works with"),
        ("auto_find_batch_size", "auto_find_batch_size: expected"),
        ("optim", "optim: expected a setting that works with tensor_parallel_size above 1, "
         "found adafactor."),
        ("save_strategy", "nothing was raised"),
        ("late", "parallel_config: expected a callback of the Trainer's constructor, found add_callback"),
        ("three ranks", "parallel_config.tensor_parallel_size: expected at most 2, the number of processes"),
        ("no room", "Start with: accelerate launch --multi_gpu --num_processes 4 "),
        ("foreign optimizer", "that are not the model's: build it on the model that is trained"),
        ("used optimizer", "the optimizer has made steps on the whole model"),
    ],
)  # fmt: skip
def test_rejections_before_the_first_step(name: str, said: str, two: Path) -> None:
    for rank in (0, 1):
        assert said in result(two, "rejections", rank)[name]


def test_a_model_patched_behind_a_trainers_back(two: Path) -> None:
    for rank in (0, 1):
        found = result(two, "behind the back", rank)
        assert found["stock"].startswith("PatchedModelError: DistributedDataParallel covers ranks [0, 1]")
        assert "hf_actswap.ActSwapTrainer" in found["stock"]
        assert found["loop"].startswith("UnsummedGradientError: 7 tagged parameters were changed by a step")
        assert found["loop with sum"] == "nothing was raised"


def test_ranks_that_differ_hear_it(two: Path) -> None:
    for rank in (0, 1):
        found = result(two, "differing ranks", rank)
        assert "seed: expected the same on all ranks, found 0 on rank 0; 1 on rank 1" in found["seed"]
        assert "batch: expected the same on all ranks, found" in found["batch"]


def test_a_missing_rank_is_named(two: Path) -> None:
    said = result(two, "missing rank", 0)
    assert "expected answers from all of ranks 0, 1 within 2 s, found none from rank 1." in said


# --- four processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_two_models_of_two_ranks_train_and_evaluate_as_one(name: str, four: Path) -> None:
    for rank in range(4):
        assert_same(result(four, f"two by two {name}", rank), alone(name, per_device_eval_batch_size=6))


@pytest.mark.slow
def test_samples_that_fill_the_last_batch_do_not_count(four: Path) -> None:
    expected = worker.evaluated(Path("evaluated"), 1)
    for rank in range(4):
        assert result(four, "two by two evaluated", rank) == pytest.approx(expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRAINED, "weight decay, one epoch"])
def test_two_models_of_two_ranks_train_as_two_plain_ones(name: str, four: Path) -> None:
    assert_same(result(four, f"two by two {name}"), result(four, f"stock {name}"), evaluates=False)


@pytest.mark.slow
def test_other_data_on_four(four: Path) -> None:
    assert_same(result(four, "two by two streamed"), worker.streamed(Path("streamed"), 1), evaluates=False)
    assert result(four, "two by two metrics")["shape"] == (10, 15, 67)
    assert (result(four, "two by two metrics")["labels"] == result(four, "metrics")["labels"]).all()


@pytest.mark.slow
def test_four_ranks_hold_one_model(four: Path) -> None:
    assert_same(result(four, "four"), alone("plain"))


@pytest.mark.slow
def test_resuming_on_four_and_from_four(four: Path) -> None:
    assert_same(result(four, "resumed 2 to 4"), result(four, "one"))
    found = worker.saving(four, 1, "four to one", "four/checkpoint-4")
    assert_same(found, result(four, "one"))
    assert_same(result(four, "resumed 2x2"), result(four, "two by two, saving"))


@pytest.mark.slow
def test_resuming_experts_on_other_numbers_of_ranks(four: Path) -> None:
    """Their optimizer's states too: 2 to 4 ranks, 2 to 1, 4 to 1."""
    expected = worker.saving_experts(four, 1, "experts one")
    assert_same(result(four, "saving experts"), expected)
    assert_same(result(four, "experts 2 to 4"), expected)
    assert_same(worker.saving_experts(four, 1, "experts 2 to 1", "experts two/checkpoint-2"), expected)
    assert_same(worker.saving_experts(four, 1, "experts 4 to 1", "experts four/checkpoint-4"), expected)
    states = [
        torch.load(four / name / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"]
        for name in ("experts four", "experts one")
    ]
    assert states[0].keys() == states[1].keys()
    for index, entries in states[1].items():
        torch.testing.assert_close(states[0][index]["exp_avg"], entries["exp_avg"], rtol=2e-3, atol=1e-6)


@pytest.mark.slow
def test_adapters_on_four(four: Path) -> None:
    pytest.importorskip("trl", reason="TRL's Trainer is tested where it is installed")
    found, expected = result(four, "supervised"), worker.supervised(Path("supervised"), 1)
    assert found["run"].losses == pytest.approx(expected["run"].losses, **CLOSE)
    assert found["log"]["num_tokens"] == expected["log"]["num_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dispatch", "accelerator_config.dispatch_batches: expected"),
        ("three ranks", "a divisor of 4, the number of processes: one of 1, 2, 4, found 3"),
    ],
)
def test_rejections_on_four(name: str, said: str, four: Path) -> None:
    for rank in range(4):
        assert said in result(four, "rejections of four", rank)[name]
