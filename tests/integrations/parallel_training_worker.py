"""What each process of the parallel training tests runs, by number of processes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import MixtralForCausalLM, Trainer

import hf_actswap
from hf_actswap import ActSwapCallback, ActSwapTrainer
from hf_actswap.config import ParallelConfig
from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients
from hf_actswap.parallel.mesh import build_mesh
from hf_actswap.parallel.patch_model import patch_model
from tests.integrations.parallel_hub import published
from tests.integrations.parallel_runs import (
    OrderedStockTrainer,
    OrderedTrainer,
    Rows,
    Run,
    make,
    parallel,
    tiny_llama,
    tiny_mixtral,
    told,
    train,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2},
    "small norm": {"max_grad_norm": 0.01},
    "no clip": {"max_grad_norm": 0.0},
    "weight decay, one epoch": {
        "max_steps": -1,
        "num_train_epochs": 1.0,
        "weight_decay": 0.1,
        "per_device_train_batch_size": 10,
    },
}
SWAP_AND_RECOMPUTE = {
    "swap_config": {
        "swap": True,
        "op_swap": [{"op_name": "attention", "backward_prefetch": 20, "layers": [0, 2]}],
    },
    "recompute_config": {"select_recompute": {"feed_forward": [0, 1]}},
}
SMOOTHING = {"label_smoothing_factor": 0.1}
SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}


TILED = {"tile_config": {"loss": {"tokens": 7}}}
"""A tile ends inside of a sequence."""


def trained(
    settings: str,
    folder: Path,
    size: int,
    data_parallel_size: int = 1,
    sections: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> Run:
    """A training of ours whose global batch is the same for every number of processes."""
    asked = {"per_device_train_batch_size": 4, **SETTINGS[settings], **more}
    asked["per_device_train_batch_size"] //= data_parallel_size
    config = parallel(size, **sections)
    return train(make(config, folder, eval_strategy="steps", eval_steps=2, **asked))


def saving(
    folder: Path,
    size: int,
    name: str,
    resume: str | None = None,
    kind: Any = ActSwapTrainer,
    **more: Any,
) -> Run:
    """Train with checkpoints at steps 2 and 4, in the shuffled order that the Trainer chooses."""
    place = folder / name
    # By this strange measure the first checkpoint is the best, and so not the last.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = make(parallel(size), place, kind, **{**SAVING, **best, "learning_rate": 0.05, **more})
    run = train(trainer, None if resume is None else str(folder / resume))
    trainer.save_model(str(place / "last"))
    return run


def saving_experts(folder: Path, size: int, name: str, resume: str | None = None) -> Run:
    """The same of a model with routed experts, whose choices a larger step would make chaotic.

    In one process the plain Trainer resumes nothing of the experts (see `OwnNamesHook`): there the
    model is made from the checkpoint.
    """
    model: Any = tiny_mixtral()
    if resume is not None and size == 1:
        model = MixtralForCausalLM.from_pretrained(str(folder / resume))
    how = {"learning_rate": 0.01, "load_best_model_at_end": False, "model": model}
    return saving(folder, size, name, resume, **how)


# --- two processes ---------------------------------------------------------------------------------------


def swapped(folder: Path) -> dict[str, Any]:
    run = train(make(parallel(2, **SWAP_AND_RECOMPUTE), folder / "swapped"))
    plain = train(make(parallel(2), folder / "swapped"))
    differences = [name for name, value in run.weights.items() if not torch.equal(value, plain.weights[name])]
    return {"losses": (run.losses, plain.losses), "norms": (run.norms, plain.norms), "weights": differences}


IN_CHUNKS = {"parallel_config": {"tensor_parallel_size": 2}, "stream_config": {"tokens": 4}}


def in_chunks(folder: Path) -> Run:
    """Heads are divided, and the sequence is streamed."""
    return trained("plain", folder / "runs", 2, sections=IN_CHUNKS)


def rejections(folder: Path) -> dict[str, str]:
    """What is said, by what was asked, before the first step."""
    two = parallel(2)
    found = {}
    for name, asked in {
        "stock": {"kind": Trainer, "torch_compile": True, "torch_compile_backend": "eager"},
        "save_strategy": {"save_strategy": "steps"},
        "torch_compile": {"torch_compile": True, "torch_compile_backend": "eager"},
        "auto_find_batch_size": {"auto_find_batch_size": True},
        "optim": {"optim": "adafactor"},
    }.items():
        found[name] = told(
            functools.partial(make, two, folder / "rejected", **{"kind": ActSwapTrainer, **asked})
        )
    late = make(None, folder / "rejected", Trainer, callbacks=[])
    late.add_callback(ActSwapCallback(two))
    found["late"] = told(late.train)
    found["three ranks"] = told(lambda: make(parallel(3), folder / "rejected"))
    found["no room"] = told(lambda: make(parallel(4), folder / "rejected"))
    used = tiny_llama()
    stepped = torch.optim.AdamW(used.parameters(), lr=0.1)
    used(**{key: value[None] for key, value in Rows()[1].items()}).loss.backward()
    stepped.step()
    foreign = torch.optim.AdamW(tiny_llama().parameters(), lr=0.1)
    for name, model, optimizer in (
        ("foreign optimizer", tiny_llama(), foreign),
        ("used optimizer", used, stepped),
    ):
        found[name] = told(lambda model=model, optimizer=optimizer: with_optimizer(folder, model, optimizer))
    return found


def differing_ranks(folder: Path) -> dict[str, str]:
    """Ranks that were given different things, and batches that differ."""
    rank = dist.get_rank()
    found = {"seed": told(lambda: make(parallel(2), folder / "differ", seed=rank, ddp_timeout=10))}
    found["batch"] = told(lambda: train(make(parallel(2), folder / "differ", data=Rows(seed=rank))))
    return found


def missing_rank(folder: Path) -> str:
    """Rank 1 does not come."""
    if dist.get_rank() == 1:
        return ""
    return told(lambda: make(parallel(2), folder / "missing", ddp_timeout=2))


def behind_the_back(folder: Path) -> dict[str, str]:
    """A model that was patched by hand, and what trains it knows nothing of it."""
    group = build_mesh(2).tensor_parallel_group
    model = tiny_llama()
    patch_model(model, ParallelConfig(2, True), group)
    stock = make(None, folder / "behind", Trainer, model, callbacks=[])
    found = {"stock": told(stock.train)}
    make(None, folder / "behind", Trainer, callbacks=[]).train()  # a whole model is trained as ever
    for name, sums in (("loop", False), ("loop with sum", True)):
        model = tiny_llama()
        patch_model(model, ParallelConfig(2, True), group)
        found[name] = told(lambda model=model, sums=sums: two_steps(model, group if sums else None))
    return found


def two_steps(model: Any, group: dist.ProcessGroup | None) -> None:
    """Two steps of two micro-batches and an evaluation between them; tagged gradients summed or not."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batch = {key: value[None] for key, value in Rows()[1].items()}
    for _ in range(2):
        for _ in range(2):
            model(**batch).loss.backward()
        with torch.no_grad():
            model(**batch)
        if group is not None:
            allreduce_sequence_parallel_gradients(optimizer, group)
        optimizer.step()
        optimizer.zero_grad()


