"""``tile_config.loss`` of a divided model gives what it gives without, and no rank holds all its logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel.tiled_loss_worker import (
    CASES,
    PEAK_HIDDEN,
    PEAK_LAYERS,
    PEAK_TOKENS,
    PEAK_VOCABULARY,
    SLOW,
    TILE,
    WORLD_SIZE,
    run_on_rank,
)
from tests.processes import launched, of_ranks
from tests.quick_cases import slow_among

pytestmark = pytest.mark.dist


results = launched(run_on_rank, WORLD_SIZE, 280, told_of_slow=True)


@pytest.mark.parametrize("name", slow_among(CASES, SLOW))
def test_losses_bitwise_and_gradients_to_rounding(name: str, results: Path) -> None:
    for found in of_ranks(results, name):
        losses, tiled_losses = found["losses"]
        tolerance = 1e-6 if "smoothing of torch" in name else 0  # it divides two sums, and the tiles one
        assert tiled_losses == pytest.approx(losses, rel=tolerance, abs=0)
        assert found["error"] < 2e-6
        assert found["adjustments"] == [], "nothing made the logits whole"
        assert found["restored"]


@pytest.mark.parametrize("name", slow_among(["reads", "reads_replicated"], SLOW))
def test_what_is_read(name: str, results: Path) -> None:
    """Logits in training, in evaluation and of the head alone, the loss of an evaluation, and text."""
    for found in of_ranks(results, name):
        assert found.pop("kinds") == [False, True]
        assert found.pop("adjustments") == ()
        assert len(found) == 7
        for what, (whole, tiled) in found.items():
            assert torch.equal(whole, tiled), what


def test_a_loss_of_whole_logits_says_so_and_is_right(results: Path) -> None:
    for found in of_ranks(results, "unknown_op"):
        losses, tiled_losses = found["losses"]
        assert tiled_losses == losses
        assert found["error"] < 2e-6
        (adjustment,) = found["adjustments"]
        assert "got whole logits: aten.mean" in adjustment


def test_the_fused_head_of_trl_as_without(results: Path) -> None:
    for whole, tiled in of_ranks(results, "fused_head"):
        for of_whole, of_tiled in zip(whole[:4], tiled[:4], strict=True):
            torch.testing.assert_close(of_tiled, of_whole, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(tiled[4], whole[4], rtol=1e-5, atol=1e-7)


def test_autocast_as_without(results: Path) -> None:
    for found in of_ranks(results, "autocast"):
        losses, tiled_losses = found["losses"]
        assert tiled_losses == losses
        assert found["error"] < 0.02


def test_half_precision_is_as_close_to_the_truth_as_without(results: Path) -> None:
    """Over the batches: of a single one either is up to a tenth closer than the other."""
    whole, tiled = sum(of_ranks(results, "half")).sqrt()
    assert (tiled > 0).all()
    assert (tiled < 1.02 * whole).all(), (tiled / whole).tolist()


@pytest.mark.parametrize("name", slow_among(["collectives", "collectives_replicated"], SLOW))
def test_collectives(name: str, results: Path) -> None:
    """Two reductions of a number or two per token, for each tile; the input is not gathered again."""
    more = -(-2 * 24 // TILE) - 1
    expected = {
        "forward all_reduce": 2 * more,
        "evaluation all_reduce": 2 * more,
        "evaluation all_gather": -1,
    }
    if name == "collectives":
        expected["backward all_gather"] = -1
    assert of_ranks(results, name) == [expected] * WORLD_SIZE


def test_auto_leaves_small_batches_whole(results: Path) -> None:
    assert of_ranks(results, "auto") == [[False, True]] * WORLD_SIZE


@pytest.mark.parametrize("name", slow_among(["peaks", "peaks_replicated"], SLOW))
def test_peaks(name: str, results: Path) -> None:
    """In hidden states: (L + 4 V / (tp H) + 5) without tiles; with them one layer's backward, whatever V.

    Under sequence parallelism ranks hold parts of the L inputs, and of two of the other hidden states.
    """
    unit = 2 * PEAK_TOKENS * PEAK_HIDDEN
    layers = PEAK_LAYERS / WORLD_SIZE if name == "peaks" else PEAK_LAYERS
    beside, most = (3, 19.1) if name == "peaks" else (5, 22.6)
    for found in of_ranks(results, name):
        whole, of_twice, tiled, tiled_of_twice = (item / unit for item in found)
        for vocabulary, peak in ((PEAK_VOCABULARY, whole), (2 * PEAK_VOCABULARY, of_twice)):
            assert peak == pytest.approx(
                4 * vocabulary / (WORLD_SIZE * PEAK_HIDDEN) + layers + beside, rel=0.02
            )
        assert abs(tiled_of_twice - tiled) < 1.01  # gloo's thread may hold what it summed a moment longer
        assert max(tiled, tiled_of_twice) < layers + most + 1.01
