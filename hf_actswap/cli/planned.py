"""Runs the planner's search for a simulated step, and predicts other steps to compare the plan with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from ..config import ActSwapConfig, MemoryConfig, TileConfig, WeightsPlace
from ..config.sizes import GIB
from ..engine import host_memory
from ..engine.tiled_calls import AUTO_LEAST_TOKENS
from ..errors import PlanError
from ..plan import MemoryPlan, resolve_plan
from ..plan.actions import Tile, whole_layers_again
from ..plan.tiles import tile_names
from ..planner.budget import (
    MARGIN_SHARE,
    BudgetError,
    allocatable_bytes,
    budget_bytes,
    budget_for,
    fits_outside_backward,
    impossible,
    limits_of,
    with_fragments,
)
from ..planner.cost.simulate import Simulator
from ..planner.devices import DeviceRates, device_rates
from ..planner.profile import Prediction, Profile
from ..planner.search.find_plan import Search, find_plan
from ..planner.search.states_place import (
    FEW_STATES,
    WholeStep,
    faster_with_weights_on_host,
    whole_step,
    with_states_in_passing,
    with_states_on_host,
)
from ..planner.states.state_bytes import state_bytes
from .output import busy, size_text, step_ms_text
from .step import StepShape, ladder_of, profile_of, weights_on_host
from .subject import AnalysedModel

LEAST = "least budget"
NOTHING = "nothing"
EVERYTHING = "recompute all"
BY_HAND = "as written"
PLANNER_SAME_PEAK = "better"
PLANNED = "planned"

SEVERAL_RANKS_SHARE = 0.05
"""Share of a device's memory that stays free for kernels' workspaces, fragments and NCCL's buffers, if there
are several ranks and no budget is named."""

_SMALLER = (
    "The optimizer's step alone, with weights, gradients and states, exceeds the budget: --lora, --quantize, "
    "--shard or another --optimizer need less."
)

_NEARLY_ALL = 0.9
"""Share of the memory from which on a step's peak leaves none of it unreserved."""

_POOR_SHARE = 0.01
"""Fates written by hand are called costly if they take more than this share of a step longer than the
planner's best plan within the same peak."""


@dataclass(frozen=True)
class MemoryParts:
    """What a peak consists of, in bytes.

    Args:
        weights: the model's weights and buffers.
        gradients: gradients of weights that are complete at the peak.
        states: the optimizer's states.
        activations: the rest: tensors that autograd saves or that ops need while they run.
        workspaces: those of cuBLAS.
    """

    weights: int
    gradients: int
    states: int
    activations: int
    workspaces: int = 0

    @property
    def decides(self) -> str:
        """The name of the largest part that a plan or another optimizer changes: workspaces are not."""
        return max(
            (name for name in vars(self) if name != "workspaces"), key=lambda name: int(getattr(self, name))
        )

    def document(self) -> dict[str, object]:
        return {**{f"{name}_bytes": size for name, size in vars(self).items()}, "decides": self.decides}

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {size_text(size)}" for name, size in vars(self).items() if size)
        return f"{listed}: {self.decides} decide"


def memory_parts(profile: Profile, step: Prediction, states_moved: bool = False) -> MemoryParts | None:
    """Return what the peak of a step predicted from ``profile`` consists of; ``None``: the weights' size is
    unknown.

    ``states_moved``: the optimizer's states are on the host at the peak.
    """
    if not profile.weight_bytes:
        return None
    states = 0 if states_moved else profile.optimizer_state_bytes
    rates = rates_or_none(profile.device) if profile.source == "shapes" else None
    workspaces = 0 if rates is None else rates.workspace_bytes
    rest = profile.weight_bytes + step.peak_gradient_bytes + states + workspaces
    return MemoryParts(
        profile.weight_bytes, step.peak_gradient_bytes, states, step.peak_bytes - rest, workspaces
    )


