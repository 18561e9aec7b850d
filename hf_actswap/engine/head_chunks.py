"""Logits as rows that are computed chunk by chunk: from hidden states, a head and what is done behind it.

`RowsForm` says what the rows are made of, and computes what a function gives them: without gradients
(`RowsForm.values`), or with those of hidden states and parameters (`RowsForm.differentiated`). One chunk of
logits is there at a time.

Gradients are summed over the chunks in fp32, from products that are not rounded in between: under a head
that is a linear layer and nothing else autograd sees only what is behind it, and the two products of its
backward are made here. Whatever else is there (adapters, quantised weights) autograd differentiates.
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
        module: a linear layer, or a module around one; or a linear layer of which each rank has a part, with
            ``input_parts`` and ``whole_input`` (`ColumnParallelLinear`), and ``output_size`` in all.
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
    """One call of a head: what all that comes of its logits has in common.

    Args:
        head: that was called.
        names: of its parameters that train.
        tokens: of a chunk.
        dtype: of its output.
        device: of the hidden states.
    """

    def __init__(
        self, head: Head, names: Sequence[str], tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.head, self.names, self.tokens, self.dtype, self.device = head, names, tokens, dtype, device
        self._state = CallState(device, False, ())
        self._draws = any(isinstance(part, nn.Dropout) and part.training for part in head.modules())
        self._first_run: CallState | None = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run under the autocast of the call; all runs draw the random numbers of the first."""
        with no_saved_tensor_hooks():
            if self._first_run is not None:
                with self._first_run.restored(), self._state.autocast_restored():
                    yield
                return
            self._first_run = CallState(self.device, True, ()) if self._draws else None
            with self._state.autocast_restored():
                yield

    def logits(self, hidden: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the logits ``[C, V]`` of a chunk ``[C, H]``, with these as the parameters that train."""
        named = dict(zip(self.names, parameters, strict=True))
        logits: torch.Tensor = self.head.with_parameters(named, hidden)
        return logits

    def linear(self, parameters: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias of a linear head in the dtype of its output, cast once for all chunks."""
        named = dict(zip(self.names, parameters, strict=True))
        weight, bias = (named.get(name, getattr(self.head.module, name)) for name in ("weight", "bias"))
        return weight.detach().to(self.dtype), None if bias is None else bias.detach().to(self.dtype)


class Here:
    """Stands for the logits among the arguments of a `RowCall`."""


@dataclass(frozen=True)
class RowCall:
    """A call that treats each row of logits by itself, to be made with the rows of a chunk.

    Args:
        func: the function.
        args, kwargs: its arguments, with `Here` in the place of the logits.
        lead: shape of the logits without their last dimension. A tensor among the arguments is the same for
            all rows, or has this shape and a dimension more.
        state: the autocast that it was made under.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    lead: torch.Size
    state: CallState

    def __call__(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """Return what the function gives some rows, ``[C, ..]``, of their logits ``[C, V]``."""
        chunk = torch.Size((*(1 for _ in self.lead[1:]), len(logits)))

        def given(item: Any) -> Any:
            if isinstance(item, Here):
                return logits.reshape(*chunk, logits.shape[-1])
            if is_same_for_rows(item, self.lead):
                return item
            return item.reshape(-1, item.shape[-1])[rows].reshape(*chunk, item.shape[-1])

        args, kwargs = tree_map_only((Here, torch.Tensor), given, (self.args, dict(self.kwargs)))
        with self.state.autocast_restored():
            values: torch.Tensor = self.func(*args, **kwargs)
        return values.reshape(len(logits), *values.shape[len(chunk) :])


def is_same_for_rows(item: torch.Tensor, lead: torch.Size) -> bool:
    """Whether a tensor is a number, or a value for each entry of a row, whichever row of ``lead`` it is."""
    return item.dim() == 0 or (item.dim() <= len(lead) + 1 and item.numel() == item.shape[-1])


def layout_of(lead: Sequence[int], vocabulary: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on ``meta`` for logits: its strides number the rows, and a row's entries lie apart."""
    strides = torch.empty(lead, device="meta").stride()
    return torch.empty_strided((*lead, vocabulary), (*strides, math.prod(lead)), dtype=dtype, device="meta")


@dataclass(frozen=True)
class RowsForm:
    """What logits are made of, beside the hidden states and the head's parameters.

    Args:
        call: of the head.
        layout: see `layout_of`; a view of one where rows were chosen.
        numbers: ``[N]``, which row of the hidden states each number of the layout means; ``None``: itself.
        steps: what is done to the head's output, row by row.
    """

    call: HeadCall
    layout: torch.Tensor
    numbers: torch.Tensor | None = None
    steps: tuple[RowCall, ...] = ()

    @property
    def lead(self) -> torch.Size:
        """The shape without the vocabulary."""
        return self.layout.shape[:-1]

    def copied(self) -> RowsForm:
        """Return the form of a contiguous copy."""
        if self.layout.select(-1, 0).is_contiguous() and self.lead.numel() == self.layout.stride(-1):
            return self
        fresh = layout_of(self.lead, self.layout.shape[-1], self.layout.dtype)
        return replace(self, layout=fresh, numbers=self._row_numbers())

    def and_then(self, step: RowCall, vocabulary: int | None = None) -> RowsForm:
        """Return the form with one step more.

        Args:
            step: leaves the shape as it is, or the dtype.
            vocabulary: entries that it gives each row; ``None``: as many as before.
        """
        apart, dtype = self.layout.stride(-1), self.layout.dtype
        if vocabulary is None:
            vocabulary = self.layout.shape[-1]
            # The dtype is that of a row that is there: autocast leaves those on meta as they are.
            dtype = step(torch.zeros(1, vocabulary, dtype=dtype, device=self.call.device), slice(0, 1)).dtype
        fresh, shape = layout_of((apart,), vocabulary, dtype), (*self.lead, vocabulary)
        layout = fresh.as_strided(shape, self.layout.stride(), self.layout.storage_offset())
        return replace(self, layout=layout, steps=(*self.steps, step))

    def values(
        self, function: RowCall | None, hidden: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return what a function gives all rows, ``[N, ..]``; without one the logits, ``[N, V]``."""
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
        """Return what `values` does, by chunk, and the gradients of hidden states and parameters in fp32.

        Args:
            function: see `values`.
            upstream: gradient of its values, ``[N, ..]``; ``None``: ones.
            hidden, parameters: of the call.
            wants_hidden: whether the gradient of the hidden states is asked for.
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
                if function is not None:  # what is asked of logits themselves is their gradient
                    values.append(part)
                if flat is not None and isinstance(at, slice):
                    flat[at] += of_piece
                elif flat is not None:
                    flat.index_add_(0, at, of_piece.to(flat.dtype))
        return values, [of_hidden, *totals]

    def _row_numbers(self) -> torch.Tensor:
        """Which rows of the hidden states these are, ``[N]``."""
        lead, numbers = self.layout.select(-1, 0), self.numbers
        if numbers is None:
            numbers = torch.arange(self.layout.stride(-1), device=self.call.device)
        return numbers.as_strided(lead.shape, lead.stride(), lead.storage_offset()).reshape(-1)

    def _chunks(self, hidden: torch.Tensor) -> Iterator[tuple[slice, Any, torch.Tensor]]:
        """Yield each chunk's place among the rows, its place in the flat hidden states, and these."""
        flat, lead = hidden.detach().reshape(-1, hidden.shape[-1]), self.layout.select(-1, 0)
        in_order, start = self.numbers is None and lead.is_contiguous(), lead.storage_offset()
        order = None if in_order else self._row_numbers()
        for first in range(0, lead.numel(), self.call.tokens):
            rows = slice(first, min(first + self.call.tokens, lead.numel()))
            at = slice(start + rows.start, start + rows.stop) if order is None else order[rows]
            yield rows, at, flat[at]

    def _finished(self, logits: torch.Tensor, rows: slice, function: RowCall | None) -> torch.Tensor:
        """Do the steps to the head's output of a chunk, ``[C, V]``, and at last the function."""
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
"""Runs a chunk and its backward, given hidden states, what finishes logits, upstream, if they want one."""


def _gradients(values: torch.Tensor, inputs: list[torch.Tensor], upstream: torch.Tensor | None) -> list[Any]:
    upstream = torch.ones_like(values) if upstream is None else upstream.to(values.dtype)
    return list(torch.autograd.grad(values, inputs, upstream, materialize_grads=True))
