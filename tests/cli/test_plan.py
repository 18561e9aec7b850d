"""``plan`` keeps within the budget, keeps what is written by hand, and writes plans that apply."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, ModernBertConfig, ModernBertForMaskedLM

from hf_actswap import PlanError, apply
from hf_actswap.plan import MemoryPlan, fingerprint_of, load_plan
from tests.plan.stacked_models import assert_equal, bart, t5, whisper

from .conftest import TINY, Ended, Run

pytest.importorskip("scipy")

Write = Callable[[str], Path]

STEP = ("--seq", "512", "--batch", "8", "--optimizer", "none")
GIB = 2**30


@pytest.fixture(scope="module")
def peaks(run: Run, tiny: Path) -> tuple[float, float]:
    """GiB of a step without a plan, and with every layer recomputed."""
    found = run("plan", tiny, *STEP, "--budget-gib", "8", "--json").document
    predicted = found["predicted"]
    assert found["plan"]["rows"] == []  # all fits: nothing is done
    return predicted["nothing"]["peak_bytes"] / GIB, predicted["recompute all"]["peak_bytes"] / GIB


@pytest.fixture(scope="module")
def halfway(run: Run, tiny: Path, peaks: tuple[float, float]) -> Any:
    """The document of a plan for a budget between the two."""
    ended = run("plan", tiny, *STEP, "--budget-gib", f"{sum(peaks) / 2:.6f}", "--json")
    assert ended.code == 0
    return ended.document


@pytest.fixture(scope="module")
def saved(
    run: Run, tiny: Path, peaks: tuple[float, float], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Ended]:
    """The same plan as a file, and what the command said when it wrote it."""
    path = tmp_path_factory.mktemp("saved") / "plan.json"
    ended = run("plan", tiny, *STEP, "--budget-gib", f"{sum(peaks) / 2:.6f}", "--save", path)
    assert ended.code == 0
    return path, ended


def test_within_the_budget(halfway: Any, peaks: tuple[float, float]) -> None:
    found = halfway
    assert found["budget_bytes"] == pytest.approx(sum(peaks) / 2 * GIB, rel=1e-3)
    assert found["predicted"]["planned"]["peak_bytes"] <= found["budget_bytes"]
    assert found["plan"]["rows"]
    assert found["mode"] == "adaptive"  # as in `actswap="auto"`


def test_a_budget_is_what_the_device_runs_out_of(halfway: Any) -> None:
    """A named budget leaves 3 % to the allocator's fragments; a device's has left its margin already."""
    assert halfway["allocatable_bytes"] == halfway["budget_bytes"] - round(0.08 * halfway["budget_bytes"])
    assert halfway["predicted"]["planned"]["peak_bytes"] <= halfway["allocatable_bytes"]


def test_what_nothing_fits_into(run: Run, tiny: Path) -> None:
    ended = run("plan", tiny, *STEP, "--budget-gib", "0.001", "--json")
    assert ended.code == 1
    (problem,) = ended.document["problems"]
    assert (problem["where"], problem["found"]) == ("memory.budget_gib", "0.001 GiB")
    assert problem["expected"].startswith("at least ")


def test_what_is_written_stays(run: Run, write: Write, tiny: Path, peaks: tuple[float, float]) -> None:
    config = write(
        "swap_config: {swap: true, op_swap: [{op_name: attention, backward_prefetch: 7, layers: [1]}]}\n"
        f"memory: {{mode: smart_swap, budget_gib: {sum(peaks) / 2:.6f}}}\n"
    )
    found = run("plan", tiny, config, *STEP, "--json").document
    rows = [row for row in found["plan"]["rows"] if row["scope"] == 1 and row["op_path"] == "self_attn"]
    assert [(row["fate"], row["windows"]["prefetch_ops"]) for row in rows] == [("swap", 7)]
    assert "as written" in found["predicted"]
    checked = run("check", config, "-m", tiny, *STEP, "--json").document
    assert checked["predicted"]["planned (smart_swap)"] == found["predicted"]["planned"]


def test_a_saved_plan_applies(run: Run, tiny: Path, tmp_path: Path, saved: tuple[Path, Ended]) -> None:
    path, ended = saved
    assert "Written to" in ended.out
    plan = load_plan(path)
    assert plan.rows
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny)).train()
    assert plan.fingerprint == fingerprint_of(model, (8, 512))
    wider = AutoConfig.from_pretrained(tiny)
    wider.intermediate_size += 8
    with pytest.raises(PlanError, match=r"plan\.fingerprint\.intermediate_size"):
        apply(AutoModelForCausalLM.from_config(wider).train(), path)
    ids = torch.ones(1, 16, dtype=torch.long)
    with apply(model, plan):
        model(input_ids=ids, labels=ids).loss.backward()
    assert run("plan", tiny, *STEP, "--budget-gib", "8", "--save", tmp_path / "no" / "plan.json").code == 2


def test_a_saved_plan_is_trained_with(tiny: Path, saved: tuple[Path, Ended]) -> None:
    """By the planner's `memory.plan_file`, which searches nothing then and leaves the file alone."""
    path, _ = saved
    before = path.read_bytes()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.ones(1, 16, dtype=torch.long)
    memory = {"mode": "smart_swap", "plan_file": str(path)}
    with apply(model, {"memory": memory}, optimizer=optimizer) as planner:
        assert planner.phase == "stable"
        assert planner.plan.rows == load_plan(path).rows
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        assert planner.phase == "stable"
    other = AutoConfig.from_pretrained(tiny)
    other.intermediate_size += 8
    model = AutoModelForCausalLM.from_config(other).train()
    with apply(model, {"memory": memory}, optimizer=torch.optim.AdamW(model.parameters())) as planner:
        assert planner.phase == "warm-up"  # the plan was made for another model
    assert path.read_bytes() == before


