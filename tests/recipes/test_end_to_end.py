"""The recipe under `accelerate launch`: the loss falls, the model reloads, and swapping changes no digit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_swap import build_model, llama_config
from recipe_options import DataArguments, ModelArguments
from recipe_texts import load_texts
from recipe_tokens import train_bpe
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_actswap import stage_from_config
from hf_actswap.releases import is_since
from tests.robustness.ranks import ranks

pytestmark = pytest.mark.essential

TINY = [
    *("--dataset", "sample", "--use_cpu", "true", "--disable_tqdm", "true", "--vocab_size", "512"),
    *("--hidden_size", "64", "--block_size", "64", "--max_train_samples", "256", "--max_eval_samples", "16"),
    *("--max_steps", "20", "--logging_steps", "1", "--per_device_train_batch_size", "8"),
    *("--learning_rate", "0.005", "--seed", "3"),
]
FLAGS = ["--num_machines", "1", "--mixed_precision", "no"]
UNCOMPILED = ("--dynamo_backend", "no")
LIMIT_S = 200


def run(output: Path, *arguments: str, processes: int = 1, fails: bool = False, **environment: str) -> str:
    """Run the recipe in processes that start quickly, with a launcher's environment; return the log."""
    with ranks([*arguments, "--output_dir", str(output)], output, processes, **environment) as running:
        codes = running.exit_codes(LIMIT_S)
    log = running.log.read_text()
    assert all(code != 0 for code in codes) if fails else codes == [0] * processes, log[-3000:]
    return log


