"""Hooks around a block: they gather its input once for all readers, and sum its output over the ranks.

Random numbers that differ over the ranks of a group, from a stream that is the same on all of them.

Ranks of a tensor-parallel group must draw the same numbers where they hold the same tensor (dropout outside
of the sharded regions), and different ones on shards (a part of the sequence, some of the heads). NxD and
Megatron keep a second stream with a tracker, a global that PyTorch's checkpointing does not restore: a
dropout that runs again draws another mask.

Here nothing is kept. A rank's own stream is derived, when it is needed, from the state of the common one and
the rank. Afterwards the common stream is moved on by one draw, however much was drawn from the derived one.
So whoever restores the common stream, as `torch.utils.checkpoint` does, gets the same masks again, and a
saved random state of one rank is that of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ..plan.wrappers import is_checkpointed
from .collectives import group_or_enclosing, own_part
from .column_input import column_input
from .families import HEAD_ARGUMENTS, SOURCE_ARGUMENTS
from .layers import SharedInput
from .mappings import SUM, Change, Tokens, all_gather, copied, sum_of_shares
from .routed_experts import ParallelExperts
from .sequence_region import (
    SEQUENCE_DIM,
    ModelHook,
    SequenceRegion,
    argument_names,
    with_changed,
    with_first,
)

MODEL_PARALLEL_OFFSET = 2718
"""What NxD and Megatron add to the seed for ranks' own streams (``parallel_layers/random.py``)."""

_OFFSET_STEP = 4
"""The offset of a counter-based generator (Philox) is a multiple of this."""


def model_parallel_seed(seed: int, rank: int) -> int:
    """Return the seed of NxD's and Megatron's stream of a rank.

    Only for drawing the same numbers as they do (weights initialised on the device); the library's own
    regions use `rank_stream`.
    """
    return seed + MODEL_PARALLEL_OFFSET + rank


@contextmanager
def rank_stream(
    group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
) -> Iterator[None]:
    """Within the ``with`` block, default generators draw other numbers on each rank of the group.

    The ranks enter and leave with equal states. In a group of one nothing changes. Blocks may nest. The host
    never waits for a device.

    Args:
        group: tensor-parallel group; ``None``: that of the enclosing `tensor_parallel_group`.
        device: the generator that the block draws from; ``None``: the CPU's, and the current accelerator's.

    Raises:
        RuntimeError: no group was given, and none encloses.
    """
    found = group_or_enclosing(group)
    if found.size() == 1:
        yield
        return
    generators = _generators(None if device is None else torch.device(device))
    states = [generator.get_state() for generator in generators]
    try:
        for generator, state in zip(generators, states, strict=True):
            key = str(found.rank()).encode()
            digest = hashlib.blake2b(state.numpy().tobytes(), key=key, digest_size=8).digest()
            generator.manual_seed(int.from_bytes(digest, "little") % 2**63)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
            if generator.device.type == "cpu":
                torch.rand((), generator=generator, device="cpu")
            else:
                generator.set_offset(generator.get_offset() + _OFFSET_STEP)


def _generators(device: torch.device | None) -> list[torch.Generator]:
    if device is not None and device.type == "cpu":
        return [torch.default_generator]
    found = [] if device is not None else [torch.default_generator]
    accelerator = torch.accelerator.current_accelerator(check_available=True) if device is None else device
    if accelerator is None:
        return found
    # Empty until the device is first used; before that nothing can be drawn on it.
    of_devices = getattr(torch.get_device_module(accelerator), "default_generators", ())
    if not of_devices:
        return found
    index = cast("int | None", accelerator.index)
    return [*found, of_devices[torch.accelerator.current_device_index() if index is None else index]]


