"""The hooks by which a plan acts on a running model.

What is installed, and nothing else:

* on the model, a pair of forward hooks: the saved-tensor hooks are pushed before its forward and popped
  after it, also after an exception (``always_call``);
* on each decoder layer, and on the embedding, the final norm and the head, a pair that says where we are;
* on the modules inside layers whose ops are decided one by one, a pair that follows the module path, and
  the `NamingMode` while the layer runs;
* on layers that are recomputed whole, ``torch.utils.checkpoint`` around their forward.

Outside a training forward (no grad, evaluation, recomputation in backward) there is no `ForwardPass`, and
every hook returns at once. A `KeyboardInterrupt` skips even ``always_call`` hooks; what it left behind is
cleaned up by the next forward and by `AppliedPlan.remove`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..plan.actions import MemoryPlan, Scope
from ..plan.opnames import OpStack
from ..plan.outline import LayerOutline, Outline
from ..plan.record import storage_key
from .autograd_state import function_mode_is_innermost, pop_leaked_hooks
from .fates import KEEP, FateTable
from .forward_pass import ForwardPass, Setting
from .host_pool import HostPool
from .naming_mode import NamingMode
from .recompute import Region, Ticket, checkpointed
from .stats import Counters, SwapStats
from .transfer import BlockingTransfer, Transfer
from .transfer_streams import StreamTransfer


class Engine:
    """The hooks of one applied plan and what they share. Made by `install.install`."""

    def __init__(
        self, root: nn.Module, plan: MemoryPlan, outline: Outline, transfer: Transfer | None
    ) -> None:
        self.plan, self.outline = plan, outline
        self._root = root
        self._modules = list(root.modules())  # walking the tree at each forward costs milliseconds
        self._transfer = transfer
        self._counters = Counters()
        self._fates = FateTable(plan, outline)
        self._setting: Setting | None = None
        self._forward: ForwardPass | None = None
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._mode: NamingMode | None = None

    def stats(self) -> SwapStats:
        """See `AppliedPlan.stats`."""
        if self._setting is None:
            return self._counters.snapshot(0, 0, 0)
        pool = self._setting.pool
        return self._counters.snapshot(pool.used_bytes, pool.peak_bytes, pool.held_bytes)

    def attach(self) -> list[Callable[[], None]]:
        """Install the hooks; return what undoes them, in order of installation."""
        undo: list[Callable[[], None]] = [self._close_pool]
        if not self.plan.rows:
            return undo
        undo += self._pair(self._root, self._start_forward, self._end_forward)
        around: dict[Scope, str | None] = {
            "embedding": self.outline.embedding,
            "final_norm": self.outline.final_norm,
            "head": self.outline.head,
        }
        for scope, path in around.items():
            if path is not None:
                undo += self._follow_scope(self._root.get_submodule(path), scope, None)
        for layer in self.outline.layers:
            module = self._root.get_submodule(layer.module_path)
            naming = layer.index in self._fates.named_layers
            undo += self._follow_scope(module, layer.index, layer if naming else None)
            if naming:
                for path, child in module.named_modules():
                    if path:
                        undo += self._follow_path(child, layer.index, path)
            if layer.index in self._fates.checkpointed_layers:
                undo.append(checkpointed(module))
        undo.append(self._clean_up)
        return undo

    def _parameter_storages(self) -> set[int]:
        """Asked at each forward: moving or sharding a model gives its parameters and buffers new storages."""
        keys = (
            storage_key(tensor)
            for module in self._modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        )
        return {key for key in keys if key is not None}

    def _device(self) -> torch.device:
        return next((parameter.device for parameter in self._root.parameters()), torch.device("cpu"))

    def _setting_on(self, device: torch.device) -> Setting:
        """The device is asked at each forward: a plan may be applied before the model is moved."""
        if self._setting is None or self._setting.device != device:
            self._close_pool()
            default = BlockingTransfer if device.type == "cpu" else StreamTransfer
            transfer = self._transfer or default(device)
            pool = HostPool(transfer.pinned, self.plan.host_memory_bytes)
            self._setting = Setting(
                self._fates, pool, transfer, device, self._counters, self.plan.min_tensor_bytes
            )
        return self._setting

    def _close_pool(self) -> None:
        if self._setting is not None:
            self._setting.pool.close()

    def _pair(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> list[Any]:
        handles = [
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            module.register_forward_hook(after, always_call=True),
        ]
        return [handle.remove for handle in handles]

    def _pack(self, tensor: torch.Tensor) -> Ticket | _Plain:
        forward = self._forward
        return _Plain(tensor.detach()) if forward is None else forward.pack(tensor)

    def _start_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._clean_up()
        if not torch.is_grad_enabled():
            return
        self._forward = ForwardPass(self._setting_on(self._device()), self._parameter_storages())
        self._forward.own_outside((args, kwargs))
        self._counters.forwards += 1
        self._saving.__enter__()

    def _end_forward(self, *_: Any) -> None:
        forward, self._forward = self._forward, None
        if forward is not None:
            self._saving.__exit__(None, None, None)
            forward.end()

    def _clean_up(self) -> None:
        """Drop what an interrupted forward left behind."""
        forward, self._forward = self._forward, None
        self._leave_mode()
        if forward is not None:
            pop_leaked_hooks(self._pack)
            forward.end()

    def _follow_scope(self, module: nn.Module, scope: Scope, naming: LayerOutline | None) -> list[Any]:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            forward = self._forward
            if forward is None:
                return
            forward.start_scope(scope, args, kwargs)
            if naming is not None:
                forward.stack = OpStack(naming.attention_paths)
                if self._fates.is_region(scope, ""):
                    forward.region = self._region(forward, module, scope, "", args, kwargs)
                self._mode = NamingMode(forward, self._fates, self._counters)
                self._mode.__enter__()

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            forward = self._forward
            if forward is None:
                return
            if naming is not None:
                self._leave_mode()
                forward.stack = None
                forward.region = None
            forward.end_scope(output)

        return self._pair(module, before, after)

    def _follow_path(self, module: nn.Module, scope: int, path: str) -> list[Any]:
        is_region = self._fates.is_region(scope, path)

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            forward = self._forward
            if forward is None or forward.stack is None:
                return
            forward.stack.enter(path)
            if is_region and forward.region is None:
                forward.region = self._region(forward, module, scope, path, args, kwargs)

        def after(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            forward = self._forward
            if forward is None or forward.stack is None:
                return
            if is_region:
                forward.region = None
                for tensor in tree_leaves(output):
                    if isinstance(tensor, torch.Tensor):
                        forward.own(tensor, KEEP)
            forward.stack.leave(path)

        return self._pair(module, before, after)

    def _region(
        self,
        forward: ForwardPass,
        module: nn.Module,
        scope: Scope,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Region:
        name = f"{scope}.{path}" if path else str(scope)
        return Region(name, module, args, kwargs, forward.ticket_of_input, self._counters, random=True)

    def _leave_mode(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None and function_mode_is_innermost(mode):
            mode.__exit__(None, None, None)


class _Plain:
    """A ticket made while no forward of the model runs (hooks left over from an interrupt)."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def restore(self) -> torch.Tensor:
        return self._tensor


def _unpack(ticket: Ticket) -> torch.Tensor:
    return ticket.restore()
