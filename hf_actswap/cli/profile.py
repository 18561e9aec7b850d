"""``hf-actswap profile``: measures a step of a model on this machine, or computes it from shapes.

Steps are recorded as the planner records them in warm-up. Weights and tokens are random: times and bytes do
not depend on them, except for experts that tokens are routed to. As in training, memory is taken from one
step and times from others, because asking the allocator after each op takes longer than a small op runs. The
time of an op event is the median of the timed steps.

`for_all_layers` gives all layers of a model the times of the few that were measured. Bytes are those of the
whole model's step on fake tensors. A layer that was not measured gets the mean time of the measured layers
that have the same ops and save the same bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import RenderableType
from rich.table import Table
from torch import nn

from ..config import load_config
from ..config.sizes import device_kind
from ..engine.host_memory import available_bytes
from ..engine.transfer import transfer_of
from ..errors import Problem
from ..plan import MemoryPlan, ModelStructure, PlanRow, model_structure
from ..plan.actions import Scope, format_scopes
from ..planner.cost.simulate import Simulator
from ..planner.devices import DEFAULT_DEVICE
from ..planner.meter import AllocatorMeter, CountingMeter, Meter
from ..planner.meter import device_name as name_of
from ..planner.phases.warm_up import with_memory_of
from ..planner.profile import OpEvent, Prediction, Profile
from ..planner.record.recorder import DeviceClock, StepRecorder
from ..planner.states.state_bytes import state_bytes
from ..report import PlannerBar
from . import options
from .options import DtypeName, ModelRequest
from .output import Answer, answer, busy, heading, link_text, op_ms_text, size_text, step_ms_text, table_of
from .profile_file import write_profile
from .step import (
    StepShape,
    device_name,
    not_run,
    prediction_document,
    profile_of,
    rates_here,
)
from .subject import (
    DTYPES,
    AnalysedModel,
    ModelError,
    batch_on_meta,
    parameters_of,
    random_model,
    subject,
)

WARM_UP_STEPS, TIMED_STEPS = 2, 3

Progress = Callable[[str, int], None]
"""Called with the name of the phase (``warm-up``, ``memory``, ``times``) and the number of its steps left."""


def recorded_steps(model: nn.Module, shape: ModelStructure, step: StepShape, progress: Progress) -> Profile:
    """Train a model for a few steps, which changes its weights, and return the profile of the last ones."""
    device = next(model.parameters()).device
    transfer, optimizer = transfer_of(device), _optimizer_of(model, step)
    batch = _random_batch(model, step, device)

    def train() -> None:
        with torch.autocast(device.type, DTYPES[step.autocast]) if step.autocast else nullcontext():
            loss = model(**batch).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)

    def recorded(meter: Meter | None) -> Profile:
        recorder = StepRecorder(model, shape, meter, DeviceClock(transfer))
        if meter is not None:
            meter.start()
            meter.reset_peak()
        try:
            with recorder:
                train()
        finally:
            if meter is not None:
                meter.stop()
        states = sum(tensor.nbytes for tensor in _states(optimizer) if tensor.dim())
        return recorder.profile(device=step.device, optimizer_state_bytes=states)

    for left in range(WARM_UP_STEPS, 0, -1):
        progress("warm-up", left)
        train()
    progress("memory", 1)
    memory = recorded(_meter_of(device, model, optimizer))
    timed = []
    for left in range(TIMED_STEPS, 0, -1):
        progress("times", left)
        timed.append(recorded(None))
    profile = with_memory_of(median_times(timed), memory)
    return replace(profile, device_bytes=memory.device_bytes, link=transfer.link())


def _optimizer_of(model: nn.Module, step: StepShape) -> torch.optim.Optimizer | None:
    if step.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-5)
    return torch.optim.SGD(model.parameters(), lr=1e-5) if step.optimizer == "sgd" else None


def median_times(profiles: Sequence[Profile]) -> Profile:
    """Return the last profile with the median of each time; unchanged if the steps ran different ops."""
    last = profiles[-1]
    calls = [op_event.call for op_event in last.op_events]
    if any([op_event.call for op_event in profile.op_events] != calls for profile in profiles):
        return last
    op_events = tuple(
        replace(
            same[-1],
            forward_ms=median(op_event.forward_ms for op_event in same),
            backward_ms=median(op_event.backward_ms for op_event in same),
        )
        for same in zip(*(profile.op_events for profile in profiles), strict=True)
    )
    return replace(last, op_events=op_events, outside_ms=median(profile.outside_ms for profile in profiles))


def _random_batch(model: nn.Module, step: StepShape, device: torch.device) -> dict[str, torch.Tensor]:
    config: Any = model.config
    words = config.get_text_config().vocab_size
    empty = batch_on_meta(model, step.sequences, step.tokens, step.label_tokens)
    return {
        name: torch.randn(one.shape, dtype=one.dtype, device=device)
        if one.is_floating_point()
        else torch.randint(0, words, one.shape, device=device)
        for name, one in empty.items()
    }


def _states(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    states = [] if optimizer is None else list(optimizer.state.values())
    return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def _meter_of(
    device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> AllocatorMeter | CountingMeter:
    if device.type != "cpu":
        return AllocatorMeter(device)
    here = available_bytes()
    meter = CountingMeter() if here is None else CountingMeter(unlimited_bytes=here)
    meter.own(tensor.detach() for tensor in (*model.parameters(), *model.buffers(), *_states(optimizer)))
    return meter


_Key = tuple[Scope | None, str, int | None, int]
"""Scope, op path and ordinal of a call, and the index of one of its op events."""


def for_all_layers(
    measured: Profile,
    whole: Profile,
    measured_weights: int,
    weights: int,
    layer_types: Sequence[str] = (),
) -> Profile:
    """Return the profile of the whole model with measured times.

    Args:
        measured: measured profile of the model's first layers and the modules around the layers.
        whole: profile of all layers, computed from shapes.
        measured_weights, weights: numbers of weights, by whose ratio the time outside forward and backward
            is scaled.
        layer_types: type of each layer (sliding or full attention), which ops and bytes do not show.

    Raises:
        ModelError: a layer is like none of the measured ones, or a real step runs other ops than the step on
            fake tensors.
    """
    kinds = _kinds(whole, layer_types)
    alike = _representatives(kinds, measured.num_layers)
    times = {key: (op_event.forward_ms, op_event.backward_ms) for key, op_event in _keyed(measured.op_events)}
    op_events = []
    missing: Counter[str] = Counter()
    for (scope, path, ordinal, number), op_event in _keyed(whole.op_events):
        scopes = alike[scope] if isinstance(scope, int) else (scope,)
        found = [times[key] for at in scopes if (key := (at, path, ordinal, number)) in times]
        if not found:
            missing[f"{scope}, {path or 'what is around'}"] += 1
            continue
        forward_ms, backward_ms = (sum(same) / len(same) for same in zip(*found, strict=True))
        op_events.append(replace(op_event, forward_ms=forward_ms, backward_ms=backward_ms))
    if missing:
        expected = "a model that runs the same ops on this device as on fake tensors"
        text = f"{missing.total()} op(s) that did not run, the first in layer {next(iter(missing))}"
        hint = "Leave --layers out: then all layers are measured."
        raise ModelError([Problem("--layers", expected, text, hint)])
    return replace(
        whole,
        op_events=tuple(op_events),
        link=measured.link,
        device=measured.device,
        device_bytes=measured.device_bytes,
        outside_ms=measured.outside_ms * weights / measured_weights,
        reserved_bytes=measured.reserved_bytes,
        source="measured",
    )


def _keyed(op_events: Iterable[OpEvent]) -> Iterator[tuple[_Key, OpEvent]]:
    """Yield op events with their keys; also those without a kernel, so that two profiles count alike."""
    seen: Counter[object] = Counter()
    for op_event in op_events:
        yield (*op_event.call, seen[op_event.call]), op_event
        seen[op_event.call] += 1


def _kinds(whole: Profile, layer_types: Sequence[str]) -> Mapping[int, object]:
    """Return what distinguishes layers: type, calls in order, saved bytes."""
    calls: dict[int, list[object]] = defaultdict(list)
    for op_event in whole.op_events:
        scope, path, ordinal = op_event.call
        if isinstance(scope, int):
            calls[scope].append((path, ordinal))
    sizes: dict[int, dict[str, int]] = defaultdict(dict)
    for (scope, path), size_bytes in whole.saved.by_op().items():
        if isinstance(scope, int):
            sizes[scope][path] = size_bytes
    types = dict(enumerate(layer_types))
    return {
        layer: (types.get(layer), tuple(calls[layer]), tuple(sorted(sizes[layer].items()))) for layer in calls
    }


def _representatives(kinds: Mapping[int, object], measured: int) -> Mapping[int, tuple[int, ...]]:
    """Return for each layer the measured layers whose times it gets: itself, or all of its kind."""
    by_kind: dict[object, list[int]] = defaultdict(list)
    for layer in range(measured):
        by_kind[kinds[layer]].append(layer)
    strange = [layer for layer, kind in kinds.items() if kind not in by_kind]
    if strange:
        expected = f"at least {strange[0] + 1}: no earlier layer does what layer {strange[0]} does"
        raise ModelError([Problem("--layers", expected, str(measured))])
    return {layer: (layer,) if layer < measured else tuple(by_kind[kind]) for layer, kind in kinds.items()}


_THIS = "this"
_FEWER = "Ask for fewer --layers: their times are taken for the others too. Or for less --seq or --batch."

_AROUND = "around"
"""Name for what runs outside of all scopes: rotary tables, masks, the loss."""


def _device_or_this(text: str) -> str:
    return _THIS if text.strip().lower() == _THIS else options.device_named(text)


def _shown(
    found: AnalysedModel,
    step: StepShape,
    made: Profile,
    measured_layers: int,
    costs: Sequence[OpCost],
    unplanned: Prediction,
    written_to: str | None,
) -> Iterator[RenderableType]:
    layers, link = len(found.shape.layers), made.link
    times = "computed from shapes and the device's rates; nothing was measured"
    if measured_layers:
        some = f", {measured_layers} of {layers} layers" if measured_layers < layers else ""
        times = f"measured here, median of {TIMED_STEPS} steps{some}"
    yield f"Model: {found.described()}"
    yield f"Step:  {step.described()}"
    yield f"Times: {times}"
    yield f"Link:  {'copies do not run beside compute' if link is None else link_text(link)}"
    yield heading("Ops: times in ms, all layers of a line together")
    yield _cost_table(made, costs)
    yield (
        "\nSaved: what autograd saves of the op's results. Rebuild: the time that recomputing it adds to "
        f"backward.{' Copy: to the host, without other copies on the link.' if link else ''}"
    )
    yield (
        f"Step without a plan: {step_ms_text(unplanned.step_ms)}, {step_ms_text(made.outside_ms)} of it "
        f"outside forward and backward; peak {size_text(unplanned.peak_bytes)}."
    )
    if written_to is not None:
        yield f"Written to {written_to}; hf-actswap plan --profile reads it."


def profile(
    model: options.ModelName,
    seq: Annotated[
        int, typer.Option(parser=options.tokens, metavar="N", help="Tokens of a sequence: 4096, 4k.")
    ] = 4096,
    batch: options.Batch = 1,
    layers: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Measure only the first K layers; the others get their times."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
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
        typer.Option(
            "--output", "-o", metavar="FILE", help="File for the profile; hf-actswap plan --profile reads it."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    def ask() -> Answer:
        here = _device_here(device)
        named = name_of(here) if here is not None else device_name(device)
        step = StepShape(batch, seq, named, autocast, optimizer)
        with subject(ModelRequest(model, dtype), load_config(None)) as found:
            if here is None:
                if layers is not None:
                    hint = "Leave --layers out, or measure on this machine: --device this."
                    expected = f"{named} on this machine, to measure on"
                    raise ModelError([Problem("--layers", expected, "none", hint)])
                made, measured_layers = _from_shapes(found, step), 0
            else:
                made, measured_layers = _measured(found, step, dtype, here, layers)
        costs = _op_costs(made)
        unplanned = Simulator(made).predict(MemoryPlan((), made.num_layers, made.family), curve=False)
        if output is not None:
            try:
                write_profile(output, made, found, step, measured_layers)
            except OSError as error:
                raise typer.BadParameter(f"{output}: {error.strerror}", param_hint="--output") from error
        document = {
            "model": found.document(),
            "step": step.document(),
            "source": made.source,
            "measured_layers": measured_layers,
            "device": made.device,
            "device_bytes": made.device_bytes,
            "link": None if made.link is None else asdict(made.link),
            "outside_ms": made.outside_ms,
            "ops": [asdict(cost) for cost in costs],
            "predicted": prediction_document(unplanned),
            "written_to": output,
        }
        return Answer(document, _shown(found, step, made, measured_layers, costs, unplanned, output))

    answer("profile", as_json, ask)


def _device_here(asked: str | None) -> torch.device | None:
    """Return the device to measure on; ``None``: this machine does not have the one asked for."""
    if asked == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if asked == _THIS:
        return accelerator or torch.device("cpu")
    return accelerator if asked is None or device_kind(asked) == rates_here() else None


def _from_shapes(found: AnalysedModel, step: StepShape, workspaces: bool = True) -> Profile:
    with busy(f"profile of {found.described()}, from shapes"):
        return profile_of(found, step, workspaces=workspaces)


def _measured(
    whole: AnalysedModel, step: StepShape, dtype: DtypeName | None, device: torch.device, layers: int | None
) -> tuple[Profile, int]:
    """Measure a step with the first layers, or all; layers that are not measured get the others' times."""
    count = len(whole.shape.layers)
    measured_layers = min(layers or count, count)
    own_shape = replace(step, device=DEFAULT_DEVICE)  # only the bytes of a calculated step are used here
    on_paper = _from_shapes(whole, own_shape, False) if measured_layers < count else None
    if device.type == "cpu":
        _reject_if_too_large(whole, step, measured_layers)
    made, weights = _recorded(whole.name, step, dtype, device, None if on_paper is None else layers)
    if on_paper is not None:
        config: Any = whole.model.config
        types = getattr(config.get_text_config(), "layer_types", None) or ()
        made = for_all_layers(made, on_paper, weights, whole.parameters, types)
    return made, measured_layers


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
            made = recorded_steps(part, model_structure(part), step, bar)
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
    """Raise an error if a step does not fit in host memory: the kernel would kill the process silently."""
    # Before a model runs, only the sizes of its weights, gradients and optimizer states are known.
    free, share = available_bytes(), layers / len(whole.shape.layers)
    weight_bytes = sum(p.numel() * p.element_size() for p in whole.model.parameters())
    least = int((2 * weight_bytes + state_bytes(step.optimizer, whole.model)[0]) * share)
    if free is not None and least > free:
        expected = f"a step that fits in the {size_text(free)} that are free"
        found = f"{size_text(least)} of weights, gradients and optimizer states"
        raise ModelError([Problem("model", expected, found, _FEWER)])


