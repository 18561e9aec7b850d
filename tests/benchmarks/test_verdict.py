"""The verdict on made-up results: passing, failing, missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import verdict
from benchmarks.verdict import judge_planner
from tests.benchmarks.made_up_rows import GIB, Row, measured


def row(method: str, seq: int, ms: float, activation_gib: float, swapped_gib: float = 0.0) -> Row:
    found = measured(method, seq, ms, activation_gib)
    return {
        **found,
        "peak_reserved_bytes": int(1.05 * found["peak_allocated_bytes"]),
        "swapped_bytes": int(swapped_gib * GIB),
        "first_step_ms": 2.5 * ms + (30_000 if "compiled" in method else 0),
        "first_step_compile_ms": 30_000 if "compiled" in method else 0,
        "step_ms": [2.5 * ms, 1.5 * ms, *[ms * (1 + 0.002 * number) for number in range(13)]],
    }


def passing() -> list[Row]:
    return [
        row("eager", 8192, 390, 23.6),
        row("trl-offloading", 8192, 970, 8.1),
        row("actswap-default-auto", 8192, 395, 22.7, 0.95),
        row("actswap-case3-auto", 8192, 398, 20.9, 2.9),
        row("actswap-everything-20", 8192, 900, 7.0, 23),
        row("hf-checkpointing", 8192, 502, 2.8),
        row("actswap-elementwise-fused", 8192, 403, 12.9),
        row("actswap-mix-eager", 8192, 460, 2.7, 6),
        row("actswap-compiled-lean-mix", 8192, 380, 2.8, 5),
        row("actswap-compiled-mix", 8192, 350, 3.5, 5),  # faster, and above checkpointing's peak
        row("compiled", 8192, 330, 16.9),
        row("actswap-compiled-auto", 8192, 334, 12.5, 5),
        row("eager", 32768, 840, 37.4),
        row("actswap-default-auto", 32768, 850, 36.0, 1.5),
        row("actswap-case3-auto", 32768, 860, 33.0, 4.6),
        row("compiled", 32768, 740, 27.4),
        row("actswap-compiled-auto", 32768, 750, 18.9, 9),
        row("hf-checkpointing", 32768, 1060, 8.8),
        row("actswap-mix-eager", 32768, 970, 8.8, 9),
        row("actswap-compiled-mix", 32768, 880, 8.7, 9),
    ]


def verdicts(rows: list[Row]) -> dict[str, str]:
    findings = verdict.judge(rows)
    found = {finding.claim: finding.verdict for finding in findings}
    assert len(found) == len(findings)
    return found


def run(tmp_path: Path, rows: Any) -> int:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return verdict.main([str(path)])


def test_good_results_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = verdicts(passing())
    assert len(found) == 32
    not_measured = {claim for claim, outcome in found.items() if outcome != "pass"}
    assert not_measured == {
        "4 32k: actswap-everything-20, time over trl-offloading",
        "4 32k: actswap-everything-20, peak over trl-offloading",
    }
    assert run(tmp_path, passing()) == 0
    printed = capsys.readouterr().out
    assert "FAIL" not in printed
    assert printed.count("not measured") == 2 + len(judge_planner([[]], verdict.SHAPES))
    assert "no row actswap-everything-20" in printed


def changed(rows: list[Row], method: str, seq: int, **values: Any) -> list[Row]:
    return [{**row, **values} if (row["method"], row["seq"]) == (method, seq) else row for row in rows]


def slow_step(ms: float) -> list[float]:
    return [ms] * 8 + [1.04 * ms] + [ms] * 6


@pytest.mark.parametrize(
    ("method", "seq", "values", "claim"),
    [
        ("actswap-compiled-auto", 8192, {"ms": 337.0}, "1 8k: actswap-compiled-auto, time over compiled"),
        (
            "actswap-compiled-auto",
            8192,
            {"activation_bytes": int(12.8 * GIB)},
            "1 8k: actswap-compiled-auto, fall of the peak",
        ),
        (
            "actswap-compiled-auto",
            32768,
            {"activation_bytes": int(19.5 * GIB)},  # 28.8 %: enough at 8k, not here
            "1 32k: actswap-compiled-auto, fall of the peak",
        ),
        ("actswap-default-auto", 8192, {"ms": 402.0}, "2 8k: actswap-default-auto, time over eager"),
        (
            "actswap-case3-auto",
            32768,
            {"activation_bytes": int(33.4 * GIB)},
            "2 32k: actswap-case3-auto, fall of the peak over bytes swapped",
        ),
        (
            "actswap-default-auto",
            8192,
            {"swapped_bytes": 0},
            "2 8k: actswap-default-auto, fall of the peak over bytes swapped",
        ),
        (
            "actswap-case3-auto",
            8192,
            {"peak_reserved_bytes": 40 * GIB},
            "3 8k: peak reserved over allocated, worst of ours",
        ),
        (
            "actswap-case3-auto",
            8192,
            {"step_ms": slow_step(398.0)},
            "3 8k: spread of steps 3 and later, worst of ours",
        ),
        (
            "actswap-compiled-auto",
            32768,
            {"first_step_ms": 32_300.0},
            "3 32k: first step over median, compilation deducted, worst of ours",
        ),
        (
            "actswap-everything-20",
            8192,
            {"ms": 971.0},
            "4 8k: actswap-everything-20, time over trl-offloading",
        ),
        (
            "actswap-everything-20",
            8192,
            {"activation_bytes": int(8.1 * GIB)},
            "4 8k: actswap-everything-20, peak over trl-offloading",
        ),
        (
            "actswap-elementwise-fused",
            8192,
            {"activation_bytes": int(13.1 * GIB)},
            "5 8k: actswap-elementwise-fused, peak over eager",
        ),
        (
            "actswap-elementwise-fused",
            8192,
            {"ms": 406.0},
            "5 8k: actswap-elementwise-fused, time over eager",
        ),
        (
            "actswap-mix-eager",
            8192,
            {"activation_bytes": int(2.81 * GIB)},
            "6 8k: actswap-mix-eager, peak over hf-checkpointing",
        ),
        ("actswap-mix-eager", 32768, {"ms": 982.0}, "6 32k: actswap-mix-eager, speed over hf-checkpointing"),
        (
            "actswap-compiled-lean-mix",
            8192,
            {"ms": 387.0},
            "7 8k: the best compiled mix, speed over hf-checkpointing",
        ),
        (
            "actswap-compiled-mix",
            32768,
            {"activation_bytes": int(8.9 * GIB)},
            "7 32k: the best compiled mix, peak over hf-checkpointing",
        ),
        (
            "actswap-compiled-mix",
            32768,
            {"ms": 884.0},
            "7 32k: the best compiled mix, speed over hf-checkpointing",
        ),
    ],
)
def test_each_bound_can_fail(
    tmp_path: Path, method: str, seq: int, values: dict[str, Any], claim: str
) -> None:
    rows = changed(passing(), method, seq, **values)
    assert [name for name, outcome in verdicts(rows).items() if outcome == "FAIL"] == [claim]
    assert run(tmp_path, rows) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda row: {**row, "device": "cpu"},
        lambda row: {**row, "layers": row["layers"] // 2},
        lambda row: {**row, "head": True},
        lambda row: {**row, "longest": True},
    ],
    ids=["cpu", "fewer layers", "whole model", "search for the longest"],
)
def test_other_workloads_are_not_judged(tmp_path: Path, change: Callable[[Row], Row]) -> None:
    rows = [change(row) for row in passing()]
    assert set(verdicts(rows).values()) == {"not measured"}
    assert run(tmp_path, rows) == 0


def test_row_out_of_memory_is_not_measured_and_says_so() -> None:
    nothing = {"ms": None, "activation_bytes": None, "swapped_bytes": None, "status": "out of memory"}
    rows = changed(passing(), "actswap-default-auto", 32768, **nothing)
    findings = [item for item in verdict.judge(rows) if item.claim.startswith("2 32k: actswap-default-auto")]
    assert [(item.verdict, item.remark) for item in findings] == [
        ("not measured", "actswap-default-auto: out of memory")
    ] * 2


def test_the_fastest_compiled_mix_at_the_peak_of_checkpointing_is_the_one_that_is_judged() -> None:
    findings = [item for item in verdict.judge(passing()) if item.claim.startswith("7 8k")]
    assert [item.remark for item in findings] == ["actswap-compiled-lean-mix"] * 2
    assert findings[1].measured == pytest.approx(502 / 380)
    without = [row for row in passing() if "mix" not in row["method"]]
    findings = [item for item in verdict.judge(without) if item.claim.startswith("7 8k")]
    assert [(item.verdict, item.remark) for item in findings] == [
        ("not measured", "no row actswap-compiled-mix")
    ] * 2


def test_first_steps_of_peers_are_not_our_fault() -> None:
    rows = changed(passing(), "eager", 8192, first_step_ms=10_000.0, step_ms=slow_step(390.0))
    assert "FAIL" not in verdicts(rows).values()


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such file: "), ("{}", "is not a list of rows, as frontier.py writes")]
)
def test_unusable_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(SystemExit) as exit_info:
        verdict.main([str(path)])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
