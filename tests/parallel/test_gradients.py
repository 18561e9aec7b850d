"""Tagged gradients: summed exactly once, whoever asks; norms and clipping of a model in shards."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_actswap.parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    tensor_parallel_group,
)
from hf_actswap.parallel.gradients import (
    GradientState,
    GradientWatch,
    TaggedGradients,
    allreduce_sequence_parallel_gradients,
    clip_grad_norm,
    forget_sums,
    get_grad_norm,
    watch_of,
)
from tests.parallel.collective_calls import Collective, wrapped
from tests.processes import launched, of_ranks, result, run_cases, told

WORLD_SIZE = 4
TOKENS, HIDDEN, OUT = 12, 6, 8
MAX_NORM, STEPS = 0.05, 5
PAIRS, ALL = [[0, 1], [2, 3]], [[0, 1, 2, 3]]


SUMMED_BY = ("ours", "user", "both", "guide", "ours, then guide", "guide, then ours")


def allreduce_of_the_guide(optimizer: torch.optim.Optimizer) -> None:
    """The function of NxD's guide as it stands there, with only its import changed."""
    grads = []
    for param_group in optimizer.__getstate__()["param_groups"]:
        for group, params in param_group.items():
            if group == "params":
                for p in params:
                    if isinstance(p, torch.Tensor) and p.grad is not None:
                        sequence_parallel_param = getattr(p, "sequence_parallel_enabled", False)
                        if sequence_parallel_param:
                            grads.append(p.grad.data)
    for grad in grads:
        reduce_from_tensor_model_parallel_region(grad)


class Toy(nn.Module):
    """A norm on this rank's tokens, a gather, this rank's rows of a weight; whole without a group.

    Args:
        group: tensor-parallel group; ``None``: one process.
        tagged: whether what sees a part of the tokens says so.
    """

    def __init__(self, group: dist.ProcessGroup | None, tagged: bool = True) -> None:
        super().__init__()
        self.group = group
        generator = torch.Generator().manual_seed(1)
        self.scale = nn.Parameter(torch.rand(HIDDEN, generator=generator) + 0.5)
        self.bias = nn.Parameter(torch.rand(HIDDEN, generator=generator))
        weight = torch.randn(OUT, HIDDEN, generator=generator)
        self.weight = nn.Parameter(weight if group is None else own(weight, group))
        self.retag(tagged)

    def retag(self, tagged: bool = True) -> None:
        self.scale.sequence_parallel_enabled = self.bias.sequence_parallel_enabled = tagged
        self.weight.tensor_model_parallel = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.group is None else own(x, self.group)
        hidden = torch.tanh(x * self.scale + self.bias)
        if self.group is None:
            return (hidden @ self.weight.T).sin().mean()
        hidden = gather_from_sequence_parallel_region(hidden, process_group=self.group)
        part = (hidden @ self.weight.T).sin().sum() / (TOKENS * OUT)
        return reduce_from_tensor_model_parallel_region(part, self.group)


def own(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return whole.chunk(group.size())[group.rank()].clone()


def batch(number: int) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 + number))


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name.removeprefix("module."): None if p.grad is None else p.grad.detach().clone()
        for name, p in module.named_parameters()
    }


@contextmanager
def counted() -> Iterator[list[tuple[int, torch.dtype]]]:
    """The all-reduces inside: elements and dtype of each."""
    calls: list[tuple[int, torch.dtype]] = []

    def counting(_: str, all_reduce: Collective) -> Collective:
        def call(tensor: torch.Tensor, *arguments: Any, **settings: Any) -> Any:
            calls.append((tensor.numel(), tensor.dtype))
            return all_reduce(tensor, *arguments, **settings)

        return call

    with wrapped(counting, ["all_reduce"]):
        yield calls


def accumulation(group: dist.ProcessGroup) -> dict[str, Any]:
    """Gradients after 1, 2 and 3 micro-batches, over two steps, by who reduces them."""

    def run(who: str, micro_batches: int) -> list[dict[str, torch.Tensor | None]]:
        toy, found = Toy(group), []
        optimizer = torch.optim.AdamW(toy.parameters())
        ours = TaggedGradients(toy, group) if who not in ("user", "nobody") else None
        for step in range(2):
            for number in range(micro_batches):
                toy(batch(step + number)).backward()
            if who in ("ours", "both"):
                ours.reduce()
            if who in ("guide", "ours, then guide", "guide, then ours"):
                if who == "ours, then guide":
                    ours.reduce()
                with tensor_parallel_group(group):
                    allreduce_of_the_guide(optimizer)
                    allreduce_of_the_guide(optimizer)
                if who == "guide, then ours":
                    ours.reduce()
            if who in ("user", "both"):
                allreduce_sequence_parallel_gradients(optimizer, group)
                for parameter in toy.parameters():  # as clipping does
                    parameter.grad.mul_(1.0)
                with tensor_parallel_group(group):
                    allreduce_sequence_parallel_gradients(optimizer)
            found.append(gradients(toy))
            optimizer.zero_grad()
        return found

    return {f"{who} {n}": run(who, n) for who in (*SUMMED_BY, "nobody") for n in (1, 2, 3)}


