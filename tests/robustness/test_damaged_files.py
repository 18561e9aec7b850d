"""Damaged documents of every kind: whoever reads one gets its values, or the one named error of its kind."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from hf_actswap.cli.profile_file import ProfileError, read_profile
from hf_actswap.engine import Link
from hf_actswap.errors import ActSwapError, PlanError
from hf_actswap.integrations.parallel_checkpoint import LAYOUT_FILE, Layout, random_states_by_data_rank
from hf_actswap.integrations.parallel_limits import ParallelTrainingError
from hf_actswap.plan import Adjustment, MemoryPlan, PlanRow, Windows, load_plan
from hf_actswap.plan.actions import COMPILE_BUDGET
from hf_actswap.planner import FrontierPoint, profile_from_json, profile_to_json
from hf_actswap.planner.plan_file import MadeFor, read_plan, write_plan
from hf_actswap.report.run_facts import prediction_of, run_facts
from hf_actswap.report.run_files import ReportError, read_run
from hf_actswap.report.write_report import write_report
from tests.engine.tiny_models import tiny_llama
from tests.planner.recorded_steps import MODELS, recorded
from tests.report.recorded_runs import train_recorded

SLOWEST_S = 10.0
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**63, -(2**63), 10**30, 1.5, -0.5, 1e308, -1e308),
    *(float("nan"), float("inf"), "", "x", "swap", "keep", "\ud800", "\x00", "a" * 3000, "<b>", "0", "mlp"),
    *([], [[]], [1], ["x"], [None], {}, {"x": 1}, {"scope": 0}, [0, "", "keep"], [[[[[[]]]]]], {"": {}}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(document: Any, dice: random.Random) -> Any:
    """A document with one thing in it that is another; ``document`` itself is changed."""
    path = dice.choice(list(places(document))[1:])
    holder = document
    for step in path[:-1]:
        holder = holder[step]
    what = dice.randrange(10)
    if what == 0:
        del holder[path[-1]]
    elif what == 1 and isinstance(holder, dict):
        holder["strange"] = holder.pop(path[-1])
    elif what == 1:
        holder.append(holder[path[-1]])
    elif what == 2:
        other = dice.choice(list(places(document)))
        value = document
        for step in other:
            value = value[step]
        holder[path[-1]] = json.loads(json.dumps(value))
    else:
        holder[path[-1]] = dice.choice(JUNK)
    return document


def damaged(text: str, dice: random.Random) -> str:
    """A text that differs from ``text`` in one to three places, as a document or as characters."""
    if dice.random() < 0.75:
        document = json.loads(text)
        for _ in range(dice.randint(1, 3)):
            if isinstance(document, dict | list) and len(document):
                document = changed(document, dice)
        return json.dumps(document)
    at = dice.randrange(len(text))
    insert = dice.choice(
        [
            "",
            "9" * 5000,
            "[" * 5000,
            '{"a":' * 5000,
            "[" * 900,
            "-",
            '"',
            "}",
            "]",
            ",",
            "\x00",
            "1e999",
            "NaN",
            "\ufeff",
        ]
    )
    if dice.random() < 0.3:  # a value that the parser takes, of a size that nobody needs
        digits = [place for place in range(len(text)) if text[place].isdigit()]
        at = dice.choice(digits or [at])
        insert = dice.choice(["9" * 5000, "[" * 900 + "]" * 900, "[" * 300 + "]" * 300, "1e400"])
        return text[:at] + insert + text[at + 1 :]
    cut = dice.choice([0, 1, 20])
    return text[:at] + insert + text[at + cut :] if dice.random() < 0.8 else text[:at]


PLAN = MemoryPlan(
    rows=(
        PlanRow(0, "mlp", "swap", windows=Windows(1, 3)),
        PlanRow(1, "self_attn.flash_attention", "swap", 0),
        PlanRow(2, "", "recompute", parameters={COMPILE_BUDGET: 0.5}),
        PlanRow("head", "", "keep"),
    ),
    num_layers=3,
    family="llama",
    adjustments=(Adjustment("swap_config.swap", (0, 1), "mlp", "swap", "keep", "a rule"),),
    lines=("a line",),
    keeps_gathered=(1,),
)


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A text of each kind that is right."""
    folder = tmp_path_factory.mktemp("right")
    made_for = MadeFor("llama", (2, 8), "bf16", "cpu", 1, "{}")
    write_plan(folder / "plan.json", PLAN, tiny_llama(), made_for, {"budget_bytes": 5})
    made, _ = recorded(MODELS["tied"]())
    profile = replace(
        made,
        link=Link(54e6, 55e6, 49e6, 50e6),
        compiled_layers=frozenset({1}),
        frontier=(FrontierPoint(0.5, ("mlp",), ("mlp.mul",), 0.5, 0.1, 0.2, True),),
    )
    text = profile_to_json(profile)
    model = {"family": "llama", "num_layers": 2, "parameters": 9, "dtype": "bf16", "tensor_parallel_size": 1}
    step = {"batch": 1, "seq": 8, "device": "cpu", "autocast": None, "optimizer": "adamw"}
    made_for = json.dumps({"model": model, "step": step, "measured_layers": 2})
    return {
        "plan": PLAN.to_json(),
        "plan file": (folder / "plan.json").read_text(),
        "profile": text,
        "profile file": '{"made_for":' + made_for + "," + text.removeprefix("{"),
    }


