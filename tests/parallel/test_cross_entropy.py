"""Vocabulary-parallel cross entropy against PyTorch's over the whole vocabulary, and closed-form values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from tests.parallel.cross_entropy_worker import (
    GROUPS,
    LANGUAGE_MODEL_SETTINGS,
    MANY,
    MEMORY_TOKENS,
    MEMORY_WIDTH,
    WORLD_SIZE,
    Answer,
    Problem,
    language_model_batch,
    problems,
    random_problem,
    run_on_many_ranks,
    run_on_rank,
    upstream,
)
from tests.processes import launched, of_ranks, result

pytestmark = pytest.mark.dist

GOLDEN_LOSSES = [1.7225477811, 1.4475644268, 0.0, 2.3065586008, 1.4136659254]
GOLDEN_GRADIENT = [0.0030398771, 0.0089949506, 0.0229812994, -0.2053473732]
NAMES = list(problems(2))
SIZES = [2, 3, 4, pytest.param(6, marks=pytest.mark.slow)]


few = launched(run_on_rank, WORLD_SIZE, 150)
many = launched(run_on_many_ranks, MANY, 200)


def answers(request: pytest.FixtureRequest, size: int, name: str) -> list[Answer]:
    """One group's answers in rank order; every group's must be the same."""
    folder = request.getfixturevalue("many" if size == MANY else "few")
    groups = [[result(folder, f"answers_{size}", rank)[name] for rank in ranks] for ranks in GROUPS[size]]
    for other in groups[1:]:
        for found, same in zip(other, groups[0], strict=True):
            assert torch.equal(found.gradient.nan_to_num(7.0), same.gradient.nan_to_num(7.0))
    return groups[0]


def reference(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient by PyTorch over the whole vocabulary, at least in fp32."""
    settings = dict(problem.settings)
    vocabulary = settings.pop("vocabulary_size", problem.logits.shape[-1])
    logits = problem.logits.to(torch.promote_types(problem.logits.dtype, torch.float32)).requires_grad_()
    flat = logits[..., :vocabulary].flatten(0, -2)
    loss = functional.cross_entropy(flat, problem.target.flatten(), **{"reduction": "none", **settings})
    loss = loss.view(problem.target.shape) if loss.dim() else loss
    loss.backward(upstream(loss))
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "not_finite"])
def test_loss_and_gradient_are_those_of_the_whole_vocabulary(
    name: str, size: int, request: pytest.FixtureRequest
) -> None:
    problem, found = problems(size)[name], answers(request, size, name)
    loss, gradient = reference(problem)
    tolerance = 1e-12 if problem.logits.dtype == torch.float64 else 2e-5
    whole = torch.cat([answer.gradient for answer in found], -1)
    for answer in found:
        assert answer.loss.dtype == torch.promote_types(problem.logits.dtype, torch.float32)
        assert torch.equal(answer.loss.nan_to_num(7.0), found[0].loss.nan_to_num(7.0))
        torch.testing.assert_close(answer.loss, loss, rtol=tolerance, atol=tolerance, equal_nan=True)
        assert answer.calls == (2, 0)
        assert not answer.was_changed
    assert whole.dtype == problem.logits.dtype
    if problem.logits.dtype == torch.bfloat16:  # the gradient is rounded once, at its end
        assert float((whole.float() - gradient).abs().max()) <= float(gradient.abs().max()) * 2**-8
    elif name != "none_left":
        torch.testing.assert_close(whole, gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", SIZES)
def test_closed_form_values(size: int, request: pytest.FixtureRequest) -> None:
    """Spec: golden case G2."""
    per_token = answers(request, size, "golden_per_token")[0].loss
    torch.testing.assert_close(
        per_token, torch.tensor(GOLDEN_LOSSES, dtype=torch.float64), rtol=0, atol=1e-10
    )
    found = answers(request, size, "golden")
    whole = torch.cat([answer.gradient for answer in found], -1)
    assert found[0].loss.item() == pytest.approx(1.7225841835156557, abs=1e-12)
    assert answers(request, size, "golden_sum")[0].loss.item() == pytest.approx(6.890336734062623, abs=1e-12)
    torch.testing.assert_close(
        whole[0, :4], torch.tensor(GOLDEN_GRADIENT, dtype=torch.float64), rtol=0, atol=1e-10
    )
    assert whole.norm().item() == pytest.approx(0.4476038819831916, abs=1e-12)
    assert whole[2].tolist() == [0.0] * 12
    smooth = answers(request, size, "golden_smooth")
    assert [answer.loss.item() for answer in smooth] == [pytest.approx(1.9271910591266388, abs=1e-12)] * size
    smooth_whole = torch.cat([answer.gradient for answer in smooth], -1)
    assert smooth_whole.norm().item() == pytest.approx(0.4026145535687905, abs=1e-12)


def test_megatrons_losses(request: pytest.FixtureRequest) -> None:
    """Spec: golden case T6; 32 ids per rank."""
    found = answers(request, 4, "flat")[0].loss
    expected = torch.tensor([10.2309, 8.2309, 6.2309, 4.2309]).repeat(4)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["mixed", "all_ignored", "bf16", "not_finite"])
