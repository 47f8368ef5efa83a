"""Ablation: slackline without each of its parts."""

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from loadgen.lab.papers.experiment import Run
from loadgen.lab.papers.section import MISSING, Results, Section
from loadgen.lab.papers.slackline import hard_paces
from loadgen.lab.papers.slackline.same_loads import load_of
from loadgen.lab.papers.slackline.systems import OURS, met_percent, percents_by_importance
from loadgen.markdown import table
from shared.policy.slackline.policy import Part
from shared.rules.tiers import DEMO_3, Tier, TierSet
from shared.vocabulary import Definition, Slo

NAMES = (
    "QoServe, ShareGPT",
    "SLOs-Serve, ChatBot",
    "SLOs-Serve, Coder",
    "SLOs-Serve, Mixed",
    "SLOs-Serve, Reasoning",
    "AdaServe",
)
SHORT_KV, KV_TOKENS = "ChatBot, KV for 30,000 tokens", 30_000
IMPORTANT, SHARE = "the same, important", 0.2
WHOLE_ANSWERS = "`mix`, `demo-3`"
HARD_PACES = "12, 20 and 50 ms alike"
FLAT, FLAT_PROFILE, FLAT_RPS = "6, 12 and 30 ms on a CPU", "cpu-tiny", 3.0
FLAT_CONTEXT_TOKENS = 8192
FLAT_PACES: Mapping[float, float] = {6: 1.0, 12: 1.0, 30: 1.0}
PATIENT, PATIENT_KV_TOKENS = "chat beside batch, KV for 20,000 tokens", 20_000
PATIENT_RPS = 8.0
PATIENT_TIERS = TierSet(
    name="chat-and-batch",
    default="chat",
    tiers={"chat": Tier(slo=Slo(ttft_s=1.0, tbt_s=0.1)), "batch": Tier(slo=Slo(ttlt_s=600.0))},
)
BY_LAST_TOKEN, LAST_TOKEN_TIMES = "ChatBot, judged by `ttlt`", 1.2
SOON = "conversations, whole answers within 30 and 90 s"
SOON_TIERS = TierSet(
    name="soon",
    default="chat",
    tiers={
        "chat": Tier(slo=Slo(ttft_s=6.0, tbt_s=0.05)),
        "soon": Tier(slo=Slo(ttlt_s=30.0)),
        "later": Tier(slo=Slo(ttlt_s=90.0)),
    },
)
SEEDS = (33, 71, 72)
LABELS: Mapping[Part, str] = {
    Part.DOOR: "none is declined at the door",
    Part.RELEGATION: "none leaves the queue",
    Part.DUE_FIRST: "prefills in the order of arrival",
    Part.SIT_OUT: "all decodes in each iteration",
    Part.IN_TIME: "no iteration ends for a prefill, or has prefills alone",
    Part.ALONE: "no prefills without decodes",
    Part.EARNED: "early tokens earn nothing",
    Part.UNHURRIED: "a TTLT may shorten every iteration",
    Part.HURRY: "no answer in a hurry is let go",
    Part.SECOND_LOOK: "what gives way is not looked at again",
    Part.EARLY: "more important requests are not done early",
    Part.PUT_BACK: "none goes back by 8 ms a token",
    Part.GIVEN_UP: "chat never goes back",
    Part.CATCH_UP: "late first tokens are not made up for",
    Part.ROOM: "no KV is left to urgent requests",
    Part.KV: "offers are taken that would find no KV",
    Part.KEPT_PACE: "every pace is kept, whatever it costs others",
    Part.CROWD: "more decodes are taken than a pass has time for",
    Part.SPARING: "best-effort requests have all time that is left",
    Part.OWED: "best-effort requests have no share",
    Part.PROMOTION: "none is promoted",
    Part.CLAIMS: "nobody gives up KV for a more important prompt",
    Part.DRAFTS: "no drafts",
    Part.NEED: "no drafts by need",
    Part.WORTH: "no drafts by worth",
}
# What is changed, as settings.
CHANGES: Mapping[str, Mapping[str, str]] = {
    **{label: {"without": part.value} for part, label in LABELS.items()},
    "replicas are asked in turn": {"router": "round_robin"},
}
Value = Callable[[Results, Run], float | None]
Column = tuple[Run, Value]  # the run of the whole policy, and what is shown of a run


