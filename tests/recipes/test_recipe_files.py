"""The YAML files: the documents' cases as they stand there, and each opening with how it is run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_actswap.cli.longest import INPUTS_SWAPPED, RECOMPUTED
from hf_actswap.config import load_config
from hf_actswap.plan import model_structure
from hf_actswap.plan.tiles import tile_ladder
from tests.engine.tiny_models import tiny_llama

CASES = ["case1_default_swap", "case2_layer_swap", "case3_op_swap", "case4_swap_with_recompute"]
PLANNED = {"smart_swap": "smart_swap", "adaptive_memory": "adaptive"}
FILES = [*CASES, *PLANNED, "long_sequence", "sample_cpu", "sequence_parallel", "wikitext_cpu"]


def body(path: Path) -> str:
    """The file without its opening comment."""
    return path.read_text(encoding="utf-8").partition("\n\n")[2]


@pytest.mark.parametrize("name", FILES)
def test_a_file_opens_with_the_command_that_runs_it(name: str, recipes: Path) -> None:
    comment = (recipes / f"{name}.yaml").read_text(encoding="utf-8").partition("\n\n")[0]
    assert all(line.startswith("#") for line in comment.splitlines())
    command = comment.replace("\\\n#", "")
    assert re.search(rf"accelerate launch .*recipes/llama_swap\.py recipes/{name}\.yaml", command)
    assert "look for" in comment
    assert "#" not in body(recipes / f"{name}.yaml")


@pytest.mark.parametrize(("number", "name"), list(enumerate(CASES)))
def test_a_case_is_the_documents_word_for_word(number: int, name: str, recipes: Path) -> None:
    document = recipes.parent.parent / "shared" / "seeds" / "mindformers_fine_grained_activations_swap.txt"
    if not document.is_file():
        pytest.skip("the document does not lie beside the checkout")
    blocks = re.findall(
        r"```yaml\n(context:\n.*?swap_config:\n.*?)```", document.read_text("utf-8"), re.DOTALL
    )
    assert len(blocks) == len(CASES)
    assert body(recipes / f"{name}.yaml") == blocks[number]


def op(name: str, prefetch: int, layers: list[int]) -> dict[str, Any]:
    return {"op_name": name, "backward_prefetch": prefetch, "layers": layers}


OPS = [op("attention", 20, [0, 1, 2]), op("attention", 10, [3]), op("feed_forward", 15, [1, 2])]


@pytest.mark.parametrize(
    ("name", "swap", "select_recompute"),
    [
        (CASES[0], {"swap": True, "default_prefetch": 10}, False),
        (CASES[1], {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": [0, 3]}]}, False),
        (CASES[2], {"swap": True, "op_swap": OPS}, False),
        (CASES[3], {"swap": True, "op_swap": OPS}, {"feed_forward": [0, 3]}),
    ],
)
def test_what_a_case_says(name: str, swap: Any, select_recompute: Any, recipes: Path) -> None:
    config = load_config(recipes / f"{name}.yaml")
    recompute = {"select_recompute": select_recompute, "select_comm_recompute": False}
    expected = {"swap_config": swap, "recompute_config": recompute}
    assert config.num_layers == 4
    assert config == load_config(expected | {"model": {"model_config": {"num_layers": 4}}})


def test_the_demo_needs_no_network_and_swaps(recipes: Path) -> None:
    document = yaml.safe_load(body(recipes / "sample_cpu.yaml"))
    assert document["dataset"] == "sample"
    assert document["use_cpu"] is True
    assert document["logging_steps"] == 10
    assert load_config({"swap_config": document["swap_config"]}).swap_config.swap is True


def test_the_parallel_one_needs_no_network_and_is_parallel(recipes: Path) -> None:
    document = yaml.safe_load(body(recipes / "sequence_parallel.yaml"))
    assert (document["dataset"], document["use_cpu"]) == ("sample", True)
    config = load_config({"parallel_config": document["parallel_config"]}).parallel_config
    assert (config.tensor_parallel_size, config.sequence_parallel_enabled) == (2, True)


@pytest.mark.parametrize(("name", "mode"), list(PLANNED.items()))
def test_the_planned_ones_need_no_network_and_name_no_fates(name: str, mode: str, recipes: Path) -> None:
    document = yaml.safe_load(body(recipes / f"{name}.yaml"))
    assert (document["dataset"], document["use_cpu"]) == ("sample", True)
    config = load_config({"memory": document["memory"]})
    assert config.memory.mode == mode
    assert config == load_config({"memory": vars(config.memory)})
    assert document["max_steps"] > config.memory.warmup_steps + config.memory.search_steps
    assert not {"swap_config", "recompute_config"} & set(document)


def test_the_long_sequence_is_what_plan_longest_writes(recipes: Path) -> None:
    document = yaml.safe_load(body(recipes / "long_sequence.yaml"))
    written = {key: document[key] for key in ("swap_config", "recompute_config", "tile_config")}
    model, untiled = tiny_llama(), load_config(INPUTS_SWAPPED + RECOMPUTED)
    *_, (tiles, _) = tile_ladder(untiled, model, model_structure(model))
    assert load_config(written) == replace(untiled, tile_config=tiles)
