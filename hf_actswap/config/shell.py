"""Reads a shell script as far as flags need it: its commands, each as words, with variables put in.

Quotes, comments, arrays, redirections, text of here-documents, ``${N:-4}`` and ``$((32/4))`` are read as bash
reads them. Nothing is run: what only running tells (``$(nproc)``, ``$1``, a variable that nothing sets) stays
as it is written. Branches and loops are read one after the other.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_BRACKETS, _BRACES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", r"\{(?:[^{}]|\{[^{}]*\})*\}"
_STANDS_FOR = rf"\$(?:{_BRACKETS}|{_BRACES}|\w+|[@*#?!-])"
_PIECE = re.compile(
    rf"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|{_STANDS_FOR}|`[^`]*`|[^\s;|&<>()]""",
    re.DOTALL,
)
_IN_QUOTES = re.compile(rf"(\\.|{_STANDS_FOR})", re.DOTALL)
_REDIRECTION = re.compile(r"&>>?|(?:<<<|<<-?|>>|>\||[<>])&?")
_HERE = re.compile(r"<<-?\s*['\"\\]?(\w+)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?(\+?)=", re.DOTALL)
_PARAMETER = re.compile(r"(\w+|[@*#?!-])(?:\[[^]]*\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)\}?|([A-Za-z_]\w*)")

_BEFORE = frozenset(("then", "do", "else", "if", "elif", "while", "until", "{", "}", "!", "time"))
_DECLARES = frozenset(("export", "local", "declare", "readonly", "typeset"))
_RUNS_NOTHING = re.compile(
    r"echo|printf|cat|grep|sed|awk|test|\[\[?|\]\]|read|logger|mkdir|cp|mv|rm|cd|set|exit|return|source|\.|:|true"
    r"|shift|for|case|esac|fi|done|function|unset|ulimit|module|conda|pip"
)
_CUT = "\0"
_DEPTH = 4  # a command in the text of another, as in bash -c "..."


@dataclass(frozen=True)
class Word:
    """A word of a command; ``assumed``: what was taken for granted to read it."""

    text: str
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Script:
    """The commands of a script, and texts that are given to no command: what it prints, unused variables."""

    commands: Sequence[Sequence[Word]]
    unused: Sequence[str]


def read_script(text: str) -> Script:
    """Read a shell script, or a command line."""
    return _Shell().read(text)


@dataclass
class _Value:
    """Words of a variable: one, or those of an array."""

    words: list[str]
    assumed: tuple[str, ...] = ()