def render(results: Results, duration_s: float) -> str:
    columns = _columns(duration_s)
    base = {name: _each(results, column) for name, column in columns.items()}
    rows = [("whole", *(_mean(values, ".1f") for values in base.values()))]
    for label, settings in CHANGES.items():
        cells = []
        for name, column in columns.items():
            found, whole = _each(results, column, settings), base[name]
            if found is None or whole is None:
                cells.append(MISSING)
                continue
            over = [part - all_ for part, all_ in zip(found, whole, strict=True)]
            cells.append(_mean(over, "+z.1f"))
        rows.append((label, *cells))
    return table(("without", *columns), rows)


def _each(
    results: Results, column: Column, settings: Mapping[str, str] | None = None
) -> Sequence[float] | None:
    """The values by seed with these settings; None while one has not run."""
    run, value = column
    runs = [replace(run, settings=dict(settings or {}), seed=seed) for seed in SEEDS]
    values = [found for run in runs if (found := value(results, run)) is not None]
    return values if len(values) == len(SEEDS) else None


def _mean(values: Sequence[float] | None, form: str) -> str:
    """The mean, with the least and the most in brackets where they differ."""
    if values is None:
        return MISSING
    three = (sum(values) / len(values), min(values), max(values))
    mean, least, most = (format(value, form) for value in three)
    return mean if least == most else f"{mean} ({least} to {most})"


def _columns(duration_s: float) -> Mapping[str, Column]:
    runs = {name: load_of(name, duration_s / 3600) for name in NAMES}
    short_kv = replace(runs["SLOs-Serve, ChatBot"], kv_tokens=KV_TOKENS)
    runs |= {
        SHORT_KV: short_kv,
        IMPORTANT: replace(short_kv, important=SHARE),
        WHOLE_ANSWERS: _whole_answers(duration_s),
        HARD_PACES: hard_paces.run_of(
            hard_paces.PACES[HARD_PACES], Definition.MEAN_TPOT, round(duration_s / 30, 1)
        ),
        FLAT: _flat(duration_s),
        PATIENT: _patient(duration_s),
        SOON: _soon(duration_s),
        BY_LAST_TOKEN: _by_last_token(runs["SLOs-Serve, ChatBot"]),
    }
    return {
        name: (
            replace(run, policy=OURS, settings={}),
            _important_percent if name == IMPORTANT else met_percent,
        )
        for name, run in runs.items()
    }


def _important_percent(results: Results, run: Run) -> float | None:
    """The important requests whose SLO was met."""
    found = percents_by_importance(results, run, (run.seed,))
    return None if found is None else found[0][0]


def _whole_answers(duration_s: float) -> Run:
    return Run(
        policy="",
        workload="mix",
        rate_rps=10.0,
        duration_s=round(300 * duration_s / 3600, 1),
        tiers=DEMO_3,
        replicas=2,
        profile="a100-llama3-8b",
    )


def _flat(duration_s: float) -> Run:
    """Passes of few decodes are as short as the tightest pace there, and those of many are not."""
    run = hard_paces.run_of(FLAT_PACES, Definition.MAX_TPOT_10, round(duration_s / 15, 1))
    return replace(
        run, profile=FLAT_PROFILE, rate_rps=FLAT_RPS, draft=0.0, context_tokens=FLAT_CONTEXT_TOKENS
    )


def _patient(duration_s: float) -> Run:
    """Batch prompts would fill the KV, and urgent ones wait until one of their answers ends."""
    return Run(
        policy="",
        workload="mix",
        rate_rps=PATIENT_RPS,
        duration_s=round(duration_s / 15, 1),
        tiers=PATIENT_TIERS,
        profile="a100-llama3-8b",
        kv_tokens=PATIENT_KV_TOKENS,
    )


def _soon(duration_s: float) -> Run:
    """QoServe's conversations in overload that lasts, with TTLTs of a twentieth."""
    run = load_of("QoServe, conversations", duration_s / 3600)
    return replace(run, tiers=SOON_TIERS, duration_s=round(duration_s / 15, 1))


def _by_last_token(run: Run) -> Run:
    """Above what can be kept, so that some first tokens are late."""
    return replace(run, definition="ttlt", rate_rps=LAST_TOKEN_TIMES * run.rate_rps)


