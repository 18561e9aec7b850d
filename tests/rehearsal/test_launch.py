"""A rehearsal is asked for: options, what is missing on this machine, the environment of the program."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hf_actswap.planner.devices import DEVICES as RATES
from hf_actswap.rehearsal import (
    DEVICES,
    Built,
    Options,
    RehearsalError,
    RehearsedDevice,
    build,
    device_facts,
    environment,
)
from hf_actswap.rehearsal.__main__ import main
from hf_actswap.rehearsal.launch import SETTINGS, STARTUP, settings_of
from tests.rehearsed import REHEARSED

build_module: ModuleType = sys.modules["hf_actswap.rehearsal.build"]  # its name is also that of a function
ROOT = Path(__file__).resolve().parents[2]
BUILT = Built(Path("somewhere"))


def test_every_device_with_cuda_whose_rates_are_known_can_be_rehearsed() -> None:
    rates = {rate.name: rate.memory_bytes for rate in RATES if rate.name not in ("cpu", "MI300X")}
    facts = {found.kind: found.memory_bytes for found in DEVICES}
    assert facts.keys() == rates.keys()
    for kind, most_bytes in rates.items():  # a process can use what there is, less half a GiB of CUDA's own
        assert 0 <= facts[kind] - 2**29 - most_bytes <= 0.01 * facts[kind], kind


@pytest.mark.parametrize("name", ["H100", "h100-80", "NVIDIA H100 80GB HBM3"])
def test_a_device_has_many_names(name: str) -> None:
    assert device_facts(name).kind == "H100"


@pytest.mark.parametrize(
    ("options", "expected", "found"),
    [
        ({"device": "H1000"}, "--device: expected one of H200, H100", "'H1000'"),
        ({"device": "MI300X"}, "a CUDA device", "It runs no CUDA."),
        ({"order": "late"}, "--order: expected one of lazy, eager, random", "'late'"),
        ({"arithmetic": "some"}, "--arithmetic: expected one of none, small, all", "'some'"),
        ({"devices": 0}, "--devices: expected a number from 1 to 16", "found 0"),
        ({"memory": "much"}, "--memory: expected a size such as 40GB", "'much'"),
        ({"memory": "100MiB"}, "at least 1GiB", "'100MiB'"),
        ({"host_memory": "much"}, "--host-memory: expected a size such as 40GB", "'much'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], expected: str, found: str) -> None:
    with pytest.raises(RehearsalError) as error:
        Options(**options)  # type: ignore[arg-type]
    assert expected in str(error.value)
    assert found in str(error.value)


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "H100"]) == 2
    assert "command: expected a program after --, found nothing" in capsys.readouterr().err
    assert main(["--device", "GTX 480", "--", "train.py"]) == 2
    assert "'GTX 480'" in capsys.readouterr().err


def test_the_environment_of_a_program() -> None:
    base = {"PYTHONPATH": "mine", "CUDA_VISIBLE_DEVICES": "", "HOME": "/home"}
    found = environment(Options("A100-40", 2, "30GiB", "random", 7, "all"), BUILT, base)
    assert found["PYTHONPATH"] == os.pathsep.join([str(STARTUP), "mine"])
    assert found["LD_PRELOAD"] == str(BUILT.runtime)
    assert "CUDA_VISIBLE_DEVICES" not in found
    settings = dict(pair.split("=", 1) for pair in found[SETTINGS].split(";"))
    assert settings["bytes"] == str(30 * 2**30)
    assert (settings["devices"], settings["major"], settings["order"], settings["seed"]) == (
        "2",
        "8",
        "random",
        "7",
    )
    assert base["CUDA_VISIBLE_DEVICES"] == "", "the given one stays as it is"


def test_only_small_tensors_have_bytes_unless_all_do() -> None:
    small, all_of_them = (settings_of(Options(arithmetic=level), BUILT) for level in ("small", "all"))
    assert small["real_bytes"] == 2**20
    assert int(all_of_them["real_bytes"]) > 2**50


def test_without_pytorchs_cuda_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    origin = str(tmp_path / "torch" / "__init__.py")
    monkeypatch.setattr(build_module, "find_spec", lambda _: SimpleNamespace(origin=origin))
    with pytest.raises(RehearsalError, match=r"expected PyTorch's CUDA build, found torch \S+ without CUDA"):
        build()
    monkeypatch.setattr(build_module, "find_spec", lambda _: None)
    with pytest.raises(RehearsalError, match="found no PyTorch"):
        build()


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(
        build_module, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "torch" / "x.py"))
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        RehearsalError, match=r"the program c\+\+ or g\+\+ or clang\+\+, found not on the PATH"
    ):
        build()


def test_functions_of_nvml_are_those_whose_names_pytorch_holds() -> None:
    """PyTorch calls what it looks up without asking whether it was found."""
    code = build_module._management(
        b"\0nvmlInit_v2\0nvmlDeviceGetGpuFabricInfoV\0other\0nvmlDeviceGetCount_v2\0"
    )
    for function in (
        "int nvmlDeviceGetCount_v2(int* count) { return cudaGetDeviceCount(count); }",
        "int nvmlInit_v2(void) { return 0; }",
        "int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { *count = 0; return 0; }",
        "int nvmlDeviceGetGpuFabricInfoV(void) { return 3; }",
    ):
        assert code.count(function) == 1
    assert code.count("nvmlDeviceGetCount_v2") == 1
    assert "other" not in code


def test_a_program_without_torch_runs_as_ever(tmp_path: Path) -> None:
    """The startup hook imports nothing, and runs the sitecustomize that it hides."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.customized = True\n")
    settings = environment(Options(), BUILT, {**os.environ, "PYTHONPATH": str(tmp_path)})
    settings = {name: value for name, value in settings.items() if not name.startswith("LD_")}
    code = "import sys; print(sys.customized, 'torch' in sys.modules, 'hf_actswap' in sys.modules)"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, env=settings, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr


@pytest.mark.skipif(REHEARSED, reason="is about processes outside")
def test_this_process_is_on_no_such_device() -> None:
    assert RehearsedDevice.found() is None


def test_what_a_rehearsal_replaces_in_the_library_is_there() -> None:
    """It is set by name from outside: a name that has moved would be set in vain, and nobody told."""
    from hf_actswap.engine import frozen_weights, host_memory, host_pool, verify
    from hf_actswap.stream import two_passes

    startup = (STARTUP / "sitecustomize.py").read_text()
    named = re.findall(r'"(hf_actswap\.[a-z_.]+)"', startup)
    replaced = (frozen_weights, host_memory, host_pool, two_passes, verify)
    assert {part.__name__ for part in replaced} == set(named)
    assert callable(host_memory._machine_limit)
    assert callable(host_memory._cgroup_limits)
    assert callable(host_pool.PinnedSlabs._touch)
    assert host_pool.MAPPING
    assert callable(two_passes.check_few_tokens)
    assert callable(verify.Verifier.differing)
    assert callable(frozen_weights._write)


def test_what_has_no_values_never_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that was found to differ is kept from then on, and its tensors with it."""
    from hf_actswap.engine.verify import Verifier

    monkeypatch.syspath_prepend(STARTUP)
    values = importlib.import_module("rehearsed_program.values")
    rehearsed = type("Verifier", (Verifier,), {})
    values.find_no_difference(SimpleNamespace(Verifier=rehearsed))
    for made, found in ((Verifier, [(0, "linear", 0)]), (rehearsed, [])):
        verifier = made("first")
        expect = verifier.of_call((0, "linear", 0))
        assert expect is not None
        compare = expect(torch.zeros(8))
        assert compare is not None
        compare(torch.ones(8))
        assert list(verifier.differing()) == found
        assert verifier.of_call((0, "linear", 0)) is None
