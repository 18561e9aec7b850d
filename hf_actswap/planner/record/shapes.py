"""Makes a profile without a device: the step runs on fake tensors, and op times are computed from shapes.

Forward and backward both run, so saved tensors, temporary memory and releases occur as in a real step; but
nothing is computed and no memory is touched. The fake tensors are on the CPU, whatever the device: fused
attention saves the same there (its output and the softmax statistics).

Of layers that are alike a few run, and the profile repeats theirs (`plan.repeated_layers`). Memory in use
grows by equal steps from layer to layer, and with the number of layers: a second run, of fewer layers still,
shows what those that did not run change everywhere. Where the records disagree, all layers run.

What runs in tiles on the model runs in tiles here too, so the profile is that of the step in tiles: a tile
saves only its input, its forward runs once more within its backward, and one tile is there at a time.
Products that are summed in fp32 are counted as on an accelerator, without copies in fp32.

Such a step holds whole weights, and gradients in the weights' own type. `with_baseline` replaces their bytes,
in each op event, by what one rank of a training keeps; beside that only the optimizer's time changes. The
stages of ZeRO shard over N ranks: 1 the optimizer's states, 2 gradients too, 3 weights too (Rajbhandari et
al., ZeRO, 2020, section 3 and figure 1). Shards follow FSDP2's rules (torch/distributed/fsdp): weights
outside the layers are gathered from their forward to the end of backward; of the layers, those of the running
one and of the one that is gathered ahead; gradients of a layer are whole until they are scattered, while the
next layer runs. This is counted in every op event, also where there is no second layer.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ...engine.frozen_weights import LAYERS_AHEAD, step_bytes, window_bytes
from ...engine.tiled_calls import no_saved_tensor_hooks
from ...plan.actions import Scope, is_layer
from ...plan.dry_run import dry_call, exchanged, fake_batch, fake_weights, know_values, times_run
from ...plan.model_structure import ModelStructure, is_below, unwrapped
from ...plan.repeated_layers import NotAlikeError, Repeat, repeated_uses
from ..meter import CountingMeter
from ..profile import OpEvent, Places, Profile
from .devices import DeviceRates, device_rates, op_ms
from .recorder import StepRecorder, signature

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]

_CPU = torch.device("cpu")


def profile_from_shapes(
    model: nn.Module,
    structure: ModelStructure,
    batch: Mapping[str, Any],
    device_name: str,
    *,
    optimizer_state_bytes: int = 0,
    gradients_exist: bool = False,
    with_workspaces: bool = False,
) -> Profile:
    """Return the profile of one micro-batch, run on fake tensors.

    No hook on the model runs, none of its tensors is touched, no random number is drawn; autocast is as it is
    when this is called. Compiled modules run eagerly.

    Args:
        model: the model inside its wrappers, as the model structure names it; may be on ``meta``. It must be
            in training mode if it has dropout.
        structure: structure of this model.
        batch: arguments of the model's call; with ``labels`` if there is to be a loss. Of tensors (also fake
            ones, also on ``meta``) only shape and type count.
        device_name: a device, as `devices.device_rates` takes it.
        optimizer_state_bytes: optimizer states on the device in every op event; the optimizer's time follows
            from them too.
        gradients_exist: whether backward adds to gradients that are there already (gradient accumulation).
        with_workspaces: whether the workspaces of the device's libraries are counted too.

    Raises:
        PlanError: there is no such device.
        Exception: whatever the model raises on fake tensors (data-dependent shapes, custom kernels).
    """
    rates = device_rates(device_name)
    settings = rates, optimizer_state_bytes, gradients_exist, with_workspaces
    if repeats := structure.repeats_in(unwrapped(model)):
        try:
            return _profile_of_few(repeats, model, structure, batch, *settings)
        except Exception as error:  # the model's own code runs on fewer layers than it has
            logger.debug("Layers that look alike are not, so all of them run: %s", str(error))
    return _profile(model, structure, batch, *settings)


def _profile_of_few(
    repeats: tuple[Repeat, ...],
    model: nn.Module,
    structure: ModelStructure,
    batch: Mapping[str, Any],
    *settings: Any,
) -> Profile:
    """Return the profile, made from those of a few layers and of one period less of each repeat."""
    if not repeats:
        return _profile(model, structure, batch, *settings)
    repeat, *others = repeats
    found: list[Profile] = []
    for left_out in (repeat.left_out, range(repeat.example, repeat.last)):
        with structure.without(unwrapped(model), left_out, repeat.stack) as few:
            found.append(_profile_of_few(tuple(others), model, few, batch, *settings))
    profile = _EventSplice.of(found[0], repeat).applied(*found)
    saved = replace(profile.saved, modules=structure.modules)
    return replace(profile, saved=saved, num_layers=len(structure.layers), signature=signature(saved))


def _profile(
    model: nn.Module,
    structure: ModelStructure,
    batch: Mapping[str, Any],
    rates: DeviceRates,
    optimizer_state_bytes: int,
    gradients_exist: bool,
    with_workspaces: bool,
) -> Profile:
    meter = CountingMeter(unlimited_bytes=rates.memory_bytes)
    with dry_call(model, batch, real_as=_CPU) as named:
        state = {name: _on_cpu(tensor) for name, tensor in fake_weights(model, _CPU).items()}
        call = tree_map_only(torch.Tensor, _on_cpu, fake_batch(named, _CPU))
        know_values(call, named)
        trained = [tensor for tensor in state.values() if tensor.requires_grad]
        if gradients_exist:
            for tensor in trained:
                tensor.grad = torch.empty_like(tensor)
        meter.own(state.values())
        weight_bytes = meter.allocated_bytes()
        workspace_bytes = rates.workspace_bytes if with_workspaces else 0
        baseline = torch.empty(optimizer_state_bytes + workspace_bytes, dtype=torch.uint8)
        meter.own([baseline, *(tensor.grad for tensor in trained if tensor.grad is not None)])
        meter.own(leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor))
        recorder = StepRecorder(
            model,
            structure,
            meter,
            RooflineClock(rates),
            compiles=False,
            device=_CPU,
            gradient_bytes=_counter_of_gradients(trained),
            reads_groups=rates.reads_groups,
        )
        meter.start()
        try:
            with _kernels_of(model), recorder, exchanged(model, state):  # in backward too: layers run again
                _run_step(model, call)
        finally:
            meter.stop()
    trained_bytes = sum(tensor.nbytes for tensor in trained)
    # States and weights both ways, gradients once; to clip them they are read once, and go both ways.
    moved_bytes = 2 * optimizer_state_bytes + 6 * trained_bytes
    return recorder.profile(
        device=rates.name,
        device_bytes=rates.memory_bytes,
        link=rates.link,
        optimizer_state_bytes=optimizer_state_bytes,
        outside_ms=moved_bytes / rates.bytes_per_ms if optimizer_state_bytes else 0.0,
        weight_bytes=weight_bytes,
        source="shapes",
    )


@dataclass(frozen=True)
class _EventSplice:
    """Puts copies of the op events of a repeat's example between this and the last period.

    Args:
        sample, example, last: numbers of the first op events of these periods.
        orders, operators, places: by how much numbers rise from a period to the next; backward's places fall.
        last_operator: operator at which the last period begins.
        first_place: the place at which backward gets to the example; -1: it does not.
    """

    repeat: Repeat
    sample: int
    example: int
    last: int
    orders: int
    operators: int
    places: int
    last_operator: int
    first_place: int

    @classmethod
    def of(cls, profile: Profile, repeat: Repeat) -> _EventSplice:
        """Read the splice off a profile of the layers that `Repeat.left_out` leaves.

        Raises:
            NotAlikeError: the op events of the example are not those of the sample.
        """
        events = profile.op_events
        first = {op_event.call[0]: number for number, op_event in reversed([*enumerate(events)])}
        periods = [*map(repeat.scope, (repeat.sample, repeat.example, repeat.last))]
        if any(layer not in first for layer in periods):
            raise NotAlikeError("a layer runs nothing")
        sample, example, last = (first[layer] for layer in periods)
        if example - sample != last - example:
            raise NotAlikeError("periods with other numbers of op events")
        pairs = list(zip(events[sample:example], events[example:last], strict=True))
        places = [(one.backward_place, two.backward_place) for one, two in pairs if two.backward_place >= 0]
        begins, ends = pairs[0]
        splice = cls(
            repeat,
            sample,
            example,
            last,
            orders=ends.first_order - begins.first_order,
            operators=ends.first_op - begins.first_op,
            places=places[0][0] - places[0][1] if places else 0,
            last_operator=events[last].first_op,
            first_place=min((place for _, place in places), default=-1),
        )
        if any(not _alike(splice._moved(one, 1), two) for one, two in pairs):
            raise NotAlikeError("periods with other op events")
        return splice

    def applied(self, profile: Profile, shorter: Profile) -> Profile:
        """Return the profile with the copies, given that of one period less.

        Raises:
            NotAlikeError: the example saves or leaves something else than the sample, or a period more
                changes other op events than its own.
        """
        copies = self.repeat.copies
        events = [self._behind(op_event) for op_event in profile.op_events]
        example = events[self.example : self.last]
        between = [self._moved(op_event, number) for number in range(1, copies + 1) for op_event in example]
        after = [self._later(op_event, copies) for op_event in events[self.last :]]
        kept = (*profile.op_events[: self.example], *profile.op_events[self.last :])
        if [_ops_of(one) for one in kept] != [_ops_of(one) for one in shorter.op_events]:
            raise NotAlikeError("a period more changes what runs around it")

        def further(read: Callable[[Profile], Any]) -> Any:
            return read(profile) + copies * (read(profile) - read(shorter))

        memory = self._memory(_memory_of(profile), _memory_of(shorter)).tolist()
        op_events = (
            replace(op_event, forward_base_bytes=forward, backward_base_bytes=backward)
            for op_event, (forward, backward, _) in zip(
                (*events[: self.last], *between, *after), memory, strict=True
            )
        )
        return replace(
            profile,
            saved=replace(profile.saved, storages=repeated_uses(profile.saved.storages, self.repeat)),
            op_events=tuple(op_events),
            hooks=tuple(self._hooks(profile.hooks)),
            gradient_bytes=(*(row[2] for row in memory), further(lambda one: one.gradient_bytes[-1])),
            weight_bytes=further(lambda one: one.weight_bytes),
            outside_ms=further(lambda one: one.outside_ms),
            outside_base_bytes=further(lambda one: one.outside_base_bytes),
        )

    def _memory(self, longer: IntArray, shorter: IntArray) -> IntArray:
        """Return the rows of `_memory_of` with those of the copies.

        A period more adds equal steps to all rows, weights and gradients included; from a period to the next
        there is one more step.
        """
        sample, example = slice(self.sample, self.example), slice(self.example, self.last)
        steps = np.concatenate([longer[: self.example], longer[self.last :]]) - shorter
        steps = np.concatenate([steps[: self.example], steps[sample], steps[self.example :]])
        following = longer[example] - longer[sample]
        for of_period in (following, steps[sample]):
            visited = of_period[longer[sample, 1] > 0]
            if np.any(of_period[:, 0] != of_period[0, 0]) or np.any(visited[:, 1:] != visited[:1, 1:]):
                raise NotAlikeError("the ops of a layer leave other amounts of memory")
        copies = self.repeat.copies
        full = longer + copies * steps
        between = [full[example] + number * following for number in range(1, copies + 1)]
        return np.concatenate([full[: self.last], *between, full[self.last :]])

    def _hooks(self, hooks: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield `Profile.hooks` with the copies."""
        copies, example = self.repeat.copies, self.last_operator - self.operators
        yield from (hook for hook in hooks if hook[1] < self.last_operator)
        own = [hook for hook in hooks if example <= hook[1] < self.last_operator]
        for number in range(1, copies + 1):
            yield from ((at + number * self.orders, op + number * self.operators) for at, op in own)
        for at, op in hooks:
            if op >= self.last_operator:
                yield at + copies * self.orders, op + copies * self.operators

    def _behind(self, op_event: OpEvent) -> OpEvent:
        """Return an event with its place behind those of the copies, if backward gets there after them."""
        if not 0 <= self.first_place <= op_event.backward_place:
            return op_event
        return replace(op_event, backward_place=op_event.backward_place + self.repeat.copies * self.places)

    def _moved(self, op_event: OpEvent, periods: int) -> OpEvent:
        """Return the event that is this one some periods later."""
        moved = replace(self._later(op_event, periods), call=self.repeat.moved(op_event.call, periods))
        if op_event.backward_place < 0:
            return moved
        return replace(moved, backward_place=op_event.backward_place - periods * self.places)

    def _later(self, op_event: OpEvent, periods: int) -> OpEvent:
        """Return the event with its numbers when so many more periods have run before it."""
        return replace(
            op_event,
            first_order=op_event.first_order + periods * self.orders,
            last_order=op_event.last_order + periods * self.orders,
            first_op=op_event.first_op + periods * self.operators,
        )


