"""The site is built without a warning, and its links lead to its pages or into the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import hf_actswap
from tests.docs.pages import DOCS, ROOT, script, text_of

LINKS = script("site_links")


class _Links(HTMLParser):
    """What a page links to, and what it shows or loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.feed(text_of(page))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                (self.links if tag == "a" else self.loaded).add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site. ``--strict`` fails on links to pages and headings that are not there; it counts
    warnings, which ``--quiet`` would take from it.
    """
    pytest.importorskip("material", reason="the extra `docs` builds the site")
    pytest.importorskip("mkdocstrings_handlers.python", reason="the extra `docs` builds the site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return folder


def test_every_page_is_built_and_can_be_searched(site: Path) -> None:
    index = json.loads(text_of(site / "search" / "search_index.json"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {str(path.relative_to(DOCS).with_suffix("")) + "/" for path in DOCS.rglob("*.md")} - {"README/"}
    assert found == {"", "pages/", "recipes/", "benchmarks/", *pages}


def test_the_link_to_the_repository_has_a_name(site: Path) -> None:
    """The theme writes what it is given; without a name of ours it was given none."""
    shown = re.findall(r'<div class="md-source__repository">\s*(.*?)\s*</div>', text_of(site / "index.html"))
    assert shown
    assert set(shown) == {"Repository"}


def test_links_lead_to_files_of_the_site_or_of_the_repository(site: Path) -> None:
    repository = re.compile(re.escape(LINKS.repository_url()) + r"/(?:blob|tree|raw)/main/([^#]+)")
    into_repository = set()
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # at any depth, so its links begin with the site's address
            continue
        found = _Links(page)
        assert not [link for link in found.loaded if link.startswith(("http", "//"))]
        for link in found.links | found.loaded:
            if inside := repository.match(link):
                into_repository.add(inside[1])
            elif not re.match(r"[a-z]+:|#", link):
                target = (page.parent / unquote(link.partition("#")[0])).resolve()
                assert target.exists(), (page, link)
                assert site in (target, *target.parents), (page, link)
    assert into_repository
    assert [path for path in into_repository if not (ROOT / path).exists()] == []


def test_the_api_page_has_every_public_name_with_its_text(site: Path) -> None:
    page = text_of(site / "api" / "index.html")
    headings = re.findall(r'<h3 id="[^"]+" class="doc doc-heading">.*?</h3>', page, flags=re.DOTALL)
    names = [re.sub(r"<[^>]+>|\s|¶|&para;", "", heading) for heading in headings]
    shown = [name.removesuffix("dataclass").removeprefix("hf_actswap.") for name in names]
    assert [name for name in hf_actswap.__all__ if name not in shown] == []
    assert [name for name in shown if "." not in name and name not in hf_actswap.__all__] == []
    assert "Put a configuration or a plan on a model." in page


def test_scripts_are_not_published(site: Path) -> None:
    assert not list(site.rglob("*.py"))
    assert (site / "pictures" / "windows.svg").is_file()


def test_links_in_code_stay_and_all_others_lead() -> None:
    text = (
        'A [page](b.md#x), [`c`](../d "title"), ![p](e.png), [here](#y), <img width="9" src="f.svg">,\n'
        "[there](https://a.b/c), `[code](g.md)`\n```md\n[code](h.md)\n```\n"
    )
    assert LINKS.with_links("docs/deep/page.md", text, "<{}>".format) == (
        'A [page](<docs/deep/b.md>#x), [`c`](<docs/d> "title"), ![p](<docs/deep/e.png>), '
        '[here](<docs/deep/page.md>#y), <img width="9" src="<docs/deep/f.svg>">,\n'
        "[there](https://a.b/c), `[code](g.md)`\n```md\n[code](h.md)\n```\n"
    )


def test_the_repository_has_one_address() -> None:
    """A page that cannot do without it has that of ``project.urls``."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*.yml"), *DOCS.rglob("*.md"), *ROOT.glob("*/README.md")]
    pages += ROOT.glob("examples/*.*")
    found = {
        link for page in pages for link in re.findall(r"https://[^\s\"']*/hf[-_]actswap\b", text_of(page))
    }
    assert found == {LINKS.repository_url()}
