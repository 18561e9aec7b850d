"""Configurations published on the Hugging Face Hub: a repository that holds ``actswap_config.yaml``."""

from __future__ import annotations

import re

import huggingface_hub

CONFIG_FILE_NAME = "actswap_config.yaml"

_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]+))?", re.ASCII
)


def split_hub_id(text: str) -> tuple[str, str | None] | None:
    """Split ``org/name`` or ``org/name@revision``; ``None`` if it cannot be a Hub id. Touches no network."""
    match = _HUB_ID.fullmatch(text)
    return (match["repo"], match["revision"]) if match else None


def download_config(repo_id: str, revision: str | None) -> str:
    """Download ``actswap_config.yaml`` of a model repository (or take it from the cache).

    Returns:
        The path of the local file.

    Raises:
        OSError: with one line that says why, whatever the failure: no such repository, revision or file, no
            access, no network.
    """
    try:
        return str(huggingface_hub.hf_hub_download(repo_id, CONFIG_FILE_NAME, revision=revision))
    # The client raises errors of its own, of its HTTP library and of the file system, in changing classes.
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        raise OSError(f"{type(error).__name__}: {reason}") from error
