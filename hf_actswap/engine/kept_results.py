"""Kept ops inside a recomputed region: when the region runs again, they do not run; their results are reused.

Inside a recomputed module an op may be kept or swapped: an exclude key, a communication whose result is kept,
a row of a plan. When the module runs again, such an op does not. Its result is returned in its place. Inputs
that it saved for backward are taken from its inputs in this run; all other tensors that it saved are kept or
swapped, and not rebuilt by the region.

A kept *module* in which nothing is recomputed is skipped as a whole: nothing inside it runs, and only the
module's own output is held. A kept *function* is skipped alone. The result of either is held if the region
must rebuild something that comes after it, and only until that is rebuilt. A result that autograd saves
anyway costs nothing; any other is held in addition, as in MindFormers (`saved_bytes.RecomputedModules`).

An op may be several functions, as eager attention is: results that only its own functions read are not held.

If anything is not as it was in forward (how many tensors were saved so far, the shapes of the arguments, a
result that was written since), the op runs again, and all others too if it cannot run alone. Gradients are
never wrong; it only costs more. An op that returns a view always runs again: it has no result of its own.

One call of an op that a region keeps: how its result comes back when the region runs again.

`kept_results` uses this. A record of a call has: how many tensors the region had saved before it and after
it, the geometry of its arguments, which tensors it saved that the region must rebuild (views of its
arguments: all others that it saves are kept), what it returned, and the random state after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..plan.op_facts import COMMUNICATIONS
from ..plan.opnames import function_name
from ..plan.record import storage_key
from ..plan.wrappers import is_compiled
from .hook_wrappers import replace_forward
from .replay import RandomState, random_state, same_random_state, set_random_state
from .tickets import StaleTensorError, Ticket, View, restore

TicketOf = Callable[[torch.Tensor], Ticket]

RUN = object()
"""Returned in place of a result: the op must run."""


class ReplayMismatch(Exception):
    """A region does not do what it did in forward; every op of it must run."""


_CONSTANTS = (int, float, bool, str, type(None))

_Geometry = tuple[torch.Size, tuple[int, ...] | None, torch.dtype]


class Catches(Protocol):
    """Receives the saved tensors, in order, while a region runs again.

    Attributes:
        count: how many were saved so far; the number of the next one.
    """

    count: int

    def pack(self, tensor: torch.Tensor) -> int:
        """Take the next saved tensor; return its number."""


@dataclass(frozen=True)
class _ArgumentView:
    """A saved tensor that is a view of argument ``at``; the view's offset counts from the argument's."""

    at: int
    view: View

    def of(self, leaves: Sequence[Any]) -> torch.Tensor:
        argument: torch.Tensor = leaves[self.at]
        offset = int(argument.storage_offset()) + self.view.offset_bytes // argument.element_size()
        return argument.detach().as_strided(self.view.shape, self.view.stride, offset)


class Result:
    """One tensor that a kept call returned.

    First it holds the tensor itself, because it is not known yet whether it is needed; then a ticket, or
    nothing. If only functions of the same op read it (the scores of eager attention) it is *inner*: these do
    not run again either, and get a tensor of its geometry on ``meta``.
    """

    __slots__ = ("_outside", "_requires_grad", "_tensor", "_ticket", "_version", "_view", "inner", "written")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._ticket: Ticket | None = None
        self._view, self._requires_grad = View.of(tensor), tensor.requires_grad
        self._version = tensor._version
        self.inner = self.written = self._outside = False

    def hold(self, ticket_of: TicketOf) -> None:
        """Hold the tensor by a ticket, because the region needs it to run again."""
        if self._tensor is not None:
            self.check_version(self._tensor)
        if self._tensor is not None and not self.written:
            self._ticket, self._tensor = ticket_of(self._tensor), None

    def check_version(self, tensor: torch.Tensor) -> None:
        """Drop the result if ``tensor``, a view of it, shows that it was written since it was returned."""
        if tensor._version != self._version:
            self.written = True
            self.drop()

    def drop(self) -> None:
        """Hold the tensor no longer."""
        self._ticket = self._tensor = None

    def read_inside(self) -> None:
        """Note that another function of the same op has read it, which does not run again either."""
        if not self._outside:
            self.drop()
            self.inner = True

    def read_outside(self, tensor: torch.Tensor) -> None:
        """Note that an op that may run again reads it, as ``tensor``, a view of the same storage."""
        if self.inner:
            offset = self._view.offset_bytes // self._view.dtype.itemsize
            self._tensor = tensor.detach().as_strided(self._view.shape, self._view.stride, offset)
        self.inner, self._outside = False, True

    def again(self) -> torch.Tensor | None:
        """Return the tensor for a new run; ``None`` if it is not held."""
        if self.inner:
            shape, stride = self._view.shape, self._view.stride
            found = torch.empty_strided(shape, stride, dtype=self._view.dtype, device="meta")
        elif self._ticket is not None:
            found = restore(self._ticket).detach()
        else:
            return None
        return found.requires_grad_(self._requires_grad)


class KeptCall:
    """The record of one call of a kept function or module; made when the call begins.

    Args:
        arguments: tree of its arguments.
        first_pack: how many tensors the region has saved before it.
        device: where it computes.
        random: whether it may draw random numbers.
    """

    def __init__(self, arguments: Any, first_pack: int, device: torch.device, random: bool) -> None:
        self._leaves = tree_leaves(arguments)
        self._geometry = [_geometry(leaf) for leaf in self._leaves]
        self._first_pack = first_pack
        self._device = device
        self._random: RandomState | None = random_state(device) if random else None
        self._repeatable = not any(isinstance(leaf, torch.Generator) for leaf in self._leaves)
        self._shown: dict[int, _ArgumentView] = {}
        self._returned: list[Any] = []
        self._spec: TreeSpec | None = None
        self.returned_only_views = False
        """Whether it has returned nothing but views of its arguments."""
        self.after = first_pack
        """How many tensors the region has saved when it returns."""
        self.functions: Counter[str] = Counter()
        """How often each function was called inside it."""

    def saved(self, index: int, tensor: torch.Tensor) -> None:
        """Record that it saves tensor ``index``, which the region must rebuild, as a view of an argument."""
        key, view = storage_key(tensor), View.of(tensor)
        start, stop = view.range_bytes
        for at, leaf in enumerate(self._leaves):
            if not isinstance(leaf, torch.Tensor) or leaf.dtype != tensor.dtype or storage_key(leaf) != key:
                continue
            whole = View.of(leaf)
            first, last = whole.range_bytes
            if first <= start and stop <= last:
                self._shown[index] = _ArgumentView(
                    at, view._replace(offset_bytes=view.offset_bytes - whole.offset_bytes)
                )
                return
        self._repeatable = False  # it saved a tensor that is no view of an argument

    def returned(self, value: Any, after: int) -> bool:
        """Record that it has returned ``value``; return whether that can replace the call.

        It cannot if it has a view of an argument, or an item that is neither a tensor nor a constant.
        """
        read = {storage_key(leaf) for leaf in self._leaves if isinstance(leaf, torch.Tensor)}
        self._leaves, self.after = [], after
        leaves, self._spec = tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        views = [storage_key(tensor) in read for tensor in tensors]
        self.returned_only_views = all(views)
        if not self._repeatable or not tensors or any(views):
            return False
        if not all(isinstance(leaf, (torch.Tensor, *_CONSTANTS)) for leaf in leaves):
            return False
        self._returned = [Result(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if self._random is not None:
            before, self._random = self._random, random_state(self._device)
            if same_random_state(before, self._random):
                self._random = None
        return True

    @property
    def results(self) -> list[Result]:
        """The tensors that it returned."""
        return [item for item in self._returned if isinstance(item, Result)]

    def again(self, arguments: Any, catcher: Catches) -> Any:
        """Return the recorded result and pass the saved tensors to ``catcher``; or return `RUN`.

        Raises:
            ReplayMismatch: it must run but earlier calls gave it ``meta`` tensors, or its result is not held.
        """
        leaves = tree_leaves(arguments)
        if catcher.count != self._first_pack or [_geometry(leaf) for leaf in leaves] != self._geometry:
            return _run(leaves)
        if any(result.written for result in self.results):
            return _run(leaves)
        try:
            returned = [item.again() if isinstance(item, Result) else item for item in self._returned]
        except StaleTensorError:
            return _run(leaves)
        for index, shown in sorted(self._shown.items()):
            catcher.count = index
            catcher.pack(shown.of(leaves))
        catcher.count = self.after
        wanted = zip(self._returned, returned, strict=True)
        if self._spec is None or any(isinstance(item, Result) and found is None for item, found in wanted):
            raise ReplayMismatch  # in forward nothing after it was needed
        if self._random is not None:
            set_random_state(self._random)
        return tree_unflatten(returned, self._spec)


def _run(leaves: list[Any]) -> Any:
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
        raise ReplayMismatch
    return RUN


def _geometry(leaf: Any) -> _Geometry | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    plain = leaf.layout is torch.strided and not leaf.is_nested
    return leaf.shape, leaf.stride() if plain else None, leaf.dtype


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
