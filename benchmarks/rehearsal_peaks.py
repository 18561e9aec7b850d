"""Predicted peaks of device memory beside those of PyTorch's CUDA allocator, in rehearsal.

Usage:
    python benchmarks/rehearsal_peaks.py                  # needs PyTorch's CUDA build, no GPU
    python benchmarks/rehearsal_peaks.py --only 7b-8k --out results.json
    python benchmarks/rehearsal_peaks.py --only 7b-8k planned --share 1.03 --repeat 10

Each row is a training of three steps, batch 1, in a process of its own on a rehearsed H200 whose memory
suffices for every row. Loss, backward, optimizer and zero_grad follow each other as in the Trainer, which
frees the model's output before backward. The prediction is that of ``hf-actswap plan``, for the same model,
batch, optimizer and plan.

With ``--share 1.03`` the device has 1.03 times the predicted peak, and what CUDA itself takes: what
PyTorch's allocator holds beyond what is in use it gives back when memory is short, as far as pages are
whole, so reserved memory with memory for everything does not say what a training needs. ``--repeat 10`` runs
a row so often: copies late, early, and at random moments by other seeds. Rows that are planned for a device
run on that device, with its own memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from hf_actswap import apply, load_config, resolve_plan
from hf_actswap.cli.options import Lora, ModelRequest
from hf_actswap.cli.step import StepShape, profile_of
from hf_actswap.cli.subject import model_on_meta, subject
from hf_actswap.config.schema import MemoryConfig
from hf_actswap.plan import MemoryPlan
from hf_actswap.planner import Limits
from hf_actswap.planner.budget import budget_bytes
from hf_actswap.planner.cost.simulate import predict
from hf_actswap.planner.search.find_plan import find_plan
from hf_actswap.rehearsal import Options, RehearsedDevice, build, environment
from hf_actswap.rehearsal.launch import Order
from hf_actswap.stream import ChunkedStep

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
STEPS = 3
DEVICE, MEMORY, HOST_MEMORY = "H200", 400 * GIB, "1TiB"
ALLOCATORS = {"expandable": "expandable_segments:True", "fixed": "expandable_segments:False"}

_SIZES = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size"),
)


def _sizes(*sizes: str | int, **more: int | bool) -> dict[str, Any]:
    return {**dict(zip(_SIZES, sizes, strict=True)), **more, "max_position_embeddings": 32768}


_EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
MODELS: Mapping[str, dict[str, Any]] = {
    "7b": _sizes("llama", 4096, 11008, 32, 32, 32, 32000),
    "8b": _sizes("llama", 4096, 14336, 32, 32, 8, 128256),
    "moe": _sizes("qwen3_moe", 2048, 6144, 8, 32, 4, 151936, head_dim=128, norm_topk_prob=True, **_EXPERTS),
    "gemma": _sizes("gemma3_text", 2560, 10240, 12, 8, 4, 262208, head_dim=256, sliding_window=1024),
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
    "half": "",
    "tiles": "{recompute_config: {recompute: true}, tile_config: {loss: auto}}",
    "stream": "{stream_config: {tokens: auto}, tile_config: {loss: auto}}",
}
"""What saves memory -> the configuration. Checkpointing is transformers' own; ``planned`` is the fastest plan
within its peak, or within what `Row.fits` has; ``half`` within plain training's peak less half of its
activations; ``mix`` is that of README.md."""


@dataclass(frozen=True)
class Row:
    """A training of one of `MODELS` by one of `METHODS`, on a sequence of ``tokens``.

    Args:
        optimizer: as ``hf-actswap plan`` names them: ``adamw`` (fused) or ``adamw_torch`` (foreach).
        lora: rank of adapters, the only trained weights then; 0: all weights are trained.
        allocator: one of `ALLOCATORS`.
        fits: the device for whose memory, less the planner's margin, the plan is made; empty: none.
        host_gib: the most host memory of its plan: a rehearsal takes the machine's own; 0: no limit.
    """

    model: str
    tokens: int
    method: str
    optimizer: Literal["adamw", "adamw_torch"] = "adamw"
    lora: int = 0
    allocator: str = "expandable"
    fits: str = ""
    host_gib: int = 0

    @property
    def device(self) -> str:
        return self.fits or DEVICE

    @property
    def configuration(self) -> str:
        """Its configuration: in a layer of experts the ops of an MLP have other names."""
        text = METHODS[self.method]
        return text.replace(r"mlp\.", r"mlp\.experts\.") if self.model == "moe" else text

    @property
    def name(self) -> str:
        """The row in words, by which ``--only`` finds it."""
        kind = f"lora{self.lora}" if self.lora else "full"
        more = f"{f' {self.fits}' if self.fits else ''}{f' host{self.host_gib}' if self.host_gib else ''}"
        length = f"{self.model}-{self.tokens // 1024}k"
        return f"{length} {kind} {self.optimizer} {self.method} {self.allocator}{more}"


def rows() -> list[Row]:
    """Return all rows of the table."""
    found = [
        Row(model, tokens, method) for tokens in (8192, 32768) for model in ("7b", "8b") for method in METHODS
    ]
    found += [
        Row(model, tokens, method, lora=16)
        for model in ("7b", "8b")
        for tokens in (8192, 32768)
        for method in ("plain", "checkpointing", "planned", "mix")
    ]
    found += [Row(model, 8192, name) for model in ("moe", "gemma") for name in METHODS if name != "stream"]
    found += [Row("7b", 8192, method, "adamw_torch") for method in ("plain", "checkpointing")]
    found += [Row("7b", 8192, method, allocator="fixed") for method in METHODS]
    found += [Row("7b", 8192, "planned", host_gib=4), Row("8b", 8192, "planned", lora=16, host_gib=4)]
    on = ((4096, "RTX 4090"), (8192, "A100-40"), (16384, "H100"))
    found += [Row("8b", tokens, "planned", lora=16, fits=device) for tokens, device in on]
    return found


def rehearse(row: Row, planned: Mapping[str, Any], memory: int | None, count: int) -> dict[str, Any]:
    """Run a row so often with the plan that was made for it, in one process; print a line for each run.

    ``planned`` is by `predicted`; ``memory`` is what the program can take, in bytes (``None``: all there is).
    """
    facts = {key: value for key, value in planned.items() if key != "plan"}
    found: dict[str, Any] = {"name": row.name, **facts, "memory": memory, "runs": []}
    options = Options(row.device, races=False, clock=True, host_memory=HOST_MEMORY)
    if memory is not None:
        options = replace(options, memory=f"{memory + options.context_bytes >> 20}MiB")
    prepared = environment(options, build())
    prepared |= {"PYTORCH_ALLOC_CONF": ALLOCATORS[row.allocator], "OMP_NUM_THREADS": "1"}
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump({"row": vars(row), "plan": planned["plan"], "runs": count}, file)
        file.flush()
        command = [sys.executable, __file__, "--step", file.name]
        with subprocess.Popen(command, env=prepared, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            for text in child.stdout or ():
                if text.startswith("{"):
                    found["runs"].append(json.loads(text))
                    print(line(found, found["runs"][-1]), flush=True)
    return found


def _request(row: Row, folder: str) -> ModelRequest:
    (Path(folder) / "config.json").write_text(json.dumps(MODELS[row.model]), "utf-8")
    adapters = Lora(row.lora, ("all-linear",) if row.fits else ()) if row.lora else None
    return ModelRequest(folder, "bf16", adapters)


def _limits(row: Row, profile: Any, structure: Any) -> Limits:
    """Return the budget of a row that is planned."""
    host = row.host_gib * GIB or None
    if row.fits:
        return Limits(budget_bytes(MemoryConfig(), profile.device_bytes, 0), host)
    method = "recompute" if row.method == "planned" else "plain"
    found = predict(profile, resolve_plan(load_config(METHODS[method] or None), structure))
    return Limits(found.peak_bytes - (found.kept_bytes // 2 if row.method == "half" else 0), host)


def predicted(row: Row, request: ModelRequest) -> dict[str, Any]:
    """Return a row's plan, and the predicted peaks: of forward and backward, and of the optimizer's step."""
    config = load_config(row.configuration or None)
    with subject(request, config) as found:
        step = StepShape(1, row.tokens, row.device, "bf16" if row.lora else None, row.optimizer)
        plan = resolve_plan(config, found.shape)
        if plan.streamed is not None:

            def of_chunk(tokens: int) -> Any:
                return profile_of(found, replace(step, tokens=tokens), plan.tiles)

            chunked = ChunkedStep(found.model, found.shape, plan, row.device, of_chunk)
            peak, outside = chunked.predicted(row.tokens).peak_bytes, chunked.profile.outside_base_bytes
        else:
            profile = profile_of(found, step, plan.tiles)
            if row.method in ("planned", "half"):
                plan = find_plan(profile, plan, _limits(row, profile, found.shape)).plan
            peak, outside = predict(profile, plan).peak_bytes, profile.outside_base_bytes
    return {"predicted": peak, "predicted_outside": outside, "plan": plan.to_json()}


def measured(row: Row, request: ModelRequest, plan: Any) -> list[dict[str, int]]:
    """Return the allocator's peaks in each step: in forward and backward, and in all of it."""
    model: Any = model_on_meta(request).to_empty(device="cuda").train()
    model.tie_weights()
    if row.method == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if row.lora:
            model.enable_input_require_grads()
    applied = apply(model, plan) if row.method not in ("plain", "checkpointing") else nullcontext()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    fused = row.optimizer == "adamw"
    optimizer = torch.optim.AdamW(trained, fused=fused or None, foreach=None if fused else True)
    ids = torch.zeros(1, row.tokens, dtype=torch.long, device="cuda")
    found = []
    with applied:
        for number in range(STEPS):
            if number == STEPS - 1:  # what earlier steps took for measuring is not what a step reserves
                torch.cuda.empty_cache()
            found.append(_step(model, optimizer, ids, bool(row.lora)))
    return found


