"""Writes the JSON schema by which editors complete and check a configuration.

    python docs/make_schema.py

In an editor with the YAML language server, the first line of a file names it:
``# yaml-language-server: $schema=PATH``. What depends on several keys is checked by `load_config` only. Keys
at the top that the schema does not know are allowed, because a file may also hold a script's own arguments.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hf_actswap.config.documents import needed_keys  # noqa: E402
from hf_actswap.config.keys import (  # noqa: E402
    FOREIGN_PARALLEL_KEYS,
    FOREIGN_SECTIONS,
    MINDSPEED_COUNTERPARTS,
    MINDSPEED_IGNORED,
    MODE_FLAGS,
    PARALLEL_SPELLINGS,
)
from hf_actswap.config.loader import ActSwapConfig  # noqa: E402
from hf_actswap.config.memory_section import MindSpeedSettings  # noqa: E402
from hf_actswap.config.schema import (  # noqa: E402
    LayerSwapRule,
    MemoryConfig,
    OpSwapRule,
    OpTileRule,
    ParallelConfig,
    RecomputeConfig,
    StreamConfig,
    SwapConfig,
    TileConfig,
)
from hf_actswap.config.sections import types_of, types_of_entry  # noqa: E402

SCHEMA_FILE = ROOT / "hf_actswap" / "config" / "actswap_config.schema.json"

_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n        .*)*)", re.MULTILINE)
_IGNORED = {"description": "No meaning here; it is ignored."}

Schema = dict[str, Any]


def documented(section: type) -> dict[str, str]:
    """Return what a dataclass says about each of its keys, on one line each."""
    arguments = re.split(r"^(?:Args|Attributes):\n", inspect.getdoc(section) or "", flags=re.MULTILINE)[1]
    return {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(arguments)}


def editor_schema() -> Schema:
    """Return the JSON schema (draft 2020-12) of a configuration."""
    parallel, spelled = _properties(ParallelConfig), {}
    for field, spellings in PARALLEL_SPELLINGS.items():
        spelled.update(dict.fromkeys(spellings, parallel[field]))
    spelled.update(dict.fromkeys(sorted(FOREIGN_PARALLEL_KEYS), _IGNORED))
    swap, recompute = _properties(SwapConfig), _properties(RecomputeConfig)
    swap["layer_swap"] = _entries(swap["layer_swap"], LayerSwapRule)
    swap["op_swap"] = _entries(swap["op_swap"], OpSwapRule)
    tile = _properties(TileConfig)
    tile["tile"] = _entries(tile["tile"], OpTileRule)
    theirs = {key: _of(kind) for key, kind in types_of(MindSpeedSettings).items()}
    for key, ours in MINDSPEED_COUNTERPARTS.items():
        theirs[key]["description"] = f"MindSpeed's name; it sets {ours}."
    for flag, mode in MODE_FLAGS.items():
        theirs[flag]["description"] = f"MindSpeed's flag: the mode is {mode}."
    ignored = {key: {"description": f"MindSpeed: {why}"} for key, why in MINDSPEED_IGNORED.items()}
    own = {
        "swap_config": _section(SwapConfig, swap),
        "recompute_config": _section(RecomputeConfig, recompute),
    }
    whole, said = types_of(ActSwapConfig), documented(ActSwapConfig)
    model = {key: parallel[key] for key in ("offset", "pp_interleave_num")}
    model["num_layers"] = {**_of(whole["num_layers"]), "description": said["num_layers"]}
    properties = {
        **own,
        "parallel_config": _section(ParallelConfig, spelled),
        "tile_config": _section(TileConfig, tile),
        "stream_config": _section(StreamConfig, _properties(StreamConfig)),
        "memory": _section(MemoryConfig, {**_properties(MemoryConfig), **theirs, **ignored}),
        "stacks": {
            "type": "object",
            "additionalProperties": {"properties": own},
            "description": said["stacks"],
        },
        "log": {**_of(whole["log"]), "description": said["log"]},
        **{flag: theirs[flag] for flag in MODE_FLAGS},
        "model": {"properties": {"model_config": {"properties": model}}},
        **dict.fromkeys(sorted(FOREIGN_SECTIONS), _IGNORED),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of hf_actswap",
        "type": "object",
        "properties": properties,
    }


def schema_text() -> str:
    """Return the schema as the text of its file."""
    return json.dumps(editor_schema(), indent=1) + "\n"


def _properties(section: Any) -> dict[str, Schema]:
    said, types = documented(section), types_of(section)
    return {
        field.name: {**_of(types[field.name]), "description": said[field.name]} for field in fields(section)
    }


def _entries(key: Schema, rule: Any) -> Schema:
    said = documented(rule)
    properties = {
        name: {**_of(kind), "description": said[name]} for name, kind in types_of_entry(rule).items()
    }
    one = {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": sorted(needed_keys(rule)),
    }
    choices = [{"type": "array", "items": one}, one, {"type": "null"}]
    return {"anyOf": choices, "description": key["description"]}


def _section(kind: Any, properties: Mapping[str, Schema]) -> Schema:
    return {
        "description": (inspect.getdoc(kind) or "").partition("\n")[0],
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": dict(properties),
    }


def _of(kind: TypeAdapter[Any]) -> Schema:
    found = kind.json_schema()
    definitions = found.pop("$defs", {})
    schema: Schema = _plain(found, definitions)
    return schema


def _plain(schema: Any, definitions: Mapping[str, Schema]) -> Any:
    """Return a schema with its definitions written out, without texts of pydantic, whose versions differ."""
    if isinstance(schema, list):
        return [_plain(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return int(schema) if isinstance(schema, float) and schema.is_integer() else schema
    if "$ref" in schema:
        return _plain(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {
        key: _plain(item, definitions)
        for key, item in schema.items()
        if key not in ("title", "default", "description") and item not in (2**63 - 1, 1 - 2**63)
    }


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
