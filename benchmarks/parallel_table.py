"""Computes from formulas what each rank of a large training holds and communicates.

    python benchmarks/parallel_table.py
    python benchmarks/parallel_table.py --nodes 4 --ranks_per_node 8 --tensor_parallel_size 4 --tokens 16384

No number here is measured. They come from the formulas below. A test compares these with the bytes that a
small divided model really allocates, saves and sends at ``tp`` 2 (parameters, a layer's saved tensors, every
collective of the tensor axis). Communication over the data axis follows from its definition:

- DDP sums all gradients of a rank by one all-reduce per step over the ranks that hold the same part.
- FSDP2 (`hf_actswap.parallel.Patched.shard_over_data`) gathers the parameters in
  forward and again in backward, and reduce-scatters the gradients: Rajbhandari et al. 2020, "ZeRO", section
  7: 3 parts of communication where data parallelism has 2.
- Bytes sent are those of a ring (`parallel_peer.ring_bytes`).

The saved tensors are those of a layer in which nothing is recomputed or swapped, with PyTorch's flash
attention and Hugging Face's RMSNorm. RMSNorm computes in float32 and saves its input in float32, the
normalised tensor and the output, which is the input of the column-parallel projections. Korthikanti et al.
2022, "Reducing activation recomputation in large transformer models", divide the same tensors; their layer
has other ops.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.parallel_peer import REGATHER, ring_bytes

RESULTS = Path(__file__).resolve().parent / "results"
GIB = 2**30
FLOAT32_BYTES = 4
STATE_BYTES = {"bf16 weights": (2, 2, 4), "fp32 weights (autocast)": (4, 4, 8)}
"""Bytes per parameter of weight, gradient and AdamW's two moments (`torch.optim.AdamW` keeps both in the
weight's dtype)."""


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


LLAMA_3_70B = Llama(8192, 28672, 80, 64, 8, 128, 128256)
"""``config.json`` of meta-llama/Meta-Llama-3-70B."""


@dataclass(frozen=True)
class Setting:
    """How a model is divided and what one step is.

    Args:
        tensor_parallel_size: number of ranks that hold one model, inside a node.
        data_parallel_size: number of models.
        sequence_parallel: whether norms and residual are divided too.
        tokens: tokens of one model's batch, batch times length.
        size_bytes: bytes per element of weights and activations.
        reduce_bytes: bytes per element of sums over the ranks; those of float32 by default.
    """

    tensor_parallel_size: int
    data_parallel_size: int = 1
    sequence_parallel: bool = True
    tokens: int = 8192
    size_bytes: int = 2
    reduce_bytes: int = FLOAT32_BYTES


