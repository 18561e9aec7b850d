"""Frozen dataclasses of what the user wrote; the fields are the YAML keys of the references, verbatim.

Nothing is normalised here: a list per pipeline stage stays one (as a tuple), because only the plan knows the
model. Two units matter:

* ``backward_prefetch`` and ``default_prefetch`` count **operators**: one operator is one autograd
  node in creation order. ``p`` means that the copy back to the device starts when backward is ``p``
  operators before the first consumer, and that device memory is released ``3 * p`` operators after
  the copy out began (MindSpore ``offload_activation.cc``; `docs/reference.md`).
* layer indices count decoder layers from 0 over the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, Strict

from .layer_values import Layers, Offset, OpExclusion, OpPath, OpSelection, RecomputedLayers
from .sizes import GIB, bytes_of
from .validation import AnyFloat, AnyInt, AtLeast1, Expected, Flag, Whole, one_of

MIB = 2**20


def _percent_hint(value: Any) -> str:
    percent = isinstance(value, int | float) and not isinstance(value, bool) and 1 < value <= 100
    return f"Percent are written as a share: {value / 100:g}." if percent else ""


def _in_unit(unit: str, unit_bytes: int) -> Expected:
    def hint(value: Any) -> str:  # where a unit is written, as on command lines
        text = value.strip() if isinstance(value, str) else ""
        try:
            size = bytes_of(text if text[-1:].isalpha() else text + unit)
        except ValueError:
            return ""
        return f"Write the number of {unit}: {size / unit_bytes:.6g}."

    return Expected("a number above 0", hint)


def _off(value: Any) -> Any:
    return "off" if value is False else value  # YAML 1.1 reads a bare `off` as false


_AtLeast0 = Annotated[AnyInt, Field(ge=0), Expected("a whole number, at least 0")]
_Positive = Annotated[AnyFloat, Field(gt=0)]
_AboveZero = Annotated[_Positive, Expected("a number above 0")]
_Gib = Annotated[_Positive, _in_unit("GiB", GIB)]
_Mib = Annotated[_Positive, _in_unit("MiB", MIB)]
# abs: no minus before a zero
_Margin = Annotated[AnyFloat, Field(ge=0), AfterValidator(abs), Expected("a number, at least 0")]
Text = Annotated[str, Strict(), Field(min_length=1), Expected("a text")]
_Share = Annotated[AnyFloat, Field(ge=0, le=1), Expected("a number from 0 to 1", _percent_hint)]

_PREFETCH = Expected("a whole number of operators, at least 1, or auto")
_SMALL = BeforeValidator(lambda value: "auto" if isinstance(value, str) and value == "Auto" else value)
Prefetch = Annotated[AtLeast1 | Literal["auto"], _SMALL, _PREFETCH]
"""Number of operators, at least 1; or ``"auto"`` (also written ``Auto``)."""

_SHARES = Expected("a number from 0 to 1, or a list with one for each layer", _percent_hint)
CompileBudget = Annotated[_Share | Annotated[tuple[_Share, ...], Field(min_length=1)], _SHARES]
"""Share of activation memory, 0 to 1: for every layer, or one for each."""

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]
"""Schedules of a pipeline, with the names of `torch.distributed.pipelining`."""

_MODES = one_of("off", "smart_swap", "adaptive")
Mode = Annotated[Literal["off", "smart_swap", "adaptive"], BeforeValidator(_off), _MODES]
Preference = Annotated[
    Literal["auto", "performance", "memory_saving"], one_of("auto", "performance", "memory_saving")
]

_VERIFY = one_of("first", "always", "off")
Verify = Annotated[Literal["first", "always", "off"], BeforeValidator(_off), _VERIFY]
"""When recomputed tensors are compared with those of forward: in a plan's first step, always, never."""

