"""Routed experts, each divided inside: every rank has its part of every expert.

A token is routed where its hidden state is: under sequence parallelism each rank routes its own ``T / tp``
tokens. Then the ranks tell each other hidden states, experts and routing weights of all ``T``, compute their
parts ``I / tp`` of all experts, and sum what each gets of its own tokens::

    hidden [T/tp, H] -------------------all-gather--> [T, H] --> experts --reduce-scatter--> [T/tp, H]
    router: experts, weights [T/tp, k] -all-gather--> [T, k] ----^

Which of the tokens are whose does not matter to experts, so all is gathered along dim 0.

In backward the gradients of routing weights are summed too, since each rank knows what its parts contribute.
So a router's gradient is complete for the tokens that it has seen: its parameters carry the tag
``sequence_parallel_enabled`` where it saw a rank's tokens, and none where it saw all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..plan.gradient_checkpointing import is_checkpointed
from .column_input import InputSettings, column_input
from .communication import all_gather, sum_of_shares
from .expert_products import ProductSettings, Routing, combined_product, routed_product
from .mappings import copied
from .sequence_region import SequenceRegion
from .sharded_module import ShardedModule
from .weights import Partition, like_parameter

TOKEN_DIM = 0
"""Of what experts are given, ``[T, H]``."""


class ParallelExperts(ShardedModule):
    """This rank's parts of routed experts, in the place of a Hugging Face experts module.

    The forward is an attribute of the instance. An outline would replace that of a class, because routed
    experts of other classes cannot run on fake tensors; these can, and their communications are to be seen.

    Args:
        full: the whole experts, with ``gate_up_proj`` ``[E, 2I, H]``, ``down_proj`` ``[E, H, I]``, ``act_fn``
            and a ``config`` whose ``_experts_implementation`` is read at each call: ``eager`` computes one
            expert after the other, all others one kernel for all where the device has one for these sizes.
        region: of the model.
        layer: the decoder layer that it is in.

    Attributes:
        gate_up_proj: ``[E, 2I / tp, H]``.
        down_proj: ``[E, H, I / tp]``.
        keep_gathered: see `column_input`; besides, what is gathered is kept where Hugging Face's gradient
            checkpointing is on for the layer.
    """

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, full: Any, region: SequenceRegion, layer: nn.Module) -> None:
        super().__init__(region.group)
        self._region, self._layer = region, _Held(layer)
        self.config, self.act_fn = getattr(full, "config", None), full.act_fn
        self.num_experts, _, inner = full.down_proj.shape
        ranks, rank = region.group.size(), region.group.rank()
        self.divide("gate_up_proj", Partition.of(1, 2 * inner, ranks, stride=2))
        self.divide("down_proj", Partition.of(2, inner, ranks))
        for name, partition in self.partitions.items():
            whole = getattr(full, name)
            with torch.no_grad():
                setattr(self, name, like_parameter(partition.part(whole, rank), whole))
        self.keep_gathered = False
        vars(self)["forward"] = self._forward
        self.train(full.training)

    def _forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts' sums for this rank's tokens.

        Args:
            hidden_states: ``[T / tp, H]`` in an active region, else ``[T, H]``, alike on all ranks.
            top_k_index: experts of these tokens, ``[.., k]``.
            top_k_weights: routing weights, ``[.., k]``.

        Returns:
            As ``hidden_states``.
        """
        region, group = self._region, self._region.group
        keep_gathered = self.keep_gathered or (self.training and is_checkpointed(self._layer.module))
        settings = InputSettings(group, region.is_active, TOKEN_DIM, region.reduce_dtype, keep_gathered)
        hidden = column_input(hidden_states, [self.gate_up_proj], settings)
        if region.is_active:
            top_k_index, top_k_weights = _of_all_tokens(top_k_index, top_k_weights, region)
        else:
            top_k_weights = copied(top_k_weights, group)
        share = self._share(hidden, top_k_index, top_k_weights)
        return sum_of_shares(share, group, TOKEN_DIM if region.is_active else None, region.reduce_dtype)

    def _share(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return this rank's share ``[T, H]`` of the experts' sums, of all tokens."""
        routing = Routing.of(experts, self.num_experts)
        settings = self._settings(hidden)
        gate, up = routed_product(hidden, self.gate_up_proj, routing, settings).chunk(2, dim=-1)
        inner = self.act_fn(gate) * up
        return combined_product(inner, weights, self.down_proj, routing, settings).to(hidden.dtype)

    def _settings(self, hidden: torch.Tensor) -> ProductSettings:
        """As the implementations of transformers: autocast does not know ``grouped_mm``."""
        implementation = getattr(self.config, "_experts_implementation", None) or "eager"
        dtype, kind = self.gate_up_proj.dtype, hidden.device.type
        if implementation != "grouped_mm" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return ProductSettings(dtype, implementation != "eager")

    def extra_repr(self) -> str:
        return f"experts={self.num_experts}, ranks={self.partitions['down_proj'].ranks}"


class _Held:
    """A module that is referred to without being a child."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def _of_all_tokens(
    experts: torch.Tensor, weights: torch.Tensor, region: SequenceRegion
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather ``[T / tp, k]`` each to ``[T, k]`` by one collective: experts travel as bits of floats."""
    is_double = weights.dtype == torch.float64
    real, whole_number = (torch.float64, torch.int64) if is_double else (torch.float32, torch.int32)
    own = torch.cat((weights.to(real), experts.to(whole_number).view(real)), -1)
    every = all_gather(own, TOKEN_DIM, region.group)
    found_weights, found_experts = every.chunk(2, -1)
    numbers = found_experts.detach().contiguous().view(whole_number)
    return numbers.to(experts.dtype), found_weights.to(weights.dtype)