def _memory_of(profile: Profile) -> IntArray:
    """Return for each op event its base bytes in forward and in backward, and the gradients before it."""
    rows = [
        (op_event.forward_base_bytes, op_event.backward_base_bytes, complete)
        for op_event, complete in zip(profile.op_events, profile.gradient_bytes, strict=False)
    ]
    return np.array(rows, dtype=np.int64)


def _ops_of(op_event: OpEvent) -> tuple[object, ...]:
    uses = op_event.last_order - op_event.first_order
    visited = op_event.backward_place >= 0
    facts = op_event.communicates, op_event.random, op_event.reads_values
    return op_event.call, uses, op_event.num_ops, visited, *facts


def _alike(op_event: OpEvent, other: OpEvent) -> bool:
    """Whether events are equal, but for memory, and rounding of times, which are differences of two sums."""
    times = (op_event.forward_ms, other.forward_ms), (op_event.backward_ms, other.backward_ms)
    near = all(math.isclose(one, two, rel_tol=1e-6, abs_tol=1e-9) for one, two in times)
    same = replace(
        op_event,
        forward_ms=other.forward_ms,
        backward_ms=other.backward_ms,
        forward_base_bytes=other.forward_base_bytes,
        backward_base_bytes=other.backward_base_bytes,
    )
    return near and same == other


