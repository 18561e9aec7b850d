"""Streamed sequences: a model's training call, chunk by chunk, with earlier keys and values on the host.

In: a model with an `AppliedPlan`, and `SequenceChunks` (`stream_sequences`).
Out: the same model, whose long training calls hold one chunk on the device; what takes that off again.

`two_passes` runs the chunks. `streamed_attention` replaces the model's attention, and `piecewise_attention`
computes it. `host_sequence` holds keys, values, outputs and gradients in host memory. `refusals` lists what
cannot be streamed. `on_paper` predicts memory, copies and FLOP from shapes.

It knows transformers' attention and mask interfaces, the engine's host memory and transfers; no YAML, no
model families.
"""

from __future__ import annotations

from .refusals import problems_of_model
from .two_passes import chunk_tokens, stream_sequences, traced

__all__ = ["chunk_tokens", "problems_of_model", "stream_sequences", "traced"]
