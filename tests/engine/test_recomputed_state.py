"""What a recomputed piece reads beside its inputs is as in forward, and what it writes is written once."""

from __future__ import annotations

import contextvars
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hf_actswap import apply
from hf_actswap.engine.tickets import StaleTensorError
from tests.engine.tiny_models import tiny_llama
from tests.quick_cases import each_value_once

WHOLE: dict[str, Any] = {"recompute_config": {"recompute": True}}
MODULE: dict[str, Any] = {"recompute_config": {"select_recompute": {"mlp": True}}}
SCALE = contextvars.ContextVar("scale", default=1.0)
GENERATOR = torch.Generator()


class Around(nn.Module):
    """An MLP with something around it that reads or writes more than its input."""

    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.calls, self.seen, self.factor, self.kind = 0, [], 1.0, ""
        self.last: deque[float] = deque(maxlen=2)
        self.known: set[int] = set()
        self.lists: defaultdict[str, list[int]] = defaultdict(list)
        self.counts = {"inner": [{"n": 0}]}
        self.function, self.weight, self.total = torch.tanh, torch.ones(width), torch.zeros(())
        self.part, self.steered = nn.Tanh(), nn.Identity()
        self.sources = (np.random.default_rng(0), random.Random(0))
        self.own = torch.Generator().manual_seed(0)
        self.around: tuple[nn.Module, ...] = ()
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return getattr(self, f"_{self.kind}")(y)

    def _batch_norm(self, y: torch.Tensor) -> torch.Tensor:
        return self.norm(y.transpose(1, 2)).transpose(1, 2).sigmoid() * y

    def _buffer(self, y: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(y.detach().mean() + 1)
        return y.sigmoid() * y * self.mean.item()

    def _new_buffer(self, y: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.9 + 1
        return y.sigmoid() * y * self.mean.item()

    def _buffer_of_the_model(self, y: torch.Tensor) -> torch.Tensor:
        (model,) = self.around
        model.mean.mul_(0.9).add_(y.detach().mean() + 1)
        return y.sigmoid() * y * model.mean.item()

    def _new_buffer_of_the_model(self, y: torch.Tensor) -> torch.Tensor:
        (model,) = self.around
        model.mean = model.mean * 0.9 + 1
        return y.sigmoid() * y * model.mean.item()

    def _attribute_of_the_model(self, y: torch.Tensor) -> torch.Tensor:
        (model,) = self.around
        model.calls += 1
        return y.sigmoid() * y * model.calls

    def _new_attribute_of_a_neighbour(self, y: torch.Tensor) -> torch.Tensor:
        norm = self.around[0].model.norm
        norm.calls = getattr(norm, "calls", 0) + 1
        return y.sigmoid() * y * norm.calls

    def _list_of_the_model(self, y: torch.Tensor) -> torch.Tensor:
        (model,) = self.around
        model.seen.append(float(y.detach().sum()))
        return y.sigmoid() * y * len(model.seen)

    def _nested_in_the_model(self, y: torch.Tensor) -> torch.Tensor:
        (model,) = self.around
        model.counts["inner"][0]["n"] += 1
        return y.sigmoid() * y * model.counts["inner"][0]["n"]

    def _counter(self, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return y.sigmoid() * y * self.calls

    def _list(self, y: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(y.detach().sum()))
        return y.sigmoid() * y * len(self.seen)

    def _deque(self, y: torch.Tensor) -> torch.Tensor:
        self.last.append(float(y.detach().sum()))
        return y.sigmoid() * y * sum(self.last)

    def _set(self, y: torch.Tensor) -> torch.Tensor:
        self.known.add(len(self.known))
        return y.sigmoid() * y * len(self.known)

    def _new_list(self, y: torch.Tensor) -> torch.Tensor:
        self.lists["calls"].append(1)
        return y.sigmoid() * y * len(self.lists["calls"])

    def _nested(self, y: torch.Tensor) -> torch.Tensor:
        self.counts["inner"][0]["n"] += 1
        return y.sigmoid() * y * self.counts["inner"][0]["n"]

    def _attribute(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * self.factor

    def _function_attribute(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * self.function(y)

    def _tensor_attribute(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * self.weight

    def _tensor_written(self, y: torch.Tensor) -> torch.Tensor:
        self.total.mul_(0.9).add_(y.detach().mean() + 1)
        return y.sigmoid() * y * self.total.item()

    def _module_replaced(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * self.part(y)

    def _new_attribute(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * getattr(self, "later", 1.0)

    def _training(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * (2.0 if self.training else 1.0)

    def _context(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * SCALE.get()

    def _dtype(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * torch.full((), 1 / 3).double().float()

    def _generator(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * torch.rand(y.shape, generator=GENERATOR, dtype=y.dtype)

    def _numpy(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * float(np.random.rand())

    def _random(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * random.random()

    def _own_of_numpy(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * float(self.sources[0].random())

    def _own_of_python(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * self.sources[1].random()

    def _own_from_the_second_call(self, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        late = torch.rand(y.shape, generator=self.own, dtype=y.dtype) if self.calls > 1 else 1
        return y.sigmoid() * y * late

    def _global_from_the_second_call(self, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        late = torch.rand(y.shape, generator=GENERATOR, dtype=y.dtype) if self.calls > 1 else 1
        return y.sigmoid() * y * late

    def _new_in_each_step(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * torch.rand(y.shape, generator=self.of_step, dtype=y.dtype)

    def _steered(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * self.steered(y)

    def _mode(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y.relu()

    def _precision(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * (2.0 if torch.backends.mkldnn.matmul.fp32_precision == "bf16" else 1.0)

    def _kernel(self, y: torch.Tensor) -> torch.Tensor:
        return y.sigmoid() * y * (2.0 if torch.backends.cuda.flash_sdp_enabled() else 1.0)


KINDS = [name.removeprefix("_") for name in vars(Around) if name.startswith("_") and name[1].isalpha()]


def with_mlps_around(kind: str) -> Any:
    model: Any = tiny_llama().train()
    model.register_buffer("mean", torch.zeros(()))
    model.calls, model.seen, model.counts = 0, [], {"inner": [{"n": 0}]}
    for layer in model.model.layers:
        layer.mlp = Around(layer.mlp, model.config.hidden_size)
        layer.mlp.kind, layer.mlp.around = kind, (model,)
    return model


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert expected
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Halved(TorchFunctionMode):
    """Halves what `relu` returns."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is torch.Tensor.relu else result


@contextmanager
def bf16_on_the_host() -> Iterator[None]:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


@contextmanager
def steered(model: nn.Module) -> Iterator[None]:
    """Put hooks around modules for the time of a forward; in backward others are there."""
    modules = [module.steered for module in model.modules() if isinstance(module, Around)]
    for module in modules:
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    handles = [module.register_forward_hook(lambda _m, _a, found: found * 1.5) for module in modules]
    handles += [module.register_forward_pre_hook(lambda _m, args: args[0] + 1) for module in modules]
    yield
    for handle in handles:
        handle.remove()
    for module in modules:
        module.register_forward_hook(lambda _m, _a, found: found.tanh())
        module.register_forward_pre_hook(lambda _m, args: args[0] * 3)


@contextmanager
def around_forward(model: nn.Module) -> Iterator[None]:
    """Set, for forward alone, what the kinds read."""
    wrapped = [module for module in model.modules() if isinstance(module, Around)]
    token = SCALE.set(1.5)
    for module in wrapped:
        module.factor, module.function, module.part = 1.25, torch.tanh, nn.Tanh()
        module.weight, module.of_step = torch.full_like(module.weight, 1.25), torch.Generator().manual_seed(1)
        vars(module).pop("later", None)
    torch.set_default_dtype(torch.float64)
    try:
        with sdpa_kernel(SDPBackend.MATH), bf16_on_the_host(), steered(model), Halved():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        SCALE.reset(token)
        for module in wrapped:
            module.factor, module.function, module.part = 0.5, torch.relu, nn.ReLU()
            module.weight, module.later = torch.full_like(module.weight, 0.5), 0.5


def run(kind: str, plan: dict[str, Any] | None, steps: int = 3) -> list[Any]:
    """Return losses, gradients, buffers, attributes and the next random numbers of some steps."""
    random.seed(0), np.random.seed(0), GENERATOR.manual_seed(0)
    model = with_mlps_around(kind)
    applied = None if plan is None else apply(model, plan)
    found: list[Any] = []
    for step in range(steps):
        ids = torch.arange(48).reshape(2, 24) + step
        model.train()
        with around_forward(model):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        model.eval()
        loss.backward()
        found.append(loss.detach())
    assert (applied is not None and applied.stats().recomputes > 0) or plan is None
    if applied is not None:
        applied.remove()
    found += [weight.grad for weight in model.parameters() if weight.grad is not None]
    found += list(model.buffers())
    found += [torch.tensor([layer.mlp.calls, len(layer.mlp.seen)]) for layer in model.model.layers]
    counts = [
        model.calls,
        len(model.seen),
        model.counts["inner"][0]["n"],
        getattr(model.model.norm, "calls", 0),
    ]
    found.append(torch.tensor(counts))
    return [*found, torch.tensor([random.random(), np.random.rand()]), torch.rand(1, generator=GENERATOR)]


@each_value_once
@pytest.mark.parametrize("plan", [WHOLE, MODULE], ids=["whole layers", "modules"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_backward_reads_what_forward_read(kind: str, plan: dict[str, Any]) -> None:
    assert_same(run(kind, plan), run(kind, None))


def both_backward_at_once(plan: dict[str, Any] | None) -> list[torch.Tensor]:
    model = with_mlps_around("batch_norm")
    if plan is not None:
        apply(model, plan)
    losses = []
    for step in range(2):
        ids = torch.arange(48).reshape(2, 24) + step
        losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss)
    sum(losses).backward()
    return [*(weight.grad for weight in model.parameters() if weight.grad is not None), *model.buffers()]


@pytest.mark.parametrize("plan", [WHOLE, MODULE], ids=["whole layers", "modules"])
def test_two_forwards_before_a_backward(plan: dict[str, Any]) -> None:
    assert_same(both_backward_at_once(plan), both_backward_at_once(None))


def adapters(plan: dict[str, Any] | None, change: Callable[[Any], None]) -> list[torch.Tensor]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"], init_lora_weights=False)
    model: Any = get_peft_model(tiny_llama(), config)
    model.add_adapter("other", config)
    if plan is not None:
        apply(model, plan)
    ids = torch.arange(48).reshape(2, 24)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    change(model)
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name)  # whatever the change has switched off
    loss.backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def _scaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale") and hasattr(module, "lora_A"):
            module.set_scale("default", 7.0)


@pytest.mark.parametrize("plan", [WHOLE, MODULE], ids=["whole layers", "modules"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: model.base_model.set_adapter("other"), id="another adapter"),
        pytest.param(lambda model: model.base_model.disable_adapter_layers(), id="adapters off"),
        pytest.param(_scaled, id="scaling"),
    ],
)
def test_adapters_that_change_after_forward(plan: dict[str, Any], change: Callable[[Any], None]) -> None:
    assert_same(adapters(plan, change), adapters(None, change))


def with_other_weights(plan: dict[str, Any] | None) -> list[torch.Tensor]:
    """Gradients of a loss with weights that a call alone is given, as meta-learning does."""
    model = tiny_llama().train()
    weights = {name: (weight.detach() * 1.5).requires_grad_() for name, weight in model.named_parameters()}
    applied = None if plan is None else apply(model, plan)
    ids = torch.arange(48).reshape(2, 24)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    loss = torch.func.functional_call(model, weights, (), inputs).loss
    loss.backward()
    assert applied is None or applied.stats().recomputes > 0
    return [loss.detach(), *(weight.grad for weight in weights.values() if weight.grad is not None)]


@pytest.mark.parametrize("plan", [WHOLE, MODULE], ids=["whole layers", "modules"])
def test_weights_that_forward_alone_was_given(plan: dict[str, Any]) -> None:
    found = with_other_weights(plan)
    assert len(found) > 10
    assert_same(found, with_other_weights(None))


def with_late_noise(plan: dict[str, Any] | None) -> list[torch.Tensor]:
    """Gradients of steps with unchanged modules, of which the later ones draw from a global generator."""
    GENERATOR.manual_seed(0)
    model = with_mlps_around("global_from_the_second_call")
    if plan is not None:
        apply(model, plan)
    for step in range(3):
        ids = torch.arange(48).reshape(2, 24) + step
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    return [*gradients, torch.rand(1, generator=GENERATOR)]


@pytest.mark.parametrize("plan", [WHOLE, MODULE], ids=["whole layers", "modules"])
def test_a_global_generator_that_no_first_call_used(plan: dict[str, Any]) -> None:
    assert_same(with_late_noise(plan), with_late_noise(None))


def with_norms(plan: dict[str, Any] | None, in_evaluation: int, steps: int) -> list[torch.Tensor]:
    """Gradients of steps, of which the first run in evaluation, and write no running statistics."""
    model = with_mlps_around("batch_norm")
    if plan is not None:
        apply(model, plan)
    for step in range(steps):
        model.train(step >= in_evaluation)
        ids = torch.arange(48).reshape(2, 24) + step
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [*(weight.grad for weight in model.parameters() if weight.grad is not None), *model.buffers()]


@pytest.mark.parametrize("plan", [WHOLE, MODULE], ids=["whole layers", "modules"])
def test_statistics_that_later_steps_write(plan: dict[str, Any]) -> None:
    assert_same(with_norms(plan, 2, 4), with_norms(None, 2, 4))


class Observed(nn.Module):
    """Counts what passes in a buffer of this size, once it is told to; ``by_data``: unseen by autograd."""

    def __init__(self, inner: nn.Module, size: int, by_data: bool) -> None:
        super().__init__()
        self.inner, self.by_data = inner, by_data
        self.register_buffer("on", torch.zeros((), dtype=torch.bool))
        self.register_buffer("largest", torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        if self.on:
            (self.largest.data if self.by_data else self.largest).mul_(1.25)
        return y.sigmoid() * y * self.largest[0].clone()


SMALL, LARGE = 1, 2**15


def observed(
    plan: dict[str, Any] | None, size: int, by_data: bool = False
) -> tuple[Any, Callable[[], torch.Tensor]]:
    model = tiny_llama().train()
    layer = model.model.layers[1]
    layer.mlp = Observed(layer.mlp, size, by_data)
    if plan is not None:
        apply(model, plan)
    ids = torch.arange(48).reshape(2, 24)

    def loss() -> torch.Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    loss().backward()
    return layer.mlp, loss


def with_late_counts(plan: dict[str, Any] | None, by_data: bool) -> list[torch.Tensor]:
    module, loss = observed(plan, SMALL, by_data)
    module.on.fill_(True)
    for _ in range(2):
        loss().backward()
    value = loss()
    module.largest.fill_(3.0)  # between forward and backward
    value.backward()
    return [module.largest, *(weight.grad for weight in module.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("plan", [WHOLE, MODULE], ids=["whole layers", "modules"])
@pytest.mark.parametrize("by_data", [False, True], ids=["in place", "by data"])
def test_a_small_buffer_that_is_written_for_the_first_time_later(plan: dict[str, Any], by_data: bool) -> None:
    assert_same(with_late_counts(plan, by_data), with_late_counts(None, by_data))


@pytest.mark.parametrize("plan", [WHOLE, MODULE], ids=["whole layers", "modules"])
def test_a_large_buffer_that_is_written_for_the_first_time_later(plan: dict[str, Any]) -> None:
    module, loss = observed(plan, LARGE)
    module.on.fill_(True)
    with pytest.raises(StaleTensorError, match="largest"):  # nothing has kept a copy
        loss().backward()
    loss().backward()  # from now on there is one


@pytest.mark.parametrize("plan", [WHOLE, MODULE], ids=["whole layers", "modules"])
def test_a_large_buffer_that_others_write_before_backward(plan: dict[str, Any]) -> None:
    module, loss = observed(plan, LARGE)
    value = loss()
    module.largest.fill_(3.0)
    with pytest.raises(StaleTensorError, match="largest"):
        value.backward()
