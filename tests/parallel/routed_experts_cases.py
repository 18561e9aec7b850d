"""What processes run of models with routed experts: what a layer saves, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients
from hf_actswap.parallel.patch_model import patch_model
from tests.parallel.patch_ways_worker import _saved, ids_of
from tests.parallel.patch_worker import Case, compare, config, full_gradients
from tests.parallel.patched_models import tiny_model
from tests.processes import run_cases

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
KINDS = ("mixtral", "qwen3_moe")
MANY_EXPERTS = {"num_local_experts": 16}
"""More than some batches have rows: there are experts without any."""

Group = dist.ProcessGroup


def run_audit(kind: str, implementation: str, frozen: str, group: Group) -> dict[str, Any]:
    """Shapes, and bytes by dtype, that the second layer saves; parameters named ``frozen`` do not train."""
    whole_attention = {"num_key_value_heads": 4, "sliding_window": None}
    model = tiny_model(kind, **whole_attention, experts_implementation=implementation)
    freeze(frozen, model)
    patch_model(model, config(group, True), group)
    saved = _saved(model, model.model.layers[1], ids_of())
    return {
        "shapes": sorted(tuple(t.shape) for t in saved),
        "bytes": sum(t.untyped_storage().nbytes() for t in saved),
    }


def freeze(name: str, model: Any) -> Any:
    """Switch the gradients of the parameters off in whose names ``name`` is, unless it is empty."""
    for found, parameter in model.named_parameters():
        if name and name in found:
            parameter.requires_grad_(False)
    return model


def run_router_logits(length: int, group: Group) -> dict[str, tuple[torch.Tensor, ...]]:
    """What comes out as router logits of a forward with gradients, and of one process."""
    ids = ids_of(length)
    alone, model = tiny_model("mixtral"), tiny_model("mixtral")
    patch_model(model, config(group, True), group)
    return {
        "found": tuple(logits.detach() for logits in model(input_ids=ids).router_logits),
        "expected": tuple(logits.detach() for logits in alone(input_ids=ids).router_logits),
    }


def run_autocast(implementation: str, group: Group) -> dict[str, float]:
    """Relative errors of gradients under autocast against one process under autocast."""
    found: list[dict[str, torch.Tensor]] = []
    for divided in (False, True):
        model = tiny_model("mixtral", experts_implementation=implementation)
        patched = patch_model(model, config(group, True), group) if divided else None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids_of(), labels=ids_of()).loss
        loss.backward()
        if patched is not None:
            allreduce_sequence_parallel_gradients(model, group)
            found.append(full_gradients(patched))
        else:
            found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    expected, own = found
    return {name: ((own[name] - grad).norm() / grad.norm()).item() for name, grad in expected.items()}


def cases() -> dict[str, Callable[[Group], object]]:
    """Return what is run, by name."""
    every: dict[str, Callable[[Group], object]] = {
        **{f"audit_{k}_{i}": partial(run_audit, k, i, "") for k in KINDS for i in IMPLEMENTATIONS},
        **{f"autocast_{i}": partial(run_autocast, i) for i in IMPLEMENTATIONS},
        **{f"logits_{length}": partial(run_router_logits, length) for length in (16, 17)},
        "audit_frozen": partial(run_audit, "mixtral", "grouped_mm", ".experts."),
        "not_reduced": partial(compare, Case("mixtral", reduced=False)),
        "few_rows": partial(compare, Case("mixtral", length=4, masked=False, settings=MANY_EXPERTS)),
    }
    for kind in KINDS:
        for name in ("experts.", "gate.weight", "gate_up_proj", "down_proj"):
            case = Case(kind, length=17, accumulation=2)
            every[f"frozen_{kind}_{name}"] = partial(compare, case, wrap=partial(freeze, name))
    return every


def run_on_two(rank: int, folder: str) -> None:
    """Run each case on two ranks."""
    _run(rank, folder, 2)


def run_on_four(rank: int, folder: str) -> None:
    """Run each case on four ranks."""
    _run(rank, folder, 4)


def _run(rank: int, folder: str, world_size: int) -> None:
    every = cases()
    run_cases(rank, folder, world_size, every, {name: [list(range(world_size))] for name in every})
