"""The day on the GPU, on the CPU: its stages as data, its tests, and a dry run through all of it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_day, runner
from benchmarks.gpu_day import HALF_HOURS, PROMISE, STAGES, Day, Machine, Stage, jobs_of, repeated_jobs
from benchmarks.records import Records
from benchmarks.rows import EAGER, FLASH, ROWS
from benchmarks.runner import FrontierJob, MeasureError, Session, Suite, Worker, origin_of, run_suite
from benchmarks.trainings import OPTIMIZER_STATES, OUT_OF_MEMORY
from benchmarks.verdict import COMPARED, COMPARISON, DIFFERENCE, NEAR_EAGER
from benchmarks.workloads import PRESETS, fitted
from tests.benchmarks.odd_rows import ODD_ROWS, measured, serve_odd

H100 = Machine("cuda:0", "NVIDIA H100 80GB HBM3", 81559 * 2**20)
START_S = 30.0
"""Imports, the worker, its context, the link, a model, and eager's own bits."""


def all_jobs(number: int) -> list[FrontierJob]:
    return [job for job in jobs_of(STAGES[number], H100, True) if isinstance(job, FrontierJob)]


def test_every_stage_is_one_command_of_less_than_nine_minutes() -> None:
    limits_s = [stage.limit_s + gpu_day.SLACK_S for stage in STAGES.values()]
    assert max(limits_s) < 9 * 60
    assert limits_s[0] >= 4 * 60  # from a cold disk
    assert list(STAGES) == list(range(1, 11))


@pytest.mark.parametrize(("number", "preset"), [(3, "7b-8k"), (4, "7b-32k")])
def test_what_the_claims_need_fits_into_the_first_call(number: int, preset: str) -> None:
    """Whatever is measured after it, and even if each estimate were a tenth too low."""

    asked: list[str] = []
    now_s = START_S
    expected = {job.row.name: job for job in all_jobs(number)}
    peaks = {"activation_bytes": 10, "peak_reserved_bytes": 40, "peak_allocated_bytes": 40}

    def ask(request: Any, _limit_s: float | None) -> Any:
        nonlocal now_s
        if request is origin_of:
            return {}
        name = request.keywords["name"]
        asked.append(name)
        now_s += 1.1 * expected[name].estimate_s(session)
        return measured(request, ms=PRESETS[preset].expected_ms, **peaks)

    session = Session(Records(), ask, {"device": "d", "commit": "c"}, clock=lambda: now_s)
    repeated = repeated_jobs(STAGES[number], H100)
    end_s = STAGES[number].limit_s - sum(job.estimate_s(session) for job in repeated)
    session.run(all_jobs(number), lambda _line: None, end_s, gpu_day.SLACK_S)
    assert asked[:8] == list(gpu_day.CLAIMS[:8])
    assert number == 4 or {"trl-offloading", "actswap-everything-20", FLASH} <= set(asked)
    assert [job.row.name for job in repeated] == ["eager-again", "hf-checkpointing-again"]
    assert now_s <= STAGES[number].limit_s + gpu_day.SLACK_S
    # A second call measures the rest.
    now_s = START_S
    session.run(all_jobs(number), lambda _line: None, STAGES[number].limit_s, gpu_day.SLACK_S)
    assert set(asked) == set(expected)


def test_a_borrowed_half_hour_is_printed_as_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_day.main(["--half-hour", "--out-folder", "$OUT"]) == 0
    printed = capsys.readouterr().out.splitlines()
    commands = [line for line in printed if not line.startswith("#")]
    parts = [part for parts in HALF_HOURS for part in parts]
    assert all(sum(budget_s for _, _, budget_s in parts) <= 28 * 60 for parts in HALF_HOURS)
    asked = []
    for command, (_, arguments, budget_s) in zip(commands, parts, strict=True):
        assert len(command) <= 2000
        assert budget_s < 9.5 * 60
        assert any(line.startswith("# ") and line.endswith(f" {budget_s} s") for line in printed)
        if arguments == PROMISE:
            assert f"timeout -k 10 {budget_s} python3 benchmarks/promise.py --on-device" in command
            continue
        assert f"timeout -k 10 {budget_s} python3 benchmarks/gpu_day.py --stage" in command
        chosen = gpu_day._parse(shlex.split(command.partition("gpu_day.py")[2]))
        assert 60 * chosen.minutes + gpu_day.SLACK_S < budget_s
        (number,) = chosen.stage
        assert 60 * chosen.minutes <= STAGES[number].limit_s
        assert set(chosen.only or ()) <= {job.row.name for job in all_jobs(number)}
        asked.append(number)
    assert [arguments for _, arguments, _ in parts[:2]] == ["--stage 1", PROMISE]
    assert asked == [1, 3, 4, 6, 5, 3, 4, 6, 2]


