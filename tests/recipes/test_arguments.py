"""One file and the command line become one set of arguments; wrong names are told before any loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe_arguments import parse_arguments
from recipe_options import RecipeError

from hf_actswap import ConfigError
from hf_actswap.releases import is_since

CASE = {
    "context": {"memory_optimize_level": "O0"},
    "model": {"model_config": {"num_layers": 4}},
    "recompute_config": {"recompute": False},
    "swap_config": {"swap": True, "default_prefetch": 10},
}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(content: Any, name: str = "run.yaml") -> str:
        path = tmp_path / name
        dump = json.dumps if name.endswith(".json") else yaml.safe_dump
        path.write_text(content if isinstance(content, str) else dump(content), encoding="utf-8")
        return str(path)

    return write_file


@pytest.fixture
def here(tmp_path: Path) -> list[str]:
    """Arguments that keep every run inside the test's folder and on the CPU."""
    return ["--output_dir", str(tmp_path / "out"), "--use_cpu", "true"]


def test_a_bare_run_is_wikitext_with_the_default_swap() -> None:
    model, data, args = parse_arguments([])
    assert (data.dataset, data.dataset_config_name) == ("Salesforce/wikitext", "wikitext-2-raw-v1")
    assert args.actswap == {"swap_config": {"swap": True}}
    assert (model.model_name_or_path, model.config_name, model.tokenizer_name) == (None, None, None)
    assert (args.do_train, args.do_eval, data.eval_before) == (True, True, True)
    assert args.output_dir == "output/llama_swap"
    assert args.save_strategy == "no"
    assert args.report_to == ["actswap"]
    assert args.logging_steps == 10
    assert args.learning_rate == 1e-3
    assert args.ddp_find_unused_parameters is False


@pytest.mark.parametrize("how", ["positional", "--actswap"])
def test_both_ways_to_name_a_file_are_the_same(write: Any, here: list[str], how: str) -> None:
    file = write(CASE)
    model, _, args = parse_arguments([file, *here] if how == "positional" else ["--actswap", file, *here])
    assert args.actswap == CASE
    assert model.num_layers == 4


def test_a_folder_is_read_like_a_file(tmp_path: Path, here: list[str]) -> None:
    (tmp_path / "actswap_config.yaml").write_text(yaml.safe_dump(CASE), encoding="utf-8")
    model, _, args = parse_arguments(["--actswap", str(tmp_path), *here])
    assert args.actswap["swap_config"]["default_prefetch"] == 10
    assert model.num_layers == 4


@pytest.mark.parametrize(
    "words",
    [
        ["actswap.swap_config.default_prefetch=2"],
        ["--actswap.swap_config.default_prefetch", "2"],
        ["--swap_config.default_prefetch=2"],
        ["--swap_config.default_prefetch", "2"],
        ["--swap-config.default-prefetch=2"],
        ["--actswap.swap-config.default_prefetch", "2"],
    ],
)
@pytest.mark.parametrize("how", ["positional", "--actswap"])
def test_single_keys_on_the_command_line(write: Any, here: list[str], how: str, words: list[str]) -> None:
    file = write(CASE)
    given = [file] if how == "positional" else ["--actswap", file]
    _, _, args = parse_arguments([*given, *here, *words, "--recompute_config.select_recompute=[0, 2]"])
    assert args.actswap["swap_config"] == {"swap": True, "default_prefetch": 2}
    assert args.actswap["recompute_config"] == {"recompute": False, "select_recompute": [0, 2]}
    assert args.actswap["model"] == CASE["model"]


