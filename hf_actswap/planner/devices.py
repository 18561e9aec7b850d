"""Rates that devices reach, for profiles that are computed from shapes.

These are achieved rates, not those of data sheets. The H200's are fitted to measured steps (Llama-shaped
layers, bf16, torch 2.11: 16 layers of 8,192 tokens 388 ms, 6 layers of 32,768 tokens 837 ms; copies of 54.9
GB/s out and 55.1 back, 49.8 each at once). Rates of other devices are estimates: their data sheets' rates,
reduced in the same ratio as the H200's. Measure where you can. (MI300X: 192 GB, 5.3 TB/s, 1,307 TFLOP/s in
bf16 and 163 in fp32, PCIe 5, AMD's data sheet.)

GeForce cards and the A10G sum products in fp32 at half of the rate that their tensor cores have otherwise, so
their power limit does not slow them: they are taken to reach 85 % of it (people report 84 to 107 % of an RTX
5090's 209.5 TFLOP/s). Other cards of the same chips sum at the full rate and run into it: 60 %, as the L40S,
50 % at the 72 W of an L4, 70 % at the 600 W of an RTX PRO 6000 and for Ampere's. Of their memory's rate all
reach two thirds. What no table has is asked of the driver (`rates_name`).

Links between devices have not been measured: their rates *are* those of data sheets (`Fabric`), which no
collective quite reaches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..config.sizes import GIB, OWN_DEVICE, device_kind, own_device
from ..engine.link import Link
from ..errors import PlanError, Problem, nearest


@dataclass(frozen=True, slots=True)
class Fabric:
    """The link between the devices of one machine, by its maker's data sheet; not measured.

    Args:
        bytes_per_ms: rate in one direction, half of what a data sheet gives for both.
        latency_ms: latency of one collective, assumed to be some kernel launches: no data sheet gives it.
        to_host_too: whether it is the link to host memory too, so that collectives and copies share it.
    """

    name: str
    bytes_per_ms: float
    latency_ms: float = 0.02
    to_host_too: bool = False

    def described(self) -> str:
        """Return the rate of collectives in words."""
        rate = f"at {self.bytes_per_ms / 1e6:.0f} GB/s and {self.latency_ms:g} ms each"
        return f"{rate} ({self.name} by its data sheet; not measured), all ranks in one machine"


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The rates of one kind of device.

    Args:
        name: as the user writes it.
        memory_bytes: memory that a process can use: what the driver reports, less half a GiB that CUDA's own
            context takes.
        half_flop_per_ms: arithmetic of matrix products in bf16 and fp16.
        full_flop_per_ms: arithmetic of matrix products in fp32 and wider types.
        attention_flop_per_ms: arithmetic of fused attention, in half precision, forward and backward.
        bytes_per_ms: device memory that elementwise kernels read and write.
        launch_ms: least duration of a kernel.
        link: rates to host memory; ``None``: copies do not overlap compute.
        fabric: link to the other devices of the machine; ``None``: not known.
        workspace_bytes: memory that cuBLAS takes from PyTorch's allocator for its workspaces.
        host_bytes: host memory that a machine usually has for each of these devices, less a quarter for the
            process and the system; ``None``: no limit is assumed.
        host_bytes_per_ms: rate of the memory of such a machine, which the copies of all its devices share;
            ``None``: not known.
        reads_groups: whether ``grouped_mm`` reads the ends of its groups on the host (`reads_values`).
    """

    name: str
    memory_bytes: int
    half_flop_per_ms: float
    full_flop_per_ms: float
    attention_flop_per_ms: float
    bytes_per_ms: float
    launch_ms: float
    link: Link | None
    fabric: Fabric | None = None
    workspace_bytes: int = 0
    host_bytes: int | None = None
    host_bytes_per_ms: float | None = None
    reads_groups: bool = False

    def link_of(self, ranks: int) -> Link | None:
        """Return the link of one of several ranks of a machine, which share the memory of their host.

        At worst all of them copy at once, and where both directions are busy each gets half of a rank's part.
        """
        link, rate = self.link, self.host_bytes_per_ms
        if link is None or rate is None or ranks == 1:
            return link
        alone, both = rate / ranks, rate / ranks / 2
        return Link(
            min(link.out_bytes_per_ms, alone),
            min(link.in_bytes_per_ms, alone),
            min(link.out_beside_in_bytes_per_ms, both),
            min(link.in_beside_out_bytes_per_ms, both),
        )


