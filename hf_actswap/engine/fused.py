"""Recomputation in one compiled kernel: a chain of dropped ops is run again as one.

An elementwise op moves bytes and hardly computes, so a chain of them that is run again op by op costs several
times what one kernel would: a norm of a bfloat16 model reads and writes about 36 bytes an element in eager
mode, and 8 in one kernel. When a region is run again, it and the regions that its inputs come from are traced
together (`make_fx` on fake tensors, with the packs of each region as outputs) and compiled once for all
layers that trace to the same code.

Only chains of pointwise ops, reductions and views are fused; anything else, and whatever draws random
numbers, is run as it was. The kernel keeps the casts of eager mode (inductor's ``emulate_precision_casts``),
but not its instructions: exponentials, reciprocal roots and the order of sums may differ in the last bit. So
the gradients of a fused recomputation need not be bitwise those of plain training, and it is off unless it
is asked for (``recompute_config: {fused: true}``).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ..plan.exchanged_weights import exchanged
from ..plan.op_facts import COMMUNICATIONS
from ..plan.opnames import function_name
from .catcher import Catcher, Kept
from .recompute import Input, OutputTicket, Region, tensors_in
from .tickets import StaleTensorError
from .views import View

logger = logging.getLogger(__name__)

_REDUCTIONS_AND_VIEWS = frozenset(
    {
        "_softmax",
        "_to_copy",
        "_unsafe_view",
        "alias",
        "amax",
        "cat",
        "clone",
        "detach",
        "expand",
        "mean",
        "native_layer_norm",
        "permute",
        "select",
        "slice",
        "split",
        "squeeze",
        "sum",
        "t",
        "transpose",
        "unsqueeze",
        "var_mean",
        "view",
    }
)


class _NotFused(Exception):
    """Raised with the reason why a chain cannot be fused."""


@dataclass(frozen=True)
class Kernel:
    """A compiled chain of regions.

    Args:
        call: takes the chain's inputs; returns the caught tensors and the outputs, region after region.
        counts: (number of caught tensors, number of outputs) of each region.
    """

    call: Callable[..., Sequence[torch.Tensor]]
    counts: tuple[tuple[int, int], ...]


class Fuser:
    """Runs regions again in compiled kernels. One for each applied plan.

    Attributes:
        runs: how often a kernel ran.
    """

    def __init__(self) -> None:
        self._known: dict[object, Kernel] = {}
        self._not_fused: set[str] = set()
        self._by_code: dict[object, Callable[..., Sequence[torch.Tensor]]] = {}
        self.runs = 0

    def run_again(self, region: Region) -> bool:
        """Run ``region`` again, with the regions whose outputs it needs and that are not rebuilt yet.

        Returns:
            Whether it was run; if not, nothing has changed.
        """
        name = region.name
        if name in self._not_fused:
            return False
        try:
            links = _Chain(region)
            key = links.key()
            if key not in self._known:
                self._known[key] = self._compiled(links)
        except _NotFused as reason:
            logger.info("%s is run again op by op: %s", name, reason)
            self._not_fused.add(name)
            return False
        except StaleTensorError:
            return False  # running it op by op raises the error
        kernel = self._known[key]
        self.runs += 1
        with torch.no_grad():
            links.deliver(kernel.call(*links.tensors), kernel.counts)
        return True

    def _compiled(self, links: _Chain) -> Kernel:
        counts: list[tuple[int, int]] = []
        try:
            traced = make_fx(partial(links.run, counts), tracing_mode="fake")(*links.tensors)
        except Exception as error:  # code of others runs here, on fake tensors
            raise _NotFused(str(error)) from error
        if obstacle := _obstacle(traced):
            raise _NotFused(f"{obstacle} is no pointwise op")
        code = traced.code, links.metas()
        if code not in self._by_code:
            options: dict[str, Any] = {"emulate_precision_casts": True}
            self._by_code[code] = torch.compile(traced, dynamic=False, fullgraph=True, options=options)
        return Kernel(self._by_code[code], tuple(counts))


@dataclass(frozen=True)
class _Outer:
    """An argument that comes from outside the chain."""

    at: int
    requires_grad: bool


@dataclass(frozen=True)
class _Inner:
    """An argument that a region of the chain returns."""

    region_at: int
    position: int
    view: View
    requires_grad: bool


class _Chain:
    """A region and the earlier regions that have to run again with it, in the order in which they run.

    It restores each of its inputs from outside once.

    Attributes:
        tensors: inputs from outside: tensors that the regions were called with, and parameters.
    """

    def __init__(self, last: Region) -> None:
        self._regions: list[Region] = []
        self._add(last)
        self.tensors: list[torch.Tensor] = []
        self._inner: list[OutputTicket] = []
        if any(function_name(region.function) in COMMUNICATIONS for region in self._regions):
            raise _NotFused("it communicates")
        for region in self._regions:
            if region.called is not None:
                region.called.check()
        self._leaves = [[self._leaf(leaf) for leaf in region.leaves] for region in self._regions]
        self._parameters = [self._parameters_of(region) for region in self._regions]

    def key(self) -> object:
        """Return a value that is equal for chains that can run the same kernel."""
        calls = tuple(
            (region.name, id(region.function), tuple(region.expected), region.state.autocast)
            for region in self._regions
        )
        return calls, repr(self._leaves), self.metas()

    def metas(self) -> object:
        """Return shapes, strides, dtypes and devices of the inputs from outside."""
        return tuple((item.shape, item.stride(), item.dtype, item.device) for item in self.tensors)

    def run(self, counts: list[tuple[int, int]], *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Run all regions on ``tensors``; return their caught tensors and outputs as one flat list."""
        counts.clear()
        results: list[torch.Tensor] = []
        outputs: list[list[torch.Tensor]] = []
        for region, leaves, parameters in zip(self._regions, self._leaves, self._parameters, strict=True):
            values = []
            for leaf in leaves:
                if isinstance(leaf, _Outer):
                    leaf = tensors[leaf.at].detach().requires_grad_(leaf.requires_grad)
                elif isinstance(leaf, _Inner):
                    whole = outputs[leaf.region_at][leaf.position]
                    view = leaf.view
                    offset = view.offset_bytes // view.dtype.itemsize
                    if (whole.shape, whole.stride(), 0) != (view.shape, view.stride, offset):
                        whole = whole.as_strided(view.shape, view.stride, offset)
                    leaf = whole.detach().requires_grad_(leaf.requires_grad)
                values.append(leaf)
            function = region.function
            if isinstance(function, nn.Module):
                named = {
                    name: tensors[at].detach().requires_grad_(needs_grad)
                    for name, (at, needs_grad) in parameters.items()
                }
                function = partial(_call_with, function, named)
            catcher = Catcher(region.name, dict(region.expected), early=False)
            with (
                region.state.autocast_restored(),
                torch.enable_grad(),
                saved_tensors_hooks(catcher.pack, catcher.unpack),
            ):
                result = region.call(function, values)
            caught, returned = catcher.complete(), [item.detach() for item in tensors_in(result)]
            outputs.append(returned)
            results += [caught[index].tensor() for index in region.expected]
            results += returned
            counts.append((len(caught), len(returned)))
        return results

    def deliver(self, results: Sequence[torch.Tensor], counts: Sequence[tuple[int, int]]) -> None:
        """Give each region what `run` returned for it."""
        rest = iter(results)
        for region, (num_caught, num_outputs) in zip(self._regions, counts, strict=True):
            caught = dict(zip(region.expected, map(Kept, islice(rest, num_caught)), strict=True))
            region.rebuilt_as(caught, list(islice(rest, num_outputs)))
        for used in self._inner:
            used.region.take_output(used.position, used)  # counts as read: the kernel has used it

    def _add(self, region: Region) -> None:
        for leaf in region.leaves:
            source = leaf.ticket if isinstance(leaf, Input) else None
            if not isinstance(source, OutputTicket) or source.region.has_output(source.position):
                continue
            if source.region not in self._regions:
                self._add(source.region)
        self._regions.append(region)

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, Input):
            return leaf
        source = leaf.ticket
        if isinstance(source, OutputTicket) and source.region in self._regions:
            at = self._regions.index(source.region)
            self._inner.append(source)
            return _Inner(at, source.position, source.view, leaf.requires_grad)
        self.tensors.append(leaf.tensor().detach())
        return _Outer(len(self.tensors) - 1, leaf.requires_grad)

    def _parameters_of(self, region: Region) -> dict[str, tuple[int, bool]]:
        if not isinstance(region.function, nn.Module):
            return {}
        found = {}
        for name, held in (*region.function.named_parameters(), *region.function.named_buffers()):
            found[name] = len(self.tensors), held.requires_grad
            self.tensors.append(held.detach())
        return found


def _call_with(module: nn.Module, named: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    with exchanged(module, named):
        return module(*args, **kwargs)


def _obstacle(traced: GraphModule) -> str | None:
    """Return the first op of a trace that must not be fused; ``None``: all may be."""
    for node in traced.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            target = node.target
            tags = getattr(target, "tags", ())
            name = str(target).removeprefix("aten.").partition(".")[0]
            random = torch.Tag.nondeterministic_seeded in tags
            if random or (torch.Tag.pointwise not in tags and name not in _REDUCTIONS_AND_VIEWS):
                return str(target)
    return None
