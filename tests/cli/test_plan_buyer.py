"""``plan`` answers whether a step fits, how fast it is, what it takes of the host, and how to use it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_actswap import load_config, model_structure, resolve_plan
from hf_actswap.cli.options import ModelRequest, Sharding
from hf_actswap.cli.output import busy
from hf_actswap.cli.planned import rates_or_none
from hf_actswap.cli.step import (
    StepShape,
    bytes_by_fate,
    profile_of,
    ranks_of_a_machine,
    state_bytes,
    step_bytes,
)
from hf_actswap.cli.subject import subject
from hf_actswap.planner import CountingMeter, device_rates, predict, profile_from_shapes
from hf_actswap.planner.meter import baseline_tensors
from tests.engine.tiny_models import tiny_llama
from tests.planner.recorded_steps import measured_peak_bytes

from .conftest import TINY, Run

pytest.importorskip("scipy")

GIB = 2**30
MIB = 2**20
STEP = ("--seq", "512", "--batch", "8", "--device", "H100")
SHAPE = StepShape(8, 512, "H100", "bf16", "adamw")


@pytest.fixture(scope="module")
def budget(run: Run, tiny: Path) -> str:
    """Halfway between a step without a plan and one with every layer recomputed."""
    steps = run("plan", tiny, *STEP, "--json").document["predicted"]
    return f"{(steps['nothing']['peak_bytes'] + steps['recompute all']['peak_bytes']) / 2 / GIB:.6f}"


def words(text: str) -> str:
    return " ".join(text.split())


def test_ops_are_those_of_a_training_without_a_cache(tiny: Path) -> None:
    """Under a plan there is no key-value cache. With one, attention saves copies that other ops make."""
    config = AutoConfig.from_pretrained(tiny)
    assert config.use_cache
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.empty(8, 512, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids, "use_cache": False}
    expected = profile_from_shapes(model, model_structure(model), call, "H100").saved.by_op()
    with subject(ModelRequest(str(tiny), "bf16"), load_config(None)) as found:
        assert profile_of(found, replace(SHAPE, autocast=None)).saved.by_op() == expected


def test_the_first_lines_and_the_last(run: Run, tiny: Path, budget: str) -> None:
    asked = ("plan", tiny, *STEP, "--budget", budget, "--shard", "zero1=8")
    found, text = run(*asked, "--json").document, words(run(*asked).out)
    planned, steps = found["predicted"]["planned"], found["predicted"]
    speed = 1000 * 8 * 512 / planned["step_ms"]
    assert found["tokens_per_s"] == pytest.approx(speed)
    first, _ = text.split(" Host memory: ")
    assert first.startswith(f"Fits with this plan: {planned['peak_bytes'] / MIB:.2f} MiB of ")
    assert f"{speed:,.0f} tokens/s a rank" in first
    for name, said in (("recompute all", "checkpointing"), ("nothing", "without a limit")):
        ratio = steps[name]["step_ms"] / planned["step_ms"]
        how = f"{100 * abs(ratio - 1):.0f} % {'faster' if ratio > 1 else 'slower'} than {said}"
        assert (how if abs(ratio - 1) >= 0.005 else f"as fast as {said}") in first
    host = found["host_memory"]
    assert host["rank_bytes"] == planned["host_bytes"]
    assert (host["machine_ranks"], host["machine_bytes"]) == (8, 8 * host["rank_bytes"])
    assert host["limit_gib"] == device_rates("H100").host_bytes / GIB
    assert "for 8 ranks of a machine, of at most 192 GiB a rank (usual for H100; yours: --host-memory" in text
    assert text.endswith('or write this one with --save plan.json and pass actswap="plan.json".')
    assert "share the rate of its memory" in text


def test_what_fits_needs_nothing(run: Run, tiny: Path, tmp_path: Path) -> None:
    text = words(run("plan", tiny, *STEP, "--shard", "fsdp=2").out)
    assert text.startswith("Fits without a plan: ")
    assert text.endswith("To use it: nothing need be changed. It fits as it is.")
    assert "78.60 GiB beside the driver's context, less 5 % for fragments and NCCL; mode adaptive" in text


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "dtype": "bfloat16",
    "text_config": TINY,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, **VISION},
}
BERT = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 64, **VISION}


@pytest.mark.parametrize(
    ("config", "named", "note"),
    [
        (LLAVA, "llava, 4 layers", "what images and sounds add"),
        (BERT, "bert as BertLMHeadModel", ""),
    ],
)
def test_models_of_images_are_a_step_of_text_and_a_decoder_alone_is_called_so(
    run: Run, tmp_path: Path, config: dict[str, Any], named: str, note: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    ended = run("plan", tmp_path, "--seq", "64", "--device", "H100")
    assert ended.code == 0, ended.err
    assert named in ended.out
    assert note in ended.out


def test_what_does_not_fit_says_so_first(run: Run, tiny: Path) -> None:
    ended = run("plan", tiny, *STEP, "--budget", "70MiB")
    assert ended.code == 1
    first, *rest = ended.out.splitlines()
    needed = re.fullmatch(
        r"Does not fit: at least ([\d.]+) GiB are needed, and the budget is 70.00 MiB.", first
    )
    assert needed is not None, first
    assert f"expected at least {needed[1]} GiB" in words(" ".join(rest))
    assert "exceeds the budget: --lora" not in words(" ".join(rest))
    less = words(run("plan", tiny, *STEP, "--budget", "64MiB").out)
    assert "with weights, gradients and states, exceeds the budget: --lora, --quantize, --shard" in less


def test_host_memory_is_a_limit_without_longest(run: Run, tiny: Path, budget: str) -> None:
    asked = ("plan", tiny, *STEP, "--budget", budget)
    free = run(*asked, "--json").document
    assert free["predicted"]["planned"]["host_bytes"] > 0
    ended = run(*asked, "--host-memory-gib", "0")
    assert ended.code == 0
    assert "Host memory: none, nothing is swapped." in words(ended.out)


def test_a_margin_and_a_link_of_several_ranks() -> None:
    one = device_rates("H100")
    alone, shared = one.link_of(1), one.link_of(8)
    assert alone == one.link
    assert alone is not None
    assert shared is not None
    assert shared.out_beside_in_bytes_per_ms == one.host_bytes_per_ms / 16 < alone.out_beside_in_bytes_per_ms
    assert shared.out_bytes_per_ms == min(alone.out_bytes_per_ms, one.host_bytes_per_ms / 8)
    assert device_rates("cpu").link_of(8) is None
    assert rates_or_none("a device that was measured") is None


def test_the_tables_agree_on_what_is_swapped(tiny: Path) -> None:
    """Also where a recomputed layer's input is swapped, which no op of the plan's rows saves."""
    config = load_config(
        "swap_config: {swap: true, recompute_input: true, op_swap: [{op_name: mlp, backward_prefetch: 9, "
        "layers: [3]}]}\nrecompute_config: {recompute: [2, 1]}\n"
    )
    with subject(ModelRequest(str(tiny)), config) as found:
        plan = resolve_plan(config, found.shape)
        profile = profile_of(found, SHAPE, plan.tiles)
        assert ranks_of_a_machine(found, replace(SHAPE, sharding=Sharding("fsdp", 16))) == 8
    listed: dict[str, int] = {}
    for (_, _, fate), size in bytes_by_fate(profile, plan).items():
        listed[fate] = listed.get(fate, 0) + size
    step = predict(profile, plan)
    assert listed["swap"] == step.swapped_bytes > 0
    assert listed["recompute"] == step.recomputed_bytes > 0


@pytest.mark.parametrize("name", ["adamw", "adamw_torch"])
def test_what_the_optimizers_step_allocates(name: str) -> None:
    """PyTorch's own, counted: ``foreach`` takes all roots at once, the fused one none."""
    torch.manual_seed(0)
    model = tiny_llama()
    kind: dict[str, bool] = {"foreach": True} if name == "adamw_torch" else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **kind)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    meter = CountingMeter()
    meter.own(baseline_tensors(model, optimizer))
    meter.start()
    before = meter.allocated_bytes()
    meter.reset_peak()
    optimizer.step()
    meter.stop()
    counted = meter.peak_bytes() - before
    assert step_bytes(name, model) == pytest.approx(counted, abs=4096)
    assert (counted > MIB / 8) == (name == "adamw_torch")
    assert state_bytes("adamw_torch", model) == state_bytes("adamw", model)


