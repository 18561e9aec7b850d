"""What is published of a configuration: its file, a plan beside it, and a card that says what they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypedDict

from ..errors import ConfigError, Problem
from .card import CARD_FILE_NAME, CARD_MARK, card
from .hub import CONFIG_FILE_NAME, PushOptions, upload
from .json_documents import JsonReader, read_text

PLAN_FILE_NAME = "plan.json"
MAX_PLAN_BYTES = 16 * 1024 * 1024

PLAN_FORMAT, PLAN_FORMAT_VERSION = "hf_actswap.plan", 1


class Plan(Protocol):
    """A plan, as this floor knows one."""

    def to_json(self) -> str:
        """Return the plan as JSON."""


PlanSource = str | os.PathLike[str] | Plan
"""A plan, or the file of one: what the planner wrote also says what it was measured on."""


class _CardFacts(TypedDict, total=False):
    """Of a plan's document, what a card shows."""

    num_layers: int
    rows: tuple[Any, ...]
    made_for: Mapping[str, Any] | None
    measured: Mapping[str, Any] | None


def save(folder: str | os.PathLike[str], config_text: str, plan: PlanSource | None) -> None:
    """Write ``actswap_config.yaml``, and ``plan.json`` where a plan is given; the folder is made.

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
    """Return names and texts, and the plan's document."""
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
    reader = JsonReader(text, "plan", ConfigError, name)
    reader.check_format(PLAN_FORMAT, PLAN_FORMAT_VERSION)
    reader.read(_CardFacts, ("plan",), reader.document)
    reader.finish()
    files[PLAN_FILE_NAME] = text
    return files, reader.document
