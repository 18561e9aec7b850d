"""Combines one file and the command line into one set of arguments.

A configuration file may hold arguments of the recipe and of the Trainer beside the sections of hf_actswap, in
any order; the sections go to ``ActSwapTrainingArguments.actswap`` untouched. Precedence: command line, then
file, then the defaults of the recipe, then those of the Trainer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch
from recipe_mode import with_mode
from recipe_options import (
    DEFAULT_DATASET,
    DEFAULT_DATASET_CONFIG,
    LEARNING_RATE_FROM_SCRATCH,
    SIZE_OPTIONS,
    TRAINER_DEFAULTS,
    DataArguments,
    ModelArguments,
    PlannerArguments,
    RecipeError,
)
from transformers import HfArgumentParser

from hf_actswap import ActSwapConfig, ActSwapTrainingArguments, ConfigError
from hf_actswap.config.keys import FOREIGN_SECTIONS, KEYS_OF_SECTIONS, MODE_FLAGS, OUR_SECTIONS
from hf_actswap.config.validation import is_off_word, unknown_key_hint
from hf_actswap.config.yaml_text import parse_yaml
from hf_actswap.errors import Problem
from hf_actswap.parallel.rank_agreement import failing_together
from hf_actswap.plan import load_config_or_plan

logger = logging.getLogger("llama_swap")

LIBRARY_SECTIONS = (*OUR_SECTIONS, "context", "model")
DEFAULT_ACTSWAP = {"swap_config": {"swap": True}}


def build_parser() -> HfArgumentParser:
    """Return the parser of all four dataclasses, with the recipe's defaults (shown by ``--help``)."""
    parser = HfArgumentParser(
        (ModelArguments, DataArguments, ActSwapTrainingArguments, PlannerArguments),
        usage="llama_swap.py [CONFIG.yaml|CONFIG.json] [--argument value ...]",
        allow_abbrev=False,
    )
    parser.set_defaults(**TRAINER_DEFAULTS)
    return parser


def parse_arguments(argv: Sequence[str]) -> tuple[ModelArguments, DataArguments, ActSwapTrainingArguments]:
    """Read ``[CONFIG.yaml|CONFIG.json] [--argument value ...]``.

    Raises:
        ConfigError: the file is malformed, or a name there or on the command line is unknown; all are listed.
        RecipeError: the file cannot be read.
        SystemExit: a value has the wrong type (by argparse, which says which), or ``--help``.
    """
    parser = build_parser()
    with failing_together("arguments"):  # a file that one rank cannot read would leave the others waiting
        written = _written(list(argv), parser)
    model, data, args, _ = parser.parse_dict({**TRAINER_DEFAULTS, **derived_defaults(written), **written})
    return model, data, args


def _written(command_line: list[str], parser: HfArgumentParser) -> dict[str, Any]:
    """Return the arguments that the file and the command line give, by name."""
    tokens: list[str] = []
    values: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    single = _single_keys(command_line)
    if command_line and Path(command_line[0]).suffix in (".yaml", ".yml", ".json"):
        source = command_line.pop(0)
        tokens, values, sections = split_document(read_document(source), parser, source)
    _, unknown = parser.parse_known_args([*tokens, *command_line])
    _reject_unknown(unknown, parser)

    written = {**values, **_explicit([*tokens, *command_line], parser)}
    flags = {flag: bool(written.pop(flag)) for flag in MODE_FLAGS if written.get(flag) is not None}
    default = {} if any(flags.values()) else DEFAULT_ACTSWAP
    if "actswap" in written:
        _reject_two_configurations(sections, written["actswap"])
        sections = written["actswap"] = _document_of(written["actswap"], bool(single))
    else:
        sections = written["actswap"] = sections or deepcopy(default)
    _set_single_keys(sections, single)
    _settle_layer_count(written, sections)
    written["actswap"] = with_mode(written["actswap"], flags)
    return written


def _reject_two_configurations(sections: Mapping[str, Any], actswap: Any) -> None:
    """Raise if the file has sections and the command line names a configuration; off is none."""
    if sections and not is_off_word(actswap):
        found = f"`--actswap {actswap}` beside a file with {', '.join(f'`{name}`' for name in sections)}"
        hint = f"Leave one out, or change single keys: {_HOW_KEYS_ARE_WRITTEN}."
        problem = Problem("--actswap", "one configuration", found, hint)
        raise ConfigError([problem], "command line")


SingleKeys = list[tuple[list[str], str]]
"""Keys of the configuration that the command line sets by themselves: (section, key, ...), value in YAML."""

