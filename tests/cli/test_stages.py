"""``plan`` of a pipeline: stages side by side, held against stages that run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_actswap import load_config, model_structure
from hf_actswap.cli import stages
from hf_actswap.pipeline import StagedModel, check_cut
from hf_actswap.pipeline.stages import layout_of
from hf_actswap.plan.layout import PipelineLayout
from tests.pipeline.staged_worker import Meter

from .conftest import TINY, Run

Write = Callable[[str], Path]

TOKENS, ROWS, HIDDEN_BYTES = 64, 2, 64 * 2 * 32 * 2
STEP = ("--seq", str(TOKENS), "--batch", str(ROWS), "--optimizer", "none")
PIPELINE = "parallel_config: {pipeline_stage: 2, schedule: 1f1b}\n"


@pytest.fixture(autouse=True, scope="module")
def one_layout() -> Iterator[None]:
    """Other layouts are not tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "_TRIES", 0)
        yield


@pytest.fixture(scope="module")
def staged(run: Run, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The document of two stages, of which the first runs one of its layers again."""
    path = tmp_path_factory.mktemp("stages") / "config.yaml"
    path.write_text(f"{PIPELINE}recompute_config: {{recompute: [1, 0]}}\n")
    ended = run("plan", tiny, path, *STEP, "--micro-batches", "6", "--json")
    assert ended.code == 0
    return ended.document


def test_what_the_schedule_adds(staged: Any) -> None:
    first, last = staged["stages"]
    assert [stage["layers"] for stage in (first, last)] == [[0, 1], [2, 3]]
    assert [stage["in_flight"] for stage in (first, last)] == [2, 1]
    assert staged["bubble_share"] == 1 / 7
    for stage in (first, last):
        kept = stage["micro_batch"]["kept_bytes"]
        assert stage["held_bytes"] == stage["in_flight"] * kept
        assert stage["buffer_bytes"] == 6 * HIDDEN_BYTES  # gradients on one, hidden states on the other
        others = (stage["in_flight"] - 1) * (kept + stage["loss_bytes"]) + stage["buffer_bytes"]
        assert stage["peak_bytes"] == stage["micro_batch"]["peak_bytes"] + others
    times = [stage["micro_batch_ms"] for stage in (first, last)]
    assert 6 * max(times) < staged["step_ms"] <= 6 * max(times) + min(times)
    assert staged["step_ms"] * (1 - max(stage["waits_share"] for stage in staged["stages"])) == (
        pytest.approx(6 * min(times))
    )
    logits_bytes = ROWS * TOKENS * TINY["vocab_size"] * 4
    assert first["loss_bytes"] == 0 < logits_bytes < last["loss_bytes"] < 3 * logits_bytes
    assert [row["scope"] for row in first["plan"]["rows"] if row["fate"] == "recompute"] == [0]
    assert not last["plan"]["rows"]
    assert first["micro_batch"]["recomputed_bytes"] > 0 == last["micro_batch"]["recomputed_bytes"]


def test_fates_are_searched_by_stage_within_one_budget(run: Run, tiny: Path, write: Write) -> None:
    ended = run("plan", tiny, write(PIPELINE), *STEP, "--json").document
    first, last = (stage["peak_bytes"] for stage in ended["stages"])
    assert first != last
    budget = (max(first, last) + min(first, last)) / 2 / 2**30
    section = f"memory: {{mode: adaptive, budget_gib: {budget}}}\n"
    found = run("plan", tiny, write(PIPELINE + section), *STEP, "--json").document
    assert max(stage["peak_bytes"] for stage in found["stages"]) <= found["budget_bytes"]
    # The stage that fits keeps everything, and the other has a plan.
    assert sorted(bool(stage["plan"]["rows"]) for stage in found["stages"]) == [False, True]


def words_of(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def planned(run: Run, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two stages of four micro-batches whose fates were searched: path, document and text."""
    path = tmp_path_factory.mktemp("planned") / "config.yaml"
    path.write_text(PIPELINE)
    asked = ("plan", tiny, path, *LONG, "--micro-batches", "4", "--device", "H100")
    free = run(*asked, "--json").document
    least = min(stage["fixed_bytes"] + stage["buffer_bytes"] for stage in free["stages"])
    budget = (max(stage["peak_bytes"] for stage in free["stages"]) + least) / 2 / 2**30
    path.write_text(f"{PIPELINE}memory: {{mode: adaptive, budget_gib: {budget}}}\n")
    return path, run(*asked, "--json").document, run(*asked).out, free


LONG = ("--seq", "512", "--batch", "8", "--optimizer", "none")


def test_the_first_lines_and_the_last(run: Run, tiny: Path, planned: Any, tmp_path: Path) -> None:
    """As of a plan for one device; the other steps are those of runs that ask for them."""
    path, found, text, free = planned
    (everything := tmp_path / "all.yaml").write_text(f"{PIPELINE}recompute_config: {{recompute: true}}\n")
    asked = ("plan", tiny, everything, *LONG, "--micro-batches", "4", "--device", "H100", "--json")
    checkpointed = run(*asked).document
    first, rest = words_of(text).split(" Host memory: ")
    peaks = [stage["peak_bytes"] for stage in found["stages"]]
    speed = 1000 * 4 * 8 * 512 / found["step_ms"]
    assert found["tokens_per_s"] == pytest.approx(speed)
    assert first.startswith(f"Fits with this plan: {max(peaks) / 2**20:.2f} MiB of ")
    assert f" on stage {peaks.index(max(peaks))}, {speed:,.0f} tokens/s, " in first
    for other, said in ((checkpointed, "checkpointing"), (free, "without a limit")):
        ratio = other["step_ms"] / found["step_ms"]
        how = f"{100 * abs(ratio - 1):.0f} % {'faster' if ratio > 1 else 'slower'} than {said}"
        assert (how if abs(ratio - 1) >= 0.005 else f"as fast as {said}") in first
    assert rest.endswith(
        f'To use it: actswap="{path}" in ActSwapTrainingArguments, with ActSwapTrainer on 2 processes, where '
        "each stage finds its plan by measurement."
    )


def test_host_memory_is_that_of_all_micro_batches_in_flight(run: Run, tiny: Path, planned: Any) -> None:
    path, found, text, _ = planned
    needs = [stage["in_flight"] * stage["micro_batch"]["host_bytes"] for stage in found["stages"]]
    assert max(needs) > 0
    assert [stage["host_bytes"] for stage in found["stages"]] == needs
    host = found["host_memory"]
    assert (host["rank_bytes"], host["machine_ranks"], host["machine_bytes"]) == (max(needs), 2, sum(needs))
    assert "for 2 ranks of a machine, of at most 192 GiB a rank (usual for H100" in words_of(text)
    limit = max(needs) / 2
    asked = ("plan", tiny, path, *LONG, "--micro-batches", "4", "--device", "H100", "--json")
    less = run(*asked, "--host-memory-gib", f"{limit / 0.9 / 2**30:.9f}").document
    assert 0 < less["host_memory"]["rank_bytes"] <= limit
    assert less["host_memory"]["limit_is_written"]


@pytest.mark.slow
def test_what_does_not_fit_says_so_first(run: Run, tiny: Path, write: Write) -> None:
    """Fates as the user wrote them are not searched; where they are, no plan is found."""
    ended = run("plan", tiny, write(PIPELINE), *STEP, "--budget", "600KiB")
    assert ended.code == 1
    first, *_ = ended.out.splitlines()
    assert first.startswith("Does not fit as written: ")
    assert words_of(ended.out).endswith("`memory: {mode: adaptive}` looks for a plan of each stage.")
    ended = run("plan", tiny, write(f"{PIPELINE}memory: {{mode: adaptive}}\n"), *STEP, "--budget", "100KiB")
    assert ended.code == 1
    assert words_of(ended.out).startswith("Does not fit: at least 0.00")
    assert "are needed, and the budget is 100" in words_of(ended.out)


@pytest.mark.slow
def test_a_better_offset_is_proposed(
    run: Run, tiny: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "_TRIES", 2)
    poor, good = "offset: [1, -1]", "offset: [0, 0]"
    text = PIPELINE.replace("schedule", f"{poor}, schedule")
    found = run("plan", tiny, write(text), *STEP, "--json").document
    given = run(
        "plan", tiny, write(text.replace(poor, f"offset: {found['better']['offset']}")), *STEP, "--json"
    ).document
    assert given["better"] is None
    assert given["step_ms"] == found["better"]["step_ms"] < 0.995 * found["step_ms"]
    assert f"  {good}" in run("plan", tiny, write(text), *STEP).out


def test_layers_move_to_the_fastest_stage_while_nothing_gets_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of two stages has the head: five layers before it would be faster, but take more memory."""
    monkeypatch.setattr(stages, "_TRIES", 9)

    def answer(parallel: Any, budget: int) -> Any:
        counts = tuple(4 + moved for moved in parallel.offset)
        busy = [10.0 * counts[0], 10.0 * counts[1] + 20.0]
        runs, peaks = [SimpleNamespace(busy_ms=ms) for ms in busy], tuple(100 * count for count in counts)
        step = SimpleNamespace(runs=runs, peaks_bytes=peaks, step_ms=max(busy))
        about = {"layout": PipelineLayout((counts,)), "parallel": parallel, "step": step}
        return SimpleNamespace(**about, budget_bytes=budget, searched=False, allocatable_bytes=0)

    predictor: Any = SimpleNamespace(answer=answer)
    parallel = load_config(PIPELINE).parallel_config
    poor = answer(replace(parallel, offset=(-2, 2)), 0)
    found = stages.LayoutPredictor.better(predictor, poor)
    assert found is not None
    assert found.layout.counts == ((4, 4),)
    assert stages.LayoutPredictor.better(predictor, found) is None


def test_the_whole_model_runs_once(run: Run, tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    calls = Counter[str]()
    learn = stages.record_layer_outputs
    monkeypatch.setattr(
        stages, "record_layer_outputs", lambda *given: calls.update(["whole"]) or learn(*given)
    )
    (path := tmp_path / "config.yaml").write_text(PIPELINE.replace("2", "4"))
    assert len(run("plan", tiny, path, *STEP, "--json").document["stages"]) == 4
    assert calls == {"whole": 1}


def held_by(stage: int, layout: Any) -> tuple[int, int]:
    """Bytes that autograd holds of a micro-batch on a stage that runs, and those of its parameters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY), dtype=torch.bfloat16).train()
    found = StagedModel(model, model_structure(model), layout, stage)
    check_cut(found, nullcontext)
    ids, meter = torch.zeros(ROWS, TOKENS, dtype=torch.long), Meter(model)
    hidden = torch.zeros(ROWS, TOKENS, 32, dtype=torch.bfloat16, requires_grad=True)
    batch = {"input_ids": ids, "labels": ids} if found.is_last else {"input_ids": ids}
    with torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda held: held.tensor):
        found.run(found.own_chunks[0], hidden if stage else None, lambda: model(**batch))
    return meter.most_bytes, sum(tensor.nbytes for tensor in found.own_state().values())


