"""What a byte of each saved tensor of a decoder layer is worth, beside what the link takes for one.

    python benchmarks/byte_values.py                      measured on the device that there is
    python benchmarks/byte_values.py --model arithmetic   from FLOPs and rates, for a device that there is not

For every op of the layer: the bytes that it alone saves, counted on fake tensors of the real shapes, and the
time to run it again; hence picoseconds per byte. `docs/choosing.md` says how to read them.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.byte_calls import (
    ByteRow,
    Call,
    CallFollower,
    Clock,
    Rates,
    Stopwatch,
    byte_rows,
    row_of,
    without,
)
from benchmarks.records import (
    REPOSITORY,
    RESULTS,
    accelerator_name,
    commit,
    console_of,
    hardware,
    versions,
    write_json,
)
from benchmarks.workloads import PRESETS, DecoderStack, Workload
from hf_actswap import model_structure
from hf_actswap.engine.forecast import record_saved
from hf_actswap.plan import ModelStructure
from hf_actswap.plan.dry_run import assume_unpacked_rows, fake_batch, fake_weights, fakes_only
from hf_actswap.plan.exchanged_weights import exchanged

Result = Mapping[str, Any]

_NORMS = ("input_layernorm", "post_attention_layernorm")
_STEP_OVER_FORWARD = 3
ELEMENTWISE = (
    *(f"{norm}.{call}" for norm in _NORMS for call in ("to:0", "rsqrt:0", "to:1", "mul:1")),
    "mlp.act_fn.silu:0",
    "mlp.mul:0",
)
"""Calls of elementwise ops of a Llama layer whose results are saved, without the rotation of q and k, which
reads as much as it saves."""
_NO_LINK = "no link: a CPU copies inside one memory (draw one with --link-gb-per-s)"


def by_shape(rows: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the rows of each shape, in order."""
    found: dict[str, list[Result]] = {}
    for row in rows:
        found.setdefault(row["shape"], []).append(row)
    return found


def unit_bytes(row: Result) -> int:
    """Return the bytes of one hidden state: a layer's input."""
    itemsize = {"bfloat16": 2, "float32": 4}[row["dtype"]]
    return int(row["tokens"] * row["hidden"] * itemsize)


def forward_ms(panel: Sequence[Result]) -> float:
    """Return the ms of all calls of a layer."""
    return float(sum(row["ms"] for row in panel))


def title(panel: Sequence[Result]) -> str:
    """Return one line with model, shape and device, and whether the numbers were measured."""
    row = panel[0]
    origin = "measured" if row["source"] == "measured" else "ARITHMETIC, not measured"
    return f"{row['model']}, one layer, {row['tokens']:,} tokens, {row['dtype']}; {row['device']}: {origin}"


def link_text(row: Result) -> str:
    """Return one line about the link."""
    if row["link_ps_per_byte"] is None:
        return _NO_LINK
    return f"link {row['link_gb_per_s']:.1f} GB/s ({row['link_source']}): {row['link_ps_per_byte']:.1f} ps/B"


def held_rows(panel: Sequence[Result]) -> list[Result]:
    """Return the rows with held bytes, those with the most time per byte first."""
    return sorted((row for row in panel if row["held_bytes"]), key=lambda row: -row["ps_per_byte"])


def print_byte_table(rows: Sequence[Result], console: Console | None = None) -> None:
    """Print a table for each shape."""
    console = console_of(console)
    for panel in by_shape(rows).values():
        table = Table(title=f"{title(panel)}\n{link_text(panel[0])}", title_justify="left")
        for name in ("tensor of", "MiB", "saved", "runs again", "ms", "ps per byte"):
            table.add_column(name, justify="left" if name in ("tensor of", "runs again") else "right")
        for row in held_rows(panel):
            table.add_row(
                row["name"],
                f"{row['held_bytes'] / 2**20:,.3f}",
                "root" if row["root"] else "yes",
                ", ".join(name.rpartition(":")[0] for name in row["reruns"]),
                f"{row['rerun_ms']:.3f}",
                f"{row['ps_per_byte']:.2f}",
            )
        console.print(table)


