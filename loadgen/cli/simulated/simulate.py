"""`slackline simulate`: serves a plan of requests with the live cores, in virtual time."""

import argparse
import math
import time
from dataclasses import replace

import msgspec

from loadgen.cli.explain import show
from loadgen.cli.options.option import add_options
from loadgen.cli.options.plan import Plan
from loadgen.cli.options.trial import add_run_arguments, read_run
from loadgen.load.mix import with_models
from loadgen.load.report import percent, zero_gap_note
from loadgen.simulator.deployment import ServedModel
from loadgen.simulator.simulation import SimulationResult
from loadgen.tables import errors, output, print_json, print_line, print_table
from loadgen.trials.figures import Figures, figures_of
from loadgen.trials.figures_table import circumstances, figures_table, named
from loadgen.trials.remaining import left
from loadgen.trials.request_lines import request_lines
from loadgen.writing import write
from shared.core.record.explanation import explanation
from shared.errors import ConfigError
from shared.perf import profile_file as profiles
from shared.perf.draft import DraftCost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    add_options(
        parser,
        """
        --model NAME=PROFILE[,REPLICAS[,SHARE]] (repeated): one of several models of the fleet, in
            place of --profile and --replicas: 1 replica, and as large a share of the requests as
            any other, unless the trace names their models
        --requests FILE: write a line for each request to FILE, as CSV: when it was due, when it
            came, whether it was relegated, why it was late
        --explain N (int): say of request N of that file where its time went
        """,
    )


def run(args: argparse.Namespace) -> int:
    console = errors()
    trial, plan = read_run(args, console)
    if models := [served_model(text) for text in args.model]:
        if len({model.name for model in models}) < len(models):
            raise ConfigError("--model: two models have the same name")
        deployment = replace(trial.deployment, models=models)
        trial = msgspec.structs.replace(trial, deployment=deployment)
        shares = {model.name: model.share for model in models}
        plan = plan._replace(requests=with_models(plan.requests, shares, args.seed))
    began_s = time.perf_counter()
    with console.status("simulating") as status:
        result = trial.serve(
            plan.requests,
            check_every=args.check,
            accounts=args.requests is not None or args.explain is not None,
            progress=lambda now_s, ended: status.update(_progress(plan, now_s, ended, began_s)),
        )
    if args.requests is not None:
        write(args.requests, request_lines(plan.requests, result), "--requests")
    if args.explain is not None:
        return _explain(result, args)
    figures = figures_of(trial, plan.requests, result)
    if args.json:
        print_json(figures)
        return 0
    out = output(120)
    policy = named(figures.policy, figures.settings)
    title = f"{policy}: {circumstances(figures, figures.rate_rps)}"
    out.print(title, markup=False, soft_wrap=True)
    print_table(out, figures_table(figures, plan.tiers))
    groups = (figures.by_tier, figures.by_importance, figures.by_length)
    if note := zero_gap_note(group.tbt_s.p50 for each in groups for group in each.values()):
        print_line(out, note)
    print_line(out, _summary(figures))
    return 0


def served_model(text: str) -> ServedModel:
    """The model that a --model names. Raises ConfigError."""
    name, _, rest = text.partition("=")
    profile, *numbers = rest.split(",")
    try:
        replicas, share = [*map(float, numbers), *(1.0, 1.0)[len(numbers) :]]
        served = ServedModel(name, profile, int(replicas), share)
    except (ValueError, OverflowError):
        served = ServedModel("", "", 0)
    if not name or not profile or served.replicas < 1 or not 0 < served.share < math.inf:
        raise ConfigError(
            f"--model {text}: write NAME=PROFILE, NAME=PROFILE,REPLICAS or, as well, SHARE"
        )
    profiles.read(profile)
    return served


def _explain(result: SimulationResult, args: argparse.Namespace) -> int:
    """Raises ConfigError for a request that is not there, or has not ended."""
    if not 0 <= args.explain < len(result.records):
        raise ConfigError(f"--explain: the requests are 0 to {len(result.records) - 1}")
    if (record := result.records[args.explain]) is None or record.verdict is None:
        raise ConfigError(f"--explain: request {args.explain} has not ended")
    ended_unix_s = record.verdict.ended_unix_s
    found = explanation(record, record.resume, ended_unix_s, trace_id="", whole=True)
    if args.json:
        print_json(found)
    else:
        show(found, output())
    return 0


def _progress(plan: Plan, now_s: float, ended: int, began_s: float) -> str:
    """The progress in words. It exceeds 100 % while requests run after the last arrival."""
    share = f"{100 * now_s / plan.duration_s:.0f} %"
    return (
        f"{now_s:.0f} of {plan.duration_s:.0f} s simulated ({share}), "
        f"{ended} of {len(plan.requests)} requests have ended"
        f"{left(now_s / plan.duration_s, began_s)}"
    )


def _cost(draft: DraftCost) -> str:
    """The cost as --draft takes it."""
    numbers = draft if isinstance(draft, tuple) else (draft,)
    return ",".join(f"{number:g}" for number in numbers)


def _summary(figures: Figures) -> str:
    """The lines below the table."""
    lines = ""
    if figures.verifications:
        lines = (
            f"{figures.accepted} of {figures.drafted} drafted tokens accepted, "
            f"{1 + figures.accepted / figures.verifications:.2f} tokens per verification "
            f"(draft {_cost(figures.draft)}, acceptance {figures.acceptance:g})\n"
        )
    if isinstance(figures.cached_fraction, float):
        lines += f"{percent(figures.cached_fraction)} of prompt tokens found in a prefix cache\n"
    return lines + (
        f"goodput {figures.goodput_rps:.2f} requests/s; "
        f"{figures.relegated} relegated, {figures.preempted} preemptions\n"
        f"{figures.simulated_s:.0f} s simulated in {figures.wall_s:.1f} s "
        f"({figures.requests_per_wall_s:.0f} requests per second): "
        f"{figures.iterations} iterations, engines {100 * figures.busy_fraction:.0f} % busy"
    )
