"""``plan_file``: the plan that was found, beside what it was found for.

The document is the plan's own (`MemoryPlan.to_json`), so `apply` takes it and a person may edit it, with one
section more, ``made_for``. A run that agrees with that section uses the plan and searches nothing; so does
one that finds a plan without it, as ``hf-actswap plan --save`` writes them. What the planner did not write
for the same model on the same devices it does not overwrite.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..errors import PlanError, Problem
from ..plan.actions import MemoryPlan
from ..version import __version__
from .trials import Outcome

_SECTION = "made_for"


@dataclass(frozen=True)
class MadeFor:
    """What a plan was found for. A run must agree in all but the versions and the shape.

    Args:
        model: ``model_type``, layers and parameters.
        batch_shape: of the input ids of one micro-batch; a smaller batch is served too, and a larger one is
            planned for when it comes.
        dtype: of the parameters.
        device: name of the device.
        world_size: ranks.
        wish: the ``memory`` section without the file's name, and the fates written by hand.
        versions: of PyTorch and of this package.
    """

    model: str
    batch_shape: tuple[int, ...]
    dtype: str
    device: str
    world_size: int
    wish: str
    versions: str = f"torch {torch.__version__}, hf_actswap {__version__}"

    def differences(self, other: MadeFor) -> dict[str, str]:
        """Return what does not agree, in words, by the name of the field."""
        return {
            item.name: f"{item.name} {getattr(self, item.name)!r} and not {getattr(other, item.name)!r}"
            for item in fields(self)
            if item.name not in ("versions", "batch_shape")
            and getattr(self, item.name) != getattr(other, item.name)
        }


@dataclass(frozen=True)
class FilePlan:
    """What a plan file holds.

    Args:
        plan: to apply.
        made_for: what it was found for; ``None`` where the file does not say.
        numbers: of it, measured by the planner or predicted by ``hf-actswap plan``; may be empty.
    """

    plan: MemoryPlan
    made_for: MadeFor | None
    numbers: Mapping[str, Any]

    @property
    def budget_bytes(self) -> int | None:
        """That it was found for; ``None`` where the file does not say."""
        found = self.numbers.get("budget_bytes")
        return found if type(found) is int and found > 0 else None

    @property
    def outcome(self) -> Outcome | None:
        """What the file says of the step with and without the plan; ``None``: it does not."""
        names = ("peak_bytes", "step_ms", "without_plan_peak_bytes", "without_plan_step_ms")
        found: list[Any] = [self.numbers.get(name) for name in names]
        if any(type(number) not in (int, float) for number in found):
            return None
        peak_bytes, step_ms, without_peak_bytes, without_step_ms = found
        return Outcome(peak_bytes, step_ms, without_peak_bytes, without_step_ms, "as the plan file says")


def write_plan(
    path: str | os.PathLike[str], plan: MemoryPlan, made_for: MadeFor, measured: Mapping[str, Any]
) -> None:
    """Write a plan, whole or not at all.

    Args:
        path: of the file; folders are made.
        plan: that was found.
        made_for: what it was found for.
        measured: numbers about it, for people.
    """
    document: dict[str, Any] = json.loads(plan.to_json())
    document[_SECTION] = asdict(made_for)
    document["measured"] = dict(measured)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draft.replace(target)


def read_plan(path: str | os.PathLike[str]) -> FilePlan:
    """Read a plan back.

    Raises:
        PlanError: no plan, or a malformed one.
    """
    text = Path(path).read_text(encoding="utf-8")
    plan = MemoryPlan.from_json(text)
    document = json.loads(text)
    section, numbers = document.get(_SECTION), document.get("measured", document.get("predicted"))
    numbers = numbers if isinstance(numbers, dict) else {}
    if section is None:
        return FilePlan(plan, None, numbers)
    try:
        made_for = MadeFor(**{**section, "batch_shape": tuple(section["batch_shape"])})
    except (TypeError, KeyError):
        names = ", ".join(item.name for item in fields(MadeFor))
        problem = Problem(
            f"plan.{_SECTION}", f"a mapping of {names}", repr(section), "Leave the section out."
        )
        raise PlanError([problem], str(path)) from None
    return FilePlan(plan, made_for, numbers)
