"""A module that treats tokens one by one, run over tiles of the tokens: what autograd saves is its input.

Forward runs the module for one tile after the other under hooks that keep nothing, and puts the tiles of
its output side by side. Backward runs each tile again and its backward at once, so that what the module
saves is there for one tile at a time. `plan.tiles` finds out which modules treat tokens one by one.

* **Two forwards.** The input is saved by a node of its own (`_Input`) before the first tile runs. If the
  layer around the module is run again (``torch.utils.checkpoint``, `recompute`), that run ends as soon as the
  last saved tensor is there. If the node that runs the tiles saved the input, the module would run three
  times: in forward, in the recomputation to get to that node, and in its backward.
* **The input has a fate** like any saved tensor: the hooks of a plan see it, and the fate is that of the op
  that produced it.
* **One gradient per weight and backward**, from one node, whatever the number of tiles: data parallel
  wrappers, tagged gradients of parallel layers and accumulation work as without tiles.
* **Sums over tiles in fp32.** The product that gives the gradient of a linear layer's weight is added to
  its sum in fp32 (`_WeightSums`) and rounded once at the end, as one product over all tokens would be. For
  other weights (norms, experts) each tile's gradient is rounded to their dtype before it is added.
* **Losses and gradients of inputs** are bitwise those of the whole module where its kernels treat rows
  alike for any number of rows. Gradients of weights are sums in another order: equal up to rounding.
* **Random numbers** of a tile are the same both times: the tiles run again in their order, from the state
  in which the first run began.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..plan.actions import Tile
from ..plan.dry_run import exchanged, is_of_dry_run, no_backward, standing_for
from ..plan.wrappers import FSDP2_METHOD, is_compiled
from .autograd_state import next_node_number, skip_node_numbers
from .call_state import CallState
from .hook_wrappers import Undo, reject_tracing, replace_call, replace_forward

_PRODUCT_ROWS = 16_384
"""Most rows of a weight's gradient computed at once, so that there is no second fp32 copy of all of it."""


class Exchangeable:
    """A module whose parameters can be replaced by other tensors for one call of the function ``run``."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        self.module, self.run = module, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def with_parameters(self, named: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        with exchanged(self.module, named):
            return self.run(*args, **kwargs)


@contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """Within the block a plan's hooks see no saved tensors: these live for one tile, or until backward."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a node's backward reject ``create_graph``: its second derivatives would miss the tiles' part.

    PyTorch's ``once_differentiable`` raises only where the incoming gradient requires a gradient, and that of
    a loss does not.
    """

    @wraps(backward)
    def checked(ctx: Any, *upstream: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: gradients of tiles and streamed sequences cannot be differentiated. "
                "Leave tile_config and stream_config out of this training."
            )
        return backward(ctx, *upstream)

    return checked


def zero_sum(like: torch.Tensor) -> torch.Tensor:
    """Return zeros for a sum of gradients, of the shape of ``like``, at least in fp32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return matrix products in at least fp32, without the rounding at the end of half-precision kernels.

    Of ``[.., m, n]`` and ``[.., n, p]`` with equal leading sizes. On fake tensors it calls the ops that an
    accelerator runs.
    """
    if left.dtype not in (torch.bfloat16, torch.float16):
        return left @ right
    if isinstance(left, FakeTensor) or (left.is_cuda and torch.version.hip is None):
        if left.dim() == 2:
            return torch.mm(left, right, out_dtype=torch.float32)
        made = torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out_dtype=torch.float32)
        return made.unflatten(0, left.shape[:-2])
    return left.float() @ right.float()


def add_product(total: torch.Tensor, of_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add a linear layer's weight gradient, of outputs ``[C, V]`` and inputs ``[C, H]``, to ``[V, H]``."""
    for first in range(0, len(total), _PRODUCT_ROWS):
        some = slice(first, first + _PRODUCT_ROWS)
        total[some].add_(product(of_logits[:, some].t(), hidden))  # `+=` would call `copy_` as well


AUTO_LEAST_TOKENS, AUTO_MOST_TILES = 1024, 16
"""Fewer rows make slow products: each tile reads the weights, reads and writes their gradients. More tiles
free little: a Llama's MLP saves 14 times its input's bytes, one tile of sixteen less than the input's."""

_CAPTURING = "transformers.utils.output_capturing"

ReportWhole = Callable[[str], None]
"""Called with the reason why a module runs whole after all."""


