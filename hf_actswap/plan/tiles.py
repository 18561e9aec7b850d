"""Tiles: which modules may run over tiles of the tokens, and which do if no other plan fits.

Modules that treat tokens one by one are found from the aten ops of a call on fake tensors. The model is
called with a batch whose two sizes are primes that divide no other size of the model. A tensor with a row
for each token then has a number of elements with each prime as a factor once, whatever its shape. A sum
over tokens removes such a factor, a product of tokens with tokens adds one, so both show. Other ops keep
the size and mix tokens all the same (a softmax, a cumulative sum, a shift along the tokens). Therefore an
op must be known to leave rows alone, in the dimension that it is given; an unknown op counts as mixing.

For a budget that no mix of keep, swap and recompute meets, more and more of a model is put in tiles. First
come head and loss, which cost next to no time. Then come the MLP and the norms, whose forward runs once
more in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..config.loader import ActSwapConfig
from ..config.schema import OpTileRule, TileConfig
from ..errors import PlanError, Problem
from .actions import Adjustment, MemoryPlan, Scope, Tile, format_scopes
from .dry_run import dry_call, example_batch, expert_stand_ins, fake_weights
from .forward_recorder import ForwardRecorder
from .model_structure import ModelStructure, own_name
from .op_facts import argument_of, computes
from .opnames import EXPERTS_MODULE
from .record import storage_key
from .resolve import resolve_plan

_BATCHES, _LENGTHS = (101, 103, 107), (131, 127, 113, 61, 59, 53)
"""Primes to choose batch size and sequence length from: none that divides a size of a weight. Lengths are
tried in turn: a model with few positions needs a short one. None is much longer, because a model that loops
over tokens in Python would take minutes."""
_CPU = torch.device("cpu")
_EACH_TOKEN, _NO_TOKEN = (1, 1), (0, 0)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CONSTANTS = _names(
    """
    empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros ones ones_like
    new_ones full full_like new_full scalar_tensor rand rand_like randn randn_like expand repeat
    """
)
"""Ops that make a tensor that is the same for each token, or drawn for each."""
_ROW_BY_ROW = _CONSTANTS | _names(
    """
    mm addmm bmm baddbmm linear clone _to_copy copy _unsafe_view native_dropout bernoulli uniform embedding
    """
)
"""Ops for which the prime factors show everything: a product over tokens, rows that are cut off."""
_JOINS = _names("cat stack")
_ALONG_DIMENSIONS = _names(
    """
    sum mean amax amin var std var_mean logsumexp _softmax _log_softmax topk argmax argmin max min cumsum prod
    any all norm linalg_vector_norm gather scatter scatter_add index_select sort
    """
)
"""Ops that work along the dimensions that they are given, in each row of the others."""
_OVER_LAST_DIMENSIONS = _names("native_layer_norm _fused_rms_norm rms_norm")


def checked_tiles(
    model: nn.Module, tiles: Iterable[Tile], structure: ModelStructure, parts: int = 1
) -> dict[Tile, int]:
    """Return, for each tile, into how many of the ``parts`` the ranks divide the tokens of its output.

    Args:
        model: the model, without its wrappers.
        tiles: the tiles to check; that of the head is not checked.
        structure: structure of the model.
        parts: number of ranks of the tensor-parallel group, which may divide the sequence.

    Raises:
        PlanError: a module does not treat tokens one by one; names the op that mixes them.
    """
    modules = {
        tile: ".".join(filter(None, (structure.scopes[tile.scope], tile.op_path)))
        for tile in tiles
        if tile.scope != "head"
    }
    looks, why_not = _looks(model, list(modules.values()), structure, parts) if modules else ({}, "")
    layers: dict[tuple[str, str], list[Scope]] = {}
    for tile, path in modules.items():
        found = f"not known: no run on fake tensors ({why_not})" if why_not else looks[path].mixing
        if found:
            layers.setdefault((tile.op_path or str(tile.scope), found), []).append(tile.scope)
    expected = "a module that treats tokens one by one"
    hint = "The MLP and the norms of a layer do; remove the entry, or name a module inside."
    problems = [
        Problem(f"tile_config.tile {op_path} (layers {format_scopes(scopes)})", expected, found, hint)
        for (op_path, found), scopes in layers.items()
    ]
    if problems:
        raise PlanError(problems)
    return {tile: looks[modules[tile]].parts if tile in modules else 1 for tile in tiles}


_NOT_CALLED = "a module that the model does not call"


@dataclass
class _ModuleFindings:
    """The op that mixes tokens in a module, in words (empty: none), and the parts of its output's tokens."""

    mixing: str = _NOT_CALLED
    parts: int = 1


