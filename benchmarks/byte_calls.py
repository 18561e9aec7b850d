"""Records the function calls of one decoder layer, and the time to recompute a byte of each saved result.

Calls have the names that a plan uses: the same function mode follows one forward. A `Clock` gives the time of
each call, by running it again at once with its real inputs, or by arithmetic from the shapes. The time per
byte is the time to compute a tensor again, divided by its bytes. To compute it again, its own op runs and all
ops before it whose results are not held. Held are: tensors that autograd saves, the input of the layer, and
the two tensors of the residual stream, of which autograd saves copies.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hf_actswap.plan.compiled import named_op_modules
from hf_actswap.plan.model_structure import LayerStructure
from hf_actswap.plan.opnames import OpStack, function_name
from hf_actswap.plan.record import LAYER_INPUT, storage_key
from hf_actswap.plan.saved_bytes import SavedBytes

Kind = Literal["matmul", "attention", "elementwise"]
CallKey = tuple[str, int]
"""Op path inside the layer and ordinal, as in a plan."""

_ATTENTION = "scaled_dot_product_attention"
_MATRIX_PRODUCTS = frozenset({"linear", "matmul", "bmm"})
_WARMUP_RUNS = 3


@dataclass(frozen=True)
class Work:
    """What a call computes, from its shapes.

    Args:
        kind: a matrix product, the attention core, or anything else, which is bound by memory traffic.
        flops: floating-point operations, a multiplication with its addition as two; 0 if traffic bounds it.
        traffic_bytes: bytes read and written, each tensor once.
    """

    kind: Kind
    flops: int
    traffic_bytes: int


@dataclass(frozen=True)
class Call:
    """One call that produces a tensor.

    Args:
        key: its op path and ordinal.
        function: name of the function that was called.
        work: what it computes, from the shapes.
        out_bytes: bytes of the storages that it produces.
        widens: whether it casts to a wider type, so that its input can be taken from its result.
        ms: time of one run.
    """

    key: CallKey
    function: str
    work: Work
    out_bytes: int
    widens: bool
    ms: float


class Clock(Protocol):
    """Measures or computes how many ms one run of a call takes."""

    def ms(self, work: Work, run: Callable[[], Any]) -> float:
        """Return the ms of ``run``, which does ``work``."""
        ...


@dataclass(frozen=True)
class Rates:
    """A `Clock` by arithmetic: the rates that a device is assumed to reach, in the units of its data sheet.

    Args:
        gemm_tflops, attention_tflops: 10^12 floating-point operations a second.
        hbm_tb_per_s: 10^12 bytes a second, read and written together.
    """

    gemm_tflops: float
    attention_tflops: float
    hbm_tb_per_s: float

    def ms(self, work: Work, _run: Callable[[], Any]) -> float:
        """Return operations over rate, or, for work bound by memory, bytes over rate. Runs nothing."""
        if work.kind == "elementwise":
            return work.traffic_bytes / (self.hbm_tb_per_s * 1e9)
        rate = self.attention_tflops if work.kind == "attention" else self.gemm_tflops
        return work.flops / (rate * 1e9)


class Stopwatch:
    """A `Clock` that runs each call again and takes the median time.

    Args:
        device: device of the calls; an accelerator is timed by events, the CPU by the wall clock.
        runs: number of timed runs of each call, after three that are not timed.
    """

    def __init__(self, device: torch.device, runs: int) -> None:
        self._device, self._runs = device, runs

    def ms(self, work: Work, run: Callable[[], Any]) -> float:
        """Return the median ms of a run."""
        for _ in range(_WARMUP_RUNS):
            run()
        on_host = self._device.type == "cpu"
        return statistics.median(self._on_host(run) if on_host else self._on_device(run))

    def _on_host(self, run: Callable[[], Any]) -> list[float]:
        times = []
        for _ in range(self._runs):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def _on_device(self, run: Callable[[], Any]) -> list[float]:
        """Time all runs with one synchronisation: the host must stay ahead, or its time would be counted."""
        marks = [[torch.Event(self._device, enable_timing=True) for _ in "se"] for _ in range(self._runs)]
        for start, end in marks:
            start.record()
            run()
            end.record()
        torch.accelerator.synchronize(self._device)
        return [float(start.elapsed_time(end)) for start, end in marks]


class CallFollower(TorchFunctionMode):
    """Names the calls of one layer while a forward runs under it, and asks the clock about each.

    Args:
        module: the layer.
        layer: its structure.
        clock: gives the time of each call.

    Attributes:
        calls: the calls that produce a new storage, in order; views cost nothing and are left out.
    """

    def __init__(self, module: nn.Module, layer: LayerStructure, clock: Clock) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._module, self._layer, self._clock = module, layer, clock
        self._stack: OpStack | None = None

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the forward that runs inside."""
        handles: list[Any] = []
        try:
            for path, module in named_op_modules(self._module):
                handles.append(module.register_forward_pre_hook(self._entering(path)))
                handles.append(module.register_forward_hook(self._leaving(path)))
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, path: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            if not path:
                self._stack = OpStack(self._layer.attention_paths)
            elif self._stack is not None:
                self._stack.enter(path)

        return enter

    def _leaving(self, path: str) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            if not path:
                self._stack = None
            elif self._stack is not None:
                self._stack.leave(path)

        return leave

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        if name is None or self._stack is None:
            return func(*args, **kwargs)
        key = self._stack.begin(name)
        inputs = _tensors((args, kwargs))
        known = {storage_key(tensor) for tensor in inputs}
        result = func(*args, **kwargs)
        fresh = [tensor for tensor in _tensors(result) if storage_key(tensor) not in known]
        if fresh:
            self._stack.count(key[0])
            work = work_of(name, inputs, fresh, bool(kwargs.get("is_causal")))
            widens = name in ("to", "float") and fresh[0].element_size() > inputs[0].element_size()
            ms = self._clock.ms(work, lambda: func(*args, **kwargs))
            out_bytes = sum(tensor.untyped_storage().nbytes() for tensor in fresh)
            self.calls.append(Call(key, name, work, out_bytes, widens, ms))
        return result


