"""The model structure of a compiled model is that of the same model, and making it compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_actswap import PlanError, load_config, model_structure, resolve_plan
from hf_actswap.plan.opnames import function_name
from hf_actswap.plan.wrappers import checkpoints_its_call

MakeModel = Callable[..., Any]


@pytest.fixture
def compiling() -> Callable[..., Any]:
    """A backend that fails the test if anything is compiled."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise AssertionError("the model structure compiled something")

    return backend


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "mixtral"])
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_layers(
    family: str, in_place: bool, tiny_model: MakeModel, compiling: Callable[..., Any]
) -> None:
    """Catches wrappers in op paths, and attention that is not found behind them."""
    model = tiny_model(family)
    eager = model_structure(model)
    layers = model.get_submodule(eager.layers[0].module_path.rpartition(".")[0])
    for index, layer in enumerate(list(layers)):
        if in_place:
            layer.compile(backend=compiling)
        else:
            layers[index] = torch.compile(layer, backend=compiling)
    found = model_structure(model)
    assert found.functions_known, found.why_not
    assert found == replace(eager, layers=tuple(replace(layer, compiled=True) for layer in eager.layers))
    wrapped = [type(model.get_submodule(layer.module_path)).__name__ for layer in found.layers]
    assert all((name == "OptimizedModule") != in_place for name in wrapped)


def test_regional_compilation_of_accelerate(tiny_model: MakeModel, compiling: Callable[..., Any]) -> None:
    """Embedding, norm and head are compiled there, too, each by itself."""
    compile_regions = pytest.importorskip("accelerate.utils").compile_regions
    model = tiny_model("llama")
    eager = model_structure(model)
    found = model_structure(compile_regions(model, backend=compiling))
    assert found == replace(eager, layers=tuple(replace(layer, compiled=True) for layer in eager.layers))


def test_compiled_model(tiny_model: MakeModel, compiling: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    eager = model_structure(model)
    assert not eager.compiled
    whole = replace(eager, compiled=True)
    assert model_structure(torch.compile(model, backend=compiling)) == whole
    model.compile(backend=compiling)
    assert model_structure(model) == whole


def test_compiled_module_around_the_layers(tiny_model: MakeModel, compiling: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    eager = model_structure(model)
    model.model = torch.compile(model.model, backend=compiling)
    found = model_structure(model)
    assert found.functions_known, found.why_not
    assert found.compiled
    assert [layer.module_path for layer in found.layers] == [f"model._orig_mod.layers.{i}" for i in (0, 1)]
    assert [layer.calls for layer in found.layers] == [layer.calls for layer in eager.layers]
    assert not any(layer.compiled for layer in found.layers)


def test_compiled_module_inside_a_layer(tiny_model: MakeModel, compiling: Callable[..., Any]) -> None:
    model = tiny_model("mixtral")
    eager = model_structure(model)
    for layer in model.model.layers:
        layer.mlp.experts = torch.compile(layer.mlp.experts, backend=compiling)
        layer.mlp = torch.compile(layer.mlp, backend=compiling)
        layer.self_attn = torch.compile(layer.self_attn, backend=compiling)
    found = model_structure(model)
    assert found.functions_known, found.why_not
    assert found == eager


def test_the_model_is_still_compiled_afterwards(tiny_model: MakeModel) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    mlp.compile(backend=backend)
    model_structure(model)
    assert graphs == []
    mlp(torch.ones(1, 2, 16))
    assert len(graphs) == 1


def nodes_of_layers(model: nn.Module, paths: list[str]) -> list[int]:
    """How many autograd nodes each layer creates in a real forward."""
    number = torch._C._autograd._get_sequence_nr
    ends: list[int] = []
    handles = []
    for layer in map(model.get_submodule, paths):
        handles.append(layer.register_forward_pre_hook(lambda *_: ends.append(-number())))
        handles.append(layer.register_forward_hook(lambda *_: ends.append(number())))
    model(input_ids=torch.full((2, 12), 5), use_cache=False)
    for handle in handles:
        handle.remove()
    return [start + end for start, end in zip(ends[::2], ends[1::2], strict=True)]


@pytest.mark.parametrize("trained", ["everything", "factors", "factors and inputs", "head", "nothing"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "gemma2"])
def test_nodes_are_those_of_an_eager_layer(family: str, trained: str, tiny_model: MakeModel) -> None:
    model = tiny_model(family)
    model.requires_grad_(trained == "everything")
    if trained.startswith("factors"):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1" in name and ("q_proj" in name or "query_key_value" in name))
    if trained == "factors and inputs":
        model.enable_input_require_grads()
    if trained == "head":
        model.get_output_embeddings().requires_grad_(True)
    shape = model_structure(model)
    expected = nodes_of_layers(model, [layer.module_path for layer in shape.layers])
    with torch.no_grad():
        recorded_without_grad = model_structure(model)
    assert [layer.nodes for layer in shape.layers] == expected
    assert recorded_without_grad == shape
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (max(expected) > 10) == (trained not in ("nothing", *(() if tied else ("head",))))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_nodes_around_routed_experts_are_counted(family: str, tiny_model: MakeModel) -> None:
    """More than without gradients in the stand-in, not more than with the experts' own."""
    model = tiny_model(family)
    shape = model_structure(model)
    real = nodes_of_layers(model, [layer.module_path for layer in shape.layers])
    assert all(real[layer.index] >= layer.nodes > 30 for layer in shape.layers)


def test_overloads_of_an_operator_have_its_name() -> None:
    assert function_name(torch.ops.aten.mul.Tensor) == "mul"
    assert function_name(torch.ops.aten.mul_.Scalar) == "mul"
    assert function_name(torch.ops.aten.relu.default) == "relu"
    assert function_name(torch.Tensor.__rmul__) == "mul"


def test_grouped_heads_are_not_repeated_as_no_real_forward_does(tiny_model: MakeModel) -> None:
    """Catches the attention mask that transformers builds when it cannot read positions."""
    model = tiny_model("llama")
    config = model.config
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 4
    model = type(model)(config).train()
    shape = model_structure(model)
    assert "self_attn.reshape" not in {op.path for op in shape.layers[0].ops}
    assert [layer.nodes for layer in shape.layers] == nodes_of_layers(
        model, [layer.module_path for layer in shape.layers]
    )


@pytest.mark.parametrize("reentrant", [False, True])
def test_nodes_under_gradient_checkpointing(reentrant: bool, tiny_model: MakeModel) -> None:
    """A reentrant checkpoint is one node, as it is in a real forward; around hooks it is outside."""
    model = tiny_model("llama")
    eager = [layer.nodes for layer in model_structure(model).layers]
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    seen = 0 if checkpoints_its_call(model.model.layers[0]) else 1
    assert [layer.nodes for layer in model_structure(model).layers] == ([seen, seen] if reentrant else eager)


@pytest.mark.parametrize("whole", [False, True], ids=["layers", "model"])
def test_swap_beside_cuda_graphs_is_rejected(whole: bool, tiny_model: MakeModel) -> None:
    """Catches swaps of what a CUDA graph reads at a fixed address."""
    model = tiny_model("llama")
    for module in [model] if whole else model.model.layers:
        module.compile(mode="reduce-overhead")
    shape = model_structure(model)
    config = load_config({"swap_config": {"swap": True}})
    with pytest.raises(PlanError, match="max-autotune-no-cudagraphs"):
        resolve_plan(config, shape)
    resolve_plan(load_config({}), shape)
