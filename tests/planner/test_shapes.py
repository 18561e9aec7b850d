"""Profiles that are computed from shapes, held against recorded steps and against measured ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_actswap import MemoryPlan, PlanError, load_config, model_structure, resolve_plan
from hf_actswap.config.sizes import DEVICE_KINDS
from hf_actswap.plan.saved_bytes import dropped_bytes
from hf_actswap.planner import (
    Profile,
    device_rates,
    predict,
    profile_from_json,
    profile_from_shapes,
    profile_to_json,
)
from hf_actswap.planner.devices import DEVICES, attention_flops, op_ms, rates_name
from hf_actswap.planner.record.kernels import AcceleratorKernels, kernels_of
from hf_actswap.planner.record.shapes import RooflineClock
from tests.engine.tiny_models import snapshot, tiny_llama, tiny_neox
from tests.planner.recorded_steps import (
    MODELS,
    assert_events_partition,
    call_of,
    measured_peak_bytes,
    recorded,
)

GIB = 2**30


def on_paper(model: nn.Module, device: str = "H200", **settings: Any) -> Profile:
    return profile_from_shapes(model, model_structure(model), call_of(), device, **settings)


def test_a_product_with_quantised_weights_takes_the_time_of_its_arithmetic() -> None:
    """bitsandbytes' ops are not in PyTorch's registry of FLOP formulas."""

    def gemm_4bit() -> None: ...

    def dequantize_4bit() -> None: ...

    rates, inputs = device_rates("H100"), torch.empty(2, 2048, 1024, dtype=torch.bfloat16, device="meta")
    packed = torch.empty(1024 * 4096 // 2, 1, dtype=torch.uint8, device="meta")
    made = torch.empty(2, 2048, 4096, dtype=torch.bfloat16, device="meta")
    takes_ms = op_ms(rates, gemm_4bit, (inputs, packed), {}, made)
    product = torch.ops.aten.mm.default
    weight = torch.empty(1024, 4096, dtype=torch.bfloat16, device="meta")
    assert takes_ms == op_ms(rates, product, (inputs.flatten(0, 1), weight), {}, made.flatten(0, 1))
    assert takes_ms > op_ms(rates, dequantize_4bit, (inputs, packed), {}, made)


@pytest.mark.parametrize(
    ("left", "right", "made"),
    [
        ((8192, 1024), (4, 1024, 4096), (8192, 4096)),
        ((4, 4096, 1024), (1024, 8192), (4096, 8192)),
        ((4096, 8192), (8192, 1024), (4, 4096, 1024)),
        ((4, 2048, 1024), (4, 1024, 4096), (4, 2048, 4096)),
    ],
    ids=["rows", "columns", "inner", "batches"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_groups_take_the_time_of_their_arithmetic(
    left: tuple[int, ...], right: tuple[int, ...], made: tuple[int, ...], dtype: torch.dtype
) -> None:
    """They are not in PyTorch's registry of FLOP formulas; all have as many as one of 8192 rows."""

    def ms(op: Any, *shapes: tuple[int, ...]) -> float:
        *given, result = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
        return op_ms(device_rates("A100-80"), op, tuple(given), {}, result)

    product = ms(torch.ops.aten.mm.default, (8192, 1024), (1024, 4096), (8192, 4096))
    assert ms(torch.ops.aten._grouped_mm.default, left, right, made) == pytest.approx(product)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("asked", [[True, True, False], [False, True, True]])
