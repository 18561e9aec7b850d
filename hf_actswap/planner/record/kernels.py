"""Lets a step on the CPU's fake tensors run the ops that an accelerator would run."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..devices import HALF

_CPU = torch.device("cpu")


@contextmanager
def kernels_of(model: nn.Module) -> Iterator[None]:
    """Let ops be those of an accelerator, unless all weights are on the CPU, where the model then trains.

    Frozen weights may wait on the host while the rest of the model is on an accelerator.
    """
    if all(weight.device == _CPU for weight in model.parameters()):
        yield
        return
    with AcceleratorKernels(), _AcceleratorTemporaries(), _kernels_of_trl():
        yield


class AcceleratorKernels(TorchFunctionMode):
    """Runs on the CPU's fake tensors what an accelerator would run: dropout, attention, norms, autocast.

    On an accelerator `F.dropout` is ``native_dropout``, which saves a mask of bytes
    (``is_fused_kernel_acceptable`` in PyTorch's ``aten/src/ATen/native/Dropout.cpp``), and fused attention
    draws its mask anew in backward. Its autocast runs more ops in fp32 than the CPU's
    (``AT_FORALL_FP32`` and ``AT_FORALL_FP32_SET_OPT_DTYPE`` in PyTorch's ``aten/src/ATen/autocast_mode.h``).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "").strip("_")
        if func is F.dropout:
            given = inspect.signature(F.dropout).bind(*args, **kwargs)
            given.apply_defaults()
            named = given.arguments
            if named["training"] and 0 < named["p"] < 1 and not named["inplace"]:
                return torch.native_dropout(named["input"], named["p"], True)[0]
        elif func is F.scaled_dot_product_attention:
            given = inspect.signature(_attention).bind(*args, **kwargs)
            return _attention(*given.args, **given.kwargs)
        elif not torch.is_autocast_enabled("cpu"):
            pass
        elif name in _FP32_OPS:
            args, kwargs = tree_map_only(torch.Tensor, _in_fp32, (args, kwargs))
        elif name in _FP32_RESULTS and kwargs.get("dtype") is None:
            half = getattr(args[0] if args else kwargs.get("input"), "dtype", None) in HALF
            kwargs |= {"dtype": torch.float32} if half else {}
        if name == "rms_norm":
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """CUDA's fused norm, for a weight of the input's type.

    ``rms_norm_symint`` in PyTorch's ``aten/src/ATen/native/layer_norm.cpp`` decides.
    """
    if weight is not None and weight.dtype != input.dtype:
        return F.rms_norm(input, normalized_shape, weight, eps)
    result: torch.Tensor = _FusedRmsNorm.apply(input, normalized_shape, weight, eps)
    return result


class _FusedRmsNorm(torch.autograd.Function):
    """The ops that CUDA runs, which the CPU divides, below autograd; saves what CUDA's node saves."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result, statistics = torch.ops.aten._fused_rms_norm(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, statistics)
        ctx.shape = shape
        normed: torch.Tensor = result
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        input, weight, statistics = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        of_input, of_weight = torch.ops.aten._fused_rms_norm_backward(
            gradients[0], input, ctx.shape, statistics, weight, wanted
        )
        return of_input, None, of_weight, None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention as the CPU fuses it, without dropout; values of another width as CUDA's efficient kernel.

    CUDA has fused kernels for tensors and masks that are dense in their last dimension alone, which T5's bias
    is not (``check_last_dim_stride_equals_1_dense`` in PyTorch's
    ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``).
    """
    given = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    dense = all(tensor.stride(-1) == 1 for tensor in given)
    alike = query.shape[-1] == value.shape[-1] or query.shape[1] != key.shape[1] or attn_mask is not None
    if dense and alike:
        flags: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **flags)
    if torch.is_autocast_enabled("cpu"):  # it casts what attention is given, and nothing inside it
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
    if not dense:
        with torch.autocast("cpu", enabled=False):
            return _unfused_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    result: torch.Tensor = efficient(query, key, value, None, True, 0.0, is_causal, scale=scale)[0]
    return result


def _unfused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention op by op, half types in fp32 (``_scaled_dot_product_attention_math`` in PyTorch's
    ``aten/src/ATen/native/transformers/attention.cpp``).
    """
    dtype = query.dtype
    if dtype in HALF:
        query, key, value = query.float(), key.float(), value.float()
    if enable_gqa and (groups := query.shape[-3] // key.shape[-3]) > 1:
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
    scores = torch.matmul(query * factor, key.transpose(-2, -1) * factor)
    if attn_mask is not None:
        scores.add_(attn_mask)
    weights = torch.ops.aten._safe_softmax(scores, -1)
    if dropout_p > 0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    returned = weights.to(dtype)  # beside the result, and nobody wants it
    result = torch.matmul(weights, value).to(dtype)
    del returned
    return result


class _AcceleratorTemporaries(TorchDispatchMode):
    """Counts what CUDA's kernels of softmax allocate while they run, and free again.

    Its backward multiplies gradient and result first (``softmax_backward_cuda_out`` in PyTorch's
    ``aten/src/ATen/native/cuda/SoftMax.cu``); ``_safe_softmax`` looks for rows that are masked whole.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        held: tuple[torch.Tensor, ...] = ()
        if func is torch.ops.aten._softmax_backward_data.default:
            held = (torch.empty_like(args[0]),)
        elif func is torch.ops.aten._safe_softmax.default:
            held = torch.empty_like(args[0]), torch.empty_like(args[0], dtype=torch.bool)
        result = func(*args, **(kwargs or {}))
        del held  # not before the op has its result
        return result


@contextmanager
def _kernels_of_trl() -> Iterator[None]:
    """Let TRL's losses in tiles of logits take what its Triton kernels take.

    On the CPU it has other ops in their place, of several tiles in fp32 (``trl/kernels`` of TRL 1.16).
    A kernel reads a tile once, and in backward it writes the gradient over it.
    """
    with ExitStack() as undo:
        for module in filter(None, map(sys.modules.get, _TILED_LOSSES)):
            for name in _IN_PLACE_OF.keys() & vars(module).keys():
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, _IN_PLACE_OF[name])
        yield


