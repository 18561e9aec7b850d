"""Frozen dataclasses of what the user wrote; the fields are the YAML keys of the references, verbatim.

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
"""Number of operators, at least 1; or ``"auto"`` (also written ``Auto``)."""

Layers = bool | tuple[int, ...]
"""``True``: all layers; ``False``: none; else global layer indices."""

LayerCounts = bool | tuple[int | bool, ...] | tuple[tuple[int | bool, ...] | bool, ...]
"""A bool; without swap: layers per stage, or a table per (interleave, stage); with swap: layer indices."""

OpSelection = LayerCounts | tuple[str, ...] | dict[str, LayerCounts]
"""`LayerCounts` for the default ops; or op paths (all layers); or op path -> `LayerCounts`."""

CompileBudget = float | tuple[float, ...] | None
"""Share of activation memory, 0 to 1: for every layer, or one for each; ``None``: not touched."""

Offset = int | tuple[int, ...] | tuple[tuple[int, ...], ...]

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
"""Schedules of a pipeline, with the names of `torch.distributed.pipelining`."""


@dataclass(frozen=True)
class LayerSwapRule:
    """One entry of ``layer_swap``: swap everything that these layers produce.

    Args:
        backward_prefetch: how many operators before the first use in backward the copy back starts; device
            memory is released three times as many operators after the copy out began. ``auto``: measured.
        layers: which layers, counted from 0 over the whole model.
    """

    backward_prefetch: Prefetch
    layers: Layers


@dataclass(frozen=True)
class OpSwapRule:
    """One entry of ``op_swap``; a list under ``op_name`` becomes one rule per name.

    Args:
        op_name: path of a module or function inside a layer, one regular expression per level, with
            MindFormers' or Hugging Face's names.
        backward_prefetch: as in ``layer_swap``.
        layers: as in ``layer_swap``.
    """

    op_name: str
    backward_prefetch: Prefetch
    layers: Layers


@dataclass(frozen=True)
class SwapConfig:
    """``swap_config`` (MindFormers, Fine-Grained Activations SWAP).

    With ``swap`` true and both lists ``None`` the default strategy applies: the attention core of all layers
    is swapped, with the windows of ``default_prefetch``. An empty list is not ``None``: it swaps nothing.

    ``recompute_input`` and ``select_recompute_input`` (ours) lift the reference's second coupling rule.

    Args:
        swap: whether anything is swapped. It also decides what a list in ``recompute_config`` means: layer
            indices if true, layers per pipeline stage if false.
        default_prefetch: ``backward_prefetch`` of the default strategy and of ``recompute_input``, which have
            no entry of their own. ``auto``: measured.
        layer_swap: whole layers to swap. Default ``None``: see ``op_swap``.
        op_swap: modules and functions to swap. Default ``None``: if ``layer_swap`` is not written either, the
            attention core of all layers.
        recompute_input: layers that are recomputed whole and whose input is swapped, with the windows of
            ``default_prefetch``; otherwise the input stays on the device (ours).
        select_recompute_input: layers in which ``layer_swap`` and ``op_swap`` may also swap what the
            recomputed ops read, which otherwise stays on the device (ours).
    """

    swap: bool = False
    default_prefetch: Prefetch = 1
    layer_swap: tuple[LayerSwapRule, ...] | None = None
    op_swap: tuple[OpSwapRule, ...] | None = None
    recompute_input: Layers = False
    select_recompute_input: Layers = False


@dataclass(frozen=True)
class RecomputeConfig:
    """``recompute_config`` (MindFormers, Memory Optimization; ``compile_budget`` is ours).

    Without swap a list has the number of layers per pipeline stage, counted from the stage's first layer, and
    a table has a row per interleave. With ``swap_config.swap`` true a list has layer indices.

    Args:
        recompute: layers that are recomputed whole; only their input is kept.
        select_recompute: ops that are recomputed. If no op is named: the product and the activation of the
            MLP (``feed_forward\\.mul``, ``feed_forward\\.w1\\.activation\\.silu``).
        select_comm_recompute: gathers of parallel layers that are repeated in backward. If no op is named:
            those of the norms' outputs (``.*\\.norm``). Layers that are not selected save what they gathered;
            false selects no layer. Default ``None``: parallel layers save their part and gather again.
        select_recompute_exclude: names of ops that are not recomputed, also in layers that are recomputed
            whole.
        select_comm_recompute_exclude: names of communications whose result is kept, also in layers that are
            recomputed whole.
        parallel_optimizer_comm_recompute: whether weights sharded by FSDP2 are freed after forward and
            gathered again in backward.
        mp_comm_recompute: whether recomputed layers and modules communicate again; if false, the results of
            their communications are kept.
        recompute_slice_activation: whether each rank keeps only its part of the input of a layer that is
            recomputed whole, and gathers the whole input before the layer runs again.
        compile_budget: PyTorch's ``activation_memory_budget`` of each compiled layer (ours): 1 saves what the
            compiler saves by itself, 0 only the layer's inputs, as if the whole layer is recomputed. Default
            ``None``: not touched.
    """

    recompute: LayerCounts = False
    select_recompute: OpSelection = False
    select_comm_recompute: OpSelection | None = None
    select_recompute_exclude: OpSelection = False
    select_comm_recompute_exclude: OpSelection = False
    parallel_optimizer_comm_recompute: bool = False
    mp_comm_recompute: bool = True
    recompute_slice_activation: bool = False
    compile_budget: CompileBudget = None


@dataclass(frozen=True)
class ParallelConfig:
    """``parallel_config``: tensor and sequence parallelism, and the pipeline layout of the recompute tables.

    Args:
        tensor_parallel_size: number of processes that hold one model together.
        sequence_parallel_enabled: whether each of these processes keeps only its part of the sequence between
            the layers.
        pipeline_stage: number of stages of the pipeline for which the tables of ``recompute_config`` are
            written. With ``schedule`` that pipeline also runs.
        pp_interleave_num: number of interleaves of that pipeline: groups of layers in each stage. A table has
            a row for each.
        offset: how many layers a stage has more, or fewer (negative), than its equal share.
        schedule: the order in which `ActSwapTrainer` runs the forwards and backwards of the pipeline, with
            ``tensor_parallel_size`` processes per stage (ours). Default ``None``: no pipeline runs.
    """

    tensor_parallel_size: int = 1
    sequence_parallel_enabled: bool = False
    pipeline_stage: int = 1
    pp_interleave_num: int = 1
    offset: Offset = 0
    schedule: PipelineSchedule | None = None

    @property
    def runs_pipeline(self) -> bool:
        """Whether the layers are divided among processes, not only the tables among stages."""
        return self.schedule is not None and self.pipeline_stage > 1

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that divide the hidden states between layers along the sequence."""
        return self.tensor_parallel_size if self.sequence_parallel_enabled else 1


