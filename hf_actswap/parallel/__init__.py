"""Divides the layers of a model among the ranks of a tensor-parallel group, and the sequence between them.

In: a Hugging Face model and a process group (`patch_model`), or NxD's layers used by hand (`layers`).
Out: the same model with column- and row-parallel layers; its state dict stays that of one process.

`decoder_layers` and `families` say which parameters are divided and how, `sequence_region` where hidden
states are parts of the sequence, `mappings` names what ranks exchange in forward, `gradients` sums gradients
of which each rank has a part, `rank_agreement` lets ranks fail together.

The package depends on process groups and modules, and not on YAML, plans or the engine.
"""

from . import layer_norm, layers, mappings
from .block_hooks import model_parallel_seed, rank_stream
from .collectives import Replicas, enclosing_group, enclosing_replicas, tensor_parallel_group
from .column_input import InputSettings, column_input
from .gradients import (
    MixedGradientError,
    TaggedGradients,
    UnsummedGradientError,
    allreduce_sequence_parallel_gradients,
    clip_grad_norm,
    forget_sums,
    get_grad_norm,
)
from .layer_norm import LayerNorm, RMSNorm
from .layers import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    SharedInput,
)
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region_with_dim,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    reduce_scatter_to_tensor_model_parallel_region_with_dim,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from .mesh import MeshError, ParallelMesh, build_mesh
from .patch_model import Patched, PatchError, patch_model
from .rank_agreement import LostRankError, LostRanks, RankAgreementError, check_agreement
from .vocabulary import from_parallel_logits_to_logprobs, parallel_causal_lm_loss, parallel_cross_entropy
from .weights import Partition

__all__ = [
    "ColumnParallelLinear",
    "GQAQKVColumnParallelLinear",
    "InputSettings",
    "LayerNorm",
    "LostRankError",
    "LostRanks",
    "MeshError",
    "MixedGradientError",
    "ParallelEmbedding",
    "ParallelMesh",
    "Partition",
    "PatchError",
    "Patched",
    "RMSNorm",
    "RankAgreementError",
    "Replicas",
    "RowParallelLinear",
    "SharedInput",
    "TaggedGradients",
    "UnsummedGradientError",
    "allreduce_sequence_parallel_gradients",
    "build_mesh",
    "check_agreement",
    "clip_grad_norm",
    "column_input",
    "copy_to_tensor_model_parallel_region",
    "enclosing_group",
    "enclosing_replicas",
    "forget_sums",
    "from_parallel_logits_to_logprobs",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region_with_dim",
    "get_grad_norm",
    "layer_norm",
    "layers",
    "mappings",
    "model_parallel_seed",
    "parallel_causal_lm_loss",
    "parallel_cross_entropy",
    "patch_model",
    "rank_stream",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "reduce_scatter_to_tensor_model_parallel_region_with_dim",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "tensor_parallel_group",
]
