"""Checks that a plan is a promise: plans on paper, trains by the plan on a rehearsed device, compares both.

Usage:
    python benchmarks/promise.py                          # needs PyTorch's CUDA build, no GPU
    python benchmarks/promise.py --only 8b lora --out results.json
    python benchmarks/promise.py --on-device --known --only H100 --out results.json     # on a real H100

Each row is what a user does: ``hf-actswap plan MODEL ... --save plan.yaml``, then a script with the Trainer
and ``actswap="plan.yaml"``, run by ``hf-actswap rehearse --clock``. Beside it the same script trains with
gradient checkpointing, and with ``actswap="auto"``. The promise is kept if memory never ran out, nothing was
a warning, reserved memory and the time of a step are as predicted, and the step is not slower than with
gradient checkpointing where that fits.

Lengths are those of README.md's tables, and for each model, method and device the longest sequence at which
gradient checkpointing fits on paper, half of it, and a tenth more. Rows of QLoRA need bitsandbytes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
HOST_MEMORY = "128GiB"
STEPS: Mapping[str, int] = {"plan": 5, "checkpointing": 4, "auto": 8}
"""How a row trains, and for how many steps."""

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
    "8b": _sizes("llama", 4096, 14336, 32, 32, 8, 128256),
    "moe": _sizes(
        *("qwen3_moe", 2048, 6144, 48, 32, 4, 151936), head_dim=128, norm_topk_prob=True, **_EXPERTS
    ),
}
"""The shapes of Llama-3.2-1B, Llama-3-8B and Qwen3-30B-A3B."""

LORA_RANK = 16
_FULL = ("1b", "full"), ("8b", "full")
_LORA = ("8b", "lora"), ("8b", "qlora"), ("moe", "lora")
_DEVICES = ("RTX 4090", "A100-40", "H100")
_GROUP_WORDS = {word for names in (*_FULL, *_LORA, *(name.split() for name in _DEVICES)) for word in names}
"""The words of rows' names that name a model, a method or a device."""
_UNIT_TOKENS = 512
_ON_DEVICE = "{mode: adaptive, preference: performance, weights: keep}"
"""A `memory` section that moves neither weights nor the optimizer's states to the host."""


@dataclass(frozen=True)
class Row:
    """One training: one micro-batch of ``batch`` sequences of ``tokens`` in a step, on each device.

    ``budget`` is as ``--budget`` takes it; empty: the device's memory. ``shard`` is as ``--shard`` takes it:
    ``fsdp=2`` or ``ddp=2``; empty: one device.
    """

    model: str
    method: str
    device: str
    tokens: int
    batch: int = 1
    budget: str = ""
    shard: str = ""

    @property
    def ranks(self) -> int:
        """On how many devices it trains."""
        return int(self.shard.partition("=")[2] or 1)

    @property
    def name(self) -> str:
        """The row in words, by which ``--only`` finds it."""
        more = "".join(f" {item}" for item in (self.budget, self.shard) if item)
        return f"{self.model} {self.method} {self.device}, {self.batch} x {self.tokens}{more}"

    @property
    def words(self) -> set[str]:
        """The words of its name."""
        return set(self.name.replace(",", "").split())

    @property
    def memory(self) -> dict[str, Any]:
        """Its ``memory`` section."""
        return {"budget_gib": float(self.budget.removesuffix("GiB"))} if self.budget else {}


KNOWN_ROWS = (
    Row("8b", "lora", "RTX 4090", 4096),
    Row("8b", "lora", "A100-40", 8192),
    Row("8b", "lora", "A100-40", 8192, budget="31GiB"),
    Row("8b", "lora", "H100", 16384),
    Row("8b", "lora", "H100", 16384, budget="60GiB"),
    Row("1b", "full", "RTX 4090", 4096, 2),
    Row("1b", "full", "A100-40", 8192, 2),
    Row("8b", "full", "A100-40", 4096),
    Row("8b", "lora", "RTX 4090", 8192, shard="fsdp=2"),
    Row("8b", "lora", "A100-40", 8192, shard="ddp=2"),
    Row("1b", "full", "A100-40", 8192, 2, shard="fsdp=2"),
)
"""Rows of README.md, and of trainings that once failed."""


