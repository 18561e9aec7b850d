"""What the library compares before it trains is not compared where large tensors have no values."""

from __future__ import annotations

from typing import Any


def compare_nothing(first_check: Any) -> None:
    """Let a sequence be streamed without comparing a few of its tokens with a whole call.

    Args:
        first_check: ``hf_actswap.stream.first_check``.
    """
    first_check.check_few_tokens = lambda *_: None
