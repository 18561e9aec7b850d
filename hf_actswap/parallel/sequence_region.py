"""Tracks where in a forward a model's hidden states are parts of the sequence.

Between the first layer and the head each rank holds ``[B, S / tp, H]``. Tensors for the whole length
(positions, masks, rotary tables) are made before, in the model's own forward, which notices nothing of this:
the sequence is padded at the model's entry if the ranks do not divide it, cut at the first layer, and whole
again behind the head. Padding is on the right: with causal attention no token sees it, so that no mask is
needed if none was given. It is cut off the model's outputs, and the loss ignores its labels.

**A forward is divided if gradients are enabled.** In all others (evaluation, generation with its cache)
nothing is saved for backward, and each rank computes the whole residual stream. So tagged parameters only
ever get the gradients of the rank's own tokens, and never a complete gradient, which the later sum would
count once per rank. All ranks decide alike, because nothing but grad mode decides.

A layer that is recomputed in backward must do what it did in forward. So a divided forward leaves the region
active, and a forward without gradients, such as an evaluation between forward and backward, restores the
state that it found.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .column_input import InputSettings
from .gradients import TAG
from .layers import ParallelLinear
from .mappings import Change, gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from .weights import HeldGroup, ParameterTags, tag

SEQUENCE_DIM = -2
"""Dim of the sequence in hidden states, ``[B, S, H]``, or of their flattened tokens, ``[B S, H]``."""


@dataclass
class SequenceForward:
    """The state of a running forward.

    Args:
        owner: the module whose call began the forward.
        length: tokens per sequence, without padding; 0: not known, and nothing was padded.
        padding: number of tokens that were added to each sequence.
        was_active: whether the region was active before.
        head_gets_padding: whether the head gets all rows, also those of padding: the labels have them too.
        masked: whether an attention mask was given.
        labelled: whether labels were given, so that a loss is to be computed.
        loss_computed: whether a loss was computed, by ours, or by the model's own from whole logits.
        is_cut: whether hidden states are parts now: the first layer has begun, and nothing made them whole.
    """

    owner: nn.Module
    length: int
    padding: int
    was_active: bool
    head_gets_padding: bool = False
    masked: bool = False
    labelled: bool = False
    loss_computed: bool = False
    is_cut: bool = False


class SequenceRegion:
    """Switches the parallel layers of one model between parts of the sequence and the whole of it.

    Args:
        group: tensor-parallel group.
        enabled: whether sequence parallelism is on.
        reduce_dtype: dtype in which input gradients are summed; ``None``: their own.

    Attributes:
        head: the head of the model, if it is divided.
        head_reads_parts: whether the head reads parts of the sequence, because no module is between the
            layers and the head.
        head_returns_parts: whether the head returns parts of the vocabulary, because the loss is replaced.
    """

    part_of_the_model = True  # what it has switched in layers must agree with what it knows of it

    def __init__(
        self, group: dist.ProcessGroup, enabled: bool, reduce_dtype: torch.dtype | None = torch.float32
    ) -> None:
        self._held_group = HeldGroup(group)
        self.enabled, self.reduce_dtype = enabled, reduce_dtype
        self.is_active = False
        self._layers: list[ParallelLinear] = []
        self.head: ParallelLinear | None = None
        self.head_returns_parts = self.head_reads_parts = True
        self.current: SequenceForward | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The tensor-parallel group. Raises RuntimeError: in a process that unpickled this, there is none."""
        if self._held_group.group is None:
            raise RuntimeError("a patched model cannot be pickled; save Patched.full_state_dict() instead")
        return self._held_group.group

    def settings(self, in_autocast_dtype: bool = False, keep_gathered: bool = False) -> InputSettings:
        """Return how a block's input is gathered now: with sequence parallelism only in an active region."""
        sequence = self.is_active, SEQUENCE_DIM
        return InputSettings(self.group, *sequence, self.reduce_dtype, keep_gathered, in_autocast_dtype)

    def adopt(self, layer: ParallelLinear) -> None:
        self._layers.append(layer)
        layer.sequence_parallel_enabled = self.is_active

    def switch(self, active: bool, head: bool = False) -> None:
        """Let the layers, and the head, take parts of the sequence or the whole."""
        if active != self.is_active:
            self.is_active = active
            for layer in self._layers:
                layer.sequence_parallel_enabled = active
        if self.head is not None:
            self.head.sequence_parallel_enabled = head

    def begin(
        self, owner: nn.Module, arguments: dict[str, Any], takes_cache: bool, calls_head: bool
    ) -> dict[str, Any]:
        """Begin a forward of ``owner``; return its arguments, padded if the ranks do not divide the sequence.

        Args:
            takes_cache: whether the forward has an argument ``use_cache``.
            calls_head: whether the forward ends with the head; if not, it returns hidden states.

        Raises:
            ValueError: the sequence needs padding and cannot be padded.
        """
        given = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
        length = next((value.shape[1] for value in given if isinstance(value, torch.Tensor)), 0)
        divides = self.enabled and torch.is_grad_enabled()
        padding = -length % self.group.size() if divides else 0
        if padding and takes_cache and arguments.get("use_cache") is None:
            arguments = {**arguments, "use_cache": False}  # padding must not stay in a cache
        found = SequenceForward(
            owner,
            length,
            padding,
            self.is_active,
            masked=arguments.get("attention_mask") is not None,
            labelled=arguments.get("labels") is not None or arguments.get("shift_labels") is not None,
        )
        if padding:
            _reject_cache(arguments, found.length, self.group.size())
            arguments = padded(arguments, found.length, padding)
        kept = arguments.get("logits_to_keep")
        found.head_gets_padding = calls_head and (kept is None or (isinstance(kept, int) and kept == 0))
        self.switch(divides, False)
        self.current = found
        return arguments

    def end(self, owner: nn.Module) -> None:
        """End the forward that ``owner`` began, also after an exception; nothing if it began none."""
        if self.current is not None and self.current.owner is owner:
            was_active, self.current = self.current.was_active, None
            self.switch(self.is_active if torch.is_grad_enabled() else was_active)

    @property
    def holds_parts(self) -> bool:
        """Whether hidden states are parts of the sequence at this point of the running forward."""
        return self.is_active and self.current is not None and self.current.is_cut

    def whole(self, part: torch.Tensor, length: int) -> torch.Tensor:
        """Gather ``[B, S / tp, H]`` for a consumer that does the same on every rank; cut off the padding."""
        if self.holds_parts:
            part = gather_from_sequence_parallel_region(part, SEQUENCE_DIM, False, self.group)
        return without_padding(part, SEQUENCE_DIM, length) if length else part

    def whole_rows(self, parts: Sequence[torch.Tensor], batch: int) -> tuple[torch.Tensor, ...]:
        """Gather ``[B S / tp, E]`` of each layer to ``[B S, E]``, all by one collective, as `whole` does.

        If a layer's tensor has the rows of all tokens already, this rank's rows are taken from it first, so
        that each rank's gradients are those of its rows.
        """
        if not self.is_active or self.current is None:
            return tuple(parts)
        length = (self.current.length + self.current.padding) // self.group.size()
        of_sequences = [part.unflatten(0, (batch, -1)) for part in parts]
        first = self.group.rank() * length
        own = [
            p if p.shape[1] == length or not length else p[:, first : first + length] for p in of_sequences
        ]
        stacked = torch.stack(own)
        rows = gather_from_sequence_parallel_region(stacked, SEQUENCE_DIM, False, self.group)
        return rows.flatten(1, 2).unbind()


