"""Tagged gradients: summed exactly once, whoever asks; norms and clipping of a model in shards."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_actswap.parallel.gradients import GradientState, GradientWatch, watch_of
from tests.parallel.gradients_worker import (
    ALL,
    HIDDEN,
    MAX_NORM,
    NORM_CASES,
    PAIRS,
    STEPS,
    WORLD_SIZE,
    Toy,
    batch,
    gradients,
    norm_model,
    run_on_rank,
)
from tests.processes import launched, of_ranks, result

dist_test = pytest.mark.dist
GROUPS = {2: PAIRS, 4: ALL}
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


folder = launched(run_on_rank, WORLD_SIZE, 150)


def by_rank(folder: Path, name: str, size: int = 2) -> list[list[Any]]:
    """The results of each group of this size, in rank order."""
    full_name = f"{name}_4" if size == 4 else name
    return [[result(folder, full_name, rank) for rank in ranks] for ranks in GROUPS[size]]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole model's tensors from those of its ranks."""
    return {
        name: torch.cat([p[name] for p in parts]) if name == "weight" else parts[0][name] for name in parts[0]
    }


def one_process(micro_batches: int, step: int = 0) -> dict[str, Any]:
    toy = Toy(None)
    for number in range(micro_batches):
        toy(batch(step + number)).backward()
    return gradients(toy)


@dist_test
@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("who", ["ours", "user", "both"])
def test_every_gradient_is_that_of_one_process(who: str, micro_batches: int, size: int, folder: Path) -> None:
    """Spec: golden case G12."""
    for group in by_rank(folder, "accumulation", size):
        for step in range(2):
            found = joined([of_rank[f"{who} {micro_batches}"][step] for of_rank in group])
            for name, expected in one_process(micro_batches, step).items():
                torch.testing.assert_close(found[name], expected, **CLOSE)


@dist_test
def test_without_reduction_the_gradients_differ(folder: Path) -> None:
    """The control."""
    for group in by_rank(folder, "accumulation"):
        found, expected = group[0]["nobody 2"][0], one_process(2)
        assert not torch.allclose(found["scale"], expected["scale"], rtol=1e-2)
        assert not torch.allclose(found["scale"], group[1]["nobody 2"][0]["scale"], rtol=1e-2)


def trained_alone() -> dict[str, Any]:
    toy, losses, norms = Toy(None), [], []
    optimizer = torch.optim.AdamW(toy.parameters(), lr=0.05)
    for step in range(STEPS):
        loss = toy(batch(step))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(toy.parameters(), MAX_NORM))
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: p.detach() for name, p in toy.named_parameters()}
    return {"parameters": parameters, "losses": torch.stack(losses), "norms": torch.stack(norms)}


@dist_test
@pytest.mark.parametrize("size", GROUPS)
def test_training_with_clipping_is_that_of_one_process(size: int, folder: Path) -> None:
    """Replicated parameters stay bitwise equal; without the reduction they do not."""
    expected = trained_alone()
    assert float(expected["norms"].min()) > MAX_NORM
    for group in by_rank(folder, "training", size):
        found = [of_rank["reduced"] for of_rank in group]
        parameters = joined([of_rank["parameters"] for of_rank in found])
        for name in parameters:
            torch.testing.assert_close(parameters[name], expected["parameters"][name], rtol=1e-4, atol=1e-5)
        for of_rank in found:
            torch.testing.assert_close(of_rank["losses"], expected["losses"], **CLOSE)
            torch.testing.assert_close(of_rank["norms"], expected["norms"], **CLOSE)
            assert torch.equal(of_rank["norms"], found[0]["norms"])
            for name in ("scale", "bias"):
                assert torch.equal(of_rank["parameters"][name], found[0]["parameters"][name])
        drifted = [of_rank["not reduced"]["parameters"]["scale"] for of_rank in group]
        assert not torch.equal(drifted[0], drifted[1])


@dist_test
def test_membership(folder: Path) -> None:
    """One all-reduce per dtype; ranks without a gradient get the sum, where there is one."""
    expected = {
        "both": [3.0, 3.0],
        "first": [1.0, 1.0],
        "nobody": None,
        "frozen": None,
        "half": [3.0, 3.0],
        "ends": [3.0, 3.0],
    }
    for group in by_rank(folder, "membership"):
        for rank, found in enumerate(group):
            assert found["gradients"] == {**expected, "untagged": [rank + 1.0] * 2}
            assert found["calls"] == [(4 * 2 + 4, torch.float32), (2 + 1, torch.bfloat16)]
            assert found["again"] == [(2 + 1, torch.float32)]  # whether somebody has the one gradient now
            assert found["none"] == []


@dist_test
def test_sums_in_another_dtype(folder: Path) -> None:
    """1 and 3 2^-9: bf16 can hold the nearest, 1 + 2^-7; nothing is lost before the one rounding."""
    for found in by_rank(folder, "precision")[0]:
        assert found["fp32"] == ([1 + 2.0**-7] * 4, [(5, torch.float32)])
        assert found["own"][1] == [(5, torch.bfloat16)]


@dist_test
def test_main_gradients(folder: Path) -> None:
    for found in by_rank(folder, "main_gradients")[0]:
        assert found == [[2.0 * (1 + 2 + 2 * step)] * 2 for step in range(3)]


