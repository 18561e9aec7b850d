"""A real batch as fake tensors: its shapes, and what of its values changes the way of attention."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from .dry_run import fake_state, fakes_only, hooks_off, one_sequence_each

_MASK, _POSITIONS = "attention_mask", "position_ids"


@contextmanager
def dry_call(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Let ``model`` be called on fake tensors without a trace; see `dry_run`.

    Args:
        model: none of its hooks runs.
        kwargs: of the real call; what is yielded of them is to be made fake (`fake_batch`).
    """
    named = without_idle_mask(kwargs)
    packed = nullcontext() if holds_several_sequences(named) else one_sequence_each()
    with quietly(), hooks_off(model), packed, fakes_only():
        yield named


def check_device(device: torch.device) -> None:
    """Raise `ValueError` if PyTorch was built without such devices: a graph on one would end the process."""
    accelerator = torch.accelerator.current_accelerator()
    if device.type not in ("cpu", accelerator.type if accelerator is not None else "cpu"):
        raise ValueError(f"this build of PyTorch has no {device.type} devices")


def without_idle_mask(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without a mask that hides no token.

    transformers drops such a mask too, but cannot read that off a fake one. Waits for the device, once.
    """
    mask = kwargs.get(_MASK)
    idle = isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask.is_meta and bool(mask.all())
    return {**kwargs, _MASK: None} if idle else dict(kwargs)


def holds_several_sequences(kwargs: Mapping[str, Any]) -> bool:
    """Whether positions say that a row is packed from several sequences, which attention then keeps apart."""
    positions = kwargs.get(_POSITIONS)
    if not isinstance(positions, torch.Tensor) or positions.is_meta:
        return False
    return not bool((positions.diff(dim=-1) == 1).all())


def fake_batch(values: Any, device: torch.device) -> Any:
    """Return ``values`` with plain fake tensors in place of tensors. Call inside `fakes_only`.

    Args:
        values: any tree.
        device: of what stands for tensors on ``meta``.
    """
    return tree_map_only(torch.Tensor, lambda tensor: _fake(tensor, device), values)


def fake_weights(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return `fake_state` as the forward meets it. Call inside `fakes_only`.

    Parameters are ``Parameter``s, by which their casts are known, and those that FSDP2 casts when it gathers
    them have the dtype that it gives them.
    """
    state = {name: _placed(tensor, device) for name, tensor in fake_state(model).items()}
    gathered = dict(_gathered_dtypes(model))
    for name, _ in model.named_parameters():
        if name in state:
            fake = state[name].detach().to(gathered.get(name.rpartition(".")[0]))
            state[name] = nn.Parameter(fake, requires_grad=state[name].requires_grad)
    return state


@contextmanager
def quietly() -> Iterator[None]:
    """A model that cannot run on fakes says so by an exception; PyTorch would print its traceback too."""
    own = logging.getLogger("torch._subclasses.fake_tensor")
    before, own.disabled = own.disabled, True
    try:
        yield
    finally:
        own.disabled = before


def _gathered_dtypes(model: nn.Module) -> Iterator[tuple[str, torch.dtype | None]]:
    """Yield, for each module, the dtype that FSDP2 gives its own parameters; ``None``: the one they have."""
    nearest: dict[str, torch.dtype | None] = {}
    for name, module in model.named_modules():
        dtype = nearest.get(name.rpartition(".")[0]) if name else None
        if hasattr(module, "_get_fsdp_state"):
            dtype = getattr(getattr(module._get_fsdp_state(), "_mp_policy", None), "param_dtype", None)
        nearest[name] = dtype
        yield name, dtype


def _fake(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return _placed(fake, device).requires_grad_(tensor.requires_grad)


def _placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device.type != "meta":
        return tensor
    return torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad)
