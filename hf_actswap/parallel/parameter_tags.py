"""Keeps NxD's attributes on parameters of modules whose classes do not know them.

Norms and routed experts keep their own classes, which know nothing of NxD's attributes, and PyTorch drops
attributes wherever it makes a parameter anew (``copy.deepcopy``, ``load_state_dict(assign=True)``, FSDP2).
So the attributes are kept here by module and name, and set again before each forward; under FSDP2 on the
shards, which optimizers see.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .data_sharding import sharded_parameters
from .gradients import TAG


class ParameterTags:
    """The attributes of a model's parameters, by module and name of the parameter.

    Args:
        model: the model that holds the parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tags: list[tuple[nn.Module, str, dict[str, Any]]] = []

    def add(self, module: nn.Module, name: str, **tags: Any) -> None:
        """Put attributes on the parameter ``name`` of ``module``, now and whenever `put` is called."""
        self._tags.append((module, name, tags))
        parameter = module._parameters.get(name)
        if parameter is not None:
            vars(parameter).update(tags)

    def add_summed(self, module: nn.Module) -> None:
        """Tag all parameters of ``module``, submodules included: each rank has a part of their gradients."""
        for inner in module.modules():
            for name in inner._parameters:
                self.add(inner, name, **{TAG: True})

    def put(self) -> None:
        """Put all attributes on again."""
        is_sharded = isinstance(self._model, FSDPModule)
        for module, name, tags in self._tags:
            parameter = module._parameters.get(name)
            if parameter is not None:
                vars(parameter).update(tags)
                is_sharded = is_sharded or isinstance(parameter, DTensor)
        if is_sharded:
            shards = {
                (id(found.module), found.name): found.shard for found in sharded_parameters(self._model)
            }
            for module, name, tags in self._tags:
                shard = shards.get((id(module), name))
                if shard is not None:
                    vars(shard).update(tags)
