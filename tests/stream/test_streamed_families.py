"""All families of transformers: each is right in chunks, or rejected by name; docs/families.md says which."""

from __future__ import annotations

import pytest
import transformers

from docs.make_families import PAGE, cells_of
from hf_actswap.releases import is_since
from tests.family_steps import REJECTED, RIGHT, streamed
from tests.parallel.patched_models import FAMILIES

QUICK = {
    "roberta": (RIGHT, ""),
    "gemma3n_text": (RIGHT, ""),
    "diffllama": (REJECTED, "one attention per layer: two in layer 0"),
    "longcat_flash": (REJECTED, "2 layers that call transformers' attention interface: calls by 4 of them"),
}


@pytest.mark.parametrize("family", QUICK)
def test_what_is_found(family: str) -> None:
    found = streamed(family)
    if family == "diffllama" and not is_since("transformers", "5.17"):
        assert found[0] == REJECTED  # its class does not support the exchange of attention yet
        return
    assert found == QUICK[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_right_or_rejected_as_the_page_says(family: str) -> None:
    found, why = streamed(family)
    assert found in (RIGHT, REJECTED), why
    page = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__}." in page:
        assert cells_of(page)[family]["stream"] == found
