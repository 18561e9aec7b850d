"""Runs a staged model by the schedules of `torch.distributed.pipelining`.

Each chunk of a rank is one `PipelineStage` of torch. A stage is called with a hidden state and the number of
a micro-batch; every rank of a pipeline has the batches themselves. Micro-batches may differ in shape: hidden
states are sent padded to the largest shape so far, and the padding is cut off before the first layer of the
next stage, so that it changes no value. Under sequence parallelism each rank sends its part of the sequence
to the rank of the next stage that holds the same part.

A parameter that several stages hold (tied embeddings: the first and the last) gets the sum of their gradients
on each of them, so that their optimizers make the same step; it counts once in the norm. The norm is computed
as `torch.nn.utils.clip_grad_norm_` does in one process, from the norms of all parameters in the model's
order, so that it is equal bit for bit. With tensor parallelism it is the norm of the stages' norms.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..config.schema import PipelineSchedule
from ..engine.schedule import Pass
from ..errors import Problem
from ..parallel.gradients import get_grad_norm
from ..parallel.mesh import own_group
from ..parallel.weights import whole_of_ranks
from .stages import Chunk, PipelineError, StagedModel

Value = TypeVar("Value")


class StageGradients:
    """Sums and norm of the gradients of a staged model.

    Every rank makes one, also those of other pipelines; its methods are collective.

    Args:
        staged: the model, after `StagedModel.cut`.
        group: the ranks of the pipeline, in the order of the stages.
        device: device of this rank.
        tensor_group: the tensor-parallel ranks of this stage; ``None``: this rank holds the stage alone.
        timeout_s: how long a collective waits; ``None``: as long as PyTorch's groups do.
    """

    def __init__(
        self,
        staged: StagedModel,
        group: dist.ProcessGroup,
        device: torch.device,
        tensor_group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._staged, self._group, self._device = staged, group, device
        self._tensor_group = tensor_group
        self._names = list(dict.fromkeys(staged.entries.values()))
        self._shared: dict[tuple[int, ...], list[str]] = {}
        for name in self._names:
            if len(holders := staged.holders(name)) > 1:
                self._shared.setdefault(holders, []).append(name)
        self._groups = {}
        for holders in sorted(self._shared):
            found = _group_of_holders(holders, group, staged.layout.pp, timeout_s)
            if staged.stage in holders:
                self._groups[holders] = found

    def _own(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._staged.own_state().items() if tensor.requires_grad}

    def sum_shared(self) -> None:
        """Give each stage that holds a shared parameter the sum of its gradients; once per step."""
        own = self._own()
        for holders, group in self._groups.items():
            _sum([own[name] for name in self._shared[holders] if name in own], group, self._device)

    def average_over_data(self, group: dist.ProcessGroup) -> None:
        """Average gradients over the data-parallel ranks in ``group``, which hold the same stage."""
        held = list(self._own().values())
        _sum(held, group, self._device)
        for parameter in held:
            if parameter.grad is not None:
                parameter.grad /= group.size()

    def norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of the whole model's gradients, an fp32 scalar, the same on every rank."""
        stage, place = self._staged.stage, {name: index for index, name in enumerate(self._names)}
        holders = self._staged.holders
        counted = {name: tensor for name, tensor in self._own().items() if holders(name)[0] == stage}
        if self._tensor_group is not None:
            of_stages = torch.zeros(self._staged.layout.pp, device=self._device)
            of_stages[stage] = get_grad_norm(counted.values(), norm_type, process_group=self._tensor_group)
            dist.all_reduce(of_stages, group=self._group)
            return torch.linalg.vector_norm(of_stages, norm_type)
        gradients = {name: p.grad.detach() for name, p in counted.items() if p.grad is not None}
        found = torch.zeros(2, len(place), device=self._device)
        if gradients:
            at = torch.tensor([place[name] for name in gradients], device=self._device)
            norms: Any = torch._foreach_norm(list(gradients.values()), norm_type)
            found[0, at] = torch.stack(list(norms)).to(found)
            found[1, at] = 1.0
        dist.all_reduce(found, group=self._group)
        return torch.linalg.vector_norm(found[0][found[1] > 0], norm_type)


