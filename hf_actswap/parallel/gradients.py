"""Gradients that are complete only as a sum over the tensor-parallel ranks, summed exactly once per step.

**The tag is the contract.** A parameter whose attribute ``sequence_parallel_enabled`` is true gets, on each
rank, a part of its gradient: from this rank's tokens (norms, biases of row-parallel layers, the router of a
mixture of experts, position embeddings behind the scatter), or from this rank's heads (``q_norm`` and
``k_norm`` of Qwen3 and Gemma3, with or without sequence parallelism), or from this rank's shard of the layer
that reads its output (``lora_A`` before a column-parallel ``lora_B``, where nothing else sums). The name is
NxD's; the tag means that the gradient must be summed, whatever the reason. The code that makes such a
parameter sets the tag; on a module of your own, use `setattr`.

The parts are summed, not averaged, after the last micro-batch and before a norm is computed. A sum per
micro-batch over the *accumulated* gradient counts the first ones again (as transformers 5.23 does for
``q_norm``). `allreduce_sequence_parallel_gradients` may therefore be called by our integration and, as in
NxD's recipe, by the user too: gradients that are summed already are not changed (see `GradientWatch`).

**Summed exactly once.** `GradientWatch` records whether a parameter's gradient is still this rank's own part
or already the sum over the ranks, whether our integration sums it, the user, or both. The gradient tensor
itself does not show that: its version changes when it is clipped and when more is accumulated, its address
is reused, and a user may replace it. But autograd always calls a parameter's hooks when it accumulates. So a
pair of hooks on the parameter keeps the state: summing sets it, accumulation clears it. Undecidable cases
are errors:

- More was accumulated onto a gradient that was summed and not zeroed: no later sum can correct that. After
  zeroing in place (``zero_grad(set_to_none=False)``) it is right, and the two cases differ only in values. In
  this case alone the values are checked on the device before the accumulation, and the result is read at the
  next sum: the host does not wait in backward, and all ranks raise at the same place. FSDP2 calls only the
  hooks after accumulation; there, zeroing in place counts as not zeroing.
- Another tensor was assigned since the sum, and nothing accumulated. It may be the sum, scaled, or the next
  step's part from `torch.autograd.grad`. Code that assigns gradients must call `GradientWatch.forget`.

The state is in the hooks: a copied or loaded parameter has neither the hooks nor the state.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .collectives import reduce_in_place, sum_dtype
from .data_sharding import trained_parameters
from .group import group_or_enclosing


class GradientState(enum.Enum):
    """Whether a parameter's gradient is this rank's part, the sum over the ranks, or undecidable."""

    PART = "this rank's part, or none"
    SUM = "the sum over the ranks"
    MIXED = "a sum over the ranks with parts accumulated onto it"
    REPLACED = "assigned after a sum: a part or a sum"


class GradientWatch:
    """Follows the gradient of one parameter, until it is removed.

    Args:
        parameter: a parameter that requires a gradient.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = weakref.ref(parameter)
        self._sum: weakref.ref[torch.Tensor] | None = None
        self._version_at_part: int | None = None
        self._was_announced = False
        self._was_not_zero: torch.Tensor | None = None
        self._doubt: tuple[weakref.ref[torch.Tensor], torch.Tensor | None] | None = None
        self._handles = (
            parameter.register_hook(self._before_accumulation),
            parameter.register_post_accumulate_grad_hook(self._after_accumulation),
        )

    def state(self) -> GradientState:
        """Return the state of the gradient now.

        The host waits for the device only where a summed gradient was zeroed in place.
        """
        parameter = self._parameter()
        gradient = None if parameter is None else gradient_of(parameter)
        if gradient is None:
            return GradientState.PART
        if self._sum is not None:
            return GradientState.SUM if self._sum() is gradient else GradientState.REPLACED
        if self._doubt is not None:
            of, was_not_zero = self._doubt
            if of() is gradient and (was_not_zero is None or bool(was_not_zero)):
                return GradientState.MIXED
        return GradientState.PART

    def was_stepped_unsummed(self) -> bool:
        """Whether the parameter was changed in place since a part was accumulated that has not been summed.

        Writes to ``parameter.data``, and a new parameter object, are not noticed.
        """
        parameter = self._parameter()
        at_part = self._version_at_part
        return parameter is not None and at_part is not None and parameter._version != at_part

    def set_summed(self, gradient: torch.Tensor) -> None:
        """Note that ``gradient``, the parameter's, is now the sum over the ranks."""
        self._sum, self._doubt, self._version_at_part = weakref.ref(gradient), None, None

    def forget(self) -> None:
        """Note that the next gradient is this rank's part, however it comes to the parameter."""
        self._sum = self._doubt = self._version_at_part = None

    def remove(self) -> None:
        """Take the hooks off the parameter."""
        for handle in self._handles:
            handle.remove()

    def _before_accumulation(self, _: torch.Tensor) -> None:
        """Note whether a summed gradient is zero. The hook also runs if nothing is accumulated afterwards."""
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        self._was_announced, self._was_not_zero = True, None
        if gradient is None or (self._sum is None and self._doubt is None):
            return
        self._was_not_zero = gradient.any()
        if self._doubt is not None and self._doubt[1] is not None:  # parts onto parts are no mixture
            self._was_not_zero = self._was_not_zero & self._doubt[1]

    def _after_accumulation(self, parameter: torch.Tensor) -> None:
        self._version_at_part = parameter._version
        gradient, was_not_zero, was_announced = parameter.grad, self._was_not_zero, self._was_announced
        before = None if self._sum is None else self._sum()
        self._sum, self._was_announced, self._was_not_zero = None, False, None
        if gradient is None:  # an earlier hook has taken it
            return
        if was_not_zero is not None:
            self._doubt = weakref.ref(gradient), was_not_zero
        elif was_announced:
            self._doubt = None
        elif before is gradient:
            self._doubt = weakref.ref(gradient), None


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return ``.grad``, else ``.main_grad``, else ``None``."""
    if parameter.grad is not None:
        return parameter.grad
    main: torch.Tensor | None = getattr(parameter, "main_grad", None)
    return main


def watch_of(parameter: torch.Tensor) -> GradientWatch | None:
    """Return the watch whose hooks are on the parameter, or ``None``."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}  # as FSDP2 reads them
    owners = (getattr(hook, "__self__", None) for hook in hooks.values())
    return next((owner for owner in owners if isinstance(owner, GradientWatch)), None)


