"""``check`` says what loading, resolving and the engine itself would say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_actswap import apply, load_config, model_structure, resolve_plan

from .conftest import Run

Write = Callable[[str], Path]

GOOD = """
swap_config:
  swap: true
  op_swap:
    - {op_name: attention, backward_prefetch: 20, layers: true}
    - {op_name: feed_forward, backward_prefetch: 15, layers: [1, 2]}
recompute_config:
  select_recompute: {feed_forward: [0, 2]}
"""


def test_every_problem_of_the_document_and_of_the_model_name(run: Run, write: Write) -> None:
    config = write("swap_config: {swap: perhaps}\nrecompute_config: {select_recompte: true}\n")
    ended = run("check", config, "--model", "no/such/folder", "--json")
    assert ended.code == 1
    assert [problem["where"] for problem in ended.document["problems"]] == [
        "swap_config.swap",
        "recompute_config.select_recompte",
        "model",
    ]
    assert ended.document["problems"][1]["hint"] == "Did you mean 'select_recompute'?"


def test_every_problem_of_the_plan(run: Run, write: Write, tiny: Path) -> None:
    config = write(GOOD.replace("attention", "atention").replace("[1, 2]", "[1, 9]"))
    ended = run("check", config, "-m", tiny)
    assert ended.code == 1
    assert "2 problems:" in ended.out
    assert "found 9" in ended.out
    assert "Did you\n    mean 'attention'?" in ended.out or "Did you mean 'attention'?" in ended.out


def test_a_streamed_sequence(run: Run, write: Write, tiny: Path) -> None:
    config = write("stream_config: {tokens: 512}\n")
    ended = run("check", config, "-m", tiny, "--seq", "2048")
    assert ended.code == 0
    assert "chunks of 512 tokens" in ended.out
    assert "of a streamed sequence are not predicted" in ended.out
    ended = run("plan", tiny, config, "--device", "cpu", "--json")
    assert ended.code == 1
    assert [problem["where"] for problem in ended.document["problems"]] == ["stream_config.tokens"]
    settings = json.loads((tiny / "config.json").read_text())
    other = config.parent / "dropout"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**settings, "attention_dropout": 0.1}))
    ended = run("check", config, "-m", other, "--json")
    assert "config.attention_dropout 0" in ended.document["problems"][0]["expected"]


def test_the_plan_is_that_of_resolve_plan(run: Run, write: Write, tiny: Path) -> None:
    config = write(GOOD)
    ended = run("check", config, "--model", tiny / "config.json", "--json")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny))
    plan = resolve_plan(load_config(config), model_structure(model))
    found = ended.document
    assert ended.code == 0
    assert [(row["scope"], row["op_path"], row["fate"]) for row in found["rows"]] == [
        (row.scope, row.op_path, row.fate) for row in plan.rows
    ]
    assert (
        [item["reason"] for item in found["adjustments"]] == [item.reason for item in plan.adjustments] != []
    )
    assert {
        requested["op_name"]: requested["targets"]
        for requested in found["names"]
        if requested["asked"] == "swap"
    } == {
        "attention": {"self_attn": [0, 1, 2, 3]},
        "feed_forward": {"mlp": [1, 2]},
    }


PLAIN = ("--autocast", "none", "--json")


def test_bytes_are_those_that_the_engine_moves(run: Run, write: Write, tiny: Path) -> None:
    """On a real step of the same shape, on the CPU."""
    config = write(GOOD)
    ended = run("check", config, "-m", tiny, "--seq", "24", "--batch", "2", "--dtype", "fp32", *PLAIN)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny), dtype=torch.float32).train()
    ids = torch.ones(2, 24, dtype=torch.long)
    with apply(model, str(config)) as applied:
        model(input_ids=ids, labels=ids).loss.backward()
        moved_bytes = applied.stats().offloaded_bytes
    predicted = ended.document["predicted"]
    assert predicted["as written"]["swapped_bytes"] == moved_bytes > 0
    assert predicted["nothing"]["swapped_bytes"] == 0
    peaks = {name: step["peak_bytes"] for name, step in predicted.items()}
    assert peaks["recompute all"] < peaks["as written"] < peaks["nothing"]


def test_strict_counts_what_gave_way(run: Run, write: Write, tiny: Path) -> None:
    config = write(GOOD)
    assert run("check", config, "-m", tiny).code == 0
    strict = run("check", config, "-m", tiny, "--strict", "--json")
    assert (strict.code, strict.document["ok"], strict.document["problems"]) == (1, False, [])
    config = write("swap_config: {swap: true}\nrecompute_config: {select_recompute: {mlp.mul: true}}\n")
    ended = run("check", config, "-m", tiny, "--strict", "--json")
    assert ended.code == 0
    assert ended.document["warnings"]  # MindFormers has one, though nothing gave way


def test_text_fits_into_80_columns(run: Run, write: Write, tiny: Path) -> None:
    ended = run("check", write(GOOD), "-m", tiny, "--seq", "32")
    assert ended.code == 0
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "\x1b" not in ended.out
    for part in ("Plan", "Names", "Requests that were changed", "Predicted step", "No problems."):
        assert part in ended.out


def test_a_model_in_parts(run: Run, write: Write, tiny: Path) -> None:
    """A rank of two swaps half of what one alone does, and communication has names."""
    config = write(
        "swap_config: {swap: true, op_swap: [{op_name: attention.flash_attention, "
        "backward_prefetch: 5, layers: true}]}\nparallel_config: {sequence_parallel_enabled: true}\n"
    )
    of = {
        tp: run("check", config, "-m", tiny, "--seq", "32", "--tp", tp, "--json").document
        for tp in ("1", "2")
    }
    assert [of[tp]["ok"] for tp in of] == [True, True]
    swapped = {tp: found["predicted"]["as written"]["swapped_bytes"] for tp, found in of.items()}
    assert swapped["1"] == 2 * swapped["2"] > 0
    assert of["1"]["adjustments"] != of["2"]["adjustments"]  # sequence parallelism has an effect
    rejected = run("check", config, "-m", tiny, "--tp", "3", "--json")
    assert rejected.code == 1
    assert any("num_attention_heads" in problem["expected"] for problem in rejected.document["problems"])


def test_no_group_is_left_behind(run: Run, write: Write, tiny: Path) -> None:
    config = write("{}")
    for _ in range(2):
        assert run("check", config, "-m", tiny, "--tp", "2").code == 0
    assert not torch.distributed.is_initialized()


def test_models_that_are_none(run: Run, write: Write, tiny: Path, tmp_path: Path) -> None:
    config = write("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bert.json").write_text('{"model_type": "t5"}')
    (tmp_path / "broken.json").write_text("{")
    for name in ("empty", "bert.json", "broken.json"):
        ended = run("check", config, "-m", tmp_path / name, "--json")
        assert ended.code == 1
        assert [problem["where"] for problem in ended.document["problems"]] == ["model"]
        assert "\n" not in ended.document["problems"][0]["found"]
    offline = run("check", config, "-m", "org/name", "--json").document["problems"]
    assert len(offline) == 1
    assert "HF_HUB_OFFLINE" in offline[0]["found"]


def test_an_unknown_device_is_named(run: Run, write: Write, tiny: Path) -> None:
    ended = run("check", write("{}"), "-m", tiny, "--seq", "8", "--device", "H300")
    assert ended.code == 2
    assert "'H300' is none of H200" in ended.err


def test_wrong_usage_is_2(run: Run, tiny: Path) -> None:
    assert run("check").code == 2
    assert run("check", "x.yaml", "-m", tiny, "--seq", "0").code == 2
    assert run("nonsense").code == 2


WIDE = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 1000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 3,
}


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_poor_deal_is_said_and_the_better_one_shown(
    run: Run, write: Write, tmp_path: Path, command: str
) -> None:
    pytest.importorskip("scipy")
    model, config = tmp_path / "wide.json", write("swap_config: {swap: true}\n")
    model.write_text(json.dumps(WIDE))
    words = ("check", config, "-m", model) if command == "check" else ("plan", model, config)
    found = run(*words, "--seq", "4096", "--device", "H200", "--json").document["predicted"]
    nothing, written, better = (found[name] for name in ("nothing", "as written", "better"))
    assert better["peak_bytes"] <= written["peak_bytes"] < nothing["peak_bytes"]
    assert better["step_ms"] - nothing["step_ms"] < 0.5 * (written["step_ms"] - nothing["step_ms"])
    text = " ".join(run(*words, "--seq", "4096", "--device", "H200").out.split())
    named = re.search(r"! Costly: .* `memory: {mode: adaptive, budget_gib: ([\d.]+)}", text)
    assert named is not None, text
    asked = write(f"memory: {{mode: adaptive, budget_gib: {named[1]}}}\n")
    again = run("check", asked, "-m", model, "--seq", "4096", "--device", "H200", "--json").document
    planned = again["predicted"]["planned (adaptive)"]
    assert planned["step_ms"] < written["step_ms"]
    assert planned["peak_bytes"] <= float(named[1]) * 2**30


def test_mistakes_of_the_file_and_of_the_model_at_once(run: Run, write: Write, tiny: Path) -> None:
    config = write(
        "swap_config: {swap: true, op_swap: [{op_name: atention, backward_prefetch: 0, layers: [9]}]}\n"
    )
    ended = run("check", config, "-m", tiny, "--json")
    rule = "swap_config.op_swap[0]"
    wheres = [problem["where"] for problem in ended.document["problems"]]
    assert wheres == [f"{rule}.backward_prefetch", f"{rule}.layers", f"{rule}.op_name"]


def test_what_costs_next_to_nothing_is_no_poor_deal(run: Run, write: Write, tmp_path: Path) -> None:
    model = tmp_path / "wide.json"
    model.write_text(json.dumps(WIDE))
    config = write("recompute_config: {select_recompute: {mlp.mul: true}}\n")
    found = run("check", config, "-m", model, "--seq", "4096", "--device", "H200")
    assert "as written" in found.out
    assert "Costly" not in found.out
