"""The report as one HTML file: styles and pictures inside, nothing fetched, no scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..plan import MemoryPlan
from ..plan.actions import COMPILE_BUDGET, SCOPES, PlanRow, Scope, format_scopes
from .drawing import Drawing, colour_rules, ms_text, size_text
from .run_facts import ComparedQuantity, RunFacts
from .run_files import RecordedRun, RunDescription

WIDE_PX, NARROW_PX = 1000.0, 344.0
"""Widths in which each picture is drawn; the window decides which one is shown."""

Draw = Callable[[float], Drawing]

_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--c-surface);color:var(--c-ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1032px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:24px;line-height:1.25;margin:0 0 4px}
h2{font-size:18px;margin:40px 0 4px}
p{margin:4px 0 12px;max-width:75ch}
.muted,figcaption,dt,th{color:var(--c-muted)}
figure{margin:12px 0 0}
figcaption{font-size:13px;margin-bottom:6px;max-width:90ch}
svg{display:block;height:auto;max-width:100%;font-family:inherit}
.narrow{display:none}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0 0}
dl div{border:1px solid var(--c-grid);border-radius:8px;padding:10px 12px}
dt{font-size:13px}
dd{margin:0;font-size:20px;font-weight:600}
dd small{display:block;font-size:12px;font-weight:400;color:var(--c-muted)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;min-width:100%}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--c-grid);vertical-align:top}
th{font-weight:500;white-space:nowrap}
td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
tr.chosen td{font-weight:600}
.line{white-space:nowrap}
.fate{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
pre{overflow-x:auto;border:1px solid var(--c-grid);border-radius:8px;padding:10px 12px;font-size:13px}
.listed{max-height:320px;overflow:auto;font-size:13px;margin-top:8px}
:focus-visible{outline:3px solid var(--c-keep);outline-offset:2px}
details{margin-top:8px}
summary{cursor:pointer}
@media (max-width:720px){.wide{display:none}.narrow{display:block}h1{font-size:20px}dd{font-size:17px}}
"""
_FATE_COLOURS = {"keep": "keep", "swap": "swap", "recompute": "recompute"}


@dataclass(frozen=True)
class Picture:
    """A section with a picture.

    Args:
        heading: heading of the section.
        caption: text that says what the picture shows.
        draw: returns the picture in a given width (px).
    """

    heading: str
    caption: str
    draw: Draw


def page(run: RecordedRun, facts: RunFacts, pictures: Sequence[Picture]) -> str:
    """Return the text of the HTML page."""
    about = run.about
    title = f"{about.get('model', 'model')}: swap and recompute"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(_subtitle(about))}</p>',
        f"<p>{escape(facts.without_steps)}</p>" if facts.without_steps else _tiles(facts),
        _stages_table(run, facts),
        *(_figure(picture) for picture in pictures),
    ]
    if facts.compared:
        body.append(_compared_table(facts.compared))
    if facts.trials:
        body.append(_trials_table(facts))
    if run.plan is not None:
        body += [_plan_table(run.plan), _adjustments(run.plan)]
    if facts.rejected:
        body.append(_rejected_table(facts.rejected))
    body.append(_about_table(about))
    if config := about.get("config"):
        text = f"<pre {_reached('Configuration')}>{escape(config)}</pre>"
        body.append(f"<details><summary>Configuration</summary>{text}</details>")
    return _HTML.format(
        title=escape(title), style=colour_rules() + _STYLE, body="\n".join(item for item in body if item)
    )


_HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _subtitle(about: RunDescription) -> str:
    parameters = float(about.get("parameters", 0))
    scaled = f"{parameters / 1e9:.2f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"
    ranks = int(about.get("world_size", 1))
    parts = [
        f"{about.get('layers', '?')} {about.get('family', '')} layers".replace("  ", " "),
        f"{scaled} parameters{' on this rank' if ranks > 1 else ''}",
        str(about.get("device", "")),
        f"{ranks} rank{'' if ranks == 1 else 's'}, this is rank 0",
        str(about.get("started", "")),
    ]
    return " · ".join(part for part in parts if part)


