"""Checks that a plan is a promise: plans on paper, trains by the plan on a rehearsed device, and compares both.

Usage:
    python benchmarks/promise.py                          # needs PyTorch's CUDA build, no GPU
    python benchmarks/promise.py --only 8b lora --out results.json

Each row is what a user does: ``hf-actswap plan MODEL ... --save plan.yaml``, then a script with the Trainer
and ``actswap="plan.yaml"``, run by ``hf-actswap rehearse --clock``. Beside it train the same script with
gradient checkpointing, and with ``actswap="auto"``. A promise is kept if memory never ran out, nothing was a
warning, reserved memory and the time of a step are as predicted, and the step is not slower than with
gradient checkpointing where that fits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
HOST_MEMORY = "128GiB"
STEPS = {"plan": 6, "checkpointing": 4, "auto": 8}

_SIZES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size"),
)


def _sizes(*sizes: str | int, **more: Any) -> dict[str, Any]:
    found = {**dict(zip(_SIZES, sizes, strict=True)), **more}
    return {**found, "max_position_embeddings": 131072, "dtype": "bfloat16", "use_cache": False}


_EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
MODELS: Mapping[str, dict[str, Any]] = {
    "1b": _sizes("llama", 2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
    "7b": _sizes("llama", 4096, 11008, 32, 32, 32, 32000),
    "8b": _sizes("llama", 4096, 14336, 32, 32, 8, 128256),
    "moe": _sizes(
        *("qwen3_moe", 2048, 6144, 48, 32, 4, 151936), head_dim=128, norm_topk_prob=True, **_EXPERTS
    ),
}
"""Llama-3.2-1B, Llama-2-7B, Llama-3-8B and Qwen3-30B-A3B."""

METHODS: Mapping[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": 16},
    "states": {"memory": {"preference": "memory_saving", "optimizer_in_backward": True}},
    "weights": {"lora": 16, "memory": {"weights": "host"}},
}
"""How a model is trained -> rank of its adapters, and keys of ``memory``."""


@dataclass(frozen=True)
class Row:
    """One training: one micro-batch of ``batch`` sequences of ``tokens`` in a step, on one device."""

    model: str
    method: str
    device: str
    tokens: int
    batch: int = 1
    budget: str = ""
    expandable: bool | None = None

    @property
    def name(self) -> str:
        """The row in words, by which ``--only`` finds it."""
        kind = "" if self.expandable is None else f" expandable={self.expandable}"
        budget = f" {self.budget}" if self.budget else ""
        return f"{self.model} {self.method} {self.device}, {self.batch} x {self.tokens}{budget}{kind}"


def rows() -> list[Row]:
    """Return the rows of the grid."""
    found = [
        Row("8b", "lora", "RTX 4090", 4096),
        Row("8b", "lora", "A100-40", 8192),
        Row("8b", "lora", "A100-40", 8192, budget="31GiB"),
        Row("8b", "lora", "H100", 16384),
        Row("8b", "lora", "H100", 16384, budget="60GiB"),
        Row("1b", "full", "RTX 4090", 4096, 2),
        Row("1b", "full", "A100-40", 8192, 2),
        Row("8b", "full", "A100-40", 4096),
        Row("8b", "full", "H100", 8192),
    ]
    return found


def planned(row: Row, folder: Path) -> dict[str, Any]:
    """Return the answer of ``hf-actswap plan --json`` to a row; the plan is saved in ``folder``."""
    method = METHODS[row.method]
    config = {"memory": {"mode": "adaptive", **method.get("memory", {})}}
    (folder / "asked.yaml").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "hf_actswap.cli", "plan", str(folder), str(folder / "asked.yaml")]
    command += ["--device", row.device, "--seq", str(row.tokens), "--batch", str(row.batch)]
    command += ["--save", str(folder / "plan.yaml"), "--json"]
    if "lora" in method:
        command += ["--lora", f"r={method['lora']},targets=all-linear"]
    if row.budget:
        command += ["--budget", row.budget]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not ran.stdout:
        raise SystemExit(ran.stderr)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def rehearsed(row: Row, how: str, folder: Path) -> dict[str, Any]:
    """Train a row as ``how`` says on its rehearsed device, and return what was seen."""
    report, given = folder / "report.json", folder / "row.json"
    given.write_text(json.dumps({"row": asdict(row), "how": how, "folder": str(folder)}), encoding="utf-8")
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "hf_actswap.cli", "rehearse", "--device", row.device, "--clock"]
    command += ["--host-memory", HOST_MEMORY, "--no-advice", "--report", str(report), "--"]
    command += [sys.executable, __file__, "--train", str(given)]
    env = _environment(row)
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    (folder / f"{how}.log").write_text(ran.stdout + ran.stderr, encoding="utf-8")
    if not report.exists():
        raise SystemExit(ran.stdout[-4000:] + ran.stderr[-4000:])
    return seen(json.loads(report.read_text(encoding="utf-8")), ran.stderr + ran.stdout)


def _environment(row: Row) -> dict[str, str]:
    import os

    found = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if row.expandable is not None:
        found["PYTORCH_ALLOC_CONF"] = f"expandable_segments:{row.expandable}"
    return found


def seen(document: Mapping[str, Any], log: str) -> dict[str, Any]:
    """Return the numbers of a rehearsal's report and what its log warns of."""
    process = document["processes"][0]
    device = process["devices"].get("0", {})
    warnings = [line for line in log.splitlines() if "WARNING" in line and "hf_actswap" in line]
    return {
        "process": process,
        "device": device,
        "steps": process["steps"],
        "out_of_memory": sum(item["times"] for item in process["out_of_memory"]),
        "warnings": warnings,
    }


