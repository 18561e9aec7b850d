"""Facts about PyTorch's functions and ops: is it random, a collective, a view, in place, can it run again?

There are two kinds of callables. A **function** is what a ``TorchFunctionMode`` sees (``F.dropout``,
``tensor.mul_``); it is known by its name, which is also the last part of an op path. An **op** is what a
dispatch mode sees (``aten.mul_.Tensor``); it is known by its schema and its tags.

**Custom autograd functions.** No ``TorchFunctionMode`` sees ``Function.apply``, so what it saves counts as of
the module that calls it, and has the module's fate. A function that is called by `adapt_mem_func_wrapper` is
an op like any other, ``<module path>.<class name>``: a plan can keep, swap or recompute it alone, and a
profile times it. Name and arguments are MindSpeed's (Adaptive Memory Optimization,
"torch.autograd.Function").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function


@dataclass(frozen=True)
class UserFunction:
    """The call that a function mode sees instead of ``function.apply``; it may draw random numbers."""

    function: Any

    @property
    def __name__(self) -> str:
        name: str = self.function.__name__
        return name

    def __call__(self, *args: Any) -> Any:
        return adapt_mem_func_wrapper(self.function, *args)


def adapt_mem_func_wrapper(function: Any, *args: Any) -> Any:
    """Return ``function.apply(*args)``, as an op with the name of ``function`` (`torch.autograd.Function`).

    Results and graph are the same as without it. Functions that are applied directly work too; they are then
    a part of the module that applies them.

    Args:
        function: a subclass of ``torch.autograd.Function``. If it is recomputed, its forward runs again with
            the random numbers of the first time.
        args: arguments of its ``forward``.
    """
    tensors = tuple(item for item in args if isinstance(item, torch.Tensor))
    if has_torch_function(tensors):
        return handle_torch_function(UserFunction(function), tensors, *args)
    return function.apply(*args)


COMMUNICATIONS = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
"""Functions by which the ranks of a tensor-parallel group exchange activations inside a layer."""

GATHER = "all_gather"
"""The communication whose result is larger than its input."""

ROW_LOSSES = frozenset({"cross_entropy", "parallel_cross_entropy"})
"""Losses of logits and targets that are a sum, or a mean, of one value for each row of the logits."""

FULL_LOGITS = "full_logits"
"""Function ``(part, vocabulary size, ..)`` that gathers rows of logits whose vocabulary the ranks divide."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


RANDOM_FUNCTIONS = _names(
    """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout
    bernoulli binomial cauchy exponential geometric log_normal normal poisson random uniform
    rand rand_like randn randn_like randint randint_like randperm multinomial rrelu gumbel_softmax
    fractional_max_pool2d fractional_max_pool3d gru lstm rnn_relu rnn_tanh multi_head_attention_forward
    """
)
"""Functions that may draw random numbers: recomputed with the generator state of their first run."""

UNREPEATABLE_FUNCTIONS = _names(
    """
    empty empty_like empty_strided new_empty new_empty_strided resize
    index_add index_put index_reduce put scatter_add scatter_reduce bincount histc
    """
)
"""Functions whose result differs from run to run: uninitialised memory, sums in the order of threads."""

