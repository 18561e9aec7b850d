"""Configurations of tiny models, and the commands as functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_actswap.cli.app import app

TINY = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
}


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What it wrote with ``--json``."""
        return json.loads(self.out)


Run = Callable[..., Ended]


@pytest.fixture(scope="session")
def run() -> Run:
    """Run a command in this process."""

    def invoked(*words: str | Path) -> Ended:
        result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ended(result.exit_code, result.stdout, result.stderr)

    return invoked


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model of four layers, without weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a configuration; return its path."""

    def written(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return written
