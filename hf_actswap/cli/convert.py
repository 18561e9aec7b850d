"""``hf-actswap convert``: a configuration from the flags or settings of another program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from ..config import load_config
from ..config.flags import Converted, Flags, convert_flags, flags_of_arguments, read_flags
from ..errors import ConfigError, Problem
from . import options
from .output import Answer, answer


def convert(
    source: Annotated[
        list[str],
        typer.Argument(
            help="A script or file of settings (.sh, .json, .yaml), or after -- the flags themselves.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the YAML to this file.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    answer("convert", as_json, lambda: _converted(source, out))


def _converted(source: list[str], out: Path | None) -> Answer:
    found = convert_flags(_flags(source))
    load_config({key: dict(value) for key, value in found.document.items()})
    if out is not None:
        out.write_text(found.to_yaml(), encoding="utf-8")
    document = {
        "config": found.document,
        "meaning": found.lines,
        "not_converted": found.without,
        "assumed": found.assumed,
        "other_flags": found.unknown,
    }
    return Answer(document, _shown(found, out))


def _flags(source: list[str]) -> Flags:
    if source[0].startswith("-"):
        return flags_of_arguments(source)
    if len(source) > 1:
        hint = "Write -- before the flags of a command line."
        raise ConfigError([Problem("SOURCE", "one file, or flags", " ".join(source)[:60], hint)])
    try:
        text = Path(source[0]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("SOURCE", "a file that can be read", str(error))]) from None
    return read_flags(text, source[0])


def _shown(found: Converted, out: Path | None) -> Iterator[RenderableType]:
    if not found.document:
        yield "# Nothing here sets what is kept, swapped or recomputed."
    if out is None or not found.document:
        yield found.to_yaml().rstrip()
    else:
        yield f"Written: {out}. `hf-actswap check {out} --model M` says what it does to a model."
    if found.unknown:
        yield f"# Flags that have nothing to do with it: {found.unknown}."
