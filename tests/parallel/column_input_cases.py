"""Cases: the shared input of column layers; G6, G11, T12, the order of events in backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hf_actswap.parallel import ColumnParallelLinear, LayerNorm, RowParallelLinear, SharedInput
from hf_actswap.parallel.column_input import linear
from tests.parallel.collective_calls import KINDS, wrapped
from tests.parallel.sharded_math import assert_close, part, same, summed, zero_gradients

HIDDEN, INNER, HEADS, LENGTH, BATCH, DIM = 32, 48, 4, 16, 2, 1
TOKENS = LENGTH * BATCH
FLOAT_BYTES = 4


class PlainBlock(nn.Module):
    """Attention without anything around it, on one process.

    Args:
        sizes: output sizes of the projections that share the input.
    """

    def __init__(self, *sizes: int, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.projections = nn.ModuleList(nn.Linear(HIDDEN, size, bias=bias) for size in sizes)
        self.out = nn.Linear(sizes[-1], HIDDEN, bias=bias)

    def shared(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.core(*self.projected(self.shared(x))))

    def projected(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [projection(x) for projection in self.projections]

    def core(self, *projected: torch.Tensor) -> torch.Tensor:
        if len(projected) == 2:
            gate, up = projected
            return F.silu(gate) * up
        q, k, v = (tensor.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for tensor in projected)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class ParallelBlock(PlainBlock):
    """The same, divided among the ranks."""

    def __init__(
        self, full: PlainBlock, group: dist.ProcessGroup, sequence_parallel: bool = True, **shared: Any
    ) -> None:
        super().__init__(*(projection.out_features for projection in full.projections))
        settings: dict[str, Any] = {
            "sequence_parallel_enabled": sequence_parallel,
            "sequence_dimension": DIM,
            "tensor_model_parallel_group": group,
        }
        layers = [ColumnParallelLinear.from_linear(layer, **settings) for layer in full.projections]
        self.projections = nn.ModuleList(layers)
        self.out = RowParallelLinear.from_linear(full.out, **settings)
        self.shared = SharedInput(layers, **shared)


def attention() -> PlainBlock:
    return PlainBlock(HIDDEN, HIDDEN, HIDDEN)


def mlp() -> PlainBlock:
    return PlainBlock(INNER, INNER)


class Check:
    """A block and its reference, with their inputs.

    Args:
        plain: the reference.
        shared: arguments of `SharedInput`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        plain: PlainBlock | None = None,
        sequence_parallel: bool = True,
        **shared: Any,
    ) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self.plain = plain or attention()
        self.block = ParallelBlock(self.plain, group, sequence_parallel, **shared)
        self.x = same(BATCH, LENGTH, HIDDEN).requires_grad_()
        self.own = self.mine(self.x.detach()).clone().requires_grad_()
        self.gradient = same(BATCH, LENGTH, HIDDEN, seed=2)

    def mine(self, tensor: torch.Tensor) -> torch.Tensor:
        return part(tensor, DIM, self.group) if self.sequence_parallel else tensor

    def against(self, found: torch.Tensor, tolerance: float = 1e-6, times: int = 1) -> None:
        """Run the reference; compare the output, and the gradients that are there already."""
        zero_gradients([*self.plain.parameters(), self.x])
        wanted = self.plain(self.x)
        wanted.backward(self.gradient * times)
        assert_close(found, self.mine(wanted), tolerance)
        if self.own.requires_grad:
            assert_close(self.own.grad, self.mine(self.x.grad), tolerance)
        for layer, full in zip(self.block.projections, self.plain.projections, strict=True):
            if layer.weight.requires_grad:
                assert_close(layer.weight.grad, part(full.weight.grad, 0, self.group), tolerance)
            else:
                assert layer.weight.grad is None
        assert_close(self.block.out.weight.grad, part(self.plain.out.weight.grad, 1, self.group), tolerance)

    def gradients(self) -> list[torch.Tensor]:
        tensors = [self.own, *self.block.parameters()]
        return [tensor.grad.clone() for tensor in tensors if tensor.grad is not None]

    def forget(self) -> None:
        zero_gradients([*self.block.parameters(), self.own])


