"""Downloads files of repositories on the Hugging Face Hub into the cache, and uploads files.

A file on the Hub may have been written by anybody. Its size is checked before it is downloaded, only file
names that this package chose are requested, and the path that the client returns must lie in its cache.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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

logger = logging.getLogger(__name__)

CONFIG_FILE_NAME = "actswap_config.yaml"

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]+))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILE_NAME = re.compile(r"[\w.+-]+", re.ASCII)


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
    """A file of a repository, in the cache.

    Args:
        path: path of the file in the cache.
        repo_id: ``org/name``.
        revision: branch, tag or commit that was asked for; ``None``: the default branch.
        commit: the commit that the file is of, 40 hexadecimal digits.
    """

    path: str
    repo_id: str
    revision: str | None
    commit: str

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
    """Whether a revision is a full commit hash, whose content never changes."""
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
        OSError: with one line that says why, whatever the failure: no such repository, revision or file, no
            access, no network and no copy in the cache, a file that is too long.
    """
    if options.local_files_only or is_commit(revision):
        cached = _cached(repo_id, file_name, revision, options)
        if cached is not None:
            return cached
        if options.local_files_only:
            raise OSError(f"local_files_only, and {_what(repo_id, file_name, revision)} is not in the cache")
    try:
        _ask_first(repo_id, file_name, revision, options, max_bytes)
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
    return _in_cache(path, repo_id, revision, options)


class _Rejected(OSError):
    """The Hub offers a file that is not accepted: it is too long, or of no valid commit."""


def _ask_first(
    repo_id: str, file_name: str, revision: str | None, options: HubOptions, max_bytes: int
) -> None:
    """Check size, commit and tag of a file before its download; the client makes file names of them."""
    url = huggingface_hub.hf_hub_url(repo_id, file_name, revision=revision)
    found = huggingface_hub.get_hf_file_metadata(url, token=options.token)
    if found.size is None or found.size > max_bytes:
        size = "no size" if found.size is None else f"{found.size:,} bytes"
        raise _Rejected(f"{file_name} of {repo_id} has {size}, and at most {max_bytes:,} bytes are read")
    if not _COMMIT.fullmatch(found.commit_hash or "") or not _FILE_NAME.fullmatch(found.etag or ""):
        raise _Rejected(f"{constants.ENDPOINT} names no commit, or one that cannot be a file name")


def _cached(repo_id: str, file_name: str, revision: str | None, options: HubOptions) -> HubFile | None:
    try:
        path = huggingface_hub.hf_hub_download(
            repo_id, file_name, revision=revision, cache_dir=options.cache_dir, local_files_only=True
        )
    except (OSError, ValueError):
        return None
    return _in_cache(path, repo_id, revision, options)


def _in_cache(path: str, repo_id: str, revision: str | None, options: HubOptions) -> HubFile:
    """Return a file of the cache (``<repository>/snapshots/<commit>/<file>``), if it really lies there.

    Raises:
        OSError: it is a link that leads out of the cache, or its folder is no commit.
    """
    commit = Path(path).parent.name
    cache = Path(options.cache_dir or constants.HF_HUB_CACHE).expanduser().resolve()
    # A user may keep one repository of the cache on another disk, so its folder is resolved first.
    allowed = (cache, Path(path).parents[2].resolve())
    real = Path(path).resolve()
    if not any(real.is_relative_to(folder) for folder in allowed):
        raise OSError(f"the cached copy of {repo_id} is a link that leads out of the cache")
    if not is_commit(commit):
        raise OSError(f"the cached copy of {repo_id} is of no commit")
    return HubFile(str(path), repo_id, revision, commit)


def _what(repo_id: str, file_name: str, revision: str | None) -> str:
    return f"{file_name} of {repo_id}" + (f" at {revision}" if revision else "")


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


@dataclass(frozen=True)
class PushOptions:
    """Options of an upload; the names are those of transformers' ``push_to_hub``.

    Args:
        private: whether a new repository is private; ``None``: the default of its organisation.
        token: as in `HubOptions`.
        revision: branch to commit to, created if it does not exist; ``None``: the default branch.
        create_pr: whether a pull request is opened instead.
        commit_message: first line of the commit; ``None``: one that names the files.
        commit_description: text below that line.
    """

    private: bool | None = None
    token: str | bool | None = None
    revision: str | None = None
    create_pr: bool = False
    commit_message: str | None = None
    commit_description: str | None = None


def upload(repo_id: str, files: Mapping[str, str], options: PushOptions, card_mark: str) -> str:
    """Publish files in one commit; the repository is created if it does not exist.

    Args:
        repo_id: ``org/name``, or ``name`` for a repository of the user.
        files: name -> text. A ``README.md`` is left out if the repository has one without ``card_mark``.
        options: options of the upload.
        card_mark: text by which a card of this library is recognised.

    Returns:
        The address of the commit (a `huggingface_hub.CommitInfo`).

    Raises:
        OSError: no access or no network: the client's errors, which say what to do.
    """
    api = huggingface_hub.HfApi(token=options.token)
    repo_id = api.create_repo(repo_id, private=options.private, exist_ok=True).repo_id
    if options.revision is not None and not options.revision.startswith("refs/"):
        api.create_branch(repo_id, branch=options.revision, exist_ok=True)
    chosen = dict(files)
    if "README.md" in files and _has_other_card(api, repo_id, options, card_mark):
        logger.info("%s has a README.md of its own, which is left as it is.", repo_id)
        del chosen["README.md"]
    return api.create_commit(
        repo_id,
        operations=[
            huggingface_hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=text.encode("utf-8"))
            for name, text in chosen.items()
        ],
        commit_message=options.commit_message or f"Upload {', '.join(sorted(chosen))}",
        commit_description=options.commit_description,
        revision=options.revision,
        create_pr=options.create_pr,
    )


def _has_other_card(api: huggingface_hub.HfApi, repo_id: str, options: PushOptions, card_mark: str) -> bool:
    if not api.file_exists(repo_id, "README.md", revision=options.revision):
        return False
    how = HubOptions(token=options.token)
    try:
        found = fetch(repo_id, "README.md", options.revision, how, max_bytes=1024 * 1024)
        return card_mark not in Path(found.path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
