"""What is written in place after an op has read it: the op is kept, and the plan says so beforehand."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan, apply, load_config, model_structure, resolve_plan
from hf_actswap.plan import PlanRow
from hf_actswap.plan.settle import keep_what_is_overwritten, settled
from tests.engine.tiny_models import (
    NUM_LAYERS,
    assert_bitwise_equal,
    gradients_of_step,
    plan_of,
    recompute_rows,
    swap_rows,
    tiny_llama,
    tiny_mixtral,
)

LAYERS = range(NUM_LAYERS)


def stays(path: str, layers: str) -> str:
    return (
        f"recompute_config.select_recompute {path}, layers {layers}: asked recompute, got keep: what it "
        "reads is written in place afterwards, so that it could not be run again from it"
    )


def texts(plan: MemoryPlan) -> list[str]:
    return [str(adjustment) for adjustment in plan.adjustments]


@pytest.mark.parametrize(
    ("selection", "fates", "adjustments"),
    [
        ({r"mlp\.gate\.sum": True}, {"sum": "keep"}, [stays("mlp.gate.sum", "0-3")]),
        ({r"mlp\.gate\.sum": [1]}, {"sum": "keep"}, [stays("mlp.gate.sum", "0")]),
        # The scores are rebuilt as they were returned.
        ({r"mlp\.gate\.(sum|topk)": True}, {"sum": "recompute", "topk": "recompute"}, []),
        ({r"mlp\.gate": True}, {"sum": "recompute", "topk": "recompute"}, []),
        (
            {r"mlp\.gate\.(sum|softmax)": True},
            {"sum": "keep", "softmax": "recompute"},
            [stays("mlp.gate.sum", "0-3")],
        ),
    ],
)
def test_a_router_divides_its_scores_by_their_sum_in_place(
    selection: dict[str, object], fates: dict[str, str], adjustments: list[str]
) -> None:
    model = tiny_mixtral()
    plan = resolve_plan(
        load_config({"recompute_config": {"select_recompute": selection}}), model_structure(model)
    )
    assert {name: plan.fate(0, f"mlp.gate.{name}", 0) for name in fates} == fates
    assert texts(plan) == adjustments
    expected = gradients_of_step(tiny_mixtral())
    with apply(model, plan) as applied:
        assert_bitwise_equal(gradients_of_step(model), expected)
        assert bool(applied.stats().recomputes) == ("recompute" in fates.values())


def test_what_a_kept_op_reads_is_swapped_as_written() -> None:
    """Rule 2 keeps the inputs of what is recomputed; the sum is not."""
    document = {
        "swap_config": {
            "swap": True,
            "op_swap": [{"op_name": r"mlp\.gate\.topk", "backward_prefetch": 3, "layers": True}],
        },
        "recompute_config": {"select_recompute": {r"mlp\.gate\.sum": True}},
    }
    plan = resolve_plan(load_config(document), model_structure(tiny_mixtral()))
    assert plan.fate(0, "mlp.gate.topk", 0) == "swap"
    assert texts(plan) == [stays("mlp.gate.sum", "0-3")]


def test_a_plan_that_was_written_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_mixtral()
    rows = (*recompute_rows(["mlp.gate.sum"], [1, 2]), *swap_rows(["self_attn"], [1]))
    with caplog.at_level(logging.INFO, logger="hf_actswap"), apply(model, plan_of(*rows)) as applied:
        assert_bitwise_equal(gradients_of_step(model), gradients_of_step(tiny_mixtral()))
        assert texts(applied.plan) == [stays("mlp.gate.sum", "1-2")]
        assert caplog.messages.count(stays("mlp.gate.sum", "1-2")) == 1
        assert applied.plan.fate(1, "self_attn") == "swap"
        assert settled(applied.plan, applied.structure, None) is applied.plan


class _InPlace(nn.Module):
    """``neg`` reads what is written after it, ``exp`` what is written before and after it."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.relu = mlp, nn.ReLU(inplace=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = self.mlp(hidden)
        doubled = whole * 2
        first = doubled.neg().neg()
        changed = doubled.add_(1)
        second = changed.exp()
        return first * second + self.relu(changed)


def in_place() -> nn.Module:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp = _InPlace(layer.mlp)
    return model


@pytest.mark.parametrize(
    ("paths", "kept"),
    [
        (["mlp.neg"], [("mlp.neg", 0)]),  # the second one reads what the first returned
        (["mlp.mul", "mlp.neg"], []),  # the doubled tensor is rebuilt as it was
        (["mlp.exp"], [("mlp.exp", None)]),
        (["mlp.mul", "mlp.exp"], [("mlp.exp", None)]),  # rebuilt, it would not have been written yet
        (["mlp.relu"], [("mlp.relu", None)]),
        (["mlp"], []),
        ([""], []),
    ],
)
def test_only_what_cannot_be_run_again_is_kept(paths: list[str], kept: list[tuple[str, int | None]]) -> None:
    model = in_place()
    chosen = keep_what_is_overwritten(plan_of(*recompute_rows(paths, LAYERS)), model_structure(model))
    rows = [row for row in chosen.rows if row.fate == "keep" and row.scope == 2]
    assert [(row.op_path, row.ordinal) for row in rows] == kept
    assert texts(chosen) == [stays(path, "0-3") for path, _ in kept]
    with apply(model, plan_of(*recompute_rows(paths, LAYERS))):
        assert_bitwise_equal(gradients_of_step(model), gradients_of_step(in_place()))


def test_a_producer_that_stays_takes_its_readers_along() -> None:
    """That it costs more than it saves shows only with the first batch."""
    model = in_place()
    with apply(model, plan_of(*recompute_rows(["mlp.mul", "mlp.neg"], LAYERS))) as applied:
        gradients_of_step(model)
        doubled = applied.plan.fate(0, "mlp.mul", 0)
        assert applied.plan.fate(0, "mlp.neg", 0) == doubled


def test_where_functions_are_not_known_the_plan_stands() -> None:
    shape = model_structure(in_place())
    plan = plan_of(*recompute_rows(["mlp.sin"], LAYERS))
    blind = replace(shape, layers=tuple(replace(layer, stale_reads=()) for layer in shape.layers))
    assert keep_what_is_overwritten(plan, blind) is plan
    assert keep_what_is_overwritten(plan_of(PlanRow(0, "mlp.sin", "keep")), shape).adjustments == ()
