"""Reads ``memory``: the planner's section, in our names or in MindSpeed's.

A setting of MindSpeed sets the key that is its counterpart here; a setting without one only gets a note.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import TypedDict

from .keys import (
    MEMORY_KEYS,
    MINDSPEED_IGNORED,
    MODE_FLAGS,
    OUTPUT_ROOT_PATH,
    REDUCTION_MEMORY_BYTES,
    SETTINGS,
    TARGET_MEMORY_BYTES,
)
from .layer_values import OpSelection
from .schema import MIB, MemoryConfig, ParallelConfig, RecomputeConfig, StreamConfig, SwapConfig, Text
from .sections import types_of
from .sizes import GIB
from .validation import AnyInt, AtLeast1, Expected, Findings, Flag, Path, one_of, where

_LARGEST_BYTES = 2**53  # up to which a number of bytes is a number of GiB without rounding
_PRODUCT = re.compile(r"\s*\d{1,18}(?:\s*\*\s*\d{1,18}){1,8}\s*")
_PREFERENCES = {"BETTER_PERFORMANCE": "performance", "BETTER_MEMORY_SAVING": "memory_saving"}


def _product_hint(value: object) -> str:
    # In MindSpeed's file, which is Python, sizes are products.
    if not isinstance(value, str) or not _PRODUCT.fullmatch(value):
        return ""
    size = math.prod(int(factor) for factor in value.split("*"))
    return f"Write the number: {size}." if size <= _LARGEST_BYTES else ""


_Bytes = Annotated[
    AnyInt, Field(ge=1, le=_LARGEST_BYTES), Expected("a whole number of bytes, at least 1", _product_hint)
]
_AnyBytes = Annotated[
    AnyInt, Field(ge=0, le=_LARGEST_BYTES), Expected("a whole number of bytes, at least 0", _product_hint)
]


def _without_enum(value: Any) -> Any:
    return value.removeprefix("SwapPolicyPref.") if isinstance(value, str) else value


_Gib = AfterValidator(lambda size_bytes: size_bytes / GIB)
# No storage has less than one byte, so that from 0 on and from 1 on are the same.
_Mib = AfterValidator(lambda size_bytes: max(size_bytes, 1) / MIB)


class MindSpeedSettings(TypedDict, total=False):
    """The settings that have an effect, in MindSpeed's words; the values are read in ours."""

    policy_pref: Annotated[
        Literal["BETTER_PERFORMANCE", "BETTER_MEMORY_SAVING"],
        one_of(*_PREFERENCES),
        AfterValidator(_PREFERENCES.__getitem__),
        BeforeValidator(_without_enum),
    ]
    target_mode: Flag
    target_memory: Annotated[_Bytes, _Gib]
    reduction_memory: Annotated[_Bytes, _Gib]
    tensor_size_filter: Annotated[_AnyBytes, _Mib]
    redundant_memory: Annotated[_AnyBytes, _Gib]
    warmup_step: AtLeast1
    stable_step: AtLeast1
    save_policy: Flag
    output_root_path: Text
    smart_swap: Flag
    adaptive_memory_optimization: Flag


_SAME = {
    "policy_pref": "preference",
    "tensor_size_filter": "min_tensor_mib",
    "redundant_memory": "margin_gib",
    "warmup_step": "warmup_steps",
}
"""Setting -> the one key of ours that it sets, whatever else is written."""


@dataclass(frozen=True)
class _Setting:
    """A value for a key of `MemoryConfig` (``None``: it could not be read), and the path where it stands."""

    key: str
    path: Path
    value: Any


def read_memory(findings: Findings) -> MemoryConfig:
    """Read ``memory`` and MindSpeed's two flags. ``null`` is accepted for keys whose default it is."""
    section, types = findings.document.get("memory"), types_of(MemoryConfig)
    ours = findings.keys(("memory",), section, types, ignored=(*SETTINGS, *MODE_FLAGS))
    section = section if isinstance(section, Mapping) else {}
    theirs = {
        key: findings.read(kind, ("memory", key), section[key])
        for key, kind in types_of(MindSpeedSettings).items()
        if key in section
    }
    for key in section:
        if key in MINDSPEED_IGNORED:
            findings.note(("memory", key), f"`memory.{key}`: {MINDSPEED_IGNORED[key]}")
    settings = [
        _Setting(key, ("memory", key), ours.get(key))
        for key in section
        if key in MEMORY_KEYS and not (section[key] is None and getattr(MemoryConfig, key) is None)
    ]
    settings += [_Setting(_SAME[key], ("memory", key), theirs[key]) for key in _SAME if key in theirs]
    settings += _flags(findings, section, theirs)
    settings += _target(findings, section, theirs)
    settings += _plan_file(findings, theirs)
    settings += _stable_step(findings, theirs, settings)
    written = _each_once(findings, settings)
    _check_budget(findings, written)
    return MemoryConfig(**{key: one.value for key, one in written.items() if one.value is not None})


