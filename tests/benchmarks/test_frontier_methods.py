"""What is put on a model is taken off again; meters and machine say what they should."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config

import hf_actswap
from benchmarks.measure import Reference, measure_row
from benchmarks.meters import CopyMeter
from benchmarks.methods import (
    TRL_MODULE,
    actswap,
    compiled,
    hf_checkpointing,
    liger_checkpointing,
    save_on_cpu,
    trl_offloading,
)
from benchmarks.records import device_named, hardware, link_gb_per_s
from benchmarks.rows import EAGER, ROWS, Row, swap_everything
from benchmarks.workloads import PRESETS, TrainingStep, timed_step_ms, training_step
from hf_actswap.engine import Link

CPU = torch.device("cpu")
ROW = {row.name: row for row in ROWS}


def tiny(preset: str = "cpu-model") -> TrainingStep:
    return training_step(replace(PRESETS[preset], layers=2, tokens=16, warmup_steps=1, steps=1), CPU)


def hooks(model: nn.Module) -> list[Any]:
    names = ("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_backward_hooks")
    return [list(getattr(module, name)) for module in model.modules() for name in names]


class FakeOffloading:
    """Stands for TRL's module, which needs an accelerator; it too keeps no handle of the head's hooks."""

    def __init__(self) -> None:
        self.entered = 0

    def get_act_offloading_ctx_manager(self, model: Any, warn_if_no_head: bool) -> FakeOffloading:
        assert warn_if_no_head is False
        model.lm_head.register_forward_pre_hook(lambda *_: None)
        model.lm_head.register_forward_hook(lambda *_: None, always_call=True)
        return self

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        pass


class FakeLiger:
    """Stands for two modules of Liger, whose kernels need an accelerator; it too replaces the forward."""

    def apply_liger_kernel_to_llama(self, model: Any, **chosen: bool) -> None:
        others = dict.fromkeys(("rope", "rms_norm", "swiglu"), False)
        assert chosen == {**others, "fused_linear_cross_entropy": True}
        model.forward = model.forward

    def apply_tiled_mlp(self, fn: Any, mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([fn(mlp, piece) for piece in x.chunk(2, dim=-2)], dim=-2)


@pytest.mark.parametrize(
    ("setup", "options"),
    [
        (hf_checkpointing, None),
        (save_on_cpu, None),
        (trl_offloading, {"checkpointing": True}),
        (liger_checkpointing, {"tiled_mlp": True}),
        (actswap, swap_everything(20)),
        (compiled, {"backend": "aot_eager", "checkpointing": True, "memory_budget": 0.5}),
    ],
)
def test_methods_leave_the_model_as_it_was(
    setup: Any, options: Mapping[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = FakeOffloading()
    monkeypatch.setitem(sys.modules, TRL_MODULE, trl)  # type: ignore[arg-type]
    for name in ("transformers", "ops.tiled_mlp"):
        monkeypatch.setitem(sys.modules, f"liger_kernel.{name}", FakeLiger())  # type: ignore[arg-type]
    step = tiny()
    before, context = hooks(step.model), step.context
    budget = functorch_config.activation_memory_budget
    with setup(step, options):
        timed_step_ms(step)
        timed_step_ms(step)
    assert trl.entered == (2 if setup is trl_offloading else 0)  # once a step
    assert hooks(step.model) == before
    assert step.context is context
    assert functorch_config.activation_memory_budget == budget
    assert not any(getattr(layer, "gradient_checkpointing", False) for layer in step.decoder_layers)
    assert all(layer._compiled_call_impl is None for layer in step.decoder_layers)
    assert not any("forward" in vars(module) for module in step.model.modules())


def test_every_step_of_a_row_is_in_its_context() -> None:
    """Warm-up, timed, under the meter, and the one that is compared."""
    context = mock.Mock(side_effect=nullcontext)

    @contextmanager
    def counted(step: TrainingStep, _options: object) -> Iterator[None]:
        step.context = context
        yield

    assert measure_row(tiny(), Row("counted", counted)).status == "measured"
    assert context.call_count == 4


def test_trl_loads_without_datasets() -> None:
    """The benchmark runs where nothing but torch, transformers and accelerate is installed beside trl."""
    pytest.importorskip("trl", reason="the `bench` extra is not installed")
    script = f"import sys; sys.modules['datasets'] = None; import {TRL_MODULE}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert hasattr(importlib.import_module(TRL_MODULE), "get_act_offloading_ctx_manager")


@pytest.mark.slow
def test_compiled_row_runs_and_its_compilation_is_counted_apart() -> None:
    row = Row("compiled", compiled, {"backend": "aot_eager"}, compile_group="1.0")
    step = tiny("cpu")
    eager = measure_row(step, EAGER, Reference.of(step))
    result = measure_row(step, row)
    assert result.status == "measured", result.reason
    assert result.first_step_compile_ms is not None
    assert result.first_step_ms is not None
    assert 0 < result.first_step_compile_ms < result.first_step_ms
    assert eager.first_step_compile_ms == 0
    assert result.loss == pytest.approx(eager.loss, rel=1e-4)
    assert (result.exact, result.activation_bytes) == (None, None)


def test_memory_budget_holds_while_layers_are_compiled() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        seen.append(functorch_config.activation_memory_budget)
        return graph.forward

    step = tiny("cpu")
    with compiled(step, {"backend": backend, "memory_budget": 0.2}):
        step.backward(step.forward())
    assert set(seen) == {0.2}


@pytest.mark.parametrize("layers", [2, 3, 16])
def test_case3_is_the_recipe_with_auto_and_the_layers_that_there_are(layers: int) -> None:
    rules = ROW["actswap-case3-auto"].config_for(layers)["swap_config"]["op_swap"]
    assert {rule["backward_prefetch"] for rule in rules} == {"auto"}
    named = {layer for rule in rules if rule["op_name"] == "attention" for layer in rule["layers"]}
    assert named == set(range(min(layers, 4)))
    assert all(rule["layers"] for rule in rules)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("accelerator", marks=pytest.mark.gpu)])
def test_copy_meter_counts_what_goes_to_the_host(kind: str) -> None:
    device = CPU if kind == "cpu" else device_named()
    values = torch.ones(100, device=device)
    with CopyMeter() as meter:
        torch.empty(100).copy_(values)
        values.cpu()
        torch.ones(100).to(device)
        torch.ones(100).to(torch.bfloat16)
    assert meter.copied_bytes == (0 if kind == "cpu" else 800)


def test_the_eager_mix_swaps_what_the_second_rule_keeps() -> None:
    row = ROW["actswap-mix-eager"]
    step = tiny("cpu")
    config = row.config_for(2)
    swap = {key: value for key, value in config["swap_config"].items() if key != "select_recompute_input"}
    as_reference = hf_actswap.load_config({**config, "swap_config": swap})
    asked = hf_actswap.resolve_plan(as_reference, hf_actswap.model_structure(step.model))
    assert (asked.fate(0, "output"), asked.fate(0, "add", 0)) == ("keep", "keep")
    with row.setup(step, config) as applied:
        assert applied is not None
        plan = applied.plan
        assert (plan.fate(0, "output"), plan.fate(0, "add", 0)) == ("swap", "swap")
        assert plan.fate(0, "self_attn.flash_attention") == "swap"
        assert plan.fate(0, "mlp.gate_proj.linear") == plan.fate(1, "mlp.act_fn.silu") == "recompute"
        assert plan.fate(1, "self_attn.flash_attention") == "keep"  # the last layer's share stays


@pytest.mark.slow
def test_the_eager_mix_is_exact_and_below_the_peak_of_checkpointing() -> None:
    step = training_step(replace(PRESETS["cpu"], layers=6, tokens=128, warmup_steps=1, steps=1), CPU)
    reference = Reference.of(step)
    names = ("eager", "hf-checkpointing", "actswap-elementwise", "actswap-mix-eager")
    found = {name: measure_row(step, ROW[name], reference) for name in names}
    assert all(result.exact for result in found.values()), [result.reason for result in found.values()]
    eager, checkpointing, elementwise, mix = (result.activation_bytes or 0 for result in found.values())
    assert 0 < mix <= checkpointing
    assert 0 < elementwise <= 0.65 * eager


RATES = {"out": 54.9, "in": 55.1, "out_beside_in": 49.8, "in_beside_out": 49.5}


def test_rates_of_a_link_are_told_in_gb_per_s() -> None:
    link = Link(54.9e6, 55.1e6, 49.8e6, 49.5e6, latency_ms=0.5)
    assert link_gb_per_s(link) == pytest.approx(RATES)


@pytest.mark.gpu
def test_an_accelerator_tells_its_link() -> None:
    found = hardware(device_named())["link_gb_per_s"]
    assert set(found) == set(RATES)
    assert min(found.values()) > 0.1
