"""The plan: what will happen to each op of each layer, as frozen data.

A plan does not remember whether a person or the planner wrote it. The engine reads its rows and nothing
else; everything beside them (adjustments, log lines) is for people.

A plan file also says what its bytes and times depend on: the model, by facts that stay the same however it is
wrapped, divided among ranks, sharded or quantised, and the batch. An unknown fact is not compared.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MaxLen, Predicate
from pydantic import Strict

from ..config import ActSwapConfig, Verify, WeightsPlace, load_config
from ..config.documents import Bytes, Count, JsonDocument, is_share, read_text
from ..config.hub import (
    MAX_PLAN_BYTES,
    PLAN_FILE_NAME,
    PLAN_FORMAT,
    PLAN_FORMAT_VERSION,
    HubOptions,
    fetch,
    split_hub_id,
)
from ..config.validation import Expected
from ..errors import PlanError, Problem, short_traceback
from ..releases import of_a_step
from .gathered import gathered_dtypes

if TYPE_CHECKING:
    from torch import Tensor, nn

NOT_COMPARED = (
    "the plan does not say for which model it was made (it has no fingerprint): only the layers are compared"
)

_Text = Annotated[str, MaxLen(100), Expected("a text of at most 100 characters")]


@dataclass(frozen=True)
class Fingerprint:
    """A model and a batch; ``None`` where a fact is not known.

    Args:
        family: ``model_type`` of the configuration.
        hidden_size, intermediate_size, vocab_size, num_attention_heads, num_key_value_heads: of the model's
            configuration, or of that of its text part.
        dtype: dtype of most of the floating point weights, e.g. ``bfloat16``.
        trained: how much of the model is trained.
        batch_shape: shape of the input ids of one micro-batch; empty: not known.
        made_with: the releases whose ops the plan was computed from or recorded on (`releases.of_a_step`).
    """

    family: _Text | None = None
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    vocab_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    dtype: _Text | None = None
    trained: Literal["all", "a part", "nothing"] | None = None
    batch_shape: tuple[Count, ...] = ()
    made_with: _Text | None = None

    def problems_of(self, model: nn.Module) -> Iterator[Problem]:
        """Yield what differs in ``model`` from the model that the plan was made for."""
        own = fingerprint_of(model)
        hint = "Make the plan anew for this model. Without its section `fingerprint` it is used as it is."
        for name in (item.name for item in fields(self) if item.name not in ("batch_shape", "made_with")):
            made_for, here = getattr(self, name), getattr(own, name)
            if made_for != here and None not in (made_for, here):
                yield Problem(f"plan.fingerprint.{name}", f"{here}, as in the model", f"{made_for}", hint)


def fingerprint_of(
    model: nn.Module, batch_shape: tuple[int, ...] = (), quantised: Iterable[Tensor] = ()
) -> Fingerprint:
    """Return what is known about a model without wrappers, and a batch.

    The type is the one that weights compute in: FSDP may shard them in another.

    ``quantised``: weights that have a floating point type here, and will be stored in bits.
    """
    stored = {id(weight) for weight in quantised}
    whole: Any = getattr(model, "config", None)
    config = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    names = "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads", "num_key_value_heads"
    known = {name: size for name in names if type(size := getattr(config, name, None)) is int}
    elements: Counter[str] = Counter()
    trained = []
    gathered = dict(gathered_dtypes(model))
    for name, weight in model.named_parameters():
        trained.append(weight.requires_grad)
        if weight.is_floating_point() and id(weight) not in stored:
            dtype = gathered.get(name.rpartition(".")[0]) or weight.dtype
            elements[str(dtype).removeprefix("torch.")] += weight.numel()
    family = getattr(whole, "model_type", None)
    return Fingerprint(
        family=family if isinstance(family, str) and family else None,
        dtype=elements.most_common(1)[0][0] if elements.total() else None,
        trained=None if not trained else "all" if all(trained) else "a part" if any(trained) else "nothing",
        batch_shape=batch_shape,
        made_with=of_a_step(),
        **known,
    )


Fate = Literal["keep", "swap", "recompute", "re-gather", "slice"]
FATES: Mapping[Fate, str] = {
    "keep": "What it produces stays on the device until backward has read it.",
    "swap": "What it produces is copied to host memory, its device memory is released, and it is copied back "
    "ahead of backward.",
    "recompute": "What it produces is dropped and computed again in backward.",
    "re-gather": "Each rank keeps its shard; backward gathers again.",
    "slice": "Each rank keeps a slice of what all hold alike; backward gathers it.",
}
"""Each fate, and what it means in a sentence for people."""
Scope = int | str
"""Where a row applies: a decoder layer (its index), a layer of another stack (its module path), or one of
`SCOPES`."""
SCOPES = ("embedding", "final_norm", "head")
"""The scopes of the modules before and after the decoder layers."""
Layer = Annotated[int, Ge(0), Expected("a layer")]
AnyLayer = Annotated[
    Scope, Predicate(lambda layer: isinstance(layer, str) or layer >= 0), Expected("a layer")
]
OpCall = tuple[Scope | None, str, Count | None]
"""One call: its scope (``None``: outside all scopes), its op path inside the scope, and which call of this op
it is, counted from 0 (``None``: the op is a module)."""
Positive = Annotated[int, Gt(0), Expected("a whole number above 0")]
LayerCount = Annotated[int, Ge(0), Le(10_000), Expected("a number of layers, at most 10000")]

OUTPUT = "output"
"""Op path of the hidden state that a layer returns. If a layer has a module of this name (BERT), only paths
below it (``output.dense``) name parts of that module."""

COMPILE_BUDGET = "compile_budget"
"""Key in the `PlanRow.parameters` of a whole layer (op path ``""``): the share of its activation memory that
its compiled region may save, 0 to 1. The row's fate is the fate of what the region saves."""

