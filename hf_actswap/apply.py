"""The verb: put a configuration or a plan on a model."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from .config import ActSwapConfig, load_config
from .engine import AppliedPlan, Transfer, install
from .engine.host_budget import Progress
from .errors import PlanError, Problem
from .parallel import Replicas, enclosing_group
from .parallel.gathered_inputs import keep_gathered_inputs
from .plan import MemoryPlan, Outline, outline, resolve_plan
from .plan.checkpointing_rules import problems_of_checkpointing
from .plan.compiled import uncompiled
from .plan.outline import unwrapped
from .plan.overwritten import keep_what_is_overwritten
from .report import PinningBar

logger = logging.getLogger(__name__)


def apply(
    model: nn.Module,
    config_or_plan: ActSwapConfig | MemoryPlan | Mapping[str, Any] | str | os.PathLike[str] | None,
    *,
    transfer: Transfer | None = None,
    progress: Progress | None = None,
) -> AppliedPlan:
    """Put a configuration or a plan on a model.

    Works before or after ``accelerator.prepare``; the model keeps its class and its state-dict names, and
    after ``AppliedPlan.remove()`` it is as before. While a plan is on, ``model.config.use_cache`` is false:
    a key-value cache would hold what swap releases, and be written twice by recomputation. What a rule
    changed of a configuration is logged as warnings; a plan is applied without a word.

    Args:
        model: a causal language model, bare or wrapped (DDP, PEFT, ``torch.compile``).
        config_or_plan: a plan, or whatever `load_config` takes. With ``recompute_slice_activation``, call
            inside `hf_actswap.parallel.tensor_parallel_group`.
        transfer: how bytes move; by default streams on an accelerator, blocking copies on the CPU.
        progress: called with (bytes, bytes in all) while host memory is made ready, equal at the end; by
            default a bar on rank 0.

    Raises:
        ConfigError: the configuration is malformed.
        PlanError: it does not fit the model, or asks for what this version cannot carry out.
    """
    shape = outline(model)
    if isinstance(config_or_plan, MemoryPlan):
        plan = config_or_plan
    else:
        plan = resolve_plan(load_config(config_or_plan), shape)
        for changed in (*plan.warnings, *plan.overrides):
            logger.warning("%s", changed)
    return apply_plan(model, plan, shape, transfer, progress)


def apply_plan(
    model: nn.Module,
    plan: MemoryPlan,
    shape: Outline,
    transfer: Transfer | None = None,
    progress: Progress | None = None,
) -> AppliedPlan:
    """Put a plan on a model whose outline is at hand; see `apply`.

    Raises:
        PlanError: the plan does not fit the model, or asks for what this version cannot carry out.
    """
    _refuse_what_cannot_be_applied(model, plan, shape)
    plan = keep_what_is_overwritten(plan, shape)
    group = enclosing_group()
    replicas = None if group is None else Replicas(group)
    applied = install(model, plan, shape, transfer, progress or _bar_on_rank_0(), replicas)
    if plan.rows:
        for restore in (*_without_cache(unwrapped(model)), *_gathering_once(unwrapped(model), plan, shape)):
            applied.on_remove(restore)
    return applied


def _bar_on_rank_0() -> Progress | None:
    started = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if started else int(os.environ.get("RANK", "0"))
    return PinningBar() if rank == 0 else None


def _refuse_what_cannot_be_applied(model: nn.Module, plan: MemoryPlan, shape: Outline) -> None:
    problems = [
        Problem("plan", "what this version can carry out", wish, "Remove it from the configuration.")
        for wish in plan.unbuilt
    ]
    root = unwrapped(model)
    if plan.rows and isinstance(model, nn.DataParallel):
        problems.append(
            Problem(
                "model",
                "one process per device",
                "nn.DataParallel, which runs copies of the model in threads",
                "Start with `accelerate launch` or torchrun (DistributedDataParallel).",
            )
        )
    layers = [uncompiled(root.get_submodule(layer.module_path)) for layer in shape.layers]
    problems += problems_of_checkpointing(layers, plan, shape.compiled)
    if problems:
        raise PlanError(problems)


def _gathering_once(root: nn.Module, plan: MemoryPlan, shape: Outline) -> list[Callable[[], None]]:
    """Keep, in layers that are recomputed whole, what parallel layers gather there; return what restores."""
    whole = {row.scope for row in plan.rows if row.op_path == "" and row.fate == "recompute"}
    paths = [layer.module_path for layer in shape.layers if layer.index in whole]
    return [keep_gathered_inputs(uncompiled(root.get_submodule(path))) for path in paths]


def _without_cache(root: nn.Module) -> list[Callable[[], None]]:
    """Switch the key-value cache off in the model's configuration; return what switches it on again."""
    config: Any = getattr(root, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    caching = [
        item for item in {id(config): config, id(text): text}.values() if getattr(item, "use_cache", False)
    ]
    if caching:
        logger.info("use_cache is off while the plan is on: a cache would hold the tensors that it releases.")
    for item in caching:
        item.use_cache = False
    return [functools.partial(setattr, item, "use_cache", True) for item in caching]
