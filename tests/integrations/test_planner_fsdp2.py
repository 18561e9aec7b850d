"""Two processes: the planner beside FSDP2 by Accelerate's plugin, in a loop and in the Trainer."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import Trainer, TrainerCallback

import hf_actswap
from hf_actswap import ActSwapCallback, ActSwapTrainingArguments
from hf_actswap.planner import CountingMeter, Planner
from tests.processes import launch_trainers, result

from .conftest import SHORT_ON_CPU, losses, tiny_llama
from .test_planner_training import SHORT, Blocks

GIB = 2**30
STEPS = 8
SHARE = 0.6
LAYER = "LlamaDecoderLayer"


@dataclass
class Run:
    """One training of one rank: losses, the phase of each step, rows of the last plan, what is left."""

    losses: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    rows: int = 0
    sharded: bool = False
    left_over: int = 0
    peak_bytes: int = 0
    base_bytes: int = 0


def as_accelerators() -> None:
    """See the module's text; once for each `Accelerator`, before it is made."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def loop(memory: dict[str, Any] | None) -> Run:
    """A loop of one's own; ``None``: without the planner, and its memory is counted."""
    as_accelerators()
    run = Run()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[LAYER],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    bare = tiny_llama()
    bare.config.use_cache = False
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    config = {} if memory is None else {"memory": memory}
    prepared = hf_actswap.prepare(accelerator, bare, config, optimizer)
    run.sharded = all(isinstance(item, DTensor) for item in prepared.model.parameters())
    meter = CountingMeter()
    if memory is None:
        meter.own(tensor.detach() for tensor in (*bare.parameters(), *bare.buffers()))
        run.base_bytes = meter.allocated_bytes()
        meter.start()
    generator = torch.Generator().manual_seed(accelerator.process_index)
    with prepared.applied as applied:
        for _ in range(STEPS):
            run.phases.append(applied.phase if isinstance(applied, Planner) else "")
            ids = torch.randint(0, 64, (4, 64), generator=generator)
            loss = prepared.model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.model.parameters(), 1.0)
            prepared.optimizer.step()
            prepared.optimizer.zero_grad()
            run.losses.append(loss.item())
        run.rows = len(applied.plan.rows)
    meter.stop()
    run.peak_bytes = meter.peak_bytes()
    run.left_over = len(_get_current_dispatch_mode_stack())
    return run


class Phases(TrainerCallback):
    """Notes the planner's phase in each step."""

    def __init__(self, run: Run, callback: ActSwapCallback) -> None:
        self._run, self._callback = run, callback

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        applied = self._callback.applied
        assert isinstance(applied, Planner)
        self._run.phases.append(applied.phase)
        self._run.rows = len(applied.plan.rows)


def trained(memory: dict[str, Any] | None, folder: Path) -> Run:
    """The stock Trainer, with the arguments that its users write."""
    run = Run()
    AcceleratorState._reset_state(reset_partial_state=True)
    args = ActSwapTrainingArguments(
        output_dir=str(folder / "out"),
        actswap=None if memory is None else {"memory": memory},
        max_steps=STEPS,
        per_device_train_batch_size=4,
        **SHORT_ON_CPU,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "version": 2,
            "transformer_layer_cls_to_wrap": [LAYER],
            "cpu_ram_efficient_loading": False,
        },
    )
    assert args.world_size == 2
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    ours = ActSwapCallback(args) if memory is not None else None
    callbacks = [] if ours is None else [ours, Phases(run, ours)]
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=Blocks(), callbacks=callbacks)
    assert trainer.accelerator.is_fsdp2
    trainer.train()
    run.sharded = all(isinstance(item, DTensor) for item in trainer.model.parameters())
    run.losses = losses(trainer)
    run.left_over = len(_get_current_dispatch_mode_stack())
    return run


def budget_of(plain: Run) -> float:
    """`SHARE` of what a step needs beside its weights, of the larger rank, in GiB."""
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, plain.base_bytes + SHARE * (plain.peak_bytes - plain.base_bytes))
    return max(peaks) / GIB


def planned(folder: Path) -> dict[str, Run]:
    """All trainings: they share one budget."""
    found = {"loop": loop(None)}
    budget = budget_of(found["loop"])
    found["trainer"] = trained(None, folder)
    for mode in ("smart_swap", "adaptive"):
        memory = {"mode": mode, "budget_gib": budget, **SHORT}
        found[f"loop, {mode}"] = loop(memory)
        found[f"trainer, {mode}"] = trained(memory, folder)
    saving = {"mode": "smart_swap", "budget_gib": budget, **SHORT, "preference": "memory_saving"}
    found["loop, states"] = loop(saving)
    return found


CASES = {"planned": planned}


WORKER = "tests.integrations.test_planner_fsdp2:CASES"

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Run]]:
    """By rank."""
    folder = launch_trainers(WORKER, tmp_path_factory.mktemp("fsdp2_plugin"), 2, 240)
    return [result(folder, "planned", rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("where", "mode"), [*product(("loop", "trainer"), ("smart_swap", "adaptive")), ("loop", "states")]
)
def test_losses_are_those_without_the_planner(runs: list[dict[str, Run]], where: str, mode: str) -> None:
    for of_rank in runs:
        plain, found = of_rank[where], of_rank[f"{where}, {mode}"]
        assert plain.sharded
        assert found.sharded
        assert len(plain.losses) == STEPS
        assert found.losses == plain.losses
        assert found.phases == ["warm-up", "warm-up", "search", "search", *["stable"] * (STEPS - 4)]
        assert found.rows > 0
        assert found.left_over == 0
    assert runs[0][f"{where}, {mode}"].rows == runs[1][f"{where}, {mode}"].rows