@dataclass(frozen=True)
class SearchResult:
    """The result of the planner's search.

    Args:
        profile: profile of the step without a plan.
        budget_bytes: the budget, which the plan and the allocator's fragments keep within.
        steps: predictions by name: those of `comparison_steps`, `PLANNED`, and `LEAST` if requested. Of
            several micro-batches: each of one, but with the time of all and of the optimizer.
        chosen_tiles: ``tile_config`` of the plan if it has more tiles than the user wrote, because nothing
            fits without them.
        host_is_written: whether the configuration limits host memory, or the command line does.
        kept_states_ms: the time of the optimizer's step with its states on the device, where they wait on the
            host because that is faster; infinite: nothing fits so; ``None``: they wait where it is written,
            or on the device.
        resident_state_bytes: then `WholeStep.resident_bytes`.
        weights_why: why the frozen weights of layers wait where they do; empty: it is written.
    """

    subject: AnalysedModel
    step: StepShape
    memory: MemoryConfig
    profile: Profile
    plan: MemoryPlan
    budget_bytes: int
    steps: Mapping[str, Prediction]
    chosen_tiles: TileConfig | None = None
    host_is_written: bool = False
    kept_states_ms: float | None = None
    resident_state_bytes: int | None = None
    weights_why: str = ""

    @property
    def states_moved(self) -> bool:
        """Whether the optimizer's states wait on the host during forward and backward."""
        return self.memory.preference == "memory_saving" and self.profile.optimizer_state_bytes > 0

    @property
    def allocatable_bytes(self) -> int:
        return allocatable_bytes(self.profile, self.memory, self.budget_bytes)

    @property
    def reserved_bytes(self) -> int:
        """The most that the device's allocator holds: the peak, and fragments.

        With expandable segments, which a plan switches on, these are a few hundredths where memory is spare.
        The allocator gives back no more than it must: a step that needs nearly all memory ends with all of it
        reserved (docs/rehearsal.md).
        """
        peak_bytes = self.prediction.peak_bytes
        limit = self.budget_bytes if self.memory.budget_gib is not None else self.profile.device_bytes
        if peak_bytes >= _NEARLY_ALL * limit:
            return max(limit, peak_bytes)
        return math.ceil(peak_bytes / (1 - MARGIN_SHARE))

    @property
    def host_bytes(self) -> int:
        """Host memory that a rank needs: for swapped tensors, frozen weights, states kept or paged there."""
        needed = self.prediction.host_bytes
        if self.states_moved:
            needed += self.profile.optimizer_state_bytes
        needed += sum(weights_on_host(self.subject, self.step).values())
        return needed + paged_bytes(self.subject, self.step)

    @property
    def prediction(self) -> Prediction:
        return self.steps[PLANNED]

    @property
    def parts(self) -> Mapping[str, MemoryParts]:
        """What each peak consists of; empty if the profile lacks the weights' size."""
        found = {
            name: memory_parts(self.profile, step, self.states_moved and name in (PLANNED, LEAST))
            for name, step in self.steps.items()
        }
        return {name: parts for name, parts in found.items() if parts is not None}


def memory_in_force(
    config: ActSwapConfig,
    budget: int | None,
    step: StepShape,
    ranks: int = 1,
    host_free_bytes: int | None = None,
) -> MemoryConfig:
    """Return the ``memory`` section to plan with; mode ``off`` becomes ``adaptive``, that of ``auto``.

    The device's ``budget``, in bytes, and what a rank may take of ``host_free_bytes`` replace the section's
    own; a section without either gets the host memory that is usual for the device. Several ranks leave more
    of the device free, for buffers of collectives.
    """
    memory = config.memory
    if memory.mode == "off":
        memory = replace(memory, mode="adaptive")
    rates = rates_or_none(step.device)
    host = host_memory.budget_bytes(None, 1, host_free_bytes)
    if host is None and memory.host_memory_gib is None and rates is not None:
        host = rates.host_bytes
    if host is not None:
        memory = replace(memory, host_memory_gib=host / GIB)
    if budget is not None:
        return replace(memory, budget_gib=budget / GIB, reduce_by_gib=None)
    if ranks > 1 and rates is not None and memory.budget_gib is None and memory.margin_gib is None:
        memory = replace(memory, margin_gib=SEVERAL_RANKS_SHARE * rates.memory_bytes / GIB)
    return memory