@dataclass(frozen=True)
class OpCost:
    """Time and memory of an op, added up over layers that are equal.

    Args:
        scope: ``embedding``, ``final_norm``, ``head`` or ``around``; empty for layers.
        op: first part of the op path; ``""``: what runs between the ops.
        saved_bytes: bytes of the op's results that autograd saves.
        rebuild_ms: how much longer backward takes if the op is recomputed.
        rebuilt_bytes: saved bytes that are not kept if the op is recomputed.
    """

    scope: str
    layers: tuple[int, ...]
    op: str
    forward_ms: float
    backward_ms: float
    saved_bytes: int
    rebuild_ms: float | None = None
    rebuilt_bytes: int | None = None


def _op_costs(profile: Profile) -> list[OpCost]:
    """Return the ops of a step in the order in which they run.

    Layers whose ops are the same and save as many bytes are joined; other scopes stand alone.
    """
    # Forward and backward in ms, and saved bytes, by scope and op.
    sums: dict[Scope | None, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0, 0]))
    for op_event in profile.op_events:
        scope, path, _ = op_event.call
        of_op = sums[scope][_op_of(scope, path)]
        of_op[0] += op_event.forward_ms
        of_op[1] += op_event.backward_ms
    for (scope, path), size_bytes in profile.saved.by_op().items():
        sums[scope][_op_of(scope, path)][2] += size_bytes
    equal: dict[object, list[Scope | None]] = {}
    for scope, by_op in sums.items():
        saved = tuple((op, of_op[2]) for op, of_op in by_op.items())
        equal.setdefault(saved if isinstance(scope, int) else scope, []).append(scope)
    simulator, found = Simulator(profile), []
    for scopes in equal.values():
        layers = tuple(scope for scope in scopes if isinstance(scope, int))
        name = "" if layers else str(scopes[0] or _AROUND)
        for op in sums[scopes[0]]:
            forward_ms, backward_ms, size = map(sum, zip(*(sums[scope][op] for scope in scopes), strict=True))
            cost = OpCost(name, layers, op, forward_ms, backward_ms, int(size))
            if layers and op and size:
                rows = tuple(PlanRow(layer, op, "recompute") for layer in layers)
                plan = MemoryPlan(rows, profile.num_layers, profile.family)
                step = simulator.predict(plan, curve=False)
                cost = replace(cost, rebuild_ms=step.recompute_ms, rebuilt_bytes=step.recomputed_bytes)
            found.append(cost)
    return found


def _cost_table(profile: Profile, costs: Sequence[OpCost]) -> Table:
    copy = (">Copy",) if profile.link else ()
    table = table_of("", ">Forward", ">Backward", ">Saved", ">Rebuild", *copy, collapse_padding=True)
    shown: tuple[int, ...] = ()
    for cost in costs:
        if cost.layers and cost.layers != shown:
            shown = cost.layers
            table.add_row(f"layers {format_scopes(shown)}")
        table.add_row(f"  {cost.op or 'between'}" if cost.layers else cost.scope, *_numbers(profile, cost))
    return table


def _numbers(profile: Profile, cost: OpCost) -> list[str]:
    size_bytes, link = cost.saved_bytes, profile.link
    shown = [op_ms_text(cost.forward_ms), op_ms_text(cost.backward_ms)]
    shown.append(size_text(size_bytes) if size_bytes else "")
    shown.append("" if cost.rebuild_ms is None else op_ms_text(cost.rebuild_ms))
    if link is not None:
        shown.append(op_ms_text(link.out_ms(size_bytes) - link.latency_ms) if size_bytes else "")
    return shown


def _op_of(scope: Scope | None, path: str) -> str:
    return path.partition(".")[0] if isinstance(scope, int) else ""
