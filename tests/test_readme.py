"""README.md and docs/using.md hold: their Python runs, their YAML loads, their text is what is printed."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import hf_actswap
from hf_actswap.report import plan_table
from tests.docs.pages import script

README, USING = "README.md", "docs/using.md"


def blocks(repository: Path, page: str, language: str) -> list[str]:
    text = (repository / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def small_llama(layers: int = 4) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=layers)
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"word": 0, "<unk>": 1, "<eos>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")


@pytest.mark.essential
def test_the_first_example_trains_and_says_what_it_saved(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["word " * 200, "too short", "word " * 300]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, split: rows)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name, dtype: small_llama())
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: word_tokenizer())
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "hf_actswap")
    (example,) = blocks(repository, README, "python")
    # What a CPU needs beside what the page says: fewer steps, no accelerator.
    example = example.replace("max_steps=100", "max_steps=8, use_cpu=True, disable_tqdm=True")
    names: dict[str, Any] = {}
    exec(compile(example, README, "exec"), names)
    assert names["args"].actswap == "auto"
    last = caplog.records[-1].getMessage()
    assert last.startswith("Peak memory ")
    assert "without a plan" in last


def test_the_yaml_of_the_readme_suits_a_model_of_32_layers(repository: Path) -> None:
    (text,) = blocks(repository, README, "yaml")
    plan = hf_actswap.resolve_plan(hf_actswap.load_config(text), hf_actswap.model_structure(small_llama(32)))
    assert plan.adjustments == ()
    assert {plan.fate(layer, "self_attn.flash_attention") for layer in range(32)} == {"swap"}
    for path in ("input_layernorm.mul", "post_attention_layernorm.mul", "mlp.act_fn.silu", "mlp.mul"):
        assert {plan.fate(layer, path) for layer in range(32)} == {"recompute"}
    assert plan.fate(31, "mlp.up_proj.linear") == "keep"


def test_the_yaml_of_the_readme_warns_of_nothing(repository: Path, caplog: pytest.LogCaptureFixture) -> None:
    (text,) = blocks(repository, README, "yaml")
    hf_actswap.apply(small_llama(), text).remove()
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_the_python_runs_in_order_and_prints_what_it_says(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    snippets = blocks(repository, USING, "python")
    assert len(snippets) == 3
    for snippet in snippets:
        capsys.readouterr()
        exec(compile(snippet, USING, "exec"), names)
        printed = capsys.readouterr().out
        promised = re.findall(r"^# ?(.*)$", snippet, flags=re.MULTILINE)
        if promised:
            assert printed.splitlines() == promised
        else:
            assert printed.strip()
    plan = names["plan"]
    for layer, path, fate in re.findall(r"plan\.fate\((\d), \"(.*?)\"\)  # '(\w+)'", snippets[1]):
        assert plan.fate(int(layer), path) == fate


def test_the_yaml_prints_the_shown_lines_and_table(repository: Path) -> None:
    text, *others = blocks(repository, USING, "yaml")
    assert all(hf_actswap.load_config(other) for other in others)
    (shown,) = blocks(repository, USING, "text")
    plan = hf_actswap.resolve_plan(hf_actswap.load_config(text), hf_actswap.model_structure(small_llama()))
    lines = [f"INFO - {line}" for line in plan.log_lines() if line.startswith("Set ")]
    assert shown.rstrip() == "\n".join([*lines, "", plan_table(plan)])


def test_the_readme_is_short(repository: Path) -> None:
    assert len((repository / README).read_text(encoding="utf-8").splitlines()) < 160


@pytest.mark.slow
def test_the_first_table_is_what_the_planner_predicts(repository: Path) -> None:
    why = script("make_why")
    text = (repository / README).read_text(encoding="utf-8")
    assert why.table([why.Paper(workload) for workload in why.WORKLOADS]) in text, (
        "run: python docs/make_why.py"
    )


def test_the_commands_it_names_are_make_targets(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\w+)", "\n".join(blocks(repository, README, "sh")), flags=re.MULTILINE)
    assert targets
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)
