"""Divides the layers of a decoder: finds layers and blocks, and handles the modules between the blocks.

Outside its blocks a layer has three kinds of modules. Norms, further linear layers and the residual stream
work token by token: under sequence parallelism on this rank's tokens, so that their parameters are tagged.
Modules that may mix tokens and are not divided (a state-space mixer) get the whole sequence. For routed
experts each rank routes its own tokens, and computes its part of the experts for the tokens of all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import Problem
from .block_hooks import GatherHook, RankStreamHooks, WholeBlockHooks
from .decoder_block import Division, divide_block, problems_of_block
from .families import EXPERTS, FAMILIES, Block, Family
from .gradients import TAG
from .parameter_tags import ParameterTags
from .routed_experts import divide_experts, experts_of, problems_of_experts
from .sequence_region import ScatterHook, SequenceRegion, TagAfterLayersHook, WholeAgainHook
from .tensor_plan import blocks_of, is_linear, plan_of, undivided_expert_parents


@dataclass(frozen=True)
class Decoder:
    """Where a language model has its layers.

    Args:
        base: the decoder without head, which is called with ids.
        stacks: its lists of layers, by path in ``base``.
        family: what is known of the model's family.
        plan: the tensor-parallel plan of the model's configuration (`plan_of`).
    """

    base: Any
    stacks: Mapping[str, nn.ModuleList]
    family: Family
    plan: Mapping[str, str]

    @classmethod
    def of(cls, root: Any) -> Decoder:
        """Find the decoder in a language model."""
        base = _base_of(root)
        config = getattr(base, "config", root.config)
        family, plan = FAMILIES.get(config.model_type, Family()), plan_of(config)
        lists = {path: found for path, found in base.named_modules() if _is_list(found)}
        stacks = {
            path: found
            for path, found in lists.items()
            if not any(path.startswith(f"{other}.") for other in lists)
            and any(blocks_of(layer, plan, family) or experts_of(layer) for layer in found)
        }
        return cls(base, stacks, family, plan)

    @property
    def layers(self) -> list[nn.Module]:
        """All layers, each once."""
        return list(dict.fromkeys(layer for stack in self.stacks.values() for layer in stack))

    def blocks(self, layer: nn.Module) -> list[Block]:
        """Return the dense blocks of a layer."""
        return blocks_of(layer, self.plan, self.family)

    def parameters_between(self, root: Any) -> list[str]:
        """Return the names of the parameters that are neither the decoder's nor the head's."""
        known = {id(p) for p in self.base.parameters()}
        head = root.get_output_embeddings()
        known |= {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
        return [name for name, p in root.named_parameters() if id(p) not in known]

    def around(self) -> Iterator[tuple[nn.Module, bool]]:
        """Yield modules with parameters outside the layers, and whether each is registered after them."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        behind = False
        for module in self.base.modules():
            behind = behind or id(module) in inside
            if id(module) not in inside and module._parameters:
                yield module, behind and not isinstance(module, nn.Embedding)

    @property
    def forward_reshapes(self) -> bool:
        """Whether the decoder's forward reshapes tensors, maybe hidden states to a whole sequence's shape."""
        forward = inspect.unwrap(type(self.base).forward)
        return not {"view", "reshape"}.isdisjoint(forward.__code__.co_names)


def _base_of(root: Any) -> nn.Module:
    """Return the part of a language model that is called with ids and holds the layers."""
    named = root.get_decoder() if hasattr(root, "get_decoder") else None
    children = [child for child in root.children() if any(map(_is_list, child.modules()))]
    for found in (named, getattr(root, root.base_model_prefix, None), *children):
        if isinstance(found, nn.Module) and found is not root and any(map(_is_list, found.modules())):
            inner: nn.Module = getattr(found, "language_model", found)
            return inner
    return root


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList)


def problems_of_decoder(model: nn.Module, decoder: Decoder, region: SequenceRegion) -> Iterator[Problem]:
    """Yield a problem for each part that cannot be divided; names of layers are paths in ``model``."""
    names = {id(module): name for name, module in model.named_modules()}
    ranks = region.group.size()
    found: dict[Problem, None] = {}
    for name, value in decoder.family.settings.items():
        if (present := getattr(decoder.base.config, name, value)) != value:
            expected = f"{name}={value!r} where layers are divided"
            hint = f"Load the model with {name}={value!r}."
            yield Problem(f"model.config.{name}", expected, repr(present), hint)
    for layer in decoder.layers:
        for block in decoder.blocks(layer):
            division = Division.of(decoder.base.config, layer, block, ranks)
            found.update(dict.fromkeys(problems_of_block(names[id(layer)], layer, block, division)))
        for path in experts_of(layer):
            found.update(dict.fromkeys(problems_of_experts(names[id(layer)], layer, path, ranks)))
    yield from found
    if region.enabled and (why_not := _why_no_sequence(decoder)):
        hint = "Set sequence_parallel_enabled: false."
        yield Problem(
            "parallel_config.sequence_parallel_enabled", "layers that take parts of a sequence", why_not, hint
        )