def _reads(*given: Any, **_flags: Any) -> None:
    for tile in given:
        if isinstance(tile, torch.Tensor) and tile.dim() == 2:
            tile.sum(-1)


def _overwrites(tile: torch.Tensor, *_given: Any, **_flags: Any) -> None:
    tile.mul_(1)


def _adds_product(result: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    """A product that is added to an fp32 tensor within its kernel: here it lies in half of that memory."""
    torch.mm(one, other, out=result.view(one.dtype)[:, : result.shape[1]])


_TILED_LOSSES = ("trl.kernels.chunked_logprob", "trl.kernels.chunked_divergence")
_IN_PLACE_OF: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("_forward_tile", "_stats_tile", "_jsd_tile"), _reads),
    "_backward_tile": _overwrites,
    "_addmm_fp32": _adds_product,
}


_RMS_NORM_IN_FP32 = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")
"""Whether autocast runs it in fp32, as PyTorch 2.13 does and 2.11 does not."""

_FP32_OPS = frozenset(
    name
    for names in (
        "acos asin cdist cosh cosine_similarity dist erfinv exp expm1 frobenius_norm group_norm layer_norm",
        "log log10 log1p log2 logsumexp native_layer_norm nuclear_norm pdist pow reciprocal renorm rms_norm",
        "rsqrt sinh softplus tan binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss",
        "huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss",
        "nll_loss nll_loss2d poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss",
    )
    for name in names.split()
    if name != "rms_norm" or _RMS_NORM_IN_FP32
)
_FP32_RESULTS = frozenset(("cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum"))


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor
