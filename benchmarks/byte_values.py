"""What a byte of each saved tensor of a decoder layer is worth, beside what the link takes for one.

    python benchmarks/byte_values.py                      measured on the device that there is
    python benchmarks/byte_values.py --model arithmetic   from FLOPs and rates, for a device that there is not

For every op of the layer: the bytes that it alone saves, counted on fake tensors of the real shapes, and the
time to run it again; hence picoseconds per byte. `docs/choosing.md` says how to read them.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

# Run as a script from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import benchmarks  # noqa: F401  (what PyTorch reads from the environment)

# isort: split
import torch
from torch.func import functional_call

from benchmarks.byte_calls import Call, CallFollower, Clock, Rates, Stopwatch
from benchmarks.byte_rows import ByteRow, byte_rows
from benchmarks.byte_table import print_byte_table
from benchmarks.records import accelerator_name, commit, hardware, versions
from benchmarks.workloads import PRESETS, DecoderStack, Workload
from hf_actswap import outline
from hf_actswap.plan import Outline
from hf_actswap.plan.dry_run import fakes_only, one_sequence_each
from hf_actswap.plan.fake_batch import fake_batch, fake_weights
from hf_actswap.plan.save_recorder import record_saved

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
TINY = Workload(
    "tiny-8b",
    model="tiny, proportions of Llama-3-8B",
    layers=1,
    tokens=256,
    hidden=256,
    intermediate=896,
    heads=8,
    kv_heads=2,
    vocab=32,
)
SHAPES = {TINY.name: TINY} | {
    name: replace(PRESETS[name], layers=1) for name in ("7b-8k", "7b-32k", "8b-8k", "8b-32k")
}
DEFAULT_SHAPES = {
    "cpu": (TINY.name,),
    "accelerator": ("7b-8k", "7b-32k", "8b-8k", "8b-32k"),
    "arithmetic": ("8b-8k", "8b-32k"),
}
ARITHMETIC_DEVICE = "NVIDIA H200 (arithmetic)"
_GB_PER_S = {"arithmetic": 55.0}
_META = torch.device("meta")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class LinkRate:
    """The rate of the link that is drawn.

    Args:
        gb_per_s: 10^9 bytes a second from device to host; ``None``: there is no link and none was named.
        source: ``measured``, ``argument`` or ``none``.
    """

    gb_per_s: float | None
    source: str

    @property
    def ps_per_byte(self) -> float | None:
        return 1e3 / self.gb_per_s if self.gb_per_s else None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or compute, print the tables, write the JSON and the picture; return the exit status."""
    arguments = _parse(argv)
    arithmetic = arguments.model == "arithmetic"
    device = _META if arithmetic else torch.device(arguments.device)
    kind = "arithmetic" if arithmetic else "cpu" if device.type == "cpu" else "accelerator"
    rates = Rates(arguments.gemm_tflops, arguments.attention_tflops, arguments.hbm_tb_per_s)
    origin = _origin(device, kind, rates, arguments.link_gb_per_s)
    rows: list[dict[str, Any]] = []
    for name in arguments.shapes or DEFAULT_SHAPES[kind]:
        shape = SHAPES[name]
        clock = rates if arithmetic else Stopwatch(device, arguments.runs)
        found = layer_rows(shape, device, clock)
        rows += [_result(shape, row, origin) for row in found]
    print_byte_table(rows)
    path = arguments.out or (None if arguments.shapes else _default_path(kind, device))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        sys.stderr.write(f"written: {path}\n")
        _draw(rows, path.with_suffix(".png"))
    return 0


def layer_rows(shape: Workload, device: torch.device, clock: Clock) -> list[ByteRow]:
    """Return the rows of one decoder layer.

    Args:
        shape: of the layer and its input.
        device: where it runs; on ``meta`` nothing does, and attention is taken to be as on the CPU.
        clock: says what a call costs.
    """
    step = DecoderStack(replace(shape, layers=1), device)
    named = outline(step.model)
    batch = {"inputs_embeds": step.hidden, "use_cache": False}
    saved = record_saved(step.model, named, (), batch, _CPU)
    calls = _calls_on_fakes(step, named, clock) if device.type == "meta" else _calls(step, named, clock)
    return byte_rows(calls, saved, named.layers[0])


