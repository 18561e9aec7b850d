"""All that is to be measured on an accelerator, in stages of less than ten minutes each.

    python benchmarks/gpu_day.py --stage 3              the claims; again: what there was no time for
    python benchmarks/gpu_day.py --half-hour            print the commands for a borrowed machine
    python benchmarks/gpu_day.py --list                 what there is, and what of it is in the results
    python benchmarks/gpu_day.py --device cpu           a dry run on the CPU, tiny

A row that is in the results is not measured again without ``--again``, whatever its commit. A row that had no
time, or failed at another commit, is. Each result is written at once. A row that fails, hangs or kills its
process is recorded with its traceback, and the next one begins (`runner` says how). Results go into the
folder that ``HF_ACTSWAP_RESULTS`` names (by default ``results/`` here): four files. ``HF_ACTSWAP_COMMIT`` is
the commit if there is no .git. TRL and Liger are measured if they can be imported.

Exit status 1: something failed. `verdict.py` then judges the results.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

# Run as a script from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
from benchmarks.records import (
    COMMIT_VARIABLE,
    REPOSITORY,
    RESULTS,
    RESULTS_VARIABLE,
    Record,
    Records,
    commit,
    file_name,
    results_folder,
)
from benchmarks.rows import FLASH, REPEATED, ROWS
from benchmarks.runner import (
    FrontierJob,
    Job,
    MeasureError,
    Place,
    Session,
    Suite,
    Worker,
    again_asked,
    frontier_jobs,
    longest_jobs,
    run_suite,
)
from benchmarks.trainings import (
    FROZEN_8K,
    FROZEN_32K,
    FROZEN_PEERS,
    OPTIMIZER_STATES,
    OUT_OF_MEMORY,
    Sizes,
    training_jobs,
)
from benchmarks.workloads import PRESETS, Workload, fitted

ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Environment variables of all processes that measure or test, beside `benchmarks.SETTINGS`."""
_TO_END_S = 3.0
"""Time in which a command that is over ends, after all that it measures with was ended."""
ARCHIVE = "gpu_day.tgz"
_REPEATED_NAMES = {row.name for row in REPEATED}
SLACK_S = 12.0
"""Seconds after the end of a stage's time at which work that still runs is ended."""
_IMPORTS_S = 10.0
"""Time of this process's imports, which counts as time of the first stage."""
_MOST_LOG_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Stage:
    """What is measured in one stage, in this order.

    Args:
        limit_s: seconds that the stage may take.
        rows: presets, each with its rows, the most important first; a row whose estimate exceeds the time
            that is left is left out, and the next may fit.
        trainings: kinds of trainings in `benchmarks.trainings`.
        longest: presets, each with the rows whose longest sequence is searched.
        repeats: whether `REPEATED` is measured at the end, on each workload of ``rows``.
    """

    title: str
    limit_s: float
    tests: tuple[Suite, ...] = ()
    rows: tuple[tuple[str, tuple[str, ...]], ...] = ()
    trainings: tuple[str, ...] = ()
    longest: tuple[tuple[str, tuple[str, ...]], ...] = ()
    repeats: bool = False


SMOKE = "tests/engine/test_device_smoke.py"
TIMED_TESTS = (
    "tests/engine/test_link.py",
    "tests/planner/test_gpu_planner.py::test_recording_costs_little_and_the_profile_is_kept",
)
"""Tests that measure times, which other work on the device would falsify."""
EXACTNESS_TESTS = ("tests/engine/test_gpu_stress.py", "tests/planner/test_gpu_guard.py")
COMPILED_PLANNING = "tests/planner/test_gpu_planner.py::test_compiled_layers_are_planned_and_survived"
"""Beside three other processes it takes longer than a test may."""
GPU_TESTS = (
    *("tests/engine/test_gpu.py", "tests/planner/test_gpu_planner.py"),
    "tests/engine/test_device_allocator.py",
    *("tests/planner/test_gpu_optimizer_states.py", "tests/engine/test_slabs.py"),
    *("tests/engine/test_with_liger.py", "tests/parallel/test_random_streams.py"),
    "tests/cli/test_plan_quantised.py",  # with bitsandbytes
    *("tests/benchmarks/test_frontier_methods.py", "tests/robustness/test_growth.py"),
)

