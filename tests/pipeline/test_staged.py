"""Steps of staged models: gradients and losses bitwise those of one process, and which layers run again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hf_actswap.pipeline.runtime import passes_in_flight
from tests.pipeline.staged_worker import FIVE, FOUR, TWO, TWO_MORE, Case, InFlight, Result, run_on_rank
from tests.processes import launch, result

pytestmark = pytest.mark.dist

OTHER_SUMS = {"tied 1f1b", "tied zero_bubble", "tied mixed", "four tied", "gpipe interleaved"}
"""Tied: gradients of head and embedding are summed over micro-batches first, and then together. Looped BFS
runs backwards in reverse."""

ONCE = 6
"""Micro-batches of a step, and so calls of a layer that does not run again."""
AGAIN = {
    "gpipe keep": {},
    "gpipe swap": {},
    "gpipe table": {0: 2, 2: 2, 3: 2},
    "1f1b table": {0: 2, 2: 2, 3: 2},
    "gpipe mixed": {1: 2, 2: 2},
    "1f1b mixed": {1: 2, 2: 2},
    "interleaved_1f1b mixed": {1: 2, 2: 2},
    "interleaved_1f1b table": {0: 2, 1: 2, 3: 2},
    "zero_bubble mixed": {1: 2, 2: 3},
    "zero_bubble table": {0: 2, 2: 11, 3: 11},
    "uneven": {0: 2, 3: 2, 4: 2},
    "golden R13": dict.fromkeys((0, 1, 2, 4, 6, 8), 2),
    "golden R15": dict.fromkeys((0, 1, 2, 6, 7), 2),
    "golden R7": dict.fromkeys((0, 1, 2), 2),
}
"""By case, how often a layer's MLP runs for a micro-batch, where not once.

Golden vectors: in the layers of the tables. Under ``zero_bubble`` an op runs again for the gradients of
inputs and for those of weights; a whole layer, which PyTorch's checkpoint runs again, for each of its nine
weights.
"""

SEEN = {
    "gpipe swap": range(12),
    "1f1b swap": range(12),
    "interleaved_1f1b swap": range(24),
    "zero_bubble swap": (),
}
"""By case, the passes of a step in which windows go on, by their number in the schedule's order: all, or none
where backwards are made in parts."""


def run(folder: Path, cases: dict[str, Case], world_size: int, limit_s: float) -> Path:
    """All cases of so many stages in one launch."""
    return launch(partial(run_on_rank, cases, world_size), folder, world_size, limit_s)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what two stages wrote."""
    return run(tmp_path_factory.mktemp("two"), TWO, 2, 240)


@pytest.fixture(scope="module")
def two_more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what two stages wrote, of the slow cases."""
    return run(tmp_path_factory.mktemp("two_more"), TWO_MORE, 2, 240)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what four stages wrote."""
    return run(tmp_path_factory.mktemp("four"), FOUR, 4, 300)


def compared(cases: dict[str, Case]) -> list[str]:
    """Those whose results are compared with one process."""
    return [name for name in cases if not name.startswith("in flight")]


def counted(cases: dict[str, Case]) -> list[str]:
    """Those whose bytes in flight are counted."""
    return [name for name in cases if name.startswith("in flight")]