def test_save_overwrites_what_it_wrote_and_nothing_else(
    run: Run, tiny: Path, tmp_path: Path, saved: tuple[Path, Ended]
) -> None:
    asked = ("plan", tiny, *STEP, "--budget-gib", "8", "--save")
    own, other = tmp_path / "plan.json", tmp_path / "config.yaml"
    own.write_bytes(saved[0].read_bytes())
    other.write_text("swap_config: {swap: true}\n")
    trained = json.loads(own.read_text())
    del trained["predicted"]
    (tmp_path / "trained.json").write_text(json.dumps({**trained, "measured": {}}))
    assert run(*asked, own).code == 0
    assert own.read_bytes() != saved[0].read_bytes()
    for name in ("config.yaml", "trained.json"):
        before = (tmp_path / name).read_bytes()
        ended = run(*asked, tmp_path / name)
        assert ended.code == 2
        assert (tmp_path / name).read_bytes() == before


@pytest.mark.slow
def test_a_budget_below_the_least_names_one_that_does(
    run: Run, tiny: Path, peaks: tuple[float, float]
) -> None:
    workspaces = 64 * 2**20 / GIB  # cuBLAS's on Hopper: most of so small a step
    ended = run(
        "plan", tiny, *STEP, "--budget-gib", f"{(workspaces + 0.25 * (peaks[1] - workspaces)) / 0.92:.9f}"
    )
    assert ended.code == 1
    text = " ".join(ended.out.split())
    named = re.search(
        r"expected at least ([\d.]+) GiB, the least that any plan reaches, with head, mlp, [\w, ]+ in tiles, "
        r"found [\d.]+ GiB",
        text,
    )
    assert named is not None, text
    assert run("plan", tiny, *STEP, "--budget-gib", named[1]).code == 0


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model whose logits are most of a step."""
    folder = tmp_path_factory.mktemp("wordy")
    (folder / "config.json").write_text(json.dumps({**TINY, "vocab_size": 2048, "num_hidden_layers": 2}))
    return folder


def test_tiles_are_chosen_where_nothing_else_fits(
    run: Run, wordy: Path, tmp_path: Path, write: Write
) -> None:
    asked = ("plan", wordy, *STEP, "--device", "H100", "--json")
    path = tmp_path / "plan.json"
    found = run(*asked, "--budget", "128MiB", "--save", path).document
    steps, peak = found["predicted"], found["predicted"]["planned"]["peak_bytes"]
    assert peak <= 128 * 2**20 < min(steps["nothing"]["peak_bytes"], steps["recompute all"]["peak_bytes"])
    assert found["chosen_tiles"] == {"loss": "auto"}  # no more than is needed
    assert [tile["scope"] for tile in found["plan"]["tiles"]] == ["head"]
    (said,) = found["plan"]["adjustments"]
    assert "equal up to rounding" in said["reason"]
    assert load_plan(path).tiles == MemoryPlan.from_json(json.dumps(found["plan"])).tiles != ()
    pasted = write(json.dumps({"tile_config": found["chosen_tiles"]}))
    written = run(*asked, pasted, "--budget", "128MiB").document
    assert written["chosen_tiles"] is None
    assert written["predicted"]["planned"]["peak_bytes"] == peak
    shown = " ".join(run(*asked[:-1], "--budget", "128MiB").out.split())
    assert "tile_config: loss: auto Chosen because no mix of keep, swap and recompute" in shown


def test_tiles_and_the_states_on_the_host_come_together(run: Run, tmp_path: Path) -> None:
    """Where neither is enough; with the states on the device more is in tiles, and that is not enough."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 16384, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **sizes}))
    asked = (
        "plan",
        tmp_path,
        "--seq",
        "4k",
        "--device",
        "H100",
        "--optimizer",
        "adamw",
        "--json",
        "--budget",
    )
    found = run(*asked, "450MiB").document
    assert found["chosen_tiles"] == {"loss": "auto"}
    assert found["optimizer_states"]["place"] == "host"
    assert found["predicted"]["planned"]["peak_bytes"] <= 450 * 2**20
    more = run(*asked, "600MiB").document
    assert (more["chosen_tiles"], more["optimizer_states"]["place"]) == ({"loss": "auto"}, "device")
    less = run(*asked, "300MiB").document
    (problem,) = less["problems"]
    assert problem["hint"].endswith("That is with the optimizer's states on the host.")
    assert "in tiles" in problem["expected"]


