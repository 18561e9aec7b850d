"""Recomputation inside layers that are compiled, by PyTorch's own means.

The partitioner of a compiled region cuts its joint graph into a forward and a backward; what crosses the cut
is saved. Two things move the cut, and both act while the region is compiled, at its first call:

* **tags**: an op that the plan recomputes is tagged ``MUST_RECOMPUTE``, so neither it nor a view of it can
  cross. Every other op is tagged ``PREFER_SAVE``, which the partitioner reads as no tag: it saves or rebuilds
  the op as it sees fit (it rebuilds fused elementwise ops unasked). Tags come from the policy of a selective
  ``torch.utils.checkpoint`` around the layer's forward, which is traced with it. The tracer notes for each op
  the module and the function that it comes from, so the op paths of a plan find their ops. As in eager layers
  a named module keeps its output and a named function does not.
* **the activation memory budget**: the share of what the region would save by itself. Under a budget PyTorch
  (2.13, inductor too) rebuilds dropout with another mask and says nothing: the gradients are wrong. So ops
  that draw random numbers are tagged ``MUST_SAVE`` there. A budget of 0 would ignore even that tag; instead
  of it all ops are tagged ``MUST_RECOMPUTE``, so only the inputs and the generator's state are saved.

Layers of one class run one code object, and dynamo compiles it anew only where a guard fails. So the forward
that replaces the layer's reads a string, its **key**, which says what is recomputed: dynamo guards on it.
Layers with equal keys share one graph, layers with other keys have their own. A region that was compiled
before the plan was applied is compiled again, and after `remove` its old graph is used again. The key is also
part of the key of AOTAutograd's cache on disk.

The policy of a selective checkpoint is called for each aten op. PyTorch 2.13 calls it after the op has run,
with the op's output. Earlier versions call it before, and store the outputs of each op: there the policy
reads the last stored output of the op before. A view is recognised by the op's schema.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch.fx import traceback
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..plan.actions import COMPILE_BUDGET, Scope
from ..plan.model_structure import OUTPUT, LayerStructure, ModelStructure, is_below
from ..plan.op_facts import aliased_argument, op_draws
from ..plan.opnames import OpStack, function_name
from ..plan.record import OpKey, storage_key
from ..plan.saved_bytes import RecomputedModules
from ..plan.wrappers import uncompiled
from .hook_wrappers import Undo, replace_forward, wrap_call

_GRAPHS_OF_EARLIER_PLANS = 48
"""More graphs than one search for a plan makes; all share the code object of `_traced_forward`."""

_TAGS_VERSION = 2
"""Part of the key: change it with the way ops are tagged, so that no cache returns graphs with old tags."""


@dataclass(frozen=True)
class RegionRules:
    """What a plan recomputes in one compiled layer. Layers with equal rules share one graph.

    Args:
        budget: share of the activation memory that may be saved, above 0; ``None``: PyTorch's own setting.
        fates: op path -> whether it is recomputed; the longest path wins. Empty: no tags.
        outputs: ops whose outputs are returned by recomputed modules; these ops are not recomputed.
        modules, attention: op paths of the layer's modules, and of those for attention.
    """

    budget: float | None
    fates: tuple[tuple[str, bool], ...]
    outputs: tuple[OpKey, ...]
    modules: tuple[str, ...]
    attention: tuple[str, ...]

    @functools.cached_property
    def key(self) -> str:
        """A digest of all fields, the same in every process."""
        return hashlib.sha256(f"{_TAGS_VERSION} {self!r}".encode()).hexdigest()

    @functools.cached_property
    def _table(self) -> dict[str, bool]:
        return dict(self.fates)

    def recomputes(self, op: OpKey) -> bool:
        """Whether the output of ``op`` is rebuilt in backward."""
        path = op[0]
        while path not in self._table:
            if not path:
                return False
            path = path.rpartition(".")[0]
        return self._table[path] and op not in self.outputs


def region_rules(recomputed: RecomputedModules, layer: LayerStructure) -> RegionRules | None:
    """Return what a plan recomputes in a layer; ``None``: not compiled, recomputed whole or not at all."""
    if not layer.compiled:
        return None
    plan = recomputed.plan
    rows = {row.op_path: row for row in plan.rows if row.scope == layer.index and row.ordinal is None}
    root = rows.get("")
    budget = root.parameters.get(COMPILE_BUDGET) if root is not None else None
    fates = {path: row.fate == "recompute" for path, row in rows.items() if path != OUTPUT}
    if not any(fates.values()) or not any(fates.keys()):
        fates = {}  # nothing is recomputed, or the layer as a whole
    if budget == 0:
        budget, fates = None, {"": True}
    if budget is None and not fates:
        return None
    roots = [path for path in fates if path and recomputed.is_root(layer.index, path)]
    return RegionRules(
        budget,
        tuple(sorted(fates.items())),
        tuple(sorted({key for path in roots for key in _outputs_of(layer, path)})),
        tuple(op.path for op in layer.ops if op.kind != "function"),
        tuple(sorted(layer.attention_paths)),
    )


def _outputs_of(layer: LayerStructure, module_path: str) -> set[OpKey]:
    """Return the ops inside a module whose outputs are read outside of it."""
    read = {key for call in layer.calls if not is_below(call.key[0], module_path) for key in call.inputs}
    if layer.output_of is not None:
        read.add(layer.output_of)
    return {key for key in read if is_below(key[0], module_path)}


class CompiledRegions:
    """Puts the rules of a plan on the compiled layers of a model."""

    def __init__(self, recomputed: RecomputedModules, structure: ModelStructure) -> None:
        found = {layer.index: region_rules(recomputed, layer) for layer in structure.all_layers}
        self._rules = {index: rules for index, rules in found.items() if rules is not None}
        self._shared: dict[RegionRules, Callable[..., Any]] = {}

    def attach(self, scope: Scope, layer: nn.Module) -> list[Undo]:
        """Put the rules of a layer on its module; return functions that take them off again."""
        rules = self._rules.get(scope)
        if rules is None:
            return []
        return [self._replace_forward(uncompiled(layer), rules), *self._compiler_options(layer, rules)]

    def _replace_forward(self, layer: nn.Module, rules: RegionRules) -> Undo:
        own = vars(layer).get("forward")
        if own is None:
            shared = self._shared.get(rules)
            if shared is None:
                shared = self._shared[rules] = _traced_forward(rules, None)
        else:  # the forward of this layer alone was replaced: it keeps a graph of its own
            shared = _traced_forward(rules, own)
        return replace_forward(layer, MethodType(shared, layer))

    def _compiler_options(self, layer: nn.Module, rules: RegionRules) -> list[Undo]:
        """Set the compiler's options during each call of the region, because it may be compiled then."""
        entered: list[ExitStack] = []
        # After a few recompilations dynamo runs a code object uncompiled, without a warning: leave room for
        # the graphs of this plan and of those before it.
        graphs = len(set(self._rules.values())) + _GRAPHS_OF_EARLIER_PLANS

        def before(_module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            stack = ExitStack()
            stack.enter_context(dynamo_config.patch(recompile_limit=dynamo_config.recompile_limit + graphs))
            if rules.budget is not None:
                stack.enter_context(functorch_config.patch(activation_memory_budget=rules.budget))
            entered.append(stack)

        def after(*_: Any) -> None:
            if entered:
                entered.pop().close()

        return wrap_call(layer, before, after)


def _traced_forward(rules: RegionRules, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the forward that is traced in place of a layer's (``own``: one that was put on it alone)."""
    key = rules.key
    tagged = rules.fates or (rules.budget is not None and rules.budget < 1)
    contexts = _contexts(rules) if tagged else None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(type(self).forward, self) if own is None else own
        # The key is never empty. Reading it makes dynamo guard on it, so another key gets its own graph.
        if not key or contexts is None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return checkpoint(call, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return forward


def _contexts(rules: RegionRules) -> Callable[[], Any]:
    """Return what `checkpoint` takes as ``context_fn``: fresh tags for every trace."""

    def contexts() -> Any:
        tags = RegionTags(rules)
        caching, cached = create_selective_checkpoint_contexts(tags)
        if not _TELLS_OUTPUT:
            tags.made = caching.storage
        return caching, cached

    contexts.cache_hash = rules.key  # type: ignore[attr-defined]
    return contexts


_TELLS_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters


class RegionTags:
    """The policy of one trace of one region, called for each aten op in order. A view has its base's tag.

    Attributes:
        made: op -> outputs of its calls so far, wrapped; read only if the context does not have the output.
    """

    made: Mapping[Any, list[Any]]

    def __init__(self, rules: RegionRules) -> None:
        self._rules = rules
        self._stack = OpStack(frozenset(rules.attention))
        self._node = ""
        self._op: OpKey = ("", 0)
        self._counted = False
        self._tags: dict[int, CheckpointPolicy] = {}
        self._alive: list[Any] = []
        self._before: tuple[Any, CheckpointPolicy] | None = None

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Return the tag of ``func``, which has just run (before PyTorch 2.13: which is about to run)."""
        if context.is_recompute:  # earlier versions call it again; the result changes nothing in the trace
            return CheckpointPolicy.PREFER_SAVE
        if self._before is not None:
            before, tag = self._before
            # A run that only collects shapes does not keep what it would recompute; its tags are not used.
            self._note([wrapper.val for wrapper in tree_leaves(self.made.get(before, [])[-1:])], tag)
        self._follow()
        tag = self._tag(func, args, kwargs)
        if _TELLS_OUTPUT:
            self._note(context.op_output, tag)
        else:
            self._before = (func, tag)
        return tag

    def _tag(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckpointPolicy:
        viewed = aliased_argument(func, args, kwargs)
        key = None if viewed is None else storage_key(viewed)
        if key is not None:
            return self._tags.get(key, CheckpointPolicy.PREFER_SAVE)
        if not self._counted:
            self._counted = True
            self._stack.count(self._op[0])
        if self._rules.recomputes(self._op):
            return CheckpointPolicy.MUST_RECOMPUTE
        if self._rules.budget not in (None, 1) and op_draws(func, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_SAVE

    def _note(self, made: Any, tag: CheckpointPolicy) -> None:
        self._alive.append(made)  # an address identifies a storage only while the storage exists
        for leaf in tree_leaves(made):
            key = storage_key(leaf) if isinstance(leaf, torch.Tensor) else None
            if key is not None:
                self._tags.setdefault(key, tag)

    def _follow(self) -> None:
        """Read off the tracer which call of which function in which module runs."""
        meta = traceback.get_current_meta()
        node, function = (meta.get("source_fn_stack") or [("", None)])[-1]
        if node == self._node and node:
            return
        stack = list((meta.get("nn_module_stack") or {}).values())
        module = _op_path(stack[-1][0], self._rules.modules) if stack else ""
        if module != self._stack.module:
            self._stack.leave(self._stack.module)
            if module:
                self._stack.enter(module)
        self._node, self._counted = node, False
        self._op = self._stack.begin(_name(node, function))


def _name(node: str, function: Any) -> str:
    """Return a function's name in the model structure, from the traced function or else its node's name."""
    if isinstance(function, str):
        return function.rstrip("_")
    if callable(function) and not isinstance(function, type):
        return function_name(function) or node
    head, _, number = node.rpartition("_")
    return head if number.isdigit() else node


def _op_path(traced: str, modules: Iterable[str]) -> str:
    """Return the op path of a module, from a name like ``L['self'].mlp.act_fn``; ``""``: the layer itself."""
    plain = "." + traced.replace("._modules['", ".").replace("']", "").replace("[", ".").replace("]", "")
    return max((path for path in modules if plain.endswith(f".{path}")), key=len, default="")
