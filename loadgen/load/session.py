"""Counts sessions: requests that follow one another, each sent when the one before has ended well.
A session meets its SLO if every round does.

SLOs-Serve calls a whole session one request (section 3 and Table 4: its rounds are the request's
prefill-decode pairs), so its capacity is in sessions per second, and counts sessions.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.load.mix import PlannedRequest


class Sessions(Struct, frozen=True, kw_only=True):
    """The sessions of a run. A request of no session counts as one of its own. A session in which
    a round failed has no later rounds, and is violated.
    """

    offered: int
    violated: int
    violated_fraction: float


def sessions(requests: Sequence[PlannedRequest], violated: NDArray[np.bool_]) -> Sessions | None:
    """The sessions, given which requests were violated; None if no request follows another."""
    if not has_rounds(requests):
        return None
    first = np.arange(len(requests))  # [requests] the first request of each one's session
    place = {request.number: i for i, request in enumerate(requests)}
    for i, request in enumerate(requests):
        if request.after is not None:
            first[i] = first[place[request.after]]
    offered, broken = len(np.unique(first)), len(np.unique(first[violated]))
    return Sessions(offered=offered, violated=broken, violated_fraction=broken / offered)


def has_rounds(requests: Sequence[PlannedRequest]) -> bool:
    return any(request.after is not None for request in requests)


def rounds(plan: Sequence[PlannedRequest]) -> list[list[PlannedRequest]]:
    """The plan by session, in order of arrival: each first request with those that follow it."""
    found: dict[int, list[PlannedRequest]] = {}  # by the number of the last round yet
    for request in plan:
        begun = [] if request.after is None else found.pop(request.after)
        found[request.number] = [*begun, request]
    return sorted(found.values(), key=lambda session: session[0].number)
