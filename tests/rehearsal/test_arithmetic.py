"""On the rehearsal's device (`make rehearse`): ops give there what they give on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.rehearsal

Op = Callable[..., torch.Tensor]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


INDEX = torch.tensor([3, 0, 3, 2])
OPS: dict[str, tuple[Op, tuple[torch.Tensor, ...]]] = {
    "mean": (lambda x: x.mean(-1), (rand(3, 5),)),
    "prod": (lambda x: x.prod(-1), (rand(3, 5),)),
    "lgamma": (lambda x: x.lgamma(), (rand(3, 5),)),
    "erfinv in place": (lambda x: x.clone().erfinv_(), (rand(3, 5),)),
    "lgamma in place, in half precision": (
        lambda x: x.clone().lgamma_(),
        (rand(3, 5, dtype=torch.bfloat16),),
    ),
    "exp2 into another tensor": (
        lambda x: x * torch.exp2(x.detach(), out=torch.empty_like(x.detach())),
        (rand(3, 5),),
    ),
    "exp2 into an empty one": (
        lambda x: x * torch.exp2(x.detach(), out=torch.empty(0, device=x.device)),
        (rand(3, 5),),
    ),
    "cumsum": (lambda x: x.cumsum(0), (rand(3, 5),)),
    "index": (lambda x: x[INDEX.to(x.device)], (rand(4, 5),)),
    "mask": (lambda x: x[x > 0.5], (rand(4, 5),)),
    "masked_fill": (lambda x: x.masked_fill(x > 0.5, 0), (rand(4, 5),)),
    "index_add": (lambda x, y: x.index_add(0, INDEX.to(x.device), y), (rand(4, 5), rand(4, 5) * 2)),
    "index_put": (
        lambda x, y: x.index_put((INDEX.to(x.device),), y, accumulate=True),
        (rand(4, 5), rand(4, 5) * 2),
    ),
    "index_copy": (lambda x: x.index_copy(0, INDEX[:2].to(x.device), x[:2] * 3), (rand(4, 5),)),
    "gather": (lambda x: x.gather(0, INDEX[:, None].to(x.device)), (rand(4, 5),)),
    "scatter": (lambda x: x.scatter_add(0, INDEX[:, None].expand(4, 5).to(x.device), x), (rand(4, 5),)),
    "scatter_reduce": (
        lambda x: x.scatter_reduce(0, INDEX[:, None].expand(4, 5).to(x.device), x, "amax"),
        (rand(4, 5),),
    ),
    "sort": (lambda x: x.sort(-1).values, (rand(4, 50),)),
    "argsort": (lambda x: x.argsort(-1).float() + 0 * x, (rand(4, 50),)),
    "topk": (lambda x: x.topk(3).values, (rand(4, 50),)),
    "nonzero": (lambda x: (x > 0.5).nonzero().float() * x.sum(), (rand(4, 5),)),
    "where": (lambda x: torch.where(x > 0.5, x, -x), (rand(4, 5),)),
    "bincount": (lambda x: INDEX.to(x.device).bincount(minlength=6) * x.sum(), (rand(2),)),
    "histc": (  # the CPU counts no whole numbers
        lambda x: torch.histc(INDEX.to(x.device, torch.int if x.is_cuda else torch.float), 4, 0, 3) * x.sum(),
        (rand(2),),
    ),
    "unique": (lambda x: INDEX.to(x.device).unique() * x.sum(), (rand(2),)),
    "repeat": (lambda x: x.repeat_interleave(INDEX.to(x.device), 0), (rand(4, 5),)),
    "one_hot": (lambda x: F.one_hot(INDEX.to(x.device)) * x.sum(), (rand(2),)),
    "cat": (lambda x: torch.cat([x, x.t().contiguous().t() * 2]), (rand(4, 5),)),
    "stack": (lambda x: torch.stack([x, x * 2]).roll(1, 0), (rand(4, 5),)),
    "embedding": (lambda w: F.embedding(INDEX.to(w.device), w), (rand(4, 5),)),
    "linear": (F.linear, (rand(3, 4), rand(5, 4), rand(5))),
    "softmax": (lambda x: x.softmax(-1, dtype=torch.float32), (rand(3, 5, dtype=torch.bfloat16),)),
    "log_softmax": (lambda x: x.log_softmax(-1, dtype=torch.float32), (rand(3, 5, dtype=torch.bfloat16),)),
    "cross_entropy": (lambda x: F.cross_entropy(x, INDEX[:3].to(x.device)), (rand(3, 5),)),
    "cross_entropy in half": (
        lambda x: F.cross_entropy(x.float(), INDEX[:3].to(x.device)),
        (rand(3, 5, dtype=torch.bfloat16),),
    ),
    "layer_norm": (lambda x, w: F.layer_norm(x, (8,), w), (rand(3, 8), rand(8))),
    "layer_norm in half": (
        lambda x, w: F.layer_norm(x, (8,), w),
        (rand(3, 8, dtype=torch.bfloat16), rand(8, dtype=torch.bfloat16)),
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w, 1e-6), (rand(3, 8), rand(8))),
    "gelu": (F.gelu, (rand(3, 8),)),
    "silu": (F.silu, (rand(3, 8, dtype=torch.bfloat16),)),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1, groups=4), (rand(2, 4, 9), rand(4, 1, 3))),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2, dilation=2),
        (rand(2, 4, 9, 8).to(memory_format=torch.channels_last), rand(6, 4, 3, 2), rand(6)),
    ),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1, groups=2),
        (rand(2, 4, 5, 6), rand(4, 3, 3, 2), rand(6)),
    ),
    "norm": (lambda x: torch.linalg.vector_norm(x), (rand(3, 8),)),
    "solve": (lambda x: torch.linalg.solve(x @ x.t() + torch.eye(4, device=x.device), x), (rand(4, 4),)),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), (rand(3, 4), rand(5, 4))),
    "foreach_norm": (lambda x: torch.stack(torch._foreach_norm([x, x * 2])), (rand(3, 4),)),
}


def results(op: Op, inputs: tuple[torch.Tensor, ...], device: str) -> list[torch.Tensor]:
    """The result, and the gradient of each input."""
    here = [one.to(device).requires_grad_() for one in inputs]
    out = op(*here)
    weights = (rand(*out.shape) if out.dim() else torch.ones(())).to(device, out.dtype)
    gradients = torch.autograd.grad(out, here, weights, allow_unused=True)
    return [out.detach().cpu(), *(one.cpu() for one in gradients if one is not None)]


@pytest.mark.parametrize("name", OPS)
def test_an_op_and_its_backward(name: str) -> None:
    op, inputs = OPS[name]
    for found, expected in zip(results(op, inputs, "cuda"), results(op, inputs, "cpu"), strict=True):
        assert found.dtype == expected.dtype
        assert torch.isfinite(found).all(), "memory that nobody has written is NaN"
        tolerance = 0.02 if inputs[0].dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["causal", "whole", "masked", "grouped"])
def test_fused_attention(backend: str, form: str) -> None:
    heads = 2 if form == "grouped" else 4
    if (backend, form) in (("flash", "masked"), ("efficient", "grouped")):
        pytest.skip("PyTorch's kernel does not take it")
    mask = torch.ones(40, 40, dtype=torch.bool).tril(3) if form == "masked" else None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        chosen = BACKENDS[backend] if q.is_cuda else SDPBackend.MATH
        with sdpa_kernel(chosen):
            seen = None if mask is None else mask.to(q.device)
            causal = form in ("causal", "grouped")
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=causal, scale=0.2, enable_gqa=form == "grouped"
            )

    shapes = ((2, 4, 40, 16), (2, heads, 40, 16), (2, heads, 40, 16))
    inputs = tuple(rand(*shape, dtype=torch.bfloat16) * (1 + i) for i, shape in enumerate(shapes))
    for found, expected in zip(results(attend, inputs, "cuda"), results(attend, inputs, "cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn"])
def test_dropout_of_attention_is_the_same_backward(backend: str) -> None:
    """The gradient of v says which weights were dropped."""
    q = torch.zeros(1, 1, 32, 16, device="cuda", dtype=torch.bfloat16)
    v = torch.eye(32, 16, device="cuda", dtype=torch.bfloat16).view(1, 1, 32, 16).requires_grad_()
    with sdpa_kernel(BACKENDS[backend]):
        out = F.scaled_dot_product_attention(q, q, v, dropout_p=0.5)
    out[0, 0, 3].sum().backward()
    assert v.grad is not None
    kept = out[0, 0, 3] > 0
    assert 0 < int(kept.sum()) < 16
    assert torch.equal(v.grad[0, 0, :16, 0] > 0, kept)


def test_dropout_repeats_by_the_devices_generator() -> None:
    x = torch.ones(1000, device="cuda")
    torch.cuda.manual_seed(3)
    first, second = F.dropout(x, 0.25), F.dropout(x, 0.25)
    state = torch.cuda.get_rng_state()
    third = F.dropout(x, 0.25)
    torch.cuda.set_rng_state(state)
    assert torch.equal(F.dropout(x, 0.25), third)
    torch.cuda.manual_seed(3)
    assert torch.equal(F.dropout(x, 0.25), first)
    assert not torch.equal(first, second)
    assert 600 < int((first > 0).sum()) < 900
    assert float(first.max()) == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: torch.randn(64, device="cuda", generator=g),
        lambda g: torch.randint(0, 99, (64,), device="cuda", generator=g),
        lambda g: torch.randperm(64, device="cuda", generator=g),
        lambda g: torch.multinomial(torch.ones(64, device="cuda"), 8, generator=g),
        lambda g: torch.empty(64, device="cuda").exponential_(generator=g),
    ],
)
def test_random_numbers_follow_the_seed(draw: Callable[[torch.Generator], torch.Tensor]) -> None:
    one, other = (torch.Generator("cuda").manual_seed(5) for _ in range(2))
    first, second = draw(one), draw(one)
    assert torch.equal(first, draw(other))
    assert torch.equal(second, draw(other))
    assert not torch.equal(first, second)


OPTIMIZERS = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "SGD fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer(name: str) -> None:
    found = []
    for device in ("cuda", "cpu"):
        weights = [nn.Parameter(rand(4, 5).to(device)), nn.Parameter(rand(7).to(device))]
        optimizer = OPTIMIZERS[name](weights)
        for step in range(3):
            for weight in weights:
                weight.grad = torch.sin(weight.detach() * (step + 1))
            nn.utils.clip_grad_norm_(weights, 0.5)
            optimizer.step()
        found.append([weight.detach().cpu() for weight in weights])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_products_in_another_type() -> None:
    a, b = rand(3, 8, dtype=torch.bfloat16).cuda(), rand(8, 5, dtype=torch.bfloat16).cuda()
    expected = a.cpu().float() @ b.cpu().float()
    assert torch.equal(torch.mm(a, b, out_dtype=torch.float32).cpu(), expected)
    out = torch.ones(3, 5, device="cuda")
    assert torch.equal(torch.addmm(out, a, b, out_dtype=torch.float32).cpu(), expected + 1)
    batches = torch.bmm(a[None], b[None], out_dtype=torch.float32)
    assert torch.equal(batches[0].cpu(), expected)


def test_grouped_products() -> None:
    rows, matrices = rand(24, 16, dtype=torch.bfloat16), rand(3, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([8, 8, 24], dtype=torch.int32)
    found = F.grouped_mm(rows.cuda(), matrices.cuda(), offs=ends.cuda()).cpu()
    torch.testing.assert_close(found[:8], rows[:8] @ matrices[0])
    torch.testing.assert_close(found[8:], rows[8:] @ matrices[2])


def test_checkpoints_and_threads() -> None:
    weight = nn.Parameter(rand(4, 4).cuda())
    found = []

    def train() -> None:
        torch.cuda.manual_seed(1)
        x = rand(3, 4).cuda()
        out = checkpoint(lambda y: F.dropout(y @ weight, 0.5), x, use_reentrant=False)
        found.append(torch.autograd.grad(out.sum(), weight)[0].cpu())

    train()
    other = threading.Thread(target=train)
    other.start()
    other.join()
    torch.cuda.manual_seed(1)
    expected = torch.autograd.grad(F.dropout(rand(3, 4).cuda() @ weight, 0.5).sum(), weight)[0].cpu()
    assert all(torch.equal(one, expected) for one in found)
    assert len(found) == 2
    assert float(expected.abs().sum()) > 0


def test_what_has_no_arithmetic_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match=r"rehearsal: aten::_thnn_fused_gru_cell has no arithmetic"):
        nn.GRUCell(4, 4).cuda()(torch.ones(2, 4, device="cuda"))


def test_compilation_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"a rehearsal cannot run torch\.compile"):
        torch.compile(lambda x: x + 1)(torch.ones(2, device="cuda"))
    with pytest.raises(RuntimeError, match=r"a rehearsal cannot run torch\.compile"):
        nn.Linear(2, 2).compile()


def test_uninitialised_memory_is_nan() -> None:
    assert torch.empty(100, device="cuda").isnan().all()
