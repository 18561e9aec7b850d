"""What ``plan`` predicts for a base that bitsandbytes quantises, and what a training with bitsandbytes keeps.

Without bitsandbytes the predictions are compared with what was counted with bitsandbytes 0.50.2 and PEFT
0.21, and nothing is trained.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_actswap import apply, model_structure
from hf_actswap.cli.options import Lora, ModelRequest
from hf_actswap.cli.subject import model_on_meta
from hf_actswap.planner import profile_from_shapes
from hf_actswap.planner.budget import with_fragments
from hf_actswap.planner.states.state_bytes import expected_state_bytes, state_bytes

from .conftest import Run

pytest.importorskip("scipy")
peft = pytest.importorskip("peft")

SEQUENCES, TOKENS, WORDS = 2, 128, 512
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
ON_DEVICE = pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])
COUNTED_BYTES = {
    ("prepared", "bf16"): 3_347_456,
    ("prepared", "none"): 3_924_992,
    ("as it is", "bf16"): 2_102_272,
    ("as it is", "none"): 3_466_240,
}
"""What the layers of `base` save in a step: whether PEFT has prepared it, and autocast."""

FOUR_BIT = {"as it is": ("--quantize", "4bit"), "prepared": ("--quantize", "4bit", "--prepare-kbit")}

SWAP = {"swap_config": {"swap": True, "layer_swap": [{"layers": True, "backward_prefetch": 1}]}}
MIXES: dict[str, Any] = {
    "swap": SWAP,
    "recompute": {"recompute_config": {"recompute": True}},
    "operators": {"recompute_config": {"select_recompute": {"feed_forward": True, "self_attn": True}}},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantised")
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        use_cache=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "swap.yaml").write_text(json.dumps(SWAP))
    return folder


def predicted(run: Run, base: Path, *options: str, targets: str = "all-linear") -> Any:
    lora = f"r=8,targets={targets}"
    asked = ("--seq", TOKENS, "--batch", SEQUENCES, "--device", "H100", "--dtype", "bf16", "--lora", lora)
    found = run("plan", base, *map(str, asked), *options, "--json").document
    assert found["ok"], found
    return found


@pytest.mark.parametrize(("prepared", "autocast"), COUNTED_BYTES)
def test_what_a_four_bit_base_saves(run: Run, base: Path, prepared: str, autocast: str) -> None:
    found = predicted(run, base, str(base / "swap.yaml"), "--autocast", autocast, *FOUR_BIT[prepared])
    assert found["predicted"]["as written"]["swapped_bytes"] == COUNTED_BYTES[prepared, autocast]


def test_layers_that_run_again_keep_their_inputs_alone(run: Run, base: Path) -> None:
    """Also where linear layers have no adapter, whose copy of their result could be recomputed."""
    kept = [
        predicted(run, base, *options, targets="q_proj+v_proj")["predicted"]["recompute all"]["kept_bytes"]
        for options in ((), ("--quantize", "4bit"))
    ]
    assert kept[0] == kept[1]


def test_nothing_is_swapped_of_what_eight_bit_layers_hold(run: Run, base: Path) -> None:
    four, nothing = (
        predicted(run, base, "--quantize", bits, targets="q_proj+k_proj+v_proj")["predicted"]["nothing"]
        for bits in ("4bit", "8bit")
    )
    # Inputs of gate and up, and of down. That of the output's projection is saved by attention.
    assert nothing["kept_bytes"] - four["kept_bytes"] == 3 * SEQUENCES * TOKENS * (64 + 192) * 2
    nothing = predicted(run, base, "--quantize", "8bit")["predicted"]["nothing"]
    budget_gib = (with_fragments(nothing["peak_bytes"]) - 2**18) / 2**30
    found = predicted(run, base, "--quantize", "8bit", "--budget", f"{budget_gib}GiB")
    planned = found["predicted"]["planned"]
    assert planned["recomputed_bytes"] > 0
    assert planned["swapped_bytes"] == 0
    assert any("none is swapped" in line for line in found["assumed"])


@pytest.mark.parametrize("prepared", ["prepared", "as it is"])
def test_a_saved_plan_says_the_type_of_what_is_not_quantised(run: Run, base: Path, prepared: str) -> None:
    saved = saved_plan(run, base, prepared)
    assert json.loads(saved.read_text())["fingerprint"]["dtype"] == (
        "float32" if prepared == "prepared" else "bfloat16"
    )


def saved_plan(run: Run, base: Path, prepared: str) -> Path:
    """Save a plan that swaps and recomputes, for a quantised base under autocast."""
    path = base / f"{prepared}.json"
    options = FOUR_BIT[prepared]
    nothing = predicted(run, base, *options)["predicted"]["nothing"]
    budget_gib = with_fragments(round(nothing["peak_bytes"] - 0.7 * nothing["kept_bytes"])) / 2**30
    found = predicted(run, base, *options, "--budget", f"{budget_gib}GiB", "--save", str(path))
    assert found["predicted"]["planned"]["recomputed_bytes"] > 0
    return path


def test_a_saved_plan_names_layers_in_place_of_what_a_release_calls_their_op(run: Run, base: Path) -> None:
    """Without adapters of their own, the outputs of gate and up are saved by what follows."""
    options, path = ["--quantize", "4bit"], base / "names.json"
    nothing = predicted(run, base, *options, targets="q_proj+v_proj")["predicted"]["nothing"]
    budget_gib = with_fragments(nothing["peak_bytes"] - 150_000) / 2**30
    options += ["--budget", f"{budget_gib}GiB", "--save", str(path)]
    assert predicted(run, base, *options, targets="q_proj+v_proj")["ok"]
    paths = {row["op_path"] for row in json.loads(path.read_text())["rows"]}
    assert "mlp.gate_proj" in paths
    assert not any(path.endswith("_proj.linear") for path in paths)


@pytest.fixture
def seen_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PEFT see the CPU's autocast: it asks for that of the default device, CUDA."""
    asked = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": asked(kind))


