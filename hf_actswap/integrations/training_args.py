"""The Trainer's arguments with the field ``actswap``, and the callback by which any Trainer acts on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.training_args import TrainingArguments

from ..config import ActSwapConfig, load_config
from ..errors import short_traceback
from ..parallel.rank_agreement import failing_together, shared_store
from ..plan import load_config_or_plan
from .callback import ArgumentsCallback
from .shared_config import facts_to_compare, is_unpinned_hub_id, pin_commit_on_all_ranks

REPORTS_TO = "actswap"
"""The name in ``report_to`` under which transformers finds `ArgumentsCallback`: a Trainer makes one callback
for each name in that field of its arguments; there is no other way from arguments to a callback."""

INTEGRATION_TO_CALLBACK[REPORTS_TO] = ArgumentsCallback  # only the class below reports to this name


@dataclass
class ActSwapTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the field ``actswap``.

    Every Trainer that gets these arguments acts on them: ``"actswap"`` is added to ``report_to``, and so the
    Trainer makes an `ArgumentsCallback`. For a trainer with its own class of arguments, make a dataclass with
    this class in front: ``@dataclass class Arguments(ActSwapTrainingArguments, SFTConfig): ...``.

    Args:
        actswap: ``"auto"``: the planner searches a plan that may use all memory of the device. Otherwise the
            configuration: a mapping (inline YAML or JSON), a file, a folder with ``actswap_config.yaml``, or
            a Hub id ``org/name[@revision]``; or the file of a plan. ``None``: nothing is swapped, with a
            warning. A Hub id is stored with its commit, ``org/name@commit``, the same on all ranks: rank 0
            asks the Hub, and the saved arguments of a run name the commit.

    Raises:
        ConfigError: the configuration is malformed; raised before process group and devices are set up. All
            ranks raise it if rank 0 cannot read it from the Hub.
        PlanError: the plan is malformed.
        RankAgreementError: another rank has a malformed or a different configuration.
    """

    # The order dict-before-str matters: with str first, the command line rejects inline JSON.
    actswap: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Activation swap and recompute: auto, inline JSON, a file of YAML or of a plan, a folder "
            "or a Hub id."
        },
    )

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*TrainingArguments._VALID_DICT_FIELDS, "actswap"]

    @short_traceback
    def __post_init__(self) -> None:
        asked = self.actswap
        with shared_store(self.ddp_timeout):  # used until a process group exists
            with failing_together("configuration", self.ddp_timeout) as facts:
                # Before the process group and the devices are set up.
                moves = is_unpinned_hub_id(asked)
                facts.update(
                    {"actswap": str(asked)} if moves else facts_to_compare(load_config_or_plan(asked))
                )
            super().__post_init__()
        if isinstance(asked, str) and is_unpinned_hub_id(asked):
            self.actswap = pin_commit_on_all_ranks(asked, self.process_index, self.world_size)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; ``report_to`` holds ``"actswap"``, whatever is assigned and whenever."""
        super().__setattr__(name, _with_ours(value) if name == "report_to" else value)

    def actswap_config(self) -> ActSwapConfig:
        """Return the configuration. Raises `ConfigError` if it is malformed, or if ``actswap`` is a plan."""
        return load_config(self.actswap)


def _with_ours(report_to: str | list[str] | None) -> list[str]:
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if names == ["all"]:
        names = get_available_reporting_integrations()
    return [*(name for name in names if name not in ("none", REPORTS_TO)), REPORTS_TO]
