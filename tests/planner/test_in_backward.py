"""The optimizer in backward: the same bits, and no more gradients on the device than those in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.testing._internal.distributed.fake_pg import FakeStore

from hf_actswap import PlanError, apply
from hf_actswap.config import MemoryConfig, load_config
from hf_actswap.errors import ConfigError
from hf_actswap.plan import MemoryPlan, model_structure
from hf_actswap.planner import OptimizerInBackward, OptimizerInBackwardError, predict, profile_from_shapes
from hf_actswap.planner.oom_guard import DeviceMemoryError
from hf_actswap.planner.record.adjusted import with_optimizer_in_backward
from tests.engine.tiny_models import tiny_llama

from .simulated_device import on_device
from .test_optimizer_states import (
    ALL,
    LAYERS,
    STREAMED,
    WHOLE,
    Training,
    assert_same_values,
)

every_kind = pytest.mark.parametrize("make", STREAMED.values(), ids=list(STREAMED))
ON = MemoryConfig(optimizer_in_backward=True)


def in_order(saved: dict[str, Any]) -> dict[str, Any]:
    """States are made in the order of gradients, so the dictionary's order is another."""
    return {**saved, "state": dict(sorted(saved["state"].items()))}


def assert_same(actual: Training, expected: Training) -> None:
    assert_same_values(list(actual.model.parameters()), list(expected.model.parameters()))
    assert_same_values(*(in_order(one.optimizer.state_dict()) for one in (actual, expected)))


class Accumulation:
    """What an optimizer of Accelerate has: it knows whether a micro-batch is the last of its step."""

    sync_gradients = True


def in_backward(training: Training, memory: MemoryConfig = ON) -> OptimizerInBackward:
    training.optimizer.gradient_state = Accumulation()  # type: ignore[attr-defined]
    found = OptimizerInBackward(training.optimizer, training.model, memory, lambda: training.states)
    found.attach()
    return found


def steps(training: Training, count: int, micro_batches: int = 1) -> Training:
    for _ in range(count):
        for number in range(micro_batches):
            state = getattr(training.optimizer, "gradient_state", Accumulation())
            state.sync_gradients = number == micro_batches - 1
            training.backwards()
        training.optimizer.step()
        training.optimizer.zero_grad()
    return training


@every_kind
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("managed", [False, True], ids=["states on the device", "states on the host"])
def test_the_same_bits(make: Callable[..., Any], micro_batches: int, managed: bool) -> None:
    expected = steps(Training(make, managed=False), 5, micro_batches)
    actual = Training(make, managed=managed)
    stepping = in_backward(actual)
    steps(actual, 5, micro_batches)
    assert_same(actual, expected)
    stepping.remove()
    assert_same(steps(actual, 2, micro_batches), steps(expected, 2, micro_batches))


def hooks_of(training: Training) -> list[Any]:
    optimizer, parameters = training.optimizer, training.model.parameters()
    on_parameters = [len(item._post_accumulate_grad_hooks or ()) for item in parameters]
    on_model = [training.model._forward_pre_hooks, training.model._forward_hooks]
    on_optimizer = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return [on_parameters, *(len(hooks) for hooks in (*on_model, *on_optimizer))]


def test_removed_it_leaves_nothing_behind() -> None:
    training = Training(managed=False)
    before = hooks_of(training)
    stepping = in_backward(training)
    assert hooks_of(training) != before
    stepping.remove()
    stepping.remove()
    assert hooks_of(training) == before
    training.backwards()
    assert all(item.grad is not None for item in training.model.layers.parameters())


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_no_more_gradients_than_those_in_flight(micro_batches: int) -> None:
    """Of a first micro-batch all gradients are there; in the last they go one by one."""
    training = Training(managed=False)
    in_backward(training)
    parameters = list(training.model.parameters())
    alive: list[list[int]] = []

    def count(_: torch.Tensor) -> None:
        alive[-1].append(sum(item.grad is not None for item in parameters))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)  # after ours
    for number in range(micro_batches):
        training.optimizer.gradient_state.sync_gradients = number == micro_batches - 1  # type: ignore[attr-defined]
        alive.append([])
        training.backwards()
    trained = 2 * LAYERS
    assert alive[-1] == ([0] * trained if micro_batches == 1 else list(range(trained - 1, -1, -1)))
    if micro_batches > 1:
        assert alive[0] == list(range(1, trained + 1))


