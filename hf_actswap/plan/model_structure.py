"""The structure of a model: its stacks of layers and the ops in them, by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import dropwhile, islice
from typing import Any, Literal

import torch
from torch import nn

from ..errors import PlanError, Problem, short_traceback
from .actions import OUTPUT as OUTPUT
from .actions import MemoryPlan, Scope
from .dry_run import dry_call, example_batch, expert_stand_ins, fake_weights, set_to_train, small_real_call
from .forward_recorder import ForwardRecorder
from .op_facts import is_communication
from .opnames import ATTENTION_CORE, ATTENTION_MODULES
from .record import LAYER_INPUT, Call, LayerRecord, OpKey, StaleRead
from .repeated_layers import Repeat, repeat_of, without_layers
from .wrappers import (
    FSDP2_METHOD,
    can_be_checkpointed,
    is_checkpointed,
    is_compiled,
    named_op_modules,
    problems_of_fsdp1,
    runs_cuda_graphs,
    uncompiled,
    weights_are_gathered_again,
)

logger = logging.getLogger(__name__)

OpKind = Literal["module", "activation", "container", "function"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Op:
    """A named op of a layer: its path inside the layer (``mlp.gate_proj``, ``mlp.mul``), and its kind.

    ``activation``: a module without weights or submodules, whose functions are the op. ``container``: a list
    or a dictionary of modules, which is never called itself; a rule that names it is for those in it.
    """

    path: str
    kind: OpKind


@dataclass(frozen=True)
class LayerStructure:
    """One layer of a stack.

    Args:
        index: position in its stack, from 0. In `ModelStructure.all_layers`, layers of stacks beside the
            decoder have their module path here.
        module_path: path inside the model, e.g. ``model.layers.0``.
        class_name: class name of the layer's module.
        ops: modules first, then functions, each in order of definition or call.
        attention_paths: paths of the layer's attention modules.
        calls: the recorded data flow; empty if it is not known.
        output_of: the op that produces the hidden state that the layer returns, if known.
        compiled: whether a call of this layer is a compiled region of its own (regional compilation).
        nodes: how many autograd nodes one eager call creates; 0 if it is not known. Frozen weights create
            fewer. Of routed experts only the gated activation counts: the rest depends on data.
        checkpointed: whether Hugging Face's gradient checkpointing is switched on for it.
        stale_reads: reads of tensors that are written in place afterwards.
    """

    index: Scope
    module_path: str
    class_name: str
    ops: tuple[Op, ...]
    attention_paths: frozenset[str] = frozenset()
    calls: tuple[Call, ...] = ()
    output_of: OpKey | None = None
    compiled: bool = False
    nodes: int = 0
    checkpointed: bool = False
    stale_reads: tuple[StaleRead, ...] = ()

    @property
    def module_paths(self) -> frozenset[str]:
        """Paths of the layer's modules; ``""`` is the layer itself."""
        return frozenset({"", *(op.path for op in self.ops if op.kind != "function")})

    @property
    def communications(self) -> tuple[str, ...]:
        """Paths of the ops by which ranks exchange activations inside the layer."""
        return tuple(op.path for op in self.ops if op.kind == "function" and is_communication(op.path))

    def communications_beside(self, op_path: str) -> tuple[str, ...]:
        """Return the communications at or below ``op_path``, and those that read what it produces."""
        beside = (
            call.key[0]
            for call in self.calls
            if is_communication(call.key[0])
            and any(is_below(path, op_path) for path, _ in (call.key, *call.inputs))
        )
        return tuple(dict.fromkeys(beside))

    def inputs_of(self, op_path: str) -> tuple[OpKey, ...]:
        """Return the ops outside ``op_path`` whose outputs the ops at or below it read.

        `LAYER_INPUT` stands for the layer's incoming hidden state.
        """
        found: list[OpKey] = []
        for call in self.calls:
            if is_below(call.key[0], op_path):
                found += [key for key in call.inputs if not is_below(key[0], op_path) and key not in found]
        if not op_path and LAYER_INPUT not in found:
            found.append(LAYER_INPUT)
        return tuple(found)


