"""torchao's Float8Linear under every kind of plan: the gradients are those of the same layers without one.

On a CPU the products are emulated (cast to fp8, multiplied in the wider type): what autograd sees is as on an
accelerator as well: scales, casts and an ``autograd.Function`` that saves them.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from hf_actswap import MemoryPlan, apply, model_structure, resolve_plan
from hf_actswap.config import load_config
from tests.engine.pitfalls.odd_layers import same_gradients
from tests.engine.tiny_models import (
    NUM_LAYERS,
    gradients_of_step,
    plan_of,
    plans,
    recompute_rows,
    tiny_llama,
)

OPS = ["mlp.mul", "mlp.act_fn.silu", "input_layernorm"]
PLANS = {
    **plans("everything swapped", "mlp swapped", "mlp recomputed", "layers recomputed"),
    "ops recomputed": plan_of(*recompute_rows(OPS, range(NUM_LAYERS))),
}


def in_fp8() -> nn.Module:
    float8: Any = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    model = tiny_llama(use_cache=False)
    config = float8.Float8LinearConfig(emulate=True)
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: name != "lm_head"
    )
    assert type(model.model.layers[0].mlp.gate_proj).__name__ == "Float8Linear"
    return model


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_fp8_layers(plan: MemoryPlan) -> None:
    wide, name = gradients_of_step(tiny_llama(use_cache=False)), "model.layers.0.mlp.gate_proj.weight"
    assert not gradients_of_step(in_fp8())[name].equal(wide[name])
    stats = same_gradients(in_fp8, plan, steps=3)
    assert stats.offloads + stats.recomputes > 0


def test_the_references_names_mean_fp8_layers_too() -> None:
    model = in_fp8()
    rule = {"op_name": r"feed_forward\.w1\.matmul", "backward_prefetch": 5, "layers": True}
    document = {"swap_config": {"swap": True, "op_swap": [rule]}}
    plan = resolve_plan(load_config(document), model_structure(model))
    assert {row.op_path for row in plan.rows} == {"mlp.gate_proj.mm"}
    with apply(model, {**document, "memory": {"min_tensor_mib": 1e-6}}) as applied:
        gradients_of_step(model)
        assert applied.stats().offloads == NUM_LAYERS