def test_states_come_and_leave_with_their_parameter() -> None:
    """By bytes: what may be resident, or one parameter's; from the second step on nothing comes late."""
    training = Training(resident_bytes=1, groups=1)
    in_backward(training)
    steps(training, 2)
    one_parameter = max(2 * item.nbytes for item in training.model.parameters())
    training.transfer.most_bytes = 0
    seen: list[int] = []
    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(training.on().device_bytes))
    before = training.on().stats()
    training.backwards()
    assert max(seen) <= one_parameter
    assert training.transfer.most_bytes <= one_parameter
    moved = training.on().stats() - before
    assert moved.offloaded_bytes == moved.prefetched_bytes == training.on().state_bytes
    assert not any(item.grad is not None for item in training.model.parameters())


def test_the_states_of_the_next_parameters_come_ahead() -> None:
    training = Training(resident_bytes=ALL, groups=1)
    in_backward(training)
    steps(training, 3)
    late = training.on().stats().late_prefetches
    steps(training, 2)
    assert training.on().stats().late_prefetches == late


def test_a_parameter_that_the_last_micro_batch_does_not_use_is_stepped_at_the_end() -> None:
    """As the experts of a mixture: gradients of earlier micro-batches wait for ``optimizer.step()``."""
    runs = []
    for managed in (False, True):
        training = Training(managed=False)
        if managed:
            in_backward(training)
        for _ in range(3):
            if managed:
                training.optimizer.gradient_state.sync_gradients = False  # type: ignore[attr-defined]
            (training.loss() + training.model.unused.weight.pow(2).sum()).backward()
            if managed:
                training.optimizer.gradient_state.sync_gradients = True  # type: ignore[attr-defined]
            training.backwards()
            training.optimizer.step()
            training.optimizer.zero_grad()
        runs.append(training)
    assert_same(runs[1], runs[0])


def test_clipping_by_value() -> None:
    expected, actual = Training(managed=False), Training(managed=False)
    in_backward(actual, MemoryConfig(optimizer_in_backward=True, in_backward_clip_value=1e-3))
    steps(actual, 4)
    for _ in range(4):
        expected.backwards()
        clip_grad_value_(expected.model.parameters(), 1e-3)
        expected.optimizer.step()
        expected.optimizer.zero_grad()
    assert_same(actual, expected)


CLIPS = {
    "norm": lambda *given: torch.nn.utils.clip_grad_norm_(*given),
    "norm, imported before": clip_grad_norm_,
    "value": lambda *given: torch.nn.utils.clip_grad_value_(*given),
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=list(CLIPS))
def test_clipping_after_backward_is_rejected(clip: Callable[..., Any]) -> None:
    before = dict(vars(torch.nn.utils.clip_grad))
    training, other = Training(torch.optim.AdamW, managed=False), Training(torch.optim.AdamW, managed=False)
    stepping = in_backward(training)
    training.backwards()
    other.backwards()
    clip(other.model.parameters(), 1.0)
    with pytest.raises(
        OptimizerInBackwardError, match="in_backward_clip_value or in_backward_clip_last_norm"
    ):
        clip(training.model.parameters(), 1.0)
    stepping.remove()
    assert dict(vars(torch.nn.utils.clip_grad)) == before


def test_a_gradient_that_is_set_after_backward_is_rejected() -> None:
    """The optimizer would step this parameter again."""
    training = Training(managed=False)
    in_backward(training)
    training.backwards()
    parameter = next(training.model.parameters())
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(OptimizerInBackwardError, match="register_post_accumulate_grad_hook"):
        training.optimizer.step()


def test_a_hook_of_the_users_own_before_the_step_is_rejected() -> None:
    training = Training(managed=False)
    training.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(PlanError, match=r"no hook before optimizer\.step"):
        in_backward(training)