def test_bytes_are_those_of_stages_that_run(run: Run, tiny: Path, write: Write) -> None:
    found = run("plan", tiny, write(PIPELINE), *STEP, "--json").document["stages"]
    config = load_config({"parallel_config": {"pipeline_stage": 2}}).parallel_config
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY))
    layout = layout_of(model_structure(model), config)
    for number, stage in enumerate(found):
        held, weights = held_by(number, layout)
        kept = stage["micro_batch"]["kept_bytes"]
        assert 0.98 * held - stage["loss_bytes"] <= kept <= held  # besides, tables of positions and ids
        assert stage["fixed_bytes"] == pytest.approx(2 * weights, rel=0.01)  # and as many of gradients
        assert stage["in_flight"] == 2 - number


@pytest.mark.parametrize(
    ("schedule", "in_flight"), [("gpipe", [8, 8]), ("interleaved_1f1b", [2.5, 1.5]), ("zero_bubble", [8, 8])]
)
def test_schedules(run: Run, tiny: Path, write: Write, schedule: str, in_flight: list[float]) -> None:
    interleaves = 2 if schedule == "interleaved_1f1b" else 1
    text = f"{{pipeline_stage: 2, schedule: {schedule}, pp_interleave_num: {interleaves}}}"
    found = run("plan", tiny, write(f"parallel_config: {text}\n"), *STEP, "--json").document
    assert found["micro_batches"] == 8
    assert [stage["in_flight"] for stage in found["stages"]] == in_flight
    assert found["bubble_share"] == 1 / (8 * interleaves + 1)


