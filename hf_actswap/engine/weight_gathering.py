"""FSDP2: weights gathered again in backward (``parallel_optimizer_comm_recompute``), and back as it was.

MindSpore's flag meant that the all-gather of optimizer-sharded weights is done again in backward, so that
they are not held gathered in between. FSDP2 calls it ``reshard_after_forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..plan.fsdp2 import FSDP2_METHOD, parameter_groups


def gather_weights_again(model: nn.Module) -> Callable[[], None]:
    """Let all FSDP2 modules of ``model``, the outermost too, free gathered weights after their forward.

    Returns:
        What restores each module's own setting. It is readable in private attributes only, those of PyTorch
        2.13; earlier versions have one group of parameters for each module.
    """
    undo = [_resharding(module) for module in model.modules() if hasattr(type(module), FSDP2_METHOD)]

    def restore() -> None:
        for step in undo:
            step()

    return restore


def _resharding(module: Any) -> Callable[[], None]:
    """Let one module free its gathered weights after forward; return what restores its setting."""
    state: Any = module._get_fsdp_state()
    groups = parameter_groups(module)
    automatic = getattr(state, "_auto_reshard_after_forward", False)
    undecided = automatic and state._is_root is None
    before = [group.post_forward_mesh_info for group in groups]
    module.set_reshard_after_forward(True, recurse=False)

    def restore() -> None:
        state._auto_reshard_after_forward = automatic
        # FSDP2 decides at the first forward who is the root, whose weights it then keeps gathered.
        root_since = undecided and state._is_root
        for group, mesh in zip(groups, before, strict=True):
            group.post_forward_mesh_info = None if root_since else mesh

    return restore
