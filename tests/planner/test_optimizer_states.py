"""Optimizer states on the host: the same bits, the device's bytes, and whoever else looks."""

from __future__ import annotations

import copy
import io
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from hf_actswap.engine import BlockingTransfer, Copy, HostBuffer, HostPool, PageableSlabs
from hf_actswap.errors import PlanError
from hf_actswap.planner import CountingMeter, OptimizerStates
from hf_actswap.planner.states.state_bytes import expected_state_bytes
from tests.engine.recording_transfer import RecordingTransfer

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
WIDTH, LAYERS, BATCH = 16, 6, 4
ALL = 2**40
STREAMED: dict[str, Make] = {
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "Adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True, foreach=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "Adafactor foreach": lambda p: torch.optim.Adafactor(p, lr=0.05, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.05),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.5),
}


class OwnAdamW(torch.optim.AdamW):
    """An optimizer with a step around its base class's, which reads a state that it looked up before."""

    def step(self, closure: Any = None) -> Any:
        held = [self.state[p] for group in self.param_groups for p in group["params"] if p.grad is not None]
        loss = super().step(closure)
        for state in held:
            state["exp_avg"].mul_(0.5)
        return loss


WHOLE: dict[str, Make] = {
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "a subclass": lambda p: OwnAdamW(p, lr=0.05),
}
every_kind = pytest.mark.parametrize("make", (STREAMED | WHOLE).values(), ids=list(STREAMED | WHOLE))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, foreach=True)


class Stack(nn.Module):
    """Layers, and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden.pow(2).mean()


class WatchingTransfer(RecordingTransfer):
    """Notes the most bytes of states on the device, whenever a copy is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.states: OptimizerStates | None = None
        self.most_bytes = 0

    def offload(self, source: torch.Tensor, host: HostBuffer) -> Copy:
        self._note(0)
        return super().offload(source, host)

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        self._note(host.size_bytes)
        return super().reload(host, after)

    def _note(self, more_bytes: int) -> None:
        if self.states is not None:
            self.most_bytes = max(self.most_bytes, self.states.device_bytes + more_bytes)


def pool(cap_bytes: int | None = None) -> HostPool:
    return HostPool(PageableSlabs(), cap_bytes, slab_bytes=1)


@dataclass
class Training:
    """A model, its optimizer, and perhaps its states on the host; the data is the same for all."""

    make: Make = adamw
    managed: bool = True
    resident_bytes: int | None = None
    min_tensor_bytes: int = 4 * WIDTH
    groups: int = 2
    host: HostPool = field(default_factory=pool)
    with_layers: bool = True

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Stack()
        parameters = list(self.model.parameters())
        cut = len(parameters) // self.groups
        if self.groups == 1:
            self.optimizer = self.make(parameters)
        else:
            first = {"params": parameters[:cut]}
            self.optimizer = self.make([first, {"params": parameters[cut:], "lr": 0.02}])  # type: ignore[list-item]
        self.transfer = WatchingTransfer()
        self.generator = torch.Generator().manual_seed(1)
        self.states: OptimizerStates | None = None
        if self.managed:
            self.attach()

    def attach(self, optimizer: torch.optim.Optimizer | None = None) -> OptimizerStates:
        layers = list(self.model.layers) if self.with_layers else []
        self.states = self.transfer.states = OptimizerStates(
            optimizer or self.optimizer,
            self.transfer,
            self.host,
            model=self.model,
            layers=layers,
            resident_bytes=self.resident_bytes,
            min_tensor_bytes=self.min_tensor_bytes,
        )
        self.states.attach()
        return self.states

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(BATCH, WIDTH, generator=self.generator))

    def backwards(self, micro_batches: int = 1) -> None:
        for _ in range(micro_batches):
            self.loss().backward()

    def steps(self, count: int, micro_batches: int = 1) -> Training:
        for _ in range(count):
            self.backwards(micro_batches)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def on(self) -> OptimizerStates:
        assert self.states is not None
        return self.states


