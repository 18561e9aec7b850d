"""``plan --longest``: how the length is looked for; what it says fits, and is what `plan` predicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_actswap import apply
from hf_actswap.cli.longest import STREAMED, UNIT_TOKENS, _Lengths, longest_of
from hf_actswap.cli.options import AskedStep, ModelRequest, PlanRequest, Sharding
from hf_actswap.cli.step import StepShape, profile_of
from hf_actswap.cli.subject import subject
from hf_actswap.config import load_config
from hf_actswap.plan import resolve_plan
from hf_actswap.planner import Profile
from hf_actswap.planner.budget import with_fragments
from hf_actswap.stream import ChunkedStep
from tests.stream.streamed_models import SIZES
from tests.stream.test_host_sequence import DeviceMeter

from .conftest import Run

K = UNIT_TOKENS
NAMES = ("tiles, inputs swapped", "inputs swapped", "checkpointing")
GIB = 2**30


@pytest.mark.parametrize("limit", [K, 3 * K + 7, 64 * K, 200 * K + 1, 1_300_000])
def test_a_line_is_met_and_what_is_found_fits(limit: int) -> None:
    def over_bytes(tokens: int) -> int:
        return 5 * (tokens - limit)

    assert longest_of(over_bytes) == limit // K * K


@pytest.mark.parametrize(
    "peak",
    [lambda t: max(7 * t, 11 * t - 400 * K), lambda t: 6 * t + t // 8 % 999, lambda t: max(2000 * K, 9 * t)],
    ids=["a corner", "noise", "level at first"],
)
def test_what_is_found_fits_and_little_more_would(peak: Callable[[int], int]) -> None:
    limit, asked = 3000 * K, []

    def over_bytes(tokens: int) -> int:
        asked.append(tokens)
        return peak(tokens) - limit

    found = longest_of(over_bytes)
    assert peak(found) <= limit < peak(round(found * 1.02) + K)
    assert len(asked) <= 9


def test_nothing_fits() -> None:
    assert longest_of(lambda tokens: tokens + 1) == 0


def beside_fragments(mib: float) -> str:
    """Return a budget in which so many MiB may be allocated: a part of a written one is for fragments."""
    return f"{with_fragments(round(mib * 2**20)) / 2**20:.6f}MiB"


@pytest.mark.slow
def test_the_longest_fits_and_is_the_step_that_plan_predicts(run: Run, tiny: Path, tmp_path: Path) -> None:
    options = ("--device", "H100", "--optimizer", "sgd", "--json")
    asked = ("--longest", "--budget", beside_fragments(64 + 24), "--host-memory-gib", "1")
    found = run("plan", tiny, *asked, *options).document
    assert found["ok"]
    longest = found["longest"]
    streamed = longest["streamed in chunks"]
    assert streamed["tokens"] > longest[NAMES[0]]["tokens"]
    assert streamed["peak_bytes"] <= found["allocatable_bytes"] < streamed["peak_bytes"] + K * 32
    assert streamed["ends"] == "device"
    assert load_config(streamed["config"]).stream_config.tokens == "auto"
    tiled, swapped, checkpointed = (longest[name] for name in NAMES)
    assert tiled["tokens"] > swapped["tokens"] > checkpointed["tokens"] > 0
    assert all(item["peak_bytes"] <= found["allocatable_bytes"] for item in longest.values())
    assert with_fragments(found["allocatable_bytes"]) == pytest.approx(found["budget_bytes"], abs=2)
    assert checkpointed["host_bytes"] == 0 < swapped["host_bytes"]
    # The layers' inputs: four hidden states of bf16, and that of the norm after them is none of them.
    assert tiled["host_bytes"] == 4 * tiled["tokens"] * 32 * 2
    config = tmp_path / "longest.yaml"
    config.write_text(found["config"])
    step = run("plan", tiny, config, "--seq", str(tiled["tokens"]), *options).document
    assert step["predicted"]["as written"]["peak_bytes"] == tiled["peak_bytes"]


@pytest.mark.slow
def test_host_memory_limits_it(run: Run, tiny: Path) -> None:
    options = ("--longest", "--device", "H100", "--optimizer", "sgd", "--host-memory-gib", "0.002", "--json")
    found = run("plan", tiny, *options, "--budget", beside_fragments(64 + 24)).document["longest"]
    limit = int(0.9 * 0.002 * GIB)
    longest = found["inputs swapped"]["tokens"]
    assert found["inputs swapped"]["ends"] == "host"
    assert found["streamed in chunks"]["tokens"] == 0
    assert found["inputs swapped"]["host_bytes"] <= limit < 4 * (longest + K) * 32 * 2


def test_it_is_shown(run: Run, tiny: Path, tmp_path: Path) -> None:
    """Host memory ends one line, and is too small for another."""
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}), encoding="utf-8")
    options = ("--longest", "--device", "H100", "--optimizer", "sgd", "--budget", "88MiB")
    shown = run("plan", tmp_path, *options, "--host-memory-gib", "0.0005").out
    rows = shown.splitlines()
    lines = {name: next(row for row in rows if row.startswith(name)) for name in (*NAMES, STREAMED)}
    assert lines["inputs swapped"].endswith("host")
    assert lines["checkpointing"].endswith("device")
    assert " 0 " in lines[STREAMED]
    assert f"0 tokens: not even {K:,} fit" in shown


@pytest.mark.slow
def test_layers_are_kept_in_the_device_memory_that_is_left(run: Run, tiny: Path) -> None:
    options = ("--longest", "--device", "H100", "--optimizer", "sgd", "--host-memory-gib", "0.05", "--json")
    found = []
    for budget, recomputed in ((64 + 24.5, (3,)), (64 + 40, (2,))):
        asked = ("--budget", beside_fragments(budget))
        found.append(run("plan", tiny, *asked, *options).document["longest"][STREAMED])
        assert load_config(found[-1]["config"]).recompute_config.recompute == recomputed
        assert found[-1]["peak_bytes"] <= budget * 2**20
    assert found[0]["ends"] == found[1]["ends"] == "host"
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[0]["step_ms"] > found[1]["step_ms"]


@contextmanager
def streamed_step(
    folder: Path,
    sizes: dict[str, Any],
    tokens: int | str = "auto",
    device: str = "H100",
    recompute: Any = False,
) -> Iterator[ChunkedStep]:
    LlamaConfig(**sizes, dtype="bfloat16").save_pretrained(folder)
    chunks = {"stream_config": {"tokens": tokens}, "tile_config": {"loss": "auto"}}
    config = load_config({**chunks, "recompute_config": {"recompute": recompute}})
    with subject(ModelRequest(str(folder)), config) as found:
        shape = StepShape(1, 1, device, None, "sgd")
        plan = resolve_plan(config, found.shape)

        def profile(length: int) -> Profile:
            return profile_of(found, replace(shape, tokens=length), plan.tiles, workspaces=False)

        yield ChunkedStep(found.model, found.shape, plan, device, profile)


@pytest.mark.parametrize(
    ("intermediate", "recompute"),
    [(64, False), (224, False), (224, [1]), pytest.param(64, [0], marks=pytest.mark.slow)],
)
def test_the_peak_of_a_streamed_step_is_the_counted_one(
    intermediate: int, recompute: Any, tmp_path: Path
) -> None:
    length, sizes = 1024, {**SIZES, "hidden_size": 64, "intermediate_size": intermediate}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).train()
    ids = torch.randint(3, 100, (1, length))
    chunks = {"stream_config": {"tokens": 256}, "tile_config": {"loss": "auto"}}
    config = {**chunks, "recompute_config": {"recompute": recompute}}
    with apply(model, config) as applied, DeviceMeter(model) as meter:
        for _ in range(2):
            model.zero_grad()
            meter.peak_bytes = 0
            model(input_ids=ids, labels=ids.clone()).loss.backward()
        on_host = applied.stats().host_peak_bytes
    counted = meter.peak_bytes + sum(item.nbytes for item in model.parameters())
    with streamed_step(tmp_path, sizes, 256, recompute=recompute) as step:
        predicted = step.predicted(length)
        assert predicted.host_bytes == on_host
        assert 0.98 * counted < predicted.peak_bytes < 1.1 * counted
        assert step.longest(predicted.peak_bytes, on_host) == length
        assert step.longest(predicted.peak_bytes, 10**12) == length
        assert step.longest(10**12, on_host) == length
        assert step.longest(predicted.peak_bytes, on_host // 8) == 0, "a chunk, and no more, is not streamed"


def test_a_sequence_of_one_chunk_is_predicted_as_the_whole_step_that_it_is(tmp_path: Path) -> None:
    """No gradient sums in fp32, and no chunk longer than it."""
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 224}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).train()
    ids = torch.randint(3, 100, (1, 128))
    config = {"stream_config": {"tokens": 256}, "tile_config": {"loss": "auto"}}
    with apply(model, config), DeviceMeter(model) as meter:
        for _ in range(2):
            model.zero_grad()
            meter.peak_bytes = 0
            model(input_ids=ids, labels=ids.clone()).loss.backward()
    counted = meter.peak_bytes + sum(item.nbytes for item in model.parameters())
    with streamed_step(tmp_path, sizes, 256) as step:
        assert 0.98 * counted < step.predicted(128).peak_bytes < 1.1 * counted
        assert step.predicted(257).peak_bytes > 1.5 * counted


@pytest.mark.parametrize("key_heads", [32, 8])
def test_from_the_chunk_length_of_auto_on_no_copy_is_late_on_paper(key_heads: int, tmp_path: Path) -> None:
    """The attention of Llama-3-8B and of Llama-2-7B."""
    sizes = {**SIZES, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": key_heads}
    stalls_ms = {}
    for tokens in (512, "auto"):
        with streamed_step(tmp_path, sizes, tokens, "H200") as step:
            predicted = step.predicted(512 * K)
            stalls_ms[tokens] = predicted.forward_stall_ms + predicted.backward_stall_ms
    assert stalls_ms["auto"] == 0 < stalls_ms[512]


def test_a_streamed_sequence_needs_to_be_told_how_much_host_memory_there_is(tiny: Path) -> None:
    sharded = AskedStep(sharding=Sharding("fsdp", 2))
    asked = PlanRequest(ModelRequest(str(tiny)), None, sharded, None, None, None, (), None, False, False)
    with subject(asked.model, load_config(None)) as found:
        reasons = [*_Lengths(found, asked, load_config(None)).not_streamed()]
    assert [reason.partition(" ")[0] for reason in reasons] == ["how", "weights"]


def test_what_it_does_not_go_with(run: Run, tiny: Path) -> None:
    for more in (("--seq", "4k"), ("--batch", "2"), ("--full",), ("--compare", "tp=1,2")):
        ended = run("plan", tiny, "--longest", *more)
        assert ended.code == 2
        assert "--longest" in ended.err
