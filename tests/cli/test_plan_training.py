"""``plan`` for what people train: optimizers, types of gradients, shards, adapters, quantised bases.

Numbers are derived by hand. The tiny model: 64 words, width 32, MLP 48, 4 layers, 4 heads of 8, 2 for keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_actswap.config.sizes import OWN_DEVICE
from hf_actswap.plan import model_structure
from hf_actswap.planner import Profile, profile_from_shapes
from hf_actswap.planner.record.adjusted import Baseline, with_baseline
from hf_actswap.planner.states.state_bytes import state_bytes
from tests.engine.tiny_models import tiny_llama
from tests.planner.recorded_steps import measured_peak_bytes

from .conftest import Run

pytest.importorskip("scipy")

LINEARS = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48
LAYER = LINEARS + 2 * 32
OUTSIDE = 2 * 64 * 32 + 32
WEIGHTS = OUTSIDE + 4 * LAYER
BUFFERS = 2 * 4 * 4
STEP = ("--seq", "16", "--budget", "8")


@pytest.fixture
def at_peak(run: Run, tiny: Path) -> Any:
    """What the peak of a step without a plan consists of, and the whole answer."""

    def asked(*options: str) -> tuple[Mapping[str, Any], Any]:
        found = run("plan", tiny, *STEP, *options, "--json").document
        assert found["ok"], found
        return found["memory"]["recompute all"], found

    return asked


def test_states_by_hand() -> None:
    """Of a projection of Llama-2-7B, its embedding, and a tensor just too small for 8 bits."""
    with torch.device("meta"):
        one = nn.Linear(4096, 11008, bias=False, dtype=torch.bfloat16)
        norm = nn.Parameter(torch.empty(4095, dtype=torch.bfloat16))
        words = nn.Embedding(32000, 4096, dtype=torch.bfloat16)
    model = nn.Sequential(one, words)
    model.register_parameter("norm", norm)
    n, small, embedded = 4096 * 11008, 4095, 32000 * 4096
    everything = n + small + embedded
    eight_bit = 2 * n + 2 * 4 * (n // 256) + 8 * small + 8 * embedded
    assert state_bytes("adamw", model) == (2 * 2 * everything, 0)
    assert state_bytes("adamw_master", model) == (12 * everything, 0)
    assert state_bytes("adamw_8bit", model) == (eight_bit, 0)
    assert state_bytes("paged_adamw_8bit", model) == (8 * small, eight_bit - 8 * small)
    assert state_bytes("paged_adamw_32bit", model) == (8 * small, 8 * (everything - small))
    assert state_bytes("adafactor", model) == (4 * (4096 + 11008 + small + 32000 + 4096), 0)
    assert state_bytes("sgd", model) == state_bytes("none", model) == state_bytes(None, model) == (0, 0)
    assert state_bytes("adamw_master", model.float()) == (8 * everything, 0)
    one.requires_grad_(False)
    assert state_bytes("adamw_8bit", model) == (8 * (small + embedded), 0)


def test_optimizers(at_peak: Any) -> None:
    for name, per_weight in (("adamw", 4), ("adamw_master", 12), ("sgd", 0), ("none", 0)):
        assert at_peak("--optimizer", name)[0]["states_bytes"] == per_weight * WEIGHTS
    parts, found = at_peak("--optimizer", "adamw_8bit")
    assert parts["states_bytes"] == 8 * WEIGHTS  # all tensors have fewer than 4,096 elements
    assert found["step"]["optimizer"] == "adamw_8bit"


def test_paged_states_are_said_not_to_count(run: Run, tmp_path: Path, tiny: Path) -> None:
    large = json.loads((tiny / "config.json").read_text()) | {"vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(large))
    text = run("plan", tmp_path, *STEP, "--optimizer", "paged_adamw_32bit").out
    paged = 2 * 8 * 4096 * 32 / 2**20  # embedding and head: all others have fewer than 100,000 elements
    assert f"{paged:.2f} MiB of the optimizer's states are in pages" in " ".join(text.split())


def test_gradients_rest_in_the_type_that_is_asked_for(at_peak: Any) -> None:
    own, _ = at_peak("--optimizer", "none")
    wide, found = at_peak("--optimizer", "none", "--grad-dtype", "fp32")
    assert 4 * WEIGHTS >= wide["gradients_bytes"] > own["gradients_bytes"] > 0
    assert found["step"]["gradient_dtype"] == "fp32"
    profile, baseline = on_paper()
    doubled = with_baseline(profile, replace(baseline, gradient_scale=Fraction(2)))
    assert doubled.gradient_bytes == tuple(2 * size for size in profile.gradient_bytes)
    more = doubled.outside_base_bytes - profile.outside_base_bytes
    assert more == profile.gradient_bytes[-1] > 0


def test_what_each_stage_shards(at_peak: Any) -> None:
    """As plain bf16 training: weights, gradients and states in bf16; FSDP gathers beside the shards."""
    bf16 = ("--autocast", "none")
    whole, _ = at_peak(*bf16)
    states, weights = 4 * WEIGHTS, 2 * WEIGHTS + BUFFERS
    assert (whole["weights_bytes"], whole["states_bytes"]) == (weights, states)
    outside = 2 * OUTSIDE + BUFFERS
    at_once = {"zero3": outside, "fsdp": outside, "shard_grad_op": weights}
    for name, stage in (("zero1", 1), ("zero2", 2), ("zero3", 3), ("fsdp", 3), ("shard_grad_op", 3)):
        parts, found = at_peak("--shard", f"{name}=8", *bf16)
        assert parts["states_bytes"] == states // 8
        assert parts["weights_bytes"] == (weights if stage < 3 else at_once[name] + -(-weights // 8))
        if name not in at_once or name == "shard_grad_op":  # else layers are gathered in passing
            assert parts["activations_bytes"] == whole["activations_bytes"]
        assert (parts["gradients_bytes"] < whole["gradients_bytes"]) == (stage > 1)
        assert found["step"]["sharding"] == {"name": name, "ranks": 8}
        assert f"ZeRO stage {stage}" in found["assumed"][0]
        assert "fp32" not in found["assumed"][0]


def test_mixed_precision_shards_trained_weights_in_fp32(at_peak: Any) -> None:
    """FSDP by Accelerate: 4 bytes a weight, 8 for AdamW, a rank; DeepSpeed: 2 for all, 4 + 8 a rank."""
    outside = 2 * OUTSIDE + BUFFERS
    for name in ("fsdp", "zero3", "zero2"):
        parts, found = at_peak("--shard", f"{name}=8")
        copies = name != "fsdp"
        assert parts["states_bytes"] == -(-(12 if copies else 8) * WEIGHTS // 8)
        shards = -(-((2 if copies else 4) * WEIGHTS + BUFFERS) // 8)
        assert parts["weights_bytes"] == (2 * WEIGHTS + BUFFERS if name == "zero2" else outside + shards)
        said = "among the states" if copies else "sharded in fp32, as Accelerate does"
        assert said in found["assumed"][0]
    for asked in ((), ("--dtype", "fp32")):  # which FSDP gathers in the type of mixed precision
        assert at_peak("--shard", "fsdp=8", *asked)[0] == at_peak("--shard", "fsdp=8")[0]
    assert at_peak("--shard", "fsdp=8", "--optimizer", "adamw_torch")[1]["ok"]


def test_times_of_sharded_steps_count_their_collectives(run: Run, tiny: Path, at_peak: Any) -> None:
    for device, said in (("H100", "run at 450 GB/s"), (OWN_DEVICE, "are not in the times")):
        options = ("--shard", "fsdp=8", "--device", device)
        _, found = at_peak(*options)
        text = " ".join(run("plan", tiny, *STEP, *options).out.split())
        assert f"Their collectives {said}" in found["assumed"][0]
        assert ("part of the step" in text) == (device == "H100")
        assert ("without communication" in text) == (device != "H100")
    alone, found = (at_peak("--device", "H100", *asked)[1] for asked in ((), ("--shard", "fsdp=8")))
    assert alone["data_parallel"] is None
    told = found["data_parallel"]
    assert told["collectives"] == 5 + 4 + 5
    sent = 2 * WEIGHTS + 2 * 4 * LAYER + 2 * WEIGHTS
    assert told["sent_bytes"] == round(sent * 7 / 8)
    assert 0 < told["added_ms"] < found["predicted"]["nothing"]["step_ms"]


def test_ddp_shards_nothing_and_holds_a_copy_of_the_gradients(at_peak: Any) -> None:
    whole, _ = at_peak()
    parts, found = at_peak("--shard", "ddp=8")
    assert parts == {**whole, "weights_bytes": 4 * WEIGHTS + BUFFERS, "decides": parts["decides"]}
    assert "one of 8 ranks, which shard nothing. DDP's buckets" in found["assumed"][0]
    trained_bytes = 2 * found["model"]["trained"]
    assert trained_bytes == 2 * WEIGHTS


def on_paper() -> tuple[Profile, Baseline]:
    model = tiny_llama()
    shape = model_structure(model)
    batch = {name: torch.zeros((1, 8), dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    layers = [sum(weight.nbytes for weight in model.model.layers[0].parameters())] * len(shape.layers)
    profile = profile_from_shapes(model, shape, batch, "H200", optimizer_state_bytes=800)
    weights = profile.weight_bytes
    return profile, Baseline(layers[0], weights - sum(layers), weights, weights)


def test_nothing_changes_where_nothing_rests_otherwise() -> None:
    profile, baseline = on_paper()
    assert with_baseline(profile, baseline) == profile


def test_layers_are_gathered_in_passing_beside_the_shards() -> None:
    """Also on one rank: the layer that runs and the one ahead; behind the layers, the last of them."""
    profile, baseline = on_paper()
    layer, outside = baseline.layer_bytes, baseline.other_bytes
    found = with_baseline(profile, replace(baseline, stage=3))
    assert found.weight_bytes == baseline.weight_bytes + outside
    for before, after in zip(profile.op_events, found.op_events, strict=True):
        inside = isinstance(before.call[0], int)
        more = after.forward_base_bytes - before.forward_base_bytes - outside
        assert more == (2 * layer if inside else 0)
        if before.backward_place >= 0:
            gradients = 0 if inside else layer
            assert after.backward_base_bytes - before.backward_base_bytes - outside in (2 * layer, gradients)
    stays = with_baseline(profile, replace(baseline, stage=3, stays=True))
    assert measured_peak_bytes(stays) == measured_peak_bytes(profile) + baseline.weight_bytes


def test_gradients_are_whole_until_they_are_scattered() -> None:
    """When layer 0's backward begins: of what is outside and of layer 1 whole, of layers 2 and 3 shards."""
    profile, baseline = on_paper()
    layer, ranks = baseline.layer_bytes, 8
    sharded = with_baseline(profile, replace(baseline, stage=2, ranks=ranks))
    first = min(
        (op_event.backward_place, number)
        for number, op_event in enumerate(profile.op_events)
        if op_event.call[0] == 0 and op_event.backward_place >= 0
    )[1]
    before = profile.gradient_bytes[first]
    outside = before - 3 * layer
    assert sharded.gradient_bytes[first] == outside + layer + 2 * layer // ranks
    assert sharded.gradient_bytes[-1] == profile.gradient_bytes[-1] // ranks
    assert sharded.optimizer_state_bytes == 100
    assert sharded.outside_ms == profile.outside_ms / ranks
    wide = replace(baseline, stage=3, ranks=ranks, gradient_scale=Fraction(2), summed_as_kept=True)
    summed = with_baseline(profile, wide)  # FSDP2: layer 1's are copied into fp32 to be summed
    assert summed.gradient_bytes[first] == outside + 2 * layer + 2 * 2 * layer // ranks


