"""FSDP2 over the data axis with tensor parallelism inside: 2 x 2 processes train as one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hf_actswap.apply import apply
from hf_actswap.integrations.prepare import prepare
from hf_actswap.parallel.collectives import tensor_parallel_group
from hf_actswap.parallel.gradients import TaggedGradients, clip_grad_norm
from hf_actswap.parallel.mesh import MeshError, ParallelMesh, build_mesh
from hf_actswap.parallel.patch_model import Patched, patch_model
from tests.parallel.patch_worker import config, drifting, full_gradients, gradients, relative_errors
from tests.parallel.patched_models import VOCABULARY, tiny_model
from tests.processes import launched, of_ranks, result, run_cases, set_launchers_environment

WORLD_SIZE, TENSOR_PARALLEL, STEPS, MAX_NORM, BATCH = 4, 2, 3, 0.05, 2
DATA_PARALLEL = WORLD_SIZE // TENSOR_PARALLEL


@dataclass(frozen=True)
class Case:
    """A model that is sharded over both axes.

    Args:
        kind, settings: of the model.
        sequence_parallel: else the ranks of a model hold the hidden states alike.
        by_hand: ``fully_shard`` of one's own, not `Patched.shard_over_data`.
        sharding: arguments of ``fully_shard``.
        plan: configuration that is applied, before sharding.
        checkpointing: Hugging Face's gradient checkpointing.
        length: tokens per sequence.
        accumulation: batches per step.
        reduced: tagged gradients are summed; else the negative control.
    """

    kind: str = "llama"
    settings: dict[str, Any] = field(default_factory=dict)
    sequence_parallel: bool = True
    by_hand: bool = False
    sharding: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False
    length: int = 16
    accumulation: int = 1
    reduced: bool = True


ONE_KV_HEAD = {"num_key_value_heads": 1}
PLAN = {
    "parallel_config": {"tensor_parallel_size": TENSOR_PARALLEL, "sequence_parallel_enabled": True},
    "swap_config": {"swap": True, "default_prefetch": 4},
    "recompute_config": {"recompute": [1]},
}
CASES: dict[str, Case] = {
    "llama": Case(accumulation=2, length=17),
    "llama_by_hand": Case(by_hand=True, settings=ONE_KV_HEAD),
    "llama_not_resharded": Case(sharding={"reshard_after_forward": False}, sequence_parallel=False),
    "llama_checkpointed": Case(checkpointing=True),
    "llama_planned": Case(plan=PLAN),
    "llama_tiled": Case(plan={**PLAN, "tile_config": {"loss": {"tokens": 7}}}, accumulation=2),
    "qwen2_tied": Case("qwen2", {**ONE_KV_HEAD, "vocab_size": 129, "tie_word_embeddings": True}),
    "qwen3": Case("qwen3", accumulation=2, by_hand=True),
    "phi3": Case("phi3", ONE_KV_HEAD),
    "mixtral": Case("mixtral"),
    "not_reduced": Case("qwen3", reduced=False),
}


@dataclass
class Result:
    """What one rank saw; errors are relative to the largest expected element.

    Args:
        losses: (of this rank's model, expected), by step and batch.
        norms: (found, expected), by step.
        gradient_errors: of the first step, by name.
        weight_errors: after the last step, by name.
        drift: replicated parameters that differ over the ranks of a model.
        sharded: names of parameters that are no DTensors.
        tagged: (before sharding, after, while nothing has run).
        reloaded: parameters that differ after they were loaded into another model.
        local_bytes: held of parameters; ``whole_bytes``: before.
    """

    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)
    gradient_errors: dict[str, float] = field(default_factory=dict)
    weight_errors: dict[str, float] = field(default_factory=dict)
    drift: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    tagged: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    reloaded: list[str] = field(default_factory=list)
    local_bytes: int = 0
    part_bytes: int = 0


def run_case(case: Case, _: dist.ProcessGroup | None) -> Result:
    """Train in one process and on four; compare."""
    mesh, result = build_mesh(TENSOR_PARALLEL, "dp_shard", "cpu"), Result()
    alone, model = (tiny_model(case.kind, **case.settings) for _ in range(2))
    patched = _sharded(model, case, mesh, result)
    alone_optimizer, optimizer = (
        torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-4) for one in (alone, model)
    )
    tagged = TaggedGradients(optimizer, patched.group)
    for step in range(STEPS):
        own = _own_step(model, case, step, mesh.data_parallel_rank)
        expected = _whole_step(alone, case, step)
        result.losses += list(zip(own, expected[mesh.data_parallel_rank], strict=True))
        if case.reduced:
            tagged.reduce()
        if step == 0:
            result.gradient_errors = _errors(full_gradients(patched), gradients(alone))
        if case.reduced:
            norm = clip_grad_norm(model.parameters(), MAX_NORM, process_group=patched.group)
            wanted = nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
            result.norms.append((norm.item(), wanted.item()))
        if not case.reduced:
            return result
        for one in (optimizer, alone_optimizer):
            one.step()
            one.zero_grad()
    state = patched.full_state_dict()
    result.weight_errors = _errors(state, dict(alone.state_dict()))
    result.drift = _drift(patched)
    result.reloaded = _reloaded(state, case, mesh)
    return result


def _sharded(model: Any, case: Case, mesh: ParallelMesh, result: Result) -> Patched:
    group = mesh.tensor_parallel_group
    patched = patch_model(model, config(group, case.sequence_parallel), group)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if case.plan:
        with tensor_parallel_group(group):
            apply(model, case.plan)
    tagged = patched.tagged
    result.part_bytes = sum(p.nbytes for p in model.parameters())
    data_axis = mesh.device_mesh["dp_shard"]
    if case.by_hand:
        for layer in model.model.layers:
            fully_shard(layer, mesh=data_axis, **case.sharding)
        fully_shard(model, mesh=data_axis, **case.sharding)
    else:
        patched.shard_over_data(data_axis, **case.sharding)
    result.tagged = tagged, patched.tagged
    result.plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    result.local_bytes = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    return patched


def _batch(case: Case, step: int, part: int, data_rank: int) -> dict[str, torch.Tensor]:
    seed = 100 * step + 10 * part + data_rank
    vocabulary = case.settings.get("vocab_size", VOCABULARY)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (BATCH, case.length), generator=generator)
    labels = ids.clone()
    labels[0, : 3 + part] = -100
    return {"input_ids": ids, "labels": labels}


def _own_step(model: Any, case: Case, step: int, data_rank: int) -> list[float]:
    losses = []
    for part in range(case.accumulation):
        loss = model(**_batch(case, step, part, data_rank), use_cache=False).loss
        (loss / case.accumulation).backward()
        losses.append(loss.item())
    return losses


def _whole_step(model: Any, case: Case, step: int) -> list[list[float]]:
    """The mean over all data ranks' batches, in one process."""
    losses = []
    for data_rank in range(DATA_PARALLEL):
        losses.append([])
        for part in range(case.accumulation):
            loss = model(**_batch(case, step, part, data_rank), use_cache=False).loss
            (loss / case.accumulation / DATA_PARALLEL).backward()
            losses[-1].append(loss.item())
    return losses


def _errors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    if found.keys() != expected.keys():
        raise AssertionError(f"names differ: {found.keys() ^ expected.keys()}")
    return relative_errors(found, expected)


def _drift(patched: Patched) -> list[str]:
    weights = {name: p.detach() for name, p in patched.model.named_parameters()}
    whole = {n: one.full_tensor() if isinstance(one, DTensor) else one for n, one in weights.items()}
    return drifting(patched, whole)


def _reloaded(state: dict[str, torch.Tensor], case: Case, mesh: ParallelMesh) -> list[str]:
    other = tiny_model(case.kind, seed=9, **case.settings)
    group = mesh.tensor_parallel_group
    patched = patch_model(other, config(group, case.sequence_parallel), group)
    patched.shard_over_data(mesh.device_mesh["dp_shard"])
    patched.load_full_state_dict(state)
    again = patched.full_state_dict()
    return [name for name, tensor in state.items() if not torch.equal(tensor, again[name])]


def run_prepared(_: dist.ProcessGroup | None) -> Result:
    """A loop that Accelerate drives, sharded by `prepare`; its state goes through a whole one and back."""
    case, result, accelerator = Case("qwen3"), Result(), Accelerator()
    alone, model = (tiny_model(case.kind) for _ in range(2))
    alone_optimizer, optimizer = (
        torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-4) for one in (alone, model)
    )
    prepared = prepare(accelerator, model, PLAN, optimizer, shard_over_data=True)
    parallel = prepared.parallel
    mesh = parallel.mesh
    for step in range(STEPS):
        own = _own_step(prepared.model, case, step, mesh.data_parallel_rank)
        result.losses += list(zip(own, _whole_step(alone, case, step)[mesh.data_parallel_rank], strict=True))
        norm = accelerator.clip_grad_norm_(prepared.model.parameters(), MAX_NORM)
        wanted = nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
        result.norms.append((norm.item(), wanted.item()))
        for one in (prepared.optimizer, alone_optimizer):
            one.step()
            one.zero_grad()
        state: list[Any] = [prepared.optimizer_state_dict()]
        dist.broadcast_object_list(state)
        for of_parameter in prepared.optimizer.optimizer.state.values():
            of_parameter["exp_avg"].zero_()
        prepared.load_optimizer_state_dict(state[0])
    result.weight_errors = _errors(parallel.whole_weights(True), dict(alone.state_dict()))
    result.drift = _drift(parallel.patched)
    result.plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    return result


