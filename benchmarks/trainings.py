"""Measures trainings with an optimizer: recovery from out of memory, and AdamW's states on the host.

*Out of memory*: a Llama trains with fused AdamW. *plain* has all memory of the device, and its peak is what
the training needs; *without the planner* and *planned* get a share of that peak
(``set_per_process_memory_fraction``). Planned, at 0.6 of it, every step must succeed, the first one included,
and the losses must equal plain's bit for bit; at 0.3, where no plan fits, the error must say how much memory
would do.

*Optimizer states*: each case has a model of its own, and all see the same data. *plain* has the states on the
device and is measured first and last; between them `OptimizerStates` has a tenth of them there at once. No
step can be shorter than the copies of its states, both directions at once.

*Frozen weights*: LoRA adapters of rank 16 on all linear layers of a frozen base, all layers recomputed, the
loss in tiles. *plain* has the base on the device, *on the host* copies it in layer by layer: losses must be
equal bit for bit, and steps take as long where copies are hidden. Beside them the peers that keep a
frozen base on the host: PyTorch's FSDP2 and DeepSpeed's ZeRO-3, each in a world of one, with transformers'
checkpointing.

All use deterministic kernels, so that the bits of different cases can be compared.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from transformers import LlamaForCausalLM

from benchmarks.exactness import deterministic, fingerprint
from benchmarks.measure import Bench
from benchmarks.meters import give_back_cached_memory
from benchmarks.records import Line, Record, Records
from benchmarks.workloads import Workload, llama_config
from hf_actswap import apply
from hf_actswap.engine.device_allocator import limit_memory
from hf_actswap.engine.host_pool import HostPool, PageableSlabs, PinnedSlabs
from hf_actswap.engine.transfer import transfer_of
from hf_actswap.planner import AllocatorMeter, BudgetError, CountingMeter, Meter, Planner
from hf_actswap.planner.states.optimizer_states import OptimizerStates

OUT_OF_MEMORY, OPTIMIZER_STATES = "out of memory", "optimizer states"
FROZEN_8K, FROZEN_32K = "frozen weights, 8k", "frozen weights, 32k"
FROZEN_PEERS = "frozen weights, peers"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama and its training: ``steps`` measured steps on sequences of ``tokens``.

    The feed-forward is 11/4 as wide as ``hidden``, heads are 128 wide. A step has ``micro_batches`` forwards
    and backwards. States under ``min_tensor_bytes`` stay on the device. One case takes about ``expected_s``.
    """

    name: str
    steps: int
    layers: int
    hidden: int
    tokens: int
    vocabulary: int
    micro_batches: int = 1
    min_tensor_bytes: int = 2**20
    expected_s: float = 5.0

    def model(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the model, the same in each call."""
        torch.manual_seed(0)
        heads = max(1, self.hidden // 128)
        sizes = (self.layers, self.tokens, self.hidden, self.hidden * 11 // 4, heads, heads, self.vocabulary)
        config = llama_config(Workload(self.name, "Llama", *sizes, head=True))
        config.use_cache = False
        with device:
            return LlamaForCausalLM._from_config(config, dtype=dtype).train()

    def ids(self, step: int, device: torch.device) -> torch.Tensor:
        """Return the token ids of a step, shape (micro-batches, 1, tokens)."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.micro_batches, 1, self.tokens)
        return torch.randint(0, self.vocabulary, shape, generator=generator).to(device)


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        kind, method: what is measured, and the name of the case.
        planned: whether it trains with the planner.
        share: its memory limit, as a fraction of the memory that plain needs; ``None``: no limit.
        resident: fraction of the states on the device at once; ``None``: `OptimizerStates` is not used.
        effort: its estimated time, as a multiple of ``Sizes.expected_s``.
        weights: where a frozen base with adapters waits, as ``memory.weights``, or by which of `PEERS`;
            ``None``: all weights are trained.
    """

    kind: str
    method: str
    planned: bool = False
    share: float | None = None
    resident: float | None = None
    effort: float = 1.0
    weights: str | None = None


PLAIN = "plain"
OUT_OF_MEMORY_CASES = (
    Case(OUT_OF_MEMORY, PLAIN),
    Case(OUT_OF_MEMORY, "without the planner at 0.6", share=0.6, effort=0.5),
    Case(OUT_OF_MEMORY, "planned at 0.6", planned=True, share=0.6, effort=3.0),
    Case(OUT_OF_MEMORY, "planned at 0.3", planned=True, share=0.3),
)
STATES_CASES = (
    Case(OPTIMIZER_STATES, PLAIN),
    Case(OPTIMIZER_STATES, "ours, a tenth resident", resident=0.1),
    Case(OPTIMIZER_STATES, "plain, again"),
)
FROZEN_CASES = (
    *(
        Case(kind, method, weights=weights)
        for kind in (FROZEN_8K, FROZEN_32K, FROZEN_PEERS)
        for method, weights in (("on the host", "host"), (PLAIN, "keep"))
    ),
    *(Case(FROZEN_PEERS, f"{peer} with CPU offload", weights=peer) for peer in ("FSDP2", "ZeRO-3")),
)
CASES = (*OUT_OF_MEMORY_CASES, *STATES_CASES, *FROZEN_CASES)
STATES_WARMUP_STEPS = 3


RECOMPUTED_IN_TILES = {"recompute_config": {"recompute": True}, "tile_config": {"loss": "auto"}}
"""What stands beside ``memory.weights`` in the cases of frozen weights."""


@dataclass
class Training(Record):
    """The result of one training under a memory limit.

    Args:
        share: memory limit as a fraction of plain's peak; ``limit_bytes``: in bytes; ``None``: no limit.
        losses, step_ms, phases: loss, time and the planner's phase of each step.
        peak_bytes: the most that the allocator held in any step, except in warm-up, where the planner itself
            reads and resets the counter.
        stable_peak_bytes: the same in stable steps only.
        evicted_bytes: bytes that were moved to the host because memory ran out.
        error: the error that ended it; empty: none did.
        settings: the `Sizes`.
    """

    method: str
    share: float | None = None
    limit_bytes: int | None = None
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    stable_peak_bytes: int = 0
    evicted_bytes: int = 0
    error: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class StatesRow(Record):
    """One case of the optimizer's states; times are medians over the measured steps.

    Args:
        step_ms: time of forwards, backwards and the optimizer's step.
        optimizer_ms: time of the optimizer's step alone, as the device sees it.
        state_bytes: bytes of the optimizer's states.
        freed_share: fraction of these that is not on the device when forward ends.
        forward_peak_bytes, step_peak_bytes: the most device memory in use until backward ends, and in the
            optimizer's step.
        moved_bytes: bytes copied in one step, both directions together.
        stall_ms: time in one step in which compute waits for copies.
        pinning_ms: time of page-locking host memory in all steps, warm-up included.
        parameters: digest of the parameters' fingerprints after the last step; equal in all cases.
        settings: the `Sizes`.
    """

    method: str
    step_ms: float | None = None
    optimizer_ms: float | None = None
    state_bytes: int = 0
    freed_share: float = 0.0
    forward_peak_bytes: int | None = None
    step_peak_bytes: int | None = None
    moved_bytes: int = 0
    stall_ms: float = 0.0
    pinning_ms: float = 0.0
    parameters: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingJob:
    """A case to be measured, as a `runner.Job`."""

    case: Case
    sizes: Sizes

    @property
    def title(self) -> str:
        return f"{self.case.kind} {self.case.method}"

    def blank(self) -> Any:
        """Return the `Training` or `StatesRow` with nothing measured yet."""
        about: dict[str, Any] = {"kind": self.case.kind, "workload": self.sizes.name}
        about["settings"] = asdict(self.sizes)
        if self.case.kind == OPTIMIZER_STATES:
            return StatesRow(self.case.method, **about)
        return Training(self.case.method, self.case.share, **about)

    def estimate_s(self, _session: object) -> float:
        return self.sizes.expected_s * self.case.effort

    def request(self, records: Records) -> Callable[[Bench], Any] | str:
        if self.case.weights == "ZeRO-3" and importlib.util.find_spec("deepspeed") is None:
            return "DeepSpeed is not installed"
        needed_bytes = self._needed_bytes(records) if self.case.share is not None else None
        if self.case.share is not None and needed_bytes is None:
            return "what plain needs was not measured"
        return partial(_alone, self.case, self.sizes, needed_bytes)

    def is_same(self, line: Line) -> bool:
        return bool(line["settings"] == asdict(self.sizes))

    def _needed_bytes(self, records: Records) -> int | None:
        wanted = (OUT_OF_MEMORY, self.sizes.name, PLAIN, "measured", "")
        names = ("kind", "workload", "method", "status", "error")
        found = [line for line in records if tuple(line.get(name) for name in names) == wanted]
        return found[-1]["peak_bytes"] if found else None


def training_jobs(kind: str, sizes: Sizes) -> list[TrainingJob]:
    """Return the jobs of all cases of a kind; a case comes after those whose results it needs."""
    return [TrainingJob(case, sizes) for case in CASES if case.kind == kind]


def _alone(case: Case, sizes: Sizes, needed_bytes: int | None, bench: Bench) -> Training | StatesRow:
    """Measure a case after all else on the bench is freed."""
    bench.clear()
    if case.kind == OPTIMIZER_STATES:
        return measure_states(case, sizes, bench.device)
    return train(case, sizes, needed_bytes, bench.device)


class _Counted(CountingMeter):
    """A meter with a memory limit that counts on when the planner stops it."""

    def stop(self) -> None:
        pass


@contextmanager
def _limited(device: torch.device, limit_bytes: int | None) -> Iterator[Meter]:
    """Within the block limit memory: on an accelerator by its allocator, on the CPU by the meter yielded."""
    if device.type == "cpu":
        counted = _Counted(limit_bytes)
        counted.start()
        try:
            yield counted
        finally:
            super(_Counted, counted).stop()
        return
    undo = None if limit_bytes is None else limit_memory(device, limit_bytes)
    try:
        yield AllocatorMeter(device)
    finally:
        if undo is not None:
            undo()


def train(case: Case, sizes: Sizes, needed_bytes: int | None, device: torch.device) -> Training:
    """Train once, under a limit of memory if the case has one: a share of ``needed_bytes``, plain's peak."""
    done: Training = TrainingJob(case, sizes).blank()
    if case.share is not None and needed_bytes is not None:
        done.limit_bytes = int(case.share * needed_bytes)
    give_back_cached_memory(device)  # what is cached already is given out beyond any limit
    with deterministic(fill=False), _limited(device, done.limit_bytes) as meter:
        try:
            _train(done, case, sizes, device, meter)
        except (BudgetError, torch.OutOfMemoryError) as error:
            done.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return done


def _train(done: Training, case: Case, sizes: Sizes, device: torch.device, meter: Meter) -> None:
    model = sizes.model(device, torch.float32 if device.type == "cpu" else torch.bfloat16)
    if case.weights is not None:
        model = _with_adapters(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    with ExitStack() as stack:
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())
        planner: Any = None
        if (peer := PEERS.get(case.weights or "")) is not None:
            model, optimizer = peer(model, optimizer, device)
        elif case.weights is not None:
            stack.enter_context(apply(model, {**RECOMPUTED_IN_TILES, "memory": {"weights": case.weights}}))
        if case.planned:
            planner = apply(model, {"memory": {"mode": "adaptive"}}, optimizer=optimizer, meter=meter)
            stack.callback(planner.remove)
            stack.callback(lambda: setattr(done, "evicted_bytes", planner.evicted_bytes))
        for number in range(sizes.steps):
            _step(done, sizes.ids(number, device), model, optimizer, planner, meter)


def _world_of_one(model: Any, device: torch.device) -> None:
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    apply(model, {"tile_config": RECOMPUTED_IN_TILES["tile_config"]})


def _fsdp2(model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Any, Any]:
    """Keep the layers' frozen weights on the host by FSDP2; all else stays on the device."""
    _world_of_one(model, device)
    mesh = init_device_mesh(device.type, (1,))
    trained = {weight for weight in model.parameters() if weight.requires_grad}
    policy = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh, offload_policy=policy, ignored_params=trained)
    return fully_shard(model, mesh=mesh, ignored_params=trained), optimizer


