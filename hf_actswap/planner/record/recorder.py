"""One training step under watch: what it saves, how long its ops take, how much memory they need.

The model trains as ever: the same numbers, the same random numbers. What is there while the step runs, and
gone after it: hooks on modules, saved-tensor hooks and a function mode in the model's forward, a dispatch
mode around the step. The first forward is recorded, and the backward through it; where a stage of a pipeline
has several chunks, one forward of each.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Protocol, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from ...engine.autograd_state import (
    function_mode_is_innermost,
    pop_leaked_hooks,
    running_node_number,
)
from ...engine.hook_wrappers import compiled_wrapper, wrap_call
from ...engine.link import Link
from ...engine.parameters import inner_tensors
from ...engine.tickets import Ticket, keep, restore
from ...interrupts import uninterrupted
from ...plan.compiled import is_compiled
from ...plan.forward_recorder import ForwardRecorder
from ...plan.model_structure import ModelStructure, unwrapped
from ...plan.op_facts import computes, is_collective, op_draws
from ...plan.saved_bytes import OpCall, SavedBytes
from ..meter import Meter, runs_its_own_dispatch
from ..profile import Profile
from .clock import Clock
from .op_event_log import OpEventLog

logger = logging.getLogger(__name__)


class StepRecorder:
    """Records one forward and backward of a model without a plan.

    A compiled layer is one op event; where there are any, aten ops are not watched, because a dispatch mode
    would make the compiler stand aside.

    Args:
        model: as it trains, wrapped or not.
        structure: of this model. Only the decoder's layers are distinguished.
        meter: of device memory; it runs already. ``None``: memory is not measured.
        clock: of compute.
        hold: makes what takes the place of a saved tensor; `engine.tickets.restore` gets it back.
        compiles: whether compiled modules run compiled (on fake tensors they do not).
        device: where the model computes; ``None``: where its first parameter is.
        forwards_before: forwards with gradients that go by before the one that is recorded (micro-batches).
        away_bytes: what ``hold`` has moved off the device at present, and would be there without a shortage.
        gradient_bytes: weights' gradients that are complete by now; ``None``: they are not counted.
        chunks: forwards that are recorded as one: of a pipeline's stage, whose backwards come in reverse.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: ModelStructure,
        meter: Meter | None,
        clock: Clock,
        hold: Callable[[torch.Tensor], Ticket] = keep,
        compiles: bool = True,
        device: torch.device | None = None,
        forwards_before: int = 0,
        away_bytes: Callable[[], int] = lambda: 0,
        gradient_bytes: Callable[[], int] | None = None,
        chunks: int = 1,
    ) -> None:
        self._root, self._structure, self._meter, self._clock = (
            unwrapped(model),
            structure.decoder,
            meter,
            clock,
        )
        self._hold, self._compiles, self._forwards_before = hold, compiles, forwards_before
        called = compiled_wrapper(model, structure) if compiles else None
        self._called = self._root if called is None else called
        self._whole = called is not None
        opaque = compiles and any(is_compiled(module) for module in model.modules())
        if device is None:
            device = next((item.device for item in self._root.parameters()), torch.device("cpu"))
        self._uses = ForwardRecorder(
            self._structure.scopes, self._structure.attention, device, self._enters, compiles, inner_tensors
        )
        self._log = OpEventLog(
            meter,
            clock,
            lambda: self._uses.order,
            not opaque,
            self._compiled_nodes(),
            away_bytes,
            gradient_bytes or (lambda: 0),
            chunks,
        )
        self._counts_gradients = gradient_bytes is not None
        self._log.on_backward = self._backward_begins
        self._watch = None if opaque else OpWatch(self._log, clock)
        self._undo: list[Callable[[], None]] = []
        self._inside: ExitStack | None = None
        self._saving: Any = None
        self._started, self._chunks_left = False, chunks
        self._batch_shape: tuple[int, ...] = ()
        self._saved: SavedBytes | None = None
        self._reserved_bytes = 0

    @property
    def compiled_layers(self) -> frozenset[int]:
        """Layers that run as one op."""
        if not self._compiles:
            return frozenset()
        layers = enumerate(self._structure.layers)
        return frozenset(index for index, layer in layers if layer.compiled or self._whole)

    @property
    def in_forward(self) -> bool:
        """Whether it follows a forward at present."""
        return self._inside is not None

    @property
    def complete(self) -> bool:
        """Whether a forward was recorded, and a backward through it."""
        return not self._chunks_left and self._log.turned

    def start(self) -> None:
        """Watch the next forward."""
        if self._started:
            return
        self._started = True
        self._undo = wrap_call(self._called, self._forward_starts, self._forward_ends)
        if self._watch is not None:
            self._watch.__enter__()

    def stop(self) -> None:
        """Leave nothing behind; also in mid-step, after an exception. Safe to call again."""
        if not self._started:
            return
        self._started = False
        self._leave_forward()
        for step in reversed(self._undo):
            step()
        self._undo = []
        if self._watch is not None:
            if self._watch.is_innermost():
                self._watch.__exit__(None, None, None)
            else:
                logger.warning("A dispatch mode that was entered in the recorded step has not been left.")
        self._log.end()
        if self._meter is not None:
            self._reserved_bytes = max(0, self._meter.reserved_peak_bytes() - self._log.peak_bytes)
        self._saved = SavedBytes(self._uses.used(), self._structure.modules)
        self._uses.forget()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def profile(
        self,
        *,
        device: str,
        device_bytes: int | None = None,
        link: Link | None = None,
        optimizer_state_bytes: int = 0,
        outside_ms: float | None = None,
        outside_base_bytes: int | None = None,
        weight_bytes: int = 0,
        source: Literal["measured", "shapes"] = "measured",
    ) -> Profile:
        """Return what was recorded. Waits for the device.

        Args:
            device: its name.
            device_bytes: what a process can use on it; ``None``: what the meter says.
            link: as measured; ``None``: copies do not overlap compute.
            optimizer_state_bytes: of this rank, on the device.
            outside_ms: of a step outside forward and backward; ``None``: from the end of backward to `stop`.
            outside_base_bytes: the most device memory in use there; ``None``: the same.
            weight_bytes: of this rank, on the device; 0: not known.
            source: see `Profile`.

        Raises:
            RuntimeError: it still records, or there was no forward with gradients.
        """
        if self._started or self._saved is None or self._chunks_left:
            raise RuntimeError("no step was recorded: call start, run forward and backward, call stop")
        self._clock.synchronize()
        between = self._log.outside_ms_of
        measured_ms = between[1].ms_since(between[0]) if between is not None else 0.0
        if device_bytes is None:
            device_bytes = self._meter.limit_bytes() if self._meter is not None else 0
        if outside_base_bytes is None:
            outside_base_bytes = self._log.outside_peak_bytes
        op_events = self._log.op_events(self._saved)
        return Profile(
            saved=self._saved,
            op_events=op_events,
            weight_bytes=weight_bytes,
            gradient_bytes=self._log.gradients_below if self._counts_gradients else (),
            hooks=self._log.hooks(),
            num_layers=len(self._structure.layers),
            family=self._structure.family,
            compiled_layers=self.compiled_layers,
            link=link,
            device=device,
            device_bytes=device_bytes,
            outside_ms=max(0.0, measured_ms) if outside_ms is None else outside_ms,
            outside_base_bytes=outside_base_bytes,
            optimizer_state_bytes=optimizer_state_bytes,
            reserved_bytes=self._reserved_bytes,
            signature=signature(self._saved),
            batch_shape=self._batch_shape,
            source=source,
        )

    def _compiled_nodes(self) -> dict[OpCall, int]:
        if self._whole:
            return {(0, "", None): sum(layer.nodes for layer in self._structure.layers)}
        layers = [layer for layer in self._structure.layers if layer.compiled and self._compiles]
        return {(layer.index, "", None): layer.nodes for layer in layers}

    @uninterrupted()
    def _forward_starts(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._chunks_left or not torch.is_grad_enabled():
            return
        if self._forwards_before > 0:
            self._forwards_before -= 1
            return
        self._chunks_left -= 1
        self._batch_shape = batch_shape(args, kwargs)
        self._uses.own_weights(self._root.modules())
        self._uses.own(tree_leaves((args, kwargs)), None)
        self._inside = ExitStack()
        self._log.start()
        if self._whole:
            self._inside.enter_context(self._uses.compiled_whole((args, kwargs)))
        else:
            self._inside.enter_context(self._uses.installed(self._root, wrap_call))
        self._saving = self._uses.saving(self._pack, self._unpack)
        self._saving.__enter__()
        if not self._whole:
            self._uses.__enter__()

    def _forward_ends(self, *_: Any) -> None:
        self._leave_forward()

    @uninterrupted()
    def _leave_forward(self) -> None:
        inside, self._inside = self._inside, None
        if inside is None:
            return
        self._log.in_forward = False
        if function_mode_is_innermost(self._uses):
            self._uses.__exit__(None, None, None)
        pop_leaked_hooks(self._saving.pack_hook)
        self._saving = None
        inside.close()
        if self._chunks_left:
            self._log.pause()

    def _enters(self, call: OpCall) -> None:
        self._log.enters(call)

    def _pack(self, tensor: torch.Tensor) -> Ticket:
        """Held detached: else a node's own output would keep it alive, and a view its base."""
        self._log.packs()
        return self._hold(tensor.detach())

    def _unpack(self, ticket: Ticket) -> torch.Tensor:
        node = running_node_number()
        if node is not None and self._started:
            self._log.reached(node)
        return restore(ticket)

    def _backward_begins(self) -> None:
        # Only while a node runs; what comes after backward (clipping, the optimizer) is not charged to it.
        torch.autograd.Variable._execution_engine.queue_callback(self._log.end_backward)


def signature(saved: SavedBytes) -> str:
    """Return a digest of what a step saves: the same for steps whose tensors agree, real or on fakes."""
    digest = hashlib.sha256()
    for storage in saved.storages:
        digest.update(f"{storage.size_bytes};".encode())
        for use in storage.uses:
            digest.update(f"{use.kind},{use.at},{use.producer},{use.start_bytes},{use.size_bytes};".encode())
    return digest.hexdigest()[:32]


def batch_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return (batch, sequence) of a call: of its ids, else of the first tensor of two dims or more."""
    for leaf in tree_leaves((kwargs.get("input_ids"), args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2:
            return tuple(leaf.shape[:2])
    return ()


class OpListener(Protocol):
    """Who wants to know what runs."""

    def reached(self, node: int) -> None:
        """Backward runs this node."""

    def ran(self, communicates: bool, random: bool) -> None:
        """An op that does something has run."""


class OpWatch(TorchDispatchMode):
    """Tells of each aten op, in forward and in backward.

    Args:
        op_events: receives each use.
        clock: receives each use too.
    """

    def __init__(self, op_events: OpListener, clock: Clock) -> None:
        super().__init__()
        self._op_events, self._clock = op_events, clock

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions stay compiled: else what first runs under the mode would never be compiled."""
        return True

    def is_innermost(self) -> bool:
        """Whether it can be left now."""
        stack = _get_current_dispatch_mode_stack()
        return bool(stack) and stack[-1] is self

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if runs_its_own_dispatch(types):
            return NotImplemented  # and the ops that the subclass makes of it are seen
        if not computes(func):
            return func(*args, **kwargs)
        node = running_node_number()
        if node is not None:
            self._op_events.reached(node)
        result = func(*args, **kwargs)
        if any(leaf.device.type == "meta" for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
            return result  # a look at shapes (`engine.chunked_logits`)
        self._op_events.ran(is_collective(func), op_draws(func, args, kwargs))
        self._clock.ran(func, args, kwargs, result)
        return result