@dataclass(frozen=True)
class ModelStructure:
    """The layers of a model, and the modules around them.

    Args:
        family: ``config.model_type``; empty if the model has none.
        layers: layers of the decoder; if the model has no decoder, those of its longest stack.
        embedding, final_norm, head: module paths, or ``None`` where none was found.
        functions_known: whether functional ops were recorded; if not, only module paths (and the attention
            core) can be named.
        why_not: why functional ops are not known.
        compiled: whether the layers run inside one compiled region: the model, or a module around its layers,
            is compiled as a whole.
        cuda_graphs: whether compiled layers, or the compiled model, run as CUDA graphs.
        sharded: whether FSDP2 gathers weights of the model.
        gathers_again: whether FSDP2 itself frees some of them after forward and gathers them in backward.
        stacks: the other stacks of layers (an encoder, a vision tower), each as if it were the only one.
    """

    family: str
    layers: tuple[LayerStructure, ...]
    embedding: str | None = None
    final_norm: str | None = None
    head: str | None = None
    functions_known: bool = True
    why_not: str = ""
    compiled: bool = False
    cuda_graphs: bool = False
    sharded: bool = False
    gathers_again: bool = False
    stacks: tuple[ModelStructure, ...] = ()

    @property
    def compiles(self) -> bool:
        """Whether the layers of this stack are compiled: together, or some as regions of their own."""
        return self.compiled or any(layer.compiled for layer in self.layers)

    @property
    def path(self) -> str:
        """Module path of the list of ``layers``."""
        return self.layers[0].module_path.rpartition(".")[0] if self.layers else ""

    @property
    def stack_paths(self) -> tuple[str, ...]:
        """Module paths of the lists of layers of all stacks."""
        return tuple(one.path for one in (self, *self.stacks) if one.layers)

    def planned_in(self, root: nn.Module) -> ModelStructure:
        """Return this structure without the stacks of which the planner decides nothing.

        These are other stacks that are compiled, and those of which FSDP2 does not divide every layer of
        ``root`` (`unwrapped`) although it divides the model.
        """

        def decided(stack: ModelStructure) -> bool:
            layers = (root.get_submodule(layer.module_path) for layer in stack.layers)
            return not stack.compiles and (
                not self.sharded or all(hasattr(type(layer), FSDP2_METHOD) for layer in layers)
            )

        return replace(self, stacks=tuple(filter(decided, self.stacks))) if self.stacks else self

    @cached_property
    def all_layers(self) -> tuple[LayerStructure, ...]:
        """The layers of all stacks; ``index`` is the scope that a plan's rows have for the layer."""
        others = (layer for stack in self.stacks for layer in stack.layers)
        return (*self.layers, *(replace(layer, index=layer.module_path) for layer in others))

    @property
    def scopes(self) -> Mapping[Scope, str]:
        """Module path of each scope of a plan's rows: embedding, final norm, head and layers."""
        beside = {"embedding": self.embedding, "final_norm": self.final_norm, "head": self.head}
        layers = {layer.index: layer.module_path for layer in self.all_layers}
        return {scope: path for scope, path in (beside | layers).items() if path is not None}

    @property
    def attention(self) -> Mapping[Scope, frozenset[str]]:
        return {layer.index: layer.attention_paths for layer in self.all_layers}

    @property
    def modules(self) -> Mapping[Scope, frozenset[str]]:
        return {layer.index: layer.module_paths for layer in self.all_layers}

    def with_stacks_of(self, plan: MemoryPlan) -> ModelStructure:
        """Return this structure with only those of its other stacks that rows of ``plan`` name."""
        named = {row.scope for row in plan.rows}
        stacks = (stack for stack in self.stacks if any(layer.module_path in named for layer in stack.layers))
        return replace(self, stacks=tuple(stacks))

    def without_op(self, plan: MemoryPlan) -> dict[str, list[Scope]]:
        """Return the op paths of ``plan`` that name nothing in a layer, each with these layers.

        Layers whose functions are not known, and compiled ones, are left out, and so is what runs inside
        routed experts, which are recorded as one call by their module's path.
        """
        found: dict[str, list[Scope]] = {}
        if not self.functions_known or self.compiled:
            return found
        unknown = {stack.path for stack in self.stacks if not stack.functions_known}
        names = {
            layer.index: [*(op.path for op in layer.ops), *(call.key[0] for call in layer.calls)]
            for layer in self.all_layers
            if not layer.compiled and layer.module_path.rpartition(".")[0] not in unknown
        }
        closed = {
            layer.index: layer.module_paths & {call.key[0] for call in layer.calls}
            for layer in self.all_layers
        }
        for row in plan.rows:
            if row.op_path in ("", OUTPUT) or row.scope not in names:
                continue
            if any(is_below(row.op_path, path) for path in closed[row.scope]):
                continue
            scopes = found.get(row.op_path, [])
            if row.scope not in scopes and not any(is_below(name, row.op_path) for name in names[row.scope]):
                found[row.op_path] = [*scopes, row.scope]
        return found

    def layer_modules(self, root: nn.Module) -> dict[Scope, nn.Module]:
        """Return the modules of all layers of all stacks in ``root`` (`unwrapped`), without wrappers."""
        return {layer.index: uncompiled(root.get_submodule(layer.module_path)) for layer in self.all_layers}

    def replaced_layers(self, root: nn.Module, layers: Mapping[Scope, nn.Module]) -> list[Problem]:
        """Return a problem if other ``layers`` than `layer_modules` gave are in the place of the layers."""
        for one in (self, *self.stacks):
            count = len(root.get_submodule(one.path)._modules) if one.layers else 0
            if count != len(one.layers):
                return [_replaced(one.path, f"{len(one.layers)} layers", f"{count}")]
        for layer in self.all_layers:
            now, before = root.get_submodule(layer.module_path), layers[layer.index]
            if uncompiled(now) is not before and before not in now.modules():  # a wrapper has it inside
                return [_replaced(layer.module_path, "the layer of that time", "another module")]
        return []

    def repeat_in(self, root: nn.Module) -> Repeat | None:
        """Return the repeat in the decoder's layers of ``root`` (`unwrapped`), if there is one."""
        layers = [root.get_submodule(layer.module_path) for layer in self.layers]
        return repeat_of(layers, getattr(root, "config", None))

    def repeats_in(self, root: nn.Module) -> tuple[Repeat, ...]:
        """Return the repeats in the layers of ``root`` (`unwrapped`): at most one a stack."""
        found = [(stack.path, stack.repeat_in(root)) for stack in self.stacks]
        others = (replace(repeat, stack=path) for path, repeat in found if repeat is not None)
        own = self.repeat_in(root)
        return (*others, *(() if own is None else (own,)))

    @contextmanager
    def without(self, root: nn.Module, left_out: range, stack: str = "") -> Iterator[ModelStructure]:
        """Leave layers of a stack out of ``root`` (`unwrapped`); yield the structure of the others.

        ``stack`` is a path; empty: the decoder's.
        """
        with without_layers(root.get_submodule(stack or self.path), left_out):
            if stack:
                few = tuple(one._without(left_out) if one.path == stack else one for one in self.stacks)
                yield replace(self, stacks=few)
            else:
                yield self._without(left_out)

    def _without(self, left_out: range) -> ModelStructure:
        return replace(self, layers=tuple(layer for layer in self.layers if layer.index not in left_out))

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange activations inside layers (parallel layers)."""
        return any(layer.communications for layer in self.layers)


def _replaced(where: str, expected: str, found: str) -> Problem:
    hint = "Call remove() before layers are replaced, and hf_actswap.apply afterwards."
    return Problem(f"model.{where}", f"{expected}, as when the plan was applied", found, hint)


def is_below(path: str, ancestor: str) -> bool:
    """Whether ``path`` is ``ancestor`` or inside it; everything is inside ``""``."""
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and other one-module wrappers.

    A wrapper is recognised as a module with a single child that is called ``module`` or ``_orig_mod``, so
    that this package needs none of the wrappers' classes.
    """
    return _from_wrapper_to_model(model)[-1]


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's weights; some may be on ``meta``. The CPU, if all are."""
    return next((weight.device for weight in model.parameters() if not weight.is_meta), _CPU)