@pytest.mark.parametrize("words", [["--log=reference"], ["--log", "reference"], ["--actswap.log=reference"]])
def test_the_log_on_the_command_line(here: list[str], words: list[str]) -> None:
    _, _, args = parse_arguments([*here, *words])
    assert args.actswap == {"swap_config": {"swap": True}, "log": "reference"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--actswap.lgo=reference"], "--actswap.lgo: .* is written --swap_config.default_prefetch=2"),
        (["--memory", "smart_swap"], "--memory: .* is written --swap_config.default_prefetch=2"),
    ],
)
def test_hints_for_what_has_another_form(here: list[str], words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arguments([*here, *words])


@pytest.mark.parametrize("word", ["auto", "other.yaml", "{}"])
def test_two_configurations_are_rejected(write: Any, here: list[str], word: str) -> None:
    message = f"--actswap: expected one configuration, found `--actswap {word}` beside a file with `context`"
    with pytest.raises(ConfigError, match=message):
        parse_arguments([write(CASE), *here, "--actswap", word])


@pytest.mark.parametrize("word", ["none", "off", "no", "false", "False"])
def test_each_word_for_off_trains_without(write: Any, here: list[str], word: str) -> None:
    assert parse_arguments([write(CASE), *here, "--actswap", word])[2].actswap is None


def test_single_keys_without_a_file(here: list[str]) -> None:
    _, _, args = parse_arguments([*here, "--memory.host_memory_gib=4"])
    assert args.actswap == {"swap_config": {"swap": True}, "memory": {"host_memory_gib": 4}}


def test_single_keys_need_a_configuration(here: list[str]) -> None:
    with pytest.raises(ConfigError, match="a configuration in which to set a key"):
        parse_arguments(["--actswap", "none", *here, "--swap_config.swap=true"])


def test_a_documents_file_is_passed_on_as_it_is(write: Any, here: list[str]) -> None:
    model, _, args = parse_arguments([write(CASE), *here])
    assert args.actswap == CASE
    assert model.num_layers == 4


@pytest.mark.parametrize("name", ["run.yaml", "run.yml", "run.json"])
def test_a_file_may_hold_arguments_beside_the_sections(name: str, write: Any, here: list[str]) -> None:
    document = CASE | {
        "max_steps": 7,
        "learning_rate": "2e-4",
        "eval_dataset": "held_out.txt",
        "bf16": False,
        "report_to": ["tensorboard"],
        "lr_scheduler_kwargs": {"num_cycles": 2},
        "max_train_samples": None,
        "seed": 3,
    }
    _, data, args = parse_arguments([write(document, name), *here])
    assert args.actswap == CASE
    assert (args.max_steps, args.learning_rate, args.bf16, args.seed) == (7, 2e-4, False, 3)
    assert args.report_to == ["tensorboard", "actswap"]
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}
    assert (data.validation_file, data.max_train_samples) == ("held_out.txt", None)


def test_the_command_line_overrides_the_file(write: Any, here: list[str]) -> None:
    path = write(CASE | {"max_steps": 7, "dataset": "sample", "do_eval": True, "report_to": ["tensorboard"]})
    command_line = ["--max_steps", "9", "--dataset=x.txt", "--do_eval", "false", "--report_to", "none"]
    _, data, args = parse_arguments([path, *command_line, *here])
    assert (args.max_steps, data.dataset, args.do_eval, args.report_to) == (9, "x.txt", False, ["actswap"])
    assert data.eval_before is False


def test_a_layer_count_on_the_command_line_is_told_to_the_library_too(write: Any, here: list[str]) -> None:
    model, _, args = parse_arguments([write(CASE), "--num_layers", "8", *here])
    assert model.num_layers == 8
    assert args.actswap == CASE | {"model": {"model_config": {"num_layers": 8}}}


def test_a_named_model_keeps_the_documents_layer_count_for_the_library(write: Any, here: list[str]) -> None:
    model, _, args = parse_arguments([write(CASE), "--config_name", "some/llama", *here])
    assert model.config_name == "some/llama"
    assert args.actswap["model"] == CASE["model"]


