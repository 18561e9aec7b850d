"""Releases of the libraries below: the floor of pyproject.toml, and what is said of older ones."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hf_actswap import releases

ROOT = Path(__file__).resolve().parent.parent


def test_the_least_releases_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, least in releases.LEAST.items():
        assert [item for item in project["dependencies"] if item.split(",")[0] == f"{package}>={least}"], (
            package
        )


def test_an_older_one_is_named_with_the_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"torch": "2.13.0+cpu", "transformers": "4.57.6", "accelerate": "1.9.0.dev0"}
    monkeypatch.setattr(releases, "version", lambda package: found[package])
    with pytest.raises(releases.ReleaseError) as caught:
        releases.check_installed()
    assert str(caught.value.problems[0]) == (
        'transformers: expected 5.2 or newer, found 4.57.6. Install it with: pip install "transformers>=5.2"'
    )
    assert [problem.where for problem in caught.value.problems] == ["transformers", "accelerate"]


@pytest.mark.parametrize(
    ("installed", "since"), [("2.9.1", False), ("2.13.0+cpu", True), ("2.14.0.dev3", True), ("3.0", True)]
)
def test_releases_are_compared_as_numbers(
    installed: str, since: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "version", lambda package: installed)
    assert releases.collectives_can_be_traced() is since
