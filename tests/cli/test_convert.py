"""`hf-actswap convert`: a configuration from the flags or settings of another program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_actswap import load_config
from tests.docs.pages import DOCS, script, text_of

from .conftest import Run

OUTPUTS, PAGE = script("make_outputs"), DOCS / "migration" / "flags.md"
SCRIPT = """\
N=3
python pretrain.py --recompute-granularity full --recompute-method block \\
  --recompute-num-layers $N --swap-everything
"""


def test_the_page_shows_what_is_printed() -> None:
    ((command, output),) = OUTPUTS.commands(text_of(PAGE))
    assert OUTPUTS.output_of(command) == output


def test_a_script_becomes_a_file(run: Run, tmp_path: Path) -> None:
    source, made = tmp_path / "train.sh", tmp_path / "actswap.yaml"
    source.write_text(SCRIPT)
    result = run("convert", source, "--out", made)
    assert result.code == 0
    assert "Written" in result.out
    assert load_config(made).recompute_config.recompute == (3,)
    assert "# Not converted: --swap-everything is not known here." in made.read_text()


def test_json(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    source.write_text(
        json.dumps({"activation_checkpointing": {"number_checkpoints": 4}, "bf16": {"on": True}})
    )
    found = run("convert", source, "--json").document
    assert found["ok"]
    assert found["config"] == {"recompute_config": {"recompute": True}}
    assert [line.partition(":")[0] for line in found["not_converted"]] == [
        "activation_checkpointing.number_checkpoints"
    ]
    assert found["other_flags"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--tensor-model-parallel-size", "$TP"], "expected a whole number"),
        (["--", "--adaptive-memory-optimization", "--recompute-granularity", "full"], "beside adaptive"),
        (["missing.sh"], "a file that can be read"),
        (["pretrain.py", "x"], "Write -- before the flags"),
    ],
)
def test_errors_are_named(run: Run, words: list[str], message: str) -> None:
    result = run("convert", *words)
    assert result.code == 1
    assert message in " ".join(result.out.split())


def test_a_file_that_is_not_what_its_name_says(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "ds.json"
    source.write_text('{"a": }')
    result = run("convert", source)
    assert result.code == 1
    assert "expected valid JSON" in " ".join(result.out.split())


def test_words_after_the_dashes_are_not_split_again(run: Run) -> None:
    words = ["--gradient_checkpointing_kwargs", '{"use_reentrant": true}', "--name", "a --swap-attention"]
    found = run("convert", "--json", "--", *words).document
    assert found["config"] == {}
    assert [line.partition(":")[0] for line in found["not_converted"]] == [
        "gradient_checkpointing_kwargs.use_reentrant"
    ]


def test_nothing_about_memory(run: Run) -> None:
    result = run("convert", "--", "--lr", "1e-4")
    assert result.code == 0
    assert "Nothing here sets" in result.out
