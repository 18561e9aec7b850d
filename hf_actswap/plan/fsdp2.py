"""What is read of FSDP2's private state, so that it is read in one place: that of PyTorch 2.13.

Earlier versions have one group of parameters for each module, later ones several.
"""

from __future__ import annotations

from typing import Any

FSDP2_METHOD = "set_reshard_after_forward"
"""By which a module sharded by FSDP2 is known, without importing it."""


def parameter_groups(module: Any) -> list[Any]:
    """Return FSDP2's groups of the parameters that it shards of a module of its own."""
    state = module._get_fsdp_state()
    groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or []
    one = getattr(state, "_fsdp_param_group", None) if not groups else None
    return [group for group in (*groups, one) if group is not None]
