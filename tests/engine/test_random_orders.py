"""In any order: no use before its copy has ended, no release before its offload has, and the same gradients.

Each example draws a model of a few layers of plain ops, a plan for it, how long copies take in each
direction and compute between them, and what is done with the graphs. The engine runs for real on a machine
that notices what is freed too early (`disorderly_transfer`); what is read too early is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st
from torch import nn

from hf_actswap import MemoryPlan
from hf_actswap.engine import Resources, install
from hf_actswap.plan import ModelStructure, PlanRow, Windows
from hf_actswap.plan.model_structure import LayerStructure, Op
from tests.engine.disorderly_transfer import Direction, DisorderlyTransfer, Machine
from tests.engine.graph_lives import GRAPH_LIVES, run_step

MOST_LAYERS = 3
PATHS = ("", "self_attn", "mlp", "output", "self_attn.flash_attention", "mlp.tanh")
BODIES = ("product", "views", "shared")


class Half(nn.Module):
    """A few ops on a tensor of shape (tokens, width), the same shape out."""

    def __init__(self, width: int, body: str, beat: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 2 * width) / 2)
        self.body = body
        self._width, self._beat = width, beat

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = self._beat(hidden @ self.weight)
        if self.body == "product":  # saved outputs, and a saved input that is a view
            first.cos()  # nobody uses it: what it saved dies while the forward runs
            return self._beat(first.tanh())[:, : self._width].sin()
        one, other = first.chunk(2, -1)
        if self.body == "views":  # two views of one storage, saved by different nodes
            return self._beat(one * other.t().tanh().t())
        mixed = self._beat(one.sigmoid() * one) + other * one  # one storage with many readers
        return self._beat(mixed * hidden)


class Layer(nn.Module):
    """A decoder layer by its names."""

    def __init__(self, width: int, bodies: tuple[str, str], beat: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.self_attn, self.mlp = Half(width, bodies[0], beat), Half(width, bodies[1], beat)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(hidden)
        return hidden + self.mlp(hidden.cos())


class Model(nn.Module):
    """Layers and a loss."""

    def __init__(
        self, width: int, bodies: Iterable[tuple[str, str]], beat: Callable[..., torch.Tensor]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, pair, beat) for pair in bodies)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sin().mean()


def structure_of(count: int) -> ModelStructure:
    """Written by hand: naming the layers of each example would take longer than running it."""
    modules = tuple(Op(path, "module") for path in ("self_attn", "mlp"))
    functions = tuple(Op(path, "function") for path in ("self_attn.flash_attention", "mlp.tanh"))
    return ModelStructure(
        "",
        tuple(
            LayerStructure(index, f"layers.{index}", "Layer", (*modules, *functions))
            for index in range(count)
        ),
    )


@dataclass(frozen=True)
class Step:
    """Forwards and backwards that share gradients; ``other_ops``: the layers change theirs."""

    life: str
    tokens: int
    other_ops: bool


@dataclass(frozen=True)
class Example:
    """What is drawn; times in ms."""

    bodies: list[tuple[str, str]]
    width: int
    rows: list[PlanRow]
    min_tensor_bytes: int
    host_memory_bytes: int | None
    out_ms: list[int]
    in_ms: list[int]
    compute_ms: list[int]
    steps: list[Step]
    hold: bool

    @property
    def poison(self) -> bool:
        """Whether nobody may read a source after the forward: a small view, or one too many, is kept."""
        return self.hold and self.min_tensor_bytes == 0 and self.host_memory_bytes is None

    @property
    def plan(self) -> MemoryPlan:
        rows = [row for row in self.rows if int(row.scope) < len(self.bodies)]
        return MemoryPlan(
            rows=tuple({(row.scope, row.op_path): row for row in rows}.values()),
            num_layers=len(self.bodies),
            min_tensor_bytes=self.min_tensor_bytes,
            host_memory_bytes=self.host_memory_bytes,
        )


def _row(scope: int, path: str, windows: Windows | None) -> PlanRow:
    return PlanRow(scope, path, "swap" if windows else "recompute", windows=windows)


_windows = st.builds(Windows, st.integers(0, 40), st.integers(0, 60))
_durations_ms = st.lists(st.integers(0, 40), min_size=1, max_size=6)
_layers = st.integers(0, MOST_LAYERS - 1)
_rows = st.one_of(
    st.builds(_row, _layers, st.sampled_from(PATHS), _windows),
    st.builds(_row, _layers, st.sampled_from(PATHS), _windows),  # twice: swaps are what this is about
    st.builds(_row, _layers, st.sampled_from(["", "self_attn", "mlp", "mlp.tanh"]), st.none()),
)
# Mostly the same again: what an engine learns of one step, it uses in the next.
_steps = st.builds(
    Step,
    st.sampled_from(GRAPH_LIVES),
    st.sampled_from([7, 7, 7, 1]),
    st.sampled_from([False, False, False, True]),
)
examples = st.builds(
    Example,
    bodies=st.lists(
        st.tuples(st.sampled_from(BODIES), st.sampled_from(BODIES)), min_size=1, max_size=MOST_LAYERS
    ),
    width=st.sampled_from([2, 5, 16]),
    rows=st.lists(_rows, min_size=1, max_size=6),
    min_tensor_bytes=st.sampled_from([0, 0, 64]),
    host_memory_bytes=st.sampled_from([None, None, 2**12]),
    out_ms=_durations_ms,
    in_ms=_durations_ms,
    compute_ms=_durations_ms,
    steps=st.lists(_steps, min_size=1, max_size=4),
    hold=st.booleans(),
)


class Trainer:
    """Runs an example's steps on its model.

    Args:
        example: what.
        machine: whose clock compute moves.
        after_forward: called after each.
    """

    def __init__(self, example: Example, machine: Machine, after_forward: Callable[[], None]) -> None:
        self._example, self._machine, self._after_forward = example, machine, after_forward
        torch.manual_seed(0)
        self.model = Model(example.width, example.bodies, self._beat)
        self._inputs = torch.Generator().manual_seed(1)

    def gradients(self) -> list[torch.Tensor]:
        """Run all steps; return what each left, one after another."""
        found = []
        for step in self._example.steps:
            self.model.zero_grad()
            self._tokens = step.tokens
            for layer in self.model.layers if step.other_ops else ():
                layer.self_attn.body, layer.mlp.body = layer.mlp.body, layer.self_attn.body
            run_step(step.life, self._forward, self.model.layers[-1].mlp.weight)
            found += [parameter.grad.clone() for parameter in self.model.parameters()]  # type: ignore[union-attr]
        return found

    def _forward(self, _number: int) -> torch.Tensor:
        hidden = torch.randn(self._tokens, self._example.width, generator=self._inputs)
        self._machine.beat()
        loss: torch.Tensor = self.model(hidden)
        self._after_forward()
        return loss

    def _beat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Time passes here, in forward and in backward."""
        self._machine.beat()
        if tensor.requires_grad:
            tensor.register_hook(self._machine.beat)
        return tensor


