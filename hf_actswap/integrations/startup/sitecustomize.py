"""Runs when Python starts under ``hf-actswap run``: its Trainers get the plan of ``HF_ACTSWAP``.

Nothing is imported before the program imports transformers' callbacks, and makes a Trainer.
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


def _act_on_environment(callbacks: ModuleType) -> None:
    """Import the library when the first Trainer is made: by then the program has patched what it patches."""
    handler: Any = callbacks.CallbackHandler
    make = handler.__init__

    @functools.wraps(make)
    def make_with_ours(self: Any, *given: Any, **more: Any) -> None:
        if handler.__init__ is make_with_ours:
            handler.__init__ = make
            importlib.import_module("hf_actswap.integrations.environment").act_on_environment()
        handler.__init__(self, *given, **more)

    handler.__init__ = make_with_ours


_startup = _start_up()
_startup.after_imports({"transformers.trainer_callback": _act_on_environment})
_startup.run_the_next(__file__)
