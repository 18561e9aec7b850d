"""What the planner knows of one training step: plain data, times in ms, sizes in bytes of one rank.

A profile is recorded in warm-up, or computed from shapes; both have one form (`Profile.source` says which it
is). It describes the step *without a policy*: everything is kept. The time and memory of a step under a
policy (a plan) are then predicted from it (`cost.simulate`).

Three numberings meet here:

* **order**: `Use.order` of `plan.saved_bytes`, rising through the forward. An op event covers the orders from
  ``first_order`` to ``last_order``, so that every use belongs to one op event.
* **operators**: autograd nodes in order of creation, from 0 at the start of the forward; the unit of windows.
* **backward place**: number of the op event in the order in which backward reaches them, from 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Ge

from ..config.documents import Bytes, Count, Ms, Share
from ..config.validation import Expected
from ..engine.link import Link
from ..plan.actions import LayerCount
from ..plan.saved_bytes import OpCall, SavedBytes


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One call of an op in forward, with its nodes' part of backward. There are no gaps between op events.

    Args:
        call: (scope, op path, ordinal) as plan rows name them; scope ``None``: outside all scopes. What runs
            between functions (custom autograd functions, indexing) is an op event of its module.
        first_order, last_order: orders of its first and last use; ``last_order < first_order``: it has none.
        first_op: operator number of the first autograd node that it creates, or would create.
        num_ops: how many autograd nodes it creates.
        forward_ms, backward_ms: compute time.
        forward_base_bytes, backward_base_bytes: the most device memory in use while it runs, less the
            storages of `Profile.saved` that are alive then; weights, gradients and optimizer states included.
        backward_place: its number in the order of backward; -1 where backward does not visit it.
        communicates: whether it runs a collective.
        random: whether it draws random numbers.
    """

    call: OpCall
    first_order: Count
    last_order: Count
    first_op: Count
    num_ops: Count
    forward_ms: Ms
    backward_ms: Ms
    forward_base_bytes: Bytes
    backward_base_bytes: Bytes
    backward_place: Annotated[int, Ge(-1), Expected("a number, or -1")]
    communicates: bool = False
    random: bool = False


CompileVariant = tuple[float, tuple[str, ...], tuple[str, ...]]
"""Share, recomputed paths and kept paths with which a layer is compiled (see `FrontierPoint`)."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One way to compile a layer so that it saves less than by default, and what that saves and costs.

    Memory and time are ratios, because layers may differ in size. "All bytes" are those that a layer saves
    by default, without its input and its output.

    Args:
        share: share of its activation memory that the layer may save (`COMPILE_BUDGET`); 1: no limit.
        recomputed: op paths that the compiler is asked to run again.
        kept: op paths inside ``recomputed`` that it is asked to save.
        saved: bytes that the layer saves, divided by all bytes.
        again: time that is added to its backward, divided by the time of its forward.
        passing: temporary bytes that are added while it runs, beyond what it saves and what it needs by
            default, divided by all bytes.
        measured: whether a step has shown these values; else they are guessed.
    """

    share: Share = 1.0
    recomputed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    saved: Share = 1.0
    again: Ms = 0.0
    passing: float = 0.0
    measured: bool = False

    @property
    def variant(self) -> CompileVariant:
        """The settings that the compiler is given; layers with equal settings share one graph."""
        return self.share, self.recomputed, self.kept


@dataclass(frozen=True)
class Profile:
    """A step of one micro-batch on one rank.

    Args:
        saved: what autograd saves, each storage with its uses.
        op_events: calls of ops, in the order of forward.
        num_layers: number of decoder layers.
        family: ``model_type``.
        compiled_layers: layers that the compiler runs as one op; their inside is not seen.
        link: rates between host and device; ``None``: copies do not overlap compute.
        device: name of the device.
        device_bytes: the most memory that a process can use on it.
        outside_ms: the time of a step outside forward and backward (optimizer, gradient reduction).
        outside_base_bytes: the most device memory in use outside forward and backward.
        optimizer_state_bytes: part of every ``base_bytes``, which ``preference: memory_saving`` moves away.
        reserved_bytes: what the allocator held beyond what was in use, at the peak (fragments).
        signature: digest of ``saved``, which tells steps apart that save other tensors.
        batch_shape: shape of the input ids.
        source: ``measured`` in a step, or computed from ``shapes``.
        frontier: other ways to compile the compiled layers, with what is guessed or measured of them. Limits
            on their memory alone are known without being listed (`compiled_shares`).
        weight_bytes: part of every ``base_bytes``, buffers included; 0: not known.
        gradient_bytes: part of ``backward_base_bytes``, by op event: gradients of weights that are complete
            when it begins; and last, all of them when backward has ended. Empty: not known.
        hooks: the moments at which autograd saved any tensor, also one that ``saved`` leaves out (weights,
            tables that layers share): (order of the last use so far, operator). The engine gets control at
            these. Empty: not known; then it is assumed to get control where ``saved`` has a saved tensor.
    """

    saved: SavedBytes
    op_events: tuple[OpEvent, ...]
    num_layers: LayerCount
    family: str
    compiled_layers: frozenset[Count]
    link: Link | None
    device: str
    device_bytes: Bytes
    outside_ms: Ms
    outside_base_bytes: Bytes
    optimizer_state_bytes: Bytes
    reserved_bytes: Bytes
    signature: str
    batch_shape: tuple[Count, ...]
    source: Literal["measured", "shapes"]
    frontier: tuple[FrontierPoint, ...] = ()
    hooks: tuple[tuple[Count, Count], ...] = ()
    weight_bytes: Bytes = 0
    gradient_bytes: tuple[Bytes, ...] = ()

    @property
    def compute_ms(self) -> float:
        """The time of forward and backward without any policy."""
        return sum(op_event.forward_ms + op_event.backward_ms for op_event in self.op_events)


