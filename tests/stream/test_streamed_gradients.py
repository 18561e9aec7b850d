"""A streamed step gives the loss and the gradients of a whole one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Phi3Config, Phi3ForCausalLM

from hf_actswap import apply
from tests.stream.streamed_models import (
    FAMILIES,
    IGNORED,
    LENGTH,
    PACKED,
    SIZES,
    STREAMED,
    TOKENS,
    VOCABULARY,
    as_exact,
    data,
    furthest,
    gradients,
    made,
    step,
    truth_of,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_in_float64_and_to_rounding_in_fp32(family: str) -> None:
    loss, truth = step(made(family, torch.float64))
    model = made(family, torch.float64)
    with apply(model, STREAMED):
        streamed_loss, found = step(model)
    # Norms and softmaxes of the models are fp32 whatever the weights are.
    torch.testing.assert_close(streamed_loss, loss, rtol=3e-7, atol=0)
    assert furthest(found, truth) < 1e-6
    model = made(family)
    _, whole = step(model)
    with apply(model, STREAMED):
        _, found = step(model)
    assert furthest(found, whole) <= 1e-6
    assert furthest(found, truth) < 1e-6


PADDING = torch.arange(LENGTH) < torch.tensor([[20], [37]])
"""On the right: where it is false."""


@pytest.mark.parametrize(
    "given",
    [
        {"num_items_in_batch": torch.tensor(77)},
        {"num_items_in_batch": 77},
        {"position_ids": torch.arange(5, 5 + LENGTH)[None]},
        {"position_ids": torch.arange(LENGTH).expand(2, -1)},
        {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)},
        {"attention_mask": PADDING.long(), "labels": data()["labels"].where(PADDING, IGNORED)},
        {"use_cache": True},
        {"labels": None, "shift_labels": data()["input_ids"].roll(-1, 1)},
        {"labels": data()["labels"].where(data()["labels"] != IGNORED, 7), "ignore_index": 7},
    ],
    ids=lambda given: ", ".join(f"{name} {type(item).__name__}" for name, item in given.items()),
)
def test_arguments_of_the_call(given: dict[str, Any]) -> None:
    model = made()
    whole = {"labels": data()["labels"]} | given if "shift_labels" in given else given
    if "shift_labels" in given:
        whole["labels"] = data()["labels"]  # without labels the model itself makes no loss
    loss, expected = step(model, **whole)
    with apply(model, STREAMED):
        streamed_loss, found = step(model, **given)
    torch.testing.assert_close(streamed_loss, loss, rtol=3e-7, atol=0)
    assert furthest(found, expected) <= 1e-6


_QUICKLY_PACKED = ("llama", "gemma3, windows", "llama4, blocks")


@pytest.mark.parametrize(
    "family",
    [name if name in _QUICKLY_PACKED else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_packed_documents(family: str) -> None:
    # With a cache, transformers looks for no documents; under a plan the configuration has none.
    model, given = made(family), {"position_ids": PACKED.expand(2, -1), "use_cache": False}
    if not _last_document_is_as_alone(model):
        pytest.skip("this transformers counts blocks of attention from the start of the row")
    loss, expected = step(model, **given)
    with apply(model, STREAMED):
        streamed_loss, found = step(model, **given)
    torch.testing.assert_close(streamed_loss, loss, rtol=3e-7, atol=0)
    assert as_exact(found, expected, truth_of(model, **given))
    assert furthest(step(model)[1], expected) > 1e-2, "documents count"


@torch.no_grad()
def _last_document_is_as_alone(model: Any) -> bool:
    """Whether the model without a plan computes the same for a document in a packed row and alone."""
    start = int((PACKED == 0).nonzero()[-1])
    ids, positions = data()["input_ids"][:1], PACKED[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits[:, start:]
    alone = model(ids[:, start:], position_ids=positions[:, start:], use_cache=False).logits
    return torch.allclose(packed, alone, atol=1e-4)


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.slow), 7, 25, 49])
def test_any_chunk_length(tokens: int) -> None:
    model = made("gemma3, windows")
    _, expected = step(model)
    with apply(model, {"stream_config": {"tokens": tokens}}):
        _, found = step(model)
    assert as_exact(found, expected, truth_of(model))


@pytest.mark.parametrize(
    "beside",
    [
        {"recompute_config": {"select_recompute": {"feed_forward": True}}},
        {
            "swap_config": {
                "swap": True,
                "op_swap": [{"op_name": "mlp", "backward_prefetch": 5, "layers": True}],
            }
        },
        {
            "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 5, "layers": [1]}]},
            "tile_config": {"loss": {"tokens": 5}},
        },
        {"tile_config": {"loss": {"tokens": 5}, "tile": {"op_name": ["mlp", "final_norm"], "tokens": 4}}},
    ],
    ids=[
        "some ops recomputed",
        "MLPs swapped",
        "one layer swapped, others recomputed, loss in tiles",
        "MLPs and loss in tiles",
    ],
)
def test_a_plan_acts_inside_a_chunk(beside: dict[str, Any]) -> None:
    model = made()
    _, expected = step(model)
    with apply(model, {**STREAMED, **beside, "memory": {"min_tensor_mib": 1e-9}}) as applied:
        _, found = step(model)
        assert applied.stats().host_bytes == 0
        assert applied.stats().forwards == 4, "the second pass of each chunk"
    assert furthest(found, expected) <= 1e-6


def test_gradients_accumulate() -> None:
    model, other = made(), {"input_ids": data()["input_ids"].flip(0), "labels": data()["labels"].flip(1)}

    def two_steps() -> dict[str, torch.Tensor]:
        model.zero_grad()
        for batch in (data(), other):
            (model(**batch).loss / 2).backward()
        return gradients(model)

    expected = two_steps()
    with apply(model, STREAMED):
        found = two_steps()
        model.zero_grad()
        ((model(**data()).loss + model(**other).loss) / 2).backward()  # two graphs at once
        assert furthest(gradients(model), expected) <= 1e-6
    assert furthest(found, expected) <= 1e-6


@pytest.mark.parametrize(
    "layers", [None, [1]], ids=["all layers", "upper layers, so lower ones learn nothing"]
)
def test_adapters(layers: Any) -> None:
    targets = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(
        r=2,
        target_modules=targets,
        init_lora_weights=False,
        layers_to_transform=layers,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(made(), config)
    _, expected = step(model)
    with apply(model, STREAMED):
        _, found = step(model)
    assert as_exact(found, expected, truth_of(model))


def test_queries_alone_learn() -> None:
    model = made()
    for name, item in model.named_parameters():
        item.requires_grad_("layers.2.self_attn.q_proj" in name)
    _, expected = step(model)
    with apply(model, STREAMED) as applied:
        before = applied.stats().offloads
        _, found = step(model)
        offloads = applied.stats().offloads - before
    assert furthest(found, expected) <= 1e-6
    assert offloads == 3 * (3 * 2 + 4 * 2), "keys and values, output and log-sum-exp: no gradients of keys"


def test_both_passes_draw_the_same_random_numbers() -> None:
    """The gradient is that of the loss that the call returned: its slope along a direction."""
    torch.manual_seed(0)
    model = Phi3ForCausalLM(Phi3Config(**SIZES, resid_pdrop=0.3, embd_pdrop=0.2)).double().train()
    direction = [torch.randn_like(item) for item in model.parameters()]

    def moved(by: float) -> torch.Tensor:
        with torch.no_grad():
            for item, way in zip(model.parameters(), direction, strict=True):
                item += by * way
        torch.manual_seed(5)
        return step(model)[0].double()

    with apply(model, STREAMED):
        torch.manual_seed(5)
        _, found = step(model)
        drawn = torch.rand(3)
        slope = sum((one * way).sum() for one, way in zip(found.values(), direction, strict=True))
        high, low = moved(1e-3), moved(-2e-3)
    torch.testing.assert_close((high - low) / 2e-3, slope, rtol=2e-3, atol=0)
    torch.manual_seed(6)
    with apply(model, STREAMED):
        assert not torch.equal(step(model)[0], high)
    assert len(set(drawn.tolist())) == 3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral, windows over chunks"])
def test_half_precision_is_as_close_to_the_truth_as_a_whole_step(family: str) -> None:
    squares = {"whole": 0.0, "streamed": 0.0, "summed in bf16": 0.0}
    in_bf16 = {"stream_config": {"tokens": TOKENS, "grad_accum_dtype": "bf16"}}
    given = {name: item.repeat(1, 4) for name, item in data().items()}
    for seed in range(4):
        torch.manual_seed(seed)
        half = FAMILIES[family]().to(torch.bfloat16).train()
        _, truth = step(copy.deepcopy(half).float(), **given)
        found = {"whole": step(half, **given)[1]}
        for name, config in (("streamed", STREAMED), ("summed in bf16", in_bf16)):
            with apply(half, config):
                found[name] = step(half, **given)[1]
        for name, of in found.items():
            assert all(item.dtype is torch.bfloat16 for item in of.values())
            squares[name] += sum(float((of[key].float() - one).square().sum()) for key, one in truth.items())
    assert squares["streamed"] < squares["whole"]
    assert squares["summed in bf16"] < squares["whole"]


def test_autocast_of_the_call() -> None:
    model = made()

    def autocast_step() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**data()).loss
        loss.backward()
        return loss.detach(), gradients(model)

    _, truth = step(model)
    loss, whole = autocast_step()
    with apply(model, STREAMED):
        streamed_loss, found = autocast_step()
    assert abs(streamed_loss - loss) < 1e-3 * loss
    assert furthest(whole, truth) > 1e-3, "it is on"
    assert 1e-3 < furthest(found, truth) < 1.5 * furthest(whole, truth)


class NoWholeSequence(TorchDispatchMode):
    """Fails where a floating-point tensor is made that has as many rows as the sequence has tokens."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) is torch.Tensor and leaf.is_floating_point() and not leaf.is_meta:
                assert LENGTH not in leaf.shape, func
                assert VOCABULARY not in leaf.shape or leaf.numel() <= 2 * TOKENS * VOCABULARY, func
        return out


