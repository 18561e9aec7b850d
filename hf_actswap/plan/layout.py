"""The pipeline layout: which layers stand on which stage, and what the recompute keys mean on it.

With interleaving a stage holds several chunks of consecutive layers, and layers are numbered
interleave-major: all stages of interleave 0 in order, then all of interleave 1. ``counts[v][s]`` is the
number of layers in the chunk of interleave ``v`` on stage ``s``. Pure arithmetic, after MindFormers'
``LayerSetting``.

**Tables.** MindFormers writes recompute keys as *numbers of layers per pipeline stage*. Every form of value
is normalised ("formative" in the reference's log) to a table ``[interleave][stage]``, which says how many of
the *first* layers of each chunk are meant. With ``swap: true`` the same keys name global layer indices
instead, and the layout plays no part: ``[2, 1]`` is then "layers 2 and 1".

Nothing here raises on what a user wrote: each function returns its result beside the list of problems
found; with problems, the result is not to be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from ..config import LayerCounts, Layers, Offset, OpSelection, ParallelConfig
from ..errors import Problem

CountTable = tuple[tuple[int, ...], ...]
"""Numbers of layers, [interleave][stage]."""


@dataclass(frozen=True)
class PipelineLayout:
    """Layers per chunk, as ``counts[interleave][stage]``; layers are numbered interleave-major."""

    counts: CountTable

    @property
    def vpp(self) -> int:
        """Chunks per stage (``pp_interleave_num``)."""
        return len(self.counts)

    @property
    def pp(self) -> int:
        return len(self.counts[0])

    @property
    def offset(self) -> tuple[int, ...] | CountTable:
        """``parallel_config.offset`` for this layout: a row per interleave; just the row if there is one."""
        base = self.num_layers // (self.pp * self.vpp)
        rows = tuple(tuple(count - base for count in row) for row in self.counts)
        return rows if self.vpp > 1 else rows[0]

    @property
    def num_layers(self) -> int:
        return self._ends[-1][-1]

    @cached_property
    def _ends(self) -> CountTable:
        """Index after the last layer of each chunk, [interleave][stage]."""
        ends = list(accumulate(count for row in self.counts for count in row))
        return tuple(tuple(ends[v * self.pp : (v + 1) * self.pp]) for v in range(self.vpp))

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        chunks = [(v, s) for v in range(self.vpp) for s in range(self.pp)]
        return tuple(place for place in chunks for _ in self.chunk(*place))

    def chunk(self, v: int, s: int) -> range:
        """Return the global indices of the layers of interleave ``v`` on stage ``s``."""
        end = self._ends[v][s]
        return range(end - self.counts[v][s], end)

    def stage_of(self, layer: int) -> int:
        """Return the stage of a global layer index. Raises `IndexError` outside the model."""
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} of {self.num_layers}")
        return self._places[layer][1]

    def layers_of(self, stage: int) -> tuple[int, ...]:
        """Return the global indices of all layers of a stage, ascending."""
        return tuple(layer for v in range(self.vpp) for layer in self.chunk(v, stage))

    def log_lines(self) -> tuple[str, str, str, str]:
        """Return the four lines that the reference logs about a layout, in its order."""
        return (
            f"num_layers per stage: {_listed(self.counts)}",
            f"Accumulated num_layers per stage: {_listed(self._ends)}",
            f"Pipeline id list with start_stage: {[stage for _, stage in self._places]}",
            f"Interleave id list: {[interleave for interleave, _ in self._places]}",
        )


def _listed(table: CountTable) -> list[list[int]]:
    return [list(row) for row in table]


def build_layout(
    num_layers: int, parallel: ParallelConfig, where: str = "parallel_config.offset"
) -> tuple[PipelineLayout | None, list[Problem]]:
    """Lay ``num_layers`` out over ``pipeline_stage`` x ``pp_interleave_num`` chunks.

    Each chunk has ``num_layers // chunks`` layers plus its ``offset``. A number or a row is repeated for
    every chunk or interleave, and the whole table must add up to the remainder: the reference adds
    before it repeats, and so accepts offsets that yield more layers than the model has. As in MindFormers
    from 1.8 on, only the first and the last chunk may be empty, and none negative.
    """
    pp, vpp = parallel.pipeline_stage, parallel.pp_interleave_num
    if min(num_layers, pp, vpp) < 1:
        found = f"num_layers {num_layers}, pipeline_stage {pp}, pp_interleave_num {vpp}"
        return None, [Problem(where, "at least one layer, stage and interleave", found)]
    offsets, problems = _offset_table(parallel.offset, pp, vpp, where)
    if problems:
        return None, problems
    base, remainder = divmod(num_layers, pp * vpp)
    total = sum(map(sum, offsets))
    if total != remainder:
        expected = (
            f"offsets that add up to {remainder} over {counted(pp * vpp, 'chunk')} "
            f"({num_layers} layers % (pipeline_stage {pp} * pp_interleave_num {vpp}))"
        )
        found = f"{shown(parallel.offset)}, which adds up to {total}"
        return None, [Problem(where, expected, found, _offset_hint(num_layers, pp, vpp))]
    counts = tuple(tuple(base + offset for offset in row) for row in offsets)
    problems = _thin_chunks(counts, where)
    return (None, problems) if problems else (PipelineLayout(counts), [])


def _offset_table(offset: Offset, pp: int, vpp: int, where: str) -> tuple[CountTable, list[Problem]]:
    if isinstance(offset, int):
        return ((offset,) * pp,) * vpp, []
    rows = [row for row in offset if isinstance(row, tuple)]
    if not rows:
        flat = tuple(item for item in offset if isinstance(item, int))
        rows, problems = [flat] * vpp, width_problems(len(flat), pp, where)
    elif len(rows) != vpp or len(rows) != len(offset):
        problems = [rows_problem(len(offset), vpp, where)]
    else:
        problems = [p for v, row in enumerate(rows) for p in width_problems(len(row), pp, f"{where}[{v}]")]
    return tuple(rows), problems


def width_problems(found: int, pp: int, where: str) -> list[Problem]:
    if found == pp:
        return []
    return [Problem(where, f"{counted(pp, 'number')}, one per pipeline stage", counted(found, "number"))]


def rows_problem(found: int, vpp: int, where: str) -> Problem:
    expected = f"{counted(vpp, 'row')}, one per interleave (pp_interleave_num {vpp})"
    return Problem(where, expected, counted(found, "row"))


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _offset_hint(num_layers: int, pp: int, vpp: int) -> str:
    """Name an offset that fits: the layers left over go to the middle chunks first, as in the documents."""
    chunks = pp * vpp
    if num_layers < chunks - 2:
        return f"{counted(num_layers, 'layer')} cannot fill {chunks} chunks."
    flat = [0] * chunks
    for chunk in [*range(1, chunks - 1), 0][: num_layers % chunks]:
        flat[chunk] = 1
    rows = [flat[v * pp : (v + 1) * pp] for v in range(vpp)]
    return f"For example {(rows[0] if vpp == 1 else rows) if any(flat) else 0}."


def _thin_chunks(counts: CountTable, where: str) -> list[Problem]:
    """Return a problem for each chunk with too few layers: below 0 at the model's ends, below 1 between."""
    problems = []
    last = (len(counts) - 1, len(counts[0]) - 1)
    for v, row in enumerate(counts):
        for s, count in enumerate(row):
            least = 0 if (v, s) in ((0, 0), last) else 1
            if count < least:
                expected = f"at least {least} in the chunk of stage {s}, interleave {v}"
                problems.append(Problem(where, f"{expected} (base plus offset)", str(count)))
    return problems


