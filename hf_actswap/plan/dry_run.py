"""A dry run: one call of a model on fake tensors, without hooks, kernels or compilation.

The model is already set up for training, so the call must not have side effects. A hook may gather sharded
weights (FSDP2 keeps what it gathers: fake tensors would stay in the model for good) or count its calls. A
Triton kernel that is given the address of a fake tensor would run on address 0, which ends the CUDA context.
A forward may also write to its model (BigBird replaces its attention for short sequences, a rotary embedding
keeps the longest length that it has seen, a router its last logits): all of that is put back.

`exchanged` calls a module with other tensors in the place of its weights. `torch.func.functional_call` goes
by names, and a module at two paths (``model.alias = model.embed_tokens``) has two names for one place: what
it finds there by the second name is the stand-in, which it puts back at the end. `exchanged` goes by places:
each is filled and put back once.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ..interrupts import uninterrupted
from .gathered import gathered_dtypes
from .generators import default_states, held_generators, state_of
from .op_facts import READS_DEVICE
from .opnames import EXPERTS_MODULE
from .program_state import MAPPINGS, SEQUENCES, is_programs_own, program_unchanged, put_back
from .wrappers import named_op_modules

PART_OF_THE_MODEL = "part_of_the_model"
"""Attribute of hooks that stay on in a dry run, because a patched model does not compute without them. Their
state, and that of the objects with this attribute that they share, belongs to the model's."""


def is_part_of_the_model(hook: Any) -> bool:  # or a method of an object that is
    return hasattr(hook, PART_OF_THE_MODEL) or hasattr(getattr(hook, "__self__", None), PART_OF_THE_MODEL)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore at the end the attributes of all modules, the containers in them, and the configurations.

    So is the state of hooks that are a part of the model: what they have set in modules must agree with it;
    and what is outside of modules, as far as `program_state` says.
    Containers (dicts, lists, sets) stay the same objects. Of tensors and other objects only the references
    are restored, not what is inside them. Fake tensors draw nothing from PyTorch's default generators; a
    model's code (stochastic depth) may draw from those of Python and NumPy, and from its own, which are
    restored too.
    """
    before = [(place, place.copy()) for place in _places(model)]
    own = (one for _, contents in before for held in _values(contents) for one in held_generators(held))
    states = [*default_states(), *map(state_of, own)]
    try:
        with program_unchanged(model):
            yield
    finally:
        for put, state in states:
            put(state)
        for place, contents in before:
            put_back(place, contents)


def _places(model: nn.Module) -> Iterator[Any]:
    """Yield each dict of attributes and each container that can be reached from the model, once."""
    seen: set[int] = set()
    waiting: list[Any] = list(model.modules())
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind in MAPPINGS:
            held: Iterable[Any] = value.values()
        elif kind in SEQUENCES or kind in (tuple, set):
            held = value
        elif kind is MethodType:  # a hook of an object with state
            waiting.append(value.__self__)
            continue
        elif isinstance(value, nn.Module) or _is_restored(value):
            value = vars(value)
            held = value.values()
        else:
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if kind is not tuple:
            yield value
        waiting += held


def _values(contents: Any) -> Iterable[Any]:
    return contents.values() if isinstance(contents, dict) else contents


def _is_restored(value: Any) -> bool:
    """Whether an object's attributes are restored: a configuration of transformers, the program's own."""
    kind = type(value)
    configuration = isinstance(getattr(kind, "model_type", None), str)
    if configuration or hasattr(kind, PART_OF_THE_MODEL):
        return True
    return type(getattr(value, "__dict__", None)) is dict and is_programs_own(kind.__module__)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_TRANSFORMERS = frozenset({"transformers.utils.output_capturing", "transformers.modeling_utils"})
"""Modules of transformers whose hooks stay: a forward reads what they collect (router logits)."""

_NO_ADDRESS = "fake_tensor_allow_unsafe_data_ptr_access"

_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_VIEW, _UNSAFE_VIEW = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default
_PLAIN = frozenset({int, float, bool, type(None), torch.dtype, torch.device, torch.layout})
"""Types of arguments that go into the key of PyTorch's cache as they are."""

