r"""MindFormers' golden vectors of recomputation without swap (R1 to R26), and the documents' 48-layer model.

They go the whole way, from the document over its normal form to fates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from hf_actswap import MemoryPlan, PlanError, apply, load_config, model_structure, resolve_plan
from tests.plan.documents import (
    EXCLUDE_BEATS,
    FULL_BEATS,
    MUL,
    NO_COMMUNICATION,
    NO_COUNTERPART,
    SILU,
    set_lines,
)

PlanOf = Callable[..., MemoryPlan]
MakeModel = Callable[..., nn.Module]
Gradients = Callable[[nn.Module], dict[str, torch.Tensor]]

W1_MATMUL, W3_MATMUL = r"feed_forward\.w1\.matmul", r"feed_forward\.w3\.matmul"
FFN_NORM, ATTENTION_NORM = r"ffn_norm\.norm", r"attention_norm\.norm"

FULL = "Set full recompute at layer {}"
SELECT = "Set select recompute on at layer {}: {}"
COMM = "Set select comm recompute on at layer {}: {}"


def pipeline(pp: int, vpp: int = 1, offset: Any = 0, **recompute: Any) -> dict[str, Any]:
    return {
        "parallel_config": {"pipeline_stage": pp, "pp_interleave_num": vpp, "offset": offset},
        "recompute_config": recompute,
    }


def layers_with(plan: MemoryPlan, path: str, fate: str = "recompute") -> list[int]:
    return [layer for layer in range(plan.num_layers) if plan.fate(layer, path) == fate]


@dataclass(frozen=True)
class Full:
    """``recompute`` alone: its normal form, and the layers recomputed."""

    document: dict[str, Any]
    num_layers: int
    formative: str
    layers: list[int]


R19 = [3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2, 0]
FULL_VECTORS = {
    "R7": Full(pipeline(4, recompute=[2, 1, 0, 0]), 8, "[[2, 1, 0, 0]]", [0, 1, 2]),
    "R8": Full(pipeline(4, recompute=[9, 1, 0, 0]), 8, "[[2, 1, 0, 0]]", [0, 1, 2]),
    "R10": Full(pipeline(4, recompute=[True, 1, False, 0]), 8, "[[2, 1, 0, 0]]", [0, 1, 2]),
    "R11": Full(pipeline(4, recompute=[]), 8, "[[0, 0, 0, 0]]", []),
    "R13": Full(pipeline(2, 3, recompute=[4, 2]), 12, "[[2, 1], [1, 1], [1, 0]]", [0, 1, 2, 4, 6, 8]),
    "R15": Full(pipeline(2, 2, recompute=[[5, 1], [0, 9]]), 8, "[[2, 1], [0, 2]]", [0, 1, 2, 6, 7]),
    "R18": Full(
        {
            **pipeline(2, 2, recompute=[[1, 1]]),
            "parallel": {"pipeline_config": {"pipeline_interleave": False}},
        },
        8,
        "[[1, 1]]",
        [0, 4],
    ),
    "R19": Full(
        pipeline(16, recompute=R19),
        64,
        f"[{R19}]",
        [layer for layer in range(64) if layer not in (3, 55, 58, 59, 60, 61, 62, 63)],
    ),
    "true": Full(pipeline(2, recompute=True), 4, "[[2, 2]]", [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", FULL_VECTORS)
def test_full_recompute(name: str, plan_of: PlanOf) -> None:
    vector = FULL_VECTORS[name]
    plan = plan_of(vector.document, num_layers=vector.num_layers)
    assert f"Formative layer_recompute: {vector.formative}" in plan.log_lines()
    assert set_lines(plan) == [FULL.format(layer) for layer in vector.layers]
    assert layers_with(plan, "mlp.mul") == vector.layers
    assert layers_with(plan, "output") == []  # a recomputed layer keeps what the next one starts from
    said = [item.asked for item in plan.adjustments]
    assert said == {
        "R8": ["9 layers of stage 0"],
        "R15": ["5 layers of stage 0, interleave 0", "9 layers of stage 1, interleave 1"],
    }.get(name, [])


@dataclass(frozen=True)
class Select:
    """Selective keys: Formative lines (select, comm, excludes), and where each op is recomputed."""

    document: dict[str, Any]
    formative: list[str]
    recomputed: dict[str, list[int]]
    lines: list[str]
    adjustments: tuple[str, ...] = ()


def comm_adjustment(key: str = "select_comm_recompute", asked: str = "recompute communication") -> str:
    return f"recompute_config.{key}: asked {asked}, got no effect: {NO_COMMUNICATION}"


ALL = [0, 1, 2, 3]
DEFAULT_NAMES = "feed_forward.mul, feed_forward.w1.activation.silu"
NORM_NAMES = "attention_norm.norm, ffn_norm.norm"
OFF = rf"Formative select_recompute: {{'{MUL}': [[0, 0]], '{SILU}': [[0, 0]]}}"
COMM_OFF = r"Formative select_comm_recompute: {'.*\.norm': [[0, 0]]}"

SELECT_VECTORS = {
    "R20": Select(
        pipeline(2, select_recompute=True, select_comm_recompute=True),
        [
            rf"Formative select_recompute: {{'{MUL}': [[2, 2]], '{SILU}': [[2, 2]]}}",
            r"Formative select_comm_recompute: {'.*\.norm': [[2, 2]]}",
        ],
        {"mlp.mul": ALL, "mlp.act_fn.silu": ALL, "mlp.gate_proj": []},
        [line for i in ALL for line in (SELECT.format(i, DEFAULT_NAMES), COMM.format(i, NORM_NAMES))],
        (comm_adjustment(),),
    ),
    "R21": Select(
        pipeline(2, select_recompute=[1, 0], select_comm_recompute=[2, 1]),
        [
            rf"Formative select_recompute: {{'{MUL}': [[1, 0]], '{SILU}': [[1, 0]]}}",
            r"Formative select_comm_recompute: {'.*\.norm': [[2, 1]]}",
        ],
        {"mlp.mul": [0], "mlp.act_fn.silu": [0]},
        [SELECT.format(0, DEFAULT_NAMES), *[COMM.format(i, NORM_NAMES) for i in (0, 1, 2)]],
        (comm_adjustment(),),
    ),
    "R22": Select(
        pipeline(2, select_recompute=[MUL, "attention"]),
        [rf"Formative select_recompute: {{'{MUL}': [[2, 2]], 'attention': [[2, 2]]}}", COMM_OFF],
        {"mlp.mul": ALL, "self_attn": ALL, "mlp.act_fn.silu": []},
        [SELECT.format(i, "feed_forward.mul, attention") for i in ALL],
    ),
    "R24-list": Select(
        pipeline(2, select_recompute=[]),
        ["Formative select_recompute: {}", COMM_OFF],
        {"mlp.mul": []},
        [],
    ),
    "R24-mapping": Select(
        pipeline(2, select_recompute={}),
        ["Formative select_recompute: {}", COMM_OFF],
        {"mlp.mul": []},
        [],
    ),
    "R25": Select(
        pipeline(2, recompute=[1, 0], select_recompute=True, select_comm_recompute=True),
        [
            rf"Formative select_recompute: {{'{MUL}': [[2, 2]], '{SILU}': [[2, 2]]}}",
            r"Formative select_comm_recompute: {'.*\.norm': [[2, 2]]}",
        ],
        {"": [0], "mlp.mul": ALL, "mlp.act_fn.silu": ALL, "self_attn": [0]},
        [
            FULL.format(0),
            *(
                line
                for i in (1, 2, 3)
                for line in (SELECT.format(i, DEFAULT_NAMES), COMM.format(i, NORM_NAMES))
            ),
        ],
        (
            *(
                f"recompute_config.select_recompute {pattern}, layers 0: asked selective recompute, "
                f"got full recompute: {FULL_BEATS}"
                for pattern in (MUL, SILU)
            ),
            comm_adjustment(),
        ),
    ),
    "R26": Select(
        pipeline(
            2,
            select_recompute={r"feed_forward\.w1": True, MUL: True, r"feed_forward\.w2\.reshape": True},
            select_recompute_exclude={SILU: [1]},
            select_comm_recompute_exclude={MUL: [1]},
        ),
        [
            rf"Formative select_recompute: {{'feed_forward\.w1': [[2, 2]], '{MUL}': [[2, 2]], "
            r"'feed_forward\.w2\.reshape': [[2, 2]]}",
            COMM_OFF,
            rf"Formative select_recompute_exclude: {{'{SILU}': [[1, 0]]}}",
            rf"Formative select_comm_recompute_exclude: {{'{MUL}': [[1, 0]]}}",
        ],
        {
            "mlp.gate_proj": ALL,
            "mlp.act_fn.silu": [1, 2, 3],
            "mlp.mul": ALL,
            "mlp.down_proj": [],
        },
        [
            SELECT.format(0, "feed_forward.w1, feed_forward.mul, feed_forward.w2.reshape"),
            "Set select recompute exclude at layer 0: feed_forward.w1.activation.silu",
            "Set select comm recompute exclude at layer 0: feed_forward.mul",
            *(
                SELECT.format(i, "feed_forward.w1, feed_forward.mul, feed_forward.w2.reshape")
                for i in (1, 2, 3)
            ),
        ],
        (
            r"recompute_config.select_recompute feed_forward\.w2\.reshape, layers 0-3: asked a fate, "
            f"got no effect: {NO_COUNTERPART}",
            f"recompute_config.select_recompute_exclude {SILU}, layers 0: asked recompute, got keep: "
            f"{EXCLUDE_BEATS}",
            comm_adjustment("select_comm_recompute_exclude", "keep communication"),
        ),
    ),
}


@pytest.mark.parametrize("name", SELECT_VECTORS)
def test_selective_recompute(name: str, plan_of: PlanOf) -> None:
    vector = SELECT_VECTORS[name]
    plan = plan_of(vector.document)
    assert [line for line in plan.log_lines() if line.startswith("Formative select")] == vector.formative
    assert {path: layers_with(plan, path) for path in vector.recomputed} == vector.recomputed
    assert set_lines(plan) == vector.lines
    assert tuple(map(str, plan.adjustments)) == vector.adjustments
    assert plan.warnings == ()


# The documents' example: 48 layers on 5 stages, interleaved twice (R1 to R6 over layout L1).
DOCUMENT_PIPELINE = {"pp": 5, "vpp": 2, "offset": [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]}
DOCUMENT_RECOMPUTE: dict[str, Any] = {
    "recompute": [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
    "select_recompute": {
        SILU: True,
        MUL: True,
        W1_MATMUL: [[1, 0, 0, 0, 0], [2, 1, 0, 0, 0]],
        W3_MATMUL: [2, 1, 0, 0, 0],
    },
    "select_comm_recompute": [FFN_NORM, ATTENTION_NORM],
}
EVERY = "[[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]"
FULL_LAYERS = [0, 1, 4, 24]
STAGE_0 = [*range(4), *range(24, 29)]


def document_lines(layer: int) -> list[str]:
    if layer in FULL_LAYERS:
        return [FULL.format(layer)]
    w1 = ", feed_forward.w1.matmul" if layer in (25, 29) else ""
    return [
        SELECT.format(layer, f"feed_forward.w1.activation.silu, feed_forward.mul{w1}"),
        COMM.format(layer, "ffn_norm.norm, attention_norm.norm"),
    ]


@pytest.fixture(scope="module")
def document_model(tiny_model: MakeModel) -> nn.Module:
    return tiny_model("llama", 48)


@pytest.fixture(scope="module")
def document_plan(document_model: nn.Module) -> MemoryPlan:
    text = yaml.safe_dump(pipeline(**DOCUMENT_PIPELINE, **DOCUMENT_RECOMPUTE), sort_keys=False)
    return resolve_plan(load_config(text), model_structure(document_model))


STAGES = [0] * 4 + [1] * 5 + [2] * 5 + [3] * 5 + [4] * 5 + [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5 + [4] * 4


def test_document_tables(document_plan: MemoryPlan) -> None:
    assert document_plan.log_lines()[:4] == [
        "num_layers per stage: [[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]",
        "Accumulated num_layers per stage: [[4, 9, 14, 19, 24], [29, 34, 39, 44, 48]]",
        f"Pipeline id list with start_stage: {STAGES}",
        f"Interleave id list: {[0] * 24 + [1] * 24}",
    ]
    assert document_plan.log_lines()[4:7] == [
        "Formative layer_recompute: [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]",
        f"Formative select_recompute: {{'{SILU}': {EVERY}, '{MUL}': {EVERY}, "
        f"'{W1_MATMUL}': [[1, 0, 0, 0, 0], [2, 1, 0, 0, 0]], "
        f"'{W3_MATMUL}': [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]}}",
        f"Formative select_comm_recompute: {{'{FFN_NORM}': {EVERY}, '{ATTENTION_NORM}': {EVERY}}}",
    ]


def test_document_lines(document_plan: MemoryPlan) -> None:
    assert document_plan.log_lines()[7:] == [line for layer in range(48) for line in document_lines(layer)]


def test_document_fates(document_plan: MemoryPlan) -> None:
    def recomputed(path: str) -> list[int]:
        return layers_with(document_plan, path)

    assert recomputed("") == FULL_LAYERS
    assert recomputed("mlp.mul") == recomputed("mlp.act_fn.silu") == list(range(48))
    assert recomputed("mlp.gate_proj.linear") == sorted([*FULL_LAYERS, 25, 29])
    assert recomputed("mlp.up_proj.linear") == FULL_LAYERS  # w3.matmul: its layers are all full
    assert recomputed("input_layernorm") == recomputed("mlp.down_proj") == FULL_LAYERS
    assert recomputed("output") == []
    assert {row.fate for row in document_plan.rows} == {"recompute", "keep"}


def test_document_adjustments(document_plan: MemoryPlan) -> None:
    full = f"asked selective recompute, got full recompute: {FULL_BEATS}"
    where = "recompute_config.select_recompute"
    assert [str(adjustment) for adjustment in document_plan.adjustments] == [
        f"{where} {SILU}, layers 0-1, 4, 24: {full}",
        f"{where} {MUL}, layers 0-1, 4, 24: {full}",
        f"{where} {W1_MATMUL}, layers 0, 24: {full}",
        f"{where} {W3_MATMUL}, layers 0, 4, 24: {full}",
        comm_adjustment(),
    ]


def test_document_plan_through_json(document_plan: MemoryPlan) -> None:
    assert MemoryPlan.from_json(document_plan.to_json()) == document_plan


def test_document_gradients_are_bitwise_those_of_no_plan(
    document_model: nn.Module, document_plan: MemoryPlan, gradients: Gradients
) -> None:
    expected = gradients(document_model)
    with apply(document_model, document_plan) as applied:
        found = gradients(document_model)
        assert applied.stats().recomputes > 0
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(("stage", "layers"), [(0, STAGE_0), (4, [*range(19, 24), *range(44, 48)])])
def test_a_stage_takes_its_part(
    stage: int, layers: list[int], tiny_model: MakeModel, document_plan: MemoryPlan
) -> None:
    """Rows speak of the model's own layers, lines of global ones; equal ops have equal fates."""
    document = pipeline(**DOCUMENT_PIPELINE, **DOCUMENT_RECOMPUTE)
    document["model"] = {"model_config": {"num_layers": 48}}
    plan = resolve_plan(load_config(document), model_structure(tiny_model("llama", len(layers))), stage=stage)
    assert plan.num_layers == len(layers)
    assert plan.log_lines()[:7] == document_plan.log_lines()[:7]
    assert plan.log_lines()[7:] == [line for layer in layers for line in document_lines(layer)]
    for own, layer in enumerate(layers):
        of_whole = [row for row in document_plan.rows if row.scope == layer]
        assert [row for row in plan.rows if row.scope == own] == [
            type(row)(own, row.op_path, row.fate, row.ordinal, row.windows) for row in of_whole
        ]
    assert MemoryPlan.from_json(plan.to_json()) == plan