def shown(value: object) -> str:
    """Return a value of the document as YAML writes it in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)


NormalSelection = dict[str, CountTable] | dict[str, Layers]
"""Op path -> `CountTable` (without swap) or -> ``True`` or global layer indices (with swap)."""

NO_SWAP_HINT = "Layer indices are read here only with swap_config.swap: true."


def normalise_counts(
    value: LayerCounts, layout: PipelineLayout, where: str
) -> tuple[CountTable, list[Problem]]:
    """Normalise a value of a recompute key without swap: how many of the first layers of each chunk it means.

    ``True`` is every layer, ``False`` none. A flat tuple gives a total per stage (missing stages 0), dealt
    one layer at a time to the stage's chunks in turn, skipping full ones: ``[2, 1]`` over two interleaves
    is ``[[1, 1], [1, 0]]``. A table gives each chunk its own number. Numbers beyond what a stage or a chunk
    holds mean all of it; ``True`` and ``False`` may stand for a number, or for a whole row of a table.

    Problems: negative numbers (the reference never returns from them), and shapes other than the layout's.
    """
    if isinstance(value, bool):
        return _clip((value,) * layout.vpp, layout), []
    rows = tuple(item for item in value if isinstance(item, tuple | bool))
    if any(isinstance(row, tuple) for row in rows):
        problems = _check_table(value, layout, where)
        return (_clip(rows, layout) if not problems else layout.counts), problems
    totals = tuple(item for item in value if isinstance(item, int))
    problems = _check_numbers(totals, where)
    if len(totals) > layout.pp:
        expected = f"at most {counted(layout.pp, 'number')}, one per pipeline stage"
        problems.append(Problem(where, expected, counted(len(totals), "number"), NO_SWAP_HINT))
    return (_deal(totals, layout) if not problems else layout.counts), problems


def cut_counts(value: LayerCounts, layout: PipelineLayout) -> list[tuple[str, int, int]]:
    """Return (where, number, layers there) for each number that `normalise_counts` takes for fewer layers."""
    if isinstance(value, bool):
        return []
    stages = [sum(row[stage] for row in layout.counts) for stage in range(layout.pp)]
    found = [
        (f"stage {stage}", item, stages[stage])
        for stage, item in enumerate(value)
        if stage < layout.pp and not isinstance(item, bool | tuple | str)
    ]
    found += [
        (f"stage {stage}, interleave {v}", item, layout.counts[v][stage])
        for v, row in enumerate(value)
        if isinstance(row, tuple)
        for stage, item in enumerate(row)
        if v < layout.vpp and stage < layout.pp and not isinstance(item, bool)
    ]
    return [(where, item, held) for where, item, held in found if item > held]


def _check_numbers(numbers: Sequence[int], where: str) -> list[Problem]:
    return [
        Problem(f"{where}[{index}]", "a number of layers, 0 or more", str(number))
        for index, number in enumerate(numbers)
        if number < 0
    ]


def _check_table(table: Sequence[object], layout: PipelineLayout, where: str) -> list[Problem]:
    problems = [] if len(table) == layout.vpp else [rows_problem(len(table), layout.vpp, where)]
    for v, row in enumerate(table):
        if isinstance(row, tuple):
            problems += width_problems(len(row), layout.pp, f"{where}[{v}]")
            problems += _check_numbers(row, f"{where}[{v}]")
        elif not isinstance(row, bool):
            problems.append(Problem(f"{where}[{v}]", "a row of numbers or a bool", str(row)))
    return problems


def _clip(rows: Sequence[Sequence[int | bool] | bool], layout: PipelineLayout) -> CountTable:
    """Return the table with each number limited to the layers that its chunk holds."""
    full = [(row,) * layout.pp if isinstance(row, bool) else row for row in rows]
    return tuple(
        tuple(_at_most(item, count) for item, count in zip(row, counts, strict=True))
        for row, counts in zip(full, layout.counts, strict=True)
    )


def _deal(totals: Sequence[int | bool], layout: PipelineLayout) -> CountTable:
    """Deal each stage's total to its chunks, one layer at a time in turn, skipping full chunks."""
    columns = []
    for stage in range(layout.pp):
        holds = [row[stage] for row in layout.counts]
        left = _at_most(totals[stage] if stage < len(totals) else 0, sum(holds))
        dealt = [0] * layout.vpp
        while left:
            for v in range(layout.vpp):
                if left and dealt[v] < holds[v]:
                    dealt[v] += 1
                    left -= 1
        columns.append(dealt)
    return tuple(zip(*columns, strict=True))


