"""``tile_config.tile``: modules run over tiles of the tokens, and save their input alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_actswap import MemoryPlan, PlanError, apply, load_config, model_structure, resolve_plan
from hf_actswap.engine.tiled_calls import auto_tokens, tile_module
from hf_actswap.plan import PlanRow, Tile
from hf_actswap.plan.tiles import checked_tiles, tile_ladder
from hf_actswap.report import plan_table
from tests.engine.test_tiled_loss import furthest
from tests.engine.tiny_models import batch, forward, gradients, plan_of, swap_rows, tiny, tiny_llama
from tests.parallel.patched_models import tiny_model

HIDDEN, LAYERS, ROWS = 32, 4, 32
EVERY_TOKEN = {"op_name": ["feed_forward", "attention_norm", "ffn_norm", "final_norm"], "tokens": 10}
"""5 tokens of each of two sequences of 16: the last tile is shorter, and of one row each."""
TILES: dict[str, Any] = {"tile_config": {"tile": EVERY_TOKEN}}
ROUNDING = 2e-6


def run(model: Any, step: int = 0, **call: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    ids = batch(step)
    loss = model(input_ids=ids, labels=ids, **call).loss
    loss.backward()
    return loss.detach(), gradients(model)


@contextmanager
def rows_run(model: nn.Module, name: str = "gate_proj") -> Iterator[list[int]]:
    """Count the tokens that modules of this name are called with."""
    seen: list[int] = []

    def count(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[0].numel() // args[0].shape[-1])

    handles = [
        module.register_forward_pre_hook(count)
        for path, module in model.named_modules()
        if path.rpartition(".")[2] == name
    ]
    yield seen
    for handle in handles:
        handle.remove()


AROUND: dict[str, dict[str, Any]] = {
    "nothing": {},
    "full recompute": {"recompute_config": {"recompute": True}},
    "the module recomputed": {"recompute_config": {"select_recompute": ["feed_forward"]}},
    "an op recomputed in it": {"recompute_config": {"select_recompute": ["feed_forward.mul"]}},
    "full recompute but for attention": {
        "recompute_config": {"recompute": True, "select_recompute_exclude": ["attention.flash_attention"]}
    },
    "layers swapped": {
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 4, "layers": True}]},
        "memory": {"min_tensor_mib": 1e-6},
    },
    "the tile's input swapped": {
        "swap_config": {
            "swap": True,
            "op_swap": [{"op_name": "ffn_norm", "backward_prefetch": 4, "layers": True}],
        },
        "memory": {"min_tensor_mib": 1e-6},
    },
    "the user's own checkpointing": {},
    "loss in tiles too": {"tile_config": {"tile": EVERY_TOKEN, "loss": {"tokens": 10}}},
}


@pytest.mark.parametrize("around", AROUND)
def test_two_forwards_not_three_and_gradients_to_rounding(around: str) -> None:
    """The peers' third forward under checkpointing; fates of what is around a tile stay what they were."""
    model = tiny_llama()
    if around == "the user's own checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss, expected = run(model)
    with rows_run(model) as rows, apply(model, {**TILES, **AROUND[around]}) as applied:
        del rows[:]  # the look at the ops
        tiled_loss, found = run(model)
        assert sum(rows) == 2 * LAYERS * ROWS, "once in forward, once in backward"
        assert max(rows) == 10
        swaps = applied.stats().offloads
    assert bool(swaps) == ("swapped" in around)
    torch.testing.assert_close(tiled_loss, loss, rtol=1e-6, atol=0)
    assert furthest(found, expected) < ROUNDING
    assert furthest(run(model)[1], expected) == 0.0, "nothing is left of it"


