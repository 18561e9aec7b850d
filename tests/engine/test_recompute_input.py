"""`recompute_input`: what fully recomputed layers are called with leaves the device, and is back in time."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_actswap import MemoryPlan, PlanError, apply, load_config, model_structure, resolve_plan
from hf_actswap.engine import Link, PageableSlabs, host_budget, record_saved
from hf_actswap.engine.autograd_state import next_node_number
from hf_actswap.engine.schedule import OperatorClock
from hf_actswap.engine.swapped_storages import CheckpointInputs
from hf_actswap.plan import PlanRow, Windows, swapped_bytes
from hf_actswap.plan.wrappers import checkpoints_its_call
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.simulated_transfer import Clock, SimulatedTransfer
from tests.engine.spies import ErraticTransfer
from tests.engine.test_recompute import held_bytes
from tests.engine.tiny_models import (
    BATCH,
    LENGTH,
    NUM_LAYERS,
    assert_bitwise_equal,
    assert_same_training,
    batch,
    forward,
    gradients,
    gradients_of_step,
    one_step,
    plan_of,
    tiny_llama,
    tiny_neox,
    train,
)
from tests.quick_cases import each_value_once, quick_first

INPUT_BYTES = BATCH * LENGTH * 32 * 4
"""One hidden state, fp32."""
FIRST = (PlanRow("embedding", "output", "swap", windows=Windows(10, 30)),)


def plan(
    layers: Any,
    prefetch: Any = 10,
    recompute: Any = True,
    swap: bool = True,
    model: nn.Module | None = None,
    **keys: Any,
) -> MemoryPlan:
    """Nothing else is swapped: the empty list keeps the default strategy away."""
    section = {"swap": swap, "default_prefetch": prefetch, "op_swap": [], "recompute_input": layers, **keys}
    recomputed = recompute if isinstance(recompute, dict) else {"recompute": recompute}
    config = load_config({"swap_config": section, "recompute_config": recomputed})
    return resolve_plan(config, model_structure(model or tiny_llama()))


@pytest.mark.parametrize("layers", quick_first([True, [0], [1, 2], [3], [0, 1, 2, 3]], 3), ids=str)
def test_exactly_the_inputs_leave_the_device(layers: Any) -> None:
    count = NUM_LAYERS if layers is True else len(layers)
    recomputed, _ = held_bytes(plan(False))
    held, offloaded_bytes = held_bytes(plan(layers))
    assert offloaded_bytes == count * INPUT_BYTES
    assert recomputed - held == offloaded_bytes


def test_the_input_of_a_layer_with_an_op_excluded() -> None:
    """Such a layer is no checkpoint: it is a region of ours."""
    recompute = {"recompute": [1, 2], "select_recompute_exclude": {"mlp": [1]}}
    found = {bool(layers): held_bytes(plan(layers, recompute=recompute)) for layers in (False, [1, 2])}
    assert found[True][1] == 2 * INPUT_BYTES
    assert found[False][0] - found[True][0] == 2 * INPUT_BYTES


@pytest.mark.parametrize("layers", [True, [1, 3]])
def test_the_forecast_counts_them(layers: Any) -> None:
    model = tiny_llama()
    ids = batch(0)
    saved = record_saved(model, model_structure(model), kwargs={"input_ids": ids, "labels": ids})
    chosen = plan(layers)
    applied = apply(model, chosen)
    one_step(model)
    assert swapped_bytes(saved, chosen) == applied.stats().offloaded_bytes


@each_value_once
@pytest.mark.parametrize("prefetch", [1, 10, 200])
@pytest.mark.parametrize(
    ("dtype", "accumulation", "autocast"),
    [
        (torch.float32, 1, None),
        (torch.float32, 2, None),
        (torch.bfloat16, 1, None),
        (torch.float32, 1, torch.bfloat16),
    ],
    ids=["fp32", "accumulation", "bf16", "autocast"],
)
def test_training_is_bitwise_the_same(
    prefetch: int, dtype: torch.dtype, accumulation: int, autocast: torch.dtype | None
) -> None:
    bare = train(tiny_llama(dtype), None, 4, accumulation, autocast)
    run = train(
        tiny_llama(dtype), plan(True, prefetch), 4, accumulation, autocast, ErraticTransfer([0, 2, 1])
    )
    assert_same_training(run, bare)
    assert run.stats[-1].offloads == run.stats[-1].prefetches == 4 * accumulation * NUM_LAYERS
    assert run.stats[-1].late_prefetches == 0
    assert run.stats[-1].live_swaps == run.stats[-1].host_bytes == 0


def test_dropout_draws_the_same_masks() -> None:
    model = tiny_neox(attn_implementation="eager")
    run = train(model, plan(True, model=model), 3)
    assert_same_training(run, train(tiny_neox(attn_implementation="eager"), None, 3))
    assert run.stats[-1].offloads == 3 * NUM_LAYERS


def test_a_second_backward_fetches_again() -> None:
    bare = gradients_of_step(tiny_llama())
    model = tiny_llama()
    applied = apply(model, plan(True))
    loss = forward(model)
    for count in range(1, 4):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert_bitwise_equal(gradients(model), bare)
        assert applied.stats().prefetches == count * NUM_LAYERS
    assert applied.stats().late_prefetches == 0


def events_of_step(model: nn.Module, chosen: MemoryPlan) -> list[str]:
    """Copies, and where each layer runs: in forward, and again in backward."""
    transfer = RecordingTransfer()
    apply(model, chosen, transfer=transfer)
    for index, layer in enumerate(model.model.layers):
        note = functools.partial(_note, transfer, f"run {index}")
        layer.input_layernorm.register_forward_pre_hook(note)
    assert_bitwise_equal(gradients_of_step(model), gradients_of_step(tiny_llama()))
    return transfer.events


def _note(transfer: RecordingTransfer, text: str, *_: Any) -> None:
    transfer.note(text)


def in_backward(events: list[str]) -> list[str]:
    """Copies back by the layer that they are for, and runs."""
    backward = events[events.index("out 3 done") + 1 :]
    kept = [event for event in backward if event.startswith("run") or re.fullmatch(r"in \d start", event)]
    return [
        event if event.startswith("run") else f"fetch {NUM_LAYERS - 1 - int(event.split()[1])}"
        for event in kept
    ]


def nodes_of_checkpoints() -> int:
    """Nodes that a checkpoint adds to what it holds: up to PyTorch 2.11 saving the inputs is one."""
    before = next_node_number()
    checkpoint(torch.Tensor.detach, torch.zeros(1, requires_grad=True), use_reentrant=False)
    return next_node_number() - before


NODES = model_structure(tiny_llama()).layers[0].nodes + nodes_of_checkpoints()


@pytest.mark.parametrize(
    ("prefetch", "expected"),
    [
        (1, "fetch 3, fetch 2, run 3, fetch 1, run 2, fetch 0, run 1, run 0"),
        (NODES // 2, "fetch 3, fetch 2, run 3, fetch 1, run 2, fetch 0, run 1, run 0"),
        (NODES, "fetch 3, fetch 2, run 3, fetch 1, run 2, fetch 0, run 1, run 0"),
        (NODES + 1, "fetch 3, fetch 2, fetch 1, run 3, fetch 0, run 2, run 1, run 0"),
        (2 * NODES + 1, "fetch 3, fetch 2, fetch 1, fetch 0, run 3, run 2, run 1, run 0"),
    ],
)
def test_the_copy_back_starts_before_the_layer_above_is_run_again(prefetch: int, expected: str) -> None:
    """A layer is as many operators as it has nodes; the copy starts where backward enters a layer."""
    events = in_backward(events_of_step(tiny_llama(), plan(True, prefetch)))
    assert ", ".join(events) == expected


def test_a_number_reaches_into_a_layer_above_that_is_not_recomputed() -> None:
    """There backward calls us often, and ten operators are ten operators, not a layer."""
    model, transfer = tiny_llama(), RecordingTransfer()
    apply(model, plan([0, 1, 2], 10, [0, 1, 2]), transfer=transfer)
    model.model.layers[3].mlp.gate_proj.weight.register_hook(
        functools.partial(_note, transfer, "feed-forward of 3")
    )
    gradients_of_step(model)
    events = [event for event in transfer.events if event in ("feed-forward of 3", "in 0 start", "in 0 wait")]
    assert events == ["feed-forward of 3", "in 0 start", "in 0 wait"]


def test_memory_is_released_in_the_layer_that_follows() -> None:
    events = events_of_step(tiny_llama(), plan(True))
    forward = events[: events.index("out 3 done")]
    for layer in range(NUM_LAYERS - 1):
        assert forward.index(f"run {layer}") < forward.index(f"out {layer} wait")
        assert forward.index(f"out {layer} wait") < forward.index(f"run {layer + 1}")


def test_auto_measures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_budget, "PinnedSlabs", lambda _device, _cpus: PageableSlabs())
    clock = Clock()
    model, bare = tiny_llama(), tiny_llama()
    clock.drive(model)
    # 8 ms a copy: all fit into forward, and only the last layer's has no time to come back unseen.
    transfer = SimulatedTransfer(clock, Link(*[INPUT_BYTES / 8] * 4, 0.0), 10**9)
    applied = apply(model, plan(True, "auto"), transfer=transfer)
    before = applied.stats()
    for step in range(5):
        assert_bitwise_equal(gradients_of_step(model, step), gradients_of_step(bare, step))
        now = applied.stats()
        made, before = now - before, now
    assert made.offloaded_bytes == 3 * INPUT_BYTES
    assert made.stall_ms == 0
    assert made.late_prefetches == 0
    swapped = [adjustment for adjustment in applied.plan.adjustments if adjustment.got.startswith("swap")]
    assert {adjustment.op_path for adjustment in swapped} == {"output"}
    assert swapped[0].layers[0] == 0
    assert not any(
        "backward does not read it" in adjustment.reason for adjustment in applied.plan.adjustments
    )


def test_all_of_a_checkpointed_call_is_its_last_operator() -> None:
    """Also where saving the inputs is a node of the call itself, as on PyTorch 2.11."""
    clock, hooks = OperatorClock(), list[int]()
    inputs = CheckpointInputs(clock, hooks)
    leaf = torch.zeros(1, requires_grad=True)
    found = []
    for checkpoint_of_call in (None, "forward", None):
        inputs.start(checkpoint_of_call)
        first = next_node_number()
        _ = leaf * 2
        hooks.append(clock.now())
        _ = leaf * 3 * 4
        inputs.end(None)
        found.append((hooks[-1] - first, [clock.operator(first + node) - first for node in range(3)]))
    assert found == [(0, [0, 1, 2]), (2, [2, 2, 2]), (0, [0, 1, 2])]
    assert len(hooks) == 3


class _CheckpointsItsCall(type(tiny_llama().model.layers[0])):  # type: ignore[misc]
    """As a layer of transformers 5.17: the checkpoint is around the hooks of the layer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(super().__call__, **kwargs)
        return checkpoint(run, *args, use_reentrant=False)


