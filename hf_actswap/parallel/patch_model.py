"""Makes a Hugging Face model tensor- and sequence-parallel, in place.

The model keeps its class and the names of its state dict. Its projections, embedding and head become this
rank's parts; hooks at the norms, the first layer, and the model's beginning and end gather and cut tensors::

    ids -> embedding -> (positions, masks) -> | layers, final norm, head: parts of the sequence | -> logits
                                              ^ padded and cut                        whole again ^

Before patching, weights are whole and the same on every rank; then they are cut. So a model has the same
weights at any number of ranks. `Patched` saves and loads it as a whole state dict.

A training loop that is not made for a patched model can make two mistakes that cause no error by themselves.
`DistributedDataParallel` over all ranks copies rank 0's part of every parameter over the others', and
averages gradients of different things. And an optimizer that steps on tagged gradients that were not summed
lets replicas drift apart. `StepGuard` notices both in the model's next forward with gradients, on every rank:
DDP says which of its instances is calling, and a tagged parameter that was changed after a backward, before
its gradient was summed, was changed by a step without the sum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..config.schema import ParallelConfig
from ..errors import ActSwapError, Problem
from .block_hooks import on_fake_tensors
from .collectives import group_or_enclosing
from .decoder_layers import Decoder, divide_layers, problems_of_decoder
from .gradients import TAG, GradientWatch, UnsummedGradientError, tagged_parameters, watch_of
from .mesh import (
    reject_tensor_axis,
    shard_over_data,
    sharded_as,
    trained_parameters,
    whole_over_data,
)
from .rank_agreement import check_agreement, parameters_fact
from .sequence_region import BaseExitHook, EntryHook, ModelHook, SequenceRegion
from .vocabulary import divide_vocabulary, problems_of_vocabulary
from .weights import HeldGroup, ParameterTags, Partition, partitions_in, whole_of_ranks

Item = TypeVar("Item")

Progress = Callable[[int, int], None]
"""Called with the bytes done so far, and the bytes in all."""


def partitions_of(model: nn.Module) -> Iterator[tuple[str, Partition]]:
    """Yield name and division of each divided parameter, tied ones under each of their names."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, partition in partitions_in(module).items():
            if module._parameters.get(name) is not None:
                yield f"{path}.{name}" if path else name, partition


def with_progress(items: Iterable[Item], sizes: Sequence[int], progress: Progress | None) -> Iterator[Item]:
    """Yield items of these sizes, and report after each how many bytes are done, if ``progress`` is given."""
    total, done = sum(sizes), 0
    for item, size_bytes in zip(items, sizes, strict=True):
        yield item
        done += size_bytes
        if progress is not None:
            progress(done, total)


logger = logging.getLogger(__name__)

_SAMPLE = 4
"""Leading elements of each parameter by which ranks compare their weights."""

USE_OURS = (
    "Train it with hf_actswap.ActSwapTrainer (or ActSwapTrainerMixin in front of your trainer's class), or "
    "in a loop of your own with hf_actswap.prepare"
)


class PatchError(ActSwapError):
    """The model cannot be divided as the configuration requires."""

    subject = "patched model"