@dataclass(frozen=True)
class TileTokens:
    """Tiles of a given length.

    Args:
        tokens: number of tokens of one piece, at least 1.
    """

    tokens: int


@dataclass(frozen=True)
class OpTileRule:
    """An entry of ``tile_config.tile``.

    Args:
        op_name: op path of modules that treat tokens one by one; ``final_norm``: the norm after the layers.
        tokens: number of tokens of one tile, at least 1. ``auto``, the default: a sixteenth of the tokens of
            the call, at least 1,024.
        layers: global layer indices; true, the default: all layers; false: none.
    """

    op_name: str
    tokens: int | Literal["auto"] = "auto"
    layers: Layers = True


@dataclass(frozen=True)
class TileConfig:
    """``tile_config``: what runs over pieces of the tokens, one after the other (ours).

    Args:
        loss: whether head and loss of a causal language model run in tiles, so that the logits never exist
            all at once. ``auto``: tiles of at least 1,024 tokens, each with logits half as large as the
            hidden states of the batch; a batch of one tile runs whole. A number: that many tiles.
            ``off``: whole. Default ``None``: whole, unless the planner's ``adaptive`` finds that nothing else
            fits.
        tile: modules of layers that run in tiles and save only their input; each tile runs again in
            backward. The first entry that names a module of a layer applies.
    """

    loss: Literal["off", "auto"] | int | TileTokens | None = None
    tile: tuple[OpTileRule, ...] = ()


@dataclass(frozen=True)
class StreamConfig:
    """``stream_config``: the sequence in chunks, the keys and values of earlier ones on the host (ours).

    Args:
        tokens: number of tokens of a chunk. Longer sequences run chunk by chunk, forward and then backward,
            so that device memory does not grow with the sequence. ``auto``: enough tokens to hide the copies
            of keys and values behind the attention of an H200; ``off`` (default): the sequence is whole.
        grad_accum_dtype: dtype in which the gradients of keys and values are summed on the host over the
            chunks: ``fp32`` (default), or ``bf16``, which takes half the memory and rounds once for each
            chunk. (The name is DeepSpeed's.)
    """

    tokens: Literal["off", "auto"] | int = "off"
    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class MemoryConfig:
    """``memory``: the planner's section. MindSpeed's names for the same keys are in parentheses.

    Args:
        mode: ``smart_swap`` (``--smart-swap``): the planner chooses keep, swap or recompute for all ops
            without a fate written by hand; ``adaptive`` (``--adaptive-memory-optimization``): it chooses all
            fates, and none may be written by hand; ``off`` (default): no planner.
        budget_gib: the most device memory of a step, in GiB per rank (``target_memory``, in bytes). Default
            ``None``: all that the device has for the process, less ``margin_gib``.
        reduce_by_gib: by how many GiB the peak must be lower than without the planner (``reduction_memory``,
            in bytes). Default ``None``; not together with ``budget_gib``.
        margin_gib: GiB of the device that stay free if neither ``budget_gib`` nor ``reduce_by_gib`` is
            written (``redundant_memory``, in bytes). Default ``None``: 3 % of the device.
        preference: ``performance`` (default; ``BETTER_PERFORMANCE``): only activations are swapped;
            ``memory_saving`` (``BETTER_MEMORY_SAVING``): the optimizer's states too.
        warmup_steps: optimizer steps in which the profile is recorded (``warmup_step``). Default 2.
        search_steps: in how many optimizer steps plans are tried, at most (``stable_step - warmup_step``).
            Default 8.
        num_attn_layers_per_stage: number of decoder layers that ``swap_bucket_size`` is for. Default 1.
        swap_bucket_size: the most bytes that are swapped in that many layers; below 0: no limit; 0: none.
            Default -1.
        min_tensor_mib: size in MiB under which a tensor is never swapped (``tensor_size_filter``, in bytes).
            Default ``None``: 1 KiB.
        host_memory_gib: the most host memory of a rank, in GiB. Default ``None``: its share of what is free.
        bind_numa: whether each rank and its host memory stay beside its device on a machine with several
            NUMA nodes. Default true.
        plan_file: path of the file to which the plan is written when it is stable; a later run of the same
            training reads it instead of searching (``save_policy``). Default ``None``.

    ``min_tensor_mib``, ``host_memory_gib`` and ``bind_numa`` apply without the planner as well.
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
