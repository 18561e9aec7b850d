"""Rejects models that cannot be streamed before training begins, and calls before their first chunk runs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, Problem
from ..parallel.sequence_region import divides_sequence
from ..plan.dry_run import dry_call, example_batch, expert_stand_ins, fake_weights
from ..plan.forward_recorder import ForwardRecorder
from ..plan.model_structure import ModelStructure, device_of
from ..plan.wrappers import FSDP2_METHOD, is_checkpointed
from .streamed_attention import traced

logger = logging.getLogger(__name__)

_KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_DROPOUTS = (
    *("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
    *("layerdrop", "decoder_layerdrop"),  # a layer that is left out for one chunk has no keys for the next
)
_ROTATIONS_BY_LENGTH = {"dynamic", "longrope"}
"""Kinds of rotary embeddings whose frequencies depend on how long the sequence of a call is."""

_PASSED_ON = {
    *("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "use_cache"),
    *("num_items_in_batch", "ignore_index", "return_dict"),
}
"""Arguments that a streamed call supports."""

_HINT = "Train it without stream_config."

_Condition = tuple[str, str, bool]
"""(What is expected, what is found if that is violated, whether it is violated)."""


def problems_of_model(root: nn.Module, structure: ModelStructure) -> list[Problem]:
    """Return all reasons why a model cannot be streamed, read off its configuration and classes.

    Where there are none, a chunk on fake tensors shows what its attention asks for.
    """
    model: Any = root
    config: Any = getattr(root, "config", None)
    if not hasattr(config, "get_text_config"):
        return [Problem("model", "a transformers model", type(root).__name__)]
    text = config.get_text_config()
    of_class = _of_the_class(model, structure, text)
    found = (*of_class, *_of_the_loss(model, text), *_of_settings(root, structure))
    problems = [
        Problem("stream_config", expected, was, _HINT) for expected, was, violated in found if violated
    ]
    return problems or _problems_of_chunk(root, structure)


def _problems_of_chunk(root: nn.Module, structure: ModelStructure) -> list[Problem]:
    """Return what a chunk on fake tensors asks of attention that it cannot do: sinks, biases, another mask.

    What else fails on fake tensors shows nothing: the check of the first call (`two_passes`) tells.
    """
    layers = [root.get_submodule(layer.module_path) for layer in structure.all_layers]
    try:
        with dry_call(root, {}), expert_stand_ins(layers, lambda *_: None):
            state = fake_weights(root, device_of(root))
            batch = example_batch(root, state.values())
            with traced(root, batch["input_ids"].shape[1]):
                ForwardRecorder({}, {}, None).run_on_fakes(root, root, state, (), batch)
    except PlanError as error:
        return [*error.problems]
    except Exception:  # the model's own code runs: it may raise anything
        logger.debug("no chunk on fake tensors", exc_info=True)
    return []


def _of_the_class(model: Any, structure: ModelStructure, text: Any) -> Iterator[_Condition]:
    is_encoder = getattr(model.config, "is_encoder_decoder", False)
    yield "one stack of layers (a decoder)", "an encoder and a decoder", is_encoder
    yield "a causal model", "one whose tokens see later ones", not _is_causal(model, structure, text)
    yield (
        "the same rotary embedding for each chunk",
        "one that depends on the length of the sequence (dynamic, longrope)",
        bool(_ROTATIONS_BY_LENGTH & set(_rotations(text))),
    )
    kinds = {*(getattr(text, "layer_types", None) or ())} - _KNOWN_LAYERS
    yield (
        "layers of attention only",
        f"layers of another kind: {', '.join(sorted(kinds)) or 'a recurrent state'}",
        bool(kinds) or bool(getattr(model, "_is_stateful", False)),
    )
    yield (
        "attention that transformers' interface can exchange",
        f"{type(model).__name__}, whose class does not support it",
        not getattr(model, "_supports_attention_backend", False),
    )


def _of_the_loss(model: Any, text: Any) -> Iterator[_Condition]:
    loss = getattr(getattr(model, "loss_function", None), "__name__", "none")
    parameters = inspect.signature(model.forward).parameters.values()
    takes_more = any(item.kind is item.VAR_KEYWORD for item in parameters)
    yield (
        "the loss of a causal language model (transformers' ForCausalLMLoss)",
        f"the loss function {loss}",
        "CausalLM" not in loss or not takes_more,
    )
    yield (
        "a loss that is a sum over tokens (config.output_router_logits false)",
        "a balancing loss over the whole batch",
        any(getattr(item, "output_router_logits", False) for item in (text, model.config)),
    )
    dropout = next((name for name in _DROPOUTS if getattr(text, name, 0)), None)
    yield f"config.{dropout} 0", f"{getattr(text, dropout or '', 0)}", dropout is not None


def _of_settings(root: nn.Module, structure: ModelStructure) -> Iterator[_Condition]:
    yield (
        "gradient checkpointing off: each layer of a chunk is recomputed already",
        "gradient checkpointing on",
        any(map(is_checkpointed, structure.layer_modules(root).values())),
    )
    peft = getattr(root, "active_peft_config", None)
    learned = bool(getattr(peft, "is_prompt_learning", False))
    yield "no prompts that are learned", "PEFT's prompt learning", learned
    yield (
        "sequence_parallel_enabled: false: the hidden states of a chunk are few",
        "ranks that divide the sequence",
        divides_sequence(root),
    )
    devices = {item.device for item in root.parameters()}
    yield "one device", "layers on several devices", len(devices) > 1


def _is_causal(root: nn.Module, structure: ModelStructure, config: Any) -> bool:
    attention = (
        root.get_submodule(f"{layer.module_path}.{path}")
        for layer in structure.layers
        for path in layer.attention_paths
    )
    return all(getattr(item, "is_causal", True) for item in (config, *attention))


def _rotations(config: Any) -> Iterator[Any]:
    """Yield the kinds of rotary embeddings of a model; there may be one for each kind of layer."""
    asked: Any = getattr(config, "rope_parameters", None) or {}
    for item in (asked, *asked.values()):
        if isinstance(item, Mapping):
            yield item.get("rope_type")


def reject_call(root: nn.Module, given: Mapping[str, Any]) -> None:
    """Raise `PlanError` with every reason why a call with more tokens than a chunk cannot be streamed."""
    problems = []
    if any(hasattr(type(module), FSDP2_METHOD) for module in root.modules()):
        expected, hint = "whole weights on each rank (no FSDP2)", "Use DistributedDataParallel."
        problems.append(Problem("stream_config", expected, "weights that are sharded", hint))
    if "labels" not in given and "shift_labels" not in given:
        hint = (
            "A loss of your own needs all logits: label_smoothing_factor, compute_loss_func and losses of "
            "other trainers do not go with stream_config."
        )
        problems.append(Problem("labels", "the labels, from which the model makes the loss", "none", hint))
    for name in sorted(set(given) - _PASSED_ON):
        if given[name] is False or (isinstance(given[name], int | float) and not given[name]):
            continue
        hint = f"Leave `{name}` out, or train without stream_config."
        problems.append(Problem(name, "an argument that chunks of a sequence can share", "it is set", hint))
    if "inputs_embeds" not in given:
        problems += [*_problems_of_mask(given), *_problems_of_positions(given)]
    if problems:
        raise PlanError(problems, f"stream_config, a call of {type(root).__name__}")


def _problems_of_mask(given: Mapping[str, Any]) -> list[Problem]:
    mask, labels = given.get("attention_mask"), given.get("labels")
    if mask is None:
        return []
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return [Problem("attention_mask", "one number per token", "a mask of queries and keys")]
    padded = mask == 0
    if bool((padded[:, :-1] & ~padded[:, 1:]).any()):
        hint = "Pad on the right: tokenizer.padding_side = 'right'."
        return [Problem("attention_mask", "padding on the right only", "padding before tokens", hint)]
    ignored = given.get("ignore_index", -100)
    targets = given["shift_labels"][:, :-1] if "shift_labels" in given else None
    if targets is None and labels is not None:
        targets = labels[:, 1:]
    # A padded token attends to other padding than without streaming, so its loss must be ignored.
    if targets is not None and bool((padded[:, :-1] & (targets != ignored)).any()):
        hint = f"Set the labels of padding to {ignored}, as DataCollatorForLanguageModeling does."
        return [Problem("labels", f"{ignored} where the attention mask is 0", "other labels there", hint)]
    return []


def _problems_of_positions(given: Mapping[str, Any]) -> list[Problem]:
    positions = given.get("position_ids")
    if positions is None:
        return []
    if positions.dim() != 2:
        hint = "Positions of several dimensions are not streamed: train without stream_config."
        return [Problem("position_ids", "a position for each token", f"shape {list(positions.shape)}", hint)]
    documents = documents_of(positions)
    if any(documents_of(row[None]) != documents for row in positions):
        hint = "Pack one row: per_device_train_batch_size 1."
        return [Problem("position_ids", "the same documents in each row", "others", hint)]
    if len(documents) > 1 and "attention_mask" in given:
        hint = "transformers tells packed documents only without a mask: leave attention_mask out."
        return [Problem("attention_mask", "none beside packed documents", "a mask", hint)]
    return []


def documents_of(positions: torch.Tensor) -> tuple[int, ...]:
    """Return where the documents of packed rows begin: where the first row's positions do not rise by 1.

    This is the rule of `transformers` (``masking_utils.find_packed_sequence_indices``).
    """
    breaks = (positions[0].diff() != 1).nonzero()[:, 0] + 1
    return (0, *breaks.tolist())