class GatherHook(ModelHook):
    """Hook of the norm before a block: gathers the whole sequence, whose shape attention reads.

    In a layer that is recomputed whole in backward, the recomputation gathers again. That result is then kept
    until the products that read it have run backward, or it would be gathered a third time.

    Args:
        readers: column-parallel projections that read the input; with none, autograd saves what it needs.
        in_autocast_dtype: whether, under autocast, the input is cast before it is gathered.
        layer: the decoder layer of the block.

    Attributes:
        keep_gathered: whether the gathered input is saved in place of the shard; always so if Hugging Face's
            gradient checkpointing is on for the layer.
    """

    def __init__(
        self,
        region: SequenceRegion,
        readers: Sequence[nn.Module],
        layer: nn.Module,
        in_autocast_dtype: bool = False,
    ) -> None:
        self._region, self._readers, self._layer = region, tuple(readers), layer
        self._in_autocast_dtype = in_autocast_dtype
        self.keep_gathered, self.tokens = False, Tokens()

    def __call__(self, _norm: nn.Module, _args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return self.gathered(output)

    def gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the whole ``[B, S, H]`` of ``[B, S / tp, H]``; a whole input stays as it is."""
        weights = [reader.get_parameter("weight") for reader in self._readers]
        runs_again = self._layer.training and is_checkpointed(self._layer)
        keep_gathered = self.keep_gathered or runs_again
        settings = self._region.settings(self._in_autocast_dtype, keep_gathered)
        gathered = column_input(hidden, weights, settings)
        self.tokens.shape = tuple(gathered.shape[:-1])
        return gathered

    def copied(self, source: torch.Tensor) -> torch.Tensor:
        """Return another sequence (an encoder's), whole on all ranks; its gradients are summed over ranks."""
        return copied(source, self._region.group, self._region.reduce_dtype)


class BlockInputHook(ModelHook):
    """Pre-hook of a block for which it is not known which norm it reads: gathers the block's input."""

    def __init__(self, gather: GatherHook) -> None:
        self.gather = gather

    def __call__(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = argument_names(block)
        first = args[0] if args else kwargs[names[0]]
        gathered = self.gather.gathered(first)
        same = [name for name, value in _named(names, args, kwargs) if value is first]
        changes: dict[str, Change] = dict.fromkeys(SOURCE_ARGUMENTS, self.gather.copied)
        return with_changed(names, args, kwargs, {**changes, **dict.fromkeys(same, lambda _: gathered)})


class WholeBlockHooks(ModelHook):
    """Hooks around a module that is not divided but reads all tokens, while the region is active.

    The module gets the whole sequence; of its output this rank keeps its own tokens. So the output's gradient
    is zero for other tokens, and gradients of input and parameters must be summed over the ranks, as in a
    divided block. ``gather`` has no readers.
    """

    def __init__(self, gather: GatherHook, region: SequenceRegion) -> None:
        self._gather, self._region = gather, region

    def attach(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._behind)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._region.is_active:
            return None
        names = argument_names(module)
        rows = (args[0] if args else kwargs[names[0]]).shape[:-1]
        changes: dict[str, Change] = dict.fromkeys(SOURCE_ARGUMENTS, self._gather.copied)
        for name, value in _named(names, args, kwargs):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape[:-1] == rows:
                changes[name] = self._gather.gathered
        return with_changed(names, args, kwargs, changes)

    def _behind(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if not self._region.is_active:
            return None
        return with_first(output, lambda whole: own_part(whole, SEQUENCE_DIM, self._region.group))


class WideNormHooks(ModelHook):
    """Hooks around a norm over the features of all heads: they gather the features that this rank lacks.

    ``replicas`` consecutive ranks hold the same heads.
    """

    def __init__(self, region: SequenceRegion, replicas: int) -> None:
        self._region, self._replicas = region, replicas

    def attach(self, norm: nn.Module) -> None:
        norm.register_forward_pre_hook(self._whole)
        norm.register_forward_hook(self._own)

    def _whole(self, _norm: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        group = self._region.group
        every = all_gather(args[0], -1, group, True, self._region.reduce_dtype)
        if self._replicas > 1:
            every = torch.cat(every.chunk(group.size(), -1)[:: self._replicas], -1)
        return (every, *args[1:])

    def _own(self, _norm: nn.Module, _args: tuple[Any, ...], whole: torch.Tensor) -> torch.Tensor:
        group = self._region.group
        parts = whole.chunk(group.size() // self._replicas, -1)
        return parts[group.rank() // self._replicas]


class HeadArgumentsHook(ModelHook):
    """Pre-hook of divided attention: cuts arguments with a value per head (biases) to this rank's heads."""

    def __init__(self, module: nn.Module, heads: int, region: SequenceRegion) -> None:
        self._names = argument_names(module)
        self._heads, self._region = heads, region

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return with_changed(self._names, args, kwargs, dict.fromkeys(HEAD_ARGUMENTS, self._own))

    def _own(self, every: torch.Tensor) -> torch.Tensor:
        group = self._region.group
        of_heads = every.unflatten(0, (-1, self._heads))
        return of_heads.chunk(group.size(), 1)[group.rank()].flatten(0, 1)


def _named(
    names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    yield from zip(names, args, strict=False)
    yield from kwargs.items()


class ReduceHook(ModelHook):
    """Hook of a module whose (first) output is this rank's summand ``[B, S, H]``: sums it over the ranks."""

    def __init__(self, region: SequenceRegion, tokens: Tokens | None = None) -> None:
        self._region, self._tokens = region, tokens

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        return with_first(output, lambda share: self._total(module, share))

    def _total(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        region = self._region
        dim = SEQUENCE_DIM if region.is_active else None
        total = sum_of_shares(output, region.group, dim, region.reduce_dtype, self._tokens)
        bias: torch.Tensor | None = getattr(getattr(module, "base_layer", None), "bias", None)
        return total if bias is None else total + bias.to(total.dtype)


class SharesCheck(ModelHook):
    """Hook that checks once that whole parameters in a divided block act only before the sum over ranks.

    Their gradients are partial on each rank, and are summed. A parameter that is used after the sum, or
    beside it, has a complete gradient on each rank, which must not be summed. For an unknown family only the
    autograd graph shows that; the first forward that has one is checked.

    Args:
        name: name of the block, for messages.
        whole: modules in it, and names of their parameters.
    """

    def __init__(self, name: str, whole: Sequence[tuple[nn.Module, str]]) -> None:
        self._name, self._whole = name, list(whole)

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) else output
        if not self._whole or not isinstance(first, torch.Tensor) or first.grad_fn is None or _is_traced():
            return
        names = {id(module._parameters[name]): name for module, name in self._whole}
        self._whole = []
        found = {names[key] for key in map(id, _leaves_before(first.grad_fn)) if key in names}
        if found:
            raise RuntimeError(
                f"{self._name} cannot be divided: {', '.join(sorted(found))} in it is added to what the "
                "ranks sum, and would be counted for each rank. Train this model without tensor_parallel_size"
            )


def _leaves_before(node: Any) -> Iterator[torch.Tensor]:
    """Yield the leaves of the graph that are reached before any sum over ranks or input of a block."""
    seen, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or isinstance(node, SUM):
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [before for before, _ in node.next_functions]


class RankStreamHooks(ModelHook):
    """Hooks around a module in training: dropout differs between ranks, and is repeated in a recomputation.

    Args:
        on_parts: true for a layer, which works on parts of the sequence while the region is active; false for
            attention, whose heads are always divided and which its layer covers in an active region.
    """

    def __init__(self, region: SequenceRegion, on_parts: bool) -> None:
        self._region, self._on_parts = region, on_parts
        self._open: list[ExitStack] = []

    def attach(self, module: nn.Module, ends: Sequence[nn.Module] = ()) -> None:
        """Put both hooks on the module.

        Before the modules ``ends`` inside it the rank's own random stream ends: all ranks compute the same
        from there on.
        """
        module.register_forward_pre_hook(self._enter)
        for end in ends:
            end.register_forward_pre_hook(self._leave)
        module.register_forward_hook(self._leave, always_call=True)  # also if the module failed

    def _enter(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        stack = ExitStack()
        if module.training and self._region.is_active == self._on_parts and not _is_traced():
            stack.enter_context(rank_stream(self._region.group))
        self._open.append(stack)

    def _leave(self, _module: nn.Module, *_: Any) -> None:
        if self._open:
            self._open.pop().close()


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or on_fake_tensors()


def on_fake_tensors() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


_Gather = GatherHook | SharedInput | ParallelExperts
"""Classes that gather an input and can keep the gathered tensor (``keep_gathered``)."""


def keep_gathered_inputs(layer: nn.Module) -> Callable[[], None]:
    """Let the column-parallel projections in ``layer`` save their gathered input, until the returned call.

    For a layer that is recomputed whole: what the recomputation saves exists only during the layer's
    backward, and one gather less is needed. Covers a patched model's gathers, and each `SharedInput` that is
    an attribute of a module.
    """
    undo = ExitStack()
    for gather in _gathers(layer):
        undo.callback(setattr, gather, "keep_gathered", gather.keep_gathered)
        gather.keep_gathered = True
    return undo.close


def _gathers(layer: nn.Module) -> Iterator[_Gather]:
    for module in layer.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if isinstance(hook, GatherHook):
                yield hook
            elif isinstance(hook, BlockInputHook):
                yield hook.gather
        if isinstance(module, ParallelExperts):
            yield module
        yield from (held for held in vars(module).values() if isinstance(held, SharedInput))
