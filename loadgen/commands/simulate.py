"""`slackline simulate`: the same plan of requests as `slackline load`, served by the live cores in
virtual time.
"""

import argparse
import sys

import msgspec
from rich.console import Console

from loadgen.commands.trial_arguments import add_run_arguments, read_run
from loadgen.lab.figures import Figures
from loadgen.lab.figures_table import circumstances, figures_table, named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)


def run(args: argparse.Namespace) -> int:
    console = Console(stderr=True)
    trial, plan = read_run(args, console)
    with console.status("") as status:
        result = trial.serve(
            plan.requests,
            check_every=args.check,
            progress=lambda now_s, ended: status.update(
                f"{now_s:.0f} s simulated, {ended} of {len(plan.requests)} requests ended"
            ),
        )
    found = trial.judge(plan.requests, result)
    if args.json:
        print(msgspec.json.encode(found).decode())
        return 0
    out = Console(width=None if sys.stdout.isatty() else 120)
    title = f"{named(found.policy, found.settings)}: {circumstances(found, found.rate_rps)}"
    out.print(title, highlight=False, markup=False, soft_wrap=True)
    out.print(figures_table(found, plan.tiers))
    out.print(_line(found), highlight=False)
    return 0


def _line(found: Figures) -> str:
    drafts = ""
    if found.verifications:
        drafts = (
            f"{found.accepted} of {found.drafted} drafted tokens accepted, {1 + found.accepted / found.verifications:.2f} tokens per "
            f"verification (draft {found.draft:g}, acceptance {found.acceptance:g})\n"
        )
    return drafts + (
        f"goodput {found.goodput_rps:.2f} requests/s; {found.relegated} relegated, {found.preempted} preemptions\n"
        f"{found.simulated_s:.0f} s simulated in {found.wall_s:.1f} s ({found.requests_per_wall_s:.0f} requests per second): "
        f"{found.iterations} iterations, engines {100 * found.busy_fraction:.0f} % busy"
    )