def rates_or_none(device: str) -> DeviceRates | None:
    """Return the rates of a known device; ``None``: it was measured and is none of the known ones."""
    with suppress(PlanError):
        return device_rates(device)
    return None


def paged_bytes(found: AnalysedModel, step: StepShape) -> int:
    """Return the optimizer's states that are in pages, by rank: they are counted on the host."""
    return state_bytes(step.optimizer, found.model, step.in_fp32)[1] // step.state_ranks


def comparison_steps(
    profile: Profile, written: MemoryPlan, simulator: Simulator | None = None
) -> dict[str, Prediction]:
    """Predict the steps with which a planned step is compared: `NOTHING` and `EVERYTHING`.

    If fates are written by hand `BY_HAND` too; and `PLANNER_SAME_PEAK`, the planner's plan within the same
    peak, if those fates take much longer.
    """
    simulator = simulator or Simulator(profile)
    nothing = MemoryPlan((), profile.num_layers, profile.family)
    plans = {NOTHING: nothing, EVERYTHING: replace(nothing, rows=whole_layers_again(profile.layers))}
    if written.rows:
        plans[BY_HAND] = written
    steps = {name: simulator.predict(plan, curve=False) for name, plan in plans.items()}
    if written.rows and _more_ms(steps, BY_HAND) > _POOR_SHARE * steps[NOTHING].step_ms:
        limits = limits_of(MemoryConfig(), steps[BY_HAND].peak_bytes, written.min_tensor_bytes)
        with suppress(PlanError):  # no solver is installed, or no plan that the search can make fits
            best = find_plan(profile, plans[NOTHING], limits, simulator=simulator).prediction
            if steps[BY_HAND].step_ms - best.step_ms > _POOR_SHARE * steps[NOTHING].step_ms:
                steps[PLANNER_SAME_PEAK] = best
    return steps


def costly_fates_note(steps: Mapping[str, Prediction]) -> Iterator[str]:
    """Yield a line if fates written by hand cost much more time than necessary."""
    if PLANNER_SAME_PEAK not in steps:
        return
    saved, best = (
        size_text(max(steps[NOTHING].peak_bytes - steps[name].peak_bytes, 0))
        for name in (BY_HAND, PLANNER_SAME_PEAK)
    )
    budget = math.ceil(with_fragments(steps[BY_HAND].peak_bytes) / GIB * 100) / 100
    budget = min(budget, math.floor(steps[NOTHING].peak_bytes / GIB * 100) / 100)  # else nothing needs a plan
    cost, best_cost = (step_ms_text(_more_ms(steps, name)) for name in (BY_HAND, PLANNER_SAME_PEAK))
    yield (
        f"! Costly: it saves {saved} and adds {cost} to a step. `memory: {{mode: adaptive, budget_gib: "
        f"{budget:g}}}` without fates by hand saves {best} and adds {best_cost}; `auto` uses all memory of "
        "the device."
    )


def _more_ms(steps: Mapping[str, Prediction], name: str) -> float:
    return steps[name].step_ms - steps[NOTHING].step_ms


