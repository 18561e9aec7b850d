"""Makes an environment with a fine-tuning tool by its own pins, and this package beside it.

    python tests/tools/install.py axolotl FOLDER

The tool's own requirements decide every version; what cannot be had without a GPU is left out, by name.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
"""Within the pins of all tools, and first: a CPU wheel that the index configuration offers is then taken."""


@dataclass(frozen=True)
class Tool:
    """A tool on the package index.

    Args:
        package: name and version.
        left_out: requirements that cannot be had without a GPU.
        empty: those of them that it imports all the same: an empty module stands in.
    """

    package: str
    left_out: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()


TOOLS = {
    # Built for a CUDA build of PyTorch; images and sounds alone need them.
    "llamafactory": Tool(
        "llamafactory==0.9.5", left_out=("torchvision", "torchaudio"), empty=("torchaudio",)
    ),
    "swift": Tool("ms-swift==4.6.0"),
    # Its wheels are each built for one CUDA build of PyTorch.
    "axolotl": Tool("axolotl==0.19.0", left_out=("xformers",)),
}

_REQUIREMENTS = """
import importlib.metadata, json, sys
from packaging.requirements import Requirement
name, *left_out = sys.argv[1:]
found = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
wanted = [item for item in found if item.marker is None or item.marker.evaluate({"extra": ""})]
print(json.dumps([f"{item.name}{item.specifier}" for item in wanted if item.name not in left_out]))
"""


def install(tool: Tool, folder: Path) -> Path:
    """Make the environment, unless it is there; return its Python."""
    python = folder / "bin" / "python"
    done = folder / ".done"
    if done.exists():
        return python
    venv.create(folder, with_pip=True)

    def pip(*words: str) -> None:
        quiet = ("--quiet", "--disable-pip-version-check")
        subprocess.run([python, "-m", "pip", "install", *quiet, *words], check=True)

    pip(TORCH, "packaging")
    pip("--no-deps", tool.package)
    asked = [python, "-c", _REQUIREMENTS, tool.package.partition("==")[0], *tool.left_out]
    requirements = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    # In one call with this package: its requirements and the tool's pins must have one answer.
    pip(TORCH, *requirements, "--editable", str(ROOT))
    for name in tool.empty:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / f"{name}.py").touch()
    done.touch()
    return python


if __name__ == "__main__":
    install(TOOLS[sys.argv[1]], Path(sys.argv[2]))
