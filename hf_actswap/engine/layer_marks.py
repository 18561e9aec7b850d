"""Where compute is, layer by layer, for one step under watch.

Hooks on the model and on the layers, for as long as somebody watches. In backward a layer begins when the
gradient of what it returned is there: a tensor hook on that, which goes with the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from ..plan.outline import Outline, unwrapped
from .around import Undo, around, compiled_around
from .autograd_state import running_node_number

Phase = Literal["forward", "backward", "outside"]

Mark = Callable[[Phase, int | None], None]
"""From now on compute is in this phase, in this layer; ``None``: in none of them."""


class LayerMarks:
    """See the module's text.

    Args:
        model: bare or wrapped.
        outline: of the model inside.
        mark: called where another part begins. A model compiled as a whole shows no layers.
    """

    def __init__(self, model: nn.Module, outline: Outline, mark: Mark) -> None:
        self._model, self._outline, self._mark = model, outline, mark
        self._undo: list[Undo] = []
        self._on = False

    def attach(self) -> None:
        """Begin."""
        self._on = True
        root, whole = unwrapped(self._model), compiled_around(self._model, self._outline)
        self._undo = around(root if whole is None else whole, self._forward_starts, self._forward_ends)
        if whole is None:
            for index, layer in enumerate(self._outline.layers):
                module = root.get_submodule(layer.module_path)
                before, after = partial(self._enters, index), partial(self._leaves, index)
                self._undo += around(module, before, after)

    def detach(self) -> None:
        """End. Safe to call again."""
        self._on = False
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()

    def _forward_starts(self, *_: Any) -> None:
        if _in_forward():
            self._mark("forward", None)

    def _forward_ends(self, *_: Any) -> None:
        if _in_forward():
            self._mark("backward", None)

    def _enters(self, index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not _in_forward():
            return
        self._mark("forward", index)
        hidden = args[0] if args else kwargs.get("hidden_states")
        if index == 0 and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(partial(self._gradient_of, None))

    def _leaves(self, index: int, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if not _in_forward():
            return
        self._mark("forward", None)
        hidden = output[0] if isinstance(output, tuple) and output else output
        if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(partial(self._gradient_of, index))

    def _gradient_of(self, index: int | None, _gradient: torch.Tensor) -> None:
        if self._on:
            self._mark("backward", index)


def _in_forward() -> bool:
    """Whether a training forward runs, and no recomputation."""
    return torch.is_grad_enabled() and running_node_number() is None
