"""The stress that gradients must survive: many steps, all lives of graphs, and the host never waits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import nn

from hf_actswap import MemoryPlan
from hf_actswap.engine import Transfer
from hf_actswap.plan import PlanRow
from tests.engine.graph_lives import GRAPH_LIVES, run_step
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    VOCABULARY,
    on,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
    tiny_llama,
)
from tests.rehearsed import on_gpu

BATCHES = 3
needs_expandable_segments = pytest.mark.skipif(
    "expandable_segments:True" not in os.environ.get("PYTORCH_ALLOC_CONF", ""),
    reason="the allocator's segments cannot grow here, and what it reserves holds fragments",
)
"""For claims about reserved memory; `benchmarks` asks for such segments unless the device refuses them."""
SEGMENT_BYTES = 20 * 2**20
"""An expandable segment grows by so much, also past the limit: seen on PyTorch's allocator in a rehearsal."""
STEPS = on_gpu(100, 21)
"""Each life of graphs with each batch, and most of them several times."""
LAYERS = range(NUM_LAYERS)

PLANS: dict[str, MemoryPlan | str] = {
    **{name: CASES[name] for name in ("default_swap", "case_3", "case_4")},
    **{f"windows {ops}": swap_everything(ops) for ops in (0, 1, 20)},
    "auto": plan_of(*(PlanRow(layer, "", "swap") for layer in LAYERS)),
    "recomputed layers": plan_of(*recompute_rows([""], LAYERS), *swap_rows(["output"], LAYERS, 5)),
    "swapped and recomputed": plan_of(
        *recompute_rows(["mlp.mul", "mlp.act_fn.silu"], LAYERS),
        *recompute_rows(["self_attn"], [1]),
        *swap_rows(["output", "mlp.up_proj", "self_attn.flash_attention"], [0, 2, 3], 5),
    ),
}
BY_LAYER = ("windows 0", "windows 20", "auto")
"""Plans for compiled layers."""
LIVES_OF_COMPILED = tuple(life for life in GRAPH_LIVES if life != "retained")
"""What is compiled writes into what it saved, so it does not run backward twice, with a plan or without."""
LIVES_OF_SHARDED = ("one backward", "accumulated")
"""FSDP2 wants a backward for each forward, of all weights."""


class Stress:
    """A model and what its gradients must be, step by step.

    Args:
        model: a causal language model without a plan, on its device.
        shape: of a batch of token ids.
        lives: of graphs, in turn.
    """

    def __init__(self, model: nn.Module, shape: tuple[int, int], lives: Sequence[str] = GRAPH_LIVES) -> None:
        self.model, self._lives = model, lives
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(0)
        self._ids = [
            torch.randint(0, VOCABULARY, shape, generator=generator).to(device) for _ in range(BATCHES)
        ]
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._last_weight = self._trained[-1]
        self._expected: dict[tuple[str, int], list[torch.Tensor]] = {}

    def forward(self, number: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss of one batch; ``mask`` is of attention, shape (batch, 1, length, length)."""
        ids = self._ids[number % BATCHES]
        return self.model(input_ids=ids, labels=ids, attention_mask=mask).loss

    def learn(self) -> None:
        """Run every step once as the model is now: so it must be from now on."""
        for life in self._lives:
            for batch in range(BATCHES):
                self._expected[life, batch] = [bits(grad).clone() for grad in self._step(life, batch)]

    def wrong_bits(self, steps: int = STEPS) -> int:
        """Run steps and return how many gradients, of all of them, differ; the host waits only at the end."""
        found = []
        for step in range(steps):
            life, batch = self._lives[step % len(self._lives)], step % BATCHES
            pairs = zip(self._step(life, batch), self._expected[life, batch], strict=True)
            found += [(bits(grad) != expected).any() for grad, expected in pairs]
        return int(torch.stack(found).sum())

    def wrong_under(self, plan: MemoryPlan | str, transfer: Transfer, steps: int = STEPS) -> int:
        """`wrong_bits` while a plan is on the model; nothing may be left of it on the host."""
        applied = on(self.model, plan, transfer)
        with applied:
            wrong = self.wrong_bits(steps)
            stats = applied.stats()
            assert stats.offloaded_bytes > 0
            assert (stats.live_swaps, stats.host_bytes) == (0, 0)
        return wrong

    def _step(self, life: str, batch: int) -> list[torch.Tensor]:
        self.model.zero_grad()
        run_step(life, partial(self._forward_after, batch), self._last_weight)
        return [grad for parameter in self._trained if (grad := parameter.grad) is not None]

    def _forward_after(self, batch: int, number: int) -> torch.Tensor:
        return self.forward(batch + number)


def bits(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as bytes: NaN equals itself then, and the two zeros differ."""
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local.detach().contiguous().view(torch.uint8)


def small_llama(device: torch.device, hidden: int = on_gpu(256, 64)) -> nn.Module:
    """A Llama of 4 layers, bf16; without a cache, which a plan would switch off (and compiling notices)."""
    model = tiny_llama(torch.bfloat16, hidden_size=hidden, intermediate_size=2 * hidden, use_cache=False)
    return model.to(device)


def moving(plan: MemoryPlan | str) -> MemoryPlan | str:
    """Return a plan whose text has its size threshold off: tiny models are too small for it."""
    memory = "\nmemory: {min_tensor_mib: 0.0000001}\nmodel"
    return plan.replace("\nmodel", memory, 1) if isinstance(plan, str) else plan
