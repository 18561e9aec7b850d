"""The answer of `hf-actswap plan` as texts and a picture, for the page of `app.py`. It needs no Gradio."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_actswap import load_config
from hf_actswap.cli import options
from hf_actswap.cli.output import Answer, folded_by_layer, rejected, size_text, step_ms_text
from hf_actswap.cli.plan_answer import answer_plan
from hf_actswap.config.hub import split_hub_id
from hf_actswap.errors import ActSwapError, Problem
from hf_actswap.report.pictures import light

GIB = 2**30
MODEL_FILE, PLAN_FILE = "config.json", "plan.json"
GPUS = [name for name in options.DEVICE_KINDS if name != "cpu"]
METHODS: dict[str, options.QuantizeName | None] = {"full": None, "LoRA": None, "QLoRA, 4-bit": "4bit"}
"""How a model is trained -> how its base is stored."""

AT_THE_PEAK = {
    "weights": ("base", ["weights_bytes"]),
    "gradients": ("backward", ["gradients_bytes"]),
    "optimizer's states": ("in", ["states_bytes"]),
    "activations": ("forward", ["activations_bytes", "workspaces_bytes"]),
}
BY_FATE = {
    "kept": ("keep", ["kept_bytes"]),
    "swapped to the host": ("swap", ["swapped_bytes"]),
    "recomputed": ("recompute", ["recomputed_bytes"]),
}
"""Parts of a bar -> what the colour means, and the keys of the JSON answer that are added up."""


@dataclass(frozen=True)
class Shown:
    """What the page shows; where there is no plan, only the first two."""

    verdict: str
    notes: str
    table: str = ""
    picture: Figure | None = None
    configuration: str = ""
    plan_file: str | None = None


def answer(
    folder: Path,
    model: str,
    gpu: str,
    method: str,
    rank: int | None,
    seq: str,
    batch: int | None,
    budget: str,
) -> Shown:
    """Return what `hf-actswap plan` answers; the plan is written into ``folder``, over an older one."""
    (folder / PLAN_FILE).unlink(missing_ok=True)
    try:
        lora = None if method == "full" else options.Lora.read(f"r={rank}")
        asked = options.PlanRequest(
            options.ModelRequest(_model_name(model.strip(), folder), None, lora, METHODS[method]),
            step=options.AskedStep(batch, options.tokens(seq), options.device_named(gpu)),
            budget_bytes=options.size(budget) if budget.strip() else None,
            save=str(folder / PLAN_FILE),
        )
        found = answer_plan(asked)
    except typer.BadParameter as error:
        return Shown("This cannot be answered.", error.message)
    except ActSwapError as error:
        found = rejected(error.problems, [f"No plan: problems in the {error.subject}."])
    if found.ok:
        return _planned(found, asked.budget_bytes, folder)
    problems = folded_by_layer(str(Problem(**problem)) for problem in found.document["problems"])
    return Shown(str(next(iter(found.shown))), "\n".join(problems).replace(f"{folder}/", ""))


def _model_name(text: str, folder: Path) -> str:
    """Return what the planner reads: a file with the configuration, or a Hub id; no path of this machine."""
    if text.startswith("{"):
        (folder / MODEL_FILE).write_text(text, encoding="utf-8")
        return str(folder / MODEL_FILE)
    if split_hub_id(text) is None or Path(text).exists():
        raise typer.BadParameter(f"{text!r} is no Hub id (org/name), and no text of a config.json.")
    return text


def _planned(found: Answer, budget_bytes: int | None, folder: Path) -> Shown:
    verdict, *_, use = found.shown  # the only lines that are not in the document
    document, plan = found.document, folder / PLAN_FILE
    plan.write_text(plan.read_text(encoding="utf-8").replace(f"{folder}/", ""), encoding="utf-8")
    places = document["weights"]["place"], document["optimizer_states"]["place"]
    acts = bool(document["plan"]["rows"] or document["chosen_tiles"] or "host" in places)
    return Shown(
        str(verdict),
        "\n".join(_notes(document)),
        _table(document),
        _picture(document),
        f"# {use}\n".replace(f"{folder}/", "") + (_configuration(document, budget_bytes) if acts else ""),
        str(plan) if acts else None,
    )


def _notes(document: Mapping[str, Any]) -> Iterator[str]:
    host, weights = document["host_memory"], document["weights"]
    yield f"Device memory for tensors: {size_text(document['allocatable_bytes'])}."
    yield f"Host memory: {size_text(host['rank_bytes'])}, of at most {host['limit_gib']:,.0f} GiB."
    if weights["why"]:
        place = "on the host" if weights["place"] == "host" else "on the device"
        yield f"Frozen weights of the layers: {place} ({weights['why']})."
    yield from document["assumed"]


def _table(document: Mapping[str, Any]) -> str:
    """Return the predicted steps as a table in Markdown."""
    lines = ["| | Peak | Step | Kept | Swapped | Recomputed |", "|---|---:|---:|---:|---:|---:|"]
    for name, step in document["predicted"].items():
        over = " (too much)" if step["peak_bytes"] > document["allocatable_bytes"] else ""
        fates = " | ".join(size_text(step[f"{fate}_bytes"]) for fate in ("kept", "swapped", "recomputed"))
        peak, time = size_text(step["peak_bytes"]), step_ms_text(step["step_ms"])
        lines.append(f"| {name} | {peak}{over} | {time} | {fates} |")
    return "\n".join(lines)


def _configuration(document: Mapping[str, Any], budget_bytes: int | None) -> str:
    """Return the configuration of a training that uses the plan, and keeps within a budget that was asked."""
    memory: dict[str, Any] = {"mode": document["mode"], "plan_file": PLAN_FILE}
    if budget_bytes is not None:
        memory["budget_gib"] = round(budget_bytes / GIB, 4)
    if document["weights"]["place"] == "host":
        memory["weights"] = "host"
    tiles = {"tile_config": document["chosen_tiles"]} if document["chosen_tiles"] else {}
    return f"# Or as a configuration, with {PLAN_FILE}:\n{load_config({'memory': memory, **tiles}).to_yaml()}"


def _picture(document: Mapping[str, Any]) -> Figure:
    """Draw what the device holds at the peak of each step, and what becomes of what autograd saves."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    peak, fates = figure.subplots(1, 2, sharey=True)
    limit_gib = document["allocatable_bytes"] / GIB
    peak.axvline(limit_gib, color=light("stall"), linestyle="--", label="limit")
    _bars(peak, document["memory"], AT_THE_PEAK, "On the device at the peak, GiB")
    _bars(fates, document["predicted"], BY_FATE, "What autograd saves, by fate, GiB")
    peak.invert_yaxis()
    return figure


def _bars(
    axes: Axes, steps: Mapping[str, Any], parts: Mapping[str, tuple[str, list[str]]], title: str
) -> None:
    starts = [0.0] * len(steps)
    for label, (means, keys) in parts.items():
        sizes = [sum(step[key] for key in keys) / GIB for step in steps.values()]
        axes.barh(list(steps), sizes, 0.6, starts, color=light(means), label=label)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize=9, frameon=False)
