"""Trainings of a model that several ranks hold, against one process; one launch per number of processes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.utils.hub as transformers_hub
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, MixtralForCausalLM, Trainer

import hf_actswap
from hf_actswap import ActSwapCallback, ActSwapTrainer
from hf_actswap.config import ParallelConfig
from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients
from hf_actswap.parallel.mesh import build_mesh
from hf_actswap.parallel.patch_model import patch_model
from hf_actswap.releases import loss_is_scaled_by_data_ranks
from tests.hub_server import TOKEN, HubServer, Repository, hub_server
from tests.integrations.parallel_runs import (
    STEPS,
    OrderedStockTrainer,
    OrderedTrainer,
    Rows,
    Run,
    make,
    parallel,
    tiny_llama,
    tiny_mixtral,
    train,
)
from tests.processes import launch_trainers, result, told
from tests.quick_cases import runs_slow_cases, slow_among

NAME = "org/trained"
CHECKPOINTS = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}


class PatientTrainer(ActSwapTrainer):
    """Waits for each upload, on the rank that makes it; the other ones go on into the next collective."""

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        self._finish_current_push()


@contextmanager
def own_hub(folder: Path, rank: int) -> Iterator[HubServer]:
    """A Hub that only this process knows, and whose commits hold what was uploaded for them alone."""
    put = Repository.put

    def put_alone(repository: Repository, files: Any, branch: str = "main", tag: str | None = None) -> str:
        repository.refs.pop(branch, None)
        return put(repository, files, branch, tag)

    with pytest.MonkeyPatch.context() as patch, hub_server(patch, str(folder / f"cache {rank}")) as server:
        patch.setattr(Repository, "put", put_alone)
        patch.setattr(transformers_hub, "_hf_api", None)  # it would know the Hub of before
        yield server


def published(folder: Path, rank: int) -> dict[str, Any]:
    """Publish in three ways: at checkpoints, with `save_model`, and by a call of `push_to_hub`."""
    with own_hub(folder, rank) as server:
        account = {"hub_model_id": NAME, "hub_token": TOKEN}
        saving = {**CHECKPOINTS, **BEST, "learning_rate": 0.05, **account}
        every = {"push_to_hub": True, "hub_strategy": "every_save"}
        trainer = make(parallel(2), folder / "publishing", PatientTrainer, **every, **saving)
        trainer.train()
        trainer.save_model(str(folder / "elsewhere"))  # publishes, too
        trainer.push_to_hub("Asked for")
        asked = make(parallel(2), folder / "publishing once", OrderedTrainer, **account)
        run = train(asked)
        asked.push_to_hub("Asked for alone")
        write(server, folder / "published")
        messages = [message["summary"] for message in server.messages]
        return {"messages": messages, "requests": len(server.requests), "run": run}


def write(server: HubServer, folder: Path) -> None:
    """Write what was uploaded for each commit into a folder of its message."""
    if not server.messages:
        return
    _, *commits = server.repositories[NAME].commits.values()  # the first came with the repository
    for message, files in zip(server.messages, commits, strict=True):
        for name, content in files.items():
            file = folder / message["summary"] / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


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


IN_CHUNKS = {"parallel_config": {"tensor_parallel_size": 2}, "stream_config": {"tokens": 4}}
"""Heads are divided, and the sequence is streamed."""


def with_loss_of_older_trl(args: Any, **given: Any) -> Trainer:
    args.loss_type = "chunked_nll"
    return ActSwapTrainer(args=args, **given)


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
        "loss_type": {"kind": with_loss_of_older_trl},
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
    return told(lambda: make(parallel(2), folder / "missing", ddp_timeout=1))


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
    "swapped": lambda folder: train(make(parallel(2, **SWAP_AND_RECOMPUTE), folder / "swapped")),
    "in chunks": lambda folder: trained("plain", folder / "runs", 2, sections=IN_CHUNKS, max_steps=2),
    "bf16": lambda folder: train(make(parallel(2), folder / "runs", bf16=True, max_steps=2)),
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
    "tiled accumulation": lambda folder: trained(
        "accumulation", folder / "runs", 2, sections=TILED, max_steps=2
    ),
    "tiled smoothing": lambda folder: trained("plain", folder / "runs", 2, sections=TILED, **SMOOTHING),
    "published": lambda folder: published(folder, dist.get_rank()),
    "differing ranks": differing_ranks,
    "missing rank": missing_rank,
}

SLOW = (
    *("two no clip", "two weight decay, one epoch", "own loop without clip"),
    *("metrics in tiles", "tiled smoothing", "two small norm", "two accumulation"),
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


WORKER = "tests.integrations.test_parallel_training"
CLOSE = {"rel": 1e-5}
TRAINED = ["plain", "accumulation", "small norm", "no clip"]
PUBLISHED = {
    **{f"Training in progress, step {step}": f"checkpoint-{step}" for step in (2, 4)},
    **{"Model save": "last", "Asked for": "last"},
}
NAMED = "hf_actswap.ActSwapTrainer in place of Trainer"

pytestmark = [
    pytest.mark.essential,
    pytest.mark.dist,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not loss_is_scaled_by_data_ranks(), reason="it needs transformers 5.16"),
]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training in this process, without interruption, with checkpoints."""
    folder = tmp_path_factory.mktemp("parallel")
    torch.save(saving(folder, 1, "one"), folder / "one.0.pt")
    return folder


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, one: Path) -> Path:
    return launch_trainers(f"{WORKER}:{'TWO' if runs_slow_cases(request) else 'TWO_QUICK'}", one, 2, 280)


