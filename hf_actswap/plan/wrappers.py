"""Reads what PyTorch and transformers put on a model: compilation, FSDP2, gradient checkpointing, the cache.

``torch.compile(module)`` puts a wrapper around a module, whose name shows in every path below it;
``module.compile()`` changes only how the module is called. A wrapper is recognised as a module that holds
``_orig_mod``, so that nothing of the compiler is imported.

FSDP2's private state is read here and in `gathered` only (written for PyTorch 2.13). Earlier versions of
PyTorch have one group of parameters for each module, later ones several.

`GradientCheckpointingLayer` hands a layer's call to ``torch.utils.checkpoint`` if the layer's flag is set.
Such a layer saves nothing but its input, and a plan can swap that input.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ..errors import Problem
from ..releases import checkpointing_argument

_INSIDE = "_orig_mod"


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``'s wrappers; any other module is returned as it is."""
    while (inner := module._modules.get(_INSIDE)) is not None:
        module = inner
    return module


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of ``module`` itself is compiled; a compiled module inside it does not count."""
    return uncompiled(module) is not module or getattr(module, "_compiled_call_impl", None) is not None


def runs_cuda_graphs(module: nn.Module) -> bool:
    """Whether calls of ``module`` are compiled into CUDA graphs (``reduce-overhead``, ``max-autotune``)."""
    called: Any = getattr(module, "_compiled_call_impl", None) or (module if is_compiled(module) else None)
    config: dict[str, Any] = getattr(called, "get_compiler_config", dict)() or {}
    return bool(config.get("triton.cudagraphs"))


def called_modules(layer: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (op path, module) for what ``layer`` calls eagerly: compiled modules, but no modules inside them.

    A hook on a module inside compiled code would be compiled with it.
    """
    for name, child in layer.named_children():
        inside = f"{path}.{name}" if path else name
        yield inside, child
        if not is_compiled(child):
            yield from called_modules(child, inside)


def named_op_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layer (path ``""``) and the modules inside it by op path.

    Where ``torch.compile`` put a wrapper around one of them, the module inside has the wrapper's path.
    """
    for path, module in uncompiled(layer).named_modules():
        if uncompiled(module) is module:
            yield ".".join(part for part in path.split(".") if part != _INSIDE), module


FSDP2_METHOD = "set_reshard_after_forward"
"""Name of a method by which a module sharded by FSDP2 is recognised, without importing FSDP2."""


def problems_of_fsdp1(model: nn.Module) -> list[Problem]:
    """Return why a model in FSDP1 has no plan: it keeps the fake weights of a dry run in place of its own."""
    return [_FSDP1] if any(type(module).__name__ == _FSDP1_CLASS for module in model.modules()) else []


_FSDP1_CLASS = "FullyShardedDataParallel"
"""By its name: importing it takes time, and FSDP2 modules are of other classes."""
_FSDP1 = Problem(
    "model",
    "weights that are whole, or sharded by FSDP2",
    f"{_FSDP1_CLASS} (FSDP1)",
    "Write `fsdp_version: 2` (the Trainer's fsdp_config, Accelerate's), or use fully_shard.",
)


def parameter_groups(module: Any) -> list[Any]:
    """Return the parameter groups that FSDP2 has for ``module`` itself, a module that FSDP2 shards."""
    state = module._get_fsdp_state()
    groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or []
    one = getattr(state, "_fsdp_param_group", None) if not groups else None
    return [group for group in (*groups, one) if group is not None]


def frees_weights_after_its_call(module: nn.Module) -> bool:
    """Whether FSDP2 shards weights of a module, or of one inside, and frees them when its call has ended.

    With ``reshard_after_forward=False`` they stay until backward: so Accelerate divides final norm and head.
    """
    sharded = (inside for inside in module.modules() if hasattr(type(inside), FSDP2_METHOD))
    groups = (group for inside in sharded for group in parameter_groups(inside))
    return any(group.post_forward_mesh_info is not None for group in groups)


def weights_are_gathered_again(model: nn.Module) -> bool:
    """Whether FSDP2 frees gathered weights of the model after forward, so that backward gathers them again.

    That of ``reshard_after_forward``. If the user left it open, FSDP2 keeps the weights of outermost modules,
    which it makes roots at their first forward.
    """
    seen: set[nn.Module] = set()  # outermost ones come before what is inside them
    for module in model.modules():
        if not hasattr(type(module), FSDP2_METHOD):
            continue
        outermost = module not in seen
        seen.update(module.modules())
        state: Any = module
        kept = outermost and getattr(state._get_fsdp_state(), "_auto_reshard_after_forward", False)
        if not kept and any(group.post_forward_mesh_info is not None for group in parameter_groups(module)):
            return True
    return False


logger = logging.getLogger(__name__)


PLANNER_DECIDES = "while the planner decides what is recomputed; it is on again after it"


class WithoutCheckpointing:
    """Gradient checkpointing switched off in all layers of a model, until `undo`.

    The log says that it is off, with the reason; an empty one is not logged.
    """

    def __init__(self, model: nn.Module, reason: str = PLANNER_DECIDES) -> None:
        self._on = [module for module in model.modules() if is_checkpointed(module)]
        if self._on and reason:
            logger.info("%s is off %s.", checkpointing_argument(), reason)
        self._switch(self._on, False)

    def undo(self) -> None:
        self._switch(self._on, True)

    def not_in(self, layers: nn.Module) -> bool:
        """Switch it on again in some of the model's layers; return whether it was on there."""
        inside = {id(module) for module in layers.modules()}
        found = [module for module in self._on if id(module) in inside]
        self._switch(found, True)
        return bool(found)

    @staticmethod
    def _switch(modules: Iterable[nn.Module], on: bool) -> None:
        for module in modules:
            module.gradient_checkpointing = on  # type: ignore[assignment]


def is_checkpointed(layer: nn.Module) -> bool:
    """Whether gradient checkpointing is switched on for a layer; it acts while the layer trains."""
    return bool(getattr(layer, "gradient_checkpointing", False))


def can_be_checkpointed(module: nn.Module) -> bool:
    return hasattr(module, "gradient_checkpointing")


def checkpoints_its_call(layer: nn.Module) -> bool:
    """Whether the checkpoint includes the layer's hooks: it wraps ``__call__``, as in transformers 5.17."""
    return type(layer).__call__ is not nn.Module.__call__


def without_cache(root: nn.Module) -> list[Callable[[], None]]:
    """Switch the key-value cache off in the model's configuration; return functions that undo it.

    With a cache attention reads copies of keys and values: other ops then produce what is saved, and a plan
    for these names nothing in a training without it. Parts of a model may have configurations of their own
    (T5's decoder has a copy).
    """
    found: list[Any] = [getattr(module, "config", None) for module in root.modules()]
    known = {id(config): config for config in found}
    text = [config.get_text_config() for config in known.values() if hasattr(config, "get_text_config")]
    known |= {id(config): config for config in text}
    caching = [config for config in known.values() if getattr(config, "use_cache", False)]
    for item in caching:
        item.use_cache = False
    return [functools.partial(setattr, item, "use_cache", True) for item in caching]