def test_tiles_that_cannot_help_are_passed_over(run: Run, tmp_path: Path) -> None:
    """Where a layer's MLP decides, the head alone in tiles is not looked at."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "intermediate_size": 8192}))
    asked = ("plan", tmp_path, "--seq", "4k", "--device", "H100", "--json", "--budget")
    found = run(*asked, "400MiB")
    assert found.document["chosen_tiles"] == {"loss": "auto", "tile": [{"op_name": "feed_forward"}]}
    assert "head, mlp in tiles" in found.err
    assert "head in tiles" not in found.err
    missed = run(*asked, "150MiB")
    (problem,) = missed.document["problems"]
    assert "with head, mlp, input_layernorm" in problem["expected"]


@pytest.mark.parametrize(
    ("written", "tiled"),
    [("memory: {mode: smart_swap}", ""), ("tile_config: {loss: off}", ", with mlp, [a-z_, ]+ in tiles")],
    ids=["smart_swap", "off"],
)
def test_what_is_written_of_tiles_stays(
    run: Run, wordy: Path, write: Write, written: str, tiled: str
) -> None:
    ended = run("plan", wordy, write(written), *STEP, "--device", "H100", "--budget", "128MiB")
    assert ended.code == 1
    assert re.search(f"the least that any plan reaches{tiled}, found", " ".join(ended.out.split()))


def test_compare(run: Run, tiny: Path) -> None:
    ended = run("plan", tiny, *STEP, "--budget-gib", "8", "--compare", "tp=1,2,3", "--json")
    assert ended.code == 0
    one, two, three = ended.document["compare"]
    assert [item["tp"] for item in (one, two, three)] == [1, 2, 3]
    assert two["predicted"]["nothing"]["peak_bytes"] < one["predicted"]["nothing"]["peak_bytes"]
    assert three["problems"]
    assert one["communication"]["ms"] == 0
    told = two["communication"]
    assert 0 < told["added_ms"] <= told["ms"]
    text = run("plan", tiny, *STEP, "--budget-gib", "8", "--compare", "tp=1,3")
    assert "no plan" in text.out
    assert "by its data sheet; not measured" in " ".join(text.out.split())
    assert max(map(len, text.out.splitlines())) <= 80
    for wrong in ("tp", "tp=", "tp=0", "pp=2", "tp=1,x"):
        assert run("plan", tiny, "--compare", wrong).code == 2


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", ["true", "false"])
def test_head_and_loss_in_tiles_of_two_ranks(
    sequence_parallel: str, run: Run, tiny: Path, write: Write, tmp_path: Path
) -> None:
    """Of a predicted peak the rank's part of the logits is gone, 8 bytes for each, but for what is left."""
    vocabulary, tokens = 4096, 4096
    own = json.loads((tiny / "config.json").read_text()) | {"vocab_size": vocabulary}
    (tmp_path / "config.json").write_text(json.dumps(own))
    ranks = f"{{tensor_parallel_size: 2, sequence_parallel_enabled: {sequence_parallel}}}"
    peaks = []
    for loss in ("off", "{tokens: 64}"):
        recompute = "recompute_config: {recompute: true}"
        config = write(f"parallel_config: {ranks}\ntile_config: {{loss: {loss}}}\n{recompute}\n")
        options = ("--seq", str(tokens), "--optimizer", "none", "--json")
        found = run("plan", tmp_path, config, *options).document
        peaks.append(found["predicted"]["as written"]["peak_bytes"])
    whole, tiled = peaks
    assert 7 < (whole - tiled) / (tokens * vocabulary // 2) < 8


# Of `TINY`: embedding and head 2 x 64 x 32, final norm 32; in each of 4 layers q and o 2 x 32 x 32, k and v
# 2 x 16 x 32, gate, up and down 3 x 32 x 48, norms 2 x 32.
WEIGHTS = 2 * 64 * 32 + 32 + 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32)
BUFFERS = 2 * 4 * 4
"""``inv_freq`` and the copy of it that RoPE keeps: half a head's width of 8, fp32."""