def test_ignored_tokens_have_exactly_no_loss_and_no_gradient(
    name: str, size: int, request: pytest.FixtureRequest
) -> None:
    problem = problems(size)[name]
    ignored = problem.target == -100
    for answer in answers(request, size, name):
        assert answer.gradient[ignored].count_nonzero() == 0
        assert answer.gradient[~ignored].isfinite().all()
        if answer.loss.dim():
            assert answer.loss[ignored].count_nonzero() == 0


@pytest.mark.parametrize("name", LANGUAGE_MODEL_SETTINGS)
def test_language_model_loss_is_that_of_transformers(name: str, few: Path) -> None:
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    whole, labels = language_model_batch()
    logits = whole[..., :22].clone().requires_grad_()
    expected = loss_utils.ForCausalLMLoss(logits, labels, 22, **LANGUAGE_MODEL_SETTINGS[name])
    expected.backward()
    assert logits.grad is not None
    found = [of_rank[name] for of_rank in of_ranks(few, "language_model")]
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
    gradient = torch.cat([of_rank for _, of_rank in found], -1)
    torch.testing.assert_close(gradient[..., :22], logits.grad, rtol=1e-5, atol=1e-7)
    assert gradient[..., 22:].count_nonzero() == 0


def test_log_probabilities(few: Path) -> None:
    """Spec: golden case T7."""
    problem = random_problem(6, (2, 8), 16 * WORLD_SIZE)
    logits = problem.logits.clone().requires_grad_()
    expected = functional.log_softmax(logits, -1)[:, :-1].gather(-1, problem.target[:, 1:, None])[..., 0]
    expected.sum().backward()
    assert logits.grad is not None
    found = of_ranks(few, "log_probabilities")
    for of_rank in found:
        assert of_rank["inference"].shape == (2, 7)
        torch.testing.assert_close(of_rank["inference"], expected.detach(), rtol=0, atol=1e-5)
        assert torch.equal(of_rank["training"], of_rank["inference"])
    gradient = torch.cat([of_rank["gradient"] for of_rank in found], -1)
    torch.testing.assert_close(gradient, logits.grad, rtol=0, atol=1e-6)


def test_memory(few: Path) -> None:
    """One fp32 buffer of the shard in forward and in backward, and two numbers per token between them."""
    shard_bytes, per_token_bytes = MEMORY_TOKENS * MEMORY_WIDTH * 4, MEMORY_TOKENS * 4
    for found in of_ranks(few, "memory"):
        for name, gradient_bytes in (("fp32", 0), ("bf16", shard_bytes // 2)):
            of_dtype = found[name]
            assert shard_bytes <= of_dtype["forward"] < shard_bytes + 32 * per_token_bytes
            backward_bytes = shard_bytes + gradient_bytes
            assert backward_bytes <= of_dtype["backward"] < backward_bytes + 32 * per_token_bytes
            assert (
                of_dtype["saved"] == 2 * per_token_bytes + MEMORY_TOKENS * 8 + 8
            )  # and targets, their count


def test_rejections(few: Path) -> None:
    for found in of_ranks(few, "rejections"):
        assert found["shape"] == "ValueError: logits [5, 6] are for targets [5], found [4]"
        assert found["reduction"] == "ValueError: reduction: expected one of none, mean, sum, found 'avg'"
        assert found["smoothing"] == "ValueError: label_smoothing: expected a number from 0 to 1, found 1.5"
        assert "expected at most 2 x 6" in found["large"]
        assert "hold the whole vocabulary of 6; expected the part of one of 2 ranks" in found["whole"]
        assert found["target"] == "ValueError: target: expected ids from 0 to 11, found 12"
        assert found["padding"] == "ValueError: target: expected ids from 0 to 10, found 11"
        assert found["no_group"].startswith("RuntimeError: no tensor-parallel group")
        assert found["no_labels"] == "ValueError: expected labels or shift_labels, found neither"


def test_fake_tensors_meet_nobody(few: Path) -> None:
    assert of_ranks(few, "fake") == [([5], [5, 6])] * WORLD_SIZE
