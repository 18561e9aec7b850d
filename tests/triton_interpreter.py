"""Liger's kernels on a CPU: Triton interprets them (``TRITON_INTERPRET=1``), with what it does not know."""

from __future__ import annotations

from typing import Any


def teach_the_interpreter() -> None:
    """What Liger's kernels miss in Triton's interpreter (3.9): floats with ``.to``, a root of its own."""
    import numpy
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if isinstance(argument, float):
            value = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
            return tl.tensor(value, tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = lambda x: tl.math.rsqrt(x)  # looked up when it runs: patched only then