def _from_wrapper_to_model(model: nn.Module) -> list[nn.Module]:
    nesting = [model]
    while True:
        children = dict(nesting[-1].named_children())
        inner = children.get("module") or children.get("_orig_mod")
        if inner is None or len(children) != 1:
            return nesting
        nesting.append(inner)


@short_traceback
def model_structure(model: nn.Module) -> ModelStructure:
    """Name the layers and ops of a Hugging Face model.

    A stack is a list of modules that all hold attention, or can be checkpointed by Hugging Face. The stack
    in ``model.get_decoder()`` becomes `ModelStructure.layers`.

    Modules are read off the model; functional ops (``mlp.mul``, ``self_attn.flash_attention``) come from one
    forward on fake tensors, which runs uncompiled and without the model's hooks. A model that cannot run on
    fake tensors still has its module paths.

    Args:
        model: a transformers model, bare or wrapped (DDP, PEFT, ``torch.compile``).

    Raises:
        PlanError: no stack of layers was found, or the model is in FSDP1.
    """
    if not isinstance(model, nn.Module):
        raise PlanError([_no_model(model)])
    if problems := problems_of_fsdp1(model):
        raise PlanError(problems)
    nesting = _from_wrapper_to_model(model)
    root = nesting[-1]
    stacks = _stacks(root)
    main = _main_stack(root, stacks)
    _reject_repeated(stacks[main], main)
    family = str(getattr(getattr(root, "config", None), "model_type", "") or "")
    found = {
        path: ModelStructure(
            family=family,
            layers=tuple(
                _layer_structure(index, f"{path}.{index}", layer, records[index])
                for index, layer in enumerate(stacks[path])
            ),
            functions_known=not why_not,
            why_not=why_not,
            compiled=any(map(is_compiled, (*nesting, *modules_around(root, path)))),
            cuda_graphs=any(map(runs_cuda_graphs, (*nesting, *modules_around(root, path), *stacks[path]))),
        )
        for path, records, why_not in _recorded(root, stacks)
    }
    embedding, final_norm, head = _surroundings(root, main)
    return replace(
        found.pop(main),
        embedding=embedding,
        final_norm=final_norm,
        head=head,
        sharded=any(hasattr(type(module), FSDP2_METHOD) for module in model.modules()),
        gathers_again=weights_are_gathered_again(model),
        stacks=tuple(found.values()),
    )


