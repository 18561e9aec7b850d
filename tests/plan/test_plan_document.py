"""Plans as data: JSON there and back, malformed documents, and which row decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_actswap import MemoryPlan, PlanError, load_config
from hf_actswap.plan import Adjustment, PlanRow, Windows, load_config_or_plan
from hf_actswap.plan.actions import FATES, Fate, Scope, format_scopes

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
        fate = draw(st.sampled_from(tuple(FATES)))
        leads = st.integers(min_value=0, max_value=50)
        windows = Windows(draw(leads), draw(leads)) if fate == "swap" and draw(st.booleans()) else None
        parameters = draw(
            st.dictionaries(st.text(max_size=3), st.integers(-9, 9) | st.text(max_size=3), max_size=2)
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
    host=st.none() | st.integers(min_value=0, max_value=2**63 - 1),
    bind=st.booleans(),
)
def test_json_there_and_back(
    rows: list[PlanRow], texts: list[str], layers: list[int], host: int | None, bind: bool
) -> None:
    plan = MemoryPlan(
        rows=tuple(rows),
        num_layers=NUM_LAYERS,
        family="llama",
        adjustments=tuple(Adjustment(text, tuple(layers), "op", "swap", "keep", text) for text in texts),
        min_tensor_bytes=17,
        host_memory_bytes=host,
        bind_numa=bind,
        lines=tuple(texts),
        warnings=tuple(texts[:1]),
        unsupported=tuple(texts[1:]),
    )
    assert MemoryPlan.from_json(plan.to_json()) == plan


def test_a_plan_in_the_place_of_a_configuration(tmp_path: Path) -> None:
    plan = MemoryPlan((PlanRow(1, "mlp", "recompute"),), num_layers=2, family="llama")
    file = tmp_path / "any name"
    file.write_text(plan.to_json())
    for source in (plan, file, str(file), json.loads(plan.to_json())):
        assert load_config_or_plan(source) == plan
    for other in ({"memory": {"mode": "adaptive"}}, "auto", "memory: {mode: adaptive}\n"):
        assert load_config_or_plan(other) == load_config("auto")
    file.write_text(plan.to_json().replace("recompute", "recompte"))
    with pytest.raises(PlanError, match=r"rows\[0\].fate"):
        load_config_or_plan(str(file))


def test_layers_that_do_not_exist() -> None:
    plan = MemoryPlan((), 2)
    for layer, shown in ((2, "2"), (-1, "-1"), ("norm", "'norm'")):
        with pytest.raises(KeyError) as caught:
            plan.fate(layer)  # type: ignore[arg-type]
        assert caught.value.args == (f"{shown}: the plan has layers 0 to 1, embedding, final_norm, head",)


def test_folded_layers() -> None:
    assert format_scopes((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert format_scopes(()) == ""


def document(**changes: Any) -> str:
    plan = MemoryPlan((PlanRow(0, "mlp", "swap", windows=Windows(1, 3)),), 2)
    return json.dumps({**json.loads(plan.to_json()), **changes})


ROW: dict[str, Any] = {"scope": 0, "op_path": "mlp", "fate": "keep"}
OVERRIDE_FIELDS = "where, layers, op_path, asked, got, reason"

LAYERS = "a number of layers, at most 10000"
MALFORMED = {
    "no-json": (
        "{",
        "plan: expected a JSON document, found no JSON: "
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1).",
    ),
    "another-document": ('{"format": "x"}', "plan.format: expected hf_actswap.plan, found 'x'."),
    "a-list": ("[]", "plan: expected a mapping, found []."),
    "newer": (document(format_version=2), "plan.format_version: expected 1, found 2."),
    "layers": (document(num_layers="2"), f"plan.num_layers: expected {LAYERS}, found '2'."),
    "layers-bool": (document(num_layers=True), f"plan.num_layers: expected {LAYERS}, found true."),
    "layers-many": (document(num_layers=10**9), f"plan.num_layers: expected {LAYERS}, found 1000000000."),
    "rows": (document(rows={"a": 1}), "plan.rows: expected a list, found {'a': 1}."),
    "levels": ("[" * 10**5, "plan: expected at most 100 levels, found more."),
    "adjustments": (document(adjustments=1), "plan.adjustments: expected a list, found 1."),
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
        {**ROW, "windos": None},
    ]
    text = document(
        rows=rows,
        adjustments=[{"where": "x"}, "y"],
        lines=["fine", 3],
        min_tensor_bytes=None,
        host_memory_bytes=-5,
        bind_numa=1,
    )
    scopes = "a layer from 0 to 1, the module path of another stack's layer, "
    scopes += "or one of embedding, final_norm, head"
    row = "a mapping of scope, op_path, fate, ordinal, windows, parameters"
    assert problems_of(text) == [
        f"plan.rows[0].scope: expected {scopes}, found 2.",
        "plan.rows[0].fate: expected keep, swap, recompute, re-gather or slice, found 'offload'.",
        f"plan.rows[1]: expected {row}, found 7.",
        "plan.rows[2].windows.release_ops: expected a whole number from 0 on, found -1.",
        f"plan.rows[3].scope: expected {scopes}, found true.",
        "plan.rows[3].op_path: expected a text, found nothing.",
        "plan.rows[4].ordinal: expected a whole number from 0 on or null, found -1.",
        "plan.rows[5].ordinal: expected a whole number from 0 on or null, found true.",
        "plan.rows[6].parameters: expected a mapping, compile_budget in it from 0 to 1, found [1].",
        "plan.rows[8].windos: expected one of scope, op_path, fate, ordinal, windows, parameters, "
        "found 'windos'.",
        "plan.adjustments[0].layers: expected a list, found nothing.",
        *(
            f"plan.adjustments[0].{name}: expected a text, found nothing."
            for name in ("op_path", "asked", "got", "reason")
        ),
        f"plan.adjustments[1]: expected a mapping of {OVERRIDE_FIELDS}, found 'y'.",
        "plan.min_tensor_bytes: expected a number of bytes, found null.",
        "plan.host_memory_bytes: expected a number of bytes or null, found -5.",
        "plan.bind_numa: expected true or false, found 1.",
        "plan.lines[1]: expected a text, found 3.",
    ]


def test_every_fate_has_a_meaning() -> None:
    assert tuple(FATES) == get_args(Fate)
    assert all(FATES.values())
