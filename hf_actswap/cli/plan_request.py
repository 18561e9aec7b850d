"""What `plan` is asked, as far as it is known before torch is imported.

What optimizers keep of each weight on the device, on paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import typer
from torch import nn

from .options import AutocastName, DtypeName, PaperOptimizerName, QuantizeName

PREDICTED = "predicted"
"""Section of a saved plan by which `--save` knows what it has written."""


_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}


@dataclass(frozen=True)
class Sharding:
    """Over how many data-parallel ranks what is sharded.

    Args:
        name: ``zero1``, ``zero2``, ``zero3`` or ``fsdp``.
        ranks: at least 1.
    """

    name: str
    ranks: int

    @property
    def stage(self) -> int:
        """Of ZeRO; see `planner.record.baseline`."""
        return _STAGES[self.name]

    @classmethod
    def read(cls, text: str) -> Sharding:
        """Read ``fsdp=8``."""
        name, _, ranks = text.partition("=")
        if name not in _STAGES or not ranks.isdecimal() or int(ranks) < 1:
            raise typer.BadParameter(f"{text!r} is not of the form {'=N, '.join(_STAGES)}=N (ranks)")
        return cls(name, int(ranks))


@dataclass(frozen=True)
class Lora:
    """Adapters, as `peft.LoraConfig` takes them.

    Args:
        r: rank.
        targets: names of modules, or ``("all-linear",)``; empty: PEFT's own choice for the family.
        dropout: of the adapters' input.
    """

    r: int
    targets: tuple[str, ...] = ()
    dropout: float = 0.0

    @classmethod
    def read(cls, text: str) -> Lora:
        """Read ``r=16``, or ``r=16,targets=q_proj+v_proj,dropout=0.05``."""
        given = {key: value for key, _, value in (part.partition("=") for part in text.split(","))}
        try:
            r, dropout = int(given.pop("r")), float(given.pop("dropout", "0"))
            targets = tuple(name for name in given.pop("targets", "").split("+") if name)
            if r < 1 or not 0 <= dropout < 1 or given:
                raise ValueError
        except (KeyError, ValueError):
            form = "r=16, or r=16,targets=q_proj+v_proj,dropout=0.05, or r=16,targets=all-linear"
            raise typer.BadParameter(f"{text!r} is not of the form {form}") from None
        return cls(r, targets, dropout)


@dataclass(frozen=True)
class ModelRequest:
    """A model, and what of it is trained.

    Args:
        name: a path or a Hub id.
        dtype: of its weights; ``None``: its configuration's.
        lora: adapters, which alone are trained; ``None``: all weights are.
        quantize: type in which the base's linear layers rest; ``None``: as they are.
        trust_remote_code: whether code of the model's own repository may run.
    """

    name: str
    dtype: DtypeName | None = None
    lora: Lora | None = None
    quantize: QuantizeName | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class AskedStep:
    """What the command line says of the step; ``None``: nothing.

    Args:
        sequences, tokens, device, autocast, optimizer, gradient_dtype, sharding: see `step.StepShape`.
    """

    sequences: int | None = None
    tokens: int | None = None
    device: str | None = None
    autocast: AutocastName | None = None
    optimizer: PaperOptimizerName | None = None
    gradient_dtype: DtypeName | None = None
    sharding: Sharding | None = None


@dataclass(frozen=True)
class PlanRequest:
    """The arguments and options of `plan`; see its help."""

    model: ModelRequest
    config: str | None
    step: AskedStep
    profile: str | None
    budget_bytes: int | None
    tp: int | None
    compared: tuple[int, ...]
    save: str | None
    windows: bool
    full: bool


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
        optimizer: of `options.PaperOptimizerName`; ``None``: nobody says.
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
