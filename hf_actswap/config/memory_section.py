"""Reading ``memory``: the planner's section."""

from __future__ import annotations

from typing import Any

from .keys import MEMORY_KEYS
from .reader import (
    Findings,
    Path,
    read_bool,
    read_choice,
    read_int,
    read_positive,
    read_section,
    read_text,
)
from .recompute_section import SELECTION_KEYS, selects_anything
from .schema import MemoryConfig, RecomputeConfig, SwapConfig

_LEAST = {"warmup_steps": 1, "search_steps": 0, "num_attn_layers_per_stage": 1, "swap_bucket_size": None}
_SIZES = ("budget_gib", "reduce_by_gib", "min_tensor_mib", "host_memory_gib")
_CHOICES = {"mode": ("off", "smart_swap", "adaptive"), "preference": ("performance", "memory_saving")}


def read_memory(findings: Findings) -> MemoryConfig:
    """Read ``memory``. ``null`` is accepted where it is the default: for sizes and ``plan_file``."""
    section = read_section(findings, "memory", MEMORY_KEYS)
    values: dict[str, Any] = {}
    for key, value in section.items():
        if key in MEMORY_KEYS and not (value is None and key in (*_SIZES, "plan_file")):
            values[key] = _read_value(findings, ("memory", key), key, value)
    if {"budget_gib", "reduce_by_gib"} <= values.keys():
        later = max((("memory", "budget_gib"), ("memory", "reduce_by_gib")), key=findings.position)
        findings.problem(later, "one of memory.budget_gib and memory.reduce_by_gib", "both", "Leave one out.")
    return MemoryConfig(**{key: value for key, value in values.items() if value is not None})


def check_fates(
    findings: Findings, memory: MemoryConfig, swap: SwapConfig, recompute: RecomputeConfig
) -> None:
    """Refuse fates written by hand beside ``mode: adaptive``, which chooses all of them itself."""
    if memory.mode != "adaptive":
        return
    written = ["swap_config.swap"] if swap.swap else []
    for key in ("recompute", *SELECTION_KEYS):
        value = getattr(recompute, key)
        # With swap on a list holds indices, and index 0 selects a layer as well as any other.
        if selects_anything(value) or (swap.swap and _names_layers(value)):
            written.append(f"recompute_config.{key}")
    for key in written:
        findings.problem(
            ("memory", "mode"),
            f"no `{key}` beside adaptive, which chooses every fate itself",
            "both",
            "Use smart_swap, which keeps what is written by hand.",
        )


def _names_layers(value: object) -> bool:
    if isinstance(value, dict):
        return any(_names_layers(layers) for layers in value.values())
    return bool(value)


def _read_value(findings: Findings, path: Path, key: str, value: object) -> Any:
    if key in _CHOICES:
        # YAML 1.1 reads a bare `off` as false.
        word = "off" if key == "mode" and value is False else value
        return read_choice(findings, path, word, _CHOICES[key])
    if key in _LEAST:
        return read_int(findings, path, value, minimum=_LEAST[key])
    if key in _SIZES:
        return read_positive(findings, path, value)
    if key == "bind_numa":
        return read_bool(findings, path, value)
    return read_text(findings, path, value)
