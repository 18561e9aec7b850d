"""How many bytes an optimizer's states will take, before its first step makes them.

By the name of the optimizer, for a plan on paper (`state_bytes`), or of an optimizer that is there
(`expected_state_bytes`). Bytes are those of one rank, of weights that are not sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .optimizer_states import state_bytes_beside_weights
from .state_storages import of_optimizer, trained_in

_SMALL_8BIT, _BLOCK = 4096, 256
_SMALL_PAGED = 100_000
_ADAMS = (torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam)
"""AdamW is an Adam."""


def _own_type(weight: torch.Tensor) -> int:
    """Two moments in the type of the weight: torch.optim's AdamW."""
    return 2 * weight.nbytes


def _fp32(weight: torch.Tensor) -> int:
    """Two moments in fp32: bitsandbytes' 32-bit Adam."""
    return 8 * weight.numel()


def _master(weight: torch.Tensor) -> int:
    """Two fp32 moments, and an fp32 copy of weights of other types: mixed-precision Adam.

    Source: ZeRO, section 3.1 (K = 12); DeepSpeed and Megatron.
    """
    return _fp32(weight) + (0 if weight.dtype == torch.float32 else 4 * weight.numel())


def _8bit(weight: torch.Tensor) -> int:
    """Two bytes an element, and an fp32 maximum for each block of a moment: 8-bit Adam.

    Source: Dettmers et al., 2110.02861, section 2. Blocks have 256 elements (bitsandbytes since 0.44);
    tensors of fewer than 4,096 elements keep fp32.
    """
    if weight.numel() < _SMALL_8BIT:
        return _fp32(weight)
    return 2 * (weight.numel() + 4 * -(-weight.numel() // _BLOCK))


def _adafactor(weight: torch.Tensor) -> int:
    """fp32 means of rows and columns of the squared gradient: transformers' Adafactor."""
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


def state_bytes(optimizer: str | None, model: nn.Module, in_fp32: bool = False) -> tuple[int, int]:
    """Return the bytes of an optimizer's states for trained weights: those on the device, and paged ones.

    ``in_fp32``: it is given the weights in fp32, whatever type they have in the model.

    An 8-bit optimizer has fp32 states for embeddings, which transformers' Trainer asks bitsandbytes for. The
    states of a paged optimizer stay on the device for tensors of fewer than 100,000 elements (bitsandbytes'
    ``get_state_buffer``). Of no optimizer (``None``) both are 0.
    """
    if optimizer is None:
        return 0, 0
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    here = paged = 0
    for weight in model.parameters():
        if not weight.requires_grad:
            continue
        of_8bit = optimizer.endswith("8bit") and id(weight) in embeddings
        given = torch.empty_like(weight, dtype=torch.float32, device="meta") if in_fp32 else weight
        size_bytes = (_fp32 if of_8bit else _STATES[optimizer])(given)
        if optimizer.startswith("paged") and weight.numel() >= _SMALL_PAGED:
            paged += size_bytes
        else:
            here += size_bytes
    return here, paged


def expected_state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the bytes of states that are on the device in every step; ``None``: not known yet.

    For Adam's family, bitsandbytes' optimizers and transformers' Adafactor they are known before the first
    step; for others the existing states count.
    """
    there_bytes = state_bytes_beside_weights(optimizer)
    kind = type(optimizer)
    if isinstance(optimizer, _ADAMS):
        coming = sum(
            (3 if group.get("amsgrad") else 2) * sum(weight.nbytes for weight in trained_in(group))
            for group in optimizer.param_groups
        )
    elif kind.__module__.startswith("bitsandbytes."):
        coming = sum(_of_bitsandbytes(optimizer))
    elif kind.__module__ == "transformers.optimization" and kind.__name__ == "Adafactor":
        coming = sum(
            _adafactor(weight) + (0 if group["beta1"] is None else _fp32(weight) // 2)
            for group in optimizer.param_groups
            for weight in trained_in(group)
        )
    else:
        return there_bytes or None
    return max(there_bytes, int(coming))  # during the first step only a part exists


def _of_bitsandbytes(optimizer: Any) -> Iterator[int]:
    """Yield the bytes that stay on the device, for each weight.

    Weights may have been given another number of bits (``GlobalOptimManager.register_module_override``).
    """
    overrides = getattr(optimizer.mng, "module_weight_config_triple", ())
    bits = {id(getattr(module, name)): config.get("optim_bits") for module, name, config in overrides}
    two = any(base.__name__ == "Optimizer2State" for base in type(optimizer).__mro__)
    for weight in of_optimizer(optimizer):
        if getattr(optimizer, "is_paged", False) and weight.numel() >= _SMALL_PAGED:
            continue
        of_weight = bits.get(id(weight)) or getattr(optimizer.args, "optim_bits", 32)
        yield (_8bit if of_weight == 8 else _fp32)(weight) // (1 if two else 2)