# Later versions wrap forward instead.
_CheckpointsItsCall.forward = inspect.unwrap(type(tiny_llama().model.layers[0]).forward)


def test_a_checkpoint_around_the_hooks_is_prefetched_alike() -> None:
    found = []
    for old in (False, True):
        model = tiny_llama()
        model.gradient_checkpointing_enable()
        for layer in model.model.layers:
            if old and not checkpoints_its_call(layer):
                layer.__class__ = _CheckpointsItsCall
        rows = tuple(PlanRow(layer, "output", "swap", windows=Windows(10, 30)) for layer in range(3))
        found.append(in_backward(events_of_step(model, plan_of(*FIRST, *rows))))
    assert found[0] == found[1]
    assert found[0][:3] == ["fetch 3", "fetch 2", "run 3"]


# The plan.


def texts(chosen: MemoryPlan) -> list[str]:
    return [str(adjustment) for adjustment in chosen.adjustments]


def test_rows() -> None:
    assert plan([0, 2], 10, [0, 1, 2]).rows == (
        *FIRST,
        PlanRow(0, "", "recompute"),
        PlanRow(0, "output", "keep"),
        PlanRow(1, "", "recompute"),
        PlanRow(1, "output", "swap", windows=Windows(10, 30)),
        PlanRow(2, "", "recompute"),
        PlanRow(2, "output", "keep"),
    )
    assert plan([0, 2], 10, [0, 1, 2]).adjustments == ()
    assert {row.windows for row in plan(True, "auto").rows} == {None}


