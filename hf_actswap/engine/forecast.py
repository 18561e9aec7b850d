"""Finds out what the forward that is about to start will save, by one run on fake tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..plan.actions import MemoryPlan
from ..plan.dry_run import check_device, dry_call, fake_batch, fake_weights
from ..plan.forward_recorder import ForwardRecorder
from ..plan.model_structure import ModelStructure
from ..plan.recomputed_modules import RUN_AGAIN
from ..plan.saved_bytes import SavedBytes, dropped_bytes

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def dropped_by(plan: MemoryPlan, forecast: DryRunForecast) -> int | None:
    """Return the bytes that a plan drops and rebuilds in a forward; ``None``: they are not known."""
    if all(row.fate not in RUN_AGAIN for row in plan.rows):
        return 0
    saved = forecast.saved()
    return None if saved is None else dropped_bytes(saved, plan)


class DryRunForecast:
    """Forecasts what one forward will save. The run on fake tensors takes place once, when first needed.

    Args:
        model: the model inside its wrappers.
        structure: structure of this model.
        args, kwargs: arguments of its call.

    Attributes:
        compiled: whether the compiler decides what is saved, which is not known before.
        why_not: why nothing is known, after `saved` has returned ``None``.
    """

    def __init__(
        self, model: nn.Module, structure: ModelStructure, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._call = model, structure, args, kwargs
        self._ran = False
        self._saved: SavedBytes | None = None
        self.compiled = structure.compiled or any(layer.compiled for layer in structure.all_layers)
        self.why_not = "the compiler decides what compiled layers save" if self.compiled else ""

    def saved(self) -> SavedBytes | None:
        """Return what autograd will save, or ``None`` where that cannot be known."""
        if not (self._ran or self.compiled or torch.compiler.is_compiling()):
            self._ran = True
            try:
                self._saved = record_saved(*self._call)
            except Exception as error:  # the model's own code runs: it may raise anything
                self.why_not = next(iter(str(error).splitlines()), "")
                logger.debug("no run on fake tensors", exc_info=True)
        return self._saved


def record_saved(
    model: nn.Module,
    structure: ModelStructure,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device = _CPU,
) -> SavedBytes:
    """Return what autograd saves, and for which op, when ``model`` is called with ``args`` and ``kwargs``.

    Nothing is computed: no hook on the model runs, none of its tensors is touched, no random number is drawn.
    The present autocast state holds. Compiled modules run eagerly. If a plan on the model already recomputes
    layers whole, only the inputs of these layers are seen.

    Args:
        model: the model inside its wrappers, as the model structure names it.
        structure: structure of this model.
        args, kwargs: as in the call. Of tensors only shape, dtype and device are read; of a mask and of
            positions also whether they mask or pack anything, because attention then runs in another way.
        device: where tensors on ``meta`` are taken to be, as attention kernels differ.

    Raises:
        ValueError: this build of PyTorch knows no such device.
        Exception: whatever the model raises on fake tensors (data-dependent shapes, custom kernels).
    """
    check_device(device)
    with dry_call(model, kwargs or {}) as named:
        state = fake_weights(model, device)
        fake_args, fake_kwargs = fake_batch((args, named), device)
        first = next(model.parameters(), None)
        here = _CPU if first is None else device if first.is_meta else first.device
        recorder = ForwardRecorder(structure.scopes, structure.attention, here)
        with recorder.saving():
            recorder.run_on_fakes(model, model, state, fake_args, fake_kwargs)
    return SavedBytes(recorder.used(), structure.modules)
