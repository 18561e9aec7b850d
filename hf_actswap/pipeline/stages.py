"""Stages of an unmodified model.

A stage is the model itself, called with the whole batch, in which layers, final norm and head of other stages
are replaced by modules that return their first argument. On later stages the embedding is replaced by a
module that returns the received hidden state without a gradient, because the model makes masks and positions
from its shape. The module before the stage's first layer returns the received hidden state, whatever its own
input is (Gemma scales the output of the embedding). The module after the stage's last layer records the
hidden state to send, whatever the model does with it afterwards (Gemma-2 caps the output of the head).

Parameters keep their names, and layers their index. Several chunks of one rank (interleaving) are the same
model with different modules replaced; the replacements of one chunk are in place during its call.

**The check before the first step** (`check_cut`) calls the whole model, and then the stages one after the
other, with the same few tokens. Loss and logits must be equal bit for bit. So a family whose layers pass more
than a hidden state to later layers (value residuals, load-balancing losses, shared keys) is rejected, and
never trained wrongly.

If this rank has not read the weights of other stages (they are on ``meta``), each of their layers gets random
values while it is called: Hankel matrices ``r[i + j]``, which need only as many random numbers as they have
rows plus columns. Values of one layer exist at a time.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..config.schema import ParallelConfig
from ..engine.schedule import PassOrder
from ..errors import ActSwapError, Problem
from ..parallel.patch_model import partitions_of
from ..parallel.sequence_region import share_sequence_hooks
from ..parallel.weights import Partition
from ..plan.actions import MemoryPlan, Scope
from ..plan.layout import PipelineLayout, build_layout
from ..plan.model_structure import ModelStructure, device_of, unwrapped


class PipelineError(ActSwapError):
    """The model, or the requested training, cannot run in a pipeline."""

    subject = "pipeline"


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers that one call of a stage runs.

    Args:
        index: from 0, in the order of the layers; also the number of torch's stage.
        layers: global indices.
        is_first, is_last: whether the embedding, or the final norm and the head, belong to it.
    """

    index: int
    layers: range
    is_first: bool
    is_last: bool


class Relay:
    """The received hidden state and the one to send, ``[batch, seq, hidden]``, shared by the stand-ins.

    Both are ``None`` outside of a call. `record_layer_outputs` sets size and type of hidden states between
    layers.
    """

    def __init__(self) -> None:
        self.received: torch.Tensor | None = None
        self.sent: torch.Tensor | None = None
        self.hidden_size = 0
        self.dtype = torch.float32


