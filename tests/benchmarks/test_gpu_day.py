"""The day on the GPU, on the CPU: its stages as data, its tests, and a dry run through all of it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import gpu_day, harness, suites
from benchmarks.gpu_day import STAGES, Day, Machine, Stage, jobs_of
from benchmarks.harness import FrontierJob, Session, Worker
from benchmarks.records import Records
from benchmarks.rows import EAGER, ROWS
from benchmarks.suites import Suite, SuiteRun
from benchmarks.workloads import PRESETS, fitted
from tests.benchmarks.odd_rows import ODD_ROWS

H100 = Machine("cuda:0", "NVIDIA H100 80GB HBM3", 81559 * 2**20)
START_S = 30.0
"""Imports, the worker, its context, the link, a model, and eager's own bits."""
CLAIMED = (
    "eager",
    "hf-checkpointing",
    "compiled",
    "actswap-compiled-auto",
    "actswap-compiled-mix",
    "actswap-compiled-lean-mix",
    "actswap_plan_compiled_checkpointing",
    "actswap_plan_checkpointing",
)
"""What must be measured in the first call of the stages of claims."""


def all_jobs(number: int) -> list[FrontierJob]:
    return [job for job in jobs_of(STAGES[number], H100, True) if isinstance(job, FrontierJob)]


def test_every_stage_ends_in_eight_minutes_and_the_first_four_in_twenty_five() -> None:
    limits_s = [stage.limit_s + gpu_day.SLACK_S for stage in STAGES.values()]
    assert max(limits_s) < 8 * 60
    assert sum(limits_s[:4]) <= 25 * 60
    assert list(STAGES) == list(range(1, 8))


@pytest.mark.parametrize(("number", "preset"), [(3, "7b-8k"), (4, "7b-32k")])
def test_what_the_claims_need_fits_into_the_first_call(number: int, preset: str) -> None:
    """Whatever is measured after it, and even if each estimate were a tenth too low."""

    class Asked:
        rows: list[str] = []  # noqa: RUF012
        now_s = START_S

        def __call__(self, request: Any, _limit_s: float | None) -> Any:
            if request["kind"] == "origin":
                return {}
            self.rows.append(request["row"])
            job = next(job for job in all_jobs(number) if job.row.name == request["row"])
            self.now_s += 1.1 * job.estimate_s(session)
            peaks = {"activation_bytes": 10, "peak_reserved_bytes": 40, "peak_allocated_bytes": 40}
            return {"ms": PRESETS[preset].expected_ms, "status": "measured", **peaks}

    asked = Asked()
    asked.rows = []
    session = Session(Records(), asked, {"device": "d", "commit": "c"}, clock=lambda: asked.now_s)
    session.run(all_jobs(number), lambda _line: None, STAGES[number].limit_s, gpu_day.SLACK_S)
    assert asked.rows[: len(CLAIMED)] == list(CLAIMED)
    assert asked.now_s <= STAGES[number].limit_s + gpu_day.SLACK_S
    # A second call measures the rest.
    asked.now_s = START_S
    session.run(all_jobs(number), lambda _line: None, STAGES[number].limit_s, gpu_day.SLACK_S)
    assert set(asked.rows) == {job.row.name for job in all_jobs(number)}


def test_all_rows_of_the_table_are_measured_in_some_stage() -> None:
    found = {(job.workload.name, job.row.name) for number in STAGES for job in all_jobs(number)}
    names = {row.name for row in ROWS}
    assert found >= {(preset, name) for preset in ("7b-8k", "7b-32k", "8b-8k-model") for name in names}
    for number in STAGES:
        titles = [job.title for job in jobs_of(STAGES[number], H100, True)]
        assert len(set(titles)) == len(titles)


def test_budgets_follow_the_rows_that_they_are_taken_from() -> None:
    order = [(job.workload.name, job.row) for number in (3, 4, 7) for job in all_jobs(number)]
    first = {}
    for place, (workload, row) in enumerate(order):
        first.setdefault((workload, row.name), place)
    for place, (workload, row) in enumerate(order):
        if row.budget is not None:
            needs = (EAGER.name, *row.budget.needs)
            assert all(first[workload, base] < place for base in needs), (workload, row.name)