def parameters_of_rank(model: Llama, setting: Setting) -> tuple[int, int]:
    """Return the number of a rank's parameters of divided matrices, and of norms, which no rank divides.

    If there are fewer key and value heads than ranks, several ranks hold the same ones. A vocabulary that is
    not divisible is padded.
    """
    tp, hidden = setting.tensor_parallel_size, model.hidden
    queries = model.heads // tp * model.head_size
    keys = max(model.kv_heads // tp, 1) * model.head_size
    layer = hidden * (2 * queries + 2 * keys) + 3 * hidden * model.inner // tp
    vocabulary = 2 * -(-model.vocabulary // tp) * hidden
    return model.layers * layer + vocabulary, (2 * model.layers + 1) * hidden


def saved_bytes_of_layer(model: Llama, setting: Setting, saves_shards: bool = True) -> int:
    """Return the bytes that a rank saves for the backward of one layer.

    Args:
        model, setting: sizes of the model, and how it is divided.
        saves_shards: whether, under sequence parallelism, the column-parallel projections save this rank's
            part of their input, as ours do, or the gathered one, as ordinary autograd would.
    """
    tp, tokens, size = setting.tensor_parallel_size, setting.tokens, setting.size_bytes
    own_tokens = tokens // tp if setting.sequence_parallel else tokens
    norm = own_tokens * (FLOAT32_BYTES * model.hidden + size * model.hidden + FLOAT32_BYTES)
    column_input = (own_tokens if saves_shards else tokens) * size * model.hidden
    queries = model.heads // tp * model.head_size
    keys = max(model.kv_heads // tp, 1) * model.head_size
    attention = tokens * (size * (2 * queries + 2 * keys) + FLOAT32_BYTES * model.heads // tp)
    feed_forward = tokens * 4 * model.inner // tp * size
    return 2 * (norm + column_input) + attention + feed_forward


def layer_input_bytes(model: Llama, setting: Setting) -> int:
    """Return the bytes of a rank's input to a layer: all it keeps if the layer is recomputed whole."""
    own_tokens = setting.tokens // (setting.tensor_parallel_size if setting.sequence_parallel else 1)
    return own_tokens * model.hidden * setting.size_bytes


def logits_bytes(model: Llama, setting: Setting) -> int:
    """Return the bytes of a rank's part of the logits, in the activations' dtype."""
    return setting.tokens * -(-model.vocabulary // setting.tensor_parallel_size) * setting.size_bytes


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


def data_axis_bytes(model: Llama, setting: Setting, sharded: bool, bytes_each: int) -> dict[str, int]:
    """Return the bytes of collectives over the data axis in a step (larger sides), by kind.

    Args:
        model, setting: sizes of the model, and how it is divided.
        sharded: whether FSDP2 is used; else DDP.
        bytes_each: bytes of one weight, and of one gradient.
    """
    size = sum(parameters_of_rank(model, setting)) * bytes_each
    return {"all_gather": 2 * size, "reduce_scatter": size} if sharded else {"all_reduce": size}


def held(model: Llama, setting: Setting, sharded: bool, state_bytes: Sequence[int]) -> dict[str, float]:
    """Return GiB of a rank's weights, gradients and Adam states between steps."""
    parameters = sum(parameters_of_rank(model, setting)) / (setting.data_parallel_size if sharded else 1)
    names = ("weights", "gradients", "AdamW states")
    found = {name: parameters * size / GIB for name, size in zip(names, state_bytes, strict=True)}
    return {**found, "together": sum(found.values())}


def activations(model: Llama, setting: Setting) -> dict[str, float]:
    """Return GiB of activations that all layers of a rank save, by kind of division, and of its logits."""
    without = replace(setting, sequence_parallel=False)
    layers = model.layers
    return {
        "tp alone": layers * saved_bytes_of_layer(model, without) / GIB,
        "tp + sp, gathered inputs saved": layers * saved_bytes_of_layer(model, setting, False) / GIB,
        "tp + sp, shards saved (ours)": layers * saved_bytes_of_layer(model, setting) / GIB,
        "tp alone, every layer recomputed": layers * layer_input_bytes(model, without) / GIB,
        "tp + sp, every layer recomputed": layers * layer_input_bytes(model, setting) / GIB,
        "logits of a rank": logits_bytes(model, setting) / GIB,
    }


def sent(model: Llama, setting: Setting) -> dict[str, float]:
    """Return GiB that a rank sends in a step, over the tensor axis (inside a node) and over the data axis."""
    tp, dp = setting.tensor_parallel_size, setting.data_parallel_size
    found = {}
    for sequence_parallel, name in ((False, "tp alone"), (True, "tp + sp")):
        moved = tensor_axis_bytes(model, replace(setting, sequence_parallel=sequence_parallel))
        for (phase, kind), size in moved.items():
            found[f"tensor axis, {name}: {phase} {kind}"] = ring_bytes(kind, size, tp) / GIB
        total = sum(ring_bytes(kind, size, tp) for (_, kind), size in moved.items())
        found[f"tensor axis, {name}: together"] = total / GIB
    for (name, (_, gradient, _)), sharded in ((n, s) for n in STATE_BYTES.items() for s in (False, True)):
        moved_by_kind = data_axis_bytes(model, setting, sharded, gradient)
        total = sum(ring_bytes(kind, size, dp) for kind, size in moved_by_kind.items())
        engine = "FSDP2, on paper" if sharded else "DDP"
        found[f"data axis, {engine}, {name}"] = total / GIB
    return found


def paper(model: Llama, setting: Setting) -> dict[str, dict[str, float]]:
    """Return all parts of the table, GiB by name."""
    parts = {}
    for name, sizes in STATE_BYTES.items():
        parts[f"held, {name}, DDP"] = held(model, setting, False, sizes)
        parts[f"held, {name}, FSDP2 over the data axis (on paper)"] = held(model, setting, True, sizes)
    parts["activations saved (bf16)"] = activations(model, setting)
    parts["sent in a step"] = sent(model, setting)
    return parts


def table(parts: dict[str, dict[str, float]]) -> str:
    """Return the parts as text."""
    lines = []
    for title, rows in parts.items():
        lines += ["", f"{title}: GiB per rank"]
        lines += [f"  {name:62}{value:>10.3f}" for name, value in rows.items()]
    return "\n".join(lines).strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, write it; return the exit status."""
    parser = argparse.ArgumentParser(description="Llama-3-70B on paper.")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--ranks_per_node", type=int, default=8)
    parser.add_argument("--tensor_parallel_size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of one model's batch")
    parser.add_argument("--out", type=Path, help="where to write; by default into results/")
    options = parser.parse_args(argv)
    world, tp = options.nodes * options.ranks_per_node, options.tensor_parallel_size
    if options.ranks_per_node % tp or LLAMA_3_70B.heads % tp or options.tokens % tp:
        parser.error("--tensor_parallel_size must divide --ranks_per_node, --tokens and 64 heads")
    setting = Setting(tp, world // tp, tokens=options.tokens)
    parts = paper(LLAMA_3_70B, setting)
    document: dict[str, Any] = {"model": asdict(LLAMA_3_70B), "setting": asdict(setting), "gib": parts}
    path = options.out or RESULTS / f"parallel_table_paper_{datetime.now():%Y%m%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    title = f"Llama-3-70B, {world} ranks on {options.nodes} nodes: tp {tp}, dp {setting.data_parallel_size}"
    sys.stdout.write(f"{title}, {options.tokens} tokens per model and step\n\n{table(parts)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
