"""What `plan` is asked, as far as it is known before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

from .options import AutocastName, DtypeName, OptimizerName

PREDICTED = "predicted"
"""Section of a saved plan by which `--save` knows what it has written."""


@dataclass(frozen=True)
class AskedStep:
    """What the command line says of the step; ``None``: nothing.

    Args:
        sequences, tokens, device, autocast, optimizer: see `step.StepShape`.
    """

    sequences: int | None = None
    tokens: int | None = None
    device: str | None = None
    autocast: AutocastName | None = None
    optimizer: OptimizerName | None = None


@dataclass(frozen=True)
class PlanRequest:
    """The arguments and options of `plan`; see its help."""

    model: str
    config: str | None
    step: AskedStep
    dtype: DtypeName | None
    profile: str | None
    budget_bytes: int | None
    tp: int | None
    compared: tuple[int, ...]
    save: str | None
    windows: bool
    full: bool
