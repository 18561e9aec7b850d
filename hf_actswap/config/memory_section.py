"""Reads ``memory``: the planner's section, in our names or in MindSpeed's.

A setting of MindSpeed sets the key that is its counterpart here; a setting without one only gets a note.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from .keys import (
    MEMORY_KEYS,
    MINDSPEED_IGNORED,
    MODE_FLAGS,
    OUTPUT_ROOT_PATH,
    REDUCTION_MEMORY_BYTES,
    SETTINGS,
    TARGET_MEMORY_BYTES,
)
from .reader import (
    Findings,
    Path,
    is_int,
    read_bool,
    read_choice,
    read_int,
    read_not_negative,
    read_positive,
    read_section,
    read_text,
    show,
    where,
)
from .recompute_section import EXCLUDE_KEYS, SELECTION_KEYS, selects_anything
from .schema import MemoryConfig, RecomputeConfig, SwapConfig
from .sizes import bytes_of

_LEAST = {"warmup_steps": 1, "search_steps": 0, "num_attn_layers_per_stage": 1, "swap_bucket_size": None}
_SIZES = ("budget_gib", "reduce_by_gib", "min_tensor_mib", "host_memory_gib")
_TYPES = get_type_hints(MemoryConfig)

MIB, GIB = 2**20, 2**30

_LARGEST_BYTES = 2**53  # up to which a number of bytes is a number of GiB without rounding
_PRODUCT = re.compile(r"\s*\d{1,18}(?:\s*\*\s*\d{1,18}){1,8}\s*")
_PREFERENCES = {"BETTER_PERFORMANCE": "performance", "BETTER_MEMORY_SAVING": "memory_saving"}
_ENUM = "SwapPolicyPref."


def read_memory(findings: Findings) -> MemoryConfig:
    """Read ``memory`` and MindSpeed's two flags. ``null`` is accepted for keys whose default it is."""
    section = read_section(findings, "memory", MEMORY_KEYS, (*SETTINGS, *MODE_FLAGS))
    settings = [
        MindSpeedSetting(key, ("memory", key), _read_value(findings, ("memory", key), key, value))
        for key, value in section.items()
        if key in MEMORY_KEYS and not (value is None and type(None) in get_args(_TYPES[key]))
    ]
    settings += read_flags(findings, section)
    settings += read_settings(findings, section)
    settings += read_stable_step(findings, section, _warmup(settings))
    written = _each_once(findings, settings)
    _check_budget(findings, written)
    return MemoryConfig(**{key: one.value for key, one in written.items() if one.value is not None})


def check_fates(
    findings: Findings, memory: MemoryConfig, swap: SwapConfig, recompute: RecomputeConfig
) -> None:
    """Reject fates written by hand beside ``mode: adaptive``, which chooses all of them itself."""
    if memory.mode != "adaptive":
        return
    written = ["swap_config.swap"] if swap.swap else []
    # Exclude keys ask for a fate too: keep.
    for key in ("recompute", *SELECTION_KEYS, *EXCLUDE_KEYS):
        value = getattr(recompute, key)
        # With swap on a list holds indices, and index 0 selects a layer as well as any other.
        if selects_anything(value) or (swap.swap and _names_layers(value)):
            written.append(f"recompute_config.{key}")
    if recompute.compile_budget is not None:
        written.append("recompute_config.compile_budget")
    for key in written:
        findings.problem(
            _mode_path(findings),
            f"no `{key}` beside adaptive, which chooses every fate itself",
            "both",
            "Use smart_swap, which keeps what is written by hand.",
        )


def _warmup(settings: Sequence[MindSpeedSetting]) -> MindSpeedSetting:
    default = MindSpeedSetting("warmup_steps", ("memory", "warmup_steps"), MemoryConfig.warmup_steps)
    return next((one for one in settings if one.key == "warmup_steps"), default)


def _each_once(findings: Findings, settings: Sequence[MindSpeedSetting]) -> dict[str, MindSpeedSetting]:
    """Return the first setting of each key, in the order of the document; note a problem for any other."""
    written: dict[str, MindSpeedSetting] = {}
    for one in sorted(settings, key=lambda one: findings.position(one.path)):
        first = written.setdefault(one.key, one)
        if first is not one:
            _reject_both(findings, first, one)
    return written


