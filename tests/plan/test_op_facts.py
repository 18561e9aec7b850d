"""What is known of PyTorch's ops from their tags."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_actswap.plan.op_facts import reads_values

aten: Any = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "reads"),
    [
        (aten._local_scalar_dense.default, True),
        (aten.nonzero.default, True),
        (aten.masked_select.default, True),
        (aten.mm.default, False),
        (aten.topk.default, False),
        (aten.scatter.src, False),
    ],
)
def test_sizes_and_numbers_that_depend_on_values_are_read(op: Any, reads: bool) -> None:
    assert reads_values(op, False) == reads_values(op, True) == reads


@pytest.mark.parametrize("without_kernel", [True, False])
def test_the_ends_of_groups_are_read_where_there_is_no_kernel(without_kernel: bool) -> None:
    assert reads_values(aten._grouped_mm.default, without_kernel) == without_kernel
