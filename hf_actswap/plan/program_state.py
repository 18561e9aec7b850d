"""State of a program outside of its model's modules, which a call of the model may change.

A dry run executes the model's code on fake tensors, and what that code leaves behind would meet real ones: a
table of positions in a `functools.lru_cache` (BEiT, DINOv3), in a dict or a global of a file, in an attribute
of a class. And it may count: a counter that a forward raises has counted a forward that did not take place.

* **Files**: those in which the classes of the modules are written, those of the functions that these files
  name, and so on. Files of PyTorch, NumPy, Python and this package are left out.
* **Fake tensors** are taken out of all of them again, and out of the classes.
* **Numbers, tensors, containers and generators** of random numbers get their values back where code of the
  model mentions their names, in files, classes and functions that are not installed as a library is: the
  program's own. A library may have loaded something meanwhile, and keeps it. What only other code mentions
  stays as it is: a thread may be filling it.
* **Caches of functions** that hold fake tensors are emptied.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .generators import held_generators, state_of

MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
SEQUENCES = (list, deque)

_CONTAINERS = (*MAPPINGS, *SEQUENCES, set)
_CACHE = functools._lru_cache_wrapper
PACKAGE = __name__.partition(".")[0]
"""The name of this package, by which its own classes and functions are told from a program's."""
_LEFT_OUT = frozenset({"torch", "numpy", PACKAGE, *sys.stdlib_module_names})
_LIBRARIES = ("site-packages", "dist-packages")
_MOST_ITEMS = 10_000
"""A longer container is data: it is neither copied nor searched."""
_DEEP = 3
"""How deep in tuples and containers fake tensors are looked for."""

_ABSENT = object()

_Namespace = tuple[dict[str, Any], Callable[[str, Any], object], Callable[[str], object], bool]
"""Names of a file or a class; how to set one, and to delete one; whether they are the program's own."""


def is_programs_own(name: str | None) -> bool:
    """Whether a module of Python, by its name, is neither of a library nor of Python itself."""
    if name is None or _is_left_out(name):
        return False
    path = getattr(sys.modules.get(name), "__file__", None)
    return path is None or not any(name in path for name in _LIBRARIES)


def _is_left_out(name: str | None) -> bool:
    return name is None or name.partition(".")[0] in _LEFT_OUT


def put_back(place: Any, before: Any) -> None:
    """Give a dict, list or set the items of ``before``, if they are others now. Items count by identity."""
    if isinstance(place, dict):
        if list(place) != list(before):
            place.clear()
            place.update(before)
        elif any(place[name] is not value for name, value in before.items()):
            place.update(before)
    elif isinstance(place, set):
        if place != before:
            place.clear()
            place.update(before)
    elif len(place) != len(before) or any(now is not value for now, value in zip(place, before, strict=True)):
        place.clear()
        place.extend(before)


@contextmanager
def program_unchanged(model: nn.Module) -> Iterator[None]:
    """Put back at the end what calls of ``model`` change outside of its modules (see above)."""
    spaces = list(_namespaces(model))
    functions = [(function, known) for names, *_, known in spaces for function in _functions(names)]
    mentioned = _mentioned([function for function, known in functions if known], model)
    spaces += (_attributes_of(function, True) for function, known in functions if known)
    names = [dict(own) for own, *_ in spaces]
    held = [
        (value, known and not mentioned.isdisjoint(function.__qualname__.split(".")))
        for function, known in functions
        for value in _kept_by(function)
    ]
    for before, (*_, known) in zip(names, spaces, strict=True):
        held += ((value, known and name in mentioned) for name, value in before.items())
    containers = [
        (value, value.copy(), known)
        for value, known in held
        if type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS
    ]
    states = [state_of(one) for value, known in held if known for one in held_generators(value)]
    caches = [(value, value.cache_info().misses) for value, _ in held if type(value) is _CACHE]
    try:
        yield
    finally:
        for before, space in zip(names, spaces, strict=True):
            _restore_names(space, before, mentioned)
        for place, contents, known in containers:
            if known or _holds_fake(place):
                put_back(place, contents)
        for put, state in states:
            put(state)
        for cache, misses in caches:
            if cache.cache_info().misses != misses and _caches_fake(cache):
                cache.cache_clear()


