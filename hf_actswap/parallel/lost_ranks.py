"""Names the ranks that have ended when another rank's collective fails.

The backend says only that a connection was closed, by an address, or that a time-out has passed. And not the
ranks next to the dead one alone see such an error: they end because of it, and their neighbours then see
theirs end. So a rank with such an error asks, through the key-value store of the process group, which ranks
are there. Within `LostRanks.named`, where a training runs, a thread of each rank answers, also while the
rank waits in a collective. Elsewhere a rank answers only if it has such an error itself.

A rank that leaves the block by an exception puts that into the store, so that the others can name the cause.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .rank_agreement import answering_ranks

ANSWER_LIMIT_S = 5.0
"""How long a rank that has lost another waits for the others to answer, in seconds."""

_LOOKS_EACH_S = 0.5
"""How often a rank looks whether another asks, in seconds."""

_READ_LIMIT_S = 2.0
"""How long a rank with an answer waits for the others to read it, in seconds: it may serve the store."""

_SIGNS = (
    *("closed by peer", "reset by peer", "timed out", "timeout", "broken pipe", "connection refused"),
    *("connection closed", "socket closed", "no route to host", "network is unreachable"),
    *("remote process exited", "nccl communicator was aborted", "ncclremoteerror", "unhandled system error"),
)
"""Parts of the backends' messages when a peer has ended, in lower case."""

_KEY = "hf_actswap/lost"
_NOTICED = "has noticed that another rank is lost"


class LostRankError(RuntimeError):
    """A rank has ended, or does not answer, so that the other ranks cannot go on."""


def lost_rank_error(
    error: RuntimeError, group: dist.ProcessGroup | None, told: str = ""
) -> LostRankError | None:
    """Return the exception to raise in place of a collective's error; ``None``: it has another cause.

    Waits up to `ANSWER_LIMIT_S` for the other ranks to answer.

    Args:
        error: the error that the backend raised.
        group: the group of the collective; ``None``: all ranks, or unknown.
        told: what another rank has found out before; said if the store does not answer any more.
    """
    text = str(error)
    if isinstance(error, LostRankError) or not _is_of_a_lost_rank(error):
        return None
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    try:
        who = _who(ranks) or "All of them answer: one of them is late, or waits for something else."
    except RuntimeError:
        gone = "The store of the process group is gone too: look at the process that serves it, usually rank"
        who = told or f"{gone} 0."
    first_line = text.splitlines()[0] if text else type(error).__name__
    return LostRankError(
        f"rank {dist.get_rank()}: a collective of ranks {ranks} failed, because a rank has ended or does not "
        f"answer. {who} Look for the first error of that process, and start all of them again from "
        f"the last checkpoint. The backend says: {first_line}"
    )


def _is_of_a_lost_rank(error: RuntimeError) -> bool:
    return any(sign in str(error).lower() for sign in _SIGNS)


def _who(ranks: list[int]) -> str:
    """Ask all ranks; return who has left or does not answer, empty if nobody.

    Ranks outside of ``ranks`` are asked too, if they are in a training (`LostRanks`).

    Raises:
        RuntimeError: the store does not answer.
    """
    store, own = dist.distributed_c10d._get_default_store(), dist.get_rank()
    everyone = range(dist.get_world_size())
    asked = {*ranks, *_states(store, everyone)}
    number = store.add(f"{_KEY}/asked", 1)
    store.set(_answer(number, own), "")
    gone = {rank for rank, state in _states(store, everyone).items() if state and rank != own}
    keys = {rank: _answer(number, rank) for rank in sorted(asked - gone)}
    present = answering_ranks(store, keys, ANSWER_LIMIT_S)
    states = _states(store, everyone)  # read again: a rank may have left meanwhile
    said = [
        f"Rank {rank} has left the training: {state}."
        for rank, state in states.items()
        if state not in ("", _NOTICED) and rank != own
    ]
    if silent := [f"rank {rank}" for rank in keys if rank not in present and not states.get(rank)]:
        said.append(f"No sign within {ANSWER_LIMIT_S:g} s of: {', '.join(silent)}.")
    found = " ".join(said)
    store.set(f"{_KEY}/{number}/found", found)
    readers = {rank: f"{_KEY}/{number}/read/{rank}" for rank in present if rank in states and rank != own}
    answering_ranks(store, readers, _READ_LIMIT_S)
    return found


def _states(store: Store, ranks: Iterable[int]) -> dict[int, str]:
    """Return what each rank that is or was in a training says of itself."""
    return {rank: store.get(_state(rank)).decode() for rank in ranks if store.check([_state(rank)])}


def _state(rank: int) -> str:
    """Return the key of what a rank in a training says of itself: empty while it trains."""
    return f"{_KEY}/state/{rank}"


def _answer(number: int, rank: int) -> str:
    return f"{_KEY}/{number}/here/{rank}"


class LostRanks:
    """Answers for this rank while it trains, and names lost ranks in the errors of the training.

    Attributes:
        told: what another rank has found out about lost ranks; empty: nothing.
    """

    def __init__(self) -> None:
        self.told = ""
        self._inside = False

    @contextmanager
    def named(self) -> Iterator[None]:
        """A ``with`` block from which errors of collectives, of any library, come as `LostRankError`.

        Only if a rank has left or does not answer; other errors come as they are. Blocks may be nested. With
        one process it does nothing.

        Raises:
            LostRankError: a rank has ended, or does not answer.
        """
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if self._inside or not several:
            yield
            return
        store: Any = dist.distributed_c10d._get_default_store()
        stopped, rank = threading.Event(), dist.get_rank()
        self.told, asked = "", _asked(store)
        store.set(_state(rank), "")
        of_thread = store.clone()  # a store waits for one answer at a time
        thread = threading.Thread(target=self._answer, args=(of_thread, rank, asked, stopped), daemon=True)
        thread.start()
        self._inside, state = True, "it has ended without an error"
        try:
            yield
        except RuntimeError as error:
            lost = error if isinstance(error, LostRankError) else self._instead_of(error)
            state = _NOTICED if lost is not None else _in_a_line(error)
            if lost is None or lost is error:
                raise
            raise lost from None
        except BaseException as error:
            state = _in_a_line(error)
            raise
        finally:
            self._inside = False
            stopped.set()
            thread.join(_LOOKS_EACH_S)
            with suppress(RuntimeError):  # the store is gone
                store.set(_state(rank), state)

    def _instead_of(self, error: RuntimeError) -> LostRankError | None:
        """Return the error to raise if a rank is lost; ``None``: all are there."""
        if not _is_of_a_lost_rank(error):
            return None
        found = lost_rank_error(error, None, self.told)
        return None if found is None or "All of them answer" in str(found) else found

    def _answer(self, store: Store, rank: int, answered: int, stopped: threading.Event) -> None:
        """Answer each question until ``stopped``, and remember what the one who asked has found out."""
        read = answered
        with suppress(RuntimeError):  # the store is gone: nobody can ask
            while not stopped.wait(_LOOKS_EACH_S):
                for number in range(answered + 1, _asked(store) + 1):
                    store.set(_answer(number, rank), "")
                    answered = number
                while read < answered and store.check([f"{_KEY}/{read + 1}/found"]):
                    read += 1
                    self.told = store.get(f"{_KEY}/{read}/found").decode() or self.told
                    store.set(f"{_KEY}/{read}/read/{rank}", "")


def _asked(store: Store) -> int:
    """Return how often a rank has asked who is there."""
    key = f"{_KEY}/asked"
    return int(store.get(key)) if store.check([key]) else 0


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":. ")