_IN_PLACE_OPERATORS = _names(
    """
    __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __imatmul__
    __iand__ __ior__ __ixor__ __ilshift__ __irshift__ __setitem__
    """
)
_COLLECTIVES = frozenset(
    {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
)
"""Namespaces of the ops that exchange data with other ranks."""
_READ_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_BUILT_IN = frozenset({"aten", "prims", "prim"})
_VIEWS_WITHOUT_ALIAS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"})
"""Ops that return views although their schema does not say so."""


def is_communication(op_path: str) -> bool:
    """Whether an op path names a communication (``input_layernorm.all_gather``)."""
    return op_path.rpartition(".")[2] in COMMUNICATIONS


def is_repeatable(op_path: str) -> bool:
    """Whether the function that an op path names gives the same result when it is run again."""
    return op_path.rpartition(".")[2] not in UNREPEATABLE_FUNCTIONS


def can_run_again(func: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a second run of a function gives the same result: not if it writes into an input."""
    own = getattr(func, "__name__", "").partition(".")[0]
    in_place = own in _IN_PLACE_OPERATORS or (own.endswith("_") and not own.endswith("__"))
    writes = in_place or bool(kwargs.get("inplace")) or kwargs.get("out") is not None
    return not writes and name not in UNREPEATABLE_FUNCTIONS


def draws_random_numbers(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a function may draw random numbers; ``True`` for custom operators and user functions."""
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if isinstance(func, torch._ops.OpOverload):
        return op_may_draw(func)
    if isinstance(func, torch._ops.OpOverloadPacket | UserFunction):
        return True
    return name in RANDOM_FUNCTIONS or bool(kwargs.get("dropout_p"))


def op_may_draw(op: torch._ops.OpOverload) -> bool:
    """Whether an op may draw random numbers, whatever its arguments: PyTorch's own have a tag that says so.

    A custom op is taken to draw, since its author may have forgotten the tag.
    """
    return op.namespace not in _BUILT_IN or torch.Tag.nondeterministic_seeded in op.tags


def op_draws(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an op draws random numbers: it has the tag, and any dropout argument is not 0."""
    dropout = _dropout_argument(op)
    if dropout is None:
        return False
    name, position = dropout
    return not name or bool(kwargs.get(name, args[position] if position < len(args) else 0.0))


@lru_cache(maxsize=4096)
def _dropout_argument(op: Any) -> tuple[str, int] | None:
    """Return name and position of an op's dropout argument; ``("", 0)``: none; ``None``: never random."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return None
    arguments = enumerate(op._schema.arguments)
    return next(((item.name, at) for at, item in arguments if item.name == "dropout_p"), ("", 0))


def reads_values(op: Any, reads_groups: bool) -> bool:
    """Whether the host waits in an op for values from the device: a number, or sizes that depend on values.

    ``reads_groups``: whether ``grouped_mm`` reads the ends of its groups, as it does without a kernel for the
    device (``_grouped_mm_fallback`` in PyTorch's ``aten/src/ATen/native/GroupedMMUtils.h``).
    """
    if op is torch.ops.aten._grouped_mm.default:
        return reads_groups
    return not _READ_TAGS.isdisjoint(getattr(op, "tags", ()))


def is_collective(op: Any) -> bool:
    return getattr(op, "namespace", "") in _COLLECTIVES


READS_DEVICE: Any = torch.ops.prim.device.default
"""How PyTorch asks a tensor that is not its own (a fake one) for its device: three times for each op."""


@lru_cache(maxsize=4096)
def computes(op: Any) -> bool:
    """Whether an op does more than return views of its arguments; higher-order ops count as such."""
    schema = getattr(op, "_schema", None)
    if schema is None or schema.is_mutable:
        return True
    if schema.name in _VIEWS_WITHOUT_ALIAS or op.namespace == "prim":
        return False
    return not schema.returns or any(made.alias_info is None for made in schema.returns)


def aliased_argument(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the argument that an op returns a view of, or writes into; ``None``: its results are new."""
    schema = getattr(op, "_schema", None)  # higher-order operators have none, and return no views
    if schema is None or all(made.alias_info is None for made in schema.returns):
        return None
    for at, argument in enumerate(schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and isinstance(value, torch.Tensor):
            return value
    return None


def argument_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return the value that a call gives for a named argument, or its default; ``None`` without either."""
    for at, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            default = argument.default_value if argument.has_default_value() else None
            return args[at] if at < len(args) else kwargs.get(name, default)
    return None


def why_run_once(op: Any) -> str:
    """Return why an op that failed half-way must not be run a second time; empty: it may run again."""
    schema = getattr(op, "_schema", None)
    if schema is None:
        return "nothing is known of what it does"
    if is_collective(op):
        return "the other ranks have done their part"
    if schema.is_mutable:
        return "it writes into its arguments"
    if "batch_norm" in schema.name and "backward" not in schema.name:
        return "it updates running statistics"
    return ""