CLAIMS = (
    *("eager", "hf-checkpointing", "compiled", "actswap-compiled-auto", "actswap-compiled-mix"),
    *("actswap-compiled-lean-mix", "actswap_plan_compiled_checkpointing", "actswap_plan_checkpointing"),
    *("actswap-default-auto",),
)
"""Rows on which the claims are judged, the most important first."""
CLAIMS_8K = (
    *CLAIMS,
    *("actswap-mix-eager", "trl-offloading", "actswap-everything-20", "actswap-everything-auto"),
    *("actswap-case3-auto", FLASH, "actswap-elementwise", "actswap_plan_half", "actswap_plan_reduce"),
    *("actswap_plan_compiled_half",),
)
CLAIMS_32K = (
    *CLAIMS,
    *("actswap-mix-eager", "actswap-tiled-layers-recompute", "actswap-case3-auto", "actswap_plan_half"),
    *("actswap_plan_reduce", "actswap_plan_compiled_half"),
)
_PEERS = (
    *("hf-checkpointing-offload", "trl-offloading-checkpointing", "compiled-budget-0.5"),
    *("compiled-budget-0.2", "compiled-checkpointing", "trl-offloading", "save-on-cpu"),
)
_LONGEST = (
    *("hf-checkpointing", "actswap-tiled-step", "liger-checkpointing", "actswap-streamed"),
    *("actswap-tiled-loss-recompute", "liger-tiled-mlp-checkpointing", "hf-checkpointing-offload"),
    *("actswap-mix-eager", "actswap-everything-auto", "eager"),
)
_CURVE = tuple(row.name for row in ROWS if row.budget is not None)
_ALL = tuple(row.name for row in ROWS)

STAGES = {
    1: Stage("smoke", 255, (Suite("smoke", (SMOKE,)),)),
    2: Stage(
        "GPU tests",
        440,
        (
            Suite("GPU tests", EXACTNESS_TESTS, "gpu", processes=4),
            Suite("GPU tests", TIMED_TESTS, "gpu"),
            Suite("GPU tests", GPU_TESTS, "gpu", without=(*TIMED_TESTS, COMPILED_PLANNING), processes=4),
            Suite("GPU tests", (COMPILED_PLANNING,), "gpu"),
        ),
    ),
    3: Stage("claims at 7b-8k", 495, rows=(("7b-8k", CLAIMS_8K),), repeats=True),
    4: Stage("claims at 7b-32k", 465, rows=(("7b-32k", CLAIMS_32K),), repeats=True),
    5: Stage("out of memory, optimizer states", 460, trainings=(OUT_OF_MEMORY, OPTIMIZER_STATES)),
    6: Stage("longest sequences", 460, longest=(("8b-8k-model", _LONGEST),)),
    7: Stage(
        "the rest of the curves",
        460,
        rows=(
            *((preset, (*_PEERS, *_CURVE)) for preset in ("7b-8k", "7b-32k")),
            *((preset, _ALL) for preset in ("8b-8k-model", "7b-8k", "7b-32k")),
        ),
    ),
    8: Stage("32B with LoRA, frozen weights on the host, 8k", 460, trainings=(FROZEN_8K,)),
    9: Stage("32B with LoRA, frozen weights on the host, 32k", 510, trainings=(FROZEN_32K,)),
    10: Stage("6B with LoRA, frozen weights on the host, beside peers", 300, trainings=(FROZEN_PEERS,)),
}

LONG_ROWS = ("hf-checkpointing", "actswap-tiled-loss-recompute", "actswap-tiled-step", "actswap-streamed")
_HALVES = ("actswap_plan_half", "actswap_plan_compiled_half")
PROMISE = "promise.py --on-device --known --only H100"
"""Saved plans, checkpointing and ``auto``, as `promise` trains them; with one more file of results."""
HALF_HOURS: tuple[tuple[tuple[str, str, int], ...], ...] = (
    (
        ("smoke; if test_eager_repeats_its_bits fails, stop and mend that first", "--stage 1", 270),
        ("what plan promises, trained", PROMISE, 270),
        ("the claims at 8k tokens", "--stage 3", 510),
        ("the claims at 32k tokens", "--stage 4", 480),
        ("whole 8B, 32k tokens and longer", f"--stage 6 --only {' '.join(LONG_ROWS)}", 150),
    ),
    (
        ("out of memory, optimizer states", "--stage 5", 360),
        ("half of the memory, 8k tokens", f"--stage 3 --only {' '.join(_HALVES)}", 240),
        ("half of the memory, 32k tokens", f"--stage 4 --only {' '.join(_HALVES)}", 270),
        ("the longest sequences", "--stage 6", 420),
        ("the rest of the GPU tests", "--stage 2", 390),
    ),
)
"""What a borrowed machine measures in half an hour, the most important first: title, arguments, seconds."""
CARRIED = "gpu-carry"
"""Folder with TRL and Liger, which ``make gpu-carry`` fetches."""

