"""Tests of digests whose prefixes are as they were a while ago."""

from itertools import pairwise

from loadgen.simulator.late_prefixes import LatePrefixes
from shared.core.prefixes.kept import KeptPrefixes
from shared.core.prefixes.known import KnownPrefixes
from shared.prefix import CHAIN_TOKENS, chain_of, prefix_of
from tests import made

TEXT = list(range(4 * CHAIN_TOKENS))
PREFIX = prefix_of(chain_of(TEXT))


def test_a_router_hears_of_prefixes_late_and_of_load_at_once() -> None:
    planner, router, late = KeptPrefixes(16), KnownPrefixes(), LatePrefixes(2.0)
    found = []
    for tick in range(60):
        if tick == 10:
            planner.change(PREFIX, b"")
        if tick == 30:
            planner.change(b"", PREFIX[8:])
        seq, kept, dropped = planner.tell()
        told = made.digest(
            "r",
            at_unix_s=tick / 10,
            waiting=tick,
            prefix_seq=seq,
            prefixes_kept=kept,
            prefixes_dropped=dropped,
        )
        heard = late.of(told)
        assert heard.waiting == tick
        router.heard(heard)
        assert not router.lacking, "no digest is missed"
        found.append(router.found(told.replica, PREFIX, 10_000, tick / 10))
    changes = [tick for tick, (a, b) in enumerate(pairwise(found), start=1) if a != b]
    assert changes == [30, 50]
    assert found[29:31] + found[49:51] == [0, 4 * CHAIN_TOKENS, 4 * CHAIN_TOKENS, CHAIN_TOKENS]
