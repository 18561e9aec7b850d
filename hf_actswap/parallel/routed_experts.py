"""Divides routed experts: every rank has a part of every expert.

A token is routed where its hidden state is: under sequence parallelism each rank routes its own ``T / tp``
tokens. Then the ranks gather hidden states, experts and routing weights of all ``T`` tokens along dim 0,
compute their parts ``I / tp`` of all experts, and each rank gets the sum for its own tokens::

    hidden [T/tp, H] -------------------all-gather--> [T, H] --> experts --reduce-scatter--> [T/tp, H]
    router: experts, weights [T/tp, k] -all-gather--> [T, k] ----^

In backward the gradients of routing weights are summed too, since each rank has the contribution of its
parts of the experts. So a router's gradient is complete for the tokens that the router has seen: its
parameters carry the tag ``sequence_parallel_enabled`` if it saw a rank's tokens, and no tag if it saw all.

**Products.** A token is read by ``k`` experts, so there are ``R = T k`` rows, sorted by expert: each expert's
lie together. Ordinary autograd would save three tensors of full width: the input ``[T, H]``, its rows
``[R, H]`` for the first weight's gradient, and the second product's rows ``[R, H]`` for the routing weights'
gradient. Here::

    shard --[column_input]--> [T, H] --[routed_product]--> [R, 2I/tp] --gate--> h [R, I/tp]
                                                                                 |
                             [T, H] <--[combined_product: sum_k W_down (w h)]----+-- routing weights w [T, k]

- The rows of the input are not saved, only their indices. In backward the input's node gathers the input
  again, once for all its readers, and computes the first weight's gradient from its rows (`column_input`).
- The routing weight is multiplied before the second product, with the same result:
  ``w (W_down h) = W_down (w h)``. Its gradient is then ``<W_down^T dy, h>``, without ``W_down h``.

Saved are a tensor ``[R, I/tp]`` and indices. Rows of full width exist only while a product runs. The products
of all experts are one kernel (``torch.nn.functional.grouped_mm``), or one product for each, for which the
host must know how many rows each has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from ..errors import Problem
from ..plan.wrappers import is_checkpointed
from .column_input import (
    InputSettings,
    column_input,
    input_node_of,
    needs_input_gradient,
    note_input,
    weight_gradient,
)
from .families import EXPERTS, EXPERTS_IMPLEMENTATIONS
from .gradients import TAG
from .mappings import all_gather, copied, sum_of_shares
from .sequence_region import SequenceRegion
from .weights import Partition, ShardedModule, tag

_KERNEL_ALIGNMENT_BYTES = 16
"""``grouped_mm`` raises unless the size of each row of its matrices is a multiple of this."""
_KERNEL_CAPABILITY = (8, 0)
"""CUDA devices below it have no ``grouped_mm``; transformers has the same condition."""


class Routing(NamedTuple):
    """The rows of all experts, sorted by expert.

    Args:
        order: index of each sorted row in the flattened ``[T, k]``, shape ``[R]``.
        ends: for each expert the index after its last row, ``[E]``, int32.
    """

    order: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, experts: torch.Tensor, count: int) -> Routing:
        """Return the routing for the experts ``[T, k]`` of each token, numbers below ``count``."""
        found, order = experts.reshape(-1).sort(stable=True)
        places = torch.arange(count, device=experts.device, dtype=found.dtype)
        return cls(order, torch.searchsorted(found, places, right=True, out_int32=True))

    def experts(self, rows: int) -> torch.Tensor:
        """Return the expert of each sorted row, ``[rows]``."""
        places = torch.arange(rows, device=self.ends.device, dtype=self.ends.dtype)
        return torch.searchsorted(self.ends, places, right=True)


class ProductSettings(NamedTuple):
    """How products are computed.

    Args:
        dtype: dtype of the products.
        one_kernel: whether one kernel computes all experts, if it takes the shapes; else one after the other.
        transposed: whether weights are ``[E, in, out]``; else they are ``[E, out, in]``.
    """

    dtype: torch.dtype
    one_kernel: bool
    transposed: bool = False

    def matrices(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight as ``[E, in, out]``."""
        return weight if self.transposed else weight.transpose(1, 2)


