"""One deterministic mode for all benchmarks and all tests on an accelerator; and the comparison of bits."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from benchmarks import SETTINGS
from benchmarks.exactness import deterministic, differing, fingerprint, fingerprints, useless
from tests.quick_cases import quick_first

Mode = tuple[bool, bool, bool]


def mode() -> Mode:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def set_mode(enabled: bool, warns: bool, fills: bool) -> None:
    torch.use_deterministic_algorithms(enabled, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize("before", [(False, False, True), (True, True, False), (True, False, True)])
@pytest.mark.parametrize("fill", [True, False])
def test_it_is_strict_and_what_was_set_before_is_set_again(fill: bool, before: Mode) -> None:
    at_first, inside = mode(), None
    set_mode(*before)
    try:
        with suppress(ValueError), deterministic(fill):
            inside = mode()
            raise ValueError
        assert (inside, mode()) == ((True, False, fill), before)
    finally:
        set_mode(*at_first)


def test_nobody_else_sets_the_mode(repository: Path) -> None:
    files = [path for part in ("benchmarks", "tests") for path in (repository / part).rglob("*.py")]
    found = {path.name for path in files if "use_deterministic_algorithms(" in path.read_text("utf-8")}
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


def test_fingerprint_sees_a_flipped_bit_a_swap_and_a_sign_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, dtype=torch.bfloat16)
    values[7] = 0.0
    flipped, swapped, signed = values.clone(), values.clone(), values.clone()
    flipped.view(torch.int16)[500] ^= 1
    swapped[[3, 4]] = swapped[[4, 3]]
    signed[7] = -0.0
    whole = fingerprint(values)
    assert whole not in [fingerprint(other) for other in (flipped, swapped, signed)]
    assert fingerprint(values.clone().reshape(10, 100)) == whole
    monkeypatch.setattr("benchmarks.exactness._ELEMENTS_AT_ONCE", 64)
    assert fingerprint(values) == whole


def test_what_differs_on_either_side_or_proves_nothing_is_named() -> None:
    one = fingerprints({"a": torch.ones(3), "b": torch.ones(3)})
    other = fingerprints({"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(3)})
    assert (differing(one, other), differing(one, one)) == (["b", "c"], [])
    values = {"zeros": torch.zeros(2), "nan": torch.tensor([1.0, torch.nan]), "good": torch.ones(2)}
    assert useless(values) == ["zeros", "nan"]
