"""Resolves a configuration and a model's structure to a plan.

Requested policies are applied in the reference's order (layer swap, op swap, selective recompute, full
recompute, exclude), then the coupling rules run (`rules`). A policy that is changed, or has no effect on this
model, becomes an adjustment. One that makes no sense for this model is a `Problem`; all problems are raised
together. One that this version cannot carry out yet becomes an entry of ``unsupported``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..config import ActSwapConfig, LayerCounts
from ..config.schema import LayerSwapRule, OpSwapRule, Prefetch, TileTokens
from ..errors import ConfigError, PlanError, Problem, short_traceback
from .actions import Adjustment, MemoryPlan, PlanRow, Scope, SequenceChunks, Tile, format_scopes
from .apply_rules import RuleApplier, Selection, conflict_warnings, formative_lines, same_ops
from .layout import (
    PipelineLayout,
    build_layout,
    cut_counts,
    layers_from_counts,
    layers_from_indices,
    normalise_counts,
    normalise_indices,
    normalise_selection,
)
from .model_structure import ModelStructure, is_below
from .opnames import DEFAULT_COMM_PATTERNS, DEFAULT_SELECT_PATTERNS, DEFAULT_SWAP_PATTERN
from .rules import EXCLUDE_BEATS_ALL
from .settle import OVERWRITTEN, WHERE, overwritten
from .wrapper_rules import default_as_layer_swap, problems_of_compiled

_DEFAULT_MIN_TENSOR_BYTES = 1024
"""Tensors of fewer bytes are not swapped by default, as in torchtune and TRL (``min_offload_size``)."""

_SELECTIONS: dict[str, tuple[str, ...]] = {
    "select_recompute": DEFAULT_SELECT_PATTERNS,
    "select_comm_recompute": DEFAULT_COMM_PATTERNS,
    "select_recompute_exclude": (),
    "select_comm_recompute_exclude": (),
}

_OWN_LAYERS = (
    "the model has parallel layers of its own, and parallel_config.tensor_parallel_size is 1: write there "
    "how many ranks its group has"
)
_NO_COMMUNICATION = "tensor_parallel_size is 1: there is no communication inside layers"


@short_traceback
def resolve_plan(config: ActSwapConfig, structure: ModelStructure, stage: int | None = None) -> MemoryPlan:
    """Decide what happens to each op of each layer.

    The document's own rules are for the decoder; each entry of ``stacks`` is resolved as if its stack were
    the only one.

    Args:
        config: from `load_config`.
        structure: from `model_structure`, of the model that will train.
        stage: pipeline stage whose layers the model holds; ``None``: the model holds all layers, whatever
            the configured pipeline, and the tables apply by global layer index. The plan's rows count layers
            within the model given, its log lines over the whole model.

    Raises:
        PlanError: with every problem: a path that names no op, a layer that does not exist, a layout that
            does not add up, a layer count that is not the model's, a name in ``stacks`` that is no stack.
    """
    problems: list[Problem] = []
    plans: list[MemoryPlan] = []
    try:
        plans.append(_resolve_stack(config, structure, stage))
    except PlanError as error:
        problems += error.problems
    named: dict[str, str] = {}
    for name, rules in (config.stacks or {}).items():
        try:
            stack = _stack_called(name, structure, named)
            plans.append(_of_other_stack(name, stack, _resolve_stack(rules, stack, None)))
        except PlanError as error:
            for item in error.problems:
                problems.append(replace(item, where=f"stacks.{name}.{item.where}".rstrip(".")))
    if problems:
        raise PlanError(problems, config.source)
    kept = [stack for stack in structure.stacks if stack.path not in named]
    lines = [f"Layers of {stack.path} are kept: {_ELSEWHERE}" for stack in kept]
    plan = replace(
        plans[0],
        rows=tuple(row for plan in plans for row in plan.rows),
        adjustments=tuple(item for plan in plans for item in plan.adjustments),
        lines=(*(line for plan in plans for line in plan.lines), *lines),
        warnings=tuple(line for plan in plans for line in plan.warnings),
    )
    if problems := problems_of_compiled(plan, structure):
        raise PlanError(problems, config.source)
    return plan


_ELSEWHERE = "the document's rules are for the decoder, those for another stack stand under `stacks`."


def _stack_called(name: str, structure: ModelStructure, named: dict[str, str]) -> ModelStructure:
    """Return the stack whose path has the words of ``name`` in this order, and note it in ``named``."""
    paths = {stack.path: stack for stack in structure.stacks}
    meant = [path for path in paths if path == name] or [path for path in paths if _has_words(path, name)]
    found = ", ".join(meant) if meant else repr(name)
    if len(meant) == 1 and (twice := named.setdefault(meant[0], name)) != name:
        found = f"{meant[0]} again, as for {twice!r}"
    elif len(meant) == 1:
        return paths[meant[0]]
    outside = f"The rules of {structure.path} stand outside of `stacks`."
    hint = outside if _has_words(structure.path, name) else ""
    expected = f"one stack of layers beside the decoder's ({', '.join(paths) or 'this model has none'})"
    raise PlanError([Problem("", expected, found, hint)])


def _has_words(path: str, name: str) -> bool:
    words = iter(path.split("."))
    return all(word in words for word in name.split("."))


def _of_other_stack(name: str, stack: ModelStructure, plan: MemoryPlan) -> MemoryPlan:
    """Return a stack's plan, with its scopes and texts rewritten for the plan of the whole model."""
    scopes: dict[Scope, str] = {layer.index: layer.module_path for layer in stack.layers}
    where = f"stacks.{name}"
    adjustments = [
        replace(item, where=f"{where}.{item.where}", layers=tuple(scopes[layer] for layer in item.layers))
        for item in plan.adjustments
    ]
    if any(row.scope not in scopes for row in plan.rows):
        reason = "what the first layer of this stack reads is produced outside of layers"
        adjustments.append(
            Adjustment(f"{where}.swap_config", (scopes[0],), "", "input swapped", "no effect", reason)
        )
    return replace(
        plan,
        rows=tuple(replace(row, scope=scopes[row.scope]) for row in plan.rows if row.scope in scopes),
        adjustments=tuple(adjustments),
        lines=tuple(f"{stack.path}: {line}" for line in plan.lines),
        warnings=tuple(f"{stack.path}: {line}" for line in plan.warnings),
    )


