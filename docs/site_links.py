"""Links of the repository's pages, for where else they are read: on the site, and on the package index.

A page's links are relative to its file. `package_readme` makes those of README.md absolute; what mkdocs calls
(the ``on_...`` functions, a hook of mkdocs.yml) makes them lead to the page of the site that a file became,
else to the file in the repository. Where that is, ``project.urls`` in pyproject.toml says.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MOVED = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "recipes/README.md": "recipes.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Pages of the site that do not stand in it as they stand in ``docs``: file -> page."""
PICTURES = (".png", ".svg")
_LINKS = re.compile(
    r"^```.*?^```$|`[^`\n]*`"  # code, which is left alone
    r"|(?P<start>\]\(|<[^>]* (?:src|href)=\")(?P<path>[^()\s\"#:]*)(?P<anchor>#[^()\s\"]*)?(?=[)\s\"])",
    re.MULTILINE | re.DOTALL,
)


def repository_url() -> str:
    """Return where the repository is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Repository"])


def in_repository(path: str) -> str:
    """Return the address of a file or folder of the repository."""
    kind = "raw" if path.endswith(PICTURES) else "tree" if (ROOT / path).is_dir() else "blob"
    return f"{repository_url()}/{kind}/main/{path}"


def with_links(page: str, text: str, lead: Callable[[str], str]) -> str:
    """Replace a page's relative links.

    Args:
        page: its file, relative to the repository.
        text: that it holds.
        lead: from a file or folder of the repository to what is written in its place.
    """

    def replaced(found: re.Match[str]) -> str:
        if found["start"] is None:
            return found[0]
        beside = posixpath.join(posixpath.dirname(page), found["path"]) if found["path"] else page
        return f"{found['start']}{lead(posixpath.normpath(beside))}{found['anchor'] or ''}"

    return _LINKS.sub(replaced, text)


def package_readme() -> str:
    """Return README.md for the package index, where nothing of the repository is beside it."""
    return with_links("README.md", (ROOT / "README.md").read_text(encoding="utf-8"), in_repository)


def on_config(config: Any) -> None:
    """Tell the theme where the repository is."""
    config.repo_url = repository_url()
    config.repo_name = "Repository"  # mkdocs names it by the address, but only if that is in its own file


def on_files(files: Any, config: Any) -> None:
    """Add the pages from outside ``docs``, under their names of the site."""
    from mkdocs.structure.files import File

    for path in MOVED:
        files.append(File.generated(config, _on_site(path), abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Make the links of a page lead within the site, or into the repository."""
    own = page.file.src_uri
    path = next((path for path, moved in MOVED.items() if moved == own), f"docs/{own}")

    def lead(target: str) -> str:
        there = _on_site(target)
        if files.get_file_from_path(there) is None and (ROOT / target).exists():
            return in_repository(target)
        return posixpath.relpath(there, posixpath.dirname(own))

    return with_links(path, markdown, lead)


def _on_site(path: str) -> str:
    return MOVED.get(path, path.removeprefix("docs/"))