@pytest.mark.parametrize("name", counted(TWO))
def test_passes_in_flight(name: str, two: Path) -> None:
    check_in_flight(TWO[name], [result(two, name, rank) for rank in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize("name", counted(FOUR))
def test_passes_in_flight_of_four_stages(name: str, four: Path) -> None:
    check_in_flight(FOUR[name], [result(four, name, rank) for rank in range(4)])


def check_in_flight(case: Case, ranks: list[InFlight]) -> None:
    """What autograd holds at most is the formula's number of passes, and that many times one pass's bytes."""
    shape = case.schedule, case.micro_batches, len(ranks), case.interleaves
    for stage, found in enumerate(ranks):
        expected = passes_in_flight(*shape, stage)
        if case.schedule == "zero_bubble":
            assert found.passes <= expected
            assert found.held_bytes <= expected * found.one_bytes
            continue
        assert found.passes == expected
        if case.interleaves == 1:
            assert found.held_bytes == expected * found.one_bytes
    if case.schedule == "1f1b" and case.micro_batches >= len(ranks):
        assert [found.passes for found in ranks] == list(range(len(ranks), 0, -1))


@pytest.mark.parametrize("name", compared(TWO))
def test_two_stages(name: str, two: Path) -> None:
    check(name, [result(two, name, rank) for rank in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_MORE)
def test_two_stages_more(name: str, two_more: Path) -> None:
    check(name, [result(two_more, name, rank) for rank in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize("name", compared(FOUR))
def test_four_stages(name: str, four: Path) -> None:
    check(name, [result(four, name, rank) for rank in range(4)])


@pytest.mark.slow
def test_auto_swaps_all_of_up_to_four_micro_batches_in_flight(four: Path) -> None:
    """On stages that run; the link needs 65 % of a forward and a backward for a micro-batch.

    On the device is less than one micro-batch, and 1.5 is the limit. The last stage swaps what a forward and
    its own backward hide.
    """
    found = [result(four, "four auto swap", rank).swapped for rank in range(4)]
    assert found[:3] == [(211_968, 167_424)] * 3
    assert found[3] == (95_232, 38_400)


@pytest.mark.slow
def test_the_table_of_the_document(tmp_path: Path) -> None:
    folder = run(tmp_path, FIVE, 5, 300)
    found = [result(folder, "golden R1", rank) for rank in range(5)]
    check("golden R1", found)
    calls = {layer: count for of_rank in found for layer, count in of_rank.forwards.items()}
    assert calls == {layer: 10 if layer in (0, 1, 4, 24) else 5 for layer in range(48)}


def check(name: str, ranks: list[Result]) -> None:
    """What holds for every case."""
    differing = {key: value for found in ranks for key, value in found.differing.items()}
    if name in OTHER_SUMS:
        assert max(differing.values()) < 1e-7
        if "tied" in name:
            assert set(differing) == {"model.embed_tokens.weight"}
    else:
        assert differing == {}
    for found in ranks:
        assert all(found.losses)
        assert found.evaluation
        assert all(found.norms) or name in OTHER_SUMS
        assert found.offloads > 0 or "swap" not in name
        assert found.passes == sorted(found.passes)
    assert ranks[0].state
    assert ranks[0].restored
    if name in SEEN:
        assert [found.passes for found in ranks] == [list(SEEN[name])] * len(ranks)
    if name in AGAIN:
        calls = {layer: count for found in ranks for layer, count in found.forwards.items()}
        assert calls == {layer: ONCE * AGAIN[name].get(layer, 1) for layer in calls}


def test_each_rank_holds_its_stage_alone(two: Path) -> None:
    first, last = (set(result(two, "1f1b keep", rank).held) for rank in range(2))
    assert not first & last
    assert {name.split(".")[2] for name in first if "layers" in name} == {"0", "1"}
    assert "model.embed_tokens.weight" in first
    assert "lm_head.weight" in last
    tied = [set(result(two, "tied 1f1b", rank).held) for rank in range(2)]
    assert tied[0] & tied[1] == {"model.embed_tokens.weight"}


def test_ops_are_followed_in_every_chunk(two: Path) -> None:
    """With and without a mask, attention saves other tensors: its ops are followed anew at each change."""
    found = [result(two, name, rank).offloads for name in ("ops 1f1b", "ops interleaved") for rank in (0, 1)]
    assert found == [100, 100, 100, 100]


def test_swap_acts_on_both_stages(two: Path) -> None:
    for name in ("1f1b swap", "gpipe swap", "zero_bubble swap", "interleaved_1f1b swap"):
        assert all(result(two, name, rank).offloads > 150 for rank in range(2)), name