class Events(TorchDispatchMode):
    """Notes collectives (with an ``async`` mark), waits and matrix products, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.part = "forward"
        self.calls: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.seen.append(f"mm {list(result.shape)}")
        return result

    @contextmanager
    def noted(self) -> Iterator[Events]:
        with wrapped(self._noting, [*KINDS, "all_to_all_single"]), self:
            yield self

    def _noting(self, kind: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        events = self

        class Work:
            def __init__(self, work: Any) -> None:
                self._work = work

            def wait(self) -> None:
                events.seen.append(f"{kind} waited")
                self._work.wait()

        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            name = f"{kind} async" if async_op else kind
            self.seen.append(name)
            self.calls[self.part, name] += 1
            work = collective(*args, async_op=async_op, **kwargs)
            return Work(work) if async_op else work

        return call


@contextmanager
def _saved(found: list[torch.Tensor]) -> Iterator[None]:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _saved_bytes(tensors: list[torch.Tensor], parameters: Iterator[nn.Parameter]) -> int:
    """Bytes of the storages, without parameters."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return sum(size for place, size in storages.items() if place not in known)


def case_shared_input_matches_one_process(group: dist.ProcessGroup) -> None:
    for plain in (attention(), mlp(), PlainBlock(HIDDEN, HIDDEN, HIDDEN, bias=True)):
        for sequence_parallel in (True, False):
            for keep in (False, True):
                check = Check(group, plain, sequence_parallel, keep_gathered=keep)
                found = check.block(check.own)
                found.backward(check.mine(check.gradient))
                check.against(found)


def case_shared_input_without_gradients(group: dist.ProcessGroup) -> None:
    check = Check(group)
    with torch.no_grad():
        found = check.block(check.own)
    assert not found.requires_grad
    assert_close(found, check.mine(check.plain(check.x)))


def case_other_readers_of_the_input(group: dist.ProcessGroup) -> None:
    """A low-rank branch beside q, a cast of the input, and q used twice."""
    torch.manual_seed(3)
    down = nn.Parameter(same(4, HIDDEN, seed=5) / 10)
    up_full = same(HIDDEN, 4, seed=6) / 10
    up = nn.Parameter(part(up_full, 0, group))
    for sequence_parallel in (True, False):
        check = Check(group, sequence_parallel=sequence_parallel)
        x = check.block.shared(check.own)
        q, k, v = check.block.projected(x)
        q = q + F.linear(F.linear(x, down), up) + check.block.projections[0](x * 2)
        out = check.block.out(check.block.core(q, k + check.block.projections[1](x), v))
        zero_gradients([down, up])
        out.backward(check.mine(check.gradient))
        down_all = down.detach().clone().requires_grad_()
        up_all = up_full.clone().requires_grad_()

        def projected(
            x: torch.Tensor,
            plain: PlainBlock = check.plain,
            down_all: torch.Tensor = down_all,
            up_all: torch.Tensor = up_all,
        ) -> list[torch.Tensor]:
            q, k, v = PlainBlock.projected(plain, x)
            q = q + F.linear(F.linear(x, down_all), up_all) + plain.projections[0](x * 2)
            return [q, k + plain.projections[1](x), v]

        check.plain.projected = projected
        check.against(out, 2e-6)
        assert_close(summed(down.grad, group), down_all.grad, 2e-6)
        assert_close(up.grad, part(up_all.grad, 0, group), 2e-6)


