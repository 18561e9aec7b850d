"""A divided model, streamed: the gradients of the divided step, half the host memory, counted collectives."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
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
from tests.parallel.patch_worker import config
from tests.parallel.test_patch_ways import counted
from tests.processes import launch, result, run_cases
from tests.stream.streamed_models import (
    FAMILIES,
    PACKED,
    SIZES,
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
        "calls": streamed["calls"],
        "host": (streamed["host"], alone["host"]),
        "predicted": streamed["predicted"],
    }


def run_tiled(group: dist.ProcessGroup | None) -> Counter[str]:
    """Collectives of a streamed step whose loss is in tiles."""
    found: Counter[str] = one_step(patched("llama", group), {**STREAMED, **TILED}, group)["calls"]
    return found


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
    cases |= {"tiled": run_tiled, "rejections": run_rejections, "adaptive": run_adaptive}
    run_cases(rank, folder, WORLD_SIZE, cases, {name: [[0, 1]] for name in cases})


def run_others(rank: int, folder: str) -> None:
    """Run the other families, and adapters."""
    others = [*(name for name in FAMILIES if name not in QUICK), "lora"]
    cases = {family: partial(run_family, family) for family in others}
    run_cases(rank, folder, WORLD_SIZE, cases, {name: [[0, 1]] for name in cases})


CHUNKS, LAYERS = 4, SIZES["num_hidden_layers"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(run_quick, tmp_path_factory.mktemp("quick"), WORLD_SIZE, 250)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(run_others, tmp_path_factory.mktemp("others"), WORLD_SIZE, 250)


def results(folder: Path, name: str) -> list[Any]:
    """What each rank saw."""
    return [result(folder, name, rank) for rank in range(WORLD_SIZE)]


def check(found: dict[str, Any]) -> None:
    whole, streamed, alone = found["losses"]
    torch.testing.assert_close(streamed, whole, rtol=3e-7, atol=0)
    torch.testing.assert_close(streamed, alone, rtol=1e-6, atol=0)
    assert found["as exact"]
    own, of_all = found["host"]
    assert [2 * size for size in own] == list(of_all), "half of the heads"
    assert found["predicted"] == [own[0]]


@pytest.mark.dist
@pytest.mark.parametrize("family", [*QUICK, "packed documents"])
def test_gradients_and_half_of_the_host_memory(family: str, quick: Path) -> None:
    for found in results(quick, family):
        check(found)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("family", [*(name for name in FAMILIES if name not in QUICK), "lora"])
def test_other_families(family: str, others: Path) -> None:
    for found in results(others, family):
        check(found)


@pytest.mark.dist
def test_collectives_by_chunk_and_layer(quick: Path) -> None:
    """Of a layer: two in each forward and in backward, one in recomputation, whose last result nobody reads.

    Beside the layers: the embedding twice, the loss two and two, and the head's input in backward. The first
    pass gathers a chunk's logits, as calls without gradients do; the loss in tiles gathers those of the last
    chunk alone, which is shorter than a tile.
    """
    for found, tiled in zip(results(quick, "llama"), results(quick, "tiled"), strict=True):
        assert found["calls"] == {
            "forward all_reduce": CHUNKS * (LAYERS * (2 + 2 + 2 + 1) + 2 + 4 + 1),
            "forward all_gather": CHUNKS,
        }
        assert tiled["forward all_gather"] == 1


@pytest.mark.dist
def test_ranks_keep_the_layers_that_fit_on_each_of_them(quick: Path) -> None:
    """A layer that is kept takes no all-reduce in recomputation."""
    for found in results(quick, "adaptive"):
        (none, all_reduces), (every, fewer) = found["rank 1 has room for none"], found["room for all"]
        assert (none, every) == (LAYERS, 0)
        assert all_reduces["forward all_reduce"] - fewer["forward all_reduce"] == CHUNKS * LAYERS


@pytest.mark.dist
def test_divided_sequences_and_steps_on_parts_are_rejected(quick: Path) -> None:
    for found in results(quick, "rejections"):
        assert "sequence_parallel_enabled: false" in found["sequence"]
        assert "were changed by a step on this rank's part" in found["unsummed"]