def _zero3(model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Any, Any]:
    """Keep the weights on the host by DeepSpeed's ZeRO-3, with the sizes that it has by default."""
    import deepspeed  # a peer that few machines have

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    _world_of_one(model, device)
    offload = {"device": "cpu", "pin_memory": device.type != "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": device.type != "cpu"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_param": offload},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    # The engine makes its backwards, and its step frees the gradients.
    return engine, SimpleNamespace(backward=engine.backward, step=engine.step, zero_grad=lambda: None)


PEERS: Mapping[str, Callable[[Any, torch.optim.Optimizer, torch.device], tuple[Any, Any]]] = {
    "FSDP2": _fsdp2,
    "ZeRO-3": _zero3,
}
"""By name, what prepares a model with adapters; returns what is called, and what makes its steps (and its
backwards, if it has that verb)."""


def _with_adapters(model: nn.Module) -> nn.Module:
    """Return a PEFT model with adapters in the type of the base, so that nothing needs autocast."""
    from peft import LoraConfig, get_peft_model  # not on every machine that measures other things

    asked = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
    adapted: nn.Module = get_peft_model(model, asked, autocast_adapter_dtype=False)
    return adapted.train()


def _step(
    done: Training, batches: torch.Tensor, model: Any, optimizer: Any, planner: Planner | None, meter: Meter
) -> None:
    phase = planner.phase if planner is not None else ""
    backward = getattr(optimizer, "backward", torch.Tensor.backward)
    meter.reset_peak()
    start = time.perf_counter()
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        backward(loss)
    done.losses.append(loss.item())
    peak_bytes = meter.reserved_peak_bytes()
    optimizer.step()
    optimizer.zero_grad()
    peak_bytes = max(peak_bytes, meter.reserved_peak_bytes())
    done.step_ms.append((time.perf_counter() - start) * 1e3)
    done.phases.append(phase)
    if phase != "warm-up":
        done.peak_bytes = max(done.peak_bytes, peak_bytes)
    if phase == "stable":
        done.stable_peak_bytes = max(done.stable_peak_bytes, peak_bytes)


@contextmanager
def _states_on_host(
    case: Case, sizes: Sizes, model: Any, optimizer: torch.optim.Optimizer, device: torch.device
) -> Iterator[OptimizerStates | None]:
    if case.resident is None:
        yield None
        return
    pool = HostPool(PageableSlabs() if device.type == "cpu" else PinnedSlabs(device, frozenset()))
    total = 2 * sum(item.nbytes for item in model.parameters())
    states = OptimizerStates(
        optimizer,
        transfer_of(device),
        pool,
        model=model,
        layers=list(model.model.layers),
        resident_bytes=int(case.resident * total),
        min_tensor_bytes=sizes.min_tensor_bytes,
    )
    states.attach()
    try:
        yield states
    finally:
        states.remove()
        pool.close()


class _StatesStep(NamedTuple):
    """One step with the optimizer's states: the fields of `StatesRow`; on the CPU peaks are 0."""

    step_ms: float
    optimizer_ms: float
    freed_share: float
    forward_peak_bytes: int
    step_peak_bytes: int


def _states_step(
    model: Any, optimizer: torch.optim.Optimizer, states: OptimizerStates | None, batches: torch.Tensor
) -> _StatesStep:
    device, freed_share = batches.device, 1.0 if states is not None else 0.0
    meter: Meter = CountingMeter() if device.type == "cpu" else AllocatorMeter(device)  # never started
    meter.reset_peak()
    start = _now(device)
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        if states is not None and states.state_bytes:
            freed_share = min(freed_share, 1 - states.device_bytes / states.state_bytes)
        loss.backward()
        del loss
    between, forward_peak = _now(device), meter.peak_bytes()
    meter.reset_peak()
    optimizer.step()
    optimizer.zero_grad()
    end = _now(device)
    times_ms = (end - start) * 1e3, (end - between) * 1e3
    return _StatesStep(*times_ms, freed_share, forward_peak, meter.peak_bytes())


def _now(device: torch.device) -> float:
    """Return the time when the compute stream is done; copies on other streams may still run."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
    return time.perf_counter()


def measure_states(case: Case, sizes: Sizes, device: torch.device) -> StatesRow:
    give_back_cached_memory(device)
    row: StatesRow = TrainingJob(case, sizes).blank()
    model = sizes.model(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with deterministic(fill=False), _states_on_host(case, sizes, model, optimizer, device) as states:

        def steps(numbers: range) -> list[_StatesStep]:
            return [_states_step(model, optimizer, states, sizes.ids(one, device)) for one in numbers]

        steps(range(STATES_WARMUP_STEPS))
        before = states.stats() if states is not None else None
        timed = steps(range(STATES_WARMUP_STEPS, STATES_WARMUP_STEPS + sizes.steps))
        if states is not None and before is not None:
            change = states.stats() - before
            row.moved_bytes = (change.offloaded_bytes + change.prefetched_bytes) // sizes.steps
            row.stall_ms = change.stall_ms / sizes.steps
            row.pinning_ms = states.stats().pinning_ms  # in warm-up
    row.step_ms = statistics.median(step.step_ms for step in timed)
    row.optimizer_ms = statistics.median(step.optimizer_ms for step in timed)
    row.freed_share = min(step.freed_share for step in timed)
    if device.type != "cpu":
        row.forward_peak_bytes = max(step.forward_peak_bytes for step in timed)
        row.step_peak_bytes = max(step.step_peak_bytes for step in timed)
    found = (value for entries in optimizer.state.values() for value in entries.values())
    row.state_bytes = sum(value.nbytes for value in found if value.numel() > 1)
    parts = [fingerprint(parameter) for parameter in model.parameters()]
    row.parameters = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return row