@pytest.mark.parametrize(
    ("layers", "recompute", "swap", "text"),
    [
        (
            [0, 1, 3],
            [1],
            True,
            ", layers 0, 3: asked input swapped, got no effect: the layer is not recomputed whole; its input "
            "has the fate of what produces it",
        ),
        (True, [1], True, None),
        (True, False, True, ": asked input swapped, got no effect: no layer is recomputed whole"),
        (True, True, False, ": asked swap, got no effect: swap_config.swap is false"),
    ],
)
def test_where_it_has_no_effect_this_is_said(
    layers: Any, recompute: Any, swap: bool, text: str | None
) -> None:
    chosen = plan(layers, 10, recompute, swap)
    assert swap or not any(row.fate == "swap" for row in chosen.rows)
    assert texts(chosen) == ([] if text is None else [f"swap_config.recompute_input{text}"])


def test_a_layer_that_the_model_does_not_have() -> None:
    with pytest.raises(PlanError, match=r"recompute_input: expected layers from 0 to 3, found 4\."):
        plan([0, 4])


def test_rule_2_holds_unless_it_is_lifted() -> None:
    swap = [{"backward_prefetch": 5, "layers": [1]}]
    held = plan(False, 10, [2], layer_swap=swap)
    assert held.fate(1, "output") == "keep"
    assert texts(held) == [
        "swap_config output, layers 1: asked swap, got keep: its output is used by an op with recomputation "
        "enabled, so it stays on the device (MindFormers, coupling rule 2)",
        "swap_config.default_prefetch: asked 10, got no effect: the entries of layer_swap have their own "
        "backward_prefetch, and replace the default",
    ]
    lifted = plan([2], 10, [2], layer_swap=swap)
    assert lifted.rows[0] == PlanRow(1, "", "swap", windows=Windows.of_prefetch(5))
    assert lifted.fate(1, "output") == "swap"
    assert texts(lifted) == []
