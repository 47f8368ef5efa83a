"""`slackline` beside the ten other policies."""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

from msgspec.structs import replace

from loadgen.lab.papers.drawn import mix, several_bounds, short_kv, whole_answers
from loadgen.lab.papers.loads import (
    CHUNKS,
    FIXED,
    FIXED_CHUNK,
    HARD_PACES,
    LOADS,
    OTHERS,
    OURS,
    PREFILL_FIRST,
    Settings,
    hard_paces,
    load_of,
    run_of,
    settings_of,
    under,
)
from loadgen.lab.papers.run import PROFILE as QOSERVE_PROFILE
from loadgen.lab.papers.run import Half, Run
from loadgen.lab.papers.table import Row, Table
from loadgen.lab.papers.values import (
    Found,
    Results,
    Value,
    across,
    ahead,
    best,
    bound_met,
    capacity,
    highest,
    important_met,
    met,
    met_worth,
    of,
    over,
)
from loadgen.simulator.deployment import Outage
from shared.policy.slackline.policy import Part
from shared.rules.tiers import DEMO_3, Tier, TierSet
from shared.vocabulary import Definition, Slo

SEEDS = (21, 22, 23)  # but for one constant nothing was chosen with these
SIX = ("ChatBot", "Coder", "Summarizer", "Mixed", "ToolLLM", "Reasoning")
NINE = (*SIX, "SOLA, tight", "AdaServe", "Ascendra")
QOSERVE = ("QoServe, code", "QoServe, conversations", "QoServe, ShareGPT")
LATE_ALPHA = OTHERS["qoserve"]


def kept(run: Run, seeds: Sequence[int] = SEEDS) -> Value:
    """Requests whose SLO was met, in % of those offered."""
    return of(met, run, seeds)


def named(policy: str, settings: Settings) -> str:
    shown = ",".join(f"{key}={value}" for key, value in settings.items())
    return f"{policy}:{shown}" if shown else policy


def best_of(run: Run, policy: str) -> Value:
    """The policy at the setting that suits it best there, in the mean of the seeds."""
    every = settings_of(run)[policy]
    return best({named(policy, one): kept(under(run, policy, one)) for one in every})


def unnamed(value: Value) -> Value:
    def found(results: Results) -> Found | None:
        one = value(results)
        return None if one is None else Found(one.each)

    return found


def least(value: Value) -> Value:
    """That of the worst seed."""

    def found(results: Results) -> Found | None:
        one = value(results)
        return None if one is None else Found((min(one.each),))

    return found


# ---------------------------------------------------------------- the same loads


def _same(name: str) -> Row:
    run = load_of(name, 1.0)
    ten = best(
        {
            named(policy, one): kept(under(run, policy, one))
            for policy, every in settings_of(run).items()
            for one in every
        }
    )
    lead = ahead(kept(run), ten)
    return Row(name, f"{run.rate_rps:g}", [kept(run), ten, lead, least(lead)])


def _each(name: str) -> Row:
    run = load_of(name, 1.0)
    return Row(name, "", [unnamed(best_of(run, policy)) for policy in OTHERS])


# ---------------------------------------------------------------- capacity

CAPACITY_SEEDS = (35, 36, 37)
BASELINES = (
    ("vllm", PREFILL_FIRST),
    ("vllm", {"max_num_batched_tokens": "512"}),
    *(("fcfs", {"chunk_tokens": tokens}) for tokens in CHUNKS),
)


def _carried(name: str) -> Row:
    """At most 1 and 10 % violated."""
    return Row(name, "", [*_carried_at(name, 0.01, 0.8), *_carried_at(name, 0.1, 1.0)])


def _carried_at(name: str, violations: float, first: float) -> list[Value]:
    """`first`: the part of the load's rate that is tried first."""
    run = load_of(name, 0.5)
    run = replace(run, rate_rps=float(f"{first * run.rate_rps:.4g}"))
    carried = partial(
        capacity, violations=violations, precision=0.04, step=1.15, seeds=CAPACITY_SEEDS
    )
    ours, baselines = carried(run), carried(*(under(run, *one) for one in BASELINES))
    every = [under(run, policy, one) for policy, s in settings_of(run).items() for one in s]
    # the policies of the papers are tried first: most often one of them passes
    every.sort(key=lambda one: one.policy in FIXED)
    ten = highest(carried(*every), baselines)
    return [ours, ten, over(ours, ten), over(ours, baselines)]


# ---------------------------------------------------------------- above capacity

ABOVE_SEEDS = (31, 61, 62)


