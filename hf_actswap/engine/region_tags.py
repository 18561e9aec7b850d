"""Tags the ops of one compiled region while it is traced: which must be recomputed.

The policy of a selective checkpoint is asked about each aten op. PyTorch 2.13 asks after the op has run and
hands over what it made; earlier versions ask before it. There the mode that asks keeps what each op made, for
its recomputation; the last entry of the op before is read there. A view is known by the op's schema, which
does not need its output.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import traceback
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from ..plan.opnames import OpStack, function_name
from ..plan.record import OpKey, storage_key
from .region_rules import RegionRules

_TELLS_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters


def tagging_contexts(tags: RegionTags) -> tuple[Any, Any]:
    """Return the pair of contexts that `checkpoint` asks its ``context_fn`` for."""
    caching, cached = create_selective_checkpoint_contexts(tags)
    if not _TELLS_OUTPUT:
        tags.made = caching.storage
    return caching, cached


class RegionTags:
    """The policy of one trace of one region: which ops must be recomputed.

    Called once for each aten op, in order. A view has the tag of what it is a view of.

    Args:
        rules: of the region.

    Attributes:
        made: op -> what its calls made so far, wrapped; read only where the context does not tell.
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
        """Return the tag of ``func``, which has just run (or is about to: see the module's text)."""
        if context.is_recompute:  # earlier versions ask again; the answer changes nothing in what is traced
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
        viewed = _viewed(func, args, kwargs)
        if viewed is not None:
            return self._tags.get(viewed, CheckpointPolicy.PREFER_SAVE)
        if not self._counted:
            self._counted = True
            self._stack.count(self._op[0])
        if self._rules.recomputes(self._op):
            return CheckpointPolicy.MUST_RECOMPUTE
        return self._rules.tag_of_random() if _draws(func, args, kwargs) else CheckpointPolicy.PREFER_SAVE

    def _note(self, made: Any, tag: CheckpointPolicy) -> None:
        """Note the tag of what an op has made: a view finds it there."""
        self._alive.append(made)  # an address is a name only as long as its storage lives
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


def _viewed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """The storage that an op returns a view of, or writes into; ``None``: it makes its own."""
    schema = getattr(function, "_schema", None)  # higher-order operators have none, and return no views
    if schema is None or all(made.alias_info is None for made in schema.returns):
        return None
    for at, argument in enumerate(schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and isinstance(value, torch.Tensor):
            return storage_key(value)
    return None