_EXAMPLE_SHAPE = (2, 8)
"""(batch, sequence); a batch of one would take shortcuts that larger ones do not (``expand``, ``matmul``)."""

_IMAGE_SIZE, _FRAMES, _SAMPLES = 224, 1500, 16_000
"""Sizes of examples if the model's configuration gives none: side of an image in pixels, frames of a
spectrogram, samples of a second of sound."""


@contextmanager
def hooks_off(model: nn.Module) -> Iterator[None]:
    """Take off the hooks of all modules, and the global module hooks; put them back in order at the end.

    The dictionaries stay the same objects, so that handles given out earlier still remove their hooks. A hook
    that the model itself registers meanwhile is removed; `unchanged` removes the mark that it did.
    """
    # By `vars`: a compiled module answers for the one inside it when asked by name.
    places = [hooks for module in model.modules() for name in _HOOKS if (hooks := vars(module)[name])]
    places += [vars(module_hooks)[f"_global{name}"] for name in _HOOKS]
    # By identity: regional compilation makes copies of modules that share their dictionaries.
    saved = [(hooks, dict(hooks)) for hooks in {id(hooks): hooks for hooks in places}.values()]
    try:
        for hooks, before in saved:
            for number, hook in before.items():
                of_transformers = getattr(hook, "__module__", None) in _HOOKS_OF_TRANSFORMERS
                if not of_transformers and not is_part_of_the_model(hook):
                    del hooks[number]
        yield
    finally:
        for hooks, before in saved:
            hooks.clear()
            hooks.update(before)


@contextmanager
def assume_unpacked_rows() -> Iterator[None]:
    """Tell transformers that no row is packed from several sequences; it cannot read that from fake tensors.

    It would build an attention mask to be safe, with which attention repeats keys and values for their groups
    of heads: ops and autograd nodes that a forward in training does not have.
    """
    names = getattr(sys.modules.get("transformers.masking_utils"), "__dict__", {})
    ask = names.get("find_packed_sequence_indices")
    if ask is None:
        yield
        return
    names["find_packed_sequence_indices"] = lambda *_args, **_kwargs: None
    try:
        yield
    finally:
        names["find_packed_sequence_indices"] = ask


_CPU = torch.device("cpu")
_MOST_VALUES = 2**20
"""The most elements of a tensor of which a dry run knows the values."""

_MADE_OF_NUMBERS = frozenset(
    (
        *(torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step),
        *(torch.ops.aten.full.default, torch.ops.aten.zeros.default, torch.ops.aten.ones.default),
        *(torch.ops.aten.linspace.default, torch.ops.aten.scalar_tensor.default, torch.ops.aten.eye.default),
    )
)
_INDEX, _MASKED_SELECT = torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default
_LIFT = torch.ops.aten.lift_fresh.default
_DEPENDS_ON_VALUES = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)


