"""What each process of the Trainer's tests runs, by number of processes."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer

from hf_actswap import ActSwapTrainerMixin, stage_from_pretrained
from hf_actswap.engine import Link, PageableSlabs, host_budget, plan_runtime
from hf_actswap.integrations.pipeline_training import PipelineTraining
from hf_actswap.planner import start
from tests.engine.simulated_transfer import Clock, SimulatedTransfer
from tests.integrations.parallel_runs import LENGTH, OrderedTrainer, Rows, make
from tests.pipeline.staged_worker import tiny_model
from tests.processes import run_trainers, told

STEPS = 4
MIXED = {
    "swap_config": {
        "swap": True,
        "op_swap": [{"op_name": "attention", "backward_prefetch": 4, "layers": [0, 3]}],
    },
    "recompute_config": {"recompute": [1]},
}


class MeasuringTrainer(OrderedTrainer):
    """Evaluates logits and labels too: sums over all of them are in its log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, compute_metrics=self.sums, **kwargs)

    def sums(self, found: Any) -> dict[str, float]:
        """Of logits, ``[samples, length, vocabulary]``, and labels."""
        return {f"sum_{index}": float(values.sum()) for index, values in enumerate(found)}


REPORTED = {"max_steps": 6, "logging_steps": 1, "eval_steps": 3}
"""Enough steps for a record to measure one."""
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one epoch": {"max_steps": -1, "num_train_epochs": 1.0, "per_device_train_batch_size": 5},
    "table": {"sections": {"recompute_config": {"recompute": [1, 2]}}, "max_grad_norm": 0.01, "max_steps": 2},
    "lora": {"family": "lora", "max_steps": 2},
    "tied": {"family": "tied", "max_steps": 2},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "tiled": {"sections": {"tile_config": {"loss": 2}}},
    "wide": {"per_device_eval_batch_size": 6},
    "metrics": {"kind": MeasuringTrainer},
    "reported": {"sections": MIXED, **REPORTED},
    "twenty steps": {"sections": MIXED, "max_steps": 20, "logging_steps": 1},
}


