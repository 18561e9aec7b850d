"""Measurements of others: the table, its page, and that today's predictions are still those of the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.published.compare import FOLDER, Compared, Row, compared, read_rows, summary
from tests.docs.pages import script

MAKE = script("make_published")


def row_of(name: str) -> Row:
    return next(row for row in read_rows() if row.id == name)


def test_every_row_says_where_it_stands() -> None:
    models = yaml.safe_load((FOLDER / "models.yaml").read_text(encoding="utf-8"))
    rows = read_rows()
    assert len({row.id for row in rows}) == len(rows) > 50
    for row in rows:
        assert all((row.source, row.quote, row.measured())), row.id
        assert row.model in models
        assert row.other.keys() <= {"memory", "time"}
        assert row.published.get("counts", "unknown") in ("allocated", "active", "reserved", "unknown")


def test_the_page_shows_what_is_recorded() -> None:
    text, found = MAKE.PAGE.read_text(encoding="utf-8"), MAKE.recorded()
    assert {one.row.id for one in found} == {row.id for row in read_rows()}
    assert MAKE.page(text, found) == text, "run: python docs/make_published.py"
    changed = [replace(found[0], predicted={"memory": 1.0}), *found[1:]]
    assert MAKE.page(text, changed) != text


def test_a_mean_of_ratios_leaves_out_what_is_not_compared() -> None:
    row = row_of("fms-mistral7b-none-full-b4-g1")
    other = Row(**{**vars(row), "id": "other", "other": {"memory": "another kernel"}})
    found = [
        Compared(row, {"memory": 100.0}, {"memory": 97.0}),
        Compared(other, {"memory": 1.0}, {"memory": 9.0}),
    ]
    assert list(summary(found)) == [f"memory: 1 rows, median 3.0%, worst 3.0% ({row.id})"]


@pytest.mark.parametrize(
    "name",
    [
        "fms-mistral7b-none-full-b4-g1",
        pytest.param("fms-mistral7b-none-lora-b4-g1", marks=pytest.mark.slow),
        pytest.param("fms-mistral7b-baseline-peft-bnb-lora-b4-g1", marks=pytest.mark.slow),
    ],
)
def test_predictions_are_those_of_the_page(name: str) -> None:
    pytest.importorskip("peft")
    expected = next(one for one in MAKE.recorded() if one.row.id == name)
    found = compared(expected.row)
    assert found.problem == ""
    assert found.predicted == pytest.approx(expected.predicted, rel=1e-3)


def test_a_row_that_cannot_be_predicted_says_why(tmp_path: Path) -> None:
    row = row_of("fms-mistral7b-none-full-b4-g1")
    found = compared(Row(**{**vars(row), "plan": {**row.plan, "device": "no such device"}}))
    assert "no such device" in found.problem
    assert found.predicted == {}
