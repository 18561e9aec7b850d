"""Options that several commands have.

The options of ``hf-actswap plan`` as dataclasses, readable without importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import typer

from ..config.sizes import DEVICE_KINDS, OWN_DEVICE, bytes_of, device_kind, own_device, tokens_of

AutocastName = Literal["bf16", "fp16"]
AskedAutocastName = Literal["bf16", "fp16", "none"]
DtypeName = Literal["bf16", "fp16", "fp32"]
OptimizerName = Literal["adamw", "sgd", "none"]
PaperOptimizerName = Literal[
    "adamw",
    "adamw_torch",
    "adamw_master",
    "adamw_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "adafactor",
    "sgd",
    "none",
]
"""Names of transformers' ``optim`` where it has one; ``adamw`` is its default, ``adamw_torch_fused``."""
QuantizeName = Literal["4bit", "8bit"]
Value = TypeVar("Value")


def tokens(text: str) -> int:
    """Return the number of tokens that an option says, as in ``8192`` or ``8k`` (`tokens_of`)."""
    return _read(tokens_of, str(text))  # a default comes as it is


def size(text: str) -> int:
    """Return the size in bytes that an option says, as in ``40GB`` or ``24GiB`` (`bytes_of`)."""
    return _read(bytes_of, text)


def device_named(text: str) -> str:
    """Return the name of a known kind of device, or the user's own numbers for a device unchanged."""
    if "=" in text:
        _read(own_device, text)
    elif device_kind(text) is None:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(DEVICE_KINDS)}, nor {OWN_DEVICE}")
    return device_kind(text) or text


def _read(how: Callable[[str], Value], text: str) -> Value:
    try:
        return how(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def without_default(*names: str, **settings: Any) -> Any:
    """Return a `typer.Option` whose help shows no default; its text says what happens without it."""
    return typer.Option(*names, show_default=False, **settings)


Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML or JSON file, a folder with actswap_config.yaml, or a Hub id (org/name\\[@revision]).",
        show_default=False,
    ),
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A folder of a model, its config.json, or a Hub id.", show_default=False
    ),
]
Model = Annotated[
    str,
    without_default(
        "--model",
        "-m",
        metavar="M",
        help="A folder of a model, its config.json, or a Hub id (org/name\\[@revision]). "
        "Weights are not read.",
    ),
]
Seq = Annotated[
    int | None,
    without_default(
        "--seq",
        parser=tokens,
        metavar="N",
        help="Tokens of a sequence: 8192, 8k. Needed for bytes and times.",
    ),
]
Batch = Annotated[int, typer.Option("--batch", min=1, metavar="N", help="Sequences of a micro-batch.")]
Dtype = Annotated[
    DtypeName | None,
    without_default("--dtype", help="Type of the weights. Default: that of the model's config."),
]
Autocast = Annotated[
    AutocastName | None,
    without_default("--autocast", help="Mixed precision (the Trainer's bf16, fp16)."),
]
TrlAutocast = Annotated[
    AskedAutocastName | None,
    without_default(
        "--autocast", help="Mixed precision. Default: bf16, as in TRL; none: the weights' own type."
    ),
]
Device = Annotated[
    str | None,
    without_default(
        "--device",
        parser=device_named,
        metavar="NAME",
        help=f"Device to predict for, by a usual name: {', '.join(DEVICE_KINDS)}. Or your own numbers, as "
        f"the device reaches them: {OWN_DEVICE}. Default: this machine's accelerator, or H200.",
    ),
]
Optimizer = Annotated[
    OptimizerName,
    typer.Option(
        "--optimizer", help="Optimizer whose states are on the device: 2 values per weight, or none."
    ),
]
Tp = Annotated[
    int | None,
    without_default("--tp", min=1, metavar="N", help="tensor_parallel_size in place of the configuration's."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


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
