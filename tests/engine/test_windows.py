"""The windows under ``auto``: simulated, against all other sets, and on the numbers of one H200."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_actswap.engine import Link
from hf_actswap.engine.windows import Candidate, Decision, Timeline, choose_windows
from hf_actswap.plan import Windows
from tests.engine.window_simulation import Simulated, simulate

FOREVER = 10**6
GIB = 2**30


@dataclass(frozen=True)
class World:
    candidates: tuple[Candidate, ...]
    timeline: Timeline
    link: Link

    def choose(self, host_bytes: int | None = None, safety: float = 1.0) -> tuple[Decision, ...]:
        return choose_windows(self.candidates, self.timeline, self.link, host_bytes, safety)

    def run(self, decisions: Sequence[Decision], slower: float = 1.0) -> Simulated:
        link = Link(
            self.link.out_bytes_per_ms / slower,
            self.link.in_bytes_per_ms / slower,
            self.link.out_beside_in_bytes_per_ms / slower,
            self.link.in_beside_out_bytes_per_ms / slower,
            self.link.latency_ms * slower,
        )
        return simulate(self.candidates, decisions, self.timeline, link)

    def hidden_bytes(self, decisions: Sequence[Decision]) -> int:
        pairs = zip(self.candidates, decisions, strict=True)
        return sum(candidate.size_bytes for candidate, decision in pairs if decision.swap)


@st.composite
def worlds(
    draw: st.DrawFn, most: int = 20, reverse: bool = False, fixed: bool = False, latency: float | None = None
) -> World:
    """Small worlds in eighths of a ms, so that ties are frequent and sums exact.

    Args:
        most: candidates.
        reverse: backward reads in the reverse order of saving.
        fixed: some windows are the user's.
        latency: of a copy; ``None``: drawn.
    """
    count = draw(st.integers(1, 12))
    gaps = st.lists(st.integers(0, 80), min_size=count + 1, max_size=count + 1)
    ops = [0]
    for step in draw(st.lists(st.integers(1, 4), min_size=count, max_size=count)):
        ops.append(ops[-1] + step)
    now, forward, backward = 0.0, [], []
    for op, gap in zip(ops, draw(gaps), strict=True):
        forward.append((op, now))
        now += gap / 8
    forward.append((ops[-1] + draw(st.integers(0, 2)), now))
    for op, gap in zip(reversed(ops), draw(gaps), strict=True):
        backward.append((op, now))
        now += gap / 4
    candidates = []
    for _ in range(draw(st.integers(1, most))):
        ready = draw(st.integers(0, count))
        read = ready if reverse else draw(st.integers(ready, count))
        windows = None
        if fixed and draw(st.booleans()):
            windows = Windows(draw(st.integers(0, 12)), draw(st.integers(0, 12)))
        candidates.append(Candidate(draw(st.integers(1, 60)), ops[ready], ops[read], windows))
    rates = draw(st.tuples(*[st.sampled_from([1.0, 2.0, 4.0, 8.0])] * 2))
    if latency is None:
        latency = draw(st.sampled_from([0.0, 0.125]))
    link = Link(*rates, *rates, latency)
    return World(tuple(candidates), Timeline(tuple(forward), tuple(backward)), link)


def stall_ms(done: Simulated) -> float:
    return done.forward_stall_ms + done.backward_stall_ms


def with_windows(decision: Decision, **changes: int) -> Decision:
    assert decision.windows is not None
    return replace(decision, windows=replace(decision.windows, **changes))


@given(worlds())
def test_nothing_stalls_where_copies_are_slower_than_measured(world: World) -> None:
    assert stall_ms(world.run(world.choose(safety=1.1), slower=1.05)) == 0.0


@given(worlds(), st.none() | st.integers(0, 400))
@settings(max_examples=500)
def test_nothing_stalls_and_host_memory_is_never_passed(world: World, host_bytes: int | None) -> None:
    decisions = world.choose(host_bytes)
    assert host_bytes is None or world.hidden_bytes(decisions) <= host_bytes
    done = world.run(decisions)
    assert (stall_ms(done), done.stalls) == (0.0, 0)


@given(worlds(fixed=True))
@settings(max_examples=400)
def test_numbers_are_obeyed_and_stall_no_more_than_alone(world: World) -> None:
    decisions = world.choose()
    alone = [Decision(candidate.windows) for candidate in world.candidates]
    for candidate, decision in zip(world.candidates, decisions, strict=True):
        if candidate.windows:
            assert decision == Decision(candidate.windows)
    assert stall_ms(world.run(decisions)) <= stall_ms(world.run(alone)) + 1e-6


def fits(world: World, chosen: Sequence[bool]) -> bool:
    """Whether a set stalls nowhere with the widest windows there are: an oracle that knows no solver."""
    decisions = [Decision(Windows(FOREVER, FOREVER) if swap else None) for swap in chosen]
    return stall_ms(world.run(decisions)) == 0.0


def best_bytes(world: World, host_bytes: int | None = None) -> int:
    """The most bytes of all sets that fit, most bytes first."""
    sizes = [candidate.size_bytes for candidate in world.candidates]
    sets = [
        (sum(size for size, swap in zip(sizes, chosen, strict=True) if swap), chosen)
        for chosen in product((False, True), repeat=len(sizes))
    ]
    within = (entry for entry in sorted(sets, reverse=True) if host_bytes is None or entry[0] <= host_bytes)
    return next(size for size, chosen in within if fits(world, chosen))


@given(worlds(most=8, reverse=True), st.none() | st.integers(0, 200))
@settings(max_examples=250)
def test_no_set_hides_more(world: World, host_bytes: int | None) -> None:
    assert world.hidden_bytes(world.choose(host_bytes)) == best_bytes(world, host_bytes)


@given(worlds(most=8))
@settings(max_examples=150)
def test_where_backward_reads_in_another_order_less_than_one_candidate_is_lost(world: World) -> None:
    largest = max(candidate.size_bytes for candidate in world.candidates)
    assert world.hidden_bytes(world.choose()) >= best_bytes(world) - largest


@given(worlds())
def test_nothing_that_is_kept_would_have_fitted(world: World) -> None:
    decisions = world.choose()
    swapped = [decision.swap for decision in decisions]
    for index, decision in enumerate(decisions):
        if not decision.swap:
            assert not fits(world, [*swapped[:index], True, *swapped[index + 1 :]]), decision.reason


def test_the_best_choice_can_skip_what_comes_first() -> None:
    """10 ms at 1 byte/ms: 7 + 4 do not fit, 6 + 4 do. Taking what comes would end at 7."""
    candidates = (Candidate(7, 0, 0), Candidate(6, 0, 0), Candidate(4, 0, 0))
    timeline = Timeline(((0, 0.0), (1, 10.0)), ((2, 10.0), (0, 30.0)))
    decisions = World(candidates, timeline, Link(1.0, 1.0, 1.0, 1.0, 0.0)).choose()
    assert [decision.swap for decision in decisions] == [False, True, True]


def relaxed_bytes(world: World) -> float:
    """What leaves by the turn if bytes were divisible and backward had time for everything."""
    rate, forward_end_ms = world.link.out_bytes_per_ms, world.timeline.forward[-1][1]
    times = dict(world.timeline.forward)
    end_ms = moved = 0.0
    for candidate in sorted(world.candidates, key=lambda candidate: candidate.ready_op):
        start_ms = max(end_ms, times[candidate.ready_op])
        taken = min(candidate.size_bytes, max(forward_end_ms - start_ms, 0.0) * rate)
        end_ms, moved = start_ms + taken / rate, moved + taken
    return moved


@given(st.lists(st.integers(1, 40), min_size=200, max_size=400), st.integers(1, 30))
@settings(max_examples=30)
def test_many_small_candidates_use_the_link_from_the_first_to_the_turn(sizes: list[int], load: int) -> None:
    """The link could take between a tenth and three times what is saved."""
    count = len(sizes)
    rate = sum(sizes) * load / 10 / count
    timeline = Timeline(
        (*((op, float(op)) for op in range(count)), (count, float(count))),
        tuple((op, count + 2.0 * (count - 1 - op)) for op in range(count - 1, -1, -1)),
    )
    candidates = tuple(Candidate(size, op, op) for op, size in enumerate(sizes))
    world = World(candidates, timeline, Link(rate, rate, rate, rate, 0.0))
    assert world.hidden_bytes(world.choose()) >= 0.9 * relaxed_bytes(world)


@given(worlds())
@settings(max_examples=200)
def test_a_release_one_hook_earlier_would_stall(world: World) -> None:
    decisions = world.choose()
    hooks = [op for op, _ in world.timeline.forward[:-1]]
    for index, (candidate, decision) in enumerate(zip(world.candidates, decisions, strict=True)):
        if not decision.swap:
            continue
        released = candidate.ready_op + decision.windows.release_ops
        earlier = [op for op in hooks if candidate.ready_op < op < released]
        if earlier:
            changed = with_windows(decision, release_ops=earlier[-1] - candidate.ready_op)
            assert world.run([*decisions[:index], changed, *decisions[index + 1 :]]).forward_stall_ms > 0


@given(worlds())
@settings(max_examples=200)
def test_a_prefetch_one_hook_later_would_stall(world: World) -> None:
    """Of several that share a hook this holds for the one that is read last: the others go before it."""
    decisions = world.choose()
    hooks = [op for op, _ in world.timeline.backward]
    last_of_hook: dict[int, int] = {}
    swapped = [index for index, decision in enumerate(decisions) if decision.swap]
    for index in sorted(
        swapped, key=lambda i: (-world.candidates[i].consumer_op, world.candidates[i].ready_op, i)
    ):
        windows = decisions[index].windows
        last_of_hook[world.candidates[index].consumer_op + windows.prefetch_ops] = index
    for issued, index in last_of_hook.items():
        assert issued in hooks
        consumer = world.candidates[index].consumer_op
        later = [op for op in hooks if consumer <= op < issued]
        if later:
            changed = with_windows(decisions[index], prefetch_ops=later[0] - consumer)
            assert world.run([*decisions[:index], changed, *decisions[index + 1 :]]).backward_stall_ms > 0


# Operators 0 to 4 at 0, 10, ..., 40 ms, the turn at 50; backward reads them at 50, 60, ..., 90.
STEADY = Timeline(
    (*((op, 10.0 * op) for op in range(5)), (5, 50.0)),
    tuple((op, 50.0 + 10.0 * (4 - op)) for op in range(4, -1, -1)),
)
EVEN = Link(1.0, 1.0, 1.0, 1.0, 0.0)
QUICK_BACK = Link(1.0, 2.0, 1.0, 2.0, 0.0)


@pytest.mark.parametrize(
    ("candidates", "host_bytes", "reasons"),
    [
        ([Candidate(50, 0, 0)], None, [None]),
        ([Candidate(51, 0, 0)], None, ["its copy out would not be complete when backward starts"]),
        (
            [Candidate(30, 0, 0), Candidate(30, 1, 1), Candidate(20, 2, 2)],
            None,
            [None, "its copy out would not be complete when backward starts", None],
        ),
        (
            [Candidate(30, 0, 3), Candidate(9, 1, 3)],
            None,
            ["backward needs it before its copy back could be complete", None],
        ),
        ([Candidate(1, 0, 4)], None, ["backward needs it before its copy back could be complete"]),
        ([Candidate(10, 0, 0), Candidate(10, 1, 1)], 10, [None, "host memory"]),
        ([Candidate(10, 0, 0), Candidate(10, 1, 1, Windows(1, 3))], 10, ["host memory", None]),
        ([Candidate(10, 0, 0, Windows(1, 3)), Candidate(10, 1, 1, Windows(1, 3))], 15, [None, "host memory"]),
        ([Candidate(0, 0, 0), Candidate(1, 0, 7)], None, ["it has no bytes", "backward does not read it"]),
        ([Candidate(1, 0, 7, Windows(1, 3))], None, [None]),
        ([], None, []),
    ],
)
def test_reasons(candidates: list[Candidate], host_bytes: int | None, reasons: list[str | None]) -> None:
    decisions = choose_windows(candidates, STEADY, QUICK_BACK, host_bytes, safety=1.0)
    assert [None if decision.swap else decision.reason for decision in decisions] == reasons
    assert all((decision.windows is not None) == decision.swap for decision in decisions)


def test_windows_of_a_small_step() -> None:
    """15 bytes each. Out: 0 to 15, 15 to 30. Back: 65 to 80 for the read at 80, 75 to 90 for that at 90."""
    candidates = [Candidate(15, 0, 0), Candidate(15, 1, 1)]
    first, second = choose_windows(candidates, STEADY, EVEN, safety=1.0)
    assert first == Decision(Windows(prefetch_ops=2, release_ops=2))  # at 70 ms; at 20 ms
    assert second == Decision(Windows(prefetch_ops=2, release_ops=2))  # at 60 ms; at 30 ms


def test_reads_that_follow_closely_bring_the_earlier_copy_forward() -> None:
    """25 bytes for the read at 90 start at 65, so 10 bytes for that at 80 start at 55, at the hook at 50."""
    candidates = [Candidate(25, 0, 0), Candidate(10, 1, 1)]
    first, second = choose_windows(candidates, STEADY, EVEN, safety=1.0)
    assert (first.windows, second.windows) == (Windows(3, 3), Windows(3, 3))


def test_a_copy_back_keeps_out_of_the_way_of_a_number() -> None:
    """The user's 10 bytes go from 70 to 80, so 15 bytes for the same read go from 55 to 70, issued at 50."""
    candidates = [Candidate(15, 0, 1), Candidate(10, 0, 1, Windows(1, 9))]
    decisions = choose_windows(candidates, STEADY, EVEN, safety=1.0)
    assert [decision.windows for decision in decisions] == [Windows(3, 2), Windows(1, 9)]
    assert simulate(candidates, decisions, STEADY, EVEN).stalls == 0