SECTION = Section(
    name="slackline-parts",
    title="Ablation",
    paper=f"""\
Requests whose SLO was met by the whole policy, in %, and the points that are gained or lost without
one of its parts (its setting `without`): the mean of {len(SEEDS)} seeds, with the least and the
most of them where they differ. The first six columns are loads of the matrix at its rates. Of the
others:

- *{FLAT}*: ChatBot at {FLAT_RPS:g} requests/s with windows of ten on the profile `{FLAT_PROFILE}`,
  without a draft model.
- *{PATIENT}*: `mix` at {PATIENT_RPS:g} requests/s on one A100, half with a TTFT of 1 s and a pace
  of 0.1 s, half with a TTLT of ten minutes.
- *{SOON}*: QoServe's load for two minutes, with a TTFT of 6 s and two TTLTs that are a twentieth of
  QoServe's, so that overload lasts.
- *{BY_LAST_TOKEN}*: at {LAST_TOKEN_TIMES:g} times the rate of the matrix.""",
    hours=0.5,
    render=render,
    discussion="""\
Three parts carry the rule: the order by due time, iterations that end where a prefill is due or
have prefills alone, and drafts where paces need them. That a TTLT may not shorten every iteration
matters to whole answers beside tight requests: 4.5 points of `mix`. What early tokens earn matters
most where windows of ten judge short prompts: 3.3 points of Reasoning, and with the seeds and the
rate of the first table, before the last changes, 11.0. Where deadlines judge it matters to `mix`
(1.8), and to short answers with a pace near a pass
([decisions.md](decisions.md)).

That decodes sit out was worth 12 to 16 points before best-effort requests had to wait for others,
and is worth up to 1.6 now. Where there is enough KV the door and relegation from the queue are
worth up to 1.5 and 0.8 on a GPU. That best-effort requests wait brings up to 0.5 there, and up to 4
with the seeds of the first table; their share, without which some would wait for ever, costs 0.6 at
most. The replica that is asked first matters little, since one that declines is followed by
another: 0.9 points less to 0.9 more. Promotion shows little.

On a profile as flat as a CPU's, with paces that few decodes can keep, other parts count: the door
is worth 16.6 points there, that a pace is given up which costs the others theirs 6.4, and that
best-effort requests wait 4.5. That no more decodes are taken than a pass has time for is worth 1.2
in the mean; with one seed of the three it costs 0.8. That decodes sit out costs 1.3 there, and the
share of best-effort requests as much.

Where KV is short, drafts are worth 16.7 points, relegation 8.9, that best-effort requests wait 4.4,
the door 3.0, and that offers are declined which would find no KV 2.6. What early tokens earn costs
1.5 there, the share of best-effort requests 1.4, that decodes sit out 1.0 and promotion 0.7. Why
these cost was not looked for. Where a fifth of the requests are important, the column has these
alone: others give up KV for them, which is worth 11.3 points. Where batch answers would fill little
KV, that some is left to urgent requests is worth 6.6 points to chat and batch together, relegation
1.1, and no other part more than 0.6.

Prefills without decodes, by themselves, are worth all of those 21.9 points of Reasoning, 2.1 of the
10.2 of ChatBot and nothing of Coder's 5.6. They cost 1.6 where KV is short and 1.3 on a CPU.

Drafts by need carry AdaServe's load (49.4 points) and three hard paces (19.4); no other load has a
pace that needs them. Drafts by what the time is worth bring 16.7 where KV is short, and up to 1.7
elsewhere. Without any, AdaServe's load loses less than without those by
need, 44.1; why was not looked for.

Where whole answers are due within 30 and 90 s and overload lasts, the order of due times is worth
22.2 points, that a TTLT may not shorten every iteration 7.4, and that answers in a hurry are let go
4.2. The second look at what gives way is worth 0.9 there and nothing on `mix`; that whole answers
go back by 8 ms a token 2.1 on `mix` and 0.2 there. Chat never goes back on these loads
([decisions.md](decisions.md) has some on which it does). Late first tokens
that are made up for bring 1.7 where `ttlt` judges.

That important requests are done early costs 0.5 in the one column that has any, and with one seed
2.3. It came for replicas near a collapse, where without it 80 to 98 % of the important ones were
kept in place of 97 to 100
([decisions.md](decisions.md)).

Without a switch are how long drafts last by size, which predictions that are exact leave nothing to
do, and the blocks left to drafts. [slackline-leads.md](slackline-leads.md) and
[decisions.md](decisions.md) have what they were worth when they came.
""",
)
