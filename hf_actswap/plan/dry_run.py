"""A dry run: one call of a model on fake tensors that leaves no trace. No hook, no kernel, nothing compiled.

The call happens on a model that is already set up for training, so it must not have side effects. A
hook may gather sharded weights (FSDP2 keeps what it gathers: fake tensors would stay in the model for good)
or count its calls. A Triton kernel that is given the address of a fake tensor would run on address 0, which
ends the CUDA context.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from ..interrupts import uninterrupted
from .compiled import named_op_modules
from .mindformers_names import EXPERTS_MODULE

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_PART_OF_THE_MODEL = frozenset({"transformers.utils.output_capturing", "transformers.modeling_utils"})
"""Whose hooks stay: a forward of transformers reads what these collect (router logits)."""

_PART = "part_of_the_model"
"""Attribute of hooks that stay because a patched model does not compute without them."""

_ASK_PACKED = "find_packed_sequence_indices"
_NO_ADDRESS = "fake_tensor_allow_unsafe_data_ptr_access"
_MASK, _POSITIONS = "attention_mask", "position_ids"

_DEVICE = torch.ops.prim.device.default
_VIEW, _UNSAFE_VIEW = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default
_PLAIN = frozenset({int, float, bool, type(None), torch.dtype, torch.device, torch.layout})
"""Types of arguments that describe themselves."""

_EXAMPLE_SHAPE = (2, 8)
"""(batch, sequence); a batch of one would take short cuts that others do not (``expand``, ``matmul``)."""

_IMAGE_SIZE, _FRAMES, _SAMPLES = 224, 1500, 16_000
"""Of an image in pixels, of a spectrogram, and of a second of sound, where the configuration is silent."""

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
    """Answers what PyTorch's fake tensors do, in two thirds of the time, and knows one shape and one value.

    PyTorch caches the answer of each op, and spends most of a dry run on describing the arguments for the
    cache's key: the description here is shorter. PyTorch does not cache ``_unsafe_view`` (one in each linear
    layer), which below autograd is the same as ``view``.

    The shape: ``bincount`` of choices among ``minlength`` has that many rows; in general its values decide.
    The balancing losses of transformers up to 5.17 count experts with it.

    One random number is 0.5: encoders and decoders of transformers up to 5.17 draw one to decide whether they
    drop a layer (``layerdrop``), and a value is needed for that.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch's own method, called below, does; doing it twice costs time at each op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # more than half of all calls
            return args[0].device
        if func is torch.ops.aten.bincount.default:
            given = dict(zip(("self", "weights", "minlength"), args, strict=False)) | (kwargs or {})
            weights, count = given.get("weights"), given.get("minlength", 0)
            if count > 0:
                with self:
                    dtype = torch.long if weights is None else weights.dtype
                    return torch.empty(count, dtype=dtype, device=given["self"].device)
        found: Any = super().__torch_dispatch__(_VIEW if func is _UNSAFE_VIEW else func, types, args, kwargs)
        if func is torch.ops.aten.rand.default and not args[0]:
            found.constant = torch.full((), 0.5)
        return found

    def _prep_args_for_hash(self, result: list[object], args: Any, *state: Any) -> None:
        """Append the description of an op's arguments (private to PyTorch; the same on 2.11 and 2.13)."""
        if type(args) not in (list, tuple):
            return super()._prep_args_for_hash(result, args, *state)
        result += (_FakeTensors, len(args))  # never equal to a description of PyTorch's own
        for arg in args:
            if type(arg) in _PLAIN:
                result += (type(arg), arg)
            elif type(arg) is FakeTensor and arg.fake_mode is self and _is_described(arg):
                result += (arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.fake_device)
                result += (arg.untyped_storage().nbytes(), arg.requires_grad, arg.is_inference())
            else:
                super()._prep_args_for_hash(result, (arg,), *state)
        return None


