"""The frontier benchmark measures what it says, and notices a row whose gradients are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import frontier, pictures
from benchmarks.methods import actswap, nothing
from benchmarks.records import Result
from benchmarks.rows import ROWS, Row
from benchmarks.workloads import (
    DEFAULT_PRESETS,
    PRESETS,
    DecoderStack,
    TrainingStep,
    fitted,
    head_bytes,
    layer_bytes,
)

LAYERS, TOKENS, STEPS = 2, 32, 1
TINY = ("--device", "cpu", "--layers", str(LAYERS), "--tokens", str(TOKENS), "--steps", str(STEPS))
STACK, MODEL = DEFAULT_PRESETS["cpu"]
SHAPE = PRESETS[STACK]

CI_ROWS = (
    *("hf-checkpointing", "save-on-cpu", "compiled", "actswap-default-auto"),
    *("actswap-everything-auto", "actswap-full-recompute", "actswap-mixed"),
)
NUMBER = (int, float)
KEYS: dict[str, tuple[type, ...]] = {
    "method": (str,),
    "compiled": (bool,),
    "model": (str,),
    "layers": (int,),
    "seq": (int,),
    "batch": (int,),
    "head": (bool,),
    "ms": NUMBER,
    "activation_bytes": (int,),
    "peak_allocated_bytes": (int,),
    "peak_reserved_bytes": (type(None),),  # the CPU has no allocator that reserves
    "host_bytes": (int,),
    "swapped_bytes": (int,),
    "first_step_ms": NUMBER,
    "loss": (float,),
    "grad_norm": (float,),
    "device": (str,),
    "torch": (str,),
    "transformers": (str,),
    "commit": (str, type(None)),  # an unpacked archive has none
}
"""What every row holds, and of what type where it was measured on the CPU."""

Rows = dict[str, dict[str, Any]]


def run(out: Path, *arguments: str, rows: tuple[Row, ...] = ROWS) -> tuple[int, Rows]:
    """Run the benchmark on the tiny stack; return its exit status and its rows by name."""
    status = frontier.main([*TINY, "--preset", STACK, "--out", str(out), *arguments], rows)
    return status, {row["method"]: row for row in json.loads(out.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """Where the command itself wrote its results, run from a foreign directory."""
    folder = tmp_path_factory.mktemp("frontier")
    command = [sys.executable, str(repository / "benchmarks" / "frontier.py"), *TINY]
    command += ["--out", "out.json", "--rows", *CI_ROWS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTORCH_ALLOC_CONF", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for name in CI_ROWS:
        assert name in done.stdout
    return folder


@pytest.fixture(scope="module")
def recorded(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rows(recorded: list[dict[str, Any]]) -> Rows:
    """Of the decoder stack."""
    return {row["method"]: row for row in recorded if not row["head"]}


def test_every_row_has_the_keys_and_their_types(recorded: list[dict[str, Any]]) -> None:
    assert [row["method"] for row in recorded] == ["eager", *_in_table_order(CI_ROWS)] * 2
    for row in recorded:
        assert set(row) >= set(KEYS)
        for key, types in KEYS.items():
            if row["status"] == "measured":
                assert isinstance(row[key], types), (row["method"], key, row[key])
    measured = [row for row in recorded if row["status"] == "measured"]
    assert len(measured) == 2 * (1 + len(CI_ROWS) - 2)  # save-on-cpu and compiled do not suit the CPU


def _in_table_order(names: tuple[str, ...]) -> list[str]:
    return [row.name for row in ROWS if row.name in names]


def test_rows_say_where_and_with_what(recorded: list[dict[str, Any]], repository: Path) -> None:
    row = recorded[0]
    assert (row["model"], row["layers"], row["seq"], row["batch"]) == ("tiny", LAYERS, TOKENS, 1)
    assert (row["device"], row["torch"]) == ("cpu", torch.__version__)
    environment = row["environment"]
    assert environment["allocator"] == "expandable_segments:True"
    assert environment["hardware"]["memory_bytes"] > 2**30
    assert set(environment["versions"]) >= {"python", "accelerate", "hf_actswap"}
    assert str(repository) not in json.dumps(recorded)


def test_picture_is_a_png_of_plausible_size(folder: Path) -> None:
    content = (folder / "out.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[start : start + 4], "big") for start in (16, 20))
    assert width > 800
    assert height > 1200  # two panels
    assert 20_000 < len(content) < 1_000_000


def test_picture_can_be_drawn_from_the_results_later(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "again.json").write_bytes((folder / "out.json").read_bytes())
    pictures.main([str(tmp_path / "again.json")])
    assert (tmp_path / "again.png").read_bytes() == (folder / "out.png").read_bytes()


def test_results_are_complete_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.pictures", None)
    status, rows = run(tmp_path / "out.json", "--rows", "eager")
    assert (status, list(rows)) == (0, ["eager"])
    assert "draw it later: python benchmarks/pictures.py RESULTS" in capsys.readouterr().err
    assert not (tmp_path / "out.png").exists()


def test_rows_that_do_not_suit_the_cpu_give_a_reason(rows: Rows) -> None:
    skipped = {name: row["reason"] for name, row in rows.items() if row["status"] != "measured"}
    assert skipped == {
        "save-on-cpu": "the CPU has no memory of its own to offload from",
        "compiled": "compiling is slow on the CPU; ask for it with --compile",
    }


def test_ratios_are_against_eager(rows: Rows) -> None:
    eager = rows["eager"]
    for row in rows.values():
        if row["status"] == "measured":
            names = {"ms": "ms", "held": "held_bytes", "activation": "activation_bytes"}
            for ratio, name in names.items():
                assert row["ratios"][ratio] == pytest.approx(row[name] / eager[name])
    assert eager["ratios"] == {"ms": 1.0, "held": 1.0, "activation": 1.0}


def test_all_steps_are_recorded_and_the_median_is_of_the_timed_ones(rows: Rows) -> None:
    for row in rows.values():
        if row["status"] == "measured":
            assert len(row["step_ms"]) == row["warmup_steps"] + STEPS
            assert row["ms"] == row["step_ms"][-1]
            assert row["first_step_ms"] == row["step_ms"][0]


def test_rows_of_ours_are_exact_and_compute_the_same(recorded: list[dict[str, Any]]) -> None:
    for head in (False, True):
        eager, *others = [row for row in recorded if row["head"] is head and row["status"] == "measured"]
        ours = [row for row in others if row["method"].startswith("actswap")]
        assert len(ours) == 4
        assert all(row["must_be_exact"] and row["exact"] for row in ours)
        assert {(row["loss"], row["grad_norm"]) for row in ours} == {(eager["loss"], eager["grad_norm"])}


def test_loss_of_a_whole_model_is_that_of_knowing_nothing(recorded: list[dict[str, Any]]) -> None:
    loss = next(row["loss"] for row in recorded if row["head"])
    assert loss == pytest.approx(torch.tensor(float(SHAPE.vocab)).log().item(), rel=0.05)


def test_eager_holds_what_its_layers_save(rows: Rows) -> None:
    """Bytes from shapes. In fp32 a norm's upcast is the tensor itself: 10 hidden + 4 intermediate a token."""
    floats_of_a_layer = 10 * SHAPE.hidden + 4 * SHAPE.intermediate
    statistics = SHAPE.heads + 2  # of attention, and of two norms
    rope_tables = 2 * SHAPE.hidden // SHAPE.heads
    # The last layer's output is held as well; the first layer's input is the stack's own, at rest.
    saved = 4 * TOKENS * (LAYERS * (floats_of_a_layer + statistics) + rope_tables)
    position_ids = 8 * TOKENS
    assert saved <= rows["eager"]["held_bytes"] <= saved + position_ids


