"""On the rehearsal's device (`make rehearse`): the library is right in all orders of copies, and each of the
deliberate faults of `mutations` is found."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from hf_actswap.rehearsal import RehearsedDevice
from tests.rehearsal.mutations import MUTATIONS, Mutation
from tests.rehearsal.trainings import TRAININGS

pytestmark = pytest.mark.rehearsal
SEEDS = {
    **dict.fromkeys(("swapped", "mixed", "tiles", "stream", "optimizer states", "passes"), 50),
    **dict.fromkeys(("frozen weights", "frozen weights, swapped", "frozen weights, recomputed"), 20),
    **dict.fromkeys(("smart_swap", "adaptive", "planned with states"), 20),  # of seconds each
}
AT_ONCE = 10
IN_RANDOM_ORDERS = [(name, first) for name, seeds in SEEDS.items() for first in range(0, seeds, AT_ONCE)]


@pytest.fixture
def rehearsal() -> Iterator[RehearsedDevice]:
    found = RehearsedDevice.found()
    assert found is not None
    assert found.settings["level"] == "2", "these tests compare values: --arithmetic all"
    found.choose_order("eager")
    found.clear_races()
    yield found
    gc.collect()
    found.forget_registered()  # faults lose memory
    found.choose_order("lazy")
    found.clear_races()


def faults(device: RehearsedDevice, training: str) -> list[str]:
    """Run a piece of training; return what is wrong with it."""
    gc.collect()
    torch.accelerator.empty_cache()  # freed blocks are few then, and are taken again soon
    try:
        values = TRAININGS[training]()
        gc.collect()
        torch.accelerator.synchronize()
    except RuntimeError as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        races = device.races()
        device.clear_races()
    return [*(["wrong values"] if values else []), *races]


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
def test_all_is_right(training: str, order: str, rehearsal: RehearsedDevice) -> None:
    assert faults(rehearsal, training) == [], "while expected values are computed"
    rehearsal.choose_order(order, 1)
    assert faults(rehearsal, training) == []


@pytest.mark.parametrize(("training", "first_seed"), IN_RANDOM_ORDERS)
def test_a_short_training_is_right_in_random_orders(
    training: str, first_seed: int, rehearsal: RehearsedDevice
) -> None:
    assert faults(rehearsal, training) == []
    for seed in range(first_seed, first_seed + AT_ONCE):
        rehearsal.choose_order("random", seed)
        assert faults(rehearsal, training) == [], f"seed {seed}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.name for mutation in MUTATIONS])
def test_a_fault_is_found(mutation: Mutation, rehearsal: RehearsedDevice) -> None:
    assert faults(rehearsal, mutation.training) == [], "the library itself is right"
    rehearsal.choose_order("lazy")
    with mutation.in_place():
        found = faults(rehearsal, mutation.training)
        gc.collect()
    torch.accelerator.synchronize()
    assert found, "nobody has noticed"
