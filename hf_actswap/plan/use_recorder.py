"""Who produces and who uses the storages of one forward, written down while it runs.

The same for a forward on fake tensors (`engine/foreseen.py`), of which nothing is kept, and for a real one
that trains, whose saved tensors must come back: how they are held is the caller's affair.

Ownership is the engine's (`saved_bytes` says what follows from it): a storage belongs to the op that produced
it, views looked through; weights, buffers and what the model or a layer was called with are nobody's; a layer
owns what it hands on. All ops are named in all layers, whatever a plan might want to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves

from .actions import Scope
from .compiled import called_modules, is_compiled, named_op_modules, uncompiled
from .opnames import OpStack, function_name
from .outline import OUTPUT, LayerOutline, Outline
from .record import is_cast_of_parameter, storage_key
from .saved_bytes import OpCall, SavedBytes, SavedStorage, Use, UseKind

OUTSIDE: OpCall = (None, "", None)
"""Where no scope runs."""

Undo = Callable[[], None]
Around = Callable[[nn.Module, Callable[..., None], Callable[..., None]], list[Undo]]
"""Calls the first function ahead of each call of a module, the second behind it; returns what undoes it."""


class UseRecorder(TorchFunctionMode):
    """Follows scopes, module paths and functions as the engine does, and writes down every use.

    Args:
        outline: of the model.
        device: whose tensors can move.
        hold: makes what autograd keeps in a saved tensor's place; ``None``: nothing is kept.
        restore: gives the tensor back.
        enters: is told each time where execution has got to: in the call of a function, or, behind it, in a
            module.
        compiles: whether compiled modules run compiled: each is one op then, and nothing is followed in it.
        parts: gives the plain tensors that a weight consists of; ``None``: all weights are owned beforehand.
    """

    def __init__(
        self,
        outline: Outline,
        device: torch.device,
        hold: Callable[[torch.Tensor], Any] | None = None,
        restore: Callable[[Any], torch.Tensor] | None = None,
        enters: Callable[[OpCall], None] | None = None,
        compiles: bool = False,
        parts: Callable[[torch.Tensor | None], Iterable[torch.Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.order = 0
        """Number of the use written down last."""
        self._storages = MetStorages()
        self.own = self._storages.own
        self._outline, self._device, self._compiles, self._parts = outline, device, compiles, parts
        self._hold, self._restore, self._enters = hold, restore or _refuse, enters
        self._scope: OpCall = OUTSIDE
        self._stack: OpStack | None = None
        self._running: OpCall | None = None
        self._autocast = self._writing = self._paused = False

    def saved(self) -> SavedBytes:
        """Return what has been written down."""
        return SavedBytes(self._storages.used(), self._outline.modules)

    def forget(self) -> None:
        """Let go of the storages; what has been written down stays."""
        self._storages.forget()

    @contextmanager
    def installed(self, model: nn.Module, around: Around | None = None) -> Iterator[None]:
        """Follow the scopes, and the module path inside each layer.

        Args:
            model: inside its wrappers, as the outline names it.
            around: how to get around a module's call; ``None``: by plain hooks.
        """
        around = around or _by_hooks
        undo: list[Undo] = []
        scopes: dict[Scope, str | None] = {
            "embedding": self._outline.embedding,
            "final_norm": self._outline.final_norm,
            "head": self._outline.head,
        }
        try:
            for scope, path in scopes.items():
                if path is not None:
                    hooks = self._scope_hooks((scope, "", None), None)
                    undo += around(model.get_submodule(path), *hooks)
            for layer in self._outline.all_layers:
                undo += self._follow_layer(model.get_submodule(layer.module_path), layer, around)
            yield
        finally:
            for step in reversed(undo):
                step()

    def _follow_layer(self, module: nn.Module, layer: LayerOutline, around: Around) -> Iterator[Undo]:
        opaque = self._compiles and is_compiled(module)
        inner = uncompiled(module)
        yield from around(
            module if self._compiles else inner, *self._scope_hooks((layer.index, "", None), layer, opaque)
        )
        if opaque:
            return
        for path, child in called_modules(inner) if self._compiles else named_op_modules(inner):
            if path:
                hooks = self._path_hooks((layer.index, path, None), self._compiles and is_compiled(child))
                yield from around(child, *hooks)

    @contextmanager
    def compiled_whole(self, args: Any) -> Iterator[None]:
        """All layers are one compiled region: what is saved in here is layer 0's, as for the engine.

        Args:
            args: what the region is called with.
        """
        self.own(tree_leaves(args), None)
        self._scope = (0, "", None)
        self._arrived()
        try:
            yield
        finally:
            self._scope = OUTSIDE
            self._arrived()

    def saving(self) -> AbstractContextManager[Any]:
        """Hooks that see what is saved."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._restore)

    def _scope_hooks(
        self, scope: OpCall, layer: LayerOutline | None, opaque: bool = False
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.own_weights(module.modules())
            if layer is not None:
                hidden = args[0] if args else kwargs.get("hidden_states")
                if isinstance(layer.index, int) and self._storages.find(hidden) is None:
                    self.own([hidden], ("embedding", OUTPUT, None))
                self.own(tree_leaves((args, kwargs)), None)
                self._stack = None if opaque else OpStack(layer.attention_paths)
            self._autocast = torch.is_autocast_enabled(self._device.type)
            self._scope = scope
            self._arrived()
            self._use("module", scope, (args, kwargs))
            if opaque:
                self._pause()

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if opaque:
                self._resume()
            self._scope, self._stack = OUTSIDE, None
            hidden = output[0] if isinstance(output, tuple) and output else output
            if layer is not None or self._storages.find(hidden) is None:
                self.own([hidden], (scope[0], OUTPUT, None))
            self._arrived()

        return self._unseen(before), self._unseen(after)

    def _path_hooks(
        self, call: OpCall, opaque: bool = False
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._stack is not None:
                self.own_weights([module])
                self._stack.enter(call[1])
                self._arrived()
                self._use("module", call, (args, kwargs))
                if opaque:
                    self._pause()

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if self._stack is not None:
                if opaque:
                    self._resume()
                self._use("returned", call, output)
                self._stack.leave(call[1])
                self._arrived()

        return self._unseen(before), self._unseen(after)

    def _unseen(self, hook: Callable[..., None]) -> Callable[..., None]:
        """What a hook asks of tensors is no function of the model."""

        def run(*args: Any) -> None:
            self._writing = True
            try:
                hook(*args)
            finally:
                self._writing = False

        return run

    def own_weights(self, modules: Iterable[nn.Module]) -> None:
        """Weights and buffers are nobody's, wherever they lie now: FSDP2 gathers them in hooks of its own."""
        if self._parts is not None:
            for module in modules:
                for held in (*module._parameters.values(), *module._buffers.values()):
                    self.own(self._parts(held), None)

    def _pause(self) -> None:
        """The compiler would trace this mode into its graph."""
        stack = _get_current_function_mode_stack()
        if stack and stack[-1] is self:
            self.__exit__(None, None, None)
            self._paused = True

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self.__enter__()

    def _arrived(self, call: OpCall | None = None) -> None:
        if self._enters is not None:
            self._enters(call or self._here())

    def _here(self) -> OpCall:
        """Whose is what has no name here."""
        return self._scope if self._stack is None else (self._scope[0], *self._stack.unseen())

    def _meet(self, tensor: torch.Tensor) -> None:
        """A storage without an owner gets the one that the place suggests."""
        if self._storages.find(tensor) is None:
            self.own([tensor], self._of_unmet(tensor))

    def _of_unmet(self, tensor: torch.Tensor) -> OpCall:
        if self._autocast and is_cast_of_parameter(tensor):
            return OUTSIDE
        if self._running is not None:
            return self._running
        return self._here()

    def _use(self, kind: UseKind, at: OpCall, values: Any) -> None:
        for tensor in tree_leaves(values):
            met = self._storages.find(tensor)
            if (
                met is None
                or met.producer is None
                or met.producer[0] is None
                or not is_plain(tensor, self._device)
            ):
                continue
            self.order += 1
            bounds, size_bytes = reach_bytes(tensor), tensor.numel() * tensor.element_size()
            met.uses.append(Use(kind, at, met.producer, *bounds, size_bytes, tensor._version, self.order))

    def _pack(self, tensor: torch.Tensor) -> Any:
        self._writing = True
        try:
            self._meet(tensor)
            self._use("saved", self._scope, tensor)
            return None if self._hold is None else self._hold(tensor)
        finally:
            self._writing = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name is None or self._stack is None or self._writing:
            return func(*args, **kwargs)
        stack = self._stack
        call = (self._scope[0], *stack.begin(name))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in inputs:
            self._meet(tensor)
        self._arrived(call)
        if torch.is_grad_enabled():
            self._use("function", call, inputs)
        known = {storage_key(tensor) for tensor in inputs}
        self._running = call
        try:
            result = func(*args, **kwargs)
        finally:
            self._running = None
        fresh = [
            leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in known
        ]
        if fresh:
            self.own(fresh, call)
            if torch.is_grad_enabled():
                self._use("returned", call, fresh)
            stack.count(call[1])
        self._arrived()
        return result


def _by_hooks(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> list[Undo]:
    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]
    return [handle.remove for handle in handles]


def _refuse(_nothing: None) -> torch.Tensor:
    raise RuntimeError("a backward inside the recorded forward: nothing was saved for it")


@dataclass(slots=True)
class MetStorage:
    """A storage that a recorded forward meets.

    Args:
        ref: keeps its address from being reused; ``None`` after `MetStorages.forget`.
        size_bytes: of all of it.
        producer: whose it is; ``None``: nobody's, and it never moves.
        outside: nobody's for good.
        uses: in order.
    """

    ref: StorageWeakRef | None
    size_bytes: int
    producer: OpCall | None
    outside: bool = False
    uses: list[Use] = field(default_factory=list)


class MetStorages:
    """The storages that a recorded forward meets, whose they are, and how they are used.

    By the address of the storage object.
    """

    def __init__(self) -> None:
        self._met: list[MetStorage] = []
        self._by_key: dict[int, MetStorage] = {}

    def own(self, values: Iterable[Any], producer: OpCall | None) -> None:
        """Set whose these tensors are, unless they are nobody's; with ``None`` those not met become that."""
        for tensor in values:
            if not isinstance(tensor, torch.Tensor) or (key := storage_key(tensor)) is None:
                continue
            met = self._by_key.get(key)
            if met is None:
                storage = tensor.untyped_storage()
                met = MetStorage(StorageWeakRef(storage), storage.nbytes(), producer, producer is None)
                self._by_key[key] = met
                self._met.append(met)
            elif producer is not None and not met.outside:
                met.producer = producer

    def find(self, tensor: object) -> MetStorage | None:
        """Return what is known of a tensor's storage."""
        key = storage_key(tensor) if isinstance(tensor, torch.Tensor) else None
        return None if key is None else self._by_key.get(key)

    def used(self) -> tuple[SavedStorage, ...]:
        """Return those that were used, in the order in which they were met."""
        return tuple(SavedStorage(met.size_bytes, tuple(met.uses)) for met in self._met if met.uses)

    def forget(self) -> None:
        """Let go of the storages; their uses stay."""
        self._by_key.clear()
        for met in self._met:
            met.ref = None


def reach_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where in its storage a tensor begins, and where the last of its elements ends."""
    first, size = int(tensor.storage_offset()), tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = sum((length - 1) * step for length, step in steps) + 1 if tensor.numel() else 0
    return first * size, (first + reach) * size


def is_plain(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is one that the engine can move: elements in memory of ``device``, as they are."""
    return (
        tensor.device == device
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )
