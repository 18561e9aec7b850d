"""Models with routed experts on 2 and 4 ranks: what a rank saves, and gradients of special cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel.patch_ways_worker import LENGTH
from tests.parallel.patch_worker import BATCH
from tests.parallel.patched_models import HIDDEN, INNER
from tests.parallel.routed_experts_cases import IMPLEMENTATIONS, KINDS, cases, run_on_four, run_on_two
from tests.parallel.test_patch_model import GRADIENT_TOLERANCE, assert_as_in_one_process
from tests.processes import launch, result

LIMIT_S = 200
EXPERTS, EXPERTS_OF_A_TOKEN = 4, 2
SIZE_BYTES, INDEX_BYTES, END_BYTES = 4, 8, 4

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Number of ranks, and the folder with what each wrote; all cases of a number run in one launch."""
    size: int = request.param
    worker = run_on_two if size == 2 else run_on_four
    return size, launch(worker, tmp_path_factory.mktemp(f"experts{size}"), size, LIMIT_S)


def saved_bytes(size: int) -> int:
    """Of a layer of Mixtral with as many key as query heads, per rank."""
    tokens, heads = BATCH * LENGTH, 4 // size
    rows, own = tokens * EXPERTS_OF_A_TOKEN, tokens // size
    part = own * HIDDEN
    norms = 2 * (3 * part + own)
    attention = 4 * part + tokens * heads + 2 * LENGTH * HIDDEN // 4
    inner = 4 * rows * INNER // size  # gate and up, the activation, their product
    routing = 2 * tokens * EXPERTS_OF_A_TOKEN  # weights, and what travelled beside them
    router = own * (1 + EXPERTS_OF_A_TOKEN + EXPERTS)  # sum, weights, probabilities
    floats = norms + attention + inner + routing + router
    indices = rows + own * EXPERTS_OF_A_TOKEN
    return SIZE_BYTES * floats + INDEX_BYTES * indices + END_BYTES * EXPERTS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_saved_tensors(kind: str, implementation: str, ranks: tuple[int, Path]) -> None:
    """No rank saves more tokens of full width than are its own, nor rows of them."""
    size, folder = ranks
    for rank in range(size):
        found = result(folder, f"audit_{kind}_{implementation}", rank)
        wide = [torch.Size(shape).numel() for shape in found["shapes"] if shape[-1:] == (HIDDEN,)]
        assert len(wide) == 6
        assert set(wide) == {BATCH * LENGTH * HIDDEN // size}
        if kind == "mixtral":
            assert found["bytes"] == saved_bytes(size)


def test_saved_tensors_of_frozen_experts(ranks: tuple[int, Path]) -> None:
    """No input is saved for them; norm and router save what they did."""
    size, folder = ranks
    found = result(folder, "audit_frozen", 0)
    wide = [torch.Size(shape).numel() for shape in found["shapes"] if shape[-1:] == (HIDDEN,)]
    assert set(wide) == {BATCH * LENGTH * HIDDEN // size}
    assert found["bytes"] == saved_bytes(size)


@pytest.mark.parametrize("name", [name for name in cases() if name.startswith(("frozen", "few_rows"))])
def test_as_in_one_process(name: str, ranks: tuple[int, Path]) -> None:
    size, folder = ranks
    for rank in range(size):
        assert_as_in_one_process(result(folder, name, rank))


def test_without_the_sum_routers_are_wrong(ranks: tuple[int, Path]) -> None:
    """Negative control: a router has seen this rank's tokens."""
    found = result(ranks[1], "not_reduced", 0)
    wrong = {name for name, error in found.errors.items() if error > GRADIENT_TOLERANCE}
    assert wrong == {name for name in found.errors if name.endswith(("norm.weight", ".gate.weight"))}
    assert {name for name in wrong if "gate" in name} <= set(found.drift)


@pytest.mark.parametrize("length", [16, 17])
def test_router_logits_are_those_of_all_tokens(length: int, ranks: tuple[int, Path]) -> None:
    size, folder = ranks
    for rank in range(size):
        found = result(folder, f"logits_{length}", rank)
        assert len(found["found"]) == len(found["expected"]) == 2
        for own, expected in zip(found["found"], found["expected"], strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast(implementation: str, ranks: tuple[int, Path]) -> None:
    """Gradients agree to a few roundings of bfloat16."""
    size, folder = ranks
    for rank in range(size):
        errors = result(folder, f"autocast_{implementation}", rank)
        assert max(errors.values()) < 4e-2, errors
