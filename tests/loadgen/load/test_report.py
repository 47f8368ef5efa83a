"""Tests of `slackline load`: when it sends requests, and its report of which met their SLO."""

import asyncio
import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.cli.main import main
from loadgen.load.mix import PlannedRequest
from loadgen.load.open_loop import run_load
from loadgen.load.report import Report, make_report, read_report, side_by_side, table, write_report
from loadgen.load.tally import Outcome, Tally
from shared.errors import ConfigError
from shared.rules.tiers import DEMO_3
from shared.vocabulary import Definition, FinishReason
from tests.simulated.process import VirtualClock, virtual_loop
from tests.simulated.virtual_loop import run_virtual


def planned(
    number: int, tier: str = "interactive", arrival_s: float = 0.0, importance: float = 1.0
) -> PlannedRequest:
    return PlannedRequest(number, arrival_s, 10, 3, tier, importance, "default", "x")


def answered(
    tally: Tally,
    number: int,
    at_s: list[float],
    tier: str = "interactive",
    end: str = FinishReason.STOP,
) -> Outcome:
    outcome = tally.begin(planned(number, tier), 1000.0, 0.0)
    for s in at_s:
        outcome.emit(1, 1000.0 + s)
    outcome.end(end)
    return outcome


def reported(tally: Tally, label: str = "", offered_s: float = 10.0) -> Report:
    return make_report(
        tally,
        label=label,
        command="c",
        transport="nats",
        seed=0,
        planned=len(tally.outcomes),
        offered_s=offered_s,
    )


def printed(what: object) -> str:
    console = Console(file=StringIO(), width=200)
    console.print(what)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_goodput_counts_shed_requests_as_missed() -> None:
    tally = Tally(DEMO_3)
    for i in range(3):
        answered(tally, i, [0.5, 0.55, 0.6])
    for i in range(3, 6):
        tally.begin(planned(i), 1000.0, 0.0).refuse("slow_down", "full")
    tally.begin(planned(6), 1000.0, 0.0).refuse("invalid_value", "bad")
    tally.begin(planned(7), 1000.0, 0.0).end("unfinished")
    tier = reported(tally).tiers["interactive"]
    names = ("offered", "finished", "met", "refused", "errors", "unfinished")
    assert [getattr(tier, name) for name in names] == [8, 3, 3, 3, 1, 1]
    assert tier.met_fraction == 3 / 8
    assert tier.goodput_per_s == 0.3


def test_being_early_banks_slack_and_one_late_token_misses() -> None:
    # Due at 2.0, 2.06, 2.12: a pause of 1.6 s is within what the early first token has banked.
    assert answered(Tally(DEMO_3), 0, [0.4, 2.0, 2.1]).met
    assert not answered(Tally(DEMO_3), 0, [0.4, 2.0, 2.13]).met
    assert not answered(Tally(DEMO_3), 0, [0.4, 0.5], end=FinishReason.CANCELLED).met
    assert answered(Tally(DEMO_3), 0, [20.0, 25.0], tier="summary").met
    assert not answered(Tally(DEMO_3), 0, [20.0, 25.1], tier="summary").met


def test_the_client_judges_by_the_definition_of_the_tier() -> None:
    # 60 ms a token: the third is 10 ms late, and quicker ones later make up for it in the mean
    at_s = [2.0, 2.06, 2.13, 2.16]
    assert not answered(Tally(DEMO_3), 0, at_s).met
    assert answered(Tally(DEMO_3.judged_by(Definition.MEAN_TPOT)), 0, at_s).met
    assert not answered(Tally(DEMO_3.judged_by(Definition.MEAN_TPOT)), 0, [2.1, *at_s[1:]]).met


def test_the_gap_between_tokens_that_arrive_at_once_is_zero() -> None:
    tally = Tally(DEMO_3)
    outcome = tally.begin(planned(0), 0.0, 0.0)
    outcome.emit(2, 1.0)
    outcome.emit(3, 1.5)
    assert list(tally.gaps_s["interactive"]) == [0.0, 0.5, 0.0, 0.0]