def test_a_plan_says_it_and_round_trips() -> None:
    model = tiny_llama()
    norm = {"op_name": "final_norm", "tokens": 9}
    written = [{"op_name": "feed_forward", "layers": [0, 1]}, EVERY_TOKEN, norm]
    document = {"tile_config": {"tile": written}}
    plan = resolve_plan(load_config(document), model_structure(model))
    assert [(tile.scope, tile.op_path, str(tile)) for tile in plan.tiles if tile.scope in (1, 2)] == [
        (1, "mlp", "tiles (auto)"),
        (2, "mlp", "tiles of 10 tokens"),
        (1, "input_layernorm", "tiles of 10 tokens"),
        (2, "input_layernorm", "tiles of 10 tokens"),
        (1, "post_attention_layernorm", "tiles of 10 tokens"),
        (2, "post_attention_layernorm", "tiles of 10 tokens"),
    ]
    lost, lost_norm = plan.adjustments
    assert (lost.asked, lost.got, lost.layers) == ("tiles of 10 tokens", "tiles (auto)", (0, 1))
    assert (lost_norm.op_path, lost_norm.asked) == ("final_norm", "tiles of 9 tokens")
    assert lost_norm.reason == "the first entry that names final_norm wins"
    assert MemoryPlan.from_json(plan.to_json()).tiles == plan.tiles
    line = next(line for line in plan_table(plan).splitlines() if "tiles of 10" in line and "mlp" in line)
    assert line.split("│")[1].strip() == "2-3", "equal layers are one line"


def test_fates_inside_give_way_and_what_it_returns_keeps_its_own() -> None:
    document = {
        **TILES,
        "swap_config": {
            "swap": True,
            "layer_swap": [{"backward_prefetch": 4, "layers": [0]}],
            "op_swap": [{"op_name": "feed_forward.mul", "backward_prefetch": 4, "layers": [1]}],
        },
        "recompute_config": {"select_recompute": {"feed_forward": [2]}},
    }
    plan = resolve_plan(load_config(document), model_structure(tiny_llama()))
    assert {row.op_path for row in plan.rows if row.scope == 0} == {""}, "its input and output are swapped"
    assert not [row for row in plan.rows if row.scope in (1, 2)]
    told = {(item.op_path, item.asked, item.got, item.layers) for item in plan.adjustments}
    assert told == {("mlp.mul", "swap", "tile", (1,)), ("mlp", "recompute", "tile", (2,))}


class Mixer(nn.Module):
    """What a layer's MLP is replaced by."""

    def __init__(self, run: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.run = nn.Parameter(torch.ones(HIDDEN)), run

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.run(hidden * self.weight)


ONE_BY_ONE: dict[str, Callable[[torch.Tensor], Any]] = {
    "flattened and back": lambda x: x.view(-1, HIDDEN).tanh().view(x.shape),
    "sequence first": lambda x: x.transpose(0, 1).softmax(-1).transpose(0, 1),
    "by heads": lambda x: x.view(*x.shape[:2], 4, 8).softmax(-2).flatten(2),
    "the best of each row": lambda x: x * x.topk(2, dim=-1).values.sum(-1, keepdim=True),
    "noise": lambda x: F.dropout(x, 0.5),
    "padded features": (lambda x: F.pad(x, (1, 0))[..., 1:]),
    "in place of its own": lambda x: (x + 1).mul_(2),
}
TABLE = torch.zeros(4096, HIDDEN)
MIXING: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a mean over tokens": (lambda x: x - x.mean(1, keepdim=True), "aten.mean.dim mixes"),
    "a mean over the batch": (lambda x: x - x.mean(0, keepdim=True), "aten.mean.dim mixes"),
    "attention": (lambda x: (x @ x.transpose(1, 2)) @ x, "aten.bmm.default mixes"),
    "a softmax over tokens": (lambda x: x.softmax(1), "aten._softmax.default works along the tokens"),
    "a sum so far": (lambda x: x.cumsum(1), "aten.cumsum.default works along the tokens"),
    "a shift": (lambda x: x.roll(1, 1), "aten.roll.default is not known"),
    "a shift by padding": (lambda x: F.pad(x, (0, 0, 1, -1)), "aten.constant_pad_nd.default shifts"),
    "strides": (lambda x: x.as_strided(x.shape, (HIDDEN, 1, 1)), "aten.as_strided.default is not known"),
    "the other way round": (lambda x: x.flip(1), "aten.flip.default is not known"),
    "positions": (lambda x: x + torch.arange(x.shape[1])[:, None], "aten.arange.default makes something"),
    "without the last token": (lambda x: F.pad(x[:, 1:], (0, 0, 0, 1)), "aten.slice.Tensor mixes"),
    "a norm over tokens": (
        lambda x: F.layer_norm(x.transpose(1, 2), x.shape[1:2]).transpose(1, 2),
        "aten.native_layer_norm.default mixes",
    ),
    "a table of positions": (lambda x: x + TABLE[: x.shape[1]], "aten.slice.Tensor makes something"),
}