def test_peak_is_baseline_and_activation_bytes(rows: Rows) -> None:
    weights = LAYERS * (4 * SHAPE.hidden**2 + 3 * SHAPE.hidden * SHAPE.intermediate + 2 * SHAPE.hidden)
    baseline = 2 * 4 * (weights + TOKENS * SHAPE.hidden)  # each with its gradient
    eager = rows["eager"]
    assert eager["baseline_bytes"] == baseline
    assert eager["peak_allocated_bytes"] == baseline + eager["activation_bytes"]


def test_default_swap_holds_less_by_what_it_offloads(tmp_path: Path) -> None:
    """The attention core's output and statistics leave, and nothing else changes."""
    config = {"swap_config": {"swap": True, "default_prefetch": 20}}
    status, rows = run(tmp_path / "out.json", rows=(Row("actswap-20", actswap, config, must_be_exact=True),))
    assert status == 0
    ours = rows["actswap-20"]
    offloaded = LAYERS * TOKENS * 4 * (SHAPE.hidden + SHAPE.heads)
    assert ours["swapped_bytes"] == ours["prefetched_bytes"] == offloaded
    assert ours["host_bytes"] >= offloaded
    assert rows["eager"]["held_bytes"] - ours["held_bytes"] == offloaded
    assert rows["eager"]["swapped_bytes"] == rows["eager"]["host_bytes"] == 0


def test_recomputation_holds_layer_inputs_only(rows: Rows) -> None:
    hidden = TOKENS * SHAPE.hidden * 4
    for name in ("hf-checkpointing", "actswap-full-recompute"):
        # The first layer's input is the stack's own; rope tables and position ids come on top.
        assert LAYERS * hidden <= rows[name]["held_bytes"] < (LAYERS + 1) * hidden
        assert rows[name]["activation_bytes"] < rows["eager"]["activation_bytes"]


