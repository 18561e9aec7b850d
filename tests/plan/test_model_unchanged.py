"""Looking at a model, and a plan that is put on it and removed, leave every attribute of it as it was."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import BigBirdConfig, BigBirdForCausalLM, PreTrainedConfig

from hf_actswap import PlanError, apply, model_structure
from hf_actswap.plan.dry_run import exchanged
from hf_actswap.planner import profile_from_shapes
from tests.parallel.patched_models import FAMILIES, QUICK, tiny_model
from tests.quick_cases import quick_first

Gradients = Callable[[nn.Module], dict[str, torch.Tensor]]
SWAP = {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 5, "layers": True}]}}
RECOMPUTE = {"recompute_config": {"recompute": True}}


def state_of(model: nn.Module, identities: bool = True) -> dict[str, Any]:
    """Return all that modules and configurations hold, by path.

    Args:
        model: any module.
        identities: whether tensors and other objects are told apart, beside their types and shapes.
    """
    found: dict[str, Any] = {}
    paths: dict[int, str] = {}

    def look(path: str, value: Any) -> None:
        if isinstance(value, nn.Module | PreTrainedConfig | dict):
            items = value if isinstance(value, dict) else vars(value)
            if not identities and all(isinstance(name, int) for name in items):
                items = dict(enumerate(items.values()))  # hooks: their numbers count other models' too
        elif isinstance(value, list | tuple):
            items = dict(enumerate(value))
        elif isinstance(value, torch.Tensor):
            found[path] = type(value), value.shape, value.dtype, identities and id(value)
            return
        else:
            plain = isinstance(value, str | int | float | bool | None)
            found[path] = value if plain else (type(value), identities and id(value))
            return
        if id(value) in paths:
            found[path] = paths[id(value)]
            return
        paths[id(value)] = path
        found[path] = type(value), list(map(str, items))
        for name, item in items.items():
            look(f"{path}.{name}", item)

    look("", model)
    return found


def big_bird() -> BigBirdForCausalLM:
    """Return a BigBird whose attention looks at blocks from 15 tokens on."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = BigBirdConfig(
        vocab_size=64,
        block_size=2,
        num_random_blocks=1,
        max_position_embeddings=64,
        **sizes,
    )
    assert config.attention_type == "block_sparse"
    return BigBirdForCausalLM(config).train()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", quick_first(sorted(QUICK), 6))
def test_looking_at_a_model_changes_nothing_in_it(family: str) -> None:
    model = tiny_model(family)
    before = state_of(model)
    model_structure(model)
    assert state_of(model) == before
    apply(model, SWAP).remove()
    assert state_of(model) == before


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_looking_at_any_family_changes_nothing_in_it(family: str) -> None:
    model = tiny_model(family)
    before = state_of(model)
    with suppress(PlanError):  # XLM has no list of layers
        model_structure(model)
    assert state_of(model) == before


@pytest.mark.parametrize("family", quick_first(sorted(QUICK), 3))
def test_a_step_under_a_plan_leaves_what_a_step_without_one_leaves(family: str, gradients: Gradients) -> None:
    """The first forward under a plan is preceded by a run on fake tensors of its shapes."""
    model = tiny_model(family)
    plain = copy.deepcopy(model)
    gradients(plain)
    plain.zero_grad(set_to_none=True)
    applied = apply(model, SWAP)
    gradients(model)
    applied.remove()
    model.zero_grad(set_to_none=True)
    assert state_of(model, identities=False) == state_of(plain, identities=False)


def test_big_bird_keeps_its_attention_to_blocks(gradients: Gradients) -> None:
    """It replaces its attention for good where a sequence is short, and the example of a dry run is short."""
    model = big_bird()
    before, expected = state_of(model), gradients(copy.deepcopy(model))
    model_structure(model)
    assert state_of(model) == before
    assert model.bert.attention_type == "block_sparse"
    for document in (SWAP, RECOMPUTE):
        applied = apply(model, document)
        assert equal(gradients(model), expected)
        applied.remove()