def _namespaces(model: nn.Module) -> Iterator[_Namespace]:
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    classes = {kind for kind in classes if not _is_left_out(kind.__module__)}
    for file in _files({kind.__module__ for kind in classes}):
        names, known = vars(file), is_programs_own(file.__name__)
        yield names, names.__setitem__, names.__delitem__, known
        if known:
            named = [one for one in list(names.values()) if isinstance(one, type)]
            classes |= {one for one in named if is_programs_own(one.__module__)}
    for kind in classes:
        yield _attributes_of(kind, is_programs_own(kind.__module__))


def _attributes_of(value: Any, known: bool) -> _Namespace:
    return vars(value), functools.partial(setattr, value), functools.partial(delattr, value), known


def _functions(names: dict[str, Any]) -> Iterator[FunctionType]:
    """Yield the functions among the values, and those that decorators have wrapped."""
    for value in list(names.values()):
        function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        while isinstance(function, FunctionType | _CACHE):
            if isinstance(function, FunctionType):
                yield function
            function = vars(function).get("__wrapped__")


def _mentioned(functions: Iterable[FunctionType], model: nn.Module) -> set[str]:
    """Return the names in the code of the model's classes, and in that of functions and classes so named."""
    by_name: dict[str, list[FunctionType]] = defaultdict(list)
    for function in functions:
        for part in function.__qualname__.split("."):  # a class is mentioned in place of its methods
            by_name[part].append(function)
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    found: set[str] = set()
    waiting = kinds - {"Module", "object"}
    while waiting:
        found |= waiting
        codes = [function.__code__ for name in waiting for function in by_name.pop(name, ())]
        waiting = {name for code in codes for name in _names_in(code)} - found
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def _kept_by(function: FunctionType) -> Iterator[Any]:
    """Yield what a function keeps from call to call: in default arguments, and around it."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _files(names: Iterable[str]) -> Iterator[ModuleType]:
    """Yield the modules of these names, and those of the functions and modules that they name."""
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        file = sys.modules.get(name)
        if name in seen or _is_left_out(name) or not isinstance(file, ModuleType):
            continue
        seen.add(name)
        yield file
        for value in list(vars(file).values()):
            if isinstance(value, FunctionType):
                waiting.append(value.__module__ or "")
            elif isinstance(value, ModuleType) and is_programs_own(value.__name__):
                waiting.append(value.__name__)


def _restore_names(space: _Namespace, before: dict[str, Any], mentioned: set[str]) -> None:
    names, put, delete, own = space
    for name, now in list(names.items()):
        was = before.get(name, _ABSENT)
        data = own and name in mentioned and (_is_data(now) or _is_data(was))
        if now is was or not (data or _holds_fake(now)):
            continue
        if was is _ABSENT:
            delete(name)
        else:
            put(name, was)


def _is_data(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number or isinstance(value, torch.Tensor) or type(value) in _CONTAINERS


def _holds_fake(value: Any, depth: int = _DEEP) -> bool:
    if isinstance(value, FakeTensor):
        return True
    if not depth or not isinstance(value, tuple | list | dict | deque) or len(value) > _MOST_ITEMS:
        return False
    held = value.values() if isinstance(value, dict) else value
    return any(_holds_fake(item, depth - 1) for item in list(held))


def _caches_fake(cache: Any) -> bool:
    """Whether a cache of a function holds a fake tensor. Only the garbage collector is shown its results."""
    found = gc.get_referents(cache)
    for _ in range(_DEEP):
        if any(isinstance(item, FakeTensor) for item in found):
            return True
        # Its dict, the links of that dict, and tuples of results; no function, which leads to all the rest.
        found = gc.get_referents(*(item for item in found if _is_part_of_cache(item)))
    return any(isinstance(item, FakeTensor) for item in found)


def _is_part_of_cache(item: Any) -> bool:
    return type(item) in (dict, tuple, list) or type(item).__name__ == "_lru_list_elem"