def tensors_of(value: Any) -> list[Any]:
    """Leaves of a state dictionary, on the host."""
    if isinstance(value, dict):
        return [leaf for key in value for leaf in tensors_of(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in tensors_of(item)]
    return [value.detach().clone()] if isinstance(value, torch.Tensor) else [value]


def assert_same_values(actual: Any, expected: Any) -> None:
    mine, theirs = tensors_of(actual), tensors_of(expected)
    assert len(mine) == len(theirs) > 0
    for a, b in zip(mine, theirs, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        else:
            assert a == b


def assert_same(actual: Training, expected: Training) -> None:
    """The same parameters and the same optimizer, to the bit."""
    assert_same_values(list(actual.model.parameters()), list(expected.model.parameters()))
    assert_same_values(actual.optimizer.state_dict(), expected.optimizer.state_dict())


@every_kind
@pytest.mark.parametrize("resident_bytes", [None, 1, ALL], ids=["a tenth", "one at a time", "all"])
def test_the_same_bits(make: Make, resident_bytes: int | None) -> None:
    expected = Training(make, managed=False).steps(5, 2)
    actual = Training(make, resident_bytes=resident_bytes).steps(5, 2)
    assert actual.on().stats().offloads > 0
    assert_same(actual, expected)
    actual.on().remove()
    assert_same(actual, expected)
    assert_same(actual.steps(2), expected.steps(2))


@pytest.mark.parametrize("resident_bytes", [1, ALL])
@pytest.mark.parametrize("make", [adamw, WHOLE["Rprop"], WHOLE["a subclass"]])
def test_blocking_copies_give_the_same_bits_too(make: Make, resident_bytes: int) -> None:
    Training(managed=False)  # now the hooks run in AdamW's own step too, inside that of a subclass
    actual = Training(make, managed=False)
    transfer = BlockingTransfer(torch.device("cpu"))
    states = OptimizerStates(
        actual.optimizer,
        transfer,
        pool(),
        model=actual.model,
        min_tensor_bytes=1,
        resident_bytes=resident_bytes,
    )
    states.attach()
    assert_same(actual.steps(4), Training(make, managed=False).steps(4))
    assert states.stats().stall_ms > 0


def test_frozen_parameters_that_the_optimizer_was_given_have_no_states() -> None:
    """Loops with adapters often give it all of the model's; frozen ones may wait on the host."""
    training = Training(managed=False)
    whole_bytes = expected_state_bytes(training.optimizer)
    first, *others = training.optimizer.param_groups[0]["params"]
    first.requires_grad_(False)
    assert whole_bytes is not None
    assert expected_state_bytes(training.optimizer) == whole_bytes - 2 * first.nbytes
    training.optimizer.param_groups[0]["params"] = [torch.zeros(3, device="meta"), *others]
    OptimizerStates(training.optimizer, training.transfer, HostPool(PageableSlabs()), model=training.model)
    for parameter in training.model.parameters():
        parameter.requires_grad_(False)
    assert "none that is trained" in rejected(training.optimizer)


def test_expected_states_have_their_host_memory_before_the_first_step() -> None:
    """Where copies overlap compute: else nothing is to be page-locked."""
    training = Training(managed=False)
    expected = expected_state_bytes(training.optimizer)
    assert expected is not None
    states = OptimizerStates(
        training.optimizer,
        training.transfer,
        host := HostPool(PageableSlabs(), slab_bytes=2**16),
        model=training.model,
        min_tensor_bytes=1,
        resident_bytes=1,
        expected_bytes=expected,
    )
    training.transfer.overlaps = True
    states.attach()
    training.transfer.overlaps = False  # there is no accelerator to ask
    host.wait_reserved()
    assert host.held_bytes == 2**16  # one slab, larger than all states
    assert host.used_bytes == 0
    training.steps(3)
    assert host.held_bytes == 2**16
    assert host.peak_bytes > expected / 2
    states.remove()
    host.close()


@pytest.mark.parametrize("make", [STREAMED["AdamW foreach"], STREAMED["AdamW fused"], WHOLE["Rprop"]])
def test_the_device_is_free_of_states_at_the_end_of_forward(make: Make) -> None:
    training = Training(make, managed=False, groups=1).steps(1)
    training.host = HostPool(PageableSlabs(), slab_bytes=2**20)
    training.host.give_back(training.host.take(2**20))  # type: ignore[arg-type]
    meter = CountingMeter()
    held = [*training.model.parameters(), *tensors_of_state(training.optimizer)]
    meter.own(held)
    all_bytes = sum(item.nbytes for item in tensors_of_state(training.optimizer) if item.numel() > 1)
    del held
    meter.start()
    try:
        before = meter.allocated_bytes()
        states = training.attach()
        for _ in range(3):
            with torch.no_grad():
                training.loss()
            assert states.state_bytes == all_bytes
            assert states.device_bytes == 0
            # What absent tensors refer to is a few bytes.
            assert before - meter.allocated_bytes() >= 0.9 * all_bytes
            training.steps(1)
    finally:
        meter.stop()


def tensors_of_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        item
        for entries in optimizer.state.values()
        for item in entries.values()
        if isinstance(item, torch.Tensor)
    ]


def test_at_most_what_may_be_resident() -> None:
    training = Training(STREAMED["AdamW foreach"])
    training.steps(1)
    states = training.on()
    one_parameter = 2 * WIDTH * WIDTH * 4
    for resident_bytes in (4 * one_parameter, 2 * one_parameter, one_parameter):
        states.resident_bytes = resident_bytes
        training.steps(1)  # in its forward those leave that the last step could keep
        training.transfer.most_bytes = 0
        training.steps(2)
        assert one_parameter <= training.transfer.most_bytes <= resident_bytes
    states.resident_bytes = 1
    training.steps(1)
    training.transfer.most_bytes = 0
    training.steps(2)
    assert training.transfer.most_bytes == one_parameter


def test_what_came_back_for_parameters_without_gradients_goes_again() -> None:
    actual, expected = Training(resident_bytes=ALL).steps(2), Training(managed=False).steps(2)
    for one in (actual, expected):
        one.backwards(1)
        for parameter in one.model.layers[0].parameters():
            parameter.grad = None
    states = actual.on()
    before, offloads = states.device_bytes, states.stats().offloads
    actual.optimizer.step()
    expected.optimizer.step()
    assert states.device_bytes == before - 2 * 4 * (WIDTH + 1) * WIDTH
    assert states.stats().offloads == offloads
    assert_same(actual.steps(2), expected.steps(2))


class MemoryInPieces(WatchingTransfer):
    """A device that has no room for every third state, until nothing else leaves."""

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        self.asked = getattr(self, "asked", 0) + 1
        if self.asked % 3 == 0:
            raise torch.OutOfMemoryError("what is free is in pieces")
        return super().reload(host, after)


@pytest.mark.parametrize("resident_bytes", [1, 5 * 2 * WIDTH * WIDTH * 4])
def test_memory_in_pieces_makes_states_come_later(resident_bytes: int) -> None:
    actual, expected = Training(resident_bytes=resident_bytes).steps(2), Training(managed=False).steps(2)
    actual.transfer.__class__ = MemoryInPieces
    assert_same(actual.steps(3), expected.steps(3))


def test_states_return_in_the_last_backward_and_leave_by_the_last_layer() -> None:
    training = Training(resident_bytes=ALL, groups=1).steps(2, micro_batches=3)
    states = training.on()
    seen: list[int] = []
    for layer in training.model.layers:
        layer.register_forward_hook(lambda *_: seen.append(states.device_bytes))
    shares = []
    for _ in range(3):
        training.backwards(1)
        shares.append(states.device_bytes / states.state_bytes)
    assert shares == [0, 0, 1]
    first = seen[:LAYERS]
    assert first == sorted(first, reverse=True)
    assert len(set(first)) == LAYERS
    assert seen[LAYERS - 1 :] == [0] * (2 * LAYERS + 1)
    assert states.stats().late_prefetches == 0


def copies_out_not_waited_for(log: list[tuple[str, int, str]]) -> int:
    started, waited = (sum(entry[::2] == ("out", what) for entry in log) for what in ("start", "wait"))
    return started - waited


def test_copies_out_run_beside_the_forward() -> None:
    """None before it, so that a value read after the step waits for none; then those of two layers."""
    training = Training(resident_bytes=ALL, min_tensor_bytes=4 * WIDTH * WIDTH).steps(2)
    log = training.transfer.log
    training.backwards(1)
    log.clear()
    training.optimizer.step()
    assert not [entry for entry in log if entry[0] == "out"]
    waiting: list[int] = []
    for layer in training.model.layers:
        layer.register_forward_pre_hook(lambda *_: waiting.append(copies_out_not_waited_for(log)))
    training.loss()
    outs = [entry for entry in log if entry[::2] == ("out", "start")]
    assert 0 < max(waiting) <= len(outs) / 2
    assert waiting[-1] == 0


@pytest.mark.parametrize("micro_batches", [[3, 3, 1, 1, 3, 3, 2], [1, 2, 1, 3]])
def test_a_changing_number_of_micro_batches(micro_batches: list[int]) -> None:
    actual, expected = Training(resident_bytes=ALL), Training(managed=False)
    for count in micro_batches:
        actual.steps(1, count)
        expected.steps(1, count)
    assert_same(actual, expected)


def test_what_came_back_for_nothing_goes_again_without_a_copy() -> None:
    training = Training(resident_bytes=ALL).steps(3, 1)
    training.backwards(1)
    states = training.on()
    assert states.device_bytes == states.state_bytes
    offloads = states.stats().offloads
    with torch.no_grad():
        training.loss()
    assert states.device_bytes == 0
    assert states.stats().offloads == offloads
    expected = Training(managed=False).steps(3, 1)
    expected.backwards(1)
    with torch.no_grad():
        expected.loss()
    for one in (training, expected):
        one.optimizer.step()
    assert_same(training, expected)


MOMENTS: dict[str, Callable[[Training], None]] = {
    "after the step": lambda training: None,
    "after a forward": lambda training: training.model(torch.ones(1, WIDTH)) and None,
    "after a backward": lambda training: training.backwards(1),
}
every_moment = pytest.mark.parametrize("moment", MOMENTS.values(), ids=list(MOMENTS))


@every_moment
@pytest.mark.parametrize("make", [adamw, STREAMED["Adafactor"], WHOLE["a subclass"]])
def test_a_state_dict_has_the_values(make: Make, moment: Callable[[Training], None]) -> None:
    actual, expected = Training(make).steps(3), Training(make, managed=False).steps(3)
    for one in (actual, expected):
        moment(one)
    saved = actual.optimizer.state_dict()
    then = copy.deepcopy(expected.optimizer.state_dict())
    assert_same_values(saved, then)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    assert_same_values(torch.load(file), then)
    for one in (actual, expected):
        one.optimizer.step()
        one.steps(1)
    assert_same_values(saved, then)  # it is of that time
    assert_same(actual, expected)


def test_saving_needs_no_room_on_the_device() -> None:
    training = Training().steps(2)
    prefetches, device_bytes = training.on().stats().prefetches, training.on().device_bytes
    training.optimizer.state_dict()
    assert training.on().device_bytes <= device_bytes < training.on().state_bytes
    assert training.on().stats().prefetches == prefetches


@every_moment
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [adamw, STREAMED["SGD momentum"], WHOLE["Rprop"]])
def test_resume(make: Make, moment: Callable[[Training], None], dtype: torch.dtype) -> None:
    source = Training(make, managed=False).steps(2)
    saved = copy.deepcopy(source.optimizer.state_dict())
    actual, expected = Training(make).steps(3), Training(make, managed=False).steps(3)
    for one in (actual, expected):
        one.model.to(dtype)
        one.optimizer.zero_grad()
        if dtype is torch.float32:
            moment(one)
    untouched = copy.deepcopy(saved)
    for one in (actual, expected):
        one.optimizer.load_state_dict(saved if one is actual else copy.deepcopy(saved))
    assert_same(actual, expected)
    if dtype is torch.float32:
        assert_same(actual.steps(2), expected.steps(2))
    if make is not WHOLE["Rprop"]:  # those take over the tensors of the dictionary, as without us
        assert_same_values(saved, untouched)
    assert all(item.isfinite().all() for item in tensors_of(saved["state"]))


