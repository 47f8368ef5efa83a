"""QoServe's loads above capacity for half an hour and for four hours."""

from collections.abc import Sequence

from msgspec.structs import replace

from loadgen.markdown import table
from loadgen.results.section import Results, Section
from loadgen.results.slackline.same_loads import QOSERVE, load_of
from loadgen.results.slackline.systems import OURS, SEEDS, percents, spread

NAMES = ("QoServe, code", "QoServe, conversations", "QoServe, ShareGPT")
LATE_ALPHA = ("qoserve", {"alpha_low_s": "0.008"})
SYSTEMS = ((OURS, dict[str, str]()), QOSERVE, LATE_ALPHA)
LONG_SEED = 24


def render(results: Results, duration_s: float) -> str:
    hours = duration_s / 3600
    # by length: the short runs come first
    lengths = [(hours / 8, SEEDS), (hours, (LONG_SEED,))]
    return table(
        (
            "arrivals",
            "load",
            "requests/s",
            *(f"`{policy}{_shown(settings)}`" for policy, settings in SYSTEMS),
        ),
        [_row(results, name, length_h, seeds) for length_h, seeds in lengths for name in NAMES],
    )


def _row(results: Results, name: str, hours: float, seeds: Sequence[int]) -> Sequence[str]:
    run = replace(load_of(name, 1.0), duration_s=round(3600 * hours, 1))
    cells = []
    for policy, settings in SYSTEMS:
        found = percents(results, replace(run, policy=policy, settings=settings), seeds)
        cells.append(spread(found) if found is None or len(found) > 1 else f"{found[0]:.1f}")
    return (f"{hours:g} h", name, f"{run.rate_rps:g}", *cells)


def _shown(settings: dict[str, str]) -> str:
    return "".join(f":{key}={value}" for key, value in settings.items())


SECTION = Section(
    name="slackline-long",
    title="Overload that lasts",
    paper=f"""\
QoServe's loads of the first table, half as much again as QoServe carries, for half an hour and for
four hours. Requests whose SLO was met, in % of those offered: of half an hour the mean of
{len(SEEDS)} seeds with the least and the most of them, of four hours seed {LONG_SEED}. Beside
`slackline` is `qoserve` as published, and with the setting that suits it best on ShareGPT.""",
    hours=4.0,
    render=render,
    discussion="""\
Over four hours `slackline` is ahead on all three, by 0.1 to 6.0 points over the better setting of
`qoserve`. Over half an hour, in which less work piles up, it is 0.2 to 0.4 points ahead on code and
conversations, and 0.4 behind on ShareGPT.
""",
)