def tiles_to_run(
    tiles: Sequence[slice], tensor: torch.Tensor, written: Sequence[torch.Tensor] = ()
) -> Iterator[tuple[slice, int]]:
    """Yield the tiles of ``tensor`` that run one after the other, each with how many tiles it stands for.

    That is each tile, for itself. In a dry run the second stands for all that are as long, but for the first,
    which makes what the others write to: they allocate and compute the same. The versions of the tensors
    ``written`` and the numbers of autograd's nodes then go on as if each had run.
    """
    if not is_of_dry_run(tensor):
        yield from ((tile, 1) for tile in tiles)
        return
    lengths = [tile.stop - tile.start for tile in tiles]
    for number, tile in enumerate(tiles):
        as_first = number > 0 and lengths[number] == lengths[0]
        if as_first and number > 1:
            continue
        count = lengths.count(lengths[0]) - 1 if as_first else 1
        node, versions = next_node_number(), [item._version for item in written]
        with standing_for(tensor, count):
            yield tile, count
        if count > 1:
            for item, before in zip(written, versions, strict=True):
                increment_version([item] * ((count - 1) * (item._version - before)))
            skip_node_numbers((count - 1) * (next_node_number() - node))


def auto_tokens(tokens: int) -> int:
    """Return how many of a call's tokens make a tile under ``auto``: a sixteenth, at least 1,024."""
    return max(AUTO_LEAST_TOKENS, math.ceil(tokens / AUTO_MOST_TILES))


def tile_module(module: nn.Module, tile: Tile, say: ReportWhole, parts: int = 1) -> Undo:
    """Let a module run over tiles of the tokens; return a function that restores it.

    Args:
        module: its first tensor argument is ``[.., T, H]``, a row for each token.
        tile: how many tokens make a tile.
        say: called with the reason if the module runs whole after all.
        parts: number of ranks among which the module divides its output: it returns ``[.., T / parts, H]``.
    """
    if getattr(module, "_compiled_call_impl", None) is not None:
        return replace_call(module, lambda call: TiledModule(module, call, tile, say, parts).forward)
    return replace_forward(module, TiledModule(module, module.forward, tile, say, parts).forward)


def is_tiled(module: nn.Module) -> bool:
    """Whether `tile_module` acts on a module."""
    calls = (getattr(vars(module).get(name), "call", None) for name in ("forward", "_compiled_call_impl"))
    return any(isinstance(getattr(call, "__self__", None), TiledModule) for call in calls)


