"""Tests of the fields that the gateway does not serve: which it leaves out, and who says so."""

from pathlib import Path
from typing import Any

import pytest

from services.gateway.api import chats, completions
from services.gateway.api.asking import BINDING
from services.gateway.api.responses import responses
from tests.services.gateway.site import Site, site

IGNORED = "x-slackline-ignored"
TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ASKED: dict[str, dict[str, Any]] = {
    "chat/completions": TALK,
    "completions": {"prompt": "hi", "max_tokens": 1},
    "responses": {"input": "hi", "max_output_tokens": 1},
    "messages": TALK,
}
# what applications send that cannot be changed
FROM_APPS: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "store": True, "verbosity": "low", "web_search_options": {}, "cache_salt": "a",
        "prediction": {"type": "content", "content": "x"},
    },
    "completions": {"best_of": 3, "cache_salt": "a", "length_penalty": 1.0},
    "responses": {"store": True, "truncation": "auto", "max_tool_calls": 3, "cache_salt": "a"},
    "messages": {"context_management": {"edits": []}, "container": "c", "mcp_servers": []},
}  # fmt: skip
# An answer without these would be one to another question.
REFUSED: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "functions": [{"name": "f"}], "audio": {"voice": "alloy"}, "modalities": ["audio"],
        **dict.fromkeys(BINDING, "a"),
    },
    "completions": {"suffix": "b", **dict.fromkeys(BINDING, "a")},
    "responses": {"previous_response_id": "r", "conversation": "c", "background": True},
    "messages": {"guided_json": {}},
}  # fmt: skip


@pytest.mark.parametrize("path", ASKED)
async def test_an_app_that_cannot_be_changed_is_served_and_told_what_was_ignored(
    at: Site, path: str
) -> None:
    answer = await at.post(path, ASKED[path] | FROM_APPS[path])
    assert answer.status_code == 200, answer.text
    assert set(answer.headers[IGNORED].split(", ")) == set(FROM_APPS[path])
    assert IGNORED not in (await at.post(path, ASKED[path])).headers
    strict = await at.post(path, ASKED[path] | FROM_APPS[path], x_slackline_lenient="false")
    assert strict.status_code == 400


@pytest.mark.parametrize("path", ASKED)
async def test_a_field_without_which_the_question_is_another_is_refused_by_name(
    at: Site, path: str
) -> None:
    for name, value in REFUSED[path].items():
        more = {name: value, "cache_salt": "a"}
        answer = await at.post(path, ASKED[path] | more, x_slackline_lenient="true")
        error = answer.json()["error"]
        assert answer.status_code == 400, name
        assert name in error["message"]
        assert "lenient" not in error["message"]
    assert at.fleet.asked == {}


def test_what_may_be_ignored_has_a_value_that_asks_for_nothing() -> None:
    for api in (chats, completions, responses):
        assert all(None in neutral for neutral in api.IGNORABLE.values())


SETTINGS = [  # of the gateway, of the tenant, of the header; whether the body is served
    (True, None, None, True),
    (False, None, None, False),
    (False, True, None, True),
    (True, False, None, False),
    (True, False, "true", True),
    (False, True, "false", False),
]


@pytest.mark.parametrize(("gateway", "tenant", "header", "served"), SETTINGS)
async def test_the_header_goes_before_the_tenant_and_the_tenant_before_the_gateway(
    nats_url: str,
    tmp_path: Path,
    gateway: bool,
    tenant: bool | None,
    header: str | None,
    served: bool,
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text("" if tenant is None else f"[tenants.default]\nlenient = {tenant}".lower())
    headers = {} if header is None else {"x_slackline_lenient": header}
    async with site(nats_url, lenient=gateway, tenants=str(file)) as at:
        for path in ("chat/completions", "messages", "messages/count_tokens"):
            limit = {} if path.endswith("count_tokens") else {"max_tokens": 1}
            body = {"messages": TALK["messages"], "cache_salt": "a", **limit}
            answer = await at.post(path, body, **headers)
            unknown = answer.status_code == 400 and "cache_salt" in answer.text
            assert unknown != served, answer.text
