"""Lines of a plan reach the console of every program, unless it says something about this library itself."""

from __future__ import annotations

import logging
import sys
from io import StringIO

import pytest

from hf_actswap.report import console_logging

PACKAGE, MODULE = logging.getLogger("hf_actswap"), logging.getLogger("hf_actswap.integrations.callback")


class OwnOrWarnings(logging.Filter):
    """As Axolotl's: INFO of its own loggers, and of others what is worse."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.name.startswith("axolotl")


def said(capsys: pytest.CaptureFixture[str], *handlers: logging.Handler) -> list[str]:
    """Return the console's lines in a program whose root logger has these handlers, and not pytest's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.root, "handlers", list(handlers))
        with console_logging(PACKAGE):
            MODULE.info("a line")
            MODULE.warning("a warning")
    shown = capsys.readouterr()
    return [line for line in (shown.out + shown.err).splitlines() if line]


def test_a_program_that_has_configured_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys) == ["INFO - a line", "WARNING - a warning"]


@pytest.mark.parametrize("where", ["level", "handler", "logger", "file"])
def test_a_program_that_shows_warnings_of_libraries_only(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    if where == "handler":
        handler.addFilter(OwnOrWarnings())
    if where == "logger":
        monkeypatch.setattr(MODULE, "filters", [OwnOrWarnings()])
    handlers: list[logging.Handler] = [handler]
    if where == "file":  # it takes everything, and is no console
        handler.setLevel(logging.WARNING)
        handlers += [logging.StreamHandler(StringIO()), logging.NullHandler()]
    lines = said(capsys, *handlers)
    assert sorted(line.removeprefix("INFO - ") for line in lines) == ["a line", "a warning"]
    assert len(MODULE.filters) == (where == "logger")
    assert PACKAGE.level == logging.NOTSET
    assert PACKAGE.handlers == []


def test_a_level_of_the_library_decides(
    capsys: pytest.CaptureFixture[str],
) -> None:
    PACKAGE.setLevel(logging.WARNING)
    try:
        assert said(capsys) == ["WARNING - a warning"]
    finally:
        PACKAGE.setLevel(logging.NOTSET)


@pytest.fixture
def program() -> dict[str, logging.Logger]:
    """Loggers of a program without handlers: root, package and module, apart from pytest's."""
    root = logging.RootLogger(logging.WARNING)
    manager = logging.Manager(root)
    names = {"root": "", "package": "hf_actswap", "module": "hf_actswap.apply"}
    return {kind: manager.getLogger(name) if name else root for kind, name in names.items()}


CASES = [(None, None, 1), ("root", "ERROR", 0), ("root", "INFO", 1)]
CASES += [(where, level, 0) for where in ("package", "module") for level in ("WARNING", "ERROR")]
CASES += [(where, level, 1) for where in ("package", "module") for level in ("INFO", "DEBUG")]


@pytest.mark.parametrize(("where", "level", "lines"), CASES)
def test_the_level_of_the_program_stays(
    program: dict[str, logging.Logger],
    capsys: pytest.CaptureFixture[str],
    where: str | None,
    level: str | None,
    lines: int,
) -> None:
    if where is not None and level is not None:
        program[where].setLevel(level)
    before = {kind: logger.level for kind, logger in program.items()}
    with console_logging(program["package"]):
        program["module"].info("said")
    assert capsys.readouterr().err == "INFO - said\n" * lines
    assert {kind: logger.level for kind, logger in program.items()} == before
    assert not program["package"].handlers