@pytest.mark.parametrize(
    ("file", "command_line", "expected"),
    [
        ({"actswap": {"swap_config": {"swap": False}}}, [], {"swap_config": {"swap": False}}),
        ({"actswap": None}, [], None),
        ({"actswap": "none"}, [], None),
        ({"seed": 1}, [], {"swap_config": {"swap": True}}),
        ({"recompute_config": {"recompute": True}}, [], {"recompute_config": {"recompute": True}}),
        ({"swap_config": {"swap": True}}, ["--actswap", "none"], None),
        ({"seed": 1}, ["--actswap", '{"swap_config": {"swap": false}}'], {"swap_config": {"swap": False}}),
    ],
)
def test_what_the_library_gets(
    file: dict[str, Any], command_line: list[str], expected: Any, write: Any, here: list[str]
) -> None:
    _, _, args = parse_arguments([write(file), *command_line, *here])
    assert args.actswap == expected


def test_sections_of_mindformers_go_to_the_library_and_shared_names_to_the_recipe(
    write: Any, here: list[str]
) -> None:
    theirs = {
        "runner_config": {"epochs": 2},
        "eval_dataset": {"data_loader": {"type": "x"}},
        "run_mode": "train",
    }
    _, data, args = parse_arguments([write(CASE | theirs | {"seed": 11}), *here])
    assert args.actswap == CASE | theirs
    assert (args.seed, data.validation_file) == (11, None)


def test_every_wrong_name_of_a_file_is_told_with_the_nearest(write: Any) -> None:
    path = write("max_step: 3\nswap_confg:\n  swap: true\nswap: true\nblock_size: [1, 2]\nzzz: 1\n")
    with pytest.raises(ConfigError) as caught:
        parse_arguments([path])
    wanted = "expected an argument of the recipe or of the Trainer, or a section of hf_actswap"
    unknown = f"{wanted}, found an unknown key."
    assert str(caught.value).splitlines() == [
        f"5 problems in the configuration ({path}):",
        f"  - max_step: {unknown} Did you mean 'max_steps'?",
        f"  - swap_confg: {unknown} Did you mean 'swap_config'?",
        f"  - swap: {unknown} It is a key of `swap_config`: write it below that line.",
        "  - block_size: expected a single value, found a list.",
        f"  - zzz: {unknown} `--help` lists the arguments.",
    ]


