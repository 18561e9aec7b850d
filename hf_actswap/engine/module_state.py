"""Saves and restores what modules hold and a call of them reads beside its arguments, to run it again.

A program may change between a forward and its backward:

* **Weights** (an optimizer step too early). Autograd raises an error when it meets a saved tensor that was
  written in place. A module that runs again has saved none, so versions are compared here.
* **Hooks.** PEFT puts hooks on layers for one forward, by which they know their task or their adapter;
  others steer activations.
* **A key-value cache.** A module appends to the cache that it is given. Run again, it must find the cache as
  it was (prefix tuning; a call with ``use_cache``).
* **Attributes of modules**, and the modules in them: the active adapter, its scaling, ``training``, which
  parameters are trained. And what a forward counts or collects in them must not be counted twice; nor what
  it counts in the model around the piece, if its first call does so.
* **Buffers**, of the piece and of the model around it. A forward may write them (running statistics): run
  again, it must read the old values, and what it writes then is dropped.
* **Random numbers** of NumPy and of Python, and of generators that a module holds, that are globals beside
  its forward, or that its functions get in its first call.

All of these are restored for the time of the run, so that it is exact; what is written since and cannot be
restored (weights) is an error. The state of the process is `call_state`'s.
"""

from __future__ import annotations

import inspect
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as every_module
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..plan.generators import GeneratorState, default_states, held_generators, is_generator, state_of
from ..plan.opnames import function_name
from ..plan.program_state import put_back
from .hook_wrappers import ReplacedMethod
from .tickets import StaleTensorError

_Writable = tuple[dict[str, Any], str, torch.Tensor, int, torch.Tensor | None]
"""Where a tensor is that a call may write in place: place and name; the tensor, its version, and a copy."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = tuple(name for name in vars(nn.Module()) if name.startswith("_forward"))
_HOOKS_OF_ALL = tuple(
    hooks for name, hooks in vars(every_module).items() if name.startswith("_global_forward")
)
_MOST_ITEMS = 256
"""A longer container among the attributes of a module is data, and not what a call sets."""

_SMALL_BYTES = 2**16
_CONTAINERS = (list, dict, set, deque)
_ABSENT = object()


class ModuleFacts:
    """A module that runs again, all modules inside it, and what its calls have shown.

    Attributes:
        modules: the module, and those inside it.
        parametrizing: those of them that are PEFT's wrappers of a weight (`_set_to_themselves`).
        hooks: the dicts of the hooks around their forwards, and of those of all modules.
        layout: what each of them holds: attributes, weights, buffers and modules.
        written: the buffers, and tensors among the attributes, that a call has written in place, as (id of
            the place, name).
        outside: the buffers outside of the module that a call has written, by (id of the place, name).
        set_outside: the attributes outside of it that a first call has set, likewise.
        filled_outside: the lists, dicts and sets outside of it that a first call has changed, likewise.
        generators: generators of random numbers that its functions were given, beside the default ones.

    Args:
        around: the whole model.
    """

    def __init__(self, module: nn.Module, around: Surroundings) -> None:
        self._module, self.around = module, around
        self.modules: tuple[nn.Module, ...] = ()  # the first call looks
        self.parametrizing: list[Any] = []
        self.layout = _Layout(())
        self.held: list[Any] = []
        self._children: list[dict[str, nn.Module | None]] = []
        self.outside: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.set_outside: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.filled_outside: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self.written: set[tuple[int, str]] = set()
        self.generators: dict[int, torch.Generator] = {}
        self._modes: set[tuple[bool, ...]] = set()
        self._was_first = False

    def _look(self) -> None:
        self.modules = tuple(self._module.modules())
        self.parametrizing = [module for module in self.modules if _parametrizes(type(module))]
        self._children = [dict(module._modules) for module in self.modules]
        self.hooks: list[dict[int, Any]] = list(_HOOKS_OF_ALL)
        places: list[dict[str, Any]] = []
        self._sources: list[tuple[dict[str, Any], str]] = []
        self._containers: list[tuple[dict[str, Any], str, bool]] = []
        self._tensors: list[tuple[dict[str, Any], str]] = []
        for module in self.modules:
            own = vars(module)
            places += (own, module._parameters, module._buffers, module._modules)
            self.hooks += [own[name] for name in _HOOKS]
            self._tensors += [(module._buffers, name) for name in module._buffers]
            for name, value in own.items():
                if any(True for _ in held_generators(value)):
                    self._sources.append((own, name))
                if name not in _OF_EVERY_MODULE and isinstance(value, _CONTAINERS):
                    self._containers.append((own, name, any(_items_in(value))))
                elif isinstance(value, torch.Tensor):
                    self._tensors.append((own, name))
        self._sources += _global_generators({type(module) for module in self.modules})
        self.layout = _Layout(places)

    def begin_call(self) -> bool:
        """Return whether this is the first call with these modules inside, in their modes (`training`).

        ``held`` has afterwards what the modules hold.
        """
        if any(module._modules != known for module, known in zip(self.modules, self._children, strict=True)):
            self._modes.clear()
        first = self._training() not in self._modes
        held = self.layout.held()
        # With the first call attributes, and containers in them, may have come; later, names too.
        if first or self._was_first or held is None:
            self._look()
            self._modes.add(self._training())
            held = self.layout.held()
        self.held, self._was_first = held or [], first
        return first

    def _training(self) -> tuple[bool, ...]:
        return tuple([module.training for module in self.modules])

    def containers(self) -> Iterator[Any]:
        """Yield the lists, dicts and sets among the attributes, and in them, but those that are data."""
        for own, name, nests in self._containers:
            found = own.get(name)
            if isinstance(found, _CONTAINERS) and len(found) <= _MOST_ITEMS:
                yield found
                if nests:
                    yield from _items_in(found)
        for own, name in self.filled_outside.values():
            yield from _items_in((own.get(name),))

    def held_generators(self) -> Iterator[Any]:
        """Yield the generators that functions were given, and those among the attributes."""
        yield from self.generators.values()
        for own, name in self._sources:
            for one in held_generators(own.get(name)):
                if id(one) not in self.generators:
                    yield one

    def tensors(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """Yield what a call may write in place: buffers, tensors among attributes; with place and name."""
        for own, name in self._tensors:
            if isinstance(tensor := own.get(name), torch.Tensor):
                yield own, name, tensor

    def others(self, first: bool) -> Iterator[_Writable]:
        """Yield buffers outside of the module: of the first call all, then those that one has written."""
        own = {id(module._buffers) for module in self.modules} if first else set()
        buffers = self.around.buffers
        around = ((place, name) for place in buffers if id(place) not in own for name in place)
        for place, name in around if first else self.outside.values():
            if isinstance(tensor := place.get(name), torch.Tensor):
                yield place, name, tensor, tensor._version, tensor.detach().clone()


def _items_in(container: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the containers in a container, and in those to this depth; none that is data."""
    for item in container.values() if isinstance(container, dict) else container:
        if isinstance(item, _CONTAINERS) and len(item) <= _MOST_ITEMS:
            yield item
            yield from _items_in(item, depth - 1) if depth > 1 else ()


