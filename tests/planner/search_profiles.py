"""Profiles made by hand for the search: what each op makes, reads and saves, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_actswap.engine import Link
from hf_actswap.plan import OpCall, SavedBytes, SavedStorage, Use
from hf_actswap.plan.saved_bytes import UseKind
from hf_actswap.planner import OpEvent, Profile

MIB = 2**20


@dataclass(frozen=True)
class Op:
    """One function call of a layer.

    Args:
        name: its op path; what it makes has the same name. The last op of a layer makes the hidden state.
        size_bytes: of what it makes.
        ms: of its forward.
        reads: names of what it reads; ``x`` is the layer's input.
        saves: names of what its node saves, its own result or ``x`` possibly among them.
        backward_ms: twice the forward, if not given.
    """

    name: str
    size_bytes: int
    ms: float
    reads: tuple[str, ...] = ()
    saves: tuple[str, ...] = ()
    backward_ms: float | None = None
    communicates: bool = False


def link_of(gb_per_s: float) -> Link:
    """Return a link of so many GB/s each way."""
    return Link(gb_per_s * 1e6, gb_per_s * 1e6, gb_per_s * 0.9e6, gb_per_s * 0.9e6, 0.02)


def profile_of(
    layers: Sequence[Sequence[Op]],
    link: Link | None,
    hidden_bytes: int = 8 * MIB,
    base_bytes: int = 0,
    head_bytes: int = 0,
    head_ms: float = 1.0,
) -> Profile:
    """Return the profile of a model of such layers.

    Args:
        layers: ops of each.
        link: of host and device.
        hidden_bytes: of the hidden state.
        base_bytes: of every op event.
        head_bytes: of the head's op event beyond that.
        head_ms: of the head's forward.
    """
    return _Maker(link, base_bytes).profile(layers, hidden_bytes, head_bytes, head_ms)


class _Maker:
    def __init__(self, link: Link | None, base_bytes: int) -> None:
        self._link, self._base = link, base_bytes
        self._order = self._op = 0
        self._storages: list[tuple[int, list[Use]]] = []
        self._owner: dict[int, OpCall] = {}
        self._op_events: list[OpEvent] = []

    def profile(
        self, layers: Sequence[Sequence[Op]], hidden_bytes: int, head_bytes: int, head_ms: float
    ) -> Profile:
        hidden = self._made(hidden_bytes, ("embedding", "output", None))
        self._op_event(("embedding", "", None), 0.1, 0.1, [])
        for layer, ops in enumerate(layers):
            names = {"x": hidden}
            for number, op in enumerate(ops):
                call = (layer, op.name, 0)
                last = number == len(ops) - 1
                uses = [("function", call, names[name]) for name in op.reads]
                own = names[op.name] = self._made(op.size_bytes, call)
                uses += [("saved", (layer, "", None), names[name]) for name in op.saves]
                uses.append(("returned", call, own))
                backward_ms = 2 * op.ms if op.backward_ms is None else op.backward_ms
                self._op_event(call, op.ms, backward_ms, uses, op.communicates)
                if last:
                    hidden = own
                    self._owner[own] = (layer, "output", None)
        self._op_event(
            ("head", "", None),
            head_ms,
            2 * head_ms,
            [("saved", ("head", "", None), hidden)],
            False,
            head_bytes,
        )
        return self._finished(layers)

    def _finished(self, layers: Sequence[Sequence[Op]]) -> Profile:
        last = len(self._op_events) - 1
        op_events = tuple(
            OpEvent(
                **{name: getattr(op_event, name) for name in OpEvent.__slots__}
                | {"backward_place": last - place}
            )
            for place, op_event in enumerate(self._op_events)
        )
        modules = {layer: frozenset({""}) for layer in range(len(layers))}
        storages = tuple(SavedStorage(size, tuple(uses)) for size, uses in self._storages if uses)
        return Profile(
            saved=SavedBytes(storages, modules),
            op_events=op_events,
            num_layers=len(layers),
            family="made by hand",
            compiled_layers=frozenset(),
            link=self._link,
            device="none",
            device_bytes=2**40,
            outside_ms=1.0,
            outside_base_bytes=self._base,
            optimizer_state_bytes=0,
            reserved_bytes=0,
            batch_shape=(1, 1),
            source="shapes",
        )

    def _made(self, size_bytes: int, call: OpCall) -> int:
        self._storages.append((size_bytes, []))
        self._owner[len(self._storages) - 1] = call
        return len(self._storages) - 1

    def _op_event(
        self,
        call: OpCall,
        forward_ms: float,
        backward_ms: float,
        uses: Sequence[tuple[UseKind, OpCall, int]],
        communicates: bool = False,
        more_bytes: int = 0,
    ) -> None:
        first = self._order + 1
        for kind, at, number in uses:
            self._order += 1
            size_bytes, known = self._storages[number]
            known.append(Use(kind, at, self._owner[number], 0, size_bytes, size_bytes, 0, self._order))
        base = self._base + more_bytes
        self._op_events.append(
            OpEvent(
                call, first, self._order, self._op, 1, forward_ms, backward_ms, base, base, 0, communicates
            )
        )
        self._op += 1


def llama_layer(tokens: int, hidden: int = 4096, inner: int = 11008, ahead: str = "") -> tuple[Op, ...]:
    """Return the ops of a Llama layer in bfloat16 as eager autograd saves them, in times of one H200."""
    unit = tokens * hidden * 2
    wide = tokens * inner * 2
    gemm = 2.0 * tokens * hidden * hidden / 700e9
    mlp = 2.0 * tokens * hidden * inner / 700e9
    attention = 2.0 * tokens * tokens * hidden / 450e9
    slow = unit / 3.5e9

    def norm(name: str, source: str) -> list[Op]:
        return [
            Op(f"{name}.to", 2 * unit, 3 * slow, (source,)),
            Op(f"{name}.pow", 2 * unit, 4 * slow, (f"{name}.to",), (f"{name}.to",)),
            Op(f"{name}.mean", 4 * tokens, 2 * slow, (f"{name}.pow",)),
            Op(f"{name}.rsqrt", 4 * tokens, 0.005, (f"{name}.mean",), (f"{name}.rsqrt",)),
            Op(
                f"{name}.mul",
                2 * unit,
                4 * slow,
                (f"{name}.to", f"{name}.rsqrt"),
                (f"{name}.to", f"{name}.rsqrt"),
            ),
            Op(f"{name}.cast", unit, 3 * slow, (f"{name}.mul",)),
            Op(f"{name}.scale", unit, 2 * slow, (f"{name}.cast",), (f"{name}.cast",)),
        ]

    def rope(name: str) -> list[Op]:
        source = f"attn.{name}_proj"
        return [
            Op(f"attn.{name}_cos", unit, 2 * slow, (source,)),
            Op(f"attn.{name}_half", unit, 2 * slow, (source,)),
            Op(f"attn.{name}_sin", unit, 2 * slow, (f"attn.{name}_half",)),
            Op(f"attn.{name}_rope", unit, 3 * slow, (f"attn.{name}_cos", f"attn.{name}_sin")),
        ]

    normed, after = "norm1.scale", "norm2.scale"
    qkv = ("attn.q_rope", "attn.k_rope", "attn.v_proj")
    ops = norm("norm1", "x")
    ops += [Op(f"attn.{name}_proj", unit, gemm, (normed,), (normed,)) for name in "qkv"]
    ops += rope("q") + rope("k")
    ops += [
        Op("attn.core", unit, attention, qkv, (*qkv, "attn.core"), 2.5 * attention),
        Op("attn.o_proj", unit, gemm, ("attn.core",), ("attn.core",)),
        Op("add1", unit, 3 * slow, ("x", "attn.o_proj")),
        *norm("norm2", "add1"),
        Op("mlp.gate_proj", wide, mlp, (after,), (after,)),
        Op("mlp.silu", wide, 2 * wide / 3.5e9, ("mlp.gate_proj",), ("mlp.gate_proj",)),
        Op("mlp.up_proj", wide, mlp, (after,), (after,)),
        Op("mlp.mul", wide, 3 * wide / 3.5e9, ("mlp.silu", "mlp.up_proj"), ("mlp.silu", "mlp.up_proj")),
        Op("mlp.down_proj", unit, mlp, ("mlp.mul",), ("mlp.mul",)),
        Op("add2", unit, 3 * slow, ("add1", "mlp.down_proj")),
    ]
    return tuple(ops)
