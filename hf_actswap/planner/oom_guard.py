"""Lets ops survive running out of memory: evicts idle tensors to the host, and runs the op again.

The planner's first steps keep everything, because it must be recorded, and may not fit. `OomGuard` is a
dispatch mode: it sees each op of the forward, of the backward (whose threads carry the modes of the thread
that called it) and of the optimizer. An op that runs out of memory is run again once tensors were evicted,
with the same random numbers; so are the reloads of evicted tensors, which are ops too.

Some ops cannot be run again. Memory is freed before them, as far as it is known what they need:

* ops that write into their arguments (in place, ``out=``, foreach, fused optimizers): they may have stopped
  halfway. Most of them allocate nothing. Batch norm writes running statistics without declaring it;
* collectives: the other ranks have done their part;
* all ops while a graph of the accelerator is captured: memory cannot be copied to the host then.

Only ops are seen. `op_hook` marks extension ops, and `guard_compiled` wraps compiled regions, which run
compiled under this mode too. (If `ignore_compile_internals` returned false, the compiler would skip them, and
a function that was skipped once runs eagerly *for ever after*: pytorch#190286.) Not covered is
``storage.resize_`` (FSDP's unsharding), which asks the allocator directly.

An exception's traceback holds the frames that it came through, and these hold tensors (pytorch#18853). So
nothing is evicted or run again inside an ``except`` block, and only the text of the exception is kept
(`Failure`).

`Retry` runs a forward or a micro-batch once more. This is for the stable phase, where no guard watches the
ops, and for warm-up, where the guard had nothing to move but more of the model can run in tiles. Two things
can run again as a whole, with the same random numbers and the guard on, because a failed attempt leaves
nothing behind:

* a **forward**: a function of its inputs, unless it has written into a buffer or an input. One of several
  ranks can run it again alone if nothing communicates inside it (`CommunicationCheck`), as in the model
  inside DistributedDataParallel. The other ranks wait at the next collective;
* a **micro-batch**, forward and backward, if there were no gradients before it: the new ones are dropped. The
  training loop must pass it (`Retry.micro_batch`), since a hook cannot run a backward again.

Otherwise the error says why there is no retry. Gradients of earlier micro-batches cannot be told from those
of a backward that stopped halfway. With several ranks, a backward has reduced some of its gradients when it
stops: the other ranks have added them and would not take part a second time, and the reducer of
DistributedDataParallel waits for the rest. Randomness in the training must come from PyTorch's generators.
"""

from __future__ import annotations

import gc
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ..config.sizes import gib_text
from ..engine.agreement import world_size
from ..engine.call_state import random_state, set_random_state
from ..engine.hook_wrappers import Undo, Wrapper, replace_call, replace_forward
from ..engine.swapped_storages import EvictableTensors
from ..errors import ActSwapError, Problem, short_traceback
from ..plan.dry_run import is_dry
from ..plan.model_structure import unwrapped
from ..plan.op_facts import is_collective, op_may_draw, why_run_once
from ..plan.wrappers import FSDP2_METHOD, is_compiled, uncompiled
from .meter import Meter, StartedMode, runs_its_own_dispatch

logger = logging.getLogger(__name__)

_WANTED = re.compile(r"(?:[Tt]ried to allocate|asks for) ([\d,]+(?:\.\d+)?) (bytes|[KMGT]iB)")
_FREE = re.compile(r"of which ([\d,]+(?:\.\d+)?) (bytes|[KMGT]iB) is free")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_LIBRARY_ERRORS = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
"""Texts of errors of libraries that ask the driver for memory themselves; raised as ``RuntimeError``."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first line of an out-of-memory error, and the bytes asked for (``None``: it does not say).

    ``free_bytes``: what the device had free, beside what the allocator caches.
    """

    text: str
    wanted_bytes: int | None
    free_bytes: int = 0

    @property
    def missing_bytes(self) -> int | None:
        """By how much less memory in use would have done; all that was asked for where that is not known."""
        if self.wanted_bytes is None or self.free_bytes >= self.wanted_bytes:
            return self.wanted_bytes
        return self.wanted_bytes - self.free_bytes


