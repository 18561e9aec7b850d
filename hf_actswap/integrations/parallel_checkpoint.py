"""Checkpoints of a model that several ranks hold: whole on disk, whatever the number of ranks.

=============================== =========================================================================
file                            holds
=============================== =========================================================================
``model.safetensors``           the model, as a single process writes it
``optimizer.pt``                whole tensors
``rng_state_<rank>.pth``        random states; equal within a tensor-parallel group
``parallel_layout.json``        numbers of ranks, of tensor-parallel ranks, and of stages
=============================== =========================================================================

Random states are read by data rank. If the number of ranks per model has changed, a rank reads the state of
the first rank that trained on the same part of the data.

An optimizer's state on disk is what PyTorch's optimizer writes of an undivided model: whole tensors, numbered
in the order of the groups. Any number of ranks can read it, and so can a plain Trainer in one process. Each
group also has the parameters' names (``param_names``, PyTorch's key): states are matched by name if it is
there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch
import torch.distributed as dist
from annotated_types import Ge
from torch import nn
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from ..config.documents import JsonDocument, read_text
from ..config.validation import Expected
from ..parallel.mesh import sharded_as, whole_over_data
from ..parallel.patch_model import Patched, Progress, partitions_of, with_progress
from ..parallel.weights import Partition, whole_of_ranks
from .parallel_limits import ParallelTrainingError

LAYOUT_FILE = "parallel_layout.json"
OPTIMIZER_FILE, SCHEDULER_FILE, STATE_FILE = "optimizer.pt", "scheduler.pt", "trainer_state.json"
"""The Trainer's names for these files."""

_MAX_LAYOUT_BYTES = 64 * 1024
_Size = Annotated[int, Ge(1), Expected("a whole number from 1 on")]


class _AnyLayout(TypedDict):
    processes: _Size
    tensor_parallel_size: _Size


class Layout(_AnyLayout, total=False):
    """Numbers of ranks, of ranks that hold a layer together, and of pipeline stages (1 if missing)."""

    pipeline_stage: _Size


def load_optimizer_and_scheduler(
    checkpoint: str,
    optimizer: Any,
    scheduler: Any,
    own_state: Callable[[torch.optim.Optimizer, Mapping[str, Any]], dict[str, Any]],
) -> None:
    """Load this rank's part of an optimizer's whole state, and a scheduler's state, if both are there.

    This replaces the Trainer's method, which would put the whole model's state onto every device.

    Args:
        checkpoint: the checkpoint's folder.
        optimizer: the optimizer in Accelerate's wrapper.
        scheduler: PyTorch's scheduler.
        own_state: takes an optimizer and its whole state, and returns this rank's part of the state.
    """
    files = Path(checkpoint, OPTIMIZER_FILE), Path(checkpoint, SCHEDULER_FILE)
    if not all(file.is_file() for file in files):
        return
    # Mapped, not read: the ranks of a machine share the file's pages in memory.
    full = torch.load(files[0], map_location="cpu", mmap=True, weights_only=True)
    optimizer.load_state_dict(own_state(optimizer.optimizer, full))
    scheduler.load_state_dict(torch.load(files[1], map_location="cpu", weights_only=True))


def checkpoint_folder(asked: str | os.PathLike[str] | bool | None, output_dir: str | None) -> str | None:
    """Return the folder that ``resume_from_checkpoint`` of ``Trainer.train`` means; ``None``: there is none.

    Args:
        asked: the folder; or ``True``: the last checkpoint in ``output_dir``.
        output_dir: folder of the training.
    """
    if not asked:
        return None
    if asked is not True:
        return os.fspath(asked)
    folder = output_dir or "."
    found: str | None = get_last_checkpoint(folder) if os.path.isdir(folder) else None
    return found


def checkpoint_fact(asked: str | os.PathLike[str] | bool | None, output_dir: str | None) -> str:
    """Return which checkpoint (`checkpoint_folder`) this rank would resume from, for ranks to compare."""
    if not asked:
        return "none"
    found = checkpoint_folder(asked, output_dir)
    if found is None:
        return "no checkpoint in output_dir"
    try:
        state = TrainerState.load_from_json(os.path.join(found, STATE_FILE))
    except (OSError, ValueError, TypeError):
        return f"no {STATE_FILE} in {os.path.basename(os.path.normpath(found))}"
    return f"the checkpoint of step {state.global_step}"


def write_layout(folder: str, layout: Layout) -> None:
    """Write the numbers of ranks and stages into a checkpoint's folder."""
    Path(folder, LAYOUT_FILE).write_text(json.dumps(layout) + "\n", encoding="utf-8")