class PassThrough(nn.Module):
    """Takes the place of a layer, a norm or a head of another stage: returns its first argument.

    Args:
        replaced: the original module; its plain attributes are copied, as the model may read them
            (``attention_type``).
        outputs: how many values the replaced module returns in a tuple; 0: it returns a tensor.
    """

    def __init__(self, replaced: nn.Module, outputs: int, relay: Relay) -> None:
        super().__init__()
        self.outputs, self.relay = outputs, relay
        for name, value in vars(replaced).items():
            if isinstance(value, str | int | float) and not name.startswith("_") and name not in _OWN:
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument, in the form in which the replaced module returns its result."""
        hidden = self.act(args[0] if args else next(iter(kwargs.values())))
        return (hidden, *(None,) * (self.outputs - 1)) if self.outputs else hidden

    def act(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


_LAYER = re.compile(r" at layer (\d+)")
_OWN = ("training", "gradient_checkpointing")


class Entrance(PassThrough):
    """Comes before the first layer of a stage: returns the hidden state received."""

    def act(self, hidden: torch.Tensor) -> torch.Tensor:
        received = self.relay.received
        return hidden if received is None or isinstance(hidden, FakeTensor) else received


class Exit(PassThrough):
    """Comes after the last layer of a stage: records the hidden state to send."""

    def act(self, hidden: torch.Tensor) -> torch.Tensor:
        self.relay.sent = hidden
        return hidden


class NoEmbedding(nn.Module):
    """Takes the place of the embedding: returns the received hidden state, without a gradient.

    If that is only this rank's part of the sequence, zeros of the whole length are returned instead.
    """

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self.relay = relay

    def forward(self, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        received, shape = self.relay.received, (*ids.shape, self.relay.hidden_size)
        if received is not None and not isinstance(ids, FakeTensor):
            is_whole = received.shape == shape
            return received.detach() if is_whole else received.new_zeros(()).expand(shape)
        trains = torch.is_grad_enabled()
        return torch.zeros(shape, dtype=self.relay.dtype, device=ids.device, requires_grad=trains)


@dataclass(frozen=True)
class _Slot:
    path: str
    stage: int
    children: dict[str, nn.Module | None]
    original: nn.Module

    def put(self, module: nn.Module) -> None:
        self.children[self.path.rpartition(".")[2]] = module


class StagedModel:
    """A model of which this rank holds one stage.

    Args:
        model: the whole model, bare or PEFT; the same on every rank.
        structure: its layers and ops.
        layout: which chunk holds which layers.
        stage: index of this rank's stage.
        sequence_ranks: number of tensor-parallel ranks among which the sequence of hidden states is divided
            between layers, in forwards with gradients.

    Attributes:
        model: the model without its wrappers.
        chunks: the chunks of all stages, in the order of the layers.
        relay: holds the hidden state received and the one to send.
        passes: order of this rank's forwards and backwards, for the engine (`engine.Resources`).
        layer_outputs: how many values a layer returns in a tuple; 0: it returns a tensor.
        entries: every name in the whole state dict, with the first name of the same (tied) tensor.

    Raises:
        PipelineError: the model has no parts to divide it by; all reasons at once.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: ModelStructure,
        layout: PipelineLayout,
        stage: int,
        sequence_ranks: int = 1,
    ) -> None:
        self.model, self.structure, self.layout, self.stage = unwrapped(model), structure, layout, stage
        self.sequence_ranks = sequence_ranks
        last = layout.pp * layout.vpp - 1
        places = [(v, s, v * layout.pp + s) for v in range(layout.vpp) for s in range(layout.pp)]
        self.chunks = tuple(Chunk(i, layout.chunk(v, s), i == 0, i == last) for v, s, i in places)
        if problems := list(self._problems()):
            raise PipelineError(problems)
        self.relay = Relay()
        self.passes = PassOrder()
        self.layer_outputs = 0
        self._layers = [
            self._slot(layer.module_path, layout.stage_of(index))
            for index, layer in enumerate(structure.layers)
        ]
        self._embedding = self._slot(structure.embedding or "", 0)
        end = layout.pp - 1
        self._norm = None if structure.final_norm is None else self._slot(structure.final_norm, end)
        self._head = None if structure.head is None else self._slot(structure.head, end)
        around = (self._embedding, self._norm, self._head)
        self._slots = (*self._layers, *(slot for slot in around if slot is not None))
        self._arrangements: dict[int, list[nn.Module]] = {}
        self.entries: dict[str, str] = {}
        self._holders: dict[str, set[int]] = {}
        self._find_holders()

    @property
    def own_chunks(self) -> tuple[Chunk, ...]:
        return self.chunks[self.stage :: self.layout.pp]

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the head, and computes losses."""
        return self.stage == self.layout.pp - 1

    def holders(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold a tensor of the state dict; the first of them saves and counts it.

        Tied weights are held by the first and the last stage. Tensors outside layers, embedding, norm and
        head (a table of positions) are held by all.
        """
        return tuple(sorted(self._holders[name]))

    def foreign_parts(self) -> tuple[str, ...]:
        """Return the paths of layers, embedding, norm and head of which this rank holds no tensor."""
        held = [name for name, first in self.entries.items() if self.stage in self._holders[first]]
        return tuple(
            slot.path
            for slot in self._slots
            if slot.stage != self.stage and not any(name.startswith(f"{slot.path}.") for name in held)
        )

    def own_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the whole state dict that this rank holds, by their first names there."""
        state = self.model.state_dict(keep_vars=True)
        held = {name: self.entries[name] for name in state if name in self.entries}
        return {first: state[name] for name, first in held.items() if self.stage in self._holders[first]}

    def own_partitions(self) -> dict[str, Partition]:
        """Return how tensor parallelism divides this rank's tensors, by the names of `own_state`."""
        return {self.entries[name]: found for name, found in partitions_of(self.model)}

    def plan_of_stage(self, plan: MemoryPlan) -> MemoryPlan:
        """Return a plan of the whole model with the rows and log lines of this rank's own layers."""
        own: set[Scope] = set(self.layout.layers_of(self.stage))
        if self.stage == 0:
            own.add("embedding")
        if self.is_last:
            own |= {"final_norm", "head"}
        made_for = plan.fingerprint
        if made_for is not None:  # a stage may train all of its weights where the model does not
            made_for = replace(made_for, trained=None, dtype=None)
        lines = [line for line in plan.lines if (at := _LAYER.search(line)) is None or int(at[1]) in own]
        return replace(
            plan,
            rows=tuple(row for row in plan.rows if row.scope in own),
            lines=tuple(lines),
            tiles=tuple(tile for tile in plan.tiles if tile.scope in own),
            keeps_gathered=tuple(layer for layer in plan.keeps_gathered if layer in own),
            fingerprint=made_for,
        )

    def _problems(self) -> Iterator[Problem]:
        chunks, structure = self.chunks, self.structure
        config: Any = getattr(self.model, "config", None)
        if structure.embedding is None:
            yield Problem("model", "an embedding (get_input_embeddings)", "none")
        if structure.stacks or getattr(config, "is_encoder_decoder", False):
            paths = ", ".join((structure.path, *(stack.path for stack in structure.stacks)))
            yield Problem("model", "one stack of layers", paths, "A pipeline of several is not built.")
        if structure.compiles:
            yield Problem("model", "an eager model", "a compiled one", "Leave torch.compile out.")
        if not chunks[0].layers:
            hint = "The embedding alone is no stage here: change parallel_config.offset."
            yield Problem("parallel_config.offset", "at least one layer on stage 0", "none", hint)
        elif not chunks[-1].layers and (structure.final_norm is None or self.sequence_ranks > 1):
            hint = "This model has no norm behind its layers: change parallel_config.offset."
            if structure.final_norm is not None:
                hint = "Beside sequence_parallel_enabled the head alone is no stage: change the offset."
            yield Problem("parallel_config.offset", "at least one layer on the last stage", "none", hint)

    def _slot(self, path: str, stage: int) -> _Slot:
        children = self.model.get_submodule(path.rpartition(".")[0])._modules
        return _Slot(path, stage, children, self.model.get_submodule(path))

    def _find_holders(self) -> None:
        first_names: dict[int, str] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            first = self.entries[name] = first_names.setdefault(id(tensor), name)
            stage = next((slot.stage for slot in self._slots if name.startswith(f"{slot.path}.")), None)
            self._holders.setdefault(first, set()).update(range(self.layout.pp) if stage is None else [stage])

    def _arrangement(self, chunk: Chunk) -> list[nn.Module]:
        """Return the module for each slot while the model is called as ``chunk``."""
        made: list[nn.Module] = []
        for index, slot in enumerate(self._layers):
            if index in chunk.layers:
                made.append(slot.original)
                continue
            kinds = {chunk.layers.start - 1: Entrance, chunk.layers.stop: Exit}
            stand_in = kinds.get(index, PassThrough)(slot.original, self.layer_outputs, self.relay)
            share_sequence_hooks(slot.original, stand_in)
            made.append(stand_in)
        for slot in self._slots[len(self._layers) :]:
            if chunk.is_first if slot is self._embedding else chunk.is_last:
                made.append(slot.original)
            elif slot is self._embedding:
                made.append(NoEmbedding(self.relay))
            elif slot is self._norm and chunk.layers.stop == len(self._layers):
                made.append(Exit(slot.original, 0, self.relay))
            else:
                made.append(PassThrough(slot.original, 0, self.relay))
        return made

    def _at_rest(self) -> list[nn.Module]:
        """Return the module for each slot between calls: the originals of all chunks of this rank."""
        chunks = [self._arrangements.setdefault(c.index, self._arrangement(c)) for c in self.own_chunks]
        return [
            next((module for module in modules if module is slot.original), modules[0])
            for slot, *modules in zip(self._slots, *chunks, strict=True)
        ]

    @contextmanager
    def _arranged(self, modules: list[nn.Module]) -> Iterator[None]:
        before = [slot.children[slot.path.rpartition(".")[2]] for slot in self._slots]
        try:
            for slot, module in zip(self._slots, modules, strict=True):
                slot.put(module)
            yield
        finally:
            for slot, earlier in zip(self._slots, before, strict=True):
                assert earlier is not None
                slot.put(earlier)

    @contextmanager
    def with_stand_ins(self) -> Iterator[None]:
        """Within the block stand-ins replace the modules of other stages; nothing is freed."""
        with self._arranged(self._at_rest()):
            yield

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within the block every module is in its original place; those of other stages are on ``meta``."""
        with self._arranged([slot.original for slot in self._slots]):
            yield

    def cut(self) -> None:
        """Replace the modules of other stages by stand-ins and free their tensors, until `restore`."""
        for slot, module in zip(self._slots, self._at_rest(), strict=True):
            slot.put(module)
        own = {id(parameter) for parameter in self.model.parameters()}
        made: dict[int, nn.Parameter] = {}
        for slot in self._slots:
            if slot.stage != self.stage:
                for module in slot.original.modules():
                    _free(module, own, made)

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put every module back; nothing of the pipeline stays on the model.

        ``state`` is the state dict of the whole model (`runtime.whole_state`). It replaces all tensors, also
        those that `cut` put on ``meta``.
        """
        for slot in self._slots:
            slot.put(slot.original)
        self.model.load_state_dict(dict(state), assign=True)
        first_of = dict(self.model.named_parameters(remove_duplicate=False))
        for name, first in self.entries.items():
            if name != first and first in first_of:
                parent, _, last = name.rpartition(".")
                self.model.get_submodule(parent)._parameters[last] = first_of[first]

    def run(
        self, chunk: Chunk, received: torch.Tensor | None, call: Callable[[], Any]
    ) -> tuple[Any, torch.Tensor | None]:
        """Call the model as one chunk; return what ``call`` returned, and the hidden state to send.

        Args:
            chunk: a chunk of this rank; before `cut`, any chunk. received: input of its first layer,
            ``[batch, seq, hidden]``; ``None`` for the first chunk. The last
                chunk sends ``None``.
            call: calls the model.
        """
        relay = self.relay
        relay.received, relay.sent = received, None
        try:
            with self._arranged(self._arrangements.get(chunk.index) or self._arrangement(chunk)):
                output = call()
            return output, relay.sent
        finally:
            relay.received = relay.sent = None