@dataclass(frozen=True)
class Limits:
    """What a plan must keep within.

    Args:
        device_bytes: the most device memory in use at any time of the step, on any rank.
        host_bytes: the most host memory of one rank; ``None``: no cap.
        min_tensor_bytes: smaller tensors are never swapped.
        swap_bucket_bytes: the most that is swapped in each stage (``swap_bucket_size``); ``None``: no cap.
        layers_per_stage: decoder layers of a stage (``num_attn_layers_per_stage``).
        frees_optimizer_states: whether the optimizer's states are on the host during forward and backward
            (``memory_saving``).
        waiting: how many other micro-batches of a pipeline hold their kept tensors while one runs.
        resident: how much swapped memory of other micro-batches is on the device meanwhile, as a share of
            what one micro-batch swaps.
    """

    device_bytes: int
    host_bytes: int | None = None
    min_tensor_bytes: int = 2**20
    swap_bucket_bytes: int | None = None
    layers_per_stage: int = 1
    frees_optimizer_states: bool = False
    waiting: float = 0.0
    resident: float = 0.0

    def beside_states(self, profile: Profile) -> Limits:
        """Return the limits with the host memory that the optimizer's states leave, if they are there."""
        if self.host_bytes is None or not self.frees_optimizer_states:
            return self
        return replace(self, host_bytes=max(self.host_bytes - profile.optimizer_state_bytes, 0))

    def with_others(self, one: Prediction) -> Prediction:
        """Return ``one`` with the memory of a pipeline's other micro-batches added to its peak."""
        others_bytes = int(self.waiting * one.kept_bytes + self.resident * one.swapped_bytes)
        return replace(one, peak_bytes=one.peak_bytes + others_bytes)


@dataclass(frozen=True, slots=True)
class CopyTimes:
    """One swapped storage in a predicted step; times in ms since the step began.

    Args:
        storage: its number in `Profile.saved`.
        call: the call that produced it.
        size_bytes: the bytes that are copied.
        out_start_ms, out_end_ms: start and end of the copy to the host.
        release_ms: when its device memory is free.
        in_start_ms, in_end_ms: start and end of the copy back.
        read_ms: when backward first reads it.
    """

    storage: int
    call: OpCall
    size_bytes: int
    out_start_ms: float
    out_end_ms: float
    release_ms: float
    in_start_ms: float
    in_end_ms: float
    read_ms: float


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Device memory from ``ms`` on, until the next point.

    Args:
        ms: since the step began.
        base_bytes: weights, gradients, optimizer states, what ops use while they run.
        kept_bytes: saved storages that are never released before backward reads them.
        swapped_bytes: swapped storages while they are on the device.
        rebuilt_bytes: storages that recomputation has rebuilt, or will drop once forward has read them.
    """

    ms: float
    base_bytes: int
    kept_bytes: int
    swapped_bytes: int
    rebuilt_bytes: int

    @property
    def total_bytes(self) -> int:
        """All device memory in use."""
        return self.base_bytes + self.kept_bytes + self.swapped_bytes + self.rebuilt_bytes


@dataclass(frozen=True)
class Prediction:
    """A predicted step under a plan.

    Args:
        step_ms: time of forward, backward and what is outside them.
        compute_ms: time of forward and backward without a policy.
        recompute_ms: time of what runs again.
        forward_stall_ms, backward_stall_ms: time for which compute waits for copies.
        forward_end_ms: when forward ends.
        peak_bytes: the most device memory in use.
        peak_at: the call that ran then.
        memory: device memory over time; may be empty.
        copies: the swapped storages, in the order of the copies out.
        kept_bytes, swapped_bytes, recomputed_bytes: what autograd saves without a policy, by its fate; kept
            includes what recomputation holds in addition.
        host_bytes: the most host memory in use.
        peak_gradient_bytes: part of the peak: gradients of weights (`Profile.gradient_bytes`).
    """

    step_ms: float
    compute_ms: float
    recompute_ms: float
    forward_stall_ms: float
    backward_stall_ms: float
    forward_end_ms: float
    peak_bytes: int
    peak_at: OpCall
    memory: tuple[MemoryPoint, ...]
    copies: tuple[CopyTimes, ...]
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    host_bytes: int
    peak_gradient_bytes: int = 0
