"""Builds the device: two libraries, from the sources in ``native`` and a stub for what else PyTorch asks for.

Which symbols PyTorch asks for is read from its own libraries, and the layout of CUDA's structures from the
headers that come with its wheels, so that another PyTorch needs no change here. The libraries lie in a folder
of the user's cache, named after all that they depend on, and are built once.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from .errors import one_problem

NATIVE = Path(__file__).parent / "native"

RUNTIME = "libhf_actswap_runtime.so"
"""Loaded ahead of CUDA's own runtime."""
ARITHMETIC = "libhf_actswap_arithmetic.so"
"""Loaded once PyTorch is imported."""
DRIVER = "libcuda.so.1"
MANAGEMENT = "libnvidia-ml.so.1"
"""NVML, which PyTorch opens by its name."""
_RUNTIME = ("runtime", "cublas", "nccl")
"""Sources of the runtime's library."""

_SYMBOL = re.compile(r"(?:cuda[A-Z]|__cuda|cublas|cusolver|cusparse[A-Z]|cufft|curand|nccl[A-Z])\w*\Z")
_DRIVER_SYMBOL = re.compile(r"cu[A-Z]\w*\Z")
_MANAGEMENT_NAME = re.compile(rb"\0(nvml[A-Z]\w*)\0")


@dataclass(frozen=True, slots=True)
class Built:
    """The libraries of one PyTorch.

    Args:
        folder: where they lie.
    """

    folder: Path

    @property
    def runtime(self) -> Path:
        """What is loaded ahead of CUDA's runtime."""
        return self.folder / RUNTIME

    @property
    def arithmetic(self) -> Path:
        """What is loaded when PyTorch has been imported."""
        return self.folder / ARITHMETIC


@dataclass(frozen=True, slots=True)
class _Torch:
    """PyTorch as it is installed, found without importing it."""

    folder: Path

    @property
    def libraries(self) -> list[Path]:
        return sorted(path for path in (self.folder / "lib").glob("lib*.so") if not path.is_symlink())

    @property
    def include(self) -> list[Path]:
        """Folders of headers: CUDA's from NVIDIA's wheels and from triton's, PyTorch's own."""
        site = self.folder.parent
        cuda = [*sorted(site.glob("nvidia/cu*/include")), *sorted(site.glob("nvidia/cuda_*/include"))]
        triton = site / "triton" / "backends" / "nvidia" / "include"
        own = self.folder / "include"
        return [*cuda, triton, own, own / "torch" / "csrc" / "api" / "include"]