def quantised(base: Path, prepared: str, device: str = "cpu") -> Any:
    """Return the model with adapters on a base that bitsandbytes has quantised."""
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=settings, dtype=torch.bfloat16, device_map={"": device}
    )
    if prepared == "prepared":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(0)
    adapters = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters).train()


def _steps(base: Path, prepared: str, autocast: str, mix: Any) -> Iterator[Any]:
    """Yield losses, then the last gradients, then what was swapped in a step."""
    model = quantised(base, prepared)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer, steps = torch.optim.AdamW(weights, lr=1e-2), 2
    applied = None if mix is None else apply(model, mix, optimizer=optimizer)
    for number in range(steps):
        ids = torch.randint(0, WORDS, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(number))
        with torch.autocast("cpu", torch.bfloat16) if autocast == "bf16" else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()
    yield [weight.grad for weight in weights]
    if applied is not None:
        yield applied.stats().offloaded_bytes // steps
        applied.remove()


@pytest.mark.usefixtures("seen_autocast")
@pytest.mark.parametrize(("prepared", "autocast"), COUNTED_BYTES)
def test_bitsandbytes_trains_under_a_plan(run: Run, base: Path, prepared: str, autocast: str) -> None:
    pytest.importorskip("bitsandbytes")
    mixes, swaps = dict(MIXES), {"swap": COUNTED_BYTES[prepared, autocast]}
    if autocast == "bf16":
        mixes["saved"] = saved_plan(run, base, prepared)
        swaps["saved"] = json.loads(mixes["saved"].read_text())["predicted"]["swapped_bytes"]
    *losses, gradients = _steps(base, prepared, autocast, None)
    for name, mix in mixes.items():
        *found, made, swapped_bytes = _steps(base, prepared, autocast, mix)
        assert found == losses
        assert all(torch.equal(*pair) for pair in zip(made, gradients, strict=True))
        assert swapped_bytes == swaps.get(name, 0)


@pytest.mark.usefixtures("seen_autocast")
@pytest.mark.parametrize("prepared", ["prepared", "as it is"])
@pytest.mark.parametrize("device", ["cpu", ON_DEVICE])
def test_auto_sees_the_same_step(base: Path, prepared: str, device: str) -> None:
    """``auto`` computes the step of the quantised model from shapes, ``plan`` that of a model made for it."""
    pytest.importorskip("bitsandbytes")
    asked = ModelRequest(str(base), "bf16", Lora(8, ("all-linear",)), "4bit", prepared=prepared == "prepared")
    ids = torch.zeros(SEQUENCES, TOKENS, dtype=torch.long)
    found = []
    for model in (quantised(base, prepared, device), model_on_meta(asked)):
        with torch.autocast("cpu", torch.bfloat16):
            batch = {"input_ids": ids, "labels": ids}
            profile = profile_from_shapes(model, model_structure(model), batch, "H100")
        names = [event.call[1].replace("gemm_4bit", "linear") for event in profile.op_events]
        nodes = [event.first_op for event in profile.op_events]  # of autograd: what windows count
        found.append((names, nodes, [event.forward_ms for event in profile.op_events]))
    assert found[0] == found[1]


def test_weights_take_the_bytes_of_bitsandbytes(run: Run, base: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = quantised(base, "as it is")
    states = (getattr(weight, "quant_state", None) for weight in model.parameters())
    constants = sum(state.absmax.nbytes for state in states if state is not None)
    stored = constants + sum(item.nbytes for item in (*model.parameters(), *model.buffers()))
    found = predicted(run, base, "--quantize", "4bit-single")
    assert found["memory"]["nothing"]["weights_bytes"] == stored


@pytest.mark.parametrize(("name", "asked"), [("AdamW8bit", "adamw_8bit"), ("AdamW", "adamw_32bit")])
def test_states_take_the_bytes_of_bitsandbytes(name: str, asked: str) -> None:
    optimizers = pytest.importorskip("bitsandbytes").optim
    model = nn.Sequential(nn.Linear(512, 300), nn.Linear(64, 64), nn.Linear(63, 65, bias=False))
    optimizer = getattr(optimizers, name)(model.parameters())
    expected = expected_state_bytes(optimizer)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    tables = ("qmap1", "qmap2")  # one for all tensors
    states = [item for state in optimizer.state.values() for item in state.items() if item[0] not in tables]
    sizes = [value.nbytes for _, value in states if isinstance(value, torch.Tensor)]
    assert sum(state_bytes(f"paged_{asked}", model)) == sum(sizes)
    assert expected == sum(sizes)
