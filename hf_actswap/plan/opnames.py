"""Names the functions that a layer calls: ``<module path>.<function>``.

Modules have names of their own. Functions called between them (``mul`` in an MLP, the attention core) are
seen by a ``TorchFunctionMode`` in call order. This module gives them stable names, which do not depend on the
device or the kernel. The model structure and the engine name ops with the same code, so a path that a plan
accepts is the path that the engine finds.
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
        """Note that a submodule starts."""
        self._in_core = False
        self._modules.append(path)

    def leave(self, path: str) -> None:
        """Note that a submodule ends; submodules inside that an exception left end with it."""
        self._in_core = False
        while self._modules and self._modules.pop() != path:
            pass

    def begin(self, name: str) -> tuple[str, int]:
        """Return the op path of a function that is about to run, and its ordinal within the layer."""
        module = self.module
        if name in COMMUNICATIONS:
            self._in_core = False
        elif module in self._attention and (self._in_core or name in _CORE_STARTS):
            self._in_core = True
            name = ATTENTION_CORE
        path = f"{module}.{name}" if module else name
        return path, self._calls[path]

    def count(self, path: str) -> None:
        """Note that the op that `begin` named has made a new storage: its next call has the next ordinal.

        Calls that return views or write in place are not counted.
        """
        self._calls[path] += 1

    def unseen(self) -> tuple[str, int]:
        """Return the op of a tensor that no visible function made: a custom ``autograd.Function`` did.

        It counts as the module that runs; in an attention module, as its attention core (flash-attention
        packages call such a function).
        """
        module = self.module
        return (f"{module}.{ATTENTION_CORE}" if module in self._attention else module), 0