class DeviceMemoryError(torch.OutOfMemoryError, ActSwapError):
    """Device memory ran out, and nothing that the planner can do helps: its text says what would.

    It is an out-of-memory error of PyTorch too, whatever ran out of memory: handlers of those see it.

    Args:
        text: what happened and what would help, with the text of the original error.
        may_run_again: whether a larger part of the step might be run again.
    """

    subject = "device memory"

    def __init__(self, text: str, may_run_again: bool = True) -> None:
        RuntimeError.__init__(self, text)
        self.may_run_again = may_run_again
        self.problems = (Problem("device memory", "enough for the step", "too little", text),)
        self.source = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.args, self.may_run_again)


def attempt(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Failure | None]:
    """Call ``function``; return (result, None) or, if memory ran out, (None, failure). Raise other errors."""
    try:
        return function(*args, **kwargs), None
    except RuntimeError as error:
        failure = failure_of(error)
        if failure is None:
            raise
    return None, failure


def failure_of(error: BaseException) -> Failure | None:
    """Return what an out-of-memory error says; ``None`` for any other error."""
    if not isinstance(error, RuntimeError):
        return None
    text = next(iter(str(error).splitlines()), "")
    if not isinstance(error, torch.OutOfMemoryError) and not any(sign in text for sign in _LIBRARY_ERRORS):
        return None
    return Failure(text, _bytes_in(_WANTED.search(text)), _bytes_in(_FREE.search(text)) or 0)


def _bytes_in(found: re.Match[str] | None) -> int | None:
    return None if found is None else int(float(found[1].replace(",", "")) * _UNITS[found[2]])


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: its generator has no state to save meanwhile."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def saved_random_state(
    device: torch.device, generator: torch.Generator | None = None
) -> Callable[[], object] | None:
    """Return a function that restores the present random state; ``None`` while a graph is captured.

    ``generator`` is the one that an op was given; ``None``: it draws from a default one.
    """
    if is_captured(device):
        return None
    if generator is not None:
        return partial(generator.set_state, generator.get_state())
    return partial(set_random_state, random_state(device))


_LEAST_EVICTED_BYTES = 2**20
"""Evicted where the error does not say how much was wanted; doubled until it is enough."""


_Key = tuple[str, tuple[int, ...]]
"""Name of an op, and the bytes of each of its inputs."""
_FLATTENING = ("allgather_", "reduce_scatter_", "alltoall_")
"""Name prefixes of collectives on lists of tensors, which the backend may first copy into one tensor."""


@dataclass(frozen=True, slots=True)
class OpTraits:
    """Properties of one overload of an op, read off its schema once for each op.

    Args:
        why_once: why it must not be run twice; empty: it may be.
        allocates: whether it makes tensors.
        gathers: whether its results are larger than its inputs by the number of ranks.
        resizes: whether it grows its first argument to the size of its second.
    """

    name: str
    why_once: str
    random: bool
    allocates: bool
    gathers: bool
    resizes: bool

    def needs_bytes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """Guess how many bytes an op that must not be run twice allocates: as many as it reads."""
        if not self.allocates:
            return 0
        if self.resizes:
            return int(prod(args[1])) * args[0].element_size()
        ranks = next((item for item in args[1:] if isinstance(item, int)), 1) if self.gathers else 1
        return _tensor_bytes((args, kwargs)) * ranks

    def key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Key:
        return self.name, tuple(tensor.nbytes for tensor in _tensors((args, kwargs)))


def _traits_of(op: Any) -> OpTraits:
    schema = getattr(op, "_schema", None)
    if schema is None:
        return OpTraits(str(op), why_run_once(op), False, False, False, False)
    short = schema.name.partition("::")[2]
    resizes = short == "resize_"
    if op.namespace == "c10d":
        allocates = short in _FLATTENING
    else:
        makes = any(item.alias_info is None and "Tensor" in str(item.type) for item in schema.returns)
        allocates = resizes or (short != "wait_tensor" and makes)
    gathers = is_collective(op) and short.startswith("all_gather")
    return OpTraits(str(op), why_run_once(op), op_may_draw(op), allocates, gathers, resizes)


