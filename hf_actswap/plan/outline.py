"""The outline of a model: its decoder layers and the ops in them, by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ..errors import PlanError, Problem, short_traceback
from .compiled import is_compiled, named_op_modules, runs_cuda_graphs, uncompiled
from .families import ATTENTION_MODULES
from .fsdp2 import FSDP2_METHOD
from .gradient_checkpointing import is_checkpointed
from .opnames import ATTENTION_CORE, is_communication
from .record import LAYER_INPUT, Call, LayerRecord, OpKey, StaleRead, record_forward

logger = logging.getLogger(__name__)

OUTPUT = "output"
"""Op path of the hidden state that a layer hands on."""

OpKind = Literal["module", "activation", "function"]


@dataclass(frozen=True)
class Op:
    """A named op of a layer.

    Args:
        path: inside the layer, e.g. ``mlp.gate_proj`` or ``mlp.mul``.
        kind: ``module``; ``activation`` (a module without weights or submodules: its functions are the
            op); ``function``.
    """

    path: str
    kind: OpKind


@dataclass(frozen=True)
class LayerOutline:
    """One decoder layer.

    Args:
        index: from 0, in the model given.
        module_path: inside the model given, e.g. ``model.layers.0``.
        class_name: of the layer's module.
        ops: modules first, then functions, each in order of definition or call.
        calls: the recorded data flow; empty if it is not known.
        output_of: the op that produces the hidden state handed on, if known.
        compiled: whether a call of this layer is a compiled region of its own (regional compilation).
        nodes: how many autograd nodes one eager call creates; 0 if it is not known. Frozen weights create
            fewer. Of routed experts only the gated activation counts: the rest depends on data.
        checkpointed: whether Hugging Face's gradient checkpointing is switched on for it.
        stale_reads: what functions read that is written in place afterwards.
    """

    index: int
    module_path: str
    class_name: str
    ops: tuple[Op, ...]
    calls: tuple[Call, ...] = ()
    output_of: OpKey | None = None
    compiled: bool = False
    nodes: int = 0
    checkpointed: bool = False
    stale_reads: tuple[StaleRead, ...] = ()

    @property
    def attention_paths(self) -> frozenset[str]:
        """Paths of the layer's attention modules."""
        return frozenset(op.path for op in self.ops if op.path in ATTENTION_MODULES)

    @property
    def communications(self) -> tuple[str, ...]:
        """Paths of the ops by which ranks exchange activations inside the layer."""
        return tuple(op.path for op in self.ops if op.kind == "function" and is_communication(op.path))

    def communications_beside(self, op_path: str) -> tuple[str, ...]:
        """Return the communications at or below ``op_path``, and those of what it produces."""
        found = {
            call.key[0]: None
            for call in self.calls
            if is_communication(call.key[0])
            and any(is_below(path, op_path) for path in (call.key[0], *(key[0] for key in call.inputs)))
        }
        return tuple(found)

    def inputs_of(self, op_path: str) -> tuple[OpKey, ...]:
        """Return the producers, outside ``op_path``, of what the ops at or below it read.

        ``("input", 0)`` is the layer's incoming hidden state.
        """
        found: list[OpKey] = []
        for call in self.calls:
            if is_below(call.key[0], op_path):
                found += [key for key in call.inputs if not is_below(key[0], op_path) and key not in found]
        if not op_path and LAYER_INPUT not in found:
            found.append(LAYER_INPUT)
        return tuple(found)


