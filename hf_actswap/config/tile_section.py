"""Reads ``tile_config`` and ``stream_config`` (ours): what runs over pieces of the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .keys import STREAM_KEYS, TILE_KEYS
from .reader import Findings, Path, check_keys, is_int, read_choice, read_int, read_section, show
from .schema import OpTileRule, StreamConfig, TileConfig, TileTokens
from .swap_section import EXPECTED_OP_NAME, read_layers, read_op_names

EXPECTED_LOSS = "auto, off, a whole number of tiles, at least 1, or {tokens: a whole number, at least 1}"
EXPECTED_TOKENS = "a whole number of tokens, at least 1, or auto"

_ENTRY_KEYS = ("op_name", "tokens", "layers")

Loss = Literal["off", "auto"] | int | TileTokens | None


def read_tiles(findings: Findings) -> TileConfig:
    """Read ``tile_config``."""
    section = read_section(findings, "tile_config", TILE_KEYS)
    loss = _read_loss(findings, ("tile_config", "loss"), section.get("loss"))
    return TileConfig(loss, _read_entries(findings, ("tile_config", "tile"), section.get("tile")))


def read_stream(findings: Findings) -> StreamConfig:
    """Read ``stream_config``."""
    section = read_section(findings, "stream_config", STREAM_KEYS)
    value, asked = section.get("tokens"), section.get("grad_accum_dtype")
    path = "stream_config", "grad_accum_dtype"
    dtype: Any = "fp32" if asked is None else read_choice(findings, path, asked, ("fp32", "bf16")) or "fp32"
    if value is None or value is False or value == "off":  # YAML 1.1 reads a bare `off` as false
        return StreamConfig("off", dtype)
    if value == "auto":
        return StreamConfig("auto", dtype)
    if isinstance(value, int) and is_int(value) and value >= 1:
        return StreamConfig(value, dtype)
    findings.problem(("stream_config", "tokens"), "auto, off or a whole number, at least 1", show(value))
    return StreamConfig()


def _read_loss(findings: Findings, path: Path, value: object) -> Loss:
    if value is None:
        return None
    if value is False or value == "off":  # YAML 1.1 reads a bare `off` as false
        return "off"
    if isinstance(value, Mapping) and "tokens" in value:
        check_keys(findings, path, value, ("tokens",))
        tokens = read_int(findings, (*path, "tokens"), value["tokens"], minimum=1)
        return "off" if tokens is None else TileTokens(tokens)
    if value == "auto":
        return "auto"
    if isinstance(value, int) and is_int(value) and value >= 1:
        return value
    findings.problem(path, EXPECTED_LOSS, show(value))
    return "off"


def _read_entries(findings: Findings, path: Path, value: object) -> tuple[OpTileRule, ...]:
    """Read a list of entries; a single one may stand without the list."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return _read_entry(findings, path, value)
    if not isinstance(value, list | tuple):
        findings.problem(path, "a list of entries, or one entry (a mapping)", show(value))
        return ()
    rules: list[OpTileRule] = []
    for index, item in enumerate(value):
        if isinstance(item, Mapping):
            rules += _read_entry(findings, (*path, index), item)
        else:
            findings.problem((*path, index), "an entry (a mapping)", show(item))
    return tuple(rules)


def _read_entry(findings: Findings, path: Path, entry: Mapping[object, object]) -> tuple[OpTileRule, ...]:
    check_keys(findings, path, entry, _ENTRY_KEYS)
    names: tuple[str, ...] | None = None
    if "op_name" in entry:
        names = read_op_names(findings, (*path, "op_name"), entry["op_name"])
    else:
        findings.problem((*path, "op_name"), EXPECTED_OP_NAME, "nothing")
    tokens = _read_tokens(findings, (*path, "tokens"), entry.get("tokens"))
    layers = read_layers(findings, (*path, "layers"), entry.get("layers", True))
    return tuple(OpTileRule(name, tokens, True if layers is None else layers) for name in names or ())


def _read_tokens(findings: Findings, path: Path, value: object) -> int | Literal["auto"]:
    if value is None or value == "auto":
        return "auto"
    if isinstance(value, int) and is_int(value) and value >= 1:
        return value
    findings.problem(path, EXPECTED_TOKENS, show(value))
    return "auto"