def _resolve_stack(config: ActSwapConfig, structure: ModelStructure, stage: int | None) -> MemoryPlan:
    config, changed = default_as_layer_swap(config, structure)
    plan = _Resolution(config, structure, stage).plan()
    return replace(plan, adjustments=(*changed, *plan.adjustments)) if changed else plan


def with_problems_of_model(error: ConfigError, structure: ModelStructure) -> ConfigError:
    """Return ``error`` with the problems added that the rest of the document has for this model."""
    if error.readable is None:
        return error
    try:
        resolve_plan(error.readable, structure)
    except PlanError as more:
        return ConfigError((*error.problems, *more.problems), error.source)
    return error


@dataclass(frozen=True)
class RequestedPolicy:
    """One entry of the configuration that names ops or layers.

    Args:
        where: YAML path of the entry.
        asked: the fate that it asks for.
        op_name: op path as written, or that of a default op; ``""``: the whole layer.
        layers: the global layers that it names.
        prefetch: ``backward_prefetch`` of a swap.
        targets: op path of the model -> the layers in which ``op_name`` means it.
    """

    where: str
    asked: str
    op_name: str
    layers: tuple[int, ...]
    prefetch: Prefetch | None = None
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict, hash=False)

    def names(self, layer: int, op_path: str) -> bool:
        """Whether the entry names an op of a layer, or a module around the op."""
        if layer not in self.layers:
            return False
        paths = [path for path, layers in self.targets.items() if layer in layers] if self.op_name else [""]
        return any(is_below(op_path, path) for path in paths)

    def __str__(self) -> str:
        name = f" {self.op_name}" if self.op_name else ""
        ahead = f", {self.prefetch} ops ahead" if self.prefetch is not None else ""
        ahead = ", measured windows" if self.prefetch == "auto" else ahead
        layers = f"layer{'s' if len(self.layers) > 1 else ''} {format_scopes(self.layers)}"
        return f"{self.where}{name}: {self.asked} in {layers}{ahead}"