def test_a_wrong_name_on_the_command_line(here: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(["--hiden_size", "64", *here])
    assert str(caught.value).splitlines() == [
        "1 problem in the configuration (command line):",
        "  - --hiden_size: expected an argument of the recipe or of the Trainer, found an unknown one. "
        "Did you mean 'hidden_size'?",
    ]
    with pytest.raises(ConfigError, match=r"found `notes\.txt` too much"):
        parse_arguments(["notes.txt", *here])


def test_actswap_beside_its_sections_is_rejected(write: Any) -> None:
    with pytest.raises(ConfigError, match="found `actswap` beside `swap_config`"):
        parse_arguments([write({"actswap": "x.yaml", "swap_config": {"swap": True}})])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "expected valid YAML"),
        ("- 1\n", "document: expected a mapping, found a list"),
        ("seed: 1\nseed: 2\n", "seed: expected each key once, found it on lines 1 and 2"),
    ],
)
def test_a_malformed_file(text: str, message: str, write: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arguments([write(text)])


def test_a_missing_file_and_an_empty_one(tmp_path: Path, write: Any, here: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"no\.yaml cannot be read"):
        parse_arguments([str(tmp_path / "no.yaml")])
    assert parse_arguments([write(""), *here])[2].actswap == {"swap_config": {"swap": True}}


def test_a_value_of_the_wrong_type_names_its_argument(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([write({"max_steps": "ten"})])
    assert "argument --max_steps/--max-steps: invalid int value: 'ten'" in capsys.readouterr().err


def test_defaults_that_follow_from_other_arguments(here: list[str]) -> None:
    _, data, args = parse_arguments(["--dataset", "sample", "--save_steps", "5", *here])
    assert data.dataset_config_name is None
    assert args.save_strategy == "steps"
    from_weights = parse_arguments(["--model_name_or_path", "some/llama", *here])[2]
    assert from_weights.learning_rate == 5e-5


@pytest.mark.skipif(not is_since("transformers", "5.6"), reason="transformers' own --help fails: a bare %")
def test_help_shows_the_recipes_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: output/llama_swap)" in shown
    assert "(default: Salesforce/wikitext)" in shown


SMART, ADAPTIVE = {"memory": {"mode": "smart_swap"}}, {"memory": {"mode": "adaptive"}}
BUDGET = {"memory": {"mode": "smart_swap", "budget_gib": 3}}


@pytest.mark.parametrize(
    ("file", "command_line", "expected"),
    [
        (None, ["--smart-swap"], SMART),
        (None, ["--smart_swap"], SMART),
        (None, ["--smart_swap", "true"], SMART),
        (None, ["--adaptive-memory-optimization"], ADAPTIVE),
        (None, ["--adaptive_memory_optimization"], ADAPTIVE),
        (None, ["--smart_swap", "false"], {"swap_config": {"swap": True}}),
        (None, ["--smart_swap", "false", "--adaptive_memory_optimization"], ADAPTIVE),
        (None, ["--smart-swap", "--actswap", '{"memory": {"budget_gib": 3}}'], BUDGET),
        (None, ["--smart_swap", "false", "--actswap", "none"], None),
        ({"smart_swap": True}, [], SMART),
        ({"smart_swap": True, "adaptive_memory_optimization": False}, [], SMART),
        ({"smart_swap": True}, ["--smart_swap", "false"], {"swap_config": {"swap": True}}),
        ({"memory": None}, ["--smart-swap"], SMART),
        ({"memory": {"mode": "off"}}, ["--smart-swap"], SMART),
        ({"memory": {"mode": "off"}}, ["--smart-swap", "false"], {"memory": {"mode": "off"}}),
        ({"memory": {"mode": "adaptive"}}, ["--adaptive-memory-optimization"], ADAPTIVE),
        ({"memory": {"mode": "adaptive"}}, ["--smart-swap", "false"], ADAPTIVE),
        (CASE, ["--smart-swap"], CASE | SMART),
        ({"actswap": CASE}, ["--smart-swap"], CASE | SMART),
    ],
)
def test_the_planners_flags_set_the_mode(
    file: dict[str, Any] | None, command_line: list[str], expected: Any, write: Any, here: list[str]
) -> None:
    source = [] if file is None else [write(file)]
    assert parse_arguments([*source, *command_line, *here])[2].actswap == expected


def test_a_flag_keeps_what_the_file_says_of_the_planner(write: Any, here: list[str]) -> None:
    section = {"target_memory": 2**30, "policy_pref": "BETTER_MEMORY_SAVING"}
    path = write({"memory": section, "seed": 1})
    args = parse_arguments([path, "--smart-swap", *here])[2]
    assert args.actswap == {"memory": section | {"mode": "smart_swap"}}
    inner = write(CASE | {"memory": section}, "inner.yaml")
    config = parse_arguments(["--actswap", inner, "--smart-swap", *here])[2].actswap_config()
    assert (config.memory.mode, config.memory.budget_gib, config.num_layers) == ("smart_swap", 1.0, 4)
    assert config.swap_config.swap is True


@pytest.mark.parametrize(
    ("file", "command_line", "message"),
    [
        (
            {},
            ["--smart-swap", "--adaptive-memory-optimization"],
            "expected one planner, found --smart_swap and",
        ),
        (
            {"smart_swap": True},
            ["--adaptive-memory-optimization"],
            "expected one planner, found --smart_swap and",
        ),
        (
            ADAPTIVE,
            ["--smart-swap"],
            r"expected what the configuration says \(memory.mode: adaptive\), found",
        ),
        (SMART, ["--smart-swap", "false"], "found --smart_swap false. Leave one out"),
        (SMART, ["--actswap", "none", "--smart-swap"], "--smart_swap: expected a configuration in which"),
        (CASE, ["--adaptive-memory-optimization"], "expected no `swap_config.swap` beside adaptive"),
        ({"smart-swap": True}, [], "Did you mean 'smart_swap'"),
    ],
)
def test_the_planners_flags_and_a_file_that_disagrees(
    file: dict[str, Any], command_line: list[str], message: str, write: Any, here: list[str]
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arguments([write(file), *command_line, *here])
