"""The time until requests are in time again after a burst."""

from collections.abc import Sequence

from msgspec.structs import replace

from loadgen.lab.papers.latency_windows import Windows
from loadgen.lab.papers.matrix.settings import Settings
from loadgen.lab.papers.section import MISSING, Results, Section
from loadgen.lab.papers.slackline.same_loads import load_of
from loadgen.lab.papers.slackline.systems import FIXED_CHUNK, OTHERS, OURS, SEEDS, percents, spread
from loadgen.markdown import table

NAME = "SLOs-Serve, ChatBot"
SYSTEMS: Sequence[tuple[str, Settings]] = (
    (OURS, {}),
    ("qoserve", OTHERS["qoserve"]),
    ("qoserve", FIXED_CHUNK),
    ("slos_serve", {"sit_out": "true"}),
)
# Times the rate of the matrix; the burst is the second sixth of the run.
LIGHT, BURST = 0.7, 2.0
WINDOWS = 24
RECOVERED = 0.1  # of the requests that arrive in a window, at most so many are violated


def render(results: Results, duration_s: float) -> str:
    sixth_s, window_s = duration_s / 6, duration_s / WINDOWS
    load = replace(
        load_of(NAME, 1.0),
        duration_s=duration_s,
        bursts=f"{sixth_s:g}:{LIGHT:g},{sixth_s:g}:{BURST:g},{4 * sixth_s:g}:{LIGHT:g}",
        window_s=window_s,
    )
    rows = []
    for policy, settings in SYSTEMS:
        run = replace(load, policy=policy, settings=dict(settings))
        found = [results.result(replace(run, seed=seed)) for seed in SEEDS]
        windows = [each.windows for each in found if each is not None and each.windows is not None]
        late_s = [recovery_s(each, window_s, 2 * sixth_s) for each in windows]
        shown = ", ".join("never" if each is None else f"{each:.0f}" for each in late_s)
        met = spread(percents(results, run, SEEDS))
        name = ":".join((policy, ",".join(f"{key}={settings[key]}" for key in settings)))
        name = f"`{name.strip(':')}`"
        rows.append((name, met, shown if len(late_s) == len(SEEDS) else MISSING))
    return table(("", "SLO met, %", "recovered after, s"), rows)


def recovery_s(windows: Windows, window_s: float, ended_s: float) -> float | None:
    """The time from the end of a burst to the first window of arrivals that recovered.

    None: none did.
    """
    for n, fraction in enumerate(windows.violated_fraction):
        since_s = n * window_s - ended_s
        if since_s > -1e-6 and fraction is not None and fraction <= RECOVERED:
            return max(0.0, since_s)
    return None


SECTION = Section(
    name="slackline-recovery",
    title="After a burst",
    paper=f"""\
Two minutes of ChatBot at {LIGHT:g} times the rate of the first table, but for 20 s at {BURST:g}
times it. Arrivals are counted in windows of 5 s. The fleet has recovered with the first window
after the burst of which at most {100 * RECOVERED:g} % are violated; the table says how long after
its end that window begins, for each seed.""",
    hours=120 / 3600,
    render=render,
    discussion="""\
Of the windows in the burst `slackline` loses 22 to 47 %, and of those after it at most 8 %.
`qoserve` does not recover with either setting within the minute and a third that are left;
`slos_serve` does, within 5 s, and keeps 8.0 points less.
""",
)