@pytest.fixture(scope="module")
def four(two: Path) -> Path:
    launch_trainers(f"{WORKER}:STOCK", two, 2, 120)
    return launch_trainers(f"{WORKER}:FOUR", two, 4, 280)


@functools.cache
def alone(name: str, **more: Any) -> Run:
    return trained(name, Path("runs"), 1, **more)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_same(found: Run, expected: Run, steps: int = STEPS, evaluates: bool = True) -> None:
    assert len(found.losses) == len(found.norms) == steps
    assert found.losses == pytest.approx(expected.losses, **CLOSE)
    assert found.norms == pytest.approx(expected.norms, **CLOSE)
    if evaluates:
        assert found.evaluations
        assert found.evaluations == pytest.approx(expected.evaluations, **CLOSE)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, rtol=1e-4, atol=2e-6, msg=name)
    assert found.drift == 0.0


@pytest.mark.parametrize("name", slow_among([*TRAINED, "weight decay, one epoch"], SLOW, "two "))
def test_two_ranks_train_as_one(name: str, two: Path) -> None:
    for rank in (0, 1):
        assert_same(result(two, f"two {name}", rank), alone(name))


def test_head_and_loss_in_tiles_train_as_one(two: Path) -> None:
    assert_same(result(two, "tiled accumulation"), alone("accumulation", max_steps=2), steps=2)


@pytest.mark.slow
def test_label_smoothing_in_tiles_trains_as_one(two: Path) -> None:
    smoothed = alone("plain", **SMOOTHING)
    assert smoothed.losses != alone("plain").losses
    assert_same(result(two, "tiled smoothing"), smoothed)


def test_autocast_is_not_lost(two: Path) -> None:
    found = result(two, "bf16")
    plain = result(two, "two plain")
    assert found.losses == pytest.approx(plain.losses[:2], rel=5e-3)
    assert found.losses != plain.losses[:2]


def test_swap_and_recompute_change_no_digit(two: Path) -> None:
    found, plain = result(two, "swapped"), result(two, "two plain")
    assert len(found.losses) == STEPS
    assert (found.losses, found.norms) == (plain.losses, plain.norms)
    assert all(torch.equal(value, plain.weights[name]) for name, value in found.weights.items())


def test_streamed_in_chunks(two: Path) -> None:
    assert_same(result(two, "in chunks"), alone("plain", max_steps=2), steps=2)


def test_an_optimizer_of_the_whole_model_is_given_its_parts(two: Path) -> None:
    assert_same(result(two, "given optimizer"), given_optimizer(Path("given"), 1), evaluates=False)


@pytest.mark.parametrize("name", slow_among(["metrics", "metrics in tiles"], SLOW))
def test_evaluation_and_prediction_see_each_sample_once(name: str, two: Path) -> None:
    found, expected = result(two, name), metrics(Path("metrics"), 1)
    assert found["shape"] == expected["shape"]
    assert found["loss"] == pytest.approx(expected["loss"], **CLOSE)
    assert (found["labels"] == expected["labels"]).all()


def test_supervised_fine_tuning_with_adapters(two: Path) -> None:
    pytest.importorskip("trl", reason="TRL's Trainer is tested where it is installed")
    found, expected = result(two, "supervised"), supervised(Path("supervised"), 1)
    assert_same(found["run"], expected["run"], steps=3)
    assert found["log"].keys() == expected["log"].keys()
    for name, values in expected["log"].items():
        assert values, name
        assert found["log"][name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.parametrize("clips", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_loop_of_accelerates(clips: bool, two: Path) -> None:
    expected = own_loop(Path(), 1, clips)
    found = result(two, "own loop" if clips else "own loop without clip")
    assert found["losses"] == pytest.approx(expected["losses"], **CLOSE)
    assert found["norms"] == pytest.approx(expected["norms"], **CLOSE)
    assert len(found["norms"]) == (4 if clips else 0)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=2e-6)
    for index, entries in expected["state"]["state"].items():
        assert found["state"]["state"][index]["exp_avg"].shape == entries["exp_avg"].shape
    assert "Use save_pretrained, optimizer_state_dict and load_optimizer_state_dict" in found["rejected"]


# --- checkpoints -----------------------------------------------------------------------------------------


def logits(folder: Path) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=Rows(3, seed=5).ids).logits
    return found


