"""What each process of the tensor-parallel tests of streamed sequences runs."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from hf_actswap import apply
from hf_actswap.errors import PlanError
from hf_actswap.parallel import (
    UnsummedGradientError,
    allreduce_sequence_parallel_gradients,
    patch_model,
    tensor_parallel_group,
)
from hf_actswap.planner import BudgetError, CountingMeter
from hf_actswap.stream import two_passes
from hf_actswap.stream.host_sequence import HostSequence
from tests.parallel.patch_ways_worker import counted
from tests.parallel.patch_worker import config
from tests.processes import run_cases
from tests.stream.streamed_models import (
    FAMILIES,
    PACKED,
    STREAMED,
    InFloat64,
    as_exact,
    gradients,
    made,
    step,
)

WORLD_SIZE = 2
QUICK = ("llama", "qwen3, tied")
TILED = {"tile_config": {"loss": {"tokens": 5}}}


def model_of(family: str) -> Any:
    if family != "lora":
        return made(family)
    targets = ["q_proj", "v_proj", "down_proj"]
    lora = LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(made(), lora)


def patched(family: str, group: Any, sequence_parallel: bool = False) -> Any:
    model = model_of(family)
    patch_model(model, config(group, sequence_parallel), group)
    return model


def one_step(model: Any, document: dict[str, Any], group: Any, **given: Any) -> dict[str, Any]:
    """Run a step under a configuration; gradients are summed where ranks hold parts."""
    calls: Counter[str] = Counter()
    predicted: list[int] = []
    parallel = {"parallel_config": {"tensor_parallel_size": WORLD_SIZE}} if group else {}
    noted = mock.patch.object(HostSequence, "make_ready", lambda _, size, longest: predicted.append(size))
    unchecked = mock.patch.object(two_passes, "check_few_tokens")  # it communicates too: see `run_adaptive`
    with tensor_parallel_group(group), noted, unchecked, apply(model, {**document, **parallel}) as applied:
        with counted(calls):
            loss, _ = step(model, **given)
        stats = applied.stats()
    if group:
        allreduce_sequence_parallel_gradients(model, group)
    copied = stats.offloaded_bytes, stats.prefetched_bytes
    return {
        "loss": loss,
        "gradients": gradients(model),
        "calls": calls,
        "host": (stats.host_peak_bytes, *copied),
        "predicted": predicted,
    }


def run_family(family: str, group: dist.ProcessGroup | None, **given: Any) -> dict[str, Any]:
    """A divided step whole and streamed, and the undivided streamed one."""
    whole, streamed = (
        one_step(patched(family, group), document, group, **given) for document in ({}, STREAMED)
    )
    with InFloat64():
        truth = one_step(patched(family, group).double(), {}, group, **given)
    alone = one_step(model_of(family), STREAMED, None, **given)
    return {
        "losses": (whole["loss"], streamed["loss"], alone["loss"]),
        "as exact": as_exact(*(item["gradients"] for item in (streamed, whole, truth))),
        "calls": (streamed["calls"], one_step(patched(family, group), {**STREAMED, **TILED}, group)["calls"]),
        "host": (streamed["host"], alone["host"]),
        "predicted": streamed["predicted"],
    }


def run_rejections(group: dist.ProcessGroup | None) -> dict[str, str]:
    """What is said of a sequence that ranks divide, and of a step on parts of gradients."""
    found = {}
    model = patched("llama", group, sequence_parallel=True)
    parallel = {"tensor_parallel_size": WORLD_SIZE, "sequence_parallel_enabled": True}
    with tensor_parallel_group(group):
        try:
            apply(model, {**STREAMED, "parallel_config": parallel})
        except PlanError as error:
            found["sequence"] = str(error)
    model = patched("qwen3, tied", group)  # norms of heads have parts of their gradients
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with apply(model, STREAMED):  # it runs the model on fake tensors, which the guard must not watch
        step(model)
        optimizer.step()
        try:
            step(model)
        except UnsummedGradientError as error:
            found["unsummed"] = str(error)
    return found


def run_adaptive(group: dist.ProcessGroup) -> dict[str, Any]:
    """Layers that are recomputed, and collectives: rank 1 has room for no layer, and both for all."""

    def chosen(other_bytes: int, budget_bytes: int) -> tuple[int, Counter[str]]:
        model, meter = patched("llama", group), CountingMeter()
        other, calls = torch.empty(other_bytes, dtype=torch.uint8), Counter[str]()
        meter.own([*model.parameters(), other])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memory = {"mode": "adaptive", "budget_gib": budget_bytes / 2**30}
        config = {**STREAMED, "memory": memory, "parallel_config": {"tensor_parallel_size": WORLD_SIZE}}
        with tensor_parallel_group(group), apply(model, config, optimizer=optimizer, meter=meter) as applied:
            with counted(calls):
                step(model)
            return len(applied.plan.rows), calls

    try:
        chosen(0, 1000)
    except BudgetError as error:
        least_bytes = error.least_bytes
    return {
        "rank 1 has room for none": chosen(2**28 * dist.get_rank(), 2**28 + least_bytes + 1024),
        "room for all": chosen(0, 2**28),
    }


def run_quick(rank: int, folder: str) -> None:
    """Run a few families, and what is rejected."""
    cases: dict[str, Any] = {family: partial(run_family, family) for family in QUICK}
    packed = {"position_ids": PACKED.expand(2, -1), "use_cache": False}
    cases["packed documents"] = partial(run_family, "llama", **packed)
    cases["rejections"], cases["adaptive"] = run_rejections, run_adaptive
    run_cases(rank, folder, WORLD_SIZE, cases, {name: [[0, 1]] for name in cases})


def run_others(rank: int, folder: str) -> None:
    """Run the other families, and adapters."""
    others = [*(name for name in FAMILIES if name not in QUICK), "lora"]
    cases = {family: partial(run_family, family) for family in others}
    run_cases(rank, folder, WORLD_SIZE, cases, {name: [[0, 1]] for name in cases})
