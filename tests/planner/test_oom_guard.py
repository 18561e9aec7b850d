"""Out-of-memory survived op by op, on a device whose memory is counted."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from hf_actswap import MemoryPlan, model_structure
from hf_actswap.config.sizes import gib_text
from hf_actswap.engine import EvictableTensors, HostPool, PageableSlabs, Resources, install
from hf_actswap.engine.tickets import restore
from hf_actswap.planner import CountingMeter, OomGuard
from hf_actswap.planner.oom_guard import failure_of, guard_compiled
from tests.engine.tiny_models import (
    VOCABULARY,
    assert_bitwise_equal,
    gradients,
    recompute_rows,
    swap_rows,
    tiny_llama,
    tiny_neox,
)
from tests.quick_cases import quick_first

CPU = torch.device("cpu")
FRACTIONS = (0.9, 0.8, 0.7, 0.6, 0.5)
_FRAGMENT = torch.library.Library("actswap_tests", "FRAGMENT")
_CALLS = {"mutate": 0, "many": 0}


def _mutate_then_fail(x: torch.Tensor) -> torch.Tensor:
    _CALLS["mutate"] += 1
    x.add_(1)
    raise torch.OutOfMemoryError("Tried to allocate 4.00 KiB.")


def _same_numbers(x: torch.Tensor) -> torch.Tensor:
    """An op of somebody's own that draws random numbers, and was not tagged."""
    return x * torch.rand_like(x)


_FRAGMENT.define("mutate_then_fail_(Tensor(a!) x) -> Tensor(a!)")
_FRAGMENT.impl("mutate_then_fail_", _mutate_then_fail, "CPU")
_FRAGMENT.define("untagged_noise(Tensor x) -> Tensor")
_FRAGMENT.impl("untagged_noise", _same_numbers, "CPU")


@dataclass
class Device:
    """A counted device with a limit, and the guard on it."""

    limit_bytes: int | None
    owned: Iterable[torch.Tensor]
    meter: CountingMeter = field(init=False)
    idle: EvictableTensors = field(init=False)
    guard: OomGuard = field(init=False)

    def __post_init__(self) -> None:
        self.meter = CountingMeter(self.limit_bytes)
        self.meter.own(self.owned)
        self.idle = EvictableTensors(CPU, min_tensor_bytes=512)
        self.guard = OomGuard(self.meter, self.idle)

    @contextmanager
    def running(self, guarded: bool = True) -> Iterator[Device]:
        self.meter.start()
        if guarded:
            self.guard.start()
        try:
            yield self
        finally:
            self.guard.stop()
            self.meter.stop()

    def saving(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda tensor: self.idle.keep(tensor.detach()), restore)


def stack(dropout: float = 0.0, depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [(nn.Linear(32, 32), nn.SiLU(), nn.Dropout(dropout)) for _ in range(depth)]
    return nn.Sequential(*[module for block in blocks for module in block])


def stack_step(device: Device, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    with device.saving():
        loss = model(x).square().mean()
    loss.backward()
    del loss
    return gradients(model)


def free_peak(
    make: Callable[[], nn.Module], step: Callable[[Device, nn.Module, torch.Tensor], Any], x: torch.Tensor
) -> tuple[int, Any]:
    """Return the peak of a step without a limit, and its result."""
    model = make()
    device = Device(None, [*model.parameters(), x])
    with device.running(guarded=False):
        result = step(device, model, x)
    return device.meter.peak_bytes(), result


@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["deterministic", "dropout"])
def test_a_stack_survives_its_first_step(dropout: float) -> None:
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))
    peak, expected = free_peak(lambda: stack(dropout), stack_step, x)
    caught = []
    for fraction in FRACTIONS:
        model = stack(dropout)
        device = Device(int(fraction * peak), [*model.parameters(), x])
        with device.running():
            assert_bitwise_equal(stack_step(device, model, x), expected)
        assert device.meter.peak_bytes() <= fraction * peak
        assert device.guard.caught == device.meter.rejections > 0
        assert device.guard.evicted_bytes >= device.idle.evicted_bytes > 0
        assert peak - fraction * peak <= device.guard.missing_bytes
        missing = device.guard.missing_bytes
        model.zero_grad()
        with device.running():
            stack_step(device, model, x)
        assert device.guard.missing_bytes == missing, "what is missing at one time, not in all steps together"
        assert sum(device.guard.ops.values()) == device.guard.caught
        assert not device.idle._known
        assert device.guard.least_budget_bytes == 0
        caught.append(device.guard.caught)
    assert caught == sorted(caught), "less memory, more work"