def planned(
    found: AnalysedModel,
    step: StepShape,
    config: ActSwapConfig,
    memory: MemoryConfig,
    profile: Profile | None = None,
    with_least: bool = False,
) -> SearchResult:
    """Search a plan; fates that are written by hand stay as they are.

    If no plan fits, more of the model runs in tiles than the user wrote, but no more than needed. That is not
    done in mode ``smart_swap``, nor with a measured profile, which cannot predict tiles.

    Args:
        config: the configuration with the fates written by hand.
        memory: the ``memory`` section to use. That of the result says where the optimizer's states wait.
        profile: profile of this step of this model; ``None``: it is computed from shapes.
        with_least: whether to predict the step with the least peak too.

    Raises:
        PlanError: the configuration does not fit the model, the planner's solver is missing, or nothing fits
            (`BudgetError`, which names a budget that would).
        ModelError: the model does not run on fake tensors.
    """
    fixed = resolve_plan(config, found.shape)
    if config.memory.mode == "off" and fixed.rows:
        memory = replace(memory, mode="smart_swap")  # which keeps what is written by hand
    paged = paged_bytes(found, step)
    if paged and memory.host_memory_gib is not None:
        memory = replace(memory, host_memory_gib=max(memory.host_memory_gib - paged / GIB, 0))
    if found.quantize == "8bit":  # `Linear8bitLt` holds what would be swapped
        memory = replace(memory, swap_bucket_size=0)
    if profile is None:
        with busy(f"profile of {found.described()}"):
            profile = profile_of(found, step, fixed.tiles)
    chooses = memory.preference == "auto"
    if chooses:
        memory = replace(memory, preference="performance")
    states_may_move = chooses and memory.mode == "adaptive" and not memory.optimizer_in_backward
    search = _Search(found, step, memory, _Unplanned(profile, fixed), with_least, states_may_move)
    try:
        return search.whole(profile, fixed)
    except BudgetError as error:
        return search.in_more_tiles(config, error)


def chooses_itself(memory: MemoryConfig) -> bool:
    """Whether the planner chooses what moves to the host (``preference: auto``, or no ``memory`` section)."""
    asked = replace(memory, mode="adaptive") if memory.mode == "off" else memory
    return asked.weights == "keep" and asked.weights_may_move


def with_weights_placed(at: Callable[[WeightsPlace], SearchResult], if_faster: bool = True) -> SearchResult:
    """Return the result with frozen weights where a training with ``weights: auto`` has them.

    That is the device, unless nothing fits so (tiles that nobody wrote not counted), or ``if_faster`` the
    host is faster. ``at`` searches with the weights in a place; for the host it may raise `PlanError`:
    nothing can be moved.
    """

    def on_host() -> tuple[SearchResult, float]:
        moved = at("host")
        return moved, moved.prediction.step_ms

    def in_words(ms: float, other_ms: float, place: str) -> str:
        return f"a step takes {step_ms_text(ms)}, and {step_ms_text(other_ms)} with them on the {place}"

    kept: SearchResult | BudgetError
    try:
        kept = at("keep")
    except BudgetError as error:
        kept = error
    if isinstance(kept, SearchResult) and kept.chosen_tiles is None:
        if not if_faster:
            return kept
        kept_ms, least_ms = kept.prediction.step_ms, kept.steps[NOTHING].step_ms
        moved, why = faster_with_weights_on_host(kept_ms, least_ms, on_host, in_words)
        return replace(moved or kept, weights_why=why)
    try:
        moved = at("host")
    except PlanError as error:
        if isinstance(kept, BudgetError):
            errors = [item for item in (kept, error) if isinstance(item, BudgetError)]
            raise min(errors, key=lambda item: item.least_bytes) from None
        why = "they cannot wait on the host, or nothing fits so" if if_faster else ""
        return replace(kept, weights_why=why)
    where = "" if isinstance(kept, BudgetError) else " without tiles"
    return replace(moved, weights_why=f"nothing fits with them on the device{where}")


def _of_whole_steps(result: SearchResult) -> SearchResult:
    steps = {}
    for name, one in result.steps.items():
        moved = result.states_moved and name in (PLANNED, LEAST)
        whole = whole_step(result.profile, one, result.step.micro_batches, moved)
        steps[name] = replace(one, step_ms=whole.ms)
    return replace(result, steps=steps)


