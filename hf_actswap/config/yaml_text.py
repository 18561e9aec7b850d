"""Parses YAML (and JSON) text to plain values, and writes configurations as plain values and YAML text.

Parsing accepts safe tags only and names duplicate keys; no text can make it hang. Writing goes field by
field, for any dataclass of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import yaml

from ..errors import ConfigError, Problem
from .validation import Path, show, where

MAX_TEXT_BYTES = 256 * 1024
"""Largest document: ten times the longest published one of MindFormers, and read in less than a second."""

MAX_NODES = 10_000
"""The most scalars, lists and mappings of a document, each counted as often as aliases repeat it."""

MAX_LEVELS = 100
"""The most lists and mappings inside each other; PyYAML's time grows with the square of this number."""

DOCUMENT_PATH = "document_path"
"""Metadata key of a field that is not under its own name in the document; its value: a tuple of keys."""

_INT_TAG = "tag:yaml.org,2002:int"
_STR_TAG = "tag:yaml.org,2002:str"
_FLOAT_TAG = "tag:yaml.org,2002:float"
_INT_TEXT = re.compile(r"[-+]?[0-9]+\Z")
_FLOAT_TEXT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
)
_UNREADABLE = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError)
_BAD_ESCAPE = "found unknown escape character"


class _TooManyNodes(yaml.MarkedYAMLError):
    """The document has more than `MAX_NODES` nodes."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the numbers of YAML 1.2: ``1:30`` is no number and ``1e3`` is one."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own class attribute
        first: [(tag, text) for tag, text in resolvers if tag not in (_INT_TAG, _FLOAT_TAG)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._node_count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._node_count += 1
        if self._node_count > MAX_NODES:
            raise _TooManyNodes()
        return super().compose_node(parent, index)

    def scan_flow_scalar_non_spaces(self, double: bool, start_mark: yaml.Mark) -> list[str]:
        try:
            chunks: list[str] = super().scan_flow_scalar_non_spaces(double, start_mark)
            return chunks
        except (ValueError, OverflowError) as error:
            context, problem = "while scanning a double-quoted scalar", "found a character beyond Unicode"
            raise yaml.scanner.ScannerError(context, start_mark, problem, self.get_mark()) from error

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except _UNREADABLE as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"a value that cannot be read as {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_text(self, node: yaml.ScalarNode) -> str:
        # JSON escapes a character beyond 16 bits as two, which YAML would leave apart.
        text: str = self.construct_scalar(node)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def construct_decimal(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))


_Loader.add_implicit_resolver(_INT_TAG, _INT_TEXT, list("-+0123456789"))
_Loader.add_implicit_resolver(_FLOAT_TAG, _FLOAT_TEXT, list("-+.0123456789"))
_Loader.add_constructor(_INT_TAG, _Loader.construct_decimal)
_Loader.add_constructor(_STR_TAG, _Loader.construct_text)


def parse_yaml(text: str, source: str) -> tuple[object, list[tuple[Path, Problem]]]:
    """Read one YAML or JSON document.

    Returns the value (``None`` for an empty document), and a problem with its path for each key that stands
    more than once in a mapping.

    Args:
        text: the document.
        source: where the document comes from, for the message.

    Raises:
        ConfigError: the text is not one YAML document, holds a tag that is not safe, is longer than
            `MAX_TEXT_BYTES`, has more than `MAX_NODES` nodes with its aliases written out, or more than
            `MAX_LEVELS` levels.
    """
    size_bytes = len(text.encode("utf-8", "surrogatepass"))
    if size_bytes > MAX_TEXT_BYTES:
        problem = Problem("document", f"at most {MAX_TEXT_BYTES} bytes", f"{size_bytes} bytes")
        raise ConfigError([problem], source)
    try:
        # Loading begins with a check of the characters, so the loader itself may raise.
        loader = _Loader(_without_json_tabs(text))
        node = loader.get_single_node()
        if node is None:
            return None, []
        survey = _Survey()
        survey.visit(node, ())
        return loader.construct_document(node), survey.duplicates
    except _TooManyNodes:
        problem = Problem("document", f"at most {MAX_NODES} values, aliases written out", "more")
        raise ConfigError([problem], source) from None
    except RecursionError:
        problem = Problem("document", f"at most {MAX_LEVELS} levels of lists and mappings", "more")
        raise ConfigError([problem], source) from None
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(error, text)], source) from None


class _Survey:
    """Visits the nodes of a document once: counts them, with aliases expanded, and finds duplicate keys."""

    def __init__(self) -> None:
        self.duplicates: list[tuple[Path, Problem]] = []
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def visit(self, node: yaml.Node, path: Path) -> int:
        """Return the number of nodes below and including ``node``, aliases written out."""
        known = self._sizes.get(id(node))
        if known is not None:
            return known
        if id(node) in self._open:
            raise yaml.MarkedYAMLError(problem="an alias inside what it names", problem_mark=node.start_mark)
        self._open.add(id(node))
        size = 1
        if isinstance(node, yaml.SequenceNode | yaml.MappingNode) and node.flow_style:
            _join_tuples(node)
        if isinstance(node, yaml.SequenceNode):
            size += sum(self.visit(item, (*path, index)) for index, item in enumerate(node.value))
        elif isinstance(node, yaml.MappingNode):
            self._note_duplicates(node, path)
            for key, value in node.value:
                step = (key.value,) if isinstance(key, yaml.ScalarNode) else ()
                size += self.visit(key, path) + self.visit(value, path + step)
        if size > MAX_NODES:
            raise _TooManyNodes()
        self._open.remove(id(node))
        self._sizes[id(node)] = size
        return size

    def _note_duplicates(self, node: yaml.MappingNode, path: Path) -> None:
        lines: dict[tuple[str, str], list[int]] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines.setdefault((key.tag, key.value), []).append(key.start_mark.line + 1)
        for (_, name), places in lines.items():
            if len(places) > 1:
                here = (*path, name)
                found = f"it on lines {', '.join(map(str, places[:-1]))} and {places[-1]}"
                if places[0] == places[-1]:
                    found = f"it {len(places)} times on line {places[0]}"
                self.duplicates.append((here, Problem(where(here), "each key once", found)))


def _join_tuples(node: yaml.SequenceNode | yaml.MappingNode) -> None:
    """Make one text of each tuple of Python, as in block style, so that one message can say what to write.

    In flow style its commas cut it: ``{layers: (0, 1)}`` has a key ``1)``.
    """
    kept: list[Any] = []
    begun: list[Any] = []  # what belongs to a tuple that is not closed yet
    for item in node.value:
        key, value = item if isinstance(item, tuple) else (None, item)
        if begun:
            begun.append(item)
            part = value if key is None else key
            if not _is_plain(part) or (key is not None and not (_is_plain(value) and not value.value)):
                kept, begun = kept + begun, []
            elif part.value.endswith(")"):
                kept, begun = [*kept, _joined(begun)], []
        elif _is_plain(value) and value.value.startswith("(") and ")" not in value.value:
            begun = [item]
        else:
            kept.append(item)
    node.value = kept + begun


def _is_plain(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None


def _joined(items: list[Any]) -> Any:
    first = items[0]
    key, value = first if isinstance(first, tuple) else (None, first)
    parts = [value, *(item[0] if isinstance(item, tuple) else item for item in items[1:])]
    text = ", ".join(part.value for part in parts)
    whole = yaml.ScalarNode(_STR_TAG, text, value.start_mark, parts[-1].end_mark)
    return whole if key is None else (key, whole)


def _without_json_tabs(text: str) -> str:
    """Return JSON text with spaces for tabs, which YAML forbids as indentation. JSON strings hold none."""
    if "\t" not in text or not text.lstrip().startswith("{"):
        return text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text.replace("\t", " ")


def _syntax_problem(error: yaml.YAMLError, text: str) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem("document", "valid YAML", " ".join(str(error).split()))
    mark = error.problem_mark
    what = " ".join(", ".join(filter(None, (error.context, error.problem))).split())
    found = f"a syntax error ({what})"
    hint = ""
    if (error.problem or "").startswith(_BAD_ESCAPE):
        hint = _single_quote_hint(text, mark.line, mark.column)
    elif "'\\t'" in (error.problem or ""):
        hint = "Indent with spaces."
    return Problem(f"line {mark.line + 1}, column {mark.column + 1}", "valid YAML", found, hint)


def _single_quote_hint(text: str, line: int, column: int) -> str:
    r"""Return a hint: the text around a bad escape in single quotes, where ``\.`` needs no escape."""
    written = text.splitlines()[line] if line < len(text.splitlines()) else ""
    for quoted in re.finditer(r'"([^"]*)"', written):
        if quoted.start() < column < quoted.end():
            return f"Write it in single quotes: {show(quoted.group(1))}."
    return "Write it in single quotes."


class _Dumper(yaml.SafeDumper):
    """Writes mappings in block style, lists of numbers and their tables on one line, and no aliases."""

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
        # Single quotes for all that might be taken for a number by a reader of YAML 1.1 or 1.2, and for
        # backslashes, so that nobody who edits the file uses double quotes. Double quotes only for characters
        # that cannot be seen: in single quotes a line break of Unicode would be read back as a space.
        plain = data.replace("_", "").replace("/", "").isalnum() and data[0].isalpha()
        node = self.represent_scalar("tag:yaml.org,2002:str", data)
        if not plain:
            node.style = "'" if data.isprintable() else '"'
        return node


_Dumper.add_representer(list, _Dumper.represent_items)
_Dumper.add_representer(dict, _Dumper.represent_keys)
_Dumper.add_representer(str, _Dumper.represent_words)


def to_dict(config: Any) -> dict[str, Any]:
    """Return the document that loads to ``config``: plain values, only what differs from the defaults.

    It is shared with nothing, and also valid as JSON.
    """
    document: dict[str, Any] = {}
    for field in fields(config):
        value, default = getattr(config, field.name), field.default
        # Type and value: 1 == True, and a rule's layers may be either.
        if not field.compare or (type(value) is type(default) and value == default):
            continue
        *parents, name = field.metadata.get(DOCUMENT_PATH, (field.name,))
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = _plain(value)
    return document


def to_yaml(config: Any) -> str:
    """Return `to_dict` as YAML text in block style; ``{}`` if all is default."""
    style: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "default_flow_style": False}
    return str(yaml.dump(to_dict(config), Dumper=_Dumper, width=100, **style))


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
