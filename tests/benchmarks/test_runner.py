"""Jobs are measured once, each result is kept at once, and nothing that fails or hangs ends the run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.methods import nothing
from benchmarks.records import Records, Result, commit, file_name, key_of, results_folder
from benchmarks.rows import EAGER, ROWS, Row
from benchmarks.runner import (
    COMPILE_AGAIN_S,
    COMPILE_S,
    LEAST_LIMIT_S,
    FrontierJob,
    Line,
    MeasureError,
    Session,
    Worker,
    again_asked,
    frontier_jobs,
    longest_jobs,
    origin_of,
)
from benchmarks.workloads import PRESETS, Workload
from hf_actswap.rehearsal.launch import SETTINGS
from tests.benchmarks.odd_rows import answer_number, measured

TINY = replace(PRESETS["cpu"], layers=1, tokens=8, steps=1, warmup_steps=1, expected_ms=1000.0)
ABOUT = {"device": "d", "commit": "one"}
ROW = {row.name: row for row in ROWS}
ONE, TWO, THREE = (Row(name, nothing) for name in ("one", "two", "three"))


class Asked:
    """Stands for what measures: every row takes ``seconds``, unless the test says otherwise."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds, self.now_s = seconds, 100.0
        self.rows: list[str] = []
        self.limits: dict[str, float | None] = {}
        self.configs: dict[str, Any] = {}
        self.fails: dict[str, MeasureError] = {}
        self.answers: dict[str, Line] = {}
        self.full_at_tokens = 2**20

    def __call__(self, request: Any, limit_s: float | None) -> Any:
        if request is origin_of:
            return {"torch": "2.x", "device": "another name", "environment": {"link": 1}}
        name = request.keywords["name"]
        self.rows.append(name)
        self.limits[name], self.configs[name] = limit_s, request.keywords["config"]
        self.now_s += self.seconds
        if name in self.fails:
            raise self.fails[name]
        fits = request.keywords["workload"].tokens < self.full_at_tokens
        status = "measured" if fits else "out of memory"
        return measured(request, **{"ms": 1000.0, "status": status, **self.answers.get(name, {})})


def session_with(path: Path | None, asked: Asked, about: dict[str, Any] = ABOUT, **settings: Any) -> Session:
    return Session(Records(path), asked, about, clock=lambda: asked.now_s, **settings)


def jobs(*rows: Row, workload: Workload = TINY) -> list[FrontierJob]:
    return frontier_jobs([workload], rows)


def run(session: Session, found: Sequence[FrontierJob], deadline_s: float | None = None) -> list[str]:
    said: list[str] = []
    session.run(found, said.append, deadline_s, slack_s=10.0)
    return said


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "rows.json"


def lines(path: Path) -> dict[str, Line]:
    found: list[Line] = json.loads(path.read_text(encoding="utf-8"))
    assert len(found) == len({line["method"] for line in found})
    return {line["method"]: line for line in found}


def test_what_is_recorded_is_not_measured_again_but_on_another_device(path: Path) -> None:
    assert len(run(session_with(path, Asked()), jobs(ONE, TWO))) == 2
    again = Asked()
    said = run(session_with(path, again, {**ABOUT, "commit": "two"}), jobs(ONE, TWO, THREE))
    assert again.rows == ["three"]
    assert said[:2] == ["cpu one: is in the results", "cpu two: is in the results"]
    found = lines(path)
    assert [found[name]["commit"] for name in ("one", "two", "three")] == ["one", "one", "two"]
    assert (found["one"]["device"], found["one"]["environment"]) == ("d", {"link": 1})
    assert found["three"]["run"]
    again = Asked()
    run(session_with(path, again, {**ABOUT, "device": "another"}), jobs(TWO))
    assert again.rows == ["two"]


@pytest.mark.parametrize(
    ("again", "rows", "expected"),
    [
        (["two"], (ONE, TWO, THREE), ["two"]),
        ([], (ONE, TWO), ["one", "two"]),
        (None, (replace(ONE, config={"a": 1}), TWO), ["one"]),
    ],
)
def test_rows_are_measured_again_on_request_and_where_they_have_changed(
    again: Sequence[str] | None, rows: Sequence[Row], expected: list[str], path: Path
) -> None:
    run(session_with(path, Asked()), jobs(ONE, TWO, THREE))
    asked = Asked()
    asked.answers = {row.name: {"config": row.config} for row in rows}
    session = session_with(path, asked, again=again_asked(again))
    for _ in range(2):  # once in a run
        run(session, jobs(*rows))
        assert asked.rows == expected