def test_loading_keeps_to_what_may_be_resident() -> None:
    saved = Training(managed=False).steps(2).optimizer.state_dict()
    one_parameter = 2 * WIDTH * WIDTH * 4
    training = Training(resident_bytes=one_parameter)
    training.optimizer.load_state_dict(saved)
    assert 0 < training.transfer.most_bytes <= 2 * one_parameter
    assert training.on().state_bytes == sum(
        item.nbytes for item in tensors_of(saved["state"]) if item.numel() > 1
    )
    assert training.on().device_bytes <= one_parameter


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    actual, expected = Training().steps(2), Training(managed=False).steps(2)
    other = Training(managed=False, groups=1).steps(1).optimizer.state_dict()
    with pytest.raises(ValueError, match="parameter groups"):
        actual.optimizer.load_state_dict(other)
    assert_same(actual.steps(2), expected.steps(2))


@every_moment
def test_a_look_by_hand(moment: Callable[[Training], None]) -> None:
    actual, expected = Training().steps(3), Training(managed=False).steps(3)
    for one in (actual, expected):
        moment(one)
    for mine, theirs in zip(actual.model.parameters(), expected.model.parameters(), strict=True):
        assert (mine in actual.optimizer.state) == (theirs in expected.optimizer.state)
        if mine in actual.optimizer.state:
            assert_same_values(actual.optimizer.state[mine], expected.optimizer.state[theirs])
    for one in (actual, expected):  # and a hand that writes
        one.optimizer.state[one.model.layers[2].weight]["exp_avg"].zero_()
    assert_same_values(dict(actual.optimizer.state), dict(expected.optimizer.state))
    assert_same_values(list(actual.optimizer.state.values()), list(expected.optimizer.state.values()))
    for one in (actual, expected):
        one.optimizer.step()
    assert_same(actual.steps(2), expected.steps(2))