def test_a_report_of_nothing_has_no_percentages_and_prints() -> None:
    report = reported(Tally(DEMO_3))
    assert report.total.met_fraction is None
    assert " - " in printed(table(report))


def test_a_report_survives_its_file_and_anything_else_is_refused(tmp_path: Path) -> None:
    tally = Tally(DEMO_3)
    answered(tally, 0, [0.5])
    report = reported(tally, "a")
    write_report(report, tmp_path / "r.json")
    assert read_report(tmp_path / "r.json") == report
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"other\.json"):
        read_report(tmp_path / "other.json")


def test_side_by_side_shows_both_runs_and_marks_the_better() -> None:
    good, bad = Tally(DEMO_3), Tally(DEMO_3)
    for i in range(4):
        answered(good, i, [0.5])
        answered(bad, i, [0.5 + i])
    shown = side_by_side([reported(bad, "fcfs"), reported(good, "qoserve")])
    text = printed(shown)
    assert "fcfs" in text
    assert "50.0 %" in text
    assert "100.0 %" in text
    assert "[bold green]100.0 %[/]" in list(shown.columns[2].cells)


# ---------------------------------------------------------------- the run


class SlowServer:
    """Answers each request after `takes_s`."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.cancelled = 0

    async def send(self, outcome: Outcome) -> None:
        try:
            await asyncio.sleep(self.takes_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        outcome.emit(1, virtual_loop().time())
        outcome.end(FinishReason.STOP)


def run(
    server: SlowServer, wait_s: float, stop_after_s: float | None = None
) -> tuple[Tally, float | None]:
    async def body() -> tuple[Tally, float | None]:
        tally, stop = Tally(DEMO_3), asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        plan = [planned(i, arrival_s=0.5 * i) for i in range(20)]
        return tally, await run_load(
            plan, server, tally, VirtualClock(virtual_loop()), stop, wait_s
        )

    return run_virtual(body())


def test_requests_are_sent_on_time_whatever_became_of_those_before() -> None:
    tally, stopped_s = run(SlowServer(60.0), wait_s=100.0)
    assert stopped_s is None
    sent = [outcome.sent_unix_s - tally.outcomes[0].sent_unix_s for outcome in tally.outcomes]
    assert sent == pytest.approx([0.5 * i for i in range(20)], abs=0.002)
    assert max(outcome.lateness_s for outcome in tally.outcomes) < 0.002
    assert all(outcome.finished for outcome in tally.outcomes)


def test_a_request_that_runs_when_the_wait_ends_is_cancelled_and_counts_as_unfinished() -> None:
    server = SlowServer(6.0)
    tally, _ = run(server, wait_s=1.0)
    unfinished = [o for o in tally.outcomes if o.ended == "unfinished"]
    assert len(unfinished) == server.cancelled == 10
    assert reported(tally).total.offered == 20


def test_an_interrupt_ends_the_sending_at_once_and_counts_what_was_sent() -> None:
    tally, stopped_s = run(SlowServer(6.0), wait_s=100.0, stop_after_s=2.2)
    assert stopped_s == pytest.approx(2.2, abs=0.01)
    assert [o.ended for o in tally.outcomes] == ["unfinished"] * 5


# ---------------------------------------------------------------- the command line


def test_compare_prints_the_reports_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = Tally(DEMO_3)
    answered(tally, 0, [0.5])
    for name in ("fcfs", "qoserve"):
        write_report(reported(tally, name), tmp_path / f"{name}.json")
    assert main(["compare", str(tmp_path / "fcfs.json"), str(tmp_path / "qoserve.json")]) == 0
    assert "qoserve" in capsys.readouterr().out
    assert json.loads((tmp_path / "fcfs.json").read_text())["definition"].startswith(
        "An SLO is met"
    )
