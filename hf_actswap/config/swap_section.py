"""Reads ``swap_config`` (MindFormers, Fine-Grained Activations SWAP)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, get_type_hints

from .keys import SWAP_KEYS
from .op_path import op_path_fault
from .reader import (
    Findings,
    Path,
    check_keys,
    is_int,
    read_bool,
    read_items,
    read_section,
    show,
    where,
)
from .schema import Layers, LayerSwapRule, OpSwapRule, Prefetch, SwapConfig

EXPECTED_LAYERS = "true, false or a flat list of layer indices"
EXPECTED_PREFETCH = "a whole number of operators, at least 1, or auto"
EXPECTED_OP_NAME = "an op path or a list of op paths"

_LAYER_ENTRY_KEYS = ("backward_prefetch", "layers")
_OP_ENTRY_KEYS = ("op_name", "backward_prefetch", "layers")

_ANY_OP = ".*"

RuleT = TypeVar("RuleT", LayerSwapRule, OpSwapRule)


@dataclass(frozen=True)
class _WrittenRule(Generic[RuleT]):
    """A rule and the path of the entry that it was written in.

    If an entry is not ``whole``, a part of it could not be read and has a harmless value instead, so that the
    rest can still be checked with a model.
    """

    path: Path
    rule: RuleT
    whole: bool = True


def read_swap(findings: Findings) -> SwapConfig:
    """Read ``swap_config``, each key by the type that `SwapConfig` declares for it.

    With ``swap`` false everything is read and checked all the same. A key that is ``null`` counts as not
    written, except where true or false is expected.
    """
    section = read_section(findings, "swap_config", SWAP_KEYS)
    values: dict[str, Any] = {}
    for key, kind in get_type_hints(SwapConfig).items():
        if section.get(key) is not None or (kind is bool and key in section):
            values[key] = _READERS[kind](findings, ("swap_config", key), section[key])
    return SwapConfig(**{key: value for key, value in values.items() if value is not None})


def swap_is_unreadable(findings: Findings) -> bool:
    """Whether ``swap_config.swap`` is neither true nor false, so that it is unknown which rules apply."""
    section = findings.document.get("swap_config") or {}
    return not (isinstance(section, Mapping) and isinstance(section.get("swap", False), bool))


def read_prefetch(findings: Findings, path: Path, value: object) -> Prefetch | None:
    """Read a prefetch number (operators, at least 1) or ``auto``."""
    if isinstance(value, str) and value in ("auto", "Auto"):
        auto: Literal["auto"] = "auto"
        return auto
    if isinstance(value, int) and is_int(value) and value >= 1:
        return value
    findings.problem(path, EXPECTED_PREFETCH, show(value))
    return None


def read_layers(findings: Findings, path: Path, value: object) -> Layers | None:
    """Read ``layers``: a bool, or a flat list of distinct global layer indices."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, list | tuple):
        hint = f"Write [{value}]." if is_int(value) and isinstance(value, int) and value >= 0 else ""
        findings.problem(path, EXPECTED_LAYERS, show(value), hint)
        return None
    if any(isinstance(item, list | tuple) for item in value):
        findings.problem(path, EXPECTED_LAYERS, show(value), "Layers are global indices in one flat list.")
        return None
    indices = read_items(findings, path, value, read_layer_index)
    if indices is None:
        return None
    first_places = {index: place for place, index in reversed(list(enumerate(indices)))}
    repeated = [place for place, index in enumerate(indices) if first_places[index] != place]
    for place in repeated:
        findings.problem((*path, place), "each layer once", f"layer {indices[place]} again")
    return None if repeated else indices


def read_layer_index(findings: Findings, path: Path, value: object) -> int | None:
    """Read one global layer index."""
    if isinstance(value, int) and is_int(value) and value >= 0:
        return value
    # Python counts true as 1: the reference takes [true] for layer 1.
    hint = f"As a number it would be layer {int(value)}." if isinstance(value, bool) else ""
    findings.problem(path, "a layer index (a whole number, at least 0)", show(value), hint)
    return None


def read_op_path(findings: Findings, path: Path, value: object) -> str | None:
    """Read one op path; every segment of it must be a regular expression that compiles."""
    if not isinstance(value, str):
        findings.problem(path, "an op path (a text)", show(value))
        return None
    fault = op_path_fault(value)
    if fault:
        hint = r"Levels are separated by \. (in single quotes) or by a plain dot."
        findings.problem(path, "an op path (a regular expression per level)", fault, hint)
        return None
    return value


def _read_layer_rules(findings: Findings, path: Path, value: object) -> tuple[Any, ...]:
    return _collapse(findings, _read_entries(findings, path, value, _read_layer_entry), _layer_group)


def _read_op_rules(findings: Findings, path: Path, value: object) -> tuple[Any, ...]:
    return _collapse(findings, _read_entries(findings, path, value, _read_op_entry), _op_group)


