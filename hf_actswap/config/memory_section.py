"""Reading ``memory``: the planner's section, in our names or in MindSpeed's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .keys import MEMORY_KEYS
from .mindspeed_keys import MODE_FLAGS, SETTINGS
from .mindspeed_settings import MindSpeedSetting, read_flags, read_settings, read_stable_step
from .reader import (
    Findings,
    Path,
    read_bool,
    read_choice,
    read_int,
    read_not_negative,
    read_positive,
    read_section,
    read_text,
    where,
)
from .recompute_section import EXCLUDE_KEYS, SELECTION_KEYS, selects_anything
from .schema import MemoryConfig, RecomputeConfig, SwapConfig

_LEAST = {"warmup_steps": 1, "search_steps": 0, "num_attn_layers_per_stage": 1, "swap_bucket_size": None}
_SIZES = ("budget_gib", "reduce_by_gib", "min_tensor_mib", "host_memory_gib")
_MAY_BE_NULL = (*_SIZES, "margin_gib", "plan_file")
_CHOICES = {"mode": ("off", "smart_swap", "adaptive"), "preference": ("performance", "memory_saving")}


def read_memory(findings: Findings) -> MemoryConfig:
    """Read ``memory`` and MindSpeed's two flags. ``null`` is accepted where it is the default."""
    section = read_section(findings, "memory", MEMORY_KEYS, (*SETTINGS, *MODE_FLAGS))
    settings = [
        MindSpeedSetting(key, ("memory", key), _read_value(findings, ("memory", key), key, value))
        for key, value in section.items()
        if key in MEMORY_KEYS and not (value is None and key in _MAY_BE_NULL)
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
    """Refuse fates written by hand beside ``mode: adaptive``, which chooses all of them itself."""
    if memory.mode != "adaptive":
        return
    written = ["swap_config.swap"] if swap.swap else []
    # To keep is a fate as well.
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
    """Refuse what is written under two names, in the order of the document; the first counts."""
    written: dict[str, MindSpeedSetting] = {}
    for one in sorted(settings, key=lambda one: findings.position(one.path)):
        first = written.setdefault(one.key, one)
        if first is not one:
            _refuse_both(findings, first, one)
    return written


def _check_budget(findings: Findings, written: Mapping[str, MindSpeedSetting]) -> None:
    budget, reduction = written.get("budget_gib"), written.get("reduce_by_gib")
    if budget and reduction:
        _refuse_both(findings, budget, reduction)
    margin, asked = written.get("margin_gib"), budget or reduction
    if margin and asked:
        ignored = f"beside {where(asked.path)} it is ignored"
        findings.note(margin.path, f"`{where(margin.path)}` counts where no budget is written; {ignored}.")


def _refuse_both(findings: Findings, one: MindSpeedSetting, other: MindSpeedSetting) -> None:
    later = max((one.path, other.path), key=findings.position)
    findings.problem(later, f"one of {where(one.path)} and {where(other.path)}", "both", "Leave one out.")


def _mode_path(findings: Findings) -> Path:
    """Where the mode is written."""
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
    if key in _CHOICES:
        # YAML 1.1 reads a bare `off` as false.
        word = "off" if key == "mode" and value is False else value
        return read_choice(findings, path, word, _CHOICES[key])
    if key in _LEAST:
        return read_int(findings, path, value, minimum=_LEAST[key])
    if key in _SIZES:
        return read_positive(findings, path, value)
    if key == "margin_gib":
        return read_not_negative(findings, path, value)
    if key == "bind_numa":
        return read_bool(findings, path, value)
    return read_text(findings, path, value)
