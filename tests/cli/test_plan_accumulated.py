"""``plan --micro-batches``: the step of all of them, and where the optimizer's states wait meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import TINY, Run

pytest.importorskip("scipy")

SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "head_dim": 128}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
STEP = ("--seq", "8k", "--device", "H100", "--budget", "5.6")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of Llama-3-8B's shape, whose states are as large as what autograd saves."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "config.json").write_text(json.dumps({**TINY, **SIZES, **HEADS}))
    return folder


def found(run: Run, model: Path, *words: Any) -> dict[str, Any]:
    document = run("plan", model, *words, "--json").document
    assert document["ok"], document
    return dict(document)


def test_with_many_micro_batches_the_states_wait_on_the_host(run: Run, wide: Path, tmp_path: Path) -> None:
    one = found(run, wide, *STEP)
    assert one["optimizer_states"] == {"place": "device", "kept_ms": None}
    file = tmp_path / "plan.json"
    many = found(run, wide, *STEP, "--micro-batches", "64", "--save", file)
    planned, states = many["predicted"]["planned"], many["optimizer_states"]
    assert states["place"] == "host"
    assert planned["step_ms"] < states["kept_ms"]
    assert planned["peak_bytes"] <= many["allocatable_bytes"]
    assert many["tokens_per_s"] == pytest.approx(64 * 8192 / planned["step_ms"] * 1000)
    assert many["host_memory"]["rank_bytes"] >= one["memory"]["planned"]["states_bytes"] > 0
    assert many["memory"]["planned"]["states_bytes"] == 0
    assert many["step"]["micro_batches"] == 64
    assert json.loads(file.read_text())["predicted"]["states_resident_bytes"] > 0


def test_the_lines_say_what_was_chosen(run: Run, wide: Path, tmp_path: Path) -> None:
    text = " ".join(
        run("plan", wide, *STEP, "--micro-batches", "64", "--save", tmp_path / "plan.json").out.split()
    )
    assert "64 micro-batches of 1 x 8192 tokens" in text
    assert "on the host, copied once a step (chosen: a step takes" in text
    assert "To use it: actswap=" in text, "a file says where the states wait"


def test_states_on_the_host_alone_are_something_to_use(run: Run, wide: Path) -> None:
    text = " ".join(run("plan", wide, "--seq", "256", "--device", "H100", "--budget", "2.6").out.split())
    assert text.startswith("Fits with the optimizer's states on the host: ")
    assert 'To use it: actswap="auto"' in text


def test_what_is_written_stays(run: Run, wide: Path, write: Callable[[str], Path]) -> None:
    kept = write("memory: {mode: adaptive, preference: performance}\n")
    on_device = found(run, wide, kept, *STEP, "--micro-batches", "64")
    assert on_device["optimizer_states"]["place"] == "device"
    moved = write("memory: {mode: adaptive, preference: memory_saving}\n")
    on_host = found(run, wide, moved, *STEP)
    assert on_host["optimizer_states"] == {"place": "host", "kept_ms": None}


def test_the_least_budget_is_that_with_the_states_on_the_host(run: Run, wide: Path) -> None:
    """What the error names fits; less than 1 % below it does not."""
    asked = ("--seq", "1k", "--device", "H100", "--budget")
    (problem,) = run("plan", wide, *asked, "1GiB", "--json").document["problems"]
    assert "That is with the optimizer's states on the host." in problem["hint"]
    least = float(problem["expected"].split()[2])
    assert found(run, wide, *asked, f"{least}GiB")["optimizer_states"]["place"] == "host"
    assert run("plan", wide, *asked, f"{0.99 * least:.4f}GiB", "--json").code == 1


def test_gradients_of_earlier_micro_batches_are_counted(run: Run, wide: Path) -> None:
    roomy = ("--seq", "8k", "--device", "H100", "--optimizer", "none")
    one, two = (found(run, wide, *roomy, "--micro-batches", count) for count in ("1", "2"))
    more = two["predicted"]["nothing"]["peak_bytes"] - one["predicted"]["nothing"]["peak_bytes"]
    assert more > 0
    assert two["memory"]["nothing"]["gradients_bytes"] > one["memory"]["nothing"]["gradients_bytes"]
    ratio = two["predicted"]["nothing"]["step_ms"] / one["predicted"]["nothing"]["step_ms"]
    assert 2 <= ratio < 2.1, "gradients are added to"


def test_sharded_gradients_are_rejected(run: Run, wide: Path) -> None:
    ended = run("plan", wide, *STEP, "--micro-batches", "2", "--shard", "fsdp=2", "--json")
    (problem,) = ended.document["problems"]
    assert problem["where"] == "--micro-batches"
