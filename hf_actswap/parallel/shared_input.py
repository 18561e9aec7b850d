"""One input for several column-parallel layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .column_input import column_input
from .layers import ColumnParallelLinear


class SharedInput:
    """One input for several column-parallel layers, such as q, k and v: one gather, one saved shard.

    Call it with what the layers would be called with, and call the layers with what it returns. Settings are
    the first layer's, read at each call.

    Args:
        layers: of one group, with equal settings; from now on they take their input from here.
        keep_gathered: save the gathered input, and do not gather again in backward.
        in_autocast_dtype: see `column_input`; where only these layers read the input.

    Raises:
        ValueError: settings differ.
    """

    def __init__(
        self,
        layers: Sequence[ColumnParallelLinear],
        keep_gathered: bool = False,
        in_autocast_dtype: bool = False,
    ) -> None:
        if len({layer.input_settings() for layer in layers}) != 1:
            raise ValueError("layers that share an input must have the same group and sequence settings")
        self.layers, self.keep_gathered = tuple(layers), keep_gathered
        self.in_autocast_dtype = in_autocast_dtype
        for layer in layers:
            layer.input_is_shared = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return what each layer multiplies: ``[.., S / tp, .., H]`` to ``[.., S, .., H]``."""
        settings = self.layers[0].input_settings(self.keep_gathered, self.in_autocast_dtype)
        return column_input(x, [layer.weight for layer in self.layers], settings)
