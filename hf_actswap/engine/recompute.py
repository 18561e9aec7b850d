"""Recomputation: a region runs again in backward, and hooks collect the tensors that it saves.

A **region** is one call of a module or of a function. Its saved tensors get `RegionTicket`s, numbered in the
order in which autograd packed them. The first ticket that is read runs the region again with the same
inputs, autocast state and random state, under hooks that catch the packed tensors by number; the run stops
as soon as the last one needed is there. Each caught tensor is handed out once per backward and then
dropped; a second backward (``retain_graph``) runs the region again.

A recomputed *module* keeps its output. A recomputed *function* drops it: the consumers of its output get
`OutputTicket`s that run the function again. Its inputs are tickets too, so a chain of functions is rebuilt
step by step. A region is run again exactly as it ran, so gradients are bitwise equal.

Layers that are recomputed whole use ``torch.utils.checkpoint`` instead (`hooks.checkpointed`). Its hooks are
inside ours and take precedence, so a layer in which some op is excluded from recomputation is a region.

**Kept ops inside a region.** An op inside a recomputed module may be kept or swapped: an exclude key, a
communication whose result is kept, a row of a plan. When the module runs again, such an op does not: its
result is returned in its place. Inputs that it saved for backward are taken from its inputs in this run; all
other tensors that it saved are kept or swapped, and not rebuilt by the region.

A kept *module* in which nothing is recomputed is skipped as a whole, and only its own output is held. A kept
*function* is skipped alone. The result of either is held if the region must rebuild something that comes
after it, and only until that is rebuilt. A result that autograd saves anyway costs nothing; any other is held
in addition, as in MindFormers (`saved_bytes.RecomputedModules`). An op may be several functions, as eager
attention is: results that only its own functions read are not held.

If anything is not as it was in forward (how many tensors were saved so far, the shapes of the arguments, a
result that was written since), the op runs again, and all others too if it cannot run alone. Gradients are
never wrong; it only costs more. An op that returns a view always runs again: it has no result of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..plan.op_facts import COMMUNICATIONS
from ..plan.opnames import function_name
from ..plan.record import storage_key
from ..plan.wrappers import is_compiled
from .call_state import CallState, RandomState, random_state, same_random_state, set_random_state
from .hook_wrappers import replace_forward
from .module_state import CalledModule
from .stats import Counters
from .tickets import Kept, StaleTensorError, SwapGroup, Ticket, View, keep, restore
from .transfer import profiler_is_on, profiler_range
from .verify import SAME, Compare, ComparedRuns, Expect, RecomputeError, SavedForm

TicketOf = Callable[[torch.Tensor], Ticket]

RUN = object()
"""Returned in place of a result: the op must run."""


class ReplayMismatch(Exception):
    """A region does not do what it did in forward; every op of it must run."""


_CONSTANTS = (int, float, bool, str, type(None))

_Geometry = tuple[torch.Size, tuple[int, ...] | None, torch.dtype]


class Result:
    """One tensor that a kept call returned.

    It is held itself until it is known whether it is needed; then by a ticket, or not at all. If only
    functions of the same op read it (the scores of eager attention) it is *inner*: these do not run again
    either, and get a tensor of its geometry on ``meta``.
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
        self._ticket = self._tensor = None

    def read_inside(self) -> None:
        """Note that another function of the same op has read it."""
        if not self._outside:
            self.drop()
            self.inner = True

    def read_outside(self, tensor: torch.Tensor) -> None:
        """Note that an op that may run again reads ``tensor``, which is on its storage."""
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
        first_pack: how many tensors the region has saved before it.
        random: whether it may draw random numbers.

    Attributes:
        returned_only_views: whether it has returned nothing but views of its arguments.
        after: how many tensors the region has saved when it returns.
        functions: how often each function was called inside it.
    """

    def __init__(self, arguments: Any, first_pack: int, device: torch.device, random: bool) -> None:
        self._leaves = tree_leaves(arguments)
        self._geometry = [_geometry(leaf) for leaf in self._leaves]
        self._first_pack = self.after = first_pack
        self._device = device
        self._random: RandomState | None = random_state(device) if random else None
        self._repeatable = not any(isinstance(leaf, torch.Generator) for leaf in self._leaves)
        # Saved tensors that the region must rebuild: argument, and view of it (offset from the argument's).
        self._shown: dict[int, tuple[int, View]] = {}
        self._returned: list[Any] = []
        self._spec: TreeSpec | None = None
        self.returned_only_views = False
        self.functions: Counter[str] = Counter()

    def saved(self, index: int, tensor: torch.Tensor) -> None:
        """Record that it saves tensor ``index``, which the region must rebuild."""
        key, view = storage_key(tensor), View.of(tensor)
        start, stop = view.range_bytes
        for at, leaf in enumerate(self._leaves):
            if not isinstance(leaf, torch.Tensor) or leaf.dtype != tensor.dtype or storage_key(leaf) != key:
                continue
            whole = View.of(leaf)
            first, last = whole.range_bytes
            if first <= start and stop <= last:
                self._shown[index] = at, view._replace(offset_bytes=view.offset_bytes - whole.offset_bytes)
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
        return [item for item in self._returned if isinstance(item, Result)]

    def again(self, arguments: Any, catcher: Catcher) -> Any:
        """Return the recorded result and pass the saved tensors to ``catcher``; or return `RUN`.

        `ReplayMismatch`: it must run but earlier calls gave it ``meta`` tensors, or its result is not held.
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
        for index, (at, view) in sorted(self._shown.items()):
            offset = leaves[at].storage_offset() + view.offset_bytes // view.dtype.itemsize
            catcher.count = index
            catcher.pack(leaves[at].detach().as_strided(view.shape, view.stride, offset))
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
_Modules = dict[tuple[nn.Module, int], KeptCall]
"""By function or module, and number of its call in the region."""


