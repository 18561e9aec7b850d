"""The trainings with an optimizer run where there is no accelerator, and show what they are to show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from benchmarks import trainings
from benchmarks.measure import Bench
from benchmarks.records import Records
from benchmarks.trainings import (
    FROZEN_CASES,
    OPTIMIZER_STATES,
    OUT_OF_MEMORY,
    OUT_OF_MEMORY_CASES,
    PLAIN,
    STATES_CASES,
    Sizes,
    Training,
    TrainingJob,
    measure_states,
    train,
    training_jobs,
)

CPU = torch.device("cpu")
STATES = Sizes("tiny", 2, 2, 64, 32, 256, micro_batches=2, min_tensor_bytes=1024)
MEMORY = Sizes("tiny", 12, 4, 64, 512, 64)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_states_on_the_host_train_to_the_same_bits() -> None:
    rows = [measure_states(case, STATES, CPU) for case in STATES_CASES]
    assert len({row.parameters for row in rows}) == 1
    for case, row in zip(STATES_CASES, rows, strict=True):
        assert (row.step_ms or 0) > (row.optimizer_ms or 0) > 0
        assert row.state_bytes > 0
        if case.resident is None:
            assert row.freed_share == 0.0
        else:
            assert row.moved_bytes >= 1.8 * row.state_bytes
            assert min(row.stall_ms, row.pinning_ms) > 0
            assert row.freed_share >= 0.9
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_out_of_memory_is_survived_where_it_can_be() -> None:
    plain = train(OUT_OF_MEMORY_CASES[0], MEMORY, None, CPU)
    others = (train(case, MEMORY, plain.peak_bytes, CPU) for case in OUT_OF_MEMORY_CASES[1:])
    without, planned, hopeless = others
    assert planned.losses == plain.losses
    assert planned.evicted_bytes > 0 == plain.evicted_bytes
    assert (without.losses, planned.phases[-1]) == ([], "stable")
    assert planned.peak_bytes <= (planned.limit_bytes or 0)
    assert "the least budget that would do" in hopeless.error.lower()


def test_each_training_begins_without_the_cache_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the allocator holds already is given out beyond any limit: nothing would run out."""
    done: list[str] = []
    monkeypatch.setattr(trainings, "give_back_cached_memory", lambda _device: done.append("cleaned"))
    monkeypatch.setattr(trainings, "_train", lambda *_: done.append("trained"))
    for case in OUT_OF_MEMORY_CASES[:2]:
        train(case, MEMORY, 100, CPU)
    assert done == ["cleaned", "trained"] * 2


def test_frozen_weights_on_the_host_train_to_the_same_losses() -> None:
    sizes = Sizes("tiny", 3, 3, 64, 32, 256)
    host, plain = (train(case, sizes, None, CPU) for case in FROZEN_CASES[:2])
    assert (host.error, plain.error) == ("", "")
    assert host.losses == plain.losses
    assert len(set(host.losses)) == 3, "adapters learn"
    case = next(case for case in FROZEN_CASES if case.weights == "FSDP2")
    peer = train(case, sizes, None, CPU)
    assert (peer.error, peer.losses) == ("", host.losses)


def test_a_limit_is_a_share_of_what_plain_needed() -> None:
    jobs = {job.case.method: job for job in training_jobs(OUT_OF_MEMORY, MEMORY)}
    records = Records()
    reason = "what plain needs was not measured"
    planned = jobs["planned at 0.6"]
    assert planned.request(records) == reason
    about: dict[str, Any] = {"kind": OUT_OF_MEMORY, "workload": MEMORY.name, "peak_bytes": 100}
    records.put(Training(PLAIN, error="OutOfMemoryError: all of it", **about))
    assert planned.request(records) == reason
    records.put(Training(PLAIN, **about))
    request: Any = planned.request(records)
    assert request.args == (planned.case, MEMORY, 100)
    other = TrainingJob(planned.case, replace(MEMORY, name="other"))
    assert other.request(records) == reason


def test_a_request_is_answered_by_its_record() -> None:
    job = training_jobs(OPTIMIZER_STATES, STATES)[0]
    request: Any = job.request(Records())
    line = asdict(request(Bench(CPU)))
    assert (line["method"], line["kind"], line["workload"]) == (PLAIN, OPTIMIZER_STATES, "tiny")
    assert job.is_same(line)
    assert not TrainingJob(job.case, replace(STATES, layers=3)).is_same(line)