@contextmanager
def _kernels_of(model: nn.Module) -> Iterator[None]:
    """Let ops be those of an accelerator, unless all weights are on the CPU, where the model then trains.

    Frozen weights may wait on the host while the rest of the model is on an accelerator.
    """
    if all(weight.device == _CPU for weight in model.parameters()):
        yield
        return
    with _AcceleratorKernels(), _AcceleratorTemporaries():
        yield


class _AcceleratorKernels(TorchFunctionMode):
    """Runs on the CPU's fake tensors what an accelerator would run: its dropout, attention and autocast.

    On an accelerator `F.dropout` is ``native_dropout``, which saves a mask of bytes
    (``is_fused_kernel_acceptable`` in PyTorch's ``aten/src/ATen/native/Dropout.cpp``), and fused attention
    draws its mask anew in backward. Its autocast runs more ops in fp32 than the CPU's
    (``AT_FORALL_FP32`` and ``AT_FORALL_FP32_SET_OPT_DTYPE`` in PyTorch's ``aten/src/ATen/autocast_mode.h``).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").strip("_")
        if func is F.dropout:
            given = inspect.signature(F.dropout).bind(*args, **kwargs)
            given.apply_defaults()
            named = given.arguments
            if named["training"] and 0 < named["p"] < 1 and not named["inplace"]:
                return torch.native_dropout(named["input"], named["p"], True)[0]
        elif func is F.scaled_dot_product_attention:
            given = inspect.signature(_attention).bind(*args, **kwargs)
            return _attention(*given.args, **given.kwargs)
        elif not torch.is_autocast_enabled("cpu"):
            pass
        elif name in _FP32_OPS:
            args, kwargs = tree_map_only(torch.Tensor, _in_fp32, (args, kwargs))
        elif name in _FP32_RESULTS and kwargs.get("dtype") is None:
            half = getattr(args[0] if args else kwargs.get("input"), "dtype", None) in _HALF
            kwargs |= {"dtype": torch.float32} if half else {}
        return func(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention as the CPU fuses it, without dropout; values of another width as CUDA's efficient kernel.

    CUDA has fused kernels for tensors and masks that are dense in their last dimension alone, which T5's bias
    is not (``check_last_dim_stride_equals_1_dense`` in PyTorch's
    ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``).
    """
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    dense = all(tensor.stride(-1) == 1 for tensor in given)
    alike = query.shape[-1] == value.shape[-1] or query.shape[1] != key.shape[1] or attn_mask is not None
    if dense and alike:
        flags: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **flags)
    if torch.is_autocast_enabled("cpu"):  # it casts what attention is given, and nothing inside it
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if not dense:
        with torch.autocast("cpu", enabled=False):
            return _unfused_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    result: torch.Tensor = efficient(query, key, value, None, True, 0.0, is_causal, scale=scale)[0]
    return result


