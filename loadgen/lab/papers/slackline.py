"""The laboratory's comparison of the policy `slackline`: with other policies on 27 loads, and with
itself without each of its constants.
"""

from collections.abc import Mapping
from functools import partial

from msgspec.structs import replace

from loadgen.lab.papers.drawn import mix, several_bounds
from loadgen.lab.papers.loads import (
    HARD_PACES,
    LOADS,
    OTHERS,
    OURS,
    hard_paces,
    load_of,
    settings_of,
    under,
)
from loadgen.lab.papers.run import WITHOUT, Run
from loadgen.lab.papers.table import Row, Table
from loadgen.lab.papers.values import ahead, extreme, met, met_worth, of
from loadgen.simulator.deployment import Outage
from shared.rules.tiers import DEMO_3, Tier, TierSet
from shared.vocabulary import Definition, Slo

SEEDS = (601, 602, 603)  # nothing was chosen with 603
# Of the twelve: the part of their length in the matrix of rates.
TWELVE = dict(
    zip(LOADS, (0.25, 0.25, 0.4, 0.7, 0.7, 0.8, 0.7, 0.5, 0.35, 0.7, 0.7, 0.6), strict=True)
)
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
CHATBOT = load_of("ChatBot", 0.7)
LITTLE_KV = replace(CHATBOT, kv_tokens=30_000)
MIX = Run(
    policy=OURS,
    workload="mix",
    rate_rps=10.0,
    duration_s=60.0,
    tiers=DEMO_3,
    replicas=2,
    profile="a100-llama3-8b",
)
COLUMNS: Mapping[str, Run] = {
    **{name: load_of(name, part) for name, part in TWELVE.items()},
    **{f"mix {n}": mix(n, 300) for n in (50105, 50106, 50107)},
    "several bounds 50106": several_bounds(50106, 300),
    "answers within 30 and 90 s": replace(
        load_of("QoServe, conversations", 0.25), tiers=SOON, duration_s=60.0
    ),
    "ChatBot, KV for 30,000": LITTLE_KV,
    "the same, a fifth important": replace(LITTLE_KV, important=0.2),
    "Mixed x1.5, a fifth important": replace(load_of("Mixed", 0.6, 1.5), important=0.2),
    "the mix of demo-3": MIX,
    "12, 20 and 50 ms": hard_paces(
        HARD_PACES["12, 20 and 50 ms alike"], Definition.MEAN_TPOT, 45.0
    ),
    "6, 12 and 30 ms, a CPU": replace(
        hard_paces({6: 1.0, 12: 1.0, 30: 1.0}, Definition.MAX_TPOT_10, 60.0),
        profile="cpu-tiny",
        rate_rps=3.0,
        draft=0.0,
        context_tokens=8192,
    ),
    "chat beside batch, KV for 20,000": replace(
        MIX, rate_rps=8.0, duration_s=90.0, tiers=CHAT_AND_BATCH, replicas=1, kv_tokens=20_000
    ),
    "ChatBot, judged by `ttlt`": replace(
        CHATBOT, definition="ttlt", rate_rps=1.2 * CHATBOT.rate_rps
    ),
    "QoServe, code x2": load_of("QoServe, code", 0.25, 2.0),
    "ChatBot x1.5": load_of("ChatBot", 0.5, 1.5),
}
# Ways in which replicas differ from what profiles and plans say.
MIXED, LENGTH_S = load_of("Mixed", 0.6, 0.9), 36.0
MISJUDGED: Mapping[str, Run] = {
    "Mixed x0.9, as predicted": MIXED,
    "the same, outputs halved": replace(MIXED, length_times=2.0),
    "the same, outputs doubled": replace(MIXED, length_times=0.5),
    "the same, engine 15 % slower": replace(MIXED, engine_times=1.15),
    "the same, bursts": replace(MIXED, arrivals="gamma:3"),
    "Mixed x0.7, one of four replicas dies": replace(
        load_of("Mixed", 0.6, 1.4), replicas=4, outages=(Outage(0, LENGTH_S / 3, LENGTH_S / 3),)
    ),
}
RIVALS = ("slos_serve", "qoserve", "edf")


kept = partial(met_worth, seeds=SEEDS)


