"""Compares the loss curves of one training in one process, divided between two, and with two such models.

    OMP_NUM_THREADS=1 python benchmarks/parallel_curves.py wikitext-2/valid.txt
    OMP_NUM_THREADS=1 python benchmarks/parallel_curves.py TEXT --steps 20 --out mine.json

`recipes/llama_swap.py` with `recipes/sequence_parallel.yaml` under `accelerate launch`, on a CPU: one process
trains with a plain Trainer (``--actswap none``), the others with tensor and sequence parallelism, swap and
recompute as the file says. Seed, global batch and order of the samples are the same. The loss and the
gradient norm of each step go into a JSON file, their curves into a picture.

Training is chaotic: a difference in the last bit grows from step to step, whatever its cause. The control run
shows how far: it is one process again, in which only the order of sums in attention is changed
(``--attn_implementation eager``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import load_file

from benchmarks.pictures import draw_curves
from benchmarks.records import REPOSITORY, RESULTS, commit, hardware, versions, write_json

RECIPE = REPOSITORY / "recipes" / "llama_swap.py"
CONFIG = REPOSITORY / "recipes" / "sequence_parallel.yaml"

GLOBAL_BATCH = 8
SIZES = {
    "vocab_size": "2048",
    "num_layers": "8",
    "hidden_size": "256",
    "num_heads": "8",
    "num_kv_heads": "4",
    "block_size": "64",
    "learning_rate": "0.001",
    "warmup_steps": "20",
}
"""Sizes of the recorded run: 8 layers, hidden size 256; 512 tokens a step."""


@dataclass(frozen=True)
class Layout:
    """How many processes train, and how they divide the model.

    Args:
        name: name of the curve.
        data_parallel_size: number of models, each trained on its own part of the global batch.
        tensor_parallel_size: number of processes that hold one model.
        attention: implementation of attention; ``None``: the model's own choice.
    """

    name: str
    data_parallel_size: int
    tensor_parallel_size: int
    attention: str | None = None

    @property
    def processes(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size


LAYOUTS = (
    Layout("one process", 1, 1),
    Layout("tp 2", 1, 2),
    Layout("dp 2 x tp 2", 2, 2),
    Layout("control", 1, 1, attention="eager"),
)


@dataclass
class Curve:
    """The losses of one run, and its differences to the first run.

    Args:
        name, processes: name and number of processes of the layout.
        command: arguments of the launcher, without paths of this machine.
        seconds: time from start to exit, start-up included.
        loss: loss of each step, the mean over the global batch.
        grad_norm: gradient norm of each step, before clipping.
        largest_loss_difference, mean_loss_difference: maximum and mean over the steps of the absolute
            difference of losses.
        largest_relative_loss_difference, largest_relative_grad_norm_difference: maximum over the steps of
            the difference divided by the first run's value.
        final_parameter_difference: largest absolute difference of any element of the saved weights.
    """

    name: str
    processes: int
    command: list[str]
    seconds: float = 0.0
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    largest_loss_difference: float = 0.0
    mean_loss_difference: float = 0.0
    largest_relative_loss_difference: float = 0.0
    largest_relative_grad_norm_difference: float = 0.0
    final_parameter_difference: float = 0.0


def arguments_of(layout: Layout, steps: int, sizes: dict[str, str], logging_steps: int = 1) -> list[str]:
    """Return the recipe's arguments, without data and output folder."""
    told = {
        **sizes,
        "max_steps": str(steps),
        "per_device_train_batch_size": str(GLOBAL_BATCH // layout.data_parallel_size),
        "logging_steps": str(logging_steps),
        "do_eval": "false",
        "disable_tqdm": "true",
    }
    if layout.tensor_parallel_size == 1:
        told["actswap"] = "none"
    if layout.attention is not None:
        told["attn_implementation"] = layout.attention
    return [part for name, value in told.items() for part in (f"--{name}", value)]


def launcher_of(layout: Layout) -> list[str]:
    """Return the launcher's own arguments."""
    several = ["--multi_gpu", "--main_process_port", "0"] if layout.processes > 1 else []
    plain = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return ["--num_processes", str(layout.processes), *plain, *several]


def train(
    layout: Layout, text: Path, folder: Path, steps: int, sizes: dict[str, str], limit_s: float
) -> Curve:
    """Run the recipe and read its log.

    Raises:
        RuntimeError: the run failed; the message has the end of its output.
    """
    told = arguments_of(layout, steps, sizes)
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher_of(layout), str(RECIPE)]
    command += [str(CONFIG), "--dataset", str(text), "--output_dir", str(folder), *told]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    start = time.perf_counter()
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
    seconds = time.perf_counter() - start
    if ran.returncode:
        raise RuntimeError(f"{layout.name} failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    shown = ["accelerate", "launch", *launcher_of(layout), "recipes/llama_swap.py"]
    shown += ["recipes/sequence_parallel.yaml", "--dataset", text.name, *told]
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    entries = [entry for entry in history if "loss" in entry]
    losses, norms = ([float(entry[key]) for entry in entries] for key in ("loss", "grad_norm"))
    return Curve(layout.name, layout.processes, shown, seconds, losses, norms)


def compare(first: Curve, other: Curve) -> None:
    """Fill in the differences of ``other`` to ``first``.

    Raises:
        ValueError: the two have different numbers of steps.
    """
    pairs = list(zip(first.loss, other.loss, strict=True))
    norms = zip(first.grad_norm, other.grad_norm, strict=True)
    other.largest_loss_difference = max(abs(b - a) for a, b in pairs)
    other.mean_loss_difference = sum(abs(b - a) for a, b in pairs) / len(pairs)
    other.largest_relative_loss_difference = max(abs(b - a) / abs(a) for a, b in pairs)
    other.largest_relative_grad_norm_difference = max(abs(b - a) / abs(a) for a, b in norms)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights saved in a folder, by name."""
    return load_file(folder / "model.safetensors")


def run(
    text: Path, steps: int, sizes: dict[str, str], layouts: Sequence[Layout], limit_s: float
) -> list[Curve]:
    """Train with each layout; compare the others with the first."""
    curves: list[Curve] = []
    reference: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as root:
        for layout in layouts:
            folder = Path(root, layout.name.replace(" ", "_"))
            curve = train(layout, text, folder, steps, sizes, limit_s)
            weights = weights_in(folder)
            if curves:
                compare(curves[0], curve)
                differences = (
                    (weights[name] - tensor).abs().max().item() for name, tensor in reference.items()
                )
                curve.final_parameter_difference = max(differences)
            else:
                reference = weights
            curves.append(curve)
            sys.stderr.write(f"{curve.name}: {curve.seconds:.0f} s, last loss {curve.loss[-1]:.4f}\n")
    return curves


def table(curves: Sequence[Curve]) -> str:
    """Return the runs as text."""
    head = f"{'run':14}{'processes':>10}{'first loss':>12}{'last loss':>12}{'max |d loss|':>14}"
    lines = [f"{head}{'mean':>9}{'relative':>11}{'rel. |d norm|':>15}{'max |d weight|':>16}{'s':>7}"]
    for curve in curves:
        lines.append(
            f"{curve.name:14}{curve.processes:>10}{curve.loss[0]:>12.5f}{curve.loss[-1]:>12.5f}"
            f"{curve.largest_loss_difference:>14.2e}{curve.mean_loss_difference:>9.1e}{curve.largest_relative_loss_difference:>11.1e}"
            f"{curve.largest_relative_grad_norm_difference:>15.1e}{curve.final_parameter_difference:>16.1e}"
            f"{curve.seconds:>7.0f}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print a table, write results and picture; return the exit status."""
    parser = argparse.ArgumentParser(description="One training, three ways to divide it.")
    parser.add_argument("text", type=Path, help="a file or folder of text to train on")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max_grad_norm", default="1.0", help="of clipping; 1e9: none")
    parser.add_argument("--limit_s", type=float, default=1800, help="for each run")
    parser.add_argument("--out", type=Path, help="where to write; by default into results/")
    options = parser.parse_args(argv)
    if not options.text.exists():
        parser.error(f"there is no {options.text}")
    sizes = {**SIZES, "max_grad_norm": options.max_grad_norm}
    curves = run(options.text, options.steps, sizes, LAYOUTS, options.limit_s)
    path = options.out or RESULTS / f"parallel_curves_cpu_{datetime.now():%Y%m%d}.json"
    document: dict[str, Any] = {
        "commit": commit(REPOSITORY),
        "versions": versions(),
        "hardware": {**hardware(torch.device("cpu")), "threads": 1},
        "text": options.text.name,
        "global_batch": GLOBAL_BATCH,
        "sizes": sizes,
        "curves": [asdict(curve) for curve in curves],
    }
    write_json(path, document)
    draw_curves(document["curves"], path.with_suffix(".png"))
    sys.stdout.write(table(curves) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
