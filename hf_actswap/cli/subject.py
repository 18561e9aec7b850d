"""What a command looks at: a model of shapes, divided as the configuration says, and the plan for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

from ..config import ActSwapConfig
from ..errors import Problem
from ..parallel import patch_model, tensor_parallel_group
from ..plan import Outline, outline
from .model_source import ModelError, dtype_name, model_on_meta, parameters_of
from .options import QuantizeName
from .plan_request import ModelRequest


@dataclass(frozen=True)
class Subject:
    """A model to plan for.

    Args:
        name: as the user named it.
        model: on ``meta``; rank 0's part of it where there are several.
        shape: its outline.
        parameters: of the whole model, adapters included.
        trained: how many of them are trained.
        dtype: of its weights.
        tensor_parallel_size: ranks that hold it together.
        quantize: type in which its frozen linear layers rest.
    """

    name: str
    model: nn.Module
    shape: Outline
    parameters: int
    dtype: str
    tensor_parallel_size: int
    trained: int
    quantize: QuantizeName | None = None

    def described(self) -> str:
        """Return it in one line."""
        layers = len(self.shape.layers)
        size = (
            f"{self.parameters / 1e9:.2f} B" if self.parameters >= 1e8 else f"{self.parameters / 1e6:.2f} M"
        )
        ranks = "" if self.tensor_parallel_size == 1 else f", rank 0 of {self.tensor_parallel_size}"
        base = f", {self.quantize} base" if self.quantize else ""
        part = f", {self.trained / 1e6:.2f} M trained" if self.trained < self.parameters else ""
        kind = self.shape.family or self.name
        return f"{kind}, {layers} layers, {size} parameters, {self.dtype}{base}{part}{ranks}"

    def document(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {
            "name": self.name,
            "family": self.shape.family,
            "num_layers": len(self.shape.layers),
            "parameters": self.parameters,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "functions_known": self.shape.functions_known,
            "trained": self.trained,
            "quantize": self.quantize,
        }


def with_tp(config: ActSwapConfig, tp: int | None) -> ActSwapConfig:
    """Return the configuration with another ``tensor_parallel_size``; with the same if ``tp`` is ``None``."""
    if tp is None:
        return config
    return replace(config, parallel_config=replace(config.parallel_config, tensor_parallel_size=tp))


@contextmanager
def subject(asked: ModelRequest, config: ActSwapConfig) -> Iterator[Subject]:
    """Make the model, as one rank holds it; within the block its forward runs on fake tensors.

    Args:
        asked: which model, and what of it is trained.
        config: whose ``parallel_config`` holds.

    Raises:
        ModelError: there is no such model.
        PatchError: it cannot be divided.
        PlanError: it has no decoder layers.
    """
    model, size = model_on_meta(asked), config.parallel_config.tensor_parallel_size
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    facts = parameters_of(model), dtype_name(model), size, trained, asked.quantize
    if size == 1:
        yield Subject(asked.name, model, outline(model), *facts)
        return
    if asked.quantize is not None:
        expected = "1 where weights are quantised"
        raise ModelError([Problem("parallel_config.tensor_parallel_size", expected, str(size))])
    with rank_0_of(size) as group:
        yield Subject(asked.name, model, _divided(model, config, group), *facts)


def _divided(model: nn.Module, config: ActSwapConfig, group: dist.ProcessGroup) -> Outline:
    patch_model(model, config.parallel_config, group)
    return outline(model)


class _AllSayTheSame(Store):
    """A store in which every rank has written what this one wrote: its keys end in the number of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[_without_rank(key)] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        return self._values[_without_rank(key)]

    def add(self, _key: str, amount: int) -> int:
        return amount

    def wait(self, _keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        """All have come."""

    def check(self, _keys: Sequence[str]) -> bool:
        return True


@contextmanager
def rank_0_of(size: int) -> Iterator[dist.ProcessGroup]:
    """Be rank 0 of a tensor-parallel group of ``size`` within the block: one process alone.

    So what a rank holds is known without the others. PyTorch's fake process group answers every collective at
    once and moves nothing. On fake tensors there is nothing to move.

    Raises:
        RuntimeError: there is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group exists already: this command pretends to be one of several")
    store = _AllSayTheSame()  # kept here: PyTorch holds its C++ part only
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None  # just made
        with tensor_parallel_group(group):
            yield group
    finally:
        dist.destroy_process_group()


def _without_rank(key: str) -> str:
    return key.rpartition("/")[0]
