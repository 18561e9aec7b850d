"""Checks that all ranks agree before their first collective, or lets all of them fail with the cause.

Ranks with different configurations or models do not fail where they differ: they wait for each other in some
collective until the backend's timeout, whose error does not name the cause. The same happens to the others
when one rank fails by itself. So each rank first publishes a few short facts, or that it failed, in the
key-value store of the process group: this needs no device and no collective, and works with any backend.
Before the process group exists, it is the store that the launcher provides for starting the group.

There are two rounds. In the first every rank reads the facts of all others; in the second, whether the others
agreed. Without the second, a rank that comes late would find all facts and continue alone after the others
have given up.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import nn
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


def answering_ranks(
    store: dist.distributed_c10d.Store, keys: Mapping[int, str], timeout_s: float
) -> list[int]:
    """Wait for the ranks' keys in a store; return the ranks whose keys are there in time.

    Raises:
        RuntimeError: the store does not answer.
    """
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
        return list(keys)
    except RuntimeError:  # the time is up (a FileStore has no class for that), or the store is gone
        return [rank for rank, key in keys.items() if store.check([key])]


@dataclass(frozen=True)
class _Agreement:
    """One agreement: its keys in the store, the ranks that take part, and the time limit of each round."""

    store: dist.distributed_c10d.Store
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
def shared_store(timeout_s: float = WAIT_S) -> Iterator[tuple[dist.distributed_c10d.Store, int, int] | None]:
    """Yield a store that all ranks share, this rank, and the number of ranks; ``None`` if it is alone.

    Before the process group exists, the launcher serves the store or, within this block, rank 0. So start the
    group within the block: otherwise other ranks may connect to a store that is about to close.

    Args:
        timeout_s: how long to wait for the others.
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

    Args:
        name: what the block does; calls are counted by name.
        timeout_s: how long a rank waits at the end of the block for the others.

    Yields:
        A dict for facts that must be the same on all ranks; see `check_agreement`.

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


def _next_agreement(
    store: dist.distributed_c10d.Store, name: str, rank: int, ranks: Sequence[int], timeout_s: float
) -> _Agreement:
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
    """Return twelve hexadecimal digits that stand for a text, e.g. a configuration's dump."""
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
    return [
        Problem(
            "ranks",
            f"answers from all of {_listed(agreement.ranks)} within {agreement.timeout_s:g} s",
            f"none from {_listed(missing)}",
            "Look for their errors. If they are only slow, give more time: ddp_timeout of the training "
            "arguments, or timeout_s of patch_model.",
        )
    ]


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
    first = next(iter(rejected.values()))
    return [
        Problem(
            "ranks", "agreement of all", f"none of {_listed(list(rejected))}", f"They say: {' '.join(first)}"
        )
    ]


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
