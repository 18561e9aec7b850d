"""The recorded forward leaves no trace in the model, in its hooks, or outside."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hf_actswap import apply, model_structure
from hf_actswap.releases import is_since
from tests.plan.stacked_models import gemma3

MakeModel = Callable[..., Any]
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@pytest.fixture
def called() -> list[str]:
    return []


@pytest.fixture
def global_hook(called: list[str]) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: called.append("global"))
    yield
    handle.remove()


def hooks_of(model: nn.Module) -> list[list[Any]]:
    return [list(vars(module)[name].items()) for module in model.modules() for name in HOOKS]


def test_no_hook_runs_and_all_are_back_in_order(
    tiny_model: MakeModel, called: list[str], global_hook: None
) -> None:
    model = tiny_model("llama")
    handles = []
    for module in (model, model.model.layers[0], model.model.layers[1].mlp.up_proj):
        handles += [
            module.register_forward_pre_hook(lambda *_: called.append("pre")),
            module.register_forward_hook(lambda *_: called.append("first")),
            module.register_forward_hook(lambda *_: called.append("always"), always_call=True),
            module.register_forward_hook(lambda *_: called.append("second"), prepend=True),
            module.register_full_backward_hook(lambda *_: called.append("backward")),
        ]
    before = hooks_of(model)
    shape = model_structure(model)
    assert shape.functions_known, shape.why_not
    assert called == []
    assert hooks_of(model) == before
    model.model.layers[1].mlp.up_proj(torch.ones(1, 16))
    assert called == ["pre", "global", "second", "first", "always"]
    for handle in handles:
        handle.remove()
    assert not any(hooks_of(model))


class Widening:
    """Two hooks of one object, registered as its methods."""

    def __init__(self, called: list[str]) -> None:
        self._say = called.append  # not the list: a dry run puts lists in the model's objects back

    def before(self, *_: Any) -> None:
        self._say("before")

    def behind(self, *_: Any) -> None:
        self._say("behind")


class WideningOfTheModel(Widening):
    part_of_the_model = True


@pytest.mark.parametrize("kind", [Widening, WideningOfTheModel])
def test_methods_of_an_object_that_is_part_of_the_model_run(
    tiny_model: MakeModel, called: list[str], kind: type[Widening]
) -> None:
    """A module that is not divided gathers its input, and cuts its output, by such hooks."""
    model, hooks = tiny_model("llama"), kind(called)
    model.model.layers[0].register_forward_pre_hook(hooks.before)
    model.model.layers[0].register_forward_hook(hooks.behind)
    before = hooks_of(model)
    assert model_structure(model).functions_known
    assert set(called) == ({"before", "behind"} if kind is WideningOfTheModel else set())
    assert hooks_of(model) == before


def test_hooks_are_back_after_an_error(tiny_model: MakeModel, called: list[str]) -> None:
    model = tiny_model("llama")
    model.register_forward_hook(lambda *_: called.append("after"))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    model.model.norm.forward = fail
    before = hooks_of(model)
    shape = model_structure(model)
    assert shape.why_not == "ZeroDivisionError: on purpose"
    assert hooks_of(model) == before


def test_a_model_that_installs_a_hook_in_its_first_call_installs_it_again(tiny_model: MakeModel) -> None:
    """Catches routers whose logits transformers never collects again: it marks the model as done."""
    model = tiny_model("mixtral")
    model.config.output_router_logits = True
    first, second = model_structure(model), model_structure(model)
    assert first.functions_known, first.why_not
    assert first == second
    output = model(input_ids=torch.full((2, 12), 5), labels=torch.full((2, 12), 5))
    assert len(output.router_logits) == 2
    assert output.aux_loss > 0


def test_generators_of_python_and_numpy_go_on_as_without(tiny_model: MakeModel) -> None:
    """Catches other dropped layers, or another SpecAugment of Whisper, because a dry run drew for them."""

    def steps(planned: bool) -> list[float]:
        torch.manual_seed(0)
        model = tiny_model("llama")
        for number, layer in enumerate(model.model.layers):
            layer.forward = dropped_at_times(layer.forward, random.random if number % 2 else np.random.rand)
        random.seed(1)
        np.random.seed(1)
        if planned:
            layers = [{"backward_prefetch": 5, "layers": True}]
            apply(model, {"swap_config": {"swap": True, "layer_swap": layers}})
        tokens = torch.arange(24).reshape(2, 12)
        return [float(model(input_ids=tokens, labels=tokens).loss.detach()) for _ in range(6)]

    losses = steps(planned=True)
    assert losses == steps(planned=False)
    assert len(set(losses)) > 1  # layers were dropped


def dropped_at_times(forward: Callable[..., Any], draw: Callable[[], float]) -> Callable[..., Any]:
    return lambda hidden, *args, **kwargs: hidden if draw() < 0.5 else forward(hidden, *args, **kwargs)


class Untouchable(torch.Tensor):
    """Stands for a sharded weight: a wrapper with the whole shape that must not be computed with."""

    @staticmethod
    def __new__(cls, part: torch.Tensor, rows: int) -> Untouchable:
        shape = (rows, *part.shape[1:])
        made: Untouchable = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype)
        return made

    def __init__(self, part: torch.Tensor, rows: int) -> None:
        self.part = part

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["part"], self.shape[0]

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], rows: int, *_: Any) -> Untouchable:
        return Untouchable(inner["part"], rows)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Untouchable(args[0].part, args[0].shape[0])
        raise AssertionError(f"{function} on a weight of the user's")


def test_weights_of_a_wrapper_class_are_not_touched(tiny_model: MakeModel) -> None:
    model = tiny_model("llama")
    eager = model_structure(model)
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = parameter.detach()[: parameter.shape[0] // 2]
            setattr(module, name, nn.Parameter(Untouchable(part, parameter.shape[0])))
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    found = model_structure(model)
    assert found.functions_known, found.why_not
    assert found == eager
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before


class CountingHead(nn.Linear):
    """Writes into a buffer, a list and an attribute in each forward; reports which weight it ran with."""

    def __init__(self, width: int, vocabulary: int, ran_with: Callable[[Any], None]) -> None:
        super().__init__(width, vocabulary, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.seen: dict[str, list[Any]] = {"hidden": []}
        self.longest = 0
        self._ran_with = ran_with

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.longest = max(self.longest, hidden.shape[1])
        self.seen["hidden"].append(hidden)
        self.seen["last"] = [hidden]
        self.last_weight = self.weight
        self._ran_with(self.weight)
        return super().forward(hidden)


def test_buffers_stay_and_tied_weights_stay_tied(tiny_model: MakeModel) -> None:
    model = tiny_model("llama")
    embedding = model.get_input_embeddings()
    met, ran_with = list[Any](), list[Any]()
    model.lm_head = CountingHead(16, 64, ran_with.append)
    model.lm_head.weight = embedding.weight
    plain = embedding.forward
    embedding.forward = lambda ids: (met.append(embedding.weight), plain(ids))[1]
    assert model_structure(model).functions_known
    assert model.lm_head.calls == 0
    assert isinstance(met[0], FakeTensor)
    assert met[0] is ran_with[0]
    assert met[0].requires_grad
    assert model.lm_head.weight is embedding.weight
    assert not isinstance(embedding.weight, FakeTensor)
    head = model.lm_head
    assert (head.longest, head.seen, hasattr(head, "last_weight")) == (0, {"hidden": []}, False)


def test_saved_tensor_hooks_around_it_meet_nothing_fake(tiny_model: MakeModel) -> None:
    model, packed = tiny_model("llama"), []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda ticket: ticket):
        assert model_structure(model).functions_known
    assert packed == []


def test_no_address_is_handed_out_and_the_setting_is_back(
    tiny_model: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a Triton kernel that would run on address 0."""
    model, addresses = tiny_model("llama"), []
    norm = model.model.norm
    plain = norm.forward

    def reads_an_address(hidden: torch.Tensor) -> torch.Tensor:
        address = hidden.data_ptr()
        addresses.append((type(hidden), address))
        return plain(hidden)

    norm.forward = reads_an_address
    setting = torch._functorch.config.fake_tensor_allow_unsafe_data_ptr_access
    with caplog.at_level("INFO"):
        shape = model_structure(model)
    assert [kind for kind, _ in addresses] == [torch.Tensor]  # of the small forward on the device
    assert shape.functions_known
    assert "data pointer" in caplog.text
    assert torch._functorch.config.fake_tensor_allow_unsafe_data_ptr_access is setting


