"""What must not change while the code is rearranged: plans, their lines and adjustments, predictions, counts.

    python -m tests.oracle              # rewrite tests/oracle.json
    python -m tests.oracle --full DIR   # the texts that it has digests of, a file each, to compare trees

Plans of all golden vectors and of the documents' cases, on dense, mixture-of-experts, compiled and divided
models; what each saves and what a step of it takes on paper; the plan that is found for two budgets; what a
steady step of each case moves, and how many functions of the library it calls. A changed line is a decision,
and its commit says why.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
import transformers
import yaml
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import hf_actswap
from hf_actswap import apply, load_config, model_structure, resolve_plan
from hf_actswap.config import ParallelConfig
from hf_actswap.parallel import patch_model, tensor_parallel_group
from hf_actswap.plan import MemoryPlan
from hf_actswap.planner import Limits, Profile, find_plan, predict, profile_from_shapes
from tests.engine.tiny_models import CASES, batch, tiny_llama
from tests.plan.test_recompute_vectors import FULL_VECTORS, SELECT_VECTORS
from tests.plan.test_swap_vectors import VECTORS

STORED = Path(__file__).with_suffix(".json")
LIBRARY = os.path.dirname(hf_actswap.__file__)
DEVICE = "H200"
SHARES = (0.4, 0.7)
"""Of what lies between the peak with everything recomputed and the peak without a plan."""

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
Facts = dict[str, Any]


def dense(layers: int = 4) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **_SIZES))


def experts() -> nn.Module:
    config = MixtralConfig(num_hidden_layers=4, num_local_experts=4, sliding_window=None, **_SIZES)
    return MixtralForCausalLM(config)


def compiled() -> nn.Module:
    model = dense()
    for layer in model.model.layers:  # type: ignore[attr-defined]
        layer.compile()  # never run: only what is said of compiled layers is asked
    return model


class Oracle:
    """Collects facts, and the texts that they are digests of."""

    def __init__(self) -> None:
        self.facts: Facts = {}
        self.texts: dict[str, str] = {}

    def text(self, name: str, text: str) -> str:
        """Return the digest of a text."""
        self.texts[name] = text
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def plan(self, name: str, plan: MemoryPlan) -> Facts:
        """Return what is said of a plan."""
        return {
            "rows": len(plan.rows),
            "json": self.text(f"{name}.json", plan.to_json()),
            "lines": self.text(f"{name}.lines", "\n".join(plan.log_lines())),
            "adjustments": self.text(f"{name}.adjustments", "\n".join(map(str, plan.adjustments))),
        }

    def vectors(self) -> None:
        """The golden vectors, on models of as many layers as each is for."""
        shapes: dict[int, Any] = {}
        documents = {name: (vector.document, 4) for name, vector in VECTORS.items()}
        documents |= {
            name: (vector.document, getattr(vector, "num_layers", 4))
            for name, vector in {**FULL_VECTORS, **SELECT_VECTORS}.items()
        }
        for name, (document, layers) in documents.items():
            if layers not in shapes:
                with torch.device("meta"):
                    shapes[layers] = model_structure(dense(layers))
            plan = resolve_plan(load_config(yaml.safe_dump(document, sort_keys=False)), shapes[layers])
            self.facts[f"vector {name}"] = self.plan(f"vector {name}", plan)

    def model(self, name: str, make: Callable[[], nn.Module], device: str = "meta") -> None:
        """The documents' cases on a model, on paper, and the plans that are found for it."""
        with torch.device(device):
            model: Any = make().to(torch.bfloat16).train()
            ids = torch.zeros(2, 512, dtype=torch.long)
        shape = model_structure(model)
        call = {"input_ids": ids, "labels": ids, "use_cache": False}
        profile = profile_from_shapes(model, shape, call, DEVICE, optimizer_state_bytes=2**20)
        peaks = {}
        for case, text in CASES.items():
            title = f"{name} {case}"
            try:
                plan = resolve_plan(load_config(text), shape)
            except hf_actswap.PlanError as error:
                self.facts[title] = {"error": self.text(f"{title}.error", str(error))}
                continue
            self.facts[title] = self.plan(title, plan) | _on_paper(profile, plan)
            peaks[case] = self.facts[title]["peak_bytes"]
        empty = MemoryPlan((), profile.num_layers, profile.family)
        most, least = predict(profile, empty).peak_bytes, peaks.get("full_recompute")
        self.facts[f"{name} nothing"] = _on_paper(profile, empty)
        for share in SHARES if least is not None else ():
            title = f"{name} planned {share}"
            limits = Limits(round(least + share * (most - least)), min_tensor_bytes=1024)
            found = find_plan(profile, empty, limits)
            self.facts[title] = self.plan(title, found.plan) | _on_paper(profile, found.plan)

    def divided(self) -> None:
        """As `model`, of one of two ranks."""
        with _two_ranks() as group, tensor_parallel_group(group):
            self.model("tp 2", lambda: _patched(dense(), group), "cpu")

    def steps(self) -> None:
        """What a steady step moves, and what it calls of the library in forward and in backward."""
        for case, text in CASES.items():
            model = tiny_llama()
            applied = apply(model, load_config({**yaml.safe_load(text), "memory": {"min_tensor_mib": 1e-6}}))
            for step in range(3):
                _one_step(model, step)
            before = applied.stats()
            calls = _calls_of_step(model)
            moved = asdict(applied.stats() - before)
            applied.remove()
            moved = {key: value for key, value in moved.items() if not re.search(r"_ms$|pool|peak", key)}
            self.facts[f"step {case}"] = {"calls": calls, **moved}


