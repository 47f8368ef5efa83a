"""Tests of the stages of routing: filters leave replicas out, scorers decide in their order, a
picker puts the rest in order.
"""

from random import Random

from shared.routing import scorers
from shared.routing.pickers import BestFirst, Rotation
from shared.routing.pipeline import Pipeline
from shared.vocabulary import ServiceClass
from tests.shared.routing.digests import digest, fleet, offer


def test_every_pipeline_leaves_out_replicas_that_drain_or_lack_what_the_request_needs() -> None:
    router = Pipeline(Rotation())
    digests = fleet(
        digest("a", features=["min_p"]),
        digest("b", features=["min_p"], accepting=False),
        digest("c", features=["penalties"], adapters=["poet"]),
    )
    assert router(offer(needs=("min_p",)), digests, Random(1)) == ["a"]
    assert router(offer(needs=("adapter:poet",)), digests, Random(1)) == ["c"]
    assert router(offer(needs=("min_p", "penalties")), digests, Random(1)) == []
    assert sorted(router(offer(), digests, Random(1))) == ["a", "c"]


def test_a_silo_takes_requests_of_its_tiers_and_best_effort_ones() -> None:
    router = Pipeline(Rotation())
    digests = fleet(digest("a", tiers=["chat"]), digest("b", tiers=["batch", "summary"]))
    assert router(offer(tier="chat"), digests, Random(1)) == ["a"]
    assert router(offer(tier="batch"), digests, Random(1)) == ["b"]
    assert router(offer(tier="interactive"), digests, Random(1)) == []
    relegated = offer(tier="chat", service_class=ServiceClass.BEST_EFFORT)
    assert router(relegated, digests, Random(1)) == ["a", "b"]


def test_a_scorer_decides_where_those_before_it_are_equal() -> None:
    digests = fleet(
        digest("a", kv_free_blocks=100),
        digest("b", kv_free_blocks=900, backlog_s=1.0),
        digest("c", kv_free_blocks=900),
    )
    by_kv = Pipeline(BestFirst(), scorers=[scorers.kv_free, scorers.backlog])
    assert by_kv(offer(), digests, Random(1)) == ["c", "b", "a"]
    by_backlog = Pipeline(BestFirst(), scorers=[scorers.backlog, scorers.kv_free])
    assert by_backlog(offer(), digests, Random(1)) == ["c", "a", "b"]
