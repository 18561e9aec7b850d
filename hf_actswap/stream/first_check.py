"""Checks before the first streamed step that a model computes the same for a few tokens in chunks and whole.

Both run with the model's own code and weights, in evaluation mode and without gradients. The hidden states
that reach the head, and the loss, must be equal up to rounding. So a family that counts positions in a way
of its own, reads the attention mask, or mixes tokens elsewhere than in attention is rejected by name before
any gradient, and never trained wrongly.

The random state, the modules' modes and the hooks on them are afterwards as they were; the hooks do not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..engine.replay import CallState
from ..errors import PlanError, Problem
from ..plan.dry_run import hooks_off
from ..plan.model_structure import ModelStructure, device_of
from .rejections import documents_of

CHUNK_TOKENS, _TOKENS, _ROWS = 4, 11, 2
"""Three chunks, of which the last is shorter."""
_SECOND_DOCUMENT = 3
"""Where the second document of a packed row begins: all queries after the first chunk belong to it."""

_BY_TOKEN = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "num_items_in_batch")
_SET_HERE = ("use_cache", "return_dict")


def kind_of_call(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells calls apart that must be checked one by one: which arguments they have."""
    positions = given.get("position_ids")
    return frozenset(given), positions is not None and len(documents_of(positions)) > 1


def check_few_tokens(
    root: nn.Module,
    structure: ModelStructure,
    given: Mapping[str, Any],
    whole: Callable[..., Any],
    streamed: Callable[[dict[str, Any]], torch.Tensor],
) -> None:
    """Compare a streamed call of a few tokens with a whole one. All ranks of a tensor-parallel group call it.

    Args:
        root: the model.
        structure: its layers and head.
        given: arguments of the training call by name; a few tokens are called in the same way.
        whole: calls the model.
        streamed: returns the loss of a call with these arguments, in chunks of `CHUNK_TOKENS`.

    Raises:
        PlanError: the results differ, or one of the two calls fails.
    """
    few = _few_tokens(root, given)
    unpacked = {name: item for name, item in few.items() if name != "shift_labels"}
    with _evaluating(root), _heads_input(root, structure) as hidden:
        expected = _run(root, "called with a few tokens", lambda: whole(**unpacked, use_cache=False).loss)
        seen = hidden.taken()
        found = _run(root, "called in chunks", lambda: streamed(few))
        there = hidden.taken()
    tolerance = hidden.coarsest**0.5
    differing = []
    if not abs(float(found) - float(expected)) <= tolerance * max(1.0, abs(float(expected))):
        differing.append(f"a loss of {float(found):.6g} for {float(expected):.6g}")
    if not (away := _distance(there, seen)) <= tolerance:
        differing.append(f"hidden states that are {away:.2g} off (relative)")
    if differing:
        raise PlanError(
            [_unfit(root, f"{' and '.join(differing)} for a few tokens in chunks")], "stream_config"
        )


def _few_tokens(root: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for a call of a few tokens, with the names of ``given``; alike on all ranks."""
    config: Any = root.config
    text, device = config.get_text_config(), device_of(root)
    vocabulary, padding = int(getattr(text, "vocab_size", 2)), getattr(text, "pad_token_id", None)
    ids = torch.randint(0, vocabulary, (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(0))
    if padding is not None:  # positions and masks may depend on it
        ids[ids == padding] = (padding + 1) % vocabulary
    positions = torch.arange(_TOKENS)
    if kind_of_call(given)[1]:
        positions[_SECOND_DOCUMENT:] -= _SECOND_DOCUMENT
    ignored = int(given.get("ignore_index", -100))
    values = {
        "input_ids": ids,
        "labels": ids.clone(),
        "shift_labels": F.pad(ids[:, 1:], (0, 1), value=ignored),
        "attention_mask": torch.ones_like(ids),
        "position_ids": positions.expand(_ROWS, -1),
    }
    beside = {name: item for name, item in given.items() if name not in (*_BY_TOKEN, *_SET_HERE)}
    asked = {name: item.to(device) for name, item in values.items() if name in {"labels", *given}}
    return {**beside, **asked}


@contextmanager
def _evaluating(root: nn.Module) -> Iterator[None]:
    """Within the block the model draws no random numbers, and no hook of others sees its calls."""
    modes = {module: module.training for module in root.modules()}
    root.eval()
    try:
        with torch.no_grad(), hooks_off(root), CallState(device_of(root), True, ()).restored():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


class _HiddenStates:
    """The hidden states that the head is called with.

    Args:
        root: the model.

    Attributes:
        coarsest: the largest relative step of the dtypes that the model computes in.
    """

    def __init__(self, root: nn.Module) -> None:
        self._seen: list[torch.Tensor] = []
        self._kind = device_of(root).type
        dtypes = {item.dtype for item in root.parameters() if item.is_floating_point() and item.itemsize > 1}
        self.coarsest = max(torch.finfo(dtype).eps for dtype in {torch.float32, *dtypes})

    def see(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note the argument of a call of the head (a hook ahead of its forward)."""
        for hidden in args[:1]:
            self._seen.append(hidden.detach())
            dtypes = [hidden.dtype]
            if torch.is_autocast_enabled(self._kind):
                dtypes.append(torch.get_autocast_dtype(self._kind))
            self.coarsest = max(self.coarsest, *(torch.finfo(dtype).eps for dtype in dtypes))

    def taken(self) -> torch.Tensor | None:
        """Return the hidden states so far, and forget them; ``None``: the head was not called."""
        seen, self._seen = self._seen, []
        return torch.cat(seen, dim=-2) if seen else None


@contextmanager
def _heads_input(root: nn.Module, structure: ModelStructure) -> Iterator[_HiddenStates]:
    """Collect the hidden states that the head is called with."""
    hidden = _HiddenStates(root)
    with ExitStack() as stack:
        if structure.head is not None:
            watching = root.get_submodule(structure.head).register_forward_pre_hook(hidden.see)
            stack.callback(watching.remove)
        yield hidden


def _run(root: nn.Module, how: str, call: Callable[[], torch.Tensor | None]) -> torch.Tensor:
    """Call the model; an error of its own code becomes one that names the model."""
    try:
        loss = call()
    except (PlanError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own code runs: it may raise anything
        first = next(iter(str(error).splitlines()), "")
        problem = _unfit(root, f"{type(error).__name__}, {how}: {first[:200]}")
        raise PlanError([problem], "stream_config") from error
    if loss is None:
        raise PlanError([_unfit(root, f"no loss, {how}")], "stream_config")
    return loss


def _distance(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Return how far hidden states ``[B, S, H]`` are off: the median over tokens, relative and in norm.

    The median, because rounding may send a token of one call to another expert. The first chunk counts by
    itself, and then all others: only these see earlier chunks.
    """
    if found is None or expected is None or found.shape != expected.shape:
        return 0.0 if found is expected else float("inf")
    away = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1).clamp_min(1e-12)
    return max(float(part.median()) for part in away.tensor_split([CHUNK_TOKENS], dim=-1))


def _unfit(root: nn.Module, found: str) -> Problem:
    config: Any = root.config
    where = f"model ({getattr(config, 'model_type', type(root).__name__)}) in chunks"
    return Problem(where, "what it computes whole", found, "Train it without stream_config.")
