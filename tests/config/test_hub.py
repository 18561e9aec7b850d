"""Configurations from the Hub and to it, by a server that speaks its protocol."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from hf_actswap.config import ActSwapConfig, MemoryConfig, SwapConfig, load_config
from hf_actswap.config.hub import CONFIG_FILE_NAME, split_hub_id
from hf_actswap.config.yaml_text import MAX_TEXT_BYTES
from hf_actswap.errors import ConfigError, PlanError
from hf_actswap.plan import MemoryPlan, PlanRow, load_plan

from ..hub_server import TOKEN, HubServer, hub_server

SWAP_ON = ActSwapConfig(swap_config=SwapConfig(swap=True))
TEXT = "swap_config: {swap: true}\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with hub_server(monkeypatch, str(tmp_path / "cache")) as server:
        yield server


def rejected(name: str, **how: object) -> str:
    with pytest.raises(ConfigError) as caught:
        ActSwapConfig.from_pretrained(name, **how)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 1
    text = str(caught.value.problems[0])
    assert "\n" not in text
    return text


def test_every_kind_of_revision(hub: HubServer) -> None:
    repository = hub.repository("org/name")
    first = repository.put({CONFIG_FILE_NAME: TEXT}, tag="v1")
    second = repository.put({CONFIG_FILE_NAME: "{}\n"}, branch="try/other")
    third = repository.put({CONFIG_FILE_NAME: "swap_config: {swap: true, default_prefetch: 7}\n"})
    for revision, commit, prefetch, swap in (
        (None, third, 7, True),
        ("main", third, 7, True),
        ("v1", first, 1, True),
        (first, first, 1, True),
        ("try/other", second, 1, False),
    ):
        for config in (
            load_config("org/name" + (f"@{revision}" if revision else "")),
            ActSwapConfig.from_pretrained("org/name", revision=revision),
        ):
            assert config.source == f"org/name@{commit}"
            assert config.notes == (f"org/name on the Hub is read at commit {commit}.",)
            assert config.swap_config == SwapConfig(swap=swap, default_prefetch=prefetch)
            assert load_config(config.source) == config  # the pinned id means the same


def test_a_second_load_downloads_nothing_and_a_commit_asks_nothing(hub: HubServer) -> None:
    repository = hub.repository("org/name")
    commit = repository.put({CONFIG_FILE_NAME: TEXT})
    assert load_config("org/name") == SWAP_ON
    assert len(hub.asked("GET")) == 1
    load_config("org/name")
    assert len(hub.asked("GET")) == 1
    before = len(hub.requests)
    assert load_config(f"org/name@{commit}") == SWAP_ON
    assert len(hub.requests) == before
    repository.put({CONFIG_FILE_NAME: "{}\n"})
    assert load_config("org/name") == ActSwapConfig()  # the branch has moved on
    assert len(hub.asked("GET")) == 2


def test_a_path_wins_over_the_hub(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    SWAP_ON.save_pretrained("org/name")
    assert ActSwapConfig.from_pretrained("org/name", revision="v1") == SWAP_ON
    assert ActSwapConfig.from_pretrained(Path("org/name/actswap_config.yaml")) == SWAP_ON
    assert hub.requests == []


def test_what_is_not_there(hub: HubServer) -> None:
    hub.repository("org/name").put({"README.md": "text"})
    hub.repository("org/secret", private=True).put({CONFIG_FILE_NAME: TEXT})
    hub.repository("org/gated", gated=True).put({CONFIG_FILE_NAME: TEXT})
    no_repository = (
        "has no repository org/{}, or a private one that needs another token; no copy is in the cache."
    )
    assert rejected("org/nothing").endswith(f"{hub.endpoint} {no_repository.format('nothing')}")
    assert rejected("org/secret").endswith(no_repository.format("secret"))
    assert rejected("org/secret", token="hf_wrong").endswith(no_repository.format("secret"))
    assert f"org/gated is gated: ask for access at {hub.endpoint}/org/gated" in rejected("org/gated")
    assert rejected("org/name").endswith(f"and from the Hub: org/name has no file {CONFIG_FILE_NAME}.")
    assert rejected("org/name", revision="v9").endswith("org/name has no branch, tag or commit v9.")
    for name in ("org/secret", "org/gated"):
        assert ActSwapConfig.from_pretrained(name, token=TOKEN) == SWAP_ON
    hub.faults.status = 418
    assert rejected("org/name").endswith(f"{hub.endpoint} answered 418; no copy is in the cache.")


def test_names_that_cannot_be(hub: HubServer) -> None:
    commit = "0" * 40
    assert "found v2" in rejected("org/name@v1", revision="v2")
    for name in ("name", "org/name/more", "org/../name", "swap_config: {}", "org/name@../../x", "x\0y"):
        assert rejected(name).endswith("no such file or folder, and no Hub id.")
    assert (
        rejected("org/name", revision="../x") == "revision: expected a branch, tag or commit, found '../x'."
    )
    assert split_hub_id(f"org/name@{commit}") == ("org/name", commit)
    assert hub.requests == []


@pytest.mark.parametrize("gone", ["closed", "500", "offline"])
def test_a_hub_that_is_gone(
    gone: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = hub.repository("org/name").put({CONFIG_FILE_NAME: TEXT}, tag="v1")
    load_config("org/name")
    if gone == "closed":
        hub.close()
    elif gone == "500":
        hub.faults.status = 503
    else:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING, "hf_actswap"):
        assert load_config("org/name").source == f"org/name@{commit}"
    assert [record.name for record in caplog.records] == ["hf_actswap.config.hub"]
    assert caplog.messages[0].endswith(f"The cached copy is used: org/name@{commit}.")
    why = {
        "closed": "cannot be reached (ConnectError",
        "500": "answered 503",
        "offline": "HF_HUB_OFFLINE is set",
    }
    assert why[gone] in caplog.messages[0]
    # What is not in the cache is one clear error, at once: the client alone would try for 20 s.
    assert rejected("org/name@v1").endswith("no copy is in the cache.")
    assert time.monotonic() - start < 10


def test_only_the_cache(hub: HubServer, tmp_path: Path) -> None:
    hub.repository("org/name").put({CONFIG_FILE_NAME: TEXT})
    how = {"cache_dir": tmp_path / "other"}
    assert rejected("org/name", local_files_only=True, **how).endswith("of org/name is not in the cache.")
    assert hub.requests == []
    ActSwapConfig.from_pretrained("org/name", **how)  # type: ignore[arg-type]
    asked = len(hub.requests)
    assert ActSwapConfig.from_pretrained("org/name", local_files_only=True, **how) == SWAP_ON  # type: ignore[arg-type]
    assert len(hub.requests) == asked
    assert not (tmp_path / "cache").exists()


def test_a_long_document_is_rejected_before_it_is_read(hub: HubServer) -> None:
    repository = hub.repository("org/name")
    repository.put({CONFIG_FILE_NAME: "#" * (MAX_TEXT_BYTES + 1)})
    assert f"has {MAX_TEXT_BYTES + 1:,} bytes, and at most {MAX_TEXT_BYTES:,} bytes" in rejected("org/name")
    repository.put({CONFIG_FILE_NAME: TEXT})
    hub.faults.no_size = True
    assert "has no size" in rejected("org/name")
    assert hub.asked("GET") == []


def test_hostile_documents(hub: HubServer, tmp_path: Path) -> None:
    repository = hub.repository("org/name")
    bomb = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]" for i in range(1, 12))])
    for text, expected in (
        ("!!python/object/apply:os.system ['touch x']\n", "could not determine a constructor for the tag"),
        (bomb, "values, aliases written out"),
        (b"\xff\xfe\n", "text in UTF-8"),
    ):
        commit = repository.put({CONFIG_FILE_NAME: text})
        with pytest.raises(ConfigError, match=expected) as caught:
            load_config("org/name")
        assert caught.value.source == f"org/name@{commit}"
    repository.put({CONFIG_FILE_NAME: "memory: {mode: smart_swap, plan_file: /etc/somewhere}\n"})
    config = load_config("org/name")
    assert config.memory == MemoryConfig(mode="smart_swap")
    assert any("plan_file" in note for note in config.notes)


@pytest.mark.skipif(
    int(huggingface_hub.__version__.partition(".")[0]) < 2,
    reason="huggingface_hub 1 takes the token along to where its endpoint sends it",
)
def test_the_token_goes_to_its_endpoint_alone(hub: HubServer) -> None:
    hub.repository("org/name", private=True).put({CONFIG_FILE_NAME: TEXT})
    elsewhere = HubServer()
    try:
        elsewhere.repository("org/name").put({CONFIG_FILE_NAME: TEXT})
        hub.faults.redirect_to = elsewhere.endpoint
        assert ActSwapConfig.from_pretrained("org/name", token=TOKEN) == SWAP_ON
        assert {request.token for request in hub.requests} == {TOKEN}
        assert [(request.method, request.token) for request in elsewhere.requests] == [("GET", None)]
    finally:
        elsewhere.close()


def test_no_token_where_none_is_wanted(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repository("org/name").put({CONFIG_FILE_NAME: TEXT})
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    ActSwapConfig.from_pretrained("org/name", token=False)
    assert {request.token for request in hub.requests} == {None}
    hub.requests.clear()
    load_config("org/name")
    assert {request.token for request in hub.requests} == {TOKEN}


def test_there_and_back(hub: HubServer) -> None:
    config = load_config(
        "swap_config: {swap: true, op_swap: [{op_name: 'attention\\.flash_attention', backward_prefetch: 20,"
        " layers: [0, 1]}]}\nmemory: {mode: smart_swap, plan_file: out/plan.json}\n"
    )
    address = config.push_to_hub("org/new", token=TOKEN, private=True)
    repository = hub.repositories["org/new"]
    assert repository.private
    assert address == f"{hub.endpoint}/org/new/commit/{repository.refs['main']}"
    assert address.oid == repository.refs["main"]  # type: ignore[attr-defined]
    assert hub.messages == [{"summary": "Upload README.md, actswap_config.yaml", "description": ""}]
    files = repository.commits[repository.refs["main"]]
    assert b"plan_file" not in files[CONFIG_FILE_NAME]
    again = ActSwapConfig.from_pretrained("org/new", token=TOKEN)
    assert again.swap_config == config.swap_config
    assert again.memory == MemoryConfig(mode="smart_swap")
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: hf_actswap\n")
    assert "none of its fates was measured" in card
    assert config.to_yaml().splitlines()[0] in card


def test_branches_pull_requests_and_messages(hub: HubServer) -> None:
    SWAP_ON.push_to_hub("org/new", token=TOKEN)
    main = hub.repositories["org/new"].refs["main"]
    ActSwapConfig().push_to_hub(
        "org/new", token=TOKEN, revision="off", commit_message="Off", commit_description="why"
    )
    assert hub.messages[-1] == {"summary": "Off", "description": "why"}
    ActSwapConfig().push_to_hub("org/new", token=TOKEN, create_pr=True)
    refs = hub.repositories["org/new"].refs
    assert refs["main"] == main
    assert load_config("org/new") == SWAP_ON
    assert load_config("org/new@off") == ActSwapConfig()
    assert load_config("org/new@refs/pr/1") == ActSwapConfig()


def test_a_card_of_another_hand_stays(hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    hub.repository("org/model").put({"README.md": "# A model\n"})
    with caplog.at_level(logging.INFO, "hf_actswap"):
        SWAP_ON.push_to_hub("org/model", token=TOKEN)
    assert "README.md of its own" in caplog.text
    repository = hub.repositories["org/model"]
    assert repository.commits[repository.refs["main"]]["README.md"] == b"# A model\n"
    SWAP_ON.push_to_hub("org/ours", token=TOKEN)
    SWAP_ON.push_to_hub("org/ours", token=TOKEN, base_model="org/llama")
    repository = hub.repositories["org/ours"]
    assert b'base_model: "org/llama"' in repository.commits[repository.refs["main"]]["README.md"]


def test_publishing_needs_a_token(hub: HubServer) -> None:
    with pytest.raises(OSError, match="401"):
        SWAP_ON.push_to_hub("org/new")
    assert hub.repositories == {}


PLAN = MemoryPlan(rows=(PlanRow(scope=0, op_path="mlp", fate="recompute"),), num_layers=2)


def test_a_plan_stands_beside_its_configuration(hub: HubServer, tmp_path: Path) -> None:
    written = tmp_path / "found.json"
    made_for = {
        "model": "llama, 2 layers",
        "batch_shape": [1, 8192],
        "device": "GPU | 80 GB",
        "versions": "torch 2",
    }
    text = PLAN.to_json().rstrip("\n}") + f', "made_for": {made_for}}}'.replace("'", '"')
    written.write_text(text)
    folder = tmp_path / "mine"
    assert SWAP_ON.save_pretrained(folder, plan=written) is None
    assert sorted(os.listdir(folder)) == ["actswap_config.yaml", "plan.json"]
    assert (ActSwapConfig.from_pretrained(folder), load_plan(folder)) == (SWAP_ON, PLAN)
    assert SWAP_ON.save_pretrained(folder, plan=PLAN, push_to_hub=True, token=TOKEN)
    assert load_plan("me/mine", token=TOKEN) == PLAN
    SWAP_ON.push_to_hub("org/new", plan=written, token=TOKEN)
    assert load_plan("org/new") == load_plan("org/new@main") == PLAN
    repository = hub.repositories["org/new"]
    card = repository.commits[repository.refs["main"]]["README.md"].decode()
    for row in ("| model | llama, 2 layers |", "tokens) | [1, 8192] |", "GPU \\| 80 GB |", "| torch 2 |"):
        assert row in card
    assert 'load_plan("org/new")' in card


def test_no_plan(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[1]")
    for plan, found in (
        (tmp_path / "plan.json", r"expected a mapping, found \[1\]"),
        (tmp_path / "no.json", "No such file"),
    ):
        with pytest.raises(ConfigError, match=found):
            SWAP_ON.push_to_hub("org/new", plan=plan, token=TOKEN)
    assert hub.requests == []
    hub.repository("org/name").put({"plan.json": "[" * 100_000}, tag="deep")
    hub.repository("org/bare").put({CONFIG_FILE_NAME: TEXT})
    for name, found in (
        ("org/name", "at most 100 levels"),
        ("org/bare", "has no file plan.json"),
        ("no", "'no'"),
    ):
        with pytest.raises(PlanError, match=found):
            load_plan(name)
