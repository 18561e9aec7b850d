"""Random numbers, autocast, writes in place, functions that never give the same: replayed or rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from hf_actswap import apply, load_config, model_structure, resolve_plan
from hf_actswap.engine import install
from hf_actswap.engine.verify import RecomputeError
from hf_actswap.plan import ModelStructure
from hf_actswap.plan.op_facts import (
    RANDOM_FUNCTIONS,
    UNREPEATABLE_FUNCTIONS,
    can_run_again,
    draws_random_numbers,
)
from hf_actswap.plan.opnames import function_name
from tests.engine.tiny_models import (
    NUM_LAYERS,
    assert_bitwise_equal,
    forward,
    gradients,
    gradients_of_step,
    on,
    one_step,
    plan_of,
    recompute_rows,
    tiny_llama,
)
from tests.quick_cases import each_value_once

LAYERS = range(NUM_LAYERS)
Op = Callable[[torch.Tensor], torch.Tensor]


class _With(nn.Module):
    """A feed-forward with one more function behind it."""

    def __init__(self, mlp: nn.Module, op: Op) -> None:
        super().__init__()
        self.mlp, self.op = mlp, op

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.op(self.mlp(hidden))


def llama_with(op: Op) -> nn.Module:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp = _With(layer.mlp, op)
    return model


def run_with(op: Op, *paths: str, autocast: bool = False) -> tuple[int, torch.Tensor]:
    """Gradients must be those of no plan; return calls run again and the random state afterwards."""
    states, found, again = [], [], 0
    for rows in ((), recompute_rows(paths, LAYERS)):
        model = llama_with(op)
        with install(model, plan_of(*rows), model_structure(model)) as applied:
            torch.manual_seed(11)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = forward(model)
            loss.backward()
            found.append(gradients(model))
            states.append(torch.get_rng_state())
            again = applied.stats().recomputes
    assert_bitwise_equal(found[1], found[0])
    assert torch.equal(states[1], states[0])
    return again, states[0]


_OWN_GENERATOR = torch.Generator()

RANDOM_OPS: dict[str, Op] = {
    "dropout": lambda x: (F.dropout(x, 0.4) * x).sin(),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True).sin() * x,
    "rand_like": lambda x: (x * torch.rand_like(x)).sin(),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()) * x,
    "rrelu": lambda x: F.rrelu(x, training=True).sin(),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.3).sin(),
}


@each_value_once
@pytest.mark.parametrize("name", RANDOM_OPS)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_a_random_function_draws_the_same_again(name: str, autocast: bool) -> None:
    again, state = run_with(RANDOM_OPS[name], f"mlp.{name}", "mlp.mul", "mlp.sin", autocast=autocast)
    assert again > 0
    torch.manual_seed(11)
    assert not torch.equal(state, torch.get_rng_state()), "nothing was drawn"


@pytest.mark.parametrize("name", RANDOM_OPS)
def test_a_random_function_inside_a_recomputed_module(name: str) -> None:
    assert run_with(RANDOM_OPS[name], "mlp")[0] == NUM_LAYERS


def test_a_generator_of_its_own_is_set_back_too() -> None:
    def with_noise(hidden: torch.Tensor) -> torch.Tensor:
        return (torch.bernoulli(hidden.detach(), 0.5, generator=_OWN_GENERATOR) * hidden).sin()

    after = []
    for rows in ((), recompute_rows(["mlp.bernoulli", "mlp.mul", "mlp.sin"], LAYERS)):
        model = llama_with(with_noise)
        _OWN_GENERATOR.manual_seed(5)
        with install(model, plan_of(*rows), model_structure(model)) as applied:
            _OWN_GENERATOR.manual_seed(5)
            one_step(model)
            assert bool(rows) == (applied.stats().recomputes > 0)
        after.append((gradients(model), _OWN_GENERATOR.get_state()))
    assert_bitwise_equal(after[1][0], after[0][0])
    assert torch.equal(after[1][1], after[0][1])


def test_every_operator_that_pytorch_calls_random_is_known() -> None:
    """By the tag that PyTorch puts on them; kernels below the functions that a model calls are left out."""
    tagged = set()
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space != "aten" or name.startswith("_") or not hasattr(torch.ops.aten, name):
            continue
        overload = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default", None)
        if overload is not None and torch.Tag.nondeterministic_seeded in overload.tags:
            tagged.add(name.rstrip("_"))
    below = {"normal_functional", "rrelu_with_noise", "rrelu_with_noise_functional", "miopen_rnn"}
    assert "dropout" in tagged
    assert tagged - below - RANDOM_FUNCTIONS == {"scaled_dot_product_attention"}  # judged by its argument


def test_attention_is_random_only_with_dropout() -> None:
    q = torch.ones(1, 1, 2, 2)
    func, name = F.scaled_dot_product_attention, "scaled_dot_product_attention"
    assert not draws_random_numbers(func, name, (q, q, q), {})
    assert not draws_random_numbers(func, name, (q, q, q, None, 0.0), {})
    assert draws_random_numbers(func, name, (q, q, q, None, 0.1), {})
    assert draws_random_numbers(func, name, (q, q, q), {"dropout_p": 0.1})


def test_of_operators_that_nobody_knows_the_worst_is_assumed() -> None:
    def random(operator: object) -> bool:
        assert callable(operator)
        return draws_random_numbers(operator, function_name(operator) or "", (), {})

    assert random(torch.ops.aten.native_dropout.default)
    assert not random(torch.ops.aten.mul.Tensor)
    assert random(torch.ops.aten.mul)  # which overload is not known


def plus_one_in_place(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.add_(1)


IN_PLACE: dict[str, Op] = {
    "add": plus_one_in_place,
    "iadd": lambda x: x.__iadd__(1),
    "relu": lambda x: F.relu(x, inplace=True),
    "dropout": lambda x: F.dropout(x, 0.2, inplace=True),
    "setitem": lambda x: x.__setitem__((0, 0), 0.0) or x,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_function_that_writes_in_place_is_not_run_again(name: str) -> None:
    """It has no output of its own: what it writes into belongs to the op before, and stays as it is."""
    assert run_with(lambda x: IN_PLACE[name](x * 2).sin() * 3, f"mlp.{name}")[0] == 0


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_was_written_since_is_not_rebuilt_without_the_write(name: str) -> None:
    """A new run of the product would give it as it was before: so what the sine saves is kept."""
    run_with(lambda x: IN_PLACE[name](x * 2).sin(), "mlp.mul", f"mlp.{name}", "mlp.sin")


def test_writes_in_place_inside_a_recomputed_module() -> None:
    assert run_with(lambda x: plus_one_in_place(x * 2).sin(), "mlp")[0] == NUM_LAYERS


def shifted(hidden: torch.Tensor) -> torch.Tensor:
    """A function that adjustments can see, as those of PyTorch are, and that writes into its argument."""
    if has_torch_function_unary(hidden):
        return handle_torch_function(shifted, (hidden,), hidden)
    return hidden.add_(1).sin()


def unseen(shape: ModelStructure) -> ModelStructure:
    """As of a model that cannot be recorded: nobody knows what is written in place."""
    return replace(shape, layers=tuple(replace(layer, stale_reads=()) for layer in shape.layers))


def stays(path: str, layer: int) -> str:
    return (
        f"recompute_config.select_recompute {path}, layers {layer}: asked recompute, got keep: what it reads "
        "is written in place afterwards, so that it could not be run again from it"
    )


def test_a_function_that_writes_although_its_name_does_not_say_so_is_kept() -> None:
    model = llama_with(lambda x: shifted(x * 2) * 3)
    applied = on(model, plan_of(*recompute_rows(["mlp.shifted"], [2])))
    expected = gradients_of_step(llama_with(lambda x: shifted(x * 2) * 3))
    assert_bitwise_equal(gradients_of_step(model), expected)
    assert [str(adjustment) for adjustment in applied.plan.adjustments] == [stays("mlp.shifted", 2)]


def test_a_function_that_was_not_seen_to_write_is_rejected_by_name() -> None:
    model = llama_with(lambda x: shifted(x * 2) * 3)
    with install(model, plan_of(*recompute_rows(["mlp.shifted"], [2])), unseen(model_structure(model))):
        with pytest.raises(RecomputeError) as caught:
            one_step(model)
        assert str(caught.value) == (
            "2.mlp.shifted: it writes into what it reads, so it cannot be run again; keep it "
            "(select_recompute_exclude)"
        )
    expected = gradients_of_step(llama_with(lambda x: shifted(x * 2) * 3))
    assert_bitwise_equal(gradients_of_step(model), expected)


@pytest.mark.parametrize("seen", [True, False])
def test_an_input_that_is_overwritten_later(seen: bool) -> None:
    """Autograd alone allows it, because nobody saves the module's input; a region has nothing else."""

    def overwritten(hidden: torch.Tensor) -> torch.Tensor:
        copy = hidden * 1
        result = inner(copy)
        with torch.no_grad():
            copy.zero_()
        return result

    inner = nn.Sequential(nn.ReLU(), nn.Tanh())
    model = tiny_llama()
    model.model.layers[1].mlp = _WithInner(model.model.layers[1].mlp, inner, overwritten)
    shape, plan = model_structure(model), plan_of(*recompute_rows(["mlp.inner"], [1]))
    if seen:
        with apply(model, plan) as applied:
            one_step(model)
            assert [str(adjustment) for adjustment in applied.plan.adjustments] == [stays("mlp.inner", 1)]
        return
    with install(model, plan, unseen(shape)):
        loss = forward(model)
        with pytest.raises(RecomputeError) as caught:
            loss.backward()
    assert str(caught.value) == (
        "1.mlp.inner: a tensor that it was called with was written in place afterwards, so it cannot be run "
        "again; keep it (select_recompute_exclude)"
    )


