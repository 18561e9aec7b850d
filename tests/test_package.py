"""What is published: the archives' files, and the text that a package index shows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

LEFT_OUT = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "site", "out", "runs")


@pytest.fixture(scope="module")
def archives(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive of a copy of the checkout, and the wheel that is built from that archive."""
    pytest.importorskip("build", reason="it makes the archives")
    copy = tmp_path_factory.mktemp("checkout") / "copy"
    shutil.copytree(repository, copy, ignore=LEFT_OUT)
    out = copy / "dist"
    command = [sys.executable, "-m", "build", "--outdir", str(out), str(copy)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def in_source_archive(archive: Path) -> set[str]:
    with tarfile.open(archive) as file:
        return {item.name.partition("/")[2] for item in file.getmembers() if item.isfile()}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(file.read(name))


@pytest.mark.slow
def test_the_source_archive_has_the_docs_and_no_tests(repository: Path, archives: tuple[Path, Path]) -> None:
    names = in_source_archive(archives[0])
    wanted = [repository / name for name in ("README.md", "CHANGELOG.md", "LICENSE", "mkdocs.yml")]
    for folder in ("docs", "examples", "recipes", "hf_actswap"):
        wanted += [path for path in (repository / folder).rglob("*") if path.suffix not in (".pyc", "")]
    assert {path.relative_to(repository).as_posix() for path in wanted} <= names
    assert [name for name in names if name.startswith(("tests", ".")) or name.endswith(".pyc")] == []


@pytest.mark.slow
def test_the_wheel_has_the_package_alone(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[1]) as file:
        names = file.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"hf_actswap"}
    assert {"hf_actswap/py.typed", "hf_actswap/report/page.html"} <= set(names)


@pytest.mark.slow
def test_the_text_for_the_index_has_absolute_links(repository: Path, archives: tuple[Path, Path]) -> None:
    found = metadata(archives[1])
    text = str(found.get_payload())
    assert found["Description-Content-Type"] == "text/markdown"
    (url,) = (line.partition(", ")[2] for line in found.get_all("Project-URL", []))
    without_code = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = re.findall(r"(?:\]\(|src=\"|href=\")([^)\s\"]+)", without_code)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    inside = re.findall(re.escape(url) + r"/(?:blob|tree|raw)/main/([^#\s]+)", "\n".join(links))
    assert inside
    assert [path for path in inside if not (repository / path).exists()] == []
    readme = (repository / "README.md").read_text(encoding="utf-8")
    assert text.splitlines()[0] == readme.splitlines()[0]
    assert len(text.splitlines()) == len(readme.splitlines())


@pytest.mark.slow
def test_only_recipes_need_datasets(archives: tuple[Path, Path]) -> None:
    needs = metadata(archives[1]).get_all("Requires-Dist", [])
    assert [line for line in needs if line.startswith("datasets")] == ['datasets>=4; extra == "recipes"']
