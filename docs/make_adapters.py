"""Predicts README.md's table of LoRA and QLoRA on devices of 24, 40 and 80 GB.

    python docs/make_adapters.py        # some minutes

Each line is an answer of ``hf-actswap plan --json`` for Llama-3-8B with adapters on all linear layers: peak
and time of a step without a plan, with gradient checkpointing and under the planner's plan, and the host
memory that the plan needs. Nothing is measured.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from hf_actswap.planner.devices import device_rates

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "README.md"
GIB = 2**30
_TABLE = re.compile(r"(<!-- by docs/make_adapters.py -->\n).*?(<!-- end -->)", re.DOTALL)
_MODEL = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    dtype="bfloat16",
    architectures=["LlamaForCausalLM"],
)
_ASKED = {"memory": {"mode": "adaptive", "preference": "performance"}}


@dataclass(frozen=True)
class Case:
    """A line of the table.

    Args:
        method: how the model is trained.
        device: a name that ``--device`` takes.
        size: of its memory, as it is sold.
        tokens: of the one sequence of a step.
    """

    method: str
    device: str
    size: str
    tokens: int


CASES = (
    Case("QLoRA", "RTX 4090", "24 GB", 8192),
    Case("LoRA", "RTX 4090", "24 GB", 4096),
    Case("QLoRA", "A100-40", "40 GB", 16384),
    Case("LoRA", "A100-40", "40 GB", 8192),
    Case("QLoRA", "H100", "80 GB", 32768),
    Case("LoRA", "H100", "80 GB", 16384),
)


def answer(case: Case, folder: Path) -> dict[str, Any]:
    """Return what ``hf-actswap plan`` says to a case."""
    command = [sys.executable, "-m", "hf_actswap.cli", "plan", str(folder), str(folder / "auto.yaml")]
    command += [
        "--device",
        case.device,
        "--seq",
        str(case.tokens),
        "--lora",
        "r=16,targets=all-linear",
        "--json",
    ]
    command += ["--quantize", "4bit"] if case.method == "QLoRA" else []
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not ran.stdout:
        raise SystemExit(ran.stderr)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def _step(found: dict[str, Any], device_bytes: int) -> str:
    note = "" if found["peak_bytes"] <= device_bytes else " †"
    return f"{found['peak_bytes'] / GIB:.0f} GiB{note}, {found['step_ms'] / 1e3:.2f} s"


def row(case: Case, found: dict[str, Any]) -> str:
    """Return a case's line."""
    head = f"| {case.method}, {case.device} ({case.size}), {case.tokens // 1024}k tokens"
    if not found["ok"]:
        return f"{head} | | | does not fit | |"
    device_bytes, steps = device_rates(case.device).memory_bytes, found["predicted"]
    plain, checkpointed, planned = (
        _step(steps[name], device_bytes) for name in ("nothing", "recompute all", "planned")
    )
    tiles = " ‡" if found["chosen_tiles"] else ""
    host = f"{steps['planned']['host_bytes'] / GIB:.0f} GiB"
    return f"{head} | {plain} | {checkpointed} | **{planned}**{tiles} | {host} |"


def table() -> str:
    """Return the table."""
    lines = [
        "| Llama-3-8B, predicted | plain training | gradient checkpointing | `hf_actswap` | host memory |",
        "|---|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _MODEL.save_pretrained(folder)
        (folder / "auto.yaml").write_text(json.dumps(_ASKED), encoding="utf-8")
        lines += [row(case, answer(case, folder)) for case in CASES]
    return "\n".join(lines) + "\n"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    made = table()
    PAGE.write_text(_TABLE.sub(lambda match: f"{match[1]}{made}{match[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
