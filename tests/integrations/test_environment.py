"""`HF_ACTSWAP`: stock Trainers with stock arguments get a plan, and no script is changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments
from transformers import trainer as transformers_trainer
from typer.testing import CliRunner

from hf_actswap import ActSwapCallback
from hf_actswap.cli.app import app
from hf_actswap.integrations.trainer import VARIABLE, EnvironmentCallback, act_on_environment

from .conftest import CASE_2, CASE_4, SHORT_ON_CPU, Tokens, losses, tiny_llama

Make = Callable[..., Trainer]
RECOMPUTE = json.dumps({"recompute_config": {"recompute": True}})


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(transformers_trainer, "DEFAULT_CALLBACKS", [*transformers_trainer.DEFAULT_CALLBACKS])
    monkeypatch.setenv(VARIABLE, RECOMPUTE)
    act_on_environment()
    act_on_environment()
    assert transformers_trainer.DEFAULT_CALLBACKS.count(EnvironmentCallback) == 1
    return monkeypatch


def stock(folder: Path, callbacks: Any = (), **more: Any) -> Trainer:
    args = TrainingArguments(str(folder), max_steps=3, seed=3, **{**SHORT_ON_CPU, **more})
    return Trainer(tiny_llama(), args, train_dataset=Tokens(), callbacks=list(callbacks))


def ours(trainer: Trainer) -> list[Any]:
    return [item for item in trainer.callback_handler.callbacks if isinstance(item, ActSwapCallback)]


def saved(trainer: Trainer) -> list[float]:
    return [entry["actswap_saved_gib"] for entry in trainer.state.log_history if "actswap_saved_gib" in entry]


def test_a_stock_trainer_gets_the_plan(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = stock(tmp_path)
    trainer.train()
    assert [type(item) for item in ours(trainer)] == [EnvironmentCallback]
    assert min(saved(trainer)) > 0
    environment.delenv(VARIABLE)
    plain = stock(tmp_path)
    plain.train()
    assert saved(plain) == []
    assert losses(plain) == losses(trainer)


@pytest.mark.parametrize("value", ["off", ""])
def test_off_is_no_plan(value: str, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv(VARIABLE, value)
    plain = stock(tmp_path)
    plain.train()
    assert saved(plain) == []


@pytest.mark.parametrize(
    ("words", "variable", "found"),
    [
        (["--actswap", "off"], None, "off"),
        (["--actswap", "off"], "auto", "off"),
        (["--actswap", "auto"], "off", "auto"),
        ([], "off", "off"),
        ([], "", "off"),
        ([], None, "auto"),
    ],
)
def test_run_leaves_the_script_what_was_asked_for(
    words: list[str], variable: str | None, found: str, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import os\nprint('asked for', os.environ['{VARIABLE}'])\n")
    environment.delenv(VARIABLE)
    if variable is not None:
        environment.setenv(VARIABLE, variable)
    ended = CliRunner().invoke(app, ["run", *words, str(script)])
    assert ended.exit_code == 0, ended.output
    assert f"asked for {found}\n" in ended.output


def test_what_the_script_says_itself_comes_first(
    environment: pytest.MonkeyPatch, make_trainer: Make, tmp_path: Path
) -> None:
    given = ActSwapCallback(CASE_2)
    assert ours(stock(tmp_path, [given])) == [given]
    by_arguments = make_trainer(CASE_4, callback=False)
    assert [item._source for item in ours(by_arguments)] == [CASE_4]
    nothing_said = make_trainer(None, callback=False, max_steps=1)
    nothing_said.train()
    assert [item._source for item in ours(nothing_said)] == [RECOMPUTE]
    assert min(saved(nothing_said)) > 0


SCRIPT = """
import sys
from helper import WORD
from transformers import Trainer, TrainingArguments
from tests.integrations.conftest import Tokens, tiny_llama

args = TrainingArguments(sys.argv[1], max_steps=2, use_cpu=True, report_to="none", save_strategy="no",
                         logging_steps=1, disable_tqdm=True, dataloader_pin_memory=False)
trainer = Trainer(tiny_llama(), args, train_dataset=Tokens())
trainer.train()
saved = [entry.get("actswap_saved_gib", 0) > 0 for entry in trainer.state.log_history]
print(WORD, __name__, sys.argv[1:], saved)
sys.exit(7)
"""


def test_a_script_is_run_as_it_is(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("WORD = 'found'\n")
    environment = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1", VARIABLE: RECOMPUTE}
    command = [sys.executable, "-m", "hf_actswap.cli", "run"]
    ran = subprocess.run(
        [*command, str(tmp_path / "train.py"), str(tmp_path / "out"), "--lr", "-h"],
        env=environment,
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 7, ran.stderr[-2000:]
    out = str(tmp_path / "out")
    assert f"found __main__ {[out, '--lr', '-h']} [True, True, True]" in ran.stdout
    assert "layers 0-3: recompute everything" in ran.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--actswap", "atuo", "train.py"], "Did you mean 'auto'?"),
        (["nowhere.py"], "there is no file nowhere.py"),
    ],
)
def test_what_is_wrong_is_said_before_the_script_runs(words: list[str], said: str, tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["run", *words])
    assert ended.exit_code in (1, 2)
    assert said in ended.output
