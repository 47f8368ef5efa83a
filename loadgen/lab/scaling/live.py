"""A live fleet that scales itself, beside the simulator: `python -m loadgen.lab.scaling.live`
serves a day squeezed into ten minutes with one to six `sim` engines, and then simulates it.
"""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.lab.scaling.days import CONTEXT_TOKENS, TIERS, day
from loadgen.load.mix import PlannedRequest
from loadgen.load.send_nats import cap_tokens
from loadgen.load.texts.prompts import prompt_ids
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.elastic.law import OurLaw, Scaling
from loadgen.simulator.latency import Latency
from loadgen.simulator.simulation import simulate
from loadgen.simulator.traffic import Traffic
from shared import subjects
from shared.bus.nats import NatsBus
from shared.clock import Clock
from shared.errors import SlacklineError
from shared.policy import registry
from shared.schemas import Digest, Ended, GenerateRequest, Received, Sampling

PROFILE, FEWEST, MOST = "a100-llama3-70b-tp4", 1, 6
WARM_UP_S = 15.0  # what the law is told
LOOK_S = 0.1


class Lived(NamedTuple):
    met: float
    hours: float
    most: int
    started_s: float  # the time from a replica's start to its first digest, the median
    unsent: int
    counts: list[tuple[float, int]]


async def live(requests: Sequence[PlannedRequest], tiers: Path) -> Lived:
    spec = FleetSpec(
        replicas=FEWEST,
        most=MOST,
        profile=PROFILE,
        tiers=str(tiers),
        gateway=False,
        draft=0.0,
        environment={"SLACKLINE_RELEGATION_WARM_UP_S": str(WARM_UP_S)},
    )
    clock, longest = Clock(), max(r.output_tokens for r in requests)
    met: dict[str, bool] = {}
    seen: dict[str, float] = {}  # when each replica was last heard of
    async with (
        Fleet(spec, lambda line: print(line, flush=True)) as fleet,
        fleet.connect("test") as bus,
    ):
        await bus.subscribe(subjects.ENDED, Ended, lambda ended, _: _end(ended, met))
        await bus.subscribe(
            subjects.DIGESTS,
            Digest,
            lambda digest, _: seen.update({digest.replica: clock.unix_s()}),
        )
        begin_s = clock.unix_s() + 0.5
        watch = Watch(fleet, clock, begin_s, seen)
        watching = asyncio.create_task(watch.run())
        unsent = 0
        async with asyncio.TaskGroup() as tasks:
            sending = []
            for request in requests:
                message = _message(request, longest)
                await asyncio.sleep(begin_s + request.arrival_s - clock.unix_s())
                sending.append(tasks.create_task(_sent(bus, request, message)))
        unsent = sum(not task.result() for task in sending)
        async with asyncio.timeout(600.0):
            while len(met) < len(requests) - unsent:
                await asyncio.sleep(LOOK_S)
        watching.cancel()
        started_s = statistics.median(watch.started_s) if watch.started_s else 0.0
        return Lived(
            sum(met.values()) / len(requests),
            watch.replica_s / 3600,
            max(count for _, count in watch.counts),
            started_s,
            unsent,
            watch.counts,
        )


class Watch:
    """Counts the replicas that run, and how long each takes to start."""

    def __init__(self, fleet: Fleet, clock: Clock, begin_s: float, seen: dict[str, float]) -> None:
        self._fleet, self._clock, self._begin_s, self._seen = fleet, clock, begin_s, seen
        self.replica_s, self.counts = 0.0, [(0.0, FEWEST)]
        self.started_s: list[float] = []

    async def run(self) -> None:
        now_s, asked = self._begin_s, {str(each): 0.0 for each in self._fleet.running}
        while True:
            await asyncio.sleep(LOOK_S)
            before_s, now_s = now_s, max(self._clock.unix_s(), self._begin_s)
            running = {str(each) for each in self._fleet.running}
            self.replica_s += (now_s - before_s) * len(running)
            if len(running) != self.counts[-1][1]:
                self.counts.append((now_s - self._begin_s, len(running)))
            for replica in running - asked.keys():
                asked[replica] = now_s
            for replica in asked.keys() - running:
                del asked[replica]
            for replica, at_s in asked.items():
                if at_s and self._seen.get(replica, 0.0) > at_s:
                    self.started_s.append(self._seen[replica] - at_s)
                    asked[replica] = 0.0


def _end(ended: Ended, met: dict[str, bool]) -> None:
    if ended.key is not None and ended.verdict is not None:
        met[ended.key] = ended.verdict.slo_met


async def _sent(bus: NatsBus, request: PlannedRequest, message: GenerateRequest) -> bool:
    """Send a request; one that is refused has missed its SLO."""
    with suppress(SlacklineError):
        subject = subjects.requests(request.tenant, request.tier)
        await bus.request(subject, message, Received, timeout_s=60.0)
        return True
    return False


def _message(planned: PlannedRequest, longest_output: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(planned.number),
        tenant=planned.tenant,
        token_ids=prompt_ids(1, planned.number, planned.prompt_tokens),
        sampling=Sampling(
            max_tokens=cap_tokens(longest_output, CONTEXT_TOKENS, planned.prompt_tokens),
            output_tokens=planned.output_tokens,
            ignore_eos=True,
            temperature=0.0,
        ),
        application=planned.application,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--peak", type=float, default=6.0, help="requests a second")
    args = parser.parse_args()
    requests = day(args.seed, workload="azure-code", peak_rps=args.peak, length_s=args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        tiers = Path(folder) / "tiers.json"
        tiers.write_bytes(msgspec.json.encode(TIERS))
        lived = asyncio.run(live(requests, tiers))
    deployment = Deployment(
        registry.DEFAULT,
        PROFILE,
        FEWEST,
        latency=Latency.live(),
        draft=0.0,
        scaling=Scaling(
            law=partial(OurLaw, WARM_UP_S), least=FEWEST, most=MOST, warm_up_s=lived.started_s
        ),
    )
    result = simulate(Traffic(requests, TIERS, args.seed), deployment)
    took = f"replicas took {lived.started_s:.1f} s to start"
    print(f"{len(requests)} requests; {lived.unsent} refused; {took}")
    print(_line("live", lived.met, lived.hours, lived.counts))
    print(_line("simulated", result.met_fraction, result.replica_s / 3600, result.counts))


def _line(name: str, met: float, hours: float, counts: Sequence[tuple[float, int]]) -> str:
    told = ", ".join(f"{count} from {at_s:.0f} s" for at_s, count in counts)
    return f"{name}: {100 * met:.2f} % met with {hours:.3f} replica-hours: {told}"


if __name__ == "__main__":
    main()
