"""One forward on fake tensors of the real shapes: what autograd saves, and whose it is.

Ownership is the engine's (`saved_bytes` says what follows from it): a storage belongs to the op that produced
it, views looked through; weights, buffers and what the model or a layer was called with are nobody's; a layer
owns what it hands on. All ops are named in all layers, whatever a plan might want to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .actions import Scope
from .compiled import named_op_modules, uncompiled
from .dry_run import fakes_only, hooks_off, one_sequence_each
from .fake_batch import (
    check_device,
    fake_batch,
    fake_weights,
    holds_several_sequences,
    quietly,
    without_idle_mask,
)
from .opnames import OpStack, function_name
from .outline import OUTPUT, LayerOutline, Outline
from .record import is_cast_of_parameter, storage_key
from .saved_bytes import OpCall, SavedBytes, SavedStorage, Use, UseKind

_OUTSIDE: OpCall = (None, "", None)
_CPU = torch.device("cpu")


def record_saved(
    model: nn.Module,
    outline: Outline,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device = _CPU,
) -> SavedBytes:
    """Record what autograd saves when ``model`` is called with ``args`` and ``kwargs``, without computing.

    No hook on the model runs, none of its tensors is touched, no random number is drawn; autocast is as it is
    when this is called. Compiled modules run eagerly. Of layers that are recomputed whole already, by a plan
    that is on the model, only what they are called with is seen.

    Args:
        model: the model inside its wrappers, as the outline names it.
        outline: of this model.
        args, kwargs: as at the call. Of tensors only shape, type and device are read, and of a mask and of
            positions whether they say anything, because attention runs otherwise then.
        device: where tensors on ``meta`` are taken to be, as attention kernels differ.

    Raises:
        ValueError: this build of PyTorch knows no such device.
        Exception: whatever the model raises on fake tensors (data-dependent shapes, custom kernels).
    """
    check_device(device)
    named = without_idle_mask(kwargs or {})
    packed = nullcontext() if holds_several_sequences(named) else one_sequence_each()
    with quietly(), hooks_off(model), packed, fakes_only():
        state = fake_weights(model, device)
        fake_args, fake_kwargs = fake_batch((args, named), device)
        first = next(model.parameters(), None)
        recorder = _Recorder(outline, _CPU if first is None else device if first.is_meta else first.device)
        recorder.own(state.values(), None)
        recorder.own(tree_leaves((fake_args, fake_kwargs)), None)
        with recorder.installed(model), recorder.saving(), recorder:
            functional_call(model, state, fake_args, fake_kwargs)
    return SavedBytes(
        tuple(SavedStorage(met.size_bytes, tuple(met.uses)) for met in recorder.met if met.uses),
        tuple(
            frozenset({"", *(op.path for op in layer.ops if op.kind != "function")})
            for layer in outline.layers
        ),
    )


@dataclass(slots=True)
class _Met:
    """A storage; ``producer`` ``None``: nobody's, and it never moves."""

    ref: StorageWeakRef
    size_bytes: int
    producer: OpCall | None
    outside: bool = False
    uses: list[Use] = field(default_factory=list)


