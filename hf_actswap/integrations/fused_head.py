"""TRL's fused head, for a head whose vocabulary is divided among the ranks.

TRL's trainers replace ``model.forward`` by one that takes ``fused_lm_head=True`` and then reads the head's
weight itself, in tiles, for log-probabilities, entropy and accuracy per token instead of logits. A rank that
holds a part of the weight would get these for a part of the vocabulary only. So TRL's forward is replaced in
turn by one that computes the same fields from every rank's part of the logits.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.utils import ModelOutput

from ..errors import Problem
from ..parallel.cross_entropy import parallel_cross_entropy
from ..parallel.patch_model import Patched
from ..parallel.sequence_region import IGNORED
from .parallel_limits import ParallelTrainingError

_FLAG = "fused_lm_head"
_FIELDS = frozenset({"log_probs", "entropy", "is_top1"})
_PIECE_TOKENS = 1024
"""Tokens whose logits are in fp32 at a time. If the head runs in tiles, only these logits are computed."""


@dataclass
class ParallelFusedOutput(ModelOutput):
    """The fields of TRL's ``FusedCausalLMOutput``, per token ``[B, S - 1]``; reading logits gathers them."""

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


def replace_fused_head(patched: Patched) -> None:
    """Replace TRL's fused forward on a patched model, if there is one; safe to call again.

    Raises:
        ParallelTrainingError: TRL's forward returns a field that the replacement cannot compute.
    """
    root = patched.bare
    fused = getattr(root.forward, "__func__", None)
    if fused is None or _FLAG not in (getattr(fused, "__kwdefaults__", None) or {}):
        return
    settings = inspect.getclosurevars(fused).nonlocals
    _reject(settings)
    parallel = _ParallelFusedForward(patched, root.forward, float(settings.get("temperature", 1.0)))

    # It has the signature of the model's own forward: the Trainer chooses the data's columns by it.
    @functools.wraps(type(root).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return parallel(self, *args, **kwargs)

    root.forward = types.MethodType(forward, root)


def _reject(settings: Mapping[str, Any]) -> None:
    unknown = sorted(set(settings.get("outputs", ())) - _FIELDS)
    if unknown or settings.get("cast_lm_head_to_fp32"):
        found = ", ".join(unknown) or "a head in fp32"
        hint = "Use a trainer that asks for less, or tensor_parallel_size 1."
        known = ", ".join(sorted(_FIELDS))
        raise ParallelTrainingError(
            [Problem("the trainer's fused head", f"no more than {known}", found, hint)]
        )


class _ParallelFusedForward:
    """The forward that replaces TRL's. It is bound to the model, so the model's hooks run around it.

    Args:
        patched: the divided model.
        before: TRL's forward, for calls without the flag ``fused_lm_head``.
        temperature: number by which logits are divided.
    """

    def __init__(self, patched: Patched, before: Callable[..., Any], temperature: float) -> None:
        self._patched, self._before, self._temperature = patched, before, temperature

    def __call__(self, model: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """Return `ParallelFusedOutput` if ``fused_lm_head`` is set, else what TRL's forward returns."""
        if not fused_lm_head:
            return self._before(*args, **kwargs)
        labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        count = kwargs.pop("num_items_in_batch", None)
        kwargs["use_cache"] = False
        output = type(model).forward(model, *args, **kwargs)
        logits = output.logits if shifted is not None else output.logits[:, :-1]
        targets = labels[:, 1:] if shifted is None else shifted
        current = self._patched.region.current
        if current is not None:
            current.loss_computed = True
            if current.length:  # without the padding that made the length divisible by the ranks
                kept = current.length - (shifted is None)
                logits, targets = logits[:, :kept], targets[:, :kept]
        return self._fields(model, logits / self._temperature, targets, count, output)

    def _fields(self, model: Any, shard: torch.Tensor, targets: torch.Tensor, count: Any, output: Any) -> Any:
        group = self._patched.group
        vocabulary_size = model.config.get_text_config().vocab_size
        mask = targets != IGNORED
        losses = parallel_cross_entropy(
            shard, targets, process_group=group, vocabulary_size=vocabulary_size, ignore_index=IGNORED
        )
        with torch.no_grad():
            own, tokens = shard.detach(), max(1, _PIECE_TOKENS // len(targets))
            some = [slice(first, first + tokens) for first in range(0, targets.shape[1], tokens)]
            found = [_statistics(own[:, at].float(), targets[:, at], vocabulary_size, group) for at in some]
            entropy, is_top1 = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        loss = losses.sum() / (mask.sum().clamp(min=1) if count is None else count)
        return ParallelFusedOutput(
            loss=loss,
            log_probs=-losses,
            entropy=entropy.masked_fill(~mask, 0),
            is_top1=is_top1 & mask,
            label_mask=mask,
            aux_loss=getattr(output, "aux_loss", None),
            logits=output.logits,
        )


def _statistics(
    shard: torch.Tensor, targets: torch.Tensor, vocabulary_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return entropy (nats) of each token's prediction, and whether its target is the top id: ``[B, S]``."""
    first = group.rank() * shard.shape[-1]
    held = max(0, min(shard.shape[-1], vocabulary_size - first))
    columns = F.pad(shard[..., :held], (0, int(held == 0)), value=-torch.inf)
    largest = columns.amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = columns - largest.unsqueeze(-1)
    weights = shifted.exp()
    own = targets - first
    is_own = (own >= 0) & (own < held)
    at_target = columns.gather(-1, own.clamp(0, columns.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    sums = torch.stack(
        [
            weights.sum(-1),
            (weights * shifted.nan_to_num(neginf=0.0)).sum(-1),
            (is_own & (at_target == largest)).float(),
        ]
    )
    dist.all_reduce(sums, group=group)
    total, product, top = sums.unbind()
    return total.log() - product / total, top > 0
