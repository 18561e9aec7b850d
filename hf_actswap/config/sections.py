"""Reads the sections of a document but ``memory``: swap, recomputation, parallelism, tiles, streaming.

Types say what a key may hold (`schema`); here is what several keys mean together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from .keys import FOREIGN_PARALLEL_KEYS, PARALLEL_KEYS, PARALLEL_SPELLINGS, ignored_key_note
from .layer_values import Around, Layers, OpNames, TableShape
from .schema import (
    LayerSwapRule,
    OpSwapRule,
    OpTileRule,
    ParallelConfig,
    Prefetch,
    RecomputeConfig,
    StreamConfig,
    SwapConfig,
    TileConfig,
    TileLength,
)
from .validation import NOTHING, Findings, Flag, Path, show, where

MODEL_CONFIG: Path = ("model", "model_config")
PIPELINE_INTERLEAVE: Path = ("parallel", "pipeline_config", "pipeline_interleave")

_ANY_OP = ".*"
_FLAG: TypeAdapter[Any] = TypeAdapter(Flag)

RuleT = TypeVar("RuleT", LayerSwapRule, OpSwapRule)


class LayerEntry(TypedDict):
    """An entry of ``layer_swap`` as it is written."""

    backward_prefetch: Prefetch
    layers: Layers


class OpEntry(TypedDict):
    """An entry of ``op_swap`` as it is written."""

    op_name: OpNames
    backward_prefetch: Prefetch
    layers: Layers


class _TiledOp(TypedDict):
    op_name: OpNames


class TileEntry(_TiledOp, total=False):
    """An entry of ``tile`` as it is written."""

    tokens: TileLength
    layers: Layers


@cache
def types_of(kind: Any) -> Mapping[str, TypeAdapter[Any]]:
    """Return the type of each key of a section or an entry."""
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


@dataclass(frozen=True)
class _Entry:
    """What could be read of an entry, and where it stands; ``whole``: all that it must hold."""

    path: Path
    values: Mapping[str, Any]
    whole: bool


def _read_entries(findings: Findings, path: Path, value: object, kind: Any) -> list[_Entry]:
    """Read a list of entries; a single one may stand without the list."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [_read_entry(findings, path, value, kind)]
    if not isinstance(value, list | tuple):
        findings.problem(path, "a list of entries, or one entry (a mapping)", show(value))
        return []
    entries = []
    for index, item in enumerate(value):
        if isinstance(item, Mapping):
            entries.append(_read_entry(findings, (*path, index), item, kind))
        else:
            findings.problem((*path, index), "an entry (a mapping)", show(item))
    return entries


def _read_entry(findings: Findings, path: Path, entry: Mapping[Any, Any], kind: Any) -> _Entry:
    types = types_of(kind)
    values = findings.keys(path, entry, types, null=("tokens",))
    for key in types:
        if key in kind.__required_keys__ and key not in entry:
            findings.read(types[key], (*path, key), NOTHING)
    return _Entry(path, values, kind.__required_keys__ <= values.keys())


def read_swap(findings: Findings) -> SwapConfig:
    """Read ``swap_config`` (MindFormers, Fine-Grained Activations SWAP).

    With ``swap`` false everything is read and checked all the same. A key that is ``null`` counts as not
    written, except where true or false is expected.
    """
    lists = ("layer_swap", "op_swap")
    types = {key: kind for key, kind in types_of(SwapConfig).items() if key not in lists}
    section = findings.document.get("swap_config")
    null = ("default_prefetch", "recompute_input", "select_recompute_input")
    values = findings.keys(("swap_config",), section, types, also=lists, null=null)
    written = section if isinstance(section, Mapping) else {}
    for key, kind, rules_of, group_of in (
        ("layer_swap", LayerEntry, _layer_rules, _layer_group),
        ("op_swap", OpEntry, _op_rules, _op_group),
    ):
        if written.get(key) is not None:
            entries = _read_entries(findings, ("swap_config", key), written[key], kind)
            values[key] = _collapse(findings, [r for entry in entries for r in rules_of(entry)], group_of)
    return SwapConfig(**values)


def swap_is_unreadable(findings: Findings) -> bool:
    """Whether ``swap_config.swap`` is neither true nor false, so that it is unknown which rules apply."""
    section = findings.document.get("swap_config") or {}
    return not (isinstance(section, Mapping) and isinstance(section.get("swap", False), bool))


@dataclass(frozen=True)
class _WrittenRule(Generic[RuleT]):
    """A rule and the path of the entry that it was written in.

    If an entry is not ``whole``, a part of it could not be read and has a harmless value instead, so that the
    rest can still be checked with a model.
    """

    path: Path
    rule: RuleT
    whole: bool


def _layer_rules(entry: _Entry) -> list[_WrittenRule[Any]]:
    prefetch, layers = entry.values.get("backward_prefetch", 1), entry.values.get("layers", False)
    return [_WrittenRule(entry.path, LayerSwapRule(prefetch, layers), entry.whole)]


def _op_rules(entry: _Entry) -> list[_WrittenRule[Any]]:
    prefetch, layers = entry.values.get("backward_prefetch", 1), entry.values.get("layers", False)
    names = entry.values.get("op_name", (_ANY_OP,))
    return [_WrittenRule(entry.path, OpSwapRule(name, prefetch, layers), entry.whole) for name in names]


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


