"""``explain`` names the row, what was requested and the rules; what would change a fate does change it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Run

Write = Callable[[str], Path]

CONFIG = """
swap_config:
  swap: true
  op_swap:
    - {op_name: attention, backward_prefetch: 20, layers: [0, 1]}
    - {op_name: feed_forward, backward_prefetch: 15, layers: [1, 2]}
recompute_config:
  select_recompute: {feed_forward: [0, 2]}
"""


@pytest.mark.parametrize(
    ("layer", "op", "path", "fate", "row", "policies"),
    [
        (0, "attention.flash_attention", "self_attn.flash_attention", "swap", "self_attn", ["op_swap[0]"]),
        (1, "mlp", "mlp", "swap", "mlp", ["op_swap[1]"]),
        (2, "feed_forward.mul", "mlp.mul", "recompute", "mlp", ["select_recompute", "op_swap[1]"]),
        (3, "mlp", "mlp", "keep", None, []),
    ],
)
def test_row_and_requests(
    layer: int,
    op: str,
    path: str,
    fate: str,
    row: str | None,
    policies: list[str],
    run: Run,
    write: Write,
    tiny: Path,
) -> None:
    ended = run("explain", str(layer), op, write(CONFIG), "-m", tiny, "--json")
    assert ended.code == 0
    (found,) = ended.document["ops"]
    assert (found["op"], found["fate"]) == (path, fate)
    assert (found["row"] or {"op_path": None})["op_path"] == row
    assert [requested["where"].rpartition(".")[2] for requested in found["policies"]] == policies
    gives_way = fate == "recompute"
    assert any("coupling rule 1" in item["reason"] for item in found["adjustments"]) is gives_way


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("mlp.act_fn", {"mlp.act_fn.silu": "recompute"}),
        ("mlp.act_fn.silu", {"mlp.act_fn.silu": "recompute"}),
        ("mlp", {"mlp.act_fn.silu": "recompute", "mlp": "keep"}),
        ("mlp.mul", {"mlp.mul": "keep"}),
    ],
)
def test_a_module_whose_ops_have_rows_of_their_own(
    asked: str, shown: dict[str, str], run: Run, write: Write, tiny: Path
) -> None:
    """What `check` shows of the same configuration."""
    config = write("recompute_config: {select_recompute: {mlp.act_fn: true}}\n")
    found = run("explain", "3", asked, config, "-m", tiny, "--json").document["ops"]
    assert {item["op"]: item["fate"] for item in found} == shown
    text = run("explain", "3", asked, config, "-m", tiny).out
    assert ("layer 3, mlp (but for the ops above): keep" in text) is (asked == "mlp")
    assert "(not applied: keep)" not in text


def test_alternatives_hold(run: Run, write: Write, tiny: Path) -> None:
    """Each fate that is offered is reached, and the fate that is there is not offered."""
    for layer, op, now in (("0", "mlp", "recompute"), ("1", "mlp", "swap"), ("3", "mlp", "keep")):
        (found,) = run("explain", layer, op, write(CONFIG), "-m", tiny, "--json").document["ops"]
        offered = {item["fate"]: item["got"] for item in found["alternatives"]}
        assert offered == {fate: fate for fate in ("keep", "swap", "recompute") if fate != now}


def test_an_alternative_written_down_does_what_it_says(run: Run, write: Write, tiny: Path) -> None:
    (found,) = run("explain", "3", "mlp", write(CONFIG), "-m", tiny, "--json").document["ops"]
    (swap,) = [item["change"] for item in found["alternatives"] if item["fate"] == "swap"]
    rule = swap.removeprefix("swap_config.op_swap: ")
    text = CONFIG.replace("  op_swap:\n", f"  op_swap:\n    - {rule}\n")
    assert run("explain", "3", "mlp", write(text), "-m", tiny, "--json").document["ops"][0]["fate"] == "swap"


def test_without_swap_numbers_are_counts(run: Run, write: Write, tiny: Path) -> None:
    config = write("recompute_config: {select_recompute: {feed_forward: [2]}}\n")
    fates = [
        run("explain", str(layer), "mlp", config, "-m", tiny, "--json").document["ops"][0]["fate"]
        for layer in range(4)
    ]
    assert fates == ["recompute", "recompute", "keep", "keep"]
    text = run("explain", "3", "mlp", config, "-m", tiny).out
    assert "0 to 3" in text


def test_bytes(run: Run, write: Write, tiny: Path) -> None:
    """mlp.mul gives tokens x 48 values of 2 bytes."""
    ended = run("explain", "0", "mlp.mul", write("{}"), "-m", tiny, "--seq", "40", "--batch", "3", "--json")
    assert ended.document["ops"][0]["saved_bytes"] == 3 * 40 * 48 * 2


def test_what_does_not_exist(run: Run, write: Write, tiny: Path) -> None:
    config = write(CONFIG)
    for layer, op, where in (("4", "mlp", "LAYER"), ("first", "mlp", "LAYER"), ("0", "feed_forwrd", "OP")):
        ended = run("explain", layer, op, config, "-m", tiny, "--json")
        assert ended.code == 1
        assert [problem["where"] for problem in ended.document["problems"]] == [where]
    assert "Did you mean 'feed_forward'?" in ended.document["problems"][0]["hint"]


def test_text_fits_into_80_columns(run: Run, write: Write, tiny: Path) -> None:
    text = run("explain", "2", "feed_forward.mul", write(CONFIG), "-m", tiny).out
    assert max(map(len, text.splitlines())) <= 80
    assert "layer 2, mlp.mul: recompute" in text
    assert "What would change it" in text


def test_what_the_planner_may_still_choose(run: Run, write: Write, tiny: Path) -> None:
    ended = run("explain", "2", "mlp.mul", write("memory: {mode: adaptive}\n"), "-m", tiny)
    assert "the planner (adaptive) may choose another fate" in " ".join(ended.out.split())
