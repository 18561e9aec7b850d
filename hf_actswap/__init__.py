"""hf_actswap: train Hugging Face models with longer sequences and bigger batches on the GPUs that you have.

Swap activations to host memory, recompute them, or keep them: per layer and per operator, from one YAML file.
"""

from __future__ import annotations

from .apply import apply
from .config import ActSwapConfig, load_config
from .engine import AppliedPlan
from .errors import ConfigError, PlanError
from .integrations import ActSwapCallback, ActSwapTrainingArguments
from .plan import MemoryPlan, outline, resolve_plan
from .version import __version__ as __version__

__all__ = [
    "ActSwapCallback",
    "ActSwapConfig",
    "ActSwapTrainingArguments",
    "AppliedPlan",
    "ConfigError",
    "MemoryPlan",
    "PlanError",
    "apply",
    "load_config",
    "outline",
    "resolve_plan",
]
