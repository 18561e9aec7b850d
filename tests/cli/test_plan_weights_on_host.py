"""``plan`` with frozen weights on the host: peak, host memory, waits for the link, the plan that is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_actswap import apply, load_plan
from hf_actswap.engine import AppliedPlan, Link
from hf_actswap.engine.frozen_weights import sizes_on_host, step_bytes, window_bytes
from hf_actswap.plan import model_structure
from hf_actswap.planner import Profile, profile_from_shapes
from hf_actswap.planner.budget import with_fragments
from hf_actswap.planner.record.adjusted import with_weights_on_host
from tests.engine.tiny_models import gradients_of_step, plan_of, tiny_llama

from .conftest import Run

pytest.importorskip("scipy")

STEP = ("--seq", "16", "--budget", "8", "--dtype", "fp32", "--device", "H100")
LORA = (*STEP, "--lora", "r=4,targets=all-linear")
HOST = "memory: {weights: host}\n"


def lora() -> nn.Module:
    torch.manual_seed(0)
    asked: Any = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    return get_peft_model(tiny_llama(use_cache=False), LoraConfig(**asked)).train()


def profiled() -> tuple[Profile, dict[Any, int]]:
    with torch.device("meta"):
        model = lora()
    shape = model_structure(model)
    batch = {name: torch.empty((2, 16), dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    return profile_from_shapes(model, shape, batch, "H100"), sizes_on_host(model, shape)


def test_the_bytes_are_those_of_the_engine() -> None:
    model = lora()
    applied = apply(model, plan_of(weights="host"))
    assert isinstance(applied, AppliedPlan)
    assert applied.weights is not None
    _, sizes = profiled()
    assert sizes == {layer.scope: layer.size_bytes for layer in applied.weights.layers}
    assert step_bytes(list(sizes.values())) == applied.weights.step_bytes
    gradients_of_step(model)
    before = applied.stats().prefetched_bytes
    gradients_of_step(model, 1)
    assert applied.stats().prefetched_bytes - before == step_bytes(list(sizes.values()))
    applied.remove()


def test_peak_and_host_memory(run: Run, tiny: Path, write: Callable[[str], Path]) -> None:
    kept = run("plan", tiny, *LORA, "--json").document
    found = run("plan", tiny, write(HOST), *LORA, "--json").document
    assert found["ok"], found
    _, sizes = profiled()
    less = sum(sizes.values()) - window_bytes(list(sizes.values()))
    assert less == 2 * 31744
    for name in ("nothing", "recompute all"):
        assert kept["predicted"][name]["peak_bytes"] - found["predicted"][name]["peak_bytes"] == less
        assert kept["memory"][name]["weights_bytes"] - found["memory"][name]["weights_bytes"] == less
    assert found["host_memory"]["rank_bytes"] - kept["host_memory"]["rank_bytes"] == sum(sizes.values())
    assert found["step"]["weights"] == "host"
    assert kept["step"]["weights"] == "keep"


def test_weights_on_the_host_are_a_plan(run: Run, tiny: Path, write: Callable[[str], Path]) -> None:
    text = " ".join(run("plan", tiny, write(HOST), *LORA).out.split())
    assert "Fits with frozen weights on the host: " in text
    assert "To use it: `memory: {mode: adaptive, weights: host}` finds a plan by measurement" in text
    assert "nothing need be changed" not in text


def test_the_plan_that_is_saved_trains_with_the_weights_on_the_host(
    run: Run, tiny: Path, write: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    run("plan", tiny, write(HOST), *LORA, "--save", path)
    assert json.loads(path.read_text())["weights"] == "host"
    assert load_plan(path).weights == "host"


def test_what_it_cannot_be_combined_with(run: Run, tiny: Path, write: Callable[[str], Path]) -> None:
    host = write(HOST)

    def problem(*words: str) -> str:
        found = run("plan", tiny, host, *words, "--json").document
        assert not found["ok"]
        return json.dumps(found["problems"])

    assert "none: all parameters of the layers are trained" in problem(*STEP)
    assert "keep beside --quantize" in problem(*LORA, "--quantize", "4bit")
    assert "keep beside --shard" in problem(*LORA, "--shard", "fsdp=2")
    assert "of host memory" in problem(*LORA, "--host-memory-gib", "0.00001")


def test_a_layer_waits_where_its_copy_takes_longer_than_the_layer_before() -> None:
    """By hand: 4 equal layers, of which the first two of each pass are there; copies of c ms."""
    profile, sizes = profiled()
    for copy_ms in (0.0, 1.0, 1000.0):
        rate = 31744 / copy_ms if copy_ms else 1e12
        linked = replace(profile, link=Link(rate, rate, rate, rate, latency_ms=0.0))
        found = with_weights_on_host(linked, sizes)
        waited_ms = found.compute_ms - profile.compute_ms
        forward = [sum(e.forward_ms for e in profile.op_events if e.call[0] == layer) for layer in range(4)]
        backward = [sum(e.backward_ms for e in profile.op_events if e.call[0] == layer) for layer in range(4)]
        # The copy of layer 2 begins with layer 1 and may take as long; so does that of layer 3 with layer 2.
        ahead = [forward[1], forward[2], backward[2], backward[1]]
        assert waited_ms == pytest.approx(sum(max(copy_ms - ms, 0.0) for ms in ahead), rel=1e-6)
        assert found.link is not None
        assert found.link.out_bytes_per_ms == pytest.approx(rate)
        assert 0 < found.link.in_bytes_per_ms <= rate


AUTO = "memory: {mode: adaptive, weights: auto}\n"


def test_auto_keeps_the_weights_where_they_cost_nothing(
    run: Run, tiny: Path, write: Callable[[str], Path]
) -> None:
    document = run("plan", tiny, write(AUTO), *LORA, "--json").document
    assert document["weights"] == {"place": "keep", "why": "nothing is slower with them there"}
    assert "weights" not in document["plan"]
    text = " ".join(run("plan", tiny, write(AUTO), *LORA).out.split())
    assert "Frozen weights of the layers: on the device (chosen: nothing is slower with them there)." in text
    without = run("plan", tiny, write(AUTO), *STEP, "--json").document
    assert without["weights"]["place"] == "keep", "none is frozen"


@pytest.mark.slow
def test_auto_moves_the_weights_where_nothing_fits_with_them(
    run: Run, tiny: Path, write: Callable[[str], Path]
) -> None:
    def asked(text: str, budget_bytes: float) -> dict[str, Any]:
        words = [*LORA, "--budget", f"{budget_bytes / 2**30:.12f}", "--json"]
        found: dict[str, Any] = run("plan", tiny, write(text), *words).document
        return found

    whole = asked("memory: {mode: adaptive}\n", 2**33)["predicted"]["recompute all"]["peak_bytes"]
    between = with_fragments(whole - 40_000)  # the host spares 63,488 bytes
    # With `preference: auto` they would leave too.
    kept = "memory: {mode: adaptive, weights: keep, preference: performance}\n"
    assert not asked(kept, between)["ok"]
    found = asked(AUTO, between)
    assert found["ok"], found
    assert found["weights"] == {"place": "host", "why": "nothing fits with them on the device"}
    assert found["plan"]["weights"] == "host"
    assert not asked(AUTO, 1000)["ok"]
