"""Releases of the libraries below: the one place that compares their numbers.

What an object can be asked, it is asked where it is used (has a module this method?): FSDP2's groups and
the call of checkpointed layers in `plan.wrappers`, collectives in `parallel.collectives`. What has another
name or is wrong up to some release stands here, and from which releases on the library works at all.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .errors import ActSwapError, Problem

LEAST = {"torch": "2.11", "transformers": "5.2", "accelerate": "1.10"}
"""The oldest releases that the tests run on, as in pyproject.toml."""


class ReleaseError(ActSwapError):
    """A library is older than what this one works with."""

    subject = "installed libraries"


def is_since(package: str, release: str) -> bool:
    """Whether the installed package is ``release`` (as ``"2.13"``) or newer; its pre-releases count as it."""
    return _numbers(version(package)) >= _numbers(release)


def check_installed() -> None:
    """Raise `ReleaseError` if a library is older than `LEAST`: installers can be told not to look.

    Done when this module is imported, before an `ImportError` or `AttributeError` would say it worse.
    """
    problems = []
    for package, least in LEAST.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue  # its import says so
        if _numbers(found) < _numbers(least):
            hint = f'Install it with: pip install "{package}>={least}"'
            problems.append(Problem(package, f"{least} or newer", found, hint))
    if problems:
        raise ReleaseError(problems)


def _numbers(release: str) -> tuple[int, int]:
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


def of_a_step() -> str:
    """Return the installed releases that decide what a step runs, as ``torch 2.13, transformers 5.23``."""
    numbers = {package: _numbers(version(package)) for package in ("torch", "transformers")}
    return ", ".join(f"{package} {major}.{minor}" for package, (major, minor) in numbers.items())


def checkpointing_argument() -> str:
    """Return the name of the training argument for gradient checkpointing."""
    return "activation_checkpointing" if is_since("transformers", "5.23") else "gradient_checkpointing"


def collectives_can_be_traced() -> bool:
    """Whether a compiled collective fills what it is given; before, it filled a copy: wrong gradients."""
    return is_since("torch", "2.13")


def compiled_regions_are_called() -> bool:
    """Whether regional compilation in mixed precision calls the compiled layers (not the bare model's)."""
    return is_since("accelerate", "1.15")


def parallelism_names_sequence_backend() -> bool:
    """Whether Accelerate's ``ParallelismConfig`` has ``sp_backend``, which every Trainer here reads."""
    return is_since("accelerate", "1.12")


def prepared_models_are_known() -> bool:
    """Whether Accelerate leaves a model as it is that it has prepared; before, it put DDP around it."""
    return is_since("accelerate", "1.14")


def loss_is_scaled_by_data_ranks() -> bool:
    """Whether the Trainer scales its loss by ranks with own data; 5.6 does by all ranks: wrong losses."""
    return is_since("transformers", "5.16")


check_installed()
