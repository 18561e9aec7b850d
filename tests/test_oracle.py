"""What `tests.oracle` has stored is what the code says now."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from tests.oracle import STORED, Oracle, collect

CHANGED = "decide whether it should; then: python -m tests.oracle"


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
    if facts["versions"] != {"torch": str(torch.__version__), "transformers": transformers.__version__}:
        pytest.skip(f"stored with {facts['versions']}")
    return facts


def test_golden_vectors_and_steady_steps(stored: dict[str, Any]) -> None:
    oracle = Oracle()
    oracle.vectors()
    oracle.steps()
    assert {name: stored.get(name) for name in oracle.facts} == oracle.facts, CHANGED


@pytest.mark.slow
def test_models_on_paper(stored: dict[str, Any]) -> None:
    assert collect().facts == stored, CHANGED
