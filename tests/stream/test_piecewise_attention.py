"""Attention piece by piece gives what attention to all keys at once gives, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_actswap.stream import piecewise_attention
from hf_actswap.stream.host_sequence import AttentionShapes, passes
from hf_actswap.stream.piecewise_attention import Scores, Visibility, attend, attend_backward, merge

KEYS = 40
CASES: dict[str, tuple[Visibility, float | None, tuple[int, int], tuple[int, int]]] = {
    "causal": (Visibility(), None, (4, 2), (8, 8)),
    "one key head": (Visibility(), None, (4, 1), (8, 8)),
    "softcapping": (Visibility(), 0.7, (4, 2), (8, 8)),
    "values of another size": (Visibility(), None, (4, 2), (8, 6)),
    "window inside a piece": (Visibility(window=5), None, (4, 2), (8, 8)),
    "window over pieces": (Visibility(window=19), None, (4, 2), (8, 8)),
    "window of one": (Visibility(window=1), None, (2, 2), (8, 8)),
    "blocks": (Visibility(block=12), None, (4, 2), (8, 8)),
    "documents": (Visibility(documents=(0, 7, 12, 28, 31)), None, (4, 2), (8, 8)),
    "documents and a window": (Visibility(window=5, documents=(0, 11, 30)), 0.7, (4, 2), (8, 8)),
    "documents and blocks": (Visibility(block=6, documents=(0, 11, 30)), None, (4, 2), (8, 8)),
    "window and softcapping": (Visibility(window=19), 0.7, (4, 4), (8, 8)),
}
"""Which keys are seen, softcapping, heads and key heads, sizes of keys and values."""


def tensors(heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype = torch.float64) -> Any:
    make = torch.Generator().manual_seed(0)
    shapes = [(2, heads[0], KEYS, sizes[0]), (2, heads[1], KEYS, sizes[0]), (2, heads[1], KEYS, sizes[1])]
    return [torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes]


def whole(query: Any, key: Any, value: Any, scores: Scores) -> torch.Tensor:
    """Attention to all keys with all scores at once."""
    groups = query.shape[1] // key.shape[1]
    made = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scores.scale
    if scores.softcap is not None:
        made = scores.softcap * torch.tanh(made / scores.softcap)
    at = torch.arange(KEYS)
    first = torch.tensor([scores.visible.first(position) for position in range(KEYS)])
    seen = (at <= at[:, None]) & (at >= first[:, None])
    return made.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(groups, 1)


@pytest.mark.parametrize("few_scores", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case: str, few_scores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if few_scores:  # some queries at a time
        monkeypatch.setattr(piecewise_attention, "_SCORES", 2 * 4 * 7 * 3)
        monkeypatch.setattr(piecewise_attention, "_ROWS", 5)
    visible, softcap, heads, sizes = CASES[case]
    scores = Scores(0.3, softcap, visible)
    inputs = [item.requires_grad_() for item in tensors(heads, sizes)]
    expected = whole(*inputs, scores)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected.backward(upstream)
    query, key, value = (item.detach() for item in inputs)
    queries = range(26, KEYS)
    pieces = [queries, range(13, 26), range(10, 13), range(10)]
    mine = query[:, :, 26:]
    found = [
        attend(mine, key[:, :, at.start : at.stop], value[:, :, at.start : at.stop], scores, queries, at)
        for at in pieces
    ]
    out, total = found[0]
    for piece in found[1:]:
        out, total = merge(out, total, *piece)
    torch.testing.assert_close(out, expected[:, :, 26:].detach(), rtol=1e-12, atol=1e-13)

    (of_query,) = torch.autograd.grad(
        (whole(*inputs, scores)[:, :, 26:] * upstream[:, :, 26:]).sum(), inputs[:1]
    )
    both = torch.autograd.grad((whole(*inputs, scores)[:, :, 26:] * upstream[:, :, 26:]).sum(), inputs[1:])
    sums = [torch.zeros_like(query[:, :, 26:]), torch.zeros_like(key), torch.zeros_like(value)]
    for at in pieces:
        there = slice(at.start, at.stop)
        made = attend_backward(
            *(upstream[:, :, 26:], mine, key[:, :, there], value[:, :, there]),
            *(out, total, scores, queries, at),
        )
        sums[0] += made[0]
        sums[1][:, :, there] += made[1]
        sums[2][:, :, there] += made[2]
    torch.testing.assert_close(sums[0], of_query[:, :, 26:], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(sums[1], both[0], rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(sums[2], both[1], rtol=1e-11, atol=1e-13)


def test_a_query_that_sees_nothing_of_a_piece_gives_it_no_weight() -> None:
    query, key, value = tensors((4, 2), (8, 8))
    scores = Scores(0.3, None, Visibility(window=5))
    out, total = attend(
        query[:, :, 20:30], key[:, :, :18], value[:, :, :18], scores, range(20, 30), range(18)
    )
    sees = torch.tensor([position - 4 < 18 for position in range(20, 30)])
    assert torch.equal(total.isfinite(), sees.expand_as(total))
    assert not out[:, :, ~sees].any()
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_half_precision_is_as_close_as_whole_attention(dtype: torch.dtype, softcap: float | None) -> None:
    query, key, value = tensors((4, 2), (8, 8), dtype)
    scores, queries = Scores(0.3, softcap, Visibility(window=21)), range(20, KEYS)
    parts = [
        attend(
            query[:, :, 20:],
            key[:, :, at.start : at.stop],
            value[:, :, at.start : at.stop],
            scores,
            queries,
            at,
        )
        for at in (queries, range(10, 20), range(10))
    ]
    out, total = parts[0]
    for part in parts[1:]:
        out, total = merge(out, total, *part)
    assert out.dtype is total.dtype is torch.float32
    truth = whole(query.double(), key.double(), value.double(), scores)[:, :, 20:]
    error = (out.to(dtype).double() - truth).norm()
    assert error < (whole(query, key, value, scores)[:, :, 20:].double() - truth).norm()


def test_merging_many_pieces_is_exact_to_rounding() -> None:
    """Also where a piece is not seen at all, and where it outweighs all before."""
    make = torch.Generator().manual_seed(0)
    outs = torch.randn((40, 1, 2, 64, 8), generator=make).bfloat16()
    totals = 20 * torch.randn((40, 1, 2, 64), generator=make)
    totals[3:5] = -torch.inf
    totals[7, ..., :8] = 200.0
    weights = totals.double().softmax(0)
    out, total = outs[0], totals[0]
    for piece in zip(outs[1:], totals[1:], strict=True):
        out, total = merge(out, total, *piece)
    truth = (weights[..., None] * outs.double()).sum(0)
    assert (out - truth).norm() < 3e-7 * truth.norm()
    torch.testing.assert_close(total.double(), totals.double().logsumexp(0), rtol=1e-6, atol=0)


class Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write, but those of few numbers."""

    moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.moved_bytes += sum(x.nbytes for x in tree_leaves((args, out)) if getattr(x, "ndim", 0) == 4)
        return out