@pytest.mark.parametrize("status", ["failed", "timed out"])
def test_a_failure_is_recorded_and_tried_again_where_it_may_have_been_mended(path: Path, status: Any) -> None:
    asked = Asked()
    asked.fails["one"] = MeasureError(status, "it broke", "Traceback ...")
    said = run(session_with(path, asked), jobs(ONE, TWO))
    assert asked.rows == ["one", "two"]
    assert said[0].startswith(f"cpu one: {status}, it broke, 1.0 s")
    found = [lines(path)["one"][name] for name in ("status", "reason", "traceback")]
    assert found == [status, "it broke", "Traceback ..."]
    assert lines(path)["two"]["ms"] == 1000.0
    for commit_id, expected in (("one", []), ("two" if status == "failed" else None, ["one"])):
        asked = Asked()
        run(session_with(path, asked, {**ABOUT, "commit": commit_id}), jobs(ONE, TWO))
        assert asked.rows == expected
    assert lines(path)["one"]["status"] == "measured"


def test_what_does_not_fit_into_the_time_is_left_out_and_measured_in_the_next_call(path: Path) -> None:
    asked = Asked(seconds=4.0)
    long = replace(TINY, steps=100)
    found = [*jobs(ONE), *jobs(TWO, workload=replace(long, name="long")), *jobs(THREE)]
    estimate_s = found[0].estimate_s(session_with(None, asked))
    assert estimate_s == pytest.approx(3.5)
    run(session_with(path, asked), found, asked.now_s + 10.0)
    assert asked.rows == ["one", "three"]
    left_out = lines(path)["two"]
    assert left_out["status"] == "left out"
    assert left_out["reason"] == "takes about 102 s, and 6 s were left"
    again = Asked()
    run(session_with(path, again), found)
    assert again.rows == ["two"]
    # It does not replace what was measured.
    run(session_with(path, again, again=again_asked([])), found, again.now_s)
    assert lines(path)["two"]["status"] == "measured"


def test_each_row_has_a_limit_and_no_row_outlasts_the_stage(path: Path) -> None:
    asked = Asked(seconds=30.0)
    long = replace(TINY, name="long", steps=100)
    session = session_with(path, asked)
    run(session, [*jobs(ONE), *jobs(TWO, workload=long)])
    assert asked.limits == {
        "one": pytest.approx(LEAST_LIMIT_S + 3 * 3.5),
        "two": pytest.approx(LEAST_LIMIT_S + 3 * 102.5),
    }
    asked.fails["three"] = MeasureError("timed out", "no answer after 35 s", "stacks")
    run(session, jobs(THREE), asked.now_s + 25.0)
    assert asked.limits["three"] == 35.0
    # The row itself did nothing wrong: it is measured in the next call.
    assert lines(path)["three"]["status"] == "left out"
    assert lines(path)["three"]["reason"] == "the time of the run was over"


def test_budgets_are_taken_from_what_is_recorded(path: Path) -> None:
    planned = ROW["actswap_plan_checkpointing"]
    asked = Asked()
    said = run(session_with(path, asked), jobs(planned))
    assert asked.rows == []
    assert said[0].startswith("cpu actswap_plan_checkpointing: skipped, its budget is the peak of hf-check")
    peaks = {"activation_bytes": 10, "peak_allocated_bytes": 30, "peak_reserved_bytes": 40}
    asked.answers = {"eager": peaks, "hf-checkpointing": {**peaks, "peak_reserved_bytes": 25}}
    run(session_with(path, asked), jobs(EAGER, ROW["hf-checkpointing"]))
    asked.answers = {}
    other = replace(TINY, name="another workload")
    run(session_with(path, asked), [*jobs(planned), *jobs(planned, workload=other)])
    assert asked.configs[planned.name]["budget_bytes"] == 25
    assert asked.rows.count(planned.name) == 1  # nothing is known of the other workload


def test_ratios_are_to_the_eager_row_of_the_file(path: Path) -> None:
    asked = Asked()
    asked.answers["one"] = {"ms": 1500.0}
    for row in (EAGER, ONE):
        run(session_with(path, asked), jobs(row))
    assert lines(path)["one"]["ratios"] == {"ms": 1.5}


def test_the_first_row_of_a_compile_group_pays_for_the_compilation() -> None:
    session = session_with(None, Asked())
    first, again = jobs(ROW["compiled"], ROW["actswap-compiled-auto"])
    steps_s = 3.5 * first.row.relative_time
    assert first.estimate_s(session) == pytest.approx(COMPILE_S + steps_s)
    run(session, [first])
    assert first.estimate_s(session) == pytest.approx(COMPILE_AGAIN_S + steps_s)
    assert again.estimate_s(session) < COMPILE_S
    (planned,) = jobs(ROW["actswap_plan_compiled_half"])
    assert planned.estimate_s(session) > 4 * COMPILE_AGAIN_S + COMPILE_S  # each trial compiles


def test_a_search_for_the_longest_ends_where_one_does_not_fit(path: Path) -> None:
    found = longest_jobs(TINY, [ONE, TWO], 32)
    assert [job.workload.tokens for job in found] == [8, 8, 16, 16, 32, 32]

    asked = Asked()
    asked.full_at_tokens = 16
    said = run(session_with(path, asked), found)
    assert asked.rows == ["one", "two", "one", "two"]
    assert said[4].startswith("cpu one at 32 tokens: skipped, 16 tokens were too many")
    assert session_with(path, asked).is_settled(found[2])


