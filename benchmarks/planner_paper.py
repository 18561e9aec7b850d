"""What the planner would do with the yardstick, on paper: no device is needed.

    python benchmarks/planner_paper.py       # a minute; writes results/plans_on_paper_<yyyymmdd>.json, .png
    python benchmarks/planner_paper.py --preset 7b-8k --shares 0.12 0.5 --out mine.json

An eager step of a preset of `frontier.py` is computed from shapes for a device. The planner searches plans
for budgets between Hugging Face's checkpointing and eager, and below. To compare, there are rows of
hand-written configurations, as the simulator predicts them, and of earlier measurements on one H200
(`MEASURED`). Rows have the fields of `frontier.py` as far as they apply; ``ms`` is predicted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel

from benchmarks.frontier import print_table
from benchmarks.records import REPOSITORY, RESULTS, Result, commit, versions, write_json
from benchmarks.rows import ELEMENTWISE, MIXED, eager_mix, swap_everything
from benchmarks.workloads import PRESETS, Workload, llama_config
from hf_actswap import model_structure, resolve_plan
from hf_actswap.config import load_config
from hf_actswap.plan import MemoryPlan, ModelStructure
from hf_actswap.planner import BudgetError, Limits, Prediction, Profile
from hf_actswap.planner.cost.simulate import predict
from hf_actswap.planner.record.shapes import profile_from_shapes
from hf_actswap.planner.search.find_plan import find_plan, least_peak_bytes

GIB = 2**30
DEFAULT = ("7b-8k", "7b-32k")
SHARES = (0.075, 0.2, 0.35, 0.5, 0.65, 0.8)
"""Budgets as fractions of eager's activation peak; the peak of checkpointing is another budget."""

MEASURED: dict[str, dict[str, tuple[float, float]]] = {
    "7b-8k": {
        "eager": (388, 23.6),
        "hf-checkpointing": (502, 2.8),
        "hf-checkpointing-offload": (535, 1.8),
        "trl-offloading": (971, 8.1),
        "trl-offloading-checkpointing": (510, 1.9),
        "compiled": (329, 16.9),
        "compiled-checkpointing": (486, 2.5),
        "compiled-budget-0.5": (353, 9.2),
        "compiled-budget-0.2": (385, 5.3),
    },
    "7b-32k": {
        "eager": (837, 37.4),
        "hf-checkpointing": (1060, 8.8),
        "hf-checkpointing-offload": (1119, 7.3),
        "trl-offloading": (1640, 14.8),
        "compiled": (740, 27.4),
        "compiled-checkpointing": (1063, 6.3),
        "compiled-budget-0.5": (847, 15.8),
    },
}
"""ms and GiB of activations; one H200, torch 2.11, transformers 5.17, before the planner was written."""

BY_HAND: dict[str, Any] = {
    "eager": {},
    "hf-checkpointing": {"recompute_config": {"recompute": True}},  # predicts the same step
    "actswap-everything-auto": swap_everything("auto"),
    "actswap-elementwise": ELEMENTWISE,
    "actswap-mixed": MIXED,
}


def on_paper(workload: Workload, device: str) -> tuple[Profile, ModelStructure, int]:
    """Return the profile of a step of a workload, the model's structure, and the bytes without activations.

    Args:
        workload: a workload of `frontier.py`; its model is built on ``meta``.
        device: name of a device in `hf_actswap.planner.record.devices.DEVICES`.
    """
    config = llama_config(workload)
    with torch.device("meta"):
        model: Any = (LlamaForCausalLM if workload.head else LlamaModel)(config)
        model = model.to(workload.torch_dtype).train()
        if workload.head:
            ids = torch.empty(1, workload.tokens, dtype=torch.long)
            call: dict[str, Any] = {"input_ids": ids, "labels": ids}
        else:
            model.norm = nn.Identity()
            model.embed_tokens.requires_grad_(False)
            shape = (1, workload.tokens, workload.hidden)
            call = {"inputs_embeds": torch.empty(shape, dtype=workload.torch_dtype, requires_grad=True)}
    shape_of = model_structure(model)
    profile = profile_from_shapes(model, shape_of, {**call, "use_cache": False}, device, gradients_exist=True)
    given = sum(item.nbytes for item in call.values())
    trained = sum(item.nbytes for item in model.parameters() if item.requires_grad)
    frozen = sum(item.nbytes for item in model.parameters() if not item.requires_grad)
    return profile, shape_of, 2 * trained + frozen + (given if workload.head else 2 * given)


