"""Pitfalls 16 to 19 and 21: tensors that must not move, and tensors that must come back as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.engine.pitfalls.odd_layers import INNER, llama_saving, same_gradients
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.spies import WatchingTransfer
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    assert_bitwise_equal,
    batch,
    gradients_of_step,
    on,
    one_step,
    plan_of,
    swap_everything,
    swap_rows,
    tiny_llama,
)

MLP = plan_of(*swap_rows(["mlp"], [1], 5))


def storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def moved_storages(model: nn.Module, step: Callable[[nn.Module], object] = one_step) -> set[int]:
    """Swap everything for one step; return the addresses of the storages that were copied out."""
    transfer = WatchingTransfer(hold=True)
    applied = on(model, swap_everything(5), transfer)
    step(model)
    applied.remove()
    assert len(transfer.held) > 10 * NUM_LAYERS
    return storages(transfer.held)


def with_lora(**settings: Any) -> nn.Module:
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(tiny_llama(**settings), config)


def half_frozen() -> nn.Module:
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in name)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bare": tiny_llama,
    "tied": lambda: tiny_llama(tie_word_embeddings=True),
    "lora": with_lora,
    "frozen above": half_frozen,
}


@pytest.mark.parametrize("name", MODELS)
def test_pitfall_16_weights_are_never_moved(name: str) -> None:
    """Catches parameters recognised by class: what linear saves is a view (``weight.t()``), no Parameter."""
    model = MODELS[name]()
    assert not storages(model.parameters()) & moved_storages(model)
    same_gradients(MODELS[name], swap_everything(5), steps=1)


def test_pitfall_16_weights_that_got_new_storages_are_known_at_the_next_forward() -> None:
    """Catches storages that are collected once: a cast, a move or a resize gives parameters new ones."""
    model, transfer = tiny_llama(), WatchingTransfer(hold=True)
    on(model, swap_everything(5), transfer)
    one_step(model)
    first = len(transfer.held)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    one_step(model)
    assert not storages(model.parameters()) & storages(transfer.held[first:])


def test_pitfall_16_weights_with_other_data_for_a_forward() -> None:
    """Catches a weight held apart: autograd reads what a weight has in backward (averages of weights)."""

    def train(model: nn.Module) -> list[torch.Tensor]:
        found = []
        for step in range(4):  # the last from cached traces
            own = [parameter.data for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.data = parameter.data * 1.25
            loss = model(input_ids=batch(step), labels=batch(step)).loss
            for parameter, data in zip(model.parameters(), own, strict=True):
                parameter.data = data
            loss.backward()
            found += [
                parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
            ]
        return found

    bare, model = train(tiny_llama()), tiny_llama()
    with on(model, swap_everything(5), RecordingTransfer()):
        assert all(torch.equal(one, other) for one, other in zip(train(model), bare, strict=True))


def test_pitfall_16_weights_that_get_their_storage_in_the_layers_own_hook() -> None:
    """Catches storages collected at the model's start alone: sharded weights are gathered layer by layer."""
    model, transfer = tiny_llama(), WatchingTransfer(hold=True)
    gathered: list[torch.Tensor] = []

    def gather(layer: nn.Module, _args: object) -> None:
        for parameter in layer.parameters():
            parameter.data = parameter.data.clone()
            gathered.append(parameter.data)

    on(model, swap_everything(5), transfer)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(gather, prepend=True)
    bare = gradients_of_step(tiny_llama())
    assert_bitwise_equal(gradients_of_step(model), bare)
    assert len(gathered) == 9 * NUM_LAYERS
    assert not storages(gathered) & storages(transfer.held)


def test_pitfall_17_rope_tables_masks_and_positions_stay() -> None:
    """Catches the tensors that every layer saves and the model owns: moving them frees nothing."""
    model = tiny_llama(attn_implementation="sdpa")
    shared: list[torch.Tensor] = []

    def remember(_module: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():  # not what the model structure's recording saw
            shared.extend((*kwargs["position_embeddings"], kwargs["attention_mask"], kwargs["position_ids"]))

    model.model.layers[2].register_forward_pre_hook(remember, with_kwargs=True)
    ids = batch(0)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def step(model: nn.Module) -> None:
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()

    moved = moved_storages(model, step)
    assert len(shared) == 4
    assert not storages((*shared, ids, mask)) & moved


def test_pitfall_17_embeddings_given_by_the_caller_stay() -> None:
    """Catches an input of the model taken for the embedding's output: the caller holds it."""
    given = torch.randn(2, 16, 32, requires_grad=True)

    def step(model: nn.Module) -> None:
        model(inputs_embeds=given, labels=batch(0)).loss.backward()

    assert not storages([given]) & moved_storages(tiny_llama(), step)


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SMALL_INTEGERS = {
    "cu_seqlens": lambda _: torch.tensor([0, 5, 16], dtype=torch.int32),
    "rng state": lambda _: torch.tensor([7, 9], dtype=torch.uint64),
    "flag": lambda _: torch.tensor(True),
    "index": lambda _: torch.tensor(3),
}


@pytest.mark.parametrize("name", SMALL_INTEGERS)
def test_pitfall_18_tiny_integers_come_back_exactly_and_stay_by_default(name: str) -> None:
    """Catches a round trip through floats, and copies of a few bytes where no threshold is set by hand."""
    seen: list[torch.Tensor] = []
    make = SMALL_INTEGERS[name]
    for settings in ({}, {"min_tensor_bytes": 1024}):
        transfer, model = WatchingTransfer(), llama_saving(make, seen.append)
        on(model, plan_of(*swap_rows(["mlp"], [1], 5), **settings), transfer)
        one_step(model)
        expected = make(torch.empty(0))
        assert seen[-1].dtype == expected.dtype
        assert torch.equal(seen[-1], expected)
        assert (min(transfer.sizes_bytes) < 1024) == (not settings)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, *FLOATS])
