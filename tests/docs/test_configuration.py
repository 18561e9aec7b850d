"""docs/configuration.md is what the schema says, and its examples load."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import yaml

from hf_actswap import load_config
from hf_actswap.config.keys import PARALLEL_KEYS, PARALLEL_SPELLINGS, SETTINGS
from tests.docs.pages import DOCS, blocks, script, text_of

PAGE = DOCS / "configuration.md"
MAKE = script("make_configuration")
KEYS = [(name, field) for name, section in MAKE.SECTIONS.items() for field in fields(section)]
NUMBERS = ("whole number", "a number", "layer indices", "a list with one for each layer")


def test_the_page_is_what_the_script_writes() -> None:
    page = text_of(PAGE)
    assert MAKE.with_tables(page) == page, "run: python docs/make_configuration.py"


def test_every_section_has_a_table() -> None:
    tables = {match[1] for match in MAKE._BLOCK.findall(text_of(PAGE))}
    assert tables >= {*MAKE.SECTIONS, "mindspeed", "mindspeed_notes", "spellings"}


@pytest.mark.parametrize("name", MAKE.SECTIONS)
def test_the_schema_documents_each_key_and_no_other(name: str) -> None:
    section = MAKE.SECTIONS[name]
    said = MAKE.documented(section)
    assert list(said) == [field.name for field in fields(section)]
    assert all(len(text) > 10 for text in said.values())


@pytest.mark.parametrize("name", MAKE.SECTIONS)
def test_a_default_that_a_docstring_names_is_the_default(name: str) -> None:
    for field in fields(MAKE.SECTIONS[name]):
        default = MAKE.documented(MAKE.SECTIONS[name])[field.name].partition(" Default ")[2]
        if default:
            assert default.strip("`").startswith(str(field.default).replace("True", "true"))
        else:
            assert field.default is not None


@pytest.mark.parametrize(("name", "field"), KEYS, ids=[f"{name}-{field.name}" for name, field in KEYS])
def test_every_key_has_an_example_that_loads_and_does_something(name: str, field: Any) -> None:
    values = yaml.safe_load(MAKE.EXAMPLES[name, field.name])
    assert field.name in values
    config = load_config(MAKE.document_with(name, values))
    if name in ("layer_swap", "op_swap", "tile"):
        (rule, *_) = getattr(config.tile_config if name == "tile" else config.swap_config, name)
        entry = values[field.name]
        first = entry[0] if field.name == "op_name" else entry
        assert getattr(rule, field.name) == (tuple(first) if isinstance(first, list) else first)
    else:
        assert getattr(getattr(config, name), field.name) != field.default


def test_no_example_unit_or_link_is_of_a_key_that_is_gone() -> None:
    names = {field.name for _, field in KEYS}
    assert set(MAKE.EXAMPLES) == {(name, field.name) for name, field in KEYS}
    assert set(MAKE.UNITS) <= names | set(SETTINGS)
    assert set(MAKE.LINKS) <= names


@pytest.mark.parametrize(("name", "field"), KEYS, ids=[f"{name}-{field.name}" for name, field in KEYS])
def test_every_number_has_a_unit(name: str, field: Any) -> None:
    kind = MAKE.expected(name, field.name)
    # A list of layers per stage is what its type says that it is.
    if any(word in kind for word in NUMBERS) and "layer counts" not in kind:
        assert MAKE.UNITS[field.name]


def test_every_name_that_sets_a_key_is_on_the_page() -> None:
    page = text_of(PAGE)
    assert [key for key in (*PARALLEL_KEYS, *SETTINGS) if f"`{key}`" not in page] == []
    assert {"tensor_parallel_size", "sequence_parallel_enabled"} <= set(PARALLEL_SPELLINGS)


def test_the_pages_own_yaml_loads() -> None:
    documents = blocks(PAGE, "yaml")
    assert [load_config(document).notes for document in documents] == [(), ()]
