"""What each process of the patching tests runs: a model in one process, and the same one patched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from hf_actswap.apply import apply
from hf_actswap.config import ParallelConfig
from hf_actswap.parallel.collectives import gathered, tensor_parallel_group
from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients, get_grad_norm
from hf_actswap.parallel.patch_model import Patched, partitions_of, patch_model
from tests.parallel.patched_models import VOCABULARY, tiny_model
from tests.processes import run_cases

LENGTH, BATCH = 16, 2
_SMALL = 1e-3


@dataclass(frozen=True)
class Case:
    """A model and the batches of one step.

    Args:
        kind: of the model.
        sequence_parallel: else the ranks hold the hidden states alike.
        settings: of the model's configuration.
        length: tokens per sequence.
        accumulation: batches.
        masked: sequences have padding of unequal lengths, and labels that are ignored.
        reduced: tagged gradients are summed; else the negative control.
        checkpointing: Hugging Face's gradient checkpointing.
        evaluates: a forward without gradients stands between forward and backward.
        call: further arguments of the forward.
        counted: tokens with a loss are counted for the model, as the Trainer does.
        tiles: op paths of the modules that the divided model runs in tiles.
    """

    kind: str = "llama"
    sequence_parallel: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    length: int = LENGTH
    accumulation: int = 1
    masked: bool = True
    reduced: bool = True
    checkpointing: bool = False
    evaluates: bool = False
    call: dict[str, Any] = field(default_factory=dict)
    counted: bool = True
    tiles: tuple[str, ...] = ()


@dataclass
class Result:
    """What one rank saw.

    Args:
        losses: of the patched model; ``expected_losses``: in one process.
        errors: parameter -> largest difference of its gradient, relative to the largest of the expected one,
            or to a thousandth of the largest of all.
        norms: of all gradients, patched (0 where they are not reduced) and expected.
        drift: names of replicated parameters whose gradients are not bitwise the same on all ranks.
        missing: parameters of one process without counterpart, or with.
    """

    losses: list[float]
    expected_losses: list[float]
    errors: dict[str, float]
    norms: tuple[float, float]
    drift: list[str]
    missing: set[str]

    @property
    def worst(self) -> tuple[float, str]:
        """The largest of the errors, and whose it is."""
        return max((error, name) for name, error in self.errors.items())


def batches(case: Case) -> list[dict[str, torch.Tensor]]:
    """Return ids, labels and masks of one step, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for step in range(case.accumulation):
        vocabulary = case.settings.get("vocab_size", VOCABULARY)
        ids = torch.randint(3, vocabulary, (BATCH, case.length), generator=generator)
        inputs = {"input_ids": ids, "labels": ids.clone()}
        if case.masked:
            mask = torch.ones_like(ids)
            mask[1, case.length - 3 - step :] = 0
            inputs["labels"][mask == 0] = -100
            inputs["labels"][0, : 5 + step] = -100
            inputs["attention_mask"] = mask
        found.append(inputs)
    return found


def config(group: dist.ProcessGroup, sequence_parallel: bool) -> ParallelConfig:
    """Return the configuration for all ranks of a group."""
    return ParallelConfig(tensor_parallel_size=group.size(), sequence_parallel_enabled=sequence_parallel)


def step(model: Any, case: Case) -> list[float]:
    """Run forward and backward of all batches; return the losses."""
    losses = []
    for inputs in batches(case):
        items = (inputs["labels"] != -100).sum()
        torch.manual_seed(5)
        counted = {"num_items_in_batch": items} if case.counted else {}
        loss = model(**inputs, **case.call, **counted).loss
        if case.evaluates:
            with torch.no_grad():
                model.eval()(input_ids=inputs["input_ids"])
            model.train()
        (loss / case.accumulation).backward()
        losses.append(loss.item())
    return losses


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients by parameter name; of weights that FSDP2 shards, whole ones."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}


def full_gradients(patched: Patched) -> dict[str, torch.Tensor]:
    """Return the whole gradients of a patched model; every rank must call it."""
    partitions = dict(partitions_of(patched.model))
    return {
        name: partitions[name].whole(of_ranks(patched, grad)) if name in partitions else grad
        for name, grad in gradients(patched.model).items()
    }


