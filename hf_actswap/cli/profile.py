"""``hf-actswap profile``: measures a step of a model on this machine, or computes it from shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import RenderableType
from rich.table import Table

from ..config import load_config
from ..config.sizes import device_kind
from ..engine.host_memory import available_bytes
from ..errors import Problem
from ..plan import MemoryPlan, PlanRow, model_structure
from ..plan.actions import Scope, format_scopes
from ..planner.cost.simulate import Simulator
from ..planner.meter import device_name as name_of
from ..planner.profile import Prediction, Profile
from ..report import PlannerBar
from . import options
from .optimizers import state_bytes
from .options import DtypeName
from .output import answer, busy, heading, link_text, op_ms_text, size_text, step_ms_text
from .plan_request import ModelRequest
from .profile_file import write_profile
from .recorded_steps import TIMED_STEPS, RecordedSteps, for_all_layers
from .step import DEFAULT_DEVICE, StepShape, device_name, kind_here, not_run, prediction_document, profile_of
from .subject import AnalysedModel, ModelError, parameters_of, random_model, subject

THIS = "this"
_FEWER = "Ask for fewer --layers: their times are taken for the others too. Or for less --seq or --batch."

_AROUND = "around"
"""Name for what runs outside of all scopes: rotary tables, masks, the loss."""


def _device_or_this(text: str) -> str:
    return THIS if text.strip().lower() == THIS else options.device_named(text)


@dataclass(frozen=True)
class Profiled:
    """A profile. An `output.Answer`.

    Args:
        subject: the whole model.
        step: the step that was measured or computed.
        profile: profile of that step.
        measured_layers: number of layers that were measured; 0: all is computed from shapes.
        costs: time and memory of each op.
        unplanned: prediction of the step without a plan.
        written_to: path of the file; ``None``: no file was written.
    """

    subject: AnalysedModel
    step: StepShape
    profile: Profile
    measured_layers: int
    costs: Sequence[OpCost]
    unplanned: Prediction
    written_to: str | None = None
    ok: bool = True

    def document(self) -> Mapping[str, Any]:
        """Return the fields as JSON values."""
        profile = self.profile
        return {
            "model": self.subject.document(),
            "step": self.step.document(),
            "source": profile.source,
            "measured_layers": self.measured_layers,
            "device": profile.device,
            "device_bytes": profile.device_bytes,
            "link": None if profile.link is None else asdict(profile.link),
            "outside_ms": profile.outside_ms,
            "ops": [cost.document() for cost in self.costs],
            "predicted": prediction_document(self.unplanned),
            "written_to": self.written_to,
        }

    def shown(self) -> Iterable[RenderableType]:
        """Yield the text and tables to print."""
        profile, link = self.profile, self.profile.link
        yield f"Model: {self.subject.described()}"
        yield f"Step:  {self.step.described()}"
        yield f"Times: {self._times()}"
        yield f"Link:  {'copies do not run beside compute' if link is None else link_text(link)}"
        yield heading("Ops: times in ms, all layers of a line together")
        yield cost_table(profile, self.costs)
        yield (
            "\nSaved: what autograd saves of the op's results. Rebuild: the time that recomputing it adds to "
            f"backward.{' Copy: to the host, without other copies on the link.' if link else ''}"
        )
        step = self.unplanned
        yield (
            f"Step without a plan: {step_ms_text(step.step_ms)}, {step_ms_text(profile.outside_ms)} of it "
            f"outside forward and backward; peak {size_text(step.peak_bytes)}."
        )
        if self.written_to is not None:
            yield f"Written to {self.written_to}; hf-actswap plan --profile reads it."

    def _times(self) -> str:
        if not self.measured_layers:
            return "computed from shapes and the device's rates; nothing was measured"
        layers = len(self.subject.shape.layers)
        some = f", {self.measured_layers} of {layers} layers" if self.measured_layers < layers else ""
        return f"measured here, median of {TIMED_STEPS} steps{some}"


def profile(
    model: options.ModelName,
    seq: Annotated[
        int, typer.Option("--seq", parser=options.tokens, metavar="N", help="Tokens of a sequence: 4096, 4k.")
    ] = 4096,
    batch: options.Batch = 1,
    layers: Annotated[
        int | None,
        options.without_default(
            "--layers",
            min=1,
            metavar="K",
            help="Measure only the first K layers; the others get their times.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        options.without_default(
            "--device",
            parser=_device_or_this,
            metavar="NAME",
            help="Measured if it is here, else computed from shapes: this, or a name as `plan` takes it. "
            "Else the accelerator that is here, and H200 where none is.",
        ),
    ] = None,
    dtype: options.Dtype = None,
    autocast: options.Autocast = None,
    optimizer: options.Optimizer = "adamw",
    output: Annotated[
        str | None,
        options.without_default(
            "--output", "-o", metavar="FILE", help="File for the profile; hf-actswap plan --profile reads it."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Measure a step op by op, or compute it from shapes, for `plan --profile`."""

    def ask() -> Profiled:
        here = _device_here(device)
        named = name_of(here) if here is not None else device_name(device)
        step = StepShape(batch, seq, named, autocast, optimizer)
        with subject(ModelRequest(model, dtype), load_config(None)) as found:
            if here is None:
                if layers is not None:
                    raise ModelError([_nothing_to_measure(named)])
                made = _profiled(found, step, _from_shapes(found, step), 0)
            else:
                made = _measured(found, step, dtype, here, layers)
        if output is None:
            return made
        try:
            write_profile(output, made.profile, found, step, made.measured_layers)
        except OSError as error:
            raise typer.BadParameter(f"{output}: {error.strerror}", param_hint="--output") from error
        return replace(made, written_to=output)

    answer("profile", as_json, ask)


