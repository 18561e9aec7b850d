"""Memory runs out under a plan, where nothing runs it again: the error, or the log, says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_actswap import apply
from hf_actswap.errors import ActSwapError
from hf_actswap.planner.oom_guard import DeviceMemoryError
from tests.engine.tiny_models import tiny_llama
from tests.planner.test_retry import FULL, MIDDLE, FillsUp

SWAP = {"swap_config": {"swap": True, "layer_swap": [{"layers": True, "backward_prefetch": 1}]}}
IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def filled_up(config: dict[str, Any], where: str) -> RuntimeError:
    """Return the error of a step of one's own in which memory runs out."""
    model = tiny_llama()
    with apply(model, config):
        model(input_ids=IDS, labels=IDS).loss.backward()
        FillsUp(model.get_submodule(MIDDLE[tiny_llama]), where)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model(input_ids=IDS, labels=IDS).loss.backward()
    assert "_call_impl" not in vars(model)
    return caught.value


def test_a_call_of_the_model_names_the_plan_and_what_to_do() -> None:
    error = filled_up(SWAP, "forward")
    assert isinstance(error, DeviceMemoryError)
    assert "layers 0-3: swap everything" in str(error)
    assert "memory: {mode: smart_swap}" in str(error)
    assert str(error).endswith(f"({FULL})")
    assert type(error.__cause__) is torch.OutOfMemoryError  # its traceback is where memory ran out


def test_a_call_without_gradients_does_too() -> None:
    model = tiny_llama()
    with apply(model, SWAP), torch.no_grad():
        FillsUp(model.get_submodule(MIDDLE[tiny_llama]), "forward")
        with pytest.raises(DeviceMemoryError):
            model(input_ids=IDS)


def test_pytorchs_error_stays_in_a_backward_of_ones_own() -> None:
    assert not isinstance(filled_up(SWAP, "backward"), ActSwapError)


def test_pytorchs_error_stays_under_a_plan_that_keeps_everything() -> None:
    assert not isinstance(filled_up({}, "forward"), ActSwapError)


def test_other_errors_stay_as_they_are() -> None:
    model = tiny_llama()

    def fails(*_: Any) -> None:
        raise RuntimeError("size mismatch")

    with apply(model, SWAP):
        model.model.norm.register_forward_hook(fails)
        with pytest.raises(RuntimeError, match=r"^size mismatch$"):
            model(input_ids=IDS, labels=IDS)