class _KnownValues:
    """The values of a dry run's small tensors, where they follow from numbers and the batch's whole numbers.

    Models that see or hear read the sizes of images and sounds, count the tokens that stand for them, and
    make indices of all this. A fake tensor has its values, a tensor on the CPU, as an attribute. An op on
    such tensors alone is computed too; views are views of the values, and see what is written through others.
    """

    def __init__(self) -> None:
        self._lost: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: Any) -> torch.Tensor | None:
        if not _is_real(tensor):
            values: torch.Tensor | None = getattr(tensor, "known_values", None)
        else:
            values = tensor if tensor.device == _CPU and tensor.numel() <= _MOST_VALUES else None
        if values is None or values.untyped_storage().data_ptr() in self._lost:
            return None
        return values

    def arguments(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """Return an op's arguments with values in place of tensors; ``None``: some are not known."""
        first: Any = args[0] if args else None
        if func is _LIFT and _is_real(first) and first.numel() <= _MOST_VALUES:  # by `torch.tensor`
            return (first.cpu(),), {}
        schema = getattr(func, "_schema", None)  # operators of higher order have none
        if schema is None or (isinstance(first, torch.Tensor) and self.of(first) is None):
            return None
        flat, spec = tree_flatten((args, dict(kwargs)))
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        known = [values for tensor in tensors if (values := self.of(tensor)) is not None]
        # What is written to a real tensor, or through a view of one, is written to its fake.
        alias = any(one.alias_info is not None for one in (*schema.arguments, *schema.returns))
        depends = alias and any(map(_is_real, tensors))
        depends = depends or torch.Tag.nondeterministic_seeded in func.tags or len(known) < len(tensors)
        if depends or not (tensors or func in _MADE_OF_NUMBERS):
            for values in known if schema.is_mutable else ():
                self._lost[values.untyped_storage().data_ptr()] = values.untyped_storage()
            return None
        here = [_CPU if isinstance(leaf, torch.device) else leaf for leaf in flat]
        return tree_unflatten([self.of(x) if isinstance(x, torch.Tensor) else x for x in here], spec)

    def indices_of(self, mask: Any) -> tuple[torch.Tensor, ...] | None:
        """Return what a mask selects; ``None``: it is no mask, or its values are not known."""
        values = self.of(mask)
        return None if values is None or values.dtype != torch.bool else values.nonzero(as_tuple=True)


class _FakeTensors(FakeTensorMode):
    """PyTorch's fake tensor mode, in two thirds of the time, and with answers for ``bincount`` and ``rand``.

    PyTorch caches the result of each op, and spends most of a dry run on describing the arguments for the
    cache's key: the description here is shorter. PyTorch does not cache ``_unsafe_view`` (one in each linear
    layer), which below autograd is the same as ``view``.

    Args:
        real_as: where real tensors are taken to be that an op meets (the scales of bitsandbytes' weights, a
            tensor in a closure). ``None``: where they are.
    """

    stands_for: int
    """For how many runs of an op one run stands now (`standing_for`)."""

    def __init__(self, real_as: torch.device | None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._real_as, self.known = real_as, _KnownValues()
        self.stands_for = 1

    def validate_and_convert_non_fake_tensors(
        self, func: Any, converter: Any, flat_args: Sequence[object], args_spec: Any
    ) -> tuple[list[object], list[FakeTensor]]:
        made, fakes = super().validate_and_convert_non_fake_tensors(func, converter, flat_args, args_spec)
        if self._real_as is not None:
            for given, fake in zip(flat_args, made, strict=True):
                if given is not fake and isinstance(fake, FakeTensor):
                    fake.fake_device = self._real_as
        return made, fakes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch's own method, called below, does; doing it twice costs time at each op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READS_DEVICE:
            return args[0].device
        if func in (_INDEX, _MASKED_SELECT):
            func, args = self._without_masks(func, args)
        given = self.known.arguments(func, args, kwargs or {})
        try:
            found = self._fake(func, types, args, kwargs)
        except _DEPENDS_ON_VALUES:
            if given is None:
                raise
            computed = func(*given[0], **given[1])
            device = next((leaf.device for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)), _CPU)
            return tree_map_only(torch.Tensor, partial(self._of_values, device=device), computed)
        leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, FakeTensor)]  # none of `item()`
        if given is not None and (
            func._schema.is_mutable or sum(map(torch.Tensor.numel, leaves)) <= _MOST_VALUES
        ):
            computed = func(*given[0], **given[1])
            tensors = (leaf for leaf in tree_leaves(computed) if isinstance(leaf, torch.Tensor))
            for fake, values in zip(leaves, tensors, strict=True):
                fake.known_values = values  # type: ignore[attr-defined]
        return found

    def _of_values(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        with self:
            made = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=device)
        made.known_values = values  # type: ignore[attr-defined]
        return made

    def _without_masks(self, func: Any, args: Any) -> tuple[Any, Any]:
        """Return an op that selects by masks, and its arguments, with indices in place of known masks."""
        tensor, masks = args[0], args[1] if func is _INDEX else [args[1]]
        if func is _MASKED_SELECT and masks[0].shape != tensor.shape:
            return func, args
        selected = [self.known.indices_of(mask) for mask in masks]
        if all(one is None for one in selected):
            return func, args
        indices: list[Any] = []
        for mask, one in zip(masks, selected, strict=True):
            indices += [mask] if one is None else [self._of_values(index, tensor.device) for index in one]
        return _INDEX, (tensor, indices)

    def _fake(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # The balancing losses of transformers up to 5.17 count tokens per expert with `bincount` and a
        # `minlength`, of which there are then that many; in general the number depends on the values.
        if func is torch.ops.aten.bincount.default:
            given = dict(zip(("self", "weights", "minlength"), args, strict=False)) | (kwargs or {})
            weights, count = given.get("weights"), given.get("minlength", 0)
            if count > 0:
                with self:
                    dtype = torch.long if weights is None else weights.dtype
                    return torch.empty(count, dtype=dtype, device=given["self"].device)
        schema = getattr(func, "_schema", None)  # operators of higher order have none
        if schema is not None and schema.is_mutable and any(_is_real(arg) for arg in args):
            # Else PyTorch's `add_` and `sub_` of a number write into a real tensor.
            flat, spec = tree_flatten((args, kwargs or {}))
            converter = self.fake_tensor_converter
            flat, _ = self.validate_and_convert_non_fake_tensors(func, converter, flat, spec)
            args, kwargs = tree_unflatten(flat, spec)
        found: Any = super().__torch_dispatch__(_VIEW if func is _UNSAFE_VIEW else func, types, args, kwargs)
        # Encoders and decoders of transformers up to 5.17 compare such a number with `layerdrop`.
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


def of_numbers(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what one of `READS_NUMBERS` does with fake tensors, whose data it would read, or one by one."""
    if func is torch.tensor and args and type(args[0]) in (list, tuple):
        args = tree_map_only(FakeTensor, torch.Tensor.item, args[0]), *args[1:]
    elif func is torch.Tensor.tolist and is_of_dry_run(args[0]):
        values = args[0].fake_mode.known.of(args[0])
        if values is not None:
            with _disable_current_modes():
                return values.tolist()
    return func(*args, **kwargs)


READS_NUMBERS = frozenset((torch.tensor, torch.Tensor.tolist))


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)


def _is_described(fake: FakeTensor) -> bool:
    return fake.constant is None and fake.layout == torch.strided and not (fake.is_conj() or fake.is_neg())


@contextmanager
def standing_for(tensor: torch.Tensor, count: int) -> Iterator[None]:
    """Let what runs in the block on a dry run's tensors stand for ``count`` runs of it (`times_run`)."""
    mode: _FakeTensors = tensor.fake_mode  # type: ignore[attr-defined]
    around, mode.stands_for = mode.stands_for, mode.stands_for * count
    try:
        yield
    finally:
        mode.stands_for = around


def is_of_dry_run(tensor: torch.Tensor) -> bool:
    """Whether this is one of the fake tensors of `fakes_only`."""
    return isinstance(getattr(tensor, "fake_mode", None), _FakeTensors)


def times_run(args: tuple[Any, ...], result: Any) -> int:
    """Return for how many runs an op's run in a dry run stands, given its arguments and its result."""
    modes = (getattr(leaf, "fake_mode", None) for leaf in tree_leaves((args, result)))
    return next((mode.stands_for for mode in modes if isinstance(mode, _FakeTensors)), 1)


def is_dry(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call with these arguments is on fake tensors. Such a call may come within a real one."""
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))


@contextmanager
def fakes_only(real_as: torch.device | None = None) -> Iterator[None]:
    """Make tensors fake, without an address; autograd creates its nodes, but they save nothing.

    Real tensors that an op meets are taken to be on ``real_as``; ``None``: where they are.

    Ctrl-C waits until the end: PyTorch also calls fake tensors from C++ code that may not throw, where an
    interrupt would end the process (``terminate called after throwing an instance of 'python_error'``).
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
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda _tensor: None, no_backward))
        stack.enter_context(_own_parametrized())
        stack.enter_context(_own_parameters())
        stack.enter_context(_no_launches())
        stack.enter_context(_FakeTensors(real_as))
        yield


@contextmanager
def _no_launches() -> Iterator[None]:
    """Let a Triton kernel that is given fake tensors read each of them once, in place of its launch.

    That takes as long as a kernel that reads or writes each once. Triton asks for addresses, which they have
    none of, and its tuner for times.
    """
    with ExitStack() as undo:
        for module, name in (("jit", "JITFunction"), ("autotuner", "Autotuner")):
            kind: Any = getattr(sys.modules.get(f"triton.runtime.{module}"), name, None)
            if kind is not None:
                undo.callback(setattr, kind, "run", kind.run)
                kind.run = _read_if_fake(kind.run)
        yield


def _read_if_fake(launch: Callable[..., Any]) -> Callable[..., Any]:
    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        fakes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        if not fakes:
            return launch(kernel, *args, **kwargs)
        with torch.no_grad(), torch._C.DisableTorchFunction():  # no op of the model's: it has no name there
            for fake in fakes:
                fake.sum()
        return None

    return run


@contextmanager
def _own_parametrized() -> Iterator[None]:
    """Keep apart what `torch.nn.utils.parametrize.cached` holds: a fake weight is none for the real call."""
    held, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = held


@contextmanager
def _own_parameters() -> Iterator[None]:
    """Take parameters of classes of their own (bitsandbytes' ``Params4bit``) for parameters.

    As PyTorch does from 2.13 on. Before, an op on one of them said that no mode can run it.
    """
    is_other = fake_tensor._check_for_subclass_arg

    def is_subclass(x: object) -> bool:
        own = isinstance(x, nn.Parameter) and type(x).__torch_dispatch__ is _NO_DISPATCH
        return not own and is_other(x)

    fake_tensor._check_for_subclass_arg = is_subclass
    try:
        yield
    finally:
        fake_tensor._check_for_subclass_arg = is_other


@contextmanager
def dry_call(
    model: nn.Module, kwargs: Mapping[str, Any], real_as: torch.device | None = None
) -> Iterator[dict[str, Any]]:
    """Prepare a call of ``model`` on fake tensors: its hooks are off, and nothing is compiled.

    What the call changes in the model is put back (`unchanged`). Yields the real call's arguments ``kwargs``
    without an idle mask; the caller makes their tensors fake (`fake_batch`).
    """
    named = without_idle_mask(kwargs)
    packed = nullcontext() if holds_several_sequences(named) else assume_unpacked_rows()
    with uninterrupted(), silenced_log(), unchanged(model), hooks_off(model), packed, fakes_only(real_as):
        yield named


@contextmanager
def small_real_call(model: nn.Module) -> Iterator[None]:
    """Prepare a call of ``model`` on real tensors that stands for a dry one: autograd saves nothing.

    For models whose code cannot run on fake tensors. Hooks are off, nothing is compiled, and attributes (the
    values of tensors too), buffers and the default generators of random numbers are as before at the end.
    """
    used = {tensor.device for tensor in (*model.parameters(), *model.buffers())} - {torch.device("cpu")}
    kinds = {device.type: [one for one in used if one.type == device.type] for device in used}
    attributes = (value for module in model.modules() for value in vars(module).values())
    tensors = (value for value in attributes if isinstance(value, torch.Tensor))
    kept = [(tensor, tensor.detach().clone()) for tensor in (*model.buffers(), *tensors)]
    with uninterrupted(), unchanged(model), hooks_off(model), assume_unpacked_rows(), ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.random.fork_rng([]))
        for kind, devices in kinds.items():
            stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda _tensor: None, no_backward))
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)


