"""The frontier benchmark measures what it says, and notices a row whose gradients are wrong."""

from __future__ import annotations

import itertools
import json
import math
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
from benchmarks.methods import actswap, nothing
from benchmarks.records import Result
from benchmarks.rows import EAGER, ROWS, Row
from benchmarks.workloads import (
    DEFAULT_PRESETS,
    PRESETS,
    DecoderStack,
    TrainingStep,
    fitted,
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
KEYS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("method", "model", "device", "torch", "transformers"), str),
    **dict.fromkeys(("compiled", "head"), bool),
    **dict.fromkeys(("layers", "seq", "batch", "activation_bytes", "peak_allocated_bytes"), int),
    **dict.fromkeys(("host_bytes", "swapped_bytes"), int),
    **dict.fromkeys(("ms", "first_step_ms", "loss", "grad_norm"), float),
    "peak_reserved_bytes": type(None),  # the CPU has no allocator that reserves
    "commit": (str, type(None)),  # an unpacked archive has none
}
"""What every row holds, and of what type where it was measured on the CPU."""

Rows = dict[str, dict[str, Any]]


def run(out: Path, *arguments: str, rows: tuple[Row, ...] = ROWS) -> tuple[int, Rows]:
    """Run the benchmark on the tiny stack; return its exit status and its rows by name."""
    status = frontier.main([*TINY, "--preset", STACK, "--out", str(out), *arguments], rows)
    return status, {row["method"]: row for row in json.loads(out.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> list[dict[str, Any]]:
    """What the command itself wrote, run from a foreign directory."""
    folder = tmp_path_factory.mktemp("frontier")
    command = [sys.executable, str(repository / "benchmarks" / "frontier.py"), *TINY]
    command += ["--out", "out.json", "--rows", *CI_ROWS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTORCH_ALLOC_CONF", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in CI_ROWS)
    found: list[dict[str, Any]] = json.loads((folder / "out.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def rows(recorded: list[dict[str, Any]]) -> Rows:
    """Of the decoder stack."""
    return {row["method"]: row for row in recorded if not row["head"]}


def test_every_row_has_the_keys_and_their_types(recorded: list[dict[str, Any]], repository: Path) -> None:
    names = [row.name for row in ROWS if row.name in (EAGER.name, *CI_ROWS)]
    assert [row["method"] for row in recorded] == names * 2
    reasons = {}
    for row in recorded:
        assert set(row) >= set(KEYS)
        if row["status"] == "measured":
            wrong = [key for key, kind in KEYS.items() if not isinstance(row[key], kind)]
            assert not wrong, row["method"]
        else:
            reasons[row["method"]] = row["reason"]
    assert reasons == {
        "save-on-cpu": "the CPU has no memory of its own to offload from",
        "compiled": "compiling is slow on the CPU; ask for it with --compile",
    }
    row = recorded[0]
    assert (row["model"], row["layers"], row["seq"], row["batch"]) == ("tiny", LAYERS, TOKENS, 1)
    assert (row["device"], row["torch"]) == ("cpu", torch.__version__)
    environment = row["environment"]
    assert environment["allocator"] == "expandable_segments:True"
    assert environment["hardware"]["memory_bytes"] > 2**30
    assert set(environment["versions"]) >= {"python", "accelerate", "hf_actswap"}
    assert str(repository) not in json.dumps(recorded)


def test_rows_of_ours_are_exact_and_compute_the_same(recorded: list[dict[str, Any]]) -> None:
    for head in (False, True):
        eager, *others = [row for row in recorded if row["head"] is head and row["status"] == "measured"]
        ours = [row for row in others if row["method"].startswith("actswap")]
        assert len(ours) == 4
        assert all(row["must_be_exact"] and row["exact"] for row in ours)
        assert {(row["loss"], row["grad_norm"]) for row in ours} == {(eager["loss"], eager["grad_norm"])}
    # The whole model knows nothing.
    assert eager["loss"] == pytest.approx(math.log(SHAPE.vocab), rel=0.05)


def test_eager_holds_what_its_layers_save(rows: Rows) -> None:
    """Bytes from shapes. In fp32 a norm's upcast is the tensor itself: 10 hidden + 4 intermediate a token."""
    eager = rows["eager"]
    floats_of_a_layer = 10 * SHAPE.hidden + 4 * SHAPE.intermediate
    statistics = SHAPE.heads + 2  # of attention, and of two norms
    rope_tables = 2 * SHAPE.hidden // SHAPE.heads
    # The last layer's output is held as well; the first layer's input is the stack's own, at rest.
    saved = 4 * TOKENS * (LAYERS * (floats_of_a_layer + statistics) + rope_tables)
    position_ids = 8 * TOKENS
    assert saved <= eager["held_bytes"] <= saved + position_ids
    matrices = 4 * SHAPE.hidden**2 + 3 * SHAPE.hidden * SHAPE.intermediate
    # Each with its gradient.
    baseline = 2 * 4 * (LAYERS * (matrices + 2 * SHAPE.hidden) + TOKENS * SHAPE.hidden)
    assert eager["baseline_bytes"] == baseline
    assert eager["peak_allocated_bytes"] == baseline + eager["activation_bytes"]
    # What workloads are scaled down by.
    estimate = layer_bytes(replace(SHAPE, layers=LAYERS, tokens=TOKENS)) - 2 * 4 * matrices
    assert eager["held_bytes"] == pytest.approx(LAYERS * estimate, rel=0.15)


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
    with weight.register_hook(lambda gradient: gradient * (1 + 2**-20)):
        yield None


@contextmanager
def without_memory(step: TrainingStep, _config: Any) -> Iterator[None]:
    """Run out of memory in the first forward."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB.\nOf the allocated memory ...")

    with step.model.register_forward_pre_hook(fail):
        yield None


def test_a_row_without_memory_fails_nothing_and_a_wrong_gradient_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large, after = Row("large", without_memory), Row("after", nothing, must_be_exact=True)
    status, rows = run(tmp_path / "out.json", rows=(large, after))
    assert status == 0
    found = tuple(rows["large"][name] for name in ("status", "reason", "ms"))
    assert found == ("out of memory", "Tried to allocate 20.00 GiB.", None)
    assert rows["eager"]["exact"] is rows["after"]["exact"] is True
    status, rows = run(tmp_path / "out.json", rows=(Row("wrong", one_wrong_gradient, must_be_exact=True),))
    assert status == 1
    assert rows["wrong"]["exact"] is False
    assert rows["wrong"]["differing"] == ["layers.1.mlp.up_proj.weight"]
    assert "differs in layers.1.mlp.up_proj.weight" in capsys.readouterr().out


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


def test_rows_have_unique_names_plain_configurations_and_groups_that_stand_together() -> None:
    """A row's configuration tells whether it has changed. The first row of a compile group compiles."""
    configs = {row.name: row.config_for(4) or {} for row in ROWS}
    json.dumps(configs)
    assert len(configs) == len(ROWS)
    ours = {row.name for row in ROWS if row.setup is actswap or "actswap" in configs[row.name] or row.budget}
    assert {name for name in configs if name.startswith("actswap")} == ours
    assert all(configs[row.name] for row in ROWS if row.setup is actswap)
    groups = [group for group, _ in itertools.groupby(row.compile_group for row in ROWS)]
    assert len(groups) == len(set(groups))


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


def test_recorded_results_are_complete_and_exact(repository: Path) -> None:
    files = sorted((repository / "benchmarks" / "results").glob("frontier_*_" + "[0-9]" * 8 + ".json"))
    if not files:
        pytest.skip("nothing is recorded in this form yet")
    for file in files:
        recorded = [Result(**row) for row in json.loads(file.read_text(encoding="utf-8"))]
        assert recorded
        assert all(result.commit for result in recorded)
        assert not [result.method for result in recorded if result.failed]