def work_of(
    function: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], causal: bool
) -> Work:
    """Return what a call computes.

    Args:
        function: name of the function.
        inputs: its tensors; those of a matrix product begin with (..., rows, inner), those of attention with
            query, key and value, each (batch, heads, length, width).
        outputs: the tensors that it produces.
        causal: whether attention is causal, so that half of the scores are computed.
    """
    traffic_bytes = sum(map(_read_bytes, inputs)) + sum(map(_read_bytes, outputs))
    if function in _MATRIX_PRODUCTS:
        return Work("matmul", 2 * outputs[0].numel() * inputs[0].shape[-1], traffic_bytes)
    if function == _ATTENTION:
        query, key = inputs[0], inputs[1]
        scores = math.prod(query.shape[:-1]) * key.shape[-2]
        return Work("attention", 4 * scores * query.shape[-1] // (2 if causal else 1), traffic_bytes)
    return Work("elementwise", 0, traffic_bytes)


def _read_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a kernel must move for a tensor; an expanded one is read once."""
    return min(tensor.numel() * tensor.element_size(), int(tensor.untyped_storage().nbytes()))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


_PS_PER_MS = 1e9


@dataclass(frozen=True)
class ByteRow:
    """One call of a layer: its time, the bytes of its results, and the time to compute them again.

    Args:
        op, ordinal: op path and ordinal of the call.
        kind: a matrix product, attention, or elementwise.
        saved_bytes: bytes of its results that autograd saves, each storage once.
        out_bytes: bytes of its results, saved or not.
        root: autograd does not save the result itself, but recomputation starts from it and holds it: the
            hidden state that the layer returns, and the one between attention and feed-forward.
        ms: time of one run.
        flops, traffic_bytes: operations and memory traffic of one run, from the shapes.
        inputs: names of the calls whose results it reads; ``input:0`` is the layer's input.
        reruns: names of the calls that run to compute its result again, itself included.
        rerun_ms: time of these calls.
        ps_per_byte: ``rerun_ms`` divided by the bytes that are freed, in picoseconds; ``None``: none are.
    """

    op: str
    ordinal: int
    kind: Kind
    saved_bytes: int
    out_bytes: int
    root: bool
    ms: float
    flops: int
    traffic_bytes: int
    inputs: tuple[str, ...]
    reruns: tuple[str, ...]
    rerun_ms: float
    ps_per_byte: float | None

    @property
    def name(self) -> str:
        return name_of((self.op, self.ordinal))

    @property
    def held_bytes(self) -> int:
        """Bytes that are freed if the result is not kept."""
        return self.saved_bytes or (self.out_bytes if self.root else 0)


def name_of(key: CallKey) -> str:
    """Return the name of a call, ``op:ordinal``."""
    return f"{key[0]}:{key[1]}"


def byte_rows(
    calls: Sequence[Call], saved: SavedBytes, layer: LayerStructure, layer_index: int = 0
) -> list[ByteRow]:
    """Join the times of calls with the bytes that autograd saves of their results.

    Args:
        calls: the calls of one layer.
        saved: what autograd saves in a forward of the same shapes.
        layer: the layer's structure.
        layer_index: index of the layer in ``saved``.

    Raises:
        ValueError: autograd saves a tensor of an op that is not among the calls.
    """
    bytes_of = _saved_bytes_of(saved, layer_index)
    strangers = bytes_of.keys() - {call.key for call in calls}
    if strangers:
        raise ValueError(f"autograd saves tensors of ops that were not seen to run: {sorted(strangers)}")
    inputs = _inputs_of(saved, layer, layer_index)
    copied = [call.key for call in calls if call.widens and call.key in bytes_of]
    by_key = {call.key: call for call in calls}
    roots = by_key.keys() & {layer.output_of, *(key for copy in copied for key in inputs.get(copy, ()))}
    held = bytes_of.keys() | roots
    rows = []
    for call in calls:
        reruns = _reruns(call.key, inputs, held)
        rerun_ms = sum(by_key[key].ms for key in by_key if key in reruns)
        size = bytes_of.get(call.key, 0)
        freed = size or (call.out_bytes if call.key in roots else 0)
        rows.append(
            ByteRow(
                op=call.key[0],
                ordinal=call.key[1],
                kind=call.work.kind,
                saved_bytes=size,
                out_bytes=call.out_bytes,
                root=not size and call.key in roots,
                ms=call.ms,
                flops=call.work.flops,
                traffic_bytes=call.work.traffic_bytes,
                inputs=tuple(map(name_of, inputs.get(call.key, ()))),
                reruns=tuple(name_of(key) for key in by_key if key in reruns),
                rerun_ms=rerun_ms,
                ps_per_byte=rerun_ms * _PS_PER_MS / freed if freed else None,
            )
        )
    return rows


def _saved_bytes_of(saved: SavedBytes, layer_index: int) -> dict[CallKey, int]:
    found: dict[CallKey, int] = {}
    for storage in saved.storages:
        first = next((use for use in storage.uses if use.kind == "saved"), None)
        if first is not None and first.producer[0] == layer_index:
            key = (first.producer[1], first.producer[2] or 0)
            found[key] = found.get(key, 0) + storage.size_bytes
    return found


def _inputs_of(
    saved: SavedBytes, layer: LayerStructure, layer_index: int
) -> dict[CallKey, tuple[CallKey, ...]]:
    """Return for each call the calls whose results it reads, and the layer's input.

    Weights and other tensors from outside are left out. The model structure says which calls read the layer's
    input, which has no producer in ``saved``. The rest is read from ``saved``: its shapes are the real ones,
    on which it depends whether a reshape copies.
    """
    found: dict[CallKey, dict[CallKey, None]] = {}
    for call in layer.calls:
        if LAYER_INPUT in call.inputs:
            found.setdefault(call.key, {})[LAYER_INPUT] = None
    for storage in saved.storages:
        for use in storage.uses:
            scope, path, ordinal = use.at
            reader, source = (path, ordinal or 0), (use.producer[1], use.producer[2] or 0)
            if use.kind == "function" and scope == use.producer[0] == layer_index and source != reader:
                found.setdefault(reader, {})[source] = None
    return {key: tuple(sources) for key, sources in found.items()}


def _reruns(
    key: CallKey, inputs: Mapping[CallKey, Sequence[CallKey]], held: Collection[CallKey]
) -> set[CallKey]:
    found: set[CallKey] = set()
    ahead = [key]
    while ahead:
        call = ahead.pop()
        found.add(call)
        ahead += [
            one for one in inputs.get(call, ()) if one != LAYER_INPUT and one not in held and one not in found
        ]
    return found


@dataclass(frozen=True)
class Choice:
    """Memory and time of a layer of which some tensors are not kept.

    Args:
        held_bytes: bytes held by autograd and for the calls that run again, with the layer's input if they
            need it.
        rerun_ms: time of the calls that run again.
    """

    held_bytes: int
    rerun_ms: float


def without(rows: Sequence[ByteRow], dropped: Collection[str], input_bytes: int) -> Choice:
    """Return held bytes and rerun time of a layer if the results of some calls are recomputed in backward.

    Args:
        rows: all rows of the layer.
        dropped: names of the rows whose results are not kept; they are also recomputed for others that read
            them.
        input_bytes: bytes of the layer's input.
    """
    by_name = {row.name: row for row in rows}
    sizes = {row.name: row.held_bytes for row in rows} | {name_of(LAYER_INPUT): input_bytes}
    held = {row.name for row in rows if row.saved_bytes and row.name not in dropped}
    run: set[str] = set()
    ahead = [row.name for row in rows if row.saved_bytes and row.name in dropped]
    while ahead:
        name = ahead.pop()
        run.add(name)
        for source in by_name[name].inputs:
            if source == name_of(LAYER_INPUT) or (by_name[source].root and source not in dropped):
                held.add(source)
            elif source not in held and source not in run:
                ahead.append(source)
    return Choice(sum(sizes[name] for name in held), sum(row.ms for row in rows if row.name in run))


def row_of(result: Mapping[str, Any]) -> ByteRow:
    """Return the `ByteRow` in an entry of a results file; the entry has other fields too."""
    values = {item.name: result[item.name] for item in fields(ByteRow)}
    return ByteRow(**{**values, "inputs": tuple(values["inputs"]), "reruns": tuple(values["reruns"])})