READERS_NAMES: Mapping[str, str] = {
    "self_attn.flash_attention:0": "attention output, statistics",
    "add:1": "layer output (x of the next)",
    "add:0": "x between attention and MLP",
    "self_attn.add:0": "q, rotated",
    "self_attn.add:1": "k, rotated",
    "self_attn.v_proj.linear:0": "v",
    "mlp.gate_proj.linear:0": "gate",
    "mlp.up_proj.linear:0": "up",
    "mlp.act_fn.silu:0": "silu(gate)",
    "mlp.mul:0": "silu(gate) times up",
    "input_layernorm.to:0": "1st norm: fp32 copy of x",
    "input_layernorm.to:1": "1st norm: before the weight",
    "input_layernorm.mul:1": "1st norm: output",
    "post_attention_layernorm.to:0": "2nd norm: fp32 copy of x",
    "post_attention_layernorm.to:1": "2nd norm: before the weight",
    "post_attention_layernorm.mul:1": "2nd norm: output",
}
"""Names of a Llama layer's tensors for readers; the few bytes of norm statistics are left out."""


def page_values(rows: Sequence[Result]) -> str:
    """Return a Markdown table for `docs/choosing.md`: sizes in hidden states, and picoseconds per byte."""
    panels = list(by_shape(rows).values())
    header = ["tensor", "op", "size, u", *(f"ps/B at {panel[0]['tokens']:,} tokens" for panel in panels)]
    by_name = [{row["name"]: row for row in panel} for panel in panels]
    lines = []
    for name in sorted(READERS_NAMES, key=lambda name: -by_name[0][name]["ps_per_byte"]):
        first = by_name[0][name]
        size = f"{first['held_bytes'] / unit_bytes(first):.2f}"
        values = [f"{panel[name]['ps_per_byte']:.1f}" for panel in by_name]
        lines.append([READERS_NAMES[name], f"`{first['op']}`", size, *values])
    return _markdown(header, lines, text_columns=2)


_ATTENTION_TENSORS = (
    "self_attn.flash_attention:0",
    "self_attn.add:0",
    "self_attn.add:1",
    "self_attn.v_proj.linear:0",
)


def page_situations(rows: Sequence[Result]) -> str:
    """Return a Markdown table for `docs/choosing.md`: memory, copies and time of its three configurations.

    A layer's backward is assumed to take twice as long as its forward.
    """
    panels = list(by_shape(rows).values())
    header = ["per layer"]
    for panel in panels:
        tokens = f"{panel[0]['tokens']:,} tokens"
        header += [f"stays, u, {tokens}", "over the link, u", "run again, % of a step"]
    lines = []
    for number, label in enumerate(("nothing", "1. a little short", "2. half", "3. at the edge")):
        cells = [label]
        for panel in panels:
            cells += _situation(panel, number)
        lines.append(cells)
    cells = ["(hidden at most)"]
    for panel in panels:
        hidden_bytes = forward_ms(panel) * 1e9 / panel[0]["link_ps_per_byte"]
        cells += ["", f"{hidden_bytes / unit_bytes(panel[0]):.1f}", ""]
    return _markdown(header, [*lines, cells], text_columns=1)


def _situation(panel: Sequence[Result], number: int) -> list[str]:
    layer = [row_of(row) for row in panel]
    unit = unit_bytes(panel[0])
    swapped_bytes = 0
    dropped: list[str] = []
    if number in (1, 2):
        dropped = [name for name in ELEMENTWISE if any(row.name == name for row in layer)]
    if number == 2:
        swapped_bytes = sum(row.held_bytes for row in layer if row.name in _ATTENTION_TENSORS)
    if number == 3:
        dropped, swapped_bytes = [row.name for row in layer if row.held_bytes], unit
    choice = without(layer, dropped, unit)
    share = choice.rerun_ms / (_STEP_OVER_FORWARD * forward_ms(panel))
    stays = (choice.held_bytes - swapped_bytes) / unit
    return [f"{stays:.1f}", f"{swapped_bytes / unit:.1f}", f"{share:.0%}"]