def _above(name: str, times: float) -> Row:
    run, seeds = load_of(name, 0.5, times), ABOVE_SEEDS
    qoserve = FIXED_CHUNK if name in SIX else LATE_ALPHA
    return Row(
        name,
        f"{times:g} times",
        [
            kept(run, seeds),
            kept(under(run, "qoserve", qoserve), seeds),
            kept(under(run, "slos_serve"), seeds),
            kept(under(run, "edf"), seeds),
            bound_met(run, seeds),
            of(important_met, replace(run, important=0.2), seeds),
        ],
    )


def _lasting(name: str) -> Row:
    """For half an hour and, with one seed, for four hours."""
    half, four = (replace(load_of(name, 1.0), duration_s=seconds) for seconds in (1800.0, 14400.0))
    policies = (OURS, "qoserve")
    values = [kept(under(half, policy, {})) for policy in policies]
    return Row(name, "", [*values, *(kept(under(four, p, {}), (24,)) for p in policies)])


# ---------------------------------------------------------------- loads drawn at random


# With some of the first two something was chosen; with the others nothing was.
MIXES, WHOLE = (*range(3000, 3050), *range(7000, 7050)), range(9000, 9040)
SEVERAL, LITTLE = range(9400, 9424), range(9100, 9124)


def _population(name: str, what: str, loads: Sequence[Run]) -> Row:
    """By how many points it is ahead of the best of the ten on each load."""
    leads = [
        ahead(met_worth(run), highest(*(met_worth(under(run, policy)) for policy in OTHERS)))
        for run in loads
    ]

    def behind(points: float) -> Value:
        return across(leads, lambda each: float(sum(one < -points for one in each)))

    statistics = [across(leads, fmean), across(leads, median), across(leads, min)]
    return Row(name, what, [*statistics, behind(0.5), behind(3.0)])


# ---------------------------------------------------------------- other conditions

MIX = Run(
    policy=OURS,
    workload="mix",
    rate_rps=10.0,
    duration_s=60.0,
    tiers=DEMO_3,
    replicas=2,
    context_tokens=8192,
    profile="a100-llama3-8b",
)
CASES: Sequence[Mapping[str, Any]] = (
    {},
    {"length_times": 2.0},
    {"engine_times": 1.15},
    {"arrivals": "gamma:3"},
)
MISJUDGED_SEEDS = (32, 61, 62)


def _misjudged(name: str, run: Run, policy: str) -> Row:
    runs = [under(replace(run, **case), policy) for case in CASES]
    return Row(name, f"`{policy}`", [kept(one, MISJUDGED_SEEDS) for one in runs])


def _short_kv(name: str, length: float, kv_tokens: int) -> Row:
    run = replace(load_of(name, length), kv_tokens=kv_tokens)
    policies = (OURS, "slos_serve", "qoserve", "edf", "vllm")
    return Row(name, f"{kv_tokens:,} tokens", [kept(under(run, policy)) for policy in policies])


def _dying(name: str) -> Row:
    """Four replicas at seven tenths of their rate, one of which is dead for the middle third."""
    run = replace(load_of(name, 1.0, 0.7 * 2), replicas=4)
    third_s = run.duration_s / 3
    dead = replace(run, outages=(Outage(0, third_s, third_s),))
    policies = (OURS, "slos_serve", "qoserve")
    values = [kept(under(run, OURS)), *(kept(under(dead, policy)) for policy in policies)]
    return Row(name, "", values)


def _hard(name: str, definition: Definition) -> Row:
    run = hard_paces(HARD_PACES[name], definition, 60.0)
    policies = (OURS, "adaserve", "slos_serve")
    return Row(name, definition.value, [kept(under(run, policy)) for policy in policies])


DEFINITIONS = (Definition.DEADLINE, Definition.MAX_TPOT_10)
TRACE_SEEDS = (1, 2, 3)
CODE, CONVERSATIONS = "azure2023_code_first_half", "azure2023_conv_first_half"
# The second half of each trace. On the first half each of the ten got its setting, and the rate was
# chosen; beside `slackline` stands the best of them with that setting.
TRACES: Mapping[str, tuple[Run, str, Settings]] = {
    "Azure, code; QoServe's tiers": (
        run_of(CODE, "qoserve-3", 16.0, 120, "deadline", profile=QOSERVE_PROFILE),
        "qoserve",
        LATE_ALPHA,
    ),
    "the same; Coder's": (
        run_of(CODE, "slos-serve-coder", 4.0, 100, "max-tpot-10"),
        "qoserve",
        FIXED_CHUNK,
    ),
    "Azure, conversations; ChatBot's": (
        run_of(CONVERSATIONS, "slos-serve-chatbot", 18.0, 60, "max-tpot-10"),
        "slos_serve",
        {},
    ),
    "Mooncake; QoServe's": (
        run_of(
            "mooncake_conversation_first_half",
            "qoserve-3",
            2.5,
            300,
            "deadline",
            profile=QOSERVE_PROFILE,
        ),
        "qoserve",
        LATE_ALPHA,
    ),
    "ServeGen, images; Ascendra's": (
        run_of("servegen_mm_image_0900_1100", "ascendra-8b-sharegpt", 20.0, 60, "mean-tpot"),
        "slos_serve",
        {},
    ),
    "ServeGen, large; AdaServe's": (
        run_of("servegen_m_large_day2_1000_1100", "adaserve-3", 22.0, 30, "mean-tpot", wait_s=20.0),
        "slos_serve",
        {"speculate": "paper"},
    ),
}


