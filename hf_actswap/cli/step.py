"""Describes a training step (`StepShape`), computes its profile on fake tensors, and optimizers' bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from ..config import ActSwapConfig, MemoryConfig, TileConfig, WeightsPlace
from ..engine.frozen_weights import problems_of_weights, sizes_on_host
from ..engine.install import put_tiles, tile_parts
from ..errors import PlanError, Problem
from ..parallel import enclosing_replicas
from ..plan import MemoryPlan, PlanRow
from ..plan.actions import OpCall, Scope, Tile
from ..plan.record import SavedStorage
from ..plan.tiles import tile_ladder
from ..planner.cost.data_axis import Unit, data_axis, units_of
from ..planner.cost.exchanges import Exchanged, exchanged
from ..planner.cost.simulate import StorageOutcome, fates_of
from ..planner.devices import DEFAULT_DEVICE, RANKS_OF_A_MACHINE, device_rates, rates_name
from ..planner.profile import Prediction, Profile
from ..planner.record.adjusted import (
    Baseline,
    with_baseline,
    with_link_beside_collectives,
    with_optimizer_in_backward,
    with_weights_on_host,
)
from ..planner.record.shapes import profile_from_shapes
from ..planner.states.in_backward import KEY
from ..planner.states.optimizer_states import DEFAULT_SHARE
from ..planner.states.state_bytes import state_bytes
from .options import AutocastName, DtypeName, PaperOptimizerName, QuantizeName, Sharding
from .subject import DTYPES, AnalysedModel, ModelError, QuantisedLinear, batch_on_meta


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [weight for weight in model.parameters() if weight.requires_grad]


def step_bytes(optimizer: str | None, model: nn.Module, in_fp32: bool = False) -> int:
    """Return the bytes that an optimizer's step allocates and frees again; ``in_fp32`` as of `state_bytes`.

    ``adamw_torch`` is PyTorch's AdamW with ``foreach``, which takes the roots of all second moments at once
    (``_multi_tensor_adamw``). Transformers' Adafactor has the gradient, the weight, and the update before and
    after its scaling in fp32, for one weight at a time. Fused and 8-bit optimizers need nothing of this size.
    """
    if optimizer == "adamw_torch":
        sizes = (4 * weight.numel() if in_fp32 else weight.nbytes for weight in _trained(model))
        return sum(sizes)
    if optimizer == "adafactor":
        return max((4 * 4 * weight.numel() for weight in _trained(model)), default=0)
    return 0


@dataclass(frozen=True)
class StepShape:
    """Batch, device, precision and optimizer of a training step.

    Args:
        device: one of `planner.devices`, or the name of the device that was measured.
        optimizer: the optimizer whose states are counted; ``None``: not given.
        gradient_dtype: type of gradients until the optimizer's step; ``None``: that of the weights.
        sharding: what data-parallel ranks shard.
        weights: where frozen weights of the layers are while no layer reads them.
        micro_batches: how many micro-batches the gradients of an optimizer's step are accumulated from.
        in_backward: whether the optimizer steps each parameter in backward.
        states_leave: whether the optimizer's states are on the host between its steps, because it is written.
        fused_loss: whether the training computes its loss from the head's weight, tile by tile, whatever the
            plan says: it is predicted in tiles, and the plan has none of the loss.
        target_tokens: tokens of a target sequence, for an encoder and a decoder; ``None``: ``tokens``.
    """

    sequences: int  # of a micro-batch
    tokens: int  # of a sequence
    device: str
    autocast: AutocastName | None
    optimizer: PaperOptimizerName | None
    gradient_dtype: DtypeName | None = None
    sharding: Sharding | None = None
    weights: WeightsPlace = "keep"
    micro_batches: int = 1
    in_backward: bool = False
    states_leave: bool = False
    fused_loss: bool = False
    target_tokens: int | None = None

    @property
    def in_fp32(self) -> bool:
        """Whether the optimizer steps fp32 weights, of which half-precision ones are made for compute.

        Under mixed precision Accelerate shards trained weights in fp32 for FSDP (``fsdp2_prepare_model``),
        and DeepSpeed keeps fp32 copies (ZeRO, section 3.1).
        """
        return self.sharding is not None and self.sharding.stage > 0 and self.autocast is not None

    @property
    def in_fsdp(self) -> bool:
        return self.sharding is not None and self.sharding.is_fsdp

    @property
    def state_ranks(self) -> int:
        """Over how many data-parallel ranks the optimizer's states are sharded."""
        return 1 if self.sharding is None else self.sharding.state_ranks

    @property
    def label_tokens(self) -> int:
        """Tokens of a sequence for which there are labels, and so logits."""
        return self.target_tokens or self.tokens

    def described(self) -> str:
        """Return the step as one line of text."""
        precision = f", {self.autocast} autocast" if self.autocast else ""
        states = f", {self.optimizer} states" if self.optimizer not in (None, "sgd", "none") else ""
        gradients = f", {self.gradient_dtype} gradients" if self.gradient_dtype else ""
        shares = f", {self.sharding.name} over {self.sharding.ranks} ranks" if self.sharding else ""
        place = ", frozen weights on the host" if self.weights == "host" else ""
        place += ", optimizer in backward" if self.in_backward else ""
        place += ", fused loss" if self.fused_loss else ""
        targets = f" and {self.target_tokens} of the target" if self.target_tokens else ""
        batch = f"{self.sequences} x {self.tokens} tokens{targets}"
        if self.micro_batches > 1:
            batch = f"{self.micro_batches} micro-batches of {batch}"
        return f"{batch} on {self.device}{precision}{states}{gradients}{shares}{place}"

    def document(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "batch": self.sequences,
            "seq": self.tokens,
            "target_seq": self.target_tokens,
            "device": self.device,
            "autocast": self.autocast,
            "optimizer": self.optimizer,
            "gradient_dtype": self.gradient_dtype,
            "sharding": None if self.sharding is None else asdict(self.sharding),
            "weights": self.weights,
            "micro_batches": self.micro_batches,
            "optimizer_in_backward": self.in_backward,
            "fused_loss": self.fused_loss,
        }


