"""What else one does with a patched model: generate, evaluate, save, adapt, drop, plan; and what it saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parallel.patch_ways_worker import (
    FURTHER_PLANNED,
    LENGTH,
    MAX_NORM,
    SLOW,
    STEPS,
    WORLD_SIZE,
    run_on_rank,
)
from tests.parallel.patch_worker import BATCH
from tests.parallel.patched_models import HIDDEN, INNER, LAYERS
from tests.parallel.test_patch_model import assert_as_in_one_process
from tests.processes import launched, of_ranks
from tests.quick_cases import slow_among

LIMIT_S = 200
TOLERANCE = 1e-5
SIZE_BYTES = 4

pytestmark = pytest.mark.dist


results = launched(run_on_rank, WORLD_SIZE, LIMIT_S, told_of_slow=True)


@pytest.mark.parametrize(
    "kind",
    slow_among(
        ["llama", "gemma3_text", "qwen3_moe", "phi3", "gpt2", "bloom"],
        SLOW,
        "generation_",
    ),
)
def test_generation(kind: str, results: Path) -> None:
    for found in of_ranks(results, f"generation_{kind}"):
        assert torch.equal(found["tokens"], found["expected"])


def test_what_comes_out(results: Path) -> None:
    """Logits, hidden states, attentions, of whole shape and without padding, with gradients and without."""
    for found in of_ranks(results, "outputs"):
        assert {name.split(":")[0] for name in found} == {"trains", "evaluates"}
        for name, (actual, expected) in found.items():
            torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def test_losses_of_ones_own(results: Path) -> None:
    for errors in of_ranks(results, "own_losses"):
        assert {name: error for name, error in errors.items() if error > TOLERANCE} == {}
        assert len(errors) == 7


def test_logits_of_a_training_forward_are_gathered_when_read(results: Path) -> None:
    for found in of_ranks(results, "lazy"):
        assert found["kind"]
        assert found["shape"] == (2, 16, 96)
        assert found["read"] == (2, 15)
        gathers = {name: number for name, number in found["calls"].items() if name.endswith("all_gather")}
        assert gathers == {"forward all_gather": 2 * LAYERS + 1, "read all_gather": 1}
        assert "gathered when read" in found["text"]


@pytest.mark.parametrize("kind", slow_among(["qwen2", "phi3", "mixtral"], SLOW, "state_"))
def test_state(kind: str, results: Path) -> None:
    """Names, shapes and values of one process; loaded by from_pretrained and into other patched models."""
    for rank, found in enumerate(of_ranks(results, f"state_{kind}")):
        assert found["names"] == found["saved_names"] == set()
        assert found["tied"]
        assert found["differing"] == []
        assert (found["of_one"] > 0) == (rank == 1)
        expected, loaded, *divided = found["logits"]
        assert torch.equal(loaded, expected)
        for logits in divided:
            torch.testing.assert_close(logits, expected, rtol=TOLERANCE, atol=TOLERANCE)
        assert found["sharded"]["lm_head.weight"] == 0
        assert "replicated: model.layers.*" in found["description"]


@pytest.mark.parametrize("kind", slow_among(["qwen3", "phi3", "mixtral"], SLOW, "training_"))
def test_training(kind: str, results: Path) -> None:
    """Steps with clipping: the losses and weights of one process; replicas stay bitwise the same."""
    assert MAX_NORM < 1
    for found in of_ranks(results, f"training_{kind}"):
        expected, losses = found["losses"]
        assert len(losses) == 2 * STEPS
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert losses[-1] < losses[0]
        assert max(found["errors"].values()) < TOLERANCE
        assert found["drift"] == []


@pytest.mark.parametrize(
    "name",
    slow_among(["llama", "llama_replicated", "gpt_neox", "qwen2"], SLOW, "adapters_"),
)
def test_adapters(name: str, results: Path) -> None:
    for found in of_ranks(results, f"adapters_{name}"):
        assert_as_in_one_process(found)
        assert all("lora_" in name for name in found.errors)


def test_saved_tensors(results: Path) -> None:
    """A layer saves parts of the sequence, and of the features, and nothing of full sequence and width."""
    tokens, heads = BATCH * LENGTH, 2
    part = tokens * HIDDEN // WORLD_SIZE
    inner = tokens * INNER // WORLD_SIZE
    norms = 2 * (3 * part + tokens // WORLD_SIZE)  # input, normalised, output; a number per token
    attention = 4 * part + tokens * heads + 2 * LENGTH * HIDDEN // 4  # q, k, v, output; statistics; rotary
    for found in of_ranks(results, "audit"):
        assert found["bytes"] == SIZE_BYTES * (norms + attention + 4 * inner)
        assert max(torch.Size(shape).numel() for shape in found["shapes"]) < tokens * HIDDEN


def test_saved_tensors_of_adapters(results: Path) -> None:
    """Frozen weights save no input; the adapters share one part of the sequence."""
    bare, adapted = (of_ranks(results, name)[0] for name in ("audit", "audit_adapters"))
    tokens = BATCH * LENGTH
    assert max(torch.Size(shape).numel() for shape in adapted["shapes"]) < tokens * HIDDEN
    ranks_of_adapters = sum(shape == (tokens, 4) for shape in adapted["shapes"])
    frozen_norms = 2 * tokens * HIDDEN // WORLD_SIZE  # what their weights' gradients would need
    more = ranks_of_adapters * tokens * 4 - frozen_norms
    assert ranks_of_adapters == 7
    assert adapted["bytes"] - bare["bytes"] == SIZE_BYTES * more


def test_collectives_of_a_layer(results: Path) -> None:
    for found in of_ranks(results, "collectives"):
        again = 2
        assert found == {
            "forward all_gather": 2,
            "forward reduce_scatter": 2,
            "backward all_gather": 2 + again,
            "backward reduce_scatter": 2,
        }
    for found in of_ranks(results, "collectives_replicated"):
        assert found == {"forward all_reduce": 2, "backward all_reduce": 2}


def test_collectives_of_a_layer_with_experts(results: Path) -> None:
    """Routing is one gather more, and its gradient one reduction."""
    for found in of_ranks(results, "collectives_experts"):
        again, routing = 2, 1
        assert found == {
            "forward all_gather": 2 + routing,
            "forward reduce_scatter": 2,
            "backward all_gather": 2 + again,
            "backward reduce_scatter": 2 + routing,
        }
    for found in of_ranks(results, "collectives_experts_replicated"):
        assert found == {"forward all_reduce": 2, "backward all_reduce": 3}


@pytest.mark.parametrize(
    ("name", "block_ends"),
    [
        ("plan", ("self_attn.o_proj", "mlp.down_proj")),
        pytest.param("plan_full", ("self_attn.o_proj", "mlp.down_proj"), marks=pytest.mark.slow),
        ("plan_neox", ("attention.dense", "mlp.dense_4h_to_h")),
    ],
)
def test_plans(name: str, block_ends: tuple[str, str], results: Path) -> None:
    """Swap, recomputation and communicating again on a patched model: gradients bitwise those without."""
    for found in of_ranks(results, name):
        assert found["differing"] == []
        assert found["missing"] == set()
        assert found["rows"] > 0
        assert found["communications"] == (
            "input_layernorm.all_gather",
            f"{block_ends[0]}.reduce_scatter",
            "post_attention_layernorm.all_gather",
            f"{block_ends[1]}.reduce_scatter",
        )


@pytest.mark.parametrize("family", slow_among(FURTHER_PLANNED, SLOW, "plan_"))
def test_plans_of_further_families(family: str, results: Path) -> None:
    """Gradients bitwise those without."""
    for found in of_ranks(results, f"plan_{family}"):
        assert (found["differing"], found["missing"]) == ([], set())
        assert found["rows"] > 0


@pytest.mark.parametrize("name", slow_among(["plan_experts", "plan_experts_full", "plan_experts_ops"], SLOW))
def test_plans_of_experts(name: str, results: Path) -> None:
    """Gradients bitwise those without; a model structure sees how experts communicate."""
    for found in of_ranks(results, name):
        assert found["differing"] == []
        assert found["missing"] == set()
        assert found["rows"] > 0
        assert found["communications"] == (
            "input_layernorm.all_gather",
            "self_attn.o_proj.reduce_scatter",
            "mlp.experts.all_gather",
            "mlp.experts.reduce_scatter",
        )


@pytest.mark.parametrize("name", slow_among(["images", "images_replicated"], SLOW))
def test_images(name: str, results: Path) -> None:
    """The decoder of a model that sees is divided, its deeper tower is not; gradients of both are right."""
    for found in of_ranks(results, name):
        assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5)
        assert max(found["errors"].values()) < 1e-4
        assert {path.partition(".layers.")[0] for path in found["errors"]} > {
            "model.vision_tower.encoder",
            "model.language_model",
        }
        assert found["drift"] == []
        assert any(".layers." in path for path in found["divided"])
        assert not any("vision" in path for path in found["divided"])


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_dropout(sequence_parallel: bool, results: Path) -> None:
    """Masks differ on parts, agree on replicas, and are the same in recomputation."""
    one, other = of_ranks(results, "dropout" if sequence_parallel else "dropout_replicated")
    assert one["differing"] == other["differing"] == []
    assert one["drift"] == []
    assert torch.equal(one["masks"]["embedding"], other["masks"]["embedding"])
    assert torch.equal(one["masks"]["hidden"], other["masks"]["hidden"]) is not sequence_parallel
    assert torch.equal(one["state"], other["state"])


def test_autocast(results: Path) -> None:
    """Under bfloat16 autocast gradients agree to a few of its roundings."""
    for errors, difference in of_ranks(results, "autocast"):
        assert max(errors.values()) < 2e-2
        assert abs(difference) < 1e-3


def test_deep_copy(results: Path) -> None:
    for found in of_ranks(results, "copy"):
        assert found["untouched"]
        assert found["differing"] == []
        assert found["tagged"] > 0


REJECTIONS = {
    "heads": "a divisor of 3, the number of attention heads",
    "group": "expected 4 ranks",
    "unknown": "whose projections are known",
    "sparse": "Load the model with attention_type='original_full'",
    "inside": "Llama4ForConditionalGeneration around a Llama4ForCausalLM. Pass its language_model",
    "behind the sum": "in it is added to what the ranks sum",
    "twice": "divided already",
    "adapters after": "ColumnParallelLinear",
    "resize after": "Resize the whole model, then patch it",
    "fused loss": "fused loss",
    "cache": "use_cache=False",
    "jitter": "router_jitter_noise",
    "head": "take it out of target_modules",
    "weights": "weights: expected the same on all ranks",
}


@pytest.mark.parametrize("name", REJECTIONS)
def test_rejections(name: str, results: Path) -> None:
    for found in of_ranks(results, "rejections"):
        assert REJECTIONS[name] in found[name]


def test_a_rejection_leaves_the_model_as_it_was(results: Path) -> None:
    for found in of_ranks(results, "rejections"):
        assert found["untouched"] == "True"
        assert found["after"] == "torch.Size([2, 17, 96])"
