"""What a training of several ranks publishes: each rank has a Hub of its own, which keeps all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.hub as transformers_hub

from hf_actswap import ActSwapTrainer
from tests.hub_server import TOKEN, HubServer, Repository, hub_server
from tests.integrations.parallel_runs import OrderedTrainer, make, parallel, train

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
