"""The rows of the frontier, as data. Adding a row is adding one entry to `ROWS`.

Rows that compile stand in groups: one group compiles one graph, later rows of it find it in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.frontier_configs import (
    COMPILED_LEAN_MIX,
    COMPILED_MIX,
    ELEMENTWISE,
    FUSED,
    MIXED,
    eager_mix,
    recipe_with_auto,
    swap_everything,
)
from benchmarks.frontier_methods import (
    Obstacle,
    Setup,
    actswap,
    compiled,
    hf_checkpointing,
    no_compiler,
    no_device,
    no_obstacle,
    no_offload_option,
    no_room_on_host,
    no_trl,
    nothing,
    save_on_cpu,
    trl_offloading,
    without_key,
)
from benchmarks.frontier_planned import Budget, actswap_plan
from benchmarks.frontier_stack import TrainingStep

_JUDGED = ("7b-8k", "7b-32k")


@dataclass(frozen=True)
class Row:
    """One method.

    Args:
        name: unique; what ``--rows`` selects. Ours begin with ``actswap``.
        setup: puts the mechanism on the model.
        config: what ``setup`` is given: plain values, or a function of the number of layers that gives them.
        must_be_exact: output and gradients must equal eager's bit for bit; if not, the run fails.
        compile_group: rows that share compiled graphs; ``""``: compiles nothing. Fused kernels round
            differently, so exactness is not judged there.
        counts_copies: another's method that copies to the host, and does not count how much.
        obstacles: why the row cannot be measured here; the first that says something is named.
        needed_at: the presets at which ``verdict.py`` needs it.
        rank: 1 to 3; what is left out first when minutes are short is 3.
        relative_time: of a step, against eager, to plan the minutes with.
        pinned_share: bytes of pinned memory against the bytes that eager saves, for the same.
        budget: of the planner; its configuration is filled in when what the budget needs has been measured.
    """

    name: str
    setup: Setup
    config: Any = None
    must_be_exact: bool = False
    compile_group: str = ""
    counts_copies: bool = False
    obstacles: tuple[Obstacle, ...] = (no_obstacle,)
    needed_at: tuple[str, ...] = ()
    rank: int = 1
    relative_time: float = 1.0
    pinned_share: float = 0.0
    budget: Budget | None = None

    @property
    def compiles(self) -> bool:
        return bool(self.compile_group)

    def config_for(self, layers: int) -> Any:
        """Return the configuration for a model of so many layers."""
        return self.config(layers) if callable(self.config) else self.config

    def obstacle(self, step: TrainingStep) -> str:
        """Return why it cannot be measured, or ``""``."""
        return next((reason for obstacle in self.obstacles if (reason := obstacle(step))), "")


EAGER = Row("eager", nothing)
"""What all ratios and all gradients are compared with; always measured, and first."""

_PEERS = (
    Row("hf-checkpointing", hf_checkpointing, needed_at=_JUDGED, relative_time=1.3),
    Row(
        "hf-checkpointing-offload",
        hf_checkpointing,
        {"offload": True},
        counts_copies=True,
        obstacles=(no_offload_option,),
        relative_time=1.4,
        pinned_share=0.05,
    ),
    Row(
        "trl-offloading",
        trl_offloading,
        counts_copies=True,
        obstacles=(no_trl, no_room_on_host),
        needed_at=_JUDGED[:1],
        relative_time=2.5,
        pinned_share=1.2,
    ),
    Row(
        "trl-offloading-checkpointing",
        trl_offloading,
        {"checkpointing": True},
        counts_copies=True,
        obstacles=(no_trl,),
        rank=3,
        relative_time=1.4,
        pinned_share=0.05,
    ),
    Row(
        "save-on-cpu",
        save_on_cpu,
        counts_copies=True,
        obstacles=(no_device, no_room_on_host),
        rank=3,
        relative_time=4.5,
        pinned_share=1.8,
    ),
)

_OURS = (
    Row(
        "actswap-default-auto",
        actswap,
        {"swap_config": {"swap": True, "default_prefetch": "auto"}},
        must_be_exact=True,
        needed_at=_JUDGED,
        relative_time=1.05,
        pinned_share=0.1,
    ),
    Row(
        "actswap-case3-auto",
        actswap,
        recipe_with_auto("case3_op_swap.yaml"),
        must_be_exact=True,
        needed_at=_JUDGED,
        relative_time=1.05,
        pinned_share=0.2,
    ),
    Row(
        "actswap-everything-20",
        actswap,
        swap_everything(20),
        must_be_exact=True,
        needed_at=_JUDGED[:1],
        relative_time=2.3,
        pinned_share=1.0,
    ),
    Row(
        "actswap-everything-auto",
        actswap,
        swap_everything("auto"),
        must_be_exact=True,
        relative_time=1.05,
        pinned_share=0.4,
    ),
    Row(
        "actswap-full-recompute",
        actswap,
        {"recompute_config": {"recompute": True}},
        must_be_exact=True,
        rank=3,
        relative_time=1.3,
    ),
    Row(
        "actswap-mixed",
        actswap,
        MIXED,
        must_be_exact=True,
        rank=2,
        relative_time=1.6,
        pinned_share=0.5,
    ),
    Row("actswap-elementwise", actswap, ELEMENTWISE, must_be_exact=True, rank=2, relative_time=1.1),
    Row(
        "actswap-elementwise-fused",
        actswap,
        FUSED,
        compile_group="fused",
        obstacles=(without_key("fused"), no_compiler),
        needed_at=_JUDGED[:1],
        relative_time=1.05,
    ),
    Row(
        "actswap-mix-eager",
        actswap,
        eager_mix,
        must_be_exact=True,
        needed_at=_JUDGED[:1],
        relative_time=1.2,
        pinned_share=0.3,
    ),
)


def _compiled_row(name: str, group: str, config: Mapping[str, Any], **values: Any) -> Row:
    return Row(name, compiled, config, compile_group=group, obstacles=(no_compiler,), **values)


_COMPILED = (
    _compiled_row("compiled", "1.0", {}, needed_at=_JUDGED, relative_time=0.9),
    _compiled_row(
        "actswap-compiled-auto",
        "1.0",
        {"actswap": swap_everything("auto")},
        needed_at=_JUDGED,
        relative_time=0.95,
        pinned_share=0.3,
    ),
    _compiled_row("compiled-budget-0.5", "0.5", {"memory_budget": 0.5}, relative_time=1.0),
    _compiled_row(
        "actswap-compiled-budget-0.5-auto",
        "0.5",
        {"memory_budget": 0.5, "actswap": swap_everything("auto")},
        relative_time=1.0,
        pinned_share=0.3,
    ),
    _compiled_row("compiled-checkpointing", "checkpointing", {"checkpointing": True}, relative_time=1.3),
    _compiled_row("compiled-budget-0.2", "0.2", {"memory_budget": 0.2}, rank=2, relative_time=1.05),
    _compiled_row(
        "actswap-compiled-mix",
        "mix",
        {"actswap": COMPILED_MIX},
        needed_at=_JUDGED,
        relative_time=0.95,
        pinned_share=0.3,
    ),
    _compiled_row(
        "actswap-compiled-lean-mix",
        "lean-mix",
        {"actswap": COMPILED_LEAN_MIX},
        rank=2,
        relative_time=1.0,
        pinned_share=0.15,
    ),
)

BUDGETS = {
    "offload": Budget(peak_of="hf-checkpointing-offload"),
    "checkpointing": Budget(peak_of="hf-checkpointing"),
    "20": Budget(share=0.2),
    "35": Budget(share=0.35),
    "half": Budget(share=0.5),
    "65": Budget(share=0.65),
    "80": Budget(share=0.8),
}
"""Of the planner, the smallest first; figures are percent of eager's activation peak."""

REDUCED = "actswap_plan_reduce"
_PLANNED: dict[str, Any] = {"rank": 3, "relative_time": 1.1, "pinned_share": 0.3}

PLANNER_ROWS: tuple[Row, ...] = (
    *(
        Row(f"actswap_plan_{name}", actswap_plan, budget=budget, must_be_exact=True, **_PLANNED)
        for name, budget in BUDGETS.items()
    ),
    Row(REDUCED, actswap_plan, budget=Budget(reduce_share=0.3), must_be_exact=True, **_PLANNED),
    *(
        _compiled_row(f"actswap_plan_compiled_{name}", "1.0", {}, budget=budget, **_PLANNED)
        for name, budget in BUDGETS.items()
    ),
)

_BY_GROUP = sorted(
    (*_COMPILED, *(row for row in PLANNER_ROWS if row.compiles)),
    key=lambda row: [other.compile_group for other in _COMPILED].index(row.compile_group),
)

ROWS: tuple[Row, ...] = (
    EAGER,
    *_PEERS,
    *_OURS,
    *(row for row in PLANNER_ROWS if not row.compiles),
    *_BY_GROUP,
)
