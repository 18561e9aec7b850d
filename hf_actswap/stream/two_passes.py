"""Runs a model's call with a long sequence as two passes over chunks of it.

Only attention reads other tokens, and causal attention only earlier ones. So the chunks of a sequence can run
one after the other, each with the keys and values of those before it:

* **First pass**, in the model's call: the chunks run in order, without gradients. It returns the loss, and
  each layer stores keys, values and attention's output on the host (`streamed_attention`).
* **Second pass**, in the backward of the loss: the chunks run in reverse, each forward with gradients and
  then at once backward. The gradients of a chunk's keys and values are complete when its backward runs,
  because all chunks that see them have run backward before.

The model runs unchanged: its own call, hooks and plan included, with a chunk's tokens, positions and shifted
labels. The losses of chunks add up to that of the sequence, because each is divided by the number of tokens
of all chunks (``num_items_in_batch``). For autograd the two passes are one node: weights are its inputs and
get one gradient each. Inside, chunks run with other tensors that share the weights' memory, whose gradients
are summed in fp32. So hooks on the weights' gradients (DDP) run once.

Positions that the call does not give are left to the model: an empty cache (`_past`) tells it how many tokens
came before. In the first streamed call a few tokens are compared with a whole call (below).

The second pass draws the same random numbers as the first: the state before each chunk is saved. Autocast is
that of the call.

**The check** before the first streamed step: a few tokens in chunks and whole, with the model's own code and
weights, in evaluation mode and without gradients. The hidden states that reach the head, and the loss, must
be equal up to rounding. So a family that counts positions in a way of its own, reads the attention mask, or
mixes tokens elsewhere than in attention is rejected by name before any gradient, and never trained wrongly.
The random state, the modules' modes and the hooks on them are afterwards as they were; the hooks do not run.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ..engine import AppliedPlan
from ..engine.autograd_state import running_backward
from ..engine.call_state import CallState
from ..engine.hook_wrappers import Undo, Wrapper, entries_to, replace_outermost_calls
from ..engine.tiled_calls import Exchangeable, first_order_only, zero_sum
from ..engine.transfer import Transfer
from ..errors import PlanError, Problem
from ..parallel.decoder_layers import OwnHeadsConfig
from ..parallel.patch_model import check_step
from ..plan.actions import Scope, SequenceChunks
from ..plan.dry_run import hooks_off, is_dry, named_arguments
from ..plan.model_structure import ModelStructure, device_of
from ..planner.oom_guard import DeviceMemoryError, attempt
from .host_sequence import HostSequence, chunk_bounds, host_bytes, longest_on_host, recomputed_attention
from .rejections import documents_of, reject_call
from .streamed_attention import ChunkAttention, attending, host_of_no_plan

CHUNK_TOKENS, _TOKENS, _ROWS = 4, 11, 2
"""Three chunks, of which the last is shorter."""
_SECOND_DOCUMENT = 3
"""Where the second document of a packed row begins: all queries after the first chunk belong to it."""

_BY_TOKEN = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "num_items_in_batch")
_SET_HERE = ("use_cache", "return_dict")


def kind_of_call(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells calls apart that must be checked one by one: which arguments they have."""
    positions = given.get("position_ids")
    return frozenset(given), positions is not None and len(documents_of(positions)) > 1


def check_few_tokens(
    root: nn.Module,
    structure: ModelStructure,
    given: Mapping[str, Any],
    whole: Callable[..., Any],
    streamed: Callable[[dict[str, Any]], torch.Tensor],
) -> None:
    """Compare a streamed call of a few tokens with a whole one; `PlanError` if one fails or they differ.

    All ranks of a tensor-parallel group call it.

    Args:
        root: the model.
        structure: its layers and head.
        given: arguments of the training call by name; a few tokens are called in the same way.
        whole: calls the model.
        streamed: returns the loss of a call with these arguments, in chunks of `CHUNK_TOKENS`.
    """
    few = _few_tokens(root, given)
    unpacked = {name: item for name, item in few.items() if name != "shift_labels"}
    with _evaluating(root), _heads_input(root, structure) as hidden:
        expected = _run(root, "called with a few tokens", lambda: whole(**unpacked, use_cache=False).loss)
        seen = hidden.taken()
        found = _run(root, "called in chunks", lambda: streamed(few))
        there = hidden.taken()
    tolerance = hidden.coarsest**0.5
    differing = []
    if not abs(float(found) - float(expected)) <= tolerance * max(1.0, abs(float(expected))):
        differing.append(f"a loss of {float(found):.6g} for {float(expected):.6g}")
    if not (away := _distance(there, seen)) <= tolerance:
        differing.append(f"hidden states that are {away:.2g} off (relative)")
    if differing:
        raise _unfit(root, f"{' and '.join(differing)} for a few tokens in chunks")