def test_a_stage_across_a_chunk_border(tiny_structure: Callable[..., Any]) -> None:
    """Rule 2 across layers counts neighbours of the whole model, not of the part."""
    document = {
        **pipeline(2, 2),
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 2, "layers": [0, 1, 4, 5]}]},
        "recompute_config": {"recompute": [5]},
        "model": {"model_config": {"num_layers": 8}},
    }
    # Stage 0 holds layers 0, 1, 4, 5: its own layer 3 is layer 5, recomputed from layer 4's output.
    plan = resolve_plan(load_config(document), tiny_structure("llama", 4), stage=0)
    assert [plan.fate(own, "output") for own in range(4)] == ["swap", "swap", "keep", "keep"]
    document["recompute_config"] = {"recompute": [4]}
    plan = resolve_plan(load_config(document), tiny_structure("llama", 4), stage=0)
    # Layer 4 is rebuilt from layer 3's output, which another stage holds; layer 1's may be swapped.
    assert [plan.fate(own, "output") for own in range(4)] == ["swap", "swap", "keep", "swap"]


@pytest.mark.parametrize(
    ("stage", "num_layers", "own", "problem"),
    [
        (
            0,
            None,
            2,
            "model.model_config.num_layers: expected the layer count of the whole model, "
            "since the model given holds one stage, found nothing.",
        ),
        (0, 4, 3, "stage: expected 2 layers on stage 0, found 3 layers in the model given."),
        (2, 4, 2, "stage: expected 0 to 1, found 2."),
    ],
)
def test_a_stage_that_cannot_be(
    stage: int, num_layers: int | None, own: int, problem: str, tiny_structure: Callable[..., Any]
) -> None:
    document = pipeline(2, recompute=True)
    if num_layers is not None:
        document["model"] = {"model_config": {"num_layers": num_layers}}
    with pytest.raises(PlanError) as caught:
        resolve_plan(load_config(document), tiny_structure("llama", own), stage=stage)
    assert [str(problem) for problem in caught.value.problems] == [problem]
