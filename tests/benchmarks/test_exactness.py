"""One deterministic mode for all benchmarks and all tests on an accelerator; and the comparison of bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import SETTINGS
from benchmarks.exactness import deterministic
from tests.quick_cases import quick_first

Mode = tuple[bool, bool, bool]


def mode() -> Mode:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize("fill", [True, False])
def test_it_is_strict(fill: bool) -> None:
    with deterministic(fill):
        assert mode() == (True, False, fill)


@pytest.mark.parametrize("before", [(False, False, True), (True, True, False), (True, False, True)])
def test_what_was_set_before_is_set_again(before: Mode) -> None:
    at_first = mode()
    try:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]
        with pytest.raises(ValueError, match="inside"), deterministic():
            raise ValueError("inside")
        assert mode() == before
    finally:
        torch.use_deterministic_algorithms(at_first[0], warn_only=at_first[1])
        torch.utils.deterministic.fill_uninitialized_memory = at_first[2]


def test_nobody_else_sets_the_mode(repository: Path) -> None:
    calls = re.compile(r"use_deterministic_algorithms\(")
    files = [path for part in ("benchmarks", "tests") for path in (repository / part).rglob("*.py")]
    found = {path.name for path in files if calls.search(path.read_text(encoding="utf-8"))}
    assert found == {"exactness.py", Path(__file__).name}


@pytest.mark.parametrize("command", quick_first(["overhead", "gpu_day"], 1))
def test_settings_are_there_before_torch_is(command: str, repository: Path) -> None:
    """As a script and as a module: PyTorch reads them once."""
    script = (
        "import builtins, os, runpy, sys\n"
        "load = builtins.__import__\n"
        "def watched(name, *rest, **more):\n"
        "    if name == 'torch' and 'torch' not in sys.modules:\n"
        f"        print(all(os.environ.get(name) == value for name, value in {SETTINGS!r}.items()))\n"
        "    return load(name, *rest, **more)\n"
        "builtins.__import__ = watched\n"
        f"runpy.run_path({str(repository / 'benchmarks' / command)!r} + '.py', run_name='looked_at')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[:1] == ["True"], done.stderr