SIZES = {
    OUT_OF_MEMORY: Sizes("6 layers, 32k", 14, 6, 4096, 32768, 4096, expected_s=30.0),
    OPTIMIZER_STATES: Sizes("8 layers, 8k", 10, 8, 4096, 8192, 32000, expected_s=25.0),
    FROZEN_8K: Sizes("60 layers, 8k", 20, 60, 6656, 8192, 32000, expected_s=110.0),
    FROZEN_32K: Sizes("60 layers, 32k", 20, 60, 6656, 32768, 32000, expected_s=400.0),
    FROZEN_PEERS: Sizes("32 layers, 16k", 8, 32, 4096, 16384, 32000, expected_s=60.0),
}
STAND_INS: dict[str, Workload] = {
    name: replace(
        PRESETS["cpu-model" if PRESETS[name].head else "cpu"],
        name=f"{name}, tiny",
        layers=2,
        tokens=64 if PRESETS[name].tokens > 8192 else 32,
        warmup_steps=2,
        steps=2,
        expected_ms=20.0,
    )
    for name in ("7b-8k", "7b-32k", "8b-8k-model")
}
"""Tiny workloads in place of the presets, for a dry run on the CPU."""
_TINY = Sizes("tiny", 2, 3, 64, 32, 256, expected_s=2.0)
TINY_SIZES = {
    OUT_OF_MEMORY: Sizes("tiny", 4, 2, 64, 64, 64, expected_s=2.0),
    OPTIMIZER_STATES: replace(_TINY, layers=2, min_tensor_bytes=1024),
    FROZEN_8K: _TINY,
    FROZEN_32K: replace(_TINY, tokens=64),
    FROZEN_PEERS: _TINY,
}
_TINY_LONGEST_TOKENS = 128
_FIRST_LONGEST_TOKENS = 2**15


@dataclass(frozen=True)
class Machine:
    """The device of this machine, found without touching it: this process must survive the device's faults.

    ``device`` is its name for PyTorch. To ``memory_bytes`` workloads are scaled down; ``None``: not known.
    """

    device: str
    name: str
    memory_bytes: int | None = None

    @classmethod
    def found(cls, device: str | None) -> Machine:
        """Return the machine as ``nvidia-smi`` shows it; a device of another vendor must be named."""
        if device == "cpu":
            return cls("cpu", "cpu")
        command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
            name, mebibytes = done.stdout.splitlines()[0].rsplit(",", 1)
            return cls(device or "cuda:0", name.strip(), int(mebibytes) * 2**20)
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            if device is not None:
                return cls(device, device)
            problem = "no accelerator: nvidia-smi does not answer. Name another's with --device"
            raise SystemExit(f"{problem}; a dry run on the CPU is --device cpu") from None

    @property
    def is_cpu(self) -> bool:  # a dry run
        return self.device == "cpu"


def jobs_of(stage: Stage, machine: Machine, compiling: bool) -> list[Job]:
    """Return the jobs of a stage, in the order in which they run, each once."""
    rows = {row.name: row for row in ROWS}
    jobs: list[Job] = []
    for preset, names in stage.rows:
        chosen = [rows[name] for name in names]
        jobs += frontier_jobs([_workload(preset, machine)], chosen, compiling)
    for kind in stage.trainings:
        jobs += training_jobs(kind, (TINY_SIZES if machine.is_cpu else SIZES)[kind])
    for preset, names in stage.longest:
        # Lengths are not scaled down to the memory: the search shall find its limit.
        workload = STAND_INS[preset] if machine.is_cpu else PRESETS[preset]
        limit_tokens = _TINY_LONGEST_TOKENS if machine.is_cpu else 2**20
        first_tokens = None if machine.is_cpu else _FIRST_LONGEST_TOKENS
        jobs += longest_jobs(workload, [rows[name] for name in names], limit_tokens, first_tokens)
    return list({job.title: job for job in jobs}.values())


def repeated_jobs(stage: Stage, machine: Machine) -> list[FrontierJob]:
    """Return the jobs that end a stage: rows with which others are compared, as clocks have drifted."""
    presets = [preset for preset, _ in stage.rows] if stage.repeats else []
    return frontier_jobs([_workload(preset, machine) for preset in presets], REPEATED)


def _workload(preset: str, machine: Machine) -> Workload:
    if machine.is_cpu:
        return STAND_INS[preset]
    if machine.memory_bytes is None:
        return PRESETS[preset]
    return fitted(PRESETS[preset], machine.memory_bytes)


