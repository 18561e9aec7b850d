"""Of a saved model each stage reads its own weights only, and has what the whole model has."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    LlamaForCausalLM,
    core_model_loading,
)

from hf_actswap import load_config, model_structure, stage_from_config, stage_from_pretrained
from hf_actswap.parallel.rank_agreement import parameters_fact
from hf_actswap.pipeline import PipelineError, StagedModel, check_cut
from hf_actswap.pipeline.stages import Entrance, layout_of
from tests.pipeline.staged_worker import tiny_model
from tests.pipeline.trainer_worker import pipeline, trainer_of
from tests.quick_cases import quick_first

STAGES = 3


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each tensor that transformers has read from files."""
    found: list[int] = []
    original = core_model_loading._materialize_copy

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = original(tensor, *args, **kwargs)
        found.append(copy.nbytes)
        return copy

    monkeypatch.setattr(core_model_loading, "_materialize_copy", counted)
    return found


def as_rank_of(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be one of the two ranks that hold a stage, in two pipelines."""
    monkeypatch.setenv("WORLD_SIZE", str(2 * STAGES))
    monkeypatch.setenv("RANK", str(2 * stage + stage % 2))


def opened(
    folder: Path, stage: int, monkeypatch: pytest.MonkeyPatch, kind: Any = AutoModelForCausalLM
) -> Any:
    as_rank_of(stage, monkeypatch)
    return stage_from_pretrained(kind, folder, pipeline(STAGES))


def held(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if not tensor.is_meta}


@pytest.mark.parametrize("family", quick_first(["mixtral", "tied", "llama", "granite", "gpt2"], 2))
def test_a_stage_reads_its_own_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: list[int]
) -> None:
    tiny_model(family, 6).save_pretrained(tmp_path, max_shard_size="40KB")
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    state, buffers, names = whole.state_dict(), dict(whole.named_buffers()), set[str]()
    for stage in range(STAGES):
        read_bytes.clear()
        model = opened(tmp_path, stage, monkeypatch)
        found, own = model.state_dict(keep_vars=True), held(model)
        assert type(model) is type(whole)
        assert list(found) == list(state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in own.items())
        own_bytes = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in own.values()}.values())
        assert sum(read_bytes) == own_bytes
        assert len(own) < 0.5 * len(found)
        layers = {int(name.split(".")[2]) for name in own if ".layers." in name or ".h." in name}
        assert layers == {2 * stage, 2 * stage + 1}
        assert all(b.is_meta or torch.equal(b, buffers[name]) for name, b in model.named_buffers())
        rotary = getattr(model.base_model, "rotary_emb", None)
        assert rotary is None or not rotary.inv_freq.is_meta
        assert not model.training
        assert parameters_fact(model) == parameters_fact(whole)
        names |= set(own)
    assert names == set(state)


@pytest.mark.parametrize("family", quick_first(["tied", "llama", "granite", "gpt2", "mixtral"], 1))
def test_a_stage_made_from_a_configuration_has_the_weights_of_one_process(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made_of = tiny_model(family, 6).config
    before = torch.get_rng_state()
    whole = stage_from_config(AutoModelForCausalLM, made_of, {}, seed=3)
    stock = AutoModelForCausalLM.from_config(made_of)
    state, buffers, names = whole.state_dict(), dict(stock.named_buffers()), set[str]()
    assert list(state) == list(stock.state_dict())
    for name, tensor in stock.named_parameters():
        torch.testing.assert_close(state[name].std(), tensor.std(), rtol=0.2, atol=1e-3)
        assert state[name].dtype == tensor.dtype
    for stage in range(STAGES):
        as_rank_of(stage, monkeypatch)
        torch.set_rng_state(before)
        model = stage_from_config(AutoModelForCausalLM, made_of, pipeline(STAGES), seed=3)
        assert torch.equal(torch.get_rng_state(), before)
        own = held(model)
        assert all(torch.equal(tensor, state[name]) for name, tensor in own.items())
        assert len(own) < 0.5 * len(state)
        assert all(b.is_meta or torch.equal(b, buffers[name]) for name, b in model.named_buffers())
        assert parameters_fact(model) == parameters_fact(stock)
        assert model.training
        assert not any("_init_weights" in vars(module) for module in model.modules())
        names |= set(own)
    assert names == set(state)
    assert "MISSING" not in caplog.text
    other = stage_from_config(AutoModelForCausalLM, made_of, {}, seed=4).state_dict()
    assert not torch.equal(next(iter(other.values())), next(iter(state.values())))


@pytest.mark.slow
def test_what_stays_in_fp32_and_what_is_trained_is_that_of_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates of Ernie are fp32 in a bf16 model, and its statistics, made frozen, are not so once loaded."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_attention_heads": 4,
    }
    config = Ernie4_5_MoeConfig(vocab_size=67, num_hidden_layers=6, moe_num_experts=4, moe_k=2, **sizes)
    Ernie4_5_MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for stage in range(STAGES):
        as_rank_of(stage, monkeypatch)
        model = stage_from_pretrained(AutoModelForCausalLM, tmp_path, pipeline(STAGES), dtype=torch.bfloat16)
        assert parameters_fact(model) == parameters_fact(whole)


def test_the_cut_is_proven_without_the_weights_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("granite", 6).save_pretrained(tmp_path)
    models = [opened(tmp_path, rank, monkeypatch) for rank in range(STAGES)]
    structure = model_structure(models[0])
    assert structure.functions_known
    layout = layout_of(structure, load_config(pipeline(STAGES)).parallel_config)

    def prove(rank: int) -> None:
        check_cut(StagedModel(models[rank], structure, layout, rank), nullcontext)

    for rank, model in enumerate(models):
        before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
        prove(rank)
        assert before == {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    monkeypatch.setattr(Entrance, "act", lambda _self, hidden: hidden)
    for rank in range(STAGES):
        with pytest.raises(PipelineError, match=r"model \(granite\) in a pipeline.*another loss and logits"):
            prove(rank)


def test_without_a_pipeline_all_is_opened(tmp_path: Path) -> None:
    tiny_model("llama", 4).save_pretrained(tmp_path)
    model = stage_from_pretrained(LlamaForCausalLM, tmp_path, {}, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert held(model).keys() == model.state_dict().keys()


def test_what_does_not_fit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("llama", 6).save_pretrained(tmp_path)
    with pytest.raises(PipelineError, match=r"device_map.*\n.*state_dict"):
        stage_from_pretrained(
            AutoModelForCausalLM, tmp_path, pipeline(2), device_map="auto", state_dict={1: 2}
        )
    with pytest.raises(PipelineError, match="at most 6, the layers of the model, found 7"):
        stage_from_pretrained(AutoModelForCausalLM, tmp_path, pipeline(7))
    model = opened(tmp_path, 0, monkeypatch, LlamaForCausalLM)
    monkeypatch.undo()
    with pytest.raises(PipelineError, match=r"model: expected all weights.*some on meta"):
        trainer_of(tmp_path / "out", 1, model=model)
