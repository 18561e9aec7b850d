"""bitsandbytes on the rehearsed device: its own code allocates and launches, its kernels do nothing.

Its ops get their values from what it has for the CPU, as PyTorch's do. A product with a 4-bit weight makes
the weight anew in half precision by a kernel that is no op of its own: what that moves is told to the clock
here.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .native import Native

_MAKES_A_WEIGHT = "_dequantize_4bit_impl", "_dequantize_blockwise_impl"


def rehearse_kernels(library: ModuleType, native: Native) -> None:
    """Let its ops have values and take time.

    Args:
        library: ``bitsandbytes``, imported.
        native: of this process.
    """
    kernels: Any = sys.modules.get(f"{library.__name__}.backends.cuda.ops")
    if kernels is None:  # PyTorch's CPU build
        return
    for name in _MAKES_A_WEIGHT:
        if made := getattr(kernels, name, None):
            setattr(kernels, name, _told(made, native))
    native.install_ops_of(library.__name__)


def _told(make: Any, native: Native) -> Any:
    def makes(stored: Any, *arguments: Any, out: Any) -> None:
        make(stored, *arguments, out=out)
        native.kernel_moved(out.device.index, stored.nbytes + out.nbytes)

    return makes
