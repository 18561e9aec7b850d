"""Records one forward of a model, on fake tensors or in training, as the types of `record`.

On fake tensors (`dry_run`) saved tensors are not kept. In training backward needs them: the caller says how
they are held (`ForwardRecorder.saving`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from .actions import OUTPUT, OpCall, Scope
from .dry_run import READS_NUMBERS, exchanged, no_backward, of_numbers
from .opnames import OpStack, function_name
from .record import (
    LAYER_INPUT,
    Call,
    LayerRecord,
    OpKey,
    SavedStorage,
    StaleRead,
    Use,
    UseKind,
    is_cast_of_parameter,
    storage_key,
)
from .wrappers import called_modules, is_compiled, named_op_modules, uncompiled

OUTSIDE: OpCall = (None, "", None)
"""The `OpCall` for what runs outside all scopes."""

_next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the next autograd node of this thread (private to PyTorch; the same on 2.11 to 2.13)."""

Hook = Callable[..., None]
Undo = Callable[[], None]
HookWrapper = Callable[[nn.Module, Hook, Hook], list[Undo]]
"""Registers two hooks on a module, for before and after its calls; returns functions that remove them."""


@dataclass(slots=True, eq=False)
class TrackedStorage:
    """A storage that a recorded forward uses.

    Args:
        ref: weak reference that keeps the storage's address from being reused; ``None`` after
            `ForwardRecorder.forget`.
        size_bytes: size of the whole storage.
        on_device: whether it is on the device whose tensors can move.
        producer: the call that owns it; ``None``: it is unowned, and never moves.
        stays_unowned: whether no call can own it later.
    """

    ref: StorageWeakRef | None
    size_bytes: int
    on_device: bool
    producer: OpCall | None
    stays_unowned: bool = False
    uses: list[Use] = field(default_factory=list)


Tracked = list[tuple[torch.Tensor, TrackedStorage | None]]
"""Tensors with their storages; ``None``: the storage is not tracked, or the tensor has none."""


