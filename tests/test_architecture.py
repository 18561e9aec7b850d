"""The boundaries between the packages: who may import whom, what importing does, and what is public."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "hf_actswap"
ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 900

PUBLIC_NAMES = {
    *("load_config", "load_plan", "model_structure", "resolve_plan", "apply"),
    *("ActSwapConfig", "MemoryPlan", "AppliedPlan"),
    *("ConfigError", "PlanError"),
    *("ActSwapTrainingArguments", "ActSwapCallback"),
    *("ActSwapTrainer", "ActSwapTrainerMixin", "prepare", "stage_from_config", "stage_from_pretrained"),
    "with_actswap",
    *("adapt_mem_func_wrapper", "op_hook"),
}

LAYERS = (  # lowest first; a unit imports from lower layers and from itself
    {"errors", "interrupts", "run_environment", "startup", "version"},
    {"releases"},
    {"config"},
    {"plan"},
    {"engine", "parallel"},
    {"planner", "pipeline"},
    {"stream"},
    {"report"},
    {"apply", "rehearsal"},
    {"integrations"},
    {"cli"},
    {"__init__"},
)
HUGGING_FACE = {"transformers", "accelerate", "datasets", "peft"}
FORBIDDEN = {
    "errors": {"torch", "yaml", *HUGGING_FACE},
    "version": {"torch", "yaml", *HUGGING_FACE},
    "config": {"torch", *HUGGING_FACE},
    "plan": {"yaml", *HUGGING_FACE},
    "engine": {"yaml", *HUGGING_FACE},
    "parallel": {"yaml", "accelerate", "datasets", "transformers.Trainer", "transformers.trainer"},
    "planner": {"yaml", *HUGGING_FACE},
    "stream": {"yaml", *(HUGGING_FACE - {"transformers"}), "transformers.Trainer", "transformers.trainer"},
    "pipeline": {"yaml", *HUGGING_FACE},
    "apply": set(HUGGING_FACE),
    "rehearsal": {"torch", "yaml", *HUGGING_FACE},
    "report": {"accelerate", "datasets", "transformers.Trainer", "transformers.trainer"},
    "cli": {"accelerate", "datasets", "transformers.Trainer", "transformers.trainer"},
}
"""Third-party names (and all that lies under them) that a unit must not know."""


@dataclass(frozen=True)
class Import:
    """One imported name, absolute, e.g. ``hf_actswap.plan.layout.PipelineLayout``."""

    importer: Path
    name: str
    line: int
    in_function: bool

    @property
    def unit(self) -> str:
        return unit_of_path(self.importer)

    def __str__(self) -> str:
        return f"{self.importer.relative_to(ROOT)}:{self.line} imports {self.name}"

    def is_under(self, name: str) -> bool:
        return self.name == name or self.name.startswith(f"{name}.")


def unit_of_path(path: Path) -> str:
    """The layer's unit that a file belongs to: its top folder or its module name."""
    return path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")


def unit_of_name(name: str, units: frozenset[str]) -> str:
    """The unit of an absolute name of our package; names of the top level itself are ``__init__``."""
    parts = name.split(".")[1:]
    return parts[0] if parts and parts[0] in units else "__init__"


def sources() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def imported_names(node: ast.AST, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = [node.module] if node.module else []
    if node.level:
        folder = path.relative_to(ROOT).parent.parts
        base = [*folder[: len(folder) - node.level + 1], *base]
    return [".".join([*base, alias.name]) for alias in node.names]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path, source: str | None = None) -> Iterator[Import]:
    tree = tree_of(path) if source is None else ast.parse(source)
    function_types = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    functions = [node for node in ast.walk(tree) if isinstance(node, function_types)]
    inside = {id(child) for function in functions for child in ast.walk(function)}
    for node in ast.walk(tree):
        for name in imported_names(node, path):
            yield Import(path, name, getattr(node, "lineno", 0), id(node) in inside)


@cache
def all_imports() -> list[Import]:
    return [found for path in sources() for found in imports_of(path)]


def climbs(found: Import, units: frozenset[str]) -> bool:
    """Whether an import of our own package goes up, or sideways where that is not allowed."""
    layer = {unit: level for level, units in enumerate(LAYERS) for unit in units}
    importer, imported = found.unit, unit_of_name(found.name, units)
    if importer == imported:
        return False
    return layer[importer] <= layer[imported]


