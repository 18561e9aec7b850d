"""One configuration for many processes: the same on all of them, and of the Hub the same commit."""

from __future__ import annotations

import logging
from typing import Any

from accelerate.utils import broadcast_object_list

from ..config import ActSwapConfig, load_config
from ..config.hub import is_commit, split_hub_id
from ..config.reader import SHOWN_CHARACTERS, show, where
from ..errors import ConfigError
from ..parallel.rank_agreement import digest, failing_together
from ..plan import MemoryPlan
from .logs import console_logging

logger = logging.getLogger(__name__)


def facts_of(config: ActSwapConfig | MemoryPlan) -> dict[str, str]:
    """Return what ranks compare of their configurations or plans, a short text for each key."""
    if isinstance(config, MemoryPlan):
        return {"plan": digest(repr((config.rows, config.tiles) if config.tiles else config.rows))}
    facts = {}
    for section, values in config.to_dict().items():
        keys = values.items() if isinstance(values, dict) else [(None, values)]
        for key, value in keys:
            shown = show(value)
            facts[where((section,) if key is None else (section, key))] = (
                f"{shown} ({digest(repr(value))})" if len(shown) == SHOWN_CHARACTERS else shown
            )
    return facts


def may_move(source: object) -> bool:
    """Whether a source can be a Hub id without a commit, which may mean something else a moment later."""
    hub_id = split_hub_id(source) if isinstance(source, str) else None
    return hub_id is not None and not is_commit(hub_id[1])


def pin_together(source: str, rank: int, world_size: int) -> str:
    """Return the Hub id with the commit that it is now; every rank must call it.

    Rank 0 downloads. The others read the same commit: from the cache where they share it, else each machine
    downloads it once.

    Args:
        source: a Hub id, as `may_move` takes one; a file or folder of that name is left as it is.
        rank: of this process among all.
        world_size: processes; above 1 they are in one process group.

    Raises:
        ConfigError: on every rank, if rank 0 finds no configuration or a malformed one.
        RankAgreementError: another rank cannot have it.
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
