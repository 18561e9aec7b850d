"""Llamas whose MLPs do what some models do to autograd, and the comparison with and without a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from hf_actswap import MemoryPlan
from hf_actswap.engine import SwapStats, Transfer
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.tiny_models import assert_bitwise_equal, gradients, on, one_step, tiny_llama

HIDDEN, INNER = 32, 48

Step = Callable[[nn.Module], object]


class Mlp(nn.Module):
    """Runs ``function`` between two linears; ``function`` gets (batch, length, 48) and returns the same."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.function = function

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.function(self.up(hidden)))


def llama_with(
    function: Callable[[torch.Tensor], torch.Tensor], layers: Iterable[int] = (1, 2), **settings: Any
) -> nn.Module:
    """Return a tiny Llama whose MLPs in ``layers`` run ``function``."""
    model = tiny_llama(**settings)
    torch.manual_seed(11)
    for layer in layers:
        model.model.layers[layer].mlp = Mlp(function)
    return model


def step_gradients(model: nn.Module, step: Step = one_step) -> dict[str, torch.Tensor]:
    """Return the gradients of ``step`` alone."""
    model.zero_grad()
    torch.manual_seed(5)
    step(model)
    return gradients(model)


def same_gradients(
    build: Callable[[], nn.Module],
    plan: MemoryPlan | str,
    step: Step = one_step,
    transfer: Transfer | None = None,
    steps: int = 2,
) -> SwapStats:
    """Fail unless each of ``steps`` steps is bitwise the one without a plan and leaves nothing behind.

    Args:
        build: makes the same model each time.
        transfer: by default copies complete only when somebody waits for them.

    Returns:
        The totals over the steps.
    """
    bare = step_gradients(build(), step)
    model = build()
    applied = on(model, plan, transfer or RecordingTransfer())
    for _ in range(steps):
        assert_bitwise_equal(step_gradients(model, step), bare)
        stats = applied.stats()
        assert (stats.live_swaps, stats.host_bytes) == (0, 0)
    applied.remove()
    return stats


class PassThrough(torch.autograd.Function):
    """Identity that saves ``make(x)`` without a visible call, and gives what comes back to ``seen``."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        make: Callable[[torch.Tensor], torch.Tensor | None],
        seen: Callable[[torch.Tensor | None], None],
    ) -> torch.Tensor:
        ctx.seen = seen  # type: ignore[attr-defined]
        ctx.save_for_backward(make(x.detach()))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        ctx.seen(saved)
        return grad, None, None


def llama_saving(
    make: Callable[[torch.Tensor], torch.Tensor | None],
    seen: Callable[[torch.Tensor | None], None],
    layers: Iterable[int] = (1,),
) -> nn.Module:
    """Return a Llama in which a custom function saves whatever ``make`` returns for its input."""
    return llama_with(lambda x: PassThrough.apply(x, make, seen), layers)