def test_a_tensor_kept_from_before_is_nan_while_its_values_are_away() -> None:
    training = Training().steps(2)
    kept = training.optimizer.state[training.model.layers[0].weight]["exp_avg"]
    assert kept.isfinite().all()
    with torch.no_grad():
        training.loss()
    assert kept.shape == (WIDTH, WIDTH)
    assert kept.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"):
        kept.mul_(2)
    assert training.optimizer.state[training.model.layers[0].weight]["exp_avg"] is kept
    assert kept.isfinite().all()


def test_copies_of_the_optimizer_are_plain() -> None:
    actual, expected = Training().steps(2), Training(managed=False).steps(2)
    with torch.no_grad():
        actual.loss()
    twin = copy.deepcopy(actual.optimizer)
    assert type(twin.state) is defaultdict
    assert_same_values(twin.state_dict(), expected.optimizer.state_dict())
    assert not twin._optimizer_step_pre_hooks


def test_an_exception_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    actual, expected = Training(resident_bytes=1).steps(2), Training(managed=False).steps(2)
    groups = [list(group["params"]) for group in actual.optimizer.param_groups]
    for one in (actual, expected):
        one.backwards(1)
    broken = actual.model.layers[0].weight
    grad, broken.grad = broken.grad, torch.ones(WIDTH, WIDTH).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        actual.optimizer.step()
    assert [list(map(id, group["params"])) for group in actual.optimizer.param_groups] == [
        list(map(id, group)) for group in groups
    ]
    broken.grad = grad
    for one in (actual, expected):  # the first parameter: nothing was stepped before it
        one.optimizer.step()
        one.optimizer.zero_grad()
    assert_same(actual.steps(2), expected.steps(2))


