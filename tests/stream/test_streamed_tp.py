"""A divided model, streamed: the gradients of the divided step, half the host memory, counted collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import launch, result
from tests.stream.streamed_models import FAMILIES, SIZES
from tests.stream.streamed_tp_worker import QUICK, WORLD_SIZE, run_others, run_quick

CHUNKS, LAYERS = 4, SIZES["num_hidden_layers"]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(run_quick, tmp_path_factory.mktemp("quick"), WORLD_SIZE, 250)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(run_others, tmp_path_factory.mktemp("others"), WORLD_SIZE, 250)


def results(folder: Path, name: str) -> list[Any]:
    """What each rank saw."""
    return [result(folder, name, rank) for rank in range(WORLD_SIZE)]


def check(found: dict[str, Any]) -> None:
    whole, streamed, alone = found["losses"]
    torch.testing.assert_close(streamed, whole, rtol=3e-7, atol=0)
    torch.testing.assert_close(streamed, alone, rtol=1e-6, atol=0)
    assert found["as exact"]
    own, of_all = found["host"]
    assert [2 * size for size in own] == list(of_all), "half of the heads"
    assert found["predicted"] == [own[0]]


@pytest.mark.dist
@pytest.mark.parametrize("family", [*QUICK, "packed documents"])
def test_gradients_and_half_of_the_host_memory(family: str, quick: Path) -> None:
    for found in results(quick, family):
        check(found)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("family", [*(name for name in FAMILIES if name not in QUICK), "lora"])
def test_other_families(family: str, others: Path) -> None:
    for found in results(others, family):
        check(found)


@pytest.mark.dist
def test_collectives_by_chunk_and_layer(quick: Path) -> None:
    """Of a layer: two in each forward and in backward, one in recomputation, whose last result nobody reads.

    Beside the layers: the embedding twice, the loss two and two, and the head's input in backward. The first
    pass gathers a chunk's logits, as calls without gradients do; the loss in tiles gathers those of the last
    chunk alone, which is shorter than a tile.
    """
    for found in results(quick, "llama"):
        whole, tiled = found["calls"]
        assert whole == {
            "forward all_reduce": CHUNKS * (LAYERS * (2 + 2 + 2 + 1) + 2 + 4 + 1),
            "forward all_gather": CHUNKS,
        }
        assert tiled["forward all_gather"] == 1


@pytest.mark.dist
def test_ranks_keep_the_layers_that_fit_on_each_of_them(quick: Path) -> None:
    """A layer that is kept takes no all-reduce in recomputation."""
    for found in results(quick, "adaptive"):
        (none, all_reduces), (every, fewer) = found["rank 1 has room for none"], found["room for all"]
        assert (none, every) == (LAYERS, 0)
        assert all_reduces["forward all_reduce"] - fewer["forward all_reduce"] == CHUNKS * LAYERS


@pytest.mark.dist
def test_divided_sequences_and_steps_on_parts_are_rejected(quick: Path) -> None:
    for found in results(quick, "rejections"):
        assert "sequence_parallel_enabled: false" in found["sequence"]
        assert "were changed by a step on this rank's part" in found["unsummed"]