def _trace(name: str) -> Row:
    run, policy, settings = TRACES[name]
    run = replace(run, half=Half.SECOND)
    ours = kept(run, TRACE_SEEDS)
    theirs = kept(under(run, policy, settings), TRACE_SEEDS)
    labelled = best({named(policy, settings): theirs})
    return Row(name, f"{run.rate_rps:g}", [ours, labelled, least(ahead(ours, theirs))])


# ---------------------------------------------------------------- ablation

PARTS_SEEDS = (33, 71, 72)
# The parts that bring two points or more on one of the loads below.
LABELS: Mapping[Part, str] = {
    Part.DUE_FIRST: "prefills in the order of arrival",
    Part.IN_TIME: "no iteration ends for a prefill, or has prefills alone",
    Part.ALONE: "no prefills without decodes",
    Part.NEED: "no drafts by need",
    Part.WORTH: "no drafts by worth",
    Part.DOOR: "none is declined at the door",
    Part.CLAIMS: "nobody gives up KV for a more important prompt",
    Part.RELEGATION: "none leaves the queue",
    Part.UNHURRIED: "a TTLT may shorten every iteration",
    Part.ROOM: "no KV is left to urgent requests",
    Part.KEPT_PACE: "every pace is kept, whatever it costs others",
    Part.SPARING: "best-effort requests have all time that is left",
    Part.HURRY: "no answer in a hurry is let go",
    Part.EARNED: "early tokens earn nothing",
    Part.KV: "offers are taken that would find no KV",
    Part.PUT_BACK: "none goes back by 8 ms a token",
}
CHAT_AND_BATCH = TierSet(
    name="chat-and-batch",
    default="chat",
    tiers={"chat": Tier(slo=Slo(ttft_s=1.0, tbt_s=0.1)), "batch": Tier(slo=Slo(ttlt_s=600.0))},
)
SOON = TierSet(
    name="soon",
    default="chat",
    tiers={
        "chat": Tier(slo=Slo(ttft_s=6.0, tbt_s=0.05)),
        "soon": Tier(slo=Slo(ttlt_s=30.0)),
        "later": Tier(slo=Slo(ttlt_s=90.0)),
    },
)
CHATBOT = load_of("ChatBot", 0.5)
LITTLE_KV = replace(CHATBOT, kv_tokens=30_000)
COLUMNS: Mapping[str, Run] = {
    **{n: load_of(n, 0.5) for n in ("QoServe, ShareGPT", "ChatBot", "Coder", "Mixed", "Reasoning")},
    "AdaServe": load_of("AdaServe", 0.5),
    "little KV": LITTLE_KV,
    "little KV, important": replace(LITTLE_KV, important=0.2),
    "mix": replace(MIX, context_tokens=18_432, duration_s=150.0),
    "hard paces": hard_paces(HARD_PACES["12, 20 and 50 ms alike"], Definition.MEAN_TPOT, 60.0),
    "hard paces, CPU": replace(
        hard_paces({6: 1.0, 12: 1.0, 30: 1.0}, Definition.MAX_TPOT_10, 120.0),
        profile="cpu-tiny",
        rate_rps=3.0,
        draft=0.0,
        context_tokens=8192,
    ),
    "chat and batch, little KV": Run(
        policy=OURS,
        workload="mix",
        rate_rps=8.0,
        duration_s=120.0,
        tiers=CHAT_AND_BATCH,
        profile="a100-llama3-8b",
        kv_tokens=20_000,
    ),
    "answers within 30 and 90 s": replace(
        load_of("QoServe, conversations", 0.5), tiers=SOON, duration_s=120.0
    ),
    "judged by ttlt": replace(CHATBOT, definition="ttlt", rate_rps=1.2 * CHATBOT.rate_rps),
}


