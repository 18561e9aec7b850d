"""Op paths: one regular expression per level below a decoder layer.

MindFormers separates levels by the two characters backslash and dot, because a plain dot belongs to
the expression of a level. Users write plain dots all the same (``attention.flash_attention``). In
MindFormers such a path silently matches nothing; here a plain dot separates levels too.
"""

from __future__ import annotations

import re
import warnings

from .validation import show

_REFERENCE_SEPARATOR = "\\."
_QUANTIFIERS = frozenset("*+?{")
_MAX_CHARACTERS = 1000

# A configuration may be anybody's, and Python's matcher can take years over a few characters. What is left
# below these limits ends in time on names as short as those of modules.
_MAX_REPEATS, _MAX_GROUPS, _MAX_ALTERNATIVES = 6, 4, 32
_ONE_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def split_op_path(text: str) -> tuple[str, ...]:
    r"""Split an op path into its segments, each a regular expression for one level.

    If ``text`` contains the two characters ``\.``, they alone separate (the rule of the reference).
    Otherwise a plain ``.`` separates, unless a quantifier (``*``, ``+``, ``?``, ``{``) follows it or it
    is inside ``[...]``: there it belongs to the expression.

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


def _end_of_class(text: str, start: int) -> int:
    """Return the index after the ``]`` that closes the class opened at ``start``; else that of the end."""
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