def with_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> Any:
    kind = functools.partial(OrderedTrainer, optimizers=(optimizer, None))
    return make(parallel(2), folder / "given", kind, model)


def given_optimizer(folder: Path, size: int) -> Run:
    """An optimizer that was built on the whole model is given its parts."""
    model = tiny_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kind = functools.partial(OrderedTrainer, optimizers=(optimizer, None))
    return train(make(parallel(size), folder / "given", kind, model))


def supervised(folder: Path, size: int, data_parallel_size: int = 1) -> dict[str, Any]:
    """Only where TRL is installed."""
    module = importlib.import_module("tests.integrations.parallel_supervised")
    found: dict[str, Any] = module.supervised(folder, size, data_parallel_size)
    return found


def own_loop(folder: Path, size: int, clips: bool = True, data_parallel_size: int = 1) -> dict[str, Any]:
    """A loop of Accelerate's: two micro-batches a step, saved and loaded."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    prepared = hf_actswap.prepare(accelerator, model, parallel(size, **SWAP_AND_RECOMPUTE), optimizer)
    model, optimizer = prepared.model, prepared.optimizer
    loader = accelerator.prepare(torch.utils.data.DataLoader(Rows(16), batch_size=2 // data_parallel_size))
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if clips and accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    state = prepared.optimizer_state_dict()
    weights = prepared.parallel.whole_weights(True) if prepared.parallel else dict(model.state_dict())
    prepared.save_pretrained(str(folder / f"loop {size}"))
    rejected = told(lambda: accelerator.save_state(str(folder / "state"))) if prepared.parallel else ""
    prepared.load_optimizer_state_dict(torch.load(saved(folder, state), weights_only=True))
    return {"losses": losses, "norms": norms, "state": state, "weights": weights, "rejected": rejected}


def saved(folder: Path, state: dict[str, Any]) -> Path:
    """Write an optimizer's state on the main process, for all."""
    file = folder / "loop optimizer.pt"
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(state, file)
    if dist.is_initialized():
        dist.barrier()
    return file


def metrics(
    folder: Path, size: int, sections: Mapping[str, Any] = MappingProxyType({}), **more: Any
) -> dict[str, Any]:
    """Evaluation and prediction see each sample once."""
    trainer = make(parallel(size, **sections), folder / "metrics", **more)
    predicted = trainer.predict(trainer.eval_dataset)
    found = trainer.evaluate()
    return {"loss": found["eval_loss"], "shape": predicted.predictions.shape, "labels": predicted.label_ids}


