"""`HF_ACTSWAP` and ``hf-actswap run``: stock Trainers get a plan, and no program is changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from typer.testing import CliRunner

from hf_actswap import ActSwapCallback
from hf_actswap.cli.app import app
from hf_actswap.engine.hook_wrappers import is_wrapped
from hf_actswap.integrations import accelerate_loop
from hf_actswap.integrations.environment import EnvironmentCallback, act_on_environment
from hf_actswap.run_environment import FOLDER, VARIABLE, ended_trainings
from tests.engine import tiny_models

from .conftest import CASE_2, CASE_4, SHORT_ON_CPU, Tokens, losses, tiny_llama

Make = Callable[..., Trainer]
RECOMPUTE = json.dumps({"recompute_config": {"recompute": True}})


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(CallbackHandler, "__init__", CallbackHandler.__init__)
    monkeypatch.setenv(VARIABLE, RECOMPUTE)
    act_on_environment()
    act_on_environment()
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


@pytest.mark.parametrize("value", ["off", "", "none", "false", "OFF", "no"])
def test_off_is_no_plan(value: str, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.setenv(VARIABLE, value)
    plain = stock(tmp_path)
    plain.train()
    assert saved(plain) == []


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


def test_the_largest_of_the_models_that_accelerate_prepares_gets_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(Accelerator, "prepare", Accelerator.prepare)
    monkeypatch.setattr(accelerate_loop.atexit, "register", at_exit.append)
    monkeypatch.setenv(VARIABLE, RECOMPUTE)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    accelerate_loop.act_on_loops()
    accelerate_loop.act_on_loops()
    small, large = tiny_models.tiny_llama(num_hidden_layers=1).train(), tiny_llama().train()
    weights = [*small.parameters(), *large.parameters()]
    accelerator, frozen = Accelerator(cpu=True), tiny_models.tiny_llama(num_hidden_layers=6)
    frozen = accelerator.prepare(frozen.requires_grad_(False))
    small, large, optimizer = accelerator.prepare(small, large, torch.optim.SGD(weights))
    assert not is_wrapped(large.model), "not before the first forward"
    ids = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(2):
        assert frozen(input_ids=ids).logits.grad_fn is None
        accelerator.backward(sum(model(input_ids=ids, labels=ids).loss for model in (small, large)))
        optimizer.step()
    assert is_wrapped(large)
    assert not is_wrapped(small)
    (end,) = at_exit
    end()
    assert not is_wrapped(large)
    (ended,) = ended_trainings(tmp_path)
    assert (ended.steps, ended.acts, ended.moved_bytes) == (2, True, 0)
    assert ended.again_bytes > 0


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
sys.exit(int(sys.argv[2]))
"""
LOOP = """
import sys, torch
from accelerate import Accelerator
import hf_actswap
from tests.integrations.conftest import Tokens, tiny_llama

kind = sys.argv[2]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
model, small = tiny_llama().train(), torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(Tokens(), batch_size=2)
if kind == "apart":
    small, optimizer = accelerator.prepare(small), accelerator.prepare(optimizer)
    model = accelerator.prepare(model)
else:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if kind == "its own":
    hf_actswap.apply(model, "auto", optimizer=optimizer)
losses = []
for _, batch in zip(range(6), loader):
    with accelerator.accumulate(model):
        with torch.no_grad():
            model(**batch)
        loss = model(**batch).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
print(losses)
if kind == "fails":
    raise SystemError("on purpose")
"""
LAUNCHER = """#!{python}
import logging, subprocess, sys
logging.basicConfig(level=logging.WARNING)
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""
USERS = "import os; os.environ['USERS_OWN'] = 'has run'\n"
SAYS_SO = "import os; print(os.environ.get('HF_ACTSWAP'), os.environ.get('USERS_OWN'))\n"


def started(
    folder: Path, repository: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Start ``hf-actswap run`` beside a script, a module of its own, a launcher and a sitecustomize."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "loop.py").write_text(LOOP)
    (folder / "helper.py").write_text("WORD = 'found'\n")
    (folder / "says.py").write_text(SAYS_SO)
    (folder / "sitecustomize.py").write_text(USERS)
    launcher = folder / "launch"
    launcher.write_text(LAUNCHER.format(python=sys.executable))
    launcher.chmod(0o755)
    path = os.pathsep.join((str(folder), str(repository)))
    given = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    given = {name: value for name, value in given.items() if name != VARIABLE} | variables
    given["PATH"] = os.pathsep.join((str(folder), given["PATH"]))
    command = [sys.executable, "-m", "hf_actswap.cli", "run", *words]
    return subprocess.run(command, env=given, cwd=folder, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--actswap", RECOMPUTE, "train.py"], 7),
        (["--actswap", RECOMPUTE, "--", "launch", "train.py"], 0),
    ],
    ids=["a script", "a process that a command starts"],
)
def test_a_program_is_run_as_it_is(words: list[str], code: int, tmp_path: Path, repository: Path) -> None:
    out = str(tmp_path / "out")
    ran = started(tmp_path, repository, *words, out, str(code))
    assert ran.returncode == code, ran.stderr[-2000:]
    assert f"found __main__ {[out, str(code)]} [True, True, True]" in ran.stdout
    assert ran.stderr.count("layers 0-3: recompute everything") == 1
    assert f"hf-actswap run: {out} (2 steps, 1 process) was trained with a plan: a step moved" in ran.stderr


@pytest.mark.parametrize("kind", ["at once", "apart"])
def test_a_loop_with_accelerate_gets_the_plan(kind: str, tmp_path: Path, repository: Path) -> None:
    plain = started(tmp_path, repository, "--actswap", "off", "loop.py", "out", kind)
    ran = started(tmp_path, repository, "--actswap", RECOMPUTE, "loop.py", "out", kind)
    assert ran.returncode == plain.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout == plain.stdout
    assert ran.stderr.count("layers 0-3: recompute everything") == 1
    assert "GiB less kept for backward than without a plan" in ran.stderr
    assert "loop.py (3 steps, 1 process) was trained with a plan: a step moved 0 GiB" in ran.stderr
    assert "and computed 0 GiB again" not in ran.stderr


@pytest.mark.parametrize("kind", ["its own", "fails"])
def test_a_loop_that_has_a_plan_or_fails_is_not_said_to_be_trained(
    kind: str, tmp_path: Path, repository: Path
) -> None:
    ran = started(tmp_path, repository, "--actswap", RECOMPUTE, "loop.py", "out", kind)
    assert ran.returncode == 1
    assert "recompute everything" in ran.stderr or kind == "its own"
    assert "was trained with a plan" not in ran.stderr
    assert "another one is recorded" not in ran.stderr


@pytest.mark.parametrize(
    ("words", "variables", "said", "code"),
    [
        (["--actswap", "off"], {}, "off", 0),
        (["--actswap", "none"], {}, "off", 0),
        ([], {"HF_ACTSWAP": "False"}, "off", 0),
        (["--actswap", "off"], {VARIABLE: "auto"}, "off", 0),
        (["--actswap", "auto"], {VARIABLE: "off"}, "auto", 1),
        ([], {VARIABLE: "off"}, "off", 0),
        ([], {VARIABLE: ""}, "off", 0),
        ([], {}, "auto", 1),
    ],
)
def test_a_program_without_a_training_is_an_error_if_a_plan_was_asked_for(
    words: list[str], variables: dict[str, str], said: str, code: int, tmp_path: Path, repository: Path
) -> None:
    ran = started(tmp_path, repository, *words, "says.py", **variables)
    assert ran.returncode == code
    assert ran.stdout == f"{said} has run\n"
    assert ("no training had a plan" in ran.stderr) is (code == 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--actswap", "atuo", "train.py"], "Did you mean 'auto'?"),
        (["nowhere.py"], "there is no file nowhere.py, and no such command"),
    ],
)
def test_what_is_wrong_is_said_before_the_program_runs(words: list[str], said: str) -> None:
    ended = CliRunner().invoke(app, ["run", *words])
    assert ended.exit_code in (1, 2)
    assert said in " ".join(ended.output.replace("│", "").split())


def test_a_tool_that_replaces_the_list_of_callbacks_has_the_plan_too(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As ms-swift does."""
    environment.setattr("transformers.trainer.DEFAULT_CALLBACKS", [DefaultFlowCallback])
    trainer = stock(tmp_path)
    trainer.train()
    assert [type(item) for item in ours(trainer)] == [EnvironmentCallback]
    assert min(saved(trainer)) > 0
