"""The three projections of grouped-query attention in one layer: one gather, replicated kv heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from .column_input import InputSettings, column_input, linear
from .mappings import gather_from_tensor_model_parallel_region
from .sharded_module import ShardedModule
from .weights import (
    InitMethod,
    Partition,
    initial_part,
    kaiming_weight,
    uniform_bias,
    with_summed_gradient,
)


class GQAQKVColumnParallelLinear(ShardedModule):
    """Query, key and value projections of one input, each divided by rows; returns ``(q, k, v)``.

    With fewer kv heads than ranks, ``kv_size_multiplier`` consecutive ranks hold the same rows of key and
    value. Query rows are divided in their own order (as in Hugging Face's models), so a rank's query heads
    stand beside their kv heads, and nothing is permuted. The gradients of replicas are summed: they are
    complete and bitwise alike. The attribute ``replicated_over`` says how many ranks hold a parameter.

    Parameters: ``weight_q``, ``weight_k``, ``weight_v`` (``bias_..``); fused ``weight_qkv`` (``bias_qkv``),
    where a rank's rows are its q, then k, then v. Loading takes full tensors too.

    Args:
        input_size: ``H``.
        output_sizes: output features of q, and of k (v has as many), in the full layer.
        bias: whether there are biases; they are divided like the weights.
        gather_output: whether all features are returned; not together with sequence parallelism.
        dtype, device, init_method, sequence_parallel_enabled, sequence_dimension, keep_master_weight,
            tensor_model_parallel_group, reduce_dtype: see `layers.ColumnParallelLinear`; ``init_method``
            fills each of the three.
        kv_size_multiplier: number of ranks that hold the same kv heads; divides the number of ranks.
        fuse_qkv: whether q, k and v are one weight and one product. Ignored with a multiplier above 1, with
            which more ranks hold a kv row than a q row.

    Raises:
        ValueError: sizes that do not divide, or arguments that exclude each other.
        RuntimeError: no group.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        keep_master_weight: bool = False,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
        reduce_dtype: torch.dtype | None = torch.float32,
        sequence_dimension: int | None = None,
        tensor_model_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:
        if gather_output and sequence_parallel_enabled:
            raise ValueError("gather_output=True does not go with sequence_parallel_enabled")
        super().__init__(tensor_model_parallel_group)
        group = self.tensor_model_parallel_group
        query_size, kv_size = output_sizes
        self.gather_output, self.kv_size_multiplier = gather_output, kv_size_multiplier
        self.fuse_qkv = fuse_qkv and kv_size_multiplier == 1
        self.settings = (sequence_parallel_enabled, sequence_dimension or 0, reduce_dtype)
        self.query = Partition.of(0, query_size, group.size())
        self.kv = Partition.of(0, kv_size, group.size(), replicas=kv_size_multiplier)
        fill_weight = init_method or kaiming_weight
        kinds: dict[str, tuple[tuple[int, ...], InitMethod]] = {"weight": ((input_size,), fill_weight)}
        if bias:
            kinds["bias"] = (), uniform_bias(input_size)
        master: dict[str, torch.Tensor] = {}
        parts: dict[str, torch.Tensor] = {}
        for name, partition in (("q", self.query), ("k", self.kv), ("v", self.kv)):
            for kind, (rest, fill) in kinds.items():
                shape = (partition.full_size, *rest)
                part, full = initial_part(shape, partition, group.rank(), fill, dtype, device)
                parts[f"{kind}_{name}"] = part
                if full is not None and keep_master_weight:
                    master[f"{kind}_{name}"] = full
        self.master_weights = master
        for kind in kinds:
            self._register(kind, [parts[f"{kind}_{name}"] for name in "qkv"])

    def _register(self, kind: str, parts: Sequence[torch.Tensor]) -> None:
        if self.fuse_qkv:
            sizes = (self.query.full_size, self.kv.full_size, self.kv.full_size)
            self.divide(f"{kind}_qkv", Partition.of(0, sum(sizes), self.query.ranks, sections=sizes))
            self.register_parameter(f"{kind}_qkv", nn.Parameter(torch.cat(list(parts))))
            return
        for name, part in zip("qkv", parts, strict=True):
            self.divide(f"{kind}_{name}", self.query if name == "q" else self.kv)
            self.register_parameter(f"{kind}_{name}", nn.Parameter(part))

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v: ``[.., S, .., size / tp]`` (kv: times the multiplier), or all features."""
        group = self.tensor_model_parallel_group
        suffixes = ["qkv"] if self.fuse_qkv else ["q", "k", "v"]
        weights = [self.get_parameter(f"weight_{suffix}") for suffix in suffixes]
        sequence_parallel, dim, reduce_dtype = self.settings
        settings = InputSettings(group, sequence_parallel, dim, reduce_dtype, in_autocast_dtype=True)
        shared = column_input(input_, weights, settings)
        outputs = []
        for suffix, weight in zip(suffixes, weights, strict=True):
            output = linear(shared, weight, group)
            bias = self._parameters.get(f"bias_{suffix}")
            if bias is not None:
                output = output + with_summed_gradient(bias, group).to(output.dtype)
            outputs.append(output)
        if self.fuse_qkv:
            sizes = [self.query.local_size, self.kv.local_size, self.kv.local_size]
            outputs = list(outputs[0].split(sizes, -1))
        if self.gather_output:
            counts = (1, self.kv_size_multiplier, self.kv_size_multiplier)
            outputs = [self._gathered(output, n) for output, n in zip(outputs, counts, strict=True)]
        q, k, v = outputs
        return q, k, v

    def _gathered(self, output: torch.Tensor, replicas: int) -> torch.Tensor:
        """Return all features, of replicas only the first: others get no gradient, so its sum is right."""
        group = self.tensor_model_parallel_group
        whole = gather_from_tensor_model_parallel_region(output, group)
        if replicas == 1:
            return whole
        parts = whole.unflatten(-1, (group.size() // replicas, replicas, -1))
        return parts[..., 0, :].flatten(-2)