def test_what_a_peak_consists_of(run: Run, tiny: Path) -> None:
    """bf16 weights and gradients, two bf16 states a weight. Gradients come in the order of backward."""
    step = ("--seq", "512", "--batch", "8", "--json")
    found = run("plan", tiny, *step, "--budget", "8", "--full").document
    parts, predicted = found["memory"], found["predicted"]
    assert list(parts) == list(predicted) == ["nothing", "recompute all", "planned", "least budget"]
    for name, part in parts.items():
        assert part["weights_bytes"] == 2 * WEIGHTS + BUFFERS
        assert part["states_bytes"] == 2 * 2 * WEIGHTS
        assert sum(part[key] for key in part if key != "decides") == predicted[name]["peak_bytes"]
        assert 0 <= part["gradients_bytes"] <= 2 * WEIGHTS
        assert part["decides"] == "activations"
    assert parts["nothing"]["gradients_bytes"] == 0  # the peak is where backward begins
    short = run("plan", tiny, "--seq", "1", "--json").document["memory"]["nothing"]
    assert short["decides"] == "states"


def test_an_impossible_budget_says_what_the_least_consists_of(run: Run, tiny: Path) -> None:
    text = " ".join(run("plan", tiny, "--seq", "1", "--budget", "1KiB").out.split())
    assert f"states {2 * 2 * WEIGHTS / 1024:.2f} KiB, activations" in text
    assert "states decide." in text


