"""A rank that dies in the middle of a training: said by every other rank, in words, as soon as it shows.

The backend says only that a connection was closed, by an address, or that its time is up. So the ranks that
notice write that they are there into the key-value store of the process group, and look who does not.
"""

from __future__ import annotations

import torch.distributed as dist

from .rank_agreement import answering_ranks

ANSWER_LIMIT_S = 5.0
"""How long a rank that lost another waits for the rest to notice too."""

_SIGNS = ("closed by peer", "reset by peer", "timed out", "timeout", "broken pipe", "connection refused")
"""What backends say when a peer is gone, in lower case."""


class LostRankError(RuntimeError):
    """A rank has ended, or does not answer: the others cannot go on."""


def lost_rank_error(error: RuntimeError, group: dist.ProcessGroup | None) -> LostRankError | None:
    """Return what to raise in the place of a collective's error; ``None``: it is about something else.

    Waits up to `ANSWER_LIMIT_S` for the other ranks of the group.

    Args:
        error: as the backend raised it.
        group: whose collective it was; ``None``: all ranks, or not known.
    """
    text = str(error)
    if isinstance(error, LostRankError) or not any(sign in text.lower() for sign in _SIGNS):
        return None
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    first_line = text.splitlines()[0] if text else type(error).__name__
    return LostRankError(
        f"rank {dist.get_rank()}: a collective of ranks {ranks} failed, because a rank has ended or does not "
        f"answer. {_who(ranks)} Look for the first error of that process, and start all of them again from "
        f"the last checkpoint. The backend says: {first_line}"
    )


def _who(ranks: list[int]) -> str:
    try:
        silent = _silent(ranks)
    except RuntimeError:
        return (
            "The store of the process group is gone too: look at the process that serves it, usually rank 0."
        )
    if not silent:
        return "All of them noticed: one of another group has ended."
    return f"No sign within {ANSWER_LIMIT_S:g} s of: {', '.join(f'rank {rank}' for rank in silent)}."


def _silent(ranks: list[int]) -> list[int]:
    """The ranks that have not noticed a loss."""
    store, own = dist.distributed_c10d._get_default_store(), dist.get_rank()
    keys = {rank: f"hf_actswap/lost/{rank}" for rank in ranks}
    store.set(f"hf_actswap/lost/{own}", "here")
    noticed = answering_ranks(store, keys, ANSWER_LIMIT_S)
    return [rank for rank in ranks if rank not in noticed]
