"""What the user wrote, as frozen values: the YAML keys of the references, verbatim.

Nothing is normalised here: a list per pipeline stage stays a list per pipeline stage (as a tuple),
because only the plan knows the model. Two units matter:

* ``backward_prefetch`` and ``default_prefetch`` count **operators**: one operator is one autograd
  node in creation order. ``p`` means that the copy back to the device starts when backward is ``p``
  operators before the first consumer, and that device memory is released ``3 * p`` operators after
  the copy out began (MindSpore ``offload_activation.cc``; `docs/reference.md`).
* layer indices count decoder layers from 0 over the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from . import dump

Prefetch = int | Literal["auto"]
"""Operators ahead, at least 1; or ``"auto"`` (also written ``Auto``)."""

Layers = bool | tuple[int, ...]
"""``True``: all layers; ``False``: none; else global layer indices."""

LayerCounts = bool | tuple[int | bool, ...] | tuple[tuple[int | bool, ...] | bool, ...]
"""A bool; without swap: layers per stage, or a table per (interleave, stage); with swap: layer indices."""

OpSelection = LayerCounts | tuple[str, ...] | dict[str, LayerCounts]
"""`LayerCounts` for the default ops; or op paths (all layers); or op path -> `LayerCounts`."""

CompileBudget = float | tuple[float, ...] | None
"""Share of activation memory, 0 to 1: for every layer, or one for each; ``None``: not touched."""

Offset = int | tuple[int, ...] | tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LayerSwapRule:
    """One entry of ``layer_swap``: swap everything that these layers produce."""

    backward_prefetch: Prefetch
    layers: Layers


@dataclass(frozen=True)
class OpSwapRule:
    """One entry of ``op_swap``; a list under ``op_name`` becomes one rule per name."""

    op_name: str
    backward_prefetch: Prefetch
    layers: Layers


@dataclass(frozen=True)
class SwapConfig:
    """``swap_config`` (MindFormers, Fine-Grained Activations SWAP).

    With ``swap`` true and both lists ``None`` the default strategy holds: the attention core of all
    layers, ``default_prefetch`` operators ahead. An empty list is not ``None``: it swaps nothing.

    ``recompute_input`` (ours) lifts the reference's second coupling rule: the input of these layers, where
    they are recomputed whole, is swapped ``default_prefetch`` operators ahead and does not stay.
    ``select_recompute_input`` (ours) lifts it for selective recomputation: what the recomputed ops of these
    layers read is swapped where ``layer_swap`` or ``op_swap`` says so, with their windows.
    """

    swap: bool = False
    default_prefetch: Prefetch = 1
    layer_swap: tuple[LayerSwapRule, ...] | None = None
    op_swap: tuple[OpSwapRule, ...] | None = None
    recompute_input: Layers = False
    select_recompute_input: Layers = False


@dataclass(frozen=True)
class RecomputeConfig:
    """``recompute_config`` (MindFormers, Memory Optimization; ``compile_budget`` and ``fused`` are ours).

    ``compile_budget`` is PyTorch's ``activation_memory_budget`` of each compiled layer: 1 saves what the
    compiler saves by itself, 0 only the layer's inputs, as recomputing the whole layer does.
    ``fused`` runs chains of dropped pointwise ops again in one compiled kernel, which may differ from them in
    the last bit.
    """

    recompute: LayerCounts = False
    select_recompute: OpSelection = False
    select_comm_recompute: OpSelection = False
    select_recompute_exclude: OpSelection = False
    select_comm_recompute_exclude: OpSelection = False
    parallel_optimizer_comm_recompute: bool = False
    mp_comm_recompute: bool = True
    recompute_slice_activation: bool = False
    compile_budget: CompileBudget = None
    fused: bool = False


@dataclass(frozen=True)
class ParallelConfig:
    """``parallel_config``: tensor and sequence parallelism, and the pipeline layout of the recompute tables.

    ``offset`` shifts layers between stages: a number, one per stage, or a table per (interleave, stage).
    """

    tensor_parallel_size: int = 1
    sequence_parallel_enabled: bool = False
    pipeline_stage: int = 1
    pp_interleave_num: int = 1
    offset: Offset = 0


@dataclass(frozen=True)
class MemoryConfig:
    """``memory``: the planner's section.

    ``swap_bucket_size`` is in bytes per stage (< 0 all, 0 none); ``min_tensor_mib`` is the size in MiB
    under which a tensor is never swapped (``None``: the engine's default of 1 KiB); ``bind_numa`` keeps each
    rank and its host memory beside its device where a machine has several NUMA nodes.
    """

    mode: Literal["off", "smart_swap", "adaptive"] = "off"
    budget_gib: float | None = None
    reduce_by_gib: float | None = None
    preference: Literal["performance", "memory_saving"] = "performance"
    warmup_steps: int = 2
    search_steps: int = 8
    num_attn_layers_per_stage: int = 1
    swap_bucket_size: int = -1
    min_tensor_mib: float | None = None
    host_memory_gib: float | None = None
    bind_numa: bool = True
    plan_file: str | None = None


@dataclass(frozen=True)
class ActSwapConfig:
    """A whole document.

    Attributes:
        num_layers: ``model.model_config.num_layers`` where the document states it; checked against the model.
        notes: one line for each section or key that was accepted and has no meaning here, saying what
            becomes of it. Not part of equality, and not written by `to_yaml`.
        source: the file or a short description, for messages. Not part of equality.
    """

    swap_config: SwapConfig = SwapConfig()
    recompute_config: RecomputeConfig = RecomputeConfig()
    parallel_config: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    num_layers: int | None = field(
        default=None, metadata={dump.DOCUMENT_PATH: ("model", "model_config", "num_layers")}
    )
    notes: tuple[str, ...] = field(default=(), compare=False)
    source: str = field(default="", compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The document that loads to this configuration: plain values, only those that are not default."""
        return dump.to_dict(self)

    def to_yaml(self) -> str:
        """The same document as YAML text: ``load_config(config.to_yaml()) == config``."""
        return dump.to_yaml(self)
