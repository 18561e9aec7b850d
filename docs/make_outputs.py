"""Runs the commands that pages show, and writes what they print below them.

    python docs/make_outputs.py                          # docs/command_line.md, anew
    python docs/make_outputs.py docs/command_line.md     # the same

A block of language ``console`` opens with one command; what follows until its end is replaced. No GPU and no
network are needed; the versions are those of ``constraints.txt``.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/command_line.md",)
_BLOCK = re.compile(r"^```console\n\$ (hf-actswap [^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[tuple[str, str]]:
    """Return the commands of a page, each with the output that it shows."""
    return [(match[1], match[2]) for match in _BLOCK.finditer(page)]


def output_of(command: str) -> str:
    """Run a command in this process as in a shell of 80 columns; an exit code other than 0 is a last line."""
    from typer.testing import CliRunner  # here: the package need not be installed for `main`

    from hf_actswap.cli.app import app

    result = CliRunner().invoke(app, shlex.split(command)[1:], prog_name="hf-actswap", env={"COLUMNS": "80"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    lines = [line.rstrip() for line in result.stdout.strip("\n").splitlines()]
    if result.exit_code:
        lines += ["", f"(exit code {result.exit_code})"]
    return "\n".join(lines) + "\n"


def with_outputs(page: str) -> str:
    """Return the page with every output as it is now."""
    return _BLOCK.sub(lambda match: f"```console\n$ {match[1]}\n{output_of(match[1])}```", page)


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for name in sys.argv[1:] or PAGES:
        path = Path(name)
        path.write_text(with_outputs(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
