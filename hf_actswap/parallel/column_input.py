"""One input for several column-parallel layers: gathered once, only the shard saved, overlap in backward.

A column-parallel layer multiplies the whole sequence with its part of the weight. Under sequence parallelism
a rank has ``1/tp`` of the sequence, so the input is gathered first; ordinary autograd would save the gathered
tensor for the weight's gradient. Here the *shard* is saved, once for all layers that read it, and gathered
again in backward.

So the gradients of the weights are computed by the node of the input, and not by those of the products::

    shard --[_ColumnInput]--> gathered --[_Product]--> q          saves W_q alone
              |    ^  ^  ^        |------[_Product]--> k          saves W_k alone
      saves shard  |  |  |        |------[_Product]--> v          saves W_v alone
                  W_q W_k W_v     `------ anything else: ordinary autograd

In backward autograd runs the products first, in any order, and the input's node when all consumers have given
their gradients:

1. The first product *starts to gather the shard again*, asynchronously. Each product passes its output
   gradient dY to the input node and computes its part of dX while the gather runs.
2. The input node gets the sum of all dX. It *starts the reduction* (reduce-scatter; without sequence
   parallelism all-reduce) in ``reduce_dtype``, waits for the gather, computes each dW from dY and the
   gathered input while the reduction runs, waits for the reduction, and casts its result back.

For a frozen weight no dY is held; if all weights are frozen, no input is saved.

**Lifetimes on CUDA.** Everything runs on the stream of the forward, which autograd uses in backward too. An
asynchronous collective starts (on the device) after the work that this stream has, so it reads finished data.
`Pending` holds the collective's input and output, and `wait` makes the stream wait before the result is
read or a buffer is freed, so that memory is reused only by later work. The host waits for nothing. dY exists
from its product until its dW; the gathered input from the wait to the last dW. A backward that ends before
the input node (an exception, ``torch.autograd.grad`` with respect to the gathered tensor) leaves a
`_Received` behind, which the next backward recognises by its number and drops.

**How a product finds its input node.** By the input's ``grad_fn``, which no view or cast of the tensor has.
For any other tensor or weight ordinary autograd is used. Without gradients there is no node. A saved
tensor is read once per backward, as checkpointing demands.

**Recomputation.** In a recomputed region the new forward makes a new node of its own, and its graph is thrown
away after its saved tensors were taken. If the region begins after the gather, its input is a leaf there;
the product then saves as many tensors as before, so that the counts agree.

**Autocast.** The product runs in the autocast dtype, exactly as ``F.linear`` would, and backward in the same.
The input is gathered and saved in its own dtype, or, with ``in_autocast_dtype``, cast before the gather: half
the bytes on the wire and in memory, and the consumers' gradients are added up in that dtype (one more
rounding). Weights are cast again in backward; no cast copy of them is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from .collectives import Pending, begin_all_reduce, begin_gather, begin_reduce_scatter
from .mappings import all_gather, copied
from .weights import with_summed_gradient

_running_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward that runs on this thread; as ``torch.utils.checkpoint`` reads it."""

_INPUTS_BEFORE_WEIGHTS = 4

WeightProduct = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes a weight's gradient from a product's output gradient and the input's rows ``[T, H]``."""


class InputSettings(NamedTuple):
    """How the input of column-parallel layers is communicated.

    Args:
        group: tensor-parallel group.
        sequence_parallel: whether the input is this rank's part of the sequence; if not, it is whole.
        dim: dim of the sequence; not read without sequence parallelism.
        reduce_dtype: dtype in which input gradients are summed over the ranks; ``None``: their own.
        keep_gathered: whether the gathered input is saved in place of the shard, and not gathered again.
        in_autocast_dtype: whether, under autocast, the input is cast before the gather (only for inputs that
            nothing but products reads).
    """

    group: dist.ProcessGroup
    sequence_parallel: bool
    dim: int = 0
    reduce_dtype: torch.dtype | None = torch.float32
    keep_gathered: bool = False
    in_autocast_dtype: bool = False


