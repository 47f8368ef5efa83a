"""vLLM alone beside vLLM behind Slackline: the same model, the same requests at the same instants,
on one machine.

python -m loadgen.beside_vllm, in an environment that has vLLM. First everything at once, under one
and the same policy: what being planned from outside costs, in pairs of runs. Then three tiers in
bursts: what it is for.
"""

import argparse
import asyncio
import gc
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from loadgen.beside_vllm import sized_llama as model
from loadgen.beside_vllm.alone import VllmSender, vllm_alone
from loadgen.commands.load import PATIENCE
from loadgen.demo.prompts import Prompts
from loadgen.demo.rush import BURSTS, TIERS
from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.load.arrivals import draw_arrivals, parse_gaps, parse_profile
from loadgen.load.connection import connected
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.open_loop import Sender, run_load
from loadgen.load.progress import progress
from loadgen.load.report import Report, make_report, side_by_side, write_report
from loadgen.load.send_nats import NatsSender
from loadgen.load.tally import Outcome, Tally
from loadgen.load.workload import named_workload
from shared import subjects
from shared.bus.api import Bus, Call, Subscription
from shared.clock import Clock
from shared.models import shipped as models
from shared.schemas import PlanAck
from shared.text.tokenizer import Tokenizer
from shared.tiers import load_tiers

WORKLOAD = "short-mix"
KV_BLOCKS, BLOCK_TOKENS, MAX_NUM_SEQS, BATCHED_TOKENS = 1024, 32, 128, 2048
POLICIES = ("fcfs", "qoserve", "slos_serve")
ALONE, BY_PRIORITY, PLANNED = "vLLM", "vLLM, by priority", "vLLM behind Slackline"


