"""Translates flags and settings of other programs to a configuration: data, and how they are read.

`COUNTERPARTS` says of each flag what it sets here and what that means. A command line (a script that starts a
training, too: `shell`) and a file of settings (YAML, JSON) are read into the same form: a name without
dashes, with underscores and, for a key inside a section, dots; and its values as text.

Sources: Megatron-LM's ``megatron/training/arguments.py``, MindSpeed's ``mindspeed/features_manager``, the
pages "Activation Checkpointing" of DeepSpeed's configuration, ``SFTConfig`` of TRL, Axolotl's reference.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any, NoReturn, cast

import yaml

from ..errors import ConfigError, Problem
from .keys import OUR_SECTIONS
from .shell import Word, read_script


class Given(Enum):
    """What a flag sets that depends on the command line."""

    NUMBER = "the flag's number"
    MIB_AS_GIB = "the flag's number of MiB, in GiB"
    LAYERS = "true, or the layers that another flag counts"
    FIRST_LAYERS = "the indices of as many layers, from the first"
    INTERLEAVES = "virtual stages of a stage, from the number of layers in each"
    OFFSETS = "layers that each stage has more than its share, from a list of them"


@dataclass(frozen=True)
class Counterpart:
    """What a flag becomes.

    Args:
        flag: its name.
        words: what it means here, or why it has no counterpart.
        sets: key of a configuration -> value; empty: nothing.
        value: the value of the flag that this is for (of a list, each); empty: any that is not off.
        beside: (another flag, its value; empty: any) that must be given as well; a flag that begins with
            ``!`` must not.
        layers: the flag that says in how many layers of each stage; empty, or not given: in all.
        read_with: the flag that reads this one, so that it needs no line of its own; without that flag it has
            no effect.
    """

    flag: str
    words: str
    sets: Mapping[str, Any] = field(default_factory=dict)
    value: str = ""
    beside: tuple[str, str] = ("", "")
    layers: str = ""
    read_with: str = ""


_FULL, _SELECT = "recompute_config.recompute", "recompute_config.select_recompute"
_INPUTS: Mapping[str, Any] = {
    "recompute_config.recompute": True,
    "swap_config.swap": True,
    "swap_config.recompute_input": True,
    "swap_config.default_prefetch": "auto",
    "swap_config.op_swap": [],
}
_ALL_SWAPPED: Mapping[str, Any] = {
    "swap_config.swap": True,
    "swap_config.layer_swap": [{"backward_prefetch": "auto", "layers": True}],
}
_STATES: Mapping[str, Any] = {"memory.mode": "smart_swap", "memory.preference": "memory_saving"}


def _select(*paths: str) -> Mapping[str, Any]:
    return {_SELECT: dict.fromkeys(paths, Given.LAYERS)}


def _swap(*paths: str) -> Mapping[str, Any]:
    rules = [{"op_name": path, "backward_prefetch": "auto", "layers": True} for path in paths]
    return {"swap_config.swap": True, "swap_config.op_swap": rules}


_NORMS = ("attention_norm", "ffn_norm")
_ACTIVATION = (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")
_CORE = "the core of attention is recomputed"
_STATES_WAIT = (
    "the optimizer's states wait on the host between its steps; the planner keeps what is written by hand"
)
_WHOLE = "layers are recomputed whole"
_REPLACED = "switch the other off: this replaces it"
_PART = "read with another flag"

COUNTERPARTS: Mapping[str, Sequence[Counterpart]] = {
    "Megatron-LM and MindSpeed-LLM": (
        Counterpart(
            "recompute_granularity",
            "the first layers of each stage are recomputed whole",
            {_FULL: Given.LAYERS},
            value="full",
            beside=("recompute_method", "block"),
            layers="recompute_num_layers",
        ),
        Counterpart(
            "recompute_granularity",
            f"{_WHOLE}, each by itself; a unit of several layers, with fewer inputs, has no counterpart",
            {_FULL: True},
            value="full",
        ),
        Counterpart(
            "recompute_granularity",
            _CORE,
            _select(r"attention\.flash_attention"),
            value="selective",
            beside=("!recompute_modules", ""),
        ),
        Counterpart("recompute_granularity", _PART, value="selective", read_with="recompute_modules"),
        Counterpart("recompute_activations", _CORE, _select(r"attention\.flash_attention")),
        Counterpart("recompute_method", _PART, read_with="recompute_granularity"),
        Counterpart("recompute_num_layers", _PART, read_with="recompute_granularity"),
        Counterpart("recompute_modules", _CORE, _select(r"attention\.flash_attention"), value="core_attn"),
        Counterpart("recompute_modules", "MLPs are recomputed", _select("feed_forward"), value="mlp"),
        Counterpart("recompute_modules", "MoE blocks are recomputed", _select("feed_forward"), value="moe"),
        Counterpart("recompute_modules", "norms are recomputed", _select(*_NORMS), value="layernorm"),
        Counterpart(
            "recompute_modules",
            "activations of the experts are recomputed",
            _select(r"feed_forward\.w1\.activation"),
            value="moe_act",
        ),
        Counterpart(
            "recompute_modules",
            "up-projections of latent attention are recomputed (Hugging Face's names)",
            _select(r"self_attn\.q_b_proj", r"self_attn\.kv_b_proj"),
            value="mla_up_proj",
        ),
        Counterpart(
            "recompute_modules",
            "shared experts are recomputed (Hugging Face's name)",
            _select(r"mlp\.shared_experts"),
            value="shared_experts",
        ),
        Counterpart(
            "recompute_activation_function",
            "activation and product of MLPs are recomputed",
            _select(*_ACTIVATION),
            layers="recompute_activation_function_num_layers",
        ),
        Counterpart(
            "recompute_activation_function_num_layers",
            _PART,
            read_with="recompute_activation_function",
        ),
        Counterpart(
            "recompute_norm", "norms are recomputed", _select(*_NORMS), layers="recompute_norm_num_layers"
        ),
        Counterpart("recompute_norm_num_layers", _PART, read_with="recompute_norm"),
        Counterpart("recompute_in_bubble", "a layer is recomputed when backward reaches it, not in bubbles"),
        Counterpart("recompute_in_advance", "a layer is recomputed when backward reaches it, not before"),
        Counterpart(
            "enable_recompute_layers_per_pp_rank",
            "counts here are of each virtual stage; write the table of `recompute` by hand",
        ),
        Counterpart(
            "distribute_saved_activations",
            "each tensor-parallel rank keeps its part of the input of a recomputed layer",
            {"recompute_config.recompute_slice_activation": True},
        ),
        Counterpart(
            "swap_attention",
            "norms and attention are swapped",
            _swap("attention_norm", "attention", "ffn_norm"),
            beside=("!swap_modules", ""),
        ),
        Counterpart("swap_attention", _PART, read_with="swap_modules"),
        Counterpart("swap_modules", "norms of attention are swapped", _swap("attention_norm"), "input_norm"),
        Counterpart("swap_modules", "attention is swapped", _swap("attention"), value="self_attention"),
        Counterpart("swap_modules", "norms of MLPs are swapped", _swap("ffn_norm"), "post_attention_norm"),
        Counterpart("swap_modules", "MLPs are swapped", _swap("feed_forward"), value="mlp"),
        Counterpart("smart_swap", "the planner searches what is swapped", {"memory.mode": "smart_swap"}),
        Counterpart(
            "adaptive_memory_optimization", "the planner chooses all fates", {"memory.mode": "adaptive"}
        ),
        Counterpart(
            "adaptive_recompute_device_swap", "the planner chooses all fates", {"memory.mode": "adaptive"}
        ),
        Counterpart("adaptive_recompute_device_size", "this is MindSpeed's word for no planner", value="-1"),
        Counterpart(
            "adaptive_recompute_device_size",
            "the budget of the planner",
            {"memory.mode": "adaptive", "memory.budget_gib": Given.MIB_AS_GIB},
        ),
        Counterpart(
            "adaptive_recompute_profiling_step",
            "steps of the planner's warm-up",
            {"memory.warmup_steps": Given.NUMBER},
        ),
        Counterpart("swap_optimizer", _STATES_WAIT, _STATES),
        Counterpart("swap_optimizer_times", "states move parameter by parameter, in parts of their size"),
        Counterpart("optimizer_cpu_offload", f"{_STATES_WAIT}; its step stays on the device", _STATES),
        Counterpart("optimizer_offload_fraction", "all states wait on the host, or none"),
        Counterpart(
            "cpu_offloading",
            "all that the first layers save is swapped",
            {
                "swap_config.swap": True,
                "swap_config.layer_swap": [{"backward_prefetch": "auto", "layers": Given.FIRST_LAYERS}],
            },
            layers="cpu_offloading_num_layers",
        ),
        Counterpart("cpu_offloading_num_layers", _PART, read_with="cpu_offloading"),
        Counterpart("cpu_offloading_activations", _PART, read_with="cpu_offloading"),
        Counterpart(
            "cpu_offloading_weights", "trained weights stay; `memory: {weights: host}` is for frozen"
        ),
        Counterpart("fine_grained_activation_offloading", _PART, read_with="offload_modules"),
        Counterpart(
            "offload_modules", "norms of attention are swapped", _swap("attention_norm"), "attn_norm"
        ),
        Counterpart(
            "offload_modules",
            "queries, keys and values are swapped",
            _swap(r"attention\.wq", r"attention\.wk", r"attention\.wv"),
            value="qkv_linear",
        ),
        Counterpart(
            "offload_modules",
            "what the core of attention saves is swapped",
            _swap(r"attention\.flash_attention"),
            value="core_attn",
        ),
        Counterpart(
            "offload_modules", "attention's output is swapped", _swap(r"attention\.wo"), value="attn_proj"
        ),
        Counterpart("offload_modules", "norms of MLPs are swapped", _swap("ffn_norm"), value="mlp_norm"),
        Counterpart(
            "offload_modules", "first products of MLPs are swapped", _swap(r"feed_forward\.w1"), "expert_fc1"
        ),
        Counterpart(
            "offload_modules",
            "activations of the experts are swapped",
            _swap(r"feed_forward\.w1\.activation"),
            value="moe_act",
        ),
        Counterpart("memory_fragmentation", "a plan switches on expandable segments, which do this"),
        Counterpart("reuse_fp32_param", "an optimizer of MindSpeed; `optimizer_in_backward` saves gradients"),
        Counterpart(
            "tensor_model_parallel_size",
            "ranks that hold the model together",
            {"parallel_config.tensor_parallel_size": Given.NUMBER},
        ),
        Counterpart(
            "sequence_parallel",
            "each of them keeps its part of the sequence",
            {"parallel_config.sequence_parallel_enabled": True},
        ),
        Counterpart(
            "pipeline_model_parallel_size",
            "stages for which tables count layers (with `schedule` they also run)",
            {"parallel_config.pipeline_stage": Given.NUMBER},
        ),
        Counterpart(
            "num_layers_per_virtual_pipeline_stage",
            "virtual stages of each stage",
            {"parallel_config.pp_interleave_num": Given.INTERLEAVES},
        ),
        Counterpart(
            "num_virtual_stages_per_pipeline_rank",
            "virtual stages of each stage",
            {"parallel_config.pp_interleave_num": Given.NUMBER},
        ),
        Counterpart(
            "num_layer_list", "layers that a stage has more", {"parallel_config.offset": Given.OFFSETS}
        ),
        Counterpart("context_parallel_size", "stays with the trainer; long sequences: `stream_config`"),
        Counterpart("use_distributed_optimizer", "FSDP2 or ZeRO shard the states; they stay the trainer's"),
    ),
    "DeepSpeed": (
        Counterpart("activation_checkpointing", f"{_WHOLE}; {_REPLACED}", {_FULL: True}, value="a section"),
        Counterpart(
            "activation_checkpointing.partition_activations",
            "each tensor-parallel rank keeps its part of the input of a recomputed layer",
            {_FULL: True, "recompute_config.recompute_slice_activation": True},
        ),
        Counterpart(
            "activation_checkpointing.cpu_checkpointing", "inputs of recomputed layers are swapped", _INPUTS
        ),
        Counterpart(
            "activation_checkpointing.contiguous_memory_optimization",
            "a plan switches on expandable segments, which do this",
        ),
        Counterpart(
            "activation_checkpointing.number_checkpoints",
            "each layer is a unit; `recompute` may list fewer layers",
        ),
        Counterpart("activation_checkpointing.synchronize_checkpoint_boundary", "nothing is synchronised"),
        Counterpart("activation_checkpointing.profile", "`hf-actswap profile` and the report show times"),
        Counterpart(
            "zero_optimization.offload_optimizer", "stays DeepSpeed's, in its own file", value="a section"
        ),
        Counterpart(
            "zero_optimization.offload_param", "stays DeepSpeed's, in its own file", value="a section"
        ),
    ),
    "transformers, TRL and Axolotl": (
        Counterpart(
            "gradient_checkpointing",
            f"inputs of recomputed layers are swapped; {_REPLACED}",
            _INPUTS,
            value="offload",
        ),
        Counterpart("gradient_checkpointing", "nothing is written to disk", value="offload_disk"),
        Counterpart("gradient_checkpointing", f"{_WHOLE}; {_REPLACED}", {_FULL: True}),
        Counterpart("activation_checkpointing", f"{_WHOLE}; {_REPLACED}", {_FULL: True}),
        Counterpart(
            "gradient_checkpointing_kwargs.offload", "inputs of recomputed layers are swapped", _INPUTS
        ),
        Counterpart("gradient_checkpointing_kwargs.use_reentrant", "recomputation here is not reentrant"),
        Counterpart("fsdp_config.activation_checkpointing", f"{_WHOLE}; {_REPLACED}", {_FULL: True}),
        Counterpart("fsdp_activation_checkpointing", f"{_WHOLE}; {_REPLACED}", {_FULL: True}),
        Counterpart(
            "fsdp_offload_params", "stays with FSDP; `memory: {weights: host}` is for frozen weights"
        ),
        Counterpart("activation_offloading", "nothing is written to disk", value="disk"),
        Counterpart(
            "activation_offloading",
            "inputs of recomputed layers are swapped",
            _INPUTS,
            beside=("gradient_checkpointing", ""),
        ),
        Counterpart(
            "activation_offloading",
            "what all layers save is swapped, as much as the link hides",
            _ALL_SWAPPED,
        ),
        Counterpart(
            "tiled_mlp", "MLPs run in tiles of tokens", {"tile_config.tile": [{"op_name": "feed_forward"}]}
        ),
        Counterpart("tiled_mlp_num_shards", "`tokens` of a tile say how long it is, not how many there are"),
        Counterpart("chunked_cross_entropy", "head and loss run in tiles", {"tile_config.loss": "auto"}),
        Counterpart("cut_cross_entropy", "works beside a plan; `tile_config: {loss: auto}` is our own"),
        Counterpart("use_liger_kernel", "works beside a plan"),
        Counterpart(
            "layer_offloading", "frozen weights of the layers wait on the host", {"memory.weights": "host"}
        ),
        Counterpart("torch_empty_cache_steps", "memory is released tensor by tensor"),
        Counterpart(
            "tensor_parallel_size",
            "ranks that hold the model together",
            {"parallel_config.tensor_parallel_size": Given.NUMBER},
        ),
        Counterpart("sequence_parallel_degree", "stays with the trainer; long sequences: `stream_config`"),
    ),
}
"""What each program's flags become. Flags that have nothing to do with memory are not listed."""

