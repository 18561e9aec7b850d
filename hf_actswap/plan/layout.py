"""The pipeline layout: which layers stand on which stage.

With interleaving a stage holds several chunks of consecutive layers, and layers are numbered
interleave-major: all stages of interleave 0 in order, then all of interleave 1. ``counts[v][s]`` is the
number of layers in the chunk of interleave ``v`` on stage ``s``. The recompute keys are tables over this
layout (`layer_tables`).

Pure arithmetic, after MindFormers' ``LayerSetting``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ..config.schema import Offset, ParallelConfig
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
        """Pipeline stages (``pipeline_stage``)."""
        return len(self.counts[0])

    @property
    def offset(self) -> tuple[int, ...] | CountTable:
        """``parallel_config.offset`` for this layout: a row per interleave; just the row if there is one."""
        base = self.num_layers // (self.pp * self.vpp)
        rows = tuple(tuple(count - base for count in row) for row in self.counts)
        return rows if self.vpp > 1 else rows[0]

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return self._ends[-1][-1]

    @cached_property
    def _ends(self) -> CountTable:
        """Index after the last layer of each chunk, [interleave][stage]."""
        ends = list(accumulate(count for row in self.counts for count in row))
        return tuple(tuple(ends[v * self.pp : (v + 1) * self.pp]) for v in range(self.vpp))

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        """(interleave, stage) of each layer."""
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
    """Broadcast an offset to [interleave][stage]."""
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
    """Return what is wrong with a row that must have one number per stage."""
    if found == pp:
        return []
    return [Problem(where, f"{counted(pp, 'number')}, one per pipeline stage", counted(found, "number"))]


def rows_problem(found: int, vpp: int, where: str) -> Problem:
    """Return the problem of a table that does not have one row per interleave."""
    expected = f"{counted(vpp, 'row')}, one per interleave (pp_interleave_num {vpp})"
    return Problem(where, expected, counted(found, "row"))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 row``, ``2 rows``."""
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
