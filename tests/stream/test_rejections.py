"""What cannot be streamed is named before anything runs; what is put on a model comes off."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    BertConfig,
    BertLMHeadModel,
    Data2VecTextConfig,
    Data2VecTextForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    XmodConfig,
    XmodForCausalLM,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_actswap import MemoryPlan, PlanError, apply, load_config, model_structure, resolve_plan
from hf_actswap.cli.subject import rank_0_of
from hf_actswap.plan.actions import SequenceChunks
from hf_actswap.planner.oom_guard import DeviceMemoryError
from hf_actswap.report import plan_table
from hf_actswap.stream import two_passes
from hf_actswap.stream.two_passes import auto_tokens
from tests.stream.streamed_models import IGNORED, LENGTH, SIZES, STREAMED, data, furthest, made, step


def checkpointed() -> Any:
    model = made()
    model.gradient_checkpointing_enable()
    return model


def with_loss_of_its_own() -> Any:
    model = made()
    model.loss_function = lambda *_, **__: torch.zeros(())
    return model


_EXPERTS = {**SIZES, "num_local_experts": 4}
_SMALL_OPT = {
    **{"vocab_size": 100, "hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32},
    **{"num_attention_heads": 4, "num_hidden_layers": 2},
}
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "linear attention": (
        lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**{**SIZES, "num_hidden_layers": 4}, head_dim=8)),
        "layers of another kind: linear_attention",
    ),
    "state space": (
        lambda: JambaForCausalLM(
            JambaConfig(
                **SIZES, num_experts=2, use_mamba_kernels=False, attn_layer_offset=1, attn_layer_period=2
            )
        ),
        "layers of another kind",
    ),
    "balancing loss": (
        lambda: MixtralForCausalLM(MixtralConfig(**_EXPERTS, output_router_logits=True)),
        "a balancing loss over the whole batch",
    ),
    "bidirectional": (
        lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, use_bidirectional_attention=True)),
        "one whose tokens see later ones",
    ),
    "encoder and decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=100, d_model=32, d_ff=32, num_layers=2, d_kv=8)
        ),
        "an encoder and a decoder",
    ),
    "attention dropout": (
        lambda: GPTNeoXForCausalLM(
            GPTNeoXConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, attention_dropout=0.1)
        ),
        "config.attention_dropout 0, found 0.1",
    ),
    "sinks": (
        lambda: GptOssForCausalLM(GptOssConfig(**_EXPERTS, head_dim=8)),
        "queries, keys and values alone, found attention with `s_aux`",
    ),
    "layers left out at random": (
        lambda: OPTForCausalLM(OPTConfig(**_SMALL_OPT, layerdrop=0.1)),
        "config.layerdrop 0, found 0.1",
    ),
    "gradient checkpointing": (checkpointed, "gradient checkpointing on"),
    "another loss": (with_loss_of_its_own, "the loss function <lambda>"),
    "an encoder": (
        lambda: BertLMHeadModel(BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)),
        "(?s)one whose tokens see later ones.*config.attention_probs_dropout_prob 0",
    ),
    "rotation by length": (
        lambda: made(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "one that depends on the length of the sequence",
    ),
    "prompts": (
        lambda: get_peft_model(made(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
        "PEFT's prompt learning",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, found = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    with pytest.raises(PlanError, match=found):
        apply(model, STREAMED)
    assert "_call_impl" not in vars(model)


def test_all_reasons_at_once() -> None:
    model = MixtralForCausalLM(MixtralConfig(**_EXPERTS, output_router_logits=True, attention_dropout=0.1))
    model.gradient_checkpointing_enable()
    with pytest.raises(PlanError) as error:
        apply(model, STREAMED)
    assert len(error.value.problems) == 3
    config = {**STREAMED, "memory": {"mode": "smart_swap"}}
    with pytest.raises(
        PlanError, match=r"(?s)a model that is not compiled.*memory\.mode: expected off or adaptive"
    ):
        resolve_plan(load_config(config), model_structure(torch.compile(made(), backend="eager")))


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "its layers"])
def test_compiled_models(whole: bool) -> None:
    model = made()
    if whole:
        model = torch.compile(model, backend="eager")
    else:
        for layer in model.model.layers:
            layer.compile(backend="eager")
    with pytest.raises(PlanError, match="a model that is not compiled"):
        apply(model, STREAMED)


_COUNTING = {
    "roberta": (RobertaForCausalLM, RobertaConfig),
    "xmod": (XmodForCausalLM, XmodConfig),
    "data2vec-text": (Data2VecTextForCausalLM, Data2VecTextConfig),
}
_ROBERTA = {
    **{name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
    **{"max_position_embeddings": LENGTH + 2, "is_decoder": True, "pad_token_id": 1, "bos_token_id": 0},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def made_roberta(family: str = "roberta") -> Any:
    torch.manual_seed(0)
    kind, config = _COUNTING[family]
    more = {"default_language": "en_XX"} if family == "xmod" else {}
    return kind(config(**_ROBERTA, **more)).train()


@pytest.mark.parametrize("family", _COUNTING)
def test_positions_that_a_model_counts_itself(family: str) -> None:
    """RoBERTa's begin behind the number of the padding token, and leave padding out."""
    model, given = made_roberta(family), data()
    given["input_ids"][0, 9:20] = given["input_ids"][1, 40:] = 1
    given["labels"] = given["labels"].where(given["input_ids"] != 1, IGNORED)
    loss, expected = step(model, **given)
    with apply(model, STREAMED):
        streamed_loss, found = step(model, **given)
    torch.testing.assert_close(streamed_loss, loss, rtol=3e-7, atol=0)
    assert furthest(found, expected) < 1e-5