def _with_states_in_passing(result: SearchResult, chosen: WholeStep, kept_ms: float) -> SearchResult:
    whole = _of_whole_steps(result)
    of_chosen = replace(whole.prediction, step_ms=chosen.ms, peak_bytes=chosen.peak_bytes)
    steps = {**whole.steps, PLANNED: of_chosen}
    return replace(
        whole, steps=steps, kept_states_ms=kept_ms, resident_state_bytes=chosen.resident_bytes or 0
    )


_NEARLY = 1.02
"""Tiles elsewhere lower the least peak by less than this factor: searches come so near to it."""


def _may_help(tiles: Iterable[Tile], missed: BudgetError) -> bool:
    """Return whether a plan may fit with ``tiles``, given what is needed with fewer."""
    call, needed_bytes = missed.peak_at, missed.least_bytes
    if call is None or not isinstance(call[0], int) or needed_bytes <= _NEARLY * missed.budget_bytes:
        return True
    return any(tile.scope == call[0] and f"{call[1]}.".startswith(f"{tile.op_path}.") for tile in tiles)


@dataclass(frozen=True)
class _Unplanned:
    """A step before the planner has added anything; what is predicted of it is predicted once.

    Args:
        profile: profile of the step, in the tiles that the user wrote.
        written: the plan of the fates that the user wrote.
    """

    profile: Profile
    written: MemoryPlan

    @cached_property
    def simulator(self) -> Simulator:
        return Simulator(self.profile)

    @cached_property
    def steps(self) -> Mapping[str, Prediction]:
        return comparison_steps(self.profile, self.written, self.simulator)

    def peak_bytes(self, states_moved: bool) -> int:
        step = self.simulator.predict(self.written, optimizer_states_moved=states_moved, curve=False)
        return step.peak_bytes