def device_name(asked: str | None) -> str:
    """Return the device to predict for: the one asked for, the one that is here, else `DEFAULT_DEVICE`."""
    return device_rates(asked).name if asked is not None else rates_here() or DEFAULT_DEVICE


def rates_here() -> str | None:
    """Return this machine's GPU, as `device_rates` takes it; ``None``: there is none, or it is not known."""
    return rates_name(torch.device("cuda")) if torch.cuda.is_available() else None


def profile_of(
    found: AnalysedModel,
    step: StepShape,
    tiles: Iterable[Tile] = (),
    has_loss: bool = True,
    gradients_exist: bool = False,
    workspaces: bool = True,
) -> Profile:
    """Return the profile of a step: run it on fake tensors, in tiles as a training would.

    Args:
        has_loss: whether the model computes a loss; if not, backward begins at its output (a pipeline stage
            before the last).
        gradients_exist: whether gradients of an earlier micro-batch are on the device.
        workspaces: whether the workspaces of the device's libraries are counted.

    Raises:
        ModelError: the model does not run on fake tensors.
        PlanError: a module of ``tiles`` cannot run over tiles of the tokens.
    """
    gradients_exist = gradients_exist or step.micro_batches > 1
    tiles = tuple(tiles)
    if step.fused_loss and has_loss and not any(tile.scope == "head" for tile in tiles):
        tiles = (*tiles, _fused_loss(found, step))
    states = state_bytes(step.optimizer, found.model, step.in_fp32)[0] + _masters_bytes(found, step)
    if step.target_tokens and not getattr(found.model.config, "is_encoder_decoder", False):
        hint = "Leave it out."
        expected = "a model with an encoder and a decoder"
        raise ModelError([Problem("--target-seq", expected, found.shape.family or found.name, hint)])
    shape = (step.sequences, step.tokens, step.label_tokens, step.device, step.autocast, states)
    key = (*shape, tiles, has_loss, gradients_exist, workspaces)
    if key not in found.profiles:
        found.profiles[key] = _from_shapes(found, *key)
    profile = found.profiles[key]
    if found.quantize is not None or step.gradient_dtype is not None or step.sharding is not None:
        profile = with_baseline(profile, _baseline(found, step, profile))
    in_step = step_bytes(step.optimizer, found.model, step.in_fp32) // step.state_ranks
    profile = replace(
        profile,
        outside_base_bytes=profile.outside_base_bytes + in_step,
        link=device_rates(step.device).link_of(ranks_of_a_machine(found, step)),
    )
    fabric, told = device_rates(step.device).fabric, exchanged_by(found, step, profile)
    if told is not None:
        profile = replace(profile, outside_ms=profile.outside_ms + told.added_ms)
        if fabric is not None and fabric.to_host_too:
            profile = with_link_beside_collectives(profile, told.forward_ms, told.backward_ms)
    if step.in_backward:
        profile = stepped_in_backward(found, step, profile)
    waiting = weights_on_host(found, step)
    return with_weights_on_host(profile, waiting) if waiting else profile


