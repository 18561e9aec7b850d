"""Whatever goes wrong in a step: right gradients or a clear error, and the next step is healthy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan
from tests.engine.healthy_steps import (
    PLANS,
    QUICK,
    assert_nothing_is_left,
    every_plan,
    healthy_afterwards,
    raising,
)
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.tiny_models import (
    CASES,
    assert_bitwise_equal,
    batch,
    forward,
    gradients,
    gradients_of_step,
    on,
    snapshot,
    swap_everything,
    tiny_llama,
)
from tests.quick_cases import each_value_once

PLACES = {
    "embedding": lambda model: model.model.embed_tokens,
    "layer": lambda model: model.model.layers[2],
    "attention": lambda model: model.model.layers[1].self_attn,
    "mlp projection": lambda model: model.model.layers[1].mlp.up_proj,
    "head": lambda model: model.lm_head,
}


every_fault = pytest.mark.parametrize(
    ("plan", "error"),
    [
        pytest.param(
            plan,
            error,
            id=f"{error.__name__}-{name}",
            marks=[] if name in (QUICK if error is ValueError else ["case_4"]) else [pytest.mark.slow],
        )
        for error in (ValueError, KeyboardInterrupt)
        for name, plan in PLANS.items()
    ],
)


@pytest.mark.essential
@every_fault
def test_fault_in_forward(plan: MemoryPlan | str, error: type[BaseException]) -> None:
    bare = gradients_of_step(tiny_llama(), 1)
    with healthy_afterwards(plan) as (model, applied):
        for place in PLACES.values():
            for register in ("register_forward_pre_hook", "register_forward_hook"):
                handle = getattr(place(model), register)(raising(error))
                with pytest.raises(error):
                    forward(model)
                hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
                assert hooks is None, "from then on any other model would be swapped too"
                handle.remove()
                assert_bitwise_equal(gradients_of_step(model, 1), bare)
                assert_nothing_is_left(applied)
                handle = getattr(place(model), register)(raising(error))
                with pytest.raises(error):  # so the next round's fault follows upon this one
                    forward(model)
                handle.remove()


@every_fault
def test_remove_right_after_a_fault_in_forward(plan: MemoryPlan | str, error: type[BaseException]) -> None:
    bare = gradients_of_step(tiny_llama(), 1)
    for place in ("layer", "mlp projection"):
        model = tiny_llama()
        before = snapshot(model)
        applied = on(model, plan)
        handle = PLACES[place](model).register_forward_hook(raising(error))
        with pytest.raises(error):
            forward(model)
        handle.remove()
        applied.remove()
        assert snapshot(model) == before
        assert_nothing_is_left(applied)
        assert_bitwise_equal(gradients_of_step(model, 1), bare)


@every_fault
def test_fault_in_backward(plan: MemoryPlan | str, error: type[BaseException]) -> None:
    with healthy_afterwards(plan) as (model, _):
        outputs: list[torch.Tensor] = []
        handle = model.model.layers[1].register_forward_hook(lambda _m, _a, output: outputs.append(output))
        loss = forward(model)
        outputs[0].register_hook(raising(error))
        with pytest.raises(error):
            loss.backward()
        handle.remove()
        outputs.clear()
        del loss


@every_plan
def test_fault_in_recomputation(plan: MemoryPlan | str) -> None:
    with healthy_afterwards(plan) as (model, _):
        armed = False

        def fault(*_: object) -> None:  # there in forward too: a hook that came later does not run again
            if armed:
                raise ValueError("fault")

        handle = model.model.layers[0].mlp.gate_proj.register_forward_pre_hook(fault)
        loss = forward(model)
        armed = True
        if plan in (CASES["case_4"], CASES["full_recompute"], CASES["exclude_inside_full"]):
            with pytest.raises(ValueError, match="fault"):
                loss.backward()
        else:
            loss.backward()
        handle.remove()
        del loss


@every_plan
def test_two_backwards_over_one_graph(plan: MemoryPlan | str) -> None:
    bare = gradients_of_step(tiny_llama())
    with healthy_afterwards(plan) as (model, applied):
        loss = forward(model)
        loss.backward(retain_graph=True)
        between = applied.stats()
        assert between.live_swaps == between.offloads
        loss.backward()
        assert_bitwise_equal(gradients(model), {name: grad + grad for name, grad in bare.items()})
        assert applied.stats().prefetches == 2 * applied.stats().offloads
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


@every_plan
def test_gradients_of_a_subset(plan: MemoryPlan | str) -> None:
    names = ["model.layers.2.mlp.up_proj.weight", "model.layers.3.self_attn.v_proj.weight"]
    bare = gradients_of_step(tiny_llama())
    with healthy_afterwards(plan) as (model, _):
        loss = forward(model)
        grads = torch.autograd.grad(loss, [model.get_parameter(name) for name in names])
        assert_bitwise_equal(dict(zip(names, grads, strict=True)), {name: bare[name] for name in names})
        del loss


class _TwiceThrough(nn.ModuleList):
    """Layers of which each runs twice, the whole list after itself."""

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return [*self, *self] if isinstance(index, slice) else super().__getitem__(index)


@every_plan
def test_a_layer_called_twice_in_one_forward(plan: MemoryPlan | str) -> None:
    def looping() -> nn.Module:
        model = tiny_llama(use_cache=False)  # a cache would show the second run what the first one stored
        model.model.layers = _TwiceThrough(model.model.layers)
        return model

    bare = gradients_of_step(looping())
    model = looping()
    calls: list[int] = []
    applied = on(model, plan)
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    loss = forward(model)
    assert len(calls) == 2
    loss.backward()
    assert_bitwise_equal(gradients(model), bare)
    del loss
    assert_nothing_is_left(applied)


@every_plan
def test_evaluation_and_generation_between_forward_and_backward(plan: MemoryPlan | str) -> None:
    fresh = tiny_llama()
    bare = gradients_of_step(fresh)
    prompt = batch(2)[:, :4]
    expected = fresh.eval().generate(prompt, max_new_tokens=3, do_sample=False)
    with healthy_afterwards(plan) as (model, applied):
        loss = forward(model)
        before = applied.stats()
        model.eval()
        with torch.no_grad():
            forward(model, 1)
        with torch.inference_mode():
            forward(model, 1)
        assert torch.equal(model.generate(prompt, max_new_tokens=3, do_sample=False), expected)
        model.train()
        after = applied.stats() - before
        assert (after.forwards, after.offloads, after.prefetches, after.recomputes) == (0, 0, 0, 0)
        loss.backward()
        assert_bitwise_equal(gradients(model), bare)


@each_value_once
@every_plan
@pytest.mark.parametrize("trained", ["q_proj", "layers.2.mlp", "embed_tokens"])
def test_frozen_parameters(plan: MemoryPlan | str, trained: str) -> None:
    def partly_frozen() -> nn.Module:
        model = tiny_llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        return model

    bare = gradients_of_step(partly_frozen())
    model = partly_frozen()
    applied = on(model, plan)
    for _ in range(2):
        assert_bitwise_equal(gradients_of_step(model), bare)
        assert_nothing_is_left(applied)


def test_copies_that_nobody_waited_for_when_a_step_dies() -> None:
    """Blocks of a graph that died go back to the pool only when their copies are through."""
    bare = gradients_of_step(tiny_llama(), 1)
    model, transfer = tiny_llama(), RecordingTransfer()
    applied = on(model, swap_everything(1000), transfer)
    outputs: list[torch.Tensor] = []
    for place in (model.model.layers[2], model.lm_head):
        handle = place.register_forward_hook(raising(ValueError))
        with pytest.raises(ValueError, match="fault"):
            forward(model)
        handle.remove()
        assert_nothing_is_left(applied)
        handle = model.model.layers[1].register_forward_hook(lambda _m, _a, output: outputs.append(output))
        loss = forward(model)
        outputs[0].register_hook(raising(ValueError))
        with pytest.raises(ValueError, match="fault"):
            loss.backward()
        handle.remove()
        outputs.clear()
        del loss
        assert_nothing_is_left(applied)
        assert_bitwise_equal(gradients_of_step(model, 1), bare)
