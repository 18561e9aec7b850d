"""``tile_config.loss`` of a divided model gives what it gives without, and no rank holds all its logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hf_actswap.apply import apply
from hf_actswap.engine import AppliedPlan, TiledLogits
from hf_actswap.integrations import parallel_training
from hf_actswap.integrations.parallel_training import replace_fused_head
from hf_actswap.parallel.collectives import tensor_parallel_group
from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients
from hf_actswap.parallel.patch_model import patch_model
from tests.engine.test_tiled_loss import IGNORED, STEPS, TOKENS, VOCABULARY, Meter, NoLogits, Step, furthest
from tests.engine.tiny_models import gradients
from tests.parallel.patch_worker import config
from tests.parallel.patched_models import tiny_model
from tests.parallel.test_patch_ways import adapted, counted
from tests.processes import launched, of_ranks, run_cases
from tests.quick_cases import slow_among

WORLD_SIZE, TILE, SMALL = 2, 10, 1e-3
PEAK_HIDDEN, PEAK_TOKENS, PEAK_VOCABULARY, PEAK_LAYERS = 64, 1024, 1000, 2
EVERY_STEP = {
    **STEPS,
    "own loss": lambda model, ids, labels: model(input_ids=ids, labels=labels).loss,
}

REPLICATED = ("labels", "label smoothing of the Trainer", "own loss")


@dataclass(frozen=True)
class Case:
    """A model and its step.

    Args:
        kind: of the model.
        step: of `EVERY_STEP`.
        sequence_parallel: else the ranks hold the hidden states alike.
        settings: of the model's configuration.
        length: tokens per sequence; that of a tile divides neither this nor those of the batch.
        head: ``lora`` on the layers, ``frozen``, ``alone`` (nothing else trains), or nothing of this.
    """

    kind: str = "llama"
    step: str = "labels"
    sequence_parallel: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    length: int = 24
    head: str = ""


TIED, ODD = {"tie_word_embeddings": True}, {"vocab_size": VOCABULARY + 1}
CASES: dict[str, Case] = {
    **{f"llama, {step}": Case(step=step) for step in EVERY_STEP},
    **{f"llama, {step}, replicated": Case(step=step, sequence_parallel=False) for step in REPLICATED},
    "odd length": Case(length=23),
    "odd vocabulary": Case(settings=ODD),
    "odd vocabulary, label smoothing": Case(settings=ODD, step="label smoothing of the Trainer"),
    "gemma2, tied and odd": Case("gemma2", settings={**TIED, **ODD, "final_logit_softcapping": 0.5}),
    "qwen2, tied": Case("qwen2", settings=TIED, sequence_parallel=False),
    "granite": Case("granite", settings={"logits_scaling": 3.0}),
    "mixtral": Case("mixtral"),
    "phi, with a bias": Case("phi"),
    "lora": Case(head="lora"),
    "frozen": Case(head="frozen", sequence_parallel=False),
    "alone": Case(head="alone"),
}
SLOW = {
    *("llama, tuple", "llama, label smoothing of torch", "llama, last tokens", "llama, labels, replicated"),
    *("llama, label smoothing of the Trainer, replicated", "odd length", "odd vocabulary, label smoothing"),
    *("granite", "mixtral", "phi, with a bias", "reads_replicated", "collectives_replicated"),
    "peaks_replicated",
}


def data(length: int = 24, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels ``[2, length]``, the same on every rank."""
    ids = torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :7] = IGNORED
    return ids, labels