def test_neither_hidden_states_nor_masks_nor_logits_of_all_tokens() -> None:
    model = made("gemma3, windows")
    with apply(model, STREAMED), NoWholeSequence():
        step(model)
    with pytest.raises(AssertionError, match="aten"), NoWholeSequence():
        step(model)


def test_a_weight_gets_one_gradient() -> None:
    model, calls = made("qwen3, tied"), []
    for item in model.parameters():
        item.register_post_accumulate_grad_hook(lambda item: calls.append(id(item)))
    with apply(model, STREAMED):
        step(model)
    assert sorted(calls) == sorted(map(id, model.parameters()))


def test_what_is_short_or_without_gradients_runs_whole() -> None:
    model = made()
    short = {name: item[:, :TOKENS] for name, item in data().items()}
    loss, expected = step(model, **short)
    with torch.no_grad():
        logits = model(**data()).logits
    with apply(model, STREAMED) as applied:
        short_loss, found = step(model, **short)
        with torch.no_grad():
            assert torch.equal(model(**data()).logits, logits)
        assert applied.stats().offloads == 0
        outputs = model(**data())
        assert not hasattr(outputs.logits, "shape")
        assert applied.stats().offloads > 0
        assert isinstance(model(**data(), return_dict=False)[0], nn.Parameter | torch.Tensor)
    assert torch.equal(short_loss, loss)
    assert all(torch.equal(found[name], one) for name, one in expected.items())
