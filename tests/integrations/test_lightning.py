"""A plan under Lightning's Trainer, by its callback."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from hf_actswap import PlanError
from hf_actswap.engine import AppliedPlan
from hf_actswap.integrations.lightning import ActSwap
from tests.engine.tiny_models import tiny_llama

SWAP = {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]}}
LAYERS = {"recompute_config": {"recompute": True}}


class Module(L.LightningModule):
    """A causal language model, called as most modules call theirs, with a metric in validation."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.losses, self.fails_at = tiny_llama(), list[float](), fails_at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fails_at:
            raise ValueError("a batch that cannot be read")
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("validation_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(module: L.LightningModule, *callbacks: L.Callback, **arguments: Any) -> None:
    given = {"max_steps": 4, "accelerator": "cpu", "devices": 1, "precision": "bf16-mixed"} | arguments
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    ids = torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(ids, batch_size=2)
    L.Trainer(callbacks=list(callbacks), **(quiet | given)).fit(module, loader, loader)


@pytest.fixture(scope="module")
def plain() -> Module:
    module = Module()
    fit(module, accumulate_grad_batches=2)
    return module


@pytest.mark.parametrize(
    "config",
    [SWAP, LAYERS, {"memory": {"mode": "adaptive", "budget_gib": 0.05}}],
    ids=["swap", "recompute", "adaptive"],
)
def test_a_training_with_a_plan_is_the_same_to_the_bit(config: dict[str, Any], plain: Module) -> None:
    module, callback = Module(), ActSwap(config)
    names = set(module.state_dict())
    fit(module, callback, accumulate_grad_batches=2, val_check_interval=2)
    assert module.losses == plain.losses
    assert all(map(torch.equal, module.state_dict().values(), plain.state_dict().values()))
    assert set(module.state_dict()) == names
    assert callback.applied is not None
    if isinstance(callback.applied, AppliedPlan):
        counted = callback.applied.stats()
        assert (counted.offloaded_bytes > 0, counted.recomputes > 0) == (config is SWAP, config is LAYERS)
    else:
        assert callback.applied.phase == "stable"


def test_the_plan_is_taken_off_when_a_step_fails() -> None:
    module, callback = Module(fails_at=2), ActSwap(SWAP)
    hooks = [len(item._forward_hooks) for item in module.modules()]
    with pytest.raises(ValueError, match="cannot be read"):
        fit(module, callback)
    assert callback.applied is not None
    assert callback.applied.stats().forwards == 2
    assert [len(item._forward_hooks) for item in module.modules()] == hooks


class Distilled(Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.ModuleDict({"inner": tiny_llama().requires_grad_(False)})


def test_of_two_models_one_is_named() -> None:
    with pytest.raises(PlanError, match=r"model, teacher\.inner[\s\S]*attribute=") as raised:
        fit(Distilled(), ActSwap(SWAP))
    assert "one transformers model in the module" in str(raised.value)
    callback = ActSwap(SWAP, attribute="model")
    fit(Distilled(), callback)
    assert callback.applied is not None
    assert callback.applied.stats().offloaded_bytes > 0


def test_a_planner_needs_the_optimizer_of_the_model() -> None:
    class Two(Module):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            halves = list(self.model.parameters())[::2], list(self.model.parameters())[1::2]
            return [torch.optim.SGD(half, lr=0.1) for half in halves]

    with pytest.raises(PlanError, match="the optimizer, whose step ends a training step"):
        fit(Two(), ActSwap({"memory": {"mode": "adaptive"}}))
