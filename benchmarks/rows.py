"""The rows of the frontier, as data, with their configurations. To add a row, add one entry to `ROWS`.

Rows that compile are in groups: the first row of a group compiles a graph, the others find it in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.methods import (
    Budget,
    Obstacle,
    Setup,
    actswap,
    actswap_plan,
    compiled,
    flash_attention,
    hf_checkpointing,
    liger_checkpointing,
    no_compiler,
    no_device,
    no_head,
    no_liger,
    no_room_on_host,
    no_trl,
    nothing,
    save_on_cpu,
    trl_offloading,
)
from benchmarks.workloads import TrainingStep

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def swap_everything(prefetch: int | str) -> dict[str, Any]:
    """Return the configuration that swaps everything that any layer saves."""
    return {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": prefetch, "layers": True}]}}


def recipe_with_auto(name: str) -> Callable[[int], dict[str, Any]]:
    """Return a recipe's swap section with every prefetch ``auto``, less the layers that a model lacks."""

    def config(layers: int) -> dict[str, Any]:
        document = yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))
        rules = [
            {**rule, "backward_prefetch": "auto", "layers": present}
            for rule in document["swap_config"]["op_swap"]
            if (present := [layer for layer in rule["layers"] if layer < layers])
        ]
        return {"swap_config": {"swap": True, "op_swap": rules}}

    return config


MIXED = {
    "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": True}]},
    "recompute_config": {
        "select_recompute": {
            r"feed_forward\.mul": True,
            r"feed_forward\.w1\.activation\.silu": True,
            r".*_norm": True,
        }
    },
}
"""Recomputes cheap ops, swaps the rest."""

_ELEMENTWISE = {
    r"input_layernorm\..*": True,
    r"post_attention_layernorm\..*": True,
    r"mlp\.act_fn\.silu": True,
    r"mlp\.mul": True,
}
ELEMENTWISE = {"recompute_config": {"select_recompute": _ELEMENTWISE}}
"""Recomputes all elementwise ops of a layer, nothing else. The rotation of q and k is kept: to run again it
would hold as many bytes as it drops."""


_RECOMPUTED: dict[str, Any] = {"recompute_config": {"recompute": True}}
TILED_LOSS: dict[str, Any] = {"tile_config": {"loss": "auto"}}
"""Runs head and loss in tiles of tokens: no step holds all logits."""
TILED_LAYERS = {
    "tile_config": {"tile": {"op_name": ["feed_forward", "attention_norm", "ffn_norm"]}},
    **_RECOMPUTED,
}
"""Recomputes layers, with MLPs and norms in tiles: in all one more forward than without, not two."""
TILED_STEP = {
    "tile_config": {
        "tile": {"op_name": ["feed_forward", "attention_norm", "ffn_norm", "final_norm"]},
        "loss": "auto",
    },
    **_RECOMPUTED,
    "swap_config": {"swap": True, "layer_swap": [], "recompute_input": True, "default_prefetch": "auto"},
}
"""Combines all that allows long sequences: no activations of a layer stay on the device, and no logits."""
STREAMED = {"stream_config": {"tokens": "auto"}, **TILED_LOSS}
"""Streams the sequence in chunks, with keys and values on the host."""


def eager_mix(layers: int) -> dict[str, Any]:
    """Swap x, q, k, v, the attention output and the sum after it; recompute gate, up and elementwise ops.

    The swapped tensors are expensive to recompute. At 8,192 tokens they are about as many bytes as the link
    can hide: 6 hidden states of 64 MiB for a 7B layer, while 6.5 can be copied in its forward. The last layer
    keeps these tensors, because backward needs them at once. The reference would keep the inputs of
    recomputed ops (x, and the sum).
    """
    swapped = list(range(max(1, layers - 1)))
    products = {r"mlp\.gate_proj\.linear": True, r"mlp\.up_proj\.linear": True}
    return {
        "swap_config": {
            "swap": True,
            "layer_swap": [{"backward_prefetch": 30, "layers": swapped}],
            "select_recompute_input": True,
        },
        "recompute_config": {"select_recompute": {**_ELEMENTWISE, **products}},
    }


_REBUILT = {
    "feed_forward": True,
    r"input_layernorm\.mul": True,
    r"post_attention_layernorm\.mul": True,
}


