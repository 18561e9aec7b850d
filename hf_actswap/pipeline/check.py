"""Checks before the first step that a model computes the same when it runs in stages.

The whole model, and then the stages one after the other, are called in this process with the same few tokens,
with the model's own code and weights. Loss and logits must be equal bit for bit. So a family whose layers
pass more than a hidden state to later layers (value residuals, load-balancing losses, shared keys) is
rejected, and never trained wrongly.

If this rank has not read the weights of other stages (they are on ``meta``), each of their layers gets random
values while it is called: Hankel matrices ``r[i + j]``, which need only as many random numbers as they have
rows plus columns. Values of one layer exist at a time.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import Problem
from ..plan.model_structure import device_of
from .stages import PipelineError, StagedModel

_TOKENS = (2, 8)
"""Shape of the ids: rows and length."""


def check_cut(staged: StagedModel, autocast: Callable[[], Any]) -> None:
    """Compare a model in stages with the whole one, and record what its layers return
    (`record_layer_outputs`).

    Args:
        staged: the model, before `StagedModel.cut`.
        autocast: returns the context in which the training calls the model.

    Raises:
        PipelineError: the results differ, or a stage cannot be called; the error says why.
    """
    model, relay = staged.model, staged.relay
    modes = {module: module.training for module in model.modules()}
    batch = _few_tokens(staged)
    model.eval()
    try:
        with torch.no_grad(), autocast(), _values_for_foreign_parts(staged):
            expected = _tensors(
                record_layer_outputs(staged, lambda: model(**batch), batch["input_ids"].shape)
            )
            received = None
            for chunk in staged.chunks:
                given = batch if chunk.is_last else {k: v for k, v in batch.items() if k != "labels"}
                found, received = _called(staged, chunk, received, given)
    finally:
        for module, training in modes.items():
            module.training = training
    staged_result = _tensors(found)
    differing = [name for name in expected if not _equal(expected[name], staged_result.get(name))]
    if differing:
        raise PipelineError([_differs(staged, differing)])
    assert relay.received is None


def record_layer_outputs(staged: StagedModel, call: Callable[[], Any], shape: torch.Size) -> Any:
    """Call the whole model, and record what its first layer returns: a tensor or a tuple, its size and dtype.

    Sets ``layer_outputs``, ``relay.hidden_size`` and ``relay.dtype`` of ``staged``.

    Args:
        staged: the model, before `StagedModel.cut`.
        call: calls the model without gradients, and returns its output.
        shape: shape ``[batch, seq]`` of the ids that the model is called with.

    Returns:
        What ``call`` returned.

    Raises:
        PipelineError: the layer returns something other than a hidden state.
    """
    hidden: list[Any] = []
    first = staged.model.get_submodule(staged.structure.layers[0].module_path)
    watching = first.register_forward_hook(lambda _m, _a, output: hidden.append(output))
    try:
        found = call()
    finally:
        watching.remove()
    _note_form(staged, hidden, shape)
    return found


def _few_tokens(staged: StagedModel) -> dict[str, torch.Tensor]:
    embedding: Any = staged.model.get_submodule(staged.structure.embedding or "")
    device = device_of(staged.model)
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(getattr(embedding, "num_embeddings", 2))
    ids = torch.randint(0, max(vocabulary, 2), _TOKENS, generator=generator).to(device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**batch, "labels": ids} if staged.structure.head is not None else batch


@contextmanager
def _values_for_foreign_parts(staged: StagedModel) -> Iterator[None]:
    """Within the block, modules of other stages on ``meta`` get random values while they are called."""
    device = device_of(staged.model)
    paths = {staged.model.get_submodule(path): path for path in staged.foreign_parts()}
    filled: defaultdict[nn.Module, ExitStack] = defaultdict(ExitStack)

    def fill(module: nn.Module, _args: Any) -> None:
        filled[module].enter_context(_with_values(staged, paths[module], device))

    def empty(module: nn.Module, *_: Any) -> None:
        filled[module].close()

    with ExitStack() as hooks:
        for module in paths:
            hooks.callback(module.register_forward_pre_hook(fill, prepend=True).remove)
            hooks.callback(module.register_forward_hook(empty, always_call=True).remove)
        yield


@contextmanager
def _with_values(staged: StagedModel, path: str, device: torch.device) -> Iterator[None]:
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for name, module in staged.model.get_submodule(path).named_modules(prefix=path):
        for tensors in (module._parameters, module._buffers):
            for last, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    full = f"{name}.{last}"
                    values = _values(tensor, staged.entries.get(full, full), device)
                    replaced.append((tensors, last, tensor))
                    tensors[last] = nn.Parameter(values, False) if tensors is module._parameters else values
    try:
        yield
    finally:
        for tensors, last, tensor in replaced:
            tensors[last] = tensor


def _values(tensor: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    """Return random values of a tensor's shape: vectors around 1, matrices that keep the norm of a vector."""
    if not tensor.is_floating_point():
        return torch.full(tensor.shape, tensor.dtype == torch.bool, dtype=tensor.dtype, device=device)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    line = torch.rand(sum(tensor.shape) + 1, generator=generator)
    scaled = 0.5 + line if tensor.dim() < 2 else (2 * line - 1) * (3 / tensor.shape[-1]) ** 0.5
    matrix = scaled.to(device, tensor.dtype).as_strided(tensor.shape, (1,) * tensor.dim())
    return matrix.contiguous()