class OomGuard(StartedMode):
    """A mode that evicts tensors when an op runs out of memory, and runs the op again, with the same bits.

    Args:
        meter: measures device memory; if it is a mode, start it before the guard, and stop it after.
        idle: holds the tensors that can be evicted.
        least_budget: called with the least bytes that are known to be needed, where nothing helps; returns a
            sentence about the budget that would do, or an empty string.

    Attributes:
        caught: how often an op ran out of memory and was run again.
        made_room: how often memory was freed before an op.
        evicted_bytes: bytes evicted so far.
        missing_bytes: the most that was missing at one time, since it was last set to 0: what was wanted, and
            what was on the host already.
        ops: how often each op, by name, ran out of memory or had memory freed before it.
        least_budget_bytes: the least device memory that turned out to be needed; 0: not known.
    """

    def __init__(
        self, meter: Meter, idle: EvictableTensors, least_budget: Callable[[int], str] = lambda _: ""
    ) -> None:
        super().__init__()
        self._least_budget = least_budget
        self._meter, self._idle, self._device = meter, idle, idle.device
        self._traits: dict[Any, OpTraits] = {}
        self._room: dict[_Key, int] = {}
        self._called: dict[int, tuple[_Key, int]] = {}
        self.caught = self.made_room = self.least_budget_bytes = 0
        self.evicted_bytes = self.missing_bytes = 0
        self.ops: Counter[str] = Counter()

    def op_begins(self, name: str, call: int, inputs: Sequence[torch.Tensor]) -> None:
        key = name, tuple(tensor.nbytes for tensor in inputs)
        self.make_room(name, self._room.get(key, 0))
        self._called[call] = key, self._bytes_without_evictions()

    def op_ends(self, call: int, outputs: Sequence[torch.Tensor], failed: bool, wanted_bytes: int) -> None:
        if call not in self._called:  # the guard was not there when it began
            return
        key, before_bytes = self._called.pop(call)
        used_bytes = max(self._bytes_without_evictions() - before_bytes, _tensor_bytes(outputs))
        if failed:
            used_bytes = max(used_bytes + wanted_bytes, 2 * self._room.get(key, 0), _LEAST_EVICTED_BYTES)
        self._room[key] = used_bytes

    def run_region(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        written: Sequence[torch.Tensor],
    ) -> tuple[Any, int]:
        """Run a function as one op; return its result and the bytes that it allocated and did not free.

        Calls with the same name and argument sizes are assumed to need the same. If a failed one has changed
        one of ``written``, it is not run again.
        """
        key = name, tuple(leaf.nbytes for leaf in written)
        self.make_room(name, self._room.get(key, 0))
        versions = [tensor._version for tensor in written]
        states, before_bytes = saved_random_state(self._device), self._bytes_without_evictions()

        def run() -> tuple[Any, Failure | None]:
            return attempt(function, args, kwargs)

        result, failure = run()
        if failure is not None:
            if versions != [tensor._version for tensor in written]:
                raise self._error(name, failure, "It cannot be run again: it has changed a buffer.")
            result = self._again(run, name, failure, states)
        self._room[key] = max(self._bytes_without_evictions() - before_bytes, _tensor_bytes(result))
        return result, self._room[key]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if types and runs_its_own_dispatch(types):
            return NotImplemented  # the ops into which the subclass turns it are seen one by one
        if func is _op_begin:
            self.op_begins(*args)
            return func(*args)  # for the modes below
        if func is _op_end:
            func(*args)
            return self.op_ends(*args)
        kwargs = kwargs or {}
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = _traits_of(func)
        if traits.why_once:
            return self._run_once(func, args, kwargs, traits)
        states = saved_random_state(self._device, kwargs.get("generator")) if traits.random else None
        result, failure = attempt(func, args, kwargs)
        if failure is None:
            return result
        return self._again(lambda: attempt(func, args, kwargs), traits.name, failure, states)

    def _again(
        self,
        run: Callable[[], tuple[Any, Failure | None]],
        name: str,
        failure: Failure | None,
        states: Callable[[], object] | None,
    ) -> Any:
        # Not in `except`: tracebacks hold tensors.
        asked_bytes, result = 0, None
        while failure is not None:
            wanted_bytes = failure.wanted_bytes or _LEAST_EVICTED_BYTES
            asked_bytes = max(wanted_bytes, 2 * asked_bytes)
            if is_captured(self._device) or not (self._evict(asked_bytes) or self._meter.let_go()):
                why = "Nothing idle is left to evict."
                if idle_bytes := self._idle.idle_bytes:
                    why = (
                        f"{gib_text(idle_bytes)} more are idle, but no host memory is left to evict them to "
                        "(host_memory_gib; in a rehearsal --host-memory)."
                    )
                raise self._error(name, failure, why)
            first = asked_bytes == wanted_bytes
            if first and self._meter.allocated_bytes() < 0.8 * self._reserved_bytes():
                torch.accelerator.empty_cache()  # fragments may be in the way
            self.caught += 1
            self._note(name, "caught out-of-memory in")
            if states is not None:
                states()
            result, failure = run()
        return result

    def _run_once(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], traits: OpTraits) -> Any:
        key = None
        if traits.allocates:
            self._meter.let_go()  # a budget below what the device has is no reason to fail
        if self._room or traits.allocates:
            key = traits.key(args, kwargs)
            self.make_room(traits.name, max(self._room.get(key, 0), traits.needs_bytes(args, kwargs)))
        result, failure = attempt(func, args, kwargs)
        if failure is None:
            return result
        key = key or traits.key(args, kwargs)
        wanted_bytes = failure.wanted_bytes or _LEAST_EVICTED_BYTES
        self._room[key] = max(wanted_bytes, 2 * self._room.get(key, 0))
        why = f"It cannot be run again: {traits.why_once}; room will be made before its next call."
        raise self._error(traits.name, failure, why)

    def make_room(self, name: str, wanted_bytes: int) -> None:
        """Evict until ``wanted_bytes`` are free, if possible, before the op ``name`` runs."""
        if not wanted_bytes or is_captured(self._device):
            return
        missing_bytes = self._meter.allocated_bytes() + wanted_bytes - self._meter.limit_bytes()
        if missing_bytes > 0 and self._evict(missing_bytes):
            self.made_room += 1
            self._note(name, "made room before")

    def _bytes_without_evictions(self) -> int:
        """Return the bytes that would be in use without evictions: they grow by what an op allocates."""
        return self._meter.allocated_bytes() + self.evicted_bytes

    def _evict(self, wanted_bytes: int) -> int:
        self.missing_bytes = max(self.missing_bytes, self._idle.away_bytes + wanted_bytes)
        freed_bytes = self._idle.evict(wanted_bytes)
        self.evicted_bytes += freed_bytes
        return freed_bytes

    def _note(self, name: str, what: str) -> None:
        self.ops[name] += 1
        logger.debug("%s %s; %d bytes evicted so far", what, name, self.evicted_bytes)

    def _error(self, name: str, failure: Failure, why: str) -> DeviceMemoryError:
        used_bytes, limit_bytes = self._meter.allocated_bytes(), self._meter.limit_bytes()
        least_bytes = used_bytes + (failure.wanted_bytes or 0)
        self.least_budget_bytes = max(self.least_budget_bytes, least_bytes)
        wanted = gib_text(failure.wanted_bytes) if failure.wanted_bytes else "more memory"
        least = f"At least {gib_text(least_bytes, math.ceil)} of device memory are needed."
        why += self._fragments(failure, used_bytes, limit_bytes)
        return DeviceMemoryError(
            f"{self._least_budget(least_bytes) or least} There are {gib_text(limit_bytes)}: {name} wants "
            f"{wanted} where {gib_text(used_bytes)} are in use and {gib_text(self.evicted_bytes)} have been "
            f"evicted to the host so far. {why} ({failure.text})"
        )

    def _fragments(self, failure: Failure, used_bytes: int, limit_bytes: int) -> str:
        if not failure.wanted_bytes or used_bytes + failure.wanted_bytes > limit_bytes:
            return ""
        reserved_bytes = self._reserved_bytes()
        return (
            f" There would be room, but not in one piece: the allocator holds {gib_text(reserved_bytes)}, of "
            f"which {gib_text(max(reserved_bytes - used_bytes, 0))} are gaps between tensors. "
            "PYTORCH_ALLOC_CONF=expandable_segments:True makes them fewer."
        )

    def _reserved_bytes(self) -> int:
        return 0 if self._device.type == "cpu" else torch.accelerator.memory_reserved(self._device)