_ROWS = [row for rows in COUNTERPARTS.values() for row in rows]
_KNOWN = frozenset(row.flag for row in _ROWS)
_WIDTH = 78
_ABOUT_MEMORY = re.compile(r"recompute|swap|offload|checkpointing")
_OFF = ("false", "none", "no", "off", "null", "0", "[]", "{}")
_A_SECTION = "a section"

_SEPARATOR = ": "


@dataclass(frozen=True)
class Flags:
    """Flags of a command line, or settings of a file.

    Args:
        given: name -> the flag as it was written, and its values.
        assumed: name -> what was taken for granted to read it.
        unused: flags, as written, that a script names but gives to no command.
    """

    given: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    assumed: dict[str, list[str]] = field(default_factory=dict)
    unused: Sequence[str] = ()


@dataclass(frozen=True)
class Converted:
    """A configuration made of flags.

    Args:
        document: the configuration.
        lines: for each key of it, what it means: the flag as written, and words.
        without: flags without a counterpart, each with the reason.
        unknown: number of other flags.
        assumed: what was taken for granted: defaults of variables, the last of several values.
    """

    document: Mapping[str, Mapping[str, Any]]
    lines: Mapping[str, Sequence[str]]
    without: Sequence[str]
    unknown: int
    assumed: Sequence[str] = ()

    def to_yaml(self) -> str:
        """Return the configuration as YAML, with what each line means above it."""
        text: list[str] = []
        for section, keys in self.document.items():
            text.append(f"{section}:")
            said: set[str] = set()
            for key, value in keys.items():
                for whole in self.lines[f"{section}.{key}"]:
                    line = f"{whole.rpartition(_SEPARATOR)[0]}, too." if whole in said else whole
                    said.add(whole)
                    text += textwrap.wrap(line, _WIDTH, initial_indent="  # ", subsequent_indent="  #   ")
                text += _entry(key, value)
        assumed = [f"Taken for granted: {line}." for line in self.assumed]
        for line in [*assumed, *(f"Not converted: {line}" for line in self.without)]:
            text += textwrap.wrap(line, _WIDTH, initial_indent="# ", subsequent_indent="#   ")
        return "\n".join(text) + "\n"