def launch(
    repository: Path,
    output: Path,
    *arguments: str,
    processes: int = 1,
    flags: Sequence[str] = UNCOMPILED,
) -> subprocess.CompletedProcess[str]:
    """Run the recipe as a user does; the environment keeps it offline and on one thread."""
    several = ["--multi_gpu"] if processes > 1 else []
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *several,
        "--num_processes",
        str(processes),
    ]
    command += ["--main_process_port", "0"] if processes > 1 else []
    script = [str(repository / "recipes" / "llama_swap.py"), *arguments, "--output_dir", str(output)]
    paths = os.pathsep.join(filter(None, [str(repository), os.environ.get("PYTHONPATH")]))
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(
        [*command, *FLAGS, *flags, *script],
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def losses(output: Path) -> list[float]:
    """The training losses of a run, step by step."""
    state: dict[str, Any] = json.loads((output / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


@pytest.fixture(scope="module")
def case1(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("case1")
    ran = launch(repository, output, str(repository / "recipes" / "case1_default_swap.yaml"), *TINY)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return output


def test_the_loss_falls_and_the_metrics_are_written(case1: Path) -> None:
    results = json.loads((case1 / "all_results.json").read_text())
    steps = losses(case1)
    assert len(steps) == 20
    assert abs(steps[0] - results["ln_vocab"]) < 0.3
    assert steps[-1] < steps[0] - 0.5
    assert results["eval_perplexity"] < 0.7 * results["eval_before_perplexity"]
    assert 4 < results["train_unigram_entropy"] < results["ln_vocab"]


def test_model_and_tokenizer_reload(case1: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(case1), AutoTokenizer.from_pretrained(case1)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (4, len(tokenizer))
    inputs = tokenizer("The sequence is", return_tensors="pt")
    with torch.no_grad():
        assert model(**inputs, labels=inputs["input_ids"]).loss.isfinite()


def test_the_log_names_the_swapped_ops_as_the_document_does(case1: Path) -> None:
    log = (case1 / "worker_0.log").read_text(encoding="utf-8")
    lines = [line for line in log.splitlines() if "attention.flash_attention" in line]
    assert len(lines) == 4
    for layer, line in enumerate(lines):
        assert line.endswith(f"-INFO - Set op_swap at layer {layer}: attention.flash_attention, value=10")


@pytest.fixture
def lines(tmp_path: Path) -> list[str]:
    """Return arguments that stream a file of lines and evaluate on another."""
    texts = load_texts(DataArguments(dataset="sample"))
    for part in ("train", "evaluation"):
        (tmp_path / f"{part}.txt").write_text("".join(getattr(texts, part)), encoding="utf-8")
    streamed = ["--streaming", "true", "--max_train_samples", "400", "--max_steps", "6"]
    files = ["--dataset", str(tmp_path / "train.txt"), "--validation_file", str(tmp_path / "evaluation.txt")]
    return [*TINY[2:], *streamed, *files]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_streamed_text_trains_and_resumes(processes: int, lines: list[str], tmp_path: Path) -> None:
    for name in ("whole", "resumed", "plain"):
        (tmp_path / name).mkdir()
    saves = [*lines, "--save_strategy", "steps", "--save_steps", "3"]
    run(tmp_path / "whole", *saves, processes=processes)
    resumed = ["--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoint-3")]
    run(tmp_path / "resumed", *saves, *resumed, processes=processes)
    found = losses(tmp_path / "whole")
    assert len(found) == 6
    assert losses(tmp_path / "resumed") == found
    run(tmp_path / "plain", *lines, "--actswap", "none", processes=processes)
    assert losses(tmp_path / "plain") == found
    results = json.loads((tmp_path / "whole" / "all_results.json").read_text())
    assert results["eval_loss"] < results["eval_before_loss"]


@pytest.mark.slow
def test_a_stream_that_cannot_end_or_be_evaluated_is_rejected(lines: list[str], tmp_path: Path) -> None:
    assert "--max_steps N" in run(tmp_path, *lines, "--max_steps", "-1", fails=True)
    assert "no validation part" in run(tmp_path, *lines[:-2], fails=True)


@pytest.mark.slow
def test_swapping_changes_no_digit(case1: Path, tmp_path: Path) -> None:
    run(tmp_path, *TINY, "--actswap", "none", "--do_eval", "false")
    assert losses(tmp_path) == losses(case1)
    assert not (tmp_path / "worker_0.log").exists()


@pytest.mark.slow
def test_layers_compiled_by_the_launcher_are_swapped(case1: Path, repository: Path, tmp_path: Path) -> None:
    case2 = str(repository / "recipes" / "case2_layer_swap.yaml")
    short = ["--max_steps", "2", "--do_eval", "false"]
    regional = ["--dynamo_backend", "aot_eager", "--dynamo_use_regional_compilation"]
    ran = launch(repository, tmp_path, case2, *TINY, *short, flags=regional)
    assert ran.returncode == 0, ran.stderr[-3000:]
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    assert all(entry["actswap_offloaded_gib"] > 0 for entry in state["log_history"] if "loss" in entry)
    assert losses(tmp_path)[0] == pytest.approx(losses(case1)[0], rel=1e-4)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's parallel file without what is parallel in it: one process, a plain Trainer."""
    output = tmp_path_factory.mktemp("whole")
    run(output, *TINY, "--num_kv_heads", "2", "--actswap", "none", *SHORT)
    return output


SHORT = ["--max_steps", "4", "--max_eval_samples", "5", "--lr_scheduler_type", "linear"]


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_hold_one_model(whole: Path, repository: Path, tmp_path: Path) -> None:
    recipe = str(repository / "recipes" / "sequence_parallel.yaml")
    said = run(tmp_path, recipe, *TINY, *SHORT, "--warmup_steps", "0", processes=2)
    assert "tensor_parallel_size=2, sequence parallelism on: a rank holds" in said
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-4)
    results, expected = (
        json.loads((folder / "all_results.json").read_text()) for folder in (tmp_path, whole)
    )
    assert results["eval_before_loss"] == pytest.approx(expected["eval_before_loss"], rel=1e-5)
    model, plain = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path, whole))
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in plain.state_dict().items()
    }


@pytest.mark.slow
@pytest.mark.dist
def test_four_processes_hold_two_models(whole: Path, repository: Path, tmp_path: Path) -> None:
    recipe = str(repository / "recipes" / "sequence_parallel.yaml")
    ran = launch(repository, tmp_path, recipe, *TINY, *SHORT, "--warmup_steps", "0", processes=4)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert len(losses(tmp_path)) == 4
    assert losses(tmp_path)[0] == pytest.approx(losses(whole)[0], rel=2e-2)  # twice as many samples
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 0


