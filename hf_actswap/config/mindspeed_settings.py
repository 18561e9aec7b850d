"""Reading MindSpeed's settings in ``memory``: each that has a counterpart sets it, the rest gets a note."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .mindspeed_keys import (
    MODE_FLAGS,
    OUTPUT_ROOT_PATH,
    REDUCTION_MEMORY_BYTES,
    TARGET_MEMORY_BYTES,
    UNUSED,
)
from .reader import Findings, Path, is_int, read_bool, read_choice, read_int, read_text, show, where

MIB, GIB = 2**20, 2**30

_LARGEST_BYTES = 2**53  # up to which a number of bytes is a number of GiB without rounding
_PRODUCT = re.compile(r"\s*\d{1,18}(?:\s*\*\s*\d{1,18}){1,8}\s*")
_PREFERENCES = {"BETTER_PERFORMANCE": "performance", "BETTER_MEMORY_SAVING": "memory_saving"}
_ENUM = "SwapPolicyPref."


@dataclass(frozen=True)
class MindSpeedSetting:
    """A value for a key of `MemoryConfig`, and where it is written; ``None``: written and unreadable."""

    key: str
    path: Path
    value: Any


def read_settings(findings: Findings, section: Mapping[Any, Any]) -> list[MindSpeedSetting]:
    """Read all of MindSpeed's settings but ``stable_step`` and the flags, and note those without effect."""
    for key in section:
        if key in UNUSED:
            findings.note(("memory", key), f"`memory.{key}`: {UNUSED[key]}")
    return [
        *_read_direct(findings, section),
        *_read_target(findings, section),
        *_read_plan_file(findings, section),
    ]


def read_flags(findings: Findings, section: Mapping[Any, Any]) -> list[MindSpeedSetting]:
    """Read ``smart_swap`` and ``adaptive_memory_optimization``, at the top level and in ``memory``.

    ``false`` says only that the mode is not this one.
    """
    settings = []
    for parent, mapping in (((), findings.document), (("memory",), section)):
        for flag, mode in MODE_FLAGS.items():
            if flag not in mapping:
                continue
            path: Path = (*parent, flag)
            on = read_bool(findings, path, mapping[flag])
            if on is not False:
                settings.append(MindSpeedSetting("mode", path, mode if on else None))
            elif section.get("mode") == mode:
                findings.problem(path, f"true, because memory.mode is {mode}", "false", "Leave one out.")
    return settings


def read_stable_step(
    findings: Findings, section: Mapping[Any, Any], warmup: MindSpeedSetting
) -> list[MindSpeedSetting]:
    """Read ``stable_step``, the step with which the stable stage begins: what warm-up leaves is search."""
    if "stable_step" not in section:
        return []
    path = ("memory", "stable_step")
    stable = read_int(findings, path, section["stable_step"], minimum=1)
    if stable is None or warmup.value is None:
        return [MindSpeedSetting("search_steps", path, None)]
    if stable < warmup.value:
        expected = f"a step at or after the end of warm-up ({where(warmup.path)}: {warmup.value})"
        findings.problem(
            path, expected, str(stable), "The stable stage begins with this step, counted from 0."
        )
        return [MindSpeedSetting("search_steps", path, None)]
    return [MindSpeedSetting("search_steps", path, stable - warmup.value)]


def _read_direct(findings: Findings, section: Mapping[Any, Any]) -> list[MindSpeedSetting]:
    """The settings that are one of our keys in another unit or with other words."""
    readers: dict[str, tuple[str, Callable[[Findings, Path, object], Any]]] = {
        "policy_pref": ("preference", _read_preference),
        "tensor_size_filter": ("min_tensor_mib", _read_filter),
        "redundant_memory": ("margin_gib", _read_margin),
        "warmup_step": ("warmup_steps", _read_warmup),
    }
    return [
        MindSpeedSetting(key, ("memory", name), read(findings, ("memory", name), section[name]))
        for name, (key, read) in readers.items()
        if name in section
    ]


