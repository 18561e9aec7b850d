"""Stable: the plan runs as any other, and nothing is profiled. What is looked at costs microseconds.

* The **batch shape**, ahead of each forward. A batch of at most as many tokens as the plan was made for needs
  at most its memory; the plan serves it, with the windows that it has. A larger one runs under the guard: it
  cannot fail for want of memory where moving something can help, and its step is planned for anew.
* The **peak**, after each step: the allocator's own number. A miss of the budget is planned for anew, and so
  is a step that ran out of memory and needed a `second_try`.

Ranks must agree before they change plans, and a collective at each step would cost every step. So several
ranks look together every `CHECK_STEPS` steps; until then each survives alone. Planning anew is bounded, for a
training whose batches never stop growing must get on too: after `MOST_PLANS` the guard stays on for what is
larger than was planned for.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ..engine.agreement import from_all_ranks
from .rescue.out_of_memory import Failure
from .run import Run

logger = logging.getLogger(__name__)

CHECK_STEPS = 16
MOST_PLANS = 8


def batch_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of the batch that a model is called with: of its first tensor of two dims or more."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2:
            return tuple(leaf.shape[:2])
    return ()


def tokens_of(shape: tuple[int, ...]) -> int:
    """Return how many tokens a batch of this shape has."""
    tokens = 1
    for length in shape:
        tokens *= length
    return tokens


class Stable:
    """See the module's text.

    Args:
        run: the training; the plan is on the model.
        budget_bytes: the most that a step may use.
        shape: of the batch that the plan was made for.
        plans: how many were made so far.
        stays_guarded: whether the guard stays on, because the plan does not fit; only what is larger is
            planned for anew then.

    Attributes:
        missed_by_bytes: the most that a step wanted beyond the budget, or beyond what the device had; of all
            ranks once `step_ended` has returned true.
    """

    name = "stable"

    def __init__(
        self,
        run: Run,
        budget_bytes: int,
        shape: tuple[int, ...],
        plans: int,
        stays_guarded: bool = False,
    ) -> None:
        self._run, self._budget_bytes, self._shape = run, budget_bytes, shape
        self._may_plan = plans < MOST_PLANS
        self._steps = 0
        self._larger: tuple[int, ...] | None = None
        self._stays_guarded = stays_guarded
        self.missed_by_bytes = 0

    def forward_starts(self, shape: tuple[int, ...]) -> None:
        """A micro-batch of this shape comes."""
        if tokens_of(shape) > tokens_of(self._shape):
            if self._larger is None:
                logger.info(
                    "%s: a batch of %s, and the plan is made for %s: this step runs under the guard",
                    self._run.name,
                    shape,
                    self._shape,
                )
            self._larger = max(self._larger or (), shape, key=tokens_of)
            self._run.rescue(True)

    def ran_out(self, failure: Failure) -> None:
        """The device had less than the plan needs: the rest of this step is under the guard."""
        self.missed_by_bytes = max(self.missed_by_bytes, failure.wanted_bytes or 1)
        self._run.rescue(True)

    def step_ended(self) -> bool:
        """Return whether to plan anew; the same on every rank."""
        self._steps += 1
        if not self._stays_guarded:
            over_bytes = self._run.meter.reserved_peak_bytes() - self._budget_bytes
            self.missed_by_bytes = max(self.missed_by_bytes, over_bytes)
            if self._run.guarded:
                self._run.rescue(False)
        alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
        if not self._may_plan or not (alone or self._steps % CHECK_STEPS == 0):
            return False
        needs = from_all_ranks((self._larger is not None, self.missed_by_bytes))
        self.missed_by_bytes = max(missed for _, missed in needs)
        if self.missed_by_bytes:
            logger.info(
                "%s: a step wanted %s bytes more than there are; planning anew",
                self._run.name,
                f"{self.missed_by_bytes:,}",
            )
        return self.missed_by_bytes > 0 or any(larger for larger, _ in needs)