def test_adapters_alone_are_trained(at_peak: Any) -> None:
    """PEFT adapts q and v of a Llama: r x (32 + 32) and r x (32 + 16) in each of 4 layers, fp32."""
    pytest.importorskip("peft")
    adapters = 4 * 8 * ((32 + 32) + (32 + 16))
    parts, found = at_peak("--lora", "r=8")
    assert found["model"]["trained"] == adapters
    assert found["model"]["parameters"] == WEIGHTS + adapters
    assert parts["weights_bytes"] == 2 * WEIGHTS + BUFFERS + 4 * adapters
    assert parts["states_bytes"] == 2 * 4 * adapters
    assert parts["gradients_bytes"] <= 4 * adapters
    everywhere = at_peak("--lora", "r=8,targets=all-linear,dropout=0.1")[1]["model"]["trained"]
    assert everywhere == 4 * 8 * (2 * 64 + 2 * 48 + 3 * 80)
    assert at_peak("--lora", "r=8,targets=o_proj+up_proj")[1]["model"]["trained"] == 4 * 8 * (64 + 80)


def test_no_warning_of_a_deprecation_inside_of_peft(
    run: Run, tiny: Path, recwarn: pytest.WarningsRecorder
) -> None:
    pytest.importorskip("peft")
    assert run("plan", tiny, *STEP, "--lora", "r=8").code == 0
    assert [str(found.message) for found in recwarn if found.category is FutureWarning] == []