def _note_form(staged: StagedModel, hidden: list[Any], shape: torch.Size) -> None:
    """Record whether a layer returns a tensor ``[batch, seq, hidden]``, or a tuple that begins with one."""
    output = hidden[0] if hidden else None
    if isinstance(output, tuple):
        staged.layer_outputs, output = len(output), output[0]
    if len(hidden) != 1 or not isinstance(output, torch.Tensor) or output.shape[:2] != shape:
        found = f"{len(hidden)} calls of the first layer, returning {type(output).__name__}"
        raise PipelineError(
            [_unfit(staged, f"layers that return hidden states [{shape[0]}, {shape[1]}, ..] once", found)]
        )
    staged.relay.hidden_size, staged.relay.dtype = output.shape[-1], output.dtype


def _called(
    staged: StagedModel, chunk: Any, received: torch.Tensor | None, batch: dict[str, torch.Tensor]
) -> tuple[Any, torch.Tensor | None]:
    try:
        output, sent = staged.run(chunk, received, lambda: staged.model(**batch))
    except Exception as error:  # the model's own code runs: it may raise anything
        first = next(iter(str(error).splitlines()), "")
        found = f"{type(error).__name__}: {first}"
        raise PipelineError(
            [_unfit(staged, f"a model whose layers {chunk.layers} can be called alone", found)]
        ) from error
    if sent is None and not chunk.is_last:
        raise PipelineError(
            [_unfit(staged, "a call of every layer", f"layer {chunk.layers.stop} is skipped")]
        )
    return output, sent


def _tensors(output: Any) -> dict[str, torch.Tensor]:
    values = output.items() if isinstance(output, dict) else enumerate(output)
    return {str(name): value for name, value in values if isinstance(value, torch.Tensor)}


def _equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)


def _differs(staged: StagedModel, names: list[str]) -> Problem:
    layers = [f"{chunk.layers.start} to {chunk.layers.stop - 1}" for chunk in staged.chunks]
    hint = (
        "Its layers hand on more than a hidden state to later ones (balancing losses of experts: "
        "output_router_logits), so no stage can be trained alone."
    )
    expected = "stages that compute what the whole model computes"
    found = f"another {' and '.join(names)} with layers {', '.join(layers)} one after the other"
    return _unfit(staged, expected, found, hint)


def _unfit(staged: StagedModel, expected: str, found: str, hint: str = "") -> Problem:
    kind: type[nn.Module] = type(staged.model)
    where = f"model ({staged.structure.family or kind.__name__}) in a pipeline"
    return Problem(where, expected, found, hint or "Train it without parallel_config.schedule.")
