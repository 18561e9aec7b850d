"""docs/troubleshooting.md quotes messages that the package still has."""

from __future__ import annotations

import ast
import functools
import re

import pytest
import yaml

from hf_actswap import ConfigError, load_config
from tests.docs.pages import DOCS, ROOT, text_of

PAGE = DOCS / "troubleshooting.md"
HOLE = "\0"
"""In the place of what an f-string or a format fills in."""

OF_PYTORCH = (
    "torch.OutOfMemoryError",
    "Calling register_hooks on a saved tensor whose hooks have already been set",
)
"""Messages that the package does not have."""

Row = tuple[str, ...]


@functools.cache
def literals() -> tuple[str, ...]:
    """Every text of the package, adjacent parts joined, docstrings left out."""
    found = []
    for path in sorted((ROOT / "hf_actswap").rglob("*.py")):
        tree = ast.parse(text_of(path))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else HOLE for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def rows(after: str, until: str) -> list[Row]:
    """The rows of the tables between two headings, without their heads."""
    section = text_of(PAGE).partition(f"## {after}")[2].partition(f"\n## {until}")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]


def parts_of(quoted: str) -> list[str]:
    """The fixed parts of the messages that a cell quotes."""
    messages = re.findall(r"`([^`]+)`", quoted)
    return [part.strip() for message in messages for part in message.split("...") if part.strip()]


IN_PACKAGE = [row[0] for row in rows("`PlanError`", "Without a message")]
WRITTEN = [(row[0].strip("`"), row[1]) for row in rows("`ConfigError`", "`PlanError`")]


def test_the_tables_are_found() -> None:
    assert len(IN_PACKAGE) > 60
    assert len(WRITTEN) > 12


@pytest.mark.parametrize("quoted", IN_PACKAGE)
def test_the_package_has_the_message(quoted: str) -> None:
    for part in parts_of(quoted):
        if part in OF_PYTORCH:
            continue
        assert len(part) >= 10, "too short to be found again"
        assert any(part in literal for literal in literals()), part


@pytest.mark.parametrize(("written", "quoted"), WRITTEN)
def test_what_is_written_raises_the_message(written: str, quoted: str) -> None:
    document = written if not written.startswith("'") else yaml.safe_load(written)
    with pytest.raises(ConfigError) as raised:
        load_config(document)
    text = str(raised.value)
    for part in parts_of(quoted):
        assert part in text


def test_a_message_that_is_gone_is_noticed() -> None:
    assert not any("a message that nobody prints" in literal for literal in literals())
    assert any("one process per device" in literal for literal in literals())
