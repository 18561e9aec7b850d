"""Tensor and sequence parallelism inside a layer: the group, the mappings, the named communications."""

from .group import Replicas, enclosing_group, tensor_parallel_group
from .mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)

__all__ = [
    "Replicas",
    "copy_to_tensor_model_parallel_region",
    "enclosing_group",
    "gather_from_sequence_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "tensor_parallel_group",
]
