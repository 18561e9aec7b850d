"""What two processes run: how often a patched model gathers under each way of recomputing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_actswap.apply import apply
from hf_actswap.parallel.block_hooks import GatherHook, keep_gathered_inputs
from hf_actswap.parallel.collectives import tensor_parallel_group
from hf_actswap.parallel.layers import ColumnParallelLinear, SharedInput
from tests.parallel.patch_ways_worker import counted, ids_of, patched_pair
from tests.processes import run_cases

WORLD_SIZE, LAYERS = 2, 4
Group = dist.ProcessGroup


@dataclass(frozen=True)
class Case:
    """One step of a patched model.

    Args:
        recompute: ``recompute_config``; ``None``: no plan.
        checkpointing: Hugging Face's.
        kind: of the model; ``granite`` gathers at the blocks.
    """

    recompute: dict[str, Any] | None = None
    checkpointing: bool = False
    kind: str = "llama"


CASES: dict[str, Case] = {
    "nothing": Case(),
    "checkpointed": Case(checkpointing=True),
    "recompute": Case({"recompute": True}),
    "recompute_two": Case({"recompute": [2]}),
    "recompute_kept": Case({"recompute": True, "mp_comm_recompute": False}),
    "select_comm": Case({"select_comm_recompute": True}),
    "select_comm_off": Case({"select_comm_recompute": False, "select_recompute": {"mlp.mul": True}}),
    "select_comm_off_alone": Case({"select_comm_recompute": False}),
    "select_comm_first": Case({"select_comm_recompute": [1]}),
    "select_comm_not_written": Case({"select_recompute": {"mlp.mul": True}}),
    "experts_nothing": Case(kind="mixtral"),
    "experts_select_comm_off": Case({"select_comm_recompute": False}, kind="mixtral"),
    "experts_recompute": Case({"recompute": True}, kind="mixtral"),
    "granite_nothing": Case(kind="granite"),
    "granite_recompute": Case({"recompute": True}, kind="granite"),
}


@dataclass
class Result:
    """What one rank saw: collectives by part of the step and kind, gradients, and settings that stayed."""

    calls: Counter[str] = field(default_factory=Counter)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    kept_after: list[bool] = field(default_factory=list)


def run_case(case: Case, group: Group) -> Result:
    """Run a step and take the plan off."""
    _, model, _ = patched_pair(case.kind, group, num_hidden_layers=LAYERS)
    result, applied, ids = Result(), None, ids_of()
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.recompute is not None:
        parallel = {"tensor_parallel_size": WORLD_SIZE, "sequence_parallel_enabled": True}
        with tensor_parallel_group(group):
            applied = apply(model, {"parallel_config": parallel, "recompute_config": case.recompute})
    with counted(result.calls) as begin:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        begin("backward")
        loss.backward()
    if applied is not None:
        applied.remove()
    result.grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    result.kept_after = [hook.keep_gathered for hook in hooks if isinstance(hook, GatherHook)]
    return result


class _Block(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        settings = {"gather_output": False, "tensor_model_parallel_group": group}
        self.up = ColumnParallelLinear(8, 16, sequence_parallel_enabled=True, **settings)
        self.shared = SharedInput([self.up])


def run_by_hand(group: Group) -> tuple[bool, bool, bool]:
    """A `SharedInput` before, while its layer is to be run again, and after."""
    block = _Block(group)
    before = block.shared.keep_gathered
    restore = keep_gathered_inputs(nn.Sequential(block))
    during = block.shared.keep_gathered
    restore()
    return before, during, block.shared.keep_gathered


def run_on_rank(rank: int, folder: str) -> None:
    """Run each case on both ranks."""
    cases: dict[str, Callable[[Group], object]] = {n: partial(run_case, case) for n, case in CASES.items()}
    cases["by_hand"] = run_by_hand
    run_cases(rank, folder, WORLD_SIZE, cases, {name: [[0, 1]] for name in cases})