@pytest.mark.parametrize("name", ["checkpoint-2", "checkpoint-4", "last"])
def test_what_two_ranks_save_is_loaded_by_one(name: str, two: Path) -> None:
    found = logits(two / "two" / name)
    torch.testing.assert_close(found, logits(two / "one" / name), rtol=1e-3, atol=1e-4)
    names = {path.name for path in (two / "two" / name).iterdir()}
    assert names - {"parallel_layout.json", "rng_state_0.pth", "rng_state_1.pth"} == {
        path.name for path in (two / "one" / name).iterdir()
    } - {"parallel_layout.json", "rng_state.pth"}


def test_the_best_model_is_the_one_that_is_left(two: Path) -> None:
    evaluations = result(two, "saving").evaluations
    assert max(evaluations) == evaluations[0]  # after step 2
    assert torch.equal(logits(two / "two" / "last"), logits(two / "two" / "checkpoint-2"))


def test_the_optimizer_is_saved_whole(two: Path) -> None:
    of_two, of_one = (
        torch.load(two / name / "checkpoint-2" / "optimizer.pt", weights_only=True) for name in ("two", "one")
    )
    assert of_two["state"].keys() == of_one["state"].keys()
    for index, entries in of_one["state"].items():
        for key, value in entries.items():
            torch.testing.assert_close(of_two["state"][index][key], value, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("message", PUBLISHED)
def test_what_two_ranks_publish_is_loaded_by_one(message: str, two: Path) -> None:
    found = logits(two / "published" / message)
    torch.testing.assert_close(found, logits(two / "one" / PUBLISHED[message]), rtol=1e-3, atol=1e-4)


def test_one_rank_publishes(two: Path) -> None:
    found = result(two, "published")
    steps = [f"Training in progress, step {step}" for step in (2, 4, 5)]
    assert found["messages"] == [*steps, "Model save", "Asked for", "Asked for alone"]
    assert_same(found["run"], alone("plain"), evaluates=False)
    weights = load_file(two / "published" / "Asked for alone" / "model.safetensors")
    assert weights.keys() == alone("plain").weights.keys() - {"lm_head.weight"}  # tied
    for name, value in weights.items():
        torch.testing.assert_close(value, found["run"].weights[name], rtol=0, atol=0)
    other = result(two, "published", rank=1)
    assert (other["messages"], other["requests"]) == ([], 0)


def test_resuming_one_on_two(two: Path) -> None:
    assert_same(result(two, "resumed 1 to 2"), result(two, "one"))


@pytest.mark.parametrize("kind", [ActSwapTrainer, Trainer])
def test_resuming_two_on_one(kind: type[Trainer], two: Path) -> None:
    found = saving(two, 1, f"two to one {kind.__name__}", "two/checkpoint-2", kind)
    assert_same(found, result(two, "one"))


def test_the_saved_groups_name_their_parameters(two: Path) -> None:
    state = torch.load(two / "two" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    names = [group["param_names"] for group in state["param_groups"]]
    assert names[1] == [name for name, value in result(two, "one").weights.items() if value.dim() == 1]
    assert len(names[0]) + len(names[1]) == len(state["state"])


# --- what is rejected ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stock", f"Trainer: expected hf_actswap.ActSwapTrainer, found Trainer. A callback cannot save or "
         f"load a model that several ranks hold: use {NAMED}"),
        ("stock", "torch_compile: expected a setting that works with tensor_parallel_size"),
        ("torch_compile", "torch_compile: expected a setting that works with"),
        ("auto_find_batch_size", "auto_find_batch_size: expected"),
        ("optim", "optim: expected a setting that works with tensor_parallel_size above 1, "
         "found adafactor."),
        ("loss_type", "found chunked_nll. That loss reads the head's whole weight, which is divided: set "
         'loss_type="nll".'),
        ("save_strategy", "nothing was raised"),
        ("late", "parallel_config: expected a callback of the Trainer's constructor, found add_callback"),
        ("three ranks", "parallel_config.tensor_parallel_size: expected at most 2, the number of processes"),
        ("no room", "Start with: accelerate launch --multi_gpu --num_processes 4 "),
        ("foreign optimizer", "that are not the model's: build it on the model that is trained"),
        ("used optimizer", "the optimizer has made steps on the whole model"),
    ],
)  # fmt: skip
def test_rejections_before_the_first_step(name: str, said: str, two: Path) -> None:
    for rank in (0, 1):
        assert said in result(two, "rejections", rank)[name]


