"""A training of a model that several ranks hold together, and what Accelerate has to do differently for it.

====================== ==================================================================================
what                   how
====================== ==================================================================================
who holds what         a mesh (data axis, tensor axis); the model is patched before the optimizer is built
batches                by data rank; metrics and counts of tokens have each sample once
wrapping               autocast by Accelerate; DistributedDataParallel over the data axis only, never over
                       the world, where it would overwrite every rank's shards by those of rank 0
gradients              tagged ones are summed once per optimizer step, when the norm is computed
norm and clip          of the whole model, the same on every rank
====================== ==================================================================================

This module does not depend on the Trainer: `trainer_mixin` and `callback` use it there, `prepare` in other
loops.

**TRL's fused head.** TRL's trainers replace ``model.forward`` by one that takes ``fused_lm_head=True`` and
then reads the head's weight itself, in tiles, for log-probabilities, entropy and accuracy per token instead
of logits. A rank that holds a part of the weight would get these for a part of the vocabulary only. So TRL's
forward is replaced in turn by one that computes the same fields from every rank's part of the logits.
"""

from __future__ import annotations

import functools
import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import ParallelismConfig
from accelerate.utils import recursively_apply
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.trainer_pt_utils import find_batch_size
from transformers.utils import ModelOutput

from ..config import ActSwapConfig
from ..engine.schedule import PassOrder
from ..errors import Problem
from ..parallel.collectives import reduce_in_place
from ..parallel.gradients import TaggedGradients, clip_grad_norm, reject_unsummed
from ..parallel.mesh import ParallelMesh, build_mesh, check_processes, sharded_parameters
from ..parallel.patch_model import Patched, patch_model
from ..parallel.rank_agreement import (
    LostRanks,
    RankAgreementError,
    by_rank,
    check_agreement,
    digest,
    failing_together,
    parameters_fact,
)
from ..parallel.sequence_region import IGNORED, ModelHook
from ..parallel.vocabulary import parallel_cross_entropy, shard_of
from ..plan import MemoryPlan
from ..planner import PlannedTraining
from ..releases import parallelism_names_sequence_backend, prepared_models_are_known
from ..report import BytesBar
from ..report.run_files import RecordedStages
from .parallel_checkpoint import full_optimizer_state, names_of_parameters, own_optimizer_state, rebind
from .parallel_limits import ParallelTrainingError


def read_by_data_rank(accelerator: Any, mesh: ParallelMesh) -> None:
    """Let data loaders that ``accelerator`` prepares from now on give the ranks of a group the same batches.

    Accelerate does so for a mesh with a dim ``tp``. The mesh is set on this accelerator, not in Accelerate's
    state, which later trainings of the process share. Accelerate assumes that the ranks of a group have
    consecutive numbers. In a pipeline they have not: it is given the process index that this rank would have.
    """
    accelerator._prepare_device_mesh = lambda: mesh.device_mesh
    index = mesh.data_parallel_rank * mesh.tensor_parallel_size + mesh.tensor_parallel_rank

    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        with patched_attribute(accelerator.state, "process_index", index):
            return type(accelerator).prepare_data_loader(accelerator, *args, **kwargs)

    accelerator.prepare_data_loader = prepare_data_loader
    if accelerator.dataloader_config.dispatch_batches is None:
        # By default rank 0 reads an IterableDataset for all. With a tp dim Accelerate has no data axis there,
        # and would send one batch to every rank.
        accelerator.dataloader_config.dispatch_batches = False


def gather_one_of_each(accelerator: Any, mesh: ParallelMesh) -> None:
    """Let ``accelerator.gather_for_metrics`` return each sample once, not once per rank that computed it."""
    original: Callable[..., Any] = accelerator.gather_for_metrics
    first_ranks = mesh.device_mesh.mesh[:, 0].tolist()

    def one_of_each(gathered: torch.Tensor) -> torch.Tensor:  # [ranks * n, ...] to [ranks / tp * n, ...]
        by_rank = gathered.reshape(accelerator.num_processes, -1, *gathered.shape[1:])
        return by_rank[first_ranks].flatten(0, 1)

    def gather(data: Any) -> Any:
        return recursively_apply(one_of_each, type(accelerator).gather(accelerator, data))

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object or not _all_tensors(input_data):
            mine = input_data if mesh.tensor_parallel_rank == 0 else type(input_data)()
            return original(mine, use_gather_object=True)
        with patched_attribute(accelerator, "gather", gather):
            return original(input_data)

    accelerator.gather_for_metrics = gather_for_metrics


