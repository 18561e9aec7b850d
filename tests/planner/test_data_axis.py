"""What data-parallel ranks send, on paper: the bytes are those that are counted, in FSDP2's own order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_actswap.cli.options import ModelRequest, Sharding
from hf_actswap.cli.step import StepShape, exchanged_by, profile_of
from hf_actswap.cli.subject import AnalysedModel, subject
from hf_actswap.config import ActSwapConfig
from hf_actswap.plan import model_structure
from hf_actswap.planner import Profile, device_rates, profile_from_shapes
from hf_actswap.planner.cost.data_axis import Unit, data_axis
from hf_actswap.planner.devices import Fabric
from hf_actswap.planner.record.fsdp_step import of_one_rank
from tests.engine.tiny_models import tiny_llama

RANKS = 4
FABRIC = Fabric("a test", bytes_per_ms=1000.0, latency_ms=0.0)
STEP = StepShape(1, 512, "A100-80", None, "adamw")


class Counting(TorchDispatchMode):
    """Notes the collectives of a step, in order: the phase, the kind, and the bytes of the larger side."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.seen = "forward", []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            kind = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}[
                func._schema.name.partition("::")[2]
            ]
            sizes = [one.nbytes for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
            self.seen.append((self.phase, kind, max(sizes)))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[AnalysedModel]:
    tiny_llama().config.save_pretrained(tmp_path)
    with subject(ModelRequest(str(tmp_path), "bf16"), ActSwapConfig()) as found:
        yield found


def counted(stays: bool, kept: torch.dtype | None) -> list[tuple[str, str, int]]:
    model: Any = tiny_llama().to(torch.bfloat16)
    setting: Any = {
        "mesh": init_device_mesh("cpu", (RANKS,)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=kept),
    }
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=not stays, **setting)
    fully_shard(model, **setting)  # what it gathers stays
    ids = torch.arange(16)[None]
    with Counting() as counting:
        loss = model(input_ids=ids, labels=ids).loss
        counting.phase = "backward"
        loss.backward()
    return counting.seen


def units(found: AnalysedModel, kept_bytes: int) -> tuple[dict[Any, Unit], Unit]:
    whole = sum(weight.numel() for weight in found.model.parameters())
    layers = [found.model.get_submodule(layer.module_path) for layer in found.shape.layers]
    values = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
    sizes = {at: Unit(2 * size, 2 * size, kept_bytes * size) for at, size in enumerate(values)}
    outside = whole - sum(values)
    return sizes, Unit(2 * outside, 2 * outside, kept_bytes * outside)


@pytest.mark.parametrize("stays", [False, True], ids=["fsdp", "shard_grad_op"])
def test_what_fsdp2_sends(ranks: None, llama: AnalysedModel, stays: bool) -> None:
    layers, outside = units(llama, kept_bytes=4)
    found = data_axis(profile_of(llama, STEP), layers, outside, 3, stays, RANKS, FABRIC)
    told = [
        (item.phase.removeprefix("after "), item.kind.replace("re-gather", "all_gather"), item.whole_bytes)
        for item in found
    ]
    assert told == counted(stays, torch.float32)
    step = "shard_grad_op" if stays else "fsdp"
    shape = StepShape(1, 512, "A100-80", None, "adamw", "fp32", Sharding(step, RANKS))
    sent = exchanged_by(llama, shape, profile_of(llama, shape))
    assert sent is not None
    assert sent.sent_bytes == sum(size for *_, size in told) * (RANKS - 1) // RANKS
    assert sent.collectives == len(told)


def per_scope(profile: Profile, field: str) -> dict[Any, float]:
    sums: dict[Any, float] = {}
    for op_event in profile.op_events:
        sums[op_event.call[0]] = sums.get(op_event.call[0], 0.0) + getattr(op_event, field)
    return sums


def test_what_hides_is_the_layer_that_computes_meanwhile(llama: AnalysedModel) -> None:
    """Layers 1 to 3 are gathered beside the layer before; in backward, beside the layer behind.

    A layer's gradients share that time with the gathering of the layer before.
    """
    profile = profile_of(llama, STEP)
    forward, backward = per_scope(profile, "forward_ms"), per_scope(profile, "backward_ms")
    layers, outside = units(llama, kept_bytes=2)
    fast = Fabric("a test", bytes_per_ms=1e9, latency_ms=0.0)
    found = list(data_axis(profile, layers, outside, 3, False, RANKS, fast))
    assert [item.beside_ms for item in found[:5]] == [0.0, 0.0, *(forward[at] for at in (0, 1, 2))]
    sums = [item for item in found if item.kind == "reduce_scatter"]
    assert [item.beside_ms for item in sums] == [*(backward[at] for at in (2, 1, 0)), 0.0, 0.0]
    gathers = [item.beside_ms for item in found if item.kind == "re-gather"]
    spent = sums[0].ms(RANKS, fast)
    assert gathers[:2] == [backward["head"], backward[3]]
    assert gathers[2:] == pytest.approx([backward[2] - spent, backward[1] - spent])
    assert [item.phase for item in sums] == [*["backward"] * 3, *["after backward"] * 2]