def faults(example: Example, never_waits: Direction | None = None) -> tuple[list[str], int]:
    """Run an example with its plan and without; return what is wrong, and how many copies there were."""
    expected = Trainer(example, Machine([0]), lambda: None).gradients()
    machine = Machine(example.compute_ms)
    transfer = DisorderlyTransfer(machine, example.out_ms, example.in_ms, never_waits, example.poison)
    trainer = Trainer(example, machine, transfer.poison_sources)
    applied = install(trainer.model, example.plan, structure_of(len(example.bodies)), Resources(transfer))
    found = trainer.gradients()
    machine.finish()
    stats = applied.stats()
    wrong = list(machine.violations)
    wrong += [
        f"gradient {index} differs"
        for index, pair in enumerate(zip(found, expected, strict=True))
        if not torch.equal(*pair)
    ]
    if (stats.live_swaps, stats.host_bytes) != (0, 0):
        wrong.append(f"{stats.live_swaps} swaps and {stats.host_bytes} host bytes are left")
    applied.remove()
    return wrong, transfer.copies


def assert_right(example: Example) -> None:
    assert faults(example)[0] == []


# Drawn once: a result that is held for a region around it, and that nothing else saves.
HELD_ALONE = Example(
    bodies=[("product", "product")] * 3,
    width=2,
    rows=[
        _row(1, "mlp", Windows(0, 59)),
        _row(1, "mlp.tanh", None),
        _row(0, "", Windows(0, 22)),
        _row(0, "", None),
        _row(1, "", None),
        _row(0, "", Windows(14, 36)),
    ],
    min_tensor_bytes=0,
    host_memory_bytes=None,
    out_ms=[36, 0, 36, 37, 12, 0],
    in_ms=[0],
    compute_ms=[29, 23, 0, 30, 21],
    steps=[Step("one backward", 7, False)] * 4,
    hold=False,
)


@settings(max_examples=50)
@example(example=HELD_ALONE)
@given(example=examples)
def test_random_orders(example: Example) -> None:
    assert_right(example)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=10_000)
@given(example=examples)
def test_ten_thousand_random_orders(example: Example) -> None:
    assert_right(example)


def shown_by_an_example(never_waits: Direction, shows: Callable[[Example, list[str]], bool]) -> None:
    """Fail unless an example shows that an engine does not wait in one direction.

    One in eight to one in three does, and the first one ends the search. Hypothesis draws examples that
    resemble each other, so that none of a hundred did in one search of thirty.
    """
    find(
        examples,
        lambda example: shows(example, faults(example, never_waits)[0]),
        settings=settings(max_examples=2000, phases=[Phase.generate], database=None),
    )


def test_a_release_that_does_not_wait_is_noticed() -> None:
    """Both ways of noticing: memory that is gone, and poison that arrives on the host."""
    gone = "source released before its copy out was complete"
    shown_by_an_example("out", lambda _, wrong: gone in wrong)
    shown_by_an_example(
        "out", lambda example, wrong: example.poison and any(text.startswith("gradient") for text in wrong)
    )


def test_a_use_that_does_not_wait_is_noticed() -> None:
    """Both ways of noticing: NaN in the gradients, and a block that is gone."""
    shown_by_an_example("in", lambda _, wrong: any(text.startswith("gradient") for text in wrong))
    shown_by_an_example("in", lambda _, wrong: "block dropped before its copy in was complete" in wrong)


def test_most_examples_copy_something() -> None:
    """The properties above mean something; copies of one direction overlap those of the other."""
    counts: list[Any] = []

    @settings(max_examples=50, database=None, derandomize=True)
    @given(example=examples)
    def run(example: Example) -> None:
        counts.append(faults(example)[1])

    run()
    assert sum(count >= 4 for count in counts) > len(counts) / 2
