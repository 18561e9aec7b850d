"""Cases: mappings, layers and their parameters against one process; what is rejected.

Golden cases T1 to T5, T8 to T10, T18, G4, G5, G7.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_actswap.parallel import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    LayerNorm,
    ParallelEmbedding,
    Partition,
    RMSNorm,
    RowParallelLinear,
    SharedInput,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region_with_dim,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    reduce_scatter_to_tensor_model_parallel_region_with_dim,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
    tensor_parallel_group,
)
from hf_actswap.parallel.mappings import all_gather, all_reduce, copied, reduce_scatter
from tests.parallel.collective_calls import KINDS, Collective, wrapped
from tests.parallel.sharded_math import alone, assert_close, from_all, part, same, summed

HIDDEN, INNER, LENGTH, BATCH = 16, 24, 8, 3


def case_t1_copy_and_reduce(group: dist.ProcessGroup) -> None:
    total = float(sum(range(group.size())))
    own = torch.full((4, 8), float(group.rank()))
    x = own.clone().requires_grad_()
    copied = copy_to_tensor_model_parallel_region(x, group)
    assert torch.equal(copied, own)
    copied.backward(own)
    assert torch.equal(x.grad, torch.full_like(own, total))
    y = own.clone().requires_grad_()
    reduced = reduce_from_tensor_model_parallel_region(y, group)
    assert torch.equal(reduced, torch.full_like(own, total))
    assert torch.equal(y.detach(), own)
    reduced.backward(own)
    assert torch.equal(y.grad, own)


def case_t2_gather_from_sequence(group: dist.ProcessGroup) -> None:
    tp = group.size()
    x = torch.full((4,), float(group.rank())).requires_grad_()
    whole = gather_from_sequence_parallel_region(x, process_group=group)
    assert whole.tolist() == [float(rank) for rank in range(tp) for _ in range(4)]
    whole.backward(torch.arange(tp).repeat_interleave(4).float())
    assert torch.equal(x.grad, torch.full((4,), float(tp * group.rank())))


def case_t3_reduce_scatter(group: dist.ProcessGroup) -> None:
    tp, rank = group.size(), group.rank()
    x = torch.arange(tp, dtype=torch.float32).view(tp, 1).expand(tp, 4).clone().requires_grad_()
    row = reduce_scatter_to_sequence_parallel_region(x, process_group=group)
    assert torch.equal(row, torch.full((1, 4), float(tp * rank)))
    row.backward(torch.full((1, 4), float(rank)))
    assert torch.equal(x.grad, torch.arange(tp).view(tp, 1).expand(tp, 4).float())


def case_features_scattered_and_gathered(group: dist.ProcessGroup) -> None:
    tp = group.size()
    whole, gradient = same(2, 3, 4 * tp), same(2, 3, 4 * tp, seed=2)
    with tensor_parallel_group(group):
        x = whole.clone().requires_grad_()
        own = scatter_to_tensor_model_parallel_region(x)
        assert torch.equal(own, part(whole, -1, group))
        own.backward(part(gradient, -1, group))
        assert torch.equal(x.grad, gradient)
        y = part(whole, -1, group).requires_grad_()
        back = gather_from_tensor_model_parallel_region(y)
        assert torch.equal(back, whole)
        back.backward(gradient)
        assert torch.equal(y.grad, part(gradient, -1, group))
    z = part(same(2, 4 * tp, 3), 1, group).requires_grad_()
    back = gather_from_tensor_model_parallel_region_with_dim(z, 1, group)
    assert torch.equal(back, same(2, 4 * tp, 3))
    own = reduce_scatter_to_tensor_model_parallel_region_with_dim(back, 1, group)
    assert torch.equal(own, z.detach() * tp)


def case_reduce_in_place_outside_autograd(group: dist.ProcessGroup) -> None:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.full((3,), group.rank() + 1.0)
    reduce_from_tensor_model_parallel_region(weight.grad.data, group)  # the result thrown away
    assert weight.grad.tolist() == [sum(range(1, group.size() + 1))] * 3
    activation = weight * 1.0
    with torch.no_grad():
        before = activation.detach().clone()
        reduce_from_tensor_model_parallel_region(activation, group)
    assert torch.equal(activation.detach(), before)


def case_g4_boundary(group: dist.ProcessGroup) -> None:
    for dim in (0, 1):
        for sums, factor in ((False, 1), (True, group.size())):
            x = same(LENGTH, LENGTH).requires_grad_()
            own = scatter_to_sequence_parallel_region(x, dim, group)
            whole = gather_from_sequence_parallel_region(own, dim, sums, group)
            whole.square().sum().backward()
            assert_close(x.grad, 2.0 * factor * x)


def _mlp_reference(bias: bool, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(HIDDEN, INNER, bias), nn.GELU(), nn.Linear(INNER, HIDDEN, bias)).to(dtype)


def _column_and_row(
    group: dist.ProcessGroup, reference: nn.Sequential, sequence_parallel: bool, dim: int, tolerance: float
) -> None:
    settings = {
        "sequence_parallel_enabled": sequence_parallel,
        "sequence_dimension": dim,
        "tensor_model_parallel_group": group,
    }
    column = ColumnParallelLinear.from_linear(reference[0], **settings)
    row = RowParallelLinear.from_linear(reference[2], **settings)
    dtype = reference[0].weight.dtype
    x = same(BATCH, LENGTH, HIDDEN, dtype=dtype).requires_grad_()
    gradient = same(BATCH, LENGTH, HIDDEN, seed=2, dtype=dtype)
    wanted = reference(x)
    wanted.backward(gradient)
    own = (part(x, dim, group) if sequence_parallel else x.clone()).detach().requires_grad_()
    found = row(F.gelu(column(own)))
    mine = (lambda tensor: part(tensor, dim, group)) if sequence_parallel else (lambda tensor: tensor)
    assert_close(found, mine(wanted), tolerance)
    found.backward(mine(gradient))
    assert_close(own.grad, mine(x.grad), tolerance)
    assert_close(column.weight.grad, part(reference[0].weight.grad, 0, group), tolerance)
    assert_close(row.weight.grad, part(reference[2].weight.grad, 1, group), tolerance)
    if row.bias is not None:
        assert_close(column.bias.grad, part(reference[0].bias.grad, 0, group), tolerance)
        assert row.bias.sequence_parallel_enabled is sequence_parallel
        total = summed(row.bias.grad, group) if sequence_parallel else row.bias.grad
        assert_close(total, reference[2].bias.grad, tolerance)
        if sequence_parallel:  # the control: without the tagged sum it is wrong
            assert (row.bias.grad - reference[2].bias.grad).abs().max() > 1e-2


def case_column_and_row_match_linear(group: dist.ProcessGroup) -> None:
    for bias in (True, False):
        for sequence_parallel, dim in ((False, 0), (True, 0), (True, 1), (True, -2)):
            batch_dim_divides = dim != 0 or not sequence_parallel
            reference = _mlp_reference(bias)
            if batch_dim_divides:
                _column_and_row(group, reference, sequence_parallel, dim, 1e-6)


def case_double_is_summed_in_double(group: dist.ProcessGroup) -> None:
    """``reduce_dtype`` is float32 by default: a sum is never narrower than what is summed."""
    for sequence_parallel in (False, True):
        _column_and_row(group, _mlp_reference(True).double(), sequence_parallel, 1, 1e-14)
    x = (same(BATCH, LENGTH, HIDDEN).double() / 3).requires_grad_()
    wide = summed(x.detach(), group)
    assert torch.equal(all_reduce(x, group, torch.float32), wide)
    assert torch.equal(reduce_scatter(x, 1, group, None, torch.float32), part(wide, 1, group))
    for found in (copied(x, group, torch.float32), all_gather(x, 1, group, True, torch.float32)):
        gradient = found.detach() / 7
        (own,) = torch.autograd.grad(found, x, gradient)
        expected = summed(gradient, group)
        assert torch.equal(own, expected if found.shape == x.shape else part(expected, 1, group))


def case_transposed(group: dist.ProcessGroup) -> None:
    """As transformers' Conv1D has its weight: [in, out], parts of q, k and v."""
    full = Conv1D(3 * HIDDEN, HIDDEN)
    x, gradient = same(BATCH, LENGTH, HIDDEN).requires_grad_(), same(BATCH, LENGTH, 3 * HIDDEN, seed=2)
    full(x).backward(gradient)
    cut = Partition.of(1, 3 * HIDDEN, group.size(), 3)
    column = ColumnParallelLinear.from_linear(full, stride=3, tensor_model_parallel_group=group)
    own = x.detach().requires_grad_()
    mine = Partition.of(2, 3 * HIDDEN, group.size(), 3).part(gradient, group.rank())
    column(own).backward(mine)
    assert column.weight.shape == (HIDDEN, 3 * HIDDEN // group.size())
    assert_close(column.weight.grad, cut.part(full.weight.grad, group.rank()))
    assert_close(own.grad, x.grad)
    assert torch.equal(column.full_parameter("weight"), full.weight)
    row = RowParallelLinear.from_linear(Conv1D(HIDDEN, HIDDEN), tensor_model_parallel_group=group)
    assert row.weight.shape == (HIDDEN // group.size(), HIDDEN)


def case_sequence_first(group: dist.ProcessGroup) -> None:
    """Dim 0, as the document has it: [S, B, H]; and a single tensor [S, H] of one sequence."""
    reference = _mlp_reference(True)
    for shape in ((LENGTH, BATCH, HIDDEN), (LENGTH, HIDDEN)):
        settings = {"sequence_parallel_enabled": True, "tensor_model_parallel_group": group}
        column = ColumnParallelLinear.from_linear(reference[0], **settings)
        row = RowParallelLinear.from_linear(reference[2], **settings)
        x, gradient = same(*shape).requires_grad_(), same(*shape, seed=2)
        reference.zero_grad()
        reference(x).backward(gradient)
        own = part(x, 0, group).detach().requires_grad_()
        row(F.gelu(column(own))).backward(part(gradient, 0, group))
        assert_close(own.grad, part(x.grad, 0, group))
        assert_close(column.weight.grad, part(reference[0].weight.grad, 0, group))
        assert_close(row.weight.grad, part(reference[2].weight.grad, 1, group))


def case_t4_identity(group: dist.ProcessGroup) -> None:
    for of in (group, alone(group)):
        layer = ColumnParallelLinear(
            8, 8, bias=False, init_method=nn.init.ones_, tensor_model_parallel_group=of
        )
        layer.weight.requires_grad_(False)
        x = torch.eye(8).requires_grad_()
        output = layer(x)
        assert torch.equal(output, torch.ones(8, 8))
        output.sum().backward()
        assert torch.equal(x.grad, torch.full((8, 8), 8.0))


def case_t5_same_weights_at_any_size(group: dist.ProcessGroup) -> None:
    single, rank = alone(group), group.rank()

    def made(of: dist.ProcessGroup) -> dict[str, nn.Module]:
        torch.manual_seed(7)  # the default stream; what a rank draws elsewhere does not matter
        with tensor_parallel_group(of):
            return {
                "embedding": ParallelEmbedding(16, 4),
                "column": ColumnParallelLinear(16, 16, gather_output=False),
                "row": RowParallelLinear(16, 16, input_is_parallel=True),
                "stride": ColumnParallelLinear(16, 24, gather_output=False, stride=3),
                "bfloat16": RowParallelLinear(16, 16, dtype=torch.bfloat16),
                "gqa": GQAQKVColumnParallelLinear(16, [16, 8]),
            }

    whole, sharded = made(single), made(group)
    for name, module in sharded.items():
        for key, parameter in module.named_parameters():
            full = whole[name].get_parameter(key)
            partition = module.partitions.get(key)
            wanted = full if partition is None else partition.part(full, rank)
            assert torch.equal(parameter, wanted), (name, key)
    torch.manual_seed(7)
    nn.Embedding(16, 4)
    assert torch.equal(whole["column"].weight, (plain := nn.Linear(16, 16)).weight)
    assert torch.equal(whole["column"].bias, plain.bias)


def case_t8_master_weight(group: dist.ProcessGroup) -> None:
    torch.manual_seed(1234)
    length, batch, hidden = 128, 8, 256
    settings = {"sequence_parallel_enabled": True, "keep_master_weight": True, "bias": False}
    with tensor_parallel_group(group):
        column = ColumnParallelLinear(hidden, hidden, gather_output=False, **settings)
        row = RowParallelLinear(hidden, hidden, input_is_parallel=True, **settings)
    first, second = (layer.master_weight.clone().requires_grad_() for layer in (column, row))
    x, gradient = same(length, batch, hidden), same(length, batch, hidden, seed=2)
    wanted = F.linear(F.linear(x, first), second)
    wanted.backward(gradient)
    found = row(column(part(x, 0, group)))
    assert_close(found, part(wanted, 0, group), 1e-5)
    found.backward(part(gradient, 0, group))
    assert_close(column.weight.grad, part(first.grad, 0, group), 1e-5)
    assert_close(row.weight.grad, part(second.grad, 1, group), 1e-5)


def case_t9_shard_of_master(group: dist.ProcessGroup) -> None:
    tp = group.size()
    with tensor_parallel_group(group):
        column = ColumnParallelLinear(13 * tp, 17 * tp, keep_master_weight=True)
        row = RowParallelLinear(13 * tp, 17 * tp, keep_master_weight=True)
    assert torch.equal(column.weight, part(column.master_weight, 0, group))
    assert torch.equal(row.weight, part(row.master_weight, 1, group))
    assert column.bias.shape == (17 * tp,)  # of gathered output: full and not divided
    assert not hasattr(column.bias, "tensor_model_parallel")


def case_gathered_output_and_whole_input(group: dist.ProcessGroup) -> None:
    reference = _mlp_reference(True)
    column = ColumnParallelLinear.from_linear(
        reference[0], gather_output=True, tensor_model_parallel_group=group
    )
    row = RowParallelLinear.from_linear(
        reference[2], input_is_parallel=False, tensor_model_parallel_group=group
    )
    x = same(BATCH, LENGTH, HIDDEN).requires_grad_()
    reference(x).square().sum().backward()
    y = x.detach().clone().requires_grad_()
    row(F.gelu(column(y))).square().sum().backward()
    assert_close(y.grad, x.grad)
    assert_close(column.bias.grad, reference[0].bias.grad)
    assert_close(column.weight.grad, part(reference[0].weight.grad, 0, group))
    assert_close(row.weight.grad, part(reference[2].weight.grad, 1, group))


def case_t18_sizes_and_dtypes(group: dist.ProcessGroup) -> None:
    for sizes in ((400, 300), (8192, 2048)):
        if sizes[0] > 4096 and group.size() > 2:
            continue
        for kind in ("float32", "bfloat16", "mixed"):
            torch.manual_seed(5)
            dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
            reference = nn.Linear(*sizes, dtype=dtype)
            tolerance = 1e-5 if kind == "float32" else 1e-1
            x = same(4, 2, sizes[0], dtype=dtype).requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "mixed"):
                wanted = reference(x)
                wanted.float().sum().backward()
                for layer_type in (ColumnParallelLinear, RowParallelLinear):
                    layer = layer_type.from_linear(
                        reference,
                        tensor_model_parallel_group=group,
                        **({} if layer_type is ColumnParallelLinear else {"input_is_parallel": False}),
                    )
                    dim = 0 if layer_type is ColumnParallelLinear else 1
                    y = x.detach().clone().requires_grad_()
                    found = layer(y)
                    assert found.dtype == wanted.dtype
                    found.float().sum().backward()
                    assert_close(found, part(wanted, -1, group) if dim == 0 else wanted, tolerance)
                    assert_close(layer.weight.grad, part(reference.weight.grad, dim, group), tolerance)
                    assert_close(y.grad, x.grad, tolerance)


def case_g5_reduced_in_float32(group: dist.ProcessGroup) -> None:
    """The gradient that is returned is the one that was reduced."""
    for sequence_parallel in (False, True):
        torch.manual_seed(2)
        reference = nn.Linear(64, 128, bias=False)
        layer = ColumnParallelLinear.from_linear(
            reference, sequence_parallel_enabled=sequence_parallel, tensor_model_parallel_group=group
        ).to(torch.bfloat16)
        x = same(16, 64).to(torch.bfloat16)
        wide = x.float().requires_grad_()
        gradient = same(16, 128, seed=4)
        (reference(wide) * gradient).sum().backward()
        own = (part(x, 0, group) if sequence_parallel else x.clone()).requires_grad_()
        layer(own).backward(part(gradient, -1, group).to(torch.bfloat16))
        wanted = part(wide.grad, 0, group) if sequence_parallel else wide.grad
        assert own.grad.dtype == torch.bfloat16
        error = (own.grad.float() - wanted).abs().max() / wide.grad.abs().max()
        assert error < 2e-2, error


@contextmanager
def _noted_dtypes() -> Iterator[list[torch.dtype]]:
    """The dtypes in which is summed over the ranks."""
    dtypes: list[torch.dtype] = []

    def noting(_: str, collective: Collective) -> Collective:
        def call(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            dtypes.append(tensor.dtype)
            return collective(tensor, *args, **kwargs)

        return call

    with wrapped(noting, [name for name, kind in KINDS.items() if kind != "all_gather"]):
        yield dtypes


def case_reduce_dtype_is_obeyed(group: dist.ProcessGroup) -> None:
    """Sums of the ranks that bfloat16 cannot hold: 256 and ones."""
    value = 256.0 if group.rank() == 0 else 1.0
    exact = 256.0 + group.size() - 1
    layer = RowParallelLinear(
        group.size(),
        1,
        bias=False,
        input_is_parallel=True,
        init_method=nn.init.ones_,
        dtype=torch.bfloat16,
        tensor_model_parallel_group=group,
    )
    with _noted_dtypes() as dtypes:
        found = layer(torch.full((1, 1), value, dtype=torch.bfloat16))
        layer.reduce_dtype = None
        layer(torch.full((1, 1), value, dtype=torch.bfloat16))
    assert found.item() == torch.tensor(exact).bfloat16().item()
    assert found.dtype == torch.bfloat16
    assert dtypes == [torch.float32, torch.bfloat16]
    for sequence_parallel in (True, False):
        for dtype in (torch.float32, None):
            column = ColumnParallelLinear(
                8,
                8 * group.size(),
                gather_output=False,
                dtype=torch.bfloat16,
                sequence_parallel_enabled=sequence_parallel,
                reduce_dtype=dtype,
                tensor_model_parallel_group=group,
            )
            output = column(same(4, 8).bfloat16().requires_grad_())
            with _noted_dtypes() as dtypes:
                output.sum().backward()
            assert dtypes == [dtype or torch.bfloat16]


def case_g7_stride(group: dist.ProcessGroup) -> None:
    if group.size() != 2:
        return
    wanted = [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]][group.rank()]
    full = nn.Linear(2, 12)
    full.weight.data.copy_(torch.arange(12).view(12, 1).expand(12, 2))
    full.bias.data.copy_(torch.arange(12))
    layer = ColumnParallelLinear.from_linear(full, stride=3, tensor_model_parallel_group=group)
    assert layer.weight[:, 0].tolist() == wanted
    assert layer.bias.tolist() == wanted
    assert layer.weight.partition_stride == 3
    transposed = nn.Linear(12, 2)
    transposed.weight.data.copy_(full.weight.detach().t())
    row = RowParallelLinear.from_linear(transposed, stride=3, tensor_model_parallel_group=group)
    assert row.weight[0].tolist() == wanted


def case_t10_grouped_query(group: dist.ProcessGroup) -> None:
    length, batch, hidden, rank, tp = 16, 2, 32, group.rank(), group.size()
    for multiplier in {1, 2, tp}:
        for fused, gathers, sequence_parallel in (
            (True, False, True),
            (False, False, True),
            (False, True, False),
            (True, False, False),
        ):
            torch.manual_seed(9)
            kv = 8
            full = GQAQKVColumnParallelLinear(
                hidden, [32, kv], fuse_qkv=False, tensor_model_parallel_group=alone(group)
            )
            torch.manual_seed(9)
            layer = GQAQKVColumnParallelLinear(
                hidden,
                [32, kv],
                gather_output=gathers,
                sequence_parallel_enabled=sequence_parallel,
                kv_size_multiplier=multiplier,
                fuse_qkv=fused,
                tensor_model_parallel_group=group,
            )
            x = same(length, batch, hidden).requires_grad_()
            wanted = full(x)
            own = (part(x, 0, group) if sequence_parallel else x).detach().clone().requires_grad_()
            found = layer(own)
            blocks = (tp, tp // multiplier, tp // multiplier)
            places = (rank, rank // multiplier, rank // multiplier)

            def mine(tensor: torch.Tensor, number: int) -> torch.Tensor:
                if gathers:  # noqa: B023
                    return tensor
                return tensor.chunk(blocks[number], -1)[places[number]]  # noqa: B023

            # Each rank's loss reads its query features and the kv features beside them, as attention does.
            loss = torch.zeros(())
            for number in range(3):
                assert_close(found[number], mine(wanted[number], number))
            if gathers:
                loss = sum(output.square().sum() for output in found)
                sum(output.square().sum() for output in wanted).backward()
            else:
                weights = [1.0] if multiplier == 1 else [rank + 1.0]
                loss = found[0].square().sum()
                loss = loss + weights[0] * (found[1].square().sum() + found[2].pow(3).sum())
                # In one process: what all ranks' losses add up to.
                scale = torch.ones(tp) if multiplier == 1 else torch.arange(1.0, tp + 1)
                total = wanted[0].square().sum()
                for of in range(tp):
                    k, v = (wanted[n].chunk(tp // multiplier, -1)[of // multiplier] for n in (1, 2))
                    total = total + scale[of] * (k.square().sum() + v.pow(3).sum())
                total.backward()
            loss.backward()
            assert_close(own.grad, part(x.grad, 0, group) if sequence_parallel else x.grad, 1e-5)
            for name, parameter in layer.named_parameters():
                partition = layer.partitions[name]
                if name.endswith("qkv"):
                    kind = name.removesuffix("qkv")
                    grad = torch.cat([full.get_parameter(f"{kind}{which}").grad for which in "qkv"])
                else:
                    grad = full.get_parameter(name).grad
                assert_close(parameter.grad, partition.part(grad, rank), 1e-5)
                multiple = multiplier if name[-1] in "kv" and "qkv" not in name else 1
                assert getattr(parameter, "replicated_over", 1) == multiple
                if multiple > 1:
                    everyone = from_all(parameter.grad, group)
                    first = rank // multiple * multiple
                    assert all(
                        torch.equal(everyone[first], one) for one in everyone[first : first + multiple]
                    )


def case_embedding(group: dist.ProcessGroup) -> None:
    tp = group.size()
    for vocabulary in (8 * tp, 8 * tp - 3, 5):
        for padding in (None, 0, -1):
            torch.manual_seed(4)
            full = nn.Embedding(vocabulary, HIDDEN, padding_idx=padding)
            ids = torch.randint(0, vocabulary, (2, LENGTH), generator=torch.Generator().manual_seed(6))
            ids[0, :2] = torch.tensor([0, vocabulary - 1])
            gradient = same(2, LENGTH, HIDDEN)
            full(ids).backward(gradient)
            for sequence_dimension in (None, 0, 1):
                layer = ParallelEmbedding.from_embedding(
                    full,
                    sequence_parallel_enabled=sequence_dimension is not None,
                    sequence_dimension=sequence_dimension,
                    tensor_model_parallel_group=group,
                )

                def mine(tensor: torch.Tensor) -> torch.Tensor:
                    if sequence_dimension is None:  # noqa: B023
                        return tensor
                    tensor = tensor.transpose(0, 1) if sequence_dimension == 0 else tensor  # noqa: B023
                    return part(tensor, sequence_dimension, group)  # noqa: B023

                found = layer(ids)
                assert torch.equal(found, mine(full(ids)))
                found.backward(mine(gradient))
                partition = layer.partitions["weight"]
                assert_close(layer.weight.grad, partition.part(full.weight.grad, group.rank()))
                assert torch.equal(layer.full_parameter("weight"), full.weight.detach())
                fresh = copy.deepcopy(layer)
                nn.init.zeros_(fresh.weight)
                fresh.load_state_dict(full.state_dict())
                assert torch.equal(fresh.weight, layer.weight)
    across = ParallelEmbedding.from_embedding(
        full := nn.Embedding(7, 4 * tp), shard_across_embedding=True, tensor_model_parallel_group=group
    )
    found = across(ids % 7)
    dist.broadcast(full.weight.data, 0, group=group)
    across.load_state_dict(full.state_dict())
    found = across(ids % 7)
    assert torch.equal(found, full(ids % 7))
    full(ids % 7).square().sum().backward()
    found.square().sum().backward()
    assert_close(across.weight.grad, part(full.weight.grad, 1, group))


def case_norms(group: dist.ProcessGroup) -> None:
    norm = LayerNorm(HIDDEN, eps=1e-3, sequence_parallel_enabled=True)
    plain = nn.LayerNorm(HIDDEN, eps=1e-3)
    x = same(2, HIDDEN)
    assert torch.equal(norm(x), plain(x))
    assert norm.weight.sequence_parallel_enabled is True
    assert norm.bias.sequence_parallel_enabled is True
    assert copy.deepcopy(norm).to(torch.float64).weight.sequence_parallel_enabled is True
    assert LayerNorm(HIDDEN).weight.sequence_parallel_enabled is False
    rms = RMSNorm(HIDDEN, eps=1e-6, sequence_parallel_enabled=True)
    with torch.no_grad():
        rms.weight.copy_(same(HIDDEN, seed=3))
    low = x.bfloat16()
    wide = low.float()
    normalised = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(rms.bfloat16()(low), rms.weight * normalised)
    assert rms.weight.sequence_parallel_enabled is True


TAGS = ("tensor_model_parallel", "partition_dim", "partition_stride")


def _tags(parameter: nn.Parameter) -> list[object]:
    return [getattr(parameter, name, None) for name in TAGS]


def case_attributes_survive(group: dist.ProcessGroup) -> None:
    layer = ColumnParallelLinear(8, 12, gather_output=False, stride=3, tensor_model_parallel_group=group)
    row = RowParallelLinear(
        8, 4, sequence_parallel_enabled=True, input_is_parallel=True, tensor_model_parallel_group=group
    )
    wanted = [True, 0, 3]
    assert _tags(layer.weight) == _tags(layer.bias) == wanted
    assert _tags(row.weight) == [True, 1, 1]
    assert _tags(row.bias) == [None] * 3
    double = copy.deepcopy(layer)
    assert _tags(double.weight) == wanted
    assert double.tensor_model_parallel_group is group
    assert _tags(double.to(torch.float64).weight) == wanted
    assert _tags(double.to("meta").to_empty(device="cpu").weight) == wanted
    double.load_state_dict(layer.state_dict(), assign=True)
    assert _tags(double.weight) == wanted
    double.weight = nn.Parameter(torch.zeros_like(double.weight))
    assert _tags(double.weight) == wanted
    assert copy.deepcopy(row).double().bias.sequence_parallel_enabled is True


def case_pickled(group: dist.ProcessGroup) -> None:
    layer = ColumnParallelLinear(8, 4, gather_output=False, tensor_model_parallel_group=group)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    with pytest.raises(RuntimeError, match="no tensor-parallel group"):
        again(same(2, 8))
    with tensor_parallel_group(group):
        assert torch.equal(again(same(2, 8)), layer(same(2, 8)))
    assert _tags(again.weight) == [True, 0, 1]


def case_full_tensors_are_cut_when_loaded(group: dist.ProcessGroup) -> None:
    full = nn.ModuleDict({"up": nn.Linear(8, 24), "down": nn.Linear(24, 8)})
    for parameter in full.parameters():
        dist.broadcast(parameter.data, 0, group=group)
    with tensor_parallel_group(group):
        model = nn.ModuleDict(
            {
                "up": ColumnParallelLinear(8, 24, gather_output=False, stride=3),
                "down": RowParallelLinear(24, 8, input_is_parallel=True, stride=3),
            }
        )
    state = full.state_dict()
    model.load_state_dict(state)
    assert state["up.weight"].shape == (24, 8)  # the caller's stays as it is
    q = full["up"].weight.detach()[:8]
    assert torch.equal(model["up"].weight[: 8 // group.size()], part(q, 0, group))
    for key in ("up", "down"):
        assert torch.equal(model[key].full_parameter("weight"), full[key].weight.detach())
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())  # a rank's own
    assert torch.equal(again["up"].weight, model["up"].weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, "up.weight": torch.zeros(25, 8)})


def case_made_from_full_layers(group: dist.ProcessGroup) -> None:
    full = nn.Linear(8, 8, dtype=torch.bfloat16).eval()
    full.weight.requires_grad_(False)
    full.weight.noted = "yes"
    state = torch.get_rng_state()
    layer = ColumnParallelLinear.from_linear(full, tensor_model_parallel_group=group)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn
    assert (layer.weight.requires_grad, layer.bias.requires_grad) == (False, True)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.noted == "yes"
    assert not layer.training
    assert torch.equal(layer.weight, part(full.weight, 0, group))
    assert layer.weight.untyped_storage().nbytes() == full.weight.nbytes // group.size()
    on_meta = ColumnParallelLinear.from_linear(
        nn.Linear(8, 8, device="meta"), tensor_model_parallel_group=group
    )
    assert on_meta.weight.is_meta


def case_sections_and_replicas(group: dist.ProcessGroup) -> None:
    """A fused [q; k; v] of unequal sizes whose kv rows more than one rank holds."""
    tp, rank = group.size(), group.rank()
    full = nn.Linear(4, 4 * tp + 4)
    dist.broadcast(full.weight.data, 0, group=group)
    dist.broadcast(full.bias.data, 0, group=group)
    layer = ColumnParallelLinear.from_linear(
        full, sections=(4 * tp, 2, 2), replicas=(1, tp, tp), tensor_model_parallel_group=group
    )
    q, k, v = full.weight.detach().split([4 * tp, 2, 2])
    assert torch.equal(layer.weight, torch.cat([part(q, 0, group), k, v]))
    assert layer.weight.replicated_over == ((4, 1), (2, tp), (2, tp))
    assert torch.equal(layer.full_parameter("weight"), full.weight.detach())
    x = same(3, 4)
    layer(x).square().mul(rank + 1.0).sum().backward()
    reference = full(x)
    scale = torch.arange(1.0, tp + 1)
    parts = reference[:, : 4 * tp].chunk(tp, -1)
    loss = sum(scale[of] * parts[of].square().sum() for of in range(tp))
    (loss + scale.sum() * reference[:, 4 * tp :].square().sum()).backward()
    partition = layer.partitions["weight"]
    torch.testing.assert_close(layer.weight.grad, partition.part(full.weight.grad, rank))
    torch.testing.assert_close(layer.bias.grad, partition.part(full.bias.grad, rank))


def case_output_padded(group: dist.ProcessGroup) -> None:
    tp = group.size()
    full = nn.Linear(4, 2 * tp - 1, bias=False)
    dist.broadcast(full.weight.data, 0, group=group)
    layer = ColumnParallelLinear.from_linear(full, pad_output=True, tensor_model_parallel_group=group)
    assert layer.weight.shape == (2, 4)
    assert torch.equal(layer.full_parameter("weight"), full.weight.detach())
    if group.rank() == tp - 1:
        assert torch.equal(layer.weight[1], torch.zeros(4))


def case_rejected(group: dist.ProcessGroup) -> None:
    tp = group.size()
    with tensor_parallel_group(group):
        for arguments, message in (
            ({"pad": True}, "pad=True is for inference"),
            ({"sequence_parallel_enabled": True}, "gather_output=False"),
            ({"output_size": 4 * tp + 1}, "choose a tensor_parallel_size"),
            ({"stride": 3}, "stride=3 does not divide"),
            ({"sections": (4, 1)}, "add up to 5"),
            ({"replicas": 3, "gather_output": False}, "3 replicas do not divide"),
        ):
            with pytest.raises(ValueError, match=message):
                ColumnParallelLinear(**{"input_size": 4, "output_size": 4 * tp, **arguments})
        for arguments, message in (
            ({"sequence_parallel_enabled": True}, "input_is_parallel=True"),
            ({"reduce_output": False}, "on every rank"),
            ({"input_size": 4 * tp + 1}, "does not divide"),
        ):
            with pytest.raises(ValueError, match=message):
                RowParallelLinear(**{"input_size": 4 * tp, "output_size": 4, **arguments})
        for arguments in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"pad": True}, {"padding_idx": 9}):
            with pytest.raises(ValueError, match=r"max_norm|scale_grad|pad"):
                ParallelEmbedding(8, 4, **arguments)
        with pytest.raises(ValueError, match="does not go with"):
            GQAQKVColumnParallelLinear(8, [8, 8], sequence_parallel_enabled=True)
        layer = ColumnParallelLinear(4, 4 * tp, gather_output=False)
        other = ColumnParallelLinear(4, 4 * tp, gather_output=False, sequence_parallel_enabled=True)
        with pytest.raises(ValueError, match="same group and sequence settings"):
            SharedInput([layer, other])
        skipping = ColumnParallelLinear(4, 4 * tp, gather_output=False, skip_bias_add=True)
        output, bias = skipping(same(2, 4))
        assert bias is skipping.bias
        assert torch.equal(output + bias, layer.__class__.forward(_adding(skipping), same(2, 4)))
        partial = RowParallelLinear(4 * tp, 4, bias=False, input_is_parallel=True, reduce_output=False)
        share = partial(same(2, 4))
        assert torch.equal(share, nn.functional.linear(same(2, 4), partial.weight))
    with pytest.raises(RuntimeError, match="no tensor-parallel group"):
        ColumnParallelLinear(4, 4)


def _adding(layer: ColumnParallelLinear) -> ColumnParallelLinear:
    double = copy.deepcopy(layer)
    double.skip_bias_add = False
    return double
