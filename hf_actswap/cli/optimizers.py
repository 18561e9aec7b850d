"""Computes how many bytes of states optimizers keep, and how many more their step needs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

_SMALL_8BIT, _BLOCK = 4096, 256
_SMALL_PAGED = 100_000


def _own_type(weight: torch.Tensor) -> int:
    """Return the bytes of torch.optim's AdamW: two moments in the type of the weight."""
    return 2 * weight.nbytes


def _fp32(weight: torch.Tensor) -> int:
    """Return the bytes of bitsandbytes' 32-bit Adam: two moments in fp32."""
    return 8 * weight.numel()


def _master(weight: torch.Tensor) -> int:
    """Return the bytes of mixed-precision Adam: two fp32 moments, and an fp32 copy of weights of other types.

    Source: ZeRO, section 3.1 (K = 12); DeepSpeed and Megatron.
    """
    return _fp32(weight) + (0 if weight.dtype == torch.float32 else 4 * weight.numel())


def _8bit(weight: torch.Tensor) -> int:
    """Return the bytes of 8-bit Adam: two bytes an element, and an fp32 maximum for each block of a moment.

    Source: Dettmers et al., 2110.02861, section 2. Blocks have 256 elements (bitsandbytes since 0.44);
    tensors of fewer than 4,096 elements keep fp32.
    """
    if weight.numel() < _SMALL_8BIT:
        return _fp32(weight)
    return 2 * (weight.numel() + 4 * -(-weight.numel() // _BLOCK))


def _adafactor(weight: torch.Tensor) -> int:
    """Return the bytes of transformers' Adafactor: fp32 means of rows and columns of the squared gradient."""
    if weight.dim() < 2:
        return 4 * weight.numel()
    return 4 * (weight.numel() // weight.shape[-1] + weight.numel() // weight.shape[-2])


_STATES: dict[str, Callable[[torch.Tensor], int]] = {
    "adamw": _own_type,
    "adamw_torch": _own_type,
    "adamw_master": _master,
    "adamw_8bit": _8bit,
    "paged_adamw_32bit": _fp32,
    "paged_adamw_8bit": _8bit,
    "adafactor": _adafactor,
    "sgd": lambda _: 0,
    "none": lambda _: 0,
}


def state_bytes(optimizer: str | None, model: nn.Module) -> tuple[int, int]:
    """Return the bytes of an optimizer's states for trained weights: those on the device, and paged ones.

    An 8-bit optimizer has fp32 states for embeddings, which transformers' Trainer asks bitsandbytes for. The
    states of a paged optimizer stay on the device for tensors of fewer than 100,000 elements (bitsandbytes'
    ``get_state_buffer``).

    Args:
        optimizer: one of `options.PaperOptimizerName`; ``None``: not given, so both numbers are 0.
        model: the model; its parameters with ``requires_grad`` are trained.
    """
    if optimizer is None:
        return 0, 0
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    here = paged = 0
    for weight in model.parameters():
        if not weight.requires_grad:
            continue
        of_8bit = optimizer.endswith("8bit") and id(weight) in embeddings
        size_bytes = (_fp32 if of_8bit else _STATES[optimizer])(weight)
        if optimizer.startswith("paged") and weight.numel() >= _SMALL_PAGED:
            paged += size_bytes
        else:
            here += size_bytes
    return here, paged


def step_bytes(optimizer: str | None, model: nn.Module) -> int:
    """Return the bytes that an optimizer's step allocates and frees again.

    ``adamw_torch`` is PyTorch's AdamW with ``foreach``, which takes the roots of all second moments at once
    (``_multi_tensor_adamw``). Transformers' Adafactor has the gradient, the weight, and the update before and
    after its scaling in fp32, for one weight at a time. Fused and 8-bit optimizers need nothing of this size.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if optimizer == "adamw_torch":
        return sum(weight.nbytes for weight in trained)
    if optimizer == "adafactor":
        return max((4 * 4 * weight.numel() for weight in trained), default=0)
    return 0