def _without(part: Part) -> Row:
    """The points that the policy gains without the part, on the load where it loses most."""
    gains = {}
    for name, run in COLUMNS.items():
        read = important_met if name.endswith("important") else met
        without = replace(run, settings={"without": part.value})
        gains[name] = ahead(of(read, without, PARTS_SEEDS), of(read, run, PARTS_SEEDS))
    return Row(LABELS[part], "", [_lowest(gains)])


def _lowest(candidates: Mapping[str, Value]) -> Value:
    """The candidate with the lowest mean, and which it is."""

    def value(results: Results) -> Found | None:
        found = {label: one(results) for label, one in candidates.items()}
        known = {label: one for label, one in found.items() if one is not None}
        if len(known) < len(found):
            return None
        label = min(known, key=lambda label: known[label].mean)
        return Found(known[label].each, label)

    return value


TEN = tuple(f"`{policy}`" for policy in OTHERS)
TABLES = (
    Table(
        "slackline-matrix",
        ("load", "requests/s", "`slackline`", "the best of the ten", "ahead", "worst seed"),
        [_same(name) for name in LOADS],
        (".1f", ".1f", "+.1f", "+.1f"),
    ),
    Table("which-policy", ("load", *TEN), [_each(name) for name in LOADS], (".0f",)),
    Table(
        "slackline-capacity",
        (
            "load",
            *("`slackline`, 1 %", "the ten", "ratio", "over vLLM, Sarathi"),
            *("`slackline`, 10 %", "the ten", "ratio", "over vLLM, Sarathi"),
        ),
        [_carried(name) for name in NINE],
        (".3g", ".3g", ".2f", ".2f"),
    ),
    Table(
        "slackline-above",
        ("load", "rate", "`slackline`", "`qoserve`", "`slos_serve`", "`edf`", "bound", "important"),
        [
            _above(name, times)
            for name in ("QoServe, code", "QoServe, ShareGPT", "ChatBot", "Mixed")
            for times in (1.5, 2.0)
        ],
        (".1f",),
    ),
    Table(
        "slackline-lasting",
        ("load", "`slackline`, half an hour", "`qoserve`", "`slackline`, four hours", "`qoserve`"),
        [_lasting(name) for name in QOSERVE],
        (".1f",),
    ),
    Table(
        "slackline-drawn",
        ("drawn as", "loads", "mean", "median", "least", "behind by 0.5", "by 3"),
        (
            _population("mixes", "100", [mix(seed, 400) for seed in MIXES]),
            _population("whole-answers", "40", [whole_answers(s, 1200) for s in WHOLE]),
            _population("several-bounds", "24", [several_bounds(s, 400) for s in SEVERAL]),
            _population("short-kv", "24", [short_kv(s, 800) for s in LITTLE]),
        ),
        ("+.1f", "+.1f", "+.1f", ".0f", ".0f"),
    ),
    Table(
        "slackline-traces",
        ("trace; tiers", "requests/s", "`slackline`", "the best of the ten", "ahead, worst seed"),
        [_trace(name) for name in TRACES],
        (".1f", ".1f", "+.1f"),
    ),
    Table(
        "slackline-kv",
        ("load", "KV", "`slackline`", "`slos_serve`", "`qoserve`", "`edf`", "`vllm`"),
        (
            _short_kv("ChatBot", 1.0, 30_000),
            _short_kv("Mixed", 1.0, 30_000),
            _short_kv("Ascendra", 0.5, 60_000),
            _short_kv("QoServe, ShareGPT", 0.4, 40_000),
        ),
        (".1f",),
    ),
    Table(
        "slackline-paces",
        ("paces", "judged by", "`slackline`", "`adaserve`", "`slos_serve`"),
        [_hard(name, definition) for name in HARD_PACES for definition in DEFINITIONS],
        (".1f",),
    ),
    Table(
        "slackline-misjudged",
        ("load", "", "as predicted", "outputs halved", "engine 15 % slower", "bursts"),
        [
            _misjudged(name, run, policy)
            for name, run in {
                "Coder": load_of("Coder", 0.5, 0.9),
                "Mixed": load_of("Mixed", 0.5, 0.9),
                "Ascendra": load_of("Ascendra", 0.5, 0.9),
                "`mix`": MIX,
            }.items()
            for policy in (OURS, "slos_serve")
        ],
        (".1f",),
    ),
    Table(
        "slackline-dying",
        ("load", "`slackline`, all alive", "`slackline`", "`slos_serve`", "`qoserve`"),
        [_dying(name) for name in ("QoServe, ShareGPT", "Coder", "Mixed", "Ascendra")],
        (".1f",),
    ),
    Table(
        "slackline-parts",
        ("without", "loses most"),
        [_without(part) for part in LABELS],
        ("+.1f",),
    ),
)