def _read_target(findings: Findings, section: Mapping[Any, Any]) -> list[MindSpeedSetting]:
    """``target_mode`` says which of the two sizes counts, as in MindSpeed, where it is false by default."""
    sizes = {
        name: _read_bytes(findings, ("memory", name), section[name])
        for name in ("target_memory", "reduction_memory")
        if name in section
    }
    mode_path = ("memory", "target_mode")
    mode = read_bool(findings, mode_path, section["target_mode"]) if "target_mode" in section else None
    if mode is None and ("target_mode" in section or not sizes):
        return []
    if mode is None and "reduction_memory" not in sizes:
        line = "`memory.target_memory` is the budget, as if target_mode were true, which is not written."
        findings.note(("memory", "target_memory"), line)
        mode = True
    counts, other = ("target_memory", "reduction_memory") if mode else ("reduction_memory", "target_memory")
    key, default = ("budget_gib", TARGET_MEMORY_BYTES) if mode else ("reduce_by_gib", REDUCTION_MEMORY_BYTES)
    if other in sizes:
        wanted = "false" if mode else "true"
        findings.note(
            ("memory", other), f"`memory.{other}` counts where target_mode is {wanted}; it is ignored."
        )
    if counts in sizes:
        size = sizes[counts]
        return [MindSpeedSetting(key, ("memory", counts), None if size is None else size / GIB)]
    if section.get(key) is not None:
        return []
    line = (
        f"`memory.target_mode`: {counts} is not written; MindSpeed's default counts, {key} {default // GIB}."
    )
    findings.note(mode_path, line)
    return [MindSpeedSetting(key, mode_path, default / GIB)]


def _read_plan_file(findings: Findings, section: Mapping[Any, Any]) -> list[MindSpeedSetting]:
    """``save_policy`` asks for a file in ``output_root_path``."""
    path, root_path = ("memory", "save_policy"), ("memory", "output_root_path")
    root: str | None = OUTPUT_ROOT_PATH
    if "output_root_path" in section:
        root = read_text(findings, root_path, section["output_root_path"])
    saves = read_bool(findings, path, section["save_policy"]) if "save_policy" in section else False
    if saves is None or (saves and root is None):
        return [MindSpeedSetting("plan_file", path, None)]
    if saves and root is not None:
        file = f"{root.rstrip('/')}/plan.json"
        line = (
            f"`memory.save_policy`: the plan is written to {file}, and read from there by a run that it fits."
        )
        findings.note(path, line)
        return [MindSpeedSetting("plan_file", path, file)]
    if "output_root_path" in section:
        findings.note(root_path, "`memory.output_root_path` counts where save_policy is true; it is ignored.")
    return []


def _read_preference(findings: Findings, path: Path, value: object) -> str | None:
    word = value.removeprefix(_ENUM) if isinstance(value, str) else value
    name = read_choice(findings, path, word, tuple(_PREFERENCES))
    return None if name is None else _PREFERENCES[name]


def _read_filter(findings: Findings, path: Path, value: object) -> float | None:
    size = _read_bytes(findings, path, value, minimum=0)
    # No storage has less than one byte, so that from 0 on and from 1 on are the same.
    return None if size is None else max(size, 1) / MIB


def _read_margin(findings: Findings, path: Path, value: object) -> float | None:
    size = _read_bytes(findings, path, value, minimum=0)
    return None if size is None else size / GIB


def _read_warmup(findings: Findings, path: Path, value: object) -> int | None:
    return read_int(findings, path, value, minimum=1)


def _read_bytes(findings: Findings, path: Path, value: object, minimum: int = 1) -> int | None:
    if isinstance(value, int) and is_int(value) and minimum <= value <= _LARGEST_BYTES:
        return value
    findings.problem(path, f"a whole number of bytes, at least {minimum}", show(value), _product_hint(value))
    return None


def _product_hint(value: object) -> str:
    """What a product comes to: MindSpeed's file is Python, where sizes are written as such."""
    if not isinstance(value, str) or not _PRODUCT.fullmatch(value):
        return ""
    size = math.prod(int(factor) for factor in value.split("*"))
    return f"Write the number: {size}." if size <= _LARGEST_BYTES else ""
