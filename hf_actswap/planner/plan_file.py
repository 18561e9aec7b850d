"""``plan_file``: the plan that was found, beside what it was found for.

The document is the plan's own (`MemoryPlan.to_json`), so `apply` takes it and a person may edit it, with one
section more, ``made_for``. A run that agrees with that section uses the plan and searches nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import torch

from ..config.json_documents import Bytes, Count, JsonReader, read_text, write_whole
from ..config.published import MAX_PLAN_BYTES
from ..errors import PlanError, Problem
from ..plan.actions import MemoryPlan
from ..version import __version__


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
    batch_shape: tuple[Count, ...]
    dtype: str
    device: str
    world_size: Count
    wish: str
    versions: str = f"torch {torch.__version__}, hf_actswap {__version__}"

    def differences(self, other: MadeFor) -> list[str]:
        """Return what does not agree, in words."""
        return [
            f"{item.name} {getattr(self, item.name)!r} and not {getattr(other, item.name)!r}"
            for item in fields(self)
            if item.name not in ("versions", "batch_shape")
            and getattr(self, item.name) != getattr(other, item.name)
        ]


class PlanNumbers(TypedDict, total=False):
    """What was measured of a plan; of all that stands there, what is read again."""

    budget_bytes: Bytes | None


@dataclass(frozen=True)
class FilePlan:
    """What a plan file holds.

    Args:
        plan: to apply.
        made_for: what it was found for; ``None`` where the file does not say.
        measured: numbers about it.
    """

    plan: MemoryPlan
    made_for: MadeFor | None = None
    measured: PlanNumbers | None = None

    @property
    def budget_bytes(self) -> int | None:
        """What the plan was found for; ``None`` where the file does not say."""
        return (self.measured or {}).get("budget_bytes") or None


def write_plan(
    path: str | os.PathLike[str], plan: MemoryPlan, made_for: MadeFor, measured: Mapping[str, Any]
) -> None:
    """Write a plan, whole or not at all.

    Args:
        path: of the file; folders are made.
        plan: that was found.
        made_for: what it was found for.
        measured: numbers about it, for people.

    Raises:
        OSError: it cannot be written.
    """
    document: dict[str, Any] = json.loads(plan.to_json())
    document["made_for"] = asdict(made_for)
    document["measured"] = dict(measured)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, json.dumps(document, indent=1) + "\n")


def read_plan(path: str | os.PathLike[str]) -> FilePlan:
    """Read a plan back.

    Raises:
        PlanError: the file cannot be read, holds no plan, or a malformed one.
    """
    name = os.fsdecode(path)
    try:
        text = read_text(name, MAX_PLAN_BYTES, PlanError)
    except OSError as error:
        raise PlanError([Problem("memory.plan_file", "a file", f"'{name}': {error.strerror}")]) from None
    reader = JsonReader(text, "plan", PlanError, name)
    sections = reader.fields(FilePlan, without=["plan"])
    return FilePlan(MemoryPlan.from_document(reader), **sections)
