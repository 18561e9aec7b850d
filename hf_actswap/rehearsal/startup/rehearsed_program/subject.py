"""What is trained, for the planner: model, largest batch, types, adapters, optimizer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any


class Subject:
    """What a process trains, as far as it has been seen."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._thread = threading.local()
        self._found: dict[str, Any] = {}
        self._weights = 0
        self._autocast_known = False

    def document(self) -> dict[str, Any]:
        """Return what has been seen as JSON values."""
        return self._found

    def watch_calls(self, at_first_batch: Callable[[], None]) -> None:
        """Look at the arguments of outermost modules, from now on.

        Args:
            at_first_batch: called before the first batch that is trained on.
        """
        module, thread = self._torch.nn.Module, self._thread
        original = module.__call__

        def call(called: Any, *arguments: Any, **keywords: Any) -> Any:
            if getattr(thread, "inside", False):
                if not self._autocast_known:
                    self._note_autocast()
                return original(called, *arguments, **keywords)
            thread.inside = True
            try:
                if self._note_call(called, arguments, keywords):
                    at_first_batch()
                return original(called, *arguments, **keywords)
            finally:
                thread.inside = False

        module.__call__ = call

    def _note_autocast(self) -> None:
        if self._torch.is_autocast_enabled("cuda"):
            self._found["autocast"] = str(self._torch.get_autocast_dtype("cuda"))
        self._autocast_known = "batch" in self._found

    def _note_call(self, called: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Note the shape of the batch; return whether it is the first one that is trained on."""
        given = keywords.get("input_ids")
        if given is None:
            given = keywords.get("inputs_embeds", arguments[0] if arguments else None)
        shape: Any = getattr(given, "shape", ())
        if len(shape) < 2 or not self._torch.is_grad_enabled():
            return False
        first = "tokens" not in self._found
        size = self._found.get("batch", 0) * self._found.get("tokens", 0)
        self.note_module(called)
        if "config" in self._found and shape[0] * shape[1] > size:
            self._found |= {"batch": int(shape[0]), "tokens": int(shape[1])}
        return first and "tokens" in self._found

    def note_module(self, module: Any) -> None:
        """Note a model, if it has the configuration of one and is the largest so far."""
        outermost = module
        while "module" in (inner := module.__dict__.get("_modules", {})) and not hasattr(module, "config"):
            module = inner["module"]  # DDP
        config: Any = getattr(module, "config", None)
        if not hasattr(config, "to_json_string"):
            return
        weights = [weight for weight in module.parameters() if weight.is_floating_point()]
        count = sum(weight.numel() for weight in weights)
        adapters = getattr(module, "peft_config", None)
        if count < self._weights:
            return
        known = self._found.get("sharding") if count == self._weights else None
        sharding = _sharding(outermost) or known  # the model inside DDP shares nothing
        if count == self._weights and not adapters and sharding == known:
            return
        self._weights = count
        largest = max(weights, key=lambda weight: weight.numel(), default=None)
        self._found |= {
            "config": config.to_json_string(use_diff=False),
            "class": type(module).__name__,
            "dtype": None if largest is None else str(largest.dtype),
            "weights": count,
            "trained": sum(weight.numel() for weight in weights if weight.requires_grad),
            "checkpointing": bool(getattr(module, "is_gradient_checkpointing", False)),
            "adapters": _adapters(adapters),
            "sharding": sharding,
            "gathered_in": _gathered_in(module),
        }

    def note_optimizer(self, optimizer: Any) -> None:
        """Note what the optimizer is."""
        group = optimizer.param_groups[0] if optimizer.param_groups else {}
        self._found["optimizer"] = _optimizer_name(optimizer)
        self._found["momentum"] = bool(group.get("momentum"))
        # PyTorch's default on CUDA: `foreach` is None there, and an optimizer of others has no such key.
        whole = not group.get("fused") and group.get("foreach", False) is not False
        self._found["foreach"] = whole


def _optimizer_name(optimizer: Any) -> str:
    """Return its class, or of one of bitsandbytes what transformers calls it (``paged_adamw_8bit``)."""
    kind = type(optimizer)
    if not kind.__module__.startswith("bitsandbytes."):
        return kind.__name__
    bits, paged = getattr(optimizer.args, "optim_bits", 32), getattr(optimizer, "is_paged", False)
    name = kind.__name__.lower().removeprefix("paged").removesuffix("8bit").removesuffix("32bit")
    return f"{'paged_' * paged}{name}_{bits}bit"


def _sharding(model: Any) -> str | None:
    """Return what data-parallel ranks share, as `hf-actswap plan --shard` takes it; ``None``: nothing."""
    if type(model).__name__ == "DistributedDataParallel":
        return f"ddp={model.process_group.size()}"
    meshes = (getattr(weight, "device_mesh", None) for weight in model.parameters())
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    sharded = [one for one in model.modules() if hasattr(type(one), "set_reshard_after_forward")]
    if mesh is None or not sharded:
        return None
    states = [one._get_fsdp_state() for one in sharded]
    groups = [  # one for each module before PyTorch 2.13, several later
        group
        for state in states
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    ]
    frees = any(getattr(group, "post_forward_mesh_info", None) is not None for group in groups)
    return f"{'fsdp' if frees else 'shard_grad_op'}={mesh.size()}"


def _gathered_in(model: Any) -> str | None:
    """Return the type in which FSDP2 gathers weights, which is how Accelerate has it compute, or ``None``."""
    sharded = (one for one in model.modules() if hasattr(type(one), "set_reshard_after_forward"))
    policies = (getattr(one._get_fsdp_state(), "_mp_policy", None) for one in sharded)
    types = (getattr(policy, "param_dtype", None) for policy in policies)
    return next((str(dtype) for dtype in types if dtype is not None), None)


def _adapters(configs: Any) -> dict[str, Any] | None:
    """Return the settings of PEFT's first adapter as JSON values."""
    first = next(iter(configs.values()), None) if isinstance(configs, dict) else None
    if first is None:
        return None
    targets = getattr(first, "target_modules", None)
    names = [targets] if isinstance(targets, str) else sorted(targets or [])
    found = {
        "kind": str(getattr(first, "peft_type", "")).rsplit(".", 1)[-1],
        "r": getattr(first, "r", None),
        "targets": names,
        "dropout": getattr(first, "lora_dropout", 0.0),
    }
    return json.loads(json.dumps(found, default=str))
