"""Memory runs out in the stable stage: the forward, or the micro-batch, is run again under the guard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_actswap import apply
from tests.engine.tiny_models import tiny_llama, tiny_neox
from tests.planner.simulated_device import on_device, train

GIB = 2**30
BAD_STEP, STEPS = 5, 8
BATCH = (4, 64)
FULL = "CUDA out of memory. Tried to allocate 20.00 KiB. (a test)"


class FillsUp:
    """Raises once what a full device raises, in the forward of a module or in the backward behind it."""

    def __init__(self, module: nn.Module, where: str) -> None:
        self._where = where
        self._handle = module.register_forward_hook(self._forward)

    def _forward(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        self._handle.remove()
        if self._where == "forward":
            raise torch.OutOfMemoryError(FULL)
        output.register_hook(self._backward)

    def _backward(self, _gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError(FULL)


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    guarded: list[bool] = field(default_factory=list)
    problem: str = ""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def run(
    build: Callable[[], Any] = tiny_llama,
    where: str | None = None,
    *,
    micro_batches: int = 1,
    bad_micro_batch: int = 0,
    within: bool = True,
    device_share: float | None = None,
    prepare: Callable[[Any], None] = lambda _: None,
) -> Trained:
    """Train under the planner.

    Args:
        where: memory runs out in `BAD_STEP`.
        within: whether micro-batches run in `Planner.micro_batch`.
        device_share: of the peak, what the device has from `BAD_STEP` on.
        prepare: changes the model.
    """
    peak = train(build, steps=2, shape=BATCH).peak_bytes
    torch.manual_seed(0)
    model = build().train()
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, found = torch.Generator().manual_seed(0), Trained()

    def step(ids: torch.Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    with on_device(model) as device:
        memory = {"mode": "adaptive", "budget_gib": 0.9 * peak / GIB, "search_steps": 2}
        planner: Any = apply(model, {"memory": memory}, optimizer=optimizer, meter=device)
        try:
            for number in range(STEPS):
                found.phases.append(planner.phase)
                if number == BAD_STEP and device_share is not None:
                    device.limit = int(device_share * peak)
                for micro_batch in range(micro_batches):
                    ids = torch.randint(0, 64, BATCH, generator=generator)
                    if where is not None and (number, micro_batch) == (BAD_STEP, bad_micro_batch):
                        FillsUp(model.get_submodule(MIDDLE[build]), where)
                    batch = (lambda ids=ids: step(ids)) if within else None
                    found.losses.append(step(ids) if batch is None else planner.micro_batch(batch))
                found.guarded.append(len(_get_current_dispatch_mode_stack()) > 1)
                optimizer.step()
                optimizer.zero_grad()
        except torch.OutOfMemoryError as error:
            found.problem = str(error)
        finally:
            planner.remove()
    found.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    assert "_call_impl" not in vars(model)
    return found


MIDDLE = {tiny_llama: "model.layers.2.mlp.up_proj", tiny_neox: "gpt_neox.layers.2.mlp.dense_h_to_4h"}


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert not _get_current_dispatch_mode_stack()


def assert_survived(found: Trained, expected: Trained) -> None:
    assert found.problem == ""
    assert found.losses == expected.losses
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())
    assert found.phases[BAD_STEP] == "stable"
    assert found.guarded[BAD_STEP - 1 : BAD_STEP + 1] == [False, True]
    assert found.phases[BAD_STEP + 1] == "warm-up"  # planned anew


@pytest.fixture(scope="module")
def with_dropout() -> Trained:
    return run(tiny_neox)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_same_numbers_come_out(where: str, with_dropout: Trained) -> None:
    assert_survived(run(tiny_neox, where), with_dropout)


@pytest.mark.slow
def test_a_forward_has_a_retry_in_any_loop(with_dropout: Trained) -> None:
    assert_survived(run(tiny_neox, "forward", within=False), with_dropout)
    assert run(tiny_neox, "backward", within=False).problem == FULL


@pytest.mark.slow
def test_a_device_that_shrinks() -> None:
    expected = run()
    found = run(device_share=0.75)
    assert_survived(found, expected)
    assert found.phases[-1] == "search"


@pytest.mark.slow
def test_later_micro_batches() -> None:
    expected = run(micro_batches=2)
    assert_survived(run(where="forward", micro_batches=2, bad_micro_batch=1), expected)
    rejected = run(where="backward", micro_batches=2, bad_micro_batch=1)
    assert "cannot be run again: gradients of earlier micro-batches are there" in rejected.problem
    assert FULL in rejected.problem


@pytest.mark.slow
def test_what_has_been_written_is_not_written_twice() -> None:
    def counts(model: Any) -> None:
        model.register_buffer("calls", torch.zeros(()))

        def count(*_: Any) -> None:
            model.calls.add_(1)

        model.model.layers[0].register_forward_pre_hook(count)

    assert "it has changed a buffer or an input" in run(where="forward", prepare=counts).problem
