"""The plan: what will happen to each op of each layer, as frozen data.

A plan does not remember whether a person or the planner wrote it. The engine reads its rows and nothing
else; everything beside them (overrides, log lines) is for people.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from ..errors import PlanError, Problem

FORMAT_VERSION = 1

Fate = Literal["keep", "swap", "recompute", "re-gather", "slice"]
FATES: tuple[Fate, ...] = ("keep", "swap", "recompute", "re-gather", "slice")
Scope = int | str
"""A decoder layer by its index, a layer of another stack by its module path, or one of `SCOPES`."""
SCOPES = ("embedding", "final_norm", "head")
"""What stands around the decoder layers."""

OUTPUT = "output"
"""Op path of the hidden state that a layer hands on. A module of that name (BERT's) is only its parts."""

COMPILE_BUDGET = "compile_budget"
"""Parameter of a layer's row (op path ``""``): the share of its activation memory that its compiled region
may save, 0 to 1. The fate of that row is the fate of what the region saves."""

RELEASE_PER_PREFETCH = 3
"""Forward hold per operator of backward lead (MindSpore, ``offload_activation.cc``: a constant)."""


@dataclass(frozen=True)
class Windows:
    """When a swapped tensor moves, in operators (one operator: one autograd node in creation order).

    Args:
        prefetch_ops: the copy back starts when backward is this many operators before the first consumer.
        release_ops: device memory is released this many operators after the copy out began, at the latest
            at the end of the model's forward.
    """

    prefetch_ops: int
    release_ops: int

    @classmethod
    def of_prefetch(cls, prefetch_ops: int) -> Windows:
        """Both windows from the YAML number, as the reference couples them."""
        return cls(prefetch_ops, RELEASE_PER_PREFETCH * prefetch_ops)


@dataclass(frozen=True)
class PlanRow:
    """The fate of what one op produces.

    Args:
        scope: index of the decoder layer in the model given; module path of a layer of another stack
            (``model.vision_tower.encoder.layers.3``); or ``embedding``, ``final_norm``, ``head``.
        op_path: op inside the scope (``self_attn.flash_attention``); ``""`` is the whole scope, ``output``
            the hidden state that the layer hands on. A row covers everything below its path; the longest
            path wins.
        ordinal: which call of the op within the layer, from 0; ``None``: all. A row with one beats
            a row without.
        fate: see the glossary.
        windows: of a swap; ``None``: chosen by the engine from measured times (``auto``). Else ``None``.
        parameters: what else the fate needs; JSON values (`COMPILE_BUDGET`).
    """

    scope: Scope
    op_path: str
    fate: Fate
    ordinal: int | None = None
    windows: Windows | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Override:
    """A rule that changed what the user wrote.

    Args:
        where: YAML path of the wish.
        layers: concerned, decoder layers by their global index; empty if the wish concerns no layer in
            particular.
        op_path: op concerned, as the user named it; as the layer names it where a rule reached another op.
        asked: fate or value wished.
        got: what happens instead.
        reason: the rule, in words, with its source.
    """

    where: str
    layers: tuple[Scope, ...]
    op_path: str
    asked: str
    got: str
    reason: str

    def __str__(self) -> str:
        layers = f", layers {folded(self.layers)}" if self.layers else ""
        name = f" {self.op_path}" if self.op_path else ""
        return f"{self.where}{name}{layers}: asked {self.asked}, got {self.got}: {self.reason}"


@dataclass(frozen=True)
class MemoryPlan:
    """What will happen to the saved tensors of one model.

    Args:
        rows: the fates that are not "keep what nothing else names".
        num_layers: decoder layers of the model given.
        family: ``model_type`` of the model; information only.
        overrides: one for each rule that changed what the user wrote.
        min_tensor_bytes: smaller saved tensors are never swapped.
        host_memory_bytes: cap on host memory per process; ``None``: no cap.
        bind_numa: whether process and host memory are kept beside the device.
        gather_weights_again: whether FSDP2 frees gathered weights after forward and gathers them in backward.
        keeps_gathered: layers whose parallel projections save what they gathered, and do not gather again.
        fused_recompute: whether chains of dropped ops are run again in one kernel (it may round otherwise).
        lines: the reference-style log lines; warnings apart.
        warnings: the reference's conflict warnings.
        unbuilt: wishes that this version resolves but cannot apply, by name; `hf_actswap.apply` refuses them.
    """

    rows: tuple[PlanRow, ...]
    num_layers: int
    family: str = ""
    overrides: tuple[Override, ...] = ()
    min_tensor_bytes: int = 1024
    host_memory_bytes: int | None = None
    bind_numa: bool = True
    gather_weights_again: bool = False
    keeps_gathered: tuple[int, ...] = ()
    fused_recompute: bool = False
    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unbuilt: tuple[str, ...] = ()

    def fate(self, layer: Scope, op_path: str = "", ordinal: int | None = None) -> Fate:
        """Return the fate of what ``op_path`` of ``layer`` produces (``keep`` where no row names it).

        Raises:
            KeyError: there is no such layer or scope.
        """
        if layer not in self.scopes:
            others = ", ".join(map(str, self.scopes[self.num_layers :]))
            raise KeyError(f"{layer!r}: the plan has layers 0 to {self.num_layers - 1}, {others}")
        row = self.row(layer, op_path, ordinal)
        return row.fate if row else "keep"

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """The decoder layers, what stands around them, and the layers of other stacks that rows name."""
        known: dict[Scope, None] = dict.fromkeys((*range(self.num_layers), *SCOPES))
        return tuple(known | dict.fromkeys(sorted((row.scope for row in self.rows), key=layer_order)))

    def row(self, scope: Scope, op_path: str, ordinal: int | None = None) -> PlanRow | None:
        """Return the row that decides ``op_path``: the longest path, then the ordinal."""
        table = self._by_path.get(scope)
        if table is None:
            return None
        path = op_path
        while True:
            for key in ((path, ordinal), (path, None)) if path == op_path else ((path, None),):
                if key in table:
                    return table[key]
            if not path:
                return None
            path = path_around(path)

    @cached_property
    def _by_path(self) -> dict[Scope, dict[tuple[str, int | None], PlanRow]]:
        table: dict[Scope, dict[tuple[str, int | None], PlanRow]] = {}
        for row in self.rows:
            table.setdefault(row.scope, {})[row.op_path, row.ordinal] = row
        return table

    def log_lines(self) -> list[str]:
        """Return the lines that MindFormers logs at INFO for the same configuration, in its order."""
        return list(self.lines)

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` reads it back."""
        document: dict[str, Any] = {"format": "hf_actswap.plan", "format_version": FORMAT_VERSION}
        document.update(asdict(self))
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str) -> MemoryPlan:
        """Read a plan back.

        Raises:
            PlanError: not a plan, written by a newer format, or with malformed rows.
        """
        return _PlanReader(text).plan()


class _PlanReader:
    """Reads a plan document and collects what is wrong with it."""

    def __init__(self, text: str) -> None:
        self.problems: list[Problem] = []
        try:
            self.document: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError([Problem("plan", "a JSON document", f"no JSON: {error}")]) from None

    def plan(self) -> MemoryPlan:
        document = self.document
        if not isinstance(document, dict) or document.get("format") != "hf_actswap.plan":
            raise PlanError([Problem("plan.format", "'hf_actswap.plan'", repr(self._get("format")))])
        if document.get("format_version") != FORMAT_VERSION:
            raise PlanError(
                [Problem("plan.format_version", str(FORMAT_VERSION), repr(document.get("format_version")))]
            )
        num_layers = document.get("num_layers")
        if type(num_layers) is not int or num_layers < 0:
            raise PlanError([Problem("plan.num_layers", "a number of layers", repr(num_layers))])
        rows = [self._row(where, row, num_layers) for where, row in self._items("rows")]
        overrides = [self._override(where, item) for where, item in self._items("overrides")]
        texts: dict[str, Any] = {key: self._texts(key) for key in ("lines", "warnings", "unbuilt")}
        sizes: dict[str, Any] = {"min_tensor_bytes": 1024, "host_memory_bytes": None}
        for key, default in sizes.items():
            sizes[key] = size = document.get(key, default)
            if size != default and (type(size) is not int or size < 0):
                self.problems.append(Problem(f"plan.{key}", "a number of bytes", repr(size)))
        flags: dict[str, Any] = {"bind_numa": True, "gather_weights_again": False, "fused_recompute": False}
        for key, default in flags.items():
            flags[key] = flag = document.get(key, default)
            if type(flag) is not bool:
                self.problems.append(Problem(f"plan.{key}", "true or false", repr(flag)))
        kept = document.get("keeps_gathered", [])
        if not isinstance(kept, list) or any(
            type(layer) is not int or not 0 <= layer < num_layers for layer in kept
        ):
            self.problems.append(Problem("plan.keeps_gathered", "a list of layers", repr(kept)))
        if self.problems:
            raise PlanError(self.problems)
        return MemoryPlan(
            rows=tuple(row for row in rows if row is not None),
            num_layers=num_layers,
            family=str(document.get("family", "")),
            overrides=tuple(item for item in overrides if item is not None),
            min_tensor_bytes=sizes["min_tensor_bytes"],
            host_memory_bytes=sizes["host_memory_bytes"],
            keeps_gathered=tuple(kept),
            **flags,
            **texts,
        )

    def _items(self, key: str) -> list[tuple[str, Any]]:
        """The items of a list, each with its place."""
        value = self.document.get(key, [])
        if not isinstance(value, list):
            self.problems.append(Problem(f"plan.{key}", "a list", repr(value)))
            return []
        return [(f"plan.{key}[{index}]", item) for index, item in enumerate(value)]

    def _texts(self, key: str) -> tuple[str, ...]:
        items = self._items(key)
        self.problems += [
            Problem(where, "a string", repr(item)) for where, item in items if not isinstance(item, str)
        ]
        return tuple(item for _, item in items)

    def _override(self, where: str, item: Any) -> Override | None:
        try:
            return Override(**{**item, "layers": tuple(item["layers"])})
        except (TypeError, KeyError):
            names = ", ".join(field.name for field in fields(Override))
            self.problems.append(Problem(where, f"a mapping of {names}", repr(item)))
            return None

    def _get(self, key: str) -> Any:
        return self.document.get(key) if isinstance(self.document, dict) else self.document

    def _row(self, where: str, row: Any, num_layers: int) -> PlanRow | None:
        if not isinstance(row, dict):
            self.problems.append(Problem(where, "a mapping", repr(row)))
            return None
        before = len(self.problems)
        scope, fate, windows = row.get("scope"), row.get("fate"), row.get("windows")
        is_path = isinstance(scope, str) and scope.rpartition(".")[2].isdecimal()
        if not (scope in SCOPES or is_path or (type(scope) is int and 0 <= scope < num_layers)):
            around = f"the module path of another stack's layer, or one of {', '.join(SCOPES)}"
            expected = f"a layer from 0 to {num_layers - 1}, {around}"
            self.problems.append(Problem(f"{where}.scope", expected, repr(scope)))
        if fate not in FATES:
            self.problems.append(Problem(f"{where}.fate", f"one of {', '.join(FATES)}", repr(fate)))
        well_formed = isinstance(windows, dict) and all(
            type(windows.get(name)) is int and windows[name] >= 0 for name in ("prefetch_ops", "release_ops")
        )
        if fate == "swap" and windows is not None and not well_formed:
            expected = "prefetch_ops and release_ops, in operators, both >= 0, or null: chosen by measurement"
            self.problems.append(Problem(f"{where}.windows", expected, repr(windows)))
        if not isinstance(row.get("op_path"), str):
            self.problems.append(Problem(f"{where}.op_path", "a string", repr(row.get("op_path"))))
        ordinal, parameters = row.get("ordinal"), row.get("parameters") or {}
        if ordinal is not None and (type(ordinal) is not int or ordinal < 0):
            self.problems.append(Problem(f"{where}.ordinal", "a number of a call, or null", repr(ordinal)))
        if not isinstance(parameters, dict):
            self.problems.append(Problem(f"{where}.parameters", "a mapping", repr(parameters)))
        elif not _is_share(parameters.get(COMPILE_BUDGET, 0)):
            found = repr(parameters[COMPILE_BUDGET])
            self.problems.append(Problem(f"{where}.parameters.{COMPILE_BUDGET}", "0 to 1", found))
        if len(self.problems) > before:
            return None
        return PlanRow(
            scope=row["scope"],
            op_path=row["op_path"],
            fate=row["fate"],
            ordinal=ordinal,
            windows=Windows(**windows) if isinstance(windows, dict) and well_formed else None,
            parameters=parameters,
        )


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def path_around(op_path: str) -> str:
    """Return the path of the module that holds an op, ``""`` for the layer; nothing is held by `OUTPUT`."""
    around = op_path.rpartition(".")[0]
    return "" if around == OUTPUT else around


def folded(scopes: Iterable[Scope]) -> str:
    """Return scopes in order, with runs of layers folded: ``0-2, 5, encoder.layers.0-3, head``."""
    runs: list[tuple[str, int, int]] = []
    names = []
    for scope in sorted(scopes, key=layer_order):
        stack, index = layer_order(scope)
        if scope in SCOPES:
            names.append(str(scope))
        elif runs and runs[-1][0] == stack and runs[-1][2] == index - 1:
            runs[-1] = (stack, runs[-1][1], index)
        else:
            runs.append((stack, index, index))
    texts = [f"{stack}{first}" if first == last else f"{stack}{first}-{last}" for stack, first, last in runs]
    return ", ".join((*texts, *names))


def layer_order(scope: Scope) -> tuple[str, int]:
    """Return a key that sorts layers: the stack that a layer's path names, and its index there."""
    if isinstance(scope, int):
        return "", scope
    stack, dot, index = scope.rpartition(".")
    return (f"{stack}{dot}", int(index)) if index.isdecimal() else (scope, -1)
