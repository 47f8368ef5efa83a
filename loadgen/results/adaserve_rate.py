"""AdaServe Figures 8, 9 and 12: attainment, goodput and accepted tokens over the rate."""

from msgspec.structs import replace

from loadgen.results import adaserve_runs as runs
from loadgen.results.section import Lab, Section
from loadgen.simulation import Figures

RATES_RPS = (2.6, 3.4, 4.0, 4.4, 4.8, 5.6)
HIGHEST_RPS = 4.8  # in the paper
DRAFTING = [system for system, (_, settings) in runs.SYSTEMS.items() if system == runs.OURS or "spec_tokens" in settings]
ACCEPTANCES = (0.6, 0.8)
GUESSED = (runs.OURS, "vLLM-Spec(4)", "vLLM-Spec(8)")


def body(lab: Lab, duration_s: float) -> str:
    found = {
        rate_rps: runs.served(lab, {system: runs.run(system, rate_rps, duration_s) for system in runs.SYSTEMS}) for rate_rps in RATES_RPS
    }
    rows = {f"{rate_rps:g}": of for rate_rps, of in found.items()}
    drafting = {rate: {system: of[system] for system in DRAFTING} for rate, of in rows.items()}
    published, rivals = [of for rate_rps, of in found.items() if rate_rps <= HIGHEST_RPS], list(runs.BASELINES)
    guessed = {system: runs.run(system, HIGHEST_RPS, duration_s) for system in GUESSED}
    accepting = {
        f"{acceptance:g}": runs.served(lab, {system: replace(run, acceptance=acceptance) for system, run in guessed.items()})
        for acceptance in ACCEPTANCES
    }
    return "\n\n".join(
        (
            "SLO attainment, of all requests offered:",
            runs.by_system("requests/s", rows, runs.attained_percent, percent=True),
            "Goodput, tokens/s of attained requests:",
            runs.by_system("requests/s", rows, lambda of: of.goodput_tokens_per_s),
            "Tokens per request and verification, the target's own counted:",
            runs.by_system("requests/s", drafting, tokens_per_verification),
            runs.claims(
                (
                    ("attainment, at most", 2.1, runs.most([runs.more_attained(of, rivals) for of in published])),
                    (f"unattained at {HIGHEST_RPS:g} requests/s, fewer by", 4.3, runs.fewer_unattained(found[HIGHEST_RPS], rivals)),
                    ("goodput, at most", 1.9, runs.most([runs.more_goodput(of, rivals) for of in published])),
                )
            ),
            f"Attainment at {HIGHEST_RPS:g} requests/s with drafts that are worse or better than assumed:",
            runs.by_system("acceptance", accepting, runs.attained_percent, percent=True),
        )
    )


def tokens_per_verification(of: Figures) -> float:
    return 1 + of.accepted / max(1, of.verifications)


SECTION = Section(
    name="adaserve-rate",
    title="Figures 8, 9 and 12: over the rate",
    paper="Llama-3.1-70B on four A100s with a draft of 1B; 60 % coding, 20 % chat, 20 % summary; 2.6 to 4.8 requests/s. Claimed over the "
    "best baseline: 2.1 times the attainment, at 4.8 requests/s 4.3 times fewer unattained, 1.9 times the goodput. AdaServe accepts less "
    "the heavier the load, vLLM-Spec always as much. The figures have no numbers.",
    hours=0.07,
    body=body,
    notes="",
)
