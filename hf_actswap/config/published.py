"""What is published of a configuration: its file, a plan beside it, and a card that says what they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError, Problem
from .card import CARD_FILE_NAME, CARD_MARK, card
from .hub import CONFIG_FILE_NAME, PushOptions, upload

PLAN_FILE_NAME = "plan.json"
MAX_PLAN_BYTES = 16 * 1024 * 1024

PLAN_FORMAT = "hf_actswap.plan"


class Plan(Protocol):
    """A plan, as this floor knows one."""

    def to_json(self) -> str:
        """Return the plan as JSON."""


PlanSource = str | os.PathLike[str] | Plan
"""A plan, or the file of one: what the planner wrote also says what it was measured on."""


def save(folder: str | os.PathLike[str], config_text: str, plan: PlanSource | None) -> None:
    """Write ``actswap_config.yaml``, and ``plan.json`` where a plan is given; the folder is made.

    Raises:
        ConfigError: ``plan`` is no plan.
        OSError: the folder cannot be written.
    """
    files = _files(config_text, plan)
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
    files = _files(config_text, plan)
    document = json.loads(files[PLAN_FILE_NAME]) if PLAN_FILE_NAME in files else None
    files[CARD_FILE_NAME] = card(repo_id, config_text, document, base_model)
    return upload(repo_id, files, options, CARD_MARK)


def _files(config_text: str, plan: PlanSource | None) -> dict[str, str]:
    files = {CONFIG_FILE_NAME: config_text}
    if plan is None:
        return files
    if isinstance(plan, str | os.PathLike):
        name = os.fsdecode(plan)
        try:
            with open(name, encoding="utf-8") as file:
                text = file.read(MAX_PLAN_BYTES + 1)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
            raise ConfigError([Problem("plan", "the file of a plan", f"'{name}': {reason}")]) from error
    else:
        name, text = "a plan", plan.to_json()
    files[PLAN_FILE_NAME] = _checked(text, name)
    return files


def _checked(text: str, name: str) -> str:
    document: Any = None
    if len(text) <= MAX_PLAN_BYTES:
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
    if not isinstance(document, dict) or document.get("format") != PLAN_FORMAT:
        expected = f"a JSON document with format '{PLAN_FORMAT}', at most {MAX_PLAN_BYTES} bytes"
        raise ConfigError([Problem("plan", expected, f"'{name}', which is none")])
    return text