def _step(model: Any, optimizer: Any, ids: Any, mixed: bool) -> dict[str, int]:
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16, enabled=mixed):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.cuda.synchronize()
    passes, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    outside, reserved = torch.cuda.max_memory_allocated(), max(reserved, torch.cuda.max_memory_reserved())
    optimizer.zero_grad(set_to_none=True)
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    return {"passes": passes, "outside": outside, "reserved": reserved, "retries": retries}


def runs(file: str) -> Iterator[dict[str, Any]]:
    """Run a row in this process, which a rehearsal has prepared: copies late, early, then at random moments.

    ``file`` has the row, its plan, and how often it runs. Between runs all memory is given back.
    """
    given = json.loads(Path(file).read_text("utf-8"))
    row, device = Row(**given["row"]), RehearsedDevice.found()
    plan = MemoryPlan.from_json(given["plan"])
    orders: list[tuple[Order, int]] = [("lazy", 0), ("eager", 0)]
    orders += [("random", seed) for seed in range(given["runs"])]
    for order, seed in orders[: given["runs"]]:
        if device is not None:
            device.choose_order(order, seed)
        said: dict[str, Any] = {"order": order, "seed": seed}
        with tempfile.TemporaryDirectory() as folder:
            try:
                said["steps"] = measured(row, _request(row, folder), plan)
            except RuntimeError as error:  # out of memory is one
                said["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        yield said
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_accumulated_memory_stats()


def line(found: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Return a run's line of the table: its last step. In the first two `auto` keeps what it measures."""
    how = f"{found['name']}, {run['order']} {run['seed']}"
    if "error" in run:
        return f"| {how} | {run['error']} | | | | | |"
    steps, last = run["steps"], run["steps"][-1]
    allocated, reserved = max(last["passes"], last["outside"]), last["reserved"]
    off, more = 100 * (allocated / found["predicted"] - 1), 100 * (reserved / allocated - 1)
    sizes = " | ".join(f"{size / GIB:.2f}" for size in (found["predicted"], allocated, reserved))
    retries = "/".join(str(step["retries"]) for step in steps)
    return f"| {how} | {sizes} | {off:+.2f} % | {more:.1f} % | {retries} |"


def main() -> None:
    """Rehearse the rows, print them, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="parts of rows' names, all of which are in it")
    parser.add_argument("--out", type=Path, help="JSON file to write; rows of other names in it stay")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, help="memory of the device: so many times the predicted peak")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each row")
    given = parser.parse_args()
    if given.step:
        for run in runs(given.step):
            print(json.dumps(run), flush=True)
        return
    kept = json.loads(given.out.read_text("utf-8")) if given.out and given.out.exists() else []
    print("| training | predicted, GiB | allocated | reserved | off | reserved above | retries |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for row in rows():
        if not all(part in row.name.split() for part in given.only or ()):
            continue
        with tempfile.TemporaryDirectory() as folder:
            planned = predicted(row, _request(row, folder))
        memory = None if row.fits else MEMORY
        if given.share is not None:
            memory = int(given.share * planned["predicted"])
        found = rehearse(row, planned, memory, given.repeat) | {"share": given.share}
        same = (found["name"], given.share)
        kept = [*(old for old in kept if (old["name"], old.get("share")) != same), found]
        if given.out:
            given.out.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