def test_a_step_of_the_optimizer_can_be_the_peak(tiny: Path) -> None:
    config = load_config(None)
    with subject(ModelRequest(str(tiny)), config) as found:
        plan = resolve_plan(config, found.shape)
        weights = sum(weight.nbytes for weight in found.model.parameters())
        fused, foreach = (
            profile_of(found, StepShape(1, 16, "H100", None, name)).outside_base_bytes  # type: ignore[arg-type]
            for name in ("adamw", "adamw_torch")
        )
        step = predict(profile_of(found, StepShape(1, 16, "H100", None, "adamw_torch")), plan)
    assert foreach - fused == weights
    assert step.peak_bytes == foreach
    assert foreach >= device_rates("H100").workspace_bytes + 5 * weights


def test_a_loop_that_holds_the_output_has_the_logits_too() -> None:
    """The prediction is that of the Trainer, counted on the CPU; bf16 logits stay if the output does."""
    config = AutoConfig.for_model(**{**TINY, "vocab_size": 4096})
    ids = torch.zeros(1, 256, dtype=torch.long)

    def counted(holds: bool) -> int:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # rotary tables are there
        model.zero_grad()
        meter = CountingMeter()
        meter.own([*baseline_tensors(model, None), ids])
        meter.start()
        if holds:
            outputs = model(input_ids=ids, labels=ids, use_cache=False)
            outputs.loss.backward()
        else:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        meter.stop()
        return meter.peak_bytes()

    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    call: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    on_paper = measured_peak_bytes(profile_from_shapes(model, model_structure(model), call, "H100"))
    logits = 256 * 4096 * 2
    assert on_paper == pytest.approx(counted(False), rel=0.01)
    assert counted(True) - counted(False) == pytest.approx(logits, rel=0.01)
    with_workspaces = profile_from_shapes(model, model_structure(model), call, "H100", with_workspaces=True)
    assert measured_peak_bytes(with_workspaces) - on_paper == 64 * MIB