FAKE_PYTHON = """#!/bin/sh
echo "$HF_ACTSWAP_COMMIT $PYTHONPATH" >> "$HF_ACTSWAP_RESULTS/asked.txt"
exit 3
"""


def test_results_stay_on_a_borrowed_machine_and_are_copied_out_whatever_happens(tmp_path: Path) -> None:
    """The folder that is fetched is emptied ahead of each command; the second continues all the same."""
    tool, out = tmp_path / "bin" / "python3", tmp_path / "out"
    tool.parent.mkdir()
    tool.write_text(FAKE_PYTHON, encoding="utf-8")
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path), "OUT": str(out)}
    first = next(line for line in gpu_day.half_hour(1, "$OUT") if not line.startswith("#"))
    for lines in (1, 2):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        done = subprocess.run(["bash", "-c", first], cwd=tmp_path, env=environment, timeout=30)
        assert done.returncode == 3
        (archive,) = out.iterdir()
        with tarfile.open(archive) as found:
            asked = found.extractfile("./asked.txt")
            told = asked.read().decode() if asked is not None else ""
        assert told.count("\n") == lines
    assert str(gpu_day.commit(gpu_day.REPOSITORY)["id"] or "") in told
    assert f"{tmp_path}/gpu-carry" in told


def test_what_is_carried_is_fetched_and_ignored(repository: Path) -> None:
    command = ["make", "-n", "gpu-carry", "PYTHON=python"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    for part in ("trl", "liger-kernel", "--no-deps", "--python-version 3.12", f"--target {gpu_day.CARRIED}"):
        assert part in done.stdout
    assert f"/{gpu_day.CARRIED}/" in (repository / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "make gpu-carry" in (repository / "benchmarks" / "README.md").read_text(encoding="utf-8")


def test_every_row_is_measured_in_some_stage_after_those_that_its_budget_is_taken_from() -> None:
    presets = ("7b-8k", "7b-32k", "8b-8k-model")
    assert all(fitted(PRESETS[name], H100.memory_bytes or 0) == PRESETS[name] for name in presets)
    order = [job for number in (3, 4, 7) for job in all_jobs(number)]
    first: dict[tuple[str, str], int] = {}
    for place, job in enumerate(order):
        first.setdefault((job.workload.name, job.row.name), place)
    assert set(first) >= {(preset, row.name) for preset in presets for row in ROWS}
    for place, job in enumerate(order):
        needs = (EAGER.name, *job.row.budget.needs) if job.row.budget is not None else ()
        assert all(first[job.workload.name, base] < place for base in needs), job.title
    for stage in STAGES.values():
        titles = [job.title for job in jobs_of(stage, H100, True)]
        assert len(set(titles)) == len(titles)


def test_all_gpu_tests_run_in_some_stage(repository: Path) -> None:
    marked = re.compile(r"^(@pytest|pytestmark = .*|    pytest)\.?mark\.gpu|mark\.gpu\b", re.MULTILINE)
    files = {
        str(path.relative_to(repository))
        for path in (repository / "tests").rglob("test_*.py")
        if marked.search(path.read_text(encoding="utf-8")) and path.name != Path(__file__).name
    }
    named = {path.partition("::")[0] for tests in STAGES[2].tests for path in tests.paths}
    assert named == files
    *others, last = STAGES[2].tests
    assert (last.paths, last.processes) == ((gpu_day.COMPILED_PLANNING,), 1)
    file, _, name = gpu_day.COMPILED_PLANNING.partition("::")
    assert f"\ndef {name}(" in (repository / file).read_text(encoding="utf-8")
    assert all(gpu_day.COMPILED_PLANNING in tests.without for tests in others if file in tests.paths)
    paths = [path for tests in (*STAGES[1].tests, *others, last) for path in (*tests.paths, *tests.without)]
    assert all((repository / path.partition("::")[0]).is_file() for path in paths)


def options(*arguments: str) -> Any:
    found = gpu_day._parse(["--device", "cpu", *arguments])
    found.compile = False
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_ACTSWAP_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results"


def lines_in(folder: Path) -> dict[str, dict[str, Any]]:
    found = json.loads((folder / "gpu_day_cpu.json").read_text(encoding="utf-8"))
    longest = [f"longest {line['seq']} " if line.get("longest") else "" for line in found]
    names = [f"{line['kind']} {line['workload']} {line['method'].rpartition('::')[2]}" for line in found]
    return {one + name: line for one, name, line in zip(longest, names, found, strict=True)}


TESTS = """
import os, time
import pytest
from pathlib import Path

def test_passes(record_property):
    record_property("ms", 1.5)

def test_fails():
    assert 1 == 2, "this is why"

@pytest.mark.skip(reason="for a reason")
def test_is_skipped():
    pass

def test_dies():
    os._exit(3)

def hangs_in_here():
    time.sleep(600)

def test_hangs():
    hangs_in_here()

def test_is_the_last():
    pass
"""


def run_tests(text: str, path: Path, processes: int = 1, seconds: float = 120.0) -> list[str]:
    """Run the tests of a file with this text; return the names of those that were recorded."""
    path.write_text(text, encoding="utf-8")
    day = Day(Machine("cpu", "cpu"), options("--processes", str(processes)))
    suite = Suite("odd", (str(path),), processes=processes)
    done = run_suite(suite, day.session, day.place, day.session.clock() + seconds)
    return [asdict(record)["method"].rpartition("::")[2] for record in done]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_tests_that_fail_hang_or_die_end_nothing(
    processes: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "TEST_LIMIT_S", 3.0)
    run_tests(TESTS, tmp_path / "test_odd.py", processes)
    found = {name.removeprefix("test odd test_"): line for name, line in lines_in(folder).items()}
    assert {name: line["status"] for name, line in found.items()} == {
        "passes": "passed",
        "fails": "failed",
        "is_skipped": "skipped",
        "dies": "failed",
        "hangs": "timed out",
        "is_the_last": "passed",
    }
    assert found["passes"]["properties"] == {"ms": 1.5}
    assert "this is why" in found["fails"]["traceback"]
    assert found["is_skipped"]["reason"] == "Skipped: for a reason"
    assert "hangs_in_here" in found["hangs"]["traceback"]
    assert found["passes"]["device"] == "cpu"
    # Nothing but what was skipped runs again: it may have become possible.
    assert run_tests(TESTS, tmp_path / "test_odd.py", processes) == ["test_is_skipped"]


@pytest.mark.slow
def test_tests_end_with_the_time_of_the_stage_and_go_on_in_the_next_call(
    folder: Path, tmp_path: Path
) -> None:
    text = "import time\ndef test_one(): pass\ndef test_two(): time.sleep({})\n"
    path = tmp_path / "test_slow.py"
    assert run_tests(text.format(600), path, seconds=20.0) == ["test_one"]
    assert "the stage's time is over" in (folder / "gpu_day.log").read_text(encoding="utf-8")
    assert run_tests(text.format(0), path) == ["test_two"]


def test_a_file_that_cannot_be_imported_is_a_failure(folder: Path, tmp_path: Path) -> None:
    run_tests("import no_such_module\n", tmp_path / "test_broken.py")
    (line,) = lines_in(folder).values()
    assert (line["status"], "no_such_module" in line["traceback"]) == ("failed", True)


@pytest.mark.slow
def test_rows_that_go_wrong_do_not_end_a_stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_day, "ROWS", (*ROWS, *ODD_ROWS))
    monkeypatch.setattr(runner, "LEAST_LIMIT_S", 8.0)
    names = ("eager", "raises", "hangs", "dies", "goes on")
    monkeypatch.setitem(gpu_day.STAGES, 3, Stage("odd", 200, rows=(("7b-8k", names),)))
    day = Day(Machine("cpu", "cpu"), options())
    day.worker = day.session._ask = Worker("cpu", day.stderr, day.environment, serve_odd)
    try:
        assert not day.run(3, day.session.clock())
    finally:
        day.worker.stop()
    found = {line["method"]: line for line in lines_in(folder).values()}
    statuses = ["measured", "failed", "timed out", "failed", "measured"]
    assert [found[name]["status"] for name in names] == statuses
    assert found["raises"]["reason"] == "ValueError: no such thing"
    assert "in raises" in found["raises"]["traceback"]
    assert found["hangs"]["reason"].startswith("no answer after ")
    assert "in hangs" in found["hangs"]["traceback"]  # where its threads are
    assert found["dies"]["reason"] == "its process ended with status 9"
    assert found["dies"]["traceback"].endswith("the last words\n")
    assert found["goes on"]["exact"] is True
    assert found["eager"]["environment"]["hardware"]
    # A second call finds all of it settled, at the same commit.
    again = Day(Machine("cpu", "cpu"), options())
    if again.session._commit is not None:
        assert again.run(3, again.session.clock())
        log = (folder / "gpu_day.log").read_text(encoding="utf-8")
        assert log.count("is in the results") == len(names)


DRY_ROWS = ("eager", "trl-offloading", "liger-checkpointing", "plain")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_dry_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stage, called from another folder than the checkout; it takes five minutes and more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ACTSWAP_RESULTS", "results")
    assert gpu_day.main(["--device", "cpu", "--processes", "2"]) == 0
    found = lines_in(folder)
    assert {line["status"] for line in found.values()} <= {"measured", "passed", "skipped", "out of memory"}
    for name in COMPARED:  # as the verdict reads it
        compared = found[f"test smoke {COMPARISON}[{name}]"]
        assert compared["properties"][DIFFERENCE] <= NEAR_EAGER
    kinds = {name.partition(" ")[0] for name in found}
    assert kinds == {"test", "frontier", "out", "optimizer", "longest", "frozen"}
    assert {line["workload"] for line in found.values() if line["kind"] == "frontier"} == {
        f"{preset}, tiny" for preset in ("7b-8k", "7b-32k", "8b-8k-model")
    }
    measured = [line for line in found.values() if line["status"] == "measured"]
    assert all(line["wall_s"] > 0 for line in measured)
    liger = found["frontier 8b-8k-model, tiny liger-checkpointing"]
    assert (liger["status"], "none for the CPU" in liger["reason"]) == ("skipped", True)
    files = list(folder.iterdir())
    assert len(files) <= 8
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", file.name) and file.is_file() for file in files)
    assert all(file.stat().st_size < 16 * 2**20 for file in files)
    said = capsys.readouterr().out
    assert all(f"stage {number} took" in said for number in STAGES)
    # Called again, it measures nothing that was measured.
    assert gpu_day.main(["--device", "cpu", "--stage", "3-5", "--only", *DRY_ROWS]) == 0
    told = capsys.readouterr().out
    assert ": measured" not in told
    again = [
        line
        for line in measured
        if line["kind"] in ("frontier", OUT_OF_MEMORY, OPTIMIZER_STATES) and line["method"] in DRY_ROWS
        if line["workload"] != "8b-8k-model, tiny"  # in other stages
    ]
    assert told.count("is in the results") == len(again)


HARDWARE = {
    "name": "H200",
    "pinning_s_per_gib": 0.761,
    "link_gb_per_s": {"out": 54.91, "in": 55.1},
    "expandable_segments": True,
}


@pytest.mark.parametrize(
    "refusal",
    [
        None,
        {"environment": {"hardware": {**HARDWARE, "expandable_segments": False}}},
        MeasureError("failed", "its process ended with status 1", "the last words"),
    ],
    ids=["granted", "refused", "a dead process"],
)
def test_the_device_is_told_first_and_refused_segments_are_done_without(refusal: Any, folder: Path) -> None:
    day = Day(Machine("cuda:0", "H200"), options())
    answers = [*([refusal] if refusal is not None else []), {"environment": {"hardware": HARDWARE}}]

    def ask(_request: Any, _limit_s: float | None) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, MeasureError):
            raise answer
        return answer

    day.session._ask = ask
    day.begin()
    log = (folder / "gpu_day.log").read_text(encoding="utf-8")
    told = "H200: 0.76 s to page-lock a GiB; link in GB/s: out 54.9, in 55.1; expandable segments: True"
    assert told in log
    assert ("expandable segments are refused" in log) is (refusal is not None)
    allocator = "expandable_segments:False" if refusal else None
    assert day.environment.get("PYTORCH_ALLOC_CONF") == allocator
    assert day.place.environment.get("PYTORCH_ALLOC_CONF") == allocator
    assert not answers


