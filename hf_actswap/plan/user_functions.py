"""A custom ``autograd.Function`` as an op with a name of its own.

No ``TorchFunctionMode`` sees ``Function.apply``, so the tensors that it saves count as those of the module
that calls it, and have the module's fate. A function that is called by `adapt_mem_func_wrapper` is an op like
any other, ``<module path>.<class name>``: a plan can keep, swap or recompute it alone, and a profile times
it. Name and arguments are MindSpeed's (Adaptive Memory Optimization, "torch.autograd.Function").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function


@dataclass(frozen=True)
class UserFunction:
    """The call that a function mode sees instead of ``function.apply``; it may draw random numbers.

    Args:
        function: a subclass of ``torch.autograd.Function``.
    """

    function: Any

    @property
    def __name__(self) -> str:
        """Name of the op: that of the class."""
        name: str = self.function.__name__
        return name

    def __call__(self, *args: Any) -> Any:
        """Apply the function."""
        return adapt_mem_func_wrapper(self.function, *args)


def adapt_mem_func_wrapper(function: Any, *args: Any) -> Any:
    """Return ``function.apply(*args)``, as an op with the name of ``function`` (`torch.autograd.Function`).

    Results and graph are the same as without it. Functions that are applied directly work too; they are then
    a part of the module that applies them.

    Args:
        function: a subclass of ``torch.autograd.Function``. If it is recomputed, its forward runs again with
            the random numbers of the first time.
        args: arguments of its ``forward``.
    """
    tensors = tuple(item for item in args if isinstance(item, torch.Tensor))
    if has_torch_function(tensors):
        return handle_torch_function(UserFunction(function), tensors, *args)
    return function.apply(*args)
