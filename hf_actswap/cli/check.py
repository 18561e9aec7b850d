"""``hf-actswap check``: all errors of a configuration, and all requests that are changed, before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from ..config import ActSwapConfig, load_config
from ..errors import ActSwapError, ConfigError, Problem
from ..plan import MemoryPlan, resolve_plan, with_problems_of_model
from ..plan.actions import format_scopes
from ..plan.resolve import RequestedPolicy, requested_policies
from ..plan.tiles import tile_names
from ..planner.profile import Prediction, Profile
from ..stream import problems_of_model
from . import options
from .options import AskedStep, ModelRequest, computed_in, reject_quantize
from .output import Answer, answer, heading, problems_document, shown_problems, titled
from .plan import Adapters, PrepareKbit, Quantize, Shard
from .plan_answer import fate_table, step_shape, step_table
from .planned import PLANNED, comparison_steps, costly_fates_note, memory_in_force, planned
from .step import StepShape, prediction_document, profile_of, ranks_of_a_machine
from .subject import AnalysedModel, ModelError, subject, with_tp


@dataclass
class Checked:
    """What ``check`` found; fields that a problem left unknown are empty."""

    source: str
    strict: bool  # whether adjustments count as problems
    problems: list[Problem] = field(default_factory=list)
    notes: Sequence[str] = ()
    model: AnalysedModel | None = None
    plan: MemoryPlan | None = None
    policies: Sequence[RequestedPolicy] = ()
    step: StepShape | None = None
    profile: Profile | None = None
    predicted: Mapping[str, Prediction] = field(default_factory=dict)
    not_known: str = ""

    @property
    def ok(self) -> bool:
        changed = self.plan is not None and bool(self.plan.adjustments)
        return not self.problems and not (self.strict and changed)

    def document(self) -> dict[str, Any]:
        plan = self.plan or MemoryPlan((), 0)
        return {
            "source": self.source,
            "problems": problems_document(self.problems),
            "model": None if self.model is None else self.model.document(),
            "notes": list(self.notes),
            "warnings": list(plan.warnings),
            "adjustments": [asdict(adjustment) for adjustment in plan.adjustments],
            "names": [asdict(requested) for requested in self.policies],
            "rows": [asdict(row) for row in plan.rows],
            "step": None if self.step is None else self.step.document(),
            "predicted": {name: prediction_document(step) for name, step in self.predicted.items()},
            "not_known": self.not_known,
        }

    def shown(self) -> Iterator[RenderableType]:
        yield f"Configuration: {self.source}"
        if self.model is not None:
            yield f"Model:         {self.model.described()}"
        if self.plan is not None:
            yield heading("Plan")
            yield fate_table(self.plan, self.profile)
            yield from titled("Names", map(_meaning, self.policies))
            yield from titled("MindFormers' warnings", self.plan.warnings)
            yield from titled("Requests that were changed", map(str, self.plan.adjustments))
        if self.predicted and self.step is not None:
            yield heading(f"Predicted step: {self.step.described()}")
            yield step_table(self.predicted)
            yield from costly_fates_note(self.predicted)
        yield from titled("Not known", [self.not_known] if self.not_known else [])
        yield from titled("Keys without effect", self.notes)
        yield ""
        if self.problems:
            yield from shown_problems(self.problems, "")
        elif self.ok:
            yield "No problems."
        else:
            yield "No problems, but requests were changed (--strict)."


def check(
    config: options.Config,
    model: options.Model,
    seq: options.Seq = None,
    batch: options.Batch = 1,
    device: options.Device = None,
    dtype: options.Dtype = None,
    autocast: options.TrlAutocast = None,
    optimizer: options.Optimizer = "adamw",
    shard: Shard = None,
    lora: Adapters = None,
    quantize: Quantize = None,
    prepare_kbit: PrepareKbit = False,
    tp: options.Tp = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if a request was changed or a warning was given.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    asked = ModelRequest(model, dtype, lora, quantize, prepared=prepare_kbit)
    reject_quantize(asked, tp)

    def ask() -> Answer:
        found = Checked(config, strict)
        if seq is not None:
            found.step = step_shape(AskedStep(batch, seq, device, autocast, optimizer, sharding=shard))
        read: ActSwapConfig | ConfigError
        try:
            read = with_tp(load_config(config), tp)
        except ConfigError as error:
            read = error
            found.problems += error.problems
        try:
            known = ActSwapConfig() if isinstance(read, ConfigError) else read
            with subject(computed_in(asked, shard, autocast), known) as seen:
                _look(found, seen, read)
        except ActSwapError as error:
            found.problems += error.problems
        return Answer(found.document(), found.shown(), found.ok)

    answer("check", as_json, ask)


def _look(found: Checked, model: AnalysedModel, config: ActSwapConfig | ConfigError) -> None:
    """Fill ``found`` from a model and a configuration; for a malformed one, add the model's problems."""
    found.model = model
    if not model.shape.functions_known:
        found.not_known = f"Ops inside modules cannot be named: {model.shape.why_not}."
    if isinstance(config, ConfigError):
        found.problems[:] = with_problems_of_model(config, model.shape).problems
        return
    found.notes = config.notes
    found.plan = plan = resolve_plan(config, model.shape)
    found.policies = requested_policies(config, model.shape)
    in_stages = config.parallel_config.runs_pipeline
    found.problems += [
        Problem("plan", "what this version can carry out", requested, "Remove it from the configuration.")
        for requested in plan.unsupported
        if not in_stages
    ]
    if plan.streamed is not None:
        found.problems += problems_of_model(model.model, model.shape)
        found.not_known = "Bytes and times of a streamed sequence are not predicted."
    if in_stages and found.step is not None:
        found.not_known = "Bytes and times are those of stages: hf-actswap plan shows them."
    if found.step is None or plan.streamed is not None or in_stages:
        return
    try:
        found.profile = profile_of(model, found.step, plan.tiles)
    except ModelError as error:  # no mistake of the user: the configuration is valid
        found.not_known = f"Bytes and times: {error.problems[0].found.rstrip('.')}."
        return
    if config.memory.mode == "off":
        found.predicted = comparison_steps(found.profile, plan)
        return
    memory = memory_in_force(config, None, found.step, ranks_of_a_machine(model, found.step))
    best = planned(model, found.step, config, memory, found.profile)
    steps = dict(best.steps)
    tiles = "" if best.chosen_tiles is None else f", in tiles: {tile_names(best.plan.tiles)}"
    step = steps.pop(PLANNED)  # shown last
    found.predicted = {**steps, f"{PLANNED} ({config.memory.mode}{tiles})": step}


def _meaning(requested: RequestedPolicy) -> str:
    if not requested.op_name:
        return str(requested)
    if not requested.targets:
        return f"{requested}. These layers have no op of that name."
    by_layers: dict[tuple[int, ...], list[str]] = {}
    for path, layers in requested.targets.items():
        by_layers.setdefault(layers, []).append(path)
    meant = "; ".join(
        ", ".join(paths) + ("" if layers == requested.layers else f" (layers {format_scopes(layers)})")
        for layers, paths in by_layers.items()
    )
    return f"{requested}. It means {meant}."
