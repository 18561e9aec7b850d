"""One field more for the Trainer's arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers.training_args import TrainingArguments

from ..config import ActSwapConfig, load_config
from ..errors import short_traceback
from ..parallel.rank_agreement import failing_together, shared_store
from .shared_config import facts_of, may_move, pin_together


@dataclass
class ActSwapTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the field ``actswap``.

    Args:
        actswap: the configuration: a mapping (inline YAML or JSON), a file, a folder with
            ``actswap_config.yaml``, or a Hub id ``org/name[@revision]``. ``None``: nothing is swapped.
            Of a Hub id the field keeps the commit that it is, ``org/name@commit``, the same on all ranks:
            rank 0 asks, and the arguments that a run saves say what it was.

    Raises:
        ConfigError: the configuration is malformed; before anything of the Trainer is set up. All ranks
            raise it if rank 0 cannot have it from the Hub.
        RankAgreementError: that of another rank is malformed, or is another one.
    """

    # The order dict-before-str matters: with str first, the command line refuses inline JSON.
    actswap: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Activation swap and recompute: inline JSON, a YAML file, a folder or a Hub id."},
    )

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "actswap"]

    @short_traceback
    def __post_init__(self) -> None:
        asked = self.actswap
        with shared_store(self.ddp_timeout):  # until there is a process group
            with failing_together("configuration", self.ddp_timeout) as facts:
                # Before the process group and the devices are set up.
                facts.update({"actswap": str(asked)} if may_move(asked) else facts_of(load_config(asked)))
            super().__post_init__()
        if isinstance(asked, str) and may_move(asked):
            self.actswap = pin_together(asked, self.process_index, self.world_size)

    def actswap_config(self) -> ActSwapConfig:
        """Return the configuration. Raises `ConfigError`."""
        return load_config(self.actswap)
