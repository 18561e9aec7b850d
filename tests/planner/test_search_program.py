"""The search's mathematics: options of a layer, cuts, and the program, each beside exhaustive search."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_actswap.engine import Link
from hf_actswap.engine.link import NO_COPIES
from hf_actswap.plan import MemoryPlan, PlanRow
from hf_actswap.planner import Limits
from hf_actswap.planner.search.layer_graph import KEEP, RECOMPUTE, SWAP, LayerGraph, Segment, segments_of
from hf_actswap.planner.search.layer_milp import GAP, STEP_GAP, solve
from hf_actswap.planner.search.layer_options import Option, best_runs, evaluate, options_of

from .search_profiles import MIB, Op, link_of, llama_layer, profile_of
from .step_on_paper import cost_and_peak

HIDDEN = 4 * MIB
LIMITS = Limits(device_bytes=2**40)


@st.composite
def layers_of_ops(draw: st.DrawFn, most_ops: int) -> tuple[Op, ...]:
    """Ops of one layer: each reads one or two earlier results and saves some of what it sees."""
    names = ["x"]
    ops = []
    for number in range(draw(st.integers(2, most_ops))):
        name = f"op{number}"
        reads = tuple(draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)))
        saves = tuple(name for name in (*reads, name) if draw(st.booleans()))
        size = draw(st.sampled_from([1, 2, 4, 8, 16])) * MIB
        ops.append(Op(name, size, draw(st.sampled_from([0.1, 0.3, 1.0, 2.5])), reads, saves))
        names.append(name)
    return (*ops, Op("out", HIDDEN, 0.2, (names[-1],), (names[-1],)))


def segments(
    layers: Sequence[Sequence[Op]], link: Link | None, fixed: MemoryPlan | None = None
) -> list[Segment]:
    profile = profile_of(layers, link, HIDDEN, base_bytes=3 * MIB)
    return segments_of(profile, fixed or MemoryPlan((), len(layers)), LIMITS)


def every_option(graph: LayerGraph, link: Link) -> list[Option]:
    variants = [
        evaluate(graph, fates, link) for fates in itertools.product(*(call.fates for call in graph.calls))
    ]
    before = [call.fates if call.from_before else KEEP for call in graph.calls]
    return variants + [
        evaluate(graph, fates, link, whole=True) for fates in itertools.product(*before) if graph.whole
    ]


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(layers_of_ops(3), min_size=2, max_size=2), st.sampled_from([2.0, 20.0, 400.0]), st.data())
def test_program_finds_what_exhaustive_search_finds(
    layers: list[tuple[Op, ...]], gb_per_s: float, data: st.DataObject
) -> None:
    parts = segments(layers, link_of(gb_per_s))
    link = link_of(gb_per_s).slowed(1.05)
    every = [every_option(part.graph, link) for part in parts]
    waiting, resident = data.draw(st.sampled_from([(0.0, 0.0), (3.0, 4 / 3)]), "of other micro-batches")

    def with_others(choice: Sequence[Option]) -> tuple[float, float]:
        cost_ms, peak = cost_and_peak(parts, choice, link)
        held = (waiting * option.kept_bytes + resident * option.swapped_bytes for option in choice)
        return cost_ms, peak + sum(held)

    tried = [with_others(choice) for choice in itertools.product(*every)]
    options = [options_of(part.graph, link, 4) for part in parts]
    # Not of `every`: one that only recomputes longer may have a lower peak on a slow link, and is not listed.
    least = min(with_others(choice)[1] for choice in itertools.product(*options))
    most = max(peak for _, peak in tried)
    budget = int(least + data.draw(st.floats(0, 1)) * (most - least)) + 16
    best_ms = min(cost for cost, peak in tried if peak <= budget)
    limits = Limits(LIMITS.device_bytes, waiting=waiting, resident=resident)
    found = solve(parts, options, link, limits, budget)
    cost_ms, peak = with_others(found.options)
    compute_ms = sum(sum(part.graph.forward_ms) + sum(part.graph.backward_ms) for part in parts)
    assert peak <= budget + 1024
    assert best_ms - 1e-3 <= cost_ms <= best_ms * (1 + GAP) + STEP_GAP * compute_ms * 1.01 + 1e-3
    assert found.bound_ms <= best_ms + 1e-3
    assert solve(parts, options, link, limits, int(least) - 4096) is None
    smallest = solve(parts, options, link, limits, None)
    assert with_others(smallest.options)[1] == pytest.approx(least, rel=0.01)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(layers_of_ops(6), st.floats(1e-10, 1e-5))
def test_cuts_are_best_at_every_price(ops: tuple[Op, ...], price: float) -> None:
    graph = segments([ops], None)[1].graph
    free = [number for number, call in enumerate(graph.calls) if RECOMPUTE in call.fates]

    def cost(again: frozenset[int]) -> float:
        fates = [RECOMPUTE if number in again else KEEP for number in range(len(graph.calls))]
        option = evaluate(graph, fates, NO_COPIES)
        return option.recompute_ms + price * option.kept_bytes

    sets = itertools.chain.from_iterable(itertools.combinations(free, size) for size in range(len(free) + 1))
    best = min(cost(frozenset(again)) for again in sets)
    assert min(cost(again) for again in best_runs(graph)) == pytest.approx(best, rel=1e-3, abs=1e-3)


def test_what_runs_again_holds_its_inputs_once() -> None:
    """y = f(x) saved by g: run again it costs f's time and holds x; two readers of x hold it once."""
    ops = (
        Op("f", 8 * MIB, 1.0, ("x",)),
        Op("g", 8 * MIB, 2.0, ("f",), ("f",)),
        Op("h", 8 * MIB, 3.0, ("x", "g"), ("x", "g")),
        Op("out", HIDDEN, 0.1, ("h",)),
    )
    graph = segments([ops], None)[1].graph
    at = {call.path: number for number, call in enumerate(graph.calls)}
    assert set(at) == {"output", "f", "g"}  # nothing can be held of what h and out make

    def option(**fates: str) -> Option:
        return evaluate(graph, [fates.get(call.path, KEEP) for call in graph.calls], NO_COPIES)

    keep, run_f, run_g, run_both = option(), option(f=RECOMPUTE), option(g=RECOMPUTE), option(f="r", g="r")
    assert (keep.recompute_ms, keep.kept_bytes) == (0.0, HIDDEN + 16 * MIB)
    assert (run_f.recompute_ms, run_f.kept_bytes) == (1.0, HIDDEN + 8 * MIB)
    assert (run_g.recompute_ms, run_g.kept_bytes) == (2.0, HIDDEN + 8 * MIB)
    assert (run_both.recompute_ms, run_both.kept_bytes) == (3.0, HIDDEN)
    assert all(SWAP not in call.fates for call in graph.calls)  # no link: nothing may move


