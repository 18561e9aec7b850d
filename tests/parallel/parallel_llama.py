"""A tiny Llama of parallel layers, patched together from the mappings in a few lines."""

from __future__ import annotations

from collections.abc import Callable

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
    enter, leave = (_gather, _reduce_scatter) if sequence_parallel else (_copy, _reduce)
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _map_output(norm, enter(group))
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            _map_output(projection, leave(group))
    if sequence_parallel:
        _map_input(model.model.layers[0], _scatter(group))
        _map_input(model.model.norm, _gather(group, to_model_parallel=False))
    return model


def _map_output(module: nn.Module, mapping: Mapping) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: mapping(forward(*args, **kwargs))


def _map_input(module: nn.Module, mapping: Mapping) -> None:
    forward = module.forward
    module.forward = lambda hidden, *args, **kwargs: forward(mapping(hidden), *args, **kwargs)


def _gather(group: dist.ProcessGroup, to_model_parallel: bool = True) -> Mapping:
    return lambda x: gather_from_sequence_parallel_region(x, SEQUENCE_DIM, to_model_parallel, group)


def _reduce_scatter(group: dist.ProcessGroup) -> Mapping:
    return lambda x: reduce_scatter_to_sequence_parallel_region(x, SEQUENCE_DIM, process_group=group)


def _scatter(group: dist.ProcessGroup) -> Mapping:
    return lambda x: scatter_to_sequence_parallel_region(x, SEQUENCE_DIM, group)


def _copy(group: dist.ProcessGroup) -> Mapping:
    return lambda x: copy_to_tensor_model_parallel_region(x, group)


def _reduce(group: dist.ProcessGroup) -> Mapping:
    return lambda x: reduce_from_tensor_model_parallel_region(x, group)