def guard_compiled(guard: OomGuard, modules: Iterable[nn.Module]) -> list[Undo]:
    """Let ``guard`` run the calls of the compiled ones of ``modules``; return functions that undo this.

    A compiled region is one op, and its backward another. It allocates without the dispatcher, and a part of
    it cannot be run again. The whole region can, as a function of its inputs: its call is run again as a
    single op is, unless the failed attempt has changed a buffer or an input. Its backward runs inside
    autograd and gets one attempt: memory is freed before it, as much as its forward took and as its new
    gradients need.

    Call this after all else that wraps the calls (`wrap_call`), and undo it before that is taken off.
    """

    def guarded(inner: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        name = f"compiled {type(inner).__name__}"

        def call(*args: Any, **kwargs: Any) -> Any:
            if not guard.running:
                return compiled(*args, **kwargs)
            written = [*inner.buffers(), *_tensors((args, kwargs))]
            output, used_bytes = guard.run_region(name, compiled, args, kwargs, written)

            def before_backward(_gradients: Any) -> None:
                if guard.running:
                    new = [item for item in inner.parameters() if item.requires_grad and item.grad is None]
                    guard.make_room(f"{name}, backward", used_bytes + sum(item.nbytes for item in new))

            nodes = (tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None)
            if (node := next(nodes, None)) is not None:
                node.register_prehook(before_backward)
            return output

        return call

    undo = []
    for module in modules:
        if not is_compiled(module):
            continue
        around = partial(guarded, uncompiled(module))
        if getattr(module, "_compiled_call_impl", None) is None:
            undo.append(replace_forward(module, around(module.forward)))
        else:
            undo.append(replace_call(module, around))
    return undo


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _tensor_bytes(values: Any) -> int:
    """Return the bytes of all tensors in nested ``values``; one that appears twice counts twice."""
    return sum(tensor.nbytes for tensor in _tensors(values))


NAMESPACE = "hf_actswap"


def _nothing(*_: Any) -> None:
    pass  # the kernel of both marks, on every device and in tracing


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
        self._name, self._call = name, 0
        self._inputs = [*inputs, *outputs]  # these outputs exist already
        self._outputs: list[torch.Tensor] = []

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


Value = TypeVar("Value")

SHARDED = "FSDP2 gathers weights inside it, and the other ranks have done their part"
ONE_OF_SEVERAL = "a rank cannot choose tiles alone, and the others may wait for it in a collective"
UNSEEN = "no forward has been seen so far, and other ranks may have done their part"
COMMUNICATES = "it communicates, and the other ranks have done their part"


class Retry:
    """Runs a forward, or a whole micro-batch, once more when it has run out of memory.

    Args:
        model: the model in training.
        device: the model's device.
        ready: returns the planner's phase if an error is to be caught now, else an empty string.
        ran_out: called with each error before its retry; switches the guard on, or tiles.
        ahead: called with the arguments of each forward; returns whether it has put tiles on the model.
        missed: returns what to raise in place of an error that no retry has mended; ``None``: that error.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        ready: Callable[[], str],
        ran_out: Callable[[Failure], None],
        ahead: Callable[[tuple[Any, ...], dict[str, Any]], bool],
        missed: Callable[[], ActSwapError | None] = lambda: None,
    ) -> None:
        self._missed = missed
        self._ready, self._ran_out, self._ahead = ready, ran_out, ahead
        self._device = device
        self._model = model
        self._exchanges = CommunicationCheck(model)
        self._known: tuple[list[nn.Parameter], list[torch.Tensor]] | None = None

    def around(self, module: nn.Module) -> Wrapper:
        """Return what wraps the calls of a module, by which the model is entered."""
        return lambda inner: lambda *args, **kwargs: self.forward(inner, args, kwargs, module)

    @short_traceback
    def forward(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module
    ) -> Any:
        """Call the model; if memory runs out, call it again under the guard, with the hooks it then has."""
        try:
            return self._forward(call, args, kwargs, module)
        except torch.OutOfMemoryError:
            error = self._missed()
            if error is None:
                raise
        raise error

    def _forward(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module
    ) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if module is unwrapped(self._model) and self._ahead(args, kwargs):
            return module(*args, **kwargs)
        call = self._exchanges.learned_from(call)
        if not self._ready():
            return call(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        written = [*self._weights_and_buffers()[1], *inputs]

        def why_not() -> str | None:
            if before != [tensor._version for tensor in written]:
                return "it has changed a buffer or an input"
            return self._exchanges.why_not_alone(mark)

        mark = self._exchanges.mark()
        before = [tensor._version for tensor in written]
        run, again = (lambda: call(*args, **kwargs)), (lambda: module(*args, **kwargs))
        return self._twice(run, "forward", why_not, lambda: None, again)

    def micro_batch(self, step: Callable[[], Value]) -> Value:
        """Run forward and backward of a micro-batch; if memory runs out, run them again under the guard.

        ``step`` runs both, and nothing else that must not happen twice.

        Raises:
            DeviceMemoryError: there is no retry, and the text says why; or the retry failed too.
        """
        if not self._ready():
            return step()
        weights, buffers = self._weights_and_buffers()
        first = all(weight.grad is None for weight in weights)
        written = [*weights, *buffers]
        before = [tensor._version for tensor in written]

        def why_not() -> str | None:
            if world_size() > 1:
                return "gradients are reduced in backward, and the other ranks have done their part"
            if not first:
                return "gradients of earlier micro-batches are there, with a part of this one's among them"
            if before != [tensor._version for tensor in written]:
                return "it has changed a buffer or a weight"
            return None

        def drop_gradients() -> None:
            for weight in weights:
                weight.grad = None

        return self._twice(step, "a micro-batch", why_not, drop_gradients, step)

    def _weights_and_buffers(self) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
        """Return trained weights and buffers, listed at first need: FSDP2 replaces them when it shards."""
        if self._known is None:
            weights = [weight for weight in self._model.parameters() if weight.requires_grad]
            self._known = weights, list(self._model.buffers())
        return self._known

    def _twice(
        self,
        run: Callable[[], Value],
        what: str,
        why_not: Callable[[], str | None],
        undo: Callable[[], None],
        again: Callable[[], Value],
    ) -> Value:
        restore = saved_random_state(self._device)
        try:
            return run()
        except RuntimeError as error:
            failure = failure_of(error)
            stage = self._ready()
            final = isinstance(error, DeviceMemoryError) and not error.may_run_again
            if failure is None or not stage or final:
                raise
            why = ONE_OF_SEVERAL if stage == "warm-up" and world_size() > 1 else why_not()
            if restore is None:
                why = "a graph of the accelerator is being captured"
            if why is not None:
                raise _explained(failure, what, why, stage) from error
        # Only after the handler: its traceback held tensors.
        undo()
        gc.collect()
        self._ran_out(failure)
        logger.warning("%s ran out of memory (%s) and is run again under the guard", what, failure.text)
        assert restore is not None  # else there was a reason
        restore()
        return again()


def _explained(failure: Failure, what: str, why: str, stage: str) -> DeviceMemoryError:
    hint = "A smaller `memory.budget_gib` leaves more room beside the plan."
    if stage != "stable":
        hint = (
            "With `tile_config: {loss: auto, tile: {op_name: feed_forward}}` head, loss and MLPs run in "
            "tiles from the first step on."
        )
    return DeviceMemoryError(
        f"{what} ran out of memory in the planner's {stage} stage, and cannot be run again: {why}. {hint} "
        f"({failure.text})",
        may_run_again=False,  # also for a retry around the one that says so
    )


class CommunicationCheck:
    """Finds out whether a forward of ``model`` communicates with other ranks; if not, this rank can rerun it
    alone.

    Three sources are asked, each of which sees what the others cannot:

    * the **modules**: FSDP2 gathers weights inside a forward, and an exception leaves its state halfway;
    * the **ops** of the first forward: communication in forward passes the dispatcher, point to point
      included;
    * the **sequence numbers of the process groups** before and after an attempt: each collective increases
      one, also inside compiled regions and in ops that only some forwards run.

    DistributedDataParallel communicates before the forward of the model inside it, and in backward. An
    extension's kernels that reach other devices by themselves are not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inside: str | None = UNSEEN

    def learned_from(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, wrapped so that the first forward of several ranks is watched while it runs."""
        if self._inside != UNSEEN or world_size() == 1:
            return call

        def watched(*args: Any, **kwargs: Any) -> Any:
            if is_dry(args, kwargs):
                return call(*args, **kwargs)  # a forward on fake tensors communicates nothing
            with _Watch() as watch:
                result = call(*args, **kwargs)
            sharded = any(hasattr(type(module), FSDP2_METHOD) for module in self._model.modules())
            self._inside = SHARDED if sharded else COMMUNICATES if watch.seen else None
            return result

        return watched

    def mark(self) -> tuple[int, ...] | None:
        """Return how many collectives each process group has run so far; ``None``: it is not known."""
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
        """Return why this rank cannot rerun a forward alone, given `mark` before it; ``None``: it can."""
        if world_size() == 1:
            return None
        if self._inside is None and (mark is None or mark != self.mark()):
            return COMMUNICATES
        return self._inside


class _Watch(StartedMode):
    """Notes whether an op communicates."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if types and runs_its_own_dispatch(types):
            return NotImplemented
        self.seen = self.seen or is_collective(func)
        return func(*args, **(kwargs or {}))
