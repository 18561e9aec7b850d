"""The bar shown while host memory is page-locked."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from hf_actswap.report import PinningBar

GIB = 2**30


def test_a_terminal_sees_the_bar_and_then_not(caplog: pytest.LogCaptureFixture) -> None:
    screen = io.StringIO()
    bar = PinningBar(Console(file=screen, force_terminal=True, width=100, color_system=None))
    with caplog.at_level(logging.INFO):
        bar(int(3.2 * GIB), 7 * GIB)
        assert "pinning host memory" in screen.getvalue()
        assert "3.2/7.0 GiB" in screen.getvalue()
        assert caplog.records == []
        bar(7 * GIB, 7 * GIB)
    assert "7.0/7.0 GiB" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")  # the line is cleared
    assert [record.getMessage()[:35] for record in caplog.records] == ["7.0 GiB of host memory ready after "]
    after_the_first = len(screen.getvalue())
    bar(GIB, 2 * GIB)  # a second reservation
    assert "1.0/2.0 GiB" in screen.getvalue()[after_the_first:]
    bar(2 * GIB, 2 * GIB)


def test_elsewhere_one_log_line_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    bar = PinningBar(Console(file=out, force_terminal=False))
    with caplog.at_level(logging.INFO):
        for done in range(5):
            bar(done * GIB, 4 * GIB)
    assert out.getvalue() == ""
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("4.0 GiB of host memory ready after ")


def test_a_reservation_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    with caplog.at_level(logging.INFO):
        PinningBar(Console(file=out, force_terminal=True))(0, 0)
    assert len(caplog.records) == 1