def check_fates(
    findings: Findings, memory: MemoryConfig, swap: SwapConfig, recompute: RecomputeConfig, stack: str = ""
) -> None:
    """Reject fates written by hand beside ``mode: adaptive``, which chooses all of them itself.

    ``stack`` names the stack for which they are written, if that is not the decoder's.
    """
    if memory.mode != "adaptive":
        return
    written = ["swap_config.swap"] if swap.swap else []
    # Exclude keys ask for a fate too: keep.
    selections = "select_recompute", "select_comm_recompute"
    for key in ("recompute", *selections, *(f"{key}_exclude" for key in selections)):
        value = getattr(recompute, key)
        # With swap on a list holds indices, and index 0 selects a layer as well as any other.
        if _selects_anything(value) or (swap.swap and _names_layers(value)):
            written.append(f"recompute_config.{key}")
    if recompute.compile_budget is not None:
        written.append("recompute_config.compile_budget")
    for key in written:
        key = f"stacks.{stack}.{key}" if stack else key
        expected = f"no `{key}` beside adaptive, which chooses every fate itself"
        hint = "Use smart_swap, which keeps what is written by hand."
        findings.problem(_mode_path(findings), expected, "both", hint)


def check_weights(
    findings: Findings, memory: MemoryConfig, parallel: ParallelConfig, stream: StreamConfig
) -> None:
    """Reject ``weights`` beside what moves or divides weights itself, and ``auto`` where nothing chooses."""
    if memory.weights == "keep":
        return
    if memory.weights == "auto" and memory.mode == "off":
        hint = "Write mode: adaptive, which chooses; or ask `hf-actswap plan`, and write keep or host."
        findings.problem(("memory", "weights"), "keep or host without the planner", "auto", hint)
    beside = list(_divisions(parallel))
    if stream.tokens != "off" and memory.mode != "off":
        beside.append("the planner of a streamed sequence (memory.mode, stream_config)")
    for name in beside:
        hint = "Leave one out; swap, recompute, tiles and the planner can be written beside it."
        findings.problem(("memory", "weights"), f"keep beside {name}", memory.weights, hint)


def check_in_backward(
    findings: Findings, memory: MemoryConfig, parallel: ParallelConfig, stream: StreamConfig
) -> None:
    """Reject an optimizer in backward beside what sums gradients later, and its clipping without it."""
    if not memory.optimizer_in_backward:
        for key in ("in_backward_clip_value", "in_backward_clip_last_norm"):
            if getattr(memory, key) is not None:
                hint = "Without it the training loop clips (max_grad_norm, clip_grad_norm_)."
                expected = "memory.optimizer_in_backward: true beside it"
                findings.problem(("memory", key), expected, "false", hint)
        return
    beside = list(_divisions(parallel))
    if stream.tokens != "off":
        beside.append("a streamed sequence (stream_config)")
    for name in beside:
        hint = "Gradients are complete there only when backward is over. Leave one out."
        findings.problem(("memory", "optimizer_in_backward"), f"false beside {name}", "true", hint)


def _divisions(parallel: ParallelConfig) -> Iterator[str]:
    if parallel.tensor_parallel_size > 1:
        yield "tensor parallelism (parallel_config)"
    if parallel.runs_pipeline:
        yield "a pipeline (parallel_config)"


def _selects_anything(value: OpSelection | None) -> bool:
    """Whether a value of ``recompute`` or a select key recomputes any layer (zeros do not)."""
    if isinstance(value, dict):
        return any(map(_selects_anything, value.values()))
    if isinstance(value, tuple):
        return any(_selects_anything(item) if isinstance(item, tuple) else bool(item) for item in value)
    return bool(value)


def _names_layers(value: object) -> bool:
    return any(map(_names_layers, value.values())) if isinstance(value, dict) else bool(value)


def _each_once(findings: Findings, settings: Sequence[_Setting]) -> dict[str, _Setting]:
    """Return the first setting of each key, in the order of the document; note a problem for any other."""
    written: dict[str, _Setting] = {}
    for one in sorted(settings, key=lambda one: findings.position(one.path)):
        first = written.setdefault(one.key, one)
        if first is not one:
            _reject_both(findings, first, one)
    return written


def _check_budget(findings: Findings, written: Mapping[str, _Setting]) -> None:
    budget, reduction = written.get("budget_gib"), written.get("reduce_by_gib")
    if budget and reduction:
        _reject_both(findings, budget, reduction)
    margin, asked = written.get("margin_gib"), budget or reduction
    if margin and asked:
        ignored = f"beside {where(asked.path)} it is ignored"
        findings.note(margin.path, f"`{where(margin.path)}` counts where no budget is written; {ignored}.")


