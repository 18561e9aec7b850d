"""Writes the tables of docs/configuration.md from the schema and from what the loader says.

    python docs/make_configuration.py

Names and defaults are those of the dataclasses in `hf_actswap/config/schema.py`, meanings their docstrings. A
type is what the loader expects: a value that nothing accepts is written for each key, and the error is read.
Units, examples and links stand below. What lies between two markers of the page is replaced.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
sys.path.insert(0, str(ROOT))

from docs.make_schema import documented  # noqa: E402 - the package need not be installed
from hf_actswap.config import (  # noqa: E402
    LayerSwapRule,
    MemoryConfig,
    OpSwapRule,
    OpTileRule,
    ParallelConfig,
    RecomputeConfig,
    StreamConfig,
    SwapConfig,
    TileConfig,
    load_config,
)
from hf_actswap.config.keys import (  # noqa: E402
    FOREIGN_PARALLEL_KEYS,
    FOREIGN_SECTIONS,
    MINDSPEED_COUNTERPARTS,
    MINDSPEED_IGNORED,
    MODE_FLAGS,
    PARALLEL_SPELLINGS,
)
from hf_actswap.errors import ConfigError  # noqa: E402

SECTIONS: Mapping[str, type] = {
    "swap_config": SwapConfig,
    "layer_swap": LayerSwapRule,
    "op_swap": OpSwapRule,
    "recompute_config": RecomputeConfig,
    "parallel_config": ParallelConfig,
    "tile_config": TileConfig,
    "tile": OpTileRule,
    "stream_config": StreamConfig,
    "memory": MemoryConfig,
}
"""Table to the dataclass of its keys. Entries of ``layer_swap``, ``op_swap``, ``tile`` are sections too."""

UNITS: Mapping[str, str] = {
    "default_prefetch": "operators",
    "backward_prefetch": "operators",
    "layers": "layers, from 0",
    "recompute_input": "layers, from 0",
    "select_recompute_input": "layers, from 0",
    "compile_budget": "share of activation memory",
    "tensor_parallel_size": "processes",
    "pipeline_stage": "stages",
    "pp_interleave_num": "interleaves",
    "offset": "layers",
    "loss": "tiles, or tokens",
    "tokens": "tokens",
    "budget_gib": "GiB per rank",
    "reduce_by_gib": "GiB per rank",
    "margin_gib": "GiB per rank",
    "warmup_steps": "optimizer steps",
    "search_steps": "optimizer steps",
    "num_attn_layers_per_stage": "layers",
    "swap_bucket_size": "bytes",
    "min_tensor_mib": "MiB",
    "host_memory_gib": "GiB per rank",
    "in_backward_clip_value": "of a gradient's element",
    "in_backward_clip_last_norm": "norm of all gradients",
    "target_memory": "bytes",
    "reduction_memory": "bytes",
    "tensor_size_filter": "bytes",
    "redundant_memory": "bytes",
    "warmup_step": "optimizer steps",
    "stable_step": "optimizer steps, from 0",
}

EXAMPLES: Mapping[tuple[str, str], str] = {
    ("swap_config", "swap"): "swap: true",
    ("swap_config", "default_prefetch"): "default_prefetch: 20",
    ("swap_config", "layer_swap"): "layer_swap: [{backward_prefetch: 20, layers: [0, 3]}]",
    ("swap_config", "op_swap"): "op_swap: [{op_name: attention, backward_prefetch: 20, layers: true}]",
    ("swap_config", "recompute_input"): "recompute_input: [0, 1, 2]",
    ("swap_config", "select_recompute_input"): "select_recompute_input: true",
    ("layer_swap", "backward_prefetch"): "backward_prefetch: auto",
    ("layer_swap", "layers"): "layers: [0, 3]",
    ("op_swap", "op_name"): r"op_name: ['feed_forward\.w1', 'attention\.flash_attention']",
    ("op_swap", "backward_prefetch"): "backward_prefetch: 15",
    ("op_swap", "layers"): "layers: true",
    ("recompute_config", "recompute"): "recompute: [3]",
    ("recompute_config", "select_recompute"): r"select_recompute: {'feed_forward\.mul': true}",
    ("recompute_config", "select_comm_recompute"): r"select_comm_recompute: ['ffn_norm\.norm']",
    ("recompute_config", "select_recompute_exclude"): "select_recompute_exclude: {mlp.gate_proj: true}",
    ("recompute_config", "select_comm_recompute_exclude"): "select_comm_recompute_exclude: [ffn_norm.norm]",
    ("recompute_config", "parallel_optimizer_comm_recompute"): "parallel_optimizer_comm_recompute: true",
    ("recompute_config", "mp_comm_recompute"): "mp_comm_recompute: false",
    ("recompute_config", "recompute_slice_activation"): "recompute_slice_activation: true",
    ("recompute_config", "compile_budget"): "compile_budget: 0.5",
    ("parallel_config", "tensor_parallel_size"): "tensor_parallel_size: 2",
    ("parallel_config", "sequence_parallel_enabled"): "sequence_parallel_enabled: true",
    ("parallel_config", "pipeline_stage"): "pipeline_stage: 2",
    ("parallel_config", "pp_interleave_num"): "pp_interleave_num: 2",
    ("parallel_config", "offset"): "{pipeline_stage: 2, offset: [1, 0]}",
    ("parallel_config", "schedule"): "{pipeline_stage: 2, schedule: 1f1b}",
    ("tile_config", "loss"): "loss: {tokens: 4096}",
    ("tile_config", "tile"): "tile: {op_name: feed_forward}",
    ("tile", "op_name"): "op_name: [feed_forward, ffn_norm]",
    ("tile", "tokens"): "tokens: 8192",
    ("tile", "layers"): "layers: [0, 1, 2]",
    ("stream_config", "tokens"): "tokens: auto",
    ("stream_config", "grad_accum_dtype"): "grad_accum_dtype: bf16",
    ("memory", "mode"): "mode: smart_swap",
    ("memory", "budget_gib"): "budget_gib: 40",
    ("memory", "reduce_by_gib"): "reduce_by_gib: 3",
    ("memory", "margin_gib"): "margin_gib: 2",
    ("memory", "preference"): "preference: memory_saving",
    ("memory", "warmup_steps"): "warmup_steps: 3",
    ("memory", "search_steps"): "search_steps: 4",
    ("memory", "num_attn_layers_per_stage"): "num_attn_layers_per_stage: 2",
    ("memory", "swap_bucket_size"): "swap_bucket_size: 1073741824",
    ("memory", "min_tensor_mib"): "min_tensor_mib: 1",
    ("memory", "host_memory_gib"): "host_memory_gib: 64",
    ("memory", "bind_numa"): "bind_numa: false",
    ("memory", "verify"): "verify: always",
    ("memory", "weights"): "weights: host",
    ("memory", "optimizer_in_backward"): "optimizer_in_backward: true",
    ("memory", "in_backward_clip_value"): "{optimizer_in_backward: true, in_backward_clip_value: 1.0}",
    (
        "memory",
        "in_backward_clip_last_norm",
    ): "{optimizer_in_backward: true, in_backward_clip_last_norm: 1.0}",
    ("memory", "plan_file"): "plan_file: plan.json",
}
"""A line of YAML for each key, as it stands below its section, with the keys that it needs beside it."""

LINKS: Mapping[str, str] = {
    "default_prefetch": "reference.md#windows-units-the-factor-3-clamps",
    "backward_prefetch": "reference.md#windows-units-the-factor-3-clamps",
    "layer_swap": "reference.md#first-entry-wins",
    "op_swap": "reference.md#first-entry-wins",
    "op_name": "reference.md#separators",
    "recompute_input": "reference.md#the-input-of-recomputed-layers",
    "select_recompute_input": "reference.md#the-input-of-recomputed-layers",
    "select_recompute": "reference.md#what-select_recompute-runs-again",
    "select_recompute_exclude": "reference.md#exclude-drops-the-pattern-for-all-layers",
    "select_comm_recompute": "reference.md#communication-inside-layers",
    "select_comm_recompute_exclude": "reference.md#communication-inside-layers",
    "parallel_optimizer_comm_recompute": "reference.md#communication-inside-layers",
    "mp_comm_recompute": "reference.md#communication-inside-layers",
    "recompute_slice_activation": "reference.md#communication-inside-layers",
    "compile_budget": "reference.md#recomputation-in-compiled-layers",
    "tensor_parallel_size": "parallel.md",
    "sequence_parallel_enabled": "parallel.md",
    "loss": "reference.md#head-and-loss-in-tiles",
    "tile": "reference.md#modules-in-tiles",
    "mode": "planner.md",
    "preference": "planner.md#the-optimizers-states",
    "warmup_steps": "planner.md#three-phases",
    "search_steps": "planner.md#three-phases",
    "host_memory_gib": "reference.md#host-memory",
    "bind_numa": "reference.md#host-memory",
    "verify": "reference.md#recomputation-is-tested-in-the-first-step",
    "weights": "frozen_weights.md",
    "optimizer_in_backward": "planner.md#the-optimizer-in-backward",
    "in_backward_clip_value": "planner.md#the-optimizer-in-backward",
    "in_backward_clip_last_norm": "planner.md#the-optimizer-in-backward",
    "plan_file": "planner.md",
}
"""Where more stands about a key."""

_ENTRY = {"layer_swap": {"backward_prefetch": 1, "layers": True}}
_ENTRY["op_swap"] = {"op_name": "attention", **_ENTRY["layer_swap"]}
_ENTRY["tile"] = {"op_name": "feed_forward"}


_BLOCK = re.compile(r"(<!-- from the schema: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def document_with(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole document in which ``section`` holds ``values``."""
    if section in _ENTRY:
        around = {"tile_config": {}} if section == "tile" else {"swap_config": {"swap": True}}
        ((name, beside),) = around.items()
        return {name: {**beside, section: [{**_ENTRY[section], **values}]}}
    return {section: dict(values)}