def _read_entries(
    findings: Findings,
    path: Path,
    value: object,
    read_entry: Callable[[Findings, Path, Mapping[Any, Any]], list[_WrittenRule[Any]]],
) -> list[_WrittenRule[Any]]:
    """Return all rules of a list of entries; a single entry may stand without the list."""
    if isinstance(value, Mapping):
        return read_entry(findings, path, value)
    if not isinstance(value, list | tuple):
        findings.problem(path, "a list of entries, or one entry (a mapping)", show(value))
        return []
    entries: list[_WrittenRule[Any]] = []
    for index, item in enumerate(value):
        here = (*path, index)
        if isinstance(item, Mapping):
            entries += read_entry(findings, here, item)
        else:
            findings.problem(here, "an entry (a mapping)", show(item))
    return entries


def _read_layer_entry(
    findings: Findings, path: Path, entry: Mapping[Any, Any]
) -> list[_WrittenRule[LayerSwapRule]]:
    check_keys(findings, path, entry, _LAYER_ENTRY_KEYS)
    prefetch = _read_key(findings, path, entry, "backward_prefetch", read_prefetch, EXPECTED_PREFETCH)
    layers = _read_key(findings, path, entry, "layers", read_layers, EXPECTED_LAYERS)
    whole = prefetch is not None and layers is not None
    return [_WrittenRule(path, LayerSwapRule(prefetch or 1, layers if layers is not None else False), whole)]


def _read_op_entry(
    findings: Findings, path: Path, entry: Mapping[Any, Any]
) -> list[_WrittenRule[OpSwapRule]]:
    check_keys(findings, path, entry, _OP_ENTRY_KEYS)
    names = _read_key(findings, path, entry, "op_name", read_op_names, EXPECTED_OP_NAME)
    prefetch = _read_key(findings, path, entry, "backward_prefetch", read_prefetch, EXPECTED_PREFETCH)
    layers = _read_key(findings, path, entry, "layers", read_layers, EXPECTED_LAYERS)
    whole = names is not None and prefetch is not None and layers is not None
    where_to = layers if layers is not None else False
    rules = (OpSwapRule(name, prefetch or 1, where_to) for name in names or (_ANY_OP,))
    return [_WrittenRule(path, rule, whole) for rule in rules]


def _read_key(
    findings: Findings,
    path: Path,
    entry: Mapping[Any, Any],
    key: str,
    read: Callable[[Findings, Path, object], Any],
    expected: str,
) -> Any:
    if key in entry:
        return read(findings, (*path, key), entry[key])
    findings.problem((*path, key), expected, "nothing")
    return None


def read_op_names(findings: Findings, path: Path, value: object) -> tuple[str, ...] | None:
    """Read one op path, or a list of them."""
    if isinstance(value, str):
        name = read_op_path(findings, path, value)
        return None if name is None else (name,)
    if isinstance(value, list | tuple) and value:
        return read_items(findings, path, value, read_op_path)
    findings.problem(
        path, EXPECTED_OP_NAME, "an empty list" if isinstance(value, list | tuple) else show(value)
    )
    return None


def _layer_group(rule: LayerSwapRule) -> str:
    return "`layer_swap`"


def _op_group(rule: OpSwapRule) -> str:
    return f"op '{rule.op_name}'"


def _collapse(
    findings: Findings, entries: list[_WrittenRule[Any]], group_of: Callable[[Any], str]
) -> tuple[Any, ...]:
    """Return the rules, where a rule for all layers replaces its group, at the place of the group's first.

    As in the reference (``TransformerSwapConfig``), all entries of such a group must agree on the prefetch.
    If they do not, the problem is noted at the later of two entries: that for all layers, and the first with
    another prefetch.
    """
    groups: dict[str, list[_WrittenRule[Any]]] = {}
    for entry in entries:
        groups.setdefault(group_of(entry.rule), []).append(entry)
    rules: list[Any] = []
    for entry in entries:
        members = groups[group_of(entry.rule)]
        everywhere = next((member for member in members if member.rule.layers is True), None)
        if everywhere is None:
            rules.append(entry.rule)
        elif entry is members[0]:
            _check_group(findings, group_of(entry.rule), members, everywhere)
            # Same prefetch in all members, or a problem was noted: the rule for all layers replaces them.
            rules.append(everywhere.rule)
    return tuple(rules)


def _check_group(
    findings: Findings, group: str, members: list[_WrittenRule[Any]], everywhere: _WrittenRule[Any]
) -> None:
    whole = [member for member in members if member.whole]
    other = next((m for m in whole if m.rule.backward_prefetch != whole[0].rule.backward_prefetch), None)
    if other is None:
        return
    at = max(members.index(other), members.index(everywhere))
    values = ", ".join(str(member.rule.backward_prefetch) for member in whole)
    findings.problem(
        members[at].path,
        f"the same backward_prefetch in all entries of {group}",
        values,
        f"They must agree because {where(everywhere.path)} is for all layers.",
    )


_READERS: Mapping[Any, Callable[[Findings, Path, object], Any]] = {
    bool: read_bool,
    Prefetch: read_prefetch,
    Layers: read_layers,
    tuple[LayerSwapRule, ...] | None: _read_layer_rules,
    tuple[OpSwapRule, ...] | None: _read_op_rules,
}
"""Declared type of a key -> function that reads it."""