def _group_of_holders(
    holders: tuple[int, ...], pipeline: dist.ProcessGroup, stages: int, timeout_s: float | None
) -> dist.ProcessGroup:
    """Make, in all pipelines, a group of the stages in ``holders`` and one of the others; return this rank's.

    Every rank must call it (`own_group`).
    """
    if len(holders) == stages:
        return pipeline
    others = [stage for stage in range(stages) if stage not in holders]
    width = dist.get_world_size() // stages  # stages are the outermost axis (`stage_of_rank`)
    table = [
        [stage * width + column for stage in part] for column in range(width) for part in (holders, others)
    ]
    return own_group(table, timeout_s)


def _sum(parameters: list[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum gradients over a group; a gradient that is ``None`` on every rank stays ``None``."""
    has = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=device)
    dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
    under_way = []
    for parameter, is_there in zip(parameters, has.tolist(), strict=True):
        if is_there:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            under_way.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
    for one in under_way:
        one.wait()


def gathered_on_first_rank(own: Mapping[str, Value], group: dist.ProcessGroup) -> dict[str, Value]:
    """Return the values of all ranks on the first rank of a group; on the others an empty dict.

    All ranks must call this. Values are sent one by one, by name; tensors must be on the CPU.
    """
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    if rank > 0:
        dist.send_object_list([len(own)], ranks[0], group=group)
        for item in own.items():
            dist.send_object_list([item], ranks[0], group=group)
        return {}
    found = dict(own)
    for source in ranks[1:]:
        (count,) = _received(source, group)
        for _ in range(count):
            ((name, value),) = _received(source, group)
            found[name] = value
    return found


def _received(source: int, group: dist.ProcessGroup) -> list[Any]:
    received: list[Any] = [None]
    dist.recv_object_list(received, source, group=group)
    return received


def whole_state(
    staged: StagedModel, group: dist.ProcessGroup, tensor_group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor]:
    """Return the whole model's state dict on the CPU, on the first stage; on the others an empty dict.

    Args:
        staged: the model, after `StagedModel.cut`.
        group: the ranks of the pipeline; all of them must call this.
        tensor_group: the tensor-parallel ranks of this stage, which must all call this too; ``None``: this
            rank holds the stage alone.
    """
    own, partitions = {}, staged.own_partitions()
    for name, tensor in staged.own_state().items():
        if staged.holders(name)[0] == staged.stage:
            whole, partition = tensor.detach(), partitions.get(name)
            if partition is not None and tensor_group is not None:
                whole = whole_of_ranks(whole, partition, tensor_group)
            own[name] = whole.cpu()
    if tensor_group is not None and tensor_group.rank() > 0:
        own = {}  # only the first rank of each stage sends it
    found = gathered_on_first_rank(own, group)
    return {name: found[first] for name, first in staged.entries.items()} if found else {}


_ENGINE = "torch.distributed.pipelining"
"""Imported only when a pipeline runs, because the import takes a second."""

Batch = Mapping[str, Any]

Call = Callable[[Batch, bool], Any]
"""Calls the model. Arguments: a micro-batch; whether the chunk is the last, which returns the loss."""


class PipelineRuntime:
    """Runs training steps and evaluation of a staged model.

    Every rank of the pipeline makes one; its methods are collective.

    Args:
        staged: the model, after `StagedModel.cut`.
        group: the ranks of the pipeline, in the order of the stages.
        schedule: order of forwards and backwards.
        device: device of this rank.
    """

    def __init__(
        self, staged: StagedModel, group: dist.ProcessGroup, schedule: PipelineSchedule, device: torch.device
    ) -> None:
        self.staged, self.group, self._name, self._device = staged, group, schedule, device
        self._modules = [_ChunkModule(staged, chunk) for chunk in staged.own_chunks]
        self._shape, self._made_for = (0, 0), ((0, 0), 0)
        self._schedule: Any = None
        self._order: tuple[Pass, ...] = ()

    def step(self, batches: Sequence[Batch], call: Call, one_by_one: bool = False) -> torch.Tensor:
        """Run forward and backward of all micro-batches; gradients are added to the parameters.

        Returns the losses, ``[micro-batches]``, fp32, the same on every rank.

        Args:
            batches: the micro-batches, the same on every rank; ``input_ids`` are ``[batch, seq]``.
            call: calls the model; gradients are those of the sum of all losses.
            one_by_one: let each micro-batch go through all stages and back before the next one starts, so
                that one is in flight. Gradients are the same.
        """
        self._grow(batches)
        losses: list[torch.Tensor] = []
        for part in [[batch] for batch in batches] if one_by_one else [batches]:
            losses += self._run(part, call)
        found = torch.zeros(len(batches), device=self._device)
        if self.staged.is_last:
            found.copy_(torch.stack([loss.detach() for loss in losses]))
        dist.broadcast(found, self._rank_of(self.staged.layout.pp - 1), group=self.group)
        return found

    def _run(self, batches: Sequence[Batch], call: Call) -> list[torch.Tensor]:
        """Run the schedule once; return the losses on the last stage, else an empty list."""
        schedule = self._schedule_for(len(batches))
        for module in self._modules:
            module.batches, module.call, module.shape = batches, call, self._shape
        numbers = torch.arange(len(batches))
        losses: list[torch.Tensor] = []
        self.staged.passes.begin(self._order)
        try:
            if self.staged.is_last:
                schedule.step(target=numbers, losses=losses, micro_batch=numbers)
            else:
                schedule.step(micro_batch=numbers)
        except RuntimeError as error:
            if error.__cause__ is not None:  # torch's error only describes the arguments of the stage
                raise error.__cause__ from None
            raise
        finally:
            self.staged.passes.end()
            for module in self._modules:
                module.batches = ()
        return losses

    @torch.no_grad()
    def evaluate(self, batch: Batch, call: Call) -> Any:
        """Run one forward without gradients, of a batch that is the same on every rank.

        Returns, on every rank, what the last stage's call returned: tensors in tuples, lists and dicts. Any
        other value in it is ``None``.
        """
        stages, shape = self.staged.layout.pp, _shape_of(batch)  # without gradients no sequence is divided
        found = None
        for chunk in self.staged.own_chunks:
            received = None
            if not chunk.is_first:
                relay, size = self.staged.relay, self._hidden(shape)
                received = torch.empty(size, dtype=relay.dtype, device=self._device)
                dist.recv(received, self._rank_of((chunk.index - 1) % stages), group=self.group)
            output, sent = self.staged.run(chunk, received, functools.partial(call, batch, chunk.is_last))
            if sent is None:
                found = output
            else:
                dist.send(sent.contiguous(), self._rank_of((chunk.index + 1) % stages), group=self.group)
        return self._from_last_stage(found)

    def _from_last_stage(self, values: Any) -> Any:
        source = self._rank_of(self.staged.layout.pp - 1)
        leaves, spec = tree_flatten(values)
        found = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        told: list[Any] = [spec, [leaf if leaf is None else (leaf.shape, leaf.dtype) for leaf in found]]
        dist.broadcast_object_list(told, source, group=self.group, device=self._device)
        if not self.staged.is_last:
            found = [fact and torch.empty(fact[0], dtype=fact[1], device=self._device) for fact in told[1]]
        found = [leaf if leaf is None else leaf.contiguous() for leaf in found]
        for leaf in found:
            if leaf is not None:
                dist.broadcast(leaf, source, group=self.group)
        return tree_unflatten(found, told[0])

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.group, stage)

    def _hidden(self, shape: tuple[int, int]) -> tuple[int, int, int]:
        return (*shape, self.staged.relay.hidden_size)

    def _grow(self, batches: Sequence[Batch]) -> None:
        """Enlarge the shape in which hidden states are sent, so that the largest of these batches fits."""
        shapes = [self._shape, *(_shape_of(batch, self.staged.sequence_ranks) for batch in batches)]
        self._shape = max(rows for rows, _ in shapes), max(length for _, length in shapes)

    def _schedule_for(self, count: int) -> Any:
        wanted = self._shape, count
        if wanted != self._made_for:
            self._schedule = None  # frees its buffers before new ones are made
            self._schedule, self._made_for = self._new_schedule(count), wanted
        return self._schedule

    def _new_schedule(self, count: int) -> Any:
        relay, chunks = self.staged.relay, self.staged.chunks
        hidden = torch.empty(self._hidden(self._shape), dtype=relay.dtype, device="meta", requires_grad=True)
        engine: Any = importlib.import_module(_ENGINE)
        stages = [
            engine.PipelineStage(
                module,
                module.chunk.index,
                len(chunks),
                self._device,
                input_args=() if module.chunk.is_first else (hidden,),
                output_args=(torch.empty(1, device="meta") if module.chunk.is_last else hidden,),
                group=self.group,
            )
            for module in self._modules
        ]
        pp, vpp = self.staged.layout.pp, self.staged.layout.vpp
        kind: Any = schedule_class(self._name, count, pp, vpp)
        one = issubclass(kind, engine.schedules.PipelineScheduleSingle)
        schedule = kind(stages[0] if one else stages, count, loss_fn=_only, scale_grads=False)
        if self._name == "zero_bubble" and not _is_gpipe(self._name, count, pp, vpp):
            self._order = ()  # its backwards are made in two parts
        else:
            self._order = order_of_passes(self._name, count, pp, self.staged.stage, vpp)
        return schedule


_CLASSES = {
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}


def schedule_class(name: PipelineSchedule, count: int, stages: int, interleaves: int) -> type:
    """Return torch's class for a schedule of ``count`` micro-batches.

    The last step of an epoch may have fewer micro-batches than the schedule needs. It then runs in GPipe's
    order, which gives the same gradients.
    """
    if _is_gpipe(name, count, stages, interleaves):
        kind = "ScheduleGPipe" if interleaves == 1 else "ScheduleLoopedBFS"
    else:
        kind = _CLASSES[name]
    return getattr(importlib.import_module(_ENGINE), kind)


def _is_gpipe(name: PipelineSchedule, count: int, stages: int, interleaves: int) -> bool:
    fits = not problem_of_schedule(name, count, stages, interleaves)
    return name == "gpipe" or not fits or (name == "1f1b" and count < stages)


def passes_in_flight(name: PipelineSchedule, count: int, stages: int, interleaves: int, stage: int) -> int:
    """Return the most forwards of a stage whose backwards have not run yet: their activations are held.

    A forward counts once for each chunk (interleave) of the stage. 1F1B: ``stages - stage`` (Narayanan et
    al., 2006.09503). Interleaved 1F1B: one round of micro-batches for every chunk but one, plus twice the
    distance from the last stage, plus one (2104.04473). GPipe: all. Zero bubble: all, because PyTorch's
    implementation holds parts of each micro-batch to the end of the step.
    """
    if _is_gpipe(name, count, stages, interleaves) or name == "zero_bubble":
        return count * interleaves
    if name == "1f1b":
        return stages - stage
    of_round = count // max(1, count // stages)
    warm_up = (interleaves - 1) * of_round + 2 * (stages - 1 - stage)
    return min(count * interleaves, warm_up + 1)


def order_of_passes(
    name: PipelineSchedule, count: int, stages: int, stage: int, interleaves: int = 1
) -> tuple[Pass, ...]:
    """Return the order of passes on a stage; for ``zero_bubble`` that of ``interleaved_1f1b``.

    The stage first runs as many forwards as it may hold, then a backward and a forward in turn (2006.09503,
    2104.04473). torch's own ``pipeline_order`` differs from what ``gpipe`` and ``1f1b`` do on the last stage.
    ``gpipe`` with interleaves is torch's looped BFS, whose backwards run in reverse.
    """
    if name == "zero_bubble":
        name = "interleaved_1f1b"
    is_gpipe = _is_gpipe(name, count, stages, interleaves)
    of_round = count if is_gpipe else count // max(1, count // stages)
    ahead = passes_in_flight(name, count, stages, interleaves, stage)
    steps = [
        (first + number, interleave)
        for first in range(0, count, of_round)
        for interleave in range(interleaves)
        for number in range(of_round)
    ]
    forwards = [Pass(v * stages + stage, number, False) for number, v in steps]
    backwards = [Pass((interleaves - 1 - v) * stages + stage, number, True) for number, v in steps]
    if is_gpipe and interleaves > 1:
        backwards = [one._replace(is_backward=True) for one in reversed(forwards)]
    found = forwards[:ahead]
    for number, backward in enumerate(backwards):
        found += [backward, *forwards[number + ahead : number + ahead + 1]]
    return tuple(found)


def problem_of_schedule(
    name: PipelineSchedule, count: int, stages: int, interleaves: int, tensor_ranks: int = 1
) -> str:
    """Return why a schedule cannot run so many micro-batches, interleaves and ranks; empty if it can."""
    rounds = max(1, count // stages)
    if name == "zero_bubble" and tensor_ranks > 1:
        return (
            "zero_bubble makes the gradients of inputs and of weights apart, and layers that "
            "tensor_parallel_size divides make them together: write 1f1b"
        )
    if name == "1f1b" and interleaves > 1:
        return f"1f1b runs one interleave, pp_interleave_num is {interleaves}: write interleaved_1f1b"
    if name in ("interleaved_1f1b", "zero_bubble") and count % rounds:
        return f"{name} runs {rounds} rounds of equally many micro-batches, and {count} are not divisible"
    return ""


def bubble_share(count: int, stages: int, interleaves: int) -> float:
    """Return the fraction of a step of ``count`` micro-batches that equal stages wait (2104.04473)."""
    return (stages - 1) / (interleaves * count + stages - 1)


class _ChunkModule(nn.Module):
    """The module that torch calls to run one chunk with one micro-batch."""

    def __init__(self, staged: StagedModel, chunk: Chunk) -> None:
        super().__init__()
        self.staged, self.chunk = staged, chunk
        self.batches: Sequence[Batch] = ()
        self.call: Call | None = None
        self.shape = (0, 0)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the rank's parameters: the zero-bubble schedule computes their gradients separately."""
        return self.staged.model.parameters(recurse)

    def forward(self, *received: torch.Tensor, micro_batch: torch.Tensor) -> torch.Tensor:
        """Return the padded hidden state ``[rows, length, hidden]``; on the last chunk the loss, ``[1]``."""
        assert self.call is not None
        batch, (rows, length) = self.batches[int(micro_batch)], self.shape
        own = _shape_of(batch, self.staged.sequence_ranks)
        hidden = received[0] if received else None
        if hidden is not None and own != self.shape:
            hidden = hidden[: own[0], : own[1]]
        call = functools.partial(self.call, batch, self.chunk.is_last)
        self.staged.passes.forward_follows(self.chunk.index, int(micro_batch))
        output, sent = self.staged.run(self.chunk, hidden, call)
        if sent is None:
            return torch.stack([output])
        if own == self.shape:
            # The zero-bubble schedule detaches its inputs in place, which is not allowed on a view.
            return sent.clone() if sent._is_view() else sent
        return nn.functional.pad(sent, (0, 0, 0, length - own[1], 0, rows - own[0]))


def _only(losses: torch.Tensor, _number: torch.Tensor) -> torch.Tensor:
    return losses.sum()


def _shape_of(batch: Batch, sequence_ranks: int = 1) -> tuple[int, int]:
    """Return the rows of a micro-batch, and how many tokens of its hidden states each rank holds."""
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor):
        found = ", ".join(batch)
        raise PipelineError([Problem("batch", "input_ids, [batch, seq]", found, "Stages embed ids only.")])
    rows, length = ids.shape[:2]
    return rows, -(-length // sequence_ranks)
