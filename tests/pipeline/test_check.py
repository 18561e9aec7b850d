"""The cut is proven before the first step, and rejected by name where it would train another model."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from hf_actswap import PlanError, apply, load_config, model_structure, prepare, resolve_plan
from hf_actswap.config import ParallelConfig
from hf_actswap.errors import ConfigError
from hf_actswap.pipeline import PipelineError, StagedModel, check_cut
from hf_actswap.pipeline.runtime import problem_of_schedule, schedule_class
from hf_actswap.pipeline.stages import Entrance, PassThrough
from hf_actswap.plan import build_layout
from hf_actswap.plan.layout import PipelineLayout
from tests.pipeline.staged_worker import tiny_model

TWO_STAGES = PipelineLayout(((2, 2),))


def staged(model: nn.Module, layout: PipelineLayout = TWO_STAGES, stage: int = 0) -> StagedModel:
    return StagedModel(model, model_structure(model), layout, stage)


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "mixtral", "gpt2", "lora", "tied"])
def test_families_are_proven(family: str) -> None:
    model = tiny_model(family, 4)
    model.train()
    found = staged(model)
    check_cut(found, nullcontext)
    assert found.relay.hidden_size == 32
    assert all(module.training for module in model.modules())
    assert not any(isinstance(module, PassThrough) for module in model.modules())


def test_a_scale_of_embeddings_is_found_where_a_stage_applies_it_again(monkeypatch: Any) -> None:
    """Stages that enter by the embedding, as `inputs_embeds` does: right for Llama, wrong for Granite."""
    monkeypatch.setattr(Entrance, "act", lambda _self, hidden: hidden)
    check_cut(staged(tiny_model("llama", 4)), nullcontext)
    with pytest.raises(PipelineError, match=r"model \(granite\) in a pipeline.*another loss and logits"):
        check_cut(staged(tiny_model("granite", 4)), nullcontext)


def test_a_balancing_loss_over_stages_is_rejected() -> None:
    model: Any = tiny_model("mixtral", 4)
    model.config.output_router_logits = True
    with pytest.raises(PipelineError, match=r"model \(mixtral\) in a pipeline.*output_router_logits"):
        check_cut(staged(model), nullcontext)


def test_a_layer_that_reads_an_earlier_one_is_rejected() -> None:
    model: Any = tiny_model("llama", 4)
    kept: dict[str, torch.Tensor] = {}
    model.register_forward_pre_hook(lambda *_: kept.clear())
    model.model.layers[0].register_forward_hook(lambda _m, _a, output: kept.update(first=output))
    model.model.layers[3].register_forward_hook(lambda _m, _a, output: output + kept.get("first", 0))
    with pytest.raises(PipelineError, match="another loss and logits with layers 0 to 1, 2 to 3"):
        check_cut(staged(model), nullcontext)


def test_a_model_that_fails_in_a_stage_is_named() -> None:
    model: Any = tiny_model("llama", 4)
    original = model.model.forward

    def reads_a_weight(*args: Any, **kwargs: Any) -> Any:
        assert model.model.layers[0].mlp is not None
        return original(*args, **kwargs)

    model.model.forward = reads_a_weight
    with pytest.raises(PipelineError, match=r"layers range\(2, 4\) can be called alone.*AttributeError"):
        check_cut(staged(model), nullcontext)


def test_models_without_one_stack_are_rejected() -> None:
    sizes = {"d_model": 16, "d_ff": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "vocab_size": 11}
    t5 = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    with pytest.raises(PipelineError, match="expected one stack of layers"):
        staged(t5, PipelineLayout(((1, 1),)))


def test_an_encoder_alone_is_proven() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    bert = BertForMaskedLM(BertConfig(vocab_size=31, **sizes))
    check_cut(staged(bert), nullcontext)


def test_a_stage_without_layers() -> None:
    layout, problems = build_layout(4, ParallelConfig(pipeline_stage=2, offset=(-2, 2)))
    assert layout is not None, problems
    with pytest.raises(PipelineError, match="at least one layer on stage 0"):
        staged(tiny_model("llama", 4), layout)


def test_cut_frees_the_parts_of_other_stages_and_only_these() -> None:
    model: Any = tiny_model("tied", 4)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = staged(model, stage=1)
    check_cut(found, nullcontext)
    found.cut()
    names = {name for name, _ in model.named_parameters()}
    assert {name.split(".")[2] for name in names if "layers" in name} == {"2", "3"}
    with found.whole():
        on_meta = {name for name, tensor in model.named_parameters() if tensor.is_meta}
    assert on_meta == {name for name in whole if "layers.0." in name or "layers.1." in name}
    found.restore(whole)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in whole.items())


def test_plan_and_lines_of_a_stage() -> None:
    model = tiny_model("llama", 4)
    sections = {"recompute_config": {"recompute": [1, 2]}, "parallel_config": {"pipeline_stage": 2}}
    plan = resolve_plan(load_config(sections), model_structure(model))
    for stage, layers in enumerate(([0], [2, 3])):
        own = staged(model, stage=stage).plan_of_stage(plan)
        assert list(dict.fromkeys(row.scope for row in own.rows)) == layers
        told = [line for line in own.lines if " at layer " in line]
        assert told == [f"Set full recompute at layer {layer}" for layer in layers]
        assert "num_layers per stage: [[2, 2]]" in own.lines


def test_schedule_is_read_and_runs_under_our_trainer_alone() -> None:
    asked = {"parallel_config": {"pipeline_stage": 2, "schedule": "1f1b"}}
    assert load_config(asked).parallel_config.runs_pipeline
    assert not load_config({"parallel_config": {"pipeline_stage": 2}}).parallel_config.runs_pipeline
    with pytest.raises(PlanError, match=r"schedule: 1f1b \(a pipeline of 2 stages"):
        apply(tiny_model("llama", 4), asked)
    with pytest.raises(PipelineError, match=r"under hf_actswap.ActSwapTrainer, found hf_actswap.prepare"):
        prepare(Accelerator(cpu=True), tiny_model("llama", 4), asked)
    one = load_config({"parallel_config": {"pipeline_stage": 1, "schedule": "1f1b"}})
    plan = resolve_plan(one, model_structure(tiny_model("llama", 4)))
    assert [item.where for item in plan.adjustments] == ["parallel_config.schedule"]
    with pytest.raises(ConfigError, match="Did you mean 'gpipe'"):
        load_config({"parallel_config": {"pipeline_stage": 2, "schedule": "gpip"}})


@pytest.mark.parametrize(
    ("name", "count", "stages", "interleaves", "expected"),
    [
        ("gpipe", 4, 2, 1, "ScheduleGPipe"),
        ("gpipe", 4, 2, 2, "ScheduleLoopedBFS"),
        ("1f1b", 4, 2, 1, "Schedule1F1B"),
        ("1f1b", 1, 2, 1, "ScheduleGPipe"),
        ("interleaved_1f1b", 4, 2, 2, "ScheduleInterleaved1F1B"),
        ("interleaved_1f1b", 5, 2, 2, "ScheduleLoopedBFS"),
        ("zero_bubble", 4, 2, 1, "ScheduleInterleavedZeroBubble"),
        ("zero_bubble", 5, 2, 1, "ScheduleGPipe"),
    ],
)
def test_classes_of_schedules(name: Any, count: int, stages: int, interleaves: int, expected: str) -> None:
    assert schedule_class(name, count, stages, interleaves).__name__ == expected
    assert bool(problem_of_schedule(name, count, stages, interleaves)) == (count == 5)
