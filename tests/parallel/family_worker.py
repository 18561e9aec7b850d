"""What each process runs of the families: tiny models in one process, with plans, and divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from docs.make_families import page_of
from hf_actswap.apply import apply
from hf_actswap.parallel.patch_model import Patched, PatchError, patch_model
from tests.family_steps import REJECTED, RIGHT, WRONG, Finding, loss_tiled, streamed, tiled
from tests.parallel.patch_worker import LENGTH, Case, compared, config, step
from tests.parallel.patched_models import FAMILIES, NOT_TESTED, tiny_model
from tests.processes import launch, run_cases

ODD_LENGTH = LENGTH + 1
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
"""Relative; float32, some of whose models compute with numbers that are large beside their gradients."""

PLANS: dict[str, dict[str, Any]] = {
    "swap": {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 4, "layers": True}]}},
    "recompute": {"recompute_config": {"recompute": True}},
}
PIECES: dict[str, Callable[[str], Finding]] = {"tiles": tiled, "loss": loss_tiled, "stream": streamed}
"""Column of the page -> what finds out about a family in one process, in pieces of its tokens."""
WAYS = {"tp{}": False, "tp{} sp": True}
"""Name, for a number of ranks -> whether sequence parallelism is on."""
Findings = dict[str, dict[str, Finding]]
"""By family and way."""


def case_of(family: str, sequence_parallel: bool = False) -> Case:
    """Return what is run of a family: two sequences, one of them with padding.

    Under sequence parallelism they have a length that the ranks do not divide.
    """
    call = {} if family == "xlm" else {"use_cache": False}  # it knows no cache
    length = ODD_LENGTH if sequence_parallel else LENGTH
    return Case(family, sequence_parallel, call=call, length=length, counted=False)


def divided(family: str, sequence_parallel: bool, group: dist.ProcessGroup) -> Finding:
    """Say whether a divided model has the loss, each gradient and the state dict of one process.

    The state dict is saved whole, loaded into a divided model of other weights, and saved again.
    """
    try:
        found, alone, patched = compared(case_of(family, sequence_parallel), group)
    except PatchError as error:
        return REJECTED, "; ".join(f"{problem.expected}: {problem.found}" for problem in error.problems)
    errors = found.errors.items()
    wrong = [f"gradient of {name}: {error:.1g}" for name, error in errors if not error < GRADIENT_TOLERANCE]
    for loss, expected in zip(found.losses, found.expected_losses, strict=True):
        if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):
            wrong.append(f"loss {loss}, not {expected}")
    wrong += [f"gradient of {name} differs between ranks" for name in found.drift]
    wrong += [f"gradient of {name} is in one of both only" for name in found.missing]
    wrong += _wrong_states(family, sequence_parallel, group, alone, patched)
    return (WRONG, "; ".join(wrong[:3])) if wrong else (RIGHT, _what_is_divided(patched))


def _wrong_states(
    family: str, sequence_parallel: bool, group: dist.ProcessGroup, alone: Any, patched: Patched
) -> list[str]:
    expected, saved = alone.state_dict(), patched.full_state_dict()
    again = patch_model(tiny_model(family, seed=9), config(group, sequence_parallel), group)
    again.load_full_state_dict(saved)
    loaded = again.full_state_dict()
    return [
        f"{name} {what}"
        for what, state in (("saved", saved), ("loaded", loaded))
        for name in expected.keys() | state.keys()
        if name not in state or name not in expected or not torch.equal(state[name], expected[name])
    ]


def _what_is_divided(patched: Patched) -> str:
    """Percentage of the layers' parameters that are divided, by number of elements."""
    divided_names = patched.sharded
    of_layers = {
        name: p.numel() * (patched.group.size() if name in divided_names else 1)
        for name, p in patched.model.named_parameters()
        if any(part.isdecimal() for part in name.split("."))
    }
    part = sum(count for name, count in of_layers.items() if name in divided_names)
    return f"{100 * part / sum(of_layers.values()):.0f} %"


