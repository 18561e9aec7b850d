"""Recomputation inside layers that are compiled, by PyTorch's own means.

The partitioner of a compiled region cuts its joint graph into a forward and a backward; what crosses the cut
is saved. Two things move the cut, and both act while the region is compiled, at its first call:

* **tags**: an op that the plan recomputes is tagged ``MUST_RECOMPUTE``, so neither it nor a view of it can
  cross. Every other op is tagged ``PREFER_SAVE``, which the partitioner reads as no tag: it saves or rebuilds
  it as it sees fit (fused elementwise ops it rebuilds by itself). Tags come from the policy of a selective
  ``torch.utils.checkpoint`` around the layer's forward, which is traced with it. The tracer notes for each op
  the module and the function that it comes from, so the op paths of a plan find their ops. As in eager layers
  a named module keeps its output and a named function does not.
* **the activation memory budget**: the share of what the region would save by itself. Under a budget PyTorch
  (2.13, inductor too) rebuilds dropout with another mask and says nothing: the gradients are wrong. So ops
  that draw random numbers are tagged ``MUST_SAVE`` there. A budget of 0 would not even heed that; instead of
  it all ops are tagged ``MUST_RECOMPUTE``, which saves the inputs too, and the generator's state.

Layers of one class run one code object, and dynamo compiles it anew only where a guard fails. So the forward
that stands in for the layer's reads a text, its **key**, which says what is recomputed: dynamo guards on it.
Layers with equal keys share one graph, layers with others have their own, a region that was compiled before
the plan came is compiled again, and after `remove` its old graph serves again. AOTAutograd's cache on disk is
told the key as well.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
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
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..plan.actions import COMPILE_BUDGET, MemoryPlan
from ..plan.compiled import uncompiled
from ..plan.opnames import OpStack, function_name
from ..plan.outline import OUTPUT, LayerOutline, Outline, is_below
from ..plan.record import OpKey, storage_key
from .around import Undo, around, replace_forward

_TAGS_VERSION = 1
"""Part of the key: another way to tag must not find graphs of the old one in a cache."""

_GRAPHS_OF_EARLIER_PLANS = 48
"""Whoever tries plans has tried fewer. All of them together run the code of `_traced_forward`."""


@dataclass(frozen=True)
class RegionRules:
    """What is recomputed in one compiled layer. Equal rules: one graph.

    Args:
        budget: share of the activation memory that may be saved, above 0; ``None``: not touched.
        fates: op path -> whether it is recomputed; the longest path wins. Empty: no tags.
        outputs: what recomputed modules hand on: not recomputed.
        modules: op paths of the layer's modules.
        attention: those of its attention modules.
    """

    budget: float | None
    fates: tuple[tuple[str, bool], ...]
    outputs: tuple[OpKey, ...]
    modules: tuple[str, ...]
    attention: tuple[str, ...]

    @functools.cached_property
    def key(self) -> str:
        """Says all of it, the same in every process."""
        return hashlib.sha256(f"{_TAGS_VERSION} {self!r}".encode()).hexdigest()

    @functools.cached_property
    def _table(self) -> dict[str, bool]:
        return dict(self.fates)

    @property
    def tagged(self) -> bool:
        """Whether any op needs a tag."""
        return bool(self.fates) or (self.budget is not None and self.budget < 1)

    def tag_of_random(self) -> CheckpointPolicy:
        """The tag of an op that draws random numbers and is not named."""
        free = self.budget is None or self.budget == 1
        return CheckpointPolicy.PREFER_SAVE if free else CheckpointPolicy.MUST_SAVE

    def recomputes(self, op: OpKey) -> bool:
        """Whether the output of ``op`` is rebuilt in backward."""
        path = op[0]
        while path not in self._table:
            if not path:
                return False
            path = path.rpartition(".")[0]
        return self._table[path] and op not in self.outputs


def region_rules(plan: MemoryPlan, layer: LayerOutline) -> RegionRules | None:
    """Return what a plan recomputes inside a layer, if it is compiled and not recomputed whole.

    Args:
        plan: applied to the layer's model.
        layer: of it.
    """
    if not layer.compiled:
        return None
    rows = {row.op_path: row for row in plan.rows if row.scope == layer.index and row.ordinal is None}
    root = rows.get("")
    budget = root.parameters.get(COMPILE_BUDGET) if root is not None else None
    fates = {path: row.fate == "recompute" for path, row in rows.items() if path != OUTPUT}
    if not any(fates.values()) or not any(fates.keys()):
        fates = {}  # nothing, or the layer as a whole
    if budget == 0:
        budget, fates = None, {"": True}
    if budget is None and not fates:
        return None
    modules = tuple(op.path for op in layer.ops if op.kind != "function")
    roots = [path for path, recomputed in fates.items() if recomputed and path in modules]
    return RegionRules(
        budget,
        tuple(sorted(fates.items())),
        tuple(sorted({key for path in roots for key in _outputs_of(layer, path)})),
        modules,
        tuple(sorted(layer.attention_paths)),
    )


def _outputs_of(layer: LayerOutline, module_path: str) -> set[OpKey]:
    """The ops inside a module whose outputs are read outside of it."""
    read = {key for call in layer.calls if not is_below(call.key[0], module_path) for key in call.inputs}
    if layer.output_of is not None:
        read.add(layer.output_of)
    return {key for key in read if is_below(key[0], module_path)}


class CompiledRegions:
    """Puts the rules of a plan on the compiled layers of a model.

    Args:
        plan: what is recomputed.
        outline: of the model.
    """

    def __init__(self, plan: MemoryPlan, outline: Outline) -> None:
        found = {layer.index: region_rules(plan, layer) for layer in outline.layers}
        self._rules = {index: rules for index, rules in found.items() if rules is not None}
        self._shared: dict[RegionRules, Callable[..., Any]] = {}

    def attach(self, index: int, layer: nn.Module) -> list[Undo]:
        """Put the rules of layer ``index`` on its module; return what takes them off again."""
        rules = self._rules.get(index)
        if rules is None:
            return []
        return [self._replace_forward(uncompiled(layer), rules), *self._in_force(layer, rules)]

    def _replace_forward(self, layer: nn.Module, rules: RegionRules) -> Undo:
        own = vars(layer).get("forward")
        if own is None:
            shared = self._shared.get(rules)
            if shared is None:
                shared = self._shared[rules] = _traced_forward(rules, None)
        else:  # somebody replaced the forward of this layer alone: it keeps a graph of its own
            shared = _traced_forward(rules, own)
        return replace_forward(layer, MethodType(shared, layer))

    def _in_force(self, layer: nn.Module, rules: RegionRules) -> list[Undo]:
        """Set the compiler's knobs during each call of the region: only there it can be compiled.

        Dynamo gives a code object up after a few recompilations, without a word: what runs then is not
        compiled. The graphs of this plan, and of those that were on the model before it, come on top of them.
        """
        entered: list[ExitStack] = []
        graphs = len(set(self._rules.values())) + _GRAPHS_OF_EARLIER_PLANS

        def before(_module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
            stack = ExitStack()
            limit = dynamo_config.recompile_limit + graphs
            stack.enter_context(dynamo_config.patch(recompile_limit=limit))
            if rules.budget is not None:
                stack.enter_context(functorch_config.patch(activation_memory_budget=rules.budget))
            entered.append(stack)

        def after(*_: Any) -> None:
            if entered:
                entered.pop().close()

        return around(layer, before, after)


def _traced_forward(rules: RegionRules, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return the forward that is traced in place of a layer's (``own``: or of the one put on it)."""
    key = rules.key
    contexts = _contexts(rules) if rules.tagged else None

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(type(self).forward, self) if own is None else own
        # The key is never empty. Looking at it makes dynamo guard on it: see the module's text.
        if not key or contexts is None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return checkpoint(call, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return forward


def _contexts(rules: RegionRules) -> Callable[[], Any]:
    """Return what `checkpoint` takes as ``context_fn``: fresh tags for every trace."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(RegionTags(rules))

    contexts.cache_hash = rules.key  # type: ignore[attr-defined]
    return contexts


class RegionTags:
    """The policy of one trace of one region: which ops must be recomputed.

    Called once for each aten op, in order. A view has the tag of what it is a view of.

    Args:
        rules: of the region.
    """

    def __init__(self, rules: RegionRules) -> None:
        self._rules = rules
        self._stack = OpStack(frozenset(rules.attention))
        self._node = ""
        self._op: OpKey = ("", 0)
        self._counted = False
        self._tags: dict[int, CheckpointPolicy] = {}
        self._alive: list[Any] = []

    def __call__(self, context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Return the tag of what ``func`` has just returned."""
        made = _storages(context.op_output)
        read = _storages((args, kwargs))
        self._follow()
        base = next((key for key in made if key in read), None)
        if base is not None:
            return self._tags.get(base, CheckpointPolicy.PREFER_SAVE)
        if not self._counted:
            self._counted = True
            self._stack.count(self._op[0])
        tag = CheckpointPolicy.PREFER_SAVE
        if self._rules.recomputes(self._op):
            tag = CheckpointPolicy.MUST_RECOMPUTE
        elif _draws(func, args, kwargs):
            tag = self._rules.tag_of_random()
        self._tags.update(dict.fromkeys(made, tag))
        self._alive.append(context.op_output)  # an address is a name only as long as its storage lives
        return tag

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
    """The name of a function as the outline has it; a module's only function is known by its node's name."""
    if isinstance(function, str):
        return function.rstrip("_")
    if callable(function) and not isinstance(function, type):
        return function_name(function) or node
    head, _, number = node.rpartition("_")
    return head if number.isdigit() else node


def _op_path(traced: str, modules: Iterable[str]) -> str:
    """The op path of a module that the tracer calls ``L['self'].mlp.act_fn``; ``""``: the layer itself."""
    plain = "." + traced.replace("._modules['", ".").replace("']", "").replace("[", ".").replace("]", "")
    return max((path for path in modules if plain.endswith(f".{path}")), key=len, default="")


def _draws(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an aten op draws random numbers; attention without dropout only could."""
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    names = [argument.name for argument in function._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(values.get("dropout_p"))


def _storages(values: Any) -> list[int]:
    found = (storage_key(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return [key for key in found if key is not None]
