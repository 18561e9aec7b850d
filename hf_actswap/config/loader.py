"""`load_config`: a file, folder, text, mapping or Hub id to an `ActSwapConfig`, or every error at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, Problem
from .hub import CONFIG_FILE_NAME, download_config, split_hub_id
from .keys import FOREIGN_SECTIONS, OUR_SECTIONS, meaningless, unknown_key_hint
from .memory_section import check_fates, read_memory
from .parallel_section import (
    MODEL_CONFIG,
    PIPELINE_INTERLEAVE,
    honoured_in_model,
    lookup,
    read_parallel,
)
from .reader import Findings, Path, read_int, show
from .recompute_section import read_recompute
from .schema import ActSwapConfig
from .swap_section import read_swap, swap_is_unreadable
from .yaml_text import MAX_TEXT_BYTES, parse_yaml, too_long

_EXPECTED_SOURCE = (
    f"a file, a folder that holds {CONFIG_FILE_NAME}, YAML or JSON text, or a Hub id (org/name)"
)
_TEXT_SOURCE = "text"
_FILE_ENDINGS = (".yaml", ".yml", ".json")


def load_config(source: str | os.PathLike[str] | Mapping[str, Any] | ActSwapConfig | None) -> ActSwapConfig:
    """Read a configuration.

    Args:
        source: a path of a YAML or JSON file; a folder that holds ``actswap_config.yaml``; the text itself
            (it has a line break or is a mapping); a mapping, which is not changed; an `ActSwapConfig`,
            returned as is; ``None`` or an empty text, for all defaults; else a Hub id, ``org/name`` or
            ``org/name@revision``, whose repository holds ``actswap_config.yaml``. Only a string that is
            none of the others and looks like a Hub id reaches the network.

    Returns:
        The configuration; its ``notes`` have one line for each accepted section or key without meaning.

    Raises:
        ConfigError: with every problem, in the order of the document.
    """
    if isinstance(source, ActSwapConfig):
        return source
    if source is None:
        return ActSwapConfig(source="defaults")
    if isinstance(source, Mapping):
        return _read_document(source, [], "mapping")
    if isinstance(source, str):
        return _load_string(source)
    if isinstance(source, os.PathLike):
        path = os.fsdecode(source)
        if os.path.exists(path):
            return _load_path(path)
        raise ConfigError([_no_such_source(path, "no such file or folder")])
    raise ConfigError([Problem("source", _EXPECTED_SOURCE, show(source))])


def _load_string(text: str) -> ActSwapConfig:
    # A line break first: no question to the file system with a whole document as the name.
    if "\n" in text or not text.strip():
        return _load_text(text, _TEXT_SOURCE)
    if os.path.exists(text):
        return _load_path(text)
    if text.lstrip().startswith("{") or ": " in text or text.rstrip().endswith(":"):
        return _load_text(text, _TEXT_SOURCE)
    if text.lower().endswith(_FILE_ENDINGS):
        raise ConfigError([_no_such_source(text, "no such file")])
    hub_id = split_hub_id(text)
    if hub_id is None:
        raise ConfigError([_no_such_source(text, "no such file or folder, no YAML mapping and no Hub id")])
    try:
        path = download_config(*hub_id)
    except OSError as error:
        raise ConfigError(
            [_no_such_source(text, f"no such file or folder, and from the Hub {error}")]
        ) from error
    return _load_file(path, text)


def _no_such_source(text: str, tried: str) -> Problem:
    name = f"'{text}'" if text.isprintable() else repr(text)
    return Problem("source", _EXPECTED_SOURCE, f"{name}: {' '.join(tried.split()).rstrip('.')}")


def _load_path(path: str) -> ActSwapConfig:
    if not os.path.isdir(path):
        return _load_file(path, path)
    inside = os.path.join(path, CONFIG_FILE_NAME)
    if not os.path.isfile(inside):
        raise ConfigError([_no_such_source(path, f"a folder without {CONFIG_FILE_NAME}")])
    return _load_file(inside, inside)


def _load_file(path: str, source: str) -> ActSwapConfig:
    if not os.path.isfile(path):
        raise ConfigError([_no_such_source(path, "neither a file nor a folder")])
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([_no_such_source(path, f"it cannot be read, {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        if len(raw) > MAX_TEXT_BYTES:
            raise ConfigError([too_long("more")], source) from error
        raise ConfigError(
            [Problem("document", "text in UTF-8", f"byte {error.start} that is not")], source
        ) from error
    if len(raw) > MAX_TEXT_BYTES:
        raise ConfigError([too_long("more")], source)
    return _load_text(text, source)


def _load_text(text: str, source: str) -> ActSwapConfig:
    document, duplicates = parse_yaml(text, source)
    if document is None:
        document = {}
    if not isinstance(document, Mapping):
        raise ConfigError([Problem("document", "a mapping of sections", show(document))], source)
    return _read_document(document, duplicates, source)


def _read_document(
    document: Mapping[Any, Any], duplicates: list[tuple[Path, Problem]], source: str
) -> ActSwapConfig:
    findings = Findings(document)
    for path, problem in duplicates:
        findings.problem(path, problem.expected, problem.found, problem.hint)
    _note_foreign_sections(findings)
    swap = read_swap(findings)
    parallel, shape = read_parallel(findings)
    recompute = read_recompute(
        findings, swap=None if swap_is_unreadable(findings) else swap.swap, shape=shape
    )
    memory = read_memory(findings)
    check_fates(findings, memory, swap, recompute)
    config = ActSwapConfig(
        swap_config=swap,
        recompute_config=recompute,
        parallel_config=parallel,
        memory=memory,
        num_layers=_read_num_layers(findings),
        notes=findings.notes(),
        source=source,
    )
    problems = findings.problems()
    if problems:
        raise ConfigError(problems, source)
    return config


def _read_num_layers(findings: Findings) -> int | None:
    path = (*MODEL_CONFIG, "num_layers")
    value = lookup(findings, path)
    return None if value is None else read_int(findings, path, value, minimum=1)


def _note_foreign_sections(findings: Findings) -> None:
    """One line for each section that is not ours; a problem for each that is nobody's."""
    for key in findings.document:
        if key == "model":
            findings.note((key,), _model_note(findings))
        elif key == "parallel" and lookup(findings, PIPELINE_INTERLEAVE) is not None:
            findings.note((key,), _interleave_note(findings))
        elif key in FOREIGN_SECTIONS:
            findings.note((key,), meaningless(key))
        elif key not in OUR_SECTIONS:
            hint = unknown_key_hint(key, (*OUR_SECTIONS, "model"), sorted(FOREIGN_SECTIONS))
            path: Path = (key,) if isinstance(key, str | int) else ()
            found = "an unknown key" if path else f"the key {show(key)}"
            findings.problem(path, "a section of this library or of MindFormers", found, hint)


def _model_note(findings: Findings) -> str:
    honoured = honoured_in_model(findings)
    also = (
        f"{' and '.join(honoured)} {'go' if len(honoured) > 1 else 'goes'} to parallel_config; "
        if honoured
        else ""
    )
    return f"`model`: num_layers is checked against the model; {also}the rest is ignored."


def _interleave_note(findings: Findings) -> str:
    if lookup(findings, PIPELINE_INTERLEAVE) is False:
        return "`parallel`: pipeline_interleave is false, so pp_interleave_num is 1; the rest is ignored."
    return "`parallel`: pipeline_interleave is honoured; the rest is ignored."
