"""Writes the requests of a simulated run as CSV, a line for each, for `simulate --requests`."""

import csv
import io
import math
from collections.abc import Sequence

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.simulation import SimulationResult

# Seconds are from the beginning of the load. `due_s`: of the first token; empty without a TTFT.
COLUMNS = (
    "number", "tier", "arrived_s", "prompt_tokens", "output_tokens", "due_s", "first_s",
    "last_due_s", "last_s", "relegated", "slo_met", "missed", "cause",
)  # fmt: skip


def request_lines(requests: Sequence[PlannedRequest], result: SimulationResult) -> bytes:
    """A request that has not ended has no line after its due times."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(COLUMNS)
    for n, (request, verdict, slo) in enumerate(
        zip(requests, result.verdicts, result.slos, strict=True)
    ):
        at_s = request.arrival_s
        first_due, last_due = slo.first_due_unix_s(at_s), slo.last_due_unix_s(at_s)
        head = [n, request.tier, _s(at_s), request.prompt_tokens]
        if verdict is None:
            lines.writerow([*head, 0, _s(first_due), "", _s(last_due), "", "", "", "", ""])
            continue
        cause = "" if verdict.first_missed is None else verdict.first_missed.cause
        first, last = verdict.ttft_s, verdict.ttlt_s
        lines.writerow(
            [
                *(*head, verdict.output_tokens, _s(first_due)),
                *("" if first is None else _s(at_s + first), _s(last_due)),
                *("" if last is None else _s(at_s + last), int(verdict.relegated)),
                *(int(verdict.slo_met), verdict.missed, cause),
            ]
        )
    return text.getvalue().encode()


def _s(at_s: float) -> str:
    return "" if math.isinf(at_s) else f"{at_s:.6f}"