def train(file: str) -> None:
    """Train a row in this process, which a rehearsal has prepared."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    from hf_actswap import ActSwapTrainingArguments

    import os, logging
    if os.environ.get("PROMISE_DEBUG"):
        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("hf_actswap").setLevel(logging.DEBUG)
    given = json.loads(Path(file).read_text(encoding="utf-8"))
    row, how, folder = Row(**given["row"]), given["how"], Path(given["folder"])
    method = METHODS[row.method]
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    if "lora" in method:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=method["lora"], lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
        model.enable_input_require_grads() if how == "checkpointing" else None
    ids = torch.arange(row.tokens) % 1000
    data = [{"input_ids": ids, "labels": ids}] * (row.batch * STEPS[how])
    common: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": row.batch,
        "max_steps": STEPS[how],
        "bf16": True,
        "optim": "adamw_torch_fused",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "gradient_checkpointing": how == "checkpointing",
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    if how == "checkpointing":
        args = TrainingArguments(**common)
    else:
        asked: Any = str(folder / "plan.yaml") if how == "plan" else {"memory": {"mode": "adaptive", **method.get("memory", {}), **({"budget_gib": float(row.budget.removesuffix("GiB"))} if row.budget else {})}}
        args = ActSwapTrainingArguments(actswap=asked, **common)
    trainer = Trainer(model=model, args=args, train_dataset=data)
    if os.environ.get("PROMISE_PROFILE"):
        import cProfile, pstats, time
        from transformers import TrainerCallback
        prof = cProfile.Profile(time.process_time)
        class C(TrainerCallback):
            def on_step_begin(self, a, state, c, **k):
                if state.global_step == 3: prof.enable()
            def on_step_end(self, a, state, c, **k):
                if state.global_step == 4: prof.disable()
        trainer.add_callback(C())
        trainer.train()
        pstats.Stats(prof).sort_stats("tottime").print_stats(45)
        pstats.Stats(prof).sort_stats("cumtime").print_stats(60)
        return
    trainer.train()


def main() -> None:
    """Rehearse the rows, print them, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="parts of rows' names, all of which are in it")
    parser.add_argument("--how", nargs="*", default=list(STEPS))
    parser.add_argument("--expandable", type=lambda text: text == "1")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train)
        return
    for row in rows():
        if given.expandable is not None:
            from dataclasses import replace
            row = replace(row, expandable=given.expandable)
        if not all(part in row.name.replace(",", "").split() for part in given.only or ()):
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if given.keep:
                folder = given.keep / row.name.replace(" ", "_").replace(",", "")
                folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.json").write_text(json.dumps(MODELS[row.model]), encoding="utf-8")
            if "plan" in given.how:
                import time
                t = time.time()
                answer = planned(row, folder) if not (folder / "answer.json").exists() else json.loads((folder / "answer.json").read_text())
                (folder / "answer.json").write_text(json.dumps(answer))
                step = answer["predicted"]["planned"] if answer["ok"] else None
                print(row.name, "plan says", step and (round(step["step_ms"]), round(step["peak_bytes"] / GIB, 2), round(step["host_bytes"] / GIB, 2)), f"{time.time() - t:.1f} s", flush=True)
                if not answer["ok"]:
                    print(json.dumps(answer)[:1000])
            for how in given.how:
                found = rehearsed(row, how, folder)
                (folder / f"{how}.json").write_text(json.dumps(found, indent=1))
                times = found["process"]["step_times"]
                ends = [sum(t) if isinstance(t, list) and False else t[0] for t in times]
                ms = [round(b - a) for a, b in pairwise(ends)]
                dev = found["device"]
                print(" ", how, "steps", found["steps"], "ms", ms, "alloc", round(dev.get("allocated_bytes", 0) / GIB, 2), "oom", found["out_of_memory"], "warn", len(found["warnings"]), {k: round(v / GIB, 2) for k, v in dev.items() if isinstance(v, int) and v > 10**8}, "host", round(found["process"]["host_bytes"] / GIB, 2), flush=True)


if __name__ == "__main__":
    main()
