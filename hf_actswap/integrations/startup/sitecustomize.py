"""Runs when Python starts under ``hf-actswap run``: its trainings get the plan of ``HF_ACTSWAP``.

Nothing is imported before the program makes a Trainer, or prepares something with Accelerate.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any


def _start_up() -> Any:
    """Load what the start-up files of this package share, by its path: it may not be importable here."""
    path = Path(__file__).parents[2] / "startup.py"
    spec: Any = importlib.util.spec_from_file_location("hf_actswap_startup", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _before_the_first(method: str, of: str, ours: str, act: str) -> Any:
    """Return what makes a module's class import ``ours`` and ``act`` when this method is first called.

    By then the program has patched what it patches.
    """

    def wait(module: ModuleType) -> None:
        owner: Any = getattr(module, of)
        make = getattr(owner, method)

        @functools.wraps(make)
        def make_with_ours(self: Any, *given: Any, **more: Any) -> Any:
            if getattr(owner, method) is make_with_ours:
                setattr(owner, method, make)
                getattr(importlib.import_module(f"hf_actswap.integrations.{ours}"), act)()
            return getattr(owner, method)(self, *given, **more)

        setattr(owner, method, make_with_ours)

    return wait


_startup = _start_up()
_startup.after_imports(
    {
        "transformers.trainer_callback": _before_the_first(
            "__init__", "CallbackHandler", "environment", "act_on_environment"
        ),
        "accelerate.accelerator": _before_the_first(
            "prepare", "Accelerator", "accelerate_loop", "act_on_loops"
        ),
    }
)
_startup.run_the_next(__file__)
