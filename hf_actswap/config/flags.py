"""Translates flags and settings of other programs to a configuration: data, and how they are read.

`COUNTERPARTS` says of each flag what it sets here and what that means. A command line (a script that starts a
training, too) and a file of settings (YAML, JSON) are read into the same form: a name without dashes, with
underscores and, for a key inside a section, dots; and its values as text.

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
from typing import Any

import yaml

from ..errors import ConfigError, Problem
from .keys import OUR_SECTIONS


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
        read_with: whether another flag reads this one, so that it needs no line of its own.
    """

    flag: str
    words: str
    sets: Mapping[str, Any] = field(default_factory=dict)
    value: str = ""
    beside: tuple[str, str] = ("", "")
    layers: str = ""
    read_with: bool = False


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
        Counterpart("recompute_granularity", "see --recompute-modules", value="selective", read_with=True),
        Counterpart("recompute_activations", _CORE, _select(r"attention\.flash_attention")),
        Counterpart("recompute_method", "read with --recompute-granularity", read_with=True),
        Counterpart("recompute_num_layers", "read with --recompute-granularity", read_with=True),
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
        Counterpart("recompute_activation_function_num_layers", "counts layers of a stage", read_with=True),
        Counterpart(
            "recompute_norm", "norms are recomputed", _select(*_NORMS), layers="recompute_norm_num_layers"
        ),
        Counterpart("recompute_norm_num_layers", "counts layers of a stage", read_with=True),
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
        Counterpart("swap_attention", "see --swap-modules", read_with=True),
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
        Counterpart("cpu_offloading_num_layers", "read with --cpu-offloading", read_with=True),
        Counterpart("cpu_offloading_activations", "read with --cpu-offloading", read_with=True),
        Counterpart(
            "cpu_offloading_weights", "trained weights stay; `memory: {weights: host}` is for frozen"
        ),
        Counterpart("fine_grained_activation_offloading", "see --offload-modules", read_with=True),
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

Flags = dict[str, tuple[str, list[str]]]
"""Name -> the flag as it was written, and its values."""


@dataclass(frozen=True)
class Converted:
    """A configuration made of flags.

    Args:
        document: the configuration.
        lines: for each key of it, what it means: the flag as written, and words.
        without: flags without a counterpart, each with the reason.
        unknown: number of other flags.
    """

    document: Mapping[str, Mapping[str, Any]]
    lines: Mapping[str, Sequence[str]]
    without: Sequence[str]
    unknown: int

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
        for line in self.without:
            found = f"Not converted: {line}"
            text += textwrap.wrap(found, _WIDTH, initial_indent="# ", subsequent_indent="#   ")
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
    """Read the flags of a command line, or of a shell script that starts a training.

    Variables that the script sets are put in; comments are left out.
    """
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    code = code.replace("\\\n", " ")
    variables: dict[str, str] = dict(re.findall(r"(?:^|[\s;])([A-Za-z_]\w*)=[\"']?([\w./,-]+)", code))
    for _ in range(4):  # a variable may be set to another
        code = re.sub(
            r"\$\{?(\w+)(?::-(\w+))?\}?",
            lambda found: variables.get(str(found[1]), str(found[2] or f"${found[1]}")),
            code,
        )
        if "$" not in code:
            break
    flags: Flags = {}
    for line in re.split(r"[\n;|&<>]", re.sub(r"[\"'()\[\]]", " ", code)):
        name = ""
        for word in line.split():
            if word.startswith("--"):
                written, equals, value = word.partition("=")
                name = written.lstrip("-").replace("-", "_")
                flags[name] = (written, [value] if equals else [])
            elif name and not word.startswith("-"):
                flags[name][1].append(word)
    return flags


def flags_of_settings(document: Mapping[Any, Any], above: str = "") -> Flags:
    """Read settings of a file; a key inside a section is named by both, with a dot."""
    flags: Flags = {}
    for key, value in document.items():
        name = f"{above}{key}".replace("-", "_")
        if isinstance(value, Mapping):
            flags[name] = (name, [_A_SECTION])
            flags |= flags_of_settings(value, f"{name}.")
        else:
            values = value if isinstance(value, list) else [value]
            words = [
                ("true" if item else "false") if isinstance(item, bool) else str(item) for item in values
            ]
            flags[name] = (f"{name}:", words)
    return flags


def read_flags(text: str) -> Flags:
    """Read flags from the text of a file: settings in JSON or YAML, or a command line."""
    try:
        document = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (yaml.YAMLError, json.JSONDecodeError):
        document = None
    return flags_of_settings(document) if isinstance(document, Mapping) else flags_of_command(text)


def convert_flags(flags: Flags) -> Converted:
    """Return the configuration that flags of another program ask for.

    Raises:
        ConfigError: a value that is needed is missing or is not a number.
    """
    return _Conversion(flags).converted()


class _Conversion:
    def __init__(self, flags: Flags) -> None:
        self._flags = {name: found for name, found in flags.items() if not _is_off(found[1])}
        self._given = flags
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
        others = [name for name in self._given if name not in _KNOWN]
        about_memory = [name for name in others if _ABOUT_MEMORY.search(name) and name in self._flags]
        self._without += [f"{self._flags[name][0]} is not known here." for name in about_memory]
        return Converted(document, self._lines, self._without, len(others) - len(about_memory))

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
        text = " ".join(values)
        if text.isdigit():
            return int(text)
        problem = Problem(written.rstrip(":"), "a whole number", text or "nothing", _SET_IT)
        if problem not in self._problems:
            self._problems.append(problem)
        return 1


_SET_IT = "Pass the number itself, or the script that sets the variable."


def _is_off(values: Iterable[str]) -> bool:
    return [value.lower() for value in values] in [[off] for off in _OFF]
