"""Processes that run the recipe, started quickly and ended as roughly as a test likes."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
from torch.distributed import TCPStore

from hf_actswap.engine import host_pool
from tests.processes import fork_server

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "recipes"))

import llama_swap  # noqa: E402  (a script: its folder is on the path only now)
import recipe_checkpoints  # noqa: E402
import recipe_stop  # noqa: E402

__all__ = ["Ranks", "join_log", "ranks", "recipe_checkpoints", "recipe_stop"]

_attempts = itertools.count()


def run_recipe(argv: Sequence[str], environment: dict[str, str], log: str, report: str) -> None:
    """One rank: run the recipe; leave what it said in ``log``, and what memory it holds in ``report``."""
    join_log(environment, log)
    pools: list[weakref.ref[host_pool.HostPool]] = []
    made = host_pool.HostPool.__init__

    def make(pool: host_pool.HostPool, *args: Any, **kwargs: Any) -> None:
        made(pool, *args, **kwargs)
        pools.append(weakref.ref(pool))

    host_pool.HostPool.__init__ = make  # type: ignore[method-assign]
    sys.argv = ["llama_swap.py", *argv]
    code = exit_code_of(llama_swap.main)
    # What was raised is gone, and with it the frames that held a graph in the middle of a step. What PyTorch
    # had still to do in a backward that was broken off stands in the thread's queue until its next backward.
    torch.ones((), requires_grad=True).backward()
    gc.collect()
    held = [pool.held_bytes for one in pools if (pool := one()) is not None]
    Path(report).write_text(json.dumps({"pools": len(pools), "held_bytes": sum(held)}))
    sys.exit(code)


def join_log(environment: dict[str, str], log: str) -> None:
    """Take the environment of a rank, and say everything in the log of all."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    faulthandler.register(signal.SIGUSR1)


def exit_code_of(main: Callable[[], None]) -> int | str | None:
    """Run, and return what the interpreter would exit with."""
    try:
        main()
    except SystemExit as end:
        return end.code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class Ranks:
    """The ranks of one training.

    Args:
        processes: one for each rank.
        log: what all of them said.
        reports: what each left behind, where it came to its end.
    """

    def __init__(self, processes: list[ForkServerProcess], log: Path, reports: list[Path]) -> None:
        self.processes, self.log, self.reports = processes, log, reports

    def send(self, number: signal.Signals, *ranks: int) -> None:
        """Send a signal to these ranks, or to all."""
        for rank in ranks or range(len(self.processes)):
            pid = self.processes[rank].pid
            if pid is not None and self.processes[rank].is_alive():
                os.kill(pid, number)

    def wait_until(self, condition: Callable[[], bool], limit_s: float, pause_s: float = 0.001) -> bool:
        """Wait for a condition; return whether it came true before all ranks had ended.

        Raises:
            TimeoutError: it takes longer than the limit.
        """
        end = monotonic() + limit_s
        while not condition():
            if not any(process.is_alive() for process in self.processes):
                return condition()
            if monotonic() > end:
                self.send(signal.SIGUSR1)  # where they are
                sleep(1)
                raise TimeoutError(f"after {limit_s} s: {self.log.read_text()[-5000:]}")
            sleep(pause_s)
        return True

    def exit_codes(self, limit_s: float) -> list[int | None]:
        """Wait for all ranks; minus the signal that killed one, as `subprocess` counts.

        Raises:
            TimeoutError: a rank hangs.
        """
        self.wait_until(lambda: not any(one.is_alive() for one in self.processes), limit_s, 0.02)
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        """SIGKILL to whoever is left."""
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def ranks(argv: Sequence[str], folder: Path, count: int, **environment: str) -> Iterator[Ranks]:
    """Start ``count`` ranks of the recipe; nobody is left alive at the end.

    Args:
        argv: for the recipe.
        folder: for the log and the reports.
        count: 1 trains alone.
        environment: beside a launcher's, or in its place.
    """
    with started(run_recipe, [(list(argv),)] * count, folder, **environment) as running:
        yield running


@contextmanager
def started(
    target: Callable[..., None], each: Sequence[tuple[Any, ...]], folder: Path, **more: str
) -> Iterator[Ranks]:
    """Start ``target(*arguments, environment, log, report)`` on each rank, with arguments of its own."""
    attempt, count = next(_attempts), len(each)
    log, reports = folder / f"log_{attempt}", [folder / f"report_{attempt}_{rank}" for rank in range(count)]
    log.touch()
    context = fork_server()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    processes = []
    for rank in range(count):
        environment = {"WORLD_SIZE": str(count), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
        if count > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        arguments = (*each[rank], environment | more, str(log), str(reports[rank]))
        process = context.Process(target=target, args=arguments)
        process.start()
        processes.append(process)
    running = Ranks(processes, log, reports)
    try:
        yield running
    finally:
        running.kill()
