"""The embedded corpus: English prose that every Python installation carries; no file, no network.

Two sources of the running interpreter are read, and never copied into the repository (they stay under the
licence of Python itself):

* ``pydoc_data.topics``, the chapters of the language reference behind ``help()``;
* the docstrings of well documented standard modules, taken from their source text.

Tables, code and grammar are dropped, paragraphs are unwrapped, and a paragraph that occurs twice is kept
once, so that nothing of the evaluation part was seen in training. The same interpreter always gives the same
text; another Python version gives a slightly different one.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path

# fmt: off
DOCSTRING_MODULES = (
    "abc", "argparse", "ast", "asyncio/base_events", "asyncio/events", "asyncio/streams",
    "asyncio/tasks", "base64", "bdb", "bisect", "calendar", "codecs", "collections",
    "concurrent/futures/_base", "configparser", "contextlib", "copy", "csv", "ctypes", "dataclasses",
    "datetime", "_pydatetime", "decimal", "_pydecimal", "difflib", "dis", "doctest", "email/message",
    "enum", "filecmp", "fractions", "ftplib", "functools", "getopt", "gettext", "glob", "graphlib",
    "hashlib", "heapq", "html/parser", "http/client", "http/server", "http/cookiejar", "imaplib",
    "inspect", "io", "_pyio", "ipaddress", "json", "locale", "logging", "logging/config",
    "logging/handlers", "mailbox", "mimetypes", "multiprocessing/pool", "multiprocessing/managers",
    "numbers", "operator", "optparse", "os", "pathlib", "pathlib/_local", "pdb", "pickle",
    "pickletools", "platform", "plistlib", "pprint", "profile", "pydoc", "queue", "random", "re",
    "sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver",
    "sqlite3/dbapi2", "ssl", "statistics", "string", "subprocess", "symtable", "sysconfig", "tarfile",
    "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace", "traceback", "turtle", "typing",
    "unittest/case", "unittest/loader", "unittest/mock", "urllib/parse", "urllib/request", "uuid",
    "warnings", "wave", "weakref", "webbrowser", "xml/dom/minidom", "xml/etree/ElementTree",
    "xmlrpc/client", "zipfile", "zoneinfo",
)
# fmt: on
"""Paths below the standard library, without suffix; a version that lacks one is served without it."""

EVALUATION_SHARE = 10
"""One document in so many, chosen by a checksum of its name, is held out."""

MIN_WORDS = 8
MIN_LETTER_SHARE = 0.9
_NOT_PROSE = (">>>", "::=", "...\n", "==", "--+", "->")


@dataclass(frozen=True)
class Corpus:
    """Documents of prose; each is a string of paragraphs, one a line.

    Attributes:
        train: documents to learn from.
        evaluation: held-out documents, sharing no paragraph with ``train``.
    """

    train: tuple[str, ...]
    evaluation: tuple[str, ...]


def is_prose(paragraph: str) -> bool:
    """Tell a paragraph of sentences from code, tables, headings and grammar."""
    if any(mark in paragraph for mark in _NOT_PROSE) or len(paragraph.split()) < MIN_WORDS:
        return False
    letters = sum(character.isalpha() or character in " ,.'\"" for character in paragraph)
    return letters >= MIN_LETTER_SHARE * len(paragraph) and paragraph.rstrip("\"')*")[-1:] in tuple(".:!?;")


def prose_of(text: str) -> list[str]:
    """Split ``text`` at blank lines, unwrap each paragraph to one line, and return those that are prose."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [paragraph for paragraph in paragraphs if is_prose(paragraph)]


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics  # left out of some slimmed-down Python installations
    except ImportError:
        return
    for name in sorted(topics):
        yield f"topic {name}", topics[name]


def _docstrings(names: Iterable[str] = DOCSTRING_MODULES) -> Iterator[tuple[str, str]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in names:
        candidates = (library / f"{name}.py", library / name / "__init__.py")
        source = next((path for path in candidates if path.is_file()), None)
        if source is None:
            continue
        tree = ast.parse(source.read_text(encoding="utf-8"))
        owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docs = (ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, owners))
        yield f"module {name}", "\n\n".join(cleandoc(doc) for doc in docs if doc)


def load_corpus() -> Corpus:
    """Return the embedded corpus, the same in every call and process of one Python installation.

    Raises:
        RuntimeError: this Python carries neither ``pydoc_data`` nor the sources of its standard library.
    """
    seen: set[str] = set()
    parts: tuple[list[str], list[str]] = ([], [])
    for name, text in (*_topics(), *_docstrings()):
        fresh = list(dict.fromkeys(paragraph for paragraph in prose_of(text) if paragraph not in seen))
        seen.update(fresh)
        if fresh:
            held_out = zlib.crc32(name.encode()) % EVALUATION_SHARE == 0
            parts[held_out].append("\n".join(fresh) + "\n")
    if not parts[0] or not parts[1]:
        raise RuntimeError(
            "This Python has neither `pydoc_data` nor library sources to build the sample corpus from; "
            "pass a text of your own: --dataset PATH."
        )
    return Corpus(train=tuple(parts[0]), evaluation=tuple(parts[1]))