def planned(text: str, path: Path) -> None:
    plan = MemoryPlan.from_json(text)
    assert MemoryPlan.from_json(plan.to_json()) == plan
    path.write_text(text, errors="surrogatepass")
    assert load_plan(path) == plan


def from_plan_file(text: str, path: Path) -> None:
    path.write_text(text, errors="surrogatepass")
    read_plan(path)


def profiled(text: str, _: Path) -> None:
    profile = profile_from_json(text)
    assert profile_from_json(profile_to_json(profile)) == profile


def from_profile_file(text: str, path: Path) -> None:
    path.write_text(text, errors="surrogatepass")
    found = read_profile(str(path))
    assert found.described()


READERS: dict[str, tuple[Callable[[str, Path], None], tuple[type[ActSwapError], ...]]] = {
    "plan": (planned, (PlanError,)),
    "plan file": (from_plan_file, (PlanError,)),
    "profile": (profiled, (PlanError,)),
    "profile file": (from_profile_file, (PlanError, ProfileError)),
}


def outcomes(
    read: Callable[[str, Path], None],
    alter: Callable[[random.Random], str],
    named: tuple[type[ActSwapError], ...],
    seeds: range,
    path: Path,
) -> int:
    """Read damaged texts; return how many were rejected. Nothing but the named errors comes out, in time."""
    rejected, wrong = 0, {}
    for seed in seeds:
        altered, begin = alter(random.Random(f"{path.name} {seed}")), time.process_time()
        try:
            read(altered, path)
        except named as error:
            rejected += 1
            if not error.problems or "\ud800" in str(error):
                wrong["no problems, or some that cannot be printed"] = seed
        except Exception as error:
            wrong[f"{type(error).__name__}: {str(error)[:90]}"] = seed
        if time.process_time() - begin > SLOWEST_S:
            wrong["slow"] = seed
    assert not wrong
    return rejected


def fuzz(kind: str, text: str, seeds: range, path: Path) -> None:
    read, named = READERS[kind]
    rejected = outcomes(read, lambda dice: damaged(text, dice), named, seeds, path)
    assert len(seeds) / 4 < rejected < len(seeds)


@pytest.mark.parametrize(
    ("kind", "count"), {"plan": 120, "plan file": 60, "profile": 40, "profile file": 40}.items()
)
def test_a_damaged_document_has_one_named_error(
    kind: str, count: int, documents: dict[str, str], tmp_path: Path
) -> None:
    fuzz(kind, documents[kind], range(count), tmp_path / "document.json")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", READERS)
def test_many_damaged_documents(kind: str, documents: dict[str, str], tmp_path: Path) -> None:
    fuzz(kind, documents[kind], range(1000, 2500), tmp_path / "document.json")


def test_a_damaged_layout_of_a_checkpoint(tmp_path: Path) -> None:
    right: Layout = {"processes": 2, "tensor_parallel_size": 1, "pipeline_stage": 1}
    for value in JUNK:
        for name in right:
            (tmp_path / LAYOUT_FILE).write_text(json.dumps({**right, name: value}))
            with (
                suppress(ParallelTrainingError),
                random_states_by_data_rank(str(tmp_path), right, 0, 0) as folder,
            ):
                assert folder == str(tmp_path)
                assert type(value) is int


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a training in which a planner searched."""
    folder = tmp_path_factory.mktemp("run")
    memory = {"mode": "adaptive", "warmup_steps": 2, "search_steps": 4, "reduce_by_gib": 20_000 / 2**30}
    train_recorded(folder, {"memory": memory}, count=14)
    return folder / "actswap"


def of_steps(text: str, dice: random.Random) -> str:
    """The lines of a training, one of them damaged."""
    lines = text.splitlines()
    at = dice.randrange(len(lines))
    lines[at] = damaged(lines[at], dice).replace("\n", "")
    return "\n".join([*lines, ""])


def fuzz_record(name: str, run: Path, seeds: range, folder: Path) -> None:
    shutil.copytree(run, folder / "actswap")
    target = folder / "actswap" / name
    text = target.read_text()

    accepted = count()

    def reported(altered: str, _: Path) -> None:
        target.write_text(altered, errors="surrogatepass")
        found = read_run(folder)
        run_facts(found, prediction_of(found))
        if next(accepted) % 8 == 0:  # drawing takes a hundred times as long as reading
            write_report(folder)

    one = of_steps if name.endswith("l") else damaged
    rejected = outcomes(reported, lambda dice: one(text, dice), (ReportError, PlanError), seeds, target)
    assert rejected


FILES = (
    "run.json",
    "plan.json",
    "steps.jsonl",
    "planner.json",
    "profile.json",
    "timeline.json",
    "memory.json",
)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_record_has_one_named_error(name: str, run: Path, tmp_path: Path) -> None:
    fuzz_record(name, run, range(12), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FILES)
def test_many_damaged_records(name: str, run: Path, tmp_path: Path) -> None:
    fuzz_record(name, run, range(1000, 1300), tmp_path)
