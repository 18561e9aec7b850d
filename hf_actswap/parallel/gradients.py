"""Gradients that are complete only as a sum over the tensor-parallel ranks, summed exactly once per step.

**The tag is the contract.** A parameter whose attribute ``sequence_parallel_enabled`` is true gets, on each
rank, a part of its gradient: from this rank's tokens (norms, biases of row-parallel layers, routers, position
embeddings behind the scatter), from this rank's heads (``q_norm`` and ``k_norm`` of Qwen3 and Gemma3, with or
without sequence parallelism), or from this rank's shard of the layer that reads its output (``lora_A`` before
a column-parallel ``lora_B``). The name is NxD's; the tag means that the gradient must be summed, whatever the
reason. The code that makes such a parameter sets the tag; on a module of your own, use `setattr`.

The parts are summed, not averaged, after the last micro-batch and before a norm is computed. A sum per
micro-batch over the *accumulated* gradient counts the first ones again (as transformers 5.23 does for
``q_norm``). So both our integration and, as in NxD's recipe, the user may call
`allreduce_sequence_parallel_gradients`: gradients that are summed already are not changed.

**Summed exactly once.** `GradientWatch` records whether a parameter's gradient is still this rank's own part
or already the sum, whoever sums it. The gradient tensor itself does not show that: its version changes when
it is clipped and when more is accumulated, its address is reused, and a user may replace it. But autograd
always calls a parameter's hooks when it accumulates. So a pair of hooks on the parameter keeps the state:
summing sets it, accumulation clears it. Undecidable cases are errors:

- More was accumulated onto a gradient that was summed and not zeroed: no later sum can correct that. After
  zeroing in place (``zero_grad(set_to_none=False)``) it is right, and the two cases differ only in values. In
  this case alone the values are checked on the device before the accumulation, and the result is read at the
  next sum: the host does not wait in backward, and all ranks raise at the same place. FSDP2 calls only the
  hooks after accumulation; there, zeroing in place counts as not zeroing.
- Another tensor was assigned since the sum, and nothing accumulated. It may be the sum, scaled, or the next
  step's part from `torch.autograd.grad`. Code that assigns gradients must call `GradientWatch.forget`.

The state is in the hooks: a copied or loaded parameter has neither the hooks nor the state.

NxD's guide sums with a function of its own, which gives ``p.grad.data`` to
`mappings.reduce_from_tensor_model_parallel_region`. That tensor shows neither the parameter nor its watch,
but has the gradient's storage, on which the watch leaves a reference to itself.

**The norm of all gradients** counts each element of the model once, wherever and however often it is held:

- a parameter with ``tensor_model_parallel = True`` is this rank's shard: its part is summed over the group;
- with ``replicated_over = r`` as well, r ranks of the group hold this same shard (key and value heads where
  there are fewer of them than ranks): each contributes an r-th. For a fused weight the attribute is a tuple
  of pairs (number of rows, r), from the first row to the last;
- every other parameter is held alike by all ranks: rank 0's counts, so that the ranks get the very same
  norm and clip factor, even if a kernel's sums came out differently;
- an FSDP2 parameter is a shard over the data axis too: its part is summed over that axis first.

Tagged gradients must be summed before. The arithmetic is fp32, or fp64 where a parameter is.
``neuronx_distributed.parallel_layers.grads`` takes the norm in the parameters' dtype, counts replicated heads
as often as they are held, and cannot take an infinity norm without replicated parameters.
"""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Iterable
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .collectives import group_or_enclosing, reduce_in_place, sum_dtype
from .mesh import trained_parameters


class GradientState(enum.Enum):
    """Whether a parameter's gradient is this rank's part, the sum over the ranks, or undecidable."""

    PART = "this rank's part, or none"
    SUM = "the sum over the ranks"
    MIXED = "a sum over the ranks with parts accumulated onto it"
    REPLACED = "assigned after a sum: a part or a sum"