def set_to_train(model: nn.Module) -> None:
    """Let a model that is in evaluation mode run as in training, within a context that restores it.

    transformers loads models in evaluation mode, and a trainer changes it when it trains. ``train()`` is not
    called: some models change their weights in it.
    """
    if not model.training:
        for module in model.modules():
            module.training = True


def check_device(device: torch.device) -> None:
    """Raise `ValueError` if PyTorch was built without such devices: autograd on one would end the process."""
    accelerator = torch.accelerator.current_accelerator()
    if device.type not in ("cpu", accelerator.type if accelerator is not None else "cpu"):
        raise ValueError(f"this build of PyTorch has no {device.type} devices")


def named_arguments(root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's call by name, without those that are ``None``."""
    named = dict(zip(inspect.signature(root.forward).parameters, args, strict=False)) | dict(kwargs)
    return {name: item for name, item in named.items() if item is not None}


def without_idle_mask(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without a mask that hides no token, as transformers, which cannot read a fake one.

    Synchronises with the device once.
    """
    mask = kwargs.get("attention_mask")
    idle = isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask.is_meta and bool(mask.all())
    return {**kwargs, "attention_mask": None} if idle else dict(kwargs)


def holds_several_sequences(kwargs: Mapping[str, Any]) -> bool:
    """Whether ``position_ids`` say that a row is packed from several sequences, which attention separates."""
    positions = kwargs.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.is_meta:
        return False
    return not bool((positions.diff(dim=-1) == 1).all())


def fake_batch(values: Any, device: torch.device) -> Any:
    """Return a pytree with fake tensors in place of tensors, those on ``meta`` on ``device``."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        place, strides = _place(tensor, device), tensor.stride()
        made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=place)
        return made.requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, fake, values)