def test_the_judged_workloads_fit_an_h100_as_they_are() -> None:
    for name in ("7b-8k", "7b-32k", "8b-8k-model"):
        assert fitted(PRESETS[name], H100.memory_bytes or 0) == PRESETS[name]


def test_all_gpu_tests_run_in_some_stage(repository: Path) -> None:
    marked = re.compile(r"^(@pytest|pytestmark = .*|    pytest)\.?mark\.gpu|mark\.gpu\b", re.MULTILINE)
    files = {
        str(path.relative_to(repository))
        for path in (repository / "tests").rglob("test_*.py")
        if marked.search(path.read_text(encoding="utf-8")) and path.name != Path(__file__).name
    }
    named = {path.partition("::")[0] for tests in STAGES[2].tests for path in tests.paths}
    assert named == files
    for tests in (*STAGES[1].tests, *STAGES[2].tests):
        assert all(
            (repository / path.partition("::")[0]).is_file() for path in (*tests.paths, *tests.without)
        )


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

def test_dies_once():
    mark = Path(__file__).with_name("died")
    if not mark.exists():
        mark.touch()
        os._exit(3)

def test_dies():
    os._exit(3)

def hangs_in_here():
    time.sleep(600)

def test_hangs():
    hangs_in_here()

def test_is_the_last():
    pass