@dataclass(frozen=True)
class _Search:
    """Searches for plans within the budget of ``memory``, with the optimizer's states where it says.

    Args:
        unplanned: the step before the planner has added anything.
        with_least: whether to predict the step with the least peak too.
        states_may_move: whether the states may wait on the host although ``memory`` does not say so.
    """

    found: AnalysedModel
    step: StepShape
    memory: MemoryConfig
    unplanned: _Unplanned
    with_least: bool
    states_may_move: bool

    @cached_property
    def unplanned_bytes(self) -> int:
        return self.unplanned.peak_bytes(self.memory.preference == "memory_saving")

    @cached_property
    def budget_bytes(self) -> int:
        return budget_bytes(self.memory, self.unplanned.profile.device_bytes, self.unplanned_bytes)

    def whole(self, profile: Profile, fixed: MemoryPlan) -> SearchResult:
        """Search a plan of whole steps that keeps ``fixed``.

        If the states may move, they wait on the host where that is faster, or where nothing fits else.
        """
        states, host_gib = profile.optimizer_state_bytes, self.memory.host_memory_gib
        may_move = self.states_may_move and states > FEW_STATES * self.budget_bytes
        result: SearchResult | None = None
        try:  # what needs least is found with them away
            result = _of_whole_steps(self.planned(profile, fixed, search_least=not may_move))
        except BudgetError:
            if not may_move:
                raise
        misses: list[BudgetError] = []

        def on_host(swaps: bool) -> tuple[SearchResult, WholeStep]:
            try:
                return self._with_states_on_host(profile, fixed, swaps)
            except BudgetError as error:
                if swaps:
                    misses.append(error.with_hint("That is with the optimizer's states on the host."))
                raise

        if may_move:
            own = None if result is None else WholeStep(result.prediction, result.prediction.step_ms)
            host_bytes = None if host_gib is None else round(host_gib * GIB)
            best = with_states_on_host(profile, self.step.micro_batches, host_bytes, own, on_host)
            if best is not None:
                return _with_states_in_passing(*best, math.inf if own is None else own.ms)
        if result is not None:
            return result
        # Where there are many states, more is needed with them on the device.
        if misses and self.budget_bytes < misses[0].least_bytes < states / FEW_STATES:
            raise misses[0]
        try:
            return _of_whole_steps(self.planned(profile, fixed))
        except BudgetError as error:
            raise min((error, *misses), key=lambda one: one.least_bytes) from None

    def _with_states_on_host(
        self, profile: Profile, fixed: MemoryPlan, swaps: bool
    ) -> tuple[SearchResult, WholeStep]:
        bucket = self.memory.swap_bucket_size if swaps else 0
        moved = replace(self.memory, preference="memory_saving", swap_bucket_size=bucket)
        found = replace(self, memory=moved).planned(profile, fixed, search_least=swaps)
        one, limit_bytes = found.prediction, found.allocatable_bytes
        return found, with_states_in_passing(profile, one, self.step.micro_batches, limit_bytes)

    def in_more_tiles(self, config: ActSwapConfig, missed: BudgetError) -> SearchResult:
        """Search in more tiles than ``config`` has, as with those nothing fits (``missed``)."""
        found, step, profile, errors = self.found, self.step, self.unplanned.profile, [missed]
        allocatable = allocatable_bytes(profile, self.memory, self.budget_bytes)
        if (
            config.memory.mode != "smart_swap"
            and profile.source == "shapes"
            and step.sequences * step.tokens > AUTO_LEAST_TOKENS
            and fits_outside_backward(profile, self.memory, allocatable, self.states_may_move)
        ):
            if step.fused_loss and config.tile_config.loss is None:  # it is in tiles of its own
                config = replace(config, tile_config=replace(config.tile_config, loss="off"))
            rungs = list(ladder_of(found, config))
            for tiles, tiled in rungs:
                if tiled is not rungs[-1][1] and not _may_help(tiled.tiles, errors[-1]):
                    continue
                with busy(f"profile of {found.described()}, {tile_names(tiled.tiles)} in tiles"):
                    profile = profile_of(found, step, tiled.tiles)
                try:
                    return replace(self.whole(profile, tiled), chosen_tiles=tiles)
                except BudgetError as error:
                    errors.append(error)
        raise min(errors, key=lambda error: error.least_bytes)

    def planned(self, profile: Profile, fixed: MemoryPlan, search_least: bool = True) -> SearchResult:
        """Search a plan that keeps ``fixed``; ``profile`` is of the step in its tiles.

        ``search_least`` is as of `find_plan`: without it the `BudgetError` does not say what would do.
        """
        memory, budget = self.memory, self.budget_bytes
        allocatable = allocatable_bytes(profile, memory, budget)
        limits = limits_of(memory, allocatable, fixed.min_tensor_bytes).beside_states(profile)
        own = self.unplanned.simulator
        simulator = own if profile is own.profile else Simulator(profile)
        search = Search(profile, fixed, limits, simulator=simulator)
        try:
            with busy("search"):
                best = search.with_curve(search.best(search_least=search_least))
        except BudgetError:
            if not search_least:
                raise
            least = search.least.prediction
            needed = budget_for(profile, memory, least.peak_bytes)
            error = impossible(memory, budget, needed, self.unplanned_bytes, fixed.tiles)
            error.peak_at = least.peak_at
            parts = memory_parts(profile, least, memory.preference == "memory_saving")
            error = error.with_hint("" if parts is None else f"The least is {parts}.")
            host = memory.host_memory_gib
            rests = fits_outside_backward(profile, memory, allocatable)
            if not rests and profile.source == "shapes":
                error = error.with_hint(_SMALLER)
            if rests and host is not None and least.host_bytes > 0.9 * host * GIB:
                most = f"{host:,.0f} GiB"
                error = error.with_hint(
                    f"Host memory is used up ({most} of a rank). With more, --host-memory-gib N, it may fit."
                )
            raise error from None
        steps = {**self.unplanned.steps, PLANNED: best.prediction}
        if self.with_least:
            steps[LEAST] = search.least.prediction
        return SearchResult(self.found, self.step, memory, profile, best.plan, budget, steps)
