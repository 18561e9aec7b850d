"""A plan that does nothing in its first step says so once, with the reason."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, OPTConfig, OPTForCausalLM

from hf_actswap import MemoryPlan, apply
from hf_actswap.plan import PlanRow
from tests.engine.tiny_models import (
    NUM_LAYERS,
    batch,
    forward,
    on,
    one_step,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
    tiny_llama,
)
from tests.plan.stacked_models import IDS, TOWER, tiny
from tests.plan.test_stacks import DEFAULT

LAYERS = range(NUM_LAYERS)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = (item for item in caplog.records if item.name.startswith("hf_actswap"))
    return [item.getMessage() for item in ours if item.levelno >= logging.WARNING]


def warned(model: nn.Module, plan: MemoryPlan, caplog: pytest.LogCaptureFixture, steps: int = 3) -> list[str]:
    """What is said in some steps under a plan, and when it is taken off."""
    caplog.clear()
    applied = on(model, plan)
    for step in range(steps):
        one_step(model, step)
    applied.remove()
    return warnings_in(caplog)


@pytest.mark.parametrize("steps", [1, 3])
def test_everything_is_too_small(steps: int, caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of(*swap_rows(["self_attn"], [0]), min_tensor_bytes=10**6)
    (line,) = warned(tiny_llama(), plan, caplog, steps)
    assert line.startswith("The plan swaps nothing in a step: all that it names stays: ")
    assert line.endswith(" bytes smaller than min_tensor_mib.")


def test_frozen_layers(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    model.model.requires_grad_(False)
    both = plan_of(*swap_rows(["self_attn"], [0, 1]), *recompute_rows([""], [2, 3]))
    nothing = "nothing in a step: autograd saves nothing of what it names"
    assert warned(model, both, caplog) == [
        f"The plan swaps {nothing} (0-1), where no weight needs a gradient.",
        f"The plan recomputes {nothing} (2-3), where no weight needs a gradient.",
    ]


def test_a_stack_that_the_batch_does_not_reach(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("gemma3")
    with apply(model, {"stacks": {"vision_tower": DEFAULT}}):
        for _ in range(2):
            model(input_ids=IDS, labels=IDS, token_type_ids=torch.zeros_like(IDS)).loss.backward()
    assert warnings_in(caplog) == [
        f"The plan swaps nothing in a step: the model does not call what it names ({TOWER}.0-3)."
    ]


@pytest.mark.parametrize("plan", [plan_of(*swap_rows([""], [0])), plan_of(*recompute_rows([""], [0]))])
def test_layers_left_out_at_random(plan: MemoryPlan, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = OPTConfig(vocab_size=64, max_position_embeddings=64, layerdrop=0.5, **sizes)
    entered: set[bool] = set()
    for seed in range(4):
        model = OPTForCausalLM(config).train()
        calls: list[int] = []
        model.model.decoder.layers[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(seed)
        applied = on(model, plan)
        for step in range(6):
            one_step(model, step)
            if not step:
                entered.add(bool(calls))
        applied.remove()
        assert calls
    assert entered == {False, True}
    assert warnings_in(caplog) == []


def test_without_gradients(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama().eval()
    with apply(model, swap_everything()), torch.no_grad():
        for step in range(2):
            model(input_ids=batch(step))
    assert warnings_in(caplog) == ["The plan did nothing: all 2 forwards under it ran without gradients."]


def test_recomputation_that_does_not_pay(caplog: pytest.LogCaptureFixture) -> None:
    """Of a ReLU autograd saves the output, which the product behind it saves too."""
    config = OPTConfig(vocab_size=64, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2)
    plan = plan_of(*recompute_rows(["activation_fn.relu"], [0, 1]), num_layers=2)
    assert warned(OPTForCausalLM(config).train(), plan, caplog) == [
        "The plan recomputes nothing in a step: each op that it names would hold more than it drops (see the "
        "adjustments of the applied plan)."
    ]


def test_functions_that_autograd_does_not_save(caplog: pytest.LogCaptureFixture) -> None:
    """Bloom's GELU is an `autograd.Function`: functions in it are called, and nothing of them is saved."""
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)).train()
    plan = plan_of(*recompute_rows(["mlp.gelu_impl.tanh"], [0, 1]), num_layers=2)
    assert warned(model, plan, caplog) == [
        "The plan recomputes nothing in a step: autograd saves nothing of what it names (0-1)."
    ]


@pytest.mark.parametrize(
    "plan",
    [
        swap_everything(),
        plan_of(*recompute_rows([""], LAYERS)),
        plan_of(*recompute_rows(["mlp"], LAYERS)),
        plan_of(*recompute_rows(["mlp"], [0]), *swap_rows(["self_attn"], [1])),
        plan_of(PlanRow(0, "self_attn", "swap")),
        plan_of(),
    ],
    ids=["swap", "layers", "ops", "both", "auto", "nothing asked"],
)
def test_a_plan_that_works_says_nothing(plan: MemoryPlan, caplog: pytest.LogCaptureFixture) -> None:
    assert warned(tiny_llama(), plan, caplog) == []


def test_several_forwards_before_the_first_backward(caplog: pytest.LogCaptureFixture) -> None:
    """Recomputation is judged when backward has run, not at the next forward."""
    model = tiny_llama()
    with apply(model, plan_of(*recompute_rows(["mlp"], LAYERS))):
        losses = [forward(model, step) for step in range(3)]
        torch.stack(losses).sum().backward()
    assert warnings_in(caplog) == []