def _few_tokens(root: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for a call of a few tokens, with the names of ``given``; alike on all ranks."""
    config: Any = root.config
    text, device = config.get_text_config(), device_of(root)
    vocabulary, padding = int(getattr(text, "vocab_size", 2)), getattr(text, "pad_token_id", None)
    ids = torch.randint(0, vocabulary, (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(0))
    if padding is not None:  # positions and masks may depend on it
        ids[ids == padding] = (padding + 1) % vocabulary
    positions = torch.arange(_TOKENS)
    if kind_of_call(given)[1]:
        positions[_SECOND_DOCUMENT:] -= _SECOND_DOCUMENT
    ignored = int(given.get("ignore_index", -100))
    values = {
        "input_ids": ids,
        "labels": ids.clone(),
        "shift_labels": F.pad(ids[:, 1:], (0, 1), value=ignored),
        "attention_mask": torch.ones_like(ids),
        "position_ids": positions.expand(_ROWS, -1),
    }
    beside = {name: item for name, item in given.items() if name not in (*_BY_TOKEN, *_SET_HERE)}
    asked = {name: item.to(device) for name, item in values.items() if name in {"labels", *given}}
    return {**beside, **asked}


@contextmanager
def _evaluating(root: nn.Module) -> Iterator[None]:
    """Within the block the model draws no random numbers, and no hook of others sees its calls."""
    modes = {module: module.training for module in root.modules()}
    root.eval()
    try:
        with torch.no_grad(), hooks_off(root), CallState(device_of(root), True, ()).restored():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


class _HiddenStates:
    """The hidden states that the head is called with.

    Attributes:
        coarsest: the largest relative step of the dtypes that the model computes in.
    """

    def __init__(self, root: nn.Module) -> None:
        self._seen: list[torch.Tensor] = []
        self._kind = device_of(root).type
        dtypes = {item.dtype for item in root.parameters() if item.is_floating_point() and item.itemsize > 1}
        self.coarsest = max(torch.finfo(dtype).eps for dtype in {torch.float32, *dtypes})

    def see(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note the argument of a call of the head (a hook ahead of its forward)."""
        for hidden in args[:1]:
            self._seen.append(hidden.detach())
            dtypes = [hidden.dtype]
            if torch.is_autocast_enabled(self._kind):
                dtypes.append(torch.get_autocast_dtype(self._kind))
            self.coarsest = max(self.coarsest, *(torch.finfo(dtype).eps for dtype in dtypes))

    def taken(self) -> torch.Tensor | None:
        """Return the hidden states so far, and forget them; ``None``: the head was not called."""
        seen, self._seen = self._seen, []
        return torch.cat(seen, dim=-2) if seen else None


@contextmanager
def _heads_input(root: nn.Module, structure: ModelStructure) -> Iterator[_HiddenStates]:
    hidden = _HiddenStates(root)
    with ExitStack() as stack:
        if structure.head is not None:
            watching = root.get_submodule(structure.head).register_forward_pre_hook(hidden.see)
            stack.callback(watching.remove)
        yield hidden


def _run(root: nn.Module, how: str, call: Callable[[], torch.Tensor | None]) -> torch.Tensor:
    """Call the model; an error of its own code becomes one that names the model."""
    try:
        loss = call()
    except (PlanError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own code runs: it may raise anything
        first = next(iter(str(error).splitlines()), "")
        raise _unfit(root, f"{type(error).__name__}, {how}: {first[:200]}") from error
    if loss is None:
        raise _unfit(root, f"no loss, {how}")
    return loss


def _distance(found: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    """Return how far hidden states ``[B, S, H]`` are off: the median over tokens, relative and in norm.

    The median, because rounding may send a token of one call to another expert. The first chunk counts by
    itself, and then all others: only these see earlier chunks.
    """
    if found is None or expected is None or found.shape != expected.shape:
        return 0.0 if found is expected else float("inf")
    away = (found.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1).clamp_min(1e-12)
    return max(float(part.median()) for part in away.tensor_split([CHUNK_TOKENS], dim=-1))


def _unfit(root: nn.Module, found: str) -> PlanError:
    config: Any = root.config
    where = f"model ({getattr(config, 'model_type', type(root).__name__)}) in chunks"
    problem = Problem(where, "what it computes whole", found, "Train it without stream_config.")
    return PlanError([problem], "stream_config")


Value = TypeVar("Value")

_AUTO_TOKENS = 16_384
_LEAST_AUTO_TOKENS = 2048


def auto_tokens(heads: int, key_heads: int) -> int:
    """Return how many tokens make a chunk under ``auto``.

    Backward of a chunk of C queries to as many keys takes 10 C^2 FLOP for each head and element of the head
    size (five matrix products). It copies 12 C bytes in for each key head and element (keys and values in
    bf16, their gradients in fp32) and 8 C out. On an H200 with PCIe 5 (50 GB/s) the copies in take as long
    as the products at C = 10,800 tokens times key heads per head with 450 TFLOP/s in attention, and at 13,100
    with the 545 of `planner.devices`; the difference to `_AUTO_TOKENS` is reserve.
    """
    return max(_LEAST_AUTO_TOKENS, -(-_AUTO_TOKENS * key_heads // heads))


def chunk_tokens(root: nn.Module, chunks: SequenceChunks) -> int:
    """Return how many tokens make a chunk of a model's sequences."""
    config: Any = root.config
    configs = (getattr(module, "config", None) for module in root.modules())
    text = next((own for own in configs if isinstance(own, OwnHeadsConfig)), config.get_text_config())
    heads = text.num_attention_heads
    return chunks.tokens or auto_tokens(heads, getattr(text, "num_key_value_heads", None) or heads)


def stream_sequences(
    root: nn.Module,
    chunks: SequenceChunks,
    applied: AppliedPlan,
    transfer: Transfer | None,
    choose: Callable[[int, int], None] | None = None,
) -> Undo:
    """Run a model's training calls chunk by chunk; return what undoes it.

    Args:
        root: the model inside its wrappers, not rejected by `rejections.problems_of_model`.
        chunks: length of a chunk, and dtype of the gradient sums.
        applied: the plan on the model: it acts inside each chunk, and its host memory is used.
        transfer: copies between device and host; ``None``: that of the plan.
        choose: called before the first training call with its rows and tokens per row; may change the plan.
    """

    def around(module: nn.Module) -> Wrapper:
        if module is not root:
            return _rejecting_parts
        return lambda inner: _StreamedModel(Exchangeable(root, inner), chunks, applied, transfer, choose).call

    undo = replace_outermost_calls(entries_to(root, applied.structure.stack_paths), around)

    def restore() -> None:
        for step in undo:
            step()

    return restore


def _rejecting_parts(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Reject a training call of a part of the model, whose loss is computed from the whole sequence."""

    def call(*args: Any, **kwargs: Any) -> Any:
        in_backward = running_backward() != -1  # of a chunk
        if torch.is_grad_enabled() and not (in_backward or is_dry(args, kwargs)):
            hint = "Call the model with labels, or leave stream_config out."
            raise PlanError(
                [Problem("stream_config", "a call of the model itself", "one of a part of it", hint)]
            )
        return inner(*args, **kwargs)

    return call


class NoLogitsError(PlanError, AttributeError):
    """The logits of a streamed call are read. An `AttributeError`, so that `hasattr` works on them."""


class NoLogits:
    """Stands for the logits of a streamed call, which never exist all at once."""

    @staticmethod
    def _reject(*_: Any, **__: Any) -> Any:
        hint = (
            "Call the model under torch.no_grad() for them. A trainer that reads logits in training, for a "
            "loss or a metric of its own, does not go with stream_config."
        )
        problem = Problem("logits", "that only the loss of a streamed call is read", "its logits", hint)
        raise NoLogitsError([problem], "stream_config")

    __getattr__ = __getitem__ = __len__ = __iter__ = __bool__ = __neg__ = __float__ = _reject
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __radd__ = __rmul__ = _reject
    __torch_function__ = staticmethod(_reject)


class _StreamedModel:
    """Calls a model, which has its own call, chunk by chunk; see `stream_sequences`."""

    def __init__(
        self,
        model: Exchangeable,
        chunks: SequenceChunks,
        applied: AppliedPlan,
        transfer: Transfer | None,
        choose: Callable[[int, int], None] | None,
    ) -> None:
        self.model, self.root = model, model.module
        self._tokens, self.grad_accum_dtype = chunk_tokens(self.root, chunks), chunks.grad_accum_dtype
        self._applied, self._transfer, self._choose = applied, transfer, choose
        self._checked: set[tuple[Any, ...]] = set()
        self._looks_for_graphs = True

    @property
    def again(self) -> frozenset[Scope]:
        """Layers whose attention runs again in backward."""
        return recomputed_attention(self._applied.plan, self._applied.structure)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's call; short sequences and calls without gradients are not divided into chunks."""
        given = named_arguments(self.root, args, kwargs)
        ids = given.get("input_ids")
        length = 0 if ids is None else ids.shape[-1]
        if given.get("inputs_embeds") is not None:
            length = given["inputs_embeds"].shape[1]
        if self._choose is not None and length and torch.is_grad_enabled():
            choose, self._choose = self._choose, None  # it calls the model on fake tensors
            try:
                choose(len(given["input_ids"] if ids is not None else given["inputs_embeds"]), length)
            except BaseException:
                self._choose = choose
                raise
        if not torch.is_grad_enabled() or length <= self._tokens:
            return self.model.run(*args, **kwargs)
        reject_call(self.root, given)
        check_step(self.root)  # inside, chunks use other tensors than the parameters that it checks
        self._check_kind_of_call(given)
        parameters = {name: item for name, item in self.root.named_parameters() if item.requires_grad}
        sequence = _Sequence(self, given, self._tokens, self.host())
        loss = _TwoPasses.apply(sequence, tuple(parameters), *parameters.values())
        fields = getattr(sequence.output_class, "__dataclass_fields__", ())
        output = sequence.output_class(loss=loss, **({"logits": NoLogits()} if "logits" in fields else {}))
        as_output = given.get("return_dict", getattr(self.root.config, "return_dict", True))
        return output if as_output else output.to_tuple()

    def in_chunks(self, turns: bool) -> AbstractContextManager[None]:
        """Return a context for one of the two passes, in whose order frozen weights on the host come."""
        weights = self._applied.weights
        return nullcontext() if weights is None else weights.in_chunks(turns)

    def _check_kind_of_call(self, given: dict[str, Any]) -> None:
        """Raise `PlanError` if a few tokens give another result in chunks; once for each kind of call."""
        if (kind := kind_of_call(given)) in self._checked:
            return
        nowhere = host_of_no_plan(device_of(self.root))

        def streamed(few: dict[str, Any]) -> torch.Tensor:
            return _Sequence(self, few, CHUNK_TOKENS, nowhere).first_pass()

        check_few_tokens(self.root, self._applied.structure, given, self.model.run, streamed)
        self._checked.add(kind)

    def reject_kept_graph(self, nodes: list[weakref.ref[Any]]) -> None:
        """Raise `PlanError` if something holds a chunk's graph, and so its ``nodes``, after its backward."""
        if not self._looks_for_graphs or not any(node() for node in nodes):
            return
        gc.collect()
        if any(node() for node in nodes):
            expected = "nothing that keeps outputs of a chunk's modules with their gradients"
            found = "some after its backward: a hook that collects an auxiliary loss, or stores outputs"
            hint = (
                "A loss made from them would have no gradient: train it without stream_config, or detach "
                "what is stored."
            )
            raise PlanError([Problem("model", expected, found, hint)], "stream_config")
        self._looks_for_graphs = False  # the model makes reference cycles: collecting each time takes long

    def host(self) -> HostSequence:
        """Return host memory for one sequence."""
        runtime = self._applied.runtime
        transfer = self._transfer or runtime.transfer()
        return HostSequence(runtime.pool(transfer), transfer, runtime.counters)

    def check_first_chunk(self, attention: ChunkAttention) -> None:
        """Raise `PlanError` if a layer has not called ``attention``, or host memory does not suffice."""
        if len(attention.layers) != (count := len(self._applied.structure.layers)):
            expected = f"{count} layers that call transformers' attention interface"
            called = f"calls by {len(attention.layers)} of them"
            raise PlanError([Problem("model", expected, called, "Train it without stream_config.")])
        layers, length = [*attention.layers.values()], attention.bounds[-1]
        needed_bytes = host_bytes(layers, attention.bounds)
        attention.host.make_ready(
            needed_bytes, lambda most: longest_on_host(layers, self._tokens, most, length)
        )


class _Sequence:
    """One call of a model with a long sequence, in chunks of ``tokens``.

    ``given`` are the arguments of the call by name, checked by `reject_call`.
    """

    def __init__(self, model: _StreamedModel, given: dict[str, Any], tokens: int, host: HostSequence) -> None:
        self._model = model
        ids, ignored = given["input_ids"], given.get("ignore_index", -100)
        targets = given.get("shift_labels")
        if targets is None:
            targets = F.pad(given["labels"], (0, 1), value=ignored)[..., 1:]
        positions = given.get("position_ids")
        documents = (0,) if positions is None else documents_of(positions)
        bounds = chunk_bounds(ids.shape[-1], tokens)
        self._attention = ChunkAttention(bounds, host, documents, model.grad_accum_dtype, model.again)
        self._by_token = {"input_ids": ids, "shift_labels": targets}
        if positions is None:  # else the model counts them, from the tokens that its cache says are before
            positions = positions_by_padding(model.root, ids)
        if positions is not None:
            self._by_token["position_ids"] = positions
        self._beside = {name: item for name, item in given.items() if name not in _REPLACED}
        if self._beside.get("num_items_in_batch") is None:
            self._beside["num_items_in_batch"] = (targets != ignored).sum()
        self._states: list[CallState] = []
        self.output_class: Callable[..., Any] = dict

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Tensors of the call that both passes read."""
        values = (*self._by_token.values(), *self._beside.values())
        return tuple(item for item in values if isinstance(item, torch.Tensor))

    def within_memory(self, run: Callable[[], Value]) -> Value:
        """Run one of the two passes. Raises `DeviceMemoryError` if device memory runs out."""
        found, failure = attempt(run, (), {})
        if failure is None:
            return found
        first, second, *_ = self._attention.bounds
        raise DeviceMemoryError(
            f"A streamed sequence of {self._attention.bounds[-1]} tokens ran out of device memory in chunks "
            f"of {second - first}. Fewer tokens in a chunk (stream_config: tokens) need less, and so does "
            f"tile_config: {{loss: auto}}. ({failure.text})"
        )

    def first_pass(self) -> torch.Tensor:
        """Run all chunks without gradients; return the loss of the sequence."""
        loss = None
        with attending(self._model.root, self._attention), self._model.in_chunks(turns=False):
            for chunk in range(len(self._attention.bounds) - 1):
                self._states.append(CallState(self._by_token["input_ids"].device, True, ()))
                self._attention.begin(chunk, second=False)
                output = self._model.model(**self._arguments(chunk))
                self.output_class, of_chunk = type(output), output.loss
                del output  # and with it the chunk's logits
                loss = of_chunk if loss is None else loss + of_chunk
                if not chunk:
                    self._model.check_first_chunk(self._attention)
        assert loss is not None
        return loss

    def second_pass(
        self, upstream: torch.Tensor, parameters: dict[str, torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Run all chunks in reverse; return the gradients of the parameters, in the same order.

        ``upstream`` is the gradient of the loss.
        """
        if not self._states:
            raise RuntimeError("backward ran twice through a streamed sequence: call the model again.")
        sums = {name: _GradientSum(item) for name, item in parameters.items()}
        leaves = {name: item.leaf for name, item in sums.items()}
        turning = self._model.in_chunks(turns=True)
        with attending(self._model.root, self._attention), turning, torch.enable_grad():
            for chunk in reversed(range(len(self._states))):
                state = self._states.pop()
                self._attention.begin(chunk, second=True)
                with state.restored():
                    loss = self._model.model.with_parameters(leaves, **self._arguments(chunk)).loss
                nodes = self._attention.nodes()
                with state.autocast_restored():
                    torch.autograd.backward(loss, upstream.to(loss.dtype))
                del loss
                self._model.reject_kept_graph(nodes)
                self._attention.forget(chunk)
        return [item.taken() for item in sums.values()]

    def _arguments(self, chunk: int) -> dict[str, Any]:
        at = self._attention.positions_of(chunk)
        own = {name: item[..., at.start : at.stop] for name, item in self._by_token.items()}
        targets = own["shift_labels"].contiguous()
        replaced = {"labels": targets, "shift_labels": targets, "use_cache": False, "return_dict": True}
        return {**self._beside, **own, **replaced, "past_key_values": _past(at)}


_REPLACED = {*_BY_TOKEN, *_SET_HERE} - {"num_items_in_batch"}
"""Arguments of the call that are replaced for each chunk."""


def positions_by_padding(root: nn.Module, ids: torch.Tensor) -> torch.Tensor | None:
    """Return the positions ``[B, S]`` of a model that does not count padding (RoBERTa's family), as it does.

    From the ids of a chunk alone it cannot know how much padding came before. ``None``: other models.
    """
    for module in root.modules():
        make = getattr(module, "create_position_ids_from_input_ids", None)  # of such models' embeddings
        padding = getattr(module, "padding_idx", None)
        if make is not None and padding is not None:
            made: torch.Tensor = make(ids, padding)
            return made
    return None


def _past(chunk: range) -> Any:
    """Return an empty cache that tells the model how many tokens of the sequence come before a chunk."""
    from transformers.cache_utils import DynamicCache

    class Past(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> Any:
            return key_states, value_states

        def get_seq_length(self, *_: Any) -> int:
            return chunk.start

        def get_query_offset(self, *_: Any) -> int:
            return chunk.start

        def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
            return chunk.stop, 0

    return Past()


class _GradientSum:
    """The gradient of a parameter, summed over chunks in at least fp32.

    Chunks compute with ``leaf``, which shares the parameter's memory.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self.leaf = nn.Parameter(parameter.detach())
        self._sum: torch.Tensor | None = None
        self._hook: Any = None
        if torch.promote_types(parameter.dtype, torch.float32) != parameter.dtype:
            self._hook = self.leaf.register_post_accumulate_grad_hook(self._add)

    def _add(self, leaf: torch.Tensor) -> None:
        if self._sum is None:
            self._sum = zero_sum(leaf)
        assert leaf.grad is not None
        self._sum += leaf.grad
        leaf.grad = None

    def taken(self) -> torch.Tensor | None:
        """Return the sum in the parameter's dtype, and free it; ``None``: no gradient came."""
        found, self._sum = self._sum, None
        if self._hook is not None:
            self._hook.remove()
        if found is None:
            found, self.leaf.grad = self.leaf.grad, None
        return None if found is None else found.to(self.leaf.dtype)


class _TwoPasses(torch.autograd.Function):
    """Autograd's node of a streamed sequence: from the model's weights to the loss."""

    @staticmethod
    def forward(
        ctx: Any, sequence: _Sequence, names: tuple[str, ...], *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.sequence, ctx.names = sequence, names
        ctx.save_for_backward(*parameters, *sequence.inputs)  # autograd notices if one is written meanwhile
        return sequence.within_memory(sequence.first_pass)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        parameters = dict(zip(ctx.names, ctx.saved_tensors, strict=False))
        sequence: _Sequence = ctx.sequence
        gradients = sequence.within_memory(lambda: sequence.second_pass(upstream, parameters))
        return None, None, *gradients
