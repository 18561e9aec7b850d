"""Kernels that a program has in triton: launches do nothing and are counted; memory is the program's own."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any


def launch_nothing(jit: ModuleType) -> None:
    """Let launches of kernels do nothing; where all values are to be computed they are an error.

    Args:
        jit: ``triton.runtime.jit``.
    """
    launches: dict[str, int] = {}
    computes_all = ";level=2" in os.environ.get("HF_ACTSWAP_REHEARSAL", "")

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = getattr(self.fn, "__qualname__", str(self.fn))
        if computes_all:
            raise NotImplementedError(f"rehearsal: the triton kernel {name} has no arithmetic")
        for hook in self.pre_run_hooks:
            hook(*arguments, **options)
        launches[name] = launches.get(name, 0) + 1

    jit.JITFunction.run = run
    jit.JITFunction.rehearsed_launches = launches


def tune_nothing(autotuner: ModuleType) -> None:
    """Let tuned kernels take their first configuration, as nothing can be measured.

    Args:
        autotuner: ``triton.runtime.autotuner``.
    """
    original = autotuner.Autotuner.run

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        self.configs = self.configs[:1]
        return original(self, *arguments, **options)

    autotuner.Autotuner.run = run


def launched() -> dict[str, int]:
    """Return the kernels that this process launched -> launches."""
    jit: Any = sys.modules.get("triton.runtime.jit")
    found: dict[str, int] = getattr(getattr(jit, "JITFunction", None), "rehearsed_launches", {})
    return found
