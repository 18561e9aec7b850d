"""One field more for the Trainer's arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers.training_args import TrainingArguments

from ..config import ActSwapConfig, load_config


@dataclass
class ActSwapTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the field ``actswap``.

    Args:
        actswap: the configuration: a mapping (inline YAML or JSON), a file, a folder with
            ``actswap_config.yaml``, or a Hub id ``org/name[@revision]``. ``None``: nothing is swapped.

    Raises:
        ConfigError: the configuration is malformed; before anything of the Trainer is set up.
    """

    # The order dict-before-str matters: with str first, the command line refuses inline JSON.
    actswap: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Activation swap and recompute: inline JSON, a YAML file, a folder or a Hub id."},
    )

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "actswap"]

    def __post_init__(self) -> None:
        load_config(self.actswap)  # before the process group and the devices are set up
        super().__post_init__()

    def actswap_config(self) -> ActSwapConfig:
        """Return the configuration. Raises `ConfigError`."""
        return load_config(self.actswap)
