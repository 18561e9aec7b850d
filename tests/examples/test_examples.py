"""Every example runs on a CPU without network, lowers its loss, and says what it swapped."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.examples.notebook import cells_of, made, text_of, without_outputs

LIMIT_S = 150
LINE = re.compile(r"loss (\d+\.\d+), (?=.*swapped)(?=.*recomputed).*? ([\d,.]+) (bytes|MiB)")
UNITS = {"bytes": 1, "MiB": 2**20}
ALONE = {"trainer.py": (), "trainer.ipynb": (), "sft_lora.py": ("trl", "peft"), "accelerate_loop.py": ()}
"""What one process runs -> packages that it needs beside those that hf_actswap brings."""

RUN_ALL = """
import contextlib, io, json, os, re, runpy, sys
from accelerate.state import AcceleratorState

printed = {}
for path in sys.argv[2:]:
    folder = os.getcwd()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if path.endswith(".py"):
            runpy.run_path(path, run_name="__main__")
        else:
            os.chdir(os.path.dirname(sys.argv[1]))  # a notebook stands alone
            names = {"__name__": "__main__"}
            for cell in json.load(open(path, encoding="utf-8"))["cells"]:
                if cell["cell_type"] == "code":
                    source = re.sub("%pip .*", "raise ImportError", "".join(cell["source"]))
                    exec(compile(source, path, "exec"), names)
            os.chdir(folder)
    printed[os.path.basename(path)] = out.getvalue()
    AcceleratorState._reset_state(reset_partial_state=True)
json.dump(printed, open(sys.argv[1], "w"))
"""
"""Arguments: the file for what was printed, scripts and notebooks. One process: starting takes longest."""


def run(repository: Path, *command: str, folder: Path) -> str:
    """Run ``python`` with ``command`` in ``folder``, and return what it printed."""
    paths = os.pathsep.join(filter(None, [str(repository), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def assert_it_trained_and_swapped(printed: str) -> None:
    """The lines about steps: the loss falls, and bytes were moved at each of them."""
    lines = [found.groups() for line in printed.splitlines() if (found := LINE.search(line))]
    assert len(lines) >= 4, printed
    losses = [float(loss) for loss, *_ in lines]
    assert losses[-1] < losses[0] - 0.1
    assert all(float(moved.replace(",", "")) * UNITS[unit] > 100_000 for _, moved, unit in lines)


def missing(name: str) -> list[str]:
    return [package for package in ALONE[name] if find_spec(package) is None]


@pytest.fixture(scope="module")
def printed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What each example of one process printed."""
    result = tmp_path_factory.mktemp("examples") / "printed.json"
    stand = tmp_path_factory.mktemp("where_the_user_stands")
    paths = [str(repository / "examples" / name) for name in ALONE if not missing(name)]
    before = set((repository / "examples").iterdir())
    run(repository, "-c", RUN_ALL, str(result), *paths, folder=stand)
    assert list(stand.iterdir()) == []
    assert set((repository / "examples").iterdir()) == before
    found: dict[str, str] = json.loads(result.read_text())
    return found


def test_every_example_is_run_here(repository: Path) -> None:
    found = {path.name for path in (repository / "examples").iterdir() if path.suffix in (".py", ".ipynb")}
    assert found == {*ALONE, "fsdp2.py"}


@pytest.mark.parametrize("name", ALONE)
def test_an_example_trains_and_says_what_it_swapped(name: str, printed: Mapping[str, str]) -> None:
    if missing(name):
        pytest.skip(f"needs {', '.join(missing(name))}")
    assert_it_trained_and_swapped(printed[name])


@pytest.mark.slow
@pytest.mark.dist
def test_fsdp2_on_two_processes(repository: Path, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    found = run(repository, *launcher, str(repository / "examples" / "fsdp2.py"), folder=tmp_path)
    assert_it_trained_and_swapped(found)
    assert "rank 0 of 2" in found


@pytest.mark.parametrize("name", [name for name in [*ALONE, "fsdp2.py"] if name.endswith(".py")])
def test_a_script_opens_with_how_it_is_run(name: str, repository: Path) -> None:
    header = (repository / "examples" / name).read_text(encoding="utf-8").split('"""')[1]
    assert re.search(rf"^    .*(python|torchrun).* examples/{name}", header, flags=re.MULTILINE)


@pytest.fixture
def kept(repository: Path) -> dict[str, Any]:
    """The notebook as it is in the repository."""
    found: dict[str, Any] = json.loads(
        (repository / "examples" / "trainer.ipynb").read_text(encoding="utf-8")
    )
    return found


def test_the_notebook_is_the_script(kept: dict[str, Any]) -> None:
    assert text_of(without_outputs(kept)) == text_of(made()), "run: python -m tests.examples.notebook"


def test_the_notebook_keeps_what_it_showed(kept: dict[str, Any], printed: Mapping[str, str]) -> None:
    outputs = [output for cell in kept["cells"] for output in cell.get("outputs", ())]
    shown = "".join("".join(output.get("text", "")) for output in outputs)
    assert_it_trained_and_swapped(shown)
    assert LINE.findall(shown)[0][1:] == LINE.findall(printed["trainer.ipynb"])[0][1:]  # bytes of a step
    assert "Activation plan: 4 llama layers" in shown
    assert "in place of at most" in shown
    assert not re.search(r"(^|[\s\"'])/\w+/|Error|Traceback", json.dumps(outputs), flags=re.MULTILINE)


def test_the_notebook_has_the_form_that_jupyter_reads(kept: dict[str, Any]) -> None:
    """Catches cells that the format's schema rejects; `nbformat` is not needed for that."""
    assert (kept["nbformat"], kept["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in kept["cells"]}) == len(kept["cells"]) >= 6
    for cell in kept["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | code


def test_a_script_is_cut_at_its_marks() -> None:
    script = '# %% [markdown]\n"""Says.\n\n    a\n"""\n\n# %%\nx = 1\n\n# %% [markdown]\n# More\n# text.\n'
    assert cells_of(script) == [(True, "Says.\n\n    a"), (False, "x = 1"), (True, "More\ntext.")]
