"""Streamed sequences: a model's training call, chunk by chunk, with earlier keys and values on the host.

In: a model with an `AppliedPlan`, and `SequenceChunks` (`stream_sequences`).
Out: the same model, whose long training calls hold one chunk on the device; and a function that undoes this.

`two_passes` runs the chunks, and compares first a few tokens in chunks with a whole call.
`streamed_attention` replaces the model's attention, and `piecewise_attention` computes it. `host_sequence`
holds keys, values, outputs and gradients in host memory, and predicts memory, copies and FLOP from shapes.
`rejections` lists what cannot be streamed; `chunked_step` predicts the step, and chooses how many layers of a
chunk are kept within a budget.

It knows transformers' attention and mask interfaces, the engine's host memory and transfers, the planner's
predictions; no YAML, no model families.
"""

from __future__ import annotations

from .chunked_step import ChunkBudget, ChunkedStep, KeptLayers
from .rejections import problems_of_model
from .streamed_attention import traced
from .two_passes import stream_sequences

__all__ = [
    "ChunkBudget",
    "ChunkedStep",
    "KeptLayers",
    "problems_of_model",
    "stream_sequences",
    "traced",
]