def test_without_the_guard_it_fails() -> None:
    """The limit means something."""
    x = torch.randn(256, 32)
    peak, _ = free_peak(stack, stack_step, x)
    model = stack()
    device = Device(int(0.9 * peak), [*model.parameters(), x])
    with device.running(guarded=False), pytest.raises(torch.OutOfMemoryError):
        stack_step(device, model, x)


def llama_step(device: Device, model: nn.Module, ids: torch.Tensor, *rows: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    plan = MemoryPlan(tuple(rows), num_layers=4, min_tensor_bytes=512)
    with install(model, plan, model_structure(model), Resources(pack_handler=device.idle.keep)):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    del loss
    return gradients(model)


def token_ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(5))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "llama": (tiny_llama, ()),
    "llama bfloat16": (lambda: tiny_llama(torch.bfloat16), ()),
    "neox with dropout": (tiny_neox, ()),
    "some ops swapped": (tiny_llama, swap_rows(["self_attn"], [0, 2])),
    "some ops recomputed": (tiny_llama, recompute_rows(["mlp"], [1, 3])),
    "layers recomputed": (tiny_llama, recompute_rows([""], [0, 1])),
}


@pytest.mark.parametrize("case", quick_first(reversed(MODELS), 4))
def test_a_language_model_survives_its_first_step(case: str) -> None:
    make, rows = MODELS[case]
    ids = token_ids()

    def step(device: Device, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return llama_step(device, model, x, *rows)

    peak, expected = free_peak(make, step, ids)
    for fraction in (0.85, 0.65):
        model = make()
        device = Device(int(fraction * peak), [*model.parameters(), *model.buffers(), ids])
        with device.running():
            assert_bitwise_equal(step(device, model, ids), expected)
        assert device.meter.peak_bytes() <= fraction * peak
        assert device.guard.caught > 0
        assert not device.idle._known


def test_where_nothing_helps_the_error_says_what_would() -> None:
    x = torch.randn(256, 32)
    peak, expected = free_peak(stack, stack_step, x)
    limit, tries = int(0.15 * peak), 0
    while True:  # each failure names a budget that is needed at least: go there
        model = stack()
        device = Device(limit, [*model.parameters(), x])
        try:
            with device.running():
                found = stack_step(device, model, x)
            break
        except torch.OutOfMemoryError as error:
            message, least_bytes = str(error), device.guard.least_budget_bytes
        assert "aten." in message
        assert "Nothing idle is left to evict" in message
        assert message.startswith(f"At least {gib_text(least_bytes, math.ceil)} of device memory are needed.")
        assert f"There are {gib_text(limit)}: aten." in message
        assert limit < least_bytes < peak
        del model
        limit, tries = least_bytes, tries + 1
        assert tries < 10
    assert tries >= 1
    assert_bitwise_equal(found, expected)


def test_without_host_memory_the_error_says_so() -> None:
    x = torch.randn(256, 32)
    peak, _ = free_peak(stack, stack_step, x)
    model = stack()
    device = Device(int(0.6 * peak), [*model.parameters(), x])
    device.idle.pool = HostPool(PageableSlabs(), cap_bytes=0)
    with device.running(), pytest.raises(torch.OutOfMemoryError) as caught:
        stack_step(device, model, x)
    assert "more are idle, but no host memory is left to evict them to" in str(caught.value)


def test_a_failed_step_leaves_nothing_and_the_next_may_succeed() -> None:
    x = torch.randn(256, 32)
    peak, expected = free_peak(stack, stack_step, x)
    model = stack()
    device = Device(int(0.15 * peak), [*model.parameters(), x])
    with device.running():
        with pytest.raises(torch.OutOfMemoryError):
            stack_step(device, model, x)
        assert not device.idle._known
        model.zero_grad()
        device.meter.limit = int(0.6 * peak)
        assert_bitwise_equal(stack_step(device, model, x), expected)
    assert _get_current_dispatch_mode_stack() == []


def test_accumulation_retained_graphs_and_checkpoints() -> None:
    """Two micro-batches into one gradient, the second one's backward run twice, one block checkpointed."""
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))

    def step(device: Device, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        first, rest = model[:6], model[6:]
        for part in range(2):
            with device.saving():
                inner = checkpoint(first, x * (part + 1), use_reentrant=False)
                loss = rest(inner).square().mean()
            del inner
            loss.backward(retain_graph=bool(part))
        loss.backward()
        del loss
        return gradients(model)

    peak, expected = free_peak(lambda: stack(0.2), step, x)
    for fraction in (0.8, 0.6):
        model = stack(0.2)
        device = Device(int(fraction * peak), [*model.parameters(), x])
        with device.running():
            assert_bitwise_equal(step(device, model, x), expected)
        assert device.guard.caught > 0


class Remembering(torch.autograd.Function):
    """Its backward holds what it has unpacked while its own ops run out of memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y, x + y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y, total = ctx.saved_tensors
        parts = [gradient * y, gradient * x]  # each may evict what is idle, but not these
        parts = [part + total * 0 for part in parts]
        return parts[0], parts[1]


def test_what_a_running_node_has_unpacked_is_safe() -> None:
    def make() -> nn.Module:
        return nn.ParameterList([nn.Parameter(torch.full((64, 64), 1.0 + seed / 7)) for seed in range(4)])

    def step(device: Device, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        with device.saving():
            for weight in model:  # type: ignore[attr-defined]
                x = Remembering.apply(x, weight * 1.5)
            loss = x.sum()
        del x
        loss.backward()
        return gradients(model)

    x = torch.randn(64, 64)
    peak, expected = free_peak(make, step, x)
    survived = 0
    for fraction in (0.95, 0.9, 0.85, 0.8, 0.75):
        model = make()
        device = Device(int(fraction * peak), [*model.parameters(), x])
        try:
            with device.running():
                assert_bitwise_equal(step(device, model, x), expected)
        except torch.OutOfMemoryError:
            break
        assert device.guard.caught > 0
        survived += 1
    assert survived >= 2


def test_reloads_are_guarded() -> None:
    """A reload runs out of memory itself, and something else goes for it."""
    device = Device(3 * 4096, ())
    with device.running():
        tickets = [device.idle.keep(torch.full((1024,), float(value))) for value in range(5)]
        assert device.guard.caught == 2
        values = [restore(ticket)[0].item() for ticket in tickets]
        assert values == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert device.guard.caught == 3, "one more: only the first came back to a full device"
        assert any(name.startswith("aten.empty") for name in device.guard.ops)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1024),
        lambda: torch.randn(1024),
        lambda: torch.randperm(512),
        lambda: torch.bernoulli(torch.full((1024,), 0.5)),
        lambda: torch.multinomial(torch.ones(2, 512), 100),
        lambda: torch.nn.functional.dropout(torch.ones(1024), 0.5),
        lambda: torch.normal(torch.zeros(1024), 1.0),
        lambda: torch.rrelu(torch.full((1024,), -1.0), training=True),
        lambda: torch.ops.actswap_tests.untagged_noise(torch.ones(1024)),
    ],
    ids=["rand", "randn", "randperm", "bernoulli", "multinomial", "dropout", "normal", "rrelu", "untagged"],
)
def test_random_ops_draw_the_same_again(draw: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(11)
    expected, after = draw(), torch.rand(3)
    device = Device(13_000, ())
    with device.running():
        tickets = [device.idle.keep(torch.zeros(1024)) for _ in range(3)]
        torch.manual_seed(11)
        found = draw()
        assert device.guard.caught > 0
        assert torch.equal(found, expected)
        assert torch.equal(torch.rand(3), after)
        assert len(tickets) == 3


def test_a_generator_of_ones_own_draws_the_same_again() -> None:
    expected = torch.rand(1024, generator=torch.Generator().manual_seed(4))
    device = Device(3 * 4096, ())
    with device.running():
        tickets = [device.idle.keep(torch.zeros(1024)) for _ in range(3)]
        assert torch.equal(torch.rand(1024, generator=torch.Generator().manual_seed(4)), expected)
        assert device.guard.caught == 1
        assert tickets


def test_what_writes_into_its_arguments_never_runs_twice() -> None:
    device = Device(2**20, ())
    _CALLS["mutate"] = 0
    with device.running():
        ticket = device.idle.keep(torch.zeros(1024))
        x = torch.zeros(1024)
        with pytest.raises(torch.OutOfMemoryError, match="cannot be run again: it writes into its arguments"):
            torch.ops.actswap_tests.mutate_then_fail_(x)
        assert torch.equal(x, torch.ones(1024))
        assert (_CALLS["mutate"], device.idle.counters.offloads) == (1, 0)
        device.meter.limit = device.meter.allocated_bytes()
        with pytest.raises(torch.OutOfMemoryError):
            torch.ops.actswap_tests.mutate_then_fail_(x)
        assert (device.guard.made_room, device.idle.counters.offloads) == (1, 1), (
            "at the next call room is made before"
        )
        assert ticket


def test_room_is_made_before_batch_norm() -> None:
    """It updates its running statistics without saying so, so it must not run twice."""
    x = torch.randn(64, 16)
    plain, model = nn.BatchNorm1d(16), nn.BatchNorm1d(16)
    expected = plain(x)
    device = Device(3 * 4096 + 1000, [x])
    with device.running():
        tickets = [device.idle.keep(torch.zeros(1024)) for _ in range(2)]
        found = model(x)
        assert (device.guard.caught, device.guard.made_room) == (0, 1)
        assert torch.equal(found, expected)
        assert torch.equal(model.running_mean, plain.running_mean)  # type: ignore[arg-type]
        assert model.num_batches_tracked == plain.num_batches_tracked
        assert tickets


def test_a_lowered_limit_is_let_go_before_what_allocates_and_cannot_run_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Below what the device has, a budget is no reason to fail; what allocates nothing cannot fail by it."""
    device, x, model = Device(2**20, ()), torch.randn(64, 16), nn.BatchNorm1d(16)
    let_go: list[bool] = []
    monkeypatch.setattr(device.meter, "let_go", lambda: let_go.append(True) or True)
    with device.running():
        x.add_(1.0)
        assert let_go == []
        model(x)
        assert let_go


def test_other_errors_pass_as_they_are() -> None:
    device = Device(2**20, ())
    with device.running(), pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert type(caught.value) is RuntimeError
    assert device.guard.caught == 0


@pytest.mark.parametrize("kind", ["sgd", "adamw foreach", "adamw fused"])
def test_an_optimizer_step_under_a_tight_limit(kind: str) -> None:
    """What the step allocates makes activations of the next batch go, and its in-place parts run once."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        return torch.optim.AdamW(model.parameters(), lr=0.1, **{kind.split()[1]: True})  # type: ignore[arg-type]

    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))

    def run(device: Device, model: nn.Module, guarded: bool) -> list[torch.Tensor]:
        steps = optimizer(model)
        with device.running(guarded):
            for _ in range(3):
                with device.saving():
                    ahead = model(x)  # a graph that is alive during the optimizer's step
                    loss = model(x).square().mean()
                loss.backward()
                del loss
                steps.step()
                steps.zero_grad()
                del ahead
        return [item.detach().clone() for item in model.parameters()]

    model = stack()
    free = Device(None, [*model.parameters(), x])
    expected = run(free, model, guarded=False)
    model = stack()
    device = Device(int(0.6 * free.meter.peak_bytes()), [*model.parameters(), x])
    found = run(device, model, guarded=True)
    assert device.guard.caught > 0
    assert all(map(torch.equal, found, expected))


class Block(nn.Module):
    """Of our own: compiled in place, torch's own modules are not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.linear(x))


def test_compiled_regions_stay_compiled_and_are_run_again() -> None:
    """A skip under a mode would last for ever; and a region that fails inside runs again as a whole."""
    runs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        def compiled(*args: Any) -> Any:
            runs.append("run")
            if len(runs) == 2:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 KiB.")
            return graph(*args)

        return compiled

    torch._dynamo.reset()
    for wrapped in (False, True):
        runs.clear()
        plain, layer = Block(), Block()
        layer.load_state_dict(plain.state_dict())
        if wrapped:
            module: Any = torch.compile(layer, backend=backend)
        else:
            layer.compile(backend=backend)
            module = layer
        x = torch.randn(8, 32)
        device = Device(2**24, ())
        undo = guard_compiled(device.guard, [module, plain])
        assert len(undo) == 1
        with device.running():
            ticket = device.idle.keep(torch.zeros(1024))
            module(x)
            found = module(x)
            assert (runs, device.guard.caught, device.idle.counters.offloads) == (["run"] * 3, 1, 1)
            found.sum().backward()
            assert ticket
        assert torch.equal(found, plain(x))
        for step in undo:
            step()
        module(x)
        assert len(runs) == 4, "it is still compiled"
    torch._dynamo.reset()


def test_the_text_of_errors_is_read() -> None:
    texts = {
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139 GiB": 20 * 2**20,
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU": 3 * 2**29,
        "XPU out of memory. Tried to allocate 512.00 KiB": 2**19,
        "aten.mm.default asks for 1,234,567 bytes, and 3 bytes are in use of 4 (a counted limit).": 1_234_567,
        "out of memory": None,
    }
    for text, wanted_bytes in texts.items():
        failure = failure_of(torch.OutOfMemoryError(text))
        assert failure.wanted_bytes == wanted_bytes
    whole = "CUDA out of memory. Tried to allocate 5.00 GiB. GPU 0 has 9 GiB of which 4.50 GiB is free."
    assert failure_of(torch.OutOfMemoryError(whole)).missing_bytes == 2**29
    held = whole.replace("4.50", "6.00") + " 23.00 GiB allowed;"  # the process may not take what is free
    assert failure_of(torch.OutOfMemoryError(held)).missing_bytes == 5 * 2**30
    assert failure_of(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `x`")) is not None
    assert failure_of(RuntimeError("size mismatch: tried to allocate nothing")) is None
    assert failure_of(ValueError("Tried to allocate 1.00 GiB")) is None


def calls_in(run: Callable[[], object]) -> int:
    """How many functions, of Python or C, one run calls; the first run is not counted."""
    calls = 0

    def count(_frame: Any, event: str, _what: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    run()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls - 1  # the one that ends the count


def test_an_op_costs_few_calls() -> None:
    """They take about 6 us here, and the op alone 1."""
    x = torch.ones(4)
    device = Device(None, ())
    alone = calls_in(lambda: x + x)
    device.guard.start()
    try:
        guarded = calls_in(lambda: x + x)
    finally:
        device.guard.stop()
    assert guarded - alone <= 30


@pytest.mark.usefixtures("world_of_one")
def test_collectives_never_run_twice_and_have_room_made_before() -> None:
    x = torch.ones(1024)
    device = Device(3 * 4096, [x])
    with device.running():
        tickets = [device.idle.keep(torch.zeros(1024)) for _ in range(2)]
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, 1, dist.group.WORLD.group_name)
        gathered = torch.ops._c10d_functional.wait_tensor(gathered)
        assert torch.equal(gathered, x)
        assert (device.meter.rejections, device.guard.caught, device.guard.made_room) == (0, 0, 1)
        device.meter.limit, rejections = device.meter.allocated_bytes() - 4096, device.meter.rejections
        with pytest.raises(torch.OutOfMemoryError, match="the other ranks have done their part"):
            torch.ops._c10d_functional.all_reduce(torch.ops.aten.alias(x), "sum", dist.group.WORLD.group_name)
        assert (device.meter.rejections, device.guard.caught) == (rejections + 1, 0)
        assert tickets


@pytest.mark.usefixtures("world_of_one")
def test_distributed_tensors_survive() -> None:
    x = distribute_tensor(torch.randn(32, 32), init_device_mesh("cpu", (1,)), [Shard(0)])
    expected = (x @ x).to_local().clone()
    device = Device(3 * 4096, [x])
    with device.running():
        tickets = [device.idle.keep(torch.zeros(1024)) for _ in range(2)]
        found = x @ x
        assert (device.guard.caught, device.guard.ops) == (1, {"aten.mm.default": 1})
        assert torch.equal(found.to_local(), expected)
        assert tickets


class Wrapper(torch.Tensor):
    """Turns each op into one on what it wraps, and does something more that must not be done twice."""

    inner: torch.Tensor
    done: list[str]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, done: list[str]) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner, made.done = inner, done
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args[0].done.append(str(func))
        return func(args[0].inner, *args[1:], **(kwargs or {}))


def test_of_tensor_subclasses_the_inner_ops_are_run_again() -> None:
    wrapper, expected = Wrapper(torch.zeros(1024), []), torch.ones(1024)
    device = Device(3 * 4096, [wrapper.inner])
    with device.running():
        tickets = [device.idle.keep(torch.zeros(1024)) for _ in range(2)]
        assert torch.equal(wrapper + 1, expected)
        assert device.guard.caught == 1
        assert wrapper.done == ["aten.add.Tensor"]
        assert tickets
