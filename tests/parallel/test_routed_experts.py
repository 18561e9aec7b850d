"""Models with routed experts on 2 and 4 ranks: what a rank saves, and gradients of special cases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_actswap.parallel.gradients import allreduce_sequence_parallel_gradients
from hf_actswap.parallel.patch_model import patch_model
from hf_actswap.parallel.routed_experts import ExpertsLayout
from tests.parallel.patch_worker import BATCH, Case, compare, config, full_gradients
from tests.parallel.patched_models import HIDDEN, INNER, tiny_model
from tests.parallel.test_patch_model import GRADIENT_TOLERANCE, assert_as_in_one_process
from tests.parallel.test_patch_ways import LENGTH, ids_of, saved_of_layer
from tests.processes import launch, result, run_cases

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
KINDS = ("mixtral", "qwen3_moe")
MANY_EXPERTS = {"num_local_experts": 16}
"""More than some batches have rows: there are experts without any."""

Group = dist.ProcessGroup


def run_audit(kind: str, implementation: str, frozen: str, group: Group) -> dict[str, Any]:
    """Shapes, and bytes by dtype, that the second layer saves; parameters named ``frozen`` do not train."""
    whole_attention = {"num_key_value_heads": 4, "sliding_window": None}
    model = tiny_model(kind, **whole_attention, experts_implementation=implementation)
    freeze(frozen, model)
    patch_model(model, config(group, True), group)
    saved = saved_of_layer(model, model.model.layers[1], ids_of())
    return {
        "shapes": sorted(tuple(t.shape) for t in saved),
        "bytes": sum(t.untyped_storage().nbytes() for t in saved),
    }


def freeze(name: str, model: Any) -> Any:
    """Switch the gradients of the parameters off in whose names ``name`` is, unless it is empty."""
    for found, parameter in model.named_parameters():
        if name and name in found:
            parameter.requires_grad_(False)
    return model


def run_router_logits(length: int, group: Group) -> dict[str, tuple[torch.Tensor, ...]]:
    """What comes out as router logits of a forward with gradients, and of one process."""
    ids = ids_of(length)
    alone, model = tiny_model("mixtral"), tiny_model("mixtral")
    patch_model(model, config(group, True), group)
    return {
        "found": tuple(logits.detach() for logits in model(input_ids=ids).router_logits),
        "expected": tuple(logits.detach() for logits in alone(input_ids=ids).router_logits),
    }


def run_autocast(implementation: str, group: Group) -> dict[str, float]:
    """Relative errors of gradients under autocast against one process under autocast."""
    found: list[dict[str, torch.Tensor]] = []
    for divided in (False, True):
        model = tiny_model("mixtral", experts_implementation=implementation)
        patched = patch_model(model, config(group, True), group) if divided else None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids_of(), labels=ids_of()).loss
        loss.backward()
        if patched is not None:
            allreduce_sequence_parallel_gradients(model, group)
            found.append(full_gradients(patched))
        else:
            found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    expected, own = found
    return {name: ((own[name] - grad).norm() / grad.norm()).item() for name, grad in expected.items()}


def cases() -> dict[str, Callable[[Group], object]]:
    """Return what is run, by name."""
    every: dict[str, Callable[[Group], object]] = {
        **{f"audit_{k}_{i}": partial(run_audit, k, i, "") for k in KINDS for i in IMPLEMENTATIONS},
        **{f"autocast_{i}": partial(run_autocast, i) for i in IMPLEMENTATIONS},
        **{f"logits_{length}": partial(run_router_logits, length) for length in (16, 17)},
        "audit_frozen": partial(run_audit, "mixtral", "grouped_mm", ".experts."),
        "not_reduced": partial(compare, Case("mixtral", reduced=False)),
        "few_rows": partial(compare, Case("mixtral", length=4, masked=False, settings=MANY_EXPERTS)),
    }
    for kind in KINDS:
        for name in ("experts.", "gate.weight", "gate_up_proj", "down_proj"):
            case = Case(kind, length=17, accumulation=2)
            every[f"frozen_{kind}_{name}"] = partial(compare, case, wrap=partial(freeze, name))
    return every


def run_on_two(rank: int, folder: str) -> None:
    """Run each case on two ranks."""
    _run(rank, folder, 2)


def run_on_four(rank: int, folder: str) -> None:
    """Run each case on four ranks."""
    _run(rank, folder, 4)


def _run(rank: int, folder: str, world_size: int) -> None:
    every = cases()
    run_cases(rank, folder, world_size, every, {name: [list(range(world_size))] for name in every})


LIMIT_S = 200
EXPERTS, EXPERTS_OF_A_TOKEN = 4, 2
SIZE_BYTES, INDEX_BYTES, END_BYTES = 4, 8, 4

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Number of ranks, and the folder with what each wrote; all cases of a number run in one launch."""
    size: int = request.param
    worker = run_on_two if size == 2 else run_on_four
    return size, launch(worker, tmp_path_factory.mktemp(f"experts{size}"), size, LIMIT_S)