def with_mixer(run: Callable[[torch.Tensor], Any]) -> tuple[Any, list[str]]:
    """Return a model, and what keeps its mixer from being tiled."""
    model = tiny_llama(num_hidden_layers=1)
    model.model.layers[0].mlp = Mixer(lambda x: x)
    structure = model_structure(model)
    model.model.layers[0].mlp = Mixer(run)
    try:
        checked_tiles(model, [Tile(0, "mlp", 5)], structure)
    except PlanError as error:
        return model, [item.found for item in error.problems]
    return model, []


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_treats_tokens_one_by_one_is_found_out(name: str) -> None:
    assert with_mixer(ONE_BY_ONE[name])[1] == []


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_rejected_with_the_op_that_mixes(name: str) -> None:
    mixer, op = MIXING[name]
    _, (found,) = with_mixer(mixer)
    assert found.startswith(op)


def test_mistakes_are_named_before_anything_is_changed() -> None:
    model = tiny_llama()
    document = {
        "tile_config": {"tile": [{"op_name": "feed_forward.mul"}, {"op_name": "nothing", "layers": [9]}]}
    }
    with pytest.raises(PlanError) as caught:
        apply(model, document)
    assert [problem.where for problem in caught.value.problems] == [
        "tile_config.tile[0].op_name",
        "tile_config.tile[1].layers",
        "tile_config.tile[1].op_name",
    ]
    with pytest.raises(PlanError, match=r"tile_config.tile self_attn \(layers 0-3\).*one by one"):
        apply(model, {"tile_config": {"tile": {"op_name": "attention"}}})
    assert "forward" not in vars(model.model.layers[0].self_attn)
    plan = MemoryPlan(rows=(), num_layers=LAYERS, tiles=(Tile(0, "mlp.mul", 5), Tile(7, "mlp")))
    with pytest.raises(PlanError) as caught:
        apply(model, plan)
    assert len(caught.value.problems) == 2


def test_one_gradient_for_each_weight_in_each_backward() -> None:
    """What DDP and tagged gradients hang on a weight sees one gradient, as without tiles."""
    model = tiny_llama()
    seen: dict[str, int] = {}
    for name, weight in model.named_parameters():
        weight.register_hook(lambda _gradient, name=name: seen.update({name: seen.get(name, 0) + 1}))
        weight.register_post_accumulate_grad_hook(
            lambda _weight, name=name: seen.update(
                {f"{name} accumulated": seen.get(f"{name} accumulated", 0) + 1}
            )
        )
    with apply(model, TILES):
        run(model)
    assert set(seen.values()) == {1}


def test_a_users_hook_on_a_weight_acts_once() -> None:
    model = tiny_llama()
    handles = [weight.register_hook(lambda gradient: gradient * 3) for weight in model.parameters()]
    _, expected = run(model)
    with apply(model, TILES):
        _, found = run(model)
    assert furthest(found, expected) < ROUNDING
    for handle in handles:
        handle.remove()
    assert furthest(run(model)[1], {name: one / 3 for name, one in expected.items()}) < ROUNDING


def test_gradients_are_not_too_large_under_accumulation() -> None:
    """Gradients were 2 to 2.5 times too large where peers accumulated."""
    model = tiny_llama()
    parts = [run(model, step)[1] for step in range(3)]
    with apply(model, TILES):
        model.zero_grad()
        for step in range(3):
            forward(model, step).backward()
    expected = {name: sum(part[name] for part in parts) for name in parts[0]}
    assert furthest(gradients(model), expected) < ROUNDING