def _tiles(facts: RunFacts) -> str:
    tiles = [
        ("Step", "" if facts.step_ms is None else ms_text(facts.step_ms), "median of the last phase"),
        (
            "Peak memory",
            "" if facts.peak_bytes is None else size_text(facts.peak_bytes),
            "in use on the device",
        ),
        *_saved_tile(facts),
        ("Swapped", size_text(facts.offloaded_bytes), "out and back in each step"),
        ("Waits for copies", ms_text(facts.stall_ms), _share(facts.stall_ms, facts.step_ms)),
        ("Host memory", size_text(facts.host_bytes), "in use at the most"),
    ]
    cells = (
        f"<div><dt>{name}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in tiles
        if value
    )
    return f"<dl>{''.join(cells)}</dl>"


def _saved_tile(facts: RunFacts) -> list[tuple[str, str, str]]:
    found = facts.saving
    if found is None or found.saved_bytes is None:
        return []
    most = "" if found.without_peak_bytes is None else f" of {size_text(found.without_peak_bytes)}"
    return [("Saved", size_text(found.saved_bytes), f"{most} without a plan, {found.source}".strip())]


def _share(part_ms: float, step_ms: float | None) -> str:
    return "of a step" if not step_ms else f"{part_ms / step_ms:.1%} of a step"


def _figure(picture: Picture) -> str:
    """Return a picture in two widths, and the titles of its shapes as a list for readers without a mouse."""
    wide, narrow = picture.draw(WIDE_PX), picture.draw(NARROW_PX).svg("narrow")
    heading, caption = escape(picture.heading), f"<figcaption>{escape(picture.caption)}</figcaption>"
    items = "".join(f"<li>{escape(title)}</li>" for title in wide.titles)
    listed = f'<div class="listed" {_reached(f"{picture.heading}, as a list")}><ol>{items}</ol></div>'
    words = f"<details><summary>{heading}, as a list</summary>{listed}</details>"
    return f"<h2>{heading}</h2>\n<figure>{caption}{wide.svg('wide')}{narrow}{words}</figure>"


def _reached(name: str) -> str:
    """Return HTML attributes of an element that may scroll: it has a name and can be reached by keyboard."""
    return f'tabindex="0" role="region" aria-label="{escape(name)}"'


