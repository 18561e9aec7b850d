"""Vocabulary-parallel cross entropy against PyTorch's over the whole vocabulary, and closed-form values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from hf_actswap.parallel import tensor_parallel_group
from hf_actswap.parallel.vocabulary import (
    from_parallel_logits_to_logprobs,
    parallel_causal_lm_loss,
    parallel_cross_entropy,
)
from hf_actswap.planner import CountingMeter
from tests.parallel.collective_calls import noted
from tests.processes import launched, of_ranks, result, run_cases

WORLD_SIZE, MANY = 4, 6
GROUPS = {2: [[0, 1], [2, 3]], 3: [[0, 1, 2]], 4: [[0, 1, 2, 3]], 6: [[0, 1, 2, 3, 4, 5]]}
GOLDEN_VOCABULARY = 12


@dataclass(frozen=True)
class Problem:
    """Whole logits ``[.., V]`` and targets, with what is asked of the loss."""

    logits: torch.Tensor
    target: torch.Tensor
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """What one rank got.

    Args:
        gradient: of its own part of the logits, ``[.., V / tp]``.
        calls: collectives, as ``<part> <kind>``.
    """

    loss: torch.Tensor
    gradient: torch.Tensor
    calls: Counter[str]
    was_changed: bool


def golden() -> tuple[torch.Tensor, torch.Tensor]:
    """The closed-form case of five tokens and twelve ids, in fp64; the third token is ignored."""
    logits = 3 * torch.sin(0.37 * torch.arange(5 * GOLDEN_VOCABULARY, dtype=torch.float64)).view(5, -1)
    target = (7 * torch.arange(5) + 3) % GOLDEN_VOCABULARY
    target[2] = -100
    return logits, target


def random_problem(seed: int, tokens: tuple[int, ...], vocabulary: int, scale: float = 1.0) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*tokens, vocabulary, generator=generator) * scale
    return Problem(logits, torch.randint(0, vocabulary, tokens, generator=generator))


def problems(size: int) -> dict[str, Problem]:
    """Every case with logits that a group of this size can split."""
    logits, target = golden()
    some, large = random_problem(1, (8, 12), 60), random_problem(2, (13, 17), 11 * size, 1000.0)
    mixed = some.target.clone()
    mixed[::3] = -100
    found = {
        "golden": Problem(logits, target, {"reduction": "mean"}),
        "golden_sum": Problem(logits, target, {"reduction": "sum"}),
        "golden_per_token": Problem(logits, target),
        "golden_fp32": Problem(logits.float(), target, {"reduction": "mean"}),
        "golden_smooth": Problem(logits, target, {"reduction": "mean", "label_smoothing": 0.1}),
        "large": large,
        "flat": Problem(torch.arange(8.0).repeat(16, 4 * size), torch.arange(0, 32, 2)),
        "mixed": Problem(some.logits, mixed, {"label_smoothing": 0.3, "reduction": "mean"}),
        "other_ignored": Problem(some.logits, some.target, {"ignore_index": int(some.target[0, 0])}),
        "all_ignored": Problem(some.logits, torch.full_like(some.target, -100), {"reduction": "sum"}),
        "none_left": Problem(some.logits, torch.full_like(some.target, -100), {"reduction": "mean"}),
        "bf16": Problem(some.logits.bfloat16(), mixed, {"reduction": "mean"}),
        "not_finite": Problem(torch.where(mixed[..., None] == -100, torch.nan, some.logits), mixed),
    }
    for vocabulary in (11, 7):  # of 12 ids; in a group of 4 or 6 some ranks hold none that counts
        padded = random_problem(vocabulary, (6,), GOLDEN_VOCABULARY)
        settings = {"vocabulary_size": vocabulary, "label_smoothing": 0.2}
        found[f"padded_{vocabulary}"] = Problem(padded.logits, padded.target % vocabulary, settings)
    return found


def answer(problem: Problem, group: dist.ProcessGroup) -> Answer:
    """The loss and its gradient on this rank; the upstream gradient differs from token to token."""
    given = own_columns(problem.logits, group).requires_grad_()
    before = given.detach().clone()
    calls = Counter[str]()
    with noted(lambda part, kind, _: calls.update([f"{part} {kind}"])) as begin:
        loss = parallel_cross_entropy(given, problem.target, process_group=group, **problem.settings)
        begin("backward")
        loss.backward(upstream(loss))
    assert given.grad is not None
    changed = not torch.equal(given.detach().nan_to_num(7.0), before.nan_to_num(7.0))
    return Answer(loss.detach(), given.grad, calls, changed)


def upstream(loss: torch.Tensor) -> torch.Tensor:
    return (
        torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)
        if loss.dim()
        else 1 + 0 * loss
    )


def own_columns(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return whole.chunk(group.size(), -1)[group.rank()].clone()


def answers_of_rank(group: dist.ProcessGroup) -> dict[str, Answer]:
    return {name: answer(problem, group) for name, problem in problems(group.size()).items()}


def language_model_batch() -> tuple[torch.Tensor, torch.Tensor]:
    problem = random_problem(5, (3, 9), 24)
    labels = problem.target.clone() % 22
    labels[0, :4], labels[2, 6:] = -100, -100
    return problem.logits, labels


LANGUAGE_MODEL_SETTINGS: dict[str, dict[str, Any]] = {
    "mean": {},
    "count": {"num_items_in_batch": 7},
    "count_tensor": {"num_items_in_batch": torch.tensor(7)},
    "ignore_3": {"ignore_index": 3, "shift_labels": language_model_batch()[1].clamp(min=0)},
    "shifted": {"shift_labels": language_model_batch()[1].roll(1)},
    "shifted_flat": {"shift_labels": language_model_batch()[1].roll(1).view(-1)},
    "unknown": {"use_cache": False, "output_attentions": None},
}


def language_model_losses(group: dist.ProcessGroup) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    whole, labels = language_model_batch()
    found = {}
    for name, settings in LANGUAGE_MODEL_SETTINGS.items():
        logits = own_columns(whole, group).requires_grad_()
        with tensor_parallel_group(group):
            loss = parallel_causal_lm_loss(logits=logits, labels=labels, vocab_size=22, **settings)
        loss.backward()
        assert logits.grad is not None
        found[name] = loss.detach(), logits.grad
    return found


def log_probabilities(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    problem = random_problem(6, (2, 8), 16 * group.size())
    logits = own_columns(problem.logits, group).requires_grad_()
    found = from_parallel_logits_to_logprobs(logits, problem.target, process_group=group)
    assert not found.requires_grad
    trained = from_parallel_logits_to_logprobs(logits, problem.target, inference=False, process_group=group)
    trained.sum().backward()
    assert logits.grad is not None
    return {"inference": found, "training": trained.detach(), "gradient": logits.grad}


MEMORY_TOKENS, MEMORY_WIDTH = 64, 1024


def memory(group: dist.ProcessGroup) -> dict[str, dict[str, int]]:
    """Peak and saved bytes, logits not counted; 64 tokens, 1,024 columns per rank."""
    found: dict[str, dict[str, int]] = {}
    target = torch.arange(MEMORY_TOKENS) * 31 % (MEMORY_WIDTH * group.size())
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        logits = torch.randn(MEMORY_TOKENS, MEMORY_WIDTH).to(dtype).requires_grad_()
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            CountingMeter() as forward,
        ):
            loss = parallel_cross_entropy(logits, target, reduction="mean", process_group=group)
        saved.pop(logits.untyped_storage().data_ptr())
        with CountingMeter() as backward:
            loss.backward()
        found[name] = {
            "forward": forward.peak_bytes(),
            "backward": backward.peak_bytes(),
            "saved": sum(saved.values()),
        }
    return found


def rejections(group: dist.ProcessGroup) -> dict[str, str]:
    logits, target = torch.zeros(5, 6), torch.zeros(5, dtype=torch.long)
    wrong: dict[str, Callable[[], object]] = {
        "shape": lambda: parallel_cross_entropy(logits, target[:4], process_group=group),
        "reduction": lambda: parallel_cross_entropy(logits, target, reduction="avg", process_group=group),
        "smoothing": lambda: parallel_cross_entropy(logits, target, 1.5, process_group=group),
        "large": lambda: parallel_cross_entropy(logits, target, process_group=group, vocabulary_size=13),
        "whole": lambda: parallel_cross_entropy(logits, target, process_group=group, vocabulary_size=6),
        "target": lambda: parallel_cross_entropy(logits, target + 12, process_group=group),
        "padding": lambda: parallel_cross_entropy(
            logits, target + 11, process_group=group, vocabulary_size=11
        ),
        "no_group": lambda: parallel_cross_entropy(logits, target),
        "no_labels": lambda: parallel_causal_lm_loss(logits, None, 12, process_group=group),
    }
    found = {}
    for name, call in wrong.items():
        try:
            call()
            found[name] = "nothing was raised"
        except (ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def fake(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Shapes of a loss and gradient without data, on one rank only: the others are not waited for."""
    if group.rank():
        return [5], [5, 6]
    with FakeTensorMode():
        logits = torch.empty(5, 6, requires_grad=True)
        loss = parallel_cross_entropy(logits, torch.empty(5, dtype=torch.long), process_group=group)
        loss.sum().backward()
    return list(loss.shape), list(logits.grad.shape)


CASES = {
    **{f"answers_{size}": answers_of_rank for size in (2, 3, 4)},
    "language_model": language_model_losses,
    "log_probabilities": log_probabilities,
    "memory": memory,
    "rejections": rejections,
    "fake": fake,
}
CASE_GROUPS = {
    **{f"answers_{size}": GROUPS[size] for size in (2, 3, 4)},
    "language_model": GROUPS[4],
    "log_probabilities": GROUPS[4],
    "memory": GROUPS[2],
    "rejections": GROUPS[2],
    "fake": GROUPS[4],
}


def run_on_rank(rank: int, folder: str) -> None:
    run_cases(rank, folder, WORLD_SIZE, CASES, CASE_GROUPS)


def run_on_many_ranks(rank: int, folder: str) -> None:
    run_cases(rank, folder, MANY, {"answers_6": answers_of_rank}, {"answers_6": GROUPS[6]})


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
        assert answer.calls == {"forward all_reduce": 2}
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
