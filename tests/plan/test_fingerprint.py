"""A plan file says for which model and batch it was made: another model is an error, another batch a line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import hf_actswap
from hf_actswap import MemoryPlan, PlanError
from hf_actswap.plan import PlanRow, Windows, fingerprint_of
from hf_actswap.plan.actions import Fingerprint
from hf_actswap.releases import of_a_step
from tests.engine.tiny_models import tiny

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS = (PlanRow(0, "", "recompute"), PlanRow(1, "output", "swap", windows=Windows(4, 12)))
BATCH = (2, 9)


def llama(**sizes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).train()


def file_of(folder: Path, made_for: Fingerprint | None) -> Path:
    """A plan's file, as the planner and `hf-actswap plan --save` write it, or without a fingerprint."""
    path = folder / "plan.json"
    path.write_text(MemoryPlan(ROWS, 2, "llama", fingerprint=made_for).to_json())
    return path


def step(model: Any, shape: tuple[int, int]) -> None:
    ids = torch.ones(shape, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()


def frozen() -> LlamaForCausalLM:
    model = llama()
    model.get_input_embeddings().requires_grad_(False)
    return model


OTHERS: dict[str, tuple[Any, str]] = {
    "hidden_size": (lambda: llama(hidden_size=64), "64, as in the model, found 32."),
    "intermediate_size": (lambda: llama(intermediate_size=40), "40, as in the model, found 48."),
    "vocab_size": (lambda: llama(vocab_size=70), "70, as in the model, found 67."),
    "num_attention_heads": (lambda: llama(num_attention_heads=2), "2, as in the model, found 4."),
    "num_key_value_heads": (lambda: llama(num_key_value_heads=1), "1, as in the model, found 2."),
    "dtype": (lambda: llama().bfloat16(), "bfloat16, as in the model, found float32."),
    "trained": (frozen, "a part, as in the model, found all."),
    "family": (lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)), "qwen2, as in the model, found llama."),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_is_rejected_by_what_differs(name: str, tmp_path: Path) -> None:
    make, said = OTHERS[name]
    path = file_of(tmp_path, fingerprint_of(llama(), BATCH))
    with pytest.raises(PlanError) as raised:
        hf_actswap.apply(make(), path)
    assert [problem.where for problem in raised.value.problems] == [f"plan.fingerprint.{name}"]
    assert f"expected {said}" in str(raised.value)
    assert "Make the plan anew for this model." in str(raised.value)


def test_the_same_model_in_other_clothes(tmp_path: Path) -> None:
    """Weights of `meta`, a wrapper, and facts that the file does not say."""
    with torch.device("meta"):
        made_for = fingerprint_of(llama(), BATCH)
    assert made_for == Fingerprint("llama", 32, 48, 67, 4, 2, "float32", "all", BATCH, of_a_step())
    path = file_of(tmp_path, made_for)
    hf_actswap.apply(llama(), path).remove()
    adapted = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(PlanError, match=r"fingerprint\.trained"):
        hf_actswap.apply(adapted, path)
    hf_actswap.apply(llama(hidden_size=64), file_of(tmp_path, Fingerprint(num_attention_heads=4))).remove()


def test_fsdp_shards_in_another_type_than_weights_compute_in(tmp_path: Path) -> None:
    """Under mixed precision Accelerate shards in fp32 what `hf-actswap plan` has planned in bf16."""
    path = file_of(tmp_path, fingerprint_of(llama().bfloat16(), BATCH))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        for dtype in (torch.bfloat16, None):
            model = fully_shard(llama(), mp_policy=MixedPrecisionPolicy(dtype))
            with nullcontext() if dtype else pytest.raises(PlanError, match=r"fingerprint\.dtype"):
                hf_actswap.apply(model, path).remove()
    finally:
        dist.destroy_process_group()


def test_another_batch_gets_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = file_of(tmp_path, fingerprint_of(llama(), BATCH))
    for shape, lines in ((BATCH, 0), ((1, 7), 1)):
        model = llama()
        caplog.clear()
        with caplog.at_level(logging.INFO), hf_actswap.apply(model, path):
            with torch.no_grad():
                model(input_ids=torch.ones(1, 3, dtype=torch.long))
            step(model, shape)
            step(model, (3, 4))
        said = "The plan was made for micro-batches of 2 x 9 tokens, and this one has 1 x 7"
        found = [record.getMessage() for record in caplog.records if "was made for" in record.getMessage()]
        assert len(found) == lines
        assert all(said in line for line in found)
        assert not model._forward_pre_hooks