def _masters_bytes(found: AnalysedModel, step: StepShape) -> int:
    """Return the bytes of DeepSpeed's fp32 copies of trained weights, which are sharded as states are."""
    if not step.in_fp32 or step.in_fsdp:
        return 0
    return sum(4 * weight.numel() for weight in _trained(found.model) if weight.dtype != torch.float32)


def _fused_loss(found: AnalysedModel, step: StepShape) -> Tile:
    """Return the tiles of a fused loss: about as many logits as hidden states, a power of two of tokens.

    So Liger Kernel divides a batch (``fused_linear_cross_entropy.py``), and TRL's fused head takes less than
    three times as much (256 MiB, ``trl/kernels/chunked_logprob.py``).
    """
    tokens, head = step.sequences * step.label_tokens, found.shape.head
    if head is None:
        return Tile("head")  # which is rejected by name
    vocabulary, hidden = found.model.get_parameter(f"{head}.weight").shape
    least = math.ceil(tokens / math.ceil(vocabulary / hidden))
    return Tile("head", tokens=min(1 << (least - 1).bit_length(), tokens))


def _from_shapes(
    found: AnalysedModel,
    sequences: int,
    tokens: int,
    target_tokens: int,
    device: str,
    autocast: AutocastName | None,
    states_bytes: int,
    tiles: tuple[Tile, ...],
    has_loss: bool,
    gradients_exist: bool,
    workspaces: bool,
) -> Profile:
    parts = tile_parts(found.model, tiles, found.shape, enclosing_replicas())
    batch = batch_on_meta(found.model, sequences, tokens, target_tokens)
    if not has_loss:
        del batch["labels"]
    mixed = torch.autocast("cpu", DTYPES[autocast]) if autocast else nullcontext()
    try:
        with mixed, ExitStack() as tiled:
            for undo in put_tiles(found.model, parts, found.shape):
                tiled.callback(undo)
            return profile_from_shapes(
                found.model,
                found.shape,
                batch,
                device,
                optimizer_state_bytes=states_bytes,
                gradients_exist=gradients_exist,
                with_workspaces=workspaces,
            )
    except Exception as error:  # the model's own code runs: it may raise anything
        raise not_run("a model that runs on fake tensors", error) from error


def stepped_in_backward(found: AnalysedModel, step: StepShape, profile: Profile) -> Profile:
    """Return the profile of a step whose optimizer steps in backward, given that of the step without."""
    if problems := list(problems_in_backward(step)):
        raise PlanError(problems)
    whole = step_bytes(step.optimizer, found.model)
    profile = replace(profile, outside_base_bytes=profile.outside_base_bytes - whole)
    trained = sum(weight.nbytes for weight in _trained(found.model))
    resident = profile.optimizer_state_bytes // DEFAULT_SHARE if step.states_leave else 0
    return with_optimizer_in_backward(profile, step.micro_batches > 1, resident, whole / max(trained, 1))


def with_states_of(step: StepShape, memory: MemoryConfig) -> StepShape:
    """Return the step with the optimizer's states and step where ``memory`` says."""
    leave = memory.preference == "memory_saving"
    return replace(step, in_backward=memory.optimizer_in_backward, states_leave=leave)


def problems_in_backward(step: StepShape) -> Iterator[Problem]:
    """Yield why the optimizer of a step cannot step in backward."""
    if step.optimizer not in (None, "none", "sgd", "adamw", "adamw_torch"):
        hint = "--optimizer adamw, adamw_torch or sgd can."
        expected = "an optimizer of torch.optim, which computes each parameter by itself"
        yield Problem(KEY, expected, str(step.optimizer), hint)
    if step.sharding is not None:
        yield Problem(KEY, "false beside --shard", "true", "Gradients are summed after they are complete.")


def weights_on_host(found: AnalysedModel, step: StepShape) -> Mapping[Scope, int]:
    """Return the bytes of each layer's frozen weights that wait on the host; empty: all weights stay.

    Raises:
        PlanError: no weight of a layer is frozen, or something else owns them.
    """
    if step.weights == "keep":
        return {}
    beside = {"--quantize": found.quantize, "--shard": step.sharding}
    if asked := [name for name, value in beside.items() if value is not None]:
        hint = "Leave one out."
        raise PlanError([Problem("memory.weights", f"keep beside {name}", "host", hint) for name in asked])
    if problems := problems_of_weights(found.model, found.shape, on_paper=True):
        raise PlanError(problems)
    return sizes_on_host(found.model, found.shape)