class GradientWatch:
    """Follows the gradient of one parameter, which requires one, until it is removed."""

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

    @property
    def gradient(self) -> torch.Tensor | None:
        """The parameter's gradient; ``None``: there is none."""
        parameter = self._parameter()
        return None if parameter is None else gradient_of(parameter)

    def state(self) -> GradientState:
        """Return the state of the gradient now.

        The host waits for the device only where a summed gradient was zeroed in place.
        """
        gradient = self.gradient
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
        for handle in self._handles:
            handle.remove()

    def _before_accumulation(self, _: torch.Tensor) -> None:
        """Note whether a summed gradient is zero. Runs even if nothing is accumulated afterwards."""
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
        if (held := gradient_of(parameter)) is not None:
            place = local(held)
            watches = vars(place.untyped_storage()).setdefault(_WATCHES, {})
            watches[place.storage_offset()] = weakref.ref(self)
        if gradient is None:  # an earlier hook has taken it
            return
        if was_not_zero is not None:
            self._doubt = weakref.ref(gradient), was_not_zero
        elif was_announced:
            self._doubt = None
        elif before is gradient:
            self._doubt = weakref.ref(gradient), None


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    if parameter.grad is not None:
        return parameter.grad
    return getattr(parameter, "main_grad", None)


_WATCHES = "_hf_actswap_gradient_watches"
"""Attribute of a storage: for each place in it, a weak reference to the watch of the gradient there."""


