"""A dry run leaves nothing behind in the program around the model: no fake tensors, and no counts."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hf_actswap import PlanError, apply
from hf_actswap.plan.dry_run import unchanged
from tests.engine.tiny_models import tiny_llama

SWAP: dict[str, Any] = {
    "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]}
}
TABLES: dict[Any, torch.Tensor] = {}
TOTAL = torch.zeros(3)
FILLED: list[int] = []
CALLS = 0
COUNTED: Counter[str] = Counter()
NOISE = np.random.default_rng(0)


@functools.lru_cache
def cached_table(width: int) -> torch.Tensor:
    return torch.linspace(0.5, 1, width)


@functools.cache
def cached_pair(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linspace(0.5, 1, width), torch.ones(width)


def table_of_file(width: int) -> torch.Tensor:
    if width not in TABLES:
        TABLES[width] = torch.linspace(0.5, 1, width)
    return TABLES[width]


def table_by_default(width: int, known: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    return known.setdefault(width, torch.linspace(0.5, 1, width))


def table_of_function(width: int) -> torch.Tensor:
    if not hasattr(table_of_function, "table"):
        table_of_function.table = torch.linspace(0.5, 1, width)  # type: ignore[attr-defined]
    return table_of_function.table  # type: ignore[attr-defined,no-any-return]


class Tracker:
    """An object of the program's own, with a count and a list."""

    def __init__(self) -> None:
        self.calls, self.seen = 0, [0]


class Slotted:
    """An object whose attributes a dry run does not see."""

    __slots__ = ("table",)


class Around(nn.Module):
    """An MLP whose forward keeps or counts something outside of modules."""

    table: torch.Tensor | None = None
    calls = 0

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind, self.tracker = inner, kind, Tracker()
        self.total, self.totals = torch.zeros(3), [torch.zeros(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * getattr(self, f"_{self.kind}")(x.shape[-1]))

    def _cache_of_a_function(self, width: int) -> torch.Tensor:
        return cached_table(width)

    def _cache_of_pairs(self, width: int) -> torch.Tensor:
        return cached_pair(width)[0]

    @functools.lru_cache(4)  # noqa: B019
    def _cache_of_a_method(self, width: int) -> torch.Tensor:
        return torch.linspace(0.5, 1, width)

    def _dict_of_a_file(self, width: int) -> torch.Tensor:
        return table_of_file(width)

    def _default_argument(self, width: int) -> torch.Tensor:
        return table_by_default(width)

    def _attribute_of_a_function(self, width: int) -> torch.Tensor:
        return table_of_function(width)

    def _attribute_of_a_class(self, width: int) -> torch.Tensor:
        if Around.table is None:
            Around.table = torch.linspace(0.5, 1, width)
        return Around.table

    def _count_of_a_class(self, _width: int) -> float:
        Around.calls += 1
        return 1 + Around.calls / 8

    def _count_of_a_file(self, _width: int) -> float:
        global CALLS
        CALLS += 1
        return 1 + CALLS / 8

    def _counter_of_a_file(self, _width: int) -> float:
        COUNTED["calls"] += 1
        return 1 + COUNTED["calls"] / 8

    def _generator_of_a_file(self, _width: int) -> float:
        return float(NOISE.random())

    def _count_of_an_object(self, _width: int) -> float:
        self.tracker.calls += 1
        self.tracker.seen.append(1)
        return 1 + self.tracker.calls / 8 + len(self.tracker.seen) / 8

    def _tensor_of_a_file(self, _width: int) -> torch.Tensor:
        TOTAL.add_(1)
        return 1 + TOTAL[0].clone() / 8

    def _tensor_of_a_module(self, _width: int) -> torch.Tensor:
        self.total.add_(1)
        return 1 + self.total[0].clone() / 8

    def _tensor_in_a_list(self, _width: int) -> torch.Tensor:
        self.totals[0].sub_(1)
        return 1 - self.totals[0][0].clone() / 8


KINDS = [name.removeprefix("_") for name in vars(Around) if name.startswith("_") and name[1].isalpha()]


def forget() -> None:
    global CALLS, NOISE
    TABLES.clear(), COUNTED.clear(), TOTAL.zero_()
    CALLS, Around.calls, Around.table, NOISE = 0, 0, None, np.random.default_rng(0)
    cached_table.cache_clear(), cached_pair.cache_clear(), Around._cache_of_a_method.cache_clear()
    (known,) = table_by_default.__defaults__ or ()
    known.clear()
    vars(table_of_function).clear()


def losses(kind: str, plan: dict[str, Any] | None) -> list[torch.Tensor]:
    """Return losses and gradients of three steps in a program that has run no model before."""
    forget()
    model: Any = tiny_llama().train()
    for layer in model.model.layers:
        layer.mlp = Around(layer.mlp, kind)
    applied = None if plan is None else apply(model, plan)
    found = []
    for step in range(3):
        ids = torch.arange(48).reshape(2, 24) + step
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        found.append(loss.detach())
    assert applied is None or applied.stats().offloads > 0
    return [*found, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_is_as_if_no_dry_run_had_been(kind: str) -> None:
    expected, found = losses(kind, None), losses(kind, SWAP)
    assert len(found) == len(expected) > 10
    assert not any(isinstance(tensor, FakeTensor) for tensor in found)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_no_code_of_the_model_mentions_is_left_alone() -> None:
    """Another thread may fill it meanwhile."""
    model = tiny_llama().train()
    model.model.layers[0].mlp = Around(model.model.layers[0].mlp, "dict_of_a_file")
    with unchanged(model):
        FILLED.append(1)
        TABLES[7] = torch.ones(7)
    assert FILLED.pop() == 1
    assert 7 not in TABLES


class Hidden(nn.Module):
    """An MLP that keeps a table where nothing takes it back from."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.kept = inner, Slotted()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.kept, "table"):
            self.kept.table = torch.linspace(0.5, 1, x.shape[-1])
        return self.inner(x * self.kept.table)


def test_a_fake_tensor_that_stays_all_the_same_is_an_error() -> None:
    model: Any = tiny_llama().train()
    model.model.layers[0].mlp = Hidden(model.model.layers[0].mlp)
    ids = torch.arange(48).reshape(2, 24)
    with apply(model, SWAP), pytest.raises(PlanError, match=r"Call the model once before"):
        model(input_ids=ids, labels=ids, use_cache=False)
    vars(model.model.layers[0].mlp)["kept"] = Slotted()
    model(input_ids=ids, labels=ids, use_cache=False)
    with apply(model, SWAP):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def steps_of(make: Callable[[], Any], plan: dict[str, Any] | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = make().train()
    if plan is not None:
        apply(model, plan)
    pixels = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
    loss = model(pixel_values=pixels).last_hidden_state.square().mean()
    loss.backward()
    return [loss, *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def beit() -> Any:
    from transformers import BeitConfig, BeitModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return BeitModel(BeitConfig(image_size=32, patch_size=8, use_relative_position_bias=True, **sizes))


def dino() -> Any:
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return DINOv3ViTModel(DINOv3ViTConfig(image_size=32, patch_size=8, **sizes))


@pytest.mark.parametrize("make", [beit, dino])
def test_models_of_transformers_that_cache_tables(make: Callable[[], Any]) -> None:
    """The plan comes first: the model without one would fill the caches with real tables."""
    found = steps_of(make, SWAP)
    expected = steps_of(make, None)
    assert not any(isinstance(tensor, FakeTensor) for tensor in found)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
