"""Settings of `slos_serve` that are not in its paper, on the loads where they matter."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.lab.papers.experiment import Run, violated_fraction
from loadgen.lab.papers.matrix.loads import LOADS
from loadgen.lab.papers.section import Results, Section, figure
from loadgen.markdown import table

SEED = 7  # that of the matrix' search for the rates


class Row(NamedTuple):
    """A load of the matrix at its rate there, one setting, and another policy beside it."""

    load: str
    rate_rps: float
    duration_s: float
    setting: Mapping[str, str]
    other: str


WORK, BY_NEED, SIT_OUT = (
    {"long_deadlines": "work"},
    {"speculate": "by_need"},
    {"sit_out": "true"},
)
ROWS = (
    Row("QoServe, code", 11.3, 300, WORK, "qoserve"),
    Row("QoServe, conversations", 13.0, 300, WORK, "qoserve"),
    Row("QoServe, ShareGPT", 5.99, 300, WORK, "qoserve"),
    Row("AdaServe", 23.4, 150, BY_NEED, "adaserve"),
    Row("SLOs-Serve, Reasoning", 0.682, 1200, SIT_OUT, "vllm"),
    Row("SLOs-Serve, ChatBot", 18.5, 240, SIT_OUT, "vllm"),
)


def run_of(row: Row, policy: str, settings: Mapping[str, str], times: float) -> Run:
    load = next(load for load in LOADS if load.name == row.load)
    return replace(
        load.run,
        policy=policy,
        settings=dict(settings),
        rate_rps=row.rate_rps,
        duration_s=round(times * row.duration_s, 1),
        seed=SEED,
    )


def render(results: Results, duration_s: float) -> str:
    def met(row: Row, policy: str, settings: Mapping[str, str]) -> str:
        figures = results.figures(run_of(row, policy, settings, duration_s / 3600))
        percent = None if figures is None else 100 * (1 - violated_fraction(figures))
        return figure(percent, percent=True)

    return table(
        ("load", "requests/s", "setting", "default", "with it", "beside it"),
        [
            (
                row.load,
                f"{row.rate_rps:g}",
                " ".join(f"`{key}={value}`" for key, value in row.setting.items()),
                met(row, "slos_serve", {}),
                met(row, "slos_serve", row.setting),
                f"{met(row, row.other, {})} `{row.other}`",
            )
            for row in ROWS
        ],
    )


SECTION = Section(
    name="slos-serve-beyond",
    title="Beyond the paper: three settings",
    paper="""\
The paper has none of these. Requests met, in %, on loads and at rates of the matrix
([which-policy.md](which-policy.md)); QoServe's loads for the first five minutes.""",
    hours=1,
    render=render,
    discussion="""\
`long_deadlines=work`: admission as in the paper counts each request that it has taken with its
final KV and as a decode for ever. That is right where all prefills are due within seconds; where
they may wait for half an hour it refuses requests for whose first token there is time. Counted as
work alone, such a request promises neither until its prefill is due within 20 s. What was tried: a
replica whose KV is short for what is due within seconds (40,000 tokens, `chatbot`, half of the
requests with ten minutes). There it meets 70 % where the default meets 76, since a request that has
begun is not preempted. Four hours were not tried.

`speculate=by_need`: coding needs a token in 1.2 times what a decode alone takes. Lengths that hold
every window of ten tokens leave no time for prompts there, the mean does; that load is judged by
the mean. Everywhere else it is the default (ChatBot and Mixed are the same to the request).
`speculate=paper` alone meets as much.

`sit_out=true`: in Reasoning a short prompt is due after 42 ms, and an iteration of its decodes
takes 25. Alone it takes 14, while each decode may wait 50. It is a setting and not the default
since Algorithm 2 does not have it: there batches are as long as the tightest TPOT, and every decode
of that TPOT is in each. In runs of 80 to 150 s on the other loads of SLOs-Serve, SOLA and AdaServe
it was never worse. What was tried: the same without shortening the batch that follows; the decodes
then have their next token too late, and 6 % of ChatBot broke their pace.
""",
)
