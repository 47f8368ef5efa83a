"""Divides a request's life, by its timeline, into phases: the spans of its trace. They follow each
other without a gap, even where a replica died before it could report one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shared.request_timeline import Happened, Happening, RequestTimeline


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase. `replica`: has the request, or was asked last. `why`: the reason for the phase."""

    name: str
    start_unix_s: float
    end_unix_s: float
    attempt: int
    replica: str = ""
    why: str = ""


def phases(timeline: RequestTimeline, arrived_unix_s: float, ended_unix_s: float) -> list[Phase]:
    """The phases from arrival to end, in order; none is empty, unless the whole life is."""
    return list(_joined(_begun(timeline, arrived_unix_s, ended_unix_s)))


def _begun(
    timeline: RequestTimeline, arrived_unix_s: float, ended_unix_s: float
) -> Iterator[Phase]:
    now = Phase("placing", arrived_unix_s, ended_unix_s, 0)
    for step in timeline.happenings:
        name = _name(step)
        if name is None:
            continue
        at_unix_s = min(max(step.at_unix_s, now.start_unix_s), ended_unix_s)
        yield replace(now, end_unix_s=at_unix_s)
        attempt = now.attempt + (step.what is Happened.HELD)
        now = Phase(name, at_unix_s, ended_unix_s, attempt, step.replica, step.why)
    yield now


def _name(step: Happening) -> str | None:
    """The phase that begins with this step; None if the present phase goes on."""
    match step.what:
        case Happened.HELD:
            return "queue"
        case Happened.BEGAN:
            return "iterations"
        case Happened.RELEGATED if not step.replica:
            return "relegated"
        case Happened.DRAWN:
            return "placing"
        case Happened.LEFT:
            return "relegated" if step.why == "relegated" else "moving"
    return None


def _joined(found: Iterator[Phase]) -> Iterator[Phase]:
    """The phases with neighbours of the same name joined, and without empty ones."""
    last = next(found)
    for phase in found:
        if last.start_unix_s == last.end_unix_s:
            last = phase
        elif phase.name == last.name:
            last = replace(last, end_unix_s=phase.end_unix_s, why=phase.why or last.why)
        elif phase.start_unix_s < phase.end_unix_s:
            yield last
            last = phase
    yield last