_SECTION = "|".join(name.replace("_", "[-_]") for name in LIBRARY_SECTIONS)
_SINGLE = re.compile(rf"(?:--)?(?:actswap\.)?((?:{_SECTION})\.[\w.-]+|log)(?:=(.*))?", re.DOTALL)
_HOW_KEYS_ARE_WRITTEN = "--swap_config.default_prefetch=2 (--SECTION.KEY=VALUE)"


def _single_keys(command_line: list[str]) -> SingleKeys:
    """Take ``--swap_config.default_prefetch=2`` (or ``actswap.swap_config...``) off the command line.

    As in other arguments, dashes in a name are underscores.
    """
    found: SingleKeys = []
    kept: list[str] = []
    words = iter(command_line)
    for word in words:
        match = _SINGLE.fullmatch(word)
        if match is None or not (word.startswith("--") or "=" in word):
            kept.append(word)
        else:
            value = next(words, "") if match[2] is None else match[2]
            found.append((match[1].replace("-", "_").split("."), value))
    command_line[:] = kept
    return found


def _set_single_keys(document: Any, single: SingleKeys) -> None:
    for path, text in single:
        if not isinstance(document, dict):
            expected = "a configuration in which to set a key"
            raise ConfigError(
                [Problem(f"--{'.'.join(path)}", expected, f"actswap: {document}")], "command line"
            )
        place = document
        for key in path[:-1]:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        place[path[-1]], duplicates = parse_yaml(text, f"--{'.'.join(path)}")
        if duplicates:
            raise ConfigError([problem for _, problem in duplicates], "command line")


def _document_of(actswap: Any, changed: bool) -> Any:
    """Return what ``--actswap`` names as the same document that the file of the recipe would hold.

    A word for off is ``None``; ``auto`` (unless keys of it are ``changed``) and a plan in a file stay as they
    are.
    """
    if isinstance(actswap, str) and actswap.lstrip().startswith("{"):
        return parse_yaml(actswap, "--actswap")[0]
    if not isinstance(actswap, str) or (actswap == "auto" and not changed):
        return actswap
    if is_off_word(actswap):
        return None
    if Path(actswap).suffix in (".yaml", ".yml", ".json") and Path(actswap).is_file():
        document = read_document(actswap)
        return actswap if "rows" in document else document
    loaded = load_config_or_plan(actswap)
    return loaded.to_dict() if isinstance(loaded, ActSwapConfig) else actswap


def _explicit(tokens: Sequence[str], parser: HfArgumentParser) -> dict[str, Any]:
    """Return the arguments that were given: all others get a default object that cannot be given."""
    unset = object()
    parser.set_defaults(**dict.fromkeys((one.name for one in _fields(parser).values()), unset))
    return {name: value for name, value in vars(parser.parse_args(tokens)).items() if value is not unset}


