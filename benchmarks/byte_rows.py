"""What a byte of each tensor of a layer is worth: the time to have it again, over the bytes that it takes.

A tensor is rebuilt by its own op and by those before it whose results nobody holds. Held are: what autograd
saves, the input of the layer, and the two tensors of the residual stream, of which autograd saves copies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from benchmarks.byte_calls import Call, CallKey, Kind
from hf_actswap.plan.outline import LayerOutline
from hf_actswap.plan.record import LAYER_INPUT
from hf_actswap.plan.saved_bytes import SavedBytes

_PS_PER_MS = 1e9


@dataclass(frozen=True)
class ByteRow:
    """One call of a layer.

    Args:
        op, ordinal: its name.
        kind: what bounds it.
        saved_bytes: of its tensors that autograd saves, each storage once: what it alone saves.
        out_bytes: of the tensors that it produces, saved or not.
        root: autograd does not save it as it is, but recomputation starts from it and holds it: the hidden
            state that the layer hands on, and the one between attention and feed-forward.
        ms: of one run of it.
        flops, traffic_bytes: of one run, from the shapes.
        inputs: names of the calls whose tensors it reads; ``input:0`` is the layer's input.
        reruns: the calls that run to have its tensor again, itself among them.
        rerun_ms: of those, together.
        ps_per_byte: ``rerun_ms`` over the bytes that are freed for it, in picoseconds; ``None``: nothing of
            it is held.
    """

    op: str
    ordinal: int
    kind: Kind
    saved_bytes: int
    out_bytes: int
    root: bool
    ms: float
    flops: int
    traffic_bytes: int
    inputs: tuple[str, ...]
    reruns: tuple[str, ...]
    rerun_ms: float
    ps_per_byte: float | None

    @property
    def name(self) -> str:
        return name_of((self.op, self.ordinal))

    @property
    def held_bytes(self) -> int:
        """What giving it up would free."""
        return self.saved_bytes or (self.out_bytes if self.root else 0)


def name_of(key: CallKey) -> str:
    """Return ``op:ordinal``."""
    return f"{key[0]}:{key[1]}"


def byte_rows(
    calls: Sequence[Call], saved: SavedBytes, layer: LayerOutline, layer_index: int = 0
) -> list[ByteRow]:
    """Join what calls cost with what autograd saves of them.

    Args:
        calls: of one layer.
        saved: of a forward of the same shapes.
        layer: the layer's outline.
        layer_index: in ``saved``.

    Raises:
        ValueError: autograd saves a tensor of an op that is not among the calls.
    """
    bytes_of = _saved_bytes_of(saved, layer_index)
    strangers = bytes_of.keys() - {call.key for call in calls}
    if strangers:
        raise ValueError(f"autograd saves tensors of ops that were not seen to run: {sorted(strangers)}")
    inputs = _inputs_of(saved, layer, layer_index)
    copied = [call.key for call in calls if call.widens and call.key in bytes_of]
    by_key = {call.key: call for call in calls}
    roots = by_key.keys() & {layer.output_of, *(key for copy in copied for key in inputs.get(copy, ()))}
    held = bytes_of.keys() | roots
    rows = []
    for call in calls:
        reruns = _reruns(call.key, inputs, held)
        rerun_ms = sum(by_key[key].ms for key in by_key if key in reruns)
        size = bytes_of.get(call.key, 0)
        freed = size or (call.out_bytes if call.key in roots else 0)
        rows.append(
            ByteRow(
                op=call.key[0],
                ordinal=call.key[1],
                kind=call.work.kind,
                saved_bytes=size,
                out_bytes=call.out_bytes,
                root=not size and call.key in roots,
                ms=call.ms,
                flops=call.work.flops,
                traffic_bytes=call.work.traffic_bytes,
                inputs=tuple(map(name_of, inputs.get(call.key, ()))),
                reruns=tuple(name_of(key) for key in by_key if key in reruns),
                rerun_ms=rerun_ms,
                ps_per_byte=rerun_ms * _PS_PER_MS / freed if freed else None,
            )
        )
    return rows


def _saved_bytes_of(saved: SavedBytes, layer_index: int) -> dict[CallKey, int]:
    found: dict[CallKey, int] = {}
    for storage in saved.storages:
        first = next((use for use in storage.uses if use.kind == "saved"), None)
        if first is not None and first.producer[0] == layer_index:
            key = (first.producer[1], first.producer[2] or 0)
            found[key] = found.get(key, 0) + storage.size_bytes
    return found


def _inputs_of(
    saved: SavedBytes, layer: LayerOutline, layer_index: int
) -> dict[CallKey, tuple[CallKey, ...]]:
    """What each call reads; weights and what comes from outside, but the layer's input, are left out.

    The outline says who reads the layer's input, which is nobody's in ``saved``. The rest is read from
    ``saved``, whose shapes are the real ones: whether a reshape copies depends on them.
    """
    found: dict[CallKey, dict[CallKey, None]] = {}
    for call in layer.calls:
        if LAYER_INPUT in call.inputs:
            found.setdefault(call.key, {})[LAYER_INPUT] = None
    for storage in saved.storages:
        for use in storage.uses:
            scope, path, ordinal = use.at
            reader, source = (path, ordinal or 0), (use.producer[1], use.producer[2] or 0)
            if use.kind == "function" and scope == use.producer[0] == layer_index and source != reader:
                found.setdefault(reader, {})[source] = None
    return {key: tuple(sources) for key, sources in found.items()}


def _reruns(
    key: CallKey, inputs: Mapping[CallKey, Sequence[CallKey]], held: Collection[CallKey]
) -> set[CallKey]:
    found: set[CallKey] = set()
    ahead = [key]
    while ahead:
        call = ahead.pop()
        found.add(call)
        ahead += [
            one for one in inputs.get(call, ()) if one != LAYER_INPUT and one not in held and one not in found
        ]
    return found


@dataclass(frozen=True)
class Choice:
    """What giving up some tensors of a layer comes to.

    Args:
        held_bytes: that autograd and the calls that will run again hold; the input of the layer among them
            where it is needed.
        rerun_ms: of the calls that run again.
    """

    held_bytes: int
    rerun_ms: float


def without(rows: Sequence[ByteRow], dropped: Collection[str], input_bytes: int) -> Choice:
    """Return what is held and what runs again if the tensors ``dropped`` are rebuilt in backward.

    Args:
        rows: of one layer.
        dropped: names of rows; what is rebuilt from a dropped tensor has it rebuilt first.
        input_bytes: of the layer's input.
    """
    by_name = {row.name: row for row in rows}
    sizes = {row.name: row.held_bytes for row in rows} | {name_of(LAYER_INPUT): input_bytes}
    held = {row.name for row in rows if row.saved_bytes and row.name not in dropped}
    run: set[str] = set()
    ahead = [row.name for row in rows if row.saved_bytes and row.name in dropped]
    while ahead:
        name = ahead.pop()
        run.add(name)
        for source in by_name[name].inputs:
            if source == name_of(LAYER_INPUT) or (by_name[source].root and source not in dropped):
                held.add(source)
            elif source not in held and source not in run:
                ahead.append(source)
    return Choice(sum(sizes[name] for name in held), sum(row.ms for row in rows if row.name in run))


def row_of(result: Mapping[str, Any]) -> ByteRow:
    """Return the row of an entry of a results file, which holds more beside it."""
    values = {item.name: result[item.name] for item in fields(ByteRow)}
    return ByteRow(**{**values, "inputs": tuple(values["inputs"]), "reruns": tuple(values["reruns"])})
