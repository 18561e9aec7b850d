"""docs/versions.md names the versions that are tested."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.docs.pages import DOCS, ROOT, text_of

VERSIONS = text_of(DOCS / "versions.md")


def row(name: str) -> tuple[str, str]:
    found = re.search(rf"^\| {name} \| (\S+) \| ([^|]*?) \|$", VERSIONS, flags=re.MULTILINE)
    assert found, f"docs/versions.md has no row {name}"
    return found[1], found[2]


@pytest.mark.parametrize(
    ("name", "package"),
    [("PyTorch", "torch"), ("PEFT", "peft"), ("TRL", "trl")]
    + [(name, name) for name in ("transformers", "accelerate", "datasets")],
)
def test_the_newest_versions_are_those_of_the_constraints(name: str, package: str) -> None:
    assert f"\n{package}=={row(name)[0]}\n" in text_of(ROOT / "constraints.txt")


@pytest.mark.parametrize(("name", "package"), [("PyTorch", "torch"), ("transformers", "transformers")])
def test_the_oldest_versions_are_those_of_the_makefile_and_of_the_package(name: str, package: str) -> None:
    oldest = row(name)[1]
    assert f"'{package}=={oldest}'" in text_of(ROOT / "Makefile")
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    lowest = oldest.removesuffix(".*")
    assert any(need.startswith(f"{package}>={lowest}") for need in project["dependencies"])


def test_the_tests_of_peers_are_those_that_the_page_names() -> None:
    run = text_of(ROOT / "tests" / "peers" / "run.py")
    (release,) = re.findall(r'^TRL_WITH_TESTS = "(.*)"$', run, flags=re.MULTILINE)
    assert f"TRL {release}" in VERSIONS
