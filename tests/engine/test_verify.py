"""`memory.verify`: what recomputation rebuilds is compared with what forward had."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hf_actswap
from hf_actswap import MemoryPlan, load_config
from hf_actswap.engine.autograd_state import packs_seen, running_backward
from hf_actswap.engine.verify import Checksums, SavedByRun, Verifier, row_sums
from hf_actswap.plan.opnames import OpStack
from tests.engine.tiny_models import tiny_llama

WHOLE = {"recompute_config": {"recompute": True}}
ONE_BY_ONE = {"recompute_config": {"select_recompute": {"mlp": [4]}}}
LAYER = 2
Factor = Callable[[], float]


@dataclass
class Holder:
    """State of a kind that no rule restores."""

    count: int = 0

    def next(self) -> float:
        self.count += 1
        return 1 + self.count / 64


class OfClass:
    count = 0

    @classmethod
    def next(cls) -> float:
        cls.count += 1
        return 1 + cls.count / 64


def _from_environment() -> float:
    os.environ["ACTSWAP_TEST"] = str(int(os.environ.get("ACTSWAP_TEST", "0")) + 1)
    return 1 + int(os.environ["ACTSWAP_TEST"]) / 64


def _from_file(folder: Path) -> Factor:
    (path := folder / "count").write_text("")

    def read() -> float:
        path.write_text(path.read_text() + "x")
        return 1 + path.stat().st_size / 64

    return read


def _of_thread() -> Factor:
    own = threading.local()

    def read() -> float:
        own.count = getattr(own, "count", 0) + 1
        return 1 + own.count / 64 + threading.get_ident() % 7 / 1024

    return read


def _in_closure() -> Factor:
    counts: list[int] = []

    def read() -> float:
        counts.append(1)
        return 1 + len(counts) / 64

    return read


def _cached() -> Factor:
    numbers = itertools.count(1)

    @cache
    def known(number: int) -> float:
        return 1 + number / 64

    return lambda: known(next(numbers))


def _generator() -> Factor:
    def values() -> Iterator[float]:
        for number in itertools.count(1):
            yield 1 + number / 64

    running = values()
    return lambda: next(running)


def _in_namespace() -> Factor:
    held = SimpleNamespace(count=0)

    def read() -> float:
        held.count += 1
        return 1 + held.count / 64

    return read


def _of_function() -> Factor:
    def read() -> float:
        vars(read)["count"] = vars(read).get("count", 0) + 1
        return 1 + vars(read)["count"] / 64

    return read


PLANTED: dict[str, Callable[[Path], Factor]] = {
    "an object": lambda _: Holder().next,
    "a class": lambda _: OfClass.next,
    "the environment": lambda _: _from_environment,
    "a file": _from_file,
    "a thread's own": lambda _: _of_thread(),
    "a closure": lambda _: _in_closure(),
    "a cache": lambda _: _cached(),
    "a generator": lambda _: _generator(),
    "a namespace": lambda _: _in_namespace(),
    "a function's attribute": lambda _: _of_function(),
    "random bytes": lambda _: lambda: 1 + int.from_bytes(os.urandom(4)) / 2**34,
    "an iterator": lambda _: map(lambda number: 1 + number / 64, itertools.count(1)).__next__,
}


class Changing(nn.Module):
    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self._read = (factor,)  # inside a tuple, so that it is no attribute that could be restored

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(hidden * self._read[0]())


def model_with(factor: Factor | None) -> nn.Module:
    model = tiny_llama(num_hidden_layers=4)
    if factor is not None:
        model.model.layers[LAYER].mlp.act_fn = Changing(factor)
    return model


def train(model: nn.Module, config: dict[str, Any], steps: int = 3) -> hf_actswap.AppliedPlan:
    applied = hf_actswap.apply(model, config)
    ids = torch.arange(24).reshape(2, 12) % 20
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
    assert isinstance(applied, hf_actswap.AppliedPlan)
    return applied


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "memory.verify" in one.getMessage()]


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("config", [WHOLE, ONE_BY_ONE], ids=["layers", "ops"])
def test_what_changes_is_found(
    planted: str, config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        applied = train(model_with(PLANTED[planted](tmp_path)), config)
        applied.remove()
    (line,) = warned(caplog)  # once, in three steps
    assert f"layers {LAYER}" in line
    if config is ONE_BY_ONE:
        row = applied.plan.row(LAYER, "mlp", None)
        assert row is not None
        assert row.fate == "keep"
        assert [one.where for one in applied.plan.adjustments] == ["memory.verify"]


def test_comparing_adds_no_ops_to_a_layer() -> None:
    """An op path with an ordinal names the same call of its layer, whether modules before it are compared."""
    again = {"select_recompute": {"input_layernorm": [4], "mlp": [4]}}
    seen = {}
    for when in ("off", "always"):
        model = tiny_llama(num_hidden_layers=4)
        applied = hf_actswap.apply(model, {"recompute_config": again, "memory": {"verify": when}})
        ids = torch.arange(24).reshape(2, 12) % 20
        names: list[tuple[str, int]] = []
        begin = OpStack.begin

        def noting(stack: OpStack, name: str, begin: Any = begin, names: Any = names) -> tuple[str, int]:
            names.append(begin(stack, name))
            return names[-1]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OpStack, "begin", noting)
            model(input_ids=ids, labels=ids).loss.backward()
        seen[when] = names
        applied.remove()
    assert seen["off"]
    assert seen["always"] == seen["off"]


class OtherInBackward(nn.Module):
    """Runs another function in backward, one that saves the same input."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        in_backward = running_backward() >= 0
        return nn.functional.gelu(hidden) if in_backward else nn.functional.silu(hidden)