def _markdown(header: Sequence[str], lines: Sequence[Sequence[str]], text_columns: int) -> str:
    rule = "|" + "---|" * text_columns + "---:|" * (len(header) - text_columns)
    rows = ["| " + " | ".join(cells) + " |" for cells in (header, *lines)]
    return "\n".join([rows[0], rule, *rows[1:]])


TINY = Workload(
    "tiny-8b",
    model="tiny, proportions of Llama-3-8B",
    layers=1,
    tokens=256,
    hidden=256,
    intermediate=896,
    heads=8,
    kv_heads=2,
    vocab=32,
)
SHAPES = {TINY.name: TINY} | {
    name: replace(PRESETS[name], layers=1) for name in ("7b-8k", "7b-32k", "8b-8k", "8b-32k")
}
DEFAULT_SHAPES = {
    "cpu": (TINY.name,),
    "accelerator": ("7b-8k", "7b-32k", "8b-8k", "8b-32k"),
    "arithmetic": ("8b-8k", "8b-32k"),
}
ARITHMETIC_DEVICE = "NVIDIA H200 (arithmetic)"
_GB_PER_S = {"arithmetic": 55.0}
_META = torch.device("meta")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class LinkRate:
    """The rate of the link between device and host, for tables and pictures.

    Args:
        gb_per_s: 10^9 bytes a second from device to host; ``None``: there is no link and none was named.
        source: where the rate is from: ``measured``, ``argument`` or ``none``.
    """

    gb_per_s: float | None
    source: str

    @property
    def ps_per_byte(self) -> float | None:
        return 1e3 / self.gb_per_s if self.gb_per_s else None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or compute, print the tables, write the JSON and the picture; return the exit status."""
    arguments = _parse(argv)
    arithmetic = arguments.model == "arithmetic"
    device = _META if arithmetic else torch.device(arguments.device)
    kind = "arithmetic" if arithmetic else "cpu" if device.type == "cpu" else "accelerator"
    rates = Rates(arguments.gemm_tflops, arguments.attention_tflops, arguments.hbm_tb_per_s)
    origin = _origin(device, kind, rates, arguments.link_gb_per_s)
    rows: list[dict[str, Any]] = []
    for name in arguments.shapes or DEFAULT_SHAPES[kind]:
        shape = SHAPES[name]
        clock = rates if arithmetic else Stopwatch(device, arguments.runs)
        found = layer_rows(shape, device, clock)
        rows += [_result(shape, row, origin) for row in found]
    print_byte_table(rows)
    path = arguments.out or (None if arguments.shapes else _default_path(kind, device))
    if path:
        write_json(path, rows)
        sys.stderr.write(f"written: {path}\n")
        _draw(rows, path.with_suffix(".png"))
    return 0


def layer_rows(shape: Workload, device: torch.device, clock: Clock) -> list[ByteRow]:
    """Return the rows of one decoder layer.

    Args:
        shape: shape of the layer and its input.
        device: device of the layer; on ``meta`` nothing runs, and attention is assumed to be the CPU's.
        clock: gives the time of each call.
    """
    step = DecoderStack(replace(shape, layers=1), device)
    named = model_structure(step.model)
    batch = {"inputs_embeds": step.hidden, "use_cache": False}
    saved = record_saved(step.model, named, (), batch, _CPU)
    calls = _calls_on_fakes(step, named, clock) if device.type == "meta" else _calls(step, named, clock)
    return byte_rows(calls, saved, named.layers[0])


def _calls(step: DecoderStack, named: ModelStructure, clock: Clock) -> list[Call]:
    with torch.no_grad():
        step.forward()  # warm-up: wakes the device and loads its libraries
    follower = CallFollower(step.decoder_layers[0], named.layers[0], clock)
    with follower.following():
        step.forward()
    return follower.calls


def _calls_on_fakes(step: DecoderStack, named: ModelStructure, clock: Clock) -> list[Call]:
    """Return the calls of a forward on fake CPU tensors, which runs as `record_saved` runs it."""
    follower = CallFollower(step.decoder_layers[0], named.layers[0], clock)
    with assume_unpacked_rows(), fakes_only():
        state = fake_weights(step.model, _CPU)
        hidden = fake_batch(step.hidden, _CPU)
        with follower.following(), exchanged(step.model, state):
            step.model(inputs_embeds=hidden, use_cache=False)
    return follower.calls


def _result(shape: Workload, row: ByteRow, origin: Mapping[str, Any]) -> dict[str, Any]:
    of_shape = ("model", "tokens", "hidden", "intermediate", "heads", "kv_heads", "dtype")
    return {
        "shape": shape.name,
        **{name: getattr(shape, name) for name in of_shape},
        "name": row.name,
        **asdict(row),
        "held_bytes": row.held_bytes,
        **origin,
    }


def _origin(device: torch.device, kind: str, rates: Rates, link_argument: float | None) -> dict[str, Any]:
    """Return the fields that are the same in every row; measures the link."""
    checkout = commit(REPOSITORY)
    environment: dict[str, Any] = {"versions": versions(), "tracked_files_changed": checkout["dirty"]}
    if kind == "arithmetic":
        name = ARITHMETIC_DEVICE
        environment["rates"] = asdict(rates)
        link = LinkRate(link_argument or _GB_PER_S[kind], "argument")
    else:
        machine = environment["hardware"] = hardware(device)
        name = "cpu" if kind == "cpu" else machine["name"]
        link = LinkRate(link_argument, "argument" if link_argument else "none")
        if kind == "accelerator" and not link_argument:
            link = LinkRate(machine["link_gb_per_s"]["out"], "measured")
    return {
        "source": "arithmetic" if kind == "arithmetic" else "measured",
        "device": name,
        "link_gb_per_s": link.gb_per_s,
        "link_ps_per_byte": link.ps_per_byte,
        "link_source": link.source,
        "commit": checkout["id"],
        "environment": environment,
    }


def _draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    try:
        from benchmarks.pictures import draw_byte_values  # here, because matplotlib is an extra
    except ImportError as error:
        sys.stderr.write(f"no picture ({error}); draw it later: python benchmarks/pictures.py RESULTS\n")
        return
    draw_byte_values(rows, path)
    sys.stderr.write(f"written: {path}\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--model", choices=("measure", "arithmetic"), default="measure")
    parser.add_argument("--device", default=found.type if found else "cpu", help="of what is measured")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: what suits the device")
    parser.add_argument("--runs", type=int, default=20, help="of each op, of which the median is taken")
    parser.add_argument(
        "--link-gb-per-s",
        type=float,
        help="rate of the link, device to host (default: measured; on the CPU none; in arithmetic 55)",
    )
    parser.add_argument("--gemm-tflops", type=float, default=600.0, help="arithmetic: of matrix products")
    parser.add_argument("--attention-tflops", type=float, default=450.0, help="arithmetic: of attention")
    parser.add_argument(
        "--hbm-tb-per-s", type=float, default=4.1, help="arithmetic: of device memory, as reached"
    )
    parser.add_argument("--out", type=Path, help="JSON file, the picture beside it (default: in results/)")
    arguments = parser.parse_args(argv)
    for name in ("runs", "link_gb_per_s", "gemm_tflops", "attention_tflops", "hbm_tb_per_s"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            parser.error(f"argument --{name.replace('_', '-')}: more than 0, found {value:g}")
    return arguments


def _default_path(kind: str, device: torch.device) -> Path:
    where = {"arithmetic": "arithmetic", "cpu": "cpu"}.get(kind)
    where = where or accelerator_name(device).lower().replace(" ", "-")
    return RESULTS / f"byte_values_{where}_{datetime.now():%Y%m%d}.json"


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    sys.exit(main())
