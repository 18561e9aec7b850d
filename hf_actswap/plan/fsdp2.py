"""Reads FSDP2's private state, so that only this module depends on it (written for PyTorch 2.13).

Earlier versions of PyTorch have one group of parameters for each module, later ones several.
"""

from __future__ import annotations

from typing import Any

FSDP2_METHOD = "set_reshard_after_forward"
"""Name of a method by which a module sharded by FSDP2 is recognised, without importing FSDP2."""


def parameter_groups(module: Any) -> list[Any]:
    """Return the parameter groups that FSDP2 has for ``module`` itself, a module that FSDP2 shards."""
    state = module._get_fsdp_state()
    groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or []
    one = getattr(state, "_fsdp_param_group", None) if not groups else None
    return [group for group in (*groups, one) if group is not None]
