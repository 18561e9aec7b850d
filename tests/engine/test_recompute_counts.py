"""What each form of recomputation saves and does again, in integers from shapes: bytes, operators, FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_actswap import MemoryPlan
from tests.engine.tiny_models import (
    BATCH,
    LENGTH,
    NUM_LAYERS,
    assert_bitwise_equal,
    forward,
    gradients,
    on,
    plan_of,
    recompute_rows,
    swap_rows,
    tiny_llama,
    tiny_neox,
)
from tests.quick_cases import each_value_once
from tests.stream.test_host_sequence import DeviceMeter

LAYERS = range(NUM_LAYERS)
HEADS, TOKENS, HIDDEN, INNER = 4, BATCH * LENGTH, 32, 48
ROW, WIDE, SCORES = TOKENS * HIDDEN, TOKENS * INNER, BATCH * HEADS * LENGTH * LENGTH
"""Elements of a hidden state, of what the MLP works on, and of attention's scores."""
FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])

_NO_WORK = {
    *("detach", "view", "transpose", "t", "_unsafe_view", "_reshape_alias", "as_strided", "expand", "slice"),
    *("unsqueeze", "squeeze", "alias", "set_", "empty", "empty_like", "empty_strided", "zeros", "permute"),
    *("select", "split", "split_with_sizes", "chunk"),
}
"""Views and allocations; ``zeros`` are gradients that autograd fills in."""
SDPA = "_scaled_dot_product_flash_attention_for_cpu"


