"""``hf-actswap plan``: defines its options, and checks them before large packages are imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .options import (
    PREDICTED,
    AskedStep,
    DtypeName,
    Lora,
    ModelRequest,
    PaperOptimizerName,
    PlanRequest,
    QuantizeName,
    Sharding,
    computed_in,
    reject_quantize,
)
from .output import answer

Config = Annotated[
    str | None,
    typer.Argument(metavar="[CONFIG]", help="Its fates stay as they are; its `memory` section applies."),
]
Seq = Annotated[
    int | None,
    typer.Option(parser=options.tokens, metavar="N", help="Tokens of a sequence: 8192, 8k. Default: 4096."),
]
TargetSeq = Annotated[
    int | None,
    typer.Option(
        parser=options.tokens,
        metavar="N",
        help="Tokens of a target sequence, of a model with an encoder and a decoder. Default: --seq.",
    ),
]
Batch = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Sequences of a micro-batch. Default: 1.")
]
ProfileFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Plan from a profile of hf-actswap profile or of a training, for the step that it recorded.",
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        "--budget",
        "--budget-gib",
        parser=options.size,
        metavar="SIZE",
        help="The most device memory of a step, per rank: 40GB, 24GiB, or a number of GiB. Default: the "
        "configuration's, else the device's less 3 % (5 % of several ranks).",
    ),
]
Optimizer = Annotated[
    PaperOptimizerName | None,
    typer.Option(
        help="Optimizer that runs: its states, and what its step allocates. Default: adamw (fused), 2 values "
        "per weight in its type."
    ),
]
GradDtype = Annotated[
    DtypeName | None,
    typer.Option(help="Type of the gradients until the optimizer's step. Default: that of the weights."),
]
Shard = Annotated[
    Sharding | None,
    typer.Option(
        parser=Sharding.read,
        metavar="fsdp=N",
        help="What N data-parallel ranks shard: ddp=N (nothing), zero1=N, zero2=N, zero3=N, fsdp=N, or "
        "shard_grad_op=N (fsdp with reshard_after_forward=False).",
    ),
]
FusedLoss = Annotated[
    bool,
    typer.Option(
        "--fused-loss",
        help="The training's loss never has the logits of all tokens: TRL's SFTTrainer (1.16, before with "
        "chunked_nll), Liger's fused_linear_cross_entropy, Unsloth.",
    ),
]
Adapters = Annotated[
    Lora | None,
    typer.Option(
        parser=Lora.read,
        metavar="r=16",
        help="Train adapters only (PEFT): r=16,targets=q_proj+v_proj,dropout=0.05; targets=all-linear.",
    ),
]
Quantize = Annotated[
    QuantizeName | None,
    typer.Option(
        help="How the base's linear layers are stored with --lora (QLoRA). 4bit: NF4, double quantised "
        "(bnb_4bit_use_double_quant); 4bit-single: NF4 as load_in_4bit alone makes it; 8bit: LLM.int8()."
    ),
]
PrepareKbit = Annotated[
    bool,
    typer.Option(
        "--prepare-kbit",
        help="All other weights are fp32, as PEFT's prepare_model_for_kbit_training makes them.",
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the model's own code, if it has some.")
]
Full = Annotated[bool, typer.Option("--full", help="Print the plan layer by layer, and the least budget.")]
Windows = Annotated[
    bool, typer.Option("--windows", help="Print a line for each op, with its prefetch and release.")
]
Longest = Annotated[
    bool,
    typer.Option(
        "--longest",
        help="Find the longest sequence that fits, with everything in tiles, and its configuration.",
    ),
]
HostMemoryGib = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Host memory that the machine has free for a rank; plans take 90 % of it, as trainings do. "
        "Default: the configuration's limit, else what machines with the device usually have for each; "
        "with --longest as much as it needs.",
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Micro-batches of an optimizer's step (gradient_accumulation_steps). Default: 1, in a pipeline "
        "four for each stage.",
    ),
]
Compare = Annotated[str | None, typer.Option(metavar="tp=1,2,4", help="Plan for several numbers of ranks.")]
Save = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write the plan for training: actswap=FILE, or memory.plan_file."),
]


def plan(
    model: options.ModelName,
    config: Config = None,
    seq: Seq = None,
    target_seq: TargetSeq = None,
    batch: Batch = None,
    device: options.Device = None,
    profile: ProfileFile = None,
    budget: Budget = None,
    dtype: options.Dtype = None,
    autocast: options.TrlAutocast = None,
    optimizer: Optimizer = None,
    grad_dtype: GradDtype = None,
    shard: Shard = None,
    fused_loss: FusedLoss = False,
    lora: Adapters = None,
    quantize: Quantize = None,
    prepare_kbit: PrepareKbit = False,
    trust_remote_code: TrustRemoteCode = False,
    tp: options.Tp = None,
    full: Full = False,
    windows: Windows = False,
    longest: Longest = False,
    host_memory_gib: HostMemoryGib = None,
    micro_batches: MicroBatches = None,
    compare: Compare = None,
    save: Save = None,
    as_json: options.Json = False,
) -> None:
    compared = _sizes(compare) if compare is not None else ()
    if save is not None:
        _reject_overwriting(save)
    wanted = ModelRequest(model, dtype, lora, quantize, trust_remote_code, prepare_kbit)
    asked = PlanRequest(
        model=computed_in(wanted, shard, autocast),
        config=config,
        step=AskedStep(batch, seq, device, autocast, optimizer, grad_dtype, shard, fused_loss, target_seq),
        profile=profile,
        budget_bytes=budget,
        tp=tp,
        compared=compared,
        save=save,
        windows=windows,
        full=full,
        host_free_bytes=None if host_memory_gib is None else round(host_memory_gib * 2**30),
        micro_batches=micro_batches,
    )
    _reject_combinations(asked, longest)

    # These import torch, which takes seconds: options are checked before.
    if longest:
        from .longest import answer_longest as ask
    else:
        from .plan_answer import answer_plan as ask
    answer("plan", as_json, lambda: ask(asked))


def _reject_combinations(asked: PlanRequest, longest: bool) -> None:
    model, step = asked.model, asked.step
    if asked.compared and (asked.save is not None or asked.tp is not None):
        raise typer.BadParameter("--compare cannot be combined with --save or --tp")
    if asked.compared and asked.profile is not None:
        raise typer.BadParameter("--profile cannot be combined with --compare: it is of one number of ranks")
    of_paper = (model.lora, model.quantize, step.sharding, step.gradient_dtype, step.fused_loss)
    if asked.profile is not None and any(of_paper):
        raise typer.BadParameter(
            "--profile cannot be combined with --lora, --quantize, --shard, --grad-dtype or --fused-loss"
        )
    reject_quantize(model, 2 if asked.compared else asked.tp)
    alone = asked.config or step.tokens or step.sequences or asked.profile or asked.compared
    alone = alone or asked.save or asked.windows or asked.full
    if longest and alone:
        raise typer.BadParameter(
            "--longest finds CONFIG, --seq and the plan itself, for --batch 1. It can be combined with "
            "--device, --budget, --host-memory-gib, --tp and the options of how the model is trained"
        )


def _sizes(text: str) -> tuple[int, ...]:
    name, _, numbers = text.partition("=")
    parts = numbers.split(",")
    if name != "tp" or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not of the form tp=1,2,4", param_hint="--compare")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _reject_overwriting(path: str) -> None:
    """Raise an error if the file ``path`` exists and was not written by ``--save``."""
    if not Path(path).exists():
        return
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or PREDICTED not in document:
        text = f"{path} exists and was not written by --save, so it is not overwritten"
        raise typer.BadParameter(text, param_hint="--save")
