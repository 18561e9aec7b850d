"""The forwards of a recorded step that are not recorded: what they save can be evicted all the same.

Of a step's micro-batches the recorder takes one, and no plan is on meanwhile. Without this the others would
keep what they save as ever, and a step that does not fit would not survive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..engine.around import Undo, around
from ..engine.autograd_state import pop_leaked_hooks
from ..engine.tickets import Ticket, restore


class HeldForwards:
    """See the module's text. Start it before the recorder, and stop it after.

    Args:
        module: whose call is a forward.
        hold: makes what stands in the place of a saved tensor.
        recorded: whether the recorder follows the forward that has just begun.
    """

    def __init__(
        self, module: nn.Module, hold: Callable[[torch.Tensor], Ticket], recorded: Callable[[], bool]
    ) -> None:
        self._module, self._hold, self._recorded = module, hold, recorded
        self._saving: torch.autograd.graph.saved_tensors_hooks | None = None
        self._undo: list[Undo] = []

    def start(self) -> None:
        """Hold what forwards save from now on."""
        self._undo = around(self._module, self._forward_starts, self._forward_ends)

    def stop(self) -> None:
        """Leave nothing behind; also in mid-step, after an exception. Safe to call again."""
        self._forward_ends()
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()

    def _forward_starts(self, *_: Any) -> None:
        if not torch.is_grad_enabled() or self._recorded():
            return
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._pack, restore)
        self._saving.__enter__()

    def _forward_ends(self, *_: Any) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            pop_leaked_hooks(saving.pack_hook)

    def _pack(self, tensor: torch.Tensor) -> Ticket:
        """Held detached: else a node's own output would keep it alive."""
        return self._hold(tensor.detach())
