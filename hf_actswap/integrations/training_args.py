"""The Trainer's arguments with the field ``actswap``, and the callback by which any Trainer acts on it.

A dataclass takes each field from the first of its bases that has it, also where that base only inherited it.
So `ActSwapTrainingArguments` beside another class of arguments would bring the defaults of
`transformers.TrainingArguments` along: a learning rate of 5e-5 where TRL's is 2e-5. The field ``actswap``
therefore stands in a class of its own, and `with_actswap` combines that class with any class of arguments.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.training_args import TrainingArguments

from ..apply import sets_weights_aside
from ..config import ActSwapConfig, load_config
from ..config.yaml_text import parse_yaml
from ..errors import ConfigError, Problem, short_traceback
from ..parallel.rank_agreement import failing_together, shared_store
from ..plan import load_config_or_plan
from .callback import ArgumentsCallback, weight_owners
from .shared_config import facts_to_compare, is_unpinned_hub_id, pin_commit_on_all_ranks

REPORTS_TO = "actswap"
"""The name in ``report_to`` under which transformers finds `ArgumentsCallback`: a Trainer makes one callback
for each name in that field of its arguments; there is no other way from arguments to a callback."""

INTEGRATION_TO_CALLBACK[REPORTS_TO] = ArgumentsCallback  # only the classes below report to it


@dataclass
class _ActSwapField:
    """The field ``actswap`` and what it does, for a class of training arguments that comes after it."""

    # The order dict-before-str matters: with str first, the command line rejects inline JSON.
    actswap: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Activation swap and recompute: auto, inline JSON, a file of YAML or of a plan, a folder "
            "or a Hub id."
        },
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Reject a class that combines one of ours with other arguments (see the module's docstring)."""
        super().__init_subclass__(**kwargs)
        ours = [base for base in cls.__mro__[1:] if _is_ours(base) and base is not _ActSwapField]
        for base in cls.__mro__[1:]:
            if issubclass(base, TrainingArguments) and any(base not in found.__mro__ for found in ours):
                raise ConfigError([_combined(cls, ours[0], base)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the stock class, since no module has a class of `with_actswap` under its name."""
        stock = type(self).__dict__.get("_stock")
        return super().__reduce_ex__(protocol) if stock is None else (_empty, (stock,), self.__getstate__())

    @short_traceback
    def __post_init__(self) -> None:
        asked = self.actswap
        given: Any = self  # the training arguments that this class is combined with
        with shared_store(given.ddp_timeout):  # used until a process group exists
            with failing_together("configuration", given.ddp_timeout) as facts:
                # Before the process group and the devices are set up.
                moves = is_unpinned_hub_id(asked)
                facts.update(
                    {"actswap": str(asked)} if moves else facts_to_compare(load_config_or_plan(asked))
                )
            if isinstance(asked, str) and asked.lstrip().startswith("{"):
                self.actswap, _ = parse_yaml(asked, "actswap")  # type: ignore[assignment]
            super().__post_init__()  # type: ignore[misc]
        if isinstance(asked, str) and is_unpinned_hub_id(asked):
            self.actswap = pin_commit_on_all_ranks(asked, given.process_index, given.world_size)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; ``report_to`` holds ``"actswap"``, whatever is assigned and whenever."""
        super().__setattr__(name, _with_ours(value) if name == "report_to" else value)

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the Trainer moves the whole model to the device at its construction.

        Not if frozen weights are to wait on the host: the model need not fit. The rest is moved later.
        """
        given: Any = self
        asked = load_config_or_plan(self.actswap)
        trainer, model = _constructed_with(given)
        if sets_weights_aside(asked, model, given.device, weight_owners(trainer)):
            return False
        place: bool | None = super().place_model_on_device  # type: ignore[misc]
        return place

    def actswap_config(self) -> ActSwapConfig:
        """Return the configuration. Raises `ConfigError` if it is malformed, or if ``actswap`` is a plan."""
        return load_config(self.actswap)


def _constructed_with(arguments: Any) -> tuple[Any, nn.Module]:
    """Return the Trainer that is being constructed with arguments, and its model, read off the call stack.

    It asks them where the model goes before it has an attribute for the model. Without a Trainer the model
    is an empty one, which fits everywhere.
    """
    frame = inspect.currentframe()
    while frame is not None:
        trainer, model = frame.f_locals.get("self"), frame.f_locals.get("model")
        if getattr(trainer, "args", None) is arguments and isinstance(model, nn.Module):
            return trainer, model
        frame = frame.f_back
    return None, nn.Module()


def _is_ours(arguments: type) -> bool:
    return issubclass(arguments, _ActSwapField)


def _combined(cls: type, ours: type, other: type) -> Problem:
    stock, name = next(base for base in ours.__mro__ if not _is_ours(base)), other.__name__
    found = f"{ours.__name__} beside it, with the defaults of {stock.__name__} for the same fields"
    use = f"Write hf_actswap.with_actswap({name}): it has the field actswap and is used, and inherited from,"
    return Problem(f"class {cls.__name__}", f"all defaults of {name}", found, f"{use} like {name}.")


def _empty(stock: type) -> Any:
    return object.__new__(with_actswap(stock))


@dataclass
class ActSwapTrainingArguments(_ActSwapField, TrainingArguments):
    """`transformers.TrainingArguments` with the field ``actswap``.

    Every Trainer that gets these arguments acts on them: ``"actswap"`` is added to ``report_to``, and so the
    Trainer makes an `ArgumentsCallback`. For a trainer with its own class of arguments use `with_actswap`:
    ``with_actswap(SFTConfig)(output_dir="out", actswap="auto")``.

    Args:
        actswap: ``"auto"``: the planner searches a plan that may use all memory of the device. Otherwise the
            configuration: a mapping (inline YAML or JSON), a file, a folder with ``actswap_config.yaml``, or
            a Hub id ``org/name[@revision]``; or the file of a plan. ``None``: nothing is swapped, with a
            warning; a word for off: without one. A Hub id is stored with its commit, ``org/name@commit``, the
            same on all ranks: rank 0 asks the Hub, and the saved arguments of a run name the commit.

    Raises:
        ConfigError: the configuration is malformed; raised before process group and devices are set up. All
            ranks raise it if rank 0 cannot read it from the Hub. Or a class inherits from this one and from
            another class of arguments.
        PlanError: the plan is malformed.
        RankAgreementError: another rank has a malformed or a different configuration.
    """


def with_actswap(arguments: type[TrainingArguments]) -> type[Any]:
    """Return a class of training arguments with the field ``actswap`` of `ActSwapTrainingArguments`.

    All other fields, defaults and methods are those of ``arguments``: TRL's configurations,
    `Seq2SeqTrainingArguments`, or a class of your own. The result is always the same class; its objects can
    be pickled, and other classes can inherit from it.

        args = with_actswap(SFTConfig)(output_dir="out", actswap="auto")
        (args,) = TrlParser(with_actswap(SFTConfig)).parse_args_and_config()

    Args:
        arguments: a class that inherits from `transformers.TrainingArguments`.

    Raises:
        ConfigError: it does not.
    """
    if not (isinstance(arguments, type) and issubclass(arguments, TrainingArguments)):
        expected = "a class that inherits from transformers.TrainingArguments"
        hint = "Pass the class, and then the arguments: with_actswap(SFTConfig)(output_dir=..., actswap=...)."
        raise ConfigError([Problem("with_actswap", expected, repr(arguments), hint)])
    if arguments is TrainingArguments:
        return ActSwapTrainingArguments
    stock: Any = arguments
    return arguments if _is_ours(arguments) else _made_from(stock)


@functools.cache
def _made_from(arguments: Any) -> type[Any]:
    attributes = {
        "__module__": __name__,
        "__doc__": f"`{arguments.__name__}` with the field ``actswap`` (`with_actswap`).",
        "_stock": arguments,
    }
    return dataclass(type(f"ActSwap{arguments.__name__}", (_ActSwapField, arguments), attributes))


def _with_ours(report_to: str | list[str] | None) -> list[str]:
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    if names == ["all"]:
        names = get_available_reporting_integrations()
    return [*(name for name in names if name not in ("none", REPORTS_TO)), REPORTS_TO]
