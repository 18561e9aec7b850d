"""Configurations back to plain values and YAML text, field by field, for any dataclass of the schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

import yaml

DOCUMENT_PATH = "document_path"
"""Metadata key of a field that stands elsewhere in the document than under its own name: a tuple of keys."""


class _Dumper(yaml.SafeDumper):
    """Block style for mappings, one line for lists of numbers and their tables, no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        # Entries stand further in than their key, as in the documents of MindFormers.
        super().increase_indent(flow, False)

    def represent_items(self, data: list[Any]) -> yaml.Node:
        flow = not any(isinstance(item, Mapping) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)

    def represent_keys(self, data: Mapping[Any, Any]) -> yaml.Node:
        return self.represent_mapping("tag:yaml.org,2002:map", data, flow_style=not data)

    def represent_words(self, data: str) -> yaml.Node:
        # Single quotes for all that might be taken for a number by a reader of YAML 1.1 or 1.2, and
        # for backslashes, so that nobody who edits the file reaches for double quotes. Those only for what
        # cannot be seen: in single quotes a line break of Unicode would be read back as a space.
        plain = data.replace("_", "").replace("/", "").isalnum() and data[0].isalpha()
        node = self.represent_scalar("tag:yaml.org,2002:str", data)
        if not plain:
            node.style = "'" if data.isprintable() else '"'
        return node


_Dumper.add_representer(list, _Dumper.represent_items)
_Dumper.add_representer(dict, _Dumper.represent_keys)
_Dumper.add_representer(str, _Dumper.represent_words)


def to_dict(config: Any) -> dict[str, Any]:
    """The document that loads to ``config``: only what differs from the defaults, tuples as lists.

    Args:
        config: an instance of a dataclass of the schema.

    Returns:
        Plain dicts, lists, strings, numbers and bools, shared with nothing; also valid as JSON.
    """
    document: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if not field.compare or _is_default(field, value):
            continue
        *parents, name = field.metadata.get(DOCUMENT_PATH, (field.name,))
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = _plain(value)
    return document


def to_yaml(config: Any) -> str:
    """`to_dict` as YAML text in block style; ``{}`` if all is default."""
    text: str = yaml.dump(
        to_dict(config),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
        default_flow_style=False,
    )
    return text


def _is_default(field: Field[Any], value: Any) -> bool:
    # Type and value: 1 == True, and a rule's layers may be either.
    default = field.default
    return default is not MISSING and type(value) is type(default) and bool(value == default)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return to_dict(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
