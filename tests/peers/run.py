"""Run TRL's and PEFT's own tests with a plan on every model: the same tests must pass as without one.

    python tests/peers/run.py                       # everything: an hour or more on two cores
    python tests/peers/run.py --project trl --plans swap mix --only "sft and not vlm"
    python tests/peers/run.py --resume              # after a run that was ended: what has no record yet

The tests come from source distributions on the package index: PEFT's of the installed version, TRL's of the
last version whose archive has them (tests of what TRL has dropped since fail without a plan too, and are
not counted). ``--trl-tests FOLDER`` takes them from a checkout. Nothing else is fetched: models, tokenizers
and data sets are made here (`hub_folder`), and each project's tests run in one process without a network.

A test counts if it passes without a plan. With a plan it must pass, and its losses and gradients after every
backward must be the same bits (`plan_on_every_model`). The exit status is 1 if one does not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLANS = ("swap", "mix", "auto")
TRL_WITH_TESTS = "0.23.1"
"""Later source distributions of TRL leave its tests out."""


@dataclass(frozen=True)
class Project:
    """Whose tests, and which."""

    name: str
    release: str
    files: tuple[str, ...]
    only: str
    """pytest's -k: the tests that train something."""


def projects() -> list[Project]:
    """Return the projects in the order in which they run."""
    files = tuple(f"test_{kind}_trainer.py" for kind in ("sft", "dpo", "reward", "kto"))
    training = "training or prefix or prepare or passing or replication or disable_adapter"
    reentrant = "gradient_checkpointing and True"  # rejected by name beside swap
    return [
        Project("trl", TRL_WITH_TESTS, files, ""),
        Project("peft", version("peft"), ("test_decoder_models.py",), f"({training}) and not ({reentrant})"),
    ]


def fetch_tests(project: Project, work: Path, checkout: Path | None) -> Path:
    """Copy the tests of a project, without the project: its installed version is what is tested.

    Returns:
        A package (a folder with an ``__init__.py``), because the tests import from each other.
    """
    tests = work / f"{project.name}_tests"
    if tests.exists():
        return tests
    found = checkout
    if found is None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", project.name]
        subprocess.run([*pip, "--dest", str(work), f"{project.name}=={project.release}"], check=True)
        name = f"{project.name}-{project.release}"
        with tarfile.open(work / f"{name}.tar.gz") as archive:
            archive.extractall(work, filter="data")
        found = work / name / "tests"
    tests.mkdir()
    for path in [*found.glob("testing_*.py"), *(found / file for file in project.files)]:
        shutil.copy(path, tests)
    (tests / "__init__.py").touch()
    return tests


def run_tests(project: Project, plan: str, only: str, tests: Path, hub: Path, record: Path) -> None:
    """Run a project's tests once, in the folder that stands in for the Hub."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-c", str(tests / "pytest.ini"), "--rootdir", str(tests.parent), "-p", "no:randomly"]
    command += [
        "-p",
        "tests.peers.plan_on_every_model",
        "--actswap-plan",
        plan,
        "--actswap-record",
        str(record),
    ]
    command += ["-k", only] if only else []
    (tests / "pytest.ini").write_text("[pytest]\naddopts = --timeout 300\n", encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(hub.parent / "datasets"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    with open(record.with_suffix(".log"), "w", encoding="utf-8") as log:
        files = [str(tests / file) for file in project.files]
        subprocess.run([*command, *files], cwd=hub, env=environment, stdout=log, stderr=log, check=False)
    if not record.exists():
        raise SystemExit(f"pytest ended without a record: see {record.with_suffix('.log')}")


@dataclass(frozen=True)
class Comparison:
    """What a plan changed in a project's tests."""

    counted: int
    """Tests that pass without a plan."""
    trained: int
    """Of these, tests with a backward and a plan on a model."""
    failed: list[str]
    differing: list[str]
    """Tests whose losses or gradients are not the same bits."""


def compare(without: dict[str, Any], with_plan: dict[str, Any]) -> Comparison:
    """Compare two records of `plan_on_every_model`."""
    counted = [name for name, test in without.items() if test["outcome"] == "passed"]
    failed, differing, trained = [], [], 0
    for name in counted:
        test = with_plan.get(name, {"outcome": "absent", "numbers": [], "plans": 0})
        if test["outcome"] != "passed":
            failed.append(name)
        elif test["numbers"] != without[name]["numbers"]:
            differing.append(name)
        trained += bool(test["plans"] and test["numbers"])
    return Comparison(len(counted), trained, failed, differing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "peers", help="where everything is written"
    )
    parser.add_argument("--project", nargs="*", choices=("trl", "peft"), default=["trl", "peft"])
    parser.add_argument("--plans", nargs="*", choices=PLANS, default=list(PLANS))
    parser.add_argument("--only", help="pytest's -k, in place of the project's own selection")
    parser.add_argument("--trl-tests", type=Path, help="the tests folder of a checkout of TRL")
    parser.add_argument(
        "--resume", action="store_true", help="keep the records in --work and run the tests that they lack"
    )
    asked = parser.parse_args()
    work: Path = asked.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    hub = work / "hub"
    if not hub.exists():
        code = "import sys, pathlib; from tests.peers.hub_folder import make_hub_folder as make; "
        subprocess.run(
            [sys.executable, "-c", code + "make(pathlib.Path(sys.argv[1]))", str(hub)], check=True, cwd=ROOT
        )
    bad = False
    print(f"{'tests of':10}{'plan':8}{'count':>8}{'train':>8}{'fail':>8}{'differ':>8}")
    for project in projects():
        if project.name not in asked.project:
            continue
        checkout = asked.trl_tests if project.name == "trl" else None
        tests = fetch_tests(project, work, checkout)
        only = project.only if asked.only is None else asked.only
        records = {}
        for plan in ("none", *asked.plans):
            path = work / f"{project.name}_{plan}.json"
            if not asked.resume:
                path.unlink(missing_ok=True)
            run_tests(project, plan, only, tests, hub, path)
            records[plan] = json.loads(path.read_text(encoding="utf-8"))
            found = compare(records["none"], records[plan])
            counts = (found.counted, found.trained, len(found.failed), len(found.differing))
            print(
                f"{project.name:10}{plan:8}{counts[0]:8}{counts[1]:8}{counts[2]:8}{counts[3]:8}", flush=True
            )
            for name in found.failed:
                print(f"  fails with the plan: {name}")
            for name in found.differing:
                print(f"  other numbers with the plan: {name}")
            bad |= bool(found.failed or found.differing or not found.counted)
    raise SystemExit(int(bad))


if __name__ == "__main__":
    main()
