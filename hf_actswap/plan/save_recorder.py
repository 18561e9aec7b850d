"""One forward on fake tensors of the real shapes: what autograd saves, and whose it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from .fake_batch import check_device, dry_call, fake_batch, fake_weights
from .outline import Outline
from .saved_bytes import SavedBytes
from .use_recorder import UseRecorder

_CPU = torch.device("cpu")


def record_saved(
    model: nn.Module,
    outline: Outline,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device = _CPU,
) -> SavedBytes:
    """Record what autograd saves when ``model`` is called with ``args`` and ``kwargs``, without computing.

    No hook on the model runs, none of its tensors is touched, no random number is drawn; autocast is as it is
    when this is called. Compiled modules run eagerly. Of layers that are recomputed whole already, by a plan
    that is on the model, only what they are called with is seen.

    Args:
        model: the model inside its wrappers, as the outline names it.
        outline: of this model.
        args, kwargs: as at the call. Of tensors only shape, type and device are read, and of a mask and of
            positions whether they say anything, because attention runs otherwise then.
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
        recorder = UseRecorder(outline, _CPU if first is None else device if first.is_meta else first.device)
        recorder.own(state.values(), None)
        recorder.own(tree_leaves((fake_args, fake_kwargs)), None)
        with recorder.installed(model), recorder.saving(), recorder:
            functional_call(model, state, fake_args, fake_kwargs)
    return recorder.saved()
