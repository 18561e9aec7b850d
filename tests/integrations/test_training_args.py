"""The field `actswap`, by every way in."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from transformers import HfArgumentParser

from hf_actswap import ActSwapConfig, ActSwapTrainingArguments, ConfigError

INLINE = {"swap_config": {"swap": True, "default_prefetch": 10}}


def parsed(*argv: str) -> ActSwapTrainingArguments:
    (args,) = HfArgumentParser(ActSwapTrainingArguments).parse_args_into_dataclasses(
        ["--use_cpu", "true", "--report_to", "none", *argv]
    )
    return args


def test_command_line_json_becomes_a_mapping(tmp_path: Path) -> None:
    args = parsed("--output_dir", str(tmp_path), "--actswap", json.dumps(INLINE))
    assert args.actswap == INLINE
    assert args.actswap_config().swap_config.default_prefetch == 10


def test_command_line_path_stays_a_string(tmp_path: Path) -> None:
    file = tmp_path / "swap.yaml"
    file.write_text("swap_config: {swap: true}\n")
    args = parsed("--output_dir", str(tmp_path), "--actswap", str(file))
    assert args.actswap == str(file)
    assert args.actswap_config().swap_config.swap is True


def test_folder_with_the_fixed_file_name(tmp_path: Path) -> None:
    (tmp_path / "actswap_config.yaml").write_text("swap_config: {swap: true}\n")
    assert parsed("--output_dir", "out", "--actswap", str(tmp_path)).actswap_config().swap_config.swap


def test_yaml_file_of_arguments_nests_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text(
        "output_dir: out\nuse_cpu: true\nreport_to: none\nactswap:\n  swap_config:\n    swap: true\n"
    )
    (args,) = HfArgumentParser(ActSwapTrainingArguments).parse_yaml_file(str(file))
    assert args.actswap == {"swap_config": {"swap": True}}


def test_serialised_with_the_run(tmp_path: Path) -> None:
    args = ActSwapTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", actswap=INLINE)
    assert args.to_dict()["actswap"] == INLINE
    assert json.loads(args.to_json_string())["actswap"] == INLINE
    assert pickle.loads(pickle.dumps(args)).actswap == INLINE


def test_absent_is_all_defaults(tmp_path: Path) -> None:
    args = ActSwapTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert args.actswap_config() == ActSwapConfig()


def test_malformed_configuration_stops_before_the_devices_are_set_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_devices(self: object) -> None:
        raise AssertionError("TrainingArguments went on")

    monkeypatch.setattr("transformers.training_args.TrainingArguments.__post_init__", no_devices)
    with pytest.raises(ConfigError) as caught:
        ActSwapTrainingArguments(
            output_dir=str(tmp_path), actswap={"swap_config": {"swap": "yes", "default_prefetch": 0}}
        )
    assert [problem.where for problem in caught.value.problems] == [
        "swap_config.swap",
        "swap_config.default_prefetch",
    ]


def test_hub_id_without_network_says_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder, and from the Hub"):
        ActSwapTrainingArguments(output_dir=str(tmp_path), actswap="org/name-that-is-not-there")


def test_no_malformed_document_gets_as_far_as_the_devices(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_devices(self: object) -> None:
        raise AssertionError("TrainingArguments went on")

    monkeypatch.setattr("transformers.training_args.TrainingArguments.__post_init__", no_devices)
    documents = sorted((repository / "tests" / "config" / "malformed").glob("*.yaml"))
    assert len(documents) >= 40
    for document in documents:
        with pytest.raises(ConfigError):
            ActSwapTrainingArguments(output_dir="out", actswap=str(document))