def _reject_cache(arguments: dict[str, Any], length: int, ranks: int) -> None:
    cache = arguments.get("past_key_values")
    if arguments.get("use_cache") or (cache is not None and cache.get_seq_length() > 0):
        raise ValueError(
            f"a forward with gradients and a key-value cache over {length} tokens, which {ranks} "
            "tensor-parallel ranks do not divide: what fills the sequence up would stay in the cache. Pass "
            "use_cache=False, or call under torch.no_grad()"
        )


class ModelHook:
    """Base class of hooks without which a patched model does not compute (`plan.dry_run`)."""

    part_of_the_model = True


class RegionHook(ModelHook):
    """Base class of those that know the model's region and nothing else."""

    def __init__(self, region: SequenceRegion) -> None:
        self._region = region


class EntryHook(ModelHook):
    """Pre-hook of a model: begins a forward, unless one is under way.

    Args:
        model: the model that is called.
        before: called at the beginning of each forward.
        calls_head: whether the model ends with a head that is divided.
    """

    def __init__(
        self, region: SequenceRegion, model: nn.Module, before: Callable[[], None], calls_head: bool
    ) -> None:
        self.region, self._before, self._calls_head = region, before, calls_head
        self._names = argument_names(model)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        current = self.region.current
        if current is not None and current.owner is not module:
            return None
        self._before()
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        rest = args[len(self._names) :]
        takes_cache = "use_cache" in self._names
        return rest, self.region.begin(module, arguments, takes_cache, self._calls_head)


