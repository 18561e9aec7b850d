"""The page and its pictures: complete, self-contained, nothing beyond the edge or on other text."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from hf_actswap.report.pictures import (
    COLOURS,
    Chart,
    bytes_chart,
    loss_chart,
    measured_curve,
    memory_chart,
    steps_chart,
    swapped_cells,
    timeline_chart,
    with_loss,
)
from hf_actswap.report.run_facts import bytes_text, ms_text, run_facts
from hf_actswap.report.run_files import COUNTED, ReportError, Saving, read_run
from hf_actswap.report.write_report import NARROW_PX, WIDE_PX, write_report
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
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.elements.append((tag, dict(attrs)))
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
        "Loss",
        "Plan",
        "Run",
    ):
        assert f"<h2>{heading}</h2>" in text
    assert "Predicted and measured" not in text
    assert "self_attn.flash_attention" in text
    last = json.loads((swapped_run / "actswap" / "steps.jsonl").read_text().splitlines()[-1])
    assert written.facts.offloaded_bytes == last["stats"]["offloaded_bytes"] > 0
    assert bytes_text(written.facts.offloaded_bytes) in text


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
    stats = {"offloaded_bytes": 0, "stall_ms": 0.0, "host_peak_bytes": 0, "rejected": {HOSTILE: 7}}
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
    written = write_report(swapped_run, tmp_path / "page.html", tmp_path / "pictures")
    assert [path.stem for path in written.pictures] == ["memory", "timeline", "bytes", "loss", "steps"]
    for path in written.pictures:
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(head[16:20], "big") == 2 * WIDE_PX


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_a_missing_library_is_named_and_nothing_is_written(
    swapped_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ReportError, match=rf"{library}.*\n?.*pip install 'hf_actswap\[report\]'"):
        write_report(swapped_run, tmp_path / "deep" / "page.html", tmp_path / "deep")
    assert list(tmp_path.iterdir()) == []


def test_the_same_record_gives_the_same_page(planned_run: Path, tmp_path: Path) -> None:
    pages = [write_report(planned_run, tmp_path / f"{n}.html").page.read_text() for n in range(2)]
    assert pages[0] == pages[1]


def test_the_last_stage_counts_without_its_first_line(tmp_path: Path) -> None:
    def line(step: int, phase: str, ms: float, swapped: int) -> dict[str, Any]:
        stats = {"offloaded_bytes": swapped, "stall_ms": ms / 10, "host_peak_bytes": 9, "rejected": {}}
        return {"step": step, "phase": phase, "steps": 2, "step_ms": ms, "stats": stats}

    lines = [line(2, "search", 9, 80), line(4, "stable", 8, 60), line(6, "stable", 3, 40)]
    write_lines(tmp_path, [*lines, line(8, "stable", 5, 40)])
    facts = run_facts(read_run(tmp_path), None)
    assert (facts.step_ms, facts.offloaded_bytes, facts.stall_ms) == (4.0, 20, pytest.approx(0.2))


def charts(layers: int, width: float) -> dict[str, Chart]:
    lines: list[Any] = [
        {"step": 10 * n, "step_ms": 1e3 + n, "phase": "warm-up" if n < 3 else "stable", "loss": 5 - n / 20}
        for n in range(60)
    ]
    timeline = made_up_timeline(layers)
    budget = (100 + 3 * layers) << 20
    saving = Saving(21 << 20, COUNTED, budget)
    curve = measured_curve(made_up_memory(layers), budget, budget + (20 << 20), saving)
    return {
        "memory": memory_chart(curve, width),
        "timeline": timeline_chart(timeline, width),
        "bytes": bytes_chart(swapped_cells(timeline), width),
        "steps": steps_chart(lines, width),
        "loss": loss_chart(lines, width),
    }


@pytest.mark.parametrize("width", [WIDE_PX, NARROW_PX])
@pytest.mark.parametrize("layers", [1, 4, 32, 126])
def test_no_text_is_beyond_the_edge_or_on_other_text(layers: int, width: float) -> None:
    for name, chart in charts(layers, width).items():
        chart.figure.draw_without_rendering()
        beyond = set()  # ticks that matplotlib has ready, and does not draw
        for axis in (chart.axes.xaxis, chart.axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
            beyond |= {label for tick in ticks for label in (tick.label1, tick.label2)}
        texts = [text for text in chart.figure.findobj(Text) if text.get_text() and text not in beyond]
        places = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_visible()]
        assert len(places) > 2
        for text, box in places:
            assert -1 <= box.x0 < box.x1 <= chart.width + 1, (name, text)
            assert -1 <= box.y0 < box.y1 <= chart.height + 1, (name, text)
        for (one, box), (other, second) in combinations(places, 2):
            apart = box.x1 <= second.x0 or second.x1 <= box.x0 or box.y1 <= second.y0 or second.y1 <= box.y0
            assert apart, (name, one, other)


def test_the_stack_adds_up_to_what_is_in_use() -> None:
    curve = measured_curve(made_up_memory(4))
    assert [sum(sizes) for _, sizes in curve.points] == [
        sample.total_bytes for sample in made_up_memory(4).samples
    ]
    assert curve.peak == (3.0, 109 << 20)


def test_the_peak_without_a_plan_is_a_line_above_the_stack() -> None:
    memory = made_up_memory(4)
    saving = Saving(200 << 20, "measured in warm-up", 109 << 20)
    found = memory_chart(measured_curve(memory, saving=saving), WIDE_PX)
    (line,) = [line for line in found.axes.lines if line.get_linestyle() == "--"]
    assert set(line.get_ydata()) == {309.0}  # MiB
    assert max(patch.get_data().values.max() for patch in found.axes.patches) == 109.0
    (legend,) = found.figure.legends
    assert "without a plan 309 MiB" in [text.get_text() for text in legend.texts]
    assert found.title == "Memory over a step, measured: peak 109 MiB, without a plan 309 MiB"
    counted = measured_curve(memory, saving=Saving(200 << 20, COUNTED, 109 << 20))
    assert "without a plan at most 309 MiB" in memory_chart(counted, WIDE_PX).title
    nothing = measured_curve(memory, saving=Saving(0, "it keeps everything", 109 << 20))
    assert "without" not in memory_chart(nothing, WIDE_PX).title


def test_the_page_shows_the_saving_of_the_run_in_its_picture(swapped_run: Path) -> None:
    saving = read_run(swapped_run).saving
    assert saving is not None
    assert saving.without_peak_bytes is not None
    text = write_report(swapped_run).page.read_text()
    assert f">without a plan at most {bytes_text(saving.without_peak_bytes)}</text>" in text
    assert f"Peak without a plan: {COUNTED}." in text


def test_the_loss_is_that_of_the_record(swapped_run: Path) -> None:
    lines = read_run(swapped_run).steps
    chart = loss_chart(lines, WIDE_PX)
    losses = [loss for _, loss in with_loss(lines)]
    assert chart.titles == [f"step {at}: loss {loss:.4g}" for at, loss in enumerate(losses, 1)]
    (curve,) = chart.axes.lines[-1:]
    assert list(curve.get_ydata()) == losses
    bottom, top = chart.axes.get_ylim()
    assert max(losses) - min(losses) > 0.8 * (top - bottom)  # the scale is that of the losses


@pytest.mark.parametrize("width", [WIDE_PX, NARROW_PX])
def test_each_shape_has_its_own_title(width: float) -> None:
    """The title that a page shows for a box is of the copy that the box is drawn for."""
    timeline = made_up_timeline(3)
    chart = timeline_chart(timeline, width)
    drawn = re.findall(r'<path d="M (\S+) [^"]*" style="fill: ([^;"]*)[^>]*><title>([^<]*)<', chart.svg())
    assert [title for _, _, title in drawn] == [title for title in chart.titles if title]
    out = [float(x) for x, colour, _ in drawn if colour == "var(--c-swap)"]
    assert [x - out[0] for x in out] == pytest.approx(
        [copy.start_ms / timeline.step_ms * chart.px for copy in timeline.copies if copy.direction == "out"],
        abs=1e-3,
    )
    assert [title for _, colour, title in drawn if colour == "var(--c-stall)"] == [
        "waits 0.50 ms for layer 2, mlp.mul (in)"
    ]


def test_a_loss_that_is_no_number_is_marked_and_ends_nothing(tmp_path: Path) -> None:
    stats = {"offloaded_bytes": 0, "stall_ms": 0.0, "host_peak_bytes": 0, "rejected": {}}
    losses = [3.0, math.nan, 2.0, math.inf, "tensor", -math.inf, None]
    lines = [{"step": n, "step_ms": 1.0, "stats": stats, "loss": loss} for n, loss in enumerate(losses)]
    write_lines(tmp_path, lines)
    text = write_report(tmp_path).page.read_text()
    self_contained(text)
    assert re.findall(r"<li>step (\d): loss [^<]*\(beyond", text) == list("13456")
    assert '"nan' not in text.split("<h2>Loss</h2>")[1]
    (tmp_path / "actswap" / "steps.jsonl").write_text("".join(f"{json.dumps(lines[n])}\n" for n in (1, 3)))
    assert "<h2>Loss</h2>" not in write_report(tmp_path).page.read_text()


def test_a_keyboard_reaches_what_pointing_shows(planned_run: Path) -> None:
    """Lists open by a key; what scrolls has the focus in its turn, and a name; the focus is seen."""
    text = write_report(planned_run).page.read_text()
    elements = self_contained(text).elements
    scrolling = [
        which for tag, which in elements if tag == "pre" or which.get("class") in ("scroll", "listed")
    ]
    assert len(scrolling) > 5
    assert all(which["tabindex"] == "0" and which["aria-label"] for which in scrolling)
    assert all(which["role"] == "img" and which["aria-label"] for tag, which in elements if tag == "svg")
    assert ":focus-visible{outline:3px" in text
    figures = text.split("<figure>")[1:]
    assert figures
    for figure in figures:
        figure, _, _ = figure.partition("</figure>")
        pointed = re.findall(r"<title>(.*?)</title>", figure.split('<svg class="narrow"')[0])
        (listed,) = re.findall(
            r"<details><summary>.*?, as a list</summary>(.*?)</details>", figure, re.DOTALL
        )
        assert pointed
        assert re.findall(r"<li>(.*?)</li>", listed) == pointed


def test_every_colour_that_is_used_is_defined_in_both_themes(swapped_run: Path) -> None:
    text = write_report(swapped_run).page.read_text()
    used = set(re.findall(r"var\(--c-([a-z]+)\)", text))
    for theme in ("data-theme=light", "data-theme=dark", "prefers-color-scheme:dark"):
        block = text[text.index(theme) :].split("}")[0]
        assert used <= set(re.findall(r"--c-([a-z]+):", block))
    body = text[text.index("<body>") :]
    assert re.findall(r"#[0-9a-f]{3,8}\b", body) == []  # no colour that the theme does not decide
    assert len({to_hex(light) for light, _ in COLOURS.values()}) == len(COLOURS)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (15.5 * 2**20, "15.5 MiB"), (3 * 2**40, "3.00 TiB")],
)
def test_sizes(value: float, text: str) -> None:
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 ms"), (1.5, "1.50 ms"), (999.6, "1,000 ms"), (65_000, "65.0 s")]
)
def test_times(value: float, text: str) -> None:
    assert ms_text(value) == text
