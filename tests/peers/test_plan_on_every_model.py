"""The plugin compares like with like: neither run has a key-value cache."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import CPTConfig, get_peft_model
from transformers import GPTJConfig, GPTJForCausalLM

from tests.peers.plan_on_every_model import PlanOnEveryModel

TYPES = {"cpt_mask": [1] * 8, "cpt_tokens_type_mask": [1, 2, 2, 2, 3, 3, 4, 4]}


def numbers_of(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return loss and gradients of GPT-J with a trained prompt, which rounds otherwise with a cache."""
    plugin = PlanOnEveryModel(plan, tmp_path / "record.json")
    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512, "rotary_dim": 4}
    gptj = GPTJForCausalLM(GPTJConfig(vocab_size=600, bos_token_id=0, eos_token_id=2, **shape))
    prompt = CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=list(range(8)), **TYPES)
    model = get_peft_model(gptj, prompt)
    ids = torch.tensor([[1, 1, 1], [1, 2, 1]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    monkeypatch.setattr(type(model), "__call__", plugin.wrap_call(type(model)))
    monkeypatch.setattr(torch.Tensor, "backward", plugin.wrap_backward())
    model(input_ids=ids, attention_mask=mask)[0].sum().backward()
    monkeypatch.undo()
    assert not gptj.config.use_cache
    for _, applied in plugin._models.values():
        if applied is not None:
            applied.remove()
    return plugin.numbers


@pytest.mark.parametrize("plan", ["swap", "auto"])
def test_the_numbers_without_a_plan_are_those_of_a_run_without_a_cache(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = numbers_of("none", tmp_path, monkeypatch)
    assert numbers_of(plan, tmp_path, monkeypatch) == without


def test_checkpointing_that_is_switched_on_later_gets_a_plan_without_recomputation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = PlanOnEveryModel("mix", tmp_path / "record.json")
    gptj = GPTJForCausalLM(GPTJConfig(vocab_size=60, n_embd=32, n_layer=2, n_head=4, rotary_dim=4))
    monkeypatch.setattr(GPTJForCausalLM, "__call__", plugin.wrap_call(GPTJForCausalLM))
    ids = torch.tensor([[1, 2, 1]])
    for switch in (gptj.train, gptj.gradient_checkpointing_enable, gptj.gradient_checkpointing_disable):
        switch()
        gptj(input_ids=ids, labels=ids).loss.backward()
    assert plugin.plans_applied == 3
    for _, applied in plugin._models.values():
        applied.remove()


def test_what_ran_is_recorded_if_the_run_is_ended_from_outside(tmp_path: Path) -> None:
    plugin = PlanOnEveryModel("none", tmp_path / "record.json")
    for when in ("setup", "call", "teardown"):
        report: Any = SimpleNamespace(when=when, outcome="passed", passed=True, nodeid="one")
        plugin.pytest_runtest_logreport(report)
    assert json.loads((tmp_path / "record.json").read_text())["one"]["outcome"] == "passed"


def test_a_resumed_run_leaves_out_what_is_recorded(tmp_path: Path) -> None:
    record = {"old": {"outcome": "passed", "why": "", "numbers": ["1.0 ab"], "plans": 1}}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    plugin = PlanOnEveryModel("swap", path)
    items: Any = [SimpleNamespace(nodeid="old"), SimpleNamespace(nodeid="new")]
    left_out: list[Any] = []
    config: Any = SimpleNamespace(
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
    )
    plugin.pytest_collection_modifyitems(config, items)
    assert [item.nodeid for item in items] == ["new"]
    assert [item.nodeid for item in left_out] == ["old"]
    report: Any = SimpleNamespace(when="call", outcome="failed", passed=False, nodeid="new", longrepr="E")
    plugin.pytest_runtest_logreport(report)
    plugin.write()
    assert json.loads(path.read_text()).keys() == {"old", "new"}