def test_a_step_that_is_short_for_its_operators_may_wait_for_the_host(run: Run, tiny: Path) -> None:
    short = words(run("plan", tiny, *STEP, "--device", "H100").out)
    found = re.search(r"Autograd records ([\d,]+) operators; if the host needs more than (\d+) us", short)
    assert found is not None
    operators, each_us = (int(number.replace(",", "")) for number in found.groups())
    assert operators > 50
    assert 0 <= each_us < 100
    long = run("plan", tiny, "--seq", "4096", "--batch", "4096", "--device", "H100")
    assert "The host's time" not in long.out


def test_autocast_is_that_of_trl(run: Run, tiny: Path) -> None:
    asked = ("check", "swap_config: {swap: true}", "-m", tiny, "--seq", "8", "--json")
    assert run(*asked).document["step"]["autocast"] == "bf16"
    assert run(*asked, "--autocast", "none").document["step"]["autocast"] is None


def test_check_takes_adapters_quantised_bases_and_shards(
    run: Run, tiny: Path, write: Callable[[str], Path]
) -> None:
    pytest.importorskip("peft")
    config = write("swap_config: {swap: true}\n")
    asked = ("check", config, "-m", tiny)
    found = run(
        *asked, "--lora", "r=8", "--quantize", "4bit", "--shard", "fsdp=4", "--seq", "16", "--json"
    ).document
    assert found["ok"]
    assert (found["model"]["quantize"], found["model"]["trained"]) == ("4bit", 4 * 8 * (64 + 48))
    assert found["step"]["sharding"] == {"name": "fsdp", "ranks": 4}
    assert run(*asked, "--quantize", "4bit").code == 2


def test_slow_work_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    with busy("profile of [a model]"):
        pass
    out, err = capsys.readouterr()
    assert (out, err) == ("", "profile of [a model] ...\n")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with busy("search"):
        pass
    assert not re.search("search", capsys.readouterr().err)
