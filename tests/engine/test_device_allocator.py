"""The allocator's settings while a plan is on, and after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hf_actswap import MemoryPlan, apply, load_config, model_structure, resolve_plan
from hf_actswap.engine.device_allocator import (
    SETTING,
    free_bytes,
    let_segments_expand,
    limit_memory,
    segments_expand,
    set_by_user,
)
from hf_actswap.plan import fingerprint_of
from tests.engine.tiny_models import tiny_llama

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ""),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, ""),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:False"}, f"{SETTING}:False"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, f"{SETTING}:True"),
    ],
)
def test_what_the_environment_says_is_found(environment: dict[str, str], expected: str) -> None:
    assert set_by_user(environment) == expected


def test_the_cpu_has_no_such_allocator() -> None:
    assert not segments_expand(CPU)
    assert let_segments_expand(CPU) is None
    assert limit_memory(CPU, MIB) is None
    assert free_bytes(CPU) is None


@pytest.fixture
def fixed_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device, whose allocator's segments are fixed at first, as the environment lets it choose."""
    device = torch.device("cuda", 0)
    was_on = segments_expand(device)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    torch._C._accelerator_setAllocatorSettings(f"garbage_collection_threshold:0.9,{SETTING}:False")
    yield device
    torch._C._accelerator_setAllocatorSettings(f"{SETTING}:{was_on}")


def one_step(model: torch.nn.Module) -> None:
    ids = torch.zeros(1, 64, dtype=torch.long, device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()


def tensors_until_short(device: torch.device) -> int:
    held = []
    try:
        while True:
            held.append(torch.empty(26 * MIB, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError:
        return len(held)


@pytest.mark.gpu
def test_segments_expand_while_a_plan_is_on(fixed_segments: torch.device) -> None:
    model = tiny_llama().to(fixed_segments)
    applied = apply(model, {"recompute_config": {"recompute": True}})
    one_step(model)
    if not segments_expand(fixed_segments):
        pytest.skip("the driver refuses expandable segments")
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    assert settings["garbage_collection_threshold"] == pytest.approx(0.9), "the user's settings stay"
    applied.remove()
    assert not segments_expand(fixed_segments)


@pytest.mark.gpu
def test_segments_expand_for_a_batch_of_which_all_is_kept(fixed_segments: torch.device) -> None:
    """With other segments, trainings that were to keep everything ran out of memory in their first step."""
    model = tiny_llama()
    by_hand = MemoryPlan((), len(model_structure(model).layers), "llama")
    limit_bytes = torch.cuda.memory_reserved() + 256 * MIB
    planned = replace(by_hand, fingerprint=fingerprint_of(model, (1, 8)), device_memory_bytes=limit_bytes)
    before = torch.cuda.get_per_process_memory_fraction()
    for plan, expand in ((by_hand, False), (planned, True)):
        applied = apply(model, plan)
        model.to(fixed_segments)  # it may move after its plan was put on
        one_step(model)
        assert segments_expand(fixed_segments) is expand
        assert (torch.cuda.get_per_process_memory_fraction() < before) is expand
        applied.remove()
        assert not segments_expand(fixed_segments)
        assert torch.cuda.get_per_process_memory_fraction() == before


@pytest.mark.gpu
@pytest.mark.parametrize("expand", [True, False])
def test_no_more_is_held_than_the_limit(fixed_segments: torch.device, expand: bool) -> None:
    if expand and let_segments_expand(fixed_segments) is None:
        pytest.skip("the driver refuses expandable segments")
    for more_bytes in range(100 * MIB, 200 * MIB, 4 * MIB):  # PyTorch may hold a page more than its limit
        torch.cuda.empty_cache()
        limit_bytes = torch.cuda.memory_reserved() + more_bytes
        undo = limit_memory(fixed_segments, limit_bytes)
        assert undo is not None
        assert tensors_until_short(fixed_segments) >= 2
        undo()
        assert torch.cuda.memory_reserved() <= limit_bytes


@pytest.mark.gpu
def test_what_the_user_wrote_stays(
    fixed_segments: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"{SETTING}:False")
    model = tiny_llama().to(fixed_segments)
    with caplog.at_level("INFO", "hf_actswap"), apply(model, {"recompute_config": {"recompute": True}}):
        one_step(model)
        assert not segments_expand(fixed_segments)
    assert "off in the environment" in caplog.text


@pytest.mark.gpu
def test_a_written_budget_limits_the_allocator_while_the_plan_is_on() -> None:
    device = torch.device("cuda", 0)
    model = tiny_llama().to(device)
    before = torch.cuda.get_per_process_memory_fraction(device)
    limit = torch.cuda.memory_reserved(device) + 256 * MIB
    written = resolve_plan(load_config({"recompute_config": {"recompute": True}}), model_structure(model))
    plan = MemoryPlan(written.rows, written.num_layers, written.family, device_memory_bytes=limit)
    assert MemoryPlan.from_json(plan.to_json()) == plan
    with apply(model, plan):
        one_step(model)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(limit, dtype=torch.uint8, device=device)
    assert torch.cuda.get_per_process_memory_fraction(device) == before
