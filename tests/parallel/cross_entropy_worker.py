"""What each process of the cross-entropy tests runs; a module of its own, because it is started afresh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_actswap.parallel import tensor_parallel_group
from hf_actswap.parallel.vocabulary import (
    from_parallel_logits_to_logprobs,
    parallel_causal_lm_loss,
    parallel_cross_entropy,
)
from hf_actswap.planner import CountingMeter
from tests.processes import run_cases

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
        calls: all-reduces in forward and in backward.
    """

    loss: torch.Tensor
    gradient: torch.Tensor
    calls: tuple[int, int]
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
    calls, all_reduce = [0, 0], dist.all_reduce
    part = 0

    def counting(*arguments: Any, **settings: Any) -> Any:
        calls[part] += 1
        return all_reduce(*arguments, **settings)

    dist.all_reduce = counting
    try:
        loss = parallel_cross_entropy(given, problem.target, process_group=group, **problem.settings)
        part = 1
        loss.backward(upstream(loss))
    finally:
        dist.all_reduce = all_reduce
    assert given.grad is not None
    changed = not torch.equal(given.detach().nan_to_num(7.0), before.nan_to_num(7.0))
    return Answer(loss.detach(), given.grad, (calls[0], calls[1]), changed)


def upstream(loss: torch.Tensor) -> torch.Tensor:
    return (
        torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)
        if loss.dim()
        else 1 + 0 * loss
    )


def own_columns(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return whole.chunk(group.size(), -1)[group.rank()].clone()


def answers(group: dist.ProcessGroup) -> dict[str, Answer]:
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
    **{f"answers_{size}": answers for size in (2, 3, 4)},
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
    run_cases(rank, folder, MANY, {"answers_6": answers}, {"answers_6": GROUPS[6]})
