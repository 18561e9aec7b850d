"""Reads the sections of a document but ``memory``: swap, recomputation, parallelism, tiles, streaming.

Types say what a key may hold (`schema`); here is what several keys mean together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from .documents import needed_keys
from .keys import FOREIGN_PARALLEL_KEYS, PARALLEL_KEYS, PARALLEL_SPELLINGS, ignored_key_note
from .layer_values import Around, OpNames, TableShape
from .schema import (
    LayerSwapRule,
    OpSwapRule,
    OpTileRule,
    ParallelConfig,
    RecomputeConfig,
    StreamConfig,
    SwapConfig,
    TileConfig,
)
from .validation import NOTHING, Findings, Flag, Path, is_off_word, show, where

MODEL_CONFIG: Path = ("model", "model_config")
PIPELINE_INTERLEAVE: Path = ("parallel", "pipeline_config", "pipeline_interleave")

_FLAG: TypeAdapter[Any] = TypeAdapter(Flag)
_OP_NAMES: TypeAdapter[Any] = TypeAdapter(OpNames)


@cache
def types_of(kind: Any) -> Mapping[str, TypeAdapter[Any]]:
    """Return the type of each key of a section or an entry."""
    return {name: TypeAdapter(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}


def types_of_entry(rule: Any) -> Mapping[str, TypeAdapter[Any]]:
    """Return the type of each key of an entry, of which rules are made: one for each of its op names."""
    types = types_of(rule)
    return {**types, "op_name": _OP_NAMES} if "op_name" in types else types


@dataclass(frozen=True)
class _Entry:
    """What could be read of an entry, and where it stands; ``whole``: all that it must hold."""

    path: Path
    values: dict[str, Any]
    whole: bool


_WrittenRule = tuple[_Entry, LayerSwapRule | OpSwapRule]
"""An entry, and a rule of it: what could not be read is harmless there, so that the rest can be checked."""


def _read_entries(findings: Findings, path: Path, value: object, rule: Any) -> list[_Entry]:
    """Read a list of entries; a single one may stand without the list, and off is an empty list."""
    if value is None or is_off_word(value):
        return []
    if not isinstance(value, list | tuple | Mapping):
        findings.problem(path, "a list of entries, or one entry (a mapping)", show(value))
        return []
    single = isinstance(value, Mapping)
    types, needed, entries = types_of_entry(rule), needed_keys(rule), []
    for index, item in enumerate([value] if single else value):
        at = path if single else (*path, index)
        if not isinstance(item, Mapping):
            findings.problem(at, "an entry (a mapping)", show(item))
            continue
        values = findings.keys(at, item, types, null=("tokens",))
        for key in types:
            if key in needed and key not in item:
                findings.read(types[key], (*at, key), NOTHING)
        entries.append(_Entry(at, values, needed <= values.keys()))
    return entries


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
    for key, kind in (("layer_swap", LayerSwapRule), ("op_swap", OpSwapRule)):
        if written.get(key) is not None:
            entries = _read_entries(findings, ("swap_config", key), written[key], kind)
            rules = [(entry, rule) for entry in entries for rule in _swap_rules(entry, kind)]
            values[key] = _collapse(findings, rules)
    return SwapConfig(**values)


def swap_is_unreadable(findings: Findings) -> bool:
    """Whether ``swap_config.swap`` is neither true nor false, so that it is unknown which rules apply."""
    section = findings.document.get("swap_config") or {}
    return not (isinstance(section, Mapping) and isinstance(section.get("swap", False), bool))


def _swap_rules(entry: _Entry, kind: Any) -> Sequence[LayerSwapRule | OpSwapRule]:
    values = {"op_name": (".*",), "backward_prefetch": 1, "layers": False, **entry.values}
    names = values.pop("op_name")
    return [OpSwapRule(name, **values) for name in names] if kind is OpSwapRule else [LayerSwapRule(**values)]


def _group_of(rule: LayerSwapRule | OpSwapRule) -> str:
    return f"op '{rule.op_name}'" if isinstance(rule, OpSwapRule) else "`layer_swap`"


def _collapse(findings: Findings, written: Sequence[_WrittenRule]) -> tuple[Any, ...]:
    """Return the rules, where a rule for all layers replaces its group, at the place of the group's first.

    As in the reference (``TransformerSwapConfig``), all entries of such a group must agree on the prefetch.
    If they do not, the problem is noted at the later of two entries: that for all layers, and the first with
    another prefetch.
    """
    groups: dict[str, list[_WrittenRule]] = {}
    for one in written:
        groups.setdefault(_group_of(one[1]), []).append(one)
    rules: list[Any] = []
    for one in written:
        members = groups[_group_of(one[1])]
        everywhere = next((member for member in members if member[1].layers is True), None)
        if everywhere is None:
            rules.append(one[1])
        elif one is members[0]:
            # Same prefetch in all members, or a problem is noted: the rule for all layers replaces them.
            _check_group(findings, members, everywhere)
            rules.append(everywhere[1])
    return tuple(rules)


def _check_group(findings: Findings, members: list[_WrittenRule], everywhere: _WrittenRule) -> None:
    whole = [member for member in members if member[0].whole]
    ahead = [rule.backward_prefetch for _, rule in whole]
    other = next((one for one, prefetch in zip(whole, ahead, strict=True) if prefetch != ahead[0]), None)
    if other is not None:
        entry, rule = members[max(members.index(other), members.index(everywhere))]
        expected = f"the same backward_prefetch in all entries of {_group_of(rule)}"
        hint = f"They must agree because {where(everywhere[0].path)} is for all layers."
        findings.problem(entry.path, expected, ", ".join(map(str, ahead)), hint)


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
    section = findings.document.get("tile_config")
    types = {"loss": types_of(TileConfig)["loss"]}
    values = findings.keys(("tile_config",), section, types, also=("tile",))
    if isinstance(section, Mapping):
        entries = _read_entries(findings, ("tile_config", "tile"), section.get("tile"), OpTileRule)
        rules = [(entry.values.pop("op_name", ()), entry.values) for entry in entries]
        values["tile"] = tuple(OpTileRule(name, **rest) for names, rest in rules for name in names)
    return TileConfig(**values)


def read_stream(findings: Findings) -> StreamConfig:
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
