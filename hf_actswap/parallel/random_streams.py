"""Random numbers that differ over the ranks of a group, from a stream that is the same on all of them.

Ranks of a tensor-parallel group draw the same numbers wherever they hold the same tensor: the model's
dropout outside of the sharded regions must agree on all replicas. On shards (a part of the sequence, some of
the heads) they must differ. NxD and Megatron keep a second stream with a tracker, a global, which PyTorch's
checkpointing does not restore: a dropout that runs again draws another mask.

Here nothing is kept. A rank's own stream is derived, at the moment that it is needed, from the state of the
common one and the rank. Afterwards the common stream is where it was, moved on by one draw, however
much was drawn from the derived one. Whoever restores the common stream, as `torch.utils.checkpoint` does,
therefore gets the same masks again, and a saved random state of one rank is that of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist

from .collectives import group_or_enclosing

MODEL_PARALLEL_OFFSET = 2718
"""Number that NxD and Megatron add to the seed for ranks' own streams (``parallel_layers/random.py``)."""

_SEEDS = 2**63
_OFFSET_STEP = 4
"""Random numbers of one call of a counter-based generator (Philox), whose offset is a multiple of this."""


def model_parallel_seed(seed: int, rank: int) -> int:
    """Return the seed of NxD's and Megatron's stream of a rank.

    Use it only to draw the same numbers as they do, e.g. for weights initialised on the device; the library's
    own regions use `rank_stream`.
    """
    return seed + MODEL_PARALLEL_OFFSET + rank


@contextmanager
def rank_stream(
    group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> Iterator[None]:
    """Within the ``with`` block, default generators draw other numbers on each rank of the group.

    The ranks enter with equal states and leave with equal states. In a group of one nothing changes: such a
    model draws the same numbers as without this library. Blocks may nest. The host never waits for a device.

    Args:
        group: tensor-parallel group; ``None``: that of the enclosing `tensor_parallel_group`.
        device: the generator that the block draws from; ``None``: the CPU's, and the current accelerator's
            where one is in use.

    Raises:
        RuntimeError: no group was given, and none encloses.
    """
    found = group_or_enclosing(group)
    if found.size() == 1:
        yield
        return
    generators = _generators(None if device is None else torch.device(device))
    states = [generator.get_state() for generator in generators]
    try:
        for generator, state in zip(generators, states, strict=True):
            generator.manual_seed(_derived_seed(state, found.rank()))
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
            _move_on(generator)


def _generators(device: torch.device | None) -> list[torch.Generator]:
    if device is not None and device.type == "cpu":
        return [torch.default_generator]
    found = [] if device is not None else [torch.default_generator]
    accelerator = torch.accelerator.current_accelerator(check_available=True) if device is None else device
    if accelerator is None:
        return found
    # Empty until the device is first used; before that nothing can be drawn on it.
    of_devices = getattr(torch.get_device_module(accelerator), "default_generators", ())
    if not of_devices:
        return found
    index = cast("int | None", accelerator.index)
    return [*found, of_devices[torch.accelerator.current_device_index() if index is None else index]]


def _derived_seed(state: torch.Tensor, rank: int) -> int:
    """Return a seed made of a generator's state (bytes on the host, for devices too) and the rank."""
    digest = hashlib.blake2b(state.numpy().tobytes(), key=str(rank).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") % _SEEDS


def _move_on(generator: torch.Generator) -> None:
    if generator.device.type == "cpu":
        torch.rand((), generator=generator, device="cpu")
    else:
        generator.set_offset(generator.get_offset() + _OFFSET_STEP)
