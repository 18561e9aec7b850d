"""The values of bytes as tables: on the console, and as the table of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.byte_rows import row_of, without

Result = Mapping[str, Any]

_NORMS = ("input_layernorm", "post_attention_layernorm")
_WIDTH_WITHOUT_TERMINAL = 140
_STEP_OVER_FORWARD = 3
ELEMENTWISE = (
    *(f"{norm}.{call}" for norm in _NORMS for call in ("to:0", "rsqrt:0", "to:1", "mul:1")),
    "mlp.act_fn.silu:0",
    "mlp.mul:0",
)
"""What a Llama layer saves of elementwise ops, but the rotation, which reads as much as it saves."""
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
    """Return one line that says what the numbers are of, and whether they were measured."""
    row = panel[0]
    origin = "measured" if row["source"] == "measured" else "ARITHMETIC, not measured"
    return f"{row['model']}, one layer, {row['tokens']:,} tokens, {row['dtype']}; {row['device']}: {origin}"


def link_text(row: Result) -> str:
    """Return one line about the link."""
    if row["link_ps_per_byte"] is None:
        return _NO_LINK
    return f"link {row['link_gb_per_s']:.1f} GB/s ({row['link_source']}): {row['link_ps_per_byte']:.1f} ps/B"


def held_rows(panel: Sequence[Result]) -> list[Result]:
    """Return the rows with something to give up, the dearest byte first."""
    return sorted((row for row in panel if row["held_bytes"]), key=lambda row: -row["ps_per_byte"])


def print_byte_table(rows: Sequence[Result], console: Console | None = None) -> None:
    """Print a table for each shape."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=_WIDTH_WITHOUT_TERMINAL)
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
"""What a reader calls the tensors of a Llama layer; the few bytes of norm statistics are left out."""


def page_values(rows: Sequence[Result]) -> str:
    """Return the Markdown table of a page: size in hidden states, and picoseconds per byte of each shape."""
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
    """Return the Markdown table of a page: what the three configurations of it come to, by the same numbers.

    The backward of a layer is taken to be twice its forward.
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
