"""What tensor parallelism exchanges in a step, by formulas from the sizes of a Llama."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.parallel_peer import REGATHER

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Llama:
    """Sizes of a model with untied embedding and head.

    Args:
        hidden, inner, layers, vocabulary: as in its configuration.
        heads, kv_heads, head_size: sizes of attention.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int


@dataclass(frozen=True)
class Setting:
    """How a model is divided and what one step is.

    Args:
        tensor_parallel_size: number of ranks that hold one model, inside a node.
        sequence_parallel: whether norms and residual are divided too.
        tokens: tokens of one model's batch, batch times length.
        size_bytes: bytes per element of weights and activations.
        reduce_bytes: bytes per element of sums over the ranks; those of float32 by default.
    """

    tensor_parallel_size: int
    sequence_parallel: bool = True
    tokens: int = 8192
    size_bytes: int = 2
    reduce_bytes: int = FLOAT32_BYTES


def tensor_axis_bytes(model: Llama, setting: Setting) -> dict[tuple[str, str], int]:
    """Return the bytes of collectives over the ranks of one model in a step (larger sides), by (phase, kind).

    Beside those of the layers these are the embedding's sum, the gather before the head, the gather of the
    gradient where the sequence is divided, the loss's maximum and two sums for each token, and one sum of the
    norms' gradients (with a flag for each). Ranks that hold the same key and value heads exchange the
    gradients of their weights.
    """
    found = _of_hidden_states(model, setting)
    replicas = setting.tensor_parallel_size // model.kv_heads
    if replicas > 1:
        heads = 2 * model.head_size * model.hidden * setting.size_bytes
        found["backward", "all_to_all"] = model.layers * replicas * heads
    return found


def _of_hidden_states(model: Llama, setting: Setting) -> dict[tuple[str, str], int]:
    hidden, layers = setting.tokens * model.hidden, model.layers
    plain, summed = hidden * setting.size_bytes, hidden * setting.reduce_bytes
    embedding_and_loss = plain + 3 * setting.tokens * FLOAT32_BYTES
    if not setting.sequence_parallel:
        return {
            ("forward", "all_reduce"): 2 * layers * summed + embedding_and_loss,
            ("backward", "all_reduce"): (2 * layers + 1) * summed,
        }
    norms = 2 * layers + 1
    return {
        ("forward", "all_reduce"): embedding_and_loss,
        ("forward", "all_gather"): (2 * layers + 1) * plain,
        ("forward", "reduce_scatter"): 2 * layers * summed,
        ("backward", REGATHER): (2 * layers + 1) * plain,
        ("backward", "reduce_scatter"): (2 * layers + 1) * summed,
        ("backward", "all_gather"): (2 * layers + 1) * plain,
        ("after backward", "all_reduce"): norms * (model.hidden + 1) * setting.size_bytes,
    }