def training(group: dist.ProcessGroup) -> dict[str, Any]:
    """Parameters, losses and norms of five clipped steps, with the reduction and without."""

    def run(reduces: bool) -> dict[str, Any]:
        toy = Toy(group)
        optimizer = torch.optim.AdamW(toy.parameters(), lr=0.05)
        losses, norms = [], []
        for step in range(STEPS):
            loss = toy(batch(step))
            loss.backward()
            if reduces:
                allreduce_sequence_parallel_gradients(optimizer, group)
            norms.append(clip_grad_norm(toy.parameters(), MAX_NORM, process_group=group))
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        parameters = {name: p.detach() for name, p in toy.named_parameters()}
        return {"parameters": parameters, "losses": torch.stack(losses), "norms": torch.stack(norms)}

    return {"reduced": run(True), "not reduced": run(False)}


def membership(group: dist.ProcessGroup) -> dict[str, Any]:
    """Gradients that some ranks lack; what takes part, in how many collectives."""
    names = ("both", "first", "nobody", "frozen", "untagged", "half", "ends")
    p = {
        name: nn.Parameter(torch.ones(2, dtype=torch.bfloat16 if name == "half" else None)) for name in names
    }
    for name in names:
        p[name].sequence_parallel_enabled = name != "untagged"
    p["frozen"].requires_grad_(False)
    weight = float(group.rank() + 1)
    uses = ["both", "untagged", "half", "ends"] + (["first"] if group.rank() == 0 else [])
    torch.stack([p[name].float().sum() * weight for name in uses]).sum().backward()
    listed = [*p.values(), p["both"]]
    with counted() as calls:
        allreduce_sequence_parallel_gradients(listed, group)
    found = {name: None if q.grad is None else q.grad.tolist() for name, q in p.items()}
    with counted() as again:
        allreduce_sequence_parallel_gradients(listed, group)
    untagged: list[torch.Tensor] = [p["untagged"]]
    with counted() as none:
        allreduce_sequence_parallel_gradients(untagged, group)
    return {"gradients": found, "calls": calls, "again": again, "none": none}


def precision(group: dist.ProcessGroup) -> dict[str, Any]:
    """bf16 gradients 1 and 3 2^-9 on every other rank: lost in bf16, kept in fp32 until the end."""
    found = {}
    for name, dtype in (("own", None), ("fp32", torch.float32)):
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        parameter.sequence_parallel_enabled = True
        parameter.grad = torch.full_like(parameter, 1.0 if group.rank() == 0 else 3 * 2.0**-9)
        with counted() as calls:
            allreduce_sequence_parallel_gradients([parameter], group, reduce_dtype=dtype)
        found[name] = (parameter.grad.tolist(), calls)
    return found


def main_gradients(group: dist.ProcessGroup) -> list[list[float]]:
    """Gradients gathered in ``.main_grad`` in fp32 by the user's hook, zeroed in place; three steps."""
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.sequence_parallel_enabled = True
    parameter.main_grad = torch.zeros(2)

    def gather(of: torch.Tensor) -> None:
        of.main_grad += of.grad
        of.grad = None

    parameter.register_post_accumulate_grad_hook(gather)
    ours, found = TaggedGradients([parameter], group), []
    for step in range(3):
        for _ in range(2):
            (parameter * (group.rank() + 1 + step)).sum().backward()
        ours.reduce()
        allreduce_sequence_parallel_gradients([parameter], group)
        found.append(parameter.main_grad.tolist())
        parameter.main_grad.zero_()
    return found


