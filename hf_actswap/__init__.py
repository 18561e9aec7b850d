"""hf_actswap: train Hugging Face models with longer sequences and bigger batches on the GPUs that you have.

Swap activations to host memory, recompute them, or keep them: per layer and per operator, from one YAML file.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .apply import apply
from .config import ActSwapConfig, load_config
from .engine import AppliedPlan
from .errors import ConfigError, PlanError
from .integrations import ActSwapCallback, ActSwapTrainerMixin, ActSwapTrainingArguments, prepare
from .plan import MemoryPlan, outline, resolve_plan
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .integrations.trainer import ActSwapTrainer

__all__ = [
    "ActSwapCallback",
    "ActSwapConfig",
    "ActSwapTrainer",
    "ActSwapTrainerMixin",
    "ActSwapTrainingArguments",
    "AppliedPlan",
    "ConfigError",
    "MemoryPlan",
    "PlanError",
    "apply",
    "load_config",
    "outline",
    "prepare",
    "resolve_plan",
]


def __getattr__(name: str) -> Any:
    """Import `ActSwapTrainer` when it is asked for: the Trainer behind it takes seconds to import."""
    if name == "ActSwapTrainer":
        return import_module(".integrations.trainer", __name__).ActSwapTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
