"""Where a document comes from: text, a file, a folder or the Hub, to its text."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import ConfigError, Problem
from .hub import CONFIG_FILE_NAME, HubFile, HubOptions, fetch, split_hub_id
from .yaml_text import MAX_TEXT_BYTES, too_long

EXPECTED_SOURCE = f"a file, a folder that holds {CONFIG_FILE_NAME}, YAML or JSON text, or a Hub id (org/name)"
_EXPECTED_NAME = f"a file, a folder that holds {CONFIG_FILE_NAME}, or a Hub id (org/name)"
_FILE_ENDINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Document:
    """Text that was found.

    Args:
        text: YAML or JSON.
        source: the file, the Hub id with its commit, or a short description.
        hub_file: where on the Hub it was, if it was there: then anybody may have written it.
    """

    text: str
    source: str
    hub_file: HubFile | None = None


def from_string(text: str) -> Document:
    """Read text, or the file, the folder or the Hub id that it names.

    Raises:
        ConfigError: there is nothing of that name, or it cannot be read.
    """
    # A line break first: no question to the file system with a whole document as the name.
    if "\n" in text or not text.strip():
        return Document(text, "text")
    if _exists(text):
        return from_path(text)
    if text.lstrip().startswith("{") or ": " in text or text.rstrip().endswith(":"):
        return Document(text, "text")
    if text.lower().endswith(_FILE_ENDINGS):
        raise _no_such(text, "no such file")
    hub_id = split_hub_id(text)
    if hub_id is None:
        raise _no_such(text, "no such file or folder, no YAML mapping and no Hub id")
    return _from_hub(text, *hub_id, HubOptions(), EXPECTED_SOURCE)


def from_name(name: str, revision: str | None, options: HubOptions) -> Document:
    """Read a file, a folder or a Hub id, and nothing else.

    Args:
        name: ``org/name`` may be followed by ``@revision``.
        revision: branch, tag or commit on the Hub.
        options: how the Hub is asked.

    Raises:
        ConfigError: there is nothing of that name, it cannot be read, or two revisions are named.
    """
    if _exists(name):
        return from_path(name)
    hub_id = split_hub_id(name)
    if hub_id is None:
        raise _no_such(name, "no such file or folder, and no Hub id", _EXPECTED_NAME)
    repo_id, named = hub_id
    if revision is not None and named not in (None, revision):
        raise ConfigError([Problem("revision", f"{named}, as in '{name}'", revision)])
    if revision is not None and split_hub_id(f"{repo_id}@{revision}") is None:
        raise ConfigError([Problem("revision", "a branch, tag or commit", repr(revision))])
    return _from_hub(name, repo_id, revision or named, options, _EXPECTED_NAME)


def from_path(path: str) -> Document:
    """Read a file, or ``actswap_config.yaml`` in a folder.

    Raises:
        ConfigError: there is none, it cannot be read, or it is longer than `MAX_TEXT_BYTES`.
    """
    if not _exists(path):
        raise _no_such(path, "no such file or folder")
    if not os.path.isdir(path):
        return Document(_read(path, path), path)
    inside = os.path.join(path, CONFIG_FILE_NAME)
    if not os.path.isfile(inside):
        raise _no_such(path, f"a folder without {CONFIG_FILE_NAME}")
    return Document(_read(inside, inside), inside)


def _from_hub(name: str, repo_id: str, revision: str | None, options: HubOptions, expected: str) -> Document:
    try:
        found = fetch(repo_id, CONFIG_FILE_NAME, revision, options, MAX_TEXT_BYTES)
    except OSError as error:
        raise _no_such(name, f"no such file or folder, and from the Hub: {error}", expected) from None
    return Document(_read(found.path, found.pinned), found.pinned, found)


def _exists(path: str) -> bool:
    try:
        return os.path.exists(path)
    except ValueError:  # what the file system cannot take for a name, such as a lone surrogate
        return False


def _no_such(text: str, tried: str, expected: str = EXPECTED_SOURCE) -> ConfigError:
    name = f"'{text}'" if text.isprintable() else repr(text)
    return ConfigError([Problem("source", expected, f"{name}: {' '.join(tried.split()).rstrip('.')}")])


def _read(path: str, source: str) -> str:
    if not os.path.isfile(path):
        raise _no_such(path, "neither a file nor a folder")
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise _no_such(path, f"it cannot be read, {error.strerror}") from None
    if len(raw) > MAX_TEXT_BYTES:
        raise ConfigError([too_long("more")], source)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = Problem("document", "text in UTF-8", f"byte {error.start} that is not")
        raise ConfigError([problem], source) from None