def _no_model(given: object) -> Problem:
    name = f"'{given}', a text" if isinstance(given, str) else f"a {type(given).__name__}"
    wanted = repr(given) if isinstance(given, str) else "..."
    hint = f"Load it first: transformers.AutoModelForCausalLM.from_pretrained({wanted})."
    return Problem("model", "a model (torch.nn.Module)", "a class" if isinstance(given, type) else name, hint)


def _recorded(
    root: nn.Module, stacks: Mapping[str, Sequence[nn.Module]]
) -> Iterator[tuple[str, Sequence[LayerRecord], str]]:
    """Yield each stack's path, the records of its layers from a run on fake tensors, and why there are none.

    The whole model is called. If the call does not reach a stack (ids do not reach a vision tower), the
    innermost model around that stack is called by itself.
    """
    records, failure = _record(root, root, stacks)
    for path, layers in stacks.items():
        own, why_not = records[path], failure
        inner = next(
            (module for module in modules_around(root, path) if hasattr(module, "main_input_name")), None
        )
        if inner is not None and not any(record.calls for record in own):
            again, why_again = _record(inner, root, {path: layers})
            own, why_not = (own, failure or why_again) if why_again else (again[path], "")
        yield path, own, why_not


def _record(
    model: nn.Module, root: nn.Module, stacks: Mapping[str, Sequence[nn.Module]]
) -> tuple[dict[str, list[LayerRecord]], str]:
    """Call ``model`` on a small fake example; return the records of each stack, and why the call failed.

    Of layers that are alike a few run, unless they leave other records. The structure holds for every
    batch. Which tensors are saved depends on the real one, and needs a run of its own (`engine.host_budget`).
    Stacks' paths start in ``root``: ``model``, or a module around it.
    """
    config = getattr(root, "config", None)
    repeats = {path: one for path, layers in stacks.items() if (one := repeat_of(layers, config)) is not None}
    found, why_not = (_record_few(model, root, stacks, repeats) if repeats else None), ""
    if found is None:
        every = {path: dict(enumerate(layers)) for path, layers in stacks.items()}
        found, why_not = _record_layers(model, root, every)
    return {path: [records[at] for at in sorted(records)] for path, records in found.items()}, why_not


def _record_few(
    model: nn.Module,
    root: nn.Module,
    stacks: Mapping[str, Sequence[nn.Module]],
    repeats: Mapping[str, Repeat],
) -> dict[str, dict[int, LayerRecord]] | None:
    """Return the records of all layers, from a run of few; ``None``: it failed, or layers are not alike."""
    few = {path: dict(enumerate(layers)) for path, layers in stacks.items()}
    with ExitStack() as left_out:
        for path, repeat in repeats.items():
            left_out.enter_context(without_layers(root.get_submodule(path), repeat.left_out))
            few[path] = {at: layer for at, layer in few[path].items() if at not in repeat.left_out}
        found, why_not = _record_layers(model, root, few)
    if why_not:
        return None
    for path, repeat in repeats.items():
        records = found[path]
        samples = range(repeat.sample, repeat.example)
        if any(records[at] != records[at + repeat.period] for at in samples):
            logger.debug("Layers that look alike are not, from %s.%d on", path, repeat.sample)
            return None
        records |= {at: records[repeat.example_of(at)] for at in repeat.left_out}
    return found