def _calls(step: DecoderStack, named: Outline, clock: Clock) -> list[Call]:
    with torch.no_grad():
        step.forward()  # the device awake, its libraries loaded
    follower = CallFollower(step.decoder_layers[0], named.layers[0], clock)
    with follower.following():
        step.forward()
    return follower.calls


def _calls_on_fakes(step: DecoderStack, named: Outline, clock: Clock) -> list[Call]:
    """The calls as on the CPU, from shapes alone; made as `record_saved` makes its forward."""
    follower = CallFollower(step.decoder_layers[0], named.layers[0], clock)
    with one_sequence_each(), fakes_only():
        state = fake_weights(step.model, _CPU)
        hidden = fake_batch(step.hidden, _CPU)
        with follower.following():
            functional_call(step.model, state, (), {"inputs_embeds": hidden, "use_cache": False})
    return follower.calls


def _result(shape: Workload, row: ByteRow, origin: Mapping[str, Any]) -> dict[str, Any]:
    of_shape = ("model", "tokens", "hidden", "intermediate", "heads", "kv_heads", "dtype")
    return {
        "shape": shape.name,
        **{name: getattr(shape, name) for name in of_shape},
        "name": row.name,
        **asdict(row),
        "held_bytes": row.held_bytes,
        **origin,
    }


def _origin(device: torch.device, kind: str, rates: Rates, link_argument: float | None) -> dict[str, Any]:
    """What is the same in every row; the link is measured here."""
    checkout = commit(REPOSITORY)
    environment: dict[str, Any] = {"versions": versions(), "tracked_files_changed": checkout["dirty"]}
    if kind == "arithmetic":
        name = ARITHMETIC_DEVICE
        environment["rates"] = asdict(rates)
        link = LinkRate(link_argument or _GB_PER_S[kind], "argument")
    else:
        machine = environment["hardware"] = hardware(device)
        name = "cpu" if kind == "cpu" else machine["name"]
        link = LinkRate(link_argument, "argument" if link_argument else "none")
        if kind == "accelerator" and not link_argument:
            link = LinkRate(machine["link_gb_per_s"]["out"], "measured")
    return {
        "source": "arithmetic" if kind == "arithmetic" else "measured",
        "device": name,
        "link_gb_per_s": link.gb_per_s,
        "link_ps_per_byte": link.ps_per_byte,
        "link_source": link.source,
        "commit": checkout["id"],
        "environment": environment,
    }


def _draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    try:
        from benchmarks.byte_picture import draw  # here, because matplotlib is an extra
    except ImportError as error:
        sys.stderr.write(f"no picture ({error}); draw it later: python benchmarks/byte_picture.py RESULTS\n")
        return
    draw(rows, path)
    sys.stderr.write(f"written: {path}\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--model", choices=("measure", "arithmetic"), default="measure")
    parser.add_argument("--device", default=found.type if found else "cpu", help="of what is measured")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="default: what suits the device")
    parser.add_argument("--runs", type=int, default=20, help="of each op, of which the median is taken")
    parser.add_argument(
        "--link-gb-per-s",
        type=float,
        help="rate of the link, device to host (default: measured; on the CPU none; in arithmetic 55)",
    )
    parser.add_argument("--gemm-tflops", type=float, default=600.0, help="arithmetic: of matrix products")
    parser.add_argument("--attention-tflops", type=float, default=450.0, help="arithmetic: of attention")
    parser.add_argument(
        "--hbm-tb-per-s", type=float, default=4.1, help="arithmetic: of device memory, as reached"
    )
    parser.add_argument("--out", type=Path, help="JSON file, the picture beside it (default: in results/)")
    arguments = parser.parse_args(argv)
    for name in ("runs", "link_gb_per_s", "gemm_tflops", "attention_tflops", "hbm_tb_per_s"):
        value = getattr(arguments, name)
        if value is not None and value <= 0:
            parser.error(f"argument --{name.replace('_', '-')}: more than 0, found {value:g}")
    return arguments


def _default_path(kind: str, device: torch.device) -> Path:
    where = {"arithmetic": "arithmetic", "cpu": "cpu"}.get(kind)
    where = where or accelerator_name(device).lower().replace(" ", "-")
    return RESULTS / f"byte_values_{where}_{datetime.now():%Y%m%d}.json"


if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    sys.exit(main())
