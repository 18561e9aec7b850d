"""Logits as rows that are computed chunk by chunk, from hidden states, a head and the calls that follow it.

`RowRecipe` describes how the rows are made, and computes the values that a function returns for them: without
gradients (`RowRecipe.values`), or with gradients of hidden states and parameters
(`RowRecipe.differentiated`). One chunk of logits exists at a time.

Gradients are summed over the chunks in fp32, from products that are not rounded before. So for a head that
is just a linear layer, autograd differentiates only the calls that follow it, and the two products of the
layer's backward are computed here. Other heads (adapters, quantised weights) are differentiated by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from .pieces import Exchangeable, add_product, no_saved_tensor_hooks, product, zero_sum
from .replay import CallState


class Head(Exchangeable):
    """A head without its hooks.

    Args:
        module: a linear layer, or a module around one; or a linear layer divided among ranks
            (`ColumnParallelLinear`), with ``input_parts``, ``whole_input``, and ``output_size`` of all ranks.
    """

    module: Any

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, module.forward)
        self.is_divided = hasattr(module, "whole_input")
        self.is_linear = (type(module) is nn.Linear or self.is_divided) and "forward" not in vars(module)

    def rows_of(self, hidden: torch.Tensor) -> int:
        """Return how many rows of hidden states a call multiplies on each rank."""
        parts = self.module.input_parts if self.is_divided else 1
        return int(hidden.shape[:-1].numel() * parts)


class HeadCall:
    """One call of a head: what all logits that derive from it share.

    Args:
        head: the head that was called.
        names: names of its trained parameters.
        tokens: number of tokens in a chunk.
        dtype: dtype of its output.
        device: device of the hidden states.
    """

    def __init__(
        self, head: Head, names: Sequence[str], tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.head, self.names, self.tokens, self.dtype, self.device = head, names, tokens, dtype, device
        self._state = CallState(device, False, ())
        self._draws = any(isinstance(part, nn.Dropout) and part.training for part in head.module.modules())
        self._first_run: CallState | None = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run under the call's autocast state; each run draws the same random numbers as the first run."""
        with no_saved_tensor_hooks():
            if self._first_run is not None:
                with self._first_run.restored(), self._state.autocast_restored():
                    yield
                return
            self._first_run = CallState(self.device, True, ()) if self._draws else None
            with self._state.autocast_restored():
                yield

    def logits(self, hidden: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the logits ``[C, V]`` of a chunk ``[C, H]``, with these as the trained parameters."""
        named = dict(zip(self.names, parameters, strict=True))
        logits: torch.Tensor = self.head.with_parameters(named, hidden)
        return logits

    def linear(self, parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias of a linear head in the dtype of its output, cast once for all chunks."""
        named = dict(zip(self.names, parameters, strict=True))
        weight, bias = (named.get(name, getattr(self.head.module, name)) for name in ("weight", "bias"))
        return weight.detach().to(self.dtype), None if bias is None else bias.detach().to(self.dtype)


class LogitsPlaceholder:
    """Stands for the logits among the arguments of a `RowCall`."""


@dataclass(frozen=True)
class RowCall:
    """A call that treats each row of logits by itself, to be made with the rows of a chunk.

    Args:
        func: the function.
        args, kwargs: its arguments, with `LogitsPlaceholder` in the place of the logits.
        lead: shape of the logits without their last dimension. A tensor among the arguments is the same for
            all rows, or has this shape and a dimension more.
        state: the autocast state in which the model made the call.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    lead: torch.Size
    state: CallState

    def __call__(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return the function's values ``[C, ..]`` for the rows ``rows``, whose logits are ``[C, V]``."""
        chunk = torch.Size((*(1 for _ in self.lead[1:]), len(logits)))

        def given(item: Any) -> Any:
            if isinstance(item, LogitsPlaceholder):
                return logits.reshape(*chunk, logits.shape[-1])
            if is_same_for_rows(item, self.lead):
                return item
            return item.reshape(-1, item.shape[-1])[rows].reshape(*chunk, item.shape[-1])

        args, kwargs = tree_map_only((LogitsPlaceholder, torch.Tensor), given, (self.args, dict(self.kwargs)))
        with self.state.autocast_restored():
            values: torch.Tensor = self.func(*args, **kwargs)
        return values.reshape(len(logits), *values.shape[len(chunk) :])


def is_same_for_rows(item: torch.Tensor, lead: torch.Size) -> bool:
    """Whether a tensor is the same for all rows of ``lead``: a number, or a value per vocabulary entry."""
    return item.dim() == 0 or (item.dim() <= len(lead) + 1 and item.numel() == item.shape[-1])


def layout_of(lead: Sequence[int], vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a ``meta`` tensor in place of logits; the offset of a row's first entry is the row's number."""
    strides = torch.empty(lead, device="meta").stride()
    return torch.empty_strided((*lead, vocabulary), (*strides, math.prod(lead)), dtype=dtype, device="meta")


@dataclass(frozen=True)
class RowRecipe:
    """How logits are made from hidden states and the head's parameters.

    Args:
        call: the call of the head.
        layout: a tensor of `layout_of`, or a view of it that chooses rows.
        numbers: ``[N]``: the row of the hidden states for each row number of the layout; ``None``: the same.
        steps: calls that are applied to the head's output, row by row.
    """

    call: HeadCall
    layout: torch.Tensor
    numbers: torch.Tensor | None = None
    steps: tuple[RowCall, ...] = ()

    @property
    def lead(self) -> torch.Size:
        """The shape of the logits without the vocabulary."""
        return self.layout.shape[:-1]

    def copied(self) -> RowRecipe:
        """Return the form of a contiguous copy."""
        if self.layout.select(-1, 0).is_contiguous() and self.lead.numel() == self.layout.stride(-1):
            return self
        fresh = layout_of(self.lead, self.layout.shape[-1], self.layout.dtype)
        return replace(self, layout=fresh, numbers=self._row_numbers())

    def and_then(self, step: RowCall, vocabulary: int | None = None) -> RowRecipe:
        """Return the form with one more step.

        Args:
            step: changes either the dtype or the number of entries of a row, at most.
            vocabulary: number of entries of a row after it; ``None``: as before.
        """
        apart, dtype = self.layout.stride(-1), self.layout.dtype
        if vocabulary is None:
            vocabulary = self.layout.shape[-1]
            # The dtype comes from a real row: autocast does not cast tensors on meta.
            dtype = step(torch.zeros(1, vocabulary, dtype=dtype, device=self.call.device), slice(0, 1)).dtype
        fresh, shape = layout_of((apart,), vocabulary, dtype), (*self.lead, vocabulary)
        layout = fresh.as_strided(shape, self.layout.stride(), self.layout.storage_offset())
        return replace(self, layout=layout, steps=(*self.steps, step))

    def values(
        self, function: RowCall | None, hidden: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return a function's values for all rows, ``[N, ..]``; without a function the logits, ``[N, V]``."""
        values: torch.Tensor | None = None
        with torch.no_grad(), self.call.restored():
            parameters = [item.detach() for item in parameters]
            linear = self.call.linear(parameters) if self.call.head.is_linear else None
            for rows, _, piece in self._chunks(hidden):
                logits = F.linear(piece, *linear) if linear else self.call.logits(piece, parameters)
                part = self._finished(logits, rows, function)
                if values is None:
                    values = part.new_empty((self.lead.numel(), *part.shape[1:]))
                values[rows] = part
        assert values is not None
        return values

    def differentiated(
        self,
        function: RowCall | None,
        upstream: torch.Tensor | None,
        hidden: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        wants_hidden: bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Return a function's values for each chunk, and gradients of hidden states and parameters in fp32.

        Args:
            function: called with the rows of each chunk; ``None``: no values, and gradients of the logits.
            upstream: gradient of the values (or of the logits), ``[N, ..]``; ``None``: ones.
            hidden, parameters: hidden states, and the head's trained parameters.
            wants_hidden: whether to compute the gradient of the hidden states.
        """
        of_hidden = zero_sum(hidden) if wants_hidden else None
        flat = None if of_hidden is None else of_hidden.view(-1, hidden.shape[-1])
        totals = [zero_sum(item) for item in parameters]
        values = []
        with self.call.restored():
            chunk = (self._linear_chunk if self.call.head.is_linear else self._any_chunk)(parameters, totals)
            for rows, at, piece in self._chunks(hidden):
                finish = partial(self._finished, rows=rows, function=function)
                of_rows = None if upstream is None else upstream[rows]
                part, of_piece = chunk(piece, finish, of_rows, wants_hidden)
                if function is not None:  # without a function only the gradients are wanted
                    values.append(part)
                if flat is not None and isinstance(at, slice):
                    flat[at] += of_piece
                elif flat is not None:
                    flat.index_add_(0, at, of_piece.to(flat.dtype))
        return values, [of_hidden, *totals]

    def _row_numbers(self) -> torch.Tensor:
        """Return the row of the hidden states for each row of these logits, ``[N]``."""
        lead, numbers = self.layout.select(-1, 0), self.numbers
        if numbers is None:
            numbers = torch.arange(self.layout.stride(-1), device=self.call.device)
        return numbers.as_strided(lead.shape, lead.stride(), lead.storage_offset()).reshape(-1)

    def _chunks(self, hidden: torch.Tensor) -> Iterator[tuple[slice, Any, torch.Tensor]]:
        """Yield each chunk's place among the rows, its place in the flat hidden states, and that part."""
        flat, lead = hidden.detach().reshape(-1, hidden.shape[-1]), self.layout.select(-1, 0)
        in_order, start = self.numbers is None and lead.is_contiguous(), lead.storage_offset()
        order = None if in_order else self._row_numbers()
        for first in range(0, lead.numel(), self.call.tokens):
            rows = slice(first, min(first + self.call.tokens, lead.numel()))
            at = slice(start + rows.start, start + rows.stop) if order is None else order[rows]
            yield rows, at, flat[at]

    def _finished(self, logits: torch.Tensor, rows: slice, function: RowCall | None) -> torch.Tensor:
        """Apply the steps, and then the function, to the head's output for a chunk, ``[C, V]``."""
        for step in (*self.steps, function):
            logits = logits if step is None else step(logits, rows)
        return logits

    def _linear_chunk(self, parameters: Sequence[torch.Tensor], totals: list[torch.Tensor]) -> _Chunk:
        weight, bias = self.call.linear(parameters)

        def run(piece: torch.Tensor, finish: Any, upstream: Any, wants_hidden: bool) -> Any:
            with torch.no_grad():
                logits = F.linear(piece, weight, bias)
            with torch.enable_grad():
                values = finish(logits.requires_grad_())
            with torch.autocast(self.call.device.type, enabled=False):
                (of_logits,) = _gradients(values, [logits], upstream)
                for name, total in zip(self.call.names, totals, strict=True):
                    if name == "weight":
                        add_product(total, of_logits, piece.to(of_logits.dtype))
                    else:
                        total += of_logits.sum(0, dtype=total.dtype)
                return values.detach(), product(of_logits, weight) if wants_hidden else None

        return run

    def _any_chunk(self, parameters: Sequence[torch.Tensor], totals: list[torch.Tensor]) -> _Chunk:
        leaves = [item.detach().requires_grad_() for item in parameters]

        def run(piece: torch.Tensor, finish: Any, upstream: Any, wants_hidden: bool) -> Any:
            with torch.enable_grad():
                piece = piece.detach().requires_grad_(wants_hidden)
                values = finish(self.call.logits(piece, leaves))
            with torch.autocast(self.call.device.type, enabled=False):
                found = _gradients(values, [*leaves, piece] if wants_hidden else leaves, upstream)
            for total, of_parameter in zip(totals, found, strict=False):
                total += of_parameter
            return values.detach(), found[-1] if wants_hidden else None

        return run


_Chunk = Callable[[torch.Tensor, Any, Any, bool], Any]
"""Runs a chunk and its backward. Takes hidden states, the calls after the head as one function, the upstream
gradient, and whether the hidden states need a gradient."""


def _gradients(values: torch.Tensor, inputs: list[torch.Tensor], upstream: torch.Tensor | None) -> list[Any]:
    upstream = torch.ones_like(values) if upstream is None else upstream.to(values.dtype)
    return list(torch.autograd.grad(values, inputs, upstream, materialize_grads=True))
