"""Liger's kernels in a divided model: norms, rotary embedding and MLP work, its fused loss is rejected."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.parallel.liger_worker import WORLD_SIZE, run_on_rank
from tests.parallel.test_patch_model import assert_as_in_one_process
from tests.processes import launch, result

LIMIT_S = 240

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")),
        reason="liger-kernel and triton are not installed",
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each rank wrote."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return launch(run_on_rank, tmp_path_factory.mktemp("liger"), WORLD_SIZE, LIMIT_S, fresh=True)
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


@pytest.mark.parametrize("name", ["divided", "replicated"])
def test_kernels(name: str, results: Path) -> None:
    for rank in range(WORLD_SIZE):
        assert_as_in_one_process(result(results, name, rank))


def test_a_plan_on_top(results: Path) -> None:
    for rank in range(WORLD_SIZE):
        different, done = result(results, "plan", rank)
        assert different == []
        assert done > 0


def test_the_fused_loss_is_rejected(results: Path) -> None:
    """It reads this rank's part of the head's weight as if it were all of the vocabulary."""
    for rank in range(WORLD_SIZE):
        assert "a fused loss, such as Liger's?" in result(results, "fused_loss", rank)
