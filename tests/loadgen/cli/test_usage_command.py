"""Tests of `slackline usage`: the sums of a month, as a table and as JSON."""

import asyncio
import json

import pytest
from msgspec.msgpack import encode

from loadgen.cli.main import main
from shared.bus.nats import connect
from shared.store.usage import DaySum


@pytest.fixture
def url(nats_url: str) -> str:
    """A server with two days of one tenant and one of another."""

    async def fill() -> None:
        async with connect(nats_url, "test") as bus:
            for key, used in {
                "2001-05.acme.01": DaySum(requests=2, prompt_tokens=1000, output_tokens=30),
                "2001-05.acme.31": DaySum(requests=1, prompt_tokens=234, output_tokens=20),
                "2001-05.other.02": DaySum(requests=7, prompt_tokens=70, output_tokens=900),
                "2001-06.acme.01": DaySum(requests=50, prompt_tokens=50, output_tokens=50),
            }.items():
                if await bus.usage.get(key) is None:
                    await bus.usage.create(key, encode(used))

    asyncio.run(fill())
    return nats_url


def test_a_month_is_summed_by_tenant_most_output_first(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["usage", "--month", "2001-05", "--url", url]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [row for row in rows if len(row) == 4] == [
        ["other", "7", "70", "900"],
        ["acme", "3", "1,234", "50"],
        ["all", "10", "1,304", "950"],
    ]


def test_json_has_the_same_figures(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--month", "2001-05", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "acme": {"requests": 3, "prompt_tokens": 1234, "output_tokens": 50},
        "other": {"requests": 7, "prompt_tokens": 70, "output_tokens": 900},
    }


def test_a_month_without_requests_and_one_that_is_none_are_told(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["usage", "--month", "2001-07", "--url", url]) == 0
    assert capsys.readouterr().out == "no request ended in 2001-07\n"
    for month in ("2001-13", "May", "2001-5"):
        assert main(["usage", "--month", month, "--url", url]) == 2
        assert month in capsys.readouterr().err
