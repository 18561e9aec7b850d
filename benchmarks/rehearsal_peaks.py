"""Predicted peaks of device memory beside those of PyTorch's CUDA allocator, in rehearsal.

Usage:
    python benchmarks/rehearsal_peaks.py                  # needs PyTorch's CUDA build, no GPU
    python benchmarks/rehearsal_peaks.py --only 7b-8k --out results.json

Each row is a training of three steps, batch 1, in a process of its own on a rehearsed H200 whose memory
suffices for every row. Loss, backward, optimizer and zero_grad follow each other as in the Trainer, which
frees the model's output before backward. The prediction is that of ``hf-actswap plan``, for the same model,
batch, optimizer and plan.

With ``--share 1.02`` the device has 1.02 times the predicted peak, and half a GiB for CUDA itself: what
PyTorch's allocator holds beyond what is in use it gives back when memory is short, so reserved memory alone
does not say what a training needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
STEPS = 3
DEVICE, MEMORY, CONTEXT = "H200", 400 * GIB, GIB // 2
ALLOCATORS = {"expandable": "expandable_segments:True", "fixed": "expandable_segments:False"}

_7B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
}
MODELS: Mapping[str, dict[str, Any]] = {
    "7b": _7B,
    "8b": {**_7B, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256},
    "moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "gemma": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "vocab_size": 262208,
        "max_position_embeddings": 32768,
    },
}
"""Llama-2-7B, Llama-3-8B, eight layers of Qwen3-30B-A3B, and twelve layers of Gemma-3-4B."""

METHODS: Mapping[str, str] = {
    "plain": "",
    "checkpointing": "recompute_config: {recompute: true}",
    "recompute": "recompute_config: {recompute: true}",
    "swap": "swap_config: {swap: true}",
    "mix": r"""
swap_config: {swap: true, op_swap: [{op_name: attention, backward_prefetch: auto, layers: true}]}
recompute_config:
  select_recompute:
    {input_layernorm\..*: true, post_attention_layernorm\..*: true, mlp\.act_fn: true, mlp\.mul: true}