def _device_here(asked: str | None) -> torch.device | None:
    """Return the device to measure on; ``None``: this machine does not have the one asked for."""
    if asked == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if asked == THIS:
        return accelerator or torch.device("cpu")
    return accelerator if asked is None or device_kind(asked) == kind_here() else None


def _nothing_to_measure(name: str) -> Problem:
    hint = "Leave --layers out, or measure on this machine: --device this."
    return Problem("--layers", f"{name} on this machine, to measure on", "none", hint)


def _from_shapes(found: AnalysedModel, step: StepShape, workspaces: bool = True) -> Profile:
    with busy(f"profile of {found.described()}, from shapes"):
        return profile_of(found, step, workspaces=workspaces)


def _measured(
    whole: AnalysedModel, step: StepShape, dtype: DtypeName | None, device: torch.device, layers: int | None
) -> Profiled:
    """Measure a step with the first layers, or all; layers that are not measured get the others' times.

    Raises:
        ModelError: the model does not run, does not fit on the device, or its other layers differ.
    """
    count = len(whole.shape.layers)
    measured_layers = min(layers or count, count)
    own_shape = replace(step, device=DEFAULT_DEVICE)  # only the bytes of a calculated step are used here
    on_paper = _from_shapes(whole, own_shape, False) if measured_layers < count else None
    if device.type == "cpu":
        _reject_if_too_large(whole, step, measured_layers)
    made, weights = _recorded(whole.name, step, dtype, device, None if on_paper is None else layers)
    if on_paper is not None:
        made = for_all_layers(made, on_paper, weights, whole.parameters, _layer_types(whole))
    return _profiled(whole, step, made, measured_layers)


def _layer_types(whole: AnalysedModel) -> Sequence[str]:
    config: Any = whole.model.config
    return getattr(config.get_text_config(), "layer_types", None) or ()


def _recorded(
    name: str, step: StepShape, dtype: DtypeName | None, device: torch.device, layers: int | None
) -> tuple[Profile, int]:
    """Return the profile of real steps, and the number of weights of the model that ran."""
    bar = PlannerBar(title="profile")
    gpus = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
    try:
        with torch.random.fork_rng(gpus, device_type=device.type if gpus else "cuda"):
            torch.manual_seed(0)
            bar("weights", 1)
            part = random_model(name, dtype, device, layers)
            made = RecordedSteps(part, model_structure(part), step, bar).profile()
            return made, parameters_of(part)
    except torch.OutOfMemoryError as error:
        text = " ".join(str(error).split())[:200]
        raise ModelError([Problem("model", f"a step that fits on {step.device}", text, _FEWER)]) from None
    except ModelError:
        raise
    except Exception as error:  # the model's own code runs: it may raise anything
        raise not_run(f"a model that trains on {step.device}", error) from error
    finally:
        bar.close()


def _reject_if_too_large(whole: AnalysedModel, step: StepShape, layers: int) -> None:
    """Raise an error if a step does not fit in host memory: the kernel would kill the process silently.

    Before a model runs, only the sizes of its weights, gradients and optimizer states are known.
    """
    free, share = available_bytes(), layers / len(whole.shape.layers)
    weight_bytes = sum(p.numel() * p.element_size() for p in whole.model.parameters())
    least = int((2 * weight_bytes + state_bytes(step.optimizer, whole.model)[0]) * share)
    if free is not None and least > free:
        expected = f"a step that fits in the {size_text(free)} that are free"
        found = f"{size_text(least)} of weights, gradients and optimizer states"
        raise ModelError([Problem("model", expected, found, _FEWER)])


def _profiled(found: AnalysedModel, step: StepShape, made: Profile, measured_layers: int) -> Profiled:
    return Profiled(found, step, made, measured_layers, op_costs(made), _without_a_plan(made))


def _without_a_plan(made: Profile) -> Prediction:
    return Simulator(made).predict(MemoryPlan((), made.num_layers, made.family), curve=False)