WeightsPlace = Annotated[Literal["keep", "host"], one_of("keep", "host")]
"""Where frozen weights of layers wait while no layer reads them: on the device, or in host memory."""


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

    op_name: OpPath
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

    swap: Flag = False
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
            gathered again in backward. Default ``None``: ``reshard_after_forward`` of ``fully_shard``
            decides; false says no more.
        mp_comm_recompute: whether recomputed layers and modules communicate again; if false, the results of
            their communications are kept.
        recompute_slice_activation: whether each rank keeps only its part of the input of a layer that is
            recomputed whole, and gathers the whole input before the layer runs again.
        compile_budget: PyTorch's ``activation_memory_budget`` of each compiled layer (ours): 1 saves what the
            compiler saves by itself, 0 only the layer's inputs, as if the whole layer is recomputed. Default
            ``None``: not touched.
    """

    recompute: RecomputedLayers = False
    select_recompute: OpSelection = False
    select_comm_recompute: OpSelection | None = None
    select_recompute_exclude: OpExclusion = False
    select_comm_recompute_exclude: OpExclusion = False
    parallel_optimizer_comm_recompute: Flag | None = None
    mp_comm_recompute: Flag = True
    recompute_slice_activation: Flag = False
    compile_budget: CompileBudget | None = None


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

    tensor_parallel_size: AtLeast1 = 1
    sequence_parallel_enabled: Flag = False
    pipeline_stage: AtLeast1 = 1
    pp_interleave_num: AtLeast1 = 1
    offset: Offset = 0
    schedule: Annotated[PipelineSchedule, one_of(*get_args(PipelineSchedule))] | None = None

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
        tokens: number of tokens of one tile, at least 1.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    tokens: AtLeast1


TileLength = Annotated[AtLeast1 | Literal["auto"], Expected("a whole number of tokens, at least 1, or auto")]

Loss = Annotated[
    Literal["off", "auto"] | AtLeast1 | TileTokens,
    BeforeValidator(_off),
    Expected("auto, off, a whole number of tiles, at least 1, or {tokens: a whole number, at least 1}"),
]

ChunkTokens = Annotated[
    Literal["off", "auto"] | AtLeast1,
    BeforeValidator(_off),
    Expected("auto, off or a whole number, at least 1"),
]


@dataclass(frozen=True)
class OpTileRule:
    """An entry of ``tile_config.tile``.

    Args:
        op_name: op path of modules that treat tokens one by one; ``final_norm``: the norm after the layers.
        tokens: number of tokens of one tile, at least 1. ``auto``, the default: a sixteenth of the tokens of
            the call, at least 1,024.
        layers: global layer indices; true, the default: all layers; false: none.
    """

    op_name: OpPath
    tokens: TileLength = "auto"
    layers: Layers = True


@dataclass(frozen=True)
class TileConfig:
    """``tile_config``: what runs over tiles of the tokens, one after the other (ours).

    Args:
        loss: whether head and loss of a causal language model run in tiles, so that the logits never exist
            all at once. ``auto``: tiles of at least 1,024 tokens, each with logits half as large as the
            hidden states of the batch; a batch of one tile runs whole. A number: that many tiles.
            ``off``: whole. Default ``None``: whole, unless the planner's ``adaptive`` finds that nothing else
            fits.
        tile: modules of layers that run in tiles and save only their input; each tile runs again in
            backward. The first entry that names a module of a layer applies.
    """

    loss: Loss | None = None
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

    tokens: ChunkTokens = "off"
    grad_accum_dtype: Annotated[Literal["fp32", "bf16"], one_of("fp32", "bf16")] = "fp32"


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
        preference: ``performance`` (``BETTER_PERFORMANCE``): only activations are swapped; ``memory_saving``
            (``BETTER_MEMORY_SAVING``): the optimizer's states too; ``auto`` (default): under ``adaptive``
            the states too, where a step is predicted to be faster so; else as ``performance``.
        warmup_steps: optimizer steps in which the profile is recorded (``warmup_step``). Default 2.
        search_steps: in how many optimizer steps plans are tried, at most (``stable_step - warmup_step``).
            Default 8.
        num_attn_layers_per_stage: number of decoder layers that ``swap_bucket_size`` is for. Default 1.
        swap_bucket_size: the most bytes that are swapped in that many layers; below 0: no limit; 0: none.
            Default -1.
        min_tensor_mib: size in MiB under which a tensor is never swapped (``tensor_size_filter``, in bytes).
            Default ``None``: 1 KiB, and what the planner swaps a 2^17th of the budget (192 KiB of 24 GiB).
        host_memory_gib: the most host memory of a rank, in GiB. Default ``None``: its share of what is free.
        bind_numa: whether each rank and its host memory stay beside its device on a machine with several
            NUMA nodes. Default true.
        verify: ``first`` (default): in the first step under a plan what recomputation rebuilds is compared
            with what forward had, bit by bit; an op that differs is kept from then on; ``always``: in every
            step; ``off``: never.
        weights: ``host``: frozen weights of the layers (the base of LoRA and other adapters) are in
            page-locked host memory, and come to the device layer by layer ahead of forward and backward;
            ``keep`` (default): weights stay on the device, but under ``adaptive`` with ``preference: auto``,
            which moves them to the host where nothing fits with them on the device; ``auto``: the planner
            moves them there, or where the step is predicted to be faster so.
        optimizer_in_backward: ``true``: the optimizer steps each parameter in backward, as soon as its
            gradient is complete (with accumulation: in the last micro-batch), and frees the gradient;
            ``false`` (default): gradients wait for the optimizer's step.
        in_backward_clip_value: with ``optimizer_in_backward``: gradients are clipped to this absolute value,
            as ``torch.nn.utils.clip_grad_value_`` does. Default ``None``: they are not.
        in_backward_clip_last_norm: with ``optimizer_in_backward``: gradients are clipped to this norm, by the
            norm of the step before (that of this step is not known yet); the first step of a run is not
            clipped. Default ``None``.
        plan_file: path of the file to which the plan is written when it is stable; a later run of the same
            training reads it instead of searching (``save_policy``). Default ``None``.

    ``min_tensor_mib``, ``host_memory_gib``, ``bind_numa``, ``verify``, ``weights``,
    ``optimizer_in_backward`` and its clipping apply without the planner as well.
    """

    mode: Mode = "off"
    budget_gib: _Gib | None = None
    reduce_by_gib: _Gib | None = None
    margin_gib: _Margin | None = None
    preference: Preference = "auto"
    warmup_steps: AtLeast1 = 2
    search_steps: _AtLeast0 = 8
    num_attn_layers_per_stage: AtLeast1 = 1
    swap_bucket_size: Whole = -1
    min_tensor_mib: _Mib | None = None
    host_memory_gib: _Gib | None = None
    bind_numa: Flag = True
    verify: Verify = "first"
    weights: Annotated[Literal["keep", "host", "auto"], one_of("keep", "host", "auto")] = "keep"
    optimizer_in_backward: Flag = False
    in_backward_clip_value: _AboveZero | None = None
    in_backward_clip_last_norm: _AboveZero | None = None
    plan_file: Text | None = None

    @property
    def weights_may_move(self) -> bool:
        """Whether the planner may move frozen weights to the host, at least where nothing fits otherwise."""
        chooses = self.mode == "adaptive" and self.preference == "auto" and not self.optimizer_in_backward
        return self.weights == "auto" or (self.weights == "keep" and chooses)
