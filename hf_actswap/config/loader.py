"""`ActSwapConfig`, a whole document, and `load_config`, which reads one or names every error at once.

A document comes from text, a file, a folder or the Hub.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter

from ..errors import ConfigError, Problem, short_traceback
from .documents import read_text
from .hub import (
    CONFIG_FILE_NAME,
    PLAN_FORMAT,
    HubFile,
    HubOptions,
    PlanSource,
    fetch,
    publish,
    save,
    split_hub_id,
)
from .keys import (
    FOREIGN_SECTIONS,
    KEYS_OF_SECTIONS,
    MODE_FLAGS,
    OUR_SECTIONS,
    STACK_SECTIONS,
    ignored_key_note,
)
from .memory_section import check_fates, check_in_backward, check_weights, read_memory
from .schema import MemoryConfig, ParallelConfig, RecomputeConfig, StreamConfig, SwapConfig, TileConfig
from .sections import (
    MODEL_CONFIG,
    PIPELINE_INTERLEAVE,
    honoured_in_model,
    lookup,
    read_parallel,
    read_recompute,
    read_stream,
    read_swap,
    read_tiles,
    swap_is_unreadable,
)
from .validation import AtLeast1, Findings, Path, is_off_word, one_of, show
from .yaml_text import DOCUMENT_PATH, MAX_TEXT_BYTES, parse_yaml, to_dict, to_yaml

Log = Annotated[Literal["summary", "full", "reference"], one_of("summary", "full", "reference")]

_LOG: TypeAdapter[Any] = TypeAdapter(Log)
_NUM_LAYERS: TypeAdapter[Any] = TypeAdapter(AtLeast1)

AUTO = "auto"
"""Source of a configuration without keys: the planner chooses everything. (A file of this name: ``./auto``.)
"""

EXPECTED_SOURCE = f"a file, a folder that holds {CONFIG_FILE_NAME}, YAML or JSON text, or a Hub id (org/name)"
_EXPECTED_NAME = f"a file, a folder that holds {CONFIG_FILE_NAME}, or a Hub id (org/name)"
_FILE_ENDINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class ActSwapConfig:
    """A configuration: what a whole document says, with an attribute for each of its sections.

    Attributes:
        stacks: rules for stacks of layers beside the decoder's (an encoder, a vision tower). A key names a
            stack by words of its module path, in order; a value has ``swap_config`` and ``recompute_config``.
        num_layers: ``model.model_config.num_layers`` if the document states it; checked against the model.
        log: what a training run says. ``summary``: a few lines. ``full``: the plan as a table and all columns
            of statistics, and on disk the record for ``hf-actswap report`` and a log per rank.
            ``reference``: the same, with MindFormers' lines on the console too.
        notes: one line for each section or key that was accepted and has no meaning here, saying what
            happens to it. Not part of equality, and not written by `to_yaml`.
        source: the file, the Hub id with its commit (``org/name@commit``), or a short description, for
            messages. Not part of equality.
    """

    swap_config: SwapConfig = SwapConfig()  # noqa: RUF009 - it is frozen
    recompute_config: RecomputeConfig = RecomputeConfig()  # noqa: RUF009 - it is frozen
    parallel_config: ParallelConfig = ParallelConfig()  # noqa: RUF009 - it is frozen
    tile_config: TileConfig = TileConfig()  # noqa: RUF009 - it is frozen
    stream_config: StreamConfig = StreamConfig()  # noqa: RUF009 - it is frozen
    memory: MemoryConfig = MemoryConfig()  # noqa: RUF009 - it is frozen
    stacks: Mapping[str, ActSwapConfig] | None = None
    num_layers: int | None = field(
        default=None, metadata={DOCUMENT_PATH: ("model", "model_config", "num_layers")}
    )
    log: Log = "summary"
    notes: tuple[str, ...] = field(default=(), compare=False)
    source: str = field(default="", compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the document that loads to this configuration: plain values that differ from the default."""
        return to_dict(self)

    def to_yaml(self) -> str:
        """Return the same document as YAML text: ``load_config(config.to_yaml()) == config``."""
        return to_yaml(self)

    @classmethod
    @short_traceback
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
    ) -> ActSwapConfig:
        """Read a file, a folder that holds ``actswap_config.yaml``, or a repository of the Hub that does.

        Args:
            name_or_path: a path, or a Hub id ``org/name`` or ``org/name@revision``. A path that exists wins.
            revision: branch, tag or commit.
            token, cache_dir, local_files_only: as in `huggingface_hub.hf_hub_download`.

        Raises:
            ConfigError: with every problem of the document, or the reason why there is no document.
        """
        options = HubOptions(token, cache_dir, local_files_only)
        return _from_name(os.fsdecode(name_or_path), revision, options)

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        plan: PlanSource | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **push: Any,
    ) -> str | None:
        """Write ``actswap_config.yaml``, and a plan as ``plan.json``, into a folder.

        Args:
            folder: path of the folder, which is created if it does not exist.
            plan: a `MemoryPlan`, or the path of the file that the planner wrote.
            push_to_hub: whether the files are published too.
            repo_id: repository to publish to; ``None``: one of the user with the folder's name.
            push: further arguments of the method `push_to_hub`.

        Returns:
            The address of the commit, if the files are published.

        Raises:
            ConfigError: ``plan`` is no plan.
            OSError: the folder cannot be written, or there is no access to the Hub.
        """
        save(folder, self.to_yaml(), plan)
        if not push_to_hub:
            return None
        return self.push_to_hub(repo_id or os.path.basename(os.path.abspath(folder)), plan=plan, **push)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        plan: PlanSource | None = None,
        base_model: str | None = None,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Publish as ``actswap_config.yaml`` of a model repository, in one commit with plan and card.

        ``memory.plan_file`` is a path of this machine and is left out. The card (``README.md``) says what the
        plan was measured on; a card that this library did not write stays as it is.

        Args:
            repo_id: ``org/name``; created if it does not exist.
            plan: a `MemoryPlan`, or the path of the planner's file, which says what the plan was measured on.
            base_model: Hub id of the model, for the card.
            commit_message, commit_description, private, token, revision, create_pr: as in transformers'
                ``push_to_hub``.

        Returns:
            The address of the commit (a `huggingface_hub.CommitInfo`; its ``oid`` is the commit).

        Raises:
            ConfigError: ``plan`` is no plan.
            OSError: no access or no network.
        """
        return publish(
            repo_id,
            _without_plan_file(self).to_yaml(),
            plan,
            base_model,
            private=private,
            token=token,
            revision=revision,
            commit_message=commit_message,
            commit_description=commit_description,
            create_pr=create_pr,
        )


@short_traceback
def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | ActSwapConfig | Literal[False] | None,
) -> ActSwapConfig:
    """Read a configuration.

    Args:
        source: the word ``auto``, for ``memory: {mode: adaptive}``: the planner chooses every fate and the
            budget; a path of a YAML or JSON file; a folder that holds ``actswap_config.yaml``; the text
            itself (it has a line break or is a mapping); a mapping, which is not changed; an
            `ActSwapConfig`, returned as is; ``None``, an empty text or a word for off (``off``, ``none``,
            ``no``, false), for all defaults; else a Hub id,
            ``org/name`` or ``org/name@revision``, of a repository that holds ``actswap_config.yaml``. Only a
            string that is none of the others and looks like a Hub id reaches the network.

    Returns:
        The configuration; its ``notes`` have one line for each accepted section or key without meaning.

    Raises:
        ConfigError: with every problem, in the order of the document.
    """
    if isinstance(source, ActSwapConfig):
        return source
    if source == AUTO:
        return ActSwapConfig(memory=MemoryConfig(mode="adaptive"), source=AUTO)
    if source is None or is_off_word(source):
        return ActSwapConfig(source="defaults" if source is None else "off")
    if isinstance(source, Mapping):
        return _read_document(source, [], "mapping")
    if isinstance(source, str):
        return _from_string(source)
    if isinstance(source, os.PathLike):
        return _from_path(os.fsdecode(source))
    raise ConfigError([Problem("source", EXPECTED_SOURCE, show(source))])


def _read_text(text: str, source: str, hub_file: HubFile | None = None) -> ActSwapConfig:
    """Read YAML or JSON text; ``source``: where it was found, for messages."""
    document, duplicates = parse_yaml(text, source)
    if document is None:
        document = {}
    if not isinstance(document, Mapping):
        raise ConfigError([Problem("document", "a mapping of sections", show(document))], source)
    config = _read_document(document, duplicates, source)
    if hub_file is None:
        return config
    # Anybody may have written it, and the planner writes to the path that it names.
    notes = [f"{hub_file.repo_id} on the Hub is read at commit {hub_file.commit}."]
    if config.memory.plan_file is not None:
        notes.append("`memory.plan_file` is a path of the machine that published it; it is not used.")
    return replace(_without_plan_file(config), notes=(*notes, *config.notes))


def _without_plan_file(config: ActSwapConfig) -> ActSwapConfig:
    return replace(config, memory=replace(config.memory, plan_file=None))


def _read_document(
    document: Mapping[Any, Any], duplicates: list[tuple[Path, Problem]], source: str
) -> ActSwapConfig:
    if document.get("format") == PLAN_FORMAT:
        hint = "hf_actswap.apply and the argument `actswap` take it; hf_actswap.load_plan reads it."
        raise ConfigError([Problem("document", "a configuration", "a plan", hint)], source)
    findings = Findings(document, KEYS_OF_SECTIONS)
    for path, problem in duplicates:
        findings.problem(path, problem.expected, problem.found, problem.hint)
    _note_foreign_sections(findings)
    swap = read_swap(findings)
    parallel, shape = read_parallel(findings)
    recompute = read_recompute(
        findings, swap=None if swap_is_unreadable(findings) else swap.swap, shape=shape
    )
    memory = read_memory(findings)
    check_fates(findings, memory, swap, recompute)
    stream = read_stream(findings)
    check_weights(findings, memory, parallel, stream)
    check_in_backward(findings, memory, parallel, stream)
    config = ActSwapConfig(
        swap_config=swap,
        recompute_config=recompute,
        parallel_config=parallel,
        tile_config=read_tiles(findings),
        stream_config=stream,
        memory=memory,
        stacks=_read_stacks(findings, memory) or None,
        num_layers=_read(findings, _NUM_LAYERS, (*MODEL_CONFIG, "num_layers")),
        log=_read(findings, _LOG, ("log",)) or "summary",
        notes=findings.notes(),
        source=source,
    )
    problems = findings.problems()
    if problems:
        error = ConfigError(problems, source)
        # The meaning of a table of layers depends on these sections.
        if not (swap_is_unreadable(findings) or findings.any_below("parallel_config", "model", "parallel")):
            error.readable = config
        raise error
    return config


def _read(findings: Findings, kind: TypeAdapter[Any], path: Path) -> Any:
    value = lookup(findings, path)
    return None if value is None else findings.read(kind, path, value)


def _read_stacks(findings: Findings, memory: MemoryConfig) -> dict[str, ActSwapConfig]:
    found = {}
    for name, rules in findings.mapping(("stacks",), findings.document.get("stacks")).items():
        path: Path = ("stacks", name) if isinstance(name, str | int) else ("stacks",)
        if not isinstance(name, str):
            findings.problem(path, "the name of a stack (a text)", f"the key {show(name)}")
            continue
        section = findings.mapping(path, rules)
        findings.keys(path, section, {}, also=STACK_SECTIONS)
        inner = findings.inside(path, section)
        swap = read_swap(inner)
        recompute = read_recompute(inner, swap=None if swap_is_unreadable(inner) else swap.swap, shape=None)
        if recompute.parallel_optimizer_comm_recompute:
            key = "recompute_config", "parallel_optimizer_comm_recompute"
            hint = "Write it in the document's own recompute_config."
            inner.problem(key, "a key for one stack", "one for the model", hint)
        check_fates(findings, memory, swap, recompute, name)
        found[name] = ActSwapConfig(swap, recompute)
    return found


def _note_foreign_sections(findings: Findings) -> None:
    """Add a note for each section of MindFormers, and a problem for each unknown section."""
    for key in findings.document:
        if key == "model":
            honoured = honoured_in_model(findings)
            verb = "go" if len(honoured) > 1 else "goes"
            ours = f"{' and '.join(honoured)} {verb} to parallel_config; " if honoured else ""
            line = f"`model`: num_layers is checked against the model; {ours}the rest is ignored."
            findings.note((key,), line)
        elif key == "parallel" and (interleave := lookup(findings, PIPELINE_INTERLEAVE)) is not None:
            what = "is false, so pp_interleave_num is 1" if interleave is False else "is honoured"
            findings.note((key,), f"`parallel`: pipeline_interleave {what}; the rest is ignored.")
        elif key in FOREIGN_SECTIONS:
            findings.note((key,), ignored_key_note(key))
        elif key not in (*OUR_SECTIONS, *MODE_FLAGS):
            also = (*sorted(FOREIGN_SECTIONS), *MODE_FLAGS)
            expected = "a section of this library or of MindFormers"
            findings.unknown_key((), key, expected, (*OUR_SECTIONS, "model"), also)


def _from_string(text: str) -> ActSwapConfig:
    """Read text, or the file, the folder or the Hub id that it names."""
    # This comes first, so that the file system is never asked for a whole document as a name.
    if "\n" in text or not text.strip():
        return _read_text(text, "text")
    if os.path.exists(text):
        return _from_path(text)
    if text.lstrip().startswith("{") or ": " in text or text.rstrip().endswith(":"):
        return _read_text(text, "text")
    if text.lower().endswith(_FILE_ENDINGS):
        raise _no_such(text, "no such file")
    hub_id = split_hub_id(text)
    if hub_id is None:
        raise _no_such(text, "no such file or folder, no YAML mapping and no Hub id")
    return _from_hub(text, *hub_id, HubOptions(), EXPECTED_SOURCE)


def _from_name(name: str, revision: str | None, options: HubOptions) -> ActSwapConfig:
    """Read a file, a folder or a Hub id, and nothing else."""
    if os.path.exists(name):
        return _from_path(name)
    hub_id = split_hub_id(name)
    if hub_id is None:
        raise _no_such(name, "no such file or folder, and no Hub id", _EXPECTED_NAME)
    repo_id, named = hub_id
    if revision is not None and named not in (None, revision):
        raise ConfigError([Problem("revision", f"{named}, as in '{name}'", revision)])
    if revision is not None and split_hub_id(f"{repo_id}@{revision}") is None:
        raise ConfigError([Problem("revision", "a branch, tag or commit", repr(revision))])
    return _from_hub(name, repo_id, revision or named, options, _EXPECTED_NAME)


def _from_path(path: str) -> ActSwapConfig:
    """Read a file, or ``actswap_config.yaml`` in a folder."""
    if not os.path.exists(path):
        raise _no_such(path, "no such file or folder")
    if os.path.isdir(path):
        inside = os.path.join(path, CONFIG_FILE_NAME)
        if not os.path.isfile(inside):
            raise _no_such(path, f"a folder without {CONFIG_FILE_NAME}")
        path = inside
    return _read_text(_read_file(path, path), path)


def _from_hub(
    name: str, repo_id: str, revision: str | None, options: HubOptions, expected: str
) -> ActSwapConfig:
    try:
        found = fetch(repo_id, CONFIG_FILE_NAME, revision, options, MAX_TEXT_BYTES)
    except OSError as error:
        raise _no_such(name, f"no such file or folder, and from the Hub: {error}", expected) from None
    return _read_text(_read_file(found.path, found.pinned), found.pinned, found)


def _no_such(text: str, tried: str, expected: str = EXPECTED_SOURCE) -> ConfigError:
    name = f"'{text}'" if text.isprintable() else repr(text)
    meant = get_close_matches(text.strip().lower(), [AUTO], cutoff=0.7)
    hint = f"Did you mean '{AUTO}'?" if meant else ""
    return ConfigError([Problem("source", expected, f"{name}: {' '.join(tried.split()).rstrip('.')}", hint)])


def _read_file(path: str, source: str) -> str:
    if not os.path.isfile(path):
        raise _no_such(path, "neither a file nor a folder")
    try:
        return read_text(path, MAX_TEXT_BYTES, ConfigError, source)
    except OSError as error:
        raise _no_such(path, f"it cannot be read, {error.strerror}") from None
