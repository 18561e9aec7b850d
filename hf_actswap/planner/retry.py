"""Runs a forward or a micro-batch once more when it has run out of memory.

This is for the stable phase, where no guard watches the ops, and for warm-up, where the guard had nothing to
move but more of the model can run in tiles. Two things can run again as a whole, with the same random numbers
and the guard on, because a failed attempt leaves nothing behind:

* a **forward**: a function of its inputs, unless it has written into a buffer or an input. One of several
  ranks can run it again alone if nothing communicates inside it (`CommunicationCheck`), as in the model
  inside DistributedDataParallel. The other ranks wait at the next collective;
* a **micro-batch**, forward and backward, if there were no gradients before it: the new ones are dropped. The
  training loop must pass it (`Retry.micro_batch`), since a hook cannot run a backward again.

Otherwise the error says why there is no retry. Gradients of earlier micro-batches cannot be told from those
of a backward that stopped halfway. With several ranks, a backward has reduced some of its gradients when it
stops: the other ranks have added them and would not take part a second time, and the reducer of
DistributedDataParallel waits for the rest. Randomness in the training must come from PyTorch's generators.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..engine.agreement import world_size
from ..engine.hook_wrappers import Undo, replace_call
from ..errors import ActSwapError, short_traceback
from ..plan.dry_run import is_dry
from ..plan.op_facts import is_collective
from ..plan.wrappers import FSDP2_METHOD
from .meter import runs_its_own_dispatch
from .oom_guard import DeviceMemoryError, Failure, RandomStates, failure_of

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

SHARDED = "FSDP2 gathers weights inside it, and the other ranks have done their part"
ONE_OF_SEVERAL = "a rank cannot choose tiles alone, and the others may wait for it in a collective"
COMMUNICATES = "it communicates, and the other ranks have done their part"


class Retry:
    """Runs a forward, or a whole micro-batch, once more when it has run out of memory.

    Args:
        model: the model in training.
        device: the model's device.
        ready: returns the planner's phase if an error is to be caught now, else an empty string.
        ran_out: called with each error before its retry; switches the guard on, or tiles.
        ahead: called with the arguments of each forward; returns whether it has put tiles on the model.
        missed: returns what to raise in place of an error that no retry has mended; ``None``: that error.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        ready: Callable[[], str],
        ran_out: Callable[[Failure], None],
        ahead: Callable[[tuple[Any, ...], dict[str, Any]], bool],
        missed: Callable[[], ActSwapError | None] = lambda: None,
    ) -> None:
        self._missed = missed
        self._ready, self._ran_out, self._ahead = ready, ran_out, ahead
        devices = {torch.device("cpu"), device}
        self._random = [RandomStates(item) for item in devices]
        self._model = model
        self._exchanges = CommunicationCheck(model)
        self._known: tuple[list[nn.Parameter], list[torch.Tensor]] | None = None

    def around(self, module: nn.Module) -> list[Undo]:
        """Retry forwards of ``module`` together with the hooks on it; return what undoes this."""

        def tried_twice(inner: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self.forward(inner, args, kwargs, module)

        return [replace_call(module, tried_twice)]

    @short_traceback
    def forward(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module
    ) -> Any:
        """Call the model; if memory runs out, call it again under the guard, with the hooks it then has."""
        try:
            return self._forward(call, args, kwargs, module)
        except torch.OutOfMemoryError:
            error = self._missed()
            if error is None:
                raise
        raise error

    def _forward(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module
    ) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if self._ahead(args, kwargs):
            return module(*args, **kwargs)
        call = self._exchanges.learned_from(call)
        if not self._ready():
            return call(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = [*self._weights_and_buffers()[1], *inputs]

        def why_not() -> str | None:
            if before != [tensor._version for tensor in written]:
                return "it has changed a buffer or an input"
            return self._exchanges.why_not_alone(mark)

        mark = self._exchanges.mark()
        before = [tensor._version for tensor in written]
        run, again = (lambda: call(*args, **kwargs)), (lambda: module(*args, **kwargs))
        return self._twice(run, "forward", why_not, lambda: None, again)

    def micro_batch(self, step: Callable[[], Value]) -> Value:
        """Run forward and backward of a micro-batch; if memory runs out, run them again under the guard.

        Args:
            step: runs both, and nothing else that must not happen twice.

        Raises:
            DeviceMemoryError: there is no retry, and the text says why; or the retry failed too.
        """
        if not self._ready():
            return step()
        weights, buffers = self._weights_and_buffers()
        first = all(weight.grad is None for weight in weights)
        written = [*weights, *buffers]
        before = [tensor._version for tensor in written]

        def why_not() -> str | None:
            if world_size() > 1:
                return "gradients are reduced in backward, and the other ranks have done their part"
            if not first:
                return "gradients of earlier micro-batches are there, with a part of this one's among them"
            if before != [tensor._version for tensor in written]:
                return "it has changed a buffer or a weight"
            return None

        def drop_gradients() -> None:
            for weight in weights:
                weight.grad = None

        return self._twice(step, "a micro-batch", why_not, drop_gradients, step)

    def _weights_and_buffers(self) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
        """Return trained weights and buffers, listed at first need: FSDP2 replaces them when it shards."""
        if self._known is None:
            weights = [weight for weight in self._model.parameters() if weight.requires_grad]
            self._known = weights, list(self._model.buffers())
        return self._known

    def _twice(
        self,
        run: Callable[[], Value],
        what: str,
        why_not: Callable[[], str | None],
        undo: Callable[[], None],
        again: Callable[[], Value],
    ) -> Value:
        restore = [state for state in (item.saved(None) for item in self._random) if state is not None]
        try:
            return run()
        except RuntimeError as error:
            failure = failure_of(error)
            stage = self._ready()
            if failure is None or not stage or not _may_run_again(error):
                raise
            why = ONE_OF_SEVERAL if stage == "warm-up" and world_size() > 1 else why_not()
            if len(restore) < len(self._random):
                why = "a graph of the accelerator is being captured"
            if why is not None:
                raise _explained(failure, what, why, stage) from error
        # Only after the handler: its traceback held tensors.
        undo()
        gc.collect()
        self._ran_out(failure)
        logger.warning("%s ran out of memory (%s) and is run again under the guard", what, failure.text)
        for state in restore:
            state()
        return again()


def _may_run_again(error: RuntimeError) -> bool:
    return not isinstance(error, DeviceMemoryError) or error.may_run_again


def _explained(failure: Failure, what: str, why: str, stage: str) -> DeviceMemoryError:
    hint = "A smaller `memory.budget_gib` leaves more room beside the plan."
    if stage != "stable":
        hint = (
            "With `tile_config: {loss: auto, tile: {op_name: feed_forward}}` head, loss and MLPs run in "
            "tiles from the first step on."
        )
    return DeviceMemoryError(
        f"{what} ran out of memory in the planner's {stage} stage, and cannot be run again: {why}. {hint} "
        f"({failure.text})",
        may_run_again=False,  # also for a retry around the one that says so
    )


class CommunicationCheck:
    """Finds out whether a forward communicates with other ranks; if not, this rank can rerun it alone.

    Three sources are asked, each of which sees what the others cannot:

    * the **modules**: FSDP2 gathers weights inside a forward, and an exception leaves its state halfway;
    * the **ops** of the first forward: communication in forward passes the dispatcher, point to point
      included;
    * the **sequence numbers of the process groups** before and after an attempt: each collective increases
      one, also inside compiled regions and in ops that only some forwards run.

    DistributedDataParallel broadcasts buffers before the forward of the model inside it, and reduces
    gradients in backward. An extension's kernels that reach other devices by themselves are not seen.

    Args:
        model: the model whose forwards are judged.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inside: str | None = None
        self._known = False

    def learned_from(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, wrapped so that the first forward of several ranks is watched while it runs."""
        if self._known or world_size() == 1:
            return call

        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_dry(args, kwargs):
                return call(*args, **kwargs)  # a forward on fake tensors communicates nothing
            with _Watch() as watch:
                result = call(*args, **kwargs)
            sharded = any(hasattr(type(module), FSDP2_METHOD) for module in self._model.modules())
            self._inside = SHARDED if sharded else COMMUNICATES if watch.seen else None
            self._known = True
            return result

        return watched

    def mark(self) -> tuple[int, ...] | None:
        """Return how many collectives each process group has run so far; ``None``: it is not known."""
        if world_size() == 1:
            return ()
        groups = getattr(dist.distributed_c10d._world, "pg_map", None)
        if groups is None:
            return None
        try:
            return tuple(group._get_sequence_number_for_group() for group in groups)
        except (AttributeError, RuntimeError):  # a backend that does not count
            return None

    def why_not_alone(self, mark: tuple[int, ...] | None) -> str | None:
        """Return why a forward cannot be run again by this rank alone; ``None``: it can.

        Args:
            mark: what `mark` returned before the forward.
        """
        if world_size() == 1:
            return None
        if not self._known:
            return "no forward has been seen so far, and other ranks may have done their part"
        if self._inside is not None:
            return self._inside
        return COMMUNICATES if mark is None or mark != self.mark() else None


class _Watch(TorchDispatchMode):
    """Notes whether an op communicates."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return true: compiled regions stay compiled, as under `OomGuard`."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if types and runs_its_own_dispatch(types):
            return NotImplemented
        self.seen = self.seen or is_collective(func)
        return func(*args, **(kwargs or {}))