def _looks(
    model: nn.Module, paths: Sequence[str], structure: ModelStructure, parts: int
) -> tuple[dict[str, _ModuleFindings], str]:
    """Return the `_ModuleFindings` of each module by path, and why the model does not run on fakes."""
    why_not = ""
    taken = {size for weight in model.parameters() for size in weight.shape}
    batch, *_ = [prime for prime in _BATCHES if all(size % prime for size in taken)] or _BATCHES
    for length in _LENGTHS:
        if any(size and size % length == 0 for size in taken):
            continue
        sizes = _Sizes(batch, length, parts)
        try:
            few = _looks_at_few(model, paths, structure, sizes)
            return few or _looks_at(model, paths, structure, sizes), ""
        except Exception as error:  # the model's own code runs: it may raise anything
            why_not = why_not or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return {}, why_not


def _looks_at_few(
    model: nn.Module, paths: Sequence[str], structure: ModelStructure, sizes: _Sizes
) -> dict[str, _ModuleFindings] | None:
    """Return what `_looks_at` would, from a run of few of the layers that are alike; ``None``: none are."""
    if (repeat := structure.repeat_in(model)) is None:
        return None
    prefix = f"{structure.path}."

    def in_layer(path: str, of: Callable[[int], int]) -> str:
        """Return a path in another layer, ``of`` its own; a path outside the decoder's layers as it is."""
        number, dot, inside = path.removeprefix(prefix).partition(".")
        return f"{prefix}{of(int(number))}{dot}{inside}" if path.startswith(prefix) else path

    def example(layer: int) -> int:
        return repeat.example_of(layer) if layer in repeat.left_out else layer

    def sample(layer: int) -> int:
        return layer - repeat.period if layer in range(repeat.example, repeat.left_out.start) else layer

    run = {path: in_layer(path, example) for path in paths}
    agree = {path: in_layer(path, sample) for path in run.values()}
    with structure.without(model, repeat.left_out) as few:
        try:
            found = _looks_at(model, [*run.values(), *agree.values()], few, sizes)
        except Exception:  # the model's own code runs on fewer layers than it has
            return None
    if any(found[path] != found[other] for path, other in agree.items()):
        return None
    return {path: found[other] for path, other in run.items()}


def _looks_at(
    model: nn.Module, paths: Iterable[str], structure: ModelStructure, sizes: _Sizes
) -> dict[str, _ModuleFindings]:
    found = {path: _ModuleFindings() for path in paths}
    layers = [model.get_submodule(layer.module_path) for layer in structure.all_layers]
    with dry_call(model, {}), expert_stand_ins(layers, lambda *_: None):
        state = fake_weights(model, _CPU)
        batch = example_batch(model, state.values(), (sizes.batch, sizes.length * sizes.parts))
        with ExitStack() as watches:
            for path, look in found.items():
                watches.enter_context(_watched(model.get_submodule(path), path, look, sizes))
            ForwardRecorder({}, {}, None).run_on_fakes(model, model, state, (), batch)
    return found


