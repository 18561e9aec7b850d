"""For the ``sitecustomize`` files of this package, which run when Python starts in a program that it runs.

They wait for imports of the program (`after_imports`), and run the ``sitecustomize`` that they hide
(`run_the_next`). They load this file by its path, so that nothing of the package is imported: it uses the
standard library alone.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Then(Loader):
    """A loader that does something when the module has been executed."""

    def __init__(self, loader: Any, then: Any) -> None:
        self._loader, self._then = loader, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _AfterImport(MetaPathFinder):
    """Does something to each of these modules once it has been executed."""

    def __init__(self, then: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._then = then
        self._looking: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._then or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self._then[fullname])
        return spec


def after_imports(then: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Call ``then[name]`` with each of these modules of this process once it has been executed."""
    sys.meta_path.insert(0, _AfterImport(then))


def run_the_next(file: str) -> None:
    """Run the ``sitecustomize`` that the one in ``file`` hides: the user's, or another of this package."""
    entries = [os.path.abspath(entry or ".") for entry in sys.path]
    here = os.path.dirname(os.path.abspath(file))
    below = entries.index(here) + 1 if here in entries else 0  # not above: that one has run
    others = [entry for entry in sys.path[below:] if os.path.abspath(entry or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def python_path(folder: str, before: str) -> str:
    """Return a ``PYTHONPATH`` in which ``folder`` is first, and nowhere else."""
    others = [entry for entry in before.split(os.pathsep) if entry and entry != folder]
    return os.pathsep.join((folder, *others))
