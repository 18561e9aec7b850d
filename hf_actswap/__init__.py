"""hf_actswap: train Hugging Face models with longer sequences and bigger batches on the GPUs that you have.

Swap activations to host memory, recompute them, or keep them: per layer and per operator, from one YAML file.

Names are imported when they are first used (PEP 562), because the libraries behind them take seconds to
import and ``hf-actswap --help`` does not need them. ``from hf_actswap import apply`` works as usual.
"""

from __future__ import annotations

import random
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from . import config as config
    from . import engine as engine
    from . import errors as errors
    from . import integrations as integrations
    from . import parallel as parallel
    from . import plan as plan
    from . import planner as planner
    from . import report as report
    from .apply import apply
    from .config import ActSwapConfig, load_config
    from .engine import AppliedPlan
    from .errors import ConfigError, PlanError
    from .integrations import (
        ActSwapCallback,
        ActSwapTrainerMixin,
        ActSwapTrainingArguments,
        prepare,
        stage_from_config,
        stage_from_pretrained,
        with_actswap,
    )
    from .integrations.trainer import ActSwapTrainer
    from .plan import MemoryPlan, load_plan, model_structure, resolve_plan
    from .plan.op_facts import adapt_mem_func_wrapper
    from .planner import op_hook

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
    "adapt_mem_func_wrapper",
    "apply",
    "load_config",
    "load_plan",
    "model_structure",
    "op_hook",
    "prepare",
    "resolve_plan",
    "stage_from_config",
    "stage_from_pretrained",
    "with_actswap",
]

_MODULES = {
    "ActSwapCallback": "integrations",
    "ActSwapConfig": "config",
    "ActSwapTrainer": "integrations.trainer",
    "ActSwapTrainerMixin": "integrations",
    "ActSwapTrainingArguments": "integrations",
    "AppliedPlan": "engine",
    "ConfigError": "errors",
    "MemoryPlan": "plan",
    "PlanError": "errors",
    "adapt_mem_func_wrapper": "plan.op_facts",
    "apply": "apply",
    "load_config": "config",
    "load_plan": "plan",
    "op_hook": "planner",
    "model_structure": "plan",
    "prepare": "integrations",
    "resolve_plan": "plan",
    "stage_from_config": "integrations",
    "stage_from_pretrained": "integrations",
    "with_actswap": "integrations",
}
"""The module that defines each public name."""

_PACKAGES = ("config", "engine", "errors", "integrations", "parallel", "plan", "planner", "report")
"""Modules that are attributes of this package after ``import hf_actswap``, as in ``hf_actswap.parallel``."""


if not TYPE_CHECKING:  # a type checker that saw this function would accept any name as an attribute

    def __getattr__(name: str) -> Any:
        """Import a public name, or one of `_PACKAGES`, and store it as an attribute of this package.

        Libraries behind it (rich) draw from Python's generator, which goes on as if nothing had been drawn.
        """
        if name not in _MODULES and name not in _PACKAGES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        before = random.getstate()
        try:
            module = import_module(f".{_MODULES.get(name, name)}", __name__)
        finally:
            random.setstate(before)
        value = getattr(module, name) if name in _MODULES else module
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


class _Package(ModuleType):
    """Class of this package's module object: ``hf_actswap.apply`` stays the function, never the module.

    After an import Python sets a submodule as an attribute of its package. For public names that is ignored.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
