"""Communication on paper: the bytes are those that are counted, the times those of a ring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

from hf_actswap.cli.options import ModelRequest
from hf_actswap.cli.step import StepShape, profile_of
from hf_actswap.cli.subject import AnalysedModel, subject
from hf_actswap.config import load_config
from hf_actswap.planner import Profile, device_rates
from hf_actswap.planner.cost.exchanges import Exchange, exchanged
from hf_actswap.planner.cost.tensor_axis import tensor_axis
from hf_actswap.planner.devices import Fabric
from tests.planner.tensor_axis_formulas import Llama, Setting, tensor_axis_bytes
from tests.planner.tensor_axis_worker import CASES, RANKS, run_on_rank
from tests.processes import launched, result

TOKENS = 512
FABRIC = Fabric("a test", bytes_per_ms=1000.0, latency_ms=0.5)

exchanged_by_processes = launched(run_on_rank, RANKS, 150)


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_the_formulas_are_what_processes_exchange(name: str, exchanged_by_processes: Path) -> None:
    expected = tensor_axis_bytes(CASES[name].model, CASES[name].setting)
    for rank in range(RANKS):
        assert result(exchanged_by_processes, name, rank) == expected


def divided(
    folder: Path, ranks: int, sequence_parallel: bool, kv_heads: int
) -> Iterator[tuple[AnalysedModel, Profile]]:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        vocab_size=64,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    parallel = {"tensor_parallel_size": ranks, "sequence_parallel_enabled": sequence_parallel}
    with subject(ModelRequest(str(folder), "bf16"), load_config({"parallel_config": parallel})) as found:
        yield found, profile_of(found, StepShape(1, TOKENS, "H200", None, "adamw"))


@pytest.mark.parametrize(
    ("ranks", "sequence_parallel", "kv_heads"),
    [
        (4, True, 2),
        pytest.param(2, True, 4, marks=pytest.mark.slow),
        pytest.param(2, False, 4, marks=pytest.mark.slow),
        pytest.param(4, False, 1, marks=pytest.mark.slow),
    ],
)
def test_bytes_are_those_of_the_formulas(
    ranks: int, sequence_parallel: bool, kv_heads: int, tmp_path: Path
) -> None:
    sizes = Llama(64, 96, 2, 8, kv_heads, 8, 64)
    expected = tensor_axis_bytes(sizes, Setting(ranks, sequence_parallel, TOKENS, 2, 4))
    for found, profile in divided(tmp_path, ranks, sequence_parallel, kv_heads):
        counted: Counter[tuple[str, str]] = Counter()
        for item in tensor_axis(found.model, found.shape, profile):
            counted[item.phase, item.kind] += item.whole_bytes
        assert dict(counted) == expected


def test_what_hides_is_the_products_beside(tmp_path: Path) -> None:
    for found, profile in divided(tmp_path, 2, True, 4):
        products = sum(
            op_event.forward_ms
            for op_event in profile.op_events
            if op_event.call[1].endswith(
                ("q_proj.linear", "k_proj.linear", "v_proj.linear", "gate_proj.linear")
            )
            or op_event.call[1].endswith("up_proj.linear")
            or op_event.call[0] == "head"
        )
        beside = [item for item in tensor_axis(found.model, found.shape, profile) if item.beside_ms]
        assert {item.kind for item in beside} == {"re-gather", "reduce_scatter"}
        assert {item.phase for item in beside} == {"backward"}
        for kind in ("re-gather", "reduce_scatter"):
            of_kind = [item.beside_ms for item in beside if item.kind == kind]
            assert len(of_kind) == 2 * 2 + 1  # of each layer, and the head's
            assert sum(of_kind) == pytest.approx(products)


def test_times_of_a_ring() -> None:
    gather, total = Exchange("forward", "all_gather", 4000), Exchange("backward", "all_reduce", 4000, 2.0)
    assert gather.ms(4, FABRIC) == pytest.approx(3.0 + 0.5)
    assert total.ms(4, FABRIC) == pytest.approx(6.0 + 0.5)
    found = exchanged([gather, total], 4, FABRIC)
    assert (found.sent_bytes, found.collectives) == (9000, 2)
    assert found.ms == pytest.approx(10.0)
    assert found.added_ms == pytest.approx(8.0)  # 2 of 6.5 are hidden
    hidden = exchanged([Exchange("backward", "all_reduce", 4000, 99.0)], 4, FABRIC)
    assert hidden.added_ms == 0
    assert exchanged([gather], 1, FABRIC).ms == 0


def test_half_of_what_a_data_sheet_gives_for_both_directions() -> None:
    rates = {name: device_rates(name).fabric for name in ("H200", "H100", "A100-80", "B200", "cpu")}
    gigabytes = {name: fabric and fabric.bytes_per_ms / 1e6 for name, fabric in rates.items()}
    assert gigabytes == {"H200": 450, "H100": 450, "A100-80": 300, "B200": 900, "cpu": None}


@pytest.mark.slow
def test_a_whole_model_says_nothing(tmp_path: Path) -> None:
    for found, profile in divided(tmp_path, 1, False, 4):
        assert tensor_axis(found.model, found.shape, profile) == ()