_Parameters = Annotated[
    Mapping[str, Any],
    Predicate(lambda parameters: is_share(parameters.get(COMPILE_BUDGET, 0))),
    Expected(f"a mapping, {COMPILE_BUDGET} in it from 0 to 1"),
]

RELEASE_PER_PREFETCH = 3
"""``release_ops`` for each of ``prefetch_ops`` (MindSpore, ``offload_activation.cc``: a constant)."""


@dataclass(frozen=True)
class Windows:
    """When a swapped tensor moves, in operators (autograd nodes in creation order).

    Args:
        prefetch_ops: the copy back starts when backward is this many operators before the first consumer.
        release_ops: device memory is released this many operators after the copy out began, at the latest
            at the end of the model's forward (on a stage of a pipeline: `engine.schedule`).
    """

    prefetch_ops: Count
    release_ops: Count

    @classmethod
    def of_prefetch(cls, prefetch_ops: int) -> Windows:
        """Return both windows for a ``backward_prefetch`` number, coupled as in MindSpore."""
        return cls(prefetch_ops, RELEASE_PER_PREFETCH * prefetch_ops)


@dataclass(frozen=True)
class PlanRow:
    """The fate of the tensors that one op produces.

    Args:
        scope: index of the decoder layer in the model; module path of a layer of another stack
            (``model.vision_tower.encoder.layers.3``); or ``embedding``, ``final_norm``, ``head``.
        op_path: op inside the scope (``self_attn.flash_attention``); ``""`` is the whole scope, ``output``
            the hidden state that the layer returns. A row covers everything below; the longest path wins.
        fate: one of `FATES`.
        ordinal: which call of the op within the layer, from 0; ``None``: all calls. A row with an ordinal
            beats one without.
        windows: when a swapped tensor moves; ``None``: the engine chooses by measurement (``auto``).
        parameters: what else the fate needs, as JSON values (`COMPILE_BUDGET`).
    """

    scope: Scope
    op_path: str
    fate: Fate
    ordinal: Count | None = None
    windows: Windows | None = None
    parameters: _Parameters = field(default_factory=dict, hash=False)


def is_layer(scope: Scope | None) -> bool:
    """Whether a scope is a layer, of the decoder or of another stack."""
    return scope is not None and scope not in SCOPES


def whole_layers_again(layers: Iterable[Scope]) -> tuple[PlanRow, ...]:
    """Return the rows that recompute each of these layers as a whole: gradient checkpointing."""
    return tuple(PlanRow(layer, "", "recompute") for layer in layers)


@dataclass(frozen=True)
class Tile:
    """A part of the model that runs over tiles of the tokens, one after the other.

    Args:
        scope: as in `PlanRow`; ``head`` is the head with the loss behind it.
        op_path: op inside the scope; ``""``: all of it.
        tokens, tiles: length or number of the tiles; both ``None``: chosen by the number of tokens.
    """

    scope: Scope
    op_path: str = ""
    tokens: Positive | None = None
    tiles: Positive | None = None

    def __str__(self) -> str:
        if self.tiles is not None:
            return f"{self.tiles} tiles"
        return "tiles (auto)" if self.tokens is None else f"tiles of {self.tokens} tokens"