@dataclass(frozen=True)
class Outline:
    """The layers of a model, and what stands around them.

    Args:
        family: ``config.model_type``; empty if the model has none.
        layers: the decoder layers.
        embedding, final_norm, head: module paths, or ``None`` where none was found.
        functions_known: whether functional ops were recorded; if not, only module paths (and the attention
            core) can be named.
        why_not: why they are not known.
        compiled: whether the layers run inside one compiled region: the model, or a module around its layers,
            is compiled as a whole.
        cuda_graphs: whether compiled layers, or the compiled model, run as CUDA graphs.
        sharded: whether FSDP2 gathers weights of the model.
    """

    family: str
    layers: tuple[LayerOutline, ...]
    embedding: str | None = None
    final_norm: str | None = None
    head: str | None = None
    functions_known: bool = True
    why_not: str = ""
    compiled: bool = False
    cuda_graphs: bool = False
    sharded: bool = False

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange activations inside layers (parallel layers)."""
        return any(layer.communications for layer in self.layers)


def is_below(path: str, ancestor: str) -> bool:
    """Whether ``path`` is ``ancestor`` or inside it; everything is inside ``""``."""
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and other one-module wrappers.

    Wrappers are recognised by what they are (a single child called ``module`` or ``_orig_mod`` and no
    weights of their own), so that this floor needs none of their classes.
    """
    return _from_wrapper_to_model(model)[-1]


def _from_wrapper_to_model(model: nn.Module) -> list[nn.Module]:
    nesting = [model]
    while True:
        children = dict(nesting[-1].named_children())
        inner = children.get("module") or children.get("_orig_mod")
        if inner is None or len(children) != 1:
            return nesting
        nesting.append(inner)


@short_traceback
def outline(model: nn.Module) -> Outline:
    """Name the decoder layers and ops of a Hugging Face decoder.

    Modules are read off the model; functional ops (``mlp.mul``, ``self_attn.flash_attention``) come from one
    forward on fake tensors, which runs uncompiled and without the model's hooks. A model that cannot run on
    fake tensors still has its module paths.

    Args:
        model: a causal language model, bare or wrapped (DDP, PEFT, ``torch.compile``).

    Raises:
        PlanError: no list of decoder layers was found.
    """
    if not isinstance(model, nn.Module):
        raise PlanError([_no_model(model)])
    nesting = _from_wrapper_to_model(model)
    root = nesting[-1]
    path, container = _layer_list(root)
    layers = list(container)
    _refuse_repeated(layers, path)
    attention = [
        frozenset(name for name, _ in uncompiled(layer).named_children() if name in ATTENTION_MODULES)
        for layer in layers
    ]
    known, why_not = True, ""
    try:
        records = record_forward(root, layers, attention)
    except Exception as error:  # the model's own code runs: it may raise anything
        known, why_not = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        logger.debug("no recording on fake tensors", exc_info=True)
        records = [LayerRecord() for _ in layers]
    embedding, final_norm, head = _surroundings(root, path)
    around = (*nesting, *_around(root, path))
    return Outline(
        family=str(getattr(getattr(root, "config", None), "model_type", "") or ""),
        layers=tuple(
            _layer_outline(index, f"{path}.{index}", layer, record)
            for index, (layer, record) in enumerate(zip(layers, records, strict=True))
        ),
        embedding=embedding,
        final_norm=final_norm,
        head=head,
        functions_known=known,
        why_not=why_not,
        compiled=any(map(is_compiled, around)),
        cuda_graphs=any(map(runs_cuda_graphs, (*around, *layers))),
        sharded=any(hasattr(type(module), FSDP2_METHOD) for module in model.modules()),
    )


def _no_model(given: object) -> Problem:
    name = f"'{given}', a text" if isinstance(given, str) else f"a {type(given).__name__}"
    wanted = repr(given) if isinstance(given, str) else "..."
    hint = f"Load it first: transformers.AutoModelForCausalLM.from_pretrained({wanted})."
    return Problem("model", "a model (torch.nn.Module)", "a class" if isinstance(given, type) else name, hint)


def _around(root: nn.Module, path: str) -> Iterator[nn.Module]:
    """The modules on the way from ``root`` to what is at ``path``."""
    module = root
    for name in path.split("."):
        module = module.get_submodule(name)
        yield module