def read_recompute(findings: Findings, *, swap: bool | None, shape: TableShape | None) -> RecomputeConfig:
    """Read ``recompute_config`` (MindFormers, Memory Optimization).

    Args:
        findings: the document, and where problems go.
        swap: ``swap_config.swap``; ``None``: it is unreadable, and only what is wrong either way is named.
        shape: shape of the pipeline that the document states; ``None``: it states none.
    """
    section = findings.document.get("recompute_config")
    around = Around(swap is True, None if swap is None else shape)
    return RecomputeConfig(**findings.keys(("recompute_config",), section, types_of(RecomputeConfig), around))


def read_tiles(findings: Findings) -> TileConfig:
    """Read ``tile_config``."""
    section = findings.document.get("tile_config")
    types = {"loss": types_of(TileConfig)["loss"]}
    values = findings.keys(("tile_config",), section, types, also=("tile",))
    if isinstance(section, Mapping):
        entries = _read_entries(findings, ("tile_config", "tile"), section.get("tile"), TileEntry)
        values["tile"] = tuple(rule for entry in entries for rule in _tile_rules(entry))
    return TileConfig(**values)


def _tile_rules(entry: _Entry) -> list[OpTileRule]:
    tokens, layers = entry.values.get("tokens", "auto"), entry.values.get("layers", True)
    return [OpTileRule(name, tokens, layers) for name in entry.values.get("op_name", ())]


def read_stream(findings: Findings) -> StreamConfig:
    """Read ``stream_config``."""
    section, types = findings.document.get("stream_config"), types_of(StreamConfig)
    return StreamConfig(**findings.keys(("stream_config",), section, types, null=types))


def read_parallel(findings: Findings) -> tuple[ParallelConfig, TableShape | None]:
    """Read ``parallel_config`` together with ``model.model_config`` and ``parallel.pipeline_config``.

    ``parallel.pipeline_config.pipeline_interleave: false`` switches interleaving off whatever
    ``pp_interleave_num`` says, as in the reference.

    Returns:
        The section, and the shape that tables per stage must have: ``None`` if the document does not state
        a pipeline (a fragment with tables only) or states it wrongly.
    """
    section = findings.document.get("parallel_config")
    findings.keys(("parallel_config",), section, {}, also=PARALLEL_KEYS, ignored=FOREIGN_PARALLEL_KEYS)
    for key in section if isinstance(section, Mapping) else ():
        if key in FOREIGN_PARALLEL_KEYS:
            findings.note(("parallel_config", key), ignored_key_note(f"parallel_config.{key}"))
    values = {field: _read_spellings(findings, field) for field in PARALLEL_SPELLINGS if field != "offset"}
    written = lookup(findings, PIPELINE_INTERLEAVE)
    interleave = None if written is None else findings.read(_FLAG, PIPELINE_INTERLEAVE, written)
    if interleave is False:
        values["pp_interleave_num"] = 1
    shape = _shape(findings, values["pipeline_stage"], values["pp_interleave_num"])
    values["offset"] = _read_spellings(findings, "offset", Around(shape=shape))
    stated = any(_written(findings, key) for key in ("pipeline_stage", "pp_interleave_num", "offset"))
    config = ParallelConfig(**{key: value for key, value in values.items() if value is not None})
    return config, shape if stated or interleave is False else None


def lookup(findings: Findings, path: Path) -> Any:
    """Return the value at ``path``, or ``None`` if some step of it is missing or no mapping."""
    value: Any = findings.document
    for step in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(step)
    return value


def honoured_in_model(findings: Findings) -> tuple[str, ...]:
    """Return the keys written in ``model.model_config`` that count as keys of ``parallel_config``."""
    model_config = lookup(findings, MODEL_CONFIG)
    if not isinstance(model_config, Mapping):
        return ()
    return tuple(key for key in ("offset", "pp_interleave_num") if key in model_config)


def _written(findings: Findings, field: str) -> list[Path]:
    """Return every path in the document that sets ``field``, in the order of the document."""
    section = findings.document.get("parallel_config")
    paths: list[Path] = []
    if isinstance(section, Mapping):
        paths += [("parallel_config", key) for key in PARALLEL_SPELLINGS[field] if key in section]
    if field in honoured_in_model(findings):
        paths.append((*MODEL_CONFIG, field))
    return sorted(paths, key=findings.position)


def _read_spellings(findings: Findings, field: str, context: Any = None) -> Any:
    """Read a value that may be written in several places; they must agree."""
    paths, kind = _written(findings, field), types_of(ParallelConfig)[field]
    values = [(path, findings.read(kind, path, lookup(findings, path), context)) for path in paths]
    readable = [(path, value) for path, value in values if value is not None]
    if not readable:
        return None
    first_path, first = readable[0]
    for path, value in readable[1:]:
        if value != first:
            expected = f"the same as {where(first_path)} ({show(first)})"
            findings.problem(path, expected, show(value), "Write it once.")
    return first if len(readable) == len(values) else None


def _shape(findings: Findings, stages: int | None, interleave: int | None) -> TableShape | None:
    """Return the shape of tables; ``None`` if a size of it was written but could not be read."""
    for size, field in ((stages, "pipeline_stage"), (interleave, "pp_interleave_num")):
        if size is None and _written(findings, field):
            return None
    return TableShape(stages or 1, interleave or 1)