def test_pitfalls_18_and_21_every_type_moves_in_as_many_bytes_and_comes_back(dtype: torch.dtype) -> None:
    """Catches an engine that loses masks or routing tables, or a host copy smaller than the tensor."""
    expected = (3 * torch.randn(4099, generator=torch.Generator().manual_seed(0))).to(dtype)
    seen: list[torch.Tensor] = []
    model, transfer = llama_saving(lambda _: expected.clone(), seen.append), WatchingTransfer()
    on(model, MLP, transfer)
    one_step(model)
    assert torch.equal(seen[0], expected)
    assert expected.nbytes in transfer.sizes_bytes


def test_pitfall_18_labels_and_their_shifted_copy_stay() -> None:
    """Catches labels that move: cross-entropy reads them shifted, on the device, as indices."""
    transfer = WatchingTransfer(hold=True)
    same_gradients(tiny_llama, swap_everything(5), transfer=transfer)
    shifted = nn.functional.pad(batch(0), (0, 1), value=-100)[..., 1:].contiguous()
    contents = [source.numpy().tobytes() for source in transfer.held]
    assert shifted.numpy().tobytes() not in contents
    assert batch(0).numpy().tobytes() not in contents


class Tagged(torch.Tensor):
    """A subclass that the engine does not know."""


STRANGERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda _: None,
    "sparse": lambda x: torch.eye(300).to_sparse(),
    "csr": lambda x: torch.eye(300).to_sparse_csr(),
    "jagged": lambda x: torch.nested.nested_tensor([torch.ones(9), torch.ones(99)], layout=torch.jagged),
    "nested": lambda x: torch.nested.nested_tensor([torch.ones(9), torch.ones(99)], layout=torch.strided),
    "meta": lambda x: torch.empty(3000, device="meta"),
    "subclass": lambda x: torch.ones(3000).as_subclass(Tagged),
    "conjugated": lambda x: torch.ones(3000, dtype=torch.complex64).conj(),
    "negated": lambda x: torch.ones(3000, dtype=torch.complex64).conj().imag,
    "quantised": lambda x: torch.quantize_per_tensor(torch.ones(3000), 0.1, 0, torch.quint8),
    "mkldnn": lambda x: torch.ones(3000).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in STRANGERS])
def test_pitfall_19_what_the_engine_does_not_know_is_kept(name: str) -> None:
    """Catches a byte copy of something that is more, or other, than its bytes."""
    made: list[Any] = []
    seen: list[Any] = []

    def make(x: torch.Tensor) -> Any:
        made.append(STRANGERS[name](x))
        return made[-1]

    bare = gradients_of_step(llama_saving(make, seen.append))
    model = llama_saving(make, seen.append)
    transfer = WatchingTransfer()
    on(model, MLP, transfer)
    seen.clear()
    assert_bitwise_equal(gradients_of_step(model), bare)
    (found,), expected = seen, made[-1]
    assert type(found) is type(expected)
    if expected is not None:
        assert (found.layout, found.is_conj(), found.is_neg()) == (
            expected.layout,
            expected.is_conj(),
            expected.is_neg(),
        )
        assert found.device == expected.device
    assert transfer.sizes_bytes == [2 * 16 * INNER * 4]  # the function's output


@pytest.mark.parametrize("plan", [swap_everything(5), CASES["case_4"]], ids=["everything swapped", "case_4"])
def test_pitfall_19_a_training_forward_on_fake_tensors(plan: Any) -> None:
    """Catches a plan that breaks estimators: they run the step on tensors without memory."""
    model = tiny_llama()
    applied = on(model, plan)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ids = mode.from_tensor(batch(0))
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)
    assert_bitwise_equal(gradients_of_step(model), gradients_of_step(tiny_llama()))
    assert applied.stats().live_swaps == 0


BITS = torch.tensor(
    [0x7F800001, 0x7FC12345, -0x80000000, 1, 0x007FFFFF, -0x800000, 0x3F800001], dtype=torch.int32
)
"""fp32 bit patterns: a signalling and a quiet NaN with payloads, -0, denormals, -inf, 1 + epsilon."""


@pytest.mark.parametrize("prefetch_ops", [0, 1000])
def test_pitfall_21_every_bit_comes_back(prefetch_ops: int) -> None:
    """Catches any compression on the way: a cast loses payloads, denormals and the last bits."""
    seen: list[torch.Tensor] = []
    model = llama_saving(lambda _: BITS.repeat(100).view(torch.float32), seen.append)
    on(model, plan_of(*swap_rows(["mlp"], [1], prefetch_ops)), RecordingTransfer())
    one_step(model)
    assert torch.equal(seen[0].view(torch.int32), BITS.repeat(100))