def column_input(x: torch.Tensor, weights: Sequence[torch.Tensor], settings: InputSettings) -> torch.Tensor:
    """Return the input ``[.., S, .., H]`` that column-parallel layers with these ``weights`` multiply.

    Any other consumer must also do different work on each rank, because the gradients of all consumers are
    summed over the ranks. The tensor must not be written in place.

    Args:
        x: ``[.., S / tp, .., H]`` under sequence parallelism, else ``[.., H]``, alike on all ranks.
        weights: the layers' parameters, ``[out / tp, H]``. Their gradients are computed here; the layers
            must multiply with `linear`.
    """
    group = settings.group
    if group.size() == 1:
        return x
    if torch.compiler.is_compiling():
        if settings.sequence_parallel:
            return all_gather(x, settings.dim, group, True, settings.reduce_dtype)
        return copied(x, group, settings.reduce_dtype)
    own = x.detach()
    dtype = _autocast_dtype(x) if settings.in_autocast_dtype else None
    if dtype is not None:
        own = own.to(dtype)
    gathered = all_gather(own, settings.dim, group) if settings.sequence_parallel else own
    if not torch.is_grad_enabled() or not (x.requires_grad or any(w.requires_grad for w in weights)):
        return gathered
    summed = [with_summed_gradient(weight, group) for weight in weights]
    return _ColumnInput.apply(x, own, gathered, (settings, tuple(weights)), *summed)