def test_whole_layer_runs_up_to_its_last_saved_tensor() -> None:
    graph = segments([llama_layer(1024)], link_of(50))[1].graph
    before = [number for number, call in enumerate(graph.calls) if call.from_before]
    option = evaluate(graph, [KEEP] * len(graph.calls), NO_COPIES, whole=True)
    names = [op.name for op in llama_layer(1024)]
    times = dict(zip(names, graph.forward_ms, strict=True))
    assert len(before) == 1
    assert option.kept_bytes == HIDDEN
    assert option.recompute_ms == pytest.approx(
        sum(graph.forward_ms) - times["mlp.down_proj"] - times["add2"]
    )


def test_what_is_written_by_hand_or_communicates_is_not_decided() -> None:
    ops = (
        Op("gather", 8 * MIB, 1.0, ("x",), (), communicates=True),
        Op("f", 8 * MIB, 1.0, ("gather",), ("gather",)),
        Op("mlp.g", 8 * MIB, 1.0, ("f",), ("f",)),
        Op("mlp.h", 8 * MIB, 1.0, ("mlp.g",), ("mlp.g",)),
        Op("out", HIDDEN, 0.1, ("mlp.h",), ("mlp.h",)),
    )
    fixed = MemoryPlan((PlanRow(0, "f", "recompute"), PlanRow(0, "mlp", "swap")), 1)
    graph = segments([ops], link_of(50), fixed)[1].graph
    fates = {call.path: call.fates for call in graph.calls}
    assert fates == {"gather": KEEP + SWAP, "f": RECOMPUTE, "mlp.g": SWAP, "mlp.h": SWAP}
    assert not graph.whole


def test_equal_layers_share_a_graph_and_others_do_not() -> None:
    slow = tuple(Op(op.name, op.size_bytes, 2 * op.ms, op.reads, op.saves) for op in llama_layer(1024))
    a_little_slower = tuple(
        Op(op.name, op.size_bytes, 1.05 * op.ms, op.reads, op.saves) for op in llama_layer(1024)
    )
    layers = [llama_layer(1024), a_little_slower, llama_layer(1024), slow]
    profile = profile_of(layers, link_of(50), 1024 * 8192)
    parts = segments_of(profile, MemoryPlan((), 4), LIMITS)
    graphs = [part.graph for part in parts[1:5]]
    assert graphs[0] is graphs[1] is graphs[2]
    assert graphs[3] is not graphs[0]
    assert sum(graphs[0].forward_ms) == pytest.approx(sum(op.ms for op in llama_layer(1024)) * 3.05 / 3)