def _check_budget(findings: Findings, written: Mapping[str, MindSpeedSetting]) -> None:
    budget, reduction = written.get("budget_gib"), written.get("reduce_by_gib")
    if budget and reduction:
        _reject_both(findings, budget, reduction)
    margin, asked = written.get("margin_gib"), budget or reduction
    if margin and asked:
        ignored = f"beside {where(asked.path)} it is ignored"
        findings.note(margin.path, f"`{where(margin.path)}` counts where no budget is written; {ignored}.")


def _reject_both(findings: Findings, one: MindSpeedSetting, other: MindSpeedSetting) -> None:
    later = max((one.path, other.path), key=findings.position)
    findings.problem(later, f"one of {where(one.path)} and {where(other.path)}", "both", "Leave one out.")


def _mode_path(findings: Findings) -> Path:
    """Return the path at which the mode is written."""
    section = findings.document.get("memory")
    if isinstance(section, Mapping):
        for key in ("mode", *MODE_FLAGS):
            if key in section and section[key] is not False:
                return ("memory", key)
    return next(((flag,) for flag in MODE_FLAGS if findings.document.get(flag)), ("memory", "mode"))


def _names_layers(value: object) -> bool:
    if isinstance(value, dict):
        return any(_names_layers(layers) for layers in value.values())
    return bool(value)


def _read_value(findings: Findings, path: Path, key: str, value: object) -> Any:
    if get_origin(_TYPES[key]) is Literal:
        # YAML 1.1 reads a bare `off` as false.
        word = "off" if key == "mode" and value is False else value
        return read_choice(findings, path, word, get_args(_TYPES[key]))
    if key in _LEAST:
        return read_int(findings, path, value, minimum=_LEAST[key])
    if key in _SIZES:
        return read_positive(findings, path, value, _size_hint(key, value))
    if key == "margin_gib":
        return read_not_negative(findings, path, value)
    if _TYPES[key] is bool:
        return read_bool(findings, path, value)
    return read_text(findings, path, value)


@dataclass(frozen=True)
class MindSpeedSetting:
    """A value for a key of `MemoryConfig` (``None``: it could not be read), and the path where it stands."""

    key: str
    path: Path
    value: Any


def read_settings(findings: Findings, section: Mapping[Any, Any]) -> list[MindSpeedSetting]:
    """Read all of MindSpeed's settings but ``stable_step`` and the flags, and note those without effect."""
    for key in section:
        if key in MINDSPEED_IGNORED:
            findings.note(("memory", key), f"`memory.{key}`: {MINDSPEED_IGNORED[key]}")
    return [
        *_read_direct(findings, section),
        *_read_target(findings, section),
        *_read_plan_file(findings, section),
    ]


def read_flags(findings: Findings, section: Mapping[Any, Any]) -> list[MindSpeedSetting]:
    """Read ``smart_swap`` and ``adaptive_memory_optimization``, at the top level and in ``memory``.

    A flag that is ``false`` says only that the mode is not this one.
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
    """Read ``stable_step``, the step with which the stable stage begins: search takes the steps up to it.

    Args:
        findings: the document, and where problems go.
        section: the section ``memory``.
        warmup: the number of warm-up steps, which come first.
    """
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
    """Read the settings that are one of our keys in another unit or with other words."""
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
    """Read the two sizes; ``target_mode`` says which of them counts (MindSpeed; false by default there)."""
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
    """Read ``save_policy``, which sets ``plan_file`` to a file in ``output_root_path``."""
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
    """Return a hint with the value of a product: in MindSpeed's file, which is Python, sizes are products."""
    if not isinstance(value, str) or not _PRODUCT.fullmatch(value):
        return ""
    size = math.prod(int(factor) for factor in value.split("*"))
    return f"Write the number: {size}." if size <= _LARGEST_BYTES else ""


def _size_hint(key: str, value: object) -> str:
    """Return a hint with a size in the key's unit, if a unit is written with it (as on command lines)."""
    unit, unit_bytes = ("MiB", MIB) if key.endswith("_mib") else ("GiB", GIB)
    text = value.strip() if isinstance(value, str) else ""
    try:
        size = bytes_of(text if text[-1:].isalpha() else text + unit)
    except ValueError:
        return ""
    return f"Write the number of {unit}: {size / unit_bytes:.6g}."
