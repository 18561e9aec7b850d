"""``to_yaml`` and back for every configuration."""

from __future__ import annotations

import copy
import json
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_actswap.config import ActSwapConfig, MemoryConfig, SwapConfig, load_config
from hf_actswap.config.layer_values import op_path_fault

OP_PATHS = st.sampled_from(
    [
        "attention",
        r"attention\.flash_attention",
        "mlp.act_fn",
        ".*.norm",
        "'",
        "true",
        "null",
        "1e3",
        "010",
        "é:# x",
    ]
) | st.text(max_size=8).filter(lambda text: not op_path_fault(text))
PREFETCHES = st.integers(1, 99) | st.sampled_from(["auto", "Auto"])
INDICES = st.lists(st.integers(0, 99), unique=True, max_size=4)
LAYERS = st.booleans() | INDICES
POSITIVE = st.integers(1, 99)
COUNTS = st.integers(0, 9) | st.booleans()
SIZES = st.integers(1, 2**60) | st.floats(min_value=0, exclude_min=True, allow_infinity=False)


def some_of(keys: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


def same_prefetch_where_it_must_be(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for entry in entries:
        entry["backward_prefetch"] = entries[0]["backward_prefetch"]
    return entries


ENTRIES = st.lists(
    st.fixed_dictionaries({"backward_prefetch": PREFETCHES, "layers": LAYERS}), max_size=3
).map(same_prefetch_where_it_must_be)
OP_ENTRIES = st.lists(
    st.fixed_dictionaries(
        {
            "op_name": OP_PATHS | st.lists(OP_PATHS, min_size=1, max_size=2),
            "backward_prefetch": PREFETCHES,
            "layers": LAYERS,
        }
    ),
    max_size=3,
).map(same_prefetch_where_it_must_be)
TILE_ENTRY = st.fixed_dictionaries(
    {"op_name": OP_PATHS | st.lists(OP_PATHS, min_size=1, max_size=2)},
    optional={"tokens": POSITIVE | st.just("auto") | st.none(), "layers": LAYERS},
)
TILE_ENTRIES = st.lists(TILE_ENTRY, max_size=3)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Valid documents of every shape, with the layout stated or not."""
    swap = draw(st.booleans())
    stages, interleave = draw(st.integers(1, 3)), draw(st.integers(1, 2))

    def rows(item: st.SearchStrategy[Any], or_bool: bool) -> st.SearchStrategy[Any]:
        row = st.lists(item, min_size=stages, max_size=stages)
        other = st.booleans() | row if or_bool else row
        return st.tuples(row, *[other] * (interleave - 1)).map(list)

    table = st.lists(COUNTS, max_size=stages) | rows(COUNTS, True)
    layers = LAYERS if swap else st.booleans() | table
    mapping = st.dictionaries(OP_PATHS, layers, max_size=3)
    named = st.just(False) | mapping if swap else st.just(False) | mapping | st.lists(OP_PATHS, max_size=3)
    selection = layers | named
    offset = st.integers(-3, 3)
    sections = {
        "swap_config": some_of(
            {
                "default_prefetch": PREFETCHES | st.none(),
                "layer_swap": ENTRIES | st.none(),
                "op_swap": OP_ENTRIES | st.none(),
                "recompute_input": LAYERS | st.none(),
                "select_recompute_input": LAYERS | st.none(),
            }
        ).map(lambda keys: {**keys, "swap": swap}),
        "recompute_config": some_of(
            {
                "recompute": layers,
                "select_recompute": selection,
                "select_comm_recompute": selection,
                "select_recompute_exclude": named,
                "select_comm_recompute_exclude": named,
                "parallel_optimizer_comm_recompute": st.booleans(),
                "mp_comm_recompute": st.booleans(),
                "recompute_slice_activation": st.booleans(),
            }
        ),
        "parallel_config": some_of(
            {
                "tensor_parallel_size": st.integers(1, 8),
                "sequence_parallel_enabled": st.booleans(),
                "offset": offset | st.lists(offset, min_size=stages, max_size=stages) | rows(offset, False),
            }
        ).map(lambda keys: {**keys, "pipeline_stage": stages, "pp_interleave_num": interleave}),
        "tile_config": some_of(
            {
                "loss": st.sampled_from(["off", False, None, "auto"])
                | POSITIVE
                | st.fixed_dictionaries({"tokens": POSITIVE}),
                "tile": TILE_ENTRIES | TILE_ENTRY | st.none(),
            }
        ),
        "stream_config": some_of(
            {
                "tokens": st.sampled_from(["off", False, None, "auto"]) | POSITIVE,
                "grad_accum_dtype": st.sampled_from(["fp32", "bf16"]),
            }
        ),
        "memory": some_of(
            {
                "mode": st.sampled_from(["off", "smart_swap", False]),
                "reduce_by_gib": SIZES,
                "margin_gib": SIZES | st.just(0) | st.none(),
                "preference": st.sampled_from(["auto", "performance", "memory_saving"]),
                "warmup_steps": st.integers(1, 9),
                "search_steps": st.integers(0, 9),
                "num_attn_layers_per_stage": st.integers(1, 9),
                "swap_bucket_size": st.integers(-5, 2**40),
                "min_tensor_mib": SIZES | st.none(),
                "host_memory_gib": SIZES,
                "bind_numa": st.booleans(),
                "plan_file": st.text(min_size=1, max_size=8),
            }
        ),
        "model": some_of({"num_layers": st.integers(1, 99)}).map(lambda keys: {"model_config": keys}),
    }
    return draw(st.fixed_dictionaries({"swap_config": sections.pop("swap_config")}, optional=sections))


@example({"swap_config": {"swap": False}, "tile_config": {"tile": [{"op_name": ["FALSE"]}]}})
@settings(max_examples=300, deadline=None)
@given(documents())
def test_round_trip(document: dict[str, Any]) -> None:
    before = copy.deepcopy(document)
    config = load_config(document)
    assert document == before
    again = load_config(config.to_yaml())
    assert again == config
    assert repr(again.swap_config) == repr(config.swap_config)
    assert repr(again.recompute_config) == repr(config.recompute_config)
    assert repr(again.parallel_config) == repr(config.parallel_config)
    assert repr(again.memory) == repr(config.memory)
    assert load_config(config.to_dict()) == config
    assert load_config(json.dumps(config.to_dict())) == config
    assert yaml.safe_load(config.to_yaml()) == config.to_dict()


def test_defaults_are_not_written() -> None:
    assert ActSwapConfig().to_dict() == {}
    assert ActSwapConfig().to_yaml() == "{}\n"
    config = ActSwapConfig(swap_config=SwapConfig(swap=True), memory=MemoryConfig(budget_gib=40.0))
    assert config.to_yaml() == "swap_config:\n  swap: true\nmemory:\n  budget_gib: 40\n"


def test_an_empty_list_is_written_and_null_is_not() -> None:
    assert ActSwapConfig(swap_config=SwapConfig(swap=True, layer_swap=())).to_yaml() == (
        "swap_config:\n  swap: true\n  layer_swap: []\n"
    )


def test_text_is_easy_to_read() -> None:
    text = r"""swap_config:
  swap: true
  op_swap:
    - op_name: attention
      backward_prefetch: 20
      layers: [0, 1, 2]
    - op_name: 'feed_forward\.mul'
      backward_prefetch: auto
      layers: true
recompute_config:
  recompute: [[2, 1], [true, 0]]
  select_recompute:
    'feed_forward\.mul': true
    feed_forward: [1, 0]
  select_comm_recompute: ['ffn_norm\.norm', norm]
parallel_config:
  pipeline_stage: 2
  pp_interleave_num: 2
model:
  model_config:
    num_layers: 8
""".replace("swap: true", "swap: false")
    assert load_config(text).to_yaml() == text.replace("  swap: false\n", "")
