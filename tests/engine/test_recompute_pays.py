"""An op is run again only if the bytes saved fall; what stays for that reason is an adjustment."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan, model_structure
from hf_actswap.engine import install
from hf_actswap.plan import PlanRow
from tests.engine.test_recompute import held_bytes
from tests.engine.tiny_models import (
    BATCH,
    LENGTH,
    NUM_LAYERS,
    assert_bitwise_equal,
    gradients_of_step,
    on,
    plan_of,
    recompute_rows,
    tiny_llama,
    tiny_neox,
)

LAYERS = range(NUM_LAYERS)
TOKENS, HIDDEN = BATCH * LENGTH, 32
ROW = TOKENS * HIDDEN
FP32, BF16 = torch.float32, torch.bfloat16
NORM = tuple(f"input_layernorm.{name}" for name in ("to", "pow", "mean", "add", "rsqrt", "mul"))


def freed(dtype: torch.dtype, *paths: str) -> tuple[int, list[str], int]:
    """Bytes saved less in each layer, the adjustments, and calls run again in each layer."""
    bare, _ = held_bytes(None, tiny_llama(dtype))
    model = tiny_llama(dtype)
    expected = gradients_of_step(tiny_llama(dtype))
    applied = on(model, plan_of(*recompute_rows(paths, LAYERS)), verify=False)
    assert_bitwise_equal(gradients_of_step(model), expected)
    again, adjustments = (
        applied.stats().recomputes,
        [str(adjustment) for adjustment in applied.plan.adjustments],
    )
    plan = applied.plan
    applied.remove()
    held, _ = held_bytes(plan, tiny_llama(dtype))
    assert (bare - held) % NUM_LAYERS == again % NUM_LAYERS == 0
    return (bare - held) // NUM_LAYERS, adjustments, again // NUM_LAYERS


def stays(path: str, held: int, dropped: int) -> str:
    return (
        f"recompute_config.select_recompute {path}, layers 0-3: asked recompute, got keep: run again it "
        f"would hold {held:,} bytes in a layer in place of {dropped:,}, and an op is recomputed only if the "
        "bytes saved fall"
    )


def test_a_chain_holds_its_bf16_input_and_nothing_between() -> None:
    """to fp32, pow, mean, add, rsqrt, mul, to bf16, mul: saved are the fp32 copy, 1/rms and two results."""
    saved_otherwise = 4 * ROW + 4 * TOKENS + 2 * ROW + 2 * ROW
    assert freed(BF16, *NORM) == (saved_otherwise - 2 * ROW, [], 8)


def test_in_fp32_there_is_no_cast_and_the_input_is_saved_anyway() -> None:
    assert freed(FP32, *NORM) == (4 * TOKENS + 4 * ROW + 4 * ROW, [], 6)


@pytest.mark.parametrize(
    ("dtype", "path", "freed_bytes", "again", "adjustments"),
    [
        # The last cast would hold the fp32 product in place of a bf16 result; the first one pays.
        (BF16, "to", 2 * ROW, 1, [stays("input_layernorm.to", 4 * ROW, 2 * ROW)]),
        (FP32, "to", 0, 0, []),  # no cast, nothing to run again
        # 1/rms from the variance: as many bytes.
        (BF16, "rsqrt", 0, 0, [stays("input_layernorm.rsqrt", 4 * TOKENS, 4 * TOKENS)]),
        (FP32, "rsqrt", 0, 0, [stays("input_layernorm.rsqrt", 4 * TOKENS, 4 * TOKENS)]),
        # What nobody saves is not run again, and nothing is held for it.
        (BF16, "pow", 0, 0, []),
        (BF16, "mean", 0, 0, []),
        # Two products; in bf16 nobody saves the first, which is cast.
        (FP32, "mul", 8 * ROW, 2, []),
        (BF16, "mul", 2 * ROW, 1, []),
    ],
)
def test_a_link_alone(
    dtype: torch.dtype, path: str, freed_bytes: int, again: int, adjustments: list[str]
) -> None:
    assert freed(dtype, f"input_layernorm.{path}") == (freed_bytes, adjustments, again)


def test_links_that_pay_only_together() -> None:
    """The product in fp32 and its cast: nobody saves the product, and the cast alone would hold it."""
    assert freed(BF16, "input_layernorm.mul", "input_layernorm.to") == (
        # held: the bf16 input, 1/rms; dropped: the fp32 copy, the cast product, the result
        4 * ROW + 2 * ROW + 2 * ROW - 2 * ROW,
        [],
        4,
    )


def test_a_residual_sum_holds_both_of_its_terms() -> None:
    """In fp32 the norm saves the sum; one of its terms is saved anyway, the other would have to be held."""
    assert freed(FP32, "add") == (0, [stays("add", 4 * ROW, 4 * ROW)], 0)


@pytest.mark.parametrize("named", ["mlp.down_proj.1", "mlp.down_proj.1.0.gt"])
def test_a_module_that_would_hold_more_than_it_drops(named: str) -> None:
    """Its only function saves a mask; its input is nobody else's. The function by itself holds as much."""
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Sequential(_Halved()))
    expected = gradients_of_step(model)
    paths = list(dict.fromkeys(["mlp.down_proj.1", named]))
    applied = on(model, plan_of(*recompute_rows(paths, LAYERS)), verify=False)
    assert_bitwise_equal(gradients_of_step(model), expected)
    assert [str(adjustment) for adjustment in applied.plan.adjustments] == [
        stays(path, 4 * ROW, 1 * ROW) for path in paths
    ]
    assert applied.plan.fate(1, "mlp.down_proj.1") == "keep"
    assert applied.stats().recomputes == 0