def test_an_exception_in_a_step_that_wants_all() -> None:
    actual, expected = Training(WHOLE["Rprop"]).steps(2), Training(WHOLE["Rprop"], managed=False).steps(2)
    handle = actual.optimizer.register_step_post_hook(_fail)
    actual.optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    actual.backwards(1)
    with pytest.raises(ZeroDivisionError):
        actual.optimizer.step()
    handle.remove()
    assert actual.on().device_bytes == actual.on().state_bytes
    expected.steps(1)
    with torch.no_grad():
        actual.loss()
        expected.loss()
    assert actual.on().device_bytes == 0
    actual.optimizer.zero_grad()
    assert_same(actual.steps(2), expected.steps(2))


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def test_hooks_of_others_find_all_parameters() -> None:
    actual, expected = Training().steps(1), Training(managed=False).steps(1)
    counts: list[int] = []

    def double(optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        counts.append(len(parameters))
        for parameter in parameters:
            parameter.grad.mul_(2)

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        counts.append(sum(len(group["params"]) for group in optimizer.param_groups))

    for one in (actual, expected):
        one.backwards(1)  # too late for ours to come last in the step that follows
        one.optimizer.register_step_pre_hook(double)
        one.optimizer.register_step_post_hook(count)
        one.optimizer.step()
        one.optimizer.zero_grad()
        one.steps(2)
    assert_same(actual, expected)
    assert counts == [2 * LAYERS, 2 * LAYERS + 2] * 6


@pytest.mark.parametrize("make", [adamw, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3)])
def test_closures(make: Make) -> None:
    runs = []
    for managed in (True, False):
        training = Training(make, managed=managed, groups=1)
        batch = torch.randn(BATCH, WIDTH, generator=training.generator)
        calls = []

        def closure(training: Training = training, batch: Any = batch, calls: Any = calls) -> torch.Tensor:
            training.optimizer.zero_grad()
            loss: torch.Tensor = training.model(batch)
            loss.backward()
            calls.append(loss.item())
            return loss

        losses = [training.optimizer.step(closure).item() for _ in range(3)]  # type: ignore[union-attr]
        runs.append((training, losses, calls))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]


