"""``profile`` measures steps, or computes them from shapes; ``plan --profile`` plans from what it wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_actswap.cli import profile as profile_command
from hf_actswap.cli.app import app
from hf_actswap.cli.profile import TIMED_STEPS, WARM_UP_STEPS, for_all_layers, median_times, recorded_steps
from hf_actswap.cli.profile_file import ProfileFile, read_profile
from hf_actswap.cli.step import StepShape
from hf_actswap.cli.subject import ModelError, random_model
from hf_actswap.plan import model_structure
from hf_actswap.planner import Profile, device_rates, profile_to_json
from tests.plan.stacked_models import whisper

from .conftest import TINY, Run

pytest.importorskip("scipy")

STEP = ("--seq", "64", "--batch", "2")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def written(model: Path) -> tuple[Path, Any]:
    """A measured profile's file, and what the command said of it."""
    path = model.parent / "profile.json"
    words = ["profile", str(model), *STEP, "--device", "this", "-o", str(path), "--json"]
    if torch.accelerator.is_available():
        words[words.index("this")] = "cpu"
    state = torch.get_rng_state()
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    assert torch.equal(state, torch.get_rng_state())
    return path, json.loads(ended.stdout)


@pytest.fixture(scope="module")
def on_paper(model: Path) -> Any:
    ended = CliRunner().invoke(app, ["profile", str(model), *STEP, "--device", "H200", "--json"])
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


