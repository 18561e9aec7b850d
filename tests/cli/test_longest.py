"""``plan --longest``: how the length is looked for; what it says fits, and is what `plan` predicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_actswap.cli.longest import UNIT_TOKENS, longest_of

from .conftest import Run

K = UNIT_TOKENS
GIB = 2**30


@pytest.mark.parametrize("limit", [K, 3 * K + 7, 64 * K, 200 * K + 1, 1_300_000])
def test_a_line_is_met_and_what_is_found_fits(limit: int) -> None:
    def over_bytes(tokens: int) -> int:
        return 5 * (tokens - limit)

    assert longest_of(over_bytes) == limit // K * K


@pytest.mark.parametrize(
    "peak",
    [lambda t: max(7 * t, 11 * t - 400 * K), lambda t: 6 * t + t // 8 % 999, lambda t: max(2000 * K, 9 * t)],
    ids=["a corner", "noise", "level at first"],
)
def test_what_is_found_fits_and_little_more_would(peak: Callable[[int], int]) -> None:
    limit, asked = 3000 * K, []

    def over_bytes(tokens: int) -> int:
        asked.append(tokens)
        return peak(tokens) - limit

    found = longest_of(over_bytes)
    assert peak(found) <= limit < peak(round(found * 1.02) + K)
    assert len(asked) <= 9


def test_nothing_fits() -> None:
    assert longest_of(lambda tokens: tokens + 1) == 0


def test_the_longest_fits_and_is_the_step_that_plan_predicts(run: Run, tiny: Path, tmp_path: Path) -> None:
    options = ("--device", "H100", "--optimizer", "sgd", "--json")
    asked = ("--longest", "--budget", "24MiB", "--host-memory-gib", "1")
    found = run("plan", tiny, *asked, *options).document
    assert found["ok"]
    longest = found["longest"]
    tiled, swapped, checkpointed = longest.values()
    assert tiled["tokens"] > swapped["tokens"] > checkpointed["tokens"] > 0
    assert all(item["peak_bytes"] <= found["budget_bytes"] == 24 * 2**20 for item in longest.values())
    assert checkpointed["host_bytes"] == 0 < swapped["host_bytes"]
    # The layers' inputs: four hidden states of bf16, and that of the norm after them is none of them.
    assert tiled["host_bytes"] == 4 * tiled["tokens"] * 32 * 2
    config = tmp_path / "longest.yaml"
    config.write_text(found["config"])
    step = run("plan", tiny, config, "--seq", str(tiled["tokens"]), *options).document
    assert step["predicted"]["as written"]["peak_bytes"] == tiled["peak_bytes"]


def test_host_memory_limits_it(run: Run, tiny: Path) -> None:
    options = ("--longest", "--device", "H100", "--optimizer", "sgd", "--budget", "24MiB", "--json")
    found = run("plan", tiny, *options, "--host-memory-gib", "0.002").document["longest"]
    limit = int(0.002 * GIB)
    longest = found["inputs swapped"]["tokens"]
    assert found["inputs swapped"]["host_bytes"] <= limit < 4 * (longest + K) * 32 * 2


def test_what_it_does_not_go_with(run: Run, tiny: Path) -> None:
    for more in (("--seq", "4k"), ("--batch", "2"), ("--full",), ("--compare", "tp=1,2")):
        ended = run("plan", tiny, "--longest", *more)
        assert ended.code == 2
        assert "--longest" in ended.err
    assert run("plan", tiny, "--host-memory-gib", "3").code == 2
