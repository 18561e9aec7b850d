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

from benchmarks import frontier
from benchmarks.frontier_memory import StorageMeter
from benchmarks.frontier_rows import ROWS, Row, actswap
from benchmarks.frontier_stack import PRESETS, fitted, layer_bytes

LAYERS, TOKENS = 2, 32
TINY = ("--device", "cpu", "--layers", str(LAYERS), "--tokens", str(TOKENS), "--steps", "1")
SHAPE = PRESETS["cpu"]


def run(out: Path, *arguments: str, rows: tuple[Row, ...] = ROWS) -> tuple[int, dict[str, Any]]:
    """Run the benchmark on the tiny shape; return its exit status and its rows by name."""
    status = frontier.main([*TINY, "--out", str(out), *arguments], rows)
    document = json.loads(out.read_text(encoding="utf-8"))
    return status, {row["row"]: row for row in document["workloads"][0]["rows"]}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, Any]:
    """The results of the command itself, from a foreign directory."""
    folder = tmp_path_factory.mktemp("frontier")
    command = [sys.executable, str(repository / "benchmarks" / "frontier.py"), *TINY, "--out", "out.json"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=one_thread, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for row in ROWS:
        assert row.name in done.stdout
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rows(document: dict[str, Any]) -> dict[str, Any]:
    return {row["row"]: row for row in document["workloads"][0]["rows"]}


def test_document_says_where_and_with_what(document: dict[str, Any], repository: Path) -> None:
    assert document["format"] == "hf_actswap.frontier"
    assert document["format_version"] == 1
    assert document["arguments"] == {"device": "cpu", "layers": LAYERS, "tokens": TOKENS, "steps": 1}
    assert set(document["versions"]) >= {"python", "torch", "transformers", "accelerate", "hf_actswap"}
    assert document["versions"]["torch"] == torch.__version__
    assert document["hardware"]["device"] == "cpu"
    assert document["hardware"]["memory_bytes"] > 2**30
    assert set(document["commit"]) == {"id", "dirty"}
    assert str(repository) not in json.dumps(document)


def test_rows_that_do_not_suit_the_cpu_give_a_reason(rows: dict[str, Any]) -> None:
    assert set(rows) == {row.name for row in ROWS}
    skipped = {name: row["reason"] for name, row in rows.items() if row["status"] != "measured"}
    assert skipped == {
        "hf-checkpointing-offload": "the CPU has no memory of its own to offload from",
        "compiled": "compiling is slow on the CPU; ask for it with --compile",
    }


def test_ratios_are_against_eager(rows: dict[str, Any]) -> None:
    eager = rows["eager"]
    for row in rows.values():
        if row["status"] == "measured":
            for ratio, number in (("time", "median_ms"), ("held", "held_bytes"), ("peak", "peak_bytes")):
                assert row["ratios"][ratio] == pytest.approx(row[number] / eager[number])
    assert eager["ratios"] == {"time": 1.0, "held": 1.0, "peak": 1.0}


def test_rows_of_ours_are_exact(rows: dict[str, Any]) -> None:
    ours = {row.name for row in ROWS if row.setup is actswap}
    assert len(ours) >= 2
    assert all(rows[name]["must_be_exact"] and rows[name]["exact"] for name in ours)


def test_eager_holds_what_its_layers_save(rows: dict[str, Any]) -> None:
    """Bytes from shapes. In fp32 a norm's upcast is the tensor itself: 10 hidden + 4 intermediate a token."""
    floats_of_a_layer = 10 * SHAPE.hidden + 4 * SHAPE.intermediate
    statistics = SHAPE.heads + 2  # of attention, and of two norms
    rope_tables = 2 * SHAPE.hidden // SHAPE.heads
    # The last layer's output is held as well; the first layer's input is the stack's own, at rest.
    saved = 4 * TOKENS * (LAYERS * (floats_of_a_layer + statistics) + rope_tables)
    position_ids = 8 * TOKENS
    assert saved <= rows["eager"]["held_bytes"] <= saved + position_ids


def test_default_swap_holds_less_by_what_it_offloads(rows: dict[str, Any]) -> None:
    """The attention core's output and statistics leave, and nothing else changes."""
    swap = rows["actswap-default-swap"]["swap"]
    offloaded = LAYERS * TOKENS * 4 * (SHAPE.hidden + SHAPE.heads)
    assert swap["offloaded_bytes"] == swap["prefetched_bytes"] == swap["host_peak_bytes"] == offloaded
    assert rows["eager"]["held_bytes"] - rows["actswap-default-swap"]["held_bytes"] == offloaded


def test_recomputation_holds_layer_inputs_only(rows: dict[str, Any]) -> None:
    hidden = TOKENS * SHAPE.hidden * 4
    for name in ("hf-checkpointing", "actswap-full-recompute"):
        # The first layer's input is the stack's own; rope tables and position ids come on top.
        assert LAYERS * hidden <= rows[name]["held_bytes"] < (LAYERS + 1) * hidden
        assert rows[name]["peak_bytes"] < rows["eager"]["peak_bytes"]


@contextmanager
def one_wrong_gradient(model: Any, _config: Any) -> Iterator[None]:
    """Change one weight's gradient in its last place."""
    handle = model.layers[1].mlp.up_proj.weight.register_hook(lambda gradient: gradient * (1 + 2**-20))
    try:
        yield None
    finally:
        handle.remove()


@contextmanager
def broken(_model: Any, _config: Any) -> Iterator[None]:
    raise ValueError("no such thing")
    yield


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


def test_broken_row_fails_the_run_and_the_others_are_measured(tmp_path: Path) -> None:
    swap = next(row for row in ROWS if row.name == "actswap-default-swap")
    status, rows = run(tmp_path / "out.json", rows=(Row("broken", broken), swap))
    assert status == 1
    assert rows["broken"]["status"] == "failed"
    assert rows["broken"]["reason"] == "ValueError: no such thing"
    assert rows[swap.name]["exact"] is True


def test_bfloat16(tmp_path: Path) -> None:
    status, rows = run(tmp_path / "out.json", "--dtype", "bfloat16", "--rows", "actswap-mixed")
    assert status == 0
    assert list(rows) == ["eager", "actswap-mixed"]
    assert rows["actswap-mixed"]["exact"] is True
    assert rows["actswap-mixed"]["swap"]["recomputes"] > 0


def test_storage_meter_counts_storages_once_and_forgets_dead_ones() -> None:
    before = torch.ones(1000)
    with StorageMeter() as meter:
        doubled = before * 2
        view = doubled.view(10, 100)
        before.add_(1)
        assert meter.held_bytes() == 4000
        copy = view.clone()
        del doubled
        assert meter.held_bytes() == 8000  # the view keeps the storage
        del view, copy
        assert meter.held_bytes() == 0
    assert meter.peak_bytes() == 8000


def test_presets_are_scaled_down_to_the_device() -> None:
    large = PRESETS["h200-8k"]
    assert fitted(large, 139 * 2**30) == large
    few = fitted(large, 24 * 2**30)
    assert 2 <= few.layers < large.layers
    assert few.tokens == large.tokens
    assert few.layers * layer_bytes(few) <= 24 * 2**30
    short = fitted(PRESETS["h200-32k"], 8 * 2**30)
    assert short.tokens < PRESETS["h200-32k"].tokens
    assert short.layers * layer_bytes(short) <= 8 * 2**30


def test_layer_bytes_cover_what_is_measured(rows: dict[str, Any]) -> None:
    tiny = replace(SHAPE, layers=LAYERS, tokens=TOKENS)
    weights_and_gradients = 2 * 4 * (4 * tiny.hidden**2 + 3 * tiny.hidden * tiny.intermediate)
    saved = layer_bytes(tiny) - weights_and_gradients
    assert rows["eager"]["held_bytes"] == pytest.approx(LAYERS * saved, rel=0.15)


@pytest.mark.parametrize("argument", ["--layers", "--tokens", "--steps"])
def test_numbers_below_one_are_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        frontier.main([argument, "0"])
    assert exit_info.value.code == 2
    assert f"argument {argument}: at least 1, found 0" in capsys.readouterr().err


def test_recorded_results_are_complete_and_exact(repository: Path) -> None:
    files = sorted((repository / "benchmarks" / "results").glob("frontier_*.json"))
    assert files
    for file in files:
        recorded = json.loads(file.read_text(encoding="utf-8"))
        assert recorded["format_version"] == 1
        assert recorded["commit"]["id"]
        for workload in recorded["workloads"]:
            assert workload["rows"][0]["row"] == "eager"
            assert all(row["exact"] for row in workload["rows"] if row["must_be_exact"])