def test_a_model_patched_behind_a_trainers_back(two: Path) -> None:
    for rank in (0, 1):
        found = result(two, "behind the back", rank)
        assert found["stock"].startswith("PatchedModelError: DistributedDataParallel covers ranks [0, 1]")
        assert "hf_actswap.ActSwapTrainer" in found["stock"]
        assert found["loop"].startswith("UnsummedGradientError: 7 tagged parameters were changed by a step")
        assert found["loop with sum"] == "nothing was raised"


def test_ranks_that_differ_hear_it(two: Path) -> None:
    for rank in (0, 1):
        found = result(two, "differing ranks", rank)
        assert "seed: expected the same on all ranks, found 0 on rank 0; 1 on rank 1" in found["seed"]
        assert "batch: expected the same on all ranks, found" in found["batch"]


def test_a_missing_rank_is_named(two: Path) -> None:
    said = result(two, "missing rank", 0)
    assert "expected answers from all of ranks 0, 1 within 1 s, found none from rank 1." in said


# --- four processes ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_two_models_of_two_ranks_train_and_evaluate_as_one(name: str, four: Path) -> None:
    for rank in range(4):
        assert_same(result(four, f"two by two {name}", rank), alone(name, per_device_eval_batch_size=6))


@pytest.mark.slow
def test_samples_that_fill_the_last_batch_do_not_count(four: Path) -> None:
    expected = evaluated(Path("evaluated"), 1)
    for rank in range(4):
        assert result(four, "two by two evaluated", rank) == pytest.approx(expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRAINED, "weight decay, one epoch"])
def test_two_models_of_two_ranks_train_as_two_plain_ones(name: str, four: Path) -> None:
    assert_same(result(four, f"two by two {name}"), result(four, f"stock {name}"), evaluates=False)


@pytest.mark.slow
def test_other_data_on_four(four: Path) -> None:
    assert_same(result(four, "two by two streamed"), streamed(Path("streamed"), 1), evaluates=False)
    assert result(four, "two by two metrics")["shape"] == (10, 15, 67)
    assert (result(four, "two by two metrics")["labels"] == result(four, "metrics")["labels"]).all()


@pytest.mark.slow
def test_four_ranks_hold_one_model(four: Path) -> None:
    assert_same(result(four, "four"), alone("plain"))


@pytest.mark.slow
def test_resuming_on_four_and_from_four(four: Path) -> None:
    assert_same(result(four, "resumed 2 to 4"), result(four, "one"))
    found = saving(four, 1, "four to one", "four/checkpoint-4")
    assert_same(found, result(four, "one"))
    assert_same(result(four, "resumed 2x2"), result(four, "two by two, saving"))


@pytest.mark.slow
def test_resuming_experts_on_other_numbers_of_ranks(four: Path) -> None:
    """Their optimizer's states too: 2 to 4 ranks, 2 to 1, 4 to 1."""
    expected = saving_experts(four, 1, "experts one")
    assert_same(result(four, "saving experts"), expected)
    assert_same(result(four, "experts 2 to 4"), expected)
    assert_same(saving_experts(four, 1, "experts 2 to 1", "experts two/checkpoint-2"), expected)
    assert_same(saving_experts(four, 1, "experts 4 to 1", "experts four/checkpoint-4"), expected)
    states = [
        torch.load(four / name / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"]
        for name in ("experts four", "experts one")
    ]
    assert states[0].keys() == states[1].keys()
    for index, entries in states[1].items():
        torch.testing.assert_close(states[0][index]["exp_avg"], entries["exp_avg"], rtol=2e-3, atol=1e-6)


@pytest.mark.slow
def test_adapters_on_four(four: Path) -> None:
    pytest.importorskip("trl", reason="TRL's Trainer is tested where it is installed")
    found, expected = result(four, "supervised"), supervised(Path("supervised"), 1)
    assert found["run"].losses == pytest.approx(expected["run"].losses, **CLOSE)
    assert found["log"]["num_tokens"] == expected["log"]["num_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dispatch", "accelerator_config.dispatch_batches: expected"),
        ("three ranks", "a divisor of 4, the number of processes: one of 1, 2, 4, found 3"),
    ],
)
def test_rejections_on_four(name: str, said: str, four: Path) -> None:
    for rank in range(4):
        assert said in result(four, "rejections of four", rank)[name]