class Saturated(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at once, under one policy. Times are seconds of the whole run; means over
    iterations where there are any.
    """

    label: str
    tokens: int  # prompts and outputs
    took_s: float
    tokens_per_s: float
    iterations: int | None = None  # of the planned engine, and what follows of them
    exec_s: float | None = None
    outside_s: float | None = None  # of exec_s: vLLM's scheduling and its books
    idle_s: float | None = None  # waiting for a plan
    between_s: float | None = None  # the rest of the time


class Result(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    seed: int
    saturated: list[Saturated]
    reports: list[Report]


@dataclass(frozen=True, slots=True)
class Bench:
    folder: Path
    seed: int
    duration_s: float
    requests: int  # of a saturated run
    repeats: int
    together: int  # of these requests, in flight
    console: Console

    @property
    def arguments(self) -> dict[str, Any]:
        """Of vLLM, alike on both sides."""
        return model.ARGUMENTS | {
            "max_model_len": model.CONTEXT_TOKENS,
            "max_num_batched_tokens": BATCHED_TOKENS,
            "enforce_eager": True,
        }

    @property
    def alone(self) -> dict[str, Any]:
        kv = {
            "num_gpu_blocks_override": KV_BLOCKS + 1,
            "block_size": BLOCK_TOKENS,
            "max_num_seqs": MAX_NUM_SEQS,
            "dtype": "float32",
        }
        return self.arguments | kv

    def spec(self, policy: str, settings: Mapping[str, str]) -> FleetSpec:
        kv = {"KV_BLOCKS": KV_BLOCKS, "BLOCK_TOKENS": BLOCK_TOKENS, "MAX_SLOTS": 1024}
        return FleetSpec(
            replicas=1,
            policy=policy,
            settings=settings,
            engine="vllm",
            model=str(self.folder),
            vllm=self.arguments,
            tiers=TIERS,
            gateway=False,
            environment={f"SLACKLINE_WORKER_{name}": str(value) for name, value in kv.items()},
        )

    def rush(self, rate: float) -> list[PlannedRequest]:
        arrivals = draw_arrivals(
            parse_gaps("poisson"),
            rate,
            self.duration_s,
            self.seed,
            parse_profile(BURSTS, self.duration_s),
        )
        return plan_requests(
            arrivals, named_workload(WORKLOAD, model.CONTEXT_TOKENS), load_tiers(TIERS), self.seed
        )

    def at_once(self) -> list[PlannedRequest]:
        workload = named_workload(WORKLOAD, model.CONTEXT_TOKENS)
        return plan_requests([0.0] * self.requests, workload, load_tiers(TIERS), self.seed)

    def prompts(self) -> Prompts:
        return Prompts(Tokenizer.load(models.folder(models.DEFAULT)), self.seed)

    async def offer(
        self, plan: Sequence[PlannedRequest], sender: Sender, label: str, wait_s: float
    ) -> tuple[Tally, float]:
        """The plan offered with progress: what came of it, and how long it took."""
        tally, clock, stop = Tally(load_tiers(TIERS)), Clock(), asyncio.Event()
        began_unix_s = clock.unix_s()
        async with progress(tally, len(plan), max(self.duration_s, 1.0), label, self.console):
            await run_load(plan, sender, tally, clock, stop, wait_s)
        last_unix_s = max(
            (outcome.measure.last_unix_s for outcome in tally.outcomes), default=began_unix_s
        )
        return tally, last_unix_s - began_unix_s


async def saturate(bench: Bench, plan: Sequence[PlannedRequest]) -> list[Saturated]:
    """The same requests by turns on either side, both of which stay up: a slow moment of the
    machine falls on both.
    """
    found, clock = list[Saturated](), Clock()
    settings = {"max_num_batched_tokens": str(BATCHED_TOKENS), "max_num_seqs": str(MAX_NUM_SEQS)}
    longest = max(planned.output_tokens for planned in plan)
    tokens = sum(planned.prompt_tokens + planned.output_tokens for planned in plan)
    async with (
        vllm_alone(bench.folder, bench.alone) as engine,
        Fleet(bench.spec("vllm", settings), bench.console.print) as fleet,
        connected(fleet.url, "slackline-bench", clock, PATIENCE) as client,
    ):
        for n in range(-1, bench.repeats):
            # else the cache knows them
            prompts = Prompts(
                Tokenizer.load(models.folder(models.DEFAULT)), bench.seed + 1000 * (n + 1)
            ).ids
            asked, engines = plan if n >= 0 else plan[:8], Iterations()
            alone = VllmSender(engine, clock, prompts, by_priority=False)
            planned = NatsSender(
                client,
                clock,
                seed=bench.seed,
                longest_output=longest,
                context_tokens=model.CONTEXT_TOKENS,
                prompts=prompts,
            )
            _, alone_s = await bench.offer(
                asked, AtMost(alone, bench.together), ALONE if n >= 0 else "warming up", 600.0
            )
            await engines.listen(client.bus, fleet)
            _, planned_s = await bench.offer(
                asked, AtMost(planned, bench.together), PLANNED if n >= 0 else "warming up", 600.0
            )
            await engines.close()
            if n >= 0:
                found.append(
                    Saturated(
                        label=ALONE, tokens=tokens, took_s=alone_s, tokens_per_s=tokens / alone_s
                    )
                )
                parts = {
                    name: getattr(engines, name)
                    for name in ("iterations", "exec_s", "outside_s", "idle_s", "between_s")
                }
                found.append(
                    Saturated(
                        label=PLANNED,
                        tokens=tokens,
                        took_s=planned_s,
                        tokens_per_s=tokens / planned_s,
                        **parts,
                    )
                )
    return found


class AtMost:
    """Another sender, with so many requests in flight; who ends makes room for the next."""

    def __init__(self, sender: Sender, together: int) -> None:
        self._sender, self._room = sender, asyncio.Semaphore(together)

    async def send(self, outcome: Outcome) -> None:
        async with self._room:
            await self._sender.send(outcome)


class Iterations:
    """What the acks of a fleet's only replica tell of its engine while it has work. Seconds.

    `between_s`: neither in the engine nor waiting for a plan, the way to the engine's thread and
    back included.
    """

    def __init__(self) -> None:
        self.iterations = 0
        self.exec_s = self.outside_s = self.idle_s = self.between_s = 0.0
        self._ended_unix_s = 0.0
        self._heard: Subscription | None = None

    async def listen(self, bus: Bus, fleet: Fleet) -> None:
        self._heard = await bus.subscribe(subjects.acked(fleet.replicas[0]), PlanAck, self._hear)

    async def close(self) -> None:
        if self._heard is not None:
            await self._heard.stop()

    def _hear(self, ack: PlanAck, _: Call) -> None:
        if not (ack.plan_seq and ack.slots):
            return
        self.iterations += 1
        self.exec_s += ack.exec_s
        self.outside_s += ack.outside_s
        self.idle_s += ack.idle_s
        if self._ended_unix_s:
            self.between_s += ack.ended_unix_s - self._ended_unix_s - ack.exec_s - ack.idle_s
        self._ended_unix_s = ack.ended_unix_s


async def compare(bench: Bench, rate: float, command: str) -> list[Report]:
    plan, reports = bench.rush(rate), []
    ids = bench.prompts().ids
    for label in (ALONE, BY_PRIORITY):
        by_priority = label == BY_PRIORITY
        more = {"scheduling_policy": "priority"} if by_priority else {}
        async with vllm_alone(bench.folder, bench.alone | more) as engine:
            sender = VllmSender(engine, Clock(), ids, by_priority=by_priority)
            tally, took_s = await bench.offer(plan, sender, label, 300.0)
        reports.append(_report(bench, tally, label, "in process", took_s, len(plan), command))
    for policy in POLICIES:
        clock = Clock()
        settings = {"chunk_tokens": str(BATCHED_TOKENS)} if policy == "fcfs" else {}
        async with (
            Fleet(bench.spec(policy, settings), bench.console.print) as fleet,
            connected(fleet.url, "slackline-bench", clock, PATIENCE) as client,
        ):
            engines = Iterations()
            await engines.listen(client.bus, fleet)
            longest = max(planned.output_tokens for planned in plan)
            sent = NatsSender(
                client,
                clock,
                seed=bench.seed,
                longest_output=longest,
                context_tokens=model.CONTEXT_TOKENS,
                prompts=ids,
            )
            tally, took_s = await bench.offer(plan, sent, policy, 300.0)
        reports.append(
            _report(
                bench, tally, f"Slackline, {policy}", "nats", took_s, len(plan), command, engines
            )
        )
    return reports


def _report(
    bench: Bench,
    tally: Tally,
    label: str,
    transport: str,
    took_s: float,
    planned: int,
    command: str,
    engines: Iterations | None = None,
) -> Report:
    tokens = sum(o.planned.prompt_tokens + o.measure.tokens for o in tally.outcomes)
    notes = [
        f"{tokens / took_s:.0f} tokens/s, prompts and outputs, until the last answer after {took_s:.1f} s"
    ]
    if engines is not None and engines.iterations:
        n = engines.iterations
        notes.append(
            f"{n} iterations of {1000 * engines.exec_s / n:.2f} ms, {1000 * engines.outside_s / n:.2f} of it outside the model; "
            f"waited {1000 * engines.idle_s / n:.2f} ms for a plan"
        )
    return make_report(
        tally,
        label=label,
        command=command,
        transport=transport,
        seed=bench.seed,
        planned=planned,
        offered_s=bench.duration_s,
        notes=notes,
    )


def saturated_table(found: Sequence[Saturated]) -> Table:
    """A row for each pair of runs, and last the median of their ratios."""
    out = Table(
        title="As many as said at once, under the same policy; milliseconds per iteration behind Slackline",
        title_justify="left",
    )
    for name in (
        "vLLM, tokens/s",
        "behind Slackline",
        "ratio",
        "iterations",
        "in the engine",
        "outside the model",
        "waited for a plan",
        "between",
    ):
        out.add_column(name, justify="right")
    ratios = list[float]()
    for alone, planned in zip(found[::2], found[1::2], strict=True):
        ratios.append(planned.tokens_per_s / alone.tokens_per_s)
        parts = (planned.exec_s, planned.outside_s, planned.idle_s, planned.between_s)
        each = (f"{1000 * (part or 0.0) / max(planned.iterations or 1, 1):.2f}" for part in parts)
        out.add_row(
            f"{alone.tokens_per_s:.0f}",
            f"{planned.tokens_per_s:.0f}",
            f"{ratios[-1]:.3f}",
            f"{planned.iterations}",
            *each,
        )
    out.add_section()
    out.add_row("", "median", f"{median(ratios):.3f}", *[""] * 5)
    return out


async def _run(args: argparse.Namespace, folder: Path) -> Result:
    console = Console(width=None if sys.stdout.isatty() else 160)
    bench = Bench(
        model.make(folder),
        args.seed,
        args.duration,
        args.requests,
        args.repeats,
        args.together,
        console,
    )
    command = shlex.join(["python", "-m", "loadgen.beside_vllm", *sys.argv[1:]])
    saturated: list[Saturated] = []
    rate = args.rate
    if args.only != "tiers":
        plan = bench.at_once()
        for _ in range(args.starts):
            saturated += await saturate(bench, plan)
        console.print(saturated_table(saturated))
        if rate is None:
            alone = [one for one in saturated if one.label == ALONE]
            rate = args.load * len(plan) * len(alone) / sum(one.took_s for one in alone)
    reports: list[Report] = []
    if args.only != "saturated":
        reports = await compare(bench, rate or 1.0, command)
        console.print(side_by_side(reports))
        for report in reports:
            console.print(f"{report.label}: {'; '.join(report.notes)}", highlight=False)
    return Result(command=command, seed=args.seed, saturated=saturated, reports=reports)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadgen.beside_vllm", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, metavar="K")
    parser.add_argument(
        "--duration", type=float, default=60.0, metavar="S", help="of the bursts (default: 60)"
    )
    parser.add_argument(
        "--requests", type=int, default=96, metavar="N", help="of a saturated run (default: 96)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="saturated runs of each side (default: 3)",
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        metavar="N",
        help="so often both sides are started: a process may be 20 %% off for its life",
    )
    parser.add_argument(
        "--together", type=int, default=96, metavar="N", help="of these in flight (default: 96)"
    )
    parser.add_argument(
        "--load",
        type=float,
        default=0.85,
        metavar="X",
        help="of what vLLM alone keeps up with, in the mean (default: 0.85)",
    )
    parser.add_argument("--rate", type=float, metavar="R", help="requests/s instead")
    parser.add_argument("--only", choices=("saturated", "tiers"))
    parser.add_argument("--out", type=Path, default=Path("out/beside-vllm"), metavar="DIR")
    args = parser.parse_args()
    if args.only == "tiers" and args.rate is None:
        parser.error("--only tiers needs --rate")
    with tempfile.TemporaryDirectory(prefix="slackline-") as folder:
        result = uvloop.run(_run(args, Path(folder)))
    gc.collect()  # AsyncLLM's finaliser wants its modules still there
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(result), indent=2)
    )
    for report in result.reports:
        write_report(
            report, args.out / f"{report.label.lower().replace(', ', '-').replace(' ', '-')}.json"
        )


if __name__ == "__main__":
    main()
