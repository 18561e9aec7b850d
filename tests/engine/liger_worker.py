"""Steps of a Llama with Liger's kernels, with and without plans; run as a process of its own.

``python -m tests.engine.liger_worker DEVICE RESULTS`` writes JSON: case -> what differed (empty: nothing).
A process of its own because Liger patches the classes of transformers, and because Triton decides when it is
imported whether it interprets its kernels (``TRITON_INTERPRET=1``), which is how they run on a CPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from transformers.models.llama import modeling_llama

from benchmarks.exactness import deterministic
from hf_actswap import MemoryPlan, apply
from tests.engine.tiny_models import PLANS, VOCABULARY, gradients, on, tiny_llama
from tests.triton_interpreter import teach_the_interpreter

KERNELS: dict[str, dict[str, bool]] = {
    "fused loss": {"cross_entropy": False, "fused_linear_cross_entropy": True},
    "loss": {"cross_entropy": True, "fused_linear_cross_entropy": False},
}


def plans_with(kernels: str) -> dict[str, MemoryPlan]:
    """All plans with the fused loss; with the other only the one that swaps the logits, too."""
    return PLANS if kernels == "fused loss" else {"everything swapped": PLANS["everything swapped"]}


def compare(device: torch.device) -> dict[str, list[str]]:
    """Return for each kernels and plan the names of what differs from the same kernels without a plan."""
    from liger_kernel.transformers import (
        apply_liger_kernel_to_llama,
    )  # after Triton knows whether it interprets

    differences: dict[str, list[str]] = {}
    plain = _gradients(tiny_llama(use_cache=False).to(device))
    with apply(tiled := tiny_llama(use_cache=False).to(device), {"tile_config": {"loss": {"tokens": 2}}}):
        in_tiles = _gradients(tiled)
    untouched = {**vars(modeling_llama)}
    forward = modeling_llama.LlamaForCausalLM.forward
    for kernels, choice in KERNELS.items():
        vars(modeling_llama).update(untouched)
        modeling_llama.LlamaForCausalLM.forward = forward
        apply_liger_kernel_to_llama(rope=True, rms_norm=True, swiglu=True, **choice)
        bare = _gradients(tiny_llama(use_cache=False).to(device))
        for other, expected in (("none", plain), ("the loss in tiles", in_tiles)):
            differences[f"{kernels}, close to {other}"] = [
                name for name in plain if not torch.allclose(expected[name], bare[name], rtol=1e-3, atol=1e-5)
            ]
        for name, plan in plans_with(kernels).items():
            differences[f"{kernels}, {name}"] = _differences(device, plan, bare)
    return differences


def _differences(device: torch.device, plan: MemoryPlan, bare: dict[str, torch.Tensor]) -> list[str]:
    model = tiny_llama(use_cache=False).to(device)
    kind = type(model.model.layers[0].mlp).__name__
    applied = on(model, plan)
    found = _gradients(model)
    different = [name for name in bare if not torch.equal(found[name], bare[name])]
    if applied is not None:
        stats = applied.stats()
        if stats.live_swaps or stats.host_bytes:
            different.append(f"left over: {stats}")
        if "swap" in str(plan) and not stats.offloads:
            different.append("nothing was swapped")
    if "Liger" not in kind:
        different.append(f"the MLP is a {kind}")
    return different


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    device = next(model.parameters()).device
    ids = torch.randint(0, VOCABULARY, (1, 3), generator=torch.Generator().manual_seed(0)).to(device)
    model(input_ids=ids, labels=ids).loss.backward()
    return gradients(model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("TRITON_INTERPRET") == "1":
        teach_the_interpreter()
    with deterministic():
        Path(sys.argv[2]).write_text(json.dumps(compare(torch.device(sys.argv[1]))))