def test_schedulers_clipping_and_frozen_parameters() -> None:
    runs = []
    for managed in (True, False):
        training = Training(managed=managed)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 6)
        for step in range(6):
            training.model.layers[1].requires_grad_(step % 3 != 2)
            training.backwards(2)
            clip_grad_norm_(training.model.parameters(), 0.01)
            training.optimizer.step()
            scheduler.step()
            training.optimizer.zero_grad()
        runs.append(training)
    assert_same(*runs)


@pytest.mark.parametrize("make", [adamw, STREAMED["AdamW fused"], WHOLE["Rprop"]])
def test_a_gradient_scaler_skips_steps(make: Make) -> None:
    runs = []
    for managed in (True, False):
        training = Training(make, managed=managed)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(5):
            scaler.scale(training.loss()).backward()
            if step in (1, 3):
                training.model.layers[0].weight.grad.fill_(float("inf"))
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
        runs.append(training)
    assert_same(*runs)


@pytest.mark.parametrize("early", [False, True], ids=["after prepare", "before prepare"])
def test_accelerate(early: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    runs = []
    for managed in (True, False):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        training = Training(managed=False).steps(1)
        if managed and early:
            training.attach()
        _, prepared = accelerator.prepare(training.model, training.optimizer)
        if managed and not early:
            training.attach(prepared)
        for _ in range(6):
            with accelerator.accumulate(training.model):
                accelerator.backward(training.loss())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(training.model.parameters(), 0.1)
                prepared.step()
                prepared.zero_grad()
        assert_same_values(prepared.state_dict(), training.optimizer.state_dict())
        prepared.load_state_dict(prepared.state_dict())
        runs.append(training.steps(1))
    assert runs[0].on().stats().offloads > 0
    assert_same(*runs)


def test_remove() -> None:
    training, expected = Training().steps(2), Training(managed=False).steps(2)
    with torch.no_grad():
        training.loss()
        expected.loss()
    states = training.on()
    assert training.host.used_bytes == states.state_bytes > 0
    states.remove()
    states.remove()
    optimizer = training.optimizer
    assert type(optimizer.state) is defaultdict
    for name, hooks in vars(optimizer).items():
        assert not (name.endswith("_hooks") and hooks), name
    for module in training.model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert all(not parameter._post_accumulate_grad_hooks for parameter in training.model.parameters())
    assert training.host.used_bytes == 0
    offloads = states.stats().offloads
    assert_same(training.steps(2), expected.steps(2))
    assert states.stats().offloads == offloads


class FullDevice(WatchingTransfer):
    """Has room for a few copies in, and then for none."""

    room = 3

    def reload(self, host: HostBuffer, after: Copy) -> tuple[torch.Tensor, Copy]:
        if self.room == 0:
            raise torch.OutOfMemoryError("the device is full")
        self.room -= 1
        return super().reload(host, after)


@pytest.mark.parametrize("moment", [lambda t: None, Training.backwards], ids=["at rest", "returning"])
@pytest.mark.parametrize("in_one_place", [True, False])
def test_states_for_which_the_device_has_no_room_stay_on_the_host(
    moment: Callable[[Training], None],
    in_one_place: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a training that only fits because its states are on the host."""
    if not in_one_place:
        monkeypatch.setattr(HostBuffer, "whole", lambda _: None)
    expected, actual = Training(managed=False).steps(3), Training()
    moment(actual.steps(3))
    moment(expected)
    actual.optimizer.zero_grad()
    expected.optimizer.zero_grad()
    actual.transfer.__class__ = FullDevice
    with caplog.at_level(logging.WARNING):
        actual.on().remove()
    assert "The device has no room for the optimizer's states" in caplog.text
    assert_same(actual, expected)
    assert type(actual.optimizer.state) is defaultdict
    assert actual.host.used_bytes == actual.host.held_bytes == 0  # freed: the tensors alone have the memory
    actual.transfer.__class__, actual.host = WatchingTransfer, pool()
    actual.attach()
    assert_same(actual.steps(2), expected.steps(2))


def test_what_has_no_host_memory_stays(caplog: pytest.LogCaptureFixture) -> None:
    cap_bytes = 3 * WIDTH * WIDTH * 4
    with caplog.at_level(logging.WARNING):
        actual = Training(host=pool(cap_bytes)).steps(3)
    assert actual.on().state_bytes <= cap_bytes
    assert actual.on().state_bytes > 0
    assert sum(actual.on().stats().rejected.values()) > 0
    assert sum("host memory has no room" in record.message for record in caplog.records) == 1
    assert_same(actual, Training(managed=False).steps(3))


def test_small_states_stay() -> None:
    training = Training(min_tensor_bytes=WIDTH * WIDTH * 4).steps(2)
    assert training.on().state_bytes == LAYERS * 2 * WIDTH * WIDTH * 4


@pytest.mark.parametrize("kept_outside", [False, True])
def test_states_that_share_a_storage(kept_outside: bool) -> None:
    runs = []
    for managed in (True, False):
        training = Training(managed=False).steps(1)
        states = [
            entries for entries in training.optimizer.state.values() if entries["exp_avg"].shape[0] == WIDTH
        ]
        flat = torch.cat([entries["exp_avg"].reshape(-1) for entries in states])
        at = 0
        for entries in states:
            own = entries["exp_avg"]
            entries["exp_avg"] = torch.empty(0).set_(flat.untyped_storage(), at, own.shape, own.stride())
            at += own.numel()
        kept = flat if kept_outside else None
        flat_bytes = flat.nbytes
        del flat, entries, own
        if managed:
            moved = training.attach().state_bytes
            others = sum(item["exp_avg_sq"].nbytes for item in states)
            assert moved == others + (0 if kept_outside else flat_bytes)
        training.steps(3)
        if kept is not None:
            held = torch.cat([item["exp_avg"].reshape(-1) for item in states])
            assert torch.equal(kept, held)
        runs.append(training)
    assert_same(*runs)


def test_without_layers_a_forward_begins_with_a_free_device() -> None:
    training = Training(with_layers=False, resident_bytes=ALL).steps(2)
    seen: list[int] = []
    training.model.layers[0].register_forward_hook(lambda *_: seen.append(training.on().device_bytes))
    training.steps(1)
    assert seen == [0]
    assert_same(training, Training(managed=False).steps(3))


def rejected(optimizer: Any, overlaps: bool = False) -> str:
    transfer: Any = RecordingTransfer()
    transfer.overlaps = overlaps
    with pytest.raises(PlanError) as raised:
        OptimizerStates(optimizer, transfer, pool(), model=Stack())
    return str(raised.value)


def test_rejections() -> None:
    parameters = list(Stack().parameters())
    assert "capturable" in rejected(torch.optim.AdamW(parameters, capturable=True))
    assert "differentiable" in rejected(torch.optim.SGD(parameters, differentiable=True))
    assert "accelerator" in rejected(torch.optim.AdamW(parameters), overlaps=True)
    assert "hooks" in rejected(object())
    adam = type("Adam8bit", (torch.optim.Adam,), {"__module__": "bitsandbytes.optim.adam"})
    assert "paged_adamw_8bit" in rejected(adam(parameters))


@pytest.mark.usefixtures("world_of_one")
def test_fsdp2() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    runs = []
    for managed in (True, False):
        training = Training(managed=False)
        del training.model.unused  # a parameter without states is more than the checkpoint's code takes
        mesh = init_device_mesh("cpu", (1,))
        for layer in training.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(training.model, mesh=mesh)
        training.optimizer = adamw(list(training.model.parameters()))
        if managed:
            training.attach()
        training.steps(3, 2)
        runs.append(training)
    states = runs[0].on()
    assert states.state_bytes == 2 * LAYERS * (WIDTH + 1) * WIDTH * 4
    with torch.no_grad():
        runs[0].loss()
        runs[1].loss()
    assert states.device_bytes == 0
    saved = [get_optimizer_state_dict(one.model, one.optimizer)["state"] for one in runs]
    whole = [
        {name: {key: _full(item) for key, item in entries.items()} for name, entries in one.items()}
        for one in saved
    ]
    assert_same_values(*whole)
    for one in runs:
        one.steps(2)
    assert_same_values(*[[_full(item) for item in one.model.parameters()] for one in runs])


def _full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value
