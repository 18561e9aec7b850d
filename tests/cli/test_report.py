"""``report`` on a folder that a training has left."""

from __future__ import annotations

from pathlib import Path

from tests.report.recorded_runs import write_lines

from .conftest import Run


def recorded(folder: Path) -> Path:
    stats = {"offloaded_bytes": 4096, "stall_ms": 2.0, "host_peak_bytes": 8192, "rejected": {}}
    lines = [{"step": n, "phase": "", "steps": 1, "step_ms": 12.5, "stats": stats} for n in range(1, 5)]
    write_lines(folder, lines)
    return folder


def test_the_page_is_written_and_its_numbers_shown(run: Run, tmp_path: Path) -> None:
    ended = run("report", recorded(tmp_path / "run"))
    assert ended.code == 0
    assert (tmp_path / "run" / "actswap" / "report.html").is_file()
    for shown in ("4.00 KiB", "12.5 ms", "2.00 ms", "Written:"):
        assert shown in ended.out


def test_one_document_for_scripts(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = run("report", recorded(tmp_path / "run"), "--out", page, "--json").document
    assert found["ok"] is True
    assert found["page"] == str(page)
    assert page.is_file()
    assert (found["steps"], found["step_ms"], found["offloaded_bytes"]) == (4, 12.5, 4096)


def test_a_run_without_a_step(run: Run, tmp_path: Path) -> None:
    write_lines(tmp_path / "run", [])
    ended = run("report", tmp_path / "run")
    assert ended.code == 0
    text = " ".join(ended.out.split())
    assert "No step is recorded: the training ended before it logged anything" in text
    assert "waits a step" not in text
    assert "No step is recorded" in (tmp_path / "run" / "actswap" / "report.html").read_text()


def test_a_folder_without_a_record(run: Run, tmp_path: Path) -> None:
    ended = run("report", tmp_path, "--json")
    assert ended.code == 1
    (problem,) = ended.document["problems"]
    assert problem["expected"] == "actswap/run.json, which a training leaves there"


def test_a_page_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    for place in ("/dev/full", tmp_path):
        ended = run("report", recorded(tmp_path / "run" / Path(place).name), "--out", place)
        assert ended.code == 2
        assert str(place) in ended.err