def test_stages_that_ranks_divide(run: Run, tiny: Path, write: Write) -> None:
    divided = "tensor_parallel_size: 2, sequence_parallel_enabled: true"
    text = f"parallel_config: {{pipeline_stage: 2, schedule: 1f1b, {divided}}}\n"
    whole, half = (
        run("plan", tiny, write(config), *STEP, "--json").document["stages"] for config in (PIPELINE, text)
    )
    for one, other in zip(whole, half, strict=True):
        assert other["buffer_bytes"] == one["buffer_bytes"] / 2
        assert other["fixed_bytes"] == pytest.approx(one["fixed_bytes"] / 2, rel=0.05)


def test_text_fits_into_80_columns(run: Run, tiny: Path, write: Write) -> None:
    config = write(f"{PIPELINE}recompute_config: {{recompute: [1, 0]}}\n")
    ended = run("plan", tiny, config, *STEP, "--full")
    assert ended.code == 0
    assert max(map(len, ended.out.splitlines())) <= 80
    assert "Stage 0: a micro-batch" in ended.out
    assert "Stage 1: a micro-batch" not in ended.out


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (PIPELINE, ("--compare", "tp=1,2"), "--compare: expected nothing beside a pipeline"),
        pytest.param(
            *(f"{PIPELINE}memory: {{mode: adaptive, budget_gib: 0.0001}}\n", (), "By stage: stage 0 0.0003"),
            marks=pytest.mark.slow,
        ),
        (
            "parallel_config: {pipeline_stage: 2, schedule: zero_bubble, tensor_parallel_size: 2}\n",
            (),
            "tensor_parallel_size divides make them together",
        ),
        ("parallel_config: {pipeline_stage: 8, schedule: 1f1b}\n", (), "expected at most 4, the layers"),
    ],
)
def test_rejections(run: Run, tiny: Path, write: Write, text: str, words: tuple[str, ...], said: str) -> None:
    ended = run("plan", tiny, write(text or "{}\n"), *STEP, *words)
    assert ended.code == 1
    assert said in " ".join(ended.out.split())


def test_check_leaves_stages_to_plan(run: Run, tiny: Path, write: Write) -> None:
    ended = run("check", write(PIPELINE), "--model", tiny, "--seq", "64", "--json")
    assert ended.code == 0
    assert ended.document["predicted"] == {}
    assert "hf-actswap plan shows them" in ended.document["not_known"]
