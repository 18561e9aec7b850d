"""All families of transformers in tiles: modules that treat tokens one by one, and head and loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import transformers

from docs.make_families import PAGE, cells_of
from tests.family_steps import REJECTED, RIGHT, WHOLE, Finding, loss_tiled, tiled
from tests.parallel.patched_models import FAMILIES

WAYS: dict[str, Callable[[str], Finding]] = {"tiles": tiled, "loss": loss_tiled}
TILED = "a module that treats tokens one by one: not known: no run on fake tensors ("
QUICK = {
    ("tiles", "llama"): (RIGHT, ""),
    ("loss", "llama"): (RIGHT, ""),
    ("tiles", "mixtral"): (RIGHT, ""),
    ("tiles", "jetmoe"): (REJECTED, TILED),
    ("loss", "prophetnet"): (WHOLE, "aten.nll_loss_forward.default reads all of them at once"),
}


@pytest.mark.parametrize(("way", "family"), QUICK)
def test_what_is_found(way: str, family: str) -> None:
    found, why = WAYS[way](family)
    expected, begins = QUICK[way, family]
    assert found == expected
    assert why.startswith(begins)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_right_or_rejected_as_the_page_says(family: str, way: str) -> None:
    found, why = WAYS[way](family)
    assert found in (RIGHT, REJECTED, WHOLE), why
    page = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}." in page:
        assert cells_of(page)[family][way] == found