class KeptResults:
    """Records the calls of kept ops in one region, and returns their results when it runs again."""

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
        """Note that a function is called in the region, which has saved ``packs`` tensors so far.

        Its op, at ``path``, may be ``kept``, that is not recomputed; ``random``: it may draw random numbers.
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
        for result, tensor in zip(call.results, tensors_in(value), strict=True):
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
    def replayed(self, catcher: Catcher) -> Iterator[None]:
        """Within the block, in which the region runs again, calls of kept ops return their results."""
        with ExitStack() as stack:
            if self:
                replay = stack.enter_context(_Replay(self._functions, self._modules, catcher))
                for module in {module for module, _ in self._modules}:
                    stack.callback(replace_forward(module, partial(replay.module, module, module.forward)))
            yield


class _Replay(TorchFunctionMode):
    """Function mode that returns recorded results while a region runs again."""

    def __init__(self, functions: _Functions, modules: _Modules, catcher: Catcher) -> None:
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


class AllCaught(Exception):
    """Raised to end a recomputation early, once all needed tensors are there."""


class Catcher:
    """Saved-tensor hooks of one recomputation. They number the saved tensors and hold those in ``expected``.

    ``expected`` says by number what they were in forward; ``early``: raise `AllCaught` once all are there;
    ``see``: what is called with each saved tensor and its number.
    """

    def __init__(
        self,
        name: str,
        expected: Mapping[int, SavedForm],
        early: bool,
        see: Callable[[torch.Tensor, int], None] | None = None,
    ) -> None:
        self._name, self._expected, self._early, self._see = name, expected, early, see
        self.count = 0
        self.caught: dict[int, Kept] = {}

    def pack(self, tensor: torch.Tensor) -> int:
        index = self.count
        self.count += 1
        if self._see is not None:
            self._see(tensor, index)
        if index in self._expected:
            self._expected[index].check(tensor, self._name, index)
            self.caught[index] = keep(tensor.detach())
            if self._early and len(self.caught) == len(self._expected):
                raise AllCaught
        return index

    def complete(self) -> dict[int, Kept]:
        if missing := [index for index in self._expected if index not in self.caught]:
            raise RecomputeError(
                f"{self._name}: run again, it saved {self.count} tensors and not number {missing[0]}; {SAME}"
            )
        return self.caught

    def unpack(self, index: int) -> torch.Tensor:
        raise RecomputeError(
            f"{self._name}: a recomputation has no backward of its own (saved tensor {index})"
        )


class Region:
    """One call of a module or function that can be run again.

    Args:
        ticket_of: makes the ticket of a tensor that the region reads, at present; ``input_ticket_of``: that
            of one of its arguments, as if made now.
        random: whether the random state must be restored.
        keeps: whether ops inside are kept or swapped, so that they are not run again.
        called: what the call reads beside its arguments; ``None``: nothing (a function).
        expect: `Verifier.of_call` of this call, of a function.
        compared: what compares the runs of a module.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ticket_of: TicketOf,
        input_ticket_of: TicketOf,
        counters: Counters,
        random: bool,
        keeps: bool = False,
        called: CalledModule | None = None,
        expect: Expect | None = None,
        compared: ComparedRuns | None = None,
    ) -> None:
        self._expect, self.compared = expect, compared
        self.name, self.function, self.called = name, run, called
        self.packs = 0
        self.input_groups: list[SwapGroup] = []
        self._counters = counters
        leaves, self._spec = _flattened(args, kwargs)
        self.leaves, self._ticket_of = leaves, input_ticket_of
        self._holds_inputs = False
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
        self.state = CallState(device, random, leaves)
        self.expected: dict[int, SavedForm] = {}
        self._caught: dict[int, Kept] = {}
        self._outputs: dict[int, _Output] = {}
        self._versions: dict[int, int] = {}
        self.kept = KeptResults(ticket_of, device) if keeps else None

    def saved(self, tensor: torch.Tensor, follows: bool) -> RegionTicket:
        """Make the ticket of the tensor packed last; ``follows`` as of `output`."""
        self._hold_inputs()
        index = self.packs - 1
        expect = None if follows and self.called is None else self._expect
        self.expected[index] = SavedForm.of(tensor, expect)
        if self.kept is not None:
            self.kept.saved(index, tensor)
        return RegionTicket(self, index)

    def close(self) -> None:
        """Note that the call has ended in forward."""
        if self.called is not None:
            self.called.ends()
        if self.kept is not None:
            self.kept.close()
        if self.compared is not None:
            self.compared.forward_ends()

    def _hold_inputs(self) -> None:
        """Make tickets of the arguments, once there is something that may need them.

        A call that saves nothing and returns what it was given (a cast to the type that a tensor has) needs
        none: a copy to the host would be made for nothing, and once more for the next reader.
        """
        if self._holds_inputs:
            return
        self._holds_inputs = True
        self.leaves = [
            _Input(self._ticket_of(leaf), leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in self.leaves
        ]

    def returned(self, position: int, tensor: torch.Tensor) -> None:
        self._hold_inputs()
        self._versions[position] = tensor._version

    def output(self, position: int, tensor: torch.Tensor, follows: bool) -> OutputTicket | None:
        """Make a ticket for a view of an output.

        Args:
            follows: whether it is right if other tensors are: by `Derivations`, or only an operator that
                runs again reads it. What a function rebuilds is not compared then: it is the same function.

        Returns:
            ``None`` if the output was written since it was returned: a new run would return the old one.
        """
        if tensor._version != self._versions.get(position):
            return None
        view = View.of(tensor)
        if position not in self._outputs:
            self._outputs[position] = _Output()
        output = self._outputs[position]
        if self._expect is not None and output.compare is None and not (follows and self.called is None):
            compare = self._expect(tensor)
            output.compare = None if compare is None else (view, compare)
        output.tickets += 1
        return OutputTicket(self, position, view)

    def take_saved(self, index: int) -> torch.Tensor:
        if index not in self._caught:
            self._run_again(outputs=False)
        return restore(self._caught.pop(index))

    def leave_saved(self, index: int) -> None:
        """Note that saved tensor ``index`` will not be read any more."""
        self.expected.pop(index, None)
        self._caught.pop(index, None)
        if self.kept:
            self.kept.drop_after(max(self.expected, default=-1))

    def take_output(self, position: int, ticket: OutputTicket) -> torch.Tensor:
        """Return output ``position``; the last consumer drops it."""
        output = self._outputs[position]
        if output.kept is None:
            self._run_again(outputs=True)
        if output.kept is None:
            raise RecomputeError(f"{self.name}: run again, it did not return tensor {position}")
        tensor = restore(output.kept)
        output.read_by(ticket)
        return tensor

    def leave_output(self, position: int, ticket: OutputTicket) -> None:
        output = self._outputs[position]
        output.tickets -= 1
        output.read_by(ticket)
        if not output.tickets:
            del self._outputs[position]

    def _inputs(self) -> list[Any]:
        try:
            return [
                restore(leaf.ticket).detach().requires_grad_(leaf.requires_grad)
                if isinstance(leaf, _Input)
                else leaf
                for leaf in self.leaves
            ]
        except StaleTensorError as error:
            raise RecomputeError(
                f"{self.name}: a tensor that it was called with was written in place afterwards, so it "
                "cannot be run again; keep it (select_recompute_exclude)"
            ) from error

    def _run_again(self, outputs: bool) -> None:
        named = profiler_is_on()
        with profiler_range("recompute", self.name.replace(".", " ", 1)) if named else nullcontext():
            leaves = self._inputs()
            try:
                caught, result = self._run(leaves, outputs, self.kept)
            except ReplayMismatch:
                caught, result = self._run(leaves, outputs, None)
        self._counters.recomputes += 1
        self._caught.update(caught)
        returned = tensors_in(result)
        for position, output in list(self._outputs.items()):  # a ticket may be freed meanwhile
            if output.kept is None and position < len(returned):
                if output.compare is not None:
                    view, compare = output.compare
                    compare(view.on(returned[position].detach(), 0))
                output.kept, output.unread = keep(returned[position].detach()), output.tickets
                output.runs += 1

    def _run(self, leaves: list[Any], outputs: bool, kept: KeptResults | None) -> tuple[dict[int, Kept], Any]:
        again = None if self.compared is None else self.compared.again()
        early = not (outputs or self._outputs)
        catcher = Catcher(self.name, dict(self.expected), early, None if again is None else again.sees)
        with (
            self.state.restored(),
            self.called.restored() if self.called else nullcontext(),
            kept.replayed(catcher) if kept else nullcontext(),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(catcher.pack, catcher.unpack),
        ):
            try:
                args, kwargs = _put_together(leaves, self._spec)
                result = self.state.run(self.function, *args, **kwargs)
            except AllCaught:
                result = None
        if self.compared is not None and again is not None:
            self.compared.compare(again)
        return catcher.complete(), result


_Flat = tuple[int, tuple[str, ...]]
"""How many of the leaves are positional arguments, and the names of the others."""

_ATOMS = frozenset({torch.Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device})


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], _Flat | TreeSpec]:
    """Return the leaves of the arguments of a call, and what puts them together again.

    Most arguments are flat. A `TreeSpec` of them would be some ten objects that live until backward, and with
    their number Python's garbage collector runs more often.
    """
    leaves = [*args, *kwargs.values()]
    if _ATOMS.issuperset(map(type, leaves)):
        return leaves, (len(args), tuple(kwargs))
    return tree_flatten((args, kwargs))


