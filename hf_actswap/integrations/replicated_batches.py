"""Tells Accelerate that the ranks of a group train on the same batch: data loaders, metrics, token counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import ParallelismConfig
from accelerate.utils import recursively_apply

from ..parallel.mesh import ParallelMesh


def read_by_data_rank(accelerator: Any, mesh: ParallelMesh) -> None:
    """Let data loaders that ``accelerator`` prepares from now on give the ranks of a group the same batches.

    Accelerate does so for a mesh with a dim ``tp``. The mesh is set on this accelerator, not in Accelerate's
    state, which the whole process shares: it would change the loaders of a later training too. Accelerate
    assumes that the ranks of a group have consecutive numbers. In a pipeline they have not, so Accelerate is
    given the process index that this rank would have if they had.
    """
    accelerator._prepare_device_mesh = lambda: mesh.device_mesh
    index = mesh.data_parallel_rank * mesh.tensor_parallel_size + mesh.tensor_parallel_rank

    def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
        with patched_attribute(accelerator.state, "process_index", index):
            return type(accelerator).prepare_data_loader(accelerator, *args, **kwargs)

    accelerator.prepare_data_loader = prepare_data_loader
    if accelerator.dataloader_config.dispatch_batches is None:
        # By default rank 0 reads an IterableDataset for all. With a tp dim Accelerate has no data axis there,
        # and would send one batch to every rank.
        accelerator.dataloader_config.dispatch_batches = False


def gather_one_of_each(accelerator: Any, mesh: ParallelMesh) -> None:
    """Let ``accelerator.gather_for_metrics`` return each sample once, not once per rank that computed it."""
    original: Callable[..., Any] = accelerator.gather_for_metrics
    first_ranks = mesh.device_mesh.mesh[:, 0].tolist()

    def one_of_each(gathered: torch.Tensor) -> torch.Tensor:
        """Return the samples of the first rank of each group: ``[ranks / tp * n, ...]``.

        Args:
            gathered: samples of all ranks, ``[ranks * n, ...]``.
        """
        by_rank = gathered.reshape(accelerator.num_processes, -1, *gathered.shape[1:])
        return by_rank[first_ranks].flatten(0, 1)

    def gather(data: Any) -> Any:
        return recursively_apply(one_of_each, type(accelerator).gather(accelerator, data))

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object or not _all_tensors(input_data):
            mine = input_data if mesh.tensor_parallel_rank == 0 else type(input_data)()
            return original(mine, use_gather_object=True)
        with patched_attribute(accelerator, "gather", gather):
            return original(input_data)

    accelerator.gather_for_metrics = gather_for_metrics


@contextmanager
def parallelism_config_set(accelerator: Any, tensor_parallel_size: int) -> Iterator[None]:
    """Within the block, Accelerate's ``parallelism_config`` says how many ranks train on the same batch.

    The Trainer of transformers 5.17 reads only this when it counts tokens and scales the loss. It is not set
    for longer, because Accelerate would then prepare, clip and save in its own way.
    """
    state = accelerator.state
    before = state.parallelism_config
    state.parallelism_config = ParallelismConfig(tp_size=tensor_parallel_size)
    try:
        yield
    finally:
        state.parallelism_config = before


@contextmanager
def patched_attribute(of: Any, name: str, answer: Any) -> Iterator[None]:
    """Within the block, the attribute ``name`` (a method or value) of the object ``of`` is ``answer``."""
    before = vars(of).get(name)
    setattr(of, name, answer)
    try:
        yield
    finally:
        if before is None:
            delattr(of, name)
        else:
            setattr(of, name, before)


def _all_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
