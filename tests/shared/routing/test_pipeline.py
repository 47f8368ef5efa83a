"""The stages of a pipeline: filters leave replicas out, scorers decide in their order, a picker
puts the rest in order.
"""

from collections.abc import Callable
from random import Random

from shared.routing import scorers
from shared.routing.pickers import BestFirst, Rotation
from shared.routing.pipeline import Pipeline
from shared.routing.routings import PARTS
from shared.schemas import Digest, Offer
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


def test_a_filter_of_its_own_comes_on_top() -> None:
    def small(offer: Offer, digest: Digest) -> bool:
        return digest.kv_blocks < 500

    router = Pipeline(Rotation(), filters=[small])
    digests = fleet(digest("a"), digest("b", kv_blocks=100), digest("c", accepting=False))
    assert router(offer(), digests, Random(1)) == ["b"]


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


def test_one_more_concern_is_one_more_scorer() -> None:
    """Sessions that stay where they were, say: before all but a free slot."""

    def stays(offer: Offer) -> Callable[[Digest], float]:
        return lambda digest: digest.replica == homes.get(offer.session)

    homes = {"s": "busy"}
    free_slot, *others = PARTS["attainable"].scorers
    router = Pipeline(BestFirst(), scorers=[free_slot, stays, *others])
    digests = fleet(digest("busy", backlog_s=1.0), digest("idle"))
    assert router(offer(session="s"), digests, Random(1)) == ["busy", "idle"]
    assert router(offer(session="other"), digests, Random(1)) == ["idle", "busy"]
    full = fleet(digest("busy", free_slots=0), digest("idle"))
    assert router(offer(session="s"), full, Random(1)) == ["idle", "busy"]