class UnequalRows(Rows):
    """Rows whose lengths differ, of which a collator makes micro-batches of different lengths."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(index)
        return {name: value[: LENGTH - index // 2 % 5] for name, value in row.items()}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows as one batch, filled up on the right."""
    length = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, value: int) -> torch.Tensor:
        empty = [torch.full((length - len(row[name]),), value) for row in rows]
        return torch.stack([torch.cat([row[name], end]) for row, end in zip(rows, empty, strict=True)])

    ids = filled("input_ids", 0)
    mask = torch.stack([(torch.arange(length) < len(row["input_ids"])).long() for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": filled("labels", -100)}


@dataclass
class Run:
    """What a training left on a rank; ``crosses``: whether windows knew the schedule."""

    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    log: str
    trained: int
    crosses: bool


def pipeline(stages: int, schedule: str = "1f1b", interleaves: int = 1, **sections: Any) -> dict[str, Any]:
    """The configuration of a pipeline of so many stages; of one, of nothing but its tables."""
    parallel: dict[str, Any] = {"pp_interleave_num": interleaves}
    parallel |= {"pipeline_stage": stages, "schedule": schedule} if stages > 1 else {}
    return {"log": "full", **sections, "parallel_config": parallel | sections.get("parallel_config", {})}


def trainer_of(
    folder: Path,
    stages: int,
    schedule: str = "1f1b",
    interleaves: int = 1,
    sections: Any = None,
    family: str = "llama",
    kind: Any = OrderedTrainer,
    model: Any = None,
    **settings: Any,
) -> Any:
    """A Trainer of a tiny model of four layers, if none is given."""
    given = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 2,
        "data": UnequalRows(),
        "learning_rate": 0.01,
        **settings,
    }
    asked = pipeline(stages, schedule, interleaves, **(sections or {}))
    trainer = make(asked, folder, kind, tiny_model(family, 4) if model is None else model, **given)
    trainer.data_collator = padded
    return trainer


def trained(
    stages: int,
    name: str,
    schedule: str,
    folder: Path,
    interleaves: int = 1,
    resume: str | None = None,
    **more: Any,
) -> Run:
    """Train, save the whole model beside the checkpoints, and say what the log says."""
    place = folder / f"{name} {schedule} {stages}"
    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = trainer_of(place, stages, schedule, interleaves, **{**evaluated, **CASES.get(name, {}), **more})
    trainer.train(resume_from_checkpoint=None if resume is None else str(folder / resume))
    trainer.save_model(str(place / "last"))
    history = trainer.state.log_history
    log = (place / f"worker_{trainer.args.process_index}.log").read_text(encoding="utf-8")
    evaluations = [e[key] for key in ("eval_loss", "eval_sum_0", "eval_sum_1") for e in history if key in e]
    found = [[e[key] for e in history if key in e] for key in ("loss", "grad_norm")]
    count = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert (stages > 1) == isinstance(trainer.parallel, PipelineTraining)
    crosses = stages > 1 and bool(trainer.parallel.staged.passes._lengths)
    return Run(found[0], found[1], evaluations, log, count, crosses)


def planned(
    folder: Path,
    name: str = "planned",
    ranks: int = 1,
    schedule: str = "1f1b",
    interleaves: int = 1,
    stages: int = 2,
    resume: str | None = None,
    settings: Any = None,
    **asked: Any,
) -> Run:
    """Train under the planner, copies by a simulated clock, each stage divided among so many ranks.

    Without a plan the stages hold 592,753 bytes, of two micro-batches, and 466,118 of one. With two
    interleaves it is 671,898 bytes, of two and a half, and 550,787 of one and a half.
    """
    clock = Clock()
    transfer = SimulatedTransfer(clock, Link(3e4, 3e4, 3e4, 3e4), 2**40)
    memory = {"mode": "smart_swap", "warmup_steps": 2, **(asked or {"budget_gib": 461_709 / 2**30})}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_budget, "PinnedSlabs", lambda *_: PageableSlabs())
        for module in (plan_runtime, start):
            patch.setattr(module, "transfer_of", lambda _device: transfer)
        model = tiny_model("llama", 4)
        clock.drive(model)
        sections = {
            "memory": {**memory, "search_steps": 2, "min_tensor_mib": 0.0005},
            "parallel_config": {"tensor_parallel_size": ranks},
        }
        more = {**REPORTED, "interleaves": interleaves, **(settings or {})}
        return trained(stages, name, schedule, folder, sections=sections, model=model, resume=resume, **more)


def planned_twice(folder: Path) -> list[Run]:
    """Train with a plan file that is not there, and once more."""
    asked = {"budget_gib": 461_709 / 2**30, "plan_file": str(folder / "plan.json")}
    return [planned(folder, f"planned {time}", **asked) for time in ("first", "again")]


def planned_and_resumed(folder: Path, name: str, stages: int, ranks: int) -> list[Run]:
    """Train under the planner, and go on from the last checkpoint."""
    asked = {"mode": "adaptive", "reduce_by_gib": 60_000 / 2**30}
    shape: dict[str, Any] = {"ranks": ranks, "stages": stages}
    kept, more = {"save_strategy": "steps", "save_steps": 6}, {"max_steps": 8}
    first = planned(folder, f"{name} kept", settings=kept, **shape, **asked)
    checkpoint = f"{name} kept 1f1b {stages}/checkpoint-6"
    return [first, planned(folder, f"{name} resumed", settings=more, resume=checkpoint, **shape, **asked)]


def predictions(stages: int, folder: Path) -> Any:
    """Predict with labels and without."""
    trainer = trainer_of(folder / "predicted", stages)
    found = [trainer.predict(Rows(5))]
    trainer.data_collator = lambda rows: {**padded(rows), "labels": None}
    found.append(trainer.predict(Rows(5)))
    return [(one.predictions, one.label_ids, one.metrics.get("test_loss")) for one in found]


