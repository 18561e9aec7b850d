"""Which bytes leave the device: counted from shapes, and asserted exactly."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import pytest
import torch

from hf_actswap import MemoryPlan, load_config, model_structure, resolve_plan
from hf_actswap.engine import SwapStats
from hf_actswap.engine.stats import Counters
from tests.engine.spies import WatchingTransfer
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    SWAP_CASES,
    assert_bitwise_equal,
    gradients_of_step,
    on,
    one_step,
    plan_of,
    swap_rows,
    tiny_llama,
    train,
)
from tests.quick_cases import each_value_once


@dataclass(frozen=True)
class Shapes:
    """Sizes of a Llama and of a batch; ``size`` is the bytes of an element of its weights."""

    tokens_in_batch: tuple[int, int]
    hidden: int
    inner: int
    heads: int
    key_heads: int
    size: int

    @property
    def tokens(self) -> int:
        return self.tokens_in_batch[0] * self.tokens_in_batch[1]

    def attention_core(self) -> dict[str, int]:
        """What ``self_attn.flash_attention`` produces and backward reads; statistics are fp32 always."""
        return {"output": self.tokens * self.hidden * self.size, "logsumexp": self.tokens * self.heads * 4}

    def attention(self) -> dict[str, int]:
        """What ``self_attn`` produces. The input of ``o_proj`` is a view of the core's output: one copy."""
        keys = self.tokens * self.hidden * self.key_heads // self.heads * self.size
        return {
            "rotated q": self.tokens * self.hidden * self.size,
            "rotated k": keys,
            "v": keys,
            **self.attention_core(),
        }

    def mlp(self) -> dict[str, int]:
        """What ``mlp`` produces."""
        inner = self.tokens * self.inner * self.size
        return {"gate": inner, "silu": inner, "up": inner, "product": inner}

    def norm(self, name: str) -> dict[str, int]:
        """What an RMSNorm produces: it computes in fp32 whatever the weights are."""
        row = self.tokens * self.hidden
        found = {
            f"{name}.rsqrt": self.tokens * 4,
            f"{name} normed": row * self.size,
            f"{name} scaled": row * self.size,
        }
        return found if self.size == 4 else {f"{name} input in fp32": row * 4, **found}

    def layer(self) -> dict[str, int]:
        """What a whole layer produces. In bf16 the residual is only read through its fp32 cast."""
        residual = self.tokens * self.hidden * self.size
        sums = {"after attention": residual, "handed on": residual} if self.size == 4 else {}
        return {**self.norm("input norm"), **self.attention(), **self.norm("norm"), **self.mlp(), **sums}

    def settings(self) -> dict[str, int]:
        """For the model's configuration."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
        }


SMALL = Shapes((2, 16), 32, 48, 4, 2, 4)
ODD = Shapes((3, 11), 24, 40, 3, 3, 4)


def tensors_expected(case: str, shapes: Shapes) -> list[int]:
    """Bytes of each copy that the case must make in one step."""
    attention, mlp = list(shapes.attention().values()), list(shapes.mlp().values())
    return {
        "default_swap": list(shapes.attention_core().values()) * NUM_LAYERS,
        "case_2": list(shapes.layer().values()) * 2,
        "case_3": attention * NUM_LAYERS + mlp * 2,
        "case_4": attention * NUM_LAYERS + mlp * 2,  # the layers that recompute feed_forward swap none of it
    }[case]


def plan_of_case(case: str, model: torch.nn.Module, **changes: object) -> MemoryPlan:
    return replace(
        resolve_plan(load_config(CASES[case]), model_structure(model)), **{"min_tensor_bytes": 0, **changes}
    )


def step_of(model: torch.nn.Module, shapes: Shapes) -> None:
    ids = torch.randint(0, 64, shapes.tokens_in_batch)
    model(input_ids=ids, labels=ids).loss.backward()


@each_value_once
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shapes", [SMALL, ODD], ids=["small", "odd"])
@pytest.mark.parametrize("case", SWAP_CASES)
def test_bytes_are_those_of_the_shapes(case: str, shapes: Shapes, dtype: torch.dtype) -> None:
    shapes = replace(shapes, size=dtype.itemsize)
    model, transfer = tiny_llama(dtype, **shapes.settings()), WatchingTransfer()
    applied = on(model, plan_of_case(case, model), transfer)
    expected = tensors_expected(case, shapes)
    before = applied.stats()
    for _ in range(3):  # the same in each step
        transfer.sizes_bytes.clear()
        step_of(model, shapes)
        after = applied.stats()
        step, before = after - before, after
        assert sorted(transfer.sizes_bytes) == sorted(expected)
        assert step.offloaded_bytes == step.prefetched_bytes == sum(expected)
        assert step.offloads == step.prefetches == len(expected)
        assert step.rejected == {}
        assert step.late_prefetches == 0
        assert (step.live_swaps, step.host_bytes) == (0, 0)
        assert step.host_peak_bytes == step.host_pool_bytes == sum(expected)
    applied.remove()


@pytest.mark.slow
@pytest.mark.parametrize("case", SWAP_CASES)
def test_the_pool_does_not_grow_over_fifty_steps(case: str) -> None:
    run = train(tiny_llama(), CASES[case], 50)
    steps = [after - before for before, after in zip([SwapStats(), *run.stats], run.stats, strict=False)]
    assert len({step.offloaded_bytes for step in steps}) == 1
    assert len({step.prefetched_bytes for step in steps}) == 1
    assert {step.host_pool_bytes for step in steps} == {steps[0].offloaded_bytes}
    assert steps[0].pinning_ms > 0
    assert {step.pinning_ms for step in steps} == {steps[0].pinning_ms}
    assert {(step.live_swaps, step.host_bytes, step.late_prefetches) for step in steps} == {(0, 0, 0)}


def test_small_tensors_are_rejected_and_counted() -> None:
    model = tiny_llama()
    threshold = SMALL.attention_core()["output"]
    applied = on(model, plan_of_case("default_swap", model, min_tensor_bytes=threshold))
    one_step(model)
    stats = applied.stats()
    assert stats.offloaded_bytes == NUM_LAYERS * threshold
    small = NUM_LAYERS * SMALL.attention_core()["logsumexp"]
    assert stats.rejected == {"smaller than min_tensor_mib": small}
    one_step(model)
    assert applied.stats().rejected == {"smaller than min_tensor_mib": 2 * small}


@pytest.mark.parametrize("layers_that_fit", [0, 1, 3])
def test_the_host_cap_keeps_the_rest_and_counts_it(layers_that_fit: int) -> None:
    core = sum(SMALL.attention_core().values())
    cap = layers_that_fit * core
    model = tiny_llama()
    bare = gradients_of_step(model)
    applied = on(model, plan_of_case("default_swap", model, host_memory_bytes=cap))
    for step in range(1, 4):
        assert_bitwise_equal(gradients_of_step(model), bare)
        stats = applied.stats()
        assert stats.offloaded_bytes == step * cap
        assert stats.host_peak_bytes == stats.host_pool_bytes == cap
        assert set(stats.rejected) == {"host memory cap"}
        # each of the rejected layers asks twice for its output: as the core's own, and as o_proj's input
        asked = core + SMALL.attention_core()["output"]
        assert stats.rejected["host memory cap"] == step * (NUM_LAYERS - layers_that_fit) * asked


def test_around_the_layers_the_producer_owns_too() -> None:
    """The final norm owns what the head saves; the embedding what layer 0 saves."""
    hidden, rsqrt = 2 * 16 * 32 * 4, 2 * 16 * 4
    for scope, expected in {"embedding": [hidden], "final_norm": [rsqrt, hidden, hidden]}.items():
        model, transfer = tiny_llama(), WatchingTransfer()
        on(model, plan_of(replace(swap_rows([""], [0])[0], scope=scope)), transfer)
        one_step(model)
        assert sorted(transfer.sizes_bytes) == expected


def test_the_slice_of_a_large_storage_moves_alone() -> None:
    """The head sees only the last tokens: what it saves is a slice of the final norm's output."""
    model, transfer = tiny_llama(), WatchingTransfer()
    plan = plan_of(replace(swap_rows([""], [0])[0], scope="final_norm"))
    on(model, plan, transfer)
    ids = torch.randint(0, 64, (1, 16))
    model(input_ids=ids, logits_to_keep=2).logits.sum().backward()
    normed, rsqrt, kept_rows = 16 * 32 * 4, 16 * 4, 2 * 32 * 4
    assert sorted(transfer.sizes_bytes) == [rsqrt, kept_rows, normed]


class _Wait:
    """A wait of one ms, over when ``over`` says so."""

    over = False

    def elapsed_ms(self) -> float | None:
        return 1.0 if _Wait.over else None


def test_waits_are_added_up_where_nobody_asks_for_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters()
    for number in range(20_000):
        monkeypatch.setattr(_Wait, "over", number >= 5_000)
        counters.stalled(_Wait())
    assert sum(type(held) is _Wait for held in gc.get_objects()) <= 2_000
    stats = counters.snapshot(None)
    assert (stats.stalls, stats.stall_ms) == (20_000, 20_000.0)