def test_long_sequences_are_estimated_by_their_flop() -> None:
    """Of 8 layers of an 8B and its head, attention has an eighth at 8k tokens and two thirds at 128k."""
    row = ROW["actswap-tiled-step"]
    found = longest_jobs(PRESETS["8b-8k-model"], [ONE, row], 2**17, first_tokens=2**15)
    assert [(job.workload.tokens, job.row.name, job.workload.warmup_steps) for job in found] == [
        (tokens, name, 1 if tokens == 2**17 else 3)
        for tokens in (2**15, 2**16, 2**17)
        for name in ("one", row.name)
    ]
    asked = Asked()
    session = session_with(None, asked)
    last = found[-1]
    assert 50 < last.estimate_s(session) < 90
    # What was measured at half the length is what the next estimate is made from.
    asked.answers = {row.name: {"ms": 2000.0}}
    before_s = last.estimate_s(session)
    run(session, [found[1], found[3]])
    assert last.estimate_s(session) < before_s / 2


def test_lines_of_different_shapes_are_different_things(path: Path) -> None:
    one = Result("a", False, "m", 1, 1, 1, False, device="d")
    results = [one, replace(one, seq=2), replace(one, device="e"), replace(one, longest=True)]
    records = Records(path)
    for result in results:
        records.put(result)
        records.put(replace(result, ms=1.0))
    assert [line["ms"] for line in Records(path)] == [1.0] * 4
    assert len({key_of(asdict(result)) for result in results}) == 4


@pytest.mark.slow
def test_a_worker_answers_until_it_cannot_be_trusted(tmp_path: Path) -> None:
    """Where it hangs or dies: `test_gpu_day.test_rows_that_go_wrong_do_not_end_a_stage`."""
    worker = Worker("cpu", tmp_path / "output.txt", {"A": "b"}, answer_number)
    try:
        first = worker("good", 30)  # type: ignore[arg-type]
        assert worker("good", 30) == worker("bad", 30) == first  # type: ignore[arg-type]
        assert not Path(f"/proc/{first}").exists()
        assert worker("good", 30) != first  # type: ignore[arg-type]
    finally:
        worker.stop()


def test_the_commit_is_what_git_says_or_else_the_environment(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ACTSWAP_COMMIT", "told")
    assert commit(tmp_path) == {"id": "told", "dirty": None}
    # A copy without .git in somebody else's checkout, whose commit it has not.
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=False)
    copy = tmp_path / "copy"
    copy.mkdir()
    assert commit(copy) == {"id": "told", "dirty": None}
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=False
    )
    if head.returncode == 0:
        assert commit(repository)["id"] == head.stdout.strip()
    monkeypatch.delenv("HF_ACTSWAP_COMMIT")
    assert commit(tmp_path)["id"] is None


def test_a_fresh_machine_goes_on_from_what_was_fetched(path: Path) -> None:
    """Also where it has measured something already; what had no time there replaces nothing."""
    fetched = path.with_name("fetched.json")
    run(session_with(fetched, Asked()), jobs(ONE, TWO))
    asked = Asked()
    run(session_with(path, asked), jobs(ONE), deadline_s=asked.now_s)
    run(session_with(path, Asked()), jobs(THREE))
    asked = Asked()
    run(Session(Records(path, fetched), asked, ABOUT), jobs(ONE, TWO, THREE))
    assert asked.rows == []
    found = {line["method"]: line["status"] for line in Records(path, fetched)}
    assert found == dict.fromkeys(("one", "two", "three"), "measured")


def test_a_device_that_does_not_answer_fails_the_row_and_is_asked_again(path: Path) -> None:
    asked = Asked()
    broken = [MeasureError("failed", "no such device", "Traceback ...")]

    def ask(request: Any, limit_s: float | None) -> Any:
        if broken and request is origin_of:
            raise broken.pop()
        return asked(request, limit_s)

    run(Session(Records(path), ask, ABOUT), jobs(ONE, TWO))
    assert [(line["status"], line["reason"]) for line in lines(path).values()] == [
        ("failed", "no such device"),
        ("measured", ""),
    ]


def test_the_folder_of_the_results(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_ACTSWAP_RESULTS", raising=False)
    monkeypatch.delenv(SETTINGS, raising=False)
    assert results_folder() == repository / "benchmarks" / "results"
    monkeypatch.setenv(SETTINGS, "name=NVIDIA H100 80GB HBM3")
    assert results_folder() == repository / "benchmarks" / "results" / "rehearsed"
    monkeypatch.setenv("HF_ACTSWAP_RESULTS", str(tmp_path))
    assert results_folder() == tmp_path
    assert file_name("NVIDIA H100 80GB HBM3 (ä)") == "nvidia-h100-80gb-hbm3"
