"""Who recomputes, a plan or gradient checkpointing, and what else moves activations beside a plan.

Fine-tuning tools switch checkpointing on by default: a plan that was asked for takes its place. What the user
wrote is not overruled: beside a plan that cannot be carried out with it, it is an error by its own key.
Arguments do not tell a default from what was written, so the command line and the files that it names do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from transformers.training_args import TrainingArguments

from ..errors import PlanError, Problem
from ..plan import MemoryPlan
from ..plan.actions import OUTPUT

_ARGUMENTS = ("activation_checkpointing", "gradient_checkpointing")
"""The name in transformers from 5.23 on, and before; one may answer for the other."""
_TOOLS = {"llamafactory": "LLaMA-Factory"}
"""Modules of programs that switch checkpointing on in the model, whatever the training arguments say."""
_KEYS = (*_ARGUMENTS, "disable_gradient_checkpointing", "use_unsloth_gc")
"""Keys by which a user of a tool says something about checkpointing."""
_FILES = (".json", ".yaml", ".yml")


def written_keys(words: Iterable[str]) -> Iterator[str]:
    """Yield the keys of a command line: its options, ``key=value``, and of YAML and JSON files in it."""
    for word in words:
        if word.startswith("--") or "=" in word:
            yield word.lstrip("-").split("=", 1)[0].replace("-", "_")
        elif word.endswith(_FILES) and Path(word).is_file():
            try:
                document = yaml.safe_load(Path(word).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, yaml.YAMLError):
                continue  # the program says what is wrong with its file
            yield from map(str, document if isinstance(document, dict) else ())


def key_of_checkpointing() -> str | None:
    """Return the key of checkpointing that this program's user wrote, or ``None``."""
    return next((key for key in written_keys(sys.argv[1:]) if key in _KEYS), None)


def default_of(args: TrainingArguments) -> str | None:
    """Return whose default switches gradient checkpointing on in this training; ``None``: the user did."""
    if key_of_checkpointing() is not None:
        return None
    if (tool := next((name for module, name in _TOOLS.items() if module in sys.modules), None)) is not None:
        return tool
    on = any(item.name in _ARGUMENTS and item.default is True for item in fields(args))
    return type(args).__name__ if on else None


def needs_its_place(plan: MemoryPlan) -> bool:
    """Whether a plan, resolved without checkpointing, says something about the insides of layers."""
    acts = {(row.fate, row.op_path) for row in plan.rows if row.fate != "keep"} - {("swap", OUTPUT)}
    return bool(acts) or plan.streamed is not None


def check_what_was_written(plan: MemoryPlan) -> None:
    """Raise `PlanError` if the user wrote a key of checkpointing beside a plan that recomputes.

    Beside one that swaps, the inputs of checkpointed layers are swapped. Unsloth's move them by themselves.
    """
    key = key_of_checkpointing()
    if key == "use_unsloth_gc" or (key and any(row.fate == "recompute" for row in plan.rows)):
        hint = f"Leave {key} out: the plan takes the place of a default. Or leave recompute_config out."
        expected = "left out, or no, beside a plan that recomputes"
        raise PlanError([Problem(key, expected, "gradient checkpointing switched on by it", hint)])


def without_checkpointing_argument(args: TrainingArguments) -> Callable[[], None]:
    """Switch gradient checkpointing off in the arguments too, which trainers read; return what undoes it.

    TRL's trainers switch it on again after they have generated, if the arguments say so.
    """
    undo = ExitStack()
    for name, value in [(name, value) for name in _ARGUMENTS if (value := getattr(args, name, False))]:
        undo.callback(setattr, args, name, value)
        setattr(args, name, False)
    return undo.close


_OFFLOADS = {"ActivationCpuOffloadCallBack": "callbacks: activation_cpu_offload"}
"""Classes of callbacks that move activations, and the setting that asks for them (ms-swift)."""


def problems_of_other_methods(args: TrainingArguments, callbacks: Iterable[Any]) -> list[Problem]:
    """Return a problem for each other method of this training that moves activations to the host.

    Only the innermost pair of saved-tensor hooks sees a tensor: beside a plan they move next to nothing.
    """
    found = [_OFFLOADS[name] for item in callbacks if (name := type(item).__name__) in _OFFLOADS]
    if getattr(args, "activation_offloading", False):  # TRL and Axolotl
        found.append("activation_offloading")
    hint = "Leave it out: swap_config, or auto, moves activations beside compute."
    return [Problem(name, "one method that moves activations", "it beside a plan", hint) for name in found]