def run_wrong_mesh(_: dist.ProcessGroup | None) -> dict[str, str]:
    """``fully_shard`` over the world, or over both axes: named in the first forward, or at once."""
    mesh = build_mesh(TENSOR_PARALLEL, "dp_shard", "cpu")
    group, found = mesh.tensor_parallel_group, {}
    model = tiny_model("llama")
    patched = patch_model(model, config(group, True), group)
    try:
        patched.shard_over_data(mesh.device_mesh)
    except MeshError as error:
        found["both axes"] = str(error)
    fully_shard(model)
    ids = torch.ones(1, 8, dtype=torch.long)
    try:
        model(input_ids=ids, labels=ids)
    except MeshError as error:
        found["world"] = str(error)
    return found


def run_on_rank(rank: int, folder: str) -> None:
    """Run each case on all ranks."""
    cases: dict[str, Callable[[dist.ProcessGroup | None], object]] = {
        name: partial(run_case, case) for name, case in CASES.items()
    }
    cases |= {"prepared": run_prepared, "wrong_mesh": run_wrong_mesh}
    set_launchers_environment(rank, WORLD_SIZE)
    run_cases(rank, folder, WORLD_SIZE, cases)


LIMIT_S = 240
TOLERANCE = 1e-5

pytestmark = [pytest.mark.dist, pytest.mark.slow]  # four processes

