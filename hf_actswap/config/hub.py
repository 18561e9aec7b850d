"""Downloads configurations and plans from the Hugging Face Hub, saves them in folders and publishes them.

A file on the Hub may have been written by anybody: its size is checked before it is downloaded. What is
published has a model card: what the configuration is, how to use it, what its plan was measured on.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import ConfigError, Problem
from ..version import __version__
from .documents import JsonDocument, read_text

logger = logging.getLogger(__name__)

CONFIG_FILE_NAME = "actswap_config.yaml"

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

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]+))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubOptions:
    """Options of a download; the names are those of `huggingface_hub.hf_hub_download`.

    Args:
        token: a token, ``True`` for that of ``hf auth login``, ``False`` for none; ``None``: the token of
            the environment or of ``hf auth login``, if there is one. It is sent to the endpoint alone.
        cache_dir: folder of the cache; ``None``: the client's own (``HF_HUB_CACHE``).
        local_files_only: whether only the cache is searched.
    """

    token: str | bool | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False


@dataclass(frozen=True)
class HubFile:
    """A file of a repository (``org/name``), in the cache."""

    path: str
    repo_id: str

    @property
    def commit(self) -> str:
        """The commit that the file is of, 40 hexadecimal digits."""
        # Files of the cache are ``<repository>/snapshots/<commit>/<file>``.
        return Path(self.path).parent.name

    @property
    def pinned(self) -> str:
        """The Hub id of exactly this content: ``org/name@commit``."""
        return f"{self.repo_id}@{self.commit}"


def split_hub_id(text: str) -> tuple[str, str | None] | None:
    """Split ``org/name`` or ``org/name@revision``; ``None`` if it cannot be a Hub id. Touches no network."""
    match = _HUB_ID.fullmatch(text)
    # No name of git holds two dots; the client would make a path of them.
    return (match["repo"], match["revision"]) if match and ".." not in text else None


def is_commit(revision: str | None) -> bool:
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def fetch(repo_id: str, file_name: str, revision: str | None, options: HubOptions, max_bytes: int) -> HubFile:
    """Download a file of a model repository, or take it from the cache.

    A commit that is in the cache is not requested again. If the Hub cannot be reached or refuses, the cached
    copy of the revision is used, and a warning says so.

    Args:
        repo_id: ``org/name``.
        file_name: name of a file in the top folder of the repository.
        revision: branch, tag or commit; ``None``: the default branch.
        options: options of the download.
        max_bytes: the largest size that is downloaded.

    Raises:
        OSError: says why in one line: no such repository, revision or file, no access, no network and no copy
            in the cache, a file that is too long.
    """
    if options.local_files_only or is_commit(revision):
        cached = _cached(repo_id, file_name, revision, options)
        if cached is not None:
            return cached
        if options.local_files_only:
            what = f"{file_name} of {repo_id}" + (f" at {revision}" if revision else "")
            raise OSError(f"local_files_only, and {what} is not in the cache")
    try:
        url = huggingface_hub.hf_hub_url(repo_id, file_name, revision=revision)
        size = huggingface_hub.get_hf_file_metadata(url, token=options.token).size
        if size is None or size > max_bytes:
            found = "no size" if size is None else f"{size:,} bytes"
            raise _Rejected(f"{file_name} of {repo_id} has {found}, and at most {max_bytes:,} bytes are read")
        path = huggingface_hub.hf_hub_download(
            repo_id, file_name, revision=revision, token=options.token, cache_dir=options.cache_dir
        )
    # The client raises errors of its own, of its HTTP library and of the file system, in changing classes.
    except Exception as error:
        reason = _reason(error, repo_id, file_name, revision)
        final = isinstance(error, EntryNotFoundError | RevisionNotFoundError | _Rejected)
        cached = None if final else _cached(repo_id, file_name, revision, options)
        if cached is None:
            raise OSError(reason if final else f"{reason}; no copy is in the cache") from error
        logger.warning("From the Hub %s. The cached copy is used: %s.", reason, cached.pinned)
        return cached
    return HubFile(str(path), repo_id)


class _Rejected(OSError):
    """The Hub offers a file that is too long."""


def _cached(repo_id: str, file_name: str, revision: str | None, options: HubOptions) -> HubFile | None:
    try:
        path = huggingface_hub.hf_hub_download(
            repo_id, file_name, revision=revision, cache_dir=options.cache_dir, local_files_only=True
        )
    except (OSError, ValueError):
        return None
    return HubFile(str(path), repo_id)


def _reason(error: Exception, repo_id: str, file_name: str, revision: str | None) -> str:
    """Return why a download failed, in one line; the client's messages are longer, for other cases too."""
    if isinstance(error, _Rejected):
        return str(error)
    if isinstance(error, GatedRepoError):
        page = f"{constants.ENDPOINT}/{repo_id}"
        return f"{repo_id} is gated: ask for access at {page}, then `hf auth login` or set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"{constants.ENDPOINT} has no repository {repo_id}, or a private one that needs another token"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} has no branch, tag or commit {revision}"
    if isinstance(error, OfflineModeIsEnabled):
        return "nothing: HF_HUB_OFFLINE is set"
    if isinstance(error, EntryNotFoundError):
        return f"{repo_id} has no file {file_name}" + (f" at {revision}" if revision else "")
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    if isinstance(error, HfHubHTTPError):
        return f"{constants.ENDPOINT} answered {error.response.status_code}"
    return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {line.rstrip('.')})"