def test_ddp_sums_and_zero_gathers_what_was_stepped(llama: AnalysedModel) -> None:
    profile = profile_of(llama, STEP)
    layers, outside = units(llama, kept_bytes=2)
    layers = {at: unit._replace(trained_bytes=10) for at, unit in layers.items()}
    outside = outside._replace(trained_bytes=0, gradient_bytes=0)

    def kinds(stage: int) -> list[tuple[str, int]]:
        found = data_axis(profile, layers, outside, stage, False, RANKS, FABRIC)
        return [(item.kind, item.whole_bytes) for item in found]

    size = layers[0].gradient_bytes
    assert kinds(0) == [("all_reduce", size)] * 4
    assert kinds(1) == kinds(2) == [("reduce_scatter", size)] * 4 + [("all_gather", 10)] * 4


def test_what_no_compute_hides_is_in_the_step_and_a_shared_link_is_slower(llama: AnalysedModel) -> None:
    for device, shared in (("A100-80", False), ("L40S", True)):
        alone = profile_of(llama, StepShape(1, 512, device, None, "adamw", None, Sharding("fsdp", 1)))
        shape = StepShape(1, 512, device, None, "adamw", None, Sharding("fsdp", 2))
        profile = profile_of(llama, shape)
        told = exchanged_by(llama, shape, profile)
        assert told is not None
        assert told.added_ms > 0
        assert profile.outside_ms == pytest.approx(alone.outside_ms / 2 + told.added_ms)
        assert profile.link is not None
        assert alone.link is not None
        kept = profile.link.out_bytes_per_ms / alone.link.out_bytes_per_ms
        forward_ms = sum(per_scope(profile, "forward_ms").values())
        assert kept == pytest.approx(1 - told.forward_ms / forward_ms if shared else 1)
        fabric = device_rates(device).fabric
        assert fabric is not None
        assert fabric.to_host_too == shared


@pytest.mark.parametrize("stays", [False, True], ids=["fsdp", "shard_grad_op"])
def test_a_sharded_model_is_computed_as_plan_computes_it(
    ranks: None, llama: AnalysedModel, stays: bool
) -> None:
    """fp32 shards gathered in bf16, as Accelerate sets them up: ``auto`` begins with what ``plan`` says."""
    model: Any = tiny_llama().float()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(
            layer,
            mesh=init_device_mesh("cpu", (RANKS,)),
            reshard_after_forward=not stays,
            mp_policy=policy,
        )
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
    name = "shard_grad_op" if stays else "fsdp"
    shape = StepShape(1, 512, "A100-80", "bf16", "adamw", None, Sharding(name, RANKS))
    expected = profile_of(llama, shape)
    batch: dict[str, Any] = {
        key: torch.empty(1, 512, dtype=torch.long, device="meta") for key in ("input_ids", "labels")
    }
    batch["use_cache"] = False
    structure = model_structure(model)
    states = 8 * sum(weight.numel() for weight in model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        whole = profile_from_shapes(
            model, structure, batch, "A100-80", optimizer_state_bytes=states, with_workspaces=True
        )
    found = of_one_rank(whole, model, structure, device_rates("A100-80").fabric)
    assert found is not None
    assert found.optimizer_state_bytes == expected.optimizer_state_bytes == states // RANKS
    assert found.outside_ms == pytest.approx(expected.outside_ms)
    buffers = sum(buffer.nbytes for buffer in model.buffers()) // RANKS  # which `plan` shards too
    assert found.weight_bytes == expected.weight_bytes - buffers
    assert [event.call for event in found.op_events] == [event.call for event in expected.op_events]
    for one, other in zip(found.op_events, expected.op_events, strict=True):
        assert one.forward_base_bytes == other.forward_base_bytes - buffers
    assert found.gradient_bytes == expected.gradient_bytes
    assert found.saved == expected.saved


def test_replicas_of_shards_hold_what_their_group_divides(ranks: None) -> None:
    """HSDP: two groups of two ranks."""
    model: Any = tiny_llama()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch: dict[str, Any] = {"input_ids": torch.empty(1, 64, dtype=torch.long, device="meta")}
    batch |= {"labels": batch["input_ids"].clone(), "use_cache": False}
    states = 8 * sum(weight.numel() for weight in model.parameters())
    structure = model_structure(model)
    whole = profile_from_shapes(model, structure, batch, "A100-80", optimizer_state_bytes=states)
    found = of_one_rank(whole, model, structure, FABRIC)
    assert found is not None
    assert found.optimizer_state_bytes == states // 2


def test_other_divisions_are_not_known(ranks: None, llama: AnalysedModel) -> None:
    model: Any = tiny_llama()
    profile, fabric = profile_of(llama, STEP), FABRIC
    assert of_one_rank(profile, model, model_structure(model), fabric) is None  # nothing is sharded
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    assert of_one_rank(profile, model, model_structure(model), fabric) is None  # layers are no groups
