"""Combines the planner's flags on the command line with ``memory.mode`` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from hf_actswap import ConfigError, load_config
from hf_actswap.config.keys import MODE_FLAGS
from hf_actswap.errors import Problem


def with_mode(actswap: Any, flags: Mapping[str, bool]) -> Any:
    """Return a configuration with ``memory.mode`` set as the flags of `MODE_FLAGS` say.

    Args:
        actswap: the configuration, as ``ActSwapTrainingArguments`` takes it; it is not changed.
        flags: the flags that were given; false says only that the mode is not this one.

    Returns:
        The configuration; ``actswap`` itself if no flag is true or it has the mode already.

    Raises:
        ConfigError: two flags are true, the configuration disagrees with one, or it is malformed.
    """
    asked = [flag for flag, on in flags.items() if on]
    if not flags or (actswap is None and not asked):
        return actswap
    if len(asked) > 1:
        found = " and ".join(f"--{flag}" for flag in asked)
        raise ConfigError([Problem("command line", "one planner", found, "Leave one out.")])
    flag = asked[0] if asked else None
    if actswap is None:
        expected = "a configuration in which to set the mode"
        raise ConfigError([Problem(f"--{flag}", expected, "`actswap: none`", "Leave one out.")])
    config = load_config(actswap)
    for name, on in flags.items():
        if config.memory.mode != "off" and on != (config.memory.mode == MODE_FLAGS[name]):
            found = f"--{name} {str(on).lower()}"
            expected = f"what the configuration says (memory.mode: {config.memory.mode})"
            hint = "Leave one out; `--actswap none` trains without any of it."
            raise ConfigError([Problem(f"--{name}", expected, found, hint)], config.source)
    if flag is None or config.memory.mode != "off":
        return actswap
    document = deepcopy(dict(actswap)) if isinstance(actswap, Mapping) else config.to_dict()
    document["memory"] = {**(document.get("memory") or {}), "mode": MODE_FLAGS[flag]}
    return document