def test_clipping_by_the_norm_of_the_step_before() -> None:
    """By hand: the gradients of a step are scaled by what the norm of the step before asks for."""
    expected, actual = Training(managed=False), Training(managed=False)
    stepping = in_backward(actual, MemoryConfig(optimizer_in_backward=True, in_backward_clip_last_norm=0.01))
    last = None
    for _ in range(4):
        steps(actual, 1)
        expected.backwards()
        norm = clip_grad_norm_(expected.model.parameters(), float("inf"))
        for parameter in expected.model.layers.parameters():
            if last is not None:
                assert parameter.grad is not None
                parameter.grad.mul_((0.01 / (last + 1e-6)).clamp(max=1.0))
        expected.optimizer.step()
        expected.optimizer.zero_grad()
        last = norm
        assert stepping.grad_norm == norm
        assert norm > 0.01
    assert_same(actual, expected)


def test_norms_are_taken_where_they_are_read() -> None:
    for read in (False, True):
        training = Training(managed=False)
        stepping = OptimizerInBackward(training.optimizer, training.model, ON, reads_norm=read)
        stepping.attach()
        training.backwards()
        training.optimizer.step()
        assert (stepping.grad_norm is not None) == read


def test_schedulers_and_saved_states_are_as_ever() -> None:
    runs = []
    for managed in (False, True):
        training = Training(managed=False)
        if managed:
            in_backward(training)
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, gamma=0.5)
        for _ in range(3):
            steps(training, 1)
            scheduler.step()
        saved = training.optimizer.state_dict()
        training.optimizer.load_state_dict(saved)
        steps(training, 2)
        runs.append(training)
    assert_same(runs[1], runs[0])


def test_a_bare_loop_that_accumulates_is_an_error() -> None:
    training = Training(managed=False)
    OptimizerInBackward(training.optimizer, training.model, ON).attach()
    training.backwards()
    with pytest.raises(OptimizerInBackwardError, match="a second backward before it"):
        training.backwards()


def test_fp16_is_an_error_in_forward() -> None:
    training = Training(managed=False)
    OptimizerInBackward(training.optimizer, training.model, ON).attach()
    with torch.autocast("cpu", torch.float16), pytest.raises(OptimizerInBackwardError, match="fp16 autocast"):
        training.loss()
    with torch.autocast("cpu", torch.bfloat16):
        training.loss()