def case_frozen_weights_save_nothing(group: dist.ProcessGroup) -> None:
    for sequence_parallel in (True, False):
        check = Check(group, sequence_parallel=sequence_parallel)
        check.block.projections[1].weight.requires_grad_(False)
        found = check.block(check.own)
        found.backward(check.mine(check.gradient))
        check.against(found)
        check.forget()
        check.block.projections.requires_grad_(False)
        saved: list[torch.Tensor] = []
        with _saved(saved):
            x = check.block.shared(check.own)
            projected = check.block.projected(x)
        assert _saved_bytes(saved, check.block.parameters()) == 0
        found = check.block.out(check.block.core(*projected))
        events = Events()
        with events.noted():
            found.backward(check.mine(check.gradient))
        assert "all_gather async" not in events.seen
        check.against(found)
        lone = ColumnParallelLinear.from_linear(
            check.plain.projections[0],
            sequence_parallel_enabled=sequence_parallel,
            sequence_dimension=DIM,
            tensor_model_parallel_group=group,
        ).requires_grad_(False)
        saved.clear()
        with _saved(saved):
            lone(check.own)
        assert _saved_bytes(saved, lone.parameters()) == 0


def case_input_that_needs_no_gradient(group: dist.ProcessGroup) -> None:
    for sequence_parallel in (True, False):
        check = Check(group, sequence_parallel=sequence_parallel)
        check.own.requires_grad_(False)
        found = check.block(check.own)
        events = Events()
        with events.noted():
            found.backward(check.mine(check.gradient))
        check.against(found)
        assert "reduce_scatter async" not in events.seen
        assert "all_reduce async" not in events.seen
        assert f"mm [{TOKENS}, {HIDDEN}]" not in events.seen


def case_checkpointed(group: dist.ProcessGroup) -> None:
    for reentrant in (False, True):
        for sequence_parallel in (True, False):
            for behind_the_gather in (False, True):
                check = Check(group, sequence_parallel=sequence_parallel)
                found = check.block(check.own)
                found.backward(check.mine(check.gradient))
                wanted = check.gradients()
                check.forget()
                block = check.block

                def rest(x: torch.Tensor, block: ParallelBlock = block) -> torch.Tensor:
                    return block.out(block.core(*block.projected(x)))

                if behind_the_gather:
                    again = checkpoint(rest, block.shared(check.own), use_reentrant=reentrant)
                else:
                    again = checkpoint(block, check.own, use_reentrant=reentrant)
                again.backward(check.mine(check.gradient))
                assert torch.equal(again, found)
                for one, other in zip(check.gradients(), wanted, strict=True):
                    if behind_the_gather and reentrant:
                        assert_close(one, other)
                    else:
                        assert torch.equal(one, other)


def case_backward_again(group: dist.ProcessGroup) -> None:
    check = Check(group)
    x = check.block.shared(check.own)
    found = check.block.out(check.block.core(*check.block.projected(x)))
    gradient = check.mine(check.gradient)
    # One that ends at the gathered input leaves nothing behind that a later one takes.
    torch.autograd.grad(found, x, gradient, retain_graph=True)
    (of_weight,) = torch.autograd.grad(found, check.block.projections[0].weight, gradient, retain_graph=True)
    found.backward(gradient, retain_graph=True)
    check.against(found)
    assert torch.equal(of_weight, check.block.projections[0].weight.grad)
    found.backward(gradient)
    check.against(found, times=2)
    with pytest.raises(RuntimeError, match="second time"):
        found.backward(gradient)


