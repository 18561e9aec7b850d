"""The recipe is a script with modules beside it: they are importable as the script itself imports them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))


@pytest.fixture(scope="session")
def recipes() -> Path:
    """The folder of the recipe."""
    return RECIPES
