"""MindFormers' observed behaviour (swap plan S9-S25); ours where it has a defect.

Its errors E1 to E12 are among the documents of ``malformed/``.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hf_actswap.config import LayerSwapRule, OpSwapRule, SwapConfig, load_config
from hf_actswap.errors import ConfigError


def layer_entry(prefetch: object, layers: object) -> dict[str, object]:
    return {"backward_prefetch": prefetch, "layers": layers}


def op_entry(name: object, prefetch: object, layers: object) -> dict[str, object]:
    return {"op_name": name, **layer_entry(prefetch, layers)}


def swap_document(**keys: object) -> dict[str, Any]:
    return {"swap_config": {"swap": True, **keys}}


def problems_of(document: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(document)  # type: ignore[arg-type]
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("keys", "config"),
    [
        pytest.param(
            {
                "layer_swap": [layer_entry(2, [2]), layer_entry(2, True)],
                "op_swap": [op_entry("mul", 1, [2]), op_entry("w1", 2, True)],
            },
            SwapConfig(
                swap=True,
                layer_swap=(LayerSwapRule(2, True),),
                op_swap=(OpSwapRule("mul", 1, (2,)), OpSwapRule("w1", 2, True)),
            ),
            id="S9",
        ),
        pytest.param(
            {"op_swap": [op_entry("a", 1, [0]), op_entry("b", 3, [1]), op_entry("a", 1, True)]},
            SwapConfig(swap=True, op_swap=(OpSwapRule("a", 1, True), OpSwapRule("b", 3, (1,)))),
            id="S9-group-of-an-op-collapses-at-its-first",
        ),
        *(
            pytest.param(
                {"layer_swap": [layer_entry(1, layers)], "op_swap": [op_entry("mul", 1, layers)]},
                SwapConfig(
                    swap=True,
                    layer_swap=(LayerSwapRule(1, tuple(layers)),),
                    op_swap=(OpSwapRule("mul", 1, tuple(layers)),),
                ),
                id=f"S14-{layers}",
            )
            for layers in ([3], [3, 5], (3,), (3, 4), [], ())
        ),
        pytest.param(
            {"layer_swap": [layer_entry(1, [1, 2]), layer_entry(2, [2, 3])]},
            SwapConfig(swap=True, layer_swap=(LayerSwapRule(1, (1, 2)), LayerSwapRule(2, (2, 3)))),
            id="S15-both-kept-for-the-plan",
        ),
        pytest.param(
            {"layer_swap": [layer_entry(2, False)]},
            SwapConfig(swap=True, layer_swap=(LayerSwapRule(2, False),)),
            id="S24-false",
        ),
        pytest.param({"layer_swap": []}, SwapConfig(swap=True, layer_swap=()), id="S24-no-layers"),
        pytest.param({"op_swap": [], "layer_swap": None}, SwapConfig(swap=True, op_swap=()), id="S24-no-ops"),
        pytest.param(
            {"layer_swap": layer_entry(7, [2])},
            SwapConfig(swap=True, layer_swap=(LayerSwapRule(7, (2,)),)),
            id="S25",
        ),
        pytest.param(
            {"op_swap": op_entry("mul", 7, [2])},
            SwapConfig(swap=True, op_swap=(OpSwapRule("mul", 7, (2,)),)),
            id="S25-op",
        ),
        pytest.param(
            {"op_swap": (op_entry(("mul", "w1"), 7, (2,)),)},
            SwapConfig(swap=True, op_swap=(OpSwapRule("mul", 7, (2,)), OpSwapRule("w1", 7, (2,)))),
            id="one-rule-per-name",
        ),
        pytest.param(
            {"layer_swap": [layer_entry("Auto", True)], "default_prefetch": "auto"},
            SwapConfig(swap=True, default_prefetch="auto", layer_swap=(LayerSwapRule("auto", True),)),
            id="E2-auto-is-accepted-here",
        ),
        pytest.param(
            {"layer_swap": None, "op_swap": None, "default_prefetch": None},
            SwapConfig(swap=True),
            id="null-is-absent",
        ),
    ],
)
def test_accepted(keys: dict[str, object], config: SwapConfig) -> None:
    document = swap_document(**keys)
    before = copy.deepcopy(document)
    assert load_config(document).swap_config == config
    assert document == before
    off = load_config({"swap_config": {**document["swap_config"], "swap": False}}).swap_config
    assert (off.layer_swap, off.op_swap) == (config.layer_swap, config.op_swap)


LAYERS = "true, false or a flat list of layer indices"
INDEX = "a layer index (a whole number, at least 0)"
FLAT = "Layers are global indices in one flat list."
AGREE = "expected the same backward_prefetch in all entries of"


@pytest.mark.parametrize(
    ("keys", "problems"),
    [
        pytest.param(
            {"layer_swap": [layer_entry(1, [2]), layer_entry(2, True)]},
            [
                f"swap_config.layer_swap[1]: {AGREE} `layer_swap`, found 1, 2. "
                "They must agree because swap_config.layer_swap[1] is for all layers."
            ],
            id="S10",
        ),
        pytest.param(
            {"layer_swap": [layer_entry(1, True), layer_entry(2, [1])]},
            [
                f"swap_config.layer_swap[1]: {AGREE} `layer_swap`, found 1, 2. "
                "They must agree because swap_config.layer_swap[0] is for all layers."
            ],
            id="S10-true-first",
        ),
        pytest.param(
            {"layer_swap": [layer_entry(1, [0]), layer_entry(2, [1]), layer_entry(1, True)]},
            [
                f"swap_config.layer_swap[2]: {AGREE} `layer_swap`, found 1, 2, 1. "
                "They must agree because swap_config.layer_swap[2] is for all layers."
            ],
            id="S10-known-at-the-third",
        ),
        pytest.param(
            {"op_swap": [op_entry("mul", 1, [2]), op_entry("mul", 2, True)]},
            [
                f"swap_config.op_swap[1]: {AGREE} op 'mul', found 1, 2. "
                "They must agree because swap_config.op_swap[1] is for all layers."
            ],
            id="S11",
        ),
        *(
            pytest.param(
                {key: [{"op_name": "mul", **entry} if key == "op_swap" else entry]},
                [f"swap_config.{key}[0].layers{suffix}"],
                id=f"S13-{key}-{layers}",
            )
            for key in ("layer_swap", "op_swap")
            for layers, suffix in (
                (3, f": expected {LAYERS}, found 3. Write [3]."),
                (3.0, f": expected {LAYERS}, found 3.0."),
                ([3.0], f"[0]: expected {INDEX}, found 3.0."),
                ([[3.0]], f": expected {LAYERS}, found [[3.0]]. {FLAT}"),
                ([True], f"[0]: expected {INDEX}, found true. As a number it would be layer 1."),
                ((3.0,), f"[0]: expected {INDEX}, found 3.0."),
                (((3.0,),), f": expected {LAYERS}, found [[3.0]]. {FLAT}"),
                # S14: tables pass the reference's first gate and die at its third
                ([[3]], f": expected {LAYERS}, found [[3]]. {FLAT}"),
                (((3, 4),), f": expected {LAYERS}, found [[3, 4]]. {FLAT}"),
                (None, f": expected {LAYERS}, found null."),
            )
            for entry in (layer_entry(1, layers),)
        ),
    ],
)
def test_rejected_rules(keys: dict[str, object], problems: list[str]) -> None:
    assert problems_of(swap_document(**keys)) == problems
    assert problems_of({"swap_config": {**keys, "swap": False}}) == problems


@pytest.mark.parametrize("value", [True, False, [0, 3], (0, 3)])
def test_selected_ops_take_bools_and_indices_with_swap(value: object) -> None:
    # E8: the document says bool or list; the reference's trainer rejects the bool and takes no tuple.
    document = {**swap_document(), "recompute_config": {"select_recompute": {"feed_forward": value}}}
    kept = tuple(value) if isinstance(value, list | tuple) else value
    assert load_config(document).recompute_config.select_recompute == {"feed_forward": kept}


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ([2, 1], (2, 1)),
        ((True, 1, False, 0), (True, 1, False, 0)),
        ([], ()),
        (((1, 0), [0, True]), ((1, 0), (0, True))),
        ([True, [0, 1]], (True, (0, 1))),
    ],
)
def test_tuples_and_bools_in_tables_per_stage(value: object, kept: object) -> None:
    config = {"recompute": value, "select_recompute": {"attention": value}}
    recompute = load_config({"recompute_config": config}).recompute_config
    assert repr(recompute.recompute) == repr(kept)
    assert repr(recompute.select_recompute) == repr({"attention": kept})


@pytest.mark.parametrize(
    ("swap", "recompute", "mode", "accepted"),
    [
        (True, {}, "smart_swap", True),
        (False, {"recompute": True}, "smart_swap", True),
        (False, {"recompute": [0, 0], "select_recompute": {"a": False}}, "adaptive", True),
        (False, {"select_recompute_exclude": {"a": False, "b": [0]}}, "adaptive", True),
        (False, {"mp_comm_recompute": False}, "adaptive", True),
        (True, {"compile_budget": 0.5, "select_recompute_exclude": {"a": [0]}}, "smart_swap", True),
        (True, {}, "adaptive", False),
        (False, {"recompute": [0, 1]}, "adaptive", False),
        (False, {"select_recompute": {"a": [[0, 1]]}}, "adaptive", False),
        (False, {"select_comm_recompute": ["a"]}, "adaptive", False),
        (False, {"select_recompute_exclude": ["a"]}, "adaptive", False),
        (False, {"select_comm_recompute_exclude": {"a": True}}, "adaptive", False),
        (False, {"compile_budget": 1}, "adaptive", False),
        (False, {"compile_budget": [0, 0.5]}, "adaptive", False),
    ],
)
def test_adaptive_wants_no_fates_written_by_hand(
    swap: bool, recompute: dict[str, object], mode: str, accepted: bool
) -> None:
    document = {"memory": {"mode": mode}, "swap_config": {"swap": swap}, "recompute_config": recompute}
    if accepted:
        assert load_config(document).memory.mode == mode
        return
    keys = ["swap_config.swap"] if swap else [f"recompute_config.{key}" for key in recompute]
    assert problems_of(document) == [
        f"memory.mode: expected no `{key}` beside adaptive, which chooses every fate itself, found both. "
        "Use smart_swap, which keeps what is written by hand."
        for key in keys
    ]


@pytest.mark.parametrize("word", ["off", "False", "'off'"])
def test_mode_off_is_off_however_yaml_reads_it(word: str) -> None:
    assert load_config(f"memory:\n  mode: {word}\n").memory.mode == "off"