class Paper:
    """Computes the rows of one workload.

    Args:
        workload: a workload of `frontier.py`.
        device: name of a device in `hf_actswap.planner.record.devices.DEVICES`.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        self.workload, self.device = workload, device
        self._profile, self._structure, self._baseline_bytes = on_paper(workload, device)
        self._nothing = MemoryPlan((), workload.layers, self._profile.family)
        self.results: list[Result] = []

    def run(self, shares: Sequence[float]) -> list[Result]:
        """Return all rows; ``shares`` are budgets as fractions of eager's activation peak."""
        configs = {**BY_HAND, "actswap-mix-eager": eager_mix(self.workload.layers)}
        for name, config in configs.items():
            plan = resolve_plan(load_config(config), self._structure)
            self._add(name, config, predict(self._profile, plan))
        eager, checkpointing = self.results[0], self.results[1]
        least = least_peak_bytes(self._profile, self._nothing, self._limits(2**62)) - self._baseline_bytes
        self._plan("actswap_plan_least", least)
        self._plan("actswap_plan_checkpointing", checkpointing.activation_bytes or 0)
        for share in shares:
            name = "half" if share == 0.5 else f"{100 * share:g}"
            self._plan(f"actswap_plan_{name}", round(share * (eager.activation_bytes or 0)))
        for method, (ms, gib) in MEASURED.get(self.workload.name, {}).items():
            result = self._row(f"measured {method}", None)
            result.compiled = method.startswith("compiled")
            result.ms, result.activation_bytes = ms, round(gib * GIB)
            self.results.append(result)
        base_ms = {True: MEASURED.get(self.workload.name, {}).get("eager", (None,))[0], False: eager.ms}
        for result in self.results:
            base = base_ms[result.method.startswith("measured")]
            if base and result.ms:
                result.ratios["ms"] = result.ms / base
            if eager.activation_bytes and result.activation_bytes:
                result.ratios["activation"] = result.activation_bytes / eager.activation_bytes
        return self.results

    def _plan(self, name: str, activation_bytes: int) -> None:
        budget_bytes = self._baseline_bytes + activation_bytes
        started = time.perf_counter()
        try:
            found = find_plan(self._profile, self._nothing, self._limits(budget_bytes))
        except BudgetError as error:
            result = self._row(name, {"memory": {"budget_gib": budget_bytes / GIB}})
            result.status, result.reason = "out of memory", " ".join(str(error).split())
            self.results.append(result)
            return
        result = self._add(name, {"memory": {"budget_gib": budget_bytes / GIB}}, found.prediction)
        result.budget_bytes, result.planning_s = budget_bytes, time.perf_counter() - started

    def _limits(self, device_bytes: int) -> Limits:
        return Limits(device_bytes, min_tensor_bytes=2**20)

    def _add(self, name: str, config: Any, predicted: Prediction) -> Result:
        result = self._row(name, config)
        result.ms = result.predicted_ms = predicted.step_ms
        result.peak_allocated_bytes = result.predicted_peak_bytes = predicted.peak_bytes
        result.activation_bytes = predicted.peak_bytes - self._baseline_bytes
        result.baseline_bytes, result.host_bytes = self._baseline_bytes, predicted.host_bytes
        result.swapped_bytes = predicted.swapped_bytes
        result.stall_ms = predicted.forward_stall_ms + predicted.backward_stall_ms
        self.results.append(result)
        return result

    def _row(self, name: str, config: Any) -> Result:
        workload = self.workload
        return Result(
            name,
            False,
            workload.model,
            workload.layers,
            workload.tokens,
            1,
            workload.head,
            device=f"{self.device}, on paper",
            torch=torch.__version__,
            transformers=versions()["transformers"],
            commit=commit(REPOSITORY)["id"],
            workload=workload.name,
            dtype=workload.dtype,
            config=config,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, print the tables, write the JSON and the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=DEFAULT)
    parser.add_argument("--device", default="H200", help="whose rates the times are computed from")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of eager's activation peak")
    parser.add_argument("--out", type=Path, help="JSON file, the picture beside it (default: in results/)")
    arguments = parser.parse_args(argv)
    results: list[Result] = []
    for name in arguments.preset:
        found = Paper(PRESETS[name], arguments.device).run(arguments.shares)
        print_table(PRESETS[name], found)
        results += found
    path = arguments.out or RESULTS / f"plans_on_paper_{datetime.now():%Y%m%d}.json"
    rows = [asdict(result) for result in results]
    write_json(path, rows)
    try:
        from benchmarks.pictures import draw  # here, because matplotlib is an extra
    except ImportError as error:
        sys.stderr.write(f"no picture ({error}): python benchmarks/pictures.py {path}\n")
        return 0
    draw(rows, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