def sum_gradient_in_place(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Sum a gradient that a watch follows, unless it is the sum already.

    Args:
        tensor: shares the gradient's memory (``parameter.grad.data``).

    Returns:
        Whether ``tensor`` is such a gradient; if not, nothing is done.
    """
    place = local(tensor)
    reference = getattr(place.untyped_storage(), _WATCHES, {}).get(place.storage_offset())
    watch = None if reference is None else reference()
    gradient = None if watch is None else watch.gradient
    if watch is None or gradient is None or local(gradient).data_ptr() != place.data_ptr():
        return False
    if watch.state() is not GradientState.SUM:
        total = reduce_in_place(place.contiguous(), group)
        if total is not place:
            place.copy_(total)
        watch.set_summed(gradient)
    return True


def watch_of(parameter: torch.Tensor) -> GradientWatch | None:
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
    part depends on tags, ``requires_grad`` and order alone, equal on all ranks: a rank without a gradient
    that another has contributes zeros and gets the sum. Where none has any, there is none afterwards either.

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
    parameters = tagged_parameters(optimizer)
    _reject_mixed(parameters)
    parts: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, GradientWatch]]] = {}
    for parameter in parameters:
        watch = watch_of(parameter) or GradientWatch(parameter)
        if watch.state() is GradientState.PART:
            # The dtype is known from the parameter, so that ranks without a gradient agree.
            main = getattr(parameter, "main_grad", None)
            dtype = sum_dtype(parameter.dtype if main is None else main.dtype, reduce_dtype)
            parts.setdefault((dtype, parameter.device), []).append((parameter, watch))
    with torch.no_grad():
        for (dtype, device), of_kind in parts.items():
            _sum(of_kind, dtype, device, group)


def tagged_parameters(source: ParameterSource) -> list[torch.Tensor]:
    """Return each tagged parameter that requires a gradient, once, in the order of optimizer or module."""
    found: Iterable[torch.Tensor]
    if isinstance(source, nn.Module):
        found = trained_parameters(source)
    elif hasattr(source, "param_groups"):
        found = (parameter for group in source.param_groups for parameter in group["params"])
    else:
        found = source
    return list(_distinct(p for p in found if getattr(p, TAG, False) and p.requires_grad))


def reject_unsummed(parameters: Iterable[torch.Tensor]) -> None:
    """Raise unless the gradient of every watched tagged parameter is summed.

    Raises:
        UnsummedGradientError: some are not; ranks would see different norms, and replicas drift apart.
        MixedGradientError: as in `allreduce_sequence_parallel_gradients`.
    """
    tagged = tagged_parameters(parameters)
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

    Needed, once per step, only in loops that assign ``parameter.grad`` themselves.
    """
    for parameter in tagged_parameters(source):
        watch = watch_of(parameter)
        if watch is not None:
            watch.forget()


class TaggedGradients:
    """Watches a model's tagged parameters from its first backward on, and sums their gradients.

    While it is attached, the norm rejects gradients that are not summed. Parameters that are tagged later are
    watched from their first sum on.

    Args:
        model: module, optimizer or parameters.
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


_WHAT_TO_DO = {
    GradientState.MIXED: (
        "were accumulated onto gradients that had been summed over the tensor-parallel ranks already. Sum "
        "once, after the last micro-batch (with Accelerate: clip only `if accelerator.sync_gradients`), and "
        "call optimizer.zero_grad(set_to_none=True) before the next step's first backward"
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


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or this rank's shard of it if FSDP2 shards it over the data axis."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to_local()


def _sum(
    parts: list[tuple[torch.Tensor, GradientWatch]],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """Sum gradients by one all-reduce; the buffer ends with the number of ranks that have each gradient."""
    flats, is_complete = [], True
    here = torch.ones(len(parts), dtype=dtype, device=device)
    for position, (parameter, _) in enumerate(parts):
        gradient = gradient_of(parameter)
        if gradient is None:
            here[position], is_complete = 0, False
            gradient = torch.zeros_like(local(parameter), dtype=dtype)
        flats.append(local(gradient).to(dtype).flatten())
    buffer = torch.cat([*flats, here])
    reduce_in_place(buffer, group)
    *sums, ranks = buffer.split([*(flat.numel() for flat in flats), len(parts)])
    # The host waits for the numbers, but only on a rank that lacks a gradient.
    counts = [1] * len(parts) if is_complete else ranks.tolist()
    own, totals = [], []
    for (parameter, watch), total, count in zip(parts, sums, counts, strict=True):
        if count:
            gradient = gradient_of(parameter)
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            watch.set_summed(gradient)
            own.append(local(gradient))
            totals.append(total.view_as(own[-1]))
    if own:
        torch._foreach_copy_(own, totals)


_CLIP_EPSILON = 1e-6
"""Added to the norm that divides, as in `torch.nn.utils.clip_grad_norm_` and NxD."""

Held = tuple[torch.Tensor, int]
"""A gradient and the number of ranks of the group that hold it; 0: all."""


def get_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return the norm of the whole model's gradients, bitwise the same on every rank of the group.

    Every rank must call it, with or without gradients. The host does not wait for the device, except with
    ``error_if_nonfinite``. The scalar is fp64 if one of the parameters is, else fp32.

    Args:
        parameters: the parameters; one without a gradient counts as zero, and none counts twice.
        norm_type: greater than zero, or ``inf``.
        error_if_nonfinite: as in `torch.nn.utils.clip_grad_norm_`.
        process_group: tensor-parallel group; ``None``: that of the enclosing `tensor_parallel_group`.

    Raises:
        ValueError: the norm's type is not greater than zero, or a DTensor gradient is a partial sum.
        UnsummedGradientError: watched tagged gradients are still this rank's part (`TaggedGradients`).
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; or no group is known.
    """
    group = group_or_enclosing(process_group)
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a number greater than 0 or inf, found {norm_type}")
    distinct = list(_distinct(parameters))
    if group.size() > 1:
        reject_unsummed(distinct)
    device = distinct[0].device if distinct else _device_of(group)
    # The dtype depends on the parameters, not on their gradients, so that all ranks compute in the same.
    doubles = any(parameter.dtype == torch.float64 for parameter in distinct)
    zero = torch.zeros((), dtype=torch.float64 if doubles else torch.float32, device=device)
    totals = _own_part(distinct, norm_type, group, zero)
    reduce_in_place(totals, group, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    norm = totals if math.isinf(norm_type) else totals.pow(1.0 / norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
            "anyway, set `error_if_nonfinite=False`"
        )
    return norm


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm is at most ``max_norm``; return the norm before.

    The factor is ``max_norm / (norm + 1e-6)``, at most 1, bitwise the same on every rank; with ``inf``
    nothing changes. Other arguments and errors are those of `get_grad_norm`.
    """
    distinct = list(_distinct(parameters))
    norm = get_grad_norm(distinct, norm_type, error_if_nonfinite, process_group)
    factor = torch.clamp(float(max_norm) / (norm + _CLIP_EPSILON), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in distinct:
        gradient = gradient_of(parameter)
        if gradient is not None:
            by_device.setdefault(gradient.device, []).append(local(gradient).detach())
    with torch.no_grad():
        for device, gradients in by_device.items():
            torch._foreach_mul_(gradients, factor.to(device))
    return norm


def _distinct(parameters: torch.Tensor | Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    return {id(parameter): parameter for parameter in parameters}.values()


def _own_part(
    parameters: list[torch.Tensor], norm_type: float, group: dist.ProcessGroup, zero: torch.Tensor
) -> torch.Tensor:
    """Return this rank's part of the sum of powers, or of the maximum (infinity norm), like ``zero``."""
    by_data: dict[tuple[dist.ProcessGroup, ...], list[Held]] = {}
    for parameter in parameters:
        gradient = gradient_of(parameter)
        if gradient is None:
            continue
        sharded = getattr(parameter, "tensor_model_parallel", False)
        # A gradient that all ranks hold alike is listed on every rank: each must join its data groups' sums.
        holders = getattr(parameter, "replicated_over", 1) if sharded else 0
        held = _by_holders(gradient.detach(), holders)
        by_data.setdefault(_data_groups(gradient), []).extend(held)
    total, largest = zero, math.isinf(norm_type)
    for data_groups, gradients in by_data.items():
        part = _part(gradients, norm_type, group, zero)
        for data_group in data_groups:
            reduce_in_place(part, data_group, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        total = torch.maximum(total, part) if largest else total + part
    return total


def _by_holders(gradient: torch.Tensor, holders: int | tuple[tuple[int, int], ...]) -> list[Held]:
    own = local(gradient)
    if isinstance(holders, int):
        return [(own, holders)]
    counts = [count for count, _ in holders]
    if isinstance(gradient, DTensor):  # FSDP2 has cut the rows at a place of its own
        settings = gradient.shape, gradient.device_mesh, gradient.placements
        first = compute_local_shape_and_global_offset(*settings)[1][0]
        ends = list(accumulate(counts))
        counts = [
            max(min(end, first + own.shape[0]) - max(end - count, first), 0)
            for end, count in zip(ends, counts, strict=True)
        ]
    return [(part, held) for part, (_, held) in zip(own.split(counts), holders, strict=True)]


def _part(
    gradients: list[Held], norm_type: float, group: dist.ProcessGroup, zero: torch.Tensor
) -> torch.Tensor:
    is_first = group.rank() == 0
    counted = [(found, holders) for found, holders in gradients if (holders or is_first) and found.numel()]
    if not counted:
        return zero.clone()
    norms = _norms([found for found, _ in counted], norm_type, zero)
    if math.isinf(norm_type):
        return norms.amax().nan_to_num(torch.inf, torch.inf)  # a maximum over ranks may lose a NaN
    shares = [1.0 / max(holders, 1) for _, holders in counted]
    powers = norms.pow(norm_type)
    if any(share != 1.0 for share in shares):
        powers = torch.stack([power * share for power, share in zip(powers.unbind(), shares, strict=True)])
    return powers.sum()


def _norms(gradients: list[torch.Tensor], norm_type: float, like: torch.Tensor) -> torch.Tensor:
    """Return the norm of each gradient, ``[n]``, like ``like``; by one kernel per device and dtype."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, gradient in enumerate(gradients):
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(position)
    found: dict[int, torch.Tensor] = {}
    for positions in by_kind.values():
        of_kind = [gradients[position] for position in positions]
        dtype = torch.promote_types(of_kind[0].dtype, like.dtype)
        norms = torch._foreach_norm(of_kind, norm_type, dtype=dtype)
        found.update(zip(positions, norms, strict=True))
    return torch.stack([found[position].to(like) for position in range(len(gradients))])


def _data_groups(gradient: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which FSDP2 shards a gradient; none for a plain tensor or a replica (HSDP)."""
    if not isinstance(gradient, DTensor):
        return ()
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError(f"a gradient is a partial sum over a mesh: {gradient.placements}; reduce it before")
    dims = [dim for dim, placement in enumerate(gradient.placements) if placement.is_shard()]
    return tuple(gradient.device_mesh.get_group(dim) for dim in dims)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device on which the group can communicate, for a rank without any parameter."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or "gloo" in dist.get_backend(group):
        return torch.device("cpu")
    return accelerator