def ranks_of_a_machine(found: AnalysedModel, step: StepShape) -> int:
    """Return how many of the ranks that a step has are on one machine."""
    return min(found.pipeline_stages * ranks_of_a_stage(found, step), RANKS_OF_A_MACHINE)


def ranks_of_a_stage(found: AnalysedModel, step: StepShape) -> int:
    """Return how many ranks hold the model together, or one stage of a pipeline."""
    return found.tensor_parallel_size * (step.sharding.ranks if step.sharding else 1)


def ladder_of(found: AnalysedModel, config: ActSwapConfig) -> Iterator[tuple[TileConfig, MemoryPlan]]:
    """Yield the configurations and plans of `tiles` for a model: each has more in tiles."""
    replicas = enclosing_replicas()
    return tile_ladder(config, found.model, found.shape, 1 if replicas is None else replicas.size)


def exchanged_by(found: AnalysedModel, step: StepShape, profile: Profile) -> Exchanged | None:
    """Return what data-parallel ranks send in a step, whatever the plan; ``None``: none, or not known.

    ``profile`` is that of the step without a plan.
    """
    if (sharding := step.sharding) is None:  # and the device may be one that was measured
        return None
    if (fabric := device_rates(step.device).fabric) is None:
        return None
    kept = DTYPES[step.gradient_dtype].itemsize if step.gradient_dtype and sharding.is_fsdp else None
    less = _bytes_less(found)

    def unit(weights: Iterable[nn.Parameter]) -> Unit:
        weights = list(weights)
        trained = [weight for weight in weights if weight.requires_grad]
        return Unit(
            sum(weight.nbytes - less.get(id(weight), 0) for weight in weights),
            sum(weight.nbytes for weight in trained),
            sum(weight.numel() * (kept or weight.element_size()) for weight in trained),
        )

    units, outside = units_of(found.model, _layers(found), unit)
    given = units, outside, sharding.stage, sharding.stays, sharding.ranks, fabric
    return exchanged(data_axis(profile, *given), sharding.ranks, fabric)


def _layers(found: AnalysedModel) -> dict[Scope, nn.Module]:
    return {layer.index: found.model.get_submodule(layer.module_path) for layer in found.shape.layers}


def _bytes_less(found: AnalysedModel) -> dict[int, int]:
    """Return how many bytes less the weights of quantised layers take than those of the model, by id."""
    if found.quantize is None:
        return {}
    stored = _QUANTIZED[found.quantize]
    modules = (module for layer in _layers(found).values() for module in layer.modules())
    weights = [module.weight for module in modules if isinstance(module, QuantisedLinear)]
    return {id(weight): weight.nbytes - stored(weight) for weight in weights}


def bucket_bytes(found: AnalysedModel, step: StepShape) -> int:
    """Return the bytes of DDP's buckets, which hold a copy of each gradient from the start on.

    So it is by default (``gradient_as_bucket_view=False``), in Accelerate and in the Trainer too.
    """
    is_ddp = step.sharding is not None and step.sharding.stage == 0
    return sum(weight.nbytes for weight in _trained(found.model)) if is_ddp else 0


def _baseline(found: AnalysedModel, step: StepShape, profile: Profile) -> Baseline:
    """Return sizes of stored weights and gradients; buffers count as weights outside the layers."""
    sharding = step.sharding or Sharding("ddp", 1)
    less = _bytes_less(found)
    passing: dict[tuple[Scope, str], int] = {}
    passing_ms: dict[tuple[Scope, str], float] = {}
    rate = device_rates(step.device).bytes_per_ms
    layers = _layers(found)
    if found.quantize is not None:
        for index, layer in layers.items():
            for path, module in layer.named_modules():
                if isinstance(module, QuantisedLinear):
                    product = index, f"{path}.linear"  # not the casts before and after it
                    passing[product] = module.weight.nbytes
                    read_bytes = module.weight.nbytes - less[id(module.weight)]
                    passing_ms[product] = (read_bytes + module.weight.nbytes) / rate
    sizes = [sum(w.nbytes - less.get(id(w), 0) for w in layer.parameters()) for layer in layers.values()]
    weight_bytes = profile.weight_bytes - sum(less.values()) + bucket_bytes(found, step)
    trained = _trained(found.model)
    made, values = sum(weight.nbytes for weight in trained), sum(map(torch.Tensor.numel, trained))
    sharded = 4 * values if step.in_fp32 and step.in_fsdp else made
    kept = sharded if step.gradient_dtype is None else DTYPES[step.gradient_dtype].itemsize * values
    return Baseline(
        layer_bytes=max(sizes),
        other_bytes=weight_bytes - sum(sizes),
        weight_bytes=weight_bytes,
        kept_bytes=weight_bytes + sharded - made,
        gradient_scale=Fraction(kept, made) if made else Fraction(1),
        stage=sharding.stage,
        ranks=sharding.ranks,
        stays=sharding.stays,
        summed_as_kept=step.in_fsdp and step.gradient_dtype is not None,
        passing=passing,
        passing_ms=passing_ms,
    )