class ForwardRecorder(TorchFunctionMode):
    """Follows scopes, module paths and functions as the engine does, and records every use and call.

    All ops are named in all layers, because it is not known which of them a plan will need.

    Args:
        scopes: module path of each scope.
        attention: for the scope of each layer, the paths inside the layer of its attention modules. No calls
            are recorded in scopes that are missing here (embedding, final norm, head).
        device: the device whose tensors can move; ``None``: none can, and only calls are recorded.
        enters: called whenever execution enters or leaves a module or function, with the `OpCall` that runs
            from then on.
        compiles: whether compiled modules run compiled: each is one op then, and nothing inside is recorded.
        parts: returns the plain tensors that a weight consists of; ``None``: the caller has marked all
            weights as unowned.
        is_tiled: whether a module runs over tiles of the tokens, when hooks are put on it. What its tiles use
            is not recorded, as nothing of it is saved, and `enters` is not called in it.

    Attributes:
        layers: the record of each layer, by scope.
        order: number of the last recorded use.
    """

    def __init__(
        self,
        scopes: Mapping[Scope, str],
        attention: Mapping[Scope, frozenset[str]],
        device: torch.device | None,
        enters: Callable[[OpCall], None] | None = None,
        compiles: bool = False,
        parts: Callable[[torch.Tensor | None], Iterable[torch.Tensor]] | None = None,
        is_tiled: Callable[[nn.Module], bool] = lambda _: False,
    ) -> None:
        super().__init__()
        self.layers = {scope: LayerRecord() for scope in attention}
        self.order = 0
        self._scopes, self._attention, self._device = scopes, attention, device
        self._enters, self._compiles, self._parts, self._is_tiled = enters, compiles, parts, is_tiled
        self._storages: list[TrackedStorage] = []
        self._by_key: dict[int, TrackedStorage] = {}
        self._scope: OpCall = OUTSIDE
        self._layer: _LayerCall | None = None
        self._running: OpCall | None = None
        self._autocast = self._paused = False
        self._tiled_around = 0

    def used(self) -> tuple[SavedStorage, ...]:
        """Return the storages that were used, in the order of their first use."""
        return tuple(SavedStorage(item.size_bytes, tuple(item.uses)) for item in self._storages if item.uses)

    def forget(self) -> None:
        """Let go of the storages; what has been recorded stays."""
        self._by_key.clear()
        for tracked in self._storages:
            tracked.ref = None

    def run_on_fakes(
        self,
        model: nn.Module,
        root: nn.Module,
        state: dict[str, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Call ``model`` (``root``, in which the scopes' paths start, or a module in it) and record it.

        Call inside `dry_run.dry_call`, with fake weights and arguments.
        """
        self.own(state.values(), None)
        self.own(tree_leaves((args, kwargs)), None)
        with self.installed(root), self, exchanged(model, state):
            model(*args, **kwargs)

    @property
    def where(self) -> str:
        """Path of the module or function that runs, or in which the call has failed."""
        scope, path, _ = self._here()
        return ".".join(filter(None, (self._scopes.get(scope, "") if scope is not None else "", path)))

    @contextmanager
    def installed(self, root: nn.Module, wrap: HookWrapper | None = None) -> Iterator[None]:
        """Follow the scopes below ``root``, and the module path inside each layer, by hooks."""
        wrap = wrap or _plain_hooks
        with ExitStack() as undo:
            for scope, path in self._scopes.items():
                for step in self._follow(root.get_submodule(path), scope, wrap):
                    undo.callback(step)
            yield

    def _follow(self, module: nn.Module, scope: Scope, wrap: HookWrapper) -> Iterator[Undo]:
        is_layer = scope in self._attention
        opaque = self._compiles and is_layer and is_compiled(module)
        inner = uncompiled(module) if is_layer else module
        yield from wrap(module if self._compiles else inner, *self._scope_hooks(scope, opaque))
        if opaque or not is_layer:
            return
        for path, child in called_modules(inner) if self._compiles else named_op_modules(inner):
            if path:
                compiled, tiled = self._compiles and is_compiled(child), self._is_tiled(child)
                yield from wrap(child, *self._path_hooks((scope, path, None), compiled, tiled))

    @contextmanager
    def compiled_whole(self, args: Any) -> Iterator[None]:
        """Record what is saved inside as layer 0's: all layers are one compiled region, as for the engine."""
        self.own(tree_leaves(args), None)
        self._scope = (0, "", None)
        self._arrived()
        try:
            yield
        finally:
            self._scope = OUTSIDE
            self._arrived()

    def saving(
        self,
        hold: Callable[[torch.Tensor], Any] | None = None,
        restore: Callable[[Any], torch.Tensor] = no_backward,
    ) -> AbstractContextManager[Any]:
        """Return hooks that record what autograd saves.

        ``hold`` (pack hook) returns what autograd keeps in a saved tensor's place; ``None``: nothing is kept.
        """
        return torch.autograd.graph.saved_tensors_hooks(partial(self._pack, hold), restore)

    def record_opaque_module(self, path: str, received: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        """Record that a module has run as one op; call this before its outputs are used."""
        if self._layer is not None:
            with torch._C.DisableTorchFunction():
                self._layer.calls((path, 0), [self._find(received)])
                made = [self._own(output, (self._scope[0], path, 0)) for output in outputs]
            self._layer.produced(made, (path, 0))

    def own(self, values: Iterable[Any], producer: OpCall | None) -> None:
        """Set the call that owns the storages of these tensors, except storages that stay unowned.

        With ``None``, storages that are not tracked yet will stay unowned; all others keep their owners.
        """
        for value in values:
            if isinstance(value, torch.Tensor):
                self._own(value, producer)

    def own_weights(self, modules: Iterable[nn.Module]) -> None:
        """Mark weights and buffers as unowned, in their present storages: FSDP2 may have gathered them."""
        if self._parts is not None:
            for module in modules:
                for held in (*module._parameters.values(), *module._buffers.values()):
                    self.own(self._parts(held), None)

    def _own(self, tensor: torch.Tensor, producer: OpCall | None) -> TrackedStorage | None:
        key = storage_key(tensor)
        if key is None:
            return None
        tracked = self._by_key.get(key)
        if tracked is None:
            storage, here = tensor.untyped_storage(), tensor.device == self._device
            tracked = TrackedStorage(
                StorageWeakRef(storage), storage.nbytes(), here, producer, producer is None
            )
            self._by_key[key] = tracked
            self._storages.append(tracked)
        elif producer is not None and not tracked.stays_unowned:
            tracked.producer = producer
        return tracked

    def _find(self, value: object) -> TrackedStorage | None:
        key = storage_key(value) if isinstance(value, torch.Tensor) else None
        return None if key is None else self._by_key.get(key)

    def _found(self, values: Any) -> Tracked:
        return [(leaf, self._find(leaf)) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]

    def _tracked(self, tensor: torch.Tensor) -> TrackedStorage | None:
        """Return the storage of a tensor; if it is not tracked yet, what runs now becomes its owner."""
        if (tracked := self._find(tensor)) is not None:
            return tracked
        if self._autocast and is_cast_of_parameter(tensor):
            return self._own(tensor, OUTSIDE)
        return self._own(tensor, self._here() if self._running is None else self._running)

    def _here(self) -> OpCall:
        """Return the owner of tensors that no visible function produced."""
        return self._scope if self._layer is None else (self._scope[0], *self._layer.stack.unseen())

    def _arrived(self, call: OpCall | None = None) -> None:
        if self._enters is not None and not self._tiled_around:
            self._enters(call or self._here())

    def _use(self, kind: UseKind, at: OpCall, tensors: Tracked) -> None:
        if self._tiled_around and kind != "saved":
            return
        for tensor, tracked in tensors:
            if tracked is None or not tracked.on_device:
                continue
            producer = tracked.producer
            if producer is None or producer[0] is None or not _is_plain(tensor):
                continue
            self.order += 1
            bounds, size_bytes = _reach_bytes(tensor), tensor.numel() * tensor.element_size()
            tracked.uses.append(Use(kind, at, producer, *bounds, size_bytes, tensor._version, self.order))

    def _use_of_module(self, kind: UseKind, at: OpCall, values: Any) -> None:
        if self._device is not None:
            self._use(kind, at, self._found(values))

    def _pack(self, hold: Callable[[torch.Tensor], Any] | None, tensor: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            self._use("saved", self._scope, [(tensor, self._tracked(tensor))])
            return None if hold is None else hold(tensor)

    def _scope_hooks(self, scope: Scope, opaque: bool) -> tuple[Hook, Hook]:
        call: OpCall = (scope, "", None)
        attention = self._attention.get(scope)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.own_weights(module.modules())
            if attention is not None:
                hidden = args[0] if args else kwargs.get("hidden_states")
                if isinstance(scope, int) and self._find(hidden) is None:
                    self.own([hidden], ("embedding", OUTPUT, None))
                self.own(tree_leaves((args, kwargs)), None)
                received = [tracked for _, tracked in self._found(hidden)]
                self._layer = None if opaque else _LayerCall(self.layers[scope], attention, received)
            self._autocast = self._device is not None and torch.is_autocast_enabled(self._device.type)
            self._scope = call
            self._arrived()
            self._use_of_module("module", call, (args, kwargs))
            if opaque:
                self._pause()

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if opaque:
                self._resume()
            hidden = output[0] if isinstance(output, tuple) and output else output
            if self._layer is not None:
                self._layer.ends(self._find(hidden))
            self._scope, self._layer = OUTSIDE, None
            if attention is not None or self._find(hidden) is None:
                self.own([hidden], (scope, OUTPUT, None))
            self._arrived()

        return _unrecorded(before), _unrecorded(after)

    def _path_hooks(self, call: OpCall, opaque: bool, tiled: bool) -> tuple[Hook, Hook]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._layer is not None:
                self.own_weights([module])
                self._layer.stack.enter(call[1])
                self._arrived()
                self._use_of_module("module", call, (args, kwargs))
                if opaque:
                    self._pause()
                self._tiled_around += tiled

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if self._layer is not None:
                if opaque:
                    self._resume()
                self._tiled_around -= tiled
                self._use_of_module("returned", call, output)
                self._layer.stack.leave(call[1])
                self._arrived()

        return _unrecorded(before), _unrecorded(after)

    def _pause(self) -> None:
        """Leave this mode: the compiler would trace it into its graph."""
        stack = _get_current_function_mode_stack()
        if stack and stack[-1] is self:
            self.__exit__(None, None, None)
            self._paused = True

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self.__enter__()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in READS_NUMBERS:
            return of_numbers(func, args, kwargs)
        name, layer = function_name(func), self._layer
        if name is None or layer is None:
            return func(*args, **kwargs)
        op = layer.stack.begin(name)
        call = (self._scope[0], *op)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        inputs = [(tensor, self._tracked(tensor)) for tensor in tensors]
        self._arrived(call)
        used = self._device is not None and torch.is_grad_enabled()
        if used:
            self._use("function", call, inputs)
        versions = layer.versions(inputs)
        self._running = call
        try:
            result = func(*args, **kwargs)
        finally:
            self._running = None
        known = {tracked for _, tracked in inputs}
        fresh = [leaf for leaf, tracked in self._found(result) if tracked is None or tracked not in known]
        outputs = [(leaf, self._own(leaf, call)) for leaf in fresh]
        if used:
            self._use("returned", call, outputs)
        layer.ran(op, versions, outputs)
        self._arrived()
        return result


class _LayerCall:
    """One call of a layer: which op produced which storage in it, and which functions have read it."""

    def __init__(
        self, record: LayerRecord, attention: frozenset[str], received: list[TrackedStorage | None]
    ) -> None:
        self.stack = OpStack(attention)
        self._record = record
        self._producers: dict[TrackedStorage, OpKey] = {}
        self._reads: dict[TrackedStorage, list[StaleRead]] = {}
        self._written: set[TrackedStorage] = set()
        self.produced(received, LAYER_INPUT)
        self._first_node = _next_node_number()

    def produced(self, storages: Iterable[TrackedStorage | None], op: OpKey) -> None:
        """Note that an op has made these storages; those that have a producer keep it."""
        for tracked in storages:
            if tracked is not None:
                self._producers.setdefault(tracked, op)

    def versions(self, inputs: Tracked) -> list[tuple[TrackedStorage, torch.Tensor, int]]:
        """Return the inputs that ops of this call have produced, with their versions now."""
        return [
            (tracked, tensor, tensor._version)
            for tensor, tracked in inputs
            if tracked is not None and tracked in self._producers
        ]

    def ran(
        self, op: OpKey, versions: list[tuple[TrackedStorage, torch.Tensor, int]], outputs: Tracked
    ) -> None:
        """Record that a function has run.

        Args:
            op: its op path and ordinal.
            versions: its inputs with their versions before it ran.
            outputs: its results with storages of their own; none: it returned views, or wrote in place.
        """
        written: dict[TrackedStorage, bool] = {}
        for tracked, tensor, version in versions:
            written[tracked] = written.get(tracked, False) or tensor._version != version
        for tracked, writes in written.items():
            if not (outputs or writes):
                continue
            reads = self._reads.setdefault(tracked, [])
            reader = op[0], op[1] if outputs else None
            reads.append(StaleRead(reader, self._producers[tracked], tracked in self._written))
            if writes:
                self._record.stale += reads
                self._written.add(tracked)
                reads.clear()
        if outputs:
            self.stack.count(op[0])
            self.calls(op, written)
            self.produced((tracked for _, tracked in outputs), op)

    def calls(self, op: OpKey, inputs: Iterable[TrackedStorage | None]) -> None:
        """Record a call, with the producers of its inputs."""
        producers = (self._producers[item] for item in inputs if item is not None and item in self._producers)
        self._record.calls.append(Call(op, tuple(dict.fromkeys(producers))))

    def ends(self, output: TrackedStorage | None) -> None:
        self._record.nodes = _next_node_number() - self._first_node
        if output is not None and output in self._producers:
            self._record.output = self._producers[output]


def _unrecorded(hook: Hook) -> Hook:
    """Return ``hook`` without function modes: what it calls on tensors is no function of the model."""

    def run(*args: Any) -> None:
        with torch._C.DisableTorchFunction():
            hook(*args)

    return run


def _plain_hooks(module: nn.Module, before: Hook, after: Hook) -> list[Undo]:
    first = module.register_forward_pre_hook(before, with_kwargs=True)
    return [first.remove, module.register_forward_hook(after).remove]


def _reach_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where in its storage a tensor begins, and where the last of its elements ends."""
    first, size = int(tensor.storage_offset()), tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((length - 1) * step for length, step in steps) + 1 if tensor.numel() else 0
    return first * size, (first + reach) * size


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the engine can move a tensor: elements in memory as they are."""
    return tensor.layout == torch.strided and not (
        tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    )
