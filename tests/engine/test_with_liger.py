"""Liger's kernels under every kind of plan: the gradients are those of the same kernels without one.

On a CPU Triton interprets the kernels, line by line; on an accelerator they are compiled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from hf_actswap import model_structure
from tests.engine.liger_worker import KERNELS, plans_with
from tests.engine.pitfalls.odd_layers import llama_with

LIMIT_S = 240
needs_liger = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("liger_kernel", "triton")),
    reason="liger-kernel and triton are not installed",
)
every_case = pytest.mark.parametrize(
    "case",
    [
        f"{kernels}, {name}"
        for kernels in KERNELS
        for name in ("close to none", "close to the loss in tiles", *plans_with(kernels))
    ],
)


def differences_on(device: str, folder: Path, repository: Path, interpreted: bool) -> dict[str, list[str]]:
    """Run all cases in a process of its own; return what differed in each."""
    results = folder / "differences.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpreted else "0"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.engine.liger_worker", device, str(results)],
        cwd=repository,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, list[str]]:
    """What differed with interpreted kernels."""
    return differences_on("cpu", tmp_path_factory.mktemp("liger"), repository, interpreted=True)


@pytest.fixture(scope="module")
def on_accelerator(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, list[str]]:
    """What differed with compiled kernels."""
    accelerator = torch.accelerator.current_accelerator()
    folder = tmp_path_factory.mktemp("liger_compiled")
    return differences_on(f"{accelerator.type}:0", folder, repository, interpreted=False)


@needs_liger
@every_case
def test_interpreted_kernels(case: str, on_cpu: dict[str, list[str]]) -> None:
    """Catches a reloaded tensor that Liger's backward overwrites while another node still needs it."""
    assert on_cpu[case] == []


@pytest.mark.gpu
@needs_liger
@every_case
def test_compiled_kernels(case: str, on_accelerator: dict[str, list[str]]) -> None:
    """The same with streams, where a kernel may write while a copy still reads."""
    assert on_accelerator[case] == []


def test_the_structure_gives_no_kernel_the_address_of_fake_memory() -> None:
    """Catches a recording in which a Triton kernel would run on address 0 and end the CUDA context."""
    called: list[type] = []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        assert x.data_ptr()
        called.append(type(x))
        return x * 2

    model = llama_with(kernel, [1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of it, and goes on
        shape = model_structure(model)
    assert called == [torch.Tensor]  # in the small forward on the device that records instead
    assert shape.functions_known
