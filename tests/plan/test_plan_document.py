"""Plans as data: JSON there and back, malformed documents, and which row decides."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_actswap import MemoryPlan, PlanError
from hf_actswap.plan import Override, PlanRow, Windows
from hf_actswap.plan.actions import FATES, Scope, folded

NUM_LAYERS = 3
PATHS = ["", "a", "a.b", "a.b.c", "a.bc", "d", "output"]
SCOPES: list[Scope] = [0, 1, 2, "embedding", "final_norm", "head"]


@st.composite
def plan_rows(draw: st.DrawFn) -> list[PlanRow]:
    """Rows with distinct (scope, path, ordinal)."""
    keys = st.tuples(
        st.sampled_from(SCOPES), st.sampled_from(PATHS), st.none() | st.integers(min_value=0, max_value=2)
    )
    rows = []
    for scope, path, ordinal in draw(st.lists(keys, unique=True, max_size=12)):
        fate = draw(st.sampled_from(FATES))
        leads = st.integers(min_value=0, max_value=50)
        windows = Windows(draw(leads), draw(leads)) if fate == "swap" and draw(st.booleans()) else None
        parameters = draw(
            st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)
        )
        rows.append(PlanRow(scope, path, fate, ordinal, windows, parameters))
    return rows


def naive_fate(rows: list[PlanRow], scope: Scope, path: str, ordinal: int | None) -> str:
    """The rule in words: the longest path that covers, and there the row with the ordinal asked for."""
    candidates = []
    for row in rows:
        covers = row.op_path == "" or path == row.op_path or path.startswith(row.op_path + ".")
        exact = row.ordinal is not None
        if row.scope != scope or not covers:
            continue
        if exact and (row.op_path != path or row.ordinal != ordinal):
            continue
        candidates.append((len(row.op_path.split(".")) if row.op_path else 0, exact, row.fate))
    return max(candidates)[2] if candidates else "keep"


@settings(max_examples=60, deadline=None)
@given(rows=plan_rows())
def test_longest_path_then_ordinal(rows: list[PlanRow]) -> None:
    plan = MemoryPlan(tuple(rows), NUM_LAYERS)
    for scope in SCOPES:
        for path in [*PATHS, "a.b.c.deeper", "elsewhere"]:
            for ordinal in (None, 0, 1, 2):
                assert plan.fate(scope, path, ordinal) == naive_fate(rows, scope, path, ordinal)


@settings(max_examples=60, deadline=None)
@given(
    rows=plan_rows(),
    texts=st.lists(st.text(max_size=20), max_size=3),
    layers=st.lists(st.integers(min_value=0, max_value=9), max_size=4),
    host=st.none() | st.integers(min_value=0),
    bind=st.booleans(),
)
def test_json_there_and_back(
    rows: list[PlanRow], texts: list[str], layers: list[int], host: int | None, bind: bool
) -> None:
    plan = MemoryPlan(
        rows=tuple(rows),
        num_layers=NUM_LAYERS,
        family="llama",
        overrides=tuple(Override(text, tuple(layers), "op", "swap", "keep", text) for text in texts),
        min_tensor_bytes=17,
        host_memory_bytes=host,
        bind_numa=bind,
        lines=tuple(texts),
        warnings=tuple(texts[:1]),
        unbuilt=tuple(texts[1:]),
    )
    assert MemoryPlan.from_json(plan.to_json()) == plan


def test_layers_that_do_not_exist() -> None:
    plan = MemoryPlan((), 2)
    for layer, shown in ((2, "2"), (-1, "-1"), ("norm", "'norm'")):
        with pytest.raises(KeyError) as caught:
            plan.fate(layer)  # type: ignore[arg-type]
        assert caught.value.args == (f"{shown}: the plan has layers 0 to 1, embedding, final_norm, head",)


def test_folded_layers() -> None:
    assert folded((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert folded(()) == ""


def document(**changes: Any) -> str:
    plan = MemoryPlan((PlanRow(0, "mlp", "swap", windows=Windows(1, 3)),), 2)
    return json.dumps({**json.loads(plan.to_json()), **changes})


ROW: dict[str, Any] = {"scope": 0, "op_path": "mlp", "fate": "keep"}
OVERRIDE_FIELDS = "where, layers, op_path, asked, got, reason"

MALFORMED = {
    "no-json": (
        "{",
        "plan: expected a JSON document, found no JSON: "
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1).",
    ),
    "another-document": ('{"format": "x"}', "plan.format: expected 'hf_actswap.plan', found 'x'."),
    "a-list": ("[]", "plan.format: expected 'hf_actswap.plan', found []."),
    "newer": (document(format_version=2), "plan.format_version: expected 1, found 2."),
    "layers": (document(num_layers="2"), "plan.num_layers: expected a number of layers, found '2'."),
    "layers-bool": (document(num_layers=True), "plan.num_layers: expected a number of layers, found True."),
    "rows": (document(rows={"a": 1}), "plan.rows: expected a list, found {'a': 1}."),
    "overrides": (document(overrides=1), "plan.overrides: expected a list, found 1."),
}


def problems_of(text: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        MemoryPlan.from_json(text)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name: str) -> None:
    text, problem = MALFORMED[name]
    assert problems_of(text) == [problem]


def test_every_problem_of_a_document_is_named() -> None:
    rows = [
        {**ROW, "scope": 2, "fate": "offload"},
        7,
        {**ROW, "fate": "swap", "windows": {"prefetch_ops": 1, "release_ops": -1}},
        {"scope": True, "fate": "keep"},
        {**ROW, "ordinal": -1},
        {**ROW, "ordinal": True},
        {**ROW, "parameters": [1]},
        ROW,
    ]
    text = document(
        rows=rows,
        overrides=[{"where": "x"}, "y"],
        lines=["fine", 3],
        min_tensor_bytes=None,
        host_memory_bytes=-5,
        bind_numa=1,
    )
    scopes = "a layer from 0 to 1, the module path of another stack's layer, "
    scopes += "or one of embedding, final_norm, head"
    assert problems_of(text) == [
        f"plan.rows[0].scope: expected {scopes}, found 2.",
        "plan.rows[0].fate: expected one of keep, swap, recompute, re-gather, slice, found 'offload'.",
        "plan.rows[1]: expected a mapping, found 7.",
        "plan.rows[2].windows: expected prefetch_ops and release_ops, in operators, both >= 0, "
        "or null: chosen by measurement, found {'prefetch_ops': 1, 'release_ops': -1}.",
        f"plan.rows[3].scope: expected {scopes}, found True.",
        "plan.rows[3].op_path: expected a string, found None.",
        "plan.rows[4].ordinal: expected a number of a call, or null, found -1.",
        "plan.rows[5].ordinal: expected a number of a call, or null, found True.",
        "plan.rows[6].parameters: expected a mapping, found [1].",
        f"plan.overrides[0]: expected a mapping of {OVERRIDE_FIELDS}, found {{'where': 'x'}}.",
        f"plan.overrides[1]: expected a mapping of {OVERRIDE_FIELDS}, found 'y'.",
        "plan.lines[1]: expected a string, found 3.",
        "plan.min_tensor_bytes: expected a number of bytes, found None.",
        "plan.host_memory_bytes: expected a number of bytes, found -5.",
        "plan.bind_numa: expected true or false, found 1.",
    ]