def made(case: Case, group: dist.ProcessGroup, dtype: torch.dtype = torch.float32) -> Any:
    """Return the divided model."""
    model: Any = tiny_model(case.kind, **{"vocab_size": VOCABULARY, **case.settings}).to(dtype)
    if case.head == "lora":
        model = adapted(model, case.kind)
    elif case.head:
        model.requires_grad_(case.head == "frozen")
        model.lm_head.requires_grad_(case.head == "alone")
    if case.step == "own loss":
        model.loss_function = lambda logits, labels, vocab_size, **_: F.cross_entropy(
            logits.float()[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
        )
    patch_model(model, config(group, case.sequence_parallel), group)
    return model


def tiled(model: Any, group: dist.ProcessGroup, written: Any = TOKENS["tile_config"]["loss"]) -> AppliedPlan:
    """Put head and loss in tiles on a divided model."""
    document = {
        "tile_config": {"loss": written},
        "parallel_config": {"tensor_parallel_size": WORLD_SIZE},
    }
    with tensor_parallel_group(group):
        return apply(model, document)


def steps(model: Any, step: Step, group: dist.ProcessGroup, length: int) -> tuple[list[float], Any]:
    """Accumulate two batches; return their losses, and the gradients that this rank has."""
    losses = []
    for _ in range(2):
        loss = step(model, *data(length))
        loss.backward()
        losses.append(loss.item())
    allreduce_sequence_parallel_gradients(model, group)
    return losses, gradients(model)


def run_case(case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    """Losses and gradients of both; no tensor of the divided model has logits of more than a tile."""
    step = EVERY_STEP[case.step]
    losses, expected = steps(made(case, group), step, group, case.length)
    model = made(case, group)
    whole = model.config.vocab_size
    part = -(-whole // WORLD_SIZE)
    with tiled(model, group) as applied, NoLogits(whole, part, WORLD_SIZE * part):
        tiled_losses, found = steps(model, step, group, case.length)
    return {
        "losses": (losses, tiled_losses),
        "error": furthest(found, expected, SMALL),
        "adjustments": [str(item) for item in applied.plan.adjustments],
        "restored": "forward" not in vars((model.get_base_model() if case.head == "lora" else model).lm_head),
    }


def run_reads(sequence_parallel: bool, group: dist.ProcessGroup) -> dict[str, Any]:
    """Pairs of what the model gives without tiles, and with: logits, losses and text."""
    case = Case("gemma2", settings=ODD, sequence_parallel=sequence_parallel, length=23)
    models, (ids, labels) = [made(case, group), made(case, group)], data(23)
    found: dict[str, Any] = {}

    def both(call: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
        return [torch.as_tensor(call(model).detach().numpy()) for model in models]

    with tiled(models[1], group) as applied:
        trained = [model(input_ids=ids, labels=labels).logits for model in models]
        found["read in training"] = [one.detach() + 0 for one in trained]
        found["largest in training"] = [one.float().argmax(-1) for one in trained]
        found["kinds"] = [type(one) is TiledLogits for one in trained]
        found["unlabelled"] = both(lambda model: model(input_ids=ids).logits)
        found["alone"] = both(lambda model: model.lm_head(model.model(ids)[0]))
        with torch.no_grad():
            found["evaluated"] = both(lambda model: model(input_ids=ids, labels=labels).logits)
            with NoLogits(201, 101, 202):
                loss = models[1](input_ids=ids, labels=labels).loss
            found["evaluation loss"] = [models[0](input_ids=ids, labels=labels).loss, loss]
        greedy = {"max_new_tokens": 4, "do_sample": False}
        found["text"] = [model.eval().generate(ids, **greedy) for model in models]
        found["adjustments"] = applied.plan.adjustments
    return found


def run_unknown_op(group: dist.ProcessGroup) -> dict[str, Any]:
    """A loss that mixes tokens of the logits of a model that trains: they are read whole, and it is said."""

    def step(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = model(input_ids=ids, labels=labels)
        return out.loss + (out.logits - out.logits.mean(1, keepdim=True)).pow(2).mean()

    losses, expected = steps(made(Case(), group), step, group, 24)
    model = made(Case(), group)
    with tiled(model, group) as applied:
        tiled_losses, found = steps(model, step, group, 24)
    adjustments = [str(item) for item in applied.plan.adjustments]
    return {
        "losses": (losses, tiled_losses),
        "error": furthest(found, expected, SMALL),
        "adjustments": adjustments,
    }


def run_autocast(group: dist.ProcessGroup) -> dict[str, Any]:
    """As `run_case`, of a model in fp32 that autocast runs in bf16."""

    def step(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, labels=labels).loss

    losses, expected = steps(made(Case(), group), step, group, 24)
    model = made(Case(), group)
    with tiled(model, group):
        tiled_losses, found = steps(model, step, group, 24)
    return {"losses": (losses, tiled_losses), "error": furthest(found, expected, SMALL)}


def run_fused_head(group: dist.ProcessGroup) -> list[tuple[torch.Tensor, ...]]:
    """What TRL's fused forward gives, and gradients, in pieces of 10 tokens: without tiles, and with."""
    found = []
    for written in ("off", TOKENS["tile_config"]["loss"]):
        model, (ids, labels) = tiny_model("llama", vocab_size=VOCABULARY), data()
        patched = patch_model(model, config(group, True), group)

        def fused(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            raise AssertionError("another one is put in its place")

        model.forward = MethodType(fused, model)
        replace_fused_head(patched)
        limits = (VOCABULARY, VOCABULARY // WORLD_SIZE) if written != "off" else (-1,)
        pieces = mock.patch.object(parallel_training, "_PIECE_TOKENS", TILE)
        with pieces, tiled(model, group, written), NoLogits(*limits):
            out = model(input_ids=ids, labels=labels, fused_lm_head=True)
            out.loss.backward()
        allreduce_sequence_parallel_gradients(model, group)
        values = [out.loss, out.log_probs, out.entropy, out.is_top1]
        found.append((*(value.detach() for value in values), model.lm_head.weight.grad))
    return found


def run_half(group: dist.ProcessGroup) -> torch.Tensor:
    """Squared distances from the truth: without tiles, and with, of the gradients of input and weight.

    The head is in bf16, the truth that of the same hidden states and weights in fp64; sums over batches.
    """
    case = Case(sequence_parallel=False)
    whole_weight = tiny_model("llama", vocab_size=VOCABULARY).lm_head.weight.detach().bfloat16().double()
    first, rows = group.rank() * VOCABULARY // WORLD_SIZE, VOCABULARY // WORLD_SIZE
    errors = torch.zeros(2, 2)
    for seed, (place, written) in product(range(4), enumerate(("off", {"tokens": 4}))):
        model, seen, (ids, labels) = made(case, group, torch.bfloat16), [], data(seed=seed)
        model.lm_head.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        model.lm_head.register_forward_pre_hook(lambda _, args: args[0].retain_grad())
        with tiled(model, group, written):
            STEPS["scaled for accumulation"](model, ids, labels).backward()
        hidden = seen[0].detach().double().requires_grad_()
        weight = whole_weight.clone().requires_grad_()
        labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:].reshape(-1)
        (F.cross_entropy((hidden @ weight.t()).view(-1, VOCABULARY), labels) / 3).backward()
        assert hidden.grad is not None
        own = weight.grad[first : first + rows]
        of_hidden, of_weight = seen[0].grad - hidden.grad, model.lm_head.weight.grad - own
        errors[place] += torch.stack([of_hidden.square().sum(), of_weight.square().sum()])
    return errors


def run_collectives(sequence_parallel: bool, group: dist.ProcessGroup) -> dict[str, dict[str, int]]:
    """Collectives of a step, and of an evaluation, that tiles add (or, below 0, spare)."""
    ids, labels = data()
    seen: list[Counter[str]] = []
    for written in ("off", TOKENS["tile_config"]["loss"]):
        model = made(Case(sequence_parallel=sequence_parallel), group)
        seen.append(Counter())
        with tiled(model, group, written), counted(seen[-1]) as begin:
            loss = model(input_ids=ids, labels=labels).loss
            begin("backward")
            loss.backward()
            begin("evaluation")
            with torch.no_grad():
                assert not model(input_ids=ids, labels=labels).loss.requires_grad
    whole, in_tiles = seen
    in_tiles.subtract(whole)
    return {name: count for name, count in in_tiles.items() if count}


def run_auto(group: dist.ProcessGroup) -> list[bool]:
    """Whether batches of 1,024 and of 1,026 tokens run in tiles."""
    model = made(Case(settings={"max_position_embeddings": 2048}), group)
    ids = torch.ones(2, 513, dtype=torch.long)
    with tiled(model, group, "auto"):
        return [
            type(model(input_ids=some, labels=some).logits) is TiledLogits for some in (ids[:, :512], ids)
        ]


def peak_bytes(sequence_parallel: bool, vocabulary: int, written: Any, group: Any) -> int:
    """Return the peak of one rank in a bf16 step, all layers recomputed."""
    sizes = {"hidden_size": PEAK_HIDDEN, "intermediate_size": 7 * PEAK_HIDDEN // 2, "head_dim": 16}
    settings = {**sizes, "vocab_size": vocabulary, "num_hidden_layers": PEAK_LAYERS}
    model = made(Case(sequence_parallel=sequence_parallel, settings=settings), group, torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(0, vocabulary, (1, PEAK_TOKENS), generator=torch.Generator().manual_seed(1))
    document = {"recompute_config": {"recompute": True}, "tile_config": {"loss": written}}
    with tensor_parallel_group(group), apply(model, document), Meter(model) as meter:
        model(input_ids=ids, labels=ids).loss.backward()
    return meter.peak_bytes


def run_peaks(sequence_parallel: bool, group: dist.ProcessGroup) -> list[int]:
    """Peaks without tiles, and with: of each two, the second of a vocabulary twice as large."""
    return [
        peak_bytes(sequence_parallel, times * PEAK_VOCABULARY, written, group)
        for written, times in product(("off", {"tokens": 64}), (1, 2))
    ]


def run_on_rank(slow_too: bool, rank: int, folder: str) -> None:
    """Run each case on two ranks, or each that is not slow."""
    every: dict[str, Callable[[dist.ProcessGroup | None], object]] = {
        name: partial(run_case, case) for name, case in CASES.items()
    }
    for suffix, sequence_parallel in (("", True), ("_replicated", False)):
        every[f"reads{suffix}"] = partial(run_reads, sequence_parallel)
        every[f"collectives{suffix}"] = partial(run_collectives, sequence_parallel)
        every[f"peaks{suffix}"] = partial(run_peaks, sequence_parallel)
    every |= {
        "fused_head": run_fused_head,
        "unknown_op": run_unknown_op,
        "autocast": run_autocast,
        "half": run_half,
        "auto": run_auto,
    }
    cases = {name: run for name, run in every.items() if slow_too or name not in SLOW}
    run_cases(rank, folder, WORLD_SIZE, cases, {name: [[0, 1]] for name in cases})


pytestmark = pytest.mark.dist


results = launched(run_on_rank, WORLD_SIZE, 280, told_of_slow=True)


@pytest.mark.parametrize("name", slow_among(CASES, SLOW))
def test_losses_bitwise_and_gradients_to_rounding(name: str, results: Path) -> None:
    for found in of_ranks(results, name):
        losses, tiled_losses = found["losses"]
        tolerance = 1e-6 if "smoothing of torch" in name else 0  # it divides two sums, and the tiles one
        assert tiled_losses == pytest.approx(losses, rel=tolerance, abs=0)
        assert found["error"] < 2e-6
        assert found["adjustments"] == [], "nothing made the logits whole"
        assert found["restored"]


@pytest.mark.parametrize("name", slow_among(["reads", "reads_replicated"], SLOW))
def test_what_is_read(name: str, results: Path) -> None:
    """Logits in training, in evaluation and of the head alone, the loss of an evaluation, and text."""
    for found in of_ranks(results, name):
        assert found.pop("kinds") == [False, True]
        assert found.pop("adjustments") == ()
        assert len(found) == 7
        for what, (whole, tiled) in found.items():
            assert torch.equal(whole, tiled), what


def test_a_loss_of_whole_logits_says_so_and_is_right(results: Path) -> None:
    for found in of_ranks(results, "unknown_op"):
        losses, tiled_losses = found["losses"]
        assert tiled_losses == losses
        assert found["error"] < 2e-6
        (adjustment,) = found["adjustments"]
        assert "got whole logits: aten.mean" in adjustment


def test_the_fused_head_of_trl_as_without(results: Path) -> None:
    for whole, tiled in of_ranks(results, "fused_head"):
        for of_whole, of_tiled in zip(whole[:4], tiled[:4], strict=True):
            torch.testing.assert_close(of_tiled, of_whole, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(tiled[4], whole[4], rtol=1e-5, atol=1e-7)


def test_autocast_as_without(results: Path) -> None:
    for found in of_ranks(results, "autocast"):
        losses, tiled_losses = found["losses"]
        assert tiled_losses == losses
        assert found["error"] < 0.02


def test_half_precision_is_as_close_to_the_truth_as_without(results: Path) -> None:
    """Over the batches: of a single one either is up to a tenth closer than the other."""
    whole, tiled = sum(of_ranks(results, "half")).sqrt()
    assert (tiled > 0).all()
    assert (tiled < 1.02 * whole).all(), (tiled / whole).tolist()


@pytest.mark.parametrize("name", slow_among(["collectives", "collectives_replicated"], SLOW))
def test_collectives(name: str, results: Path) -> None:
    """Two reductions of a number or two per token, for each tile; the input is not gathered again."""
    more = -(-2 * 24 // TILE) - 1
    expected = {
        "forward all_reduce": 2 * more,
        "evaluation all_reduce": 2 * more,
        "evaluation all_gather": -1,
    }
    if name == "collectives":
        expected["backward all_gather"] = -1
    assert of_ranks(results, name) == [expected] * WORLD_SIZE


def test_auto_leaves_small_batches_whole(results: Path) -> None:
    assert of_ranks(results, "auto") == [[False, True]] * WORLD_SIZE


@pytest.mark.parametrize("name", slow_among(["peaks", "peaks_replicated"], SLOW))
def test_peaks(name: str, results: Path) -> None:
    """In hidden states: (L + 4 V / (tp H) + 5) without tiles; with them one layer's backward, whatever V.

    Under sequence parallelism ranks hold parts of the L inputs, and of two of the other hidden states.
    """
    unit = 2 * PEAK_TOKENS * PEAK_HIDDEN
    layers = PEAK_LAYERS / WORLD_SIZE if name == "peaks" else PEAK_LAYERS
    beside, most = (3, 19.1) if name == "peaks" else (5, 22.6)
    for found in of_ranks(results, name):
        whole, of_twice, tiled, tiled_of_twice = (item / unit for item in found)
        for vocabulary, peak in ((PEAK_VOCABULARY, whole), (2 * PEAK_VOCABULARY, of_twice)):
            assert peak == pytest.approx(
                4 * vocabulary / (WORLD_SIZE * PEAK_HIDDEN) + layers + beside, rel=0.02
            )
        assert abs(tiled_of_twice - tiled) < 1.01  # gloo's thread may hold what it summed a moment longer
        assert max(tiled, tiled_of_twice) < layers + most + 1.01