def _why_no_sequence(decoder: Decoder) -> str:
    """Return why the sequence cannot be divided; empty if it can."""
    if decoder.family.no_sequence:
        return decoder.family.no_sequence
    if len(decoder.stacks) > 1:
        return f"several lists of layers ({', '.join(decoder.stacks)})"
    if any("" in undivided_expert_parents(layer, decoder.family) for layer in decoder.layers):
        return "routed experts of an unknown kind that are the layer's own"
    return ""


def divide_layers(decoder: Decoder, region: SequenceRegion, tags: ParameterTags) -> None:
    """Divide all layers in place, and cut the sequence before the first."""
    drops = _drops(decoder.base)
    seen: set[int] = set()
    for layer in decoder.layers:
        _divide_layer(layer, decoder, region, tags, drops, seen)
        seen.update(map(id, layer.modules()))
    if not region.enabled:
        return
    for module, is_behind in decoder.around():
        hook = TagAfterLayersHook(module, is_behind, region, tags)
        module.register_forward_pre_hook(hook)
    family = decoder.family
    for place, layer in enumerate(decoder.layers):
        if place == 0 or family.token_arguments:
            first_dim = None if place else family.sequence_dim
            scatter = ScatterHook(layer, region, family.token_arguments, first_dim)
            layer.register_forward_pre_hook(scatter, with_kwargs=True)
    if decoder.forward_reshapes:
        decoder.layers[-1].register_forward_hook(WholeAgainHook(region))


def _divide_layer(
    layer: nn.Module,
    decoder: Decoder,
    region: SequenceRegion,
    tags: ParameterTags,
    drops: bool,
    seen: set[int],
) -> None:
    """Divide one layer.

    Args:
        layer: the layer to divide.
        decoder: the decoder that has it.
        region: says where the model's hidden states are parts of the sequence.
        tags: keeps attributes on its parameters.
        drops: whether the model uses dropout.
        seen: modules of earlier layers, which this layer may share.
    """
    blocks, experts = decoder.blocks(layer), experts_of(layer)
    if drops:
        RankStreamHooks(region, on_parts=True).attach(layer)
    for block in blocks:
        division = Division.of(decoder.base.config, layer, block, region.group.size())
        divide_block(layer, block, division, region, tags)
        if drops and block.path not in block.columns:
            rows = [layer.get_submodule(row) for row in block.rows]
            RankStreamHooks(region, on_parts=False).attach(layer.get_submodule(block.path), rows)
    for path in experts:
        divide_experts(layer, path, region, tags)
    if region.enabled:
        handled = {*(b.path for b in blocks), *(row for b in blocks for row in b.rows), *experts}
        _Rest(layer, handled, seen, decoder.family, region, tags).handle(layer)


@dataclass(frozen=True)
class _Rest:
    """The modules of a layer outside its blocks, under sequence parallelism.

    Args:
        layer: the decoder layer.
        handled: paths of the divided modules in the layer.
        seen: modules of earlier layers, which have been handled.
        family: what is known of the model's family.
        region: says where the model's hidden states are parts of the sequence.
        tags: keeps attributes on its parameters.
    """

    layer: nn.Module
    handled: set[str]
    seen: set[int]
    family: Family
    region: SequenceRegion
    tags: ParameterTags

    def handle(self, module: nn.Module, prefix: str = "") -> None:
        """Tag modules that work token by token; gather the sequence for all others."""
        for name in module._parameters:
            self.tags.add(module, name, **{TAG: True})
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if path in self.handled or id(child) in self.seen or next(child.parameters(), None) is None:
                continue
            is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if is_list or any(other.startswith(f"{path}.") for other in self.handled):
                self.handle(child, f"{path}.")
                continue
            self.tags.add_summed(child)
            if not self._is_token_wise(path, child):
                gather = GatherHook(self.region, (), self.layer)
                WholeBlockHooks(gather, self.region).attach(child)

    def _is_token_wise(self, path: str, module: nn.Module) -> bool:
        """Whether a module treats each token independently of the others."""
        parent = path.rpartition(".")[0]
        beside_experts = bool(parent) and f"{parent}.{EXPERTS}" in self.handled
        is_norm = "norm" in type(module).__name__.lower()
        return path in self.family.token_wise or beside_experts or is_norm or is_linear(module)


def _drops(base: nn.Module) -> bool:
    """Whether any module of the decoder uses dropout in training."""
    return any(
        isinstance(value, float) and value > 0
        for module in base.modules()
        for name, value in vars(module).items()
        if "drop" in name or isinstance(module, nn.Dropout)
    )
