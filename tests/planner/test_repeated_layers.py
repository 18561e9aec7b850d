"""Records of a few layers or tiles, repeated for those that are alike, held against records of all."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    WhisperForConditionalGeneration,
)
from transformers.models.llama import modeling_llama

from hf_actswap import PlanError, load_config, model_structure, resolve_plan
from hf_actswap.engine import tiled_calls, tiled_logits
from hf_actswap.engine.host_budget import record_saved
from hf_actswap.plan import ModelStructure, Tile, repeated_layers
from hf_actswap.plan.repeated_layers import Repeat, repeat_of
from hf_actswap.plan.saved_bytes import SavedBytes
from hf_actswap.plan.tiles import checked_tiles, tile_ladder
from hf_actswap.plan.wrappers import without_cache
from hf_actswap.planner import Profile, profile_from_shapes
from hf_actswap.planner.record.shapes import that_pay
from tests.parallel.patched_models import FAMILIES, configuration_of_depth
from tests.planner.recorded_steps import tiled

LAYERS = 14
EVERY_TIME = ("llama", "gemma2", "deepseek_v3", "gpt2")
ALL = [pytest.param(family, marks=() if family in EVERY_TIME else pytest.mark.slow) for family in FAMILIES]
NOT_DEEP = {"gpt_neo": "its layers are listed in a form of its own"}
"""Families of which no model of `LAYERS` layers is made here, and why."""
NOT_TILED = {
    "qwen4_exp_text": "its attention loops over all tokens in Python: minutes",
    "xlm": "no plan can name what its layers compute",
}

Records = tuple[ModelStructure, SavedBytes, Profile]


@contextmanager
def all_layers_run() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated_layers, "_LONGEST", 0)
        yield


def records_of(model: nn.Module, **settings: Any) -> Records:
    structure = model_structure(model)
    saved = record_saved(model, structure, kwargs=meta_batch())
    return structure, saved, profile_from_shapes(model, structure, meta_batch(), "H100", **settings)


def meta_batch() -> dict[str, torch.Tensor]:
    return {name: torch.empty((2, 16), dtype=torch.long, device="meta") for name in ("input_ids", "labels")}


def assert_same(model: nn.Module, around: AbstractContextManager[Any] | None = None, **settings: Any) -> None:
    with around or nullcontext():
        few = records_of(model, **settings)
        with all_layers_run():
            whole = records_of(model, **settings)
    assert_alike(few, whole)


def assert_alike(of_few: Records, of_whole: Records) -> None:
    (structure, saved, few), (whole_structure, whole_saved, whole) = of_few, of_whole
    assert structure == whole_structure
    assert saved == whole_saved
    assert times(few) == pytest.approx(times(whole))
    assert math.isclose(few.outside_ms, whole.outside_ms)
    assert without_times(few) == without_times(whole)


def times(profile: Profile) -> list[float]:
    return [ms for one in profile.op_events for ms in (one.forward_ms, one.backward_ms)]


def without_times(profile: Profile) -> Profile:
    op_events = tuple(replace(one, forward_ms=0.0, backward_ms=0.0) for one in profile.op_events)
    return replace(profile, op_events=op_events, outside_ms=0.0)


def deep_model(family: str, layers: int = LAYERS) -> nn.Module:
    if family in NOT_DEEP:
        pytest.skip(NOT_DEEP[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration_of_depth(family, layers), dtype=torch.bfloat16)
    without_cache(model)
    return model.train()


def deep_llama(layers: int = LAYERS, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=96, num_hidden_layers=layers, use_cache=False, **{**sizes, **settings})
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(dtype).train()


@pytest.mark.parametrize("family", ALL)
def test_records_are_those_of_all_layers(family: str) -> None:
    model = deep_model(family)
    try:
        with all_layers_run():
            whole = records_of(model)
    except Exception as error:  # data-dependent shapes
        pytest.skip(f"it does not run on fake tensors: {str(error)[:80]}")
    assert_alike(records_of(model), whole)


@pytest.mark.parametrize("kind", [T5ForConditionalGeneration, WhisperForConditionalGeneration])
def test_records_are_those_of_all_layers_of_all_stacks(kind: Any) -> None:
    """Of an encoder's layers a few run too, beside a few of the decoder's."""
    sizes = {"vocab_size": 64, "d_model": 32, "use_cache": False, "decoder_start_token_id": 0}
    of_whisper = {"encoder_layers": 16, "decoder_layers": 17, "num_mel_bins": 8, "max_source_positions": 16}
    of_whisper |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    of_t5 = {"num_layers": 16, "num_decoder_layers": 17, "num_heads": 2, "d_kv": 16, "d_ff": 48}
    whisper = kind is WhisperForConditionalGeneration
    with torch.device("meta"):
        config = kind.config_class(**sizes, **(of_whisper if whisper else of_t5), pad_token_id=0)
        model = kind(config).train()
        batch = {"labels": torch.zeros(2, 16, dtype=torch.long)}
        ids = torch.zeros(2, 24, dtype=torch.long)
        batch |= {"input_features": torch.zeros(2, 8, 32)} if whisper else {"input_ids": ids}
    structure = model_structure(model)
    few = profile_from_shapes(model, structure, batch, "H100")
    saved = record_saved(model, structure, kwargs=batch)
    with all_layers_run():
        whole = profile_from_shapes(model, structure, batch, "H100")
        assert saved == record_saved(model, structure, kwargs=batch)
    assert [repeat.stack for repeat in structure.repeats_in(model)] == [structure.stacks[0].path, ""]
    assert times(few) == pytest.approx(times(whole))
    assert without_times(few) == without_times(whole)


@contextmanager
def all_tiles_run() -> Iterator[list[int]]:
    """Run each tile of a dry run; yield a list to which each loop's number of tiles is added."""
    counts: list[int] = []

    def each(tiles: Sequence[slice], *_: Any) -> Iterator[tuple[slice, int]]:
        counts.append(len(tiles))
        return ((tile, 1) for tile in tiles)

    with pytest.MonkeyPatch.context() as patch:
        for module in (tiled_calls, tiled_logits):
            patch.setattr(module, "tiles_to_run", each)
        yield counts