def _at_most(item: int | bool, limit: int) -> int:
    if isinstance(item, bool):
        return limit if item else 0
    return min(item, limit)


def layers_from_counts(table: CountTable, layout: PipelineLayout) -> tuple[int, ...]:
    """Return the global indices, ascending, of the first ``table[v][s]`` layers of each chunk."""
    return tuple(
        layer
        for v, row in enumerate(table)
        for s, count in enumerate(row)
        for layer in layout.chunk(v, s)[:count]
    )


def normalise_indices(value: LayerCounts, num_layers: int, where: str) -> tuple[Layers, list[Problem]]:
    """Normalise a value of a recompute key with ``swap: true``: ``True``, or global layer indices as written.

    ``True`` stays ``True`` and ``False`` becomes ``()``. Problems: an index that the model does not have,
    a bool among the indices (the reference reads ``True`` as layer 1), and a table per stage.
    """
    if isinstance(value, bool):
        return value or (), []
    indices, problems = [], []
    for position, item in enumerate(value):
        if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < num_layers:
            indices.append(item)
            continue
        expected = f"a layer index from 0 to {num_layers - 1}"
        no_stages = "With swap_config.swap: true this key knows no pipeline stages."
        hint = "" if isinstance(item, int) else no_stages
        problems.append(Problem(f"{where}[{position}]", expected, shown(item), hint))
    return tuple(indices), problems


