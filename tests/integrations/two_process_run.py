"""Started by `accelerate launch` on two CPU processes: every case against a run with nothing."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from transformers import Trainer

from hf_actswap import ActSwapCallback, ActSwapTrainingArguments
from tests.integrations.conftest import CASES, SHORT_ON_CPU, Tokens, grad_norms, losses, tiny_llama

STEPS = 20
EVERY_LAYER = {
    "log": "full",
    "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": True}]},
}

Run = tuple[list[float], list[float], list[torch.Tensor], float]
"""Losses, gradient norms, weights, and bytes offloaded in a step."""


def train(config: object, folder: str, **settings: object) -> Run:
    args = ActSwapTrainingArguments(
        output_dir=folder,
        actswap=config,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        **SHORT_ON_CPU,
        ddp_find_unused_parameters=False,
        **settings,
    )
    assert args.world_size == 2
    trainer = Trainer(
        model=tiny_llama(),
        args=args,
        train_dataset=Tokens(),
        callbacks=[ActSwapCallback(args)] if config else [],
    )
    trainer.train()
    moved = [
        entry["actswap_offloaded_gib"] for entry in trainer.state.log_history if "loss" in entry and config
    ]
    assert len(set(moved)) <= 1
    weights = [value.clone() for value in trainer.model.state_dict().values()]
    return losses(trainer), grad_norms(trainer), weights, moved[0] if moved else 0.0


def compare(run: Run, plain: Run) -> dict[str, object]:
    return {
        "losses": run[0] == plain[0] and len(run[0]) == STEPS,
        "grad_norms": run[1] == plain[1],
        "weights": all(torch.equal(a, b) for a, b in zip(run[2], plain[2], strict=True)),
        "bytes": run[3],
    }


def compiled(folder: str) -> dict[str, dict[str, object]]:
    """Under ``torch_compile``, whole and by regions: DistributedDataParallel is inside what is compiled."""
    results: dict[str, dict[str, object]] = {}
    for way, config in (("whole", EVERY_LAYER), ("regional", CASES["case 2"])):
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = str(way == "regional")
        found = []
        for requested in (None, config):
            torch._dynamo.reset()
            counters.clear()
            run = train(requested, folder, torch_compile=True, torch_compile_backend="aot_eager")
            found.append((run, counters["stats"].get("unique_graphs"), dict(counters["graph_break"])))
        (plain, graphs, breaks), (run, our_graphs, our_breaks) = found
        work = {"graphs": our_graphs == graphs > 0, "breaks": our_breaks == breaks}
        results[f"compiled {way}"] = {**compare(run, plain), **work}
    return results


def main(result_file: str) -> None:
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for setting, more in {
            "fp32": {},
            "bf16": {"bf16": True},
            "accumulation": {"gradient_accumulation_steps": 2},
        }.items():
            plain = train(None, folder, **more)
            for name, case in CASES.items():
                run = train(case, folder, **more)
                results[f"{setting}, {name}"] = compare(run, plain)
        rank = dist.get_rank()
        log = Path(folder, f"worker_{rank}.log").read_text()
        results["worker log"] = {"lines": log.count("Set full recompute at layer")}
        results.update(compiled(folder))
    Path(f"{result_file}.{rank}").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