class Dropped(LlamaMLP):
    """An MLP with dropout inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = super().forward(F.dropout(x, 0.3, self.training))
        return F.dropout(inner, 0.3, self.training)


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_draws_the_same_random_numbers_in_the_second_run_of_a_tile(recompute: bool) -> None:
    """The expectation is written out: the tiles one after the other, in a graph of their own each."""
    torch.manual_seed(0)
    mlp, hidden = Dropped(LlamaConfig(hidden_size=HIDDEN, intermediate_size=48)), torch.randn(2, 16, HIDDEN)
    one, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    torch.manual_seed(7)
    expected = torch.cat([mlp(piece.contiguous()) for piece in one.split(5, 1)], 1)
    expected.square().sum().backward()
    gradients_of_weights = gradients(mlp)
    mlp.zero_grad()
    undo = tile_module(mlp, Tile(0, "mlp", 10), pytest.fail)
    torch.manual_seed(7)
    found = torch.utils.checkpoint.checkpoint(mlp, other, use_reentrant=False) if recompute else mlp(other)
    torch.manual_seed(99)
    found.square().sum().backward()
    assert torch.equal(found, expected)
    assert torch.equal(other.grad, one.grad)
    assert furthest(gradients(mlp), gradients_of_weights) < ROUNDING
    undo()


@pytest.mark.parametrize("how", ["bf16 weights", "autocast"])
def test_sums_of_mixed_dtypes_are_as_close_to_the_truth_as_without_tiles(how: str) -> None:
    """A peer's sums of gradients in bf16 lose what many tiles add."""
    model = tiny_llama(hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    ids = torch.randint(0, 64, (2, 256), generator=torch.Generator().manual_seed(3))

    def distances(tiles: dict[str, Any], model: Any) -> dict[str, float]:
        model.zero_grad()
        with apply(model, tiles), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            model(input_ids=ids, labels=ids).loss.backward()
        return {
            name: float((one.double() - truth[name]).norm() / truth[name].norm())
            for name, one in gradients(model).items()
            if "mlp" in name
        }

    model = model.to(torch.bfloat16 if how == "bf16 weights" else torch.float32)
    exact = copy.deepcopy(model).double()
    exact(input_ids=ids, labels=ids).loss.backward()
    truth = gradients(exact)
    whole = distances({}, model)
    tiled = distances({"tile_config": {"tile": {"op_name": "feed_forward", "tokens": 8}}}, model)
    assert all(tiled[name] <= whole[name] * 1.02 for name in whole), (tiled, whole)


def test_autocast_is_that_of_the_call() -> None:
    model = tiny_llama()
    with torch.autocast("cpu", torch.bfloat16):
        loss = forward(model)
        with apply(model, TILES):
            tiled = forward(model)
    assert torch.equal(loss, tiled)
    tiled.backward()  # outside of autocast
    assert all(
        weight.grad is not None and weight.grad.dtype == torch.float32 for weight in model.parameters()
    )


def mixtral(**settings: Any) -> Any:
    return tiny("Mixtral", intermediate_size=24, num_hidden_layers=2, num_local_experts=4, **settings)


def with_adapters() -> Any:
    config = LoraConfig(r=4, target_modules=["gate_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(tiny_llama(), config)


def with_nothing_trained_around_a_tile() -> Any:
    model = tiny_llama().requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    model.model.layers[0].input_layernorm.requires_grad_(True)  # its input has no gradient
    return model


MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any], int | None]] = {
    "adapters": (with_adapters, {"op_name": "mlp", "tokens": 10}, LAYERS * 4),
    "nothing trained around": (with_nothing_trained_around_a_tile, EVERY_TOKEN, 4),
    "experts and their router": (mixtral, {"op_name": "mlp", "tokens": 10}, None),
    "experts": (mixtral, {"op_name": "mlp.experts", "tokens": 10}, None),
}
"""A model, what runs in tiles, and the number of its gradients."""


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_many_kinds(name: str) -> None:
    make, tiles, count = MODELS[name]
    model = make()
    _, expected = run(model)
    assert count in (None, len(expected))
    with apply(model, {"tile_config": {"tile": tiles}}) as applied:
        _, found = run(model)
    assert not applied.plan.adjustments
    assert furthest(found, expected) < ROUNDING


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_all_norms_of_a_layer_are_chosen_and_have_their_gradients(family: str) -> None:
    """Queries and keys are given as [B, T, heads, d] (Qwen3) and [B, heads, T, d] (Gemma)."""
    model = tiny_model(family)
    structure = model_structure(model)
    norms = {name for name, _ in model.model.layers[0].named_modules() if "norm" in name}
    assert {"self_attn.q_norm", "self_attn.k_norm"} < norms
    *_, (tiles, plan) = tile_ladder(load_config({}), model, structure)
    assert norms < {tile.op_path for tile in plan.tiles}
    _, expected = run(model)
    names = [rule.op_name for rule in tiles.tile]
    with apply(model, {"tile_config": {"tile": {"op_name": names, "tokens": 10}}}) as applied:
        _, found = run(model)
    assert not applied.plan.adjustments
    assert furthest(found, expected) < ROUNDING


