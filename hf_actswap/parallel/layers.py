"""Linear layers whose weight is divided among the ranks of a tensor-parallel group, as NxD names them.

`ColumnParallelLinear` divides the output features, `RowParallelLinear` the input features; a pair of them
needs one communication before and one after. `column_input` describes how a column layer gathers its input,
and its backward; a row layer multiplies the rank's features (``F.linear``, ordinary autograd) and sums over
the ranks by a function of `mappings`. `SharedInput` gathers one input for several column-parallel layers.

Unlike NxD's, they are right for any sequence dimension and dtype, and a row layer's bias is initialised alike
for any number of ranks. All raise ValueError for sizes that do not divide and for arguments that exclude each
other, and RuntimeError without a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .column_input import InputSettings, column_input, linear, weight_of_linear
from .mappings import (
    Tokens,
    all_gather,
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
    sum_of_shares,
)
from .weights import (
    InitMethod,
    Partition,
    ShardedModule,
    initial_part,
    kaiming_weight,
    tag,
    uniform_bias,
    with_summed_gradient,
)

PADDING_UNSUPPORTED = (
    "pad=True is for inference in NxD, and rejected; choose a size that tensor_parallel_size divides, or, "
    "for a vocabulary, pad_output=True"
)


def sizes_of(full: Any) -> tuple[int, int]:
    return (full.nx, full.nf) if is_transposed(full) else (full.in_features, full.out_features)


def settings_of(full: Any) -> dict[str, Any]:
    """Return the constructor arguments of a parallel layer for a full one, on the device ``meta``."""
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
    """Base of `ColumnParallelLinear` and `RowParallelLinear`, which describe the arguments."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        sizes: tuple[int, int],
        sequence_parallel_enabled: bool,
        sequence_dimension: int | None,
        skip_bias_add: bool,
        pad: bool,
        group: dist.ProcessGroup | None,
        reduce_dtype: torch.dtype | None,
        transposed: bool,
    ) -> None:
        if pad:
            raise ValueError(PADDING_UNSUPPORTED)
        super().__init__(group)
        self.input_size, self.output_size = sizes
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

    def extra_repr(self) -> str:
        return (
            f"input_size={self.input_size}, output_size={self.output_size}, bias={self.bias is not None}, "
            f"ranks={self.partitions['weight'].ranks}, "
            f"sequence_parallel_enabled={self.sequence_parallel_enabled}"
        )


