"""Lets loops with Accelerate act on the environment variable ``HF_ACTSWAP``.

A program that one does not own may have a loop of its own in place of a Trainer, as diffusers' scripts have.
``hf-actswap run`` starts it so that `act_on_loops` runs in each of its processes
(``startup/sitecustomize.py``).

Such loops prepare model and optimizer in one call or in several, so the plan is put on at the first forward
with gradients. What the program has put on by then itself stays, and a Trainer has callbacks
(`environment.act_on_environment`).
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ..apply import apply
from ..config.validation import is_off_word
from ..engine.hook_wrappers import is_wrapped, replace_call
from ..engine.stats import SwapStats
from ..plan.dry_run import is_dry
from ..plan.model_structure import unwrapped
from ..planner.states.optimizer_states import after_steps
from ..run_environment import VARIABLE, EndedTraining, tell_run

logger = logging.getLogger(__name__)


def act_on_loops() -> None:
    """Let models that Accelerate prepares from now on get what `VARIABLE` says. Safe to call again."""
    make: Any = Accelerator.prepare
    if hasattr(make, "adds_ours"):
        return

    @functools.wraps(make)
    def prepare_with_ours(self: Accelerator, *args: Any, **settings: Any) -> Any:
        result = make(self, *args, **settings)
        asked = os.environ.get(VARIABLE) or ""
        if asked and not is_off_word(asked) and not _of_a_trainer():
            for item in result if isinstance(result, tuple) else (result,):
                if isinstance(item, nn.Module):
                    _PlannedLoop(self, item, asked)
        return result

    added: Any = prepare_with_ours
    added.adds_ours = True
    Accelerator.prepare = added


class _PlannedLoop:
    """Puts a plan on a prepared model at its first forward with gradients, until the process ends.

    Of several models that are trained the one with most parameters gets it.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, asked: str) -> None:
        self._accelerator, self._model, self._asked = accelerator, model, asked
        self._steps, self._before, self._step = 0, SwapStats(), SwapStats()
        self._applied: Any = None
        self._undo = replace_call(model, self._waits)

    def _waits(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or is_dry(args, kwargs):
                return inner(*args, **kwargs)
            self._undo()
            call_again = self._model if self._is_put() else inner  # with the plan's hooks
            return call_again(*args, **kwargs)

        return call

    def _is_put(self) -> bool:
        """Put the plan on, unless the model has one or is not the one to plan for; return whether it was."""
        root, optimizers = unwrapped(self._model), self._accelerator._optimizers
        optimizer = optimizer_of(root, optimizers)
        prepared = [root, *(unwrapped(model) for model in self._accelerator._models)]
        trained = [model for model in prepared if optimizer_of(model, optimizers) is not None]
        largest = max(
            trained, key=lambda model: sum(item.numel() for item in model.parameters()), default=None
        )
        if largest is not root or is_wrapped(root):
            logger.debug("no plan for %s: it has one, or another model is the one to plan for", type(root))
            return False
        self._applied = apply(self._model, self._asked, optimizer=optimizer)
        self._before = self._applied.stats()
        after_steps(optimizer, self._step_ended)
        atexit.register(self._end)
        return True

    def _step_ended(self) -> None:
        self._steps += 1
        now = self._applied.stats()
        self._step, self._before = now - self._before, now

    def _end(self) -> None:
        if hasattr(sys, "last_value"):
            return  # the program has failed
        accelerator = self._accelerator
        name = accelerator.project_dir or sys.argv[0]
        ranks = accelerator.process_index, accelerator.num_processes
        tell_run(EndedTraining.of(self._applied, self._step, str(name), *ranks, self._steps))
        self._applied.remove()


def optimizer_of(model: nn.Module, optimizers: Iterable[Any]) -> Any:
    """Return the optimizer of the model's parameters; ``None`` if that is none, or several."""
    own = {id(parameter) for parameter in model.parameters()}
    found = [
        one
        for one in optimizers
        if any(id(item) in own for group in one.param_groups for item in group["params"])
    ]
    return found[0] if len(found) == 1 else None


def _of_a_trainer() -> bool:
    """Whether a transformers Trainer is running, which prepares its model with Accelerate too."""
    trainer: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    frame = sys._getframe(1) if trainer is not None else None
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), trainer):
            return True
        frame = frame.f_back
    return False