def is_cut(model: nn.Module) -> bool:
    """Return whether stand-ins are in a model: `StagedModel.cut` has been called, and not `restore`."""
    return any(isinstance(module, (PassThrough, NoEmbedding)) for module in model.modules())


def layout_of(structure: ModelStructure, parallel: ParallelConfig) -> PipelineLayout:
    """Return which stage holds which layers.

    Raises:
        PipelineError: there are too few layers, or ``offset`` does not fit them.
    """
    layers, chunks = len(structure.layers), parallel.pipeline_stage * parallel.pp_interleave_num
    if layers < chunks:
        hint = "Write fewer stages or interleaves."
        where, found = "parallel_config.pipeline_stage", f"{chunks} chunks"
        raise PipelineError([Problem(where, f"at most {layers}, the layers of the model", found, hint)])
    layout, problems = build_layout(layers, parallel)
    if layout is None:
        raise PipelineError(problems)
    return layout


def stage_of_rank(rank: int, world_size: int, stages: int) -> int:
    """Return the stage of a rank: stages are the outermost axis of all ranks."""
    return rank * stages // world_size


def _free(module: nn.Module, own: set[int], made: dict[int, nn.Parameter]) -> None:
    """Put a module's own parameters and buffers on ``meta``, except the parameters in ``own``."""
    for name, parameter in module._parameters.items():
        if parameter is not None and id(parameter) not in own:
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device="meta")
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to("meta")


