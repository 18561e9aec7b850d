"""``python -m hf_actswap.rehearsal [options] -- program arguments``: run it on the rehearsal's device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from .build import build
from .errors import RehearsalError, one_problem
from .launch import Arithmetic, Options, Order, replace_process


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hf_actswap.rehearsal", description="Run a program on a CUDA device that is not there."
    )
    parser.add_argument("--device", default="H100", help="usual name of the device")
    parser.add_argument("--devices", type=int, default=1, help="how many of them")
    parser.add_argument("--memory", default="", help="memory of each, such as 40GiB")
    parser.add_argument("--host-memory", default="", help="host memory to swap into; default: what is free")
    parser.add_argument(
        "--order", default="lazy", help=f"when copies are carried out: {', '.join(get_args(Order))}"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random order")
    parser.add_argument(
        "--arithmetic", default="small", help=f"which values are computed: {', '.join(get_args(Arithmetic))}"
    )
    parser.add_argument(
        "--clock", action="store_true", help="work takes the time that it would on the device"
    )
    parser.add_argument("command", nargs="*", help="the program and its arguments, after --")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status only if it could not start."""
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    given = _parser().parse_args(words[:cut])
    command = [*given.command, *words[cut + 1 :]]
    try:
        if not command:
            raise one_problem("command", "a program after --", "nothing", "Try: -- python train.py")
        if command[0].endswith(".py"):
            command = [sys.executable, *command]
        options = Options(
            given.device,
            given.devices,
            given.memory,
            given.order,
            given.seed,
            given.arithmetic,
            clock=given.clock,
            host_memory=given.host_memory,
        )
        replace_process(options, build(), command)
    except RehearsalError as error:
        sys.stderr.write(f"{error}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