"""


def run_tests(path: Path, processes: int = 1, seconds: float = 120.0) -> list[Any]:
    day = Day(Machine("cpu", "cpu"), options("--processes", str(processes)))
    deadline_s = day.session.clock() + seconds
    suite = Suite("odd", (str(path),), processes=processes)
    return SuiteRun(suite, day.session, day.place, deadline_s).run()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tests_that_fail_hang_or_die_end_nothing(
    processes: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "test_odd.py"
    path.write_text(TESTS, encoding="utf-8")
    monkeypatch.setattr(suites, "TEST_LIMIT_S", 3.0)
    run_tests(path, processes)
    found = {name.removeprefix("test odd test_"): line for name, line in lines_in(folder).items()}
    assert {name: line["status"] for name, line in found.items()} == {
        "passes": "passed",
        "fails": "failed",
        "is_skipped": "skipped",
        "dies_once": "passed",
        "dies": "failed",
        "hangs": "timed out",
        "is_the_last": "passed",
    }
    assert found["passes"]["properties"] == {"ms": 1.5}
    assert "this is why" in found["fails"]["traceback"]
    assert found["is_skipped"]["reason"] == "Skipped: for a reason"
    assert "hangs_in_here" in found["hangs"]["traceback"]
    assert found["passes"]["device"] == "cpu"
    suite = ElementTree.parse(folder / "gpu_day_tests.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("7", "3")
    assert "this is why" in "".join(suite.itertext())
    # Nothing but what was skipped runs again: it may have become possible.
    again = run_tests(path, processes)
    assert [record.method.rpartition("::")[2] for record in again] == ["test_is_skipped"]


@pytest.mark.slow
def test_tests_end_with_the_time_of_the_stage_and_go_on_in_the_next_call(
    folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "test_slow.py"
    path.write_text(
        "import time\ndef test_one(): pass\ndef test_two(): time.sleep(0 if __import__('pathlib').Path("
        "__file__).with_name('go').exists() else 600)\n",
        encoding="utf-8",
    )
    first = run_tests(path, seconds=8.0)
    assert [record.method.rpartition("::")[2] for record in first] == ["test_one"]
    assert "the stage's time is over" in (folder / "gpu_day.log").read_text(encoding="utf-8")
    (tmp_path / "go").touch()
    second = run_tests(path)
    assert [record.method.rpartition("::")[2] for record in second] == ["test_two"]


def test_a_file_that_cannot_be_imported_is_a_failure(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "test_broken.py"
    path.write_text("import no_such_module\n", encoding="utf-8")
    run_tests(path)
    (line,) = lines_in(folder).values()
    assert (line["status"], "no_such_module" in line["traceback"]) == ("failed", True)


@pytest.fixture
def with_odd_rows(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Day], None]:
    """Let a day know the rows that go wrong, here and in its worker."""
    monkeypatch.setattr(gpu_day, "ROWS", (*ROWS, *ODD_ROWS))

    def know(day: Day) -> None:
        command = [sys.executable, "-m", "tests.benchmarks.odd_rows"]
        environment = {**day.environment, "PYTHONPATH": str(repository)}
        day.worker = day.session._ask = Worker(command, day.stderr, environment)

    return know


@pytest.mark.slow
def test_rows_that_go_wrong_do_not_end_a_stage(
    folder: Path, with_odd_rows: Callable[[Day], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "LEAST_LIMIT_S", 8.0)
    names = ("eager", "raises", "hangs", "dies", "goes on")
    monkeypatch.setitem(gpu_day.STAGES, 3, Stage("odd", 200, rows=(("7b-8k", names),)))
    day = Day(Machine("cpu", "cpu"), options())
    with_odd_rows(day)
    try:
        assert not day.run(3, day.session.clock())
    finally:
        day.worker.stop()
    found = {name.rpartition(" ")[2]: line for name, line in lines_in(folder).items()}
    assert {name: line["status"] for name, line in found.items()} == {
        "eager": "measured",
        "raises": "failed",
        "hangs": "timed out",
        "dies": "failed",
        "on": "measured",
    }
    assert found["raises"]["reason"] == "ValueError: no such thing"
    assert "in raises" in found["raises"]["traceback"]
    assert "in hangs" in found["hangs"]["traceback"]
    assert found["dies"]["traceback"].endswith("the last words\n")
    assert found["on"]["exact"] is True
    assert found["eager"]["environment"]["hardware"]
    # A second call finds all of it settled, at the same commit.
    again = Day(Machine("cpu", "cpu"), options())
    if again.session._commit is not None:
        assert again.run(3, again.session.clock())
        log = (folder / "gpu_day.log").read_text(encoding="utf-8")
        assert log.count("is in the results") == len(names)


DRY_ROWS = ("eager", "trl-offloading", "liger-checkpointing", "plain")


@pytest.mark.slow
def test_a_dry_run_goes_through_every_stage(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every stage, a few rows of each; the tests of the first two stages are those of a small file.

    Called from another folder than the checkout.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ACTSWAP_RESULTS", "results")
    path = tmp_path / "test_small.py"
    path.write_text("def test_small(): pass\n", encoding="utf-8")
    for number in (1, 2):
        small = Stage(STAGES[number].title, 60, (Suite(STAGES[number].title, (str(path),)),))
        monkeypatch.setitem(gpu_day.STAGES, number, small)
    assert gpu_day.main(["--device", "cpu", "--only", *DRY_ROWS]) == 0
    found = lines_in(folder)
    kinds = {name.partition(" ")[0] for name in found}
    assert kinds == {"test", "frontier", "out", "optimizer", "longest"}
    assert {line["workload"] for line in found.values() if line["kind"] == "frontier"} == {
        f"{preset}, tiny" for preset in ("7b-8k", "7b-32k", "8b-8k-model")
    }
    measured = [line for line in found.values() if line["status"] == "measured"]
    assert all(line["wall_s"] > 0 for line in measured)
    liger = found["frontier 8b-8k-model, tiny liger-checkpointing"]
    assert (liger["status"], "none for the CPU" in liger["reason"]) == ("skipped", True)
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) <= 8
    for file in files:
        assert re.fullmatch(r"[A-Za-z0-9._-]+", file.name)
        assert file.stat().st_size < 16 * 2**20
        assert file.parent == folder
    said = capsys.readouterr().out
    assert all(f"stage {number} took" in said for number in STAGES)
    # Called again, it measures nothing that was measured.
    assert gpu_day.main(["--device", "cpu", "--stage", "3-5", "--only", *DRY_ROWS]) == 0
    told = capsys.readouterr().out
    assert ": measured" not in told
    assert told.count("is in the results") == sum(
        line["status"] == "measured" and not line.get("longest") and line["workload"] != "8b-8k-model, tiny"
        for line in found.values()
    )


@pytest.mark.slow
def test_the_whole_dry_run(folder: Path) -> None:
    assert gpu_day.main(["--device", "cpu", "--processes", "2"]) == 0
    statuses = {line["status"] for line in lines_in(folder).values()}
    assert statuses <= {"measured", "passed", "skipped", "out of memory"}


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


@pytest.mark.parametrize("stage", ["0", "8", "4-2", "x"])
def test_there_are_seven_stages(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_day.main(["--stage", stage])
    assert "stage" in capsys.readouterr().err
