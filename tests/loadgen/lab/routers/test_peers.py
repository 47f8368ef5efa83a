"""Tests of the routers of peers: each chooses as its publication says."""

from random import Random

import pytest

from loadgen.lab.routers.peers import ROUTERS
from shared.schemas import Digest
from tests.shared.routing.digests import NOW, digest, fleet, offer


def first(router: str, *digests: Digest, **asked: object) -> str:
    order = ROUTERS[router]()(offer(**asked), fleet(*digests), Random(1))
    assert sorted(order) == sorted(fleet(*digests))
    return order[0]


@pytest.mark.parametrize(
    ("router", "chosen"),
    [
        ("least load", "idle"),
        ("LMetric", "idle"),  # 100 new tokens x 1 against 20 x 7
        ("llm-d, weights", "has"),  # 3 x 0.8 + 2 x 1 + 2 x 1 against 2 x 1 + 2 x 1
        ("SGLang, cache-aware", "has"),
    ],
)
def test_a_router_weighs_what_is_found_against_who_is_there(router: str, chosen: str) -> None:
    has = digest("has", running=6, cached_tokens=80)
    assert first(router, has, digest("idle"), prompt_tokens=100) == chosen


def test_lmetric_takes_the_replica_that_has_most_among_equally_busy_ones() -> None:
    has = digest("has", running=6, cached_tokens=80)
    assert first("LMetric", has, digest("lacks", running=6), prompt_tokens=100) == "has"


def test_sglang_goes_to_the_least_load_where_loads_are_uneven_or_little_is_found() -> None:
    busy = digest("busy", running=40, cached_tokens=80)
    assert first("SGLang, cache-aware", busy, digest("idle"), prompt_tokens=100) == "idle"
    little = digest("has", running=1, cached_tokens=40)
    assert first("SGLang, cache-aware", little, digest("lacks"), prompt_tokens=100) == "lacks"


def test_headroom_packs_what_is_in_time_and_sends_the_rest_where_it_is_least_late() -> None:
    full, idle = digest("full", waiting_prefill_tokens=9000), digest("idle")
    for due_s, chosen in ((2.0, "full"), (0.5, "idle"), (0.001, "idle")):
        asked = {"prompt_tokens": 100, "next_due_unix_s": NOW + due_s}
        assert first("llm-d, headroom", full, idle, **asked) == chosen


def test_a_session_stays_where_it_is() -> None:
    digests = [digest(f"r{n}", running=n) for n in range(4)]
    places = {s: first("sticky sessions", *digests, session=s) for s in ("a", "b", "c", "d", "e")}
    assert len(set(places.values())) > 1
    busier = [digest(f"r{n}", running=9 - n) for n in range(4)]
    assert places == {s: first("sticky sessions", *busier, session=s) for s in places}
    assert first("sticky sessions", *busier) == "r3"
