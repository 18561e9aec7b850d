"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

AutocastName = Literal["bf16", "fp16"]
DtypeName = Literal["bf16", "fp16", "fp32"]
OptimizerName = Literal["adamw", "sgd", "none"]

Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="A YAML or JSON file, a folder with actswap_config.yaml, or a Hub id (org/name\\[@revision]).",
        show_default=False,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="M",
        help="A folder of a model, its config.json, or a Hub id (org/name\\[@revision]). "
        "Weights are not read.",
        show_default=False,
    ),
]
Seq = Annotated[
    int | None,
    typer.Option(
        "--seq", min=1, metavar="N", help="Tokens of a sequence. Without it no bytes.", show_default=False
    ),
]
Batch = Annotated[int, typer.Option("--batch", min=1, metavar="N", help="Sequences of a micro-batch.")]
Dtype = Annotated[
    DtypeName | None,
    typer.Option("--dtype", help="Of the weights; else as the model's config says.", show_default=False),
]
Autocast = Annotated[
    AutocastName | None,
    typer.Option("--autocast", help="Mixed precision (the Trainer's bf16, fp16).", show_default=False),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Kind of device to predict for: H200, H100, A100-80, A100-40, B200, L40S, 'RTX 4090', cpu. "
        "Else the one that is here, and H200 where none is.",
        show_default=False,
    ),
]
Optimizer = Annotated[
    OptimizerName,
    typer.Option("--optimizer", help="Whose states are on the device: 2 values a weight, or none."),
]
Tp = Annotated[
    int | None,
    typer.Option(
        "--tp",
        min=1,
        metavar="N",
        help="tensor_parallel_size in place of the configuration's.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
