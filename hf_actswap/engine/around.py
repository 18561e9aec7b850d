"""Doing something before and after a module's call, without getting into what is compiled.

Hooks on a module that ``Module.compile`` has compiled in place would be traced into its graph, and break it.
There the compiled call itself is wrapped. A module that ``torch.compile`` has wrapped runs its own hooks
outside the compiled code, so ordinary hooks serve.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..plan.compiled import is_compiled
from ..plan.outline import Outline, unwrapped

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], Any], None]
Undo = Callable[[], None]


def around(module: nn.Module, before: Before, after: After) -> list[Undo]:
    """Call ``before`` ahead of each call of ``module`` and ``after`` behind it, also after an exception."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return [_around_compiled(module, before, after)]
    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]
    return [handle.remove for handle in handles]


def _around_compiled(module: nn.Module, before: Before, after: After) -> Undo:
    def surrounded(inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            output = None
            try:
                before(module, args, kwargs)
                output = inner(*args, **kwargs)
            finally:
                after(module, args, output)
            return output

        return call

    return replace_call(module, surrounded)


def replace_call(module: nn.Module, around_call: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Undo:
    """Put a function around the calls of this module alone, outside of its hooks; return what takes it away.

    Args:
        module: compiled in place, or not.
        around_call: given what a call runs so far; returns what it is to run.
    """
    compiled = getattr(module, "_compiled_call_impl", None)
    name = "_call_impl" if compiled is None else "_compiled_call_impl"
    call = around_call(getattr(module, name))
    vars(module)[name] = call

    def undo() -> None:
        if compiled is None:
            vars(module).pop(name, None)
        elif vars(module).get(name) is call:  # else it was compiled anew meanwhile
            vars(module)[name] = compiled

    return undo


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Put another forward on this module alone; return what puts back the one before."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward

    def undo() -> None:
        if own is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = own

    return undo


def compiled_around(model: nn.Module, outline: Outline) -> nn.Module | None:
    """Return the outermost module around the decoder layers whose call is compiled, if there is one."""
    if not outline.compiled or not outline.layers:
        return None
    first = unwrapped(model).get_submodule(outline.layers[0].module_path)
    return next(
        (module for module in model.modules() if is_compiled(module) and first in module.modules()), None
    )