RANKS_OF_A_MACHINE = 8
"""The most ranks that are assumed to share one machine."""

_WORKSPACES = 2
_HOPPER_WORKSPACE = _WORKSPACES * 32 * 2**20
_WORKSPACE = _WORKSPACES * (2 * 4096 * 1024 + 8 * 16 * 1024)
"""PyTorch gives cuBLAS a workspace for each handle and stream (``CUDABlas`` in ATen): 32 MiB on H100 to B200,
``:4096:2:16:8`` (8.1 MiB) before. Forward's thread and backward's have a handle each. MI300X: assumed."""

_DDR4, _DDR5 = 300e6, 450e6
_DESKTOP, _HOST_4, _HOST_5 = (48 * GIB, 60e6), (108 * GIB, _DDR4), (192 * GIB, _DDR5)
"""Usual host memory for each device and its rate, about three quarters of data sheets': two channels of
DDR5-5200 (83 GB/s); two sockets of eight channels of DDR4-3200 (410 GB/s) or DDR5-4800 (614 GB/s). Desktops
have 64 GiB; servers of eight devices have 1.15 TB (A100: AWS p4d), 1 TB (L40S) or 2 TB (H100: p5, DGX)."""


def _link(gigabytes_per_second: float) -> Link:
    """Return a link that loses a tenth of its rate while both directions are busy."""
    alone = gigabytes_per_second * 1e6
    return Link(alone, alone, 0.905 * alone, 0.905 * alone)


def _accelerator(
    name: str,
    gib: float,
    tera: tuple[float, float, float, float],
    link: Link,
    fabric: Fabric,
    workspace_bytes: int,
    host: tuple[int, float],
) -> DeviceRates:
    """Return a device's rates, of which ``tera`` are in TFLOP/s and TB/s: 10^9 per ms."""
    half, full, attention, memory = (rate * 1e9 for rate in tera)
    return DeviceRates(
        *(name, int(gib * GIB), half, full, attention, memory, 0.003, link, fabric, workspace_bytes, *host),
        reads_groups=workspace_bytes < _HOPPER_WORKSPACE,  # PyTorch's kernel is for Hopper and later, too
    )


_H200_LINK = Link(54.9e6, 55.1e6, 49.8e6, 49.8e6)

_NVLINK_3, _NVLINK_4, _NVLINK_5 = (
    Fabric(f"NVLink {generation}", gigabytes * 1e6 / 2)
    for generation, gigabytes in ((3, 600), (4, 900), (5, 1800))
)
_PCIE_4, _PCIE_5 = (
    Fabric(f"PCIe {generation} x16", gigabytes * 1e6 / 2, to_host_too=True)
    for generation, gigabytes in ((4, 64), (5, 128))
)
_XGMI = Fabric("Infinity Fabric", 896e6 / 2)
"""Data sheets of A100 80GB SXM (NVLink 600 GB/s), H100 and H200 SXM (900 GB/s), HGX B200 (1.8 TB/s a GPU),
L40S (PCIe Gen4 x16: 64 GB/s, no NVLink), MI300X (seven links of 128 GB/s); the other cards are taken as
without NVLink, which joins only pairs of some. All these rates are of both directions together."""

