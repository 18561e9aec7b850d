"""Steps each parameter in backward, as soon as its gradient is complete (``optimizer_in_backward``).

The optimizer's own code runs on one parameter at a time, and the gradient is freed. So the gradients of a
step are never on the device together, and the optimizer's states need not be (`OptimizerStates`). PyTorch's
tutorial "optimizer step in backward" and torchtune's ``optimizer_in_bwd`` do this with an optimizer for each
parameter; here there is one, whose groups, schedulers and state dictionary are as ever.

With gradient accumulation it happens in the last micro-batch, which Accelerate's optimizers know (the Trainer
has one); until then all gradients are there. ``optimizer.step()`` then steps only parameters that the last
micro-batch has not used.

The bits are the same, because these optimizers compute each parameter from its own gradient and states, and
because no node of backward reads a parameter after its gradient is complete. (If one did, autograd's check of
versions, which tickets repeat, would raise an error.) What needs all gradients at once is not possible:
clipping by the norm of this step, a gradient scaler, sums over ranks after backward.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...config.schema import MemoryConfig
from ...engine.agreement import world_size
from ...engine.hook_wrappers import Undo, replace_method, wrap_call
from ...errors import ActSwapError, PlanError, Problem
from ...plan.dry_run import is_dry
from ...plan.program_state import PACKAGE
from .optimizer_states import STREAMED, OptimizerStates, inner_optimizer, step_part

logger = logging.getLogger(__name__)

KEY = "memory.optimizer_in_backward"


class OptimizerInBackwardError(ActSwapError):
    """A training loop does what cannot be combined with the optimizer in backward."""


_ACCUMULATED = Problem(
    KEY,
    "optimizer.step() after each backward",
    "a second backward before it",
    "Only Accelerate says which micro-batch is the last: use accelerator.accumulate, or the Trainer.",
)
_CLIPPED = Problem(
    KEY,
    "no clipping after backward",
    "torch.nn.utils.clip_grad_norm_ or clip_grad_value_ (Accelerate calls them), which finds no gradient",
    "memory.in_backward_clip_value or in_backward_clip_last_norm clips in backward.",
)
_ASSIGNED = Problem(
    KEY,
    "gradients that nothing sets after backward",
    "a gradient of a parameter that backward has stepped already",
    "Edit gradients in parameter.register_post_accumulate_grad_hook, before the plan, or leave the key out.",
)
_SCALED = Problem(KEY, "gradients that are not scaled", "a gradient scaler (fp16)", "Use bf16.")


class OptimizerInBackward:
    """Lets an optimizer step each parameter in backward.

    Args:
        optimizer: the optimizer, as the training loop calls it.
        model: the model as the training loop calls it.
        memory: has the clipping (``in_backward_clip_value``, ``in_backward_clip_last_norm``).
        states: returns what keeps the optimizer's states on the host; ``None``: they stay.
        around: makes a context in which a parameter is stepped, for who measures backward.
        reads_norm: whether `grad_norm` will be read; else norms are taken only where the clipping needs them.

    Attributes:
        grad_norm: the norm of the last step's gradients before clipping, a scalar on the device; ``None``: no
            step has ended, or norms are not taken.

    Raises:
        PlanError: the optimizer or the model cannot be combined with it; the error says why.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        memory: MemoryConfig,
        states: Callable[[], OptimizerStates | None] = lambda: None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        reads_norm: bool = False,
    ) -> None:
        if problems := list(_problems(optimizer, model)):
            raise PlanError(problems)
        self._optimizer, self._model, self._memory = inner_optimizer(optimizer), model, memory
        self._states, self._accumulation = states, getattr(optimizer, "gradient_state", None)
        self._around = around
        self._takes_norms = reads_norm or memory.in_backward_clip_last_norm is not None
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        self._stepped: set[torch.Tensor] = set()
        self._groups: dict[torch.Tensor, int] = {}
        self._undo: list[Undo] = []
        self.grad_norm: torch.Tensor | None = None

    def attach(self) -> None:
        optimizer = self._optimizer
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                self._groups[parameter] = number
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(self._gradient_ready)
                    self._undo.append(handle.remove)
        self._undo.append(optimizer.register_step_pre_hook(self._step_starts).remove)
        self._undo.append(optimizer.register_step_post_hook(self._step_ended).remove)
        self._undo += wrap_call(self._model, self._forward_starts, lambda *_: None)
        # `clip_grad_norm_` finds the first in its module, also if it was imported from there before.
        inner: Any = sys.modules["torch.nn.utils.clip_grad"]
        for module, name in (
            (inner, "_clip_grads_with_norm_"),
            (inner, "clip_grad_value_"),
            (torch.nn.utils, "clip_grad_value_"),
        ):
            if hasattr(module, name):
                self._undo.append(replace_method(module, name, self._rejecting))
        if (states := self._states()) is not None:
            states.in_backward = True
        logger.info("The optimizer steps each parameter in backward, as soon as its gradient is complete.")

    def remove(self) -> None:
        """Take all hooks off. Safe to call again."""
        undo, self._undo = self._undo, []
        for step in undo:
            step()
        if (states := self._states()) is not None:
            states.in_backward = False

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        if self._accumulation is not None and not self._accumulation.sync_gradients:
            return
        if parameter in self._stepped:
            raise OptimizerInBackwardError([_ACCUMULATED])
        self._stepped.add(parameter)
        with self._around():
            self._clip(parameter)
            self._step(parameter)
        parameter.grad = None

    def _step(self, parameter: torch.Tensor) -> None:
        number, states = self._groups[parameter], self._states()
        bucket = [[parameter] if at == number else [] for at in range(len(self._optimizer.param_groups))]
        if states is None:
            step_part(self._optimizer, bucket)
        else:
            states.step_bucket(bucket)

    def _clip(self, parameter: torch.Tensor) -> None:
        gradient, memory = parameter.grad, self._memory
        assert gradient is not None
        with torch.no_grad():
            if self._takes_norms:
                self._norms[parameter] = torch.linalg.vector_norm(gradient)
            if memory.in_backward_clip_value is not None:
                gradient.clamp_(-memory.in_backward_clip_value, memory.in_backward_clip_value)
            if memory.in_backward_clip_last_norm is not None and self.grad_norm is not None:
                gradient.mul_((memory.in_backward_clip_last_norm / (self.grad_norm + 1e-6)).clamp(max=1.0))

    def _rejecting(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        def clipping(parameters: Any, limit: float, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
            # with an infinite limit the Trainer asks for the norm alone
            if math.isfinite(limit) and any(parameter in self._stepped for parameter in given):
                raise OptimizerInBackwardError([_CLIPPED])
            return clip(given, limit, *args, **kwargs)

        return clipping

    def _step_starts(self, *_: object) -> None:
        for parameter in self._groups:
            if parameter.grad is None:
                continue
            if parameter in self._stepped:
                raise OptimizerInBackwardError([_ASSIGNED])
            self._clip(parameter)  # the last micro-batch has not used it

    def _step_ended(self, *_: object) -> None:
        norms = [self._norms[parameter] for parameter in self._groups if parameter in self._norms]
        if norms:
            self.grad_norm = torch.linalg.vector_norm(torch.stack(norms))
        self._norms.clear()
        self._stepped.clear()

    def _forward_starts(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or is_dry(args, kwargs):
            return
        # A scaler of gradients steps after backward, and may skip the step.
        kind = next(iter(self._groups)).device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
            raise OptimizerInBackwardError([replace(_SCALED, found="fp16 autocast")])


def _problems(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[Problem]:
    inner = inner_optimizer(optimizer)
    kind = f"{type(inner).__module__}.{type(inner).__qualname__}"
    if type(inner) not in STREAMED:
        hint = f"One of torch.optim: {', '.join(sorted(item.__name__ for item in STREAMED))}."
        yield Problem(KEY, "an optimizer that computes each parameter by itself", kind, hint)
        return
    for flag in ("capturable", "differentiable"):
        if any(group.get(flag) for group in inner.param_groups):
            yield Problem(KEY, f"{flag}: false", f"{flag}: true", "A captured or recorded step runs whole.")
    if _has_scaler(optimizer):
        yield _SCALED
    hooks = inner._optimizer_step_pre_hooks.values()
    others = [hook for hook in hooks if str(getattr(hook, "__module__", "")).partition(".")[0] != PACKAGE]
    if others:
        found = f"{others[0]} (optimizer.register_step_pre_hook)"
        yield replace(
            _ASSIGNED, expected="no hook before optimizer.step(), which would find no gradient", found=found
        )
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if world_size() > 1 or wrapped or any(isinstance(parameter, DTensor) for parameter in parameters):
        hint = "Gradients are summed over the ranks after they are complete on each. Leave the key out."
        yield Problem(KEY, "one process, without DDP or FSDP", "several, or a wrapper that sums", hint)


def _has_scaler(optimizer: Any) -> bool:
    """Return whether the optimizer or a wrapper of it (Accelerate's) has a gradient scaler."""
    while isinstance(optimizer, torch.optim.Optimizer):
        if getattr(optimizer, "scaler", None) is not None:
            return True
        optimizer = getattr(optimizer, "optimizer", None)
    return False
