"""Options that several commands have, and those of ``hf-actswap plan`` as dataclasses, without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar

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
QuantizeName = Literal["4bit", "4bit-single", "8bit"]
_Value = TypeVar("_Value")


def tokens(text: str) -> int:
    """Read a number of tokens, as in ``8192`` or ``8k``."""
    return _read(tokens_of, str(text))  # a default comes as it is


def size(text: str) -> int:
    """Read a size in bytes, as in ``40GB`` or ``24GiB``."""
    return _read(bytes_of, text)


def device_named(text: str) -> str:
    """Read the name of a known kind of device; a user's own numbers stay as they are."""
    if "=" in text:
        _read(own_device, text)
    elif device_kind(text) is None:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(DEVICE_KINDS)}, nor {OWN_DEVICE}")
    return device_kind(text) or text


def _read(how: Callable[[str], _Value], text: str) -> _Value:
    try:
        return how(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML or JSON file, a folder with actswap_config.yaml, or a Hub id (org/name\\[@revision]).",
    ),
]
ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder of a model, its config.json, or a Hub id.")
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="M",
        help="A folder of a model, its config.json, or a Hub id (org/name\\[@revision]). "
        "Weights are not read.",
    ),
]
Seq = Annotated[
    int | None,
    typer.Option(
        parser=tokens, metavar="N", help="Tokens of a sequence: 8192, 8k. Needed for bytes and times."
    ),
]
Batch = Annotated[int, typer.Option(min=1, metavar="N", help="Sequences of a micro-batch.")]
Dtype = Annotated[
    DtypeName | None, typer.Option(help="Type of the weights. Default: that of the model's config.")
]
Autocast = Annotated[AutocastName | None, typer.Option(help="Mixed precision (the Trainer's bf16, fp16).")]
TrlAutocast = Annotated[
    AskedAutocastName | None,
    typer.Option(help="Mixed precision. Default: bf16, as in TRL; none: the weights' own type."),
]
Device = Annotated[
    str | None,
    typer.Option(
        parser=device_named,
        metavar="NAME",
        help=f"Device to predict for, by a usual name: {', '.join(DEVICE_KINDS)}. Or your own numbers, as "
        f"the device reaches them: {OWN_DEVICE}. Default: this machine's accelerator, or H200.",
    ),
]
Optimizer = Annotated[
    OptimizerName,
    typer.Option(help="Optimizer whose states are on the device: 2 values per weight, or none."),
]
Tp = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="tensor_parallel_size in place of the configuration's.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]

PREDICTED = "predicted"
"""Section of a plan's file by which ``--save`` recognises its own files."""

_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3, "shard_grad_op": 3}


@dataclass(frozen=True)
class Sharding:
    """What data-parallel ranks shard, and how many they are.

    ``ddp`` (nothing), ``zero1``, ``zero2``, ``zero3``, ``fsdp``; or ``shard_grad_op``, which is FSDP with
    ``reshard_after_forward=False``, by the name that FSDP1 has for it.
    """

    name: str
    ranks: int

    @property
    def stage(self) -> int:
        """The stage of ZeRO: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also weights."""
        return _STAGES[self.name]

    @property
    def is_fsdp(self) -> bool:
        return self.name in ("fsdp", "shard_grad_op")

    @property
    def stays(self) -> bool:
        """Whether weights that forward has gathered stay until backward."""
        return self.name == "shard_grad_op"

    @property
    def state_ranks(self) -> int:
        """Over how many ranks the optimizer's states are sharded."""
        return self.ranks if self.stage else 1

    @classmethod
    def read(cls, text: str) -> Sharding:
        """Read ``fsdp=8``."""
        name, _, ranks = text.partition("=")
        if name not in _STAGES or not ranks.isdecimal() or int(ranks) < 1:
            raise typer.BadParameter(f"{text!r} is not of the form {'=N, '.join(_STAGES)}=N (ranks)")
        return cls(name, int(ranks))


@dataclass(frozen=True)
class Lora:
    """Settings of LoRA adapters, for `peft.LoraConfig`."""

    r: int
    targets: tuple[str, ...] = ()  # or ("all-linear",); empty: PEFT's own choice for the family
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
        dtype: ``None``: that of its configuration.
        lora: only adapters are trained; ``None``: all weights are.
        quantize: how the base model's linear layers are stored; ``None``: in ``dtype``.
        prepared: whether all other weights are in fp32 (PEFT's ``prepare_model_for_kbit_training``).
        adapters_in_fp32: whether adapters beside a base in half precision compute in fp32, as by PEFT.
    """

    name: str
    dtype: DtypeName | None = None
    lora: Lora | None = None
    quantize: QuantizeName | None = None
    trust_remote_code: bool = False
    prepared: bool = False
    adapters_in_fp32: bool = True


def reject_quantize(model: ModelRequest, ranks: int | None) -> None:
    """Reject ``--quantize`` of weights that are trained, or divided, and ``--prepare-kbit`` without it."""
    if model.prepared and model.quantize is None:
        raise typer.BadParameter("--prepare-kbit needs --quantize: it is for a quantised base")
    if model.quantize is not None and (model.lora is None or (ranks or 1) > 1):
        raise typer.BadParameter(
            "--quantize needs --lora (quantised weights are not trained) and one tensor-parallel rank"
        )


def computed_in(model: ModelRequest, sharding: Sharding | None, autocast: str | None) -> ModelRequest:
    """Return the request for a model of the type in which FSDP gathers weights under mixed precision."""
    if sharding is None or not sharding.is_fsdp or autocast == "none":
        return model
    dtype: DtypeName = "fp16" if autocast == "fp16" else "bf16"
    return replace(model, dtype=dtype, adapters_in_fp32=False)


@dataclass(frozen=True)
class AskedStep:
    """The options that describe the step, as in `step.StepShape`; ``None``: not given."""

    sequences: int | None = None
    tokens: int | None = None
    device: str | None = None
    autocast: AskedAutocastName | None = None
    optimizer: PaperOptimizerName | None = None
    gradient_dtype: DtypeName | None = None
    sharding: Sharding | None = None
    fused_loss: bool = False
    target_tokens: int | None = None


@dataclass(frozen=True)
class PlanRequest:
    """All arguments and options of ``hf-actswap plan``."""

    model: ModelRequest
    config: str | None = None
    step: AskedStep = AskedStep()
    profile: str | None = None
    budget_bytes: int | None = None
    tp: int | None = None
    compared: tuple[int, ...] = ()  # numbers of tensor-parallel ranks
    save: str | None = None
    windows: bool = False
    full: bool = False
    host_free_bytes: int | None = None  # for a rank, of which a tenth is left to others
    micro_batches: int | None = None