def mistakes(group: dist.ProcessGroup) -> dict[str, Any]:
    toy = Toy(group)
    ours, found = TaggedGradients(toy, group), {}
    toy(batch(0)).backward()
    parameters = list(toy.parameters())
    found["norm before"] = told(lambda: get_grad_norm(parameters, process_group=group))
    found["clip before"] = told(lambda: clip_grad_norm(parameters, 1.0, process_group=group))
    ours.reduce()
    found["norm after"] = told(lambda: get_grad_norm(parameters, process_group=group))
    toy(batch(1)).backward()
    found["mixed"] = told(ours.reduce)
    found["mixed norm"] = told(lambda: get_grad_norm(parameters, process_group=group))
    toy(batch(1)).backward()
    found["still mixed"] = told(ours.reduce)
    toy.zero_grad(set_to_none=False)
    toy(batch(1)).backward()
    found["zeroed"] = told(ours.reduce)
    found["zeroed gradients"] = gradients(toy)
    toy.zero_grad(set_to_none=False)
    toy(batch(0)).backward()
    toy(batch(1)).backward()
    found["zeroed again"] = told(ours.reduce)
    found["zeroed again gradients"] = gradients(toy)
    torch.autograd.grad(toy(batch(2)), [toy.scale])
    found["computed only"] = told(ours.reduce)
    found["computed only gradients"] = gradients(toy)
    toy.scale.grad = toy.scale.grad * 2
    found["replaced"] = told(ours.reduce)
    forget_sums(toy)
    toy.scale.grad, toy.bias.grad = torch.ones(HIDDEN), None
    found["forgotten"] = told(ours.reduce)
    found["forgotten gradient"] = toy.scale.grad.clone()
    found["no group"] = told(lambda: allreduce_sequence_parallel_gradients(toy))
    found["norm type"] = told(lambda: get_grad_norm(parameters, 0.0, process_group=group))
    watched = [watch_of(p) is not None for p in toy.parameters()]
    ours.remove()
    left = [watch_of(p) is not None or bool(p._backward_hooks) for p in toy.parameters()]
    found["watched"] = (watched, left)
    return found