class ColumnParallelLinear(ParallelLinear):
    """``y = x W^T + b`` with the rows of ``W`` divided among the ranks.

    Input ``[.., H]``, alike on all ranks; under sequence parallelism this rank's part of the sequence,
    ``S / tp`` in ``sequence_dimension``. Output ``[.., output_size / tp]`` for the whole sequence, or
    ``[.., output_size]`` with ``gather_output``.

    Args:
        input_size, output_size: features of the full layer.
        bias: whether there is one; divided like the weight, with ``gather_output`` full on all ranks.
        gather_output: whether the output features are gathered; not together with sequence parallelism.
        dtype, device: dtype and device of the parameters; ``None``: PyTorch's defaults.
        stride: the weight consists of this many equal parts, each divided among the ranks (of a fused
            ``[Q; K; V]``: 3).
        init_method: fills the full weight; default as ``nn.Linear``.
        sequence_parallel_enabled, sequence_dimension: see above; the dimension is 0 by default.
        keep_master_weight: whether the full weight is kept in ``master_weight``.
        skip_bias_add: whether ``(output, bias)`` is returned, the bias not added.
        pad: rejected.
        tensor_model_parallel_group: the group; ``None``: that of the enclosing `tensor_parallel_group`.
        reduce_dtype: dtype in which input gradients are summed over the ranks; ``None``: their own.
        sections: sizes of the parts of the weight that are divided one by one, in place of ``stride``.
        replicas: number of consecutive ranks that hold the same rows, for each section or all (kv heads
            fewer than ranks); their gradients are summed, so that they stay alike.
        pad_output: whether zero rows fill the output up if the ranks do not divide it (a vocabulary).
        input_is_shared: whether the input comes from `column_input` already (see `SharedInput`).
        transposed: whether the weight is ``[input_size, output_size]``, as in transformers' ``Conv1D``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        tensor_model_parallel_group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        *,
        sections: Sequence[int] | None = None,
        replicas: int | Sequence[int] = 1,
        pad_output: bool = False,
        input_is_shared: bool = False,
        transposed: bool = False,
    ) -> None:
        if gather_output and (sequence_parallel_enabled or pad_output or replicas != 1):
            raise ValueError(
                "gather_output=True cannot be combined with sequence_parallel_enabled, pad_output or "
                "replicas; pass gather_output=False"
            )
        sequence = sequence_parallel_enabled, sequence_dimension
        group, sizes = tensor_model_parallel_group, (input_size, output_size)
        super().__init__(sizes, *sequence, skip_bias_add, pad, group, reduce_dtype, transposed)
        self.gather_output, self.input_is_shared = gather_output, input_is_shared
        ranks = self.tensor_model_parallel_group.size()
        of_outputs = output_size, ranks, stride, sections, replicas, pad_output
        partition = Partition.of(1 if transposed else 0, *of_outputs)
        bias_partition = None if gather_output else Partition.of(0, *of_outputs)
        self.initialise(partition, bias_partition, bias, init_method, dtype, device, keep_master_weight)

    @classmethod
    def from_linear(cls, full: nn.Module, *, gather_output: bool = False, **settings: Any) -> Self:
        """Return this rank's part of a full layer (or ``Conv1D``), the same on every rank.

        It keeps dtype, device, training mode and attributes; ``settings`` are further arguments of the
        constructor.
        """
        return cls(**{**settings_of(full), "gather_output": gather_output, **settings}).take(full)

    def input_settings(self, keep_gathered: bool = False, in_autocast_dtype: bool = False) -> InputSettings:
        return InputSettings(
            self.tensor_model_parallel_group,
            self.sequence_parallel_enabled,
            self.sequence_dimension,
            self.reduce_dtype,
            keep_gathered,
            in_autocast_dtype,
        )

    @property
    def input_parts(self) -> int:
        """Number of parts into which the sequence of the input is divided."""
        return self.tensor_model_parallel_group.size() if self.sequence_parallel_enabled else 1

    def whole_input(self, input_: torch.Tensor, weights: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Return the gathered input; gradients of ``weights`` are computed by its node (`column_input`)."""
        return column_input(input_, weights, self.input_settings(in_autocast_dtype=True))

    def forward(self, input_: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        group = self.tensor_model_parallel_group
        if group.size() == 1 and not self.skip_bias_add:
            return F.linear(input_, weight_of_linear(self.weight, self.transposed), self.bias)
        if not self.input_is_shared:
            input_ = self.whole_input(input_, [self.weight])
        output = linear(input_, self.weight, group, self.transposed)
        if self.gather_output:
            output = gather_from_tensor_model_parallel_region(output, group)
        bias = None if self.bias is None else with_summed_gradient(self.bias, group)
        if self.skip_bias_add:
            return output, bias
        return output if bias is None else output + bias.to(output.dtype)


class RowParallelLinear(ParallelLinear):
    """``y = x W^T + b`` with the columns of ``W`` divided among the ranks, and summed over them.

    Input ``[.., input_size / tp]`` for the whole sequence (``input_is_parallel``), or ``[.., input_size]``,
    alike on all ranks, of which each takes its part. Output ``[.., output_size]``, alike on all ranks; under
    sequence parallelism this rank's part, ``S / tp`` in ``sequence_dimension``.

    The bias is full, is added once, after the sum, and carries the tag ``sequence_parallel_enabled``: under
    sequence parallelism its gradient covers the rank's tokens only.

    Args:
        input_is_parallel: whether the input is this rank's features; sequence parallelism needs it.
        reduce_output: whether shares are summed over the ranks; if not, this rank's share is returned.
        reduce_dtype: dtype to which shares are cast before they are summed; the sum is cast back. ``None``:
            their own.
        others: see `ColumnParallelLinear`.

    Attributes:
        tokens: shape of the tokens whose outputs are summed; ``None``: as in the input.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        *,
        sections: Sequence[int] | None = None,
        transposed: bool = False,
    ) -> None:
        if sequence_parallel_enabled and not input_is_parallel:
            raise ValueError("sequence_parallel_enabled needs input_is_parallel=True")
        if bias and not reduce_output and not skip_bias_add:
            raise ValueError(
                "reduce_output=False would add the bias on every rank; pass bias=False or skip_bias_add=True"
            )
        sequence = sequence_parallel_enabled, sequence_dimension
        group, sizes = tensor_model_parallel_group, (input_size, output_size)
        super().__init__(sizes, *sequence, skip_bias_add, pad, group, reduce_dtype, transposed)
        self.input_is_parallel, self.reduce_output = input_is_parallel, reduce_output
        ranks = self.tensor_model_parallel_group.size()
        partition = Partition.of(0 if transposed else 1, input_size, ranks, stride, sections)
        self.tokens: Tokens | None = None
        tag(self, "bias", sequence_parallel_enabled=sequence_parallel_enabled)
        self.initialise(partition, None, bias, init_method, dtype, device, keep_master_weight)

    @classmethod
    def from_linear(cls, full: nn.Module, *, input_is_parallel: bool = True, **settings: Any) -> Self:
        """Return this rank's part of a full layer; see `ColumnParallelLinear.from_linear`."""
        return cls(**{**settings_of(full), "input_is_parallel": input_is_parallel, **settings}).take(full)

    def forward(self, input_: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        group = self.tensor_model_parallel_group
        if group.size() == 1 and not self.skip_bias_add:
            return F.linear(input_, weight_of_linear(self.weight, self.transposed), self.bias)
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, group)
        output = F.linear(input_, weight_of_linear(self.weight, self.transposed))
        if self.reduce_output and group.size() > 1:
            dim = self.sequence_dimension if self.sequence_parallel_enabled else None
            output = sum_of_shares(output, group, dim, self.reduce_dtype, self.tokens)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias.to(output.dtype)


class GatheredColumns(ColumnParallelLinear):
    """A column-parallel layer with gathered output, whose consumers differ by rank: gradients are summed."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        own: Any = super().forward(input_)
        return all_gather(own, -1, self.tensor_model_parallel_group, True, self.reduce_dtype)


class SplitRow(RowParallelLinear):
    """A row-parallel layer that gets all features and takes this rank's part; their gradient is partial."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        group = self.tensor_model_parallel_group
        return super().forward(input_.chunk(group.size(), -1)[group.rank()])


class SharedInput:
    """One input for several column-parallel layers, such as q, k and v: one gather, one saved shard.

    Call it with the input of the layers, and call the layers with its result. Settings are the first layer's,
    read at each call.

    Args:
        layers: layers of one group, with equal settings; from now on they only work with its result.
        keep_gathered: whether the gathered input is saved, and not gathered again in backward.
        in_autocast_dtype: as in `InputSettings`; for an input that only these layers read.
    """

    def __init__(
        self,
        layers: Sequence[ColumnParallelLinear],
        keep_gathered: bool = False,
        in_autocast_dtype: bool = False,
    ) -> None:
        if len({layer.input_settings() for layer in layers}) != 1:
            raise ValueError("layers that share an input must have the same group and sequence settings")
        self.layers, self.keep_gathered = tuple(layers), keep_gathered
        self.in_autocast_dtype = in_autocast_dtype
        for layer in layers:
            layer.input_is_shared = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input for each layer: ``[.., S / tp, .., H]`` gathered to ``[.., S, .., H]``."""
        settings = self.layers[0].input_settings(self.keep_gathered, self.in_autocast_dtype)
        return column_input(x, [layer.weight for layer in self.layers], settings)


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
        kv_size_multiplier: number of ranks that hold the same kv heads; divides the number of ranks.
        fuse_qkv: whether q, k and v are one weight and one product. Ignored with a multiplier above 1, with
            which more ranks hold a kv row than a q row.
        others: see `ColumnParallelLinear`; ``init_method`` fills each of the three.
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
        self.master_weights: dict[str, torch.Tensor] = {}
        parts: dict[str, torch.Tensor] = {}
        for name, partition in (("q", self.query), ("k", self.kv), ("v", self.kv)):
            for kind, (rest, fill) in kinds.items():
                shape = (partition.full_size, *rest)
                part, full = initial_part(shape, partition, group.rank(), fill, dtype, device)
                parts[f"{kind}_{name}"] = part
                if full is not None and keep_master_weight:
                    self.master_weights[f"{kind}_{name}"] = full
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


class ParallelEmbedding(ShardedModule):
    """A table of embeddings, divided by rows (ids), or by columns with ``shard_across_embedding``.

    By rows, a rank looks its own ids up, has zeros for the others, and the ranks' results are summed: for
    each id one of them is not zero, so the sum is exact in any dtype. Ids ``[B, S]`` give ``[B, S, H]``,
    alike on all ranks; under sequence parallelism with ``sequence_dimension`` 0 (NxD's default) the layout
    changes to ``[S / tp, B, H]``, with 1 it is ``[B, S / tp, H]``. Gradients are complete: no tag.

    A number of ids that the ranks do not divide is filled up with zero rows, to the same number on each rank.
    No id leads to them, so they stay zero. The state dict of a rank has them; loading takes the rank's part
    of a full table without them, and `full_parameter` returns the table without them.

    Args:
        num_embeddings, embedding_dim: sizes of the full table.
        padding_idx, sparse: as ``nn.Embedding``.
        max_norm, norm_type: rejected: they write into the table in forward.
        scale_grad_by_freq: rejected by rows: a rank does not see how often the others' ids occur.
        init_method: fills the full table.
        shard_across_embedding: whether ``embedding_dim`` is divided; not together with sequence parallelism.
        pad: rejected; rows are filled up without it.
        collect_output: whether results are summed, or gathered, over the ranks.
        others: see `ColumnParallelLinear`.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = nn.init.normal_,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: dist.ProcessGroup | None = None,
        sequence_dimension: int | None = None,
        collect_output: bool = True,
    ) -> None:
        if pad:
            raise ValueError("pad=True: not needed, rows are filled up where the ranks do not divide them")
        if max_norm is not None:
            raise ValueError("max_norm writes into the table in forward, which a divided table cannot do")
        if scale_grad_by_freq and not shard_across_embedding:
            raise ValueError("scale_grad_by_freq needs shard_across_embedding=True")
        if shard_across_embedding and sequence_parallel_enabled:
            raise ValueError("shard_across_embedding does not go with sequence_parallel_enabled")
        super().__init__(tensor_model_parallel_group)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx={padding_idx} is not among {num_embeddings} embeddings")
        self.num_embeddings, self.embedding_dim, self.sparse = num_embeddings, embedding_dim, sparse
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.scale_grad_by_freq, self.collect_output = scale_grad_by_freq, collect_output
        self.shard_across_embedding = shard_across_embedding
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        group = self.tensor_model_parallel_group
        size = embedding_dim if shard_across_embedding else num_embeddings
        by_rows = not shard_across_embedding
        partition = Partition.of(0 if by_rows else 1, size, group.size(), padded=by_rows)
        shape = (num_embeddings, embedding_dim)

        def fill(table: torch.Tensor) -> None:
            init_method(table)
            if self.padding_idx is not None:
                table[self.padding_idx] = 0

        table, _ = initial_part(shape, partition, group.rank(), fill, dtype, device)
        self.divide("weight", partition)
        self.weight = nn.Parameter(table)

    @classmethod
    def from_embedding(cls, full: nn.Embedding, **settings: Any) -> Self:
        """Return this rank's part of a full embedding, whose dtype, device, flags and attributes it keeps.

        ``settings`` are further arguments of the constructor.
        """
        return cls(
            full.num_embeddings,
            full.embedding_dim,
            full.padding_idx,
            full.max_norm,
            full.norm_type,
            full.scale_grad_by_freq,
            full.sparse,
            device="meta",
            dtype=full.weight.dtype,
            **settings,
        ).take(full)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        group = self.tensor_model_parallel_group
        if self.shard_across_embedding:
            found = self._lookup(input_, self.padding_idx)
            gathers = self.collect_output and group.size() > 1
            return gather_from_tensor_model_parallel_region(found, group) if gathers else found
        found = self._own_rows(input_, group)
        dim = self.sequence_dimension if self.sequence_parallel_enabled else None
        if dim == 0:
            found = found.transpose(0, 1).contiguous()
        return sum_of_shares(found, group, dim) if self.collect_output and group.size() > 1 else found

    def _own_rows(self, ids: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        if group.size() == 1:
            return self._lookup(ids, self.padding_idx)
        rows = self.partitions["weight"].local_size
        first = group.rank() * rows
        local = ids - first
        elsewhere = (local < 0) | (local >= rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < rows else None
        found = self._lookup(local.masked_fill(elsewhere, 0), padding)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0)

    def _lookup(self, ids: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
        flags = {"scale_grad_by_freq": self.scale_grad_by_freq, "sparse": self.sparse}
        return F.embedding(ids, self.weight, padding_idx, **flags)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.partitions['weight'].ranks}"
