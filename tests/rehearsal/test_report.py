"""`hf-actswap rehearse` on its device (`make rehearse`): what each report says of a small training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_actswap.planner import device_rates
from hf_actswap.planner.budget import with_fragments
from hf_actswap.rehearsal.launch import SETTINGS

pytestmark = pytest.mark.rehearsal

MIB = 2**20
_INSIDE = (SETTINGS, "LD_PRELOAD", "LD_LIBRARY_PATH", "CUBLAS_WORKSPACE_CONFIG")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "dtype": "bfloat16",
}
LOOP = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("model").cuda().train()
optimizer = torch.optim.AdamW(model.parameters())
for tokens in map(int, sys.argv[1:]):
    ids = torch.randint(0, 1000, (2, tokens), device="cuda")
    try:
        model(input_ids=ids, labels=ids).loss.backward()
    except torch.OutOfMemoryError:
        continue
    optimizer.step(); optimizer.zero_grad()
print(torch.cuda.max_memory_allocated(), sum(weight.nbytes for weight in model.parameters()))
"""
RANKS = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
for kind in ("ddp", "fsdp"):
    model = AutoModelForCausalLM.from_pretrained("model").cuda()
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    else:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 1000, (2, 64), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    if rank == 0:
        print(kind, "trained", dist.get_backend())
values = torch.empty(2**30, device="cuda")
dist.barrier()
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record()
dist.all_reduce(values)
end.record()
torch.cuda.synchronize()
if rank == 0:
    print("all_reduce", begin.elapsed_time(end))
dist.destroy_process_group()
"""
TRAINER = """
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16)
ids = torch.arange(1024) % 1000
args = TrainingArguments(output_dir="out", per_device_train_batch_size=2, max_steps=3, bf16=True,
                         optim="adamw_torch_fused", report_to="none", save_strategy="no", disable_tqdm=True)