def test_a_quantised_base(at_peak: Any) -> None:
    """Linear layers of n weights: NF4 n / 2 + n / 64 + 4 for each 256 x 64; int8 n + 4 a row.

    NF4 quantised once: n / 2 + 4 for each 64.
    """
    pytest.importorskip("peft")
    adapters = 4 * 4 * 8 * (64 + 48)
    sizes = [(32, 32), (32, 32), (16, 32), (16, 32), (48, 32), (48, 32), (32, 48)]
    four = sum(r * c // 2 + r * c // 64 + 4 * -(-r * c // (64 * 256)) for r, c in sizes)
    eight = sum(r * c + 4 * r for r, c in sizes)
    plain, _ = at_peak("--lora", "r=8")
    single = sum(r * c // 2 + 4 * (r * c // 64) for r, c in sizes)
    for name, linears in (("4bit", four), ("4bit-single", single), ("8bit", eight)):
        parts, found = at_peak("--lora", "r=8", "--quantize", name)
        rest = 2 * (OUTSIDE + 4 * (LAYER - LINEARS)) + BUFFERS + adapters
        assert parts["weights_bytes"] == rest + 4 * linears < plain["weights_bytes"]
        assert found["model"]["quantize"] == name
        assert any("Linear layers of the decoder are stored in" in line for line in found["assumed"])


def test_what_is_not_quantised_is_fp32_after_peft_has_prepared_it(run: Run, at_peak: Any) -> None:
    pytest.importorskip("peft")
    asked = "--lora", "r=8", "--quantize", "4bit"
    plain, _ = at_peak(*asked)
    parts, found = at_peak(*asked, "--prepare-kbit")
    assert parts["weights_bytes"] - plain["weights_bytes"] == 2 * (OUTSIDE + 4 * (LAYER - LINEARS))
    assert found["model"]["prepared_for_kbit"]
    assert any("as prepare_model_for_kbit_training makes them" in line for line in found["assumed"])
    assert run("plan", "model", "--lora", "r=8", "--prepare-kbit").code == 2


def test_a_quantised_weight_is_whole_while_its_module_runs() -> None:
    profile, baseline = on_paper()
    module = (1, "mlp.up_proj")
    changed = with_baseline(profile, replace(baseline, passing={module: 1000}, passing_ms={module: 0.5}))
    for before, after in zip(profile.op_events, changed.op_events, strict=True):
        more = 1000 if before.call[:2] == (1, "mlp.up_proj.linear") else 0
        more_ms = 0.5 if more else 0.0  # dequantised once in forward and once in backward
        assert after.forward_ms - before.forward_ms == pytest.approx(more_ms, abs=1e-9)
        assert after.backward_ms - before.backward_ms == pytest.approx(more_ms, abs=1e-9)
        assert after.forward_base_bytes - before.forward_base_bytes == more
        if before.backward_place >= 0:
            assert after.backward_base_bytes - before.backward_base_bytes == more
    assert changed.op_events != profile.op_events


def test_what_does_not_go_together(run: Run, tiny: Path) -> None:
    for options in (
        ("--quantize", "4bit"),
        ("--lora", "r=8", "--quantize", "4bit", "--tp", "2"),
        ("--lora", "16"),
        ("--lora", "r=0"),
        ("--lora", "r=8,alpha=2"),
        ("--shard", "fsdp"),
        ("--shard", "zero4=8"),
        ("--shard", "fsdp=0"),
        ("--optimizer", "adamw_4bit"),
        ("--profile", "x.json", "--shard", "fsdp=2"),
    ):
        assert run("plan", tiny, *options).code == 2, options
    ended = run("plan", tiny, *STEP, "--lora", "r=8,targets=no_such", "--json")
    assert ended.code == 1
    assert ended.document["problems"][0]["where"] == "--lora"


def test_without_peft(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    (problem,) = run("plan", tiny, *STEP, "--lora", "r=8", "--json").document["problems"]
    assert (problem["where"], problem["hint"]) == ("--lora", "pip install peft")


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_the_model_runs_only_if_it_is_trusted(run: Run, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_CODE)
    config = json.loads((tiny / "config.json").read_text())
    config |= {"model_type": "own_llama", "architectures": ["OwnModel"]}
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rejected = run("plan", tmp_path, *STEP)
    assert rejected.code == 1
    assert re.search(r"--trust-remote-\s*code", rejected.out)
    for name in (tmp_path, tmp_path / "config.json"):
        found = run("plan", name, *STEP, "--trust-remote-code", "--json").document
        assert (found["model"]["family"], found["model"]["parameters"]) == ("own_llama", WEIGHTS)
