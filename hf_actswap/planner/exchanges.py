"""Whether a forward communicates with other ranks: one that does not is this rank's alone, to run twice.

Three things are asked, each of which knows what the others cannot:

* the **modules**: FSDP2 gathers weights inside, and its state is between two stages after an exception;
* the **ops** of the first forward: communication in forward passes the dispatcher, point to point included;
* the **numbers of the process groups** before and after an attempt: each collective raises one, also those
  inside compiled regions and those that only some forwards run.

DistributedDataParallel spreads buffers before the forward of the model inside it, and reduces gradients in
backward. Kernels of an extension that reach other devices by themselves are not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..engine.agreement import world_size
from ..plan.fsdp2 import FSDP2_METHOD
from .meter import runs_its_own_dispatch
from .rescue.op_traits import communicates

SHARDED = "FSDP2 gathers weights inside it, and the other ranks have done their part"
COMMUNICATES = "it communicates, and the other ranks have done their part"


class Exchanges:
    """See the module's text.

    Args:
        model: whose forwards they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inside: str | None = None
        self._known = False

    def learned_from(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``; the first forward among several ranks is watched while it runs."""
        if self._known or world_size() == 1:
            return call

        def watched(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
                return call(*args, **kwargs)  # what only records shapes communicates nothing
            with _Watch() as watch:
                result = call(*args, **kwargs)
            sharded = any(hasattr(type(module), FSDP2_METHOD) for module in self._model.modules())
            self._inside = SHARDED if sharded else COMMUNICATES if watch.seen else None
            self._known = True
            return result

        return watched

    def mark(self) -> tuple[int, ...] | None:
        """Return how many collectives each process group has run so far; ``None``: nobody says."""
        if world_size() == 1:
            return ()
        groups = getattr(dist.distributed_c10d._world, "pg_map", None)
        if groups is None:
            return None
        try:
            return tuple(group._get_sequence_number_for_group() for group in groups)
        except (AttributeError, RuntimeError):  # a backend that does not count
            return None

    def why_not_alone(self, mark: tuple[int, ...] | None) -> str | None:
        """Return why a forward cannot be run again by this rank alone; ``None``: it can.

        Args:
            mark: from ahead of it.
        """
        if world_size() == 1:
            return None
        if not self._known:
            return "no forward has been seen so far, and other ranks may have done their part"
        if self._inside is not None:
            return self._inside
        return COMMUNICATES if mark is None or mark != self.mark() else None


class _Watch(TorchDispatchMode):
    """Notes whether an op communicates."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled, as under `OomGuard`."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if types and runs_its_own_dispatch(types):
            return NotImplemented
        self.seen = self.seen or communicates(func)
        return func(*args, **(kwargs or {}))