class _Recorder(TorchFunctionMode):
    """Follows scopes, module paths and functions as the engine does, and writes down every use."""

    def __init__(self, outline: Outline, device: torch.device) -> None:
        super().__init__()
        self.met: list[_Met] = []
        self._by_key: dict[int, _Met] = {}
        self._outline, self._device = outline, device
        self._scope: OpCall = _OUTSIDE
        self._stack: OpStack | None = None
        self._running: OpCall | None = None
        self._autocast = self._packing = False
        self._order = 0

    def own(self, values: Iterable[Any], producer: OpCall | None) -> None:
        """Set whose these tensors are, unless they are nobody's; with ``None`` those not met become that."""
        for tensor in values:
            if not isinstance(tensor, torch.Tensor) or (key := storage_key(tensor)) is None:
                continue
            met = self._by_key.get(key)
            if met is None:
                storage = tensor.untyped_storage()
                met = _Met(StorageWeakRef(storage), storage.nbytes(), producer, producer is None)
                self._by_key[key] = met
                self.met.append(met)
            elif producer is not None and not met.outside:
                met.producer = producer

    @contextmanager
    def installed(self, model: nn.Module) -> Iterator[None]:
        """Follow the scopes, and the module path inside each layer."""
        handles: list[Any] = []
        around: dict[Scope, str | None] = {
            "embedding": self._outline.embedding,
            "final_norm": self._outline.final_norm,
            "head": self._outline.head,
        }
        try:
            for scope, path in around.items():
                if path is not None:
                    handles += _around(model.get_submodule(path), *self._scope_hooks((scope, "", None), None))
            for layer in self._outline.layers:
                module = uncompiled(model.get_submodule(layer.module_path))
                handles += _around(module, *self._scope_hooks((layer.index, "", None), layer))
                for path, child in named_op_modules(module):
                    if path:
                        handles += _around(child, *self._path_hooks((layer.index, path, None)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def saving(self) -> AbstractContextManager[Any]:
        """Hooks that see what is saved, and keep nothing of it."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _refuse)

    def _scope_hooks(
        self, scope: OpCall, layer: LayerOutline | None
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if layer is not None:
                hidden = args[0] if args else kwargs.get("hidden_states")
                if self._find(hidden) is None:
                    self.own([hidden], ("embedding", OUTPUT, None))
                self.own(tree_leaves((args, kwargs)), None)
                self._stack = OpStack(layer.attention_paths)
            self._autocast = torch.is_autocast_enabled(self._device.type)
            self._scope = scope
            self._use("module", scope, (args, kwargs))

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self._scope, self._stack = _OUTSIDE, None
            hidden = output[0] if isinstance(output, tuple) and output else output
            if layer is not None or self._find(hidden) is None:
                self.own([hidden], (scope[0], OUTPUT, None))

        return before, after

    def _path_hooks(self, call: OpCall) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._stack is not None:
                self._stack.enter(call[1])
                self._use("module", call, (args, kwargs))

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            if self._stack is not None:
                self._use("returned", call, output)
                self._stack.leave(call[1])

        return before, after

    def _find(self, tensor: object) -> _Met | None:
        key = storage_key(tensor) if isinstance(tensor, torch.Tensor) else None
        return None if key is None else self._by_key.get(key)

    def _meet(self, tensor: torch.Tensor) -> None:
        """A storage without an owner gets the one that the place suggests."""
        if self._find(tensor) is None:
            self.own([tensor], self._of_unmet(tensor))

    def _of_unmet(self, tensor: torch.Tensor) -> OpCall:
        if self._autocast and is_cast_of_parameter(tensor):
            return _OUTSIDE
        if self._running is not None:
            return self._running
        if self._stack is not None:
            return (self._scope[0], *self._stack.unseen())
        return self._scope

    def _use(self, kind: UseKind, at: OpCall, values: Any) -> None:
        for tensor in tree_leaves(values):
            met = self._find(tensor)
            if met is None or met.producer is None or met.producer[0] is None or not self._is_plain(tensor):
                continue
            first, size = int(tensor.storage_offset()), tensor.element_size()
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            reach = sum((length - 1) * step for length, step in steps) + 1 if tensor.numel() else 0
            bounds = first * size, (first + reach) * size
            self._order += 1
            size_bytes = tensor.numel() * size
            met.uses.append(Use(kind, at, met.producer, *bounds, size_bytes, tensor._version, self._order))

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.device == self._device
            and tensor.layout == torch.strided
            and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        )

    def _pack(self, tensor: torch.Tensor) -> None:
        self._packing = True
        try:
            self._meet(tensor)
            self._use("saved", self._scope, tensor)
        finally:
            self._packing = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name is None or self._stack is None or self._packing:
            return func(*args, **kwargs)
        stack = self._stack
        call = (self._scope[0], *stack.begin(name))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in inputs:
            self._meet(tensor)
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
        return result


def _around(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> list[Any]:
    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after),
    ]


def _refuse(_nothing: None) -> torch.Tensor:
    raise RuntimeError("a backward inside the recorded forward: nothing was saved for it")
