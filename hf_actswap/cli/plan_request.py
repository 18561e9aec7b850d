"""The options of ``hf-actswap plan`` as dataclasses, readable without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from .options import AskedAutocastName, DtypeName, PaperOptimizerName, QuantizeName

PREDICTED = "predicted"
"""Section of a plan's file by which ``--save`` recognises its own files."""


_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}


@dataclass(frozen=True)
class Sharding:
    """What data-parallel ranks shard: states, gradients and weights by ZeRO's stages.

    Args:
        name: ``zero1``, ``zero2``, ``zero3`` or ``fsdp``.
        ranks: number of ranks, at least 1.
    """

    name: str
    ranks: int

    @property
    def stage(self) -> int:
        """The stage of ZeRO: 1 shards optimizer states, 2 also gradients, 3 also weights."""
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
    """Settings of LoRA adapters, for `peft.LoraConfig`.

    Args:
        r: rank of the adapters.
        targets: names of modules, or ``("all-linear",)``; empty: PEFT's own choice for the family.
        dropout: dropout of the adapters' input, at least 0 and below 1.
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
    """Which model is trained, and how.

    Args:
        name: a path or a Hub id.
        dtype: type of its weights; ``None``: that of its configuration.
        lora: adapters; only they are trained. ``None``: all weights are trained.
        quantize: how the base model's linear layers are stored; ``None``: in ``dtype``.
        trust_remote_code: whether code of the model's own repository may run.
    """

    name: str
    dtype: DtypeName | None = None
    lora: Lora | None = None
    quantize: QuantizeName | None = None
    trust_remote_code: bool = False


def reject_quantize(model: ModelRequest, ranks: int | None) -> None:
    """Reject ``--quantize`` of weights that are trained, or divided.

    Raises:
        typer.BadParameter: they are.
    """
    if model.quantize is not None and (model.lora is None or (ranks or 1) > 1):
        raise typer.BadParameter(
            "--quantize needs --lora (quantised weights are not trained) and one tensor-parallel rank"
        )


@dataclass(frozen=True)
class AskedStep:
    """The options of the command line that describe the step; ``None``: not given.

    Args:
        sequences, tokens, device, autocast, optimizer, gradient_dtype, sharding: see `step.StepShape`.
    """

    sequences: int | None = None
    tokens: int | None = None
    device: str | None = None
    autocast: AskedAutocastName | None = None
    optimizer: PaperOptimizerName | None = None
    gradient_dtype: DtypeName | None = None
    sharding: Sharding | None = None


@dataclass(frozen=True)
class PlanRequest:
    """All arguments and options of ``hf-actswap plan``.

    ``compared`` is ``--compare``, numbers of tensor-parallel ranks. ``host_bytes`` is the most host memory of
    a rank, ``micro_batches`` is for a pipeline.
    """

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
    host_bytes: int | None = None
    micro_batches: int | None = None
