"""What column- and row-parallel linear layers have in common: sizes, settings, making of parameters."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from .sharded_module import ShardedModule
from .weights import (
    InitMethod,
    Partition,
    initial_part,
    kaiming_weight,
    like_parameter,
    uniform_bias,
)

PADDING_REFUSED = (
    "pad=True is for inference in NxD and refused here; choose a size that tensor_parallel_size divides, or, "
    "for a vocabulary, pad_output=True"
)


def sizes_of(full: Any) -> tuple[int, int]:
    """Return input and output features of a full linear layer."""
    if is_transposed(full):
        return full.nx, full.nf
    return full.in_features, full.out_features


def settings_of(full: Any) -> dict[str, Any]:
    """Return the arguments by which a parallel layer like a full one is made, without storage."""
    input_size, output_size = sizes_of(full)
    return {
        "input_size": input_size,
        "output_size": output_size,
        "bias": full.bias is not None,
        "dtype": full.weight.dtype,
        "device": "meta",
        "transposed": is_transposed(full),
    }


def is_transposed(full: nn.Module) -> bool:
    """Whether a layer is transformers' ``Conv1D``: linear, its weight ``[in, out]``."""
    return type(full).__name__ == "Conv1D"


class ParallelLinear(ShardedModule):
    """Base of `layers.ColumnParallelLinear` and `layers.RowParallelLinear`, which describe the arguments."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None,
        skip_bias_add: bool,
        pad: bool,
        group: dist.ProcessGroup | None,
        reduce_dtype: torch.dtype | None,
        transposed: bool,
    ) -> None:
        if pad:
            raise ValueError(PADDING_REFUSED)
        super().__init__(group)
        self.input_size, self.output_size = input_size, output_size
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.skip_bias_add, self.reduce_dtype, self.transposed = skip_bias_add, reduce_dtype, transposed
        self.master_weight: torch.Tensor | None = None

    def initialise(
        self,
        partition: Partition,
        bias_partition: Partition | None,
        bias: bool,
        init_method: InitMethod | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        keep_master_weight: bool,
    ) -> None:
        """Draw weight, then bias, as ``nn.Linear`` of the full sizes would."""
        rank, shape = self.tensor_model_parallel_group.rank(), [self.output_size, self.input_size]
        if self.transposed:
            shape.reverse()
        weight, full = initial_part(shape, partition, rank, init_method or kaiming_weight, dtype, device)
        self.divide("weight", partition)
        self.weight = nn.Parameter(weight)
        if keep_master_weight:
            self.master_weight = full
        self.bias = None
        if bias:
            fill_bias = uniform_bias(self.input_size)
            drawn, _ = initial_part((self.output_size,), bias_partition, rank, fill_bias, dtype, device)
            if bias_partition is not None:
                self.divide("bias", bias_partition)
            self.bias = nn.Parameter(drawn)

    def take(self, full: nn.Module) -> Self:
        """Take the rank's parts of a full layer's parameters, and its state."""
        rank = self.tensor_model_parallel_group.rank()
        for name, parameter in full.named_parameters(recurse=False):
            partition = self.partitions.get(name)
            with torch.no_grad():
                part = parameter.clone() if partition is None else partition.part(parameter, rank)
            setattr(self, name, like_parameter(part, parameter))
        return self.train(full.training)

    def extra_repr(self) -> str:
        return (
            f"input_size={self.input_size}, output_size={self.output_size}, bias={self.bias is not None}, "
            f"ranks={self.partitions['weight'].ranks}, "
            f"sequence_parallel_enabled={self.sequence_parallel_enabled}"
        )
