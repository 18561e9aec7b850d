"""Lets ranks agree before their first collective, or fail together with the cause; names ranks that ended.

**Agreement.** Ranks with different configurations or models do not fail where they differ: they wait for each
other in some collective until the backend's timeout, whose error does not name the cause. The same happens to
the others when one rank fails by itself. So each rank first publishes a few short facts, or that it failed,
in the key-value store of the process group (before that exists, in the launcher's): this needs no device and
no collective, and works with any backend.

There are two rounds. In the first every rank reads the facts of all others; in the second, whether the others
agreed. Without the second, a rank that comes late would find all facts and continue alone after the others
have given up.

**Lost ranks.** When another rank's collective fails, the backend says only that a connection was closed, by
an address, or that a time-out has passed. The neighbours of a dead rank end because of such an error, and
their neighbours then see theirs end. So a rank with such an error asks, through the store, which ranks are
there. Within `LostRanks.named`, where a training runs, a thread of each rank answers, also while the rank
waits in a collective. Elsewhere a rank answers only if it has such an error itself. A rank that leaves the
block by an exception puts that into the store, so that the others can name the cause.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from ..errors import ActSwapError, Problem
from .mesh import started_processes

WAIT_S = 1800.0
"""How long ranks wait for a slower one by default, in seconds: as long as collectives do."""

READERS_S = 5.0
"""How long a failing rank waits for the others to read its report, in seconds: it may serve the store."""

_AGREED = "agreed"
_FAILURE = "failure"


class RankAgreementError(ActSwapError):
    """Ranks differ in what they must have in common, or do not answer."""

    subject = "agreement of the ranks"


def answering_ranks(store: Store, keys: Mapping[int, str], timeout_s: float) -> list[int]:
    """Wait for the ranks' keys in a store; return the ranks whose keys are there in time."""
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
        return list(keys)
    except RuntimeError:  # the time is up (a FileStore has no class for that), or the store is gone
        return [rank for rank, key in keys.items() if store.check([key])]


@dataclass(frozen=True)
class _Agreement:
    """One agreement: its keys in the store, the ranks that take part, and the time limit of each round."""

    store: Store
    name: str
    rank: int
    ranks: Sequence[int]
    timeout_s: float

    def publish(self, round_name: str, text: str) -> None:
        self.store.set(self._key(round_name, self.rank), text)

    def read(self, round_name: str) -> dict[int, str]:
        """Return the text that each rank published, without ranks that did not answer in time."""
        keys = {rank: self._key(round_name, rank) for rank in self.ranks}
        present = answering_ranks(self.store, keys, self.timeout_s)
        return {rank: self.store.get(keys[rank]).decode() for rank in present}

    def wait_for_readers(self, ranks: Sequence[int]) -> None:
        """Wait until these ranks have read everything that they need, at most `READERS_S`."""
        self.publish("read", "")
        answering_ranks(self.store, {rank: self._key("read", rank) for rank in ranks}, READERS_S)

    def _key(self, round_name: str, rank: int) -> str:
        return f"hf_actswap/{self.name}/{round_name}/{rank}"


@contextmanager
def shared_store(timeout_s: float = WAIT_S) -> Iterator[tuple[Store, int, int] | None]:
    """Yield a store that all ranks share, this rank, and the number of ranks; ``None`` if it is alone.

    Before the process group exists, the launcher serves the store or, within this block, rank 0. So start the
    group within the block: otherwise other ranks may connect to a store that is about to close.
    """
    if dist.is_available() and dist.is_initialized():
        yield dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
        return
    found = None
    if started_processes(os.environ) > 1 and os.environ.get("MASTER_PORT", "0") != "0":
        with suppress(RuntimeError, ValueError):  # another server may be at the address
            found = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    yield found


@contextmanager
def failing_together(name: str, timeout_s: float = WAIT_S) -> Iterator[dict[str, str]]:
    """A ``with`` block that succeeds on all ranks or fails on all. Every rank must enter it; do not nest it.

    A rank that fails in the block raises its own error, after at most `READERS_S`; the others raise an error
    that names this rank and its error when they reach the end of the block. With one process it does nothing.
    The block gets a dict for facts that must be the same on all ranks; see `check_agreement`.

    Args:
        name: what the block does; calls are counted by name.
        timeout_s: how long a rank waits at the end of the block for the others.

    Raises:
        RankAgreementError: another rank failed, or its facts differ, or it did not come.
    """
    with shared_store(timeout_s) as shared:
        facts: dict[str, str] = {}
        agreement = None
        if shared is not None and shared[2] > 1:
            store, rank, world_size = shared
            agreement = _next_agreement(store, name, rank, range(world_size), timeout_s)
        try:
            yield facts
        except BaseException as error:
            if agreement is not None:
                _tell(agreement, error)
            raise
        if agreement is not None:
            _agree(agreement, facts)


