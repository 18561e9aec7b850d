"""What each process of `parallel_peer` runs: one Llama, three ways to divide it, counted and timed."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks.parallel_counts import REGATHER, Collectives, PeakBytes, SavedBytes, plain
from hf_actswap.config.schema import ParallelConfig
from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients
from hf_actswap.parallel.patch_model import patch_model

RANKS = 2
PEER = "transformers tp_plan"
SEED = 7
LIMIT_S = 300
BFLOAT16_REDUCTION = "sums in bf16"


@dataclass(frozen=True)
class Shape:
    """Of the model and of a step.

    Args:
        hidden, inner, heads, kv_heads, layers, vocabulary: of the Llama.
        length: tokens a sequence; ``batch``: sequences.
    """

    hidden: int = 512
    inner: int = 1376
    heads: int = 8
    kv_heads: int = 4
    layers: int = 4
    vocabulary: int = 8192
    length: int = 512
    batch: int = 2


@dataclass(frozen=True)
class Case:
    """One way to divide the model.

    Args:
        name: of the row.
        sequence_parallel: of ours; ``None``: transformers' own.
        reduces_in_float32: activations and their gradients are summed over the ranks in float32 (our
            default), else in their own dtype, as transformers does.
    """

    name: str
    sequence_parallel: bool | None
    reduces_in_float32: bool = True


def cases_of(dtype: torch.dtype) -> tuple[Case, ...]:
    """Return the rows of one dtype; what ranks sum in matters below float32 only."""
    ours = (Case("hf_actswap tp + sp", True), Case("hf_actswap tp", False))
    if dtype == torch.float32:
        return Case(PEER, None), *ours
    lean = tuple(Case(f"{case.name}, {BFLOAT16_REDUCTION}", case.sequence_parallel, False) for case in ours)
    return Case(PEER, None), *ours, *lean


@dataclass
class Row:
    """One case on one rank.

    Args:
        saved_bytes: held by autograd between forward and backward, parameters excluded.
        peak_bytes: most that the step's own tensors take at one time; ``peak_logits_bytes`` of those that are
            as wide as the vocabulary, or as a rank's part of it.
        parameter_bytes, gradient_bytes: that this rank holds.
        calls, whole_bytes, wire_bytes: of collectives, ``phase kind`` -> number, bytes of the larger side,
            bytes that a rank sends in a ring.
        sent_bytes: sum of ``wire_bytes``, re-gathers apart; ``regathered_bytes``: those.
        ms: median of the timed steps (forward, backward, sum of tagged gradients); each in ``step_ms``.
        ms_ratio: to transformers' own, median of the ratios of the same round.
    """

    case: str
    dtype: str
    rank: int
    loss: float = 0.0
    grad_norm: float = 0.0
    saved_bytes: int = 0
    peak_bytes: int = 0
    peak_logits_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    whole_bytes: dict[str, int] = field(default_factory=dict)
    wire_bytes: dict[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    regathered_bytes: int = 0
    ms: float = 0.0
    ms_ratio: float = 0.0
    step_ms: list[float] = field(default_factory=list)


def whole_model(shape: Shape) -> LlamaForCausalLM:
    """Return the model of one process, the same in each call."""
    torch.manual_seed(SEED)
    settings = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.length,
        use_cache=False,
    )
    return LlamaForCausalLM(settings).train()


class Subject:
    """A model in parts, and its step.

    Args:
        case: how it is divided.
        shape: of model and step.
        dtype: of weights and activations.
        folder: with the saved weights, from which transformers divides while it loads.
    """

    def __init__(self, case: Case, shape: Shape, dtype: torch.dtype, folder: Path) -> None:
        self.case, self.shape, self.dtype = case, shape, dtype
        self.step_s: list[float] = []
        self.model: Any
        if case.sequence_parallel is None:
            layout = DistributedConfig(tp_size=RANKS, tp_plan="auto")
            self.model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, distributed_config=layout)
        else:
            self.model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
            settings = ParallelConfig(
                tensor_parallel_size=RANKS, sequence_parallel_enabled=case.sequence_parallel
            )
            reduce_dtype = torch.float32 if case.reduces_in_float32 else None
            patch_model(self.model, settings, dist.group.WORLD, reduce_dtype=reduce_dtype)
        self.model.train()
        generator = torch.Generator().manual_seed(SEED)
        size = (shape.batch, shape.length)
        self.ids = torch.randint(0, shape.vocabulary, size, generator=generator)

    def step(self, phase: Callable[[str], None] = lambda _: None) -> float:
        """Run forward, backward and what is to be summed after it; return the loss."""
        self.model.zero_grad(set_to_none=True)
        phase("forward")
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        phase("backward")
        loss.backward()
        phase("after backward")
        if self.case.sequence_parallel is not None:
            allreduce_sequence_parallel_gradients(self.model, dist.group.WORLD)
        return float(plain(loss.detach()))

    def timed_step(self) -> None:
        """Note the seconds of a step that all ranks begin together."""
        dist.barrier()
        start = time.perf_counter()
        self.step()
        self.step_s.append(time.perf_counter() - start)

    def row(self) -> Row:
        """Count what a step does. Four steps, for one observer does not see another's work."""
        row = Row(self.case.name, str(self.dtype).removeprefix("torch."), dist.get_rank())
        seen = Collectives()
        with seen.telling_regathers(), seen:
            row.loss = self.step(lambda name: setattr(seen, "phase", name))
        row.calls = {" ".join(key): number for key, number in seen.calls.items()}
        row.whole_bytes = {" ".join(key): size for key, size in seen.whole_bytes.items()}
        row.wire_bytes = {" ".join(key): size for key, size in seen.wire_bytes(RANKS).items()}
        row.regathered_bytes = sum(v for key, v in row.wire_bytes.items() if key.endswith(REGATHER))
        row.sent_bytes = sum(row.wire_bytes.values()) - row.regathered_bytes
        row.grad_norm = self._grad_norm()
        row.parameter_bytes = sum(plain(p.detach()).nbytes for p in self.model.parameters())
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        row.gradient_bytes = sum(plain(gradient).nbytes for gradient in gradients)
        saved = SavedBytes(self.model.parameters())
        with ExitStack() as hooks:
            self.step(lambda name: hooks.enter_context(saved.hooks()) if name == "forward" else hooks.close())
        row.saved_bytes = saved.total_bytes()
        peak = PeakBytes({self.shape.vocabulary, self.shape.vocabulary // RANKS})
        with peak:
            self.step()
        row.peak_bytes, row.peak_logits_bytes = peak.peak_bytes, peak.peak_logits_bytes
        return row

    def _grad_norm(self) -> float:
        """Norm of the whole model's gradients: parts of all ranks, replicas (of norms: one dim) once."""
        squares = [torch.zeros(()), torch.zeros(())]
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                squares[0] += plain(gradient.full_tensor()).float().square().sum()
            elif gradient is not None:
                squares[parameter.dim() > 1] += gradient.float().square().sum()
        dist.all_reduce(squares[1])
        return float((squares[0] + squares[1]).sqrt())


def measure(shape: Shape, dtype: torch.dtype, rounds: int, warmup: int, folder: Path) -> list[Row]:
    """Count and time all cases of a dtype; steps of different cases alternate."""
    subjects = [Subject(case, shape, dtype, folder) for case in cases_of(dtype)]
    rows = [subject.row() for subject in subjects]
    for count in range(warmup + rounds):
        first = count % len(subjects)
        for subject in (*subjects[first:], *subjects[:first]):
            subject.timed_step()
    peer_s = subjects[0].step_s[warmup:]
    for row, subject in zip(rows, subjects, strict=True):
        timed = subject.step_s[warmup:]
        row.step_ms = [seconds * 1e3 for seconds in timed]
        row.ms = statistics.median(row.step_ms)
        row.ms_ratio = statistics.median(own / peer for own, peer in zip(timed, peer_s, strict=True))
    return rows


def run_on_rank(
    rank: int, folder: str, shape: dict[str, int], dtypes: Sequence[str], rounds: int, warmup: int
) -> None:
    """Measure and write ``rows.<rank>.pt``."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), RANKS)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    try:
        weights = Path(folder, "weights")
        if rank == 0:
            whole_model(Shape(**shape)).save_pretrained(weights)
        dist.barrier()
        rows: list[Row] = []
        for dtype in dtypes:
            rows += measure(Shape(**shape), getattr(torch, dtype), rounds, warmup, weights)
        torch.save([asdict(row) for row in rows], Path(folder, f"rows.{rank}.pt"))
    finally:
        dist.destroy_process_group()
