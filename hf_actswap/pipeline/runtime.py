"""Runs a staged model by the schedules of `torch.distributed.pipelining`.

Each chunk of a rank is one `PipelineStage` of torch. A stage is called with a hidden state and the number of
a micro-batch; every rank of a pipeline has the batches themselves. Micro-batches may differ in shape: hidden
states are sent padded to the largest shape so far, and the padding is cut off before the first layer of the
next stage, so that it changes no value. Under sequence parallelism each rank sends its part of the sequence
to the rank of the next stage that holds the same part.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..config.schema import PipelineSchedule
from ..engine.passes import Pass
from ..errors import Problem
from .stages import Chunk, PipelineError, StagedModel

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

        Args:
            batches: the micro-batches, the same on every rank; ``input_ids`` are ``[batch, seq]``.
            call: calls the model; gradients are those of the sum of all losses.
            one_by_one: let each micro-batch go through all stages and back before the next one starts, so
                that one is in flight. Gradients are the same.

        Returns:
            The losses, ``[micro-batches]``, fp32, the same on every rank.
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
        """Run one forward without gradients.

        Args:
            batch: the same on every rank; ``input_ids`` are ``[batch, seq]``.
            call: calls the model.

        Returns:
            On every rank, what the last stage's call returned: tensors in tuples, lists and dicts. Any other
            value in it is ``None``.
        """
        stages, shape = self.staged.layout.pp, _shape_of(batch)  # without gradients no sequence is divided
        found = None
        for chunk in self.staged.own_chunks:
            received = None
            if not chunk.is_first:
                received = torch.empty(
                    self._hidden(shape), dtype=self.staged.relay.dtype, device=self._device
                )
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
        kind: Any = schedule_class(self._name, count, self.staged.layout.pp, self.staged.layout.vpp)
        one = issubclass(kind, engine.schedules.PipelineScheduleSingle)
        schedule = kind(stages[0] if one else stages, count, loss_fn=_only, scale_grads=False)
        if one:
            self._order = order_of_passes(self._name, count, self.staged.layout.pp, self.staged.stage)
        else:
            self._order = _order_of(schedule.pipeline_order[self.staged.stage])
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

    Args:
        name: ``parallel_config.schedule``.
        count: micro-batches of the step.
        stages, interleaves: number of stages, and of chunks on each.
    """
    if _is_gpipe(name, count, stages, interleaves):
        kind = "ScheduleGPipe" if interleaves == 1 else "ScheduleLoopedBFS"
    else:
        kind = _CLASSES[name]
    found: type = getattr(importlib.import_module(_ENGINE), kind)
    return found


def _is_gpipe(name: PipelineSchedule, count: int, stages: int, interleaves: int) -> bool:
    fits = not problem_of_schedule(name, count, stages, interleaves)
    return name == "gpipe" or not fits or (name == "1f1b" and count < stages)


def passes_in_flight(name: PipelineSchedule, count: int, stages: int, interleaves: int, stage: int) -> int:
    """Return the most forwards of a stage whose backwards have not run yet: their activations are held.

    A forward counts once for each chunk of the stage. 1F1B: ``stages - stage`` (Narayanan et al.,
    2006.09503). Interleaved 1F1B: one round of micro-batches for every chunk but one, plus twice the distance
    from the last stage, plus one (2104.04473). GPipe: all. Zero bubble: all, because PyTorch's implementation
    holds parts of each micro-batch to the end of the step.

    Args:
        name: ``parallel_config.schedule``.
        count: micro-batches of a step.
        stages, interleaves: number of stages, and of chunks on each.
        stage: index of the stage.
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

    Args:
        name, count, stages, stage, interleaves: see `passes_in_flight`.
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


def _order_of(actions: Sequence[Any]) -> tuple[Pass, ...]:
    """Return the passes in torch's list of a rank's actions; empty if backwards are divided in two."""
    named = [(action.computation_type.value, action) for action in actions if action is not None]
    if any(kind in ("I", "W") for kind, _ in named):  # I: gradients of inputs, W: of weights
        return ()
    return tuple(
        Pass(action.stage_index, action.microbatch_index, kind == "B")
        for kind, action in named
        if kind in ("F", "B")
    )


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
