"""Draws the curves and timelines of docs/how_it_works.md, and writes its table of windows.

    python docs/make_pictures.py        # needs matplotlib

The times are not measured: a small step is walked through on paper, by the engine's own queues
(`tests/engine/window_simulation.py`). Each SVG carries a digest of what it was drawn from.
"""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how_it_works.md"
sys.path.insert(0, str(ROOT))

from docs.make_sketches import write_svgs  # noqa: E402 - neither need be installed
from hf_actswap.engine.link import Link  # noqa: E402
from hf_actswap.engine.windows import Candidate, Decision, HookTimes, Timeline  # noqa: E402
from hf_actswap.plan.actions import Windows  # noqa: E402
from tests.engine.window_simulation import Simulated, simulate  # noqa: E402

LAYERS, OPS = 8, 10
FORWARD_MS, BACKWARD_MS = 1.0, 2.0
TENSOR_BYTES, INPUT_BYTES = 32 * 2**20, 4 * 2**20
LINK = Link(55e6, 55e6, 50e6, 50e6)
HOOKS = (1, 3, 5, 7, 9)
"""Operators of a layer at which autograd saves something; the first saves the tensor that is swapped."""

FOLLOWED, PREFETCH = 2, 8
"""The layer whose tensor is drawn alone, and its ``backward_prefetch``."""

WINDOWS = (1, 4, 8, 24)
MIB = 2**20

