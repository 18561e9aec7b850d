"""Two processes: under DDP and FSDP2 each rank's losses and gradients are those without tiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.tiles_worker import CASES, SLOW, TILES, WORLD_SIZE, train_on_rank, train_under_zero
from tests.processes import launch, launched

results = launched(train_on_rank, WORLD_SIZE, 250, told_of_slow=True)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("what", "kind", "smooth"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES],
)
def test_no_weight_is_ready_twice_none_resharded_between_tiles_and_no_rank_waits(
    what: str, kind: str, smooth: bool, results: Path
) -> None:
    """DDP "marked ready twice", gradients corrupted by FSDP2, unequal numbers of tiles: not here."""
    for rank in range(WORLD_SIZE):
        whole, tiled = (
            torch.load(results / f"{what}.{kind}.{smooth}.{on}.{rank}.pt") for on in (False, True)
        )
        assert tiled[0] == pytest.approx(whole[0], rel=1e-6)
        assert tiled[1].keys() == whole[1].keys()
        for name, one in whole[1].items():
            assert float((tiled[1][name] - one).norm()) < 2e-6 * float(one.norm()), name
        stays_whole = kind in ("fsdp2 lm_head", "fsdp2 gate_proj")
        assert bool(tiled[2]) == stays_whole, "what FSDP2 frees between tiles stays whole, and this is said"


@pytest.mark.dist
@pytest.mark.parametrize("what", TILES)
def test_fsdp1_is_rejected_by_name(what: str, results: Path) -> None:
    for rank in range(WORLD_SIZE):
        assert "(FSDP1)" in torch.load(results / f"fsdp1.{rank}.pt")[what]


@pytest.mark.dist
@pytest.mark.slow
def test_zero_2_in_tiles_and_zero_3_whole(tmp_path: Path) -> None:
    """Peers wait forever where ranks have unequal numbers of tiles: stage 3 gathers weights in each."""
    pytest.importorskip("deepspeed", reason="ZeRO is tested where DeepSpeed is installed")
    launch(train_under_zero, tmp_path, WORLD_SIZE, 250, fresh=True)
    for rank in range(WORLD_SIZE):
        for stage in (2, 3):
            whole, tiled = (torch.load(tmp_path / f"zero{stage}.{on}.{rank}.pt") for on in (False, True))
            assert tiled[0] == pytest.approx(whole[0], rel=1e-6)
            for name, one in whole[1].items():
                assert float((tiled[1][name] - one).norm()) < 2e-6 * float(one.norm()), name
            said = {"whole: ZeRO-3 frees weights between the tiles"}
            said.add("whole logits: ZeRO-3 frees the head's weight after its call")
            assert set(tiled[2]) == (said if stage == 3 else set())
