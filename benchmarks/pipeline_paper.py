"""Keep, recompute, swap and the planner on the stages of a pipeline, on paper: no device is needed.

    python benchmarks/pipeline_paper.py          # minutes; writes results/pipeline_on_paper_<yyyymmdd>.json

Llama-3-8B in four stages, 1F1B, 16 micro-batches of one sequence, eager, bf16, at the rates of an H200.
Stages and steps are those of ``hf-actswap plan``: time and memory of a micro-batch on a stage are computed
from shapes, and the passes of all stages run in the order of the schedule
(`hf_actswap.planner.cost.pipeline_step`). `plans_of` yields the plans that are compared. A row has, for a
micro-batch on each stage, the shares of saved bytes that are swapped and recomputed, the time of
recomputation, the time of its passes with waits for copies, and the stage's peak.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hf_actswap.cli.plan_answer import answer_plan
from hf_actswap.cli.plan_request import AskedStep, ModelRequest, PlanRequest
from hf_actswap.cli.stages import StagesAnswer
from hf_actswap.plan import MemoryPlan, PlanRow
from hf_actswap.planner.budget import BudgetError
from hf_actswap.planner.cost.pipeline_step import LONGEST, Pipeline, PipelineStep
from hf_actswap.planner.cost.simulate import Simulator
from hf_actswap.planner.profile import Limits
from hf_actswap.planner.search.stage_plans import plan_stages

GIB, STAGES, COUNT = 2**30, 4, 16
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
OFFSETS = ((0, 0, 0, 0), (0, 1, 1, -2), (-3, 2, 2, -1))
BUDGETS_GIB = {
    8192: ((44, False), (31, False), (30, True), (22, True), (20, True)),
    32768: ((93, False), (60, True)),
}
"""Budgets in GiB by sequence length, each with whether optimizer states are on the host."""


def stages_of(tokens: int, device: str) -> StagesAnswer:
    """Return the answer of ``hf-actswap plan`` for stages in which nothing is swapped or recomputed."""
    with tempfile.TemporaryDirectory() as name:
        model, config = Path(name) / "llama_3_8b.json", Path(name) / "config.json"
        model.write_text(json.dumps(LLAMA_3_8B), encoding="utf-8")
        pipeline = {"parallel_config": {"pipeline_stage": STAGES, "schedule": "1f1b"}}
        config.write_text(json.dumps(pipeline), encoding="utf-8")
        step = AskedStep(sequences=1, tokens=tokens, device=device)
        request = PlanRequest(
            ModelRequest(str(model)), str(config), step, None, None, None, (), None, False, False, None, COUNT
        )
        found = answer_plan(request)
    assert isinstance(found, StagesAnswer)
    return found


def plans_of(answer: StagesAnswer) -> Iterator[tuple[str, list[MemoryPlan]]]:
    """Yield the plans written by hand, with their names.

    In ``swap a b c`` the numbers are those of swapped layers of stages 0, 1 and 2, spread evenly over the
    stage; the rest is kept.
    """
    layers = [stage.layers for stage in answer.stages]
    yield "keep", list(answer.step.plans)
    recompute = [
        replace(plan, rows=tuple(PlanRow(layer, "", "recompute") for layer in own))
        for plan, own in zip(answer.step.plans, layers, strict=True)
    ]
    yield "recompute", recompute
    most = [len(own) for own in layers]
    for swapped in (
        *((count,) * 3 for count in (5, 6, 8)),
        (most[0], 4, 0),
    ):
        if all(count <= of for count, of in zip(swapped, most, strict=False)):
            plans = list(answer.step.plans)
            for number, count in enumerate(swapped):
                own = layers[number]
                spread = sorted({own[index * len(own) // count] for index in range(count)})
                rows = tuple(PlanRow(layer, "", "swap", windows=LONGEST) for layer in spread)
                plans[number] = replace(plans[number], rows=rows)
            yield f"swap {' '.join(map(str, swapped))}", plans


def row_of(pipeline: Pipeline, step: PipelineStep, states_moved: bool) -> dict[str, Any]:
    """Return a step's numbers as JSON values, by stage."""
    stages = []
    for paper, plan, work, run, peak in zip(
        pipeline.stages, step.plans, step.works, step.runs, step.peaks_bytes, strict=True
    ):
        alone = Simulator(paper.profile).predict(plan, curve=False)
        saved = Simulator(paper.profile).predict(replace(plan, rows=()), curve=False).kept_bytes
        states = 0 if states_moved else paper.profile.optimizer_state_bytes
        stages.append(
            {
                "each_ms": run.busy_ms / pipeline.count,
                "stall_ms": run.stall_ms / pipeline.count,
                "recompute_ms": alone.recompute_ms,
                "swapped_share": work.moved_bytes / saved,
                "recomputed_share": alone.recomputed_bytes / saved,
                "swapped_on_device_gib": run.swapped_bytes / GIB,
                "peak_gib": peak / GIB,
                "fixed_gib": (paper.profile.weight_bytes + paper.profile.gradient_bytes[-1] + states) / GIB,
            }
        )
    return {"step_ms": step.step_ms, "states_on_host": states_moved, "stages": stages}


def rows(tokens: int, device: str) -> Iterator[dict[str, Any]]:
    """Yield all rows of one sequence length."""
    whole = stages_of(tokens, device)
    for offset in OFFSETS:
        answer = whole if not any(offset) else whole.asker.answer(replace(whole.parallel, offset=offset))
        pipeline, facts = answer.pipeline, {"tokens": tokens, "offset": list(offset)}
        for name, plans in plans_of(answer):
            for moved in (False, True):
                yield {"plan": name, **facts, **row_of(pipeline, pipeline.step(plans, moved), moved)}
            if name == "swap 8 8 8":
                alone = replace(pipeline, crosses=False)
                yield {"plan": f"{name}, each pass alone", **facts, **row_of(alone, alone.step(plans), False)}
        for budget, moved in BUDGETS_GIB[tokens]:
            limits = Limits(budget * GIB, frees_optimizer_states=moved)
            with suppress(BudgetError):
                step = plan_stages(pipeline, answer.step.plans, limits)
                yield {"plan": f"planner {budget} GiB", **facts, **row_of(pipeline, step, moved)}


def _line(row: dict[str, Any]) -> str:
    host = " states on host" if row["states_on_host"] else ""
    stages = "; ".join(
        f"{stage['each_ms']:,.0f} ms {stage['swapped_share']:.0%} {stage['recompute_ms']:.0f} ms "
        f"{stage['peak_gib']:.1f}"
        for stage in row["stages"]
    )
    step = f"{row['step_ms']:,.0f} ms {row['speed']:.2f} x"
    return f"{row['tokens']} {row['offset']} {row['plan']}{host}: {step}\n    {stages}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rows and write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(BUDGETS_GIB))
    parser.add_argument("--device", default="H200", help="whose rates the times are computed from")
    parser.add_argument("--out", type=Path, help="JSON file (default: in results/)")
    arguments = parser.parse_args(argv)
    found = []
    for tokens in arguments.tokens:
        of_length = list(rows(tokens, arguments.device))
        recompute_ms = next(row["step_ms"] for row in of_length if row["plan"] == "recompute")
        for row in of_length:
            row["speed"] = recompute_ms / row["step_ms"]  # relative to full recompute, layers divided equally
            found.append(row)
            print(_line(row))
    path = arguments.out or RESULTS / f"pipeline_on_paper_{datetime.now():%Y%m%d}.json"
    lines = ",\n".join(map(json.dumps, found))
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
