"""Reads plans from files and from the Hub, where a plan may stand in place of a configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from ..config import ActSwapConfig, load_config
from ..config.documents import read_text
from ..config.hub import MAX_PLAN_BYTES, PLAN_FILE_NAME, PLAN_FORMAT, HubOptions, fetch, split_hub_id
from ..errors import PlanError, Problem, short_traceback
from .actions import MemoryPlan

ConfigOrPlan = ActSwapConfig | MemoryPlan | Mapping[str, Any] | str | os.PathLike[str] | None
"""What a user may pass: a plan, the path of a plan's file, or whatever `load_config` takes."""


def load_config_or_plan(source: ConfigOrPlan) -> ActSwapConfig | MemoryPlan:
    """Read a plan if ``source`` is one (a `MemoryPlan`, its document, its file), else a configuration.

    Raises:
        PlanError: the plan is malformed.
        ConfigError: the configuration is malformed, or there is nothing of that name.
    """
    if isinstance(source, MemoryPlan):
        return source
    if isinstance(source, Mapping) and source.get("format") == PLAN_FORMAT:
        return MemoryPlan.from_json(json.dumps(source))
    if isinstance(source, str | os.PathLike) and _holds_plan(source):
        return load_plan(source)
    return load_config(source)


def _holds_plan(path: str | os.PathLike[str]) -> bool:
    try:
        with open(path, "rb") as file:
            return f'"{PLAN_FORMAT}"'.encode() in file.read(MAX_PLAN_BYTES)
    except (OSError, ValueError):  # no file, or no name of one
        return False


@short_traceback
def load_plan(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> MemoryPlan:
    """Read a plan from a file, or from ``plan.json`` of a folder or of a repository on the Hub.

    Args:
        name_or_path: a path, or a Hub id ``org/name`` or ``org/name@revision``. A path that exists wins.
        revision: branch, tag or commit; takes precedence over one in the name.
        token, cache_dir, local_files_only: as in `huggingface_hub.hf_hub_download`.

    Raises:
        PlanError: there is no plan, or it is malformed or longer than `MAX_PLAN_BYTES`.
    """
    name = os.fsdecode(name_or_path)
    path = os.path.join(name, PLAN_FILE_NAME) if os.path.isdir(name) else name
    hub_id = None if os.path.exists(name) else split_hub_id(name)
    try:
        if hub_id is not None:
            repo_id, named = hub_id
            options = HubOptions(token, cache_dir, local_files_only)
            path = fetch(repo_id, PLAN_FILE_NAME, revision or named, options, MAX_PLAN_BYTES).path
        text = read_text(path, MAX_PLAN_BYTES, PlanError)
    except OSError as error:
        reason = error.strerror or str(error)
        expected = f"a file, a folder that holds {PLAN_FILE_NAME}, or a Hub id (org/name)"
        raise PlanError([Problem("plan", expected, f"'{name}': {reason}")]) from None
    return MemoryPlan.from_json(text, name)