IN_STAGES = {"parallel_config": {"pipeline_stage": 2, "schedule": "1f1b"}}


def test_a_stage_makes_its_own_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_bpe(["Of stages and of rows.\n"] * 9, vocab_size=300)
    sizes = ModelArguments(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=48)
    config = llama_config(sizes, tokenizer, 16)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    found = build_model(sizes, tokenizer, 16, IN_STAGES, 3)
    assert [all(p.is_meta for p in layer.parameters()) for layer in found.model.layers] == [True, False]
    expected = stage_from_config(AutoModelForCausalLM, config, {}, 3).state_dict()
    own = {name: tensor for name, tensor in found.state_dict().items() if not tensor.is_meta}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in own.items())
    torch.manual_seed(3)
    whole = build_model(sizes, tokenizer, 16, {"swap_config": {"swap": True}}, 3).state_dict()
    torch.manual_seed(3)
    stock = AutoModelForCausalLM.from_config(config).state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in stock.items())


@pytest.mark.slow
@pytest.mark.dist
def test_stages_train_from_the_same_random_weights_wherever_they_are_cut(tmp_path: Path) -> None:
    steps = ["--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4", "--num_layers", "4"]
    for folder, offset in (("equal", [0, 0]), ("unequal", [1, -1])):
        parallel = {"parallel_config": {**IN_STAGES["parallel_config"], "offset": offset}}
        (tmp_path / folder).mkdir()
        run(tmp_path / folder, "--actswap", json.dumps(parallel), *TINY, *steps, *SHORT, processes=2)
    found = losses(tmp_path / "equal")
    assert found[-1] < found[0]
    assert losses(tmp_path / "unequal") == found


@pytest.mark.slow
@pytest.mark.dist
def test_the_launcher_that_starts_one_process_is_named(repository: Path, tmp_path: Path) -> None:
    recipe = str(repository / "recipes" / "sequence_parallel.yaml")
    ran = launch(repository, tmp_path, recipe, *TINY, flags=[*UNCOMPILED, "--cpu"])
    assert ran.returncode != 0
    assert "MeshError: 1 problem in the parallel set-up" in ran.stderr
    assert "Start with: accelerate launch --multi_gpu --num_processes 2 " in ran.stderr


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_train_and_resume(repository: Path, tmp_path: Path) -> None:
    # The evaluation at the start is part of the check: done wrongly, it lets the processes train apart.
    ran = launch(repository, tmp_path, *TINY, "--save_steps", "10", processes=2)
    assert ran.returncode == 0, ran.stderr[-3000:]
    whole = losses(tmp_path)
    for path in (tmp_path / "checkpoint-20").iterdir():
        path.unlink()
    (tmp_path / "checkpoint-20").rmdir()
    ran = launch(repository, tmp_path, *TINY, "--resume_from_checkpoint", "last", processes=2)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert losses(tmp_path) == whole


@pytest.mark.dist
@pytest.mark.skipif(not is_since("accelerate", "1.12"), reason="with accelerate 1.11 they find each other")
def test_processes_that_would_train_alone_are_stopped(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("with an accelerator the processes find each other")
    alone = [one for one in TINY if one not in ("--use_cpu",)]
    alone.remove("true")
    said = run(tmp_path, *alone, processes=2, fails=True, ACCELERATE_USE_CPU="false")
    assert "RecipeError: The launcher started 2 processes, but each of them would train alone." in said
    assert not (tmp_path / "model.safetensors").exists()


def test_offline_the_message_comes_without_a_traceback_of_the_recipe(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="without it the message is another one")
    said = run(tmp_path, "--use_cpu", "true", fails=True)
    assert "RecipeError: The dataset 'Salesforce/wikitext' (wikitext-2-raw-v1) could not be loaded" in said
    assert "--dataset sample (the embedded corpus)" in said
    assert "recipe_texts.py" not in said
