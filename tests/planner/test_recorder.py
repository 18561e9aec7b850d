"""What a watched step says of itself, and that it is the step that it would have been."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hf_actswap import model_structure
from hf_actswap.engine import BlockingTransfer, record_saved
from hf_actswap.engine.autograd_state import running_node_number
from hf_actswap.engine.tickets import Ticket, keep
from hf_actswap.plan.forward_recorder import ForwardRecorder
from hf_actswap.plan.op_facts import computes, is_collective
from hf_actswap.planner import CountingMeter, DeviceClock, Profile, StepRecorder
from tests.engine.tiny_models import assert_bitwise_equal, gradients, snapshot, tiny_llama
from tests.planner.recorded_steps import (
    MODELS,
    TickClock,
    assert_events_partition,
    call_of,
    counting_meter,
    measured_peak_bytes,
    recorded,
    step,
)


def surroundings(model: nn.Module) -> dict[str, Any]:
    return {**snapshot(model), "dispatch": len(_get_current_dispatch_mode_stack())}


def watched(model: nn.Module, **settings: Any) -> StepRecorder:
    return StepRecorder(model, model_structure(model), None, TickClock(), **settings)


@pytest.mark.parametrize("family", MODELS)
def test_the_step_is_the_step_that_it_would_have_been(family: str) -> None:
    model = MODELS[family]()
    step(model, call_of())
    expected, random = gradients(model), torch.get_rng_state()
    model.zero_grad()
    before = surroundings(model)
    recorded(model)
    assert_bitwise_equal(gradients(model), expected)
    assert torch.equal(torch.get_rng_state(), random)
    assert surroundings(model) == before


@pytest.mark.parametrize("family", MODELS)
def test_the_profile_is_that_of_the_step(family: str) -> None:
    """It saves what fakes predict, op events partition it, base and saved bytes add up to the peak."""
    model = MODELS[family]()
    profile, outside = recorded(model)
    forecast = record_saved(model, model_structure(model), (), call_of())
    assert profile.saved == forecast
    assert profile.saved.by_op()
    assert profile.batch_shape == (2, 16)
    assert_events_partition(profile)
    assert measured_peak_bytes(profile) == outside.peak_bytes()


def test_base_bytes_hold_nothing_that_is_saved() -> None:
    """Else they would grow from layer to layer in forward, and in backward by more than the gradients."""
    model = tiny_llama()
    profile, _ = recorded(model)
    gradient_bytes = sum(weight.nbytes for weight in model.get_submodule("model.layers.1").parameters())
    op_events = {op_event.call: op_event for op_event in profile.op_events}
    earlier = [op_event for call, op_event in op_events.items() if call[0] == 1]
    later = [op_events[(2, *op_event.call[1:])] for op_event in earlier]
    assert [op_event.forward_base_bytes for op_event in earlier] == [
        op_event.forward_base_bytes for op_event in later
    ]
    assert {
        before.backward_base_bytes - after.backward_base_bytes
        for before, after in zip(earlier, later, strict=True)
        if before.backward_place >= 0
    } == {gradient_bytes}


def test_chunks_are_one_forward_and_what_runs_between_them_is_not_theirs() -> None:
    """Two calls of a model, as of a stage of a pipeline, with backwards in reverse."""
    model, call = tiny_llama(num_hidden_layers=2), call_of()
    step(model, call)  # from now on gradients are added to others
    expected, outside = recorded(model)
    meter = counting_meter(model, call)
    meter.start()

    def elsewhere() -> None:
        torch.ones(4 * outside.peak_bytes(), dtype=torch.uint8).add_(1)

    with StepRecorder(model, model_structure(model), meter, TickClock(), chunks=2) as recorder:
        first = model(**call).loss
        elsewhere()
        second = model(**call).loss
        second.backward()
        elsewhere()
        first.backward()
        assert recorder.complete
    meter.stop()
    profile = recorder.profile(device="cpu")
    assert_events_partition(profile)
    for found, wanted in zip(profile.op_events, expected.op_events * 2, strict=True):
        assert (found.call, found.num_ops) == (wanted.call, wanted.num_ops)
        assert found.backward_ms == wanted.backward_ms
        is_loss = (
            wanted is expected.op_events[-1]
        )  # the first op of backward is added to it, in the last chunk
        assert found.forward_ms in (wanted.forward_ms, wanted.forward_ms - is_loss)
    assert len(profile.saved.storages) == 2 * len(expected.saved.storages)
    assert measured_peak_bytes(profile) < 3 * outside.peak_bytes()


class HeldMeter(CountingMeter):
    """Counts what autograd holds, and nothing else."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._weights = {weight.untyped_storage()._cdata for weight in weights}

    def hold(self, tensor: torch.Tensor) -> Ticket:
        if tensor.untyped_storage()._cdata not in self._weights:
            self.own([tensor])
        return keep(tensor)


