"""The pages under docs/migration do what they say: their Python runs, their YAML loads, names are ours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from hf_actswap import load_config, model_structure
from hf_actswap.config.keys import FOREIGN_PARALLEL_KEYS, PARALLEL_KEYS
from hf_actswap.plan.rules import LayerNames
from tests.docs.pages import DOCS, ROOT, blocks, script, text_of
from tests.engine.tiny_models import tiny_llama

PAGES = sorted((DOCS / "migration").glob("*.md"))
LAYERS, WIDTH = 2, 64
SEEDS = ROOT.parent / "shared" / "seeds"


def run(page: Path, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Run the page's Python in order; what its comments promise must be what it prints."""
    for snippet in blocks(page, "python"):
        capsys.readouterr()
        exec(compile(snippet, page.name, "exec"), names)
        printed = capsys.readouterr().out.rstrip("\n")
        promised = re.findall(r"^# ?(.*)$", snippet, flags=re.MULTILINE)
        assert printed.splitlines() == promised


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    with suppress(Exception):
        dist.destroy_process_group()


def test_there_is_a_page_for_each() -> None:
    assert [page.stem for page in PAGES] == ["flags", "mindformers", "mindspeed", "nxd", "trl"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_yaml_loads(page: Path) -> None:
    for document in blocks(page, "yaml"):
        assert load_config(document) != load_config(None)


def test_mindformers(capsys: pytest.CaptureFixture[str]) -> None:
    run(DOCS / "migration" / "mindformers.md", {}, capsys)


def test_mindspeed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(DOCS / "migration" / "mindspeed.md", {}, capsys)


def test_nxd(capsys: pytest.CaptureFixture[str], one_process: None) -> None:
    run(DOCS / "migration" / "nxd.md", {}, capsys)


@pytest.mark.slow  # TRL takes most of it to import
def test_trl(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    names = stand_ins()
    (snippet,) = blocks(DOCS / "migration" / "trl.md", "python")
    exec(compile(snippet, "trl.md", "exec"), names)
    entries = [entry for entry in names["trainer"].state.log_history if "loss" in entry]
    assert len(entries) == 2
    # Of each layer its input alone: fp32, 64 wide, a row for each token of the step.
    moved = [entry["actswap_offloaded_gib"] for entry in entries]
    assert moved == [LAYERS * 4 * WIDTH * entries[0]["num_tokens"] / 2**30] * 2


def stand_ins() -> dict[str, Any]:
    """A model, a data set and a tokenizer by the names that the page gives them."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = script("../examples/sft_lora").byte_tokenizer()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
    )
    data = Dataset.from_list([{"prompt": "What is kept?", "completion": " What is needed at once."}] * 16)
    return {"model": model, "data": data, "tokenizer": tokenizer}


def test_the_op_names_are_those_of_the_table() -> None:
    section = text_of(DOCS / "migration" / "mindformers.md").partition("## Op names")[2]
    rows = re.findall(r"^\| `([^`]+)` \| (`.+`) \|$", section, re.MULTILINE)
    assert len(rows) > 10
    names = LayerNames(model_structure(tiny_llama()).layers[0]).reference
    for reference, ours in rows:
        assert tuple(re.findall(r"`([^`]+)`", ours)) == names[reference]


def test_the_parallel_names_are_read() -> None:
    page = text_of(DOCS / "migration" / "mindformers.md")
    for name in ("model_parallel", "use_seq_parallel"):
        assert f"`{name}`" in page
        assert name in PARALLEL_KEYS
        assert name not in FOREIGN_PARALLEL_KEYS


def test_each_module_that_nxds_table_names_is_there() -> None:
    import importlib

    page = text_of(DOCS / "migration" / "nxd.md")
    rows = re.findall(r"^\| `([\w.]+)[^|]* \| `(hf_actswap[\w.]+)`([^|]*)", page, re.MULTILINE)
    assert len(rows) >= 8
    for theirs, module, more in rows:
        names = re.findall(r"`(\w+)`", more) or [theirs.rpartition(".")[2]]
        parent, _, last = module.rpartition(".")
        found: ModuleType = importlib.import_module(parent if last in names else module)
        if names != ["mappings"]:
            assert [name for name in names if not hasattr(found, name)] == []


def test_the_examples_are_those_of_the_documents() -> None:
    if not SEEDS.is_dir():
        pytest.skip("the documents of the references are not beside the checkout")
    page = text_of(DOCS / "migration" / "mindformers.md")
    guide = text_of(SEEDS / "mindformers_fine_grained_activations_swap.txt")
    (config,) = re.findall(r'load_config\("""\n(.*?)"""\)', page, re.DOTALL)
    assert f"```yaml\n{config}```" in guide
    lines = re.findall(r"^# (Set .*)$", page, re.MULTILINE)
    assert lines
    assert all(f"-INFO - {line}\n" in guide for line in lines)
    code = text_of(DOCS / "migration" / "nxd.md")
    guide = text_of(SEEDS / "nxd_activation_memory_reduction.txt")
    attention = re.findall(r"self\.\w+ = (?:Column|Row|layer_norm).*?^ +\)$", code, re.DOTALL | re.MULTILINE)
    assert len(attention) == 4
    compact = "".join(guide.split())
    assert all("".join(call.split()) in compact for call in attention)
