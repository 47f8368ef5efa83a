"""Tests of the clock of a process, and of the offsets between the clocks of processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from services.admission.skew import ENOUGH, WINDOW_S, Offset
from services.admission.workers import Workers
from shared.clock import FASTEST_SLEW, Clock
from shared.schemas import Announce
from shared.telemetry.conventions import CLOCK_OFFSET
from shared.telemetry.exposition import exposition
from shared.telemetry.instruments import Registry
from shared.vocabulary import MOST_REPLICAS, ReplicaId
from tests import made

NOW = 1000.0
R1 = ReplicaId("r1")


class Machine:
    """A wall and a monotonic clock, the wall ahead by `offset_s`; a reading takes 0.1 us, or a
    preemption longer.
    """

    def __init__(self, offset_s: float, preempted: dict[int, float] | None = None) -> None:
        self.at_s, self.offset_s, self.reads, self.preempted = 50.0, offset_s, 0, preempted or {}

    def _read(self) -> float:
        self.reads += 1
        self.at_s += 1e-7 + self.preempted.get(self.reads, 0.0)
        return self.at_s

    def monotonic_s(self) -> float:
        return self._read()

    def wall_s(self) -> float:
        return self._read() + self.offset_s


# ---------------------------------------------------------------- one process


def test_a_wall_clock_that_is_moved_does_not_move_ours_but_is_seen() -> None:
    machine = Machine(1000.0)
    clock = Clock(machine.wall_s, machine.monotonic_s)
    machine.offset_s += 60.0
    assert clock.unix_s() == pytest.approx(machine.at_s + 1000.0, abs=1e-5)
    assert clock.host_ahead_s() == pytest.approx(60.0, abs=1e-5)


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(0.1, 20)), max_size=5))
def test_a_clock_that_is_slewed_never_goes_back_and_goes_as_far_as_was_asked(
    slews: list[tuple[float, float]],
) -> None:
    machine = Machine(0.0)
    clock = Clock(machine.wall_s, machine.monotonic_s)
    moved_s, before = 0.0, clock.unix_s()
    for by_s, over_s in slews:
        clock.slew(by_s, over_s)
        for _ in range(4):
            machine.at_s += over_s / 3
            assert clock.unix_s() >= before
            before = clock.unix_s()
        moved_s += max(-FASTEST_SLEW * over_s, min(FASTEST_SLEW * over_s, by_s))
        assert clock.host_ahead_s() == pytest.approx(-moved_s, abs=1e-5)


# ---------------------------------------------------------------- two processes


@given(
    st.floats(-5, 5),
    st.lists(st.floats(0.0, 2.0), min_size=ENOUGH, max_size=200),
    st.floats(0.1, 1.0),
)
def test_the_offset_is_that_of_the_fastest_message_in_the_window(
    skew_s: float, latencies_s: list[float], every_s: float
) -> None:
    offset, heard, received = Offset(), [], NOW
    for i, latency_s in enumerate(latencies_s):
        received = max(received, NOW + i * every_s + latency_s)
        sent = NOW + i * every_s - skew_s
        offset.heard(received, sent)
        heard.append((received, received - sent))
        within = [d for at, d in heard if at >= received - WINDOW_S]
        assert offset.offset_s == (min(within) if len(heard) >= ENOUGH else None)


class Hand:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def unix_s(self) -> float:
        return self.now


def announce(at_unix_s: float, incarnation: str = "1") -> Announce:
    return made.announce(
        R1,
        incarnation=incarnation,
        at_unix_s=at_unix_s,
        model="",
        engine="",
        profile="",
        kv_blocks=1,
        context_tokens=1,
        max_slots=1,
    )


@pytest.mark.parametrize(("skew_s", "warnings"), [(0.3, 2), (-0.3, 2), (0.005, 0), (0.0, 0)])
def test_admission_warns_once_a_minute_of_a_worker_whose_clock_is_off_and_exports_by_how_much(
    skew_s: float, warnings: int
) -> None:
    hand, metrics = Hand(), Registry()
    workers = Workers(hand, 3.0, metrics)  # type: ignore[arg-type]
    with capture_logs() as logs:
        for i in range(200):  # 100 s
            hand.now = NOW + i / 2
            workers.received(announce(hand.now - skew_s))
    assert [(e["event"], e["replica"]) for e in logs] == [("clock.offset", "r1")] * warnings
    assert all(e["offset_s"] == pytest.approx(skew_s) for e in logs)
    line = next(
        x for x in exposition([metrics], "")[1].splitlines() if x.startswith(CLOCK_OFFSET + "{")
    )
    assert float(line.split()[-1]) == pytest.approx(skew_s, abs=1e-9)


def test_heartbeats_that_waited_are_no_offset() -> None:
    hand = Hand()
    workers = Workers(hand, 3.0, Registry())  # type: ignore[arg-type]
    with capture_logs() as logs:
        for i in range(20):
            hand.now = NOW + i / 2
            workers.received(announce(hand.now - (0.001 if i % 4 == 3 else 0.4)))
    assert logs == []


def test_a_flood_of_replicas_takes_bounded_room_and_costs_no_known_worker_its_place() -> None:
    hand = Hand()
    workers = Workers(hand, 3.0, Registry())  # type: ignore[arg-type]
    workers.received(announce(hand.now))
    for n in range(20_000):
        workers.received(replace(announce(hand.now), replica=ReplicaId(f"forged{n}")))
    assert len(workers.replicas) == MOST_REPLICAS
    assert "r1" in workers.replicas
