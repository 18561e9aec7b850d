"""Cases: parameters of parallel layers through copying, moving, pickling and loading; what is rejected."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_actswap.parallel import (
    ColumnParallelLinear,
    GQAQKVColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    SharedInput,
    tensor_parallel_group,
)
from tests.parallel.sharded_math import part, same

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
