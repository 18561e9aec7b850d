"""Two processes: what each communication key does to a stack of parallel layers, in calls and in bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.engine.tiny_models import NUM_LAYERS, assert_bitwise_equal
from tests.parallel.communication_worker import CASES, LENGTH, SLOW, WORLD_SIZE, run_on_rank
from tests.processes import launched, result
from tests.quick_cases import slow_among

LIMIT_S = 150
HIDDEN, SIZE_BYTES = 32, 4
WHOLE_BYTES = 2 * LENGTH * HIDDEN * SIZE_BYTES
"""A hidden state of the whole sequence, batch 2."""
PART_BYTES = WHOLE_BYTES // WORLD_SIZE

pytestmark = pytest.mark.dist


results = launched(run_on_rank, WORLD_SIZE, LIMIT_S, told_of_slow=True)


def bare_of(name: str) -> str:
    """The case of the same model without a plan."""
    case = CASES[name]
    return (
        "nothing" if case.sequence_parallel else "replicated" if case.batch == 2 else "replicated_odd_batch"
    )


PLANNED = [name for name, case in CASES.items() if case.recompute is not None]


@pytest.mark.parametrize("name", slow_among(PLANNED, SLOW))
def test_gradients_are_those_without_recomputation(name: str, results: Path) -> None:
    for rank in range(WORLD_SIZE):
        found, bare = result(results, name, rank), result(results, bare_of(name), rank)
        assert found.losses == bare.losses
        assert_bitwise_equal(found.grads, bare.grads)


@pytest.mark.parametrize("name", slow_among(PLANNED, SLOW))
def test_removed_without_trace(name: str, results: Path) -> None:
    for rank in range(WORLD_SIZE):
        found, bare = result(results, name, rank), result(results, bare_of(name), rank)
        assert found.left_over == []
        assert found.calls_after == bare.calls
        assert_bitwise_equal(found.grads_after, bare.grads)


def test_collectives_of_the_layers_themselves(results: Path) -> None:
    """Per layer two gathers and two reduce-scatters each way; one gather each way at the model's boundary."""
    for rank in range(WORLD_SIZE):
        found = result(results, "nothing", rank)
        each_way = {"all_gather": 2 * NUM_LAYERS + 1, "reduce_scatter": 2 * NUM_LAYERS}
        expected = {(part, kind): n for part in ("forward", "backward") for kind, n in each_way.items()}
        assert found.calls == expected
        assert found.moved_bytes == {key: n * WHOLE_BYTES for key, n in expected.items()}
        found = result(results, "replicated", rank)
        assert found.calls == {(part, "all_reduce"): 2 * NUM_LAYERS for part in ("forward", "backward")}


MORE_CALLS: dict[str, dict[str, int]] = {
    "select_comm": {"all_gather": 2 * NUM_LAYERS},
    "select_comm_some_layers": {"all_gather": 4},
    "select_comm_one_norm": {"all_gather": NUM_LAYERS},
    "select_comm_excluded": {},
    "select_comm_reduce": {},
    "select_norms_and_comm": {"all_gather": 2 * NUM_LAYERS},
    "select_comm_and_swap": {"all_gather": 2 * NUM_LAYERS},
    "select_comm_and_layer_swap": {"all_gather": 2 * NUM_LAYERS},
    "select_norm_and_its_comm_kept": {},
    "recompute": {"all_gather": 2 * NUM_LAYERS, "reduce_scatter": NUM_LAYERS},
    "recompute_kept": {},
    "recompute_kept_two_layers": {},
    "recompute_excluded": {"all_gather": NUM_LAYERS, "reduce_scatter": NUM_LAYERS},
    "replicated_recompute": {"all_reduce": NUM_LAYERS},
    "replicated_kept": {},
    "slices": {"all_reduce": NUM_LAYERS, "all_gather": NUM_LAYERS},
    "slices_kept": {"all_gather": NUM_LAYERS},
    "slices_odd_batch": {"all_reduce": NUM_LAYERS},
    "slices_of_parts": {"all_gather": 2 * NUM_LAYERS, "reduce_scatter": NUM_LAYERS},
}
"""Collectives that backward does in addition. The last reduction of a recomputed layer is not needed."""


