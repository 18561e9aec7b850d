"""Saves and publishes a configuration: its file, a plan beside it, and a model card.

The model card says what the configuration is, how to use it and what its plan was measured on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypedDict

from ..errors import ConfigError, Problem
from ..version import __version__
from .documents import JsonDocument, read_text
from .hub import CONFIG_FILE_NAME, PushOptions, upload

PLAN_FILE_NAME = "plan.json"
MAX_PLAN_BYTES = 16 * 1024 * 1024

PLAN_FORMAT, PLAN_FORMAT_VERSION = "hf_actswap.plan", 1

CARD_FILE_NAME = "README.md"
CARD_MARK = "<!-- card of hf_actswap -->"
"""Text by which a card of this library is recognised; a card without it is never overwritten."""

_LABELS = {
    "model": "model",
    "batch_shape": "batch shape (sequences, tokens)",
    "dtype": "dtype",
    "device": "device",
    "world_size": "ranks",
    "requested": "asked for",
    "versions": "versions",
}
_MAX_CELL_CHARACTERS = 400


class Plan(Protocol):
    """The methods of a plan that this package uses."""

    def to_json(self) -> str:
        """Return the plan as JSON."""


PlanSource = str | os.PathLike[str] | Plan
"""A plan, or the path of a plan's file; a file of the planner also says what the plan was measured on."""


class _CardFacts(TypedDict, total=False):
    """The keys of a plan's document that a card shows."""

    num_layers: int
    rows: tuple[Any, ...]
    made_for: Mapping[str, Any] | None
    measured: Mapping[str, Any] | None


def save(folder: str | os.PathLike[str], config_text: str, plan: PlanSource | None) -> None:
    """Write ``actswap_config.yaml``, and ``plan.json`` if a plan is given, into a folder; create the folder.

    Raises:
        ConfigError: ``plan`` is no plan.
        OSError: the folder cannot be written.
    """
    files, _ = _files(config_text, plan)
    os.makedirs(folder, exist_ok=True)
    for name, text in files.items():
        Path(folder, name).write_text(text, encoding="utf-8")


def push(
    repo_id: str, config_text: str, plan: PlanSource | None, base_model: str | None, options: PushOptions
) -> str:
    """Publish the configuration, the plan and the card in one commit; see `ActSwapConfig.push_to_hub`.

    Returns:
        The address of the commit.
    """
    files, document = _files(config_text, plan)
    files[CARD_FILE_NAME] = card(repo_id, config_text, document, base_model)
    return upload(repo_id, files, options, CARD_MARK)


def _files(config_text: str, plan: PlanSource | None) -> tuple[dict[str, str], dict[str, Any] | None]:
    """Return the files (name -> text), and the document of the plan."""
    files = {CONFIG_FILE_NAME: config_text}
    if plan is None:
        return files, None
    if isinstance(plan, str | os.PathLike):
        name = os.fsdecode(plan)
        try:
            text = read_text(name, MAX_PLAN_BYTES, ConfigError)
        except OSError as error:
            problem = Problem("plan", "the file of a plan", f"'{name}': {error.strerror}")
            raise ConfigError([problem]) from None
    else:
        name, text = "a plan", plan.to_json()
    document = JsonDocument(text, "plan", ConfigError, name)
    document.check_format(PLAN_FORMAT, PLAN_FORMAT_VERSION)
    document.read(_CardFacts)
    document.finish()
    files[PLAN_FILE_NAME] = text
    return files, document.content


def card(repo_id: str, config_text: str, plan: Mapping[str, Any] | None, base_model: str | None) -> str:
    """Return the text of the model card.

    Args:
        repo_id: repository of the card.
        config_text: the configuration in YAML.
        plan: the document of a plan; its sections ``made_for`` and ``measured`` are shown.
        base_model: Hub id of the model that the configuration is for.

    Returns:
        Markdown with a header of metadata.
    """
    model = (
        f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "a causal language model"
    )
    header = ["---", "library_name: hf_actswap", "tags:", "- hf_actswap", "- activation-offloading"]
    if base_model is not None:
        header.append(f"base_model: {json.dumps(base_model)}")
    body = [
        *header,
        *("---", CARD_MARK, "", f"# {repo_id.rpartition('/')[2]}", ""),
        f"What hf_actswap swaps and recomputes of the activations of {model} in training.",
        *("", "```python", "from hf_actswap import ActSwapTrainingArguments", ""),
        f'args = ActSwapTrainingArguments(output_dir="out", actswap="{repo_id}")',
        *("```", "", "```yaml", config_text.rstrip("\n"), "```", ""),
        *_plan_lines(repo_id, plan),
        f"Published with hf_actswap {__version__}.",
    ]
    return "\n".join(body) + "\n"


def _plan_lines(repo_id: str, plan: Mapping[str, Any] | None) -> list[str]:
    if plan is None:
        return ["There is no plan beside it, so none of its fates was measured.", ""]
    use = ["```python", "from hf_actswap.plan import load_plan", ""]
    use += [f'hf_actswap.apply(model, load_plan("{repo_id}"))', "```", ""]
    made_for, measured = plan.get("made_for"), plan.get("measured")
    lines = [f"## The plan: {plan.get('num_layers')} layers, {len(plan.get('rows', ()))} rows", "", *use]
    if not isinstance(made_for, Mapping):
        return [*lines, "It does not say what it was measured on.", ""]
    lines += ["| measured on | |", "|---|---|", *_rows(made_for), ""]
    if isinstance(measured, Mapping) and measured:
        lines += ["| measured | |", "|---|---|", *_rows(measured), ""]
    return lines


def _rows(section: Mapping[str, Any]) -> list[str]:
    return [f"| {_cell(_LABELS.get(key, key))} | {_cell(value)} |" for key, value in section.items()]


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= _MAX_CELL_CHARACTERS else f"{text[: _MAX_CELL_CHARACTERS - 3]}..."
