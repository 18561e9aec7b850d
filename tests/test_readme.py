"""The README does what it says: its Python runs, its YAML loads, its text is what the program prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import hf_actswap
from hf_actswap.report import plan_table


def blocks(repository: Path, language: str) -> list[str]:
    text = (repository / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def small_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    )


def test_the_python_runs_in_order_and_prints_what_it_says(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    snippets = blocks(repository, "python")
    assert len(snippets) == 3
    for snippet in snippets:
        capsys.readouterr()
        exec(compile(snippet, "README.md", "exec"), names)
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
    text, *others = blocks(repository, "yaml")
    assert all(hf_actswap.load_config(other) for other in others)
    (shown,) = blocks(repository, "text")
    plan = hf_actswap.resolve_plan(hf_actswap.load_config(text), hf_actswap.outline(small_llama()))
    lines = [f"INFO - {line}" for line in plan.log_lines() if line.startswith("Set ")]
    assert shown.rstrip() == "\n".join([*lines, "", plan_table(plan)])


def test_the_files_it_links_to_exist(repository: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (repository / "README.md").read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (repository / link).exists()] == []


def test_the_commands_it_names_are_make_targets(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\w+)", "\n".join(blocks(repository, "sh")), flags=re.MULTILINE)
    assert targets
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)
