"""A layer that is run again as a whole gathers its inputs once more, not twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_actswap.apply import apply
from hf_actswap.parallel.block_hooks import GatherHook, keep_gathered_inputs
from hf_actswap.parallel.collectives import tensor_parallel_group
from hf_actswap.parallel.layers import ColumnParallelLinear, SharedInput
from tests.parallel.test_patch_ways import counted, ids_of, patched_pair
from tests.processes import launched, of_ranks, result, run_cases

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


LIMIT_S = 120

pytestmark = pytest.mark.dist

BLOCKS = 2 * LAYERS
"""Each gathers its input and scatters its output, whose backward is a gather too."""
LOGITS = 1
"""Of the routers of all layers."""
HEAD, ENDS = 1, 2
"""The head gathers its input; in backward the gradient of the first layer's part is gathered too."""

BACKWARD_GATHERS = {
    "nothing": 2 * BLOCKS + ENDS,
    "checkpointed": 2 * BLOCKS + ENDS,
    "recompute": 2 * BLOCKS + ENDS,
    "recompute_two": 2 * BLOCKS + ENDS,
    "recompute_kept": BLOCKS + ENDS,
    "select_comm": 2 * BLOCKS + ENDS,
    "select_comm_off": BLOCKS + ENDS,
    "select_comm_off_alone": BLOCKS + ENDS,
    "select_comm_first": BLOCKS + 2 + ENDS,
    "select_comm_not_written": 2 * BLOCKS + ENDS,
    "granite_recompute": 2 * BLOCKS + ENDS,
}


results = launched(run_on_rank, WORLD_SIZE, LIMIT_S)


@pytest.mark.parametrize("name", BACKWARD_GATHERS)
def test_gathers(name: str, results: Path) -> None:
    for found in of_ranks(results, name):
        assert found.calls["forward all_gather"] == BLOCKS + HEAD
        assert found.calls["backward all_gather"] == BACKWARD_GATHERS[name]


@pytest.mark.parametrize(
    ("name", "again"),
    [("experts_nothing", BLOCKS), ("experts_select_comm_off", 0), ("experts_recompute", BLOCKS + LAYERS)],
)
def test_gathers_of_experts(name: str, again: int, results: Path) -> None:
    """Routing is gathered beside the hidden states; where a layer runs again, anew, and at its loss once."""
    for found in of_ranks(results, name):
        assert found.calls["forward all_gather"] == BLOCKS + LAYERS + LOGITS + HEAD
        assert found.calls["backward all_gather"] == BLOCKS + again + ENDS


@pytest.mark.parametrize("name", [*BACKWARD_GATHERS, "experts_select_comm_off", "experts_recompute"])
def test_gradients_are_bitwise_those_without(name: str, results: Path) -> None:
    bare = {"granite": "granite_nothing", "mixtral": "experts_nothing"}.get(CASES[name].kind, "nothing")
    for found, expected in zip(of_ranks(results, name), of_ranks(results, bare), strict=True):
        assert found.grads.keys() == expected.grads.keys()
        assert [key for key, grad in found.grads.items() if not torch.equal(grad, expected.grads[key])] == []


def test_what_is_taken_off_gathers_as_before(results: Path) -> None:
    for found in of_ranks(results, "recompute"):
        assert found.kept_after == [False] * BLOCKS


def test_shared_inputs_of_ones_own(results: Path) -> None:
    for rank in range(WORLD_SIZE):
        assert result(results, "by_hand", rank) == (False, True, False)