def test_a_plan_that_does_not_say_it_is_applied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a line if it is of a file or a document; a plan that a program made says nothing."""
    path = file_of(tmp_path, None)
    assert "fingerprint" not in json.loads(path.read_text())
    for source, lines in ((path, 1), (json.loads(path.read_text()), 1), (MemoryPlan(ROWS, 2), 0)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            hf_actswap.apply(llama(), source).remove()
        assert caplog.text.count("The plan does not say for which model it was made") == lines


def test_a_plan_of_other_releases_is_applied_and_says_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made_for = fingerprint_of(llama(), BATCH)
    for made_with, lines in ((None, 0), (of_a_step(), 0), ("torch 2.11, transformers 5.17", 1)):
        caplog.clear()
        path = file_of(tmp_path, replace(made_for, made_with=made_with))
        with caplog.at_level(logging.INFO, logger="hf_actswap"):
            hf_actswap.apply(llama(), path).remove()
        said = f"The plan was made with torch 2.11, transformers 5.17, and this is {of_a_step()}: a step"
        assert caplog.text.count(said) == lines
        assert caplog.text.count("was made with") == lines


@pytest.mark.parametrize(
    ("made_for", "said"),
    [
        ({"hidden_size": "wide"}, "fingerprint.hidden_size"),
        ({"batch_shape": [2, -1]}, "fingerprint.batch_shape[1]: expected a whole number from 0 on"),
        ({"trained": "some"}, "fingerprint.trained"),
        ("llama", "fingerprint: expected"),
    ],
)
def test_a_malformed_fingerprint_is_an_error(made_for: Any, said: str) -> None:
    document = {**json.loads(MemoryPlan(ROWS, 2).to_json()), "fingerprint": made_for}
    with pytest.raises(PlanError) as raised:
        MemoryPlan.from_json(json.dumps(document))
    assert said in str(raised.value)


def test_it_is_read_back() -> None:
    plan = MemoryPlan(ROWS, 2, fingerprint=fingerprint_of(llama(), BATCH))
    assert MemoryPlan.from_json(plan.to_json()) == plan


def test_rows_that_name_nothing_in_the_model_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A file written by hand, or for another version of transformers."""
    model = llama()
    known = [op.path for op in hf_actswap.model_structure(model).layers[0].ops]
    swap = Windows(4, 12)
    real = tuple(PlanRow(0, path, "swap", windows=swap) for path in ("", "output", "mlp", *known))
    for rows, said in (
        (real, ""),
        (
            (*ROWS, *(PlanRow(layer, "mlp.silo", "swap", windows=swap) for layer in (0, 1))),
            "The plan names what the model does not have: mlp.silo (layers 0-1). These rows do nothing.",
        ),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="hf_actswap"):
            hf_actswap.apply(model, MemoryPlan(rows, 2, "llama")).remove()
        assert [record.getMessage() for record in caplog.records] == [said] * bool(said)


def test_what_only_long_sequences_run_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    """Beyond its window attention has a mask, and keys are repeated. The example is shorter than that."""
    model = tiny("Mistral", sliding_window=16, use_cache=False)
    assert "self_attn.reshape" not in {op.path for op in hf_actswap.model_structure(model).layers[0].ops}
    rows = (PlanRow(0, "self_attn.reshape", "swap", windows=Windows(4, 12)),)
    ids = torch.arange(64).reshape(1, 64)
    made_for = fingerprint_of(model, tuple(ids.shape))
    with caplog.at_level(logging.WARNING, logger="hf_actswap"):
        applied = hf_actswap.apply(model, MemoryPlan(rows, 4, "mistral", fingerprint=made_for))
    model(input_ids=ids, labels=ids).loss.backward()
    assert applied.stats().offloaded_bytes > 0
    applied.remove()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_rows_inside_routed_experts_are_not_missed(
    tiny_model: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The model's structure has them as one call, since fake tensors do not know which expert gets what."""
    rows = tuple(
        PlanRow(0, f"mlp.{path}", "swap", windows=Windows(4, 12))
        for path in ("experts._grouped_mm", "experts.act_fn.silu", "gate.grouped")
    )
    with caplog.at_level(logging.WARNING, logger="hf_actswap"):
        hf_actswap.apply(tiny_model("qwen3_moe"), MemoryPlan(rows, 2, "qwen3_moe")).remove()
    (said,) = (record.getMessage() for record in caplog.records)
    assert (
        said
        == "The plan names what the model does not have: mlp.gate.grouped (layers 0). These rows do nothing."
    )