def planned(family: str, plan: str, _group: dist.ProcessGroup) -> Finding:
    """Say whether gradients in one process are bitwise those without a plan, which must do something."""
    case = case_of(family)
    alone, model = tiny_model(family), tiny_model(family)
    losses = step(alone, case)
    try:
        applied = apply(model, PLANS[plan])
    except ValueError as error:
        return REJECTED, str(error).splitlines()[-1].strip(" -")
    found, stats = step(model, case), applied.stats()
    applied.remove()
    other = dict(model.named_parameters())
    wrong = [] if found == losses else [f"loss {found}, not {losses}"]
    differing = [name for name, p in alone.named_parameters() if not _same(p.grad, other[name].grad)]
    wrong += [f"gradient of {name}" for name in differing]
    recomputes = any(row.fate == "recompute" for row in applied.plan.rows)
    if not (stats.offloaded_bytes if plan == "swap" else recomputes):
        wrong.append("nothing was done")
    return (WRONG, "; ".join(wrong[:3])) if wrong else (RIGHT, "")


def _alone(way: Callable[[str], Finding], family: str, _group: dist.ProcessGroup) -> Finding:
    return way(family)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def run_families(families: Sequence[str], both_ways: Sequence[str], rank: int, folder: str) -> None:
    """Divide some families among two ranks; those that are not in ``both_ways`` with the sequence only."""
    found = {family: _divisions(family) for family in families}
    for family in set(families) - set(both_ways):
        del found[family]["tp2"]
    _run(rank, folder, 2, found)


def run_everything(rank: int, folder: str) -> None:
    """Divide all families among two ranks, put plans on them, and run them in tiles and chunks."""
    plans = {
        family: {plan: (partial(planned, family, plan), [[place % 2]]) for plan in PLANS}
        for place, family in enumerate(FAMILIES)
    }
    pieces = {
        family: {name: (partial(_alone, way, family), [[place % 2]]) for name, way in PIECES.items()}
        for place, family in enumerate(FAMILIES)
    }
    _run(rank, folder, 2, {f: {**plans[f], **pieces[f], **_divisions(f)} for f in FAMILIES})


def run_on_four(rank: int, folder: str) -> None:
    """Divide all families among four ranks, more than have key and value heads."""
    _run(rank, folder, 4, {f: _divisions(f, 4) for f in FAMILIES})


_Run = tuple[Callable[[dist.ProcessGroup | None], object], list[list[int]]]


def _divisions(family: str, ranks: int = 2) -> dict[str, _Run]:
    everybody = [list(range(ranks))]
    return {way.format(ranks): (partial(divided, family, sp), everybody) for way, sp in WAYS.items()}


def _run(rank: int, folder: str, ranks: int, families: dict[str, dict[str, _Run]]) -> None:
    transformers.logging.set_verbosity_error()
    every = {f"{family}.{way}": run for family, ways in families.items() for way, run in ways.items()}
    cases = {name: case for name, (case, _) in every.items()}
    run_cases(rank, folder, ranks, cases, {name: groups for name, (_, groups) in every.items()})


def findings(folder: Path) -> Findings:
    """Return what was found: wrong, if one rank found it wrong or failed."""
    found: Findings = {}
    for path in sorted(folder.glob("*.pt")):
        family, way, _rank = path.name.removesuffix(".pt").split(".")
        result = torch.load(path, weights_only=False)
        one = (WRONG, result.splitlines()[-1]) if isinstance(result, str) else result
        before = found.setdefault(family, {}).get(way, one)
        found[family][way] = one if one[0] == WRONG else before
    return found


def everything(folder: Path, limit_s: float) -> Findings:
    """Run all families on two ranks and on four; return what was found."""
    found: Findings = {}
    for ranks, worker in ((2, run_everything), (4, run_on_four)):
        inner = folder / str(ranks)
        inner.mkdir()
        for family, ways in findings(launch(worker, inner, ranks, limit_s)).items():
            found.setdefault(family, {}).update(ways)
    return found


def page(found: Findings) -> str:
    """Return what docs/families.md says of these findings."""
    return page_of(found, NOT_TESTED, version=transformers.__version__, length=ODD_LENGTH)
