"""The rows of the frontier, as data: what is put on the decoder stack before it is measured.

Adding a row is adding one entry to `ROWS`. A row of hf_actswap is a configuration; a row of something else
is a context manager that takes the model, puts its mechanism on, and takes it off again at exit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import hf_actswap
from hf_actswap import AppliedPlan

Setup = Callable[[Any, Any], AbstractContextManager[AppliedPlan | None]]
"""Takes the model and the row's configuration; gives the applied plan where there is one."""

Obstacle = Callable[[torch.device, Any], str]
"""Takes the device and the model; says why a row cannot be measured there, ``""`` if it can."""


def _none(_device: torch.device, _model: Any) -> str:
    return ""


@contextmanager
def nothing(_model: Any, _config: Any) -> Iterator[None]:
    """Leave the model as it is."""
    yield None


@contextmanager
def hf_checkpointing(model: Any, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Put transformers' own checkpointing of whole layers on; ``options`` are its arguments."""
    _checkpointing_verb(model, "enable")(**(options or {}))
    try:
        yield None
    finally:
        _checkpointing_verb(model, "disable")()


def _checkpointing_verb(model: Any, verb: str) -> Callable[..., None]:
    """The method under its present name, or under the one that it had before."""
    method = getattr(model, f"activation_checkpointing_{verb}", None)
    return method or getattr(model, f"gradient_checkpointing_{verb}")


@contextmanager
def compiled(model: Any, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Compile each layer by itself; ``options`` are ``torch.compile``'s."""
    layers: list[nn.Module] = list(model.layers)
    for layer in layers:
        layer.compile(**(options or {}))
    try:
        yield None
    finally:
        for layer in layers:
            layer._compiled_call_impl = None  # there is no public way back from Module.compile
        torch._dynamo.reset()


@contextmanager
def actswap(model: Any, config: Any) -> Iterator[AppliedPlan]:
    """Put a configuration of hf_actswap on."""
    with hf_actswap.apply(model, config) as applied:
        yield applied


def no_offload_option(device: torch.device, model: Any) -> str:
    """transformers can swap what its checkpointing keeps, in newer versions and off a device."""
    if device.type == "cpu":
        return "the CPU has no memory of its own to offload from"
    if "offload" not in inspect.signature(_checkpointing_verb(model, "enable")).parameters:
        return "this version of transformers cannot offload what its checkpointing keeps"
    return ""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        name: unique; what ``--rows`` selects.
        setup: puts the mechanism on the model.
        config: what ``setup`` is given; plain values, written to the results as they are.
        must_be_exact: output and gradients must equal eager's bit for bit; if not, the run fails.
        compiles: needs ``torch.compile``. Fused kernels round differently, so exactness is not judged.
        obstacle: why the row cannot be measured here.
    """

    name: str
    setup: Setup
    config: Any = None
    must_be_exact: bool = False
    compiles: bool = False
    obstacle: Obstacle = _none


EAGER = Row("eager", nothing)
"""What all ratios and all gradients are compared with; always measured, and first."""

ROWS: tuple[Row, ...] = (
    EAGER,
    Row("hf-checkpointing", hf_checkpointing),
    Row("hf-checkpointing-offload", hf_checkpointing, {"offload": True}, obstacle=no_offload_option),
    Row("compiled", compiled, compiles=True),
    Row(
        "actswap-default-swap",
        actswap,
        {"swap_config": {"swap": True, "default_prefetch": 20}},
        must_be_exact=True,
    ),
    Row(
        "actswap-full-recompute",
        actswap,
        {"recompute_config": {"recompute": True}},
        must_be_exact=True,
    ),
    Row(
        "actswap-mixed",
        actswap,
        {
            "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": True}]},
            "recompute_config": {
                "select_recompute": {
                    r"feed_forward\.mul": True,
                    r"feed_forward\.w1\.activation\.silu": True,
                    r".*_norm": True,
                }
            },
        },
        must_be_exact=True,
    ),
)