@pytest.mark.parametrize("name", slow_among(MORE_CALLS, SLOW))
def test_collectives_done_again_in_backward(name: str, results: Path) -> None:
    for rank in range(WORLD_SIZE):
        found, bare = result(results, name, rank), result(results, bare_of(name), rank)
        more = Counter({("backward", kind): calls for kind, calls in MORE_CALLS[name].items()})
        assert found.calls == bare.calls + more
        whole_bytes = WHOLE_BYTES // 2 * CASES[name].batch
        assert found.moved_bytes - bare.moved_bytes == {key: n * whole_bytes for key, n in more.items()}


MORE_BYTES: dict[str, tuple[str, int]] = {
    # In place of the whole sequence its part is held.
    "select_comm": ("nothing", -2 * NUM_LAYERS * (WHOLE_BYTES - PART_BYTES)),
    "select_comm_some_layers": ("nothing", -4 * (WHOLE_BYTES - PART_BYTES)),
    "select_comm_one_norm": ("nothing", -NUM_LAYERS * (WHOLE_BYTES - PART_BYTES)),
    "select_comm_excluded": ("nothing", 0),
    "select_comm_reduce": ("nothing", 0),
    # Nor what the norm's own backward reads: the normed part, and a number for each of its tokens.
    "select_norms_and_comm": ("select_comm", -NUM_LAYERS * (PART_BYTES + PART_BYTES // HIDDEN)),
    # Both gathered sequences and what o_proj's reduction left; of down_proj's nothing is needed again.
    "recompute_kept": ("recompute", NUM_LAYERS * (2 * WHOLE_BYTES + PART_BYTES)),
    "recompute_excluded": ("recompute", NUM_LAYERS * WHOLE_BYTES),
    "replicated_kept": ("replicated_recompute", NUM_LAYERS * WHOLE_BYTES),
    "slices": ("replicated_recompute", -NUM_LAYERS * (WHOLE_BYTES - PART_BYTES)),
    "slices_kept": ("replicated_kept", -NUM_LAYERS * (WHOLE_BYTES - PART_BYTES)),
    "slices_of_parts": ("recompute", 0),
}
"""Bytes held from forward to backward, compared with another case."""


@pytest.mark.parametrize("name", slow_among(MORE_BYTES, SLOW))
def test_bytes_held(name: str, results: Path) -> None:
    other, more_bytes = MORE_BYTES[name]
    for rank in range(WORLD_SIZE):
        held_bytes = result(results, name, rank).held_bytes
        assert held_bytes - result(results, other, rank).held_bytes == more_bytes


OVERRIDES = {
    "select_comm": [],
    "select_comm_reduce": [
        "recompute_config.select_comm_recompute self_attn.o_proj.reduce_scatter, layers 0-3: "
        "asked recompute communication, got keep: what it reduces would have to be kept, and is at least as "
        "large as its result, unless that is recomputed too"
    ],
    "select_comm_and_layer_swap": [
        "recompute_config.select_comm_recompute input_layernorm.all_gather, layers 0-3: asked swap, "
        "got re-gather: recomputation takes effect and swap does not where both are enabled "
        "(MindFormers, coupling rule 1)",
        "recompute_config.select_comm_recompute post_attention_layernorm.all_gather, layers 0-3: asked swap, "
        "got re-gather: recomputation takes effect and swap does not where both are enabled "
        "(MindFormers, coupling rule 1)",
    ],
    "recompute_kept": [],
    "recompute_excluded": [
        "recompute_config.select_comm_recompute_exclude post_attention_layernorm.all_gather, layers 0-3: "
        "asked recompute communication, got keep: exclude keys have the highest priority "
        "(MindFormers 1.5, LayerSetting)"
    ],
    "slices": [],
    "slices_of_parts": [
        "recompute_config.recompute_slice_activation: asked slices, got no effect: "
        "with sequence parallelism each rank holds its own part of the input already"
    ],
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_what_gives_way(name: str, results: Path) -> None:
    assert result(results, name).adjustments == OVERRIDES[name]


def test_a_batch_that_does_not_divide_is_kept_whole_and_said_once(results: Path) -> None:
    assert result(results, "slices_odd_batch").warnings == [
        "recompute_slice_activation: dim 0 of an input [3, 16, 32] does not divide by 2 tensor-parallel "
        "ranks; it is kept whole."
    ]
    assert result(results, "slices").warnings == []


def test_weights_are_gathered_again(results: Path) -> None:
    """FSDP2 told to hold its weights gathered; the key overrules it until it is removed, root included."""
    for rank in range(WORLD_SIZE):
        bare, again, held = (
            result(results, f"weights_{name}", rank) for name in ("as_sharded", "again", "held")
        )
        assert bare.calls["backward", "all_gather"] == held.calls["backward", "all_gather"] == 0
        assert bare.calls["forward", "all_gather"] == again.calls["forward", "all_gather"] == NUM_LAYERS + 1
        assert again.calls["backward", "all_gather"] == NUM_LAYERS + 1
        assert again.calls_after == bare.calls_after == bare.calls
        assert again.adjustments == held.adjustments == []
        assert_bitwise_equal(again.grads, bare.grads)
        assert_bitwise_equal(again.grads_after, bare.grads_after)


def test_mappings(results: Path) -> None:
    """Outputs by hand; the loss weighs element k of a rank's output with k plus the rank's number."""
    for rank in range(WORLD_SIZE):
        found = {name: value.tolist() for name, value in result(results, "mappings", rank).items()}
        own = rank + 1.0
        assert found["copy"] == [own] * 4
        assert found["copy gradient"] == [1.0, 3.0, 5.0, 7.0]
        assert found["reduce"] == [3.0] * 4
        assert found["reduce gradient"] == [0.0 + rank, 1.0 + rank, 2.0 + rank, 3.0 + rank]
        assert found["scatter 0"] == [[own, own]] * 2
        assert found["scatter 0 gradient"] == [[0.0, 1.0], [2.0, 3.0], [1.0, 2.0], [3.0, 4.0]]
        assert found["scatter 1"] == [[own]] * 4
        assert found["scatter 1 gradient"] == [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]
        assert found["gather 0"] == [[1.0, 1.0]] * 2 + [[2.0, 2.0]] * 2
        assert found["gather 0 gradient"] == [[[1.0, 3.0], [5.0, 7.0]], [[9.0, 11.0], [13.0, 15.0]]][rank]
        assert found["gather 1"] == [[1.0, 1.0, 2.0, 2.0]] * 2
        assert found["gather 1 gradient"] == [[[1.0, 3.0], [9.0, 11.0]], [[5.0, 7.0], [13.0, 15.0]]][rank]
        assert found["gather alike 0"] == found["gather 0"]
        assert found["gather alike 0 gradient"] == [[[0.0, 1.0], [2.0, 3.0]], [[5.0, 6.0], [7.0, 8.0]]][rank]
        assert found["gather alike 1 gradient"] == [[[0.0, 1.0], [4.0, 5.0]], [[3.0, 4.0], [7.0, 8.0]]][rank]
        assert found["reduce-scatter 0"] == [[3.0, 3.0]] * 2
        assert found["reduce-scatter 0 gradient"] == found["scatter 0 gradient"]
        assert found["reduce-scatter 1"] == [[3.0]] * 4
        assert found["reduce-scatter 1 gradient"] == found["scatter 1 gradient"]
        doubled = [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0], [12.0, 14.0]]
        assert found["boundary"] == doubled
        assert found["boundary mistaken"] == [[2 * value for value in row] for row in doubled]
