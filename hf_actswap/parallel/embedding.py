"""An embedding whose table is divided among the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from .communication import sum_of_shares
from .mappings import gather_from_tensor_model_parallel_region
from .sharded_module import ShardedModule
from .weights import InitMethod, Partition, initial_part, like_parameter


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
        padding_idx: as ``nn.Embedding``; 0 and negative ones included.
        max_norm, norm_type: rejected: they write into the table in forward.
        scale_grad_by_freq: rejected by rows: a rank does not see how often the others' ids occur.
        sparse: as ``nn.Embedding``.
        init_method: fills the full table.
        device, dtype: device and dtype of the table.
        shard_across_embedding: whether ``embedding_dim`` is divided; not together with sequence parallelism.
        pad: rejected; rows are filled up without it.
        sequence_parallel_enabled, sequence_dimension: see above.
        tensor_model_parallel_group: the group; ``None``: that of the enclosing `tensor_parallel_group`.
        collect_output: whether results are summed, or gathered, over the ranks.

    Raises:
        ValueError: sizes that do not divide, or arguments that are rejected.
        RuntimeError: no group.
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
        partition = Partition.of(
            int(shard_across_embedding), size, group.size(), padded=not shard_across_embedding
        )
        shape = (num_embeddings, embedding_dim)

        def fill(table: torch.Tensor) -> None:
            init_method(table)
            if self.padding_idx is not None:
                table[self.padding_idx] = 0

        table, _ = initial_part(shape, partition, group.rank(), fill, dtype, device)
        self.divide("weight", partition)
        self.weight = nn.Parameter(table)

    @classmethod
    def from_embedding(
        cls,
        full: nn.Embedding,
        *,
        shard_across_embedding: bool = False,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        tensor_model_parallel_group: dist.ProcessGroup | None = None,
    ) -> ParallelEmbedding:
        """Return this rank's part of a full embedding, whose dtype, device, flags and attributes it keeps."""
        made = cls(
            full.num_embeddings,
            full.embedding_dim,
            full.padding_idx,
            full.max_norm,
            full.norm_type,
            full.scale_grad_by_freq,
            full.sparse,
            device="meta",
            dtype=full.weight.dtype,
            shard_across_embedding=shard_across_embedding,
            sequence_parallel_enabled=sequence_parallel_enabled,
            sequence_dimension=sequence_dimension,
            tensor_model_parallel_group=tensor_model_parallel_group,
        )
        rank = made.tensor_model_parallel_group.rank()
        weight: nn.Parameter = full.get_parameter("weight")
        with torch.no_grad():
            part = made.partitions["weight"].part(weight, rank)
        made.weight = like_parameter(part, weight)
        return made.train(full.training)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Look ``[B, S]`` ids up; see the class for the shapes returned."""
        group = self.tensor_model_parallel_group
        if self.shard_across_embedding:
            found = self._lookup(input_, self.padding_idx)
            gathers = self.collect_output and group.size() > 1
            return gather_from_tensor_model_parallel_region(found, group) if gathers else found
        found = self._own_rows(input_, group)
        moves = self.sequence_parallel_enabled and self.sequence_dimension == 0
        if moves:
            found = found.transpose(0, 1).contiguous()
        if not self.collect_output or group.size() == 1:
            return found
        return sum_of_shares(
            found, group, self.sequence_dimension if self.sequence_parallel_enabled else None
        )

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
        return F.embedding(
            ids,
            self.weight,
            padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            sparse=self.sparse,
        )

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.partitions['weight'].ranks}"
