"""Names of ops: what a layer calls, as `<module path>.<function>`.

Modules have names of their own. Functions called between them (``mul`` in an MLP, the attention core) are
seen by a ``TorchFunctionMode`` in call order; this module turns what it sees into stable names that do not
depend on the device or the kernel. The model structure and the engine name ops with the same code, so a path
that a plan accepts is the path that the engine finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .mindformers_names import ATTENTION_CORE
from .op_facts import COMMUNICATIONS

_CORE_STARTS = frozenset(
    {"scaled_dot_product_attention", "matmul", "bmm", "baddbmm", "einsum", "flex_attention", "softmax"}
)
_REFLECTED = {"rmul": "mul", "radd": "add", "rsub": "sub", "rdiv": "div", "truediv": "div", "rtruediv": "div"}
_NOT_OPS = frozenset(
    {"get", "set", "set_name", "size", "stride", "dim", "numel", "len", "is_floating_point", "device"}
)


@lru_cache(maxsize=1024)
def function_name(function: Callable[..., Any]) -> str | None:
    """Return the name of a function that a ``TorchFunctionMode`` saw, or ``None`` if it computes nothing.

    Operators and in-place forms share the name of the function (``x * y``, ``x.mul_(y)``: ``mul``), overloads
    of a registered operator that of the operator (``gemm_4bit.default``: ``gemm_4bit``).
    """
    name = getattr(function, "__name__", "").partition(".")[0]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    name = _REFLECTED.get(name, name).rstrip("_")
    return None if not name or name in _NOT_OPS else name


class OpStack:
    """Follows one call of one layer and names what happens in it.

    Args:
        attention: paths inside the layer of its attention modules. From the first matrix product or softmax
            called directly by such a module until its next submodule or communication runs, everything is its
            attention core.
    """

    def __init__(self, attention: frozenset[str]) -> None:
        self._attention = attention
        self._modules: list[str] = []
        self._in_core = False
        self._calls: Counter[str] = Counter()

    @property
    def module(self) -> str:
        """Path of the innermost running module; ``""`` is the layer itself."""
        return self._modules[-1] if self._modules else ""

    def enter(self, path: str) -> None:
        """A submodule starts."""
        self._in_core = False
        self._modules.append(path)

    def leave(self, path: str) -> None:
        """A submodule ends; submodules that an exception skipped end with it."""
        self._in_core = False
        while self._modules and self._modules.pop() != path:
            pass

    def begin(self, name: str) -> tuple[str, int]:
        """A function is about to run: return its op path and its ordinal within the layer."""
        module = self.module
        if name in COMMUNICATIONS:
            self._in_core = False
        elif module in self._attention and (self._in_core or name in _CORE_STARTS):
            self._in_core = True
            name = ATTENTION_CORE
        path = f"{module}.{name}" if module else name
        return path, self._calls[path]

    def count(self, path: str) -> None:
        """The op that `begin` named produced a storage of its own: the next one has the next ordinal.

        Views and in-place results are looked through, so they do not count.
        """
        self._calls[path] += 1

    def unseen(self) -> tuple[str, int]:
        """Name a tensor that no visible function produced: a custom ``autograd.Function`` of this module did.

        In an attention module that is the attention core (flash-attention packages call one).
        """
        module = self.module
        return (f"{module}.{ATTENTION_CORE}" if module in self._attention else module), 0
