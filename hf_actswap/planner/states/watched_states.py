"""``optimizer.state`` while states are away: who looks a parameter up finds its states on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, ItemsView, Iterator, ValuesView
from typing import Any


class WatchedStates(defaultdict[Any, Any]):
    """A `collections.defaultdict` that tells of each look at a value before it answers.

    Pickled and copied it is a plain one, with all states.

    Args:
        states: what it holds at first.
        looked: called with a key that is present, or with ``None`` when somebody looks at all values.
    """

    def __init__(self, states: dict[Any, Any], looked: Callable[[Hashable | None], None]) -> None:
        super().__init__(getattr(states, "default_factory", dict), states)
        self._looked = looked

    def unwatched_items(self) -> ItemsView[Any, Any]:
        """As ``items()``, unnoticed."""
        return super().items()

    def unwatched(self, key: Any) -> Any:
        """As ``get(key)``, unnoticed."""
        return super().get(key)

    def __getitem__(self, key: Any) -> Any:
        if key in self:
            self._looked(key)
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()  # that `dict(states)` asks for each value

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
        """Return one that is not watched, with all states."""
        self._looked(None)
        return defaultdict(self.default_factory, super().items())

    def copy(self) -> Any:
        return self.plain()

    def __copy__(self) -> Any:
        return self.plain()

    def __reduce__(self) -> tuple[Any, ...]:
        self._looked(None)
        return defaultdict, (self.default_factory,), None, None, iter(super().items())