def test_measured_bytes_are_those_of_shapes(written: tuple[Path, Any], on_paper: Any) -> None:
    _, found = written
    assert (found["source"], found["measured_layers"], found["device"]) == ("measured", 4, "cpu")
    assert (on_paper["source"], on_paper["measured_layers"], on_paper["device"]) == ("shapes", 0, "H200")
    assert found["link"] is None
    assert on_paper["link"]["out_bytes_per_ms"] == 54.9e6

    def sizes(document: Any) -> dict[tuple[str, str], tuple[int, int | None]]:
        return {(op["scope"], op["op"]): (op["saved_bytes"], op["rebuilt_bytes"]) for op in document["ops"]}

    assert sizes(found) == sizes(on_paper)
    paper_bytes = on_paper["predicted"]["peak_bytes"] - device_rates("H200").workspace_bytes
    assert found["predicted"]["peak_bytes"] == pytest.approx(paper_bytes, rel=0.02)
    ops = {op["op"]: op for op in found["ops"] if op["layers"]}
    assert set(ops) == {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp", "add"}
    assert ops["mlp"]["layers"] == [0, 1, 2, 3]
    assert all(ops[name]["forward_ms"] > 0 and ops[name]["rebuild_ms"] > 0 for name in ("self_attn", "mlp"))
    assert ops["mlp"]["rebuild_ms"] < ops["mlp"]["forward_ms"]  # the last product's result is kept
    assert found["outside_ms"] > 0  # the optimizer


def test_a_model_of_speech_is_measured_with_sounds(run: Run, tmp_path: Path) -> None:
    """``--seq`` is that of its text."""
    model: Any = whisper()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    path, asked = tmp_path / "profile.json", ["--batch", "2", "--seq", "12"]
    assert run("profile", tmp_path, *asked, "--device", "cpu", "--output", path).code == 0
    found = run("plan", tmp_path, *asked, "--profile", path, "--json").document
    assert (found["step"]["batch"], found["step"]["seq"]) == (2, 12)
    assert found["model"]["parameters"] == sum(weight.numel() for weight in model.parameters())


def test_a_plan_is_made_of_the_times_in_the_file(run: Run, model: Path, written: tuple[Path, Any]) -> None:
    path, said = written
    found = run("plan", model, "--profile", path, "--budget-gib", "8", "--json").document
    assert found["predicted"]["nothing"] == said["predicted"]
    step = {"batch": 2, "seq": 64, "device": "cpu", "autocast": None, "optimizer": "adamw"}
    usual = {
        "target_seq": None,
        "gradient_dtype": None,
        "sharding": None,
        "weights": "keep",
        "micro_batches": 1,
    }
    assert found["step"] == {**step, **usual, "optimizer_in_backward": False, "fused_loss": False}
    assert found["memory"] == {}  # of a measured step it is not known
    assert found["profile"] == str(path)
    slower = path.with_name("slower.json")
    document = json.loads(path.read_text())
    slower.write_text(json.dumps({**document, "outside_ms": document["outside_ms"] + 1000}))
    later = run("plan", model, "--profile", slower, "--budget-gib", "8", "--json").document
    assert later["predicted"]["nothing"]["step_ms"] == pytest.approx(said["predicted"]["step_ms"] + 1000)
    text = run("plan", model, "--profile", path, "--budget-gib", "8").out
    assert "measured on cpu" in " ".join(text.split())
    assert "computed from shapes" not in text


def test_a_plan_of_a_device_that_has_no_data_sheet_here(
    run: Run, model: Path, written: tuple[Path, Any]
) -> None:
    path, said = written
    other = path.with_name("other.json")
    other.write_text(json.dumps({**json.loads(path.read_text()), "device": "NVIDIA GeForce RTX 2080"}))
    found = run("plan", model, "--profile", other, "--budget-gib", "8", "--json").document
    assert found["ok"], found
    assert found["step"]["device"] == "NVIDIA GeForce RTX 2080"
    assert found["predicted"]["nothing"]["step_ms"] == said["predicted"]["step_ms"]
    assert found["data_parallel"] is None


def test_what_does_not_fit_is_named(run: Run, model: Path, written: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = written
    wrong = ("--seq", "128", "--batch", "1", "--device", "H200", "--autocast", "bf16", "--optimizer", "none")
    problems = run("plan", model, "--profile", path, *wrong, "--json").document["problems"]
    assert [item["where"].rpartition(": ")[2] for item in problems] == [
        "sequences of a batch",
        "tokens of a sequence",
        "mixed precision",
        "optimizer",
        "device",
    ]
    assert (problems[1]["expected"], problems[1]["found"]) == ("128", "64")
    assert all(item["hint"] for item in problems)
    other = tmp_path / "config.json"
    other.write_text(json.dumps({**TINY, "num_hidden_layers": 2, "hidden_size": 64}))
    ended = run("plan", other, "--profile", path, "--dtype", "fp32", "--json")
    assert ended.code == 1
    assert {item["where"].rpartition(": ")[2] for item in ended.document["problems"]} == {
        "num_layers",
        "parameters",
        "dtype",
    }
    parallel = run("plan", model, "--profile", path, "--tp", "2", "--json").document["problems"]
    assert "tensor_parallel_size" in parallel[0]["where"]
    assert run("plan", model, "--profile", path, "--compare", "tp=1,2").code == 2


def test_the_profile_of_a_training_needs_no_more_than_the_planner_wrote(
    run: Run, model: Path, written: tuple[Path, Any], tmp_path: Path
) -> None:
    path, _ = written
    bare = tmp_path / "profile.json"
    bare.write_text(profile_to_json(read_profile(str(path)).profile))
    assert run("plan", model, "--profile", bare, "--budget-gib", "8").code == 0
    other = tmp_path / "config.json"
    other.write_text(json.dumps({**TINY, "model_type": "gpt_neox"}))
    found = run("plan", other, "--profile", bare, "--json").document["problems"]
    assert [item["where"].rpartition(": ")[2] for item in found][:1] == ["family"]


@pytest.mark.parametrize("text", ["", "{}", '{"format": "hf_actswap.plan"}', None, "made_for"])
def test_files_that_are_no_profiles(
    run: Run, model: Path, written: tuple[Path, Any], tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "none.json"
    if text == "made_for":
        text = json.dumps({**json.loads(written[0].read_text()), "made_for": {"step": {"optimizer": []}}})
    if text is not None:
        path.write_text(text)
    ended = run("plan", model, "--profile", path, "--json")
    assert ended.code == 1
    assert ended.document["problems"]


def test_few_layers_stand_for_all(run: Run, model: Path, written: tuple[Path, Any]) -> None:
    path, said = written
    some = path.with_name("some.json")
    ended = run("profile", model, *STEP, "--device", "cpu", "--layers", "2", "-o", some)
    assert ended.code == 0
    assert "2 of 4 layers" in ended.out
    assert max(map(len, ended.out.splitlines())) <= 80
    read = read_profile(str(some))
    assert (read.measured_layers, read.profile.num_layers, read.profile.source) == (2, 4, "measured")
    assert read.profile.saved.by_op() == read_profile(str(path)).profile.saved.by_op()
    found = run("plan", model, "--profile", some, "--budget-gib", "8", "--json").document
    assert found["predicted"]["nothing"]["kept_bytes"] == said["predicted"]["kept_bytes"]


def timed(profile: Profile, ms_of: Callable[[Any], float]) -> Profile:
    op_events = [
        replace(op_event, forward_ms=ms_of(op_event.call[0]), backward_ms=2 * ms_of(op_event.call[0]))
        for op_event in profile.op_events
    ]
    return replace(profile, op_events=tuple(op_events), outside_ms=10.0)


def only(profile: Profile, layers: int) -> Profile:
    kept = [
        op_event
        for op_event in profile.op_events
        if not isinstance(op_event.call[0], int) or op_event.call[0] < layers
    ]
    return replace(profile, op_events=tuple(kept), num_layers=layers)


def test_times_of_other_layers_are_the_mean_of_their_kind(written: tuple[Path, Any]) -> None:
    whole = read_profile(str(written[0])).profile
    measured = only(timed(whole, lambda scope: {0: 1.0, 1: 3.0}.get(scope, 7.0)), 2)
    found = for_all_layers(measured, timed(whole, lambda _: 0.0), 100, 400)
    by_scope = {op_event.call[0]: (op_event.forward_ms, op_event.backward_ms) for op_event in found.op_events}
    assert by_scope[0] == (1.0, 2.0)
    assert by_scope[1] == (3.0, 6.0)
    assert by_scope[2] == by_scope[3] == (2.0, 4.0)
    assert by_scope["head"] == (7.0, 14.0)
    assert found.outside_ms == 40.0  # the optimizer has four times as much to do
    op_events = [
        replace(op_event, call=(3, "mlp.other", 0)) if op_event.call[:2] == (3, "mlp.mul") else op_event
        for op_event in whole.op_events
    ]
    with pytest.raises(ModelError, match="at least 4: no earlier layer does what layer 3 does"):
        for_all_layers(measured, replace(whole, op_events=tuple(op_events)), 1, 2)
    types = ["sliding", "sliding", "sliding", "full"]
    with pytest.raises(ModelError, match="at least 4"):
        for_all_layers(measured, whole, 1, 2, types)
    fewer = [op_event for op_event in measured.op_events if op_event.call[1] != "mlp.mul"]
    with pytest.raises(ModelError, match="4 op"):
        for_all_layers(replace(measured, op_events=tuple(fewer)), whole, 1, 2)


def test_medians_and_stages(model: Path) -> None:
    made = random_model(str(model), None, CPU, layers=1)
    assert len(model_structure(made).layers) == 1
    told: list[tuple[str, int]] = []
    step = StepShape(1, 16, "cpu", "bf16", "sgd")
    profile = recorded_steps(made, model_structure(made), step, lambda *at: told.append(at))
    assert told == [
        *(("warm-up", left) for left in range(WARM_UP_STEPS, 0, -1)),
        ("memory", 1),
        *(("times", left) for left in range(TIMED_STEPS, 0, -1)),
    ]
    assert profile.optimizer_state_bytes == 0
    assert profile.outside_base_bytes > 0
    assert all(parameter.grad is None for parameter in made.parameters())
    three = [timed(profile, lambda _, ms=ms: ms) for ms in (5.0, 1.0, 2.0)]
    assert {op_event.forward_ms for op_event in median_times(three).op_events} == {2.0}
    three[0] = replace(three[0], op_events=three[0].op_events[1:])
    assert median_times(three) == three[-1]


def test_lists_with_an_entry_for_each_layer_are_cut(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    path = tmp_path / "config.json"
    small = {key: value for key, value in TINY.items() if key != "model_type"}
    path.write_text(json.dumps({**small, "model_type": "gemma2", "head_dim": 8, "layer_types": kinds}))
    config: Any = random_model(str(path), None, torch.device("meta"), layers=3).config
    assert (config.num_hidden_layers, config.layer_types) == (3, kinds[:3])


def test_what_is_not_here_is_not_measured(
    run: Run, model: Path, written: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (STEP, ()):  # a sequence has 4096 tokens where none is said
        ended = run("profile", model, *step, "--device", "B200", "--layers", "2", "--json")
        assert ended.code == 1
        (problem,) = ended.document["problems"]
        assert (problem["where"], problem["found"]) == ("--layers", "none")
    assert run("profile", model, "--device", "abacus").code == 2
    monkeypatch.setattr(profile_command, "profile_of", lambda *_, **__: read_profile(str(written[0])).profile)
    assert run("profile", model, *STEP, "--device", "B200", "-o", model / "no" / "file.json").code == 2


def test_no_room(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rejected(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate too much")

    monkeypatch.setattr(profile_command, "available_bytes", lambda: 2**16)
    ended = run("profile", model, *STEP, "--device", "cpu", "--json")
    (problem,) = ended.document["problems"]
    assert "64.00 KiB" in problem["expected"]
    assert "--layers" in problem["hint"]
    monkeypatch.setattr(profile_command, "available_bytes", lambda: None)
    monkeypatch.setattr(profile_command, "recorded_steps", rejected)
    (problem,) = run("profile", model, *STEP, "--device", "cpu", "--json").document["problems"]
    assert problem["found"] == "tried to allocate too much"
    assert "--layers" in problem["hint"]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(profile_command, "rates_here", lambda: "H200")
    return


@pytest.mark.usefixtures("accelerator")
def test_which_device_is_measured_where_there_is_one() -> None:
    cuda = torch.device("cuda")
    asked = (None, "this", "H200", "h200 ", "cpu", "B200")
    assert [profile_command._device_here(name) for name in asked] == [cuda, cuda, cuda, cuda, CPU, None]


def test_steps_of_a_file_without_any(written: tuple[Path, Any]) -> None:
    profile = read_profile(str(written[0])).profile
    assert ProfileFile("x", profile, {}).measured_layers == 4
    assert "2 of 4" in ProfileFile("x", profile, {"measured_layers": 2}).described()
    assert ProfileFile("x", replace(profile, source="shapes"), {}).measured_layers == 0
