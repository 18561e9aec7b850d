"""Reads ``parallel_config``, and what MindFormers' own sections say about the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from .keys import FOREIGN_PARALLEL_KEYS, PARALLEL_KEYS, PARALLEL_SPELLINGS, ignored_key_note
from .reader import Findings, Path, is_int, read_bool, read_choice, read_int, read_section, show, where
from .schema import Offset, ParallelConfig, PipelineSchedule
from .tables import TableShape, read_table

MODEL_CONFIG: Path = ("model", "model_config")
PIPELINE_INTERLEAVE: Path = ("parallel", "pipeline_config", "pipeline_interleave")

EXPECTED_OFFSET = "a whole number, a list of them per stage, or a table per (interleave, stage)"

_Read = Callable[[Findings, Path, object], Any]


def read_parallel(findings: Findings) -> tuple[ParallelConfig, TableShape | None]:
    """Read ``parallel_config`` together with ``model.model_config`` and ``parallel.pipeline_config``.

    ``parallel.pipeline_config.pipeline_interleave: false`` switches interleaving off whatever
    ``pp_interleave_num`` says, as in the reference.

    Returns:
        The section, and the shape that tables per stage must have: ``None`` if the document does not state
        a pipeline (a fragment with tables only) or states it wrongly.
    """
    section = read_section(findings, "parallel_config", PARALLEL_KEYS, FOREIGN_PARALLEL_KEYS)
    for key in section:
        if key in FOREIGN_PARALLEL_KEYS:
            findings.note(("parallel_config", key), ignored_key_note(f"parallel_config.{key}"))
    values = {
        field: _read_spellings(findings, _written(findings, field), read)
        for field, read in (
            ("tensor_parallel_size", _read_size),
            ("sequence_parallel_enabled", read_bool),
            ("pipeline_stage", _read_size),
            ("pp_interleave_num", _read_size),
            ("schedule", _read_schedule),
        )
    }
    interleave = _read_interleave(findings)
    if interleave is False:
        values["pp_interleave_num"] = 1
    shape = _shape(findings, values["pipeline_stage"], values["pp_interleave_num"])

    def read_offset(at: Findings, path: Path, value: object) -> Offset | None:
        return _read_offset(at, path, value, shape)

    offset_paths = _written(findings, "offset")
    values["offset"] = _read_spellings(findings, offset_paths, read_offset)
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


def _read_spellings(findings: Findings, paths: list[Path], read: _Read) -> Any:
    """Read a value that may be written in several places; they must agree."""
    values = [(path, read(findings, path, lookup(findings, path))) for path in paths]
    readable = [(path, value) for path, value in values if value is not None]
    if not readable:
        return None
    first_path, first = readable[0]
    for path, value in readable[1:]:
        if value != first:
            expected = f"the same as {where(first_path)} ({show(first)})"
            findings.problem(path, expected, show(value), "Write it once.")
    return first if len(readable) == len(values) else None


def _read_size(findings: Findings, path: Path, value: object) -> int | None:
    return read_int(findings, path, value, minimum=1)


def _read_schedule(findings: Findings, path: Path, value: object) -> str | None:
    return read_choice(findings, path, value, get_args(PipelineSchedule))


def _read_interleave(findings: Findings) -> bool | None:
    value = lookup(findings, PIPELINE_INTERLEAVE)
    return None if value is None else read_bool(findings, PIPELINE_INTERLEAVE, value)


def _shape(findings: Findings, stages: int | None, interleave: int | None) -> TableShape | None:
    """Return the shape of tables; ``None`` if a size of it was written but could not be read."""
    for size, field in ((stages, "pipeline_stage"), (interleave, "pp_interleave_num")):
        if size is None and _written(findings, field):
            return None
    return TableShape(stages or 1, interleave or 1)


def _read_offset(findings: Findings, path: Path, value: object, shape: TableShape | None) -> Offset | None:
    if isinstance(value, int) and is_int(value):
        return value
    if not isinstance(value, list | tuple):
        findings.problem(path, EXPECTED_OFFSET, show(value))
        return None
    return read_table(findings, path, value, read_int, shape=shape, bool_rows=False, may_be_short=False)
