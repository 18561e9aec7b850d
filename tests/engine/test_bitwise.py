"""Whatever the plan, the numbers are those of training without one, bit for bit."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from hf_actswap import MemoryPlan, model_structure
from hf_actswap.engine import install
from hf_actswap.plan import PlanRow
from tests.engine.recording_transfer import RecordingTransfer
from tests.engine.tiny_models import (
    CASES,
    NUM_LAYERS,
    SWAP_CASES,
    Run,
    assert_bitwise_equal,
    assert_same_training,
    gradients_of_step,
    plan_of,
    recompute_rows,
    swap_everything,
    swap_rows,
    tiny_llama,
    tiny_neox,
    train,
)
from tests.quick_cases import each_value_once, quick_first

STEPS = 20
FP32, BF16 = torch.float32, torch.bfloat16
PRECISIONS = {"fp32": (FP32, None, STEPS), "bf16": (BF16, None, 4), "autocast": (FP32, BF16, 4)}
"""Dtype of the weights, of autocast, and the number of steps: many in one precision, a few in the others."""


@lru_cache(maxsize=1)
def functional_ops() -> tuple[str, ...]:
    """The functional ops of a Llama layer."""
    ops = tuple(op.path for op in model_structure(tiny_llama()).layers[0].ops if op.kind == "function")
    assert "self_attn.flash_attention" in ops
    assert "mlp.mul" in ops
    return ops


def plan_named(name: str) -> MemoryPlan | str | None:
    """A case of the documents, or one of our own."""
    if name in CASES:
        return CASES[name]
    layers = range(NUM_LAYERS)
    if name == "every_function_recomputed":
        return plan_of(*recompute_rows(functional_ops(), layers))
    if name == "everything_swapped":
        return swap_everything(prefetch_ops=3)
    if name == "swap_inside_recompute":
        return plan_of(*recompute_rows([""], layers), *swap_rows(["self_attn.flash_attention"], layers, 5))
    if name == "modules_and_functions_recomputed":
        rows = recompute_rows(["input_layernorm", "self_attn.v_proj", "mlp.mul", "mlp.act_fn.silu"], layers)
        return plan_of(*rows, *swap_rows(["post_attention_layernorm", "output"], layers, 5))
    raise KeyError(name)


OWN = (
    "every_function_recomputed",
    "everything_swapped",
    "swap_inside_recompute",
    "modules_and_functions_recomputed",
)
RECOMPUTED = ("case_4", "select_recompute", "exclude_inside_full", *OWN[:1], *OWN[2:])


def run_of(precision: str, name: str | None) -> Run:
    dtype, autocast, steps = PRECISIONS[precision]
    return train(tiny_llama(dtype), None if name is None else plan_named(name), steps, autocast=autocast)


@lru_cache(maxsize=8)
def bare_run(precision: str) -> Run:
    return run_of(precision, None)


def assert_plan_was_at_work(name: str, run: Run) -> None:
    """The comparison means something only if the engine did something in every step."""
    steps = len(run.losses)
    if name in SWAP_CASES or "swap" in name:
        assert run.stats[0].offloads > 0
        assert run.stats[-1].offloads == steps * run.stats[0].offloads
    if name in RECOMPUTED:
        assert run.stats[0].recomputes > 0
        assert run.stats[-1].recomputes == steps * run.stats[0].recomputes
    if name == "full_recompute":
        assert run.layer_runs == 2 * steps
    assert run.stats[-1].live_swaps == 0
    assert run.stats[-1].host_bytes == 0


@pytest.mark.essential
@each_value_once
@pytest.mark.parametrize("name", [*CASES, *OWN])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_is_bitwise_equal(name: str, precision: str) -> None:
    run = run_of(precision, name)
    assert_plan_was_at_work(name, run)
    assert_same_training(run, bare_run(precision))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", ["everything_swapped", "swap_inside_recompute"])
def test_in_blocks_of_several_pieces(name: str) -> None:
    run = run_of("bf16", name)
    assert_plan_was_at_work(name, run)
    assert_same_training(run, bare_run("bf16"))


def test_the_comparison_can_fail() -> None:
    with pytest.raises(AssertionError):
        assert_same_training(bare_run("bf16"), bare_run("autocast"))


@each_value_once
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", [*CASES, "every_function_recomputed", "everything_swapped"])
def test_dropout_is_replayed(name: str, attention: str) -> None:
    settings = {"attention_dropout": 0.3, "attn_implementation": attention}
    bare = train(tiny_llama(**settings), None, 3)
    assert bare.losses != train(tiny_llama(attn_implementation=attention), None, 3).losses
    assert_same_training(train(tiny_llama(**settings), plan_named(name), 3), bare)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("parallel_residual", [True, False])
def test_another_family_with_all_its_dropouts(attention: str, parallel_residual: bool) -> None:
    settings = {"attn_implementation": attention, "use_parallel_residual": parallel_residual}
    bare = train(tiny_neox(**settings), None, 3)
    ops = [op.path for op in model_structure(tiny_neox(**settings)).layers[0].ops if op.kind == "function"]
    half = int(parallel_residual)  # each plan with each attention, and with one of the two residuals
    plans: list[MemoryPlan | str] = [
        *CASES.values(),
        plan_of(*recompute_rows(ops, range(NUM_LAYERS))),
        plan_of(*recompute_rows(["attention", "mlp"], range(NUM_LAYERS))),
        swap_everything(prefetch_ops=3),
    ]
    for plan in plans[half::2] if attention == "sdpa" else plans[1 - half :: 2]:
        assert_same_training(train(tiny_neox(**settings), plan, 3), bare)


@pytest.mark.parametrize(
    "name",
    quick_first(["everything_swapped", "every_function_recomputed", "case_4", "full_recompute"], 2),
)
def test_tied_embeddings(name: str) -> None:
    bare = train(tiny_llama(tie_word_embeddings=True), None, 3)
    assert_same_training(train(tiny_llama(tie_word_embeddings=True), plan_named(name), 3), bare)


@pytest.mark.parametrize(
    "name",
    quick_first(dict.fromkeys(["case_4", "exclude_inside_full", "everything_swapped", *OWN[:1], *CASES]), 4),
)
def test_gradient_accumulation(name: str) -> None:
    bare = train(tiny_llama(), None, 3, accumulation=3)
    run = train(tiny_llama(), plan_named(name), 3, accumulation=3)
    assert run.stats[-1].forwards == 9
    assert_same_training(run, bare)


@pytest.mark.parametrize("prefetch_ops", quick_first([0, 7, 100_000, 1, 100], 3))
def test_every_window_gives_the_same_numbers(prefetch_ops: int) -> None:
    run = train(tiny_llama(), swap_everything(prefetch_ops), 2, transfer=RecordingTransfer())
    assert run.stats[-1].offloads > 0
    bare = bare_run("fp32")
    assert run.losses == bare.losses[:2]
    assert_same_training(run, Run(bare.losses[:2], bare.grads[:2]))


@pytest.mark.slow
def test_each_functional_op_alone() -> None:
    """A fault in one op's region is not hidden by the others'."""
    model = tiny_llama()
    shape, bare = model_structure(model), gradients_of_step(model)
    for path in functional_ops():
        for rows in (recompute_rows([path], range(NUM_LAYERS)), swap_rows([path], range(NUM_LAYERS), 4)):
            with install(model, plan_of(*rows), shape):
                assert_bitwise_equal(gradients_of_step(model), bare)


def test_an_ordinal_names_one_call() -> None:
    """A layer adds twice; each call can be decided alone."""
    bare = train(tiny_llama(), None, 1)
    bytes_of = []
    for ordinal in (0, 1, None):
        row = swap_rows(["add"], [1])[0]
        chosen = PlanRow(row.scope, row.op_path, row.fate, ordinal, row.windows)
        run = train(tiny_llama(), plan_of(chosen), 1)
        assert_same_training(run, bare)
        bytes_of.append(run.stats[0].offloaded_bytes)
    assert bytes_of[2] >= max(bytes_of[:2]) > 0
