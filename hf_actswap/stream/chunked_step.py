"""Predicts streamed steps, and chooses how many layers of a chunk are kept within a device memory budget.

One chunk of the second pass runs on fake tensors; the rest is arithmetic on its shapes (`host_sequence`).
``plan --longest`` uses the prediction, and so does ``memory.mode: adaptive``, at the first training call of a
model.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..config.schema import MemoryConfig
from ..config.sizes import gib_text
from ..engine import AppliedPlan
from ..engine.agreement import from_all_ranks
from ..errors import PlanError, Problem
from ..plan.actions import Adjustment, MemoryPlan
from ..plan.model_structure import ModelStructure, is_below
from ..planner.budget import BudgetError, budget_bytes
from ..planner.cost.simulate import predict
from ..planner.devices import DEFAULT_DEVICE, device_rates, rates_name
from ..planner.meter import AllocatorMeter, CountingMeter, Meter
from ..planner.profile import OpEvent, Prediction, Profile
from ..planner.record.shapes import profile_from_shapes
from ..planner.states.optimizer_states import (
    inner_optimizer,
    state_bytes_beside_weights,
)
from ..planner.states.state_bytes import expected_state_bytes
from .host_sequence import (
    TOKEN_BYTES,
    PassWork,
    chunk_bounds,
    host_bytes,
    longest_on_host,
    passes,
    recomputed_attention,
)
from .streamed_attention import traced
from .two_passes import chunk_tokens

logger = logging.getLogger(__name__)


class ChunkedStep:
    """Predicts streamed steps of one model for any sequence length, from one chunk run on fake tensors.

    Args:
        root: the model inside its wrappers; it can be streamed.
        structure: its layers and ops.
        plan: a plan with `MemoryPlan.streamed`.
        device: name of a device in `planner.devices`.
        profile_of: returns the profile of a chunk of so many tokens, run on fake tensors in the plan's tiles.
        rows: number of sequences in a micro-batch.

    Attributes:
        profile: profile of a chunk in the second pass, when all gradient sums are allocated.
    """

    def __init__(
        self,
        root: nn.Module,
        structure: ModelStructure,
        plan: MemoryPlan,
        device: str,
        profile_of: Callable[[int], Profile],
        rows: int = 1,
    ) -> None:
        assert plan.streamed is not None
        self._rates, self._tokens = device_rates(device), chunk_tokens(root, plan.streamed)
        with traced(root, self._tokens, plan.streamed.grad_accum_dtype) as by:
            profile = profile_of(self._tokens)
            self._layers = dict(by)
        self._structure, self._token_bytes, self._profile_of = structure, rows * TOKEN_BYTES, profile_of
        self.profile = self._second_pass(profile, root)
        self._set(plan)

    def under(self, plan: MemoryPlan) -> ChunkedStep:
        """Return predictions for another plan with the same chunks."""
        other = copy.copy(self)
        other._set(plan)
        return other

    def _set(self, plan: MemoryPlan) -> None:
        self._plan = plan
        self._chunk, again = predict(self.profile, plan), recomputed_attention(plan, self._structure)
        self._layers = {index: replace(layer, again=index in again) for index, layer in self._layers.items()}

    def _second_pass(self, profile: Profile, root: nn.Module) -> Profile:
        """Return a chunk's profile with all gradient sums, and the memory that attention in pieces takes."""
        layers = self._layers.values()
        trained = [weight for weight in root.parameters() if weight.requires_grad]
        sums = sum(w.numel() * torch.promote_types(w.dtype, torch.float32).itemsize for w in trained)
        more = sums + self._tokens * max(layer.moving_bytes for layer in layers)
        pieces = self._tokens * max(layer.pieces_bytes for layer in layers)
        attention: dict[Any, frozenset[str]] = {
            layer.index: layer.attention_paths for layer in self._structure.layers
        }

        def with_sums(op_event: OpEvent, made_bytes: int) -> OpEvent:
            scope, path, _ = op_event.call
            inside = any(is_below(path, module) for module in attention.get(scope, ()))
            return replace(
                op_event,
                forward_base_bytes=op_event.forward_base_bytes + more,
                backward_base_bytes=op_event.backward_base_bytes - made_bytes + more + inside * pieces,
            )

        made = profile.gradient_bytes
        at_end = profile.weight_bytes + profile.optimizer_state_bytes + sums  # plus one in its weight's dtype
        return replace(
            profile,
            op_events=tuple(map(with_sums, profile.op_events, made)),
            gradient_bytes=(sums,) * len(made),
            outside_base_bytes=max(profile.outside_base_bytes, at_end + max(w.nbytes for w in trained)),
        )

    @property
    def shortest_streamed(self) -> int:
        return self._tokens + 1

    def longest(self, device_bytes: int, host_bytes: int) -> int:
        """Return the longest streamed sequence, in tokens, that fits in device and host memory; 0: none."""
        on_device = max(device_bytes - self._chunk.peak_bytes, 0) // self._token_bytes
        tokens = longest_on_host([*self._layers.values()], self._tokens, host_bytes, on_device)
        return tokens if tokens > self._tokens else 0

    def keeping_most(self, plan: MemoryPlan, tokens: int, device_bytes: int) -> int:
        """Return how many layers, the last ones, can be kept; -1: a step does not fit even if none is kept.

        Args:
            plan: a plan with the same chunks, in which every layer is recomputed.
            tokens: length of the sequence; of one that is not streamed: the shortest streamed one is meant,
                because longer ones may follow it.
            device_bytes: the most device memory that a step may use.
        """
        tokens = max(tokens, self.shortest_streamed)

        def too_large(kept: int) -> bool:
            return self.under(with_last_layers_kept(plan, kept)).predicted(tokens).peak_bytes > device_bytes

        return bisect_left(range(plan.num_layers + 1), True, key=too_large) - 1

    def predicted(self, tokens: int) -> Prediction:
        """Return the prediction for a step of so many tokens; it is a whole step if they are one chunk."""
        if tokens < self.shortest_streamed:
            return predict(self._profile_of(tokens), self._plan)
        bounds, layers = chunk_bounds(tokens, self._tokens), self._layers.values()
        first, second = passes(layers, bounds)
        of_layers = (
            (layer.forward_flop, layer.forward_flop * layer.again, layer.backward_flop) for layer in layers
        )
        ahead, again, back = (
            sum(flop) * self._tokens**2 / 2 / self._attention_flop_per_ms
            for flop in zip(*of_layers, strict=True)
        )
        chunk, share = self._chunk, tokens / self._tokens
        once_ms = sum(op_event.forward_ms for op_event in self.profile.op_events) - ahead
        again_ms = self.profile.compute_ms + chunk.recompute_ms - ahead - again - back
        first_ms, first_stall_ms = self._pass_ms(share * once_ms, first)
        second_ms, second_stall_ms = self._pass_ms(share * again_ms, second)
        return replace(
            chunk,
            step_ms=first_ms + second_ms + self.profile.outside_ms,
            compute_ms=first_ms + second_ms - first_stall_ms - second_stall_ms,
            recompute_ms=share * (chunk.recompute_ms - again),
            forward_stall_ms=first_stall_ms,
            backward_stall_ms=second_stall_ms,
            forward_end_ms=first_ms,
            peak_bytes=chunk.peak_bytes + tokens * self._token_bytes,
            swapped_bytes=first.out_bytes + second.out_bytes,
            host_bytes=host_bytes(layers, bounds),
        )

    def _pass_ms(self, others_ms: float, work: PassWork) -> tuple[float, float]:
        """Return how long a pass takes, and for how much of it compute waits for copies."""
        rates = self._rates
        compute_ms = others_ms + work.flop / self._attention_flop_per_ms
        compute_ms += work.merged_bytes / rates.bytes_per_ms
        link = rates.link
        if link is None:
            return compute_ms, 0.0
        out_ms = work.out_bytes / link.out_beside_in_bytes_per_ms
        in_ms = work.in_bytes / link.in_beside_out_bytes_per_ms
        stall_ms = max(out_ms - compute_ms, in_ms - compute_ms, 0.0)
        return compute_ms + stall_ms, stall_ms

    @property
    def _attention_flop_per_ms(self) -> float:
        rates = self._rates
        layer = next(iter(self._layers.values()))
        half = layer.item_bytes < layer.wide_bytes
        full = rates.attention_flop_per_ms * rates.full_flop_per_ms / rates.half_flop_per_ms
        return rates.attention_flop_per_ms if half else full