@pytest.mark.parametrize("config", [WHOLE, ONE_BY_ONE], ids=["layers", "ops"])
def test_another_function_of_the_same_input_is_found(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its result is not read, as it follows from the input: that it is the same function is compared."""
    model = tiny_llama(num_hidden_layers=4)
    model.model.layers[LAYER].mlp.act_fn = OtherInBackward()
    with caplog.at_level(logging.WARNING):
        train(model, config, steps=1).remove()
    (line,) = warned(caplog)
    assert f"layers {LAYER}" in line


class Drifting(torch.autograd.Function):
    """A kernel whose result changes from call to call."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        Drifting.calls += 1
        return hidden * (1 + Drifting.calls / 64)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class Drifts(nn.Module):
    def __init__(self, between: Callable[..., torch.Tensor] | None) -> None:
        super().__init__()
        self.between = between

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        drifted: torch.Tensor = hf_actswap.adapt_mem_func_wrapper(Drifting, hidden)
        read = drifted if self.between is None else self.between(drifted, hidden)
        return nn.functional.silu(read) * hidden  # which saves `hidden`, so that to run again pays


@pytest.mark.parametrize(
    ("between", "ops", "kept"),
    [
        (None, ("Drifting", "silu"), "Drifting"),
        (torch.add, ("Drifting", "add", "silu"), "add"),
        (torch.mul, ("Drifting", "mul", "silu"), "Drifting"),
        (lambda one, _: one.double().float(), ("Drifting", "double", "float", "silu"), "float"),
    ],
    ids=["saved", "added", "multiplied", "cast"],
)
def test_a_kernel_that_changes_is_found_in_what_backward_reads(
    between: Callable[..., torch.Tensor] | None,
    ops: Sequence[str],
    kept: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of functions the results are compared that autograd saves: not what only other functions read."""
    model = tiny_llama(num_hidden_layers=4)
    model.model.layers[LAYER].mlp.act_fn = Drifts(between)
    again = {"select_recompute": {f"mlp.act_fn.{op}": [4] for op in ops}}
    with caplog.at_level(logging.WARNING):
        applied = train(model, {"recompute_config": again})
        applied.remove()
    (line,) = warned(caplog)
    assert line.startswith(f"memory.verify mlp.act_fn.{kept}, layers {LAYER}:")


def test_an_op_that_is_kept_has_the_gradients_of_its_forward() -> None:
    def second_step(config: dict[str, Any] | None) -> dict[str, torch.Tensor]:
        model = model_with(Holder().next)
        ids = torch.arange(24).reshape(2, 12) % 20
        applied = None if config is None else hf_actswap.apply(model, config)
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        model.model.layers[LAYER].mlp.act_fn._read = (Holder(5).next,)
        model(input_ids=ids, labels=ids).loss.backward()
        if applied is not None:
            applied.remove()
        return gradients(model)

    assert_equal(second_step(ONE_BY_ONE), second_step(None))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("config", [WHOLE, ONE_BY_ONE], ids=["layers", "ops"])
def test_what_does_not_change_is_left_alone(
    config: dict[str, Any], autocast: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Autocast casts a module's input for each projection in forward, and once, as a leaf, in backward."""
    found = {}
    for when in ("first", "always", "off"):
        model = tiny_llama(num_hidden_layers=4, attention_dropout=0.2)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            applied = train(model, {**config, "memory": {"verify": when}})
        assert applied.plan.adjustments == ()
        applied.remove()
        found[when] = gradients(model)
    assert not warned(caplog)
    assert_equal(found["always"], found["first"])
    assert_equal(found["off"], found["first"])


@pytest.mark.parametrize(("when", "finds"), [("first", False), ("always", True), ("off", False)])
def test_when_it_compares(when: str, finds: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The difference comes with the third step."""
    holder = Holder()

    def late() -> float:
        return holder.next() if holder.count else 1.0

    model = model_with(late)
    applied = train(model, {**ONE_BY_ONE, "memory": {"verify": when}}, steps=2)
    holder.count = 1
    ids = torch.arange(24).reshape(2, 12) % 20
    model(input_ids=ids, labels=ids).loss.backward()
    applied.remove()  # reads what the last step has compared
    assert bool(warned(caplog)) is finds


def test_without_it_nothing_is_found(caplog: pytest.LogCaptureFixture) -> None:
    train(model_with(Holder().next), {**WHOLE, "memory": {"verify": False}}).remove()
    assert not warned(caplog)


def test_plans_keep_it() -> None:
    assert load_config({"memory": {"verify": False}}).memory.verify == "off"  # YAML reads `off` so
    applied = train(tiny_llama(), {**WHOLE, "memory": {"verify": "always"}}, steps=1)
    applied.remove()
    assert MemoryPlan.from_json(applied.plan.to_json()).verify == "always"


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8)


@pytest.mark.parametrize("last", [5, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_checksums_change_with_any_bit(dtype: torch.dtype, last: int) -> None:
    """Whether the last dimension is a multiple of 64 bits or not."""
    verifier = Verifier("first")
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    tensor = torch.arange(12 * last).reshape(3, 4, last).to(dtype)
    known = verifier.checksum(tensor)
    for place in range(12 * last):
        for bit in (0, 3, 8 * dtype.itemsize - 2):
            other = tensor.clone()
            other.view(integers).view(-1)[place] ^= 1 << bit
            assert not torch.equal(verifier.checksum(other), known)
    for changed in (tensor.flip(0), tensor.flip(1), tensor.roll(1), tensor.transpose(0, 1).contiguous()):
        assert not torch.equal(verifier.checksum(changed), known)
    assert torch.equal(verifier.checksum(tensor.clone()), known)
    odd = torch.cat([tensor[..., :1], tensor], dim=-1)[..., 1:]
    for strided in (tensor.transpose(0, 2).contiguous().transpose(0, 2), odd):
        assert torch.equal(verifier.checksum(strided), known)


def test_checksums_of_what_cancels_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two elements that change by the same amount up and down are seen, unless they are in one row."""
    monkeypatch.setattr("hf_actswap.engine.verify._MOST_ROWS", 10)
    verifier, tensor = Verifier("first"), torch.zeros(2, 3, 7, dtype=torch.int32)
    known = verifier.checksum(tensor)
    for first, second in itertools.permutations(range(42), 2):
        other = tensor.clone()
        other.view(-1)[first] += 1
        other.view(-1)[second] -= 1
        assert torch.equal(verifier.checksum(other), known) is (first // 7 == second // 7)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 0, 2), (40_000,), (40_000, 2), (1, 3, 20_000, 2)])
def test_checksums_of_all_shapes(shape: tuple[int, ...]) -> None:
    verifier, tensor = Verifier("first"), torch.ones(shape)
    known = verifier.checksum(tensor)
    assert known.shape == ()
    assert all(count <= 16_384 for count, _ in verifier._weights)
    if tensor.numel():
        tensor.view(-1)[-1] = 2
        assert not torch.equal(verifier.checksum(tensor), known)


def test_checksums_do_not_depend_on_strides_that_do_not_count() -> None:
    """PyTorch takes a tensor for contiguous whatever the strides of its dimensions of size 1."""
    verifier, plain = Verifier("first"), torch.tensor([[1.0, 2.0]])
    odd = plain.as_strided((1, 2), (1, 1))
    assert odd.is_contiguous()
    assert torch.equal(verifier.checksum(odd), verifier.checksum(plain))


def test_what_is_not_compared() -> None:
    verifier, call = Verifier("first"), (0, "mlp", None)
    weight = nn.Parameter(torch.ones(3, 4))
    expect = verifier.of_call(call)
    assert expect is not None
    assert expect(weight) is None
    assert expect(weight.t()) is None
    assert expect(torch.ones(2, 2).to_sparse()) is None
    assert expect(torch.ones(2, 2, dtype=torch.complex128)) is None
    assert verifier.differing() == ()
    assert verifier.of_call(call) is not None  # nothing has been compared yet
    compare = expect(torch.ones(2))
    assert compare is not None
    compare(torch.ones(2))
    assert verifier.differing() == ()
    assert verifier.of_call(call) is None


Body = Callable[..., torch.Tensor]
RUN_INPUTS = torch.Generator().manual_seed(3)
HIDDEN = torch.randn(4, 8, generator=RUN_INPUTS).bfloat16()
SCALE, GATE, UP, DOWN = (torch.randn(8, generator=RUN_INPUTS), *torch.randn(3, 8, 8, generator=RUN_INPUTS))


def gated(
    hidden: torch.Tensor,
    act: Body = nn.functional.silu,
    factor: float | torch.Tensor | None = None,
    cast: torch.dtype = torch.bfloat16,
    written: float = 0.0,
) -> torch.Tensor:
    """A norm and a gated MLP, as a decoder layer has them."""
    wide = hidden.float()
    normed = (SCALE * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True)))).to(cast).float()
    product = act(normed @ GATE) * (normed @ UP)
    if written:
        with torch.no_grad():
            product.add_(written)
    return (product if factor is None else product * factor) @ DOWN.requires_grad_()


def checksums_of(verifier: Verifier, body: Body) -> Checksums:
    saved = SavedByRun(verifier)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        packs_seen(saved.add),
    ):
        body(HIDDEN.clone().requires_grad_() * torch.ones(8))
    return saved.checksums()