TRAINED = [name for name, case in CASES.items() if case.reduced]


results = launched(run_on_rank, WORLD_SIZE, LIMIT_S)


@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str, results: Path) -> None:
    """Losses, norms, every gradient and every weight of one process; replicas bitwise the same."""
    for found in of_ranks(results, name):
        assert len(found.losses) == STEPS * CASES[name].accumulation
        for losses in (found.losses, found.norms):
            assert [one for one, _ in losses] == pytest.approx([of for _, of in losses], rel=TOLERANCE)
        assert {key: error for key, error in found.gradient_errors.items() if error > TOLERANCE} == {}
        assert {key: error for key, error in found.weight_errors.items() if error > TOLERANCE} == {}
        assert found.drift == []


@pytest.mark.parametrize("name", TRAINED)
def test_state(name: str, results: Path) -> None:
    """Every parameter is sharded; whole tensors load into another sharded model, bitwise."""
    for found in of_ranks(results, name):
        assert found.plain == []
        assert found.reloaded == []
        assert found.local_bytes < found.part_bytes / DATA_PARALLEL * 1.1


@pytest.mark.parametrize("name", TRAINED)
def test_tags(name: str, results: Path) -> None:
    """On the shards at once where ours shards, in the first forward where the user does."""
    for found in of_ranks(results, name):
        before, after = found.tagged
        assert (before != ()) is CASES[name].sequence_parallel
        if not CASES[name].by_hand:
            assert after == before


def test_a_loop_that_accelerate_drives(results: Path) -> None:
    for found in of_ranks(results, "prepared"):
        assert len(found.losses) == len(found.norms) == STEPS
        for pairs in (found.losses, found.norms):
            assert [one for one, _ in pairs] == pytest.approx([of for _, of in pairs], rel=TOLERANCE)
        assert {key: error for key, error in found.weight_errors.items() if error > TOLERANCE} == {}
        assert found.drift == found.plain == []


def test_without_the_sum_gradients_are_wrong(results: Path) -> None:
    for found in of_ranks(results, "not_reduced"):
        wrong = {name for name, error in found.gradient_errors.items() if error > 1e-2}
        assert any(name.endswith("q_norm.weight") for name in wrong)
        assert "model.norm.weight" in wrong
        assert not any(name.endswith("proj.weight") for name in wrong)


def test_a_mesh_with_the_tensor_axis_in_it(results: Path) -> None:
    for rank in range(WORLD_SIZE):
        found = result(results, "wrong_mesh", rank)
        first = rank // 2 * 2
        assert "mesh: expected the data axis alone, found 2 axes" in found["both axes"]
        assert f"found ranks [{first}, {first + 1}] in it" in found["world"]