def expected(section: str, key: str, *, swap: bool = False) -> str:
    """Return what the loader would have accepted for a key, from the error that it raises; empty if all."""
    refused: Any = True if key.endswith("_exclude") else object()  # which has no default ops
    document = document_with(section, {key: refused})
    if swap:
        document = {"swap_config": {"swap": True}, **document}
    try:
        load_config(document)
    except ConfigError as error:
        found: str = next(one.expected for one in error.problems if one.where.rpartition(".")[2] == key)
        return found
    return ""


def with_tables(page: str) -> str:
    """Return the page with every table as it is now."""
    return _BLOCK.sub(lambda match: f"{match[1]}\n{_table(match[2])}\n{match[3]}", page)


def _table(name: str) -> str:
    if name in SECTIONS:
        head = ("key", "type", "unit", "default", "meaning", "example")
        return _markdown(head, _each_type_once([_key_row(name, field) for field in fields(SECTIONS[name])]))
    if name == "mindspeed":
        return _markdown(("setting", "type", "unit", "sets"), _mindspeed_rows())
    if name == "mindspeed_notes":
        rows = [(f"`{key}`", instead.replace("<", "&lt;")) for key, instead in MINDSPEED_IGNORED.items()]
        return _markdown(("setting", "what happens instead"), rows)
    if name == "spellings":
        several = {ours: also for ours, also in PARALLEL_SPELLINGS.items() if len(also) > 1}
        return _markdown(("key", "also written"), [_spellings_row(*item) for item in several.items()])
    names = {"ignored_sections": FOREIGN_SECTIONS - {"parallel"}, "ignored_parallel": FOREIGN_PARALLEL_KEYS}
    return _filled(", ".join(f"`{key}`" for key in sorted(names[name]))) + "\n"