@pytest.mark.parametrize("family", MODELS)
def test_saved_storages_live_as_long_as_the_rule_says(family: str) -> None:
    """Then what is left of what is held is the same wherever backward is: the rotations that layers share."""
    model = MODELS[family]()
    meter = HeldMeter(model.parameters())
    with StepRecorder(model, model_structure(model), meter, TickClock(), meter.hold) as recorder:
        step(model, call_of())
    profile = recorder.profile(device="cpu")
    left = {
        op_event.backward_base_bytes
        for op_event in profile.op_events
        if isinstance(op_event.call[0], int) and op_event.call[0] > 0 and op_event.backward_place >= 0
    }
    assert len(left) == 1
    assert 0 < left.pop() < 5000


class Counted(TorchDispatchMode):
    """Counts the ops that do something, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if computes(func):
            backward = running_node_number() is not None
            self.backward += backward
            self.forward += not backward
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_every_op_is_charged_to_one_event(family: str) -> None:
    model, call = MODELS[family](), call_of()
    with Counted() as counted:
        step(model, call)
    model.zero_grad()
    profile, _ = recorded(model)
    # The gradient of the loss is made between forward and backward, in no node.
    assert sum(op_event.forward_ms for op_event in profile.op_events) == counted.forward
    assert sum(op_event.backward_ms for op_event in profile.op_events) == counted.backward
    assert profile.compute_ms > 0


def test_backward_time_goes_to_the_op_whose_nodes_run() -> None:
    profile, _ = recorded(tiny_llama())
    times = {op_event.call: op_event for op_event in profile.op_events}
    linear, silu = times[1, "mlp.up_proj.linear", 0], times[1, "mlp.act_fn.silu", 0]
    assert linear.backward_ms == 2 * linear.forward_ms == 2  # two matrix products for one
    assert silu.backward_ms == silu.forward_ms == 1
    assert times[1, "add", 0].backward_place == -1, "autograd hands a sum's gradient on as it is"
    assert silu.backward_place < times[0, "mlp.act_fn.silu", 0].backward_place


def test_real_time() -> None:
    model = tiny_llama()
    clock = DeviceClock(BlockingTransfer(torch.device("cpu")))
    with StepRecorder(model, model_structure(model), None, clock) as recorder:
        step(model, call_of())
        _ = [torch.randn(64, 64) @ torch.randn(64, 64) for _ in range(20)]
    profile = recorder.profile(device="cpu", device_bytes=1)
    assert all(op_event.forward_ms > 0 for op_event in profile.op_events if isinstance(op_event.call[0], int))
    assert profile.outside_ms > 0
    without = recorder.profile(device="cpu", device_bytes=1, outside_ms=3.0)
    assert without.outside_ms == 3.0


def test_work_after_backward_is_not_charged_to_it() -> None:
    model = tiny_llama()
    recorder = watched(model)
    with recorder:
        step(model, call_of())
        for _ in range(1000):
            torch.ones(1).add(1)
    profile = recorder.profile(device="cpu")
    assert profile.outside_ms >= 1000
    assert profile.compute_ms < 1000


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_mid_step_leaves_nothing_behind(error: type[BaseException]) -> None:
    model = tiny_llama()
    before = surroundings(model)

    def fail(*_: Any) -> None:
        raise error

    recorder = watched(model)
    recorder.start()
    hook = model.get_submodule("model.layers.2.mlp").register_forward_hook(fail)
    with pytest.raises(error):
        step(model, call_of())
    hook.remove()
    recorder.stop()
    recorder.stop()
    assert surroundings(model) == before
    profile = recorder.profile(device="cpu")
    assert profile.op_events[-1].backward_place == -1


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C raises, also in a job that a script has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("moment", ["own_weights", "installed", "saving", "__enter__", "__exit__"])
def test_ctrl_c_where_a_recorded_forward_begins_or_ends(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    recorder = watched(model)  # it runs a forward on fake tensors first
    before, step_of = surroundings(model), getattr(ForwardRecorder, moment)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return step_of(*args, **kwargs)

    monkeypatch.setattr(ForwardRecorder, moment, interrupted)
    with pytest.raises(KeyboardInterrupt), recorder:
        step(model, call_of())
    assert surroundings(model) == before


def test_an_exception_in_backward_leaves_nothing_behind() -> None:
    model = tiny_llama()
    before = surroundings(model)

    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError

    hook = model.get_parameter("model.layers.1.mlp.up_proj.weight").register_hook(fail)
    recorder = watched(model)
    with recorder, pytest.raises(ValueError):  # noqa: PT011
        step(model, call_of())
    hook.remove()
    model.zero_grad()
    assert surroundings(model) == before
    first = [op_event for op_event in recorder.profile(device="cpu").op_events if op_event.call[0] == 0]
    assert {op_event.backward_place for op_event in first} == {-1}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_inside_the_model(reentrant: bool) -> None:
    model = tiny_llama()
    step(model, call_of())
    expected = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    profile, outside = recorded(model)
    assert_bitwise_equal(gradients(model), expected)
    assert_events_partition(profile)
    assert measured_peak_bytes(profile) >= outside.peak_bytes()
    if not reentrant:
        assert profile.saved == record_saved(model, model_structure(model), (), call_of())


def test_frozen_weights_and_a_frozen_beginning() -> None:
    model = tiny_llama()
    for name, parameter in model.named_parameters():
        if "layers.0." in name or "embed" in name or "q_proj" in name:
            parameter.requires_grad_(False)
    profile, outside = recorded(model)
    assert profile.saved == record_saved(model, model_structure(model), (), call_of())
    assert_events_partition(profile)
    assert measured_peak_bytes(profile) == outside.peak_bytes()
    assert {op_event.num_ops for op_event in profile.op_events if op_event.call[0] == 0} == {0}


def test_a_forward_without_backward() -> None:
    model = tiny_llama()
    recorder = watched(model)
    with recorder:
        model(**call_of())
    profile = recorder.profile(device="cpu")
    assert_events_partition(profile)
    assert {op_event.backward_place for op_event in profile.op_events} == {-1}
    assert {op_event.backward_ms for op_event in profile.op_events} == {0}


def test_only_a_forward_with_gradients_counts_and_only_the_first() -> None:
    model = tiny_llama()
    alone, _ = recorded(model)
    recorder = watched(model)
    with recorder:
        with torch.no_grad():
            model(**call_of())
        losses = [model(**call_of()).loss for _ in range(2)]
        sum(losses).backward()
    profile = recorder.profile(device="cpu")
    assert profile.saved == alone.saved
    assert_events_partition(profile)
    layers = [op_event for op_event in profile.op_events if isinstance(op_event.call[0], int)]
    expected = [op_event for op_event in alone.op_events if isinstance(op_event.call[0], int)]
    assert [op_event.call for op_event in layers] == [op_event.call for op_event in expected]
    assert [op_event.forward_ms for op_event in layers] == [op_event.forward_ms for op_event in expected]


def test_a_graph_that_never_runs_backward_is_freed() -> None:
    model, call = tiny_llama(), call_of()
    shape, meter = model_structure(model), counting_meter(model, call)
    meter.start()
    gc.disable()  # a cycle would wait for it
    try:
        before = meter.allocated_bytes()
        with StepRecorder(model, shape, meter, TickClock()) as recorder:
            loss = model(**call).loss
        del loss
        left = meter.allocated_bytes() - before
    finally:
        gc.enable()
        meter.stop()
    assert recorder.profile(device="cpu").saved.by_op()
    assert left < 1000, "nothing but what the model keeps for itself"


def test_nothing_recorded_is_an_error() -> None:
    recorder = watched(tiny_llama())
    with recorder:
        pass
    with pytest.raises(RuntimeError, match="no step was recorded"):
        recorder.profile(device="cpu")


def test_saved_tensors_are_held_as_told() -> None:
    held: list[int] = []

    def hold(tensor: torch.Tensor) -> Ticket:
        held.append(tensor.nbytes)
        return keep(tensor)

    model = tiny_llama()
    step(model, call_of())
    expected = gradients(model)
    model.zero_grad()
    profile, _ = recorded(model, hold=hold)
    assert_bitwise_equal(gradients(model), expected)
    uses = [use for storage in profile.saved.storages for use in storage.uses if use.kind == "saved"]
    assert len(held) > len(uses) > 0, "weights are saved too, and are no uses"


class Doubled(torch.autograd.Function):
    """A custom function whose inside is not seen, as that of an extension."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            ctx.save_for_backward(tensor.clone())
            return tensor * 2

    @staticmethod
    def backward(ctx: Any, *gradient: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors
        return gradient[0] * 2


def test_a_custom_function_is_a_event_of_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    mlp: Any = model.get_submodule("model.layers.1.mlp")
    plain = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda hidden: Doubled.apply(plain(hidden)), raising=True)
    profile, outside = recorded(model)
    found = [op_event for op_event in profile.op_events if op_event.call == (1, "mlp", 0)]
    assert [(op_event.forward_ms, op_event.num_ops, op_event.backward_ms) for op_event in found] == [
        (2, 1, 1)
    ]
    assert (1, "mlp") in profile.saved.by_op()
    assert measured_peak_bytes(profile) == outside.peak_bytes()