def routed_product(
    x: torch.Tensor, weight: torch.Tensor, routing: Routing, settings: ProductSettings
) -> torch.Tensor:
    """Multiply each token with the weights of its experts: ``[R, N]``, sorted by expert.

    A ``TorchFunctionMode`` sees this function.

    Args:
        x: ``[T, H]``. If it was made by `column_input` with ``weight``, it is not saved; else it is held.
        weight: ``[E, N, H]``, or transposed.
    """
    if has_torch_function((x, weight)):
        return handle_torch_function(routed_product, (x, weight), x, weight, routing, settings)
    behind = input_node_of(x, weight)
    given = weight if behind is None else weight.detach()
    return _RoutedProduct.apply(x, given, *routing, (behind, settings))


def combined_product(
    rows: torch.Tensor,
    weights: torch.Tensor,
    weight: torch.Tensor,
    routing: Routing,
    settings: ProductSettings,
) -> torch.Tensor:
    """Multiply rows with their experts' weights, and add up each token's products by its routing weights.

    A ``TorchFunctionMode`` sees this function. It returns ``[T, H]``, in the dtype of the settings.

    Args:
        rows: ``[R, I]``, sorted by expert.
        weights: routing weights ``[T, k]``.
        weight: ``[E, H, I]``, or transposed.
    """
    if has_torch_function((rows, weights, weight)):
        return handle_torch_function(
            combined_product, (rows, weights, weight), rows, weights, weight, routing, settings
        )
    return _CombinedProduct.apply(rows, weights, weight, *routing, settings)