def weight_of_linear(weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return weight.t() if transposed else weight


def linear(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, transposed: bool = False
) -> torch.Tensor:
    """Multiply: ``[.., H]`` with ``weight`` ``[out / tp, H]`` (or its transpose) to ``[.., out / tp]``.

    ``x`` is not saved if `column_input` returned it and ``weight`` was among its weights. A
    ``TorchFunctionMode`` sees this function, under the name ``linear``.
    """
    if has_torch_function((x, weight)):
        return handle_torch_function(linear, (x, weight), x, weight, group, transposed)
    if group.size() == 1:
        return F.linear(x, weight_of_linear(weight, transposed))
    behind = input_node_of(x, weight)
    if behind is not None:
        return _Product.apply(x, weight.detach(), behind, transposed)
    weight = with_summed_gradient(weight, group)
    if torch.is_grad_enabled() and x.requires_grad and x.is_leaf and not torch.compiler.is_compiling():
        return _Product.apply(x, weight, None, transposed)
    return F.linear(x, weight_of_linear(weight, transposed))


def input_node_of(x: torch.Tensor, weight: torch.Tensor) -> tuple[Any, int] | None:
    """Return the input node that made ``x``, and the index of ``weight`` among its weights.

    That node computes the weight's gradient, from what the product gives to `weight_gradient`.
    ``None``: ``x`` was not made by `column_input` with this weight.
    """
    node: Any = x.grad_fn
    input_node: Any = _ColumnInput._backward_cls
    if torch.compiler.is_compiling() or not isinstance(node, input_node):
        return None
    held = next((number for number, of in enumerate(node.weights) if of is weight), None)
    return None if held is None else (node, held)


class _Received:
    """Output gradients that the products of one backward have passed to the input node.

    ``gather`` is the running gather of the shard; ``None``: the input was saved whole.
    """

    def __init__(self, backward: int, gather: Pending | None) -> None:
        self.backward, self.gather = backward, gather
        self.gradients: list[tuple[int, torch.Tensor, WeightProduct]] = []


class _ColumnInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        own: torch.Tensor,
        gathered: torch.Tensor,
        about: tuple[InputSettings, tuple[torch.Tensor, ...]],
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.weights = about
        ctx.x_dtype = x.dtype
        ctx.received = None
        ctx.gathers_again = ctx.settings.sequence_parallel and not ctx.settings.keep_gathered
        if any(ctx.needs_input_grad[_INPUTS_BEFORE_WEIGHTS:]):
            ctx.save_for_backward(own if ctx.gathers_again else gathered)
        return gathered.view_as(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        received: _Received | None = ctx.received
        ctx.received = None
        reduction = None
        if gradient is not None and ctx.needs_input_grad[0]:
            to: InputSettings = ctx.settings
            if to.sequence_parallel:
                reduction = begin_reduce_scatter(gradient, to.dim, to.group, to.reduce_dtype)
            else:
                reduction = begin_all_reduce(gradient, to.group, to.reduce_dtype)
        weight_gradients: list[torch.Tensor | None] = [None] * len(ctx.weights)
        if received is not None and received.backward == _running_backward():
            whole = ctx.saved_tensors[0] if received.gather is None else received.gather.wait()
            _weight_gradients(received.gradients, whole, weight_gradients)
        dx = None if reduction is None else reduction.wait().to(ctx.x_dtype)
        casts = zip(weight_gradients, ctx.weights, strict=True)
        return dx, None, None, None, *(dw if dw is None else dw.to(weight.dtype) for dw, weight in casts)


class _Product(torch.autograd.Function):
    """The product with a weight, which saves the weight only; ``behind`` is the answer of `input_node_of`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, behind: tuple[Any, int] | None, transposed: bool
    ) -> torch.Tensor:
        note_input(ctx, x, behind)
        ctx.save_for_backward(weight)
        ctx.transposed = transposed
        return F.linear(x, weight_of_linear(weight, transposed))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradient.contiguous()
        (weight,) = ctx.saved_tensors
        product = partial(_dense, transposed=ctx.transposed)
        dw = weight_gradient(ctx, gradient, product, weight.dtype, "a column-parallel layer")
        if not needs_input_gradient(ctx):
            return None, dw, None, None
        weight = weight_of_linear(weight, ctx.transposed)
        with torch.autocast(gradient.device.type, enabled=False):
            dx = gradient.matmul(weight.to(gradient.dtype)).to(ctx.x_dtype)
        return dx, dw, None, None


def note_input(ctx: Any, x: torch.Tensor, behind: tuple[Any, int] | None) -> None:
    """Note in the context of a product (of ``x`` and a weight) what computes the weight's gradient.

    Without an input node the product itself does, and holds ``x``, which is held elsewhere anyway, or exists
    only during a recomputation.
    """
    ctx.behind, ctx.x_dtype = behind, x.dtype  # autograd's graph has this edge too, so no cycle
    holds = behind is None and ctx.needs_input_grad[1]
    ctx.x, ctx.version = (x.detach(), x._version) if holds else (None, 0)


def needs_input_gradient(ctx: Any) -> bool:
    """Whether a product's input needs a gradient, or the input of its node does."""
    needed: bool = (ctx if ctx.behind is None else ctx.behind[0]).needs_input_grad[0]
    return needed


def weight_gradient(
    ctx: Any, gradient: torch.Tensor, product: WeightProduct, dtype: torch.dtype, what: str
) -> torch.Tensor | None:
    """Return the gradient of a product's weight; ``None``: the input's node, told here, computes it.

    Args:
        ctx: the product's context, of `note_input`.
        gradient: the output gradient, contiguous, in a shape that ``product`` accepts.
        product: computes the weight's gradient from it and the input's rows ``[T, H]``, in its dtype.
        dtype: the weight's.
        what: whose input it is, for errors.
    """
    found: list[torch.Tensor | None] = [None]
    if ctx.behind is not None:
        node, number = ctx.behind
        _pass_output_gradient(node, number, gradient, product)
    elif ctx.x is not None:
        if ctx.x._version != ctx.version:
            raise RuntimeError(f"the input of {what} was modified in place")
        _weight_gradients([(0, gradient, product)], ctx.x, found)
    return None if found[0] is None else found[0].to(dtype)


def _pass_output_gradient(node: Any, number: int, gradient: torch.Tensor, product: WeightProduct) -> None:
    """Pass a product's output gradient to the input node; the first call of a backward starts the gather.

    For a frozen weight nothing is held.
    """
    if not node.needs_input_grad[_INPUTS_BEFORE_WEIGHTS + number]:
        return
    backward, received = _running_backward(), node.received
    if received is None or received.backward != backward:
        gather = None
        if node.gathers_again:
            gather = begin_gather(node.saved_tensors[0], node.settings.dim, node.settings.group)
        received = node.received = _Received(backward, gather)
    received.gradients.append((number, gradient, product))


def _weight_gradients(
    gradients: list[tuple[int, torch.Tensor, WeightProduct]],
    whole: torch.Tensor,
    found: list[torch.Tensor | None],
) -> None:
    """Compute each weight's gradient from output gradients and the input ``[.., H]``; add it to ``found``."""
    rows = whole.reshape(-1, whole.shape[-1])
    casts: dict[torch.dtype, torch.Tensor] = {}
    with torch.autocast(rows.device.type, enabled=False):
        while gradients:  # each is freed as soon as it has been used
            number, gradient, product = gradients.pop(0)
            if gradient.dtype not in casts:
                casts[gradient.dtype] = rows.to(gradient.dtype)
            own = product(gradient, casts[gradient.dtype])
            before = found[number]
            found[number] = own if before is None else before + own


def _dense(gradient: torch.Tensor, rows: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Return the weight's gradient ``[out / tp, H]`` (or transposed) of ``[.., out / tp]`` and ``[T, H]``."""
    gradient = gradient.reshape(-1, gradient.shape[-1])
    return rows.t().mm(gradient) if transposed else gradient.t().mm(rows)


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)
