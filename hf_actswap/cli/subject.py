"""What a command looks at: a model of shapes, divided as the configuration says, and the plan for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn

from ..config import ActSwapConfig
from ..parallel import patch_model
from ..plan import Outline, outline
from .model_source import dtype_name, model_on_meta, parameters_of
from .one_of_many import rank_0_of
from .options import DtypeName


@dataclass(frozen=True)
class Subject:
    """A model to plan for.

    Args:
        name: as the user named it.
        model: on ``meta``; rank 0's part of it where there are several.
        shape: its outline.
        parameters: of the whole model.
        dtype: of its weights.
        tensor_parallel_size: ranks that hold it together.
    """

    name: str
    model: nn.Module
    shape: Outline
    parameters: int
    dtype: str
    tensor_parallel_size: int

    def described(self) -> str:
        """Return it in one line."""
        layers = len(self.shape.layers)
        size = (
            f"{self.parameters / 1e9:.2f} B" if self.parameters >= 1e8 else f"{self.parameters / 1e6:.2f} M"
        )
        ranks = "" if self.tensor_parallel_size == 1 else f", rank 0 of {self.tensor_parallel_size}"
        return f"{self.shape.family or self.name}, {layers} layers, {size} parameters, {self.dtype}{ranks}"

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
        }


def with_tp(config: ActSwapConfig, tp: int | None) -> ActSwapConfig:
    """Return the configuration with another ``tensor_parallel_size``; with the same if ``tp`` is ``None``."""
    if tp is None:
        return config
    return replace(config, parallel_config=replace(config.parallel_config, tensor_parallel_size=tp))


@contextmanager
def subject(name: str, dtype: DtypeName | None, config: ActSwapConfig) -> Iterator[Subject]:
    """Make the model, as one rank holds it; within the block its forward runs on fake tensors.

    Args:
        name: see `model_on_meta`.
        dtype: of its weights.
        config: whose ``parallel_config`` holds.

    Raises:
        ModelError: there is no such model.
        PatchError: it cannot be divided.
        PlanError: it has no decoder layers.
    """
    model = model_on_meta(name, dtype)
    parameters, types = parameters_of(model), dtype_name(model)
    size = config.parallel_config.tensor_parallel_size
    if size == 1:
        yield Subject(name, model, outline(model), parameters, types, 1)
        return
    with rank_0_of(size) as group:
        yield Subject(name, model, _divided(model, config, group), parameters, types, size)


def _divided(model: nn.Module, config: ActSwapConfig, group: dist.ProcessGroup) -> Outline:
    patch_model(model, config.parallel_config, group)
    return outline(model)
