"""A plan on a model in FSDP1 is an error by name, and the model is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_actswap import PlanError, apply
from tests.engine.tiny_models import tiny_llama


@pytest.fixture
def in_fsdp1() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    model: Any = tiny_llama()
    cpu = torch.device("cpu")
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = FullyShardedDataParallel(layer, device_id=cpu, use_orig_params=True)
    yield model
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "config",
    [
        {"swap_config": {"swap": True, "default_prefetch": 4}},
        {"recompute_config": {"recompute": True}},
        {"tile_config": {"loss": "auto"}},
        {"memory": {"mode": "adaptive"}},
    ],
    ids=["swap", "recompute", "tiles", "adaptive"],
)
def test_it_is_named_before_anything_runs(config: dict[str, Any], in_fsdp1: Any) -> None:
    optimizer = torch.optim.AdamW(in_fsdp1.parameters())
    ids = torch.arange(16)[None]
    named = pytest.raises(PlanError, match=r"FullyShardedDataParallel \(FSDP1\)\. Write `fsdp_version: 2`")
    with named, apply(in_fsdp1, config, optimizer=optimizer):
        in_fsdp1(input_ids=ids, labels=ids)
    in_fsdp1(input_ids=ids, labels=ids).loss.backward()
    assert in_fsdp1.lm_head.weight.grad is not None