def _nf4_bytes(weight: torch.Tensor) -> int:
    """Return a weight's bytes in NF4 (Dettmers et al., QLoRA, 2305.14314, section 3).

    An element has four bits, a block of 64 an fp32 constant.
    """
    return -(-weight.numel() // 2) + 4 * -(-weight.numel() // 64)


def _double_quantised_nf4_bytes(weight: torch.Tensor) -> int:
    """Return a weight's bytes in NF4 whose constants have 8 bits, and 256 of these an fp32 constant."""
    blocks = -(-weight.numel() // 64)
    return -(-weight.numel() // 2) + blocks + 4 * -(-blocks // 256)


def _int8_bytes(weight: torch.Tensor) -> int:
    """Return a weight's bytes in LLM.int8() (Dettmers et al., 2208.07339): int8, an fp32 constant per row."""
    return weight.numel() + 4 * weight.shape[0]


_QUANTIZED: dict[QuantizeName, Callable[[torch.Tensor], int]] = {
    "4bit": _double_quantised_nf4_bytes,
    "4bit-single": _nf4_bytes,
    "8bit": _int8_bytes,
}


def not_run(expected: str, error: Exception) -> ModelError:
    """Return the error to raise when the model's own code has raised ``error``."""
    text = " ".join(str(error).split())[:300] or "no reason"
    return ModelError([Problem("model", expected, f"{type(error).__name__}: {text}")])


def saved_by_row(profile: Profile, plan: MemoryPlan) -> Mapping[tuple[Scope, PlanRow | None], int]:
    """Return the bytes that autograd saves without a plan, by scope and the plan's row that decides on them.

    The row is ``None`` where no row does.
    """
    found: Counter[tuple[Scope, PlanRow | None]] = Counter()
    for storage in profile.saved.storages:
        scope, path, ordinal = _producer_of(storage)
        if scope is not None:
            found[scope, plan.row(scope, path, ordinal)] += storage.size_bytes
    return found


def _producer_of(storage: SavedStorage, without_saving: bool = False) -> OpCall:
    """Return what produced a storage that autograd saves, or, if asked for, one that it does not save."""
    first = next((use for use in storage.uses if use.kind == "saved"), None)
    if first is None and without_saving and storage.uses:
        first = storage.uses[0]
    return (None, "", None) if first is None else first.producer


def bytes_by_fate(profile: Profile, plan: MemoryPlan) -> Mapping[tuple[Scope, str, StorageOutcome], int]:
    """Return bytes by scope, op path and what happens to them under a plan, as `Prediction` counts them.

    The op path is that of the plan's row that decides on them; an empty one: no row does. A storage that a
    recomputed op reads may be swapped or kept although autograd saves it nowhere.
    """
    found: Counter[tuple[Scope, str, StorageOutcome]] = Counter()
    for storage, outcome in zip(profile.saved.storages, fates_of(profile, plan), strict=True):
        scope, path, ordinal = _producer_of(storage, without_saving=outcome in ("swap", "keep"))
        if scope is not None:
            row = plan.row(scope, path, ordinal)
            op = "" if row is None else row.op_path or "everything"
            found[scope, op, outcome] += storage.size_bytes
    return found


def saved_by_op(profile: Profile, scope: Scope, op_path: str) -> int:
    """Return the bytes that autograd saves, without a plan, of what the ops at or below a path produce."""
    by_op = profile.saved.by_op().items()
    below = f"{op_path}." if op_path else ""
    return sum(
        size for (of, path), size in by_op if of == scope and (path == op_path or path.startswith(below))
    )


def prediction_document(found: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON values, without its curve and its copies."""
    names = (
        *("peak_bytes", "step_ms", "recompute_ms", "forward_stall_ms", "backward_stall_ms"),
        *("kept_bytes", "swapped_bytes", "recomputed_bytes", "host_bytes"),
    )
    return {name: getattr(found, name) for name in names}
