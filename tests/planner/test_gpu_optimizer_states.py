"""Optimizer states on the host, on an accelerator: streams, events, device memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.exactness import deterministic
from hf_actswap.engine import HostPool, PinnedSlabs, StreamTransfer
from hf_actswap.planner import OptimizerStates
from tests.rehearsed import on_gpu

pytestmark = pytest.mark.gpu

WIDTH, LAYERS, BATCH, STEPS = on_gpu((2048, 8, 256, 6), (256, 8, 32, 6))
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


@pytest.fixture(autouse=True)
def _deterministic() -> object:
    with deterministic():
        yield


def device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


class Training:
    """Linear layers on the accelerator; ``resident_bytes`` < 0: without us."""

    def __init__(self, make: Make, resident_bytes: int | None) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers).to(device(), torch.bfloat16)
        self.optimizer = make(list(self.model.parameters()))
        self.generator = torch.Generator(device()).manual_seed(1)
        self.pool = HostPool(PinnedSlabs(device(), frozenset()), slab_bytes=2**25)
        self.states: OptimizerStates | None = None
        if resident_bytes is None or resident_bytes >= 0:
            self.states = OptimizerStates(
                self.optimizer,
                StreamTransfer(device()),
                self.pool,
                model=self.model,
                layers=layers,
                resident_bytes=resident_bytes,
                min_tensor_bytes=2**16,
            )
            self.states.attach()

    def loss(self) -> torch.Tensor:
        batch = torch.randn(BATCH, WIDTH, device=device(), dtype=torch.bfloat16, generator=self.generator)
        return self.model(batch).float().pow(2).mean()

    def steps(self, count: int = STEPS, micro_batches: int = 2) -> Training:
        for _ in range(count):
            for _ in range(micro_batches):
                self.loss().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def parameters(self) -> list[torch.Tensor]:
        return [item.detach().cpu() for item in self.model.parameters()]

    def finish(self) -> None:
        if self.states is not None:
            self.states.remove()
        self.pool.close()


@pytest.mark.parametrize("make", KINDS.values(), ids=list(KINDS))
@pytest.mark.parametrize("resident_bytes", [None, 1, 2**40], ids=["a tenth", "one at a time", "all"])
def test_the_same_bits(make: Make, resident_bytes: int | None) -> None:
    runs = [Training(make, wanted).steps() for wanted in (resident_bytes, -1)]
    saved = [one.optimizer.state_dict()["state"] for one in runs]
    for mine, theirs in zip(saved[0].values(), saved[1].values(), strict=True):
        for name in theirs:
            if isinstance(theirs[name], torch.Tensor):
                assert torch.equal(mine[name].cpu(), theirs[name].cpu()), name
    for one in runs:
        one.finish()
        one.steps(1)
    assert all(map(torch.equal, runs[0].parameters(), runs[1].parameters()))


def test_forward_has_the_memory_of_the_states() -> None:
    peaks = []
    for wanted in (None, -1):
        training = Training(KINDS["AdamW fused"], wanted).steps(3)
        torch.accelerator.synchronize()
        loss = training.loss()
        peaks.append(torch.accelerator.memory_allocated())
        if training.states is not None:
            state_bytes = training.states.state_bytes
        loss.backward()
        training.optimizer.step()
        del loss
        training.finish()
        del training
    assert peaks[1] - peaks[0] >= 0.9 * state_bytes


def test_resume_on_the_host() -> None:
    source = Training(KINDS["AdamW fused"], -1).steps(2)
    saved = {name: value for name, value in source.optimizer.state_dict().items()}
    host = torch.utils._pytree.tree_map_only(torch.Tensor, lambda item: item.cpu().clone(), saved)
    resumed, expected = Training(KINDS["AdamW fused"], None), Training(KINDS["AdamW fused"], -1)
    for one in (resumed, expected):
        one.optimizer.load_state_dict(host)
        one.steps(2)
    assert all(map(torch.equal, resumed.parameters(), expected.parameters()))
    for one in (source, resumed, expected):
        one.finish()