class Plan(Protocol):
    def to_json(self) -> str:
        """Return the plan as JSON."""


PlanSource = str | os.PathLike[str] | Plan
"""A plan, or the path of a plan's file; a file of the planner also says what the plan was measured on."""


class _CardFacts(TypedDict, total=False):
    num_layers: int
    rows: tuple[Any, ...]
    made_for: Mapping[str, Any] | None
    measured: Mapping[str, Any] | None


def save(folder: str | os.PathLike[str], config_text: str, plan: PlanSource | None) -> None:
    files, _ = _files(config_text, plan)
    os.makedirs(folder, exist_ok=True)
    for name, text in files.items():
        Path(folder, name).write_text(text, encoding="utf-8")


def publish(
    repo_id: str,
    config_text: str,
    plan: PlanSource | None,
    base_model: str | None,
    *,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    commit_message: str | None,
    **commit: Any,
) -> str:
    """Publish the configuration, the plan and the card in one commit; see `ActSwapConfig.push_to_hub`.

    The repository and the branch ``revision`` are created if they do not exist. ``commit``: further arguments
    of `huggingface_hub.HfApi.create_commit`.
    """
    files, document = _files(config_text, plan)
    files[CARD_FILE_NAME] = card(repo_id, config_text, document, base_model)
    api = huggingface_hub.HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    if _has_other_card(api, repo_id, revision, token):
        logger.info("%s has a README.md of its own, which is left as it is.", repo_id)
        del files[CARD_FILE_NAME]
    return api.create_commit(
        repo_id,
        operations=[
            huggingface_hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=text.encode("utf-8"))
            for name, text in files.items()
        ],
        commit_message=commit_message or f"Upload {', '.join(sorted(files))}",
        revision=revision,
        **commit,
    )


def _has_other_card(
    api: huggingface_hub.HfApi, repo_id: str, revision: str | None, token: str | bool | None
) -> bool:
    if not api.file_exists(repo_id, CARD_FILE_NAME, revision=revision):
        return False
    try:
        found = fetch(repo_id, CARD_FILE_NAME, revision, HubOptions(token), max_bytes=1024 * 1024)
        return CARD_MARK not in Path(found.path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


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
            found = f"'{name}': {error.strerror}"
            raise ConfigError([Problem("plan", "the file of a plan", found)]) from None
    else:
        name, text = "a plan", plan.to_json()
    document = JsonDocument(text, "plan", ConfigError, name)
    document.check_format(PLAN_FORMAT, PLAN_FORMAT_VERSION)
    document.read(_CardFacts)
    document.finish()
    files[PLAN_FILE_NAME] = text
    return files, document.content


def card(repo_id: str, config_text: str, plan: Mapping[str, Any] | None, base_model: str | None) -> str:
    """Return the text of the model card, in Markdown, with what the document of a plan says of it."""
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