def _unfused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention op by op, half types in fp32 (``_scaled_dot_product_attention_math`` in PyTorch's
    ``aten/src/ATen/native/transformers/attention.cpp``).
    """
    dtype = query.dtype
    if dtype in _HALF:
        query, key, value = query.float(), key.float(), value.float()
    if enable_gqa and (groups := query.shape[-3] // key.shape[-3]) > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
    scores = torch.matmul(query * factor, key.transpose(-2, -1) * factor)
    if attn_mask is not None:
        scores.add_(attn_mask)
    weights = torch.ops.aten._safe_softmax(scores, -1)
    if dropout_p > 0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    returned = weights.to(dtype)  # beside the result, and nobody wants it
    result = torch.matmul(weights, value).to(dtype)
    del returned
    return result


class _AcceleratorTemporaries(TorchDispatchMode):
    """Counts what CUDA's kernels of softmax allocate while they run, and free again.

    Its backward multiplies gradient and result first (``softmax_backward_cuda_out`` in PyTorch's
    ``aten/src/ATen/native/cuda/SoftMax.cu``); ``_safe_softmax`` looks for rows that are masked whole.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        held: tuple[torch.Tensor, ...] = ()
        if func is torch.ops.aten._softmax_backward_data.default:
            held = (torch.empty_like(args[0]),)
        elif func is torch.ops.aten._safe_softmax.default:
            held = torch.empty_like(args[0]), torch.empty_like(args[0], dtype=torch.bool)
        result = func(*args, **(kwargs or {}))
        del held  # not before the op has its result
        return result