@pytest.mark.parametrize("family", ALL)
def test_records_in_tiles_are_those_of_all_tiles(family: str) -> None:
    """Of equal tiles two run, and the last one if it is shorter: 2 x 16 tokens in tiles of 8, and of 6."""
    if family in NOT_TILED:
        pytest.skip(NOT_TILED[family])
    model = deep_model(family, 2)
    structure = model_structure(model)
    *_, (_, most) = tile_ladder(load_config({}), model, structure)
    for tokens in (8, 6):
        with tiled(model, replace(most, tiles=tuple(replace(tile, tokens=tokens) for tile in most.tiles))):
            try:
                few = profile_from_shapes(model, structure, meta_batch(), "H100")
            except Exception as error:  # data-dependent shapes
                pytest.skip(f"it does not run on fake tensors: {str(error)[:80]}")
            with all_tiles_run() as counts:
                whole = profile_from_shapes(model, structure, meta_batch(), "H100")
        assert max(counts) > 3
        assert times(few) == pytest.approx(times(whole))
        assert without_times(few) == without_times(whole)


def layers_that_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each layer's number is added when the layer runs."""
    ran: list[int] = []
    forward = modeling_llama.LlamaDecoderLayer.forward

    def counted(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ran.append(layer.self_attn.layer_idx)
        return forward(layer, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", counted)
    return ran


FEW, FEWER = [0, 1, 2, 3, 39], [0, 1, 2, 39]
"""Of 40 layers those that run in a profile's two steps."""


def test_a_few_layers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep_llama(40)
    repeat = repeat_of(model.model.layers, model.config)
    assert repeat is not None
    assert (repeat.first, repeat.period, repeat.count, repeat.copies) == (0, 1, 40, 35)
    ran = layers_that_run(monkeypatch)
    records_of(model)
    assert ran == [*FEW, *FEW, *FEW, *FEWER]  # structure, saved tensors, and the profile's two steps


def test_a_few_layers_run_beside_a_loss_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep_llama(40)
    ran = layers_that_run(monkeypatch)
    structure = model_structure(model)
    plan = resolve_plan(load_config({"tile_config": {"loss": {"tokens": 8}}}), structure)
    with tiled(model, plan):
        ran.clear()
        profile = profile_from_shapes(model, structure, meta_batch(), "H100")
    assert ran == [*FEW, *FEWER]
    assert profile.num_layers == 40


def test_tiles_are_checked_in_a_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep_llama(40)
    structure = model_structure(model)
    tiles = [Tile(layer, "mlp", 8) for layer in range(40)]
    ran = layers_that_run(monkeypatch)
    assert checked_tiles(model, tiles, structure) == dict.fromkeys(tiles, 1)
    assert ran == FEW
    mixing = [Tile(layer, "self_attn", 8) for layer in range(10, 40)]
    with pytest.raises(PlanError, match=r"self_attn \(layers 10-39\)") as caught:
        checked_tiles(model, [*tiles, *mixing], structure)
    assert len(caught.value.problems) == 1


def test_tiles_are_checked_in_all_layers_where_those_alike_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's MLP mixes tokens, by its number alone; all layers say so then, each for itself."""
    model = deep_llama(40)
    structure = model_structure(model)
    forward = modeling_llama.LlamaMLP.forward

    def mixes(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = forward(mlp, hidden)
        return out - out.mean(dim=1, keepdim=True) if mlp is model.model.layers[3].mlp else out

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", mixes)
    with pytest.raises(PlanError, match=r"mlp \(layers 3\)"):
        checked_tiles(model, [Tile(layer, "mlp", 8) for layer in range(40)], structure)


def half_frozen() -> nn.Module:
    model = deep_llama()
    for weight in model.model.layers[:7].parameters():
        weight.requires_grad_(False)
    return model


def frozen_below() -> nn.Module:
    model = half_frozen()
    model.model.embed_tokens.requires_grad_(False)
    return model


def with_adapters() -> nn.Module:
    adapters = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        return get_peft_model(deep_llama(), adapters).train()


def with_adapters_on_some_layers() -> nn.Module:
    adapters = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[9, 10], task_type="CAUSAL_LM")
    with torch.device("meta"):
        return get_peft_model(deep_llama(), adapters).train()


def with_one_wider_layer() -> nn.Module:
    model = deep_llama(20)
    mlp = model.model.layers[15].mlp
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = (
        nn.Linear(*sizes, bias=False, device="meta", dtype=torch.bfloat16)
        for sizes in ((32, 96), (32, 96), (96, 32))
    )
    return model


def with_tied_layers() -> nn.Module:
    model = deep_llama()
    model.model.layers[8].mlp.gate_proj.weight = model.model.layers[5].mlp.gate_proj.weight
    return model


def with_one_activation_for_all_layers() -> nn.Module:
    model = deep_llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = model.model.layers[0].mlp.act_fn
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "half frozen": half_frozen,
    "frozen below": frozen_below,
    "adapters": with_adapters,
    "adapters on some layers": with_adapters_on_some_layers,
    "a wider layer": with_one_wider_layer,
    "tied layers": with_tied_layers,
    "one activation for all layers": with_one_activation_for_all_layers,
    "fp32": lambda: deep_llama(dtype=torch.float32),
    "dropout": lambda: deep_llama(attention_dropout=0.1),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mixed", [False, True], ids=["plain", "autocast"])
@pytest.mark.each_value_once
def test_records_of_trainings(name: str, mixed: bool) -> None:
    around = torch.autocast("cpu", torch.bfloat16) if mixed else None
    assert_same(MODELS[name](), around, gradients_exist=mixed, optimizer_state_bytes=10)


def test_a_cache_and_its_tensors_are_for_forward_alone() -> None:
    model = deep_llama()
    model.config.use_cache = True
    assert_same(model)


def test_losses_over_all_layers() -> None:
    """The balancing loss reads what every layer's router made."""
    model = deep_model("mixtral")
    assert model.config.output_router_logits
    assert_same(model)


def test_code_that_counts_layers_is_seen() -> None:
    model = deep_llama(24)
    forward = model.model.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        for _ in model.model.layers:
            output.last_hidden_state = output.last_hidden_state * 2
        return output

    model.model.forward = counting
    assert_same(model)


def test_layers_return_after_an_error() -> None:
    model = deep_llama(24)
    names = [name for name, _ in model.named_modules()]

    def failing(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("no forward")

    structure = model_structure(model)
    model.model.forward = failing
    batch = {"input_ids": torch.empty((2, 16), dtype=torch.long, device="meta")}
    with pytest.raises(RuntimeError, match="no forward"):
        profile_from_shapes(model, structure, batch, "H100")
    assert [name for name, _ in model.named_modules()] == names


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ("ssssfsssssfsssssfsssssfsssssf", None),  # too few periods of six
        ("sf" * 12, (0, 2, 12)),
        ("d" + "s" * 20, (1, 1, 20)),
        ("s" * 10 + "f" + "s" * 3, (0, 1, 10)),
    ],
)
def test_periods(types: str, expected: tuple[int, int, int] | None) -> None:
    layers = [nn.Linear(2, 3 if kind == "f" else 4 if kind == "d" else 2) for kind in types]
    found = repeat_of(layers, None)
    assert (found and (found.first, found.period, found.count)) == expected


def test_lists_in_the_configuration_tell_layers_apart() -> None:
    model = deep_llama(24)
    layers, config = model.model.layers, model.config
    config.strange = [*range(24)]  # an entry for each layer
    assert repeat_of(layers, config) is None
    config.strange = [*range(5)]
    assert repeat_of(layers, config) is not None
    config.strange_layers = [3, 18]  # numbers of layers; with layers left out, layer 18 had another place
    assert repeat_of(layers, config) is None
    config.strange_layers = [0, 1]
    found = repeat_of(layers, config)
    assert found is not None
    assert (found.first, found.count) == (2, 22)


class _Slotted:
    __slots__ = ("count",)

    def hook(self, _module: nn.Module, _args: Any) -> None:
        pass


def test_layers_of_all_kinds_are_described() -> None:
    layers = [nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)) for _ in range(9)]
    for layer in layers:
        layer[0].register_buffer("sparse", torch.eye(2).to_sparse())
        layer[0].register_forward_pre_hook(_Slotted().hook)
        layer.forward = functools.partial(layer.forward)
    found = repeat_of(layers, None)
    assert found is not None
    assert found.count == 9


@pytest.mark.parametrize(("stacks", "layers", "used"), [(1, 6, 1), (2, 24, 2), (6, 10, 0)])
def test_only_repeats_that_spare_layers_are_used(stacks: int, layers: int, used: int) -> None:
    """Each doubles how often the layers of other stacks run: SDXL's UNet has eleven stacks."""
    repeats = tuple(Repeat(0, 1, layers, f"stack_{number}") for number in range(stacks))
    others = [SimpleNamespace(layers=range(layers))] * (stacks - 1)
    structure: Any = SimpleNamespace(layers=range(layers), stacks=others)
    assert len(that_pay(repeats, structure)) == used
