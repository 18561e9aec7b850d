"""Compares a rank's communication and memory with those of transformers' own tensor parallelism.

    OMP_NUM_THREADS=1 python benchmarks/parallel_peer.py
    OMP_NUM_THREADS=1 python benchmarks/parallel_peer.py --dtypes float32 --rounds 20 --out mine.json

The same Llama, with the same weights and ids, runs in one launch of two gloo processes: divided by
transformers (``from_pretrained`` with its ``tp_plan``) and by `patch_model`, with and without sequence
parallelism. A row counts a step of one rank and has the median of its time; steps of different rows
alternate. Loss and gradient norm must agree before anything is compared.

Collectives are counted where PyTorch dispatches them, below both ``torch.distributed``'s calls and DTensor's
functional ones, so that two implementations are counted by one rule. Bytes on the wire are those that a rank
sends in a ring: ``(n - 1) / n`` of the whole for an all-gather or a reduce-scatter, twice that for an
all-reduce, which is one after the other (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms";
the same factors as in the documentation of ``nccl-tests``).

Two claims are judged: our rows save fewer bytes for backward, and those that sum over the ranks in the same
dtype as transformers send at most as many, without re-gathers. If one fails the exit status is 1. Time is
recorded but not judged: on a CPU, processes of one machine communicate through its memory.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks.records import (
    REPOSITORY,
    RESULTS,
    commit,
    console_of,
    hardware,
    print_table,
    versions,
    write_json,
)
from benchmarks.workloads import Workload, in_turns, llama_config
from hf_actswap.config.schema import ParallelConfig
from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients
from hf_actswap.parallel.patch_model import patch_model
from hf_actswap.planner.meter import CountingMeter, runs_its_own_dispatch

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
REGATHER = "re-gather"
"""The kind for gathers of saved shards in backward, which are counted separately."""


def ring_bytes(kind: str, whole_bytes: int, ranks: int) -> int:
    """Return the bytes that a rank sends in a collective whose larger side has ``whole_bytes``."""
    return (2 if kind == "all_reduce" else 1) * whole_bytes * (ranks - 1) // ranks


def kind_of(operator: Any) -> str | None:
    """Return the kind of collective that an operator is, or ``None``."""
    if operator.namespace not in _NAMESPACES:
        return None
    name = operator._schema.name.split("::")[1].replace("_", "")
    return next((kind for kind in KINDS if name.startswith(kind.replace("_", ""))), None)


class _LocalOps(TorchDispatchMode):
    """Sees the ops on this rank's own tensors, below DTensor and asynchronous collectives."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if runs_its_own_dispatch(types):
            return NotImplemented  # the tensors inside them are dispatched again
        result = func(*args, **(kwargs or {}))
        self.note(func, tree_leaves((args, kwargs)), tree_leaves(result))
        return result

    def note(self, func: Any, given: list[Any], made: list[Any]) -> None:
        raise NotImplementedError


class Collectives(_LocalOps):
    """Counts collectives, and the bytes of their larger sides, by (phase, kind).

    The caller that runs the step sets its present ``phase``.
    """

    def __init__(self, phase: str = "forward") -> None:
        super().__init__()
        self.phase = phase
        self.calls: Counter[tuple[str, str]] = Counter()
        self.whole_bytes: Counter[tuple[str, str]] = Counter()
        self._again = False

    def note(self, func: Any, given: list[Any], made: list[Any]) -> None:
        if (kind := kind_of(func)) is not None:
            key = self.phase, REGATHER if self._again else kind
            self.calls[key] += 1
            leaves = (leaf for leaf in (*given, *made) if isinstance(leaf, torch.Tensor))
            self.whole_bytes[key] += max(leaf.nbytes for leaf in leaves)

    @contextmanager
    def telling_regathers(self) -> Iterator[None]:
        """Count the gathers that a column-parallel layer starts in backward as `REGATHER`."""
        # As an attribute of the package, this name is a function.
        module = importlib.import_module("hf_actswap.parallel.column_input")
        own = module.begin_gather

        def begin(*args: Any) -> Any:
            self._again = True
            try:
                return own(*args)
            finally:
                self._again = False

        with mock.patch.object(module, "begin_gather", begin):
            yield


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or what an asynchronous collective wrote."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return plain(tensor.elem) if isinstance(tensor, AsyncCollectiveTensor) else tensor


class SavedBytes:
    """Bytes that autograd saves for backward: each storage once, parameters excluded."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._excluded = {_key(plain(p.detach())) for p in parameters}
        self._found: dict[int, torch.Tensor] = {}
        """The tensors are kept alive, so that no address is used twice."""

    def hooks(self) -> saved_tensors_hooks:
        """Return the context to run the forward in."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def total_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._found.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        found = plain(tensor)
        if found.untyped_storage().nbytes() and _key(found) not in self._excluded:
            self._found.setdefault(_key(found), found.detach())
        return tensor


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Logits(_LocalOps):
    """Counts the bytes of logits that are made inside: of tensors whose last dim has one of ``widths``."""

    def __init__(self, widths: Iterable[int]) -> None:
        super().__init__()
        self.meter = CountingMeter()
        self._widths = frozenset(widths)

    def note(self, func: Any, given: list[Any], made: list[Any]) -> None:
        known = {_key(leaf) for leaf in given if isinstance(leaf, torch.Tensor)}
        wide = (leaf for leaf in made if isinstance(leaf, torch.Tensor) and leaf.dim() > 1)
        self.meter.own(leaf for leaf in wide if leaf.shape[-1] in self._widths and _key(leaf) not in known)


