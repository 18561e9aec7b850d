"""Case: the GPT-NeoX snippets of NxD's guide to activation memory reduction, with only their imports changed.

The lines of the guide stand as they are there; where it leaves out (``....``), the rest of a GPT-NeoX layer
was filled in. On one process the same classes run on a group of one, where every layer is a plain one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention, GPTNeoXLayer

from hf_actswap.parallel import layer_norm, tensor_parallel_group
from hf_actswap.parallel.layers import ColumnParallelLinear, RowParallelLinear
from hf_actswap.parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from tests.parallel.sharded_math import alone, assert_close, same

LENGTH, BATCH, LAYERS = 8, 2, 2


def init_method(weight: torch.Tensor) -> None:
    nn.init.normal_(weight, std=0.1)


# fmt: off
class GPTNeoXAttentionNxD(GPTNeoXAttention):
    def __init__(self, config: GPTNeoXConfig) -> None:
        super().__init__(config)
        self.query_key_value = ColumnParallelLinear(
                                 config.hidden_size,
                                 3 * config.hidden_size,
                                 stride=3,
                                 gather_output=False,
                                 init_method=init_method,
                                 sequence_parallel_enabled=self.config.sequence_parallel_enabled,
                             )
        self.dense = RowParallelLinear(
                         config.hidden_size,
                         config.hidden_size,
                         input_is_parallel=True,
                         init_method=init_method,
                         sequence_parallel_enabled=self.config.sequence_parallel_enabled,
                     )

    def _attn(self, query, key, value, attention_mask, head_mask):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    def forward(self, hidden_states):
        config = self.config
        # Within the attention module
        qkv = self.query_key_value(hidden_states)

        if config.sequence_parallel_enabled:
            qkv = qkv.transpose(0,1)

        heads = (tensor.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for tensor in qkv.chunk(3, -1))
        query, key, value = heads
        attention_mask = head_mask = None
        if config.selective_activation_checkpointing_is_enabled:
            attn_output = torch.utils.checkpoint.checkpoint(
                self._attn, query, key, value, attention_mask, head_mask, use_reentrant=False
            )
        else:
            attn_output = self._attn(query, key, value, attention_mask, head_mask)
        attn_output = attn_output.transpose(1, 2).flatten(-2)
        if config.sequence_parallel_enabled:
            attn_output = attn_output.transpose(0,1)
        attn_output = self.dense(attn_output)
        return attn_output


class GPTNeoXLayerNxD(GPTNeoXLayer):
    def __init__(self, config: GPTNeoXConfig) -> None:
        super().__init__(config, layer_idx=0)
        self.attention = GPTNeoXAttentionNxD(config)
        self.input_layernorm = layer_norm.LayerNorm(
                                 config.hidden_size,
                                 eps=config.layer_norm_eps,
                                 sequence_parallel_enabled=config.sequence_parallel_enabled
                               )
        self.post_attention_layernorm = layer_norm.LayerNorm(
                                             config.hidden_size,
                                             eps=config.layer_norm_eps,
                                             sequence_parallel_enabled=config.sequence_parallel_enabled
                                         )
        for parameter in self.mlp.parameters():  # left whole: works on the rank's part of the sequence
            parameter.sequence_parallel_enabled = config.sequence_parallel_enabled

    def forward(self, hidden_states):
        attended = self.attention(self.input_layernorm(hidden_states))
        return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))


class GPTNeoXModelNxD(nn.Module):
    def __init__(self, config: GPTNeoXConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(GPTNeoXLayerNxD(config) for _ in range(LAYERS))

    def forward(self, hidden_states):
        # NxD Core code change: sequence parallel uses seq_len as the 0-th dim
        if self.config.sequence_parallel_enabled:
            hidden_states = hidden_states.transpose(0, 1).contiguous()
            hidden_states = scatter_to_sequence_parallel_region(hidden_states)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        if self.config.sequence_parallel_enabled:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, to_model_parallel=False)
            hidden_states = hidden_states.transpose(0, 1).contiguous()
        return hidden_states


def allreduce_sequence_parallel_gradients(optimizer):
    grads = []
    for param_group in optimizer.__getstate__()['param_groups']:
        for group, params in param_group.items():
            if group == 'params':
                for p in params:
                    if isinstance(p, torch.Tensor) and p.grad is not None:
                        sequence_parallel_param = getattr(p, 'sequence_parallel_enabled', False)
                        if sequence_parallel_param:
                            grads.append(p.grad.data)
    for grad in grads:
        reduce_from_tensor_model_parallel_region(grad)


# fmt: on
def _model(sequence_parallel: bool, checkpointing: bool) -> GPTNeoXModelNxD:
    config = GPTNeoXConfig(
        hidden_size=16, num_attention_heads=4, intermediate_size=32, num_hidden_layers=LAYERS, vocab_size=8
    )
    config.sequence_parallel_enabled = sequence_parallel
    config.selective_activation_checkpointing_is_enabled = checkpointing
    torch.manual_seed(21)
    return GPTNeoXModelNxD(config)


def case_gpt_neox_of_the_guide(group: dist.ProcessGroup) -> None:
    x, gradient = same(BATCH, LENGTH, 16), same(BATCH, LENGTH, 16, seed=2)
    single = alone(group)
    for checkpointing in (False, True):
        with tensor_parallel_group(single):
            plain = _model(False, False)
            full_input = x.clone().requires_grad_()
            wanted = plain(full_input)
            wanted.backward(gradient)
        with tensor_parallel_group(group):
            model = _model(True, checkpointing)
            optimizer = torch.optim.AdamW(model.parameters())
            own_input = x.clone().requires_grad_()
            found = model(own_input)
            found.backward(gradient)
            before = {name: p.grad.clone() for name, p in model.named_parameters()}
            allreduce_sequence_parallel_gradients(optimizer)
        assert_close(found, wanted)
        assert_close(own_input.grad, full_input.grad)
        partitions = {
            f"{path}.{name}": partition
            for path, module in model.named_modules()
            for name, partition in getattr(module, "partitions", {}).items()
        }
        wrong_before = 0
        for name, parameter in model.named_parameters():
            full = plain.get_parameter(name)
            cut = partitions.get(name)
            mine = full.grad if cut is None else cut.part(full.grad, group.rank())
            assert_close(parameter.grad, mine)
            wrong_before += int((before[name] - mine).abs().max() > 1e-3)
        assert wrong_before >= LAYERS * 5  # without the sum: norms, row biases