@dataclass(frozen=True)
class SequenceChunks:
    """A sequence that runs chunk by chunk, with the keys and values of earlier chunks on the host.

    Args:
        tokens: number of tokens in a chunk; ``None``: chosen by the model's attention heads (``auto``).
        grad_accum_dtype: dtype in which the gradients of keys and values are summed on the host.
    """

    tokens: Positive | None = None
    grad_accum_dtype: Literal["fp32", "bf16"] = "fp32"

    def __str__(self) -> str:
        chunks = "chunks (auto)" if self.tokens is None else f"chunks of {self.tokens} tokens"
        return chunks if self.grad_accum_dtype == "fp32" else f"{chunks}, gradients summed in bf16"


@dataclass(frozen=True)
class Adjustment:
    """A change to what the user wrote, and the rule that made it.

    Args:
        where: YAML path of the requested policy.
        layers: the layers concerned, decoder layers by global index; empty: no layer in particular.
        op_path: the op as the user named it; as the layer names it if the rule changed another op.
        asked: fate or value requested.
        got: what happens instead.
        reason: the rule, in words, with its source.
    """

    where: str
    layers: tuple[AnyLayer, ...]
    op_path: str
    asked: str
    got: str
    reason: str

    def __str__(self) -> str:
        layers = f", layers {format_scopes(self.layers)}" if self.layers else ""
        name = f" {self.op_path}" if self.op_path else ""
        return f"{self.where}{name}{layers}: asked {self.asked}, got {self.got}: {self.reason}"