@dataclass
class _Shell:
    variables: dict[str, _Value] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    commands: list[list[Word]] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    runs: bool = False

    def read(self, text: str) -> Script:
        self._code(text, 0)
        waiting = {name: value for name, value in self.variables.items() if name not in self.used}
        if not self.runs:  # a file of variables, for another script
            for value in waiting.values():
                words = " ".join(value.words).split()
                self.commands.append([Word(word, value.assumed) for word in words])
            waiting = {}
        return Script(self.commands, self.printed + [" ".join(value.words) for value in waiting.values()])

    def _code(self, text: str, depth: int) -> None:
        for raw in _raw_commands(text):
            self._command(raw, depth)

    def _command(self, raw: list[_Raw], depth: int) -> None:
        words = list(raw)
        while words and words[0].text in _BEFORE:
            words.pop(0)
        declares = bool(words) and words[0].text in _DECLARES
        rest: list[_Raw] = []
        for word in words[declares:]:
            if (declares or not rest) and (found := _ASSIGNMENT.match(word.text)):
                self._assign(found[1], bool(found[2]), word, found.end())
            elif not declares:
                rest.append(word)
        if rest and _RUNS_NOTHING.fullmatch(rest[0].text):
            self.printed.append(" ".join(word.text for word in rest))
        elif rest:
            made = [one for word in rest for one in self._words(word)]
            self.runs |= len(made) > 1 and not made[0].text.startswith("-")
            self._add(made, depth)

    def _add(self, words: list[Word], depth: int) -> None:
        """Note a command; a word that is a command line itself (``bash -c "..."``) is one of its own."""
        command, value = [], False
        for word in words:
            inner = " --" in f" {word.text}" and len(word.text.split()) > 1
            if inner and depth < _DEPTH and (not value or word.text.lstrip().startswith("--")):
                self._code(word.text, depth + 1)
            else:
                command.append(word)
            value = word.text.startswith("--") and "=" not in word.text
        self.commands.append(command)

    def _assign(self, name: str, more: bool, word: _Raw, start: int) -> None:
        before = self.variables.get(name)
        text = word.text[start:]
        if word.array is None:
            value, assumed = self._expanded(text, split=False)
            words = [value.replace(_CUT, " ")]
        else:
            made = [one for item in word.array for one in self._words(item)]
            words, assumed = [one.text for one in made], tuple(note for one in made for note in one.assumed)
        if more and before is not None:
            words = before.words + words if word.array is not None else ["".join([*before.words, *words])]
            assumed = before.assumed + assumed
        elif before is not None and before.words != words and not re.search(rf"\$\{{?{name}\b", text):
            assumed += (f"{name} is set more than once; the last is taken",)
        self.variables[name] = _Value(words, tuple(dict.fromkeys(assumed)))

    def _words(self, word: _Raw) -> list[Word]:
        text, assumed = self._expanded(word.text, split=True)
        return [Word(part, assumed) for part in text.split(_CUT) if part not in ("", "$@", "$*")]

    def _expanded(self, text: str, *, split: bool) -> tuple[str, tuple[str, ...]]:
        """Return a word with variables put in; `_CUT` stands where it is cut into several."""
        self.assumed, outer = [], self.assumed
        made = self._filled(text, split)
        self.assumed, assumed = outer, tuple(dict.fromkeys(self.assumed))
        return made, assumed

    def _filled(self, text: str, split: bool) -> str:
        made = []
        for piece in _pieces(text):
            if piece[0] == "\\" and len(piece) == 2:
                made.append(piece[1])
            elif piece[0] == "'" and len(piece) > 1:
                made.append(piece[1:-1])
            elif piece[0] == '"' and len(piece) > 1:
                made.append(self._quoted(piece[1:-1]))
            elif piece[0] == "$" and len(piece) > 1:
                found = self._value(piece, quoted=False)
                made.append(re.sub(r"\s+", _CUT, found) if split and found != piece else found)
            else:
                made.append(piece)
        return "".join(made)

    def _quoted(self, text: str) -> str:
        made = []
        for part in _IN_QUOTES.split(text):
            if part.startswith("$") and len(part) > 1:
                made.append(self._value(part, quoted=True))
            else:
                made.append(re.sub(r"\\([\"\\$`])", r"\1", part))
        return "".join(made)

    def _value(self, piece: str, *, quoted: bool) -> str:
        """Return what a ``$...`` stands for; what is not known stays as it is written."""
        if piece.startswith("$(("):
            result = self._calculated(piece[3:-2])
            return piece if result is None else str(result)
        found = _PARAMETER.fullmatch(piece[2:-1] if piece.startswith("${") else piece[1:])
        if found is None or piece.startswith("$("):
            return piece
        name, how, other = found[1], (found[2] or "").lstrip(":"), found[3] or ""
        value = self.variables.get(name)
        self.used.add(name)
        if value is not None and (any(value.words) or found[2] not in (":-", ":=")):
            self.assumed += value.assumed
            if how == "+":
                return self._filled(other, split=False)
            return (_CUT if quoted and "[@]" in piece else " ").join(value.words)
        if how in ("-", "="):
            default = self._filled(other, split=False)
            self.assumed.append(f"nothing here sets ${name}; its default is taken ({default or 'empty'})")
            if how == "=":
                self.variables[name] = _Value([default], tuple(self.assumed))
            return default
        return "" if how == "+" or value is not None else piece

    def _calculated(self, text: str) -> int | None:
        def number(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            self.used.add(name)
            value = self.variables.get(name)
            self.assumed += value.assumed if value is not None else ()
            return "".join(value.words) if value is not None else found[0]

        text = re.sub(r"\$\{[^}]*\}", lambda found: self._value(found[0], quoted=True), text)
        return calculated(_NAME.sub(number, text))


@dataclass(frozen=True)
class _Raw:
    """A word as written, or the words of the array that it sets."""

    text: str
    array: tuple[_Raw, ...] | None = None


def _pieces(text: str) -> Iterator[str]:
    """Yield quoted texts, ``$...`` and single characters of a word."""
    at = 0
    while at < len(text):
        found = _PIECE.match(text, at)
        piece = found[0] if found else text[at]
        yield piece
        at += len(piece)


def _raw_commands(text: str) -> Iterator[list[_Raw]]:
    """Yield the words of each command, as they are written."""
    lines = [line for line in text.replace("\r\n", "\n").split("\n") if not line.lstrip().startswith("#")]
    code = _without_texts("\n".join(lines).replace("\\\n", " "))
    at = 0
    while at < len(code):
        words, at = _raw_words(code, at)
        if words:
            yield words


def _without_texts(code: str) -> str:
    """Leave out the text of here-documents that ``cat`` and ``tee`` write; others are code."""
    kept, end = [], ""
    for line in code.split("\n"):
        if end:
            end = "" if line.strip() == end else end
            continue
        kept.append(line)
        found = _HERE.search(line)
        if found and re.search(r"\b(cat|tee)\b", line):
            end = found[1]
    return "\n".join(kept)


def _raw_words(code: str, at: int, *, array: bool = False) -> tuple[list[_Raw], int]:
    """Return the words up to the end of a command (of an array: up to its bracket), and where it ends."""
    words: list[_Raw] = []
    while at < len(code):
        if code[at].isspace() and (array or code[at] != "\n"):
            at += 1
        elif code[at] == "#":
            end = code.find("\n", at)
            at = end if end >= 0 else len(code)
        elif not array and (found := _REDIRECTION.match(code, at)):
            if words and words[-1].text.isdigit() and code[at - 1].isdigit():
                words.pop()  # of 2>
            at = _end_of_word(code, _after_spaces(code, found.end()))
        elif code[at] in "\n;|&()":
            return words, at + 1
        else:
            end = _end_of_word(code, at)
            text = code[at:end]
            at = end
            if code[at : at + 1] == "(" and _ASSIGNMENT.fullmatch(text):
                items, at = _raw_words(code, at + 1, array=True)
                words.append(_Raw(text, tuple(items)))
            else:
                words.append(_Raw(text))
    return words, at


def _after_spaces(code: str, at: int) -> int:
    while at < len(code) and code[at] in " \t":
        at += 1
    return at


def _end_of_word(code: str, at: int) -> int:
    while at < len(code) and (found := _PIECE.match(code, at)):
        at = found.end()
    return at


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculated(text: str) -> int | None:
    """Return the result of whole numbers with ``+ - * / %`` and brackets; ``None`` if it is anything else."""
    try:
        return _result(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError, RecursionError):
        return None


def _result(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.BinOp(left, kind, right):
            return _OPERATORS[type(kind)](_result(left), _result(right))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_result(inner)
    raise ValueError(node)