class Patched:
    """A model that the ranks of a group hold together; to undo it, build it anew from `full_state_dict`.

    Args:
        model: the patched model, adapters included.
        region: says where the model's hidden states are parts of the sequence.
        tags: keeps attributes on its parameters.
        layers: layers of the model's decoder; ``None``: they are looked for when they are needed.
    """

    def __init__(
        self,
        model: nn.Module,
        region: SequenceRegion,
        tags: ParameterTags,
        layers: Sequence[nn.Module] | None = None,
    ) -> None:
        self.model, self._region, self._tags, self._layers = model, region, tags, layers

    @property
    def bare(self) -> Any:
        """The model inside PEFT's wrappers."""
        return _bare(self.model)

    @property
    def region(self) -> SequenceRegion:
        """Says where the model's hidden states are parts of the sequence."""
        return self._region

    @property
    def group(self) -> dist.ProcessGroup:
        """The tensor-parallel group."""
        return self._region.group

    @property
    def sharded(self) -> dict[str, int]:
        """Name -> dim along which a parameter is divided."""
        return {name: partition.dim for name, partition in partitions_of(self.model)}

    @property
    def replicated(self) -> tuple[str, ...]:
        """Names of the parameters that every rank holds whole."""
        sharded = self.sharded
        return tuple(name for name, _ in self.model.named_parameters() if name not in sharded)

    @property
    def tagged(self) -> tuple[str, ...]:
        """Names of parameters whose gradients are summed over the ranks once per step."""
        return tuple(name for name, p in self.model.named_parameters() if getattr(p, TAG, False))

    def full_state_dict(
        self, only_rank: int | None = None, only_trainable: bool = False, progress: Progress | None = None
    ) -> dict[str, torch.Tensor]:
        """Return whole tensors in Hugging Face's names and shapes, on the CPU.

        Every rank of the group, and of FSDP2's mesh, must call it.

        Args:
            only_rank: rank of the group that gets the tensors, while others get an empty dict; ``None``: all.
            only_trainable: whether only parameters that require gradients (adapters) are returned.
            progress: called with how many bytes of this rank's tensors are gathered, and how many there are.
        """
        trainable = {name for name, p in self.model.named_parameters() if p.requires_grad}
        keeps = only_rank is None or only_rank == self.group.rank()
        partitions = dict(partitions_of(self.model))
        full: dict[str, torch.Tensor] = {}
        by_tensor: dict[int, str] = {}
        state = {
            name: tensor
            for name, tensor in self.model.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor) and (name in trainable or not only_trainable)
        }
        sizes = [tensor.nbytes for tensor in state.values()]
        for name, tensor in with_progress(state.items(), sizes, progress):
            before = by_tensor.setdefault(id(tensor), name)
            if before != name:
                if keeps:
                    full[name] = full[before]
                continue
            found, partition = whole_over_data(tensor.detach()), partitions.get(name)
            if partition is not None:
                found = whole_of_ranks(found, partition, self.group)
            if keeps:
                full[name] = found.cpu().clone()
        return full

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load whole tensors, of which each rank takes its parts.

        Raises:
            ValueError: a tensor does not have the shape of the whole parameter.
            RuntimeError: as ``load_state_dict``.
        """
        partitions = dict(partitions_of(self.model))
        present = self.model.state_dict(keep_vars=True)
        own = {}
        for name, tensor in state.items():
            partition = partitions.get(name)
            if partition is not None and not partition.fits(tensor.shape):
                expected = f"{partition.full_size} in dim {partition.dim}"
                raise ValueError(f"{name}: expected {expected}, found {list(tensor.shape)}")
            part = tensor if partition is None else partition.part(tensor, self.group.rank())
            own[name] = sharded_as(part, present[name]) if name in present else part
        self.model.load_state_dict(own, strict=strict)

    def shard_over_data(self, mesh: DeviceMesh, **settings: Any) -> None:
        """Shard this rank's parts over the data axis too: FSDP2 on each layer and on the model.

        Build the optimizer afterwards. You can also call ``fully_shard`` over the same mesh yourself.
        `full_state_dict` and `load_full_state_dict` still return and take whole tensors, but every rank of
        all models must call them. Arguments and errors are those of `mesh.shard_over_data`.
        """
        layers = self._layers or Decoder.of(self.bare).layers
        shard_over_data(self.model, layers, mesh, **settings)
        self._tags.put()

    def describe(self) -> str:
        """Return what is divided and what is not, in a few lines for a log."""
        sizes = {name: p.numel() * p.element_size() for name, p in self.model.named_parameters()}
        sharded = self.sharded
        whole: dict[str, list[int]] = {}
        for name in self.replicated:
            kind = ".".join("*" if part.isdecimal() else part for part in name.split("."))
            whole.setdefault(kind, []).append(sizes[name])
        divided_bytes = sum(size for name, size in sizes.items() if name in sharded)
        whole_bytes = sum(map(sum, whole.values()))
        held = ", ".join(f"{kind} ({len(found)} x {found[0]} B)" for kind, found in whole.items())
        sequence = "on" if self._region.enabled else "off"
        return (
            f"tensor_parallel_size={self.group.size()}, sequence parallelism {sequence}: a rank holds "
            f"{divided_bytes / 2**20:.1f} MiB of divided parameters and {whole_bytes / 2**20:.1f} MiB "
            f"that stay replicated: {held or 'none'}"
        )


def patch_model(
    model: nn.Module,
    parallel_config: ParallelConfig,
    group: dist.ProcessGroup | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
    timeout_s: float = 60.0,
) -> Patched:
    """Divide a causal language model among the ranks of a tensor-parallel group, in place.

    Call it on every rank, on a model with the same whole weights (from one checkpoint, or one seed), before
    DDP, FSDP2, an optimizer and `hf_actswap.apply`, and after adapters were added (PEFT's LoRA; afterwards
    ``get_peft_model`` raises "ColumnParallelLinear .. is not supported") and the vocabulary was resized.

    While the model trains on labels, its output's logits are gathered when they are read, which all ranks of
    the group must do, or none. Without labels or without gradients they are gathered at once.

    Args:
        model: a Hugging Face model, bare or with LoRA.
        parallel_config: ``tensor_parallel_size`` and ``sequence_parallel_enabled``.
        group: tensor-parallel group; ``None``: that of the enclosing `tensor_parallel_group`.
        reduce_dtype: dtype in which ranks sum activations and their gradients; ``None``: their own.
        timeout_s: how long ranks wait for each other to agree on what they divide, in seconds.

    Raises:
        PatchError: with everything that is unsupported or does not divide; the model is untouched.
        RankAgreementError: ranks differ in configuration, parameters or weights, or do not answer.
        RuntimeError: no group was given, and none encloses.
    """
    found = group_or_enclosing(group)
    size = parallel_config.tensor_parallel_size
    if found.size() != size:
        hint = "Pass the group of one model's ranks."
        raise PatchError([Problem("group", f"{size} ranks (tensor_parallel_size)", str(found.size()), hint)])
    region = SequenceRegion(found, parallel_config.sequence_parallel_enabled and size > 1, reduce_dtype)
    tags = ParameterTags(model)
    if size == 1:
        return Patched(model, region, tags)
    root = _language_model(model)
    decoder = Decoder.of(root)
    problems = [*problems_of_decoder(model, decoder, region), *problems_of_vocabulary(root)]
    if problems:
        raise PatchError(problems)
    _agree(model, parallel_config, found, timeout_s)
    _divide(root, decoder, region, tags)
    patched = Patched(model, region, tags, decoder.layers)
    if dist.get_rank() == 0:
        logger.info("%s", patched.describe())
    return patched


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _language_model(model: Any) -> Any:
    root = _bare(model)
    if any(partitions_in(module) for module in root.modules()):
        raise PatchError([Problem("model", "a whole model", "one that is divided already")])
    if not hasattr(root, "config") or not hasattr(root, "base_model_prefix"):
        raise PatchError([Problem("model", "a model of transformers", type(root).__name__)])
    decoder = Decoder.of(root)
    inner = decoder.base
    if inner is not root and getattr(inner, "get_output_embeddings", lambda: None)() is not None:
        expected = "the language model itself"
        hint = f"Pass its {next(name for name, module in root.named_modules() if module is inner)}."
        raise PatchError(
            [Problem("model", expected, f"{type(root).__name__} around a {type(inner).__name__}", hint)]
        )
    if not decoder.stacks:
        expected = "layers with attention, an MLP or experts whose projections are known"
        hint = "Leave tensor_parallel_size at 1: its vocabulary alone is not worth several processes."
        raise PatchError([Problem("model", expected, f"none in {type(root).__name__}", hint)])
    return root


def _agree(model: nn.Module, config: ParallelConfig, group: dist.ProcessGroup, timeout_s: float) -> None:
    """Check that all ranks divide the same model in the same way, with the same weights (a sample)."""
    heads = [p.detach().flatten()[:_SAMPLE].double().cpu() for p in model.parameters() if not p.is_meta]
    values = torch.cat([torch.zeros(0, dtype=torch.float64), *heads])
    places = torch.arange(1, len(values) + 1, dtype=values.dtype)
    facts = {
        "tensor_parallel_size": str(config.tensor_parallel_size),
        "sequence_parallel_enabled": str(config.sequence_parallel_enabled),
        "parameters": parameters_fact(model),
        "weights": f"{values.sum().item():.17g}, {(values * places).sum().item():.17g}",
    }
    check_agreement(facts, timeout_s, "patch_model", dist.get_process_group_ranks(group))


def _divide(root: Any, decoder: Decoder, region: SequenceRegion, tags: ParameterTags) -> None:
    base = decoder.base
    divide_layers(decoder, region, tags)
    divide_vocabulary(root, region)
    entries = (base, root) if region.head is not None else (base,)
    region.head_reads_parts = not decoder.parameters_between(root)
    entries[-1].register_forward_pre_hook(StepGuard(region.group, tags.put))
    for module in entries:
        entry = EntryHook(region, module, tags.put, calls_head=module is root and len(entries) > 1)
        module.register_forward_pre_hook(entry, with_kwargs=True)
    base.register_forward_hook(BaseExitHook(region), always_call=True)


class PatchedModelError(RuntimeError):
    """A training loop would corrupt the weights of a patched model."""


class StepGuard(ModelHook):
    """Pre-hook of a patched model: raises if the training loop has corrupted its weights (see the module).

    ``put_tags`` puts tags on parameters that were made anew.
    """

    def __init__(self, group: dist.ProcessGroup, put_tags: Callable[[], None]) -> None:
        self._held_group, self._put_tags = HeldGroup(group), put_tags
        self._watches: list[GradientWatch] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watches": None}  # a copy has parameters of its own

    def __call__(self, model: nn.Module, _args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled() or on_fake_tensors():  # they stand for its parameters
            return
        group = self._held_group.group
        if group is not None:
            _reject_wrapper(group)
        if self._watches is None:
            if group is not None:
                reject_tensor_axis(model, group)
            self._put_tags()
            tagged = tagged_parameters(trained_parameters(model))
            self._watches = [watch_of(p) or GradientWatch(p) for p in tagged]
        stepped = sum(watch.was_stepped_unsummed() for watch in self._watches)
        if stepped:
            raise UnsummedGradientError(
                f"{stepped} tagged parameters were changed by a step on this rank's part of their gradients: "
                "the ranks' replicas differ now. Call allreduce_sequence_parallel_gradients after the last "
                f"micro-batch, before the norm and the step. {USE_OURS}"
            )


def check_step(model: nn.Module) -> None:
    """Run the check of `StepGuard` before a forward that computes with other tensors than the parameters."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, StepGuard):
                hook(module, ())


def _reject_wrapper(group: dist.ProcessGroup) -> None:
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None:
        return
    ours = set(dist.get_process_group_ranks(group))
    shared = sorted(ours & set(dist.get_process_group_ranks(wrapper.process_group)))
    if len(shared) > 1:
        raise PatchedModelError(
            f"DistributedDataParallel covers ranks {shared}, which hold different parts of one model: it has "
            f"copied the part of rank {shared[0]} over the others' already. Build the model anew. {USE_OURS}"
        )