""",
    "planned": "",
    "tiles": "{recompute_config: {recompute: true}, tile_config: {loss: auto}}",
    "stream": "{stream_config: {tokens: auto}, tile_config: {loss: auto}}",
}
"""What saves memory -> the configuration. Checkpointing is transformers' own; ``planned`` is the fastest plan
within its peak; ``mix`` is that of README.md."""


@dataclass(frozen=True)
class Row:
    """A training.

    Args:
        model: one of `MODELS`.
        tokens: length of the sequence.
        method: one of `METHODS`.
        optimizer: as ``hf-actswap plan`` names them: ``adamw`` (fused) or ``adamw_torch`` (foreach).
        lora: rank of adapters, the only trained weights then; 0: all weights are trained.
        allocator: one of `ALLOCATORS`.
    """

    model: str
    tokens: int
    method: str
    optimizer: Literal["adamw", "adamw_torch"] = "adamw"
    lora: int = 0
    allocator: str = "expandable"

    @property
    def name(self) -> str:
        """The row in words, by which ``--only`` finds it."""
        kind = f"lora{self.lora}" if self.lora else "full"
        return f"{self.model}-{self.tokens // 1024}k {kind} {self.optimizer} {self.method} {self.allocator}"


def rows() -> list[Row]:
    """Return all rows of the table."""
    found = [Row(model, 8192, method) for model in ("7b", "8b") for method in METHODS]
    found += [Row(model, 32768, method) for model in ("7b", "8b") for method in METHODS]
    found += [
        Row(model, tokens, method, lora=16)
        for model in ("7b", "8b")
        for tokens in (8192, 32768)
        for method in ("plain", "checkpointing", "planned", "mix")
    ]
    found += [Row(model, 8192, name) for model in ("moe", "gemma") for name in METHODS if name != "stream"]
    found += [Row("7b", 8192, method, "adamw_torch") for method in ("plain", "checkpointing")]
    found += [Row("7b", 8192, method, allocator="fixed") for method in METHODS]
    return found


def rehearse(row: Row, memory: int = MEMORY) -> dict[str, Any]:
    """Run a row on a rehearsed device with so much memory, in a process of its own."""
    from hf_actswap.rehearsal import Options, build, environment

    found = environment(Options(DEVICE, memory=f"{memory >> 20}MiB", clock=True, races=False), build())
    found |= {"PYTORCH_ALLOC_CONF": ALLOCATORS[row.allocator], "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--step", json.dumps(vars(row))]
    done = subprocess.run(command, env=found, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"name": row.name, "error": done.stderr.strip().splitlines()[-1][:300]}
    return {"name": row.name, **json.loads(done.stdout.splitlines()[-1])}


def _request(row: Row, folder: str) -> Any:
    from hf_actswap.cli.plan_request import Lora, ModelRequest

    (Path(folder) / "config.json").write_text(json.dumps(MODELS[row.model]), "utf-8")
    return ModelRequest(folder, "bf16", Lora(row.lora) if row.lora else None)


def predicted(row: Row, request: Any) -> tuple[Any, dict[str, int]]:
    """Return a row's plan, and the predicted peaks: of forward and backward, and of the optimizer's step."""
    from hf_actswap import load_config, resolve_plan
    from hf_actswap.cli.step import StepShape, profile_of
    from hf_actswap.cli.subject import subject
    from hf_actswap.planner import Limits
    from hf_actswap.planner.cost.simulate import predict
    from hf_actswap.planner.search.find_plan import find_plan
    from hf_actswap.stream import ChunkedStep

    config = load_config(METHODS[row.method] or None)
    with subject(request, config) as found:
        step = StepShape(1, row.tokens, DEVICE, "bf16" if row.lora else None, row.optimizer)
        plan = resolve_plan(config, found.shape)
        if plan.streamed is not None:

            def of_chunk(tokens: int) -> Any:
                return profile_of(found, StepShape(1, tokens, DEVICE, None, row.optimizer), plan.tiles)

            chunked = ChunkedStep(found.model, found.shape, plan, DEVICE, of_chunk)
            return plan, {"predicted": chunked.predicted(row.tokens).peak_bytes, "predicted_outside": 0}
        profile = profile_of(found, step, plan.tiles)
        if row.method == "planned":
            all_again = resolve_plan(load_config(METHODS["recompute"]), found.shape)
            plan = find_plan(profile, plan, Limits(predict(profile, all_again).peak_bytes)).plan
        peak = predict(profile, plan).peak_bytes
    return plan, {"predicted": peak, "predicted_outside": profile.outside_base_bytes}


def measured(row: Row, request: Any, plan: Any) -> list[dict[str, int]]:
    """Return what the allocator had at most in each step: in forward and backward, and in all of it."""
    import torch

    from hf_actswap import apply
    from hf_actswap.cli.subject import model_on_meta

    model: Any = model_on_meta(request).to_empty(device="cuda").train()
    model.tie_weights()
    if row.method == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if row.lora:
            model.enable_input_require_grads()
    elif row.method != "plain":
        apply(model, plan)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    fused = row.optimizer == "adamw"
    optimizer = torch.optim.AdamW(trained, fused=fused or None, foreach=None if fused else True)
    ids = torch.zeros(1, row.tokens, dtype=torch.long, device="cuda")
    found = []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16, enabled=bool(row.lora)):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.cuda.synchronize()
        passes = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        outside = torch.cuda.max_memory_allocated()
        optimizer.zero_grad(set_to_none=True)
        del loss
        facts = torch.cuda.memory_stats()
        sizes = {"passes": passes, "outside": outside, "reserved": torch.cuda.memory_reserved()}
        found.append({**sizes, "retries": facts["num_alloc_retries"]})
    return found


def step(row: Row) -> dict[str, Any]:
    """Predict and run a row, in this process, which a rehearsal has prepared."""
    with tempfile.TemporaryDirectory() as folder:
        request = _request(row, folder)
        plan, found = predicted(row, request)
        return {**found, "steps": measured(row, request, plan)}


def predicted_bytes(row: Row) -> int:
    """Return the predicted peak of a row."""
    with tempfile.TemporaryDirectory() as folder:
        return predicted(row, _request(row, folder))[1]["predicted"]


def line(found: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    if "error" in found:
        return f"| {found['name']} | {found['error']} | | | | | |"
    last = found["steps"][-1]
    allocated, reserved = max(last["passes"], last["outside"]), last["reserved"]
    off, more = 100 * (allocated / found["predicted"] - 1), 100 * (reserved / allocated - 1)
    sizes = [found["predicted"], allocated, reserved]
    texts = " | ".join(f"{size / GIB:.2f}" for size in sizes)
    return f"| {found['name']} | {texts} | {off:+.2f} % | {more:.1f} % | {last['retries']} |"


def main() -> None:
    """Rehearse the rows, print them, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="parts of rows' names, all of which are in it")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, help="memory of the device: so many times the predicted peak")
    given = parser.parse_args()
    if given.step:
        print(json.dumps(step(Row(**json.loads(given.step)))))
        return
    found = []
    print("| training | predicted, GiB | allocated | reserved | off | reserved above | retries |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows():
        if all(part in row.name.split() for part in given.only or ()):
            memory = MEMORY if given.share is None else int(given.share * predicted_bytes(row)) + CONTEXT
            found.append(rehearse(row, memory))
            print(line(found[-1]), flush=True)
            if given.out:
                given.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
