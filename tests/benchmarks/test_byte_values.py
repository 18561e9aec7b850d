"""What a byte is worth: exact bytes, arithmetic from shapes, what runs again, and the page that says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

import hf_actswap
from benchmarks import byte_values
from benchmarks.byte_calls import ByteRow, Rates, Stopwatch, row_of, without, work_of
from benchmarks.byte_values import (
    SHAPES,
    TINY,
    by_shape,
    forward_ms,
    held_rows,
    layer_rows,
    page_situations,
    page_values,
    unit_bytes,
)
from tests.rehearsed import skip_times

META, CPU = torch.device("meta"), torch.device("cpu")
RATES = Rates(gemm_tflops=600, attention_tflops=450, hbm_tb_per_s=4.1)
HIDDEN_STATE = 8192 * 4096 * 2
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def of_8b() -> dict[str, ByteRow]:
    return {row.name: row for row in layer_rows(SHAPES["8b-8k"], META, RATES)}


def recorded(repository: Path, name: str) -> Results:
    (path,) = (repository / "benchmarks" / "results").glob(f"byte_values_{name}_*.json")
    rows: Results = json.loads(path.read_text(encoding="utf-8"))
    return rows


def test_bytes_are_those_of_the_shapes(of_8b: dict[str, ByteRow]) -> None:
    sizes = {name: row.saved_bytes / HIDDEN_STATE for name, row in of_8b.items() if row.saved_bytes}
    norm = {"to:0": 2.0, "rsqrt:0": 4 / (4096 * 2), "to:1": 1.0, "mul:1": 1.0}
    statistics = 32 * 4 / (4096 * 2)
    assert sizes == {
        **{f"input_layernorm.{name}": size for name, size in norm.items()},
        **{f"post_attention_layernorm.{name}": size for name, size in norm.items()},
        "self_attn.add:0": 1.0,
        "self_attn.add:1": 0.25,
        "self_attn.v_proj.linear:0": 0.25,
        "self_attn.flash_attention:0": 1.0 + statistics,
        **dict.fromkeys(("mlp.gate_proj.linear:0", "mlp.up_proj.linear:0"), 3.5),
        **dict.fromkeys(("mlp.act_fn.silu:0", "mlp.mul:0"), 3.5),
    }
    assert {row.name for row in of_8b.values() if row.root} == {"add:0", "add:1"}


def test_what_runs_again_goes_back_to_what_is_held(of_8b: dict[str, ByteRow]) -> None:
    reruns = {name: row.reruns for name, row in of_8b.items()}
    assert reruns["mlp.gate_proj.linear:0"] == ("mlp.gate_proj.linear:0",)
    assert reruns["add:1"] == ("mlp.down_proj.linear:0", "add:1")
    assert reruns["add:0"] == ("self_attn.o_proj.linear:0", "add:0")
    # The projection before the rotation is saved by nobody.
    assert reruns["self_attn.add:1"][0] == "self_attn.k_proj.linear:0"
    assert "self_attn.q_proj.linear:0" not in reruns["self_attn.add:1"]
    assert reruns["post_attention_layernorm.to:0"] == ("post_attention_layernorm.to:0",)
    for row in of_8b.values():
        assert row.rerun_ms == pytest.approx(sum(of_8b[name].ms for name in row.reruns))


def test_arithmetic_is_flops_and_traffic_over_rates(of_8b: dict[str, ByteRow]) -> None:
    gate = of_8b["mlp.gate_proj.linear:0"]
    assert (gate.kind, gate.flops) == ("matmul", 2 * 8192 * 4096 * 14336)
    assert gate.ps_per_byte == pytest.approx(4096 / 600)
    attention = of_8b["self_attn.flash_attention:0"]
    assert (attention.kind, attention.flops) == ("attention", 4 * 8192 * 8192 * 4096 // 2)
    assert attention.ms == pytest.approx(attention.flops / 450e9)
    silu = of_8b["mlp.act_fn.silu:0"]
    assert (silu.kind, silu.flops, silu.traffic_bytes) == ("elementwise", 0, 2 * silu.saved_bytes)
    assert silu.ps_per_byte == pytest.approx(2 / 4.1)


def test_work_of_attention_that_is_not_causal_is_double() -> None:
    query, key = torch.empty(2, 4, 8, 16), torch.empty(2, 2, 8, 16)
    whole = work_of("scaled_dot_product_attention", [query, key, key], [query], causal=False)
    half = work_of("scaled_dot_product_attention", [query, key, key], [query], causal=True)
    assert (whole.flops, half.flops) == (4 * 2 * 4 * 8 * 8 * 16, 2 * 2 * 4 * 8 * 8 * 16)


def test_what_is_expanded_is_read_once() -> None:
    one = torch.empty(4, 1)
    assert work_of("mul", [one.expand(4, 100)], [torch.empty(4, 100)], False).traffic_bytes == 16 + 1600


def test_without_counts_what_is_held_in_place_of_what_is_dropped(of_8b: dict[str, ByteRow]) -> None:
    rows = list(of_8b.values())
    saved_bytes = sum(row.saved_bytes for row in rows)
    assert without(rows, [], HIDDEN_STATE) == (without(rows, ["add:0"], HIDDEN_STATE))
    assert without(rows, [], HIDDEN_STATE).held_bytes == saved_bytes
    dropped = ["input_layernorm.to:0"]  # two hidden states less, its input more
    choice = without(rows, dropped, HIDDEN_STATE)
    assert choice.held_bytes == saved_bytes - HIDDEN_STATE
    assert choice.rerun_ms == of_8b["input_layernorm.to:0"].ms
    both = ["mlp.act_fn.silu:0", "mlp.gate_proj.linear:0"]
    choice = without(rows, both, HIDDEN_STATE)
    assert choice.held_bytes == saved_bytes - 7 * HIDDEN_STATE
    assert choice.rerun_ms == pytest.approx(sum(of_8b[name].ms for name in both))
    nothing_left = without(rows, [row.name for row in rows], HIDDEN_STATE)
    assert nothing_left.held_bytes == HIDDEN_STATE
    assert "mlp.down_proj.linear:0" in of_8b
    again = forward_ms([{"ms": row.ms} for row in rows])
    assert nothing_left.rerun_ms < again - of_8b["mlp.down_proj.linear:0"].ms


class Counting:
    """Stands for a clock; counts how often each call is run by it."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def ms(self, work: Any, run: Any) -> float:
        assert isinstance(run(), torch.Tensor)
        self.kinds.append(work.kind)
        return 2.0


