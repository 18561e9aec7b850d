"""Lines reach the console of a program that has configured no logging, at the level that it has set."""

from __future__ import annotations

import logging

import pytest

from hf_actswap.report import console_logging


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
