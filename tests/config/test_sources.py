"""What `load_config` takes, what it asks the network for, and the limits of a document."""

from __future__ import annotations

import copy
import pickle
import socket
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import huggingface_hub
import pytest

from hf_actswap.config import ActSwapConfig, SwapConfig, load_config
from hf_actswap.config.yaml_text import MAX_LEVELS, MAX_NODES, MAX_TEXT_BYTES
from hf_actswap.errors import ConfigError

SWAP_ON = ActSwapConfig(swap_config=SwapConfig(swap=True))
EXPECTED = "a file, a folder that holds actswap_config.yaml, YAML or JSON text, or a Hub id (org/name)"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", reject)
    monkeypatch.setattr(socket, "getaddrinfo", reject)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", reject)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", reject)


def only_problem(source: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 1
    return str(caught.value.problems[0])


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "text", ["", "  ", "\n", "# nothing but a comment\n", "---\n...\n", "{}\n", "swap_config:\n"]
)
def test_empty_text_is_all_defaults(text: str) -> None:
    assert load_config(text) == ActSwapConfig()


@pytest.mark.usefixtures("no_network")
def test_nothing_is_all_defaults() -> None:
    assert load_config(None) == ActSwapConfig()
    assert load_config({}) == ActSwapConfig()


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "text",
    [
        "swap_config:\n  swap: true\n",
        "swap_config: {swap: true}",
        '{"swap_config": {"swap": true}}',
        '{"swap_config":{"swap":true}}',
        '{\n\t"swap_config": {\n\t\t"swap": true\n\t}\n}\n',
        "\ufeffswap_config: {swap: true}\n",
    ],
)
def test_text(text: str, tmp_path: Path) -> None:
    assert load_config(text) == SWAP_ON
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    assert load_config(file) == SWAP_ON


@pytest.mark.usefixtures("no_network")
def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    file = folder / "actswap_config.yaml"
    file.write_text("swap_config: {swap: true}\n")
    monkeypatch.chdir(tmp_path)
    # A folder that is there wins over a Hub id of the same name.
    for source in (file, str(file), folder, str(folder), "org/name", Path("org/name")):
        config = load_config(source)
        assert config == SWAP_ON
        assert config.source.endswith("actswap_config.yaml")


@pytest.mark.usefixtures("no_network")
def test_mappings_are_read_and_left_alone() -> None:
    layers = (0, 3)
    document: dict[str, Any] = {
        "swap_config": {"swap": True, "layer_swap": ({"backward_prefetch": 2, "layers": layers},)},
        "recompute_config": {"select_recompute": {"feed_forward": [0, 3]}},
    }
    before = copy.deepcopy(document)
    config = load_config(document)
    assert document == before
    assert document["swap_config"]["layer_swap"][0]["layers"] is layers
    assert config == load_config(
        MappingProxyType({key: MappingProxyType(value) for key, value in document.items()})
    )
    document["recompute_config"]["select_recompute"]["feed_forward"].append(5)
    assert config.recompute_config.select_recompute == {"feed_forward": (0, 3)}


@pytest.mark.usefixtures("no_network")
def test_a_mapping_that_holds_itself() -> None:
    document: dict[str, Any] = {"swap_config": {"swap": True}}
    document["swap_config"]["layer_swap"] = document
    with pytest.raises(ConfigError):
        load_config(document)


def test_a_config_is_returned_as_it_is() -> None:
    assert load_config(SWAP_ON) is SWAP_ON


@pytest.mark.usefixtures("no_network")
def test_sources_that_cannot_be(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert only_problem(missing) == f"source: expected {EXPECTED}, found '{missing}': no such file or folder."
    assert (
        only_problem("org/name.yaml") == f"source: expected {EXPECTED}, found 'org/name.yaml': no such file."
    )
    assert only_problem("a.JSON") == f"source: expected {EXPECTED}, found 'a.JSON': no such file."
    for text in ("swap", "a/b/c", "org/", "org/name@", "org/na me", "x\0y"):
        name = f"'{text}'" if text.isprintable() else repr(text)
        assert only_problem(text) == (
            f"source: expected {EXPECTED}, "
            f"found {name}: no such file or folder, no YAML mapping and no Hub id."
        )
    assert only_problem(str(tmp_path)) == (
        f"source: expected {EXPECTED}, found '{tmp_path}': a folder without actswap_config.yaml."
    )
    assert only_problem(["swap_config"]) == f"source: expected {EXPECTED}, found ['swap_config']."
    assert (
        only_problem("/dev/null")
        == f"source: expected {EXPECTED}, found '/dev/null': neither a file nor a folder."
    )


def test_an_offline_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set; no copy is in the cache" in only_problem(
        "org-that-is-nowhere/no-such-repository"
    )


