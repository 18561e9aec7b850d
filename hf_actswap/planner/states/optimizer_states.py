"""Keeps optimizer states on the host during forward and backward (``preference: memory_saving``).

Without this, weights, gradients and states are on the device at once, and states also beside activations.
Here states are in host memory from one step to the next, and pass through the device during the optimizer's
step, bucket by bucket. The storages of states move in one order of the parameters:

* **Step.** Buckets of parameters are stepped one after another by the optimizer's own code, each with its
  states on the device, while the next states are copied in and the last ones out. At most ``resident_bytes``
  of states are on the device at once (a single parameter's states always are). The last states that fit
  together stay: a loss that is read after the step would wait behind their copies.
* **Forward.** What stayed is copied out and released layer by layer, all of it before the last one. No more
  than two layers' copies are in the queue of the link: the model may read a value here too.
* **Backward.** Up to ``resident_bytes`` come back little by little, as gradients appear: with activations
  falling by as much as states grow, there is no new peak. In gradient accumulation this happens in the last
  backward, which is known from the number of backwards before the last step.

So ``resident_bytes`` trades memory for time: with a tenth of all states (the default) most copies run during
the step, both ways at once, at the speed of the link; with all of them the step waits for no copy that the
link could make during forward and backward. It may be set between any two steps.

The buckets run in the optimizer's step pre-hook; the step call itself then finds no parameters. So it works
with everything that wraps ``optimizer.step`` (schedulers, Accelerate, a gradient scaler, other hooks).
Stepping a part of the parameters at a time gives the same bits as stepping all, because these optimizers
(`STREAMED`, their classes and no subclasses) compute each parameter from its own gradient and states. Any
other optimizer gets all of its states back before the step.

Code that looks into ``optimizer.state`` finds a parameter's states on the device, where they stay until the
next forward. A state tensor kept from before the forward is NaN while its values are on the host.

``state_dict()`` and ``load_state_dict`` work where the device has no room for all states at once: states on
the host are saved as copies in ordinary host memory, and loaded states go to the device and out again
parameter by parameter. (PyTorch's own ``load_state_dict`` puts all of them on the device first.)
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...config.sizes import gib_text
from ...engine.hook_wrappers import Undo, entries_to, replace_method, wrap_call, wrap_outermost_calls
from ...engine.host_pool import HostPool
from ...engine.stats import Counters, SwapStats
from ...engine.tickets import View
from ...engine.transfer import Transfer
from ...errors import PlanError, Problem
from ...plan.wrappers import is_compiled
from .state_storages import (
    StateResidence,
    StateStorage,
    WatchedStates,
    of_optimizer,
    plain_tensors,
    state_tensors,
)

logger = logging.getLogger(__name__)

Closure = Callable[[], Any]
Bucket = list[list[torch.Tensor]]
"""Some parameters of each parameter group."""

_PARTS = 16
"""Number of buckets that fit the resident bytes. No states come before the first bucket has left."""
_LEAST_PARTS = 4
"""The same where buckets are small: one is stepped, one comes, one leaves, one is in reserve."""
_LARGE_PARTS = 24
"""States of a parameter are large that are more than one part in this many of all."""
_SMALL_BYTES = 2**26
"""Smaller buckets are worth no step of their own: a copy of this size takes as long as a few launches."""


def part_bytes(resident_bytes: int) -> int:
    """Return the bytes of states that are stepped at a time, unless one parameter has more."""
    return max(1, resident_bytes // _PARTS, min(_SMALL_BYTES, resident_bytes // _LEAST_PARTS))


class StreamedStep:
    """Replaces the optimizer's step over all parameters by its own step over one bucket of them at a time.

    Attributes:
        running: whether the optimizer's own code runs at present.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, residence: StateResidence) -> None:
        self._optimizer, self._residence = optimizer, residence
        self._parameters: list[list[torch.Tensor]] | None = None
        self._left_last = 0
        self.running = False

    @property
    def hidden(self) -> bool:
        """Whether the parameter groups have been emptied for the step call itself."""
        return self._parameters is not None

    def show(self) -> None:
        """Give the parameter groups their parameters back. Safe to call at any time."""
        parameters, self._parameters = self._parameters, None
        if parameters is not None:
            for group, own in zip(self._optimizer.param_groups, parameters, strict=True):
                group["params"] = own

    def order(self, states: WatchedStates) -> list[StateStorage]:
        """Return the storages in the order in which the step needs them."""
        return self._residence.storages_of_all(key for _, key in self._parameters_in_order() if key in states)

    def _parameters_in_order(self) -> list[tuple[int, torch.Tensor]]:
        """Return the parameters, with the index of their group, in the order of the step.

        It is the optimizer's, but those with the largest states (embeddings) are the first: the memory that
        they leave has room for others, and the last states leave in equal shares beside a forward.
        """
        groups = enumerate(self._optimizer.param_groups)
        found = [(index, parameter) for index, group in groups for parameter in group["params"]]
        return sorted(found, key=lambda item: not self._is_large(item[1]))

    def _is_large(self, parameter: torch.Tensor) -> bool:
        large_bytes = self._residence.total_bytes // _LARGE_PARTS
        return sum(item.size_bytes for item in self._residence.storages_of(parameter)) > large_bytes

    def run(self, states: WatchedStates, resident_bytes: int) -> None:
        """Step all parameters that have gradients, then empty the groups for the step call itself.

        If the optimizer raises an error, it has stepped earlier buckets. ``resident_bytes``: the most bytes
        of states on the device, unless one parameter has more.
        """
        buckets = list(self._buckets(part_bytes(resident_bytes)))
        remaining_bytes = sum(size_bytes for _, size_bytes in buckets)
        keys = (key for bucket, _ in buckets for key in _parameters_of(bucket))
        ahead = deque(self._residence.storages_of_all(keys))
        needed = set(ahead)  # the others came back for nothing: their parameters have no gradients
        self._residence.send(storage for storage in self._residence.all() if storage not in needed)
        self._parameters = [group["params"] for group in self._optimizer.param_groups]
        try:
            for bucket, size_bytes in buckets:
                stays = remaining_bytes <= resident_bytes
                self.run_bucket(bucket, ahead, states, resident_bytes, stays)
                remaining_bytes -= size_bytes
        except BaseException:
            self.show()
            raise
        for group in self._optimizer.param_groups:
            group["params"] = []

    def run_bucket(
        self,
        bucket: Bucket,
        ahead: deque[StateStorage],
        states: WatchedStates,
        resident_bytes: int,
        stays: bool = False,
    ) -> None:
        """Step a bucket of parameters, which have gradients; their states come before, and begin to leave
        afterwards.

        ``ahead`` are the storages that are needed next, in order; those whose copies have started are taken
        off. ``stays``: the states need not leave, unless this step has made them.
        """
        keys = list(_parameters_of(bucket))
        self._bring(self._residence.storages_of_all(keys), ahead, resident_bytes)
        if new_bytes := sum(self._state_bytes(key) for key in keys if key not in states):
            self._residence.release(resident_bytes - new_bytes)  # the first step makes them
        self.running = True
        try:
            step_part(self._optimizer, bucket)
        finally:
            self.running = False
        self._residence.refresh(keys, states)
        began = len(self._residence.leaving)
        if new_bytes or not stays:
            for storage in self._residence.storages_of_all(keys):
                storage.send()
        self._left_last = len(self._residence.leaving) - began
        self._residence.release(resident_bytes)

    def _bring(self, needed: list[StateStorage], ahead: deque[StateStorage], resident_bytes: int) -> None:
        for storage in needed:
            if storage.place == "host":
                self._residence.release(resident_bytes - storage.size_bytes)
                self._start_return(storage)
        try:
            # This bucket's step must not wait for the copies out of the bucket before.
            self._residence.start_returns(ahead, resident_bytes, spared=self._left_last)
        except torch.OutOfMemoryError:
            logger.debug("No room for the optimizer states that are next: they come when they are needed.")
        for storage in needed:
            storage.bring()

    def _start_return(self, storage: StateStorage) -> None:
        try:
            storage.fetch()
        except torch.OutOfMemoryError:  # what is free is in pieces that are too small
            self._residence.release(0)
            storage.fetch()

    def _buckets(self, bucket_bytes: int) -> Iterator[tuple[Bucket, int]]:
        """Yield parameters with gradients, in order, and their states' bytes: ``bucket_bytes`` or less."""
        count = len(self._optimizer.param_groups)
        bucket: Bucket = [[] for _ in range(count)]
        held_bytes = 0
        for index, parameter in self._parameters_in_order():
            if parameter.grad is None:
                continue
            size_bytes = self._state_bytes(parameter)
            if held_bytes and held_bytes + size_bytes > bucket_bytes:
                yield bucket, held_bytes
                bucket, held_bytes = [[] for _ in range(count)], 0
            bucket[index].append(parameter)
            held_bytes += size_bytes
        yield bucket, held_bytes

    def _state_bytes(self, parameter: torch.Tensor) -> int:
        """Return the bytes of a parameter's states; without any yet, twice the bytes of the parameter."""
        known = self._residence.storages_of(parameter)
        return sum(item.size_bytes for item in known) if known else 2 * parameter.nbytes


