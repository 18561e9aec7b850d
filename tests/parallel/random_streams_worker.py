"""What each process of the random-stream tests runs; a module of its own, because it is started afresh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hf_actswap.parallel import tensor_parallel_group
from hf_actswap.parallel.block_hooks import rank_stream
from tests.processes import run_cases

WORLD_SIZE = 4
SEED = 3


def draw() -> torch.Tensor:
    return torch.rand(64)


def streams(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """What a rank draws, inside and outside, in one order."""
    torch.manual_seed(SEED)
    found = {"before": draw()}
    with rank_stream(group):
        found["inside"] = draw()
    found["between"] = draw()
    with rank_stream(group):
        found["again"] = draw()
        with rank_stream(group):
            found["nested"] = draw()
        found["after nested"] = draw()
    found["after"] = draw()
    return found


def amounts(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The outer stream after blocks that drew nothing, little, much, reseeded, or raised."""

    def outer(inside: Callable[[], object]) -> torch.Tensor:
        torch.manual_seed(SEED)
        try:
            with tensor_parallel_group(group), rank_stream():
                inside()
        except ZeroDivisionError:
            pass
        return draw()

    return {
        "nothing": outer(lambda: None),
        "little": outer(draw),
        "much": outer(lambda: torch.randn(100_003)),
        "reseeded": outer(lambda: torch.manual_seed(99)),
        "raised": outer(lambda: 1 // 0),
    }


class Toy(nn.Module):
    """Dropout on a replicated tensor, then on shards of it; both show in the gradients."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.first = nn.Parameter(torch.linspace(-1, 1, 48).view(6, 8))
        self.second = nn.Parameter(torch.linspace(1, 2, 48).view(6, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replicated = functional.dropout(x * self.first, 0.5)
        with rank_stream(self.group):
            sharded = functional.dropout(replicated * self.second, 0.5)
        with rank_stream(self.group):
            return functional.dropout(sharded.sin(), 0.5)


Run = Callable[[Toy, torch.Tensor], torch.Tensor]


def recomputed(group: dist.ProcessGroup) -> dict[str, list[torch.Tensor]]:
    """Gradients without and with recompute (both kinds, and outside in), and what is drawn afterwards."""

    def gradients(
        run: Callable[[Toy, torch.Tensor], torch.Tensor], outside: bool = False
    ) -> list[torch.Tensor]:
        torch.manual_seed(SEED)
        toy, x = Toy(group), torch.ones(6, 8, requires_grad=True)
        with rank_stream(group) if outside else nullcontext():
            output = run(toy, run(toy, x))
        drawn = draw()
        output.square().sum().backward()
        found = [x.grad, toy.first.grad, toy.second.grad, drawn, output.detach()]
        return [tensor for tensor in found if tensor is not None]

    return {
        "plain": gradients(lambda toy, x: toy(x)),
        "checkpoint": gradients(lambda toy, x: checkpoint(toy, x, use_reentrant=False)),
        "reentrant": gradients(lambda toy, x: checkpoint(toy, x, use_reentrant=True)),
        "plain inside": gradients(lambda toy, x: toy(x), outside=True),
        "checkpoint inside": gradients(lambda toy, x: checkpoint(toy, x, use_reentrant=False), outside=True),
        "not restored": gradients(
            lambda toy, x: checkpoint(toy, x, use_reentrant=False, preserve_rng_state=False)
        ),
    }


CASES = {"streams": streams, "amounts": amounts, "recomputed": recomputed, "alone": streams}
CASE_GROUPS = {
    "streams": [[0, 1, 2, 3]],
    "amounts": [[0, 1], [2, 3]],
    "recomputed": [[0, 1], [2, 3]],
    "alone": [[0], [1]],
}


def run_on_rank(rank: int, folder: str) -> None:
    run_cases(rank, folder, WORLD_SIZE, CASES, CASE_GROUPS)