def _reject_both(findings: Findings, one: _Setting, other: _Setting) -> None:
    later = max((one.path, other.path), key=findings.position)
    findings.problem(later, f"one of {where(one.path)} and {where(other.path)}", "both", "Leave one out.")


def _mode_path(findings: Findings) -> Path:
    section = findings.document.get("memory")
    if isinstance(section, Mapping):
        for key in ("mode", *MODE_FLAGS):
            if key in section and section[key] is not False:
                return ("memory", key)
    return next(((flag,) for flag in MODE_FLAGS if findings.document.get(flag)), ("memory", "mode"))


def _flags(findings: Findings, section: Mapping[Any, Any], theirs: Mapping[str, Any]) -> Iterator[_Setting]:
    """Yield the mode of ``smart_swap`` and ``adaptive_memory_optimization``, at the top level or below.

    A flag that is ``false`` says only that the mode is not this one.
    """
    for flag, mode in MODE_FLAGS.items():
        for path, mapping in (((flag,), findings.document), (("memory", flag), section)):
            if flag not in mapping:
                continue
            types = types_of(MindSpeedSettings)
            on = theirs[flag] if mapping is section else findings.read(types[flag], path, mapping[flag])
            if on is not False:
                yield _Setting("mode", path, mode if on else None)
            elif section.get("mode") == mode:
                findings.problem(path, f"true, because memory.mode is {mode}", "false", "Leave one out.")


def _stable_step(
    findings: Findings, theirs: Mapping[str, Any], settings: Sequence[_Setting]
) -> Iterator[_Setting]:
    """Yield the steps of the search: those up to ``stable_step``, with which the stable stage begins."""
    if "stable_step" not in theirs:
        return
    path, stable = ("memory", "stable_step"), theirs["stable_step"]
    default = _Setting("warmup_steps", ("memory", "warmup_steps"), MemoryConfig.warmup_steps)
    warmup = next((one for one in settings if one.key == "warmup_steps"), default)
    if stable is None or warmup.value is None:
        yield _Setting("search_steps", path, None)
    elif stable < warmup.value:
        expected = f"a step at or after the end of warm-up ({where(warmup.path)}: {warmup.value})"
        hint = "The stable stage begins with this step, counted from 0."
        findings.problem(path, expected, str(stable), hint)
        yield _Setting("search_steps", path, None)
    else:
        yield _Setting("search_steps", path, stable - warmup.value)


def _target(findings: Findings, section: Mapping[Any, Any], theirs: Mapping[str, Any]) -> Iterator[_Setting]:
    """Yield the size that counts: ``target_mode`` says which of two (MindSpeed; false by default there)."""
    sizes = {name: theirs[name] for name in ("target_memory", "reduction_memory") if name in theirs}
    mode_path, mode = ("memory", "target_mode"), theirs.get("target_mode")
    if mode is None and ("target_mode" in theirs or not sizes):
        return
    if mode is None and "reduction_memory" not in sizes:
        line = "`memory.target_memory` is the budget, as if target_mode were true, which is not written."
        findings.note(("memory", "target_memory"), line)
        mode = True
    counts, other = ("target_memory", "reduction_memory") if mode else ("reduction_memory", "target_memory")
    key, default = ("budget_gib", TARGET_MEMORY_BYTES) if mode else ("reduce_by_gib", REDUCTION_MEMORY_BYTES)
    if other in sizes:
        wanted = "false" if mode else "true"
        line = f"`memory.{other}` counts where target_mode is {wanted}; it is ignored."
        findings.note(("memory", other), line)
    if counts in sizes:
        yield _Setting(key, ("memory", counts), sizes[counts])
    elif section.get(key) is None:
        line = f"{counts} is not written; MindSpeed's default counts, {key} {default // GIB}."
        findings.note(mode_path, f"`memory.target_mode`: {line}")
        yield _Setting(key, mode_path, default / GIB)


def _plan_file(findings: Findings, theirs: Mapping[str, Any]) -> Iterator[_Setting]:
    """Yield ``plan_file`` of ``save_policy``: a file in ``output_root_path``."""
    path, root_path = ("memory", "save_policy"), ("memory", "output_root_path")
    root, saves = theirs.get("output_root_path", OUTPUT_ROOT_PATH), theirs.get("save_policy", False)
    if saves is None or (saves and root is None):
        yield _Setting("plan_file", path, None)
    elif saves:
        file = f"{root.rstrip('/')}/plan.json"
        line = f"the plan is written to {file}, and read from there by a run that it fits."
        findings.note(path, f"`memory.save_policy`: {line}")
        yield _Setting("plan_file", path, file)
    elif "output_root_path" in theirs:
        findings.note(root_path, "`memory.output_root_path` counts where save_policy is true; it is ignored.")
