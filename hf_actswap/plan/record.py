"""One forward on fake tensors: which functions a model's layers call, and which feeds which.

No memory is touched and nothing is computed (`plan/dry_run.py`). What is recorded is the data flow between
ops by storage, so views and reshapes are looked through: a tensor belongs to the op that produced its
storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .compiled import named_op_modules, uncompiled
from .dry_run import fakes_only, hooks_off, one_sequence_each
from .fake_batch import fake_weights
from .mindformers_names import EXPERTS_MODULE
from .opnames import OpStack, function_name

OpKey = tuple[str, int]
"""Op path inside the layer and ordinal of the call."""

LAYER_INPUT: OpKey = ("input", 0)
"""Stands for the hidden state that a layer receives."""

_RECORDED_SHAPE = (2, 8)
"""(batch, sequence); a batch of one would take short cuts that others do not (``expand``, ``matmul``)."""

_IMAGE_SIZE, _FRAMES, _SAMPLES = 224, 1500, 16_000
"""Of an image in pixels, of a spectrogram, and of a second of sound, where the configuration is silent."""

_next_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the next autograd node of this thread (private to PyTorch; the same on 2.11 to 2.13)."""

_CPU = torch.device("cpu")
_MOST_VIEWS = 4
"""A cast weight is saved as itself or as a transposed or reshaped view: a short chain."""


@dataclass(frozen=True)
class Call:
    """One function call inside a layer: what it is, and whose outputs it reads."""

    key: OpKey
    inputs: tuple[OpKey, ...]


@dataclass(frozen=True)
class StaleRead:
    """A function reads what is written in place afterwards, or by itself: the tensor that it read is no more.

    Args:
        reader: its op path, and the ordinal of its call; ``None``: it has no output of its own.
        producer: whose output it reads.
        rewritten: whether that had been written before, too, so that a new run of its producer would not give
            what was read.
    """

    reader: tuple[str, int | None]
    producer: OpKey
    rewritten: bool


@dataclass
class LayerRecord:
    """The calls of one layer in order, who produced the hidden state handed on, and its autograd nodes."""

    calls: list[Call] = field(default_factory=list)
    output: OpKey | None = None
    nodes: int = 0
    stale: list[StaleRead] = field(default_factory=list)