DEVICES: tuple[DeviceRates, ...] = (
    _accelerator("H200", 139.0, (660, 50, 545, 3.2), _H200_LINK, _NVLINK_4, _HOPPER_WORKSPACE, _HOST_5),
    _accelerator("H100", 78.6, (640, 50, 530, 2.25), _link(55), _NVLINK_4, _HOPPER_WORKSPACE, _HOST_5),
    _accelerator("A100-80", 78.7, (240, 18, 180, 1.35), _link(25), _NVLINK_3, _WORKSPACE, _HOST_4),
    _accelerator("A100-40", 38.8, (240, 18, 180, 1.05), _link(25), _NVLINK_3, _WORKSPACE, _HOST_4),
    _accelerator("B200", 177.8, (1450, 65, 950, 5.3), _link(55), _NVLINK_5, _HOPPER_WORKSPACE, _HOST_5),
    _accelerator("L40S", 43.9, (210, 55, 160, 0.58), _link(25), _PCIE_4, _WORKSPACE, (96 * GIB, _DDR4)),
    _accelerator("RTX 4090", 23.0, (140, 60, 120, 0.68), _link(25), _PCIE_4, _WORKSPACE, _DESKTOP),
    _accelerator("RTX 3090", 23.1, (60, 26, 50, 0.63), _link(25), _PCIE_4, _WORKSPACE, _DESKTOP),
    _accelerator("RTX 5090", 30.8, (178, 76, 150, 1.20), _link(50), _PCIE_5, _WORKSPACE, _DESKTOP),
    _accelerator("RTX A6000", 46.9, (108, 28, 87, 0.52), _link(25), _PCIE_4, _WORKSPACE, _DESKTOP),
    _accelerator("RTX 6000 Ada", 46.9, (215, 60, 165, 0.65), _link(25), _PCIE_4, _WORKSPACE, _DESKTOP),
    _accelerator("RTX PRO 6000", 94.4, (350, 85, 280, 1.20), _link(50), _PCIE_5, _WORKSPACE, _DESKTOP),
    _accelerator("A10G", 21.4, (60, 24, 50, 0.40), _link(20), _PCIE_4, _WORKSPACE, (96 * GIB, _DDR4)),
    _accelerator("A40", 43.8, (105, 27, 84, 0.46), _link(25), _PCIE_4, _WORKSPACE, (96 * GIB, _DDR4)),
    _accelerator("L4", 21.5, (60, 18, 48, 0.20), _link(25), _PCIE_4, _WORKSPACE, (48 * GIB, _DDR4)),
    _accelerator("H100 PCIe", 78.6, (455, 38, 375, 1.33), _link(55), _PCIE_5, _HOPPER_WORKSPACE, _HOST_5),
    _accelerator("H100 NVL", 92.5, (500, 45, 415, 2.60), _link(55), _PCIE_5, _HOPPER_WORKSPACE, _HOST_5),
    _accelerator("MI300X", 191.0, (870, 120, 720, 3.5), _link(55), _XGMI, _HOPPER_WORKSPACE, _HOST_5),
    DeviceRates("cpu", 64 * GIB, 0.5e9, 0.5e9, 0.3e9, 0.02e9, 0.002, None),
)


DEFAULT_DEVICE = DEVICES[0].name
"""The device to predict for where nothing says which."""

_TENSOR_CORES = {
    (8, 0): (2048, 0.77),
    (8, 6): (1024, 0.7),
    (8, 9): (1024, 0.6),
    (9, 0): (4096, 0.65),
    (10, 0): (8192, 0.645),
    (10, 3): (8192, 0.645),
    (12, 0): (1024, 0.7),
}
"""Compute capability -> floating-point operations of a multiprocessor's tensor cores in a cycle, in half
precision and summed in fp32 (NVIDIA's white papers of GA100, GA102, AD102, GH100, GB200 and GB202), and which
share of that devices in `DEVICES` reach."""
_AT_HALF_RATE, _OTHERWISE_SLOWED = re.compile(r"geforce|\bl20\b"), re.compile(r"\bh20\b")


def rates_name(device: torch.device) -> str | None:
    """Return what `device_rates` takes for a device of this machine; ``None``: nothing says what it can do.

    For a device that is not in `DEVICES`, or a part of one (MIG), these are numbers from its driver.
    """
    if device.type != "cuda":
        return device_kind(device.type)
    facts = torch.cuda.get_device_properties(device)
    kind = device_kind(facts.name)
    if kind is not None and 0.9 < facts.total_memory / device_rates(kind).memory_bytes < 1.1:
        return kind
    return _numbers_of(facts) or kind