def case_second_derivative_is_rejected(group: dist.ProcessGroup) -> None:
    check = Check(group)
    found = check.block.projections[0](check.block.shared(check.own))
    (gradient,) = torch.autograd.grad(found.square().sum(), check.own, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def case_leaf_behind_the_gather(group: dist.ProcessGroup) -> None:
    """What a recomputed region that begins there is run on: as many saved tensors, right gradients."""
    check = Check(group)
    layer = check.block.projections[0]
    packs: list[list[torch.Tensor]] = [[], []]
    x = check.block.shared(check.own)
    with _saved(packs[0]):
        layer(x)
    leaf = x.detach().requires_grad_()
    with _saved(packs[1]):
        found = layer(leaf)
    assert [tensor.shape for tensor in packs[0]] == [tensor.shape for tensor in packs[1]]
    found.square().sum().backward()
    whole = check.x.detach().requires_grad_()
    F.linear(whole, layer.weight.detach()).square().sum().backward()
    assert_close(leaf.grad, whole.grad)
    weight = layer.weight.detach().clone().requires_grad_()
    F.linear(check.x.detach(), weight).square().sum().backward()
    assert_close(layer.weight.grad, weight.grad)


def case_in_place_changes_are_noticed(group: dist.ProcessGroup) -> None:
    check = Check(group)
    hidden = check.own * 1.0
    found = check.block(hidden)
    with torch.no_grad():
        hidden.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()
    dist.barrier(group=group)
    found = check.block(check.own)
    with torch.no_grad():
        check.block.projections[0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def case_autocast(group: dist.ProcessGroup) -> None:
    """As plain layers under autocast: each product in bfloat16, gradients off by a rounding at most."""
    for sequence_parallel in (True, False):
        for early in (False, True):
            check = Check(group, mlp(), sequence_parallel, in_autocast_dtype=early)
            saved: list[torch.Tensor] = []
            with torch.autocast("cpu", dtype=torch.bfloat16), _saved(saved):
                found = check.block(check.own)
                assert found.dtype == torch.bfloat16
            shards = [tensor for tensor in saved if tensor.shape == check.own.shape]
            kept = torch.bfloat16 if early else torch.float32
            assert [tensor.dtype for tensor in shards] == [kept]
            gradient = check.gradient.bfloat16()
            found.backward(check.mine(gradient))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                wanted = check.plain(check.x)
            wanted.backward(gradient)
            rounding = 2.0**-7
            assert_close(check.own.grad, check.mine(check.x.grad), rounding)
            assert check.own.grad.dtype == torch.float32
            for layer, full in zip(check.block.projections, check.plain.projections, strict=True):
                assert layer.weight.grad.dtype == torch.float32
                assert_close(layer.weight.grad, part(full.weight.grad, 0, group), rounding)
            first, full = check.block.projections[0], check.plain.projections[0]
            x = check.x.detach().requires_grad_()
            whole = F.linear(x.bfloat16(), full.weight.detach().bfloat16())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                alone = first(check.block.shared(check.own))
            assert torch.equal(alone, part(whole, -1, group))


def case_g6_saved_tensors(group: dist.ProcessGroup) -> None:
    """A rank saves 1/tp of what one process saves, and never a whole hidden state."""
    tp = group.size()
    token_bytes = TOKENS * FLOAT_BYTES // tp
    formulas = {  # shard, q, k, v, output of the core and its log-sum-exp; shard, gate, silu, up, product
        "attention": (attention(), token_bytes * (5 * HIDDEN + HEADS)),
        "mlp": (mlp(), token_bytes * (HIDDEN + 4 * INNER)),
    }
    for name, (plain, wanted) in formulas.items():
        check = Check(group, plain)
        saved: list[torch.Tensor] = []
        with _saved(saved):
            check.block(check.own)
        found = _saved_bytes(saved, check.block.parameters())
        assert found == wanted, (name, found, wanted)
        assert all(tensor.numel() < TOKENS * HIDDEN for tensor in saved)
        whole: list[torch.Tensor] = []
        with _saved(whole):
            plain(check.x)
        assert found * tp == _saved_bytes(whole, plain.parameters())
        kept = Check(group, plain, keep_gathered=True)
        saved.clear()
        with _saved(saved):
            kept.block(kept.own)
        more = TOKENS * HIDDEN * FLOAT_BYTES - token_bytes * HIDDEN
        assert _saved_bytes(saved, kept.block.parameters()) == wanted + more


def case_g11_collectives_per_block(group: dist.ProcessGroup) -> None:
    expected = {
        (True, False): {
            ("forward", "all_gather"): 1,
            ("forward", "reduce_scatter"): 1,
            ("backward", "all_gather"): 1,
            ("backward", "all_gather async"): 1,  # the shard again
            ("backward", "reduce_scatter async"): 1,
        },
        (True, True): {
            ("forward", "all_gather"): 1,
            ("forward", "reduce_scatter"): 1,
            ("backward", "all_gather"): 1,
            ("backward", "reduce_scatter async"): 1,
        },
        (False, False): {("forward", "all_reduce"): 1, ("backward", "all_reduce async"): 1},
    }
    for plain in (attention(), mlp()):
        for (sequence_parallel, keep), wanted in expected.items():
            check = Check(group, plain, sequence_parallel, keep_gathered=keep)
            events = Events()
            with events.noted():
                found = check.block(check.own)
                events.part = "backward"
                found.backward(check.mine(check.gradient))
            assert dict(events.calls) == wanted


def case_t12_collectives_per_layer(group: dist.ProcessGroup) -> None:
    settings = {"sequence_parallel_enabled": True, "tensor_model_parallel_group": group}
    column = ColumnParallelLinear(8, 16, gather_output=False, **settings)
    row = RowParallelLinear(16, 8, input_is_parallel=True, **settings)
    norm = LayerNorm(8, sequence_parallel_enabled=True)
    whole, own = same(8, 16), part(same(8, 8), 0, group)
    for layer, x, wanted in (
        (column, own, {"forward all_gather", "backward all_gather async", "backward reduce_scatter async"}),
        (row, part(whole, -1, group), {"forward reduce_scatter", "backward all_gather"}),
        (norm, own, set()),
    ):
        events = Events()
        with events.noted():
            found = layer(x.requires_grad_())
            events.part = "backward"
            found.sum().backward()
        assert {" ".join(key) for key in events.calls} == wanted
        assert set(events.calls.values()) <= {1}


def case_order_of_events(group: dist.ProcessGroup) -> None:
    """The gather runs beside the dX products, the reduction beside the dW products."""
    tp = group.size()
    to_input, to_weight = f"mm [{TOKENS}, {HIDDEN}]", f"mm [{INNER // tp}, {HIDDEN}]"
    for sequence_parallel in (True, False):
        check = Check(group, mlp(), sequence_parallel)
        x = check.block.shared(check.own)
        projected = check.block.projected(x)
        events = Events()
        with events.noted():
            torch.autograd.backward(projected, [torch.ones_like(tensor) for tensor in projected])
        if sequence_parallel:
            assert events.seen == [
                "all_gather async",
                to_input,
                to_input,
                "reduce_scatter async",
                "all_gather waited",
                to_weight,
                to_weight,
                "reduce_scatter waited",
            ]
        else:
            assert events.seen == [
                to_input,
                to_input,
                "all_reduce async",
                to_weight,
                to_weight,
                "all_reduce waited",
            ]


class _Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def case_names_seen_by_a_function_mode(group: dist.ProcessGroup) -> None:
    for sequence_parallel, wanted in (
        (True, ["all_gather", "linear", "linear", "silu", "mul", "linear", "reduce_scatter"]),
        (False, ["linear", "linear", "silu", "mul", "linear", "all_reduce"]),
    ):
        check = Check(group, mlp(), sequence_parallel)
        with _Names() as names:
            found = check.block(check.own)
        ops = {"all_gather", "linear", "silu", "mul", "all_reduce", "reduce_scatter"}
        assert [name for name in names.seen if name in ops] == wanted
        found.backward(check.mine(check.gradient))
        check.against(found)


def case_unknown_weight_goes_the_ordinary_way(group: dist.ProcessGroup) -> None:
    check = Check(group)
    x = check.block.shared(check.own)
    other = nn.Parameter(same(8, HIDDEN, seed=9))
    saved: list[torch.Tensor] = []
    with _saved(saved):
        y = linear(x, other, group)
    assert any(tensor.shape[-1] == HIDDEN and tensor.numel() == TOKENS * HIDDEN for tensor in saved)
    y.sum().backward()
    reference = other.detach().clone().requires_grad_()
    F.linear(check.x, reference).sum().backward()
    assert_close(other.grad, reference.grad)
    assert_close(check.own.grad, check.mine(check.x.grad) * group.size())


def case_compiled(group: dist.ProcessGroup) -> None:
    """Compiled, the input is gathered and the products are plain ones."""
    for sequence_parallel in (True, False):
        check = Check(group, mlp(), sequence_parallel)
        found = torch.compile(check.block, backend="eager")(check.own)
        found.backward(check.mine(check.gradient))
        check.against(found)
        torch.compiler.reset()
