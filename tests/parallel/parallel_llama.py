"""A tiny Llama of parallel layers, patched together from the mappings in a few lines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaForCausalLM

from hf_actswap.parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from tests.engine.tiny_models import tiny_llama

SEQUENCE_DIM = 1

Mapping = Callable[[torch.Tensor], torch.Tensor]


def parallel_llama(group: dist.ProcessGroup, sequence_parallel: bool) -> LlamaForCausalLM:
    """Return a Llama whose layers are tensor-parallel over ``group``; its shapes are one rank's.

    Norms, embedding and head are alike on all ranks, projections differ. With sequence parallelism each rank
    holds its part of the sequence between the layers' projections.
    """
    model = tiny_llama(use_cache=False, attention_dropout=0.1)
    torch.manual_seed(100 + group.rank())
    for name, parameter in model.model.layers.named_parameters():
        if name.endswith("proj.weight"):
            nn.init.normal_(parameter, std=0.05)
    at: dict[str, Any] = {"sequence_dimension": SEQUENCE_DIM, "process_group": group}
    if sequence_parallel:
        enter = partial(gather_from_sequence_parallel_region, **at)
        leave = partial(reduce_scatter_to_sequence_parallel_region, **at)
    else:
        enter = partial(copy_to_tensor_model_parallel_region, process_group=group)
        leave = partial(reduce_from_tensor_model_parallel_region, process_group=group)
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _map_output(norm, enter)
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            _map_output(projection, leave)
    if sequence_parallel:
        _map_input(model.model.layers[0], partial(scatter_to_sequence_parallel_region, **at))
        _map_input(model.model.norm, partial(enter, to_model_parallel=False))
    return model


def _map_output(module: nn.Module, mapping: Mapping) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: mapping(forward(*args, **kwargs))


def _map_input(module: nn.Module, mapping: Mapping) -> None:
    forward = module.forward
    module.forward = lambda hidden, *args, **kwargs: forward(mapping(hidden), *args, **kwargs)
