"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
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
    return _read(tokens_of, text)


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