def derived_defaults(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults that depend on the arguments that were given."""
    defaults: dict[str, Any] = {"dataloader_pin_memory": torch.accelerator.is_available()}
    if not written.get("model_name_or_path"):
        defaults["learning_rate"] = LEARNING_RATE_FROM_SCRATCH
    if "save_steps" in written:
        defaults["save_strategy"] = "steps"
    if written.get("dataset", DEFAULT_DATASET) == DEFAULT_DATASET:
        defaults["dataset_config_name"] = DEFAULT_DATASET_CONFIG
    defaults["eval_before"] = written.get("do_eval", TRAINER_DEFAULTS["do_eval"])
    return defaults


def read_document(source: str) -> dict[str, Any]:
    """Read a YAML or JSON mapping from a file.

    Raises:
        ConfigError: bad syntax, or not a mapping.
        RecipeError: no such file.
    """
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"The configuration file {source} cannot be read: {error}.") from error
    document, duplicates = parse_yaml(text, source)
    problems = [problem for _, problem in duplicates]
    mapping: Any = {} if document is None else document
    if not isinstance(mapping, dict):
        problems.append(Problem("document", "a mapping", f"a {type(mapping).__name__}"))
    if problems:
        raise ConfigError(problems, source)
    return {str(key): value for key, value in mapping.items()}


def split_document(
    document: Mapping[str, Any], parser: HfArgumentParser, source: str
) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Divide a document into scalars, which argparse checks, other values, and sections of the library.

    Returns:
        Command line tokens for scalars; values for lists, mappings and null; the sections of hf_actswap.

    Raises:
        ConfigError: keys are unknown or values have an impossible shape; all of them are listed.
    """
    known = _fields(parser)
    tokens: list[str] = []
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    sections = {key: value for key, value in document.items() if _is_section(key, value, known)}
    for key, value in document.items():
        if key in sections:
            continue
        if key not in known:
            expected = "an argument of the recipe or of the Trainer, or a section of hf_actswap"
            problems.append(Problem(key, expected, "an unknown key", _hint(key, known)))
        elif value is None or isinstance(value, (list, dict)):
            if value is not None and not known[key].takes(type(value)):
                problems.append(Problem(key, "a single value", f"a {type(value).__name__}"))
            values[known[key].name] = value
        else:
            tokens.append(f"--{known[key].name}={str(value).lower() if isinstance(value, bool) else value}")
    if sections and "actswap" in document:
        found = f"`actswap` beside {', '.join(f'`{name}`' for name in sections)}"
        problems.append(Problem("actswap", "either `actswap` or the sections themselves", found))
    if problems:
        raise ConfigError(problems, source)
    return tokens, values, sections


@dataclass(frozen=True)
class _Argument:
    """Name and type hint of one field of the dataclasses."""

    name: str
    hint: Any

    def takes(self, kind: type) -> bool:
        """Whether the argument accepts a value of ``kind`` (list or dict)."""
        return any((get_origin(part) or part) is kind for part in _parts(self.hint))


def _parts(hint: Any) -> Iterator[Any]:
    yield hint
    if get_origin(hint) not in (list, dict):
        for part in get_args(hint):
            yield from _parts(part)


def _fields(parser: HfArgumentParser) -> dict[str, _Argument]:
    """Return the arguments by every name that a file may use, aliases included."""
    known: dict[str, _Argument] = {}
    for kind in parser.dataclass_types:
        hints = get_type_hints(kind)
        for one in (one for one in fields(kind) if one.init):
            argument = _Argument(one.name, hints[one.name])
            names = [one.name, *(alias.lstrip("-") for alias in one.metadata.get("aliases", ()))]
            known.update(dict.fromkeys(names, argument))
    return known


def _is_section(key: str, value: object, known: Mapping[str, _Argument]) -> bool:
    """Whether the library reads this key: its own section, or another section of a MindFormers file.

    Some names of MindFormers are arguments here too (``seed``, ``eval_dataset``); with a mapping as its value
    such a key is MindFormers' section.
    """
    if key in LIBRARY_SECTIONS:
        return True
    return key in FOREIGN_SECTIONS and (key not in known or isinstance(value, Mapping))


def _hint(name: str, known: Mapping[str, Any]) -> str:
    """Return a hint for an unknown name: the nearest one, else ``--help``, as there are too many to list."""
    head, _, below = name.partition(".")
    if head in LIBRARY_SECTIONS or (head == "actswap" and below):
        return f"A key of the configuration is written {_HOW_KEYS_ARE_WRITTEN}, or in the file."
    hint = unknown_key_hint(name, LIBRARY_SECTIONS, tuple(known), KEYS_OF_SECTIONS)
    return "`--help` lists the arguments." if hint.startswith("Valid") else hint


def _reject_unknown(unknown: Sequence[str], parser: HfArgumentParser) -> None:
    problems = []
    for token in unknown:
        name = token.lstrip("-").split("=")[0].replace("-", "_")
        if token.startswith("--"):
            hint = _hint(name, _fields(parser))
            problems.append(
                Problem(f"--{name}", "an argument of the recipe or of the Trainer", "an unknown one", hint)
            )
    if unknown and not problems:
        expected = "[CONFIG.yaml|CONFIG.json] [--argument value ...]"
        problems.append(Problem("command line", expected, f"`{' '.join(unknown)}` too much"))
    if problems:
        raise ConfigError(problems, "command line")


def _settle_layer_count(written: dict[str, Any], sections: Any) -> None:
    """Set ``num_layers`` from ``model.model_config.num_layers`` of the file, unless it is given itself."""
    named = [name for name in ("model_name_or_path", "config_name") if written.get(name)]
    ignored = [name for name in SIZE_OPTIONS if named and name in written]
    if ignored:
        logger.warning("%s decides the sizes of the model; ignored: %s.", named[0], ", ".join(ignored))
    model = sections.get("model") if isinstance(sections, Mapping) else None
    model_config = model.get("model_config") if isinstance(model, Mapping) else None
    layers = model_config.get("num_layers") if isinstance(model_config, Mapping) else None
    if named or not isinstance(layers, int) or isinstance(layers, bool):
        return
    written.setdefault("num_layers", layers)
    if written["num_layers"] != layers and written["actswap"] is sections:
        logger.warning("num_layers is %d, not the file's %d.", written["num_layers"], layers)
        written["actswap"] = deepcopy(dict(sections))
        written["actswap"]["model"]["model_config"]["num_layers"] = written["num_layers"]