def test_a_stage_ends_with_the_rows_that_others_are_held_against(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each call that measured something, however little time is left for the rows before them."""
    asked: list[str] = []

    def ask(request: Any, _limit_s: float | None) -> Any:
        if request is origin_of:
            return {}
        asked.append(request.keywords["name"])
        return measured(request, ms=20.0, status="skipped" if asked[-1] == "save-on-cpu" else "measured")

    again = ["eager-again", "hf-checkpointing-again"]
    names = ("eager", "hf-checkpointing", "actswap-mixed", "save-on-cpu")
    for count, expected in ((2, [*names[:2], *again]), (3, [names[2], *again]), (4, [names[3]])):
        monkeypatch.setitem(STAGES, 3, Stage("few", 60, rows=(("7b-8k", names[:count]),), repeats=True))
        day = Day(Machine("cpu", "cpu"), options())
        day.session._ask = ask
        asked.clear()
        assert day.run(3, day.session.clock())
        assert asked == expected
    line = lines_in(folder)["frontier 7b-8k, tiny eager-again"]
    assert line["measured_at"] >= lines_in(folder)["frontier 7b-8k, tiny eager"]["measured_at"]
    assert line["measured_at"][:2] == "20"


def test_what_there_is_can_be_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_day.main(["--device", "cpu", "--stage", "3", "--list"]) == 0
    said = capsys.readouterr().out
    assert "7b-8k, tiny actswap-compiled-auto: about " in said
    assert ", not measured" in said
    assert not folder.exists()


def test_the_machine_is_found_without_touching_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="--device cpu"):
        Machine.found(None)
    assert Machine.found("xpu:0") == Machine("xpu:0", "xpu:0")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\necho another\n", encoding="utf-8")
    tool.chmod(0o755)
    assert Machine.found(None) == H100
    assert Machine.found("cpu").is_cpu