class Drawing(nn.Module):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sources = (random.Random(0), np.random.default_rng(0), np.random.RandomState(0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * float(sum(source.random() for source in self.sources))


def test_own_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.act_fn = Drawing()
    model_structure(model)
    assert [one.random() for one in model.model.layers[0].mlp.act_fn.sources] == [
        one.random() for one in Drawing().sources
    ]


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_no_fake_weight_is_cached(gradients: Gradients) -> None:
    def with_cached_weights(document: dict[str, Any] | None) -> dict[str, torch.Tensor]:
        model = tiny_model("llama")
        for layer in model.model.layers:
            nn.utils.parametrize.register_parametrization(layer.mlp.up_proj, "weight", Doubled())
        if document is not None:
            apply(model, document)
        with nn.utils.parametrize.cached():
            return gradients(model)

    expected = with_cached_weights(None)
    assert equal(with_cached_weights(SWAP), expected)
    assert equal(with_cached_weights(RECOMPUTE), expected)


def with_alias(family: str = "llama") -> nn.Module:
    """Return a model with its embedding, and a layer's MLP, at two paths."""
    model = tiny_model(family)
    model.alias = model.get_input_embeddings()
    model.model.other = nn.ModuleDict({"mlp": model.model.layers[0].mlp})
    return model


@pytest.mark.parametrize(
    "document",
    [
        SWAP,
        RECOMPUTE,
        {"recompute_config": {"select_recompute": ["mlp.mul"]}},
        {"tile_config": {"loss": 3, "tile": [{"op_name": "mlp", "tokens": 8}]}},
    ],
    ids=["swap", "recompute", "select", "tiles"],
)
def test_a_module_at_two_paths_keeps_its_weights(document: dict[str, Any], gradients: Gradients) -> None:
    model = with_alias()
    held = [(name, id(item)) for name, item in model.named_parameters(remove_duplicate=False)]
    expected = gradients(copy.deepcopy(model))
    applied = apply(model, document)
    found = gradients(model)
    applied.remove()
    if "tile_config" in document:  # its sums have another order
        torch.testing.assert_close(found, expected)
    else:
        assert equal(found, expected)
    assert [(name, id(item)) for name, item in model.named_parameters(remove_duplicate=False)] == held
    assert equal(gradients(model), expected)


def test_a_profile_from_shapes_leaves_a_module_at_two_paths() -> None:
    model = with_alias()
    before = state_of(model)
    ids = torch.zeros(2, 12, dtype=torch.long)
    profile_from_shapes(model, model_structure(model), {"input_ids": ids, "labels": ids}, "H100")
    assert state_of(model) == before


class Stubborn(nn.Module):
    """A module that puts a weight of its own in place while it runs, and raises an error if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.alias = self.inner
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.inner.weight
        self.register_buffer("scale", torch.ones(4))
        self.again = self.scale

    def forward(self, hidden: torch.Tensor, fails: bool) -> torch.Tensor:
        made = self.tied(self.alias(hidden)) * self.scale
        self.inner.weight = nn.Parameter(torch.zeros(4, 4))
        if fails:
            raise ZeroDivisionError
        return made


@pytest.mark.parametrize("fails", [False, True])
def test_an_exchange_reaches_each_place_and_puts_everything_back(fails: bool) -> None:
    model = Stubborn()
    named = {"inner.weight": torch.eye(4), "inner.bias": torch.ones(4), "scale": torch.full((4,), 2.0)}
    before = state_of(model)

    def run() -> Iterator[torch.Tensor]:
        with exchanged(model, named):
            yield model(torch.ones(1, 4), fails)

    if fails:
        with pytest.raises(ZeroDivisionError):
            next(run())
    else:
        (made,) = run()
        assert torch.equal(made, 2 * (torch.full((1, 4), 2.0) + model.tied.bias))
    assert state_of(model) == before
    assert not any(isinstance(item, FakeTensor) for item in (*model.parameters(), *model.buffers()))


def test_an_exchange_of_what_is_not_there_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    before = state_of(model)
    named = {"0.weight": torch.zeros(2, 2), "0.other": torch.zeros(2, 2)}
    with pytest.raises(AttributeError, match=r"no parameter or buffer .0\.other."), exchanged(model, named):
        pass
    assert state_of(model) == before