def half_hour(number: int, out_folder: str | None) -> Iterator[str]:
    """Yield the commands of a half hour on a borrowed machine, each after a comment with its budget.

    Each is one line of bash. Results stay in a folder of that machine, from which the next command continues;
    ``out_folder``, as its shell reads it, is fetched after each command and empty at the next.
    """
    known = commit(REPOSITORY)
    yield f"# half hour {number}: copy the tree and {CARRIED}/ (make gpu-carry) along with each"
    if known["dirty"]:
        yield "# tracked files differ from the commit that the results will name"
    before = f'export {RESULTS_VARIABLE}="${{TMPDIR:-/tmp}}/hf_actswap_results" '
    before += f'{COMMIT_VARIABLE}={known["id"] or ""} PYTHONPATH="$PWD/{CARRIED}"; '
    before += f'mkdir -p "${RESULTS_VARIABLE}"; '
    if out_folder is not None:
        before += f'trap \'tar -czf "{out_folder}/{ARCHIVE}" -C "${RESULTS_VARIABLE}" .\' EXIT; '
    for place, (title, arguments, budget_s) in enumerate(HALF_HOURS[number - 1], 1):
        yield f"# {number}.{place} {title}: {budget_s} s"
        command = f"gpu_day.py {arguments} --minutes {(budget_s - SLACK_S - _TO_END_S) / 60:g}"
        if arguments == PROMISE:
            command = f'{arguments} --out "${RESULTS_VARIABLE}/promise_device.json"'
        yield f"{before}timeout -k 10 {budget_s} python3 benchmarks/{command}"
    yield f"# then, here: tar -xzf {ARCHIVE} -C benchmarks/results; python benchmarks/verdict.py"


class Day:
    """One call of the command: its worker process, its results and its log."""

    def __init__(self, machine: Machine, options: argparse.Namespace) -> None:
        self.machine, self.options = machine, options
        self.folder = results_folder()
        file = f"gpu_day_{file_name(machine.name)}.json"
        self.stderr = self.folder / "gpu_day_stderr.txt"
        _shorten(self.stderr)
        self.environment = dict(ENVIRONMENT)
        if machine.is_cpu:  # on a shared machine several threads wait for each other
            self.environment["OMP_NUM_THREADS"] = "1"
        self.worker = Worker(machine.device, self.stderr, self.environment)
        self.place = Place(self.stderr, self.environment, options.processes, self.say)
        about = {name: metadata.version(name) for name in ("torch", "transformers")}
        about |= {"device": machine.name, "commit": commit(REPOSITORY)["id"]}
        records, asked = Records(self.folder / file, RESULTS / file), again_asked(options.again)
        self.session = Session(
            records, self.worker, about, lambda name: name in _REPEATED_NAMES or asked(name)
        )

    def say(self, text: str) -> None:
        """Print a line, and add it to the log."""
        line = f"{datetime.now():%H:%M:%S} {text}"
        print(line, flush=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "gpu_day.log").open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    def begin(self) -> None:
        """Say first what is found of the device; if segments cannot grow, do without, in all processes."""
        if not self._refuses_segments() or self.machine.is_cpu:
            return
        self.say("expandable segments are refused: claims about reserved memory are not judged")
        self.environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
        self.worker.stop()
        self._refuses_segments(again=True)

    def _refuses_segments(self, again: bool = False) -> bool:
        """Say what is found; return whether segments cannot grow, or the device fails, perhaps for that."""
        try:
            found = self.session.learn_origin(again)["environment"]["hardware"]
        except MeasureError as error:
            self.say(f"{self.machine.name} does not answer: {error.reason}\n{error.told}")
            return error.status == "failed"
        self.say(_in_one_line(found))
        return found.get("expandable_segments") is False

    def run(self, number: int, began_s: float) -> bool:
        """Run a stage, whose time began at ``began_s`` of `time.monotonic`; return whether nothing failed."""
        stage = STAGES[number]
        limit_s = stage.limit_s if self.options.minutes is None else 60 * self.options.minutes
        deadline_s = began_s + limit_s
        self.say(f"stage {number}: {stage.title}, {limit_s:.0f} s")
        done: list[Record] = []
        if stage.tests:
            self.worker.stop()  # it would hold device memory during the tests
        for suite in stage.tests:
            done += run_suite(suite, self.session, self.place, deadline_s)
        jobs = [job for job in jobs_of(stage, self.machine, self.options.compile) if self._is_asked(job)]
        repeated = repeated_jobs(stage, self.machine)
        reserved_s = sum(job.estimate_s(self.session) for job in repeated)
        measured = self.session.run(jobs, self.say, deadline_s - reserved_s, SLACK_S)
        if any(record.status == "measured" for record in measured):
            measured += self.session.run(repeated, self.say, deadline_s, SLACK_S)
        done += measured
        _shorten(self.stderr)
        count = Counter(record.status for record in done)
        told = ", ".join(f"{number} {status}" for status, number in count.items()) or "nothing was left to do"
        self.say(f"stage {number} took {time.monotonic() - began_s:.0f} s: {told}")
        return not any(record.failed for record in done)

    def tell_what_there_is(self, numbers: Sequence[int]) -> None:
        """Print all rows of stages, their estimated times, and which are in the results."""
        for number in numbers:
            stage = STAGES[number]
            print(f"stage {number}: {stage.title}, at most {stage.limit_s:.0f} s")
            for tests in stage.tests:
                print(f"  {tests.name}: {' '.join(tests.paths)}")
            for job in jobs_of(stage, self.machine, self.options.compile):
                line = self.session.find(job)
                state = "not measured" if line is None else line["status"]
                print(f"  {job.title}: about {job.estimate_s(self.session):.0f} s, {state}")

    def _is_asked(self, job: Job) -> bool:
        return not self.options.only or getattr(job.blank(), "method", "") in self.options.only