def test_a_group_of_channels_meets_only_its_own_gradients(transposed: bool, asked: list[bool]) -> None:
    """PyTorch's formula of FLOPs has every channel meet every gradient: here 32 times too many."""
    ops, groups = torch.ops.aten, 32
    settings = [1, 1], [1, 1], [1, 1], transposed, [0, 0], groups
    inputs = torch.empty(8, 1024, 64, 64, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(1024, 1024 // groups, 3, 3, dtype=torch.bfloat16, device="meta")
    rates = replace(device_rates("H100"), bytes_per_ms=1e15, launch_ms=0.0)
    forward, backward = ops.convolution.default, ops.convolution_backward.default
    made = forward(inputs, weight, None, *settings)
    given = torch.empty_like(made), inputs, weight, [1024], *settings, asked
    once_ms = op_ms(rates, forward, (inputs, weight, None, *settings), {}, made)
    assert op_ms(rates, backward, given, {}, backward(*given)) == pytest.approx(sum(asked[:2]) * once_ms)


def test_ops_that_copy_what_they_write_into_move_it_twice_more() -> None:
    tensor = torch.empty(4096, 4096, device="meta")
    mask = torch.empty(4096, 4096, dtype=torch.bool, device="meta")
    rates, ops = device_rates("A100-80"), torch.ops.aten
    in_place = op_ms(rates, ops.masked_fill_.Scalar, (tensor, mask, 0.0), {}, tensor)
    copying = op_ms(rates, ops.masked_fill.Scalar, (tensor, mask, 0.0), {}, tensor)
    assert copying - in_place == pytest.approx(2 * tensor.nbytes / rates.bytes_per_ms)


def saved_by(profile: Profile, path: str) -> set[int]:
    """Bytes of what an op of the first layer makes and backward reads."""
    return {
        storage.size_bytes
        for storage in profile.saved.storages
        if storage.uses[0].producer[:2] == (0, path) and any(use.kind == "saved" for use in storage.uses)
    }


def test_dropout_on_an_accelerator_saves_a_mask_of_bytes() -> None:
    """On the CPU, where this model is in the end, it saves what it multiplies by."""
    model = tiny_neox()
    with torch.device("meta"):
        elsewhere = type(model)(model.config).train()
    numbers = call_of()["input_ids"].numel() * 32
    path = "post_attention_dropout.dropout"
    assert saved_by(on_paper(elsewhere), path) == {numbers}
    assert saved_by(on_paper(model), path) == {4 * numbers}
    for weight in elsewhere.gpt_neox.layers[1].parameters():  # frozen, on the host
        weight.requires_grad_(False)
    elsewhere.gpt_neox.layers[1].to_empty(device="cpu")
    assert saved_by(on_paper(elsewhere), path) == {numbers}


def test_of_forwards_that_share_a_backward_the_last_is_the_profile() -> None:
    """The others hold what autograd saves, and a loss each."""
    model = tiny_llama()
    alone, last = on_paper(model), on_paper(model, forwards_before=2)
    assert [item.call for item in last.op_events] == [item.call for item in alone.op_events]
    assert last.saved == alone.saved
    assert last.compute_ms == pytest.approx(alone.compute_ms)
    kept_bytes = predict(alone, MemoryPlan((), alone.num_layers, alone.family)).kept_bytes
    held = {
        two.forward_base_bytes - one.forward_base_bytes
        for one, two in zip(alone.op_events, last.op_events, strict=True)
    }
    assert len(held) == 1
    assert held.pop() > 2 * kept_bytes


@pytest.mark.parametrize(("dtype", "fused"), [(torch.bfloat16, True), (torch.float32, False)])
def test_rms_norm_on_an_accelerator_is_one_op(dtype: torch.dtype, fused: bool) -> None:
    """But for a weight of another type than its input; it saves a number for each token."""
    with torch.device("meta"):
        model = type(tiny_neox())(tiny_neox().config).train().bfloat16()
        for layer in model.gpt_neox.layers:
            layer.input_layernorm = nn.RMSNorm(32, dtype=dtype)
    profile, tokens = on_paper(model), call_of()["input_ids"].numel()
    path = "input_layernorm.rms_norm"
    assert (saved_by(profile, path) == {4 * tokens, 2 * 32 * tokens}) is fused  # and its result, for the next
    (event,) = (item for item in profile.op_events if item.call[:2] == (1, path))
    assert (event.num_ops == 1) is fused


def test_attention_with_dropout_saves_no_probabilities_on_an_accelerator() -> None:
    model = tiny_neox()
    with torch.device("meta"):
        elsewhere = type(model)(model.config).train()
    saved = saved_by(on_paper(elsewhere), "attention.flash_attention")
    model.config.attention_dropout = 0.0
    for layer in model.gpt_neox.layers:
        layer.attention.attention_dropout = 0.0
    assert saved == saved_by(on_paper(model), "attention.flash_attention")


def test_trls_losses_in_tiles_take_what_their_kernels_take() -> None:
    """On the CPU TRL has several fp32 tiles in the place of each kernel."""
    chunked = pytest.importorskip("trl.kernels.chunked_logprob", reason="TRL 1.16 has it")
    before = dict(vars(chunked))
    tokens, words, width, tile = 32, 64, 8, 16

    def made_in_fp32(model: nn.Module) -> list[torch.Size]:
        hidden, head = (
            torch.randn(rows, width, dtype=torch.bfloat16, requires_grad=True) for rows in (tokens, words)
        )
        found: list[torch.Size] = []

        class Noting(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                found.extend(
                    leaf.shape for leaf in tree_leaves(result) if getattr(leaf, "dtype", 0) == torch.float32
                )
                return result

        with kernels_of(model), Noting():
            targets = torch.zeros(tokens, dtype=torch.long)
            result = chunked.ChunkedLogProbFunction.apply(hidden, head, None, targets, 1.0, tile)
            result[0].sum().backward()
        assert hidden.grad is not None
        assert head.grad is not None
        return found

    assert torch.Size((tokens, tile)) in made_in_fp32(nn.Linear(1, 1))
    assert torch.Size((tokens, tile)) not in made_in_fp32(nn.Linear(1, 1, device="meta"))
    assert vars(chunked) == before


@pytest.mark.parametrize("masked", ["no", "causal", "bool", "bias"])
def test_attention_that_no_kernel_fuses_is_that_of_pytorch(masked: str) -> None:
    query, key, value = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2))
    bias = torch.randn(1, 6, 6, 4).permute(0, 3, 1, 2)
    masks = {"bool": torch.rand(6, 6) > 0.3, "bias": bias}
    given: Any = {"is_causal": masked == "causal", "attn_mask": masks.get(masked), "enable_gqa": True}
    expected = F.scaled_dot_product_attention(query, key, value, **given)
    turned = query.transpose(-1, -2).contiguous().transpose(-1, -2)
    with AcceleratorKernels():
        torch.testing.assert_close(F.scaled_dot_product_attention(turned, key, value, **given), expected)


def test_t5_saves_probabilities_and_a_mask() -> None:
    """Its bias has the heads in its last dimension, for which CUDA fuses nothing: it is fp32."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    with torch.device("meta"):
        config = T5Config(**sizes, dropout_rate=0.1, decoder_start_token_id=0)
        model = T5ForConditionalGeneration(config).train().bfloat16()
    rows, length = call_of()["input_ids"].shape
    numbers = rows * 4 * length * length
    path = "layer.0.SelfAttention.flash_attention"
    assert saved_by(on_paper(model), path) >= {4 * numbers, numbers}
    with torch.autocast("cpu", torch.bfloat16):
        assert saved_by(on_paper(model.float()), path) >= {4 * numbers, numbers}


class _Watched(torch.autograd.Function):
    autocast: ClassVar[list[bool]] = []

    @staticmethod
    def forward(_ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        _Watched.autocast.append(torch.is_autocast_enabled("cpu"))
        return hidden * 1

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        _Watched.autocast.append(torch.is_autocast_enabled("cpu"))
        return gradient


def test_autocast_is_around_forward_alone() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64)).train()
    act = model.transformer.h[0].mlp.act
    forward = act.forward
    act.forward = lambda hidden: _Watched.apply(forward(hidden))
    structure = model_structure(model)
    _Watched.autocast.clear()
    with torch.autocast("cpu", torch.bfloat16):
        profile_from_shapes(model, structure, call_of(), "RTX 4090")
    assert _Watched.autocast == [True, False]


def test_checkpoints_of_the_model_run_the_same_dropout_again() -> None:
    with torch.device("meta"):
        config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)
        model = GPT2LMHeadModel(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    saved = on_paper(model).saved.by_op()
    assert not any("dropout" in path for _, path in saved)


def test_autocast_is_the_accelerators() -> None:
    """CUDA's runs layer norms, powers and softmax in fp32, the CPU's in half precision."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)).train().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        profile = on_paper(model)
    numbers = call_of()["input_ids"].numel() * 4 * 32
    assert saved_by(profile, "mlp.act.pow") == {4 * numbers}
    assert saved_by(profile, "mlp.act.tanh") == {4 * numbers}
    assert saved_by(profile, "mlp.c_fc.addmm") == {2 * numbers // 4}  # the norm's result, cast


@pytest.mark.parametrize("family", MODELS)
def test_bytes_are_those_of_a_measured_step(family: str) -> None:
    model = MODELS[family]()
    measured, _ = recorded(model)
    model.zero_grad()
    forecast = on_paper(model)
    assert_events_partition(forecast)
    assert forecast.saved == measured.saved
    assert measured_peak_bytes(forecast) == measured_peak_bytes(measured)

    def bytes_of(profile: Profile) -> list[Any]:
        return [
            (
                op_event.call,
                op_event.num_ops,
                op_event.forward_base_bytes,
                op_event.backward_base_bytes,
                op_event.backward_place,
            )
            for op_event in profile.op_events
        ]

    assert bytes_of(forecast) == bytes_of(measured)


DROPPING: list[dict[str, Any]] = [
    {"recompute_config": {"recompute": True}},
    {"recompute_config": {"select_recompute": {"feed_forward": True}}},
    {"recompute_config": {"select_recompute": {"mlp.mul": True, "mlp.act_fn": True}}},
    {"recompute_config": {"select_recompute": {r"input_layernorm\..*": True, "attention": True}}},
    {"recompute_config": {"recompute": True, "select_recompute_exclude": {"mlp.gate_proj": True}}},
    {
        "swap_config": {"swap": True, "recompute_input": True, "op_swap": []},
        "recompute_config": {"recompute": True},
    },
    {
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": [1]}]},
        "recompute_config": {"select_recompute": {"feed_forward": [0, 3]}},
    },
]


def test_what_a_plan_drops_is_counted_as_the_simulator_does() -> None:
    model = tiny_llama().train()
    shape = model_structure(model)
    batch = {name: torch.zeros((2, 64), dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    profile = profile_from_shapes(model, shape, batch, "cpu")
    kept_bytes = predict(profile, MemoryPlan((), 4)).kept_bytes
    for document in DROPPING:
        plan = resolve_plan(load_config(document), shape)
        found = predict(profile, plan)
        expected = kept_bytes - found.kept_bytes - found.swapped_bytes
        assert dropped_bytes(profile.saved, plan) == expected > 0, document


def test_nothing_is_touched() -> None:
    model = MODELS["neox"]()
    before, random = snapshot(model), torch.get_rng_state()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    on_paper(model)
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_and_a_batch_on_meta() -> None:
    real = tiny_llama()
    with torch.device("meta"):
        model = type(real)(real.config).train()
    call = {key: item.to("meta") if torch.is_tensor(item) else item for key, item in call_of().items()}
    profile = profile_from_shapes(model, model_structure(model), call, "H200")
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert profile == on_paper(real)


def test_optimizer_states_and_gradients_lie_below_everything() -> None:
    model = tiny_llama()
    plain, full = on_paper(model), on_paper(model, optimizer_state_bytes=1000, gradients_exist=True)
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert full.optimizer_state_bytes == 1000
    assert full.outside_ms > plain.outside_ms == 0
    more = [
        after.forward_base_bytes - before.forward_base_bytes
        for before, after in zip(plain.op_events, full.op_events, strict=True)
    ]
    assert set(more) == {1000 + gradient_bytes}


def test_gradients_are_counted_as_they_are_completed() -> None:
    """None when the head's begins; of the embedding, the last, none when its own begins; then all of them."""
    model = tiny_llama()
    profile = on_paper(model, optimizer_state_bytes=1000)
    named = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    reached = sorted((op_event.backward_place, number) for number, op_event in enumerate(profile.op_events))
    counted = [profile.gradient_bytes[number] for place, number in reached if place >= 0]
    assert counted[0] == 0
    assert counted == sorted(counted)
    assert profile.gradient_bytes[-1] == sum(named.values())
    embedding = next(
        number for number, op_event in enumerate(profile.op_events) if op_event.call[0] == "embedding"
    )
    assert profile.gradient_bytes[embedding] == sum(named.values()) - named["model.embed_tokens.weight"]
    assert profile.weight_bytes == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for op_event, gradients in zip(profile.op_events, profile.gradient_bytes, strict=False):
        assert op_event.forward_base_bytes >= profile.weight_bytes + 1000
        if op_event.backward_place >= 0:
            assert op_event.backward_base_bytes >= profile.weight_bytes + 1000 + gradients
    assert profile_from_json(profile_to_json(profile)) == profile
    before = on_paper(model, gradients_exist=True).gradient_bytes
    assert {size for size in before if size} == {sum(named.values())}


YARDSTICK = [(16, 8192, 388, 23.6), (6, 32768, 837, 37.4)]
"""Layers, tokens, and what one H200 took: ms and GiB of activations; decoder stack, bf16, sdpa, eager."""


@pytest.mark.parametrize(("layers", "tokens", "step_ms", "activations_gib"), YARDSTICK)
def test_the_yardstick(layers: int, tokens: int, step_ms: float, activations_gib: float) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        max_position_embeddings=tokens,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = LlamaModel(config).to(torch.bfloat16).train()
        hidden = torch.empty(1, tokens, 4096, dtype=torch.bfloat16, requires_grad=True)
    call = {"inputs_embeds": hidden, "use_cache": False}
    profile = profile_from_shapes(model, model_structure(model), call, "H200", gradients_exist=True)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert profile.compute_ms == pytest.approx(step_ms, rel=0.05)
    activations = (measured_peak_bytes(profile) - 2 * weight_bytes) / GIB
    assert activations == pytest.approx(activations_gib, rel=0.03)
    backward_ms = sum(op_event.backward_ms for op_event in profile.op_events)
    assert 1.8 < backward_ms / (profile.compute_ms - backward_ms) < 2.6


def test_devices_by_name() -> None:
    assert device_rates(" rtx 4090 ").name == "RTX 4090"
    with pytest.raises(PlanError, match=r"device: expected one of H200, H100, A100-80.*found 'H20'"):
        device_rates("H20")
    with pytest.raises(PlanError, match="Did you mean 'H200'"):
        device_rates("H20")
    assert [rates.name for rates in DEVICES] == list(DEVICE_KINDS)


DRIVERS = [
    # name, capability, multiprocessors, kHz, memory's kHz, bits, MiB: as torch.cuda has them
    ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2520000, 10501000, 384, 24110, "RTX 4090"),
    ("NVIDIA RTX 4090 of another name", (8, 9), 128, 2520000, 10501000, 384, 24110, "RTX 4090"),
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", (9, 0), 60, 1980000, 2619000, 5120, 40320, (316.3, 2.235, 50)),
    ("NVIDIA GeForce RTX 4080", (8, 9), 76, 2505000, 11201000, 256, 16064, (82.9, 0.478, 25)),
    ("NVIDIA GeForce RTX 5090 D V2", (12, 0), 170, 2407000, 14001000, 384, 24080, (178.1, 0.896, 50)),
    ("NVIDIA RTX A5000", (8, 6), 64, 1695000, 8001000, 384, 24240, (77.8, 0.512, 25)),
    ("NVIDIA GH200 480GB", (9, 0), 132, 1980000, 2619000, 6144, 96768, (695.9, 2.68, 50)),
    ("NVIDIA H20", (9, 0), 78, 1980000, 2619000, 6144, 97000, None),
    ("Tesla T4", (7, 5), 40, 1590000, 5001000, 256, 14913, None),
    ("NVIDIA GeForce RTX 4080", (8, 9), 76, 0, 0, 0, 16064, None),
]


@pytest.mark.parametrize(
    ("name", "capability", "count", "khz", "memory_khz", "bits", "mebibytes", "found"), DRIVERS
)
def test_a_device_that_no_table_has_is_described_by_its_driver(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    capability: tuple[int, int],
    count: int,
    khz: int,
    memory_khz: int,
    bits: int,
    mebibytes: int,
    found: str | tuple[float, float, float] | None,
) -> None:
    facts = SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=count,
        clock_rate=khz,
        memory_clock_rate=memory_khz,
        memory_bus_width=bits,
        total_memory=mebibytes * 2**20,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    named = rates_name(torch.device("cuda", 0))
    if not isinstance(found, tuple):
        assert named == found
        return
    assert named is not None
    rates = device_rates(named)
    teraflops, bandwidth, link = found
    assert rates.memory_bytes == (mebibytes - 512) * 2**20
    assert rates.half_flop_per_ms == pytest.approx(teraflops * 1e9, rel=0.01)
    assert rates.bytes_per_ms == pytest.approx(bandwidth * 1e9, rel=0.01)
    assert rates.link is not None
    assert rates.link.out_bytes_per_ms == link * 1e6


def test_a_device_of_ones_own_is_like_the_h200_in_what_it_does_not_say() -> None:
    h200, name = device_rates("H200"), "memory=48GB,tflops=330,bandwidth=0.9,link=25"
    own = device_rates(name)
    assert (own.name, own.memory_bytes, own.bytes_per_ms) == (name, 48 * 10**9, 0.9e9)
    assert own.attention_flop_per_ms == pytest.approx(h200.attention_flop_per_ms / 2)
    assert own.full_flop_per_ms == pytest.approx(h200.full_flop_per_ms / 2)
    assert own.link.out_bytes_per_ms == 25e6
    with pytest.raises(PlanError, match="memory=48GB,tflops=150"):
        device_rates("memory=48GB")


def test_no_device_takes_no_time() -> None:
    model = MODELS["tied"]()
    for rates in DEVICES:
        profile = on_paper(model, rates.name)
        assert profile.compute_ms > 0
        assert (profile.device, profile.device_bytes) == (rates.name, rates.memory_bytes)
        assert (profile.link is None) == (rates.name == "cpu")


def test_attention_is_counted_as_the_counter_of_torch_does() -> None:
    query, key = torch.empty(2, 4, 16, 8), torch.empty(2, 4, 24, 8)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    shapes = (query.shape, key.shape, key.shape)
    expected = flop_registry[flash](query, key, key, out_val=None)
    assert attention_flops(flash.default, (query, key, key), {}) == expected, shapes
    assert attention_flops(flash.default, (query, key, key, 0.0, True), {}) == expected // 2
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    assert attention_flops(back, (query, query, key, key, query, query, 0.0, False), {}) == expected * 5 // 2
    assert attention_flops(torch.ops.aten.mm.default, (query, key), {}) is None


def test_the_slower_of_arithmetic_and_memory() -> None:
    rates = device_rates("H200")
    clock = RooflineClock(rates)

    def ms(func: Any, *args: torch.Tensor) -> float:
        start = clock.stamp()
        clock.ran(func, args, {}, func(*args))
        return clock.stamp().ms_since(start)

    with torch.device("meta"):
        large = torch.empty(8192, 8192, dtype=torch.bfloat16)
        thin = torch.empty(8192, 1, dtype=torch.bfloat16)
    mm, add = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor
    assert ms(mm, large, large) == pytest.approx(2 * 8192**3 / rates.half_flop_per_ms)
    assert ms(mm, thin, thin.t()) == pytest.approx((large.nbytes + 2 * thin.nbytes) / rates.bytes_per_ms)
    assert ms(add, large, large) == pytest.approx(3 * large.nbytes / rates.bytes_per_ms)
    assert ms(add, large, thin.expand_as(large)) < ms(add, large, large)
    assert ms(add, thin, thin) == pytest.approx(rates.launch_ms)
