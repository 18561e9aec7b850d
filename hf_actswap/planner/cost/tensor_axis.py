"""What the ranks of one divided model tell each other in a step, and how long that takes: on paper.

Read off the model as `parallel` divides it; a test holds the bytes against those that are counted. Time is
that of a ring (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"; the factors of
``nccl-tests``): ``(n - 1) / n`` of the larger side at the rate of the fabric, twice that for an all-reduce,
and a latency for each. All ranks are taken to be in one machine.

What the layers overlap counts with what is longer: in backward the input of column-parallel projections is
gathered again beside the products that make its gradient, and that gradient is summed beside the products
that make the weights' gradients (`parallel.column_input`). Each of the two is taken to last as long as the
projections do in forward, which do the same arithmetic. Everything else is waited for, and is added. Nothing
of it is in a `Profile`: fake tensors communicate nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ...parallel import ColumnParallelLinear, GQAQKVColumnParallelLinear, RowParallelLinear
from ...parallel.collectives import sum_dtype
from ...parallel.gradients import TAG
from ...plan.actions import Scope
from ...plan.model_structure import LayerStructure, ModelStructure
from ..profile import Profile
from ..record.devices import Fabric

Phase = Literal["forward", "backward", "after backward"]
Kind = Literal["all_gather", "re-gather", "reduce_scatter", "all_reduce", "all_to_all"]
"""``re-gather``: what forward has gathered, once more in backward."""

_FLOAT32_BYTES = 4
_LOSS_VALUES = 3
"""For each token: the largest logit, and two sums."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One collective over the tensor axis.

    Args:
        phase: of the step.
        kind: of collective.
        whole_bytes: of its larger side.
        beside_ms: compute that is under way meanwhile.
    """

    phase: Phase
    kind: Kind
    whole_bytes: int
    beside_ms: float = 0.0

    def ring_bytes(self, ranks: int) -> float:
        """Return what a rank sends."""
        return (2 if self.kind == "all_reduce" else 1) * self.whole_bytes * (ranks - 1) / ranks

    def ms(self, ranks: int, fabric: Fabric) -> float:
        """Return how long it takes."""
        return self.ring_bytes(ranks) / fabric.bytes_per_ms + fabric.latency_ms


@dataclass(frozen=True, slots=True)
class Exchanged:
    """All exchanges of a step.

    Args:
        sent_bytes: by a rank.
        collectives: how many.
        ms: that they take.
        added_ms: of it, what no compute hides.
    """

    sent_bytes: int
    collectives: int
    ms: float
    added_ms: float


def exchanged(exchanges: Iterable[Exchange], ranks: int, fabric: Fabric) -> Exchanged:
    """Add up the exchanges of a step of ``ranks`` ranks."""
    found = list(exchanges) if ranks > 1 else []
    times = [item.ms(ranks, fabric) for item in found]
    return Exchanged(
        sent_bytes=round(sum(item.ring_bytes(ranks) for item in found)),
        collectives=len(found),
        ms=sum(times),
        added_ms=sum(max(ms - item.beside_ms, 0.0) for ms, item in zip(times, found, strict=True)),
    )


def tensor_axis(model: nn.Module, structure: ModelStructure, profile: Profile) -> tuple[Exchange, ...]:
    """Return the exchanges of one step of a divided model.

    Args:
        model: one rank's, as `parallel.patch_model` leaves it; on ``meta``, too.
        structure: of it.
        profile: of a step without a plan, whose batch and times count. Activations are taken to be of the
            weights' dtype: under autocast they may be half of that.
    """
    return tuple(_Axis(model, structure, profile).exchanges()) if structure.communicates else ()


class _Axis:
    def __init__(self, model: nn.Module, structure: ModelStructure, profile: Profile) -> None:
        self._model, self._structure = model, structure
        weight = next(model.parameters())
        self._size_bytes = weight.element_size()
        linears = [module for module in model.modules() if isinstance(module, RowParallelLinear)]
        first = linears[0] if linears else None
        summed = None if first is None else first.reduce_dtype
        self._sum_bytes = sum_dtype(weight.dtype, summed).itemsize
        batch, length = profile.batch_shape
        self._tokens = batch * length
        self._hidden = self._tokens * _hidden_size(model, structure)
        self._ms: defaultdict[tuple[Scope | None, str], float] = defaultdict(float)
        for op_event in profile.op_events:
            self._ms[op_event.call[0], op_event.call[1]] += op_event.forward_ms
        self._divided = any(
            "all_gather" in path for layer in structure.layers for path in layer.communications
        )
        """Whether the sequence is: sequence parallelism."""

    def exchanges(self) -> Iterator[Exchange]:
        plain, summed = self._hidden * self._size_bytes, self._hidden * self._sum_bytes
        yield Exchange("forward", "all_reduce", plain)  # the embedding, of which each rank has some words
        for layer in self._structure.layers:
            for beside_ms in self._inputs(layer):
                yield from self._input(plain, summed, beside_ms)
            for path in layer.communications:
                if path.endswith("reduce_scatter"):
                    yield Exchange("forward", "reduce_scatter", summed)
                    yield Exchange("backward", "all_gather", plain)
                elif path.endswith("all_reduce"):
                    yield Exchange("forward", "all_reduce", summed)
        yield from self._input(plain, summed, self._ms["head", ""])
        if self._divided:
            yield Exchange("backward", "all_gather", plain)  # where the sequence was cut
        yield Exchange("forward", "all_reduce", _LOSS_VALUES * self._tokens * _FLOAT32_BYTES)
        for replicas, size_bytes in self._replicated():
            yield Exchange("backward", "all_to_all", replicas * size_bytes)
        tagged = [weight for weight in self._model.parameters() if getattr(weight, TAG, False)]
        if self._divided and tagged:
            flags = len(tagged)
            values = sum(weight.numel() for weight in tagged)
            yield Exchange("after backward", "all_reduce", (values + flags) * self._size_bytes)

    def _input(self, plain: int, summed: int, beside_ms: float) -> Iterator[Exchange]:
        """What column-parallel projections read together."""
        if not self._divided:
            yield Exchange("backward", "all_reduce", summed, beside_ms)
            return
        yield Exchange("forward", "all_gather", plain)
        yield Exchange("backward", "re-gather", plain, beside_ms)
        yield Exchange("backward", "reduce_scatter", summed, beside_ms)

    def _inputs(self, layer: LayerStructure) -> list[float]:
        """Each input that projections of a layer share: ms of their products in forward."""
        root = self._model.get_submodule(layer.module_path)
        shared: dict[str, float] = {}
        for path, module in root.named_modules():
            if isinstance(module, (ColumnParallelLinear, GQAQKVColumnParallelLinear)):
                parent = path.rpartition(".")[0]
                shared[parent] = shared.get(parent, 0.0) + self._ms[layer.index, f"{path}.linear"]
        gathers = [path for path in layer.communications if path.endswith("all_gather")]
        count = len(gathers) if self._divided else len(shared)
        return [*shared.values(), *([0.0] * count)][:count]

    def _replicated(self) -> Iterator[tuple[int, int]]:
        """Weights of which several ranks hold the same part: how many ranks, and the bytes."""
        for module in self._model.modules():
            if isinstance(module, ColumnParallelLinear):
                replicas: Sequence[int] = module.partitions["weight"].replicas
                if max(replicas) > 1:
                    yield max(replicas), module.weight.numel() * self._size_bytes


def _hidden_size(model: nn.Module, structure: ModelStructure) -> int:
    embedding: nn.Module = model.get_submodule(structure.embedding or "")
    weights: Mapping[str, nn.Parameter] = dict(embedding.named_parameters())
    return int(next(iter(weights.values())).shape[-1])
