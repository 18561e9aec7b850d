"""A layer that is run again as a whole gathers its inputs once more, not twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel.gathered_inputs_worker import CASES, LAYERS, WORLD_SIZE, run_on_rank
from tests.processes import launched, of_ranks, result

LIMIT_S = 120

pytestmark = pytest.mark.dist

BLOCKS = 2 * LAYERS
"""Each gathers its input and scatters its output, whose backward is a gather too."""
LOGITS = 1
"""Of the routers of all layers."""
HEAD, ENDS = 1, 2
"""The head gathers its input; in backward the gradient of the first layer's part is gathered too."""

BACKWARD_GATHERS = {
    "nothing": 2 * BLOCKS + ENDS,
    "checkpointed": 2 * BLOCKS + ENDS,
    "recompute": 2 * BLOCKS + ENDS,
    "recompute_two": 2 * BLOCKS + ENDS,
    "recompute_kept": BLOCKS + ENDS,
    "select_comm": 2 * BLOCKS + ENDS,
    "select_comm_off": BLOCKS + ENDS,
    "select_comm_off_alone": BLOCKS + ENDS,
    "select_comm_first": BLOCKS + 2 + ENDS,
    "select_comm_not_written": 2 * BLOCKS + ENDS,
    "granite_recompute": 2 * BLOCKS + ENDS,
}


results = launched(run_on_rank, WORLD_SIZE, LIMIT_S)


@pytest.mark.parametrize("name", BACKWARD_GATHERS)
def test_gathers(name: str, results: Path) -> None:
    for found in of_ranks(results, name):
        assert found.calls["forward all_gather"] == BLOCKS + HEAD
        assert found.calls["backward all_gather"] == BACKWARD_GATHERS[name]


@pytest.mark.parametrize(
    ("name", "again"),
    [("experts_nothing", BLOCKS), ("experts_select_comm_off", 0), ("experts_recompute", BLOCKS + LAYERS)],
)
def test_gathers_of_experts(name: str, again: int, results: Path) -> None:
    """Routing is gathered beside the hidden states; where a layer runs again, anew, and at its loss once."""
    for found in of_ranks(results, name):
        assert found.calls["forward all_gather"] == BLOCKS + LAYERS + LOGITS + HEAD
        assert found.calls["backward all_gather"] == BLOCKS + again + ENDS


@pytest.mark.parametrize("name", [*BACKWARD_GATHERS, "experts_select_comm_off", "experts_recompute"])
def test_gradients_are_bitwise_those_without(name: str, results: Path) -> None:
    bare = {"granite": "granite_nothing", "mixtral": "experts_nothing"}.get(CASES[name].kind, "nothing")
    for found, expected in zip(of_ranks(results, name), of_ranks(results, bare), strict=True):
        assert found.grads.keys() == expected.grads.keys()
        assert [key for key, grad in found.grads.items() if not torch.equal(grad, expected.grads[key])] == []


def test_what_is_taken_off_gathers_as_before(results: Path) -> None:
    for found in of_ranks(results, "recompute"):
        assert found.kept_after == [False] * BLOCKS


def test_shared_inputs_of_ones_own(results: Path) -> None:
    for rank in range(WORLD_SIZE):
        assert result(results, "by_hand", rank) == (False, True, False)
