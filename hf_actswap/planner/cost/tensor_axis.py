"""Predicts the collectives of a step of a tensor-parallel model: their bytes, and how long they take.

They are read off the model as `parallel` divides it; a test compares the bytes with counted ones.

Where layers overlap a collective with compute, the longer of the two counts. In backward the input of
column-parallel projections is gathered again beside the products that make its gradient, and that gradient is
summed beside the products that make the weights' gradients (`parallel.column_input`). Each of these products
is assumed to take as long as the projections in forward, which do the same arithmetic. Compute waits for all
other collectives, so their time is added. A `Profile` from fake tensors contains no communication.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from ...parallel import ColumnParallelLinear, GQAQKVColumnParallelLinear, RowParallelLinear
from ...parallel.collectives import sum_dtype
from ...parallel.gradients import TAG
from ...plan.actions import Scope
from ...plan.model_structure import LayerStructure, ModelStructure
from ..profile import Profile
from .exchanges import Exchange

_FLOAT32_BYTES = 4
_LOSS_VALUES = 3
"""Values that the ranks' loss exchanges for each token: the largest logit, and two sums."""


def tensor_axis(model: nn.Module, structure: ModelStructure, profile: Profile) -> tuple[Exchange, ...]:
    """Return the exchanges of one step of a divided model.

    Args:
        model: one rank's model, as `parallel.patch_model` leaves it; it may be on ``meta``.
        structure: structure of the model.
        profile: a step without a plan, which gives batch and times. Activations are assumed to have the
            weights' dtype: under autocast they may be half as large.
    """
    return tuple(_Axis(model, structure, profile).exchanges()) if structure.communicates else ()


class _Axis:
    def __init__(self, model: nn.Module, structure: ModelStructure, profile: Profile) -> None:
        self._model, self._structure = model, structure
        weight = next(model.parameters())
        self._size_bytes = weight.element_size()
        linears = (module for module in model.modules() if isinstance(module, RowParallelLinear))
        first = next(linears, None)
        summed = None if first is None else first.reduce_dtype
        self._sum_bytes = sum_dtype(weight.dtype, summed).itemsize
        batch, length = profile.batch_shape
        self._tokens = batch * length
        embedding = next(model.get_submodule(structure.embedding or "").parameters())
        self._hidden = self._tokens * embedding.shape[-1]
        self._ms: defaultdict[tuple[Scope | None, str], float] = defaultdict(float)
        for op_event in profile.op_events:
            self._ms[op_event.call[0], op_event.call[1]] += op_event.forward_ms
        self._divided = any(
            "all_gather" in path for layer in structure.layers for path in layer.communications
        )
        """Whether the sequence is divided too: sequence parallelism."""

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
            values = len(tagged) + sum(weight.numel() for weight in tagged)  # each has a flag
            yield Exchange("after backward", "all_reduce", values * self._size_bytes)

    def _input(self, plain: int, summed: int, beside_ms: float) -> Iterator[Exchange]:
        if not self._divided:
            yield Exchange("backward", "all_reduce", summed, beside_ms)
            return
        yield Exchange("forward", "all_gather", plain)
        yield Exchange("backward", "re-gather", plain, beside_ms)
        yield Exchange("backward", "reduce_scatter", summed, beside_ms)

    def _inputs(self, layer: LayerStructure) -> list[float]:
        """Return, for each input that projections of a layer share, the ms of their products in forward."""
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
        """Yield, for weights whose parts several ranks hold alike, how many ranks, and the bytes."""
        for module in self._model.modules():
            if isinstance(module, ColumnParallelLinear):
                replicas: int = max(module.partitions["weight"].replicas)
                if replicas > 1:
                    yield replicas, module.weight.numel() * self._size_bytes
