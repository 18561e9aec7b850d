"""A plan in the loop of a reinforcement learner: one model scores without gradients, then is updated.

The calls are those of verl's ``DataParallelPPOActor``: log-probabilities of answers in evaluation mode, then
several updates in micro-batches whose number and lengths change, from logits that are divided in place.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hf_actswap
from hf_actswap.planner import Planner
from tests.engine.tiny_models import tiny_llama

TEMPERATURE, CLIP, ROUNDS = 0.7, 0.2, 3
SHAPES = (((2, 24), (3, 16)), ((1, 40), (2, 24), (2, 8)), ((4, 40),))
"""(sequences, tokens) of each micro-batch of each update of a round."""


class Policy:
    """A model that is updated by its own earlier answers."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def log_probabilities(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = self.model(input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False)
            logits = found.logits
            logits.div_(TEMPERATURE)
            scores = logits[:, :-1].float().log_softmax(-1)
            return scores.gather(-1, ids[:, 1:, None]).squeeze(-1)

    def scored(self, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        self.model.eval()
        with torch.no_grad():
            return [self.log_probabilities(ids) for ids in batches]

    def updated(
        self, batches: list[torch.Tensor], old: list[torch.Tensor], gains: torch.Tensor
    ) -> list[float]:
        self.model.train()
        self.optimizer.zero_grad()
        losses = []
        for ids, before in zip(batches, old, strict=True):
            ratio = (self.log_probabilities(ids) - before).exp()
            gain = gains[: len(ids), None]
            loss = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean() / len(batches)
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return losses


def learned(config: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    policy = Policy(tiny_llama())
    applied = None if config is None else hf_actswap.apply(policy.model, config, optimizer=policy.optimizer)
    generator, losses = torch.Generator().manual_seed(1), []
    with applied or nullcontext():
        for _ in range(ROUNDS):
            updates = [
                [torch.randint(64, shape, generator=generator) for shape in update] for update in SHAPES
            ]
            old = [policy.scored(batches) for batches in updates]
            gains = torch.randn(4, generator=generator)
            for batches, before in zip(updates, old, strict=True):
                losses += policy.updated(batches, before, gains)
    return losses, dict(policy.model.state_dict()), applied


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor], Any]:
    return learned(None)


@pytest.mark.parametrize(
    "config",
    [
        {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]}},
        {"recompute_config": {"recompute": True}},
        {"memory": {"mode": "adaptive", "budget_gib": 0.05, "search_steps": 2}},
    ],
    ids=["swap", "recompute", "adaptive"],
)
def test_a_policy_learns_the_same_to_the_bit(config: dict[str, Any], plain: Any) -> None:
    losses, weights, applied = learned(config)
    assert losses == plain[0]
    assert all(torch.equal(weights[name], weight) for name, weight in plain[1].items())
    if isinstance(applied, Planner):
        assert applied.phase == "stable"
    else:
        counted = applied.stats()
        assert counted.forwards == ROUNDS * sum(map(len, SHAPES)), "scoring has no gradients, and no plan"
        assert counted.offloaded_bytes + counted.recomputes > 0