def test_a_family_that_is_wrong_in_chunks_is_named_before_any_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few tokens show it: here positions from 0 for a model that begins at 2."""
    monkeypatch.setattr(two_passes, "positions_by_padding", lambda _, ids: torch.arange(ids.shape[1])[None])
    for dtype in (torch.float32, torch.bfloat16):
        model = made_roberta().to(dtype)
        before = torch.get_rng_state()
        with apply(model, STREAMED) as applied:
            with pytest.raises(PlanError, match=r"model \(roberta\) in chunks: .* hidden states that are"):
                model(**data())
            assert applied.stats().offloads == 0
        assert torch.equal(torch.get_rng_state(), before)
        assert all(item.grad is None for item in model.parameters())
        assert all(module.training for module in model.modules())


def test_a_model_that_reads_its_mask_is_named() -> None:
    model = DogeForCausalLM(DogeConfig(**SIZES, head_dim=8)).train()
    with (
        apply(model, STREAMED),
        pytest.raises(PlanError, match=r"model \(doge\) in chunks.*AttributeError.*Train it without"),
    ):
        model(**data())


def test_a_few_tokens_are_checked_once_for_each_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Any] = []
    own = two_passes.check_few_tokens

    def checked(root: Any, structure: Any, given: Any, *calls: Any) -> None:
        kinds.append(sorted(given))
        own(root, structure, given, *calls)

    monkeypatch.setattr(two_passes, "check_few_tokens", checked)
    model, seen = made(), []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    with apply(model, STREAMED):
        for given in ({}, {}, {"position_ids": _PLACES}, {"position_ids": _PACKED[None]}, {}):
            model(**data(), **given)
    usual, positions = ["input_ids", "labels"], ["input_ids", "labels", "position_ids"]
    assert kinds == [usual, positions, positions]
    assert seen == [False] * 5 * 4, "hooks see the chunks alone"


def test_a_layer_that_attends_by_itself_is_rejected_after_the_first_chunk() -> None:
    model = made()
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with apply(model, STREAMED), pytest.raises(PlanError, match=r"3 layers that call .* calls by 2"):
        model(**data())
    attention.layer_idx = 0
    del attention.forward
    with apply(model, STREAMED), pytest.raises(PlanError, match="two in layer 0"):
        model(**data())


_IDS = data()["input_ids"]
_PLACES = torch.arange(LENGTH).expand(2, -1)
_PACKED = torch.cat([torch.arange(20), torch.arange(30)])
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no labels": ({"labels": None}, "label_smoothing_factor"),
    "embeddings": ({"input_ids": None, "inputs_embeds": torch.zeros(2, LENGTH, 32)}, "inputs_embeds"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states"),
    "some logits": ({"logits_to_keep": 5}, "logits_to_keep"),
    "packed otherwise in each row": (
        {"position_ids": torch.stack([_PACKED, torch.arange(LENGTH)])},
        "the same documents in each row",
    ),
    "packed and masked": (
        {"position_ids": _PACKED[None], "attention_mask": torch.ones(2, LENGTH)},
        "none beside packed documents",
    ),
    "positions of three axes": ({"position_ids": torch.zeros(3, 2, LENGTH)}, "a position for each token"),
    "left padding": ({"attention_mask": _PLACES > 3}, "padding on the right"),
    "labels on padding": (
        {"attention_mask": _PLACES < 30},
        "the attention mask is 0",
    ),
    "a mask of pairs": ({"attention_mask": torch.ones(2, 1, LENGTH, LENGTH)}, "one number per token"),
    "a cache": ({"past_key_values": object()}, "past_key_values"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    given, found = CALLS[name]
    model = made()
    with apply(model, STREAMED) as applied:
        with pytest.raises(PlanError, match=found):
            model(**{**data(), **given})
        assert applied.stats().offloads == 0


def test_all_reasons_of_a_call_at_once() -> None:
    model = made()
    with apply(model, STREAMED), pytest.raises(PlanError) as error:
        model(
            input_ids=_IDS, position_ids=torch.zeros(3, 2, LENGTH), output_attentions=True, return_dict=True
        )
    assert len(error.value.problems) == 3


READS: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda logits: logits.shape,
    "a slice": lambda logits: logits[..., :-1, :],
    "a method": lambda logits: logits.argmax(-1),
    "a function": lambda logits: torch.argmax(logits, -1),
    "a loss": lambda logits: torch.nn.functional.cross_entropy(logits, torch.zeros(2, dtype=torch.long)),
    "a quotient": lambda logits: logits / 0.5,
    "a product with a tensor": lambda logits: torch.ones(2) * logits,
}


def test_logits_that_are_read_are_named() -> None:
    model = made()
    with apply(model, STREAMED):
        output = model(**data())
        for read in READS.values():
            with pytest.raises(PlanError, match="only the loss of a streamed call is read, found its logits"):
                read(output.logits)
        assert getattr(output.logits, "dtype", None) is None
        assert torch.equal(copy.copy(output).loss, output.loss)


@pytest.mark.parametrize("written", ["input_ids", "shift_labels", "position_ids"])
def test_inputs_written_between_forward_and_backward_are_noticed(written: str) -> None:
    ids = data()["input_ids"]
    given = {**data(), "shift_labels": ids.roll(-1, 1), "position_ids": _PLACES.clone()}
    model = made()
    with apply(model, STREAMED):
        loss = model(**given).loss
        given[written][0, 3] = 5
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert all(item.grad is None for item in model.parameters())


@pytest.mark.parametrize("which", ["first_pass", "second_pass"])
def test_running_out_of_memory_says_what_needs_less(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 4.00 GiB.")

    model = made()
    said = f"sequence of {LENGTH} tokens ran out of device memory in chunks of 16.*Tried to allocate 4.00 GiB"
    with apply(model, STREAMED):
        step(model)  # with the check of a few tokens
        monkeypatch.setattr(two_passes._Sequence, which, full)
        with pytest.raises(DeviceMemoryError, match=said):
            model(**data()).loss.backward()


def test_a_loss_that_a_hook_collects_is_an_error_in_the_first_backward() -> None:
    model, losses, seen = made(), [], []
    hook = model.model.layers[1].register_forward_hook(lambda *of: losses.append(of[2].square().mean()))
    model.model.layers[1].register_forward_hook(lambda *of: seen.append(of[2].detach().square().mean()))
    with apply(model, STREAMED):
        loss = model(**data()).loss + sum(losses)
        with pytest.raises(PlanError, match="a hook that collects an auxiliary loss, or stores outputs"):
            loss.backward()
        assert all(item.grad is None for item in model.parameters())
        hook.remove()
        losses.clear()
        _, found = step(model)
        assert len(found) == len([*model.parameters()])
    assert seen, "a hook that detaches what it stores is none of these"


def test_removed_it_is_the_model_that_it_was() -> None:
    model = made()
    before, settings = dict(vars(model)), copy.deepcopy(model.config.to_dict())
    loss, expected = step(model)
    applied = apply(model, STREAMED)
    step(model)
    applied.remove()
    assert vars(model).keys() == before.keys()
    assert model.config.to_dict() == settings
    assert model.config._attn_implementation == "sdpa"
    for names in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        assert "hf_actswap_streamed" not in names
    again, found = step(model)
    assert torch.equal(again, loss)
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    model = made()
    fails = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with apply(model, STREAMED) as applied:
        with pytest.raises(ZeroDivisionError):
            model(**data())
        assert model.config._attn_implementation == "sdpa"
        assert "hf_actswap_streamed" not in ALL_ATTENTION_FUNCTIONS
        fails.remove()
        loss, _ = step(model)
        fails = model.model.layers[1].register_forward_pre_hook(
            lambda *_: 1 / 0 if torch.is_grad_enabled() else None
        )
        with pytest.raises(ZeroDivisionError):
            step(model)
        assert model.config._attn_implementation == "sdpa"
        fails.remove()
        assert applied.stats().host_bytes == 0
        assert torch.equal(step(model)[0], loss)


@pytest.mark.parametrize("sharded", ["before", "after"])
def test_sharded_weights(sharded: str) -> None:
    model = made()
    with rank_0_of(2), ExitStack() as applied:
        if sharded == "after":
            applied.enter_context(apply(model, STREAMED))
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        with pytest.raises(PlanError, match="whole weights on each rank"):
            apply(model, STREAMED) if sharded == "before" else model(**data())


def test_a_copy_of_the_model_is_not_streamed() -> None:
    model = made()
    _, expected = step(model)
    with apply(model, STREAMED) as applied:
        model.zero_grad()
        other = copy.deepcopy(model)
        _, found = step(other)
        assert applied.stats().offloads == 0
    assert furthest(found, expected) < 1e-6


def test_in_a_pipeline_it_is_rejected() -> None:
    model = made()
    pipeline = {"parallel_config": {"pipeline_stage": 2, "schedule": "1f1b"}}
    with pytest.raises(PlanError, match=r"no parallel_config\.schedule"):
        resolve_plan(load_config({**STREAMED, **pipeline}), model_structure(model))


def test_the_plan_says_it() -> None:
    model, config = made(), load_config({"stream_config": {"tokens": "auto"}})
    plan = resolve_plan(config, model_structure(model))
    assert plan.streamed == SequenceChunks()
    assert plan.fate(1) == "recompute"
    assert MemoryPlan.from_json(plan.to_json()) == plan
    assert '"streamed"' not in MemoryPlan((), 3).to_json()
    written = resolve_plan(load_config(STREAMED), model_structure(model))
    assert "chunks of 16 tokens" in plan_table(written)
    assert "chunks (auto)" in plan_table(plan)
    summed = {"stream_config": {"tokens": 16, "grad_accum_dtype": "bf16"}}
    halved = resolve_plan(load_config(summed), model_structure(model))
    assert "chunks of 16 tokens, gradients summed in bf16" in plan_table(halved)
    assert MemoryPlan.from_json(halved.to_json()) == halved
    without = resolve_plan(
        load_config({"stream_config": {"grad_accum_dtype": "bf16"}}), model_structure(model)
    )
    assert [item.where for item in without.adjustments] == ["stream_config.grad_accum_dtype"]
    some = resolve_plan(
        load_config({**STREAMED, "recompute_config": {"select_recompute": ["mlp"]}}), model_structure(model)
    )
    assert [some.fate(1), some.fate(1, "mlp")] == ["keep", "recompute"]


def test_auto_is_by_heads() -> None:
    assert auto_tokens(32, 32) == 16_384
    assert auto_tokens(32, 8) == 4096
    assert auto_tokens(64, 2) == 2048


def test_a_call_of_the_decoder_alone_is_rejected() -> None:
    model = made("llama")
    with apply(model, {"stream_config": {"tokens": 8}}):
        ids = torch.zeros(2, LENGTH, dtype=torch.long)
        with pytest.raises(PlanError, match="a call of the model itself, found one of a part of it"):
            model.model(input_ids=ids)
        with torch.no_grad():
            model.model(input_ids=ids)
