"""The field `actswap`, by every way in."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainingArguments

from hf_actswap import ActSwapConfig, ActSwapTrainingArguments, ConfigError, with_actswap

INLINE = {"swap_config": {"swap": True, "default_prefetch": 10}}


def parsed(*argv: str) -> ActSwapTrainingArguments:
    (args,) = HfArgumentParser(ActSwapTrainingArguments).parse_args_into_dataclasses(
        ["--use_cpu", "true", "--report_to", "none", *argv]
    )
    return args


@pytest.mark.parametrize("text", [json.dumps(INLINE), " {swap_config: {swap: true, default_prefetch: 10}}"])
def test_command_line_json_and_yaml_become_a_mapping(text: str, tmp_path: Path) -> None:
    args = parsed("--output_dir", str(tmp_path), "--actswap", text)
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


# Other classes of arguments.


@dataclass
class Defaults(TrainingArguments):
    """As TRL's: a default of its own, a field of its own, and a default that is made anew for each object."""

    learning_rate: float = 2e-5
    max_length: int | None = 1024
    chat: dict[str, Any] | str | None = None
    words: list[str] = field(default_factory=lambda: ["a"])
    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "chat"]  # noqa: RUF012


def classes_of_trl() -> list[type[TrainingArguments]]:
    try:
        import trl
    except ImportError:
        return []
    found = [getattr(trl, name) for name in dir(trl) if name.endswith("Config")]
    return [item for item in found if isinstance(item, type) and issubclass(item, TrainingArguments)]


CLASSES = [TrainingArguments, Seq2SeqTrainingArguments, Defaults, *classes_of_trl()]
SHORT: dict[str, Any] = {"output_dir": "out", "use_cpu": True, "report_to": "none"}
OWN = {"report_to", "distributed_state", "actswap"}


def short(arguments: type) -> dict[str, Any]:
    several = {"per_device_train_batch_size": 8} if "GRPO" in arguments.__name__ else {}
    return {**SHORT, **({"per_device_train_batch_size": 8} if "RLOO" in arguments.__name__ else several)}


@pytest.mark.parametrize("stock", CLASSES, ids=lambda item: item.__name__)
def test_every_default_of_another_class_holds(stock: type[TrainingArguments]) -> None:
    made = with_actswap(stock)
    assert {item.name for item in fields(made)} == {item.name for item in fields(stock)} | {"actswap"}
    plain, ours = stock(**short(stock)), made(**short(stock), actswap=INLINE)
    assert isinstance(ours, stock)
    expected, found = vars(plain), vars(ours)
    assert {name for name in found if name not in OWN and found[name] != expected[name]} == set()
    assert {name: value for name, value in ours.to_dict().items() if name not in OWN} == {
        name: value for name, value in plain.to_dict().items() if name not in OWN
    }
    assert (ours.actswap, ours.report_to, plain.report_to) == (INLINE, ["actswap"], [])
    for again in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert type(again) is made
        assert again.to_dict() == ours.to_dict()


@pytest.mark.parametrize("stock", CLASSES, ids=lambda item: item.__name__)
def test_other_classes_on_the_command_line(stock: type[TrainingArguments]) -> None:
    line = [word for name, value in short(stock).items() for word in (f"--{name}", str(value))]
    parser = HfArgumentParser(with_actswap(stock))
    (args,) = parser.parse_args_into_dataclasses([*line, "--actswap", json.dumps(INLINE)])
    assert args.actswap == INLINE
    assert args.learning_rate == stock(**short(stock)).learning_rate


def test_the_parser_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: out\nuse_cpu: true\nreport_to: none\nactswap: auto\nmax_length: 7\n")
    parser = trl.TrlParser(with_actswap(trl.SFTConfig))
    (args,) = parser.parse_args_and_config(["--config", str(file), "--learning_rate", "3e-4"])
    assert (args.actswap, args.max_length, args.learning_rate) == ("auto", 7, 3e-4)


def test_replaced_and_inherited_from() -> None:
    args = with_actswap(Defaults)(**SHORT, actswap="auto")
    changed = replace(args, learning_rate=1.0)
    assert (changed.learning_rate, changed.max_length, changed.actswap) == (1.0, 1024, "auto")

    @dataclass
    class Longer(with_actswap(Defaults)):  # type: ignore[misc]
        max_length: int | None = 4096

    longer = Longer(**SHORT, actswap="auto")
    assert (longer.learning_rate, longer.max_length, longer.report_to) == (2e-5, 4096, ["actswap"])
    assert with_actswap(Defaults) is with_actswap(Defaults)
    assert with_actswap(Longer) is Longer
    assert with_actswap(TrainingArguments) is ActSwapTrainingArguments


@pytest.mark.parametrize("order", [1, -1], ids=["ours first", "ours last"])
@pytest.mark.parametrize("ours", [ActSwapTrainingArguments, with_actswap(Seq2SeqTrainingArguments)])
def test_two_classes_of_arguments_in_one_are_an_error(order: int, ours: type) -> None:
    with pytest.raises(ConfigError) as caught:
        type("Arguments", (ours, Defaults)[::order], {})
    (problem,) = caught.value.problems
    assert problem.where == "class Arguments"
    assert "Write hf_actswap.with_actswap(Defaults)" in str(problem)


@pytest.mark.parametrize("given", [dict, Defaults(**SHORT), "SFTConfig"], ids=["class", "object", "name"])
def test_what_is_no_class_of_arguments(given: Any) -> None:
    with pytest.raises(ConfigError, match="expected a class that inherits from transformers"):
        with_actswap(given)
