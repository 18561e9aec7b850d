"""``hf-actswap plan --longest``: the longest sequence whose training step fits, and a configuration for it.

The memory of each op is proportional to the tokens, so the peak as a function of the length is the maximum of
straight lines. The search draws lines through the peaks of steps on fake tensors. Its answer is the length of
one of these steps, one that fits. For a streamed sequence only one chunk runs on fake tensors; the rest is
arithmetic (`stream.chunked_step`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import RenderableType

from ..config import ActSwapConfig, TileConfig, load_config
from ..engine import host_memory
from ..plan import MemoryPlan, resolve_plan
from ..plan.model_structure import unwrapped
from ..planner.budget import allocatable_bytes, budget_bytes
from ..planner.cost.simulate import predict
from ..planner.profile import Prediction, Profile
from ..planner.states.state_bytes import state_bytes
from ..stream import ChunkedStep, problems_of_model
from .options import PlanRequest
from .output import Answer, busy, heading, listed, size_text, step_ms_text, table_of
from .plan_answer import memory_table, step_shape
from .plan_summary import assumptions, times_note
from .planned import MemoryParts, memory_in_force, memory_parts
from .step import (
    StepShape,
    ladder_of,
    prediction_document,
    problems_in_backward,
    profile_of,
    stepped_in_backward,
    with_states_of,
)
from .subject import AnalysedModel, ModelError, subject, with_tp

STREAMED = "streamed in chunks"
TILED, SWAPPED, CHECKPOINTED = "tiles, inputs swapped", "inputs swapped", "checkpointing"
UNIT_TOKENS = 1024
"""Lengths are multiples of this number of tokens."""

_FIRST_TOKENS = 64 * UNIT_TOKENS
_MOST_RECORDS = 8
RECOMPUTED = "recompute_config: {recompute: true}\n"
INPUTS_SWAPPED = "swap_config: {swap: true, recompute_input: true, op_swap: []}\n"
STATES_MOVED = "memory: {mode: smart_swap, preference: memory_saving}\n"
IN_BACKWARD = "memory: {mode: smart_swap, preference: memory_saving, optimizer_in_backward: true}\n"
_CHUNKS = "stream_config: {tokens: auto}\ntile_config: {loss: auto}\n"


@dataclass(frozen=True)
class Longest:
    """The longest step that fits with a configuration.

    Args:
        tokens: a multiple of `UNIT_TOKENS`; 0: not even the shortest fits.
        step: if ``tokens`` is 0, that of the shortest sequence, or the shortest one that is streamed.
        parts: what its peak consists of.
        host_bytes: for swapped or streamed tensors, and for optimizer states that are paged or wait there.
        ends: which memory is closer to its limit, so that no longer sequence fits.
        config: as YAML.
    """

    tokens: int
    step: Prediction
    parts: MemoryParts | None
    host_bytes: int
    ends: Literal["device", "host"]
    config: str

    def document(self) -> dict[str, Any]:
        return {
            **prediction_document(self.step),
            "tokens": self.tokens,
            "host_bytes": self.host_bytes,
            "memory": None if self.parts is None else self.parts.document(),
            "ends": self.ends,
            "config": self.config,
        }


def answer_longest(asked: PlanRequest) -> Answer:
    """Return the answer of ``plan --longest``."""
    config = with_tp(load_config(None), asked.tp)
    with subject(asked.model, config) as found:
        return _Lengths(found, asked, config).answer()


class _Lengths:
    """Predicts steps of one model at many lengths, under the configuration's parallel and memory sections."""

    def __init__(self, found: AnalysedModel, asked: PlanRequest, config: ActSwapConfig) -> None:
        self._found, self._config = found, config
        self._host = host_memory.budget_bytes(None, 1, asked.host_free_bytes)
        self._shape = replace(step_shape(asked.step), sequences=1)
        self._memory = memory_in_force(config, asked.budget_bytes, self._shape)
        self._budget_bytes = self._allocatable_bytes = 0  # the second: without fragments
        self._profiles: dict[tuple[bool, int], Profile] = {}
        self._states_bytes, self._paged_bytes = state_bytes(self._shape.optimizer, found.model)

    def answer(self) -> Answer:
        texts = {TILED: self._tiled(), SWAPPED: INPUTS_SWAPPED + RECOMPUTED, CHECKPOINTED: RECOMPUTED}
        found = {name: self._longest_of_all(text) for name, text in texts.items()}
        reasons = [*self.not_streamed()]
        try:
            found = found if reasons else {STREAMED: self._streamed(), **found}
        except ModelError as error:  # some masks cannot be analysed on fake tensors
            reasons = [*map(str, error.problems)]
        shape = replace(self._shape, tokens=found[TILED].tokens)
        ok = any(item.tokens for item in found.values())
        return Answer(self._document(shape, found, reasons), self._shown(shape, found, reasons), ok)

    def _document(
        self, shape: StepShape, found: Mapping[str, Longest], not_streamed: Sequence[str]
    ) -> dict[str, Any]:
        return {
            "model": self._found.document(),
            "step": shape.document(),
            "budget_bytes": self._budget_bytes,
            "allocatable_bytes": self._allocatable_bytes,
            "host_limit_bytes": self._host,
            "longest": {name: item.document() for name, item in found.items()},
            "config": found[TILED].config,
            "not_streamed": list(not_streamed),
            "assumed": list(assumptions(self._found, shape)),
        }

    def _shown(
        self, shape: StepShape, found: Mapping[str, Longest], not_streamed: Sequence[str]
    ) -> Iterator[RenderableType]:
        yield f"Model:  {self._found.described()}"
        yield f"Step:   {shape.described()}"
        fragments = self._budget_bytes - self._allocatable_bytes
        left = f", {size_text(fragments)} of it for fragments" if fragments else ""
        host = "" if self._host is None else f"; {size_text(self._host)} of host memory"
        yield f"Budget: {size_text(self._budget_bytes)}{left}{host}"
        yield heading("Longest sequence, every layer recomputed")
        table = table_of("", ">Tokens", ">Peak", ">Host", ">Step", ">Ended by")
        for name, item in found.items():
            sizes = map(size_text, (item.step.peak_bytes, item.host_bytes))
            table.add_row(name, f"{item.tokens:,}", *sizes, step_ms_text(item.step.step_ms), item.ends)
        yield table
        if any(STATES_MOVED in item.config for item in found.values()):
            yield "The optimizer's states wait on the host: with them on the device nothing fits."
        if any(IN_BACKWARD in item.config for item in found.values()):
            yield "They wait on the host, and the optimizer steps in backward: nothing fits otherwise."
        if any(not item.tokens for item in found.values()):
            yield f"0 tokens: not even {UNIT_TOKENS:,} fit; the other numbers of that row are for these."
        yield heading("At the peak")
        yield memory_table({name: item.parts for name, item in found.items() if item.parts is not None})
        for name in (STREAMED, TILED):
            if name in found:
                yield heading(f"Configuration: {name}")
                yield found[name].config
        yield from (f"Not streamed: {reason}" for reason in not_streamed)
        yield times_note(shape)
        yield from listed(assumptions(self._found, shape))

    def not_streamed(self) -> Iterator[str]:
        """Yield the reasons why a streamed sequence is not predicted."""
        if self._host is None:
            yield "how long it is depends on host memory alone; say how much there is (--host-memory-gib)."
        if self._shape.sharding is not None:
            yield "weights are not sharded under it (--shard)."
        found = self._found
        yield from map(str, problems_of_model(unwrapped(found.model), found.shape))

    def _streamed(self) -> Longest:
        assert self._host is not None
        plan = self._plan(_CHUNKS)
        step = self._chunked(plan)
        host_bytes = max(self._host - self._paged_bytes, 0)
        tokens = step.longest(self._allocatable_bytes, host_bytes) // UNIT_TOKENS * UNIT_TOKENS
        predicted = step.predicted(tokens or step.shortest_streamed)
        parts = memory_parts(step.profile, predicted)
        found = self._found_longest(tokens, predicted, parts, _CHUNKS, self._paged_bytes)
        kept = step.keeping_most(plan, tokens, self._allocatable_bytes) if tokens else 0
        if not kept:
            return found
        config = f"{_CHUNKS}recompute_config: {{recompute: [{plan.num_layers - kept}]}}\n"
        predicted = step.under(self._plan(config)).predicted(tokens)
        return replace(found, step=predicted, parts=memory_parts(step.profile, predicted), config=config)

    def _chunked(self, plan: MemoryPlan) -> ChunkedStep:
        found, shape = self._found, replace(self._shape, gradient_dtype=None)

        def profile(tokens: int) -> Profile:
            with busy(f"{found.described()}: a chunk of {tokens:,} tokens"):
                return profile_of(found, replace(shape, tokens=tokens), plan.tiles)

        return ChunkedStep(unwrapped(found.model), found.shape, plan, shape.device, profile)

    def _plan(self, text: str) -> MemoryPlan:
        return resolve_plan(self._read(text), self._found.shape)

    def _read(self, text: str) -> ActSwapConfig:
        return replace(load_config(text), parallel_config=self._config.parallel_config)

    def _tiled(self) -> str:
        """Return the YAML of a configuration with tiles wherever they are possible."""
        read = self._read(INPUTS_SWAPPED + RECOMPUTED)
        *_, most = [TileConfig("auto"), *(tiles for tiles, _ in ladder_of(self._found, read))]
        return INPUTS_SWAPPED + RECOMPUTED + ActSwapConfig(tile_config=most).to_yaml()

    def _longest_of_all(self, text: str) -> Longest:
        """Return the longest step; where none fits, with states on the host, then with a step in backward."""
        # That is what `preference: auto` stands for: these cost time, and so are not tried before.
        first, held_bytes = self._longest(text), self._states_bytes + self._paged_bytes
        has_room = self._host is None or held_bytes <= self._host
        places = [STATES_MOVED] if self._states_bytes and has_room else []
        if places and not [*problems_in_backward(self._shape)]:
            places.append(IN_BACKWARD)
        found = (self._longest(text + place) for place in places if not first.tokens)
        return next((item for item in found if item.tokens), first)

    def _longest(self, text: str) -> Longest:
        plan, shape = self._plan(text), with_states_of(self._shape, self._read(text).memory)
        held_bytes = self._paged_bytes + (self._states_bytes if shape.states_leave else 0)

        def step_of(tokens: int) -> Prediction:
            profile = self._profile(plan, replace(shape, tokens=tokens))
            return predict(profile, plan, optimizer_states_moved=shape.states_leave)

        def over_bytes(tokens: int) -> int:
            step = step_of(tokens)
            over = step.peak_bytes - self._allocatable_bytes
            if self._host is None or not step.host_bytes:  # a shorter sequence needs no less
                return over
            return max(over, step.host_bytes + held_bytes - self._host)

        rests = self._profile(plan, replace(shape, tokens=_FIRST_TOKENS))
        budget = budget_bytes(self._memory, rests.device_bytes, rests.device_bytes)
        self._budget_bytes = budget
        self._allocatable_bytes = allocatable_bytes(rests, self._memory, budget)
        tokens = longest_of(over_bytes)
        step = step_of(tokens or UNIT_TOKENS)
        profile = self._profile(plan, replace(shape, tokens=tokens or UNIT_TOKENS))
        parts = memory_parts(profile, step, shape.states_leave)
        return self._found_longest(tokens, step, parts, text, held_bytes)

    def _found_longest(
        self, tokens: int, step: Prediction, parts: MemoryParts | None, config: str, held_bytes: int
    ) -> Longest:
        growing_bytes = step.peak_bytes if parts is None else parts.activations
        device_room = growing_bytes + self._allocatable_bytes - step.peak_bytes
        host_room = (self._host or sys.maxsize) - held_bytes
        on_host = step.host_bytes * device_room > growing_bytes * host_room
        needed_bytes = step.host_bytes + held_bytes
        return Longest(tokens, step, parts, needed_bytes, "host" if on_host else "device", config)

    def _profile(self, plan: MemoryPlan, shape: StepShape) -> Profile:
        plain = replace(shape, in_backward=False, states_leave=False)
        key = bool(plan.tiles), shape.tokens
        if key not in self._profiles:
            with busy(f"{self._found.described()}: {shape.tokens:,} tokens"):
                self._profiles[key] = profile_of(self._found, plain, plan.tiles)
        profile = self._profiles[key]
        return stepped_in_backward(self._found, shape, profile) if shape.in_backward else profile