def _next_agreement(store: Store, name: str, rank: int, ranks: Sequence[int], timeout_s: float) -> _Agreement:
    count = store.add(f"hf_actswap/{name}/calls/{rank}", 1)
    return _Agreement(store, f"{name}/{count}", rank, ranks, timeout_s)


def _tell(agreement: _Agreement, error: BaseException) -> None:
    """Report to the others that this rank has failed; wait at most `READERS_S` until they have read it."""
    said = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
    with suppress(RuntimeError):  # the store is gone, and the error is what counts
        agreement.publish("facts", json.dumps({_FAILURE: said}))
        agreement.publish("verdict", json.dumps([said]))
        if isinstance(error, Exception):
            agreement.wait_for_readers(agreement.ranks)


def parameters_fact(model: nn.Module) -> str:
    """Return a short text that differs where names, shapes, dtypes or frozen parameters of models differ.

    Shapes are those of this rank: take it before a model is split, or after a split into equal parts.
    """
    lines = [
        f"{name} {list(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
        for name, parameter in model.named_parameters()
    ]
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{len(lines)} tensors, {count} elements, {digest(''.join(lines))}"


def digest(text: str) -> str:
    """Return twelve hexadecimal digits that stand for a text."""
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def check_agreement(
    facts: Mapping[str, str],
    timeout_s: float = 60.0,
    name: str = "set-up",
    ranks: Sequence[int] | None = None,
) -> None:
    """Return when all ranks have called this with the same facts. A rank's n-th call meets the others' n-th.

    Args:
        facts: e.g. ``{"tensor_parallel_size": "2", "configuration": digest(...)}``; short texts.
        timeout_s: how long to wait for the others, in each of two rounds. A rank that has more to do before
            its call (loading a model) needs that time.
        name: name of what is agreed on; calls are counted by name.
        ranks: the ranks that take part, this rank included; ``None``: all.

    Raises:
        RankAgreementError: on every rank that takes part: a fact differs (with the ranks per value), or ranks
            did not answer in time (with their numbers).
        RuntimeError: there is no process group.
    """
    everyone = range(dist.get_world_size()) if ranks is None else ranks
    if len(everyone) > 1:
        store = dist.distributed_c10d._get_default_store()
        _agree(_next_agreement(store, name, dist.get_rank(), everyone, timeout_s), facts)


def _agree(agreement: _Agreement, facts: Mapping[str, str]) -> None:
    try:
        agreement.publish("facts", json.dumps(dict(facts)))
        found = agreement.read("facts")
        problems = [*_missing(found, agreement), *_differences(found)]
        agreement.publish("verdict", json.dumps([str(p) for p in problems]) if problems else _AGREED)
        if not problems:
            verdicts = agreement.read("verdict")
            problems = [*_missing(verdicts, agreement), *_rejections(verdicts)]
        if problems:
            agreement.wait_for_readers(list(found))
    except RuntimeError as error:
        expected = "a store that answers"
        hint = "The process that serves it, usually rank 0, has ended; look for its error."
        problem = Problem(agreement.name, expected, str(error).splitlines()[0], hint)
        raise RankAgreementError([problem]) from None
    if problems:
        name = agreement.name.rpartition("/")[0]
        raise RankAgreementError(problems, f"{name}, rank {agreement.rank} of {_listed(agreement.ranks)}")


def _missing(found: Mapping[int, str], agreement: _Agreement) -> list[Problem]:
    missing = [other for other in agreement.ranks if other not in found]
    if not missing:
        return []
    expected = f"answers from all of {_listed(agreement.ranks)} within {agreement.timeout_s:g} s"
    hint = (
        "Look for their errors. If they are only slow, give more time: ddp_timeout of the training "
        "arguments, or timeout_s of patch_model."
    )
    return [Problem("ranks", expected, f"none from {_listed(missing)}", hint)]


