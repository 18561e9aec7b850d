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
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from ..plan.actions import MemoryPlan, Scope
from ..plan.compiled import uncompiled
from ..plan.outline import Outline
from .around import Undo, around, replace_forward
from .region_rules import RegionRules, region_rules
from .region_tags import RegionTags, tagging_contexts

_GRAPHS_OF_EARLIER_PLANS = 48
"""Whoever tries plans has tried fewer. All of them together run the code of `_traced_forward`."""


class CompiledRegions:
    """Puts the rules of a plan on the compiled layers of a model.

    Args:
        plan: what is recomputed.
        outline: of the model.
    """

    def __init__(self, plan: MemoryPlan, outline: Outline) -> None:
        found = {layer.index: region_rules(plan, layer) for layer in outline.all_layers}
        self._rules = {index: rules for index, rules in found.items() if rules is not None}
        self._shared: dict[RegionRules, Callable[..., Any]] = {}

    def attach(self, scope: Scope, layer: nn.Module) -> list[Undo]:
        """Put the rules of a layer on its module; return what takes them off again."""
        rules = self._rules.get(scope)
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
        return tagging_contexts(RegionTags(rules))

    contexts.cache_hash = rules.key  # type: ignore[attr-defined]
    return contexts
