"""Compiled regions under an `OomGuard`: each is one op, its backward another.

A region allocates by itself, without the dispatcher, and a part of it cannot be run again. The whole can: it
is a function of its inputs. So the call of a compiled module is run again as a single op is, unless the
failed attempt has changed a buffer or an input. Its backward runs inside autograd and gets one attempt: room
is made before it, as much as its forward took and the gradients that it will allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...engine.around import Undo, replace_call, replace_forward
from ...plan.compiled import is_compiled, uncompiled
from .oom_guard import OomGuard


def guard_compiled(guard: OomGuard, modules: Iterable[nn.Module]) -> list[Undo]:
    """Let ``guard`` run the calls of those among ``modules`` that are compiled; return what undoes it.

    Put it on after whatever else is `around` the calls, and take it off before.
    """
    return [_guarded(guard, module) for module in modules if is_compiled(module)]


def _guarded(guard: OomGuard, module: nn.Module) -> Undo:
    inner = uncompiled(module)
    name = f"compiled {type(inner).__name__}"

    def guarded(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not guard.running:
                return compiled(*args, **kwargs)
            written = [*inner.buffers(), *_tensors((args, kwargs))]
            output, used_bytes = guard.run_region(name, compiled, args, kwargs, written)
            nodes = {tensor.grad_fn: None for tensor in _tensors(output) if tensor.grad_fn is not None}
            for node in list(nodes)[:1]:
                node.register_prehook(_makes_room(guard, f"{name}, backward", used_bytes, inner))
            return output

        return call

    if getattr(module, "_compiled_call_impl", None) is None:
        return replace_forward(module, guarded(module.forward))
    return replace_call(module, guarded)


def _makes_room(guard: OomGuard, name: str, used_bytes: int, module: nn.Module) -> Callable[..., None]:
    def before(_gradients: Any) -> None:
        if guard.running:
            new = [item for item in module.parameters() if item.requires_grad and item.grad is None]
            guard.make_room(name, used_bytes + sum(item.nbytes for item in new))

    return before


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
