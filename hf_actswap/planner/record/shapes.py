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
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from ...engine.tiled_calls import no_saved_tensor_hooks
from ...plan.dry_run import dry_call, exchanged, fake_batch, fake_weights, know_values, times_run
from ...plan.model_structure import ModelStructure, unwrapped
from ...plan.repeated_layers import NotAlikeError, Repeat, repeated_uses
from ..devices import DeviceRates, device_rates, op_ms
from ..meter import CountingMeter
from ..profile import OpEvent, Profile
from .kernels import kernels_of
from .recorder import StepRecorder

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
    forwards_before: int = 0,
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
        forwards_before: how many forwards of the same batch have run ahead of it, whose backward is to come.

    Raises:
        PlanError: there is no such device.
        Exception: whatever the model raises on fake tensors (data-dependent shapes, custom kernels).
    """
    rates = device_rates(device_name)
    settings = rates, optimizer_state_bytes, gradients_exist, with_workspaces, forwards_before
    if repeats := that_pay(structure.repeats_in(unwrapped(model)), structure):
        try:
            return _profile_of_few(repeats, model, structure, batch, *settings)
        except Exception as error:  # the model's own code runs on fewer layers than it has
            logger.debug("Layers that look alike are not, so all of them run: %s", str(error))
    return _profile(model, structure, batch, *settings)


def that_pay(repeats: tuple[Repeat, ...], structure: ModelStructure) -> tuple[Repeat, ...]:
    """Return the repeats with which the fewest layers run: each doubles how often the others' layers do.

    The only one always does: the time then does not depend on the number of layers.
    """
    total = len(structure.layers) + sum(len(stack.layers) for stack in structure.stacks)
    ranked = sorted(repeats, key=lambda repeat: -len(repeat.left_out))

    def layers_run(count: int) -> int:
        left_out: int = sum(len(repeat.left_out) for repeat in ranked[:count])
        return 2**count * (total - left_out)

    least = 1 if len(ranked) == 1 else 0
    return tuple(ranked[: min(range(least, len(ranked) + 1), key=layers_run)])


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
    return replace(profile, saved=saved, num_layers=len(structure.layers))


def _profile(
    model: nn.Module,
    structure: ModelStructure,
    batch: Mapping[str, Any],
    rates: DeviceRates,
    optimizer_state_bytes: int,
    gradients_exist: bool,
    with_workspaces: bool,
    forwards_before: int,
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
            forwards_before=forwards_before,
        )
        meter.start()
        try:
            with kernels_of(model), recorder, exchanged(model, state):  # in backward too: layers run again
                _run_step(model, call, forwards_before)
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
    facts = op_event.communicates, op_event.reads_values
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


def _run_step(model: nn.Module, call: Mapping[str, Any], forwards_before: int) -> None:
    results = []
    for _ in range(forwards_before + 1):
        results.append(_result(model(**call)))  # the rest is freed, as in training
        torch.clear_autocast_cache()  # as autocast around a forward does at its end
    found = tuple(result for result in results if result is not None)
    if found:
        # `Tensor.backward` takes `AcceleratorKernels` off meanwhile: then the model's own checkpoints would
        # run other ops again than forward ran.
        gradients = tuple(torch.empty_like(result) for result in found)
        results.clear()
        with torch.autocast("cpu", enabled=False):  # it is around forward alone
            _engine_run_backward(found, gradients, False, False, (), True, accumulate_grad=True)


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