def rejections(folder: Path) -> dict[str, str]:
    """What is said before the first step, by what was asked."""
    two, place = partial(trainer_of, folder / "rejected", 2), folder / "rejected"
    asked: dict[str, dict[str, Any]] = {
        "Trainer": {"kind": Trainer},
        "own loss": {"kind": _OwnLoss},
        "own loss below": {"kind": _OwnLossBelow},
        "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager"},
        "planner": {"sections": {"memory": {"mode": "adaptive"}}, "schedule": "zero_bubble"},
        "tensor parallel": {"sections": {"parallel_config": {"tensor_parallel_size": 2}}},
        "rounds": {"schedule": "interleaved_1f1b", "interleaves": 2, "gradient_accumulation_steps": 5},
        "1f1b": {"interleaves": 2},
        "chunks": {"schedule": "interleaved_1f1b", "interleaves": 4},
    }
    found = {name: told(partial(two, **settings)) for name, settings in asked.items()}
    found["three stages"] = told(lambda: trainer_of(place, 3))
    other = pipeline(2, "interleaved_1f1b", 2)
    elsewhere = stage_from_pretrained(AutoModelForCausalLM, saved(place, "llama"), other)
    found["other weights"] = told(lambda: trainer_of(place, 2, model=elsewhere))
    predicting = trainer_of(place, 2)
    embedded = {"inputs_embeds": torch.zeros(1, 4, 32), "labels": torch.ones(1, 4, dtype=torch.long)}
    predicting.parallel.begin_step([embedded])
    found["embeds"] = told(lambda: predicting.training_step(predicting.model, embedded, 3))
    return found


