"""The function calls of one decoder layer, by the names that a plan uses, each with what it costs to run it.

The same function mode that names ops for a plan follows one forward; a `Clock` says what each call costs, by
running it again on the spot with its real inputs, or by arithmetic from the shapes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hf_actswap.plan.compiled import named_op_modules
from hf_actswap.plan.opnames import OpStack, function_name
from hf_actswap.plan.outline import LayerOutline
from hf_actswap.plan.record import storage_key

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
        kind: a matrix product, the attention core, or anything else: those are bound by memory traffic.
        flops: floating-point operations, a multiplication with its addition as two; 0 where traffic counts.
        traffic_bytes: read and written, each tensor once.
    """

    kind: Kind
    flops: int
    traffic_bytes: int


@dataclass(frozen=True)
class Call:
    """One call that produces a tensor.

    Args:
        key: its name.
        function: what was called.
        work: from the shapes.
        out_bytes: of the storages that it produces.
        widens: whether it casts to a wider type: its result holds all that its input holds.
        ms: of one run.
    """

    key: CallKey
    function: str
    work: Work
    out_bytes: int
    widens: bool
    ms: float


class Clock(Protocol):
    """Says how many ms one run of a call takes."""

    def ms(self, work: Work, run: Callable[[], Any]) -> float:
        """Return the ms of ``run``, which does ``work``."""
        ...


@dataclass(frozen=True)
class Rates:
    """What a device is taken to reach, in the units of its data sheet.

    Args:
        gemm_tflops, attention_tflops: 10^12 floating-point operations a second.
        hbm_tb_per_s: 10^12 bytes a second, read and written together.
    """

    gemm_tflops: float
    attention_tflops: float
    hbm_tb_per_s: float

    def ms(self, work: Work, _run: Callable[[], Any]) -> float:
        """Return operations over rate; of what is bound by memory, bytes over rate. Runs nothing."""
        if work.kind == "elementwise":
            return work.traffic_bytes / (self.hbm_tb_per_s * 1e9)
        rate = self.attention_tflops if work.kind == "attention" else self.gemm_tflops
        return work.flops / (rate * 1e9)


class Stopwatch:
    """Runs each call again and takes the median.

    Args:
        device: events on an accelerator, the wall clock on the CPU.
        runs: of each call, after three that are not timed.
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
        """One synchronisation for all runs: the host must stay ahead, or its own time would be counted."""
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
        layer: its outline.
        clock: of the calls.

    Attributes:
        calls: in order, those that produce a storage of their own; views cost nothing.
    """

    def __init__(self, module: nn.Module, layer: LayerOutline, clock: Clock) -> None:
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
        function: its name.
        inputs: of a matrix product (..., rows, inner) first; of attention query, key, value first, each
            (batch, heads, length, width).
        outputs: the tensors that it produces.
        causal: half of the scores are computed.
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
    """Bytes that a kernel must move for a tensor: what is expanded is read once."""
    return min(tensor.numel() * tensor.element_size(), int(tensor.untyped_storage().nbytes()))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