COMPUTE, OUT, BACK, HELD, HOST, AGAIN = "#d0d7de", "#2f6690", "#3a7d44", "#c8102e", "#8c6d1f", "#b8860b"
FAINT = 0.28
_TABLE = re.compile(r"(<!-- by docs/make_pictures.py -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Step:
    """A step with one ``backward_prefetch`` for all layers; 0: nothing is swapped."""

    prefetch: int
    simulated: Simulated

    @property
    def most_bytes(self) -> int:
        """Most bytes of the swapped tensors on the device at once."""
        return max(size_bytes for _, size_bytes in self.simulated.memory)

    @property
    def waits_ms(self) -> float:
        """How long compute waited."""
        return self.simulated.forward_stall_ms + self.simulated.backward_stall_ms


def timeline() -> Timeline:
    """When compute reaches each hook if nothing waits."""
    ops = [layer * OPS + op for layer in range(LAYERS) for op in HOOKS]
    turn = LAYERS * FORWARD_MS
    forward = [(op, op / OPS * FORWARD_MS) for op in ops]
    backward = [(op, turn + (LAYERS * OPS - op) / OPS * BACKWARD_MS) for op in reversed(ops)]
    end = (-1, turn + LAYERS * BACKWARD_MS)
    return Timeline((*forward, (LAYERS * OPS, turn)), (*backward, end))


def candidates() -> list[Candidate]:
    """One tensor of each layer: saved by its first operator that saves, first read by its last."""
    first, last = HOOKS[0], HOOKS[-1]
    return [Candidate(TENSOR_BYTES, layer * OPS + first, layer * OPS + last) for layer in range(LAYERS)]


def step(prefetch: int) -> Step:
    """Walk through a step. The last layer's tensor is kept: backward wants it at once."""
    kept = Decision(None, "kept")
    swapped = Decision(Windows.of_prefetch(prefetch)) if prefetch else kept
    return Step(prefetch, simulate(candidates(), [swapped] * (LAYERS - 1) + [kept], timeline(), LINK))


def digest() -> str:
    """A digest of all that the pictures show."""
    shown = [step(prefetch).simulated for prefetch in (0, *WINDOWS, PREFETCH)]
    return hashlib.sha256(repr((shown, INPUT_BYTES, FOLLOWED)).encode()).hexdigest()[:16]


def with_table(page: str) -> str:
    """Return the page with its table of windows as it is now."""
    lines = [
        "| `backward_prefetch` | most on the device, MiB | compute waits, ms | step, ms |",
        "|---|---:|---:|---:|",
    ]
    for one in (step(prefetch) for prefetch in (*WINDOWS, 0)):
        name = str(one.prefetch) if one.prefetch else "(kept)"
        cells = (name, f"{one.most_bytes / MIB:.0f}", f"{one.waits_ms:.1f}", f"{one.simulated.step_ms:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    return _TABLE.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page)


def draw_one_tensor(figure: Any) -> None:
    """The life of one tensor: streams above, memory below."""
    axes = figure.add_subplot()
    run, hooks, candidate = step(PREFETCH).simulated, HookTimes(timeline()), candidates()[FOLLOWED]
    windows = Windows.of_prefetch(PREFETCH)
    saved, released = (
        hooks.ready_ms(candidate.ready_op),
        hooks.released_ms(candidate.ready_op, windows.release_ops),
    )
    fetched, read = (
        hooks.prefetched_ms(candidate.consumer_op + PREFETCH),
        hooks.consumed_ms(candidate.consumer_op),
    )
    left = run.forward_end_ms + (LAYERS - FOLLOWED) * BACKWARD_MS
    lanes = {
        "compute": 4,
        "copy out": 3,
        "copy in": 2,
        "device memory\nof this tensor": 1,
        "host memory\nof this tensor": 0,
    }
    for layer in range(LAYERS):
        strong = layer == FOLLOWED
        _box(axes, layer * FORWARD_MS, FORWARD_MS, 4, COMPUTE, f"F{layer}", strong)
        back = run.forward_end_ms + (LAYERS - 1 - layer) * BACKWARD_MS
        _box(axes, back, BACKWARD_MS, 4, COMPUTE, f"B{layer}", strong)
        for lane, colour, ends, way in (
            (3, OUT, run.out_finish_ms, LINK.out_ms),
            (2, BACK, run.in_finish_ms, LINK.in_ms),
        ):
            if (end := ends[layer]) is not None:
                _box(axes, end - way(TENSOR_BYTES), way(TENSOR_BYTES), lane, colour, "", strong, not strong)
    _box(axes, saved, released - saved, 1, HELD, "")
    _box(axes, fetched, left - fetched, 1, HELD, "")
    _box(axes, saved, left - saved, 0, HOST, "")
    done = run.out_finish_ms[FOLLOWED]
    marks = ((saved, "1"), (done, "2"), (released, "3"), (fetched, "4"), (read, "5"), (left, "6"))
    for at, number in marks:
        axes.plot([at, at], [-0.35, 4.45], color="#555555", linewidth=0.7, linestyle=":", zorder=0)
        axes.text(at, 4.62, number, ha="center", va="center", fontsize=9, weight="bold")
    axes.set_yticks(list(lanes.values()), list(lanes), fontsize=9)
    axes.set_ylim(-0.5, 4.85)
    _time_axis(axes, run.forward_end_ms + LAYERS * BACKWARD_MS)


def draw_windows(figure: Any) -> None:
    """Device memory of the swapped tensors over a step, a panel for each window."""
    panels = figure.subplots(len(WINDOWS), 1, sharex=True, sharey=True)
    kept = step(0)
    end = max(step(prefetch).simulated.step_ms for prefetch in WINDOWS)
    for axes, prefetch in zip(panels, WINDOWS, strict=True):
        one = step(prefetch)
        _curve(axes, kept.simulated.memory, kept.simulated.step_ms, "#9aa5ad", filled=False)
        _curve(axes, one.simulated.memory, one.simulated.step_ms, HELD)
        axes.axvline(one.simulated.forward_end_ms, color="#555555", linewidth=0.7, linestyle=":")
        waits = f"waits {one.waits_ms:.1f} ms" if one.waits_ms > 0.05 else "no wait"
        text = f"backward_prefetch {prefetch}: {waits}"
        axes.text(0.995, 0.9, text, transform=axes.transAxes, ha="right", va="top", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[len(WINDOWS) // 2].set_ylabel("MiB on the device", y=1.0)
    panels[0].text(one.simulated.forward_end_ms, 262, " kept", color="#6b747b", fontsize=9, va="bottom")
    panels[0].set_ylim(0, 300)
    _time_axis(panels[-1], end)


def draw_fates(figure: Any) -> None:
    """The same tensors kept, swapped and recomputed."""
    axes = figure.add_subplot()
    kept, swapped = step(0).simulated, step(PREFETCH).simulated
    again, end = recomputed()
    _curve(axes, kept.memory, kept.step_ms, "#6b747b", filled=False, label="keep")
    _curve(axes, swapped.memory, swapped.step_ms, HELD, filled=False, label="swap: time on the link")
    _curve(axes, again, end, AGAIN, filled=False, label="recompute: time on the device")
    axes.set_ylabel("MiB on the device")
    axes.set_ylim(0, 300)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    _time_axis(axes, end)


def recomputed() -> tuple[list[tuple[float, int]], float]:
    """(ms, bytes) on the device if each layer keeps its input and runs again, and when the step ends."""
    held, memory, now = 0, [], 0.0
    for layer in range(LAYERS):
        held += INPUT_BYTES
        memory.append((layer * FORWARD_MS, held))
    now = LAYERS * FORWARD_MS
    for _ in range(LAYERS):
        now += FORWARD_MS
        memory.append((now, held + TENSOR_BYTES))
        now += BACKWARD_MS
        held -= INPUT_BYTES
        memory.append((now, held))
    return memory, now


DRAWINGS = {
    "one_tensor": (draw_one_tensor, (10.0, 3.6)),
    "windows": (draw_windows, (10.0, 5.0)),
    "fates": (draw_fates, (10.0, 3.2)),
}


def _box(
    axes: Any,
    start: float,
    width: float,
    lane: int,
    colour: str,
    text: str,
    strong: bool = True,
    faint: bool = False,
) -> None:
    edge = "#222222" if strong else "#9aa5ad"
    alpha = FAINT if faint else 1.0
    axes.barh(lane, width, 0.62, start, color=colour, edgecolor=edge, linewidth=0.8, alpha=alpha, zorder=2)
    if text:
        weight = "bold" if strong else "normal"
        axes.text(
            start + width / 2, lane, text, ha="center", va="center", fontsize=8, weight=weight, zorder=3
        )


def _curve(
    axes: Any, memory: Any, end_ms: float, colour: str, filled: bool = True, label: str | None = None
) -> None:
    """A step function of (ms, bytes)."""
    times = [0.0, *(ms for ms, _ in memory), end_ms]
    sizes = [0.0, *(size_bytes / MIB for _, size_bytes in memory)]
    sizes.append(sizes[-1])
    axes.step(times, sizes, where="post", color=colour, linewidth=1.6, label=label)
    if filled:
        axes.fill_between(times, sizes, step="post", color=colour, alpha=0.18, linewidth=0)


def _time_axis(axes: Any, end_ms: float) -> None:
    axes.set_xlim(-0.2, end_ms + 0.2)
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    write_svgs(DRAWINGS, digest())
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
