"""``hf-actswap explain``: why an op of a layer has its fate, and which change would give it another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from ..config import ActSwapConfig, load_config
from ..errors import ActSwapError, PlanError, Problem
from ..plan import Adjustment, MemoryPlan, ModelStructure, PlanRow, resolve_plan
from ..plan.actions import FATES, SCOPES, Fate, Scope
from ..plan.model_structure import OUTPUT, is_below
from ..plan.opnames import DEFAULT_SELECT_PATTERNS, DEFAULT_SWAP_PATTERN
from ..plan.resolve import RequestedPolicy, requested_policies
from ..plan.rules import LayerNames
from . import options
from .options import ModelRequest
from .output import Answer, answer, heading, listed, size_text, titled
from .plan_answer import windows_text
from .step import StepShape, profile_of, saved_by_op
from .subject import AnalysedModel, subject, with_tp


class ExplainError(PlanError):
    """There is no such layer or op."""

    subject = "question"


@dataclass(frozen=True)
class Explained:
    """The explanation of one op of one layer.

    Args:
        row: row of the plan that decides the fate; ``None``: no row names the op.
        policies: entries of the configuration that name the op or a module around it, the strongest first.
        saved_bytes: bytes of its tensors that autograd saves without a plan; ``None``: not computed.
    """

    op: str
    fate: Fate
    row: PlanRow | None
    policies: Sequence[RequestedPolicy]
    adjustments: Sequence[Adjustment]
    alternatives: Sequence[Alternative]
    saved_bytes: int | None


def _explanation(layer: Scope, model: str, ops: Sequence[Explained], mode: str) -> Iterator[RenderableType]:
    yield f"Model: {model}"
    place = f"layer {layer}" if isinstance(layer, int) else str(layer)
    for one in ops:
        name, fate = one.op or "everything", one.fate
        rest = any(other.op != one.op and is_below(other.op, one.op) for other in ops)
        yield heading(f"{place}, {name}{' (but for the ops above)' if rest else ''}: {fate}")
        yield FATES[fate]
        if one.saved_bytes is not None:
            yield f"Autograd saves {size_text(one.saved_bytes)} of it without a plan."
        yield from listed([_deciding(one.row, one.op, mode)])
        requests = [f"{it}{'' if it.asked == fate else f' (not applied: {fate})'}" for it in one.policies]
        yield from titled("Requests that name it, the strongest first", requests or ["none"])
        yield from titled("Requests that were changed, and why", map(str, one.adjustments))
        yield from titled("What would change it", map(str, one.alternatives))


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
    def ask() -> Answer:
        read = with_tp(load_config(config), tp)
        with subject(ModelRequest(model, dtype), read) as found:
            step = None if seq is None else StepShape(batch, seq, "H200", None, "none")
            return _explained(found, read, layer, op, step)

    answer("explain", as_json, ask)


def _explained(
    found: AnalysedModel, config: ActSwapConfig, layer: str, op: str, step: StepShape | None
) -> Answer:
    shape = found.shape
    plan, scope = resolve_plan(config, shape), _scope(layer, shape)
    asked = _paths(shape, scope, op)
    paths = dict.fromkeys(path for one in asked for path in _with_rows_below(plan, shape, scope, one))
    policies = requested_policies(config, shape) if isinstance(scope, int) else ()
    profile = None if step is None else profile_of(found, step, plan.tiles)
    ops = [
        Explained(
            op=path,
            fate=plan.fate(scope, path),
            row=plan.row(scope, path),
            policies=[it for it in policies if isinstance(scope, int) and it.names(scope, path)],
            adjustments=[item for item in plan.adjustments if _concerns(item, shape, scope, path)],
            alternatives=_alternatives(config, shape, plan, scope, path) if isinstance(scope, int) else [],
            saved_bytes=None if profile is None else saved_by_op(profile, scope, path),
        )
        for path in paths
    ]
    document = {"layer": scope, "asked": op, "ops": [asdict(one) for one in ops]}
    return Answer(document, _explanation(scope, found.described(), ops, config.memory.mode))


def _scope(text: str, structure: ModelStructure) -> Scope:
    if text in SCOPES:
        return text
    count = len(structure.layers)
    if text.isdecimal() and int(text) < count:
        return int(text)
    raise ExplainError([Problem("LAYER", f"0 to {count - 1}, or one of {', '.join(SCOPES)}", text)])


def _paths(structure: ModelStructure, scope: Scope, op: str) -> list[str]:
    if op in ("", OUTPUT) or not isinstance(scope, int):
        return [op]
    names = LayerNames(structure.layers[scope])
    found = [target for match in names.match(op) for target in match.targets]
    if not found:
        expected = f"a path that names an op of layer {scope}"
        raise ExplainError([Problem("OP", expected, repr(op), names.hint(op))])
    return list(dict.fromkeys(found))


def _with_rows_below(plan: MemoryPlan, structure: ModelStructure, scope: Scope, path: str) -> list[str]:
    """Return the ops inside ``path`` that rows name, and ``path`` itself unless that is all of it."""
    below = [
        row.op_path
        for row in plan.rows
        if row.scope == scope and row.op_path not in (path, OUTPUT) and is_below(row.op_path, path)
    ]
    if not below or not isinstance(scope, int):
        return [path]
    inside = [op.path for op in structure.layers[scope].ops if op.path != path and is_below(op.path, path)]
    whole = all(any(is_below(op, named) or is_below(named, op) for named in below) for op in inside)
    return below if whole else [*below, path]


def _concerns(adjustment: Adjustment, structure: ModelStructure, scope: Scope, path: str) -> bool:
    """Whether an adjustment names this op's layer, and the op by the user's or the layer's name for it."""
    if not isinstance(scope, int) or (adjustment.layers and scope not in adjustment.layers):
        return False
    if not adjustment.op_path:
        return bool(adjustment.layers)
    names = LayerNames(structure.layers[scope])
    written = [name.strip() for name in adjustment.op_path.split(", ")]
    targets = {target for name in written for match in names.match(name) for target in match.targets}
    return any(is_below(path, name) or is_below(name, path) for name in {*targets, *written})