def storage_key(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's storage, or ``None`` if it has none.

    The number is the address of the storage object: it is unique while a `StorageWeakRef` of it is held.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter that autocast has cast, or a view of one.

    The cast lives as long as autocast's cache, whoever else holds it, so moving it frees nothing. It is known
    by its history: casts and views only, back to a parameter. (Of frozen parameters there is no history.)
    """
    node = tensor.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is None or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
        if node is not None and hasattr(node, "variable"):
            return isinstance(node.variable, nn.Parameter)
    return False


def record_forward(
    model: nn.Module, layers: Sequence[nn.Module], attention: Sequence[frozenset[str]]
) -> list[LayerRecord]:
    """Run ``model`` once, eagerly, on a fake batch and fake weights, and record its layers.

    No hook on the model runs and none of its tensors is touched. Those on ``meta`` are taken to be on the
    CPU.

    Args:
        model: of transformers, whose ``main_input_name`` says what it takes (none: ``input_ids``).
        layers: layers in it, compiled or not.
        attention: for each layer, the paths of its attention modules.

    Returns:
        One record per layer.

    Raises:
        Exception: whatever the model raises on fake tensors (data-dependent control flow, custom kernels).
    """
    recorder = _Recorder([uncompiled(layer) for layer in layers], attention)
    with (
        hooks_off(model),
        one_sequence_each(),
        fakes_only(),
        recorder.installed(),
        recorder.expert_stand_ins(),
    ):
        # As `record_saved` has it: attention on meta would be another one, with ops of its own.
        state = fake_weights(model, _CPU)
        with recorder:
            functional_call(model, state, kwargs=_example_batch(model, state.values()))
    return recorder.records


def _example_batch(model: nn.Module, weights: Iterable[torch.Tensor]) -> dict[str, Any]:
    """Return what a model is called with: of the kind that it takes, all zeros.

    Images and sounds have the size of the configuration: some models refuse another.
    """
    config: Any = getattr(model, "config", None)
    weight = next((weight for weight in weights if weight.is_floating_point()), torch.empty(0))
    ids = torch.zeros(_RECORDED_SHAPE, dtype=torch.long, device=weight.device)
    name, batch_size = str(getattr(model, "main_input_name", "input_ids")), _RECORDED_SHAPE[0]
    if name == "input_ids":
        batch: dict[str, Any] = {name: ids, "use_cache": False}
    elif name == "pixel_values":
        sizes = getattr(config, "image_size", _IMAGE_SIZE)
        height, width = sizes if isinstance(sizes, list | tuple) else (sizes, sizes)
        channels = getattr(config, "num_channels", 3)
        batch = {name: weight.new_zeros(batch_size, channels, height, width)}
    elif name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", _FRAMES)  # Whisper halves them
        batch = {name: weight.new_zeros(batch_size, getattr(config, "num_mel_bins", 80), frames)}
    else:
        batch = {name: weight.new_zeros(batch_size, _SAMPLES)}
    if getattr(config, "is_encoder_decoder", False) and name != "pixel_values":
        batch |= {"decoder_input_ids": ids, "use_cache": False}
    return batch


class _Recorder(TorchFunctionMode):
    """Sees every function; between a layer's start and its end it writes the call down."""

    def __init__(self, layers: Sequence[nn.Module], attention: Sequence[frozenset[str]]) -> None:
        super().__init__()
        self.records = [LayerRecord() for _ in layers]
        self._layers = layers
        self._attention = attention
        self._record: LayerRecord | None = None
        self._stack = OpStack(frozenset())
        self._first_number = 0
        self._owners: dict[int, tuple[StorageWeakRef, OpKey]] = {}
        self._reads: dict[int, list[StaleRead]] = {}
        self._written: set[int] = set()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Follow the path inside each layer."""
        handles: list[Any] = []
        try:
            for index, layer in enumerate(self._layers):
                handles.append(layer.register_forward_pre_hook(self._starter(index), with_kwargs=True))
                handles.append(layer.register_forward_hook(self._finish))
                for path, module in named_op_modules(layer):
                    if path:
                        handles.append(module.register_forward_pre_hook(self._enterer(path)))
                        handles.append(module.register_forward_hook(self._leaver(path)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _starter(self, index: int) -> Callable[..., None]:
        def start(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._record = self.records[index]
            self._stack = OpStack(self._attention[index])
            self._owners.clear()
            self._reads.clear()
            self._written.clear()
            hidden = args[0] if args else kwargs.get("hidden_states")
            self._own(hidden, LAYER_INPUT)
            self._first_number = _next_number()

        return start

    def _finish(self, _layer: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        nodes = _next_number() - self._first_number
        hidden = output[0] if isinstance(output, tuple) else output
        key = storage_key(hidden) if isinstance(hidden, torch.Tensor) else None
        if self._record is not None:
            self._record.nodes = nodes
            if key in self._owners:
                self._record.output = self._owners[key][1]
        self._record = None

    def _enterer(self, path: str) -> Callable[..., None]:
        return lambda *_: self._stack.enter(path)

    def _leaver(self, path: str) -> Callable[..., None]:
        return lambda *_: self._stack.leave(path)

    @contextmanager
    def expert_stand_ins(self) -> Iterator[None]:
        """Replace the forward of routed experts while recording.

        Which expert gets which token depends on data, so that fake tensors cannot run them. What they call
        around their grouped products is the gated activation; the stand-in calls it on tensors that belong
        to the experts module as a whole.
        """
        changed: list[nn.Module] = []
        try:
            for layer in self._layers:
                for path, module in named_op_modules(layer):
                    if path.rpartition(".")[2] == EXPERTS_MODULE and "forward" not in vars(module):
                        module.forward = self._stand_in(path, getattr(module, "act_fn", None))
                        changed.append(module)
            yield
        finally:
            for module in changed:
                del module.forward

    def _stand_in(self, path: str, activation: nn.Module | None) -> Callable[..., torch.Tensor]:
        def fresh(like: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                tensor = like.clone()  # in the graph, so that the nodes of what follows are counted
            self._own(tensor, (path, 0))
            return tensor

        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self._record is not None:
                key = storage_key(hidden)
                owner = self._owners.get(key) if key is not None else None
                self._record.calls.append(Call((path, 0), (owner[1],) if owner else ()))
            if activation is not None:
                _ = activation(fresh(hidden)) * fresh(hidden)
            return fresh(hidden)

        return forward

    def _note_reads(
        self, record: LayerRecord, keys: Mapping[int, bool], path: str, ordinal: int | None
    ) -> None:
        """A function has read these storages, and written those that are marked."""
        for key, writes in keys.items():
            if key not in self._owners or (ordinal is None and not writes):
                continue
            producer = self._owners[key][1]
            reads = self._reads.setdefault(key, [])
            reads.append(StaleRead((path, ordinal), producer, key in self._written))
            if writes:
                record.stale += reads
                self._written.add(key)
                reads.clear()

    def _own(self, value: Any, op: OpKey) -> None:
        for tensor in tree_leaves(value):
            key = storage_key(tensor) if isinstance(tensor, torch.Tensor) else None
            if key is not None and key not in self._owners:
                self._owners[key] = (StorageWeakRef(tensor.untyped_storage()), op)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        record, name = self._record, function_name(func)
        if record is None or name is None:
            return func(*args, **kwargs)
        op = self._stack.begin(name)
        tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        versions = [leaf._version for leaf in tensors]
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        inputs: list[OpKey] = []
        keys: dict[int, bool] = {}
        for leaf, version in zip(tensors, versions, strict=True):
            key = storage_key(leaf)
            if key is not None:
                keys[key] = keys.get(key, False) or leaf._version != version
                if key in self._owners and self._owners[key][1] not in inputs:
                    inputs.append(self._owners[key][1])
        looked_through = all(storage_key(output) in keys for output in outputs)  # a view, or in place
        self._note_reads(record, keys, op[0], None if looked_through else op[1])
        if looked_through:
            return result
        self._stack.count(op[0])
        record.calls.append(Call(op, tuple(inputs)))
        self._own(outputs, op)
        return result