def _entry(key: str, value: Any) -> list[str]:
    """Return a key of a section as lines of YAML: one, if that is short."""
    (inline,) = yaml.safe_dump([value], default_flow_style=True, width=10**6, sort_keys=False).splitlines()
    line = f"  {key}: {inline[1:-1]}"
    if len(line) <= _WIDTH:
        return [line]
    flow = None if isinstance(value, list) else False
    block = yaml.safe_dump(value, default_flow_style=flow, width=_WIDTH - 4, sort_keys=False)
    return [f"  {key}:", *(f"    {part}" for part in block.splitlines())]


def flags_of_command(text: str) -> Flags:
    """Read the flags of a command line, or of a shell script that starts a training."""
    script = read_script(text)
    flags = _flags_of_words(script.commands)
    named = dict.fromkeys(word for text in script.unused for word in re.findall(r"--[a-zA-Z][\w-]*", text))
    unused = [word for word in named if _name(word) not in flags.given]
    return Flags(flags.given, flags.assumed, unused)


def flags_of_arguments(words: Sequence[str]) -> Flags:
    """Read the flags of a command line that a shell has split into words."""
    return _flags_of_words([[Word(word) for word in words]])


def _name(written: str) -> str:
    return written.lstrip("-").replace("-", "_")


def _flags_of_words(commands: Iterable[Sequence[Word]]) -> Flags:
    flags, several = Flags(), set()
    for words in commands:
        mine: dict[str, tuple[str, list[str]]] = {}
        name = ""
        for word in words:
            if word.text.startswith("--"):
                written, equals, value = word.text.partition("=")
                name = _name(written)
                mine[name] = (written, [value] if equals else [])
                flags.assumed.setdefault(name, []).extend(word.assumed)
            elif name and _is_value(word.text):
                mine[name][1].append(word.text)
                flags.assumed[name] += word.assumed
            else:
                name = ""
        several |= {name for name, found in mine.items() if flags.given.get(name, found)[1] != found[1]}
        flags.given.update(mine)
    for name in several:
        written = flags.given[name][0]
        flags.assumed[name].append(f"commands give {written} several values; the last is taken")
    for name, (written, values) in list(flags.given.items()):
        if (section := _json_section(values)) is not None:
            flags.given[name] = (written, [_A_SECTION])
            flags.given.update(flags_of_settings(section, f"{name}.").given)
    return flags