def test_every_file_is_in_a_layer() -> None:
    known = set().union(*LAYERS)
    assert sources()
    assert [str(path.relative_to(ROOT)) for path in sources() if unit_of_path(path) not in known] == []


@pytest.mark.essential
def test_imports_go_down_only() -> None:
    units = frozenset(map(unit_of_path, sources()))
    ours = [found for found in all_imports() if found.is_under(PACKAGE)]
    assert [str(found) for found in ours if climbs(found, units)] == []


def test_the_rehearsal_stands_alone() -> None:
    """A training that does not ask for a rehearsal loads none of it, and it loads none of the engine."""
    package = f"{PACKAGE}.rehearsal"
    names = ("config", "errors", "planner.devices", "rehearsal", "run_environment", "startup")
    known = {f"{PACKAGE}.{name}" for name in names}
    ours = [found for found in all_imports() if found.unit == "rehearsal" and found.is_under(PACKAGE)]
    assert ours
    assert [str(found) for found in ours if not any(found.is_under(name) for name in known)] == []
    users = [found for found in all_imports() if found.is_under(package) and found.unit != "rehearsal"]
    assert [str(found) for found in users if found.unit != "cli"] == []


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_at_start(path: Path) -> set[str]:
    """The modules of the same unit that a module imports when it is imported."""
    modules = {module_of(source) for source in sources()}
    checked = [
        id(child)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    ]
    names = [
        name
        for node in ast.walk(tree_of(path))
        if id(node) not in checked
        for name in imported_names(node, path)
    ]
    late = {found.name for found in imports_of(path) if found.in_function}
    prefixes = {name: [name, name.rpartition(".")[0]] for name in names if name not in late}
    found = {next((of for of in both if of in modules), "") for both in prefixes.values()}
    own = f"{PACKAGE}.{unit_of_path(path)}"
    return {name for name in found if name.startswith(f"{own}.") and name != module_of(path)}


@pytest.mark.essential
def test_modules_do_not_import_each_other_in_a_circle() -> None:
    """Which of them works depends on who is imported first. Units cannot: imports between them go down."""
    TopologicalSorter({module_of(path): imported_at_start(path) for path in sources()}).prepare()


def test_layers_do_not_know_libraries_above_them() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        for name in FORBIDDEN.get(found.unit, set())
        if found.is_under(name)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("importer", "statement", "forbidden"),
    [
        ("plan/layout.py", "from hf_actswap.config.schema import Offset", False),
        ("plan/layout.py", "from ..errors import Problem", False),
        ("plan/layout.py", "from hf_actswap.engine import install", True),
        ("plan/layout.py", "from .. import apply", True),
        ("plan/layout.py", "import hf_actswap", True),
        ("engine/stats.py", "from hf_actswap.parallel import group", True),
        ("stream/two_passes.py", "from ..engine import AppliedPlan", False),
        ("stream/two_passes.py", "from ..planner import Planner", False),
        ("planner/run.py", "from ..stream import traced", True),
        ("engine/hooks.py", "from ..stream import stream_sequences", True),
        ("integrations/callback.py", "from hf_actswap.report import table", False),
        ("report/console.py", "from hf_actswap.apply import apply", True),
        ("integrations/callback.py", "from hf_actswap import cli", True),
        ("errors.py", "from .config import schema", True),
        ("__init__.py", "from .integrations.callback import ActSwapCallback", False),
    ],
)
def test_the_guard_itself(importer: str, statement: str, forbidden: bool) -> None:
    (found,) = imports_of(ROOT / PACKAGE / importer, statement)
    assert climbs(found, frozenset().union(*LAYERS)) is forbidden


LATE = {"cli/app.py", "cli/plan.py", "cli/run.py"}
"""Import what a command needs when it runs: `--help`, wrong options and programs shall not wait for torch."""


def test_no_import_of_our_own_inside_a_function() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if found.in_function
        and found.is_under(PACKAGE)
        and str(found.importer.relative_to(ROOT / PACKAGE)) not in LATE
    ]
    assert wrong == []