def test_a_real_layer_has_the_calls_of_the_fake_one() -> None:
    clock = Counting()
    real = layer_rows(TINY, CPU, clock)
    fake = layer_rows(TINY, META, RATES)
    assert [(row.name, row.saved_bytes, row.flops, row.traffic_bytes, row.reruns) for row in real] == [
        (row.name, row.saved_bytes, row.flops, row.traffic_bytes, row.reruns) for row in fake
    ]
    assert clock.kinds == [row.kind for row in real]
    assert clock.kinds.count("matmul") == 7
    assert clock.kinds.count("attention") == 1
    assert {row.ms for row in real} == {2.0}


def test_stopwatch_takes_the_median_of_the_timed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 0.0, 9.0, 0.0, 2.0])
    monkeypatch.setattr("benchmarks.byte_calls.time.perf_counter", lambda: next(times))
    ran: list[int] = []
    work = work_of("mul", [torch.ones(1)], [torch.ones(1)], False)
    assert Stopwatch(CPU, runs=3).ms(work, lambda: ran.append(1)) == 2000.0
    assert len(ran) == 3 + 3


def test_one_command_measures_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs it")
    path = tmp_path / "values.json"
    assert byte_values.main(["--device", "cpu", "--runs", "1", "--out", str(path)]) == 0
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert {(row["source"], row["device"], row["link_source"]) for row in rows} == {
        ("measured", "cpu", "none")
    }
    assert all(row["ms"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert "no link: a CPU copies inside one memory (draw one with --link-gb-per-s)" in printed
    assert "ARITHMETIC" not in printed


def test_arithmetic_says_that_it_is_none_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "values.json"
    arguments = ["--model", "arithmetic", "--shapes", TINY.name, "--link-gb-per-s", "25", "--out", str(path)]
    assert byte_values.main(arguments) == 0
    rows = json.loads(path.read_text(encoding="utf-8"))
    assert {(row["source"], row["link_source"], row["link_ps_per_byte"]) for row in rows} == {
        ("arithmetic", "argument", 40.0)
    }
    printed = capsys.readouterr().out
    assert "ARITHMETIC, not measured" in printed
    assert "link 25.0 GB/s (argument): 40.0 ps/B" in printed


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--link-gb-per-s", "-1"]])
def test_numbers_must_be_positive(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        byte_values.main(arguments)
    assert f"argument {arguments[0]}: more than 0, found {arguments[1]}" in capsys.readouterr().err


@pytest.mark.gpu
def test_one_layer_is_measured_on_a_device() -> None:
    skip_times()
    device = torch.accelerator.current_accelerator()
    assert device is not None
    shape = SHAPES["8b-8k"]
    measured = {row.name: row for row in layer_rows(shape, device, Stopwatch(device, runs=5))}
    fake = {row.name: row for row in layer_rows(shape, META, RATES)}
    assert measured.keys() == fake.keys()
    assert all(row.ms > 0 for row in measured.values())
    assert measured["mlp.gate_proj.linear:0"].ms > measured["mlp.act_fn.silu:0"].ms


def page(repository: Path) -> str:
    return (repository / "docs" / "choosing.md").read_text(encoding="utf-8")


def test_the_page_has_the_recorded_numbers(repository: Path) -> None:
    text, rows = page(repository), recorded(repository, "arithmetic")
    assert page_values(rows) in text
    assert page_situations(rows) in text
    panels = by_shape(rows)
    assert list(panels) == ["8b-8k", "8b-32k"]
    hidden = {}
    for name, panel in panels.items():
        hidden[name] = forward_ms(panel) * 1e9 / panel[0]["link_ps_per_byte"] / unit_bytes(panel[0])
    assert f"(8.4 ms at 8,192 tokens), {hidden['8b-8k']:.1f} u can leave" in text
    assert f"{forward_ms(panels['8b-8k']):.1f} ms" == "8.4 ms"
    assert f"{hidden['8b-8k']:.1f} u at 8,192 tokens, {hidden['8b-32k']:.1f} at 32,768" in text
    assert f"only what is hidden, {hidden['8b-8k'] * 25 / 55:.1f} u" in text
    values = [row["ps_per_byte"] for panel in panels.values() for row in held_rows(panel)[2:]]
    assert f"{min(values):.1f}" == "0.4"
    prices = {row["op"]: row["ps_per_byte"] for row in panels["8b-32k"]}
    assert f"{prices['self_attn.flash_attention']:.0f}" == "72"
    assert "takes between 0.4 and 72" in text
    for rate, price in re.findall(r"\| (\d+) \| (\d+\.\d) \|", text):
        assert f"{1000 / float(rate):.1f}" == price


def test_elementwise_ops_drop_what_the_page_says(repository: Path) -> None:
    panel = by_shape(recorded(repository, "arithmetic"))["8b-8k"]
    rows, unit = [row_of(row) for row in panel], unit_bytes(panel[0])
    dropped = [row for row in rows if row.kind == "elementwise" and row.saved_bytes and "norm" in row.op]
    dropped += [row for row in rows if row.name in ("mlp.act_fn.silu:0", "mlp.mul:0")]
    saved_bytes = sum(row.saved_bytes for row in dropped)
    before = sum(row.saved_bytes for row in rows)
    held = without(rows, [row.name for row in dropped], unit).held_bytes - (before - saved_bytes)
    assert f"({saved_bytes / unit:.0f} u, in whose place {held / unit:.0f} u are held" in page(repository)


def test_a_measured_layer_has_the_order_that_the_page_says(repository: Path) -> None:
    """Attention, then matrix products, then elementwise ops; of the CPU's numbers only that is used."""
    (panel,) = by_shape(recorded(repository, "cpu")).values()
    assert panel[0]["source"] == "measured"
    prices = {row["name"]: row["ps_per_byte"] for row in panel}
    products = [prices["mlp.gate_proj.linear:0"], prices["mlp.up_proj.linear:0"], prices["add:1"]]
    elementwise = [prices[name] for name in ("mlp.act_fn.silu:0", "mlp.mul:0", "input_layernorm.mul:1")]
    assert prices["self_attn.flash_attention:0"] > max(products) > min(products) > max(elementwise)


def test_the_picture_is_drawn_from_the_recorded_rows(repository: Path) -> None:
    pictures = pytest.importorskip("benchmarks.pictures", reason="matplotlib is not installed")
    (path,) = re.findall(r"!\[.*?\]\((.*?)\)", page(repository))
    digest = pictures.digest(recorded(repository, "arithmetic"))
    assert digest.encode() in (repository / "docs" / path).read_bytes()


def test_the_configurations_of_the_page_do_what_it_says(repository: Path) -> None:
    texts = re.findall(r"^```yaml\n(.*?)^```$", page(repository), flags=re.MULTILINE | re.DOTALL)
    config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=3)
    shape = hf_actswap.model_structure(LlamaForCausalLM(config).to(torch.bfloat16))
    short, half, edge = (
        hf_actswap.resolve_plan(hf_actswap.load_config(yaml.safe_load(text)), shape) for text in texts
    )
    for plan in (short, half):
        for path in ("input_layernorm.to", "post_attention_layernorm.mul", "mlp.act_fn.silu", "mlp.mul"):
            assert {plan.fate(layer, path) for layer in range(3)} == {"recompute"}
        assert plan.fate(1, "mlp.gate_proj.linear") == "keep"
    core = "self_attn.flash_attention"
    assert (short.fate(1, core), half.fate(1, core), half.fate(1, "self_attn.add")) == (
        "keep",
        "swap",
        "swap",
    )
    assert {edge.fate(layer, "") for layer in range(3)} == {"recompute"}
    assert {edge.fate(layer, "output") for layer in (0, 1)} == {"swap"}
