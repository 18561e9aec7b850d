"""Checkpoints of models whose names on disk are others than in memory.

``save_pretrained`` writes some families as they were published (Mixtral, Qwen3-MoE: each matrix of an expert
by itself), and ``from_pretrained`` puts them together again. The Trainer's resuming and
``load_best_model_at_end`` do not: they call ``load_state_dict`` with what is on disk, leave out what does not
fit, and go on with the experts that the model happens to have. A patched model translates here first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class OwnNamesHook:
    """Hook before ``load_state_dict`` of a Hugging Face model: gives whole tensors the names that it knows.

    What has the model's names already is left as it is. Else the whole model is made once more, on the CPU.
    """

    part_of_the_model = True

    def attach(self, model: nn.Module) -> None:
        """Put the hook on a model."""
        model.register_load_state_dict_pre_hook(self)

    def __call__(self, model: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        names = model.state_dict().keys()
        foreign = [name for name in state if name not in names]
        if prefix or not foreign or all(name in state for name in names):
            return
        given = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        kind, config, dtype = type(model), getattr(model, "config", None), next(model.parameters()).dtype
        if config is None or not hasattr(kind, "from_pretrained"):
            return
        made, told = kind.from_pretrained(
            None, config=config, state_dict=given, dtype=dtype, output_loading_info=True
        )
        for name in set(foreign) - set(told["unexpected_keys"]):
            del state[name]
        missing = set(told["missing_keys"])  # drawn at random there
        whole = made.state_dict()
        state.update({name: whole[name] for name in names if name in whole and name not in missing})