def compiled_mix(layers: int) -> dict[str, Any]:
    """Recompute 10 of 16 hidden states of a compiled 7B layer: gate, up, their product, both normed inputs.

    The other six are swapped: x, q, k, v, the attention core's output and its projection; in the last layer
    they stay, because backward needs them at once. At 8,192 tokens the six are 6.0 GB in the model, 110 ms of
    copies beside about 103 ms of forward, and the two matrix products that run again add 29 ms to 329 (HF
    checkpointing: 502 in all). At 32,768 tokens it is 146 ms beside 206, and 43 ms more than 740 (1060).
    """
    swapped = list(range(max(1, layers - 1)))
    return {
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 60, "layers": swapped}]},
        "recompute_config": {"select_recompute": _REBUILT},
    }


def compiled_lean_mix(layers: int) -> dict[str, Any]:
    """Recompute q, k and v too: half the bytes on the link for 16 ms more at 8,192 tokens (24 at 32,768)."""
    return {
        **compiled_mix(layers),
        "recompute_config": {
            "select_recompute": {**_REBUILT, "attention": True},
            "select_recompute_exclude": {r"attention\.flash_attention": True},
        },
    }


def _in_compiled(mix: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    return lambda layers: {"actswap": mix(layers)}


@dataclass(frozen=True)
class Row:
    """One method.

    Args:
        name: unique name, which ``--rows`` selects. Ours begin with ``actswap``.
        setup, config: context manager that puts the method on the model, and its options: plain values, or a
            function of the number of layers that returns them.
        must_be_exact: whether output and gradients must equal eager's bit for bit; if not, the run fails.
        compile_group: name shared by rows with the same compiled graphs; ``""``: compiles nothing. Fused
            kernels round differently, so exactness is not judged for compiled rows.
        counts_copies: whether the benchmark counts copies to the host, because the method does not.
        obstacles: say why the row cannot be measured here; the first reason is recorded.
        relative_time, pinned_share: estimated time of a step over eager's, and pinned memory over the bytes
            that eager saves, to plan the time of a run.
        budget: of the planner; makes the configuration when the rows that it needs are measured.
    """

    name: str
    setup: Setup
    config: Any = None
    must_be_exact: bool = False
    compile_group: str = ""
    counts_copies: bool = False
    obstacles: tuple[Obstacle, ...] = ()
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
        """Return why the row cannot be measured, or ``""``."""
        return next((reason for obstacle in self.obstacles if (reason := obstacle(step))), "")


EAGER = Row("eager", nothing)
"""The row with which all times, memory and gradients are compared; it is always measured, and first."""


# What rows have in common whose library copies to the host and does not count it.
_LITTLE: dict[str, Any] = {"counts_copies": True, "relative_time": 1.4, "pinned_share": 0.05}
_MUCH: dict[str, Any] = {"counts_copies": True, "pinned_share": 1.2, "relative_time": 2.5}
FLASH = "eager-flash"
"""Eager under the attention of the steps that compare gradients; on Hopper timed steps use cuDNN's."""
AGAIN = "-again"
REPEATED: tuple[Row, ...] = (
    Row(f"{EAGER.name}{AGAIN}", nothing),
    Row(f"hf-checkpointing{AGAIN}", hf_checkpointing, relative_time=1.3),
)
"""Rows measured once more at the end of a stage, because clocks drift; not in `ROWS`."""

_CHECKPOINTING: dict[str, Any] = {"checkpointing": True}
_LIGER: dict[str, Any] = {"obstacles": (no_head, no_liger)}
_PEERS = (
    Row(FLASH, flash_attention),
    Row("hf-checkpointing", hf_checkpointing, relative_time=1.3),
    Row(
        "hf-checkpointing-offload",
        hf_checkpointing,
        {"offload": True},
        obstacles=(no_device,),
        **_LITTLE,
    ),
    Row("trl-offloading", trl_offloading, obstacles=(no_trl, no_room_on_host), **_MUCH),
    Row("trl-offloading-checkpointing", trl_offloading, _CHECKPOINTING, obstacles=(no_trl,), **_LITTLE),
    Row("liger-checkpointing", liger_checkpointing, relative_time=1.35, **_LIGER),
    Row(
        "liger-tiled-mlp-checkpointing", liger_checkpointing, {"tiled_mlp": True}, relative_time=1.5, **_LIGER
    ),
    Row(
        "save-on-cpu",
        save_on_cpu,
        obstacles=(no_device, no_room_on_host),
        **_MUCH | {"relative_time": 4.5, "pinned_share": 1.8},
    ),
)


def _ours(name: str, config: Any, time: float, pinned: float = 0.0, **more: Any) -> Row:
    values = {"relative_time": time, "pinned_share": pinned, "must_be_exact": True, **more}
    return Row(name, actswap, config, **values)


# Gradients of weights are sums over tiles, which are not bitwise equal to eager's.
_IN_TILES: dict[str, Any] = {"must_be_exact": False, "obstacles": (no_head,)}
_OURS = (
    _ours("actswap-default-auto", {"swap_config": {"swap": True, "default_prefetch": "auto"}}, 1.05, 0.1),
    _ours("actswap-case3-auto", recipe_with_auto("case3_op_swap.yaml"), 1.05, 0.2),
    _ours("actswap-everything-20", swap_everything(20), 2.3, 1.0),
    _ours("actswap-everything-auto", swap_everything("auto"), 1.05, 0.4),
    _ours("actswap-full-recompute", _RECOMPUTED, 1.3),
    _ours("actswap-mixed", MIXED, 1.6, 0.5),
    _ours("actswap-elementwise", ELEMENTWISE, 1.1),
    _ours("actswap-mix-eager", eager_mix, 1.2, 0.3),
    _ours("actswap-tiled-loss", TILED_LOSS, 1.05, **_IN_TILES),
    _ours("actswap-tiled-loss-recompute", TILED_LOSS | _RECOMPUTED, 1.35, **_IN_TILES),
    _ours("actswap-tiled-layers-recompute", TILED_LAYERS, 1.4, must_be_exact=False),
    _ours("actswap-streamed", STREAMED, 1.7, 0.5, **_IN_TILES),
    _ours("actswap-tiled-step", TILED_STEP, 1.45, 0.1, **_IN_TILES),
)


def _compiled_row(name: str, group: str, config: Any, relative_time: float, **values: Any) -> Row:
    values |= {"compile_group": group, "obstacles": (no_compiler,), "relative_time": relative_time}
    return Row(name, compiled, config, **values)


_EVERYTHING = {"actswap": swap_everything("auto")}
_HALF = {"memory_budget": 0.5}
_COMPILED = (
    _compiled_row("compiled", "1.0", {}, 0.9),
    _compiled_row("actswap-compiled-auto", "1.0", _EVERYTHING, 0.95, pinned_share=0.3),
    _compiled_row("compiled-budget-0.5", "0.5", _HALF, 1.0),
    _compiled_row("actswap-compiled-budget-0.5-auto", "0.5", {**_HALF, **_EVERYTHING}, 1.0, pinned_share=0.3),
    _compiled_row("compiled-checkpointing", "checkpointing", _CHECKPOINTING, 1.3),
    _compiled_row("compiled-budget-0.2", "0.2", {"memory_budget": 0.2}, 1.05),
    _compiled_row("actswap-compiled-mix", "mix", _in_compiled(compiled_mix), 0.95, pinned_share=0.3),
    _compiled_row(
        "actswap-compiled-lean-mix", "lean-mix", _in_compiled(compiled_lean_mix), 1.0, pinned_share=0.15
    ),
)

BUDGETS = {
    "offload": Budget(peak_of="hf-checkpointing-offload"),
    "checkpointing": Budget(peak_of="hf-checkpointing"),
    "half": Budget(share=0.5),
    **{str(percent): Budget(share=percent / 100) for percent in (20, 35, 65, 80)},
}
"""Budgets of the planner; numbers are percent of eager's activation peak."""

_PLANNED: dict[str, Any] = {"relative_time": 1.1, "pinned_share": 0.3}
_PLANNED_EXACT = _PLANNED | {"must_be_exact": True}

PLANNER_ROWS: tuple[Row, ...] = (
    *(
        Row(f"actswap_plan_{name}", actswap_plan, budget=budget, **_PLANNED_EXACT)
        for name, budget in BUDGETS.items()
    ),
    Row("actswap_plan_reduce", actswap_plan, budget=Budget(reduce_share=0.3), **_PLANNED_EXACT),
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


def with_bases(chosen: Sequence[Row], rows: Sequence[Row] = ROWS) -> list[Row]:
    """Return eager, then the chosen rows and the rows that their budgets need, in the table's order."""
    names = {row.name for row in chosen}
    names |= {base for row in chosen if row.budget is not None for base in row.budget.needs}
    return [EAGER, *(row for row in rows if row.name in names and row.name != EAGER.name)]
