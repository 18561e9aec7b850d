"""All ranks agree on what they are about to do, or all of them say who does not, in bounded time.

Ranks that hold different configurations or models do not fail where they differ: they wait for each other in
some collective, for as long as the backend's timeout, and then say nothing of the cause. So each publishes
a few short facts first, in the key-value store of the process group: no device, no collective, any backend.

Two rounds. In the first every rank reads every other's facts; in the second, every other's verdict. Without
the second a rank that comes a moment too late would find all facts and go on, alone, when the others have
given up already.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from ..errors import ActSwapError, Problem

_AGREED = "agreed"


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
    except RuntimeError:  # the time is up, a FileStore has no class of its own for it; or the store is gone
        return [rank for rank, key in keys.items() if store.check([key])]


@dataclass(frozen=True)
class _Turn:
    """One agreement: its keys in the store, the ranks, and for how long each round may take."""

    store: dist.distributed_c10d.Store
    name: str
    ranks: Sequence[int]
    timeout_s: float

    def publish(self, round_name: str, rank: int, text: str) -> None:
        self.store.set(self._key(round_name, rank), text)

    def read(self, round_name: str) -> dict[int, str]:
        """What the ranks published; those that did not in time are not in it."""
        keys = {rank: self._key(round_name, rank) for rank in self.ranks}
        present = answering_ranks(self.store, keys, self.timeout_s)
        return {rank: self.store.get(keys[rank]).decode() for rank in present}

    def _key(self, round_name: str, rank: int) -> str:
        return f"hf_actswap/{self.name}/{round_name}/{rank}"


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
    """Return when all ranks have called it with the same facts. The n-th call meets the others' n-th.

    Args:
        facts: e.g. ``{"tensor_parallel_size": "2", "configuration": digest(...)}``; short texts.
        timeout_s: how long to wait for the others, in each of two rounds. A rank that has more to do before
            its call (loading a model) needs that time.
        name: what is agreed on; each name counts its own calls.
        ranks: who takes part, this rank included; ``None``: all.

    Raises:
        RankAgreementError: on every rank that takes part: a fact differs (with the ranks per value), or ranks
            did not answer in time (with their numbers).
        RuntimeError: there is no process group.
    """
    everyone = range(dist.get_world_size()) if ranks is None else ranks
    if len(everyone) == 1:
        return
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    count = store.add(f"hf_actswap/{name}/calls/{rank}", 1)
    turn = _Turn(store, f"{name}/{count}", everyone, timeout_s)
    try:
        turn.publish("facts", rank, json.dumps(dict(facts)))
        found = turn.read("facts")
        problems = [*_missing(found, turn, rank), *_differences(found)]
        turn.publish("verdict", rank, json.dumps([str(p) for p in problems]) if problems else _AGREED)
        if not problems:
            verdicts = turn.read("verdict")
            problems = [*_missing(verdicts, turn, rank), *_refusals(verdicts)]
    except RuntimeError as error:
        expected = "a store that answers"
        hint = "The process that serves it, usually rank 0, has ended; look for its error."
        raise RankAgreementError([Problem(name, expected, str(error).splitlines()[0], hint)]) from error
    if problems:
        raise RankAgreementError(problems, f"{name}, rank {rank} of {dist.get_world_size()}")


def _missing(found: Mapping[int, str], turn: _Turn, rank: int) -> list[Problem]:
    missing = [other for other in turn.ranks if other not in found]
    if not missing:
        return []
    return [
        Problem(
            "ranks",
            f"an answer of all of {_listed(turn.ranks)} within {turn.timeout_s:g} s",
            f"none of {_listed(missing)}",
            "Look for their errors; if they are only slow, give more time (timeout_s).",
        )
    ]


def _differences(found: Mapping[int, str]) -> list[Problem]:
    facts: dict[int, dict[str, str]] = {rank: json.loads(text) for rank, text in found.items()}
    problems = []
    for key in dict.fromkeys(key for of_rank in facts.values() for key in of_rank):
        ranks_of: dict[str, list[int]] = {}
        for rank, of_rank in facts.items():
            ranks_of.setdefault(of_rank.get(key, "(nothing)"), []).append(rank)
        if len(ranks_of) > 1:
            values = "; ".join(f"{value} on {_listed(ranks)}" for value, ranks in ranks_of.items())
            hint = "Start all ranks with the same configuration, code and model."
            problems.append(Problem(key, "the same on all ranks", values, hint))
    return problems


def _refusals(verdicts: Mapping[int, str]) -> list[Problem]:
    refused = {rank: json.loads(text) for rank, text in verdicts.items() if text != _AGREED}
    if not refused:
        return []
    first = next(iter(refused.values()))
    return [
        Problem(
            "ranks", "agreement of all", f"none of {_listed(list(refused))}", f"They say: {' '.join(first)}"
        )
    ]


def _listed(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