@pytest.mark.usefixtures("no_network")
def test_long_and_undecodable_documents(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(b"#" * (MAX_TEXT_BYTES + 1))
    assert only_problem(file) == f"document: expected at most {MAX_TEXT_BYTES} bytes, found more."
    assert only_problem("#" * MAX_TEXT_BYTES + "\n") == (
        f"document: expected at most {MAX_TEXT_BYTES} bytes, found {MAX_TEXT_BYTES + 1} bytes."
    )
    file.write_bytes(b"swap_config: \xff\xfe\n")
    assert only_problem(file) == "document: expected text in UTF-8, found byte 13 that is not."
    file.write_bytes(b"swap_config: \x01\n")
    assert only_problem(file).startswith("document: expected valid YAML, found unacceptable character #x0001")
    file.write_bytes(b"#" * MAX_TEXT_BYTES)
    assert load_config(file) == ActSwapConfig()


def alias_bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    return "\n".join(lines) + "\n"


def merge_bomb() -> str:
    lines = ["a0: &a0 {k: 1}"]
    lines += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]
    return "\n".join(lines) + "\n"


MORE_NODES = f"document: expected at most {MAX_NODES} values, aliases written out, found more."
MORE_LEVELS = f"document: expected at most {MAX_LEVELS} levels of lists and mappings, found more."


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param(alias_bomb(), MORE_NODES, id="aliases"),
        pytest.param(merge_bomb(), MORE_NODES, id="merges"),
        pytest.param(f"context: [{'1,' * MAX_NODES}]\n", MORE_NODES, id="items"),
        pytest.param("context: " + "[" * 100_000 + "\n", MORE_LEVELS, id="lists in lists"),
        pytest.param("context: " + "- " * 100_000 + "\n", None, id="entries in entries"),
        pytest.param("context: " + "{a: " * 50_000 + "\n", MORE_LEVELS, id="mappings in mappings"),
        pytest.param("&a a: &a [*a, *a]\n", None, id="redefined anchor"),
    ],
)
def test_no_document_hangs(text: str, problem: str | None) -> None:
    start = time.monotonic()
    found = only_problem(text)
    assert time.monotonic() - start < 5
    assert problem is None or found == problem


def test_merge_keys_and_aliases_are_read() -> None:
    text = """
swap_config:
  swap: true
  op_swap:
    - &first {op_name: attention, backward_prefetch: 2, layers: &layers [0, 1]}
    - {<<: *first, op_name: feed_forward}
    - {op_name: mlp, backward_prefetch: 1, layers: *layers}
"""
    rules = load_config(text).swap_config.op_swap
    assert rules is not None
    assert [(rule.op_name, rule.backward_prefetch, rule.layers) for rule in rules] == [
        ("attention", 2, (0, 1)),
        ("feed_forward", 2, (0, 1)),
        ("mlp", 1, (0, 1)),
    ]


def test_auto_is_a_planner_that_finds_everything_out(tmp_path: Path) -> None:
    config = load_config("auto")
    assert config == load_config({"memory": {"mode": "adaptive"}})
    assert load_config(config.to_yaml()) == config
    (tmp_path / "auto").write_text("log: reference\n")
    assert load_config(tmp_path / "auto").log == "reference"


def test_a_plan_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"format": "hf_actswap.plan", "format_version": 1, "rows": []}')
    with pytest.raises(ConfigError, match=r"expected a configuration, found a plan.*load_plan reads it"):
        load_config(tmp_path / "plan.json")


@pytest.mark.parametrize("text", ["a: [", "a: 'x", "{swap_config: {swap: true}"])
def test_a_syntax_error_comes_without_the_parser_s_own(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(f"{text}\n")
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None


def test_errors_survive_pickling() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("swap_config: {swap: 1}\n")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)


@pytest.mark.parametrize(("text", "hinted"), [("atuo", True), ("Auto", True), ("adaptive.yaml", False)])
def test_a_slip_in_the_word_auto(text: str, hinted: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text)
    assert ("Did you mean 'auto'?" in str(caught.value)) is hinted
