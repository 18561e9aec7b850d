"""One call of a model that leaves no trace: fake weights, no hooks, no kernels, nothing compiled.

The call happens on a model that somebody else has set up already, so it must not set anything in motion. A
hook may gather sharded weights (FSDP2 keeps what it gathers: fake tensors would stay in the model for good)
or count its calls. A Triton kernel that is given the address of a fake tensor would run on address 0, which
ends the CUDA context.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from ..interrupts import uninterrupted

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PART_OF_THE_MODEL = frozenset({"transformers.utils.output_capturing", "transformers.modeling_utils"})
"""Whose hooks stay: a forward of transformers reads what these collect (router logits)."""

_PART = "part_of_the_model"
"""Attribute of hooks that stay because a patched model does not compute without them."""

_ASK_PACKED = "find_packed_sequence_indices"
_NO_ADDRESS = "fake_tensor_allow_unsafe_data_ptr_access"

_Hooks = MutableMapping[int, Callable[..., Any]]


@contextmanager
def hooks_off(model: nn.Module) -> Iterator[None]:
    """Take the hooks of all modules, and those for every module, off and put them back in their order.

    The dictionaries stay the same objects, so that handles given out earlier still remove their hooks. A hook
    that the model itself registers meanwhile stays.
    """
    # By identity: regional compilation makes copies of modules that share their dictionaries.
    places: dict[int, _Hooks] = {}
    for module in model.modules():
        for name in _HOOKS:
            hooks = vars(module)[name]  # a compiled module answers for the one inside it when asked by name
            if hooks:
                places[id(hooks)] = hooks
    for name in _HOOKS:
        hooks = vars(module_hooks)[f"_global{name}"]
        places[id(hooks)] = hooks
    saved = [(hooks, dict(hooks)) for hooks in places.values()]
    try:
        for hooks, before in saved:
            for number, hook in before.items():
                if getattr(hook, "__module__", None) not in _PART_OF_THE_MODEL and not hasattr(hook, _PART):
                    del hooks[number]
        yield
    finally:
        for hooks, before in saved:
            during = dict(hooks)
            hooks.clear()
            hooks.update(before)
            hooks.update(during)


@contextmanager
def one_sequence_each() -> Iterator[None]:
    """Tell transformers that no row of ids is packed from several sequences, which it cannot read off fakes.

    It would build an attention mask to be safe, with which attention runs otherwise than in training: keys
    and values are repeated for their groups of heads, in ops and nodes that a real forward does not have.
    """
    names = getattr(sys.modules.get("transformers.masking_utils"), "__dict__", {})
    ask = names.get(_ASK_PACKED)
    if ask is None:
        yield
        return
    names[_ASK_PACKED] = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        names[_ASK_PACKED] = ask


class _FakeTensors(FakeTensorMode):
    """Knows one shape more: ``bincount`` of choices among ``minlength`` has that many rows.

    In general its values decide. The balancing losses of transformers up to 5.17 count experts with it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bincount.default:
            given = dict(zip(("self", "weights", "minlength"), args, strict=False)) | (kwargs or {})
            weights, count = given.get("weights"), given.get("minlength", 0)
            if count > 0:
                with self:
                    dtype = torch.long if weights is None else weights.dtype
                    return torch.empty(count, dtype=dtype, device=given["self"].device)
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def fakes_only() -> Iterator[None]:
    """Make tensors fake, without an address, and record autograd's nodes but nothing that they save.

    An interrupt waits until the end: PyTorch also asks fake tensors from C++ that may not throw, and there it
    would end the process (``terminate called after throwing an instance of 'python_error'``).
    """
    no_address: AbstractContextManager[Any] = nullcontext()
    if hasattr(functorch_config, _NO_ADDRESS):
        no_address = functorch_config.patch({_NO_ADDRESS: False})
    with uninterrupted(), ExitStack() as stack:
        # Modes around us would come before the fake mode, and count or evict what has no memory.
        stack.enter_context(_disable_current_modes())
        stack.enter_context(no_address)  # read when the mode is made
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        # Innermost hooks win: those around us (offloading, counting) do not meet fake tensors.
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_forget, _refuse))
        stack.enter_context(_FakeTensors(allow_non_fake_inputs=True))
        yield


def fake_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return plain fake tensors for the parameters and buffers, by name; tied ones appear once.

    Sharded and quantised tensors become what they stand for: ``shape`` is the whole shape, ``dtype`` the one
    they compute in. A parameter of a class that is no wrapper (packed weights of bitsandbytes) is left out:
    its module reads more of it than shape and type.

    Args:
        model: any module. Call inside `fakes_only`.
    """
    return {
        name: torch.empty(
            tensor.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad
        )
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if _is_its_data(tensor)
    }


def _is_its_data(tensor: object) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) or is_traceable_wrapper_subclass(tensor)


def _forget(_tensor: torch.Tensor) -> None:
    """Autograd keeps nothing: no backward follows."""


def _refuse(_nothing: None) -> torch.Tensor:
    raise RuntimeError("a backward inside the recorded forward: nothing was saved for it")