class TiledModule(Exchangeable):
    """A module whose calls run over tiles of the tokens; arguments as of `tile_module`."""

    def __init__(
        self, module: nn.Module, run: Callable[..., Any], tile: Tile, say: ReportWhole, parts: int
    ) -> None:
        super().__init__(module, run)
        self._tile, self._say, self._parts = tile, say, parts
        self.compiled = any(map(is_compiled, module.modules()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        reject_tracing()
        leaves, spec = tree_flatten((args, kwargs))
        hidden = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
        if hidden is None or hidden.dim() < 2 or not hidden.numel() or hidden.shape[-2] % self._parts:
            return self.run(*args, **kwargs)
        cut = _TokenTiles(hidden.shape[:-1], self._parts, self._tokens(hidden.shape[:-1].numel()))
        reason = self._why_whole() if len(cut.tiles) > 1 else ""
        if reason:
            self._say(reason)
        if reason or len(cut.tiles) == 1:
            return self.run(*args, **kwargs)
        return _Call(self, leaves, spec, cut).result()

    def _tokens(self, rows: int) -> int:
        if self._tile.tokens is not None:
            return self._tile.tokens
        tokens = auto_tokens(rows) if self._tile.tiles is None else math.ceil(rows / self._tile.tiles)
        return math.ceil(rows / math.ceil(rows / tokens))  # tiles of one size, the last a little shorter

    def _why_whole(self) -> str:
        inside = [module for module in self.module.modules() if module is not self.module]
        if any(hasattr(type(module), FSDP2_METHOD) for module in inside):
            return "fully_shard on a module inside it frees weights between the tiles"
        if any(hasattr(item, "ds_id") for item in self.module.parameters()):
            return "ZeRO-3 frees weights between the tiles"
        capturing = getattr(sys.modules.get(_CAPTURING), "_active_collector", None)
        if capturing is not None and capturing.get():
            hooks = (hook for module in inside for hook in module._forward_hooks.values())
            if any(getattr(hook, "__module__", "") == _CAPTURING for hook in hooks):
                return "transformers collects what a module inside it returns (output_router_logits)"
        return ""


class _TokenTiles:
    """Cuts tensors with a row for each token into tiles: along the sequence, for all sequences alike.

    If a sequence was gathered from several ranks, a tile has the same slice of each rank's part. So when the
    module divides its output among the ranks again, each rank gets a slice of its own part.

    Args:
        lead: shape of the hidden states without their last dimension, ``[.., T]``.
        parts: number of ranks that have a part of the sequence.
        tokens: about how many tokens a tile has.
    """

    def __init__(self, lead: torch.Size, parts: int, tokens: int) -> None:
        self.lead, self._parts, self._length = lead, parts, lead[-1] // parts
        self.returned = torch.Size((*lead[:-1], self._length))
        # With one row, the shape [1, 1] would be ambiguous.
        self._size = max(2, tokens * lead[-1] // (lead.numel() * parts))
        starts = range(0, self._length, self._size)
        self.tiles = [slice(start, min(start + self._size, self._length)) for start in starts]

    def tile(self, tensor: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return a contiguous tile of an argument, ``[*lead, ..]`` or the same flattened."""
        tile = self.place(tensor, rows, self.lead).contiguous()
        if tensor.shape[: len(self.lead)] == self.lead:
            return tile.flatten(len(self.lead) - 1, len(self.lead)) if self._parts > 1 else tile
        return tile.flatten(0, len(self.lead) - (self._parts == 1))

    def place(self, tensor: torch.Tensor, rows: slice, lead: torch.Size) -> torch.Tensor:
        """Return a tile as a view of the whole tensor; if there are parts, it has a dimension for them."""
        dim = len(lead) - 1
        view = tensor if tensor.shape[: len(lead)] == lead else tensor.unflatten(0, lead)
        if self._parts > 1 and lead == self.lead:
            view, dim = view.unflatten(dim, (self._parts, self._length)), dim + 1
        return view.narrow(dim, rows.start, rows.stop - rows.start)


class _Call:
    """One call of a tiled module, with its flattened arguments: each tensor has a row for each token."""

    def __init__(self, tiled: TiledModule, leaves: list[Any], spec: TreeSpec, cut: _TokenTiles) -> None:
        self.tiled, self._leaves, self._spec, self._cut = tiled, leaves, spec, cut
        self._at = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._wanted = [leaves[at].requires_grad for at in self._at]
        self._named = {name: item for name, item in tiled.module.named_parameters() if item.requires_grad}
        self.parameters = tuple(self._named.values())
        self._versions = [item._version for item in self.parameters]
        self._state = CallState(leaves[self._at[0]].device, True, leaves)
        self._made: TreeSpec | None = None

    def result(self) -> Any:
        given = [self._leaves[at] for at in self._at]
        for at in self._at:
            self._leaves[at] = None  # autograd holds the tensors that backward needs
        if not (torch.is_grad_enabled() and (any(self._wanted) or self.parameters)):
            outputs: Sequence[torch.Tensor] = self.forward(given)
        else:
            learned = () if any(self._wanted) else self.parameters[:1]  # so that there is a node
            held = _Input.apply(len(given), *given, *learned)
            node = next(item.grad_fn for item in held if item.grad_fn is not None)
            outputs = _Tiles.apply(self, node, len(given), *held, *self.parameters)
        assert self._made is not None
        return tree_unflatten(list(outputs), self._made)

    def forward(self, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        whole: list[torch.Tensor] = []
        lead = self._cut.returned
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, no_backward):  # each tile runs again
            for rows, _ in tiles_to_run(self._cut.tiles, given[0], whole):
                made, self._made = tree_flatten(self._run(self.tiled.run, self._tiles(given, rows)))
                for at, item in enumerate(made):
                    if not rows.start:
                        by_lead = item.shape[: len(lead)] == (*lead[:-1], rows.stop)
                        shape = (
                            (*lead, *item.shape[len(lead) :]) if by_lead else (lead.numel(), *item.shape[1:])
                        )
                        if given[0].shape == shape:  # with its strides, as without tiles
                            whole.append(torch.empty_like(given[0], dtype=item.dtype))
                        else:
                            whole.append(item.new_empty(shape))
                    place = self._cut.place(whole[at], rows, lead)
                    place.copy_(item.detach().view(place.shape))
        return tuple(whole)

    def backward(
        self, given: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of ``given``, ``None`` where none is needed, and of the parameters."""
        if [item._version for item in self.parameters] != self._versions:
            raise RuntimeError(
                f"a weight of {type(self.tiled.module).__name__}, which runs in tiles, was written in place "
                "between its forward and its backward"
            )
        of_given = [
            torch.empty_like(item, memory_format=torch.contiguous_format) if wants else None
            for item, wants in zip(given, self._wanted, strict=True)
        ]
        sums = [zero_sum(item) for item in self.parameters]
        run, present = self.tiled.run, dict(self.tiled.module.named_parameters())
        if any(present.get(name) is not item for name, item in self._named.items()):
            run = partial(self.tiled.with_parameters, self._named)  # `exchanged` has put others back since
        by_id = {id(item): total for item, total in zip(self.parameters, sums, strict=True)}
        # Compiled code would be traced again under a mode.
        summing = nullcontext() if self.tiled.compiled else _WeightSums(by_id)
        with self._state.restored(), no_saved_tensor_hooks(), _without_hooks(self.parameters), summing:
            for rows, _ in tiles_to_run(self._cut.tiles, given[0]):
                found = self._gradients(run, self._tiles(given, rows), upstream, rows)
                for whole in of_given:
                    if whole is not None:
                        one, place = next(found), self._cut.place(whole, rows, self._cut.lead)
                        place.copy_(torch.zeros(()) if one is None else one.reshape(place.shape))
                for total, one in zip(sums, found, strict=True):
                    if one is not None:
                        total += one
        return [*of_given, *(total.to(item.dtype) for total, item in zip(sums, self.parameters, strict=True))]

    def _gradients(
        self,
        run: Callable[..., Any],
        tiles: Sequence[torch.Tensor],
        upstream: Sequence[torch.Tensor | None],
        rows: slice,
    ) -> Iterator[torch.Tensor | None]:
        ends = [
            (output, self._cut.place(one, rows, self._cut.returned).reshape(output.shape))
            for output, one in zip(tree_flatten(self._run(run, tiles))[0], upstream, strict=True)
            if one is not None and output.requires_grad
        ]
        asked = [*(tile for tile in tiles if tile.requires_grad), *self.parameters]
        if not ends:
            yield from (None for _ in asked)
            return
        made, of_made = zip(*ends, strict=True)
        yield from torch.autograd.grad(made, asked, of_made, allow_unused=True)

    def _tiles(self, given: Sequence[torch.Tensor], rows: slice) -> list[torch.Tensor]:
        return [
            self._cut.tile(item.detach(), rows).requires_grad_(wants)
            for item, wants in zip(given, self._wanted, strict=True)
        ]

    def _run(self, run: Callable[..., Any], tiles: Sequence[torch.Tensor]) -> Any:
        """Run the module with tiles in the place of its tensors, with a graph."""
        leaves = list(self._leaves)
        for at, tile in zip(self._at, tiles, strict=True):
            leaves[at] = tile
        args, kwargs = tree_unflatten(leaves, self._spec)
        with torch.enable_grad():
            return run(*args, **kwargs)


@contextmanager
def _without_hooks(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Disable the hooks on parameters: autograd calls them later, with the whole gradient."""
    hooks = [item._backward_hooks for item in parameters]
    try:
        for item in parameters:
            item._backward_hooks = None
        yield
    finally:
        for item, before in zip(parameters, hooks, strict=True):
            item._backward_hooks = before


class _Input(torch.autograd.Function):
    """A node that does nothing but save the tensors of a call."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*tensors[:count])
        ctx.others = len(tensors) - count
        return tuple(item.view_as(item) for item in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[Any, ...]:
        return None, *upstream, *(None for _ in range(ctx.others))


class _Tiles(torch.autograd.Function):
    """Runs the tiles; the tensors that they read in backward are saved by the node of `_Input`."""

    @staticmethod
    def forward(ctx: Any, call: _Call, node: Any, count: int, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.node = call, node
        return call.forward(tensors[:count])

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *ctx.call.backward(ctx.node.saved_tensors, upstream)


class _WeightSums(TorchFunctionMode):
    """Adds gradients of linear layers' weights to ``sums`` in fp32 (by ``id``), instead of autograd's."""

    def __init__(self, sums: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self._sums, self._casts = sums, dict[int, torch.Tensor]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and id(args[1] if len(args) > 1 else None) in self._sums and not kwargs:
            return self._linear(*args)
        return func(*args, **(kwargs or {}))

    def _linear(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        kind, dtype = hidden.device.type, weight.dtype
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        cast = self._casts.setdefault(id(weight), weight.detach().to(dtype))
        own = None if bias is None else bias.to(dtype)
        return _Linear.apply(hidden.to(dtype), weight, cast, own, self._sums[id(weight)])


class _Linear(torch.autograd.Function):
    """A linear layer. Backward adds its weight's gradient to a sum."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: Any, cast: Any, bias: Any, total: Any) -> Any:
        ctx.save_for_backward(hidden, cast)
        ctx.total = total
        return F.linear(hidden, cast, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        hidden, cast = ctx.saved_tensors
        rows = upstream.flatten(0, -2)
        add_product(ctx.total, rows, hidden.flatten(0, -2))
        of_hidden = upstream.matmul(cast) if ctx.needs_input_grad[0] else None
        of_bias = rows.sum(0) if ctx.needs_input_grad[3] else None
        return of_hidden, None, None, of_bias, None