@dataclass(frozen=True)
class OpCost:
    """Time and memory of an op, added up over layers that are equal.

    Args:
        scope: ``embedding``, ``final_norm``, ``head`` or ``around``; empty for layers.
        layers: the layers that are added up.
        op: first part of the op path; ``""``: what runs between the ops.
        forward_ms, backward_ms: compute time.
        saved_bytes: bytes of the op's results that autograd saves.
        rebuild_ms: how much longer backward takes if the op is recomputed; ``None``: not computed.
        rebuilt_bytes: saved bytes that are not kept if the op is recomputed; ``None``: not computed.
    """

    scope: str
    layers: tuple[int, ...]
    op: str
    forward_ms: float
    backward_ms: float
    saved_bytes: int
    rebuild_ms: float | None = None
    rebuilt_bytes: int | None = None

    def document(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        return {**asdict(self), "layers": list(self.layers)}


def op_costs(profile: Profile) -> list[OpCost]:
    """Return time and memory of the ops of a step in the order in which they run; equal layers are joined."""
    times: dict[Scope | None, dict[str, list[float]]] = defaultdict(dict)
    for op_event in profile.op_events:
        scope, path, _ = op_event.call
        sums = times[scope].setdefault(_op_of(scope, path), [0.0, 0.0])
        sums[0] += op_event.forward_ms
        sums[1] += op_event.backward_ms
    sizes: dict[Scope | None, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (of, path), size_bytes in profile.saved.by_op().items():
        sizes[of][_op_of(of, path)] += size_bytes
    for scope, by_op in sizes.items():
        for op in by_op:
            times[scope].setdefault(op, [0.0, 0.0])
    found: list[OpCost] = []
    for scopes in _equal(times, sizes):
        layers = tuple(scope for scope in scopes if isinstance(scope, int))
        name = "" if layers else str(scopes[0] or _AROUND)
        for op in times[scopes[0]]:
            forward_ms, backward_ms = (sum(times[scope][op][phase] for scope in scopes) for phase in (0, 1))
            size_bytes = sum(sizes[scope][op] for scope in scopes)
            found.append(OpCost(name, layers, op, forward_ms, backward_ms, size_bytes))
    return _with_rebuilding(profile, found)


def cost_table(profile: Profile, costs: Sequence[OpCost]) -> Table:
    """Return the costs as a table, times in ms; it has a column ``Copy`` if copies run beside compute."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("", overflow="fold")
    for name in ("Forward", "Backward", "Saved", "Rebuild", *(("Copy",) if profile.link else ())):
        table.add_column(name, justify="right", no_wrap=True)
    shown: tuple[int, ...] = ()
    for cost in costs:
        if cost.layers and cost.layers != shown:
            shown = cost.layers
            table.add_row(f"layers {format_scopes(shown)}")
        table.add_row(f"  {cost.op or 'between'}" if cost.layers else cost.scope, *_numbers(profile, cost))
    return table


def _numbers(profile: Profile, cost: OpCost) -> list[str]:
    size_bytes, link = cost.saved_bytes, profile.link
    shown = [
        op_ms_text(cost.forward_ms),
        op_ms_text(cost.backward_ms),
        size_text(size_bytes) if size_bytes else "",
        "" if cost.rebuild_ms is None else op_ms_text(cost.rebuild_ms),
    ]
    if link is not None:
        shown.append(op_ms_text(link.out_ms(size_bytes) - link.latency_ms) if size_bytes else "")
    return shown


def _op_of(scope: Scope | None, path: str) -> str:
    """Return the first part of an op's path in a layer; empty outside of the layers."""
    return path.partition(".")[0] if isinstance(scope, int) else ""


def _equal(
    times: Mapping[Scope | None, Mapping[str, object]], sizes: Mapping[Scope | None, Mapping[str, int]]
) -> list[list[Scope | None]]:
    """Return groups of layers whose ops are the same and save as many bytes; other scopes stand alone."""
    groups: dict[object, list[Scope | None]] = {}
    for scope, ops in times.items():
        layer = isinstance(scope, int)
        key: object = (tuple(ops), tuple(sorted(sizes[scope].items()))) if layer else scope
        groups.setdefault(key, []).append(scope)
    return list(groups.values())


def _with_rebuilding(profile: Profile, costs: Sequence[OpCost]) -> list[OpCost]:
    simulator = Simulator(profile)
    found = []
    for cost in costs:
        if not (cost.layers and cost.op and cost.saved_bytes):
            found.append(cost)
            continue
        rows = tuple(PlanRow(layer, cost.op, "recompute") for layer in cost.layers)
        step = simulator.predict(MemoryPlan(rows, profile.num_layers, profile.family), curve=False)
        found.append(replace(cost, rebuild_ms=step.recompute_ms, rebuilt_bytes=step.recomputed_bytes))
    return found