_HALF = torch.bfloat16, torch.float16
_FP32_OPS = frozenset(
    name
    for names in (
        "acos asin cdist cosh cosine_similarity dist erfinv exp expm1 frobenius_norm group_norm layer_norm",
        "log log10 log1p log2 logsumexp native_layer_norm nuclear_norm pdist pow reciprocal renorm rms_norm",
        "rsqrt sinh softplus tan binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss",
        "huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss",
        "nll_loss nll_loss2d poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss",
    )
    for name in names.split()
)
_FP32_RESULTS = frozenset(("cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum"))


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def _run_step(model: nn.Module, call: Mapping[str, Any]) -> None:
    result = _result(model(**call))  # the rest is freed, as in training
    torch.clear_autocast_cache()  # as autocast around a forward does at its end
    if result is not None:
        # `Tensor.backward` takes `_AcceleratorKernels` off meanwhile: then the model's own checkpoints would
        # run other ops again than forward ran.
        gradients = (torch.empty_like(result),)
        with torch.autocast("cpu", enabled=False):  # it is around forward alone
            _engine_run_backward((result,), gradients, False, False, (), True, accumulate_grad=True)


def _counter_of_gradients(trained: Sequence[torch.Tensor]) -> Callable[[], int]:
    """Return a function that returns how many bytes of gradients autograd has accumulated so far."""
    there = {id(tensor): tensor.nbytes for tensor in trained if tensor.grad is not None}

    def accumulated(tensor: torch.Tensor) -> None:
        there[id(tensor)] = tensor.nbytes

    for tensor in trained:
        tensor.register_post_accumulate_grad_hook(accumulated)
    return lambda: sum(there.values())


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device == _CPU:
        return tensor
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved.requires_grad_(tensor.requires_grad)


def _result(output: Any) -> torch.Tensor | None:
    """Return the loss, or without one the first result that requires a gradient.

    Of logits it is the loss that most loops compute of them themselves: cross entropy in fp32.
    """
    loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if loss is None and isinstance(logits, torch.Tensor) and logits.requires_grad and logits.dim() > 1:
        rows = logits.float().flatten(0, -2)
        with no_saved_tensor_hooks():
            return F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.long, device=rows.device))
    leaves = [loss] if isinstance(loss, torch.Tensor) else tree_leaves(output)
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad), None)


@dataclass(frozen=True, slots=True)
class RooflineStamp:
    """A time in ms since its `RooflineClock` was made."""

    ms: float

    def ms_since(self, earlier: RooflineStamp) -> float:
        return self.ms - earlier.ms


