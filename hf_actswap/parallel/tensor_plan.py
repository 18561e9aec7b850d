"""Reads how an unknown family is divided off the model's own ``base_model_tp_plan``, as data.

Hugging Face's plans name a style for each projection of a layer. Projections of one parent form a block; its
input is taken at the block itself, since a plan does not say which norm it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import Problem
from .families import FAMILIES, Block, Columns, Family

_LAYER = "layers.*."
_COLUMN, _ROW, _SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_ATTENTION_COLUMNS = {"q_proj": Columns.QUERY, "k_proj": Columns.KEY_VALUE, "v_proj": Columns.KEY_VALUE}


def family_of(config: Any, base: nn.Module) -> Family | list[Problem]:
    """Return how a decoder is divided, or what of its plan is not understood.

    Args:
        config: of the text model.
        base: the decoder without head.
    """
    known = FAMILIES.get(config.model_type)
    if known is not None:
        return known
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    styles = {path.removeprefix(_LAYER): style for path, style in plan.items() if path.startswith(_LAYER)}
    problems = list(_problems(config.model_type, styles))
    norms = [name for name, child in base.named_children() if "norm" in type(child).__name__.lower()]
    if len(norms) != 1:
        found = ", ".join(norms) or "none"
        problems.append(Problem(f"family {config.model_type}", "one norm behind the last layer", found))
    return problems or Family(tuple(_blocks(styles)), norms[0])


def _problems(model_type: str, styles: Mapping[str, str]) -> Iterator[Problem]:
    where = f"family {model_type}"
    if not styles:
        hint = f"Known families: {', '.join(FAMILIES)}."
        yield Problem(where, "a known family, or a model with a base_model_tp_plan", "neither", hint)
    for path, style in styles.items():
        if style not in (_COLUMN, _ROW, _SUMMED):
            expected = f"style {_COLUMN}, {_ROW} or {_SUMMED} in base_model_tp_plan"
            yield Problem(f"{where}, {path}", expected, style)
        elif "." not in path:
            yield Problem(f"{where}, {path}", "a module inside a block", "one of the layer itself")


def _blocks(styles: Mapping[str, str]) -> Iterator[Block]:
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in styles):
        inside = {
            path.removeprefix(f"{parent}."): style
            for path, style in styles.items()
            if path.rpartition(".")[0] == parent
        }
        names = {style: tuple(n for n, s in inside.items() if s == style) for style in set(inside.values())}
        columns = {name: _ATTENTION_COLUMNS.get(name, Columns.PLAIN) for name in names.get(_COLUMN, ())}
        is_attention = any(kind is not Columns.PLAIN for kind in columns.values())
        yield Block(parent, columns, names.get(_ROW, ()), None, names.get(_SUMMED, ()), is_attention)
