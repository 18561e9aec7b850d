"""Will it fit, in a browser: what the page of `examples/space` says, and the page in headless Chromium."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from hf_actswap import load_config, load_plan
from tests.docs.pages import script

SMALL = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
PLANNED = {"seq": "8k", "budget": "190MiB"}
"""What is too much for the model without a plan, and fits with one."""


@pytest.fixture(scope="module")
def answers() -> ModuleType:
    """The script that answers, which needs no Gradio."""
    pytest.importorskip("matplotlib", reason="it draws the picture")
    return script("../examples/space/answers")


def answer(answers: ModuleType, folder: Path, model: str, **fields: Any) -> Any:
    usual = {"gpu": "H200", "method": "full", "rank": 16, "seq": "4096", "batch": 1, "budget": ""}
    return answers.answer(folder, model, **usual | fields)


def test_an_answer_has_all_that_the_page_shows(answers: ModuleType, tmp_path: Path) -> None:
    found = answer(answers, tmp_path, json.dumps(SMALL), **PLANNED)
    assert found.verdict.startswith("Fits with this plan: ")
    rows = [line.split(" | ")[0].strip("| ") for line in found.table.splitlines()]
    assert rows[2:] == ["nothing", "recompute all", "planned"]
    assert "(too much)" in found.table
    bars = [[bar.get_width() for bar in axes.patches] for axes in found.picture.axes]
    assert [len(widths) for widths in bars] == [3 * len(answers.AT_THE_PEAK), 3 * len(answers.BY_FATE)]
    assert min(map(min, bars)) >= 0
    assert 'actswap="plan.json"' in found.configuration
    memory = load_config(yaml.safe_load(found.configuration)).memory
    assert (memory.mode, memory.plan_file, memory.budget_gib) == ("adaptive", "plan.json", 0.1855)
    assert load_plan(found.plan_file).num_layers == 2
    assert str(tmp_path) not in Path(found.plan_file).read_text() + found.configuration + found.notes


def test_what_fits_as_it_is_has_nothing_to_copy(answers: ModuleType, tmp_path: Path) -> None:
    found = answer(answers, tmp_path, json.dumps(SMALL))
    assert found.verdict.startswith("Fits without a plan: ")
    assert "nothing need be changed" in found.configuration
    assert found.plan_file is None


def test_what_does_not_fit_says_the_least_that_does(answers: ModuleType, tmp_path: Path) -> None:
    found = answer(answers, tmp_path, json.dumps(SMALL), budget="20MiB")
    assert found.verdict.startswith("Does not fit: at least ")
    assert found.notes.startswith("memory.budget_gib: expected at least ")
    assert (found.table, found.configuration, found.plan_file) == ("", "", None)


@pytest.mark.parametrize(
    ("model", "fields", "said"),
    [
        ("{", {}, "not a valid JSON file"),
        (json.dumps(SMALL | {"model_type": "nothing"}), {}, "does not recognize this architecture"),
        ("org/name", {}, "from the Hub: "),
        ("/etc", {}, "no Hub id"),
        ("", {}, "no Hub id"),
        (json.dumps(SMALL), {"seq": "long"}, "not a whole number of tokens"),
        (json.dumps(SMALL), {"budget": "much"}, "not a size"),
        (json.dumps(SMALL), {"method": "LoRA", "rank": None}, "not of the form r=16"),
    ],
)
def test_problems_are_texts(
    model: str, fields: dict[str, Any], said: str, answers: ModuleType, tmp_path: Path
) -> None:
    found = answer(answers, tmp_path, model, **fields)
    assert said in found.notes
    assert found.verdict
    assert str(tmp_path) not in found.notes
    assert (found.table, found.configuration, found.plan_file) == ("", "", None)


def test_the_hub_can_read_how_the_space_is_run(repository: Path) -> None:
    folder = repository / "examples" / "space"
    settings = yaml.safe_load((folder / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    assert settings["sdk"] == "gradio"
    assert (folder / settings["app_file"]).is_file()
    assert len(settings["short_description"]) <= 60  # the Hub's limit
    assert "    python examples/space/app.py" in (folder / "app.py").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_answers_in_a_browser(tmp_path: Path) -> None:
    pytest.importorskip("gradio", reason="the extra `space` serves the page")
    expect = pytest.importorskip("playwright.sync_api", reason="it drives the browser").expect
    from tests.examples.space_page import ask, chromium, served

    with chromium() as browser:
        if browser is None:
            pytest.skip("there is no Chromium")
        with served() as address:
            page = browser.new_page()
            page.goto(address)
            verdict = ask(page, Model=json.dumps(SMALL), Sequence="8k", Budget="190MiB")
            assert verdict.startswith("Fits with this plan: ")
            rows = page.locator("#table tbody tr").all_inner_texts()
            assert [row.split("\t")[0] for row in rows] == ["nothing", "recompute all", "planned"]
            assert page.locator("#picture img").count() == 1
            shown = page.locator("#configuration .cm-content").inner_text()
            assert 'actswap="plan.json"' in shown
            assert load_config(yaml.safe_load(shown)).memory.plan_file == "plan.json"
            with page.expect_download() as download:
                page.locator("#plan").click()
            assert download.value.suggested_filename == "plan.json"
            download.value.save_as(tmp_path / "plan.json")
            assert load_plan(tmp_path / "plan.json").num_layers == 2
            assert ask(page, Sequence="long") == "This cannot be answered."
            assert "not a whole number of tokens" in page.locator("#notes textarea").input_value()
            assert page.locator("#table").count() == 0 or not page.locator("#table").is_visible()
            (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
            page.locator("input[type=file]").set_input_files(tmp_path / "config.json")
            expect(page.get_by_label("Model")).to_have_value('{"model_type": "nothing"}')
            assert ask(page, Sequence="8k") == "No plan: problems in the model."