def saved_bytes(size: int) -> int:
    """Of a layer of Mixtral with as many key as query heads, per rank."""
    tokens, heads = BATCH * LENGTH, 4 // size
    rows, own = tokens * EXPERTS_OF_A_TOKEN, tokens // size
    part = own * HIDDEN
    norms = 2 * (3 * part + own)
    attention = 4 * part + tokens * heads + 2 * LENGTH * HIDDEN // 4
    inner = 4 * rows * INNER // size  # gate and up, the activation, their product
    routing = 2 * tokens * EXPERTS_OF_A_TOKEN  # weights, and what travelled beside them
    router = own * (1 + EXPERTS_OF_A_TOKEN + EXPERTS)  # sum, weights, probabilities
    floats = norms + attention + inner + routing + router
    indices = rows + own * EXPERTS_OF_A_TOKEN
    return SIZE_BYTES * floats + INDEX_BYTES * indices + END_BYTES * EXPERTS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_saved_tensors(kind: str, implementation: str, ranks: tuple[int, Path]) -> None:
    """No rank saves more tokens of full width than are its own, nor rows of them."""
    size, folder = ranks
    for rank in range(size):
        found = result(folder, f"audit_{kind}_{implementation}", rank)
        wide = [torch.Size(shape).numel() for shape in found["shapes"] if shape[-1:] == (HIDDEN,)]
        assert len(wide) == 6
        assert set(wide) == {BATCH * LENGTH * HIDDEN // size}
        if kind == "mixtral":
            assert found["bytes"] == saved_bytes(size)


def test_saved_tensors_of_frozen_experts(ranks: tuple[int, Path]) -> None:
    """No input is saved for them; norm and router save what they did."""
    size, folder = ranks
    found = result(folder, "audit_frozen", 0)
    wide = [torch.Size(shape).numel() for shape in found["shapes"] if shape[-1:] == (HIDDEN,)]
    assert set(wide) == {BATCH * LENGTH * HIDDEN // size}
    assert found["bytes"] == saved_bytes(size)


@pytest.mark.parametrize("name", [name for name in cases() if name.startswith(("frozen", "few_rows"))])
def test_as_in_one_process(name: str, ranks: tuple[int, Path]) -> None:
    size, folder = ranks
    for rank in range(size):
        assert_as_in_one_process(result(folder, name, rank))


def test_without_the_sum_routers_are_wrong(ranks: tuple[int, Path]) -> None:
    """Negative control: a router has seen this rank's tokens."""
    found = result(ranks[1], "not_reduced", 0)
    wrong = {name for name, error in found.errors.items() if error > GRADIENT_TOLERANCE}
    assert wrong == {name for name in found.errors if name.endswith(("norm.weight", ".gate.weight"))}
    assert {name for name in wrong if "gate" in name} <= set(found.drift)


@pytest.mark.parametrize("length", [16, 17])
def test_router_logits_are_those_of_all_tokens(length: int, ranks: tuple[int, Path]) -> None:
    size, folder = ranks
    for rank in range(size):
        found = result(folder, f"logits_{length}", rank)
        assert len(found["found"]) == len(found["expected"]) == 2
        for own, expected in zip(found["found"], found["expected"], strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_autocast(implementation: str, ranks: tuple[int, Path]) -> None:
    """Gradients agree to a few roundings of bfloat16."""
    size, folder = ranks
    for rank in range(size):
        errors = result(folder, f"autocast_{implementation}", rank)
        assert max(errors.values()) < 4e-2, errors


@pytest.mark.parametrize("alternate", [False, True])
def test_whether_gate_and_up_alternate_is_seen_where_transformers_does_not_say_so(alternate: bool) -> None:
    """As GPT-OSS in transformers 5.6; it took them for halves, and all gradients were wrong."""

    def gate(both: torch.Tensor) -> torch.Tensor:
        parts = (both[..., ::2], both[..., 1::2]) if alternate else both.chunk(2, dim=-1)
        return torch.sigmoid(parts[0]) * parts[1]

    experts: Any = tiny_model("gpt_oss").model.layers[0].mlp.experts
    vars(experts).pop("is_concatenated", None)
    vars(experts)["_apply_gate"] = gate
    assert not hasattr(experts, "is_concatenated")
    assert ExpertsLayout.of(experts).interleaved is alternate
