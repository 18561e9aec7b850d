"""A pytest plugin for other projects' tests: a plan on every model, and a record of its numbers.

``pytest -p tests.peers.plan_on_every_model --actswap-plan swap --actswap-record out.json``. A model that a
Trainer trains gets the plan by a callback. Any other model gets it in its first call with gradients, by
`hf_actswap.apply`; it gets another one if modules were added or replaced since (adapters), or if gradient
checkpointing was switched on or off, beside which a plan must not recompute.

A model without a plan has its key-value cache switched off, as one with a plan has. With a cache, T5 and
GPT-J lay their keys out otherwise and round otherwise (docs/reference.md).

The record holds, for each test, its outcome and the losses and a digest of the gradients after every
backward. Runs with a plan and without are compared by it: a test of those projects often asks only that
gradients exist. A test that the record file has already is not run again.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

import hf_actswap

_SWAP = {
    "swap": True,
    "layer_swap": [{"backward_prefetch": 10, "layers": True}],
}
PLANS: dict[str, Any] = {
    "none": None,
    "swap": {"swap_config": _SWAP, "memory": {"min_tensor_mib": 1e-6}},
    "mix": {
        "swap_config": {**_SWAP, "op_swap": []},
        "recompute_config": {"select_recompute": {"feed_forward": True}},
        "memory": {"min_tensor_mib": 1e-6},
    },
    "auto": "auto",
}


def _stand_in(name: str) -> Any:
    """Return what stands for a name that the installed version does not have any more.

    One test of many needs it: a decorator skips its test, anything else raises an error when it is made.
    """
    gone = f"the installed version has no {name}"
    if name.startswith("require_"):
        return pytest.mark.skip(reason=gone)

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ImportError(gone)

    return type(name, (), {"__init__": made})


def _let_imports_pass(path: Path) -> None:
    """Put stand-ins for what a file of tests imports and is not there.

    These are names that newer versions of the libraries have dropped, and packages that few tests need.
    """
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        package = node.module.partition(".")[0]
        if package not in sys.modules and importlib.util.find_spec(package) is None:
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__spec__ = ModuleSpec(package, None)
        elif not node.module.startswith(("trl", "peft", "transformers.testing_utils")):
            continue
        module = importlib.import_module(node.module)
        for name in (alias.name for alias in node.names):
            if not hasattr(module, name):
                setattr(module, name, _stand_in(name))


def _switch_cache_off(model: nn.Module) -> None:
    """Do what a plan does to the configurations; not by its function, which is among what is tested."""
    for module in model.modules():
        config = getattr(module, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else None
        for part in (config, text):
            if getattr(part, "use_cache", False):
                part.use_cache = False


def _checkpointed(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


class PlanOnEveryModel:
    """The plugin's state: the plan, the models that have one, and the numbers of the test that runs."""

    def __init__(self, plan: str, record: Path) -> None:
        self.plan, self.record_path = PLANS[plan], record
        self.name = plan
        self.tests: dict[str, dict[str, Any]] = (
            json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        )
        self.numbers: list[str] = []
        self.plans_applied = 0
        self.depth = 0
        self.in_trainer = 0
        self._models: WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], Any]] = WeakKeyDictionary()

    # The plan.

    def plan_for(self, model: Any) -> Any:
        """Return the plan, without its recomputation where the model is checkpointed: both are an error."""
        if isinstance(self.plan, dict) and isinstance(model, nn.Module) and _checkpointed(model):
            return {key: value for key, value in self.plan.items() if key != "recompute_config"}
        return self.plan

    def before_call(self, model: nn.Module) -> None:
        """Give a model that is called with gradients its plan."""
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in model.parameters()):
            return
        modules = (_checkpointed(model), *(id(module) for module in model.modules()))
        known, applied = self._models.get(model, ((), None))
        if known == modules:
            return
        if applied is not None:
            applied.remove()
        applied = None
        if self.plan is not None and self.name != "auto" and not self.in_trainer:
            applied = hf_actswap.apply(model, self.plan_for(model))
            self.plans_applied += 1
        if self.plan is None or (self.name == "auto" and not self.in_trainer):
            _switch_cache_off(model)
        self._models[model] = (modules, applied)

    def wrap_call(self, kind: type[nn.Module]) -> Callable[..., Any]:
        inner = kind.__call__

        def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            try:
                if self.depth == 1:  # not in a dry run, which calls the model while a plan is made
                    self.before_call(model)
                return inner(model, *args, **kwargs)
            finally:
                self.depth -= 1

        return call

    def wrap_trainer_init(self) -> Callable[..., Any]:
        """Give the Trainer a callback. Where the plan recomputes, checkpointing is switched off.

        That is what the pages ask for; a planner switches it off by itself.
        """
        inner = Trainer.__init__

        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            if self.plan is not None:
                training = kwargs.get("args", args[1] if len(args) > 1 else None)
                for name in ("gradient_checkpointing", "activation_checkpointing"):
                    if self.name == "mix" and hasattr(training, name):
                        setattr(training, name, False)
                plan = self.plan_for(kwargs["model"] if "model" in kwargs else args[0])
                kwargs["callbacks"] = [*(kwargs.get("callbacks") or []), hf_actswap.ActSwapCallback(plan)]
                self.plans_applied += 1
            inner(trainer, *args, **kwargs)

        return init

    def wrap_train(self) -> Callable[..., Any]:
        inner = Trainer.train

        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self.in_trainer += 1
            try:
                return inner(trainer, *args, **kwargs)
            finally:
                self.in_trainer -= 1

        return train

    def wrap_arguments(self) -> Callable[..., Any]:
        """Ask for the CPU where there is no GPU: TRL's default bf16 is an error there otherwise."""
        inner = TrainingArguments.__post_init__

        def finish(arguments: Any) -> None:
            arguments.use_cpu = arguments.use_cpu or not torch.accelerator.is_available()
            inner(arguments)

        return finish

    # The numbers.

    def wrap_backward(self) -> Callable[..., Any]:
        inner = torch.Tensor.backward

        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            found = inner(loss, *args, **kwargs)
            digest = hashlib.sha256()
            for model in sorted(self._models, key=lambda model: sum(1 for _ in model.modules())):
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        digest.update(name.encode())
                        digest.update(parameter.grad.detach().float().cpu().numpy().tobytes())
            self.numbers.append(f"{loss.detach().float().sum().item()!r} {digest.hexdigest()[:16]}")
            return found

        return backward

    # pytest's hooks.

    @pytest.hookimpl
    def pytest_collect_file(self, file_path: Path) -> None:
        if file_path.suffix == ".py":
            for path in sorted(file_path.parent.glob("*.py")):
                _let_imports_pass(path)

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        recorded = [item for item in items if item.nodeid in self.tests]
        if recorded:
            items[:] = [item for item in items if item.nodeid not in self.tests]
            config.hook.pytest_deselected(items=recorded)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._models.clear()
        self.numbers, self.plans_applied, self.depth = [], 0, 0
        transformers.set_seed(0)
        try:
            return (yield)
        finally:
            for _, applied in list(self._models.values()):
                if applied is not None:
                    applied.remove()
            self._models.clear()

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.tests[report.nodeid] = {
                "outcome": report.outcome,
                "why": "" if report.passed else str(report.longrepr)[-1500:],
                "numbers": self.numbers,
                "plans": self.plans_applied,
            }
        if report.when == "teardown":  # after each test: a run that is ended from outside leaves its record
            self.write()

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        self.write()

    def write(self) -> None:
        """Write the record of the tests so far."""
        self.record_path.write_text(json.dumps(self.tests, indent=1), encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--actswap-plan", choices=sorted(PLANS), default="none")
    parser.addoption("--actswap-record", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    plugin = PlanOnEveryModel(config.getoption("--actswap-plan"), config.getoption("--actswap-record"))
    patches = pytest.MonkeyPatch()
    for kind in (PreTrainedModel, peft.PeftModel, peft.PeftMixedModel):
        patches.setattr(kind, "__call__", plugin.wrap_call(kind))
    patches.setattr(TrainingArguments, "__post_init__", plugin.wrap_arguments())
    patches.setattr(Trainer, "__init__", plugin.wrap_trainer_init())
    patches.setattr(Trainer, "train", plugin.wrap_train())
    patches.setattr(torch.Tensor, "backward", plugin.wrap_backward())
    config.addinivalue_line("markers", "slow: a mark of the projects' tests")
    config.add_cleanup(patches.undo)
    config.pluginmanager.register(plugin, "plan_on_every_model")