class Calls(TorchDispatchMode):
    """Counts the operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if name not in _NO_WORK:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Again:
    """What is saved less, in bytes, and what backward does in addition, operators by name and FLOPs."""

    freed_bytes: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    flops: int = 0

    def __add__(self, other: Again) -> Again:
        calls = Counter(self.calls) + Counter(other.calls)
        return Again(self.freed_bytes + other.freed_bytes, dict(calls), self.flops + other.flops)

    def __mul__(self, times: int) -> Again:
        calls = {name: count * times for name, count in self.calls.items() if times}
        return Again(self.freed_bytes * times, calls, self.flops * times)


def step(make: Callable[[], nn.Module], plan: MemoryPlan | str | None) -> tuple[Again, dict[str, Any], Any]:
    """One step: bytes held between forward and backward, and what backward does."""
    model = make()
    applied = on(model, plan, verify=False)
    torch.manual_seed(3)
    with DeviceMeter(model) as held:
        loss = forward(model)
    total = held.live_bytes
    with FlopCounterMode(display=False) as flops, Calls() as calls:
        loss.backward()
    return Again(total, dict(calls.count), flops.get_total_flops()), gradients(model), applied


@lru_cache(maxsize=4)
def bare_llama(dtype: torch.dtype) -> tuple[Again, dict[str, Any], Any]:
    return step(lambda: tiny_llama(dtype), None)


def difference(
    make: Callable[[], nn.Module],
    plan: MemoryPlan | str,
    without: tuple[Again, dict[str, Any], Any] | None = None,
) -> tuple[Again, list[str]]:
    """What the plan makes of a step, and its adjustments; gradients must stay what they are, bit for bit."""
    bare, bare_grads, _ = without or step(make, None)
    under, grads, applied = step(make, plan)
    assert_bitwise_equal(grads, bare_grads)
    names = bare.calls.keys() | under.calls.keys()
    more = {name: under.calls.get(name, 0) - bare.calls.get(name, 0) for name in names}
    adjustments = [str(adjustment) for adjustment in applied.plan.adjustments]
    return Again(
        bare.freed_bytes - under.freed_bytes,
        {name: count for name, count in more.items() if count},
        under.flops - bare.flops,
    ), adjustments


# What one layer of `tiny_llama` saves, by op, and what running the op again costs.

ARGUMENTS = 8 * LENGTH
"""``position_ids``, int64, one row for the batch: attention modules and layers hold it, once for all."""


def norm(dtype: torch.dtype) -> Again:
    """Dropped: the normalised tensor, 1/rms and, of bf16, the fp32 copy; held: the input."""
    own = {"pow": 1, "mean": 1, "add": 1, "rsqrt": 1, "mul": 1}
    if dtype is FP32:
        return Again(4 * ROW + 4 * TOKENS, own)
    return Again(4 * ROW + 4 * TOKENS + 2 * ROW - 2 * ROW, {**own, "_to_copy": 2})


def norm_by_functions(dtype: torch.dtype) -> Again:
    """As the module, and its output too, which the projections save: one more product."""
    return norm(dtype) + Again(dtype.itemsize * ROW, {"mul": 1})


def product(dtype: torch.dtype) -> Again:
    return Again(dtype.itemsize * WIDE, {"mul": 1})


def silu(dtype: torch.dtype) -> Again:
    return Again(dtype.itemsize * WIDE, {"silu": 1})


def gate(dtype: torch.dtype) -> Again:
    """A projection: its output dropped, its input is saved anyway."""
    return Again(dtype.itemsize * WIDE, {"mm": 1}, 2 * TOKENS * HIDDEN * INNER)


def mlp(dtype: torch.dtype) -> Again:
    """All but the down projection, which saves the last tensor."""
    return gate(dtype) * 2 + silu(dtype) + product(dtype)


def core(dtype: torch.dtype) -> Again:
    """Its output and log-sum-exp, fp32. (`FlopCounterMode` does not know the CPU's kernel.)"""
    return Again(dtype.itemsize * ROW + 4 * HEADS * TOKENS, {SDPA: 1})


def attention(dtype: torch.dtype) -> Again:
    """q, k and v (two heads each of four) after rotation, and the core; not the output projection."""
    rotation = {"mul": 4, "neg": 2, "cat": 2, "add": 2}
    return core(dtype) + Again(
        dtype.itemsize * 2 * ROW, {"mm": 3, **rotation}, 2 * TOKENS * HIDDEN * 2 * HIDDEN
    )


def layer(dtype: torch.dtype) -> Again:
    """All but the down projection and the last sum; what is held is the layer's input."""
    size = dtype.itemsize
    norms = Again(0, norm(dtype).calls) * 2 + Again(0, {"mul": 2})
    of_norms = 2 * (4 * TOKENS + 4 * ROW + 2 * size * ROW) - size * ROW  # 1/rms, fp32 input, product, output
    between = Again(0, {"mm": 1, "add": 1}, 2 * TOKENS * HIDDEN * HIDDEN)  # output projection, first sum
    return norms + Again(of_norms) + attention(dtype) + between + mlp(dtype)


Form = tuple[str, Callable[[torch.dtype], Again]]
_PIPELINE = "parallel_config: {pipeline_stage: 2, pp_interleave_num: 2}\n"
_SWAP = "swap_config: {swap: true, op_swap: []}\n"
_MUL, _SILU = r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu"


def recompute(text: str) -> str:
    return f"recompute_config: {{{text}}}\n"


def held_arguments(again: Again) -> Again:
    return again + Again(-ARGUMENTS)


FORMS: dict[str, Form] = {
    "recompute true": (recompute("recompute: true"), lambda d: held_arguments(layer(d) * 4)),
    "recompute list": (recompute("recompute: [3]"), lambda d: held_arguments(layer(d) * 3)),
    "recompute 2-D": (
        _PIPELINE + recompute("recompute: [[1, 0], [0, true]]"),
        lambda d: held_arguments(layer(d) * 2),
    ),
    "recompute indices": (_SWAP + recompute("recompute: [1, 3]"), lambda d: held_arguments(layer(d) * 2)),
    "recompute false": (recompute("recompute: false"), lambda _: Again()),
    "select true": (recompute("select_recompute: true"), lambda d: (product(d) + silu(d)) * 4),
    "select list": (recompute("select_recompute: [3]"), lambda d: (product(d) + silu(d)) * 3),
    "select 2-D": (
        _PIPELINE + recompute("select_recompute: [[1, 1], [1, 0]]"),
        lambda d: (product(d) + silu(d)) * 3,
    ),
    "select mapping, bool": (
        recompute(f"select_recompute: {{'{_MUL}': true, '{_SILU}': false}}"),
        lambda d: product(d) * 4,
    ),
    "select mapping, list": (
        recompute(f"select_recompute: {{'{_MUL}': [1], '{_SILU}': [3]}}"),
        lambda d: product(d) + silu(d) * 3,
    ),
    "select mapping, 2-D": (
        _PIPELINE + recompute(f"select_recompute: {{'{_SILU}': [[true, 0], [1, 1]]}}"),
        lambda d: silu(d) * 3,
    ),
    "select mapping, indices": (
        _SWAP + recompute(f"select_recompute: {{'{_MUL}': [0, 3]}}"),
        lambda d: product(d) * 2,
    ),
    "select strings": (
        recompute(f"select_recompute: ['{_MUL}', 'attention_norm', 'ffn_norm']"),
        lambda d: (product(d) + norm(d) * 2) * 4,
    ),
    "modules": (
        recompute("select_recompute: {attention: [1], feed_forward: [2]}"),
        lambda d: held_arguments(attention(d) + mlp(d) * 2),
    ),
    "a projection": (
        recompute(r"select_recompute: {'feed_forward\.w1\.matmul': true}"),
        lambda d: gate(d) * 4,
    ),
    "core": (recompute(r"select_recompute: {'attention\.flash_attention': true}"), lambda d: core(d) * 4),
    "functions of the norms": (
        recompute(
            r"select_recompute: {'input_layernorm\.(to|pow|mean|add|rsqrt|mul)': true, "
            r"'post_attention_layernorm\.(to|pow|mean|add|rsqrt|mul)': [2]}"
        ),
        lambda d: norm_by_functions(d) * 6,
    ),
    "all elementwise": (
        recompute(
            rf"select_recompute: {{'input_layernorm\..*': true, 'post_attention_layernorm\..*': true, "
            rf"'{_MUL}': true, '{_SILU}': true}}"
        ),
        lambda d: (norm_by_functions(d) * 2 + product(d) + silu(d)) * 4,
    ),
    "exclude in a mapping": (
        recompute(f"select_recompute: {{feed_forward: true}}, select_recompute_exclude: {{'{_MUL}': [4]}}"),
        lambda d: (mlp(d) + Again(-d.itemsize * WIDE, {"mul": -1})) * 4,
    ),
    "exclude drops the pattern": (
        recompute(f"select_recompute: true, select_recompute_exclude: ['{_MUL}']"),
        lambda d: silu(d) * 4,
    ),
    "both": (
        recompute("recompute: [1], select_recompute: true"),
        lambda d: held_arguments(layer(d) + (product(d) + silu(d)) * 3),
    ),
}


@each_value_once
@DTYPES
@pytest.mark.parametrize("name", FORMS)
def test_each_form_to_the_byte_and_to_the_operator(name: str, dtype: torch.dtype) -> None:
    text, expected = FORMS[name]
    again, _ = difference(lambda: tiny_llama(dtype), text, bare_llama(dtype))
    wanted = expected(dtype)
    assert again == Again(wanted.freed_bytes, {k: v for k, v in wanted.calls.items() if v}, wanted.flops)


def mask(dtype: torch.dtype) -> int:
    """The causal mask, which is made once and is no layer's: recomputed cores hold it."""
    return dtype.itemsize * BATCH * LENGTH * LENGTH


def eager_core(dtype: torch.dtype) -> Again:
    """Up to the weights: probabilities in fp32, dropout's mask and its result."""
    calls = {"bmm": 1, "mul": 2, "add": 1, "_softmax": 1, "bernoulli_": 1, "div_": 1}
    if dtype is BF16:
        calls["_to_copy"] = 2
    flops = 2 * BATCH * LENGTH * LENGTH * HIDDEN
    return Again(4 * SCORES + 2 * dtype.itemsize * SCORES, calls, flops)


@DTYPES
def test_eager_attention_of_llama_saves_nothing_of_the_size_of_its_scores(dtype: torch.dtype) -> None:
    text = FORMS["core"][0]
    settings = {"attn_implementation": "eager", "attention_dropout": 0.1}
    again, adjustments = difference(lambda: tiny_llama(dtype, **settings), text)
    product_with_values = Again(0, {"bmm": 1}, 2 * BATCH * LENGTH * LENGTH * HIDDEN)
    # Its output goes, and a copy of q in the order of the product: for that q itself is held.
    output = Again(dtype.itemsize * ROW, {"clone": 2})
    assert again == (eager_core(dtype) + product_with_values + output) * 4 + Again(-mask(dtype))
    assert adjustments == []


@DTYPES
def test_eager_attention_of_neox_keeps_what_would_cost_more(dtype: torch.dtype) -> None:
    """Values are a third of one tensor with q and k, which nothing else saves: the last product stays."""
    text = FORMS["core"][0]
    again, adjustments = difference(
        lambda: tiny_neox(dtype, attn_implementation="eager", use_cache=False), text
    )
    assert again == eager_core(dtype) * 4 + Again(-mask(dtype))
    row = dtype.itemsize * ROW
    assert [text.partition(": ")[2].partition(", and")[0] for text in adjustments] == [
        f"asked recompute, got keep: run again it would hold {held:,} bytes in a layer in place of "
        f"{dropped:,}"
        for held, dropped in ((3 * row, 2 * row), (row, row))
    ]


def neox_without_attention_dropout(dtype: torch.dtype) -> nn.Module:
    """With it, sdpa on the CPU takes the path that saves everything."""
    model = tiny_neox(dtype, use_cache=False)
    for index in LAYERS:
        model.gpt_neox.layers[index].attention.attention_dropout = 0.0
    return model


@DTYPES
def test_sdpa_of_neox(dtype: torch.dtype) -> None:
    """Its values are a view of one tensor with q and k, saved anyway; its output is copied once."""
    again, adjustments = difference(lambda: neox_without_attention_dropout(dtype), FORMS["core"][0])
    assert again == (core(dtype) + Again(dtype.itemsize * ROW, {"clone": 1})) * 4
    assert adjustments == []


@DTYPES
def test_sdpa_with_dropout_saves_no_scores_either(dtype: torch.dtype) -> None:
    """On the CPU it is a chain of kernels inside one function; with dropout its mask is drawn again."""
    again, adjustments = difference(lambda: tiny_neox(dtype, use_cache=False), FORMS["core"][0])
    probabilities_and_dropped = 2 * dtype.itemsize * SCORES
    assert again.freed_bytes >= 4 * probabilities_and_dropped
    assert again.calls["bmm"] == 2 * 4
    assert again.flops == 4 * 2 * 2 * BATCH * LENGTH * LENGTH * HIDDEN
    assert adjustments == []


def test_swap_recompute_and_keep_of_one_layer_add_up() -> None:
    """Each storage is moved, dropped or kept, once: held less is what was moved and what was dropped."""
    swapped = swap_rows(["self_attn.flash_attention", "post_attention_layernorm"], LAYERS, 5)
    recomputed = recompute_rows(["input_layernorm", "mlp.mul", "mlp.act_fn.silu"], LAYERS)
    bare, bare_grads, _ = step(tiny_llama, None)
    under, grads, applied = step(tiny_llama, plan_of(*swapped, *recomputed))
    assert_bitwise_equal(grads, bare_grads)
    dropped = norm(FP32) + product(FP32) + silu(FP32)
    moved = 4 * ROW + 4 * HEADS * TOKENS + 4 * TOKENS + 2 * 4 * ROW  # core; 1/rms, normalised, output
    assert applied.stats().offloaded_bytes == 4 * moved
    assert bare.freed_bytes - under.freed_bytes == 4 * (dropped.freed_bytes + moved)