RANKS = 2
PEER = "transformers tp_plan"
SEED = 7
LIMIT_S = 300
"""Seconds that a rank waits in a collective for the other one."""
LEAN = "sums in bf16"


@dataclass(frozen=True)
class Shape:
    """Sizes of the Llama, tokens of a sequence, and number of sequences in a step."""

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

    Without ``sequence_parallel`` (``None``) transformers divides it. ``reduces_in_float32``: whether
    activations and their gradients are summed over the ranks in float32 (our default), or in their own dtype,
    as transformers does.
    """

    name: str
    sequence_parallel: bool | None
    reduces_in_float32: bool = True


def cases_of(dtype: torch.dtype) -> tuple[Case, ...]:
    """Return the cases of one dtype; below float32 ours are also run with sums in that dtype."""
    ours = (Case("hf_actswap tp + sp", True), Case("hf_actswap tp", False))
    lean = (replace(case, name=f"{case.name}, {LEAN}", reduces_in_float32=False) for case in ours)
    return Case(PEER, None), *ours, *(lean if dtype != torch.float32 else ())


@dataclass
class Row:
    """One case on one rank.

    Args:
        saved_bytes: bytes held by autograd between forward and backward, parameters excluded.
        peak_bytes: the most bytes of the step's own tensors at one time; ``peak_logits_bytes``: of those that
            are as wide as the vocabulary, or as a rank's part of it.
        parameter_bytes, gradient_bytes: bytes that this rank holds.
        calls, whole_bytes, wire_bytes: number of collectives, bytes of their larger sides, and bytes that
            this rank sends in a ring, each by ``phase kind``.
        sent_bytes: sum of ``wire_bytes`` without re-gathers; ``regathered_bytes``: sum of the re-gathers.
        ms: median of the timed steps (forward, backward, sum of tagged gradients); ``step_ms``: each of them.
        ms_ratio: time over that of transformers, the median of the ratios in each round.
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
    """Return the undivided model."""
    torch.manual_seed(SEED)
    sizes = (shape.layers, shape.length, shape.hidden, shape.inner, shape.heads, shape.kv_heads)
    workload = Workload("peer", "Llama", *sizes, shape.vocabulary, head=True, dtype="float32")
    return LlamaForCausalLM(llama_config(workload)).train()