class Scaled(torch.optim.Optimizer):
    """As Accelerate's optimizer under fp16."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.scaler = optimizer, object()


def test_what_cannot_step_in_backward_is_named() -> None:
    training = Training(managed=False)
    model, parameters = training.model, list(training.model.parameters())
    for make in WHOLE.values():
        with pytest.raises(PlanError, match="computes each parameter by itself"):
            OptimizerInBackward(make(parameters), model, ON)
    with pytest.raises(PlanError, match="scaler"):
        OptimizerInBackward(Scaled(training.optimizer), model, ON)
    with pytest.raises(PlanError, match="differentiable: true"):
        OptimizerInBackward(torch.optim.AdamW(parameters, differentiable=True), model, ON)
    with pytest.raises(PlanError, match="the optimizer, which it steps"):
        apply(tiny_llama(), {"memory": {"optimizer_in_backward": True}})


def test_two_processes_are_named() -> None:
    training = Training(managed=False)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(
            PlanError, match=r"memory\.optimizer_in_backward.*one process, without DDP or FSDP"
        ):
            OptimizerInBackward(training.optimizer, training.model, ON)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"memory": {"in_backward_clip_value": 1.0}}, "optimizer_in_backward: true beside it"),
        ({"memory": {"optimizer_in_backward": True, "in_backward_clip_value": 0}}, "a number above 0"),
        (
            {"memory": {"optimizer_in_backward": True}, "parallel_config": {"tensor_parallel_size": 2}},
            "false beside tensor parallelism",
        ),
        ({"memory": {"optimizer_in_backward": True}, "stream_config": {"tokens": 64}}, "streamed sequence"),
    ],
)
def test_settings_that_exclude_each_other(document: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(document)


def _llama_trained(config: dict[str, Any] | None) -> tuple[list[float], list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = tiny_llama(tie_word_embeddings=True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(0), []
    applied = None if config is None else apply(model, config, optimizer=optimizer)
    for _ in range(6):
        ids = torch.randint(0, model.config.vocab_size, (2, 64), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if config is not None:
            assert all(item.grad is None for item in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if applied is not None:
        applied.remove()
    return losses, list(model.parameters()), in_order(optimizer.state_dict())


SWAP = {"swap_config": {"swap": True, "default_prefetch": 10}}
TILES = {"tile_config": {"loss": "auto", "tile": {"op_name": ["feed_forward"]}}}
SEARCH = {"mode": "smart_swap", "warmup_steps": 2, "search_steps": 2}


@pytest.mark.parametrize(
    "config",
    [
        {},
        SWAP,
        {"recompute_config": {"recompute": True}},
        {"recompute_config": {"select_recompute": True}},
        TILES,
        {"memory": {**SEARCH, "budget_gib": 1}},
        {"memory": {**SEARCH, "preference": "memory_saving", "reduce_by_gib": 0.0005}},
    ],
    ids=["alone", "swap", "recompute", "select", "tiles", "planner", "planner, states on the host"],
)
def test_the_same_bits_beside_swap_recomputation_tiles_and_the_planner(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected = _llama_trained(None)
    memory = {**config.get("memory", {}), "optimizer_in_backward": True}
    with caplog.at_level(logging.INFO, logger="hf_actswap"):
        found = _llama_trained({**config, "memory": memory})
    assert "steps each parameter in backward" in caplog.text
    assert found[0] == expected[0]
    assert_same_values(found[1], expected[1])
    assert_same_values(found[2], expected[2])


def test_memory_that_runs_out_behind_a_step_is_named_and_nothing_steps_twice() -> None:
    torch.manual_seed(0)
    model = tiny_llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory = {**SEARCH, "budget_gib": 1, "optimizer_in_backward": True}
    planner: Any = apply(model, {"memory": memory}, optimizer=optimizer)
    ids = torch.randint(0, model.config.vocab_size, (2, 64))

    def micro_batch() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    while planner.phase != "stable":
        planner.micro_batch(micro_batch)
        optimizer.step()
    weight = model.model.layers[-1].mlp.down_proj.weight
    steps_before = optimizer.state[weight]["step"].item()

    def fills_up(_: torch.Tensor) -> None:
        handle.remove()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 KiB. (a test)")

    handle = model.model.layers[0].mlp.down_proj.weight.register_post_accumulate_grad_hook(fills_up)
    with pytest.raises(DeviceMemoryError, match="cannot be run again: it has changed a buffer or a weight"):
        planner.micro_batch(micro_batch)
    with pytest.raises(OptimizerInBackwardError, match="a second backward before it"):
        micro_batch()
    assert optimizer.state[weight]["step"].item() == steps_before + 1
    planner.remove()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_predicted_peak_is_the_counted_one(micro_batches: int) -> None:
    """Wide weights and few tokens: the gradients that are freed in backward decide."""
    peaks: dict[bool, int] = {}
    for stepping in (False, True):
        torch.manual_seed(0)
        model = tiny_llama(hidden_size=128, intermediate_size=512).train()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        optimizer.gradient_state = Accumulation()
        applied = apply(model, {"memory": {"optimizer_in_backward": stepping}}, optimizer=optimizer)
        with on_device(model) as device:
            for _ in range(2):
                device.reset_peak()
                for number in range(micro_batches):
                    optimizer.gradient_state.sync_gradients = number == micro_batches - 1
                    ids = torch.randint(0, model.config.vocab_size, (1, 8))
                    model(input_ids=ids, labels=ids).loss.backward()
                peaks[stepping] = device.peak_bytes()
                optimizer.step()
                optimizer.zero_grad()
        applied.remove()
    ids = torch.empty((1, 8), dtype=torch.long)
    states = sum(2 * weight.nbytes for weight in model.parameters())
    profile = profile_from_shapes(
        model,
        model_structure(model),
        {"input_ids": ids, "labels": ids},
        "H100",
        optimizer_state_bytes=states,
        gradients_exist=micro_batches > 1,
    )
    found = with_optimizer_in_backward(profile, micro_batches > 1)
    gradients = sum(weight.nbytes for weight in model.parameters())
    nothing = MemoryPlan((), 4)
    assert predict(profile, nothing).peak_bytes == pytest.approx(peaks[False], rel=0.02)
    assert predict(found, nothing).peak_bytes == pytest.approx(peaks[True], rel=0.02)
    assert profile.outside_base_bytes - found.outside_base_bytes == gradients
    if micro_batches == 1:
        assert peaks[False] - peaks[True] > 0.5 * gradients
