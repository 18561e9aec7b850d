"""SIGTERM and Ctrl-C end a training in order: the exit code says so, memory is given back, nobody hangs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from tests.robustness.ranks import Ranks, ranks, recipe_stop

LIMIT_S = 60
ENDLESS = ["--max_steps", "100000", "--save_strategy", "no", "--logging_steps", "1"]
TERM, INT = signal.SIGTERM, signal.SIGINT


def training(running: Ranks) -> bool:
    return "'loss'" in running.log.read_text()


def interrupt(
    arguments: list[str], folder: Path, count: int, number: signal.Signals, delay_s: float, *whom: int
) -> Ranks:
    """Train, send a signal some time after the first step, and wait for the end."""
    argv = [*arguments, *ENDLESS, "--output_dir", str(folder / "out")]
    with ranks(argv, folder, count) as running:
        assert running.wait_until(lambda: training(running), LIMIT_S, 0.01), running.log.read_text()[-3000:]
        sleep(delay_s)
        running.send(number, *whom)
        running.exit_codes(LIMIT_S)
        return running


def assert_freed(running: Ranks) -> None:
    for report in running.reports:
        left = json.loads(report.read_text())
        assert left["pools"] == 1  # of this plan: the check would see it
        assert left["held_bytes"] == 0


@pytest.fixture
def stop() -> Iterator[Any]:
    """A `Stop` that listens; the handlers of pytest are back afterwards."""
    before = {number: signal.getsignal(number) for number in (TERM, INT)}
    listening = recipe_stop.Stop()
    listening.listen()
    yield listening
    for number, handler in before.items():
        signal.signal(number, handler)


class _Finalized:
    """Is sent a signal in its ``__del__``, where Python drops what is raised."""

    def __del__(self) -> None:
        signal.raise_signal(TERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("event", ["on_step_begin", "on_substep_end", "on_step_end", "on_prediction_step"])
def test_a_signal_that_was_dropped_in_a_finalizer_is_not_forgotten(stop: Any, event: str) -> None:
    getattr(stop, event)(None, None, None)
    _Finalized()  # the signal arrives, and nothing is raised here
    with pytest.raises(SystemExit) as ended:
        getattr(stop, event)(None, None, None)
    assert ended.value.code == 128 + TERM


def test_the_signal_that_the_launcher_passes_on_does_not_disturb_the_end(
    stop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(recipe_stop, "monotonic", lambda: now_s[0])
    with pytest.raises(SystemExit):
        signal.raise_signal(INT)
    now_s[0] += 1
    signal.raise_signal(INT)
    now_s[0] += 5
    with pytest.raises(SystemExit):  # somebody is impatient
        signal.raise_signal(INT)


@pytest.mark.parametrize(
    "number", [TERM, pytest.param(INT, marks=pytest.mark.slow)], ids=lambda number: number.name
)
def test_one_process(number: signal.Signals, arguments: list[str], tmp_path: Path) -> None:
    dice = random.Random(int(number))
    for attempt in range(2):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        running = interrupt(arguments, folder, 1, number, dice.uniform(0, 0.2))
        assert [one.exitcode for one in running.processes] == [128 + number], running.log.read_text()[-3000:]
        assert_freed(running)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("number", [TERM, INT], ids=lambda number: number.name)
def test_two_processes(number: signal.Signals, arguments: list[str], tmp_path: Path) -> None:
    """A rank may be told by its signal or, sooner, by the connection that the other one has closed."""
    running = interrupt(arguments, tmp_path, 2, number, 0.05)
    codes = [one.exitcode for one in running.processes]
    assert 128 + number in codes
    assert set(codes) <= {128 + number, 1}
    assert_freed(running)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_left_alone_ends_too(rank: int, arguments: list[str], tmp_path: Path) -> None:
    running = interrupt(arguments, tmp_path, 2, TERM, 0.05, rank)
    codes = [one.exitcode for one in running.processes]
    assert codes[rank] == 128 + TERM
    assert codes[1 - rank] == 1
    assert_freed(running)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("number", [TERM, INT], ids=lambda number: number.name)
def test_under_the_launcher(
    number: signal.Signals, arguments: list[str], repository: Path, tmp_path: Path
) -> None:
    """SIGTERM to the launcher alone, as a scheduler sends it; Ctrl-C to all, as a terminal does."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher += ["--main_process_port", "0", str(repository / "recipes" / "llama_swap.py")]
    paths = os.pathsep.join(filter(None, [str(repository), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    log = tmp_path / "log"
    with log.open("w") as out:
        started = subprocess.Popen(
            [*launcher, *arguments, *ENDLESS, "--output_dir", str(tmp_path / "out")],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            end = monotonic() + 120
            while "'loss'" not in log.read_text():
                assert started.poll() is None, log.read_text()[-3000:]
                assert monotonic() < end, log.read_text()[-3000:]
                sleep(0.05)
            if number == TERM:
                started.send_signal(number)
            else:
                os.killpg(started.pid, number)
            assert started.wait(timeout=25) != 0  # before the launcher loses its patience, after 30 s
        finally:
            try:
                os.killpg(started.pid, signal.SIGKILL)
                left = True
            except ProcessLookupError:
                left = False
    assert not left  # nobody of the group lived on