@contextmanager
def _watched(module: nn.Module, path: str, look: _ModuleFindings, sizes: _Sizes) -> Iterator[None]:
    """Record in ``look`` what each run of a module's forward shows.

    Only the forward is watched, without the module's hooks, because only that runs in tiles. Routed experts
    inside count as one op: they sort tokens by expert, and give each token its own result.
    """
    running: list[_Ops] = []
    own, before = module.forward, vars(module).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        held = {storage_key(item) for item in (*given, *module.parameters(), *module.buffers())}
        running.append(_Ops(sizes, held))
        with running[-1]:
            output = own(*args, **kwargs)
        mixing = running.pop().mixing
        first = look.mixing == _NOT_CALLED
        of_call, look.parts = _of_arguments(module, given, tree_leaves(output), sizes)
        look.mixing = ("" if first else look.mixing) or mixing or of_call
        return output

    def looks_away(away: bool) -> Callable[..., None]:
        def act(*_: Any) -> None:
            for ops in running:
                ops.looks_away = away

        return act

    hooks = []
    try:
        module.forward = forward
        for name, experts in module.named_modules():
            if f"{path}.{name}".rstrip(".").rpartition(".")[2] == EXPERTS_MODULE:
                hooks.append(experts.register_forward_pre_hook(looks_away(True)))
                hooks.append(experts.register_forward_hook(looks_away(False), prepend=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if before is None:
            del module.forward
        else:
            module.forward = before


@dataclass(frozen=True)
class _Sizes:
    """The sizes of a batch, two primes, and how to find them in the sizes of other tensors.

    ``parts``: number of ranks that may divide the sequence.
    """

    batch: int
    length: int
    parts: int

    def has_tokens(self, size: int) -> bool:
        return size > 0 and (size % self.batch == 0 or size % self.length == 0)

    def of(self, elements: int) -> tuple[int, int]:
        """Return how often each prime is a factor of a number of elements."""
        counts = []
        for prime in (self.batch, self.length):
            count, size = 0, elements
            while size and size % prime == 0:
                count, size = count + 1, size // prime
            counts.append(count)
        return counts[0], counts[1]

    def shape(self, tensor: torch.Tensor) -> str:
        names = {self.batch: "batch"}
        for tokens in (self.length, self.length * self.parts):
            names |= {tokens: "tokens", self.batch * tokens: "batch * tokens"}
        return f"[{', '.join(names.get(size, str(size)) for size in tensor.shape)}]"


class _Ops(TorchDispatchMode):
    """Watches the ops of a call; ``mixing`` says in words what the first op that mixes tokens does."""

    def __init__(self, sizes: _Sizes, held: set[int | None]) -> None:
        super().__init__()
        self._sizes, self._held = sizes, held
        self.mixing, self.looks_away = "", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not (self.mixing or self.looks_away):
            given = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
            if func._schema.is_mutable and storage_key(given[0]) in self._held:
                self.mixing = f"{func} writes into what it is given"
            elif why := self._why_mixed(func, args, kwargs or {}, given, out):
                self.mixing = f"{func} {why}"
        return out

    def _why_mixed(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], out: Any) -> str:
        """Return how an op mixes tokens, so that it cannot run on tiles of them; empty: it does not."""
        name = func._schema.name.partition("::")[2].removesuffix("_")  # also of ops that write in place
        read = [self._sizes.of(item.numel()) for item in given]
        made = [self._sizes.of(item.numel()) for item in tree_leaves(out) if isinstance(item, torch.Tensor)]
        if all(primes == _NO_TOKEN for primes in read):
            alike = name in _CONSTANTS or all(primes == _NO_TOKEN for primes in made)
            return "" if alike else "makes something that differs from token to token"
        if _EACH_TOKEN not in read:
            return ""  # an argument that has no row for each token: `_of_arguments` says so
        if any(primes != _EACH_TOKEN for primes in made):
            return "mixes tokens"
        if name in _JOINS or name in _ALONG_DIMENSIONS:
            works_in = out if name in _JOINS else args[0]
            return "works along the tokens" if self._along_tokens(func, args, kwargs, works_in) else ""
        if name in _OVER_LAST_DIMENSIONS:
            return "works along the tokens" if any(map(self._sizes.has_tokens, args[1])) else ""
        if name == "constant_pad_nd":  # cut at one end and filled at the other it shifts
            ends = zip(args[1][::2], args[1][1::2], strict=True)
            sides = {-1 - at for at, pads in enumerate(ends) if any(pads)}
            shifts = any(self._sizes.has_tokens(args[0].shape[dim]) for dim in sides)
            return "shifts tokens" if shifts else ""
        is_view = not computes(func) and name != "as_strided"
        known = is_view or torch.Tag.pointwise in func.tags or name in _ROW_BY_ROW
        return "" if known else "is not known to treat tokens one by one"

    def _along_tokens(self, func: Any, args: Any, kwargs: Any, tensor: torch.Tensor) -> bool:
        """Whether a dimension along which an op works is one of tokens in ``tensor``; without any: yes."""
        dims = argument_of(func, args, kwargs, "dim")
        if dims is None or dims == []:
            return True
        chosen = dims if isinstance(dims, list | tuple) else [dims]
        return any(self._sizes.has_tokens(tensor.shape[dim]) for dim in chosen)


def _of_arguments(
    module: nn.Module, given: Sequence[torch.Tensor], returned: Sequence[Any], sizes: _Sizes
) -> tuple[str, int]:
    """Return which argument or result has no row for each token, and the number of parts of the results."""
    lead = given[0].shape[:-1] if given else torch.Size()
    whole = (sizes.batch * sizes.length, sizes.batch * sizes.length * sizes.parts)
    shapes = {weight.shape for weight in module.parameters()}
    # A norm of each head; other modules may count the heads.
    of_heads = sizes.of(lead.numel()) == _EACH_TOKEN and shapes == {given[0].shape[-1:]}
    if lead.numel() not in whole and not of_heads:
        return "a module that is not called with hidden states first", 1
    for item in given:
        if not _has_rows(item, lead):
            return f"an argument of shape {sizes.shape(item)}", 1
    divided = torch.Size((*lead[:-1], lead[-1] // sizes.parts))
    parts = sizes.parts if returned and _has_rows(returned[0], divided) else 1
    for item in returned:
        if not isinstance(item, torch.Tensor):
            return f"a result that is no tensor: {item}", 1
        if not _has_rows(item, divided if parts > 1 else lead):
            return f"a result of shape {sizes.shape(item)}", 1
    return "", parts


def _has_rows(item: Any, lead: torch.Size) -> bool:
    if not isinstance(item, torch.Tensor):
        return False
    return item.shape[: len(lead)] == lead or item.shape[:1] == (lead.numel(),)


EACH_TOKEN = ("feed_forward", "attention_norm", "ffn_norm", "final_norm")
"""Modules that treat tokens one by one in most models; the first saves most. `_norms` finds further norms."""

SECOND_CLASS = (
    "no mix of keep, swap and recompute keeps within the budget without. Losses stay; gradients of weights "
    "are sums over tiles, equal up to rounding (1e-6 in fp32) and not bitwise"
)


def tile_ladder(
    config: ActSwapConfig, model: nn.Module, structure: ModelStructure, parts: int = 1
) -> Iterator[tuple[TileConfig, MemoryPlan]]:
    """Yield (``tile_config``, plan) with more and more of the model in tiles (``auto``).

    What the user wrote stays: ``loss``, also ``off``, entries of ``tile``, and every fate. Tiles that would
    replace a written fate are left out, as are modules that mix tokens. Arguments as of `checked_tiles`.
    """
    last = resolve_plan(config, structure)
    rows = last.rows

    @cache
    def resolved(tiles: TileConfig) -> MemoryPlan | None:
        try:
            plan = resolve_plan(replace(config, tile_config=tiles), structure)
            checked_tiles(model, plan.tiles, structure, parts)
        except PlanError:
            return None
        return plan if plan.rows == rows else None

    def rungs() -> Iterator[TileConfig]:
        tiles = config.tile_config
        if tiles.loss is None:
            tiles = replace(tiles, loss="auto")
            yield tiles
        if tiles.tile:
            return

        def with_modules(names: Iterable[str]) -> TileConfig:
            return replace(tiles, tile=tuple(map(OpTileRule, names)))

        names: tuple[str, ...] = EACH_TOKEN
        found = resolved(with_modules(names))
        known = [f"{tile.op_path}." for tile in found.tiles if tile.op_path] if found is not None else []
        names += tuple(path for path in _norms(structure) if not any(map(f"{path}.".startswith, known)))
        if resolved(with_modules(names)) is None:
            names = tuple(name for name in names if resolved(with_modules([name])) is not None)
        for count in (1, len(names)):
            yield with_modules(names[:count])

    for tiles in rungs():
        plan = resolved(tiles)
        if plan is not None and len(plan.tiles) > len(last.tiles):
            last = plan
            asked = Adjustment("tile_config", (), tile_names(plan.tiles), "nothing", "tiles", SECOND_CLASS)
            yield tiles, replace(plan, adjustments=(*plan.adjustments, asked))


def _norms(structure: ModelStructure) -> tuple[str, ...]:
    """Return the op paths of all norms: Gemma has two more, and many families norm queries and keys."""
    found: dict[str, None] = {}
    for layer in structure.layers:
        containers = {op.path for op in layer.ops if op.kind == "container"}
        modules = (op.path for op in layer.ops if op.kind in ("module", "activation"))
        found |= dict.fromkeys(path for path in modules if "norm" in own_name(path, containers).lower())
    return tuple(found)


def tile_names(tiles: Iterable[Tile]) -> str:
    return ", ".join(dict.fromkeys(tile.op_path or str(tile.scope) for tile in tiles))
