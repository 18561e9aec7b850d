"""A sequence that the ranks do not divide: filled up at the model's boundary, cut in what comes out.

Filling goes to the right: with causal attention no token sees it, so that no mask has to be invented where
none was given. Its labels are ignored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

IGNORED = -100
"""Label of tokens that have no loss."""

_FILLED_WITH = {
    "input_ids": 0,
    "token_type_ids": 0,
    "mm_token_type_ids": 0,
    "attention_mask": 0,
    "labels": IGNORED,
    "shift_labels": IGNORED,
}
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")
"""What flash attention is told about several sequences in one row: lengths of all of it."""


def sequence_length(arguments: dict[str, Any]) -> int | None:
    """Return the length ``S`` of a forward's ids ``[B, S]`` or embeddings ``[B, S, H]``, if it has any."""
    for name in ("input_ids", "inputs_embeds"):
        value = arguments.get(name)
        if isinstance(value, torch.Tensor):
            return value.shape[1]
    return None


def padded(arguments: dict[str, Any], length: int, padding: int) -> dict[str, Any]:
    """Return a forward's arguments with ``padding`` more tokens in each sequence.

    Raises:
        ValueError: an argument describes the sequence in a way that cannot be continued.
    """
    filled = dict(arguments)
    for name, value in arguments.items():
        if name == "attention_mask" and not _is_row_mask(value):
            raise ValueError(_refusal(name, length, padding, "is no mask [B, S]"))
        if name in _PACKED and value is not None:
            raise ValueError(_refusal(name, length, padding, "gives the lengths of packed sequences"))
        if not isinstance(value, torch.Tensor):
            continue
        if name in _FILLED_WITH and value.shape[-1] == length:
            filled[name] = F.pad(value, (0, padding), value=_FILLED_WITH[name])
        elif name == "inputs_embeds":
            filled[name] = F.pad(value, (0, 0, 0, padding))
        elif name == "position_ids" and value.shape[-1] == length:
            further = torch.arange(1, padding + 1, device=value.device, dtype=value.dtype)
            filled[name] = torch.cat([value, value[..., -1:] + further], -1)
    return filled


def without_padding(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return the first ``length`` tokens along ``dim``, of one that has more."""
    return tensor if tensor.shape[dim] <= length else tensor.narrow(dim, 0, length)


def rows_without_padding(rows: torch.Tensor, length: int, padding: int) -> torch.Tensor:
    """Return ``[B (length + padding), E]`` without the rows of padding."""
    return rows.unflatten(0, (-1, length + padding))[:, :length].flatten(0, 1)


def _is_row_mask(mask: Any) -> bool:
    return mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2)


def _refusal(name: str, length: int, padding: int, why: str) -> str:
    return (
        f"the sequence length {length} is no multiple of tensor_parallel_size and cannot be filled up, "
        f"because {name} {why}. Pad the batch by {padding} (data collator: pad_to_multiple_of)."
    )