def _deciding(row: PlanRow | None, path: str, mode: str) -> str:
    if row is None and mode != "off":
        return (
            f"Nothing is written for it: the planner ({mode}) may choose another fate while the model trains."
        )
    if row is None:
        return "No row of the plan names it, so it is kept."
    name = row.op_path or "the whole layer"
    below = f"everything below {name}" if row.op_path else "all of it"
    around = "" if row.op_path == path else f" It covers {below}."
    windows = windows_text(row)
    when = f", prefetch/release {windows} operators" if windows else ""
    when = ", windows chosen from measured times" if windows == "auto" else when
    return f"Decided by the row of {name}: {row.fate}{when}.{around}"


@dataclass(frozen=True)
class Alternative:
    """A change of the configuration that requests a fate, and the fate that the op gets."""

    fate: str
    change: str
    got: str  # empty: the configuration is rejected
    because: str = ""  # why it is not the requested one

    def __str__(self) -> str:
        if self.got == self.fate:
            return f"{self.fate}: {self.change}"
        reason = f": {self.because}" if self.because else ""
        return f"{self.fate}: not by {self.change}; {self.got or 'rejected'}{reason}"


def _alternatives(
    config: ActSwapConfig, structure: ModelStructure, plan: MemoryPlan, layer: int, op_path: str
) -> list[Alternative]:
    """Return one change of the configuration for each fate that the op does not have.

    Each change is tried: the changed configuration is resolved as a whole.
    """
    now = plan.fate(layer, op_path)
    found = []
    for fate, change, document in _changes(config, structure, layer, op_path, now):
        try:
            other = resolve_plan(load_config(document), structure)
        except ActSwapError as error:
            found.append(Alternative(fate, change, "", str(error.problems[0])))
            continue
        got = other.fate(layer, op_path)
        known = set(plan.adjustments)
        new = [item.reason for item in other.adjustments if item not in known and layer in item.layers]
        found.append(Alternative(fate, change, got, "" if got == fate else "; ".join(dict.fromkeys(new))))
    return found


