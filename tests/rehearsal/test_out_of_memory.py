"""On the rehearsal's device (`make rehearse`): a training with less memory than it needs.

It ends with the values that it has with enough, or with an error that says what is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from hf_actswap import apply
from hf_actswap.errors import ActSwapError
from hf_actswap.planner import OomGuard
from hf_actswap.planner.oom_guard import DeviceMemoryError
from hf_actswap.rehearsal import RehearsedDevice
from hf_actswap.rehearsal.launch import Order
from tests.engine.gpu_stress import SEGMENT_BYTES
from tests.engine.tiny_models import tiny_llama
from tests.rehearsal.short_memory import MODES, Ended, at_most, trained
from tests.rehearsal.trainings import device

pytestmark = pytest.mark.rehearsal
SHARES: dict[float, Order] = {0.9: "eager", 0.8: "lazy", 0.5: "lazy", 0.3: "random"}
"""Share of the memory that the training takes without a plan, and the order of copies."""
SURVIVED, LITTLE = 0.8, 0.5
"""With the first share each mode survives; with the second it takes a guard, or a plan by hand, to begin."""

SAID = "Device memory ran out under a plan, outside of the model's call"


@pytest.fixture
def rehearsal() -> Iterator[RehearsedDevice]:
    found = RehearsedDevice.found()
    assert found is not None
    assert found.settings["level"] == "2", "these tests compare values: --arithmetic all"
    found.clear_races()
    yield found
    found.choose_order("lazy")
    found.clear_races()


@cache
def with_enough(mode: str | None) -> Ended:
    found = trained(mode)
    assert found.error is None
    return found


def same_values(found: Ended, expected: Ended) -> bool:
    return len(found.values) == len(expected.values) > 0 and all(
        torch.equal(*pair) for pair in zip(found.values, expected.values, strict=True)
    )


@pytest.mark.parametrize(
    ("mode", "share"),
    [
        *((mode, share) for mode in ("smart_swap", "adaptive", "tiles") for share in SHARES),
        *(("stream", share) for share in SHARES if share >= LITTLE),  # below, the optimizer itself runs out
    ],
)
def test_it_survives_or_says_what_it_needs(mode: str, share: float, rehearsal: RehearsedDevice) -> None:
    # Sums in tiles and chunks have another order: with enough memory too.
    expected = with_enough(mode if mode in ("tiles", "stream") else None)
    limit_bytes = share * with_enough(None).most_bytes
    rehearsal.choose_order(SHARES[share], 1)
    with at_most(limit_bytes):
        found = trained(mode)
    assert rehearsal.races() == []
    assert found.most_bytes <= limit_bytes + SEGMENT_BYTES  # which the allocator takes whole
    if share >= SURVIVED:
        assert found.error is None
    if found.error is None:
        assert same_values(found, expected)
    else:
        assert isinstance(found.error, ActSwapError)


def test_an_error_of_the_guard_is_also_pytorchs(rehearsal: RehearsedDevice) -> None:
    with at_most(min(SHARES) * with_enough(None).most_bytes):
        found = trained("adaptive")
    assert isinstance(found.error, DeviceMemoryError)
    assert isinstance(found.error, torch.OutOfMemoryError)


def test_a_plan_by_hand_has_the_values_too_where_it_fits(rehearsal: RehearsedDevice) -> None:
    plain = with_enough(None)
    with at_most(LITTLE * plain.most_bytes):
        assert isinstance(trained(None).error, torch.OutOfMemoryError)
        found = trained("swap")
    assert found.error is None
    assert same_values(found, plain)


def test_without_the_guard_the_first_step_fails(
    rehearsal: RehearsedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OomGuard, "start", lambda _: None)
    with at_most(LITTLE * with_enough(None).most_bytes):
        found = trained("adaptive")
    assert isinstance(found.error, torch.OutOfMemoryError)


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
@pytest.mark.parametrize("mode", ["swap", "stream"])
def test_with_far_too_little_an_error_or_a_line_says_what_to_do(
    mode: str, order: Order, rehearsal: RehearsedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    limit_bytes = min(SHARES) * with_enough(None).most_bytes
    rehearsal.choose_order(order, 1)
    with at_most(limit_bytes):
        found = trained(mode)
    assert isinstance(found.error, torch.OutOfMemoryError)
    assert isinstance(found.error, DeviceMemoryError) or SAID in caplog.text


@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_a_line_says_what_to_do_where_the_error_is_pytorchs(
    where: str, rehearsal: RehearsedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        torch.empty(2**50, dtype=torch.uint8, device=device())

    model = tiny_llama().to(device())
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(1, 8, dtype=torch.long, device=device())
    with apply(model, dict(MODES["swap"])):
        loss = model(input_ids=ids, labels=ids).loss
        if where == "backward":
            loss.register_hook(full)
            fails = loss.backward
        else:
            loss.backward()
            optimizer.register_step_pre_hook(full)
            fails = optimizer.step
        with pytest.raises(torch.OutOfMemoryError) as caught:
            fails()
        assert not isinstance(caught.value, ActSwapError)
        assert "layers 0-3: swap everything" in caplog.text
        assert caplog.text.count(SAID) == 1
    with pytest.raises(torch.OutOfMemoryError):
        full()
    assert caplog.text.count(SAID) == 1  # not after the plan has gone


def test_no_line_where_the_guard_or_an_error_says_it(
    rehearsal: RehearsedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    limit_bytes = LITTLE * with_enough(None).most_bytes + SEGMENT_BYTES  # of a page it may use a part alone
    with at_most(limit_bytes):
        assert trained("adaptive").error is None
    model = tiny_llama().to(device())
    model.model.norm.register_forward_hook(lambda *_: torch.empty(2**50, device=device()))
    with apply(model, dict(MODES["swap"])), pytest.raises(DeviceMemoryError):
        model(input_ids=torch.zeros(1, 8, dtype=torch.long, device=device()))
    assert SAID not in caplog.text