@pytest.mark.usefixtures("world_of_one")
def test_collectives_are_known() -> None:
    model = tiny_llama()

    def reduce(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        distributed.all_reduce(output.detach())

    hook = model.get_submodule("model.layers.1.mlp.down_proj").register_forward_hook(reduce)
    profile, _ = recorded(model)
    hook.remove()
    talking = {op_event.call[:2] for op_event in profile.op_events if op_event.communicates}
    assert talking == {(1, "mlp.down_proj.all_reduce")}
    assert is_collective(torch.ops.symm_mem.one_shot_all_reduce.default)


def compiled_llama() -> Any:
    model = tiny_llama(num_hidden_layers=2)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


def profile_of_compiled(model: Any) -> Profile:
    """Record the second step, which must be the first one again."""
    step(model, call_of())
    expected, before = gradients(model), surroundings(model)
    model.zero_grad()
    with watched(model) as recorder:
        step(model, call_of())
    assert_bitwise_equal(gradients(model), expected)
    assert surroundings(model) == before
    profile = recorder.profile(device="cpu")
    assert profile.compiled_layers == {0, 1}
    assert_events_partition(profile)
    return profile


def test_compiled_layers_are_one_event_each() -> None:
    model = compiled_llama()
    profile = profile_of_compiled(model)
    layers = [op_event for op_event in profile.op_events if isinstance(op_event.call[0], int)]
    assert [op_event.call for op_event in layers] == [(0, "", None), (1, "", None)]
    assert [op_event.num_ops for op_event in layers] == [
        layer.nodes for layer in model_structure(model).layers
    ]
    assert layers[0].backward_place > layers[1].backward_place >= 0
    assert {producer for producer, _ in profile.saved.by_op()} >= {0, 1}


def test_a_model_that_is_compiled_whole_is_one_event() -> None:
    model = tiny_llama(num_hidden_layers=2)
    model.compile(backend="aot_eager")
    profile = profile_of_compiled(model)
    (op_event,) = (op_event for op_event in profile.op_events if op_event.call[0] == 0)
    assert op_event.num_ops == sum(layer.nodes for layer in model_structure(model).layers)
    assert profile.saved.storages
