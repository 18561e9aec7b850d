"""What each process runs of a patched Llama with Liger's kernels, which Triton interprets."""

from __future__ import annotations

import torch.distributed as dist

from hf_actswap.apply import apply
from hf_actswap.parallel.collectives import tensor_parallel_group
from hf_actswap.parallel.patch_model import patch_model
from tests.parallel.patch_worker import Case, Result, batches, compare, config, full_gradients, step
from tests.parallel.patched_models import tiny_model
from tests.processes import run_cases
from tests.triton_interpreter import teach_the_interpreter

WORLD_SIZE = 2
CASE = Case("llama", length=6)
PLAN = {
    "swap_config": {
        "swap": True,
        "op_swap": [{"op_name": "attention", "backward_prefetch": 5, "layers": True}],
    },
    "recompute_config": {"select_recompute": {"feed_forward": True}},
    "memory": {"min_tensor_mib": 1e-6},
}

Group = dist.ProcessGroup


def run_kernels(sequence_parallel: bool, group: Group) -> Result:
    """A step beside the one of a process, with the same kernels."""
    return compare(Case("llama", length=6, sequence_parallel=sequence_parallel), group)


def run_plan(group: Group) -> tuple[list[str], int]:
    """Gradients that a plan changes, and how much it moved and ran again."""
    model = tiny_model("llama")
    patched = patch_model(model, config(group, True), group)
    step(model, CASE)
    expected = {name: grad.clone() for name, grad in full_gradients(patched).items()}
    model.zero_grad()
    with tensor_parallel_group(group), apply(model, PLAN) as applied:
        step(model, CASE)
        stats = applied.stats()
    found = full_gradients(patched)
    different = [name for name in expected if not found[name].equal(expected[name])]
    return different, min(stats.offloads, stats.recomputes)


def run_fused_loss(group: Group) -> str:
    """What is said where Liger's forward takes the head's weight itself."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = tiny_model("llama")
    patch_model(model, config(group, True), group)
    apply_liger_kernel_to_llama(
        model=model,
        rope=False,
        rms_norm=False,
        swiglu=False,
        cross_entropy=False,
        fused_linear_cross_entropy=True,
    )
    try:
        model(**batches(CASE)[0])
    except RuntimeError as error:
        return str(error)
    return ""


def run_on_rank(rank: int, folder: str) -> None:
    """Run all cases."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    teach_the_interpreter()
    apply_liger_kernel_to_llama(
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )
    cases = {
        "divided": lambda group: run_kernels(True, group),
        "replicated": lambda group: run_kernels(False, group),
        "plan": run_plan,
        "fused_loss": run_fused_loss,
    }
    run_cases(rank, folder, WORLD_SIZE, cases, {name: [list(range(WORLD_SIZE))] for name in cases})
