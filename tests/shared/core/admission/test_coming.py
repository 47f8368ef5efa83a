"""Tests of requests that are on their way to the replica where they go on."""

import pytest

from shared.core.admission.coming import LONGEST_S, Coming
from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId, RequestKey
from tests import made

D = ReplicaId("d")


def offer(n: int, **more: float) -> Offer:
    return made.offer(f"t.{n}", prompt_tokens=160, **more)


def seen(coming: Coming) -> Digest:
    digests = {D: made.digest("d", running=1, decode_s=0.01), ReplicaId("e"): made.digest("e")}
    found = coming.seen(digests)
    assert found[ReplicaId("e")] == digests[ReplicaId("e")]
    coming.check()
    return found[D]


def test_they_take_slots_and_kv_and_time_of_iterations() -> None:
    coming = Coming()
    for n in range(2):
        coming.add(D, offer(n), 0.0)
    digest = seen(coming)
    assert (digest.running, digest.free_slots, digest.kv_free_blocks) == (3, 6, 80)
    assert digest.decode_s == pytest.approx(0.02)


def test_one_that_has_come_or_goes_elsewhere_counts_no_more() -> None:
    coming = Coming()
    coming.add(D, offer(1), 0.0)
    coming.add(ReplicaId("f"), offer(1), 0.0)  # it was declined, and placed anew
    assert seen(coming).running == 1
    coming.add(D, offer(2), 0.0)
    coming.gone(RequestKey("t.2"))
    assert seen(coming).running == 1


@pytest.mark.parametrize(("due_unix_s", "after_s"), [(2.0, 2.0), (1e9, LONGEST_S)])
def test_one_whose_first_token_is_late_counts_no_more(due_unix_s: float, after_s: float) -> None:
    coming = Coming()
    coming.add(D, offer(1, next_due_unix_s=due_unix_s), 0.0)
    coming.add(D, offer(2), after_s - 0.1)
    assert seen(coming).running == 3
    coming.add(D, offer(3), after_s)
    assert seen(coming).running == 3