def test_a_release_that_only_the_end_can_serve_is_past_every_hook() -> None:
    (decision,) = choose_windows([Candidate(45, 0, 0)], STEADY, QUICK_BACK, safety=1.0)
    assert decision.windows == Windows(3, 5)


def test_a_safety_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"safety is a factor of at least 1, not 0\.9"):
        choose_windows([], STEADY, EVEN, safety=0.9)


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        ((), ((0, 1.0),), "hooks in forward and in backward"),
        (((0, 1.0),), (), "hooks in forward and in backward"),
        (((1, 0.0), (1, 1.0), (2, 2.0)), ((0, 3.0),), "operators of a forward must rise"),
        (((2, 0.0), (1, 1.0)), ((0, 3.0),), "operators of a forward must rise"),
        (((1, 0.0), (2, 1.0)), ((1, 3.0), (1, 4.0)), "operators of a backward must fall"),
        (((1, 0.0), (2, 1.0)), ((1, 0.5),), "times of a step must not fall"),
    ],
)
def test_a_timeline_out_of_order_is_rejected(
    forward: tuple[tuple[int, float], ...], backward: tuple[tuple[int, float], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline(forward, backward)


# What a layer saves, in hidden tensors (fused kernels): norm input and output, q, k, v, attention output,
# the same two of the second norm, then gate, up and their product at 11008 / 4096.
LAYER_UNITS = (1, 1, 1, 1, 1, 1, 1, 1, 2.6875, 2.6875, 2.6875)


def compiled_stack(layers: int, step_ms: float, total_gib: float) -> World:
    """Compiled layers of Llama-2-7B shape on one H200: each saves all it saves at its end."""
    forward_ms = step_ms / 3
    scale = total_gib * GIB / layers / sum(LAYER_UNITS)
    candidates = tuple(
        Candidate(int(unit * scale), layer, layer) for layer in range(layers) for unit in LAYER_UNITS
    )
    timeline = Timeline(
        (*((layer, forward_ms * (layer + 1) / layers) for layer in range(layers)), (layers, forward_ms)),
        (
            *(
                (layer, forward_ms * (1 + 2 * (layers - 1 - layer) / layers))
                for layer in reversed(range(layers))
            ),
            (-1, step_ms),
        ),
    )
    return World(candidates, timeline, Link(54.9e6, 55.1e6, 49.8e6, 49.8e6))


@pytest.mark.parametrize(
    ("layers", "step_ms", "total_gib", "least", "most"),
    [(16, 329.0, 16.9, 0.25, 0.33), (6, 740.0, 27.4, 0.30, 0.38)],
    ids=["8,192 tokens", "32,768 tokens"],
)
def test_compiled_layers_on_one_h200(
    layers: int, step_ms: float, total_gib: float, least: float, most: float
) -> None:
    world = compiled_stack(layers, step_ms, total_gib)
    decisions = world.choose(safety=1.1)
    done = world.run(decisions)
    total_bytes = sum(candidate.size_bytes for candidate in world.candidates)
    assert least <= world.hidden_bytes(decisions) / total_bytes <= most
    assert (done.stalls, done.step_ms) == (0, step_ms)
    assert done.peak_bytes == total_bytes - world.hidden_bytes(decisions)  # nothing comes back too early
    assert all(not decision.swap for decision in decisions[-len(LAYER_UNITS) :])  # the tail
