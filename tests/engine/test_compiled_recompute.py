"""Recomputation in compiled layers: tags and budgets, counted in bytes, operations and graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition

from benchmarks.rows import compiled_lean_mix, compiled_mix
from hf_actswap import MemoryPlan, PlanError, apply, load_config, model_structure, resolve_plan
from hf_actswap.engine.compiled_regions import region_rules
from hf_actswap.plan.actions import COMPILE_BUDGET
from hf_actswap.plan.record import storage_key
from hf_actswap.plan.saved_bytes import RecomputedModules
from hf_actswap.report import plan_table
from tests.engine.tiny_models import (
    BATCH,
    LENGTH,
    NUM_LAYERS,
    assert_bitwise_equal,
    batch,
    compiled_layers,
    gradients_of_step,
    snapshot,
    tiny,
    tiny_llama,
    tiny_neox,
)
from tests.quick_cases import quick_first

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 4, 2, 8
TOKENS = BATCH * LENGTH
COLUMN = TOKENS * 4
"""Bytes of one fp32 number for each token."""

ROPE = 2 * LENGTH * HEAD_DIM * 4
"""Bytes of cos and sin, which all layers share."""

X, NORMED, ATTENDED, PROJECTED = (HIDDEN * COLUMN,) * 4
RSTD, QUERY, KEY, VALUE = COLUMN, HIDDEN * COLUMN, *(KV_HEADS * HEAD_DIM * COLUMN,) * 2
LOGSUMEXP = HEADS * COLUMN
GATE, UP, PRODUCT = (INNER * COLUMN,) * 3
INPUTS = X + ROPE
BARE = (
    INPUTS
    + (RSTD + NORMED + QUERY + KEY + VALUE + ATTENDED + LOGSUMEXP + PROJECTED)
    + (RSTD + NORMED + GATE + UP + PRODUCT)
)
"""What a compiled layer saves by itself: what matrix products read or make, and the statistics."""

RANDOM_STATE = torch.get_rng_state().nbytes
"""Saved where the attention core runs again: PyTorch cannot know that it draws nothing."""


def mm_flops(*features: tuple[int, int]) -> int:
    """Floating point operations of matrix products of all tokens with weights of these shapes."""
    return sum(2 * TOKENS * rows * columns for rows, columns in features)


MLP_AGAIN = mm_flops((HIDDEN, INNER), (HIDDEN, INNER))
ATTENTION_AGAIN = mm_flops((HIDDEN, HIDDEN), (HIDDEN, KV_HEADS * 8), (HIDDEN, KV_HEADS * 8))
OUTPUT_PROJECTION_AGAIN = mm_flops((HIDDEN, HIDDEN))

SELECTED = {
    "feed_forward": (GATE + UP + PRODUCT, 0, MLP_AGAIN),
    "feed_forward.mul": (PRODUCT, 0, 0),
    # The partitioner rebuilds this one anyway.
    "feed_forward.w1.activation.silu": (0, 0, 0),
    # A module keeps its output, of a norm all but its statistic.
    "attention_norm": (RSTD, 0, 0),
    "input_layernorm.mul": (NORMED, 0, 0),
    "post_attention_layernorm.mul": (NORMED, 0, 0),
    "mlp.gate_proj.linear": (GATE, 0, mm_flops((HIDDEN, INNER))),
    "mlp.gate_proj": (0, 0, 0),
    "attention.flash_attention": (ATTENDED + LOGSUMEXP, RANDOM_STATE, 0),
    "attention": (QUERY + KEY + VALUE + ATTENDED + LOGSUMEXP, RANDOM_STATE, ATTENTION_AGAIN),
}
"""Op path -> bytes dropped, bytes saved instead, products done again (the attention core's not counted)."""


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled_llama(layers: int = NUM_LAYERS, backend: Any = "aot_eager", **settings: Any) -> Any:
    return compiled_layers(tiny_llama(num_hidden_layers=layers), backend=backend, **settings)


def budget(value: Any) -> str:
    return f"recompute_config: {{compile_budget: {value}}}"


def selecting(*ops: str, swap: str = "") -> str:
    select = ", ".join(f"'{op}': true" for op in ops)
    swapping = f"swap_config: {{swap: true, layer_swap: [{swap}]}}"
    return f"{swapping}\nrecompute_config: {{select_recompute: {{{select}}}}}"


class Saved:
    """Counts what each compiled layer saves, weights apart, each storage once."""

    def __init__(self, model: Any) -> None:
        self.bytes: list[int] = []
        self._weights = {storage_key(parameter) for parameter in model.parameters()}
        for layer in model_structure(model).layers:
            module = model.get_submodule(layer.module_path)
            module._compiled_call_impl = self._counted(module._compiled_call_impl)

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            packed: dict[int | None, torch.UntypedStorage] = {}

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                if (key := storage_key(tensor)) not in self._weights:
                    packed[key] = tensor.untyped_storage()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = call(*args, **kwargs)
            self.bytes.append(sum(storage.nbytes() for storage in packed.values()))
            return output

        return counted


def step(model: Any, number: int = 0) -> dict[str, torch.Tensor]:
    found = gradients_of_step(model, number)
    return {name.replace("_orig_mod.", ""): gradient for name, gradient in found.items()}


def bytes_of_layers(model: Any) -> list[int]:
    saved = Saved(model)
    step(model)
    return saved.bytes


class CountingBackend:
    """Counts what stands in the backward graphs that it compiles."""

    def __init__(self) -> None:
        self.products: list[int] = []
        self.cores: list[int] = []
        self.backend = aot_autograd(
            fw_compiler=boxed_nop, bw_compiler=self._count, partition_fn=min_cut_rematerialization_partition
        )

    def _count(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        products = cores = 0
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.mm.default:
                left, right = (argument.meta["val"].shape for argument in node.args)
                products += 2 * left[0] * left[1] * right[1]
            called = (node.target, *(argument for argument in node.args if callable(argument)))
            cores += sum(function in ATTENTION_CORES for function in called)
        self.products.append(products)
        self.cores.append(cores)
        return boxed_nop(graph, inputs)


ATTENTION_CORES = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,)


def backward_graph(text: str | None) -> tuple[int, int]:
    """Products (floating point operations) and attention cores in the one backward graph of all layers."""
    torch._dynamo.reset()
    counting = CountingBackend()
    model = compiled_llama(2, counting.backend)
    with apply(model, text) if text else nullcontext():
        step(model)
    (products,), (cores,) = counting.products, counting.cores
    return products, cores


def graphs() -> int:
    return int(counters["stats"].get("unique_graphs", 0))


@cache
def bare_of_two_layers() -> tuple[list[dict[str, torch.Tensor]], tuple[int, int]]:
    """Gradients of two steps, and what stands in the backward graph."""
    model = compiled_llama(2)
    found = [step(model, number) for number in (0, 1)]
    graph = backward_graph(None)
    torch._dynamo.reset()
    return found, graph


@pytest.mark.parametrize("op", quick_first(SELECTED, 1))
def test_what_is_named_is_rebuilt_and_nothing_else(op: str) -> None:
    dropped, added, again = SELECTED[op]
    expected, (products, cores) = bare_of_two_layers()
    assert cores == 0
    model = compiled_llama(2)
    with apply(model, selecting(op)):
        assert bytes_of_layers(model) == [BARE - dropped + added] * 2
        for number in (0, 1):
            assert_bitwise_equal(step(model, number), expected[number])
    assert not counters["graph_break"]
    assert backward_graph(selecting(op)) == (products + again, 1 if added else 0)


def test_a_layer_recomputed_whole_saves_its_input() -> None:
    text = "recompute_config: {recompute: true}"
    expected = step(compiled_llama())
    torch._dynamo.reset()
    model = compiled_llama()
    with apply(model, text):
        assert bytes_of_layers(model) == [INPUTS + RANDOM_STATE] * NUM_LAYERS
        assert_bitwise_equal(step(model), expected)
    products, _ = bare_of_two_layers()[1]
    again = ATTENTION_AGAIN + OUTPUT_PROJECTION_AGAIN + MLP_AGAIN  # and not the last: nobody reads it
    assert backward_graph(text) == (products + again, 1)


def test_an_excluded_op_of_a_layer_recomputed_whole_is_saved() -> None:
    text = """
    swap_config: {swap: true, layer_swap: []}
    recompute_config: {recompute: true, select_recompute_exclude: {'attention.flash_attention': true}}
    """
    model = compiled_llama()
    with apply(model, text):
        inside = QUERY + KEY + VALUE + ATTENDED + LOGSUMEXP
        assert {INPUTS + ATTENDED + LOGSUMEXP} == set(bytes_of_layers(model)), inside


@pytest.mark.slow
def test_each_layer_has_its_own_budget() -> None:
    """Catches layers that share the first one's graph, or a budget that is set somewhere else as well."""
    shares = (1.0, 0.5, 0.3, 0.0)
    alone = []
    for share in shares:
        torch._dynamo.reset()
        model = compiled_llama(2)
        with apply(model, budget(share)):
            alone.append(bytes_of_layers(model))
    assert [one for one, _ in alone] == [other for _, other in alone]
    torch._dynamo.reset()
    counters.clear()
    bare = compiled_llama()
    expected = step(bare)
    model = compiled_llama()
    with apply(model, budget(list(shares))):
        found = tuple(bytes_of_layers(model))
        assert found == tuple(one for one, _ in alone)
        assert_bitwise_equal(step(model), expected)
    assert found[0] == BARE
    assert found[-1] == INPUTS + RANDOM_STATE
    assert list(found) == sorted(set(found), reverse=True)
    assert torch._functorch.config.activation_memory_budget == 1.0


@pytest.mark.slow
def test_more_budgets_than_dynamo_recompiles_a_function() -> None:
    """Catches layers that run eagerly because a code object was compiled too often."""
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        model = compiled_llama()
        with apply(model, budget([1.0, 0.6, 0.3, 0.0])):
            step(model)
            assert graphs() == NUM_LAYERS


GRAPHS = {
    budget(0.3): 1,
    budget([0.3, 0.3, 0.0, 0.0]): 2,
    selecting("feed_forward.mul"): 1,
    "recompute_config: {select_recompute: {'feed_forward.mul': [2]}, compile_budget: 0.3}": 2,
    "recompute_config: {recompute: [1]}": 2,
}
"""Text -> number of graphs."""


@pytest.mark.parametrize(
    ("text", "count", "wrapped"),
    [
        (selecting("feed_forward.mul"), 1, True),
        *quick_first(((text, count, False) for text, count in reversed(GRAPHS.items())), 1),
        *(
            pytest.param(text, count, True, marks=pytest.mark.slow)
            for text, count in GRAPHS.items()
            if "{'feed_forward.mul': true}" not in text
        ),
    ],
)
def test_one_graph_for_each_rule_and_no_more_with_the_steps(text: str, count: int, wrapped: bool) -> None:
    model = compiled_llama(wrapped=wrapped)
    with apply(model, text):
        step(model)
        assert graphs() == count
        for number in range(1, 4):
            step(model, number)
        assert graphs() == count
    assert not counters["graph_break"]


def test_a_model_that_ran_before_is_compiled_again_and_afterwards_runs_as_before() -> None:
    model = compiled_llama()
    before = snapshot(model)
    saved = Saved(model)
    counted = snapshot(model)
    step(model)
    assert saved.bytes == [BARE] * NUM_LAYERS
    for text, expected in (
        (budget(0), INPUTS + RANDOM_STATE),
        (selecting("feed_forward"), BARE - GATE - UP - PRODUCT),
    ):
        with apply(model, text):
            saved.bytes.clear()
            step(model)
            assert saved.bytes == [expected] * NUM_LAYERS
    known = graphs()
    assert known == 3
    assert snapshot(model) == counted
    assert before.keys() == counted.keys()
    saved.bytes.clear()
    step(model)
    assert saved.bytes == [BARE] * NUM_LAYERS
    assert graphs() == known


def test_swap_acts_on_what_is_still_saved() -> None:
    """A row mix on the same layers: exactly the bytes that are recomputed are not swapped any more."""
    rule = "{backward_prefetch: 20, layers: true}"
    small = "memory: {min_tensor_mib: 0.0001}\n"
    bare = step(compiled_llama())
    swapped = {}
    for ops in ((), ("feed_forward",), ("feed_forward.mul", "input_layernorm.mul")):
        torch._dynamo.reset()
        model = compiled_llama()
        text = selecting(*ops, swap=rule) if ops else f"swap_config: {{swap: true, layer_swap: [{rule}]}}"
        with apply(model, small + text) as applied:
            assert_bitwise_equal(step(model), bare)
            stats = applied.stats()
            swapped[ops] = stats.offloaded_bytes
            assert stats.offloads == stats.prefetches > 0
            assert (stats.live_swaps, stats.host_bytes) == (0, 0)
    everything = swapped.pop(())
    # Of the inputs those that are outputs of layers; the final norm saves the last one's.
    assert everything == NUM_LAYERS * (BARE - INPUTS + X)
    assert everything - swapped["feed_forward",] == NUM_LAYERS * (GATE + UP + PRODUCT)
    assert everything - swapped["feed_forward.mul", "input_layernorm.mul"] == NUM_LAYERS * (PRODUCT + NORMED)


@pytest.mark.slow
@pytest.mark.parametrize(("mix", "inside"), [(compiled_mix, QUERY + KEY + VALUE), (compiled_lean_mix, 0)])
def test_the_mixes_of_the_benchmark(mix: Callable[[int], dict[str, Any]], inside: int) -> None:
    """The last layer's share stays: backward asks for it at once."""
    layers = 3
    expected = step(compiled_llama(layers))
    torch._dynamo.reset()
    model = compiled_llama(layers)
    with apply(model, {**mix(layers), "memory": {"min_tensor_mib": 0.0001}}) as applied:
        assert_bitwise_equal(step(model), expected)
        saved = X + inside + ATTENDED + LOGSUMEXP + PROJECTED + 2 * RSTD
        assert applied.stats().offloaded_bytes == (layers - 1) * saved
        assert {row.scope for row in applied.plan.rows if row.fate == "swap"} == set(range(layers - 1))


def test_swap_beside_a_budget() -> None:
    text = "memory: {min_tensor_mib: 0.0001}\n" + (
        "swap_config: {swap: true, layer_swap: [{backward_prefetch: 20, layers: true}]}\n" + budget(0)
    )
    bare = step(compiled_llama())
    model = compiled_llama()
    with apply(model, text) as applied:
        assert_bitwise_equal(step(model), bare)
        assert applied.stats().offloaded_bytes == NUM_LAYERS * (X + RANDOM_STATE)
        row = applied.plan.row(0, "")
        assert (row.fate, row.parameters) == ("swap", {COMPILE_BUDGET: 0.0})


@pytest.mark.slow  # it compiles 26 kernels
@pytest.mark.parametrize(
    ("text", "expected_bytes"),
    [
        (
            selecting("feed_forward.mul", "attention"),
            BARE - PRODUCT - QUERY - KEY - VALUE - ATTENDED - LOGSUMEXP + RANDOM_STATE,
        ),
        (budget(0.0), INPUTS + RANDOM_STATE),
    ],
)
def test_inductor(text: str, expected_bytes: int) -> None:
    """Its kernels fuse what is rebuilt with what uses it, and what they round differs: not bitwise."""
    bare = compiled_llama(2, "inductor")
    expected = step(bare)
    torch._dynamo.reset()
    model = compiled_llama(2, "inductor")
    with apply(model, text):
        saved = Saved(model)
        found = step(model)
    assert deviation(found, expected) < 1e-5
    assert saved.bytes == [expected_bytes] * 2


def deviation(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, each gradient's against the largest number in it."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected
    )


def with_dropout(text: str | None, backend: str) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    model = compiled_layers(tiny_neox(), backend=backend)
    with apply(model, text) if text else nullcontext():
        torch.manual_seed(3)
        return step(model)


RANDOM = (budget(0.0), budget(0.01), budget(0.5), selecting("feed_forward", "attention"))


@pytest.mark.parametrize("text", quick_first(RANDOM, 1))
def test_dropout_is_drawn_once(text: str) -> None:
    """PyTorch's budget alone rebuilds it with another mask: the gradients are not those of the loss."""
    assert_bitwise_equal(with_dropout(text, "aot_eager"), with_dropout(None, "aot_eager"))


@pytest.mark.slow
@pytest.mark.parametrize("text", RANDOM)
def test_dropout_is_drawn_once_by_inductor(text: str) -> None:
    assert deviation(with_dropout(text, "inductor"), with_dropout(None, "inductor")) < 1e-5


@pytest.mark.parametrize("mode", [torch.no_grad, nullcontext])
def test_evaluation(mode: Callable[[], Any]) -> None:
    model = compiled_llama(2).eval()
    ids = batch(0)
    with mode():
        expected = model(input_ids=ids).logits
        with apply(model, selecting("feed_forward")):
            assert torch.equal(model(input_ids=ids).logits, expected)


def test_the_plan_says_it() -> None:
    model = compiled_llama()
    plan = resolve_plan(load_config(budget([1, 0.5, 0.5, 0])), model_structure(model))
    assert MemoryPlan.from_json(plan.to_json()) == plan
    assert [row.parameters[COMPILE_BUDGET] for row in plan.rows] == [1.0, 0.5, 0.5, 0.0]
    assert [line for line in plan.log_lines() if "budget" in line] == [
        f"Set compile budget at layer {layer} and value is: {share}"
        for layer, share in enumerate(("1", "0.5", "0.5", "0"))
    ]
    table = plan_table(plan)
    assert "keep, compile budget 0.5" in table
    assert "1-2" in table
    with pytest.raises(PlanError, match=r"plan.rows\[0\].parameters: .*compile_budget in it from 0 to 1"):
        MemoryPlan.from_json(plan.to_json().replace('"compile_budget": 1.0', '"compile_budget": 1.5'))


def test_a_budget_of_a_layer_recomputed_whole_has_no_effect() -> None:
    plan = resolve_plan(
        load_config("recompute_config: {recompute: [1], compile_budget: 0.5}"),
        model_structure(compiled_llama()),
    )
    assert [str(adjustment) for adjustment in plan.adjustments] == [
        "recompute_config.compile_budget, layers 0: asked 0.5, got no effect: the layer is recomputed whole, "
        "so that its region saves nothing but its input anyway"
    ]
    assert plan.row(0, "") is not None
    budgeted = [COMPILE_BUDGET in row.parameters for row in plan.rows if not row.op_path]
    assert budgeted == [False, True, True, True]


def rejection(model: Any, text: str) -> str:
    with pytest.raises(PlanError) as rejected:
        apply(model, text)
    return str(rejected.value)


def test_a_budget_needs_compiled_layers() -> None:
    message = rejection(tiny_llama(), budget([1, 1, 0.5, 0.5]))
    assert "recompute_config.compile_budget: expected layers that are compiled one by one" in message
    assert "layers 0-3 not compiled" in message
    assert "`layer.compile()`, or regional compilation" in message
    whole = tiny_llama()
    whole.compile(backend="aot_eager")
    assert "a model compiled whole" in rejection(whole, budget(0.5))
    hand_written = resolve_plan(load_config(budget(0.5)), model_structure(compiled_llama()))
    with pytest.raises(PlanError, match="layers 0-3 not compiled"):
        apply(tiny_llama(), hand_written)


def test_a_budget_for_another_number_of_layers() -> None:
    message = rejection(compiled_llama(), budget([0.5, 0.5]))
    assert "one number, or 4: one for each layer" in message
    assert "a list of 2" in message


def test_what_the_tracer_cannot_name_is_rejected_by_name() -> None:
    message = rejection(
        compiled_layers(tiny("Mixtral", num_hidden_layers=2)), selecting("mlp", "input_layernorm.mul")
    )
    assert "'mlp' in layers 0-1: routed experts depend on data" in message
    assert "input_layernorm" not in message


def test_equal_layers_have_equal_rules() -> None:
    shape = model_structure(compiled_llama())
    plan = resolve_plan(load_config(selecting("attention", "feed_forward.mul")), shape)
    recomputed = RecomputedModules(plan, shape.modules)
    rules = [region_rules(recomputed, layer) for layer in shape.layers]
    assert len(set(rules)) == 1
    assert rules[0].outputs == (("self_attn.o_proj.linear", 0),)
    assert rules[0].recomputes(("self_attn.q_proj.linear", 0))
    assert not rules[0].recomputes(("self_attn.o_proj.linear", 0))
    assert not rules[0].recomputes(("mlp.up_proj.linear", 0))