MASK = torch.arange(8.0)
OTHER_RUNS: dict[str, tuple[Body, Body]] = {
    "a factor of the gate": (gated, partial(gated, act=lambda gate: nn.functional.silu(gate * 2))),
    "a number after the product": (partial(gated, factor=1.0), partial(gated, factor=2.0)),
    "a mask": (partial(gated, factor=MASK), partial(gated, factor=MASK.flip(0))),
    "another activation": (gated, partial(gated, act=nn.functional.gelu)),
    "another kind of one": (
        partial(gated, act=nn.functional.gelu),
        partial(gated, act=partial(nn.functional.gelu, approximate="tanh")),
    ),
    "a cast that rounds": (gated, partial(gated, cast=torch.float16)),
    "a result that is written in place": (partial(gated, written=2.0), partial(gated, written=1.0)),
}


@pytest.mark.parametrize("runs", OTHER_RUNS)
def test_a_layer_that_computes_something_else_is_found(runs: str) -> None:
    first, second = OTHER_RUNS[runs]
    for before, again, found in ((first, first, ()), (second, second, ()), (first, second, ((0, "", None),))):
        verifier = Verifier("first")
        verifier.compare((0, "", None), checksums_of(verifier, before), checksums_of(verifier, again))
        assert verifier.differing() == found


def test_a_layer_reads_each_tensor_once_and_no_result_of_tensors_that_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the MLP: both projections. Of the norm: its input in fp32, the root, and the weight."""
    shapes: list[tuple[int, ...]] = []

    def noting(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(tensor.shape))
        return row_sums(tensor)

    def body(hidden: torch.Tensor) -> torch.Tensor:
        shapes.clear()
        return gated(hidden)

    monkeypatch.setattr("hf_actswap.engine.verify.row_sums", noting)
    checksums_of(Verifier("first"), body)
    weights = [(8,), (8, 8), (8, 8), (8, 8)]  # tensors here, no parameters
    assert sorted(shapes) == [(4, 1), (4, 8), (4, 8), (4, 8), *weights]