def prepare_without_ddp(accelerator: Any, model: nn.Module) -> nn.Module:
    """Let Accelerate prepare a model without DDP over all ranks, also when it is given to it once more."""
    prepared: nn.Module = accelerator.prepare_model(model, evaluation_mode=True)
    if not prepared_models_are_known():
        prepare_model = accelerator.prepare_model

        def prepare_others(given: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            found: nn.Module = given if given is prepared else prepare_model(given, *args, **kwargs)
            return found

        accelerator.prepare_model = prepare_others
    return prepared


def parallelism_config_set(accelerator: Any, tensor_parallel_size: int) -> AbstractContextManager[None]:
    """Within it, Accelerate's ``parallelism_config`` says how many ranks train on the same batch.

    The Trainer of transformers 5.17 reads only this when it counts tokens and scales the loss. It is not set
    for longer, because Accelerate would then prepare, clip and save in its own way.
    """
    declared = ParallelismConfig(tp_size=tensor_parallel_size)
    if not parallelism_names_sequence_backend():
        declared.sp_backend = None
    return patched_attribute(accelerator.state, "parallelism_config", declared)


@contextmanager
def patched_attribute(of: Any, name: str, answer: Any) -> Iterator[None]:
    """Within the block, the attribute ``name`` (a method or value) of the object ``of`` is ``answer``."""
    held, before = name in vars(of), vars(of).get(name)
    setattr(of, name, answer)
    try:
        yield
    finally:
        if held:
            setattr(of, name, before)
        else:
            delattr(of, name)


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


_FLAG = "fused_lm_head"
_FIELDS = frozenset({"log_probs", "entropy", "is_top1"})
_PIECE_TOKENS = 1024
"""Tokens whose logits are in fp32 at a time. If the head runs in tiles, only these logits are computed."""


@dataclass
class ParallelFusedOutput(ModelOutput):
    """The fields of TRL's ``FusedCausalLMOutput``, per token ``[B, S - 1]``; reading logits gathers them."""

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    label_mask: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


def replace_fused_head(patched: Patched) -> None:
    """Replace TRL's fused forward on a patched model, if there is one; safe to call again.

    Raises:
        ParallelTrainingError: TRL's forward returns a field that the replacement cannot compute.
    """
    root = patched.bare
    fused = getattr(root.forward, "__func__", None)
    if fused is None or _FLAG not in (getattr(fused, "__kwdefaults__", None) or {}):
        return
    settings = inspect.getclosurevars(fused).nonlocals
    _reject(settings)
    before, temperature = root.forward, float(settings.get("temperature", 1.0))

    # It has the signature of the model's own forward: the Trainer chooses the data's columns by it.
    @functools.wraps(type(root).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return _fused_forward(patched, temperature, self, *args, **kwargs)
        return before(*args, **kwargs)

    root.forward = types.MethodType(forward, root)


def _reject(settings: Mapping[str, Any]) -> None:
    unknown = sorted(set(settings.get("outputs", ())) - _FIELDS)
    if unknown or settings.get("cast_lm_head_to_fp32"):
        found = ", ".join(unknown) or "a head in fp32"
        hint = "Use a trainer that asks for less, or tensor_parallel_size 1."
        known = ", ".join(sorted(_FIELDS))
        raise ParallelTrainingError(
            [Problem("the trainer's fused head", f"no more than {known}", found, hint)]
        )


def _fused_forward(patched: Patched, temperature: float, model: Any, *args: Any, **kwargs: Any) -> Any:
    labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    count = kwargs.pop("num_items_in_batch", None)
    kwargs["use_cache"] = False
    output = type(model).forward(model, *args, **kwargs)
    logits = output.logits if shifted is not None else output.logits[:, :-1]
    targets = labels[:, 1:] if shifted is None else shifted
    current = patched.region.current
    if current is not None:
        current.loss_computed = True
        if current.length:  # without the padding that made the length divisible by the ranks
            kept = current.length - (shifted is None)
            logits, targets = logits[:, :kept], targets[:, :kept]
    shard, group = logits / temperature, patched.group
    vocabulary_size = model.config.get_text_config().vocab_size
    mask = targets != IGNORED
    losses = parallel_cross_entropy(
        shard, targets, process_group=group, vocabulary_size=vocabulary_size, ignore_index=IGNORED
    )
    with torch.no_grad():
        own, tokens = shard.detach(), max(1, _PIECE_TOKENS // len(targets))
        some = [slice(first, first + tokens) for first in range(0, targets.shape[1], tokens)]
        found = [_statistics(own[:, at].float(), targets[:, at], vocabulary_size, group) for at in some]
        entropy, is_top1 = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    loss = losses.sum() / (mask.sum().clamp(min=1) if count is None else count)
    return ParallelFusedOutput(
        loss=loss,
        log_probs=-losses,
        entropy=entropy.masked_fill(~mask, 0),
        is_top1=is_top1 & mask,
        label_mask=mask,
        aux_loss=getattr(output, "aux_loss", None),
        logits=output.logits,
    )


def _statistics(
    shard: torch.Tensor, targets: torch.Tensor, vocabulary_size: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return entropy (nats) of each token's prediction, and whether its target is the top id: ``[B, S]``."""
    held = shard_of(shard, vocabulary_size, group)
    columns = F.pad(shard[..., : held.columns], (0, int(held.columns == 0)), value=-torch.inf)
    largest = reduce_in_place(columns.amax(-1), group, dist.ReduceOp.MAX)
    shifted = columns - largest.unsqueeze(-1)
    weights = shifted.exp()
    is_own, place = held.owned(targets)
    is_top = is_own & (columns.gather(-1, place.unsqueeze(-1)).squeeze(-1) == largest)
    products = weights * shifted.nan_to_num(neginf=0.0)
    sums = reduce_in_place(torch.stack([weights.sum(-1), products.sum(-1), is_top.float()]), group)
    total, product, top = sums.unbind()
    return total.log() - product / total, top > 0


class DividedTraining(ABC):
    """Base class: a model that several ranks hold together, in a training that Accelerate drives.

    Args:
        accelerator: Accelerate's accelerator. From now on it prepares data loaders, gathers metrics and
            clips as a divided model needs it.
        mesh: mesh of all processes; the ranks along its second axis hold one model together.
        model: the model without wrappers.
        timeout_s: how long ranks wait for each other when they compare batches.

    Attributes:
        mesh: mesh of all processes.
        tensor_group: the ranks that hold each layer together; ``None``: one rank does.
        lost_ranks: names the ranks that have ended, in errors of a training or an evaluation.
        shows_bars: whether rank 0 shows progress bars (the Trainer's ``disable_tqdm``).
        passes: order of forwards and backwards on a pipeline's stage; windows of swapped tensors may reach
            from one into the next. ``None``: there is no pipeline.
        phase: returns the planner's phase on this rank; ``None``: there is no planner.
    """

    tensor_group: dist.ProcessGroup | None
    passes: PassOrder | None = None
    phase: Callable[[], str] | None = None

    def __init__(self, accelerator: Any, mesh: ParallelMesh, model: nn.Module, timeout_s: float) -> None:
        self.mesh, self._accelerator = mesh, accelerator
        self._expects_batch, self._timeout_s = True, timeout_s
        self._counts_batches, self.lost_ranks = False, LostRanks()
        self.shows_bars = True
        model.register_load_state_dict_pre_hook(OwnNamesHook())
        read_by_data_rank(accelerator, mesh)
        gather_one_of_each(accelerator, mesh)
        accelerator.clip_grad_norm_ = self.clip_grad_norm_

    @abstractmethod
    def wrap(self, model: nn.Module, ddp_settings: Mapping[str, Any] | None = None) -> nn.Module:
        """Prepare a model for training: autocast, and DDP where it is needed, with these arguments."""

    @abstractmethod
    def replace_fused_head(self) -> None:
        """Replace TRL's fused head by one for a divided vocabulary, if there is one."""

    @abstractmethod
    def begin_step(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Take note of the micro-batches of an optimizer step when the Trainer has read them."""

    @abstractmethod
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Replaces ``accelerator.clip_grad_norm_``: sum gradients that ranks share, clip by the model's norm.

        Returns:
            The norm of the whole model's gradients before clipping: fp32 scalar, the same on every rank.
        """

    @abstractmethod
    def check_summed(self) -> None:
        """See to it before the optimizer's step that gradients that ranks share are summed."""

    @abstractmethod
    def whole_weights(self, keeps: bool) -> dict[str, torch.Tensor]:
        """Return the model's whole tensors on the CPU. Every rank must call it.

        Args:
            keeps: whether this rank gets them; other ranks only take part, and get an empty dict.
        """

    @abstractmethod
    def full_optimizer_state(self, optimizer: torch.optim.Optimizer, keeps: bool) -> dict[str, Any]:
        """Return the ``state_dict`` of the undivided model's optimizer; as `whole_weights`."""

    @abstractmethod
    def own_optimizer_state(
        self, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return this rank's part of an optimizer's whole state. Every rank must call it."""

    @property
    def ranks_per_model(self) -> int:
        """Ranks that hold one model together, and train on the same batch."""
        return self.mesh.tensor_parallel_size

    @property
    def recorded_stage(self) -> int | None:
        """The pipeline stage whose run this rank records, one rank for each; ``None``: this one does not."""
        return 0 if dist.get_rank() == 0 else None

    def recorded_stages(self, micro_batches: int) -> RecordedStages | None:
        """Return what the record says of the stages, with ``micro_batches`` in a step."""
        return None

    def training_of_rank(self, training: PlannedTraining, micro_batches: int) -> PlannedTraining:
        """Return ``training`` as this rank plans for it, with ``micro_batches`` in a step."""
        return training

    def plan_of_rank(self, plan: MemoryPlan) -> MemoryPlan:
        """Return this rank's part of a plan of the whole model; warn of what is costly in it."""
        return plan

    def plan_path(self, path: str) -> str:
        """Return the path of this rank's plan file, if ``path`` is that of the whole model's."""
        return path

    def training_step(self, trainer: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a micro-batch forward and backward by the Trainer's own method ``stock``; return its loss."""
        return stock(*args, **kwargs)

    def prediction_step(self, trainer: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a batch without gradients by the Trainer's own ``stock``; return loss, logits and labels."""
        return stock(*args, **kwargs)

    def whole_model(self) -> AbstractContextManager[None]:
        """Return the context in which the model has all of its modules; loading fills those of this rank."""
        return nullcontext()

    def storing_plans(self) -> AbstractContextManager[None]:
        """Return the context in which plans are written into a checkpoint. Every rank must enter it."""
        return nullcontext()

    def planners_agreeing(self) -> AbstractContextManager[None]:
        """Return the context in which the planners of all ranks decide on their plans."""
        return nullcontext()

    def expect_batches(self, loader: Any) -> dict[str, str]:
        """Let `check_batches` compare what a training reads; return facts about it that ranks must share."""
        self._expects_batch = True
        found = length_of(loader)
        self._counts_batches = found is None
        return {"batches in an epoch": found or "not known"}

    def check_batches(self, batches: Sequence[Any]) -> None:
        """Compare a step's first batch, and how many there are if that of an epoch is not known."""
        if self._counts_batches:
            self._check_count(len(batches), "micro-batches of this step")
        if batches:
            self.check_batch(batches[0])

    def same_batches(self, loader: Any) -> Any:
        """Return a loader for an evaluation, which raises an error if ranks have other numbers of batches.

        Every rank must call it, and read the loader to its end.
        """
        found = length_of(loader)
        with failing_together("evaluation", self._timeout_s) as facts:
            facts["batches of the evaluation"] = found or "not known"
        if found is not None:
            return loader
        return CountedLoader(loader, self._check_count, weighs_last=self.mesh.data_parallel_size == 1)

    def _check_count(self, count: int, what: str) -> None:
        """Raise an error if ``count`` is not the same on all ranks; every rank must call it."""
        counts = torch.zeros(dist.get_world_size(), dtype=torch.long, device=self._accelerator.device)
        counts[dist.get_rank()] = count
        assert dist.group.WORLD is not None
        reduce_in_place(counts, dist.group.WORLD)
        of_rank = {rank: str(found) for rank, found in enumerate(counts.tolist())}
        if len(set(of_rank.values())) > 1:
            hint = "Each rank must read equally many batches: give datasets without a length the same number."
            raise RankAgreementError([Problem(what, "the same on all ranks", by_rank(of_rank), hint)])

    def check_batch(self, batch: Any) -> None:
        """Check that the ranks of a group have the same first batch in a training.

        They have not if a data loader was not prepared, or a random sampler has a seed of its own; then they
        would train on half of one batch and half of another.
        """
        if not self._expects_batch:
            return
        self._expects_batch = False
        found = dict(batch) if isinstance(batch, Mapping) else {}
        tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        text = "".join(f"{name} {value.shape} {value.tolist()}" for name, value in tensors.items())
        ranks = dist.get_process_group_ranks(self.mesh.tensor_parallel_group)
        check_agreement({"batch": digest(text)}, self._timeout_s, "batch", ranks)

    @contextmanager
    def gathering_bar(self, what: str) -> Iterator[BytesBar | None]:
        """Yield a progress bar for the gathering of ``what`` on rank 0, ``None`` on other ranks."""
        if dist.get_rank() != 0:
            yield None
            return
        bar = BytesBar(f"gathering {what}", shown=self.shows_bars)
        try:
            yield bar
        finally:
            bar.close()


def length_of(loader: Any) -> str | None:
    """Return how many batches and samples a data loader has; ``None``: that is not known."""
    try:
        batches = len(loader)
    except (TypeError, NotImplementedError):
        return None
    dataset = getattr(loader, "dataset", None)
    return f"{batches} ({len(dataset)} samples)" if isinstance(dataset, Sized) else str(batches)


class CountedLoader:
    """A data loader without a length: before each batch the ranks compare whether all of them have one.

    Args:
        loader: the data loader; everything but reading it is left to it.
        check: raises an error if a number, described by a text, is not the same on all ranks.
        weighs_last: let the last batch count in the mean loss by its samples. Accelerate does so where it
            knows the number of samples, or reads for all ranks.
    """

    def __init__(self, loader: Any, check: Callable[[int, str], None], weighs_last: bool) -> None:
        self._loader, self._check, self._weighs_last = loader, check, weighs_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for count, batch in enumerate(self._loader, 1):
            self._check(count, "batches of the evaluation")
            if self._weighs_last and getattr(self._loader, "end_of_dataloader", False):
                self._loader.remainder = find_batch_size(batch) or -1  # -1: not known
            yield batch
        self._check(count, "batches of the evaluation")  # ranks with more of them are at the next


class ParallelTraining(DividedTraining):
    """A patched model in a training that Accelerate drives; see `DividedTraining`."""

    def __init__(
        self, accelerator: Any, mesh: ParallelMesh, patched: Patched, timeout_s: float = 60.0
    ) -> None:
        super().__init__(accelerator, mesh, patched.bare, timeout_s)
        self.patched, self.tensor_group = patched, patched.group
        self._gradients = TaggedGradients(patched.model, patched.group)

    def replace_fused_head(self) -> None:
        replace_fused_head(self.patched)

    def begin_step(self, batches: Sequence[Mapping[str, Any]]) -> None:
        pass  # they come one by one

    def sum_gradients(self) -> None:
        """Sum the tagged gradients that are not summed yet over the ranks of the group."""
        self._gradients.reduce()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        self._accelerator.unscale_gradients()
        self.sum_gradients()
        return clip_grad_norm(parameters, max_norm, norm_type, process_group=self.patched.group)

    def check_summed(self) -> None:
        reject_unsummed(self.patched.model.parameters())

    def whole_weights(self, keeps: bool) -> dict[str, torch.Tensor]:
        rank = self.patched.group.rank()
        with self.gathering_bar("weights") as progress:
            # `only_rank=-1` is no rank: this rank takes part and keeps nothing.
            return self.patched.full_state_dict(only_rank=rank if keeps else -1, progress=progress)

    def full_optimizer_state(self, optimizer: torch.optim.Optimizer, keeps: bool) -> dict[str, Any]:
        with self.gathering_bar("optimizer states") as progress:
            return full_optimizer_state(optimizer, self.patched, keeps, progress)

    def own_optimizer_state(
        self, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]
    ) -> dict[str, Any]:
        return own_optimizer_state(optimizer, self.patched, full)

    def shard_over_data(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Shard the model over the data axis by FSDP2, in place of DDP; ``optimizer`` as in `rebind`."""
        model = self.patched.model
        names = None if optimizer is None else names_of_parameters(model, optimizer)
        self.patched.shard_over_data(self.mesh.data_axis)
        if optimizer is not None and names is not None:
            rebind(optimizer, names, model)

    def wrap(self, model: nn.Module, ddp_settings: Mapping[str, Any] | None = None) -> nn.Module:
        accelerator = self._accelerator
        if accelerator.unwrap_model(model, keep_torch_compile=False) is not model:
            return model
        prepared = prepare_without_ddp(accelerator, model)
        is_sharded = next(sharded_parameters(model), None) is not None  # by FSDP2: it needs no DDP
        is_trained = any(p.requires_grad for p in prepared.parameters())
        if is_sharded or self.mesh.data_parallel_size == 1 or not is_trained:
            return prepared
        handler = accelerator.ddp_handler
        settings = {**({} if handler is None else handler.to_kwargs()), **(ddp_settings or {})}
        if accelerator.device.type != "cpu":
            settings["device_ids"] = [accelerator.device.index]
        return DistributedDataParallel(prepared, process_group=self.mesh.data_parallel_group, **settings)


def begin_parallel_training(
    accelerator: Any,
    model: nn.Module,
    config: ActSwapConfig,
    optimizer: torch.optim.Optimizer | None = None,
    timeout_s: float = 60.0,
    collectives_s: float | None = None,
) -> ParallelTraining:
    """Divide a model among the ranks and set an accelerator up for it. Every rank must call it.

    Args:
        accelerator: Accelerate's accelerator.
        model: the whole model, the same on every rank, not wrapped.
        config: a configuration with ``parallel_config``, the same on every rank.
        optimizer: built on the whole model, before its first step; its parameters become the divided ones.
        timeout_s: how long ranks wait for each other when they compare what they were given.
        collectives_s: how long a collective waits; ``None``: as long as PyTorch's groups do.

    Raises:
        MeshError: the number of processes does not fit ``tensor_parallel_size``, or they were not started
            together.
        RankAgreementError: ranks were given different arguments, or do not answer in time.
        PatchError: the model cannot be divided.
        ValueError: the optimizer already has state, or a parameter that is not in the model.
    """
    size, kind = config.parallel_config.tensor_parallel_size, accelerator.device.type
    with failing_together("training", timeout_s) as facts:
        check_processes(size)
        facts["processes"] = str(accelerator.num_processes)
        facts["parameters"] = parameters_fact(model)
    mesh = build_mesh(size, device_type=kind, timeout_s=collectives_s)
    names = None if optimizer is None else names_of_parameters(model, optimizer)
    patched = patch_model(model, config.parallel_config, mesh.tensor_parallel_group, timeout_s=timeout_s)
    if optimizer is not None and names is not None:
        rebind(optimizer, names, model)
    return ParallelTraining(accelerator, mesh, patched, timeout_s)


class OwnNamesHook(ModelHook):
    """Hook before ``load_state_dict`` of a Hugging Face model: converts a state to the model's own names.

    ``save_pretrained`` writes some families as they were published (Mixtral, Qwen3-MoE: each matrix of an
    expert by itself), and ``from_pretrained`` puts them together again. The Trainer's resuming and
    ``load_best_model_at_end`` do not: they call ``load_state_dict`` with what is on disk, leave out what does
    not fit, and continue with the experts that the model has. For a divided model this hook converts first,
    by making the whole model again on the CPU. A state with the model's names is left unchanged.
    """

    def __call__(self, model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        names = model.state_dict().keys()
        foreign = [name for name in state if name not in names]
        if prefix or not foreign or all(name in state for name in names):
            return
        given = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        kind, config, dtype = type(model), getattr(model, "config", None), next(model.parameters()).dtype
        if config is None or not hasattr(kind, "from_pretrained"):
            return
        made, told = kind.from_pretrained(
            None, config=config, state_dict=given, dtype=dtype, output_loading_info=True
        )
        for name in set(foreign) - set(told["unexpected_keys"]):
            del state[name]
        missing = set(told["missing_keys"])  # `from_pretrained` has drawn these at random
        whole = made.state_dict()
        state.update({name: whole[name] for name in names if name in whole and name not in missing})
