"""Tests of the HTML reports of `load` and `compare`: one file that needs nothing else."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from loadgen.cli.main import main
from loadgen.cli.options.html import write_reports
from loadgen.load.report import side_by_side, table, write_report
from loadgen.load.run_course import PARTS, Course, course_of_tally
from loadgen.load.tally import Tally
from loadgen.trials.course_plots import Run, attainment_over_rate
from shared.rules.tiers import DEFAULT
from tests.chromium import chromium, needs_chromium
from tests.loadgen.load.test_report import answered, planned, reported

COMPARE = (
    "compare", "--workload", "mix", "--duration", "8", "--tiers", "demo-3", "--seed", "5",
    "--policies", "fcfs:chunk_tokens=512,edf", "--jobs", "1",
)  # fmt: skip
ATTACK = "<script>broken()</script>"


class Page(HTMLParser):
    """The tags of a page, its texts, and whatever it names in attributes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: list[str] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names += [
            value
            for name, value in attrs
            if value and name in ("src", "href", "xlink:href", "data", "action")
        ]

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(path: Path) -> Page:
    """The page, which needs nothing but itself."""
    page = Page(path)
    assert not {"script", "iframe", "link", "img", "object"} & set(page.tags)
    assert all(name.startswith("#") for name in page.names), page.names
    assert not re.search(r"url\((?!#|'#|\"#)|@import", path.read_text())
    return page


def run_of(requests: int, late: int = 0) -> Tally:
    """Requests that come one a second; the last ones are late."""
    tally = Tally(DEFAULT)
    for number in range(requests):
        outcome = tally.begin(planned(number, "chat", float(number)), 1000.0 + number, 0.0)
        first = 1000.0 + number + (5.0 if number >= requests - late else 0.2)
        outcome.emit(1, first)
        outcome.emit(1, first + 0.05)
        outcome.end("stop")
    return tally


def test_compare_over_rates_shows_attainment_latencies_and_a_burst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    assert main([*COMPARE, "--rates", "3,6", "--html", str(path)]) == 0
    page = checked(path)
    for text in (
        "Attainment over rate", "Latencies at 6 requests/s", "A burst at 6 requests/s",
        "fcfs:chunk_tokens=512", "edf", "interactive: TTFT", "interactive: TBT", "SLO 2 s",
        "judged by deadline", "bound without drafts",
    ):  # fmt: skip
        assert text in " ".join(page.text.split()), text
    assert page.tags.count("svg") == 3
    assert f"wrote {path}" in capsys.readouterr().err


def test_the_page_changes_nothing_of_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for words in ([], ["--html", str(tmp_path / "page.html")]):
        assert main([*COMPARE, "--rate", "3", "--json", *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [f["violated_fraction"] for f in found[0]["policies"]] == [
        f["violated_fraction"] for f in found[1]["policies"]
    ]
    assert "of the moments" in checked(tmp_path / "page.html").text  # there is only one rate


def test_a_run_of_load_is_a_page_and_so_are_several_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = reported(run_of(60, late=10), "one", 60.0)
    write_reports([one], table(one), tmp_path / "one.html")
    page = checked(tmp_path / "one.html")
    assert "chat: TBT" in page.text and "one: " in page.text and "SLO 1 s" in page.text
    for name, rate_s in (("one", 60.0), ("other", 30.0)):
        write_report(reported(run_of(60), name, rate_s), tmp_path / f"{name}.json")
    files = [str(tmp_path / f"{name}.json") for name in ("one", "other")]
    assert main(["compare", *files, "--html", str(tmp_path / "both.html")]) == 0
    capsys.readouterr()
    assert "other" in checked(tmp_path / "both.html").text


def test_a_report_from_before_there_were_courses_is_still_a_page(tmp_path: Path) -> None:
    report = reported(run_of(5), "old")
    path = tmp_path / "old.json"
    write_report(report, path)
    facts = json.loads(path.read_text())
    del facts["course"]
    path.write_text(json.dumps(facts))
    assert main(["compare", str(path), "--html", str(tmp_path / "old.html")]) == 0
    assert "older" in checked(tmp_path / "old.html").text


@pytest.mark.parametrize("tally", [run_of(5), Tally(DEFAULT)], ids=["five", "nothing"])
def test_names_in_a_report_are_text_and_a_run_of_nothing_is_a_page_too(
    tmp_path: Path, tally: Tally
) -> None:
    report = reported(tally, ATTACK)
    write_reports([report], side_by_side([report]), tmp_path / "page.html")
    assert "broken()" in checked(tmp_path / "page.html").text


def test_a_page_that_cannot_be_written_is_told_before_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "none" / "page.html", tmp_path):
        assert main([*COMPARE, "--rate", "3", "--html", str(path)]) == 2
        assert "--html" in capsys.readouterr().err


def test_at_one_rate_the_busier_moments_stand_right_and_have_their_own_attainment() -> None:
    quiet, busy = [1] * 30, [10] * 10
    course = Course(
        part_s=1.0, quantiles_s={}, offered={"chat": quiet + busy}, met={"chat": quiet + [5] * 10}
    )
    figure = attainment_over_rate([Run("one", 3.0, {"chat": 0.6}, course)], ["chat"])
    [line] = figure.axes[0].lines
    rates, percents = np.array(line.get_xdata()), np.array(line.get_ydata())
    assert (np.diff(rates) >= 0).all()
    assert percents[0] > 90 and percents[-1] == pytest.approx(50.0)
    assert rates[0] == pytest.approx(1.0, rel=0.3) and rates[-1] == pytest.approx(10.0)


def test_a_course_counts_requests_where_they_came() -> None:
    course = course_of_tally(run_of(60, late=10), 60.0)
    assert course is not None and course.part_s == 1.0
    assert course.offered["chat"] == [1] * PARTS
    assert course.met["chat"] == [1] * 50 + [0] * 10
    quantiles_s = course.quantiles_s["chat"]
    assert quantiles_s["TTFT"][0] == pytest.approx(0.2, abs=1e-6)
    assert quantiles_s["TTFT"][-1] == pytest.approx(5.0, abs=1e-6)
    assert quantiles_s["TBT"][100] == pytest.approx(0.05, abs=1e-4)
    assert course_of_tally(Tally(DEFAULT), 1.0) is None
    tally = Tally(DEFAULT)
    answered(tally, 0, [], end="error")
    lost = course_of_tally(tally, 1.0)
    assert lost is not None and lost.quantiles_s["interactive"] == {}


@needs_chromium
async def test_a_browser_shows_the_page_without_a_complaint(tmp_path: Path) -> None:
    report = reported(run_of(60, late=10), "one", 60.0)
    path = tmp_path / "page.html"
    write_reports([report], table(report), path)
    async with chromium() as browser:
        page = await browser.page(path.as_uri())
        assert await page.evaluate("document.querySelectorAll('svg path').length > 10")
        assert page.errors == [] and page.requests == [path.as_uri()]