def _parameters_of(bucket: Bucket) -> Iterator[torch.Tensor]:
    for parameters in bucket:
        yield from parameters


def step_part(optimizer: torch.optim.Optimizer, bucket: Bucket) -> None:
    """Let the optimizer's own code step some parameters of each group; its hooks are not called."""
    step = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    try:
        for group, parameters in zip(groups, bucket, strict=True):
            group["params"] = parameters
        step(optimizer)
    finally:
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], around_it: Callable[[Closure], Closure]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) > 1 and args[1] is not None:
        return (args[0], around_it(args[1]), *args[2:]), kwargs
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": around_it(kwargs["closure"])}
    return args, kwargs


def call_first(closure: Closure) -> Closure:
    """Call ``closure``, as these optimizers do first; return a closure that returns the same loss."""
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


STREAMED: frozenset[type] = frozenset(
    {
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
    }
)
"""Optimizers that compute each parameter from its own gradient and states, and its group's settings alone."""


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside wrappers that hold it as ``optimizer`` (Accelerate's does)."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def after_steps(optimizer: Any, ended: Callable[[], None]) -> Undo:
    """Call ``ended`` after each step of an optimizer; return what ends this.

    An optimizer that is no ``torch.optim.Optimizer`` has no hooks: its ``step`` is wrapped.
    """
    inner = inner_optimizer(optimizer)
    if hasattr(inner, "register_step_post_hook"):
        remove: Undo = inner.register_step_post_hook(lambda *_: ended()).remove
        return remove

    def around(step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(step)
        def stepping(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            ended()
            return result

        return stepping

    return replace_method(inner, "step", around)


def state_bytes_beside_weights(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's states that are on the devices of their parameters."""
    first = next((weight for group in _groups(optimizer) for weight in group["params"]), None)
    return sum(
        value.nbytes
        for key, value in state_tensors(optimizer)
        for weight in (key if isinstance(key, torch.Tensor) else first,)
        if weight is None or value.device == weight.device
    )


def _groups(optimizer: Any) -> Sequence[dict[str, Any]]:
    return getattr(optimizer, "param_groups", ())  # which an optimizer that is not PyTorch's may not have


def is_streamed(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether stepping its parameters part by part gives bitwise the same as stepping all at once."""
    return type(optimizer) in STREAMED


def reject(optimizer: torch.optim.Optimizer, transfer: Transfer) -> None:
    """Raise a `PlanError` with each reason why the states of ``optimizer`` cannot be moved to the host."""
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    problems = []

    def problem(expected: str, found: str, hint: str) -> None:
        problems.append(Problem("optimizer (preference: memory_saving)", expected, found, hint))

    known = isinstance(optimizer, torch.optim.Optimizer)
    if not known or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        problem("a torch.optim.Optimizer, whose step calls hooks", kind, "Use preference: performance.")
        raise PlanError(problems)
    if kind.startswith("bitsandbytes."):
        hint = "Use a paged one of theirs (optim: paged_adamw_8bit), which does this itself."
        problem("states that PyTorch's own operators address", kind, hint)
    # Who has one has imported it. To import it takes 0.3 s: it compiles seven optimizers by TorchScript.
    sharded = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    if sharded is not None and isinstance(optimizer, sharded):
        problem("an optimizer with states of its own", kind, "Use FSDP2, whose states are sharded too.")
    groups = optimizer.param_groups
    flags = {
        "capturable": "a captured step reads fixed addresses",
        "differentiable": "a graph holds the states",
    }
    for flag, why in flags.items():
        if any(group.get(flag) for group in groups):
            problem(f"{flag}: false", f"{flag}: true", f"It cannot be served: {why}.")
    devices = {parameter.device for parameter in of_optimizer(optimizer)}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices)))
        problem("trained parameters on one device", found or "none that is trained", "")
    elif transfer.overlaps and next(iter(devices)).type == "cpu":
        problem("parameters on an accelerator", "on the cpu", "Their states are in host memory already.")
    if problems:
        raise PlanError(problems)


StateDict = dict[str, Any]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class StateCheckpoints:
    """Hooks on ``state_dict`` and ``load_state_dict`` of an optimizer.

    Args:
        min_tensor_bytes: loaded tensors of at least this size are set aside, and put in place afterwards.
        loaded: called after a load, without the tensors set aside, with functions that each put one of these
            in place and return its key in ``optimizer.state``.

    Attributes:
        saving: whether a save has begun and PyTorch's code has not yet accessed the states.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        residence: StateResidence,
        transfer: Transfer,
        min_tensor_bytes: int,
        loaded: Callable[[list[Callable[[], Hashable]]], None],
    ) -> None:
        self._optimizer, self._residence, self._transfer = optimizer, residence, transfer
        self._min_tensor_bytes, self._loaded = max(1, min_tensor_bytes), loaded
        self._aside: dict[Hashable, dict[Hashable, torch.Tensor]] = {}
        self._numbers: list[Hashable] = []
        self.saving = False

    def attach(self) -> list[Callable[[], None]]:
        optimizer = self._optimizer
        handles = [
            optimizer.register_state_dict_pre_hook(self._saving_starts),
            optimizer.register_state_dict_post_hook(self._saved, prepend=True),
            optimizer.register_load_state_dict_pre_hook(self._loading_starts),
            optimizer.register_load_state_dict_post_hook(self._loading_ended, prepend=True),
        ]
        return [handle.remove for handle in handles]

    def reset(self) -> None:
        """Forget a save or a load that has not come to its end."""
        self.saving = False
        self._aside.clear()
        self._numbers.clear()

    def _saving_starts(self, _: torch.optim.Optimizer) -> None:
        self._residence.release(0)
        self._transfer.synchronize()  # the host reads its copies now
        self.saving = True

    def _saved(self, _: torch.optim.Optimizer, saved: StateDict) -> StateDict:
        self.saving = False
        copied = _copier(self._residence, self._min_tensor_bytes)
        return {**saved, "state": _mapped(saved["state"], copied)}

    def _loading_starts(self, optimizer: torch.optim.Optimizer, saved: StateDict) -> StateDict:
        """Set large tensors aside; PyTorch's code gets empty ones instead, and decides their dtype."""
        self.reset()
        if not is_streamed(optimizer):
            return {**saved, "state": self._own(saved["state"])}
        state = {}
        self._numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for key, entries in saved["state"].items():
            aside = {
                name: value
                for name, value in (entries.items() if isinstance(entries, dict) else ())
                if type(value) in _PLAIN and value.nbytes >= self._min_tensor_bytes
            }
            self._aside[key] = aside
            stand_ins = {name: torch.empty(0, dtype=value.dtype) for name, value in aside.items()}
            state[key] = self._own({**entries, **stand_ins} if aside else entries)
        return {**saved, "state": state}

    def _own(self, value: Any) -> Any:
        """Return ``value`` with new tensor objects: PyTorch keeps fitting ones, and ours change storages."""

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if tensor.nbytes < self._min_tensor_bytes else tensor.detach()

        return _mapped(value, own)

    def _loading_ended(self, optimizer: torch.optim.Optimizer) -> None:
        aside, self._aside = self._aside, {}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        loads: list[Callable[[], Hashable]] = []
        for parameter, number in zip(parameters, self._numbers, strict=False):
            for name, value in aside.pop(number, {}).items():
                loads.append(partial(_load, optimizer, parameter, name, value))
        self._residence.forget_all()
        self._loaded(loads)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with each tensor in it changed, also in nested dictionaries, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return type(value)(_mapped(item, change) for item in value) if type(value) in (list, tuple) else value


def _load(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: Hashable, value: torch.Tensor
) -> Hashable:
    entries = optimizer.state[parameter]
    entries[name] = value.detach().to(device=parameter.device, dtype=entries[name].dtype, copy=True)
    return parameter


def _copier(residence: StateResidence, min_tensor_bytes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes the tensors of a state dictionary, in place of the optimizer's own.

    Each storage is copied once. Small tensors are copied as well, so that all values in a dictionary that is
    kept are of one step.
    """
    where: dict[int, tuple[StateStorage, View]] = {
        id(tensor): (storage, view)
        for storage in residence.all()
        for tensors in storage.tensors.values()
        for tensor, view in tensors
    }
    host_copy = cache(StateStorage.host_copy)

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        found = [where[id(local)] for local in plain_tensors(tensor) if id(local) in where]
        if not found:
            return tensor.clone() if tensor.nbytes < min_tensor_bytes else tensor
        ((storage, view),) = found
        if isinstance(tensor, DTensor):  # gathering it needs it on the device
            storage.bring(will_change=False)
        if storage.place == "device":
            return tensor.detach()  # keeps the present values: the next step works on another storage
        return view.on(host_copy(storage), 0)

    return copied


DEFAULT_SHARE = 10
"""By default, one part in this many of all states may be on the device."""


class OptimizerStates:
    """Keeps the states of an optimizer in host memory between its steps, and brings them for each step.

    Args:
        optimizer: the optimizer; it may be wrapped (Accelerate), and need not have states yet.
        transfer: copies bytes to and from the device of the parameters.
        pool: host memory; states for which it has no room stay on the device, are counted and logged.
        model: the model as the training loop calls it, in its wrappers.
        layers: its layers, in the order in which they run. Without them, states that are still being copied
            out are released when a forward begins, which then waits for the copies.
        resident_bytes: the most bytes of states on the device, in the step and near it; ``None``: a tenth.
        expected_bytes: bytes of all states, if that is known before there are any.
        min_tensor_bytes: smaller storages stay on the device.

    Attributes:
        in_backward: whether `step_bucket` steps parameters during backward, so that nothing is to come ahead.

    Raises:
        PlanError: the states of this optimizer cannot be moved; the error says why.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        transfer: Transfer,
        pool: HostPool,
        *,
        model: nn.Module,
        layers: Sequence[nn.Module] = (),
        resident_bytes: int | None = None,
        expected_bytes: int = 0,
        min_tensor_bytes: int = 2**20,
    ) -> None:
        self._expected_bytes = expected_bytes
        self._optimizer = inner_optimizer(optimizer)
        reject(self._optimizer, transfer)
        self._model, self._layers = model, _outside_compiled(model, layers)
        self.resident_bytes = resident_bytes
        self._pool, self._transfer, self._counters = pool, transfer, Counters()
        self._device = next(of_optimizer(self._optimizer)).device
        self._residence = StateResidence(transfer, pool, self._counters, self._device, min_tensor_bytes)
        self._step = StreamedStep(self._optimizer, self._residence)
        self._checkpoints = StateCheckpoints(
            self._optimizer, self._residence, transfer, min_tensor_bytes, self._loaded
        )
        self._undo: list[Undo] = []
        self._pre_hook: Any = None
        self._depth = 0
        self._in_closure = False
        self.in_backward = False
        self._ahead: deque[StateStorage] | None = None
        self._order: dict[torch.Tensor, None] = {}
        self._returns = StatePrefetch(
            self._residence, lambda: self._step.order(self._watch()), self._most_returning_bytes
        )
        self._departures = StateDepartures(self._residence, len(self._layers))

    @property
    def state_bytes(self) -> int:
        """Bytes of all states that move; 0 before there are any."""
        return self._residence.total_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that moving states take up now."""
        return self._residence.device_bytes

    @property
    def most_resident_bytes(self) -> int:
        """The most bytes of states on the device, as `resident_bytes` or its default amounts to now."""
        if self.resident_bytes is not None:
            return max(1, self.resident_bytes)
        # Before the first step, two states of each parameter's size are assumed.
        total = self.state_bytes or 2 * sum(item.nbytes for item in of_optimizer(self._optimizer))
        return max(1, total // DEFAULT_SHARE)

    def stats(self) -> SwapStats:
        """Return totals of the states' copies; ``forwards`` are steps of the optimizer."""
        return replace(self._counters.snapshot(self._pool), host_bytes=self._residence.total_bytes)

    def attach(self) -> None:
        """Put all hooks on optimizer and model; existing states begin to leave. Safe to call again.

        The host memory of states that are expected begins to be allocated, so that none waits for it later.
        """
        if self._undo:
            return
        if self._transfer.overlaps:
            self._pool.set_aside(max(self._expected_bytes - self.most_resident_bytes, 0))
        optimizer = self._optimizer
        self._watch()
        self._pre_hook = optimizer.register_step_pre_hook(self._step_starts)
        post_hook = optimizer.register_step_post_hook(self._step_ended)
        _ordered(optimizer._optimizer_step_post_hooks).move_to_end(post_hook.id, last=False)
        self._undo += [self._pre_hook.remove, post_hook.remove, *self._checkpoints.attach()]
        first = [
            name.rpartition(".")[0] for name, one in self._model.named_modules() if one in self._layers[:1]
        ]
        called = entries_to(self._model, first)
        self._undo += wrap_outermost_calls(called, self._forward_starts, _nothing)
        for index, layer in enumerate(self._layers):
            self._undo += wrap_call(layer, partial(self._layer_starts, index), _nothing)
        for parameter in of_optimizer(optimizer):
            handle = parameter.register_post_accumulate_grad_hook(self._returns.gradient_ready)
            self._undo.append(handle.remove)
        aside = [key for key in optimizer.state if any(True for _ in self._set_aside(key))]
        self._loaded([partial(self._to_device, key) for key in aside])

    def remove(self) -> None:
        """Bring every state to the device, and take all hooks off. Safe to call again.

        Where the device has no room for them, as after a training that only fits without, they are on the CPU
        afterwards. They can be saved, and `attach` takes them; the optimizer alone cannot step.
        """
        if not self._undo:
            return
        self._step.show()
        if set_aside_bytes := self._residence.bring_all():
            logger.warning(
                "The device has no room for the optimizer's states (%s): they are on the CPU now. They can "
                "be saved, and used by another training with states on the host.",
                gib_text(set_aside_bytes),
            )
        undo, self._undo = self._undo, []
        for step in undo:
            step()
        self._pool.set_aside(0)
        self._residence.forget_all()
        self._optimizer.state = self._watch().plain()

    def step_bucket(self, bucket: Bucket) -> None:
        """Step some parameters now, between the optimizer's steps (`OptimizerInBackward`).

        Their states come before it and leave after it; meanwhile the states come that followed in the last
        backward.
        """
        states = self._watch()
        if self._ahead is None:
            self._ahead = deque(self._residence.storages_of_all(self._order))
            self._order = {}
        self._order.update(dict.fromkeys(key for parameters in bucket for key in parameters))
        self._step.run_bucket(bucket, self._ahead, states, self.most_resident_bytes)

    def take_stock(self) -> None:
        """Update the storages from the optimizer's present states (`StateResidence.refresh`)."""
        states = self._watch()
        keys = [key for key, _ in states.unwatched_items()]
        gone = [key for key in self._residence.known() if key not in states]
        self._residence.refresh((*gone, *keys), states)

    def _set_aside(self, key: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield states that an earlier `remove` has set aside; single elements on the CPU count steps."""
        for tensor in plain_tensors(self._watch().unwatched(key)):
            if tensor.device != self._device and tensor.numel() > 1:
                yield tensor

    def _to_device(self, key: torch.Tensor) -> torch.Tensor:
        for tensor in self._set_aside(key):
            tensor.data = tensor.to(self._device)
        return key

    def send_all(self) -> None:
        self._residence.send(self._residence.all())

    def _loaded(self, loads: list[Callable[[], Hashable]]) -> None:
        """Put loaded states in place one by one, after ``load_state_dict`` (see `StateCheckpoints`)."""
        states = self._watch()
        for load in loads:
            key = load()
            self._residence.refresh([key], states)
            for storage in self._residence.storages_of(key):
                storage.send()
            self._residence.release(self.most_resident_bytes)
        self.take_stock()
        self.send_all()

    def _watch(self) -> WatchedStates:
        """Return the watched ``optimizer.state``; if it has been replaced, watch the new one."""
        if not isinstance(self._optimizer.state, WatchedStates):
            self._states = WatchedStates(self._optimizer.state, self._looked)
            self._optimizer.state = self._states
        return self._states

    def _looked(self, key: Hashable | None) -> None:
        """Bring a parameter's states to the device before they are accessed; ``None``: all states."""
        if self._step.running:
            return
        if key is None and self._checkpoints.saving:
            self._checkpoints.saving = False
            return
        for storage in self._residence.all() if key is None else self._residence.storages_of(key):
            storage.bring()

    def _step_starts(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._step.show()
        self._checkpoints.reset()
        if self._depth:  # an optimizer that calls the step of its base class
            self._depth += 1
            return None
        # Other hooks that run after ours must find all parameters.
        last = next(reversed(optimizer._optimizer_step_pre_hooks)) == self._pre_hook.id
        streams = last and is_streamed(optimizer)
        new = with_closure(args, kwargs, call_first if streams else self._inside)
        self._returns.step_starts()
        states = self._watch()
        if self._transfer.overlaps:
            self._returns.stream = torch.accelerator.current_stream(self._device)
        if streams:
            self._step.run(states, self.most_resident_bytes)
        else:
            for storage in self._residence.all():
                storage.fetch()
            for storage in self._residence.all():
                storage.bring()
        self._depth = 1
        return new

    def _inside(self, closure: Closure) -> Closure:
        """Return ``closure`` wrapped so that its forwards count as part of the step."""

        def inside() -> Any:
            self._in_closure = True
            try:
                return closure()
            finally:
                self._in_closure = False

        return inside

    def _step_ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        self._counters.forwards += 1
        self._ahead = None
        if self._step.hidden:
            self._step.show()
        else:
            self.take_stock()
            self.send_all()

    def _forward_starts(self, *_: object) -> None:
        if self._in_closure:
            return
        self._depth = 0  # a step that an exception ended may have left more
        self._step.show()
        self._checkpoints.reset()
        hooks = _ordered(self._optimizer._optimizer_step_pre_hooks)
        if next(reversed(hooks)) != self._pre_hook.id:
            hooks.move_to_end(self._pre_hook.id)
        self._returns.forward_starts()
        self._departures.forward_starts()

    def _most_returning_bytes(self) -> int:
        if self._depth or self.in_backward:  # of a closure, or in which states come for each parameter
            return 0
        return self.most_resident_bytes if is_streamed(self._optimizer) else self.state_bytes

    def _layer_starts(self, index: int, *_: object) -> None:
        if not self._depth:
            self._departures.layer_starts(index)


def _ordered(hooks: dict[int, Any]) -> OrderedDict[int, Any]:
    assert isinstance(hooks, OrderedDict)
    return hooks


def _nothing(*_: object) -> None:
    pass


def _outside_compiled(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers that are not inside a compiled module: a hook there would be compiled too."""
    compiled = [module for module in model.modules() if is_compiled(module)]
    inside = {id(inner) for module in compiled for inner in module.modules() if inner is not module}
    return [layer for layer in layers if id(layer) not in inside]


class StateDepartures:
    """Copies out the states that are on the device when a forward starts, an equal share before each layer.

    A layer starts when the shares of the layers before it have left, the last one when all have. ``layers``:
    their number; with none all states leave before the forward.
    """

    def __init__(self, residence: StateResidence, layers: int) -> None:
        self._residence, self._layers = residence, layers
        self._bytes = self._waiting_bytes = 0
        self._waiting: deque[StateStorage] = deque()

    def forward_starts(self) -> None:
        storages = self._residence.all() if self._residence.device_bytes else []
        for storage in storages:
            storage.turn_back()
        self._waiting = deque(storage for storage in storages if storage.place == "device")
        self._bytes = self._residence.device_bytes
        self._waiting_bytes = sum(storage.size_bytes for storage in self._waiting)
        if not self._layers:
            self._leave(0)
            self._residence.release(0)

    def layer_starts(self, index: int) -> None:
        if not self._bytes:
            return
        last, shares = index == self._layers - 1, max(1, self._layers - 1)
        self._leave(max(0, self._bytes * (shares - index - 2) // shares))
        self._residence.release(0 if last else self._bytes * (shares - index) // shares)
        if last:
            self._bytes = 0  # a layer that runs again in backward must not send what has come back

    def _leave(self, down_to_bytes: int) -> None:
        while self._waiting and self._waiting_bytes > down_to_bytes:
            storage = self._waiting.popleft()
            self._waiting_bytes -= storage.size_bytes
            storage.send()


class StatePrefetch:
    """Starts copies of states back to the device during the last backward before a step.

    It counts gradients: the share of the copies that has started is that of the backward's gradients that are
    complete. So states on the device grow as activations fall. The number of gradients before the last step
    tells which backward will be the last; before the first step nothing is started. With fewer micro-batches
    than last time the rest comes back in the step; with more the next forward sends it away.

    Args:
        order: returns the states' storages in the order in which the step needs them.
        most_bytes: returns the most bytes of states that may be on the device.

    Attributes:
        stream: compute's stream in the step, to which blocks must belong; FSDP2's gradients come on another.
    """

    def __init__(
        self,
        residence: StateResidence,
        order: Callable[[], list[StateStorage]],
        most_bytes: Callable[[], int],
    ) -> None:
        self._residence, self._order, self._most_bytes = residence, order, most_bytes
        self._calls = self._calls_before = self._per_backward = 0
        self._called: set[int] = set()
        self._waiting: deque[StateStorage] | None = None
        self.stream: torch.Stream | None = None

    def gradient_ready(self, parameter: torch.Tensor) -> None:
        """Count a gradient that has been accumulated, and start the copies due; a hook of each parameter."""
        self._calls += 1
        self._called.add(id(parameter))
        if not self._per_backward:
            return
        done = self._calls - (self._calls_before - self._per_backward)
        if done > 0:
            self._start(int(self._most_bytes() * min(1.0, done / self._per_backward)))

    def step_starts(self) -> None:
        self._calls_before, self._per_backward = self._calls, len(self._called)
        self._calls = 0
        self._called.clear()
        self._waiting = None

    def forward_starts(self) -> None:
        self._waiting = None

    def _start(self, wanted_bytes: int) -> None:
        if self._waiting is None:
            self._waiting = deque(self._order())
        try:
            with nullcontext() if self.stream is None else self.stream:
                all_of_them = len(self._residence.leaving)
                self._residence.start_returns(self._waiting, wanted_bytes, spared=all_of_them)
        except torch.OutOfMemoryError:
            logger.debug("No room for optimizer states in backward: the rest comes back in the step.")
            self._waiting.clear()