def _layer_outline(index: int, path: str, layer: nn.Module, record: LayerRecord) -> LayerOutline:
    modules = [Op(name, _kind(module)) for name, module in named_op_modules(layer) if name]
    functions: dict[str, Op] = {}
    module_paths = {op.path for op in modules}
    for call in record.calls:
        if call.key[0] not in module_paths:
            functions.setdefault(call.key[0], Op(call.key[0], "function"))
    for op in modules:  # known by design even where the recording failed
        if op.path in ATTENTION_MODULES:
            core = f"{op.path}.{ATTENTION_CORE}"
            functions.setdefault(core, Op(core, "function"))
    return LayerOutline(
        index=index,
        module_path=path,
        class_name=type(uncompiled(layer)).__name__,
        ops=(*modules, *functions.values()),
        calls=tuple(record.calls),
        output_of=record.output,
        compiled=is_compiled(layer),
        nodes=record.nodes,
        checkpointed=is_checkpointed(uncompiled(layer)),
        stale_reads=tuple(record.stale),
    )


def _kind(module: nn.Module) -> OpKind:
    bare = next(module.children(), None) is None and next(module.parameters(recurse=False), None) is None
    return "activation" if bare and next(module.buffers(recurse=False), None) is None else "module"


def _layer_list(root: nn.Module) -> tuple[str, nn.ModuleList]:
    """Find the decoder layers: the longest list of modules that hold an attention module."""
    best: tuple[str, nn.ModuleList] | None = None
    for path, module in root.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) <= (len(best[1]) if best else 0):
            continue
        if all(_has_attention(layer) for layer in module):
            best = (path, module)
    if best is None:
        raise PlanError([_no_layers(root)])
    return best


def _no_layers(root: nn.Module) -> Problem:
    expected = f"a decoder: a list of layers with an attention module ({', '.join(ATTENTION_MODULES)})"
    found, hint = type(root).__name__, "Pass the causal language model itself."
    lists = [(name, item) for name, item in root.named_modules() if isinstance(item, nn.ModuleList) and item]
    if lists:
        path, layers = max(lists, key=lambda item: len(item[1]))
        names = ", ".join(name for name, _ in layers[0].named_children()) or "nothing"
        found += f", whose {path} is {len(layers)} {type(layers[0]).__name__} with {names}"
        hint = "This family is not known here: no plan can name what its layers compute."
    return Problem("model", expected, found, hint)


def _refuse_repeated(layers: list[nn.Module], path: str) -> None:
    first = {id(layer): index for index, layer in reversed(list(enumerate(layers)))}
    repeated = [index for index, layer in enumerate(layers) if first[id(layer)] != index]
    if repeated:
        found = ", ".join(f"layer {index} is layer {first[id(layers[index])]}" for index in repeated)
        hint = "A rule by layer index cannot tell the two apart."
        raise PlanError([Problem(f"model.{path}", "a module of its own for each layer", found, hint)])


def _has_attention(layer: nn.Module) -> bool:
    return any(name in ATTENTION_MODULES for name, _ in uncompiled(layer).named_children())


def _surroundings(root: nn.Module, layers_path: str) -> tuple[str | None, str | None, str | None]:
    """Find the embedding, the norm after the last layer, and the head."""
    names = {id(module): path for path, module in root.named_modules()}
    embedding = head = final_norm = None
    for getter, kind in (("get_input_embeddings", "embedding"), ("get_output_embeddings", "head")):
        method = getattr(root, getter, None)
        module = _quietly(method) if method is not None else None
        if kind == "embedding":
            embedding = names.get(id(module))
        else:
            head = names.get(id(module)) if module is not None else None
    parent = root.get_submodule(layers_path.rpartition(".")[0])
    for name, module in _after(parent, layers_path.rpartition(".")[2]):
        if "norm" in name.lower() or "norm" in type(uncompiled(module)).__name__.lower():
            final_norm = names[id(module)]
            break
    return embedding, final_norm, head


def _quietly(method: object) -> nn.Module | None:
    """Call a model's getter that may not be implemented for its architecture."""
    try:
        return method()  # type: ignore[operator]
    except (NotImplementedError, AttributeError):
        return None


def _after(parent: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of ``parent`` behind the child ``name``."""
    seen = False
    for child, module in parent.named_children():
        if seen:
            yield child, module
        seen = seen or child == name