IMPORT_BY_TEXT = {"__init__.py", "cli/rehearsal_report.py", "integrations/startup/sitecustomize.py"}
"""The public names (PEP 562), the planner's advice in a report, and what programs of `run` load at start."""


def names_ours(call: ast.Call) -> bool:
    """Whether a call of ``import_module`` names a module of ours, or a relative one."""
    first = call.args[0].values[0] if isinstance(call.args[0], ast.JoinedStr) else call.args[0]
    return isinstance(first, ast.Constant) and str(first.value).startswith((".", PACKAGE))


def test_imports_of_our_own_are_not_hidden_in_strings() -> None:
    found = {
        str(path.relative_to(ROOT / PACKAGE))
        for path in sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__"))
        if names_ours(node)
    }
    assert found <= IMPORT_BY_TEXT


def test_modules_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text("utf-8").splitlines()) for path in sources()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(
        node.name
        for path in sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_print_and_no_global_statement() -> None:
    wrong = []
    for path in sources():
        for node in ast.walk(tree_of(path)):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(node, ast.Global) or (isinstance(called, ast.Name) and called.id == "print"):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


LOGGED = {"debug", "info", "warning", "error"}


def test_no_log_record_holds_an_error() -> None:
    """A handler may keep its records; an error has frames, and these hold a model with all its states."""
    wrong = []
    for path in sources():
        handlers = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ExceptHandler)]
        for handler in handlers:
            for node in ast.walk(handler):
                called = node.func if isinstance(node, ast.Call) else None
                if not (isinstance(called, ast.Attribute) and called.attr in LOGGED):
                    continue
                if any(isinstance(given, ast.Name) and given.id == handler.name for given in node.args):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert wrong == []


IMPORT_PROBE = """
import json, logging, os, random, sys, threading, warnings
import torch, torch.distributed, torch.utils.checkpoint
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
import accelerate, huggingface_hub, transformers, yaml
from transformers import TrainerCallback, TrainingArguments

def state():
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "function modes": repr(_get_current_function_mode_stack()),
        "dispatch modes": repr(_get_current_dispatch_mode_stack()),
        "rng": torch.get_rng_state().tolist(),
        "rng of Python": hash(random.getstate()),
        "torch threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "process group": torch.distributed.is_initialized(),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "environment": dict(os.environ),
        "log handlers": repr(logging.getLogger().handlers),
        "warning filters": repr(warnings.filters),
        "folder": sorted(os.listdir()),
    }

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
ACTS = {"os.mkdir", "socket.connect", "subprocess.Popen", "_thread.start_new_thread"}
events = []
def audit(event, arguments):
    if event in ACTS or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES):
        events.append([event, repr(arguments[0])])

before = state()
sys.addaudithook(audit)
import hf_actswap
heavy = ("datasets", "transformers.trainer", "hf_actswap.rehearsal")
for name in hf_actswap.__all__:  # they are imported when they are asked for
    if name != "ActSwapTrainer":  # transformers' own Trainer has effects when it is imported
        getattr(hf_actswap, name)
acts, loaded = list(events), set(sys.modules)
after = state()
print(json.dumps({
    "changed": [name for name in before if before[name] != after[name]],
    "acts": acts,
    "heavy": [name for name in heavy if name in loaded],
    "all": sorted(hf_actswap.__all__),
    "missing": [name for name in hf_actswap.__all__ if not hasattr(hf_actswap, name)],
}))
"""


def run_python(code: str, folder: Path) -> str:
    """Run ``code`` in a fresh interpreter in an empty folder and return what it printed last."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def import_probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    probe: dict[str, list[str]] = json.loads(run_python(IMPORT_PROBE, tmp_path_factory.mktemp("probe")))
    return probe


def test_import_has_no_side_effects(import_probe: dict[str, list[str]]) -> None:
    assert {name: import_probe[name] for name in ("changed", "acts")} == {"changed": [], "acts": []}


def test_public_names(import_probe: dict[str, list[str]]) -> None:
    assert set(import_probe["all"]) == PUBLIC_NAMES
    assert import_probe["missing"] == []


def test_import_loads_no_trainer_no_datasets_no_rehearsal(import_probe: dict[str, list[str]]) -> None:
    assert import_probe["heavy"] == []