def _in_one_line(hardware: Mapping[str, Any]) -> str:
    if "link_gb_per_s" not in hardware:
        return str(hardware["name"])
    link = ", ".join(f"{name} {rate:.1f}" for name, rate in hardware["link_gb_per_s"].items())
    pinning, grows = hardware["pinning_s_per_gib"], hardware["expandable_segments"]
    return (
        f"{hardware['name']}: {pinning:.2f} s to page-lock a GiB; link in GB/s: {link}; "
        f"expandable segments: {grows}"
    )


def _shorten(path: Path) -> None:
    if path.is_file() and path.stat().st_size > _MOST_LOG_BYTES:
        path.write_bytes(path.read_bytes()[-_MOST_LOG_BYTES // 2 :])


def _numbers(text: str) -> list[int]:
    """Return the numbers of stages in a text such as ``3`` or ``1-4``."""
    first, _, last = text.partition("-")
    numbers = list(range(int(first), int(last or first) + 1))
    if not numbers or not set(numbers) <= set(STAGES):
        raise argparse.ArgumentTypeError(f"stages are {min(STAGES)} to {max(STAGES)}, found {text}")
    return numbers


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    stages = "numbers, or ranges as 1-4 (default: all)"
    parser.add_argument("--stage", nargs="+", type=_numbers, metavar="N", help=stages)
    half_hour = parser.add_argument("--half-hour", type=int, choices=(1, 2), nargs="?", const=0)
    half_hour.help = "print the commands for a borrowed machine"
    parser.add_argument("--out-folder", help="with --half-hour: what is fetched after each, such as '$OUT'")
    parser.add_argument("--list", action="store_true", help="say what there is, and measure nothing")
    parser.add_argument("--device", help="default: the NVIDIA GPU, where there is one; cpu: a dry run, tiny")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="of the rows, not of the tests")
    again = "measure again what the results hold (default: all of it)"
    parser.add_argument("--again", nargs="*", metavar="ROW", help=again)
    parser.add_argument("--minutes", type=float, help="of each stage (default: its own)")
    parser.add_argument("--processes", type=int, default=4, help="that run tests at once, at most")
    slow = "default: not on the CPU, where it is slow"
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help=slow)
    options = parser.parse_args(argv)
    options.stage = [number for numbers in options.stage or [list(STAGES)] for number in numbers]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run stages; return the exit status."""
    options = _parse(argv)
    if os.environ.get(RESULTS_VARIABLE):  # children run in other folders
        os.environ[RESULTS_VARIABLE] = str(Path(os.environ[RESULTS_VARIABLE]).resolve())
    if options.half_hour is not None:
        for number in (options.half_hour,) if options.half_hour else (1, 2):
            for line in half_hour(number, options.out_folder):
                print(f"{line}")
        return 0
    machine = Machine.found(options.device)
    if options.compile is None:
        options.compile = not machine.is_cpu
    day = Day(machine, options)
    if options.list:
        day.tell_what_there_is(options.stage)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    good, began_s = True, time.monotonic() - _IMPORTS_S
    try:
        day.begin()
        for number in options.stage:
            good = day.run(number, began_s) and good
            began_s = time.monotonic()
    finally:
        day.worker.stop()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
