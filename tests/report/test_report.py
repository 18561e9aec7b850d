"""The page and its pictures: complete, self-contained, nothing beyond the edge or on other text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from hf_actswap.report.bytes_chart import bytes_chart, swapped_cells
from hf_actswap.report.drawing import COLOURS, Area, Box, Drawing, Label, Stroke, text_width
from hf_actswap.report.memory_chart import measured_curve, memory_chart
from hf_actswap.report.page import NARROW_PX, WIDE_PX
from hf_actswap.report.run_facts import run_facts
from hf_actswap.report.run_files import ReportError, read_run
from hf_actswap.report.scales import Scale, ms_text, size_text
from hf_actswap.report.steps_chart import steps_chart
from hf_actswap.report.timeline_chart import timeline_chart
from hf_actswap.report.write_report import write_report
from tests.engine.tiny_models import NUM_LAYERS, plan_of, swap_rows

from .recorded_runs import made_up_memory, made_up_timeline, train_recorded, write_lines

GIB = 2**30
HOSTILE = "</pre><script>alert(1)</script><img src=http://example.org/x>"


@pytest.fixture(scope="module")
def swapped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swapped")
    train_recorded(folder, plan_of(*swap_rows(["self_attn.flash_attention"], range(NUM_LAYERS))))
    return folder


@pytest.fixture(scope="module")
def planned_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    memory = {"mode": "adaptive", "warmup_steps": 2, "search_steps": 2, "reduce_by_gib": 20_000 / GIB}
    train_recorded(folder, {"memory": memory}, count=10)
    return folder


class _Tags(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def self_contained(text: str) -> _Tags:
    tags = _Tags(text)
    assert tags.open == []
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(tags.tags)
    assert not {"src", "href", "xlink:href"} & {name for name, _ in tags.attributes}
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    assert "url(" not in text
    assert "@import" not in text
    return tags


def test_the_page_of_a_run_that_swaps(swapped_run: Path) -> None:
    written = write_report(swapped_run)
    assert written.page == swapped_run / "actswap" / "report.html"
    text = written.page.read_text()
    self_contained(text)
    for heading in (
        "Memory over a step",
        "Timeline of a step",
        "Swapped bytes by layer and op",
        "Plan",
        "Run",
    ):
        assert f"<h2>{heading}</h2>" in text
    assert "Predicted and measured" not in text
    assert "self_attn.flash_attention" in text
    last = json.loads((swapped_run / "actswap" / "steps.jsonl").read_text().splitlines()[-1])
    assert written.facts.offloaded_bytes == last["stats"]["offloaded_bytes"] > 0
    assert size_text(written.facts.offloaded_bytes) in text


def test_the_page_of_a_planned_run(planned_run: Path, tmp_path: Path) -> None:
    written = write_report(planned_run, tmp_path / "deep" / "page.html")
    text = written.page.read_text()
    self_contained(text)
    for heading in ("Memory over a step, predicted", "Bytes by layer and op", "What the planner tried"):
        assert f"<h2>{heading}</h2>" in text
    compared = {item.name: item for item in written.facts.compared}
    peak = compared["peak memory"]
    assert peak.predicted == pytest.approx(peak.measured, rel=0.05)
    assert sum(trial["chosen"] for trial in written.facts.trials) == 1
    json.dumps(written.facts.document())


def test_what_is_recorded_is_shown_as_text(tmp_path: Path) -> None:
    stats = {"offloaded_bytes": 0, "stall_ms": 0.0, "host_peak_bytes": 0, "refused": {HOSTILE: 7}}
    write_lines(tmp_path, [{"step": 1, "step_ms": 1.0, "stats": stats, "phase": HOSTILE}] * 3)
    about = {name: HOSTILE for name in ("model", "family", "device", "config", "started")}
    (tmp_path / "actswap" / "run.json").write_text(json.dumps({**about, "versions": {"torch": HOSTILE}}))
    text = write_report(tmp_path).page.read_text()
    self_contained(text)
    assert "&lt;script&gt;" in text


def test_a_record_of_nothing_but_its_beginning(tmp_path: Path) -> None:
    write_lines(tmp_path, [])
    text = write_report(tmp_path).page.read_text()
    self_contained(text)
    assert "<svg" not in text


def test_pictures_as_files(swapped_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = write_report(swapped_run, tmp_path / "page.html", tmp_path / "pictures")
    assert [path.stem for path in written.pictures] == ["memory", "timeline", "bytes", "steps"]
    for path in written.pictures:
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(head[16:20], "big") == 2 * WIDE_PX


def test_without_matplotlib_only_files_are_refused(
    swapped_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("hf_actswap.report.picture_files.importlib.import_module", missing)
    write_report(swapped_run, tmp_path / "page.html")
    with pytest.raises(ReportError, match=r"pip install 'hf_actswap\[report\]'"):
        write_report(swapped_run, tmp_path / "page.html", tmp_path)


def test_the_last_stage_counts_without_its_first_line(tmp_path: Path) -> None:
    def line(step: int, phase: str, ms: float, swapped: int) -> dict[str, Any]:
        stats = {"offloaded_bytes": swapped, "stall_ms": ms / 10, "host_peak_bytes": 9, "refused": {}}
        return {"step": step, "phase": phase, "steps": 2, "step_ms": ms, "stats": stats}

    lines = [line(2, "search", 9, 80), line(4, "stable", 8, 60), line(6, "stable", 3, 40)]
    write_lines(tmp_path, [*lines, line(8, "stable", 5, 40)])
    facts = run_facts(read_run(tmp_path), None)
    assert (facts.step_ms, facts.offloaded_bytes, facts.stall_ms) == (4.0, 20, pytest.approx(0.2))


def drawings(layers: int, width: float) -> dict[str, Drawing]:
    lines = [
        {"step": 10 * n, "step_ms": 1000.0 + n, "phase": "warm-up" if n < 3 else "stable"} for n in range(60)
    ]
    timeline = made_up_timeline(layers)
    budget = (100 + 3 * layers) << 20
    return {
        "memory": memory_chart(measured_curve(made_up_memory(layers), budget, budget + (20 << 20)), width),
        "timeline": timeline_chart(timeline, width),
        "bytes": bytes_chart(swapped_cells(timeline), width),
        "steps": steps_chart(lines, width),
    }


@pytest.mark.parametrize("width", [WIDE_PX, NARROW_PX])
@pytest.mark.parametrize("layers", [1, 4, 32, 126])
def test_nothing_is_beyond_the_edge_or_on_other_text(layers: int, width: float) -> None:
    for name, drawing in drawings(layers, width).items():
        labels = []
        for shape in drawing.shapes:
            assert shape.means in COLOURS
            match shape:
                case Box():
                    corners = [(shape.x, shape.y), (shape.x + shape.width, shape.y + shape.height)]
                case Label():
                    wide = text_width(shape.text, shape.size)
                    left = shape.x - wide * {"start": 0, "middle": 0.5, "end": 1}[shape.anchor]
                    corners = [(left, shape.y - 0.7 * shape.size), (left + wide, shape.y)]
                    labels.append((shape.text, corners))
                case Area() | Stroke():
                    corners = list(shape.points)
            for x, y in corners:
                assert -1 <= x <= drawing.width + 1, (name, shape)
                assert -1 <= y <= drawing.height + 1, (name, shape)
        for (one, box), (other, second) in combinations(labels, 2):
            assert not overlap(box, second), (name, one, other)


def overlap(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> bool:
    (left, top), (right, bottom) = one
    (from_x, from_y), (to_x, to_y) = other
    return left < to_x and from_x < right and top < to_y and from_y < bottom


def test_the_stack_adds_up_to_what_is_in_use() -> None:
    curve = measured_curve(made_up_memory(4))
    assert [sum(sizes) for _, sizes in curve.points] == [
        sample.total_bytes for sample in made_up_memory(4).samples
    ]
    assert curve.peak == (3.0, 109 << 20)


def test_every_colour_that_is_used_is_defined_in_both_themes(swapped_run: Path) -> None:
    text = write_report(swapped_run).page.read_text()
    used = set(re.findall(r"var\(--c-([a-z]+)\)", text))
    for theme in ("data-theme=light", "data-theme=dark", "prefers-color-scheme:dark"):
        block = text[text.index(theme) :].split("}")[0]
        assert used <= set(re.findall(r"--c-([a-z]+):", block))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (15.5 * 2**20, "15.5 MiB"), (3 * 2**40, "3.00 TiB")],
)
def test_sizes(value: float, text: str) -> None:
    assert size_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 ms"), (1.5, "1.50 ms"), (999.6, "1,000 ms"), (65_000, "65.0 s")]
)
def test_times(value: float, text: str) -> None:
    assert ms_text(value) == text


def test_ticks_are_round_and_within() -> None:
    assert Scale(118.0, 0, 1).ticks(5) == [0, 50, 100]
    assert Scale(0.35, 0, 1).ticks(4) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert Scale(0.0, 0, 1).ticks(4) == [0]