_TOKENS = (2, 8)
"""Shape of the ids: rows and length."""


def check_cut(staged: StagedModel, autocast: Callable[[], Any]) -> None:
    """Compare a model in stages, before `StagedModel.cut`, with the whole one.

    Records what its layers return (`record_layer_outputs`). ``autocast`` returns the context in which the
    training calls the model.

    Raises:
        PipelineError: the results differ, or a stage cannot be called; the error says why.
    """
    model = staged.model
    modes = {module: module.training for module in model.modules()}
    batch = _few_tokens(staged)
    model.eval()
    try:
        with torch.no_grad(), autocast(), _values_for_foreign_parts(staged):
            whole = record_layer_outputs(staged, lambda: model(**batch), batch["input_ids"].shape)
            expected = _tensors(whole)
            received = None
            for chunk in staged.chunks:
                given = batch if chunk.is_last else {k: v for k, v in batch.items() if k != "labels"}
                found, received = _called(staged, chunk, received, given)
    finally:
        for module, training in modes.items():
            module.training = training
    staged_result = _tensors(found)
    differing = [
        name
        for name, one in expected.items()
        if (other := staged_result.get(name)) is None
        or one.shape != other.shape
        or not torch.equal(one, other)
    ]
    if differing:
        raise _differs(staged, differing)


