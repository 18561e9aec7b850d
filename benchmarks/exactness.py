"""Compares the bits of two steps: runs deterministic kernels, and compares fingerprints of tensors.

The gradients of a 7B-shaped stack are gigabytes: to keep eager's on the device would change the measurement,
and to copy them to the host for every row would take most of the run's time. A fingerprint is two sums over
the bits of a tensor, one of them weighted by position, modulo 2^64, computed on the tensor's device.
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
def deterministic(fill: bool = True, on: bool = True) -> Iterator[None]:
    """Within the block run kernels that give the same bits each time; then restore the earlier settings.

    The mode is strict, because with ``warn_only`` PyTorch's attention stays as it is (pytorch#182551; read in
    2.11's ``sdp_utils.cpp`` and ``attention_backward.cu``): backward of flash and of memory-efficient
    attention adds up in any order unless the mode is strict, and only then is cuDNN's attention, the default
    on Hopper with cuDNN above 9.15, not chosen. In strict mode flash attention adds up in order, with a
    workspace in float32, and memory-efficient attention does not split the keys. So no backend has to be
    named: if a mask or a head size excludes one, the next one repeats its bits too. The mode is global and is
    read when backward runs: forward and backward both belong inside. An op without a deterministic kernel
    raises ``RuntimeError``; a dense Llama with its loss and PyTorch's optimizers has none (``NLLLoss`` in the
    documentation's list means its two-dimensional form). Matrix products need ``CUBLAS_WORKSPACE_CONFIG``,
    which importing `benchmarks` sets.

    Args:
        fill: whether uninitialised memory is filled with NaN, which reveals reads of it. It costs a kernel
            for each allocation: leave it off if steps are timed or memory is short.
        on: ``False``: kernels as in a training, within a block that is deterministic.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(on)
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
    """Return the names of tensors that prove nothing when compared: all zeros, or not finite."""
    return [name for name, value in tensors.items() if not value.isfinite().all() or not value.any()]


def differing(found: Mapping[str, Fingerprint], expected: Mapping[str, Fingerprint]) -> list[str]:
    """Return the names whose fingerprints differ or that only one side has."""
    changed = [name for name, value in found.items() if expected.get(name) != value]
    return [*changed, *sorted(set(expected) - set(found))]
