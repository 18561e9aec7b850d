r"""MindFormers' golden vectors of the swap plan (S1 to S33) on a Llama of four layers.

Each row says what the reference logs and what takes effect. Where the reference has a defect or silently
matches nothing, ours raises or records an adjustment: ``docs/reference.md`` lists those places.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hf_actswap import MemoryPlan, PlanError
from hf_actswap.plan import Windows
from tests.plan.documents import FIRST_WINS, RULE_1, RULE_2, entry, op, set_lines

PlanOf = Callable[..., MemoryPlan]

LOST = "operator in layer {} that is enabled swap do not work! Because it is enabled recompute."
ALL_LOST = "All layers and ops that are enabled swap do not work! Because recompute = True."


def document(recompute: dict[str, Any] | None = None, /, **swap: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"swap_config": {"swap": True, **swap}}
    return {**found, "recompute_config": recompute} if recompute else found


def op_line(layer: int, *items: str) -> str:
    return f"Set op_swap at layer {layer}: {', '.join(items)}"


def layer_line(layer: int, prefetch: object) -> str:
    return f"Set layer swap at layer {layer} and value is: {prefetch}"


S3 = [op("attention", 20, [0, 1, 2]), op("attention", 10, [3]), op("feed_forward", 15, [1, 2])]
S3_LINES = [
    op_line(0, ".attention, value=20"),
    op_line(1, ".attention, value=20", ".feed_forward, value=15"),
    op_line(2, ".attention, value=20", ".feed_forward, value=15"),
    op_line(3, ".attention, value=10"),
]
S3_FATES = {
    (0, "self_attn"): 20,
    (1, "self_attn"): 20,
    (2, "self_attn"): 20,
    (3, "self_attn"): 10,
    (0, "mlp"): "keep",
    (1, "mlp"): 15,
    (2, "mlp.mul"): 15,
    (3, "mlp"): "keep",
    (1, "input_layernorm"): "keep",
    (1, "output"): "keep",
}
SELECT_LINE = "Set select recompute at layer {}: {}"
DEFAULT_OPS = "feed_forward.mul, feed_forward.w1.activation.silu"


@dataclass(frozen=True)
class Vector:
    """One row of the table.

    Args:
        document: what is written.
        lines: the ``Set ...`` lines in order.
        fates: (layer, op path) -> ``keep``, ``recompute``, or the prefetch number of a swap.
        warnings: the reference's, in order.
        adjustments: as text, in order.
    """

    document: dict[str, Any]
    lines: list[str]
    fates: dict[tuple[int, str], int | str]
    warnings: tuple[str, ...] = ()
    adjustments: tuple[str, ...] = ()


VECTORS = {
    "S1": Vector(
        document(default_prefetch=10),
        [op_line(i, "attention.flash_attention, value=10") for i in range(4)],
        {
            (0, "self_attn.flash_attention"): 10,
            (3, "self_attn.flash_attention"): 10,
            (0, "self_attn"): "keep",
        },
    ),
    "S2": Vector(
        document(layer_swap=[entry(20, [0, 3])]),
        [layer_line(0, 20), layer_line(3, 20)],
        {(0, ""): 20, (0, "mlp.mul"): 20, (0, "output"): 20, (1, ""): "keep", (3, "self_attn.q_proj"): 20},
    ),
    "S3": Vector(document(op_swap=S3), S3_LINES, S3_FATES),
    "S4": Vector(
        document({"select_recompute": {"feed_forward": [0, 3]}}, op_swap=S3),
        [
            SELECT_LINE.format(0, "feed_forward"),
            *S3_LINES[:3],
            SELECT_LINE.format(3, "feed_forward"),
            S3_LINES[3],
        ],
        {**S3_FATES, (0, "mlp"): "recompute", (3, "mlp"): "recompute"},
    ),
    "S5": Vector(
        document({"select_recompute": {"feed_forward": [1, 3]}}, op_swap=S3),
        [
            S3_LINES[0],
            SELECT_LINE.format(1, "feed_forward"),
            *S3_LINES[1:3],
            SELECT_LINE.format(3, "feed_forward"),
            S3_LINES[3],
        ],
        {**S3_FATES, (1, "mlp"): "recompute", (3, "mlp"): "recompute"},
        warnings=(f"feed_forward {LOST.format(1)}",),
        adjustments=(
            f"recompute_config.select_recompute mlp, layers 1: asked swap, got recompute: {RULE_1}",
        ),
    ),
    "S6": Vector(
        document({"recompute": [0]}, op_swap=S3),
        ["Set full recompute at layer 0", *S3_LINES],
        {**S3_FATES, (0, "self_attn"): "recompute", (0, "mlp"): "recompute", (0, "output"): "keep"},
        warnings=(f"attention {LOST.format(0)}",),
        adjustments=(f"recompute_config.recompute self_attn, layers 0: asked swap, got recompute: {RULE_1}",),
    ),
    "S7": Vector(
        document({"recompute": True}, op_swap=S3),
        S3_LINES,
        {
            **{(layer, path): "recompute" for layer in range(4) for path in ("", "self_attn", "mlp.mul")},
            (1, "output"): "keep",
        },
        warnings=(ALL_LOST,),
        adjustments=(
            f"recompute_config.recompute self_attn, layers 0, 3: asked swap, got recompute: {RULE_1}",
            f"recompute_config.recompute self_attn, mlp, layers 1-2: asked swap, got recompute: {RULE_1}",
        ),
    ),
    # The reference's own test says mul and w1, which name nothing at the depth of one: see STRICTER.
    "S9": Vector(
        document(
            layer_swap=[entry(2, [2]), entry(2, True)],
            op_swap=[op(r"feed_forward\.mul", 1, [2]), op(r"feed_forward\.w1", 2, True)],
        ),
        [
            line
            for i in range(4)
            for line in (
                layer_line(i, 2),
                op_line(i, *["feed_forward.mul, value=1"] * (i == 2), "feed_forward.w1, value=2"),
            )
        ],
        {(0, ""): 2, (2, "mlp.mul"): 1, (1, "mlp.mul"): 2, (2, "mlp.gate_proj"): 2, (2, "mlp.act_fn"): 2},
    ),
    "S14-tuple": Vector(
        document(layer_swap=[entry(1, (3,))], op_swap=[op("attention", 4, (2, 3))]),
        [op_line(2, ".attention, value=4"), layer_line(3, 1), op_line(3, ".attention, value=4")],
        {(3, "mlp"): 1, (3, "self_attn"): 4, (2, "mlp"): "keep", (2, "self_attn"): 4},
    ),
    "S15": Vector(
        document(layer_swap=[entry(1, [1, 2]), entry(2, [2, 3])]),
        [layer_line(1, 1), layer_line(2, 1), layer_line(3, 2)],
        {(1, ""): 1, (2, ""): 1, (3, ""): 2},
        adjustments=("swap_config.layer_swap[1], layers 2: asked backward_prefetch 2, got 1: " + FIRST_WINS,),
    ),
    "S15-op": Vector(
        document(op_swap=[op("attention", 1, [1, 2]), op("attention", 2, [2, 3])]),
        [
            op_line(1, ".attention, value=1"),
            op_line(2, ".attention, value=1"),
            op_line(3, ".attention, value=2"),
        ],
        {(1, "self_attn"): 1, (2, "self_attn"): 1, (3, "self_attn"): 2},
        adjustments=(
            f"swap_config.op_swap[1] attention, layers 2: asked backward_prefetch 2, got 1: {FIRST_WINS}",
        ),
    ),
    "S17": Vector(
        document(op_swap=[op("attention", 1, [1]), op("atten.*", 2, [1])]),
        [op_line(1, ".attention, value=1", ".attention, value=2")],
        {(1, "self_attn"): 2, (1, "input_layernorm"): 2, (1, "mlp"): "keep"},
    ),
    # In the reference a plain dot separates nothing, and this path silently matches nothing.
    "S19-plain-dot": Vector(
        document(op_swap=[op("attention.flash_attention", 1, [1])]),
        [op_line(1, "attention.flash_attention, value=1")],
        {(1, "self_attn.flash_attention"): 1, (1, "self_attn"): "keep"},
    ),
    "S20": Vector(
        document(op_swap=[op(r"attention\.flash_attention", 1, [1])]),
        [op_line(1, "attention.flash_attention, value=1")],
        {
            (1, "self_attn.flash_attention"): 1,
            (1, "self_attn"): "keep",
            (0, "self_attn.flash_attention"): "keep",
        },
    ),
    "S22": Vector(
        document(op_swap=[op("attention|feed_forward", 3, [0])]),
        [op_line(0, ".feed_forward, value=3")],
        {(0, "self_attn"): 3, (0, "mlp"): 3, (0, "input_layernorm"): "keep"},
    ),
    "S24-false": Vector(
        document(layer_swap=[entry(2, False)]), [], {(0, "self_attn.flash_attention"): "keep"}
    ),
    "S24-no-layers": Vector(document(layer_swap=[]), [], {(0, "self_attn.flash_attention"): "keep"}),
    "S24-no-ops": Vector(document(op_swap=[]), [], {(0, "self_attn.flash_attention"): "keep"}),
    "S25": Vector(document(layer_swap=entry(7, [2])), [layer_line(2, 7)], {(2, ""): 7, (1, ""): "keep"}),
    "S27": Vector(
        document({"select_recompute": True}, layer_swap=[entry(7, [1])]),
        [
            SELECT_LINE.format(0, DEFAULT_OPS),
            SELECT_LINE.format(1, DEFAULT_OPS),
            layer_line(1, 7),
            SELECT_LINE.format(2, DEFAULT_OPS),
            SELECT_LINE.format(3, DEFAULT_OPS),
        ],
        {
            (0, "mlp.mul"): "recompute",
            (1, "mlp.mul"): "recompute",
            (1, "mlp.act_fn.silu"): "recompute",
            (1, "mlp.up_proj.linear"): "keep",
            (1, "mlp.gate_proj.linear"): "keep",
            (1, "mlp.down_proj"): 7,
            (1, "self_attn"): 7,
            (3, "self_attn"): "keep",
        },
        adjustments=tuple(
            f"{where} {path}, layers 1: asked swap, got {got}: {rule}"
            for where, path, got, rule in (
                ("recompute_config.select_recompute", "mlp.mul", "recompute", RULE_1),
                ("recompute_config.select_recompute", "mlp.act_fn.silu", "recompute", RULE_1),
                ("swap_config", "mlp.up_proj.linear", "keep", RULE_2),
                ("swap_config", "mlp.gate_proj.linear", "keep", RULE_2),
            )
        ),
    ),
    "S29": Vector(
        document({"select_comm_recompute": True}, layer_swap=[entry(7, [1])]),
        [
            line
            for i in range(4)
            for line in (
                f"Set select comm recompute at layer {i}: attention_norm.norm, ffn_norm.norm",
                *[layer_line(1, 7)] * (i == 1),
            )
        ],
        {(1, "input_layernorm"): 7, (0, "input_layernorm"): "keep"},
        adjustments=(
            "recompute_config.select_comm_recompute: asked recompute communication, got no effect: "
            "tensor_parallel_size is 1: there is no communication inside layers",
        ),
    ),
    "S31": Vector(
        document({"recompute": True}, layer_swap=[entry("Auto", True)]),
        [layer_line(i, "Auto") for i in range(4)],
        {(0, ""): "recompute", (3, "mlp"): "recompute", (3, "output"): "keep"},
        warnings=(ALL_LOST,),
        adjustments=(f"recompute_config.recompute, layers 0-3: asked swap, got recompute: {RULE_1}",),
    ),
    "S32": Vector(
        document(
            {"select_recompute": {"mlp": True, "self_attention": [0]}}, op_swap=[op("mlp", "Auto", [0])]
        ),
        [
            SELECT_LINE.format(0, "mlp, self_attention"),
            op_line(0, ".mlp, value=Auto"),
            *[SELECT_LINE.format(i, "mlp") for i in (1, 2, 3)],
        ],
        {
            (0, "mlp"): "recompute",
            (3, "mlp"): "recompute",
            (0, "self_attn"): "recompute",
            (1, "self_attn"): "keep",
        },
        warnings=(
            "mlp operator in all layers that is enabled swap do not work! Because it is enabled recompute.",
        ),
        adjustments=(
            f"recompute_config.select_recompute mlp, layers 0: asked swap, got recompute: {RULE_1}",
        ),
    ),
}


def effect(plan: MemoryPlan, layer: int, path: str) -> int | str:
    """``keep``, ``recompute``, or the prefetch number of a swap, whose release must be its triple."""
    fate = plan.fate(layer, path)
    if fate != "swap":
        return fate
    row = plan.row(layer, path)
    assert row is not None
    assert row.windows is not None
    assert row.windows == Windows(row.windows.prefetch_ops, 3 * row.windows.prefetch_ops)
    return row.windows.prefetch_ops


@pytest.mark.parametrize("name", VECTORS)
def test_vector(name: str, plan_of: PlanOf) -> None:
    vector = VECTORS[name]
    plan = plan_of(vector.document)
    assert set_lines(plan) == vector.lines
    assert {key: effect(plan, *key) for key in vector.fates} == vector.fates
    assert plan.warnings == vector.warnings
    assert tuple(map(str, plan.adjustments)) == vector.adjustments


def test_s30_global_indices_whatever_the_pipeline(plan_of: PlanOf) -> None:
    config = document({"recompute": [0, 4]}, layer_swap=[entry(7, [1, 3])])
    config["parallel_config"] = {"pipeline_stage": 2, "offset": [1, 0]}
    plan = plan_of(config, num_layers=5)
    assert set_lines(plan) == [
        "Set full recompute at layer 0",
        layer_line(1, 7),
        layer_line(3, 7),
        "Set full recompute at layer 4",
    ]
    assert [effect(plan, layer, "mlp") for layer in range(5)] == ["recompute", 7, "keep", 7, "recompute"]
    # Layer 4 is rebuilt from what layer 3 hands on, which therefore stays.
    assert effect(plan, 3, "output") == "keep"
    assert [str(adjustment) for adjustment in plan.adjustments] == [
        f"swap_config output, layers 3: asked swap, got keep: {RULE_2}"
    ]


def test_formative_lines(plan_of: PlanOf) -> None:
    plan = plan_of(
        document({"recompute": [2, 0]}, layer_swap=[entry("auto", [2]), entry(3, [0])], op_swap=S3)
    )
    assert plan.log_lines()[:5] == [
        "Formative layer_recompute: [2, 0]",
        r"Formative select_recompute: {'feed_forward\.mul': [], 'feed_forward\.w1\.activation\.silu': []}",
        r"Formative select_comm_recompute: {'.*\.norm': []}",
        "Formative layer swap: [{'backward_prefetch': 'Auto', 'layers': [2]}, "
        "{'backward_prefetch': 3, 'layers': [0]}]",
        "Formative op swap: {'attention': [{'backward_prefetch': 20, 'layers': [0, 1, 2]}, "
        "{'backward_prefetch': 10, 'layers': [3]}], "
        "'feed_forward': [{'backward_prefetch': 15, 'layers': [1, 2]}]}",
    ]


def test_default_strategy_in_the_formative_line(plan_of: PlanOf) -> None:
    assert plan_of(document(default_prefetch=10)).log_lines()[4] == (
        r"Formative op swap: {'.*\.flash_attention': [{'backward_prefetch': 10, 'layers': True}]}"
    )


def unknown(where: str, path: str, hint: str) -> str:
    return f"{where}: expected a path that names an op of LlamaDecoderLayer, found {path!r}. {hint}"


SOME = (
    "Some that exist: self_attn, self_attn.q_proj, self_attn.q_proj.linear, self_attn.q_proj.matmul, "
    "self_attn.k_proj, self_attn.k_proj.linear, self_attn.k_proj.matmul, self_attn.v_proj, "
    "self_attn.v_proj.linear, self_attn.v_proj.matmul, self_attn.o_proj, self_attn.o_proj.linear."
)
OP_NAME = "swap_config.op_swap[{}].op_name"

# The reference matches nothing here and says nothing.
STRICTER = {
    "S9-depth": (
        document(op_swap=[op("mul", 1, [2]), op("w1", 2, True)]),
        [
            unknown(OP_NAME.format(0), "mul", "Did you mean 'feed_forward.mul'?"),
            unknown(OP_NAME.format(1), "w1", "Did you mean 'feed_forward.w1'?"),
        ],
    ),
    "S18": (
        document(layer_swap=[entry(1, [3, 4, 99])]),
        ["swap_config.layer_swap[0].layers: expected layers from 0 to 3, found 4, 99."],
    ),
    "S18-op": (
        document(op_swap=[op("attention", 1, [3, 4])]),
        ["swap_config.op_swap[0].layers: expected layers from 0 to 3, found 4."],
    ),
    "S19-typo": (
        document(op_swap=[op("attn_typo", 1, [1])]),
        [unknown(OP_NAME.format(0), "attn_typo", "Did you mean 'attention'?")],
    ),
    "S19-full-match": (
        document(op_swap=[op("atten", 1, [1])]),
        [unknown(OP_NAME.format(0), "atten", "Did you mean 'attention'?")],
    ),
    "S33": (
        document({"recompute": [0]}, layer_swap=[entry("Auto", [0])], op_swap=[op("mlp.dense", "Auto", [0])]),
        [unknown(OP_NAME.format(0), "mlp.dense", SOME)],
    ),
}


@pytest.mark.parametrize("name", STRICTER)
def test_where_the_reference_is_silent(name: str, plan_of: PlanOf) -> None:
    written, problems = STRICTER[name]
    with pytest.raises(PlanError) as caught:
        plan_of(written)
    assert [str(problem) for problem in caught.value.problems] == problems