def _table(name: str, head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], numbers: int) -> str:
    """Return a heading and a table; ``rows`` are (CSS class, cells as HTML), the last columns ``numbers``."""
    first = len(head) - numbers

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if at >= first else ''}>{text}</{tag}>" for at, text in enumerate(texts)
        )

    lines = [f"<tr{f' class={kind}' if kind else ''}>{cells('td', texts)}</tr>" for kind, texts in rows]
    return (
        f"<h2>{escape(name)}</h2>\n"
        f'<div class="scroll" {_reached(name)}><table><thead><tr>{cells("th", head)}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _compared_table(compared: Sequence[ComparedQuantity]) -> str:
    def text(value: float | None, unit: str) -> str:
        if value is None:
            return "not measured"
        return ms_text(value) if unit == "ms" else size_text(value)

    rows = [
        (
            "",
            (
                escape(item.name.capitalize()),
                text(item.predicted, item.unit),
                text(item.measured, item.unit),
                "" if item.ratio is None else f"{item.ratio:.2f}",
            ),
        )
        for item in compared
        if item.predicted or item.measured
    ]
    return _table(
        "Predicted and measured", ("A step", "Predicted", "Measured", "Measured / predicted"), rows, 3
    )


def _stages_table(run: RecordedRun, facts: RunFacts) -> str:
    """Return a table of pipeline stages and the time that equal stages wait; empty without a pipeline."""
    if (found := run.about.get("stages")) is None:
        return ""

    def size(value: int | None) -> str:
        return "not measured" if value is None else size_text(value)

    rows = [
        (
            "",
            (
                str(number),
                format_scopes(stage.layers),
                size(stage.weight_bytes),
                f"{stage.in_flight:g}",
                size(stage.peak_bytes),
                size(stage.offloaded_bytes),
                "not measured" if stage.stall_ms is None else ms_text(stage.stall_ms),
                "not measured" if stage.waiting_share is None else f"{stage.waiting_share:.1%}",
            ),
        )
        for number, stage in enumerate(facts.stages)
    ]
    head = (
        "Stage",
        "Layers",
        "Weights",
        "In flight",
        "Peak memory",
        "Swapped",
        "Waits for copies",
        "for stages",
    )
    line = (
        f"{found['schedule']}, {found['micro_batches']} micro-batches a step: by the formula equal stages "
        f"wait {found['bubble_share']:.1%} of it for each other. Measured on one rank of each stage."
    )
    return _table("Stages", head, rows, 6) + f'<p class="muted">{escape(line)}</p>'


def _trials_table(facts: RunFacts) -> str:
    budget = facts.budget_bytes
    rows = []
    for number, trial in enumerate(facts.trials, 1):
        steps = trial["steps"]
        peak = max((step["reserved_peak_bytes"] for step in steps), default=0)
        evicted = max((step["evicted_bytes"] for step in steps), default=0)
        fits = budget is None or (peak <= budget and not evicted)
        verdict = "chosen" if trial["chosen"] else "fits" if fits else "does not fit"
        predicted = trial["predicted_peak_bytes"], trial["predicted_step_ms"]
        cells = (
            str(number),
            verdict,
            "" if predicted[0] is None else size_text(predicted[0]),
            size_text(peak),
            "" if predicted[1] is None else ms_text(predicted[1]),
            ms_text(min(step["step_ms"] for step in steps)) if steps else "",
            size_text(evicted),
        )
        rows.append(("chosen" if trial["chosen"] else "", cells))
    head = ("Trial", "", "Peak, predicted", "held", "Step, predicted", "measured", "Evicted")
    line = "" if budget is None else f'<p class="muted">Budget: {size_text(budget)}.</p>'
    return _table("What the planner tried", head, rows, 5) + line


def _plan_table(plan: MemoryPlan) -> str:
    groups: dict[tuple[PlanRow, ...], list[Scope]] = {}
    for scope in plan.scopes:
        own = tuple(
            PlanRow(0, row.op_path, row.fate, row.ordinal, row.windows, row.parameters)
            for row in plan.rows
            if row.scope == scope
        )
        groups.setdefault(own, []).append(scope)
    rows: list[tuple[str, Sequence[str]]] = []
    for own, scopes in groups.items():
        label = format_scopes(scope for scope in scopes if own or scope not in SCOPES)
        for row in (own or (PlanRow(0, "", "keep"),)) if label else ():
            rows.append(("", (escape(label), *_plan_cells(row))))
            label = ""
    return _table("Plan", ("Layers", "Op", "Fate", "Prefetch, ops", "Release, ops"), rows, 2)


def _plan_cells(row: PlanRow) -> tuple[str, str, str, str]:
    name = escape(row.op_path or "everything") + ("" if row.ordinal is None else f" (call {row.ordinal})")
    budget = row.parameters.get(COMPILE_BUDGET)
    swatch = f'<span class="fate" style="background:var(--c-{_FATE_COLOURS.get(row.fate, "base")})"></span>'
    share = "" if budget is None else f", compile budget {budget:g}"
    fate = f'<span class="line">{swatch}{row.fate}</span>{share}'
    auto = "auto" if row.fate == "swap" else ""
    windows = row.windows
    prefetch, release = (auto, auto) if windows is None else (windows.prefetch_ops, windows.release_ops)
    return name, fate, str(prefetch), str(release)


def _adjustments(plan: MemoryPlan) -> str:
    if not plan.adjustments:
        return ""
    items = "".join(f"<li>{escape(str(item))}</li>" for item in plan.adjustments)
    summary = "<summary>Requests that were changed, and decisions</summary>"
    return f"<details>{summary}<ul>{items}</ul></details>"


def _rejected_table(rejected: Mapping[str, float]) -> str:
    rows = [("", (escape(reason), size_text(size))) for reason, size in rejected.items()]
    return _table("Planned to be swapped, and stayed", ("Why", "In a step"), rows, 1)


def _about_table(about: RunDescription) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    device_bytes = about.get("device_bytes")
    device = str(about.get("device", "")) + (f", {size_text(device_bytes)}" if device_bytes else "")
    facts = {
        "Device": device,
        "Weights": size_text(about.get("weight_bytes", 0)),
        "Planner": str(about.get("planner", "off")),
        "Started": str(about.get("started", "")),
        "Versions": versions,
    }
    return _table("Run", ("", ""), [("", (escape(name), escape(text))) for name, text in facts.items()], 0)
