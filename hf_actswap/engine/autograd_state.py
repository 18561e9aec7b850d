"""Reads autograd's private state: node numbers, the running backward, the hooks and modes in force.

All that the engine reads of it is here. Verified on torch 2.11 to 2.13;
`tests/engine/test_autograd_state.py` fails loudly if a release changes it. A node's *number* is its sequence
number: autograd counts nodes per thread in order of creation and runs them in descending order. A saved
tensor is packed while its node is being built, after the node has taken its number, so the counter is then
one past it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node will get."""
_running_node: Callable[[], Any] = torch._C._current_autograd_node
running_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward that runs on this thread; a backward inside another has a number of its own."""


def skip_node_numbers(count: int) -> None:
    """Let the next node get a number that is higher by ``count``; no mode and no hook sees anything."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.enable_grad():
        leaf = torch.empty(0, requires_grad=True)
        for _ in range(count):
            leaf.view_as(leaf)  # a node that saves nothing


def packing_node_number() -> int:
    """Return the number of the node whose tensors are being packed (or of the node built last)."""
    return next_node_number() - 1


def made_by_packing_node(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is an output of the node that is saving it."""
    node: Any = tensor.grad_fn
    return node is not None and int(node._sequence_nr()) == packing_node_number()


def node_number(node: Any) -> int:
    """Return the number of a ``grad_fn``."""
    return int(node._sequence_nr())


def result_dtype(node: Any) -> torch.dtype:
    """Return the dtype of the (first) result that a ``grad_fn`` is the node of."""
    dtype: torch.dtype = node._input_metadata[0].dtype  # inputs of its backward: gradients of its results
    return dtype


def running_node_number() -> int | None:
    """Return the number of the node that backward is running on this thread; ``None`` outside backward."""
    node = _running_node()
    return None if node is None else node._sequence_nr()


def pop_leaked_hooks(pack: Callable[..., Any]) -> bool:
    """Pop the saved-tensor hooks of ``pack`` if this thread has them; return whether it did. Others stay.

    A `KeyboardInterrupt` in a forward skips even ``always_call`` module hooks, so ours were not popped. A
    checkpoint of PyTorch 2.11 leaves its own hooks above them until the traceback is freed, and then pops
    one.
    """
    state = torch._C._autograd
    above = []
    while (top := state._top_saved_tensors_default_hooks(True)) is not None:
        state._pop_saved_tensors_default_hooks()
        if top[0] == pack:
            break
        above.append(top)
    for hooks in reversed(above):
        state._push_saved_tensors_default_hooks(*hooks)
    return top is not None


def function_mode_is_innermost(mode: TorchFunctionMode) -> bool:
    stack = _get_current_function_mode_stack()
    return bool(stack) and stack[-1] is mode


@contextmanager
def packs_seen(see: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Within the block call ``see`` with each tensor that autograd saves, before the hook in force is."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def seeing(tensor: torch.Tensor) -> Any:
        see(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(seeing, unpack):
        yield