@contextmanager
def one_wrong_gradient(step: TrainingStep, _config: Any) -> Iterator[None]:
    """Change one weight's gradient in its last place."""
    weight = step.model.layers[1].mlp.up_proj.weight
    handle = weight.register_hook(lambda gradient: gradient * (1 + 2**-20))
    try:
        yield None
    finally:
        handle.remove()


@contextmanager
def broken(_step: TrainingStep, _config: Any) -> Iterator[None]:
    raise ValueError("no such thing")
    yield


@contextmanager
def without_memory(step: TrainingStep, _config: Any) -> Iterator[None]:
    """Run out of memory in the first forward."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.\nOf the allocated memory ...")

    handle = step.model.register_forward_pre_hook(fail)
    try:
        yield None
    finally:
        handle.remove()


def test_wrong_gradient_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Row("wrong", one_wrong_gradient, must_be_exact=True)
    status, rows = run(tmp_path / "out.json", rows=(wrong,))
    assert status == 1
    assert rows["eager"]["exact"] is True
    assert rows["wrong"]["exact"] is False
    assert rows["wrong"]["differing"] == ["layers.1.mlp.up_proj.weight"]
    assert "differs in layers.1.mlp.up_proj.weight" in capsys.readouterr().out


def test_wrong_gradient_of_a_row_that_need_not_be_exact_is_reported_only(tmp_path: Path) -> None:
    status, rows = run(tmp_path / "out.json", rows=(Row("wrong", one_wrong_gradient),))
    assert status == 0
    assert rows["wrong"]["exact"] is False


@pytest.mark.slow
def test_broken_row_fails_the_run_and_the_others_are_measured(tmp_path: Path) -> None:
    swap = next(row for row in ROWS if row.name == "actswap-everything-20")
    status, rows = run(tmp_path / "out.json", rows=(Row("broken", broken), swap))
    assert status == 1
    assert rows["broken"]["status"] == "failed"
    assert rows["broken"]["reason"] == "ValueError: no such thing"
    assert "in broken" in rows["broken"]["traceback"]
    assert rows[swap.name]["exact"] is True


def test_row_without_memory_is_recorded_and_fails_nothing(tmp_path: Path) -> None:
    after = Row("after", nothing, must_be_exact=True)
    status, rows = run(tmp_path / "out.json", rows=(Row("large", without_memory), after))
    assert status == 0
    assert (rows["large"]["status"], rows["large"]["reason"]) == (
        "out of memory",
        "Tried to allocate 20.00 GiB.",
    )
    assert rows["large"]["ms"] is None
    assert rows["after"]["exact"] is True


@pytest.mark.slow
def test_eager_that_differs_from_itself_judges_nobody(tmp_path: Path, monkeypatch: Any) -> None:
    """The gradients change from step to step: rows are measured, and the run fails."""
    backward = DecoderStack.backward
    calls = []

    def unsteady(step: TrainingStep, output: torch.Tensor) -> None:
        backward(step, output)
        calls.append(output)
        step.weights()["layers.0.mlp.up_proj.weight"].grad.add_(len(calls))  # type: ignore[union-attr]

    monkeypatch.setattr(DecoderStack, "backward", unsteady)
    status, rows = run(tmp_path / "out.json", rows=(Row("other", nothing, must_be_exact=True),))
    assert status == 1
    reason = "exactness cannot be judged: two eager steps differ: layers.0.mlp.up_proj.weight"
    assert rows["eager"]["reason"] == rows["other"]["reason"] == reason
    assert rows["other"]["exact"] is None
    assert rows["other"]["ms"] is not None


def test_bfloat16(tmp_path: Path) -> None:
    status, rows = run(tmp_path / "out.json", "--dtype", "bfloat16", "--rows", "actswap-mixed")
    assert status == 0
    assert list(rows) == ["eager", "actswap-mixed"]
    assert rows["actswap-mixed"]["exact"] is True
    assert rows["actswap-mixed"]["recomputes"] > 0


def lengths(out: Path) -> dict[tuple[str, int], str]:
    found = json.loads(out.read_text(encoding="utf-8"))
    assert all(row["longest"] and row["exact"] is None for row in found)
    return {(row["method"], row["seq"]): row["status"] for row in found}


@pytest.mark.slow
def test_longest_doubles_the_length_up_to_the_limit(tmp_path: Path) -> None:
    chosen = ("--longest", str(4 * TOKENS), "--rows", "eager", "actswap-everything-20")
    status, _ = run(tmp_path / "out.json", *chosen)
    assert status == 0
    names = ("eager", "actswap-everything-20")
    expected = {(name, factor * TOKENS): "measured" for name in names for factor in (1, 2, 4)}
    assert lengths(tmp_path / "out.json") == expected
    assert not (tmp_path / "out.png").exists()


def test_longest_ends_where_a_row_no_longer_fits(tmp_path: Path) -> None:
    @contextmanager
    def fits_twice(step: TrainingStep, config: Any) -> Iterator[None]:
        if step.workload.tokens <= 2 * TOKENS:
            yield None
        else:
            with without_memory(step, config):
                yield None

    run(tmp_path / "out.json", "--longest", str(8 * TOKENS), rows=(Row("method", fits_twice),))
    assert lengths(tmp_path / "out.json") == {
        ("method", TOKENS): "measured",
        ("method", 2 * TOKENS): "measured",
        ("method", 4 * TOKENS): "out of memory",
        ("method", 8 * TOKENS): "skipped",
    }


@pytest.mark.slow
def test_rows_that_the_file_holds_are_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    rows = (Row("one", nothing), Row("two", nothing))
    run(out, "--rows", "one", rows=rows)
    _, before = run(out, rows=rows)
    assert "cpu one: is in the results" in capsys.readouterr().err
    assert list(before) == ["eager", "one", "two"]
    _, after = run(out, "--again", "one", rows=rows)
    assert {name: after[name]["run"] == before[name]["run"] for name in after} == {
        "eager": True,
        "one": False,
        "two": True,
    }


@pytest.mark.slow
def test_what_pinning_took_is_recorded_apart(tmp_path: Path) -> None:
    _, rows = run(tmp_path / "out.json", "--rows", "actswap-everything-20")
    assert rows["eager"]["first_step_pinning_ms"] is None
    ours = rows["actswap-everything-20"]
    assert 0 < ours["first_step_pinning_ms"] <= ours["pinning_ms"] < ours["first_step_ms"]


def test_row_names_are_unique_and_say_which_are_ours() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
    ours = {
        row.name
        for row in ROWS
        if row.setup is actswap or "actswap" in (row.config_for(4) or {}) or row.budget is not None
    }
    assert {name for name in names if name.startswith("actswap")} == ours


def test_rows_of_a_compile_group_stand_together() -> None:
    groups = [row.compile_group for row in ROWS]
    changes = [group for group, before in zip(groups, ["", *groups], strict=False) if group != before]
    assert len(changes) == len(set(changes))


def test_presets_are_scaled_down_to_the_device() -> None:
    large = PRESETS["7b-8k"]
    assert fitted(large, 139 * 2**30) == large
    few = fitted(large, 24 * 2**30)
    assert 2 <= few.layers < large.layers
    assert few.tokens == large.tokens
    assert few.layers * layer_bytes(few) <= 24 * 2**30
    short = fitted(PRESETS["7b-32k"], 8 * 2**30)
    assert short.tokens < PRESETS["7b-32k"].tokens
    assert short.layers * layer_bytes(short) <= 8 * 2**30


@pytest.mark.parametrize("name", ["7b-8k", "7b-32k", "8b-8k-model", "8b-8k", "8b-32k"])
def test_presets_fit_an_h200_as_they_are(name: str) -> None:
    workload = PRESETS[name]
    assert fitted(workload, 139 * 2**30) == workload
    assert (workload.head, head_bytes(workload) > 0) == (name.endswith("model"),) * 2


def test_layer_bytes_cover_what_is_measured(rows: Rows) -> None:
    tiny = replace(SHAPE, layers=LAYERS, tokens=TOKENS)
    weights_and_gradients = 2 * 4 * (4 * tiny.hidden**2 + 3 * tiny.hidden * tiny.intermediate)
    saved = layer_bytes(tiny) - weights_and_gradients
    assert rows["eager"]["held_bytes"] == pytest.approx(LAYERS * saved, rel=0.15)


@pytest.mark.parametrize("argument", ["--layers", "--tokens", "--steps"])
def test_numbers_below_one_are_rejected(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        frontier.main([argument, "0"])
    assert exit_info.value.code == 2
    assert f"argument {argument}: at least 1, found 0" in capsys.readouterr().err


def test_recorded_results_are_complete_and_exact(repository: Path) -> None:
    files = sorted((repository / "benchmarks" / "results").glob("frontier_*_" + "[0-9]" * 8 + ".json"))
    if not files:
        pytest.skip("nothing is recorded in this form yet")
    for file in files:
        recorded = [Result(**row) for row in json.loads(file.read_text(encoding="utf-8"))]
        assert recorded
        assert all(result.commit for result in recorded)
        assert not [result.method for result in recorded if result.failed]
        assert file.with_suffix(".png").is_file()