def know_values(fakes: Any, real: Any) -> None:
    """Let a dry run know the values of small tensors of whole numbers, for which ``fakes`` stand.

    Those on ``meta`` have none. ``real`` is a pytree of the same form.
    """
    with _disable_current_modes():
        for fake, tensor in zip(tree_leaves(fakes), tree_leaves(real), strict=True):
            if not isinstance(fake, FakeTensor) or tensor.is_meta or isinstance(tensor, FakeTensor):
                continue
            if not tensor.is_floating_point() and tensor.numel() <= _MOST_VALUES:
                fake.known_values = tensor.detach().cpu().clone()  # type: ignore[attr-defined]


def fake_weights(model: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Return fake tensors for the parameters and buffers, by name; tied ones appear once.

    Call inside `fakes_only`. Fakes of parameters count as ``Parameter``, so that autocast's casts of them are
    recognised. The fake of a sharded or quantised parameter has the whole shape, and the dtype that the
    parameter computes in; if FSDP2 casts parameters when it gathers them, that dtype. A parameter of a class
    that is no wrapper (packed weights of bitsandbytes) is left out: its module reads more of it than shape
    and dtype.

    Fakes of tensors on ``meta`` are on ``device``. Weights that wait on the host while the rest of the model
    is on an accelerator are taken to be there too: that is where their layer finds them.
    """
    first = next((weight.device for weight in model.parameters() if not weight.is_meta), device)
    weights, gathered = dict(model.named_parameters()), dict(gathered_dtypes(model))
    state: dict[str, torch.Tensor] = {}
    for name, tensor in (weights | dict(model.named_buffers())).items():
        if not _is_its_data(tensor):
            continue
        dtype = gathered.get(name.rpartition(".")[0]) if name in weights else None
        shape = getattr(tensor, "ds_shape", tensor.shape)  # of a parameter that ZeRO-3 shards
        place, trained = _place(tensor, device), tensor.requires_grad
        if place.type == "cpu" and name in weights:
            place = first
        state[name] = torch.empty(shape, dtype=dtype or tensor.dtype, device=place, requires_grad=trained)
        if name in weights:
            state[name]._is_param = True  # a Parameter, without one more op
    return state


@contextmanager
def expert_stand_ins(
    layers: Iterable[nn.Module], ran: Callable[[str, torch.Tensor, list[torch.Tensor]], None]
) -> Iterator[None]:
    """Replace the forward of routed experts by one that fake tensors can run.

    Which expert gets which token depends on data, so fake tensors cannot run the experts. Beside their
    grouped matrix products they call the gated activation. The stand-in calls only that, on new tensors.
    Before, it calls ``ran`` with the path of the experts' module inside its layer, the hidden states that it
    received, and the new tensors: its output, and the two inputs of the activation.
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
def silenced_log() -> Iterator[None]:
    """Silence PyTorch, which logs the traceback of an error on fake tensors that it also raises."""
    own = logging.getLogger("torch._subclasses.fake_tensor")
    before, own.disabled = own.disabled, True
    try:
        yield
    finally:
        own.disabled = before


def example_batch(
    model: nn.Module, weights: Iterable[torch.Tensor], shape: tuple[int, int] = _EXAMPLE_SHAPE
) -> dict[str, Any]:
    """Return keyword arguments for a call of a model: ids, pixels or sounds, as it takes them, all zeros.

    They are on the device of ``weights``, of (batch size, sequence length) ``shape``. Images and sounds have
    the size that the model's configuration gives: some models reject another.
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
    return _as_taken(model, name, batch)


def _as_taken(model: nn.Module, name: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch without ``use_cache`` for a forward that does not take it, and with its input's name."""
    parameters = inspect.signature(model.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return batch
    if name not in parameters and (first := next(iter(parameters), None)) is not None:
        batch = {first: batch[name], **{other: value for other, value in batch.items() if other != name}}
    return {other: value for other, value in batch.items() if other != "use_cache" or other in parameters}


def _place(tensor: torch.Tensor, device: torch.device) -> torch.device:
    return device if tensor.device.type == "meta" else tensor.device


def _is_its_data(tensor: object) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) or is_traceable_wrapper_subclass(tensor)


def no_backward(_nothing: None) -> torch.Tensor:
    """Unpack hook for tensors that were not kept: there is nothing to run a backward with."""
    raise RuntimeError("a backward inside the recorded forward: nothing was saved for it")


@contextmanager
def exchanged(module: nn.Module, named: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Put other tensors in the place of parameters and buffers; put the module's own back at the end.

    A tensor that is in several places (tied weights, a module at two paths) is replaced in all of them. At
    the end each of these places has the tensor from before, whatever the calls inside have put there.
    ``named``: the tensors, by one name of each parameter or buffer.
    """
    instead = {id(_tensor_at(module, name)): tensor for name, tensor in named.items()}
    before = [
        (place, name, tensor)
        for inner in module.modules()
        for place in _weight_places(inner)
        for name, tensor in place.items()
        if tensor is not None and id(tensor) in instead
    ]
    try:
        for place, name, tensor in before:
            place[name] = instead[id(tensor)]
        yield
    finally:
        with uninterrupted():
            for place, name, tensor in before:
                place[name] = tensor


def _weight_places(module: nn.Module) -> tuple[dict[str, torch.Tensor | None], ...]:
    own = vars(module)  # a compiled module answers for the one inside it when asked by name
    return own.get("_parameters", {}), own.get("_buffers", {})


def _tensor_at(module: nn.Module, name: str) -> torch.Tensor:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    for place in _weight_places(owner):
        if (held := place.get(last)) is not None:
            return held
    raise AttributeError(f"{type(owner).__name__} has no parameter or buffer {name!r}")
