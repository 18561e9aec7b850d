"""``hf-actswap rehearse`` where no device is needed: mistakes, exit codes, the report of what was seen."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hf_actswap.cli import rehearsal_report
from hf_actswap.cli.output import Answer
from hf_actswap.cli.program import run_program
from hf_actswap.cli.rehearsal_report import read_reports, rehearsed
from hf_actswap.rehearsal import Options
from hf_actswap.rehearsal.devices import DEVICES

from .conftest import TINY, Run

MIB = 2**20


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "H1000", "--", "python", "x.py"], "expected one of H200, H100"),
        (["--device", "MI300X", "--", "python", "x.py"], "It runs no CUDA."),
        (["--device", "H100"], "Missing argument"),
        (["--", "python", "x.py"], "Missing option '--device'"),
        (["--device", "H100", "--", "no-such-program"], "expected a program that can be run"),
        (["--device", "H100", "--", "no_such_script.py"], "'no_such_script.py'"),
        (["--device", "H100", "--devices", "-2", "--", "python", "x.py"], "expected a number from 1 to 16"),
        (["--device", "H100", "--memory", "much", "--", "python", "x.py"], "expected a size such as 40GB"),
        (["--device", "H100", "--memory", "100MiB", "--", "python", "x.py"], "at least 1GiB"),
    ],
)
def test_mistakes_are_named_before_anything_is_built(words: list[str], told: str, run: Run) -> None:
    ended = run("rehearse", *words)
    assert ended.code == 2
    assert told in " ".join(ended.err.split())


def test_pytorch_without_cuda_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    where = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(sys.modules["hf_actswap.rehearsal.build"], "find_spec", lambda _: where)
    ended = run("rehearse", "--device", "H100", "--", sys.executable, "-c", "1")
    assert ended.code == 2
    assert "expected PyTorch's CUDA build, found torch" in " ".join(ended.err.split())


def test_the_exit_code_is_the_programs() -> None:
    assert run_program([sys.executable, "-c", "import sys; sys.exit(7)"], os.environ) == 7
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert run_program([sys.executable, "-c", killed], os.environ) == 128 + signal.SIGKILL


def test_signals_go_to_the_program(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    waits = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(50)\n"
    )

    def stop() -> None:
        while not ready.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    before = signal.getsignal(signal.SIGTERM)
    assert run_program([sys.executable, "-c", waits], os.environ) == 5
    assert signal.getsignal(signal.SIGTERM) is before


def group(size: int, kind: str, phase: str, op: str, count: int = 1) -> dict[str, Any]:
    return {"bytes": size, "count": count, "kind": kind, "phase": phase, "op": op}


def seen(*held: dict[str, Any], failed: bool = False, **more: Any) -> dict[str, Any]:
    """What a process wrote that trained the tiny model with 2 x 128 tokens."""
    memory = {
        "peak_bytes": sum(found["bytes"] * found["count"] for found in held),
        "steps_before": 1,
        "phase": "backward",
        "op": "aten::mm",
        "reserved_peak_bytes": 900 * MIB,
        "process_peak_bytes": 900 * MIB,
        "allocated_bytes": 0,
        "reserved_bytes": 0,
        "held": list(held),
    }
    ran_out = {
        "device": 0,
        "asked_bytes": 3 * MIB,
        "phase": "forward",
        "op": "aten::silu",
        "steps_before": 2,
        "times": 1,
        "memory": memory,
    }
    subject = {
        "config": json.dumps({**TINY, "architectures": ["LlamaForCausalLM"]}),
        "dtype": "torch.bfloat16",
        "batch": 2,
        "tokens": 128,
        "optimizer": "AdamW",
        "adapters": None,
    }
    return {
        "rank": 0,
        "ranks": 1,
        "steps": 5,
        "devices": {"0": memory},
        "host_bytes": 5 * MIB,
        "step_times": [[0.0, 0.0], [100.0, 60.0], [200.0, 135.0], [310.0, 210.0]],
        "out_of_memory": [ran_out] if failed else [],
        "stubs": {},
        "left_out": {},
        "triton": {},
        "races": [],
        "subject": subject,
        "planned": False,
        **more,
    }


def text_of(found: Answer) -> str:
    text = io.StringIO()
    console = Console(width=200, file=text)
    for part in found.shown:
        console.print(part)
    return text.getvalue()


def test_the_report_of_a_training_that_fits() -> None:
    logits = 2 * 128 * TINY["vocab_size"] * 4
    process = seen(
        group(3 * MIB, "weights", "without gradients", "aten::to", 2),
        group(2 * MIB, "gradients", "backward", "aten::mm"),
        group(MIB, "", "forward", "aten::silu", 4),
        group(logits, "", "forward", "aten::linear"),
        stubs={"cudaGraphDestroy": 2},
    )
    found = rehearsed(Options("A100-40"), [process], 0)
    text = text_of(found)
    for line in (
        "Rehearsed on A100-40, 39.40 GiB",
        "Peak on device 0: 12.06 MiB allocated, 900.00 MiB reserved, in step 2, backward, mm.",
        "A step: 100.0 ms; for 25% of it the device has nothing to do.",
        "Host memory, page-locked: 5.00 MiB.",
        "Functions of CUDA that did nothing were called: cudaGraphDestroy",
        "losses mean nothing",
        "saved files hold no trained weights",
    ):
        assert line in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert {
        "weights 6.00 MiB 2",
        "gradients 2.00 MiB 1",
        "logits and loss 64.00 KiB 1",
        "activations and temporaries 4.00 MiB 4",
        "forward: silu 4.00 MiB 4",
    } <= set(rows)
    assert found.document["advice"] is None
    assert found.document["fits"] is True


def test_the_planner_is_asked_when_memory_ran_out() -> None:
    process = seen(group(MIB, "", "forward", "aten::silu", 4), failed=True)
    found = rehearsed(Options("A100-40", memory="2GiB"), [process], 1)
    text = text_of(found)
    assert "3.00 MiB asked for by silu, in step 3, forward; the program went on for 3 steps." in text
    assert "When memory ran out" in text
    assert "For 2 x 128 tokens in 1.38 GiB, predicted" in text
    assert "gradient checkpointing" in text
    assert 'ActSwapTrainingArguments(actswap="auto")' in text
    document = found.document
    assert document["fits"] is False
    assert document["advice"]["plan"]["step"]["device"] == "A100-40"
    assert "What to change" not in text_of(rehearsed(Options("A100-40"), [process], 1, asks_planner=False))


@pytest.mark.parametrize("device", [facts.kind for facts in DEVICES])
def test_the_planner_may_use_all_that_a_device_has(device: str) -> None:
    """What the rehearsal and the planner know of it differs by some MiB."""
    process = seen(group(MIB, "", "forward", "aten::silu"), failed=True)
    advice = rehearsed(Options(device), [process], 1).document["advice"]
    assert advice["plan"]["step"]["device"] == device
    assert advice["said"] == []


def test_the_planner_is_told_how_a_base_is_quantised() -> None:
    process = seen(group(MIB, "", "forward", "aten::silu"), failed=True)
    subject = process["subject"]
    stored = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
    subject["config"] = json.dumps({**json.loads(subject["config"]), "quantization_config": stored})
    subject |= {"dtype": "torch.float32", "optimizer": "paged_adamw_8bit"}  # embeddings, once prepared
    subject["adapters"] = {"kind": "LORA", "r": 8, "targets": ["q_proj", "v_proj"], "dropout": 0.0}
    plan = rehearsed(Options("A100-40"), [process], 1).document["advice"]["plan"]
    assert plan["step"]["optimizer"] == "paged_adamw_8bit"
    assert plan["model"]["dtype"] == "bf16, fp32"
    assert plan["model"]["quantize"] == "4bit"


@pytest.mark.slow
def test_where_no_plan_fits_the_longest_sequence_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, longest = rehearsal_report._ask, Answer({"longest": {"tiles": {"tokens": 4096}}}, [])
    monkeypatch.setattr(
        rehearsal_report, "_ask", lambda name, *more: longest if name == "longest" else ask(name, *more)
    )
    process = seen(group(MIB, "", "forward", "aten::silu"), failed=True)
    process["subject"]["tokens"] = 2**22
    found = rehearsed(Options("A100-40", memory="2GiB"), [process], 1)
    assert found.document["advice"]["plan"] is None
    text = text_of(found)
    assert "memory.budget_gib: expected at least" in text
    assert "The longest sequence that fits, one in a batch: 4,096 (tiles) tokens." in text


def test_a_planned_training_that_survived_is_given_no_advice() -> None:
    process = seen(group(MIB, "", "forward", "aten::silu", 4), failed=True, planned=True)
    process["out_of_memory"][0]["times"] = 37
    options = Options("A100-40", memory="2GiB")
    text = text_of(rehearsed(options, [process], 0))
    assert "Out of memory on device 0 37 times, the last: 3.00 MiB asked for by silu" in text
    assert "What to change" not in text
    assert "What to change" in text_of(rehearsed(options, [process], 1))


def test_the_planner_is_told_of_an_optimizer_that_takes_all_roots_at_once() -> None:
    """``torch.optim.AdamW(weights)`` on CUDA, which is ``foreach``."""
    process = seen(group(MIB, "", "forward", "aten::silu"), failed=True)
    process["subject"]["foreach"] = True
    found = rehearsed(Options("A100-40", memory="2GiB"), [process], 1)
    assert found.document["advice"]["plan"]["step"]["optimizer"] == "adamw_torch"
    assert "fused=True does not." in text_of(found)


def test_without_a_model_the_planner_is_not_asked() -> None:
    process = seen(group(MIB, "", "forward", "aten::silu"), failed=True, subject={})
    assert "No transformers model was seen" in text_of(rehearsed(Options("A100-40"), [process], 1))


def test_what_no_plan_can_help_is_said_at_once() -> None:
    """8 billion weights of two bytes, with gradients and two moments: 64 GB."""
    subject = {"config": "{}", "dtype": "torch.bfloat16", "weights": 8 * 10**9, "trained": 8 * 10**9}
    process = seen(group(MIB, "", "forward", "aten::silu"), failed=True, subject=subject)
    text = text_of(rehearsed(Options("RTX 4090"), [process], 1))
    assert "Weights, gradients and the optimizer's states take 59.60 GiB. Train adapters (PEFT LoRA)" in text


def test_a_program_that_used_no_device(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(json.dumps({**seen(), "devices": {}}))
    assert read_reports(tmp_path) == []
    text = text_of(rehearsed(Options(), [], 3))
    assert f"Its Python must be this command's, with PyTorch's CUDA build: {sys.executable}" in " ".join(
        text.split()
    )
    assert "weights are not there, add --no-weights" in " ".join(text.split())
    assert "--no-weights" not in text_of(rehearsed(Options(), [], 0))