def norms(group: dist.ProcessGroup) -> dict[str, Any]:
    """Norms of gradients that are shards of one model's; `norm_model` makes the whole."""
    size, rank, found = group.size(), group.rank(), {}
    for case, names in NORM_CASES.items():
        parameters = []
        for name in names:
            whole = norm_model(size)[name]
            parameter = nn.Parameter(torch.zeros(0, dtype=whole.dtype))
            if name.startswith("column"):
                gradient = whole.chunk(size)[rank].clone()
                parameter.tensor_model_parallel = True
            elif name.startswith("heads"):  # half as many different shards as ranks
                gradient = whole.chunk(size // 2)[rank // 2].clone()
                parameter.tensor_model_parallel, parameter.replicated_over = True, 2
            elif name.startswith("fused"):  # rows of which all are different, then rows as of "heads"
                own, shared = whole.split([8 * size, 8 * size])
                parts = own.chunk(size)[rank], shared.chunk(size // 2)[rank // 2]
                gradient = torch.cat(parts)
                parameter.tensor_model_parallel = True
                parameter.replicated_over = ((len(parts[0]), 1), (len(parts[1]), 2))
            else:
                gradient = whole.clone()
            parameter.data = torch.zeros_like(gradient)
            parameter.grad = None if name.endswith("none") else gradient
            parameters.append(parameter)
        for norm_type in (1.0, 2.0, 3.5, math.inf):
            found[f"{case} {norm_type}"] = get_grad_norm(parameters, norm_type, process_group=group)
        clip_grad_norm(iter([*parameters, *parameters]), 1.5, process_group=group)
        found[f"{case} clipped"] = get_grad_norm(parameters, process_group=group)
    with counted() as calls:
        get_grad_norm(parameters, process_group=group)
    found["calls"] = calls
    return found


NORM_CASES: dict[str, list[str]] = {
    "all": ["column a", "column b", "heads", "norm a", "norm b", "column none"],
    "sharded": ["column a", "column b"],
    "replicated": ["norm a", "norm b"],
    "heads": ["heads"],
    "fused": ["fused", "norm a"],
    "half": ["column half", "norm half", "norm a"],
    "double": ["column double"],
    "absent": ["column none"],
    "empty": [],
}


def norm_model(size: int) -> dict[str, torch.Tensor]:
    """The whole model's gradients, 10 randn."""
    generator = torch.Generator().manual_seed(9)
    found = {
        name: torch.randn(8 * size if "norm" not in name else 5, 16, generator=generator) * 10
        for name in ("column a", "column b", "heads", "norm a", "norm b", "column none", "column half")
    }
    found["fused"] = torch.randn(16 * size, 16, generator=generator) * 10
    found["norm half"] = found["norm b"].bfloat16()
    found["column half"] = found["column half"].bfloat16()
    found["column double"] = found["column a"].double()
    return found


def not_finite(group: dist.ProcessGroup) -> dict[str, str]:
    """One element of one rank's shard is not finite; every rank must see it."""
    found = {}
    for value in (math.inf, math.nan):
        for norm_type in (2.0, math.inf):
            parameter = nn.Parameter(torch.zeros(3))
            parameter.tensor_model_parallel = True
            parameter.grad = torch.ones(3)
            if group.rank() == group.size() - 1:
                parameter.grad[1] = value
            given = [parameter]
            found[f"{value} {norm_type}"] = told(
                lambda given=given, norm_type=norm_type: clip_grad_norm(
                    given, 1.0, norm_type, error_if_nonfinite=True, process_group=group
                )
            )
    return found


def data_parallel(group: dist.ProcessGroup) -> dict[str, Any]:
    """Two models of two ranks each: DDP and FSDP2 over the data axis, accumulation 2, two steps, clipped."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor_group, data_rank = mesh.get_group("tp"), mesh.get_local_rank("dp")
    found: dict[str, Any] = {}
    for kind in ("ddp", "ddp views", "fsdp2"):
        toy = Toy(tensor_group)
        if kind == "fsdp2":
            fully_shard(toy, mesh=mesh["dp"])
            toy.retag()
            wrapped: Any = toy
        else:
            wrapped = DistributedDataParallel(
                toy, process_group=mesh.get_group("dp"), gradient_as_bucket_view=kind == "ddp views"
            )
        ours = TaggedGradients(toy, tensor_group)
        optimizer = torch.optim.SGD(toy.parameters(), lr=0.1)
        for step in range(3):
            for number in range(2):
                last = number == 1
                if kind == "fsdp2":
                    toy.set_requires_gradient_sync(last)
                with nullcontext() if last or kind == "fsdp2" else wrapped.no_sync():
                    wrapped(batch(10 * step + 2 * number + data_rank)).backward()
            ours.reduce()
            allreduce_sequence_parallel_gradients(optimizer, tensor_group)
            norm = clip_grad_norm(toy.parameters(), MAX_NORM, process_group=tensor_group)
            allreduce_sequence_parallel_gradients(optimizer, tensor_group)
            whole = {
                name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.clone()
                for name, p in toy.named_parameters()
            }
            found[f"{kind} {step}"] = (norm, whole)
            optimizer.step()
            optimizer.zero_grad()
    return found


CASES = {
    "accumulation": accumulation,
    "accumulation_4": accumulation,
    "training": training,
    "training_4": training,
    "membership": membership,
    "precision": precision,
    "main_gradients": main_gradients,
    "mistakes": mistakes,
    "norms": norms,
    "norms_4": norms,
    "not_finite": not_finite,
    "data_parallel": data_parallel,
}
CASE_GROUPS = {name: ALL if name.endswith("_4") else PAIRS for name in CASES} | {"data_parallel": []}


def run_on_rank(rank: int, folder: str) -> None:
    run_cases(rank, folder, WORLD_SIZE, CASES, CASE_GROUPS)


dist_test = pytest.mark.dist
GROUPS = {2: PAIRS, 4: ALL}
CLOSE = {"rtol": 1e-5, "atol": 1e-7}


folder = launched(run_on_rank, WORLD_SIZE, 150)


def by_rank(folder: Path, name: str, size: int = 2) -> list[list[Any]]:
    """The results of each group of this size, in rank order."""
    full_name = f"{name}_4" if size == 4 else name
    return [[result(folder, full_name, rank) for rank in ranks] for ranks in GROUPS[size]]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole model's tensors from those of its ranks."""
    return {
        name: torch.cat([p[name] for p in parts]) if name == "weight" else parts[0][name] for name in parts[0]
    }


def one_process(micro_batches: int, step: int = 0) -> dict[str, Any]:
    toy = Toy(None)
    for number in range(micro_batches):
        toy(batch(step + number)).backward()
    return gradients(toy)


@dist_test
@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("who", SUMMED_BY)
def test_every_gradient_is_that_of_one_process(who: str, micro_batches: int, size: int, folder: Path) -> None:
    """Spec: golden case G12."""
    for group in by_rank(folder, "accumulation", size):
        for step in range(2):
            found = joined([of_rank[f"{who} {micro_batches}"][step] for of_rank in group])
            for name, expected in one_process(micro_batches, step).items():
                torch.testing.assert_close(found[name], expected, **CLOSE)


@dist_test
def test_without_reduction_the_gradients_differ(folder: Path) -> None:
    """The control."""
    for group in by_rank(folder, "accumulation"):
        found, expected = group[0]["nobody 2"][0], one_process(2)
        assert not torch.allclose(found["scale"], expected["scale"], rtol=1e-2)
        assert not torch.allclose(found["scale"], group[1]["nobody 2"][0]["scale"], rtol=1e-2)


def trained_alone() -> dict[str, Any]:
    toy, losses, norms = Toy(None), [], []
    optimizer = torch.optim.AdamW(toy.parameters(), lr=0.05)
    for step in range(STEPS):
        loss = toy(batch(step))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(toy.parameters(), MAX_NORM))
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: p.detach() for name, p in toy.named_parameters()}
    return {"parameters": parameters, "losses": torch.stack(losses), "norms": torch.stack(norms)}