def test_a_call_that_has_a_row_of_its_own() -> None:
    model, path = tiny_llama(BF16), "input_layernorm.rsqrt"
    rows = [(PlanRow(layer, path, "keep"), PlanRow(layer, path, "recompute", 0)) for layer in LAYERS]
    applied = on(model, plan_of(*(row for pair in rows for row in pair)), verify=False)
    gradients_of_step(model)
    assert [str(adjustment) for adjustment in applied.plan.adjustments] == [
        stays(path, 4 * TOKENS, 4 * TOKENS)
    ]
    assert applied.stats().recomputes == 0


class _Halved(nn.Module):
    """Saves a mask of a byte for each element."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.masked_fill(hidden > 0, 0.0)


def test_one_call_of_an_op_may_stay_where_others_pay() -> None:
    model = tiny_neox(attn_implementation="eager")
    applied = on(model, plan_of(*recompute_rows(["attention.flash_attention"], [1])), verify=False)
    gradients_of_step(model)
    core = [row for row in applied.plan.rows if row.op_path == "attention.flash_attention"]
    assert [(row.fate, row.ordinal) for row in core] == [("recompute", None), ("keep", 5), ("keep", 6)]
    assert MemoryPlan.from_json(applied.plan.to_json()) == applied.plan


def test_it_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama(BF16)
    on(model, plan_of(*recompute_rows(["input_layernorm.rsqrt"], LAYERS)))
    caplog.clear()  # the plan itself was logged
    with caplog.at_level(logging.INFO, logger="hf_actswap"):
        gradients_of_step(model)
        gradients_of_step(model)  # decided once
    expected = stays("input_layernorm.rsqrt", 4 * TOKENS, 4 * TOKENS)
    assert [record.message for record in caplog.records if record.levelno == logging.INFO] == [expected]
    (warned,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warned.startswith("The plan recomputes nothing in a step")


class _NoFakes(nn.Module):
    """Reads data, which fake tensors do not have."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden.sum().item()
        return self.norm(hidden)


def test_where_nothing_can_be_known_the_plan_stands(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama(BF16)
    expected = gradients_of_step(model)
    plan, shape = plan_of(*recompute_rows(["input_layernorm.rsqrt"], LAYERS)), model_structure(model)
    model.model.norm = _NoFakes(model.model.norm)
    with caplog.at_level(logging.INFO, logger="hf_actswap"), install(model, plan, shape) as applied:
        found = gradients_of_step(model)
        assert applied.stats().recomputes == NUM_LAYERS
        assert applied.plan == plan
    assert "All that is named is recomputed, whether it pays or not: no fake run" in caplog.text
    assert [name for name in expected if not torch.equal(expected[name], found[_renamed(name)])] == []


def _renamed(name: str) -> str:
    return name.replace("model.norm.", "model.norm.norm.")


def test_whole_layers_are_never_judged() -> None:
    rows = (*recompute_rows([""], LAYERS), PlanRow(1, "mlp.mul", "keep"))
    model = tiny_llama(BF16)
    applied = on(model, plan_of(*rows), verify=False)
    gradients_of_step(model)
    assert applied.plan.rows == rows
    assert applied.plan.adjustments == ()
