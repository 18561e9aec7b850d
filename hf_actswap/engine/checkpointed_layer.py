"""A layer that ``torch.utils.checkpoint`` runs again: under which state, and what is checked then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import nn

from ..plan.actions import Scope
from .autograd_state import packs_seen
from .call_state import CallState
from .module_state import CalledModule, ModuleFacts, Surroundings
from .stats import Counters
from .tickets import StaleTensorError
from .verify import SAME, ComparedRuns, RecomputeError, SavedForm, Verifier


class CheckpointedLayer:
    """A layer that ``torch.utils.checkpoint`` runs again.

    Its hooks do not see whether a layer writes into what it has saved, which autograd would reject. That is a
    fault of the layer's code, so the first run in backward shows it: in this run versions are compared.

    Attributes:
        name: name of the layer in messages.
        counters: where its runs in backward are counted.
        verifier: compares what its runs in backward save with what forward saved.
        shown: whether a run has shown that the layer does not do so.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        scope: Scope,
        counters: Counters,
        verifier: Verifier,
        around: Surroundings,
    ) -> None:
        self.name, self.scope, self.counters, self.verifier = name, scope, counters, verifier
        self.shown = False
        self._facts = ModuleFacts(layer, around)

    def called(self, device: torch.device, values: Sequence[Any]) -> CheckpointedCall:
        """Return a call that begins now; ``values`` as of `CalledModule`."""
        return CheckpointedCall(
            self, CalledModule(self.name, self._facts, values), CallState(device, False, ())
        )


class CheckpointedCall:
    """The context in which one call of a layer runs again; ``retain_graph`` enters it several times."""

    __slots__ = ("_called", "_entered", "_expected", "_layer", "_ran", "_runs", "_state", "_stops_early")

    def __init__(self, layer: CheckpointedLayer, called: CalledModule, state: CallState) -> None:
        self._layer, self._called, self._state, self._ran = layer, called, state, False
        self._expected: list[SavedForm] = []
        self._runs = layer.verifier.runs_of((layer.scope, "", None))
        self._stops_early = checkpointing._enable_checkpoint_early_stop is not False

    def contexts(self) -> tuple[AbstractContextManager[Any], CheckpointedCall]:
        """Return the contexts of the call, and of its run in backward."""
        noting, runs = self._called.noting(), self._runs
        return (noting if runs is None else self._expecting(noting, runs)), self

    @contextmanager
    def _expecting(self, noting: AbstractContextManager[Any], runs: ComparedRuns) -> Iterator[None]:
        def note(tensor: torch.Tensor) -> None:
            runs.saves(tensor, len(self._expected), makes=True)
            self._expected.append(SavedForm.of(tensor, None))

        with noting, packs_seen(note):
            yield
        runs.forward_ends()

    @contextmanager
    def _checked(self, runs: ComparedRuns) -> Iterator[None]:
        waiting, again = enumerate(self._expected), runs.again()

        def check(tensor: torch.Tensor) -> None:
            for index, form in islice(waiting, 1):
                form.check(tensor, self._layer.name, index)
                again.sees(tensor, index)

        try:
            with packs_seen(check):
                yield
        finally:  # the run ends with an exception as soon as all tensors are there
            runs.compare(again)

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the layer's forward; in backward with the context variables of the call."""
        if self._ran:
            self._layer.counters.recomputes += 1
            return self._state.run(forward, *args, **kwargs)
        self._ran = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._called.ends()

    def __enter__(self) -> None:
        self._entered = ExitStack()
        self._entered.enter_context(self._state.settings_restored())
        self._entered.enter_context(self._called.restored())
        if not self._layer.shown:
            self._entered.enter_context(self._watched())
        if self._runs is not None:
            self._entered.enter_context(self._checked(self._runs))

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)
        # PyTorch ends the run by an exception as soon as all is there that forward saved.
        if error == (None, None, None) and self._stops_early:
            raise RecomputeError(f"{self._layer.name}: run again, it saved fewer tensors; {SAME}")

    @contextmanager
    def _watched(self) -> Iterator[None]:
        packed: list[tuple[torch.Tensor, int]] = []
        try:
            with packs_seen(lambda tensor: packed.append((tensor, tensor._version))):
                yield
        finally:  # the run ends with an exception as soon as all tensors are there
            written = [(tensor.shape, version, tensor._version) for tensor, version in packed]
            packed.clear()  # nodes of this run hold the hook, and the tensors hold the nodes
            for shape, version, now in written:
                if now != version:
                    raise StaleTensorError(shape, version, now, self._layer.name)
            self._layer.shown = True
