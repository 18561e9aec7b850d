"""Rows that are packed from several sequences: kept apart under a plan as they are without a cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DataCollatorWithFlattening

from hf_actswap import MemoryPlan, apply
from tests.engine.tiny_models import (
    LENGTH,
    NUM_LAYERS,
    assert_bitwise_equal,
    batch,
    gradients,
    plan_of,
    plans,
    recompute_rows,
    swap_everything,
    tiny_llama,
)

PLANS = {
    **plans("everything swapped", "layers recomputed"),
    "ops recomputed": plan_of(*recompute_rows(["mlp", "self_attn.flash_attention"], range(NUM_LAYERS))),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
SAID = "position_ids restart within a row: it is packed."


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)


def step(model: nn.Module, **call: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of a call, of two rows unless it says otherwise."""
    model.zero_grad()
    loss = model(**{"input_ids": batch(0), "labels": batch(0), **call}).loss
    loss.backward()
    return loss.item(), gradients(model)


@every_plan
def test_the_loss_is_that_without_a_cache(plan: MemoryPlan, caplog: pytest.LogCaptureFixture) -> None:
    """With one, transformers does not look for packed rows, and their sequences attend to each other."""
    caplog.set_level(logging.INFO, logger="hf_actswap")
    model, packed = tiny_llama(), {"position_ids": positions(6, LENGTH - 6)}
    with_cache, _ = step(model, **packed)
    without_cache, expected = step(model, use_cache=False, **packed)
    assert with_cache != without_cache
    with apply(model, plan):
        for _ in range(3):
            loss, found = step(model, **packed)
            assert loss == without_cache
            assert_bitwise_equal(found, expected)
    assert [item.getMessage().startswith(SAID) for item in caplog.records].count(True) == 1


def test_nothing_is_said_of_a_row_of_one_sequence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hf_actswap")
    model = tiny_llama()
    with apply(model, swap_everything(5)):
        step(model, position_ids=positions(LENGTH))
        step(model)
    assert not any(item.getMessage().startswith(SAID) for item in caplog.records)


class VariableLength(torch.autograd.Function):
    """A variable-length kernel, as an engine sees it: one node that saves its arguments and its result."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, ends: torch.Tensor, scale: float) -> torch.Tensor:
        parts = [
            scaled_dot_product_attention(
                *(part[:, :, first:last] for part in (q, k, v)), is_causal=True, scale=scale
            )
            for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
        ]
        output = torch.cat(parts, 2)
        ctx.save_for_backward(q, k, v, ends, output)
        ctx.scale = scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, ends, output = ctx.saved_tensors
        with torch.enable_grad():
            read = [part.detach().requires_grad_() for part in (q, k, v)]
            again = VariableLength.forward(_Unsaved(), *read, ends, ctx.scale)
        assert torch.equal(again, output)  # a tensor that came back wrong gives itself away
        return *torch.autograd.grad(again, read, grads[0]), None, None


class _Unsaved:
    def save_for_backward(self, *_: torch.Tensor) -> None:
        """Nothing is kept."""


def varlen_attention(
    module: nn.Module,
    q: Any,
    k: Any,
    v: Any,
    _mask: Any,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return VariableLength.apply(q, k, v, cu_seq_lens_q, scaling).transpose(1, 2), None


@pytest.fixture
def varlen() -> Iterator[str]:
    """Attention of the kind that flash-attn's ``flash_attn_varlen_func`` is, for the CPU."""
    AttentionInterface.register("tests_varlen", varlen_attention)
    yield "tests_varlen"
    del AttentionInterface._global_mapping["tests_varlen"]


@every_plan
def test_padding_free_batches_with_variable_length_attention(plan: MemoryPlan, varlen: str) -> None:
    """One row, all sequences behind each other, and their bounds as arguments of the call."""
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(3, 60, (size,), generator=generator).tolist()} for size in (5, 9, 3)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_position_ids=True)
    flat = collate(rows)
    assert flat["input_ids"].shape == (1, 17)
    assert flat["cu_seq_lens_q"].tolist() == [0, 5, 14, 17]
    model = tiny_llama(use_cache=False)
    alone = sum(_loss_sum(model, row["input_ids"]) for row in rows)
    model.set_attn_implementation(varlen)
    loss, expected = step(model, **flat)
    assert (
        abs(loss * (17 - 3) - alone) < 1e-4
    )  # the sequences are kept apart; the first token of each has no loss
    with apply(model, plan) as applied:
        for _ in range(3):
            found_loss, found = step(model, **flat)
            assert found_loss == loss
            assert_bitwise_equal(found, expected)
        assert applied.stats().offloads + applied.stats().recomputes > 0


def _loss_sum(model: nn.Module, ids: list[int]) -> float:
    row = torch.tensor([ids])
    loss: torch.Tensor = model(input_ids=row, labels=row).loss
    return loss.item() * (len(ids) - 1)