@dataclass(frozen=True)
class MemoryPlan:
    """What will happen to the saved tensors of one model.

    Args:
        rows: the fates; ops that no row covers are kept.
        num_layers: number of decoder layers of the model.
        family: ``model_type`` of the model; information only.
        adjustments: one for each rule that changed what the user wrote.
        min_tensor_bytes: smaller saved tensors are never swapped.
        host_memory_bytes: cap on host memory per process; ``None``: no cap.
        device_memory_bytes: the most that the device's allocator may hold while the plan is on, fragments
            included, because a budget was written; ``None``: all that there is.
        bind_numa: whether process and host memory are kept beside the device.
        verify: when recomputed tensors are compared with those of forward.
        weights: ``host``: frozen weights of the layers are in host memory, and on the device while their
            layer needs them; ``keep``: weights stay where they are.
        gather_weights_again: whether FSDP2 frees gathered weights after forward and gathers them in backward.
        keeps_gathered: layers whose parallel projections save what they gathered, and do not gather again.
        tiles: the parts of the model that run over tiles of the tokens.
        streamed: how the sequence is streamed; ``None``: it is not.
        fingerprint: the model and the batch that the plan was made for; ``None``: not known.
            `hf_actswap.apply` rejects another model.
        lines: the log lines that MindFormers would write, without warnings.
        warnings: the warnings that MindFormers would write about conflicting keys.
        unsupported: requested policies that this version resolves but cannot apply, by name;
            `hf_actswap.apply` rejects them.
    """

    rows: tuple[PlanRow, ...]
    num_layers: LayerCount
    family: str = ""
    adjustments: tuple[Adjustment, ...] = ()
    min_tensor_bytes: Bytes = 1024
    host_memory_bytes: Bytes | None = None
    device_memory_bytes: Bytes | None = None
    bind_numa: bool = True
    verify: Verify = "first"
    weights: WeightsPlace = "keep"
    gather_weights_again: bool = False
    keeps_gathered: tuple[Layer, ...] = ()
    tiles: tuple[Tile, ...] = ()
    streamed: SequenceChunks | None = None
    fingerprint: Fingerprint | None = None
    lines: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()

    def fate(self, layer: Scope, op_path: str = "", ordinal: int | None = None) -> Fate:
        """Return the fate of what ``op_path`` of ``layer`` produces (``keep`` where no row names it).

        Raises:
            KeyError: there is no such layer or scope.
        """
        if layer not in self.scopes:
            others = ", ".join(map(str, self.scopes[self.num_layers :]))
            raise KeyError(f"{layer!r}: the plan has layers 0 to {self.num_layers - 1}, {others}")
        row = self.row(layer, op_path, ordinal)
        return row.fate if row else "keep"

    @property
    def does_anything(self) -> bool:
        """Whether it changes what a training does; one that keeps everything changes nothing."""
        other = self.gather_weights_again or self.keeps_gathered or self.tiles or self.streamed
        acts = any(row.fate != "keep" or row.parameters for row in self.rows)
        return acts or bool(other) or self.weights == "host"

    @cached_property
    def scopes(self) -> tuple[Scope, ...]:
        """The decoder layers, the `SCOPES` around them, and the layers of other stacks that rows name."""
        known: dict[Scope, None] = dict.fromkeys((*range(self.num_layers), *SCOPES))
        return tuple(known | dict.fromkeys(sorted((row.scope for row in self.rows), key=layer_order)))

    def row(self, scope: Scope, op_path: str, ordinal: int | None = None) -> PlanRow | None:
        """Return the row that decides ``op_path``: the longest path wins, then a row with the ordinal."""
        table = self._by_path.get(scope)
        if table is None:
            return None
        if (op_path, ordinal) in table:
            return table[op_path, ordinal]
        while op_path and (op_path, None) not in table:
            op_path = parent_path(op_path)
        return table.get((op_path, None))

    @cached_property
    def _by_path(self) -> dict[Scope, dict[tuple[str, int | None], PlanRow]]:
        table: dict[Scope, dict[tuple[str, int | None], PlanRow]] = {}
        for row in self.rows:
            table.setdefault(row.scope, {})[row.op_path, row.ordinal] = row
        return table

    def log_lines(self) -> list[str]:
        """Return the lines that MindFormers logs at INFO for the same configuration, in its order."""
        return list(self.lines)

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` reads it back."""
        document: dict[str, Any] = {"format": PLAN_FORMAT, "format_version": PLAN_FORMAT_VERSION}
        document.update(asdict(self))
        # Versions that do not know these keys read plans that do not need them.
        none = dict.fromkeys(("streamed", "fingerprint", "device_memory_bytes"))
        defaults = {"tiles": (), "weights": "keep", **none}
        for name, default in defaults.items():
            if document[name] == default:
                del document[name]
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "") -> MemoryPlan:
        """Read a plan back; ``source``: name of the file, for the error message.

        Raises:
            PlanError: the text is no plan, has a newer format version, or is malformed; names every fault.
        """
        return cls.from_document(JsonDocument(text, "plan", PlanError, source))

    @classmethod
    def from_document(cls, document: JsonDocument) -> MemoryPlan:
        """Read a plan from a document that may hold other sections too; raises all of its faults at once."""
        document.check_format(PLAN_FORMAT, PLAN_FORMAT_VERSION)
        num_layers = document.read(LayerCount, "num_layers")
        document.finish()
        layer = Annotated[
            int, Strict(), Ge(0), Lt(num_layers), Expected(f"a layer from 0 to {num_layers - 1}")
        ]
        values = document.fields(cls, types={Scope: scope_type(num_layers, stacks=True), Layer: layer})
        document.finish()
        return cls(**values)


def scope_type(num_layers: int, stacks: bool = False, optional: bool = False) -> Any:
    """Return the type as which a scope is read: of layers of other ``stacks`` too, and ``optional``: null."""
    around = f"or one of {', '.join(SCOPES)}{', or null' if optional else ''}"
    path = "the module path of another stack's layer, " if stacks else ""

    def holds(scope: Any) -> bool:
        if isinstance(scope, str):
            return scope in SCOPES or (stacks and scope.rpartition(".")[2].isdecimal())
        return (type(scope) is int and 0 <= scope < num_layers) or (optional and scope is None)

    return Annotated[Any, Predicate(holds), Expected(f"a layer from 0 to {num_layers - 1}, {path}{around}")]


def parent_path(op_path: str) -> str:
    """Return the path of the module around an op; ``""``: the layer, also for ops in a module `OUTPUT`."""
    around = op_path.rpartition(".")[0]
    return "" if around == OUTPUT else around


def format_scopes(scopes: Iterable[Scope]) -> str:
    """Return scopes in order, with runs of layers folded: ``0-2, 5, encoder.layers.0-3, head``."""
    runs: list[tuple[str, int, int]] = []
    names = []
    for scope in sorted(scopes, key=layer_order):
        stack, index = layer_order(scope)
        if scope in SCOPES:
            names.append(str(scope))
        elif runs and runs[-1][0] == stack and runs[-1][2] == index - 1:
            runs[-1] = (stack, runs[-1][1], index)
        else:
            runs.append((stack, index, index))
    texts = [f"{stack}{first}" if first == last else f"{stack}{first}-{last}" for stack, first, last in runs]
    return ", ".join((*texts, *names))


def folded_tiles(tiles: Iterable[Tile]) -> list[tuple[str, str, str]]:
    """Return the lines (layers, op, tiles) of a table; equal tiles of several layers share a line."""
    by_op: dict[tuple[str, str], list[Scope]] = {}
    for tile in tiles:
        by_op.setdefault((tile.op_path or "everything", str(tile)), []).append(tile.scope)
    return [(format_scopes(scopes), *line) for line, scopes in by_op.items()]


def layer_order(scope: Scope) -> tuple[str, int]:
    """Return a key that sorts layers: the stack that a layer's path names, and its index there."""
    if isinstance(scope, int):
        return "", scope
    stack, dot, index = scope.rpartition(".")
    return (f"{stack}{dot}", int(index)) if index.isdecimal() else (scope, -1)


ConfigOrPlan = ActSwapConfig | MemoryPlan | Mapping[str, Any] | str | os.PathLike[str] | Literal[False] | None
"""What a user may pass: a plan, the path of a plan's file, or whatever `load_config` takes."""


def load_config_or_plan(source: ConfigOrPlan) -> ActSwapConfig | MemoryPlan:
    """Read a plan if ``source`` is one (a `MemoryPlan`, its document, its file), else a configuration.

    A file whose plan counts on the optimizer's states waiting on the host is read as a configuration with
    this ``memory.plan_file``: a plan says nothing of them.

    Raises:
        PlanError, ConfigError: it is malformed, or there is nothing of that name.
    """
    if isinstance(source, MemoryPlan):
        return source
    if isinstance(source, Mapping) and source.get("format") == PLAN_FORMAT:
        return MemoryPlan.from_json(json.dumps(source))
    if isinstance(source, str | os.PathLike) and _holds_plan(source):
        plan = load_plan(source)
        if not _moves_states(source):
            return plan
        return load_config({"memory": {"mode": "adaptive", "plan_file": os.fsdecode(source)}})
    return load_config(source)


def _moves_states(path: str | os.PathLike[str]) -> bool:
    document = json.loads(read_text(os.fsdecode(path), MAX_PLAN_BYTES, PlanError))
    numbers = document.get("measured") or document.get("predicted") or {}
    return isinstance(numbers, Mapping) and numbers.get("states_resident_bytes") is not None


def _holds_plan(path: str | os.PathLike[str]) -> bool:
    try:
        with open(path, "rb") as file:
            return f'"{PLAN_FORMAT}"'.encode() in file.read(MAX_PLAN_BYTES)
    except (OSError, ValueError):  # no file, or no name of one
        return False


@short_traceback
def load_plan(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> MemoryPlan:
    """Read a plan from a file, or from ``plan.json`` of a folder or of a repository on the Hub.

    Args:
        name_or_path: a path, or a Hub id ``org/name`` or ``org/name@revision``. A path that exists wins.
        revision: branch, tag or commit; takes precedence over one in the name.
        token, cache_dir, local_files_only: as in `huggingface_hub.hf_hub_download`.

    Raises:
        PlanError: there is no plan, or it is malformed or longer than `MAX_PLAN_BYTES`.
    """
    name = os.fsdecode(name_or_path)
    path = os.path.join(name, PLAN_FILE_NAME) if os.path.isdir(name) else name
    hub_id = None if os.path.exists(name) else split_hub_id(name)
    try:
        if hub_id is not None:
            repo_id, named = hub_id
            options = HubOptions(token, cache_dir, local_files_only)
            path = fetch(repo_id, PLAN_FILE_NAME, revision or named, options, MAX_PLAN_BYTES).path
        text = read_text(path, MAX_PLAN_BYTES, PlanError)
    except OSError as error:
        reason = error.strerror or str(error)
        expected = f"a file, a folder that holds {PLAN_FILE_NAME}, or a Hub id (org/name)"
        raise PlanError([Problem("plan", expected, f"'{name}': {reason}")]) from None
    return MemoryPlan.from_json(text, name)