def _put_together(leaves: list[Any], spec: _Flat | TreeSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(spec, TreeSpec):
        args, kwargs = tree_unflatten(leaves, spec)
        return args, kwargs
    count, names = spec
    return tuple(leaves[:count]), dict(zip(names, leaves[count:], strict=True))


@dataclass(slots=True)
class _Output:
    """An output of a region that is still needed: rebuilt by a run, held until all tickets have read it.

    Args:
        compare: what one of its tickets shows, and what is called with that, once it is rebuilt.
    """

    compare: tuple[View, Compare] | None = None
    tickets: int = 0
    kept: Kept | None = None
    runs: int = 0
    unread: int = 0

    def read_by(self, ticket: OutputTicket) -> None:
        """Note that ``ticket`` has read it, or will never read it."""
        if self.kept is None or ticket.has_read == self.runs:
            return
        ticket.has_read = self.runs
        self.unread -= 1
        if not self.unread:
            self.kept = None


class _Input(NamedTuple):
    ticket: Ticket
    requires_grad: bool


class RegionTicket:
    """The ticket of saved tensor ``index`` of a region."""

    __slots__ = ("_index", "_region")

    def __init__(self, region: Region, index: int) -> None:
        self._region, self._index = region, index

    def restore(self) -> torch.Tensor:
        return self._region.take_saved(self._index)

    def __del__(self) -> None:
        self._region.leave_saved(self._index)


class OutputTicket:
    """The ticket of a view of a tensor that a recomputed function returned."""

    __slots__ = ("has_read", "position", "region", "view")

    def __init__(self, region: Region, position: int, view: View) -> None:
        self.region, self.position, self.view = region, position, view
        self.has_read = 0  # number of the run whose output it read last

    def restore(self) -> torch.Tensor:
        return self.view.on(self.region.take_output(self.position, self), 0)

    def __del__(self) -> None:
        self.region.leave_output(self.position, self)


def tensors_in(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