def _is_value(word: str) -> bool:
    return not word.startswith("-") or bool(re.fullmatch(r"-\d[\d.,e+-]*", word))


def _json_section(values: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the mapping that the value of a flag is, in JSON."""
    text = " ".join(values)
    if not text.startswith("{"):
        return None
    try:
        return cast(Mapping[str, Any], json.loads(text))
    except json.JSONDecodeError:
        return None


def flags_of_settings(document: Mapping[Any, Any], above: str = "") -> Flags:
    """Read settings of a file; a key inside a section is named by both, with a dot."""
    flags = Flags()
    for key, value in document.items():
        name = f"{above}{key}".replace("-", "_")
        if isinstance(value, Mapping):
            flags.given[name] = (name, [_A_SECTION])
            flags.given.update(flags_of_settings(value, f"{name}.").given)
        else:
            values = value if isinstance(value, list) else [value]
            words = [
                ("true" if item else "false") if isinstance(item, bool) else str(item) for item in values
            ]
            flags.given[name] = (f"{name}:", words)
    return flags


_SETTINGS = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")


def read_flags(text: str, file: str = "") -> Flags:
    """Read flags from the text of a file: settings in JSON or YAML, or a command line.

    Args:
        text: the text.
        file: name of the file; its ending says what the text must be. Empty, or another ending: what it is.

    Raises:
        ConfigError: the text is not what the ending says.
    """
    ending = PurePath(file).suffix.lower()
    if ending == ".py":
        hint = "Pass the flags themselves after --, or the script that starts it."
        raise ConfigError([Problem(file, "a shell script, or settings in JSON or YAML", "Python", hint)])
    if ending in _SCRIPTS or (ending not in _SETTINGS and re.match(r"\s*(--\w|#!)", text)):
        return flags_of_command(text)
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        if ending in _SETTINGS:
            _reject(
                file,
                f"valid {_SETTINGS[ending]}",
                " ".join(str(error).replace('in "<unicode string>", ', "").split()),
            )
        document = None
    if isinstance(document, Mapping):
        return flags_of_settings(document)
    if ending in _SETTINGS and document is not None:
        _reject(file, "settings (keys with values)", f"a {type(document).__name__}")
    return flags_of_command(text)


def _reject(file: str, expected: str, found: str) -> NoReturn:
    hint = "Mend the file. Flags of a command belong in a file that ends in .sh."
    raise ConfigError([Problem(file, expected, found, hint)])


def convert_flags(flags: Flags) -> Converted:
    """Return the configuration that flags of another program ask for.

    Raises:
        ConfigError: a value that is needed is missing or is not a number.
    """
    return _Conversion(flags).converted()


class _Conversion:
    def __init__(self, flags: Flags) -> None:
        self._given = _by_known_names(flags.given)
        self._flags = {name: found for name, found in self._given.items() if not _is_off(found[1])}
        self._read = flags
        self._problems: list[Problem] = []
        self._found: dict[str, Any] = {}
        self._lines: dict[str, list[str]] = {}
        self._without: list[str] = []
        chosen = [(row, value) for name in self._flags for row, value in self._rows(name)]
        self._swaps = any(row.sets.get("swap_config.swap") for row, _ in chosen)
        for row, value in sorted(chosen, key=lambda item: _ROWS.index(item[0])):
            self._add(row, value)

    def converted(self) -> Converted:
        if self._problems:
            raise ConfigError(self._problems)
        document: dict[str, dict[str, Any]] = {}
        for section in OUR_SECTIONS:
            for key, value in self._found.items():
                if key.partition(".")[0] == section:
                    document.setdefault(section, {})[key.partition(".")[2]] = value
        others = [name for name in self._given if name not in _KNOWN and not self._speaks_by_its_keys(name)]
        about_memory = [name for name in others if _ABOUT_MEMORY.search(name) and name in self._flags]
        self._without += [f"{self._flags[name][0]} {_why_not(name)}." for name in about_memory]
        unused = [word for word in self._read.unused if _ABOUT_MEMORY.search(word) or _name(word) in _KNOWN]
        self._without += [f"{word}: no command is given it." for word in unused]
        return Converted(
            document, self._lines, self._without, len(others) - len(about_memory), self._assumed()
        )

    def _assumed(self) -> list[str]:
        """Return what was taken for granted to read the flags that count here."""
        read = _KNOWN | {"num_layers"}
        notes = [note for name, notes in self._read.assumed.items() if name in read for note in notes]
        return list(dict.fromkeys(notes))

    def _speaks_by_its_keys(self, name: str) -> bool:
        """Whether it is a section about memory: each of its keys has a line, or counts, itself."""
        inside = any(other.startswith(f"{name}.") for other in self._read.given)
        return inside and _ABOUT_MEMORY.search(name) is not None

    def _rows(self, name: str) -> Iterator[tuple[Counterpart, str]]:
        """Yield what applies of a flag, with the value that it is for."""
        rows = [row for row in _ROWS if row.flag == name]
        if not rows:
            return
        if any(row.value for row in rows) and all(row.value for row in rows):
            values = [part for word in self._flags[name][1] for part in word.split(",") if part]
        else:
            values = [" ".join(self._flags[name][1])]
        for value in values:
            fitting = (row for row in rows if row.value in ("", value) and self._holds(row))
            row = next(fitting, None)
            if row is not None:
                yield row, value
            elif all(one.value for one in rows):
                known = ", ".join(dict.fromkeys(one.value for one in rows))
                self._without.append(f"{self._flags[name][0]} {value}: known are {known}.")

    def _holds(self, row: Counterpart) -> bool:
        flag, value = row.beside
        if flag.startswith("!"):
            return flag[1:] not in self._flags
        return not flag or (flag in self._flags and (not value or value in self._flags[flag][1]))

    def _add(self, row: Counterpart, value: str) -> None:
        written = f"{self._flags[row.flag][0]} {'' if value == _A_SECTION else value}".strip()
        beside, wanted = row.beside
        written += f" {self._flags[beside][0]} {wanted}" if wanted else ""
        if row.layers in self._flags:
            other, values = self._flags[row.layers]
            written += f" {other} {' '.join(values)}"
        if not row.sets:
            if not row.read_with:
                self._without.append(f"{written}: {row.words}.")
            elif row.read_with not in self._flags:
                self._without.append(f"{written}: no effect without --{row.read_with.replace('_', '-')}.")
            return
        for key, template in row.sets.items():
            made = self._filled(template, row)
            before = self._found.get(key)
            if isinstance(before, dict):
                before.update(made)
            elif isinstance(before, list) and isinstance(made, list):
                before += [item for item in made if item not in before]
            elif before is None:
                self._found[key] = made
            line = f"{written}{_SEPARATOR}{row.words}."
            if line not in self._lines.setdefault(key, []):
                self._lines[key].append(line)

    def _filled(self, template: Any, row: Counterpart) -> Any:
        if isinstance(template, Mapping):
            return {key: self._filled(value, row) for key, value in template.items()}
        if isinstance(template, list):
            return [self._filled(value, row) for value in template]
        match template:
            case Given.NUMBER:
                return self._number(row.flag)
            case Given.MIB_AS_GIB:
                return self._number(row.flag) / 1024
            case Given.FIRST_LAYERS:
                return list(range(self._number(row.layers))) if row.layers in self._flags else True
            case Given.LAYERS:
                return self._layers(row.layers) if row.layers in self._flags else True
            case Given.INTERLEAVES:
                each = self._number(row.flag)
                return max(1, self._number("num_layers") // max(each, 1) // self._stages())
            case Given.OFFSETS:
                counts = [int(item) for item in self._flags[row.flag][1][0].split(",")]
                return [count - sum(counts) // len(counts) for count in counts]
        return template

    def _layers(self, flag: str) -> list[Any]:
        """Return ``recompute_config``'s list for the first layers of each (virtual) stage."""
        count, stages, interleaves = self._number(flag), self._stages(), self._interleaves()
        if not self._swaps:
            rows = [[count] * stages for _ in range(interleaves)]
            return rows[0] if interleaves == 1 else rows
        if stages * interleaves == 1:
            return list(range(count))
        each = self._number("num_layers") // (stages * interleaves)
        return [
            chunk * each + layer for chunk in range(stages * interleaves) for layer in range(min(count, each))
        ]

    def _stages(self) -> int:
        name = "pipeline_model_parallel_size"
        return self._number(name) if name in self._flags else 1

    def _interleaves(self) -> int:
        if "num_virtual_stages_per_pipeline_rank" in self._flags:
            return self._number("num_virtual_stages_per_pipeline_rank")
        if "num_layers_per_virtual_pipeline_stage" not in self._flags:
            return 1
        each = self._number("num_layers_per_virtual_pipeline_stage")
        return max(1, self._number("num_layers") // max(each, 1) // self._stages())

    def _number(self, name: str) -> int:
        written, values = self._flags.get(name, (f"--{name.replace('_', '-')}", []))
        # What a variable holds that nothing here sets may be more flags: `--num-layers 4 $MORE`.
        text = " ".join(values[:1] + [value for value in values[1:] if not value.startswith("$")])
        if text.isdigit():
            return int(text)
        problem = Problem(written.rstrip(":"), "a whole number", text or "nothing", _SET_IT)
        if problem not in self._problems:
            self._problems.append(problem)
        return 1


_SET_IT = "Write the number itself there, or pass the script that sets the variable."


def _why_not(name: str) -> str:
    section = any(known.startswith(f"{name}.") for known in _KNOWN)
    return "is no mapping that can be read, in JSON or YAML" if section else "is not known here"


def _by_known_names(given: Mapping[str, tuple[str, list[str]]]) -> dict[str, tuple[str, list[str]]]:
    """Name a key inside a section (``fsdp_config``) as the table does, without the section.

    A key that stands outside of all sections goes before.
    """
    made: dict[str, tuple[str, list[str]]] = {}
    for name, found in given.items():
        parts = name.split(".")
        tails = [".".join(parts[index:]) for index in range(len(parts))]
        known = next((tail for tail in tails if tail in _KNOWN), name)
        if known == name or known not in given:
            made[known] = found
    return made


def _is_off(values: Iterable[str]) -> bool:
    return [value.lower() for value in values] in [[off] for off in _OFF]