def collect() -> Oracle:
    """Return everything."""
    torch.manual_seed(0)
    oracle = Oracle()
    oracle.facts["versions"] = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    oracle.vectors()
    models: Mapping[str, Callable[[], nn.Module]] = {"dense": dense, "experts": experts, "compiled": compiled}
    for name, make in models.items():
        oracle.model(name, make)
    oracle.divided()
    oracle.steps()
    return oracle


def _on_paper(profile: Profile, plan: MemoryPlan) -> Facts:
    found = predict(profile, plan)
    names = ("peak_bytes", "kept_bytes", "swapped_bytes", "recomputed_bytes", "host_bytes")
    return {"step_ms": repr(found.step_ms), **{name: getattr(found, name) for name in names}}


def _one_step(model: nn.Module, step: int) -> None:
    model(input_ids=batch(step), labels=batch(step)).loss.backward()


def _calls_of_step(model: nn.Module) -> list[int]:
    """Functions of the library that a forward calls, and a backward."""
    counts = [0, 0]
    part = 0

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            counts[part] += 1

    gc.collect()
    gc.disable()  # what dies of earlier steps would be counted, or not, as it happens
    sys.setprofile(count)
    try:
        loss = model(input_ids=batch(3), labels=batch(3)).loss
        part = 1
        loss.backward()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts


def _patched(model: nn.Module, group: Any) -> nn.Module:
    patch_model(model, ParallelConfig(tensor_parallel_size=2, sequence_parallel_enabled=True), group)
    return model


class _EchoStore(dist.Store):
    """What rank 0 has written rank 1 has written too."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self._values[re.sub(r"1$", "0", key)]

    def add(self, key: str, amount: int) -> int:
        self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
        return int(self._values[key])

    def check(self, keys: list[str]) -> bool:
        return True

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        return


@contextmanager
def _two_ranks() -> Iterator[dist.ProcessGroup]:
    """Rank 0 of two, whose collectives answer at once."""
    store = _EchoStore()  # which the group alone does not keep alive
    dist.init_process_group("fake", rank=0, world_size=2, store=store)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--full", type=Path, help="a folder for the texts")
    folder = parser.parse_args().full
    logging.disable(logging.WARNING)
    oracle = collect()
    if folder is None:
        STORED.write_text(json.dumps(oracle.facts, indent=1) + "\n", encoding="utf-8")
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in oracle.texts.items():
        (folder / name.replace(" ", "_").replace("/", "_")).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