def divides_sequence(model: nn.Module) -> bool:
    """Whether a model is patched so that ranks hold parts of the sequence while it trains."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    return any(isinstance(hook, EntryHook) and hook.region.enabled for hook in hooks)


class BaseExitHook(RegionHook):
    """Hook of the decoder without head: gathers its hidden states, unless the head reads parts of them."""

    def __call__(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        region, current = self._region, self._region.current
        try:
            if output is None or current is None:
                return None
            if isinstance(output, tuple):
                return with_first(output, lambda hidden: self._hidden(hidden, current))
            if getattr(output, "hidden_states", None) is not None:
                output.hidden_states = tuple(region.whole(h, current.length) for h in output.hidden_states)
            batch = output.last_hidden_state.shape[0]
            output.last_hidden_state = self._hidden(output.last_hidden_state, current)
            if getattr(output, "attentions", None) is not None:
                heads = (own if own is None else self._all_heads(own, current) for own in output.attentions)
                output.attentions = tuple(heads)
            if getattr(output, "router_logits", None):
                output.router_logits = region.whole_rows(output.router_logits, batch)
                if current.padding and not current.masked:
                    output.router_logits = _cut_rows(output.router_logits, current)
            return output
        finally:
            region.end(module)

    def _hidden(self, hidden: torch.Tensor, current: SequenceForward) -> torch.Tensor:
        length = current.length + current.padding
        if current.is_cut and length and hidden.shape[SEQUENCE_DIM] * self._region.group.size() != length:
            raise RuntimeError(
                f"behind its layers the model gives hidden states the shape {list(hidden.shape)}: no part of "
                f"{length} tokens. Set sequence_parallel_enabled: false"
            )
        if current.head_gets_padding and current.is_cut and self._region.head_reads_parts:
            self._region.switch(self._region.is_active, True)
            return hidden
        return self._region.whole(hidden, 0 if current.head_gets_padding else current.length)

    def _all_heads(self, own: torch.Tensor, current: SequenceForward) -> torch.Tensor:
        # [B, heads / tp, S, S], with padding
        whole = gather_from_sequence_parallel_region(own, 1, False, self._region.group)
        return whole[:, :, : current.length, : current.length] if current.padding else whole


def _cut_rows(router_logits: Sequence[torch.Tensor], current: SequenceForward) -> tuple[torch.Tensor, ...]:
    sizes = (-1, current.length + current.padding)
    return tuple(logits.unflatten(0, sizes)[:, : current.length].flatten(0, 1) for logits in router_logits)


def cut_masked_rows(output: Any, current: SequenceForward) -> None:
    """Cut padding off router logits of an output that kept it because a mask excludes it from the loss."""
    if current.padding and current.masked and getattr(output, "router_logits", None):
        output.router_logits = _cut_rows(output.router_logits, current)


def argument_names(module: nn.Module) -> list[str]:
    """Return the names of a module's arguments, also while a plan or a library wraps its forward."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def with_changed(
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    changes: Mapping[str, Change],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments, positional or by keyword, with the tensors named in ``changes`` changed."""

    def changed(name: str, value: Any) -> Any:
        return changes[name](value) if name in changes and isinstance(value, torch.Tensor) else value

    own = tuple(changed(name, value) for name, value in zip(names, args, strict=False))
    return (*own, *args[len(own) :]), {name: changed(name, value) for name, value in kwargs.items()}


def with_first(output: Any, change: Callable[[Any], Any]) -> Any:
    """Return a module's output with its first (or only) tensor changed."""
    if isinstance(output, tuple | list):
        return type(output)((change(output[0]), *output[1:]))
    return change(output)


