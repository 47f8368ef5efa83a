"""The chapter on slackline: the page docs/slackline-results.md."""

from loadgen.lab.papers.section import Chapter, Page
from loadgen.lab.papers.slackline import (
    above_capacity,
    at_ninety,
    capacities,
    changes,
    fleets,
    hard_paces,
    long_overload,
    mixes,
    parts,
    recorded_traces,
    recovery,
    robustness,
    same_loads,
    several_bounds,
    short_kv,
    short_kv_mixes,
    tight_pace,
    whole_answers,
)
from loadgen.lab.papers.slackline.systems import OTHERS, SEEDS

PAGE = Page(
    file="slackline-results.md",
    introduction="""\
# Slackline beside the ten

What the policy [slackline](slackline.md) keeps, beside the ten other policies on the same requests,
simulated on the project's own cores without control latency ([simulator.md](simulator.md)). The
page is made by `python -m loadgen.lab.papers --only slackline`. Its runs are kept in
[runs/](runs/slackline-results.jsonl.xz), so that a change of one policy repeats only those of that
policy. `--list` says which sections have runs to repeat.
""",
    chapters=(
        Chapter(
            name="slackline",
            title="Tables",
            setup=f"""\
- `slackline` has no setting to choose, and has none here.
- Seeds are {", ".join(map(str, SEEDS))}, drawn with the load, or named. None was tuned with, but
  for four constants. How early important requests are to be done, 0.2 s, was chosen on the loads
  drawn at random and on Overload; for how long best-effort requests wait after another gave way,
  10 s, on the loads of the matrix with seed 21; how long an iteration may be in which they come
  first, 1.5 passes, on Overload; what they are owed while a prefill waits, 1 % of the time, with
  seeds 25 to 32 and 41 to 44 of six loads.
- `slackline` changed from 2026-11-24 to 2026-11-29 ([decisions.md](decisions.md)). A table has the
  policy as it was on the day that stands above it. What changed on 2026-11-25 concerns paces near a
  pass, drafts where a pace needs them, earned time under deadlines, and TTLTs of different length
  side by side: of six loads under Ablation QoServe's gained 0.1 points, AdaServe's 0.8, `mix` lost
  0.6, and no other moved. Its rules were chosen with seeds 1 to 3 of one load of hard paces, seeds
  40, 43 and 44 of those below, seeds 31, 33 and 34 of AdaServe's, and seeds 5000 to 5159 and 6000
  to 6299 of the loads drawn at random. Last, whole answers draft and hurry less; that was chosen on
  [loads drawn as those of whole answers](decisions.md),
  with other seeds of a script. It moved 2.1 points of `mix` under Ablation, 0.2 of the mix that
  drifts, and a few of the loads drawn at random by less than one.
- What changed on 2026-11-26 concerns short KV and the batch that ends at a due time. Last, offers
  that would find no KV are declined, and drafts have blocks of their own
  ([why](decisions.md)). What
  changed on 2026-11-27 concerns KV where some requests are more important than others, paces that
  deadlines judge, and last whole answers some of which are more important. Of other loads no run
  changed, and those are older. It was chosen with seeds 40, 43, 44 and 51 to 53 of hard paces, 6300
  to 6590 of loads drawn at random, 43 and 44 of six loads of the matrix at 1.2 times their rates,
  short answers on a profile as flat as a CPU's, and for whole answers loads of a script.
- What changed on 2026-11-28 concerns
  [paces beside whole answers](decisions.md), what counts
  before a pace is given up, and, where a TTLT is five minutes at most,
  [what an answer in a hurry may cost](decisions.md).
  All runs with a TTLT, and those with several paces beside a short TTFT, are of that day. Last,
  whole answers that give way have [a second look](decisions.md). It was
  chosen with seeds 32, 61 and 62 of `mix` under What is misjudged, and with 13 of the loads of
  whole answers within a minute. Of the runs with TTLTs beyond five minutes it moved some of half an
  hour; 119 shorter ones were run again, and none had other figures.
- What changed on 2026-11-29 concerns requests with a TTLT beside another bound
  ([why](decisions.md)). One table has such tiers.
- The rule for windows of ten was chosen with seeds 31 to 37 at other rates and lengths. Some of
  these stand below: 31 under Overload, 32 under What is misjudged, 33 under Ablation, 34 under
  Fleets, 35 under the rate at which it keeps 90 %, and 35 to 37 under Capacity.
- On loads drawn at random each other policy has one setting, the one that suits most loads:
  {", ".join(f"`{name}`" for name, settings in OTHERS.items() if not settings)} their defaults,
  Sarathi's orders a chunk of 512 tokens, `qoserve` `alpha_low_s=0.008`, `sola`
  `max_batch_tokens=1024`, `vllm` `max_num_batched_tokens=512`.
""",
            sections=(
                same_loads.SECTION,
                at_ninety.SECTION,
                recorded_traces.SECTION,
                mixes.SECTION,
                whole_answers.SECTION,
                several_bounds.SECTION,
                short_kv.SECTION,
                short_kv_mixes.SECTION,
                capacities.SECTION,
                tight_pace.SECTION,
                hard_paces.SECTION,
                above_capacity.SECTION,
                long_overload.HALF_AN_HOUR,
                long_overload.FOUR_HOURS,
                recovery.SECTION,
                robustness.SECTION,
                changes.SECTION,
                parts.SECTION,
                fleets.SECTION,
            ),
        ),
    ),
)