Trainer(model=model, args=args, train_dataset=[{"input_ids": ids, "labels": ids}] * 6).train()
"""
DDP = """
import sys, torch
from transformers import AutoModelForCausalLM, Trainer
from hf_actswap import ActSwapTrainingArguments
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.bfloat16)
ids = torch.arange(2048) % 1000
args = ActSwapTrainingArguments(
    output_dir="out", per_device_train_batch_size=2, max_steps=5, bf16=True, optim="adamw_torch_fused",
    report_to="none", save_strategy="no", disable_tqdm=True,
    actswap={"memory": {"mode": "adaptive", "budget_gib": float(sys.argv[1])}},
)
Trainer(model=model, args=args, train_dataset=[{"input_ids": ids, "labels": ids}] * 24).train()
"""
QLORA = """
import sys, torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from hf_actswap import ActSwapTrainingArguments
stored = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = AutoModelForCausalLM.from_pretrained("model", quantization_config=stored, dtype=torch.bfloat16)
model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
ids = torch.arange(2048) % 1000
args = ActSwapTrainingArguments(
    output_dir="out", per_device_train_batch_size=2, max_steps=4, bf16=True, optim=sys.argv[1],
    report_to="none", save_strategy="no", disable_tqdm=True,
    actswap=None if sys.argv[2] == "none" else sys.argv[2],
)
Trainer(model=model, args=args, train_dataset=[{"input_ids": ids, "labels": ids}] * 8).train()
"""


def rehearse(
    tmp_path: Path,
    *words: str,
    program: str = LOOP,
    launch: tuple[str, ...] = (),
    config: dict[str, Any] = CONFIG,
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a program as a user would, outside of any rehearsal; return how it ended and the report."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(program)
    options, arguments = words[: words.index("--")], words[words.index("--") + 1 :]
    outside = {name: value for name, value in os.environ.items() if name not in _INSIDE}
    root = str(Path(__file__).resolve().parents[2])
    outside |= {"PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "hf_actswap.cli", "rehearse", "--no-weights", "--report", "report.json"]
    done = subprocess.run(
        [*command, *options, "--", sys.executable, *launch, "train.py", *arguments],
        env=outside,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done, json.loads((tmp_path / "report.json").read_text())


def bytes_of(held: list[dict[str, Any]], kind: str) -> int:
    return sum(group["bytes"] * group["count"] for group in held if group["kind"] == kind)


def test_the_peak_and_what_it_is_of(tmp_path: Path) -> None:
    done, report = rehearse(tmp_path, "--device", "A100-40", "--clock", "--", "512", "256", "512")
    allocated, weights = map(int, done.stdout.split())
    (process,) = report["processes"]
    memory = process["devices"]["0"]
    # The allocator's blocks may be up to 1 MiB larger than what was asked for.
    assert 0 <= allocated - memory["peak_bytes"] <= 4 * MIB
    assert sum(group["bytes"] * group["count"] for group in memory["held"]) == memory["peak_bytes"]
    assert weights <= bytes_of(memory["held"], "weights") <= weights + MIB  # and buffers
    assert 2 * weights <= bytes_of(memory["held"], "optimizer states") <= 2 * weights + MIB
    assert (memory["phase"], memory["steps_before"]) == ("backward", 2)
    assert (process["steps"], process["subject"]["batch"], process["subject"]["tokens"]) == (3, 2, 512)
    assert report["fits"] is True
    assert "A step: " in done.stderr
    assert "logits and loss" in done.stderr


def test_running_out_of_memory_is_survived_and_planned_for(tmp_path: Path) -> None:
    done, report = rehearse(tmp_path, "--device", "A100-40", "--memory", "1GiB", "--", "64", "16384", "64")
    (process,) = report["processes"]
    assert process["steps"] == 2
    (failed,) = process["out_of_memory"]
    assert (failed["phase"], failed["steps_before"]) == ("forward", 1)
    assert failed["asked_bytes"] >= 32 * MIB
    assert (failed["times"], process["planned"]) == (1, False)
    assert failed["op"].startswith("aten::")
    assert bytes_of(failed["memory"]["held"], "weights") > 20 * MIB
    assert "the program went on for 1 steps" in done.stderr
    assert "rehearsal: out of memory: " in done.stderr
    assert process["subject"]["tokens"] == 16384, "the batch that did not fit is the one to plan for"
    assert report["advice"]["plan"] or report["advice"]["longest"]
    assert report["fits"] is False


def test_each_rank_has_a_report(tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done, report = rehearse(
        tmp_path, "--device", "A100-40", "--devices", "2", "--clock", "--", program=RANKS, launch=launch
    )
    assert "ddp trained" in done.stdout
    assert "fsdp trained" in done.stdout
    assert "nccl" in done.stdout
    (took,) = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("all_reduce")]
    fabric = device_rates("A100-40").fabric
    assert fabric is not None
    assert 1 <= took / (4 * 2**30 / fabric.bytes_per_ms) < 2, "each rank sends half twice, then the rest"
    (other,) = [line for line in done.stderr.splitlines() if line.startswith("Rank 1: ")]
    assert "on device 1" in other
    assert "a step: " in other
    assert [(process["rank"], list(process["devices"])) for process in report["processes"]] == [
        (0, ["0"]),
        (1, ["1"]),
    ]
    assert [process["subject"]["sharding"] for process in report["processes"]] == ["fsdp=2"] * 2


def planned(tmp_path: Path, config: dict[str, Any], *options: str) -> dict[str, Any]:
    """Return what `hf-actswap plan` predicts."""
    (tmp_path / "plan").mkdir(exist_ok=True)
    (tmp_path / "plan" / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "hf_actswap.cli", "plan", str(tmp_path / "plan"), "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    predicted: dict[str, Any] = json.loads(done.stdout)["predicted"]
    return predicted


GPT2 = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 4, "n_head": 16, "vocab_size": 8192}
NEOX = {
    **{"model_type": "gpt_neox", "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 8192},
    **{"num_hidden_layers": 4, "num_attention_heads": 16, "hidden_dropout": 0.1, "attention_dropout": 0.1},
}


FALCON = {  # heads that fused attention cannot have: softmax of its own
    **{"model_type": "falcon", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16},
    **{"vocab_size": 8192, "multi_query": True, "parallel_attn": True},
}
DEEPSEEK = {  # values narrower than keys
    **{"model_type": "deepseek_v3", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 3},
    **{"moe_intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8192},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    **{"q_lora_rank": 384, "kv_lora_rank": 128, "first_k_dense_replace": 1},
}


@pytest.mark.parametrize("sizes", [GPT2, NEOX, FALCON, DEEPSEEK])
def test_a_step_needs_what_is_computed_on_paper(tmp_path: Path, sizes: dict[str, Any]) -> None:
    config = {**sizes, "dtype": "bfloat16", "use_cache": False}
    options = ("--device", "RTX 4090", "--seq", "1024", "--batch", "2")
    predicted = planned(tmp_path, config, *options)["nothing"]
    _, report = rehearse(tmp_path, "--device", "RTX 4090", "--clock", "--", program=TRAINER, config=config)
    (process,) = report["processes"]
    peak_bytes = process["devices"]["0"]["peak_bytes"]
    assert peak_bytes == pytest.approx(predicted["peak_bytes"], rel=0.003)


@pytest.mark.parametrize(("optimizer", "asked"), [("adamw_torch_fused", "adamw"), ("paged_adamw_8bit",) * 2])
def test_qlora_needs_what_a_plan_on_paper_says(tmp_path: Path, optimizer: str, asked: str) -> None:
    pytest.importorskip("bitsandbytes")
    config = {**CONFIG, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    options = ["--device", "RTX 4090", "--seq", "2048", "--batch", "2", "--optimizer", asked]
    options += ["--lora", "r=16,targets=all-linear", "--quantize", "4bit", "--prepare-kbit"]
    free = planned(tmp_path, config, *options)
    nothing, everything = (free[name]["peak_bytes"] for name in ("nothing", "recompute all"))
    budget = f"{with_fragments((nothing + everything) // 2) / 2**30:.4f}GiB"
    saved = tmp_path / "plan.yaml"
    predicted = planned(tmp_path, config, *options, "--budget", budget, "--save", str(saved))["planned"]
    assert predicted["swapped_bytes"] > 0
    device = ("--device", "RTX 4090", "--clock", "--host-memory", "8GiB", "--")
    _, report = rehearse(tmp_path, *device, optimizer, str(saved), program=QLORA, config=config)
    (process,) = report["processes"]
    assert process["steps"] == 4
    assert process["out_of_memory"] == []
    assert 0.97 < process["devices"]["0"]["peak_bytes"] / predicted["peak_bytes"] < 1.002


def test_ranks_of_ddp_keep_within_a_budget_far_below_the_device(tmp_path: Path) -> None:
    """Their allocators are not held to it, and keep what they could give back: no plan needs that."""
    config = {**CONFIG, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4}
    config |= {"vocab_size": 128256, "tie_word_embeddings": True}  # large blocks
    predicted = planned(tmp_path, config, "--device", "H100", "--seq", "2048", "--batch", "2")
    between = sum(predicted[name]["peak_bytes"] for name in ("nothing", "recompute all")) // 2
    bucket_bytes = 2 * (4 * (4 * 2048 * 2048 + 3 * 2048 * 8192) + 128256 * 2048)
    budget = with_fragments(between + bucket_bytes) / 2**30
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    options = ("--device", "H100", "--devices", "2", "--clock", "--host-memory", "16GiB", "--")
    done, report = rehearse(tmp_path, *options, f"{budget}", program=DDP, launch=launch, config=config)
    said = done.stdout + done.stderr
    assert "WARNING - " not in said
    assert "adaptive: stable" in said
    assert [process["out_of_memory"] for process in report["processes"]] == [[], []]
    assert all(process["devices"] for process in report["processes"])
