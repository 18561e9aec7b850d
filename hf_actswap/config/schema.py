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

from dataclasses import dataclass
from typing import Literal

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
    """``memory``: the planner's section. MindSpeed's names for the same are in parentheses.

    Args:
        mode: ``smart_swap`` (``--smart-swap``): keep, swap or recompute, beside the fates written by hand;
            ``adaptive`` (``--adaptive-memory-optimization``): all fates, none of them written by
            hand; ``off`` (default): nothing is planned.
        budget_gib: the most device memory of a step, in GiB per rank (``target_memory``, in bytes). Default
            ``None``: all that the device has for the process, less ``margin_gib``.
        reduce_by_gib: by how many GiB the peak shall be lower than without the planner (``reduction_memory``,
            in bytes). Default ``None``; not beside ``budget_gib``.
        margin_gib: GiB of the device that stay free where neither of the two is written
            (``redundant_memory``, in bytes). Default ``None``: 3 % of the device.
        preference: ``performance`` (default; ``BETTER_PERFORMANCE``): activations; ``memory_saving``
            (``BETTER_MEMORY_SAVING``): the states of the optimizer are swapped too.
        warmup_steps: optimizer steps in which the profile is recorded (``warmup_step``). Default 2.
        search_steps: optimizer steps that try plans, at most (``stable_step - warmup_step``). Default 8.
        num_attn_layers_per_stage: decoder layers of a stage. Default 1.
        swap_bucket_size: bytes that are swapped in a stage, at most; below 0 all, 0 none. Default -1.
        min_tensor_mib: size in MiB under which a tensor is never swapped (``tensor_size_filter``, in bytes).
            Default ``None``: 1 KiB.
        host_memory_gib: host memory of a rank in GiB, at most. Default ``None``: its share of what is free.
        bind_numa: whether each rank and its host memory stay beside its device where a machine has several
            NUMA nodes. Default true.
        plan_file: written when the plan is stable, and read instead of searching by a run that it fits
            (``save_policy``). Default ``None``.

    ``min_tensor_mib``, ``host_memory_gib`` and ``bind_numa`` hold for what is written by hand as well.
    """

    mode: Literal["off", "smart_swap", "adaptive"] = "off"
    budget_gib: float | None = None
    reduce_by_gib: float | None = None
    margin_gib: float | None = None
    preference: Literal["performance", "memory_saving"] = "performance"
    warmup_steps: int = 2
    search_steps: int = 8
    num_attn_layers_per_stage: int = 1
    swap_bucket_size: int = -1
    min_tensor_mib: float | None = None
    host_memory_gib: float | None = None
    bind_numa: bool = True
    plan_file: str | None = None
