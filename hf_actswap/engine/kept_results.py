"""Kept ops inside a recomputed region: when the region runs again, they do not run; their results are reused.

Inside a recomputed module an op may be kept or swapped: an exclude key, a communication whose result is kept,
a row of a plan. When the module runs again, such an op does not. Its result is returned in its place. Inputs
that it saved for backward are taken from its inputs in this run; all other tensors that it saved are kept or
swapped, and not rebuilt by the region.

A kept *module* in which nothing is recomputed is skipped as a whole: nothing inside it runs, and only the
module's own output is held. A kept *function* is skipped alone. The result of either is held if the region
must rebuild something that comes after it, and only until that is rebuilt. A result that autograd saves
anyway costs nothing; any other is held in addition, as in MindFormers (`recomputed_modules`).

An op may be several functions, as eager attention is: results that only its own functions read are not held.

If anything is not as it was in forward (how many tensors were saved so far, the shapes of the arguments, a
result that was written since), the op runs again, and all others too if it cannot run alone. Gradients are
never wrong; it only costs more. An op that returns a view always runs again: it has no result of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..plan.compiled import is_compiled
from ..plan.op_facts import COMMUNICATIONS
from ..plan.opnames import function_name
from ..plan.record import storage_key
from .hook_wrappers import replace_forward
from .kept_calls import RUN, Catches, KeptCall, Result, TicketOf

_Functions = dict[tuple[str, int], KeptCall]
"""By name of the function and number of its call in the region."""
_Modules = dict[tuple[nn.Module, int], KeptCall]


class KeptResults:
    """Records the calls of kept ops in one region, and returns their results when it runs again.

    Args:
        ticket_of: makes the ticket of a result, by the fate of the op that produced it.
        device: where the region computes.
    """

    def __init__(self, ticket_of: TicketOf, device: torch.device) -> None:
        self._ticket_of: TicketOf | None = ticket_of
        self._device = device
        self._seen: Counter[str] = Counter()
        self._entered: Counter[nn.Module] = Counter()
        self._function: KeptCall | None = None
        self._module: tuple[nn.Module, KeptCall, Counter[str]] | None = None
        self._read: list[Result] = []
        self._observed: list[tuple[Result, torch.Tensor]] = []
        self._functions: _Functions = {}
        self._modules: _Modules = {}
        self._unheld: list[Result] = []
        self._made: dict[int, tuple[StorageWeakRef, Result, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._functions or self._modules)

    def on_call(self, name: str, path: str, arguments: Any, packs: int, kept: bool, random: bool) -> None:
        """Note that a function is called in the region.

        Args:
            name, path: name of the function, and op path.
            arguments: tree of its arguments.
            packs: how many tensors the region has saved so far.
            kept: whether its op is not recomputed.
            random: whether it may draw random numbers.
        """
        self._seen[name] += 1
        # In a module that is skipped as a whole only communications are held, in case it must run after all.
        alone = kept and (self._module is None or name in COMMUNICATIONS)
        self._function = KeptCall(arguments, packs, self._device, random) if alone else None
        self._read = self._reads(arguments, path if alone else None)

    def on_return(self, name: str, path: str, result: Any, packs: int) -> None:
        """Note that the function that was called last has returned ``result``."""
        call, self._function = self._function, None
        read, self._read = self._read, []
        observed, self._observed = self._observed, []
        for known, tensor in observed:
            known.check_version(tensor)
        if call is None:
            return
        if not call.returned(result, packs):
            for known, tensor in observed if not call.returned_only_views else ():
                self._read_outside(known, tensor)
            return
        for inner in read:
            inner.read_inside()
        self._unheld = [other for other in self._unheld if not other.inner]
        self._functions[name, self._seen[name] - 1] = call
        self._has(call, result, path)

    def on_module_call(self, module: nn.Module, arguments: Any, packs: int) -> None:
        """Note the call of a module in which everything is kept."""
        if self._module is not None or is_compiled(module):
            return
        with torch._C.DisableTorchFunction():
            call = KeptCall(arguments, packs, self._device, random=True)
            self._reads(arguments, None)
        self._module = module, call, self._seen.copy()

    def on_module_return(self, module: nn.Module, output: Any, packs: int) -> None:
        """Note that a module has returned ``output``."""
        if self._module is None or self._module[0] is not module:
            return
        (_, call, before), self._module = self._module, None
        number = self._entered[module]
        self._entered[module] += 1
        with torch._C.DisableTorchFunction():
            if not call.returned(output, packs):
                return
            call.functions = self._seen - before
            inside = [self._functions.pop(key) for key in list(self._functions) if key[1] >= before[key[0]]]
            gone = [result for other in inside for result in other.results]
            self._unheld = [other for other in self._unheld if other not in gone]
            self._modules[module, number] = call
            self._has(call, output, "")

    def saved(self, index: int, tensor: torch.Tensor) -> None:
        """Note that the region must rebuild saved tensor ``index``: all results before it are needed.

        Results that the running function reads are decided when it has returned: they may be inner ones.
        """
        for running in (self._function, self._module[1] if self._module is not None else None):
            if running is not None:
                running.saved(index, tensor)
        unheld, self._unheld = self._unheld, [other for other in self._unheld if other in self._read]
        for result in unheld:
            if self._ticket_of is not None and result not in self._read:
                result.hold(self._ticket_of)

    def close(self) -> None:
        """End the region's forward: results without a ticket are not needed, and are dropped."""
        self._ticket_of = self._function = self._module = None
        for result in self._unheld:
            result.drop()
        self._unheld, self._read, self._observed = [], [], []
        self._made.clear()

    def drop_after(self, last: int) -> None:
        """Drop results of calls after saved tensor ``last``, the last one that may have to be rebuilt."""
        for call in (*self._functions.values(), *self._modules.values()):
            if call.after > last:
                for result in call.results:
                    result.drop()

    def _has(self, call: KeptCall, value: Any, path: str) -> None:
        """Remember the results of a call, by storage."""
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        for result, tensor in zip(call.results, tensors, strict=True):
            self._unheld.append(result)
            key = storage_key(tensor)
            if key is not None:
                self._made[key] = StorageWeakRef(tensor.untyped_storage()), result, path

    def _reads(self, arguments: Any, path: str | None) -> list[Result]:
        """Return the results among ``arguments`` that the op at ``path`` made; all others are needed."""
        own = []
        self._observed = []
        for leaf in tree_leaves(arguments) if self._made else ():
            if isinstance(leaf, torch.Tensor) and (known := self._made.get(storage_key(leaf) or 0)):
                _, result, maker = known
                self._observed.append((result, leaf))
                if maker == path:
                    own.append(result)
                    continue
                self._read_outside(result, leaf)
        return own

    def _read_outside(self, result: Result, tensor: torch.Tensor) -> None:
        if result.inner:
            self._unheld.append(result)
        result.read_outside(tensor)

    @contextmanager
    def replayed(self, catcher: Catches) -> Iterator[None]:
        """Within the block, in which the region runs again, calls of kept ops return their results."""
        with ExitStack() as stack:
            if self:
                replay = stack.enter_context(_Replay(self._functions, self._modules, catcher))
                for module in {module for module, _ in self._modules}:
                    stack.callback(replace_forward(module, partial(replay.module, module, module.forward)))
            yield


class _Replay(TorchFunctionMode):
    """Function mode that returns recorded results while a region runs again."""

    def __init__(self, functions: _Functions, modules: _Modules, catcher: Catches) -> None:
        super().__init__()
        self._functions, self._modules, self._catcher = functions, modules, catcher
        self._seen: Counter[str] = Counter()
        self._entered: Counter[nn.Module] = Counter()

    def module(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replace the forward of a kept module: return its recorded result, or run ``forward``."""
        call = self._modules.get((module, self._entered[module]))
        self._entered[module] += 1
        if call is not None:
            with torch._C.DisableTorchFunction():
                result = call.again((args, kwargs), self._catcher)
            if result is not RUN:
                self._seen.update(call.functions)
                return result
        return forward(*args, **kwargs)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs) if kwargs else {}
        name = function_name(func)
        if name is not None:
            call = self._functions.get((name, self._seen[name]))
            self._seen[name] += 1
            if call is not None and (result := call.again((args, named), self._catcher)) is not RUN:
                return result
        return func(*args, **named)
