"""Processes that tests start: forks of one that has imported the libraries, so that a start takes a moment.

The fork server imports PyTorch, transformers and the package once for all tests of a process: in a rank these
imports take longer than all of its cases.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_actswap.parallel import rank_agreement
from tests.quick_cases import runs_slow_cases

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = [
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "hf_actswap.integrations",
    "hf_actswap.planner",
    "tests.robustness.ranks",  # with the recipe
]
"""What the fork server imports; what is not there is left out."""

Cases = Mapping[str, Callable[[dist.ProcessGroup | None], object]]
Groups = Mapping[str, list[list[int]]]


def fork_server() -> ForkServerContext:
    """Return a context whose processes are forks of one that has imported the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join(filter(None, [str(ROOT), before]))
    os.environ.update(PYTHONPATH=paths)  # Python 3.11 does not hand `sys.path` to the server
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def launch(
    worker: Callable[[int, str], None], folder: Path, world_size: int, limit_s: float, fresh: bool = False
) -> Path:
    """Run ``worker(rank, folder)`` on each process; raise what one of them raised.

    Args:
        folder: for what they write; returned.
        fresh: in processes that have imported nothing, with the environment as it is now.

    Raises:
        TimeoutError: they take longer than the limit; they are killed.
    """
    fork_server()
    (folder / "store").unlink(missing_ok=True)  # a used one would bring the processes of a launch before back
    context = torch.multiprocessing.start_processes(
        _start,
        (worker, str(folder)),
        nprocs=world_size,
        join=False,
        start_method="spawn" if fresh else "forkserver",
    )
    end = monotonic() + limit_s
    while not context.join(timeout=1):
        if monotonic() > end:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"{world_size} processes did not finish in {limit_s} s")
    return folder


def launched(worker: Callable[..., None], world_size: int, limit_s: float, told_of_slow: bool = False) -> Any:
    """Return a module's fixture: the folder with what each rank wrote, after one launch for all its tests.

    Args:
        told_of_slow: the worker's first argument is whether slow tests of the module are selected too.
    """

    @pytest.fixture(scope="module")
    def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        run = partial(worker, runs_slow_cases(request)) if told_of_slow else worker
        return launch(run, tmp_path_factory.mktemp("ranks"), world_size, limit_s)

    return folder


def _start(rank: int, worker: Callable[[int, str], None], folder: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # a collection does not walk, and does not copy, what the server has imported
    worker(rank, folder)


def run_cases(rank: int, folder: str, world_size: int, cases: Cases, groups: Groups | None = None) -> None:
    """Run the cases whose groups have this rank; write results, or errors' texts, as ``<case>.<rank>.pt``.

    Args:
        groups: case -> the ranks of each of its groups; a case without groups is given ``None``.
    """
    join_group(rank, folder, world_size)
    groups, made = groups or {}, {}
    for ranks in [tuple(ranks) for of_case in groups.values() for ranks in of_case]:
        if ranks not in made:
            made[ranks] = dist.new_group(list(ranks))
    try:
        for name, case in cases.items():
            of_case = groups.get(name, [])
            own = next((tuple(ranks) for ranks in of_case if rank in ranks), None)
            if own is None and of_case:
                continue
            try:
                found: object = case(made[own] if own is not None else None)
            except (Exception, pytest.fail.Exception):  # told to the test of this case; the others go on
                found = f"error: {traceback.format_exc()}"
            torch.save(found, Path(folder, f"{name}.{rank}.pt"))
    finally:
        gc.collect()  # models that cases have left in cycles hold groups, and must go before these
        dist.destroy_process_group()


def launch_trainers(cases: str, folder: Path, world_size: int, limit_s: float) -> Path:
    """Run functions of Trainers on each process, in order, with the environment that a launcher makes.

    Args:
        cases: ``module:name`` of a mapping of names to functions; each gets the folder.
    """
    return launch(partial(run_trainers, cases, world_size), folder, world_size, limit_s)


LOST_RANK_LIMIT_S = 2.0
"""How long ranks wait for the answer of one that may have ended, in `launched_to_lose_ranks`."""


def launched_to_lose_ranks(
    losing: str, world_size: int, limit_s: float, names: Collection[str], quick: Collection[str]
) -> Any:
    """Return a module's fixture: the folder in which each case has its own, after one launch for all of them.

    Args:
        losing: the function of Trainers (see `launch_trainers`) in which ranks may end, on a case's folder.
        names: of the cases; those of them in ``quick`` run without slow tests too.
    """
    lose = partial(_lose_ranks, losing, world_size, tuple(names), tuple(quick))
    return launched(lose, world_size, limit_s, told_of_slow=True)


def _lose_ranks(
    losing: str,
    world_size: int,
    names: Sequence[str],
    quick: Sequence[str],
    slow: bool,
    rank: int,
    folder: str,
) -> None:
    """Run each case in a fork, which imports nothing again, and which the trainers may end."""
    rank_agreement.ANSWER_LIMIT_S = LOST_RANK_LIMIT_S
    for name in names if slow else quick:
        own = Path(folder, name)
        own.mkdir(exist_ok=True)
        child = os.fork()
        if child == 0:
            run_trainers(losing, world_size, rank, str(own))
            os._exit(0)
        os.waitpid(child, 0)


def run_trainers(cases: str, world_size: int, rank: int, folder: str) -> None:
    """Run functions of Trainers in this process; see `launch_trainers`."""
    set_launchers_environment(rank, world_size)
    module, _, name = cases.partition(":")
    functions = getattr(importlib.import_module(module), name)
    run_cases(
        rank, folder, world_size, {case: partial(_on_folder, run, folder) for case, run in functions.items()}
    )


def set_launchers_environment(rank: int, world_size: int) -> None:
    """Set what a launcher tells a process, on a CPU."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", ACCELERATE_USE_CPU="true")


def _on_folder(run: Callable[[Path], object], folder: str, _: dist.ProcessGroup | None) -> object:
    return run(Path(folder))


def join_group(rank: int, folder: str, world_size: int, limit_s: float = 90) -> None:
    """Make the default process group of a launch: gloo, without a port."""
    store = dist.FileStore(str(Path(folder, "store")), world_size)
    limit = timedelta(seconds=limit_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def told(call: Callable[[], object]) -> str:
    """The error that a call raises, with its kind."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def result(folder: Path, name: str, rank: int = 0) -> Any:
    """Read one rank's result of a case; fail with its error."""
    found = torch.load(folder / f"{name}.{rank}.pt", weights_only=False)
    assert not (isinstance(found, str) and found.startswith("error: ")), found
    return found


def of_ranks(folder: Path, name: str) -> list[Any]:
    """Read the results of a case, of all its ranks in their order; fail with the error of one."""
    ranks = len(list(folder.glob(f"{name}.*.pt")))
    assert ranks, f"no rank has run {name}"
    return [result(folder, name, rank) for rank in range(ranks)]