@dist_test
@pytest.mark.parametrize("size", GROUPS)
def test_training_with_clipping_is_that_of_one_process(size: int, folder: Path) -> None:
    """Replicated parameters stay bitwise equal; without the reduction they do not."""
    expected = trained_alone()
    assert float(expected["norms"].min()) > MAX_NORM
    for group in by_rank(folder, "training", size):
        found = [of_rank["reduced"] for of_rank in group]
        parameters = joined([of_rank["parameters"] for of_rank in found])
        for name in parameters:
            torch.testing.assert_close(parameters[name], expected["parameters"][name], rtol=1e-4, atol=1e-5)
        for of_rank in found:
            torch.testing.assert_close(of_rank["losses"], expected["losses"], **CLOSE)
            torch.testing.assert_close(of_rank["norms"], expected["norms"], **CLOSE)
            assert torch.equal(of_rank["norms"], found[0]["norms"])
            for name in ("scale", "bias"):
                assert torch.equal(of_rank["parameters"][name], found[0]["parameters"][name])
        drifted = [of_rank["not reduced"]["parameters"]["scale"] for of_rank in group]
        assert not torch.equal(drifted[0], drifted[1])


@dist_test
def test_membership(folder: Path) -> None:
    """One all-reduce per dtype; ranks without a gradient get the sum, where there is one."""
    expected = {
        "both": [3.0, 3.0],
        "first": [1.0, 1.0],
        "nobody": None,
        "frozen": None,
        "half": [3.0, 3.0],
        "ends": [3.0, 3.0],
    }
    for group in by_rank(folder, "membership"):
        for rank, found in enumerate(group):
            assert found["gradients"] == {**expected, "untagged": [rank + 1.0] * 2}
            assert found["calls"] == [(4 * 2 + 4, torch.float32), (2 + 1, torch.bfloat16)]
            assert found["again"] == [(2 + 1, torch.float32)]  # whether somebody has the one gradient now
            assert found["none"] == []


@dist_test
def test_sums_in_another_dtype(folder: Path) -> None:
    """1 and 3 2^-9: bf16 can hold the nearest, 1 + 2^-7; nothing is lost before the one rounding."""
    for found in by_rank(folder, "precision")[0]:
        assert found["fp32"] == ([1 + 2.0**-7] * 4, [(5, torch.float32)])
        assert found["own"][1] == [(5, torch.bfloat16)]


@dist_test
def test_main_gradients(folder: Path) -> None:
    for found in by_rank(folder, "main_gradients")[0]:
        assert found == [[2.0 * (1 + 2 + 2 * step)] * 2 for step in range(3)]


@dist_test
def test_mistakes_are_told(folder: Path) -> None:
    mixed = (
        "MixedGradientError: 2 gradients (the first of shape [6]) were accumulated onto gradients that had "
        "been summed over the tensor-parallel ranks already. Sum once, after the last micro-batch (with "
        "Accelerate: clip only `if accelerator.sync_gradients`)"
    )
    waiting = "UnsummedGradientError: the gradients of 2 tagged parameters (of 2) are this rank's part only."
    for found in by_rank(folder, "mistakes")[0]:
        for name in ("norm before", "clip before"):
            assert found[name].startswith(waiting)
        for name in ("mixed", "mixed norm", "still mixed"):
            assert found[name].startswith(mixed)
        for name in ("norm after", "zeroed", "zeroed again", "computed only", "forgotten"):
            assert found[name] == "nothing was raised"
        assert found["replaced"].startswith("MixedGradientError: 1 gradients")
        assert "forget_sums" in found["replaced"]
        assert found["no group"].startswith("RuntimeError: no tensor-parallel group")
        assert (
            found["norm type"] == "ValueError: norm_type: expected a number greater than 0 or inf, found 0.0"
        )
        assert found["watched"] == ([True, True, False], [False, False, False])


