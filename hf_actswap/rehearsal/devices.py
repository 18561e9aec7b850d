"""What PyTorch is told about a device: name, memory, compute capability, sizes of its parts.

These are facts of data sheets and of what the driver reports. Rates, which a clock needs, are in the
planner's table (`planner.devices`) under the same names.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.sizes import device_kind
from ..errors import nearest
from .errors import one_problem

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One kind of NVIDIA device.

    Args:
        kind: its name in the planner's table.
        name: what the driver calls it.
        memory_mib: its memory, as the driver reports it.
        capability: compute capability.
        processors: streaming multiprocessors.
        threads: most threads of one of them.
        shared_bytes: most shared memory of a block of threads.
        l2_mib: its second-level cache.
    """

    kind: str
    name: str
    memory_mib: int
    capability: tuple[int, int]
    processors: int
    threads: int
    shared_bytes: int
    l2_mib: int

    @property
    def memory_bytes(self) -> int:
        """Its memory in bytes."""
        return self.memory_mib * _MIB


DEVICES: tuple[DeviceFacts, ...] = (
    DeviceFacts("H200", "NVIDIA H200", 143156, (9, 0), 132, 2048, 232448, 50),
    DeviceFacts("H100", "NVIDIA H100 80GB HBM3", 81090, (9, 0), 132, 2048, 232448, 50),
    DeviceFacts("A100-80", "NVIDIA A100-SXM4-80GB", 81152, (8, 0), 108, 2048, 166912, 40),
    DeviceFacts("A100-40", "NVIDIA A100-SXM4-40GB", 40345, (8, 0), 108, 2048, 166912, 40),
    DeviceFacts("B200", "NVIDIA B200", 182642, (10, 0), 148, 2048, 232448, 126),
    DeviceFacts("L40S", "NVIDIA L40S", 45488, (8, 9), 142, 1536, 101376, 96),
    DeviceFacts("RTX 4090", "NVIDIA GeForce RTX 4090", 24110, (8, 9), 128, 1536, 101376, 72),
    DeviceFacts("RTX 3090", "NVIDIA GeForce RTX 3090", 24257, (8, 6), 82, 1536, 101376, 6),
    DeviceFacts("RTX 5090", "NVIDIA GeForce RTX 5090", 32111, (12, 0), 170, 1536, 101376, 96),
    DeviceFacts("RTX A6000", "NVIDIA RTX A6000", 48670, (8, 6), 84, 1536, 101376, 6),
    DeviceFacts("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation", 48640, (8, 9), 142, 1536, 101376, 96),
    DeviceFacts(
        "RTX PRO 6000",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        *(97250, (12, 0), 188, 1536, 101376, 128),
    ),
    DeviceFacts("A10G", "NVIDIA A10G", 22502, (8, 6), 80, 1536, 101376, 6),
    DeviceFacts("A40", "NVIDIA A40", 45416, (8, 6), 84, 1536, 101376, 6),
    DeviceFacts("L4", "NVIDIA L4", 22560, (8, 9), 58, 1536, 101376, 48),
    DeviceFacts("H100 PCIe", "NVIDIA H100 PCIe", 81079, (9, 0), 114, 2048, 232448, 50),
    DeviceFacts("H100 NVL", "NVIDIA H100 NVL", 95320, (9, 0), 132, 2048, 232448, 60),
)


def device_facts(name: str) -> DeviceFacts:
    """Return the facts of a device that is called by one of its usual names (``H100``, ``rtx 4090``).

    Raises:
        RehearsalError: there is no such device, or it runs no CUDA.
    """
    kind = device_kind(name)
    for facts in DEVICES:
        if facts.kind == kind:
            return facts
    known = [facts.kind for facts in DEVICES]
    if kind is not None:
        raise one_problem(
            "--device", f"a CUDA device: one of {', '.join(known)}", repr(name), "It runs no CUDA."
        )
    raise one_problem("--device", f"one of {', '.join(known)}", repr(name), nearest(name, known))
