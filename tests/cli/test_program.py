"""The program as a shell starts it: its name, its streams, its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from hf_actswap.cli import plan_answer as plan_command
from hf_actswap.version import __version__

from .conftest import Run

Write = Callable[[str], Path]


def test_the_entry_point_runs_the_app(repository: Path) -> None:
    scripts = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["hf-actswap"].partition(":")
    assert getattr(import_module(module), name) is import_module("hf_actswap.cli.__main__").main


def test_started_by_a_shell(repository: Path, write: Write, tiny: Path) -> None:
    """One process for all that only a process shows: stdout is the document, the rest is stderr."""
    words = [
        sys.executable,
        "-m",
        "hf_actswap.cli",
        "check",
        str(write("{swap_config: {swap: 1}}")),
        "-m",
        str(tiny),
    ]
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*words, "--json"], env=environment, capture_output=True, text=True, timeout=200, cwd=tiny
    )
    assert ended.returncode == 1
    document = json.loads(ended.stdout)
    assert (document["command"], document["ok"]) == ("check", False)
    assert document["problems"][0]["where"] == "swap_config.swap"


def test_help_names_the_commands_and_exit_codes(run: Run) -> None:
    text = run("--help").out
    for word in ("check", "explain", "plan", "env", "push", "Exit codes"):
        assert word in text
    assert run("--version").out.strip() == __version__


def test_what_compiled_code_prints_is_no_answer(
    run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def noisy(*_: object, **_settings: object) -> None:
        os.write(1, b"from compiled code\n")
        print("from Python")
        raise AssertionError

    monkeypatch.setattr(plan_command, "planned", noisy)
    capfd.readouterr()
    with pytest.raises(AssertionError):
        run("plan", tiny, "--json")
    out, err = capfd.readouterr()
    assert "compiled" not in out
    assert "from compiled code" in err