def test_a_collected_router_runs_whole_and_this_is_said() -> None:
    """Its scores go into a loss of the whole batch: of a tile they have no gradient."""
    model = mixtral(output_router_logits=True)
    _, expected = run(model)
    with apply(model, {"tile_config": {"tile": {"op_name": "mlp", "tokens": 10}}}) as applied:
        assert furthest(run(model)[1], expected) == 0.0
    (said,) = {(item.got, item.reason) for item in applied.plan.adjustments}
    assert said == ("whole", "transformers collects what a module inside it returns (output_router_logits)")
    with apply(model, {"tile_config": {"tile": {"op_name": "mlp.experts", "tokens": 10}}}) as applied:
        assert furthest(run(model)[1], expected) < ROUNDING
    assert not applied.plan.adjustments


def test_evaluation_runs_in_tiles_and_single_tokens_whole() -> None:
    model = tiny_llama().eval()
    with apply(model, TILES), rows_run(model) as rows, torch.no_grad():
        logits = model(input_ids=batch(0)).logits
        assert max(rows) == 10
        rows.clear()
        model.generate(batch(0)[:1, :4], max_new_tokens=3, do_sample=False)
        assert set(rows) == {4, 1}
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=batch(0)).logits, logits)


def test_a_weight_written_between_forward_and_backward_is_noticed() -> None:
    model = tiny_llama()
    with apply(model, TILES):
        loss = forward(model)
        with torch.no_grad():
            model.model.layers[1].mlp.gate_proj.weight.mul_(2)
        with pytest.raises(RuntimeError, match="LlamaMLP, which runs in tiles, was written in place"):
            loss.backward()


def test_a_second_backward() -> None:
    model = tiny_llama()
    _, expected = run(model)
    plan = plan_of(*swap_rows(["post_attention_layernorm"], range(LAYERS)), tiles=(Tile(1, "mlp", 10),))
    model.zero_grad()
    with apply(model, plan):
        loss = forward(model)
        loss.backward(retain_graph=True)
        loss.backward()
    assert furthest(gradients(model), {name: 2 * one for name, one in expected.items()}) < ROUNDING


def test_a_compiled_module_is_compiled_once() -> None:
    model = tiny_llama(num_hidden_layers=1)
    _, expected = run(model)
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters
    counts.clear()
    model.model.layers[0].mlp.compile(backend="aot_eager", fullgraph=True)
    with apply(model, {"tile_config": {"tile": {"op_name": "mlp", "tokens": 8}}}):
        for _ in range(3):
            _, found = run(model)
    assert counts["stats"]["unique_graphs"] == 1
    assert furthest(found, expected) < ROUNDING
    torch._dynamo.reset()


def test_inside_a_compiled_layer_it_is_rejected() -> None:
    model = tiny_llama()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    with pytest.raises(PlanError, match="outside of compiled code"):
        apply(model, TILES)


