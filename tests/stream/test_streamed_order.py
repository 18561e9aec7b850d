"""The order that streams and events give a streamed step, checked operator by operator with vector clocks."""

from __future__ import annotations

import pytest
import torch

from hf_actswap import apply
from hf_actswap.engine import StreamTransfer
from tests.engine.pretended_streams import CPU, StreamOrder, pretend
from tests.engine.test_happens_before import UNWAITED
from tests.stream.streamed_models import STREAMED, made, step


def violations(family: str, order: StreamOrder, patch: pytest.MonkeyPatch) -> list[str]:
    """Run two steps; return what is out of order. Copies run at once, so gradients are right nevertheless."""
    model = made(family)
    with apply(model, STREAMED):
        _, expected = step(model)
    with patch.context() as patched:
        pretend(patched, order)
        with order.watching(), apply(model, STREAMED, transfer=StreamTransfer(CPU)) as applied:
            for _ in range(2):  # in the second step host memory is used again
                _, found = step(model)
            assert applied.stats().host_bytes == 0
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert order.operators > 1000
    return order.violations


@pytest.mark.parametrize("family", ["llama", "gemma3, windows"])
def test_nothing_is_out_of_order(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert violations(family, StreamOrder(1), monkeypatch) == []


@pytest.mark.slow
@pytest.mark.parametrize("pair", UNWAITED, ids=" ".join)
def test_a_wait_that_is_left_out_is_found(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert violations("llama", StreamOrder(1, unwaited=(pair,)), monkeypatch)
