"""Lightning's callback: a plan is on the model while ``Trainer.fit`` trains.

Only those who use Lightning import this: ``from hf_actswap.integrations.lightning import ActSwap``.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..apply import apply
from ..engine import AppliedPlan
from ..errors import PlanError, Problem, short_traceback
from ..plan import ConfigOrPlan
from ..planner import Planner
from .accelerate_loop import optimizer_of

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the same under its other name on the index
    from pytorch_lightning import Callback, LightningModule, Trainer


class ActSwap(Callback):
    """Puts a configuration or plan on the transformers model of a `LightningModule` while it trains.

    It is put on when training starts: the strategy has wrapped and moved the model, and a checkpoint is
    loaded. It is taken off when training ends or fails. Checkpoints have the same names with it and without.

    Args:
        config: ``"auto"``, a plan, or whatever else `hf_actswap.apply` takes.
        attribute: the model's name in the module (``"student"``, ``"policy.model"``); by default the one
            transformers model in it.

    Attributes:
        applied: the plan on the model, or the planner that changes it; ``None`` before training.

    Raises:
        ConfigError, PlanError: as `hf_actswap.apply`, when training starts; also where the model to use is
            not clear.
    """

    def __init__(self, config: ConfigOrPlan = "auto", attribute: str | None = None) -> None:
        self.config, self.attribute = config, attribute
        self.applied: AppliedPlan | Planner | None = None

    @short_traceback
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = self._model(pl_module)
        self.applied = apply(model, self.config, optimizer=optimizer_of(model, trainer.optimizers))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    def _remove(self) -> None:
        if self.applied is not None:
            self.applied.remove()

    def _model(self, module: LightningModule) -> nn.Module:
        names = list(_models_in(module, "")) if self.attribute is None else [self.attribute]
        if len(names) != 1:
            listed = ", ".join(names) or "none"
            hint = 'Name it: ActSwap(config, attribute="student").' if names else ""
            raise PlanError([Problem("attribute", "one transformers model in the module", listed, hint)])
        return module.get_submodule(names[0])


def _models_in(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the names of the outermost modules with a configuration of transformers."""
    for name, child in module.named_children():
        if isinstance(getattr(getattr(child, "config", None), "model_type", None), str):
            yield prefix + name
        else:
            yield from _models_in(child, f"{prefix}{name}.")
