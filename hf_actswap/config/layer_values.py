"""The values that name layers and ops: layer indices, op paths, tables over the pipeline, selections of ops.

A list of layers means two things in ``recompute_config``. Without swap it counts layers of each pipeline
stage; with ``swap_config.swap`` true it holds global layer indices. `Around` tells the validators which.

An op path has one regular expression per level below a decoder layer. MindFormers separates levels by the
two characters backslash and dot, because a plain dot belongs to the expression of a level. Users write plain
dots all the same (``attention.flash_attention``). In MindFormers such a path silently matches nothing; here a
plain dot separates levels too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)

from .validation import (
    AnyInt,
    Expected,
    Fault,
    Path,
    Whole,
    faults_of,
    is_off_word,
    rejected,
    show,
    tuple_hint,
)

EXPECTED_LAYERS = "true, false or a flat list of layer indices"
EXPECTED_OP_NAME = "an op path or a list of op paths"
EXPECTED_COUNTS = "true, false, a list of layer counts per stage, or a table per (interleave, stage)"
EXPECTED_INDICES = "true, false or a flat list of layer indices (swap is on)"
EXPECTED_OFFSET = "a whole number, a list of them per stage, or a table per (interleave, stage)"

_REFERENCE_SEPARATOR = "\\."
# What keeps its dots (an escape; a class, also one that nothing closes), or a dot without a quantifier.
_PLAIN_DOT = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|(?P<dot>\.(?![*+?{]))", re.DOTALL)
_MAX_CHARACTERS = 1000

# A configuration may be anybody's, and Python's matcher can take years over a few characters. What is left
# below these limits ends in time on names as short as those of modules.
_MAX_REPEATS, _MAX_GROUPS, _MAX_ALTERNATIVES = 6, 4, 32
_ONE_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)

_SINGLE = Annotated[bool, Strict()]


def split_op_path(text: str) -> tuple[str, ...]:
    r"""Split an op path into its segments, each a regular expression for one level.

    If ``text`` contains the two characters ``\.``, they alone separate (the rule of the reference).
    Otherwise a plain ``.`` separates, unless a quantifier (``*``, ``+``, ``?``, ``{``) follows it or it
    is inside ``[...]``: there it belongs to the expression. Segments are empty where separators meet.
    """
    if _REFERENCE_SEPARATOR in text:
        return tuple(text.split(_REFERENCE_SEPARATOR))
    dots = [match.start() for match in _PLAIN_DOT.finditer(text) if match["dot"]]
    starts, ends = [0, *(dot + 1 for dot in dots)], [*dots, len(text)]
    return tuple(text[start:end] for start, end in zip(starts, ends, strict=True))


def op_path_fault(text: str) -> str:
    """Return what is wrong with an op path; the empty string if nothing is.

    Every segment must be a regular expression that compiles, none may be empty, and none may ask for more
    work than a name is worth: a repeated group, flags, or more than a few repeats, groups and alternatives.
    """
    if len(text) > _MAX_CHARACTERS:
        return f"{show(text)}, which has {len(text)} characters (at most {_MAX_CHARACTERS})"
    segments = split_op_path(text)
    for segment in segments:
        if not segment:
            return f"{show(text)}, which has an empty level" if text else "an empty text"
        costly = _costly(segment)
        if costly:
            return f"{show(text)}, which has {costly}"
        try:
            with warnings.catch_warnings():
                # Python warns of classes that it may read differently one day; the verdict is about today.
                warnings.simplefilter("ignore", FutureWarning)
                re.compile(segment)
        except (re.error, OverflowError, RecursionError) as error:
            inside = f" in level {show(segment)}" if len(segments) > 1 else ""
            return f"{show(text)}, which is malformed{inside}: {' '.join(str(error).split())}"
    return ""


def _costly(segment: str) -> str:
    """Return what in a level could take long to compile or to match; the empty string if nothing can."""
    bare = _ONE_CHARACTER.sub("c", segment)
    if re.search(r"\)[*+{]", bare):
        return "a repeated group"
    if re.search(r"\(\?[^:=!]", bare):
        return "flags, a named group or a condition"
    for signs, limit in (("*+?{", _MAX_REPEATS), ("(", _MAX_GROUPS), ("|", _MAX_ALTERNATIVES)):
        if sum(bare.replace("(?", "(").count(sign) for sign in signs) > limit:
            return f"more than {limit} {' '.join(signs)} in a level"
    return ""


@dataclass(frozen=True)
class TableShape:
    """The pipeline that the document states: ``pipeline_stage`` columns and ``pp_interleave_num`` rows."""

    pipeline_stage: int
    pp_interleave_num: int


@dataclass(frozen=True)
class Around:
    """What the rest of the document says about lists of layers.

    Args:
        swap: whether lists hold layer indices.
        shape: shape of the pipeline that the document states; ``None``: it states none, or it is unreadable.
    """

    swap: bool = False
    shape: TableShape | None = None


def is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def _flat(value: Any) -> Any:
    if is_list(value) and any(is_list(item) for item in value):
        raise rejected(
            value, ((), EXPECTED_LAYERS, show(value), "Layers are global indices in one flat list.")
        )
    # pydantic would take a set too, which has no order.
    return None if isinstance(value, Set) else False if is_off_word(value) else value


def _distinct(layers: Any) -> Any:
    if isinstance(layers, bool):
        return layers
    first_places = {index: place for place, index in reversed(list(enumerate(layers)))}
    repeated = [place for place, index in enumerate(layers) if first_places[index] != place]
    if repeated:
        faults = (((place,), "each layer once", f"layer {layers[place]} again", "") for place in repeated)
        raise rejected(layers, *faults)
    return layers


def _layers_hint(value: Any) -> str:
    return f"Write [{value}]." if type(value) is int and 0 <= value < 2**63 else ""


def _index_hint(value: Any) -> str:
    # Python counts true as 1: the reference takes [true] for layer 1.
    return f"As a number it would be layer {int(value)}." if isinstance(value, bool) else ""


def _op_path(text: str) -> str:
    # No name of an op holds a comma; in an expression it stands in {2,3}.
    if "{" not in text and (hint := tuple_hint(text)):
        raise rejected(text, ((), EXPECTED_OP_NAME, show(text), hint))
    fault = op_path_fault(text)
    if fault:
        hint = r"Levels are separated by \. (in single quotes) or by a plain dot."
        raise rejected(text, ((), "an op path (a regular expression per level)", fault, hint))
    return text


LayerIndex = Annotated[
    AnyInt, Field(ge=0), Expected("a layer index (a whole number, at least 0)", _index_hint)
]
Layers = Annotated[
    _SINGLE | tuple[LayerIndex, ...],
    Expected(EXPECTED_LAYERS, _layers_hint),
    AfterValidator(_distinct),
    BeforeValidator(_flat),
]
"""``True``: all layers; ``False``: none; else global layer indices."""

OpPath = Annotated[str, Strict(), AfterValidator(_op_path), Expected("an op path (a text)")]

_LAYERS: TypeAdapter[Any] = TypeAdapter(Layers)
_OP_PATH: TypeAdapter[Any] = TypeAdapter(OpPath)
_OP_PATHS: TypeAdapter[Any] = TypeAdapter(tuple[OpPath, ...])


def _op_names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_OP_PATH.validate_python(value),)
    if is_list(value) and value:
        names: tuple[str, ...] = _OP_PATHS.validate_python(value)
        return names
    raise rejected(value, ((), EXPECTED_OP_NAME, "an empty list" if is_list(value) else show(value), ""))


OpNames = Annotated[tuple[str, ...], PlainValidator(_op_names, json_schema_input_type=str | list[str])]
"""One op path, or a list of them."""

_COUNT = "a number of layers (at least 0), true or false"
_Count = _SINGLE | Annotated[AnyInt, Field(ge=0)]
_COUNTS: TypeAdapter[Any] = TypeAdapter(tuple[Annotated[_Count, Expected(_COUNT)], ...])
_WHOLE: TypeAdapter[Any] = TypeAdapter(Whole)
_WHOLES: TypeAdapter[Any] = TypeAdapter(tuple[Whole, ...])


def _text_hint(value: Any) -> str:
    return "Op paths go to select_recompute." if isinstance(value, str) else ""


_COUNTS_OF_RECOMPUTE: TypeAdapter[Any] = TypeAdapter(
    tuple[Annotated[_Count, Expected(_COUNT, _text_hint)], ...]
)


def _counts(value: Any, info: ValidationInfo, items: TypeAdapter[Any] = _COUNTS) -> Any:
    """Return a bool, a list or (without swap) a table."""
    around: Around = info.context or Around()
    if isinstance(value, bool) or is_off_word(value):
        return value is True
    if not is_list(value):
        raise rejected(value, ((), EXPECTED_INDICES if around.swap else EXPECTED_COUNTS, show(value), ""))
    if not around.swap:
        return _table(value, items, around.shape, bool_rows=True, may_be_short=True)
    if any(is_list(one) for one in value):
        hint = "With swap on, layers are global indices in one flat list."
        raise rejected(value, ((), EXPECTED_INDICES, show(value), hint))
    return _LAYERS.validate_python(value)


def _selection(value: Any, info: ValidationInfo) -> Any:
    """Return what `_counts` returns for the default ops, a list of op paths, or a mapping of op paths."""
    around: Around = info.context or Around()
    ops = "a mapping of op paths" if around.swap else "a list or mapping of op paths"
    if isinstance(value, Mapping):
        return _op_mapping(value, info)
    texts = [item for item in value if isinstance(item, str)] if is_list(value) else []
    if texts and around.swap:
        hint = f"Write a mapping: {show({op: True for op in texts})}."
        raise rejected(value, ((), f"{EXPECTED_INDICES}; or {ops}", show(value), hint))
    if texts:
        return _OP_PATHS.validate_python(value)
    if isinstance(value, bool) or is_list(value):
        return _counts(value, info)
    expected = EXPECTED_INDICES if around.swap else EXPECTED_COUNTS
    raise rejected(value, ((), f"{expected}; or {ops}", show(value), ""))


def _exclusion(value: Any, info: ValidationInfo) -> Any:
    """Return a selection that names its ops: there are no default ops to exclude."""
    if value is True or (is_list(value) and value and not any(isinstance(item, str) for item in value)):
        around: Around = info.context or Around()
        ops = "a mapping of op paths" if around.swap else "a list or mapping of op paths"
        hint = "It names no op, and an exclude key has no default ops."
        raise rejected(value, ((), f"false or {ops}", show(value), hint))
    return _selection(value, info)


def _op_mapping(value: Mapping[Any, Any], info: ValidationInfo) -> dict[str, Any]:
    found: dict[str, Any] = {}
    faults: list[Fault] = []
    for op_path, layers in value.items():
        if not isinstance(op_path, str):
            faults.append(((), "op paths (texts) as keys", f"the key {show(op_path)}", ""))
            continue
        found[op_path] = _collecting(faults, (op_path,), _counts, layers, info)
        _collecting(faults, (op_path,), _OP_PATH.validate_python, op_path)
    if faults:
        raise rejected(value, *faults)
    return found


def _collecting(faults: list[Fault], path: Path, validate: Callable[..., Any], *values: Any) -> Any:
    """Return what a validator makes of a value at ``path``; what it rejects is added to ``faults``."""
    try:
        return validate(*values)
    except ValidationError as error:
        faults += [((*path, *at), *words) for at, *words in faults_of(error)]  # type: ignore[misc]
        return ()


def _recomputed(value: Any, info: ValidationInfo) -> Any:
    return _counts(value, info, _COUNTS_OF_RECOMPUTE)


def _offset(value: Any, info: ValidationInfo) -> Any:
    if is_list(value):
        around: Around = info.context or Around()
        return _table(value, _WHOLES, around.shape, bool_rows=False, may_be_short=False)
    try:
        return _WHOLE.validate_python(value)
    except ValidationError:
        raise rejected(value, ((), EXPECTED_OFFSET, show(value), "")) from None


_Counts = bool | tuple[int | bool, ...] | tuple[tuple[int | bool, ...] | bool, ...]
_WrittenCounts = bool | list[int | bool | list[int | bool]]
_WrittenOps = _WrittenCounts | list[str] | dict[str, _WrittenCounts]

LayerCounts = Annotated[_Counts, PlainValidator(_counts, json_schema_input_type=_WrittenCounts)]
"""A bool; without swap: layers per stage, or a table per (interleave, stage); with swap: layer indices."""

RecomputedLayers = Annotated[_Counts, PlainValidator(_recomputed, json_schema_input_type=_WrittenCounts)]

OpSelection = Annotated[
    _Counts | tuple[str, ...] | dict[str, _Counts],
    PlainValidator(_selection, json_schema_input_type=_WrittenOps),
]
"""`LayerCounts` for the default ops; or op paths (all layers); or op path -> `LayerCounts`."""

OpExclusion = Annotated[
    _Counts | tuple[str, ...] | dict[str, _Counts],
    PlainValidator(_exclusion, json_schema_input_type=Literal[False] | list[str] | dict[str, _WrittenCounts]),
]
"""`OpSelection` that names its ops."""

Offset = Annotated[
    int | tuple[int, ...] | tuple[tuple[int, ...], ...],
    PlainValidator(_offset, json_schema_input_type=int | list[int] | list[list[int]]),
]


def _table(
    value: Sequence[Any],
    items: TypeAdapter[Any],
    shape: TableShape | None,
    *,
    bool_rows: bool,
    may_be_short: bool,
) -> tuple[Any, ...]:
    """Return a list per stage, or a table if any item is a list.

    ``shape``: that which the document states; ``None``: only the rows' equal length is checked.
    ``bool_rows``: whether a row of a table may be true or false. ``may_be_short``: whether the last stages
    may be left out.
    """
    faults: list[Fault] = []
    read: Sequence[Any]
    if any(is_list(one) for one in value):
        read = _rows(value, items, shape, bool_rows, faults)
    else:
        read = _collecting(faults, (), items.validate_python, value)
        count, stages = len(value), len(value) if shape is None else shape.pipeline_stage
        if count > stages or (count < stages and not may_be_short):
            amount = "at most " if may_be_short else ""
            expected = f"{amount}{_counted(stages, 'item')}, one per pipeline stage"
            faults.append(((), expected, str(count), _stage_hint(stages)))
    if faults:
        raise rejected(value, *faults)
    return tuple(read)


def _rows(
    rows: Sequence[Any],
    items: TypeAdapter[Any],
    shape: TableShape | None,
    bool_rows: bool,
    faults: list[Fault],
) -> list[Any]:
    if shape is not None and len(rows) != shape.pp_interleave_num:
        expected = f"{_counted(shape.pp_interleave_num, 'row')}, one per interleave"
        faults.append(((), expected, str(len(rows)), f"pp_interleave_num is {shape.pp_interleave_num}."))
    width = next(len(row) for row in rows if is_list(row)) if shape is None else shape.pipeline_stage
    read: list[Any] = []
    for index, row in enumerate(rows):
        if is_list(row):
            read.append(_collecting(faults, (index,), items.validate_python, row))
            if len(row) != width or not row:
                hint, expected = "", "rows of one length"
                if shape is not None:
                    hint, expected = _stage_hint(width), f"{_counted(width, 'item')}, one per pipeline stage"
                faults.append(((index,), expected, str(len(row)) if row else "an empty row", hint))
        elif bool_rows and isinstance(row, bool):
            read.append(row)
        else:
            or_bool = ", or true or false" if bool_rows else ""
            expected = f"a row (a list), because other items are lists{or_bool}"
            faults.append(((index,), expected, show(row), ""))
    return read


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _stage_hint(stages: int) -> str:
    return f"pipeline_stage is {stages}."
