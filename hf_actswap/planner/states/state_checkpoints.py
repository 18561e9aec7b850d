"""Saves and loads (``state_dict``, ``load_state_dict``) an optimizer whose states are on the host.

Both work where the device has no room for all states at once. States on the host are saved as copies in
ordinary host memory. Loaded states go to the device and out again parameter by parameter. (PyTorch's own
``load_state_dict`` puts all of them on the device first.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ...engine.transfer import Transfer
from .optimizer_kinds import is_streamed
from .state_residence import StateResidence
from .state_storages import Geometry, StateStorage, plain_tensors

StateDict = dict[str, Any]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class StateCheckpoints:
    """Hooks on ``state_dict`` and ``load_state_dict`` of an optimizer.

    Args:
        optimizer: the optimizer.
        residence: tracks and moves the storages of its states.
        transfer: copies them.
        min_tensor_bytes: loaded tensors of at least this size are set aside, and put in place afterwards.
        loaded: called after a load, without the tensors set aside, with functions that each put one of these
            in place and return its key in ``optimizer.state``.

    Attributes:
        saving: whether a save has begun and PyTorch's code has not yet accessed the states.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        residence: StateResidence,
        transfer: Transfer,
        min_tensor_bytes: int,
        loaded: Callable[[list[Callable[[], Hashable]]], None],
    ) -> None:
        self._optimizer, self._residence, self._transfer = optimizer, residence, transfer
        self._min_tensor_bytes, self._loaded = max(1, min_tensor_bytes), loaded
        self._aside: dict[Hashable, dict[Hashable, torch.Tensor]] = {}
        self._numbers: list[Hashable] = []
        self.saving = False

    def attach(self) -> list[Callable[[], None]]:
        """Put the hooks on; return functions that take them off."""
        optimizer = self._optimizer
        handles = [
            optimizer.register_state_dict_pre_hook(self._saving_starts),
            optimizer.register_state_dict_post_hook(self._saved, prepend=True),
            optimizer.register_load_state_dict_pre_hook(self._loading_starts),
            optimizer.register_load_state_dict_post_hook(self._loading_ended, prepend=True),
        ]
        return [handle.remove for handle in handles]

    def reset(self) -> None:
        """Forget a save or a load that has not come to its end."""
        self.saving = False
        self._aside.clear()
        self._numbers.clear()

    def _saving_starts(self, _: torch.optim.Optimizer) -> None:
        self._residence.release(0)
        self._transfer.synchronize()  # the host reads its copies now
        self.saving = True

    def _saved(self, _: torch.optim.Optimizer, saved: StateDict) -> StateDict:
        self.saving = False
        copies = _Copies(self._residence, self._min_tensor_bytes)
        return {**saved, "state": {key: copies.of(value) for key, value in saved["state"].items()}}

    def _loading_starts(self, optimizer: torch.optim.Optimizer, saved: StateDict) -> StateDict:
        """Set large tensors aside; PyTorch's code gets empty ones instead, and decides their dtype."""
        self.reset()
        state = {}
        if not is_streamed(optimizer):
            return {**saved, "state": {key: self._own(value) for key, value in saved["state"].items()}}
        self._numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for key, entries in saved["state"].items():
            aside = {
                name: value
                for name, value in (entries.items() if isinstance(entries, dict) else ())
                if type(value) in _PLAIN and value.nbytes >= self._min_tensor_bytes
            }
            self._aside[key] = aside
            stand_ins = {name: torch.empty(0, dtype=value.dtype) for name, value in aside.items()}
            state[key] = {**entries, **stand_ins} if aside else entries
            state[key] = self._own(state[key])
        return {**saved, "state": state}

    def _own(self, value: Any) -> Any:
        """Return ``value`` with new tensor objects: PyTorch keeps fitting ones, and ours change storages."""

        def own(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone() if tensor.nbytes < self._min_tensor_bytes else tensor.detach()

        return _mapped(value, own)

    def _loading_ended(self, optimizer: torch.optim.Optimizer) -> None:
        aside, self._aside = self._aside, {}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        loads: list[Callable[[], Hashable]] = []
        for parameter, number in zip(parameters, self._numbers, strict=False):
            for name, value in aside.pop(number, {}).items():
                loads.append(_load(optimizer, parameter, name, value))
        self._residence.forget_all()
        self._loaded(loads)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value`` with each tensor in it changed, also in nested dictionaries, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return type(value)(_mapped(item, change) for item in value) if type(value) in (list, tuple) else value


def _load(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: Hashable, value: torch.Tensor
) -> Callable[[], Hashable]:
    def load() -> Hashable:
        entries = optimizer.state[parameter]
        dtype = entries[name].dtype
        entries[name] = value.detach().to(device=parameter.device, dtype=dtype, copy=True)
        return parameter

    return load


class _Copies:
    """Makes the tensors of a state dictionary, in place of the optimizer's own; each storage is copied once.

    Small tensors are copied as well, so that all values in a dictionary that is kept are of one step.
    """

    def __init__(self, residence: StateResidence, min_tensor_bytes: int) -> None:
        self._residence, self._min_tensor_bytes = residence, min_tensor_bytes
        self._where: dict[int, tuple[StateStorage, Geometry]] = {
            id(tensor): (storage, geometry)
            for storage in residence.all()
            for tensors in storage.tensors.values()
            for tensor, geometry in tensors
        }
        self._copied: dict[int, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """Return ``value`` with its tensors replaced by copies."""
        return _mapped(value, self._of_tensor)

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        found = [self._where[id(local)] for local in plain_tensors(tensor) if id(local) in self._where]
        if not found:
            return tensor.clone() if tensor.nbytes < self._min_tensor_bytes else tensor
        ((storage, geometry),) = found
        if isinstance(tensor, DTensor):  # gathering it needs it on the device
            self._residence.bring(storage, will_change=False)
        if storage.place == "device":
            return tensor.detach()  # keeps the present values: the next step works on another storage
        if id(storage) not in self._copied:
            self._copied[id(storage)] = storage.host_copy()
        return geometry.on(self._copied[id(storage)].untyped_storage())