@dist_test
def test_mistakes_are_told(folder: Path) -> None:
    mixed = (
        "MixedGradientError: 2 gradients (the first of shape [6]) were accumulated onto gradients that had "
        "been summed over the tensor-parallel ranks already. Sum once, after the last micro-batch (with "
        "Accelerate: clip only `if accelerator.sync_gradients`)"
    )
    waiting = "UnsummedGradientError: the gradients of 2 tagged parameters (of 2) are this rank's part only."
    for found in by_rank(folder, "mistakes")[0]:
        for name in ("norm before", "clip before"):
            assert found[name].startswith(waiting)
        for name in ("mixed", "mixed norm", "still mixed"):
            assert found[name].startswith(mixed)
        for name in ("norm after", "zeroed", "zeroed again", "computed only", "forgotten"):
            assert found[name] == "nothing was raised"
        assert found["replaced"].startswith("MixedGradientError: 1 gradients")
        assert "forget_sums" in found["replaced"]
        assert found["no group"].startswith("RuntimeError: no tensor-parallel group")
        assert (
            found["norm type"] == "ValueError: norm_type: expected a number greater than 0 or inf, found 0.0"
        )
        assert found["watched"] == ([True, True, False], [False, False, False])


@dist_test
def test_gradients_zeroed_in_place_are_summed_once(folder: Path) -> None:
    group = by_rank(folder, "mistakes")[0]
    both = one_process(2)
    for name, expected in (
        ("zeroed gradients", one_process(1, 1)),
        ("zeroed again gradients", both),
        ("computed only gradients", both),
    ):
        found = joined([of_rank[name] for of_rank in group])
        for parameter in found:
            torch.testing.assert_close(found[parameter], expected[parameter], **CLOSE)
    for of_rank in group:
        assert of_rank["forgotten gradient"].tolist() == [2.0] * HIDDEN


@dist_test
@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("case", NORM_CASES)
def test_norms_count_every_element_once(case: str, size: int, folder: Path) -> None:
    """Spec: golden case T11; bitwise the same on all ranks."""
    names = [name for name in NORM_CASES[case] if not name.endswith("none")]
    elements = torch.cat([norm_model(size)[name].flatten().double() for name in names] or [torch.zeros(1)])
    wide = torch.float64 if case == "double" else torch.float32
    for group in by_rank(folder, "norms", size):
        for norm_type in (1.0, 2.0, 3.5, math.inf):
            found = [of_rank[f"{case} {norm_type}"] for of_rank in group]
            expected = float(torch.linalg.vector_norm(elements, norm_type))
            assert float(found[0]) == pytest.approx(expected, rel=1e-5)
            assert all(torch.equal(norm, found[0]) and norm.dtype == wide for norm in found)
        clipped = [float(of_rank[f"{case} clipped"]) for of_rank in group]
        assert clipped == [clipped[0]] * size
        assert clipped[0] == pytest.approx(1.5 if names else 0.0, rel=5e-3 if case == "half" else 1e-5)
        assert all(of_rank["calls"] == [(1, torch.float32)] for of_rank in group)


@dist_test
def test_every_rank_hears_of_what_is_not_finite(folder: Path) -> None:
    for found in by_rank(folder, "not_finite")[0]:
        assert len(found) == 4
        for name, text in found.items():
            assert text.startswith("RuntimeError: The total norm of order"), name


@dist_test
@pytest.mark.parametrize("kind", ["ddp", "ddp views", "fsdp2"])
def test_beside_data_parallelism(kind: str, folder: Path) -> None:
    toy = Toy(None)
    optimizer = torch.optim.SGD(toy.parameters(), lr=0.1)
    found = of_ranks(folder, "data_parallel")
    for step in range(3):
        for number in range(2):
            for data_rank in range(2):
                (toy(batch(10 * step + 2 * number + data_rank)) / 2).backward()
        norm = nn.utils.clip_grad_norm_(toy.parameters(), MAX_NORM)
        for pair in PAIRS:
            of_pair = [found[rank][f"{kind} {step}"] for rank in pair]
            whole = joined([whole for _, whole in of_pair])
            for name, expected in gradients(toy).items():
                torch.testing.assert_close(whole[name], expected, rtol=1e-4, atol=1e-7)
        norms = [of_rank[f"{kind} {step}"][0] for of_rank in found]
        torch.testing.assert_close(norms[0], norm, rtol=1e-5, atol=0)
        assert all(torch.equal(of_rank, norms[0]) for of_rank in norms)
        optimizer.step()
        optimizer.zero_grad()


def test_a_copied_parameter_has_no_state() -> None:
    parameter = nn.Parameter(torch.ones(2))
    watch = GradientWatch(parameter)
    parameter.sum().backward()
    assert parameter.grad is not None
    watch.set_summed(parameter.grad)
    assert watch_of(parameter) is watch
    assert watch.state() is GradientState.SUM
    assert watch_of(copy.deepcopy(parameter)) is None
    parameter.grad = None
    assert watch.state() is GradientState.PART


def test_a_watch_keeps_neither_parameter_nor_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2))
    watch = GradientWatch(parameter)
    parameter.sum().backward()
    assert parameter.grad is not None
    watch.set_summed(parameter.grad)
    del parameter
    assert watch.state() is GradientState.PART
