"""Whether two steps gave the same bits: kernels that can, and a comparison that does not keep the bits.

The gradients of a 7B-shaped stack are gigabytes: to keep eager's on the device would change what is measured,
and to fetch them for every row would take most of the run's minutes. A fingerprint is two sums over the bits
of a tensor, one of them weighted by position, modulo 2^64, made where the tensor lives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

_ELEMENTS_AT_ONCE = 2**24
_ODD_MULTIPLIER = 0x5851F42D4C957F2D
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Fingerprint = tuple[int, int]


@contextmanager
def deterministic(fill: bool = True) -> Iterator[None]:
    """Run kernels that give the same bits each time; what was set before is set again at the end.

    Strict, because with ``warn_only`` PyTorch's attention stays as it is (pytorch#182551; read in 2.11's
    ``sdp_utils.cpp`` and ``attention_backward.cu``): backward of flash and of memory-efficient attention adds
    up in any order unless the mode is strict, and cuDNN's attention, which is the default on Hopper with
    cuDNN above 9.15, is left out of the choice only then. Strict, flash attention adds up in order, at the
    price of a workspace in float32, and memory-efficient attention does not split the keys. So no backend has
    to be named, and what a mask or a head size excludes falls to the next one, which repeats its bits too.
    The mode is global and is read when backward runs: forward and backward both belong inside. What has no
    deterministic kernel raises ``RuntimeError``; a dense Llama with its loss and PyTorch's optimizers has
    nothing of the kind (``NLLLoss`` of the documentation's list means its two-dimensional form). Matrix
    products need ``CUBLAS_WORKSPACE_CONFIG``, which importing `benchmarks` sets.

    Args:
        fill: uninitialised memory reads as NaN meanwhile, which shows who reads it. Costs a kernel for each
            allocation: not where steps are timed, or memory is short.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Return the fingerprint of a tensor's bits: NaN equals itself, and zero differs from minus zero."""
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(_BITS[flat.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _ELEMENTS_AT_ONCE):
        piece = bits[start : start + _ELEMENTS_AT_ONCE].to(torch.int64)
        place = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=tensor.device)
        # An odd weight is invertible: a change of one element always changes the sum.
        weight = place.mul_(_ODD_MULTIPLIER).bitwise_or_(1)
        sums[0] += piece.sum()
        sums[1] += piece.mul_(weight).sum()
    plain, weighted = sums.tolist()
    return plain, weighted


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, Fingerprint]:
    """Return the fingerprint of each tensor."""
    return {name: fingerprint(tensor) for name, tensor in tensors.items()}


def useless(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the tensors a comparison with which would prove nothing: all zeros, or not finite."""
    return [name for name, value in tensors.items() if not value.isfinite().all() or not value.any()]


def differing(found: Mapping[str, Fingerprint], expected: Mapping[str, Fingerprint]) -> list[str]:
    """Return the names whose fingerprints differ or that only one side has."""

    def names() -> Iterator[str]:
        yield from (name for name, value in found.items() if expected.get(name) != value)
        yield from sorted(set(expected) - set(found))

    return list(names())
