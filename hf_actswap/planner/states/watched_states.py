"""A dictionary for ``optimizer.state`` that reports accesses, so that states can come back before them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, ItemsView, Iterator, ValuesView
from typing import Any


class WatchedStates(defaultdict[Any, Any]):
    """A `collections.defaultdict` that calls a function before each access to a value.

    Pickling or copying it gives a plain `defaultdict` with all states.

    Args:
        states: its first contents.
        looked: called with the key that is accessed, if present, or with ``None`` if all values are.
    """

    def __init__(self, states: dict[Any, Any], looked: Callable[[Hashable | None], None]) -> None:
        super().__init__(getattr(states, "default_factory", dict), states)
        self._looked = looked

    def unwatched_items(self) -> ItemsView[Any, Any]:
        """Return ``items()`` without calling ``looked``."""
        return super().items()

    def unwatched(self, key: Any) -> Any:
        """Return ``get(key)`` without calling ``looked``."""
        return super().get(key)

    def __getitem__(self, key: Any) -> Any:
        if key in self:
            self._looked(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()  # overridden so that `dict(states)` calls `__getitem__` for each key

    def get(self, key: Any, default: Any = None) -> Any:
        if key in self:
            self._looked(key)
        return super().get(key, default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key in self:
            self._looked(key)
        return super().setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        if key in self:
            self._looked(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[Any, Any]:
        self._looked(None)
        return super().popitem()

    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        self._looked(None)
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._looked(None)
        return super().values()

    def plain(self) -> defaultdict[Any, Any]:
        """Return a plain `defaultdict` with all states."""
        self._looked(None)
        return defaultdict(self.default_factory, super().items())

    def copy(self) -> Any:
        return self.plain()

    def __copy__(self) -> Any:
        return self.plain()

    def __reduce__(self) -> tuple[Any, ...]:
        self._looked(None)
        return defaultdict, (self.default_factory,), None, None, iter(super().items())
