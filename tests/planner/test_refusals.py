"""What the planner rejects before the first step: each with the words that say what to do."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from hf_actswap.plan import model_structure
from hf_actswap.planner import start
from hf_actswap.planner.start import COUNTING_ALLOCATORS, allocator_name, problems_of_planner
from hf_actswap.releases import checkpointing_argument

MODES = ("smart_swap", "adaptive")


def llama() -> LlamaForCausalLM:
    """Three layers, in training."""
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        vocab_size=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def switch_on(model: LlamaForCausalLM, function: Any, every: int = 1) -> None:
    """Gradient checkpointing, as the model's own methods (renamed in transformers 5.23) leave it."""
    for index, layer in enumerate(model.model.layers):
        layer.gradient_checkpointing, layer._gradient_checkpointing_func = index % every == 0, function


def problems(model: nn.Module, mode: str) -> list[str]:
    found = problems_of_planner(model, model_structure(model), mode)  # type: ignore[arg-type]
    return [str(problem) for problem in found]


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_in_the_way_of_a_plain_model(mode: str) -> None:
    assert problems(llama(), mode) == []


@pytest.mark.parametrize(("every", "layers"), [(1, "0-2"), (2, "0, 2")])
def test_gradient_checkpointing_beside_adaptive(every: int, layers: str) -> None:
    model = llama()
    switch_on(model, functools.partial(checkpoint, use_reentrant=False), every)
    assert problems(model, "smart_swap") == []
    (problem,) = problems(model, "adaptive")
    assert problem.startswith("memory.mode: expected gradient checkpointing switched off beside adaptive")
    assert f"found it switched on in layers {layers}. Write {checkpointing_argument()}=False" in problem
    switch_on(model, checkpoint, every=99)
    model.model.layers[0].gradient_checkpointing = False
    assert problems(model, "adaptive") == []


def test_the_trainers_way_of_switching_it_on() -> None:
    model = llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.23
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert "in layers 0-2" in problems(model, "adaptive")[0]


def test_checkpoint_wrappers_beside_adaptive() -> None:
    model = llama()
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    (problem,) = problems_of_planner(model, model_structure(llama()), "adaptive")
    assert problem.found == "it switched on in layers 1"


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (functools.partial(checkpoint, use_reentrant=True), "use_reentrant=True"),
        (lambda function, *values: function(*values), "offload=True or a function of its own"),
    ],
)
def test_checkpoints_that_swap_cannot_see_beside_smart_swap(function: Any, words: str) -> None:
    model = llama()
    switch_on(model, function)
    (problem,) = problems(model, "smart_swap")
    assert words in problem


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["pluggable", "something_new"])
def test_a_foreign_allocator(mode: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "allocator_name", lambda _: name)
    (problem,) = problems(llama(), mode)
    assert problem.startswith("memory.mode: expected an allocator of PyTorch beside the planner")
    assert f"found '{name}'" in problem
    assert "change_current_allocator" in problem


@pytest.mark.parametrize("name", COUNTING_ALLOCATORS)
def test_allocators_that_count_are_welcome(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "allocator_name", lambda _: name)
    assert problems(llama(), "adaptive") == []


def test_the_allocators_name_is_asked_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert allocator_name(torch.device("cpu")) == "native"
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "pluggable")
    assert allocator_name(torch.device("cuda")) == "pluggable"


def test_an_allocator_without_a_name_is_asked_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 0)
    assert allocator_name(torch.device("xpu")) == "native"

    def reject(device: torch.device) -> int:
        raise RuntimeError("XPUPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(torch.accelerator, "memory_allocated", reject)
    assert allocator_name(torch.device("xpu")) == "pluggable"


@pytest.mark.parametrize("variable", ["PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"])
def test_no_caching_on_an_accelerator(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "allocator_name", lambda _: "native")
    monkeypatch.setenv(variable, "1")
    model = llama()
    shape = model_structure(model)
    with FakeTensorMode():
        model.model.embed_tokens.weight = nn.Parameter(torch.empty(32, 16, device="cuda"))
    (problem,) = problems_of_planner(model, shape, "adaptive")
    assert problem.found == f"{variable}=1 in the environment"
    assert problems(llama(), "adaptive") == []
    monkeypatch.setenv(variable, "0")
    assert problems_of_planner(model, shape, "adaptive") == []
    monkeypatch.delenv(variable)
    assert problems_of_planner(model, shape, "adaptive") == []


def test_threads_instead_of_processes() -> None:
    model = nn.DataParallel(llama())
    (problem,) = problems(model, "smart_swap")
    assert problem.startswith("model: expected one process per device, found nn.DataParallel.")


def test_all_problems_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "allocator_name", lambda _: "pluggable")
    model = llama()
    switch_on(model, functools.partial(checkpoint, use_reentrant=False))
    assert len(problems(nn.DataParallel(model), "adaptive")) == 3