@contextmanager
def random_states_by_data_rank(
    checkpoint: str, layout: Layout, process_index: int, data_rank: int
) -> Iterator[str]:
    """Yield a folder in which this rank finds its random states under the name that the Trainer reads.

    Args:
        checkpoint: the checkpoint's folder; a damaged ``parallel_layout.json`` is a `ParallelTrainingError`.
        layout: the layout of this training.
        process_index: this rank's index among all processes.
        data_rank: index of the part of the data that it trains on.
    """
    folder = Path(checkpoint)
    written = _layout_of(folder)
    source = folder / _random_file(written["processes"], data_rank * written["tensor_parallel_size"])
    name = _random_file(layout["processes"], process_index)
    if layout.items() <= written.items() or not source.is_file():
        yield checkpoint
        return
    with tempfile.TemporaryDirectory() as place:
        shutil.copyfile(source, Path(place, name))
        yield place


def _layout_of(folder: Path) -> Layout:
    file = folder / LAYOUT_FILE
    if file.is_file():
        text = read_text(str(file), _MAX_LAYOUT_BYTES, ParallelTrainingError)
        document = JsonDocument(text, "layout", ParallelTrainingError, str(file))
        found: Layout = document.read(Layout)
        document.finish()
        return {"pipeline_stage": 1, **found}
    processes = max(1, len(list(folder.glob("rng_state_*.pth"))))
    return {"processes": processes, "tensor_parallel_size": 1, "pipeline_stage": 1}


def _random_file(processes: int, process_index: int) -> str:
    return "rng_state.pth" if processes <= 1 else f"rng_state_{process_index}.pth"


Names = list[list[str]]
"""Names of the parameters of each group, in the optimizer's order."""


def names_of_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Names:
    """Return the names under which a model has an optimizer's parameters, all of which must be in it."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    missing = [
        list(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in by_id
    ]
    if missing:
        raise ValueError(
            f"the optimizer has {len(missing)} parameters (the first of shape {missing[0]}) that are not the "
            "model's: build it on the model that is trained, and divide the model before or together with it"
        )
    return [[by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def rebind(optimizer: torch.optim.Optimizer, names: Names, model: nn.Module) -> None:
    """Replace the parameters of an optimizer without state by the model's present ones of these names."""
    if any(optimizer.state.values()):
        raise ValueError("the optimizer has made steps on the whole model: give one without state")
    present = dict(model.named_parameters())
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [present[name] for name in of_group]
    optimizer.state.clear()


def full_optimizer_state(
    optimizer: torch.optim.Optimizer, patched: Patched, keeps: bool, progress: Progress | None = None
) -> dict[str, Any]:
    """Return an optimizer's ``state_dict`` with whole tensors on the CPU. Every rank must call it.

    Under FSDP2 the ranks of all data-parallel models must call it.

    Args:
        optimizer: PyTorch's optimizer of the patched model.
        patched: the divided model.
        keeps: whether this rank gets the result; other ranks only take part, and get an empty dict.
        progress: called with (bytes gathered, bytes in total) of this rank's tensors.
    """
    state, names = optimizer.state_dict(), names_of_parameters(patched.model, optimizer)
    parameters, partitions = dict(patched.model.named_parameters()), dict(partitions_of(patched.model))
    _reject_differences(state["state"], patched.group)
    own = entries_by_name(state, names)
    sizes = [
        sum(value.nbytes for value in entries.values() if isinstance(value, torch.Tensor))
        for entries in own.values()
    ]
    gathered = gathered_entries(own, parameters, partitions, patched.group)
    found = {name: entries for name, entries in with_progress(gathered, sizes, progress) if keeps}
    return numbered_state(state["param_groups"], names, found) if keeps else {}


def entries_by_name(state: Mapping[str, Any], names: Names) -> dict[str, Mapping[str, Any]]:
    """Return what an optimizer's ``state_dict`` has of each parameter; ``names`` are those of its groups."""
    return {
        name: state["state"][index]
        for of_group, settings in zip(names, state["param_groups"], strict=True)
        for index, name in zip(settings["params"], of_group, strict=True)
        if index in state["state"]
    }


