"""Op paths: one regular expression per level below a decoder layer.

MindFormers separates levels by the two characters backslash and dot, because a plain dot belongs to
the expression of a level. Users write plain dots all the same (``attention.flash_attention``), and in
the reference such a path silently matches nothing; here it means what they meant.
"""

from __future__ import annotations

import re
import warnings

from .reader import show

_REFERENCE_SEPARATOR = "\\."
_QUANTIFIERS = frozenset("*+?{")


def split_op_path(text: str) -> tuple[str, ...]:
    r"""Split an op path into its segments, each a regular expression for one level.

    If ``text`` contains the two characters ``\.``, they alone separate (the rule of the reference).
    Otherwise a plain ``.`` separates, unless a quantifier (``*``, ``+``, ``?``, ``{``) follows it or it
    stands inside ``[...]``: there it belongs to the expression.

    Args:
        text: what the user wrote, e.g. ``'attention\.flash_attention'`` or ``mlp.act_fn``.

    Returns:
        The segments in order; one or more, and some may be empty if two separators meet.
    """
    if _REFERENCE_SEPARATOR in text:
        return tuple(text.split(_REFERENCE_SEPARATOR))
    segments: list[str] = []
    start = index = 0
    while index < len(text):
        char = text[index]
        if char == "\\":
            index += 2
        elif char == "[":
            index = _end_of_class(text, index)
        else:
            if char == "." and text[index + 1 : index + 2] not in _QUANTIFIERS:
                segments.append(text[start:index])
                start = index + 1
            index += 1
    segments.append(text[start:])
    return tuple(segments)


def op_path_fault(text: str) -> str:
    """Say what is wrong with an op path; the empty string if nothing is.

    Every segment must be a regular expression that compiles and none may be empty.
    """
    segments = split_op_path(text)
    for segment in segments:
        if not segment:
            return f"{show(text)}, which has an empty level" if text else "an empty text"
        try:
            with warnings.catch_warnings():
                # Python warns of classes that it may read differently one day; the verdict is about today.
                warnings.simplefilter("ignore", FutureWarning)
                re.compile(segment)
        except (re.error, OverflowError, RecursionError) as error:
            inside = f" in level {show(segment)}" if len(segments) > 1 else ""
            return f"{show(text)}, which is malformed{inside}: {' '.join(str(error).split())}"
    return ""


def _end_of_class(text: str, start: int) -> int:
    """Index after the ``]`` that closes the class opened at ``start``; the end of ``text`` if none does."""
    index = start + 1
    if text[index : index + 1] == "^":
        index += 1
    if text[index : index + 1] == "]":
        # A bracket right after the opening one is a member of the class, not its end.
        index += 1
    while index < len(text):
        if text[index] == "\\":
            index += 2
        elif text[index] == "]":
            return index + 1
        else:
            index += 1
    return len(text)