TAG = "sequence_parallel_enabled"

ParameterSource = torch.optim.Optimizer | nn.Module | Iterable[torch.Tensor]


class MixedGradientError(RuntimeError):
    """It cannot be decided for some gradients whether they are parts or sums over the ranks."""


class UnsummedGradientError(RuntimeError):
    """Something reads gradients that are still to be summed over the tensor-parallel ranks."""


def allreduce_sequence_parallel_gradients(
    optimizer: ParameterSource,
    process_group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> None:
    """Sum the gradients of all tagged parameters over the ranks, except those that are summed already.

    One all-reduce per dtype and device, into ``.grad`` (else ``.main_grad``) in place. Which parameters take
    part depends on tags, ``requires_grad`` and order alone, equal on all ranks: where a rank has no gradient
    for a parameter and another has, it contributes zeros and gets the sum. Where none has any, there is none
    afterwards either, as in a single process.

    Call it on every rank, after the last micro-batch and before clipping; a second call does nothing.

    Args:
        optimizer: an optimizer (Accelerate's too), a module, or parameters.
        process_group: tensor-parallel group; ``None``: that of the enclosing `tensor_parallel_group`.
        reduce_dtype: dtype of the sum, if it is wider than the gradients' own, e.g. fp32 for bf16 ones.

    Raises:
        MixedGradientError: a gradient was summed, and more was accumulated onto it since, or another tensor
            was assigned in its place (`forget_sums`).
        RuntimeError: no group was given, and none encloses.
    """
    group = group_or_enclosing(process_group)
    if group.size() == 1:
        return
    parameters = list(tagged_parameters(optimizer))
    _reject_mixed(parameters)
    parts: dict[tuple[torch.dtype, torch.device], list[_Part]] = {}
    for parameter in parameters:
        watch = watch_of(parameter) or GradientWatch(parameter)
        if watch.state() is GradientState.PART:
            part = _Part(parameter, watch)
            parts.setdefault((sum_dtype(part.dtype, reduce_dtype), parameter.device), []).append(part)
    with torch.no_grad():
        for (dtype, device), of_kind in parts.items():
            _sum(of_kind, dtype, device, group)


def tagged_parameters(source: ParameterSource) -> Iterator[torch.Tensor]:
    """Yield each tagged parameter that requires a gradient, once, in the order of the optimizer or module."""
    seen: set[int] = set()
    for parameter in _parameters(source):
        if getattr(parameter, TAG, False) and parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            yield parameter


def reject_unsummed(parameters: Iterable[torch.Tensor]) -> None:
    """Raise unless the gradient of every watched tagged parameter is summed.

    Args:
        parameters: the parameters; one without a watch (no sum or watch was started for it) is not judged.

    Raises:
        UnsummedGradientError: some are not; ranks would see different norms, and replicas drift apart.
        MixedGradientError: as in `allreduce_sequence_parallel_gradients`.
    """
    tagged = list(tagged_parameters(parameters))
    _reject_mixed(tagged)
    waiting = 0
    for parameter in tagged:
        watch = watch_of(parameter)
        is_part = watch is not None and watch.state() is GradientState.PART
        waiting += is_part and gradient_of(parameter) is not None
    if waiting:
        raise UnsummedGradientError(
            f"the gradients of {waiting} tagged parameters (of {len(tagged)}) are this rank's part only. "
            "Call allreduce_sequence_parallel_gradients before the norm is computed or clipped"
        )


def forget_sums(source: ParameterSource) -> None:
    """Declare that the next gradients of the tagged parameters are this rank's parts.

    Needed, once per step, only in loops that assign ``parameter.grad`` themselves: accumulation by backward
    is noticed without it.
    """
    for parameter in tagged_parameters(source):
        watch = watch_of(parameter)
        if watch is not None:
            watch.forget()


class TaggedGradients:
    """Watches a model's tagged parameters from its first backward on, and sums their gradients.

    While it is attached, `gradient_norm` rejects gradients that are not summed.

    Args:
        model: module, optimizer or parameters; parameters that are tagged later are watched from their first
            sum on.
        process_group: tensor-parallel group; ``None``: that of the enclosing `tensor_parallel_group`.
        reduce_dtype: as in `allreduce_sequence_parallel_gradients`.

    Raises:
        RuntimeError: no group was given, and none encloses.
    """

    def __init__(
        self,
        model: ParameterSource,
        process_group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._source = model if isinstance(model, nn.Module | torch.optim.Optimizer) else list(model)
        self._group = group_or_enclosing(process_group)
        self._reduce_dtype = reduce_dtype
        unwatched = [p for p in tagged_parameters(self._source) if watch_of(p) is None]
        self._watches = [GradientWatch(parameter) for parameter in unwatched]

    def reduce(self) -> None:
        """Sum the gradients that are not summed yet; raises as `allreduce_sequence_parallel_gradients`."""
        allreduce_sequence_parallel_gradients(self._source, self._group, self._reduce_dtype)

    def remove(self) -> None:
        """Take this object's hooks off the parameters. Gradients stay; what was summed is forgotten."""
        for watch in self._watches:
            watch.remove()
        self._watches = []


def _parameters(source: ParameterSource) -> Iterator[torch.Tensor]:
    if isinstance(source, nn.Module):
        yield from trained_parameters(source)
    elif hasattr(source, "param_groups"):
        for group in source.param_groups:
            yield from group["params"]
    else:
        yield from source


_WHAT_TO_DO = {
    GradientState.MIXED: (
        "were accumulated onto gradients that had been summed over the tensor-parallel ranks already. Sum "
        "once, after the last micro-batch, and call optimizer.zero_grad(set_to_none=True) before the next "
        "step's first backward"
    ),
    GradientState.REPLACED: (
        "were assigned in place of gradients that had been summed over the tensor-parallel ranks: they may "
        "be sums or parts. Change a gradient in place (grad.mul_), or call forget_sums once per step if you "
        "assign gradients yourself"
    ),
}


def _reject_mixed(parameters: list[torch.Tensor]) -> None:
    for state, what_to_do in _WHAT_TO_DO.items():
        found = [p for p in parameters if (watch := watch_of(p)) is not None and watch.state() is state]
        if found:
            raise MixedGradientError(
                f"{len(found)} gradients (the first of shape {list(found[0].shape)}) {what_to_do}"
            )


@dataclass
class _Part:
    """This rank's part of one gradient."""

    parameter: torch.Tensor
    watch: GradientWatch

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the gradient, known from the parameter, so that ranks without a gradient agree."""
        main = getattr(self.parameter, "main_grad", None)
        return self.parameter.dtype if main is None else main.dtype

    @property
    def is_here(self) -> bool:
        return gradient_of(self.parameter) is not None

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        gradient = gradient_of(self.parameter)
        if gradient is None:
            return torch.zeros_like(local(self.parameter), dtype=dtype).flatten()
        return local(gradient).to(dtype).flatten()

    def own(self) -> torch.Tensor:
        """Return the gradient's local tensor; where there is no gradient, make one."""
        gradient = gradient_of(self.parameter)
        if gradient is None:
            gradient = self.parameter.grad = torch.zeros_like(self.parameter)
        self.watch.set_summed(gradient)
        return local(gradient)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or this rank's shard of it if FSDP2 shards it over the data axis."""
    if not isinstance(tensor, DTensor):
        return tensor
    shard: torch.Tensor = tensor.to_local()
    return shard


def _sum(parts: list[_Part], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup) -> None:
    """Sum gradients by one all-reduce; the buffer ends with the number of ranks that have each gradient."""
    flats = [part.flat(dtype) for part in parts]
    here = torch.ones(len(parts), dtype=dtype, device=device)
    for position, part in enumerate(parts):
        if not part.is_here:
            here[position] = 0
    buffer = torch.cat([*flats, here])
    reduce_in_place(buffer, group)
    *sums, ranks = buffer.split([*(flat.numel() for flat in flats), len(parts)])
    if not all(part.is_here for part in parts):
        counted = ranks.tolist()  # the host waits, but only on a rank that lacks a gradient
        sums = [found for found, count in zip(sums, counted, strict=True) if count]
        parts = [part for part, count in zip(parts, counted, strict=True) if count]
    if parts:
        own = [part.own() for part in parts]
        torch._foreach_copy_(own, [found.view_as(of) for found, of in zip(sums, own, strict=True)])