def numbered_state(
    groups: Sequence[Mapping[str, Any]], whole: Names, found: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a ``state_dict`` of an undivided model's optimizer, which numbers its parameters and names them.

    Args:
        groups: settings of the groups.
        whole: names of all parameters of each group.
        found: whole entries by a parameter's name.
    """
    full: dict[str, Any] = {"state": {}, "param_groups": []}
    count = 0
    for of_group, settings in zip(whole, groups, strict=True):
        numbers = list(range(count, count := count + len(of_group)))
        full["param_groups"].append({**settings, "params": numbers, "param_names": list(of_group)})
        named = zip(numbers, of_group, strict=True)
        full["state"] |= {number: found[name] for number, name in named if name in found}
    return full


def own_optimizer_state(
    optimizer: torch.optim.Optimizer, patched: Patched, full: Mapping[str, Any]
) -> dict[str, Any]:
    """Return this rank's ``state_dict`` for an optimizer of the patched model, from a whole one."""
    names, partitions = names_of_parameters(patched.model, optimizer), dict(partitions_of(patched.model))
    parameters, rank = dict(patched.model.named_parameters()), patched.group.rank()
    return own_state(full, names, names, parameters, partitions, rank)


def own_state(
    full: Mapping[str, Any],
    names: Names,
    whole: Names,
    parameters: Mapping[str, torch.Tensor],
    partitions: Mapping[str, Partition],
    rank: int,
) -> dict[str, Any]:
    """Return this rank's ``state_dict`` for an optimizer, from one with whole tensors.

    Args:
        full: the whole state. Its parameters are matched by name, if it has names (``param_names``).
        names: this rank's parameters of each group.
        whole: the parameters of each group on all ranks, in the order of a state without names.
        parameters: this rank's, by name.
        partitions: how parameters are divided; of those that are not there, every rank has the whole.
        rank: this rank in the tensor-parallel group.

    Raises:
        ValueError: a group of ``full`` has other parameters, or they have other shapes.
    """
    own: dict[str, Any] = {"state": {}, "param_groups": []}
    count = 0
    for of_group, of_all, saved in zip(names, whole, full["param_groups"], strict=True):
        size, order = len(saved["params"]), saved.get("param_names", of_all)
        number_of = dict(zip(order, saved["params"], strict=True)) if size == len(of_all) else {}
        if unknown := [name for name in of_group if name not in number_of]:
            expected = f"expected {len(of_all)} with {unknown[0]}"
            raise ValueError(f"optimizer.pt: a group of {size} parameters, {expected}")
        for index, name in enumerate(of_group, count):
            entries = full["state"].get(number_of[name])
            if entries is not None:
                parameter, partition = parameters[name], partitions.get(name)
                own["state"][index] = {
                    key: _own_part(value, f"{name}: {key}", parameter, partition, rank)
                    for key, value in entries.items()
                }
        numbers = list(range(count, count := count + len(of_group)))
        settings = {key: value for key, value in saved.items() if key != "param_names"}
        own["param_groups"].append({**settings, "params": numbers})
    return own


def gathered_entries(
    own: Mapping[str, Mapping[str, Any]],
    parameters: Mapping[str, torch.Tensor],
    partitions: Mapping[str, Partition],
    group: dist.ProcessGroup | None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield parameters' names and whole entries, on the CPU; every rank of the group must read all.

    Args:
        own: this rank's entries by a parameter's name: tensors of its shape, or numbers.
        parameters, partitions: see `own_state`.
        group: tensor-parallel group; ``None``: nothing is divided.
    """
    for name, entries in own.items():
        shape, partition = parameters[name].shape, partitions.get(name)
        yield (
            name,
            {
                key: _gathered(value, f"{name}: {key}", shape, partition, group)
                for key, value in entries.items()
            },
        )


def _gathered(
    value: Any, what: str, shape: torch.Size, partition: Partition | None, group: dist.ProcessGroup | None
) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = whole_over_data(value.detach())
    if partition is None or group is None or value.dim() == 0:
        return value.cpu().clone()
    if value.shape != shape:
        raise ValueError(f"{what}: expected the parameter's shape {list(shape)}, found {list(value.shape)}")
    return whole_of_ranks(value, partition, group).cpu().clone()


def _own_part(value: Any, what: str, parameter: torch.Tensor, partition: Partition | None, rank: int) -> Any:
    """Return a rank's part of a whole entry."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    shape = parameter.shape
    if partition is not None:
        if not partition.fits(value.shape):
            expected = f"{partition.full_size} in dim {partition.dim}"
            raise ValueError(f"{what}: expected {expected}, found {list(value.shape)}")
        value = partition.part(value, rank)
        if value.shape != shape:
            raise ValueError(f"{what}: expected a part of shape {list(shape)}, found {list(value.shape)}")
    return sharded_as(value, parameter) if value.shape == shape else value  # a shard under FSDP2


def _reject_differences(state: Mapping[int, Mapping[str, Any]], group: dist.ProcessGroup) -> None:
    """Raise on every rank if ranks would gather different tensors, and so wait for each other for ever."""
    own = [(index, sorted(entries)) for index, entries in sorted(state.items())]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    if any(of_rank != own for of_rank in found):
        counts = [len(of_rank) for of_rank in found]
        raise RuntimeError(f"ranks have optimizer states of different parameters (numbers: {counts})")
