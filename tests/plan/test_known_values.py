"""What a dry run knows of values: what follows from the batch's whole numbers, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from hf_actswap.plan import dry_run
from hf_actswap.plan.dry_run import dry_call, fake_batch, know_values
from hf_actswap.plan.forward_recorder import ForwardRecorder

SIZES = torch.tensor([[1, 4, 6], [1, 2, 2]])
IDS = torch.tensor([[7, 7, 1, 2, 7, 3]])
HIDDEN = torch.randn(1, 6, 4)


def on_fakes(code: Callable[..., Any]) -> Any:
    given, found = (SIZES, IDS, HIDDEN), []
    model = nn.Module()
    model.forward = lambda *fakes: found.append(code(*fakes))  # type: ignore[method-assign]
    with dry_call(model, {}):
        fakes = fake_batch(given, torch.device("cpu"))
        know_values(fakes, given)
        ForwardRecorder({}, {}, None).run_on_fakes(model, model, {}, fakes, {})
    return found[0]


def lengths(sizes: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> Any:
    return (sizes.prod(-1) // 4).tolist(), [int(size) for size in sizes[0]]


def selected(sizes: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> Any:
    images = ids == 7
    chosen = hidden[images], ids[images], hidden[0].masked_select(images[0].unsqueeze(-1).expand(6, 4))
    return [tuple(one.shape) for one in chosen], int(images.sum())


def made_of_values(sizes: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> Any:
    rows = torch.arange(3).repeat_interleave(torch.tensor([2, 0, 1]))
    _, runs = torch.unique_consecutive(ids[0], return_counts=True)
    both = torch.tensor([sizes[0, 1], sizes[1, 1], 5])
    return rows.tolist(), runs.tolist(), both.tolist(), torch.nonzero(ids == 7).shape[0]


def constants(sizes: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> Any:
    """PyTorch's own fake tensors know those; Gemma 3n reads them."""
    return torch.tensor(3).item(), bool(torch.tensor(2.0) > 1)


def written_through_a_view(sizes: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> Any:
    row = ids[0]
    row[1:3] += 10
    row.masked_fill_(row == 7, -1)
    return ids.tolist()


@pytest.mark.parametrize("code", [lengths, selected, made_of_values, constants, written_through_a_view])
def test_values_are_those_of_the_batch(code: Callable[..., Any]) -> None:
    before = IDS.clone()
    assert on_fakes(code) == code(SIZES, IDS.clone(), HIDDEN)
    assert torch.equal(IDS, before)


def of_a_weight(sizes: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> Any:
    return hidden.sum().item()


def drawn(sizes: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> Any:
    return torch.randint_like(ids, 4).tolist()


def overwritten(sizes: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> Any:
    row = ids[0]
    ids[:, :4] = hidden[0, 0].long()
    return row.tolist()


def written_elsewhere(sizes: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> Any:
    IDS.add_(1)  # no argument: what stands for it is written
    return (IDS + 0).tolist()


def written_elsewhere_through_a_view(sizes: torch.Tensor, ids: torch.Tensor, hidden: torch.Tensor) -> Any:
    row = IDS[0]
    row.add_(1)
    return row.tolist()


OTHERS = of_a_weight, drawn, overwritten, written_elsewhere, written_elsewhere_through_a_view


@pytest.mark.parametrize("code", OTHERS)
def test_other_values_are_not_known(code: Callable[..., Any]) -> None:
    before = IDS.clone()
    with pytest.raises(DataDependentOutputException):
        on_fakes(code)
    assert torch.equal(IDS, before)


def test_values_of_large_tensors_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "_MOST_VALUES", 5)
    with pytest.raises(DataDependentOutputException):
        on_fakes(lambda sizes, ids, hidden: ids.tolist())