class _WithInner(_With):
    def __init__(self, mlp: nn.Module, inner: nn.Module, op: Op) -> None:
        super().__init__(mlp, op)
        self.inner = inner


def test_a_function_that_never_gives_the_same_is_kept_by_name() -> None:
    def scattered(hidden: torch.Tensor) -> torch.Tensor:
        index = torch.arange(hidden.shape[1])
        return torch.index_add(hidden * 2, 1, index, hidden).sin()

    model = llama_with(scattered)
    config = load_config({"recompute_config": {"select_recompute": {r"mlp\.(index_add|sin)": [2]}}})
    plan = resolve_plan(config, model_structure(model))
    assert [str(adjustment) for adjustment in plan.adjustments] == [
        "recompute_config.select_recompute mlp.index_add, layers 0-1: asked recompute, got keep: run twice "
        "this function does not give the same: it reads memory as it is found, or adds in the order in which "
        "threads come; a module around it can be recomputed"
    ]
    assert [plan.fate(0, path) for path in ("mlp.index_add", "mlp.sin")] == ["keep", "recompute"]
    # Also where a plan was written by hand.
    assert run_with(scattered, "mlp.index_add")[0] == 0
    assert run_with(scattered, "mlp")[0] == NUM_LAYERS


def test_names_of_functions_that_cannot_run_again() -> None:
    x = torch.ones(2)
    assert can_run_again(torch.mul, "mul", {})
    assert not can_run_again(torch.Tensor.mul_, "mul", {})
    assert not can_run_again(torch.mul, "mul", {"out": x})
    assert not can_run_again(F.relu, "relu", {"inplace": True})
    assert not can_run_again(torch.ops.aten.add_.Tensor, "add", {})
    assert all(not can_run_again(torch.mul, name, {}) for name in UNREPEATABLE_FUNCTIONS)
    assert not UNREPEATABLE_FUNCTIONS & RANDOM_FUNCTIONS
