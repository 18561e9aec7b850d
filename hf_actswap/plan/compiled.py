"""Looks through the wrappers of ``torch.compile``: the paths of compiled modules, and the modules inside.

``torch.compile(module)`` puts a wrapper around a module, whose name shows in every path below it;
``module.compile()`` changes only how the module is called. A wrapper is recognised as a module that holds
``_orig_mod``, so that nothing of the compiler is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_INSIDE = "_orig_mod"


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``'s wrappers; any other module is returned as it is."""
    while (inner := module._modules.get(_INSIDE)) is not None:
        module = inner
    return module


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of ``module`` itself is compiled; a compiled module inside it does not count."""
    return uncompiled(module) is not module or getattr(module, "_compiled_call_impl", None) is not None


def runs_cuda_graphs(module: nn.Module) -> bool:
    """Whether calls of ``module`` are compiled into CUDA graphs (``reduce-overhead``, ``max-autotune``)."""
    called: Any = getattr(module, "_compiled_call_impl", None) or (module if is_compiled(module) else None)
    config: dict[str, Any] = getattr(called, "get_compiler_config", dict)() or {}
    return bool(config.get("triton.cudagraphs"))


def called_modules(layer: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (op path, module) for what ``layer`` calls eagerly: compiled modules, but no modules inside them.

    A hook on a module inside compiled code would be compiled with it.
    """
    for name, child in layer.named_children():
        inside = f"{path}.{name}" if path else name
        yield inside, child
        if not is_compiled(child):
            yield from called_modules(child, inside)


def named_op_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layer (path ``""``) and the modules inside it by op path.

    Where ``torch.compile`` put a wrapper around one of them, the module inside has the wrapper's path.
    """
    for path, module in uncompiled(layer).named_modules():
        if uncompiled(module) is module:
            yield ".".join(part for part in path.split(".") if part != _INSIDE), module
