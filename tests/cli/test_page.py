"""docs/command_line.md shows what the commands print."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.docs.pages import DOCS, ROOT, script, text_of

from .conftest import Run

PAGE = DOCS / "command_line.md"
OUTPUTS = script("make_outputs")


def shown() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = OUTPUTS.commands(text_of(PAGE))
    return found


def differing_versions() -> list[str]:
    pinned = dict(
        re.findall(
            r"^(torch|transformers|typer|rich|scipy)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M
        )
    )
    return [name for name, wanted in pinned.items() if installed(name) != wanted]


def installed(name: str) -> str:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "none"


def test_each_command_has_a_place() -> None:
    commands = {command.split()[1] for command, _ in shown()}
    assert commands == {"--help", "check", "explain", "plan", "profile"}


@pytest.mark.parametrize(
    ("command", "output"),
    [
        pytest.param(command, output, id=command, marks=[pytest.mark.slow] if "--seq" in command else [])
        for command, output in shown()
    ],
)
def test_the_page_shows_what_is_printed(command: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if differing_versions():
        pytest.skip(f"other versions than in constraints.txt: {', '.join(differing_versions())}")
    monkeypatch.chdir(ROOT)
    assert OUTPUTS.output_of(command) == output


def test_env_shows_the_same_facts(run: Run) -> None:
    """Its values are those of a machine; its lines are not."""
    text = text_of(PAGE)
    (block,) = re.findall(r"^\$ hf-actswap env\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)

    def names(lines: str) -> set[str]:
        return {line.split("  ")[0].strip() for line in lines.splitlines() if line.strip()}

    ours = names(run("env").out)
    assert {name for name in names(block) if not name.startswith("device")} <= ours
