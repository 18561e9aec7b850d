"""Head and loss of a causal language model in tiles of tokens: the logits of all tokens never exist at once.

The head's forward is replaced by one that computes nothing and returns `TiledLogits`, a tensor that knows
its shape, the hidden states and the head. The model's own code goes on with it. What that code does is not
looked up by model family. Each call is first made with a tensor on ``meta`` in place of the logits, and the
aten ops that it runs tell what it does.

* Pointwise ops with numbers or with one value per vocabulary entry (casts, scales, softcapping), and
  softmaxes over the vocabulary, are recorded and applied to each tile.
* Views that leave the vocabulary's dimension alone (slices, reshapes) choose rows.
* `torch.nn.functional.cross_entropy` of rows is the loss; so is `parallel_cross_entropy`, for the part of the
  vocabulary that a tensor-parallel rank has. Forward runs head, recorded ops and loss for one tile after the
  other, and each tile's backward at once. It stores the sums of the gradients, and backward multiplies them
  by the gradient of the loss. The head runs as often as without tiles.
* Other functions that return values for each row (``gather``, ``sum``, ``argmax`` ... over the vocabulary)
  run tile by tile, and once more in backward, because their upstream gradients are not known before.
* If ranks divide the vocabulary, `full_logits` gathers the logits of each tile for the calls that follow.
* Any other call reads the logits: then they are computed whole and kept, and in training this is reported.

Each weight gets one gradient per backward, from one autograd node.

Gradients are summed over the tiles in fp32, from products that are not rounded before. So for a head that
is just a linear layer, autograd differentiates only the calls that follow it, and the two products of the
layer's backward are computed here. Other heads (adapters, quantised weights) are differentiated by autograd.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..plan.actions import Tile
from ..plan.op_facts import FULL_LOGITS, ROW_LOSSES, argument_of
from ..plan.wrappers import frees_weights_after_its_call
from .call_state import CallState
from .hook_wrappers import Hook, Undo, reject_tracing, replace_forward
from .tiled_calls import (
    AUTO_LEAST_TOKENS,
    Exchangeable,
    ReportWhole,
    add_product,
    first_order_only,
    no_saved_tensor_hooks,
    product,
    tiles_to_run,
    zero_sum,
)


class Head(Exchangeable):
    """A head without its hooks.

    Args:
        module: a linear layer, or a module around one; or a linear layer divided among ranks
            (`ColumnParallelLinear`), with ``input_parts``, ``whole_input``, and ``output_size`` of all ranks.
    """

    module: Any

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, module.forward)
        self.is_divided = hasattr(module, "whole_input")
        self.is_linear = (type(module) is nn.Linear or self.is_divided) and "forward" not in vars(module)


class HeadCall:
    """One call of a head, with these trained parameters: what all logits that derive from it share."""

    def __init__(
        self, head: Head, names: Sequence[str], tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.head, self.names, self.tokens, self.dtype, self.device = head, names, tokens, dtype, device
        self._state = CallState(device, False, ())
        self._draws = any(isinstance(part, nn.Dropout) and part.training for part in head.module.modules())
        self._first_run: CallState | None = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run under the call's autocast state; each run draws the same random numbers as the first run."""
        first = self._first_run
        if first is None and self._draws:
            self._first_run = CallState(self.device, True, ())
        random = nullcontext() if first is None else first.restored()
        with no_saved_tensor_hooks(), random, self._state.autocast_restored():
            yield

    def logits(self, hidden: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the logits ``[C, V]`` of a tile ``[C, H]``, with these as the trained parameters."""
        named = dict(zip(self.names, parameters, strict=True))
        logits: torch.Tensor = self.head.with_parameters(named, hidden)
        return logits

    def linear(self, parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias of a linear head in the dtype of its output, cast once for all tiles."""
        named = dict(zip(self.names, parameters, strict=True))
        weight, bias = (named.get(name, getattr(self.head.module, name)) for name in ("weight", "bias"))
        return weight.detach().to(self.dtype), None if bias is None else bias.detach().to(self.dtype)


class LogitsPlaceholder:
    """Stands for the logits among the arguments of a `RowCall`."""


@dataclass(frozen=True)
class RowCall:
    """A call that treats each row of logits by itself, to be made with the rows of a tile.

    Args:
        func, args, kwargs: the call, with `LogitsPlaceholder` in the place of the logits.
        lead: shape of the logits without their last dimension. A tensor among the arguments is the same for
            all rows, or has this shape and a dimension more.
        state: the autocast state in which the model made the call.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    lead: torch.Size
    state: CallState

    def __call__(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the function's values ``[C, ..]`` for the rows ``rows``, whose logits are ``[C, V]``."""
        shape = torch.Size((*(1 for _ in self.lead[1:]), len(logits)))

        def given(item: Any) -> Any:
            if isinstance(item, LogitsPlaceholder):
                return logits.reshape(*shape, logits.shape[-1])
            if is_same_for_rows(item, self.lead):
                return item
            return item.reshape(-1, item.shape[-1])[rows].reshape(*shape, item.shape[-1])

        args, kwargs = tree_map_only((LogitsPlaceholder, torch.Tensor), given, (self.args, dict(self.kwargs)))
        with self.state.autocast_restored():
            values: torch.Tensor = self.func(*args, **kwargs)
        return values.reshape(len(logits), *values.shape[len(shape) :])


def is_same_for_rows(item: torch.Tensor, lead: torch.Size) -> bool:
    """Whether a tensor is the same for all rows of ``lead``: a number, or a value per vocabulary entry."""
    return item.dim() == 0 or (item.dim() <= len(lead) + 1 and item.numel() == item.shape[-1])


def layout_of(lead: Sequence[int], vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a ``meta`` tensor in place of logits; the offset of a row's first entry is the row's number."""
    strides = torch.empty(lead, device="meta").stride()
    return torch.empty_strided((*lead, vocabulary), (*strides, math.prod(lead)), dtype=dtype, device="meta")


@dataclass(frozen=True)
class RowRecipe:
    """How logits are made, tile by tile, from a head's call and the row-wise calls (``steps``) that follow.

    Args:
        layout: a tensor of `layout_of`, or a view of it that chooses rows.
        numbers: ``[N]``: the row of the hidden states for each row number of the layout; ``None``: the same.
    """

    call: HeadCall
    layout: torch.Tensor
    numbers: torch.Tensor | None = None
    steps: tuple[RowCall, ...] = ()

    @property
    def lead(self) -> torch.Size:
        return self.layout.shape[:-1]

    def copied(self) -> RowRecipe:
        if self.layout.select(-1, 0).is_contiguous() and self.lead.numel() == self.layout.stride(-1):
            return self
        fresh = layout_of(self.lead, self.layout.shape[-1], self.layout.dtype)
        return replace(self, layout=fresh, numbers=self._row_numbers())

    def and_then(self, step: RowCall, vocabulary: int | None = None) -> RowRecipe:
        """Return the form with one more step, which changes the dtype or the size ``vocabulary`` of a row."""
        apart, dtype = self.layout.stride(-1), self.layout.dtype
        if vocabulary is None:
            vocabulary = self.layout.shape[-1]
            # The dtype comes from a real row: autocast does not cast tensors on meta.
            dtype = step(torch.zeros(1, vocabulary, dtype=dtype, device=self.call.device), slice(0, 1)).dtype
        fresh, shape = layout_of((apart,), vocabulary, dtype), (*self.lead, vocabulary)
        layout = fresh.as_strided(shape, self.layout.stride(), self.layout.storage_offset())
        return replace(self, layout=layout, steps=(*self.steps, step))

    def values(
        self, function: RowCall | None, hidden: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return a function's values for all rows, ``[N, ..]``; without a function the logits, ``[N, V]``."""
        values: list[torch.Tensor] = []
        with torch.no_grad(), self.call.restored():
            parameters = [item.detach() for item in parameters]
            linear = self.call.linear(parameters) if self.call.head.is_linear else None
            for rows, _, tile, _ in self._tiles(hidden, values):
                logits = F.linear(tile, *linear) if linear else self.call.logits(tile, parameters)
                part = self._finished(logits, rows, function)
                if not values:
                    values.append(part.new_empty((self.lead.numel(), *part.shape[1:])))
                values[0][rows] = part
        return values[0]

    def differentiated(
        self,
        function: RowCall | None,
        upstream: torch.Tensor | None,
        hidden: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        wants_hidden: bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Return a function's values for each tile, and gradients of hidden states and parameters in fp32.

        Args:
            function: called with the rows of each tile; ``None``: no values, and gradients of the logits.
            upstream: gradient of the values (or of the logits), ``[N, ..]``; ``None``: ones.
            hidden, parameters: hidden states, and the head's trained parameters.
            wants_hidden: whether the hidden states need a gradient.
        """
        of_hidden = zero_sum(hidden) if wants_hidden else None
        flat = None if of_hidden is None else of_hidden.view(-1, hidden.shape[-1])
        totals = [zero_sum(item) for item in parameters]
        values: list[torch.Tensor] = []
        sums = [item for item in (of_hidden, *totals) if item is not None]
        with self.call.restored():
            run_tile = (self._linear_tile if self.call.head.is_linear else self._any_tile)(parameters, totals)
            for rows, at, tile, count in self._tiles(hidden, sums):
                values += [torch.empty_like(item) for item in values[:1] for _ in range(1, count)]
                finish = partial(self._finished, rows=rows, function=function)
                of_rows = None if upstream is None else upstream[rows]
                part, of_tile = run_tile(tile, finish, of_rows, wants_hidden)
                if function is not None:  # without a function only the gradients are wanted
                    values.append(part)
                if flat is not None and isinstance(at, slice):
                    flat[at] += of_tile
                elif flat is not None:
                    flat.index_add_(0, at, of_tile.to(flat.dtype))
        return values, [of_hidden, *totals]

    def _row_numbers(self) -> torch.Tensor:
        lead, numbers = self.layout.select(-1, 0), self.numbers
        if numbers is None:
            numbers = torch.arange(self.layout.stride(-1), device=self.call.device)
        return numbers.as_strided(lead.shape, lead.stride(), lead.storage_offset()).reshape(-1)

    def _tiles(
        self, hidden: torch.Tensor, written: Sequence[torch.Tensor]
    ) -> Iterator[tuple[slice, Any, torch.Tensor, int]]:
        """Yield each tile's rows, their places in the flat hidden states, that part of these, and how many
        tiles it stands for (`tiles_to_run`)."""
        flat, lead = hidden.detach().reshape(-1, hidden.shape[-1]), self.layout.select(-1, 0)
        in_order, start = self.numbers is None and lead.is_contiguous(), lead.storage_offset()
        order = None if in_order else self._row_numbers()
        count, size = lead.numel(), self.call.tokens
        tiles = [slice(first, min(first + size, count)) for first in range(0, count, size)]
        for rows, stands_for in tiles_to_run(tiles, hidden, written):
            at = slice(start + rows.start, start + rows.stop) if order is None else order[rows]
            yield rows, at, flat[at], stands_for

    def _finished(self, logits: torch.Tensor, rows: slice, function: RowCall | None) -> torch.Tensor:
        for step in (*self.steps, function):
            logits = logits if step is None else step(logits, rows)
        return logits

    def _linear_tile(self, parameters: Sequence[torch.Tensor], totals: list[torch.Tensor]) -> Any:
        weight, bias = self.call.linear(parameters)

        def run(tile: torch.Tensor, finish: Any, upstream: Any, wants_hidden: bool) -> Any:
            with torch.no_grad():
                logits = F.linear(tile, weight, bias)
            with torch.enable_grad():
                values = finish(logits.requires_grad_())
            with torch.autocast(self.call.device.type, enabled=False):
                (of_logits,) = _gradients(values, [logits], upstream)
                for name, total in zip(self.call.names, totals, strict=True):
                    if name == "weight":
                        add_product(total, of_logits, tile.to(of_logits.dtype))
                    else:
                        total += of_logits.sum(0, dtype=total.dtype)
                return values.detach(), product(of_logits, weight) if wants_hidden else None

        return run

    def _any_tile(self, parameters: Sequence[torch.Tensor], totals: list[torch.Tensor]) -> Any:
        leaves = [item.detach().requires_grad_() for item in parameters]

        def run(tile: torch.Tensor, finish: Any, upstream: Any, wants_hidden: bool) -> Any:
            with torch.enable_grad():
                tile = tile.detach().requires_grad_(wants_hidden)
                values = finish(self.call.logits(tile, leaves))
            with torch.autocast(self.call.device.type, enabled=False):
                found = _gradients(values, [*leaves, tile] if wants_hidden else leaves, upstream)
            for total, of_parameter in zip(totals, found, strict=False):
                total += of_parameter
            return values.detach(), found[-1] if wants_hidden else None

        return run


def _gradients(values: torch.Tensor, inputs: list[torch.Tensor], upstream: torch.Tensor | None) -> list[Any]:
    upstream = torch.ones_like(values) if upstream is None else upstream.to(values.dtype)
    return list(torch.autograd.grad(values, inputs, upstream, materialize_grads=True))


_aten = torch.ops.aten
_ROW_WISE = (
    *(_aten._log_softmax, _aten._softmax, _aten.amax, _aten.argmax),
    *(_aten.gather, _aten.logsumexp, _aten.mean, _aten.sum),
)
"""Ops that treat each row by itself if their ``dim`` is the last one."""

_COPIES = (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone)
_RESHAPES = (torch.Tensor.reshape, torch.Tensor.view, torch.Tensor.flatten, torch.flatten, torch.reshape)
_LEAVES_TORCH = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__)

NOT_CALLED = (
    "the model's forward computes its loss from the head's weight, without a call of the head (Liger's fused "
    "loss, TRL's trainers): switch that off, or leave tile_config.loss out"
)


def auto_tokens(tokens: int, hidden_size: int, vocabulary_size: int) -> int:
    """Return how many tokens make a tile under ``auto``.

    At least `AUTO_LEAST_TOKENS`, and so many that the logits of a tile take half as much memory as the hidden
    states of the batch: with what the loss computes from them (14 bytes for a bf16 logit) 3.5 times as much.
    """
    return max(AUTO_LEAST_TOKENS, tokens * hidden_size // (2 * vocabulary_size))


def tile_head(head: nn.Module, tile: Tile, say: ReportWhole, model: nn.Module, unused: ReportWhole) -> Undo:
    """Run a head and the calls that follow it in tiles; return a function that restores its forward.

    Args:
        head: a linear layer, or a module around one (adapters), which ``model`` calls.
        tile: how many tokens make a tile.
        say: called with the reason if the logits are made whole in training.
        unused: called with the reason if the first training forward of ``model`` does not call the head.
    """
    tiled = _TiledHead(head, tile, say)
    restore = replace_forward(head, tiled.forward)

    def look(*_: Any) -> None:
        if torch.is_grad_enabled():
            watch.remove()
            if not tiled.called:
                unused(NOT_CALLED)

    watch = model.register_forward_hook(Hook(look))

    def undo() -> None:
        watch.remove()
        restore()

    return undo


def is_tiled_head(head: nn.Module) -> bool:
    """Whether `tile_head` acts on a head."""
    call = getattr(vars(head).get("forward"), "call", None)
    return isinstance(getattr(call, "__self__", None), _TiledHead)


class _TiledHead:
    def __init__(self, module: nn.Module, tile: Tile, say: ReportWhole) -> None:
        self._head, self._tile, self._say = Head(module), tile, say
        self._kinds: dict[Any, tuple[int, torch.dtype]] = {}
        self.called = False

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        """Return logits ``[.., V]`` of hidden states ``[.., H]``, in place of the head's own forward."""
        reject_tracing()
        self.called = True
        module, own = self._head.module, self._head.run
        known = not args and not kwargs and type(hidden) in (torch.Tensor, FakeTensor)
        if not known or hidden.dim() < 2 or not hidden.numel():
            return own(hidden, *args, **kwargs)
        parts = (
            module.input_parts if self._head.is_divided else 1
        )  # whose rows a call multiplies on each rank
        rows = int(hidden.shape[:-1].numel() * parts)
        if self._tile.tiles is not None:
            tokens = math.ceil(rows / self._tile.tiles)
        else:
            size = module.output_size if self._head.is_divided else self._kind(hidden)[0]
            tokens = self._tile.tokens or auto_tokens(rows, hidden.shape[-1], size)
        reason = _why_whole(self._head) if tokens < rows else ""
        if reason:
            self._say(reason)
        if reason or tokens >= rows:
            return own(hidden)
        if self._head.is_divided:
            hidden = module.whole_input(hidden)
        vocabulary, dtype = self._kind(hidden)
        trained = {name: item for name, item in module.named_parameters() if item.requires_grad}
        call = HeadCall(self._head, tuple(trained), tokens, dtype, hidden.device)
        form = RowRecipe(call, layout_of(hidden.shape[:-1], vocabulary, dtype))
        return _shown(form, self._say, hidden, tuple(trained.values()), None)

    def _kind(self, hidden: torch.Tensor) -> tuple[int, torch.dtype]:
        """Return the size of the vocabulary and the dtype of logits.

        What a linear layer says of itself; else found by computing the logits of one row, once.
        """
        kind = hidden.device.type
        weight: Any = self._head.module.weight if self._head.is_linear else None
        if type(weight) in (nn.Parameter, FakeTensor) and hidden.dtype == weight.dtype:
            casts = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
            return len(weight), torch.get_autocast_dtype(kind) if casts else hidden.dtype
        key = (hidden.dtype, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        if key not in self._kinds:
            # Detached: autocast would cache casts of the parameters themselves that have no gradient.
            own = {name: item.detach() for name, item in self._head.module.named_parameters()}
            row = hidden.detach().reshape(-1, hidden.shape[-1])[:1]
            with torch.no_grad(), CallState(hidden.device, True, ()).restored():
                if self._head.is_divided:  # its call would communicate
                    made = F.linear(row, own["weight"], own.get("bias"))
                else:
                    made = self._head.with_parameters(own, row)
            self._kinds[key] = made.shape[-1], made.dtype
        return self._kinds[key]


def _why_whole(head: Head) -> str:
    if frees_weights_after_its_call(head.module):
        return "fully_shard on the head itself frees its weight after its call"
    if any(hasattr(item, "ds_id") for item in head.module.parameters()):
        return "ZeRO-3 frees the head's weight after its call"
    if head.is_divided and not head.is_linear:
        return "something has replaced the forward of the divided head"
    return ""


class TiledLogits(torch.Tensor):
    """Logits ``[.., V]`` that are computed only if they are read; until then it holds the hidden states."""

    form: RowRecipe
    say: ReportWhole
    hidden: torch.Tensor
    parameters: tuple[torch.Tensor, ...]
    whole: torch.Tensor | None

    @staticmethod
    def __new__(cls, form: RowRecipe, say: ReportWhole) -> TiledLogits:
        layout, device = form.layout, form.call.device
        made: TiledLogits = torch.Tensor._make_wrapper_subclass(
            cls, layout.shape, dtype=layout.dtype, device=device
        )
        made.form, made.say, made.whole = form, say, None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = _unread(func, args, kwargs)
        if found is not NotImplemented:
            return found
        if func in _LEAVES_TORCH:
            return func(*tree_map_only(TiledLogits, _read, args), **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default):
            made = _like(args[0], args[0].form)
            made.whole = args[0].whole
            return made
        if func._schema.is_mutable and isinstance(args[0], TiledLogits):
            raise RuntimeError(
                f"{func} writes into logits that are computed in tiles (tile_config.loss). Write into a "
                "copy of them, or set tile_config.loss: off"
            )
        found = [item for item in tree_leaves((args, kwargs)) if isinstance(item, TiledLogits)]
        if any(_in_graph(item) and item.whole is None for item in found):
            found[0].say(f"{func} reads all of them at once")
        args, kwargs = tree_map_only(TiledLogits, _read, (args, kwargs))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _read(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TiledLogits(shape={list(self.shape)}, dtype={self.dtype}, made when read)"


def _like(logits: TiledLogits, form: RowRecipe) -> TiledLogits:
    made = TiledLogits(form, logits.say)
    made.hidden, made.parameters = logits.hidden, logits.parameters
    return made


def _read(logits: TiledLogits) -> torch.Tensor:
    """Return the whole logits; they are computed once and kept."""
    if logits.whole is None:
        made = logits.form.values(None, logits.hidden, logits.parameters)
        logits.whole = made.reshape(logits.shape)
    return logits.whole


def _in_graph(logits: TiledLogits) -> bool:
    return logits.requires_grad and torch.is_grad_enabled()


def _shown(
    form: RowRecipe,
    say: ReportWhole,
    hidden: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    parent: TiledLogits | None,
) -> TiledLogits:
    """Return logits that are not computed, with an autograd node.

    They derive from ``parent``, whose node gets no gradient but must run: DDP waits for it.
    """
    with no_saved_tensor_hooks():
        shown: TiledLogits = _Rows.apply(form, None, say, parent, hidden, *parameters)
    shown.hidden, shown.parameters = hidden, parameters
    return shown


class _Rows(torch.autograd.Function):
    """The values that a function returns for each row; backward runs it again, tile by tile.

    Without a function: logits that are not computed. They get a gradient only if they were read after all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        form: RowRecipe,
        function: RowCall | None,
        say: ReportWhole,
        parent: Any,
        hidden: torch.Tensor,
        *parameters: Any,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.form, ctx.function = form, function
        ctx.save_for_backward(hidden, *parameters)
        if function is None:
            return TiledLogits(form, say)
        values = form.values(function, hidden, parameters)
        if not values.is_floating_point():
            ctx.mark_non_differentiable(values)
        return values

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: torch.Tensor | None) -> tuple[Any, ...]:
        if upstream is None:
            return tuple(None for _ in ctx.needs_input_grad)
        if ctx.function is None:
            upstream = upstream.reshape(-1, upstream.shape[-1])
        inputs = ctx.saved_tensors
        wants_hidden = ctx.needs_input_grad[-len(inputs)]
        _, found = ctx.form.differentiated(ctx.function, upstream, inputs[0], inputs[1:], wants_hidden)
        rounded = (
            None if one is None else one.to(item.dtype) for one, item in zip(found, inputs, strict=True)
        )
        return None, None, None, None, *rounded


class _Loss(torch.autograd.Function):
    """Sum or mean of a function's values for rows; forward computes the gradients of the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        form: RowRecipe,
        function: RowCall,
        reduce: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
        parent: Any,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.dtypes = [item.dtype for item in (hidden, *parameters)]
        values, found = form.differentiated(function, None, hidden, parameters, ctx.needs_input_grad[4])
        loss, share = reduce(torch.cat(values))
        ctx.save_for_backward(share, *found)
        return loss

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        share, *sums = ctx.saved_tensors
        factor = upstream.to(share.dtype) * share
        found = [
            None if one is None else torch.mul(one, factor, out=torch.empty_like(one, dtype=dtype))
            for one, dtype in zip(sums, ctx.dtypes, strict=True)
        ]
        return None, None, None, None, *found


def _unread(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call without computing the logits, or ``NotImplemented`` if it needs them."""
    found = {id(item): item for item in tree_leaves((args, kwargs)) if isinstance(item, TiledLogits)}
    name = getattr(func, "__name__", "")
    if len(found) != 1 or name in ("__get__", "__set__"):
        return NotImplemented
    (logits,) = found.values()
    if logits.whole is not None or (logits.requires_grad and logits.is_leaf):
        return NotImplemented
    if name in ROW_LOSSES:
        return _row_loss(logits, func, args, kwargs)
    if name == FULL_LOGITS:
        held, state = (LogitsPlaceholder(), *args[1:3]), CallState(logits.form.call.device, False, ())
        gather = RowCall(func, held, {}, logits.form.lead, state)
        return _derived(logits, logits.form.and_then(gather, args[1]))
    if func in _COPIES:
        return _derived(logits, logits.form.copied())
    made = _traced(logits, logits.form, func, args, kwargs)
    if made is NotImplemented and func in _RESHAPES:  # a reshape that is no view is a view of a copy
        made = _traced(logits, logits.form.copied(), func, args, kwargs)
    return made


def _derived(logits: TiledLogits, form: RowRecipe) -> TiledLogits:
    if not _in_graph(logits):
        return _like(logits, form)
    return _shown(form, logits.say, logits.hidden, logits.parameters, logits)


def _row_values(logits: TiledLogits, form: RowRecipe, function: RowCall) -> torch.Tensor:
    if not _in_graph(logits):
        return form.values(function, logits.hidden, logits.parameters)
    with no_saved_tensor_hooks():
        values: torch.Tensor = _Rows.apply(
            form, function, logits.say, logits, logits.hidden, *logits.parameters
        )
    return values


def _row_loss(logits: TiledLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a loss (`ROW_LOSSES`) with one target for each row; ``NotImplemented`` for other arguments."""
    asked = inspect.signature(func).bind(*args, **kwargs)
    asked.apply_defaults()
    given, form, is_torchs = dict(asked.arguments), logits.form, func is F.cross_entropy
    first, target, reduction = given.pop(next(iter(given))), given.pop("target"), given.pop("reduction")
    unusual = [name for name in ("weight", "size_average", "reduce") if given.pop(name, None) is not None]
    if first is not logits or unusual or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if target.is_floating_point() or target.shape != form.lead or (is_torchs and target.dim() != 1):
        return NotImplemented
    state = CallState(form.call.device, False, ())
    function = RowCall(_losses, (func, LogitsPlaceholder(), target.unsqueeze(-1)), given, form.lead, state)

    def reduce(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts = target != given["ignore_index"]
        count = counts.sum() if reduction == "mean" else counts.new_ones((), dtype=torch.long)
        if is_torchs:
            # Reduced by the same kernel as without tiles, in its order: as log-probabilities of one class.
            loss = F.nll_loss(-values.unsqueeze(1), torch.where(counts, 0, -100), reduction=reduction)
        else:
            loss = values.sum() / count
        return loss, torch.where(count > 0, 1.0 / count, 0.0)

    if reduction == "none":
        return _row_values(logits, form, function).reshape(form.lead)
    if not _in_graph(logits):
        return reduce(form.values(function, logits.hidden, logits.parameters))[0]
    with no_saved_tensor_hooks():
        return _Loss.apply(form, function, reduce, logits, logits.hidden, *logits.parameters)


def _losses(func: Any, logits: torch.Tensor, target: torch.Tensor, **options: Any) -> Any:
    return func(logits, target.squeeze(-1), reduction="none", **options)


class _OpsOfCall(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _traced(logits: TiledLogits, form: RowRecipe, func: Any, args: Any, kwargs: Any) -> Any:
    """Return what a function returns for logits of ``form``, not computed; else ``NotImplemented``."""
    tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
    others = [item for item in tensors if not isinstance(item, TiledLogits)]
    layout, ops = form.layout.detach(), _OpsOfCall()

    def on_meta(item: torch.Tensor) -> torch.Tensor:
        if isinstance(item, TiledLogits):
            return layout
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="meta")

    meta_args, meta_kwargs = tree_map_only(torch.Tensor, on_meta, (args, kwargs))
    try:
        with ops:
            out = func(*meta_args, **meta_kwargs)
    except Exception:  # the call with the logits themselves will raise it too
        return NotImplemented
    if not isinstance(out, torch.Tensor) or out is layout or not ops.calls:
        return NotImplemented
    no_copies = (_aten.detach.default, _aten.alias.default)
    if any(op._schema.is_mutable or op in no_copies for op, _, _ in ops.calls):
        return NotImplemented
    if out.untyped_storage()._cdata == layout.untyped_storage()._cdata:
        return _derived(logits, replace(form, layout=out)) if _has_whole_rows(out, layout) else NotImplemented
    learned = torch.is_grad_enabled() and any(item.requires_grad for item in others)
    if learned or not all(_is_row_wise(call, layout) for call in ops.calls):
        return NotImplemented
    lead, state = form.lead, CallState(form.call.device, False, ())
    held_args, held_kwargs = tree_map_only(TiledLogits, lambda _: LogitsPlaceholder(), (args, kwargs))
    call = RowCall(func, held_args, held_kwargs, lead, state)
    of_rows = [item for item in others if not is_same_for_rows(item, lead)]
    if out.shape == layout.shape and not of_rows:
        return _derived(logits, form.and_then(call))
    fits = all(item.dim() == layout.dim() and item.shape[:-1] == lead for item in of_rows)
    if not fits or out.dim() > layout.dim() or out.shape[: len(lead)] != lead:
        return NotImplemented
    return _row_values(logits, form, call).reshape(out.shape)


def _has_whole_rows(view: torch.Tensor, layout: torch.Tensor) -> bool:
    apart = layout.stride(-1)
    same = view.dim() >= 2 and view.shape[-1] == layout.shape[-1] and view.stride(-1) == apart
    return same and view.storage_offset() < apart and view.numel() > 0


def _is_row_wise(call: tuple[Any, tuple[Any, ...], dict[str, Any]], layout: torch.Tensor) -> bool:
    op, args, kwargs = call
    if torch.Tag.pointwise in op.tags or op is _aten._to_copy.default:
        return True
    if op.overloadpacket not in _ROW_WISE or args[0].shape != layout.shape:
        return False
    dims = argument_of(op, args, kwargs, "dim")
    return dims in (-1, layout.dim() - 1, [-1], [layout.dim() - 1])
