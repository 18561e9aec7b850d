"""What the tests of the documentation share: pages, their blocks of code, and the scripts that write them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), flags=re.MULTILINE | re.DOTALL)


def without_code(text: str) -> str:
    """The text of a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def script(name: str) -> ModuleType:
    """A script of the docs folder, or beside it, as a module."""
    path = (DOCS / f"{name}.py").resolve()
    known = f"docs_script_{path.stem}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[known] = module  # where dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[known]