def requested_policies(config: ActSwapConfig, structure: ModelStructure) -> tuple[RequestedPolicy, ...]:
    """Return the entries that name ops or layers of the decoder, the strongest first (MindFormers' order).

    Exclude keys, full recomputation, selective recomputation, ``op_swap``, ``layer_swap``.
    """
    swap = config.swap_config
    written = swap.op_swap is not None or swap.layer_swap is not None
    found = _Resolution(default_as_layer_swap(config, structure)[0], structure, None).requested(written)
    return tuple(policy for policy in found if policy.layers)


class _Resolution:
    def __init__(self, config: ActSwapConfig, structure: ModelStructure, stage: int | None) -> None:
        self._config = config
        self._structure = structure
        self._swap = config.swap_config.swap
        self._problems: list[Problem] = []
        self._cut: list[Adjustment] = []
        self._layout_failed = False
        self._layout, self._local = self._place(stage)
        self._applier = RuleApplier(structure, self._local, self._layout.num_layers, self._swap)

    def plan(self) -> MemoryPlan:
        recompute, full = self._full_layers()
        selections = {key: self._selection(key, patterns) for key, patterns in _SELECTIONS.items()}
        layer_swap, op_swap = self._swap_rules()
        applier = self._applier
        swapped_layers = applier.apply_layer_swap(layer_swap or ())
        swapped_ops = applier.apply_op_swap(op_swap or ())
        self._apply_recompute(selections, full)
        streamed = self._streamed()
        tiles = (*self._head_tile(), *applier.apply_tiles(self._config.tile_config.tile))
        self._keep_overwritten()
        self._apply_inputs(full)
        problems = self._problems + applier.problems
        if problems:
            raise PlanError(problems, self._config.source)
        rows = (*applier.outside_rows, *self._rows())
        section, memory = self._config.recompute_config, self._config.memory
        if streamed is not None and isinstance(section.recompute, bool):
            # What a chunk saves must not grow with the layers, unless a list says which are recomputed.
            named = {row.scope for row in rows}
            rows += tuple(PlanRow(own, "", "recompute") for own in self._local.values() if own not in named)
        warnings: list[str] = []
        if self._swap:
            swaps = any(row.fate == "swap" for row in rows)
            warnings = conflict_warnings(self._config, full, swapped_layers, swapped_ops, swaps)
        min_tensor, host_memory = memory.min_tensor_mib, memory.host_memory_gib
        return MemoryPlan(
            rows=rows,
            num_layers=len(self._structure.layers),
            family=self._structure.family,
            adjustments=(
                *applier.collected_adjustments(),
                *self._cut,
                *policies_without_effect(self._config, self._structure),
            ),
            min_tensor_bytes=_DEFAULT_MIN_TENSOR_BYTES if min_tensor is None else round(min_tensor * 2**20),
            host_memory_bytes=None if host_memory is None else round(host_memory * 2**30),
            bind_numa=memory.bind_numa,
            verify=memory.verify,
            weights="host" if memory.weights == "host" else "keep",
            tiles=tiles,
            streamed=streamed,
            lines=self._lines(recompute, selections),
            warnings=tuple(warnings),
            unsupported=unsupported_policies(self._config, self._structure),
            gather_weights_again=bool(section.parallel_optimizer_comm_recompute) and self._structure.sharded,
            keeps_gathered=self._keeps_gathered(selections["select_comm_recompute"]),
        )

    def _apply_recompute(self, selections: dict[str, Selection], full: tuple[int, ...]) -> None:
        """Apply the recompute keys, which override swap."""
        applier, excluded = self._applier, self._drop_excluded_patterns(selections)
        applier.apply_select(selections["select_recompute"], full)
        applier.communicate_again(selections["select_comm_recompute"], full)
        applier.apply_full(full)
        applier.set_budgets(self._budgets(), full)
        applier.apply_exclude(selections["select_recompute_exclude"], excluded)
        applier.keep_communications(selections["select_comm_recompute_exclude"], excluded)
        if not self._config.recompute_config.mp_comm_recompute:
            applier.keep_all_communications()

    def _apply_inputs(self, full: tuple[int, ...]) -> None:
        """Apply the keys about inputs of recomputed layers and ops: they are swapped, kept, or sliced."""
        applier, swap, parallel = self._applier, self._config.swap_config, self._config.parallel_config
        lifted = applier.inputs_to_swap(self._swap and swap.recompute_input, full)
        read = applier.ops_read_to_swap(self._swap and swap.select_recompute_input)
        applier.keep_inputs(lifted, read)
        applier.swap_inputs(lifted, swap.default_prefetch)
        if self._config.recompute_config.recompute_slice_activation and parallel.tensor_parallel_size > 1:
            applier.slice_inputs(full, parallel.sequence_parallel_enabled)

    def _lines(self, recompute: object, selections: dict[str, Selection]) -> tuple[str, ...]:
        layer_swap, op_swap = self._swap_rules()
        tables = {
            key: {pattern: form for pattern, (form, _) in table.items()} for key, table in selections.items()
        }
        everywhere = self._config.recompute_config.recompute is True
        lines = list(self._layout.log_lines()) if self._config.parallel_config.pipeline_stage > 1 else []
        lines += formative_lines(recompute, tables, layer_swap, op_swap, self._swap)
        for layer in self._local:
            lines += self._applier.requests[layer].lines(layer, self._swap, everywhere)
        return tuple(lines)

    def requested(self, swap_is_written: bool) -> Iterator[RequestedPolicy]:
        """Yield the entries, the strongest first; unwritten swap rules are those of the default strategy."""

        def where(key: str, index: int) -> str:
            key = f"{key}[{index}]" if swap_is_written else "swap (the default strategy)"
            return f"swap_config.{key}"

        yield from self._requested_selection("select_recompute_exclude", "keep")
        yield from self._requested_selection("select_comm_recompute_exclude", "keep")
        yield RequestedPolicy("recompute_config.recompute", "recompute", "", self._full_layers()[1])
        yield from self._requested_selection("select_recompute", "recompute")
        yield from self._requested_selection("select_comm_recompute", "re-gather")
        layer_swap, op_swap = self._swap_rules()
        for index, rule in enumerate(op_swap or ()):
            layers, ahead = self._applier.layers_named(rule.layers), rule.backward_prefetch
            targets = self._applier.targets(rule.op_name, layers)
            yield RequestedPolicy(where("op_swap", index), "swap", rule.op_name, layers, ahead, targets)
        for index, entry in enumerate(layer_swap or ()):
            layers, ahead = self._applier.layers_named(entry.layers), entry.backward_prefetch
            yield RequestedPolicy(where("layer_swap", index), "swap", "", layers, ahead)

    def _requested_selection(self, key: str, asked: str) -> Iterator[RequestedPolicy]:
        for op_name, (_, layers) in self._selection(key, _SELECTIONS[key]).items():
            targets = self._applier.targets(op_name, layers)
            yield RequestedPolicy(f"recompute_config.{key}", asked, op_name, layers, targets=targets)

    def _head_tile(self) -> tuple[Tile, ...]:
        """Return the tile of head and loss. If it is impossible: a problem, or for ``auto`` an adjustment."""
        loss = self._config.tile_config.loss
        if loss is None or loss == "off":
            return ()
        reason = ""
        if self._structure.head is None:
            reason = "a model with a head (get_output_embeddings)"
        elif self._structure.compiled:
            reason = "a head outside of compiled code (compile the layers, not the model)"
        if reason and loss != "auto":
            written = f"{{tokens: {loss.tokens}}}" if isinstance(loss, TileTokens) else str(loss)
            self._problems.append(Problem("tile_config.loss", reason, written))
        if reason:
            self._applier.adjustment("tile_config.loss", "head", "auto", "off", f"it needs {reason}")
            return ()
        tokens = loss.tokens if isinstance(loss, TileTokens) else None
        return (Tile("head", "", tokens, loss if isinstance(loss, int) else None),)

    def _streamed(self) -> SequenceChunks | None:
        """Return how the sequence is streamed; a model that cannot be streamed is a problem."""
        tokens = self._config.stream_config.tokens
        if tokens == "off":
            return None
        in_stages = self._config.parallel_config.runs_pipeline
        reasons = {
            "a model with a head (get_output_embeddings)": self._structure.head is None,
            "a model that is not compiled": self._structure.compiles,
            "whole weights on each rank (no FSDP2)": self._structure.sharded,
            "all layers on each rank (no parallel_config.schedule)": in_stages,
        }
        for expected, violated in reasons.items():
            if violated:
                self._problems.append(Problem("stream_config.tokens", expected, str(tokens)))
        memory = self._config.memory
        goes_with: dict[str, tuple[str, ...]] = {"mode": ("off", "adaptive")}
        if memory.mode == "adaptive":
            goes_with |= {
                "reduce_by_gib": ("nothing",),
                "plan_file": ("nothing",),
                "preference": ("auto", "performance"),
            }
        for key, allowed in goes_with.items():
            if (asked := str(getattr(memory, key) or "nothing")) not in allowed:
                expected = f"{' or '.join(allowed)} beside stream_config"
                hint = "What a chunk keeps is chosen layer by layer, at the first training call."
                self._problems.append(Problem(f"memory.{key}", expected, asked, hint))
        dtype = self._config.stream_config.grad_accum_dtype
        return SequenceChunks(tokens if isinstance(tokens, int) else None, dtype)

    def _keeps_gathered(self, selected: dict[str, tuple[object, tuple[int, ...]]]) -> tuple[int, ...]:
        """Return the layers that save what they gather: those that a written key does not name.

        (MindFormers' ``select_comm_recompute``: without it a communication's result is kept.)
        """
        value, parallel = self._config.recompute_config.select_comm_recompute, self._config.parallel_config
        divides = parallel.tensor_parallel_size > 1 and parallel.sequence_parallel_enabled
        if value is None or not divides or self._config.memory.mode != "off":
            return ()
        again = {layer for _, layers in selected.values() for layer in layers}
        return tuple(own for layer, own in self._local.items() if layer not in again)

    def _rows(self) -> tuple[PlanRow, ...]:
        fates = self._applier.fates
        return tuple(row for layer, own in self._local.items() for row in fates[layer].rows(own))

    def _keep_overwritten(self) -> None:
        layers: dict[Scope, int] = {own: layer for layer, own in self._local.items()}
        for own, path, ordinal in overwritten(MemoryPlan(self._rows(), len(layers)), self._structure):
            self._applier.fates[layers[own]].keep_call(path, ordinal)
            self._applier.adjustment(WHERE, path, "recompute", "keep", OVERWRITTEN, layers[own])

    def _place(self, stage: int | None) -> tuple[PipelineLayout, dict[int, int]]:
        """Return the pipeline layout, and the index in the model given of each global layer that it holds."""
        own = len(self._structure.layers)
        declared = self._config.num_layers
        parallel = self._config.parallel_config
        total = own if stage is None else declared
        if total is None:
            expected = "the layer count of the whole model, since the model given holds one stage"
            raise PlanError(
                [Problem("model.model_config.num_layers", expected, "nothing")], self._config.source
            )
        if stage is None and declared is not None and declared != own:
            found = f"{declared}, and the model has {own} layers"
            hint = "Change it or remove it; it is only a check."
            self._problems.append(Problem("model.model_config.num_layers", f"{own}", found, hint))
        layout, problems = build_layout(total, parallel)
        self._problems += problems
        if layout is None:
            if stage is not None:
                raise PlanError(self._problems, self._config.source)
            layout = PipelineLayout(((total,),))  # only to find what else is wrong
            self._layout_failed = True
        if stage is None:
            return layout, {layer: layer for layer in range(total)}
        if not 0 <= stage < layout.pp:
            raise PlanError([Problem("stage", f"0 to {layout.pp - 1}", str(stage))], self._config.source)
        layers = layout.layers_of(stage)
        if len(layers) != own:
            found = f"{own} layers in the model given"
            self._problems.append(Problem("stage", f"{len(layers)} layers on stage {stage}", found))
            raise PlanError(self._problems, self._config.source)
        return layout, {layer: index for index, layer in enumerate(layers)}

    def _full_layers(self) -> tuple[object, tuple[int, ...]]:
        """Return the normal form of ``recompute`` and the layers recomputed whole."""
        where, value = "recompute_config.recompute", self._config.recompute_config.recompute
        form: Any
        if self._swap:
            form, problems = normalise_indices(value, self._layout.num_layers, where)
        elif self._layout_failed:
            return value, ()
        else:
            form, problems = normalise_counts(value, self._layout, where)
            self._say_what_is_cut(where, "", value)
        self._problems += problems
        return form, () if problems else self._layers_of(form)

    def _budgets(self) -> dict[int, float]:
        value, layers = self._config.recompute_config.compile_budget, self._layout.num_layers
        if value is None:
            return {}
        if not isinstance(value, tuple):
            return dict.fromkeys(range(layers), value)
        if len(value) != layers:
            where, found = "recompute_config.compile_budget", f"a list of {len(value)}"
            self._problems.append(Problem(where, f"one number, or {layers}: one for each layer", found))
            return {}
        return dict(enumerate(value))

    def _selection(self, key: str, defaults: tuple[str, ...]) -> Selection:
        """Return op path -> (normal form, layers) for a selective key."""
        where = f"recompute_config.{key}"
        value = getattr(self._config.recompute_config, key)
        if self._layout_failed and not self._swap:
            return {}
        forms, problems = normalise_selection(value, self._layout, defaults, swap=self._swap, where=where)
        self._problems += problems
        patterns: Mapping[str, Any] = value if isinstance(value, Mapping) else {"": value}
        for pattern, counts in patterns.items() if value and not problems and not self._swap else ():
            self._say_what_is_cut(where, pattern, counts)
        return {} if problems else {pattern: (form, self._layers_of(form)) for pattern, form in forms.items()}

    def _say_what_is_cut(self, where: str, pattern: str, value: LayerCounts) -> None:
        for place, count, held in cut_counts(value, self._layout):
            asked, got = f"{count} layers of {place}", f"{held}"
            reason = "there are no more, and a number beyond them means all"
            self._cut.append(Adjustment(where, (), pattern, asked, got, reason))

    def _layers_of(self, form: Any) -> tuple[int, ...]:
        if self._swap:
            return layers_from_indices(form, self._layout.num_layers)
        return layers_from_counts(form, self._layout)

    def _swap_rules(self) -> tuple[tuple[LayerSwapRule, ...] | None, tuple[OpSwapRule, ...] | None]:
        swap = self._config.swap_config
        if not swap.swap:
            return None, None
        if swap.layer_swap is None and swap.op_swap is None:
            return None, (OpSwapRule(DEFAULT_SWAP_PATTERN, swap.default_prefetch, True),)
        return swap.layer_swap, swap.op_swap

    def _drop_excluded_patterns(self, selections: dict[str, Selection]) -> set[str]:
        """Drop the patterns that an exclude pattern matches level by level, for all layers."""
        dropped = set()
        for key in ("select_recompute", "select_comm_recompute"):
            excludes = selections[f"{key}_exclude"]
            for pattern in list(selections[key]):
                conflict = next((item for item in excludes if same_ops(pattern, item)), None)
                if conflict is not None:
                    layers = selections[key].pop(pattern)[1]
                    if layers:
                        dropped.add(conflict)
                    by = f"{key}_exclude names {conflict!r}, and a pattern is dropped whole"
                    reason = f"{EXCLUDE_BEATS_ALL}; {by}"
                    for layer in layers:
                        self._applier.adjustment(
                            f"recompute_config.{key}", pattern, "recompute", "keep", reason, layer
                        )
        return dropped