class _OwnLoss(OrderedTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class _StockOwnLoss(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class _OwnLossBelow(ActSwapTrainerMixin, _StockOwnLoss):
    """As with TRL's trainers."""


def saved(folder: Path, family: str) -> Path:
    """Save a tiny model of four layers, once for all ranks."""
    source = folder / f"weights of {family}"
    tiny_model(family, 4).save_pretrained(source, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    return source


def opened(family: str, folder: Path, whole: bool = False, **parallel: Any) -> Run:
    """Train a model of which this rank has read its own stage, or all with ``whole``."""
    source = saved(folder, "llama" if family == "lora" else family)
    config = {} if whole else pipeline(2, parallel_config=parallel)
    how = {"attn_implementation": "eager"}  # as `tiny_model` has it
    model: Any = stage_from_pretrained(AutoModelForCausalLM, source, config, **how)
    assert any(parameter.is_meta for parameter in model.parameters()) != whole
    if family == "lora":
        torch.manual_seed(1)
        targets = ["q_proj", "up_proj"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    name = f"opened {'whole ' if whole else ''}{family}"
    steps = CASES.get(family, {}).get("max_steps", STEPS)
    sections = {"parallel_config": parallel}
    return trained(2, name, "1f1b", folder, sections=sections, model=model, max_steps=steps)


SAVING = {
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
}
"""By a measure that makes the first checkpoint, which is not the last, the best."""
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble": 1}

ONE: dict[str, Any] = {
    **{f"{name} one": partial(trained, 1, name, "one") for name in CASES if name != "table"},
    "table one": partial(trained, 1, "table", "one", sections={"recompute_config": {"recompute": [3]}}),
    "saving one": partial(trained, 1, "saving", "one", **SAVING),
    "predicted one": partial(predictions, 1),
}
"""One process."""

TWO: dict[str, Any] = {
    **{f"{name} 1f1b": partial(trained, 2, name, "1f1b") for name in CASES},
    **{
        f"{name} {schedule}": partial(trained, 2, name, schedule, interleaves=interleaves)
        for name in ("reported", "twenty steps")
        for schedule, interleaves in SCHEDULES.items()
    },
    "saving 1f1b": partial(trained, 2, "saving", "1f1b", **SAVING),
    "resumed from one": partial(trained, 2, "resumed from one", "1f1b", resume="saving one 1/checkpoint-2"),
    "resumed from two": partial(
        trained, 2, "resumed from two", "interleaved_1f1b", interleaves=2, resume="saving 1f1b 2/checkpoint-2"
    ),
    "dropout 1f1b": partial(trained, 2, "dropout", "1f1b", family="dropout", **SAVING),
    "dropout resumed": partial(
        trained, 2, "dropout resumed", "1f1b", family="dropout", resume="dropout 1f1b 2/checkpoint-2"
    ),
    "rejections": rejections,
    "predicted two": partial(predictions, 2),
    "planned": planned,
    "planned interleaved": partial(
        planned,
        name="planned interleaved",
        schedule="interleaved_1f1b",
        interleaves=2,
        budget_gib=480_000 / 2**30,
    ),
    "planned twice": planned_twice,
    "planned too small": lambda folder: told(
        lambda: planned(folder, "planned too small", reduce_by_gib=150_000 / 2**30)
    ),
    "checkpoint stages": partial(planned_and_resumed, name="stages", stages=2, ranks=1),
    "checkpoint parts": partial(planned_and_resumed, name="parts", stages=1, ranks=2),
    "opened llama": partial(opened, "llama"),
    "opened tied": partial(opened, "tied"),
    "opened lora": partial(opened, "lora"),
    "opened whole lora": partial(opened, "lora", whole=True),
}
"""Two stages; of ``checkpoint parts`` one model that both ranks hold together."""

SLOW_CASES = ("plain", "metrics", "one epoch", "bf16", "checkpointing", "tiled", "wide", "twenty steps")
SLOW = {
    *SLOW_CASES,
    *(f"{name} {schedule}" for name in SLOW_CASES for schedule in ("one", *SCHEDULES)),
    *(
        "reported gpipe",
        "reported zero_bubble",
        "resumed from one",
        "dropout 1f1b",
        "dropout resumed",
        "checkpoint parts",
        "opened llama",
        "opened tied",
        "opened lora",
        "opened whole lora",
        "planned",
        "planned too small",
        "planned interleaved",
        "planned twice",
    ),
}
"""Trainings that a quick launch leaves out, and the cases that they are of."""
ONE_QUICK = {name: run for name, run in ONE.items() if name not in SLOW}
TWO_QUICK = {name: run for name, run in TWO.items() if name not in SLOW}

FOUR: dict[str, Any] = {
    **{
        f"wide {family}": partial(
            trained,
            2,
            f"wide {family}",
            "1f1b",
            family=family,
            sections=MIXED,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=3,
            **SAVING,
        )
        for family in ("llama", "tied")
    },
    "wide resumed": partial(
        trained,
        2,
        "wide resumed",
        "1f1b",
        resume="wide llama 1f1b 2/checkpoint-2",
        per_device_train_batch_size=1,
        per_device_eval_batch_size=3,
    ),
}
"""Two pipelines of two stages: the global batches are those of ``wide``."""
ONE_WIDE: dict[str, Any] = {
    "wide one": partial(trained, 1, "wide", "one"),
    "wide tied one": partial(trained, 1, "wide", "tied one", family="tied"),
}

ONE_AGAIN: dict[str, Any] = {
    "resumed in one": partial(trained, 1, "resumed in one", "one", resume="saving 1f1b 2/checkpoint-2"),
}
"""One process again."""

SLICED = {"recompute_config": {"recompute": [2, 1], "recompute_slice_activation": True}}
DIVIDED: dict[str, dict[str, Any]] = {
    "plain": {"sequence": False, "sections": SLICED},
    "saving": {"sections": MIXED, **SAVING},
    "table": {"schedule": "interleaved_1f1b", "interleaves": 2},
    "tied": {"sequence": False, "sections": SLICED},
    "metrics": {"schedule": "gpipe"},
    "resumed": {"resume": "divided saving 1f1b 2/checkpoint-2", "sequence": False},
    "resumed from one": {"resume": "saving one 1/checkpoint-2"},
}
"""By name of the training in one process."""
DIVIDED_SLOW = ("plain", "saving", "metrics", "resumed", "resumed from one")
"""Those that a quick launch leaves out, with what resumes from them and a model opened by stage."""
DIVIDED_MORE: dict[str, dict[str, Any]] = {
    "lora": {},
    "checkpointing": {},
    "gpt2": {"family": "gpt2"},
    "mixtral": {"family": "mixtral"},
    "dropout": {"family": "dropout"},
}


def divided(name: str, folder: Path, sequence: bool = True, **more: Any) -> Run:
    """Train in stages of two ranks each, which divide the layers, and with ``sequence`` the sequence too."""
    parallel = {"tensor_parallel_size": 2, "sequence_parallel_enabled": sequence}
    given = {"schedule": "1f1b", **CASES.get(name, {}), **more}
    given["sections"] = {**given.get("sections", {}), "parallel_config": parallel}
    return trained(2, f"divided {name}", given.pop("schedule"), folder, **given)


def rejected_divided(folder: Path) -> str:
    """What is said of a schedule that does not go with divided layers."""
    return told(lambda: divided("rejected", folder, schedule="zero_bubble"))


FOUR_DIVIDED: dict[str, Any] = {
    **{f"divided {name}": partial(divided, name, **settings) for name, settings in DIVIDED.items()},
    "divided rejected": rejected_divided,
    "opened divided": partial(opened, "llama", tensor_parallel_size=2),
}
"""Two stages of two ranks each."""
_SLOW = ("opened divided", *(f"divided {name}" for name in DIVIDED_SLOW))
FOUR_DIVIDED_QUICK = {name: run for name, run in FOUR_DIVIDED.items() if name not in _SLOW}
FOUR_MORE: dict[str, Any] = {
    **{f"divided {name}": partial(divided, name, **settings) for name, settings in DIVIDED_MORE.items()},
    "divided planned": partial(
        planned, name="divided planned", ranks=2, mode="adaptive", reduce_by_gib=60_000 / 2**30
    ),
}
EIGHT: dict[str, Any] = {
    "divided wide": partial(divided, "wide", per_device_train_batch_size=1, per_device_eval_batch_size=3),
}
"""Two such pipelines."""
ONE_AFTER: dict[str, Any] = {
    "resumed from four": partial(
        trained, 1, "resumed from four", "one", resume="divided saving 1f1b 2/checkpoint-2"
    ),
}
ONE_MORE: dict[str, Any] = {
    **{f"{name} one": partial(trained, 1, name, "one", family=name) for name in ("gpt2", "mixtral")},
    **{f"{name} one": partial(trained, 1, name, "one") for name in ("lora", "checkpointing", "wide")},
    "reported one": ONE["reported one"],
}


def lost_stage(folder: Path) -> None:
    """The last stage ends in the third micro-batch of the second step; the first writes what it is told."""
    trainer = trainer_of(folder / "lost", 2)
    seen, began = Counter[str](), monotonic()

    def ends(*_: Any) -> None:
        nonlocal began
        seen["forwards"] += 1
        if seen["forwards"] == 4 + 3:
            began = monotonic()
            if dist.get_rank() == 1:
                os._exit(1)

    layers = trainer.parallel.staged.layout.layers_of(dist.get_rank())
    trainer.model.model.layers[layers[0]].register_forward_pre_hook(ends)
    said = told(trainer.train)
    torch.save((said, monotonic() - began), folder / "lost.pt")
    os._exit(0)


LOST: dict[str, Any] = {"lost": lost_stage}


def lose_a_stage(rank: int, folder: str) -> None:
    """Run it in a process of its own: forked, for the imports take longer than all else."""
    child = os.fork()
    if child == 0:
        run_trainers("tests.pipeline.trainer_worker:LOST", 2, rank, folder)
    os.waitpid(child, 0)
