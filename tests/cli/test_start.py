"""Help needs no torch: commands are imported when they run, the package's names when they are asked for."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import hf_actswap
import hf_actswap.apply  # binds a module to the verb's name in any other package
from hf_actswap.cli.app import SUMMARIES, command

from .conftest import Run

HEAVY = ("torch", "transformers", "accelerate", "yaml", "scipy", "hf_actswap.engine", "hf_actswap.plan")

PROBE = """
import json, sys
from hf_actswap.cli.app import app
codes = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["hf-actswap", *words]
    try:
        app()
    except SystemExit as ended:
        codes.append(ended.code)
sys.stderr.write("\\n" + json.dumps([codes, list(sys.modules)]))
"""


def loaded_by(repository: Path, *calls: list[str]) -> tuple[list[int], set[str]]:
    """Call the program several times in one process; return its exit codes, and what it has imported."""
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    ended = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(calls)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    codes, modules = json.loads(ended.stderr.splitlines()[-1])
    return codes, set(modules)


def test_help_version_and_wrong_usage_load_no_library(repository: Path) -> None:
    codes, modules = loaded_by(repository, ["--help"], ["--version"], [], ["plna"])
    assert codes == [0, 0, 2, 2]
    assert "hf_actswap.cli.app" in modules  # the probe sees what there is
    assert modules.isdisjoint(HEAVY)


def test_wrong_options_of_plan_are_named_before_torch_is_imported(repository: Path) -> None:
    wrong = (
        ["--seq", "8kk"],
        ["--budget", "40GX"],
        ["--device", "H20"],
        ["--device", "memory=48GB"],
        ["--compare", "tp=0"],
    )
    codes, modules = loaded_by(repository, *(["plan", "model", *words] for words in wrong))
    assert codes == [2] * len(wrong)
    assert modules.isdisjoint({*HEAVY} - {"yaml"})


def test_the_list_says_what_the_commands_say(run: Run) -> None:
    """Each command is there, and its summary is the first line of its own docstring."""
    for name, summary in SUMMARIES.items():
        assert command(name).name == name
        assert command(name).help.splitlines()[0] == summary
        assert run(name, "--help").code == 0


def test_the_apply_of_the_package_is_the_verb() -> None:
    assert hf_actswap.apply.__name__ == "apply"
    assert not isinstance(hf_actswap.apply, type(sys))
    assert sys.modules["hf_actswap.apply"].apply is hf_actswap.apply


def test_type_checkers_see_the_names_that_are_there(repository: Path) -> None:
    """What is imported for them is what is imported when it is asked for, and all that is public."""
    tree = ast.parse((repository / "hf_actswap" / "__init__.py").read_text(encoding="utf-8"))
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    told = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    packages = [name for name, module in told.items() if module is None]
    assert packages == list(hf_actswap._PACKAGES)
    for name in packages:
        del told[name]
    assert told == hf_actswap._MODULES
    assert set(told) == set(hf_actswap.__all__)
    assert set(hf_actswap.__all__) <= set(dir(hf_actswap))


def test_packages_are_reachable_without_an_import_of_their_own() -> None:
    for name in hf_actswap._PACKAGES:
        assert hf_actswap.__getattr__(name).__name__ == f"hf_actswap.{name}"
        assert name in dir(hf_actswap)
