"""Switches a model's key-value cache off, as it is in a training with a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


def without_cache(root: nn.Module) -> list[Callable[[], None]]:
    """Switch the key-value cache off in the model's configuration; return functions that undo it.

    With a cache attention reads copies of keys and values: other ops then produce what is saved, and a plan
    for these names nothing in a training without it. Parts of a model may have configurations of their own
    (T5's decoder has a copy).
    """
    found: list[Any] = [getattr(module, "config", None) for module in root.modules()]
    known = {id(config): config for config in found}
    text = [config.get_text_config() for config in known.values() if hasattr(config, "get_text_config")]
    known |= {id(config): config for config in text}
    caching = [config for config in known.values() if getattr(config, "use_cache", False)]
    for item in caching:
        item.use_cache = False
    return [functools.partial(setattr, item, "use_cache", True) for item in caching]