def cache_folder() -> Path:
    """Return the folder of what is built, for this user alone."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    return (Path(chosen) if chosen else Path.home() / ".cache") / "hf_actswap" / "rehearsal"


def build() -> Built:
    """Build the device for the PyTorch of this environment, or return what has been built already.

    Raises:
        RehearsalError: PyTorch is not there or is not its CUDA build, or this machine lacks a compiler; the
            error says what to install.
    """
    torch = _cuda_build_of_torch()
    compiler, nm = _program("c++", "g++", "clang++"), _program("nm")
    sources = sorted(NATIVE.glob("*.[ch]pp"))
    facts = [
        str(torch.folder),
        metadata.version("torch"),
        sys.version,
        compiler,
        Path(__file__).read_text("utf-8"),
    ]
    texts = [path.read_text("utf-8") for path in sources]
    digest = hashlib.sha256("\0".join([*facts, *texts]).encode()).hexdigest()[:16]
    target = cache_folder() / digest
    if not (target / ARITHMETIC).is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / "made"
            made.mkdir()
            _compile(torch, compiler, nm, made)
            _move_into_place(made, target)
    return Built(target)


def _cuda_build_of_torch() -> _Torch:
    spec = find_spec("torch")
    install = "Install it from an index with CUDA builds (PyPI has them for Linux); it needs no GPU."
    if spec is None or not spec.origin:
        raise one_problem("torch", "PyTorch's CUDA build", "no PyTorch", install)
    folder = Path(spec.origin).parent
    if not (folder / "lib" / "libtorch_cuda.so").is_file():
        found = f"torch {metadata.version('torch')} without CUDA"
        raise one_problem("torch", "PyTorch's CUDA build", found, install)
    return _Torch(folder)


def _program(*names: str) -> str:
    chosen = os.environ.get("CXX", "") if names[0] == "c++" else ""
    found = next(filter(None, (shutil.which(name) for name in filter(None, (chosen, *names)))), None)
    if found is None:
        hint = "Install a C++ compiler and binutils (Debian: apt install g++; Fedora: dnf install gcc-c++)."
        raise one_problem("rehearsal", f"the program {' or '.join(names)}", "not on the PATH", hint)
    return found


def _symbols(nm: str, which: str, files: Iterable[Path]) -> set[str]:
    """Return symbols of libraries or objects: ``--undefined-only`` or ``--defined-only``."""
    found: set[str] = set()
    for path in files:
        run = [nm, *(["-D"] if path.suffix == ".so" else []), which, str(path)]
        lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
        found |= {line.split()[-1].split("@")[0] for line in lines if line.split()}
    return found


def _stubs(missing: Sequence[str]) -> str:
    """Return code for the functions of the runtime that are asked for and that ``native`` does not have."""
    functions = [
        f"int {name}(void) {{ called[{number}]++; return 0; }}\n" for number, name in enumerate(missing)
    ]
    names = "".join(f'"{name}", ' for name in missing)
    return (
        f"static long called[{len(missing) + 1}];\nstatic const char *names[] = {{{names}0}};\n"
        + "".join(functions)
        + "long rehearsal_stub(long number, const char **name) {\n"
        + f"  if (number >= {len(missing)}) return -1;\n"
        + "  *name = names[number];\n  return called[number];\n}\n"
    )


def _driver(asked: set[str]) -> str:
    """Return code for the driver's library: what the runtime's library has for each name."""
    names = {name for name in asked if _DRIVER_SYMBOL.match(name)}
    names |= {"cuInit", "cuDriverGetVersion", "cuDeviceGetCount"}
    call = "typedef int (*call)(void*, void*, void*, void*, void*, void*);\n"
    return f"{call}void* rehearsal_driver_function(const char*);\n" + "".join(
        f"int {name}(void* a, void* b, void* c, void* d, void* e, void* f) {{\n"
        f'  return ((call)rehearsal_driver_function("{name}"))(a, b, c, d, e, f);\n}}\n'
        for name in sorted(names)
    )


def _management(opened_with: bytes) -> str:
    """Return code for NVML's library: it counts the devices, and says of most else that it is not supported.

    PyTorch takes its functions by name when it needs them: for the text of an out-of-memory error, which
    lists the processes on the device (here none), and from 2.15 on to map expandable segments.

    Args:
        opened_with: the library of PyTorch that holds the names.
    """
    done = {"nvmlInit", "nvmlInit_v2", "nvmlShutdown", "nvmlDeviceGetHandleByPciBusId_v2"}
    names = {name.decode() for name in _MANAGEMENT_NAME.findall(opened_with.replace(b"\0", b"\0\0"))} | done
    written = {
        "nvmlDeviceGetCount_v2": "(int* count) { return cudaGetDeviceCount(count); }",
        "nvmlDeviceGetComputeRunningProcesses": "(void*, unsigned* count, void*) { *count = 0; return 0; }",
    }
    success, not_supported = 0, 3
    return "int cudaGetDeviceCount(int*);\n" + "".join(
        [
            *(f"int {name}{code}\n" for name, code in written.items()),
            *(
                f"int {name}(void) {{ return {success if name in done else not_supported}; }}\n"
                for name in sorted(names - written.keys())
            ),
        ]
    )


def _compile(torch: _Torch, compiler: str, nm: str, folder: Path) -> None:
    include = [f"-I{path}" for path in torch.include if path.is_dir()]
    python = f"-I{sysconfig.get_paths()['include']}"
    common = [compiler, "-std=c++20", "-fPIC", "-w", *include]
    objects = {name: folder.parent / f"{name}.o" for name in (*_RUNTIME, "stubs", "arithmetic")}
    for name, options in (*((name, ["-O2"]) for name in _RUNTIME), ("arithmetic", ["-O1", python])):
        _run([*common, *options, "-c", str(NATIVE / f"{name}.cpp"), "-o", str(objects[name])])
    asked = _symbols(nm, "--undefined-only", torch.libraries)
    ours = _symbols(nm, "--defined-only", [objects[name] for name in _RUNTIME])
    missing = sorted(name for name in asked - ours if _SYMBOL.match(name))
    (folder / "stubs.cpp").write_text('extern "C" {\n' + _stubs(missing) + "}\n", "utf-8")
    (folder / "driver.cpp").write_text('extern "C" {\n' + _driver(asked) + "}\n", "utf-8")
    opened_with = (torch.folder / "lib" / "libc10_cuda.so").read_bytes()
    (folder / "management.cpp").write_text('extern "C" {\n' + _management(opened_with) + "}\n", "utf-8")
    _run([*common, "-O1", "-c", str(folder / "stubs.cpp"), "-o", str(objects["stubs"])])
    runtime = [str(objects[name]) for name in (*_RUNTIME, "stubs")]
    _run([compiler, "-shared", "-o", str(folder / RUNTIME), *runtime])
    for source, library in (("driver", DRIVER), ("management", MANAGEMENT)):
        written, target = folder / f"{source}.cpp", folder / library
        _run([*common, "-shared", str(written), "-o", str(target), f"-Wl,-soname,{library}"])
    where = torch.folder / "lib"
    linked = [
        f"-L{where}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-lc10_cuda",
        "-ltorch_cuda",
        f"-Wl,-rpath,{where}",
    ]
    ignored = "-Wl,--unresolved-symbols=ignore-all"  # the runtime's are there when the process starts
    _run([compiler, "-shared", "-o", str(folder / ARITHMETIC), str(objects["arithmetic"]), *linked, ignored])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[:20])
        raise one_problem("rehearsal", "a device that compiles", f"{command[0]} failed:\n{last}", "")


def _move_into_place(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:  # another process was faster
        if not (target / ARITHMETIC).is_file():
            raise