def record_layer_outputs(staged: StagedModel, call: Callable[[], Any], shape: torch.Size) -> Any:
    """Call the whole model, and record what its first layer returns: a tensor or a tuple, its size and dtype.

    Sets ``layer_outputs``, ``relay.hidden_size`` and ``relay.dtype`` of ``staged``, before `StagedModel.cut`.
    Returns what ``call``, which calls the model without gradients on ids of ``shape`` ``[batch, seq]``,
    returned.

    Raises:
        PipelineError: the layer returns something other than a hidden state.
    """
    hidden: list[Any] = []
    first = staged.model.get_submodule(staged.structure.layers[0].module_path)
    watching = first.register_forward_hook(lambda _m, _a, output: hidden.append(output))
    try:
        returned = call()
    finally:
        watching.remove()
    output = hidden[0] if hidden else None
    if isinstance(output, tuple):
        staged.layer_outputs, output = len(output), output[0]
    if len(hidden) != 1 or not isinstance(output, torch.Tensor) or output.shape[:2] != shape:
        expected = f"layers that return hidden states [{shape[0]}, {shape[1]}, ..] once"
        found = f"{len(hidden)} calls of the first layer, returning {type(output).__name__}"
        raise _unfit(staged, expected, found)
    staged.relay.hidden_size, staged.relay.dtype = output.shape[-1], output.dtype
    return returned


def _few_tokens(staged: StagedModel) -> dict[str, torch.Tensor]:
    embedding: Any = staged.model.get_submodule(staged.structure.embedding or "")
    device = device_of(staged.model)
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(getattr(embedding, "num_embeddings", 2))
    ids = torch.randint(0, max(vocabulary, 2), _TOKENS, generator=generator).to(device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**batch, "labels": ids} if staged.structure.head is not None else batch