def with_last_layers_kept(plan: MemoryPlan, kept: int) -> MemoryPlan:
    """Return a plan that recomputes whole layers, with the last ``kept`` of them kept."""
    layers = range(plan.num_layers - kept, plan.num_layers)
    return replace(plan, rows=tuple(row for row in plan.rows if row.op_path or row.scope not in layers))


@dataclass(frozen=True)
class ChunkBudget:
    """The memory limit for the step of a streamed sequence, and what is known of the training.

    Args:
        memory: the ``memory`` section of the configuration; its mode is ``adaptive``.
        optimizer: the model's optimizer, wrapped or not; ``None``: not known.
        meter: measures device memory; ``None``: the default one for the device.
        accumulates: whether gradients of an earlier micro-batch are on the device in a step.
    """

    memory: MemoryConfig
    optimizer: torch.optim.Optimizer | None
    meter: Meter | None = None
    accumulates: bool = True


class KeptLayers:
    """Chooses how many layers of a chunk are kept: as many as fit into the budget, the same on each rank.

    It uses the shapes of a model's first training call, which all ranks make together. The plan on the model
    recomputes every layer.
    """

    def __init__(self, root: nn.Module, applied: AppliedPlan, budget: ChunkBudget) -> None:
        self._root, self._applied, self._budget = root, applied, budget

    def choose(self, rows: int, tokens: int) -> None:
        """Change the plan for ``rows`` sequences of ``tokens``; on all ranks, outside of the model's call."""
        plan = self._applied.plan
        self._applied.change_to(replace(plan, rows=()))  # tiles stay, and nothing is recomputed
        try:
            plan = self._chosen(plan, rows, tokens)
        finally:
            self._applied.change_to(plan)
        logger.info("%s", plan.adjustments[-1])

    def _chosen(self, plan: MemoryPlan, rows: int, tokens: int) -> MemoryPlan:
        device = self._applied.runtime.device()
        meter = self._budget.meter
        if meter is None:
            meter = CountingMeter() if device.type == "cpu" else AllocatorMeter(device)
        found: tuple[ChunkedStep, int] | PlanError
        try:
            found = self._step(plan, rows, device, meter.allocated_bytes())
        except Exception as error:  # the model's own code runs: it may raise anything
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            hint = "Leave memory.mode out; a list in recompute_config.recompute says which layers are kept."
            found = PlanError([Problem("memory.mode", "a model that runs on fake tensors", text, hint)])
        fault = found if isinstance(found, PlanError) else None
        ranks = from_all_ranks((fault, meter.limit_bytes(), tokens))
        for other, *_ in ranks:
            if other is not None:
                raise other
        assert not isinstance(found, PlanError)
        step, baseline_bytes = found
        limit_bytes, longest = min(item[1] for item in ranks), max(item[2] for item in ranks)
        most_bytes = budget_bytes(self._budget.memory, limit_bytes, 0)
        own_kept = step.keeping_most(plan, longest, most_bytes - baseline_bytes)
        own_least_bytes = step.predicted(longest).peak_bytes + baseline_bytes
        own_fits = step.longest(most_bytes - baseline_bytes, sys.maxsize) if own_kept < 0 else longest
        of_ranks = from_all_ranks((own_kept, own_least_bytes, own_fits))
        kept, fits = min(item[0] for item in of_ranks), min(item[2] for item in of_ranks)
        least_bytes = max(item[1] for item in of_ranks)
        if kept < 0 and (longest >= step.shortest_streamed or least_bytes > most_bytes):
            raise self._impossible(most_bytes, least_bytes, fits)
        kept = max(kept, 0)  # of a step that is not streamed, and fits
        chosen = with_last_layers_kept(plan, kept)
        peak_bytes = step.under(chosen).predicted(longest).peak_bytes + baseline_bytes
        reason = (
            f"the most that fit: {gib_text(peak_bytes, math.ceil)} of {gib_text(most_bytes, math.floor)}, "
            f"{rows} x {longest:,} tokens"
        )
        layers = tuple(range(plan.num_layers - kept, plan.num_layers))
        got = f"{kept} of {plan.num_layers} layers of a chunk kept, the others recomputed"
        adjustment = Adjustment("memory.mode", layers, "", "adaptive", got, reason)
        return replace(chosen, adjustments=(*chosen.adjustments, adjustment))

    def _impossible(self, most_bytes: int, least_bytes: int, fits: int) -> BudgetError:
        written = self._budget.memory.budget_gib
        there = gib_text(most_bytes, math.floor) if written is None else f"{written:g} GiB"
        least = gib_text(least_bytes, math.ceil)
        expected = f"at least {least}, which chunks take with every layer recomputed"
        hint = "No streamed sequence fits: fewer stream_config.tokens and tile_config.loss: auto take less."
        if fits:
            hint = f"Sequences of at most {fits:,} tokens fit."
        error = BudgetError([Problem("memory.budget_gib", expected, there, hint)])
        error.least_bytes = least_bytes
        return error

    def _step(
        self, plan: MemoryPlan, rows: int, device: torch.device, allocated_bytes: int
    ) -> tuple[ChunkedStep, int]:
        """Return the step's predictions, and the device bytes in use that they do not count."""
        optimizer, weights = self._budget.optimizer, [*self._root.parameters()]
        there_bytes = states_bytes = 0
        if optimizer is not None:
            optimizer = inner_optimizer(optimizer)
            there_bytes = state_bytes_beside_weights(optimizer)
            states_bytes = expected_state_bytes(optimizer) or 0
        name, kind = rates_name(device) or DEFAULT_DEVICE, device.type

        def profile_of(tokens: int) -> Profile:
            ids = torch.empty(rows, tokens, dtype=torch.long, device="meta")
            batch = {"input_ids": ids, "labels": torch.empty_like(ids), "use_cache": False}
            mixed: AbstractContextManager[Any] = nullcontext()
            if torch.is_autocast_enabled(kind):
                mixed = torch.autocast("cpu", torch.get_autocast_dtype(kind))
            with mixed:
                return profile_from_shapes(
                    self._root, self._applied.structure, batch, name, optimizer_state_bytes=states_bytes
                )

        step = ChunkedStep(self._root, self._applied.structure, plan, name, profile_of, rows)
        gradients_bytes = sum(weight.grad.nbytes for weight in weights if weight.grad is not None)
        known_bytes = step.profile.weight_bytes + gradients_bytes + there_bytes
        trained_bytes = sum(weight.nbytes for weight in weights if weight.requires_grad)
        return step, max(allocated_bytes - known_bytes, 0) + self._budget.accumulates * trained_bytes
