"""The JSON schema for editors is what the types say, knows every key, and accepts what loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_actswap.config.keys import KEYS_OF_SECTIONS, OUR_SECTIONS, SETTINGS
from tests.docs.pages import script

ROOT = Path(__file__).resolve().parents[2]
MARK = "# yaml-language-server: $schema="
FILES = sorted([*ROOT.glob("recipes/*.yaml"), *ROOT.glob("examples/*.yaml")])
MAKE, SCHEMA = script("make_configuration"), script("make_schema")
editor_schema = SCHEMA.editor_schema
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def faults(schema: Any, value: Any, path: str = "") -> Iterator[str]:
    """What a validator of JSON schemas would reject, for the words that ours uses."""
    if "anyOf" in schema and all(list(faults(one, value, path)) for one in schema["anyOf"]):
        yield f"{path}: none of the choices"
    names = schema.get("type", [])
    kinds = [TYPES[name] for name in ([names] if isinstance(names, str) else names)]
    if kinds and not any(
        isinstance(value, kind)
        and (kind is bool or value not in (True, False) or not isinstance(value, bool))
        for kind in kinds
    ):
        yield f"{path}: not {names}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: not one of {schema['enum']}"
    if "const" in schema and value != schema["const"]:
        yield f"{path}: not {schema['const']}"
    if value < schema.get("minimum", value) if isinstance(value, int | float) else False:
        yield f"{path}: too small"
    if isinstance(value, dict):
        known, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key, item in value.items():
            if key in known or isinstance(more, dict):
                yield from faults(known.get(key, more), item, f"{path}.{key}")
            elif more is False:
                yield f"{path}.{key}: unknown"
        yield from (f"{path}.{key}: missing" for key in schema.get("required", ()) if key not in value)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from faults(schema["items"], item, f"{path}[{index}]")


def test_the_file_is_what_the_command_writes() -> None:
    written = SCHEMA.SCHEMA_FILE.read_text(encoding="utf-8")
    assert written == SCHEMA.schema_text(), "run: python docs/make_schema.py"
    assert json.loads(written) == editor_schema()


def test_every_key_is_in_it_with_what_it_means() -> None:
    properties = editor_schema()["properties"]
    assert set(OUR_SECTIONS) <= set(properties)
    for section, keys in KEYS_OF_SECTIONS.items():
        known = properties[section]["properties"]
        assert set(keys) <= set(known)
        assert all(known[key]["description"] for key in known), section
    assert set(SETTINGS) <= set(properties["memory"]["properties"])


@pytest.mark.parametrize(("name", "key"), MAKE.EXAMPLES, ids=lambda item: str(item))
def test_every_example_of_the_page_is_valid(name: str, key: str) -> None:
    document = MAKE.document_with(name, yaml.safe_load(MAKE.EXAMPLES[name, key]))
    assert list(faults(editor_schema(), json.loads(json.dumps(document)))) == []


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"swap_config": {"swap": "yes"}}, ".swap_config.swap: not boolean"),
        ({"swap_config": {"swop": True}}, ".swap_config.swop: unknown"),
        ({"swap_config": {"default_prefetch": 0}}, ".swap_config.default_prefetch: none of the choices"),
        ({"swap_config": {"op_swap": [{"layers": True}]}}, ".swap_config.op_swap: none of the choices"),
        ({"memory": {"mode": "fast"}}, ".memory.mode: not one of ['off', 'smart_swap', 'adaptive']"),
        (
            {"stacks": {"vision": {"swap_config": {"swap": 1}}}},
            ".stacks.vision.swap_config.swap: not boolean",
        ),
        ({"parallel_config": {"model_parallel": "2"}}, ".parallel_config.model_parallel: not integer"),
    ],
)
def test_mistakes_are_seen(document: dict[str, Any], fault: str) -> None:
    assert list(faults(editor_schema(), document)) == [fault]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_names_the_schema_and_is_valid(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    first = text.partition("\n")[0]
    assert (path.parent / first.removeprefix(MARK)).resolve() == SCHEMA.SCHEMA_FILE
    assert list(faults(editor_schema(), yaml.safe_load(text))) == []