def policies_without_effect(config: ActSwapConfig, structure: ModelStructure) -> list[Adjustment]:
    """Return an adjustment for each key that is set and has nothing to act on."""
    recompute, swap, parallel = config.recompute_config, config.swap_config, config.parallel_config
    found: list[tuple[str, str, str]] = []
    if not swap.swap:
        for key in ("layer_swap", "op_swap", "recompute_input", "select_recompute_input"):
            if getattr(swap, key):
                found.append((f"swap_config.{key}", "swap", "swap_config.swap is false"))
    if parallel.tensor_parallel_size == 1 and not structure.communicates:
        if recompute.select_comm_recompute:
            key = "recompute_config.select_comm_recompute"
            found.append((key, "recompute communication", _NO_COMMUNICATION))
        if recompute.select_comm_recompute_exclude:
            key = "recompute_config.select_comm_recompute_exclude"
            found.append((key, "keep communication", _NO_COMMUNICATION))
        if not recompute.mp_comm_recompute:
            found.append(("recompute_config.mp_comm_recompute", "false", _NO_COMMUNICATION))
    elif config.memory.mode != "off" and recompute.select_comm_recompute is False:
        reason = "the planner chooses, among layers that save their part and gather it again"
        found.append(("recompute_config.select_comm_recompute", "what is gathered is kept", reason))
    lists = [key for key in ("layer_swap", "op_swap") if getattr(swap, key) is not None]
    if swap.swap and swap.default_prefetch != 1 and lists and not swap.recompute_input:
        rules = " and ".join(key for key in lists if getattr(swap, key))
        own = f"the entries of {rules} have their own backward_prefetch, and replace the default"
        reason = own if rules else f"{' and '.join(lists)} without entries: nothing is swapped"
        found.append(("swap_config.default_prefetch", str(swap.default_prefetch), reason))
    if parallel.tensor_parallel_size == 1:
        if recompute.recompute_slice_activation:
            reason = _OWN_LAYERS if structure.communicates else _NO_COMMUNICATION
            found.append(("recompute_config.recompute_slice_activation", "slices", reason))
        if parallel.sequence_parallel_enabled:
            reason = "sequence parallelism splits the tensor-parallel group, whose size is 1"
            found.append(("parallel_config.sequence_parallel_enabled", "true", reason))
    found += _gathering_without_effect(recompute.parallel_optimizer_comm_recompute, structure)
    if config.stream_config.grad_accum_dtype != "fp32" and config.stream_config.tokens == "off":
        reason = "stream_config.tokens is off"
        found.append(("stream_config.grad_accum_dtype", config.stream_config.grad_accum_dtype, reason))
    if parallel.schedule is not None and parallel.pipeline_stage == 1:
        found.append(("parallel_config.schedule", parallel.schedule, "pipeline_stage is 1"))
    memory = config.memory
    if memory.mode == "off" and (memory.budget_gib or memory.reduce_by_gib or memory.plan_file):
        found.append(("memory", "a budget or a plan file", "memory.mode is off"))
    return [Adjustment(where, (), "", asked, "no effect", reason) for where, asked, reason in found]


def _gathering_without_effect(again: bool | None, structure: ModelStructure) -> list[tuple[str, str, str]]:
    key = "recompute_config.parallel_optimizer_comm_recompute"
    if again and not structure.sharded:
        none = "weights are not gathered from an optimizer-sharding group here (FSDP2: reshard_after_forward)"
        return [(key, "true", none)]
    if again is False and structure.gathers_again:
        decides = "FSDP2 gathers again as its own reshard_after_forward says; pass false to fully_shard"
        return [(key, "false", decides)]
    return []


def unsupported_policies(config: ActSwapConfig, structure: ModelStructure) -> tuple[str, ...]:
    """Return requests of the configuration that are valid but not supported by this version."""
    policies, parallel = [], config.parallel_config
    if parallel.tensor_parallel_size > 1 and not structure.communicates:
        size = parallel.tensor_parallel_size
        policies.append(f"parallel_config.tensor_parallel_size: {size} (tensor parallelism)")
    if parallel.runs_pipeline:
        stages = f"{parallel.pipeline_stage} stages, which hf_actswap.ActSwapTrainer runs"
        policies.append(f"parallel_config.schedule: {parallel.schedule} (a pipeline of {stages})")
    return tuple(policies)