def evaluated(folder: Path, size: int, data_parallel_size: int = 1) -> dict[str, float]:
    """The loss of an evaluation, by numbers of samples and of samples in all data ranks' batches."""
    found = {}
    for samples, at_once in ((9, 4), (9, 2), (7, 4), (3, 4), (12, 4)):
        asked = {"per_device_eval_batch_size": at_once // data_parallel_size}
        trainer = make(parallel(size), folder / "evaluated", **asked)
        name = f"{samples} by {at_once}"
        found[name] = trainer.evaluate(Rows(samples, seed=2))["eval_loss"]
    return found


def setting(name: str, *sizes: int) -> Callable[[Path], Run]:
    return lambda folder: trained(name, folder / "runs", *sizes)


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """The rows without a length or an index."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows = Rows()
        return iter([rows[index] for index in range(len(rows))])


def streamed(folder: Path, size: int, data_parallel_size: int = 1) -> Run:
    batch_size = 4 // data_parallel_size
    data = Stream()
    return train(make(parallel(size), folder / "streamed", per_device_train_batch_size=batch_size, data=data))


def rejections_of_four(folder: Path) -> dict[str, str]:
    two = parallel(2)
    dispatched = {"accelerator_config": {"dispatch_batches": True}}
    return {
        "dispatch": told(lambda: make(two, folder / "rejected", data=Stream(), **dispatched)),
        "three ranks": told(lambda: make(parallel(3), folder / "rejected")),
    }


def plain_ddp(settings: str, folder: Path) -> Run:
    """Two whole models under the plain Trainer: what two models of two ranks are compared with."""
    asked = {"per_device_train_batch_size": 4, **SETTINGS[settings]}
    asked["per_device_train_batch_size"] //= 2
    evaluates = {"eval_strategy": "steps", "eval_steps": 2}
    return train(make(None, folder, OrderedStockTrainer, callbacks=[], **evaluates, **asked))


TWO: dict[str, Callable[[Path], Any]] = {
    **{f"two {name}": setting(name, 2) for name in SETTINGS},
    "swapped": swapped,
    "in chunks": in_chunks,
    "bf16": lambda folder: trained("plain", folder / "runs", 2, bf16=True),
    "resumed 1 to 2": lambda folder: saving(folder, 2, "resumed 1 to 2", "one/checkpoint-2"),
    "saving": lambda folder: saving(folder, 2, "two"),
    "rejections": rejections,
    "behind the back": behind_the_back,
    "given optimizer": lambda folder: given_optimizer(folder, 2),
    "supervised": lambda folder: supervised(folder, 2),
    "own loop": lambda folder: own_loop(folder, 2),
    "own loop without clip": lambda folder: own_loop(folder, 2, clips=False),
    "metrics": lambda folder: metrics(folder, 2),
    "metrics in tiles": lambda folder: metrics(folder, 2, TILED),
    "tiled accumulation": lambda folder: trained("accumulation", folder / "runs", 2, sections=TILED),
    "tiled smoothing": lambda folder: trained("plain", folder / "runs", 2, sections=TILED, **SMOOTHING),
    "published": lambda folder: published(folder, dist.get_rank()),
    "differing ranks": differing_ranks,
    "missing rank": missing_rank,
}

SLOW = (
    *("two no clip", "two weight decay, one epoch", "own loop without clip"),
    *("metrics in tiles", "tiled smoothing", "two small norm"),
)
"""Cases of two ranks that a quick launch leaves out."""
TWO_QUICK = {name: case for name, case in TWO.items() if name not in SLOW}

STOCK: dict[str, Callable[[Path], Any]] = {
    **{f"stock {name}": (lambda folder, name=name: plain_ddp(name, folder / "stock")) for name in SETTINGS},
    "saving experts": lambda folder: saving_experts(folder, 2, "experts two"),
}

FOUR: dict[str, Callable[[Path], Any]] = {
    **{f"two by two {name}": setting(name, 2, 2) for name in SETTINGS},
    "two by two streamed": lambda folder: streamed(folder, 2, 2),
    "two by two metrics": lambda folder: metrics(folder, 2, per_device_eval_batch_size=2),
    "two by two, saving": lambda folder: saving(folder, 2, "two by two"),
    "two by two evaluated": lambda folder: evaluated(folder, 2, 2),
    "four": lambda folder: trained("plain", folder / "runs", 4),
    "resumed 2x2": lambda folder: saving(folder, 2, "two by two again", "two by two/checkpoint-2"),
    "resumed 2 to 4": lambda folder: saving(folder, 4, "four", "two/checkpoint-2"),
    "experts 2 to 4": lambda folder: saving_experts(folder, 4, "experts four", "experts two/checkpoint-2"),
    "supervised": lambda folder: supervised(folder, 2, 2),
    "own loop": lambda folder: own_loop(folder, 2, data_parallel_size=2),
    "rejections of four": rejections_of_four,
}
