"""Tests of `slackline explain`: it takes any name of a request, and its text fits the terminal."""

import datetime as dt
import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from loadgen.cli.explain import instant_of, meant, show, show_rows
from loadgen.cli.main import main
from shared.request_timeline import Cause
from shared.schemas import EndedRow, Explanation, FirstMissed, FoundEnded, Share
from shared.vocabulary import FinishReason, Missed, ServiceClass, Slo

LONGEST = 64 * "x"
ID = "must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -"
FOREIGN = "acme.river-1 is of the tenant acme, and you ask as {}: --tenant acme asks as that tenant"
ONE = "name one of REQUEST_ID, --trace and --minute"
FOUND = Explanation(
    request_id="crowd-9", tenant="default", tier="best-effort-tier", state="placed",
    answer="late by 3.24 s: its first token was due at 0.50 s and came at 3.74 s; 3.34 s of that "
    "went into waiting as best-effort: no replica can hold its SLO.",
    slo=Slo(ttft_s=0.5, tbt_s=0.03, ttlt_s=20.0), service_class=ServiceClass.STANDARD,
    relegated=False, arrived_unix_s=0.0, until_unix_s=1.0, attempt=1, replica=None,
    prompt_tokens=2500, output_tokens=30, ttft_s=None, worst_tbt_s=None, ttlt_s=None, trace_id="",
    first_missed=None, shares=[Share(cause=Cause.QUEUE, seconds=1.0, share=1.0)],
    shares_until_missed=[], neighbours=[], happenings=[], left_out=0, verdict=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("river-1", ["river-1"]),
        ("chatcmpl-river-1", ["chatcmpl-river-1", "river-1"]),
        ("cmpl-river-1", ["cmpl-river-1", "river-1"]),
        ("resp_river-1", ["resp_river-1", "river-1"]),
        ("default.river-1", ["river-1"]),
        ("default.cmpl-river-1", ["cmpl-river-1", "river-1"]),
        # with what stands before it, it is too long for an id
        (f"chatcmpl-{LONGEST}", [LONGEST]),
    ],
)
def test_an_id_may_have_its_tenant_or_the_prefix_of_an_answer_before_it(
    name: str, ids: list[str]
) -> None:
    for operator in (True, False):
        assert meant(name, None, operator=operator) == ("default", ids)
    assert meant(name.replace("default", "acme"), "acme", operator=False) == ("acme", ids)


def test_an_operator_asks_for_the_tenant_that_the_name_has() -> None:
    assert meant("acme.river-1", None, operator=True) == ("acme", ["river-1"])
    assert meant("river-1", "acme", operator=True) == ("acme", ["river-1"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], ONE),
        (["river-1", "--trace", "ab"], ONE),
        (["--trace", "ab", "--minute", "14:05"], ONE),
        (["--minute", "25:00"], "--minute 25:00: write it as 14:05"),
        (["--minute", "14:05", "--tenant", "a b"], f"--tenant {ID}"),
        (["acme.river-1", "--creds", "key"], FOREIGN.format("default")),
        (["acme.river-1", "--tenant", "other"], FOREIGN.format("other")),
        *(([name], f"REQUEST_ID {ID}") for name in ("", "a b", "a.", ".a", "a.b.c", LONGEST + "x")),
        (["a", "--tenant", ""], f"--tenant {ID}"),
    ],
)
def test_a_name_of_another_tenant_and_one_that_can_be_none_are_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words, "--url", "nats://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == f"slackline explain: {told}\n"


@pytest.mark.parametrize("width", range(40, 101, 4))
def test_both_paragraphs_are_as_wide_as_the_terminal_and_no_item_is_broken(width: int) -> None:
    out = io.StringIO()
    show(FOUND, Console(file=out, width=width, color_system=None))
    lines = out.getvalue().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("default/"))
    end = next(n for n, line in enumerate(lines) if not line[:1].strip())  # a table
    second = lines[begin:end]
    assert max(map(len, lines[:end])) <= width
    items = [
        "default/best-effort-tier,", "2,500 tokens of prompt,", "30 of answer,", "placed;",
        "SLO: TTFT 0.50 s,", "TBT 30 ms,", "TTLT 20.00 s",
    ]  # fmt: skip
    for line, following in zip(second, [*second[1:], ""], strict=True):
        held = [item for item in items if item in line]
        assert line == " ".join(held)
        if following:  # the next item had no room
            after = items[items.index(held[-1]) + 1]
            assert len(line) + 1 + len(after) > width
    assert " ".join(second) == " ".join(items)


def test_a_minute_is_the_last_of_its_name_unless_a_date_stands_before_it() -> None:
    now = dt.datetime(2001, 5, 2, 14, 10, 30).astimezone()
    day_s = 86_400.0
    assert now.timestamp() - instant_of("14:05", now) == 330.0
    assert now.timestamp() - instant_of("14:11", now) == day_s - 30.0
    assert now.timestamp() - instant_of("2001-05-01T14:10", now) == day_s + 30.0


def test_a_list_fits_the_terminal_and_says_how_late_each_was() -> None:
    late = FirstMissed(
        token=1, bound=Missed.TTFT, due_s=0.5, came_s=3.74, cause=Cause.QUEUE, cause_s=3.0
    )
    rows = [
        row("never", first_missed=replace(late, came_s=None), slo_met=False),
        row("crowd-9", first_missed=late, slo_met=False),
        row("river-1"),
    ]
    text = io.StringIO()
    show_rows(FoundEnded(rows=rows, left_out=7), Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert lines[0] == "3 requests, 2 without their SLO, and 7 others"
    assert max(map(len, lines)) <= 80
    never, crowd, river = [line for line in lines if "acme." in line]
    assert "it never came" in never and "queue of the" in never
    assert "3.24 s" in crowd and "length" in crowd
    assert river.split() == ["acme.river-1", "chat", "00:00:00", "length"]


def row(request_id: str, **more: object) -> EndedRow:
    at_unix_s = dt.datetime(2001, 5, 2).astimezone().timestamp()
    usual = EndedRow(
        tenant="acme", request_id=request_id, tier="chat", arrived_unix_s=at_unix_s,
        finish_reason=FinishReason.LENGTH, slo_met=True, first_missed=None,
    )  # fmt: skip
    return replace(usual, **more)