class ScatterHook(ModelHook):
    """Pre-hook of a layer: keeps this rank's part of the sequence.

    Args:
        layer: the layer that is called. In a pipeline its stand-in gets the same hook.
        names: arguments that have a row for each token, ``[.., S, n]``.
        first_dim: dim of the sequence in the first argument, which is cut too; ``None``: it is cut already.
    """

    def __init__(
        self, layer: nn.Module, region: SequenceRegion, names: Sequence[str], first_dim: int | None
    ) -> None:
        self._arguments = argument_names(layer)
        self._region, self._names, self._first_dim = region, names, first_dim

    def __call__(
        self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not self._region.is_active:
            return None
        if self._first_dim is not None and self._region.current is not None:
            self._region.current.is_cut = True
        dims = dict.fromkeys(self._names, SEQUENCE_DIM)
        if self._first_dim is not None:
            dims[self._arguments[0]] = self._first_dim
        changes = {name: functools.partial(self._own, dim) for name, dim in dims.items()}
        return with_changed(self._arguments, args, kwargs, changes)

    def _own(self, dim: int, value: torch.Tensor) -> torch.Tensor:
        dim = dim if value.is_floating_point() else -1
        return scatter_to_sequence_parallel_region(value, dim, self._region.group)


class WholeAgainHook(RegionHook):
    """Hook of the last layer: gathers its output, if later modules are not known to work token by token."""

    def __call__(self, _layer: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        region, current = self._region, self._region.current
        if current is None or not region.holds_parts:
            return None
        current.is_cut = False
        return with_first(
            output, lambda own: gather_from_sequence_parallel_region(own, SEQUENCE_DIM, False, region.group)
        )


def share_sequence_hooks(layer: nn.Module, stand_in: nn.Module) -> None:
    """Put the hooks by which a layer cuts or gathers the sequence on its stand-in, too (in a pipeline)."""
    for before in layer._forward_pre_hooks.values():
        if isinstance(before, ScatterHook):
            stand_in.register_forward_pre_hook(before, with_kwargs=True)
    for behind in layer._forward_hooks.values():
        if isinstance(behind, WholeAgainHook):
            stand_in.register_forward_hook(behind)


class TagAfterLayersHook(ModelHook):
    """Pre-hook of a module outside the layers: tags its parameters if its input is a part of the sequence.

    Before the layers a module gets the whole sequence, and its gradients are complete; after them it gets
    parts. The place where it is registered usually tells which (``behind``: after the layers); its first call
    decides.
    """

    def __init__(self, module: nn.Module, behind: bool, region: SequenceRegion, tags: ParameterTags) -> None:
        self._region, self._tags, self._behind = region, tags, False
        self._say(module, behind)

    def __call__(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        if self._region.is_active and self._behind != self._region.holds_parts:
            self._say(module, self._region.holds_parts)
            self._tags.put(anew=True)

    def _say(self, module: nn.Module, behind: bool) -> None:
        if behind != self._behind:
            self._behind = behind
            for name in module._parameters:
                tag(module, name, **{TAG: behind})


class LengthCheck(ModelHook):
    """Pre-hook of attention: raises if its input and its rotary tables have different lengths.

    They have if a layer is recomputed after the region was switched (by a caller that turned gradients off
    and on again inside one forward).
    """

    def __call__(self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        tables = kwargs.get("position_embeddings")
        if not isinstance(hidden, torch.Tensor) or not isinstance(tables, tuple):
            return
        if not isinstance(tables[0], torch.Tensor):
            return
        if hidden.shape[1] != tables[0].shape[-2]:
            raise RuntimeError(
                f"attention over {hidden.shape[1]} tokens has positions for {tables[0].shape[-2]}: a layer "
                "is recomputed under another state of sequence parallelism than that of its forward"
            )


IGNORED = -100
"""Label of tokens that have no loss."""

_FILLED_WITH = {
    "input_ids": 0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "attention_mask": 0,
    "labels": IGNORED,
    "shift_labels": IGNORED,
}
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of flash attention for several sequences in one row: cumulative lengths over the whole row."""


def padded(arguments: dict[str, Any], length: int, padding: int) -> dict[str, Any]:
    """Return a forward's arguments with ``padding`` more tokens in each sequence.

    Raises:
        ValueError: an argument describes the sequence in a way that cannot be continued.
    """
    filled = dict(arguments)
    for name, value in arguments.items():
        is_mask = name == "attention_mask" and value is not None
        if is_mask and not (isinstance(value, torch.Tensor) and value.dim() == 2):
            raise ValueError(_rejection(name, length, padding, "is no mask [B, S]"))
        if name in _PACKED and value is not None:
            raise ValueError(_rejection(name, length, padding, "gives the lengths of packed sequences"))
        if not isinstance(value, torch.Tensor):
            continue
        if name in _FILLED_WITH and value.shape[-1] == length:
            filled[name] = F.pad(value, (0, padding), value=_FILLED_WITH[name])
        elif name == "inputs_embeds":
            filled[name] = F.pad(value, (0, 0, 0, padding))
        elif name == "position_ids" and value.shape[-1] == length:
            further = torch.arange(1, padding + 1, device=value.device, dtype=value.dtype)
            filled[name] = torch.cat([value, value[..., -1:] + further], -1)
    return filled


def without_padding(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return the first ``length`` tokens along ``dim``; a tensor with no more tokens is returned as it is."""
    return tensor if tensor.shape[dim] <= length else tensor.narrow(dim, 0, length)


def _rejection(name: str, length: int, padding: int, why: str) -> str:
    return (
        f"the sequence length {length} is no multiple of tensor_parallel_size and cannot be filled up, "
        f"because {name} {why}. Pad the batch by {padding} (data collator: pad_to_multiple_of)."
    )