def grid(only: Sequence[str] = ()) -> Iterator[Row]:
    """Yield the rows around the longest sequence that checkpointing takes on paper, of models in ``only``."""
    for model, method in (*_FULL, *_LORA):
        for device in _DEVICES:
            row = Row(model, method, device, 0)
            if set(only) & _GROUP_WORDS - row.words:
                continue
            if (longest := longest_checkpointed(row)) is None:
                yield replace(row, tokens=2048)
                continue
            for tokens in (longest // 2, longest, longest * 11 // 10):
                yield replace(row, tokens=max(tokens // _UNIT_TOKENS, 1) * _UNIT_TOKENS)


def longest_checkpointed(row: Row) -> int | None:
    """Return the longest sequence at which checkpointing fits on paper; ``None``: not even a short one."""
    peaks: list[tuple[int, int]] = []
    for tokens in (512 * 2**doubled for doubled in itertools.count()):
        with tempfile.TemporaryDirectory() as name:
            found = planned(replace(row, tokens=tokens), Path(name), _ON_DEVICE)
        if not found["ok"] or found["predicted"]["recompute all"]["peak_bytes"] > found["allocatable_bytes"]:
            break
        peaks.append((tokens, found["predicted"]["recompute all"]["peak_bytes"]))
        room_bytes = found["allocatable_bytes"] - peaks[-1][1]
    if len(peaks) < 2:
        return None
    # The longest two: at short lengths the optimizer's step is the peak, whatever the length.
    (short, low), (long, high) = peaks[-2:]
    return long + room_bytes * (long - short) // max(high - low, 1)


def planned(row: Row, folder: Path, memory: str = "{mode: adaptive}") -> dict[str, Any]:
    """Return the answer of ``hf-actswap plan --json`` to a row; the plan is saved in ``folder``."""
    (folder / "config.json").write_text(json.dumps(MODELS[row.model]), encoding="utf-8")
    (folder / "asked.yaml").write_text(f"memory: {memory}\n", encoding="utf-8")
    command = [sys.executable, "-m", "hf_actswap.cli", "plan", str(folder), str(folder / "asked.yaml")]
    command += ["--device", row.device, "--seq", str(row.tokens), "--batch", str(row.batch)]
    command += ["--host-memory-gib", HOST_MEMORY.removesuffix("GiB")]
    command += ["--save", str(folder / "plan.yaml"), "--json"]
    command += ["--lora", f"r={LORA_RANK},targets=all-linear"] if row.method != "full" else []
    command += ["--quantize", "4bit", "--prepare-kbit"] if row.method == "qlora" else []
    command += ["--budget", row.budget] if row.budget else []
    command += ["--shard", row.shard] if row.shard else []
    started = time.perf_counter()
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not ran.stdout:
        raise SystemExit(ran.stderr)
    found: dict[str, Any] = json.loads(ran.stdout)
    return {**found, "seconds": time.perf_counter() - started}


def trained(row: Row, how: str, folder: Path, on_device: bool) -> dict[str, Any]:
    """Train a row as ``how`` says, and return what was seen.

    ``on_device``: on this machine's, which must be the row's; else on a rehearsed one.
    """
    report, given = folder / "report.json", folder / "row.json"
    asked = {"row": asdict(row), "how": how, "folder": str(folder), "report": str(report)}
    given.write_text(json.dumps({**asked, "measures": on_device}), encoding="utf-8")
    report.unlink(missing_ok=True)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(row.ranks)]
    command = [sys.executable, *(launch if row.shard else []), __file__, "--train", str(given)]
    path = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}  # from a checkout, installed or not
    if not on_device:
        rehearse = ["rehearse", "--device", row.device, "--clock", "--host-memory", HOST_MEMORY]
        rehearse += [
            "--devices",
            str(row.ranks),
            "--no-advice",
            "--no-weights",
            "--report",
            str(report),
            "--",
        ]
        command, env["OMP_NUM_THREADS"] = [sys.executable, "-m", "hf_actswap.cli", *rehearse, *command], "1"
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    log = ran.stdout + ran.stderr
    (folder / f"{how}.log").write_text(log, encoding="utf-8")
    if not report.exists():
        raise SystemExit(log[-8000:])
    document = json.loads(report.read_text(encoding="utf-8"))
    return {**document, "warnings": warnings_in(log)} if on_device else seen(document, log)


def warnings_in(log: str) -> list[str]:
    """Return the warnings of a training's log."""
    return [line for line in log.splitlines() if line.startswith("WARNING - ")]


def seen(document: Mapping[str, Any], log: str) -> dict[str, Any]:
    """Return the numbers of a rehearsal's report, and the warnings of its log.

    ``step_ms`` are the times of the steps after the first.
    """
    process = document["processes"][0]
    device = process["devices"].get("0", {})
    return {
        "steps": process["steps"],
        "step_ms": [round(after[0] - before[0]) for before, after in pairwise(process["step_times"])],
        "busy_ms": [round(after[1] - before[1]) for before, after in pairwise(process["step_times"])],
        "peak_bytes": device.get("peak_bytes"),
        "reserved_peak_bytes": device.get("process_peak_bytes"),
        "host_bytes": process["host_bytes"],
        "out_of_memory": sum(item["times"] for item in process["out_of_memory"]),
        "warnings": warnings_in(log),
    }


def measured(trainer: Any) -> dict[str, Any]:
    """Train, and return what a rehearsal's report would say (`seen`), as this device has it.

    Times end when the device has done the step. Host memory is all that this process had resident.
    """
    import torch
    from transformers import TrainerCallback

    ended_at: list[float] = []

    class StepTimes(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            ended_at.append(time.perf_counter())

    trainer.add_callback(StepTimes())
    ran_out = 0
    try:
        trainer.train()
    except torch.OutOfMemoryError:
        ran_out = 1
    return {
        "steps": len(ended_at),
        "step_ms": [round(1000 * (after - before)) for before, after in pairwise(ended_at)],
        "busy_ms": [],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        "host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "out_of_memory": max(ran_out, torch.cuda.memory_stats().get("num_ooms", 0)),
    }


def _random(folder: Path) -> Any:
    """Return the model of a folder's configuration: on the device if it fits there, else on the host."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if model.get_memory_footprint() < torch.cuda.mem_get_info()[0]:
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    else:  # where a model is loaded; empty, as a rehearsal computes nothing of that size
        model.to_empty(device="cpu").tie_weights()
    return model


def _quantised(folder: Path, how: str, random_weights: bool) -> Any:
    """Return the model as QLoRA's users load it; ``random_weights``: write a file of them first."""
    import torch
    from peft import prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if random_weights and not any(folder.glob("*.safetensors")):
        _random(folder).save_pretrained(folder)
        torch.cuda.empty_cache()
    stored = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=stored, dtype=torch.bfloat16)
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=how == "checkpointing")


