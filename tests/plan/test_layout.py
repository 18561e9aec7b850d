r"""The pipeline layout and the tables of the recompute keys, against MindFormers.

Vectors ``L...`` are what the reference computes, except where a comment says that it has a defect there and
what we do instead; ``R...``, with the lines and normal forms, are in ``test_recompute_vectors``. Tables are
written as in the documents: lists, [interleave][stage].
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_actswap.config import ParallelConfig
from hf_actswap.plan import build_layout
from hf_actswap.plan.layout import (
    PipelineLayout,
    format_formative,
    layers_from_counts,
    layers_from_indices,
    normalise_counts,
    normalise_indices,
    normalise_selection,
)
from tests.plan.documents import MUL, SILU

SELECT_DEFAULT, COMM_DEFAULT = (MUL, SILU), (r".*\.norm",)

DOCUMENT = (48, 5, 2, [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
DOCUMENT_COUNTS = [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]
DOCUMENT_STAGES = [stage for row in DOCUMENT_COUNTS for stage in range(5) for _ in range(row[stage])]


def tupled(value: Any) -> Any:
    """Lists as the configuration stores them."""
    if isinstance(value, dict):
        return {key: tupled(item) for key, item in value.items()}
    return tuple(map(tupled, value)) if isinstance(value, list) else value


def listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return list(map(listed, value)) if isinstance(value, tuple) else value


def lay_out(num_layers: int, pp: int = 1, vpp: int = 1, offset: Any = 0) -> PipelineLayout:
    parallel = ParallelConfig(pipeline_stage=pp, pp_interleave_num=vpp, offset=tupled(offset))
    layout, problems = build_layout(num_layers, parallel)
    assert problems == []
    assert layout is not None
    return layout


@pytest.mark.parametrize(
    ("setting", "counts", "stages", "interleaves"),
    [
        pytest.param(
            DOCUMENT,
            DOCUMENT_COUNTS,
            DOCUMENT_STAGES,
            [0] * 24 + [1] * 24,
            id="L1",
        ),
        pytest.param(
            (48, 5, 1, [0, 1, 1, 1, 0]),
            [[9, 10, 10, 10, 9]],
            [*[0] * 9, *[1] * 10, *[2] * 10, *[3] * 10, *[4] * 9],
            [0] * 48,
            id="L2",
        ),
        pytest.param((8, 4, 1, 0), [[2, 2, 2, 2]], [0, 0, 1, 1, 2, 2, 3, 3], [0] * 8, id="L3"),
        pytest.param(
            (8, 2, 2, 0), [[2, 2], [2, 2]], [0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1], id="L4"
        ),
        pytest.param((4, 1, 1, 0), [[4]], [0] * 4, [0] * 4, id="no pipeline"),
        pytest.param((5, 2, 1, [1, 0]), [[3, 2]], [0, 0, 0, 1, 1], [0] * 5, id="S30"),
        pytest.param((10, 2, 2, [1, 0]), [[3, 2], [3, 2]], [0, 0, 0, 1, 1] * 2, [0] * 5 + [1] * 5, id="row"),
        pytest.param((4, 4, 1, [-1, 1, 1, -1]), [[0, 2, 2, 0]], [1, 1, 2, 2], [0] * 4, id="empty ends"),
    ],
)
def test_layout(setting: Any, counts: Any, stages: list[int], interleaves: list[int]) -> None:
    layout = lay_out(*setting)
    layers = range(setting[0])
    assert listed(layout.counts) == counts
    assert (layout.num_layers, layout.pp, layout.vpp) == setting[:3]
    assert [layout.stage_of(layer) for layer in layers] == stages
    assert layout.log_lines()[3] == f"Interleave id list: {interleaves}"
    for stage in range(layout.pp):
        assert layout.layers_of(stage) == tuple(layer for layer in layers if stages[layer] == stage)


@pytest.mark.parametrize("layer", [-1, 48])
def test_a_layer_outside_the_model_has_no_stage(layer: int) -> None:
    layout = lay_out(*DOCUMENT)
    with pytest.raises(IndexError, match=f"layer {layer} of 48"):
        layout.stage_of(layer)


REMAINDER_5_2 = "offsets that add up to 1 over 2 chunks (5 layers % (pipeline_stage 2 * pp_interleave_num 1))"


@pytest.mark.parametrize(
    ("setting", "messages"),
    [
        pytest.param(
            (5, 2, 1, 0),
            [f"offset: expected {REMAINDER_5_2}, found 0, which adds up to 0. For example [1, 0]."],
            id="L7",
        ),
        pytest.param(
            (5, 2, 1, [1, 0, 0]),
            ["offset: expected 2 numbers, one per pipeline stage, found 3 numbers."],
            id="L8",
        ),
        pytest.param(
            (9, 2, 2, [[1, 0]]),
            ["offset: expected 2 rows, one per interleave (pp_interleave_num 2), found 1 row."],
            id="rows",
        ),
        pytest.param(
            (9, 2, 2, [[1], [0, 0, 0]]),
            [
                "offset[0]: expected 2 numbers, one per pipeline stage, found 1 number.",
                "offset[1]: expected 2 numbers, one per pipeline stage, found 3 numbers.",
            ],
            id="ragged",
        ),
        pytest.param(
            (6, 3, 1, [1, -2, 1]),
            [
                "offset: expected at least 1 in the chunk of stage 1, interleave 0 "
                "(base plus offset), found 0."
            ],
            id="L10",
        ),
        pytest.param(
            (4, 2, 1, [-3, 3]),
            [
                "offset: expected at least 0 in the chunk of stage 0, interleave 0 "
                "(base plus offset), found -1."
            ],
            id="L11",
        ),
        pytest.param(
            (5, 2, 1, 1),  # the reference lays out 6 layers
            [f"offset: expected {REMAINDER_5_2}, found 1, which adds up to 2. For example [1, 0]."],
            id="L12",
        ),
        pytest.param(
            (9, 2, 2, [1, 0]),  # the reference lays out 10 layers
            [
                "offset: expected offsets that add up to 1 over 4 chunks (9 layers % (pipeline_stage 2 * "
                "pp_interleave_num 2)), found [1, 0], which adds up to 2. For example [[0, 1], [0, 0]]."
            ],
            id="L13",
        ),
        pytest.param(
            (4, 1, 1, 1),
            [
                "offset: expected offsets that add up to 0 over 1 chunk (4 layers % (pipeline_stage 1 * "
                "pp_interleave_num 1)), found 1, which adds up to 1. For example 0."
            ],
            id="no pipeline",
        ),
        pytest.param(
            (3, 8, 1, 0),
            [
                "offset: expected offsets that add up to 3 over 8 chunks (3 layers % (pipeline_stage 8 * "
                "pp_interleave_num 1)), found 0, which adds up to 0. 3 layers cannot fill 8 chunks."
            ],
            id="too few layers",
        ),
        pytest.param(
            (4, 0, 1, 0),
            [
                "offset: expected at least one layer, stage and interleave, "
                "found num_layers 4, pipeline_stage 0, pp_interleave_num 1."
            ],
            id="no stage",
        ),
    ],
)
def test_rejected_layouts(setting: Any, messages: list[str]) -> None:
    num_layers, pp, vpp, offset = setting
    parallel = ParallelConfig(pipeline_stage=pp, pp_interleave_num=vpp, offset=tupled(offset))
    layout, problems = build_layout(num_layers, parallel, where="offset")
    assert layout is None
    assert [str(problem) for problem in problems] == messages


@given(num_layers=st.integers(1, 40), pp=st.integers(1, 6), vpp=st.integers(1, 4))
def test_a_hinted_offset_is_accepted(num_layers: int, pp: int, vpp: int) -> None:
    parallel = ParallelConfig(pipeline_stage=pp, pp_interleave_num=vpp, offset=99)
    _, (problem,) = build_layout(num_layers, parallel)
    if "cannot fill" in problem.hint:
        assert num_layers < pp * vpp - 2
        return
    example = problem.hint.removeprefix("For example ").removesuffix(".")
    assert lay_out(num_layers, pp, vpp, [*_parsed(example)] if "[" in example else int(example))


def _parsed(text: str) -> list[Any]:
    rows = [row.strip("[] ,") for row in text.split("], [")]
    numbers = [[int(item) for item in row.split(",")] for row in rows]
    return numbers if text.startswith("[[") else numbers[0]


@pytest.mark.parametrize(
    ("setting", "value", "table", "layers"),
    [
        pytest.param(DOCUMENT, False, [[0] * 5, [0] * 5], [], id="False"),
        pytest.param((8, 4), [True, False], [[2, 0, 0, 0]], [0, 1], id="short, all bool"),
        pytest.param(
            (8, 2, 2), [[True, 1], [False, 9]], [[2, 1], [0, 2]], [0, 1, 2, 6, 7], id="bools in rows"
        ),
        pytest.param((8, 2, 2), [True, [1, 0]], [[2, 2], [1, 0]], [0, 1, 2, 3, 4], id="bool row"),
    ],
)
def test_tables_without_swap(setting: Any, value: Any, table: Any, layers: list[int]) -> None:
    layout = lay_out(*setting)
    normal, problems = normalise_counts(tupled(value), layout, "recompute_config.recompute")
    assert problems == []
    assert listed(normal) == table
    assert list(layers_from_counts(normal, layout)) == layers


NO_SWAP = "Layer indices are read here only with swap_config.swap: true."


@pytest.mark.parametrize(
    ("setting", "value", "messages"),
    [
        pytest.param(  # the reference never returns
            (8, 4),
            [-1, 0, 0, 0],
            ["recompute[0]: expected a number of layers, 0 or more, found -1."],
            id="E12",
        ),
        pytest.param(
            (8, 2, 2),
            [[0, -1], [0, -2]],
            [
                "recompute[0][1]: expected a number of layers, 0 or more, found -1.",
                "recompute[1][1]: expected a number of layers, 0 or more, found -2.",
            ],
            id="negative in a table",
        ),
        pytest.param(
            (4, 1),
            [0, 3],
            [f"recompute: expected at most 1 number, one per pipeline stage, found 2 numbers. {NO_SWAP}"],
            id="longer than the stages",
        ),
        pytest.param(
            (8, 2, 2),
            [[1, 1]],
            ["recompute: expected 2 rows, one per interleave (pp_interleave_num 2), found 1 row."],
            id="too few rows",
        ),
        pytest.param(
            (8, 2, 1),
            [[1, 1], [1, 1, 0]],
            [
                "recompute: expected 1 row, one per interleave (pp_interleave_num 1), found 2 rows.",
                "recompute[1]: expected 2 numbers, one per pipeline stage, found 3 numbers.",
            ],
            id="too many rows and columns",
        ),
        pytest.param(
            (8, 2, 2),
            [1, [1, 0]],
            ["recompute[0]: expected a row of numbers or a bool, found 1."],
            id="E9",
        ),
    ],
)
def test_rejected_tables(setting: Any, value: Any, messages: list[str]) -> None:
    _, problems = normalise_counts(tupled(value), lay_out(*setting), "recompute")
    assert [str(problem) for problem in problems] == messages


@pytest.mark.parametrize(
    ("value", "normal", "layers"),
    [
        (True, True, [0, 1, 2, 3]),
        (False, (), []),
        ([], (), []),
        ([0, 3], (0, 3), [0, 3]),
        ([2, 1], (2, 1), [1, 2]),
        ([1, 1], (1, 1), [1]),
    ],
)
def test_indices_with_swap(value: Any, normal: Any, layers: list[int]) -> None:
    found, problems = normalise_indices(tupled(value), 4, "recompute")
    assert problems == []
    assert found is True if normal is True else found == normal
    assert list(layers_from_indices(found, 4)) == layers


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        ([0, 4], ["recompute[1]: expected a layer index from 0 to 3, found 4."]),
        ([-1], ["recompute[0]: expected a layer index from 0 to 3, found -1."]),
        ([True], ["recompute[0]: expected a layer index from 0 to 3, found true."]),  # the reference: layer 1
        (
            [[1, 0]],  # E7
            [
                "recompute[0]: expected a layer index from 0 to 3, found [1, 0]. "
                "With swap_config.swap: true this key knows no pipeline stages."
            ],
        ),
    ],
)
def test_rejected_indices(value: Any, messages: list[str]) -> None:
    _, problems = normalise_indices(tupled(value), 4, "recompute")
    assert [str(problem) for problem in problems] == messages


@pytest.mark.parametrize(
    ("setting", "value", "defaults", "normal"),
    [
        pytest.param((4, 2), False, COMM_DEFAULT, {r".*\.norm": [[0, 0]]}, id="False"),
        pytest.param((4, 2), {MUL: []}, SELECT_DEFAULT, {MUL: [[0, 0]]}, id="empty list of an op"),
        pytest.param((4, 2), False, (), {}, id="exclude nothing"),
    ],
)
def test_selection_without_swap(setting: Any, value: Any, defaults: Any, normal: Any) -> None:
    found, problems = normalise_selection(
        tupled(value), lay_out(*setting), defaults, swap=False, where="select"
    )
    assert problems == []
    assert listed(found) == normal


@pytest.mark.parametrize(
    ("value", "normal"),
    [
        pytest.param(
            {"feed_forward": True, "attention": False}, {"feed_forward": True, "attention": []}, id="E8"
        ),
        pytest.param(False, {MUL: [], SILU: []}, id="False"),
        pytest.param([2, 1], {MUL: [2, 1], SILU: [2, 1]}, id="indices"),
        pytest.param([], {}, id="empty"),
    ],
)
def test_selection_with_swap(value: Any, normal: Any) -> None:
    found, problems = normalise_selection(
        tupled(value), lay_out(4), SELECT_DEFAULT, swap=True, where="select"
    )
    assert problems == []
    assert listed(found) == normal


@pytest.mark.parametrize(
    ("value", "defaults", "swap", "messages"),
    [
        pytest.param(
            ["feed_forward"],
            SELECT_DEFAULT,
            True,
            [
                "select: expected a bool, layer indices or a mapping with swap: true, found [feed_forward]. "
                "Write a mapping: {'feed_forward': true}."
            ],
            id="E7",
        ),
        pytest.param(
            [0, 9],  # once, though it holds for two default ops
            SELECT_DEFAULT,
            True,
            ["select[1]: expected a layer index from 0 to 3, found 9."],
            id="index",
        ),
        pytest.param(
            {"attention": [4], MUL: [[1, 0]]},
            SELECT_DEFAULT,
            True,
            [
                "select.attention[0]: expected a layer index from 0 to 3, found 4.",
                r"select.feed_forward\.mul[0]: expected a layer index from 0 to 3, found [1, 0]. "
                "With swap_config.swap: true this key knows no pipeline stages.",
            ],
            id="mapping with swap",
        ),
        pytest.param(
            {"attention": [-1], MUL: [1, 1, 1]},
            SELECT_DEFAULT,
            False,
            [
                "select.attention[0]: expected a number of layers, 0 or more, found -1.",
                r"select.feed_forward\.mul: expected at most 2 numbers, one per pipeline stage, "
                f"found 3 numbers. {NO_SWAP}",
            ],
            id="mapping without swap",
        ),
        pytest.param(
            True,
            (),
            False,
            [
                "select: expected op paths, or a mapping from op path to layers "
                "(this key has no default ops), found true."
            ],
            id="True for an exclude key",
        ),
    ],
)
def test_rejected_selections(value: Any, defaults: Any, swap: bool, messages: list[str]) -> None:
    _, problems = normalise_selection(tupled(value), lay_out(4, 2), defaults, swap=swap, where="select")
    assert [str(problem) for problem in problems] == messages


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "True"),
        ((), "[]"),
        ((0, 3), "[0, 3]"),
        ({}, "{}"),
        (
            {"feed_forward": (0, 3), MUL: True, "attention": ()},
            r"{'feed_forward': [0, 3], 'feed_forward\.mul': True, 'attention': []}",
        ),
    ],
)
def test_formative_with_swap(value: Any, text: str) -> None:
    assert format_formative(value) == text


tables = st.integers(1, 4).flatmap(
    lambda pp: st.lists(
        st.lists(st.integers(1, 5), min_size=pp, max_size=pp).map(tuple), min_size=1, max_size=4
    ).map(tuple)
)
layouts = tables.map(PipelineLayout)


@given(layout=layouts)
def test_every_layer_has_one_place(layout: PipelineLayout) -> None:
    assert layout.num_layers == sum(map(sum, layout.counts))
    assert sorted(chain(*map(layout.layers_of, range(layout.pp)))) == list(range(layout.num_layers))
    for v, row in enumerate(layout.counts):
        for s, count in enumerate(row):
            assert len(layout.chunk(v, s)) == count
            assert {layout.stage_of(layer) for layer in layout.chunk(v, s)} == {s}


@given(layout=layouts, data=st.data())
def test_a_deal_is_fair_and_never_exceeds_a_chunk(layout: PipelineLayout, data: st.DataObject) -> None:
    totals = data.draw(st.lists(st.integers(0, 25) | st.booleans(), max_size=layout.pp))
    table, problems = normalise_counts(tuple(totals), layout, "recompute")
    assert problems == []
    for stage in range(layout.pp):
        dealt = [row[stage] for row in table]
        holds = [row[stage] for row in layout.counts]
        requested = totals[stage] if stage < len(totals) else 0
        asked = (sum(holds) if requested else 0) if isinstance(requested, bool) else requested
        assert sum(dealt) == min(asked, sum(holds))
        assert all(0 <= given_ <= held for given_, held in zip(dealt, holds, strict=True))
        # In turn: an earlier chunk is at most one ahead of a later one that still has room, and never behind.
        for v, (given_, held) in enumerate(zip(dealt, holds, strict=True)):
            if given_ < held:
                assert all(other <= given_ + 1 for other in dealt[:v])
                assert all(other <= given_ for other in dealt[v + 1 :])
    assert len(layers_from_counts(table, layout)) == sum(map(sum, table))


@given(layout=layouts, data=st.data())
def test_a_table_is_clipped_to_its_chunks(layout: PipelineLayout, data: st.DataObject) -> None:
    row = st.lists(st.integers(0, 9), min_size=layout.pp, max_size=layout.pp).map(tuple)
    asked = data.draw(st.lists(row, min_size=layout.vpp, max_size=layout.vpp).map(tuple))
    table, problems = normalise_counts(asked, layout, "recompute")
    assert problems == []
    assert table == tuple(
        tuple(map(min, requested, held)) for requested, held in zip(asked, layout.counts, strict=True)
    )
    assert set(layers_from_counts(table, layout)) == {
        layer
        for v in range(layout.vpp)
        for s in range(layout.pp)
        for layer in layout.chunk(v, s)
        if layer - layout.chunk(v, s).start < asked[v][s]
    }
