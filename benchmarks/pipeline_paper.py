"""Swap across the passes of a pipeline's stages, on paper: no device is needed.

    python benchmarks/pipeline_paper.py          # minutes; writes results/pipeline_on_paper_<yyyymmdd>.json

Llama-3-8B in four stages, 1F1B, 16 micro-batches, eager, bf16. What keeps and what recomputes all of its
layers is what ``hf-actswap plan`` answers. What swaps is a stage on paper: its passes in their order, without
waits for other stages, with the engine's own order of passes and queues (`engine.passes`,
`engine.schedule`), copies on a link with both directions at the measured rates. Operators are taken to be
equally long within a pass, 1000 of them; the last stage keeps everything. A micro-batch's time is that of a
forward and a backward in the middle of the step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import weakref
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hf_actswap.cli.plan_answer import answer_plan
from hf_actswap.cli.plan_request import AskedStep, ModelRequest, PlanRequest
from hf_actswap.cli.stages import Stage, StagesAnswer
from hf_actswap.engine.link import DuplexLink, Link
from hf_actswap.engine.passes import CrossingReleases, Pass, PassOrder
from hf_actswap.engine.schedule import PrefetchOrder, Want
from hf_actswap.pipeline.runtime import order_of_passes
from hf_actswap.planner.cost.simulate import Simulator

GIB, STAGES, COUNT, OPS = 2**30, 4, 16, 1000
RESULTS = Path(__file__).resolve().parent / "results"
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
FATES = {
    "keep": {},
    "recompute": {"recompute_config": {"recompute": True}},
    "swap": {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 10000, "layers": True}]}},
}
INSTANT = Link(1e15, 1e15, 1e15, 1e15, 0.0)


class Group:
    """A swapped storage on paper: what `PassOrder` asks of a `SwapGroup`."""

    def __init__(self, stage: StageOnPaper, size_bytes: int, ready_op: int, consumer_op: int) -> None:
        self.stage, self.size_bytes, self.ready_op, self.last_use = stage, size_bytes, ready_op, consumer_op
        self.prefetch_ops, self.place, self.number = 10_000, "device", stage.count_of_groups
        stage.count_of_groups += 1

    def release(self) -> None:
        """Wait for the copy out."""
        if self.place == "device":
            self.stage.waits(self.stage.link.out, self.number)
            self.place = "host"
            self.stage.count(-self.size_bytes)

    def fetch(self) -> None:
        """Start the copy back."""
        if self.place == "host":
            self.place = "back"
            link = self.stage.link
            link.enqueue(link.back, self.number, self.size_bytes, self.stage.now_ms)
            self.stage.count(self.size_bytes)


class StageOnPaper:
    """Passes of one stage, in their order.

    Args:
        storages: (bytes, operator that saves it, operator that reads it first) of a micro-batch.
        forward_ms, backward_ms: of a micro-batch's passes.
        link: of host and device.

    Attributes:
        now_ms: compute's time.
        most_bytes: swapped bytes on the device.
    """

    def __init__(
        self, storages: Sequence[tuple[int, int, int]], forward_ms: float, backward_ms: float, link: Link
    ) -> None:
        self._storages, self._ms = storages, (forward_ms, backward_ms)
        self.link, self.now_ms, self.count_of_groups = DuplexLink(link), 0.0, 0
        self._bytes = self.most_bytes = 0
        self._op = 0
        self._watcher: Any = None

    def run(self, order: Sequence[Pass], knows: bool) -> list[float]:
        """Run a step; return when each pass ends, in ms."""
        passes, held = PassOrder(), {}
        passes.begin(order if knows else ())
        ends = []
        for one in order:
            if one.is_backward:
                self._backward(*held.pop(one.micro_batch))
            else:
                passes.forward_follows(one.chunk, one.micro_batch)
                held[one.micro_batch] = self._forward(passes)
            ends.append(self.now_ms)
        return ends

    def waits(self, lane: Any, number: int) -> None:
        """Compute waits for a copy."""
        self.now_ms = self.link.wait(lane, number, self.now_ms)

    def count(self, change_bytes: int) -> None:
        """Memory changes."""
        self._bytes += change_bytes
        self.most_bytes = max(self.most_bytes, self._bytes)

    @property
    def clock(self) -> Any:
        """As of a `Backward`, whose forward has ended."""
        return self

    def now(self) -> int:
        """The operator built last."""
        return OPS - 1

    def watch(self, watcher: Any) -> None:
        """As of a `Backward`."""
        self._watcher = watcher

    def _forward(self, passes: PassOrder) -> tuple[list[Group], Any]:
        queue: Any = passes.releases(0)
        groups, self._watcher = [], None
        for op in range(OPS):
            self.now_ms += self._ms[0] / OPS
            for reference in queue.due(op):
                reference().release()
            for size_bytes, _, consumer_op in self._saved.get(op, ()):
                group = Group(self, size_bytes, op, consumer_op)
                groups.append(group)
                self.count(size_bytes)
                self.link.enqueue(self.link.out, group.number, size_bytes, self.now_ms)
                queue.add(weakref.ref(group), op, 30_000)
        references: Any = [weakref.ref(group) for group in groups]
        crosses = isinstance(queue, CrossingReleases)
        backward: Any = self
        for reference in passes.forward_ended(queue, references, backward) if crosses else queue.drain():
            reference().release()
        return groups, self._watcher

    def _backward(self, groups: list[Group], watcher: Any) -> None:
        wants = [Want(group, group.last_use, group.prefetch_ops) for group in groups]
        order = PrefetchOrder(range(OPS), wants)
        for op in reversed(range(OPS)):
            if watcher is not None:
                watcher(op)
            for group in order.due(op):
                group.fetch()
            for group in groups:
                if group.last_use == op:
                    group.fetch()
                    if group.place == "back":
                        self.waits(self.link.back, group.number)
                if group.ready_op == op:
                    self.count(-group.size_bytes)
            self.now_ms += self._ms[1] / OPS

    @property
    def _saved(self) -> dict[int, list[tuple[int, int, int]]]:
        found: dict[int, list[tuple[int, int, int]]] = {}
        for storage in self._storages:
            found.setdefault(storage[1], []).append(storage)
        return found


def stages_of(folder: Path, tokens: int, fate: str, device: str) -> StagesAnswer:
    """What ``hf-actswap plan`` answers."""
    model, config = folder / "llama_3_8b.json", folder / f"{fate}.yaml"
    model.write_text(json.dumps(LLAMA_3_8B), encoding="utf-8")
    pipeline = {"parallel_config": {"pipeline_stage": STAGES, "schedule": "1f1b"}}
    config.write_text(json.dumps({**pipeline, **FATES[fate]}), encoding="utf-8")
    step = AskedStep(sequences=1, tokens=tokens, device=device)
    request = PlanRequest(
        ModelRequest(str(model)), str(config), step, None, None, None, (), None, False, False, None, COUNT
    )
    found = answer_plan(request)
    assert isinstance(found, StagesAnswer)
    return found


def swapped(number: int, keep: Stage, swap: Stage, knows: bool, layers: int) -> dict[str, Any]:
    """A stage that swaps some of its layers, spread over all, on paper.

    Args:
        number: of the stage.
        keep, swap: the stage that keeps and the one that swaps everything.
        knows: whether it knows the schedule.
        layers: how many of its layers swap.
    """
    spread = {swap.layers[index * len(swap.layers) // layers] for index in range(layers)}
    copies = Simulator(swap.profile).predict(swap.plan, INSTANT).copies
    turn_ms = keep.step.turn_ms
    backward_ms = keep.each_ms - turn_ms
    storages = [
        (
            copy.size_bytes,
            min(int(copy.out_start_ms / turn_ms * OPS), OPS - 1),
            OPS - 1 - min(max(int((copy.read_ms - turn_ms) / backward_ms * OPS), 0), OPS - 1),
        )
        for copy in copies
        if copy.call[0] in spread
    ]
    assert keep.profile.link is not None
    stage = StageOnPaper(storages, turn_ms, backward_ms, keep.profile.link)
    order = order_of_passes("1f1b", COUNT, STAGES, number)
    ends = stage.run(order, knows)
    each_ms = (ends[21] - ends[9]) / 6  # six micro-batches in the middle
    moved = sum(size_bytes for size_bytes, _, _ in storages)
    others = int(keep.in_flight) * (keep.step.kept_bytes - moved)
    peak = keep.step.peak_bytes - keep.step.kept_bytes + others + stage.most_bytes + keep.buffer_bytes
    return {
        "swapped_layers": layers,
        "swapped_share": moved / keep.step.kept_bytes,
        "each_ms": each_ms,
        "on_device_micro_batches": stage.most_bytes / moved if moved else 0.0,
        "peak_gib": peak / GIB,
    }


def rows(folder: Path, tokens: int, device: str) -> list[dict[str, Any]]:
    """All rows of one length."""
    answers = {fate: stages_of(folder, tokens, fate, device) for fate in FATES}
    found = []
    for number in range(STAGES):
        keep = answers["keep"].stages[number]
        for fate in ("keep", "recompute"):
            stage = answers[fate].stages[number]
            found.append({"fate": fate, "each_ms": stage.each_ms, "peak_gib": stage.peak_bytes / GIB})
            found[-1] |= {"tokens": tokens, "stage": number, "step_ms": answers[fate].step_ms}
        for knows in (False, True) if number < STAGES - 1 else ():
            for layers in range(4, len(keep.layers) + 1):
                row = swapped(number, keep, answers["swap"].stages[number], knows, layers)
                name = "swap, schedule known" if knows else "swap, each pass alone"
                found.append({"fate": name, "tokens": tokens, "stage": number, **row})
    return with_steps(found)


def with_steps(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to the rows that swap, of one length, the time of a step in which stage 3 keeps everything."""
    keep = [row for row in found if row["fate"] == "keep"]
    outside_ms = keep[0]["step_ms"] - _step_ms([row["each_ms"] for row in keep])
    for row in found:
        if "swapped_layers" in row:
            alike = [
                other["each_ms"]
                for other in found
                if (other["fate"], other.get("swapped_layers")) == (row["fate"], row["swapped_layers"])
            ]
            row["step_ms"] = _step_ms([*alike, keep[-1]["each_ms"]]) + outside_ms
    return found


def _step_ms(each_ms: Sequence[float]) -> float:
    """All micro-batches on the slowest stage, and one on the others while it waits."""
    return COUNT * max(each_ms) + sum(each_ms) - max(each_ms)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=(8192, 32768))
    parser.add_argument("--device", default="H200", help="whose rates the times are computed from")
    parser.add_argument("--out", type=Path, help="JSON file (default: in results/)")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = [row for tokens in arguments.tokens for row in rows(Path(folder), tokens, arguments.device)]
    for row in found:
        share = f"{row.get('swapped_layers', 0)} layers {row.get('swapped_share', 0):4.0%}"
        times = f"{row['each_ms']:8.1f} ms {row['peak_gib']:7.2f} GiB, a step {row['step_ms']:,.0f} ms"
        resident = f"{row.get('on_device_micro_batches', 0):.2f}"
        print(f"{row['tokens']:6} {row['stage']} {row['fate']:22} {share} {times} {resident}")
    path = arguments.out or RESULTS / f"pipeline_on_paper_{datetime.now():%Y%m%d}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