def _numbers_of(facts: Any) -> str | None:
    """Return what a driver says of a device (clocks in kHz, width in bits), written as `OWN_DEVICE`."""
    usual_name = facts.name.lower()
    per_cycle, share = _TENSOR_CORES.get((facts.major, facts.minor), (0, 0.0))
    clocks = [getattr(facts, name, 0) for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")]
    if torch.version.hip or not per_cycle or not all(clocks) or _OTHERWISE_SLOWED.search(usual_name):
        return None
    clock, memory_clock, width = clocks
    cycles = facts.multi_processor_count * clock / 1e9  # of all multiprocessors, 10^12 a second
    half = per_cycle * cycles * share
    if _AT_HALF_RATE.search(usual_name):
        half = per_cycle / 2 * cycles * 0.85
    single = (128 if (facts.major, facts.minor) == (8, 0) else 256) * cycles * 0.73
    bandwidth = 2 * memory_clock * width / 8 / 1e9 * 2 / 3  # two transfers a cycle
    memory = facts.total_memory // 2**20 - 512  # without CUDA's context
    rates = f"memory={memory}MiB,tflops={half:.4g},bandwidth={bandwidth:.4g}"
    return f"{rates},link={25 if facts.major < 9 else 50},fp32={single:.4g}"


def device_rates(name: str) -> DeviceRates:
    """Return the rates of a device.

    Args:
        name: a usual name (`config.sizes.DEVICE_KINDS`), or rates that the user's device reaches, written as
            in `OWN_DEVICE`. What these do not say is in the ratio that the H200 has.

    Raises:
        PlanError: there is no such device; the error lists the known ones.
    """
    kind = device_kind(name)
    known = {rates.name: rates for rates in DEVICES}
    if kind is not None:
        return known[kind]
    found, hint = repr(name), nearest(name, list(known))
    if "=" in name:
        try:
            return _own_rates(name)
        except ValueError as error:
            found, hint = str(error), ""
    raise PlanError([Problem("device", f"one of {', '.join(known)}, or {OWN_DEVICE}", found, hint)])


def _own_rates(name: str) -> DeviceRates:
    numbers, like = own_device(name), DEVICES[0]
    half = numbers["tflops"] * 1e9
    return DeviceRates(
        name,
        int(numbers["memory"]),
        half,
        numbers.get("fp32", numbers["tflops"] * like.full_flop_per_ms / like.half_flop_per_ms) * 1e9,
        half * like.attention_flop_per_ms / like.half_flop_per_ms,
        numbers["bandwidth"] * 1e9,
        like.launch_ms,
        _link(numbers["link"]),
        workspace_bytes=_HOPPER_WORKSPACE,
        host_bytes=_DESKTOP[0],  # as of an RTX 4090
    )


HALF = (torch.bfloat16, torch.float16)
"""Types whose products run on tensor cores at the rate of 16 bits."""

_GATHERS = frozenset({"embedding", "index_select", "gather", "index", "nll_loss_forward", "slice_backward"})
"""Ops that read only as many bytes of their inputs as they return."""

_QUANTISED_PRODUCTS = frozenset(
    {"gemm_4bit", "gemv_4bit", "int8_linear_matmul", "int8_mixed_scaled_mm", "int8_scaled_mm"}
)
"""Products with weights in 4 or 8 bits (``bitsandbytes/_ops.py``): the activations come first."""

_COPIES_FIRST = frozenset(
    {"masked_fill", "masked_scatter", "index_put", "index_add", "index_copy", "index_fill"}
)
"""Ops that copy their first argument and write into the copy (``TensorAdvancedIndexing.cpp``)."""

_NO_KERNEL = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


def op_ms(
    rates: DeviceRates,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
) -> float:
    """Return how long an aten op takes: the longer of the times for its arithmetic and its memory.

    It is no less than the time of a launch, and 0 for an op without a kernel.

    The op and its arguments are as a dispatch mode gets them; only shapes, strides and types count.
    """
    name = _op_name(func)
    if name in _NO_KERNEL:
        return 0.0
    given = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    half = name in _QUANTISED_PRODUCTS or any(leaf.dtype in HALF for leaf in given)
    product_rate = rates.half_flop_per_ms if half else rates.full_flop_per_ms
    attention = attention_flops(func, args, kwargs)
    if attention is not None:
        rate = rates.attention_flop_per_ms * (product_rate / rates.half_flop_per_ms)
        arithmetic_ms = attention / rate
    else:
        arithmetic_ms = _product_flops(name, func, args, kwargs, result) / product_rate
    moved_bytes = sum(map(_touched_bytes, made)) * (2 if name in _GATHERS else 1)
    if name not in _GATHERS:
        moved_bytes += sum(map(_touched_bytes, given))
    if name in _COPIES_FIRST and not func._schema.is_mutable:  # type: ignore[attr-defined]
        moved_bytes += 2 * made[0].nbytes
    if name == "_safe_softmax":  # then where rows are masked whole is found, and their result replaced
        rows = given[0]
        moved_bytes += moved_bytes + rows.nbytes + 2 * rows.numel()
    return max(arithmetic_ms, moved_bytes / rates.bytes_per_ms, rates.launch_ms)


def attention_flops(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the FLOPs of a fused attention op, half of them if it is causal; ``None`` for other ops.

    Forward has two products of (length x length x width), backward five.
    """
    layout = _attention_layout(func)
    if layout is None:
        return None
    names, backward = layout
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = named["query"].shape, named["key"].shape, named["value"].shape
    pairs = prod(query[:-1]) * key[-2]
    products = pairs * 2 * ((3 * query[-1] + 2 * value[-1]) if backward else (query[-1] + value[-1]))
    return products // 2 if named.get("is_causal") else products


def _product_flops(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
) -> int:
    """Return the FLOPs of an op that multiplies matrices or convolves; of another op 0."""
    if name == "convolution_backward":
        return _flops_behind_convolution(*args)
    if (formula := flop_registry.get(getattr(func, "_overloadpacket", None))) is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if name in _QUANTISED_PRODUCTS:
        return 2 * int(args[0].numel() * result.shape[-1])
    if name == "_grouped_mm":  # of rows, columns or the inner dimension of groups, or of batches
        left, right = args[:2]
        batches = left.shape[0] if left.dim() == right.dim() == 3 else 1
        return 2 * int(batches * prod(left.shape[-2:]) * right.shape[-1])
    return 0


def _flops_behind_convolution(
    gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, *more: Any
) -> int:
    """Return the FLOPs of a convolution's gradients of inputs and weight; of the bias they are not counted.

    PyTorch's formula takes every channel of the gradient with every one of the inputs, also where a group
    has few of them or, in the convolutions of Mamba and of vision models, one.
    """
    transposed, asked = more[4], more[7]
    batch, _, *places = (inputs if transposed else gradient).shape
    return 2 * weight.numel() * batch * prod(places) * sum(asked[:2])


@lru_cache(maxsize=4096)
def _attention_layout(func: Callable[..., Any]) -> tuple[tuple[str, ...], bool] | None:
    """Return a fused attention op's argument names, and whether it is the backward; ``None``: another op."""
    name = _op_name(func)
    if not name.startswith("_scaled_dot_product_") or "math" in name:
        return None
    arguments = func._schema.arguments  # type: ignore[attr-defined]
    return tuple(item.name for item in arguments), name.endswith("backward")


@lru_cache(maxsize=4096)
def _op_name(func: Callable[..., Any]) -> str:
    """Return an op's short name: ``mm`` for ``aten::mm.default``; in-place forms have the same name."""
    schema = getattr(func, "_schema", None)
    name = schema.name if schema is not None else getattr(func, "__name__", "")
    return str(name).rpartition("::")[2].rstrip("_")


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a kernel reads or writes of a tensor; an expanded dimension counts once."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, step in steps if step or not size) * tensor.element_size()
