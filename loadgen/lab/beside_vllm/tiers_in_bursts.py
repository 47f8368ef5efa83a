"""Three tiers in bursts: the SLOs that vLLM alone and the policies of Slackline meet."""

from loadgen.fleet.fleet import Fleet
from loadgen.lab.beside_vllm import sized_llama as model
from loadgen.lab.beside_vllm.alone import VllmSender, vllm_alone
from loadgen.lab.beside_vllm.both_sides import ALONE, BATCHED_TOKENS, Bench, Iterations
from loadgen.load.connection import LOAD_PATIENCE, connected
from loadgen.load.report import Report, make_report
from loadgen.load.send_nats import NatsSender
from loadgen.load.tally import Tally
from shared.bus.users import OPERATOR
from shared.clock import Clock

BY_PRIORITY = "vLLM, by priority"
POLICIES = ("fcfs", "qoserve", "slos_serve")
WAIT_S = 300.0


async def compare(bench: Bench, rate: float, command: str) -> list[Report]:
    """Serves the same bursts with vLLM alone, in both of its orders, and with each policy."""
    plan, reports = bench.bursts(rate), []
    prompts = bench.prompts(bench.seed).ids
    for label in (ALONE, BY_PRIORITY):
        by_priority = label == BY_PRIORITY
        more = {"scheduling_policy": "priority"} if by_priority else {}
        async with vllm_alone(bench.folder, bench.alone | more) as engine:
            alone = VllmSender(engine, Clock(), prompts, by_priority=by_priority)
            tally, took_s = await bench.offer(plan, alone, label, WAIT_S)
        reports.append(_report(bench, tally, label, "in process", took_s, len(plan), command))
    for policy in POLICIES:
        clock = Clock()
        settings = {"chunk_tokens": str(BATCHED_TOKENS)} if policy == "fcfs" else {}
        async with (
            Fleet(bench.spec(policy, settings), bench.console.print) as fleet,
            connected(fleet.access(), "slackline-bench", OPERATOR, clock, LOAD_PATIENCE) as client,
        ):
            engines = Iterations()
            await engines.listen(client.bus, fleet)
            longest = max(planned.output_tokens for planned in plan)
            planned = NatsSender(
                client,
                clock,
                seed=bench.seed,
                longest_output=longest,
                context_tokens=model.CONTEXT_TOKENS,
                prompts=prompts,
            )
            tally, took_s = await bench.offer(plan, planned, policy, WAIT_S)
        label = f"Slackline, {policy}"
        reports.append(_report(bench, tally, label, "nats", took_s, len(plan), command, engines))
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
    speed = f"{tokens / took_s:.0f} tokens/s of prompts and outputs"
    notes = [f"{speed}, {took_s:.1f} s until the last answer"]
    if engines is not None and engines.iterations:
        n = engines.iterations
        notes.append(
            f"{n} iterations of {1000 * engines.exec_s / n:.2f} ms, "
            f"{1000 * engines.outside_s / n:.2f} of it outside the model; "
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
