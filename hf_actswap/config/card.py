"""The model card of a published configuration: what it is, how to use it, what its plan was measured on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..version import __version__

CARD_FILE_NAME = "README.md"
CARD_MARK = "<!-- card of hf_actswap -->"
"""What a card of this library contains; another card is never overwritten."""

_LABELS = {
    "model": "model",
    "batch_shape": "batch shape (sequences, tokens)",
    "dtype": "dtype",
    "device": "device",
    "world_size": "ranks",
    "wish": "asked for",
    "versions": "versions",
}
_MAX_CELL_CHARACTERS = 400


def card(repo_id: str, config_text: str, plan: Mapping[str, Any] | None, base_model: str | None) -> str:
    """Write the card.

    Args:
        repo_id: where it will stand.
        config_text: the configuration in YAML.
        plan: the document of a plan; its sections ``made_for`` and ``measured`` are shown.
        base_model: Hub id of the model that it is for.

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
        return ["No plan stands beside it: none of its fates was measured.", ""]
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