@pytest.mark.parametrize(("dtype", "item"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_what_merging_a_piece_reads_and_writes(dtype: torch.dtype, item: int) -> None:
    heads, tokens, size = 4, 64, 1024  # the totals are 1/1024 of it
    out, total = torch.zeros(1, heads, tokens, size), torch.zeros(1, heads, tokens)
    layer = AttentionShapes(Visibility(), heads, heads, size, size, item, 4, 4)
    other = torch.ones_like(out, dtype=dtype)
    with Moved() as counted:
        merge(out, total, other, total.clone())
    first, _ = passes([layer], [0, tokens, 2 * tokens])
    assert counted.moved_bytes == pytest.approx(first.merged_bytes, rel=0.01)


def test_masks_are_made_only_where_a_piece_is_seen_in_part() -> None:
    window, device = Visibility(window=10), torch.device("cpu")
    assert Visibility().mask(range(20, 30), range(20), device) is None
    assert window.mask(range(20, 24), range(14, 20), device) is None
    mask = window.mask(range(20, 24), range(10, 20), device)
    assert mask is not None
    assert mask.sum(1).tolist() == [9, 8, 7, 6]
    assert Visibility(block=8).first(23) == 16
    assert window.first(5) == 0


@pytest.mark.parametrize(
    "visible",
    [
        *(Visibility(), Visibility(window=5), Visibility(block=12), Visibility(documents=(0, 1, 9))),
        *(Visibility(window=5, documents=(0, 3, 30)), Visibility(block=4, documents=(0, 3, 30))),
    ],
)
@pytest.mark.parametrize("length", [1, 4, 12, 40])
def test_pairs_of_queries_and_keys(visible: Visibility, length: int) -> None:
    seen = [position - visible.first(position) + 1 for position in range(length)]
    assert visible.pairs(length) == sum(seen)
