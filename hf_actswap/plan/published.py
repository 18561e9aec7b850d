"""Plans that stand beside a published configuration."""

from __future__ import annotations

import os

from ..config.hub import HubOptions, fetch, split_hub_id
from ..config.json_documents import read_text
from ..config.published import MAX_PLAN_BYTES, PLAN_FILE_NAME
from ..errors import PlanError, Problem, short_traceback
from .actions import MemoryPlan


@short_traceback
def load_plan(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> MemoryPlan:
    """Read a plan: a file, ``plan.json`` of a folder, or that of a repository of the Hub.

    Args:
        name_or_path: a path, which wins where it exists, or ``org/name`` or ``org/name@revision``.
        revision: branch, tag or commit; ahead of one in the name.
        token, cache_dir, local_files_only: as in `huggingface_hub.hf_hub_download`.

    Raises:
        PlanError: there is none, it is malformed, or longer than `MAX_PLAN_BYTES`.
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