def train(file: str) -> None:
    """Train a row in this process, which a rehearsal may have prepared."""
    import torch
    from transformers import Trainer, TrainingArguments

    from hf_actswap import ActSwapTrainingArguments

    given = json.loads(Path(file).read_text(encoding="utf-8"))
    row, how, folder = Row(**given["row"]), given["how"], Path(given["folder"])
    if row.method == "qlora":
        model = _quantised(folder, how, random_weights=given["measures"])
    else:
        model = _random(folder)
    if row.method != "full":
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
        if how == "checkpointing":
            model.enable_input_require_grads()
    ids = torch.arange(row.tokens) % 1000
    data = [{"input_ids": ids, "labels": ids}] * (row.batch * row.ranks * STEPS[how])
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
    }
    if row.shard.startswith("fsdp"):
        wrapped = sorted(
            getattr(model, "_no_split_modules", None) or model.base_model.model._no_split_modules
        )
        common["fsdp"] = "full_shard auto_wrap"
        common["fsdp_config"] = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": wrapped}
    if how == "checkpointing":
        common["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
        args = TrainingArguments(gradient_checkpointing=True, **common)
    else:
        auto = {"memory": {"mode": "adaptive", **row.memory}}
        asked: Any = str(folder / "plan.yaml") if how == "plan" else auto
        args = ActSwapTrainingArguments(actswap=asked, **common)
    trainer = Trainer(model=model, args=args, train_dataset=data)
    if given["measures"]:
        Path(given["report"]).write_text(json.dumps(measured(trainer)), encoding="utf-8")
    else:
        trainer.train()


@dataclass(frozen=True)
class Result:
    """What was promised for a row, and what its trainings did, by how they trained (`STEPS`)."""

    row: Row
    promised: dict[str, Any] | None
    plan_seconds: float
    trained: dict[str, dict[str, Any]]

    def faults(self) -> list[str]:
        """Return in which ways the promise was not kept; where nothing was promised there are none."""
        return (
            [] if self.promised is None else [*self._faults_of_plan(self.promised), *self._faults_of_auto()]
        )

    def _faults_of_plan(self, promised: Mapping[str, Any]) -> Iterator[str]:
        plan, other = self.trained.get("plan"), self.trained.get("checkpointing")
        if plan is None:
            return
        if plan["warnings"]:
            yield "a warning"
        if plan["out_of_memory"] or plan["steps"] < STEPS["plan"]:
            yield "out of memory"
            return
        # Several ranks share the cores of one machine here: what their devices do counts.
        step_ms = median(plan["busy_ms" if self.row.shard else "step_ms"])
        if (ratio := step_ms / promised["step_ms"]) > 1.05:
            yield f"{100 * (ratio - 1):.0f} % slower than predicted"
        reserved = plan["reserved_peak_bytes"] / promised["reserved_bytes"]
        if not 0.97 <= reserved <= 1.01:
            yield f"reserved {100 * (reserved - 1):+.1f} %"
        fits = other is not None and not other["out_of_memory"]
        if fits and other is not None and median(plan["step_ms"]) > median(other["step_ms"]):
            yield "slower than gradient checkpointing"

    def _faults_of_auto(self) -> Iterator[str]:
        if (auto := self.trained.get("auto")) is None:
            return
        if auto["out_of_memory"]:
            yield f"auto: out of memory {auto['out_of_memory']} time(s)"
        if len(slow := slow_steps(auto)) > 1:
            yield f"auto: {len(slow)} slow steps"

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "name": self.row.name,
            "row": asdict(self.row),
            "promised": self.promised,
            "plan_seconds": round(self.plan_seconds, 1),
            "trained": self.trained,
            "faults": self.faults(),
        }

    def line(self) -> str:
        """Return its line of the table."""
        promised, cells = self.promised, [self.row.name]
        if promised is None:
            cells.append("no plan")
        else:
            cells.append(
                f"{promised['step_ms']:,.0f} ms, {promised['peak_bytes'] / GIB:.2f} / "
                f"{promised['reserved_bytes'] / GIB:.2f}, host {promised['host_bytes'] / GIB:.1f}"
            )
        cells += [in_words(self.trained[how]) if how in self.trained else "" for how in STEPS]
        return f"| {' | '.join(cells)} | {'; '.join(self.faults()) or 'kept'} |"


