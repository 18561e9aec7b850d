"""``hf-actswap explain``: why an op of a layer has its fate, and what would give it another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from ..config import ActSwapConfig, load_config
from ..errors import PlanError, Problem, nearest
from ..plan import Outline, Override, PlanRow, resolve_plan
from ..plan.actions import SCOPES, Scope
from ..plan.match import LayerNames
from ..plan.outline import OUTPUT, is_below
from . import options
from .alternatives import Alternative, alternatives
from .numbers_text import size_text
from .output import answer, heading, listed
from .plan_request import ModelRequest
from .plan_tables import windows_text
from .requested_ops import Wish, wishes_of
from .step import StepShape, profile_of, saved_by_op
from .subject import Subject, subject, with_tp

_MEANING = {
    "keep": "What it produces stays on the device until backward has read it.",
    "swap": "What it produces is copied to host memory, its device memory is released, and it is copied back "
    "ahead of backward.",
    "recompute": "What it produces is dropped and computed again in backward.",
    "re-gather": "Each rank keeps its shard; backward gathers again.",
    "slice": "Each rank keeps a slice of what all hold alike; backward gathers it.",
}


class ExplainError(PlanError):
    """There is no such layer or op."""

    subject = "question"


@dataclass(frozen=True)
class Explained:
    """One op of one layer.

    Args:
        op_path: in the layer.
        fate: of what it produces.
        row: that decides; ``None``: no row names it.
        wishes: entries that mean it or what is around it, the strongest first.
        overrides: that concern it.
        alternatives: what would give it another fate.
        saved_bytes: that autograd saves of it without a plan; ``None``: not asked.
    """

    op_path: str
    fate: str
    row: PlanRow | None
    wishes: Sequence[Wish]
    overrides: Sequence[Override]
    alternatives: Sequence[Alternative]
    saved_bytes: int | None

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "op": self.op_path,
            "fate": self.fate,
            "row": None if self.row is None else asdict(self.row),
            "wishes": [asdict(wish) for wish in self.wishes],
            "overrides": [asdict(override) for override in self.overrides],
            "alternatives": [asdict(alternative) for alternative in self.alternatives],
            "saved_bytes": self.saved_bytes,
        }


@dataclass(frozen=True)
class Explanation:
    """All ops that a name means in a layer. See `output.Answer`."""

    layer: Scope
    asked: str
    described: str
    ops: Sequence[Explained]
    ok: bool = True

    def document(self) -> Mapping[str, Any]:
        """See `output.Answer`."""
        return {"layer": self.layer, "asked": self.asked, "ops": [op.document() for op in self.ops]}

    def shown(self) -> Iterable[RenderableType]:
        """See `output.Answer`."""
        yield f"Model: {self.described}"
        for op in self.ops:
            place = f"layer {self.layer}" if isinstance(self.layer, int) else str(self.layer)
            name = op.op_path or "everything"
            yield heading(f"{place}, {name}: {op.fate}")
            yield _MEANING[op.fate]
            if op.saved_bytes is not None:
                yield f"Autograd saves {size_text(op.saved_bytes)} of it where nothing is done."
            yield from listed([_deciding(op.row, op.op_path)])
            yield heading("Wishes that mean it, the strongest first")
            yield from listed([f"{wish}{_verdict(wish, op)}" for wish in op.wishes] or ["none"])
            if op.overrides:
                yield heading("What gave way, and why")
                yield from listed(map(str, op.overrides))
            if op.alternatives:
                yield heading("What would change it")
                yield from listed(map(str, op.alternatives))


def explain(
    layer: Annotated[
        str, typer.Argument(metavar="LAYER", help="An index from 0, or embedding, final_norm, head.")
    ],
    op: Annotated[
        str,
        typer.Argument(
            metavar="OP",
            help="As in the configuration: self_attn, feed_forward.mul, ...; '' is the whole layer.",
        ),
    ],
    config: options.Config,
    model: options.Model,
    seq: options.Seq = None,
    batch: options.Batch = 1,
    dtype: options.Dtype = None,
    tp: options.Tp = None,
    as_json: options.Json = False,
) -> None:
    """Say why an op of a layer is kept, swapped or recomputed, and what would change it."""

    def ask() -> Explanation:
        read = with_tp(load_config(config), tp)
        with subject(ModelRequest(model, dtype), read) as found:
            step = None if seq is None else StepShape(batch, seq, "H200", None, "none")
            return _explained(found, read, layer, op, step)

    answer("explain", as_json, ask)


def _explained(
    found: Subject, config: ActSwapConfig, layer: str, op: str, step: StepShape | None
) -> Explanation:
    shape = found.shape
    plan, scope = resolve_plan(config, shape), _scope(layer, shape)
    paths = _paths(shape, scope, op)
    wishes = wishes_of(config, shape)
    profile = None if step is None else profile_of(found, step)
    ops = []
    for path in paths:
        row = plan.row(scope, path)
        ops.append(
            Explained(
                op_path=path,
                fate=plan.fate(scope, path),
                row=row,
                wishes=[wish for wish in wishes if isinstance(scope, int) and wish.names(scope, path)],
                overrides=[item for item in plan.overrides if _concerns(item, shape, scope, path)],
                alternatives=alternatives(config, shape, plan, scope, path) if isinstance(scope, int) else (),
                saved_bytes=None if profile is None else saved_by_op(profile, scope, path),
            )
        )
    return Explanation(scope, op, found.described(), ops)


def _scope(text: str, shape: Outline) -> Scope:
    if text in SCOPES:
        return text
    count = len(shape.layers)
    if text.isdecimal() and int(text) < count:
        return int(text)
    raise ExplainError([Problem("LAYER", f"0 to {count - 1}, or one of {', '.join(SCOPES)}", text)])


def _paths(shape: Outline, scope: Scope, op: str) -> list[str]:
    if op in ("", OUTPUT) or not isinstance(scope, int):
        return [op]
    names = LayerNames(shape.layers[scope])
    found = [target for match in names.match(op) for target in match.targets]
    if not found:
        hint = names.hint(op) or nearest(op, names.all_names())
        raise ExplainError([Problem("OP", f"a path that names an op of layer {scope}", repr(op), hint)])
    return list(dict.fromkeys(found))


def _concerns(override: Override, shape: Outline, scope: Scope, path: str) -> bool:
    """Whether an override is about this op: its layer, and its name as the user or the layer names it."""
    if not isinstance(scope, int) or (override.layers and scope not in override.layers):
        return False
    if not override.op_path:
        return bool(override.layers)
    names = LayerNames(shape.layers[scope])
    written = [name.strip() for name in override.op_path.split(", ")]
    targets = {target for name in written for match in names.match(name) for target in match.targets}
    return any(is_below(path, name) or is_below(name, path) for name in {*targets, *written})


def _deciding(row: PlanRow | None, path: str) -> str:
    if row is None:
        return "No row of the plan names it: what nothing names is kept."
    name = row.op_path or "the whole layer"
    below = f"everything below {name}" if row.op_path else "all of it"
    around = "" if row.op_path == path else f" It covers {below}."
    windows = windows_text(row)
    when = f", prefetch/release {windows} operators" if windows and windows != "auto" else ""
    when = ", windows chosen from measured times" if windows == "auto" else when
    return f"Decided by the row of {name}: {row.fate}{when}.{around}"


def _verdict(wish: Wish, op: Explained) -> str:
    return "" if wish.asked == op.fate else f" (gives way: {op.fate})"