class Subject:
    """A model divided among the ranks, and its step; transformers divides the weights while it loads them."""

    def __init__(self, case: Case, shape: Shape, dtype: torch.dtype, folder: Path) -> None:
        self.case, self.shape, self.dtype = case, shape, dtype
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
        """Run forward, backward and the sum of tagged gradients, each named to ``phase``; return the loss."""
        self.model.zero_grad(set_to_none=True)
        phase("forward")
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        phase("backward")
        loss.backward()
        phase("after backward")
        if self.case.sequence_parallel is not None:
            allreduce_sequence_parallel_gradients(self.model, dist.group.WORLD)
        return float(plain(loss.detach()))

    def row(self) -> Row:
        """Run steps and count collectives and bytes; each kind of count has a step of its own."""
        row = Row(self.case.name, str(self.dtype).removeprefix("torch."), dist.get_rank())
        seen = Collectives()
        with seen.telling_regathers(), seen:
            row.loss = self.step(lambda name: setattr(seen, "phase", name))
        for (phase, kind), size in seen.whole_bytes.items():
            key = f"{phase} {kind}"
            row.calls[key], row.whole_bytes[key] = seen.calls[phase, kind], size
            row.wire_bytes[key] = ring_bytes(kind, size, RANKS)
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
        widths = {self.shape.vocabulary, self.shape.vocabulary // RANKS}
        with CountingMeter() as meter, Logits(widths) as logits:
            self.step()
        row.peak_bytes, row.peak_logits_bytes = meter.peak_bytes(), logits.meter.peak_bytes()
        return row

    def _grad_norm(self) -> float:
        """Return the norm of the whole model's gradients; replicated ones (norms, one dim) count once."""
        squares = [torch.zeros(()), torch.zeros(())]
        for parameter in self.model.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                squares[0] += plain(gradient.full_tensor()).float().square().sum()
            elif gradient is not None:
                squares[parameter.dim() > 1] += gradient.float().square().sum()
        dist.all_reduce(squares[1])
        return float((squares[0] + squares[1]).sqrt())


def measure_dtype(shape: Shape, dtype: torch.dtype, rounds: int, warmup: int, folder: Path) -> list[Row]:
    """Count and time all cases of a dtype; steps of different cases alternate."""
    subjects = [Subject(case, shape, dtype, folder) for case in cases_of(dtype)]
    rows = [subject.row() for subject in subjects]
    by_case = {row.case: row for row in rows}
    for count, subject in in_turns(subjects, warmup + rounds):
        dist.barrier()
        start = time.perf_counter()
        subject.step()
        if count >= warmup:
            by_case[subject.case.name].step_ms.append((time.perf_counter() - start) * 1e3)
    for row in rows:
        row.ms = statistics.median(row.step_ms)
        pairs = zip(row.step_ms, rows[0].step_ms, strict=True)
        row.ms_ratio = statistics.median(own / peer for own, peer in pairs)
    return rows


def run_on_rank(
    rank: int, folder: str, shape: Shape, dtypes: Sequence[str], rounds: int, warmup: int
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
            whole_model(shape).save_pretrained(weights)
        dist.barrier()
        rows: list[Row] = []
        for dtype in dtypes:
            rows += measure_dtype(shape, getattr(torch, dtype), rounds, warmup, weights)
        torch.save([asdict(row) for row in rows], Path(folder, f"rows.{rank}.pt"))
    finally:
        dist.destroy_process_group()


TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""The largest relative difference of loss and gradient norm, by dtype."""
MIB = 2**20
_SIZES = {
    "saved": "saved_bytes",
    "peak": "peak_bytes",
    "logits": "peak_logits_bytes",
    "grads": "gradient_bytes",
    "sent": "sent_bytes",
    "again": "regathered_bytes",
}
"""Headings of the table, and the bytes of `Row` in it."""

Rows = Sequence[Mapping[str, Any]]


def measure(shape: Shape, dtypes: Sequence[str], rounds: int, warmup: int) -> list[dict[str, Any]]:
    """Run all cases on two processes; return the rows of rank 0, then those of rank 1."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_on_rank, (folder, shape, dtypes, rounds, warmup), nprocs=RANKS)
        return [row for rank in range(RANKS) for row in torch.load(Path(folder, f"rows.{rank}.pt"))]


def failures(rows: Rows) -> list[str]:
    """Return in words which numbers do not agree and which claims fail; empty if all is right."""
    found = []
    peers = {(row["dtype"], row["rank"]): row for row in rows if row["case"] == PEER}
    for row in (row for row in rows if row["case"] != PEER):
        peer = peers[row["dtype"], row["rank"]]
        where = f"{row['case']}, {row['dtype']}, rank {row['rank']}"
        for key in ("loss", "grad_norm"):
            if abs(row[key] - peer[key]) > TOLERANCE[row["dtype"]] * abs(peer[key]):
                found.append(f"{where}: {key} {row[key]}, transformers' {peer[key]}")
        if row["saved_bytes"] >= peer["saved_bytes"]:
            found.append(f"{where}: saves {row['saved_bytes']} bytes, transformers {peer['saved_bytes']}")
        comparable = row["dtype"] == "float32" or row["case"].endswith(LEAN)
        if comparable and row["sent_bytes"] > peer["sent_bytes"]:
            found.append(f"{where}: sends {row['sent_bytes']} bytes, transformers {peer['sent_bytes']}")
    return found


def print_tables(rows: Rows) -> None:
    """Print rank 0's rows, and its collectives by phase and kind: calls, and MiB on the larger side."""
    mine = {f"{row['dtype']} {row['case']}": row for row in rows if row["rank"] == 0}
    cells = [
        {
            "MiB per rank and step": name,
            **{heading: row[key] / MIB for heading, key in _SIZES.items()},
            "calls": sum(row["calls"].values()),
            "ms": row["ms"],
            "ratio": row["ms_ratio"],
        }
        for name, row in mine.items()
    ]
    print_table(cells)
    for name, row in mine.items():
        parts = (
            f"{key} {calls} ({row['whole_bytes'][key] / MIB:.2f})" for key, calls in row["calls"].items()
        )
        console_of().print(f"{name}: {'; '.join(parts)}", highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the results; return the exit status."""
    parser = argparse.ArgumentParser(description="A rank's bytes beside transformers' own tp_plan.")
    parser.add_argument("--dtypes", nargs="+", choices=list(TOLERANCE), default=list(TOLERANCE))
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each row")
    parser.add_argument("--warmup", type=int, default=2, help="steps before")
    for item in fields(Shape):
        parser.add_argument(f"--{item.name}", type=int, default=item.default)
    parser.add_argument("--out", type=Path, help="where to write; by default into results/")
    options = parser.parse_args(argv)
    shape = Shape(**{item.name: getattr(options, item.name) for item in fields(Shape)})
    rows = measure(shape, options.dtypes, options.rounds, options.warmup)
    wrong = failures(rows)
    document = {
        "commit": commit(REPOSITORY),
        "versions": versions(),
        "hardware": {**hardware(torch.device("cpu")), "threads": 1},
        "load": os.getloadavg()[0],
        "ranks": RANKS,
        "shape": asdict(shape),
        "failures": wrong,
        "rows": rows,
    }
    path = options.out or RESULTS / f"parallel_peer_cpu_{datetime.now():%Y%m%d}.json"
    write_json(path, document)
    print_tables(rows)
    sys.stdout.write("".join(f"failed: {text}\n" for text in wrong) or "both claims hold\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
