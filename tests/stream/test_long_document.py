"""A document of 200,000 tokens in one process on the CPU, within 2 GiB with all that the process holds."""

from __future__ import annotations

import math
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from hf_actswap import apply
from tests.processes import launch
from tests.stream.streamed_models import SIZES

LENGTH, TOKENS, WINDOW, LAYERS, LIMIT_KIB = 200_000, 512, 512, 2, 2 * 2**20


def train(text: Path, _rank: int, folder: str) -> None:
    """One step on the bytes of a text; writes the loss, the gradients' norms and the peaks."""
    torch.set_num_threads(1)
    ids = torch.frombuffer(bytearray(text.read_bytes()[:LENGTH]), dtype=torch.uint8).long()[None]
    torch.manual_seed(0)
    more = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS}
    sizes: dict[str, Any] = {**SIZES, **more, "sliding_window": WINDOW, "max_position_embeddings": LENGTH}
    model: Any = MistralForCausalLM(MistralConfig(**sizes)).train()
    with apply(model, {"stream_config": {"tokens": TOKENS}}) as applied:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        host_bytes = applied.stats().host_peak_bytes
    found = {
        "tokens": ids.shape[1],
        "loss": loss.item(),
        "norms": [float(item.grad.norm()) for item in model.parameters()],
        "host_bytes": host_bytes,
        "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    torch.save(found, Path(folder, "found.pt"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_document_of_200_000_tokens_within_2_gib(wikitext_dir: Path, tmp_path: Path) -> None:
    """About a minute on one core. The mask of the whole sequence alone would take 37 GiB."""
    launch(partial(train, wikitext_dir / "test.txt"), tmp_path, 1, 1100)
    found = torch.load(tmp_path / "found.pt")
    assert found["tokens"] == LENGTH
    assert found["loss"] == pytest.approx(math.log(256), rel=0.02), "nothing is learned yet"
    assert all(0 < norm < math.inf for norm in found["norms"])
    outputs = LAYERS * LENGTH * (64 * 4 + 4 * 4)  # of all tokens, with a log-sum-exp for each of four heads
    assert outputs < found["host_bytes"] < 2 * outputs
    assert found["peak_kib"] < LIMIT_KIB