def longest_of(over_bytes: Callable[[int], int]) -> int:
    """Return the largest multiple of `UNIT_TOKENS` that was found to fit; 0: not even the smallest fits.

    The first length is `_FIRST_TOKENS`. The next is where a line meets the limit: the line through the two
    known lengths next to the limit, or, while all are on one side, through the two nearest to it. The search
    ends when that length is known already.

    Args:
        over_bytes: returns the bytes by which a length exceeds memory; rises with the length.
    """
    known = {_FIRST_TOKENS: over_bytes(_FIRST_TOKENS)}
    other = _FIRST_TOKENS * 2 if known[_FIRST_TOKENS] <= 0 else _FIRST_TOKENS // 4
    for _ in range(_MOST_RECORDS):
        if other in known:
            break
        known[other] = over_bytes(other)
        fits, over = (sorted(at for at in known if (known[at] <= 0) is fit) for fit in (True, False))
        low, high = (fits[-1], over[0]) if fits and over else (fits[-2:] or over[:2])
        rise = (known[high] - known[low]) / (high - low)
        level = low // 2 if over else high * 2
        meets = level if rise <= 0 else int(low - known[low] / rise)
        if over:
            meets = min(meets, over[0] - UNIT_TOKENS)
        other = max(meets // UNIT_TOKENS * UNIT_TOKENS, UNIT_TOKENS)
    return max((at for at, needed in known.items() if needed <= 0), default=0)
