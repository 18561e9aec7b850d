"""The planner beside ``torch_compile``: regions and the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import Trainer

from hf_actswap import PlanError

from .conftest import grad_norms, losses, tiny_llama
from .test_planner_training import Blocks, Watch, hooks_of, planned

Make = Callable[..., Trainer]
COMPILE = {"torch_compile": True, "torch_compile_backend": "aot_eager", "per_device_train_batch_size": 4}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not _get_current_dispatch_mode_stack()


def test_a_model_compiled_whole_is_rejected(make_trainer: Make) -> None:
    trainer = make_trainer(planned(), model=tiny_llama(), data=Blocks(), **COMPILE)
    with pytest.raises(PlanError, match=r"a model compiled whole.*regional compilation") as rejected:
        trainer.train()
    assert "memory.mode" in str(rejected.value)
    assert trainer.state.global_step == 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["smart_swap", "adaptive"])
def test_same_digits_by_regions(make_trainer: Make, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "True")
    settings: dict[str, Any] = {**COMPILE, "max_steps": 8, "eval_strategy": "steps", "eval_steps": 3}
    plain = make_trainer(None, callback=False, model=tiny_llama(), data=Blocks(), **settings)
    plain.train()
    torch._dynamo.reset()
    trainer = make_trainer(planned(mode, share=0.6), model=tiny_llama(), data=Blocks(), **settings)
    watch = Watch(trainer)
    trainer.train()
    assert watch.phases[-1] == "stable"
    assert losses(trainer) == losses(plain)
    assert grad_norms(trainer) == grad_norms(plain)
    for ours, theirs in ((trainer.model, plain.model), (trainer.model_wrapped, plain.model_wrapped)):
        assert hooks_of(ours).keys() == hooks_of(theirs).keys()
        for name, found in hooks_of(ours).items():
            assert found[:4] == hooks_of(theirs)[name][:4], name