def _each(name: str) -> Row:
    """The ten other policies on a load of the papers, each at the setting that suits it best."""
    run = load_of(name, 1.0)
    values = []
    for policy in OTHERS:
        every = [of(met, under(run, policy, one), (21, 22, 23)) for one in settings_of(run)[policy]]
        values.append(extreme(max, [("", one) for one in every]))
    return Row(name, "", values)


def _load(name: str, run: Run) -> Row:
    return Row(name, f"{run.rate_rps:.3g}", [kept(run), *(kept(under(run, p)) for p in RIVALS)])


# ---------------------------------------------------------------- constants

# The value that stands in place of each constant: one without any effect, or of another size.
CONSTANTS: Mapping[str, tuple[float, str]] = {
    "bounds.LOOSE_S": (1.6, "no pace looser than 0.2 s"),
    "bounds.STEP_MARGIN": (1.0, "iterations 1.2 times as long as lately"),
    "bounds.RESERVE": (1.0, "0.65 of a TTLT kept for the output at most"),
    "bounds.HASTE": (1.0, "4 times the pace that a TTLT asks"),
    "bounds.SHARE": (1.0, "0.6 of the time for passes at most"),
    "bounds.EARLY_S": (0.0, "0.2 s early if important"),
    "bounds.MARGIN_S": (0.0, "a margin of 1 ms"),
    "prices.CHUNK_TOKENS": (256, "prompts priced in chunks of 2,048"),
    "give_way.LOOKS": (8, "512 prefills weighed"),
    "give_way.BATCH_TOKENS": (512, "4,096 prompt tokens at most"),
    "kv.GROWTH": (0.0, "a quarter of the growth kept"),
    "kv.SURE": (0.0, "2 deviations fewer end"),
    "kv.PATIENT_S": (1e9, "patient from 30 s on"),
    "kv.FADES_S": (10.0, "a peak fades in 600 s"),
    "kv.TIMES": (1.0, "twice the seconds before a claim"),
    "iteration.FIRST": (1, "12 looked at one by one"),
    "iteration.DRAFT_BLOCKS": (0, "2 blocks left to drafts"),
    "drafts.NEEDED": (0.0, "drafts below 2 passes"),
    "drafts.SURE": (1.0, "half counts where windows judge"),
    "drafts.FADE": (0.2, "a weight of 0.02"),
    "drafts.FORGOTTEN": (0.05, "a weight of 0.0005 without drafts"),
    "drafts.PART": (0.0, "a tenth for prompts and contexts"),
    "policy.STEP_WEIGHT": (0.1, "a weight of 0.005"),
    "policy.SPARING_S": (0.0, "10 s of sparing"),
    "policy.OWED": (0.05, "1 % owed to best-effort"),
}
ONE_SEED = (SEEDS[0],)
# The loads on which some constant matters.
SENSITIVE = (
    "several bounds 50106",
    "the same, a fifth important",
    "the mix of demo-3",
    "12, 20 and 50 ms",
    "chat beside batch, KV for 20,000",
)


def _without(constant: str) -> Row:
    """The points that the policy gains with the other value, on the load where it loses most."""
    value, what = CONSTANTS[constant]
    gains = [
        (
            name,
            ahead(
                met_worth(replace(run, settings={WITHOUT: f"{constant}={value:g}"}), ONE_SEED),
                met_worth(run, ONE_SEED),
            ),
        )
        for name, run in ((name, COLUMNS[name]) for name in SENSITIVE)
    ]
    return Row(f"`{constant}`", f"{what}; {value:g}", [extreme(min, gains)])


TABLES = (
    Table(
        "slackline",
        ("load", "requests/s", "`slackline`", *(f"`{policy}`" for policy in RIVALS)),
        [_load(name, run) for name, run in {**COLUMNS, **MISJUDGED}.items()],
        (".1f",),
    ),
    Table(
        "which-policy",
        ("load", *(f"`{policy}`" for policy in OTHERS)),
        [_each(name) for name in LOADS],
        (".0f",),
    ),
    Table(
        "slackline-constants",
        ("constant", "what it is; in its place", "loses most"),
        [_without(constant) for constant in CONSTANTS],
        ("+.1f",),
    ),
)