def of_ranks(patched: Patched, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return what each rank of a patched model has."""
    return list(gathered(tensor.unsqueeze(0), 0, patched.group))


def drifting(patched: Patched, tensors: dict[str, torch.Tensor]) -> list[str]:
    """Return which of the gradients, or weights, that the ranks hold alike differ in any bit between them."""
    names = [name for name in patched.replicated if name in tensors]
    return [n for n in names if not all(torch.equal(tensors[n], o) for o in of_ranks(patched, tensors[n]))]


def relative_errors(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], least: float = 1e-6
) -> dict[str, float]:
    """Return the largest difference of each, relative to the largest expected element, or to ``least``."""
    return {
        name: ((found[name] - one).abs().max() / one.abs().max().clamp(min=least)).item()
        for name, one in expected.items()
    }


def compare(case: Case, group: dist.ProcessGroup, wrap: Callable[[Any], Any] = lambda model: model) -> Result:
    """Run one step in one process and on the group."""
    return compared(case, group, wrap)[0]


def compared(
    case: Case, group: dist.ProcessGroup, wrap: Callable[[Any], Any] = lambda model: model
) -> tuple[Result, Any, Patched]:
    """As `compare`; return the model of one process, and the patched one, too."""
    alone, model = (wrap(tiny_model(case.kind, **case.settings)) for _ in range(2))
    expected_losses = step(alone, case)
    patched = patch_model(model, config(group, case.sequence_parallel), group)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    document = {"tile_config": {"tile": [{"op_name": name, "tokens": 5} for name in case.tiles]}}
    with tensor_parallel_group(group), apply(model, document) as applied:
        losses = step(model, case)
    assert bool(applied.plan.tiles) == bool(case.tiles)
    if case.reduced:
        allreduce_sequence_parallel_gradients(model, group)
    found = full_gradients(patched)
    expected = gradients(alone)
    least = max(_SMALL * max(grad.abs().max().item() for grad in expected.values()), 1e-6)
    errors = relative_errors(found, {n: grad for n, grad in expected.items() if n in found}, least)
    norms = (0.0, get_total_norm(list(expected.values())).item())
    if case.reduced:
        norms = (get_grad_norm(model.parameters(), process_group=group).item(), norms[1])
    missing = expected.keys() ^ found.keys()
    result = Result(losses, expected_losses, errors, norms, drifting(patched, found), missing)
    return result, alone, patched


KINDS = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"),
    *("gpt_neox", "phi3", "mixtral", "qwen3_moe", "granite"),
)
ONE_KV_HEAD, TIED = {"num_key_value_heads": 1}, {"tie_word_embeddings": True}

VARIANTS: dict[str, Case] = {
    "accumulated": Case("qwen3", accumulation=3),
    "odd_length": Case("llama", length=17),
    "odd_length_unmasked": Case("llama", length=17, masked=False),
    "odd_length_experts": Case("mixtral", length=17),
    "odd_length_experts_unmasked": Case("mixtral", length=17, masked=False),
    "odd_length_packed": Case(
        "qwen2",
        length=15,
        masked=False,
        call={"position_ids": torch.arange(15).remainder(6)[None], "use_cache": False},
    ),
    "odd_vocabulary": Case("llama", settings={"vocab_size": 129}),
    "odd_vocabulary_tied": Case("gemma2", settings={"vocab_size": 129, **TIED}, accumulation=2),
    "tied": Case("qwen2", settings=TIED),
    "one_kv_head": Case("qwen2", settings=ONE_KV_HEAD),
    "one_kv_head_normed": Case("gemma3_text", settings=ONE_KV_HEAD),
    "one_kv_head_fused": Case("phi3", settings=ONE_KV_HEAD),
    "one_kv_head_replicated": Case("qwen3", settings=ONE_KV_HEAD, sequence_parallel=False),
    "sequential_residual": Case("gpt_neox", settings={"use_parallel_residual": False}),
    "eager_experts": Case("mixtral", settings={"experts_implementation": "eager"}),
    "batched_experts": Case("qwen3_moe", settings={"experts_implementation": "batched_mm"}),
    "checkpointed": Case("llama", checkpointing=True, evaluates=True, length=17),
    "checkpointed_experts": Case("qwen3_moe", checkpointing=True, evaluates=True),
    "checkpointed_replicated": Case("gpt_neox", checkpointing=True, sequence_parallel=False),
    "hidden_states_asked_for": Case("llama", call={"output_hidden_states": True}),
}
_NORMS = ("input_layernorm", "post_attention_layernorm")
VARIANTS |= {
    f"tiles_{kind}{suffix}": Case(kind, sp, tiles=("mlp", *_NORMS, *more), **settings)
    for kind, suffix, sp, more, settings in (
        ("llama", "", True, (), {}),
        ("llama", "_replicated", False, (), {}),
        ("llama", "_checkpointed", True, (), {"checkpointing": True, "accumulation": 2}),
        ("llama", "_odd_length", True, (), {"length": 17}),
        ("gemma2", "", True, ("pre_feedforward_layernorm", "post_feedforward_layernorm"), {}),
        ("gpt_neox", "", True, (), {}),
        ("mixtral", "", True, (), {}),
        ("mixtral", "_replicated", False, (), {}),
    )
}
CONTROLS: dict[str, Case] = {
    "not_reduced": Case("qwen3", reduced=False),
    "not_reduced_replicated": Case("qwen3", reduced=False, sequence_parallel=False),
}
CASES: dict[str, Case] = {
    **{kind: Case(kind) for kind in KINDS},
    **{f"{kind}_replicated": Case(kind, sequence_parallel=False) for kind in KINDS},
    **VARIANTS,
    **CONTROLS,
}
QUICK = ("llama", *VARIANTS, *CONTROLS)
"""What the families of `family_worker` do not try."""


def run_quick(rank: int, folder: str) -> None:
    """Run a representative part of the cases on two ranks."""
    _run(rank, folder, 2, QUICK)


def run_all_on_two(rank: int, folder: str) -> None:
    """Run each case on two ranks."""
    _run(rank, folder, 2, CASES)


def run_all_on_four(rank: int, folder: str) -> None:
    """Run each case on four ranks."""
    _run(rank, folder, 4, CASES)


def _run(rank: int, folder: str, world_size: int, names: Iterable[str]) -> None:
    cases = {name: partial(compare, CASES[name]) for name in names}
    run_cases(rank, folder, world_size, cases, {name: [list(range(world_size))] for name in cases})
