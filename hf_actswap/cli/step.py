"""A step of a model on paper: what a batch needs, and what a plan makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..config.sizes import device_kind
from ..errors import Problem
from ..plan import MemoryPlan, PlanRow
from ..plan.actions import Scope
from ..planner.profile import Prediction, Profile
from ..planner.record.devices import device_rates
from ..planner.record.shapes import profile_from_shapes
from .model_source import DTYPES, ModelError
from .options import AutocastName, OptimizerName
from .subject import Subject

DEFAULT_DEVICE = "H200"

_VALUES_PER_WEIGHT = {"adamw": 2, "sgd": 0, "none": 0}
"""Optimizer states, of the weights' own type: what torch.optim keeps without any option."""


@dataclass(frozen=True)
class StepShape:
    """What a step is given.

    Args:
        sequences: of a micro-batch.
        tokens: of a sequence.
        device: one of `planner.devices`, or the name of the one that was measured.
        autocast: mixed precision, or ``None``.
        optimizer: whose states are on the device; ``None``: nobody says.
    """

    sequences: int
    tokens: int
    device: str
    autocast: AutocastName | None
    optimizer: OptimizerName | None

    def described(self) -> str:
        """Return it in one line."""
        precision = f", {self.autocast} autocast" if self.autocast else ""
        states = f", {self.optimizer} states" if self.state_values else ""
        return f"{self.sequences} x {self.tokens} tokens on {self.device}{precision}{states}"

    @property
    def state_values(self) -> int:
        """Optimizer states on the device, for each weight."""
        return 0 if self.optimizer is None else _VALUES_PER_WEIGHT[self.optimizer]

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "batch": self.sequences,
            "seq": self.tokens,
            "device": self.device,
            "autocast": self.autocast,
            "optimizer": self.optimizer,
        }


def device_name(asked: str | None) -> str:
    """Return the device to predict for: the one asked for, the one that is here, else `DEFAULT_DEVICE`.

    Raises:
        PlanError: nothing is known of the one asked for.
    """
    if asked is not None:
        return device_rates(asked).name
    return kind_here() or DEFAULT_DEVICE


def kind_here() -> str | None:
    """Return which of `planner.devices` this machine's GPU is; ``None``: none of them, or there is none."""
    if not torch.cuda.is_available():
        return None
    return device_kind(torch.cuda.get_device_name())


def profile_of(found: Subject, step: StepShape) -> Profile:
    """Run the step on fake tensors.

    Raises:
        ModelError: the model does not run on fake tensors.
    """
    weight_bytes = sum(p.numel() * p.element_size() for p in found.model.parameters())
    shape = (step.sequences, step.tokens)
    # One tensor each: a model may move or cut its labels.
    batch = {name: torch.empty(shape, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    mixed = torch.autocast("cpu", DTYPES[step.autocast]) if step.autocast else nullcontext()
    try:
        with mixed:
            return profile_from_shapes(
                found.model,
                found.shape,
                batch,
                step.device,
                optimizer_state_bytes=step.state_values * weight_bytes,
            )
    except Exception as error:  # the model's own code runs: it may raise anything
        raise not_run("a model that runs on fake tensors", error) from error


def not_run(expected: str, error: Exception) -> ModelError:
    """Return what to say when the model's own code has raised."""
    text = " ".join(str(error).split())[:300] or "no reason"
    return ModelError([Problem("model", expected, f"{type(error).__name__}: {text}")])


def saved_by_row(profile: Profile, plan: MemoryPlan) -> Mapping[tuple[Scope, PlanRow | None], int]:
    """Return the bytes that autograd saves without a plan, by scope and the row that decides on them."""
    found: dict[tuple[Scope, PlanRow | None], int] = {}
    for storage in profile.saved.storages:
        first = next((use for use in storage.uses if use.kind == "saved"), None)
        scope, path, ordinal = (None, "", None) if first is None else first.producer
        if scope is None:
            continue
        key = scope, plan.row(scope, path, ordinal)
        found[key] = found.get(key, 0) + storage.size_bytes
    return found


def saved_by_op(profile: Profile, scope: Scope, op_path: str) -> int:
    """Return the bytes that autograd saves, without a plan, of what the ops at or below a path produce."""
    by_op = profile.saved.by_op().items()
    below = f"{op_path}." if op_path else ""
    return sum(
        size for (of, path), size in by_op if of == scope and (path == op_path or path.startswith(below))
    )


def recompute_everything(num_layers: int, family: str) -> MemoryPlan:
    """Return the plan that gradient checkpointing of every layer is."""
    return MemoryPlan(
        tuple(PlanRow(layer, "", "recompute") for layer in range(num_layers)), num_layers, family
    )


def prediction_document(found: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON values, without its curve and its copies."""
    names = (
        *("peak_bytes", "step_ms", "recompute_ms", "forward_stall_ms", "backward_stall_ms"),
        *("kept_bytes", "swapped_bytes", "recomputed_bytes", "host_bytes"),
    )
    return {name: getattr(found, name) for name in names}