@pytest.mark.parametrize("kind", ["JITFunction", "Autotuner"])
def test_triton_kernels_are_not_launched_with_fake_tensors(
    kind: str, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch asks for addresses: Liger's kernels would leave nothing to plan from but a real step."""
    addresses = []

    def run(kernel: Any, tensor: torch.Tensor, **_options: Any) -> None:
        addresses.append(tensor.data_ptr())

    made = type(kind, (), {"run": run})
    module = SimpleNamespace(**{kind: made})
    monkeypatch.setitem(
        sys.modules, f"triton.runtime.{'jit' if kind == 'JITFunction' else 'autotuner'}", module
    )
    model = tiny_model("llama")
    norm, launched = model.model.norm, made()
    plain = norm.forward

    def fused(hidden: torch.Tensor) -> torch.Tensor:
        launched.run(hidden, grid=(1,), warmup=False)
        return plain(hidden)

    norm.forward = fused
    assert model_structure(model).functions_known
    assert addresses == [], "no small forward on the device was needed"
    assert made.run is run
    model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert len(addresses) == 1


FORWARDS = {
    "keep": ({"recompute_config": {}}, 1),
    "swap": ({"swap_config": {"swap": True}, "memory": {"min_tensor_mib": 1e-6}}, 2),
    "recompute": ({"recompute_config": {"select_recompute": {"mlp.mul": True}}}, 2),
    "both": (
        {"swap_config": {"swap": True}, "recompute_config": {"select_recompute": {"mlp.mul": True}}},
        2,
    ),
}
"""A plan, and how often a model runs on fake tensors for it: for its structure, and for the first batch."""


@pytest.mark.parametrize("name", FORWARDS)
def test_how_often_a_model_runs_on_fake_tensors(
    name: str, tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shapes = tiny_model("llama"), []
    forward = type(model).forward

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs["input_ids"], FakeTensor):
            shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", counted)
    document, expected = FORWARDS[name]
    ids = torch.full((3, 12), 5)
    with apply(model, document):
        assert shapes == [(2, 8)]
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
    assert shapes == [(2, 8), (3, 12)][:expected]


@pytest.mark.skipif(not is_since("transformers", "5.6"), reason="the tower's encoder lies one module deeper")
def test_a_stack_that_the_example_does_not_reach_has_a_run_of_its_own() -> None:
    """And no run fails for want of another: a vision tower is called alone."""
    runs: list[str] = []
    model = gemma3()
    for path in ("", "model.vision_tower"):
        module: Any = model.get_submodule(path)
        module.forward = _counting(runs, path, module.forward)
    assert all(layer.calls for layer in model_structure(model).all_layers)
    assert runs == ["", "model.vision_tower"]


def _counting(runs: list[str], path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (runs.append(path), forward(*args, **kwargs))[1]


def test_answers_that_are_kept_are_those_of_a_new_run(tiny_model: MakeModel) -> None:
    """PyTorch compares each with a new one. Of a Llama all are kept, and none is taken for another type's."""
    models = [tiny_model("llama").half(), tiny_model("llama").bfloat16()]
    expected = [model_structure(model) for model in models]
    before = FakeTensorMode.cache_info()
    with dynamo_config.patch(fake_tensor_cache_crosscheck_enabled=True):
        assert [model_structure(model) for model in models] == expected
    assert all(structure.functions_known for structure in expected)
    after = FakeTensorMode.cache_info()
    assert after.hits > before.hits
    assert (after.misses, after.bypasses) == (before.misses, before.bypasses)
