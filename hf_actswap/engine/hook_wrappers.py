"""Runs functions before and after a module's call, outside of compiled code.

Hooks on a module that ``Module.compile`` has compiled in place would be traced into its graph, and break it.
For such a module the compiled call itself is wrapped. A module that ``torch.compile`` returns runs its hooks
outside the compiled code, so it gets ordinary ones.

A module that is compiled after it got hooks is rejected in its first training forward: a traced hook would
act once, when the graph is made, and not at each call.

A copy of a module (``copy.deepcopy``: averaged weights, reference models) has none of these functions.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..errors import PlanError, Problem
from ..plan.model_structure import ModelStructure, is_container, modules_around, unwrapped
from ..plan.wrappers import is_compiled

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], Any], None]
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
Undo = Callable[[], None]


def wrap_call(
    module: nn.Module, before: Before, after: After, outermost: Outermost | None = None
) -> list[Undo]:
    """Run ``before`` before each call of ``module``, and ``after`` after it, also after an exception.

    ``outermost``: only around calls that are the outermost of several modules'.
    """
    if getattr(module, "_compiled_call_impl", None) is not None:
        return [_wrap_compiled(module, before, after)]
    handles = [
        module.register_forward_pre_hook(Hook(before, False, outermost), with_kwargs=True, prepend=True),
        module.register_forward_hook(Hook(after, True, outermost), always_call=True),
    ]
    return [handle.remove for handle in handles]


def wrap_outermost_calls(
    modules: Sequence[nn.Module], before: Before, after: After, innermost: bool = False
) -> list[Undo]:
    """Run ``before`` and ``after`` around calls of ``modules``, but not of one that another has called.

    Args:
        modules: the ways into a model (`entries`).
        innermost: as of `replace_method`.
    """
    if len(modules) == 1:
        return wrap_call(modules[0], before, after)
    running = Outermost()
    undo: list[Undo] = []
    for module in modules:
        undo.append(replace_call(module, partial(running.around, module, None), innermost))
        undo += wrap_call(module, before, after, running)
    return undo


def replace_outermost_calls(
    modules: Sequence[nn.Module], wrapper: Callable[[nn.Module], Wrapper]
) -> list[Undo]:
    """Wrap calls of ``modules`` (`replace_call`), but not of one that another has called."""
    if len(modules) == 1:
        return [replace_call(modules[0], wrapper(modules[0]))]
    running = Outermost()
    return [replace_call(module, partial(running.around, module, wrapper(module))) for module in modules]


class Outermost:
    """Which of several modules was called first, of those whose calls run in a thread."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def around(
        self, module: nn.Module, wrapper: Wrapper | None, inner: Callable[..., Any]
    ) -> Callable[..., Any]:
        wrapped = inner if wrapper is None else wrapper(inner)

        def call(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or getattr(self._of_thread, "module", module) is not module:
                return inner(*args, **kwargs)
            first = not hasattr(self._of_thread, "module")
            self._of_thread.module = module
            try:
                return wrapped(*args, **kwargs)
            finally:
                if first:
                    del self._of_thread.module

        return call

    def is_called(self, module: nn.Module) -> bool:
        return getattr(self._of_thread, "module", None) is module


class Hook:
    """A hook on a module, which in a copy of the module does nothing.

    Args:
        act: what it does.
        always_call: whether it also runs after an exception.
        outermost: it acts only in calls of a module that are the outermost; ``None``: in all.
    """

    __slots__ = ("act", "always_call", "outermost")

    def __init__(
        self, act: Callable[..., None], always_call: bool = False, outermost: Outermost | None = None
    ) -> None:
        self.act, self.always_call, self.outermost = act, always_call, outermost

    def __call__(self, *args: Any) -> None:
        if not is_dynamo_compiling():
            if self.outermost is None or self.outermost.is_called(args[0]):
                self.act(*args)
        elif not self.always_call:  # one that always runs would hide the error of the hook before
            reject_tracing()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def reject_tracing() -> None:
    """Raise `PlanError` where the compiler traces the caller into the graph of a training forward."""
    if is_dynamo_compiling() and torch.is_grad_enabled():
        _reject_compiled_after()


@torch.compiler.disable(reason="hf_actswap: call torch.compile first, then hf_actswap.apply")
def _reject_compiled_after() -> None:
    # Outside of the graph, so that the error reaches the caller.
    hint = (
        "Call torch.compile (or accelerator.prepare, which compiles under a dynamo plugin) first, then "
        "hf_actswap.apply on what it returns."
    )
    found = "a model that was compiled after the plan was applied"
    raise PlanError([Problem("torch.compile", "a plan applied to the compiled model", found, hint)])


def _wrap_compiled(module: nn.Module, before: Before, after: After) -> Undo:
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


def replace_call(module: nn.Module, wrapper: Wrapper, innermost: bool = False) -> Undo:
    """Wrap the calls of this module alone, outside of its hooks; return a function that removes the wrapper.

    Args:
        module: compiled in place, or not.
        wrapper, innermost: as of `replace_method`.
    """
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return replace_method(module, "_compiled_call_impl" if compiled else "_call_impl", wrapper, innermost)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Replace the forward of this module alone; return a function that restores the one before."""
    return replace_method(module, "forward", lambda _: forward)


def replace_method(module: Any, name: str, wrapper: Wrapper, innermost: bool = False) -> Undo:
    """Wrap a method of this module, or other object, alone; return a function that removes the wrapper.

    A method may have several wrappers, which may be removed in any order.

    Args:
        wrapper: takes the function that a call runs now; returns the function that it is to run.
        innermost: inside of all wrappers so far, so that it acts on a call in which one of them installs it.
    """
    outer: ReplacedMethod | None = None
    inner, own = getattr(module, name), name in vars(module)
    while innermost and isinstance(inner, ReplacedMethod):
        outer = inner
        inner, own = outer.inner, outer.own
    link = ReplacedMethod(module, name, inner, own)
    link.call = wrapper(link.call_inner)
    if outer is None:
        vars(module)[name] = link
    else:
        outer.inner, outer.own = link, True

    def undo() -> None:
        outer = vars(module).get(name)  # not of ours if somebody has replaced it anew meanwhile
        if outer is link and link.own:
            vars(module)[name] = link.inner
        elif outer is link:
            del vars(module)[name]
        while isinstance(outer, ReplacedMethod):
            if outer.inner is link:
                outer.inner, outer.own = link.inner, link.own
            outer = outer.inner
        link.call = link.inner  # others may still hold `link`: no cycle may keep the module alive

    return undo


def is_wrapped(module: nn.Module) -> bool:
    """Whether calls of this module alone are wrapped, as those of a model with a plan are."""
    return any(isinstance(value, ReplacedMethod) for value in vars(module).values())


class ReplacedMethod:
    """What a module's method runs; a copy of the module gets what was there before.

    Args:
        inner: what it ran before.
        own: whether ``inner`` had been put on this module alone, and is not its class's.
    """

    __slots__ = ("_module", "_name", "call", "inner", "own")

    def __init__(self, module: Any, name: str, inner: Callable[..., Any], own: bool) -> None:
        self._module, self._name = module, name
        self.inner, self.own = inner, own
        self.call = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def call_inner(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped function, which changes when another wrapper is removed."""
        return self.inner(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What `inspect.signature` reads instead, where the replacement keeps the signature."""
        wrapped: Callable[..., Any] = self.call.__wrapped__  # type: ignore[attr-defined]
        return wrapped

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if self.own:
            return _same, (self.inner,)
        return getattr, (self._module, self._name)  # read from the copy, so it is the class's


def _same(method: Callable[..., Any]) -> Callable[..., Any]:
    return method


def compiled_wrapper(model: nn.Module, structure: ModelStructure) -> nn.Module | None:
    """Return the outermost module around the decoder layers whose call is compiled, if there is one."""
    if not structure.compiled or not structure.layers:
        return None
    first = unwrapped(model).get_submodule(structure.layers[0].module_path)
    return next(
        (module for module in model.modules() if is_compiled(module) and first in module.modules()), None
    )


def entries(model: nn.Module, structure: ModelStructure) -> list[nn.Module]:
    """Return the modules whose call is a forward of ``model``, bare or wrapped; the outermost first.

    They are the model inside its wrappers, and the modules in it that are around a stack of layers, because
    training loops also call these themselves (the decoder, for a loss without whole logits). Where the layers
    run inside one compiled region, the compiled module is the only one.
    """
    compiled = compiled_wrapper(model, structure)
    return [compiled] if compiled is not None else entries_to(unwrapped(model), structure.stack_paths)


def entries_to(model: nn.Module, paths: Iterable[str]) -> list[nn.Module]:
    """Return ``model`` and the modules in it that are around ``paths``; the outermost first."""
    found = {id(model): model}
    for path in paths:
        for module in reversed([*modules_around(model, path)]):
            if not is_container(module):
                found[id(module)] = module
    return [*found.values()]
