"""Layers that are recomputed whole: backward needs their inputs at their last operator, not at their first.

``torch.utils.checkpoint`` saves the arguments of a layer before the layer runs. Backward reads them at the
first of the layer's nodes that it reaches and that saved something inside. Only the checkpoint can say which
node that is; it is near the end. So prefetching treats a checkpointed layer as one moment, its last
operator. Its nodes are counted as in any other layer, because forward builds them all.

Backward calls our unpack hook once for such a layer. So in a stack of them a prefetch point lies inside a
layer above, and the copy starts when backward enters that layer, before the layer runs again: at least ``p``
operators and one layer ahead.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

from torch import nn

from ..plan.actions import Scope
from ..plan.model_structure import LayerStructure
from ..plan.wrappers import checkpoints_its_call, is_checkpointed
from .auto_windows import AutoForward, Key
from .schedule import OperatorClock
from .tickets import SwapGroup

Checkpoint = Literal["forward", "call"]
"""Which part of a layer is checkpointed: its forward, or its call with its hooks (transformers 5.17)."""


def checkpoint_of(
    module: nn.Module, layer: LayerStructure | None, ours: Container[Scope]
) -> Checkpoint | None:
    """Return which part of a call that starts is checkpointed; ``None``: none, or the layer is compiled.

    Args:
        module: the module that is called.
        layer: its structure; ``None``: it is no decoder layer.
        ours: layers around whose forward the plan has put a checkpoint.
    """
    if layer is None or layer.compiled:
        return None
    if layer.index in ours:
        return "forward"
    if not (module.training and is_checkpointed(module)):
        return None
    return "call" if checkpoints_its_call(module) else "forward"


class CheckpointInputs:
    """Sets when backward needs the inputs of checkpointed layers: at the last operator of their layer.

    Args:
        clock: counts the operators of the forward.
        hooks: operators at which tensors were saved; for checkpointed layers they become the layer's last.
    """

    def __init__(self, clock: OperatorClock, hooks: list[int]) -> None:
        self._clock, self._hooks = clock, hooks
        self._groups: list[SwapGroup] = []
        self._keys: list[tuple[Key, int]] = []
        self._first_node: int | None = None
        self._first_hook = 0
        self.listening = True
        """Whether a tensor saved now may be such an input: between scopes, and in checkpointed layers."""

    def swapped(self, group: SwapGroup) -> None:
        """Note a swapped storage that was saved."""
        self._groups.append(group)

    def chosen(self, key: Key, op: int) -> None:
        """Note that a storage, whose key under ``auto`` is ``key``, was saved at operator ``op``."""
        self._keys.append((key, op))

    def start(self, checkpoint: Checkpoint | None) -> None:
        """Start a scope; ``checkpoint``: the part of it that is checkpointed, if any."""
        self._first_node, self.listening = None, checkpoint is not None
        if checkpoint == "call":  # our hooks run inside: the checkpoint has saved its inputs at this operator
            now = self._clock.now()
            while len(self._hooks) > self._first_hook and self._hooks[self._first_hook] != now:
                self._first_hook += 1
            self._groups = [group for group in self._groups if group.last_use == now]
            self._keys = [(key, op) for key, op in self._keys if op == now]
        else:
            self.clear()
        if checkpoint is not None:
            self._first_node = self._clock.next_node()

    def end(self, auto: AutoForward | None) -> None:
        """End the scope: its inputs are needed at its last operator, also for ``auto``."""
        if self._first_node is not None and len(self._hooks) > self._first_hook:
            last_op = self._clock.gather(self._first_node)
            self._hooks[self._first_hook :] = [last_op]
            for group in self._groups:
                group.last_use = last_op
            if auto is not None:
                for key, _ in self._keys:
                    auto.used(key, last_op)
        self._first_node, self.listening = None, True
        self.clear()

    def clear(self) -> None:
        """Forget what was saved until now."""
        self._groups, self._keys, self._first_hook = [], [], len(self._hooks)
