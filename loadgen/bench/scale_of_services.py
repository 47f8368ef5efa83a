"""The load that one planner, one admission and one gateway carry, and two of each.

The service is a process of its own on a real NATS server; the bench plays the rest of the fleet.
Beside each rate stands the CPU time of one unit, which other work on the machine hardly changes:
its inverse is the rate of a core that does nothing else.
"""

from random import Random

from loadgen.bench import scale_of_admission, scale_of_gateway, scale_of_planner
from loadgen.bench.figure import Figure
from loadgen.fleet.child import Say


async def measure(quick: bool, seed: int, say: Say) -> list[Figure]:
    return [
        *await scale_of_planner.measure(quick, Random(seed), say),
        *await scale_of_admission.measure(quick, Random(seed), say),
        *await scale_of_gateway.measure(quick, say),
    ]