def _differences(found: Mapping[int, str]) -> list[Problem]:
    facts: dict[int, dict[str, str]] = {rank: json.loads(text) for rank, text in found.items()}
    failed = {rank: of_rank[_FAILURE] for rank, of_rank in facts.items() if _FAILURE in of_rank}
    if failed:
        return [Problem(f"rank {rank}", "no error on any rank", error) for rank, error in failed.items()]
    problems = []
    for key in dict.fromkeys(key for of_rank in facts.values() for key in of_rank):
        values = {rank: of_rank.get(key, "(nothing)") for rank, of_rank in facts.items()}
        if len(set(values.values())) > 1:
            hint = "Start all ranks with the same configuration, code, model and data."
            problems.append(Problem(key, "the same on all ranks", by_rank(values), hint))
    return problems


def by_rank(values: Mapping[int, str]) -> str:
    """Return which ranks have which of the values: ``4 on ranks 0, 1; 2 on rank 2``."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_listed(ranks)}" for value, ranks in ranks_of.items())


def _rejections(verdicts: Mapping[int, str]) -> list[Problem]:
    rejected = {rank: json.loads(text) for rank, text in verdicts.items() if text != _AGREED}
    if not rejected:
        return []
    hint = f"They say: {' '.join(next(iter(rejected.values())))}"
    return [Problem("ranks", "agreement of all", f"none of {_listed(list(rejected))}", hint)]


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


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
_ALL_ANSWER = "All of them answer"
_NO_BLOCK = (
    "Only the ranks of this collective were asked, and one that waits for something else gives no sign: in "
    "`with prepared.naming_lost_ranks():` around the loop all are asked, and all that are there answer."
)


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
    if isinstance(error, LostRankError) or not any(sign in text.lower() for sign in _SIGNS):
        return None
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    try:
        who = _who(ranks) or f"{_ALL_ANSWER}: one of them is late, or waits for something else."
    except RuntimeError:
        gone = "The store of the process group is gone too: look at the process that serves it, usually rank"
        who = told or f"{gone} 0."
    first_line = text.splitlines()[0] if text else type(error).__name__
    return LostRankError(
        f"rank {dist.get_rank()}: a collective of ranks {ranks} failed, because a rank has ended or does not "
        f"answer. {who} Look for the first error of that process, and start all of them again from "
        f"the last checkpoint. The backend says: {first_line}"
    )


def _who(ranks: list[int]) -> str:
    """Ask all ranks; return who has left or does not answer, empty if nobody.

    Ranks outside of ``ranks`` are asked too, if they are in a training (`LostRanks`). RuntimeError: the store
    does not answer.
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
        said += [_NO_BLOCK] if own not in states else []
    found = " ".join(said)
    store.set(f"{_KEY}/{number}/found", found)
    readers = {rank: f"{_KEY}/{number}/read/{rank}" for rank in present if rank in states and rank != own}
    answering_ranks(store, readers, _READ_LIMIT_S)
    return found


def _states(store: Store, ranks: Iterable[int]) -> dict[int, str]:
    return {rank: store.get(_state(rank)).decode() for rank in ranks if store.check([_state(rank)])}


def _state(rank: int) -> str:
    """Return the key of what a rank in a training says of itself: empty while it trains."""
    return f"{_KEY}/state/{rank}"


def _answer(number: int, rank: int) -> str:
    return f"{_KEY}/{number}/here/{rank}"


class LostRanks:
    """Answers for this rank while it trains, and names lost ranks in the errors of the training.

    ``told`` is what another rank has found out about lost ranks; empty: nothing.
    """

    def __init__(self) -> None:
        self.told = ""
        self._inside = False

    @contextmanager
    def named(self) -> Iterator[None]:
        """A ``with`` block from which errors of collectives, of any library, come as `LostRankError`.

        Only if a rank has left or does not answer; other errors come as they are. Blocks may be nested. With
        one process it does nothing.
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
            if isinstance(error, LostRankError):
                lost: LostRankError | None = error
            else:
                lost = lost_rank_error(error, None, self.told)
                lost = None if _ALL_ANSWER in str(lost) else lost
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
    key = f"{_KEY}/asked"
    return int(store.get(key)) if store.check([key]) else 0


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":. ")
