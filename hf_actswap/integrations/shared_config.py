"""Lets all processes have the same configuration, from the Hub at the same commit.

Also writes a file of log lines per process, in the reference's format.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

from accelerate.utils import broadcast_object_list

from ..config import ActSwapConfig, load_config
from ..config.hub import is_commit, split_hub_id
from ..config.validation import SHOWN_CHARACTERS, show, where
from ..errors import ConfigError
from ..parallel.rank_agreement import digest, failing_together
from ..plan import MemoryPlan
from ..report import console_logging

logger = logging.getLogger(__name__)


def facts_to_compare(config: ActSwapConfig | MemoryPlan) -> dict[str, str]:
    """Return short texts by which ranks compare their configurations (a text for each key) or plans."""
    if isinstance(config, MemoryPlan):
        beside = [item for item in (config.tiles, config.streamed) if item]
        return {"plan": digest(repr((config.rows, *beside) if beside else config.rows))}
    facts = {}
    for section, values in config.to_dict().items():
        keys = values.items() if isinstance(values, dict) else [(None, values)]
        for key, value in keys:
            shown = show(value)
            facts[where((section,) if key is None else (section, key))] = (
                f"{shown} ({digest(repr(value))})" if len(shown) == SHOWN_CHARACTERS else shown
            )
    return facts


def is_unpinned_hub_id(source: object) -> bool:
    """Whether a source can be a Hub id without a commit: the content behind it may change at any time."""
    hub_id = split_hub_id(source) if isinstance(source, str) else None
    return hub_id is not None and not is_commit(hub_id[1])


def pin_commit_on_all_ranks(source: str, rank: int, world_size: int) -> str:
    """Return a Hub id without a commit with the one that it is now; every rank must call it.

    Rank 0 downloads, and its `ConfigError` is raised on every rank. The others read the same commit: from the
    cache where they share it, else each machine downloads it once. The name of a file or folder is returned
    unchanged.
    """
    answer: list[Any] = [None]
    if rank == 0:
        try:
            found = load_config(source).source
            hub_id = split_hub_id(found)
            answer = [found if hub_id is not None and is_commit(hub_id[1]) else source]
        except ConfigError as error:
            answer = [error]
    if world_size > 1:
        answer = broadcast_object_list(answer, from_process=0)
    (pinned,) = answer
    if isinstance(pinned, ConfigError):
        raise pinned
    if rank == 0 and pinned != source:
        with console_logging(logger):
            logger.info("The configuration %s is %s.", source, pinned)
    with failing_together("configuration of the Hub"):
        if rank > 0:
            load_config(pinned)
    return str(pinned)


_WORKER_FORMAT = "-%(levelname)s - %(message)s"
"""Format of the log lines in MindFormers' documents, so that the ``grep`` commands there find our lines."""


@contextmanager
def worker_log(path: str, append: bool = False) -> Iterator[logging.Logger]:
    """Yield a logger whose lines go to a new file at ``path``, or to its end, and nowhere else.

    They are written at the end of the block. If the file cannot be written, a warning is logged.
    """
    text = StringIO()
    worker = logging.Logger(f"hf_actswap.worker.{os.path.basename(path)}", logging.INFO)
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter(_WORKER_FORMAT))
    worker.addHandler(handler)
    yield worker
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "a" if append else "w", encoding="utf-8") as file:
            file.write(text.getvalue())
    except OSError as error:
        logger.warning("%s cannot be written (%s). The training goes on.", path, error.strerror)