def _is_described(fake: FakeTensor) -> bool:
    """Whether the description of `_prep_args_for_hash` says all that an op's answer depends on."""
    return fake.constant is None and fake.layout == torch.strided and not (fake.is_conj() or fake.is_neg())


def is_dry(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments is on fake tensors. It may come in the midst of a real one."""
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))


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
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_forget, no_backward))
        stack.enter_context(_FakeTensors(allow_non_fake_inputs=True))
        yield


@contextmanager
def dry_call(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Let ``model`` be called on fake tensors without a trace; see `dry_run`.

    Args:
        model: none of its hooks runs.
        kwargs: of the real call; what is yielded of them is to be made fake (`fake_batch`).
    """
    named = without_idle_mask(kwargs)
    packed = nullcontext() if holds_several_sequences(named) else one_sequence_each()
    with uninterrupted(), quietly(), hooks_off(model), packed, fakes_only():
        yield named


def check_device(device: torch.device) -> None:
    """Raise `ValueError` if PyTorch was built without such devices: a graph on one would end the process."""
    accelerator = torch.accelerator.current_accelerator()
    if device.type not in ("cpu", accelerator.type if accelerator is not None else "cpu"):
        raise ValueError(f"this build of PyTorch has no {device.type} devices")


def without_idle_mask(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without a mask that hides no token.

    transformers drops such a mask too, but cannot read that off a fake one. Waits for the device, once.
    """
    mask = kwargs.get(_MASK)
    idle = isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask.is_meta and bool(mask.all())
    return {**kwargs, _MASK: None} if idle else dict(kwargs)


def holds_several_sequences(kwargs: Mapping[str, Any]) -> bool:
    """Whether positions say that a row is packed from several sequences, which attention then keeps apart."""
    positions = kwargs.get(_POSITIONS)
    if not isinstance(positions, torch.Tensor) or positions.is_meta:
        return False
    return not bool((positions.diff(dim=-1) == 1).all())


def fake_batch(values: Any, device: torch.device) -> Any:
    """Return ``values`` with plain fake tensors in place of tensors. Call inside `fakes_only`.

    Args:
        values: any tree.
        device: of the fakes of tensors on ``meta``.
    """
    return tree_map_only(torch.Tensor, lambda tensor: _fake(tensor, device), values)


def fake_weights(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return fake tensors for the parameters and buffers, by name; tied ones appear once.

    Parameters are ``Parameter``s, by which their casts are known. Sharded and quantised ones become what they
    stand for: ``shape`` is the whole shape, ``dtype`` the one they compute in, which is the one that FSDP2
    gives those that it casts when it gathers them. A parameter of a class that is no wrapper (packed weights
    of bitsandbytes) is left out: its module reads more of it than shape and type.

    Args:
        model: any module. Call inside `fakes_only`.
        device: of the fakes of tensors on ``meta``.
    """
    weights, gathered = dict(model.named_parameters()), dict(_gathered_dtypes(model))
    state: dict[str, torch.Tensor] = {}
    for name, tensor in (weights | dict(model.named_buffers())).items():
        if not _is_its_data(tensor):
            continue
        dtype = gathered.get(name.rpartition(".")[0]) if name in weights else None
        shape = getattr(tensor, "ds_shape", tensor.shape)  # of a parameter that ZeRO-3 shards
        place, trained = _place(tensor, device), tensor.requires_grad
        state[name] = torch.empty(shape, dtype=dtype or tensor.dtype, device=place, requires_grad=trained)
        if name in weights:
            state[name]._is_param = True  # a Parameter, without one more op
    return state


@contextmanager
def expert_stand_ins(
    layers: Iterable[nn.Module], ran: Callable[[str, torch.Tensor, list[torch.Tensor]], None]
) -> Iterator[None]:
    """Replace the forward of routed experts.

    Which expert gets which token depends on data, so that fake tensors cannot run them. What they call around
    their grouped products is the gated activation; the stand-in calls it on tensors that it tells of first.

    Args:
        layers: in which the experts are.
        ran: called with the path of the experts' module inside its layer, what it received, and tensors that
            stand for its outputs.
    """
    changed: list[nn.Module] = []
    try:
        for layer in layers:
            for path, module in named_op_modules(layer):
                if path.rpartition(".")[2] == EXPERTS_MODULE and "forward" not in vars(module):
                    module.forward = _stand_in(partial(ran, path), getattr(module, "act_fn", None))
                    changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward


def _stand_in(
    ran: Callable[[torch.Tensor, list[torch.Tensor]], None], activation: nn.Module | None
) -> Callable[..., torch.Tensor]:
    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # in the graph, so that the nodes of what follows are counted
            output, *gated = (hidden.clone() for _ in range(1 if activation is None else 3))
        ran(hidden, [output, *gated])
        if activation is not None:
            _ = activation(gated[0]) * gated[1]
        return output

    return forward


@contextmanager
def quietly() -> Iterator[None]:
    """A model that cannot run on fake tensors raises an exception; PyTorch would also print its traceback."""
    own = logging.getLogger("torch._subclasses.fake_tensor")
    before, own.disabled = own.disabled, True
    try:
        yield
    finally:
        own.disabled = before


def example_batch(
    model: nn.Module, weights: Iterable[torch.Tensor], shape: tuple[int, int] = _EXAMPLE_SHAPE
) -> dict[str, Any]:
    """Return what a model is called with: of the kind that it takes, all zeros.

    Images and sounds have the size of the configuration: some models reject another.

    Args:
        model: to be called.
        weights: of it; the batch is on their device.
        shape: batch and sequence.
    """
    config: Any = getattr(model, "config", None)
    weight = next((weight for weight in weights if weight.is_floating_point()), torch.empty(0))
    ids = torch.zeros(shape, dtype=torch.long, device=weight.device)
    name, batch_size = str(getattr(model, "main_input_name", "input_ids")), shape[0]
    if name == "input_ids":
        batch: dict[str, Any] = {name: ids, "use_cache": False}
    elif name == "pixel_values":
        sizes = getattr(config, "image_size", _IMAGE_SIZE)
        height, width = sizes if isinstance(sizes, list | tuple) else (sizes, sizes)
        channels = getattr(config, "num_channels", 3)
        batch = {name: weight.new_zeros(batch_size, channels, height, width)}
    elif name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", _FRAMES)  # Whisper halves them
        batch = {name: weight.new_zeros(batch_size, getattr(config, "num_mel_bins", 80), frames)}
    else:
        batch = {name: weight.new_zeros(batch_size, _SAMPLES)}
    if getattr(config, "is_encoder_decoder", False) and name != "pixel_values":
        batch |= {"decoder_input_ids": ids, "use_cache": False}
    return batch


def _gathered_dtypes(model: nn.Module) -> Iterator[tuple[str, torch.dtype | None]]:
    """Yield, for each module, the dtype that FSDP2 gives its own parameters; ``None``: the one they have."""
    nearest: dict[str, torch.dtype | None] = {}
    for name, module in model.named_modules():
        dtype = nearest.get(name.rpartition(".")[0]) if name else None
        if hasattr(module, "_get_fsdp_state"):
            dtype = getattr(getattr(module._get_fsdp_state(), "_mp_policy", None), "param_dtype", None)
        nearest[name] = dtype
        yield name, dtype


def _fake(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    place = _place(tensor, device)
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
    return fake.requires_grad_(tensor.requires_grad)


def _place(tensor: torch.Tensor, device: torch.device) -> torch.device:
    return device if tensor.device.type == "meta" else tensor.device


def _is_its_data(tensor: object) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) or is_traceable_wrapper_subclass(tensor)


def no_backward(_nothing: None) -> torch.Tensor:
    """Stands for what autograd has not kept."""
    raise RuntimeError("a backward inside the recorded forward: nothing was saved for it")


def _forget(_tensor: torch.Tensor) -> None:
    """Autograd keeps nothing: no backward follows."""