def slow_steps(auto: Mapping[str, Any]) -> list[int]:
    """Return the times of the steps after the first that took 1.5 times as long as the last ones."""
    return [ms for ms in auto["step_ms"] if ms > 1.5 * median(auto["step_ms"][-3:])]


def in_words(one: Mapping[str, Any]) -> str:
    """Return what one training did: time of its last steps, peaks allocated and reserved."""
    if not one["step_ms"]:
        return "dies"
    times = f"{median(one['step_ms'][-3:]):,} ms, " if one["steps"] > 2 else "dies, "
    memory = f"{one['peak_bytes'] / GIB:.2f} / {one['reserved_peak_bytes'] / GIB:.2f}"
    ran_out = f", out of memory {one['out_of_memory']} x" if one["out_of_memory"] else ""
    return f"{times}{memory}{ran_out}"


def result_of(row: Row, ways: list[str], folder: Path, on_device: bool) -> Result:
    """Plan a row, and train it in the ``ways`` that are asked for."""
    answer = planned(row, folder)
    promised = None
    if answer["ok"]:
        step = answer["predicted"]["planned"]
        promised = {key: step[key] for key in ("step_ms", "peak_bytes")}
        promised |= {
            "reserved_bytes": answer["reserved_bytes"],
            "host_bytes": answer["host_memory"]["rank_bytes"],
            "recompute_all_bytes": answer["predicted"]["recompute all"]["peak_bytes"],
        }
    chosen = [how for how in ways if promised is not None or how != "plan"]
    found = {how: trained(row, how, folder, on_device) for how in chosen}
    return Result(row, promised, answer["seconds"], found)


def main() -> None:
    """Rehearse the rows, print them, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of rows' names, all of which are in it")
    parser.add_argument("--ways", nargs="*", default=list(STEPS), choices=list(STEPS), help="how to train")
    parser.add_argument("--known", action="store_true", help="only the rows of README.md")
    parser.add_argument("--on-device", action="store_true", help="train on this machine's GPU, not rehearsed")
    parser.add_argument("--out", type=Path, help="JSON file to write; rows of other names in it stay")
    parser.add_argument("--keep", type=Path, help="folder in which logs and plans stay")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train)
        return
    kept = json.loads(given.out.read_text("utf-8")) if given.out and given.out.exists() else []
    print("| training | promised | plan | checkpointing | auto | |\n|---|---|---|---|---|---|")
    rows = KNOWN_ROWS if given.known else itertools.chain(KNOWN_ROWS, grid(given.only))
    failed = False
    for row in rows:
        if not row.words.issuperset(given.only) or (given.on_device and row.shard):  # one device is there
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) if given.keep is None else given.keep / row.name.replace(", ", "_")
            folder.mkdir(parents=True, exist_ok=True)
            result = result_of(row, given.ways, folder, given.on_device)
        print(result.line(), flush=True)
        failed |= bool(result.faults())
        kept = [*(old for old in kept if old["name"] != row.name), result.document()]
        if given.out:
            given.out.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
