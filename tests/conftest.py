"""What all tests share: no network, the gpu marker, and the folder of real text."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import benchmarks  # noqa: F401  (settings of PyTorch on an accelerator, ahead of its import)
from tests.piece_limits import pieces_asked_for as pieces_asked_for
from tests.piece_limits import small_pieces as small_pieces
from tests.quick_cases import Measured, mark_slow_by_measure, mark_slow_combinations

# The models of the tests are tiny: more threads than one only wait for each other, here and in children.
os.environ["OMP_NUM_THREADS"] = "1"

# A process that a test has started and that crashes tells where.
os.environ["PYTHONFAULTHANDLER"] = "1"

# Set before anything imports huggingface_hub, transformers or datasets: they read these once, at import.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

# How long an example takes says something about the machine, not about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--piece-bytes", type=int, help="longest piece of host memory (tests.piece_limits)")
    parser.addoption("--measure", action="store_true", help="write tests/slow_tests.txt anew")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--measure"):
        config.pluginmanager.register(Measured())


@pytest.hookimpl(tryfirst=True)  # ahead of the selection by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the quick cases, and skip the tests marked ``gpu`` where there is no accelerator."""
    from hf_actswap.rehearsal.launch import SETTINGS  # here: the package imports huggingface_hub, see above

    mark_slow_combinations(items)
    if not config.getoption("--measure"):
        mark_slow_by_measure(items)
    for item in items:
        if item.get_closest_marker("rehearsal") and SETTINGS not in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs the rehearsal's device: make rehearse"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # here, because the pure tests are quick only without it

    if torch.accelerator.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


@pytest.fixture(autouse=True, scope="module")
def _imported_is_not_walked() -> None:
    """What is imported by now is never garbage: the collections that tests ask for do not walk it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """What a test's `TrainingArguments` tell Accelerate in the environment does not reach the next test."""
    before = {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}
    yield
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled before the test, and nothing left of it; counters at zero."""
    import torch  # as above
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    from torch import distributed  # as above

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def wikitext_dir() -> Path:
    """Folder with wikitext-2's ``valid.txt`` and ``test.txt``, where one lies beside the checkout."""
    folder = REPOSITORY.parent / "shared" / "wikitext-2"
    if not (folder / "valid.txt").is_file():
        pytest.skip(f"no wikitext-2 beside the checkout ({folder.name}/valid.txt)")
    return folder