@contextmanager
def _values_for_foreign_parts(staged: StagedModel) -> Iterator[None]:
    """Within the block, modules of other stages on ``meta`` get random values while they are called."""
    device = device_of(staged.model)
    paths = {staged.model.get_submodule(path): path for path in staged.foreign_parts()}
    filled: defaultdict[nn.Module, ExitStack] = defaultdict(ExitStack)

    def fill(module: nn.Module, _args: Any) -> None:
        filled[module].enter_context(_with_values(staged, paths[module], device))

    def empty(module: nn.Module, *_: Any) -> None:
        filled[module].close()

    with ExitStack() as hooks:
        for module in paths:
            hooks.callback(module.register_forward_pre_hook(fill, prepend=True).remove)
            hooks.callback(module.register_forward_hook(empty, always_call=True).remove)
        yield


@contextmanager
def _with_values(staged: StagedModel, path: str, device: torch.device) -> Iterator[None]:
    with ExitStack() as undo:
        for name, module in staged.model.get_submodule(path).named_modules(prefix=path):
            for tensors in (module._parameters, module._buffers):
                for last, tensor in tensors.items():
                    if tensor is not None and tensor.is_meta:
                        full = f"{name}.{last}"
                        values = _values(tensor, staged.entries.get(full, full), device)
                        undo.callback(tensors.__setitem__, last, tensor)
                        is_parameter = tensors is module._parameters
                        tensors[last] = nn.Parameter(values, False) if is_parameter else values
        yield


def _values(tensor: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    """Return random values of a tensor's shape: vectors around 1, matrices that keep the norm of a vector."""
    if not tensor.is_floating_point():
        return torch.full(tensor.shape, tensor.dtype == torch.bool, dtype=tensor.dtype, device=device)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    line = torch.rand(sum(tensor.shape) + 1, generator=generator)
    scaled = 0.5 + line if tensor.dim() < 2 else (2 * line - 1) * (3 / tensor.shape[-1]) ** 0.5
    matrix = scaled.to(device, tensor.dtype).as_strided(tensor.shape, (1,) * tensor.dim())
    return matrix.contiguous()


def _called(
    staged: StagedModel, chunk: Any, received: torch.Tensor | None, batch: dict[str, torch.Tensor]
) -> tuple[Any, torch.Tensor | None]:
    try:
        output, sent = staged.run(chunk, received, lambda: staged.model(**batch))
    except Exception as error:  # the model's own code runs: it may raise anything
        expected = f"a model whose layers {chunk.layers} can be called alone"
        found = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        raise _unfit(staged, expected, found) from error
    if sent is None and not chunk.is_last:
        skipped = f"layer {chunk.layers.stop} is skipped"
        raise _unfit(staged, "a call of every layer", skipped)
    return output, sent


def _tensors(output: Any) -> dict[str, torch.Tensor]:
    values = output.items() if isinstance(output, dict) else enumerate(output)
    return {str(name): value for name, value in values if isinstance(value, torch.Tensor)}


def _differs(staged: StagedModel, names: list[str]) -> PipelineError:
    layers = [f"{chunk.layers.start} to {chunk.layers.stop - 1}" for chunk in staged.chunks]
    hint = (
        "Its layers hand on more than a hidden state to later ones (balancing losses of experts: "
        "output_router_logits), so no stage can be trained alone."
    )
    expected = "stages that compute what the whole model computes"
    found = f"another {' and '.join(names)} with layers {', '.join(layers)} one after the other"
    return _unfit(staged, expected, found, hint)


def _unfit(staged: StagedModel, expected: str, found: str, hint: str = "") -> PipelineError:
    kind: type[nn.Module] = type(staged.model)
    where = f"model ({staged.structure.family or kind.__name__}) in a pipeline"
    hint = hint or "Train it without parallel_config.schedule."
    return PipelineError([Problem(where, expected, found, hint)])