class RooflineClock:
    """A `Clock` that adds up how long ops would take on a device, by their shapes (`op_ms`)."""

    def __init__(self, rates: DeviceRates) -> None:
        self._rates = rates
        self._now_ms = 0.0

    def stamp(self) -> RooflineStamp:
        return RooflineStamp(self._now_ms)

    def synchronize(self) -> None:
        """Do nothing: no op is in flight."""

    def ran(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        self._now_ms += times_run(args, result) * op_ms(self._rates, func, args, kwargs, result)


@dataclass(frozen=True)
class Baseline:
    """How one rank keeps weights and gradients on its device.

    Args:
        layer_bytes: bytes of the largest layer's weights, in the type in which they are kept.
        other_bytes: bytes of all weights outside the layers.
        gradient_scale: bytes in which a complete gradient is kept, divided by those that backward makes.
        stage: stage of ZeRO, 0 to 3: 1 shards the optimizer's states, 2 also gradients, 3 also weights.
        kept_bytes: bytes of all weights in the type in which their shards are kept.
        stays: whether gathered weights stay until backward.
        summed_as_kept: whether a layer's whole gradients are copied into the type in which they are kept, to
            be summed (FSDP2's ``reduce_dtype``); else they are summed as backward makes them.
        passing: temporary bytes that the ops of a module need in addition, such as dequantised weights:
            (scope, path in the layer) -> bytes.
        passing_ms: the time that making them takes in each forward and in each backward of the module.
    """

    layer_bytes: int
    other_bytes: int
    weight_bytes: int
    kept_bytes: int
    gradient_scale: Fraction = Fraction(1)
    stage: int = 0
    ranks: int = 1
    stays: bool = False
    summed_as_kept: bool = False
    passing: Mapping[tuple[Scope, str], int] = field(default_factory=dict)
    passing_ms: Mapping[tuple[Scope, str], float] = field(default_factory=dict)

    @property
    def running_bytes(self) -> int:
        """Bytes of weights on the device all through forward and backward: shards, what stays gathered.

        That is what is outside the layers: in FSDP1, and in FSDP2 with Accelerate before 1.14. Later the
        embedding leaves when it has run.
        """
        if self.stage < 3:
            return self.weight_bytes
        return self.resting_bytes + (self.weight_bytes if self.stays else self.other_bytes)

    def gathered_bytes(self, scope: Scope | None) -> tuple[int, int]:
        """Bytes of layers' weights that are gathered while a scope runs: in forward, and in backward.

        A layer's own, and those that it gathers ahead. The head's backward gathers those of the last layer.
        """
        if self.stage < 3 or self.stays:
            return 0, 0
        return (2 * self.layer_bytes,) * 2 if is_layer(scope) else (0, self.layer_bytes)

    @property
    def resting_bytes(self) -> int:
        """Bytes of weights on the device between steps."""
        return self.weight_bytes if self.stage < 3 else _shard(self.kept_bytes, self.ranks)


def with_baseline(profile: Profile, baseline: Baseline) -> Profile:
    """Return the profile of the same step with weights, gradients and states kept as ``baseline`` says.

    ``profile`` is computed from shapes, so that it knows weights and gradients, and has no gradients of an
    earlier micro-batch.
    """
    ranks = baseline.ranks
    states = _shard(profile.optimizer_state_bytes, ranks if baseline.stage else 1)
    gradients = _gradients(profile, baseline)
    weights = baseline.running_bytes - profile.weight_bytes
    less = weights + states - profile.optimizer_state_bytes
    op_events = tuple(
        replace(
            op_event,
            forward_base_bytes=max(op_event.forward_base_bytes + less + passing + gathered[0], 0),
            backward_base_bytes=max(
                op_event.backward_base_bytes + less + passing + gathered[1] + after - before, 0
            )
            if op_event.backward_place >= 0
            else op_event.backward_base_bytes,
            forward_ms=op_event.forward_ms + more_ms,
            backward_ms=op_event.backward_ms + (more_ms if op_event.backward_place >= 0 else 0),
        )
        for op_event, before, after, passing, more_ms, gathered in zip(
            profile.op_events,
            profile.gradient_bytes,
            gradients,
            (_passing(baseline, *op_event.call[:2]) for op_event in profile.op_events),
            _passing_ms(profile, baseline),
            (baseline.gathered_bytes(op_event.call[0]) for op_event in profile.op_events),
            strict=False,
        )
    )
    at_rest = baseline.resting_bytes - profile.weight_bytes
    outside = at_rest + states - profile.optimizer_state_bytes + gradients[-1] - profile.gradient_bytes[-1]
    return replace(
        profile,
        op_events=op_events,
        weight_bytes=baseline.running_bytes,
        gradient_bytes=gradients,
        optimizer_state_bytes=states,
        outside_base_bytes=max(profile.outside_base_bytes + outside, 0),
        outside_ms=profile.outside_ms / (ranks if baseline.stage else 1),
    )


def with_weights_on_host(profile: Profile, sizes_bytes: Mapping[Scope, int]) -> Profile:
    """Return the profile of the same step with frozen weights of layers on the host (`FrozenWeights`).

    On the device is the largest window of layers, at every moment. A layer waits for its copy where that
    takes longer than the layer before it computes; recomputation, which the profile does not know, would
    hide more.

    ``profile`` is computed from shapes, with all weights on the device. ``sizes_bytes`` are the bytes of each
    such layer, in the order of forward.
    """
    less = sum(sizes_bytes.values()) - window_bytes(list(sizes_bytes.values()))
    forward_ms: dict[Scope | None, float] = {}
    backward_ms: dict[Scope | None, float] = {}
    if (link := profile.link) is not None:
        ahead, back = profile.scope_ms()
        copies_ms = {scope: link.in_ms(size) for scope, size in sizes_bytes.items()}
        forward_ms = _waits_ms(copies_ms, ahead)
        backward_ms = _waits_ms(dict(reversed(copies_ms.items())), back)
    op_events = []
    for op_event in profile.op_events:
        scope = op_event.call[0]  # its first op event waits
        op_events.append(
            replace(
                op_event,
                forward_ms=op_event.forward_ms + forward_ms.pop(scope, 0.0),
                backward_ms=op_event.backward_ms + backward_ms.pop(scope, 0.0),
                forward_base_bytes=max(op_event.forward_base_bytes - less, 0),
                backward_base_bytes=max(op_event.backward_base_bytes - less, 0),
            )
        )
    there = replace(
        profile,
        op_events=tuple(op_events),
        weight_bytes=profile.weight_bytes - less,
        outside_base_bytes=max(profile.outside_base_bytes - less, 0),
    )
    return with_link_beside_weights(there, sizes_bytes)


def with_link_beside_weights(profile: Profile, sizes_bytes: Mapping[Scope, int]) -> Profile:
    """Return the profile with the rates that copies of frozen weights leave to swapped tensors.

    Weights come in during forward, beside what is swapped out, and during backward, where they take their
    share of the time in which swapped tensors come back.

    The times of ``profile`` include waits for weights, and its link has its whole rates. ``sizes_bytes`` are
    those of each layer's frozen weights on the host; empty: nothing is changed.
    """
    link = profile.link
    if link is None or not sizes_bytes:
        return profile
    of_layers = [op_event for op_event in profile.op_events if op_event.call[0] in sizes_bytes]
    copies_ms = step_bytes(list(sizes_bytes.values())) / 2 / link.in_bytes_per_ms
    forward = _share(copies_ms, sum(op_event.forward_ms for op_event in of_layers))
    left = max(1 - _share(copies_ms, sum(op_event.backward_ms for op_event in of_layers)), _LEAST_LINK_SHARE)
    link = replace(
        link,
        out_bytes_per_ms=(1 - forward) * link.out_bytes_per_ms + forward * link.out_beside_in_bytes_per_ms,
        in_bytes_per_ms=link.in_bytes_per_ms * left,
        in_beside_out_bytes_per_ms=link.in_beside_out_bytes_per_ms * left,
    )
    return replace(profile, link=link)


def with_link_beside_collectives(profile: Profile, forward_ms: float, backward_ms: float) -> Profile:
    """Return the profile with the rates that collectives leave to swapped tensors on the same link.

    ``forward_ms`` and ``backward_ms`` are the times of the collectives, which send and receive at once.
    """
    if (link := profile.link) is None:
        return profile
    forward = max(1 - _share(forward_ms, sum(one.forward_ms for one in profile.op_events)), _LEAST_LINK_SHARE)
    back = max(1 - _share(backward_ms, sum(one.backward_ms for one in profile.op_events)), _LEAST_LINK_SHARE)
    link = replace(
        link,
        out_bytes_per_ms=link.out_bytes_per_ms * forward,
        in_bytes_per_ms=link.in_bytes_per_ms * back,
        out_beside_in_bytes_per_ms=link.out_beside_in_bytes_per_ms * forward,
        in_beside_out_bytes_per_ms=link.in_beside_out_bytes_per_ms * back,
    )
    return replace(profile, link=link)


def _share(copies_ms: float, ms: float) -> float:
    return min(copies_ms / ms, 1.0) if ms > 0 else 1.0


def with_optimizer_in_backward(
    profile: Profile, accumulated: bool, resident_bytes: int = 0, step_scale: float = 0.0
) -> Profile:
    """Return the profile of the same step with each parameter stepped in backward (`OptimizerInBackward`).

    Of complete gradients none is there, but those of earlier micro-batches: these are all there while the
    first micro-batches and forward run.

    Args:
        profile: a profile computed from shapes, so that it knows the gradients.
        accumulated: whether a step has several micro-batches.
        resident_bytes: bytes of states on the device in backward, where the others wait on the host.
        step_scale: what a parameter's step allocates and frees again, as a multiple of its gradient.
    """
    gradients = profile.gradient_bytes
    reached = Places(profile.op_events).order
    more = dict.fromkeys(range(len(profile.op_events)), 0)
    for at, following in zip(reached, [*reached[1:], -1], strict=True):
        made = max(gradients[following] - gradients[at], 0)
        freed = 0 if accumulated else gradients[at]
        more[at] = resident_bytes + int(step_scale * made) - freed
    op_events = tuple(
        replace(item, backward_base_bytes=max(item.backward_base_bytes + more[at], 0))
        for at, item in enumerate(profile.op_events)
    )
    there = gradients[:-1] if accumulated else (0,) * (len(gradients) - 1)
    return replace(
        profile,
        op_events=op_events,
        gradient_bytes=(*there, 0),
        outside_base_bytes=max(profile.outside_base_bytes - gradients[-1], 0),
    )


_LEAST_LINK_SHARE = 0.02
"""Least share of the link that is left to swapped tensors: a `Link` has rates above 0."""


def _waits_ms(
    copies_ms: Mapping[Scope, float], compute_ms: Mapping[Scope | None, float]
) -> dict[Scope | None, float]:
    """Return how long each layer waits for its weights, in the order in which layers run.

    The first layers of the window are on the device. Each later copy begins when the layer `LAYERS_AHEAD`
    before its own begins, and ends one after another on the link.
    """
    began: list[float] = []
    waits: dict[Scope | None, float] = {}
    now_ms = link_ms = 0.0
    for at, (scope, copy_ms) in enumerate(copies_ms.items()):
        arrived_ms = 0.0
        if at > LAYERS_AHEAD:
            link_ms = arrived_ms = max(link_ms, began[at - LAYERS_AHEAD]) + copy_ms
        waits[scope] = max(arrived_ms - now_ms, 0.0)
        now_ms = max(now_ms, arrived_ms)
        began.append(now_ms)
        now_ms += compute_ms[scope]
    return waits


def _gradients(profile: Profile, baseline: Baseline) -> tuple[int, ...]:
    """Return `Profile.gradient_bytes` as they are kept: shards of what is scattered, the rest whole."""
    if baseline.stage < 2:
        return tuple(int(size * baseline.gradient_scale) for size in profile.gradient_bytes)
    found = [0] * len(profile.gradient_bytes)
    whole = baseline.gradient_scale if baseline.summed_as_kept else 1
    outside = own = flying = scattered = 0
    running: Scope | None = None
    numbers = Places(profile.op_events).order
    for number, following in zip(numbers, [*numbers[1:], -1], strict=True):
        scope = profile.op_events[number].call[0]
        if is_layer(scope) and scope != running:
            running, scattered, flying, own = scope, scattered + flying, own, 0
        rests = int(scattered * baseline.gradient_scale)
        found[number] = outside + own + int(flying * whole) + _shard(rests, baseline.ranks)
        made = max(profile.gradient_bytes[following] - profile.gradient_bytes[number], 0)
        if is_layer(scope):
            own += made
        else:
            outside += made
    found[-1] = _shard(int(profile.gradient_bytes[-1] * baseline.gradient_scale), baseline.ranks)
    return tuple(found)


def _passing(baseline: Baseline, scope: Scope | None, path: str) -> int:
    items = baseline.passing.items()
    return max((size for (at, root), size in items if at == scope and is_below(path, root)), default=0)


def _passing_ms(profile: Profile, baseline: Baseline) -> Iterator[float]:
    """Yield the time that is added to each op event: to the first of each module in `Baseline.passing_ms`."""
    waiting = dict(baseline.passing_ms)
    for op_event in profile.op_events:
        scope, path, _ = op_event.call
        found = [key for key in waiting if key[0] == scope and is_below(path, key[1])]
        yield sum(waiting.pop(key) for key in found)


def _shard(size_bytes: int, ranks: int) -> int:
    return -(-size_bytes // ranks)
