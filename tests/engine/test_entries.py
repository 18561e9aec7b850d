"""Training loops that call a part of the model themselves: the plan acts as if they called the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from hf_actswap import apply, load_config
from hf_actswap.engine.hook_wrappers import entries
from hf_actswap.plan import model_structure
from tests.engine.tiny_models import assert_bitwise_equal, batch, gradients, snapshot, tiny_llama

SWAP = {"swap": True, "layer_swap": [{"backward_prefetch": 4, "layers": True}]}
CONFIGS: dict[str, dict[str, Any]] = {
    "swap": {"swap_config": SWAP, "memory": {"min_tensor_mib": 1e-6}},
    "layers": {"recompute_config": {"recompute": True}},
    "ops": {"recompute_config": {"select_recompute": {"feed_forward": True}}},
}


def adapted() -> nn.Module:
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    return model.train()


def encoder_decoder() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, num_layers=3, **sizes)).train()


def loss_of(hidden: torch.Tensor, head: nn.Module) -> torch.Tensor:
    return F.cross_entropy(head(hidden)[:, :-1].flatten(0, 1), batch(0)[:, 1:].flatten())


def decoder_and_head(model: Any) -> torch.Tensor:
    return loss_of(model.model(input_ids=batch(0), use_cache=False).last_hidden_state, model.lm_head)


def whole(model: Any) -> torch.Tensor:
    hidden = model.model(input_ids=batch(0), use_cache=False).last_hidden_state
    return loss_of(hidden, model.lm_head) + model(input_ids=batch(0), labels=batch(0)).loss


def inside_peft(model: Any) -> torch.Tensor:
    base = model.get_base_model()
    return loss_of(base.model(input_ids=batch(0), use_cache=False).last_hidden_state, base.lm_head)


def base_of_peft(model: Any) -> torch.Tensor:
    return model.get_base_model()(input_ids=batch(0), labels=batch(0)).loss


def both_stacks(model: Any) -> torch.Tensor:
    hidden = model.encoder(input_ids=batch(0)).last_hidden_state
    decoded = model.decoder(input_ids=batch(1), encoder_hidden_states=hidden, use_cache=False)
    return loss_of(decoded.last_hidden_state, model.lm_head)


LOOPS = {
    "decoder and head": (tiny_llama, decoder_and_head, 4),
    "decoder, then the model": (tiny_llama, whole, 8),
    "decoder inside an adapter": (adapted, inside_peft, 4),
    "model inside an adapter": (adapted, base_of_peft, 4),
    "encoder, then decoder": (encoder_decoder, both_stacks, 3),
}


@pytest.mark.parametrize("plan", CONFIGS)
@pytest.mark.parametrize(("make", "loop", "layers"), LOOPS.values(), ids=list(LOOPS))
def test_the_plan_acts(
    make: Callable[[], nn.Module], loop: Callable[[Any], torch.Tensor], layers: int, plan: str
) -> None:
    model, plain = make(), make()
    before = snapshot(model)
    applied = apply(model, load_config(CONFIGS[plan]))
    for _ in range(3):  # the third is by cached traces
        model.zero_grad(), plain.zero_grad()
        loss, expected = loop(model), loop(plain)
        loss.backward(), expected.backward()
        assert torch.equal(loss, expected)
        assert_bitwise_equal(gradients(model), gradients(plain))
    stats = applied.stats()
    if plan == "swap":
        assert stats.offloads >= 3 * layers
    else:
        assert stats.recomputes >= 3 * layers
    applied.remove()
    assert snapshot(model) == before


def test_the_planner_counts_calls_of_the_decoder() -> None:
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    config = load_config({"memory": {"mode": "adaptive", "budget_gib": 4, "warmup_steps": 2}})
    with apply(model, config, optimizer=optimizer) as planner:
        for _ in range(4):
            decoder_and_head(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert planner.phase != "warm-up"


def layers_alone(model: Any) -> torch.Tensor:
    hidden = model.model.embed_tokens(batch(0))
    rotary = model.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
    for layer in model.model.layers:
        hidden = layer(hidden, position_embeddings=rotary)
    return hidden.sum()


def test_the_planner_says_that_it_sees_no_forward(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with apply(model, load_config({"memory": {"mode": "adaptive", "budget_gib": 4}}), optimizer=optimizer):
        for _ in range(4):
            layers_alone(model).backward()
            optimizer.step()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message for message in said if "was called with gradients" in message] == said
    assert len(said) == 1


def test_layers_recomputed_whole_may_be_called_by_themselves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_llama()
    with apply(model, load_config({"recompute_config": {"recompute": True}})) as applied:
        layers_alone(model).backward()
        assert applied.stats().recomputes == len(model.model.layers)
    assert not [record for record in caplog.records if "is called by itself" in record.getMessage()]


def test_a_layer_called_by_itself_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    with apply(model, load_config(CONFIGS["swap"])):
        layers_alone(model).backward()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1
    assert "model.layers.0 is called by itself, not by the model" in said[0]


def test_entries() -> None:
    model = adapted()
    inside = model.get_base_model()
    assert entries(model, model_structure(model)) == [model, model.base_model, inside, inside.model]