def layers_from_indices(indices: Layers, num_layers: int) -> tuple[int, ...]:
    """Return the global layer indices, ascending and each once, of a result of `normalise_indices`."""
    if isinstance(indices, bool):
        return tuple(range(num_layers)) if indices else ()
    return tuple(sorted(set(indices)))


def normalise_selection(
    value: OpSelection | None,
    layout: PipelineLayout,
    default_patterns: Sequence[str],
    *,
    swap: bool,
    where: str,
) -> tuple[NormalSelection, list[Problem]]:
    """Normalise a select or exclude key to op path -> table (without swap) or -> layer indices (with it).

    A bool or numbers hold for each of ``default_patterns``; a list of op paths means all layers of each; a
    mapping gives each op path its own value. An empty list or mapping selects nothing; ``None`` (the key is
    not written) is the same as ``False``.

    Problems: those of the values; numbers or ``True`` where there are no default ops (the exclude keys: the
    reference ignores them); with swap, a list of op paths, which the reference rejects there.
    """
    value = False if value is None else value
    by_pattern, problems = _by_pattern(value, default_patterns, swap=swap, where=where)
    forms: dict[str, Any] = {}
    for pattern, item in by_pattern.items():
        place = f"{where}.{pattern}" if isinstance(value, Mapping) else where
        if swap:
            forms[pattern], found = normalise_indices(item, layout.num_layers, place)
        else:
            forms[pattern], found = normalise_counts(item, layout, place)
        problems += found
    # A wrong value that holds for several default ops gives several equal problems.
    return forms, list(dict.fromkeys(problems))


def _by_pattern(
    value: OpSelection, default_patterns: Sequence[str], *, swap: bool, where: str
) -> tuple[dict[str, LayerCounts], list[Problem]]:
    if isinstance(value, Mapping):
        return dict(value), []
    if value == ():
        return {}, []
    if not isinstance(value, bool) and isinstance(value[0], str):
        paths = [str(path) for path in value]
        if swap:
            rules = ", ".join(f"'{path}': true" for path in paths)
            hint = f"Write a mapping: {{{rules}}}."
            expected = "a bool, layer indices or a mapping with swap: true"
            return {}, [Problem(where, expected, shown(value), hint)]
        return dict.fromkeys(paths, True), []
    if value and not default_patterns:
        expected = "op paths, or a mapping from op path to layers (this key has no default ops)"
        return {}, [Problem(where, expected, shown(value))]
    return dict.fromkeys(default_patterns, value), []


def format_formative(value: CountTable | Layers | Mapping[str, CountTable] | Mapping[str, Layers]) -> str:
    r"""Return a normal form as text, as MindFormers' documents print it: a backslash stays single.

    ``{'feed_forward\.mul': [[4, 5], [5, 4]]}``, ``[[2, 1], [1, 0]]``, ``True``, ``[0, 3]``.
    """
    if isinstance(value, Mapping):
        items = [f"'{path}': {format_formative(item)}" for path, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, tuple):
        return str([list(item) if isinstance(item, tuple) else item for item in value])
    return str(value)