def _spellings_row(ours: str, spellings: Sequence[str]) -> tuple[str, ...]:
    return f"`{ours}`", ", ".join(f"`{key}`" for key in spellings if key != ours)


def _key_row(section: str, field: Any) -> tuple[str, ...]:
    key = field.name
    meaning, _, default = documented(SECTIONS[section])[key].partition(" Default ")
    kind, swapped = expected(section, key), ""
    if section == "recompute_config":
        swapped = expected(section, key, swap=True).replace(" (swap is on)", "")
    if swapped != kind and swapped:
        kind += f". With swap on: {swapped}"
    if key in LINKS:
        meaning += f" [More]({LINKS[key]})"
    shown = _default(field.default, default)
    return f"`{key}`", kind, UNITS.get(key, ""), shown, meaning, f"`{EXAMPLES[section, key]}`"


def _each_type_once(rows: list[tuple[str, ...]], longest: int = 60) -> list[tuple[str, ...]]:
    """Return the rows, with the first key of a type in the place of a long type that comes again."""
    first: dict[str, str] = {}
    short = []
    for key, kind, *rest in rows:
        again = first.setdefault(kind, key)
        short.append((key, kind if again == key or len(kind) < longest else f"as {again}", *rest))
    return short


def _default(value: Any, said: str) -> str:
    """The default in words of YAML; for ``None`` what the docstring says that it means."""
    if value is MISSING:
        return "must be written"
    if value == ():
        return "none"
    if value is not None:
        return f"`{str(value).lower() if isinstance(value, bool) else value}`"
    return re.sub(r"^``None``(: )?", lambda match: "" if match[1] else "none", said).rstrip(".")


def _mindspeed_rows() -> list[tuple[str, ...]]:
    rows = [
        (f"`{flag}`", expected("memory", flag), "", f"`mode: {mode}`; also at the top level")
        for flag, mode in MODE_FLAGS.items()
    ]
    for setting, ours in MINDSPEED_COUNTERPARTS.items():
        sets = " or ".join(f"`{key}`" for key in ours.split(" or "))
        rows.append((f"`{setting}`", expected("memory", setting), UNITS.get(setting, ""), sets))
    return rows


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    cells = [[cell.replace("``", "`").replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n".replace("  |", " |") for line in cells)


def _filled(text: str, width: int = 118) -> str:
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
