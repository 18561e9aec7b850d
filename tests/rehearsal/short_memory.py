"""A training with less memory than it needs, on the rehearsal's device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hf_actswap import apply
from tests.engine.tiny_models import VOCABULARY, tiny_llama
from tests.rehearsal.trainings import device, give_back

MODES: Mapping[str, Mapping[str, Any]] = {
    "swap": {"swap_config": {"swap": True, "layer_swap": [{"layers": True, "backward_prefetch": 1}]}},
    "smart_swap": {"memory": {"mode": "smart_swap", "warmup_steps": 1, "search_steps": 1}},
    "adaptive": {"memory": {"mode": "adaptive", "warmup_steps": 1, "search_steps": 1}},
    "tiles": {
        "memory": {"mode": "adaptive", "warmup_steps": 1, "search_steps": 1},
        "tile_config": {"tile": {"op_name": "feed_forward"}, "loss": 128},
    },
    "stream": {"stream_config": {"tokens": 128}, "tile_config": {"loss": 128}},
}
STEPS, TOKENS = 3, 512


@dataclass(frozen=True)
class Ended:
    """How a training ended.

    Args:
        values: the losses, and the gradients of the last step; empty: it did not get there.
        error: what ended it; ``None``: nothing did.
        most_bytes: the most that the allocator held, beyond what it held before.
    """

    values: tuple[torch.Tensor, ...]
    error: RuntimeError | ValueError | None
    most_bytes: int


def trained(mode: str | None) -> Ended:
    """Train a Llama with a wide feed-forward for some steps."""
    before_bytes = held_bytes()
    torch.cuda.reset_peak_memory_stats()
    values, error = (), None
    try:
        values = tuple(_values(mode))
    except (RuntimeError, ValueError) as found:
        error = found.with_traceback(None)  # its frames hold tensors
        error.__context__ = error.__cause__ = None
    most_bytes = torch.cuda.max_memory_reserved() - before_bytes
    give_back()
    return Ended(values, error, most_bytes)


def held_bytes() -> int:
    """Return what the allocator must hold now, for other tests of this process."""
    give_back()
    return torch.cuda.memory_reserved()


def _values(mode: str | None) -> Iterator[torch.Tensor]:
    model = tiny_llama(hidden_size=32, intermediate_size=8192, use_cache=False).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    applied = None if mode is None else apply(model, dict(MODES[mode]), optimizer=optimizer)
    try:
        for number in range(STEPS):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(number)
            ids = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator).to(device())
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            yield loss.detach().cpu()
        yield from (item.grad.cpu() for item in model.parameters())
    finally:
        if applied is not None:
            applied.remove()


@contextmanager
def at_most(limit_bytes: float) -> Iterator[None]:
    """Let the allocator hold no more than ``limit_bytes`` beyond what it holds before."""
    _, total_bytes = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((held_bytes() + limit_bytes) / total_bytes)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
