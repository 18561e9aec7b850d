"""What the planner cannot stand beside, said before the first step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn

from ..errors import Problem
from ..plan.actions import MemoryPlan, PlanRow, Scope, Windows, folded
from ..plan.checkpointing_rules import problems_of_checkpointing
from ..plan.gradient_checkpointing import is_checkpointed
from ..plan.outline import OUTPUT, Outline, unwrapped

COUNTING_ALLOCATORS = ("native", "cudaMallocAsync", "hipMallocAsync")
"""Allocators of PyTorch itself: they say what is in use and raise ``torch.OutOfMemoryError``.

A pluggable one does neither (PyTorch's ``CUDAPluggableAllocator.cpp``: ``getDeviceStats`` raises, and the
error of the library behind it is passed on as it is; pytorch issues 133280 and 133281).
"""

_NO_CACHING = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
_WRAPPED = "_checkpoint_wrapped_module"  # torch.distributed.algorithms._checkpoint.checkpoint_wrapper


def problems_of_planner(
    model: nn.Module,
    shape: Outline,
    mode: Literal["smart_swap", "adaptive"],
    *,
    allocator: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Return why no plan can be looked for while ``model`` trains; empty where nothing is in the way.

    Args:
        model: on its device, bare or wrapped.
        shape: its outline.
        mode: ``memory.mode``.
        allocator: the name of its device's allocator; ``None``: `allocator_name`.
        environment: of the process; ``None``: ``os.environ``.
    """
    root = unwrapped(model)
    layers = shape.layer_modules(root)
    device = next((weight.device for weight in root.parameters()), torch.device("cpu"))
    name = allocator_name(device) if allocator is None else allocator
    problems = [_one_process(model), _allocator(name), _compiled_whole(shape)]
    if device.type == "cuda":
        problems.append(_uncached(os.environ if environment is None else environment))
    if mode == "adaptive":
        problems.append(_checkpointed(layers))
    else:
        problems += problems_of_checkpointing(layers, _A_SWAP, shape.compiled)
    return [problem for problem in problems if problem is not None]


def allocator_name(device: torch.device) -> str:
    """Return the name of a device's allocator: one of `COUNTING_ALLOCATORS`, ``pluggable`` or another.

    Only CUDA and ROCm have names. Elsewhere ``native`` means that it counts what is in use, ``pluggable``
    that it does not. Of the CPU's nothing is asked: there `CountingMeter` counts.
    """
    if device.type == "cuda":
        return torch.cuda.get_allocator_backend()
    if device.type == "cpu":
        return "native"
    try:
        torch.accelerator.memory_allocated(device)
    except RuntimeError:
        return "pluggable"
    return "native"


_A_SWAP = MemoryPlan((PlanRow("embedding", OUTPUT, "swap", windows=Windows.of_prefetch(1)),), num_layers=0)
"""The least that any plan of the planner may hold: the input of a layer is swapped."""


def _one_process(model: nn.Module) -> Problem | None:
    if not isinstance(model, nn.DataParallel):
        return None
    hint = "Start with `accelerate launch` or torchrun (DistributedDataParallel)."
    return Problem("model", "one process per device", "nn.DataParallel", hint)


def _compiled_whole(shape: Outline) -> Problem | None:
    """A model in one region has one fate, and the guard could only run all of it again."""
    if not shape.compiled:
        return None
    hint = (
        "Compile the layers one by one: `layer.compile()`, or regional compilation "
        "(ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=1 beside torch_compile=True)."
    )
    return Problem("memory.mode", "layers with fates of their own", "a model compiled whole", hint)


def _allocator(name: str) -> Problem | None:
    if name in COUNTING_ALLOCATORS:
        return None
    expected = "an allocator of PyTorch beside the planner, which asks it how much memory is in use"
    found = f"'{name}' (torch.cuda.get_allocator_backend())"
    hint = (
        "Leave torch.cuda.memory.change_current_allocator out; inside a torch.cuda.MemPool another allocator "
        "may stay."
    )
    return Problem("memory.mode", expected, found, hint)


def _uncached(environment: Mapping[str, str]) -> Problem | None:
    written = [name for name in _NO_CACHING if environment.get(name) == "1"]
    if not written:
        return None
    expected = "an allocator that counts what is in use beside the planner"
    return Problem("memory.mode", expected, f"{written[0]}=1 in the environment", "Leave the variable out.")


def _checkpointed(layers: Mapping[Scope, nn.Module]) -> Problem | None:
    on = [scope for scope, layer in layers.items() if is_checkpointed(layer) or _WRAPPED in layer._modules]
    if not on:
        return None
    expected = "gradient checkpointing switched off beside adaptive, which chooses every fate itself"
    hint = (
        "Write gradient_checkpointing=False (or model.gradient_checkpointing_disable()): adaptive finds out "
        "what is worth recomputing. Beside smart_swap it may stay."
    )
    return Problem("memory.mode", expected, f"it switched on in layers {folded(on)}", hint)
