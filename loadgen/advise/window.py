"""Finds the busiest window of a plan of requests, which decides how many replicas it needs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from loadgen.load.mix import PlannedRequest
from shared.perf.iteration_time import Profile
from shared.policy.slackline.prices import prices_of


class Window(NamedTuple):
    """Successive requests of a plan, and the part of its time in which they arrive."""

    requests: Sequence[PlannedRequest]  # the first arrives at 0 s
    from_s: float
    seconds: float  # of arrivals


def work_s(requests: Sequence[PlannedRequest], profile: Profile) -> list[float]:
    """[requests] the seconds of a GPU that each request takes in full batches."""
    prices = prices_of(profile)
    prompts = np.array([request.prompt_tokens for request in requests], dtype=np.float64)
    outputs = np.array([request.output_tokens for request in requests], dtype=np.float64)
    seconds = prices.prefill_s(prompts, np.zeros(len(prompts)))
    seconds = seconds + outputs * prices.decoding_s(prompts + outputs / 2)
    found: list[float] = seconds.tolist()
    return found


def busiest(
    requests: Sequence[PlannedRequest], duration_s: float, profile: Profile, seconds: float
) -> Window:
    """The `seconds` of the plan with the most work; the whole plan if it is no longer.
    `duration_s`: of the arrivals of the whole plan.
    """
    if duration_s <= seconds:
        return Window(requests, 0.0, duration_s)
    at_s = np.array([request.arrival_s for request in requests])
    done_s = np.concatenate(([0.0], np.cumsum(work_s(requests, profile))))
    ends = np.searchsorted(at_s, at_s + seconds)
    begin = int((done_s[ends] - done_s[:-1]).argmax())
    from_s = float(at_s[begin])
    return Window(_from_zero(requests[begin : ends[begin]], from_s), from_s, seconds)


def busiest_of(
    requests: Sequence[PlannedRequest], duration_s: float, profile: Profile, most: int
) -> Window:
    """The busiest window of at most `most` requests."""
    seconds = duration_s * most / len(requests)
    window = busiest(requests, duration_s, profile, seconds)
    while len(window.requests) > most:
        seconds *= 0.99 * most / len(window.requests)
        window = busiest(requests, duration_s, profile, seconds)
    return window


def thinned(window: Window, share: float) -> Window:
    """The window with a share (0 to 1) of its requests, evenly chosen."""
    kept = [
        request
        for n, request in enumerate(window.requests)
        if int((n + 1) * share) > int(n * share)
    ]
    return window._replace(requests=_from_zero(kept, 0.0))


def _from_zero(requests: Sequence[PlannedRequest], from_s: float) -> list[PlannedRequest]:
    return [
        request._replace(number=n, arrival_s=request.arrival_s - from_s)
        for n, request in enumerate(requests)
    ]