def _record_layers(
    model: nn.Module, root: nn.Module, stacks: Mapping[str, Mapping[int, nn.Module]]
) -> tuple[dict[str, dict[int, LayerRecord]], str]:
    """Return the records of these layers, which are all that the model has now, and why there are none."""
    attention: dict[Scope, frozenset[str]] = {
        f"{path}.{index}": _attention_paths(layer)
        for path, layers in stacks.items()
        for index, layer in layers.items()
    }
    scopes: dict[Scope, str] = {path: str(path) for path in attention}
    layers = [layer for own in stacks.values() for layer in own.values()]

    def records_of(recorder: ForwardRecorder) -> dict[str, dict[int, LayerRecord]]:
        return {path: {at: recorder.layers[f"{path}.{at}"] for at in own} for path, own in stacks.items()}

    recorder = ForwardRecorder(scopes, attention, None)
    try:
        with dry_call(model, {}), expert_stand_ins(layers, recorder.record_opaque_module):
            set_to_train(model)
            state = fake_weights(model, device_of(root))  # on meta, attention would have other ops
            recorder.run_on_fakes(model, root, state, (), example_batch(model, state.values()))
        return records_of(recorder), ""
    except Exception as error:  # the model's own code runs: it may raise anything
        logger.debug("no recording on fake tensors", exc_info=True)
        why_not = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        why_not += f" (in {recorder.where})" if recorder.where else ""
    nothing = records_of(ForwardRecorder(scopes, attention, None))
    if any(weight.is_meta for weight in model.parameters()):
        return nothing, why_not
    recorder = ForwardRecorder(scopes, attention, None)
    try:
        with small_real_call(model), expert_stand_ins(layers, recorder.record_opaque_module):
            set_to_train(model)
            recorder.own((*model.parameters(), *model.buffers()), None)
            recorder.run_on_fakes(model, root, {}, (), example_batch(model, model.parameters()))
    except Exception:
        logger.debug("no recording of a real forward", exc_info=True)
        return nothing, why_not
    logger.info(
        "The ops of the layers are those of a small forward on the device: %s. %s", why_not, _NO_FAKES
    )
    return records_of(recorder), ""


_NO_FAKES = (
    "What a step saves is not known before it, so nothing is judged by it. It would be if fake tensors could "
    "run the op there: register_fake of torch.library says what shapes it returns."
)