def test_auto_makes_no_tiny_tiles_of_seq_by_hidden_tokens() -> None:
    """A peer's tiles of ``seq / hidden`` tokens cost 3.2 times the MLP's time."""
    assert [auto_tokens(tokens) for tokens in (100, 8192, 16_384, 131_072)] == [1024, 1024, 1024, 8192]
    model = tiny_llama()
    with apply(model, {"tile_config": {"tile": {"op_name": "mlp"}}}), rows_run(model) as rows:
        run(model)
    assert set(rows) == {ROWS}, "no more tokens than make a tile: whole, and saved as without"


def test_weights_that_zero_3_shards_run_whole_and_this_is_said() -> None:
    """A stand-in for DeepSpeed: between calls its parameters are empty, and know their shapes."""
    model: Any = tiny_llama()
    _, expected = run(model)
    model.zero_grad()
    wholes = {item: item.data for item in model.parameters()}
    for number, (item, whole) in enumerate(wholes.items()):
        item.ds_id, item.ds_shape, item.data = number, whole.shape, torch.empty(0)
    with apply(model, TILES) as applied:
        for item, whole in wholes.items():
            item.data = whole
        assert furthest(run(model)[1], expected) == 0.0
    assert {item.reason for item in applied.plan.adjustments} == {"ZeRO-3 frees weights between the tiles"}


def test_other_tensors_of_a_call_have_rows_too() -> None:
    """A module that is given a gate for each token, flattened."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor, gate: torch.Tensor, *, ids: torch.Tensor) -> Any:
            return self.inner(hidden) * gate.view(*hidden.shape[:-1], 1), gate * ids.view(-1, 1)

    torch.manual_seed(0)
    module, hidden, gate = Gated(), torch.randn(2, 9, 8), torch.randn(18, 1)
    ids = torch.arange(18).view(2, 9)

    def both() -> list[torch.Tensor]:
        leaves = [hidden.clone().requires_grad_(), gate.clone().requires_grad_()]
        one, two = module(*leaves, ids=ids)
        module.zero_grad()
        (one.square().sum() + two.square().sum()).backward()
        return [one, two, *(leaf.grad for leaf in leaves), module.inner.weight.grad]  # type: ignore[misc]

    expected = both()
    undo = tile_module(module, Tile(0, "", 5), pytest.fail)
    for one, other in zip(both(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    undo()


def test_parameters_that_are_exchanged_for_a_call_get_its_gradients() -> None:
    model = tiny_llama()
    _, expected = run(model)
    model.zero_grad()
    leaves = {name: item.detach().requires_grad_() for name, item in model.named_parameters()}
    with apply(model, TILES):
        out = torch.func.functional_call(model, leaves, (), {"input_ids": batch(0), "labels": batch(0)})
        out.loss.backward()  # the model has its own parameters again
    assert all(item.grad is None for item in model.parameters())
    found = {name: item.grad for name, item in leaves.items() if item.grad is not None}
    assert furthest(found, expected) < ROUNDING


def test_rows_of_a_plan_for_other_ops_stay() -> None:
    plan = MemoryPlan(
        rows=(PlanRow(0, "self_attn", "recompute"),), num_layers=LAYERS, tiles=(Tile(0, "mlp", 10),)
    )
    model = tiny_llama()
    _, expected = run(model)
    with apply(model, plan) as applied:
        _, found = run(model)
        assert applied.stats().recomputes
    assert furthest(found, expected) < ROUNDING


def test_the_models_class_is_untouched() -> None:
    model, other = tiny_llama(), tiny_llama()
    with apply(model, TILES):
        assert type(model.model.layers[0].mlp) is LlamaMLP
        clone = copy.deepcopy(model)
        assert isinstance(clone, LlamaForCausalLM)
        with rows_run(clone) as rows:
            run(clone)
        assert set(rows) == {ROWS}, "a copy has none of it"
        with rows_run(other) as rows:
            run(other)
        assert set(rows) == {ROWS}