def test_a_short_table_and_a_full_one(run: Run, tiny: Path, peaks: tuple[float, float], halfway: Any) -> None:
    budget, document = ("--budget", f"{sum(peaks) / 2:.6f}"), halfway
    short, full = (run("plan", tiny, *STEP, *budget, *more).out for more in ((), ("--full", "--windows")))
    table = short.split("Plan\n")[1].split("Predicted")[0]
    fates = [line.split()[0] for line in table.splitlines()[2:] if line[:1].strip()]
    assert fates == sorted({row["fate"] for row in document["plan"]["rows"]} | {"keep"})
    assert "Layers" in full
    assert "Layers" not in short
    assert "least budget" in full
    assert "least budget" not in short
    counted = re.findall(r"([\w.]+)\s+\((\d+)\)", table)
    paths = (row["op_path"] for row in document["plan"]["rows"])
    rows = ["inputs" if path == "output" else path for path in paths]  # "layers' inputs"
    assert counted
    assert all(rows.count(op) >= int(count) > 0 for op, count in counted)
    for text in (short, full):
        assert max(map(len, text.splitlines())) <= 80
        assert "everything else" in text


def test_sizes_and_devices_as_people_write_them(run: Run, tiny: Path) -> None:
    step = ("--batch", "8", "--optimizer", "none", "--json")
    found = run(
        "plan", tiny, "--seq", "0.5k", *step, "--budget", "4GB", "--device", "NVIDIA A100-SXM4-40GB"
    ).document
    assert (found["step"]["seq"], found["budget_bytes"], found["step"]["device"]) == (
        512,
        4 * 10**9,
        "A100-40",
    )
    own = run(
        "plan", tiny, *STEP, "--device", "memory=2GiB,tflops=150,bandwidth=0.9,link=25", "--json"
    ).document
    assert own["budget_bytes"] == round(2 * GIB * 0.97)
    old = run("plan", tiny, *STEP, "--budget-gib", "0.25", "--json").document
    assert old["budget_bytes"] == GIB // 4


def modernbert() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return ModernBertForMaskedLM(ModernBertConfig(vocab_size=64, **sizes, **special))


@pytest.mark.parametrize(("make", "targets"), [(t5, 12), (bart, 12), (whisper, 12), (modernbert, None)])
def test_models_with_an_encoder_are_planned_whole(
    run: Run,
    tmp_path: Path,
    make: Callable[[], nn.Module],
    targets: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The plan is trained with: the same gradients, recomputed as planned, and no word of another batch."""
    model: Any = make().train()
    model.config.use_cache = False
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    asked = ["plan", tmp_path, "--seq", "24", "--batch", "4", "--autocast", "none", "--device", "RTX 4090"]
    asked += ["--target-seq", str(targets)] if targets else []
    found = run(*asked, "--budget", "8", "--json").document
    assert found["step"]["target_seq"] == targets
    assert found["model"]["parameters"] == sum(weight.numel() for weight in model.parameters())
    least, most = (found["predicted"][name]["peak_bytes"] for name in ("recompute all", "nothing"))
    budget = f"{(least + (most - least) / 4) / 0.92 / GIB:.9f}"
    assert run(*asked, "--budget", budget, "--save", tmp_path / "plan.json").code == 0

    ids = torch.randint(3, 60, (4, 24), generator=torch.Generator().manual_seed(1))
    given = {"input_features": torch.randn(4, 8, 32)} if make is whisper else {"input_ids": ids}

    def gradients() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        model(**given, labels=ids[:, :targets].contiguous()).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    expected = gradients()
    with caplog.at_level("INFO", logger="hf_actswap"), apply(model, tmp_path / "plan.json") as applied:
        assert_equal(gradients(), expected)
    assert applied.stats().recomputes > 0
    assert "was made for micro-batches" not in caplog.text


def test_targets_are_those_of_an_encoder_and_a_decoder(run: Run, tiny: Path) -> None:
    ended = run("plan", tiny, *STEP, "--target-seq", "8", "--json")
    assert ended.code == 1
    assert [problem["where"] for problem in ended.document["problems"]] == ["--target-seq"]