def _global_generators(classes: Iterable[type[nn.Module]]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where the globals of forwards' files are generators: a later call may be the first to use one."""
    found = (getattr(inspect.unwrap(kind.forward), "__globals__", {}) for kind in classes)
    for names in {id(names): names for names in found}.values():
        yield from ((names, name) for name, value in names.items() if is_generator(value))


class Surroundings:
    """The modules of a whole model: a call of one of its pieces may count or collect something in others.

    Attributes:
        buffers: the dicts in which they keep their buffers.

    Args:
        layers: a piece is taken not to set attributes in other layers than its own. Looking there too would
            make the first step of a large model longer by hundreds of milliseconds.
    """

    def __init__(self, root: nn.Module, layers: Iterable[nn.Module]) -> None:
        modules = list(root.modules())
        self.buffers = [module._buffers for module in modules if module._buffers]
        self._layers = {id(module): layer for layer in layers for module in layer.modules()}
        self._outside = [module for module in modules if id(module) not in self._layers]

    def held(self, piece: nn.Module) -> tuple[_Layout, list[Any], list[tuple[dict[str, Any], str, Any, Any]]]:
        """Return what the attributes around a piece are, and copies of the containers among them."""
        layer = self._layers.get(id(piece), piece)
        layout = _Layout([vars(module) for module in (*self._outside, *layer.modules())])
        values = layout.held() or []
        containers = [
            (place, name, one, one.copy())
            for place, name, value in zip(layout.of, layout.names, values, strict=True)
            if isinstance(value, _CONTAINERS)
            for one in _items_in((value,))
        ]
        return layout, values, containers


class _NotingGenerators(TorchFunctionMode):
    """Notes the generators that the functions of a call are given."""

    def __init__(self, called: CalledModule) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self._called.draws_from(kwargs.get("generator"))
        return func(*args, **kwargs)


class CalledModule:
    """One call of a module that will run again; make it when the call begins.

    Args:
        name: its name in messages.
        facts: the module, and what its earlier calls have shown.
        values: what it is called with and no ticket holds: tensors, tuples of tensors, key-value caches.
    """

    __slots__ = (
        *("_caches_before", "_containers", "_facts", "_first", "_generators", "_held", "_hooks"),
        *("_hooks_before", "_host", "_layout", "_modules", "_others", "_set_outside", "_tensors", "_trained"),
        *("_surroundings", "_values", "_versions", "name"),
    )

    def __init__(self, name: str, facts: ModuleFacts, values: Sequence[Any] = ()) -> None:
        self.name, self._facts, self._first = name, facts, facts.begin_call()
        self._modules = modules = facts.modules
        own = _set_to_themselves(facts.parametrizing)
        held: list[torch.Tensor] = [
            weight
            for module in modules
            for weight in module._parameters.values()
            if weight is not None and id(weight) not in own
        ]
        self._held = held
        self._trained = [weight.requires_grad for weight in held]
        self._hooks, self._hooks_before = facts.hooks, _filled(facts.hooks)
        caches: list[Any] = []
        for value in values:
            if isinstance(value, torch.Tensor):
                held.append(value)
            elif isinstance(value, tuple | list):
                held += [item for item in value if isinstance(item, torch.Tensor)]
            elif is_cache(value):
                caches += _places_in(value)
        self._versions = [tensor._version for tensor in held]
        self._caches_before = [(place, place.copy()) for place in caches]
        self._layout, self._values = facts.layout, facts.held
        self._containers = [(place, place.copy()) for place in facts.containers()]
        self._tensors = list(self._tensors_before())
        self._others = list(facts.others(self._first)) if self._first or facts.outside else []
        self._set_outside: list[tuple[dict[str, Any], str, Any]] = []
        for place, name in facts.set_outside.values():
            self._set_outside.append((place, name, _item(place, name)))
        self._surroundings = facts.around.held(self._modules[0]) if self._first else None
        self._generators = [(one, state_of(one)) for one in facts.held_generators()]
        self._host: list[GeneratorState] | None = default_states()

    def noting(self) -> AbstractContextManager[Any]:
        """Return the context in which the call runs: in a module's first one generators are noted."""
        if self._first:
            return _NotingGenerators(self)
        return nullcontext()

    def draws_from(self, generator: torch.Generator | None) -> None:
        """Note that a function of the call is given a generator, before it draws."""
        if generator is not None and id(generator) not in self._facts.generators:
            self._facts.generators[id(generator)] = generator
            self._generators.append((generator, state_of(generator)))

    def ends(self) -> None:
        """Note that the call has ended in forward: what it has written in place, and what it has drawn.

        Small tensors are restored anyhow: a later call may be the first that writes one, or use ``.data``. Of
        larger ones the first call compares values: a fused kernel writes running statistics without a new
        version. That waits for the device, once in each mode. Others must not write larger ones in between.
        """
        written, known = [], self._facts.written
        for place, name, tensor, version, copied in self._tensors:
            key, small = (id(place), name), _is_small(tensor)
            fused = self._first and not small and copied is not None and not torch.equal(tensor, copied)
            if tensor._version != version or fused:
                known.add(key)
            if key in known or (small and copied is not None):
                written.append((place, name, tensor, version, copied))
            else:
                self._held.append(tensor)
                self._versions.append(version)
        for item in self._others:
            place, name, tensor, version, _ = item
            if place.get(name) is not tensor or tensor._version != version:
                self._facts.outside[id(place), name] = place, name
                written.append(item)
        self._tensors, self._others = written, []
        if self._surroundings is not None:
            self._note_surroundings(*self._surroundings)
            self._surroundings = None
        if self._host is not None and _same_default_states(self._host):
            self._host = None

    def _note_surroundings(self, layout: _Layout, values: list[Any], containers: Iterable[Any]) -> None:
        """Note what a first call has set, or changed, in the modules around it."""
        own, facts = {id(vars(module)) for module in self._modules}, self._facts
        for place, name, before in layout.changed_since(values):
            if id(place) not in own and (id(place), name) not in facts.set_outside:
                facts.set_outside[id(place), name] = place, name
                self._set_outside.append((place, name, before))
        for place, name, container, items in containers:
            if id(place) not in own and not _same_items(container, items):
                facts.filled_outside[id(place), name] = place, name
                self._containers.append((container, items))

    def _tensors_before(self) -> Iterator[_Writable]:
        written = self._facts.written
        for place, name, tensor in self._facts.tensors():
            may_write = self._first or _is_small(tensor) or (id(place), name) in written
            copied = tensor.detach().clone() if may_write else None
            yield place, name, tensor, tensor._version, copied

    def check(self) -> None:
        """Raise `StaleTensorError` if something that it may read was written in place since the call."""
        for tensor, version in self._written():
            raise StaleTensorError(tensor.shape, version, tensor._version, self._name_of(tensor))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run with what the call read (see above); leave all as it is now.

        Raises:
            StaleTensorError: within the block, when it reads a weight that was written in place since.
        """
        changed: list[tuple[Any, Any]] = self._caches_before
        if (hooks_now := _filled(self._hooks)) != self._hooks_before:
            changed = [*changed, *((hooks, {}) for hooks, _ in hooks_now), *self._hooks_before]
        present = [(place, place.copy()) for place, _ in changed]
        written = self._written()
        try:
            for place, before in changed:
                put_back(place, before)
            with ExitStack() as undo:
                self._put_back(undo)
                undo.enter_context(_RejectingReads(written, self._name_of) if written else nullcontext())
                yield
        finally:
            for place, now in present:
                put_back(place, now)

    def _written(self) -> list[tuple[torch.Tensor, int]]:
        if [tensor._version for tensor in self._held] == self._versions:
            return []
        pairs = zip(self._held, self._versions, strict=True)
        return [(tensor, version) for tensor, version in pairs if tensor._version != version]

    def _put_back(self, undo: ExitStack) -> None:
        """Restore attributes, buffers and generators; ``undo`` puts the present ones back afterwards."""
        for weight, trained in zip(self._held, self._trained, strict=False):
            if weight.requires_grad != trained:
                undo.callback(weight.requires_grad_, weight.requires_grad)
                weight.requires_grad_(trained)
        if changed := self._layout.changed_since(self._values):
            _restore_items(changed, undo)
        for place, name, before in self._set_outside:
            undo.callback(_put_item, place, name, _item(place, name))
            _put_item(place, name, before)
        for place, items in self._containers:
            if not _same_items(place, items):
                undo.callback(put_back, place, place.copy())
                put_back(place, items)
        for place, name, tensor, version, copied in self._tensors:
            if copied is None:  # no call before has written it
                raise StaleTensorError(tensor.shape, version, tensor._version, f"{self.name}: {name}")
            undo.callback(place.__setitem__, name, place[name])
            place[name] = copied.clone()  # a graph that is kept runs it again
        for generator, (put, before) in self._generators:
            _, now = state_of(generator)
            undo.callback(put, now)
            put(before)
        if self._host is not None:
            for put, now in default_states():
                undo.callback(put, now)
            for put, before in self._host:
                put(before)

    def _name_of(self, tensor: torch.Tensor) -> str:
        for name, weight in self._modules[0].named_parameters():
            if weight is tensor:
                return f"{self.name}: the weight {name}"
        names = (name for _, name, held in self._facts.tensors() if held is tensor)
        return f"{self.name}: {next(names, 'an argument')}"


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether a copy of a tensor costs next to nothing, and misses nothing of it."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    return plain and tensor.nbytes <= _SMALL_BYTES


def _filled(hooks: Iterable[dict[int, Any]]) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Return those dicts that have hooks, each with a copy: nearly all are empty."""
    return [(own, own.copy()) for own in hooks if own]


class _Layout:
    """Where modules hold what their calls read: in which dicts, under which names of the program's own.

    A call notes the values as one flat list, and its run in backward compares them in one go: hundreds of
    small dicts, copied for each call, would take the host longer than many a layer.
    """

    def __init__(self, places: Sequence[dict[str, Any]]) -> None:
        named = [(place, name) for place in places for name in dict.keys(place)]
        named = [(place, name) for place, name in named if name not in _OF_EVERY_MODULE]
        self._places, self._sizes = places, list(map(len, places))
        self.of, self.names = [place for place, _ in named], [name for _, name in named]

    def held(self) -> list[Any] | None:
        """Return the values under all names; ``None``: there are other names now."""
        if list(map(len, self._places)) != self._sizes:
            return None
        try:
            # Not as DeepSpeed's dict of a module's weights does it, which gathers what it is asked for.
            return list(map(dict.__getitem__, self.of, self.names))
        except KeyError:
            return None

    def changed_since(self, held: Sequence[Any]) -> list[tuple[dict[str, Any], str, Any]]:
        """Return where the program's own values are not the very ones of ``held``, which come third."""
        now = self.held()
        if now is not None:
            if all(map(operator.is_, now, held)):
                return []
            pairs: Iterable[Any] = zip(self.of, self.names, held, now, strict=True)
        else:
            before: dict[int, dict[str, Any]] = {id(place): {} for place in self._places}
            for place, name, value in zip(self.of, self.names, held, strict=True):
                before[id(place)][name] = value
            pairs = (
                (place, name, before[id(place)].get(name, _ABSENT), _item(place, name))
                for place in self._places
                for name in before[id(place)] | dict(dict.items(place))
            )
        return [
            (place, name, one)
            for place, name, one, other in pairs
            if one is not other and _is_programs_own(name, one) and _is_programs_own(name, other)
        ]


def _restore_items(changed: Sequence[tuple[dict[str, Any], str, Any]], undo: ExitStack) -> None:
    """Put values back under their names; ``undo`` puts the present ones back."""
    for place in {id(place): place for place, *_ in changed}.values():
        undo.callback(put_back, place, dict(dict.items(place)))
    for place, name, value in changed:
        _put_item(place, name, value)


def _item(place: dict[str, Any], name: str) -> Any:
    return dict.get(place, name, _ABSENT)


def _put_item(place: dict[str, Any], name: str, value: Any) -> None:
    if value is not _ABSENT:
        place[name] = value
    else:
        place.pop(name, None)


def _is_programs_own(name: str, value: Any) -> bool:
    """Whether the program sets a value itself: not a wrapper of this package, nor FSDP2 a sharded weight."""
    return name not in _OF_EVERY_MODULE and not isinstance(value, ReplacedMethod | DTensor)


def _same_items(now: Any, before: Any) -> bool:
    """Whether two lists, or dicts, hold the very same items in the same order."""
    if len(now) != len(before) or not all(map(operator.is_, now, before)):
        return False
    return not isinstance(now, dict) or all(map(operator.is_, now.values(), before.values()))


def _same_default_states(before: Sequence[GeneratorState]) -> bool:
    (_, python), (_, one) = before
    (_, python_now), (_, now) = default_states()
    return python == python_now and one[2] == now[2] and bool((one[1] == now[1]).all())


def _set_to_themselves(wrappers: Iterable[Any]) -> set[int]:
    """Return the ids of frozen weights whose versions grow in each call, though no value changes.

    With ``LoraConfig(target_parameters=...)`` PEFT wraps the weights of experts. For the time of a call the
    wrapper puts a parametrization on its weight, and PyTorch sets the weight to itself then, in place.
    """
    found: set[int] = set()
    for wrapper in wrappers:
        weight = wrapper.get_base_layer()._parameters.get(wrapper.parameter_name)
        if weight is not None and not weight.requires_grad:
            found.add(id(weight))
    return found


def _parametrizes(kind: type[nn.Module]) -> bool:
    return hasattr(kind, "get_param") and hasattr(kind, "get_base_layer")


class _RejectingReads(TorchFunctionMode):
    """Raises an error where a tensor is read that was written in place: by a function, or by its own module.

    What is never read may be written: the weights of an adapter that is switched off.
    """

    def __init__(
        self, written: Iterable[tuple[torch.Tensor, int]], name_of: Callable[[torch.Tensor], str]
    ) -> None:
        super().__init__()
        self._written, self._name_of = {id(tensor): (tensor, version) for tensor, version in written}, name_of

    def __enter__(self) -> _RejectingReads:
        self._handle = every_module.register_module_forward_pre_hook(self._enters)  # for custom functions
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        self._handle.remove()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function_name(func) is not None:
            self._reject(tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))

    def _enters(self, module: nn.Module, _args: Any) -> None:
        self._reject(module._parameters.values())

    def _reject(self, values: Iterable[Any]) -> None:
        for value in values:
            if id(value) in self._written:
                tensor, version = self._written[id(value)]
                raise StaleTensorError(tensor.shape, version, tensor._version, self._name_of(tensor))


def is_cache(value: Any) -> bool:
    """Whether a value is a key-value cache of transformers, which this package does not import."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _places_in(cache: Any) -> Iterator[Any]:
    """Yield the dicts and lists in which a cache holds its tensors: its own, and those of its layers."""
    yield vars(cache)
    for value in vars(cache).values():
        if isinstance(value, dict):
            yield value
        elif isinstance(value, list):
            yield value
            for layer in value:
                if hasattr(layer, "__dict__"):
                    yield vars(layer)
        elif is_cache(value):
            yield from _places_in(value)
