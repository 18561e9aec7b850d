"""Streamed sequences: a model's training call, chunk by chunk, with earlier keys and values on the host.

In: a model with an `AppliedPlan`, and `SequenceChunks` (`stream_sequences`).
Out: the same model, whose long training calls hold one chunk on the device; what takes that off again.

`two_passes` runs the chunks, `streamed_attention` stands in the place of the model's attention,
`piecewise_attention` is its arithmetic, `host_sequence` holds what chunks leave for each other, `refusals`
names what cannot be streamed, `on_paper` computes what a sequence takes.

It knows transformers' attention and mask interfaces, the engine's host memory and transfers; no YAML, no
model families.
"""

from __future__ import annotations

from .refusals import problems_of_model
from .two_passes import chunk_tokens, stream_sequences, traced

__all__ = ["chunk_tokens", "problems_of_model", "stream_sequences", "traced"]
