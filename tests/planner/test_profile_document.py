"""Profiles as text: what is written is read back, and what is malformed is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hf_actswap import PlanError
from hf_actswap.engine import Link
from hf_actswap.planner import Profile, profile_from_json, profile_to_json
from tests.planner.recorded_steps import MODELS, recorded


@pytest.fixture(scope="module")
def profile() -> Profile:
    made, _ = recorded(MODELS["tied"]())
    return replace(made, link=Link(54e6, 55e6, 49e6, 50e6), compiled_layers=frozenset({1}))


@pytest.mark.parametrize("family", MODELS)
def test_what_is_written_is_read_back(family: str) -> None:
    made, _ = recorded(MODELS[family]())
    assert profile_from_json(profile_to_json(made)) == made


def test_link_and_compiled_layers(profile: Profile) -> None:
    text = profile_to_json(profile)
    assert profile_from_json(text) == profile
    assert profile_to_json(profile_from_json(text)) == text


def test_it_is_compact(profile: Profile) -> None:
    uses = sum(len(storage.uses) for storage in profile.saved.storages)
    assert len(profile_to_json(profile)) < 60 * (uses + 2 * len(profile.op_events)) + 4000


Change = Callable[[dict[str, Any]], None]


def put(key: str, value: Any) -> Change:
    return lambda document: document.__setitem__(key, value)


def put_in(key: str, row: int, column: int, value: Any) -> Change:
    return lambda document: document[key][row].__setitem__(column, value)


def put_use(column: int, value: Any) -> Change:
    return lambda document: document["storages"][0][1].__setitem__(column, value)


MALFORMED: dict[str, tuple[Change, str]] = {
    "format": (put("format", "hf_actswap.plan"), "profile.format: expected hf_actswap.profile"),
    "version": (put("format_version", 1), "profile.format_version: expected 4, found 1"),
    "version of another type": (put("format_version", True), "profile.format_version"),
    "layers": (put("num_layers", -1), "profile.num_layers"),
    "source": (put("source", "guessed"), "profile.source: expected measured or shapes, found 'guessed'"),
    "time": (put("outside_ms", -0.5), "profile.outside_ms: expected a time in ms"),
    "infinite": (put("outside_ms", float("inf")), "profile.outside_ms"),
    "bytes": (put("device_bytes", 1.5), "profile.device_bytes"),
    "columns": (put("op_event_columns", ["call"]), "profile.op_event_columns"),
    "no op events": (put("op_events", None), "profile.op_events: expected a list"),
    "op event of another length": (
        lambda document: document["op_events"][3].pop(),
        r"profile.op_events\[3\]: expected a list of the values of call, first_order",
    ),
    "op event's call": (
        put_in("op_events", 2, 0, 10**6),
        r"profile.op_events\[2\].call: expected a number of a call",
    ),
    "op event's time": (put_in("op_events", 2, 5, None), r"profile.op_events\[2\].forward_ms"),
    "op event's flag": (
        put_in("op_events", 2, 10, 2),
        r"profile.op_events\[2\].communicates: expected 0 or 1",
    ),
    "hook": (
        put_in("hooks", 0, 1, -1),
        r"profile.hooks\[0\]\[1\]: expected a whole number from 0 on, found -1",
    ),
    "gap in uses": (put_in("op_events", 2, 1, 10**6), r"profile.op_events\[2\].first_order"),
    "gap in operators": (put_in("op_events", 2, 3, 10**6), r"profile.op_events\[2\].first_op"),
    "scope": (
        put_in("calls", 0, 0, "loss"),
        r"profile.calls\[0\]\[0\]: expected a layer from 0 to 1, the module path of another stack",
    ),
    "layer too high": (put_in("calls", 0, 0, 99), r"profile.calls\[0\]\[0\]"),
    "ordinal": (put_in("calls", 0, 2, -1), r"profile.calls\[0\]"),
    "use's kind": (put_use(0, 4), r"profile.storages\[0\]\[1\].kind"),
    "use's producer": (put_use(2, -1), r"profile.storages\[0\]\[1\].producer"),
    "storage": (put_in("storages", 1, 0, "1"), r"profile.storages\[1\]"),
    "no uses": (put("storages", [[]]), r"profile.storages\[0\]"),
    "modules": (put("modules", [[1]]), r"profile.modules\[0\]"),
    "link": (put("link", {"out_bytes_per_ms": 1}), "profile.link"),
    "rate of a link": (lambda document: document["link"].update(in_bytes_per_ms=0), "profile.link"),
    "link of another type": (put("link", [1]), "profile.link"),
    "shape": (put("batch_shape", [1, "x"]), r"profile.batch_shape\[1\]"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case: str, profile: Profile) -> None:
    change, message = MALFORMED[case]
    document = json.loads(profile_to_json(profile))
    change(document)
    with pytest.raises(PlanError, match=message):
        profile_from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5, "3", "null", "[]"])
def test_no_profile_at_all(text: str) -> None:
    with pytest.raises(PlanError, match="profile"):
        profile_from_json(text)


def test_all_faults_at_once(profile: Profile) -> None:
    document = json.loads(profile_to_json(profile))
    document["op_events"][0][0] = document["storages"][0][1][0] = "x"
    document["batch_shape"], document["link"] = "x", "x"
    with pytest.raises(PlanError) as caught:
        profile_from_json(json.dumps(document))
    assert len(caught.value.problems) == 4


def test_a_document_that_is_wrong_everywhere_is_short(profile: Profile) -> None:
    document = json.loads(profile_to_json(profile))
    for row in document["op_events"]:
        row[5] = "x"
    with pytest.raises(PlanError) as caught:
        profile_from_json(json.dumps(document))
    assert 10 < len(caught.value.problems) <= 50
