"""A run keeps to its minutes, and what the claims need goes first."""

from __future__ import annotations

from benchmarks.frontier import ACCELERATOR_MINUTES
from benchmarks.frontier_minutes import COMPILE_AGAIN_S, COMPILE_S, Minutes, affordable, jobs_of
from benchmarks.rows import ROWS
from benchmarks.workloads import DEFAULT_PRESETS, PRESETS

WORKLOADS = [PRESETS[name] for name in DEFAULT_PRESETS["accelerator"]]
JOBS = jobs_of(WORKLOADS, ROWS)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_first_row_of_a_compile_group_pays_for_the_compilation() -> None:
    of_8k = {job.row.name: job for job in JOBS if job.workload.name == "7b-8k"}
    first, again = of_8k["compiled"], of_8k["actswap-compiled-auto"]
    assert (first.opens_group, again.opens_group, of_8k["eager"].opens_group) == (True, False, False)
    assert first.estimate_s() > COMPILE_S > COMPILE_AGAIN_S
    opening = [job.row.name for job in JOBS if job.opens_group and job.workload.name == "7b-32k"]
    assert opening == [
        "actswap-elementwise-fused",
        "compiled",
        "compiled-budget-0.5",
        "compiled-checkpointing",
        "compiled-budget-0.2",
        "actswap-compiled-mix",
        "actswap-compiled-lean-mix",
    ]


def test_the_default_minutes_hold_all_that_the_claims_need() -> None:
    most_s = (ACCELERATOR_MINUTES - 0.5) * 60  # half a minute goes to the start
    chosen = affordable(JOBS, most_s)
    assert sum(job.estimate_s() for job in chosen) <= most_s
    needed = [job for job in JOBS if job.workload.name in job.row.needed_at]
    names = {(job.workload.name, job.row.name) for job in needed}
    assert names >= {
        (at, name) for at in ("7b-8k", "7b-32k") for name in ("hf-checkpointing", "actswap-compiled-mix")
    }
    assert names >= {("7b-8k", "actswap-elementwise-fused"), ("7b-8k", "actswap-mix-eager")}
    assert len(needed) >= 16
    assert set(needed) <= set(chosen)
    assert {job.workload.name for job in chosen if job.row.name == "eager"} == {w.name for w in WORKLOADS}


def test_what_matters_least_is_left_out_first() -> None:
    minutes = ACCELERATOR_MINUTES - 0.5
    most = affordable(JOBS, minutes * 60)
    left_out = [job for job in JOBS if job not in most]
    cheapest = min(job.estimate_s() for job in left_out)
    spare = minutes * 60 - sum(job.estimate_s() for job in most)
    assert spare < cheapest
    assert all(job.urgency > 1 for job in left_out)
    assert affordable(JOBS, float("inf")) == JOBS


def test_no_minutes_leave_nothing_out() -> None:
    minutes = Minutes(None)
    assert [minutes.why_not(job, JOBS[number:]) for number, job in enumerate(JOBS)] == [""] * len(JOBS)


def test_time_that_passes_leaves_less_for_the_rest() -> None:
    clock = Clock()
    minutes = Minutes(10.0, clock)
    save_on_cpu = next(job for job in JOBS if job.row.name == "save-on-cpu")
    assert minutes.why_not(save_on_cpu, [save_on_cpu]) == ""
    clock.now_s += 9.5 * 60
    assert minutes.remaining_s() == 30
    assert minutes.why_not(save_on_cpu, [save_on_cpu]) == (
        f"left out: about {save_on_cpu.estimate_s():.0f} s, and the 10 minutes of the run go to rows "
        "that matter more"
    )


def test_a_slow_machine_is_noticed_at_eager() -> None:
    minutes = Minutes(1.0, Clock())
    checkpointing = next(job for job in JOBS if job.row.name == "hf-checkpointing")
    assert minutes.why_not(checkpointing, [checkpointing]) == ""
    minutes.eager_took(checkpointing.workload, 10 * checkpointing.workload.expected_ms)
    assert minutes.why_not(checkpointing, [checkpointing])
