"""Malformed documents: each file of ``malformed/`` opens with the exact messages it must give, in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_actswap.config import load_config
from hf_actswap.errors import ConfigError

DOCUMENTS = sorted((Path(__file__).parent / "malformed").glob("*.yaml"))
MARK = "# expect: "


def expected_messages(text: str) -> list[str]:
    return [line.removeprefix(MARK) for line in text.splitlines() if line.startswith(MARK)]


def test_there_are_enough_documents() -> None:
    assert len(DOCUMENTS) >= 40


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_exact_messages(path: Path) -> None:
    messages = expected_messages(path.read_text())
    assert messages, f"{path.name} states no expected message"
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert [str(problem) for problem in caught.value.problems] == messages
    count = f"{len(messages)} problem{'' if len(messages) == 1 else 's'}"
    assert str(caught.value).splitlines() == [
        f"{count} in the configuration ({path}):",
        *(f"  - {message}" for message in messages),
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_text_gives_the_same_messages_as_the_file(path: Path) -> None:
    with pytest.raises(ConfigError) as from_file:
        load_config(path)
    with pytest.raises(ConfigError) as from_text:
        load_config(path.read_text())
    assert from_text.value.problems == from_file.value.problems


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_messages_are_plain_lines(path: Path) -> None:
    for message in expected_messages(path.read_text()):
        assert message.isprintable()
        assert message.endswith((".", "?"))
        assert ": expected " in message
        assert ", found " in message
