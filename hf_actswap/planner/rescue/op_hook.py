"""A context manager that shows the planner extension ops which no dispatch mode sees."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch

from .out_of_memory import failure_of

NAMESPACE = "hf_actswap"


def _nothing(*_: Any) -> None:
    """Do nothing: the kernel of both marks, on every device and in tracing."""


def _register(mark: str, signature: str) -> Any:
    name = f"{NAMESPACE}::{mark}"
    torch.library.define(name, signature)
    torch.library.impl(name, "CompositeExplicitAutograd", _nothing)
    torch.library.register_fake(name, _nothing)
    return getattr(getattr(torch.ops, NAMESPACE), mark).default


_op_begin = _register("op_begin", "(str name, int call, Tensor[] inputs) -> ()")
_op_end = _register("op_end", "(int call, Tensor[] outputs, bool out_of_memory, int wanted_bytes) -> ()")


class op_hook:  # read as a verb, like `torch.no_grad`
    """Marks begin and end of an extension op that nothing else sees, so that the planner can see it.

    A custom C++ or Triton op does not pass the dispatcher: no dispatch mode learns that it runs, or of its
    memory. This context manager tells them with two marks, which are ops that do nothing: every dispatch mode
    sees them, on every thread that it reaches:

    ```python
    with op_hook("gmm_forward", inputs=(x, weight)) as hook:
        y = extension.gmm(x, weight)
        hook.outputs(y)
    ```

    Under an `OomGuard`, memory is freed before the op: as much as its last call with inputs of these sizes
    turned out to need. Inputs stay on the device until the end, because the hook holds them, and the guard
    evicts nothing that is held. Without a guard the marks cost some microseconds. An autograd function needs
    no hook: saved-tensor hooks see what it saves, and dispatch modes see the ops in its forward and backward.

    Args:
        name: name of the op; calls with the same name and input sizes are assumed to be alike.
        inputs: tensors that the op reads.
        outputs: existing tensors into which the op writes.
    """

    __slots__ = ("_call", "_inputs", "_name", "_outputs")

    def __init__(
        self, name: str, inputs: Iterable[torch.Tensor] = (), outputs: Iterable[torch.Tensor] = ()
    ) -> None:
        self._name, self._inputs = name, list(inputs)
        self._outputs, self._call = list(outputs), 0
        if self._outputs:
            self._inputs += self._outputs  # they exist already
            self._outputs = []

    def outputs(self, *tensors: torch.Tensor) -> None:
        """Tell which tensors the op has made."""
        self._outputs += tensors

    def __enter__(self) -> op_hook:
        self._call = id(self)
        _op_begin(self._name, self._call, self._inputs)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = None if error is None else failure_of(error)
        wanted_bytes = 0 if failure is None else failure.wanted_bytes or 0
        _op_end(self._call, self._outputs, failure is not None, wanted_bytes)
        self._inputs, self._outputs = [], []
