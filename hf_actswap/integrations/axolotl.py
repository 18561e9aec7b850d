"""Axolotl's plugin: a line ``actswap:`` in the file of a training gives its Trainer a plan.

Only Axolotl imports this, by the name in its file:
``plugins: [hf_actswap.integrations.axolotl.ActSwapPlugin]``.
It goes on without a plugin whose import fails by an `ImportError`; what fails here is another error.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from .callback import ActSwapCallback


class ActSwapArguments(BaseModel):
    """The plugin's key in Axolotl's file.

    Args:
        actswap: ``auto``, a configuration (a mapping, a file, a folder, a Hub id), a plan's file, or off.
    """

    actswap: dict[str, Any] | bool | str = "auto"


class ActSwapPlugin(BasePlugin):
    """Gives Axolotl's Trainer an `ActSwapCallback` for the key ``actswap``."""

    def get_input_args(self) -> str:
        """Return the name of the class with the key, which Axolotl checks."""
        return f"{__name__}.{ActSwapArguments.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[ActSwapCallback]:
        """Return the callback. Raises `ConfigError` or `PlanError` for what is wrong in its configuration."""
        asked = cfg.actswap
        return [ActSwapCallback(asked.to_dict() if hasattr(asked, "to_dict") else asked)]