@dist_test
def test_gradients_zeroed_in_place_are_summed_once(folder: Path) -> None:
    group = by_rank(folder, "mistakes")[0]
    both = one_process(2)
    for name, expected in (
        ("zeroed gradients", one_process(1, 1)),
        ("zeroed again gradients", both),
        ("computed only gradients", both),
    ):
        found = joined([of_rank[name] for of_rank in group])
        for parameter in found:
            torch.testing.assert_close(found[parameter], expected[parameter], **CLOSE)
    for of_rank in group:
        assert of_rank["forgotten gradient"].tolist() == [2.0] * HIDDEN


@dist_test
@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("case", NORM_CASES)
def test_norms_count_every_element_once(case: str, size: int, folder: Path) -> None:
    """Spec: golden case T11; bitwise the same on all ranks."""
    names = [name for name in NORM_CASES[case] if not name.endswith("none")]
    elements = torch.cat([norm_model(size)[name].flatten().double() for name in names] or [torch.zeros(1)])
    wide = torch.float64 if case == "double" else torch.float32
    for group in by_rank(folder, "norms", size):
        for norm_type in (1.0, 2.0, 3.5, math.inf):
            found = [of_rank[f"{case} {norm_type}"] for of_rank in group]
            expected = float(torch.linalg.vector_norm(elements, norm_type))
            assert float(found[0]) == pytest.approx(expected, rel=1e-5)
            assert all(torch.equal(norm, found[0]) and norm.dtype == wide for norm in found)
        clipped = [float(of_rank[f"{case} clipped"]) for of_rank in group]
        assert clipped == [clipped[0]] * size
        assert clipped[0] == pytest.approx(1.5 if names else 0.0, rel=5e-3 if case == "half" else 1e-5)
        assert all(of_rank["calls"] == [(1, torch.float32)] for of_rank in group)


@dist_test
def test_every_rank_hears_of_what_is_not_finite(folder: Path) -> None:
    for found in by_rank(folder, "not_finite")[0]:
        assert len(found) == 4
        for name, text in found.items():
            assert text.startswith("RuntimeError: The total norm of order"), name


@dist_test
@pytest.mark.parametrize("kind", ["ddp", "ddp views", "fsdp2"])
def test_beside_data_parallelism(kind: str, folder: Path) -> None:
    toy = Toy(None)
    optimizer = torch.optim.SGD(toy.parameters(), lr=0.1)
    found = of_ranks(folder, "data_parallel")
    for step in range(3):
        for number in range(2):
            for data_rank in range(2):
                (toy(batch(10 * step + 2 * number + data_rank)) / 2).backward()
        norm = nn.utils.clip_grad_norm_(toy.parameters(), MAX_NORM)
        for pair in PAIRS:
            of_pair = [found[rank][f"{kind} {step}"] for rank in pair]
            whole = joined([whole for _, whole in of_pair])
            for name, expected in gradients(toy).items():
                torch.testing.assert_close(whole[name], expected, rtol=1e-4, atol=1e-7)
        norms = [of_rank[f"{kind} {step}"][0] for of_rank in found]
        torch.testing.assert_close(norms[0], norm, rtol=1e-5, atol=0)
        assert all(torch.equal(of_rank, norms[0]) for of_rank in norms)
        optimizer.step()
        optimizer.zero_grad()


def test_a_copied_parameter_has_no_state() -> None:
    parameter = nn.Parameter(torch.ones(2))
    watch = GradientWatch(parameter)
    parameter.sum().backward()
    assert parameter.grad is not None
    watch.set_summed(parameter.grad)
    assert watch_of(parameter) is watch
    assert watch.state() is GradientState.SUM
    assert watch_of(copy.deepcopy(parameter)) is None
    parameter.grad = None
    assert watch.state() is GradientState.PART


def test_a_watch_keeps_neither_parameter_nor_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2))
    watch = GradientWatch(parameter)
    parameter.sum().backward()
    assert parameter.grad is not None
    watch.set_summed(parameter.grad)
    del parameter
    assert watch.state() is GradientState.PART
