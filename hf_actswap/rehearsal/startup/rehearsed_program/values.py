"""What the library compares before it trains is not compared where large tensors have no values."""

from __future__ import annotations

from typing import Any


def compare_nothing(two_passes: Any) -> None:
    """Let a sequence be streamed without comparing a few of its tokens with a whole call.

    Args:
        two_passes: ``hf_actswap.stream.two_passes``.
    """
    two_passes.check_few_tokens = lambda *_: None
