"""Killed at random moments and resumed: the training is the one that nobody disturbed."""

from __future__ import annotations

import json
import random
import signal
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from transformers import Phi3Config

from tests.robustness.ranks import Ranks, ranks

LIMIT_S = 90
PATIENCE_S = 2
STEPS_PER_KILL = 9

pytestmark = pytest.mark.dist


def curve(folder: Path) -> list[dict[str, Any]]:
    """What the run logged of its steps, from the first on."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    names = ("step", "loss", "grad_norm", "learning_rate", "actswap_offloaded_gib")
    return [{name: entry[name] for name in names} for entry in history if "loss" in entry]


def new_checkpoint(output: Path, before: set[str]) -> bool:
    """Whether a checkpoint has been begun that was not there before."""
    return any(path.name not in before for path in output.glob("checkpoint-*"))


def kill_at_random(running: Ranks, output: Path, dice: random.Random) -> None:
    """Kill one rank and then the others, or all at once: in a save, soon after one, or before the first.

    The others end by themselves when they next talk to the one that is gone; if they are waiting for it to
    begin, that takes a minute, and they are killed after a while, as launchers do.
    """
    before = {path.name for path in output.glob("checkpoint-*")}
    moment = dice.choice(["in a save", "in a save", "later", "later", "early"])
    if moment == "early":
        sleep(dice.uniform(0.1, 1.5))
    elif running.wait_until(lambda: new_checkpoint(output, before), LIMIT_S):
        sleep(dice.uniform(0, 0.004) if moment == "in a save" else dice.uniform(0, 0.4))
    victim = dice.choice([0, 1, None])
    running.send(signal.SIGKILL, *([] if victim is None else [victim]))
    with suppress(TimeoutError):
        running.exit_codes(PATIENCE_S)
    running.send(signal.SIGKILL)
    codes = running.exit_codes(LIMIT_S)
    assert -signal.SIGKILL in codes, running.log.read_text()[-3000:]
    assert all(codes), running.log.read_text()[-3000:]


def run_killed(kills: int, argv: list[str], folder: Path) -> None:
    """Train undisturbed, and killed so many times; compare."""
    steps = STEPS_PER_KILL * (kills + 1)
    argv = [*argv, "--max_steps", str(steps), "--save_steps", "3"]
    whole, killed = folder / "whole", folder / "killed"
    killed.mkdir()
    with ranks([*argv, "--output_dir", str(whole), "--save_strategy", "no"], folder, 2) as running:
        assert running.exit_codes(LIMIT_S) == [0, 0], running.log.read_text()[-3000:]
    argv += ["--output_dir", str(killed), "--resume_from_checkpoint", "last"]
    dice, said = random.Random(kills), ""
    for _ in range(kills):
        with ranks(argv, folder, 2) as running:
            kill_at_random(running, killed, dice)
            said += running.log.read_text()
    with ranks(argv, folder, 2) as running:
        assert running.exit_codes(LIMIT_S) == [0, 0], running.log.read_text()[-3000:]
    assert [entry["step"] for entry in curve(whole)] == list(range(1, steps + 1))
    assert curve(killed) == curve(whole)
    weights = "model.safetensors"
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()
    assert kills < 20 or "was not written to its end and is passed over" in said  # some were met in a save


@pytest.mark.slow
def test_killed_three_times(arguments: list[str], tmp_path: Path) -> None:
    run_killed(3, arguments, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_twenty_times(arguments: list[str], tmp_path: Path) -> None:
    run_killed(20, arguments, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_model_on_two_processes_killed(arguments: list[str], tmp_path: Path) -> None:
    config = Path(arguments[0])
    parallel = tmp_path / "parallel.yaml"
    parallel.write_text(config.read_text() + "parallel_config: {tensor_parallel_size: 2}\n")
    run_killed(6, [str(parallel), *arguments[1:]], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_streamed_sequences_killed(arguments: list[str], tmp_path: Path) -> None:
    """With dropout, whose random numbers the chunks of both passes draw."""
    config, model = tmp_path / "streamed.yaml", tmp_path / "model"
    config.write_text("log: full\nstream_config: {tokens: 12}\n")
    sizes: dict[str, int] = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    Phi3Config(**sizes, resid_pdrop=0.1).save_pretrained(model)
    run_killed(3, [str(config), *arguments[1:], "--config_name", str(model)], tmp_path)
    assert any("chunks of 12 tokens" in log.read_text() for log in tmp_path.glob("log_*"))
    assert curve(tmp_path / "killed")[0]["actswap_offloaded_gib"] > 0