class _RoutedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        order: torch.Tensor,
        ends: torch.Tensor,
        about: tuple[tuple[Any, int] | None, ProductSettings],
    ) -> torch.Tensor:
        behind, ctx.settings = about
        note_input(ctx, x, behind)
        ctx.tokens = x.shape[0]
        ctx.save_for_backward(weight, order, ends)
        return _multiplied(_rows(x, order), ctx.settings.matrices(weight), ends, ctx.settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradient.contiguous()
        weight, order, ends = ctx.saved_tensors
        settings = ctx.settings

        def product(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return _outer(gradient, _rows(x, order), ends, settings)

        dw, dx = weight_gradient(ctx, gradient, product, weight.dtype, "routed experts"), None
        if needs_input_gradient(ctx):
            backwards = settings.matrices(weight).transpose(1, 2)
            dx = _combined(_multiplied(gradient, backwards, ends, settings), order, ctx.tokens)
        return None if dx is None else dx.to(ctx.x_dtype), dw, None, None, None


class _CombinedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        weight: torch.Tensor,
        order: torch.Tensor,
        ends: torch.Tensor,
        settings: ProductSettings,
    ) -> torch.Tensor:
        ctx.settings = settings
        needs_rows, needs_weights, needs_weight = ctx.needs_input_grad[:3]
        ctx.save_for_backward(
            rows if needs_weights or needs_weight else None,
            weights if needs_rows or needs_weight else None,
            weight if needs_rows or needs_weights else None,
            order,
            ends,
        )
        ctx.rows_dtype, ctx.weights_dtype, ctx.weight_dtype = rows.dtype, weights.dtype, weight.dtype
        weighted = rows * _of_rows(weights, order)
        products = _multiplied(weighted, settings.matrices(weight), ends, settings)
        return _combined(products, order, weights.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, weight, order, ends = ctx.saved_tensors
        needs_rows, needs_weights, needs_weight = ctx.needs_input_grad[:3]
        routed = _rows(gradient, order).to(ctx.settings.dtype)
        d_rows = d_weights = d_weight = None
        if needs_rows or needs_weights:
            backwards = ctx.settings.matrices(weight).transpose(1, 2)
            d_weighted = _multiplied(routed, backwards, ends, ctx.settings)
            if needs_weights:
                wide = torch.promote_types(rows.dtype, torch.float32)
                inner = torch.linalg.vecdot(d_weighted.to(wide), rows.to(wide))
                d_weights = torch.empty_like(inner)
                d_weights[order] = inner
                d_weights = d_weights.view(gradient.shape[0], -1).to(ctx.weights_dtype)
            if needs_rows:
                d_rows = (d_weighted * _of_rows(weights, order)).to(ctx.rows_dtype)
        if needs_weight:
            weighted = rows * _of_rows(weights, order)
            d_weight = _outer(routed, weighted, ends, ctx.settings).to(ctx.weight_dtype)
        return d_rows, d_weights, d_weight, None, None, None


def _rows(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the tokens' rows ``[R, H]`` of ``[T, H]``, sorted by expert."""
    return x[order // (order.numel() // x.shape[0])]


def _of_rows(weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the routing weights of rows, ``[R, 1]`` of ``[T, k]``."""
    return weights.reshape(-1)[order].unsqueeze(1)


def _combined(rows: torch.Tensor, order: torch.Tensor, tokens: int) -> torch.Tensor:
    """Add up the rows ``[R, H]`` of each token to ``[T, H]``; always in the same order."""
    unsorted = torch.empty_like(rows)
    unsorted[order] = rows
    return unsorted.view(tokens, -1, rows.shape[-1]).sum(1)


def _multiplied(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, settings: ProductSettings
) -> torch.Tensor:
    """Return the product ``[R, B]`` of rows ``[R, A]`` and their experts' matrices ``[E, A, B]``."""
    with torch.autocast(rows.device.type, enabled=False):
        rows, matrices = rows.to(settings.dtype), matrices.to(settings.dtype)
        if settings.one_kernel and _kernel_takes(rows, matrices.shape[1:]):
            return F.grouped_mm(rows, matrices, offs=ends)
        products = rows.new_empty((rows.shape[0], matrices.shape[2]))
        for expert, (begin, end) in enumerate(_ranges(ends)):
            torch.mm(rows[begin:end], matrices[expert], out=products[begin:end])
        return products


def _outer(
    gradient: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, settings: ProductSettings
) -> torch.Tensor:
    """Return each expert's weight gradient from output gradients ``[R, out]`` and inputs ``[R, in]``."""
    left, right = (rows, gradient) if settings.transposed else (gradient, rows)
    with torch.autocast(left.device.type, enabled=False):
        left, right = left.to(settings.dtype), right.to(settings.dtype)
        sizes = left.shape[1], right.shape[1]
        if settings.one_kernel and _kernel_takes(left, sizes):
            return F.grouped_mm(left.t(), right, offs=ends)
        products = left.new_zeros((len(ends), *sizes))
        for expert, (begin, end) in enumerate(_ranges(ends)):
            torch.mm(left[begin:end].t(), right[begin:end], out=products[expert])
        return products


def _ranges(ends: torch.Tensor) -> list[tuple[int, int]]:
    """Return where each expert's rows begin and end. The host waits for the device."""
    if isinstance(ends, FakeTensor):
        return []  # only shapes are asked for
    last: list[int] = ends.tolist()
    return list(zip([0, *last], last, strict=False))


def _kernel_takes(rows: torch.Tensor, sizes: tuple[int, ...]) -> bool:
    if isinstance(rows, FakeTensor) or any(
        size * rows.element_size() % _KERNEL_ALIGNMENT_BYTES for size in sizes
    ):
        return False
    if rows.device.type == "cuda":
        return torch.cuda.get_device_capability(rows.device) >= _KERNEL_CAPABILITY
    return rows.device.type == "cpu"


TOKEN_DIM = 0
"""Dim of the tokens in the input of experts, ``[T, H]``."""

_DEFAULT_GATE = "_default_apply_gate"
"""Name of transformers' function for experts that compute ``act_fn(gate) * up``."""


_ROWS = "down_proj"
"""Name of the second weights of transformers' experts."""

_ROWS_BIAS = "down_proj_bias"


def _alternate(experts: Any) -> bool:
    """Whether gate and up alternate in what the first weights make.

    transformers 5.6 does not say so: there it shows in what depends on the second feature.
    """
    gate = getattr(experts, "_apply_gate", None)
    if gate is None or hasattr(experts, "is_concatenated"):
        return not getattr(experts, "is_concatenated", True)
    features = torch.linspace(0.1, 0.8, 8, device="cpu")
    others = features + 0.05 * torch.eye(8, device="cpu")[1]
    with torch.no_grad():
        return bool(gate(features)[0] != gate(others)[0])


class ExpertsLayout(NamedTuple):
    """How transformers' experts store and use their weights.

    Args:
        gated: whether the first weights make gate and up, ``2 I`` features; else they make ``I``.
        transposed: whether weights are ``[E, in, out]``; else they are ``[E, out, in]``.
        interleaved: whether gate and up alternate; else all of gate comes before up.
        biased: whether both products have biases, ``[E, out]``.
    """

    gated: bool
    transposed: bool
    interleaved: bool
    biased: bool

    @classmethod
    def of(cls, experts: Any) -> ExpertsLayout:
        """Read the layout from attributes that transformers' ``use_experts_implementation`` sets."""
        return cls(
            getattr(experts, "has_gate", True),
            getattr(experts, "is_transposed", False),
            _alternate(experts),
            getattr(experts, "has_bias", False),
        )

    @property
    def columns(self) -> str:
        return "gate_up_proj" if self.gated else "up_proj"

    @property
    def parameters(self) -> tuple[str, ...]:
        weights = (self.columns, _ROWS)
        return (*weights, *(f"{name}_bias" for name in weights)) if self.biased else weights

    def inner_size(self, experts: nn.Module) -> int:
        return experts.get_parameter(_ROWS).shape[1 if self.transposed else 2]

    def partitions(self, inner: int, ranks: int) -> dict[str, Partition]:
        """Return how the parameters are divided, all along ``I``; the second biases are not."""
        size, stride = (2 * inner, 1 if self.interleaved else 2) if self.gated else (inner, 1)
        found = {
            self.columns: Partition.of(2 if self.transposed else 1, size, ranks, stride),
            _ROWS: Partition.of(1 if self.transposed else 2, inner, ranks),
        }
        if self.biased:
            found[f"{self.columns}_bias"] = Partition.of(1, size, ranks, stride)
        return found


class ParallelExperts(ShardedModule):
    """This rank's parts of routed experts; replaces a Hugging Face experts module.

    The forward is an attribute of the instance, so that a run on fake tensors does not replace it by a
    stand-in (`plan.dry_run`): unlike other routed experts these can run there, and their communications are
    recorded.

    Args:
        full: the whole experts, with ``gate_up_proj`` (or ``up_proj``) ``[E, 2I, H]`` and ``down_proj``
            ``[E, H, I]``, or as `ExpertsLayout` says, ``act_fn`` or ``_apply_gate``, and a ``config`` whose
            ``_experts_implementation`` is read at each call: ``eager`` computes one expert after the other,
            all others one kernel for all where the device has one for these sizes.
        layer: the decoder layer of the experts.

    Attributes:
        layout: how the parameters are stored, under the same names as in ``full``.
        keep_gathered: whether the gathered input is saved in place of the shard; always so if Hugging Face's
            gradient checkpointing is on for the layer.
    """

    def __init__(self, full: Any, region: SequenceRegion, layer: nn.Module) -> None:
        super().__init__(region.group)
        self._region = region
        self._layer = (layer,)  # in a tuple, so that it is not registered as a submodule
        self.config, self.num_experts = getattr(full, "config", None), full.num_experts
        self.layout = layout = ExpertsLayout.of(full)
        for name, partition in layout.partitions(layout.inner_size(full), region.group.size()).items():
            self.divide(name, partition)
        self.take(full)
        if hasattr(full, "act_fn"):
            self.act_fn = full.act_fn
        self._gate = _own_gate(full)
        self.keep_gathered = False
        vars(self)["forward"] = self._forward

    def _forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts' sums for this rank's tokens, in the shape of ``hidden_states``.

        Args:
            hidden_states: ``[T / tp, H]`` in an active region, else ``[T, H]``, alike on all ranks.
            top_k_index: experts of these tokens, ``[.., k]``.
            top_k_weights: routing weights, ``[.., k]``.
        """
        region, group = self._region, self._region.group
        keep_gathered = self.keep_gathered or (self.training and is_checkpointed(self._layer[0]))
        settings = InputSettings(group, region.is_active, TOKEN_DIM, region.reduce_dtype, keep_gathered)
        columns = self.get_parameter(self.layout.columns)
        hidden = column_input(hidden_states, [columns], settings)
        bias = self._bias_of_tokens(top_k_index, top_k_weights)
        if region.is_active:
            top_k_index, top_k_weights = _of_all_tokens(top_k_index, top_k_weights, region)
        else:
            top_k_weights = copied(top_k_weights, group)
        share = self._share(hidden, top_k_index, top_k_weights)
        total = sum_of_shares(share, group, TOKEN_DIM if region.is_active else None, region.reduce_dtype)
        return total if bias is None else total + bias.to(total.dtype)

    def _share(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's share ``[T, H]`` of the experts' sums, for all tokens."""
        layout, routing = self.layout, Routing.of(experts, self.num_experts)
        settings = self._settings(hidden)
        inner = routed_product(hidden, self.get_parameter(layout.columns), routing, settings)
        if layout.biased:
            inner = inner + self.get_parameter(f"{layout.columns}_bias")[routing.experts(inner.shape[0])]
        rows = self.get_parameter(_ROWS)
        if self._gate is not None:
            inner = self._gate(inner)
        elif layout.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self.act_fn(gate) * up
        else:
            inner = self.act_fn(inner)
        return combined_product(inner, weights, rows, routing, settings).to(hidden.dtype)

    def _bias_of_tokens(self, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """Return the second biases' sum for this rank's tokens, ``[T, H]``, to be added to the total."""
        if not self.layout.biased:
            return None
        of_experts = weights.new_zeros((*experts.shape[:-1], self.num_experts))
        bias = self.get_parameter(_ROWS_BIAS)
        return of_experts.scatter_add(-1, experts, weights).to(bias.dtype) @ bias

    def _settings(self, hidden: torch.Tensor) -> ProductSettings:
        """Return dtype and kernel as transformers chooses them: autocast does not cast for ``grouped_mm``."""
        implementation = getattr(self.config, "_experts_implementation", None) or "eager"
        dtype, kind = self.get_parameter(_ROWS).dtype, hidden.device.type
        if implementation != "grouped_mm" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return ProductSettings(dtype, implementation != "eager", self.layout.transposed)

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, ranks={self.partitions[_ROWS].ranks}"


def _own_gate(full: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function of gated experts between their products, if it is not ``act_fn(gate) * up``."""
    gate = getattr(full, "_apply_gate", None)
    if gate is None or gate.__name__ == _DEFAULT_GATE or not ExpertsLayout.of(full).gated:
        return None
    for name in ExpertsLayout.of(full).parameters:  # the method holds its module, but needs no weights
        del full._parameters[name]
    return gate


def _of_all_tokens(
    experts: torch.Tensor, weights: torch.Tensor, region: SequenceRegion
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather ``[T / tp, k]`` each to ``[T, k]`` by one collective: experts travel as bits of floats."""
    is_double = weights.dtype == torch.float64
    real, whole_number = (torch.float64, torch.int64) if is_double else (torch.float32, torch.int32)
    own = torch.cat((weights.to(real), experts.to(whole_number).view(real)), -1)
    every = all_gather(own, TOKEN_DIM, region.group)
    found_weights, found_experts = every.chunk(2, -1)
    numbers = found_experts.detach().contiguous().view(whole_number)
    return numbers.to(experts.dtype), found_weights.to(weights.dtype)


def experts_of(layer: nn.Module) -> list[str]:
    return [
        path
        for path, module in layer.named_modules()
        if path.rpartition(".")[2] == EXPERTS and is_supported(module)
    ]


def problems_of_experts(where: str, layer: nn.Module, path: str, ranks: int) -> Iterator[Problem]:
    """Yield a problem for each reason why routed experts of a layer (named ``where``) cannot be divided."""
    experts: Any = layer.get_submodule(path)
    size = ExpertsLayout.of(experts).inner_size(experts)
    if size % ranks:
        hint = f"Choose a tensor_parallel_size that divides {size}."
        yield Problem(f"{where}.{path}", f"a size of experts that {ranks} ranks divide", str(size), hint)
    used = getattr(getattr(experts, "config", None), "_experts_implementation", "eager") or "eager"
    if used not in EXPERTS_IMPLEMENTATIONS:
        expected = " or ".join(EXPERTS_IMPLEMENTATIONS)
        yield Problem(f"{where}.{path}", f"experts_implementation {expected}", used)
    block: Any = layer.get_submodule(path.rpartition(".")[0])
    if getattr(block, "jitter_noise", 0) > 0:
        hint = "Set config.router_jitter_noise = 0."
        yield Problem(where, "no jitter", "router_jitter_noise, which writes into the shared input", hint)


def divide_experts(layer: nn.Module, path: str, region: SequenceRegion) -> None:
    experts = ParallelExperts(layer.get_submodule(path), region, layer)
    layer.set_submodule(path, experts)
    if region.enabled and experts.layout.biased:
        tag(experts, _ROWS_BIAS, **{TAG: True})


def is_supported(experts: Any) -> bool:
    """Whether a module is routed experts of a supported kind, which compute as transformers' do."""
    names = {name for name, _ in experts.named_parameters()}
    layout = ExpertsLayout.of(experts)
    if names != set(layout.parameters) or any(
        experts.get_parameter(name).dim() != 3 for name in (layout.columns, _ROWS)
    ):
        return False
    if getattr(experts, "has_post_expert_norm", False) or not hasattr(experts, "num_experts"):
        return False
    takes = [name for name in inspect.signature(experts.forward).parameters if name != "self"]
    # Three arguments: hidden states, experts and routing weights.
    return hasattr(experts, "has_gate") or (len(takes) == 3 and hasattr(experts, "act_fn"))