def modules_around(root: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the module at ``path`` and those around it, from the innermost out, without ``root``."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        yield root.get_submodule(".".join(parts[:end]))


def _layer_structure(index: int, path: str, layer: nn.Module, record: LayerRecord) -> LayerStructure:
    modules = [Op(name, _kind(module)) for name, module in named_op_modules(layer) if name and name != OUTPUT]
    attention = _attention_paths(layer)
    paths = dict.fromkeys(op.path for op in modules)
    cores = (f"{path}.{ATTENTION_CORE}" for path in paths if path in attention)
    # The attention cores are known by design, even where the recording failed.
    called = dict.fromkeys((*(call.key[0] for call in record.calls if call.key[0] not in paths), *cores))
    return LayerStructure(
        index=index,
        module_path=path,
        class_name=type(uncompiled(layer)).__name__,
        ops=(*modules, *(Op(path, "function") for path in called)),
        attention_paths=attention,
        calls=tuple(record.calls),
        output_of=record.output,
        compiled=is_compiled(layer),
        nodes=record.nodes,
        checkpointed=is_checkpointed(uncompiled(layer)),
        stale_reads=tuple(record.stale),
    )


def _kind(module: nn.Module) -> OpKind:
    if is_container(module):
        return "container"
    bare = next(module.children(), None) is None and next(module.parameters(recurse=False), None) is None
    return "activation" if bare and next(module.buffers(recurse=False), None) is None else "module"


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others, as a list or a dictionary of modules does: it is never called."""
    return type(module).forward is nn.Module.forward


def own_name(path: str, containers: Container[str]) -> str:
    """Return the name of a module or op, which is that of the list (or dictionary) that holds it, if any."""
    above, _, name = path.rpartition(".")
    return above.rpartition(".")[2] if above in containers else name


def _attention_paths(layer: nn.Module) -> frozenset[str]:
    """Return the paths of a layer's innermost modules that are attention by class or by name.

    Those of a list have the list's name (LongCat-Flash: ``self_attn.0`` and ``self_attn.1``).
    """
    modules = dict(named_op_modules(layer))
    containers = {path for path, module in modules.items() if is_container(module)}
    found = [
        path
        for path in modules.keys() - containers - {""}
        if "attention" in type(modules[path]).__name__.lower()
        or own_name(path, containers) in ATTENTION_MODULES
    ]
    return frozenset(path for path in found if not any(other.startswith(f"{path}.") for other in found))


def _stacks(root: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the lists of layers, by path; of nested lists the innermost. Those with attention, if any."""
    lists = {
        path: list(module)
        for path, module in root.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(map(_is_layer, module))
    }
    inner = {path: lists[path] for path in lists if not any(other.startswith(f"{path}.") for other in lists)}
    if not inner:
        raise PlanError([_no_layers(root)])
    return {path: layers for path, layers in inner.items() if any(map(_attention_paths, layers))} or inner


def _is_layer(module: nn.Module) -> bool:
    return can_be_checkpointed(uncompiled(module)) or bool(_attention_paths(module))


def _main_stack(root: nn.Module, stacks: Mapping[str, Sequence[nn.Module]]) -> str:
    """Return the path of the decoder's stack, or, if the model has no decoder, chosen among all stacks.

    Of several, one with ``num_hidden_layers`` layers (of the text configuration) wins, else the longest.
    """
    decoder = _quietly(getattr(root, "get_decoder", None))
    within = next((path for path, module in root.named_modules() if module is decoder), "")
    candidates = [path for path in stacks if is_below(path, within)] or list(stacks)
    config: Any = getattr(root, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    counted = getattr(text, "num_hidden_layers", None)
    return max(candidates, key=lambda path: (len(stacks[path]) == counted, len(stacks[path])))


def _no_layers(root: nn.Module) -> Problem:
    expected = "a transformers model: a list of layers that hold attention, or can be checkpointed"
    found, hint = type(root).__name__, "Pass the model itself."
    lists = [(name, item) for name, item in root.named_modules() if isinstance(item, nn.ModuleList) and item]
    if lists:
        path, layers = max(lists, key=lambda item: len(item[1]))
        names = ", ".join(name for name, _ in layers[0].named_children()) or "nothing"
        found += f", whose {path} is {len(layers)} {type(layers[0]).__name__} with {names}"
        hint = "This family is not known here: no plan can name what its layers compute."
    return Problem("model", expected, found, hint)


def _reject_repeated(layers: list[nn.Module], path: str) -> None:
    first = {id(layer): index for index, layer in reversed(list(enumerate(layers)))}
    repeated = [index for index, layer in enumerate(layers) if first[id(layer)] != index]
    if repeated:
        found = ", ".join(f"layer {index} is layer {first[id(layers[index])]}" for index in repeated)
        hint = "A rule by layer index cannot tell the two apart."
        raise PlanError([Problem(f"model.{path}", "a module of its own for each layer", found, hint)])


def _surroundings(root: nn.Module, layers_path: str) -> tuple[str | None, str | None, str | None]:
    """Return the paths of the embedding, the norm after the last layer, and the head."""
    names = {id(module): path for path, module in root.named_modules()}
    decoder = _quietly(getattr(root, "get_decoder", None))
    embedding = _quietly(getattr(decoder, "get_input_embeddings", None))
    if embedding is None:
        embedding = _quietly(getattr(root, "get_input_embeddings", None))
    head = _quietly(getattr(root, "get_output_embeddings", None))
    around, _, own_name = layers_path.rpartition(".")
    children = root.get_submodule(around).named_children()
    after = islice(dropwhile(lambda child: child[0] != own_name, children), 1, None)
    for name, module in after:
        is_norm = "norm" in name.lower() or "norm" in type(uncompiled(module)).__name__.lower()
        if is_norm and "embed" not in name.lower():  # BART's norm of the embedding is defined there too
            return names.get(id(embedding)), names[id(module)], names.get(id(head))
    return names.get(id(embedding)), None, names.get(id(head))


def _quietly(getter: Callable[[], nn.Module | None] | None) -> nn.Module | None:
    """Call a model's getter, if it exists; ``None`` if it is not implemented for the architecture."""
    try:
        return getter() if getter is not None else None
    except (NotImplementedError, AttributeError):
        return None
