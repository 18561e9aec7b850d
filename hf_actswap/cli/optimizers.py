"""How many bytes of states optimizers keep on the device for each weight, by calculation."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

_SMALL_8BIT, _BLOCK = 4096, 256
_SMALL_PAGED = 100_000


def _own_type(weight: torch.Tensor) -> int:
    """torch.optim: two moments in the type of the weight."""
    return 2 * weight.nbytes


def _fp32(weight: torch.Tensor) -> int:
    """bitsandbytes: two moments in fp32."""
    return 8 * weight.numel()


def _master(weight: torch.Tensor) -> int:
    """Mixed-precision Adam (ZeRO, section 3.1: K = 12; DeepSpeed, Megatron): an fp32 copy of weights too."""
    return _fp32(weight) + (0 if weight.dtype == torch.float32 else 4 * weight.numel())


def _8bit(weight: torch.Tensor) -> int:
    """Two bytes, and for each block of each moment its fp32 maximum (Dettmers et al., 2110.02861, section 2).

    Blocks of 256 (bitsandbytes since 0.44); tensors of fewer than 4,096 elements keep fp32.
    """
    if weight.numel() < _SMALL_8BIT:
        return _fp32(weight)
    return 2 * (weight.numel() + 4 * -(-weight.numel() // _BLOCK))


def _adafactor(weight: torch.Tensor) -> int:
    """Means of rows and of columns of the squared gradient, fp32 (transformers', no first moment)."""
    if weight.dim() < 2:
        return 4 * weight.numel()
    return 4 * (weight.numel() // weight.shape[-1] + weight.numel() // weight.shape[-2])


_STATES: dict[str, Callable[[torch.Tensor], int]] = {
    "adamw": _own_type,
    "adamw_master": _master,
    "adamw_8bit": _8bit,
    "paged_adamw_32bit": _fp32,
    "paged_adamw_8bit": _8bit,
    "adafactor": _adafactor,
    "sgd": lambda _: 0,
    "none": lambda _: 0,
}


def state_bytes(optimizer: str | None, model: nn.Module) -> tuple[int, int]:
    """Return the bytes of an optimizer's states for what is trained: on the device, and in pages beside it.

    Embeddings have fp32 states where others have 8 bits, as transformers' Trainer asks bitsandbytes for. Of a
    paged optimizer, tensors of fewer than 100,000 elements are on the device (bitsandbytes'
    ``get_state_buffer``).

    Args:
        optimizer: of `options.PaperOptimizerName`; ``None``: not given.
        model: whose parameters with ``requires_grad`` are trained.
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
