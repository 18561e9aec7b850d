"""Links between pages lead somewhere, every page is on the index, and drawings are of the present code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, script, text_of, without_code

PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
HOW = DOCS / "how_it_works.md"


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", without_code(text_of(page)), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", without_code(text_of(page)))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_is_on_the_index() -> None:
    index = DOCS / "README.md"
    listed = {(DOCS / link.partition("#")[0]).resolve() for link in links(index)}
    assert [page for page in PAGES if page.parent != ROOT and page != index and page not in listed] == []


def test_the_table_of_windows_is_what_the_engine_says() -> None:
    pictures = script("make_pictures")
    page = text_of(HOW)
    assert pictures.with_table(page) == page, "run: python docs/make_pictures.py"


def test_the_pictures_are_of_the_present_engine() -> None:
    pictures = script("make_pictures")
    shown = re.findall(r"\]\(pictures/(\w+)\.svg\)", text_of(HOW))
    assert set(shown) == {*pictures.DRAWINGS, *script("make_sketches").DRAWINGS}
    for name in pictures.DRAWINGS:
        assert pictures.digest() in text_of(DOCS / "pictures" / f"{name}.svg"), (
            "run: python docs/make_pictures.py"
        )


def test_the_pictures_can_be_drawn() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    for name in ("make_pictures", "make_sketches"):
        for draw, inches in script(name).DRAWINGS.values():
            draw(figures.Figure(figsize=inches))
