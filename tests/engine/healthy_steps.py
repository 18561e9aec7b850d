"""What the fault tests share: their plans, and the check that the step after a fault is healthy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch import nn

from hf_actswap import MemoryPlan
from hf_actswap.engine import AppliedPlan
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    assert_bitwise_equal,
    gradients_of_step,
    on,
    plan_of,
    recompute_rows,
    snapshot,
    swap_everything,
    swap_rows,
    tiny_llama,
)
from tests.quick_cases import quick_named

PLANS: dict[str, MemoryPlan | str] = {
    "everything swapped": swap_everything(5),
    **{name: CASES[name] for name in ("default_swap", "case_4", "full_recompute", "exclude_inside_full")},
    "functions recomputed": plan_of(
        *recompute_rows(["mlp.mul", "mlp.act_fn.silu", "self_attn.flash_attention"], range(NUM_LAYERS)),
        *swap_rows(["output", "mlp.up_proj"], range(NUM_LAYERS), 5),
    ),
}
QUICK = ("everything swapped", "exclude_inside_full", "functions recomputed")
every_plan = pytest.mark.parametrize("plan", quick_named(PLANS, QUICK))


def assert_nothing_is_left(applied: AppliedPlan) -> None:
    gc.collect()  # tracebacks hold frames that hold graphs
    stats = applied.stats()
    assert (stats.live_swaps, stats.host_bytes) == (0, 0)


@contextmanager
def healthy_afterwards(plan: MemoryPlan | str) -> Iterator[tuple[nn.Module, AppliedPlan]]:
    """A model with a plan; after the block its next step is right, and it comes off without a trace."""
    bare = gradients_of_step(tiny_llama(), 1)
    model = tiny_llama()
    before = snapshot(model)
    applied = on(model, plan)
    assert snapshot(model) != before
    yield model, applied
    assert_bitwise_equal(gradients_of_step(model, 1), bare)
    assert_nothing_is_left(applied)
    assert_bitwise_equal(gradients_of_step(model, 1), bare)
    applied.remove()
    applied.remove()
    assert snapshot(model) == before
    assert_bitwise_equal(gradients_of_step(model, 1), bare)


def raising(error: type[BaseException]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        raise error("fault")

    return hook