def _changes(
    config: ActSwapConfig, structure: ModelStructure, layer: int, op_path: str, now: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    if now != "swap":
        yield "swap", *_to_swap(config, structure, layer, op_path)
    if now != "recompute":
        yield "recompute", *_to_recompute(config, layer, op_path)
    if now == "recompute" and op_path:
        document = config.to_dict()
        section = document.setdefault("recompute_config", {})
        layers: list[int] | bool = [layer] if config.swap_config.swap else True
        kept = _by_name(section.get("select_recompute_exclude", False), ())
        section["select_recompute_exclude"] = {**kept, op_path: layers}
        yield "keep", f"recompute_config.select_recompute_exclude: {{{op_path}: {_shown(layers)}}}", document
    if now == "swap":
        yield from _to_keep(config, structure, layer, op_path)


def _to_swap(
    config: ActSwapConfig, structure: ModelStructure, layer: int, op_path: str
) -> tuple[str, dict[str, Any]]:
    document = config.to_dict()
    # Only with swap on do the keys of recomputation name layers by index.
    taken = _out_of_recompute(document, config, structure, layer, op_path) if config.swap_config.swap else []
    left_out = f"layer {layer} left out of {', '.join(taken)}, and " if taken else ""
    section = document.setdefault("swap_config", {})
    was_on, ahead = config.swap_config.swap, config.swap_config.default_prefetch
    if was_on and config.swap_config.op_swap is None and config.swap_config.layer_swap is None:
        everywhere = {"op_name": DEFAULT_SWAP_PATTERN, "backward_prefetch": ahead, "layers": True}
        section["op_swap"] = [everywhere]
    section["swap"] = True
    key = "op_swap" if op_path else "layer_swap"
    entry = {"op_name": op_path} if op_path else {}
    entry |= {"backward_prefetch": ahead, "layers": [layer]}  # type: ignore[dict-item]
    section[key] = [entry, *(section.get(key) or [])]
    text = ", ".join(f"{name}: {_shown(value)}" for name, value in entry.items())
    return f"{left_out}swap_config.{'' if was_on else 'swap: true, '}{key}: {{{text}}}", document


def _out_of_recompute(
    document: dict[str, Any], config: ActSwapConfig, structure: ModelStructure, layer: int, op_path: str
) -> list[str]:
    section: dict[str, Any] = document.get("recompute_config", {})
    taken = []
    for requested in requested_policies(config, structure):
        if requested.asked != "recompute" or not requested.names(layer, op_path):
            continue
        others = [other for other in requested.layers if other != layer]
        if not requested.op_name:
            section["recompute"] = others
            taken.append(requested.where)
            continue
        table = _by_name(section["select_recompute"], DEFAULT_SELECT_PATTERNS)
        section["select_recompute"] = {**table, requested.op_name: others}
        taken.append(f"{requested.where}.{requested.op_name}")
    return taken


def _to_recompute(config: ActSwapConfig, layer: int, op_path: str) -> tuple[str, dict[str, Any]]:
    document = config.to_dict()
    section = document.setdefault("recompute_config", {})
    swap = config.swap_config.swap  # then the keys take layer indices, else a number of first layers
    if not op_path:
        before = section.get("recompute", False)
        also = before if swap and isinstance(before, list) else []
        section["recompute"] = sorted({*also, layer}) if swap else [layer + 1]
        return f"recompute_config.recompute: {_shown(section['recompute'])}{_counted(swap, layer)}", document
    layers = [layer] if swap else [layer + 1]
    table = _by_name(section.get("select_recompute", False), DEFAULT_SELECT_PATTERNS)
    section["select_recompute"] = {**table, op_path: layers}
    text = f"recompute_config.select_recompute: {{{op_path}: {_shown(layers)}}}"
    return f"{text}{_counted(swap, layer)}", document


def _to_keep(
    config: ActSwapConfig, structure: ModelStructure, layer: int, op_path: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield fate, text and document of a change that takes the layer out of each swap entry of the op."""
    document, changed = config.to_dict(), []
    for key in ("op_swap", "layer_swap"):
        for requested in requested_policies(config, structure):
            entry = re.fullmatch(rf"swap_config\.{key}\[(\d+)\]", requested.where)
            if entry is None or not requested.names(layer, op_path):
                continue
            rule = document["swap_config"][key][int(entry[1])]
            layers = range(len(structure.layers)) if rule["layers"] is True else rule["layers"]
            rule["layers"] = [other for other in layers if other != layer]
            changed.append(f"{requested.where}.layers")
    if changed:
        yield "keep", f"layer {layer} left out of {', '.join(changed)}", document


def _by_name(value: Any, defaults: tuple[str, ...]) -> dict[str, Any]:
    """Return the value of a selection key as a mapping from op path to layers."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and isinstance(value[0], str):
        return dict.fromkeys(value, True)
    return {} if value in (False, []) else dict.fromkeys(defaults, value)


def _counted(swap: bool, layer: int) -> str:
    return "" if swap else f" (a number of first layers: 0 to {layer})" if layer else " (the first layer)"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
